"""What the terminal at the other end can show: progress, dim notes, one question, Ctrl-C as an event.

The commands and the chat loop print through this module, so that one place decides what a dumb terminal,
a pipe, a narrow window, `NO_COLOR` or a missing stream gets. Answers go to stdout, all else to stderr.
A live progress line is drawn by rich, imported only when there is one to draw; elsewhere a plain line
appears now and then. Nothing here knows of models.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from types import FrameType

    from spmoe_lite.progress import Progress

FIRST_LIVE_S = 0.5  # a stage shorter than this shows no live line
LIVE_EVERY_S = 0.1
FIRST_PLAIN_S = 5.0  # a stage shorter than this prints no plain line
PLAIN_EVERY_S = 15.0
RATE_WINDOW_S = 10.0
BAR_COLUMNS = 70  # narrower terminals get the numbers without the bar


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person is at the other end of `stream` (which may be missing or closed)."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def can_draw(stream: TextIO | None) -> bool:
    """Whether `stream` understands cursor movement and colour."""
    return is_terminal(stream) and os.environ.get("TERM") != "dumb"


def is_interactive() -> bool:
    """Whether a person can be asked and answered: both stdin and stdout are terminals."""
    return is_terminal(sys.stdin) and is_terminal(sys.stdout)


def columns() -> int:
    return max(20, shutil.get_terminal_size().columns)


def make_streams_safe() -> None:
    """Let the standard streams replace what their encoding cannot hold (cp1252), never raise."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def dim(text: str, stream: TextIO | None = None) -> str:
    """`text` in the dim style where `stream` (stderr if none is given) shows it."""
    stream = sys.stderr if stream is None else stream
    if not text or not can_draw(stream) or os.environ.get("NO_COLOR"):
        return text
    return click.style(text, dim=True)


def note(text: str) -> None:
    """One dim remark on stderr, wrapped between its ` · ` parts on a narrow terminal."""
    if is_terminal(sys.stderr):
        text = wrap_parts(text, columns())
    click.echo("\n".join(dim(line) for line in text.split("\n")), err=True)


def wrap_parts(text: str, width: int, separator: str = " · ") -> str:
    """Break `text` into lines of at most `width` columns at its separators (or nowhere)."""
    lines = [""]
    for part in text.split(separator):
        longer = f"{lines[-1]}{separator}{part}" if lines[-1] else part
        if len(longer) < width or not lines[-1]:
            lines[-1] = longer
        else:
            lines.append(part)
    return "\n".join(lines)


def printable(text: str) -> str:
    """`text` without the control characters a model could use to drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))


def size(count: float) -> str:
    """Bytes for people: `93.4 GB` (powers of ten, as disks and buses are sold)."""
    units = ["bytes", "kB", "MB", "GB", "TB"]
    power = 0
    while abs(count) >= 999.5 and power < len(units) - 1:
        count /= 1000
        power += 1
    return f"{count:.{1 if power and count < 100 else 0}f} {units[power]}"


def duration(seconds: float) -> str:
    """Time left for people: `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows in columns of equal width; the columns numbered in `right` are flushed right."""
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ask(question: str) -> bool:
    """A yes/no question on stderr; the empty answer, or no answer, is no. Ctrl-C raises at once."""
    click.echo(f"{question} [y/N] ", nl=False, err=True)
    with on_interrupt(signal.default_int_handler):
        answer = sys.stdin.readline() if sys.stdin is not None else ""
    if not answer:
        click.echo(err=True)
    return answer.strip().lower() in ("y", "yes")


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event this yields; a second one raises `KeyboardInterrupt` as usual.

    The library looks at the event between pieces of work, so that nothing is left half done.
    """
    cancel = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    with on_interrupt(stop):
        yield cancel


@contextmanager
def on_interrupt(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle Ctrl-C by `handler` for a while; a thread other than the main one changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class ProgressDisplay:
    """An `on_progress` that shows stage, amount, rate and time left on stderr.

    On a terminal: one live line, gone when the stage or the display ends. Elsewhere: a plain line for
    stages that last, every quarter of a minute and at their end.
    """

    def __init__(self) -> None:
        self._live = can_draw(sys.stderr)
        self._bar = None  # rich's Progress while a live line is drawn
        self._stage = ""
        self._started = self._printed = 0.0
        self._recent: deque[tuple[float, int]] = deque()  # (time, done) of the last seconds

    def __enter__(self) -> ProgressDisplay:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if progress.stage != self._stage or (self._recent and progress.done < self._recent[-1][1]):
            self._begin(progress, now)
        self._recent.append((now, progress.done))
        while len(self._recent) > 2 and now - self._recent[0][0] > RATE_WINDOW_S:
            self._recent.popleft()
        if self._live:
            if now - max(self._started + FIRST_LIVE_S, self._printed + LIVE_EVERY_S) >= 0:
                self._draw(progress)
                self._printed = now
        else:
            self._print(progress, now)

    def close(self) -> None:
        """Remove the live line; what is printed next starts on a clean row."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._stage = ""

    def _begin(self, progress: Progress, now: float) -> None:
        self.close()
        self._stage = progress.stage
        self._started = self._printed = now
        self._recent.clear()

    def _rate(self) -> float:
        """Units per second over the last seconds; 0.0 while unknown."""
        (then, before), (now, done) = self._recent[0], self._recent[-1]
        return (done - before) / (now - then) if now - then > 0.2 else 0.0

    def _draw(self, progress: Progress) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, ProgressColumn, TextColumn
        from rich.progress import Progress as Bar

        text = describe(progress, self._rate())
        if self._bar is None:
            shown: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
            if columns() >= BAR_COLUMNS:
                shown.insert(0, BarColumn(bar_width=20))
            self._bar = Bar(*shown, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(text, total=progress.total)
            self._bar.start()
        self._bar.update(
            self._task, description=text, completed=progress.done, total=progress.total
        )

    def _print(self, progress: Progress, now: float) -> None:
        finished = progress.total is not None and progress.done >= progress.total
        first = self._printed == self._started
        due = now - self._printed >= (FIRST_PLAIN_S if first else PLAIN_EVERY_S)
        if due or (finished and not first):
            click.echo(describe(progress, self._rate()), err=True)
            self._printed = now if not finished else self._started


def describe(progress: Progress, rate: float) -> str:
    """One line: `convert 12.3 of 93.4 GB, 512 MB/s, 3 min left`."""
    done, total, unit = progress.done, progress.total, progress.unit
    in_bytes = unit == "bytes"
    text = f"{progress.stage} {size(done) if in_bytes else done}"
    if total is not None:
        text = (
            f"{progress.stage} {_amount(done, total) if in_bytes else f'{done} of {total} {unit}'}"
        )
    elif not in_bytes:
        text += f" {unit}"
    if rate > 0:
        text += f", {size(rate)}/s" if in_bytes else f", {rate:.0f} {unit}/s"
        if total is not None and done < total:
            text += f", {duration((total - done) / rate)} left"
    return text


def _amount(done: int, total: int) -> str:
    """`12.3 of 93.4 GB`: both in the unit of the total."""
    whole = size(total)
    scale = total / float(whole.split()[0]) if total else 1.0
    return f"{done / scale:.{1 if '.' in whole else 0}f} of {whole}"
