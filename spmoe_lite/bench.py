"""Measure a pack, perhaps with a draft, on this machine: a row per policy, slots and draft length.

    on-demand      an LRU of slots in every layer, experts copied when they are needed
    global-lru     the same with one LRU over all layers
    next-layer     on-demand, and what the next layer's router says one layer early (AdapMoE)
    trace-match    on-demand, and what the most similar past answer used (MoE-Infinity)
    static         the hottest experts pinned, no other one kept (Fiddler, llama.cpp; nothing on the CPU)
    sp-moe         SP-MoE as published: one LRU, the draft's guesses copied up to a fixed cutoff
    ours           on-demand, and what the draft's states point at is copied ahead
    all-resident   every expert in a slot: the bound where it fits, left out where it does not

All run on the same kernels, slots and copies. On a GPU steps are captured for on-demand, ours and
all-resident; the others (`policies.py`) need the host in every layer. `copy_path` "host" has every row's
steps driven by the host, which compares policies alone; "legacy" adds what published systems pay:
pageable memory, and a synchronisation with every copy. `link` slows the bus to so many GB/s, which only
steps driven by the host can have.

Every row starts from the same state: a fresh engine, and a round over all prompts that is not counted.
Rows without drafting load no draft, whose memory then is free for slots. Every answer is greedy and begins
with empty KV caches. All rows must write the tokens of the first one, on-demand without drafting; one
that does not is an error and takes no part in the ranking. With forced acceptance (of synthetic pairs)
texts are nobody's, and are not compared.

What is counted begins with the first text of an answer: TPOT = (end - first) / tokens between, drafting
and its reading of the prompt included. The prompt's own pass is in the time to the first token.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch

from spmoe_lite import __version__, library
from spmoe_lite.config import ModelConfig, SamplingParams
from spmoe_lite.decoder import PREFILL_CHUNK
from spmoe_lite.device import available_bytes, choose_device
from spmoe_lite.engine import Engine
from spmoe_lite.errors import Cancelled, CapacityError, SpmoeError, UsageError
from spmoe_lite.loading import DEFAULT_DRAFT_TOKENS, MAX_DRAFT_TOKENS
from spmoe_lite.manifest import read_manifest
from spmoe_lite.plan import MIN_SLOTS, UNPRICED, Plan, parse_size, plan_pair
from spmoe_lite.policies import (
    HostDriven,
    NextLayer,
    PageableSlab,
    SlowDeviceSlab,
    SlowHostSlab,
    SpMoe,
    StaticSplit,
    TraceMatch,
    Unlocked,
    published_cutoff,
)
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.prompts import PROMPTS
from spmoe_lite.slab import DeviceSlab, HostSlab, make_slab
from spmoe_lite.stats import Counters, RunStats
from spmoe_lite.synthetic import ForcedAcceptance, Pair
from spmoe_lite.timeline import RecordedSlab, Timeline, record, record_captured
from spmoe_lite.trace import check_link

BASE, GLOBAL, OURS, ALL = "on-demand", "global-lru", "ours", "all-resident"
SP_MOE = "sp-moe"
STORES: dict[str, type[HostDriven]] = {
    "next-layer": NextLayer,
    "trace-match": TraceMatch,
    "static": StaticSplit,
    SP_MOE: SpMoe,
}
POLICIES = (BASE, GLOBAL, *STORES, OURS, ALL)
USUAL = (BASE, GLOBAL, OURS, ALL)  # measured if nothing is said
DRAFTED = (OURS, SP_MOE)  # only with drafts
ONE_POOL = (GLOBAL, "static", SP_MOE)
COPY_PATHS = ("auto", "host", "legacy")


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured; slots None are as many as the plan gives of `vram`."""

    policy: str
    slots: int | None
    draft_tokens: int | str
    vram: str = "auto"

    def __str__(self) -> str:
        drafts = f"{self.draft_tokens or 'no'} draft{'' if self.draft_tokens == 1 else 's'}"
        planned = "planned" if self.vram == "auto" else f"{self.vram} of"
        return f"{self.policy}, {self.slots or planned} slots, {drafts}"


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
    asked: int | str | None  # slots or VRAM: rows that were asked for the same are compared
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
        found = asdict(self.setting) | {"vram": self.asked if isinstance(self.asked, str) else None}
        found |= dict(zip(names, self.tpot_ms or [None] * 3, strict=True))
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
    copy_path: str = "auto"
    link: float | None = None  # GB/s
    acceptance: float | None = None  # forced
    timelines: list[Timeline] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        found = {"device": self.device, "experts": self.experts, "left_out": self.left_out}
        found |= {"interrupted": self.interrupted, "summary": summary(self.rows)}
        found |= {"copy_path": self.copy_path, "link": self.link, "acceptance": self.acceptance}
        found["timelines"] = [one.to_dict() for one in self.timelines]
        return found | {"rows": [row.to_dict() for row in self.rows]}


