"""Triton kernel of the router: norm, logits and choice in one launch. Rule, ties, NaN: `gate.py`.

One program takes a few rows of the router and a few tokens. The router of a model with many experts
(512 KB for 128 of width 2048) is more than one multiprocessor reads quickly, so its rows are dealt
out; the tokens of a tile share what was read. Each program writes its logits to memory and counts
itself; the last of a tile chooses:

    logits[token, e] = sum over h of router[e, h] x[token, h]     each by one program
    arrived = atomic add of 1 to the tile's counter, acquire and release
    if arrived is last: counter = 0; the k best by k sweeps of a maximum over whole numbers

The counter belongs to the router tensor and returns to zero (`counters.py`).

The bits of a row do not depend on the other rows: a tile has the same shape for any number of
tokens, each logit is one sum in one order, and it does not matter which program comes last. The
norm is computed by every program of a tile; it is short, and waiting for another program is not.

For the choice a float is turned into a whole number of the same order; NaN becomes the largest, so
that it is always chosen, and the smallest stands for what must not be chosen.
"""

import torch
import triton
import triton.language as tl

from spmoe_lite.config import Routing

from .configs import capability_of, overlap_options
from .counters import counters_of
from .gate import MIXTRAL, TINY, by_logits
from .norm_triton import normed, row_block
from .tile_triton import start_next, wait_for_previous

TILE_T = 2  # tokens of a program
PARTS = 8  # at least so many programs per tile, if there are as many experts
BYTES_PER_THREAD = 128  # of the router, in registers

NEVER = tl.constexpr(-(1 << 31))
NAN = tl.constexpr((1 << 31) - 1)
SMALL = tl.constexpr(TINY)


@triton.jit
def _key(value):
    """fp32 -> int32 of the same order; -0 equals 0, NaN is the largest, NEVER below all."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN)


@triton.jit
def _value(key):
    """Inverse of `_key`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best(keys, place, AXIS: tl.constexpr):
    """The largest of int32 keys along an axis, and the lowest place that has it."""
    top = tl.max(keys, axis=AXIS)
    at = tl.where(keys == tl.expand_dims(top, AXIS), place, 0x7FFFFFFF)
    return top, tl.min(at, axis=AXIS)


