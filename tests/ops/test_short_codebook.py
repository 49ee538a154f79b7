"""Codebooks rounded to bfloat16 before they are scaled: errors that blocks have in common must not add up."""

import pytest
import torch

from hf_qmoe.ops.formats import codebook
from hf_qmoe.ops.short_codebook import short_codebook


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_it_is_held_by_bfloat16(quant_type: str) -> None:
    """And is the codebook, but for one rounding."""
    values, factor = short_codebook(quant_type)[:16], short_codebook(quant_type)[16]
    assert torch.equal(values, values.bfloat16().float())
    expected = codebook(quant_type, "cpu")
    error = (values * factor - expected).abs()
    assert (error <= expected.abs() * torch.finfo(torch.bfloat16).eps / 2 * 1.001).all()
    assert torch.equal(values == 0, expected == 0)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_errors_of_normally_distributed_weights(quant_type: str) -> None:
    """Their size is less than that of weights rounded after scaling; neither they nor their part along the weights
    have a mean, which would grow with the length of a row.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(1 << 15, 64, generator=generator, dtype=torch.float64)
    scales = blocks.abs().amax(dim=1, keepdim=True)
    exact = codebook(quant_type, "cpu").double()
    order = exact.argsort()
    bounds = (exact[order][1:] + exact[order][:-1]) / 2
    codes = order[torch.searchsorted(bounds, blocks / scales)]
    weights = exact[codes] * scales
    table = short_codebook(quant_type).double()
    errors = table[:16][codes] * table[16] * scales - weights
    size, other = errors.square().mean().sqrt(), (weights.float().bfloat16().double() - weights).square().mean().sqrt()
    assert size < (0.7 if quant_type == "nf4" else 1e-3) * other
    assert errors.mean().abs() < 0.03 * other
    assert (errors * weights).mean().abs() < 0.03 * other * weights.square().mean().sqrt()
