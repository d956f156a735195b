"""The engine: two models, the slots between them, one conversation; the library's front door.

    with Engine.load("mixtral-8x7b", draft="mistral-7b") as engine:
        for piece in engine.chat([{"role": "user", "content": "Hello"}]):
            print(piece, end="", flush=True)

`load` hands over to `loading.py`, which makes an engine's parts; `generation.py` runs one answer through
them. What is here: one caller at a time, a second one waits or gets `BusyError`, as asked; `close` ends what
is running, stops the worker and gives every byte back.

Nothing here prints, installs a signal handler, changes an environment variable or a torch global, or
downloads anything.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from spmoe_lite.config import SamplingParams, is_integer
from spmoe_lite.decoder import Decoder
from spmoe_lite.device import capturing, cpu_by_default
from spmoe_lite.errors import BusyError, CapacityError, UnsupportedError, UsageError
from spmoe_lite.generation import Generation, Run
from spmoe_lite.loading import DEFAULT_DRAFT_TOKENS, Loader, Parts
from spmoe_lite.plan import Plan
from spmoe_lite.progress import OnProgress, check_callers, run_if_free
from spmoe_lite.slab import make_slab
from spmoe_lite.stats import warnings
from spmoe_lite.store import ExpertStore

EXIT_SECONDS = 10.0  # that the end of the process waits for a step, which may wait for it


class Engine:
    """A target model, perhaps a draft, and the conversation they are in."""

    # `bench` measures other people's policies and copies in their place
    make_slab = staticmethod(make_slab)
    make_store: type[ExpertStore] = ExpertStore
    captures = True  # where steps can be

    def __init__(self, parts: Parts):
        """Use `Engine.load`."""
        self._parts = parts
        self.device = parts.device
        self.target_pack = parts.packs[0]
        self.plan = parts.plan
        self.ctx_size = parts.plan.context
        self.tokenizer = parts.tokenizer
        self.template = parts.template
        self.default_sampling = parts.default_sampling
        self.num_tokens = parts.num_tokens
        self.eos_ids = parts.eos_ids
        self.counters = parts.counters
        self.notices = parts.notices
        self.profile_path = parts.profile_path
        self._lock = threading.RLock()  # a dropped Generation may let go inside any of its blocks
        self._free = threading.Condition(self._lock)
        self._holder: Run | None = None
        # the thread and asyncio task it reads in; a task that failed keeps its answer
        self._caller: tuple[int, weakref.ref[object] | None] | None = None
        self._next_collection = 0.0  # not before
        self._closed = False
        self._ending = False  # with the process
        self._process = os.getpid()
        self._closing = threading.RLock()
        self.steppers = _steppers()
        _open.add(self)

    @property
    def decoder(self) -> Decoder:
        decoder = self._parts.decoder  # once: another thread may be closing the engine
        if decoder is None:
            raise BusyError("the engine is closed")
        return decoder

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        device: str = "auto",
        vram: str | int | float = "auto",
        slots: int | None = None,
        ctx_size: int | None = None,
        kv_type: str = "auto",
        draft_tokens: int | str = DEFAULT_DRAFT_TOKENS,
        prefetch: bool = True,
        critical_experts: int | None = None,
        cutoff: int | None = None,
        policy: str = "layer-lru",
        pin: str | int = "auto",
        template: str | Path | None = None,
        trace: str | Path | None = None,
        home: str | Path | None = None,
        cancel: threading.Event | None = None,
        on_plan: Callable[[Plan], object] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Engine:
        """Load packs by path or name.

        device: "auto", "cpu", "cuda", "cuda:N". vram: bytes, "20GiB", a fraction, or "auto" (free VRAM
        less 10 %; without a GPU half of the available RAM). slots: experts held at once, overrides what
        vram allows. ctx_size: tokens of prompt and answer together. kv_type: "auto" keeps keys and
        values as the model computes them, "int8" in about half of that. draft_tokens: proposals per step;
        "auto" drafts as many as by default, and none while plain steps are measured to be faster.
        critical_experts: experts prefetched per draft token and layer (default: the router's k).
        cutoff: layers to prefetch for (default: from measured times). pin: how much of the pack may be
        page-locked in RAM for the GPU: "all", "none", bytes or "20GiB", or "auto" (what fits in 75 % of
        the available RAM); the GPU reads missing experts there by itself if it is all, else RAM holds the
        experts last used and the others come from disk. trace: a new file that records
        routing (`trace.py`). on_plan(plan) is called before anything is loaded.

        Raises NotFoundError, DamagedError, UnsupportedError (pair), CapacityError, Cancelled.
        """
        loader = Loader(
            device=device,
            vram=vram,
            slots=slots,
            ctx_size=ctx_size,
            kv_type=kv_type,
            draft_tokens=draft_tokens,
            prefetch=prefetch,
            critical_experts=critical_experts,
            cutoff=cutoff,
            policy=policy,
            pin=pin,
            template=template,
            trace=trace,
            home=home,
            cancel=cancel,
            on_plan=on_plan,
            on_progress=on_progress,
            make_slab=cls.make_slab,
            make_store=cls.make_store,
            captures=cls.captures,
        )
        with cpu_by_default():
            return cls(loader.load(target, draft))

    # --- answering -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        wait: bool = True,
        cancel: threading.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Continue a text, or a sequence of token ids. Nothing runs before the first piece is asked for."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return self._generation(
            tokens, sampling, max_tokens, stop, wait, cancel, on_progress, continues=True
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        wait: bool = True,
        cancel: threading.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Answer a conversation of {"role", "content"} messages through the model's chat template.

        What the conversation shares with the one before is not computed again.
        """
        if self.template is None:
            raise UnsupportedError(
                f"{self.target_pack.name} has no chat template: use `run` or `generate`, "
                f"or give one with --template FILE"
            )
        tokens = self.template.encode(messages)
        return self._generation(tokens, sampling, max_tokens, stop, wait, cancel, on_progress)

    def _generation(
        self,
        tokens: list[int],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop: Sequence[str],
        wait: bool,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
        continues: bool = False,
    ) -> Generation:
        if self._closed:
            raise BusyError("the engine is closed")
        if not tokens:
            raise UsageError("the prompt is empty")
        if len(tokens) >= self.ctx_size:
            longest = self.target_pack.config.max_position_embeddings
            more = " or raise --ctx-size" if len(tokens) < longest else ", the model takes no more"
            raise CapacityError(
                f"the prompt has {len(tokens)} tokens, the context {self.ctx_size}, one of them for "
                f"the answer: shorten the prompt{more}"
            )
        if bad := next((t for t in tokens if not 0 <= t < self.num_tokens), None):
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.num_tokens}")
        if max_tokens is not None and not (is_integer(max_tokens) and max_tokens >= 1):
            raise UsageError(f"--max-tokens {max_tokens}: a whole number of at least 1")
        if not isinstance(stop, Iterable):
            raise UsageError(f"stop {stop!r:.80}: a list of texts, empty for none")
        if not isinstance(sampling, (SamplingParams, NoneType)):
            raise UsageError(
                f"sampling {sampling!r:.80}: SamplingParams(...), or None for the model's own"
            )
        check_callers(cancel, on_progress=on_progress)
        run = Run(
            self,
            tokens,
            sampling=sampling or self.default_sampling,
            max_tokens=None if max_tokens is None else int(max_tokens),
            stop=stop,
            wait=wait,
            cancel=cancel,
            continues=continues,
        )
        return Generation(run, on_progress)

    # --- one caller at a time ------------------------------------------------------------------

    def try_hold(self, run: Run, task: object | None) -> bool:
        """Lend the engine to one answer, read in this thread and task; False if another one has it."""
        if self._process != os.getpid():  # torch's threads stayed there: a product would never end
            raise UnsupportedError(
                "the engine was loaded before this process was forked: load one here, in a process "
                "started with multiprocessing's spawn method"
            )
        holder = self._holder
        if holder is not None and holder is not run:
            holder.end_if_over()
        with self._lock:
            if self._closed:
                raise BusyError("the engine is closed")
            if self._ending:
                if threading.current_thread().daemon:
                    return False  # it waits, and goes with the process
                raise BusyError("the process ends: the engine answers no more")
            if self._holder in (None, run):
                task = task or _running_task()  # it may read this one without `async`
                here = None if task is None else weakref.ref(task)
                self._caller = threading.get_ident(), here  # who read last: pools change threads
                self._holder = run
            return self._holder is run

    def is_held_by(self, run: Run) -> bool:
        return self._holder is run

    def let_go(self, run: Run) -> None:
        """Take the engine back, if it is this answer that has it."""
        with self._lock:
            if self._holder is run:
                self._holder = self._caller = None
                self._free.notify_all()

    def wait_free(self, seconds: float) -> None:
        with self._lock:
            if self._holder is not None or self._ending:
                self._free.wait(seconds)

    def collect_dropped(self, at_once: bool = False) -> bool:
        """Collect garbage, in case the answer that has the engine is in it; False if that was not done.

        asyncio makes a circle of each error that leaves a task, with all that its frames hold. Unless
        `at_once` only where nobody has read for a while, and seldom for the time that it takes.
        """
        holder = self._holder
        due = holder is not None and holder.rests() and time.monotonic() >= self._next_collection
        return (due or at_once) and run_if_free(capturing, self._collect)

    def _collect(self) -> None:
        began = time.monotonic()
        if gc.isenabled():
            gc.collect()
        ended = time.monotonic()
        self._next_collection = ended + max(1.0, 50 * (ended - began))

    def held_by_caller(self, task: object | None) -> bool:
        """Whether the answer that has the engine goes on only when the caller does, by all we see:

        the caller is inside one of its steps, or read it last and nobody reads it now.
        """
        with self._lock:
            if self._holder is None or self._caller is None:
                return False
            if self._holder.in_step():
                return True
            if self._holder.is_read():
                return False
            thread, other = self._caller
            return thread == threading.get_ident() and (
                task is None or (other is not None and other() is task)
            )

    def close(self) -> None:
        """End what is running, stop the worker, free every byte. Idempotent, from any thread.

        BusyError from inside a step of an answer (`on_progress`, a signal handler): the step is
        cancelled, and `close` can be called again when it has ended. In a forked child it does nothing.
        """
        if self._process != os.getpid():  # a step under way stayed there, and will never end here
            return
        with self._lock:
            self._closed = True
            holder = self._holder
        if holder is not None:
            holder.close()
            if holder.in_step():
                raise BusyError(
                    "the engine is in use by this very thread: close it after the answer"
                )
        with self._closing:
            self._parts.close()
            self.steppers = _steppers()  # the threads of those before end with them

    def _end_at_exit(self) -> None:
        """Cancel what a daemon thread reads, and wait for its step; the memory goes with the process."""
        if self._process != os.getpid():  # its threads stayed there
            return
        with self._lock:
            self._ending = True
            holder = self._holder
        prefetcher = self._parts.prefetcher
        if (holder is None or holder.ends_within(EXIT_SECONDS)) and prefetcher is not None:
            prefetcher.close()

    def __reduce__(self) -> NoReturn:
        raise UsageError("an engine cannot be copied or sent to a process: load one there")

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Totals since loading: counters, profile, slots, notices, what does not pay.

        "regime" is "all-resident", "dynamic" (both captured) or "host-driven"; `stats.in_words` tells it all.
        """
        decoder = self.decoder
        tier = None if decoder.store is None else decoder.store.tier
        graphs, regime = decoder.graphs, "host-driven"
        if graphs is not None:
            regime = "all-resident" if graphs.tables is None else "dynamic"
        drafting_paused = decoder.draft is not None and decoder.length.paused
        return {
            "counters": self.counters.copy(),
            "profile": decoder.drift.profile.to_dict(),
            "slots": self.plan.slots,
            "experts": self.plan.expert_count,
            "policy": None if decoder.store is None else decoder.store.table.policy,
            "cutoff_layer": decoder.last_cutoff,
            "drafting_paused": drafting_paused,
            "prefetch_paused": decoder.usefulness.paused,
            "ram_places": None if tier is None else tier.num_places,
            "steps": "driven by the host" if graphs is None else "captured",
            "regime": regime,
            "warnings": warnings(self.counters, drafting_paused, decoder.usefulness.paused),
            "notices": list(self.notices),
        }


def _steppers() -> ThreadPoolExecutor:
    """Where steps run for asyncio: one at a time, and beside it what ends without one.

    In the loop's own pool they would wait behind callers who wait there for them.
    """
    return ThreadPoolExecutor(2, "spmoe-step")


_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch when the interpreter goes would abort the process."""
    for engine in list(_open):
        engine._end_at_exit()


def _running_task() -> object | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop in this thread
        return None


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Whole numbers of any kind, numpy's included, as Python's own."""
    if isinstance(prompt, (bytes, bytearray)):
        raise UsageError("a prompt is a text or a sequence of token ids: decode its bytes first")
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise UsageError(f"a prompt is a text or a sequence of token ids: {error}") from None
