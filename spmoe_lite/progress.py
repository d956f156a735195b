"""How long work reports and stops: one value to report, one event to stop.

`load`, `convert`, `chat` and `generate` call `on_progress(Progress)` on the thread that works and look
at `cancel` between pieces (one prefill chunk, one expert, one target pass).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from spmoe_lite.errors import Cancelled, UsageError


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` `unit`s of one stage; `total` is None where it is not known."""

    stage: str  # "download", "convert", "verify", "load", "prefill", ...
    done: int
    total: int | None
    unit: str  # "bytes", "tokens", "files"


OnProgress = Callable[[Progress], None]


class Lock(Protocol):
    """What `threading` makes, of either kind."""

    def acquire(self, blocking: bool = ..., /) -> bool: ...
    def release(self) -> None: ...


def check(cancel: threading.Event | None) -> None:
    """Raise `Cancelled` if the caller asked to stop."""
    if cancel is not None and cancel.is_set():
        raise Cancelled("cancelled")


def run_if_free(lock: Lock, call: Callable[[], object]) -> bool:
    """Call while holding the lock; False if somebody has it. Ctrl-C, whenever it comes, leaves it untaken."""
    taken: list[bool] = []
    try:
        taken.extend(map(lock.acquire, (False,)))  # one call: when Ctrl-C is heard, it is known
        if taken[0]:
            call()
        return taken[0]
    finally:
        if True in taken:
            lock.release()


def check_callers(cancel: object, **calls: object) -> None:
    """Refuse what would fail in the middle of the work: no event, and what cannot be called."""
    is_event = callable(getattr(cancel, "is_set", None)) and not isinstance(cancel, type)
    if cancel is not None and not is_event:
        raise UsageError(f"cancel {cancel!r:.80}: a threading.Event, or None")
    for name, call in calls.items():
        if call is not None and not callable(call):
            raise UsageError(f"{name} {call!r:.80}: a function to be called, or None")


def size(count: float, more: int = 0) -> str:
    """Bytes for people: `93.4 GB` (powers of ten, as disks and buses are sold); `more` decimals beyond that."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count /= 1000
        power += 1
    decimals = more + (count < 100) if power else 0
    return f"{count:.{decimals}f} {units[power]}"


def many(what: str, count: int) -> str:
    """The word beside a number of them: `token` for 1, else `tokens`."""
    return what if count == 1 else what + "s"


def sizes_apart(one: int, other: int) -> tuple[str, str]:
    """`size` of two that are compared, with as many digits more as it takes to read which is larger."""
    more = 0
    while one != other and size(one, more) == size(other, more) and more < 12:
        more += 1
    return size(one, more), size(other, more)


def digits(value: float, count: int = 3) -> str:
    """A figure for people: so many digits, large ones without an exponent: `0.485`, `29.9`, `2560`."""
    return f"{value:.{count}g}" if abs(value) < 10**count - 0.5 else f"{value:.0f}"
