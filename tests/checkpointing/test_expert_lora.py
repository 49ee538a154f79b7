"""Checkpointing changes nothing with LoRA on the experts, in any format, layout and form, and leaves nothing behind.

Also with weights that are streamed into recycled slots, offloaded, or routed otherwise when they are recomputed.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from accelerate.hooks import remove_hook_from_module
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointError
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.lora.wrapper import ParamWrapper
from hf_qmoe.ops.torch_ops import release_scratch
from hf_qmoe.parametrize import _ADAPTED
from hf_qmoe.pending import PendingParametrization
from tests.support.experts import float_experts, inputs
from tests.support.heap import live_tensors
from tests.support.layers import CHECKPOINTING, counted, run
from tests.support.lora import FORMS, logits, lora_config, lora_tensors, packed_and_float, randomize
from tests.support.models import token_ids
from tests.support.oracle import assert_same_bits, storage_params


EXPERTS, HIDDEN, INTERMEDIATE, TOKENS, LAYERS, STEPS, RANK = 4, 32, 16, 7, 2, 3, 3
SIZES = {"num_experts": EXPERTS, "hidden": HIDDEN, "intermediate": INTERMEDIATE}
#: As usual; transposed, interleaved and with biases; without a gate.
LAYOUTS = {"plain": Qwen3MoeExperts, "gpt-oss": GptOssExperts, "non-gated": NemotronHExperts}
MODES = ("non_reentrant", "reentrant")
STORED = (("nf4", False), ("nf4", True), *((q, False) for q in ("fp4", "int8", "fp8", "bf16", "fp16")))
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
BOTH_MODES = pytest.mark.parametrize("mode", MODES)
EVERY_MODE = pytest.mark.parametrize("mode", CHECKPOINTING)
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS)


class Layer(nn.Module):
    """A norm and a query projection before packed experts, around them a residual connection."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.q_proj = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.experts = experts

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden_states + self.experts(self.q_proj(self.norm(hidden_states)), index, weights)


class Layers(nn.Module):
    """Layers that share their routing, each its own checkpointed region."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers, self.mode = nn.ModuleList(layers), "off"

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states = run(layer, self.mode, hidden_states, index, weights)
        return hidden_states


def packed_experts(form: str, layout: str = "plain", *args: Any, **kwargs: Any) -> nn.Module:
    """Experts of the sizes above in either form."""
    module = float_experts(LAYOUTS[layout], **SIZES)
    if form == "nbit":
        return ExpertsNbit.from_experts(module, *args, **kwargs)
    return PendingParametrization.pack(module, *args, **kwargs).parametrize()


def adapted(
    form: str,
    layout: str = "plain",
    quant_type: str = "nf4",
    double_quant: bool = False,
    dropout: float = 0.0,
    layers: int = LAYERS,
) -> PeftModel:
    """The same layers with the same adapters at each call."""
    torch.manual_seed(1)
    blocksize = 32 if quant_type in ("nf4", "fp4") else 64
    made = [Layer(packed_experts(form, layout, quant_type, blocksize, double_quant)) for _ in range(layers)]
    names = [f"experts.{name}" for name in ("up_proj" if layout == "non-gated" else "gate_up_proj", "down_proj")]
    fields = {"r": RANK, "lora_alpha": RANK, "target_modules": ["q_proj"], "target_parameters": names}
    model = get_peft_model(Layers(made), LoraConfig(lora_dropout=dropout, **fields))
    randomize(model, std=0.2)
    assert len(lora_tensors(model)) == 6 * layers
    assert sum(isinstance(module, ParamWrapper) for module in model.modules()) == 2 * layers
    return model.train()


def layers_of(model: PeftModel) -> nn.ModuleList:
    """The layers inside the adapted model."""
    return model.get_base_model().layers


def experts_of(model: PeftModel) -> list[nn.Module]:
    """The packed modules inside the wrappers."""
    return [layer.experts.get_base_layer() for layer in layers_of(model)]


def packed_state(module: nn.Module) -> dict[str, Tensor]:
    """Copies of bytes, scales and metadata."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items() if not tensor.is_floating_point()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, dtypes and bits."""
    assert expected
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def assert_nothing_global() -> None:
    """No state beyond the model is left of a forward."""
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})
    assert dict(_ADAPTED.get()) == {}
    assert torch.is_grad_enabled()


