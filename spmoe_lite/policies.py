"""Other systems' ways to keep experts, on this engine's kernels, slots and copies, for `bench` to measure.

Each is an `ExpertStore` that differs in what it copies ahead or in what it keeps; none is a second engine.

    NextLayer    while layer i runs, the router of layer i + 1 is applied to the state of layer i, and what
                 it names is copied after what layer i misses (AdapMoE, arXiv 2408.10284; there for one
                 token at a time, here for all rows of a pass, else it would be off while drafts are checked)
    TraceMatch   the counts [L, E] of the answer so far are matched, by their cosine, to those of past
                 answers; of the nearest one the experts of later layers are copied by how often they were
                 used there and how near their layer is (MoE-Infinity, arXiv 2401.14361). The past answers
                 are those of the round that is not counted, to the same prompts: its best case
    StaticSplit  the experts used most in the round that is not counted are pinned; every other one is
                 copied when needed and kept no longer (Fiddler, arXiv 2402.07033, and llama.cpp, which
                 compute those on the CPU)
    SpMoe        one LRU over all layers by the moment of use, rejected drafts' included; what the draft's
                 states point at is copied for the layers below a fixed cutoff (SP-MoE, arXiv 2510.10302;
                 the draft's part is `prefetch.py`, the cutoff `published_cutoff`)

All need the host at every layer, so that steps are not captured. `HostDriven` is the engine's own store on
that path, to compare them with.

Two slabs stand for other buses: `pageable` memory and a synchronisation with every copy, as published systems
are often built, and a bus of fewer bytes a second. On a GPU a slower bus is the copy, then a wait on the
stream of the copies for what is left of the time; kernels that read host memory by themselves cannot be
slowed, which is one more reason to drive the steps by the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from spmoe_lite.cutoff import Profile
from spmoe_lite.device import bus_rate, current, synchronize
from spmoe_lite.hostmap import HostMap
from spmoe_lite.model import Transformer
from spmoe_lite.pack import Pack
from spmoe_lite.predictor import ExpertPredictor, Prediction
from spmoe_lite.slab import DeviceSlab, GoOn, HostSlab, Piece, ReadExpert
from spmoe_lite.slots import ExpertKey
from spmoe_lite.store import ExpertStore

NEAR = 2  # pinned experts leave so many times k slots for the others
SLEEP = 10_000_000  # clocks of the wait that is timed


class HostDriven(ExpertStore):
    """The engine's own policy, with the host in every layer."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._layers = self._pack.config.num_hidden_layers
        self._experts = self._pack.config.num_local_experts
        self._k = self._pack.config.num_experts_per_tok

        self._guessing = threading.local()

    def attach(self, target: Transformer) -> None:
        """The model whose states `observe` will see; passes before, to warm up, go unseen."""

    def prefetch(self, layer: int, expert: int) -> None:
        self._guessing.now = True
        try:
            super().prefetch(layer, expert)
        finally:
            self._guessing.now = False

    @property
    def slab(self) -> HostSlab | DeviceSlab:
        return self._slab

    def is_guess(self) -> bool:
        """Whether what this thread is copying was predicted, not asked for."""
        return getattr(self._guessing, "now", False)

    def observe(self, layer: int, state: torch.Tensor) -> None:
        """state [T, H]: the target's residual stream after attention, before `serve` of the layer."""

    def begin_answer(self, counted: bool) -> None:
        """An answer begins; those that are not counted are to learn from."""

    def end(self) -> None:
        """The engine closes: no copy more."""


