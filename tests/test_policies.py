"""Other systems' policies: what each copies ahead, keeps and forgets, over a tiny pack on the CPU."""

import ctypes
import itertools
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from spmoe_lite import Engine, policies, slab
from spmoe_lite.cutoff import Profile
from spmoe_lite.policies import (
    HostDriven,
    NextLayer,
    PageableSlab,
    SlowDeviceSlab,
    SpMoe,
    StaticSplit,
    TraceMatch,
)
from spmoe_lite.synthetic import Pair, write_pair
from spmoe_lite.timeline import Log, RecordedSlab

LAYERS, EXPERTS, K = 4, 8, 2


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return write_pair(Pair.of("tiny", experts="fp32"), tmp_path_factory.mktemp("policies"))


@pytest.fixture
def run(packs):
    """Load the target with a store of that class; answer, learning first if asked."""
    engines = []

    def load(kind, policy="layer-lru", slots=16):
        measured = type("Measured", (Engine,), {"make_store": kind, "captures": False})
        engine = measured.load(packs[0], device="cpu", slots=slots, policy=policy, ctx_size=256)
        engine.decoder.store.attach(engine.decoder.target)
        engine.decoder.watch = engine.decoder.store.observe
        engines.append(engine)
        return engine, engine.decoder.store

    yield load
    for engine in engines:
        engine.decoder.store.end()
        engine.close()


def answer(engine, store, prompt="hello there", counted=True):
    store.begin_answer(counted)
    return engine.generate(prompt, max_tokens=12).result.token_ids


def test_the_next_layer_s_router_names_what_the_next_layer_uses(run):
    engine, store = run(NextLayer)
    guesses = []
    ahead = store.ahead
    store.ahead = lambda layer: guesses.append(ahead(layer)) or guesses[-1]
    text = answer(engine, store)
    assert text == answer(*run(HostDriven))
    counters = engine.counters
    assert counters.prefetches > 0 and counters.prefetch_useful > 0.6 * counters.prefetches
    assert [] in guesses  # of the last layer
    assert sum(len(guess) == K for guess in guesses) > 20  # all but the prompt's
    assert {key[0] for guess in guesses for key in guess} == {1, 2, 3}


def test_what_most_rows_want_comes_first(run):
    _, store = run(NextLayer)
    chosen = torch.tensor([[3, 1], [1, 5], [5, 1]])
    store._guess = policies.Prediction(1, 0, chosen, None)
    assert store.ahead(0) == [(1, 1), (1, 5), (1, 3)]


def test_the_nearest_past_answer_says_what_comes(run):
    engine, store = run(TraceMatch)
    answer(engine, store, "hello there", counted=False)
    answer(engine, store, "x" * 40, counted=False)
    answer(engine, store, "hello there")
    assert len(store._past) == 2 and engine.counters.prefetches > 0
    for past in store._past:
        tokens = past.sum(axis=1) / K
        assert (tokens == tokens[0]).all() and tokens[0] > 12  # prompt and answer, every layer
    answer(engine, store, "another")
    assert len(store._past) == 2  # answers that count are not learnt from
    like, unlike = np.zeros((2, LAYERS, EXPERTS))
    like[:, 2] = unlike[:, 3] = 1
    store._past, store._now = [unlike, like], 2 * like
    store.begin_pass(1)
    assert store._nearest[1].argmax() == 2
    store.end_pass(0)
    store._nearest[:] = 0
    store._nearest[2, 6], store._nearest[3, 7] = 0.8, 0.9  # nearer counts for more
    store.table.settle(())
    for key in list(store.table.residents()):
        store.table.drop(key)
    assert store.ahead(1) == [(2, 6), (3, 7)] and store.ahead(3) == []


def test_the_hottest_experts_stay_and_no_other(run):
    engine, store = run(StaticSplit, "global-lru")
    texts = [answer(engine, store, counted=False), answer(engine, store)]
    pinned = set(store._pinned)
    assert len(pinned) == 16 - 2 * K and store.table.residents() == pinned
    uses = {divmod(i, EXPERTS): n for i, n in enumerate(store._uses.flatten().tolist())}
    before = engine.counters.copy()
    texts.append(answer(engine, store, "what is it?"))
    assert store.table.residents() == pinned == store._pinned
    found = engine.counters.since(before)
    assert found.loads == found.unique - found.unique_hits > 0
    least = min(uses[key] for key in pinned)
    assert all(n <= least + 24 for key, n in uses.items() if key not in pinned)
    assert texts[0] == texts[1] == answer(*run(HostDriven))


