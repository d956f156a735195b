"""Residency on the device: kernel and reference agree step by step, and keep their laws."""

import random

import pytest
import torch
import triton
import triton.language as tl

from spmoe_lite.kernels import residency, residency_triton
from spmoe_lite.kernels.residency import EMPTY, Tables

BOTH = ["reference", "triton"]
STRIDE = 64 << 10


class World:
    """L layers of E experts whose bytes are their number, Q slots a layer, two drafts of n guesses."""

    def __init__(self, how, device, layers=3, experts=8, quota=3, guesses=2, k=2, tokens=3):
        device = "cpu" if how == "reference" else device
        self.how, self.k, self.tokens = how, k, tokens
        count = layers * experts
        self.host = torch.arange(count, dtype=torch.uint8).repeat_interleave(STRIDE)
        self.host = self.host.pin_memory() if device == "cuda" else self.host
        self.room = torch.full((layers * quota * STRIDE,), 255, dtype=torch.uint8, device=device)
        host = self.host.data_ptr() + STRIDE * torch.arange(count).view(layers, experts)
        slots = self.room.data_ptr() + STRIDE * torch.arange(layers * quota).view(layers, quota)
        slots[layers - 1, quota - 1] = 0  # the last layer has one slot less
        self.tables = Tables.make(host, slots.to(device), (2, layers, guesses))
        lines = min(experts, k * tokens)
        self.use = torch.full((lines, 3), 7, dtype=torch.int64, device=device)
        self.trace = torch.zeros((layers, tokens, k), dtype=torch.int32, device=device)
        self.device = device

    def __getattr__(self, name):
        return getattr(residency if self.how == "door" else MODULES[self.how], f"{name}_{self.how}")

    def run_pass(self, chosen):
        """chosen[layer] [T, k]; the expert kernel's part is done here: read, and write too."""
        lines = []
        for layer, rows in enumerate(chosen):
            experts = torch.tensor(rows, dtype=torch.int32, device=self.device)
            self.route(self.tables, layer, experts, self.use, self.trace[layer])
            used = [tuple(line) for line in self.use.tolist() if line[0] >= 0]
            for expert, read, write in used:
                assert self.content(read) == layer * self.tables.host.shape[1] + expert
                if write:
                    self.set_content(write, self.content(read))
            lines.append(used)
        return lines

    def content(self, address):
        memory, base = self.memory(address)
        piece = memory[address - base : address - base + STRIDE]
        assert bool((piece == piece[0]).all())
        return int(piece[0])

    def set_content(self, address, value):
        memory, base = self.memory(address)
        memory[address - base : address - base + STRIDE] = value

    def memory(self, address):
        for memory in (self.host, self.room):
            if memory.data_ptr() <= address < memory.data_ptr() + memory.numel():
                return memory, memory.data_ptr()
        raise AssertionError(f"{address:#x} is nobody's")

    def one(self, value):
        return torch.tensor([value], dtype=torch.int32, device=self.device)

    def accept(self, rows, position):
        self.credit(self.tables, self.trace, self.one(rows), self.one(position))

    def predict(self, predicted, number=0, cutoff=99, queued=(99, 99)):
        predicted, queued = (
            torch.tensor(values, dtype=torch.int32, device=self.device)
            for values in (predicted, queued)
        )
        self.stage(self.tables, predicted, self.one(cutoff), queued, self.one(number))

    def state(self):
        """All tables, addresses relative to their memories so that two worlds compare."""

        def relative(address):
            memory, base = self.memory(address & ~1)
            return address & 1, address - base, memory is self.host

        t = self.tables
        staged = t.state != 0
        plain = (t.who, t.age, t.missed, t.over, t.expected, t.state, t.arrived)
        chosen = (t.wanted[staged], t.place[staged])
        return [[relative(a) for a in t.src.flatten().tolist()]] + [
            p.tolist() for p in plain + chosen
        ]

    def check(self):
        """What lies in a slot is what the tables say, and nobody is in two."""
        t = self.tables
        for layer, row in enumerate(t.src.tolist()):
            for expert, address in enumerate(row):
                assert self.content(address & ~1) == layer * len(row) + expert
                places = [i for i, w in enumerate(t.who[layer].tolist()) if w == expert]
                if address & ~1 != int(t.host[layer, expert]):
                    assert [int(t.slots[layer, i]) for i in places] == [address]
                else:
                    assert len(places) == address & 1


MODULES = {"reference": residency, "triton": residency_triton}


