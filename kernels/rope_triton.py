"""Triton kernel of the rotary embedding: one program per token turns q and k, and stores k and v.

Equation and lane order in `rope.py`. fp32 inside, rounded once.
"""

import torch
import triton
import triton.language as tl

from .configs import capability_of, overlap_options
from .tile_triton import start_next, wait_for_previous


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


@triton.jit(do_not_specialize=["start"])
def _rope_kernel(
    q_ptr,  # [T, HEADS_Q, 2 * HALF], tokens STRIDE_Q apart
    k_ptr,  # [T, HEADS_K, 2 * HALF], tokens STRIDE_K apart
    v_ptr,  # [T, HEADS_K, 2 * HALF], tokens STRIDE_V apart
    cos_ptr,  # [C, HALF] fp32
    sin_ptr,  # [C, HALF] fp32
    q_out_ptr,  # [T, HEADS_Q, 2 * HALF]
    k_cache_ptr,  # [C, HEADS_K, 2 * HALF]
    v_cache_ptr,
    start,  # position of the first token, or where it is to be read
    ON_DEVICE: tl.constexpr,
    STRIDE_Q: tl.constexpr,
    STRIDE_K: tl.constexpr,
    STRIDE_V: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    wait_for_previous(PDL)
    if ON_DEVICE:
        start = tl.load(start)
    token = tl.program_id(0).to(tl.int64)
    position = token + start
    lane, every = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    cos = tl.load(cos_ptr + position * HALF + lane, mask=lane < HALF, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + lane, mask=lane < HALF, other=0.0)
    row = position * (HEADS_K * 2 * HALF)
    v = tl.load(v_ptr + token * STRIDE_V + every, mask=every < HEADS_K * 2 * HALF)
    tl.store(v_cache_ptr + row + every, v, mask=every < HEADS_K * 2 * HALF)
    _turn(k_ptr + token * STRIDE_K, k_cache_ptr + row, cos, sin, HEADS_K, HALF, BLOCK_K, BLOCK_D)
    q_out_ptr += token * (HEADS_Q * 2 * HALF)
    _turn(q_ptr + token * STRIDE_Q, q_out_ptr, cos, sin, HEADS_Q, HALF, BLOCK_Q, BLOCK_D)
    start_next(PDL)


def rope_and_store_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: int | torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Launch it; arguments as `rope_and_store`. q, k, v may be columns of one matrix, not copied."""
    q, k, v = _dense_heads(q), _dense_heads(k), _dense_heads(v)
    assert cos.is_contiguous() and sin.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    (tokens, heads_q, head_dim), heads_k = q.shape, k.shape[1]
    q_out = q.new_empty(q.shape)
    if tokens:
        _rope_kernel[(tokens,)](
            q, k, v, cos, sin, q_out, k_cache, v_cache, start,
            ON_DEVICE=isinstance(start, torch.Tensor),
            STRIDE_Q=q.stride(0), STRIDE_K=k.stride(0), STRIDE_V=v.stride(0),
            HEADS_Q=heads_q, HEADS_K=heads_k, HALF=head_dim // 2,
            BLOCK_Q=triton.next_power_of_2(heads_q), BLOCK_K=triton.next_power_of_2(heads_k),
            BLOCK_D=triton.next_power_of_2(head_dim // 2),
            BLOCK_V=triton.next_power_of_2(heads_k * head_dim),
            num_warps=4, enable_fp_fusion=True, **overlap_options(capability_of(q)),
        )  # fmt: skip
    return q_out


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D] with the heads of a token next to each other; tokens may be further apart."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
