"""Triton kernel of the rotary embedding: one program per token turns all heads of q and k.

Equation and lane order in `rope.py`. fp32 inside, rounded once.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def _turn(
    in_ptr, out_ptr, low_cos, low_sin, HEADS: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head, lane = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    there = (head < HEADS)[:, None] & (lane < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + lane[None, :]
    low = tl.load(in_ptr + at, mask=there, other=0.0).to(tl.float32)
    high = tl.load(in_ptr + at + HALF, mask=there, other=0.0).to(tl.float32)
    cos, sin = low_cos[None, :], low_sin[None, :]
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (low * cos - high * sin).to(dtype), mask=there)
    tl.store(out_ptr + at + HALF, (high * cos + low * sin).to(dtype), mask=there)


@triton.jit
def _rope_kernel(
    q_ptr,  # [T, HEADS_Q, 2 * HALF], tokens STRIDE_Q apart
    k_ptr,  # [T, HEADS_K, 2 * HALF], tokens STRIDE_K apart
    cos_ptr,  # [T, HALF] fp32
    sin_ptr,  # [T, HALF] fp32
    q_out_ptr,
    k_out_ptr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_D)
    cos = tl.load(cos_ptr + token * HALF + lane, mask=lane < HALF, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + lane, mask=lane < HALF, other=0.0)
    q_at, k_at = token * HEADS_Q * 2 * HALF, token * HEADS_K * 2 * HALF
    q_ptr += token * STRIDE_Q
    k_ptr += token * STRIDE_K
    _turn(q_ptr, q_out_ptr + q_at, cos, sin, HEADS_Q, HALF, BLOCK_Q, BLOCK_D)
    _turn(k_ptr, k_out_ptr + k_at, cos, sin, HEADS_K, HALF, BLOCK_K, BLOCK_D)


def rope_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the turn; arguments as `rope`. q and k may be columns of one matrix: nothing is copied."""
    q, k, cos, sin = _dense_heads(q), _dense_heads(k), cos.contiguous(), sin.contiguous()
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    half = q.shape[2] // 2
    if len(q):
        _rope_kernel[(len(q),)](
            q, k, cos, sin, q_out, k_out,
            STRIDE_Q=q.stride(0), STRIDE_K=k.stride(0), HEADS_Q=q.shape[1], HEADS_K=k.shape[1], HALF=half,
            BLOCK_Q=triton.next_power_of_2(q.shape[1]), BLOCK_K=triton.next_power_of_2(k.shape[1]),
            BLOCK_D=triton.next_power_of_2(half), num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return q_out, k_out


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with the heads of a token next to each other; tokens may be further apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