def make_row(
    setting: Setting, runs: Sequence[Run], first: Sequence[Run] | None, **known: Any
) -> Row:
    """`first`: the runs of the first row, whose tokens are what every run must have written; or None."""
    texts = {run.prompt: run.token_ids for run in first or ()}
    wrong = [r.prompt + 1 for r in runs if r.token_ids != texts.get(r.prompt, r.token_ids)]
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
    slots: Sequence[int],
    draft_tokens: Sequence[int | str],
    experts: int,
    has_draft: bool,
    vram: Sequence[str] = ("auto",),
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
    for size in vram:
        if size != "auto":
            parse_size(size, 1 << 62)
    if slots and len(vram) > 1:
        raise UsageError("--slots and several sizes of --vram: give one or the other")
    for number in slots:
        if not min(MIN_SLOTS, experts) <= number <= experts:
            raise UsageError(f"--slots {number}: {min(MIN_SLOTS, experts)} to {experts}")
    amounts: list[tuple[int | None, str]] = [(number, vram[0]) for number in slots]
    amounts = amounts or [(None, size) for size in vram]
    drafts = draft_tokens or ([0, DEFAULT_DRAFT_TOKENS] if has_draft else [0])
    found = [Setting(BASE, amounts[0][0], 0, amounts[0][1])]
    for amount, size in amounts:
        for policy in policies:
            asked = experts if policy == ALL else amount
            wanted = [n for n in drafts if n or policy not in DRAFTED]
            found += [Setting(policy, asked, n, size) for n in wanted]
    return list(dict.fromkeys(found))


def check_how(copy_path: str, link: float | None, acceptance: float | None) -> None:
    """UsageError for what no row can be measured with."""
    if copy_path not in COPY_PATHS:
        raise UsageError(f"--copy-path {copy_path}: one of {', '.join(COPY_PATHS)}")
    check_link("--link", link)
    if link is not None and copy_path == "legacy":
        raise UsageError(f"--link {link:g}: not with --copy-path legacy")
    if acceptance is not None:
        ForcedAcceptance(acceptance)


def check_fit(
    pair: Pair, first: Setting, *, device: str, ctx_size: int | None, kv_type: str
) -> None:
    """CapacityError where the first row would not fit, from shapes alone: a pair need not be written for it."""
    place = choose_device(device)
    plan_pair(
        pair.target_size,
        None,  # the first row drafts nothing
        name=pair.names[0],
        device=str(place),
        available=available_bytes(place),
        vram=first.vram,
        slots=first.slots,
        ctx_size=ctx_size,
        draft_tokens=0,
        chunk=PREFILL_CHUNK,
        kv_type=kv_type,
        pinned="none",
        costs=UNPRICED,
    )


