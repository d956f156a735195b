"""Triton kernels of attention against the KV cache; equation and contract in `attention.py`.

The context is cut into splits of SPLIT keys at absolute positions (0, 256, 512, ...), whatever T, start and
window are. Within a split the softmax runs online over blocks of BLOCK_KEYS and leaves (m, l, acc): the
largest score, the sum of exp2(score - m), and the weighted sum of values. Splits are then merged one after
the other, in rising order:

    m' = max(m, m_s);  l' = l 2^(m - m') + l_s 2^(m_s - m');  acc' likewise;  at the end out = acc / l

Up to 32 tokens each split is a program of its own, which fills the card in decode (flash decoding), and
`_merge_kernel` merges; for more tokens, or a context of one split, one program walks through the splits of its
rows and merges as it goes. Merging is the same code, a split or a block that a row does not see changes
none of its bits (exp2 of -inf is 0, the rescaling is by 1), and a row's place in its tile changes none
either: so the bits of a row do not depend on T or on where a chunk began.

The query heads that share a KV head are rows of one tile: key and value are read once for all of them. The
size of the tile is one for all T on a card, because the order of a sum over keys follows from it.
Sources: FlashAttention-2, arXiv 2307.08691; Flash-Decoding (Dao et al. 2023); online softmax, arXiv 1805.02867.
"""

import torch
import triton
import triton.language as tl

from .configs import SOME, attention_tile, capability_of

SPLIT = 256
LOG2_E = 1.4426950408889634


