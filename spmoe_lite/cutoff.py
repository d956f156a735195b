"""How deep drafting may prefetch: the cutoff layer, and the measured times it follows from.

SP-MoE (arXiv 2510.10302, cutoff model): prefetch target layers 0 .. L-1 with the largest L such that
    L k t_IO <= T_draft   (the copies end before drafting does)   and   L k S <= free slots.
Refined: experts that are resident cost nothing, so k becomes the number of copies a layer is expected
to need. The last layer may have only a part of its copies made. Nothing is copied ahead once the target's
pass has begun, though its later layers could still have waited: misses keep the bus busy then. Where the
device decides (`graphs.py`), `copies_queued` bounds the copies instead, and the cutoff is the layer in
which they run out. Pure arithmetic on a `Profile`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from spmoe_lite.errors import DamagedError, SpmoeError
from spmoe_lite.files import (
    PARTIAL,
    disk_error,
    is_whole,
    load_json,
    naming,
    open_confined,
    write_whole,
)

log = logging.getLogger("spmoe_lite")

REQUIRED = ("expert_copy_ms", "draft_token_ms", "target_layer_ms")
MAX_FILE_BYTES = 64 << 10

# What a kept profile may say, least and most. 0 is allowed beside where it means that a thing is not
# known or takes no time; nothing nearer to it is where it is divided by.
BOUNDS = {
    "_ms": (1e-9, 1e9),
    "_gbps": (1e-6, 1e6),
    "verify_rows": (1, 1000),
    "acceptance": (0.0, 1.0),
    "miss_ratio": (1e-9, 1e5),  # with one expert absent: as many as there are
}


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
    """The number of leading target layers worth prefetching, 0 .. num_layers; the last one maybe in part.

    copies_per_layer: see `expected_copies`. free_slots: slots that prefetched experts may take in all.
    """
    if copies_per_layer <= 0 or num_draft_tokens == 0:
        return 0
    drafting_ms = num_draft_tokens * profile.draft_token_ms
    busy_ms, layers = 0.0, 0
    for layer in range(min(num_layers, int(free_slots / copies_per_layer))):
        if busy_ms + profile.expert_copy_ms > drafting_ms:
            break
        busy_ms += copies_per_layer * profile.expert_copy_ms
        layers = layer + 1
    return layers


def copies_queued(profile: Profile, num_draft_tokens: int, start: float) -> list[int]:
    """How many copies ahead a captured step may have waiting or under way, at each draft token.

    As many as keep the bus busy until the next draft token says more, at the last one until drafting ends,
    to the nearest; what is then still under way of those before is counted in. No more: what is copied, and
    who leaves for it, is best chosen late. start: the share of a draft pass after which its predictions are
    there.
    """
    draft_ms, copy_ms = profile.draft_token_ms, max(profile.expert_copy_ms, 1e-6)

    def fitting(ms: float) -> int:
        return round(max(0.0, min(ms / copy_ms, 1e6)))

    end, busy_until, queued = (num_draft_tokens - start) * draft_ms, 0.0, []
    for i in range(num_draft_tokens):  # times since the first predictions
        now, following = i * draft_ms, min((i + 1) * draft_ms, end)
        begin = max(busy_until, now)
        waiting, more = math.ceil((begin - now) / copy_ms - 1e-6), fitting(following - begin)
        if not waiting:  # a copy that takes longer than the pass
            more = more or min(1, fitting(end - now))
        queued.append(waiting + more if more else min(waiting, fitting(end - now)))
        busy_until = begin + more * copy_ms
    return queued


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
    """The profile that `save_profile` left there; None if there is none, or it cannot be used.

    Why it cannot is a warning, once. Fields that older versions did not have are None.
    """
    try:
        return _checked(load_json(_read(path), path))
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(f"no times measured before are used: {disk_error(error, path, 'read')}")
    except DamagedError as error:
        why = str(error).removeprefix(f"{path} ").rpartition(";")[0]
        _warn_once(f"{path} is not used: it {why}; run profile again")
    return None


def _read(path: Path) -> bytes:
    try:
        file = open_confined(path.parent, path.name)
    except DamagedError:
        raise DamagedError("is not a regular file of its folder;") from None
    with file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise DamagedError(f"has more than {MAX_FILE_BYTES} bytes;")
    return data


def _checked(values: Any) -> Profile:
    """The profile of a file's JSON, every field of it; `DamagedError` if that is none."""
    if not isinstance(values, dict):
        raise DamagedError("is not a JSON object;")
    names = {field.name for field in fields(Profile)}
    if other := sorted(values.keys() - names):
        raise DamagedError(f"has a field of no profile, {other[0]!r:.40};")
    for name in sorted(names):
        value: Any = values.get(name)
        if value is None and name not in REQUIRED:
            continue
        least, most = next(bounds for end, bounds in BOUNDS.items() if name.endswith(end))
        number = is_whole(value) or (isinstance(value, float) and name != "verify_rows")
        zero = value == 0 and not name.endswith("_gbps")
        if not number or not (zero or least <= value <= most):
            raise DamagedError(f"gives {name} as {value!r:.40}, not as {least:g} to {most:g};")
    return Profile(**values)


@functools.lru_cache(maxsize=64)
def _warn_once(text: str) -> None:
    """A load reads the file several times."""
    log.warning("%s", text)


def save_profile(path: Path, profile: Profile) -> None:
    """Write it whole or not at all; a `SpmoeError` names what is in the way."""
    check_place(path)
    write_whole(path, json.dumps(profile.to_dict()) + "\n")


def check_place(path: Path) -> None:
    """Refuse a place where `save_profile` would fail, as far as trying without data can tell."""
    with naming(path.parent, "create"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with naming(path, "write"):
        inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent))
        if os.path.lexists(path) and not (inside and path.is_file()):  # `load_profile` refuses it
            raise SpmoeError(f"cannot write {path}: it is not a file of that folder; remove it")
        temporary = path.resolve()
        temporary = temporary.with_name(temporary.name + PARTIAL)
        try:
            temporary.touch()
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()
