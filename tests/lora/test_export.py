"""`export_adapter`: what is written, read by an independent reader and by stock PEFT, is the model's update."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import use_experts_implementation

from hf_qmoe.experts import ExpertsNbit
from hf_qmoe.lora import export
from hf_qmoe.lora.export import export_adapter
from hf_qmoe.lora.targets import lora_targets
from tests.lora.adapters import LINEARS, RANKS, STACKS, Reader, adapted, check_files, live_deltas, randomized
from tests.lora.families import build
from tests.support.lora import logits, lora_config, packed_and_float, randomize, relative_error
from tests.support.models import FAMILIES, PER_EXPERT_FAMILIES, tiny_model, token_ids


VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "rslora": {"use_rslora": True, "r": 6},
    "ranks": {"rank_pattern": {"mlp.experts.down_proj": 3, "o_proj": 2}, "alpha_pattern": {"q_proj": 5}},
    "layers": {"rank_pattern": {r"layers\.1\.mlp\.experts\.\w+": 2, r"layers\.1\.self_attn\.q_proj": 3}},
    "alphas": {"alpha_pattern": {r"layers\.0\.mlp\.experts\.gate_up_proj": 9, r"mlp\.experts\.down_proj": 1}},
    "rslora-layers": {"use_rslora": True, "rank_pattern": {r"layers\.1\.mlp\.experts\.gate_up_proj": 2}},
}
EVERY_VARIANT = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@EVERY_VARIANT
@pytest.mark.parametrize("family", FAMILIES)
def test_reassembles(family: str, variant: str, tmp_path: Path) -> None:
    """The update of every linear and of every expert; names, shapes and config as a reader expects them."""
    model = adapted(tiny_model(family), **VARIANTS[variant])
    export_adapter(model, tmp_path / "adapter")
    config = check_files(tmp_path / "adapter", live_deltas(model), family).config
    of_experts = ["w1", "w2", "w3"] if family == "mixtral" else ["gate_proj", "up_proj", "down_proj"]
    assert sorted(config["target_modules"]) == sorted(LINEARS + of_experts)
    assert config["target_parameters"] is None
    assert config["peft_type"] == "LORA"
    assert config["inference_mode"] is True
    assert set(model.peft_config["default"].target_parameters) == set(STACKS)  # the live config is untouched
    assert model.peft_config["default"].r == VARIANTS[variant].get("r", RANKS["r"])


@EVERY_VARIANT
@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_stock_peft_loads_it(family: str, variant: str, tmp_path: Path) -> None:
    """PEFT's own conversion of v4 adapters gives a fresh float model the same logits, attention included."""
    model, ids = adapted(tiny_model(family), **VARIANTS[variant]), token_ids()
    export_adapter(model, tmp_path)
    fresh = tiny_model(family)
    before = fresh(ids).logits
    loaded = PeftModel.from_pretrained(fresh, tmp_path).eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)
        assert (loaded(ids).logits - before).abs().max() > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """Factors are written in their own dtype."""
    model = adapted(tiny_model("qwen3_moe", dtype=dtype))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    export_adapter(model, tmp_path)
    assert {tensor.dtype for tensor in Reader(tmp_path).tensors.values()} == {dtype}
    check_files(tmp_path, live_deltas(model))


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss"])
def test_one_stack_alone(family: str, stack: str, tmp_path: Path) -> None:
    """Only what is adapted is written, under the right projection's names."""
    model = adapted(tiny_model(family), target_parameters=[stack], target_modules=[])
    export_adapter(model, tmp_path)
    check_files(tmp_path, live_deltas(model), family)


def test_down_alone_loads(tmp_path: Path) -> None:
    """Stock PEFT loads the down projections alone."""
    model, ids = adapted(tiny_model("qwen3_moe"), target_parameters=[STACKS[1]]), token_ids()
    export_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(tiny_model("qwen3_moe"), tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "nemotron_h", "qwen3_next", "gemma4"])
def test_other_families(family: str, tmp_path: Path) -> None:
    """Without a gate, with shared experts and dense MLPs of the same names and other ranks."""
    float_model = build(family)
    arguments = lora_targets(float_model).config_arguments(shared_experts=True, dense=True)
    ranks = {r".*shared_experts?\.\w+(\.weight)?": 2, "down_proj": 3}
    model = adapted(float_model, **arguments, rank_pattern=ranks)
    export_adapter(model, tmp_path)
    config = check_files(tmp_path, live_deltas(model), family).config
    others = {name for name in config["target_modules"] if "." in name}
    named = lora_targets(float_model)
    assert {n for n in others if n.endswith(("gate_proj", "up_proj", "down_proj"))} == {
        n for n in named.shared_experts + named.dense if n.endswith(("gate_proj", "up_proj", "down_proj"))
    }


