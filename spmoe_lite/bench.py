"""Measure a pack, perhaps with a draft, on this machine: a row per policy, slots and draft length.

    on-demand      an LRU of slots in every layer, experts copied when they are needed
    global-lru     the same with one LRU over all layers; on a GPU its steps are driven by the host
    ours           on-demand, and what the draft's states point at is copied ahead
    all-resident   every expert in a slot: the bound where it fits, left out where it does not

Every row starts from the same state: a fresh engine, and a round over all prompts that is not counted.
Rows without drafting load no draft, whose memory then is free for slots. Every answer is greedy and begins
with empty KV caches. All rows must write the tokens of the first one, on-demand without drafting; one
that does not is an error and takes no part in the ranking.

What is counted begins with the first text of an answer: TPOT = (end - first) / tokens between, drafting
and its reading of the prompt included. The prompt's own pass is in the time to the first token.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from spmoe_lite import __version__, library
from spmoe_lite.config import SamplingParams
from spmoe_lite.engine import DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS, Engine
from spmoe_lite.errors import Cancelled, CapacityError, UsageError
from spmoe_lite.plan import MIN_SLOTS, Plan
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.prompts import PROMPTS
from spmoe_lite.stats import Counters, RunStats

BASE, GLOBAL, OURS, ALL = POLICIES = ("on-demand", "global-lru", "ours", "all-resident")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured; slots None are as many as the plan gives."""

    policy: str
    slots: int | None
    draft_tokens: int | str

    def __str__(self) -> str:
        drafts = f"{self.draft_tokens or 'no'} draft{'' if self.draft_tokens == 1 else 's'}"
        return f"{self.policy}, {self.slots or 'planned'} slots, {drafts}"


@dataclass(frozen=True, slots=True)
class Run:
    """One answer. Of `stats`, all but the time to the first token is of what followed the first text."""

    prompt: int
    repeat: int  # 0 is the warm-up
    stats: RunStats
    token_ids: tuple[int, ...]

    @property
    def tpot_ms(self) -> float | None:
        rate = self.stats.tokens_per_second
        return 1e3 / rate if rate else None

    def to_dict(self) -> dict[str, Any]:
        found = {"prompt": self.prompt, "repeat": self.repeat, "tpot_ms": self.tpot_ms}
        return found | _figures(self.stats)


def _figures(stats: RunStats) -> dict[str, Any]:
    """All but the length of the answer, whose first text does not count."""
    return {name: value for name, value in stats.to_dict().items() if name != "completion_tokens"}


@dataclass(frozen=True, slots=True)
class Row:
    """One setting over its runs; the warm-up's are compared, and counted nowhere."""

    setting: Setting  # with the slots it got
    asked: int | None  # slots: rows that were asked for the same are compared
    tpot_ms: tuple[float, float, float] | None  # median, least, most of the runs
    stats: RunStats  # sums, and the median time to the first token
    error: str | None  # why it may not be compared
    steps: str  # "captured", "driven by the host"
    notices: tuple[str, ...]
    runs: tuple[Run, ...]

    def to_dict(self) -> dict[str, Any]:
        """Every figure under its name, for JSON."""
        c, seconds = self.stats.counters, self.stats.seconds
        names = ("tpot_ms", "tpot_ms_min", "tpot_ms_max")
        found = asdict(self.setting) | dict(zip(names, self.tpot_ms or [None] * 3, strict=True))
        found["mb_per_token"] = c.bytes_moved / 1e6 / c.tokens if c.tokens else None
        found["stall_share"] = c.stall_seconds / seconds if seconds else None
        found |= _figures(self.stats) | {"error": self.error, "steps": self.steps}
        return found | {"notices": self.notices, "runs": [run.to_dict() for run in self.runs]}


@dataclass(slots=True)
class Bench:
    """Rows, fastest first; what was left out and why; whether it was stopped before its end."""

    rows: list[Row]
    left_out: dict[str, str]
    experts: int
    device: str = ""
    interrupted: bool = False

    def to_dict(self) -> dict[str, Any]:
        found = {"device": self.device, "experts": self.experts, "left_out": self.left_out}
        found |= {"interrupted": self.interrupted, "summary": summary(self.rows)}
        return found | {"rows": [row.to_dict() for row in self.rows]}


