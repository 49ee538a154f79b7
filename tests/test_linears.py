"""bitsandbytes' linears: our quantization of their weights is its own, bit for bit."""

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn

from hf_qmoe import QMoEConfig
from hf_qmoe.linears import QMoELinear4bit, quantize_linear_weight, replace_linears, restore_linears


def linear(quant_type: str = "nf4", double_quant: bool = False, storage: torch.dtype = torch.uint8) -> Linear4bit:
    """A linear with a placeholder for its weight."""
    with torch.device("meta"):
        return Linear4bit(192, 160, False, torch.float32, double_quant, quant_type=quant_type, quant_storage=storage)


def state_tensors(weight: Params4bit) -> dict[str, Tensor]:
    """The statistics of a weight, as they are saved."""
    return weight.quant_state.as_dict(packed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_weight_equals_that_of_bitsandbytes(
    quant_type: str, double_quant: bool, storage: torch.dtype, dtype: torch.dtype, device: str
) -> None:
    """Bytes, statistics and attributes are what ``Params4bit(...).to(device)`` gives."""
    weight = torch.randn(160, 192, device=device).to(dtype)
    ours_module, stock_module = (linear(quant_type, double_quant, storage) for _ in range(2))
    stock = Params4bit(weight.clone(), requires_grad=False, **stock_module.weight.__dict__).to(device)
    ours = quantize_linear_weight(weight, ours_module.weight)
    assert type(ours) is type(stock)
    assert ours.shape == stock.shape
    assert ours.dtype == stock.dtype
    assert torch.equal(ours.data.view(torch.uint8), stock.data.view(torch.uint8))
    ours_state, stock_state = state_tensors(ours), state_tensors(stock)
    assert ours_state.keys() == stock_state.keys()
    for name, expected in stock_state.items():
        assert ours_state[name].dtype == expected.dtype
        assert torch.equal(ours_state[name], expected), name
    for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage", "bnb_quantized", "requires_grad"):
        assert getattr(ours, name) == getattr(stock, name), name
    assert ours.module is ours_module
    assert ours_module.quant_state is ours.quant_state


def test_large_weight_is_quantized_in_runs() -> None:
    """A weight larger than one run, by a part of a run, gives the same bytes."""
    module, weight = linear(), torch.randn(4099, 192)
    stock = Params4bit(weight.clone(), requires_grad=False, **linear().weight.__dict__).to("cpu")
    assert torch.equal(quantize_linear_weight(weight, module.weight).data, stock.data)


def test_replace_and_restore() -> None:
    """Names in `skipped` are exact; what comes back has the dequantized weight, the bias and the mode."""
    model = nn.Sequential(nn.Linear(64, 32), nn.Sequential(nn.Linear(64, 32, bias=False))).eval()
    expected = {name: p.clone() for name, p in model.named_parameters()}
    replace_linears(model, ["0.0"], QMoEConfig(), torch.float32)
    assert all(isinstance(m, Linear4bit) for m in (model[0], model[1][0]))
    replaced = model[0].bias
    restore_linears(model, torch.float32)
    assert type(model[0]) is nn.Linear
    assert not model[0].training
    assert torch.equal(model[0].bias, replaced)
    error = (model[0].weight - expected["0.weight"]).abs().max()
    assert 0 < error < 0.2 * expected["0.weight"].abs().max()
    replace_linears(model, ["1.0"], QMoEConfig(), torch.float32)
    assert [type(model[0]), type(model[1][0])] == [QMoELinear4bit, nn.Linear]


def test_weight_that_is_not_finite_is_refused() -> None:
    """NaN in a linear raises, as it does in an expert."""
    weight = torch.randn(160, 192)
    weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize_linear_weight(weight, linear().weight)
