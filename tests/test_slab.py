"""The device slab's ring on a machine without a GPU: streams and events are stood in for, bytes are real."""

import threading
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
    def __init__(self, device=None):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture
def device_slab(monkeypatch):
    """A `DeviceSlab` of 6 slots whose pieces are 64 bytes; the last one of an expert is shorter."""
    monkeypatch.setattr(slab, "RING_BYTES", 64)
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
