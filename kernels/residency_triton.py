"""Triton kernels of residency on the device; what they do and why it is safe: `residency.py`.

`_route_kernel` is one program: which of a layer's experts are chosen, which of those lie in host
memory, and the order of its slots by age are vectors and small matrices of comparisons; the r-th
absent expert takes the slot of rank r. `_fetch_kernel` is a few programs that copy a share of every
expert each; the last to arrive publishes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from .configs import capability_of, overlap_options
from .residency import EMPTY, FILLED, LATE, NO_SLOT, STAGED
from .tile_triton import start_next, wait_for_previous

if TYPE_CHECKING:
    from .residency import Tables

_EMPTY, _NO_SLOT = tl.constexpr(EMPTY), tl.constexpr(NO_SLOT)
_STAGED, _FILLED, _LATE = tl.constexpr(STAGED), tl.constexpr(FILLED), tl.constexpr(LATE)
_LAST = tl.constexpr(1 << 62)  # beyond every key
PAIRS = 16  # choices compared at once
# Each program has all registers of a processor: what runs beside one that waits for the bus waits with it, and
# the draft's next kernel with that. Two programs fill a PCIe 5 x16 bus on most processors; where the draft's
# kernels leave others, four are needed, and with six drafting takes longer (docs/log.md).
COPY_PROGRAMS = 4
COPY_WARPS = 32
COPY_WORDS = 65536  # int32 of one program's piece


@triton.jit
def _matched(wants, who_ptr, age_ptr, e, kept, Q: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The r-th of those that want a slot, with the slot that has r older ones.

    wants [W]; kept [E]: experts that stay -> (who [Q], match [W, Q]).
    """
    q = tl.arange(0, BLOCK_Q)
    who = tl.load(who_ptr + q, mask=q < Q, other=_NO_SLOT)
    age = tl.load(age_ptr + who, mask=who >= 0, other=-1)
    stays = tl.max(((who[:, None] == e[None, :]) & (kept != 0)[None, :]).to(tl.int32), axis=1)
    key = (age.to(tl.int64) + 1) * 65536 + who  # rises with the age of the last use, then the id
    key = tl.where(who == _EMPTY, (q - BLOCK_Q).to(tl.int64), key)
    key = tl.where((who == _NO_SLOT) | (stays != 0), _LAST, key)
    older = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    rank = tl.cumsum(wants.to(tl.int32), axis=0) - 1
    match = wants[:, None] & (key < _LAST)[None, :] & (rank[:, None] == older[None, :])
    return who, match


@triton.jit
def _move_in(src_ptr, host_ptr, who_ptr, who, comes, BLOCK_Q: tl.constexpr):
    """Who comes [Q] into each slot, -1 nobody; those who were there are in host memory from now on."""
    q = tl.arange(0, BLOCK_Q)
    leaves = (comes >= 0) & (who >= 0)
    tl.store(src_ptr + who, tl.load(host_ptr + who, mask=leaves, other=0), mask=leaves)
    tl.store(who_ptr + q, comes, mask=comes >= 0)


@triton.jit
def _route_kernel(
    experts_ptr,  # [T * k] int32
    trace_ptr,  # [T * k] int32, out
    src_ptr,  # [E] int64 of this layer, as the next ones
    host_ptr,  # [E] int64
    slots_ptr,  # [Q] int64
    who_ptr,  # [Q] int32
    age_ptr,  # [E] int32
    missed_ptr,  # [E] int32
    use_ptr,  # [LINES, 3] int64
    NUM_PAIRS: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    LINES: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    wait_for_previous(PDL)
    e, q = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_Q)
    chosen = tl.zeros((BLOCK_E,), tl.int32)
    for low in range(0, NUM_PAIRS, BLOCK_P):
        pair = low + tl.arange(0, BLOCK_P)
        expert = tl.load(experts_ptr + pair, mask=pair < NUM_PAIRS, other=-1)
        tl.store(trace_ptr + pair, expert, mask=pair < NUM_PAIRS)
        same = (expert[None, :] == e[:, None]).to(tl.int32)
        chosen = tl.maximum(chosen, tl.max(same, axis=1))
    src = tl.load(src_ptr + e, mask=e < E, other=0)
    host = tl.load(host_ptr + e, mask=e < E, other=1)
    absent = (chosen != 0) & (src == host)
    tl.store(missed_ptr + e, absent.to(tl.int32), mask=e < E)

    who, match = _matched(absent, who_ptr, age_ptr, e, chosen, Q, BLOCK_Q)
    slot = tl.max(tl.where(match, q[None, :], -1), axis=1)  # of each expert
    comes = tl.max(tl.where(match, e[:, None], -1), axis=0)  # into each slot
    write = tl.load(slots_ptr + slot, mask=slot >= 0, other=0)
    _move_in(src_ptr, host_ptr, who_ptr, who, comes, BLOCK_Q)
    tl.store(src_ptr + e, write, mask=slot >= 0)

    line = tl.cumsum(chosen, axis=0) - 1
    used = (chosen != 0) & (line < LINES)
    tl.store(use_ptr + line * 3, e.to(tl.int64), mask=used)
    tl.store(use_ptr + line * 3 + 1, src, mask=used)
    tl.store(use_ptr + line * 3 + 2, write, mask=used)
    rest = tl.arange(0, BLOCK_L)
    unused = (rest >= tl.sum(chosen, axis=0)) & (rest < LINES)
    tl.store(use_ptr + rest * 3, tl.full((BLOCK_L,), -1, tl.int64), mask=unused)
    start_next(PDL)


