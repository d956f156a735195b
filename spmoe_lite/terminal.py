"""What the terminal at the other end can show: progress, dim notes, one question, Ctrl-C as an event.

The commands and the chat loop print through this module, so that one place decides what a dumb terminal,
a pipe, a narrow window, `NO_COLOR` or a missing stream gets. Answers go to stdout, all else to stderr.
A live progress line is drawn by rich, imported only when there is one to draw; elsewhere a plain line
appears now and then. Nothing here knows of models.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, TextIO

import click

from spmoe_lite.progress import size

if TYPE_CHECKING:
    from types import FrameType

    from rich.progress import Progress as Bar

    from spmoe_lite.progress import Progress

FIRST_LIVE_S = 0.5  # a stage shorter than this shows no live line
LIVE_EVERY_S = 0.1
FIRST_PLAIN_S = 5.0  # a stage shorter than this prints no plain line
PLAIN_EVERY_S = 15.0
RATE_WINDOW_S = 10.0
BAR_COLUMNS = 70  # narrower terminals get the numbers without the bar
BAR_WIDTH = 20


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


def remark(text: str) -> None:
    """A line on stderr. Where that is a full disk or a closed pipe remarks end; the work does not."""
    try:
        click.echo(text, err=True)
    except OSError:
        sys.stderr = None  # as where it was closed from the start


def note(text: str) -> None:
    """One dim remark on stderr, folded to the width of the terminal."""
    if is_terminal(sys.stderr):
        text = fold(text, columns())
    remark("\n".join(dim(line) for line in text.split("\n")))


def say(text: str) -> None:
    """What a person asked to see, on stdout, folded to the width of the terminal."""
    click.echo(fold(text, columns()) if is_terminal(sys.stdout) else text)


def fold(text: str, width: int) -> str:
    """Break lines longer than `width` columns: between their ` · ` parts, else between words."""
    lines: list[str] = []
    for line in text.split("\n"):
        separator = " · " if " · " in line else " "
        parts = line.split(separator)
        folded = parts[:1]
        for part in parts[1:]:
            if len(folded[-1]) + len(separator) + len(part) <= width:
                folded[-1] += separator + part
            else:
                folded.append(part)
        lines += folded
    return "\n".join(lines)


class WordWrap:
    """Streamed text for a terminal that can draw: a word that crosses the edge moves to the next line.

    Every character is shown at once; what was shown of the word is erased then. Indented and fenced lines
    are code and stay as they are. Characters of double width are words of their own.
    """

    def __init__(self, width: int) -> None:
        self._width = width - 1  # in the last column the cursor's place is not certain
        self._line = self._word = ""
        self._column = 0
        self._fenced = False

    def push(self, text: str) -> str:
        return "".join(map(self._character, text))

    def _character(self, c: str) -> str:
        if c == "\n":
            self._fenced ^= self._line.lstrip().startswith("```")
            self._line = self._word = ""
            self._column = 0
            return c
        self._line += c
        if self._fenced or self._line.startswith(("    ", "\t")):
            return c
        wide = unicodedata.east_asian_width(c) in "WF"
        cells = 0 if unicodedata.combining(c) else 2 if wide else 1
        over = self._column + cells > self._width
        self._column += cells
        if c == " " or wide:
            self._word = ""
            if not over:
                return c
            self._column = cells if wide else 0
            return "\n" + (c if wide else "")
        self._word += c
        if not over:
            return c
        shown = self._column - cells
        before = len(self._word) - 1
        if before == shown:  # one word fills the line
            self._word, self._column = c, cells
            return "\n" + c
        self._column = before + cells
        erase = f"\x1b[{before}D\x1b[K" if before else ""
        return f"{erase}\n{self._word}"


def printable(text: str) -> str:
    """`text` without the control characters a model could use to drive a terminal."""
    if text.isprintable():
        return text
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))


def duration(seconds: float) -> str:
    """Time left for people: `45 s`, `3 min`, `2 h 05 min`."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Rows in columns of equal width; the columns numbered in `right` are flushed right.

    On a terminal too narrow for them the cells of the last column are folded.
    """
    if not rows:
        return ""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    room = max(columns() - indent, 16) if is_terminal(sys.stdout) else sys.maxsize
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row[:-1], widths, strict=False))
        ]
        last = row[-1].rjust(widths[-1]) if len(widths) - 1 in right else fold(row[-1], room)
        cells.append(last.replace("\n", "\n" + " " * indent))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def ask(question: str) -> bool:
    """A yes/no question on stderr; the empty answer, or no answer, is no. Ctrl-C raises at once."""
    click.echo(f"{question} [y/N] ", nl=False, err=True)
    with on_interrupt(signal.default_int_handler):
        answer = read_line()
    if not answer:
        click.echo(err=True)
    return answer.strip().lower() in ("y", "yes")


def read_line() -> str:
    """The next line of stdin with its end; empty at the end of input. Ctrl-C raises whenever it comes."""
    if sys.stdin is None:
        return ""
    _wait_for_line()
    return sys.stdin.readline()


def _wait_for_line() -> None:
    """Wait until a line can be read from stdin, if that is a terminal, or Ctrl-C.

    A read alone would go on waiting after a signal that came between the interpreter's last look and the
    system call. The pipe that it writes to as a signal comes ends this wait at any moment.
    """
    try:
        import termios
    except ImportError:
        return
    try:
        one_a_read = termios.tcgetattr(sys.stdin)[3] & termios.ICANON  # else more may be buffered
    except (termios.error, OSError, ValueError):
        return
    if not one_a_read or threading.current_thread() is not threading.main_thread():
        return
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    before = signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    try:
        while sys.stdin not in select.select([sys.stdin, woken], [], [])[0]:
            os.read(woken, 512)
    finally:
        signal.set_wakeup_fd(before)
        os.close(woken)
        os.close(wakes)


@contextmanager
def interruptible(*, terminated: bool = False) -> Iterator[threading.Event]:
    """Ctrl-C sets the event this yields; a second one raises `KeyboardInterrupt` as usual.

    The library looks at the event between pieces of work, so that nothing is left half done.
    terminated: SIGTERM sets it as well, however often it comes.
    """
    cancel = threading.Event()

    def stop(signum: int, frame: FrameType | None) -> None:
        if cancel.is_set():
            raise KeyboardInterrupt
        cancel.set()

    with ExitStack() as handled:
        handled.enter_context(on_interrupt(stop))
        if terminated:
            handled.enter_context(on_interrupt(lambda *_: cancel.set(), signal.SIGTERM))
        yield cancel


@contextmanager
def keys_unseen() -> Iterator[None]:
    """Keys pressed meanwhile do not appear amid the answer; they are still read afterwards, Ctrl-D too.

    The `^C` a terminal shows would also put a wrapped line two columns off. Where the terminal cannot
    draw, or has no such switch (Windows), nothing changes.
    """
    try:
        import termios
    except ImportError:
        yield
        return
    if not (can_draw(sys.stdout) and is_terminal(sys.stdin)):
        yield
        return
    try:
        before = termios.tcgetattr(sys.stdin)
        unseen = before.copy()
        unseen[3] &= ~termios.ECHO
        unseen[6] = before[6].copy()
        off = os.fpathconf(sys.stdin.fileno(), "PC_VDISABLE")
        unseen[6][termios.VEOF] = off.to_bytes(1, "little")  # else Ctrl-D ends a line, and is gone
        termios.tcsetattr(sys.stdin, termios.TCSANOW, unseen)
    except (termios.error, OSError, OverflowError):
        yield
        return
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


@contextmanager
def on_interrupt(
    handler: Callable[[int, FrameType | None], None], signum: int = signal.SIGINT
) -> Iterator[None]:
    """Handle Ctrl-C, or another signal, by `handler` for a while; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signum, handler)
    try:
        yield
    finally:
        signal.signal(signum, before)