def test_shared_experts_load(tmp_path: Path) -> None:
    """Linears adapted as parameters, since PEFT would rename them, are found again by stock PEFT."""
    base = build("deepseek_v3").eval()
    arguments = lora_targets(base).config_arguments(shared_experts=True, dense=True)
    model, ids = adapted(base, **arguments, rank_pattern={r".*shared_experts\.\w+\.weight": 2}), token_ids()
    export_adapter(model, tmp_path)
    loaded = PeftModel.from_pretrained(build("deepseek_v3"), tmp_path).eval()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("has_gate", "is_transposed", "is_concatenated"),
    [(False, False, True), (False, True, True), (True, True, True), (True, False, False)],
)
def test_every_layout(has_gate: bool, is_transposed: bool, is_concatenated: bool, tmp_path: Path) -> None:
    """Experts of no model, in layouts of transformers' interface; in and out are equal: shapes tell nothing."""

    @use_experts_implementation(
        has_gate=has_gate, is_transposed=is_transposed, is_concatenated=is_concatenated, has_bias=False
    )
    class Experts(nn.Module):
        def __init__(self, config: SimpleNamespace) -> None:
            super().__init__()
            self.num_experts = 3
            up = (3, 8, 16) if is_transposed else (3, 16, 8)
            up = up if has_gate else (3, 8, 8)
            self.register_parameter("gate_up_proj" if has_gate else "up_proj", nn.Parameter(torch.randn(up)))
            self.down_proj = nn.Parameter(torch.randn(3, 8, 8))

    block = nn.Module()
    block.add_module("experts", Experts(SimpleNamespace(_experts_implementation="eager")))
    up_name = "gate_up_proj" if has_gate else "up_proj"
    wrapper = nn.Module()
    wrapper.add_module("block", block)
    model = adapted(wrapper, target_parameters=[f"experts.{up_name}", "experts.down_proj"], target_modules=[])
    export_adapter(model, tmp_path)
    check_files(tmp_path, live_deltas(model), "qwen3_moe" if is_concatenated else "gpt_oss")


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_packed_experts_export_the_same(family: str, tmp_path: Path) -> None:
    """From packed experts, the same files as from float ones."""

    def adapted_model(packed: bool) -> PreTrainedModel:
        model = tiny_model(family)
        for layer in model.model.layers:
            if packed:
                ExpertsNbit.from_experts(layer.mlp.experts)
        return adapted(model)

    for packed in (True, False):
        export_adapter(adapted_model(packed), tmp_path / str(packed))
    configs = [(tmp_path / str(packed) / "adapter_config.json").read_text() for packed in (True, False)]
    assert json.loads(configs[0]) == json.loads(configs[1])
    mine, stock = (load_file(tmp_path / str(packed) / "adapter_model.safetensors") for packed in (True, False))
    assert list(mine) == list(stock)
    assert all(torch.equal(mine[name], stock[name]) for name in stock)


@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_trained_with_dropout(family: str, tmp_path: Path) -> None:
    """What stock PEFT fuses again takes none, so the exported config has none."""
    packed, plain = packed_and_float(family)
    ours = get_peft_model(packed, lora_config(lora_dropout=0.1))
    randomize(ours)
    export_adapter(ours, tmp_path)
    loaded = PeftModel.from_pretrained(plain, tmp_path)
    assert relative_error(logits(loaded), logits(ours.eval())) < 1e-5


def test_other_adapter_and_scale(tmp_path: Path) -> None:
    """One of several adapters by name, with a scaling that was changed after its creation."""
    model = adapted(tiny_model("qwen3_moe"))
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["v_proj"], target_parameters=STACKS))
    randomized(model, seed=2)
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and "second" in layer.scaling:
            layer.set_scale("second", 0.7)
    export_adapter(model, tmp_path, adapter_name="second")
    check_files(tmp_path, live_deltas(model, "second"))


def test_everything_else_stays(tmp_path: Path) -> None:
    """Modules trained in full stay in the adapter; limits to some layers are written as names."""
    model = adapted(tiny_model("qwen3_moe"), layers_to_transform=[1], modules_to_save=["lm_head"])
    export_adapter(model, tmp_path)
    reader = Reader(tmp_path)
    head = reader.tensors.pop("base_model.model.lm_head.weight")
    assert torch.equal(head, model.get_base_model().lm_head.modules_to_save["default"].weight)
    names = {name for name in reader.config["target_modules"] if name.endswith(tuple(LINEARS))}
    assert names == {f"model.layers.1.self_attn.{name}" for name in LINEARS}
    assert reader.config["layers_to_transform"] is None
    assert reader.config["modules_to_save"] == ["lm_head"]


