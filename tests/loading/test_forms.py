"""The parametrized form of packed experts: the files of `ExpertsNbit`, and the results of the float model."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import (
    AutoModelForCausalLM,
    InklingTextConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_qmoe import ExpertsNbit, QMoEConfig, quantize_experts
from hf_qmoe.parametrize import packed_parametrizations
from tests.support.checkpoints import (
    assert_same_tensors,
    digest,
    edited,
    load,
    logits,
    reference_scales,
    reference_unpack,
    tensors_on_disk,
    with_config,
)
from tests.support.models import FAMILIES, VOCAB, experts_of, tiny_config, token_ids
from tests.support.state import assert_same_state, snapshot


FORMS = ("nbit", "parametrize")
VARIANTS: dict[str, dict[str, object]] = {
    "nf4": {},
    "nf4_double": {"experts_double_quant": True},
    "int8": {"experts_quant_type": "int8"},
    "bf16": {"experts_quant_type": "bf16"},
}
EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES)
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)
BOTH_FORMS = pytest.mark.parametrize("form", FORMS)
BOTH_WAYS = pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])


def config_of(form: str, variant: str = "nf4", **changes: object) -> QMoEConfig:
    """A config for one form and format that leaves linears alone, unless `changes` says otherwise."""
    return QMoEConfig(**({"experts_module": form, "quantize_linears": False} | VARIANTS[variant] | changes))


def forms_of(model: nn.Module) -> dict[str, str]:
    """The form of each packed module by name."""
    nbit = {name: "nbit" for name, module in model.named_modules() if isinstance(module, ExpertsNbit)}
    found = (name for name, module in model.named_modules() if any(True for _ in packed_parametrizations(module)))
    return nbit | dict.fromkeys(found, "parametrize")


def assert_form(model: nn.Module, form: str) -> None:
    """Every experts module has this form."""
    assert set(forms_of(model).values()) == {form}
    assert forms_of(model).keys() == experts_of(model).keys() != set()


def decoded(tensors: dict[str, Tensor], key: str, quant_type: str) -> Tensor:
    """What a stack in a file stands for by ``docs/format.md``: fp32 ``[E, N, K]``."""
    bits = {suffix: tensors.get(f"{key}_{suffix}") for suffix in ("absmax", "nested_absmax", "nested_offset")}
    scales = {s: t.view(torch.float32) if t is not None and t.dtype == torch.int32 else t for s, t in bits.items()}
    packed = tensors[key]

    class Stored:  # what `reference_scales` reads of a module
        def stack(self, _: str) -> object:
            return type("Stack", (), scales)

    experts = range(packed.shape[0])
    return torch.stack([reference_unpack(packed[e], reference_scales(Stored(), key, e), quant_type) for e in experts])


def twin_of(model: PreTrainedModel, path: Path, quant_type: str, read: Callable[[], nn.Module]) -> nn.Module:
    """The float model that `read` gives, with the weights that `model`'s saved bytes stand for; saves into `path`."""
    model.save_pretrained(path)
    tensors = {}
    for name, tensor in tensors_on_disk(path).items():  # in the spelling of the family's own checkpoints
        for theirs, ours in {"block_sparse_moe": "mlp", ".moe.down_proj.weight": ".mlp.experts.down_proj"}.items():
            name = name.replace(theirs, ours)
        tensors[name.split("layers.")[-1]] = tensor
    twin, replaced = read(), 0
    for module_name, module in twin.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{module_name}.{name}".split("layers.")[-1]
            if parameter.ndim == 3 and tensors[key].dtype == torch.uint8:
                weights = decoded(tensors, key, quant_type)
                is_transposed = getattr(module, "is_transposed", False)
                parameter.data = weights.transpose(1, 2).contiguous() if is_transposed else weights
                replaced += 1
    assert replaced >= 2
    return twin


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest element: sums in another order, in fp32."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients of the loss for every parameter that has one."""
    model(token_ids(), labels=token_ids(seed=1), use_cache=False).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_computes_as(model: nn.Module, twin: nn.Module) -> None:
    """Logits, and the gradients of everything that is not packed, are those of `twin`."""
    assert_close(logits(model), logits(twin))
    actual, expected = gradients(model), gradients(twin)
    packed = dict(twin.named_parameters()).keys() - {n for n, p in model.named_parameters() if p.is_floating_point()}
    assert actual.keys() == expected.keys() - packed
    assert any(name.endswith("embed_tokens.weight") for name in actual)
    for name, gradient in actual.items():
        assert_close(gradient, expected[name])