def test_sp_moe_forgets_by_the_moment_of_use(run):
    engine, store = run(SpMoe, "global-lru", slots=12)
    assert answer(engine, store) == answer(*run(HostDriven))
    moments = sorted(store.table.last_used.values())
    assert moments == sorted(set(moments))  # no two at once
    newest = sorted(store.table.last_used, key=store.table.last_used.get)[-K:]
    assert {layer for layer, _ in newest} == {LAYERS - 1}


def test_the_published_cutoff():
    profile = Profile(expert_copy_ms=2.0, draft_token_ms=3.0, target_layer_ms=0.5)
    assert policies.published_cutoff(profile, layers=32, drafts=4, critical=1, slots=64) == 6
    assert policies.published_cutoff(profile, layers=32, drafts=4, critical=2, slots=64) == 3
    assert policies.published_cutoff(profile, layers=32, drafts=4, critical=1, slots=5) == 5
    assert policies.published_cutoff(profile, layers=4, drafts=9, critical=1, slots=64) == 4
    assert policies.published_cutoff(profile, layers=4, drafts=0, critical=1, slots=64) == 1


@pytest.mark.parametrize("kind", [HostDriven, NextLayer, TraceMatch, StaticSplit, SpMoe])
def test_a_gpu_s_warm_up_comes_before_the_model_is_known(packs, kind):
    measured = type("Measured", (Engine,), {"make_store": kind, "captures": False})
    with measured.load(packs[0], device="cpu", slots=16, ctx_size=64) as engine:
        kv = engine.decoder.session.target_kv
        for rows in (1, 17, 33):
            kv.truncate(0)
            with torch.inference_mode():
                engine.decoder.target.forward([0] * rows, kv)
        engine.decoder.store.end()


class FakeEvent:
    clock = itertools.count(1)

    def __init__(self, enable_timing=False):
        self.at = 0

    def record(self, stream=None):
        self.at = next(self.clock)

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return float(other.at - self.at)


class FakeStream:
    def __init__(self, device=None, priority=0):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def synchronize(self):
        pass


@pytest.fixture
def no_gpu(monkeypatch):
    """What slabs take from torch.cuda; returns the calls that a GPU would have had."""
    calls = []
    compute = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: compute)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda clocks: calls.append(clocks))
    monkeypatch.setattr(policies, "bus_rate", lambda device: 2e9)

    def copy(address, source, size, stream):
        calls.append("copy")
        ctypes.memmove(address, source, size)

    monkeypatch.setattr(slab, "copy_bytes", copy)
    return calls


def test_after_each_copy_a_slower_bus_takes_the_rest_of_its_time(no_gpu):
    kind = type("Slab", (RecordedSlab, SlowDeviceSlab), {"rate": 1e9})
    made = kind(2, 4000, torch.device("cpu"))
    assert no_gpu == [policies.SLEEP] * 2  # a wait of one millisecond, by the fake clock
    no_gpu.clear()
    expert = np.random.default_rng(1).integers(0, 256, 4000, dtype=np.uint8)
    made.fill_from(1, expert.ctypes.data)
    assert (made.slots[1].numpy() == expert).all()
    assert no_gpu == ["copy", round(2e-6 * policies.SLEEP * 1e3)]  # 4 us less 2 us
    no_gpu.clear()
    # faster than the bus: nothing to wait for
    fast = type("Slab", (SlowDeviceSlab,), {"rate": 4e9})(2, 4000, torch.device("cpu"))
    no_gpu.clear()
    fast.fill_from(0, expert.ctypes.data)
    assert no_gpu == ["copy"]


def test_legacy_copies_have_the_device_to_themselves(no_gpu):
    made = type("Slab", (RecordedSlab, PageableSlab), {})(2, 4000, torch.device("cpu"))
    expert = np.random.default_rng(1).integers(0, 256, 4000, dtype=np.uint8)
    made.fill_from(0, expert.ctypes.data)
    assert no_gpu == ["synchronize", "copy", "synchronize"]
    assert (made.slots[0].numpy() == expert).all()


def test_copies_and_waits_are_noted_on_their_streams(no_gpu):
    made = type("Slab", (RecordedSlab, slab.DeviceSlab), {})(2, 4000, torch.device("cpu"))
    guess = [False]
    made.log = log = Log(torch.device("cuda"), lambda: guess[0])
    expert = np.zeros(4000, dtype=np.uint8)
    made.fill_from(0, expert.ctypes.data)
    guess[0] = True
    made.fill(1, lambda out, offset: None)
    made.wait_filled([0, 1])
    made.log = None
    made.fill_from(0, expert.ctypes.data)
    spans = log.spans()
    assert [span.kind for span in spans] == ["demand", "ahead", "wait"]
    assert all(0 < span.begin < span.end for span in spans)
