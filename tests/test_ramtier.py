"""The RAM tier: its rule, its bytes under late copies and failing reads, refusals, Ctrl-C, and the same text.

`LazyGpu` stands in for a device whose streams run as late as they may, so that a copy which nobody waits
for, or memory that is written too early, shows in the bytes.
"""

import ctypes
import gc
import os
import random
import shutil
import signal
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spmoe_lite import diskreads, ramtier, slab
from spmoe_lite.config import SamplingParams
from spmoe_lite.converters import convert
from spmoe_lite.cudart import Refused
from spmoe_lite.engine import Engine
from spmoe_lite.errors import Cancelled, DamagedError, SpmoeError
from spmoe_lite.loading import Loader
from spmoe_lite.pack import Pack
from spmoe_lite.ramtier import Places, RamTier
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import Counters, RunStats
from spmoe_lite.store import ExpertStore
from tests import tiny
from tests.interrupt import Interrupt
from tests.make_pack import WIDE, Weights
from tests.test_hostmap import Driver
from tests.test_store import Gap

CPU = torch.device("cpu")
LAYERS, EXPERTS = 3, 8
KEYS = [(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
MINE = ("/spmoe_lite/ramtier.py", "/spmoe_lite/diskreads.py")


# --- the rule ----------------------------------------------------------------------------------


def test_doubles_go_first_then_the_one_used_longest_ago():
    used = {(0, 0): 5, (0, 1): 3, (0, 2): 9, (0, 3): 7}
    places = Places(3, used)
    for expert in range(3):
        places.take((0, expert), None)
        places.filled((0, expert))
        places.release((0, expert))
        places.got_slot((0, expert))
    places.lost_slot((0, 0))
    places.lost_slot((0, 2))
    assert places.take((0, 3), None) is not None  # in place of 1, which has a slot
    assert places.place((0, 1)) is None
    used[(0, 0)] = 11  # used again where it was looked up last
    places.take((0, 4), None)
    assert places.place((0, 2)) is None and places.place((0, 0)) is not None


def test_a_few_doubles_are_spared_so_that_copies_both_ways_overlap():
    places = Places(96, {(0, expert): expert for expert in range(100)})
    for expert in range(96):
        places.take((0, expert), None)
        places.filled((0, expert))
        places.release((0, expert))
        places.got_slot((0, expert)) if expert > 92 else places.lost_slot((0, expert))
    places.take((0, 96), None)
    assert places.place((0, 0)) is None and len(places._doubles) == ramtier.SPARE == 3
    places.got_slot((0, 1))
    places.take((0, 97), None)
    assert places.place((0, 93)) is None  # the one that has been a double for longest
    places.held = {(0, expert): None for expert in range(93)}
    places.take((0, 98), None)
    assert places.place((0, 94)) is None  # rather than nothing


def test_what_is_held_stays_and_what_is_older_is_not_kept():
    used = {(0, 0): 5, (0, 1): 6}
    places = Places(2, used)
    for expert in range(2):
        places.take((0, expert), (0, expert))
        places.filled((0, expert))
        places.lost_slot((0, expert))
    assert places.take((0, 2), None) is None  # both are held
    places.release((0, 0))
    assert places.take((0, 3), None, only_for_younger=True) is None  # never used
    used[(0, 4)] = 6
    assert places.take((0, 4), None, only_for_younger=True) is not None
    assert places.place((0, 0)) is None and places.is_filled((0, 1))
    assert not places.is_filled((0, 4))


def test_places_are_neither_lost_nor_doubled():
    rng, used = random.Random(0), {}
    places = Places(5, used)
    for turn in range(4000):
        key = rng.choice(KEYS)
        used[key] = turn // 7
        if places.place(key) is None:
            if places.take(key, None, only_for_younger=rng.random() < 0.5) is None:
                assert places.held
                places.settle(None)
                continue
            places.filled(key)
            places.got_slot(key)
        elif key in places._doubles:
            places.lost_slot(key)
        else:
            places.got_slot(key)
        if rng.random() < 0.8:
            places.release(key)
        taken = list(places._place_of.values())
        assert sorted(taken + places._free) == list(range(5))
        assert len(places._ages) <= 4 * 5 + 64


# --- a device that is as late as it may be -------------------------------------------------------


class LazyGpu:
    """Streams that run when somebody waits for them, or when `random` says so."""

    def __init__(self, monkeypatch, eagerness=0.0, seed=0):
        self.lock, self.rng, self.eagerness = threading.RLock(), random.Random(seed), eagerness
        self.streams = []
        gpu = self

        class Mark:
            """One record of an event, which others may follow."""

            def __init__(self, stream):
                self.stream, self.done = stream, False

            def synchronize(self):
                with gpu.lock:
                    while not self.done:
                        self.stream.run_one()

        class Event:
            mark = None

            def record(self, stream=None):
                with gpu.lock:
                    stream = gpu.compute if stream is None else stream
                    self.mark = Mark(stream)
                    stream.add(self.mark)

            def query(self):
                with gpu.lock:
                    return self.mark is None or self.mark.done

            def synchronize(self):
                if self.mark is not None:
                    self.mark.synchronize()

        class Stream:
            def __init__(self, device=None, priority=0):
                self.work = deque()
                gpu.streams.append(self)

            def add(self, work):
                with gpu.lock:
                    self.work.append(work)
                    while self.work and gpu.rng.random() < gpu.eagerness:
                        self.run_one()

            def wait_event(self, event):
                if event.mark is not None:
                    self.add(event.mark.synchronize)

            def run_one(self):
                work = self.work[0]  # what it waits for may run first
                if isinstance(work, Mark):
                    work.done = True
                else:
                    work()
                self.work.popleft()

            def synchronize(self):
                with gpu.lock:
                    while self.work:
                        self.run_one()

        def copy(address, source, size, stream):
            stream.add(lambda: ctypes.memmove(address, source, size))

        copy_now, entered = torch.Tensor.copy_, threading.local()

        def copy_later(self, source, non_blocking=False):
            if not non_blocking:
                return copy_now(self, source)
            entered.stream.add(lambda: copy_now(self, source))
            return self

        @contextmanager
        def entering(stream):  # which the ring does for its copies
            entered.stream = stream
            yield

        self.compute = Stream()
        self.computes = [self.compute, Stream(), Stream()]
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "stream", entering)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute)
        monkeypatch.setattr(torch.Tensor, "copy_", copy_later)
        monkeypatch.setattr(slab, "copy_bytes", copy)

    def finish(self):
        for stream in self.streams:
            stream.synchronize()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    config = replace(WIDE, num_hidden_layers=LAYERS, num_local_experts=EXPERTS)
    return Weights(config).write(tmp_path_factory.mktemp("ramtier") / "some.spmoe")