def count_live() -> int:
    """Number of live tensors."""
    release_scratch()
    return len(live_tensors())


def leaves(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded, trainable hidden states and routing weights; one expert is never hit."""
    torch.manual_seed(2)
    hidden_states, index, weights = inputs(TOKENS, 2, EXPERTS - 1, HIDDEN, dtype).requires_grad_()
    return hidden_states, index, weights


@dataclass(frozen=True)
class Step:
    """Loss, and the gradients of hidden states, routing weights and all adapters."""

    loss: Tensor
    gradients: dict[str, Tensor]


def one_step(model: PeftModel, mode: str, dtype: torch.dtype = torch.float32, autocast: bool = False) -> Step:
    """Forward, backward, and a step of SGD."""
    model.get_base_model().mode = mode
    hidden_states, index, weights = leaves(dtype)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        loss = model(hidden_states, index, weights).float().square().mean()
    loss.backward()
    gradients = {name: p.grad for name, p in lora_tensors(model).items()}
    gradients |= {"hidden_states": hidden_states.grad, "top_k_weights": weights.grad}
    with torch.no_grad():
        for parameter in lora_tensors(model).values():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return Step(loss.detach(), gradients)


def train(model: PeftModel, mode: str, dtype: torch.dtype = torch.float32, autocast: bool = False) -> list[Step]:
    """A few steps, and what they leave behind."""
    before, steps, alive = packed_state(model), [], []
    torch.manual_seed(3)
    state = torch.get_rng_state()
    for _ in range(STEPS):
        torch.set_rng_state(state)
        steps.append(one_step(model, mode, dtype, autocast))
        state = torch.get_rng_state()
        assert_nothing_global()
        if len(steps) != 2:  # counting takes longer than the steps
            alive.append(count_live() - sum(1 + len(step.gradients) for step in steps))
    assert alive[1] == alive[0]
    assert_same(packed_state(model), before)
    return steps


@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["", "dropout"])
@EVERY_LAYOUT
@BOTH_FORMS
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params(STORED))
def test_matrix(quant_type: str, double_quant: bool, form: str, layout: str, dropout: float) -> None:
    """Losses and every gradient of three steps are the same bits without, with non-reentrant and reentrant."""
    histories = {mode: train(adapted(form, layout, quant_type, double_quant, dropout), mode) for mode in CHECKPOINTING}
    assert_identical(histories)


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16", "autocast"])
@BOTH_FORMS
def test_low_precision(form: str, autocast: bool) -> None:
    """The same of a bfloat16 model, and of one under autocast."""
    dtype = torch.float32 if autocast else torch.bfloat16
    histories = {}
    for mode in CHECKPOINTING:
        model = adapted(form, "gpt-oss", double_quant=True, dropout=0.1).to(dtype)
        histories[mode] = train(model, mode, dtype, autocast)
        assert {p.dtype for p in lora_tensors(model).values()} == {dtype}
    assert_identical(histories)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
def test_other_implementations(layout: str, implementation: str) -> None:
    """The same of transformers' other forwards of experts, which use the whole stack at once."""
    histories = {}
    for mode in CHECKPOINTING:
        model = adapted("parametrize", layout, dropout=0.1)
        for module in experts_of(model):
            module.config._experts_implementation = implementation
        histories[mode] = train(model, mode)
    assert_identical(histories)


def assert_identical(histories: dict[str, list[Step]]) -> None:
    """Runs with checkpointing are the one without, which is a real one."""
    reference = histories["off"]
    assert len({step.loss.item() for step in reference}) == STEPS
    for step in reference:
        assert torch.isfinite(step.loss)
        assert len(step.gradients) == 6 * LAYERS + 2
        assert all(gradient.any() for gradient in step.gradients.values())
    for mode in MODES:
        for step, expected in zip(histories[mode], reference, strict=True):
            assert_same_bits(step.loss, expected.loss)
            assert_same(step.gradients, expected.gradients)


# -- models of transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["before", "after"])
@BOTH_MODES
@BOTH_FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_enabled_before_or_after_the_adapter(family: str, form: str, mode: str, order: str) -> None:
    """``gradient_checkpointing_enable`` on the model or on the `PeftModel`: the run without, bit for bit."""

    def gradients(order: str | None) -> tuple[Tensor, dict[str, Tensor], int]:
        model, _ = packed_and_float(family, form)
        if order == "before":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[mode])
        torch.manual_seed(0)
        model = get_peft_model(model, lora_config(lora_dropout=0.1)).train()
        if order == "after":
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTING[mode])
        model.enable_input_require_grads()
        randomize(model)
        ids = token_ids()
        torch.manual_seed(4)
        with counted(next(m for m in model.modules() if isinstance(m, ParamWrapper))) as calls:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        assert_nothing_global()
        return loss.detach(), {name: p.grad for name, p in lora_tensors(model).items()}, calls[0]

    (expected_loss, expected, once), (loss, actual, twice) = gradients(None), gradients(order)
    assert (once, twice) == (1, 2)  # checkpointing is really on
    assert all(gradient.any() for gradient in expected.values())
    assert_same_bits(loss, expected_loss)
    assert_same(actual, expected)


