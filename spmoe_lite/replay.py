"""What other cache policies would have made of a recorded run; no model, no device, no clock.

One layer of one pass is one event, and its members, the experts that any row of the pass chose, are
served together (event-atomic replay, arXiv 2608.07911, definition 2):

    missed: the members without a slot when the layer begins
    uses by accepted rows are noted, those by rejected rows never count as use
    each missed member takes a free slot, else that of a victim, never of a member of the same event;
    one that finds no victim is used and not kept

A pass of prefill only fills free slots, as the engine's prefill keeps what decoding has gathered, and
nothing of it is scored. Rates are the engine's own (`stats.py`): hits of accepted choices, and of their
unique experts. Misses and copies count rejected rows too, whose experts cross the bus as well. There is
no time in it: a prefetch always arrives, a copy hides behind nothing.

Experts are numbered through all layers: key = layer * experts + expert. Every policy is a class with
`begin(step)`, the copies made before a pass, and `serve(event)`, the members that were missed.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spmoe_lite.errors import UsageError
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.trace import Header, Pass, Trace

FEW = 64  # choices that are counted faster one by one
ROW_BITS = 32  # of a time: the rest is the event
NEVER = 1 << 62  # the next use of an expert that is not used again

POLICIES = {
    "layer-lru": "every layer owns an equal share of the slots; the least recently used leaves",
    "global-lru": "one pool; by the token that used it last, known when the pass is over: the engine's",
    "textbook-lru": "one pool; by the moment of the last use",
    "layer-lfru": "shares; the least uses / (events since the last + 1) leaves (arXiv 2608.07911)",
    "global-lfru": "the same with one pool",
    "static": "the most frequent experts, for good (Fiddler, llama.cpp)",
    "stream": "whole layers in turn through the slots of two layers; the other slots are pinned",
    "next-layer": "layer-lru, and what the next layer's router says one layer early (AdapMoE)",
    "prefetch": "layer-lru, and the draft's predictions copied before the pass: the engine's own",
    "layer-belady": "shares; the one needed latest leaves, which takes knowing the future",
    "global-belady": "the same with one pool",
    "belady-bypass": "one pool, and a missed expert need not stay: no policy without prefetch copies less",
}


class Event(NamedTuple):
    """One layer of one pass."""

    layer: int
    number: int  # among all events
    decode: bool
    members: tuple[int, ...]  # keys, ascending: the union over all rows
    used: tuple[tuple[int, int, int], ...]  # (key, last row, choices) of the accepted rows


@dataclass(frozen=True, slots=True)
class Step:
    """One pass: its events, and what the draft had predicted for it, as keys in the engine's order."""

    decode: bool
    accepted: int  # rows
    tokens: int  # of text
    predicted: tuple[tuple[int, ...], ...]
    events: tuple[Event, ...]


