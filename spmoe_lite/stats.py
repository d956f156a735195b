"""What happened, counted: experts, bytes, drafts, seconds; and the line that says it.

`Counters` only grow; a run's figures are the difference of two snapshots. Hit rates are given by both
denominators in use: per access (every choice of every accepted token) and per unique expert of a layer
pass. They cover decoding; bytes and loads cover prefill too.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from spmoe_lite.progress import size


@dataclass(slots=True)
class Counters:
    """Totals since the engine was loaded."""

    accesses: int = 0  # accepted (token, layer, choice) while decoding
    access_hits: int = 0  # ... whose expert was in its slot when the layer began
    unique: int = 0  # experts of accepted tokens, once per layer and pass, while decoding
    unique_hits: int = 0
    loads: int = 0  # experts copied because a layer waited for them
    bytes_moved: int = 0  # all copies, host to slot
    stall_seconds: float = 0.0  # decode thread waiting for experts
    prefetches: int = 0  # experts copied on a prediction
    prefetch_useful: int = 0  # ... in place when first needed
    prefetch_late: int = 0  # ... needed while still on their way
    prefetch_wasted: int = 0  # ... evicted unused
    prefetch_dropped: int = 0  # predictions not copied: resident, out of time or no slot to take
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
            **asdict(self.counters),
        }

    def line(self) -> str:
        """The closing line of an answer, in plain words."""
        parts = [f"{self.completion_tokens} tokens"]
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
        return " · ".join(parts)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