# -- errors -----------------------------------------------------------------------------------------------------------


class Failing(nn.Module):
    """An activation that raises at its n-th call, from 1."""

    def __init__(self, activation: nn.Module, at: int) -> None:
        super().__init__()
        self.activation, self.left = activation, at

    def forward(self, rows: Tensor) -> Tensor:
        """What the activation gives, until it raises."""
        self.left -= 1
        if self.left == 0:
            raise RuntimeError("the activation failed")
        return self.activation(rows)


@contextmanager
def failing(module: nn.Module, at: int) -> Iterator[None]:
    """`module` with an activation that raises once."""
    activation = module.act_fn
    module.act_fn = Failing(activation, at)
    yield
    module.act_fn = activation


@pytest.mark.parametrize(
    ("mode", "when"), [("off", "forward"), *((m, w) for m in MODES for w in ("forward", "recomputation"))]
)
@BOTH_FORMS
def test_an_error_leaves_clean_state(form: str, mode: str, when: str) -> None:
    """After an activation that raised, several times, nothing is left and the next steps are those of a new model."""
    expected = train(adapted(form), mode)
    model, alive = adapted(form), []
    module = experts_of(model)[-1]
    calls = 1 if form == "nbit" else EXPERTS - 1  # an eager loop calls it for each expert that was hit
    for _ in range(3):
        with failing(module, 1 if when == "forward" else calls + 1):
            try:
                one_step(model, mode)
            except RuntimeError as error:
                assert str(error) == "the activation failed"  # noqa: PT017  # `raises` would keep its frames alive
            else:
                raise AssertionError("nothing was raised")
        assert_nothing_global()
        model.zero_grad()
        alive.append(count_live())
    assert alive[2] == alive[1]
    for step, reference in zip(train(model, mode), expected, strict=True):
        assert_same_bits(step.loss, reference.loss)
        assert_same(step.gradients, reference.gradients)


# -- a routing that is another one when it is recomputed --------------------------------------------------------------


def flips(index: Tensor) -> dict[str, Tensor]:
    """Other routings: two tokens exchanged, another expert with as many tokens, other numbers of tokens, a tie."""
    renamed = torch.tensor([1, 0, 3, 2])[index]
    exchanged, slots = index.clone(), index.clone()
    exchanged[0], exchanged[1] = index[1], index[0]
    slots[0] = index[0].flip(0)
    return {"exchanged": exchanged, "renamed": renamed, "fewer": torch.zeros_like(index), "slots-swapped": slots}


@pytest.mark.parametrize("implementation", ["nbit", "eager", "grouped_mm", "batched_mm"])
@BOTH_MODES
@pytest.mark.parametrize("kind", ["exchanged", "renamed", "fewer", "slots-swapped"])
def test_flipped_routing(kind: str, mode: str, implementation: str) -> None:
    """The gradients are those of the recomputed routing, and `ExpertsNbit` always gives them.

    Of foreign forwards torch may refuse those that save other tensors; it never gives those of neither, never NaN.
    """
    model = adapted("nbit" if implementation == "nbit" else "parametrize", layers=1)
    (module,) = experts_of(model)
    if implementation != "nbit":
        module.config._experts_implementation = implementation
    index = leaves()[1]
    direction = torch.randn(TOKENS, HIDDEN)
    other = flips(index)[kind]

    def step(first: Tensor, second: Tensor | None) -> dict[str, Tensor]:
        hidden_states, _, weights = leaves()
        routings = iter([first, second])
        model.zero_grad()
        out = run(lambda x, w: model(x, next(routings), w), "off" if second is None else mode, hidden_states, weights)
        out.backward(direction)
        gradients = {name: p.grad.clone() for name, p in lora_tensors(model).items()}
        return gradients | {"hidden_states": hidden_states.grad, "top_k_weights": weights.grad}

    expected, unflipped = step(other, None), step(index, None)
    assert not torch.equal(expected["hidden_states"], unflipped["hidden_states"])
    try:
        actual = step(index, other)
    except CheckpointError:
        assert mode == "non_reentrant"
        assert implementation == "eager"  # the others save tensors of the same shapes for every routing
        assert kind != "slots-swapped"
    else:
        assert_same(actual, expected)
    assert_nothing_global()


