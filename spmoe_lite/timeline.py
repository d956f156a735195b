"""What the bus and the device did during one step, for `bench` to draw.

    draft, target    passes of the models
    wait             the device waits for experts (without a GPU: the thread that decodes copies them)
    demand, ahead    copies of experts that a layer asked for, and of those that were predicted

A moment is an event on the stream that has it to do, or without a GPU the host's clock. Marks cost time, so
recorded steps are counted nowhere. Inside captured steps, where kernels read missing experts by themselves,
nothing can be marked: there the times of the passes are measured, and the copies reckoned from how many there
were, each as long as the bus takes for it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from spmoe_lite.graphs import Found
from spmoe_lite.policies import HostDriven

KINDS = ("draft", "target", "wait", "demand", "ahead")
Moment = Any  # torch.cuda.Event, or seconds


@dataclass(frozen=True, slots=True)
class Span:
    """Milliseconds from the beginning of the step."""

    kind: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of a row."""

    label: str
    spans: tuple[Span, ...]

    @property
    def milliseconds(self) -> float:
        return max(span.end for span in self.spans)

    def to_dict(self) -> dict[str, Any]:
        return {"label": self.label, "spans": [asdict(span) for span in self.spans]}


class Log:
    """Spans as they happen."""

    def __init__(self, device: torch.device, is_guess: Callable[[], bool]):
        self.is_guess = is_guess
        self._device = device
        self._spans: list[tuple[str, Moment, Moment]] = []
        self._start = self.mark()

    def mark(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """Now, or when the stream has done what it was given so far."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def add(self, kind: str, begin: Moment, end: Moment) -> None:
        self._spans.append((kind, begin, end))

    def spans(self) -> list[Span]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [Span(kind, self._since(a), self._since(b)) for kind, a, b in self._spans]

    def _since(self, moment: Moment) -> float:
        if self._device.type == "cuda":
            return float(self._start.elapsed_time(moment))
        return (moment - self._start) * 1e3


class RecordedSlab:
    """Beside a slab's class, before it: notes copies and waits while there is a log."""

    log: Log | None = None
    _stream: torch.cuda.Stream | None = None

    def fill(self, *args: Any) -> None:
        self._noted(super().fill, *args)  # type: ignore[misc]

    def fill_pieces(self, *args: Any, **given: Any) -> Any:
        return self._noted(super().fill_pieces, *args, **given)  # type: ignore[misc]

    def wait_filled(self, slots: Iterable[int]) -> None:
        if (log := self.log) is None:
            super().wait_filled(slots)  # type: ignore[misc]
            return
        begin = log.mark()
        super().wait_filled(slots)  # type: ignore[misc]
        log.add("wait", begin, log.mark())

    def _noted(self, copy: Callable[..., Any], *args: Any, **given: Any) -> Any:
        if (log := self.log) is None:
            return copy(*args, **given)
        begin = log.mark(self._stream)
        done = copy(*args, **given)
        end, guess = log.mark(self._stream), log.is_guess()
        log.add("ahead" if guess else "demand", begin, end)
        if self._stream is None and not guess:
            log.add("wait", begin, end)
        return done


def record(engine: Any, label: str, answer: Callable[[], object]) -> Timeline | None:
    """Record `answer`, which runs the engine; one of its steps. None if there is none.

    The engine's slab is a `RecordedSlab`, its store a `HostDriven`; it is of no use for measuring after.
    """
    decoder = engine.decoder
    store: HostDriven = decoder.store
    log = Log(engine.device, store.is_guess)
    _note_passes(decoder.target, "run", "target", log)
    if decoder.drafts is not None:
        _note_passes(decoder.drafts.passes, "replay", "draft", log)
    elif decoder.draft is not None:
        _note_passes(decoder.draft, "run", "draft", log)
    slab: Any = store.slab
    slab.log = log
    try:
        answer()
    finally:
        slab.log = None
    return Timeline(label, spans) if (spans := _last_step(log.spans())) else None


def record_captured(engine: Any, label: str, answer: Callable[[], object]) -> Timeline | None:
    """The same of an engine whose steps are captured: the last one with most drafts."""
    graphs, steps = engine.decoder.graphs, list[Found]()
    step = graphs.step

    def noted(*args: Any) -> Found:
        steps.append(step(*args))
        return steps[-1]

    graphs.step = noted
    try:
        answer()
    finally:
        graphs.step = step
    most = max((len(found.proposal) for found in steps), default=0)
    last = [found for found in steps if len(found.proposal) == most and found.missed is not None]
    copy_ms = engine.plan.slot_bytes / engine.plan.read_rate * 1e3
    start = graphs.layers_ahead / len(engine.decoder.target.blocks)
    return (
        Timeline(f"{label}, captured", tuple(_reckoned(last[-1], copy_ms, start))) if last else None
    )


def _reckoned(found: Found, copy_ms: float, start: float) -> Iterator[Span]:
    """Passes as measured; each layer waits for what it misses; copies ahead begin within the first draft.

    start: the share of a draft pass after which its predictions are there.
    """
    assert found.missed is not None and found.fetched is not None
    drafts, misses = len(found.proposal), found.missed.sum(axis=1).tolist()
    draft_ms, verify_ms = found.draft_ms, found.verify_ms
    for i in range(drafts):
        yield Span("draft", i * draft_ms / drafts, (i + 1) * draft_ms / drafts)
    yield Span("target", draft_ms, draft_ms + verify_ms)
    if sum(misses) * copy_ms > verify_ms:
        copy_ms = verify_ms / sum(misses)
    layer_ms = (verify_ms - sum(misses) * copy_ms) / len(misses)
    at = draft_ms
    for missed in misses:
        if missed:
            yield Span("wait", at, at + missed * copy_ms)
            yield Span("demand", at, at + missed * copy_ms)
        at += missed * copy_ms + layer_ms
    at = start * draft_ms / max(1, drafts)
    for _ in found.fetched:
        yield Span("ahead", at, at + copy_ms)
        at += copy_ms


def _note_passes(one: Any, method: str, kind: str, log: Log) -> None:
    inner = getattr(one, method)

    def run(*args: Any, **given: Any) -> Any:
        begin = log.mark()
        found = inner(*args, **given)
        log.add(kind, begin, log.mark())
        return found

    setattr(one, method, run)


def _last_step(spans: list[Span]) -> tuple[Span, ...]:
    """The last step among those with most drafts, cut out: from one target pass's end to the next one's."""
    ends = sorted(span.end for span in spans if span.kind == "target")
    steps = []
    for start, end in itertools.pairwise(ends):
        found = [
            Span(s.kind, max(s.begin, start) - start, min(s.end, end) - start)
            for s in spans
            if s.end > start and s.begin < end
        ]
        drafts = sum(span.kind == "draft" for span in found)
        steps.append((drafts, start, tuple(sorted(found, key=lambda s: (s.begin, s.kind)))))
    return max(steps, key=lambda step: step[:2], default=(0, 0.0, ()))[2]
