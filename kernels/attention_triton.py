"""Triton kernels of attention against the KV cache; equation and contract in `attention.py`.

The context is cut into splits at absolute positions, whatever T, start and window are: 128 keys
each up to 1024, then 256 up to 2048, 512 up to 8192 and 1024 beyond, so that a short context gives
the card enough programs and a long one no needless ones. Within a split the softmax runs
online over blocks of keys and leaves (m, l, acc): a bound m of the scores, the sum of 2^(score -
m), and the sum of values so weighted. Splits are then added one after the other, in rising order,
at a common m:

    l = l_0 2^(m_0 - m) + l_1 2^(m_1 - m) + ...;  acc likewise;  out = acc / l

m is the largest score rounded up to a whole number. Every change of m is thus a multiplication by
a power of two, which changes no bit of a mantissa: it does not matter when it happens, nor how
often.

Decode and verify make each split a program of its own, which fills the card (flash decoding), and
`_merge_kernel` adds. Prefill, which has programs enough, walks through the splits of its rows in
one program and adds as it goes. Both give the same bits: the additions are the same in the same
order, a split or a block that a row does not see adds zero, and a row's place in its tile changes
nothing. So the bits of a row do not depend on T, on where a chunk began, or on which of the two
ways was taken.

The query heads that share a KV head are rows of one tile: key and value are read once for all of
them. The size of the tile is one for all T on a card, because the order of a sum over the keys of
a block follows from it.

Keys and values may differ in size: a key of 192 columns, whose next power of two is 256, is read as
128 and 64 columns and its score added up in that order (`key_blocks`).

With int8 caches, a code becomes q's dtype, which holds it exactly. The score of a key is multiplied
by the key's scale, and a probability, after l has taken it, by the value's: that is rows x keys
multiplications per block where the caches themselves would need keys x D. So that a probability
times a small scale does not sink below fp16's range, scales count `GAIN` times there, and acc is
divided by `GAIN` at the end of a split: powers of two, which change no mantissa. Both scales of a key
are one word of 4 bytes, the least that is copied ahead while the blocks before are computed.
Sources: FlashAttention-2, arXiv 2307.08691; Flash-Decoding (Dao et al. 2023); online softmax,
Milakov and Gimelshein 2018, arXiv 1805.02867.
"""

import torch
import triton
import triton.language as tl

from .configs import attention_tile, capability_of, overlap_options
from .tile_triton import start_next, wait_for_previous

LONGEST = tl.constexpr(1024)  # keys of a split, from 8192 on
LOG2_E = 1.4426950408889634
ENOUGH_PROGRAMS = 256  # about two per multiprocessor of a large card: no need to spread the splits
MAX_PARTS_BYTES = 128 << 20
MERGES = (
    (16, 128, 16),
    (32, 64, 32),
    (1 << 30, 32, 64),
)  # up to so many splits: lanes, splits at once
GAIN = tl.constexpr(64.0)  # times the largest scale, 65504 / 127, is still a number in fp16


def splits_up_to(position: int) -> int:
    """Number of splits that begin at or before `position`; `_split_begin` is the inverse."""
    if position < 1024:
        return position // 128 + 1
    if position < 2048:
        return (position - 1024) // 256 + 9
    if position < 8192:
        return (position - 2048) // 512 + 13
    return (position - 8192) // LONGEST.value + 25


def key_blocks(head_dim: int, value_dim: int) -> tuple[int, int]:
    """Columns of the two loads of a key; the second is 0 where one load wastes no more.

    Keys as wide as values always take one load: their bits were published so.
    """
    whole = triton.next_power_of_2(head_dim)
    first = whole // 2
    second = max(16, triton.next_power_of_2(head_dim - first))  # 16: the least of a product
    if head_dim == value_dim or first < 16 or first + second >= whole:
        return whole, 0
    return first, second


