"""`QMoELinear4bit` in models and alone: bitsandbytes' bits, no side effects, exact over recycled memory."""

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import bitsandbytes
import bitsandbytes.functional as bnb_functional
import pytest
import torch
from bitsandbytes.nn import Linear4bit
from bitsandbytes.nn.modules import has_avx512bf16
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hf_qmoe import QMoEConfig, matmul_4bit
from hf_qmoe.linears import QMoELinear4bit, replace_linears
from tests.support.checkpoints import load
from tests.support.layers import CHECKPOINTING, run, trainable_gradients
from tests.support.models import token_ids
from tests.support.oracle import NATIVE_DTYPES, assert_same_bits, bnb_dequantize, dtype_name, storage_params


HIDDEN, LAYERS, SLOTS, TOKENS = 128, 8, 2, 10
Product = Callable[[Linear4bit, Tensor], Tensor]
by_format = pytest.mark.parametrize(
    ("quant_type", "nested"), storage_params([(q, d) for q in ("nf4", "fp4") for d in (False, True)])
)
with_checkpointing = pytest.mark.parametrize("mode", ["non_reentrant", "reentrant"])


def packed_linear(
    quant_type: str = "nf4",
    nested: bool = False,
    compute_dtype: torch.dtype | None = torch.float32,
    bias: bool = True,
    columns: int = HIDDEN,
) -> QMoELinear4bit:
    """A random `nn.Linear`, replaced as the package replaces those of a model."""
    model = nn.Sequential(nn.Linear(columns, HIDDEN, bias))
    config = QMoEConfig(bnb_4bit_quant_type=quant_type, bnb_4bit_use_double_quant=nested)
    replace_linears(model, (), config, torch.float32)
    model[0].compute_dtype = compute_dtype
    return model[0]


def stock_linear(layer: QMoELinear4bit) -> Linear4bit:
    """bitsandbytes' module on the same packed weight, with a bias of its own."""
    stock = Linear4bit(HIDDEN, HIDDEN, layer.bias is not None, layer.compute_dtype, quant_type=layer.weight.quant_type)
    stock.weight = layer.weight
    if layer.bias is not None:
        stock.bias = nn.Parameter(layer.bias.detach().clone())
    return stock


def tensors_of(layer: Linear4bit) -> dict[str, Tensor]:
    """The packed bytes and every tensor of their state."""
    state = layer.weight.quant_state
    tensors = {"packed": layer.weight.data, "absmax": state.absmax, "code": state.code}
    if state.nested:
        nested = {"offset": state.offset, "nested_absmax": state.state2.absmax, "nested_code": state.state2.code}
        tensors |= nested
    return tensors


def overwrite(layer: Linear4bit, tensors: dict[str, Tensor]) -> None:
    """Copies `tensors` in place over what `layer` holds, under the eyes of the version counters."""
    with torch.no_grad():
        own = tensors_of(layer) | {"packed": layer.weight}
        assert own.keys() == tensors.keys()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


