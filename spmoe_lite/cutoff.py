"""How deep drafting may prefetch: the cutoff layer, and the measured times it follows from.

SP-MoE (arXiv 2510.10302, cutoff model): prefetch target layers 0 .. L-1 with the largest L such that
    L k t_IO <= T_draft   (the copies end before drafting does)   and   L k S <= free slots.
Refined: experts that are resident cost nothing, so k becomes the number of copies a layer is expected
to need; and layer l is needed only when the verify pass reaches it, l t_layer after drafting has ended,
so every layer has its own deadline. Pure arithmetic on a `Profile`.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

REQUIRED = ("expert_copy_ms", "draft_token_ms", "target_layer_ms")


@dataclass(frozen=True, slots=True)
class Profile:
    """Times measured on the user's machine for one pair, in milliseconds."""

    expert_copy_ms: float  # one expert, host to slot
    draft_token_ms: float  # one draft pass
    target_layer_ms: float  # one target layer in a verify pass, copies aside

    # What `profile` measures beside, for `plan`; None where it has not.
    plain_layer_ms: float | None = None  # one target layer in a pass of one row
    verify_rows: int | None = None  # rows of the verify pass
    copy_gbps: float | None = None  # one expert after the other to its slot, by copies
    read_gbps: float | None = None  # the same read by a kernel, where the GPU reads host memory
    acceptance: float | None = None  # of a draft token whose predecessors were accepted
    miss_ratio: float | None = None  # misses over those that uniform routing would have
    disk_gbps: float | None = None  # experts read from disk as the RAM tier reads them

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def expected_copies(num_experts: int, k: int, num_draft_tokens: int, resident: float) -> float:
    """Experts of one layer that a draft of N tokens points at and that are not resident.

    Uniform routing: the union of N choices of k out of E is E (1 - (1 - k/E)^N); `resident` is the share
    of the layer's experts that have a slot.
    """
    union = num_experts * (1 - (1 - k / num_experts) ** num_draft_tokens)
    return union * (1 - resident)


def cutoff_layer(
    profile: Profile,
    *,
    num_layers: int,
    num_draft_tokens: int,
    copies_per_layer: float,
    free_slots: int,
) -> int:
    """The number of leading target layers worth prefetching, 0 .. num_layers.

    copies_per_layer: see `expected_copies`. free_slots: slots that prefetched experts may take in all.
    """
    if copies_per_layer <= 0 or num_draft_tokens == 0:
        return 0
    drafting_ms = num_draft_tokens * profile.draft_token_ms
    busy_ms, layers = 0.0, 0
    for layer in range(min(num_layers, int(free_slots / copies_per_layer))):
        busy_ms += copies_per_layer * profile.expert_copy_ms
        if busy_ms > drafting_ms + layer * profile.target_layer_ms:
            break
        layers = layer + 1
    return layers


class Drift:
    """A profile that follows the machine: exponential averages of what the engine sees."""

    def __init__(self, profile: Profile, weight: float = 0.1):
        self.profile = profile
        self._weight = weight

    def observe(self, **seen_ms: float) -> None:
        """Blend one observation of any of the three times into the profile."""
        values = self.profile.to_dict()
        for name, value in seen_ms.items():
            values[name] += self._weight * (value - values[name])
        self.profile = Profile(**values)


def load_profile(path: Path) -> Profile | None:
    """The profile that `save_profile` left there; None if there is none or it is not one."""
    try:
        profile = Profile(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    values = profile.to_dict()
    sane = all(
        (value is None and name not in REQUIRED)
        or (isinstance(value, int | float) and math.isfinite(value) and value >= 0)
        for name, value in values.items()
    )
    return profile if sane else None


def save_profile(path: Path, profile: Profile) -> None:
    """Write it under a temporary name and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(profile.to_dict()) + "\n", encoding="utf-8")
    temporary.replace(path)