@triton.jit
def _splits_up_to(position):
    count = tl.where(position < 1024, position // 128 + 1, (position - 1024) // 256 + 9)
    count = tl.where(position < 2048, count, (position - 2048) // 512 + 13)
    return tl.where(position < 8192, count, (position - 8192) // LONGEST + 25)


@triton.jit
def _split_begin(split):
    """First key of a split: 0, 128, ..., 1024, 1280, ..., 2048, 2560, ..., 8192, 9216, ..."""
    begin = tl.where(split < 8, split * 128, 1024 + (split - 8) * 256)
    begin = tl.where(split < 12, begin, 2048 + (split - 12) * 512)
    return tl.where(split < 24, begin, 8192 + (split - 24) * LONGEST)


@triton.jit
def _finite(m):
    """m, or 0 where no key was seen yet: -inf less -inf would be NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def _attend_blocks(
    m, l, acc, q, q_rest, position, k_ptr, v_ptr, kv_scale_ptr,  # noqa: E741
    begin, end, window, scale,
    HEADS_K: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, WINDOWED: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to (m, l, acc); without MASKED, whole blocks that all rows see."""
    d, j = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_KEYS)
    for low in range(begin, end, BLOCK_KEYS):
        key = low + j
        at = key.to(tl.int64)[:, None] * (HEADS_K * D) + d[None, :]
        there = (d < D)[None, :]
        if MASKED:
            there = there & (key < end)[:, None]
        k = tl.load(k_ptr + at, mask=there, other=0.0).to(q.dtype)
        if BLOCK_REST > 0:
            rest = BLOCK_D + tl.arange(0, BLOCK_REST)
            at = key.to(tl.int64)[:, None] * (HEADS_K * D) + rest[None, :]
            there = (rest < D)[None, :]
            if MASKED:
                there = there & (key < end)[:, None]
            k_rest = tl.load(k_ptr + at, mask=there, other=0.0).to(q.dtype)
        if DV != D:
            dv = tl.arange(0, BLOCK_DV)
            at = key.to(tl.int64)[:, None] * (HEADS_K * DV) + dv[None, :]
            there = (dv < DV)[None, :]
            if MASKED:
                there = there & (key < end)[:, None]
        v = tl.load(v_ptr + at, mask=there, other=0.0).to(q.dtype)
        score = tl.dot(q, tl.trans(k), input_precision="ieee")
        if BLOCK_REST > 0:
            score = tl.dot(q_rest, tl.trans(k_rest), score, input_precision="ieee")
        if kv_scale_ptr is not None:
            if MASKED:
                both = tl.load(kv_scale_ptr + key, mask=key < end, other=0)
            else:
                both = tl.load(kv_scale_ptr + key)
            k_scale = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            v_scale = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            score = score * k_scale[None, :]
        if MASKED:
            visible = (key[None, :] <= position[:, None]) & (key < end)[None, :]
            if WINDOWED:
                visible = visible & (key[None, :] > position[:, None] - window)
            score = tl.where(visible, score, float("-inf"))
        new_m = tl.maximum(m, tl.ceil(tl.max(score, axis=1) * scale))
        base = _finite(new_m)
        p = tl.exp2(score * scale - base[:, None])
        shrink = tl.exp2(m - base)
        l = l * shrink + tl.sum(p, axis=1)  # noqa: E741
        if kv_scale_ptr is not None:
            p = p * (v_scale * GAIN)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        m = new_m
    return m, l, acc


@triton.jit
def _attend_split(
    q,  # [BLOCK_ROWS, BLOCK_D]
    q_rest,  # [BLOCK_ROWS, BLOCK_REST], columns from BLOCK_D on; None if BLOCK_REST is 0
    position,  # [BLOCK_ROWS], of each row
    first,  # lowest position of a row
    last,  # highest position of a row
    k_ptr,  # of this KV head
    v_ptr,
    kv_scale_ptr,  # of this KV head, or None
    split,
    window,
    scale,  # includes log2(e)
    HEADS_K: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WINDOWED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """m [BLOCK_ROWS], l [BLOCK_ROWS], acc [BLOCK_ROWS, BLOCK_DV] over one split."""
    m = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_ROWS,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_ROWS, BLOCK_DV), tl.float32)
    low = _split_begin(split)
    end = tl.minimum(_split_begin(split + 1), last + 1)
    if WINDOWED:  # blocks that begin outside some row's window
        whole = low + tl.cdiv(tl.maximum(last - window + 1 - low, 0), BLOCK_KEYS) * BLOCK_KEYS
        whole = tl.minimum(whole, end)
        m, l, acc = _attend_blocks(  # noqa: E741
            m, l, acc, q, q_rest, position, k_ptr, v_ptr, kv_scale_ptr,
            low, whole, window, scale, HEADS_K, D, DV, WINDOWED, True,
            BLOCK_KEYS, BLOCK_D, BLOCK_REST, BLOCK_DV,
        )  # fmt: skip
        low = whole
    # Whole blocks that all rows see, then the diagonal and the end.
    whole = low + tl.maximum(tl.minimum(end, first + 1) - low, 0) // BLOCK_KEYS * BLOCK_KEYS
    m, l, acc = _attend_blocks(  # noqa: E741
        m, l, acc, q, q_rest, position, k_ptr, v_ptr, kv_scale_ptr,
        low, whole, window, scale, HEADS_K, D, DV, WINDOWED, False,
        BLOCK_KEYS, BLOCK_D, BLOCK_REST, BLOCK_DV,
    )  # fmt: skip
    m, l, acc = _attend_blocks(  # noqa: E741
        m, l, acc, q, q_rest, position, k_ptr, v_ptr, kv_scale_ptr,
        whole, end, window, scale, HEADS_K, D, DV, WINDOWED, True,
        BLOCK_KEYS, BLOCK_D, BLOCK_REST, BLOCK_DV,
    )  # fmt: skip
    if kv_scale_ptr is not None:
        acc = acc * (1.0 / GAIN)
    return m, l, acc


@triton.jit(do_not_specialize=["num_tokens", "start", "window", "num_splits", "capacity"])
def _attention_kernel(
    q_ptr,  # [T, HEADS_K * GROUP, D]
    k_ptr,  # [C, HEADS_K, D]
    v_ptr,  # [C, HEADS_K, DV]
    kv_scale_ptr,  # [HEADS_K, C] pairs of fp16 as int32 where the caches are int8, else None
    out_ptr,  # [T, HEADS_K * GROUP, DV]; [splits, T, HEADS_K * GROUP, DV] fp32 if SPREAD
    stats_ptr,  # [2, T, HEADS_K * GROUP, splits] fp32, m and l, if SPREAD
    num_tokens,
    start,  # position of the first token, or where it is to be read if ON_DEVICE
    window,
    num_splits,  # if ON_DEVICE, the most there may be
    capacity,  # C of the scales
    scale,
    ON_DEVICE: tl.constexpr,
    HEADS_K: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WINDOWED: tl.constexpr,
    SPREAD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_REST: tl.constexpr,  # 0, or the columns of q and k from BLOCK_D on
    BLOCK_DV: tl.constexpr,
):
    wait_for_previous(PDL)
    if ON_DEVICE:
        start = tl.load(start)
    head = tl.program_id(1)
    # The last rows see most keys, and the last splits are the longest: begin with them.
    row_tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = row_tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // GROUP
    mine = token < num_tokens
    position = start + token
    d = tl.arange(0, BLOCK_D)
    q_head = token.to(tl.int64) * (HEADS_K * GROUP) + head * GROUP + row % GROUP
    there = mine[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + q_head[:, None] * D + d[None, :], mask=there, other=0.0)
    q_rest = None
    if BLOCK_REST > 0:
        rest = BLOCK_D + tl.arange(0, BLOCK_REST)
        rest_there = mine[:, None] & (rest < D)[None, :]
        q_rest = tl.load(q_ptr + q_head[:, None] * D + rest[None, :], mask=rest_there, other=0.0)

    first = start + row_tile * BLOCK_ROWS // GROUP
    last = start + tl.minimum((row_tile * BLOCK_ROWS + BLOCK_ROWS - 1) // GROUP, num_tokens - 1)
    k_ptr += head * D
    v_ptr += head * DV
    if kv_scale_ptr is not None:
        kv_scale_ptr += head.to(tl.int64) * capacity
    if SPREAD:
        place = num_splits - 1 - tl.program_id(2)
        split = place
        if WINDOWED:
            split += _splits_up_to(tl.maximum(start - window + 1, 0)) - 1
        if ON_DEVICE:
            if split >= _splits_up_to(start + num_tokens - 1):
                return
        m, l, acc = _attend_split(  # noqa: E741
            q, q_rest, position, first, last, k_ptr, v_ptr, kv_scale_ptr,
            split, window, scale, HEADS_K, D, DV, WINDOWED,
            BLOCK_ROWS, BLOCK_KEYS, BLOCK_D, BLOCK_REST, BLOCK_DV,
        )  # fmt: skip
        num_rows = num_tokens.to(tl.int64) * (HEADS_K * GROUP)
        tl.store(stats_ptr + q_head * num_splits + place, m, mask=mine)
        tl.store(stats_ptr + (num_rows + q_head) * num_splits + place, l, mask=mine)
        q_head += place * num_rows
    else:
        split = 0
        if WINDOWED:
            split = _splits_up_to(tl.maximum(first - window + 1, 0)) - 1
        m = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_ROWS,), tl.float32)  # noqa: E741
        acc = tl.zeros((BLOCK_ROWS, BLOCK_DV), tl.float32)
        for later in range(split, _splits_up_to(last)):
            split_m, split_l, split_acc = _attend_split(
                q, q_rest, position, first, last, k_ptr, v_ptr, kv_scale_ptr,
                later, window, scale, HEADS_K, D, DV, WINDOWED,
                BLOCK_ROWS, BLOCK_KEYS, BLOCK_D, BLOCK_REST, BLOCK_DV,
            )  # fmt: skip
            new_m = tl.maximum(m, split_m)
            old, new = tl.exp2(m - _finite(new_m)), tl.exp2(split_m - _finite(new_m))
            m = new_m
            l = tl.fma(split_l, new, l * old)  # noqa: E741
            new = tl.broadcast_to(new[:, None], (BLOCK_ROWS, BLOCK_DV))
            acc = tl.fma(split_acc, new, acc * old[:, None])
        acc = acc / l[:, None]
    start_next(PDL)
    if DV != D:
        d = tl.arange(0, BLOCK_DV)
        there = mine[:, None] & (d < DV)[None, :]
    out_at = out_ptr + q_head[:, None] * DV + d[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "start", "window", "num_splits"])
