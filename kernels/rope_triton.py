"""Triton kernel of the rotary embedding: one program per token turns q and k, and stores k and v.

Equation and lane order in `rope.py`. fp32 inside, rounded once; codes are of the rounded values. Caches
that are not int8 need no such kernel: there the product of q, k and v does it (`linear_triton.py`).
"""

import torch
import triton
import triton.language as tl

from .configs import capability_of, overlap_options
from .tile_triton import start_next, wait_for_previous

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it leaves no bits for a fraction


@triton.jit
def turned(low, high, cos, sin):
    """Both halves of rows, turned and rounded; each fma is spelled out, so all kernels give the same bits."""
    x, y = low.to(tl.float32), high.to(tl.float32)
    cos, sin = tl.broadcast_to(cos, x.shape), tl.broadcast_to(sin, x.shape)
    return tl.fma(x, cos, -(y * sin)).to(low.dtype), tl.fma(y, cos, x * sin).to(high.dtype)


@triton.jit
def _turn(
    in_ptr, out_ptr, scale_ptr, scale_stride, low_cos, low_sin, HEADS: tl.constexpr,
    HALF: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store the row turned, or as it is without cos and sin; in codes where there is a scale_ptr."""
    head, lane = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    there = (head < HEADS)[:, None] & (lane < HALF)[None, :]
    at = head[:, None] * (2 * HALF) + lane[None, :]
    low = tl.load(in_ptr + at, mask=there, other=0.0)
    high = tl.load(in_ptr + at + HALF, mask=there, other=0.0)
    if low_cos is not None:
        low, high = turned(low, high, low_cos[None, :], low_sin[None, :])
    if scale_ptr is not None:
        low, high = low.to(tl.float32), high.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.maximum(_size(low), _size(high)), axis=1), 127.0).to(tl.float16)
        step = scale.to(tl.float32)
        finite = step < float("inf")
        usable = (finite & (step > 0.0))[:, None]
        low, high = _codes(low, step, usable), _codes(high, step, usable)
        shown = tl.where(finite, scale, float("nan"))
        tl.store(scale_ptr + head * scale_stride, shown, mask=head < HEADS)
    tl.store(out_ptr + at, low, mask=there)
    tl.store(out_ptr + at + HALF, high, mask=there)


@triton.jit
def _size(x):
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _codes(x, step, usable):
    """round(x / step) int8, half to even; 0 where the step cannot be used."""
    code = tl.div_rn(x, tl.where(usable, step[:, None], 1.0) + tl.zeros_like(x))
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    return tl.where(usable, (code + ROUND) - ROUND, 0.0).to(tl.int8)


@triton.jit(do_not_specialize=["start", "capacity"])
def _rope_kernel(
    q_ptr,  # [T, HEADS_Q, 2 * HALF], tokens STRIDE_Q apart
    k_ptr,  # [T, HEADS_K, 2 * HALF], tokens STRIDE_K apart
    v_ptr,  # [T, HEADS_K, 2 * HALF], tokens STRIDE_V apart
    cos_ptr,  # [C, HALF] fp32
    sin_ptr,  # [C, HALF] fp32
    q_out_ptr,  # [T, HEADS_Q, 2 * HALF]
    k_cache_ptr,  # [C, HEADS_K, 2 * HALF]
    v_cache_ptr,
    kv_scale_ptr,  # [HEADS_K, capacity, 2] fp16 where the caches are int8, else None
    start,  # position of the first token, or where it is to be read
    capacity,
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
    if kv_scale_ptr is None:
        v = tl.load(v_ptr + token * STRIDE_V + every, mask=every < HEADS_K * 2 * HALF)
        tl.store(v_cache_ptr + row + every, v, mask=every < HEADS_K * 2 * HALF)
        k_scale_ptr = None
    else:
        k_scale_ptr = kv_scale_ptr + position * 2
        _turn(
            v_ptr + token * STRIDE_V, v_cache_ptr + row, k_scale_ptr + 1, capacity * 2, None, None,
            HEADS_K, HALF, BLOCK_K, BLOCK_D,
        )  # fmt: skip
    _turn(
        k_ptr + token * STRIDE_K, k_cache_ptr + row, k_scale_ptr, capacity * 2, cos, sin,
        HEADS_K, HALF, BLOCK_K, BLOCK_D,
    )  # fmt: skip
    _turn(
        q_ptr + token * STRIDE_Q, q_out_ptr + token * (HEADS_Q * 2 * HALF), None, 0, cos, sin,
        HEADS_Q, HALF, BLOCK_Q, BLOCK_D,
    )  # fmt: skip
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
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch it; arguments as `rope_and_store`. q, k, v may be columns of one matrix, not copied."""
    q, k, v = _dense_heads(q), _dense_heads(k), _dense_heads(v)
    assert cos.is_contiguous() and sin.is_contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    assert k_cache.dtype == v_cache.dtype == (q.dtype if kv_scales is None else torch.int8)
    assert kv_scales is None or (kv_scales.is_contiguous() and kv_scales.dtype == torch.float16)
    (tokens, heads_q, head_dim), heads_k = q.shape, k.shape[1]
    q_out = q.new_empty(q.shape)
    if tokens:
        _rope_kernel[(tokens,)](
            q, k, v, cos, sin, q_out, k_cache, v_cache, kv_scales, start,
            0 if kv_scales is None else kv_scales.shape[1],
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
