"""The law of the sampler, its filters against plain definitions, and what the noise depends on."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from spmoe_lite import sampling
from spmoe_lite.config import SamplingParams
from spmoe_lite.errors import SpmoeError
from spmoe_lite.sampling import Sampler, probabilities
from spmoe_lite.verifier import verify

V = 12


def sampler(prompt_length=0, num_tokens=V, **params):
    return Sampler(SamplingParams(**params), num_tokens, prompt_length)


def logits(seed, rows=1, spread=2.0):
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square_ok(counts, law, bound=4.5):
    """counts against probabilities; the statistic in standard deviations of its own law."""
    n, used = counts.sum(), law > 0
    assert counts[~used].sum() == 0
    statistic = ((counts[used] - n * law[used]) ** 2 / (n * law[used])).sum()
    freedom = used.sum() - 1
    return abs(statistic - freedom) / math.sqrt(2 * freedom) < bound


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("params", FILTERS)
def test_draws_follow_the_law(params):
    row = logits(1)[0]
    law = probabilities(row, SamplingParams(**params)).numpy()
    s = sampler(**params, seed=3)
    draws = [s.pick_row(row, range(position)) for position in range(4000)]
    assert chi_square_ok(np.bincount(draws, minlength=V), law)


@pytest.mark.parametrize(
    "params, draft_seed", [(params, 2) for params in FILTERS] + [(FILTERS[0], 1), (FILTERS[4], 1)]
)
def test_kind_g_o16_verified_tokens_follow_the_target_law_whatever_the_draft(params, draft_seed):
    """Every token of every verdict is a draw of the target's law at its own position."""
    target = logits(1, rows=3)
    draft = target[:2] if draft_seed == 1 else logits(draft_seed, rows=2)
    counts = np.zeros((3, V))
    seen_first = accepted = 0
    for seed in range(2000):
        s = sampler(**params, seed=seed)
        proposal, context = [], [0] * 5
        for row in draft:
            proposal.append(s.pick_row(row, context + proposal))
        verdict = verify(proposal, target, s, context)
        for i, token in enumerate(verdict.tokens):
            counts[i, token] += 1
        seen_first += 1
        accepted += verdict.num_accepted > 0
        assert verdict.tokens[: verdict.num_accepted] == proposal[: verdict.num_accepted]
    law = probabilities(target[0], SamplingParams(**params)).numpy()
    assert chi_square_ok(counts[0], law)
    # later rows are reached only after agreement, which is independent noise: the law holds there too
    for i in (1, 2) if draft_seed == 1 else ():
        law = probabilities(target[i], SamplingParams(**params)).numpy()
        assert chi_square_ok(counts[i], law)
    assert (accepted == seen_first) == (draft_seed == 1)


def test_common_noise_accepts_at_least_the_coupling_bound():
    """P(agree) >= (1 - TV) / (1 + TV): Daliri et al., arXiv 2408.07978."""
    params = SamplingParams(temperature=1.0)
    p_row, q_row = logits(1)[0], logits(1)[0] + 0.3 * logits(5)[0]
    p, q = probabilities(p_row, params), probabilities(q_row, params)
    distance = float((p - q).abs().sum() / 2)
    agreed = 0
    for position in range(3000):
        s = sampler(temperature=1.0)
        context = range(position)
        agreed += s.pick_row(p_row, context) == s.pick_row(q_row, context)
    bound = (1 - distance) / (1 + distance)
    assert agreed / 3000 > bound - 3 * math.sqrt(bound * (1 - bound) / 3000)


def test_noise_is_keyed_by_seed_and_position_alone():
    row = logits(2)[0]
    a, b = sampler(temperature=1.0, seed=1), sampler(temperature=1.0, seed=1)
    first = [a.pick_row(row, range(i)) for i in range(50)]
    assert [b.pick_row(row, range(i)) for i in reversed(range(50))] == first[::-1]
    other = sampler(temperature=1.0, seed=2)
    assert [other.pick_row(row, range(i)) for i in range(50)] != first


