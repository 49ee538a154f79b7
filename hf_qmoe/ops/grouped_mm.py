"""Inference on accelerators: products that do not ask the device how many rows each expert has.

Asking means waiting until the device has done all it was given, once per projection. Here offsets stay on the device,
so what runs on the host depends on shapes alone. That costs work: which experts to unpack has to be chosen without
knowing them.

- Few rows: the packed bytes of each row's expert are gathered, and each row is multiplied by its own weight. An expert
  of two rows is gathered twice. bitsandbytes' ``gemm_4bit`` reads the bytes directly where there is such a kernel.
- Many rows: as many experts as there can be hits, the hit ones first, are unpacked into one buffer for
  ``torch.nn.functional.grouped_mm``.

Results are as good as those of dequantizing and ``F.linear``, but not bit for bit the same.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_qmoe.ops import cuda
from hf_qmoe.ops.formats import NESTED_BLOCKSIZE, codebook, dequantize, get_format
from hf_qmoe.ops.operands import Operands


# Weights unpacked at once; 1 GiB in bfloat16. bitsandbytes' kernels count them in 32 bits.
_WEIGHTS_AT_ONCE = 1 << 29

# Each row is a kernel of its own with `gemm_4bit`: few enough for their launches to take less time than unpacking.
_GEMM_ROWS = 16

# Up to this share of rows to experts two rows seldom have the same expert, and gathering by row repeats little.
_FEW_ROWS = 0.25

# `grouped_mm` wants rows that begin at a multiple of this.
_ALIGNMENT_BYTES = 16


def _scales(stack: Operands) -> Tensor | None:
    """fp32 ``[E, G]``, decompressed if they are double-quantized."""
    if stack.absmax is None:
        return None
    absmax = stack.absmax.reshape(stack.shape[0], -1)
    if stack.nested_absmax is None or stack.nested_offset is None:
        return absmax
    # An expert's last block of scales may be short. Filled up, the experts follow each other as one matrix.
    codes = pad(absmax, (0, -absmax.shape[1] % NESTED_BLOCKSIZE))
    values: Tensor = torch.ops.bitsandbytes.dequantize_blockwise.default(
        codes, stack.nested_absmax, codebook("int8", codes.device), NESTED_BLOCKSIZE, torch.float32
    )
    return (values[:, : absmax.shape[1]] + stack.nested_offset.unsqueeze(1)).contiguous()


def _unpack(stack: Operands, buffer: Tensor) -> Tensor:
    """``[E, N, K]`` in the dtype of `buffer`, written to the beginning of it where it need not be elsewhere.

    Blocks do not cross experts, so a stack is unpacked as the matrix of all its rows.
    """
    experts, rows, columns = stack.shape
    packed, scales = stack.packed.reshape(experts * rows, -1), _scales(stack)
    out = buffer[: experts * rows * columns].view(experts * rows, columns)
    if scales is None:
        out = dequantize(packed, None, stack.quant_type, 0, buffer.dtype)
    elif not cuda.dequantize_into(out, packed, scales.view(-1), stack.quant_type, stack.blocksize):
        out.copy_(dequantize(packed, scales, stack.quant_type, stack.blocksize, buffer.dtype))
    return out.view(experts, rows, columns)


def grouped_linear(x: Tensor, stack: Operands, expert_offsets: Tensor) -> Tensor | None:
    """``y = x @ W_e.T`` for rows sorted by expert, without autograd; see `hf_qmoe.ops.schema.grouped_linear`.

    Offsets are not checked, since that would be to wait for them: where they do not begin at 0, which is what a
    negative expert index does, the rows before the first of them give NaN.

    Args:
        x: contiguous ``[S, K]``.

    Returns:
        ``[S, N]`` in the dtype of `x`; `None` for more rows than experts where torch has no grouped product that
        leaves the offsets on the device (`hf_qmoe.ops.cuda.has_grouped_mm`).
    """
    rows, (experts, features, _) = x.shape[0], stack.shape
    if not rows:
        return x.new_empty(0, features)
    is_grouped = cuda.has_grouped_mm(x.device, x.dtype)
    if rows <= (experts * _FEW_ROWS if is_grouped else experts):
        out = _by_row(x, stack, expert_offsets)
    elif is_grouped:
        out = _by_expert(x, stack, expert_offsets)
    else:
        return None
    index = torch.arange(rows, device=x.device).unsqueeze(1)
    return out.masked_fill_(index >= expert_offsets[-1], 0).masked_fill_(index < expert_offsets[0], float("nan"))


def experts_of_rows(num_rows: int, expert_offsets: Tensor) -> tuple[Tensor, Tensor]:
    """The expert of each row, int64 ``[S]``, and whether it has one, without waiting; some expert's where it has none.

    Args:
        num_rows: S.
        expert_offsets: int64 ``[E + 1]``, see `hf_qmoe.ops.schema.grouped_linear`.
    """
    rows = torch.arange(num_rows, device=expert_offsets.device)
    experts = torch.searchsorted(expert_offsets, rows, right=True) - 1
    last = expert_offsets.shape[0] - 2
    return experts.clamp(0, last), (experts >= 0) & (experts <= last)


def _by_row(x: Tensor, stack: Operands, expert_offsets: Tensor) -> Tensor:
    """Each row by the weight of its expert; rows of no expert by some weight."""
    experts, _ = experts_of_rows(x.shape[0], expert_offsets)
    out = x.new_empty(x.shape[0], stack.shape[1])
    product = _gemm_rows if _multiplies_packed(x, stack) else _unpack_rows
    product(out, x, stack, experts)
    return out


def _multiplies_packed(x: Tensor, stack: Operands) -> bool:
    fits = get_format(stack.quant_type).bits == 4 and stack.shape[2] % stack.blocksize == 0
    return fits and x.shape[0] <= _GEMM_ROWS and cuda.has_gemm_4bit(x.device, x.dtype)


def _gemm_rows(out: Tensor, x: Tensor, stack: Operands, experts: Tensor) -> None:
    """``out[s] = x[s] @ W.T`` for the weight of ``experts[s]``, one fused product each."""
    own, shape = stack.select(experts), list(stack.shape[1:])
    assert own.absmax is not None
    for row in range(x.shape[0]):
        absmax, nested = own.absmax[row].view(-1), {}
        if own.nested_absmax is not None and own.nested_offset is not None:
            code = codebook("int8", x.device)
            nested = {"absmax_8bit": absmax, "absmax_code": code, "absmax_offset": own.nested_offset[row]}
            absmax = own.nested_absmax[row]
        facts = absmax, stack.blocksize, stack.quant_type
        gemm = torch.ops.bitsandbytes.gemm_4bit.default
        out[row : row + 1] = gemm(x[row : row + 1], own.packed[row].view(-1, 1), shape, *facts, **nested)


def _unpack_rows(out: Tensor, x: Tensor, stack: Operands, experts: Tensor) -> None:
    """``out[s] = x[s] @ W.T`` for the weight of ``experts[s]``, unpacked."""
    numel = stack.shape[1] * stack.shape[2]
    step = min(x.shape[0], max(1, _WEIGHTS_AT_ONCE // numel))
    buffer = x.new_empty(step * numel)
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        weights = _unpack(stack.select(experts[rows]), buffer)
        # `out=` is left alone by autocast.
        torch.bmm(x[rows].unsqueeze(1), weights.transpose(1, 2), out=out[rows].unsqueeze(1))


def _by_expert(x: Tensor, stack: Operands, expert_offsets: Tensor) -> Tensor:
    """Each expert's rows by its weight; rows of no expert are arbitrary."""
    rows, ends = x.shape[0], expert_offsets[1:]
    if rows < stack.shape[0]:
        is_empty = (expert_offsets[1:] == expert_offsets[:-1]).int()
        hits_first = torch.argsort(is_empty, stable=True)[:rows]
        # Where there are fewer hits, experts without rows fill up the rest: they end where the last hit ends.
        stack, ends = stack.select(hits_first), ends.index_select(0, hits_first).cummax(0).values
    experts, numel = stack.shape[0], stack.shape[1] * stack.shape[2]
    step = min(experts, max(1, _WEIGHTS_AT_ONCE // numel))
    buffer = x.new_empty(step * numel)
    if step == experts:
        return _grouped(x, _unpack(stack, buffer), ends).contiguous()
    out, index, start = x.new_empty(rows, stack.shape[1]), torch.arange(rows, device=x.device), expert_offsets[0]
    for expert in range(0, experts, step):
        part = stack.narrow(expert, expert + step)
        # The first group of a grouped product begins at row 0: the rows are turned round until these experts' do.
        turned = x.index_select(0, (index + start) % rows)
        part_ends = ends[expert : expert + step]
        result = _grouped(turned, _unpack(part, buffer), part_ends - start)
        is_theirs = (index >= start) & (index < part_ends[-1])
        out = torch.where(is_theirs.unsqueeze(1), result.index_select(0, (index - start) % rows), out)
        start = part_ends[-1]
    return out


def _grouped(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Rows ``ends[e - 1]:ends[e]`` of `x` times ``weights[e].T``; those past the last are arbitrary."""
    excess = -x.shape[1] % (_ALIGNMENT_BYTES // x.element_size())
    if excess:
        x, weights = pad(x, (0, excess)), pad(weights, (0, excess))
    elif x.storage_offset() * x.element_size() % _ALIGNMENT_BYTES:
        x = x.clone()
    return torch.nn.functional.grouped_mm(x, weights.transpose(1, 2), offs=ends.to(torch.int32))
