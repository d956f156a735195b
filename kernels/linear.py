"""Dense matrix products, accumulated in fp32: y = x W^T + b, and SwiGLU of two in one.

On the GPU the bits of a row do not depend on how many rows stand beside it: `linear_triton.py`
says how. On the CPU this is torch's own product. Rows may differ in the last bit with their number
there.

Which product is fast on a CPU depends on dtype and rows (measured: Zen 5, two cores, torch 2.13).
fp32 up to 8 rows: W x^T reads 30 to 40 GB/s of weights where x W^T reads 8 to 15, and a single row
is worth doubling to leave the slow one-row path. bf16 has a native product on machines with
AVX-512; elsewhere torch falls to a scalar loop that is slower than widening the weights. fp16 has
only that loop beyond a few rows. A quantised matrix is dequantised at each call there.
"""

from typing import TypeAlias

import torch
import torch.nn.functional as F

from spmoe_lite.quant import QuantizedMatrix

Weight: TypeAlias = "torch.Tensor | QuantizedMatrix"

NATIVE_FP16_ROWS = 4  # up to here torch's fp16 product beats widening the weights
TALL_ROWS, TALL_NUMEL = 8, 1 << 16  # fp32: W x^T up to so many rows, from so many weights on


def linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, K], weight [N, K], bias [N], residual [T, N], all of one dtype -> [T, N] of that dtype.

    A quantised weight counts as rounded to x's dtype. The residual is added to the rounded product
    and the sum rounded again, as by an addition of its own. CPU tensors take the torch reference.
    """
    if x.is_cuda:
        from .linear_triton import linear_triton

        return linear_triton(x, weight, bias, residual)
    return linear_reference(x, weight, bias, residual)


def swiglu(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """x [T, K], weight [2 I, K], rows of gate, then of up -> silu(gate) * up [T, I] in x's dtype.

    On the GPU both are fp32 until the result is rounded. CPU tensors take the torch reference.
    """
    if x.is_cuda:
        from .linear_triton import linear_triton

        return linear_triton(x, weight, gated=True)
    return swiglu_reference(x, weight)


def linear_reference(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch, in whichever precision this CPU multiplies fastest; at least fp32 sums."""
    if residual is not None:
        return residual + linear_reference(x, weight, bias)
    if isinstance(weight, QuantizedMatrix):
        weight = weight.dequantize(x.dtype)
    rows, dtype = len(x), weight.dtype
    if dtype == torch.float32 and rows <= TALL_ROWS and weight.numel() >= TALL_NUMEL:
        columns = torch.cat((x, x)) if rows == 1 else x
        y = torch.mm(weight, columns.t())[:, :rows].t().contiguous()
        return y if bias is None else y.add_(bias)
    if _is_native(dtype, rows):
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.float()
    return F.linear(x.float(), weight.float(), bias).to(x.dtype)


def swiglu_reference(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    """The same by torch; here gate and up are rounded before."""
    gate, up = linear_reference(x, weight).float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def _is_native(dtype: torch.dtype, rows: int) -> bool:
    if dtype == torch.bfloat16:
        return rows == 1 or torch.backends.cpu.get_cpu_capability() == "AVX512"
    return dtype != torch.float16 or rows <= NATIVE_FP16_ROWS
