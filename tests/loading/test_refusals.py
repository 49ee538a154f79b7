"""What must never load in silence: quantized sources that do not say so, new linears, experts drawn at random."""

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification, Qwen3MoeConfig

from hf_qmoe import QMoEConfig, quantize_experts
from tests.support.checkpoints import load
from tests.support.models import tiny_model, token_ids


def edited(source: Path, target: Path, change: object, binary: bool = False) -> Path:
    """A copy of a one-file checkpoint with its state dict changed by `change`."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    state = load_file(source / "model.safetensors")
    change(state)
    if binary:
        torch.save(state, target / "pytorch_model.bin")
    else:
        save_file(state, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize("binary", [False, True], ids=["safetensors", "bin"])
@pytest.mark.parametrize("part", [".experts.", "q_proj"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_in_eight_bit(
    dtype: torch.dtype, part: str, binary: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A source whose config does not say that it is quantized is refused, not cast to floats without its scales."""

    def quantize(state: dict[str, torch.Tensor]) -> None:
        for name, tensor in state.items():
            if part in name:
                state[name] = (tensor.float() * 100).to(dtype)

    checkpoint = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", quantize, binary)
    with pytest.raises(ValueError, match="quantized already"):
        load(checkpoint, QMoEConfig())


def test_plain_binary_checkpoint_loads(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A float `pytorch_model.bin` gives what the safetensors file gives."""
    source = tiny_checkpoints["qwen3_moe"]
    checkpoint = edited(source, tmp_path / "binary", lambda state: None, binary=True)
    expected, actual = (load(path, QMoEConfig())(token_ids()).logits for path in (source, checkpoint))
    assert torch.equal(actual, expected)


def test_new_head_stays_float(tiny_checkpoints: dict[str, Path]) -> None:
    """A head with a bias, which the checkpoint does not have, is initialised in float by transformers."""
    model = AutoModelForTokenClassification.from_pretrained(
        tiny_checkpoints["qwen3_moe"], num_labels=3, quantization_config=QMoEConfig()
    )
    assert type(model.score) is torch.nn.Linear
    assert torch.isfinite(model(token_ids()).logits).all()


@pytest.mark.parametrize("packed", [False, True])
def test_missing_linear(packed: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """A quantized linear that is not in the checkpoint is named, from a float and from a packed one."""
    source = tiny_checkpoints["qwen3_moe"]
    if packed:
        load(source, QMoEConfig()).save_pretrained(tmp_path / "packed")
        source = tmp_path / "packed"

    def remove(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "layers.1.self_attn.q_proj" in name]:
            del state[name]

    checkpoint = edited(source, tmp_path / "edited", remove)
    with pytest.raises(ValueError, match=r"lacks.*layers\.1\.self_attn\.q_proj\.weight"):
        load(checkpoint, None if packed else QMoEConfig())


LOST = (["weight"], [".absmax"], [".quant_map"], [".quant_state"], [".absmax", ".quant_map", ".quant_state"])


@pytest.mark.parametrize(
    ("lost", "double_quant"),
    [
        *((lost, nested) for lost in LOST for nested in (False, True)),
        *(
            ([f".nested_{name}" for name in names.split()], True)
            for names in ("absmax", "quant_map", "absmax quant_map")
        ),
    ],
)
def test_missing_tensors_of_a_linear(
    lost: list[str], double_quant: bool, tiny_checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """They are named, each of them: some ways to save a state dict keep only bytes."""
    config = QMoEConfig(bnb_4bit_use_double_quant=double_quant)
    load(tiny_checkpoints["qwen3_moe"], config).save_pretrained(tmp_path / "packed")
    prefix = "model.layers.1.self_attn.q_proj.weight"
    names = [prefix if part == "weight" else prefix + part for part in lost]

    def remove(state: dict[str, torch.Tensor]) -> None:
        for name in [n for n in state if n in names or any(n.startswith(f"{name}.bits") for name in names)]:
            del state[name]

    checkpoint = edited(tmp_path / "packed", tmp_path / "edited", remove)
    with pytest.raises(ValueError, match=f"lacks {len(names)} tensors") as raised:
        load(checkpoint)
    assert all(name in str(raised.value) for name in names)


def test_skipped_experts_are_not_initialised(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    """Experts left out by the config must come from the checkpoint too."""

    def remove(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "layers.1.mlp.experts" in name]:
            del state[name]

    checkpoint = edited(tiny_checkpoints["qwen3_moe"], tmp_path / "edited", remove)
    with pytest.raises(ValueError, match=r"lacks.*layers\.1\.mlp\.experts\.gate_up_proj"):
        load(checkpoint, QMoEConfig(modules_to_not_convert=["layers.1.mlp.experts"]))


def test_config_changed_after_quantizing(tmp_path: Path) -> None:
    """A model keeps the config it was quantized with, whatever its caller does to theirs."""
    config = QMoEConfig()
    model = quantize_experts(tiny_model("qwen3_moe"), config)
    config.experts_quant_type = "int8"
    model.save_pretrained(tmp_path)
    assert torch.equal(load(tmp_path)(token_ids()).logits, model(token_ids()).logits)


def test_dequantizing_under_an_adapter(tiny_checkpoints: dict[str, Path]) -> None:
    """A model with adapters is not dequantized under them."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(load(tiny_checkpoints["qwen3_moe"], QMoEConfig()), LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="adapters"):
        model.base_model.model.dequantize()


def test_kernel_weights_are_found_in_base_classes() -> None:
    """A subclass of a mixer that reads a linear's weight is seen to read it."""
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

    from hf_qmoe.source_code import weight_is_read

    class Mixer(NemotronHMamba2Mixer):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

    assert weight_is_read(Mixer(), "out_proj")
    assert not weight_is_read(Mixer(), "in_proj_of_another_name")


def test_all_dense_config_raises_with_a_way_out() -> None:
    """A MoE config whose layers are all dense packs nothing, and the error says what to use."""
    config = copy.deepcopy(tiny_model("qwen3_moe").config)
    assert isinstance(config, Qwen3MoeConfig)
    with pytest.raises(ValueError, match="BitsAndBytesConfig"):
        quantize_experts(tiny_model("qwen3_moe", mlp_only_layers=[0, 1]))
