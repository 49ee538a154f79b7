"""gpt-oss with experts in mxfp4: dequantized and packed one expert at a time."""

from pathlib import Path
from weakref import WeakSet

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_qmoe import QMoEConfig
from hf_qmoe.sources.mxfp4 import Mxfp4
from tests.sources.checkpoints import mxfp4_checkpoint
from tests.support.checkpoints import assert_same_tensors, edited, load, logits, packed_modules, packed_state


def float_checkpoint(source: Path, target: Path, stacks: dict[str, Tensor]) -> Path:
    """gpt-oss in bf16 with the stacks ``[E, K, N]``, which bf16 holds exactly."""
    return edited(
        source, target, lambda tensors: tensors.update({n: s.bfloat16().contiguous() for n, s in stacks.items()})
    )


@pytest.mark.parametrize("experts_module", ["nbit", "parametrize"])
@pytest.mark.parametrize("experts_quant_type", ["nf4", "fp4", "int8", "bf16"])
def test_equals_quantizing_the_dequantized_checkpoint(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, experts_quant_type: str, experts_module: str
) -> None:
    source = tiny_checkpoints["gpt_oss"]
    path, stacks = mxfp4_checkpoint(source, tmp_path / "mxfp4")
    config = QMoEConfig(experts_quant_type=experts_quant_type, experts_module=experts_module)
    model, info = load(path, config, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    expected = load(float_checkpoint(source, tmp_path / "float", stacks), config)
    assert_same_tensors(packed_state(model), packed_state(expected))
    assert torch.equal(logits(model), logits(expected))


def test_bf16_holds_every_value(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path, stacks = mxfp4_checkpoint(tiny_checkpoints["gpt_oss"], tmp_path / "mxfp4")
    model = load(path, QMoEConfig(experts_quant_type="bf16"))
    for (path_of, module), layer in zip(packed_modules(model).items(), range(2), strict=True):
        for name, stack in module.stacks().items():
            expected = stacks[f"{path_of}.{name}"].transpose(1, 2)
            assert torch.equal(stack.dequantize(torch.float32), expected), (layer, name)


def test_one_expert_at_a_time(
    tiny_checkpoints: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: WeakSet[Tensor] = WeakSet()
    most = 0
    decode = Mxfp4.decode

    def counting(self: Mxfp4, parts: dict[str, Tensor], dtype: torch.dtype) -> Tensor:
        nonlocal most
        value = decode(self, parts, dtype)
        assert value.ndim == 2
        decoded.add(value)
        most = max(most, len(decoded))
        return value

    monkeypatch.setattr(Mxfp4, "decode", counting)
    path, _ = mxfp4_checkpoint(tiny_checkpoints["gpt_oss"], tmp_path / "mxfp4")
    load(path, QMoEConfig())
    assert 1 <= most <= 2


def test_left_out_experts_are_dequantized(tiny_checkpoints: dict[str, Path], tmp_path: Path) -> None:
    path, stacks = mxfp4_checkpoint(tiny_checkpoints["gpt_oss"], tmp_path / "mxfp4")
    model = load(path, QMoEConfig(modules_to_not_convert=["layers.0.mlp.experts"]))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert torch.equal(model.get_parameter(name), stacks[name].bfloat16())


@pytest.mark.parametrize("change", ["lost scales", "fewer experts"])
def test_broken_stacks_are_named(tiny_checkpoints: dict[str, Path], tmp_path: Path, change: str) -> None:
    path, _ = mxfp4_checkpoint(tiny_checkpoints["gpt_oss"], tmp_path / "mxfp4")
    name = "model.layers.1.mlp.experts.down_proj"
    for file in path.glob("*.safetensors"):
        tensors = load_file(file)
        for key in [key for key in tensors if key.startswith(name) and not key.endswith("bias")]:
            if change == "fewer experts":
                tensors[key] = tensors[key][:3].contiguous()
            elif key.endswith("_scales"):
                del tensors[key]
        save_file(tensors, file, metadata={"format": "pt"})
    expected = "has 3 experts, expected 4" if change == "fewer experts" else "without _scales"
    with pytest.raises(ValueError, match=rf"{name}.*{expected}"):
        load(path, QMoEConfig())
