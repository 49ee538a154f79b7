"""How much of a checkpoint is in full precision at once while it is packed."""

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import core_model_loading

from hf_qmoe import QMoEConfig
from tests.support.checkpoints import load
from tests.support.models import PER_EXPERT_FAMILIES, tiny_model


#: Larger than any other tensor of the tiny models: 64 x 384 weights per projection against 128 x 64 of the embedding.
INTERMEDIATE = 384
PROJECTION = 64 * INTERMEDIATE


class LiveWeights(TorchDispatchMode):
    """Counts weights in live float tensors of at least one expert projection, those that operations make included.

    Tensors are followed by weak references; views of one storage count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._seen: list[weakref.ref[Tensor]] = []
        self.peak = 0
        self.materialized = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, tuple | list) else (out,):
            if isinstance(value, Tensor):
                self.follow(value)
        return out

    def follow(self, tensor: Tensor) -> None:
        """Counts `tensor` for as long as it lives."""
        if tensor.is_floating_point() and tensor.device.type != "meta":
            weights = tensor.untyped_storage().nbytes() // tensor.element_size()
            if weights >= PROJECTION:
                self._seen.append(weakref.ref(tensor))

    def measure(self) -> None:
        """Takes the live weights into account for the peak."""
        live = {}
        for tensor in [tensor for ref in self._seen if (tensor := ref()) is not None]:
            storage = tensor.untyped_storage()
            live[storage.data_ptr()] = storage.nbytes() // tensor.element_size()
        self.peak = max(self.peak, sum(live.values()))


def peak_of_a_load(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, config: QMoEConfig | None = None, **kwargs: object
) -> LiveWeights:
    """Live expert weights whenever the loader has just read a tensor from disk."""
    live = LiveWeights()
    read = core_model_loading._materialize_copy

    def materialize(*args: Any, **kwargs: Any) -> Tensor:
        tensor = read(*args, **kwargs)
        if tensor.is_floating_point() and tensor.numel() >= PROJECTION:
            live.materialized += 1
        live.follow(tensor)
        live.measure()
        return tensor

    monkeypatch.setattr(core_model_loading, "_materialize_copy", materialize)
    with live:
        load(checkpoint, config or QMoEConfig(), **kwargs)
    return live


def checkpoint_of(family: str, path: Path, **save: object) -> Path:
    """A checkpoint whose expert projections are larger than its other weights."""
    field = "moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"
    tiny_model(family, dtype=torch.bfloat16, **{field: INTERMEDIATE}).save_pretrained(path, **save)
    return path


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["as_stored", "cast"])
@pytest.mark.parametrize("family", PER_EXPERT_FAMILIES)
def test_per_expert_checkpoint(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than one expert's three projections are ever in full precision."""
    live = peak_of_a_load(checkpoint_of(family, tmp_path), monkeypatch, dtype=dtype)
    assert live.materialized == 2 * 4 * 3
    assert PROJECTION <= live.peak <= 3 * PROJECTION


def test_sharded_per_expert_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An expert whose projections lie in different shards costs no more."""
    live = peak_of_a_load(checkpoint_of("olmoe", tmp_path, max_shard_size="60KB"), monkeypatch)
    assert live.materialized == 2 * 4 * 3
    assert live.peak <= 3 * PROJECTION


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_fused_checkpoint(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the checkpoint is fused already, one stack at a time is in full precision."""
    live = peak_of_a_load(checkpoint_of(family, tmp_path, save_original_format=False), monkeypatch)
    assert live.materialized == 2 * 2
    assert 4 * PROJECTION <= live.peak <= 4 * 2 * PROJECTION


def test_measure_sees_what_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measure is worth something: with experts left out it finds at least a whole layer of them."""
    config = QMoEConfig(modules_to_not_convert=["experts"])
    live = peak_of_a_load(checkpoint_of("olmoe", tmp_path), monkeypatch, config)
    assert live.peak >= 4 * 3 * PROJECTION