@pytest.mark.parametrize("options", [{}, {"experts_double_quant": True, "bnb_4bit_use_double_quant": True}])
def test_linears_of_a_model(tiny_checkpoints: dict[str, Path], tmp_path: Path, options: dict[str, object]) -> None:
    """Loaded in 4 bit, or reloaded from what that saved, each quantized linear is ours, and bitsandbytes' too."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(**options))
    model.save_pretrained(tmp_path)
    for loaded in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        linears = {name: m for name, m in loaded.named_modules() if isinstance(m, Linear4bit)}
        assert {name.rpartition(".")[2] for name in linears} == {"q_proj", "k_proj", "v_proj", "o_proj"}
        assert len(linears) == 2 * 4
        assert all(type(m) is QMoELinear4bit for m in linears.values())


@pytest.mark.parametrize("input_dtype", NATIVE_DTYPES, ids=dtype_name)
@pytest.mark.parametrize("compute_dtype", NATIVE_DTYPES, ids=dtype_name)
@by_format
def test_forward_has_the_bits_of_bitsandbytes(
    quant_type: str, nested: bool, compute_dtype: torch.dtype, input_dtype: torch.dtype
) -> None:
    """In train mode, with and without a bias and gradients, for each compute dtype and dtype of the input."""
    for bias in (False, True):
        layer = packed_linear(quant_type, nested, compute_dtype, bias)
        stock = stock_linear(layer)
        for x in (torch.randn(7, HIDDEN), torch.randn(2, 5, HIDDEN), torch.randn(HIDDEN)):
            expected = stock(x.to(input_dtype))
            assert expected.dtype == input_dtype
            assert_same_bits(layer(x.to(input_dtype)), expected)
            assert_same_bits(layer(x.to(input_dtype).requires_grad_()), expected)


@pytest.mark.parametrize("input_dtype", NATIVE_DTYPES, ids=dtype_name)
def test_without_a_compute_dtype_the_inputs_is_taken(input_dtype: torch.dtype) -> None:
    """At each call anew, where bitsandbytes settles on the dtype of the first."""
    layer = packed_linear(compute_dtype=None)
    for dtype in (torch.float32, input_dtype):
        x = torch.randn(7, HIDDEN).to(dtype)
        named = packed_linear(compute_dtype=dtype)
        named.weight, named.bias = layer.weight, layer.bias
        assert_same_bits(layer(x), stock_linear(named)(x))


@pytest.mark.parametrize("compute_dtype", [None, *NATIVE_DTYPES], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_forward_sets_nothing_on_the_module(compute_dtype: torch.dtype | None, training: bool) -> None:
    """Attributes, the bias and its dtype, the weight, its state and their versions are those from before."""
    layer = packed_linear(nested=True, compute_dtype=compute_dtype).train(training)

    def look() -> list[object]:
        state, nested = layer.weight.quant_state, layer.weight.quant_state.state2
        attributes = [{k: (id(v), str(v)) for k, v in vars(o).items()} for o in (layer, layer.weight, state, nested)]
        tensors = {**tensors_of(layer), "bias": layer.bias}
        found = [(n, id(t), t.data_ptr(), t.dtype, t._version) for n, t in tensors.items() if n != "packed"]
        packed = layer.weight
        return [attributes, found, packed.data_ptr(), packed.dtype, packed._version, layer.training]

    before = look()
    for dtype in NATIVE_DTYPES:
        layer(torch.randn(7, HIDDEN, dtype=dtype))
        layer(torch.randn(HIDDEN, dtype=dtype, requires_grad=True)).sum().backward()
        assert look() == before


def test_weight_rewritten_for_inference() -> None:
    """bitsandbytes' format for AVX512-BF16 has no gradient: asking for one raises, of the input or of the bias."""
    layer = packed_linear()
    rewritten, state = bnb_functional._convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
    x, bias = torch.randn(7, HIDDEN).bfloat16(), torch.randn(HIDDEN).bfloat16()
    for trained in (x, bias):
        trained.requires_grad_()
        with pytest.raises(RuntimeError, match="no gradient"):
            matmul_4bit(x, rewritten, state, bias=bias)
        if has_avx512bf16():
            with torch.no_grad():
                expected = bitsandbytes.matmul_4bit(x, rewritten, state, bias=bias)
                assert_same_bits(matmul_4bit(x, rewritten, state, bias=bias), expected)
        trained.requires_grad_(False)