@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(0, V + 3),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
@settings(max_examples=200, deadline=None)
def test_filters_keep_what_their_definitions_say(seed, top_k, top_p, min_p):
    row = logits(seed)[0]
    params = SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)
    got = probabilities(row, params)
    p = (row / 0.7).softmax(0)
    order = p.argsort(descending=True)
    keep = set(order[: top_k or V].tolist())
    renormalized = torch.where(torch.tensor([i in keep for i in range(V)]), p, 0.0)
    renormalized = renormalized / renormalized.sum()
    total, nucleus = 0.0, set()
    for i in order.tolist():
        if i in keep and total < top_p:
            nucleus.add(i)
            total += float(renormalized[i])
    best = float(p.max())
    expected = {i for i in nucleus if float(p[i]) >= min_p * best}
    borderline = {
        i
        for i in range(V)
        if abs(float(p[i]) - min_p * best) < 1e-6
        or abs(total - float(renormalized[i]) - top_p) < 1e-5
    }
    assert {i for i in range(V) if got[i] > 0} ^ expected <= borderline
    assert float(got.sum()) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [1e-6, 1e-39, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_a_temperature_near_zero_is_greedy_and_never_overflows(temperature, filters):
    params = SamplingParams(temperature=temperature, **filters)
    for row in logits(3, rows=20, spread=20.0):
        best = int(row.argmax())
        assert sampler(temperature=temperature, **filters).pick_row(row, [1]) == best
        assert float(probabilities(row, params)[best]) == 1.0


def test_kind_g_o20_penalties_by_their_definitions():
    row = torch.linspace(-1, 1, V)
    context = [11, 11, 10, 3]  # the prompt is the first token
    s = sampler(prompt_length=1, repetition_penalty=2.0)
    expected = row.clone()
    for token in {11, 10, 3}:
        expected[token] = expected[token] / 2 if expected[token] > 0 else expected[token] * 2
    assert torch.equal(s._penalized(row, context), expected)
    s = sampler(prompt_length=1, presence_penalty=0.5, frequency_penalty=0.25)
    expected = row.clone()
    for token, count in {11: 1, 10: 1, 3: 1}.items():
        expected[token] -= 0.5 + 0.25 * count
    assert torch.allclose(s._penalized(row, context), expected)
    assert sampler(prompt_length=4, presence_penalty=2.0).pick_row(row, context) == 11
    assert sampler(prompt_length=0, presence_penalty=2.0).pick_row(row, context) == 9


def test_kind_d_o7_padded_ids_are_never_chosen():
    row = torch.zeros(V)
    row[V - 1] = 100.0
    assert sampler(num_tokens=V - 2).pick_row(row, []) < V - 2
    s = sampler(num_tokens=V - 2, temperature=1.0)
    assert all(s.pick_row(row, range(i)) < V - 2 for i in range(200))
    assert sampler(num_tokens=V - 2).pick_greedy(row[None]) == [0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"presence_penalty": 1.0}])
def test_kind_k_o33_non_finite_logits_are_an_error_never_a_token(bad, params):
    row = torch.zeros(V)
    row[4] = bad
    with pytest.raises(SpmoeError, match="non-finite"):
        sampler(**params).pick_row(row, [1])


def test_the_nucleus_without_a_full_sort_is_the_nucleus():
    row = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 3
    for top_p in (0.1, 0.5, 0.9, 0.99, 0.9999):
        got = probabilities(row, SamplingParams(temperature=1.0, top_p=top_p))
        p = row.softmax(0).sort(descending=True).values
        wanted = int((p.cumsum(0) - p < top_p).sum())
        assert abs(int((got > 0).sum()) - wanted) <= (1 if top_p > 0.999 else 0)


