"""Triton kernels of the dense product: y = x W^T + b.

A matrix of 4096 rows is 64 tiles, too few to keep the memory of a large card busy. So K is cut
into segments, by the shape of W alone, and

    y = ((s_0 + s_1) + s_2) + ... (+ b),    s_i = the product over segment i, fp32

Up to 32 rows each segment is a program of its own that writes s_i to memory and counts itself; the
last of a tile to arrive, whichever it is, adds them in this order. For more rows one program walks
through its segments and adds them in the same order. Both therefore give the same bits, and so does
any number of rows between 1 and the longest prefill. The counters belong to the weight (see
`counters.py`): two launches over one weight must not run at the same time.
"""

import torch
import triton
import triton.language as tl

from spmoe_lite.quant import QuantizedMatrix

from .configs import FEW, SOME, capability_of, overlap_options, tile
from .counters import counters_of
from .linear import Weight
from .tile_triton import TRITON_DTYPES, dot_tile, dot_tile_quantized, prefetch, scheme_constants

SEGMENT_STEP = 256  # a multiple of every K step in `configs.py`, and of two groups
WANTED_PROGRAMS = 256  # about two per multiprocessor of a large card; codes want twice as many
MAX_SEGMENTS = 8


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


@triton.jit(do_not_specialize=["num_tokens"])
def _linear_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]; the codes as int16 if BITS
    scales_ptr,  # int32, if BITS
    bias_ptr,  # [N], if BIAS
    residual_ptr,  # [T, N], if RESIDUAL
    out_ptr,  # [T, N]
    parts_ptr,  # [SEGMENTS, T, N] fp32, if SPREAD
    counters_ptr,  # [weight tiles] int32, zero before and after, if SPREAD
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,
    SPREAD: tl.constexpr,
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
    row_tile, weight_tile, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    mine = token < num_tokens
    n = weight_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = n if N % BLOCK_N == 0 else tl.minimum(n, N - 1)
    token = token.to(tl.int64)

    begin = segment * SEGMENT
    if PDL:  # the weights are nobody's result: their first columns come while the others finish
        if BITS == 0:
            line = tl.arange(0, 4) * (128 // w_ptr.dtype.element_ty.primitive_bitwidth * 8)
            at = rows.to(tl.int64)[:, None] * K + tl.minimum(begin + line, K - 1)[None, :]
        else:
            block = tl.minimum(begin // 64 + tl.arange(0, 8), (K - 1) // 64)
            run = weight_tile * BLOCK_N + tl.arange(0, BLOCK_N * BITS // 16) * (16 // BITS)
            at = (block[:, None] * N + tl.minimum(run, N - 1)[None, :]) * (4 * BITS)
        prefetch((w_ptr + at).to(tl.int64))
        tl.extra.cuda.gdc_wait()
    y = _segment(
        w_ptr, scales_ptr, x_ptr, rows, token, mine, begin, tl.minimum(begin + SEGMENT, K),
        N, K, BITS, GROUP, ZEROS, DTYPE, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if SPREAD:
        part_at = parts_ptr + token[None, :] * N + n[:, None]
        inside = mine[None, :] & (n < N)[:, None]
        stride = num_tokens.to(tl.int64) * N
        tl.store(part_at + segment * stride, y, mask=inside)
        tl.debug_barrier()  # the whole program has stored before it is counted
        arrived = tl.atomic_add(counters_ptr + weight_tile, 1, sem="acq_rel")
        if arrived < SEGMENTS - 1:
            return
        tl.store(counters_ptr + weight_tile, 0)
        y = tl.load(part_at, mask=inside, other=0.0, cache_modifier=".cg")
        for later in tl.static_range(1, SEGMENTS):
            at = part_at + later * stride
            y += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
    elif SEGMENTS > 1:
        for later in range(1, SEGMENTS):
            begin = later * SEGMENT
            y += _segment(
                w_ptr, scales_ptr, x_ptr, rows, token, mine, begin, tl.minimum(begin + SEGMENT, K),
                N, K, BITS, GROUP, ZEROS, DTYPE, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
            )  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    at = token[None, :] * N + n[:, None]
    inside = mine[None, :] & (n < N)[:, None]
    y = y.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        beside = tl.load(residual_ptr + at, mask=inside, other=0.0)
        y = (beside.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    tl.store(out_ptr + at, y, mask=inside)


def segment_of(n: int, k: int, block_n: int, coded: bool = False) -> tuple[int, int]:
    """Length and number of the K segments of an [n, k] matrix; never depends on the rows of x."""
    programs = WANTED_PROGRAMS * (1 + coded)
    wanted = max(1, min(MAX_SEGMENTS, programs // triton.cdiv(n, block_n)))
    length = triton.cdiv(triton.cdiv(k, wanted), SEGMENT_STEP) * SEGMENT_STEP
    return length, triton.cdiv(k, length)


def linear_triton(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch the product; arguments as `linear`."""
    x = x.contiguous()
    tokens, (n, k) = len(x), weight.shape
    out = x.new_empty(tokens, n)
    if tokens == 0:
        return out
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
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
    parts = counters = out
    if spread:
        parts = x.new_empty(segments, tokens, n, dtype=torch.float32)
        counters = counters_of(owner, triton.cdiv(n, config.n))
    grid = (triton.cdiv(tokens, config.t), triton.cdiv(n, config.n), segments if spread else 1)
    _linear_kernel[grid](
        x, matrix, scales, x if bias is None else bias, x if residual is None else residual,
        out, parts, counters, tokens,
        N=n, K=k, SEGMENT=segment, SEGMENTS=segments, SPREAD=spread, BIAS=bias is not None,
        RESIDUAL=residual is not None,
        DTYPE=TRITON_DTYPES[x.dtype], **scheme_constants(x.dtype, scheme),
        BLOCK_N=config.n, BLOCK_K=config.k, BLOCK_T=config.t,
        enable_fp_fusion=True, **config.options(), **overlap_options(capability),
    )  # fmt: skip
    return out
