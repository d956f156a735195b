"""On a CUDA GPU: bits do not depend on placement, rows or drafting; streams are ordered; memory returns.

Needs a GPU and Triton; skipped elsewhere. The same laws on the CPU are in test_invariance.py.
"""

import gc
import threading

import pytest
import torch

from spmoe_lite import decoder, graphs
from spmoe_lite.config import SamplingParams
from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from spmoe_lite.loading import Loader
from spmoe_lite.slab import DeviceSlab, HostSlab
from tests import tiny
from tests.test_invariance import copy_all, disturb
from tests.test_model import our_logits

pytestmark = pytest.mark.gpu

PROMPT = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120]
TOKENS = [1, *(3 + i * 37 % 300 for i in range(79))]
DTYPES = ["bf16", "fp16", "fp32", "int4", "int8"]  # codes with bf16 beside them


def make_pair(folder, dtype, **options):
    """A target of 3 layers x 8 experts and a disturbed copy as its draft, in one precision."""
    shape = {"layers": 3, "experts": 8, "scale_head": 4.0, "hidden": 128, "intermediate": 192}
    shape |= options
    target = tiny.tiny_mixtral(folder / "t", **shape)
    noisy = tiny.tiny_mixtral(folder / "n", **shape)
    disturb(noisy, 0.1)
    how = {"experts": dtype, "dense": dtype}
    if dtype.startswith("int"):
        how["embed"] = "bf16"
    return {
        "target": convert(target, out=folder / "target.spmoe", **how).path,
        "noisy": convert(noisy, out=folder / "noisy.spmoe", **how).path,
        "dtype": dtype,
    }


@pytest.fixture(scope="module", params=DTYPES)
def packs(request, tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp(request.param), request.param)


def poison_slots(patch):
    """Whoever reads a slot before it is filled reads 255 everywhere: numbers that are none."""
    for slab in (DeviceSlab, HostSlab):
        allocate = slab.__init__

        def poisoned(slab, *arguments, allocate=allocate):
            allocate(slab, *arguments)
            slab.slots.fill_(255)

        patch.setattr(slab, "__init__", poisoned)


def slow_captured(patch, what, cycles=400_000):
    """Captured steps whose "copies" ahead dawdle, or whose "passes" begin late, each of them."""
    copy, replay = graphs.fetch, torch.cuda.CUDAGraph.replay

    def slow_copy(*arguments):
        torch.cuda._sleep(cycles)
        copy(*arguments)

    def slow_replay(graph):
        torch.cuda._sleep(cycles)
        replay(graph)

    if what == "copies":
        patch.setattr(graphs, "fetch", slow_copy)
    if what == "passes":
        patch.setattr(torch.cuda.CUDAGraph, "replay", slow_replay)


def slow_driven(engine, what, cycles=300_000):
    """Steps driven by the host whose "kernels" or "copies" dawdle, each of them."""
    store, slab = engine.decoder.store, engine.decoder.store._slab
    lend, send = store._lend, slab._send

    def slow_lend(layer, experts):
        use = lend(layer, experts)
        torch.cuda._sleep(cycles)
        return use

    def slow_send(*arguments):
        with torch.cuda.stream(slab._stream):
            torch.cuda._sleep(cycles)
        send(*arguments)

    if what == "kernels":
        store._lend = slow_lend
    if what == "copies":
        slab._send = slow_send


DRAWS = [
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2},
]


def logits(pack, chunk, **options):
    with Engine.load(pack, device="cuda", **options) as engine, torch.inference_mode():
        target, kv, rows = engine.decoder.target, engine.decoder.session.target_kv, []
        for start in range(0, len(TOKENS), chunk):
            part = TOKENS[start : start + chunk]
            rows.append(target.forward(part, kv, logits_rows=len(part)))
            engine.decoder.store.end_pass(len(part))
        return torch.cat(rows).float().cpu()


def write(packs, draft=True, length=120, sampling=None, **options):
    draft = packs["noisy"] if draft else None
    with Engine.load(packs["target"], draft, device="cuda", **options) as engine:
        return engine.generate(PROMPT, max_tokens=length, sampling=sampling).result


def test_logits_are_near_the_cpu_s(packs):
    ours = our_logits(packs["target"], TOKENS)
    got = logits(packs["target"], 80)
    bound = {"fp32": 1e-4, "fp16": 0.02}.get(packs["dtype"], 0.1) * float(ours.abs().max())
    apart = (got - ours).abs().amax(dim=1)
    # Of two experts that are as good as each other either may be chosen, in a row or two of 80.
    assert apart.median() < bound / 2 and (apart < bound).float().mean() > 0.9


