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
from .residency import EMPTY, FILLED, FILLING, FREE, NO_SLOT
from .tile_triton import start_next, wait_for_previous

if TYPE_CHECKING:
    from .residency import Tables

_EMPTY, _NO_SLOT = tl.constexpr(EMPTY), tl.constexpr(NO_SLOT)
_FREE, _FILLING, _FILLED = tl.constexpr(FREE), tl.constexpr(FILLING), tl.constexpr(FILLED)
_LAST = tl.constexpr(1 << 62)  # beyond every key
PAIRS = 16  # choices compared at once
COPY_PROGRAMS = 32  # measured: 16 fill a PCIe 5 x16 bus
COPY_WORDS = 4096  # int32 of one program's piece


@triton.jit
def _keys(who, age):
    """int64: rises with the age of the last use, then with the id; empty slots first, no slot last."""
    key = (age.to(tl.int64) + 1) * 65536 + who
    return tl.where(who == _NO_SLOT, _LAST, tl.where(who == _EMPTY, -1, key))


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
    progress_ptr,
    use_ptr,  # [LINES, 3] int64
    layer,
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
    absent = (chosen != 0) & ((src & -2) == host)
    tl.store(missed_ptr + e, absent.to(tl.int32), mask=e < E)
    tl.store(progress_ptr, layer)

    # The r-th absent expert that nobody is copying takes the slot with r older ones.
    wants = absent & (src == host)
    rank = tl.cumsum(wants.to(tl.int32), axis=0) - 1
    who = tl.load(who_ptr + q, mask=q < Q, other=_NO_SLOT)
    age = tl.load(age_ptr + who, mask=who >= 0, other=-1)
    kept = tl.max(((who[:, None] == e[None, :]) & (chosen != 0)[None, :]).to(tl.int32), axis=1)
    key = tl.where(kept != 0, _LAST, _keys(who, age))
    place = tl.where(key == -1, q, 0)  # empty slots in their order
    key = tl.where(key == -1, place - BLOCK_Q, key)
    older = tl.sum((key[None, :] < key[:, None]).to(tl.int32), axis=1)
    goes = key < _LAST
    match = wants[:, None] & goes[None, :] & (rank[:, None] == older[None, :])
    slot = tl.max(tl.where(match, q[None, :], -1), axis=1)  # of each expert
    comes = tl.max(tl.where(match, e[:, None], -1), axis=0)  # into each slot
    write = tl.load(slots_ptr + slot, mask=slot >= 0, other=0)
    taken, leaves = comes >= 0, (comes >= 0) & (who >= 0)
    tl.store(src_ptr + who, tl.load(host_ptr + who, mask=leaves, other=0), mask=leaves)
    tl.store(who_ptr + q, comes, mask=taken)
    tl.store(src_ptr + e, write, mask=slot >= 0)

    line = tl.cumsum(chosen, axis=0) - 1
    used = (chosen != 0) & (line < LINES)
    read = tl.where(absent, host, src)
    tl.store(use_ptr + line * 3, e.to(tl.int64), mask=used)
    tl.store(use_ptr + line * 3 + 1, read, mask=used)
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


