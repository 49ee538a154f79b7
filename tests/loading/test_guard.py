"""Nothing that looks like routed experts stays in full precision unasked, and nothing else is ever touched."""

import re
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)
from transformers.integrations.moe import use_experts_implementation

from hf_qmoe import ExpertsNbit, QMoEConfig, quantize_experts
from tests.support.checkpoints import load, logits, packed_modules, packed_state
from tests.support.models import tiny_config, tiny_model


BOTH_WAYS = pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])


class Unseen(nn.Module):
    """Stacks with a name that says nothing of experts."""

    def __init__(self, rows: int = 96) -> None:
        super().__init__()
        self.fc1 = nn.Parameter(torch.randn(4, rows, 64) * 0.1)
        self.fc2 = nn.Parameter(torch.randn(4, 64, rows) * 0.1)


class ExpertMlp(nn.Module):
    """One expert of a list."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, width, bias=False), nn.Linear(width, 64, bias=False)


class Listed(nn.Module):
    """A MoE block of before transformers v5: a router and a list of MLPs."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.gate = nn.Linear(64, 4, bias=False)
        self.experts = nn.ModuleList(ExpertMlp(width) for _ in range(4))


def with_blocks(block: type[nn.Module], name: str, **arguments: object) -> type[Qwen3MoeForCausalLM]:
    """A model class with `block` as the whole MLP of each layer."""

    class Custom(Qwen3MoeForCausalLM):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            for layer in self.model.layers:
                layer.mlp = block(**arguments)

    Custom.__name__ = name
    return Custom