def _merge_kernel(
    parts_ptr,  # [splits, rows, D] fp32
    stats_ptr,  # [2, rows, splits] fp32
    out_ptr,  # [rows, D]
    num_rows,
    num_tokens,
    start,  # as in the kernel before, and the next ones
    window,
    num_splits,
    ON_DEVICE: tl.constexpr,
    WINDOWED: tl.constexpr,
    D: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    wait_for_previous(PDL)
    count = num_splits
    if ON_DEVICE:
        start = tl.load(start)
        count = _splits_up_to(start + num_tokens - 1)
        if WINDOWED:
            count -= _splits_up_to(tl.maximum(start - window + 1, 0)) - 1
    row = tl.program_id(0).to(tl.int64)
    d, s = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_SPLITS)
    m_ptr = stats_ptr + row * num_splits
    l_ptr = m_ptr + num_rows.to(tl.int64) * num_splits
    zero = tl.zeros((1,), tl.int64)
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_D,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for low in range(0, count, BLOCK_SPLITS):
        split_m = tl.load(m_ptr + low + s, mask=low + s < count, other=float("-inf"))
        split_l = tl.load(l_ptr + low + s, mask=low + s < count, other=0.0)
        parts = ()
        for i in tl.static_range(BLOCK_SPLITS):  # unrolled: all loads are under way at once
            split = low + i + zero
            part_at = parts_ptr + (split * num_rows + row) * D + d
            part = tl.load(part_at, mask=(split < count) & (d < D), other=0.0)
            parts = parts + (part,)  # type: ignore[assignment]
        new_m = tl.maximum(m, tl.max(split_m, axis=0))
        shrink = tl.broadcast_to(tl.exp2(m - _finite(new_m)), (BLOCK_D,))
        m = new_m
        l = l * shrink  # noqa: E741
        acc = acc * shrink
        new = tl.exp2(split_m - tl.broadcast_to(_finite(m), (BLOCK_SPLITS,)))
        weighed = split_l * new
        for i in tl.static_range(BLOCK_SPLITS):
            here = tl.full((BLOCK_D,), i, tl.int32)
            l = l + tl.gather(weighed, here, 0)  # noqa: E741
            acc = tl.fma(parts[i], tl.gather(new, here, 0), acc)  # type: ignore[misc]
    start_next(PDL)
    tl.store(out_ptr + row * D + d, (acc / l).to(out_ptr.dtype.element_ty), mask=d < D)