@triton.jit
def _credit_kernel(
    trace_ptr,  # [L, T, k] int32
    rows_ptr,
    position_ptr,
    age_ptr,  # [L, E] int32
    expected_ptr,
    T: tl.constexpr,
    CHOICES: tl.constexpr,
    E: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    layer = tl.program_id(0)
    rows, position = tl.load(rows_ptr), tl.load(position_ptr)
    e, j = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_C)
    last = tl.full((BLOCK_E,), -1, tl.int32)
    for row in range(0, tl.minimum(rows, T)):
        at = trace_ptr + (layer * T + row) * CHOICES + j
        expert = tl.load(at, mask=j < CHOICES, other=-1)
        hit = tl.max((expert[None, :] == e[:, None]).to(tl.int32), axis=1)
        last = tl.where(hit != 0, position + row, last)
    tl.store(age_ptr + layer * E + e, last, mask=(last >= 0) & (e < E))
    tl.store(expected_ptr + layer * E + e, tl.zeros((BLOCK_E,), tl.int32), mask=e < E)


@triton.jit
def _stage_kernel(
    predicted_ptr,  # [P, CHOICES] int32
    cutoff_ptr,
    queued_ptr,  # [K] int32
    number_ptr,
    src_ptr,  # [L, E] int64
    host_ptr,
    who_ptr,  # [L, Q] int32
    age_ptr,  # [L, E] int32
    expected_ptr,
    wanted_ptr,  # [K, P, CHOICES] int32
    place_ptr,
    state_ptr,
    P: tl.constexpr,
    E: tl.constexpr,
    Q: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_S: tl.constexpr,  # K P CHOICES
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    number, layers = tl.load(number_ptr), tl.minimum(tl.load(cutoff_ptr), P)
    row = number * P * CHOICES
    i = tl.arange(0, BLOCK_S)
    before = tl.load(state_ptr + i, mask=i < row, other=0)  # `fetch` may be at it: a count, no more
    left = tl.load(queued_ptr + number) - tl.sum((before == _STAGED).to(tl.int32), axis=0)
    pointed = i < layers * CHOICES
    guess = tl.load(predicted_ptr + i, mask=pointed, other=0)
    tl.store(
        expected_ptr + i // CHOICES * E + guess, tl.full((BLOCK_S,), 1, tl.int32), mask=pointed
    )
    tl.store(state_ptr + row + i, tl.zeros((BLOCK_S,), tl.int32), mask=i < P * CHOICES)
    tl.debug_barrier()  # the whole program sees these stores
    j, e, q = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_Q)
    layer = 0
    while (layer < layers) & (left > 0):
        expert = tl.load(predicted_ptr + layer * CHOICES + j, mask=j < CHOICES, other=-1)
        expected = tl.load(expected_ptr + layer * E + e, mask=e < E, other=0)
        src_row, host_row = src_ptr + layer * E, host_ptr + layer * E
        who_row = who_ptr + layer * Q
        src = tl.load(src_row + expert, mask=j < CHOICES, other=0)
        absent = (src == tl.load(host_row + expert, mask=j < CHOICES, other=1)) & (j < CHOICES)
        absent &= tl.cumsum(absent.to(tl.int32), axis=0) <= left
        who, match = _matched(absent, who_row, age_ptr + layer * E, e, expected, Q, BLOCK_Q)
        slot = tl.max(tl.where(match, q[None, :], -1), axis=1)
        comes = tl.max(tl.where(match, expert[:, None], -1), axis=0)
        _move_in(src_row, host_row, who_row, who, comes, BLOCK_Q)
        tl.store(src_row + expert, src | 1, mask=slot >= 0)
        at = row + layer * CHOICES + j
        tl.store(wanted_ptr + at, expert, mask=slot >= 0)
        tl.store(place_ptr + at, slot, mask=slot >= 0)
        tl.store(state_ptr + at, tl.full((BLOCK_C,), _STAGED, tl.int32), mask=slot >= 0)
        left -= tl.sum((slot >= 0).to(tl.int32), axis=0)
        layer += 1