class _Ahead(HostDriven):
    """Copies what `ahead` names for later layers, as soon as what a layer misses is on its way."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._pass = 0  # guesses belong to one
        self._worker = ThreadPoolExecutor(1, "spmoe-guess")

    def end(self) -> None:
        self._pass += 1
        self._worker.shutdown(cancel_futures=True)

    def begin_pass(self, rows: int) -> None:
        self._pass += 1
        super().begin_pass(rows)

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        groups = super().serve(layer, experts)
        first = next(groups)
        if not self._prefill and (guessed := self.ahead(layer)):
            self._worker.submit(self._copy, self._pass, guessed)
        yield first
        yield from groups

    def ahead(self, layer: int) -> list[ExpertKey]:
        raise NotImplementedError

    def _copy(self, number: int, guessed: list[ExpertKey]) -> None:
        for key in guessed:
            if number == self._pass:
                self.expect(key[0], [key[1]])
                self.prefetch(*key)


class NextLayer(_Ahead):
    """The next layer's router, one layer early."""

    _guess: Prediction | None = None

    def attach(self, target: Transformer) -> None:
        self._predictor = ExpertPredictor(target, self._k)

    def observe(self, layer: int, state: torch.Tensor) -> None:
        self._guess = None
        if layer + 1 < self._layers and not self._prefill:
            self._guess = self._predictor.predict(layer + 1, 0, state)

    def ahead(self, layer: int) -> list[ExpertKey]:
        """What most rows want comes first."""
        if self._guess is None:
            return []
        if self._guess.arrived is not None:
            self._guess.arrived.synchronize()
        chosen = self._guess.experts.flatten().tolist()
        return [
            (layer + 1, e) for e in sorted(set(chosen), key=lambda one: (-chosen.count(one), one))
        ]


class TraceMatch(_Ahead):
    """The past answer that is nearest says what comes."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._past: list[np.ndarray] = []
        self._now = np.zeros((self._layers, self._experts))
        self._nearest: np.ndarray | None = None
        self._learning = True

    def begin_answer(self, counted: bool) -> None:
        if self._learning and self._now.any():
            self._past.append(self._now)
        self._learning = not counted
        self._now = np.zeros_like(self._now)

    def begin_pass(self, rows: int) -> None:
        super().begin_pass(rows)
        self._nearest = None
        if self._past and self._now.any():
            alike = [float((one * self._now).sum() / np.linalg.norm(one)) for one in self._past]
            best = self._past[int(np.argmax(alike))]
            self._nearest = best / best.sum(axis=1, keepdims=True).clip(1)

    def end_pass(self, accepted_rows: int) -> None:
        for layer, rows in self.trace.items():
            np.add.at(self._now[layer], [e for row in rows[:accepted_rows] for e in row], 1)
        super().end_pass(accepted_rows)

    def ahead(self, layer: int) -> list[ExpertKey]:
        """The k best absent ones: share of the uses of their layer, less for layers further away."""
        if self._nearest is None or layer + 1 >= self._layers:
            return []
        near = 1 - np.arange(self._layers - layer - 1) / self._layers
        worth = self._nearest[layer + 1 :] * near[:, None]
        found: list[ExpertKey] = []
        for index in np.argsort(-worth, axis=None, kind="stable"):
            below, expert = divmod(int(index), self._experts)
            key = (layer + 1 + below, expert)
            if self.table.slot(key) is None:
                found.append(key)
                if len(found) == self._k:
                    break
        return found


class StaticSplit(HostDriven):
    """The hottest experts for good; the others come and go."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._uses = np.zeros((self._layers, self._experts), dtype=np.int64)
        self._pinned: set[ExpertKey] = set()

    def end_pass(self, accepted_rows: int) -> None:
        for layer, rows in self.trace.items():
            np.add.at(self._uses[layer], [e for row in rows[:accepted_rows] for e in row], 1)
        super().end_pass(accepted_rows)

    def begin_answer(self, counted: bool) -> None:
        """Choose and load them, once."""
        if not counted or self._pinned:
            return
        count = self.table.num_slots - min(self.table.num_slots, max(2, NEAR * self._k))
        hottest = np.argsort(-self._uses, axis=None, kind="stable")[:count]
        self._pinned = {divmod(int(index), self._experts) for index in hottest}
        for key in [*self.table.residents()]:
            if key not in self._pinned:
                self.table.drop(key)
        for key in sorted(self._pinned):
            if self.table.slot(key) is None:
                placed = self.table.place(key)
                assert placed is not None and placed[1] is None
                self._fill(key, placed[0])
        synchronize(self._device)

    def _take_slot(
        self, key: ExpertKey, done: list[ExpertKey]
    ) -> tuple[int, ExpertKey | None] | None:
        first = done if self._prefill else ()
        return self._evicted(self.table.place(key, protected=self._pinned, first=first))

    def _give_back(self, layer: int, experts: list[int]) -> None:
        super()._give_back(layer, experts)
        if self._pinned:
            with self._lock:
                for key in {(layer, expert) for expert in experts} - self._pinned:
                    self.table.drop(key)