class Timeline:
    """A trace as events."""

    def __init__(self, trace: Trace):
        self.header: Header = trace.header
        self._known: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # one of each: memory
        self._keys = list(range(self.header.layers * self.header.experts))  # the same
        self.steps = [
            self._step(one, number * self.header.layers) for number, one in enumerate(trace.passes)
        ]

    def _step(self, one: Pass, first: int) -> Step:
        k, experts, decode = self.header.k, self.header.experts, one.kind == "decode"
        row_of = [i // k for i in range(one.accepted * k)]
        events = []
        for layer, chosen in enumerate(one.experts):
            base = layer * experts
            accepted = chosen[: len(row_of)]
            count = Counter(accepted).__getitem__ if len(accepted) > FEW else accepted.count
            last_row = dict(zip(accepted, row_of, strict=True))
            used = [(base + e, row, count(e)) for e, row in last_row.items()]
            events.append(
                Event(
                    layer,
                    first + layer,
                    decode,
                    tuple([self._keys[base + e] for e in sorted(set(chosen))]),
                    tuple([self._known.setdefault(one_use, one_use) for one_use in used]),
                )
            )
        predicted = tuple(
            tuple(self._keys[layer * experts + e] for e in guess)
            for layer, _, guess in sorted(one.predictions, key=lambda p: p[:2])
        )
        return Step(decode, one.accepted, one.tokens, predicted, tuple(events))

    @cached_property
    def uses(self) -> list[list[int]]:
        """For each key the decoding events it is a member of, ascending, and NEVER at the end."""
        found: list[list[int]] = [[] for _ in self._keys]
        for step in self.steps:
            if step.decode:
                for event in step.events:
                    for key in event.members:
                        found[key].append(event.number)
        for events in found:
            events.append(NEVER)
        return found

    def frequent(self, steps: Iterable[Step]) -> list[int]:
        """All keys, those most often chosen by accepted rows of these decoding passes first."""
        count: Counter[int] = Counter()
        for step in steps:
            if step.decode:
                for event in step.events:
                    for key, _, choices in event.used:
                        count[key] += choices
        return sorted(self._keys, key=lambda key: (-count[key], key))


# --- policies ----------------------------------------------------------------------------------


class Policy:
    """Slots in one pool or one a layer. A subclass says who leaves, and what a use changes."""

    streams = False  # what is missed is on its way already and not copied again

    def __init__(self, header: Header, slots: int, shared: bool):
        self.resident: set[int] = set()
        self._experts = header.experts
        self._shared = shared or slots // header.layers < header.k  # as the engine's SlotTable
        layers = 1 if self._shared else header.layers
        self._free = [len(range(i, slots, layers)) for i in range(layers)]
        self._room = tuple(self._free)

    def begin(self, step: Step) -> int:
        """Before the pass: copy ahead; returns how many experts."""
        return 0

    def serve(self, event: Event) -> Sequence[int]:
        """The members that had no slot when the layer began."""
        resident = self.resident
        missed = [key for key in event.members if key not in resident]
        self._credit(event)
        if missed:
            self._admit(event, missed)
        return missed

    def _admit(self, event: Event, missed: Sequence[int]) -> None:
        pool = 0 if self._shared else event.layer
        wanted = len(missed) - self._free[pool]
        if wanted > 0 and event.decode:
            self._evict(pool, self._victims(pool, wanted, event))
        if self._free[pool]:
            self._keep(pool, missed[: self._free[pool]])

    def _evict(self, pool: int, keys: Sequence[int]) -> None:
        self.resident.difference_update(keys)
        self._free[pool] += len(keys)

    def _keep(self, pool: int, keys: Sequence[int]) -> None:
        self.resident.update(keys)
        self._free[pool] -= len(keys)

    def _victims(self, pool: int, count: int, event: Event) -> list[int]:
        """Up to `count` residents of the pool, none of them a member, in the order they leave."""
        raise NotImplementedError

    def _credit(self, event: Event) -> None:
        """Note who was used; before anyone is evicted, which makes no difference to non-members."""


class LRU(Policy):
    """Whom the oldest accepted token used last leaves; never used comes first, ties go by key.

    As in the engine a pass is credited when it is over and its accepted rows are known. One heap entry
    for each resident; uses only move it back, so it is corrected when it is looked at.
    """

    def __init__(self, header: Header, slots: int, shared: bool):
        super().__init__(header, slots, shared)
        self._last = [-1] * (header.layers * header.experts)
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in self._free]
        self._tokens = 0  # accepted before the pass at hand
        self._step: Step | None = None

    def begin(self, step: Step) -> int:
        if self._step is not None:
            self._end(self._step)
        self._step = step
        return 0

    def _end(self, step: Step) -> None:
        last, tokens = self._last, self._tokens
        for event in step.events:
            for key, row, _ in event.used:
                last[key] = tokens + row
        self._tokens += step.accepted

    def _keep(self, pool: int, keys: Sequence[int]) -> None:
        super()._keep(pool, keys)
        for key in keys:
            heapq.heappush(self._heaps[pool], (self._last[key], key))

    def _victims(self, pool: int, count: int, event: Event) -> list[int]:
        return self._oldest(pool, count, event.members)

    def _oldest(self, pool: int, count: int, spared: Collection[int]) -> list[int]:
        heap, last = self._heaps[pool], self._last
        found: list[int] = []
        aside: list[tuple[int, int]] = []
        while heap and len(found) < count:
            then, key = heap[0]
            if then != last[key]:
                heapq.heapreplace(heap, (last[key], key))
            elif key in spared:
                aside.append(heapq.heappop(heap))
            else:
                found.append(heapq.heappop(heap)[1])
        for entry in aside:
            heapq.heappush(heap, entry)
        return found


