"""Measure what the cutoff policy and `plan` need on this machine, for these packs, and keep it.

    link      experts, one after the other, to a slot by copies; and read by the expert kernel, where the
              GPU reads host memory by itself: what a miss costs
    disk      experts read past the page cache into RAM and on to a slot, by the RAM tier: what a miss costs
              where RAM has no room for it
    layer     a target layer of a pass of one row and of a verify pass, without waiting for experts
    draft     one draft token
    accepted  the share of draft tokens that the target keeps, over three short answers
    missed    experts of their tokens that were not in slots, over what uniform routing would miss

Passes are timed as the engine runs them, captured or driven by the host. Each round repeats the same
tokens, so that their experts are in slots as far as there are slots; what still misses is taken off at the
price of the link. `Engine.load` starts from the stored profile and corrects it with every step; without one
it starts from a rougher guess. What a run could not measure, such as acceptance where nothing is drafted,
stays as an earlier one of the same packs left it.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from spmoe_lite.cutoff import Profile, check_place, load_profile, save_profile
from spmoe_lite.device import bus_rate, current, synchronize
from spmoe_lite.engine import Engine
from spmoe_lite.errors import UsageError
from spmoe_lite.kernels.expert_gemm import expert_down, expert_up, new_partial
from spmoe_lite.manifest import MANIFEST
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.prompts import PROMPTS
from spmoe_lite.ramtier import RamTier
from spmoe_lite.slab import make_slab
from spmoe_lite.speed import acceptance, times_drafts
from spmoe_lite.stats import Counters

ROUNDS = 7
PROMPT_TOKENS = 64  # context in which a pass is timed
ANSWER_TOKENS = 32  # of each answer in which acceptance is counted
DISK_BYTES = 512 << 20  # read from disk
STAGES = 4


def profile(
    engine: Engine,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """`measure`, use at once, and `keep`; if it cannot be kept, what was measured is used all the same."""
    return keep(engine, measure(engine, cancel, on_progress))


def measure(
    engine: Engine,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Profile:
    """What this run can measure; nothing is written.

    UsageError for a dense target, which has no experts to page; a `SpmoeError` where `keep` could not
    write. Without a draft its times are 0 and the verify pass has one row. Raises `Cancelled` between two
    measurements.
    """
    decoder = engine.decoder
    if decoder.store is None:
        raise UsageError(f"profile needs experts: {engine.target_pack.name} is a dense model")
    check_place(engine.profile_path)  # before minutes of measuring

    def begin(stage: int) -> None:
        check(cancel)
        if on_progress is not None:
            on_progress(Progress("profile", stage, STAGES, "measurements"))

    begin(0)
    accepted, missed = _answers(engine, cancel)  # first: it is a conversation, which comes and goes
    with torch.inference_mode(), current(engine.device):
        begin(1)
        stride = engine.plan.slot_bytes
        there = decoder.store.table.all_fit or decoder.store.tier is not None
        if there and engine.device.type == "cuda":  # for other numbers of slots, and from places
            copy_ms = stride / bus_rate(engine.device) * 1e3
        else:
            copy_ms = _median_ms(_copier(engine))
        reader = _reader(engine)
        read_ms = None if reader is None else _median_ms(reader)
        miss_ms = copy_ms if read_ms is None else read_ms
        disk = _disk_gbps(engine)
        begin(2)
        if decoder.graphs is not None:
            plain, verify, rows, draft = _captured_passes(engine, miss_ms)
        else:
            rows = 1
            if decoder.draft is not None:
                rows = min(decoder.length.most + 1, engine.ctx_size - 1)
            plain = _median_ms(_passer(engine, draft=False, rows=1, miss_ms=miss_ms))
            verify = plain
            if rows > 1:
                verify = _median_ms(_passer(engine, draft=False, rows=rows, miss_ms=miss_ms))
            begin(3)
            draft = 0.0
            if decoder.drafts is not None:
                draft = _median_ms(_drafter(engine)) / decoder.length.most
            elif decoder.draft is not None:
                draft = _median_ms(_passer(engine, draft=True, rows=1, miss_ms=0.0))
    for kv in (decoder.session.target_kv, decoder.session.draft_kv):
        if kv is not None:
            kv.truncate(0)  # the timed passes were nobody's conversation
    layers = len(decoder.target.blocks)
    measured = Profile(
        expert_copy_ms=miss_ms,
        draft_token_ms=draft,
        target_layer_ms=verify / layers,
        plain_layer_ms=plain / layers,
        verify_rows=rows,
        copy_gbps=_gbps(stride, copy_ms),
        read_gbps=None if read_ms is None else _gbps(stride, read_ms),
        acceptance=accepted,
        miss_ratio=missed,
        disk_gbps=disk,
    )
    if engine.device.type == "cuda":
        torch.cuda.empty_cache()  # of what measuring took beside the plan
    return measured


def keep(engine: Engine, measured: Profile) -> Profile:
    """Use it, and store it for the next `Engine.load` of these packs; returns what is stored.

    Fields that were not measured stay as they were kept, unless a pack was made since.
    """
    kept = measured
    if (known := _known(engine)) is not None:
        kept = _filled(measured, known)
    engine.decoder.drift.profile = kept
    save_profile(engine.profile_path, kept)
    return kept


def _known(engine: Engine) -> Profile | None:
    """The kept profile of these very packs: its file goes by their names, so theirs must not be newer."""
    known = load_profile(engine.profile_path)
    if known is None:
        return None
    try:
        made = [(pack.path / MANIFEST).stat().st_mtime_ns for pack in engine._parts.packs]
        return known if max(made) <= engine.profile_path.stat().st_mtime_ns else None
    except OSError:  # gone meanwhile
        return None


def _filled(measured: Profile, known: Profile) -> Profile:
    """`measured`, with what it lacks as `known` has it."""
    changes = {
        name: getattr(known, name)
        for name in ("acceptance", "miss_ratio", "disk_gbps")  # no drafts, all in slots, no RAM
        if getattr(measured, name) is None
    }
    if not measured.draft_token_ms:
        changes["draft_token_ms"] = known.draft_token_ms
    if times_drafts(known) and not times_drafts(measured):
        changes["target_layer_ms"] = known.target_layer_ms
        changes["verify_rows"] = known.verify_rows
    return replace(measured, **changes)


def _gbps(count: int, milliseconds: float) -> float:
    return count / max(milliseconds, 1e-6) / 1e6


def _median_ms(once: Callable[[], float]) -> float:
    """Median of a few rounds after a warm-up; `once` returns the milliseconds that do not count."""
    once()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        ignored = once()
        times.append((time.perf_counter() - started) * 1e3 - ignored)
    return max(0.0, statistics.median(times))


# --- the link


def _copier(engine: Engine) -> Callable[[], float]:
    """One expert to a slot of its own, as a host-driven miss goes; another layer's each time."""
    pack, device = engine.target_pack, engine.device
    slab = make_slab(1, engine.plan.slot_bytes, device)
    addresses = engine.decoder.store.host_addresses()
    turns = itertools.cycle(range(pack.config.num_hidden_layers))

    def once() -> float:
        layer = next(turns)

        def read(out: np.ndarray, offset: int) -> None:
            pack.read_expert(layer, 0, out, offset)

        if addresses is None:
            slab.fill(0, read)
        else:
            slab.fill_from(0, int(addresses[layer, 0]))
        synchronize(device)
        return 0.0

    return once


