"""A step without the host in it: draft and target run as captured CUDA graphs.

    finish    recency of the rows that were kept                                    (of the step before)
    draft     first pass over the two newest tokens, then one pass per proposal; in each, `stage` as soon
              as the layers that are copied ahead for have been seen
    fetch     on a stream of its own: copies what was staged, while drafting goes on; then gives up what
              has not begun
    verify    the target over the newest token and the proposals; experts in slots or in host memory
    report    one copy of what the pass found to the host, which waits for it once

Everything a graph reads is at a fixed address. What changes from step to step, positions and the newest
tokens, is `params`, one small copy at the start of a step; proposals stay on the device. The number of
rows is part of a graph: one for a plain step, one for a step with drafts, captured when the engine loads.

The draft's passes are those of `draftgraphs.py`, sampled tokens those of `drawing.py`. Unless the host has to
choose (penalties), the device knows how a step ends. `advance` makes the parameters of the next one from
it, and the host may enqueue that step before it has read this one: then the GPU never waits for the host.
If this one turns out to end the answer, the step too many is never read. What it leaves are rows behind
the end of the caches, which nobody looks at, and slots with other experts in them; `leave` takes those
over, and recency is the host's own, which never heard of that step.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spmoe_lite.device import host_buffer, side_stream, synchronize
from spmoe_lite.draftgraphs import DraftPasses, Pick, capture
from spmoe_lite.drawing import Drawing
from spmoe_lite.kernels.residency import (
    EMPTY,
    FILLED,
    LATE,
    NO_SLOT,
    STAGED,
    Tables,
    credit,
    fetch,
    route,
    stage,
)
from spmoe_lite.model import ExpertSource, Transformer
from spmoe_lite.progress import check
from spmoe_lite.sampling import Sampler

if TYPE_CHECKING:
    from spmoe_lite.kvcache import KVCache
    from spmoe_lite.predictor import ExpertPredictor
    from spmoe_lite.store import ExpertStore

# `params`: position of the newest token; the clock of recency; rows kept of the step before; layers to
# copy ahead for; the draft token at hand; whether drafting is over; the two newest tokens, proposals;
# in the last `most` places how many copies may be staged or under way at each draft token.
START, CLOCK, ROWS, CUTOFF, NUMBER, OVER, IDS = range(7)


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

    tokens: list[int]  # the target's best token of each row, or the one that was drawn
    finite: bool  # whether all rows had finite logits
    logits: torch.Tensor  # [T, V] on the device, until the next step
    proposal: list[int]
    trace: np.ndarray  # [L, T, k] expert ids
    missed: np.ndarray | None  # [L, E] bool: read from host memory by this pass
    fetched: np.ndarray | None  # [n, 2] (layer, expert) copied on a prediction
    late: np.ndarray | None  # [n, 2] the same, not in place when the pass came to their layer
    predictions: list[tuple[int, int, list[int]]]  # layer, row, experts best first
    draft_ms: float
    verify_ms: float
    copy_ms: float | None  # an expert copied ahead, as this step's were; None if none was


@dataclass(frozen=True, slots=True)
class _Flight:
    """A step that was enqueued and has not been read."""

    count: int
    cutoff: int
    report: torch.Tensor  # int32, in host memory once `verified`
    logits: torch.Tensor
    begun: torch.cuda.Event
    drafted: torch.cuda.Event
    verified: torch.cuda.Event
    fetched: list[torch.cuda.Event]  # the end of what each draft staged, if it was fetched


def advance(params: torch.Tensor, best: torch.Tensor) -> None:
    """Make `params` those of the next step; best [T] int32: the target's token after each row.

    What `verifier.verify` does where the sampler is greedy. CLOCK - ROWS is where the kept rows begin.
    """
    seen = params[IDS + 1 : IDS + 1 + len(best)]  # the newest token and the proposals
    agreed = (seen[1:] == best[:-1]).cumprod(0).sum(0, keepdim=True)
    params[IDS : IDS + 2].copy_(torch.stack((seen, best)).index_select(1, agreed).flatten())
    params[ROWS : ROWS + 1].copy_(agreed + 1)
    params[START : CLOCK + 1].add_(params[ROWS])


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
        if draft is None or most + 2 > min(target_kv.capacity, draft_kv.capacity):
            most = 0
        if most == 0:
            most, draft, draft_kv, predictor = 0, None, None, None
        self.most = most
        self.tables = tables
        self._target, self._target_kv = target, target_kv
        self._stride, self._num_tokens = stride, num_tokens
        self._predictor = predictor if tables is not None else None
        self.layers_ahead = 0 if self._predictor is None else tables.wanted.shape[1]
        self._resident = resident
        self._sources: dict[tuple[Transformer, int], RoutedExperts | ResidentExperts] = {}
        device = target.device
        self._host_params = host_buffer((IDS + 3 + 2 * most,), torch.int32)
        self._values = self._host_params.numpy()
        self._params = torch.zeros_like(self._host_params, device=device)
        self._queued = self._params[IDS + 3 + most :]
        if tables is not None:  # reset by the parameters of a step and by its first draft
            self.tables = replace(tables, over=self._param(OVER))
            self._host = tables.host.cpu().numpy()
            self._predicted = torch.zeros_like(tables.wanted)
        self._inside = False  # whether the device has the slots
        self._copies = side_stream(device, priority=-1)  # `_predict` says why
        # Recorded inside the first draft pass, and inside each later one.
        self._staged = [torch.cuda.Event(external=True) for _ in range(2)]
        self._fetched = torch.cuda.Event()
        self._pool = torch.cuda.graph_pool_handle()
        self._kept = 0  # rows of the pass before, for `finish`
        self._clock = 1  # of the next row
        self._rows = 1  # of the pass before
        sizes = sorted({1, self.most + 1})
        self._traces = {rows: self._trace(rows) for rows in sizes}
        self._verify = {rows: self._capture(self._run_verify, rows) for rows in sizes}
        self._advance = {rows: self._capture(self._run_advance, rows) for rows in sizes}
        self._flight: _Flight | None = None  # enqueued before the one before was read
        self._sides = itertools.cycle([self._side(), self._side()])
        self._finish = {}
        if self.tables is not None:
            self._finish = {rows: self._capture(self._run_finish, rows) for rows in sizes}
            if self.layers_ahead:
                fetch(self.tables, stride, 0, 1)  # nothing: it is compiled
        self._predictions: list[torch.Tensor] = []  # of the layers seen so far
        self._draft: DraftPasses | None = None
        if draft is not None:
            self._draft = DraftPasses(
                draft,
                draft_kv,
                lambda rows: self._source(draft, rows),
                start=self._param(START),
                number=self._param(NUMBER),
                ids=self._params[IDS : IDS + 2 + most],
                num_tokens=num_tokens,
                seen=None if self._predictor is None else self._predict,
                capture=self._capture,
            )
        self._drawing = Drawing(
            most=most,
            start=self._param(START),
            number=self._param(NUMBER),
            ids=self._params[IDS : IDS + 2 + most],
            newest=None if self._draft is None else self._draft.newest,
            heads=[] if self._draft is None else self._draft.heads,
            found={rows: kept for rows, (_, kept) in self._verify.items()},
            num_tokens=num_tokens,
            capture=partial(capture, reset=bool, pool=self._pool),
        )

    def step(
        self,
        tokens: list[int],
        count: int,
        cutoff: int,
        queued: Sequence[int],
        choice: Pick | Sampler | None,
        cancel: threading.Event | None,
        ahead: bool = False,
        meanwhile: Callable[[], object] = bool,
    ) -> Found:
        """Draft `count` (0 or `most`) tokens after `tokens` and verify them in one pass.

        The caches hold at least what is known but for the newest token, the draft's but for two.
        queued [most]: how many experts of the first `cutoff` layers may be waiting to be copied ahead,
        or on their way, at each draft token.
        choice: None, the best token of each row; a sampler, whose `draws_alone` holds, has the device draw
        proposals and tokens; a function, which may look at everything, chooses a draft token from logits [V]
        and the tokens before it, and the tokens found are the best ones.
        ahead, without such a function: enqueue the next step as well, which drafts as many, up to the same layer.
        It is read by the next call, if this step's verdict is kept whole; else `leave` forgets it.
        meanwhile: called while the device computes.
        """
        flight, self._flight = self._flight, None
        known = len(tokens)
        if isinstance(choice, Sampler):
            self._drawing.begin(choice)
            self._drawing.fill(known, known + count)
        if flight is None:
            self._prepare(tokens, cutoff, queued)
            flight = self._launch(count, cutoff, choice, tokens, cancel)
        if isinstance(choice, Sampler):  # what the next step may want
            self._drawing.fill(known, known + 2 * count + 1)
        assert (count, cutoff) == (flight.count, flight.cutoff)
        if ahead:
            # The stream may be another than last time. What was fetched is there: the pass waited for it.
            torch.cuda.current_stream().wait_event(flight.verified)
            self._advance[count + 1][0].replay()
            self._flight = self._launch(count, cutoff, choice)
        meanwhile()
        return self._read(flight)

    @property
    def ahead(self) -> tuple[int, int] | None:
        """(count, cutoff) of the step that is under way already; None if none is."""
        return None if self._flight is None else (self._flight.count, self._flight.cutoff)

    def keep(self, rows: int, position: int) -> None:
        """The first `rows` rows of the pass read last stay, the first of them at `position`."""
        self._kept, self._clock = rows, position + rows

    def _prepare(self, tokens: list[int], cutoff: int, queued: Sequence[int]) -> None:
        """Parameters of a step by what the host knows, and recency of the step before."""
        newest = tokens[-2:] if len(tokens) > 1 else [0, *tokens]
        known = [len(tokens) - 1, self._clock, self._kept, cutoff, 0, 0]
        self._values[: IDS + 2] = known + newest
        self._values[IDS + 3 + self.most :] = queued
        self._kept = 0
        torch.cuda.current_stream().wait_event(self._fetched)
        self._params.copy_(self._host_params, non_blocking=True)
        if self.tables is not None:
            self._finish[self._rows][0].replay()

    def _launch(
        self,
        count: int,
        cutoff: int,
        choice: Pick | Sampler | None,
        tokens: Sequence[int] = (),
        cancel: threading.Event | None = None,
    ) -> _Flight:
        """Enqueue drafts, copies ahead, the target's pass and its report."""
        (begun, drafted, verified, *fetched), reports = next(self._sides)
        begun.record()
        drawing = self._drawing if isinstance(choice, Sampler) else None
        pick = None if isinstance(choice, Sampler) else choice
        proposal: list[int] = []
        for i in range(count):
            check(cancel)
            logits = self._draft.replay(i)
            if cutoff:
                self._copies.wait_event(self._staged[i > 0])
                with torch.cuda.stream(self._copies):
                    fetch(self.tables, self._stride, i, cutoff)
                    fetched[i].record()
                self._fetched = fetched[i]
            if pick is not None:
                proposal.append(pick(logits[0], [*tokens, *proposal]))
                self._draft.put(i, proposal[i])
            if drawing is not None:
                drawing.draft(i)
        drafted.record()
        if cutoff:
            self._param(OVER).fill_(1)
            torch.cuda.current_stream().wait_event(self._fetched)
        self._rows = rows = count + 1
        graph, (logits, found) = self._verify[rows]
        graph.replay()
        if drawing is not None:
            drawing.target(rows)
        reports[rows].copy_(found, non_blocking=True)
        verified.record()
        return _Flight(count, cutoff, reports[rows], logits, begun, drafted, verified, fetched)

    def _read(self, flight: _Flight) -> Found:
        """Wait for a step's report and take it apart."""
        flight.verified.synchronize()
        count, rows = flight.count, flight.count + 1
        tokens, report = np.split(flight.report.numpy().copy(), [count + 2 * rows])
        proposal, best, finite = np.split(tokens, [count, count + rows])
        trace, report = np.split(report, [self._traces[rows].numel()])
        missed = fetched = late = copy_ms = None
        predictions: list[tuple[int, int, list[int]]] = []
        if self.tables is not None:
            missed, report = np.split(report, [self.tables.missed.numel()])
            missed = missed.reshape(self.tables.missed.shape) != 0
            shape = (3, *self.tables.wanted.shape)
            wanted, state, predicted = report.reshape(shape)[:, :count, : flight.cutoff]
            fetched = _items(wanted, state == FILLED)
            copy_ms = self._copy_ms(flight, state) if flight.cutoff else None
            late = _items(wanted, np.isin(state, (STAGED, LATE)))
            predictions = [
                (layer, row, experts)
                for row, layers in enumerate(predicted.tolist())
                for layer, experts in enumerate(layers)
            ]
        return Found(
            tokens=best.tolist(),
            finite=bool(finite.all()),
            logits=flight.logits,
            proposal=proposal.tolist(),
            trace=trace.reshape(self._traces[rows].shape),
            missed=missed,
            fetched=fetched,
            late=late,
            predictions=predictions,
            draft_ms=flight.begun.elapsed_time(flight.drafted),
            verify_ms=flight.drafted.elapsed_time(flight.verified),
            copy_ms=copy_ms,
        )

    def _copy_ms(self, flight: _Flight, state: np.ndarray) -> float | None:
        """Milliseconds of an expert copied ahead, from when it could begin: staged, and the bus free.

        Of the draft tokens [K, P, n] whose copies were all made; None if there is none. When a token's were
        staged is reckoned: an event between `stage` and `fetch` may hold it up (docs/log.md).
        """
        total, copies, free = 0.0, 0, 0.0
        pass_ms = flight.begun.elapsed_time(flight.drafted) / max(flight.count, 1)
        start = self.layers_ahead / self._target.config.num_hidden_layers
        for i, one in enumerate(state):
            made = int((one == FILLED).sum())
            end = flight.begun.elapsed_time(flight.fetched[i])
            if made and not np.isin(one, (STAGED, LATE)).any():
                total += max(0.0, end - max(free, (i + start) * pass_ms))
                copies += made
            free = end
        return total / copies if copies else None

    # --- who has the slots -----------------------------------------------------------------------

    def enter(self, store: ExpertStore | None) -> None:
        """Take the slots over from the host: its residents and ages."""
        if self._inside or store is None or self.tables is None:
            return
        synchronize(self._params.device)
        table, base = store.table, store.base
        layers, experts = self.tables.host.shape
        who = np.full(self.tables.who.shape, NO_SLOT, dtype=np.int32)
        slots = np.zeros(who.shape, dtype=np.int64)
        age = np.full((layers, experts), -1, dtype=np.int32)
        src = self._host.copy()
        for layer in range(layers):
            for place, (slot, expert) in enumerate(store.places(layer)):
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
        self._kept, self._clock = 0, max(table.last_used.values(), default=0) + 1
        self._inside = True

    def leave(self, store: ExpertStore | None) -> None:
        """Give the slots back to the host, once everything that was asked for has ended.

        A step that has not been read is forgotten.
        """
        if self._flight is not None:
            torch.cuda.current_stream().wait_event(self._flight.verified)
            self._flight = None
        if not self._inside or store is None or self.tables is None:
            return
        synchronize(self._params.device)
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
        table.put(one for one in residents if one[0] < table.num_slots)  # what landed is let go
        self._inside = False

    # --- what is captured -----------------------------------------------------------------------

    def _predict(self, layer: int, state: torch.Tensor, index: torch.Tensor, first: bool) -> None:
        """In each layer of a draft pass: what it names is staged once the last one ahead was seen.

        `fetch` gets the processors that are free when it begins, and the draft's kernels leave the slow
        ones: it is first in line, and begins beside the smallest launches there are (docs/log.md).
        """
        if layer == 0 and first:
            self._param(OVER).zero_()
        if layer < self.layers_ahead:
            self._predictions.append(self._predictor.choose(layer, state))
        if layer + 1 == self.layers_ahead:
            chosen, self._predictions = torch.cat(self._predictions), []
            stage(self.tables, chosen, self._param(CUTOFF), self._queued, self._param(NUMBER))
            self._staged[not first].record()
            # Last, and three times what once would do, so that `fetch` begins beside nothing larger.
            for _ in range(3):
                self._predicted.index_copy_(0, index, chosen[None])

    def _run_verify(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's pass: logits, and what the report says of it, int32."""
        ids = self._params[IDS + 1 : IDS + 1 + rows]
        start, source = self._param(START), self._source(self._target, rows)
        logits = self._target.run(ids, self._target_kv, start, source, rows)
        best = logits[:, : self._num_tokens].max(1)
        parts = [self._params[IDS + 2 : IDS + 1 + rows], best.indices.int()]
        parts.append(best.values.isfinite().int())
        if isinstance(source, RoutedExperts):
            tables = self.tables
            parts += [source.trace, tables.missed, tables.wanted, tables.state, self._predicted]
        elif isinstance(source, ResidentExperts):
            parts += source.chosen
        return logits, torch.cat([part.flatten() for part in parts])

    def _run_advance(self, rows: int) -> None:
        """From the end of a step of `rows` rows to the start of the next."""
        _, (_, found) = self._verify[rows]
        advance(self._params, found[rows - 1 : 2 * rows - 1])
        if self.tables is not None:
            self._run_finish(rows)

    def _run_finish(self, rows: int) -> None:
        kept = self._param(ROWS)
        credit(self.tables, self._traces[rows], kept, self._param(CLOCK) - kept)

    def _capture(self, run: Callable[[int], Any], rows: int) -> tuple[torch.cuda.CUDAGraph, Any]:
        return capture(run, rows, self._reset, self._pool)

    def _reset(self) -> None:
        self._params.zero_()
        self._param(START).fill_(1)  # where a draft's first pass begins at 0

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

    def _side(self) -> tuple[list[torch.cuda.Event], dict[int, torch.Tensor]]:
        """Events and report buffers of one of the two steps that may be under way."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3 + self.most)]
        sizes = {rows: found.shape for rows, (_, (_, found)) in self._verify.items()}
        return events, {rows: host_buffer(tuple(n), torch.int32) for rows, n in sizes.items()}

    def _trace(self, rows: int) -> torch.Tensor:
        c = self._target.config
        shape = (c.num_hidden_layers, rows, c.num_experts_per_tok)
        return torch.zeros(shape, dtype=torch.int32, device=self._params.device)

    def _param(self, at: int) -> torch.Tensor:
        return self._params[at : at + 1]


def _items(wanted: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """[n, 2] (layer, expert) of those chosen [K, P, n] bool."""
    return np.stack((np.argwhere(chosen)[:, 1], wanted[chosen]), axis=1)
