"""Which modules a load packs, which it leaves alone, and what it refuses to leave alone in silence."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import nn
from transformers import (
    AfmoeConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoePreTrainedModel

from hf_qmoe import ExpertsNbit, QMoEConfig, quantize_experts
from hf_qmoe.logging import warn_once
from tests.support.checkpoints import (
    assert_same_tensors,
    load,
    logits,
    packed_modules,
    packed_state,
    tensors_on_disk,
)
from tests.support.models import FAMILIES, VOCAB, experts_of, save_tiny, tiny_config, tiny_model


QUANT_TYPES = ("nf4", "fp4", "int8", "fp8", "bf16", "fp16")
#: Bytes of packed experts, scales included, relative to bf16.
RATIO = {"nf4": 0.32, "fp4": 0.32, "int8": 0.57, "fp8": 0.57, "bf16": 1.0, "fp16": 1.0}
LAYER_0, LAYER_1 = "model.layers.0.mlp.experts", "model.layers.1.mlp.experts"
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def kept_linears(model: nn.Module) -> set[str]:
    """Linears that were not replaced, but for those whose in_features no block of 64 divides."""
    plain = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and not isinstance(m, Linear4bit)}
    return {name for name, linear in plain.items() if linear.in_features % 64 == 0}


def float_experts(model: nn.Module) -> set[str]:
    """Experts modules that were not packed."""
    return {name for name, module in experts_of(model).items() if not isinstance(module, ExpertsNbit)}


def quantized(how: str, checkpoint: Path, config: QMoEConfig, cls: type | None = None) -> PreTrainedModel:
    """`checkpoint` quantized while it is read, or when it is in memory."""
    if cls is not None:
        if how == "from_pretrained":
            return cls.from_pretrained(checkpoint, quantization_config=config)
        return quantize_experts(cls(tiny_config("qwen3_moe")), config)
    return load(checkpoint, config) if how == "from_pretrained" else quantize_experts(load(checkpoint), config)


BOTH_WAYS = pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])


# -- everything is packed -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_stack_is_packed(family: str, quant_type: str, tiny_checkpoints: dict[str, Path]) -> None:
    """Every routed-experts module becomes packed bytes of the size its format promises."""
    model = load(tiny_checkpoints[family], QMoEConfig(experts_quant_type=quant_type))
    float_bytes = {
        name: sum(p.numel() * 2 for p in module.parameters() if p.ndim == 3)
        for name, module in experts_of(load(tiny_checkpoints[family])).items()
    }
    packed = packed_modules(model)
    assert packed.keys() == float_bytes.keys() == {LAYER_0, LAYER_1}
    for name, module in packed.items():
        assert module.quant_type == quant_type
        assert sum(stack.nbytes for stack in module.stacks().values()) <= RATIO[quant_type] * float_bytes[name]
        for stack in module.stack_names:
            assert getattr(module, stack).dtype is torch.uint8
            assert not getattr(module, stack).requires_grad


@BOTH_WAYS
@pytest.mark.parametrize("family", FAMILIES)
def test_linears_are_quantized_and_head_and_routers_are_not(
    family: str, how: str, tiny_checkpoints: dict[str, Path]
) -> None:
    """Attention goes to bitsandbytes' linears; output head and routers keep the checkpoint's bits."""
    model = quantized(how, tiny_checkpoints[family], QMoEConfig())
    plain = load(tiny_checkpoints[family])
    assert kept_linears(model) == {"lm_head"}
    linears = {name for name, m in plain.named_modules() if isinstance(m, nn.Linear)} - {"lm_head"}
    assert {name for name, m in model.named_modules() if isinstance(m, Linear4bit)} == linears
    routers = [n for n, _ in plain.named_parameters() if re.search(r"mlp\.(gate|router)\.", n)]
    assert len(routers) == (4 if family == "gpt_oss" else 2)
    for name in [*routers, "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"]:
        loaded = model.get_parameter(name)
        assert loaded.dtype is torch.bfloat16
        assert torch.equal(loaded, plain.get_parameter(name))


@BOTH_WAYS
def test_quantize_linears_off(how: str, tiny_checkpoints: dict[str, Path]) -> None:
    """With `quantize_linears=False` experts are packed and no linear is touched."""
    model = quantized(how, tiny_checkpoints["qwen3_moe"], QMoEConfig(quantize_linears=False))
    assert len(packed_modules(model)) == 2
    assert not any(isinstance(module, Linear4bit) for module in model.modules())
    assert len(kept_linears(model)) == 9


@BOTH_WAYS
def test_dense_model(how: str, dense_checkpoint: Path, tmp_path: Path, warnings_logged: list[str]) -> None:
    """A model without experts has its linears quantized, saves and reloads."""
    model = quantized(how, dense_checkpoint, QMoEConfig())
    assert kept_linears(model) == {"lm_head"}
    assert sum(isinstance(module, Linear4bit) for module in model.modules()) == 14
    assert model.num_parameters() == load(dense_checkpoint).num_parameters()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
    assert not warnings_logged


# -- nothing stays in full precision in silence ---------------------------------------------------------------------


class _NoExperts(nn.Module):
    """A block under a config that declares experts, without any."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 64, bias=False)