@pytest.mark.parametrize("how", BOTH)
def test_a_missing_expert_takes_the_oldest_slot_outside_the_union(how, device):
    world = World(how, device)
    assert [line[0] for line in world.run_pass([[[0, 1], [2, 1], [0, 2]]] * 3)[0]] == [0, 1, 2]
    assert world.tables.missed.tolist() == [[1, 1, 1, 0, 0, 0, 0, 0]] * 3
    world.accept(3, 10)  # 0 and 2 last used at 12, 1 at 11
    assert world.tables.age[0].tolist() == [12, 11, 12, -1, -1, -1, -1, -1]
    lines = world.run_pass([[[3, 0], [3, 0], [3, 0]]] * 3)
    assert world.tables.who.tolist()[:2] == [[0, 3, 2]] * 2  # 1 was the oldest
    assert [bool(write) for _, _, write in lines[0]] == [False, True]
    world.check()


@pytest.mark.parametrize("how", BOTH)
def test_a_union_larger_than_the_share_is_used_without_being_kept(how, device):
    world = World(how, device)
    world.run_pass([[[0, 1], [2, 0], [0, 1]]] * 3)
    world.accept(3, 0)
    lines = world.run_pass([[[0, 1], [2, 3], [4, 5]]] * 3)
    assert [line[0] for line in lines[0]] == [0, 1, 2, 3, 4, 5]
    assert all(write == 0 for *_, write in lines[0])  # all three slots are of the union
    world.check()


@pytest.mark.parametrize("how", BOTH)
def test_rejected_rows_do_not_refresh(how, device):
    world = World(how, device)
    world.run_pass([[[0, 1], [2, 3], [4, 5]]] * 3)
    world.accept(1, 5)
    assert world.tables.age[1].tolist() == [5, 5, -1, -1, -1, -1, -1, -1]


@pytest.mark.parametrize("how", BOTH)
def test_predicted_experts_take_the_oldest_slots_and_are_there_when_they_are_needed(how, device):
    world = World(how, device)
    t = world.tables
    world.run_pass([[[0, 1], [2, 0], [0, 1]]] * 3)
    world.accept(3, 0)  # 2 is the oldest
    t.over.zero_()
    world.predict([[0, 5], [6, 7], [3, 4]], number=1, cutoff=2)
    assert t.who.tolist()[:2] == [[0, 1, 5], [7, 1, 6]]  # 5 for 2; 6 for 2, 7 for 0
    assert t.state[1].tolist() == [[0, 1], [1, 1], [0, 0]]
    world.predict([[5, 1], [2, 3], [3, 4]], number=0, cutoff=2)  # in flight; nobody else may go
    assert t.state[0].tolist() == [[0, 0], [1, 0], [0, 0]]
    world.fetch(t, STRIDE, 1, 2)
    world.fetch(t, STRIDE, 0, 2)
    assert t.state[1].tolist() == [[0, 2], [2, 2], [0, 0]]
    world.check()
    lines = world.run_pass([[[5, 0]] * 3, [[6, 7]] * 3, [[0, 1]] * 3])
    assert int(t.missed[:2].sum()) == 0 and all(w == 0 for line in lines[:2] for *_, w in line)
    world.accept(3, 3)
    assert int(t.expected.sum()) == 0
    world.check()


@pytest.mark.parametrize("how", BOTH)
def test_what_is_late_is_given_up(how, device):
    world = World(how, device)
    t = world.tables
    t.over.zero_()
    world.predict([[1, 2], [3, 4], [5, 6]], cutoff=2)
    world.predict([[5, 6], [3, 5], [5, 6]], number=1, cutoff=2)
    world.fetch(t, STRIDE, 0, 2)
    t.over.fill_(1)
    world.fetch(t, STRIDE, 1, 2)
    assert t.state[0].tolist() == [[2, 2], [2, 2], [0, 0]]
    assert t.state[1].tolist() == [[3, 0], [0, 3], [0, 0]]  # one more slot each
    assert sorted(t.who[0].tolist()) == [-1, 1, 2]
    world.check()
    lines = world.run_pass([[[1, 5]] * 3] * 3)
    assert t.missed[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0] and lines[0][1][2]  # kept after all
    world.check()
    world.predict([[7, 2]] * 3, cutoff=0)
    assert int(t.state[0].sum()) == 0


@triton.jit
def _flip_kernel(over_ptr, times):
    for i in range(times):
        tl.atomic_xchg(over_ptr, i % 2, sem="relaxed")  # of stores the last one alone would be left