@triton.jit
def _attend_split(
    q,  # [BLOCK_ROWS, BLOCK_D]
    position,  # [BLOCK_ROWS], of each row
    k_ptr,  # of this KV head
    v_ptr,
    begin,
    end,  # keys [begin, end) of one split, all stored
    window,
    scale,  # includes log2(e)
    KEY_STRIDE: tl.constexpr,
    D: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """m [BLOCK_ROWS], l [BLOCK_ROWS], acc [BLOCK_ROWS, BLOCK_D] over one split."""
    d, j = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    m = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
    for low in range(begin, end, BLOCK_KEYS):
        key = low + j
        at = key.to(tl.int64)[:, None] * KEY_STRIDE + d[None, :]
        there = (key < end)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + at, mask=there, other=0.0)
        v = tl.load(v_ptr + at, mask=there, other=0.0)
        score = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
        if WINDOWED:
            visible = visible & (key[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        new_m = tl.maximum(m, tl.max(score, axis=1))
        base = tl.where(new_m == float("-inf"), 0.0, new_m)  # nothing seen yet: keep NaN away
        p = tl.exp2(score - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, axis=1)  # noqa: E741
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = new_m
    return m, l, acc


@triton.jit
def _scales(m, split_m):
    """The new largest score and the factors 2^(m - m'), 2^(m_s - m')."""
    new_m = tl.maximum(m, split_m)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    return new_m, tl.exp2(m - base), tl.exp2(split_m - base)


@triton.jit(do_not_specialize=["num_tokens", "start", "window"])
def _attention_kernel(
    q_ptr,  # [T, HEADS_K * GROUP, D]
    k_ptr,  # [C, HEADS_K, D]
    v_ptr,  # [C, HEADS_K, D]
    out_ptr,  # [T, HEADS_K * GROUP, D]; [splits, T, HEADS_K * GROUP, D] fp32 if SPREAD
    stats_ptr,  # [splits, T, HEADS_K * GROUP, 2] fp32, (m, l), if SPREAD
    num_tokens,
    start,
    window,
    scale,
    HEADS_K: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPREAD: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    head = tl.program_id(1)
    if SPREAD:
        row_tile = tl.program_id(0)
    else:  # the last tokens see most keys: begin with them
        row_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    mine = token < num_tokens
    position = start + token
    d = tl.arange(0, BLOCK_D)
    q_head = token.to(tl.int64) * (HEADS_K * GROUP) + head * GROUP + row % GROUP
    there = mine[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_head[:, None] * D + d[None, :], mask=there, other=0.0)

    first_token = row_tile * BLOCK_ROWS // GROUP
    last_token = tl.minimum((row_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_tokens - 1)
    end = start + last_token + 1
    lowest_split = 0
    if WINDOWED:
        lowest_split = tl.maximum(start + first_token - window + 1, 0) // SPLIT
    k_ptr += head * D
    v_ptr += head * D
    if SPREAD:
        split = tl.program_id(2)
        if WINDOWED:
            split += tl.maximum(start - window + 1, 0) // SPLIT
        m, l, acc = _attend_split(  # noqa: E741
            q, position, k_ptr, v_ptr, split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end),
            window, scale, HEADS_K * D, D, WINDOWED, BLOCK_ROWS, BLOCK_KEYS, BLOCK_D,
        )  # fmt: skip
        q_head += tl.program_id(2).to(tl.int64) * num_tokens * (HEADS_K * GROUP)
        tl.store(stats_ptr + q_head * 2, m, mask=mine)
        tl.store(stats_ptr + q_head * 2 + 1, l, mask=mine)
    else:
        m = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_ROWS,), tl.float32)  # noqa: E741
        acc = tl.zeros((BLOCK_ROWS, BLOCK_D), tl.float32)
        for split in range(lowest_split, tl.cdiv(end, SPLIT)):
            split_m, split_l, split_acc = _attend_split(
                q, position, k_ptr, v_ptr, split * SPLIT, tl.minimum(split * SPLIT + SPLIT, end),
                window, scale, HEADS_K * D, D, WINDOWED, BLOCK_ROWS, BLOCK_KEYS, BLOCK_D,
            )  # fmt: skip
            m, old, new = _scales(m, split_m)
            l = tl.fma(split_l, new, l * old)  # noqa: E741  (fma spelt out: same bits in both kernels)
            new = tl.broadcast_to(new[:, None], (BLOCK_ROWS, BLOCK_D))
            acc = tl.fma(split_acc, new, acc * old[:, None])
        acc = acc / l[:, None]
    out_at = out_ptr + q_head[:, None] * D + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def _merge_kernel(
    parts_ptr,  # [splits, rows, D] fp32
    stats_ptr,  # [splits, rows, 2] fp32
    out_ptr,  # [rows, D]
    num_rows,
    num_splits,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    UNROLL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for low in range(0, num_splits, UNROLL):
        for i in tl.static_range(UNROLL):
            split = low + i + tl.zeros((1,), tl.int64)
            inside = split < num_splits
            at = split * num_rows + row
            split_m = tl.load(stats_ptr + at * 2, mask=inside, other=float("-inf"))
            split_l = tl.load(stats_ptr + at * 2 + 1, mask=inside, other=0.0)
            part = tl.load(parts_ptr + at * D + d, mask=inside & (d < D), other=0.0)
            m, old, new = _scales(m, split_m)
            l = tl.fma(split_l, new, l * old)  # noqa: E741
            acc = tl.fma(part, tl.broadcast_to(new, (BLOCK_D,)), acc * old)
    tl.store(out_ptr + row * D + d, (acc / l).to(out_ptr.dtype.element_ty), mask=d < D)


def attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: int,
    window: int | None = None,
) -> torch.Tensor:
    """Launch attention; arguments as `attention`."""
    q = q.contiguous()
    assert k_cache.is_contiguous() and v_cache.is_contiguous() and k_cache.dtype == q.dtype
    tokens, num_heads, head_dim = q.shape
    out = torch.empty_like(q)
    if tokens == 0:
        return out
    heads_k = k_cache.shape[1]
    group = num_heads // heads_k
    lowest = 0 if window is None else max(start - window + 1, 0) // SPLIT
    splits = triton.cdiv(start + tokens, SPLIT) - lowest
    spread = tokens <= SOME and splits > 1
    parts, stats = out, out
    if spread:
        parts = q.new_empty(splits, tokens, num_heads, head_dim, dtype=torch.float32)
        stats = q.new_empty(splits, tokens, num_heads, 2, dtype=torch.float32)
    config = attention_tile(capability_of(q), q.dtype)
    grid = (triton.cdiv(tokens * group, config.rows), heads_k, splits if spread else 1)
    _attention_kernel[grid](
        q, k_cache, v_cache, parts, stats, tokens, start, window or 0, head_dim**-0.5 * LOG2_E,
        HEADS_K=heads_k, GROUP=group, D=head_dim, WINDOWED=window is not None, SPREAD=spread,
        SPLIT=SPLIT, BLOCK_ROWS=config.rows, BLOCK_KEYS=config.keys,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True,
    )  # fmt: skip
    if spread:
        _merge_kernel[(tokens * num_heads,)](
            parts, stats, out, tokens * num_heads, splits,
            D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), UNROLL=8,
            num_warps=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out