@pytest.fixture
def pack(path):
    with Pack.open(path) as pack:
        yield pack


@pytest.fixture
def parts(monkeypatch):
    """Experts of 64 or 128 KiB in parts of a tenth or so, copies that can wait in halves."""
    monkeypatch.setattr(diskreads, "LEAST_PART", 8192)
    monkeypatch.setattr(ramtier, "COPY_BYTES", 40_000)
    monkeypatch.setattr(slab, "PIECE", 40_000)


def stored(pack):
    out = np.empty((len(KEYS), pack.expert_layout.stride), dtype=np.uint8)
    for row, key in zip(out, KEYS, strict=True):
        pack.read_expert(*key, row)
    return dict(zip(KEYS, out, strict=True))


def make_store(pack, slots, places, *, lazy=False, policy="layer-lru", bypass=True, driver=None):
    stride, counters = pack.expert_layout.stride, Counters()
    kind = slab.DeviceSlab if lazy else slab.HostSlab
    made = kind(slots, stride, CPU)
    table = SlotTable(slots, LAYERS, EXPERTS, 2, policy)
    store = ExpertStore(pack, made, table, counters, CPU)
    budget = places * stride
    store.tier = RamTier(
        pack, made, budget, table.last_used, counters, CPU, bypass=bypass, driver=driver
    )
    return store


class Run:
    """Passes of a store, whose kernels look at the bytes when they run."""

    def __init__(self, pack, store, gpu=None):
        self.store, self.wanted, self.gpu = store, stored(pack), gpu
        self.stride, self.wrong = pack.expert_layout.stride, []

    def one(self, ids, accepted=2, delay=0.0):
        self.store.begin_pass(len(ids[0]))
        for layer, rows in enumerate(ids):
            for use in self.store.serve(layer, torch.tensor(rows, dtype=torch.int32)):
                for expert, address, _ in use.tolist():
                    self.read(layer, expert, address)
                time.sleep(delay)
        self.store.end_pass(accepted)

    def read(self, layer, expert, address):
        def kernel():
            seen = np.frombuffer(ctypes.string_at(address, self.stride), dtype=np.uint8)
            if not (seen == self.wanted[layer, expert]).all():
                self.wrong.append((layer, expert))

        if self.gpu is None:
            kernel()
        else:
            self.gpu.compute.add(kernel)

    def check_places(self):
        """Whatever a place is said to hold it holds, once the device is done."""
        if self.gpu is not None:
            self.gpu.finish()
        tier = self.store.tier
        for key, place in tier._places._place_of.items():
            if tier._places.is_filled(key):
                assert (tier._rows[place] == self.wanted[key]).all(), key
        assert self.wrong == []
        free = tier._places._free
        places = [*tier._places._place_of.values(), *free]
        assert sorted(places) == list(range(tier.num_places))


def random_ids(rng, rows=3, k=2):
    return [[rng.sample(range(EXPERTS), k) for _ in range(rows)] for _ in range(LAYERS)]


@pytest.mark.parametrize("places", [1, 2, 3, 7, 16, 24])
@pytest.mark.parametrize("slots, policy", [(2, "layer-lru"), (6, "layer-lru"), (9, "global-lru")])
def test_t0_every_kernel_reads_the_expert_it_asked_for(pack, parts, places, slots, policy):
    store = make_store(pack, slots, places, policy=policy)
    run, rng = Run(pack, store), random.Random(places)
    for turn in range(12):
        run.one(random_ids(rng, rows=3 if turn % 5 else 40))
        run.check_places()
    c = store.counters
    assert c.ram_misses * run.stride <= c.disk_bytes
    assert c.ram_hits + c.ram_misses <= c.loads
    if places >= 3:
        assert c.ram_hits + c.ram_misses == c.loads  # nothing went by the ring
    if places + slots >= len(KEYS) + 1:
        assert c.ram_misses == len(
            set().union(store.table.residents(), store.tier._places._place_of)
        )
    store.tier.close()