def make_row(setting: Setting, runs: Sequence[Run], first: Sequence[Run], **known: Any) -> Row:
    """`first`: the runs of the first row, whose tokens are what every run must have written."""
    texts = {run.prompt: run.token_ids for run in first}
    wrong = [run.prompt + 1 for run in runs if run.token_ids != texts[run.prompt]]
    counted = [run for run in runs if run.repeat]
    times = [run.tpot_ms for run in counted if run.tpot_ms is not None]
    growth = [run.stats.counters for run in counted]
    c = Counters(*(sum(getattr(one, f.name) for one in growth) for f in fields(Counters)))
    seconds = sum(run.stats.seconds for run in counted)
    first_text = statistics.median(run.stats.time_to_first_token for run in counted)
    return Row(
        setting=setting,
        tpot_ms=(statistics.median(times), min(times), max(times)) if times else None,
        stats=RunStats(c.tokens + 1, seconds, first_text, c),
        error=f"another text than the first row's, prompt {wrong[0]}" if wrong else None,
        runs=tuple(runs),
        **known,
    )


def sort_rows(rows: Iterable[Row]) -> list[Row]:
    """Fastest first; what may not be compared comes last."""
    return sorted(rows, key=lambda row: (row.error is not None, row.tpot_ms or (float("inf"),)))


def summary(rows: Iterable[Row]) -> str:
    """Which row was fastest, and by how much against on-demand at its best with as many slots asked for.

    On-demand itself is compared with the next row.
    """
    good = [row for row in sort_rows(rows) if not row.error and row.tpot_ms]
    if not good:
        return "nothing to compare: no row wrote more than its first text"
    text = f"fastest: {_against(good[0], good)}"
    paging = [row for row in good if row.setting.policy != ALL]
    if paging and good[0] not in paging:
        text += f"; of those that page: {_against(paging[0], good)}"
    return text


def _against(best: Row, rows: Sequence[Row]) -> str:
    assert best.tpot_ms is not None
    text = f"{best.setting}, {best.tpot_ms[0]:.1f} ms a token"
    others = [row for row in rows if row.setting.policy == BASE]
    base = next((row for row in others if row.asked == best.asked), others[0] if others else best)
    if base is best:  # then the next one says by how little or much
        base = next(iter(rows[rows.index(best) + 1 :]), best)
    if base is best or base.tpot_ms is None:
        return text
    pairs = [(a.tpot_ms, b.tpot_ms) for a, b in zip(best.runs, base.runs, strict=True) if a.repeat]
    ahead = sum(a is not None and b is not None and a < b for a, b in pairs)
    times, of = base.tpot_ms[0] / best.tpot_ms[0], f"{base.setting} ({base.tpot_ms[0]:.1f} ms)"
    return f"{text}, {times:.2f} times as fast as {of}, ahead in {ahead} of {len(pairs)} runs"


def plan_rows(
    policies: Sequence[str],
    slots: Sequence[int | None],
    draft_tokens: Sequence[int | str],
    experts: int,
    has_draft: bool,
) -> list[Setting]:
    """The rows in the order they run. UsageError for names and numbers that cannot be."""
    for name in policies:
        if name not in POLICIES:
            raise UsageError(f"--policy {name}: one of {', '.join(POLICIES)}")
    for n in draft_tokens:
        if n != "auto" and not 0 <= int(n) <= MAX_DRAFT_TOKENS:
            raise UsageError(f"--draft-tokens {n}: 0 to {MAX_DRAFT_TOKENS}, or auto")
        if n and not has_draft:
            raise UsageError(f"--draft-tokens {n}: name the pack that drafts with --draft")
    found = [Setting(BASE, (slots or [None])[0], 0)]
    for number in slots or [None]:
        if number is not None and not min(MIN_SLOTS, experts) <= number <= experts:
            raise UsageError(f"--slots {number}: {min(MIN_SLOTS, experts)} to {experts}")
        for policy in policies:
            asked = experts if policy == ALL else number
            drafts = draft_tokens or ([0, DEFAULT_DRAFT_TOKENS] if has_draft else [0])
            found += [Setting(policy, asked, n) for n in drafts if n or policy != OURS]
    return list(dict.fromkeys(found))


