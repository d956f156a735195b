"""Other systems' policies: what each copies ahead, keeps and forgets, over a tiny pack on the CPU."""

import numpy as np
import pytest
import torch

from spmoe_lite import Engine, policies
from spmoe_lite.cutoff import Profile
from spmoe_lite.policies import HostDriven, NextLayer, SpMoe, StaticSplit, TraceMatch
from spmoe_lite.synthetic import Pair, write_pair

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