class _UnflaggedExperts(nn.Module):
    """Fused stacks in a class that transformers' decorator never saw."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 192, 64))
        self.down_proj = nn.Parameter(torch.zeros(4, 64, 96))


def _model_class(block: Callable[[], nn.Module], name: str) -> type[Qwen3MoeForCausalLM]:
    class Custom(Qwen3MoeForCausalLM):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                setattr(layer.mlp, "experts", block())  # noqa: B010

    Custom.__name__ = name
    return Custom


@BOTH_WAYS
def test_declared_experts_that_match_nothing(how: str, tmp_path: Path) -> None:
    """A config that declares experts over a model without any experts module raises, naming what was looked at."""
    cls = _model_class(_NoExperts, "EmptyMoe")
    cls(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"(?s)EmptyMoe declares experts.*experts': 4.*Qwen3MoeTopKRouter"):
        quantized(how, tmp_path, QMoEConfig(), cls)


@BOTH_WAYS
def test_fused_experts_without_flags(how: str, tmp_path: Path) -> None:
    """Fused stacks in an undecorated class raise, naming each and how to accept that they stay float."""
    cls = _model_class(_UnflaggedExperts, "UnflaggedMoe")
    cls(tiny_config("qwen3_moe")).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"(?s)0\.mlp\.experts \(_UnflaggedExperts, [\d,]+ bytes\).*1\.mlp.*modules_to_not_convert"
    ):
        quantized(how, tmp_path, QMoEConfig(experts_module="nbit"), cls)


@pytest.fixture(scope="module")
def llama4_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family whose experts follow no interface."""
    path = tmp_path_factory.mktemp("llama4")
    config = Llama4TextConfig(
        **SHAPE,
        intermediate_size=96,
        intermediate_size_mlp=96,
        num_local_experts=4,
        head_dim=16,
        interleave_moe_layer_step=1,
    )
    Llama4ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@BOTH_WAYS
def test_undecorated_family(how: str, llama4_checkpoint: Path) -> None:
    """As `ExpertsNbit`, Llama 4's experts raise by name, and the error says how to accept them in full precision."""
    says = r"(?s)layers\.0\.feed_forward\.experts \(Llama4TextExperts, 147,456 bytes\).*layers\.1.*`modules_to_not"
    with pytest.raises(ValueError, match=says):
        quantized(how, llama4_checkpoint, QMoEConfig(experts_module="nbit"))


@BOTH_WAYS
def test_undecorated_family_left_out_as_advised(how: str, llama4_checkpoint: Path, tmp_path: Path) -> None:
    """What that error advises works: the experts stay float, the linears are quantized, and the result reloads."""
    model = quantized(how, llama4_checkpoint, QMoEConfig(modules_to_not_convert=["feed_forward.experts"]))
    experts = model.model.layers[0].feed_forward.experts
    assert experts.gate_up_proj.dtype is torch.bfloat16
    assert any(isinstance(module, Linear4bit) for module in model.modules())
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_plain_bitsandbytes_hints_once(
    tiny_checkpoints: dict[str, Path], dense_checkpoint: Path, warnings_logged: list[str]
) -> None:
    """Stock 4-bit loading says once that fused experts stay in full precision, and nothing for a dense model."""
    warn_once.cache_clear()
    stock = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16)
    load(dense_checkpoint, stock)
    assert warnings_logged == []
    for _ in range(2):
        assert float_experts(load(tiny_checkpoints["qwen3_moe"], stock)) == {LAYER_0, LAYER_1}
    (hint,) = warnings_logged
    assert "Qwen3MoeForCausalLM" in hint
    assert "QMoEConfig()" in hint