@pytest.mark.parametrize("chunk", [1, 5, 16, 80])
def test_bits_do_not_depend_on_slots(packs, chunk):
    expected = logits(packs["target"], chunk, slots=24)
    for slots in (2, 3, 6, 13):
        assert torch.equal(logits(packs["target"], chunk, slots=slots), expected)


def test_bits_do_not_depend_on_the_rows_of_a_pass(packs):
    expected = logits(packs["target"], 1)
    for chunk in (2, 5, 9, 16, 32):
        assert torch.equal(logits(packs["target"], chunk), expected), f"{chunk} rows"


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_text_does_not_depend_on_drafting_slots_or_prefetching(packs, temperature):
    params = SamplingParams(temperature=temperature, seed=1)
    expected = write(packs, draft=False, sampling=params)
    for options in (
        {"draft_tokens": 1},
        {"draft_tokens": 4, "slots": 2},
        {"draft_tokens": 4, "slots": 9, "cutoff": 3},
        {"draft_tokens": 8, "slots": 6, "cutoff": 3, "policy": "global-lru"},
        {"draft_tokens": 15, "slots": 12, "prefetch": False},
    ):
        got = write(packs, sampling=params, **options)
        assert got.token_ids == expected.token_ids, options


def test_neither_bits_nor_text_over_int8_caches_depend_on_rows_or_drafting(packs):
    expected = logits(packs["target"], 1, kv_type="int8")
    for chunk in (2, 5, 32):
        assert torch.equal(logits(packs["target"], chunk, kv_type="int8"), expected), (
            f"{chunk} rows"
        )
    plain = write(packs, draft=False, kv_type="int8")
    for options in (
        {"draft_tokens": 4, "slots": 9},
        {"draft_tokens": 8, "slots": 6, "pin": "none"},
    ):
        got = write(packs, kv_type="int8", **options)
        assert got.token_ids == plain.token_ids, options


def test_kind_h_o22_slow_kernels_slow_copies_and_poisoned_slots(packs, monkeypatch):
    """400 tokens with the least slots, a spinning compute stream and copies that dawdle."""
    expected = write(packs, draft=False, length=400)
    poison_slots(monkeypatch)
    for slow in (["kernels"], ["copies"], ["kernels", "copies"]):
        with Engine.load(
            packs["target"], packs["noisy"], device="cuda", slots=6, cutoff=3, pin="none"
        ) as engine:
            assert engine.decoder.graphs is None and engine.decoder.drafts is not None
            for what in slow:
                slow_driven(engine, what)
            got = engine.generate(PROMPT, max_tokens=400).result
        assert got.token_ids == expected.token_ids, slow


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_captured_drafts_are_the_draft_s_own(packs, temperature, monkeypatch):
    """Over two turns, the target driven by the host: text, what was proposed, what was predicted."""
    params, found = SamplingParams(temperature=temperature, seed=2), []
    copy_all(monkeypatch)
    for captured in (True, False):
        with monkeypatch.context() as patch:
            if not captured:
                patch.setattr(Loader, "_capture_drafts", lambda *_: None)
            how = {"slots": 9, "cutoff": 3, "pin": "none", "device": "cuda"}
            with Engine.load(packs["target"], packs["noisy"], **how) as engine:
                assert (engine.decoder.drafts is not None) == captured
                text = engine.generate(PROMPT, max_tokens=60, sampling=params).result.token_ids
                more = [*PROMPT, *text, 5, 6, 7]
                text += engine.generate(more, max_tokens=60, sampling=params).result.token_ids
                c = engine.counters
                assert c.prefetches > 0
                found.append((text, c.drafted, c.accepted, c.predictions, c.predicted_used))
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("slots", [6, 9, 18, 24])
def test_kind_h_o22_captured_steps_with_late_copies_and_poisoned_slots(
    packs, slots, temperature, monkeypatch
):
    """The device decides: copies that dawdle, and verify passes that start at once or late."""
    params = SamplingParams(temperature=temperature, seed=3)
    expected = write(packs, draft=False, length=200, pin="none", sampling=params)
    poison_slots(monkeypatch)
    for slow in ("nothing", "copies", "passes"):
        with monkeypatch.context() as patch:
            slow_captured(patch, slow)
            with Engine.load(
                packs["target"], packs["noisy"], device="cuda", slots=slots, cutoff=3
            ) as engine:
                assert engine.decoder.graphs is not None, engine.notices
                got = engine.generate(PROMPT, max_tokens=200, sampling=params).result
                assert got.token_ids == expected.token_ids, slow
                counters = engine.counters
                if 6 < slots < 24 and slow == "nothing":
                    assert counters.prefetches > 0 and counters.prefetch_useful > 0
                # A second answer: slots go to the host and back.
                again = engine.generate(PROMPT[:7], max_tokens=40, sampling=params).result
                assert (
                    again.token_ids
                    == engine.generate(PROMPT[:7], max_tokens=40, sampling=params).result.token_ids
                )


