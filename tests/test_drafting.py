"""The choice between drafting and plain steps, on made-up clocks."""

import random

import pytest

from spmoe_lite.drafting import DraftLength


def run(draft_ms, plain_ms, steps=2000, accepted=3, adapt=True):
    """Milliseconds of `steps` steps, tokens, and how often it drafted; costs may be functions of time."""
    length, total, tokens, drafted = DraftLength(4, adapt), 0.0, 0, 0
    for step in range(steps):
        count = length.next()
        cost = draft_ms if count else plain_ms
        cost = cost(step) if callable(cost) else cost
        wrote = accepted if count else 1
        total += cost
        tokens += wrote
        drafted += count > 0
        length.observe(wrote, cost / 1e3)
    return total, tokens, drafted / steps, length


def test_a_draft_that_pays_is_kept():
    total, tokens, share, length = run(draft_ms=20, plain_ms=10)
    assert share > 0.93
    assert total / tokens < 1.03 * 20 / 3
    assert not length.paused


def test_kind_i_o24_a_draft_that_does_not_pay_is_put_off():
    total, tokens, share, length = run(draft_ms=50, plain_ms=10)
    assert share < 0.05
    assert total / tokens < 1.1 * 10
    assert length.paused


@pytest.mark.parametrize("order", [(20, 90), (90, 20)])
def test_it_follows_a_change(order):
    """A draft that begins to pay is taken up again, one that no longer does is put off."""
    first, second = order
    *_, length = run(lambda step: first if step < 1500 else second, 10, steps=6000)
    assert (length.next() > 0) == (second == 20)


def test_noise_does_not_shake_it():
    rng = random.Random(0)

    def noisy(mean):
        return lambda step: mean * rng.uniform(0.6, 1.4)

    total, tokens, share, _ = run(noisy(20), noisy(10))
    assert share > 0.9
    total, tokens, share, _ = run(noisy(50), noisy(10))
    assert share < 0.06


def test_a_fixed_length_stays_and_no_length_never_drafts():
    assert run(50, 10, adapt=False)[2] == 1.0
    none = DraftLength(0, True)
    for _ in range(100):
        assert none.next() == 0
        none.observe(1, 0.01)
