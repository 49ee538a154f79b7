"""A whole experts layer as one operator, for inference: weights are unpacked into registers or cache, never to memory.

No autograd and no bits to keep: activations between the projections are not rounded as often as in
`hf_qmoe.experts.ExpertsNbit`'s other path. Against float64, errors are at most 1.1 times those of that path. Rows of a
token are added in the order of its experts, in float32, whatever the number of threads.
"""

import torch
from torch import Tensor

from hf_qmoe.ops import native_product
from hf_qmoe.ops.checks import check
from hf_qmoe.ops.formats import codebook
from hf_qmoe.ops.native_library import DTYPES
from hf_qmoe.ops.native_product import LayerInputs
from hf_qmoe.ops.operands import Operands
from hf_qmoe.ops.schema import check_stack


@torch.library.custom_op("hf_qmoe::fused_experts", mutates_args=())
def fused_experts(
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    up_packed: Tensor,
    up_absmax: Tensor,
    up_nested_absmax: Tensor | None,
    up_nested_offset: Tensor | None,
    up_bias: Tensor | None,
    down_packed: Tensor,
    down_absmax: Tensor,
    down_nested_absmax: Tensor | None,
    down_nested_offset: Tensor | None,
    down_bias: Tensor | None,
    quant_type: str,
    gate: str,
    activation: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """``sum_k top_k_weights * down(activation(up(x)))`` over the experts of each token. Ask `can_fuse` first.

    Args:
        x: ``[T, H]`` float32, bfloat16 or float16 on the CPU.
        top_k_index: int ``[T, k]``; E and more name no expert.
        top_k_weights: ``[T, k]``.
        up_packed, up_absmax, up_nested_absmax, up_nested_offset: the up projection, ``[E, 2I, H]`` (``[E, I, H]``
            without a gate), see `hf_qmoe.ops.schema.grouped_linear`.
        up_bias: float ``[E, 2I]``.
        down_packed, down_absmax, down_nested_absmax, down_nested_offset: the down projection, ``[E, H, I]``.
        down_bias: float ``[E, H]``.
        quant_type: of both: nf4, fp4, int8 or fp8.
        gate: one of `hf_qmoe.ops.native_product.GATES`.
        activation: one of `hf_qmoe.ops.native_product.ACTIVATIONS`.
        out_dtype: that of `x`, or float32.

    Returns:
        ``[T, H]`` in `out_dtype`.

    Raises:
        RuntimeError: an argument has the wrong shape or dtype, or there are no kernels for these operands.
        ValueError: an index is negative.
    """
    up = Operands(up_packed, up_absmax, up_nested_absmax, up_nested_offset, quant_type).contiguous()
    down = Operands(down_packed, down_absmax, down_nested_absmax, down_nested_offset, quant_type).contiguous()
    check(can_fuse(x, up, down), lambda: f"there are no fused kernels for {x.dtype} on {x.device}")
    prepared = PreparedExperts(up, down, gate)
    return prepared.run(LayerInputs(x, top_k_index, top_k_weights, up_bias, down_bias), activation, out_dtype)


@fused_experts.register_fake
def _(x: Tensor, *operands: object) -> Tensor:
    out_dtype = operands[-1]
    assert isinstance(out_dtype, torch.dtype)
    return x.new_empty(x.shape, dtype=out_dtype)


def can_fuse(x: Tensor, *stacks: Operands) -> bool:
    """Whether `fused_experts` has kernels for inputs like `x` and these stacks."""
    return native_product.multiplies(x, *stacks)


class PreparedExperts:
    """The packed weights of a layer, checked and described for the kernels, so that many calls need not do it again.

    It holds addresses of weights and not the tensors, or they could not be offloaded: the caller knows that they are
    still there.

    Args:
        up: contiguous; see `fused_experts`. `can_fuse` has been asked.
        down: likewise.
        gate: one of `hf_qmoe.ops.native_product.GATES`.

    Raises:
        RuntimeError: tensors do not belong together.
    """

    def __init__(self, up: Operands, down: Operands, gate: str) -> None:
        for stack in (up, down):
            check_stack(*stack)
        (experts, up_rows, hidden), (_, _, features) = up.shape, down.shape
        check(
            down.shape == (experts, hidden, features),
            lambda: f"up {up.shape} and down {down.shape} do not belong together",
        )
        expected = features if gate == "none" else 2 * features
        check(up_rows == expected, lambda: f"up has {up_rows} rows, {gate} for {features} features needs {expected}")
        self._hidden, self._bias_shapes = hidden, ((experts, up_rows), (experts, hidden))
        self._layer = native_product.describe_experts(up, down, gate)
        self._tables = codebook("int8", "cpu"), codebook(up.quant_type, "cpu")  # kept: it has their addresses

    def run(self, given: LayerInputs, activation: str, out_dtype: torch.dtype) -> Tensor:
        """`fused_experts` with these weights."""
        given = LayerInputs(
            native_product.ready(given.x, given.x.dtype),
            native_product.ready(given.top_k_index, torch.int64),
            native_product.ready(given.top_k_weights, *DTYPES),
            *(None if bias is None else native_product.ready(bias, torch.float32) for bias in given[3:]),
        )
        layer = self.describe(given, activation, out_dtype)
        out = torch.empty_like(given.x, dtype=out_dtype)
        check(native_product.run_experts(layer, out, *given[:3]), lambda: native_product.NO_KERNEL)
        return out

    def describe(self, given: LayerInputs, activation: str, out_dtype: torch.dtype) -> native_product.DescribedExperts:
        """The layer for inputs of these sizes and dtypes, and for these biases, of which it has the addresses.

        Raises:
            RuntimeError: they do not belong to these weights.
        """
        x, top_k_index, top_k_weights, *biases = given
        hidden = self._hidden
        check(x.ndim == 2 and x.shape[1] == hidden, lambda: f"x must be [T, {hidden}], got {tuple(x.shape)}")
        check(
            top_k_index.ndim == 2 and top_k_index.shape[0] == x.shape[0] and top_k_index.shape == top_k_weights.shape,
            lambda: (
                f"top_k_index {tuple(top_k_index.shape)} and top_k_weights {tuple(top_k_weights.shape)} must be [T, k]"
            ),
        )
        for bias, shape in zip(biases, self._bias_shapes, strict=True):
            check(
                bias is None or bias.shape == shape,
                lambda bias=bias, shape=shape: f"a bias must be {shape}, got {tuple(bias.shape)}",
            )
        check(
            out_dtype in (x.dtype, torch.float32), lambda: f"out_dtype must be {x.dtype} or float32, got {out_dtype}"
        )
        return native_product.for_inputs(self._layer, given, activation, out_dtype)
