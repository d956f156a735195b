"""What must not change a token or a bit: slots, eviction, prefetching, cutoff, drafting, chunks, cancel.

All on the CPU backend in fp32. Logits are compared bit for bit across placement; text across drafting.
"""

import threading

import pytest
import torch

from spmoe_lite.config import SamplingParams
from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError
from spmoe_lite.prefetch import Prefetcher
from tests import tiny

PROMPT = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120]
LENGTH = 60


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A target of 3 layers x 8 experts, a poor draft that fits its shape, and its own twin."""
    folder = tmp_path_factory.mktemp("packs")
    shape = {"layers": 3, "scale_head": 4.0}
    target = tiny.tiny_mixtral(folder / "t", experts=8, **shape)
    noisy = tiny.tiny_mixtral(folder / "n", experts=8, **shape)
    disturb(noisy, 0.12)
    return {
        "target": convert(target, out=folder / "target.spmoe").path,
        "twin": convert(target, out=folder / "twin.spmoe").path,
        "noisy": convert(noisy, out=folder / "noisy.spmoe").path,
        "other": tiny.tiny_pack(folder / "o", kind="mistral", layers=3),
        "shallow": tiny.tiny_pack(folder / "s", kind="mistral", layers=1),
    }


def disturb(folder, noise):
    """Add relative noise to every matrix, so that a copy of the target becomes an imperfect draft."""
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(7)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name, t in tensors.items():
            if t.dim() > 1:
                t += noise * t.std() * torch.randn(t.shape, generator=generator)
            tensors[name] = t.contiguous()
        save_file(tensors, file, metadata={"format": "pt"})


def write(pack, prompt=PROMPT, *, draft=None, max_tokens=LENGTH, sampling=None, stop=(), **options):
    with Engine.load(pack, draft, device="cpu", **options) as engine:
        return engine.generate(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop).result


def logits(pack, tokens, *, chunk, **options):
    """Logits of every token, fed in passes of `chunk` rows; also what was copied."""
    with Engine.load(pack, device="cpu", **options) as engine, torch.inference_mode():
        decoder, kv, rows = engine.decoder, engine.decoder.session.target_kv, []
        for start in range(0, len(tokens), chunk):
            part = tokens[start : start + chunk]
            rows.append(decoder.target.forward(part, kv, logits_rows=len(part)))
            decoder.store.end_pass(len(part))
        return torch.cat(rows).clone(), engine.counters.copy()


TOKENS = [1, *(3 + i * 37 % 300 for i in range(79))]


@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("policy", ["layer-lru", "global-lru"])
def test_kind_i_o23_logit_bits_do_not_depend_on_slots_or_policy(packs, chunk, policy):
    expected, all_resident = logits(packs["target"], TOKENS, chunk=chunk, slots=24)
    assert all_resident.loads <= 24
    for slots in (2, 3, 5, 6, 12, 23):
        got, counters = logits(packs["target"], TOKENS, chunk=chunk, slots=slots, policy=policy)
        assert torch.equal(got, expected), f"{slots} slots"
        passes = -(-len(TOKENS) // chunk)
        assert counters.loads <= 24 * passes  # at most once per layer and pass
        if slots == 2:
            assert counters.loads > 24  # experts really came and went


@pytest.fixture(scope="module")
def quantised(packs, tmp_path_factory):
    """The target with int4 experts, all else fp32; and with int8 matrices and embeddings as well."""
    folder = tmp_path_factory.mktemp("quantised")
    source = packs["target"].parent / "t"
    experts = {"experts": "int4", "group": 32}
    return {
        "experts": convert(source, out=folder / "e.spmoe", **experts).path,
        "all": convert(source, out=folder / "a.spmoe", dense="int8", embed="int8", **experts).path,
    }


@pytest.mark.parametrize("kind", ["experts", "all"])
@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_kind_i_o23_logit_bits_of_int4_experts_do_not_depend_on_slots(quantised, kind, chunk):
    expected, _ = logits(quantised[kind], TOKENS, chunk=chunk, slots=24)
    for slots, policy in ((2, "layer-lru"), (5, "global-lru"), (12, "layer-lru")):
        got, counters = logits(quantised[kind], TOKENS, chunk=chunk, slots=slots, policy=policy)
        assert torch.equal(got, expected), f"{slots} slots"
        assert counters.loads > 24 or slots > 2


@pytest.mark.parametrize("kind", ["experts", "all"])
def test_kind_g_o16_text_of_int4_experts_is_the_same_with_draft_and_prefetching(
    packs, quantised, kind
):
    plain = write(quantised[kind], max_tokens=40)
    for how in (
        {"slots": 6, "draft_tokens": 4},
        {"slots": 2, "draft_tokens": 8, "cutoff": 3},
        {"slots": 9, "draft_tokens": 1, "prefetch": False},
    ):
        for draft in (packs["noisy"], quantised["experts"], quantised["all"]):
            got = write(quantised[kind], draft=draft, max_tokens=40, **how)
            assert got.token_ids == plain.token_ids, (draft.name, how)
    assert plain.token_ids != write(packs["target"], max_tokens=40).token_ids


def test_kind_i_o23_prefill_spares_what_decoding_gathered(packs):
    """A long prompt uses every expert of a layer; the hot ones survive it."""
    with Engine.load(packs["target"], device="cpu", slots=15) as engine, torch.inference_mode():
        decoder, table = engine.decoder, engine.decoder.store.table
        engine.generate(PROMPT, max_tokens=40).result
        before, age = table.residents(), dict(table.last_used)
        kv = decoder.session.target_kv
        kv.truncate(0)
        decoder.target.forward(TOKENS, kv)
        used = {(layer, e) for layer, rows in decoder.store.trace.items() for r in rows for e in r}
        assert len(used) > len(before)  # it had to page
        for layer in range(3):
            mine = [key for key in before if key[0] == layer]
            hot = sorted(mine, key=lambda key: (age[key], key))[-3:]
            assert set(hot) <= table.residents()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_kind_i_o23_any_number_of_experts_a_token_in_two_and_three_slots(tmp_path, k):
    hf = tiny.tiny_mixtral(tmp_path / "t", experts=4, top_k=k, scale_head=4.0)
    pack = convert(hf, out=tmp_path / "t.spmoe").path
    draft = tiny.tiny_pack(tmp_path / "d", kind="mistral", layers=2)
    expected = write(pack, max_tokens=12).token_ids
    for slots, policy, draft_tokens in ((2, "layer-lru", 31), (3, "global-lru", 1)):
        how = {"slots": slots, "policy": policy, "draft_tokens": draft_tokens, "cutoff": 2}
        assert write(pack, draft=draft, max_tokens=12, **how).token_ids == expected


@pytest.mark.parametrize("slots", [1, 0, -3])
def test_kind_i_o23_fewer_slots_than_the_minimum_are_refused(packs, slots):
    with pytest.raises(CapacityError, match=r"at least 2"):
        Engine.load(packs["target"], device="cpu", slots=slots)


@pytest.fixture(scope="module")
def plain(packs):
    return write(packs["target"])


@pytest.mark.parametrize("draft", ["twin", "noisy", "other", "shallow"])
@pytest.mark.parametrize("draft_tokens", [1, 2, 4, 8])
def test_kind_g_o16_greedy_text_is_the_same_with_any_draft(packs, plain, draft, draft_tokens):
    got = write(packs["target"], draft=packs[draft], draft_tokens=draft_tokens, slots=9)
    assert got.token_ids == plain.token_ids
    acceptance = got.stats.acceptance
    if draft == "twin":
        assert acceptance > 0.95
    if draft == "noisy":
        assert 0.05 < acceptance < 0.99  # rejections and acceptances both happened


@pytest.fixture(scope="module")
def plain_int8(packs):
    return write(packs["target"], kv_type="int8")


@pytest.mark.parametrize("draft, draft_tokens", [("twin", 8), ("noisy", 1), ("noisy", 4)])
def test_kind_g_o16_text_over_int8_caches_is_the_same_with_any_draft(
    packs, plain_int8, draft, draft_tokens
):
    how = {"draft_tokens": draft_tokens, "slots": 9, "kv_type": "int8"}
    got = write(packs["target"], draft=packs[draft], **how)
    assert got.token_ids == plain_int8.token_ids
    assert 0.05 < got.stats.acceptance < 1 or draft == "twin"


@pytest.mark.parametrize("chunk", [1, 3, 512])
def test_prefill_chunk_does_not_change_text_over_int8_caches(packs, plain_int8, monkeypatch, chunk):
    from spmoe_lite import decoder

    monkeypatch.setattr(decoder, "PREFILL_CHUNK", chunk)
    assert write(packs["target"], kv_type="int8", slots=3).token_ids == plain_int8.token_ids


def test_kind_i_o23_logit_bits_over_int8_caches_do_not_depend_on_slots(packs):
    """And they are near those over caches in float, but not the same."""
    expected, _ = logits(packs["target"], TOKENS, chunk=5, kv_type="int8", slots=24)
    got, _ = logits(packs["target"], TOKENS, chunk=5, kv_type="int8", slots=3)
    assert torch.equal(got, expected)
    exact, _ = logits(packs["target"], TOKENS, chunk=5)
    assert 1e-4 < (got - exact).norm() / exact.norm() < 0.02


@pytest.mark.parametrize("sampling", [{"temperature": 0.9}, {"temperature": 1.3, "top_p": 0.9}])
def test_kind_g_o20_sampled_text_is_the_same_with_any_draft(packs, sampling):
    params = SamplingParams(seed=5, **sampling)
    expected = write(packs["target"], sampling=params)
    for draft in ("twin", "noisy", "other"):
        got = write(packs["target"], draft=packs[draft], sampling=params, slots=7)
        assert got.token_ids == expected.token_ids, draft
    other = write(packs["target"], sampling=SamplingParams(seed=6, **sampling))
    assert other.token_ids != expected.token_ids


@pytest.mark.parametrize(
    "penalty",
    [{"repetition_penalty": 1.3}, {"presence_penalty": 1.5}, {"frequency_penalty": 0.7}],
)
def test_kind_g_o20_penalties_count_every_token_once_with_a_draft(packs, plain, penalty):
    params = SamplingParams(**penalty)
    expected = write(packs["target"], sampling=params)
    assert expected.token_ids != plain.token_ids
    for draft in ("twin", "noisy"):
        got = write(packs["target"], draft=packs[draft], sampling=params)
        assert got.token_ids == expected.token_ids


class AllCopied:
    """A prediction that the prefetch worker comes to when it has made every copy before it."""

    layer = row = 0

    def __init__(self):
        self.arrived, self._reached = self, threading.Event()

    def query(self):
        return False

    def wait(self):
        self._reached.set()
        return []

    def reached(self):
        assert self._reached.wait(60)


def copy_all(patch):
    """Drafting ends when what it predicted has been copied, however busy this machine is."""
    end = Prefetcher.end_drafting

    def patiently(prefetcher):
        mark = AllCopied()
        prefetcher._queue.put((prefetcher._step, mark))
        mark.reached()
        end(prefetcher)

    patch.setattr(Prefetcher, "end_drafting", patiently)


@pytest.mark.parametrize("slots", [2, 6, 9, 24])
def test_prefetching_and_cutoff_never_change_text_or_acceptance(packs, plain, slots, monkeypatch):
    """Acceptance that moves with a cache setting would be a race (PAPERS 3.5)."""
    if slots == 9:
        copy_all(monkeypatch)
    how = {"draft": packs["noisy"], "slots": slots}
    off = write(packs["target"], prefetch=False, **how)
    assert off.token_ids == plain.token_ids
    for cutoff in (0, 1, 3):
        on = write(packs["target"], prefetch=True, cutoff=cutoff, **how)
        c, expected = on.stats.counters, off.stats.counters
        assert on.token_ids == plain.token_ids
        assert (c.drafted, c.accepted) == (expected.drafted, expected.accepted)
        if cutoff == 3 and slots == 9:
            assert c.prefetches > 0 and c.prefetch_useful + c.prefetch_late > 0


@pytest.mark.parametrize("draft", ["twin", "noisy"])
def test_kind_i_o24_prefetch_counters_add_up(packs, draft):
    c = write(packs["target"], draft=packs[draft], slots=9, cutoff=3).stats.counters
    settled = c.prefetch_useful + c.prefetch_late + c.prefetch_wasted
    assert settled <= c.prefetches <= settled + 9  # the rest still waits in its slot
    stride = 131072
    assert c.bytes_moved == (c.loads + c.prefetches) * stride
    assert c.access_hits <= c.accesses
    assert c.unique_hits <= c.unique <= c.accesses
    if draft == "twin":  # its states are the target's: what it names is what is used
        assert c.predicted_used == c.predicted
        assert c.would_miss_predicted == c.would_miss


def test_kind_i_o24_prefetching_pauses_when_its_guesses_are_wrong(
    packs, plain, monkeypatch, caplog
):
    from spmoe_lite import prefetch
    from spmoe_lite.predictor import ExpertPredictor, Prediction

    def wrong(self, layer, row, state):
        return Prediction(layer, row, torch.tensor([[row % 8, (row + layer) % 8]]), None)

    copy_all(monkeypatch)
    monkeypatch.setattr(ExpertPredictor, "predict", wrong)
    monkeypatch.setattr(prefetch, "JUDGED_COPIES", 8)
    monkeypatch.setattr(prefetch, "LEAST_USEFUL", 0.9)
    caplog.set_level("INFO", logger="spmoe_lite")
    got = write(packs["target"], draft=packs["noisy"], slots=9, cutoff=3)
    assert got.token_ids == plain.token_ids
    assert "prefetching pauses" in caplog.text


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
def test_prefill_chunk_does_not_change_text(packs, plain, monkeypatch, chunk):
    from spmoe_lite import decoder

    monkeypatch.setattr(decoder, "PREFILL_CHUNK", chunk)
    got = write(packs["target"], draft=packs["noisy"], slots=6)
    assert got.token_ids == plain.token_ids


def test_teacher_forced_logits_agree_to_rounding_whatever_the_chunk(packs):
    one, _ = logits(packs["target"], TOKENS, chunk=1)
    for chunk in (2, 5, 9, 80):
        got, _ = logits(packs["target"], TOKENS, chunk=chunk)
        assert (got - one).abs().max() < 1e-4


@pytest.mark.parametrize("after", [1, 2, 5, 9])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cancel_and_resume_give_the_same_text(packs, after, temperature):
    params = SamplingParams(temperature=temperature, seed=3)
    whole = write(packs["target"], sampling=params).token_ids
    with Engine.load(packs["target"], packs["noisy"], device="cpu", slots=6) as engine:
        first = engine.generate(PROMPT, max_tokens=LENGTH, sampling=params)
        for _ in range(after):
            next(first)
        first.cancel()
        assert first.result.finish_reason == "cancelled"
        begun = list(first.result.token_ids)
        assert tuple(begun) == whole[: len(begun)]
        assert after <= len(begun) < LENGTH
        rest = engine.generate(
            PROMPT + begun, max_tokens=LENGTH - len(begun), sampling=params
        ).result
        assert tuple(begun) + rest.token_ids == whole


def test_kind_e_o19_an_end_token_inside_an_accepted_block(packs, plain):
    """Wherever in the block it falls: text, cache, counts and the next turn equal the plain run."""
    for position in range(2, 8):
        end = plain.token_ids[position]
        if end in plain.token_ids[:position]:
            continue
        runs = []
        for draft, k in ((None, 0), (packs["twin"], 4)):
            with Engine.load(packs["target"], draft, device="cpu", draft_tokens=k) as engine:
                engine.eos_ids = frozenset([end])
                first = engine.generate(PROMPT, max_tokens=LENGTH).result
                kv = engine.decoder.session.target_kv.length
                second = engine.generate([*PROMPT, *first.token_ids, 9], max_tokens=12).result
                runs.append((first.token_ids, first.finish_reason, kv, second.token_ids))
                assert first.token_ids == plain.token_ids[: position + 1]
                assert kv == len(PROMPT) + position
        assert runs[0] == runs[1]
    assert runs[0][1] == "stop"


def test_kind_f_o18_a_draft_with_a_shorter_context_is_switched_off_with_one_notice(
    packs, tmp_path, caplog
):
    short = tiny.tiny_pack(tmp_path, kind="mistral", layers=3, context=32)
    how = {"device": "cpu", "ctx_size": 128}
    with (
        Engine.load(packs["target"], **how) as plain,
        Engine.load(packs["target"], short, draft_tokens=5, **how) as engine,
    ):
        for length in (20, 30, 31, 32, 33, 100):
            prompt = [1, *(3 + i * 11 % 300 for i in range(length - 1))]
            expected = plain.generate(prompt, max_tokens=20).result
            assert engine.generate(prompt, max_tokens=20).result.token_ids == expected.token_ids
        expected, got = plain.generate(PROMPT).result, engine.generate(PROMPT).result
        assert got.token_ids == expected.token_ids
        assert len(PROMPT) + len(got.token_ids) == 128
        assert got.finish_reason == "context"
    assert len([r for r in caplog.records if "draft's context" in r.message]) == 1


def test_kind_f_o21_the_end_of_the_context(packs):
    prompt = [1, *(3 + i * 11 % 300 for i in range(62))]
    with Engine.load(
        packs["target"], packs["twin"], device="cpu", ctx_size=64, draft_tokens=8
    ) as e:
        assert e.generate(prompt).result.finish_reason == "context"
        for length in (64, 65, 100):
            with pytest.raises(CapacityError, match=rf"{length} tokens, the context 64"):
                e.generate([1] * length)
        got = e.generate(PROMPT, max_tokens=100).result
        assert got.finish_reason == "context"
        assert len(PROMPT) + got.completion_tokens == 64
        assert got.stats.acceptance > 0.95  # the draft starts afresh with each request
        expected = write(packs["target"], ctx_size=64, max_tokens=100)
        assert got.token_ids == expected.token_ids


@pytest.mark.parametrize("window", ["target", "draft"])
def test_kind_f_o17_rollback_at_every_offset_of_a_sliding_window(tmp_path, window):
    shape = {"layers": 2, "scale_head": 4.0}
    target = tiny.tiny_mixtral(
        tmp_path / "t", sliding_window=16 if window == "target" else None, **shape
    )
    draft = tiny.tiny_mixtral(
        tmp_path / "d", sliding_window=16 if window == "draft" else None, **shape
    )
    disturb(draft, 0.15)
    target = convert(target, out=tmp_path / "t.spmoe").path
    draft = convert(draft, out=tmp_path / "d.spmoe").path
    offsets = set()
    with (
        Engine.load(target, device="cpu") as plain,
        Engine.load(target, draft, device="cpu", draft_tokens=4) as engine,
    ):
        decoder, size = engine.decoder, engine.decoder.session.target_kv.nbytes
        commit = decoder.commit

        def note(step, count):
            if step.verdict.num_accepted < step.num_drafted:
                offsets.add(decoder.session.target_kv.length % 16)
            commit(step, count)

        decoder.commit = note
        for start in range(16):  # prompts of every length mod 16, so that every offset is met
            prompt = [1] * start + PROMPT
            expected = plain.generate(prompt, max_tokens=40).result
            assert engine.generate(prompt, max_tokens=40).result.token_ids == expected.token_ids
        assert decoder.session.target_kv.nbytes == size
    assert offsets == set(range(16))


def test_prefix_of_the_last_conversation_is_not_computed_again(packs):
    with Engine.load(packs["target"], packs["noisy"], device="cpu") as engine:
        first = engine.generate(PROMPT, max_tokens=20).result
        longer = [*PROMPT, *first.token_ids, 7, 8, 9]
        assert engine.decoder.session.start(longer) == len(PROMPT) + 19
        second = engine.generate(longer, max_tokens=20).result
    assert second.token_ids == write(packs["target"], longer, max_tokens=20).token_ids


def test_experts_of_rejected_positions_get_no_credit(packs):
    with Engine.load(packs["target"], packs["other"], device="cpu", slots=9) as engine:
        store, used, accepted = engine.decoder.store, {}, []
        real = store.end_pass

        def end_pass(count):  # as it is defined, row by row
            for row in range(count):
                accepted.append(row)
                for layer, rows in store.trace.items():
                    used.update(((layer, expert), len(accepted)) for expert in rows[row])
            real(count)

        store.end_pass = end_pass
        got = engine.generate(PROMPT, max_tokens=30).result
        assert got.stats.acceptance < 0.2
        # the newest token is in no cache
        assert len(accepted) == len(PROMPT) + got.completion_tokens - 1 == store.position
        assert store.table.last_used == used


def test_two_engines_live_side_by_side(packs, plain):
    with (
        Engine.load(packs["target"], device="cpu", slots=6) as a,
        Engine.load(packs["target"], packs["noisy"], device="cpu", slots=9) as b,
    ):
        one, two = a.generate(PROMPT, max_tokens=LENGTH), b.generate(PROMPT, max_tokens=LENGTH)
        results = []
        threads = [
            threading.Thread(target=lambda g=g: results.append(g.result.token_ids))
            for g in (one, two)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == [plain.token_ids] * 2


def test_an_adapting_draft_length_changes_no_token(packs, plain, monkeypatch):
    """Phases so short that it goes back and forth within one answer."""
    from spmoe_lite import drafting

    for name, steps in {"DRAFT": 2, "PLAIN": 1, "HOLD": 3, "PAUSE": 3}.items():
        monkeypatch.setattr(drafting, f"{name}_STEPS", steps)
    for draft in ("twin", "noisy", "other"):
        got = write(packs["target"], draft=packs[draft], slots=9, draft_tokens="auto")
        assert got.token_ids == plain.token_ids
        assert got.stats.counters.steps > 8
        assert got.stats.counters.drafted > 0