def _reader(engine: Engine) -> Callable[[], float] | None:
    """k experts of every layer multiplied from host memory; milliseconds beyond the share of one."""
    decoder, layout = engine.decoder, engine.target_pack.expert_layout
    addresses = decoder.store.host_addresses()
    if addresses is None or engine.device.type != "cuda":
        return None
    k = decoder.target.config.num_experts_per_tok
    x = decoder.target.norm.new_zeros(1, layout.hidden_size)
    experts = torch.arange(k, dtype=torch.int32, device=engine.device)[None]
    hidden = x.new_empty(1, k, layout.intermediate_size)
    uses = []
    for row in addresses[:, :k]:
        use = torch.stack((torch.arange(k), row, torch.zeros_like(row)), dim=1)
        uses.append(use.to(engine.device))  # one by one: aligned as an engine's

    def once() -> float:
        started = time.perf_counter()
        for use in uses:
            expert_up(x, experts, use, layout, out=hidden)
            expert_down(hidden, experts, use, layout, out=new_partial(x, experts, layout))
        synchronize(engine.device)
        return (time.perf_counter() - started) * 1e3 * (1 - 1 / (k * len(uses)))

    return once


def _disk_gbps(engine: Engine) -> float | None:
    """Experts one after the other through the RAM tier, direct reads by its threads; None without RAM."""
    pack, host = engine.target_pack, torch.device("cpu")
    stride, c = engine.plan.slot_bytes, engine.target_pack.config
    every = itertools.product(range(c.num_local_experts), range(c.num_hidden_layers))
    keys = [(layer, expert) for expert, layer in every][: max(2, DISK_BYTES // stride)]
    slab = make_slab(1, stride, host)
    tier = RamTier(pack, slab, len(keys) * stride, {}, Counters(), host, bypass=True)
    try:
        if tier.num_places < len(keys):
            return None
        started = time.perf_counter()
        for i, key in enumerate(keys):
            tier.read_ahead(keys[i:])
            tier.fill(key, 0, None, lambda: None, urgent=True)
        return _gbps(len(keys) * stride, (time.perf_counter() - started) * 1e3)
    finally:
        tier.close()


# --- passes


def _context(engine: Engine, room: int) -> list[int]:
    """Tokens before a timed pass of `room` tokens."""
    tokens = min(97, engine.num_tokens)
    return [i % tokens for i in range(max(1, min(PROMPT_TOKENS, room)))]


def _passer(engine: Engine, *, draft: bool, rows: int, miss_ms: float) -> Callable[[], float]:
    """One pass of `rows` tokens, driven by the host; returns the time it waited for experts."""
    decoder, counters = engine.decoder, engine.counters
    model = decoder.draft if draft else decoder.target
    kv = decoder.session.draft_kv if draft else decoder.session.target_kv
    decoder.session.start([0])
    context = _context(engine, kv.capacity - rows)
    model.forward(context, kv)

    def once() -> float:
        before = counters.copy()
        kv.truncate(len(context))
        model.forward([i % engine.num_tokens for i in range(rows)], kv).sum().item()
        seen = counters.since(before)
        waited = seen.stall_seconds * 1e3
        if engine.device.type == "cuda":  # there the host orders copies and goes on
            waited = max(waited, seen.loads * miss_ms)
        return waited

    return once


def _drafter(engine: Engine) -> Callable[[], float]:
    """The captured drafts of a step."""
    decoder, kv = engine.decoder, engine.decoder.session.draft_kv
    decoder.session.start([0])
    context = _context(engine, kv.capacity - decoder.length.most)
    decoder.draft.forward(context, kv)

    def once() -> float:
        decoder.drafts.propose([*context, 0], decoder.length.most, None, None, None)
        return 0.0

    return once


def _captured_passes(engine: Engine, miss_ms: float) -> tuple[float, float, int, float]:
    """Milliseconds of a plain pass, of a verify pass, its rows, and milliseconds of a draft token."""
    decoder, graphs = engine.decoder, engine.decoder.graphs
    session, store = decoder.session, decoder.store
    graphs.leave(store)
    session.start([0])
    room = session.target_kv.capacity - graphs.most
    if graphs.most:
        room = min(room, session.draft_kv.capacity - graphs.most)
    tokens = _context(engine, room)
    if len(tokens) > 1:
        decoder.target.forward(tokens[:-1], session.target_kv)
    if graphs.most and len(tokens) > 2:
        decoder.draft.forward(tokens[:-2], session.draft_kv)
    times: dict[int, list[float]] = {}
    drafts = []
    graphs.enter(store)
    try:
        for count in sorted({0, graphs.most}):
            for _ in range(ROUNDS + 1):
                found = graphs.step(tokens, count, 0, [0] * graphs.most, None, None)
                missed = 0 if found.missed is None else int(found.missed.sum())
                times.setdefault(count + 1, []).append(found.verify_ms - missed * miss_ms)
                if count:
                    drafts.append(found.draft_ms / count)
    finally:
        graphs.leave(store)
    median = {rows: max(0.0, statistics.median(t[1:])) for rows, t in times.items()}
    rows = graphs.most + 1
    return median[1], median[rows], rows, statistics.median(drafts[1:]) if drafts else 0.0


# --- answers


def _answers(engine: Engine, cancel: threading.Event | None) -> tuple[float | None, float | None]:
    """Acceptance and miss ratio of three short answers with the model's own sampling.

    None where nothing was drafted, or nothing can be missed. The first answer only fills the slots.
    """
    before = warm = engine.counters.copy()
    for i, prompt in enumerate(PROMPTS[::2]):
        if engine.template is not None:
            tokens = engine.template.encode([{"role": "user", "content": prompt}])
        else:
            tokens = engine.tokenizer.encode(prompt)
        if len(tokens) < engine.ctx_size:
            answer = engine.generate(tokens, max_tokens=ANSWER_TOKENS, cancel=cancel)
            answer.result  # noqa: B018
        check(cancel)
        if i == 0:
            warm = engine.counters.copy()
    seen, most = engine.counters.since(before), engine.decoder.length.most
    accepted = acceptance(seen.accepted / seen.drafted * most, most) if seen.drafted else None
    seen, plan = engine.counters.since(warm), engine.plan
    if not seen.unique or plan.slots == plan.expert_count:
        return accepted, None
    absent = 1 - plan.slots / plan.expert_count
    return accepted, (1 - seen.unique_hits / seen.unique) / absent