def files(path: Path) -> dict[str, str]:
    """Digests of weights and index."""
    return {name: value for name, value in digest(path).items() if "safetensors" in name}


# -- what it computes -----------------------------------------------------------------------------------------------


@EVERY_VARIANT
@EVERY_FAMILY
def test_logits_and_gradients(family: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Logits and all gradients equal those of the float model with the weights that the saved bytes stand for."""
    model = load(tiny_checkpoints[family], config_of("parametrize", variant), dtype=torch.float32)
    assert_form(model, "parametrize")
    quant_type = model.config.quantization_config.experts_quant_type
    twin = twin_of(model, tmp_path, quant_type, lambda: load(tiny_checkpoints[family], dtype=torch.float32))
    assert_computes_as(model, twin)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=["bf16", "fp32", "fp16"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_compute_dtype(family: str, dtype: torch.dtype, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`bnb_4bit_compute_dtype` is the dtype of the products, now and after a reload; outputs keep the model's."""
    config = config_of("parametrize", bnb_4bit_compute_dtype=dtype)
    load(tiny_checkpoints[family], config).save_pretrained(tmp_path)
    for model in (load(tiny_checkpoints[family], config), load(tmp_path)):
        experts = model.model.layers[0].mlp.experts
        assert experts.gate_up_proj.dtype is experts.down_proj.dtype is dtype
        seen: list[torch.dtype] = []
        handle = experts.register_forward_hook(lambda _, args, out, seen=seen: seen.extend([args[0].dtype, out.dtype]))
        inner: list[torch.dtype] = []
        activation = experts.act_fn if hasattr(experts, "act_fn") else nn.Identity()
        activation.register_forward_pre_hook(lambda _, args, inner=inner: inner.append(args[0].dtype))
        logits(model)
        handle.remove()
        assert seen == [torch.bfloat16, torch.bfloat16]
        assert set(inner) == ({dtype} if hasattr(experts, "act_fn") else set())


# -- what is saved --------------------------------------------------------------------------------------------------


@EVERY_VARIANT
@EVERY_FAMILY
def test_files_do_not_tell_the_form(
    family: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """Both forms save one file that is the same to the last byte, and shards with the same tensors."""
    for form in FORMS:
        model = load(tiny_checkpoints[family], config_of(form, variant, quantize_linears=True))
        model.save_pretrained(tmp_path / form)
        model.save_pretrained(tmp_path / f"{form}_shards", max_shard_size="5KB")
    assert files(tmp_path / "parametrize") == files(tmp_path / "nbit")
    assert len(files(tmp_path / "nbit_shards")) > 10
    tensors = tensors_on_disk(tmp_path / "nbit")
    for form in FORMS:
        assert_same_tensors(tensors_on_disk(tmp_path / f"{form}_shards"), tensors)
    indices = [json.loads((tmp_path / f"{f}_shards" / "model.safetensors.index.json").read_text()) for f in FORMS]
    assert indices[0]["metadata"] == indices[1]["metadata"]
    assert indices[0]["weight_map"].keys() == indices[1]["weight_map"].keys() == tensors.keys()


@EVERY_VARIANT
@EVERY_FAMILY
def test_two_generations(
    family: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path, warnings_logged: list[str]
) -> None:
    """A reload without a config has the same form, tensors and logits, and so has a reload of what that saves."""
    model = load(tiny_checkpoints[family], config_of("parametrize", variant, quantize_linears=True))
    state, expected = model.state_dict(), logits(model)
    for generation in ("first", "second"):
        model.save_pretrained(tmp_path / generation, max_shard_size="5KB")
        model = load(tmp_path / generation)
        assert_form(model, "parametrize")
        assert_same_tensors(model.state_dict(), state)
        assert torch.equal(logits(model), expected)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    assert warnings_logged == []


@BOTH_FORMS
@EVERY_FAMILY
def test_read_in_the_other_form(form: str, family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Editing `experts_module` in ``config.json`` is all it takes to read a model in the other form."""
    other = FORMS[1 - FORMS.index(form)]
    model = load(tiny_checkpoints[family], config_of(form), dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    read = load(with_config(tmp_path / "saved", tmp_path / "edited", experts_module=other))
    assert_form(read, other)
    assert_close(logits(read), logits(model))
    read.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "saved")


@EVERY_FAMILY
def test_state_dict_argument(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A state dict that is passed to `save_pretrained` is saved under the same names."""
    model = load(tiny_checkpoints[family], config_of("parametrize", quantize_linears=True))
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())
    assert files(tmp_path / "given") == files(tmp_path / "plain")


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_trainer_save_model(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """`Trainer.save_model` writes an adapter that gives the trained logits over the saved base, bit for bit."""
    model = load(tiny_checkpoints[family], config_of("parametrize", quantize_linears=True))
    model.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    arguments = {"max_steps": 2, "learning_rate": 1e-2, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    rows = [{"input_ids": row, "labels": row} for row in token_ids(8, 9, seed=1)]
    args = TrainingArguments(output_dir=str(tmp_path / "run"), save_strategy="no", **arguments)
    trainer = Trainer(model=adapted, args=args, train_dataset=rows)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert "model.safetensors" not in {file.name for file in (tmp_path / "adapter").iterdir()}
    expected, base = logits(trainer.model.eval()), load(tmp_path / "base")
    assert not torch.equal(expected, logits(base))
    assert torch.equal(logits(PeftModel.from_pretrained(base, str(tmp_path / "adapter"))), expected)
    trainer.model.unload().save_pretrained(tmp_path / "unloaded")
    assert files(tmp_path / "unloaded") == files(tmp_path / "base")


# -- what else a model can do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reloaded", [False, True], ids=["loaded", "reloaded"])
@EVERY_FAMILY
def test_dequantize(family: str, reloaded: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The float model has the tensors that the other form gives, its own classes, and the source's layout on disk."""
    path = tmp_path / "packed"
    for form in FORMS:
        model = load(tiny_checkpoints[family], config_of(form, "nf4_double", quantize_linears=True))
        if reloaded:
            model.save_pretrained(path / form)
            model = load(path / form)
        assert model.dequantize() is model
        model.save_pretrained(tmp_path / form)
    plain = load(tiny_checkpoints[family])
    assert {n: type(m) for n, m in model.named_modules()} == {n: type(m) for n, m in plain.named_modules()}
    assert {n: p.requires_grad for n, p in model.named_parameters()} == {
        n: p.requires_grad for n, p in plain.named_parameters()
    }
    assert files(tmp_path / "parametrize") == files(tmp_path / "nbit")
    saved, source = tensors_on_disk(tmp_path / "parametrize"), tensors_on_disk(tiny_checkpoints[family])
    assert {n: (t.shape, t.dtype) for n, t in saved.items()} == {n: (t.shape, t.dtype) for n, t in source.items()}


@EVERY_FAMILY
def test_dequantized_logits(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Logits in float32 are those of before."""
    model = load(tiny_checkpoints[family], config_of("parametrize", quantize_linears=True), dtype=torch.float32)
    expected = logits(model)
    assert_close(logits(model.dequantize()), expected)


@EVERY_VARIANT
@EVERY_FAMILY
def test_counters(family: str, variant: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Parameters and bytes are counted as in the other form."""
    nbit, model = (load(tiny_checkpoints[family], config_of(form, variant, quantize_linears=True)) for form in FORMS)
    plain = load(tiny_checkpoints[family])
    for arguments in ({}, {"exclude_embeddings": True}, {"only_trainable": True}):
        assert model.num_parameters(**arguments) == nbit.num_parameters(**arguments)
    assert model.num_parameters() == plain.num_parameters()
    assert model.get_memory_footprint() == nbit.get_memory_footprint()
    assert model.get_memory_footprint(return_buffers=False) == nbit.get_memory_footprint(return_buffers=False)
    assert model.num_parameters(only_trainable=True) < plain.num_parameters()


@EVERY_FAMILY
def test_deepcopy(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """A copy computes the same, and each survives what is done to the other."""
    model = load(tiny_checkpoints[family], config_of("parametrize", quantize_linears=True))
    expected, state = logits(model), {n: t.clone() for n, t in model.state_dict().items()}
    copied = copy.deepcopy(model)
    assert_form(copied, "parametrize")
    assert torch.equal(logits(copied), expected)
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() != copied.get_parameter(name).data_ptr()
    copied.dequantize()
    assert_same_tensors(model.state_dict(), state)
    assert torch.equal(logits(model), expected)


@EVERY_VARIANT
@EVERY_FAMILY
def test_in_memory(family: str, variant: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Quantizing in memory gives the tensors, logits and files that loading gives."""
    config = config_of("parametrize", variant, quantize_linears=True)
    made, read = quantize_experts(load(tiny_checkpoints[family]), config), load(tiny_checkpoints[family], config)
    assert_form(made, "parametrize")
    assert_same_tensors(made.state_dict(), read.state_dict())
    assert torch.equal(logits(made), logits(read))
    made.save_pretrained(tmp_path / "made")
    read.save_pretrained(tmp_path / "read")
    assert files(tmp_path / "made") == files(tmp_path / "read")


@pytest.mark.parametrize("variant", ["nf4_double", "bf16"])
@EVERY_FAMILY
def test_preparation_for_training(family: str, variant: str, tiny_checkpoints: dict[str, Path]) -> None:
    """PEFT's preparation keeps every packed byte; with the fp32 hidden states it makes, both forms compute alike."""
    results = {}
    for form in FORMS:
        model = load(tiny_checkpoints[family], config_of(form, variant, quantize_linears=True))
        packed = {n: t.clone() for n, t in model.state_dict().items() if not t.is_floating_point()}
        prepared = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        after = {n: t for n, t in prepared.state_dict().items() if not t.is_floating_point()}
        assert_same_tensors(after, packed)
        seen: list[torch.dtype] = []
        experts = prepared.model.layers[0].mlp.experts
        experts.register_forward_hook(lambda _, args, out, seen=seen: seen.extend([args[0].dtype, out.dtype]))
        results[form] = logits(prepared)
        assert seen == [torch.float32, torch.float32]
    exact = logits(
        load(tiny_checkpoints[family], config_of("nbit", variant, quantize_linears=True), dtype=torch.float)
    )
    errors = {form: (result - exact).abs().mean() for form, result in results.items()}
    assert errors["parametrize"] <= 1.5 * errors["nbit"]


@pytest.mark.usefixtures("stock_peft")
@pytest.mark.parametrize("target_modules", [["q_proj"], []], ids=["with_attention", "experts_alone"])
@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_stock_peft_is_refused(
    family: str, name: str, target_modules: list[str], tiny_checkpoints: dict[str, Path]
) -> None:
    """PEFT's own `target_parameters` on packed experts raises in each forward, and says what to do."""
    model = load(tiny_checkpoints[family], config_of("parametrize"))
    experts = model.model.layers[0].mlp.experts
    packed = snapshot(experts)
    parameters = [f"model.layers.0.mlp.experts.{name}"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=target_modules, target_parameters=parameters))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="import hf_qmoe"):
            adapted(token_ids())
    assert_same_state(experts, packed)
    assert (parametrize._cache_enabled, parametrize._cache) == (0, {})


@EVERY_FAMILY
def test_attention_adapters_train(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Adapters on attention get the gradients that they get in the other form."""
    found = []
    for form in FORMS:
        model = load(tiny_checkpoints[family], config_of(form, quantize_linears=True), dtype=torch.float32)
        torch.manual_seed(0)
        adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        found.append(gradients(get_peft_model(model, adapter)))
    assert found[0].keys() == found[1].keys()
    assert len(found[0]) == 8
    for name, gradient in found[0].items():
        assert gradient.abs().sum() > 0
        assert_close(found[1][name], gradient)


# -- what is refused ------------------------------------------------------------------------------------------------


def _without_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_absmax"]


def _without_bytes(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.gate_up_proj"]


def _without_metadata(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.quant_metadata"]


def _one_expert_short(tensors: dict[str, Tensor]) -> None:
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[name] = tensors[name][:-1].clone()


def _infinite_scale(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.down_proj_absmax"].view(torch.float32)[0] = torch.inf


@pytest.mark.parametrize(
    "edit", [_without_scales, _without_bytes, _without_metadata, _one_expert_short, _infinite_scale]
)
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_damaged_files(
    family: str, edit: Callable[[dict[str, Tensor]], None], tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A packed checkpoint with a tensor missing, cut or damaged raises what the other form raises."""
    messages = []
    for form in FORMS:
        load(tiny_checkpoints[family], config_of(form)).save_pretrained(tmp_path / form)
        path = edited(tmp_path / form, tmp_path / f"{form}_edited", edit)
        with pytest.raises(ValueError, match=r"model\.layers\.\d\.mlp\.experts") as raised:
            load(path)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


def test_missing_float_expert(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A float checkpoint that lacks an expert raises while it is packed."""
    key = "model.layers.1.mlp.experts.2.up_proj.weight"
    path = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "short", lambda tensors: tensors.pop(key))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts.*missing experts \[2\]"):
        load(path, config_of("parametrize"))


@pytest.mark.parametrize("packed", [False, True], ids=["float", "packed"])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_device_map(family: str, packed: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """The CPU as a device is fine; a layer on disk raises and names its experts."""
    config = config_of("parametrize")
    expected = load(tiny_checkpoints[family], config)
    expected.save_pretrained(tmp_path / "packed")
    path, given = (tmp_path / "packed", None) if packed else (tiny_checkpoints[family], config)
    model = load(path, given, device_map="cpu")
    assert_form(model, "parametrize")
    assert torch.equal(logits(model), logits(expected))
    device_map = {"model.layers.1": "disk", "lm_head": "cpu"}
    device_map |= {f"model.{name}": "cpu" for name in ("embed_tokens", "layers.0", "norm", "rotary_emb")}
    with pytest.raises(NotImplementedError, match=r"model\.layers\.1\.mlp\.experts"):
        load(path, given, device_map=device_map, offload_folder=tmp_path / "offload")


# -- "auto" ---------------------------------------------------------------------------------------------------------


class PlainExperts(nn.Module):
    """Fused stacks in a class that transformers' decorator never saw, with a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(0.1 * torch.randn(4, 192, 64))
        self.down_proj = nn.Parameter(0.1 * torch.randn(4, 64, 96))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Every expert for every token."""
        gate, up = torch.einsum("th,enh->etn", hidden_states, self.gate_up_proj).chunk(2, dim=-1)
        rows = torch.bmm(nn.functional.silu(gate) * up, self.down_proj.mT)
        weights = torch.zeros(len(hidden_states), self.num_experts).to(top_k_weights)
        return torch.einsum("eth,te->th", rows, weights.scatter(1, top_k_index, top_k_weights))


class PlainMoe(Qwen3MoeForCausalLM):
    """A model with `PlainExperts` in each layer."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.experts = PlainExperts()


_SHAPE = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_key_value_heads": 4}
_HEADS = {**_SHAPE, "num_attention_heads": 4}


def _llama4() -> PreTrainedConfig:
    sizes = {"intermediate_size": 96, "intermediate_size_mlp": 96, "num_local_experts": 4, "head_dim": 16}
    return Llama4TextConfig(**_HEADS, **sizes, interleave_moe_layer_step=1)


def _longcat_flash() -> PreTrainedConfig:
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    moe = {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 96, "n_routed_experts": 4, "zero_expert_num": 2}
    return LongcatFlashConfig(**_HEADS, **mla, **moe, moe_topk=2, head_dim=8)


def _jetmoe() -> PreTrainedConfig:
    return JetMoeConfig(**_SHAPE, kv_channels=16, intermediate_size=96, num_local_experts=4, num_experts_per_tok=2)


def _inkling() -> PreTrainedConfig:
    """Its routed experts follow the interface, its shared ones do not."""
    moe = {"moe_intermediate_size": 96, "intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2}
    return InklingTextConfig(**_HEADS, **moe, head_dim=16, n_shared_experts=2)


def _step3p7() -> PreTrainedConfig:
    moe = {"moe_intermediate_size": 96, "intermediate_size": 96, "n_routed_experts": 4, "num_experts_per_tok": 2}
    layers = {"mlp_layer_types": ["sparse"] * 2, "layer_types": ["full_attention"] * 2, "sliding_window": 8}
    text = {**_HEADS, **moe, **layers, "head_dim": 16, "num_sliding_attention_heads": 4, "share_expert_dim": 96}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Step3p7Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14})


#: Model class and config of models with experts that follow no interface, and how many modules of those there are.
UNDECORATED: dict[str, tuple[type, Callable[[], PreTrainedConfig], int]] = {
    "llama4": (AutoModelForCausalLM, _llama4, 2),
    "longcat_flash": (AutoModelForCausalLM, _longcat_flash, 1),
    "jetmoe": (AutoModelForCausalLM, _jetmoe, 8),
    "inkling": (AutoModelForCausalLM, _inkling, 2),
    "step3p7": (Step3p7ForConditionalGeneration, _step3p7, 2),
    "plain": (PlainMoe, lambda: tiny_config("qwen3_moe"), 2),
}


@pytest.fixture(scope="module")
def undecorated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A bf16 checkpoint of each of them."""
    root = tmp_path_factory.mktemp("undecorated")
    for name, (cls, config, _) in UNDECORATED.items():
        torch.manual_seed(0)
        model = cls.from_config(config(), dtype=torch.float32) if hasattr(cls, "from_config") else cls(config())
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.1)
        model.to(torch.bfloat16).save_pretrained(root / name)
    return {name: root / name for name in UNDECORATED}


def auto(name: str, how: str, path: Path, **fields: object) -> PreTrainedModel:
    """The checkpoint `path` in fp32, packed while it is read or in memory."""
    cls, config = UNDECORATED[name][0], QMoEConfig(**({"quantize_linears": False} | fields))
    if how == "quantize_experts":
        return quantize_experts(cls.from_pretrained(path, dtype=torch.float32), config)
    return cls.from_pretrained(path, dtype=torch.float32, quantization_config=config)


@EVERY_FAMILY
def test_auto_takes_the_faster_form(family: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Experts that follow transformers' interface become `ExpertsNbit`."""
    assert_form(load(tiny_checkpoints[family], config_of("auto")), "nbit")


@BOTH_WAYS
@pytest.mark.parametrize("quant_type", ["nf4", "int8", "bf16"])
@pytest.mark.parametrize("name", UNDECORATED)
def test_undecorated(name: str, quant_type: str, how: str, undecorated: dict[str, Path], tmp_path: Path) -> None:
    """Other experts are parametrized and compute what the float model does; the result reloads as itself."""
    cls, _, count = UNDECORATED[name]
    model = auto(name, how, undecorated[name], experts_quant_type=quant_type)
    assert list(forms_of(model).values()).count("parametrize") == count
    twin = twin_of(model, tmp_path, quant_type, lambda: cls.from_pretrained(undecorated[name], dtype=torch.float32))
    reloaded = cls.from_pretrained(tmp_path)
    assert forms_of(reloaded) == forms_of(model)
    assert_same_tensors(reloaded.state_dict(), model.state_dict())
    assert torch.equal(logits(reloaded), logits(model))
    assert_computes_as(model, twin)


@pytest.mark.parametrize("name", UNDECORATED)
def test_undecorated_with_linears(name: str, undecorated: dict[str, Path], tmp_path: Path) -> None:
    """With quantized linears beside them they reload, count and dequantize to the source's layout."""
    cls = UNDECORATED[name][0]
    plain = cls.from_pretrained(undecorated[name])
    model = auto(name, "from_pretrained", undecorated[name], quantize_linears=True)
    assert model.num_parameters() == plain.num_parameters()
    model.save_pretrained(tmp_path / "packed")
    assert torch.equal(logits(cls.from_pretrained(tmp_path / "packed")), logits(model))
    expected = logits(model)
    assert_close(logits(model.dequantize()), expected)
    model.save_pretrained(tmp_path / "float")
    saved, source = tensors_on_disk(tmp_path / "float"), tensors_on_disk(undecorated[name])
    assert {n: t.shape for n, t in saved.items()} == {n: t.shape for n, t in source.items()}