class TextbookLRU(LRU):
    """Whose last use is oldest leaves, layer by layer: over a sweep longer than the cache no hit."""

    def _end(self, step: Step) -> None:
        pass

    def _credit(self, event: Event) -> None:
        for key, row, _ in event.used:
            self._last[key] = event.number << ROW_BITS | row


class Prefetch(LRU):
    """`layer-lru`, and before a pass the predictions of the draft, layer by layer, row by row.

    As in `store.prefetch`: what is predicted for the pass so far is never a victim; without a victim
    the prediction is dropped.
    """

    def begin(self, step: Step) -> int:
        copies = super().begin(step)
        expected: set[int] = set()
        for keys in step.predicted:
            expected.update(keys)
            for key in keys:
                pool = 0 if self._shared else key // self._experts
                if key in self.resident:
                    continue
                if not self._free[pool]:
                    self._evict(pool, self._oldest(pool, 1, expected))
                if self._free[pool]:
                    self._keep(pool, [key])
                    copies += 1
        return copies


class LFRU(Policy):
    """Who has the least uses / (events since the last + 1) leaves; counts are never reset."""

    def __init__(self, header: Header, slots: int, shared: bool):
        super().__init__(header, slots, shared)
        every = header.layers * header.experts
        self._last, self._uses = np.zeros(every), np.zeros(every)
        self._here = np.zeros(every, dtype=bool)

    def _evict(self, pool: int, keys: Sequence[int]) -> None:
        super()._evict(pool, keys)
        self._here[keys] = False

    def _keep(self, pool: int, keys: Sequence[int]) -> None:
        super()._keep(pool, keys)
        self._here[keys] = True

    def _victims(self, pool: int, count: int, event: Event) -> list[int]:
        width = len(self._here) if self._shared else self._experts
        base = pool * width
        able = self._here[base : base + width].copy()
        able[[key - base for key in event.members]] = False
        keys = able.nonzero()[0] + base
        if count < len(keys):
            score = self._uses[keys] / (event.number - self._last[keys] + 1)
            limit = np.partition(score, count - 1)[count - 1]
            below, level = keys[score < limit], keys[score == limit]
            keys = np.concatenate((below, level[: count - len(below)]))
        return keys.tolist()

    def _credit(self, event: Event) -> None:
        for key, _, choices in event.used:
            self._last[key] = event.number
            self._uses[key] += choices


class Pinned(Policy):
    """Experts that are there from the start and stay; nothing else is ever kept."""

    def __init__(self, header: Header, slots: int, pinned: Iterable[int]):
        super().__init__(header, slots, shared=True)
        self.resident.update(pinned)

    def serve(self, event: Event) -> Sequence[int]:
        return [key for key in event.members if key not in self.resident]


class Stream(Pinned):
    """Every pass copies every layer, but for what is pinned: as many experts of each layer.

    Nothing is predicted, so no copy ever comes too late, and none is spared.
    """

    streams = True

    def __init__(self, header: Header, slots: int):
        spare = max(0, slots - 2 * header.experts)
        in_turn = (divmod(number, header.layers) for number in range(spare))
        pinned = [layer * header.experts + expert for expert, layer in in_turn]
        super().__init__(header, slots, pinned)
        self._copies = header.layers * header.experts - spare

    def begin(self, step: Step) -> int:
        return self._copies if step.decode else 0


