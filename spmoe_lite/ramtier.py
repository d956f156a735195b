"""The RAM tier: places for experts in page-locked memory, where RAM does not hold the whole pack.

    disk --large reads--> place --bus--> slot        an expert found in a place starts there
    slot --bus--> place                              one that leaves its slot goes back

The two tiers hold different experts: what has a slot gives up its place first, so VRAM and RAM together
hold as many experts as they have room for, and where that is the whole pack nothing is read twice. Of the
experts that have a place alone, the one whose last use by an accepted token is longest ago goes first (the
recency of the slot table); what leaves a slot older than that is not kept. One pool serves all layers.
Why so, against other rules: docs/cache.md.

An expert is read in parts (`diskreads.py`), and each part is sent on as it arrives: disk and bus work at the
same time.

A place is written to only after what was begun there has ended: reads of a fill that was given up, copies
to a slot, a copy from one. A place counts as filled when all its bytes are there, or ordered by the device
before any reader; nothing else is ever copied from. Interrupts: `settle` drops what a pass that was cut
short had begun, and a copy whose event is not known makes the next writer wait for all copies.
"""

from __future__ import annotations

import heapq
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmoe_lite.cudart import Cuda, Refused, release
from spmoe_lite.device import available_bytes
from spmoe_lite.diskreads import LOOK_SECONDS, MOST_PART, READERS, DiskReads, Read
from spmoe_lite.progress import OnProgress, Progress, check, size
from spmoe_lite.slots import ExpertKey
from spmoe_lite.stats import Counters

if TYPE_CHECKING:
    from spmoe_lite.pack import Pack
    from spmoe_lite.slab import DeviceSlab, HostSlab, Piece

AHEAD_BYTES = READERS * MOST_PART  # begun before they are asked for, so that no reader is idle
COPY_BYTES = 16 << 20  # of a copy that can wait
CHUNK_BYTES = 256 << 20  # page-locked at once
SPARE = 3  # places of experts that have a slot too: a copy to one does not wait for one from it

log = logging.getLogger("spmoe_lite")


