"""Figures in plain words, and the warnings that come of them."""

import pytest

from spmoe_lite.stats import REGIMES, Counters, RunStats, in_words, warnings

SEEN = Counters(
    accesses=1000, access_hits=830, unique=500, unique_hits=380, loads=120, bytes_moved=15_000_000_000,
    stall_seconds=3.2, prefetches=40, prefetch_useful=30, prefetch_late=2, prefetch_wasted=8,
    wanted=400, predicted_used=312, would_miss=100, would_miss_predicted=64,
    drafted=400, accepted=320, steps=100, tokens=420,
)  # fmt: skip


@pytest.mark.parametrize("regime", REGIMES)
def test_every_figure_that_was_counted_is_said(regime):
    stats = {"counters": SEEN, "regime": regime, "slots": 96, "experts": 256, "cutoff_layer": 2}
    words = dict(in_words(stats))
    assert words["steps"] == REGIMES[regime]
    assert words["experts in slots"] == "96 of 256"
    assert words["written"] == "420 tokens in 100 steps, 4.20 a step"
    assert words["drafted"] == "400 tokens, 80% accepted"
    assert words["hits"] == "83% of uses, 76% of the experts that a layer needs"
    assert words["moved"] == "15.0 GB: 120 experts when needed, 40 ahead of need"
    assert words["copied ahead"] == "30 in time, 2 late, 8 never used; for 2 layers now"
    assert words["predicted"] == "78% of the experts used, 64% of those missing"
    assert words["waited for experts"].startswith("3.2 s")
    assert ("bytes" in words["waited for experts"]) == (regime != "host-driven")


def test_one_of_a_thing_is_not_several():
    one = Counters(tokens=1, steps=1, drafted=1, loads=1, bytes_moved=9, prefetches=1)
    words = dict(in_words({"counters": one, "cutoff_layer": 1}))
    assert words["written"] == "1 token in 1 step, 1.00 a step"
    assert words["drafted"] == "1 token, 0% accepted"
    assert words["moved"] == "9 bytes: 1 expert when needed, 1 ahead of need"
    assert words["copied ahead"].endswith("for 1 layer now")
    lines = [RunStats(n, 0.0, 0.1, Counters()).line() for n in (0, 1, 2)]
    assert [line.partition(" · ")[0] for line in lines] == ["0 tokens", "1 token", "2 tokens"]


def test_what_was_never_counted_is_not_said():
    words = in_words({"counters": Counters(), "regime": "host-driven", "slots": 0, "experts": 0})
    assert words == [["steps", REGIMES["host-driven"]]]


def test_warnings_say_what_does_not_pay():
    assert warnings(SEEN, False, False) == []
    assert warnings(Counters(), False, False) == []
    poor = Counters(drafted=400, accepted=40, prefetches=300, prefetch_useful=30)
    drafting, copying = warnings(poor, False, False)
    assert "10% of the drafted tokens" in drafting and "10% of the copied experts" in copying
    drafting, copying = warnings(SEEN, True, True)
    assert "drafting does not pay now" in drafting and "copying ahead does not pay now" in copying


def test_the_share_of_time_spent_waiting():
    assert RunStats(10, 6.4, 0.1, SEEN).stall_share == 0.5
    assert RunStats(1, 0.0, 0.1, SEEN).stall_share is None