class Belady(Policy):
    """Who is needed latest leaves. `bypass`: a missed expert stays only if it is needed sooner.

    Without `bypass` a missed expert always takes a slot, as in the engine, and this is the optimum
    under that rule as long as an event's members fit; with it, of all caches that do not prefetch.

    Of the heap entries (-next use, key) those with a next use that has come to pass are void.
    """

    def __init__(self, timeline: Timeline, slots: int, shared: bool, bypass: bool = False):
        super().__init__(timeline.header, slots, shared)
        self._bypass = bypass
        self._uses = timeline.uses
        self._past = [0] * len(self._uses)  # of a key's uses
        self._next = [events[0] for events in self._uses]
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in self._free]

    def _credit(self, event: Event) -> None:
        if not event.decode:
            return
        pool, after = 0 if self._shared else event.layer, self._next
        for key in event.members:
            self._past[key] += 1
            after[key] = self._uses[key][self._past[key]]
        self._push(pool, [key for key in event.members if key in self.resident])
        heap = self._heaps[pool]
        if len(heap) > 64 + 2 * self._room[pool]:
            heap[:] = [entry for entry in heap if self._valid(entry)]
            heapq.heapify(heap)

    def _admit(self, event: Event, missed: Sequence[int]) -> None:
        missed = sorted(missed, key=self._next.__getitem__)
        if not self._bypass or not event.decode:
            return super()._admit(event, missed)
        pool = 0 if self._shared else event.layer
        for key in missed:
            if not self._free[pool]:
                latest = self._latest(pool, 1, ())
                if self._next[latest[0]] <= self._next[key]:
                    self._push(pool, latest)
                    break
                self._evict(pool, latest)
            self._keep(pool, [key])

    def _keep(self, pool: int, keys: Sequence[int]) -> None:
        super()._keep(pool, keys)
        self._push(pool, keys)

    def _victims(self, pool: int, count: int, event: Event) -> list[int]:
        return self._latest(pool, count, event.members)

    def _latest(self, pool: int, count: int, spared: Collection[int]) -> list[int]:
        """The residents needed latest, but for those spared; they are off the heap afterwards."""
        heap = self._heaps[pool]
        found: list[int] = []
        aside: list[int] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            if self._valid(entry):
                (aside if entry[1] in spared else found).append(entry[1])
        self._push(pool, aside)
        return found

    def _valid(self, entry: tuple[int, int]) -> bool:
        return entry[1] in self.resident and self._next[entry[1]] == -entry[0]

    def _push(self, pool: int, keys: Iterable[int]) -> None:
        for key in keys:
            heapq.heappush(self._heaps[pool], (-self._next[key], key))


# --- scores ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy did in the passes that count. Rates are None where nothing was counted."""

    policy: str
    slots: int
    tokens: int  # of text
    accesses: int  # choices of accepted rows
    access_hits: int
    unique: int  # their experts, once for each layer and pass
    unique_hits: int
    misses: int  # experts absent when their layer began, those of rejected rows too
    copies: int  # experts over the bus: misses and what was copied ahead
    expert_bytes: int

    @property
    def hit_rate(self) -> float | None:
        return self.access_hits / self.accesses if self.accesses else None

    @property
    def hit_rate_unique(self) -> float | None:
        return self.unique_hits / self.unique if self.unique else None

    @property
    def misses_per_token(self) -> float:
        return self.misses / self.tokens

    @property
    def bytes_per_token(self) -> float:
        return self.copies * self.expert_bytes / self.tokens

    def seconds_per_token(self, link: float) -> float:
        """Of the bus alone, at `link` GB/s, nothing hidden behind computing."""
        return self.bytes_per_token / (link * 1e9)

    def to_dict(self, link: float) -> dict[str, Any]:
        """Every figure under its name, for JSON."""
        return {
            **asdict(self),
            "hit_rate": self.hit_rate,
            "hit_rate_unique": self.hit_rate_unique,
            "misses_per_token": self.misses_per_token,
            "bytes_per_token": self.bytes_per_token,
            "seconds_per_token": self.seconds_per_token(link),
        }


@dataclass(frozen=True, slots=True)
class Comparison:
    """The scores of several policies on one trace, by slots and then by misses."""

    scores: list[Score]
    left_out: dict[str, str]  # policies that were asked for, and why the trace cannot say
    passes: int  # that count
    tokens: int  # of theirs
    union_sizes: dict[int, int]  # members of an event -> how many of the events that count

    @property
    def union(self) -> float:
        """The mean number of experts a layer needs in a pass."""
        events = sum(self.union_sizes.values())
        return sum(n * count for n, count in self.union_sizes.items()) / events


def replay(timeline: Timeline, policy: Policy, *, name: str, slots: int, first: int = 0) -> Score:
    """Run all passes under a new policy; count the decoding ones from number `first` on."""
    tokens = accesses = unique = misses = copies = lost_accesses = lost_unique = 0
    for number, step in enumerate(timeline.steps):
        counts = step.decode and number >= first
        ahead = policy.begin(step)
        if counts:
            tokens += step.tokens
            accesses += step.accepted * timeline.header.k * len(step.events)
            copies += ahead
        for event in step.events:
            missed = policy.serve(event)
            if not counts:
                continue
            unique += len(event.used)
            if missed:
                misses += len(missed)
                gone = set(missed)
                for key, _, choices in event.used:
                    if key in gone:
                        lost_unique += 1
                        lost_accesses += choices
    return Score(
        policy=name,
        slots=slots,
        tokens=tokens,
        accesses=accesses,
        access_hits=accesses - lost_accesses,
        unique=unique,
        unique_hits=unique - lost_unique,
        misses=misses,
        copies=copies + (0 if policy.streams else misses),
        expert_bytes=timeline.header.expert_bytes,
    )


