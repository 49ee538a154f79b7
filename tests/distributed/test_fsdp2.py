"""FSDP2 on two CPU processes: packed bytes and scales are sharded, and a mixed-precision policy casts neither."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_qmoe import ExpertsNbit
from tests.support.processes import RANKS, run_ranks


class Block(nn.Module):
    """A residual layer with packed experts and a trainable projection in front."""

    def __init__(self, quant_type: str, double_quant: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.norm = nn.Linear(64, 64, bias=False)
        self.experts = ExpertsNbit.from_float(
            torch.randn(4, 96, 64, generator=generator) * 0.1,
            torch.randn(4, 64, 48, generator=generator) * 0.1,
            quant_type=quant_type,
            blocksize=64,
            double_quant=double_quant,
            compute_dtype=torch.bfloat16,
        )

    def forward(self, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return x + self.experts(self.norm(x), top_k_index, top_k_weights)


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(6, 64, generator=generator).bfloat16()
    return x, torch.randint(4, (6, 2), generator=generator), torch.rand(6, 2, generator=generator).bfloat16()


def _worker(rank: int, quant_type: str, double_quant: bool) -> None:
    torch.manual_seed(0)
    block = Block(quant_type, double_quant)
    reference = copy.deepcopy(block)
    reference.norm.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(block, mesh=dist.device_mesh.init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    for parameter in block.experts.parameters():
        assert parameter.to_local().shape[0] == 4 // RANKS, "dim 0, the experts, is sharded"
    out, expected = block(*_inputs()), reference(*_inputs())
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    out.float().pow(2).sum().backward()
    expected.float().pow(2).sum().backward()
    gradient, expected_gradient = block.norm.weight.grad.full_tensor(), reference.norm.weight.grad
    torch.testing.assert_close(gradient, expected_gradient.float(), rtol=0, atol=0)


@pytest.mark.parametrize(("quant_type", "double_quant"), [("nf4", True), ("int8", False)])
def test_mixed_precision_policy_changes_no_bit(quant_type: str, double_quant: bool, tmp_path: Path) -> None:
    """Output and gradient under a bf16 policy equal the unsharded module's, whose scales nothing casts."""
    run_ranks(_worker, tmp_path / "rendezvous", quant_type, double_quant)