@triton.jit(do_not_specialize=["num_quads", "first", "count"])
def _fetch_kernel(
    src_ptr,  # [L, E] int64
    host_ptr,
    slots_ptr,  # [L, Q] int64
    who_ptr,
    over_ptr,
    wanted_ptr,  # [items] int32, as the next three
    place_ptr,
    state_ptr,
    arrived_ptr,
    num_quads,  # of an expert: 16 bytes each, so that loads are that wide
    first,
    count,
    E: tl.constexpr,
    Q: tl.constexpr,
    CHOICES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, w, num_words = tl.program_id(0), tl.arange(0, BLOCK), num_quads * 4
    for i in range(count):
        item = first + i
        if tl.load(state_ptr + item, volatile=True) == _STAGED:
            layer = i // CHOICES
            expert = layer * E + tl.load(wanted_ptr + item)
            slot = layer * Q + tl.load(place_ptr + item)
            address, landing = tl.load(host_ptr + expert), tl.load(slots_ptr + slot)
            # One thread asks for its program. A load is made by every warp, and drafting may end between two
            # of them: those that find it over would not copy, and their share of an expert that counts as
            # copied would be the one's before it.
            late = tl.atomic_or(over_ptr, 0, sem="relaxed")
            if late == 0:
                source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
                target = tl.multiple_of(landing.to(tl.pointer_type(tl.int32)), 16)
                for low in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
                    at = low + w
                    words = tl.load(source + at, mask=at < num_words)
                    tl.store(target + at, words, mask=at < num_words)
            tl.debug_barrier()  # the whole program has stored before it is counted
            before = tl.atomic_add(arrived_ptr + item, 1 + late * 65536, sem="acq_rel")
            if before % 65536 == PROGRAMS - 1:
                tl.store(arrived_ptr + item, 0)
                given_up = before + late * 65536 >= 65536
                if given_up:
                    tl.store(who_ptr + slot, _EMPTY)
                now = tl.where(given_up, address, landing)
                tl.atomic_xchg(src_ptr + expert, now, sem="release")
                tl.store(state_ptr + item, tl.where(given_up, _LATE, _FILLED))


def route_triton(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """Launch `route`."""
    num_experts, num_slots = tables.host.shape[1], tables.slots.shape[1]
    assert experts.is_contiguous() and use.is_contiguous() and trace.is_contiguous()
    _route_kernel[(1,)](
        experts, trace, tables.src[layer], tables.host[layer],
        tables.slots[layer], tables.who[layer], tables.age[layer], tables.missed[layer], use,
        NUM_PAIRS=experts.numel(), E=num_experts, Q=num_slots, LINES=len(use),
        BLOCK_P=PAIRS, BLOCK_E=_block(num_experts), BLOCK_Q=_block(num_slots),
        BLOCK_L=_block(len(use)), num_warps=_warps(num_experts), enable_fp_fusion=True,
        **overlap_options(capability_of(experts)),
    )  # fmt: skip


def credit_triton(
    tables: Tables, trace: torch.Tensor, rows: torch.Tensor, position: torch.Tensor
) -> None:
    """Launch `credit`."""
    layers, tokens, choices = trace.shape
    num_experts = tables.host.shape[1]
    _credit_kernel[(layers,)](
        trace, rows, position, tables.age, tables.expected, T=tokens, CHOICES=choices, E=num_experts,
        BLOCK_C=triton.next_power_of_2(choices), BLOCK_E=_block(num_experts),
        num_warps=_warps(num_experts), enable_fp_fusion=True,
    )  # fmt: skip


def stage_triton(
    tables: Tables,
    predicted: torch.Tensor,
    cutoff: torch.Tensor,
    queued: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """Launch `stage`."""
    num_experts, num_slots = tables.host.shape[1], tables.slots.shape[1]
    layers, choices = predicted.shape
    assert predicted.is_contiguous() and predicted.shape == tables.wanted.shape[1:]
    assert len(queued) == len(tables.wanted) and queued.is_contiguous()
    warps = _warps(num_experts)
    # A number for each thread at least: fewer would be read and counted by every warp for itself, and `fetch`
    # may change one between two of them.
    counted = max(_block(tables.state.numel()), 32 * warps)
    _stage_kernel[(1,)](
        predicted, cutoff, queued, number, tables.src, tables.host, tables.who, tables.age,
        tables.expected, tables.wanted, tables.place, tables.state,
        P=layers, E=num_experts, Q=num_slots, CHOICES=choices, BLOCK_S=counted,
        BLOCK_C=_block(choices), BLOCK_E=_block(num_experts), BLOCK_Q=_block(num_slots),
        num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip


def fetch_triton(tables: Tables, size: int, number: int, cutoff: int) -> None:
    """Launch `fetch`."""
    _, layers, choices = tables.wanted.shape
    assert size % 16 == 0
    _fetch_kernel[(COPY_PROGRAMS,)](
        tables.src, tables.host, tables.slots, tables.who, tables.over, tables.wanted,
        tables.place, tables.state, tables.arrived, size // 16, number * layers * choices,
        min(cutoff, layers) * choices, E=tables.host.shape[1], Q=tables.slots.shape[1],
        CHOICES=choices, PROGRAMS=COPY_PROGRAMS, BLOCK=COPY_WORDS, num_warps=COPY_WARPS,
        enable_fp_fusion=True,
    )  # fmt: skip


def _block(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def _warps(num_experts: int) -> int:
    return 1 if num_experts <= 16 else 4
