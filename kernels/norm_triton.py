"""Triton kernel of RMS norm, equation in `norm.py`: one program per row, kept in registers.

`normed` and `row_block` are also part of the router's kernel, whose rows must have the same bits:
the order of the sum follows from the block and the warps, so both take them from here.
"""

import torch
import triton
import triton.language as tl

from .configs import capability_of, overlap_options
from .tile_triton import start_next, wait_for_previous


def row_block(hidden: int) -> tuple[int, int]:
    """Elements of a row in one program, a power of 2, and the program's warps."""
    block = triton.next_power_of_2(hidden)
    return block, 4 if block <= 4096 else 8


@triton.jit
def normed(x, weight, eps, H: tl.constexpr):
    """x and weight [BLOCK] of any float dtype, 0 beyond H -> [BLOCK] fp32, not yet rounded."""
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    return x * scale * weight.to(tl.float32)


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    eps,
    H: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0)
    y = normed(x, weight, eps, H)
    start_next(PDL)
    tl.store(out_ptr + row * H + h, y.to(out_ptr.dtype.element_ty), mask=h < H)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the norm; arguments as `rms_norm`."""
    x = x.contiguous()
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    block, warps = row_block(hidden)
    if tokens:
        _rms_norm_kernel[(tokens,)](
            x, weight, out, eps, H=hidden, BLOCK=block, num_warps=warps, enable_fp_fusion=True,
            **overlap_options(capability_of(x)),
        )  # fmt: skip
    return out
