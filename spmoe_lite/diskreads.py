"""Experts read from disk: in parts, by several threads, a demand's before a prefetch's.

A read writes to memory that may have been written to, or copied from, for another expert: its first byte
waits for the end of both. It can be given up at any time; parts that are begun by then still arrive. Where
the pack is larger than RAM the reads pass by the page cache (O_DIRECT, or the pages are given back), which
would hold every byte a second time.

Ctrl-C can strike whoever begins a read, and an executor's or an event's lock stays locked for good if it
strikes there: the threads are there before, and a queue that is written in C wakes them. The garbage collector
can run in any of them, inside any lock, and drop the engine: `stop` takes no lock and waits for nobody.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import FileIO
from queue import SimpleQueue
from typing import TYPE_CHECKING

from spmoe_lite.errors import BusyError

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
        self._asked: SimpleQueue[None] = SimpleQueue()  # to look at it, one item for one thread
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def open(self) -> None:
        """Begin the threads."""
        _open.add(self)
        for number in range(READERS):
            name = f"spmoe-disk_{number}"
            self._threads.append(threading.Thread(target=self._work, name=name, daemon=True))
            self._threads[-1].start()

    def start(self, read: Read) -> None:
        with self._lock:
            ahead = sum(other.urgent for other in self._queue) if read.urgent else len(self._queue)
            self._queue.insert(ahead, read)
        for _ in read.parts[:READERS]:
            self._asked.put(None)

    def wait(self, read: Read, part: int, go_on: Callable[[], object]) -> None:
        """Return when a part has been read; raise what reading it raised, or what `go_on` raises."""
        while True:
            with self._lock:
                if part in read.done:
                    return
                if read.error is not None:
                    error, read.error = read.error, None
                    try:
                        raise error
                    finally:
                        del error  # or it and its traceback would hold each other
                if self._stopped:
                    raise BusyError("the engine was closed while an expert was being read")
                self._changed.wait(LOOK_SECONDS)
            go_on()

    def give_up(self, read: Read) -> None:
        """No further part is begun."""
        with self._lock:
            if read in self._queue:
                self._queue.remove(read)

    def wait_over(self, read: Read | None, go_on: Callable[[], object]) -> None:
        """Return when no thread writes to the place of a read that was given up or has ended.

        Raises what `go_on` raises.
        """
        while read is not None:
            with self._lock:
                running = read.running > 0
                if running:
                    self._changed.wait(LOOK_SECONDS)
            if running:
                go_on()
            else:
                before = read.before
                read = None if before is None else before[0]  # it has waited for nobody

    def stop(self) -> None:
        """Have the threads end after the parts at hand, from anywhere."""
        self._stopped = True
        self._asked.put(None)

    def close(self) -> None:
        """Stop, and wait for the threads to end. Idempotent.

        In one of them, where a finalizer may close the engine, there is no waiting: they end by themselves.
        """
        self.stop()
        alive = [thread for thread in self._threads if thread.is_alive()]
        if threading.get_ident() in [thread.ident for thread in alive]:
            return
        for thread in alive:
            thread.join()
        self._queue.clear()
        self._disk.close()

    def _work(self) -> None:
        """Read parts until there are none: whoever began a read may have been kept from asking for all."""
        while not self._stopped:
            self._asked.get()
            while self._read_part():
                pass
        self._asked.put(None)  # for the next one

    def _read_part(self) -> bool:
        """Read the next part; False if there is none."""
        with self._lock:
            if self._stopped or not self._queue:
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
            self._changed.notify_all()
        del read, error  # which its traceback would keep, and they the traceback
        return True

    def _await(self, read: Read | None, copied: Callable[[], object] | None) -> None:
        """Until nobody writes to a place or copies from it."""
        self.wait_over(read, lambda: None)
        if copied is not None:
            copied()


class _Disk:
    """Reads of experts, by the page cache or past it."""

    def __init__(self, pack: Pack, bypass: bool):
        self._pack = pack
        self._bypass = bypass
        self._lock = threading.Lock()
        self._direct: dict[int, FileIO | None] = {}  # layer -> its file, open for direct reads

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
        for file in self._direct.values():
            if file is not None:
                file.close()

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
            return os.preadv(direct.fileno(), [out.data], start) == len(out)
        except OSError:
            return False


def _open_direct(file: int) -> FileIO | None:
    """The same file once more, for reads past the page cache; None where there is no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with suppress(OSError):
        flags = os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC
        return FileIO(os.open(f"/proc/self/fd/{file}", flags))
    return None


_open: weakref.WeakSet[DiskReads] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is waiting inside torch when the interpreter goes would end the process badly."""
    for reads in list(_open):
        reads.close()