def attention_triton(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: int | torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Launch attention; arguments as `attention`."""
    q = q.contiguous()
    stored = q.dtype if kv_scales is None else torch.int8
    assert k_cache.dtype == v_cache.dtype == stored
    assert k_cache.is_contiguous() and v_cache.is_contiguous()
    if kv_scales is not None:
        assert kv_scales.is_contiguous() and kv_scales.dtype == torch.float16
        assert len(kv_scales) == k_cache.shape[1] and kv_scales.shape[1] >= len(k_cache)
        kv_scales = kv_scales.view(torch.int32)
    tokens, num_heads, head_dim = q.shape
    heads_k, value_dim = v_cache.shape[1:]
    out = q.new_empty(tokens, num_heads, value_dim)
    if tokens == 0:
        return out
    scale = head_dim**-0.5 if scale is None else scale
    assert scale > 0  # the bound m is of rising scores
    group = num_heads // heads_k
    config = attention_tile(capability_of(q), q.dtype, kv_scales is not None)
    overlapped = overlap_options(capability_of(q))
    row_tiles = triton.cdiv(tokens * group, config.rows)
    on_device = isinstance(start, torch.Tensor)
    if on_device:  # room for the longest context; of those that start late, windows have fewest
        most = len(k_cache) if window is None else min(len(k_cache), window + tokens + 128)
        splits = splits_up_to(most - 1)
    else:
        before = 0 if window is None else splits_up_to(max(start - window + 1, 0)) - 1
        splits = splits_up_to(start + tokens - 1) - before
    parts_bytes = splits * out.numel() * 4
    spread = splits > 1 and row_tiles * heads_k < ENOUGH_PROGRAMS and parts_bytes <= MAX_PARTS_BYTES
    parts = stats = out
    if spread:
        parts = q.new_empty(splits, tokens, num_heads, value_dim, dtype=torch.float32)
        stats = q.new_empty(2, tokens, num_heads, splits, dtype=torch.float32)
    block_d, block_rest = key_blocks(head_dim, value_dim)
    _attention_kernel[row_tiles, heads_k, splits if spread else 1](
        q, k_cache, v_cache, kv_scales, parts, stats, tokens, start, window or 0, splits,
        0 if kv_scales is None else kv_scales.shape[1], scale * LOG2_E, ON_DEVICE=on_device,
        HEADS_K=heads_k, GROUP=group, D=head_dim, DV=value_dim,
        WINDOWED=window is not None, SPREAD=spread,
        BLOCK_ROWS=config.rows, BLOCK_KEYS=config.keys,
        BLOCK_D=block_d, BLOCK_REST=block_rest, BLOCK_DV=triton.next_power_of_2(value_dim),
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=True, **overlapped,
    )  # fmt: skip
    if spread:
        lanes, at_once = next(shape for most, *shape in MERGES if splits <= most)
        _merge_kernel[tokens * num_heads, triton.cdiv(value_dim, lanes)](
            parts, stats, out, tokens * num_heads, tokens, start, window or 0, splits,
            ON_DEVICE=on_device, WINDOWED=window is not None, D=value_dim, BLOCK_D=lanes,
            BLOCK_SPLITS=at_once, num_warps=1, enable_fp_fusion=True, **overlapped,
        )  # fmt: skip
    return out
