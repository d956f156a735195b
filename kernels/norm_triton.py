"""Triton kernel of RMS norm, equation in `norm.py`: one program per row, kept in registers."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, H]
    weight_ptr,  # [H]
    out_ptr,  # [T, H]
    eps,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    h = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * H + h, mask=h < H, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + h, mask=h < H, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / H + eps)
    tl.store(out_ptr + row * H + h, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=h < H)


def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch the norm; arguments as `rms_norm`."""
    x = x.contiguous()
    tokens, hidden = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(hidden)
    if tokens:
        _rms_norm_kernel[(tokens,)](
            x,
            weight,
            out,
            eps,
            H=hidden,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
            enable_fp_fusion=True,
        )
    return out
