"""Experts read from disk: in parts, by several threads, a demand's before a prefetch's.

A read writes to memory that may have been written to, or copied from, for another expert: its first byte
waits for the end of both. It can be given up at any time; parts that are begun by then still arrive. Where
the pack is larger than RAM the reads pass by the page cache (O_DIRECT, or the pages are given back), which
would hold every byte a second time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from spmoe_lite.pack import Pack
    from spmoe_lite.slots import ExpertKey

READERS = 8  # threads that wait for the disk
LEAST_PART, MOST_PART = 1 << 20, 4 << 20  # bytes of one read
BLOCK = 4096  # what O_DIRECT wants everything to be a multiple of
LOOK_SECONDS = 0.1  # between two looks at `go_on` while a read is waited for


class Read:
    """An expert on its way from the disk to its place."""

    def __init__(
        self,
        key: ExpertKey,
        urgent: bool,
        parts: Sequence[tuple[int, int]],
        out: np.ndarray,
        before: Read | None,
        copied: Callable[[], object] | None,
    ):
        """parts: (first byte, bytes). before: the last read to the same place; copied: waits for its copies."""
        self.key = key
        self.urgent = urgent
        self.parts = parts
        self.out = out
        self.before: tuple[Read | None, Callable[[], object] | None] | None = (before, copied)
        self.begun = 0  # parts
        self.running = 0
        self.done: set[int] = set()
        self.error: BaseException | None = None


class DiskReads:
    """The threads that read, and what they are to read: demands first, then in the order asked for."""

    def __init__(self, pack: Pack, bypass: bool):
        assert pack.expert_layout is not None
        stride = pack.expert_layout.stride
        part = -(-stride // READERS // BLOCK) * BLOCK
        part = max(LEAST_PART, min(MOST_PART, part))
        self.parts = [(start, min(part, stride - start)) for start in range(0, stride, part)]
        self._disk = _Disk(pack, bypass)
        self._lock = threading.RLock()  # see `ExpertStore`
        self._changed = threading.Condition(self._lock)
        self._queue: list[Read] = []  # reads of which parts are not begun
        self._threads = ThreadPoolExecutor(READERS, "spmoe-disk")

    def start(self, read: Read) -> None:
        with self._lock:
            ahead = sum(other.urgent for other in self._queue) if read.urgent else len(self._queue)
            self._queue.insert(ahead, read)
        for _ in read.parts[:READERS]:
            self._threads.submit(self._work)

    def wait(self, read: Read, part: int, go_on: Callable[[], object]) -> None:
        """Return when a part has been read; raise what reading it raised."""
        while True:
            with self._lock:
                if part in read.done:
                    return
                if read.error is None:
                    self._changed.wait(LOOK_SECONDS)
                elif part not in read.done:
                    error, read.error = read.error, None
                    try:
                        raise error
                    finally:
                        del error  # or it and its traceback would hold each other
            go_on()

    def give_up(self, read: Read) -> None:
        """No further part is begun."""
        with self._lock:
            if read in self._queue:
                self._queue.remove(read)

    def wait_over(self, read: Read | None) -> None:
        """Return when no thread writes to the place of a read that was given up or has ended."""
        while read is not None:
            with self._lock:
                while read.running:
                    self._changed.wait()
            read = read.before[0] if read.before is not None else None  # it has waited for nobody

    def close(self) -> None:
        with self._lock:
            self._queue.clear()
        with suppress(RuntimeError):  # one of the threads itself let go last
            self._threads.shutdown(cancel_futures=True)
        self._disk.close()

    def _work(self) -> None:
        """Read parts until there are none: whoever began a read may have been kept from asking for all."""
        while self._read_part():
            pass

    def _read_part(self) -> bool:
        """Read the next part; False if there is none."""
        with self._lock:
            if not self._queue:
                return False
            read = self._queue[0]
            part, before = read.begun, read.before
            read.begun += 1
            read.running += 1
            if read.begun == len(read.parts):
                self._queue.pop(0)
        error = None
        try:
            if before is not None:
                self._await(*before)
                read.before = None
            start, count = read.parts[part]
            self._disk.read(*read.key, read.out[start : start + count], start)
        except BaseException as failed:
            error = failed
        with self._lock:
            read.running -= 1
            if error is None:
                read.done.add(part)
            else:
                read.error = error
                if read in self._queue:
                    self._queue.remove(read)
            error = None
            self._changed.notify_all()
        return True

    def _await(self, read: Read | None, copied: Callable[[], object] | None) -> None:
        """Until nobody writes to a place or copies from it."""
        self.wait_over(read)
        if copied is not None:
            copied()


class _Disk:
    """Reads of experts, by the page cache or past it."""

    def __init__(self, pack: Pack, bypass: bool):
        self._pack = pack
        self._bypass = bypass
        self._lock = threading.Lock()
        self._direct: dict[int, int | None] = {}  # layer -> its file, open for direct reads

    def read(self, layer: int, expert: int, out: np.ndarray, offset: int) -> None:
        """As `Pack.read_expert`."""
        if not self._bypass:
            self._pack.read_expert(layer, expert, out, offset)
            return
        file, start = self._pack.expert_file(layer)
        start += expert * self._pack.expert_layout.stride + offset  # type: ignore[union-attr]
        if not self._read_direct(layer, file, start, out):
            self._pack.read_expert(layer, expert, out, offset)
            if hasattr(os, "posix_fadvise"):
                with suppress(OSError):
                    os.posix_fadvise(file, start, len(out), os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        with self._lock:
            for file in self._direct.values():
                if file is not None:
                    os.close(file)
            self._direct.clear()

    def _read_direct(self, layer: int, file: int, start: int, out: np.ndarray) -> bool:
        """Whether all of it could be read that way; else `Pack.read_expert` reads it, or says why not."""
        if (start | len(out) | out.ctypes.data) % BLOCK:
            return False
        with self._lock:
            if layer not in self._direct:
                self._direct[layer] = _open_direct(file)
            direct = self._direct[layer]
        if direct is None:
            return False
        try:
            return os.preadv(direct, [out.data], start) == len(out)
        except OSError:
            return False


def _open_direct(file: int) -> int | None:
    """The same file once more, for reads past the page cache; None where there is no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with suppress(OSError):
        return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    return None