@contextmanager
def prefetching(store, seed):
    """A worker that copies any expert ahead, all the time; what it raised is in the list it gives."""
    guess, stop, errors = random.Random(seed), threading.Event(), []

    def worker():
        try:
            while not stop.is_set():
                key = guess.choice(KEYS)
                store.expect(key[0], [key[1]])
                store.prefetch(*key)
                time.sleep(0.0002)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=worker)
    thread.start()
    try:
        yield errors
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("slots, places", [(2, 1), (2, 2), (6, 3), (6, 9), (12, 13)])
def test_kind_h_o22_no_copy_is_overtaken(pack, parts, monkeypatch, eagerness, slots, places):
    """A prefetch worker beside the passes, streams as late as they may be, slots and places at their least."""
    gpu = LazyGpu(monkeypatch, eagerness, seed=slots)
    store = make_store(pack, slots, places, lazy=True)
    run, rng = Run(pack, store, gpu), random.Random(places)
    with prefetching(store, seed=1) as errors:
        for turn in range(12):
            run.one(random_ids(rng), delay=0.0003)
            if turn % 4 == 3:
                gpu.finish()
    assert not errors
    run.check_places()
    assert store.counters.ram_returns > 0 or places == 1
    store.tier.close()


def test_an_expert_wanted_while_it_is_saved_is_copied_after_that(pack, monkeypatch):
    """One thread evicts it for another expert, the other asks for it again before its save is ordered."""
    gpu = LazyGpu(monkeypatch)
    store = make_store(pack, 2, 4, lazy=True)
    tier, run = store.tier, Run(pack, store, gpu)
    wanted, evictor, saving, go = (0, 0), (0, 1), threading.Event(), threading.Event()
    assert tier.fill(wanted, 0, None, lambda: None, urgent=True)
    with tier._lock:
        tier._places.drop(wanted)  # as one that has a slot goes first
    save = store._slab.save

    def slowly(*args):
        saving.set()
        assert go.wait(20)
        return save(*args)

    monkeypatch.setattr(store._slab, "save", slowly)
    looks = []

    def late():
        looks.append(1)
        if len(looks) == 2:
            raise LookupError

    thread = threading.Thread(
        target=tier.fill, args=(evictor, 0, wanted, lambda: None), kwargs={"urgent": False}
    )
    thread.start()
    assert saving.wait(20)
    with pytest.raises(LookupError):  # given up while it waits: the save goes on
        tier.fill(wanted, 1, None, late, urgent=False)
    threading.Timer(0.2, go.set).start()
    assert tier.fill(wanted, 1, None, lambda: None, urgent=True)
    thread.join()
    run.check_places()
    for slot, key in enumerate((evictor, wanted)):
        run.read(*key, store._slab.address(slot))
    run.check_places()
    assert store.counters.ram_returns == 1 and tier._places.is_filled(wanted)
    assert tier._places.held == {} and tier._places._doubles.keys() == {wanted, evictor}
    store.tier.close()


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("wanted_first", [False, True])
def test_one_thread_saves_an_expert_in_any_gap_of_the_other_that_wants_it(
    pack, parts, monkeypatch, ahead, wanted_first
):
    for module in (ramtier, diskreads):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    wanted, evictor, gap, number = (0, 0), (0, 1), None, 0
    while gap is None or gap.left <= 0:
        gpu = LazyGpu(monkeypatch)
        store = make_store(pack, 2, 4, lazy=True)
        tier, run, looks = store.tier, Run(pack, store, gpu), []
        assert tier.fill(wanted, 0, None, lambda: None, urgent=True)
        tier._places.drop(wanted)  # as one that has a slot goes first

        def go_on(looks=looks):
            looks.append(1)
            if len(looks) == 20:  # the other one cannot go on meanwhile
                raise LookupError

        def want(tier=tier, go_on=go_on):
            if ahead:
                tier.read_ahead([wanted])
            with suppress(LookupError):
                tier.fill(wanted, 1, None, go_on, urgent=True)

        def save(tier=tier):
            tier.fill(evictor, 0, wanted, lambda: None, urgent=False)

        number += 1
        first, second = (want, save) if wanted_first else (save, want)
        lock = tier._lock
        tier._lock = gap = Gap(lock, number, second)
        first()
        tier._lock = lock
        if len(looks) >= 20:
            assert tier.fill(wanted, 1, None, lambda: None, urgent=True)
        run.check_places()
        if gap.left <= 0:
            for slot, key in enumerate((evictor, wanted)):
                run.read(*key, store._slab.address(slot))
        run.check_places()
        assert not tier._places.held and not tier._reading and not tier._reads._queue
        tier.close()
    assert number > 5


def test_where_vram_and_ram_hold_the_pack_nothing_is_read_twice(pack, monkeypatch):
    gpu = LazyGpu(monkeypatch)
    store = make_store(pack, 9, 17, lazy=True)
    run, rng = Run(pack, store, gpu), random.Random(3)
    for _ in range(20):
        run.one(random_ids(rng))
    run.check_places()
    seen = store.counters.copy()
    for _ in range(20):
        run.one(random_ids(rng))
    grown = store.counters.since(seen)
    assert grown.ram_hits > 30 and grown.ram_misses == grown.disk_bytes == 0
    store.tier.close()


# --- the disk ----------------------------------------------------------------------------------


