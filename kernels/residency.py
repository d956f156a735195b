"""Which expert lies in which slot, decided on the device: route, credit, and copies ahead of need.

All state is in `Tables`, on the device, so that a captured pass needs no answer from the host. For
each layer `src` says where every expert is read now: its slot, or its bytes in host memory, which
the device can read. Bit 0 of an address in host memory says that it is staged for `fetch`.

    route    before a layer's experts: union of the chosen ones in rising order; for each one that
             lies in host memory take the layer's next victim, and say in `use` that the expert kernel
             is to read host memory and write what it read into that slot
    credit   after the pass, for the rows that were accepted: the expert's last use is their position
    stage    in a draft pass: of what its states point at, give absent experts the slots of their
             layers' next victims; only as many as can be copied before they are needed
    fetch    copy what one `stage` chose, in the order of the layers; publish each expert when it is
             there; give up what has not begun when drafting is over

The victim is the least recently used expert of the same layer outside the union, and for `stage`
outside all that this step's drafts have pointed at; empty slots come first, equal ages by id. Where
there is no victim, `route` has the expert used from host memory and not kept, and `stage` leaves it.
Eviction is safe without a lock: whoever reads a slot was launched on the same stream before, and its
next readers come after.

`fetch` runs on a stream of its own, all others on that of the passes. From `stage` on a slot belongs
to its `fetch`, and only `fetch` changes the address. The pass waits for it to end: beside kernels that
read host memory on every processor a copy would hardly move on, its expert would be read once more, and
its slot would have lost somebody for nothing.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

EMPTY, NO_SLOT = -1, -2
STAGED, FILLED, LATE = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Tables:
    """L layers, E experts and at most Q slots a layer; on one device.

    K drafts of a step have n predictions for each of the first P layers.
    """

    host: torch.Tensor  # [L, E] int64: address of the expert in host memory
    src: torch.Tensor  # [L, E] int64: address to read now; bit 0: being copied
    slots: torch.Tensor  # [L, Q] int64: address of each slot
    who: torch.Tensor  # [L, Q] int32: the expert in it, EMPTY, or NO_SLOT where a layer has fewer
    age: torch.Tensor  # [L, E] int32: position of the last accepted use, -1 never
    missed: torch.Tensor  # [L, E] int32: 1 if the pass at hand read it from host memory
    over: torch.Tensor  # [1] int32: 1 once drafting is over, and nothing more is to be copied ahead
    expected: torch.Tensor  # [L, E] int32: 1 if a draft of this step has pointed at it
    wanted: torch.Tensor  # [K, P, n] int32: what `stage` chose, expert ids
    place: torch.Tensor  # [K, P, n] int32: its slot
    state: torch.Tensor  # [K, P, n] int32: 0 nothing, STAGED, FILLED, LATE
    arrived: torch.Tensor  # [K, P, n] int32: programs of `fetch` that have copied their share

    @staticmethod
    def make(host: torch.Tensor, slots: torch.Tensor, ahead: tuple[int, int, int]) -> Tables:
        """Nothing resident; on the device of `slots` [L, Q] int64, which holds 0 where there is none.

        ahead: (K, P, n).
        """
        device = slots.device

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        host = host.to(device)
        return Tables(
            host=host,
            src=host.clone(),
            slots=slots,
            who=torch.where(slots == 0, NO_SLOT, EMPTY).int(),
            age=zeros(*host.shape) - 1,
            missed=zeros(*host.shape),
            over=zeros(1),
            expected=zeros(*host.shape),
            wanted=zeros(*ahead),
            place=zeros(*ahead),
            state=zeros(*ahead),
            arrived=zeros(*ahead),
        )


def route(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """experts [T, k] int32 -> fills use [n, 3] int64 (expert, read, write too or 0), -1 where unused.

    n is at least the union. Copies experts to trace [T, k] int32; updates src, who and missed. Nothing
    is staged any more. CPU tensors take the reference.
    """
    if experts.is_cuda:
        from .residency_triton import route_triton

        route_triton(tables, layer, experts, use, trace)
    else:
        route_reference(tables, layer, experts, use, trace)


def credit(tables: Tables, trace: torch.Tensor, rows: torch.Tensor, position: torch.Tensor) -> None:
    """trace [L, T, k] int32; the first `rows` [1] int32 rows were accepted at `position` [1] int32.

    The step is over: nothing is expected any more.
    """
    if trace.is_cuda:
        from .residency_triton import credit_triton

        credit_triton(tables, trace, rows, position)
    else:
        credit_reference(tables, trace, rows, position)


def stage(
    tables: Tables,
    predicted: torch.Tensor,
    cutoff: torch.Tensor,
    queued: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """predicted [P, n] int32: give the absent ones of the first `cutoff` [1] layers slots, in their order.

    number [1] int32, from 0, is that of the draft token; queued [K] int32: how many may be staged and not
    yet there after it. Runs before the pass that will want them, and after `credit` of the one before.
    CPU tensors take the reference.
    """
    if predicted.is_cuda:
        from .residency_triton import stage_triton

        stage_triton(tables, predicted, cutoff, queued, number)
    else:
        stage_reference(tables, predicted, cutoff, queued, number)


def fetch(tables: Tables, size: int, number: int, cutoff: int) -> None:
    """Copy the `size` bytes of what draft token `number` staged, each unless drafting is over."""
    if tables.src.is_cuda:
        from .residency_triton import fetch_triton

        fetch_triton(tables, size, number, cutoff)
    else:
        fetch_reference(tables, size, number, cutoff)


def route_reference(
    tables: Tables, layer: int, experts: torch.Tensor, use: torch.Tensor, trace: torch.Tensor
) -> None:
    """The same by torch."""
    trace.copy_(experts)
    union = sorted(set(experts.flatten().tolist()))
    src, host = tables.src[layer], tables.host[layer]
    tables.missed[layer] = 0
    victims = _by_age(tables, layer, outside=union)
    use.fill_(-1)
    for line, expert in enumerate(union):
        read, write = int(src[expert]), 0
        if read == int(host[expert]):
            tables.missed[layer, expert] = 1
            if victims:
                slot = _take(tables, layer, victims.pop(0), expert)
                src[expert] = write = int(tables.slots[layer, slot])
        use[line] = torch.tensor([expert, read, write])


def credit_reference(
    tables: Tables, trace: torch.Tensor, rows: torch.Tensor, position: torch.Tensor
) -> None:
    """The same by torch."""
    for row in range(int(rows)):
        for layer in range(len(trace)):
            tables.age[layer, trace[layer, row].long()] = int(position) + row
    tables.expected.zero_()


def stage_reference(
    tables: Tables,
    predicted: torch.Tensor,
    cutoff: torch.Tensor,
    queued: torch.Tensor,
    number: torch.Tensor,
) -> None:
    """The same by torch."""
    wanted, place, state = (t[int(number)] for t in (tables.wanted, tables.place, tables.state))
    state.zero_()
    left = int(queued[int(number)]) - int((tables.state[: int(number)] == STAGED).sum())
    for layer, row in enumerate(predicted[: int(cutoff)].tolist()):
        src, host, expected = tables.src[layer], tables.host[layer], tables.expected[layer]
        expected[row] = 1
        victims = _by_age(tables, layer, outside=expected.nonzero().flatten().tolist())
        for j, expert in enumerate(row):
            if left > 0 and victims and src[expert] == host[expert]:
                place[layer, j] = _take(tables, layer, victims.pop(0), expert)
                wanted[layer, j], state[layer, j] = expert, STAGED
                src[expert] |= 1
                left -= 1


def fetch_reference(tables: Tables, size: int, number: int, cutoff: int) -> None:
    """The same by torch."""
    for layer, row in enumerate(tables.state[number, :cutoff].tolist()):
        for j, state in enumerate(row):
            if state != STAGED:
                continue
            expert, slot = (int(t[number, layer, j]) for t in (tables.wanted, tables.place))
            late = bool(tables.over)
            if late:
                tables.src[layer, expert] = tables.host[layer, expert]
                tables.who[layer, slot] = EMPTY
            else:
                address = int(tables.slots[layer, slot])
                ctypes.memmove(address, int(tables.host[layer, expert]), size)
                tables.src[layer, expert] = address
            tables.state[number, layer, j] = LATE if late else FILLED


def _by_age(tables: Tables, layer: int, outside: list[int]) -> list[int]:
    """Slots of a layer whose expert may go, the first to go first."""
    age = tables.age[layer].tolist()
    able = [
        (-2, slot, slot) if expert == EMPTY else (age[expert], expert, slot)
        for slot, expert in enumerate(tables.who[layer].tolist())
        if expert == EMPTY or (expert >= 0 and expert not in outside)
    ]
    return [slot for *_, slot in sorted(able)]


def _take(tables: Tables, layer: int, slot: int, expert: int) -> int:
    """Make a slot the expert's, which leaves the one before it in host memory."""
    if (old := int(tables.who[layer, slot])) >= 0:
        tables.src[layer, old] = tables.host[layer, old]
    tables.who[layer, slot] = expert
    return slot