@triton.jit
def _stage_kernel(
    predicted_ptr,  # [ITEMS] int32, CHOICES of each layer
    cutoff_ptr,
    number_ptr,
    src_ptr,  # [L, E] int64
    host_ptr,
    items_ptr,  # [F] int32
    state_ptr,
    E: tl.constexpr,
    F: tl.constexpr,
    ITEMS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    f = tl.arange(0, BLOCK_F)
    state = tl.load(state_ptr + f, mask=f < F, other=_FILLED)
    place = tl.cumsum((state == _FREE).to(tl.int32), axis=0) - 1
    place = tl.where(state == _FREE, place, -1)  # of each free landing slot
    taken, comes = 0, tl.full((BLOCK_F,), -1, tl.int32)
    for low in range(0, ITEMS, BLOCK_I):
        i = low + tl.arange(0, BLOCK_I)
        inside = (i < ITEMS) & (i // CHOICES < tl.load(cutoff_ptr))
        item = i // CHOICES * E + tl.load(predicted_ptr + i, mask=inside, other=0)
        src = tl.load(src_ptr + item, mask=inside, other=0)
        absent = inside & (src == tl.load(host_ptr + item, mask=inside, other=1))
        rank = taken + tl.cumsum(absent.to(tl.int32), axis=0) - 1
        match = absent[:, None] & (rank[:, None] == place[None, :])
        goes = tl.max(match.to(tl.int32), axis=1) != 0
        tl.store(src_ptr + item, src | 1, mask=goes)
        comes = tl.maximum(comes, tl.max(tl.where(match, item[:, None], -1), axis=0))
        taken += tl.sum(absent.to(tl.int32), axis=0)
    tl.store(items_ptr + f, comes, mask=comes >= 0)
    filling = tl.zeros((BLOCK_F,), tl.int32) + _FILLING + tl.load(number_ptr)
    tl.store(state_ptr + f, filling, mask=comes >= 0)


@triton.jit(do_not_specialize=["num_words", "number"])
def _fetch_kernel(
    src_ptr,
    host_ptr,
    progress_ptr,
    landing_ptr,
    items_ptr,
    state_ptr,
    arrived_ptr,
    num_words,
    number,
    E: tl.constexpr,
    F: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, w = tl.program_id(0), tl.arange(0, BLOCK)
    for f in range(F):
        if tl.load(state_ptr + f, volatile=True) == _FILLING + number:
            item = tl.load(items_ptr + f)
            address, landing = tl.load(host_ptr + item), tl.load(landing_ptr + f)
            late = (item // E <= tl.load(progress_ptr, volatile=True)).to(tl.int32)
            if late == 0:
                source = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
                target = tl.multiple_of(landing.to(tl.pointer_type(tl.int32)), 16)
                for low in range(program * BLOCK, num_words, PROGRAMS * BLOCK):
                    at = low + w
                    words = tl.load(source + at, mask=at < num_words)
                    tl.store(target + at, words, mask=at < num_words)
            tl.debug_barrier()  # the whole program has stored before it is counted
            before = tl.atomic_add(arrived_ptr + f, 1 + late * 65536, sem="acq_rel")
            if before % 65536 == PROGRAMS - 1:
                tl.store(arrived_ptr + f, 0)
                given_up = before + late * 65536 >= 65536
                tl.atomic_xchg(src_ptr + item, tl.where(given_up, address, landing), sem="release")
                tl.store(state_ptr + f, tl.where(given_up, _FREE, _FILLED))


@triton.jit
def _settle_kernel(
    src_ptr,  # [L, E] int64
    host_ptr,
    slots_ptr,  # [L, Q] int64
    who_ptr,
    age_ptr,
    landing_ptr,  # [F] int64
    items_ptr,
    state_ptr,
    E: tl.constexpr,
    Q: tl.constexpr,
    F: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_F: tl.constexpr,
):
    layer = tl.program_id(0)
    q, f = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_F)
    src_ptr += layer * E
    host_ptr += layer * E
    age_ptr += layer * E
    slots_ptr += layer * Q
    who_ptr += layer * Q
    state = tl.load(state_ptr + f, mask=f < F, other=_FREE)
    item = tl.load(items_ptr + f, mask=f < F, other=0)
    mine = (state == _FILLED) & (item // E == layer)
    tl.store(state_ptr + f, tl.full((BLOCK_F,), _FREE, tl.int32), mask=mine)
    who = tl.load(who_ptr + q, mask=q < Q, other=_NO_SLOT)
    age = tl.load(age_ptr + who, mask=who >= 0, other=-1)
    key = _keys(who, age)
    slots = tl.load(slots_ptr + q, mask=q < Q, other=0)
    for _ in range(tl.sum(mine.to(tl.int32), axis=0)):
        at = tl.min(tl.where(mine, f, BLOCK_F), axis=0)
        mine = mine & (f != at)
        expert = tl.sum(tl.where(f == at, item - layer * E, 0), axis=0)
        its_key = _keys(expert, tl.load(age_ptr + expert))
        oldest = tl.min(key, axis=0)
        slot = tl.min(tl.where(key == oldest, q, BLOCK_Q), axis=0)
        if oldest < its_key:
            leaves = tl.sum(tl.where(q == slot, who, 0), axis=0)
            if leaves >= 0:
                tl.store(src_ptr + leaves, tl.load(host_ptr + leaves))
            landing = tl.load(landing_ptr + at)
            tl.store(landing_ptr + at, tl.sum(tl.where(q == slot, slots, 0), axis=0))
            slots = tl.where(q == slot, landing, slots)
            who = tl.where(q == slot, expert, who)
            key = tl.where(q == slot, its_key, key)
        else:  # all others were used since: it was not wanted
            tl.store(src_ptr + expert, tl.load(host_ptr + expert))
    tl.store(slots_ptr + q, slots, mask=q < Q)
    tl.store(who_ptr + q, who, mask=q < Q)


def route_triton(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """Launch `route`."""
    num_experts, num_slots = tables.host.shape[1], tables.slots.shape[1]
    assert experts.is_contiguous() and use.is_contiguous() and trace.is_contiguous()
    _route_kernel[(1,)](
        experts, trace, tables.src[layer], tables.host[layer],
        tables.slots[layer], tables.who[layer], tables.age[layer], tables.missed[layer],
        tables.progress, use, layer,
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
        trace, rows, position, tables.age, T=tokens, CHOICES=choices, E=num_experts,
        BLOCK_C=triton.next_power_of_2(choices), BLOCK_E=_block(num_experts),
        num_warps=_warps(num_experts), enable_fp_fusion=True,
    )  # fmt: skip


def stage_triton(
    tables: Tables, predicted: torch.Tensor, cutoff: torch.Tensor, number: torch.Tensor
) -> None:
    """Launch `stage`."""
    count = predicted.numel()
    _stage_kernel[(1,)](
        predicted, cutoff, number, tables.src, tables.host, tables.items, tables.state,
        E=tables.host.shape[1], F=len(tables.items), ITEMS=count, CHOICES=predicted.shape[1],
        BLOCK_I=64, BLOCK_F=_block(len(tables.items)), num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def fetch_triton(tables: Tables, size: int, number: int) -> None:
    """Launch `fetch`."""
    _fetch_kernel[(COPY_PROGRAMS,)](
        tables.src, tables.host, tables.progress, tables.landing, tables.items, tables.state,
        tables.arrived, size // 4, number, E=tables.host.shape[1], F=len(tables.items),
        PROGRAMS=COPY_PROGRAMS, BLOCK=COPY_WORDS, num_warps=8, enable_fp_fusion=True,
    )  # fmt: skip


def settle_triton(tables: Tables) -> None:
    """Launch `settle`."""
    layers, num_slots = tables.slots.shape
    _settle_kernel[(layers,)](
        tables.src, tables.host, tables.slots, tables.who, tables.age, tables.landing, tables.items,
        tables.state, E=tables.host.shape[1], Q=num_slots, F=len(tables.items),
        BLOCK_Q=_block(num_slots), BLOCK_F=_block(len(tables.items)), num_warps=1,
        enable_fp_fusion=True,
    )  # fmt: skip


def _block(count: int) -> int:
    return max(16, triton.next_power_of_2(count))


def _warps(num_experts: int) -> int:
    return 1 if num_experts <= 16 else 4