WAVES = torch.sin(torch.arange(700) * 0.37) * 4 + torch.cos(torch.arange(700) * 1.9)
TEXTS = {
    "temperature": ({"temperature": 1.2}, [261, 684, 23, 174, 192, 651, 311, 259]),
    "all filters": (
        {"temperature": 0.8, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
        [684, 684, 72, 598, 192, 241, 311, 208],
    ),
    "top_p": ({"temperature": 1.2, "top_p": 0.3}, [684, 684, 582, 241, 192, 241, 311, 208]),
    "penalties": (
        {
            "temperature": 0.6,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.4,
            "frequency_penalty": 0.2,
        },
        [261, 684, 23, 174, 192, 651, 311, 208],
    ),
    "penalties, greedy": (
        {"repetition_penalty": 1.1, "frequency_penalty": 0.5},
        [344, 463, 225, 582, 106, 615, 496, 89],
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_seed_stays_the_same(name):
    """Pinned: another order of filters, noise or ties would change every user's text."""
    params, expected = TEXTS[name]
    s = sampler(num_tokens=690, prompt_length=2, seed=11, **params)
    text = [1, 690, 5]
    for _ in expected:
        text.append(s.pick_row(WAVES, text))
    assert text[3:] == expected


def test_ties_are_cut_together_or_kept_together_and_the_lowest_id_is_greedy():
    row = torch.zeros(V)
    row[[2, 5, 7, 9]] = 1.0
    for params in ({"top_k": 2}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 1, "top_p": 0.2}):
        law = probabilities(row, SamplingParams(temperature=1.0, **params))
        assert law.nonzero().flatten().tolist() == [2, 5, 7, 9]
    assert sampler(presence_penalty=0.5).pick_row(row, [2, 2]) == 5
    assert sampler().pick_row(row, [1]) == 2


def test_a_context_of_padded_ids_alone_is_penalised_by_nothing():
    s = sampler(num_tokens=V - 2, repetition_penalty=1.5, frequency_penalty=1.0)
    assert s.pick_row(torch.arange(V) * 1.0, [V - 1, V - 2]) == V - 3


class Reads(TorchDispatchMode):
    """Counts the operators that make the host wait for a number of the device."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "bincount", "unique")

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("aten::")
        if name.startswith(self.WAITING):
            self.waits.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", TEXTS)
def test_nothing_of_a_row_is_read_before_the_token(name, monkeypatch):
    """As on a GPU, where a row's head is a sort of its own: see the test below."""
    monkeypatch.setattr(sampling, "_head", lambda probs, mass: probs.sort(descending=True).values)
    copied = []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: copied.append(self.shape))
    s = sampler(num_tokens=690, prompt_length=2, seed=11, **TEXTS[name][0])
    with Reads() as reads:
        assert s.pick_row(WAVES, [1, 690, 5]) == TEXTS[name][1][0]
    assert reads.waits == copied == []


@pytest.mark.gpu
@pytest.mark.parametrize("params", FILTERS)
def test_a_gpu_draws_what_the_cpu_draws_and_waits_once(params):
    torch.cuda.set_sync_debug_mode("default")
    rows = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0)) * 3
    for position, row in enumerate(rows):
        s = sampler(num_tokens=4990, prompt_length=1, seed=3, repetition_penalty=1.2, **params)
        context, there = [7, *range(position)], row.cuda()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            got = s.pick_row(there, context)
            torch.cuda.set_sync_debug_mode("default")
        assert got == s.pick_row(row, context)
        assert len(said) <= 1, [str(line.message) for line in said]


def test_rows_drawn_at_once_are_those_drawn_one_by_one_and_noise_is_made_once(monkeypatch):
    """Penalties and filters included; the noise of a step's positions is kept, and no more than that."""
    rows = torch.randn(5, V, generator=torch.Generator().manual_seed(2))
    context = [[1, 2, 3, *range(i)] for i in range(5)]
    how = {"temperature": 0.9, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.3}
    apart = [sampler(**how).pick_row(row, known) for row, known in zip(rows, context, strict=True)]
    one, made = sampler(**how), []
    monkeypatch.setattr(one, "made_noise", lambda p, make=one.made_noise: made.append(p) or make(p))
    for known in context[:4]:
        one.pick_row(rows[0], known)  # the draft's turn
    tokens, finite = one.pick_rows(rows, context)
    assert tokens == apart and finite == [True] * 5 and made == [3, 4, 5, 6, 7]
    for position in range(100):
        one.noise(position, rows.device)
    assert len(one._noises) == sampling.KEPT


def test_a_row_behind_a_rejected_proposal_may_be_anything():
    rows = torch.randn(3, V, generator=torch.Generator().manual_seed(2))
    draw = sampler(temperature=0.8)
    first = draw.pick_row(rows[0], [1])
    rows[1:] = float("nan")
    assert verify([first + 1, 2], rows, draw, [1]).tokens == [first]
    with pytest.raises(SpmoeError, match="non-finite"):
        verify([first, 2], rows, draw, [1])