# -- weights that are streamed into recycled slots --------------------------------------------------------------------


SLOTS = 2


class StreamedLayer(nn.Module):
    """An adapted layer whose packed weights, scales and all, lie in a slot that each call fills anew.

    `take` gives the slot of a call: tensors by name, which the previous borrower's values are in.
    """

    def __init__(self, layer: nn.Module, take: Callable[[], dict[str, nn.Parameter]]) -> None:
        super().__init__()
        self.layer, self.take = layer, take
        self.stored = {name: tensor.clone() for name, tensor in packed_parameters(self.experts).items()}

    @property
    def experts(self) -> nn.Module:
        """The packed module below the wrappers."""
        return self.layer.experts.get_base_layer()

    def forward(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        slot = self.take()
        for name, tensor in self.stored.items():
            with torch.no_grad():
                slot[name].copy_(tensor)
            owner, _, leaf = name.rpartition(".")
            self.experts.get_submodule(owner).register_parameter(leaf, slot[name])
        return self.layer(hidden_states, index, weights)


def packed_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Bytes and scales of a packed module."""
    return {name: p for name, p in module.named_parameters() if not p.is_floating_point()}


def streamed(model: PeftModel, policy: str) -> list[nn.Module]:
    """The layers of `model` over a few slots; ``in-turn``, a recomputation meets another slot than its forward did."""
    slots = [packed_parameters(copy.deepcopy(experts_of(model)[0])) for _ in range(SLOTS)]
    lent = iter(range(10**6))
    takes = [lambda i=i: slots[(i if policy == "fixed" else next(lent)) % SLOTS] for i in range(len(layers_of(model)))]
    return [StreamedLayer(layer, take) for layer, take in zip(layers_of(model), takes, strict=True)]


def streamed_step(model: PeftModel, layers: list[nn.Module], mode: str) -> dict[str, Tensor]:
    """Output, and gradients of hidden states, routing weights and all adapters."""
    hidden_states, index, weights = leaves()
    out = hidden_states
    for layer in layers:
        out = run(layer, mode, out, index, weights)
    out.square().mean().backward()
    gradients = {name: p.grad for name, p in lora_tensors(model).items()}
    return gradients | {"out": out.detach(), "hidden_states": hidden_states.grad, "top_k_weights": weights.grad}


@BOTH_MODES
@pytest.mark.parametrize("policy", ["fixed", "in-turn"])
@BOTH_FORMS
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params((("nf4", True), ("int8", False))))
def test_recycled_slots(quant_type: str, double_quant: bool, form: str, policy: str, mode: str) -> None:
    """Six layers over two slots: each gradient is that of six private modules."""
    private, model = (adapted(form, "gpt-oss", quant_type, double_quant, layers=6) for _ in range(2))
    expected = streamed_step(private, list(layers_of(private)), "off")
    layers = streamed(model, policy)
    assert all(tensor.any() for tensor in expected.values())
    assert len(expected) == 6 * 6 + 3
    assert_same(streamed_step(model, layers, mode), expected)
    assert len({p.data_ptr() for m in experts_of(model) for p in packed_parameters(m).values()}) == SLOTS * (
        len(packed_parameters(experts_of(model)[0]))
    )


@BOTH_FORMS
@pytest.mark.parametrize(("quant_type", "double_quant"), storage_params((("nf4", True), ("bf16", False))))
def test_recycled_slots_without_checkpointing_raise(quant_type: str, double_quant: bool, form: str) -> None:
    """Where nothing is recomputed, the overwritten slot is an error in backward."""
    model = adapted(form, "plain", quant_type, double_quant, layers=4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        streamed_step(model, streamed(model, "fixed"), "off")


@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
@BOTH_FORMS
def test_overwritten_factors_raise(form: str, factor: str) -> None:
    """An optimizer step between forward and backward is an error too."""
    model = adapted(form, layers=1)
    hidden_states, index, weights = leaves()
    out = model(hidden_states, index, weights)
    with torch.no_grad():
        for name, parameter in lora_tensors(model).items():
            if factor in name and "experts" in name:
                parameter.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        out.sum().backward()


# -- offloading -------------------------------------------------------------------------------------------------------


CPU = torch.device("cpu")


def _on_cpu(module: nn.Module, path: Path) -> None:
    cpu_offload(module, execution_device=CPU)


def _on_disk(module: nn.Module, path: Path) -> None:
    disk_offload(module, path, execution_device=CPU)


BOTH_PLACES = pytest.mark.parametrize("place", [_on_cpu, _on_disk], ids=["cpu", "disk"])


def assert_offloaded(module: nn.Module) -> None:
    """No parameter takes memory."""
    assert [name for name, p in module.named_parameters() if not p.is_meta] == []


@EVERY_MODE
@BOTH_PLACES
@pytest.mark.parametrize("layout", ["plain", "gpt-oss"])
@BOTH_FORMS
def test_offloaded_experts(
    form: str, layout: str, place: Callable[[nn.Module, Path], None], mode: str, tmp_path: Path
) -> None:
    """Of adapted experts that are offloaded themselves, steps equal those in memory; nothing stays loaded."""
    model, in_memory = (adapted(form, layout, double_quant=True, dropout=0.1) for _ in range(2))
    before = [module.state_dict() for module in experts_of(in_memory)]
    for index, module in enumerate(experts_of(model)):
        place(module, tmp_path / str(index))
    alive = []
    for seed in range(STEPS):
        steps = []
        for each, own_mode in ((model, mode), (in_memory, "off")):
            torch.manual_seed(seed)
            steps.append(one_step(each, own_mode))
        assert_same_bits(steps[0].loss, steps[1].loss)
        assert_same(steps[0].gradients, steps[1].gradients)
        del steps
        assert_nothing_global()
        for module in experts_of(model):
            assert_offloaded(module)
        alive.append(count_live())
    assert alive[2] == alive[0]
    for module, tensors in zip(experts_of(model), before, strict=True):
        remove_hook_from_module(module, recurse=True)
        assert_same(module.state_dict(), tensors)


@BOTH_PLACES
@BOTH_FORMS
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_offloaded_as_a_whole(
    family: str, form: str, place: Callable[[nn.Module, Path], None], tmp_path: Path
) -> None:
    """An adapted model that is offloaded with its adapter gives the same logits, or says that it cannot."""
    model = get_peft_model(packed_and_float(family, form)[0], lora_config())
    randomize(model)
    expected = logits(model)
    place(model, tmp_path)
    assert_right_or_refused(lambda: logits(model), expected)
    assert_right_or_refused(lambda: logits(model), expected)
    assert_nothing_global()


@BOTH_FORMS
@pytest.mark.parametrize("targets", [[], ["q_proj"]], ids=["experts", "and-attention"])
def test_adapted_after_offloading(targets: list[str], form: str) -> None:
    """`get_peft_model` on an offloaded model makes an adapter that works, or says that it cannot."""
    config = lora_config(target_modules=targets)
    model = get_peft_model(packed_and_float("qwen3_moe", form)[0], config)
    randomize(model)
    expected, offloaded = logits(model), packed_and_float("qwen3_moe", form)[0]
    cpu_offload(offloaded, execution_device=CPU)

    def adapt() -> Tensor:
        model = get_peft_model(offloaded, config)
        randomize(model)
        return logits(model)

    assert_right_or_refused(adapt, expected)


def assert_right_or_refused(call: Callable[[], Tensor], expected: Tensor) -> None:
    """`call` gives `expected`, or an error that speaks of offloading."""
    try:
        actual = call()
    except (RuntimeError, ValueError) as error:
        assert "offload" in str(error)  # noqa: PT017
    else:
        assert_same_bits(actual, expected)
