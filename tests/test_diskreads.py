"""Reads from disk: both ways past the page cache, errors, Ctrl-C, closing, and the garbage collector in a thread."""

import gc
import os
import threading
import time
import warnings
import weakref

import numpy as np
import pytest

from spmoe_lite import diskreads
from spmoe_lite.diskreads import DiskReads, Read
from spmoe_lite.errors import BusyError
from spmoe_lite.pack import Pack
from tests.interrupt import MOMENTS, Interrupt, _operations
from tests.test_ramtier import (  # noqa: F401
    KEYS,
    MINE,
    WritableDriver,
    make_store,
    pack,
    parts,
    path,
    stored,
)


def rows(pack, count):  # noqa: F811
    """uint8 [count, stride], as O_DIRECT wants it."""
    stride = pack.expert_layout.stride
    memory = np.zeros((count + 1) * stride, dtype=np.uint8)
    start = -memory.ctypes.data % diskreads.BLOCK
    return memory[start : start + count * stride].reshape(count, stride)


def demand(reads, key, out):
    reads.start(read := Read(key, True, reads.parts, out, None, None))
    return read


def finish(reads, read):
    looks = []

    def patience():
        looks.append(1)
        assert len(looks) < 200

    for part in range(len(read.parts)):
        reads.wait(read, part, patience)


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("never")


@pytest.fixture
def without_o_direct(monkeypatch):
    """A file system that has no O_DIRECT will do: the second descriptors are ordinary ones."""
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("no direct reads here")
    os_open = os.open
    monkeypatch.setattr(os, "open", lambda file, flags: os_open(file, flags & ~os.O_DIRECT))


@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("refuses", ["nothing", "open", "read", "short"])
def test_reads_past_the_page_cache_and_every_way_back(
    pack,  # noqa: F811
    parts,  # noqa: F811
    monkeypatch,
    without_o_direct,
    bypass,
    refuses,
):
    opened, advised, direct, wanted = [], [], set(), stored(pack)
    os_open, preadv, open_direct = os.open, os.preadv, diskreads._open_direct

    def opening(file, flags):
        opened.append(flags)
        if refuses == "open":
            raise OSError(22, "Invalid argument")
        return os_open(file, flags)

    def reading(file, buffers, offset):
        if file in direct and refuses == "read":
            raise OSError(22, "Invalid argument")
        if file in direct and refuses == "short":
            return preadv(file, [buffers[0][:4096]], offset)
        return preadv(file, buffers, offset)

    def noting(file):
        found = open_direct(file)
        if found is not None:
            direct.add(found.fileno())
        return found

    monkeypatch.setattr(diskreads, "_open_direct", noting)
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: advised.append(a))
    reads, out = DiskReads(pack, bypass), rows(pack, len(KEYS))
    reads.open()
    for key, row in zip(KEYS, out, strict=True):
        finish(reads, demand(reads, key, row))
    assert (out == np.stack(list(wanted.values()))).all()
    assert bool(opened) == bypass
    assert bool(advised) == (bypass and refuses != "nothing")
    reads.close()
    for file in direct:
        with pytest.raises(OSError):
            os.fstat(file)