def bench(
    target: Path,
    draft: Path | None = None,
    *,
    policies: Sequence[str] = USUAL,
    slots: Sequence[int] = (),
    vram: str | Sequence[str] = "auto",
    draft_tokens: Sequence[int | str] = (),
    prompts: Sequence[str] = PROMPTS,
    max_tokens: int = 64,
    repeats: int = 3,
    acceptance: float | None = None,
    copy_path: str = "auto",
    link: float | None = None,
    timelines: bool = False,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
    on_row: Callable[[Row], object] | None = None,
    **options: Any,
) -> Bench:
    """Measure every setting; `options` go to `Engine.load`, `on_row` gets each row as it ends.

    acceptance: forced, for synthetic pairs. copy_path: one of COPY_PATHS. link: GB/s of a slower bus.
    timelines: record one step of every policy, too. Raises what ends the first row, CapacityError where it
    does not fit; a later one is left out, with the reason. `cancel` ends it with the rows so far.
    """
    experts = library.inspect(target)["experts"]
    if not experts:
        raise UsageError(f"{target.name.removesuffix('.spmoe')} has no experts: nothing is paged")
    if not prompts or max_tokens < 2 or repeats < 2:
        raise UsageError("a prompt, two tokens and two repeats are needed: the first do not count")
    check_how(copy_path, link, acceptance)
    sizes = [vram] if isinstance(vram, str) else vram
    todo = plan_rows(policies, slots, draft_tokens, experts, draft is not None, sizes)
    path = "host" if link is not None else copy_path
    result = Bench([], {}, experts, copy_path=path, link=link, acceptance=acceptance)
    for name in DRAFTED:
        if name in policies and all(one.policy != name for one in todo):
            result.left_out[name] = (
                "without --draft and draft tokens nothing says what to copy ahead"
            )
    forced = None if acceptance is None else ForcedAcceptance(acceptance)
    how = {"sampling": SamplingParams(), "max_tokens": max_tokens, "cancel": cancel}
    drawn = _to_draw(todo) if timelines else {}
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

        def load(path: str, asked: Setting = asked, look: Any = look) -> Engine:
            return _load(
                asked,
                path,
                link,
                target,
                draft if asked.draft_tokens else None,
                on_plan=look,
                cancel=cancel,
                on_progress=on_progress,
                **options,
            )

        try:
            with load(path) as engine:
                prepare(engine, asked, forced, link)
                runs = measure(engine, prompts, repeats, report, **how)
                known, result.device = engine.stats(), str(engine.device)
                host_driven = isinstance(engine.decoder.store, HostDriven)
                captured = known["steps"] == "captured"
                if asked in drawn and (host_driven or captured):
                    _draw(result, engine, asked, prompts[0], how)
            if asked in drawn and not (host_driven or captured):
                with load("host", look=None) as engine:
                    prepare(engine, asked, forced, link)
                    measure(engine, prompts[:1], 1, lambda done: check(cancel), **how)
                    _draw(result, engine, asked, prompts[0], how)
        except _Known:
            _leave_out_paged(result, asked)
            continue
        except Cancelled:
            result.interrupted = True
            break
        except SpmoeError as error:  # the rows before are worth keeping
            if not first:
                raise
            result.left_out[str(asked)] = str(error)
            continue
        setting, first = _got(asked, known["slots"], experts), first or runs
        seen.add(setting)
        if setting.policy == ALL:
            _leave_out_paged(result, asked)  # it is measured, as what it became
        said = {"steps": known["steps"], "notices": tuple(known["notices"])}
        amount = asked.slots or (None if asked.vram == "auto" else asked.vram)
        row = make_row(setting, runs, None if forced else first, asked=amount, **said)
        result.rows = sort_rows([*result.rows, row])
        if on_row is not None:
            on_row(row)
    return result


def _leave_out_paged(result: Bench, asked: Setting) -> None:
    """Say why there is no row of a policy that had nothing to page."""
    if asked.policy != ALL:
        why = f"all {result.experts} experts are in slots, nothing is paged: give fewer --slots"
        result.left_out[f"{asked.policy}, {asked.slots or result.experts} slots"] = why


def _load(
    asked: Setting,
    path: str,
    link: float | None,
    target: Path,
    draft: Path | None,
    **given: Any,
) -> Engine:
    """A fresh engine for one setting, its experts kept and copied as the policy and the path say."""
    own = asked.policy not in STORES
    store = HostDriven if own else STORES[asked.policy]
    kind: type[Engine] = Engine
    if path != "auto" or not own:
        bases = (Unlocked, store) if path == "legacy" else (store,)

        class Measured(Engine):
            captures = False
            make_store = type("Store", bases, {})
            make_slab = staticmethod(functools.partial(_make_slab, path == "legacy", link))

            def close(self) -> None:
                decoder = self._parts.decoder
                if decoder is not None and isinstance(decoder.store, HostDriven):
                    decoder.store.end()
                super().close()

        kind = Measured
    if path == "legacy":
        given["pin"] = "none"
    if asked.policy == SP_MOE:
        given["critical_experts"] = _critical(read_manifest(target).config)
    return kind.load(
        target,
        draft,
        slots=asked.slots,
        vram=asked.vram,
        draft_tokens=asked.draft_tokens,
        prefetch=asked.policy in DRAFTED,
        policy="global-lru" if asked.policy in ONE_POOL else "layer-lru",
        **given,
    )


