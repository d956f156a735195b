"""Triton kernel of the dense products: y = x W^T + b, SwiGLU of its halves, and heads for attention.

A matrix of 4096 rows is 64 tiles, too few to keep the memory of a large card busy. So K is cut
into segments, by the shape of W alone, and

    y = ((s_0 + s_1) + s_2) + ... (+ b),    s_i = the product over segment i, fp32

Up to 32 rows each segment is a program of its own that writes s_i to memory and counts itself; the
last of a tile to arrive, whichever it is, adds them in this order. For more rows one program walks
through its segments and adds them in the same order. Both therefore give the same bits, and so does
any number of rows between 1 and the longest prefill. The counters belong to the weight (see
`counters.py`): two launches over one weight must not run at the same time.

With PAIR a tile is half rows and half the rows PAIR further down, and whoever has the whole sum joins
them: gate and up, as in `expert_gemm_triton.py`, or the two lanes that the rotary embedding turns into
each other. Of a product that is q, k and v together, q is the result, and k and v go into their caches.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from spmoe_lite.quant import QuantizedMatrix

from .configs import FEW, SOME, capability_of, overlap_options, tile
from .counters import counters_of
from .linear import Weight
from .rope_triton import turned
from .tile_triton import TRITON_DTYPES, dot_tile, dot_tile_quantized, prefetch, scheme_constants

SEGMENT_STEP = 256  # a multiple of every K step in `configs.py`, and of two groups
MAX_SEGMENTS = 8
WANTED_PROGRAMS = 256  # of float weights: about two for each multiprocessor of a large card
# Of codes, fitted to an H200: multiprocessors, so many programs that one is busy, and what a program
# costs beside its loop, in steps of 128 columns.
PROCESSORS, BUSY, BESIDE = 132, 3.5, 2


@triton.jit
def _rows_of(tile, local, N: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of W [N, K] at the places `local` of a tile, all valid."""
    if PAIR > 0:
        HALF: tl.constexpr = BLOCK_N // 2
        row = tl.minimum(tile * HALF + local % HALF, N // 2 - 1)
        if PAIR < N // 2:
            row += row // PAIR * PAIR
        return row + local // HALF * PAIR
    row = tile * BLOCK_N + local
    return row if N % BLOCK_N == 0 else tl.minimum(row, N - 1)


@triton.jit
def _segment(
    w_ptr, scales_ptr, x_ptr, n, token, mine, begin, end,
    N: tl.constexpr, K: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The product over columns [begin, end), [BLOCK_N, BLOCK_T] fp32."""
    # Else ptxas sees a way around the loop and makes every wgmma wait for the one before (C7515).
    tl.assume(begin < end)
    if BITS == 0:
        return dot_tile(
            w_ptr, x_ptr, w_ptr, n.to(tl.int64), token, mine, begin, end, K, False,
            BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    else:
        return dot_tile_quantized(
            w_ptr, scales_ptr, x_ptr, w_ptr, scales_ptr, n * (4 * BITS), n, token, mine, begin, end,
            N, K, BITS, GROUP, ZEROS, DTYPE, FAST, False, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip


@triton.jit
def _store_heads(
    low, high, n, token, mine, q_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr, start,
    ON_DEVICE: tl.constexpr, HEADS_Q: tl.constexpr, HEADS_K: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """low, high [TILE, BLOCK_T]: lanes n of all heads, counted without their partners HALF further on."""
    if ON_DEVICE:
        start = tl.load(start)
    position = (start + token)[None, :]
    head, lane = (n // HALF)[:, None], (n % HALF)[:, None]
    inside = mine[None, :] & (head < HEADS_Q + 2 * HEADS_K)
    turning = inside & (head < HEADS_Q + HEADS_K)
    cos = tl.load(cos_ptr + position * HALF + lane, mask=turning, other=1.0)
    sin = tl.load(sin_ptr + position * HALF + lane, mask=turning, other=0.0)
    low, high = low.to(q_ptr.dtype.element_ty), high.to(q_ptr.dtype.element_ty)
    new_low, new_high = turned(low, high, cos, sin)
    low, high = tl.where(turning, new_low, low), tl.where(turning, new_high, high)
    at = (token[None, :] * HEADS_Q + head) * (2 * HALF) + lane
    tl.store(q_ptr + at, low, mask=inside & (head < HEADS_Q))
    tl.store(q_ptr + at + HALF, high, mask=inside & (head < HEADS_Q))
    at = (position * HEADS_K + head - HEADS_Q) * (2 * HALF) + lane
    tl.store(k_cache_ptr + at, low, mask=turning & (head >= HEADS_Q))
    tl.store(k_cache_ptr + at + HALF, high, mask=turning & (head >= HEADS_Q))
    at -= HEADS_K * (2 * HALF)
    tl.store(v_cache_ptr + at, low, mask=inside & (head >= HEADS_Q + HEADS_K))
    tl.store(v_cache_ptr + at + HALF, high, mask=inside & (head >= HEADS_Q + HEADS_K))


@triton.jit(do_not_specialize=["num_tokens", "start"])
def _linear_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]; the codes as int16 if BITS
    scales_ptr,  # int32, if BITS
    bias_ptr,  # [N], if BIAS
    residual_ptr,  # as out, if RESIDUAL
    out_ptr,  # [T, N], or [T, N / 2] if in pairs; [T, HEADS_Q, 2 * PAIR] of heads
    parts_ptr,  # [SEGMENTS, T, weight tiles * BLOCK_N] fp32, if SPREAD
    counters_ptr,  # [weight tiles] int32, zero before and after, if SPREAD
    cos_ptr,  # [C, PAIR] fp32; None: the product is not of heads
    sin_ptr,
    k_cache_ptr,  # [C, HEADS_K, 2 * PAIR]
    v_cache_ptr,
    start,  # position of the first token, or where it is to be read if ON_DEVICE
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPREAD: tl.constexpr,
    PAIR: tl.constexpr,  # rows from a row of W to its partner; 0: each is for itself
    ON_DEVICE: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BITS: tl.constexpr,  # of a code; 0: float weights
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,  # of x
    FAST: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    WIDE: tl.constexpr = N // 2 if PAIR else N
    TILE: tl.constexpr = BLOCK_N // 2 if PAIR else BLOCK_N
    row_tile, weight_tile, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = token < num_tokens
    rows = _rows_of(weight_tile, tl.arange(0, BLOCK_N), N, PAIR, BLOCK_N)
    token = token.to(tl.int64)

    begin = segment * SEGMENT
    if PDL:
        if (
            BITS == 0
        ):  # weights are nobody's result: their first columns come while the others finish
            line = tl.arange(0, 4) * (128 // w_ptr.dtype.element_ty.primitive_bitwidth * 8)
            at = rows.to(tl.int64)[:, None] * K + tl.minimum(begin + line, K - 1)[None, :]
            prefetch((w_ptr + at).to(tl.int64))
        tl.extra.cuda.gdc_wait()
    y = _segment(
        w_ptr, scales_ptr, x_ptr, rows, token, mine, begin, tl.minimum(begin + SEGMENT, K),
        N, K, BITS, GROUP, ZEROS, DTYPE, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SPREAD:
        PLACES: tl.constexpr = (WIDE + TILE - 1) // TILE * BLOCK_N
        place = weight_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        part_at = parts_ptr + token[None, :] * PLACES + place[:, None]
        stride = num_tokens.to(tl.int64) * PLACES
        tl.store(part_at + segment * stride, y, mask=mine[None, :])
        tl.debug_barrier()  # the whole program has stored before it is counted
        arrived = tl.atomic_add(counters_ptr + weight_tile, 1, sem="acq_rel")
        if arrived < SEGMENTS - 1:
            return
        tl.store(counters_ptr + weight_tile, 0)
        y = tl.load(part_at, mask=mine[None, :], other=0.0, cache_modifier=".cg")
        for later in tl.static_range(1, SEGMENTS):
            at = part_at + later * stride
            y += tl.load(at, mask=mine[None, :], other=0.0, cache_modifier=".cg")
    elif SEGMENTS > 1:
        for later in range(1, SEGMENTS):
            begin = later * SEGMENT
            y += _segment(
                w_ptr, scales_ptr, x_ptr, rows, token, mine, begin, tl.minimum(begin + SEGMENT, K),
                N, K, BITS, GROUP, ZEROS, DTYPE, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
            )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    n = weight_tile * TILE + tl.arange(0, TILE)
    if PAIR > 0:
        first, second = tl.split(tl.permute(tl.reshape(y, (2, TILE, BLOCK_T)), (1, 2, 0)))
        if cos_ptr is not None:
            _store_heads(
                first, second, n, token, mine, out_ptr, k_cache_ptr, v_cache_ptr, cos_ptr, sin_ptr,
                start, ON_DEVICE, HEADS_Q, HEADS_K, PAIR,
            )  # fmt: skip
            return
        y = first / (1.0 + tl.exp(-first)) * second
    at = token[None, :] * WIDE + n[:, None]
    inside = mine[None, :] & (n < WIDE)[:, None]
    y = y.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        beside = tl.load(residual_ptr + at, mask=inside, other=0.0)
        y = (beside.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + at, y, mask=inside)


@functools.cache
def segment_of(n: int, k: int, block_n: int, coded: bool = False) -> tuple[int, int]:
    """Length and number of the K segments of an [n, k] matrix; never depends on the rows of x.

    Codes are limited by what a multiprocessor computes, so they are cut for the least that the
    busiest has to do; floats by memory, for which enough programs will do.
    """
    tiles = triton.cdiv(n, block_n)

    def length(segments: int) -> int:
        return triton.cdiv(triton.cdiv(k, segments), SEGMENT_STEP) * SEGMENT_STEP

    def cost(segments: int) -> float:
        programs = triton.cdiv(tiles * triton.cdiv(k, length(segments)), PROCESSORS)
        return max(programs, BUSY) * (length(segments) / 128) + BESIDE * programs

    segments = max(1, min(MAX_SEGMENTS, WANTED_PROGRAMS // tiles))
    if coded:
        segments = min(range(1, MAX_SEGMENTS + 1), key=cost)
    return length(segments), triton.cdiv(k, length(segments))


def linear_triton(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
) -> torch.Tensor:
    """Launch the product; arguments as `linear`, or if `gated` as `swiglu`."""
    n = weight.shape[0]
    out = x.new_empty(len(x), n // 2 if gated else n)
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    _launch(x, weight, bias, out, residual=residual, pair=n // 2 if gated else 0)
    return out


def project_and_store_triton(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: int | torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Launch the product of heads; arguments as `project_and_store`, the caches of x's dtype."""
    assert all(one.is_contiguous() for one in (cos, sin, k_cache, v_cache))
    assert k_cache.dtype == v_cache.dtype == x.dtype
    heads_k, head_dim = k_cache.shape[1:]
    heads_q = weight.shape[0] // head_dim - 2 * heads_k
    q = x.new_empty(len(x), heads_q, head_dim)
    heads = cos, sin, k_cache, v_cache, start
    _launch(x, weight, bias, q, pair=head_dim // 2, heads=heads, counts=(heads_q, heads_k))
    return q


def _launch(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pair: int,
    residual: torch.Tensor | None = None,
    heads: tuple[Any, ...] = (None, None, None, None, 0),
    counts: tuple[int, int] = (0, 0),
) -> None:
    """heads: cos, sin, caches and start of a product of so many heads of q and of k (`counts`)."""
    x = x.contiguous()
    tokens, (n, k) = len(x), weight.shape
    if tokens == 0:
        return
    if isinstance(weight, QuantizedMatrix):
        scheme, owner = weight.scheme, weight.codes
        matrix = weight.codes.view(torch.int16)
        scales = weight.scales.view(torch.int32)
        assert matrix.is_contiguous() and scales.is_contiguous()
    else:
        assert weight.is_contiguous() and x.dtype == weight.dtype
        scheme, owner, matrix, scales = None, weight, weight, weight
    capability = capability_of(x)
    config = tile(capability, x.dtype, "dense", tokens, scheme)
    few = tile(capability, x.dtype, "dense", FEW, scheme).n
    segment, segments = segment_of(n, k, few, scheme is not None)
    spread = tokens <= SOME and segments > 1
    weight_tiles = triton.cdiv(n // 2, config.n // 2) if pair else triton.cdiv(n, config.n)
    parts = counters = out
    options = config.options()
    if tokens <= FEW and scheme is not None and scheme.bits == 4 and segments == MAX_SEGMENTS:
        options["num_stages"] += 2  # small tiles, short segments: most of one is under way at once
    if spread:
        parts = x.new_empty(segments, tokens, weight_tiles * config.n, dtype=torch.float32)
        counters = counters_of(owner, weight_tiles)
    grid = (triton.cdiv(tokens, config.t), weight_tiles, segments if spread else 1)
    _linear_kernel[grid](
        x, matrix, scales, x if bias is None else bias, x if residual is None else residual,
        out, parts, counters, *heads, tokens,
        N=n, K=k, SEGMENT=segment, SEGMENTS=segments, SPREAD=spread,
        PAIR=pair, ON_DEVICE=isinstance(heads[-1], torch.Tensor), HEADS_Q=counts[0], HEADS_K=counts[1],
        BIAS=bias is not None, RESIDUAL=residual is not None,
        DTYPE=TRITON_DTYPES[x.dtype], **scheme_constants(x.dtype, scheme),
        BLOCK_N=config.n, BLOCK_K=config.k, BLOCK_T=config.t,
        enable_fp_fusion=True, **options, **overlap_options(capability),
    )  # fmt: skip
