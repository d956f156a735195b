"""The device slab's ring on a machine without a GPU: streams and events are stood in for, bytes are real."""

import ctypes
import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from spmoe_lite import slab

STRIDE = 1000


class FakeEvent:
    def record(self, stream=None):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        pass


@pytest.fixture
def device_slab(monkeypatch):
    """A `DeviceSlab` of 6 slots whose pieces are 64 bytes; the last one of an expert is shorter."""
    monkeypatch.setattr(slab, "RING_BYTES", 64)
    monkeypatch.setattr(slab, "READERS", 3)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    made = slab.DeviceSlab(6, STRIDE, torch.device("cpu"))
    made.compute = compute
    return made


def reader(seed, sizes=None):
    """The bytes of one expert, and a `read` that hands them out piece by piece."""
    expert = np.random.default_rng(seed).integers(0, 256, STRIDE, dtype=np.uint8)

    def read(out, offset):
        if sizes is not None:
            sizes.append((offset, len(out)))
        out[:] = expert[offset : offset + len(out)]

    return expert, read


def test_an_expert_goes_through_the_ring_in_pieces(device_slab):
    sizes = []
    expert, read = reader(1, sizes)
    device_slab.fill(3, read)
    assert (device_slab.slots[3].numpy() == expert).all()
    assert sizes == [(offset, min(64, STRIDE - offset)) for offset in range(0, STRIDE, 64)]


@pytest.fixture
def parted_slab(device_slab, monkeypatch):
    """The same with three threads to a piece, of at least 16 bytes each."""
    monkeypatch.setattr(slab, "PART", 16)
    return device_slab


def test_several_threads_read_one_piece(parted_slab):
    sizes, threads = [], set()
    expert, read = reader(1, sizes)
    together = threading.Barrier(3)

    def meeting(out, offset):
        if offset < 64:
            together.wait(timeout=20)
        threads.add(threading.current_thread().name)
        read(out, offset)

    parted_slab.fill(3, meeting)
    assert (parted_slab.slots[3].numpy() == expert).all()
    assert sorted(sizes)[:4] == [(0, 22), (22, 22), (44, 20), (64, 22)]
    assert sum(size for _, size in sizes) == STRIDE
    assert {name.rpartition("_")[0] for name in threads} == {"spmoe-read"}


def test_a_reader_s_error_is_raised_when_the_others_are_done(parted_slab):
    reading = []

    def failing(out, offset):
        if offset == 0:
            raise OSError("gone")
        time.sleep(0.05)
        reading.append(offset)

    for turn in range(1, 6):
        with pytest.raises(OSError, match="gone"):
            parted_slab.fill(0, failing)
        assert len(reading) == 2 * turn
    expert, read = reader(9)
    parted_slab.fill(0, read)
    assert (parted_slab.slots[0].numpy() == expert).all()