def compare(
    trace: Trace,
    *,
    slots: Sequence[int] = (),
    policies: Sequence[str] = (),
    warm_up: float = 0.5,
    calibration: Trace | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Replay `trace` under each policy with each number of slots; all policies and the recorded number
    if none are given.

    The first `warm_up` of the passes fills the slots and is not counted. `static` learns from these
    passes, or from those of `calibration`. UsageError for names and numbers that cannot be.
    """
    header = trace.header
    every = header.layers * header.experts
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policy {name}: one of {', '.join(POLICIES)}")
    for number in slots:
        if not min(2, every) <= number <= every:
            raise UsageError(f"--slots {number}: {min(2, every)} to {every} for this trace")
    if not 0 <= warm_up < 1:
        raise UsageError(f"--warm-up {warm_up:g}: a share of the passes, from 0 to less than 1")
    timeline, first = Timeline(trace), int(len(trace.passes) * warm_up)
    counted = [step for step in timeline.steps[first:] if step.decode]
    tokens = sum(step.tokens for step in counted)
    if not tokens:
        raise UsageError(
            f"no token was written in the {len(trace.passes) - first} passes that count: record a "
            f"longer answer, or lower --warm-up"
        )
    teachers = timeline if calibration is None else _calibration(calibration, header)
    lessons = teachers.steps[: first if calibration is None else None]
    frequent = teachers.frequent(lessons) if any(step.decode for step in lessons) else None
    left_out, runs = {}, []
    for name in dict.fromkeys(policies or POLICIES):
        if reason := _missing(name, timeline, frequent):
            left_out[name] = reason
        else:
            runs += [(name, number) for number in dict.fromkeys(slots or [header.slots])]
    if not runs:
        raise UsageError("; ".join(f"--policy {name}: {why}" for name, why in left_out.items()))
    scores = []
    for done, (name, number) in enumerate(runs):
        check(cancel)
        if on_progress is not None:
            on_progress(Progress("replay", done, len(runs), "runs"))
        policy = _policy(name, timeline, number, frequent)
        scores.append(replay(timeline, policy, name=name, slots=number, first=first))
    sizes = Counter(len(event.members) for step in counted for event in step.events)
    return Comparison(
        scores=sorted(scores, key=lambda one: (one.slots, one.misses, one.copies)),
        left_out=left_out,
        passes=len(counted),
        tokens=tokens,
        union_sizes=dict(sorted(sizes.items())),
    )


def _calibration(trace: Trace, header: Header) -> Timeline:
    shapes = [(one.layers, one.experts) for one in (trace.header, header)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"--calibration is of {trace.header.model}, {shapes[0][0]} layers x {shapes[0][1]} "
            f"experts; the trace has {shapes[1][0]} x {shapes[1][1]}"
        )
    return Timeline(trace)


def _missing(name: str, timeline: Timeline, frequent: list[int] | None) -> str | None:
    """Why this trace says nothing about the policy; None if it does."""
    if name == "next-layer":
        return "a trace does not hold what the next layer's router says one layer early"
    if name == "prefetch" and not any(step.predicted for step in timeline.steps):
        return "it holds no predictions; docs/cache.md says how they are recorded"
    if name == "static" and frequent is None:
        return "it has no decoding pass to learn from; raise --warm-up, or give --calibration"
    return None


def _policy(name: str, timeline: Timeline, slots: int, frequent: list[int] | None) -> Policy:
    header, shared = timeline.header, name.startswith("global-")
    match name.removeprefix("layer-").removeprefix("global-"):
        case "lru":
            return LRU(header, slots, shared)
        case "textbook-lru":
            return TextbookLRU(header, slots, shared=True)
        case "lfru":
            return LFRU(header, slots, shared)
        case "belady":
            return Belady(timeline, slots, shared)
        case "belady-bypass":
            return Belady(timeline, slots, shared=True, bypass=True)
        case "prefetch":
            return Prefetch(header, slots, shared)
        case "stream":
            return Stream(header, slots)
        case _:
            assert name == "static" and frequent is not None
            return Pinned(header, slots, frequent[:slots])