@triton.jit
def _within_groups(
    keys,  # [BLOCK_T, BLOCK_G * BLOCK_S] int32, NEVER where there is no expert
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """keys, NEVER outside the best groups."""
    grouped = tl.reshape(keys, (BLOCK_T, BLOCK_G, BLOCK_S))
    s = tl.arange(0, BLOCK_S)[None, None, :]
    group, first = _best(grouped, s, 2)  # [BLOCK_T, BLOCK_G]
    if TOP2:
        second = tl.max(tl.where(s == first[:, :, None], NEVER, grouped), axis=2)
        both = _key(_value(group) + _value(second))
        group = tl.where(group == NEVER, NEVER, both)
    g = tl.arange(0, BLOCK_G)[None, :]
    open_groups = tl.zeros((BLOCK_T, BLOCK_G), tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        winner = _best(group, g, 1)[1]
        taken = g == winner[:, None]
        open_groups = tl.where(taken, 1, open_groups)
        group = tl.where(taken, NEVER, group)
    grouped = tl.where(open_groups[:, :, None] != 0, grouped, NEVER)
    return tl.reshape(grouped, (BLOCK_T, BLOCK_G * BLOCK_S))


@triton.jit
def _choose(
    tile,
    logits_ptr,
    bias_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    factor,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,  # TILE_T or more
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """From the logits of a tile's tokens to experts and weights."""
    SIZE: tl.constexpr = (ROWS - SHARED) // GROUPS  # experts of a group
    t = tl.arange(0, BLOCK_T)
    token = tile.to(tl.int64) * TILE_T + t
    known = (t < TILE_T) & (token < num_tokens)
    place = tl.arange(0, BLOCK_G * BLOCK_S)  # group by group, each padded to BLOCK_S
    group, member = place // BLOCK_S, place % BLOCK_S
    expert = group * SIZE + member
    real = (group < GROUPS) & (member < SIZE)
    there = known[:, None] & real[None, :]
    row_ptr = logits_ptr + token[:, None] * ROWS
    logits = tl.load(row_ptr + expert[None, :], mask=there, other=0.0, cache_modifier=".cg")
    if not (SIGMOID or (BY_LOGITS and NORMALIZED)):
        largest = tl.max(tl.where(there, logits, float("-inf")), axis=1)
        largest = tl.where(known, largest, 0.0)
        total = tl.sum(tl.where(there, tl.exp(logits - largest[:, None]), 0.0), axis=1)
    choice = logits
    if not BY_LOGITS:
        if SIGMOID:
            choice = 1.0 / (1.0 + tl.exp(-logits))
        else:
            choice = tl.exp(logits - largest[:, None]) / total[:, None]
        if BIASED:
            choice += tl.load(bias_ptr + expert, mask=real, other=0.0)[None, :]
    keys = tl.where(real[None, :], _key(choice), NEVER)
    if GROUPS > 1:
        keys = _within_groups(keys, TOP_GROUPS, TOP2, BLOCK_T, BLOCK_G, BLOCK_S)

    c = tl.arange(0, BLOCK_C)[None, :]
    places = tl.zeros((BLOCK_T, BLOCK_C), tl.int32)
    broken = tl.zeros((BLOCK_T,), tl.int1)
    for i in tl.static_range(CHOICES):
        top, winner = _best(keys, place[None, :], 1)
        if i == 0:
            broken = top == NAN
        places = tl.where(c == i, winner[:, None], places)
        keys = tl.where(place[None, :] == winner[:, None], NEVER, keys)
    experts = places // BLOCK_S * SIZE + places % BLOCK_S

    mine = known[:, None] & (c < CHOICES)
    tl.store(experts_ptr + token[:, None] * CHOICES + c, experts, mask=mine)
    weights = tl.load(row_ptr + experts, mask=mine, other=0.0, cache_modifier=".cg")
    if SIGMOID:
        weights = 1.0 / (1.0 + tl.exp(-weights))
        if NORMALIZED:
            sum_of_scores = tl.sum(tl.where(mine, weights, 0.0), axis=1)
            weights = weights / (sum_of_scores[:, None] + SMALL)
    elif NORMALIZED:
        chosen_largest = tl.max(tl.where(mine, weights, float("-inf")), axis=1)
        chosen_largest = tl.where(known, chosen_largest, 0.0)
        weights = tl.exp(weights - chosen_largest[:, None])
        weights = weights / tl.sum(tl.where(mine, weights, 0.0), axis=1)[:, None]
    else:
        weights = tl.exp(weights - largest[:, None]) / total[:, None]
    weights = tl.where(broken[:, None], float("nan"), weights * factor)
    weights_ptr += token * (CHOICES + SHARED)
    tl.store(weights_ptr[:, None] + c, weights, mask=mine)
    if SHARED:
        logit = tl.load(logits_ptr + token * ROWS + (ROWS - 1), mask=known, cache_modifier=".cg")
        shared = tl.where(broken, float("nan"), 1.0 / (1.0 + tl.exp(-logit)))
        tl.store(weights_ptr + CHOICES, shared, mask=known)


@triton.jit(do_not_specialize=["num_tokens"])
def _gate_kernel(
    x_ptr,  # [T, H]
    norm_ptr,  # [H], if NORM
    router_ptr,  # [ROWS, H]
    bias_ptr,  # [ROWS - SHARED] fp32, if BIASED
    logits_ptr,  # [T, ROWS] fp32, scratch
    counters_ptr,  # [tiles] int32, zero before and after
    normed_ptr,  # [T, H], out, if NORM
    weights_ptr,  # [T, CHOICES + SHARED] fp32, out
    experts_ptr,  # [T, CHOICES] int32, out
    num_tokens,
    eps,
    factor,
    NORM: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    CHOICES: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZED: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    BIASED: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_T: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    part, tile = tl.program_id(0), tl.program_id(1)
    h, row = tl.arange(0, BLOCK_H), part * BLOCK_R + tl.arange(0, BLOCK_R)
    first = tile * TILE_T + tl.zeros((1,), tl.int64)
    there = (row < ROWS)[:, None] & (h < H)[None, :]
    router = tl.load(router_ptr + row[:, None] * H + h[None, :], mask=there, other=0.0)
    if NORM:
        weight = tl.load(norm_ptr + h, mask=h < H, other=0.0)
    wait_for_previous(PDL)  # weights are nobody's result
    # All loads are under way before the first sum waits for one.
    xs = ()
    for t in tl.static_range(TILE_T):
        inside = (h < H) & (first + t < num_tokens)
        loaded = tl.load(x_ptr + (first + t) * H + h, mask=inside, other=0.0)
        xs = xs + (loaded,)  # type: ignore[assignment]
    for t in tl.static_range(TILE_T):
        if tile * TILE_T + t < num_tokens:
            x, token = xs[t], first + t  # type: ignore[var-annotated]
            if NORM:
                x = normed(x, weight, eps, H).to(normed_ptr.dtype.element_ty)
                if part == 0:
                    tl.store(normed_ptr + token * H + h, x, mask=h < H)
            logits = tl.sum(router.to(tl.float32) * x.to(tl.float32)[None, :], axis=1)
            tl.store(logits_ptr + token * ROWS + row, logits, mask=row < ROWS)

    start_next(PDL)
    tl.debug_barrier()  # the whole program has stored before it is counted
    arrived = tl.atomic_add(counters_ptr + tile, 1, sem="acq_rel")
    if arrived == tl.num_programs(0) - 1:
        tl.store(counters_ptr + tile, 0)
        _choose(
            tile, logits_ptr, bias_ptr, weights_ptr, experts_ptr, num_tokens, factor,
            ROWS, CHOICES, SIGMOID, NORMALIZED, BY_LOGITS, BIASED, GROUPS, TOP_GROUPS, TOP2, SHARED,
            TILE_T, BLOCK_T, BLOCK_G, BLOCK_S, BLOCK_C,
        )  # fmt: skip


def gate_topk_triton(
    x: torch.Tensor,
    router: torch.Tensor,
    k: int,
    routing: Routing = MIXTRAL,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the router; arguments as `gate_topk`."""
    return _launch(x, None, 0.0, router, k, routing, bias)[1:]


def norm_gate_topk_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    k: int,
    routing: Routing = MIXTRAL,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch norm and router; arguments as `norm_gate_topk`."""
    return _launch(x, norm_weight, eps, router, k, routing, bias)


def _launch(
    x: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
    router: torch.Tensor,
    k: int,
    routing: Routing,
    bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.contiguous()
    tokens, (rows, hidden) = len(x), router.shape
    shared = routing.shared_expert_gate
    num_experts = rows - shared
    assert router.is_contiguous() and (bias is None or bias.dtype == torch.float32)
    weights = x.new_empty(tokens, k + shared, dtype=torch.float32)
    experts = x.new_empty(tokens, k, dtype=torch.int32)
    out = x if norm_weight is None else torch.empty_like(x)
    if tokens == 0:
        return out, weights, experts
    logits = x.new_empty(tokens, rows, dtype=torch.float32)
    tiles = triton.cdiv(tokens, TILE_T)
    block_h, warps = row_block(hidden)
    fitting = BYTES_PER_THREAD * 32 * warps // (block_h * router.itemsize)
    block_r = min(max(1, fitting), triton.next_power_of_2(triton.cdiv(rows, PARTS)))
    groups = routing.n_group
    _gate_kernel[triton.cdiv(rows, block_r), tiles](
        x, x if norm_weight is None else norm_weight, router, logits if bias is None else bias,
        logits, counters_of(router, tiles), out, weights, experts,
        tokens, eps, routing.routed_scaling_factor,
        NORM=norm_weight is not None, H=hidden, ROWS=rows, CHOICES=k,
        SIGMOID=routing.scoring_func == "sigmoid", NORMALIZED=routing.norm_topk_prob,
        BY_LOGITS=by_logits(routing, bias), BIASED=bias is not None,
        GROUPS=groups, TOP_GROUPS=routing.topk_group, TOP2=routing.group_score == "top2",
        SHARED=int(shared), TILE_T=TILE_T, BLOCK_T=max(TILE_T, warps), BLOCK_R=block_r,
        BLOCK_H=block_h, BLOCK_G=triton.next_power_of_2(groups),
        BLOCK_S=triton.next_power_of_2(num_experts // groups), BLOCK_C=triton.next_power_of_2(k),
        num_warps=warps, enable_fp_fusion=True, **overlap_options(capability_of(x)),
    )  # fmt: skip
    return out, weights, experts
