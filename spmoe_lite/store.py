"""Expert tiers: the pack on disk, places in RAM (`ramtier.py`), and the slots that the kernels read.

`serve` is the seam between the model and everything about placement. It takes the expert ids that the
router chose for one layer and yields groups of experts that are in place, each as the device array `use`
the expert kernels take: resident ones first, then those that were missing, in as many groups as the slots
allow. The model never learns where an expert came from.

Two threads meet here: the decode thread (`serve`, misses) and the prefetch worker (`prefetch`). One lock
guards table and counters and is never held during a copy; a slot being filled belongs to whoever fills
it. A prefetch goes in pieces: between two of them it lets a demand pass, and it is given up when its layer
has begun and does not wait for it. A pass may end at any moment, by an error or by Ctrl-C: the next one
puts the table right. Nothing but `end_pass` changes recency, and only for accepted rows.

`serve` reads the ids on the host, which on a GPU is one synchronisation per layer. A sweep does without: a
pass of so many rows on a GPU that every expert is as good as sure to be chosen. The host orders the whole
pass at once; what has no slot passes through landing slots, which take turns over all layers, so that the
bus carries the next layer's experts while this one is computed, and no slot of decoding loses what it holds.
Between prompts captured steps have the landing slots, one for each of the first layers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from spmoe_lite.device import read_back, send
from spmoe_lite.diskreads import LOOK_SECONDS
from spmoe_lite.hostmap import HostMap
from spmoe_lite.pack import Pack
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.ramtier import RamTier
from spmoe_lite.slab import DeviceSlab, GoOn, HostSlab
from spmoe_lite.slots import ExpertKey, SlotTable
from spmoe_lite.stats import Counters

SURE_ROWS = 16  # of a pass, for each of a layer's experts, on average: none is left out
STEP_ASIDE_SECONDS = 1.0  # at most, that a piece of a prefetch waits for a demand
PREFILL_ROWS = 32  # a pass of more rows is prefill: it must not flush what decoding has gathered


class Late(Exception):
    """A prefetch whose layer has begun, and does not wait for it."""


class ExpertStore:
    """Lends the experts of one pack to the MoE blocks of one model."""

    def __init__(
        self,
        pack: Pack,
        slab: HostSlab | DeviceSlab,
        table: SlotTable,
        counters: Counters,
        device: torch.device,
        host: HostMap | None = None,
        landing: int = 0,
    ):
        """`host`: where experts have an address that the device reads; else they come from `pack`.

        landing: slots of the slab behind those of the table, for the experts of a sweep.
        """
        self.table = table
        self.counters = counters
        self.cancel: threading.Event | None = None
        self.tier: RamTier | None = None  # where experts that have no address are kept on their way
        self._routed: dict[int, Any] = {}  # layer -> the ids of each row, perhaps on the device
        self._pack = pack
        self._host = host
        self._slab = slab
        self._device = device
        # In `with` itself: Condition's own is no match for Ctrl-C. Reentrant: a plain lock's waiter that
        # Ctrl-C strikes before it has the lock again would let go of another thread's.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._in_pass = False  # still True at the next `begin_pass` if a pass was cut short
        self._copying: ExpertKey | None = None  # by the worker
        self._demanding = False  # the decode thread is copying
        self._awaited: set[ExpertKey] = set()  # being copied by the worker, and waited for
        self._layer = -1  # being served: prefetches for it and for those before are late
        self._position = 0  # accepted tokens so far: the clock of recency
        self._prefill = False
        self._landing = [table.num_slots + i for i in range(landing)]
        self._landed = 0  # experts that have passed through them
        self._every: dict[int, torch.Tensor] = {}  # layer -> `use` of all its experts, if all fit
        lands = landing > 0 and self.host_addresses() is not None
        self._can_sweep = device.type != "cpu" and (table.all_fit or lands)
        self._missed: set[ExpertKey] = set()  # not in place when their layer of this pass began
        self._expected: set[ExpertKey] = set()  # predicted for the step at hand: no prefetch evicts
        self._prefetched: set[ExpertKey] = set()  # copied on a prediction for the step at hand
        self._unused: set[ExpertKey] = set()  # copied on a prediction, not needed so far

    # --- one pass of the model -----------------------------------------------------------------

    def begin_pass(self, rows: int) -> None:
        """A forward pass over `rows` tokens starts; what one that was cut short left is put right."""
        with self._lock:
            if self._in_pass:
                self.table.settle(() if self._copying is None else (self._copying,))
                if self.tier is not None:
                    self.tier.settle(self._copying)
            self._in_pass = True
            self._layer = -1
            self._demanding = False
            self._awaited.clear()
        self._prefill = rows > PREFILL_ROWS
        self._routed.clear()
        self._missed.clear()

    @property
    def trace(self) -> dict[int, list[list[int]]]:
        """The expert ids of each row of the pass, by layer."""
        for layer, rows in self._routed.items():
            if isinstance(rows, torch.Tensor):
                self._routed[layer] = rows.tolist()
        return self._routed

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield groups `use` [n, 3] int64: expert id, address to read, address to also write (0: none).

        experts [T, k] int32 are the router's choices. Every chosen expert appears in exactly one group
        and is copied at most once. A group must be launched before the next one is asked for.
        """
        sweep = self._can_sweep and experts.numel() >= SURE_ROWS * self.table.num_experts
        if sweep and layer in self._every:
            self._routed[layer] = experts
            yield self._every[layer]
            return
        if sweep:
            self._routed[layer], wanted = experts, list(range(self.table.num_experts))
        else:
            ids = read_back(experts)
            self._routed[layer] = ids if self._prefill else ids.tolist()
            wanted = sorted(set(ids.flatten().tolist()))
        ready, arriving, missing = self._sort_out(layer, wanted)
        passing: list[int] = []
        if sweep and self._landing:
            free = self.table.num_free(layer)
            missing, passing = missing[:free], missing[free:]
        done: list[ExpertKey] = []  # copied for this pass: in prefill the first to make room
        while ready or arriving or missing:
            loaded = self._load_some(layer, missing, done, must=not (ready or arriving))
            if ready:
                yield (use := self._lend(layer, ready))
                self._give_back(layer, ready)
                if sweep and self.table.all_fit and ready == wanted:
                    self._every[layer] = use
            ready, arriving = self._await(layer, arriving, missing) + loaded, []
            done += [(layer, expert) for expert in loaded]
        at_once = max(1, len(self._landing) // 2)
        for i in range(0, len(passing), at_once):
            check(self.cancel)
            yield from self._land(layer, passing[i : i + at_once])

    def _land(self, layer: int, experts: list[int]) -> Iterator[torch.Tensor]:
        """A group of experts through landing slots, whose last readers the copies wait for."""
        assert self._host is not None
        slots, stride = [], self._pack.expert_layout.stride
        for expert in experts:
            slots.append(self._landing[self._landed % len(self._landing)])
            self._landed += 1
            source = self._host.address(layer, expert)
            assert source is not None
            self._slab.fill_pieces(slots[-1], [(0, source, stride)])
        with self._lock:
            self.counters.loads += len(experts)
            self.counters.bytes_moved += len(experts) * stride
        yield self._use(experts, slots)
        self._slab.mark_read(slots)

    def end_pass(self, accepted_rows: int) -> None:
        """The first `accepted_rows` rows of the pass stay: refresh recency from them, count their hits."""
        for layer, rows in self._routed.items():
            if isinstance(rows, torch.Tensor):
                self._routed[layer] = read_back(rows)
        with self._lock:
            for layer, rows in self._routed.items():
                for expert, row in _last_uses(rows, accepted_rows):
                    self.table.credit((layer, expert), self._position + row + 1)
            self._position += accepted_rows
            if not self._prefill:
                self._count_hits(accepted_rows)
            self._layer = -1
            self._expected.clear()
            self._prefetched.clear()
            self._in_pass = False

    def load_all(self, on_progress: OnProgress | None, cancel: threading.Event | None) -> None:
        """Fill the slots of a model whose experts all have one."""
        c = self._pack.config
        keys = [(i, e) for i in range(c.num_hidden_layers) for e in range(c.num_local_experts)]
        stride = self._pack.expert_layout.stride
        for done, key in enumerate(keys):
            check(cancel)
            if on_progress is not None:
                on_progress(Progress("experts", done * stride, len(keys) * stride, "bytes"))
            if self.table.slot(key) is None:
                placed = self.table.place(key)
                assert placed is not None
                self._fill(key, placed[0])
        self._slab.wait_filled([self.table.slot(key) for key in keys])

    def addresses(self) -> torch.Tensor:
        """int64 [L, E] on the device: the slot of every expert, where all have one."""
        c = self._pack.config
        rows = [
            [self._slab.address(self.table.slot((layer, e))) for e in range(c.num_local_experts)]
            for layer in range(c.num_hidden_layers)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self._device)

    def found(
        self,
        trace: np.ndarray,
        missed: np.ndarray | None,
        fetched: np.ndarray | None,
        late: np.ndarray | None,
    ) -> None:
        """What a pass without the host did: trace [L, T, k], missed [L, E], fetched and late [n, 2]."""
        self._in_pass, self._prefill = True, False
        self._routed = dict(enumerate(trace.tolist()))
        self._missed, self._prefetched = set(), set()
        if missed is None or fetched is None or late is None:
            return
        self._missed = {(layer, e) for layer, e in np.argwhere(missed).tolist()}
        self._prefetched = copied = {(layer, e) for layer, e in fetched.tolist()}
        begun = copied.union(map(tuple, late.tolist()))
        used = {(layer, e) for layer, rows in self.trace.items() for row in rows for e in row}
        self.counters.loads += len(self._missed)
        self.counters.prefetches += len(copied | (begun & used))
        self.counters.prefetch_useful += len((copied & used) - self._missed)
        self.counters.prefetch_late += len(begun & self._missed)
        self.counters.prefetch_wasted += len(copied - used)
        self.counters.prefetch_dropped += len(begun - copied - used)
        moved = len(self._missed) + len(fetched)
        self.counters.bytes_moved += moved * self._pack.expert_layout.stride

    def host_addresses(self) -> torch.Tensor | None:
        """int64 [L, E], where the device reads each expert in host memory; None if it cannot, for any."""
        c, host = self._pack.config, self._host
        rows = [
            [None if host is None else host.address(layer, e) for e in range(c.num_local_experts)]
            for layer in range(c.num_hidden_layers)
        ]
        return None if any(None in row for row in rows) else torch.tensor(rows, dtype=torch.int64)

    def places(self, layer: int) -> list[tuple[int, int | None]]:
        """The slots that captured steps may use for a layer, and who is in them.

        A landing slot more for each of the first layers: nothing lands while the device has the slots.
        """
        return [*self.table.places(layer), *((slot, None) for slot in self._landing[layer:][:1])]

    @property
    def base(self) -> int:
        """Address of the first slot."""
        return self._slab.address(0)

    @property
    def position(self) -> int:
        """Accepted tokens so far, the clock of recency."""
        return self._position

    def would_miss(self, key: ExpertKey) -> bool:
        """Whether `key`, needed by the pass that just ran, was absent before this step's prefetches."""
        return key in self._missed or key in self._prefetched

    # --- the decode thread's part --------------------------------------------------------------

    def _sort_out(self, layer: int, wanted: list[int]) -> tuple[list[int], list[int], list[int]]:
        """Split experts into (in place, on their way, absent); the first two are held."""
        ready: list[int] = []
        arriving: list[int] = []
        missing: list[int] = []
        with self._lock:
            self._layer = layer
            for expert in wanted:
                key = (layer, expert)
                slot = self.table.slot(key)
                if slot is None:
                    self._missed.add(key)
                    missing.append(expert)
                    continue
                self.table.hold(key)
                filling = self.table.is_filling(key)
                if key in self._unused:
                    self._unused.discard(key)
                    late = filling or not self._slab.arrived(slot)
                    self.counters.prefetch_late += late
                    self.counters.prefetch_useful += not late
                    if late:
                        self._missed.add(key)
                if filling:
                    self._awaited.add(key)
                (arriving if filling else ready).append(expert)
        return ready, arriving, missing

    def _load_some(
        self, layer: int, missing: list[int], done: list[ExpertKey], must: bool
    ) -> list[int]:
        """Copy as many of `missing` as can be given a slot now, taking them off the list.

        In prefill that is one at a time: it arrives while the one before is computed, then its slot goes
        to the next, and two slots see the whole layer through. With `must` at least one is loaded: if
        the prefetch worker is filling every slot of the pool, wait for it.
        """
        loaded: list[int] = []
        started = time.perf_counter()
        try:
            while missing and not (self._prefill and loaded):
                check(self.cancel)
                key = (layer, missing[0])
                if self.tier is not None:
                    self.tier.read_ahead([(layer, expert) for expert in missing])
                with self._lock:
                    placed = self._take_slot(key, done)
                    while placed is None and must and not loaded:
                        assert self.table.filling_in_pool(layer), "no slot, and nobody to wait for"
                        self._changed.wait(LOOK_SECONDS)
                        check(self.cancel)
                        placed = self._take_slot(key, done)
                    if placed is None:
                        break
                    self._demanding = True  # and loaded something, so that it waits for nobody
                    self.table.hold(key)  # before the worker can see it filled
                self._fill(key, *placed)
                with self._lock:
                    self.counters.loads += 1
                loaded.append(missing.pop(0))
        finally:
            with self._lock:
                self._demanding = False
                self._changed.notify_all()
        self.counters.stall_seconds += time.perf_counter() - started
        return loaded

    def _take_slot(
        self, key: ExpertKey, done: list[ExpertKey]
    ) -> tuple[int, ExpertKey | None] | None:
        """A slot, and who left it: rather lose what a later layer was guessed to need than stall."""
        first = done if self._prefill else ()
        later = {k for k in self._expected if k[0] != key[0]} if self.table.shared else ()
        placed = self.table.place(key, protected=later, first=first) or self.table.place(key)
        return self._evicted(placed)

    def _lend(self, layer: int, experts: list[int]) -> torch.Tensor:
        """The group as the kernels take it; their reads are ordered after the copies."""
        return self._use(experts, [self.table.slot((layer, expert)) for expert in experts])

    def _use(self, experts: list[int], slots: list[int]) -> torch.Tensor:
        self._slab.wait_filled(slots)
        lines = [(e, self._slab.address(s), 0) for e, s in zip(experts, slots, strict=True)]
        return send(torch.tensor(lines, dtype=torch.int64), self._device)

    def _give_back(self, layer: int, experts: list[int]) -> None:
        keys = [(layer, expert) for expert in experts]
        self._slab.mark_read([self.table.slot(key) for key in keys])
        with self._lock:
            self.table.release(keys)

    def _await(self, layer: int, experts: list[int], missing: list[int]) -> list[int]:
        """Wait for the slots the worker is filling; what its copy failed on is then `missing`."""
        arrived: list[int] = []
        started = time.perf_counter()
        for expert in experts:
            key = (layer, expert)
            with self._lock:
                while self.table.is_filling(key):
                    check(self.cancel)
                    self._changed.wait(LOOK_SECONDS)
                self._awaited.discard(key)
                lost = self.table.slot(key) is None
            (missing if lost else arrived).append(expert)
        self.counters.stall_seconds += time.perf_counter() - started
        return arrived

    # --- the prefetch worker's part ------------------------------------------------------------

    def expect(self, layer: int, experts: list[int]) -> None:
        """The step at hand is expected to use these experts: prefetching evicts none of them."""
        with self._lock:
            self._expected.update((layer, expert) for expert in experts)

    def prefetch(self, layer: int, expert: int) -> None:
        """Copy a predicted expert into a slot, unless it is there, too late, or nothing may leave."""
        key = (layer, expert)
        with self._lock:
            if self.table.slot(key) is not None:
                return
            placed = None
            if layer > self._layer:
                placed = self._evicted(self.table.place(key, protected=self._expected))
            if placed is None:
                self.counters.prefetch_dropped += 1
                return
            self._unused.add(key)
            self._prefetched.add(key)
            self._copying = key
        try:
            self._fill(key, *placed, go_on=lambda: self._step_aside(key))
        except Late:
            with self._lock:
                self._prefetched.discard(key)
                self.counters.prefetch_dropped += 1

    def _step_aside(self, key: ExpertKey) -> None:
        """Between two pieces of a prefetch: wait while a demand is copied; `Late` if it is of no use."""
        with self._lock:
            self._changed.wait_for(lambda: not self._demanding, STEP_ASIDE_SECONDS)
            if key[0] <= self._layer and key not in self._awaited:
                raise Late

    # --- shared --------------------------------------------------------------------------------

    def _fill(
        self,
        key: ExpertKey,
        slot: int,
        victim: ExpertKey | None = None,
        go_on: GoOn | None = None,
    ) -> None:
        """Copy one expert into its slot, which `victim` has left; on failure the slot is free again.

        `go_on`: of a prefetch, called between its pieces.
        """

        def read(out: np.ndarray, offset: int) -> None:
            self._pack.read_expert(*key, out, offset)

        source = None if self._host is None else self._host.address(*key)
        try:
            if source is not None:
                self._slab.fill_from(slot, source, go_on)
            elif self.tier is None or not self.tier.fill(
                key, slot, victim, go_on or self._check_cancel, urgent=go_on is None
            ):
                self._slab.fill(slot, read, go_on)
        except BaseException:
            with self._lock:
                self.table.drop(key)
                self._unused.discard(key)
                if go_on is not None:
                    self._copying = None
                self._changed.notify_all()
            raise
        with self._lock:
            self.table.filled(key)
            self.counters.bytes_moved += self._pack.expert_layout.stride
            if go_on is not None:
                self._copying = None
                self.counters.prefetches += 1
            self._changed.notify_all()

    def _check_cancel(self) -> None:
        check(self.cancel)

    def _evicted(
        self, placed: tuple[int, ExpertKey | None] | None
    ) -> tuple[int, ExpertKey | None] | None:
        """A placement, after noting that a prefetched expert left unused."""
        if placed is not None and placed[1] in self._unused:
            self._unused.discard(placed[1])
            self.counters.prefetch_wasted += 1
        return placed

    def _count_hits(self, accepted_rows: int) -> None:
        for layer, rows in self.trace.items():
            chosen = [(layer, expert) for row in rows[:accepted_rows] for expert in row]
            self.counters.accesses += len(chosen)
            self.counters.access_hits += sum(key not in self._missed for key in chosen)
            self.counters.unique += len(set(chosen))
            self.counters.unique_hits += len(set(chosen) - self._missed)


def _last_uses(rows: torch.Tensor | list[list[int]], accepted: int) -> Iterable[tuple[int, int]]:
    """(expert, the last of the first `accepted` rows that chose it); rows [T, k] are ids on the host.

    Those of a prompt stay an array: Python's collector runs for as many lists as that has rows and layers.
    """
    if not isinstance(rows, torch.Tensor):
        return {expert: row for row, ids in enumerate(rows[:accepted]) for expert in ids}.items()
    ids = rows[:accepted].numpy()
    last = np.full(ids.max(initial=0) + 1, -1)
    np.maximum.at(last, ids, np.arange(len(ids))[:, None])
    return ((expert, row) for expert, row in enumerate(last.tolist()) if row >= 0)