def quantized(
    how: str, cls: type[PreTrainedModel], path: Path, config: QMoEConfig, source: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """A model of `cls`, quantized while it is read or in memory."""
    model = cls(source or tiny_config("qwen3_moe"))
    if how == "quantize_experts":
        return quantize_experts(model, config)
    model.save_pretrained(path)
    return cls.from_pretrained(path, quantization_config=config)


@BOTH_WAYS
def test_stacks_of_an_unknown_name(how: str, tmp_path: Path) -> None:
    cls = with_blocks(Unseen, "UnseenMoe")
    with pytest.raises(ValueError, match=r"(?s)layers\.0\.mlp \(Unseen, 196,608 bytes\).*modules_to_not_convert"):
        quantized(how, cls, tmp_path, QMoEConfig())
    model = quantized(how, cls, tmp_path, QMoEConfig(modules_to_not_convert=[r"layers\.\d+\.mlp"]))
    assert model.model.layers[0].mlp.fc1.is_floating_point()


def test_small_stacks_of_an_unknown_name_are_left_alone(tmp_path: Path) -> None:
    model = quantized("from_pretrained", with_blocks(Unseen, "SmallMoe", rows=2), tmp_path, QMoEConfig())
    assert model.model.layers[0].mlp.fc1.is_floating_point()


@BOTH_WAYS
def test_a_list_of_experts(how: str, tmp_path: Path) -> None:
    """Their linears are quantized, the router beside them is not; without linears nothing would be."""
    cls = with_blocks(Listed, "ListedMoe")
    model = quantized(how, cls, tmp_path, QMoEConfig())
    experts = [m for n, m in model.named_modules() if re.search(r"experts\.\d\.(up|down)$", n)]
    assert len(experts) == 16
    assert all(isinstance(module, Linear4bit) for module in experts)
    assert type(model.model.layers[0].mlp.gate) is nn.Linear
    says = r"(?s)layers\.0\.mlp\.experts\.0\.up \(Linear, 32,768 bytes\).*quantize_linears=True"
    with pytest.raises(ValueError, match=says):
        quantized(how, cls, tmp_path / "again", QMoEConfig(quantize_linears=False))


@BOTH_WAYS
def test_a_list_of_experts_that_linears_leave_out(how: str, tmp_path: Path) -> None:
    """bitsandbytes' kernel needs in_features in multiples of 64."""
    cls = with_blocks(Listed, "NarrowMoe", width=96)
    with pytest.raises(ValueError, match=r"(?s)experts\.0\.down \(Linear.*no multiple of 64.*modules_to_not_convert"):
        quantized(how, cls, tmp_path, QMoEConfig())
    config = QMoEConfig(modules_to_not_convert=[r"experts\.\d+\.down"])
    assert type(quantized(how, cls, tmp_path, config).model.layers[0].mlp.experts[0].down) is nn.Linear


@BOTH_WAYS
def test_switch_transformers(how: str, tmp_path: Path) -> None:
    """Experts in a dict of linears, of which the model keeps half in float32; routers stay float."""
    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_experts": 4, "vocab_size": 128}
    layers = {"num_layers": 2, "num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = SwitchTransformersConfig(**sizes, **layers, decoder_start_token_id=0)
    cls = SwitchTransformersForConditionalGeneration
    with pytest.raises(ValueError, match=r"(?s)mlp\.experts\.expert_0\.wo \(Linear.*keeps in float32"):
        quantized(how, cls, tmp_path / "whole", QMoEConfig(), config)
    model = quantized(how, cls, tmp_path, QMoEConfig(modules_to_not_convert=["wo"]), config)
    for name, module in model.named_modules():
        if re.search(r"experts\.expert_\d\.wi$", name):
            assert isinstance(module, Linear4bit), name
        if re.search(r"experts\.expert_\d\.wo$", name):
            assert type(module) is nn.Linear, name
            assert module.weight.dtype is torch.float32, name
        if name.endswith("router.classifier"):
            assert type(module) is nn.Linear, name


class OwnLinear(nn.Linear):
    """A subclass of somebody's, which bitsandbytes does not replace."""


class Odd(nn.Module):
    """A block whose experts are in a form that nothing here packs."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.experts = nn.Module()
        if form == "parameter list":
            self.experts.weights = nn.ParameterList(nn.Parameter(torch.zeros(96, 64)) for _ in range(4))
        elif form == "four axes":
            self.experts.w = nn.Parameter(torch.zeros(4, 2, 96, 64))
            self.experts.w2 = nn.Parameter(torch.zeros(4, 64, 96))
        elif form == "one matrix":
            self.experts.num_experts = 4
            self.experts.w1 = nn.Parameter(torch.zeros(4 * 96, 64))
        elif form == "linears of a subclass":
            self.experts = nn.ModuleList(OwnLinear(64, 128) for _ in range(4))
        else:
            self.experts = nn.ModuleList(nn.Bilinear(64, 64, 4) for _ in range(4))


@BOTH_WAYS
@pytest.mark.parametrize(
    "form", ["parameter list", "four axes", "one matrix", "linears of a subclass", "bilinear"], ids=str
)
def test_experts_in_other_forms_beside_ordinary_ones(how: str, tmp_path: Path, form: str) -> None:
    """That other experts are found does not hide them."""

    class Mixed(Qwen3MoeForCausalLM):
        def __init__(self, config: object) -> None:
            super().__init__(config)
            self.model.layers[1].mlp = Odd(form)

    with pytest.raises(ValueError, match=r"(?s)layers\.1\.mlp\.experts.*[\d,]+ bytes.*modules_to_not_convert"):
        quantized(how, Mixed, tmp_path, QMoEConfig())
    model = quantized(how, Mixed, tmp_path / "again", QMoEConfig(modules_to_not_convert=[r"layers\.1\.mlp.*"]))
    assert len(packed_modules(model)) == 1


class MatrixExperts(nn.Module):
    """As DBRX's, with a bias for each expert beside the matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.moe_num_experts = 4
        self.w1, self.w2 = (nn.Parameter(torch.randn(4 * 96, 64)) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(4, 64))


class ExpertsRouter(nn.Module):
    """Chooses among experts, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.moe_num_experts = 4
        self.weight = nn.Parameter(torch.randn(4, 64))


@BOTH_WAYS
def test_routers_and_biases_of_matrix_experts_stay_float(how: str, tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts_router, self.expert_mlp = ExpertsRouter(), MatrixExperts()

    model = quantized(how, with_blocks(Block, "MatrixMoe"), tmp_path, QMoEConfig())
    block = model.model.layers[0].mlp
    assert list(block.expert_mlp.parametrizations) == ["w1", "w2"]
    assert block.expert_mlp.bias.is_floating_point()
    assert type(block.experts_router) is ExpertsRouter
    assert block.experts_router.weight.is_floating_point()


class GatedExperts(nn.Module):
    """Says gated in its name, and is no gate."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.w1 = nn.Parameter(torch.randn(4, 96, 64))


class ExpertHead(nn.Module):
    """One MLP, whatever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)


@BOTH_WAYS
def test_names_that_mislead(how: str, tmp_path: Path) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp, self.expert_head = GatedExperts(), ExpertHead()

    model = quantized(how, with_blocks(Block, "MisleadingMoe"), tmp_path, QMoEConfig(quantize_linears=False))
    block = model.model.layers[0].mlp
    assert list(block.mlp.parametrizations) == ["w1"]
    assert type(block.expert_head.up) is nn.Linear


# -- a model type that was never seen -------------------------------------------------------------------------------


@use_experts_implementation(is_transposed=True)
class NovelExperts(nn.Module):
    """Follows the experts interface."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.num_experts, self.config = 4, config
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 192) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(4, 96, 64) * 0.1)
        self.act_fn = nn.SiLU()

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.tanh(gate) * (up + 1)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, slot = torch.where(top_k_index == expert)
            rows = self._apply_gate(hidden_states[token] @ self.gate_up_proj[expert]) @ self.down_proj[expert]
            out.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return out


