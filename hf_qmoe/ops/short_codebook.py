"""Codebooks whose values bfloat16 holds: weights of all blocks can be looked up in one, and sums be scaled afterwards.

Rounding a codebook gives each of its values an error that is the same in all blocks, so the errors of a row do not
average out if they lean to one side. Values are rounded after they were multiplied with a factor that makes the errors
small, and their mean over normally distributed weights, and over the squares of these, almost nothing. Then they are
less than those of weights that are rounded after scaling: of nf4 0.6 of that, of fp4 none.
"""

import torch
from torch import Tensor

from hf_qmoe.once import once
from hf_qmoe.ops.defaults import torch_defaults
from hf_qmoe.ops.formats import codebook


#: Found by trying 20000 from 1 to 2 for nf4; fp4 has multiples of 1/192.
_FACTORS = {"nf4": 1.1885, "fp4": 1.5}


@once
def short_codebook(quant_type: str) -> Tensor:
    """16 values that bfloat16 holds, and what makes them those of `codebook`, but for their rounding; fp32 ``[17]``.

    Args:
        quant_type: nf4 or fp4.
    """
    with torch_defaults():
        factor = torch.tensor([_FACTORS[quant_type]], dtype=torch.float32)
        values = (codebook(quant_type, "cpu") * factor).to(torch.bfloat16).to(torch.float32)
        return torch.cat([values, 1 / factor])
