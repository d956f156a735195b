"""Measure what the cutoff policy needs on this machine, for this pair, and keep it.

Three times in milliseconds: one expert from the pack to its slot, one draft pass, and one target layer of
a verify pass without its copies. `Engine.load` starts from the stored profile and corrects it with every
step; without one it starts from a rougher guess.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from spmoe_lite.cutoff import Profile, save_profile
from spmoe_lite.device import bus_rate
from spmoe_lite.engine import Engine
from spmoe_lite.errors import UsageError

ROUNDS = 7
PROMPT_TOKENS = 64  # context in which a pass is timed


def profile(engine: Engine) -> Profile:
    """Measure, store for the next `Engine.load` of the pair, and use at once.

    UsageError for a dense target, which has no experts to prefetch, or without a draft.
    """
    decoder = engine.decoder
    if decoder.store is None or decoder.draft is None:
        raise UsageError("profile needs a Mixture-of-Experts target and --draft")
    rows = min(decoder.length.most + 1, engine.ctx_size - 1)
    with torch.inference_mode():
        if decoder.graphs is not None:  # the device reads page-locked memory by itself
            copy = engine.plan.slot_bytes / bus_rate(engine.device) * 1e3
        else:
            copy = _median_ms(_copier(engine))
        draft = _median_ms(_passer(engine, draft=True, rows=1))
        layers = len(decoder.target.blocks)
        verify = _median_ms(_passer(engine, draft=False, rows=rows)) / layers
    for kv in (decoder.session.target_kv, decoder.session.draft_kv):
        kv.truncate(0)  # the timed passes were nobody's conversation
    measured = Profile(expert_copy_ms=copy, draft_token_ms=draft, target_layer_ms=verify)
    decoder.drift.profile = measured
    save_profile(engine.profile_path, measured)
    return measured


def _median_ms(once: Callable[[], float]) -> float:
    """Median of a few rounds after a warm-up; `once` returns the milliseconds that do not count."""
    once()
    times = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        ignored = once()
        times.append((time.perf_counter() - started) * 1e3 - ignored)
    return max(0.0, statistics.median(times))


def _copier(engine: Engine) -> Callable[[], float]:
    """One expert from the pack into host memory, and on to the device if there is one."""
    pack = engine.target_pack
    out = np.empty(engine.plan.slot_bytes, dtype=np.uint8)
    on_device = torch.empty(len(out), dtype=torch.uint8, device=engine.device)
    turns = itertools.cycle(range(pack.config.num_hidden_layers))

    def once() -> float:
        pack.read_expert(next(turns), 0, out)
        if on_device.is_cuda:
            on_device.copy_(torch.from_numpy(out))
            torch.cuda.synchronize(engine.device)
        return 0.0

    return once


def _passer(engine: Engine, *, draft: bool, rows: int) -> Callable[[], float]:
    """One pass of `rows` tokens after a short context; returns the time it waited for experts."""
    decoder = engine.decoder
    model = decoder.draft if draft else decoder.target
    kv = decoder.session.draft_kv if draft else decoder.session.target_kv
    decoder.session.start([0])
    tokens = min(97, model.config.vocab_size)
    context = [i % tokens for i in range(min(PROMPT_TOKENS, kv.capacity - rows))]
    model.forward(context, kv)

    def once() -> float:
        stalled = engine.counters.stall_seconds
        kv.truncate(len(context))
        model.forward([i % tokens for i in range(rows)], kv).sum().item()
        return (engine.counters.stall_seconds - stalled) * 1e3

    return once
