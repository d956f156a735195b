"""Which expert lies in which slot, decided on the device: route, credit, and copies ahead of need.

All state is in `Tables`, on the device, so that a captured pass needs no answer from the host. For
each layer `src` says where every expert is read now: its slot, or its bytes in host memory, which
the device can read. Bit 0 of an address in host memory says that `fetch` is copying it.

    route    before a layer's experts: union of the chosen ones in rising order; for each one that
             lies in host memory take the layer's next victim, and say in `use` that the expert kernel
             is to read host memory and write what it read into that slot
    credit   after the pass, for the rows that were accepted: the expert's last use is their position
    stage    after a draft token: choose what to copy of what its states point at, in the order of
             the layers, absent experts only, as many as there are free landing slots
    fetch    copy what one `stage` chose; publish each expert when it has arrived
    settle   trade a landing slot that was filled for the oldest slot of its layer

The victim is the least recently used expert of the same layer outside the union; empty slots come
first, equal ages by id. Where the union leaves no victim, the expert is used from host memory and
not kept. Eviction is safe without a lock: whoever reads a slot was launched on the same stream
before `route`, and its next readers are those of the next pass.

`fetch` runs on a stream of its own, all others on that of the passes. The two sides own different
slots: a slot of `slots` is written by the passes only, a landing slot by `fetch` only, and `settle`
waits for it. An expert that is being copied is read from host memory and not kept by the passes,
so only `fetch` changes its address.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

EMPTY, NO_SLOT = -1, -2
FREE, FILLED, FILLING = 0, 1, 2  # FILLING + i: by the i-th `fetch` of a step


@dataclass(frozen=True, slots=True)
class Tables:
    """L layers, E experts a layer, at most Q slots a layer, F landing slots; all on one device."""

    host: torch.Tensor  # [L, E] int64: address of the expert in host memory
    src: torch.Tensor  # [L, E] int64: address to read now; bit 0: being copied
    slots: torch.Tensor  # [L, Q] int64: address of each slot
    who: torch.Tensor  # [L, Q] int32: the expert in it, EMPTY, or NO_SLOT where a layer has fewer
    age: torch.Tensor  # [L, E] int32: position of the last accepted use, -1 never
    missed: torch.Tensor  # [L, E] int32: 1 if the pass at hand read it from host memory
    progress: torch.Tensor  # [1] int32: the layer at hand; before it all predictions are late
    landing: torch.Tensor  # [F] int64: addresses of landing slots
    items: torch.Tensor  # [F] int32: layer * E + expert that a landing slot is for
    state: torch.Tensor  # [F] int32: FREE, FILLED, or FILLING and the number of its `fetch`
    arrived: torch.Tensor  # [F] int32: programs of `fetch` that have copied their share

    @staticmethod
    def make(
        host: torch.Tensor, slots: torch.Tensor, landing: torch.Tensor, device: torch.device
    ) -> Tables:
        """Nothing resident; slots [L, Q] int64 holds 0 where a layer has no slot."""
        who = torch.where(slots == 0, NO_SLOT, EMPTY).int()

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return Tables(
            host=host.to(device),
            src=host.to(device).clone(),
            slots=slots.to(device),
            who=who.to(device),
            age=zeros(*host.shape) - 1,
            missed=zeros(*host.shape),
            progress=zeros(1),
            landing=landing.to(device),
            items=zeros(len(landing)),
            state=zeros(len(landing)),
            arrived=zeros(len(landing)),
        )


def route(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """experts [T, k] int32 -> fills use [n, 3] int64 (expert, read, write too or 0), -1 where unused.

    n is at least the union. Copies experts to trace [T, k] int32; updates src, who, missed and
    progress. CPU tensors take the reference.
    """
    if experts.is_cuda:
        from .residency_triton import route_triton

        route_triton(tables, layer, experts, use, trace)
    else:
        route_reference(tables, layer, experts, use, trace)


def credit(tables: Tables, trace: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> None:
    """trace [L, T, k] int32; the first `rows` [1] int32 rows were accepted at `position` [1] int32."""
    if trace.is_cuda:
        from .residency_triton import credit_triton

        credit_triton(tables, trace, rows, position)
    else:
        credit_reference(tables, trace, rows, position)


def stage(
    tables: Tables, predicted: torch.Tensor, cutoff: torch.Tensor, number: torch.Tensor
) -> None:
    """predicted [L, n] int32: give the absent ones of the first `cutoff` [1] layers landing slots.

    number [1] int32, from 0, is that of the `fetch` which is to copy them. Runs before the pass that
    will want them, and after `settle` of the one before. CPU tensors take the reference.
    """
    if predicted.is_cuda:
        from .residency_triton import stage_triton

        stage_triton(tables, predicted, cutoff, number)
    else:
        stage_reference(tables, predicted, cutoff, number)


def fetch(tables: Tables, size: int, number: int) -> None:
    """Copy the `size` bytes of the experts that `stage` gave this number, unless their layer has begun."""
    if tables.src.is_cuda:
        from .residency_triton import fetch_triton

        fetch_triton(tables, size, number)
    else:
        fetch_reference(tables, size, number)


def settle(tables: Tables) -> None:
    """Landing slots that were filled join their layers, which give their oldest slot for each."""
    if tables.src.is_cuda:
        from .residency_triton import settle_triton

        settle_triton(tables)
    else:
        settle_reference(tables)


def route_reference(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """The same by torch."""
    trace.copy_(experts)
    union = sorted(set(experts.flatten().tolist()))
    src, host, who = tables.src[layer], tables.host[layer], tables.who[layer]
    tables.missed[layer] = 0
    tables.progress[0] = layer
    victims = _by_age(tables, layer, outside=union)
    use.fill_(-1)
    for line, expert in enumerate(union):
        read, write = int(src[expert]), 0
        if read & ~1 == int(host[expert]):
            tables.missed[layer, expert] = 1
            if read & 1 == 0 and victims:
                slot = victims.pop(0)
                if (old := int(who[slot])) >= 0:
                    src[old] = host[old]
                who[slot] = expert
                src[expert] = write = int(tables.slots[layer, slot])
            read &= ~1
        use[line] = torch.tensor([expert, read, write])


def credit_reference(
    tables: Tables, trace: torch.Tensor, rows: torch.Tensor, position: torch.Tensor
) -> None:
    """The same by torch."""
    for row in range(int(rows)):
        for layer in range(len(trace)):
            tables.age[layer, trace[layer, row].long()] = int(position) + row


def stage_reference(
    tables: Tables, predicted: torch.Tensor, cutoff: torch.Tensor, number: torch.Tensor
) -> None:
    """The same by torch."""
    experts = tables.host.shape[1]
    free = [i for i, state in enumerate(tables.state.tolist()) if state == FREE]
    for layer, row in enumerate(predicted[: int(cutoff)].tolist()):
        for expert in row:
            if free and tables.src[layer, expert] == tables.host[layer, expert]:
                tables.src[layer, expert] |= 1
                slot = free.pop(0)
                tables.items[slot] = layer * experts + expert
                tables.state[slot] = FILLING + int(number)


def fetch_reference(tables: Tables, size: int, number: int) -> None:
    """The same by torch."""
    experts = tables.host.shape[1]
    for slot, state in enumerate(tables.state.tolist()):
        if state != FILLING + number:
            continue
        layer, expert = divmod(int(tables.items[slot]), experts)
        host = int(tables.host[layer, expert])
        if layer <= int(tables.progress):
            tables.src[layer, expert] = host
            tables.state[slot] = FREE
            continue
        ctypes.memmove(int(tables.landing[slot]), host, size)
        tables.src[layer, expert] = tables.landing[slot]
        tables.state[slot] = FILLED


def settle_reference(tables: Tables) -> None:
    """The same by torch."""
    experts = tables.host.shape[1]
    for landing, state in enumerate(tables.state.tolist()):
        if state != FILLED:
            continue
        layer, expert = divmod(int(tables.items[landing]), experts)
        src, host, who = tables.src[layer], tables.host[layer], tables.who[layer]
        tables.state[landing] = FREE
        oldest = _by_age(tables, layer, outside=[])
        old = int(who[oldest[0]]) if oldest else expert
        age = tables.age[layer]
        if not oldest or (old >= 0 and (int(age[old]), old) > (int(age[expert]), expert)):
            src[expert] = host[expert]  # all others were used since: it was not wanted
            continue
        if old >= 0:
            src[old] = host[old]
        who[oldest[0]] = expert
        slot = int(tables.slots[layer, oldest[0]])
        tables.slots[layer, oldest[0]] = tables.landing[landing]
        tables.landing[landing] = slot


def _by_age(tables: Tables, layer: int, outside: list[int]) -> list[int]:
    """Slots of a layer whose expert may go, the first to go first."""
    age = tables.age[layer].tolist()
    able = [
        (-2, slot, slot) if expert == EMPTY else (age[expert], expert, slot)
        for slot, expert in enumerate(tables.who[layer].tolist())
        if expert != NO_SLOT and expert not in outside
    ]
    return [slot for *_, slot in sorted(able)]