def test_tied_modules(tmp_path: Path) -> None:
    """Two modules trained in full that share a weight are written as two tensors."""
    model = adapted(tiny_model("qwen3_moe"), modules_to_save=["lm_head", "embed_tokens"])
    base_model = model.get_base_model()
    head, embedding = (m.modules_to_save["default"] for m in (base_model.lm_head, base_model.model.embed_tokens))
    head.weight = embedding.weight
    export_adapter(model, tmp_path)
    tensors = Reader(tmp_path).tensors
    for name in ("lm_head", "model.embed_tokens"):
        assert torch.equal(tensors[f"base_model.model.{name}.weight"], embedding.weight)


def test_fused_is_what_peft_saves(tmp_path: Path) -> None:
    """``fused``: tensors and config of ``save_pretrained``."""
    model = adapted(tiny_model("qwen3_moe"))
    export_adapter(model, tmp_path / "ours", layout="fused")
    model.save_pretrained(tmp_path / "stock")
    ours, stock = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ours", "stock"))
    assert sorted(ours) == sorted(stock)
    assert all(torch.equal(ours[name], stock[name]) for name in stock)
    configs = [json.loads((tmp_path / name / "adapter_config.json").read_text()) for name in ("ours", "stock")]
    for config in configs:
        config.update({key: sorted(config[key]) for key in ("target_modules", "target_parameters")})
    assert configs[0] == configs[1]


@pytest.mark.parametrize("broken", ["config", "tensors"])
def test_a_difference_is_refused(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Had the export a mistake, it would raise and write nothing."""
    model = adapted(tiny_model("qwen3_moe"))
    if broken == "config":
        monkeypatch.setattr(export, "_rank_and_alpha", lambda layer, name: (4, 7))
    else:
        monkeypatch.setattr(export, "split_lora_B", lambda b, experts: b.view(len(b), experts, -1).permute(1, 0, 2))
    with pytest.raises(RuntimeError, match=r"layers\.0\.mlp\.experts.*expert 0.*nothing was written"):
        export_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_differing_scalings_warn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning where the config's r and lora_alpha alone do not give every scaling."""
    messages: list[str] = []
    monkeypatch.setattr(export.logger, "warning", messages.append)
    export_adapter(adapted(tiny_model("qwen3_moe")), tmp_path)
    assert messages == []
    export_adapter(adapted(tiny_model("qwen3_moe"), rank_pattern={"q_proj": 2}), tmp_path)
    assert len(messages) == 1


def test_refusals(tmp_path: Path) -> None:
    """What cannot be exported raises before anything is written."""
    out = tmp_path / "adapter"
    model = adapted(tiny_model("qwen3_moe"))
    with pytest.raises(ValueError, match="layout is 'vllm', expected one of per_expert, fused"):
        export_adapter(model, out, layout="vllm")
    with pytest.raises(ValueError, match=r"no adapter 'other', only \['default'\]"):
        export_adapter(model, out, adapter_name="other")
    with pytest.raises(TypeError, match="expected a PeftModel, got Qwen3MoeForCausalLM"):
        export_adapter(tiny_model("qwen3_moe"), out)
    model.merge_adapter()
    with pytest.raises(ValueError, match=r"'default' is merged.*unmerge_adapter"):
        export_adapter(model, out)
    model.unmerge_adapter()
    model.base_model.model.model.layers[0].mlp.experts.to("meta")
    with pytest.raises(ValueError, match=r"on meta.*gather"):
        export_adapter(model, out)
    only_attention = adapted(tiny_model("qwen3_moe"), target_parameters=[])
    with pytest.raises(ValueError, match=r"'default' adapts no experts.*layout='fused'"):
        export_adapter(only_attention, out)
    dora = adapted(tiny_model("qwen3_moe"), target_parameters=[], use_dora=True)
    with pytest.raises(ValueError, match="is DoRA"):
        export_adapter(dora, out)
    ia3 = get_peft_model(tiny_model("qwen3_moe"), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    with pytest.raises(TypeError, match="not LoRA"):
        export_adapter(ia3, out)
    unknown = build("llama4")
    stacks = adapted(unknown, target_parameters=lora_targets(unknown).experts)
    with pytest.raises(ValueError, match=r"feed_forward\.experts \(Llama4TextExperts\) has no flags.*layout='fused'"):
        export_adapter(stacks, out)
    assert not out.exists()
