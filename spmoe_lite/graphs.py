"""A step without the host in it: draft and target run as captured CUDA graphs.

    finish    recency of the rows that were kept                                    (of the step before)
    draft     first pass over the two newest tokens, then one pass per proposal; after each, `stage`
    fetch     on a stream of its own: copies what was staged, while drafting goes on
    verify    the target over the newest token and the proposals; experts in slots or in host memory
    report    one copy of what the pass found to the host, which waits for it once

Everything a graph reads is at a fixed address. What changes from step to step, positions and the newest
tokens, is `params`, one small copy at the start of a step; proposals stay on the device. The number of
rows is part of a graph: one for a plain step, one for a step with drafts, captured when the engine loads.

The draft's first pass takes two tokens because after full acceptance its cache is one token behind; where
it is not, a row is computed again, with the same bits. Nothing here depends on how the sampler chooses:
where it is not greedy the host reads logits, and writes each proposal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmoe_lite.device import host_buffer
from spmoe_lite.kernels.residency import (
    EMPTY,
    FILLED,
    NO_SLOT,
    Tables,
    credit,
    fetch,
    route,
    stage,
)
from spmoe_lite.model import ExpertSource, Transformer
from spmoe_lite.progress import check

if TYPE_CHECKING:
    from spmoe_lite.kvcache import KVCache
    from spmoe_lite.predictor import ExpertPredictor
    from spmoe_lite.store import ExpertStore

DRAFT_START, TARGET_START, ROWS, POSITION, CUTOFF, NUMBER, PROGRESS, IDS = range(8)


class RoutedExperts:
    """An `ExpertSource` that never asks the host: `route` decides. `trace` is [L, T, k] int32."""

    def __init__(self, tables: Tables, trace: torch.Tensor):
        layers, tokens, choices = trace.shape
        lines = min(tables.host.shape[1], tokens * choices)
        self.trace = trace
        self._tables = tables
        self._use = torch.empty((layers, lines, 3), dtype=torch.int64, device=trace.device)

    def begin_pass(self, rows: int) -> None:
        pass

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        route(self._tables, layer, experts, self._use[layer], self.trace[layer])
        yield self._use[layer]


class ResidentExperts:
    """An `ExpertSource` of a model whose experts all have a slot: address [L, E] int64 never changes."""

    def __init__(self, address: torch.Tensor):
        self.chosen: list[torch.Tensor] = []  # [T, k] of each layer served in the pass
        ids = torch.arange(address.shape[1], device=address.device).expand_as(address)
        self._use = torch.stack((ids, address, torch.zeros_like(address)), dim=2).contiguous()

    def begin_pass(self, rows: int) -> None:
        self.chosen.clear()

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        self.chosen.append(experts)
        yield self._use[layer]


@dataclass(frozen=True, slots=True)
class Found:
    """What one step found, on the host."""

    tokens: list[int]  # the target's best token of each row
    finite: bool  # whether all rows had finite logits
    logits: torch.Tensor  # [T, V] on the device, until the next step
    proposal: list[int]
    trace: np.ndarray  # [L, T, k] expert ids
    missed: np.ndarray | None  # [L, E] bool: read from host memory by this pass
    fetched: np.ndarray | None  # [n, 2] (layer, expert) copied on a prediction
    draft_ms: float
    verify_ms: float


class StepGraphs:
    """Captured passes of a pair, and the state they run on. One caller at a time."""

    def __init__(
        self,
        target: Transformer,
        target_kv: KVCache,
        draft: Transformer | None,
        draft_kv: KVCache | None,
        *,
        resident: dict[Transformer, torch.Tensor],
        tables: Tables | None,
        stride: int,
        predictor: ExpertPredictor | None,
        most: int,
        num_tokens: int,
    ):
        """Capture a plain step and one of `most` proposals; compiles what it needs on the way.

        resident: address [L, E] int64 of the experts of a model that are all in slots. tables: those of
        the target if they are not. num_tokens: ids from there on are never chosen.
        """
        if draft is None or most == 0:
            most, draft, draft_kv, predictor = 0, None, None, None
        self.most = most
        self.tables = tables
        self._target, self._target_kv = target, target_kv
        self._draft_model, self._draft_kv = draft, draft_kv
        self._stride, self._num_tokens = stride, num_tokens
        self._predictor = predictor if tables is not None else None
        self.layers_ahead = 0 if self._predictor is None else tables.wanted.shape[1]
        self._resident = resident
        self._sources: dict[tuple[Transformer, int], RoutedExperts | ResidentExperts] = {}
        device = target.device
        self._host_params = host_buffer((IDS + 3 + most,), torch.int32)
        self._values = self._host_params.numpy()
        self._params = torch.zeros_like(self._host_params, device=device)
        self._newest = torch.zeros(1, dtype=torch.int32, device=device)
        if tables is not None:  # reset with the parameters of each step
            self.tables = replace(tables, progress=self._param(PROGRESS))
            self._host = tables.host.cpu().numpy()
        self._inside = False  # whether the device has the slots
        self._copies = torch.cuda.Stream(device)
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        self._drafted = [torch.cuda.Event() for _ in range(self.most)]
        self._fetched = torch.cuda.Event()
        self._reports: dict[int, torch.Tensor] = {}  # by rows
        self._pool = torch.cuda.graph_pool_handle()
        self._kept = (0, 0)  # rows and position of the pass before, for `finish`
        self._rows = 1  # of the pass before
        sizes = sorted({1, self.most + 1})
        self._traces = {rows: self._trace(rows) for rows in sizes}
        self._verify = {rows: self._capture(self._run_verify, rows) for rows in sizes}
        self._finish = {}
        if self.tables is not None:
            self._finish = {rows: self._capture(self._run_finish, rows) for rows in sizes}
            if self.layers_ahead:
                fetch(self.tables, stride, 0, 1)  # nothing: it is compiled
        self._draft = [self._capture(self._run_draft, rows) for rows in (2, 1)] if draft else []

    def step(
        self,
        tokens: list[int],
        count: int,
        cutoff: int,
        pick: Callable[[torch.Tensor, list[int]], int] | None,
        cancel: threading.Event | None,
    ) -> Found:
        """Draft `count` (0 or `most`) tokens after `tokens` and verify them in one pass.

        The caches hold at least what is known but for the newest token, the draft's but for two.
        pick chooses a draft token from logits [V] and the tokens before it; None: the best one.
        """
        known, rows = len(tokens), count + 1
        newest = tokens[-2:] if known > 1 else [0, *tokens]
        self._values[: IDS + 2] = known - 2, known - 1, *self._kept, cutoff, 0, -1, *newest
        self._kept = 0, 0
        begun, drafted, verified = self._events
        compute = torch.cuda.current_stream()
        self._params.copy_(self._host_params, non_blocking=True)
        compute.wait_event(self._fetched)
        if self.tables is not None:
            self._finish[self._rows][0].replay()
        begun.record()
        proposal: list[int] = []
        for i in range(count):
            check(cancel)
            graph, logits = self._draft[i > 0]
            graph.replay()
            if cutoff:
                self._drafted[i].record()
                self._copies.wait_event(self._drafted[i])
                with torch.cuda.stream(self._copies):
                    fetch(self.tables, self._stride, i, cutoff)
                    self._fetched.record()
            if pick is not None:
                proposal.append(pick(logits[0], tokens + proposal))
                self._newest.fill_(proposal[i])
                self._params[IDS + 2 + i].fill_(proposal[i])
        drafted.record()
        self._rows = rows
        graph, logits = self._verify[rows]
        graph.replay()
        verified.record()
        verified.synchronize()
        report = self._reports[rows].numpy().copy()
        trace, missed, fetched = report[3 * rows - 1 :], None, None
        if self.tables is not None:
            end = self._traces[rows].numel()
            trace, missed, rest = np.split(trace, [end, end + self.tables.missed.numel()])
            missed = missed.reshape(self.tables.missed.shape) != 0
            wanted, state = rest.reshape(2, *self.tables.wanted.shape)
            at = np.argwhere(state == FILLED)
            fetched = np.stack((at[:, 1], wanted[tuple(at.T)]), axis=1)
        tokens = report[: 3 * rows - 1].tolist()
        return Found(
            tokens=tokens[count : count + rows],
            finite=all(tokens[count + rows :]),
            logits=logits,
            proposal=tokens[:count],
            trace=trace.reshape(self._traces[rows].shape),
            missed=missed,
            fetched=fetched,
            draft_ms=begun.elapsed_time(drafted),
            verify_ms=drafted.elapsed_time(verified),
        )

    def keep(self, rows: int, position: int) -> None:
        """The first `rows` rows of the last pass stay, the first of them at `position`."""
        self._kept = rows, position

    # --- who has the slots -----------------------------------------------------------------------

    def enter(self, store: ExpertStore | None) -> None:
        """Take the slots over from the host: its residents and ages."""
        if self._inside or store is None or self.tables is None:
            return
        torch.cuda.synchronize(self._params.device)
        table, base = store.table, store.base
        layers, experts = self.tables.host.shape
        who = np.full(self.tables.who.shape, NO_SLOT, dtype=np.int32)
        slots = np.zeros(who.shape, dtype=np.int64)
        age = np.full((layers, experts), -1, dtype=np.int32)
        src = self._host.copy()
        for layer in range(layers):
            for place, (slot, expert) in enumerate(table.places(layer)):
                slots[layer, place] = base + slot * self._stride
                who[layer, place] = EMPTY if expert is None else expert
                if expert is not None:
                    src[layer, expert] = slots[layer, place]
        for (layer, expert), position in table.last_used.items():
            age[layer, expert] = position
        for name, values in {"who": who, "slots": slots, "age": age, "src": src}.items():
            getattr(self.tables, name).copy_(torch.from_numpy(values))
        self.tables.expected.zero_()
        self.tables.state.zero_()
        self.tables.arrived.zero_()
        self._kept = 0, 0
        self._inside = True

    def leave(self, store: ExpertStore | None) -> None:
        """Give the slots back to the host, once everything that was asked for has ended."""
        if not self._inside or store is None or self.tables is None:
            return
        torch.cuda.synchronize(self._params.device)
        table, base = store.table, store.base
        who, src = self.tables.who.tolist(), self.tables.src.tolist()
        residents = []
        for layer, row in enumerate(self.tables.slots.tolist()):
            intact = {src[layer][e]: e for e in who[layer] if e >= 0}  # not one that is half there
            residents += [
                ((address - base) // self._stride, layer, intact.get(address))
                for address in row
                if address
            ]
        table.put(residents)
        self._inside = False

    # --- what is captured -----------------------------------------------------------------------

    def _run_draft(self, rows: int) -> torch.Tensor:
        """One draft pass over the two newest known tokens, or over the newest proposal."""
        draft, params = self._draft_model, self._params
        ids = params[IDS : IDS + 2] if rows == 2 else self._newest
        predicted: list[torch.Tensor] = []

        def predict(layer: int, state: torch.Tensor) -> None:
            if layer < self.layers_ahead:
                predicted.append(self._predictor.choose(layer, state[-1:]))

        start, number = self._param(DRAFT_START), self._param(NUMBER)
        source = self._source(draft, rows)
        ahead = predict if self._predictor is not None else None
        logits = draft.run(ids, self._draft_kv, start, source, 1, ahead)
        self._newest.copy_(logits[0, : self._num_tokens].argmax())
        params[IDS + 2 :].index_copy_(0, number.long(), self._newest)
        if predicted:
            stage(self.tables, torch.cat(predicted), self._param(CUTOFF), number)
        start.add_(rows)
        number.add_(1)
        return logits

    def _run_verify(self, rows: int) -> torch.Tensor:
        """The target's pass and its report; logits."""
        ids = self._params[IDS + 1 : IDS + 1 + rows]
        start, source = self._param(TARGET_START), self._source(self._target, rows)
        logits = self._target.run(ids, self._target_kv, start, source, rows)
        best = logits[:, : self._num_tokens].max(1)
        parts = [self._params[IDS + 2 : IDS + 1 + rows], best.indices.int()]
        parts.append(best.values.isfinite().int())
        if isinstance(source, RoutedExperts):
            parts += [source.trace, self.tables.missed, self.tables.wanted, self.tables.state]
        elif isinstance(source, ResidentExperts):
            parts += source.chosen
        found = torch.cat([part.flatten() for part in parts])
        if rows not in self._reports:  # not while a capture is under way
            self._reports[rows] = host_buffer(tuple(found.shape), torch.int32)
        self._reports[rows].copy_(found, non_blocking=True)
        return logits

    def _run_finish(self, rows: int) -> None:
        credit(self.tables, self._traces[rows], self._param(ROWS), self._param(POSITION))

    def _capture(self, run: Callable[[int], Any], rows: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        self._params.zero_()  # the first draft of a step, at the first position
        run(rows)  # compiles and loads what the capture must not wait for
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            kept = run(rows)
        return graph, kept

    def _source(self, model: Transformer, rows: int) -> ExpertSource | None:
        if model.source is None:
            return None
        if (model, rows) not in self._sources:  # not while a capture is under way
            if model in self._resident:
                self._sources[model, rows] = ResidentExperts(self._resident[model])
            else:
                self._sources[model, rows] = RoutedExperts(self.tables, self._traces[rows])
        source = self._sources[model, rows]
        source.begin_pass(rows)
        return source

    def _trace(self, rows: int) -> torch.Tensor:
        c = self._target.config
        shape = (c.num_hidden_layers, rows, c.num_experts_per_tok)
        return torch.zeros(shape, dtype=torch.int32, device=self._params.device)

    def _param(self, at: int) -> torch.Tensor:
        return self._params[at : at + 1]