def bench(
    target: Path,
    draft: Path | None = None,
    *,
    policies: Sequence[str] = POLICIES,
    slots: Sequence[int] = (),
    draft_tokens: Sequence[int | str] = (),
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 64,
    repeats: int = 3,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
    on_row: Callable[[Row], object] | None = None,
    **options: Any,
) -> Bench:
    """Measure every setting; `options` go to `Engine.load`, `on_row` gets each row as it ends.

    CapacityError where the first row does not fit; later ones are left out. `cancel` ends it with the
    rows so far.
    """
    experts = library.inspect(target)["experts"]
    if not experts:
        raise UsageError(f"{target.name.removesuffix('.spmoe')} has no experts: nothing is paged")
    if not prompts or max_tokens < 2 or repeats < 2:
        raise UsageError("a prompt, two tokens and two repeats are needed: the first do not count")
    todo = plan_rows(policies, slots, draft_tokens, experts, draft is not None)
    result = Bench([], {}, experts)
    if OURS in policies and all(one.policy != OURS for one in todo):
        result.left_out[OURS] = "without --draft and draft tokens nothing says what to copy ahead"
    how = {"sampling": SamplingParams(), "max_tokens": max_tokens, "cancel": cancel}
    first: list[Run] = []
    seen: set[Setting] = set()
    for index, asked in enumerate(todo):

        def look(plan: Plan, asked: Setting = asked) -> None:
            if _got(asked, plan.slots, experts) in seen:
                raise _Known

        def report(done: int, index: int = index) -> None:
            each = repeats * len(prompts)
            check(cancel)
            if on_progress is not None:
                on_progress(Progress("bench", index * each + done, len(todo) * each, "answers"))

        try:
            with Engine.load(
                target,
                draft if asked.draft_tokens else None,
                slots=asked.slots,
                draft_tokens=asked.draft_tokens,
                prefetch=asked.policy == OURS,
                policy="global-lru" if asked.policy == GLOBAL else "layer-lru",
                on_plan=look,
                cancel=cancel,
                on_progress=on_progress,
                **options,
            ) as engine:
                runs = measure(engine, prompts, repeats, report, **how)
                known, result.device = engine.stats(), str(engine.device)
        except _Known:
            if asked.policy != ALL:
                why = f"all {experts} experts are in slots, nothing is paged: give fewer --slots"
                result.left_out[f"{asked.policy}, {asked.slots or experts} slots"] = why
            continue
        except CapacityError as error:
            if not first:
                raise
            result.left_out[str(asked)] = str(error)
            continue
        except Cancelled:
            result.interrupted = True
            break
        setting, first = _got(asked, known["slots"], experts), first or runs
        seen.add(setting)
        said = {"steps": known["steps"], "notices": tuple(known["notices"])}
        row = make_row(setting, runs, first, asked=asked.slots, **said)
        result.rows = sort_rows([*result.rows, row])
        if on_row is not None:
            on_row(row)
    return result


class _Known(Exception):
    """A row that is there already: with every expert in a slot all policies are one."""


def _got(asked: Setting, slots: int, experts: int) -> Setting:
    return replace(asked, slots=slots, policy=ALL if slots == experts else asked.policy)


def measure(
    engine: Any, prompts: Sequence[str], repeats: int, report: Callable[[int], object], **how: Any
) -> list[Run]:
    """Every prompt in turn, `repeats` times; `report(answers so far)` before each. Raises Cancelled."""
    session, runs = engine.decoder.session, list[Run]()
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            report(len(runs))
            for kv in filter(None, (session.target_kv, session.draft_kv)):
                kv.truncate(0)  # a prompt met again is read again
            started = time.perf_counter()
            if engine.template is None:
                answer = engine.generate(prompt, **how)
            else:
                answer = engine.chat([{"role": "user", "content": prompt}], **how)
            next(answer, None)
            first, before = time.perf_counter(), engine.counters.copy()
            result = answer.result
            seconds, c = time.perf_counter() - first, engine.counters.since(before)
            if result.finish_reason == "cancelled":
                raise Cancelled("cancelled")
            stats = RunStats(c.tokens + 1, seconds, first - started, c)
            runs.append(Run(number, repeat, stats, result.token_ids))
    return runs


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    info = Path("/proc/cpuinfo")
    cpu = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.is_file() else None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    found = {"cpu": cpu[1] if cpu else platform.processor(), "cores": os.cpu_count(), "gpu": gpu}
    found |= {"threads": torch.get_num_threads(), "system": platform.platform()}
    return found | {"torch": torch.__version__, "version": __version__}