class NovelBlock(nn.Module):
    """Router and experts."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.router, self.pool = nn.Linear(64, 4, bias=False), NovelExperts(config)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, 64)
        weights, index = self.router(rows).softmax(-1).topk(2)
        return self.pool(rows, index, weights).view_as(x)


class NovelConfig(PreTrainedConfig):
    """Says nothing of experts."""

    model_type = "qmoe_novel"


class NovelModel(PreTrainedModel):
    """Two residual MoE blocks under an embedding and a head."""

    config_class = NovelConfig
    _no_split_modules = ("NovelBlock",)

    def __init__(self, config: NovelConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(128, 64)
        self.blocks = nn.ModuleList(NovelBlock(config) for _ in range(2))
        self.proj, self.head = nn.Linear(64, 64), nn.Linear(64, 128)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **kwargs: object) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.proj(x))


@pytest.mark.parametrize("experts_quant_type", ["nf4", "int8"])
def test_a_model_type_never_seen(tmp_path: Path, experts_quant_type: str) -> None:
    AutoConfig.register("qmoe_novel", NovelConfig, exist_ok=True)
    torch.manual_seed(0)
    source = NovelModel(NovelConfig(experts_implementation="eager"))
    source.save_pretrained(tmp_path / "float")
    config = QMoEConfig(experts_quant_type=experts_quant_type)
    model = NovelModel.from_pretrained(tmp_path / "float", quantization_config=config)
    packed = packed_modules(model)
    assert list(packed) == ["blocks.0.pool", "blocks.1.pool"]
    assert type(model.blocks[0].router) is nn.Linear
    assert isinstance(model.proj, Linear4bit)
    for name, module in packed.items():
        reference = source.get_submodule(name)
        for stack_name, stack in module.stacks().items():
            getattr(reference, stack_name).data = stack.dequantize(torch.float32).transpose(1, 2)
        hidden, index = torch.randn(6, 64), torch.randint(0, 4, (6, 2))
        weights = torch.rand(6, 2)
        torch.testing.assert_close(module(hidden, index, weights), reference(hidden, index, weights))
    model.save_pretrained(tmp_path / "packed")
    again = NovelModel.from_pretrained(tmp_path / "packed")
    assert packed_state(again).keys() == packed_state(model).keys()
    assert all(torch.equal(a, packed_state(model)[n]) for n, a in packed_state(again).items())


# -- nothing but experts is touched ---------------------------------------------------------------------------------

_LEAVES = {
    "conv": lambda: nn.Conv1d(4, 8, 3),
    "conv_of_experts": lambda: nn.Conv1d(4, 4, 4),
    "codebook": lambda: _with(codebook=(4, 32, 16)),
    "cls_token": lambda: _with(cls_token=(1, 1, 64)),
    "position": lambda: _with(pos_embed=(1, 4, 64)),
    "relative": lambda: _with(rel_pos=(4, 7, 16)),
    "attention": lambda: nn.MultiheadAttention(64, 4),
    "gru": lambda: nn.GRU(64, 64),
    "norm": lambda: nn.LayerNorm(64),
    "scale": lambda: _with(scale=(4, 1, 1), temperature=()),
    "bias": lambda: _with(bias=(4, 1, 64)),
}
_NAMES = ("mlp", "encoder", "expert_proj", "experts_norm", "shared_expert", "layers", "mixer")


def _with(**shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


_TREES = st.recursive(
    st.sampled_from(sorted(_LEAVES)),
    lambda children: st.dictionaries(st.sampled_from(_NAMES), children, min_size=1, max_size=3),
    max_leaves=8,
)


def _grow(tree: str | dict[str, object]) -> nn.Module:
    if isinstance(tree, str):
        return _LEAVES[tree]()
    module = nn.Module()
    for name, child in tree.items():
        module.add_module(name, _grow(child))  # type: ignore[arg-type]
    return module


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=_TREES, place=st.sampled_from(["extra", "expert_tower", "experts_adapter"]))
def test_nothing_but_experts_is_touched(tree: str | dict[str, object], place: str) -> None:
    """Whatever hangs in the tree beside the experts, of any name: its parameters stay the same objects.

    Codebooks under a name like these have the shape of experts; where they are a twentieth of the model it is refused.
    """
    model = tiny_model("qwen3_moe")
    model.model.layers[0].add_module(place, _grow(tree))
    grown = {n: p for n, p in model.named_parameters() if f"layers.0.{place}." in n}
    values = {n: p.detach().clone() for n, p in grown.items()}
    refusal = None
    try:
        quantize_experts(model, QMoEConfig(quantize_linears=False))
    except ValueError as error:
        refusal = str(error)
    assert len(packed_modules(model)) == (0 if refusal else 2)
    assert refusal is None or (place != "extra" and "would stay in full precision" in refusal)
    after = dict(model.named_parameters())
    for name, parameter in grown.items():
        assert after[name] is parameter
        assert torch.equal(parameter, values[name])


def test_what_is_lost_after_loading_is_noticed(
    tiny_checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard looks at the loaded model too, not only at the plan."""
    import hf_qmoe.quantizer as quantizer

    check = quantizer.refuse_incomplete

    def unpacking(model: PreTrainedModel) -> None:
        check(model)
        next(m for m in model.modules() if isinstance(m, ExpertsNbit)).to_experts(torch.bfloat16)

    monkeypatch.setattr(quantizer, "refuse_incomplete", unpacking)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.experts \(Qwen3MoeExperts, [\d,]+ bytes\)"):
        load(tiny_checkpoints["qwen3_moe"], QMoEConfig())


def test_logits_of_a_dense_model_are_no_concern(dense_checkpoint: Path) -> None:
    assert logits(load(dense_checkpoint, QMoEConfig())).isfinite().all()
    assert AutoModelForCausalLM.from_pretrained(dense_checkpoint).dtype is torch.bfloat16