class ProgressDisplay:
    """An `on_progress` that shows stage, amount, rate and time left on stderr.

    On a terminal: one live line, gone when the stage or the display ends. Elsewhere: a plain line for
    stages that last, every quarter of a minute and at their end.
    """

    def __init__(self) -> None:
        self._live = can_draw(sys.stderr)
        self._bar: Bar | None = None  # rich's Progress while a live line is drawn
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

        wide = columns() >= BAR_COLUMNS
        text = describe(progress, self._rate(), columns() - (BAR_WIDTH + 1) * wide)
        if self._bar is None:
            shown: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
            if wide:
                shown.insert(0, BarColumn(bar_width=BAR_WIDTH))
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
            remark(describe(progress, self._rate()))
            self._printed = now if not finished else self._started


def describe(progress: Progress, rate: float, width: int = sys.maxsize) -> str:
    """One line: `convert 12.3 of 93.4 GB, 512 MB/s, 3 min left`; a narrow one leaves out the rate."""
    done, total, unit = progress.done, progress.total, progress.unit
    in_bytes = unit == "bytes"
    if total is None:
        amount = size(done) if in_bytes else f"{done} {unit}"
    else:
        amount = _amount(done, total) if in_bytes else f"{done} of {total} {unit}"
    parts = [f"{progress.stage} {amount}"]
    if rate > 0:
        if in_bytes or rate > 0.5:  # never "0 passes/s"
            parts.append(f"{size(rate)}/s" if in_bytes else f"{rate:.0f} {unit}/s")
        if total is not None and done < total:
            parts.append(f"{duration((total - done) / rate)} left")
    if len(", ".join(parts)) > width:
        del parts[1:2]
    return ", ".join(parts)


def _amount(done: int, total: int) -> str:
    """`12.3 of 93.4 GB`: both in the unit of the total."""
    whole = size(total)
    scale = total / float(whole.split()[0]) if total else 1.0
    return f"{done / scale:.{1 if '.' in whole else 0}f} of {whole}"
