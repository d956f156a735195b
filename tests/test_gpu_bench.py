"""`bench` on a CUDA GPU: every policy and copy path writes the same text, slower copies are slower.

Needs a GPU and Triton; skipped elsewhere. The same on the CPU is in test_bench.py.
"""

import pytest

from spmoe_lite import bench as b
from spmoe_lite import synthetic

pytestmark = pytest.mark.gpu

GIVEN = {"slots": [16], "max_tokens": 16, "repeats": 2, "prompts": ["What is it?"], "ctx_size": 256}


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    pair = synthetic.Pair.of("tiny", experts="int4")
    return synthetic.write_pair(pair, tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize("path", b.COPY_PATHS)
def test_every_policy_writes_the_same_text_on_every_copy_path(packs, path):
    found = b.bench(
        *packs, policies=b.POLICIES, copy_path=path, timelines=path != "legacy", **GIVEN
    )
    assert [row.error for row in found.rows] == [None] * len(found.rows) and not found.left_out
    captured = {row.setting.policy for row in found.rows if row.steps == "captured"}
    assert captured == ({"on-demand", "ours", "all-resident"} if path == "auto" else set())
    ahead = {row.setting.policy: row.stats.counters.prefetches for row in found.rows}
    assert all(ahead[name] for name in ("next-layer", "trace-match", "sp-moe", "ours"))
    assert len(found.timelines) == (0 if path == "legacy" else len(b.POLICIES) - 1)
    for line in found.timelines:
        assert all(0 <= span.begin <= span.end for span in line.spans), line.label
        assert {"draft", "target"} <= {span.kind for span in line.spans}
        policy = line.label.partition(",")[0]
        assert line.label.endswith("captured") == (policy in captured)


def test_forced_acceptance_is_the_same_captured_or_not(packs):
    counted = set()
    for path in ("auto", "host"):
        given = {"policies": ["on-demand"], "draft_tokens": [4], "acceptance": 0.6}
        found = b.bench(*packs, copy_path=path, **given, **GIVEN)
        counters = next(r.stats.counters for r in found.rows if r.setting.draft_tokens)
        counted.add((counters.steps, counters.accepted))  # captured steps draft all or none
    assert len(counted) == 1


def test_copies_are_paced(packs):
    found = b.bench(packs[0], policies=["on-demand"], link=0.05, **GIVEN)
    run = found.rows[0].runs[-1].stats
    due = run.counters.bytes_moved / 0.05e9
    assert 0.8 * due < run.seconds < 2 * due + 1 and due > 0
