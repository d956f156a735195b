"""An engine without a model, for tests of what stands on top of the library.

`Engine` has the interface of `spmoe_lite.engine.Engine`; its answers are scripted by the question:
"echo ..." repeats what it saw, "slow" writes until it is stopped, "stuck" says nothing until stopped,
"bad" raises the error a long prompt would, "unheard" lets Ctrl-C come a second later without ending a
read. `python tests/fake_engine.py ARGS` is the command line over it, for tests that need a process and a
terminal of their own; packs are plain folders then.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from spmoe_lite.config import SamplingParams
from spmoe_lite.errors import CapacityError
from spmoe_lite.progress import Progress, check
from spmoe_lite.stats import Counters, RunStats


@dataclass
class Result:
    text: str
    prompt_tokens: int
    completion_tokens: int
    finish_reason: str
    stats: RunStats


class Generation:
    def __init__(self, pieces: Any, max_tokens: int | None, cancel: Any) -> None:
        self._pieces, self._cancel = pieces, cancel
        self._max, self._text, self._count = max_tokens, "", 0
        self._reason: str | None = None

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        if self._reason is None and self._cancel is not None and self._cancel.is_set():
            self._reason = "cancelled"
        if self._reason is None and self._count == self._max:
            self._reason = "length"
        if self._reason is not None:
            raise StopIteration
        piece = next(self._pieces, None)
        if piece is None:
            self._reason = "stop"
            raise StopIteration
        self._text += piece
        self._count += bool(piece)
        return piece

    @property
    def result(self) -> Result:
        for _ in self:
            pass
        counters = Counters(
            accesses=10, access_hits=7, drafted=8, accepted=4, bytes_moved=1_500_000_000
        )
        stats = RunStats(self._count, 1.0, 0.25, counters)
        assert self._reason is not None
        return Result(self._text, 3, self._count, self._reason, stats)

    def close(self) -> None:
        self._reason = self._reason or "cancelled"


class Plan(str):
    """What `str` of the real plan is, and what the command line asks of it."""

    expert_count = 256
    device = "cuda:0"


class Engine:
    """Counts its calls in `loaded` (keyword arguments of each load) and `asked` (each conversation)."""

    loaded: list[dict[str, Any]] = []
    template: Any = object()

    def __init__(self) -> None:
        self.plan = Plan("128 of 256 slots · 12.0 GB · about 50 ms per token")
        self.default_sampling = SamplingParams(temperature=0.7)
        self.ctx_size = 512
        self.notices: list[str] = []
        self.asked: list[tuple[Any, dict[str, Any]]] = []

    @classmethod
    def load(cls, target: Any, draft: Any = None, **given: Any) -> Engine:
        given["on_plan"]("128 of 256 slots · 12.0 GB · about 50 ms per token")
        on_progress = given["on_progress"]
        pause = float(os.environ.get("FAKE_LOAD_SECONDS", 0)) / 50
        for done in range(0, 51):
            check(given["cancel"])
            on_progress(Progress("load", done * 10**9, 50 * 10**9, "bytes"))
            time.sleep(pause)
        cls.loaded.append({"target": target, "draft": draft, **given})
        return cls()

    def chat(self, messages: list[dict[str, str]], **given: Any) -> Generation:
        self.asked.append((list(messages), given))
        return self._answer(messages[-1]["content"], messages, given)

    def generate(self, prompt: str, **given: Any) -> Generation:
        self.asked.append((prompt, given))
        return self._answer("raw " + prompt, prompt, given)

    def _answer(self, text: str, seen: Any, given: dict[str, Any]) -> Generation:
        if text.startswith("bad"):
            raise CapacityError(
                "prompt of 600 tokens, context of 512: shorten it or raise --ctx-size"
            )
        if text.startswith("crash"):
            raise KeyError("weights")
        cancel = given["cancel"]
        pieces = iter(self._pieces(text, seen, cancel))
        return Generation(pieces, given["max_tokens"], cancel)

    def _pieces(self, text: str, seen: Any, cancel: Any) -> Any:
        if text.startswith("stuck"):
            print("stuck at work", file=sys.stderr, flush=True)
            while not cancel.is_set():
                time.sleep(0.01)
            yield ""
        elif text.startswith("slow"):
            for i in range(1000):
                if i == 6 and "SIGINT" in text:
                    signal.raise_signal(signal.SIGINT)
                yield f"{i} "
                time.sleep(0.005)
        elif text.startswith("unheard"):

            def interrupt() -> None:
                time.sleep(1)
                signal.pthread_kill(threading.get_ident(), signal.SIGINT)  # not the main thread

            threading.Thread(target=interrupt, daemon=True).start()
            yield "soon"
        elif text.startswith("control"):
            yield "a\x1b[2Jb\x07c\x9b1m\td"
        elif text.startswith("unicode"):
            yield "snow ☃ und 漢字 é"
        elif text.startswith("seen"):
            yield "; ".join(f"{m['role']}: {m['content']}" for m in seen)
        else:
            yield from ("You ", "said: ", text)

    def stats(self) -> dict[str, Any]:
        return {
            "counters": Counters(tokens=12345),
            "profile": {"expert_copy_ms": 1.25},
            "slots": 128,
            "experts": 256,
            "regime": "dynamic",
            "cutoff_layer": None,
            "warnings": [],
            "notices": ["no prefetching: the draft is of another width"],
        }

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def close(self) -> None:
        if mark := os.environ.get("FAKE_ENGINE_CLOSED"):
            Path(mark).touch()


if __name__ == "__main__":
    from spmoe_lite import cli, cli_talk, library

    library.find = lambda name, home=None: Path(f"{name}.spmoe")
    cli_talk._has_template = lambda target: True
    engine = sys.modules["spmoe_lite.engine"] = type(sys)("spmoe_lite.engine")
    engine.Engine = Engine
    if os.environ.get("FAKE_NO_EDITOR"):
        sys.modules["prompt_toolkit"] = None
    cli.main()