def test_own_config_gives_no_hint(tiny_checkpoints: dict[str, Path], warnings_logged: list[str]) -> None:
    """Loading with `QMoEConfig` logs no warning at all."""
    warn_once.cache_clear()
    load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    assert warnings_logged == []


# -- skip lists -----------------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize(
    ("pattern", "experts", "linears"),
    [
        (LAYER_0, {LAYER_0}, set()),
        ("layers.0.mlp.experts", {LAYER_0}, set()),
        ("experts", {LAYER_0, LAYER_1}, set()),
        (r"layers\.[1-9]\.mlp", {LAYER_1}, set()),
        (r"layers\.(0|7)\.mlp\.experts", {LAYER_0}, set()),
        ("layers.1", {LAYER_1}, {f"model.layers.1.self_attn.{n}_proj" for n in "qkvo"}),
        ("q_proj", set(), {f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)}),
        (r"0\.self_attn\.(q|k)_proj", set(), {f"model.layers.0.self_attn.{n}_proj" for n in "qk"}),
        ("model.layers.1.self_attn.o_proj", set(), {"model.layers.1.self_attn.o_proj"}),
        ("gate", set(), set()),
    ],
    ids=[
        "exact_name",
        "suffix",
        "last_component",
        "regex_class",
        "regex_alternatives",
        "layer_index",
        "linear_by_suffix",
        "linear_by_regex",
        "linear_by_name",
        "gate_is_not_gate_up_proj",
    ],
)
def test_skip_list(
    pattern: str, experts: set[str], linears: set[str], how: str, tiny_checkpoints: dict[str, Path]
) -> None:
    """A pattern leaves out exactly the modules whose name holds it as whole components."""
    model = quantized(how, tiny_checkpoints["qwen3_moe"], QMoEConfig(modules_to_not_convert=[pattern]))
    assert float_experts(model) == experts
    assert kept_linears(model) == linears | {"lm_head"}


