"""Triton kernels of the experts: equations and contract in `expert_gemm.py`.

`_expert_gemm_kernel` is both products: with GATED its weight tile is half rows of gate and half
rows of up, and SwiGLU joins the halves; without, it multiplies by down. One program owns BLOCK_N
weight rows of one expert and a tile of the rows that chose it. Up to 32 tokens the tile is all
tokens: each column looks up whether and where its token chose the expert, so nothing is sorted and
the expert's bytes are read once, from wherever they lie. For more tokens `_order_kernel` first
lists each expert's rows on the device; programs beyond the end of a list stop at once. Nothing on
the host depends on the routing.

The address of an expert becomes a pointer inside the kernel. The cast loses what is known of its
alignment, so it is declared again after the cast; without it every load is scalar (2.7 instead of
4.2 TB/s, H200). With a second address the weights are stored there as they are read, so that an
expert in host memory crosses the bus once for both uses.

With few tokens down alone has too few programs for a large card. For codes a long K is cut into
segments by its length alone: up to 32 tokens each is a program that writes fp32, and
`_combine_kernel` adds them in order and rounds; for more, one program walks through them and adds
them in the same order.

Same bits for a row whatever stands beside it: see `tile_triton.py`; each (row, choice) is written
by one program at a place of its own, and `_combine_kernel` adds the choices in the router's order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from spmoe_lite.precision import scheme_of

from .configs import SOME, Kind, capability_of, overlap_options, tile
from .expert_gemm import DTYPES
from .tile_triton import (
    TRITON_DTYPES,
    dot_tile,
    dot_tile_quantized,
    scheme_constants,
    start_next,
    wait_for_previous,
)

if TYPE_CHECKING:
    from spmoe_lite.precision import ExpertLayout

ORDER_BLOCK = 1024
COMBINE_BLOCKS = 256, 1024  # columns of a program, for few and for many tokens
SEGMENT_STEP = 256  # a multiple of every K step for codes in `configs.py`, and of two groups
DOWN_SEGMENTS, LONG = 4, 8192  # of down, for codes, where its K is so long; a short one loses by it


@triton.jit(do_not_specialize=["num_pairs", "num_tokens"])
def _order_kernel(
    experts_ptr,  # [T * k] int32
    use_ptr,  # [n, 3] int64
    order_ptr,  # [n, T] int32, out: the pairs t * k + j that chose the expert, in rising order
    counts_ptr,  # [n] int32, out
    num_pairs,
    num_tokens,
    BLOCK: tl.constexpr,
):
    line = tl.program_id(0)
    expert = tl.load(use_ptr + line * 3)
    order_ptr += line.to(tl.int64) * num_tokens
    count = 0
    for low in range(0, num_pairs, BLOCK):
        pair = low + tl.arange(0, BLOCK)
        chosen = (tl.load(experts_ptr + pair, mask=pair < num_pairs, other=-2) == expert).to(
            tl.int32
        )
        place = count + tl.cumsum(chosen, axis=0) - 1
        # A token that named an expert twice would run past the list: cut, not written next door.
        tl.store(order_ptr + place, pair, mask=(chosen != 0) & (place < num_tokens))
        count += tl.sum(chosen, axis=0)
    tl.store(counts_ptr + line, tl.minimum(count, num_tokens))


@triton.jit
def _segment(
    w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales_ptr, rows, scale_rows, tokens, mine, begin,
    LENGTH: tl.constexpr, COPY: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    WEIGHT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr,
    FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The product over LENGTH columns from `begin` on, [BLOCK_N, BLOCK_T] fp32."""
    end = tl.minimum(begin + LENGTH, K)
    tl.assume(begin < end)  # as in `linear_triton.py`
    if BITS == 0:
        return dot_tile(
            w_ptr, x_ptr, copy_ptr, rows, tokens, mine, begin, end, K, COPY,
            BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    else:
        return dot_tile_quantized(
            w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales_ptr, rows, scale_rows, tokens, mine,
            begin, end, N, K, BITS, GROUP, ZEROS, WEIGHT, FAST, COPY, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip


@triton.jit
def _product(
    w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales_ptr, rows, scale_rows, tokens, mine, segment,
    LENGTH: tl.constexpr, SEGMENTS: tl.constexpr, COPY: tl.constexpr, N: tl.constexpr,
    K: tl.constexpr, WEIGHT: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One segment, or if SEGMENTS > 1 all of them, added in their order."""
    if SEGMENTS == 1:
        return _segment(
            w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales_ptr, rows, scale_rows, tokens, mine,
            segment * LENGTH, LENGTH, COPY, N, K, WEIGHT, BITS, GROUP, ZEROS, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    else:
        y = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
        for one in range(SEGMENTS):
            y += _segment(
                w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales_ptr, rows, scale_rows, tokens, mine,
                one * LENGTH, LENGTH, COPY, N, K, WEIGHT, BITS, GROUP, ZEROS, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
            )  # fmt: skip
        return y


@triton.jit(do_not_specialize=["num_tokens"])
def _expert_gemm_kernel(
    x_ptr,  # [T, K] if GATED, else [T * k, K]
    experts_ptr,  # [T, CHOICES] int32
    use_ptr,  # [n, 3] int64
    order_ptr,  # [n, T] int32, if LISTED
    counts_ptr,  # [n] int32, if LISTED
    out_ptr,  # [T * k, N]; if SPREAD fp32 [SEGMENTS, T * k, N]
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    CHOICES: tl.constexpr,
    FIRST: tl.constexpr,  # bytes from the expert's start to gate, or to down
    UP: tl.constexpr,  # bytes from gate to up, if GATED
    SCALES: tl.constexpr,  # bytes from a matrix's start to its scales, if BITS
    WEIGHT: tl.constexpr,  # dtype of float weights, or what codes are turned into
    BITS: tl.constexpr,  # of a code; 0: float weights
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
    SEGMENT: tl.constexpr,  # columns of K summed apart
    SEGMENTS: tl.constexpr,
    SPREAD: tl.constexpr,  # a program for each segment; else one walks through all
    GATED: tl.constexpr,
    LISTED: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,  # CHOICES, rounded up to a power of 2
):
    wait_for_previous(PDL)
    row_tile, weight_tile, line = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    segment = 0
    if SPREAD:
        line, segment = line // SEGMENTS, line % SEGMENTS
    expert = tl.load(use_ptr + line * 3)
    address = tl.load(use_ptr + line * 3 + 1)
    copy_to = tl.load(use_ptr + line * 3 + 2)
    column = row_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    if LISTED:
        count = tl.load(counts_ptr + line)
        mine = column < count
        pair = tl.load(order_ptr + line.to(tl.int64) * num_tokens + column, mask=mine, other=0)
        left = count - row_tile * BLOCK_T
    else:
        choice = tl.arange(0, BLOCK_C)
        pairs = column[:, None] * CHOICES + choice[None, :]
        there = (column < num_tokens)[:, None] & (choice < CHOICES)[None, :]
        chosen = tl.load(experts_ptr + pairs, mask=there, other=-2) == expert
        pair = tl.sum(tl.where(chosen, pairs, 0), axis=1)
        mine = tl.sum(chosen.to(tl.int32), axis=1) > 0
        left = tl.sum(mine.to(tl.int32), axis=0)
    if left <= 0:
        return

    # A tile of gate and up is half rows of gate, half the same rows of up.
    OUT_N: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N
    local = tl.arange(0, BLOCK_N)
    n = weight_tile * OUT_N + local % OUT_N
    n = n if N % OUT_N == 0 else tl.minimum(n, N - 1)
    half = local // OUT_N
    pair = pair.to(tl.int64)
    tokens = pair // CHOICES if GATED else pair
    # multiple_of after the cast, or no load is wider than one element.
    if BITS == 0:
        BYTES: tl.constexpr = WEIGHT.primitive_bitwidth // 8
        rows = n.to(tl.int64) + half * (UP // (K * BYTES))
        scale_rows = rows
        w_ptr = tl.multiple_of(address.to(tl.pointer_type(WEIGHT)), 16) + FIRST // BYTES
        copy_ptr = tl.multiple_of(copy_to.to(tl.pointer_type(WEIGHT)), 16) + FIRST // BYTES
        scales_ptr, copy_scales = w_ptr, copy_ptr
    else:
        rows, scale_rows = n * (4 * BITS) + half * (UP // 2), n + half * (UP // 4)
        w_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16) + FIRST // 2
        scales_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
        scales_ptr += (FIRST + SCALES) // 4
        copy_ptr = tl.multiple_of(copy_to.to(tl.pointer_type(tl.int16)), 16) + FIRST // 2
        copy_scales = tl.multiple_of(copy_to.to(tl.pointer_type(tl.int32)), 16)
        copy_scales += (FIRST + SCALES) // 4
    WALKED: tl.constexpr = 1 if SPREAD else SEGMENTS
    if (copy_to != 0) & (row_tile == 0):
        y = _product(
            w_ptr, scales_ptr, x_ptr, copy_ptr, copy_scales, rows, scale_rows, tokens, mine,
            segment, SEGMENT, WALKED, True, N, K, WEIGHT, BITS, GROUP, ZEROS, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    else:
        y = _product(
            w_ptr, scales_ptr, x_ptr, w_ptr, scales_ptr, rows, scale_rows, tokens, mine,
            segment, SEGMENT, WALKED, False, N, K, WEIGHT, BITS, GROUP, ZEROS, FAST, BLOCK_N, BLOCK_K, BLOCK_T,
        )  # fmt: skip
    start_next(PDL)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(y, (2, OUT_N, BLOCK_T)), (1, 2, 0)))
        y = gate / (1.0 + tl.exp(-gate)) * up
    n = weight_tile * OUT_N + tl.arange(0, OUT_N)
    if SPREAD:
        out_ptr += segment * num_tokens.to(tl.int64) * (CHOICES * N)
    out_at = out_ptr + pair[None, :] * N + n[:, None]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mine[None, :] & (n < N)[:, None])


@triton.jit(do_not_specialize=["num_tokens"])
def _combine_kernel(
    partial_ptr,  # [T, CHOICES, H]; in segments fp32 [SEGMENTS, T, CHOICES, H]
    weights_ptr,  # [T, CHOICES] fp32
    residual_ptr,  # [T, H], if RESIDUAL
    out_ptr,  # [T, H]
    num_tokens,
    H: tl.constexpr,
    CHOICES: tl.constexpr,
    SEGMENTS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    partial_at = partial_ptr + token * CHOICES * H + h
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(CHOICES):
        part = tl.load(partial_at + j * H, mask=h < H, other=0.0).to(tl.float32)
        for i in tl.static_range(1, SEGMENTS):
            at = partial_at + i * num_tokens.to(tl.int64) * (CHOICES * H) + j * H
            part += tl.load(at, mask=h < H, other=0.0)
        part = part.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += part * tl.load(weights_ptr + token * CHOICES + j)
    y = total.to(out_ptr.dtype.element_ty)
    if RESIDUAL:
        beside = tl.load(residual_ptr + token * H + h, mask=h < H, other=0.0)
        y = (beside.to(tl.float32) + y.to(tl.float32)).to(y.dtype)
    start_next(PDL)
    tl.store(out_ptr + token * H + h, y, mask=h < H)


def expert_up_triton(
    x: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """Launch gate, up and SwiGLU; arguments as `expert_up`."""
    _launch(x, experts, use, layout, out, "up", layout.gate_offset)


def expert_down_triton(
    h: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """Launch down; arguments as `expert_down`."""
    _launch(h, experts, use, layout, out, "down", layout.down_offset)


def combine_triton(
    partial: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Launch the sum over choices; arguments as `combine`."""
    tokens, choices, hidden = partial.shape[-3:]
    out = partial.new_empty(tokens, hidden, dtype=dtype or partial.dtype)
    assert residual is None or (residual.is_contiguous() and residual.shape == out.shape)
    segments = len(partial) if partial.dim() == 4 else 1
    block = COMBINE_BLOCKS[tokens > SOME]
    grid = (tokens, triton.cdiv(hidden, block))
    _combine_kernel[grid](
        partial, weights, partial if residual is None else residual, out, tokens, hidden, choices,
        SEGMENTS=segments, RESIDUAL=residual is not None, BLOCK=block, num_warps=4,
        enable_fp_fusion=True, **overlap_options(capability_of(partial)),
    )  # fmt: skip
    return out


def down_segments(layout: ExpertLayout) -> tuple[int, int]:
    """Length and number of the K segments of down; by its shape and weights alone."""
    k = layout.intermediate_size
    if scheme_of(layout.dtype) is None or k < LONG:
        return k, 1
    length = triton.cdiv(triton.cdiv(k, DOWN_SEGMENTS), SEGMENT_STEP) * SEGMENT_STEP
    return length, triton.cdiv(k, length)


def _launch(
    x: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
    kind: Kind,
    first: int,
) -> None:
    tokens, choices = experts.shape
    lines = len(use)
    if tokens == 0 or lines == 0:
        return
    assert x.is_contiguous() and experts.is_contiguous() and use.is_contiguous()
    assert out.is_contiguous() and use.dtype == torch.int64 and experts.dtype == torch.int32
    listed = tokens > SOME
    columns = tokens * choices // lines if listed else tokens
    capability, scheme = capability_of(x), scheme_of(layout.dtype)
    config = tile(capability, DTYPES.get(layout.dtype, x.dtype), kind, columns, scheme)
    order = counts = use  # not read unless listed
    if listed:
        order = experts.new_empty(lines, tokens)
        counts = experts.new_empty(lines)
        _order_kernel[(lines,)](
            experts,
            use,
            order,
            counts,
            tokens * choices,
            tokens,
            ORDER_BLOCK,
            num_warps=4,
            enable_fp_fusion=True,
        )
    n, k = out.shape[-1], x.shape[-1]
    up = layout.up_offset - layout.gate_offset
    weight = DTYPES.get(layout.dtype, x.dtype)
    assert scheme is not None or up % (k * weight.itemsize) == 0, "whole rows from gate to up"
    out_n = config.n // 2 if kind == "up" else config.n
    segment, segments = (k, 1) if kind == "up" else down_segments(layout)
    spread = out.dim() == 4
    assert not spread or (len(out) == segments and out.dtype == torch.float32 and not listed)
    rows = triton.cdiv(tokens, config.t) if listed else 1
    grid = (rows, triton.cdiv(n, out_n), lines * segments if spread else lines)
    _expert_gemm_kernel[grid](
        x, experts, use, order, counts, out, tokens,
        N=n, K=k, CHOICES=choices, FIRST=first, UP=up if kind == "up" else 0, WEIGHT=TRITON_DTYPES[weight],
        SCALES=0 if scheme is None else scheme.parts(n, k)[0], **scheme_constants(x.dtype, scheme),
        SEGMENT=segment, SEGMENTS=segments, SPREAD=spread,
        GATED=kind == "up", LISTED=listed, BLOCK_N=config.n, BLOCK_K=config.k, BLOCK_T=config.t,
        BLOCK_C=triton.next_power_of_2(choices),
        enable_fp_fusion=True, **config.options(), **overlap_options(capability),
    )  # fmt: skip
