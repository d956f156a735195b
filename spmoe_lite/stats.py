"""What happened, counted: experts, bytes, drafts, seconds; and the line that says it.

`Counters` only grow; a run's figures are the difference of two snapshots. Hit rates are given by both
denominators in use: per access (every choice of every accepted token) and per unique expert of a layer
pass. They cover decoding; bytes and loads cover prefill too. `in_words` and `warnings` are those figures
for people: what happened, and what does not pay.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from spmoe_lite.progress import many, size


@dataclass(slots=True)
class Counters:
    """Totals since the engine was loaded."""

    accesses: int = 0  # accepted (token, layer, choice) while decoding
    access_hits: int = 0  # ... whose expert was in its slot when the layer began
    unique: int = 0  # experts of accepted tokens, once per layer and pass, while decoding
    unique_hits: int = 0
    loads: int = 0  # experts copied because a layer waited for them
    bytes_moved: int = 0  # all copies, host to slot
    ram_hits: int = 0  # experts that went to a slot from the RAM tier, where there is one
    ram_misses: int = 0  # ... that were read from disk first
    ram_returns: int = 0  # experts copied to the RAM tier when they left their slot
    disk_bytes: int = 0  # read from disk by the RAM tier
    stall_seconds: float = (
        0.0  # waiting for experts: measured by the decode thread, or reckoned from
    )
    # the bytes that the GPU read over the bus in captured steps, which nobody sees waiting
    prefetches: int = 0  # experts copied on a prediction
    prefetch_useful: int = 0  # ... in place when first needed
    prefetch_late: int = 0  # ... needed while still on their way (captured steps give them up)
    prefetch_wasted: int = 0  # ... evicted unused
    prefetch_dropped: int = 0  # copies ahead that were given up, or had no slot to take
    predictions: int = 0  # (accepted token, layer) with a prediction
    predicted_best_used: int = 0  # ... whose best guess was among the experts used
    predicted: int = 0  # experts predicted for accepted tokens
    predicted_used: int = 0  # ... that these tokens routed to
    wanted: int = 0  # choices of accepted tokens with a prediction: the recall's denominator
    would_miss: int = 0  # ... not resident when the step began
    would_miss_predicted: int = 0  # ... of which a prediction named
    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # target passes while decoding
    tokens: int = 0  # tokens written

    def since(self, earlier: Counters) -> Counters:
        """The growth between two snapshots."""
        return Counters(
            *(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(Counters))
        )

    def copy(self) -> Counters:
        return replace(self)


@dataclass(frozen=True, slots=True)
class RunStats:
    """One answer in figures. Rates are None where nothing was counted."""

    completion_tokens: int
    seconds: float  # first to last token
    time_to_first_token: float
    counters: Counters

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens after the first, over the time they took."""
        return _ratio(self.completion_tokens - 1, self.seconds)

    @property
    def acceptance(self) -> float | None:
        return _ratio(self.counters.accepted, self.counters.drafted)

    @property
    def hit_rate(self) -> float | None:
        return _ratio(self.counters.access_hits, self.counters.accesses)

    @property
    def hit_rate_unique(self) -> float | None:
        return _ratio(self.counters.unique_hits, self.counters.unique)

    @property
    def stall_share(self) -> float | None:
        """Of the time from first to last token, what was spent waiting for experts."""
        return _ratio(self.counters.stall_seconds, self.seconds)

    @property
    def ram_hit_rate(self) -> float | None:
        """Of the experts that went to a slot, those that the RAM tier had."""
        return _ratio(self.counters.ram_hits, self.counters.ram_hits + self.counters.ram_misses)

    def to_dict(self) -> dict[str, Any]:
        """Every figure under its name, for JSON."""
        return {
            "completion_tokens": self.completion_tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.tokens_per_second,
            "time_to_first_token": self.time_to_first_token,
            "acceptance": self.acceptance,
            "hit_rate": self.hit_rate,
            "hit_rate_unique": self.hit_rate_unique,
            "ram_hit_rate": self.ram_hit_rate,
            **asdict(self.counters),
        }

    def line(self) -> str:
        """The closing line of an answer, in plain words."""
        parts = [f"{self.completion_tokens} {many('token', self.completion_tokens)}"]
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:.1f} tok/s")
        if self.completion_tokens:
            parts.append(f"first token {self.time_to_first_token:.2f} s")
        if self.acceptance is not None:
            parts.append(f"acceptance {self.acceptance:.0%}")
        if self.hit_rate is not None:
            parts.append(f"hit rate {self.hit_rate:.0%}")
        if self.counters.bytes_moved:
            parts.append(f"{size(self.counters.bytes_moved)} moved")
        if self.ram_hit_rate is not None:
            parts.append(f"{self.ram_hit_rate:.0%} of them from RAM")
            parts.append(f"{size(self.counters.disk_bytes)} read from disk")
        return " · ".join(parts)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