def _make_slab(
    legacy: bool, link: float | None, slots: int, stride: int, device: torch.device
) -> HostSlab | DeviceSlab:
    on_gpu = device.type == "cuda"
    base: type = DeviceSlab if on_gpu else HostSlab
    if legacy and on_gpu:
        base = PageableSlab
    elif link is not None:
        base = SlowDeviceSlab if on_gpu else SlowHostSlab
    kind = type("Slab", (RecordedSlab, base), {"rate": (link or 0) * 1e9})
    return make_slab(slots, stride, device, kind)


def _critical(config: ModelConfig) -> int:
    """Experts that SP-MoE copies for a draft token and layer: 1 of Mixtral's 2, elsewhere all k."""
    return 1 if config.family == "mixtral" else config.num_experts_per_tok


def prepare(
    engine: Any, asked: Setting, forced: ForcedAcceptance | None, link: float | None = None
) -> None:
    """What a policy needs to know of its engine and the bus, and whose verdict counts."""
    decoder = engine.decoder
    if link is not None:
        copy_ms = engine.plan.slot_bytes / link / 1e6
        decoder.drift.profile = replace(decoder.drift.profile, expert_copy_ms=copy_ms)
    if forced is not None:
        decoder.verify = forced
    if isinstance(decoder.store, HostDriven):
        decoder.store.attach(decoder.target)
        decoder.watch = decoder.store.observe
    if asked.policy == SP_MOE and decoder.prefetcher is not None:
        decoder.cutoff = published_cutoff(
            decoder.drift.profile,
            layers=len(decoder.target.blocks),
            drafts=decoder.length.most,
            critical=_critical(decoder.target.config),
            slots=decoder.store.table.num_slots,
        )
        decoder.prefetcher.usefulness.judge = lambda: True  # theirs goes on whatever it brings


def _to_draw(todo: Sequence[Setting]) -> set[Setting]:
    """Of each policy one setting: the first slots or VRAM, most drafts."""
    found: dict[str, Setting] = {}
    for one in todo:
        best = found.setdefault(one.policy, one)
        if (one.slots, one.vram) == (best.slots, best.vram) and _most(one) > _most(best):
            found[one.policy] = one
    return {one for one in found.values() if one.policy != ALL}


def _most(asked: Setting) -> int:
    return DEFAULT_DRAFT_TOKENS if asked.draft_tokens == "auto" else int(asked.draft_tokens)


def _draw(result: Bench, engine: Engine, asked: Setting, prompt: str, how: dict[str, Any]) -> None:
    """Record an answer more."""

    def answer() -> None:
        measure(engine, [prompt], 1, lambda done: None, **how)

    by = record_captured if engine.decoder.graphs is not None else record
    timeline = by(engine, str(asked), answer)
    if timeline is not None:
        result.timelines.append(timeline)


class _Known(Exception):
    """A row that is there already: with every expert in a slot all policies are one."""


def _got(asked: Setting, slots: int, experts: int) -> Setting:
    policy = ALL if slots == experts else asked.policy
    return replace(asked, slots=slots, policy=policy, vram="auto")


def measure(
    engine: Any, prompts: Sequence[str], repeats: int, report: Callable[[int], object], **how: Any
) -> list[Run]:
    """Every prompt in turn, `repeats` times; `report(answers so far)` before each. Raises Cancelled."""
    session, runs = engine.decoder.session, list[Run]()
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            report(len(runs))
            if isinstance(engine.decoder.store, HostDriven):
                engine.decoder.store.begin_answer(counted=repeat > 0)
            for kv in filter(None, (session.target_kv, session.draft_kv)):
                kv.truncate(0)  # a prompt met again is read again
            started = time.perf_counter()
            try:
                if engine.template is None:
                    answer = engine.generate(prompt, **how)
                else:
                    answer = engine.chat([{"role": "user", "content": prompt}], **how)
            except CapacityError as error:
                raise CapacityError(f"prompt {number + 1}: {error}") from error
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
