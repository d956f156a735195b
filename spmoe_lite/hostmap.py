"""The pack's experts in page-locked host memory: each at an address that the GPU reads by itself.

For packs that RAM holds; `ramtier.py` is for the others.

Every layer's expert file is mapped read-only, brought into memory by large explicit reads on several
threads (page faults on a cold file are slow, and a disk error in one ends the process), and registered
with the CUDA runtime as one span. Copies from there run at the speed of the bus, kernels read it without a
copy, and the only memory it takes is the page cache, which then stays. On the CPU an address is the
mapping's own and nothing is locked: what runs on addresses is tested without a GPU.

WSL, Windows and some containers refuse beyond a quota far below RAM. What is refused has no address, and
is copied through the slab's ring instead; one warning says so. Refusals change speed alone.

Interrupts: a span is noted before it is registered, and taken off the list after it was unregistered, so
that `close` finds it whatever came between; a map that nobody kept closes itself.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from spmoe_lite.cudart import Cuda, Refused, release
from spmoe_lite.progress import OnProgress, Progress, check, size

if TYPE_CHECKING:
    from spmoe_lite.pack import Pack

PIECE = 16 << 20  # bytes of one read, and between two looks at `cancel`
READERS = min(8, os.cpu_count() or 1)
SHARE = 0.75  # of available RAM, by default; what is page-locked is lost to every other program

log = logging.getLogger("spmoe_lite")


class _Span(NamedTuple):
    """The registered experts 0 to `experts` - 1 of one layer; expert e is at `address` + e x stride."""

    address: int
    experts: int


class HostMap:
    """Device addresses of a pack's experts. Close it before the pack, with no kernel or copy to come."""

    def __init__(
        self,
        pack: Pack,
        device: torch.device,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
        driver: Cuda | None = None,
    ):
        """Map and page-lock layer by layer, whatever RAM there is (`default_pin` asks).

        Reports Progress("pin", done, total, "bytes"); raises `Cancelled` within a read or the
        registration of one layer, `DamagedError` for a file that was cut short. After any error
        nothing is left registered.
        """
        self._pack = pack
        self._driver = driver
        if driver is None and device.type == "cuda":
            self._driver = Cuda(device)
        self._stride = pack.expert_layout.stride if pack.expert_layout is not None else 0
        self._views: dict[int, np.ndarray] = {}  # layer -> uint8 [experts, stride]: keeps it mapped
        self._spans: dict[int, _Span] = {}
        self._registered: list[int] = []  # where each registered span begins, or one about to be
        owned = self._driver, self._registered, self._views
        weakref.finalize(
            self, _release, *owned
        ).atexit = False  # the end of the process is an end, too
        try:
            self._pin_layers(on_progress, cancel)
        except BaseException:
            self.close()
            raise

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the experts that have an address."""
        return sum(span.experts for span in list(self._spans.values())) * self._stride

    def address(self, layer: int, expert: int) -> int | None:
        """Where the device reads the expert's `stride` bytes; None where it cannot."""
        span = self._spans.get(layer)
        if span is None or expert >= span.experts:
            return None
        return span.address + expert * self._stride

    def host(self, layer: int, expert: int) -> np.ndarray:
        """uint8 [stride], read-only: the expert in the mapped file, page-locked or not."""
        return self._pack.expert_bytes(layer, expert)

    def close(self) -> None:
        """Wait for the device, then take every lock off; the pack unmaps when it closes. Idempotent."""
        self._spans.clear()
        _release(self._driver, self._registered, self._views)

    def _pin_layers(self, on_progress: OnProgress | None, cancel: threading.Event | None) -> None:
        layers = self._pack.config.num_hidden_layers if self._stride else 0
        total, done = self._pack.expert_count() * self._stride, 0

        def advance(count: int) -> None:
            nonlocal done
            check(cancel)
            done += count
            if on_progress is not None:
                on_progress(Progress("pin", done, total, "bytes"))

        readers = ThreadPoolExecutor(READERS, "spmoe-pin")
        try:
            for layer in range(layers):
                check(cancel)
                self._pin(layer, readers, advance)
        except Refused as error:
            log.warning(
                "page-locked memory refused beyond %s of the %s asked for (%s): the other experts are "
                "copied through a small buffer, which is slower; nothing else changes",
                size(self.pinned_bytes),
                size(total),
                str(
                    error
                ),  # a record that is kept must not keep the frames, and the models in them
            )
        finally:
            readers.shutdown(cancel_futures=True)

    def _pin(self, layer: int, readers: ThreadPoolExecutor, advance: Callable[[int], None]) -> None:
        """Give the experts of a layer their addresses."""
        count = self._pack.config.num_local_experts
        try:
            self._views[layer] = view = self._pack.layer_bytes(layer)
        except (OSError, ValueError) as error:
            raise Refused(f"the file cannot be mapped: {error}") from error
        start, length = view.ctypes.data, count * self._stride
        if self._driver is None:
            self._spans[layer] = _Span(start, count)
            return
        pieces = [
            (expert, offset, min(PIECE, self._stride - offset))
            for expert in range(count)
            for offset in range(0, self._stride, PIECE)
        ]

        def bring_in(piece: tuple[int, int, int]) -> int:
            expert, offset, length = piece
            if not _in_memory(start + expert * self._stride + offset, length):
                buffer = np.empty(length, dtype=np.uint8)
                self._pack.read_expert(layer, expert, buffer, offset)
            return length

        for read in readers.map(bring_in, pieces):
            advance(read)
        begin = start - start % mmap.PAGESIZE
        end = -(-(start + length) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._registered.append(begin)
        try:
            address = self._driver.register(begin, end - begin)
        except Refused:
            self._registered.pop()
            if self._registered:  # of a quota torch and the driver need some too
                self._spans.popitem()
                self._driver.unregister(self._registered[-1])
                self._registered.pop()
            raise
        self._spans[layer] = _Span(address + start - begin, count)


def _release(driver: Cuda | None, registered: list[int], views: dict[int, np.ndarray]) -> None:
    """Take the locks off, once the device is done, and let the mappings go."""
    release(driver, registered)
    views.clear()


def default_pin(pack: Pack, available_ram: int) -> int:
    """Bytes to page-lock where nobody says: the whole pack if it fits, else as many experts as do."""
    if pack.expert_layout is None:
        return 0
    stride = pack.expert_layout.stride
    return min(pack.expert_count(), int(available_ram * SHARE) // stride) * stride


@functools.cache
def _libc() -> Any:
    """mincore, where the system has it."""
    return ctypes.CDLL(None) if os.name == "posix" else None


def _in_memory(address: int, size: int) -> bool:
    """Whether the page cache holds all of a mapped range, so that reading it would be a waste."""
    address -= (lost := address % mmap.PAGESIZE)
    pages = np.zeros(-(-(size + lost) // mmap.PAGESIZE), dtype=np.uint8)
    arguments = (
        ctypes.c_void_p(address),
        ctypes.c_size_t(size + lost),
        ctypes.c_void_p(pages.ctypes.data),
    )
    libc = _libc()
    return libc is not None and libc.mincore(*arguments) == 0 and bool((pages & 1).all())
