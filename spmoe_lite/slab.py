"""The slab: one tensor of equal slots that the expert kernels read, and the copies that fill it.

Two slabs with the same methods. `HostSlab` lives in RAM and copies at once. `DeviceSlab` lives in
VRAM, and a slot is a two-event handshake: the copy stream waits for the slot's last reader before it
overwrites it, the compute stream waits for the slot's fill before it reads it. An expert in page-locked
memory goes to its slot in one copy (`fill_from`), one that arrives there bit by bit in as many
(`fill_pieces`). Any other is read from the pack into a pinned ring, each piece by several threads since one
moves less than a tenth of what the bus does, and goes on from there (`fill`); the host waits for a ring
buffer only. What leaves a slot can be kept in host memory (`save`), on a stream of its own: the bus carries
both ways at once.

A fill that can wait is given `go_on`, which is called before each piece: it may wait, or end the fill by an
error. Such a fill has at most two pieces ordered at a time, so that a copy that cannot wait is soon next.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress

import numpy as np
import torch

from spmoe_lite.cudart import copy_bytes
from spmoe_lite.device import host_buffer, side_stream
from spmoe_lite.errors import CapacityError

ReadExpert = Callable[[np.ndarray, int], None]  # fills a uint8 array from an offset in the expert
GoOn = Callable[[], object]
Piece = tuple[int, int, int]  # of an expert: offset, address in page-locked memory, bytes
PIECE = 16 << 20  # bytes of a copy that can wait; larger ones are no faster
TURN = 8 << 20  # bytes after which a copy that cannot lets a pass's own small copies have the bus
RING_BUFFERS = 4
RING_BYTES = 16 << 20  # a power of two: pinned allocations are rounded up to one
READERS = min(8, os.cpu_count() or 1)  # threads that fill a ring buffer
PART = 1 << 20  # bytes a thread reads at least: handing it over costs what 100 kB do


def make_slab(
    num_slots: int,
    stride: int,
    device: torch.device,
    kind: type[HostSlab] | type[DeviceSlab] | None = None,
) -> HostSlab | DeviceSlab:
    """A slab of num_slots x stride bytes on the device; CapacityError if it does not fit."""
    try:
        kind = kind or (HostSlab if device.type == "cpu" else DeviceSlab)
        return kind(num_slots, stride, device)
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"{num_slots} expert slots of {stride / 1e6:.1f} MB do not fit on {device}; "
            f"lower --slots or --vram"
        ) from error


class HostSlab:
    """Slots in RAM, uint8 [num_slots, stride]; a copy is done when `fill` returns."""

    def __init__(self, num_slots: int, stride: int, device: torch.device):
        self.slots = torch.empty((num_slots, stride), dtype=torch.uint8)
        self._rows = self.slots.numpy()

    def address(self, slot: int) -> int:
        return self.slots.data_ptr() + slot * self.slots.shape[1]

    def fill(self, slot: int, read: ReadExpert, go_on: GoOn | None = None) -> None:
        if go_on is not None:
            go_on()
        read(self._rows[slot], 0)

    def fill_from(self, slot: int, source: int, go_on: GoOn | None = None) -> None:
        self.fill_pieces(slot, _pieces(source, self.slots.shape[1], go_on))

    def fill_pieces(self, slot: int, pieces: Iterable[Piece], patient: bool = False) -> None:
        for offset, address, size in pieces:
            copy_bytes(self.address(slot) + offset, address, size, None)

    def save(self, slot: int, address: int, after: object = None) -> None:
        copy_bytes(address, self.address(slot), self.slots.shape[1], None)

    def drain(self) -> None:
        pass  # every copy has ended

    def arrived(self, slot: int) -> bool:
        return True

    def wait_filled(self, slots: Iterable[int]) -> None:
        pass  # every fill has ended

    def mark_read(self, slots: Iterable[int]) -> None:
        pass  # every reader has ended


class DeviceSlab:
    """Slots in VRAM; a fill returns when the copy is ordered, `wait_filled` orders readers after it."""

    def __init__(self, num_slots: int, stride: int, device: torch.device):
        self.slots = torch.empty((num_slots, stride), dtype=torch.uint8, device=device)
        self._stream = side_stream(device)
        self._saving = side_stream(device)
        self._filled: list[torch.cuda.Event | None] = [None] * num_slots
        self._last_read: list[torch.cuda.Event | None] = [None] * num_slots
        size = min(stride, RING_BYTES)
        self._ring = itertools.cycle([_Buffer(size) for _ in range(RING_BUFFERS)])
        self._readers = ThreadPoolExecutor(READERS, "spmoe-read")
        end = weakref.finalize(self, _end, self._readers, (self._stream, self._saving))
        end.atexit = False  # then nobody gets the memory next, and what copies read may be unmapped

    def address(self, slot: int) -> int:
        return self.slots.data_ptr() + slot * self.slots.shape[1]

    def fill(self, slot: int, read: ReadExpert, go_on: GoOn | None = None) -> None:
        """Fill a slot through the ring; `read` is called by several threads at once."""
        self._wait_read(slot)
        stride = self.slots.shape[1]
        for offset in range(0, stride, RING_BYTES):
            if go_on is not None:
                go_on()
            self._send(slot, offset, min(RING_BYTES, stride - offset), read)
        self._mark_filled(slot)

    def fill_from(self, slot: int, source: int, go_on: GoOn | None = None) -> None:
        """Fill a slot from the address of an expert in page-locked memory (`HostMap.address`)."""
        pieces = _pieces(source, self.slots.shape[1], go_on)
        self.fill_pieces(slot, pieces, patient=go_on is not None)

    def fill_pieces(
        self, slot: int, pieces: Iterable[Piece], patient: bool = False
    ) -> torch.cuda.Event:
        """Fill a slot by a copy of each piece, ordered when it comes; returns the event of the last.

        patient: at most two are on their way at a time.
        """
        self._wait_read(slot)
        ordered: deque[torch.cuda.Event] = deque()
        for offset, address, size in pieces:
            copy_bytes(self.address(slot) + offset, address, size, self._stream)
            if patient:
                ordered.append(self._record(self._stream))
                if len(ordered) == 2:
                    ordered.popleft().synchronize()
        return self._mark_filled(slot)

    def save(
        self, slot: int, address: int, after: torch.cuda.Event | None = None
    ) -> torch.cuda.Event:
        """Copy what is in a slot to page-locked memory, before any later fill; returns the event.

        after: of the last copy from there.
        """
        for event in (self._filled[slot], after):
            if event is not None:
                self._saving.wait_event(event)
        copy_bytes(address, self.address(slot), self.slots.shape[1], self._saving)
        saved = self._record(self._saving)
        self._stream.wait_event(saved)
        return saved

    def drain(self) -> None:
        """Wait for every copy that was ordered."""
        self._stream.synchronize()
        self._saving.synchronize()

    def _wait_read(self, slot: int) -> None:
        if (last_read := self._last_read[slot]) is not None:
            self._stream.wait_event(last_read)

    def _mark_filled(self, slot: int) -> torch.cuda.Event:
        self._filled[slot] = filled = self._record(self._stream)
        return filled

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def _send(self, slot: int, offset: int, size: int, read: ReadExpert) -> None:
        """One piece of an expert through the ring."""
        buffer = next(self._ring)
        with buffer.lock:
            buffer.sent.synchronize()
            if buffer.being_read:  # Ctrl-C took the thread that waited; the readers may still write
                buffer.allocate()
            buffer.being_read = True
            parts = self._read_parts(buffer.array[:size], offset, read)
            wait(parts)
            buffer.being_read = False
            try:
                for done in map(Future.result, parts):
                    assert done is None
            finally:
                parts.clear()  # an error and its traceback would hold each other
            with torch.cuda.stream(self._stream):
                piece = self.slots[slot, offset : offset + size]
                piece.copy_(buffer.tensor[:size], non_blocking=True)
                buffer.sent.record(self._stream)

    def _read_parts(self, out: np.ndarray, offset: int, read: ReadExpert) -> list[Future[None]]:
        """Have the readers fill `out` from byte `offset` of an expert."""
        part = max(PART, -(-len(out) // READERS))
        starts = range(0, len(out), part)
        return [self._readers.submit(read, out[i : i + part], offset + i) for i in starts]

    def arrived(self, slot: int) -> bool:
        event = self._filled[slot]
        return event is None or event.query()

    def wait_filled(self, slots: Iterable[int]) -> None:
        compute = torch.cuda.current_stream(self.slots.device)
        for slot in slots:
            if (event := self._filled[slot]) is not None:
                compute.wait_event(event)

    def mark_read(self, slots: Iterable[int]) -> None:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.slots.device))
        for slot in slots:
            self._last_read[slot] = event


def _pieces(source: int, size: int, go_on: GoOn | None) -> Iterator[Piece]:
    """An expert at an address, piece by piece."""
    most = TURN if go_on is None else PIECE
    for offset in range(0, size, most):
        if go_on is not None:
            go_on()
        yield offset, source + offset, min(most, size - offset)


def _end(readers: ThreadPoolExecutor, streams: Iterable[torch.cuda.Stream]) -> None:
    """Wait for the threads to end, unless it is one of them that let go of the slab last; and for the copies.

    The slots are others' memory next: torch lends it again as soon as the stream it came from allows, and
    that one has not waited for copies that nobody needed, or of a pass that was cut short.
    """
    with suppress(RuntimeError):
        readers.shutdown()
    for stream in streams:
        with suppress(RuntimeError):  # a device that has failed copies nothing more
            stream.synchronize()


class _Buffer:
    """One pinned staging buffer, who is using it, and when its last copy has left it."""

    def __init__(self, size: int):
        self.lock = threading.Lock()
        self.sent = torch.cuda.Event()
        self.being_read = False
        self._size = size
        self.allocate()

    def allocate(self) -> None:
        self.tensor = host_buffer((self._size,), torch.uint8)
        self.array = self.tensor.numpy()
        self.being_read = False
