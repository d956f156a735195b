"""One recorded step: which one is taken, and what is reckoned of a captured one."""

import dataclasses

import pytest

from spmoe_lite import Engine, timeline
from spmoe_lite.policies import HostDriven
from spmoe_lite.slab import HostSlab, make_slab
from spmoe_lite.synthetic import Pair, write_pair
from spmoe_lite.timeline import RecordedSlab, Span
from tests.eager_graphs import capture, capture_drafts, without_gpu


def test_the_last_step_with_most_drafts_is_cut_out():
    spans = [Span("target", 0, 10), Span("demand", 8, 12), Span("draft", 11, 13)]
    spans += [Span("draft", 13, 15), Span("target", 15, 20), Span("wait", 19, 20)]
    spans += [Span("draft", 21, 22), Span("target", 22, 24)]
    assert timeline._last_step(spans) == (
        Span("demand", 0, 2),
        Span("draft", 1, 3),
        Span("draft", 3, 5),
        Span("target", 5, 10),
        Span("wait", 9, 10),
    )
    assert timeline._last_step(spans[:1]) == ()


def test_a_captured_step_has_its_passes_and_a_copy_for_each_miss(tmp_path, monkeypatch):
    packs = write_pair(Pair.of("tiny", experts="fp32"), tmp_path)
    how = {"device": "cpu", "slots": 16, "draft_tokens": 3, "prefetch": False, "cutoff": 2}
    with Engine.load(*packs, **how) as engine:
        without_gpu(monkeypatch)
        graphs = capture(engine)
        rate = engine.plan.slot_bytes / 1e-5  # a copy takes 0.01 ms, a pass 1 ms
        engine.plan = dataclasses.replace(engine.plan, read_rate=rate)
        found = []
        step = graphs.step
        graphs.step = lambda *a: found.append(step(*a)) or found[-1]
        line = timeline.record_captured(
            engine, "ours", lambda: engine.generate("The quick", max_tokens=24).result
        )
    assert line.label == "ours, captured" and line.milliseconds == pytest.approx(2)
    last = [one for one in found if len(one.proposal) == 3][-1]
    kinds = [span.kind for span in line.spans]
    assert kinds.count("draft") == 3 and kinds.count("target") == 1
    assert kinds.count("ahead") == len(last.fetched)
    waited = sum(span.end - span.begin for span in line.spans if span.kind == "wait")
    assert waited == pytest.approx(0.01 * last.missed.sum())
    ends = [span.end for span in line.spans if span.kind == "demand"]
    assert ends == sorted(ends) and all(1 < end <= 2 for end in ends)


@pytest.mark.parametrize("captured", [False, True])
def test_drafts_are_recorded_whoever_launches_them(tmp_path, monkeypatch, captured):
    class Recorded(Engine):
        make_store = HostDriven
        make_slab = staticmethod(
            lambda *shape: make_slab(*shape, type("Slab", (RecordedSlab, HostSlab), {}))
        )

    packs = write_pair(Pair.of("tiny", experts="fp32"), tmp_path)
    with Recorded.load(*packs, device="cpu", slots=16, draft_tokens=3, cutoff=2) as engine:
        if captured:
            without_gpu(monkeypatch)
            capture_drafts(engine)
        line = timeline.record(
            engine, "ours", lambda: engine.generate("The quick", max_tokens=24).result
        )
    kinds = [span.kind for span in line.spans]
    assert kinds.count("draft") == 3 and kinds.count("target") == 1
    drafts = [span for span in line.spans if span.kind == "draft"]
    target = next(span for span in line.spans if span.kind == "target")
    assert all(span.end <= target.begin for span in drafts)