def test_kind_l_o36_readers_that_ctrl_c_left_behind_spoil_nothing(parted_slab, monkeypatch):
    """The thread that waits for the readers is taken away; they go on writing, into a buffer of the past."""
    go_on = threading.Event()

    def held_up(out, offset):
        go_on.wait(20)
        out[:] = 255

    def interrupted(parts):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(slab, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            parted_slab.fill(0, held_up)
    buffers = [next(parted_slab._ring) for _ in range(slab.RING_BUFFERS)]
    assert sum(buffer.being_read for buffer in buffers) == 1
    parted_slab._readers = ThreadPoolExecutor(3)  # the others are held up
    pieces = itertools.count(1)

    def waiting(parts):
        wait(parts)
        if (
            next(pieces) == slab.RING_BUFFERS
        ):  # the same buffer's turn has come, and its bytes are read
            go_on.set()
            time.sleep(0.1)

    monkeypatch.setattr(slab, "wait", waiting)
    for slot in range(6):
        expert, read = reader(slot)
        parted_slab.fill(slot, read)
        assert (parted_slab.slots[slot].numpy() == expert).all()


def test_the_readers_end_with_the_slab(device_slab):
    made = slab.DeviceSlab(1, STRIDE, torch.device("cpu"))
    made.fill(0, reader(1)[1])
    before = {t for t in threading.enumerate() if t.name.startswith("spmoe-read")}
    assert before
    del made
    gc.collect()
    assert not before & set(threading.enumerate())


def test_the_slots_outlive_the_copies_to_and_from_them(device_slab, monkeypatch):
    """An engine may be dropped without `close`, and its memory is lent to others at once."""
    ended = []

    class Busy(FakeStream):
        def synchronize(self):
            ended.append(slots() is not None)

    monkeypatch.setattr(torch.cuda, "Stream", Busy)
    made = slab.DeviceSlab(1, STRIDE, torch.device("cpu"))
    slots = weakref.ref(made.slots)
    made.fill(0, reader(1)[1])
    del made
    gc.collect()
    assert ended == [True, True] and slots() is None


def test_a_reader_may_be_the_last_to_let_go(device_slab, recwarn):
    made, alone, errors = slab.DeviceSlab(1, STRIDE, torch.device("cpu")), threading.Event(), []
    done = made._readers.submit(lambda last: (alone.wait(20), last.clear()), [made])
    del made
    alone.set()
    done.exception()
    done.add_done_callback(lambda future: errors.append(future.exception()))
    assert errors == [None]


@pytest.mark.parametrize("kind", ["device_slab", "host_slab"])
def test_an_expert_in_page_locked_memory_is_one_copy(kind, request, monkeypatch):
    made = request.getfixturevalue(kind)
    expert, copies = reader(1)[0], []

    def copy(address, source, size, stream):
        copies.append((size, stream))
        ctypes.memmove(address, source, size)

    monkeypatch.setattr(slab, "copy_bytes", copy)
    made.fill_from(2, expert.ctypes.data)
    assert (made.slots[2].numpy() == expert).all()
    assert copies == [(STRIDE, getattr(made, "_stream", None))]
    if kind == "device_slab":
        made.wait_filled([2])
        assert made.compute.waited == [made._filled[2]]
        made.mark_read([2])
        made.fill_from(2, expert.ctypes.data)
        assert made._stream.waited == [made._last_read[2]]


@pytest.fixture
def host_slab():
    return slab.HostSlab(6, STRIDE, torch.device("cpu"))


def test_two_threads_share_the_ring(device_slab):
    """More pieces than buffers, from both sides at once: every slot gets its own expert's bytes."""
    wrong = []

    def fill(slots, seed):
        for turn in range(30):
            for slot in slots:
                expert, read = reader(seed + 10 * turn + slot)
                device_slab.fill(slot, read)
                if not (device_slab.slots[slot].numpy() == expert).all():
                    wrong.append((turn, slot))

    threads = [threading.Thread(target=fill, args=a) for a in (([0, 1, 2], 0), ([3, 4, 5], 5000))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_kind_h_o22_a_copy_waits_for_the_last_reader_and_a_reader_for_the_copy(device_slab):
    device_slab.fill(2, reader(1)[1])
    assert device_slab._stream.waited == []  # nobody has read it yet
    device_slab.wait_filled([2])
    assert device_slab.compute.waited == [device_slab._filled[2]]
    device_slab.mark_read([2])
    device_slab.fill(2, reader(2)[1])
    assert device_slab._stream.waited == [device_slab._last_read[2]]


def test_a_failed_read_leaves_the_ring_usable(device_slab):
    def failing(out, offset):
        if offset >= 128:
            raise OSError("gone")
        out[:] = 1

    for _ in range(10):
        with pytest.raises(OSError, match="gone"):
            device_slab.fill(0, failing)
    expert, read = reader(9)
    device_slab.fill(0, read)
    assert (device_slab.slots[0].numpy() == expert).all()