REGIMES = {
    "all-resident": "captured; every expert has a slot",
    "dynamic": "captured; the GPU reads missing experts by itself and says which ones stay",
    "host-driven": "driven by the host, layer by layer",
}
JUDGED_DRAFTS, LEAST_ACCEPTED = 200, 0.3  # fewer accepted than this hardly ever pay for drafting
JUDGED_COPIES, LEAST_USED = 200, 0.25


def in_words(stats: dict[str, Any]) -> list[list[str]]:
    """Rows (what, how much) of `Engine.stats`; what was never counted has none."""
    c: Counters = stats["counters"]
    regime = stats.get("regime", "")
    rows = {"steps": REGIMES.get(regime, regime)}
    if stats.get("experts"):
        rows["experts in slots"] = f"{stats['slots']:,} of {stats['experts']:,}"
    if c.tokens:
        rows["written"] = f"{c.tokens:,} {many('token', c.tokens)}"
        if c.steps:
            each = f"{c.tokens / c.steps:.2f} a step"
            rows["written"] += f" in {c.steps:,} {many('step', c.steps)}, {each}"
    if c.drafted:
        share = f"{c.accepted / c.drafted:.0%}"
        rows["drafted"] = f"{c.drafted:,} {many('token', c.drafted)}, {share} accepted"
    if c.accesses:
        by_use, by_layer = c.access_hits / c.accesses, c.unique_hits / c.unique
        rows["hits"] = f"{by_use:.0%} of uses, {by_layer:.0%} of the experts that a layer needs"
    if c.bytes_moved:
        ahead = f", {c.prefetches:,} ahead of need" if c.prefetches else ""
        loads = f"{c.loads:,} {many('expert', c.loads)}"
        rows["moved"] = f"{size(c.bytes_moved)}: {loads} when needed{ahead}"
    if c.prefetches or c.prefetch_dropped:
        layers = stats.get("cutoff_layer") or 0
        rows["copied ahead"] = (
            f"{c.prefetch_useful:,} in time, {c.prefetch_late:,} late, {c.prefetch_wasted:,} never "
            f"used; for {layers} {many('layer', layers)} now"
        )
    if c.wanted:
        rows["predicted"] = f"{c.predicted_used / c.wanted:.0%} of the experts used"
        if c.would_miss:
            rows["predicted"] += f", {c.would_miss_predicted / c.would_miss:.0%} of those missing"
    if c.stall_seconds >= 0.05:
        how = "" if regime == "host-driven" else ", by the bytes of those that were missing"
        rows["waited for experts"] = f"{c.stall_seconds:.1f} s{how}"
    if c.ram_hits or c.ram_misses:
        rate = c.ram_hits / (c.ram_hits + c.ram_misses)
        rows["from RAM"] = f"{rate:.0%} of the experts moved; {size(c.disk_bytes)} read from disk"
    return [[what, how_much] for what, how_much in rows.items() if how_much]


def warnings(counters: Counters, drafting_paused: bool, prefetch_paused: bool) -> list[str]:
    """What does not pay here, a line each."""
    c, found = counters, []
    if drafting_paused:
        found.append("drafting does not pay now: steps without it were measured to be faster")
    elif c.drafted >= JUDGED_DRAFTS and c.accepted < LEAST_ACCEPTED * c.drafted:
        found.append(
            f"drafting hardly pays: {c.accepted / c.drafted:.0%} of the drafted tokens are accepted; "
            f"try --draft-tokens auto, or another draft"
        )
    used = c.prefetch_useful + c.prefetch_late
    if prefetch_paused:
        found.append("copying ahead does not pay now: too few of the last copies were used")
    elif c.prefetches >= JUDGED_COPIES and used < LEAST_USED * c.prefetches:
        found.append(
            f"copying ahead hardly pays: {used / c.prefetches:.0%} of the copied experts were used; "
            f"try a lower --cutoff"
        )
    return found