def test_kind_i_o27_experts_are_read_in_large_pieces_by_several_threads(pack, parts, monkeypatch):
    read, seen, together = pack.read_expert, [], threading.Barrier(3)

    def noting(layer, expert, out, offset=0):
        seen.append((layer, expert, offset, len(out)))
        if len(seen) <= 3:
            together.wait(timeout=20)
        assert threading.current_thread().name.startswith("spmoe-disk")
        read(layer, expert, out, offset)

    store = make_store(pack, 6, 8, bypass=False)
    monkeypatch.setattr(pack, "read_expert", noting)
    store.begin_pass(1)
    list(store.serve(0, torch.tensor([[0, 5]])))
    stride = pack.expert_layout.stride
    size = max(8192, stride // 8)
    assert sorted(seen) == [(0, e, at, size) for e in (0, 5) for at in range(0, stride, size)]
    assert store.counters.disk_bytes == 2 * stride
    store.tier.close()


def test_nothing_half_read_is_ever_used(pack, parts, monkeypatch):
    """Every third read fails, at any part, in the worker and in the pass; what is served is right."""
    read, rng, guess = pack.read_expert, random.Random(5), random.Random(6)
    failing = threading.Event()

    def faulty(layer, expert, out, offset=0):
        if failing.is_set() and rng.random() < 0.05:
            out[: len(out) // 2] = 99
            raise OSError(5, "Input/output error")
        read(layer, expert, out, offset)

    store, failed = make_store(pack, 6, 4, bypass=False), 0
    run = Run(pack, store)
    monkeypatch.setattr(pack, "read_expert", faulty)
    failing.set()
    for _ in range(60):
        try:
            if guess.random() < 0.5:
                store.prefetch(*guess.choice(KEYS))
            run.one(random_ids(guess))
        except OSError:
            failed += 1
    failing.clear()
    assert failed > 5
    for _ in range(4):
        run.one(random_ids(guess))
    run.check_places()
    assert not store.tier._reading and not store.tier._places.held
    assert len(store.table.residents()) == 6
    store.tier.close()


@pytest.mark.parametrize("bypass", [False, True])
def test_a_file_cut_short_after_opening_is_an_error_that_names_it(path, tmp_path, bypass, parts):
    copy = shutil.copytree(path, tmp_path / "cut.spmoe")
    with Pack.open(copy) as pack:
        store = make_store(pack, 6, 4, bypass=bypass)
        file = copy / "experts" / "layer-001.safetensors"
        with open(file, "r+b") as opened:
            opened.truncate(file.stat().st_size - 5000)
        store.begin_pass(1)
        list(store.serve(0, torch.tensor([[0, 1]])))
        with pytest.raises(DamagedError, match="layer-001"):
            list(store.serve(1, torch.tensor([[0, EXPERTS - 1]])))
        store.begin_pass(1)
        run = Run(Pack.open(path), store)
        run.one([[[2, 3]], [[2, 3]], [[2, 3]]], accepted=1)
        run.check_places()
        store.tier.close()


def test_cancel_takes_effect_while_a_read_is_waited_for(pack, parts, monkeypatch):
    read, go_on = pack.read_expert, threading.Event()

    def held_up(layer, expert, out, offset=0):
        if offset:
            go_on.wait(60)
        read(layer, expert, out, offset)

    store = make_store(pack, 6, 4, bypass=False)
    store.cancel = threading.Event()
    monkeypatch.setattr(pack, "read_expert", held_up)
    threading.Timer(0.1, store.cancel.set).start()
    store.begin_pass(1)
    started = time.perf_counter()
    with pytest.raises(Cancelled):
        list(store.serve(0, torch.tensor([[0, 1]])))
    assert time.perf_counter() - started < 30  # and not when the read has ended
    store.cancel = None
    threading.Timer(0.1, go_on.set).start()  # the threads of the past write on for a while
    run = Run(pack, store)
    for turn in range(3):
        run.one([[[turn, 4]]] * LAYERS, accepted=1)
        run.check_places()
    store.tier.close()


def test_cancel_reaches_a_demand_whose_victim_waits_for_a_place_to_keep(pack, parts, monkeypatch):
    """Which is being written to, by a read that was given up."""
    store = make_store(pack, 6, 1, bypass=False)
    tier, run, read, go_on = store.tier, Run(pack, store), pack.read_expert, threading.Event()
    victim, looks = (0, 1), []
    read(*victim, store._slab._rows[0])

    def held_up(*args):
        assert go_on.wait(60)
        read(*args)

    def late():
        looks.append(1)
        if len(looks) == 3:
            raise LookupError

    monkeypatch.setattr(pack, "read_expert", held_up)
    started = time.perf_counter()
    for key, leaving in (((0, 0), None), ((0, 2), victim)):
        looks.clear()
        with pytest.raises(LookupError):
            tier.fill(key, 0, leaving, late, urgent=True)
    assert time.perf_counter() - started < 30
    go_on.set()
    assert tier.fill((0, 2), 0, victim, lambda: None, urgent=True)
    run.check_places()
    assert tier._places.is_filled((0, 2)) and store.counters.ram_returns == 1
    tier.close()


def test_what_a_prefetch_copies_from_its_place_does_not_lose_it_to_what_leaves_the_slot(pack):
    """Though it was used longest ago."""
    store = make_store(pack, 2, 2)
    tier, run, wanted, other, victim = store.tier, Run(pack, store), (0, 0), (0, 1), (0, 2)
    used = tier._places._last_used
    for age, key in enumerate((wanted, other)):
        used[key] = age
        assert tier.fill(key, 0, None, lambda: None, urgent=True)
        tier._places.lost_slot(key)
    pack.read_expert(*victim, store._slab._rows[0])
    used[victim] = 9
    before = store.counters.copy()
    assert tier.fill(wanted, 0, victim, lambda: None, urgent=False)
    grown = store.counters.since(before)
    assert (grown.ram_hits, grown.ram_returns, grown.disk_bytes) == (1, 1, 0)
    assert tier._places.is_filled(victim) and tier._places.place(other) is None
    run.read(*wanted, store._slab.address(0))
    run.check_places()
    assert not tier._places.held
    tier.close()


def test_a_read_given_up_before_it_began_hides_no_writer(pack, parts, monkeypatch):
    """The one before it still writes to the place, which goes to a third."""
    monkeypatch.setattr(diskreads, "READERS", 2)
    store = make_store(pack, 6, 2, bypass=False)
    tier, run, read, begun = store.tier, Run(pack, store), pack.read_expert, set()
    slow = {(0, 0): threading.Event(), (0, 1): threading.Event()}

    def held_up(layer, expert, out, offset=0):
        begun.add((layer, expert))
        if offset == 0 and (layer, expert) in slow:
            assert slow[layer, expert].wait(20)
        read(layer, expert, out, offset)

    def late():
        if len(begun) == 2:
            raise LookupError

    monkeypatch.setattr(pack, "read_expert", held_up)
    tier.read_ahead([(0, 1)])
    for expert in (0, 2):
        with pytest.raises(LookupError):
            tier.fill((0, expert), 0, None, late, urgent=False)
    assert begun == slow.keys()  # one thread is at each
    threading.Timer(0.1, slow[0, 1].set).start()
    threading.Timer(0.3, slow[0, 0].set).start()
    assert tier.fill((0, 3), 0, None, lambda: None, urgent=True)
    assert slow[0, 0].wait(20)
    tier._reads.close()  # when all have written what they had to
    run.check_places()
    tier.close()


def test_kind_l_o36_ctrl_c_while_a_read_begins_holds_up_no_other(pack, parts, monkeypatch):
    """A demand's parts were read first, by the threads that a prefetch had asked for."""
    monkeypatch.setattr(diskreads, "READERS", 1)
    monkeypatch.setattr(diskreads, "MOST_PART", 8192)
    store = make_store(pack, 6, 4, bypass=False)
    tier, read, go_on, seen, looks = store.tier, pack.read_expert, threading.Event(), [], []

    def held_up(layer, expert, out, offset=0):
        seen.append(expert)
        assert expert or go_on.wait(20)
        read(layer, expert, out, offset)

    def patience():
        looks.append(1)
        assert len(looks) < 60

    def struck(work):
        go_on.set()
        while seen.count(1) < 3:
            time.sleep(0.001)
        raise KeyboardInterrupt

    monkeypatch.setattr(pack, "read_expert", held_up)
    thread = threading.Thread(target=tier.fill, args=((0, 0), 0, None, patience, False))
    thread.start()
    while not seen:
        time.sleep(0.001)
    with monkeypatch.context() as patch:
        asked = SimpleNamespace(put=struck, get=tier._reads._asked.get)
        patch.setattr(tier._reads, "_asked", asked)
        with pytest.raises(KeyboardInterrupt):
            tier.fill((0, 1), 1, None, lambda: None, urgent=True)
    thread.join()
    assert tier._places.is_filled((0, 0))
    tier.close()


# --- a demand and a prefetch -----------------------------------------------------------------------


@pytest.mark.parametrize("places", [0, 6])
def test_a_demand_overtakes_a_prefetch_and_a_late_one_is_dropped(pack, parts, monkeypatch, places):
    """In the order of pieces, on the way from the disk and, without a tier, into the slot."""
    monkeypatch.setattr(slab, "RING_BYTES", 8192)
    monkeypatch.setattr(diskreads, "READERS", 2)
    monkeypatch.setattr(diskreads, "MOST_PART", 8192)
    LazyGpu(monkeypatch, eagerness=1.0)
    store = make_store(pack, 6, places, lazy=True, bypass=False)
    if not places:
        store.tier.close()
        store.tier = None
    run = Run(pack, store)
    read, order, begun = pack.read_expert, [], threading.Event()

    def slow(layer, expert, out, offset=0):
        order.append((layer, expert))
        begun.set()
        time.sleep(0.01)
        read(layer, expert, out, offset)

    monkeypatch.setattr(pack, "read_expert", slow)
    worker = threading.Thread(target=store.prefetch, args=(2, 7))
    worker.start()
    begun.wait(20)
    store.begin_pass(1)
    list(store.serve(0, torch.tensor([[0, 1]])))
    first = order.index((0, 0))
    before_demand = [key for key in order[first:] if key == (2, 7)]
    after = len(order) - 1 - order[::-1].index((0, 1))
    overtaken = [key for key in order[first:after] if key == (2, 7)]
    assert len(overtaken) <= 3, order
    assert len(before_demand) < pack.expert_layout.stride // 8192 - 1
    list(store.serve(2, torch.tensor([[0, 1]])))  # 7 is not among them
    worker.join()
    assert store.counters.prefetch_dropped == 1 and store.counters.prefetches == 0
    assert store.table.slot((2, 7)) is None and not store.would_miss((2, 7))
    run.one([[[7, 6]]] * LAYERS, accepted=1)
    if places:
        run.check_places()
        store.tier.close()
    assert run.wrong == []


def test_a_late_prefetch_that_is_waited_for_goes_on(pack, parts, monkeypatch):
    store = make_store(pack, 6, 6, bypass=False)
    run = Run(pack, store)
    read, begun = pack.read_expert, threading.Event()

    def slow(layer, expert, out, offset=0):
        begun.set()
        time.sleep(0.02)
        read(layer, expert, out, offset)

    monkeypatch.setattr(pack, "read_expert", slow)
    worker = threading.Thread(target=store.prefetch, args=(1, 7))
    worker.start()
    begun.wait(20)
    store.begin_pass(1)
    list(store.serve(1, torch.tensor([[7, 1]])))
    worker.join()
    c = store.counters
    assert (c.prefetches, c.prefetch_dropped, c.prefetch_late, c.loads) == (1, 0, 1, 1)
    assert c.disk_bytes == 2 * run.stride
    store.tier.close()


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize("call, kept", [(0, 6), (1, 0), (2, 0), (3, 2)])
def test_kind_i_o25_what_is_refused_is_said_once(pack, monkeypatch, caplog, call, kept):
    """Two places to a buffer; one that was granted before goes too."""
    stride, driver = pack.expert_layout.stride, WritableDriver(refuse_at=call)
    monkeypatch.setattr(ramtier, "CHUNK_BYTES", 2 * stride)
    store = make_store(pack, 6, 6, driver=driver)
    assert store.tier.num_places == kept
    assert sum(driver.locked.values()) == kept * stride
    assert len(caplog.records) == (call > 0)
    if call:
        line = caplog.records[0].getMessage()
        assert "CUDA error 2: out of memory" in line and ramtier.size(6 * stride) in line
        assert ramtier.size(kept * stride) in line and "\n" not in line
    run = Run(pack, store)
    run.one(random_ids(random.Random(0)))
    run.check_places()
    store.tier.close()
    store.tier.close()
    assert not driver.locked and driver.events.count("synchronize") == (kept > 0)


class WritableDriver(Driver):
    def register(self, address, size, writable=False):
        assert writable
        return super().register(address, size)


def test_cancel_and_a_system_without_memory_lock_nothing(pack, monkeypatch, caplog):
    driver, cancel, seen = WritableDriver(), threading.Event(), []
    monkeypatch.setattr(ramtier, "CHUNK_BYTES", pack.expert_layout.stride)

    def on_progress(progress):
        seen.append(progress)
        if len(seen) == 3:
            cancel.set()

    made = slab.HostSlab(2, pack.expert_layout.stride, CPU)
    more = {"bypass": True, "driver": driver}
    budget = 6 * pack.expert_layout.stride
    with pytest.raises(Cancelled):
        RamTier(
            pack, made, budget, {}, Counters(), CPU, on_progress=on_progress, cancel=cancel, **more
        )
    assert not driver.locked and driver.calls == 3
    assert [(p.stage, p.done, p.total, p.unit) for p in seen] == [
        ("pin", i * budget // 6, budget, "bytes") for i in range(3)
    ]

    def nothing(count):
        raise Refused("no memory to be had: [Errno 12] Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(ramtier, "_memory", nothing)
        tier = RamTier(pack, made, budget, {}, Counters(), CPU, **more)
        assert tier.num_places == 0 and "Cannot allocate" in caplog.text
        tier.close()
    left = [10 * budget, 10 * budget, 7_000]
    monkeypatch.setattr(ramtier, "available_bytes", lambda device: left.pop(0))
    tier = RamTier(pack, made, budget, {}, Counters(), CPU, **more)
    assert tier.num_places == 2 and "7.0 kB of RAM are available" in caplog.text
    tier.close()


def test_closing_ends_threads_and_files_and_waits_before_it_unlocks(pack, parts):
    files = os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []
    threads = set(threading.enumerate())
    driver = WritableDriver()
    store = make_store(pack, 6, 4, driver=driver)
    Run(pack, store).one(random_ids(random.Random(0)))
    assert set(threading.enumerate()) - threads
    store.tier.close()
    assert driver.events == ["register", "synchronize", "unregister"] and not driver.locked
    assert not set(threading.enumerate()) - threads
    assert not files or len(os.listdir("/proc/self/fd")) == len(files)
    driver = WritableDriver()
    store = make_store(pack, 6, 4, driver=driver)
    del store
    gc.collect()
    assert driver.locked == {}  # one that nobody kept closes itself


def test_kind_l_o36_ctrl_c_while_it_is_made_leaves_nothing_locked(pack, monkeypatch):
    monkeypatch.setattr(ramtier, "CHUNK_BYTES", 2 * pack.expert_layout.stride)
    made, moment = slab.HostSlab(2, pack.expert_layout.stride, CPU), 0
    budget = 5 * pack.expert_layout.stride
    while True:
        driver, tier, moment = WritableDriver(), None, moment + 1
        with Interrupt(moment, MINE) as strike:
            tier = RamTier(pack, made, budget, {}, Counters(), CPU, bypass=True, driver=driver)
            tier.close()
        if tier is not None:
            tier.close()
        if driver.locked:
            gc.collect()
        assert not driver.locked, strike.where
        if not strike.struck:
            break
    assert moment > 50


def test_kind_l_o36_ctrl_c_while_a_place_is_taken_misleads_nobody():
    """The other thread may take one before `settle` has been here."""
    moment, strike = 0, None
    while strike is None or strike.struck:
        places, moment = Places(2, {}), moment + 1
        for expert in range(2):
            places.take((0, expert), None)
            places.filled((0, expert))
            places.got_slot((0, expert))
            places.release((0, expert))
        with Interrupt(moment, MINE) as strike:
            places.take((1, 0), None)
        others = [
            (2, expert) for expert in range(2) if places.take((2, expert), (2, 0)) is not None
        ]
        assert others and not any(places.is_filled(key) for key in [(1, 0), *others])
        places.settle((2, 0))
        taken = [places.place(key) for key in [(0, 0), (0, 1), (1, 0), *others]]
        taken = [place for place in taken if place is not None]
        assert sorted(taken + places._free) == [0, 1], strike.where
    assert moment > 5


@pytest.mark.parametrize("slots, places", [(2, 2), (6, 5)])
def test_kind_l_o36_ctrl_c_at_any_moment_of_a_pass_spoils_no_byte(pack, monkeypatch, slots, places):
    ids = [[[0, 1], [5, 2]], [[4, 3]], [[0, 1]]]
    files = (*MINE, "/spmoe_lite/slab.py", "/spmoe_lite/store.py")

    def interrupted(moment):
        gpu = LazyGpu(monkeypatch)
        store = make_store(pack, slots, places, lazy=True, bypass=False)
        run = Run(pack, store, gpu)
        run.one([[[6, 7]], [[6, 7]], [[4, 7]]], accepted=1)
        with Interrupt(moment, files) as interrupt:
            run.one(ids, accepted=1)
        gpu.compute.synchronize()  # kernels that were launched end, and what they wait for
        for _ in range(2):
            run.one(ids, accepted=1)
        run.one([[[6, 7]], [[6, 7]], [[4, 7]]], accepted=1)
        run.check_places()
        assert not store.tier._places.held and not store.tier._reading, interrupt.where
        store.tier.close()
        return interrupt

    moment = 1  # how many there are depends on how long reads are waited for
    while interrupted(moment).struck:
        moment += 17
    assert moment > 200


def test_kind_l_o36_ctrl_c_at_any_moment_of_a_fill_makes_nobody_wait(pack, monkeypatch):
    """What it was saving the other thread may have at once; `settle` need not come first."""
    for module in (ramtier, diskreads):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    victim, moment, strike = (0, 0), 0, None
    while strike is None or strike.struck:
        store, moment, looks = make_store(pack, 6, 4, bypass=False), moment + 1, []
        tier, run = store.tier, Run(pack, store)
        assert tier.fill(victim, 0, None, lambda: None, urgent=True)
        tier._places.drop(victim)
        with Interrupt(moment, MINE) as strike:
            tier.fill((1, 1), 0, victim, lambda: None, urgent=True)

        def patience(looks=looks, strike=strike):
            looks.append(1)
            assert len(looks) < 1000, strike.where

        assert tier.fill(victim, 1, None, patience, urgent=False)
        tier.settle(None)
        run.check_places()
        tier.close()
    assert moment > 50


def test_kind_l_o36_ctrl_c_while_reads_are_given_up_lets_none_go_on(pack, parts, monkeypatch):
    monkeypatch.setattr(diskreads, "READERS", 1)
    for module in (ramtier, diskreads):
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.001)
    read, go_on, moment, strike = pack.read_expert, threading.Event(), 0, None

    def held_up(*args):
        assert go_on.wait(20)
        read(*args)

    monkeypatch.setattr(pack, "read_expert", held_up)
    while strike is None or strike.struck:
        go_on.clear()
        store, moment, looks = make_store(pack, 6, 4, bypass=False), moment + 1, []

        def late(looks=looks):
            looks.append(1)
            if len(looks) == 2:
                raise LookupError

        with Interrupt(moment, MINE) as strike:
            store.tier.read_ahead([(1, 2)])
            with suppress(LookupError):
                store.tier.fill((1, 1), 0, None, late, urgent=True)
            store.tier.settle(None)
        store.tier.settle(None)
        assert not store.tier._reads._queue, strike.where
        go_on.set()
        store.tier.close()
    assert moment > 50


def test_kind_l_o36_ctrl_c_while_places_are_settled_frees_none_that_will_be_read_to(
    pack, parts, monkeypatch
):
    """The prefetch worker goes on meanwhile, and keeps an expert in a place that is free."""
    monkeypatch.setattr(diskreads, "READERS", 1)
    read, victim, moment, strike = pack.read_expert, (2, 7), 0, None

    while strike is None or strike.struck:
        store, moment, go_on, begun = make_store(pack, 6, 2, bypass=False), moment + 1, [], []
        tier, run = store.tier, Run(pack, store)

        def held_up(*args, go_on=go_on, begun=begun):
            begun.append(1)
            while not go_on:
                time.sleep(0.0005)
            read(*args)

        def work(tier=tier):
            with suppress(LookupError):
                tier.fill((2, 6), 0, victim, late, urgent=False)

        def late(looks=[]):  # noqa: B006
            looks.append(1)
            if len(looks) % 50 == 0:
                raise LookupError

        read(*victim, store._slab._rows[0])
        monkeypatch.setattr(pack, "read_expert", held_up)
        tier._places._free = [0, 1]
        tier.read_ahead([(0, 0), (0, 1)])  # one part of the first is under way, the second waits
        while not begun:
            time.sleep(0.0005)
        with Interrupt(moment, MINE) as strike:
            tier.settle(None)
        worker = threading.Thread(target=work)
        worker.start()
        worker.join(0.01)
        go_on.append(1)
        worker.join(20)
        tier.settle(None)
        tier._reads.close()
        run.check_places()
        tier.close()
    assert moment > 20


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="no signal to one thread here")
def test_kind_l_o36_ctrl_c_while_a_waiter_wakes_up_frees_nobody_s_lock(pack):
    store, me, failed = make_store(pack, 2, 2), threading.get_ident(), []
    tier = store.tier

    def striking(lock, changed):
        try:
            with lock:
                changed.notify_all()
                time.sleep(0.05)  # the waiter is awake, and wants the lock again
                signal.pthread_kill(me, signal.SIGINT)
                time.sleep(0.05)
        except RuntimeError as error:
            failed.append(error)

    for owner, changed in (
        (store, store._changed),
        (tier, tier._saved),
        (r := tier._reads, r._changed),
    ):
        thread = threading.Thread(target=striking, args=(owner._lock, changed))
        with pytest.raises(KeyboardInterrupt), owner._lock:
            thread.start()
            changed.wait(20)
            changed.wait(20)
        thread.join()
    assert not failed
    tier.close()


# --- the same text -------------------------------------------------------------------------------

PROMPT = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    target = tiny.tiny_mixtral(folder / "t", experts=8, layers=3, scale_head=4.0)
    return (
        convert(target, out=folder / "target.spmoe").path,
        tiny.tiny_pack(folder / "o", kind="mistral", layers=3),
    )


@pytest.fixture
def tiered(monkeypatch):
    """Engines on the CPU with a tier of as many experts as `pin` has bytes."""
    monkeypatch.setattr(diskreads, "LEAST_PART", 8192)
    monkeypatch.setattr(Loader, "_pinned", lambda self, pin, pack: pin * pack.expert_layout.stride)
    return lambda *a, places, **kw: Engine.load(*a, device="cpu", pin=places, **kw)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("with_draft", [False, True])
def test_t0_text_and_logits_do_not_depend_on_the_tier(packs, tiered, temperature, with_draft):
    target, draft = packs
    how = {"max_tokens": 24, "sampling": SamplingParams(temperature=temperature, seed=3)}
    more = {"draft": draft if with_draft else None, "cutoff": 3 if with_draft else None}
    with Engine.load(target, device="cpu", **more) as engine:
        expected = engine.generate(PROMPT, **how).result.token_ids
        expected_logits = engine.decoder.target.forward(PROMPT, engine.decoder.session.target_kv)
    for slots, places in ((2, 2), (3, 1), (6, 3), (9, 20)):
        with tiered(target, slots=slots, places=places, **more) as engine:
            result = engine.generate(PROMPT, **how).result
            assert result.token_ids == expected
            assert engine.stats()["ram_places"] == places
            logits = engine.decoder.target.forward(PROMPT, engine.decoder.session.target_kv)
            assert torch.equal(logits, expected_logits)
            assert engine.counters.disk_bytes > 0
            assert "read from disk" in result.stats.line()
    assert not [t for t in threading.enumerate() if t.name.startswith("spmoe-disk")]


def test_two_engines_share_a_pack_and_cancel_loses_nothing(packs, tiered):
    target, draft = packs
    with Engine.load(target, device="cpu") as engine:
        expected = engine.generate(PROMPT, max_tokens=30).result.token_ids
    with (
        tiered(target, draft=draft, slots=6, places=3, cutoff=3) as one,
        tiered(target, slots=3, places=5) as two,
    ):
        found, cancel = [], threading.Event()
        thread = threading.Thread(
            target=lambda: found.append(two.generate(PROMPT, max_tokens=30).result.token_ids)
        )
        thread.start()
        threading.Timer(0.05, cancel.set).start()
        try:
            one.generate(PROMPT, max_tokens=30, cancel=cancel).result  # noqa: B018
        except Cancelled:
            pass
        assert one.generate(PROMPT, max_tokens=30).result.token_ids == expected
        thread.join()
    assert found == [expected]


def test_a_disk_that_fails_in_an_answer_is_one_typed_error(packs, tiered, monkeypatch):
    target, _ = packs
    with tiered(target, slots=3, places=3) as engine:
        monkeypatch.setattr(
            os, "preadv", broken := lambda *a: (_ for _ in ()).throw(OSError(5, "I/O"))
        )
        with pytest.raises(SpmoeError, match="layer-00"):
            engine.generate(PROMPT, max_tokens=5).result  # noqa: B018
        monkeypatch.undo()
        assert engine.generate(PROMPT, max_tokens=5).result.completion_tokens == 5
        assert broken


def test_the_whole_pack_needs_no_tier(packs, tiered):
    with tiered(packs[0], slots=6, places=24) as engine:
        assert engine.stats()["ram_places"] is None
        line = RunStats(3, 1.0, 0.1, engine.counters).line()
        assert "disk" not in line
    with tiered(packs[0], slots=24, places=5) as engine:
        assert engine.stats()["ram_places"] is None