@pytest.mark.parametrize("slots", [9, 24])
@pytest.mark.parametrize("drafts", [0, 4])
def test_tokens_drawn_by_the_device_are_the_hosts(packs, slots, drafts):
    """New filters, known ones, other seeds; steps enqueued ahead; penalties, which the host sees to."""
    turns = [
        (SamplingParams(seed=seed, **one), prompt)
        for seed, one in enumerate([*DRAWS, {"temperature": 0.0}, *DRAWS[::-1]])
        for prompt in (PROMPT, PROMPT[:7])
    ]
    texts = []
    for how in ({"pin": "none", "slots": 9}, {"slots": slots}):
        with Engine.load(
            packs["target"], packs["noisy"], device="cuda", draft_tokens=drafts, **how
        ) as engine:
            assert (engine.decoder.graphs is None) == ("pin" in how)
            texts.append(
                [
                    engine.generate(prompt, max_tokens=60, sampling=one).result.token_ids
                    for one, prompt in turns
                ]
            )
    assert texts[0] == texts[1] and len(set(texts[0])) > 12


def test_kind_l_o37_another_thread_may_generate(packs):
    expected = write(packs, length=20)
    got = []
    with Engine.load(packs["target"], packs["noisy"], device="cuda") as engine:
        thread = threading.Thread(
            target=lambda: got.append(engine.generate(PROMPT, max_tokens=20).result.token_ids)
        )
        thread.start()
        thread.join()
    assert got == [expected.token_ids]


@pytest.mark.alone
def test_kind_l_o36_close_gives_the_device_back(packs):
    sizes = []
    for _ in range(4):
        with Engine.load(packs["target"], packs["noisy"], device="cuda", slots=9) as engine:
            engine.generate(PROMPT, max_tokens=10).result
            assert torch.cuda.memory_allocated() > 0
        gc.collect()
        sizes.append((torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]))
    assert sizes[1:] == [sizes[1]] * 3


@pytest.mark.parametrize("slots", [9, 24])
@pytest.mark.parametrize("drafts", [0, 4])
def test_steps_enqueued_ahead_change_no_token_and_no_recency(packs, slots, drafts, monkeypatch):
    """Plain and drafted steps, with the host in front of the GPU and behind it; an end inside a block."""
    whole = write(packs, draft=False, length=150, pin="none").token_ids
    ends = [i for i, token in enumerate(whole[:120]) if token not in whole[:i]]
    end, found = max(ends), []  # where one more step would have room
    for limit, slow in ((0.0, "nothing"), (1e9, "nothing"), (1e9, "passes")):
        monkeypatch.setattr(decoder, "AHEAD_MS", limit)
        with monkeypatch.context() as patch:
            slow_captured(patch, slow)
            draft = packs["noisy"] if drafts else None
            with Engine.load(
                packs["target"], draft, device="cuda", slots=slots, draft_tokens=drafts, cutoff=2
            ) as engine:
                graphs_ = engine.decoder.graphs
                assert engine.generate(PROMPT, max_tokens=150).result.token_ids == whole
                engine.eos_ids = frozenset([whole[end]])
                first = engine.generate(PROMPT, max_tokens=150).result
                assert first.finish_reason == "stop" and (limit == 0) == (graphs_.ahead is None)
                begun = list(first.token_ids)
                engine.eos_ids = frozenset()
                rest = engine.generate(PROMPT + begun, max_tokens=150 - len(begun)).result
                assert tuple(begun) + rest.token_ids == whole
                c, last_used = engine.counters, engine.decoder.store.table.last_used
                found.append((c.drafted, c.accepted, c.steps, c.tokens, last_used.copy()))
    assert found[0] == found[1] == found[2]