@pytest.mark.gpu
def test_an_expert_is_there_whole_or_not_at_all_whenever_drafting_ends(device):
    """Every warp of `fetch` must see the same end: one that does not copy while others do leaves its share as it was.

    Drafting ends, and begins again, faster than a program's warps look one after the other.
    """
    count = 16
    world = World("triton", device, layers=2, experts=count, quota=count + 1, guesses=count)
    t, copies = world.tables, torch.cuda.Stream()
    slots = world.room.view(2, count + 1, STRIDE)[:, :count]
    number = torch.arange(2 * count, dtype=torch.uint8, device=device).view(2, count, 1)
    t.wanted[0] = t.place[0] = torch.arange(count, device=device)
    ends, torn = torch.zeros(4, dtype=torch.int64, device=device), 0
    for _ in range(300):
        world.room.fill_(255)
        t.state[0].fill_(residency.STAGED)
        copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(copies):
            world.fetch(t, STRIDE, 0, 2)
        _flip_kernel[(1,)](t.over, 50000, num_warps=1)
        torch.cuda.current_stream().wait_stream(copies)
        torn = torn + ((slots != number).any(2) & (t.state[0] == residency.FILLED)).sum()
        ends += t.state[0].flatten().bincount(minlength=4)
    ends = ends.tolist()
    assert ends[residency.FILLED] and ends[residency.LATE]
    assert int(torn) == 0, f"{int(torn)} of {ends[residency.FILLED]} experts are not whole"


@pytest.mark.parametrize("how", BOTH)
def test_no_more_is_staged_than_may_wait(how, device):
    world = World(how, device)
    t = world.tables
    t.over.zero_()
    t.state.fill_(residency.STAGED)  # of the step before
    world.predict([[1, 2], [3, 4], [5, 6]], queued=(3, 4))
    assert t.state[0].tolist() == [[1, 1], [1, 0], [0, 0]]  # three, the first layers' first
    assert t.expected.nonzero().tolist() == [[0, 1], [0, 2], [1, 3], [1, 4], [2, 5], [2, 6]]
    world.predict([[1, 3], [5, 4], [5, 6]], number=1, queued=(3, 4))
    assert t.state[1].tolist() == [[0, 1], [0, 0], [0, 0]]  # one more: three have not come
    world.fetch(t, STRIDE, 0, 3)
    world.predict([[1, 3], [5, 4], [5, 6]], number=1, queued=(3, 2))
    assert t.state[1].tolist() == [[0, 0], [1, 1], [0, 0]]  # they have; 3 is staged already
    world.predict([[7, 0], [7, 6], [0, 1]], number=1, queued=(3, 0))
    assert int(t.state[1].sum()) == 0


@pytest.mark.parametrize(
    ("layers", "experts", "quota", "guesses", "k", "tokens"),
    [(3, 8, 3, 2, 2, 3), (2, 20, 7, 3, 3, 5), (2, 8, 8, 1, 2, 1), (1, 33, 5, 4, 4, 9)],
)
def test_kernel_and_reference_stay_the_same(layers, experts, quota, guesses, k, tokens, device):
    draw = random.Random(layers * experts)
    worlds = [World(how, device, layers, experts, quota, guesses, k, tokens) for how in BOTH]
    position = 0
    for _ in range(25 if device == "cuda" else 5):
        hot = draw.sample(range(experts), min(experts, k + 2))
        rows = [[draw.sample(hot, k) for _ in range(tokens)] for _ in range(layers)]
        drafts = [[draw.sample(hot, guesses) for _ in rows] for _ in (0, 1)]
        accepted, late = draw.randint(1, tokens), draw.random() < 0.3
        cutoff = draw.randint(0, layers)
        queued = [draw.randint(0, layers * guesses + 1) for _ in (0, 1)]
        for world in worlds:
            t = world.tables
            t.over.zero_()
            for number, predicted in enumerate(drafts):
                world.predict(predicted, number, cutoff, queued)
                t.over.fill_(late and number)
                world.fetch(t, STRIDE, number, cutoff)
            world.run_pass(rows)
            world.accept(accepted, position)
            world.check()
        assert worlds[0].state() == worlds[1].state()
        position += accepted


def test_no_slot_is_empty_only_where_there_is_none(device):
    who = World("reference", device).tables.who
    assert who.tolist() == [[EMPTY] * 3, [EMPTY] * 3, [EMPTY, EMPTY, residency.NO_SLOT]]