@pytest.mark.parametrize("requires_grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("columns", [HIDDEN, 96], ids=["whole-blocks", "uneven-rows"])
@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize("what", ["function", "module"])
def test_compiles_to_one_graph(what: str, nested: bool, columns: int, backend: str, requires_grad: bool) -> None:
    """``fullgraph=True`` takes it, as it takes bitsandbytes' own, in training too, with the same bits as eager."""
    torch.compiler.reset()
    layer = packed_linear(nested=nested, columns=columns)
    packed, state, bias = layer.weight.data, layer.weight.quant_state, layer.bias.requires_grad_(requires_grad)
    functions = {"function": lambda x: matmul_4bit(x, packed, state, bias=bias).sin(), "module": layer}
    x = torch.randn(7, columns).requires_grad_(requires_grad)
    expected = functions[what](x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's, about a cached function
        out = torch.compile(functions[what], backend=backend, fullgraph=True)(x)
    assert_same_bits(out.detach(), expected.detach())
    if requires_grad:
        gradients = (torch.autograd.grad(result.square().sum(), (x, bias)) for result in (out, expected))
        for compiled, eager in zip(*gradients, strict=True):
            assert_same_bits(compiled, eager)


class StreamedLayer(nn.Module):
    """A residual layer with a trainable norm; its weight is copied into a slot at each call, if there are any."""

    def __init__(self, linear: QMoELinear4bit, index: int) -> None:
        super().__init__()
        self.norm, self.linear, self.index = nn.RMSNorm(HIDDEN, eps=1e-6), linear, index
        self.slots: list[QMoELinear4bit] = []
        self.product: Product = QMoELinear4bit.forward

    def forward(self, x: Tensor) -> Tensor:
        linear = self.linear
        if self.slots:
            linear = self.slots[self.index % SLOTS]
            overwrite(linear, tensors_of(self.linear))
        return x + self.product(linear, self.norm(x))


def layers(quant_type: str = "nf4", nested: bool = False) -> list[StreamedLayer]:
    """Layers with a weight of their own, the same ones at each call."""
    torch.manual_seed(1)
    return [StreamedLayer(packed_linear(quant_type, nested, bias=False), i) for i in range(LAYERS)]


def streamed(private: list[StreamedLayer], product: Product = QMoELinear4bit.forward) -> list[StreamedLayer]:
    """The same layers over two slots."""
    modules = copy.deepcopy(private)
    slots = [copy.deepcopy(private[0].linear) for _ in range(SLOTS)]
    for module in modules:
        module.slots, module.product = slots, product
    return modules


def step(modules: list[StreamedLayer], mode: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and gradients of the input and of all norms."""
    batch = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(2)).requires_grad_()
    hidden_states = batch
    for module in modules:
        module.zero_grad()
        hidden_states = run(module, mode, hidden_states)
    hidden_states.square().mean().backward()
    gradients = {f"{m.index}.norm": trainable_gradients(m.norm)["weight"] for m in modules}
    return hidden_states.detach(), gradients | {"input": batch.grad}


@with_checkpointing
@by_format
def test_recycled_slots_give_the_gradients_of_private_ones(quant_type: str, nested: bool, mode: str) -> None:
    """Eight layers over two slots, bytes and every tensor of the state streamed: each gradient is the private one."""
    private = layers(quant_type, nested)
    expected_out, expected = step(private, "off")
    out, gradients = step(streamed(private), mode)
    assert_same_bits(out, expected_out)
    assert len(expected) == LAYERS + 1
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().sum() > 0
        assert_same_bits(gradients[name], gradient)


def test_recycled_slots_show_what_bitsandbytes_does() -> None:
    """The control: with its own forward the output is right and the gradients, all but the last layers', are not."""
    private = layers()
    expected_out, expected = step(private, "off")
    out, gradients = step(streamed(private, Linear4bit.forward), "non_reentrant")
    assert_same_bits(out, expected_out)
    wrong = {name for name, gradient in expected.items() if not torch.equal(gradients[name], gradient)}
    assert wrong == {"input"} | {f"{i}.norm" for i in range(LAYERS - SLOTS)}


@by_format
def test_recycled_slots_without_checkpointing_raise(quant_type: str, nested: bool) -> None:
    """Where nothing is recomputed, the overwritten slot is an error in backward, not a wrong gradient."""
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(streamed(layers(quant_type, nested)), "off")


@pytest.mark.parametrize("compute_dtype", NATIVE_DTYPES, ids=dtype_name)
@by_format
def test_checkpointing_is_bit_identical(quant_type: str, nested: bool, compute_dtype: torch.dtype) -> None:
    """Output and gradients without checkpointing, with the non-reentrant kind and with the reentrant one."""
    results = {}
    for mode in CHECKPOINTING:
        modules = layers(quant_type, nested)
        for module in modules:
            module.linear.compute_dtype = compute_dtype
        results[mode] = step(modules, mode)
    expected_out, expected = results.pop("off")
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    for out, gradients in results.values():
        assert_same_bits(out, expected_out)
        for name, gradient in expected.items():
            assert_same_bits(gradients[name], gradient)


def pickled(layer: QMoELinear4bit) -> QMoELinear4bit:
    """`layer` written and read."""
    return pickle.loads(pickle.dumps(layer))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@by_format
def test_copies(quant_type: str, nested: bool, duplicate: Callable[[QMoELinear4bit], QMoELinear4bit]) -> None:
    """A copy is of the same class, with the same output and gradient, and shares no memory with the original."""
    layer = packed_linear(quant_type, nested)
    other = duplicate(layer)
    assert type(other) is QMoELinear4bit
    x, results = torch.randn(7, HIDDEN), []
    for module in (layer, other):
        argument = x.clone().requires_grad_()
        out = module(argument)
        out.square().sum().backward()
        results.append((out.detach(), argument.grad))
    for actual, expected in zip(*results, strict=True):
        assert_same_bits(actual, expected)
    for name, tensor in tensors_of(layer).items():
        assert_same_bits(tensors_of(other)[name], tensor)
        assert tensors_of(other)[name].data_ptr() != tensor.data_ptr()


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
def test_lora_on_a_linear_trains_and_merges(tiny_checkpoints: dict[str, Path], nested: bool) -> None:
    """An adapter on q_proj learns; merged, the weight is base plus update to within what 4 bit can hold."""
    config = QMoEConfig(bnb_4bit_use_double_quant=nested)
    model = load(tiny_checkpoints["qwen3_moe"], config, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=4, lora_alpha=16))
    name = "model.layers.0.self_attn.q_proj"
    adapter = model.get_submodule(f"base_model.model.{name}")
    assert type(adapter.base_layer) is QMoELinear4bit
    base = dequantized(adapter.base_layer)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    ids, losses = token_ids(), []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    update = adapter.get_delta_weight("default").detach()
    merged = model.eval().merge_and_unload()
    linear = merged.get_submodule(name)
    assert type(linear) is QMoELinear4bit
    assert linear.weight.quant_state.nested == nested
    # Neighbouring values of nf4 lie at most 0.31 apart, in units of the largest weight of a block.
    error = (dequantized(linear) - (base + update)).abs().max()
    assert error < 0.17 * (base + update).abs().max()
    assert update.abs().max() > error
    x = torch.randn(3, linear.in_features, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, dequantized(linear).sum(0).expand(3, -1), rtol=1e-5, atol=1e-5)


def dequantized(layer: Linear4bit) -> Tensor:
    """The weight ``[N, K]`` in float32, by bitsandbytes."""
    state = copy.deepcopy(layer.weight.quant_state)
    return bnb_dequantize(layer.weight.data, state, torch.float32, (layer.out_features, layer.in_features))
