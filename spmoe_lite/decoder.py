"""One speculative step after another: draft, verify, commit.

    draft proposes    d1 .. dN, one pass each; every layer's state goes to `prefetcher.observe`
    target verifies   one pass over the newest token and d1 .. dN, N + 1 rows of logits
    verify            the target's own tokens, as far as the draft agreed, and one more
    commit            the conversation grows, both caches forget the rejected rows

Without a draft, at the end of the context, past the draft's context and for the first pass over a prompt,
N is 0 and the same code is a plain step. A prompt is fed in chunks; everything that changes the
conversation, recency and statistics happens in `commit`, when it is known which tokens are kept.

Captured steps (`graphs.py`) that are short are enqueued one ahead: the GPU runs the next one while the
host reads this one and its text is taken. The next answer begins by forgetting a step that nobody read.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from spmoe_lite.cutoff import Drift, copies_queued, cutoff_layer, expected_copies
from spmoe_lite.device import current, end_of_work
from spmoe_lite.draftgraphs import DraftSteps
from spmoe_lite.drafting import DraftLength
from spmoe_lite.errors import memory_for
from spmoe_lite.graphs import Found, StepGraphs
from spmoe_lite.model import OnAttention, Transformer
from spmoe_lite.prefetch import Prefetcher, Usefulness, count_recall
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.sampling import Sampler, check_finite
from spmoe_lite.session import Session
from spmoe_lite.stats import Counters
from spmoe_lite.store import PREFILL_ROWS, ExpertStore
from spmoe_lite.trace import TraceWriter
from spmoe_lite.verifier import Verdict, verify

log = logging.getLogger("spmoe_lite")

PREFILL_CHUNK = 2048  # rows of one prefill pass, in which every expert crosses the bus once
AHEAD_MS = 20.0  # in longer steps the host's part is lost, and one too many would be felt


@dataclass(frozen=True, slots=True)
class Step:
    """What one step found; `Decoder.commit` says how much of it is kept."""

    verdict: Verdict
    num_drafted: int
    num_pending: int  # rows of the pass before the first draft token
    started: float  # perf_counter; later by what was enqueued ahead
    typical: bool  # neither model read more than its newest tokens: its time may be compared


class Decoder:
    """Target, optional draft, one conversation. Not thread-safe: the engine lends it to one caller."""

    def __init__(
        self,
        target: Transformer,
        draft: Transformer | None,
        session: Session,
        *,
        store: ExpertStore | None,
        prefetcher: Prefetcher | None,
        counters: Counters,
        drift: Drift,
        length: DraftLength,
        cutoff: int | None,
        critical_experts: int,
        trace: TraceWriter | None = None,
        graphs: StepGraphs | None = None,
        drafts: DraftSteps | None = None,
    ):
        """graphs: captured steps; drafts: captured drafts, where the host drives the target."""
        self.target = target
        self.draft = draft
        self.session = session
        self.store = store
        self.prefetcher = prefetcher
        self.counters = counters
        self.drift = drift
        self.length = length
        self.last_cutoff = 0  # layers the last draft was allowed to prefetch for
        self.cutoff = cutoff  # None: as measured
        self._critical_experts = critical_experts
        self._trace = trace
        self.graphs = graphs
        self.drafts = drafts
        self.verify = verify  # `bench` forces acceptance in its place
        self.watch: OnAttention | None = None  # sees the target's states in passes of few rows
        self.usefulness = Usefulness(counters, late_helps=False)
        if prefetcher is not None:
            self.usefulness = prefetcher.usefulness
        self._draft_full = False  # said once
        self._step_ms = math.inf  # of the last captured step, on the GPU
        self._predictions: list[tuple[int, int, list[int]]] = []  # of that step
        self._left_running: torch.cuda.Event | None = None  # of a pass that was cut short
        self._read_from = 0  # tokens of the prompt that were in the cache

    @torch.inference_mode()
    def prefill(
        self, cancel: threading.Event | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """Feed the prompt to the target in chunks, but for its last one, which `step` takes."""
        kv, tokens = self.session.target_kv, self.session.tokens
        self._read_from = kv.length
        if self.prefetcher is not None:
            self.prefetcher.end_step()  # of a step that Ctrl-C kept from its commit
        with self._device():
            if self.graphs is not None and self.graphs.ahead is not None:
                self.graphs.leave(self.store)
            while len(tokens) - kv.length > PREFILL_CHUNK:
                check(cancel)
                chunk = self.session.pending(kv)[:PREFILL_CHUNK]
                self._target_pass(chunk, 1, cancel, on_progress)
                self._end_pass(PREFILL_CHUNK)

    @torch.inference_mode()
    def step(
        self,
        sampler: Sampler,
        room: int,
        cancel: threading.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> Step:
        """Draft and verify once; at most `room` tokens will be kept. Changes no conversation."""
        session = self.session
        pending = session.pending(session.target_kv)
        if self.graphs is not None and len(pending) == 1:
            drafted = self._to_draft(room)
            if self.graphs.ahead is not None:
                drafted, _ = self.graphs.ahead
            if self._fits(len(session.tokens), drafted):
                with self._device():
                    return self._graph_step(drafted, sampler, room, cancel)
        count = min(self.length.next(), room - 1) if len(pending) == 1 else 0
        started, typical = time.perf_counter(), len(pending) == 1 and room > self.length.most
        if count and session.draft_kv is not None:
            typical = typical and len(session.tokens) - session.draft_kv.length <= 2
        try:
            with self._device():
                proposal = self._propose(count, sampler, cancel)
                if self.prefetcher is not None:
                    self.prefetcher.end_drafting()
                check(cancel)
                rows = pending + proposal
                logits = self._target_pass(rows, len(proposal) + 1, cancel, on_progress)
                verdict = self.verify(proposal, logits, sampler, session.tokens)
        except BaseException:
            if self.prefetcher is not None:
                self.prefetcher.end_step()  # what was predicted for it is copied no more
            raise
        return Step(verdict, len(proposal), len(pending), started, typical)

    @contextmanager
    def _device(self) -> Iterator[None]:
        """Make the device current; CapacityError where a pass has no room there.

        What ends here by an error may still run: the next one waits for it, on whichever stream it comes.
        """
        device = self.target.device
        no_room = f"{device} has no room left for a pass: lower --vram or --ctx-size"
        with memory_for(no_room), current(device):
            left, self._left_running = self._left_running, None
            if left is not None:
                torch.cuda.current_stream().wait_event(left)
            try:
                yield
            except BaseException:
                self._left_running = end_of_work(device)
                raise

    def _to_draft(self, room: int) -> int:
        """Drafts of a captured step: all or none."""
        return self.graphs.most if self.length.next() and room > 1 else 0

    def _fits(self, known: int, count: int) -> bool:
        """Whether a step of `count` drafts after `known` tokens stays within both caches."""
        if count and (known < 2 or known + count - 1 > self.session.draft_kv.capacity):
            return False
        return known + count <= self.session.target_kv.capacity

    def _graph_step(
        self, count: int, sampler: Sampler, room: int, cancel: threading.Event | None
    ) -> Step:
        """The same by captured passes: the host waits once, at the end."""
        session, graphs, tokens = self.session, self.graphs, self.session.tokens
        check(cancel)
        started, known, cutoff = time.perf_counter(), len(tokens), self._graph_cutoff(count)
        under_way = graphs.ahead
        if count and under_way is None:
            self._catch_up(known - 2, cancel)
        on_device = sampler.greedy or (sampler.draws_alone and self.verify is verify)
        choice = None if sampler.greedy else sampler if on_device else sampler.pick_row
        noisy = range(0) if on_device else range(known, known + count + 1)
        left = room - count - 1  # at least
        ahead = (  # whatever this step finds, the next one will be as the device makes it from this
            under_way in (None, (count, cutoff))
            and (on_device and self.verify is verify)
            and self._step_ms < AHEAD_MS
            and (left > 0 and self._to_draft(left) == count)
            and self._fits(known + count + 1, count)
        )
        try:
            graphs.enter(self.store)
            if under_way is not None:
                _, cutoff = under_way
            found = graphs.step(
                tokens, count, cutoff, self._copies_queued(), choice, cancel, ahead,
                lambda: [sampler.noise(i, self.target.device) for i in noisy],
            )  # fmt: skip
            check_finite(found.finite)
        except BaseException:
            graphs.leave(self.store)
            raise
        session.target_kv.length = known + count
        if count:
            session.draft_kv.length = known + count - 1
            self.drift.observe(draft_token_ms=found.draft_ms / count)
            if found.copy_ms is not None:
                self.drift.observe(expert_copy_ms=found.copy_ms)
        if self.store is not None:
            self._take_account(found)
        chosen = found.tokens if on_device else None
        verdict = self.verify(found.proposal, found.logits, sampler, tokens, chosen)
        self._step_ms = found.draft_ms + found.verify_ms
        started = min(started, time.perf_counter() - self._step_ms / 1e3)
        return Step(verdict, count, 1, started, typical=room > count)

    def _graph_cutoff(self, count: int) -> int:
        """Layers that a captured step of `count` drafts copies ahead for."""
        if not count or not self.graphs.layers_ahead or not self.usefulness.judge():
            return 0
        most = self.graphs.layers_ahead if any(self._copies_queued()) else 0
        self.last_cutoff = most if self.cutoff is None else min(most, self.cutoff)
        return self.last_cutoff

    def _copies_queued(self) -> list[int]:
        """At each draft token of a captured step."""
        start = self.graphs.layers_ahead / len(self.target.blocks)
        return copies_queued(self.drift.profile, self.graphs.most, start)

    def _take_account(self, found: Found) -> None:
        """What a captured pass did with the experts; nobody saw it wait, so that is reckoned."""
        self.store.found(found.trace, found.missed, found.fetched, found.late)
        self._predictions = found.predictions
        if found.missed is not None:
            copying = int(found.missed.sum()) * self.drift.profile.expert_copy_ms
            self.counters.stall_seconds += min(copying, found.verify_ms) / 1e3

    def commit(self, step: Step, count: int) -> None:
        """Keep the first `count` tokens of the verdict: the only place where anything changes."""
        self._end_pass(step.num_pending + count - 1, count)
        self.session.commit(step.verdict.tokens[:count])
        cut_short = count < len(step.verdict.tokens)
        self.counters.drafted += count if cut_short else step.num_drafted
        self.counters.accepted += min(count, step.verdict.num_accepted)
        self.counters.steps += 1
        self.counters.tokens += count
        as_asked = (step.num_drafted > 0) == (self.length.next() > 0)
        if self.draft is not None and step.typical and as_asked and not cut_short:
            self.length.observe(count, time.perf_counter() - step.started)

    def _propose(self, count: int, sampler: Sampler, cancel: threading.Event | None) -> list[int]:
        """Up to `count` draft tokens; fewer at the end of the draft's context."""
        if self.draft is None:
            return []
        kv, tokens = self.session.draft_kv, list(self.session.tokens)
        if len(tokens) + count - 1 > kv.capacity:
            count = max(0, kv.capacity - len(tokens) + 1)
            if not self._draft_full:
                self._draft_full = True
                log.warning(
                    "the draft's context of %d tokens is full: from here on it is off", kv.capacity
                )
        if count <= 0:
            return []
        known, unread = len(tokens), len(tokens) - kv.length
        captured = self.drafts is not None and known > 1
        if self.prefetcher is not None:
            self.last_cutoff = self._cutoff_layer(count)
            if captured:
                self.last_cutoff = min(self.last_cutoff, self.drafts.layers_ahead)
            self.prefetcher.start_step(self.last_cutoff)
        started = time.perf_counter()
        if captured:
            self._catch_up(known - 2, cancel)
            ahead = self.prefetcher is not None and self.last_cutoff > 0
            foresee = self.prefetcher.foresee if ahead else None
            pick = None if sampler.greedy else sampler.pick_row
            tokens += self.drafts.propose(tokens, count, pick, cancel, foresee)
            kv.length = known + count - 1
        else:
            self._catch_up(known - PREFILL_CHUNK, cancel)
            observe = None if self.prefetcher is None else self.prefetcher.observe
            for _ in range(count):
                check(cancel)
                logits = self.draft.forward(tokens[kv.length :], kv, on_attention=observe)[0]
                tokens.append(sampler.pick_row(logits, tokens))
        if unread <= 2:  # else it also read a prompt, or what plain steps have written
            self.drift.observe(draft_token_ms=(time.perf_counter() - started) * 1e3 / count)
        return tokens[known:]

    def _catch_up(self, length: int, cancel: threading.Event | None) -> None:
        """Have the draft read the first `length` tokens: the prompt, or what plain steps have written."""
        kv, tokens = self.session.draft_kv, self.session.tokens
        while kv.length < length:
            check(cancel)
            self.draft.forward(tokens[kv.length : length][:PREFILL_CHUNK], kv)

    def _target_pass(
        self,
        tokens: Sequence[int],
        logits_rows: int,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
    ) -> torch.Tensor:
        started, stalled = time.perf_counter(), self.counters.stall_seconds
        self._predictions = []
        if self.graphs is not None:
            self.graphs.leave(self.store)
        if self.store is not None:
            self.store.cancel = cancel
        try:
            logits = self.target.forward(
                list(tokens),
                self.session.target_kv,
                logits_rows=logits_rows,
                on_attention=self._reading(len(tokens), on_progress),
            )
        finally:
            if self.store is not None:
                self.store.cancel = None
        if len(tokens) <= self.length.most + 1:
            stalled = self.counters.stall_seconds - stalled
            milliseconds = (time.perf_counter() - started - stalled) * 1e3
            self.drift.observe(target_layer_ms=milliseconds / len(self.target.blocks))
        return logits

    def _reading(self, rows: int, on_progress: OnProgress | None) -> OnAttention | None:
        """A report at every layer of a pass that reads the prompt: paging makes such a pass long."""
        if on_progress is None or rows <= PREFILL_ROWS:
            return self.watch if rows <= PREFILL_ROWS else None
        before = self.session.target_kv.length - self._read_from
        total = len(self.session.tokens) - self._read_from
        layers = len(self.target.blocks)

        def report(layer: int, state: torch.Tensor) -> None:
            done = before + rows * (layer + 1) // layers
            on_progress(Progress("prefill", done, total, "tokens"))

        return report

    def _end_pass(self, accepted_rows: int, tokens: int = 0) -> None:
        predicted, self._predictions = self._predictions, []
        if self.prefetcher is not None:
            predicted = self.prefetcher.predictions()
            self.prefetcher.end_step()
        if self.store is not None:
            count_recall(self.store, predicted, accepted_rows)
        if self._trace is not None:
            rows = len(next(iter(self.store.trace.values())))
            kind = "prefill" if rows > PREFILL_ROWS else "decode"
            self._trace.add(kind, self.store.trace, accepted_rows, tokens, predicted)
        if self.graphs is not None:
            self.graphs.keep(accepted_rows, 0 if self.store is None else self.store.position + 1)
        if self.store is not None:
            self.store.end_pass(accepted_rows)

    def _cutoff_layer(self, num_draft_tokens: int) -> int:
        """Layers to prefetch for, as measured or as the user fixed it."""
        if self.cutoff is not None:
            return self.cutoff
        c, table = self.target.config, self.store.table
        resident = table.num_slots / (c.num_hidden_layers * c.num_local_experts)
        free = table.num_slots - c.num_experts_per_tok if table.shared else table.num_slots
        return cutoff_layer(
            self.drift.profile,
            num_layers=c.num_hidden_layers,
            num_draft_tokens=num_draft_tokens,
            copies_per_layer=expected_copies(
                c.num_local_experts, self._critical_experts, num_draft_tokens, resident
            ),
            free_slots=free,
        )