def test_layer_index_is_not_a_prefix(tmp_path: Path) -> None:
    """Leaving out layer 1 does not leave out layers 10 and 11."""
    checkpoint = save_tiny(tmp_path, "olmoe", num_hidden_layers=12)
    model = load(checkpoint, QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts", "layers.1.self_attn.q_proj"]))
    assert float_experts(model) == {LAYER_1}
    assert kept_linears(model) == {"model.layers.1.self_attn.q_proj", "lm_head"}


@pytest.mark.parametrize("family", FAMILIES)
def test_skipped_stack_keeps_the_checkpoints_bits(
    family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A stack left out stays bf16 bit for bit, the saved config lists it, and a reload honours the list."""
    config = QMoEConfig(modules_to_not_convert=["layers.0.mlp.experts"])
    model = load(tiny_checkpoints[family], config)
    model.save_pretrained(tmp_path)
    reloaded = load(tmp_path)
    plain = load(tiny_checkpoints[family]).get_submodule(LAYER_0)
    for loaded in (model, reloaded):
        assert float_experts(loaded) == {LAYER_0}
        experts = loaded.get_submodule(LAYER_0)
        assert type(experts) is type(plain)
        assert experts.state_dict().keys() == plain.state_dict().keys()
        for name, tensor in plain.state_dict().items():
            assert experts.state_dict()[name].dtype is torch.bfloat16
            assert torch.equal(experts.state_dict()[name], tensor)
    assert reloaded.config.quantization_config.modules_to_not_convert == ["layers.0.mlp.experts"]
    assert torch.equal(logits(reloaded), logits(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_experts_skipped(family: str, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """With every stack left out, experts are saved in the original layout and reload."""
    model = load(tiny_checkpoints[family], QMoEConfig(modules_to_not_convert=["experts"]))
    assert float_experts(model) == {LAYER_0, LAYER_1}
    model.save_pretrained(tmp_path)
    saved, source = tensors_on_disk(tmp_path), tensors_on_disk(tiny_checkpoints[family])
    experts = {name for name in source if ".experts." in name}
    assert experts == {name for name in saved if ".experts." in name}
    assert all(torch.equal(saved[name], source[name]) for name in experts)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_llm_int8_skip_modules_replaces_the_default(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """As in bitsandbytes, `llm_int8_skip_modules` takes the place of the default list: the head is quantized."""
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(llm_int8_skip_modules=["v_proj"]))
    assert kept_linears(model) == {f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)}
    assert float_experts(model) == set()
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))


def test_both_skip_lists_apply_to_experts(tiny_checkpoints: dict[str, Path]) -> None:
    """Experts named in either list are left out."""
    config = QMoEConfig(llm_int8_skip_modules=["lm_head", LAYER_0], modules_to_not_convert=["layers.1.mlp"])
    assert float_experts(load(tiny_checkpoints["qwen3_moe"], config)) == {LAYER_0, LAYER_1}


@BOTH_WAYS
def test_unused_pattern_warns(how: str, tiny_checkpoints: dict[str, Path], warnings_logged: list[str]) -> None:
    """A pattern that matches no module is named in a warning; one that matches is not."""
    config = QMoEConfig(modules_to_not_convert=["q_porj", "k_proj"], llm_int8_skip_modules=["gate_up_proj", "lm_head"])
    quantized(how, tiny_checkpoints["qwen3_moe"], config)
    assert len(warnings_logged) == 2
    assert "'q_porj'" in warnings_logged[0]
    assert "'gate_up_proj'" in warnings_logged[1]


# -- routers and what a model keeps in float32 ----------------------------------------------------------------------


def _families_with_linear_routers() -> dict[str, object]:
    moe = {"intermediate_size": 128, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    return {
        "qwen2_moe": Qwen2MoeConfig(**SHAPE, **moe, shared_expert_intermediate_size=96),
        "afmoe": AfmoeConfig(
            **SHAPE, **moe, head_dim=16, num_dense_layers=0, num_shared_experts=1, layer_types=["full_attention"] * 2
        ),
    }


@BOTH_WAYS
@pytest.mark.parametrize(("family", "router"), [("qwen2_moe", "mlp.shared_expert_gate"), ("afmoe", "mlp.router.gate")])
def test_linear_router_stays_float(family: str, router: str, how: str, tmp_path: Path) -> None:
    """A router that is an `nn.Linear` is left alone; the shared experts beside it are not."""
    config = _families_with_linear_routers()[family]
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = quantized(how, tmp_path, QMoEConfig())
    assert kept_linears(model) == {f"model.layers.{i}.{router}" for i in (0, 1)} | {"lm_head"}
    assert model.get_submodule(f"model.layers.0.{router}").weight.dtype is torch.bfloat16
    assert len(packed_modules(model)) == 2


@BOTH_WAYS
@pytest.mark.parametrize("declared", ["o_proj", "self_attn.o_proj", "o_proj.weight"])
@pytest.mark.parametrize("attribute", ["_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"])
def test_declared_float32_is_not_quantized(
    attribute: str, declared: str, how: str, tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A linear that the model declares float32, by module or by parameter name, stays a plain linear."""
    monkeypatch.setattr(Qwen3MoePreTrainedModel, attribute, [declared])
    model = quantized(how, tiny_checkpoints["qwen3_moe"], QMoEConfig())
    assert kept_linears(model) == {f"model.layers.{i}.self_attn.o_proj" for i in (0, 1)} | {"lm_head"}
    strict = attribute.endswith("strict")
    assert model.model.layers[0].self_attn.o_proj.weight.dtype is (torch.float32 if strict else torch.bfloat16)


def test_declared_float32_parameters_keep_their_dtype(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Routers and norms that a model declares float32 are float32 after a load, a save and a reload."""
    monkeypatch.setattr(Qwen3MoePreTrainedModel, "_keep_in_fp32_modules_strict", ["mlp.gate", "norm"])
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig())
    model.save_pretrained(tmp_path)
    reloaded = load(tmp_path)
    for loaded in (model, reloaded):
        kept = {name: p.dtype for name, p in loaded.named_parameters() if p.is_floating_point()}
        wide = {name for name, dtype in kept.items() if dtype is torch.float32}
        assert wide == {name for name in kept if "norm" in name or "mlp.gate" in name}
        assert len(wide) == 11
    assert_same_tensors(reloaded.state_dict(), model.state_dict())


def test_experts_that_tie_embeddings(tmp_path: Path) -> None:
    """With tied embeddings the output head stays the embedding itself."""
    save_tiny(tmp_path / "float", "qwen3_moe", tie_word_embeddings=True)
    model = load(tmp_path / "float", QMoEConfig())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "packed")
    reloaded = load(tmp_path / "packed")
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert torch.equal(logits(reloaded), logits(model))


# -- overrides ------------------------------------------------------------------------------------------------------


@BOTH_WAYS
@pytest.mark.parametrize("family", FAMILIES)
def test_override(family: str, how: str, tiny_checkpoints: dict[str, Path]) -> None:
    """An override gives its modules another format and leaves the others as they would be without it."""
    config = QMoEConfig(experts_overrides={"layers.0.mlp.experts": "int8"})
    model = quantized(how, tiny_checkpoints[family], config)
    assert {name: module.quant_type for name, module in packed_modules(model).items()} == {
        LAYER_0: "int8",
        LAYER_1: "nf4",
    }
    for only in ("int8", "nf4"):
        name = LAYER_0 if only == "int8" else LAYER_1
        alone = load(tiny_checkpoints[family], QMoEConfig(experts_quant_type=only)).get_submodule(name)
        for key, tensor in alone.state_dict().items():
            assert torch.equal(model.get_submodule(name).state_dict()[key], tensor)


def test_first_matching_override_counts(tiny_checkpoints: dict[str, Path]) -> None:
    """Where two overrides match a module, the first one written is taken."""
    overrides = {"layers.1": "fp8", r"layers\.\d+": "bf16", "layers.0": "int8"}
    model = load(tiny_checkpoints["qwen3_moe"], QMoEConfig(experts_overrides=overrides))
    assert [layer.mlp.experts.quant_type for layer in model.model.layers] == ["bf16", "fp8"]


def test_double_quant_with_a_passthrough_override(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Formats without scales go with double quantization of the others."""
    config = QMoEConfig(experts_double_quant=True, experts_overrides={"layers.1": "fp16"})
    model = load(tiny_checkpoints["qwen3_moe"], config)
    assert [layer.mlp.experts.stack("down_proj").double_quant for layer in model.model.layers] == [True, False]
    model.save_pretrained(tmp_path)
    reloaded = load(tmp_path)
    assert_same_tensors(packed_state(reloaded), packed_state(model))
    assert torch.equal(logits(reloaded), logits(model))


@BOTH_WAYS
@pytest.mark.parametrize("pattern", ["layers.7.mlp.experts", "lm_head", "gate_up_proj"])
def test_override_that_matches_nothing(pattern: str, how: str, tiny_checkpoints: dict[str, Path]) -> None:
    """An override for no experts module raises, naming the pattern and the modules there are."""
    config = QMoEConfig(experts_overrides={pattern: "int8"})
    with pytest.raises(ValueError, match=rf"(?s)'{pattern}' matches no experts module.*{LAYER_0}.*{LAYER_1}"):
        quantized(how, tiny_checkpoints["qwen3_moe"], config)


def test_skip_wins_over_override(tiny_checkpoints: dict[str, Path]) -> None:
    """A module in both lists is left out."""
    config = QMoEConfig(experts_overrides={"layers.0": "int8"}, modules_to_not_convert=[LAYER_0])
    assert float_experts(load(tiny_checkpoints["qwen3_moe"], config)) == {LAYER_0}


def test_from_config_model_is_selected_the_same_way(tiny_checkpoints: dict[str, Path]) -> None:
    """A model that was never on disk has the same modules replaced as one that is read."""
    config = QMoEConfig(modules_to_not_convert=["layers.0.mlp.experts", "k_proj"])
    read, made = load(tiny_checkpoints["mixtral"], config), quantize_experts(tiny_model("mixtral"), config)
    assert float_experts(read) == float_experts(made)
    assert kept_linears(read) == kept_linears(made)
    assert packed_modules(read).keys() == packed_modules(made).keys()


def test_nothing_to_quantize_raises(dense_checkpoint: Path) -> None:
    """A dense model with its linears left alone would be called quantized without being so."""
    with pytest.raises(ValueError, match="nothing to quantize"):
        load(dense_checkpoint, QMoEConfig(quantize_linears=False))