class Places:
    """Which expert has which place, and who has to go. Pure Python, one lock around it.

    A place is free, being filled, or filled; `held` ones stay (a thread reads or writes them). What has a
    place and is not unfilled is intact: that holds at every moment, and `settle` makes the rest from it.
    """

    def __init__(self, count: int, last_used: Mapping[ExpertKey, int]):
        self.held: dict[ExpertKey, ExpertKey | None] = {}  # and the fill that holds it
        self._count = count
        self._spare = min(SPARE, count // 32)
        self._last_used = last_used
        self._place_of: dict[ExpertKey, int] = {}
        self._unfilled: set[ExpertKey] = set()
        self._doubles: dict[ExpertKey, None] = {}  # have a slot too; the one that came first goes
        self._ages: list[tuple[int, ExpertKey]] = []  # heap of the others, corrected when looked at
        self._free = list(range(count))[::-1]

    def place(self, key: ExpertKey) -> int | None:
        """Where the expert is, or is going to be."""
        return self._place_of.get(key)

    def is_filled(self, key: ExpertKey) -> bool:
        return key in self._place_of and key not in self._unfilled

    def take(
        self, key: ExpertKey, holder: ExpertKey | None, only_for_younger: bool = False
    ) -> int | None:
        """A place for `key`, held and to be filled; None if nothing may go for it.

        only_for_younger: an expert that has no slot goes only if its last use is longer ago than that
        of `key`.
        """
        assert key not in self._place_of
        if not self._free:
            limit = self._age(key) if only_for_younger else None
            victim = self._victim(limit)
            if victim is None:
                return None
            self.drop(victim)
        self._unfilled.add(key)
        self.held[key] = holder
        self._place_of[key] = place = self._free.pop()
        return place

    def filled(self, key: ExpertKey) -> None:
        self._unfilled.discard(key)

    def release(self, key: ExpertKey) -> None:
        self.held.pop(key, None)

    def drop(self, key: ExpertKey) -> None:
        """Free the place. Ctrl-C leaves no double without one, and no unfilled place that is not said to be."""
        self._doubles.pop(key, None)
        self._free.append(self._place_of.pop(key))
        self._unfilled.discard(key)
        self.held.pop(key, None)

    def settle(self, going_on: ExpertKey | None) -> None:
        """Only what the fill of `going_on` holds is held, and any other unfilled place is free."""
        self.held = {k: by for k, by in self.held.items() if by is not None and by == going_on}
        lost = [key for key in self._unfilled if key not in self.held]
        for key in lost:
            self._place_of.pop(key, None)
        self._doubles = {key: None for key in self._doubles if key in self._place_of}
        self._unfilled.difference_update(lost)
        taken = set(self._place_of.values())
        self._free = [place for place in range(self._count)[::-1] if place not in taken]
        self._sort()

    def got_slot(self, key: ExpertKey) -> None:
        """The expert has a slot as well."""
        self._doubles[key] = None

    def lost_slot(self, key: ExpertKey) -> None:
        """The expert has its place alone."""
        self._doubles.pop(key, None)
        heapq.heappush(self._ages, (self._age(key), key))
        if len(self._ages) > 4 * self._count + 64:
            self._sort()

    def _sort(self) -> None:
        alone = self._place_of.keys() - self._doubles.keys()
        self._ages = [(self._age(key), key) for key in alone]
        heapq.heapify(self._ages)

    def _age(self, key: ExpertKey) -> int:
        return self._last_used.get(key, -1)

    def _victim(self, limit: int | None) -> ExpertKey | None:
        doubles = (key for key in self._doubles if key not in self.held)
        if len(self._doubles) > self._spare and (key := next(doubles, None)) is not None:
            return key
        return self._oldest(limit) or next(doubles, None)

    def _oldest(self, limit: int | None) -> ExpertKey | None:
        staying = []
        victim = None
        while self._ages:
            age, key = heapq.heappop(self._ages)
            if key not in self._place_of or key in self._doubles:
                continue
            if age != self._age(key):
                heapq.heappush(self._ages, (self._age(key), key))
                continue
            staying.append((age, key))
            if limit is not None and age >= limit:
                break
            if key not in self.held:
                victim = staying.pop()[1]
                break
        for entry in staying:
            heapq.heappush(self._ages, entry)
        return victim


class RamTier:
    """Experts of one pack in host memory, on their way to the slots of one slab. Close it before the pack."""

    def __init__(
        self,
        pack: Pack,
        slab: HostSlab | DeviceSlab,
        budget: int,
        last_used: Mapping[ExpertKey, int],
        counters: Counters,
        device: torch.device,
        *,
        bypass: bool,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        driver: Cuda | None = None,
    ):
        """Page-lock up to `budget` bytes; `bypass`: leave the page cache alone.

        Reports Progress("pin", done, total, "bytes"); raises `Cancelled` between two pieces. After any
        error nothing is left locked. What the system refuses is said once, and `num_places` is what it
        granted, perhaps 0. On the CPU the memory is plain.
        """
        assert pack.expert_layout is not None
        if driver is None and device.type == "cuda":
            driver = Cuda(device)
        self._stride = stride = pack.expert_layout.stride
        self._slab = slab
        self._counters = counters
        self._rows: list[np.ndarray] = []  # uint8 [stride] of each place
        self._buffers: list[np.ndarray] = []  # what they are rows of
        self._registered: list[int] = []  # where each locked buffer begins, or one about to be
        self._reads = DiskReads(pack, bypass)
        self._owned = driver, self._registered, self._buffers
        weakref.finalize(
            self, _release, self._reads.stop, *self._owned
        ).atexit = False  # the end of the process is an end, too
        try:
            self._allocate(min(budget // stride, pack.expert_count()), driver, on_progress, cancel)
            if self._rows:
                self._reads.open()
        except BaseException:
            self.close()
            raise
        self._lock = threading.RLock()  # see `ExpertStore`
        self._saved = threading.Condition(self._lock)
        self._places = Places(len(self._rows), last_used)
        self._reading: dict[ExpertKey, Read] = {}
        self._last_read: list[Read | None] = [None] * len(self._rows)  # of each place
        self._last_copy: list[Any] = [None] * len(self._rows)  # its event, None, or _UNKNOWN
        self._copies = [
            (start, min(COPY_BYTES, stride - start)) for start in range(0, stride, COPY_BYTES)
        ]

    @property
    def num_places(self) -> int:
        return len(self._rows)

    def fill(
        self,
        key: ExpertKey,
        slot: int,
        victim: ExpertKey | None,
        go_on: Callable[[], object],
        urgent: bool,
    ) -> bool:
        """Bring an expert into its slot; False if there is no place that could be had for it.

        victim: the expert whose bytes are still in the slot; it goes to a place. `go_on` is called before
        each piece and while one is waited for, and ends the fill by an error. Returns when the copies are
        ordered. Raises what reading raises: `DamagedError`, `SpmoeError`.
        """
        try:
            if victim is not None:
                with self._lock:
                    if self._places.place(key) is not None:  # which the victim must not take
                        self._places.held.setdefault(key, key)
                self._keep(victim, slot, key, go_on if urgent else lambda: None)
            place, read = self._hold(key, go_on, urgent)
            if place is None:
                return False
            self._last_copy[place] = _UNKNOWN
            pieces = self._pieces(place, read, go_on, urgent)
            event = self._slab.fill_pieces(slot, pieces, patient=not urgent)
            with self._lock:
                self._last_copy[place] = event
                self._reading.pop(key, None)
                self._places.filled(key)
                self._places.got_slot(key)
                self._places.release(key)
                if read is None:
                    self._counters.ram_hits += 1
                else:
                    self._counters.ram_misses += 1
        except BaseException:
            with self._lock:
                self._give_up(key)
            raise
        return True

    def read_ahead(self, keys: Sequence[ExpertKey]) -> None:
        """Begin to read what `fill` will be asked for next, and keep what is there."""
        for key in keys[: max(2, AHEAD_BYTES // self._stride)]:
            with self._lock:
                if self._places.place(key) is not None:
                    self._places.held.setdefault(key, None)
                elif self._start(key, None, urgent=True) is None:
                    return

    def settle(self, going_on: ExpertKey | None) -> None:
        """After a pass that was cut short: only the fill of `going_on` holds or reads anything."""
        with self._lock:
            for key in list(self._reading):  # before its place is free
                if going_on is None or self._places.held.get(key) != going_on:
                    self._stop_reading(key)
            self._places.settle(going_on)

    def close(self) -> None:
        """Wait for the reads and the device, take every lock off, give the memory back. Idempotent."""
        _release(self._reads.close, *self._owned)
        for name in ("_rows", "_last_read", "_reading"):  # views of what is given back
            if name in self.__dict__:
                getattr(self, name).clear()
        self._buffers.clear()

    def _allocate(
        self,
        count: int,
        driver: Cuda | None,
        on_progress: OnProgress | None,
        cancel: threading.Event | None,
    ) -> None:
        stride, total = self._stride, count * self._stride
        each = max(1, CHUNK_BYTES // stride)
        try:
            while (had := len(self._rows)) < count:
                check(cancel)
                if on_progress is not None:
                    on_progress(Progress("pin", had * stride, total, "bytes"))
                memory = _memory(min(each, count - had) * stride)
                self._buffers.append(memory)
                if driver is not None:
                    self._lock_pages(memory, driver)
                self._rows.extend(memory.reshape(-1, stride))
        except Refused as error:
            log.warning(
                "page-locked memory refused beyond %s of the %s asked for (%s): more experts are read "
                "from disk, which is slower; nothing else changes",
                size(len(self._rows) * stride),
                size(total),
                str(error),
            )

    def _lock_pages(self, memory: np.ndarray, driver: Cuda) -> None:
        """Register a buffer; if that is refused, the one before goes too."""
        self._registered.append(memory.ctypes.data)
        try:
            driver.register(self._registered[-1], len(memory), writable=True)
        except Refused:
            self._registered.pop()
            self._buffers.pop()
            if self._registered:  # of a quota torch and the driver need some too
                driver.unregister(self._registered[-1])
                self._registered.pop()
                del self._rows[-len(self._buffers.pop()) // self._stride :]
            raise

    def _start(self, key: ExpertKey, holder: ExpertKey | None, urgent: bool) -> Read | None:
        """Give an expert that has none a place and begin to read it. Under the lock."""
        place = self._places.take(key, holder)
        if place is None:
            return None
        before, copied = self._last_read[place], self._end_of(self._last_copy[place])
        read = Read(key, urgent, self._reads.parts, self._rows[place], before, copied)
        self._reading[key] = self._last_read[place] = read
        self._reads.start(read)
        return read

    def _end_of(self, copy: Any) -> Callable[[], object] | None:
        """What waits for a copy; nothing of it leads to the tier, or its reads would keep it."""
        if copy is None:
            return None
        return self._slab.drain if copy is _UNKNOWN else copy.synchronize

    def _pieces(
        self, place: int, read: Read | None, go_on: Callable[[], object], urgent: bool
    ) -> Iterator[Piece]:
        """What is to be copied from a place, as it comes."""
        address = self._rows[place].ctypes.data
        if read is None:
            for start, count in [(0, self._stride)] if urgent else self._copies:
                go_on()
                yield start, address + start, count
            return
        for number, (start, count) in enumerate(read.parts):
            go_on()
            self._reads.wait(read, number, go_on)
            with self._lock:
                self._counters.disk_bytes += count
            yield start, address + start, count

    def _hold(
        self, key: ExpertKey, go_on: Callable[[], object], urgent: bool
    ) -> tuple[int | None, Read | None]:
        """A place of an expert, held for its fill, and the read that is still filling it.

        (None, None) if there is no place to be had. One that another thread is saving from its slot is
        waited for: a copy from its place must be ordered after the one to it.
        """
        while True:
            with self._lock:
                place, read = self._places.place(key), self._reading.get(key)
                if place is None:
                    read = self._start(key, key, urgent)
                    return self._places.place(key), read
                if read is not None or self._places.is_filled(key):
                    self._places.held[key] = key
                    return place, read
                self._saved.wait(LOOK_SECONDS)
            go_on()

    def _keep(
        self, victim: ExpertKey, slot: int, holder: ExpertKey, go_on: Callable[[], object]
    ) -> None:
        """Have an expert that leaves its slot in a place, unless all there were used since it was.

        go_on: of a demand. A prefetch must not step aside here: a demand may wait for the victim.
        """
        with self._lock:
            if self._places.place(victim) is not None:
                self._places.lost_slot(victim)
                return
            place = self._places.take(victim, holder, only_for_younger=True)
            if place is None:
                return
            read, after = self._last_read[place], self._last_copy[place]
            self._last_copy[place] = _UNKNOWN
        self._reads.wait_over(read, go_on)
        if after is _UNKNOWN:
            self._slab.drain()
            after = None
        event = self._slab.save(slot, self._rows[place].ctypes.data, after)
        with self._lock:
            self._last_copy[place] = event
            self._places.filled(victim)
            self._places.lost_slot(victim)
            self._places.release(victim)
            self._counters.ram_returns += 1
            self._saved.notify_all()

    def _give_up(self, holder: ExpertKey) -> None:
        """Let go of what a fill holds; a place that is not filled is free again."""
        for key in [key for key, by in self._places.held.items() if by == holder]:
            self._stop_reading(key)
            if self._places.place(key) is not None and not self._places.is_filled(key):
                self._places.drop(key)
            self._places.release(key)

    def _stop_reading(self, key: ExpertKey) -> None:
        if (read := self._reading.get(key)) is not None:
            self._reads.give_up(read)
            del self._reading[key]  # now: a read that nobody knows of would write on


_UNKNOWN = object()  # in place of the event of a copy that an interrupt has taken


def _memory(count: int) -> np.ndarray:
    """uint8 [count], zero, from a page on; in huge pages where the system has them to give."""
    available = available_bytes(torch.device("cpu"))
    if available < 2 * count:  # locking the last of it would end some process
        raise Refused(f"{size(available)} of RAM are available")
    try:
        if os.name != "posix":
            return np.frombuffer(mmap.mmap(-1, count), dtype=np.uint8)
        memory = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise Refused(f"no memory to be had: {error}") from error
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # a child's copies would move locked pages
        if hasattr(mmap, advice):
            with suppress(OSError):
                memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, dtype=np.uint8)


def _release(
    end_reads: Callable[[], None],
    driver: Cuda | None,
    registered: list[int],
    buffers: list[np.ndarray],
) -> None:
    """End the reads and wait for the device, take the locks off, and let the memory go.

    A read that nobody waited for has its memory from here on alone.
    """
    end_reads()
    release(driver, registered)
    buffers.clear()
