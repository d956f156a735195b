"""One answer: an iterator of text whose every `next` runs the engine for one step.

The work is done in the thread that asks for the next piece; nothing runs behind the caller's back, and a
reader that stops asking stops the engine. Whoever iterates holds the engine until the answer has ended,
is closed or is cancelled. In asyncio the same steps run in a worker thread, one at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmoe_lite.config import SamplingParams
from spmoe_lite.errors import BusyError, Cancelled
from spmoe_lite.progress import OnProgress
from spmoe_lite.sampling import Sampler
from spmoe_lite.stats import Counters, RunStats
from spmoe_lite.stops import StopMatcher

if TYPE_CHECKING:
    from spmoe_lite.engine import Engine


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
    """Set by `Generation.cancel`, or by the event the caller passed in."""

    def __init__(self, outer: threading.Event | None):
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())


class Generation:
    """Iterate (`for` or `async for`) to get text; `result` runs what is left and returns the whole.

    An error of the engine is raised at the reader. `cancel` may be called from any thread and takes
    effect within one prefill chunk, one expert copy or one pass; iteration then ends, and `result` says
    "cancelled". Leaving the loop early and dropping the object frees the engine at once.
    """

    def __init__(self, run: Run):
        self._run = run

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        self._run.acquire()
        piece = self._run.advance()
        if piece is None:
            raise StopIteration
        return piece

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> str:
        while not self._run.try_acquire():
            await asyncio.sleep(0.005)
        try:
            piece = await asyncio.to_thread(self._run.advance)
        except asyncio.CancelledError:
            self._run.cancelled.set()  # the step under way ends the answer and frees the engine
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    def cancel(self) -> None:
        """Stop the answer from any thread. Idempotent."""
        self._run.cancel()

    def close(self) -> None:
        """End the answer and free the engine, waiting for the pass under way. Idempotent."""
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
        on_progress: OnProgress | None,
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
        self._on_progress = on_progress
        self._stepping = threading.Lock()  # one step at a time, from whatever thread
        self._holds_engine = False
        self._steps = self._run()

    # --- holding the engine --------------------------------------------------------------------

    def acquire(self) -> None:
        """Wait for the engine; BusyError if the caller does not want to, or could wait for ever."""
        while not self.try_acquire():
            if self._engine.held_by_this_thread():
                raise BusyError("this thread is reading another answer: finish or close that first")
            self._engine.wait_free(0.05)

    def try_acquire(self) -> bool:
        """Get the engine; True also when there is nothing left to do with it."""
        if self._holds_engine or self.result is not None or self.cancelled.is_set():
            return True
        self._holds_engine = self._engine.try_hold(self)
        if not self._holds_engine and not self._wait:
            raise BusyError("the engine is answering someone else; wait, or call with wait=True")
        return self._holds_engine

    def advance(self) -> str | None:
        """The next piece of text; None at the end."""
        with self._stepping:
            piece = next(self._steps, None)
            if self.cancelled.is_set():
                self._end()
            return piece

    def cancel(self) -> None:
        self.cancelled.set()
        if self._stepping.acquire(blocking=False):  # nobody is in a step: end it here
            try:
                self._end()
            finally:
                self._stepping.release()

    def close(self) -> None:
        self.cancelled.set()
        with self._stepping:
            self._end()

    def _end(self) -> None:
        self._steps.close()
        if self.result is None:  # it never began
            self.result = _Answer(len(self._prompt), self._engine.counters).result()
        self._let_go()

    def _let_go(self) -> None:
        if self._holds_engine:
            self._holds_engine = False
            self._engine.let_go()

    # --- the answer ----------------------------------------------------------------------------

    def _run(self) -> Generator[str, None, None]:
        answer = _Answer(len(self._prompt), self._engine.counters)
        try:
            if self._holds_engine:
                yield from self._decode(answer)
        except Cancelled:
            pass
        except Exception:
            answer.reason = "error"
            raise
        finally:
            self.result = answer.result()
            self._let_go()

    def _decode(self, answer: _Answer) -> Iterator[str]:
        engine, decoder = self._engine, self._engine.decoder
        sampler = Sampler(self._sampling, engine.num_tokens, len(self._prompt))
        text = engine.tokenizer.stream(after=self._prompt if self._continues else ())
        stops = self._stops
        decoder.session.start(self._prompt)
        decoder.prefill(self.cancelled, self._on_progress)
        while (room := self._room(answer)) > 0:
            step = decoder.step(sampler, room, self.cancelled)
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
