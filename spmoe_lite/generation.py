"""One answer: an iterator of text whose every `next` runs the engine for one step.

The work is done in the thread that asks for the next piece; nothing runs behind the caller's back, and a
reader that stops asking stops the engine. Whoever iterates holds the engine until the answer has ended,
is closed or is cancelled. In asyncio the same steps run in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import time
import weakref
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from spmoe_lite.config import SamplingParams
from spmoe_lite.device import cpu_by_default
from spmoe_lite.errors import BusyError, Cancelled, UsageError
from spmoe_lite.progress import OnProgress, run_if_free
from spmoe_lite.sampling import Sampler
from spmoe_lite.stats import Counters, RunStats
from spmoe_lite.stops import StopMatcher

if TYPE_CHECKING:
    from spmoe_lite.engine import Engine

STUCK_SECONDS = 0.3  # a thread of a pool may wait for an answer it read last: others read on


@dataclass(frozen=True, slots=True)
class Result:
    """A finished answer. `completion_tokens` counts the end token too, if there was one."""

    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str  # "stop", "length" (max_tokens), "context" (full), "cancelled", "error"
    stats: RunStats
    token_ids: tuple[int, ...]


class _Cancel(threading.Event):
    """Set by `Generation.cancel`, or by the event the caller passed in.

    Without Event's lock, so that a signal handler may set it while its thread is doing the same.
    """

    def __init__(self, outer: threading.Event | None):
        super().__init__()
        self._here = False
        self._outer = outer

    def set(self) -> None:
        self._here = True

    def is_set(self) -> bool:
        return self._here or (self._outer is not None and self._outer.is_set())


class Generation:
    """Iterate (`for` or `async for`) to get text; `result` runs what is left and returns the whole.

    An error of the engine is raised at the reader. `cancel` may be called from any thread and takes
    effect within one prefill chunk, one expert copy or one pass; iteration then ends, and `result` says
    "cancelled". Leaving the loop early and dropping the object frees the engine at once.
    """

    def __init__(self, run: Run, on_progress: OnProgress | None):
        self._run = run
        # Here, for it may keep this answer, as the engine keeps `run`.
        self._on_progress = on_progress
        run.reader = weakref.ref(self)

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        self._run.acquire()
        piece = self._run.advance(self._on_progress)
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        await self._run.acquire_async()
        try:
            piece = await self._run.advance_async(self._on_progress)
        except BaseException:
            self._run.cancel()  # the step under way ends the answer and frees the engine
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def __reduce__(self) -> NoReturn:
        raise UsageError("an answer cannot be copied or sent to a process: send its `result`")

    def cancel(self) -> None:
        """Stop the answer from any thread. Idempotent."""
        self._run.cancel()

    def close(self) -> None:
        """End the answer and free the engine, waiting for the pass under way. Idempotent.

        From inside that pass (`on_progress`, a signal handler) it cannot wait, and is `cancel`.
        """
        self._run.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._run.cancel()  # dropped by a reader who lost interest, or long finished

    @property
    def result(self) -> Result:
        """The whole answer; what has not been read yet is generated first."""
        for _ in self:
            pass
        assert self._run.result is not None
        return self._run.result


class Run:
    """What a `Generation` hands out, without the handle: so that a dropped handle is noticed."""

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        *,
        sampling: SamplingParams,
        max_tokens: int | None,
        stop: Sequence[str],
        wait: bool,
        cancel: threading.Event | None,
        continues: bool = False,
    ):
        self.cancelled = _Cancel(cancel)
        self.result: Result | None = None
        self._engine = engine
        self._prompt = list(prompt)
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._stops = StopMatcher(stop)
        self._continues = continues  # the answer goes on in the prompt's text, space and all
        self._wait = wait
        self._on_progress: OnProgress | None = None  # during a step
        self.reader: weakref.ref[Generation] | None = None
        self._stepping = threading.Lock()  # one step at a time, from whatever thread
        self._stepper = 0  # that thread
        self._read_at = time.monotonic()  # last
        self._stuck_since = 0.0  # how long it has looked as if we wait for ourselves
        self._steps = self._run()

    # --- holding the engine --------------------------------------------------------------------

    def acquire(self) -> None:
        """Wait for the engine."""
        self._stuck_since = time.monotonic()
        while not self.try_acquire():
            self._engine.wait_free(0.05)

    async def acquire_async(self) -> None:
        """The same for an asyncio task, which lets the others go on meanwhile."""
        self._stuck_since = time.monotonic()
        while not self.try_acquire(asyncio.current_task()):
            await asyncio.sleep(0.005)

    def try_acquire(self, task: object | None = None) -> bool:
        """Get the engine, for an asyncio task or for this thread; True also if none is needed.

        BusyError if it is taken and the caller does not want to wait, or would wait for itself.
        """
        if self.result is not None or self.cancelled.is_set() or self._engine.try_hold(self, task):
            return True
        now = time.monotonic()
        if not self._engine.held_by_caller(task):
            self._stuck_since = now
        stuck = now - self._stuck_since > STUCK_SECONDS
        collected = self._engine.collect_dropped(at_once=stuck)
        if collected and self._engine.try_hold(self, task):
            return True
        if not self._wait:
            raise BusyError("the engine is answering someone else; wait, or call with wait=True")
        if stuck and collected:
            who = "thread" if task is None else "task"
            raise BusyError(f"this {who} is reading another answer: finish or close that first")
        return False

    def advance(self, on_progress: OnProgress | None) -> str | None:
        """The next piece of text; None at the end. An exception is the end, too."""
        if self.in_step():
            raise BusyError("this answer is asked for its next piece from inside its own step")
        with self._stepping:
            self._stepper, self._on_progress = threading.get_ident(), on_progress
            try:
                with cpu_by_default():
                    piece = next(self._steps, None)
                self._read_at = time.monotonic()
            except BaseException:
                self._end()
                raise
            finally:
                # No call here, which Ctrl-C could follow.
                self._stepper, self._on_progress = 0, None
        if piece is None:  # lent again to a reader that came as another one read the end
            self._engine.let_go(self)
        self._end_if_cancelled()
        return piece

    async def advance_async(self, on_progress: OnProgress | None) -> str | None:
        """The same in a thread of the engine's, in the caller's context."""
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(
            self._engine.steppers, run, self.advance, on_progress
        )

    def is_read(self) -> bool:
        """Whether somebody is inside a step."""
        return self._stepper != 0

    def rests(self) -> bool:
        """Whether nobody has been inside a step for a while."""
        return not self.is_read() and time.monotonic() - self._read_at > STUCK_SECONDS

    def in_step(self) -> bool:
        """Whether the caller is inside a step of this answer, where it cannot wait for the step."""
        return self._stepper == threading.get_ident()

    def cancel(self) -> None:
        self.cancelled.set()
        self._end_if_cancelled()

    def close(self) -> None:
        self.cancelled.set()
        if not self.in_step():
            with self._stepping:
                self._end()

    def end_if_over(self) -> None:
        """End it if its event was set between two steps, or Ctrl-C came as it was dropped."""
        if self.reader is not None and self.reader() is None:
            self.cancelled.set()
        self._end_if_cancelled()

    def ends_within(self, seconds: float) -> bool:
        """Cancel it, and wait for the step under way; not from inside that step."""
        self.cancel()
        if self.in_step() or not self._stepping.acquire(timeout=seconds):
            return False
        self._stepping.release()
        return True

    def _end_if_cancelled(self) -> None:
        """End it, unless somebody is in a step: that one does the same right after the step."""
        if self.cancelled.is_set():
            run_if_free(self._stepping, self._end)

    def _end(self) -> None:
        self._steps.close()
        if self.result is None:  # it never began
            self.result = _Answer(len(self._prompt), self._engine.counters).result()
        self._engine.let_go(self)

    # --- the answer ----------------------------------------------------------------------------

    def _run(self) -> Generator[str, None, None]:
        answer = _Answer(len(self._prompt), self._engine.counters)
        try:
            if self._engine.is_held_by(self):  # not if it was cancelled before it began
                yield from self._decode(answer)
        except Cancelled:
            pass
        except Exception:
            answer.reason = "error"
            raise
        finally:
            self.result = answer.result()
            self._engine.let_go(self)

    def _decode(self, answer: _Answer) -> Iterator[str]:
        engine, decoder = self._engine, self._engine.decoder
        sampler = Sampler(self._sampling, engine.num_tokens, len(self._prompt))
        text = engine.tokenizer.stream(after=self._prompt if self._continues else ())
        stops = self._stops
        decoder.session.start(self._prompt)
        decoder.prefill(self.cancelled, self._on_progress)
        while (room := self._room(answer)) > 0:
            step = decoder.step(sampler, room, self.cancelled, self._on_progress)
            count, piece = 0, ""
            for token in step.verdict.tokens[:room]:
                count += 1
                if token in engine.eos_ids:
                    answer.reason = "stop"
                    break
                piece += stops.push(text.push(token))
                if stops.hit:
                    answer.reason = "stop"
                    break
            decoder.commit(step, count)
            answer.add(step.verdict.tokens[:count], piece)
            if piece:
                yield piece
            if answer.reason == "stop":
                break
        if not stops.hit:
            rest = stops.push(text.finish()) + stops.finish()
            if stops.hit:
                answer.reason = "stop"
            answer.text += rest
            if rest:
                yield rest

    def _room(self, answer: _Answer) -> int:
        """How many tokens may still be written; gives the reason when there are none."""
        context = self._engine.ctx_size - len(self._engine.decoder.session.tokens)
        if self._max_tokens is not None and self._max_tokens <= len(answer.token_ids):
            answer.reason = "length"
            return 0
        if context <= 0:
            answer.reason = "context"
            return 0
        return (
            context
            if self._max_tokens is None
            else min(context, self._max_tokens - len(answer.token_ids))
        )


class _Answer:
    """What has been written so far, and when."""

    def __init__(self, prompt_tokens: int, counters: Counters):
        self.text = ""
        self.token_ids: list[int] = []
        self.reason = "cancelled"  # until the answer ends otherwise
        self._prompt_tokens = prompt_tokens
        self._counters = counters
        self._before = counters.copy()
        self._started = time.perf_counter()
        self._first = self._last = self._started

    def add(self, tokens: Sequence[int], piece: str) -> None:
        self._last = time.perf_counter()
        if not self.token_ids:
            self._first = self._last
        self.token_ids += tokens
        self.text += piece

    def result(self) -> Result:
        stats = RunStats(
            completion_tokens=len(self.token_ids),
            seconds=self._last - self._first,
            time_to_first_token=self._first - self._started,
            counters=self._counters.since(self._before),
        )
        tokens = tuple(self.token_ids)
        return Result(self.text, self._prompt_tokens, len(tokens), self.reason, stats, tokens)