def test_an_error_that_nobody_asks_for_keeps_no_memory(pack, parts, monkeypatch):  # noqa: F811
    def broken(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(pack, "read_expert", broken)
    tier = make_store(pack, 6, 4, bypass=False).tier

    def failed(read):
        return read.error is not None and not read.running

    gc.collect()
    gc.disable()
    try:
        tier.read_ahead([(0, 0), (0, 1)])
        until(lambda: all(failed(read) for read in tier._reading.values()))
        memory = weakref.ref(tier._buffers[0])
        tier.settle(None)
        tier.close()
        assert memory() is None
    finally:
        gc.enable()


# --- Ctrl-C --------------------------------------------------------------------------------------


def test_kind_l_o36_ctrl_c_anywhere_in_the_beginning_of_a_read_holds_up_no_other(
    pack,  # noqa: F811
    parts,  # noqa: F811
    monkeypatch,
):
    """In Python's own modules too, whose locks it might leave locked."""
    monkeypatch.setattr(diskreads, "READERS", 2)
    moment, strike, out = 0, None, rows(pack, 2)
    while strike is None or strike.struck:
        reads, moment = DiskReads(pack, False), moment + 1
        reads.open()
        with Interrupt(moment, (*MINE, "/threading.py", "/concurrent/", "/queue.py")) as strike:
            demand(reads, (0, 0), out[0])
        finish(reads, demand(reads, (0, 1), out[1]))
        reads.close()
    assert moment > 3


def test_kind_l_o36_ctrl_c_while_it_closes_closes_nobody_elses_file(pack, without_o_direct):  # noqa: F811
    moment, strike, out = 0, None, rows(pack, 3)
    while strike is None or strike.struck:
        reads, moment = DiskReads(pack, True), moment + 1
        reads.open()
        for layer, row in enumerate(out):
            finish(reads, demand(reads, (layer, 0), row))
        with Interrupt(moment, MINE) as strike:
            reads.close()
        others = [os.open(pack.path, os.O_RDONLY) for _ in range(4)]  # under numbers that are free
        reads.close()
        for file in others:
            os.fstat(file)
            os.close(file)
    assert moment > 5


# --- closing -------------------------------------------------------------------------------------


def test_close_waits_for_parts_under_way_and_whoever_waits_for_others_is_told(
    pack,  # noqa: F811
    parts,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(diskreads, "READERS", 2)
    read, go_on, begun, told = pack.read_expert, threading.Event(), [], []

    def held_up(layer, expert, out, offset=0):
        begun.append(offset)
        assert go_on.wait(20)
        read(layer, expert, out, offset)

    monkeypatch.setattr(pack, "read_expert", held_up)
    driver = WritableDriver()
    tier = make_store(pack, 6, 4, bypass=False, driver=driver).tier

    def fill():
        with pytest.raises(BusyError):
            tier.fill((0, 0), 0, None, lambda: None, urgent=True)
        told.append(1)

    filling, closing = threading.Thread(target=fill), threading.Thread(target=tier.close)
    filling.start()
    until(lambda: len(begun) == 2)
    closing.start()
    filling.join(20)
    assert told and closing.is_alive() and driver.locked
    go_on.set()
    closing.join(20)
    assert not closing.is_alive() and not driver.locked
    assert len(begun) == 2


def test_the_end_of_the_process_waits_for_parts_under_way(pack, parts, monkeypatch):  # noqa: F811
    ended, read = [], pack.read_expert

    def slow(*args):
        time.sleep(0.05)
        read(*args)
        ended.append(1)

    monkeypatch.setattr(pack, "read_expert", slow)
    store = make_store(pack, 6, 4, bypass=False)
    store.tier.read_ahead([(0, 0), (0, 1)])
    until(lambda: any(read.running for read in store.tier._reading.values()))
    diskreads._close_all()
    assert ended and not any(thread.is_alive() for thread in store.tier._reads._threads)
    store.tier.close()


class InReader(Interrupt):
    """At a chosen moment of the threads that read, one of them does something else."""

    armed = False

    def __init__(self, moment, action):
        super().__init__(moment, ("/spmoe_lite/diskreads.py",))
        self._action = action

    def _step(self, frame, event, arg):
        if event == "opcode":
            before = self._before.get(id(frame))
            self._before[id(frame)] = _operations(frame.f_code)[frame.f_lasti]
            if self.armed and before in MOMENTS:
                self.seen += 1
                if self.seen == self._moment:
                    self.struck, self.where = True, f"{frame.f_code.co_name}:{frame.f_lineno}"
                    self._action()
        return self._step


@pytest.mark.parametrize("closes", [False, True])
def test_an_engine_is_dropped_at_any_moment_of_a_thread_of_its_own(
    path,  # noqa: F811
    parts,  # noqa: F811
    monkeypatch,
    without_o_direct,
    closes,
):
    """By the garbage collector, inside any lock; `closes`: what is dropped with it closes it before."""
    monkeypatch.setattr(diskreads, "READERS", 2)
    read, moment, strike = diskreads._Disk.read, 0, None
    files = len(os.listdir("/proc/self/fd"))
    gc.collect()
    gc.freeze()  # or each round takes as long as all of torch
    try:
        while strike is None or strike.struck:
            driver, begin, moment, kept = WritableDriver(), threading.Event(), moment + 1, []

            def held_up(disk, *args, begin=begin):
                assert begin.wait(20)
                read(disk, *args)

            def drop(kept=kept):
                if closes:
                    kept[0].close()
                kept.clear()
                gc.collect()

            monkeypatch.setattr(diskreads._Disk, "read", held_up)
            strike = InReader(moment, drop)
            threading.settrace(strike._enter)
            tier = make_store(Pack.open(path), 6, 2, driver=driver).tier
            kept.append(tier)
            tier.itself = tier
            tier.read_ahead([(0, 0)])
            until(lambda tier=tier: tier._reading[0, 0].running == 2)
            tier.settle(None)
            tier.read_ahead([(0, 1), (0, 2)])  # into the place that is still being written
            threads, queue = tier._reads._threads[:], tier._reads._queue
            del tier
            threading.settrace(None)
            strike.armed = True
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ResourceWarning)  # its files
                begin.set()
                until(lambda s=strike, queue=queue: s.struck or not queue)
                if not strike.struck:
                    time.sleep(0.05)
                if not strike.struck:
                    drop()
                until(lambda driver=driver: not driver.locked)
                until(lambda threads=threads: not any(t.is_alive() for t in threads))
                del threads, queue
                until(lambda: len(os.listdir("/proc/self/fd")) == files)
    finally:
        threading.settrace(None)
        gc.unfreeze()
    assert moment > 50
