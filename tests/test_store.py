"""The meeting of two threads: a store with a fake stream, slowed copies, failures and poisoned slots."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spmoe_lite.errors import Cancelled
from spmoe_lite.prefetch import count_recall
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore, _last_uses
from tests.interrupt import Interrupt

STRIDE = 64


class FakePack:
    """Every byte of expert e in layer l is 16 l + e; reads can be slow or fail."""

    class expert_layout:  # noqa: N801
        stride = STRIDE

    def __init__(self):
        self.delay = 0.0
        self.failing = set()
        self.reads = []

    def read_expert(self, layer, expert, out, offset=0):
        time.sleep(self.delay)
        if (layer, expert) in self.failing:
            raise OSError(f"layer {layer} expert {expert}")
        self.reads.append((layer, expert))
        out[:] = 16 * layer + expert


class FakeStreamSlab:
    """A slab whose copies and readers are ordered by hand, as two GPU streams would be.

    A copy lands only when the compute side waits for it; a copy into a slot whose last reader has not
    been ordered before it is a race, and so is a read of a slot whose copy was not waited for.
    """

    def __init__(self, num_slots):
        self.bytes = np.full((num_slots, STRIDE), 255, np.uint8)  # poison
        self.in_flight = {}
        self.unread = set()  # slots lent to a kernel that has not been marked as read

    def address(self, slot):
        return slot * STRIDE

    def fill(self, slot, read, go_on=None):
        assert slot not in self.unread, "overwritten while a kernel still reads it"
        out = np.empty(STRIDE, np.uint8)
        self.bytes[slot] = 255
        read(out, 0)
        self.in_flight[slot] = out

    def fill_from(self, slot, source, go_on=None):
        self.fill(slot, lambda out, offset: out.fill(source), go_on)

    def fill_pieces(self, slot, pieces):
        ((offset, source, size),) = pieces
        assert (offset, size) == (0, STRIDE)
        self.fill_from(slot, source)

    def arrived(self, slot):
        return slot not in self.in_flight

    def wait_filled(self, slots):
        for slot in slots:
            if slot in self.in_flight:
                self.bytes[slot] = self.in_flight.pop(slot)
            self.unread.add(slot)

    def mark_read(self, slots):
        self.unread.difference_update(slots)


def make(num_slots, layers=3, experts=8, k=2, policy="layer-lru"):
    pack, slab = FakePack(), FakeStreamSlab(num_slots)
    table = SlotTable(num_slots, layers, experts, k, policy)
    return ExpertStore(pack, slab, table, Counters(), torch.device("cpu")), pack, slab


def run_pass(store, slab, ids, layer_delay=0.0):
    """One pass: each layer's experts are served, and what the kernel would read is what was asked for."""
    store.begin_pass(len(ids[0]))
    for layer, rows in enumerate(ids):
        seen = []
        for use in store.serve(layer, torch.tensor(rows, dtype=torch.int32)):
            for expert, address, write in use.tolist():
                assert write == 0
                assert (slab.bytes[address // STRIDE] == 16 * layer + expert).all()
                seen.append(expert)
            time.sleep(layer_delay)
        assert sorted(seen) == sorted({e for row in rows for e in row})


def random_ids(rng, layers=3, experts=8, k=2, rows=3):
    return [[rng.permutation(experts)[:k].tolist() for _ in range(rows)] for _ in range(layers)]


@pytest.mark.parametrize("num_slots", [2, 3, 5, 6, 9, 24])
@pytest.mark.parametrize("policy", ["layer-lru", "global-lru"])
def test_kind_h_o22_slots_are_never_reused_under_a_reader(num_slots, policy):
    """A prefetch worker at full speed beside a slow reader, slots at the minimum and above."""
    store, pack, slab = make(num_slots, policy=policy)
    rng, stop = np.random.default_rng(num_slots), threading.Event()
    errors = []

    def worker():
        guess = np.random.default_rng(1)
        while not stop.is_set():
            try:
                layer, expert = int(guess.integers(3)), int(guess.integers(8))
                store.expect(layer, [expert])
                store.prefetch(layer, expert)
                time.sleep(0.0002)  # let the other thread have the interpreter
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        for step in range(20):
            pack.delay = 0.0005 if step % 2 else 0.0
            run_pass(store, slab, random_ids(rng), layer_delay=0.0003)
            store.end_pass(2)
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert store.counters.prefetches > 0
    assert store.counters.loads > 0 or num_slots == 24


class Gap:
    """A lock; right after somebody has let go of it for the `number`-th time, the other thread runs."""

    def __init__(self, lock, number, other):
        self.lock, self.left, self.other = lock, number, other

    def __enter__(self):
        return self.lock.__enter__()

    def __exit__(self, *error):
        self.lock.__exit__(*error)
        self.left -= 1
        if self.left == 0:
            self.other()


@pytest.mark.parametrize("num_slots, policy", [(2, "layer-lru"), (6, "global-lru")])
def test_a_prefetch_in_any_gap_of_a_pass_takes_nothing_that_it_needs(num_slots, policy):
    ids, gap, number = [[[0, 1], [5, 2]], [[4, 3]], [[0, 1]]], None, 0
    while gap is None or gap.left <= 0:
        store, _, slab = make(num_slots, policy=policy)
        run_pass(store, slab, [[[6, 7]], [[6, 7]], [[6, 7]]])
        store.end_pass(1)
        number += 1
        store._lock = gap = Gap(store._lock, number, lambda s=store: s.prefetch(2, 5))
        run_pass(store, slab, ids)
    assert number > 20


@pytest.mark.parametrize("failing", [False, True])
def test_whatever_a_pass_does_in_a_gap_of_a_prefetch_its_end_is_that_of_its_slot(failing):
    """Counters agree at every moment, and no slot waits for a worker that has ended."""
    key, gap, number = (1, 4), None, 0
    while gap is None or gap.left <= 0:
        store, pack, slab = make(6)
        pack.failing.update([key] * failing)

        def decode(store=store):
            c, table = store.counters, store.table
            assert c.bytes_moved == c.prefetches * STRIDE
            if table.slot(key) is None:
                table.place(key)  # by a pass that Ctrl-C ends
                store._in_pass = True
                store.begin_pass(1)
                assert not table.is_filling(key)

        number += 1
        store._lock = gap = Gap(store._lock, number, decode)
        try:
            store.prefetch(*key)
        except OSError:
            assert failing
        assert store._copying is None


class FakeHost:
    """An expert's address is the byte it is made of."""

    def address(self, layer, expert):
        return 16 * layer + expert


def end_without_lists(store, rows, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            ExpertStore, "trace", property(lambda store: pytest.fail("a list for each row"))
        )
        count_recall(store, [], rows)
        store.end_pass(rows)


@pytest.mark.parametrize("num_slots", [3, 6, 9, 24])
def test_a_sweep_serves_every_expert_once_and_takes_no_slot_from_decoding(num_slots, monkeypatch):
    """Through landing slots, across layers, with passes of decoding between; rows are read later."""
    rng, rows = np.random.default_rng(num_slots), 64  # x 2 choices: 16 for each expert
    store, pack, slab = make(num_slots)
    run_pass(store, slab, random_ids(rng))
    store.end_pass(1)
    slab = FakeStreamSlab(num_slots + 2)
    table = SlotTable(num_slots, 3, 8, 2, "layer-lru")
    pack.config = SimpleNamespace(num_hidden_layers=3, num_local_experts=8)
    store = ExpertStore(
        pack, slab, table, Counters(), torch.device("cpu"), FakeHost(), 2 if num_slots < 24 else 0
    )
    store._can_sweep = True  # on the CPU there is none: nobody waits there for the ids
    for turn in range(3):
        run_pass(store, slab, random_ids(rng))
        store.end_pass(2)
        held, loads = table.residents(), store.counters.loads
        ids = random_ids(rng, rows=rows)
        store.begin_pass(rows)
        for layer, chosen in enumerate(ids):
            seen = []
            for use in store.serve(layer, torch.tensor(chosen, dtype=torch.int32)):
                for expert, address, write in use.tolist():
                    assert write == 0
                    assert (slab.bytes[address // STRIDE] == 16 * layer + expert).all()
                    seen.append(expert)
            assert sorted(seen) == list(range(8))
        if num_slots < 24 or turn:
            assert table.residents() == held and store.counters.loads - loads == 24 - len(held)
        end_without_lists(store, rows, monkeypatch)
        assert [store.trace[layer] for layer in range(3)] == ids
        assert not slab.unread - set(range(num_slots)) and not table._held
        assert all(table.last_used[layer, e] >= 0 for layer in range(3) for e in range(8))


@pytest.mark.parametrize("accepted", [0, 1, 9])
def test_last_uses_are_those_of_the_accepted_rows_wherever_the_ids_lie(accepted):
    rows = np.random.default_rng(accepted).integers(0, 8, (9, 2)).tolist()
    last = {}
    for row, ids in enumerate(rows[:accepted]):
        last.update(dict.fromkeys(ids, row))
    for ids in (rows, torch.tensor(rows, dtype=torch.int32)):
        assert dict(_last_uses(ids, accepted)) == last


def test_a_prompt_whose_layers_the_host_serves_makes_no_list_for_each_row_either(monkeypatch):
    store, pack, slab = make(12)
    run_pass(store, slab, random_ids(np.random.default_rng(0), rows=40))
    end_without_lists(store, 40, monkeypatch)


def test_resident_experts_are_served_first_and_each_is_copied_once():
    store, pack, slab = make(12)
    run_pass(store, slab, [[[0, 1]], [[0, 1]], [[0, 1]]])
    store.begin_pass(3)
    groups = [
        [row[0] for row in use.tolist()]
        for use in store.serve(0, torch.tensor([[0, 5], [1, 6], [5, 0]]))
    ]
    assert groups[0] == [0, 1]
    assert sorted(sum(groups[1:], [])) == [5, 6]
    assert pack.reads.count((0, 5)) == pack.reads.count((0, 6)) == 1


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_an_expert_on_its_way_is_waited_for_not_copied_again():
    store, pack, slab = make(9)
    pack.delay = 0.2
    thread = threading.Thread(target=store.prefetch, args=(1, 4))
    thread.start()
    wait_for(lambda: store.table.slot((1, 4)) is not None)
    run_pass(store, slab, [[[0, 1]], [[4, 0]], [[0, 1]]])
    thread.join()
    assert pack.reads.count((1, 4)) == 1
    assert store.counters.prefetch_late + store.counters.prefetch_useful == 1


def test_a_prefetch_that_fails_is_made_good_by_demand():
    store, pack, slab = make(9)
    pack.failing.add((1, 4))
    pack.delay = 0.2
    error = []

    def prefetch():
        try:
            store.prefetch(1, 4)
        except OSError as e:
            error.append(e)
            pack.failing.clear()

    thread = threading.Thread(target=prefetch)
    thread.start()
    wait_for(lambda: store.table.slot((1, 4)) is not None)
    store.begin_pass(1)
    served = store.serve(1, torch.tensor([[4, 0]]))
    experts = [row[0] for use in served for row in use.tolist()]
    thread.join()
    assert error
    assert sorted(experts) == [0, 4]


def test_the_slot_of_a_prefetch_that_fails_may_have_gone_to_a_demand():
    store, pack, slab = make(2)  # one pool
    begun, failed, read = threading.Event(), threading.Event(), pack.read_expert

    def reading(layer, expert, out, offset=0):
        if expert == 4 and not failed.is_set():
            begun.set()
            assert demanded.wait(20)
            raise OSError
        if expert == 0:
            demanded.set()
            assert failed.wait(20)
        read(layer, expert, out, offset)

    def prefetch():
        with pytest.raises(OSError):
            store.prefetch(1, 4)
        failed.set()

    demanded, pack.read_expert = threading.Event(), reading
    thread = threading.Thread(target=prefetch)
    thread.start()
    assert begun.wait(20)
    run_pass(store, slab, [[[]], [[4, 0], [5, 0]]])
    thread.join()


def test_a_failed_copy_leaves_no_slot_behind():
    store, pack, slab = make(3)
    pack.failing.add((0, 5))
    store.begin_pass(1)
    with pytest.raises(OSError, match="expert 5"):
        list(store.serve(0, torch.tensor([[0, 5]])))
    pack.failing.clear()
    for _ in range(3):
        run_pass(store, slab, [[[0, 5]], [[1, 2]], [[3, 4]]])
    assert len(store.table.residents()) == 3


def test_an_aborted_pass_holds_nothing():
    store, pack, slab = make(2, k=2)
    store.begin_pass(1)
    served = store.serve(0, torch.tensor([[0, 1]]))
    next(served)
    slab.unread.clear()  # the kernel of the aborted pass has ended
    run_pass(store, slab, [[[2, 3]], [[4, 5]], [[6, 7]]])


def test_cancel_takes_effect_between_two_copies():
    store, pack, slab = make(9)
    store.cancel, read = threading.Event(), pack.read_expert

    def reading(layer, expert, out, offset=0):
        read(layer, expert, out, offset)
        if len(pack.reads) == 2:
            store.cancel.set()

    pack.read_expert = reading
    store.begin_pass(4)
    with pytest.raises(Cancelled):
        for _ in store.serve(0, torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])):
            pass
    assert len(pack.reads) == 2


def test_cancel_takes_effect_while_a_prefetch_is_waited_for():
    store, pack, slab = make(9)
    store.cancel, go_on, begun, read = (
        threading.Event(), threading.Event(), threading.Event(), pack.read_expert
    )  # fmt: skip

    def held_up(*args):
        begun.set()
        assert go_on.wait(20)
        read(*args)

    pack.read_expert = held_up
    thread = threading.Thread(target=store.prefetch, args=(1, 4))
    thread.start()
    assert begun.wait(20)
    threading.Timer(0.1, store.cancel.set).start()
    store.begin_pass(1)
    with pytest.raises(Cancelled):
        list(store.serve(1, torch.tensor([[4, 4]])))
    assert store.table.is_filling((1, 4))
    go_on.set()
    store.cancel = None
    run_pass(store, slab, [[[0, 1]], [[4, 5]], [[0, 1]]])
    thread.join()
    assert pack.reads.count((1, 4)) == 1


def test_what_two_threads_count_is_counted_under_the_lock():
    class Watched(Counters):
        def __setattr__(self, name, value):
            ours = name.startswith("prefetch") or name in ("loads", "bytes_moved")
            assert not ours or not value or store._lock._is_owned(), name
            super().__setattr__(name, value)

    pack, table = FakePack(), SlotTable(6, 3, 8, 2, "layer-lru")
    pack.config = SimpleNamespace(num_hidden_layers=3, num_local_experts=8)
    store = ExpertStore(
        pack, FakeStreamSlab(8), table, Watched(), torch.device("cpu"), FakeHost(), 2
    )
    store._can_sweep = True
    store.prefetch(1, 4)
    run_pass(store, store._slab, random_ids(np.random.default_rng(0)))
    store.end_pass(2)
    run_pass(store, store._slab, random_ids(np.random.default_rng(1), rows=64))
    assert store.counters.loads > 18


def test_kind_i_o24_a_prefetch_never_evicts_what_the_layer_or_the_step_needs():
    store, pack, slab = make(6)  # two slots a layer
    run_pass(store, slab, [[[0, 1]], [[0, 1]], [[0, 1]]])
    store.end_pass(1)
    store.expect(1, [0, 1])
    store.prefetch(1, 5)
    assert store.table.slot((1, 5)) is None
    assert store.counters.prefetch_dropped == 1
    store.begin_pass(1)
    served = store.serve(2, torch.tensor([[0, 1]]))
    next(served)
    store.prefetch(2, 6)  # the layer at hand: late, and its slots are in use
    assert store.table.slot((2, 6)) is None


def test_a_useless_prefetch_is_counted_when_it_leaves():
    store, pack, slab = make(6)
    store.prefetch(0, 7)
    assert store.counters.prefetches == 1
    run_pass(store, slab, [[[0, 1]], [[0, 1]], [[0, 1]]])
    assert store.counters.prefetch_wasted == 1
    assert store.counters.bytes_moved == 7 * STRIDE


@pytest.mark.parametrize("num_slots", [2, 6])
def test_kind_l_o36_ctrl_c_at_any_moment_of_a_pass_loses_no_slot_and_no_byte(num_slots):
    """Also while the worker is copying: its slot is the one that stays in hand."""
    ids = [[[0, 1], [5, 2]], [[4, 3]], [[0, 1]]]
    files = ("spmoe_lite/store.py", "spmoe_lite/slots.py")

    def interrupted(moment):
        store, pack, slab = make(num_slots)
        run_pass(store, slab, [[[6, 7]], [[6, 7]], [[6, 7]]])
        store.end_pass(1)
        with store._lock:
            store._in_pass = True
            store._copying = (2, 5)  # as if the worker had just begun
            store.table.place((2, 5))
        with Interrupt(moment, files) as interrupt:
            run_pass(store, slab, ids[:2])
        slab.unread.clear()
        if interrupt.struck:
            store.begin_pass(1)
            assert store.table.is_filling((2, 5)), interrupt.where
        store._fill((2, 5), store.table.slot((2, 5)))
        store._copying = None
        run_pass(store, slab, ids)  # every byte is what was asked for
        table = store.table
        free = [slot for share in table._free for slot in share]
        assert sorted([*table._slot_of.values(), *free]) == list(range(num_slots)), interrupt.where
        return interrupt

    moments = interrupted(0).seen
    assert moments > 100
    for moment in range(1, moments + 1, 3):
        assert interrupted(moment).struck
