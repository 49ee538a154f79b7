"""What the four main families do not exercise: nested models, converters of other kinds, experts without a gate."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    Ernie4_5_VLMoeConfig,
    FalconH1Config,
    MiniMaxM3VLConfig,
    NemotronHConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3VLMoeConfig,
)

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import (
    assert_same_tensors,
    packed_modules,
    reference_pack,
    tensors_on_disk,
)
from tests.support.models import VOCAB, token_ids


TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}


def _qwen3_vl_moe() -> PreTrainedConfig:
    """Fused on disk, in either orientation: read through a transposition that compares shapes."""
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": []}
    return Qwen3VLMoeConfig(text_config=TEXT | {"moe_intermediate_size": 96, "num_experts": 4}, vision_config=vision)


def _ernie4_5_vl_moe() -> PreTrainedConfig:
    """Two experts modules in a layer, filled by one converter from one list of experts."""
    text = {"head_dim": 128, "hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": [96, 96], "intermediate_size": 96}
    text |= {"vocab_size": VOCAB, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "pad_token_id": 0}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64}
    return Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)


def _minimax_m3_vl() -> PreTrainedConfig:
    """Linears of the shared experts that the checkpoint stores in two parts."""
    text = {"num_local_experts": 4, "mlp_layer_types": ["sparse", "sparse"]}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return MiniMaxM3VLConfig(text_config=TEXT | text, vision_config=vision, projector_hidden_size=64)


def _nemotron_h() -> PreTrainedConfig:
    """Experts without a gate."""
    changes = {"layers_block_type": ["mamba", "moe", "attention"], "n_routed_experts": 4, "moe_intermediate_size": 96}
    changes |= {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
    fields = {name: value for name, value in TEXT.items() if name != "num_hidden_layers"}
    return NemotronHConfig(**fields, **changes, moe_shared_expert_intermediate_size=64, n_shared_experts=1)


def _deepseek_v3() -> PreTrainedConfig:
    """A dense layer before those with experts, a router with a correction that stays float32."""
    fields = {name: value for name, value in TEXT.items() if name != "head_dim"} | {"num_key_value_heads": 4}
    mla = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    moe = {"n_routed_experts": 4, "moe_intermediate_size": 96, "n_group": 1, "topk_group": 1}
    return DeepseekV3Config(**fields, **mla, **moe, first_k_dense_replace=1)


CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_vl_moe": _qwen3_vl_moe,
    "ernie4_5_vl_moe": _ernie4_5_vl_moe,
    "minimax_m3_vl": _minimax_m3_vl,
    "nemotron_h": _nemotron_h,
    "deepseek_v3": _deepseek_v3,
}
EVERY_FAMILY = pytest.mark.parametrize("family", CONFIGS)


def auto_class(family: str) -> type:
    """The class that loads a family's whole model."""
    return AutoModelForImageTextToText if "_vl" in family else AutoModelForCausalLM


def read(path: Path, family: str, **kwargs: object) -> PreTrainedModel:
    """Loads a checkpoint of `family`."""
    return auto_class(family).from_pretrained(path, experts_implementation="eager", **kwargs)


def forward(model: nn.Module) -> Tensor:
    """Logits for text alone."""
    with torch.no_grad():
        return model(input_ids=token_ids()).logits


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bf16 checkpoint per family, in its original layout."""
    root = tmp_path_factory.mktemp("families")
    for family, config in CONFIGS.items():
        torch.manual_seed(0)
        model = auto_class(family).from_config(config(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.normal_(std=0.1)
        model.to(torch.bfloat16).save_pretrained(root / family)
    return {family: root / family for family in CONFIGS}


@EVERY_FAMILY
def test_bytes(family: str, checkpoints: dict[str, Path]) -> None:
    """Every stack is packed, to bitsandbytes' bytes for each expert of the float model."""
    model, plain = (
        read(checkpoints[family], family, quantization_config=QMoEConfig()),
        read(checkpoints[family], family),
    )
    assert packed_modules(model)
    for path, module in packed_modules(model).items():
        experts = plain.get_submodule(path)
        for name, stack in module.stacks().items():
            for expert, weight in enumerate(getattr(experts, name).detach()):
                packed, absmax = reference_pack(weight, "nf4", stack.blocksize)
                assert torch.equal(stack.packed[expert], packed)
                assert torch.equal(stack.absmax[expert].flatten(), absmax)
    assert model.num_parameters() == plain.num_parameters()


@EVERY_FAMILY
def test_logits(family: str, checkpoints: dict[str, Path]) -> None:
    """bf16 experts of a bf16 checkpoint give the float model's logits."""
    config = QMoEConfig(experts_quant_type="bf16", quantize_linears=False)
    model = read(checkpoints[family], family, quantization_config=config, dtype=torch.float32)
    expected = forward(read(checkpoints[family], family, dtype=torch.float32))
    torch.testing.assert_close(forward(model), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


@EVERY_FAMILY
def test_in_memory(family: str, checkpoints: dict[str, Path]) -> None:
    """Quantizing in memory gives the tensors that loading gives."""
    made = quantize_experts(read(checkpoints[family], family))
    loaded = read(checkpoints[family], family, quantization_config=QMoEConfig())
    assert_same_tensors(made.state_dict(), loaded.state_dict())


@EVERY_FAMILY
def test_round_trip(family: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Two generations of saving and reloading keep every tensor, linears included."""
    model = read(checkpoints[family], family, quantization_config=QMoEConfig())
    model.save_pretrained(tmp_path / "first")
    first = read(tmp_path / "first", family)
    assert_same_tensors(first.state_dict(), model.state_dict())
    first.save_pretrained(tmp_path / "second")
    assert_same_tensors(tensors_on_disk(tmp_path / "second"), tensors_on_disk(tmp_path / "first"))


@pytest.mark.parametrize("how", ["from_pretrained", "quantize_experts"])
@EVERY_FAMILY
def test_dequantize(family: str, how: str, checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A dequantized model is saved with the source checkpoint's keys and shapes, and computes the same."""
    if how == "from_pretrained":
        model = read(checkpoints[family], family, quantization_config=QMoEConfig(), dtype=torch.float32)
    else:
        model = quantize_experts(read(checkpoints[family], family, dtype=torch.float32))
    expected = forward(model)
    actual = forward(model.dequantize())
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))
    model.save_pretrained(tmp_path)
    saved, source = tensors_on_disk(tmp_path), tensors_on_disk(checkpoints[family])
    assert {name: t.shape for name, t in saved.items()} == {name: t.shape for name, t in source.items()}


def _falcon_h1() -> PreTrainedConfig:
    return FalconH1Config(**TEXT, mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16)


@pytest.mark.parametrize("config", [_nemotron_h, _falcon_h1], ids=["nemotron_h", "falcon_h1"])
def test_linear_whose_weight_a_kernel_reads(config: Callable[[], PreTrainedConfig], tmp_path: Path) -> None:
    """``out_proj`` of a Mamba mixer, whose weight goes into a fused kernel as it is, stays a float linear."""
    AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QMoEConfig())
    projections = {name: module for name, module in model.named_modules() if name.endswith(".out_proj")}
    assert projections
    assert [name for name, module in projections.items() if isinstance(module, Linear4bit)] == []