class SpMoe(HostDriven):
    """One LRU by the moment of use, whoever uses."""

    _moment = 0

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        yield from super().serve(layer, experts)
        for row in self.trace[layer]:
            for expert in row:
                self._moment += 1
                self.table.credit((layer, expert), self._moment)

    def end_pass(self, accepted_rows: int) -> None:
        used = dict(self.table.last_used)
        super().end_pass(accepted_rows)
        self.table.last_used = used


def published_cutoff(profile: Profile, layers: int, drafts: int, critical: int, slots: int) -> int:
    """SP-MoE's cutoff: L critical t_IO <= T_draft and L critical <= free slots, 1 to all layers."""
    by_time = drafts * profile.draft_token_ms / max(critical * profile.expert_copy_ms, 1e-9)
    return max(1, min(layers, int(by_time), slots // critical))


# --- other buses


class PageableSlab(DeviceSlab):
    """Copies from memory that is not page-locked, nothing else running meanwhile."""

    def fill_from(self, slot: int, source: int, go_on: GoOn | None = None) -> None:
        torch.cuda.synchronize(self.slots.device)
        super().fill_from(slot, source, go_on)
        torch.cuda.synchronize(self.slots.device)


class Unlocked:
    """Before a store's class: experts have addresses in the mapped files, and nothing is page-locked."""

    def __init__(self, pack: Pack, *args: Any):
        *others, _, _ = args  # where experts are page-locked; landing slots
        super().__init__(pack, *others, HostMap(pack, torch.device("cpu")))  # type: ignore[call-arg]


class SlowHostSlab(HostSlab):
    """A copy takes as long as over a bus of `rate` bytes a second."""

    rate = 1e9

    def fill(self, slot: int, read: ReadExpert, go_on: GoOn | None = None) -> None:
        started = time.perf_counter()
        super().fill(slot, read, go_on)
        self._wait(started)

    def fill_pieces(self, slot: int, pieces: Iterable[Piece], patient: bool = False) -> None:
        started = time.perf_counter()
        super().fill_pieces(slot, pieces, patient)
        self._wait(started)

    def _wait(self, started: float) -> None:
        left = self.slots.shape[1] / self.rate - (time.perf_counter() - started)
        if left > 0:
            time.sleep(left)


class SlowDeviceSlab(DeviceSlab):
    """The same: after each copy its stream waits for the time that such a bus would still take."""

    rate = 1e9

    def __init__(self, num_slots: int, stride: int, device: torch.device):
        super().__init__(num_slots, stride, device)
        seconds = stride / self.rate - stride / bus_rate(device)
        self._clocks = round(max(0.0, seconds) * self._clocks_a_second())

    def _clocks_a_second(self) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with current(self.slots.device), torch.cuda.stream(self._stream):
            for _ in range(2):  # the first one loads it
                begin.record()
                torch.cuda._sleep(SLEEP)
                end.record()
            end.synchronize()
        return SLEEP / begin.elapsed_time(end) * 1e3

    def _mark_filled(self, slot: int) -> torch.cuda.Event:
        if self._clocks:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(self._clocks)
        return super()._mark_filled(slot)
