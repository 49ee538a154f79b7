"""`autocast_dtype` is what autocast does to a product, and nothing where torch knows no autocast."""

import pytest
import torch

from hf_qmoe.autocast import autocast_dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_the_dtype_of_a_product(dtype):
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=dtype):
        assert autocast_dtype("cpu") == (x @ x).dtype == dtype
        with torch.autocast("cpu", enabled=False):
            assert autocast_dtype("cpu") is None
            assert (x @ x).dtype == torch.float32
    assert autocast_dtype("cpu") is None


@pytest.mark.parametrize("device_type", ["meta", "vulkan", "cuda"])
def test_another_device_is_not_asked_in_vain(device_type):
    """Autocast of the CPU is not that of others; asking about meta would raise."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert autocast_dtype(device_type) is None
