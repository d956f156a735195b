"""Cache policies against hand-counted traces, plain models of themselves, and the true optimum by search."""

import itertools
import json
import random
import subprocess
import sys

import pytest

from spmoe_lite import cli
from spmoe_lite.errors import Cancelled, UsageError
from spmoe_lite.replay import POLICIES, Timeline, _policy, compare, replay
from spmoe_lite.trace import Header, Pass, Trace, TraceWriter

ONLINE = ["layer-lru", "global-lru", "textbook-lru", "layer-lfru", "global-lfru"]
OPTIMA = ["layer-belady", "global-belady", "belady-bypass"]


def make(passes, *, layers, experts, k=1, slots=2):
    """A trace of (choices of each layer, accepted rows, predictions) or of choices alone."""
    header = Header("m", None, layers, experts, k, slots, 4, "int4", 10**6, None)
    whole = []
    for one in passes:
        choices, accepted, predictions = one if isinstance(one, tuple) else (one, None, [])
        rows = len(choices[0]) // k
        kept = rows if accepted is None else accepted
        kind = "prefill" if rows > 32 else "decode"
        whole.append(Pass(kind, rows, kept, kept, predictions, choices))
    return Trace(header, whole)


def random_trace(seed, passes=40, layers=2, experts=5, k=2, rows=3, slots=6, skew=0.7):
    """Rows of popular experts, of which some are rejected."""
    rng = random.Random(seed)
    whole = []
    for _ in range(passes):
        count = rng.randint(1, rows)
        weights = [[skew**e * rng.random() for e in range(experts)] for _ in range(layers * count)]
        rows_of = [sorted(range(experts), key=w.__getitem__, reverse=True)[:k] for w in weights]
        choices = [sum(rows_of[i::layers], []) for i in range(layers)]
        whole.append((choices, rng.randint(1, count), []))
    return make(whole, layers=layers, experts=experts, k=k, slots=slots)


def score(trace, name, slots=None, **given):
    given.setdefault("warm_up", 0)
    (one,) = compare(trace, policies=[name], slots=[slots] if slots else (), **given).scores
    return one


# Hand-counted


CONFORMANCE = make(
    [[[0, 1]] * 3, [[0, 2]] * 3, [[0, 1]] * 3, [[0, 3]] * 3, [[0, 1]] * 3],
    layers=3,
    experts=4,
    k=2,
    slots=6,
)


@pytest.mark.parametrize(
    "name, hits, misses",
    [("layer-lru", 12, 18), ("layer-belady", 12, 18), ("belady-bypass", 18, 12)],
)
def test_the_conformance_trace(name, hits, misses):
    """arXiv 2608.07911, section 2.5: 12 hits and 18 misses of 30, with LRU, two slots a layer.

    Two slots and two experts an event leave a cache that must take what it missed no choice, not even
    with the future known; one that may pass it by keeps expert 1 through the visits of 2 and 3.
    """
    one = score(CONFORMANCE, name)
    assert (one.unique, one.unique_hits, one.misses) == (30, hits, misses)
    assert (one.accesses, one.access_hits, one.copies) == (30, hits, misses)


def test_uniform_routing_hits_half_with_a_share_for_each_layer_and_never_with_one_lru():
    """Five rows, 32 layers of 8 experts, half of them in slots. A sweep is longer than the cache, and
    hits nothing if uses are dated as they happen; by token, as the engine dates them, it hits some."""
    rng = random.Random(0)
    passes = [
        [sum((rng.sample(range(8), 2) for _ in range(5)), []) for _ in range(32)] for _ in range(60)
    ]
    trace = make(passes, layers=32, experts=8, k=2, slots=128)
    result = compare(trace, policies=["layer-lru", "textbook-lru", "global-lru"], warm_up=0.2)
    rates = {one.policy: one.hit_rate_unique for one in result.scores}
    assert rates["layer-lru"] == pytest.approx(0.5, abs=0.01)
    assert rates["textbook-lru"] < 0.01
    assert 0.3 < rates["global-lru"] < 0.45
    assert result.union == pytest.approx(8 * (1 - 0.75**5), abs=0.1)


def test_only_accepted_rows_make_an_expert_recent():
    rejected = make([[[0]], [[1]], ([[2, 0]], 1, []), [[3]], [[0]]], layers=1, experts=4)
    accepted = make([[[0]], [[1]], ([[2, 0]], 2, []), [[3]], [[0]]], layers=1, experts=4)
    assert score(rejected, "layer-lru", slots=3).misses == 5  # 3 took the place of 0
    assert score(accepted, "layer-lru", slots=3).misses == 4  # of 1
    one = score(rejected, "layer-lru", slots=3)
    assert (one.accesses, one.access_hits) == (5, 0)  # the rejected row's hit is nobody's


def test_a_row_after_is_more_recent_than_a_row_before():
    trace = make([[[1, 0]], [[2]], [[1]]], layers=1, experts=3)
    assert score(trace, "layer-lru", slots=2).misses == 4
    assert score(make([[[0, 1]], [[2]], [[1]]], layers=1, experts=3), "layer-lru").misses == 3


def test_prefill_fills_free_slots_evicts_nobody_and_is_not_counted():
    prefill = [[0, 1, 2, 3] * 10]
    trace = make([prefill, [[0]], [[3]], prefill, [[3]], [[0]]], layers=1, experts=4, slots=2)
    one = score(trace, "layer-lru")
    assert (one.tokens, one.accesses, one.misses) == (4, 4, 1)  # 0 was there; 3 took 1's place


def test_a_first_part_of_the_passes_warms_up_and_is_not_counted():
    trace = make([[[0]], [[1]], [[0]], [[1]]], layers=1, experts=2)
    assert score(trace, "layer-lru").misses == 2
    assert score(trace, "layer-lru", warm_up=0.5).misses == 0


def test_fewer_slots_than_a_token_needs_in_each_layer_are_one_pool():
    trace = make([[[0, 1], [2, 3]]] * 3, layers=2, experts=4, k=2)
    for name in ("layer-lru", "layer-lfru", "layer-belady"):
        assert (
            score(trace, name, slots=3).misses >= 6
        )  # of 12, though every layer has its favourites
        assert score(trace, name, slots=4).misses == 4


def test_static_is_taught_by_the_warm_up_or_by_another_trace():
    trace = make([[[2]], [[2]], [[1]], [[0]], [[1]], [[2]]], layers=1, experts=4)
    assert score(trace, "static", warm_up=0.5).access_hits == 2  # 2 and 1
    other = make([[[0]], [[1]]], layers=1, experts=4)
    assert score(trace, "static", warm_up=0.5, calibration=other).access_hits == 2  # 0 and 1
    assert score(trace, "static", calibration=other).access_hits == 3  # of all six
    with pytest.raises(UsageError, match="1 layers x 5 experts; the trace has 1 x 4"):
        compare(trace, calibration=make([[[0]]], layers=1, experts=5))


def test_streaming_copies_all_that_is_not_pinned():
    trace = make([[[0, 3]] * 3] * 2, layers=3, experts=4, k=2)
    one = score(trace, "stream", slots=11)  # eight of them for two layers, one more for each layer
    assert one.copies == 2 * (12 - 3)
    assert (one.misses, one.unique_hits) == (6, 6)  # expert 3, and expert 0
    assert score(trace, "stream", slots=5).copies == 2 * 12


def test_prefetching_evicts_what_is_old_and_not_predicted():
    passes = [[[0]], [[1]], ([[2, 1]], 2, [(0, 0, [2]), (0, 1, [1, 3])])]
    one = score(make(passes, layers=1, experts=4), "prefetch", slots=2)
    assert (one.misses, one.copies) == (2, 3)  # 2 for 0; 1 is there; for 3 nobody can go
    plain = score(make(passes, layers=1, experts=4), "layer-lru", slots=2)
    assert (plain.misses, plain.copies) == (3, 3)


def test_a_wrong_prediction_costs_a_copy_and_a_right_one_saves_a_miss_and_no_copy():
    right = make([[[0]], ([[1]], 1, [(0, 0, [1])])], layers=1, experts=4)
    wrong = make([[[0]], ([[1]], 1, [(0, 0, [3])])], layers=1, experts=4)
    assert [score(right, "prefetch").misses, score(right, "prefetch").copies] == [1, 2]
    assert [score(wrong, "prefetch").misses, score(wrong, "prefetch").copies] == [2, 3]


# Against plain models


def plainly(trace, slots, rank, per_layer):
    """Misses if of those who are no members the one of lowest rank leaves, one after the other."""
    h, resident, misses, event = trace.header, set(), 0, 0
    last, uses, token, tokens = {}, {}, {}, 0
    shared = not per_layer or slots // h.layers < h.k
    for one in trace.passes:
        for layer, chosen in enumerate(one.experts):
            members = sorted({(layer, e) for e in chosen})
            for position, e in enumerate(chosen[: one.accepted * h.k]):
                last[layer, e] = (event, position // h.k)
                uses[layer, e] = uses.get((layer, e), 0) + 1
            for key in [key for key in members if key not in resident]:
                misses += 1
                pool = [k for k in resident if shared or k[0] == layer]
                room = slots if shared else len(range(layer, slots, h.layers))
                if len(pool) == room:
                    able = [k for k in pool if k not in members]
                    if not able:
                        continue
                    resident.remove(min(able, key=lambda k: (rank(k, last, uses, event, token), k)))
                resident.add(key)
            event += 1
        for layer, chosen in enumerate(one.experts):
            for position, e in enumerate(chosen[: one.accepted * h.k]):
                token[layer, e] = tokens + position // h.k
        tokens += one.accepted
    return misses


def oldest(key, last, uses, event, token):
    return last.get(key, (-1, -1))


def oldest_token(key, last, uses, event, token):
    return token.get(key, -1)


def least(key, last, uses, event, token):
    return uses.get(key, 0) / (event - last.get(key, (0, 0))[0] + 1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("slots", [2, 3, 5, 6, 9])
def test_who_leaves_is_who_a_plain_model_says(seed, slots):
    trace = random_trace(seed)
    for name, rank in [("lru", oldest_token), ("lfru", least), ("lru", oldest)]:
        for scope in ("layer", "textbook" if rank == oldest else "global"):
            if scope == "layer" and rank == oldest and slots // 2 < 2:
                continue  # one pool, which is the engine's
            expected = plainly(trace, slots, rank, scope == "layer")
            assert score(trace, f"{scope}-{name}", slots=slots).misses == expected


def optimum(events, slots, bypass):
    """The fewest misses of any cache, by search over all it could hold."""
    best = {frozenset(): 0}
    for members in events:
        after = {}
        for held, misses in best.items():
            total = misses + len(members - held)
            needed = frozenset() if bypass else members
            rest = sorted((held | members) - needed)
            for count in range(min(slots - len(needed), len(rest)) + 1):
                for others in itertools.combinations(rest, count):
                    state = needed | frozenset(others)
                    after[state] = min(total, after.get(state, total))
        best = after
    return min(best.values())


@pytest.mark.parametrize("seed", range(8))
def test_belady_is_the_optimum(seed):
    trace = random_trace(seed, passes=14, experts=5, rows=2, k=1, slots=4, skew=0.9)
    events = [
        frozenset((layer, e) for e in chosen)
        for one in trace.passes
        for layer, chosen in enumerate(one.experts)
    ]
    layers = [[e for e in events if next(iter(e))[0] == layer] for layer in range(2)]
    assert score(trace, "layer-belady").misses == sum(optimum(e, 2, False) for e in layers)
    assert score(trace, "global-belady").misses == optimum(events, 4, False)
    assert score(trace, "belady-bypass").misses == optimum(events, 4, True)


@pytest.mark.parametrize("seed", range(5))
def test_no_policy_without_prefetch_copies_less_than_belady_with_bypass(seed):
    trace = random_trace(seed, passes=60, layers=3, experts=6, slots=9)
    for slots in (2, 5, 9, 12, 17, 18):
        scores = compare(trace, slots=[slots], warm_up=0).scores
        least = next(one for one in scores if one.policy == "belady-bypass")
        assert least.copies == min(one.copies for one in scores)


@pytest.mark.parametrize("name", ONLINE + OPTIMA)
@pytest.mark.parametrize("slots", [2, 4, 7, 10])
def test_no_pool_overflows_and_no_member_that_was_there_leaves_in_its_own_event(name, slots):
    trace = random_trace(3)
    timeline = Timeline(trace)
    policy = _policy(name, timeline, slots, None)
    shared = not name.startswith("layer-") or slots // 2 < 2
    for step in timeline.steps:
        for event in step.events:
            there = policy.resident & set(event.members)
            missed = policy.serve(event)
            assert set(missed) == set(event.members) - there
            if name != "belady-bypass":
                assert there <= policy.resident
            if shared:
                assert len(policy.resident) <= slots
            else:
                held = [sum(key // 5 == layer for key in policy.resident) for layer in range(2)]
                assert held[0] <= (slots + 1) // 2 and held[1] <= slots // 2


def test_with_all_experts_in_slots_each_is_missed_once():
    trace = random_trace(0)
    seen = {(i, e) for one in trace.passes for i, chosen in enumerate(one.experts) for e in chosen}
    for name in ONLINE + OPTIMA:
        assert score(trace, name, slots=10).misses == len(seen)


# The comparison


def test_scores_come_by_slots_and_misses_and_what_cannot_be_said_is_left_out():
    result = compare(random_trace(1), slots=[8, 4])
    order = [(one.slots, one.misses, one.copies) for one in result.scores]
    assert order == sorted(order) and {one.slots for one in result.scores} == {4, 8}
    assert set(result.left_out) == {"next-layer", "prefetch"}
    assert {one.policy for one in result.scores} == set(POLICIES) - set(result.left_out)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"policies": ["lru"]}, "--policy lru: one of layer-lru, "),
        ({"policies": ["prefetch"]}, "--policy prefetch: it holds no predictions"),
        (
            {"policies": ["static"], "warm_up": 0},
            "--policy static: it has no decoding pass to learn from",
        ),
        ({"slots": [1]}, "--slots 1: 2 to 10"),
        ({"slots": [11]}, "--slots 11: 2 to 10"),
        ({"warm_up": 1.0}, "--warm-up 1: "),
        ({"warm_up": float("nan")}, "--warm-up nan: "),
    ],
)
def test_what_cannot_be_asked(given, message):
    with pytest.raises(UsageError, match=message):
        compare(random_trace(0), **given)


def test_a_trace_without_a_token_to_count_is_refused():
    for passes in ([], [[[0, 1] * 20]]):
        with pytest.raises(UsageError, match="no token was written"):
            compare(make(passes, layers=1, experts=2))


def test_a_comparison_reports_and_stops():
    import threading

    seen, cancel = [], threading.Event()
    compare(random_trace(0), policies=ONLINE, on_progress=seen.append)
    assert [(p.stage, p.done, p.total) for p in seen] == [("replay", i, 5) for i in range(5)]
    cancel.set()
    with pytest.raises(Cancelled):
        compare(random_trace(0), cancel=cancel)


def test_rates_of_nothing_are_none():
    trace = make([([[0]], 0, []), ([[0]], 1, [])], layers=1, experts=2)
    timeline = Timeline(trace)
    one = replay(timeline, _policy("layer-lru", timeline, 2, None), name="x", slots=2, first=2)
    assert one.hit_rate is None and one.hit_rate_unique is None


def test_replaying_needs_no_torch():
    code = "import sys, spmoe_lite.replay; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n"


# The command


def spmoe(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return stop.value.code


@pytest.fixture
def file(tmp_path):
    trace = random_trace(2)
    writer = TraceWriter(tmp_path / "t.jsonl", trace.header)
    for one in trace.passes:
        rows = [[chosen[i : i + 2] for i in range(0, len(chosen), 2)] for chosen in one.experts]
        guess = [(0, 0, rows[0][0])]
        writer.add(one.kind, dict(enumerate(rows)), one.accepted, one.tokens, guess)
    writer.close()
    return str(tmp_path / "t.jsonl")


def test_the_command_shows_a_table(file, capsys, monkeypatch):
    monkeypatch.setenv("SPMOE_POLICY", "layer-lru")  # of `run`
    assert spmoe("replay", file) == 0
    assert capsys.readouterr().out.count("belady") > 2
    assert spmoe("replay", file, "--slots", "4, 6", "--policy", "static,layer-lru,prefetch") == 0
    out, err = capsys.readouterr()
    head, *rows = [line.split() for line in out.splitlines()]
    assert head[:3] == ["POLICY", "SLOTS", "HITS"]
    assert {row[0] for row in rows} == {"static", "layer-lru", "prefetch"}
    assert [row[1] for row in rows] == ["4"] * 3 + ["6"] * 3
    assert "50.0 GB/s" in err


def test_the_command_gives_every_figure_as_json(file, capsys):
    assert spmoe("replay", file, "--json", "--link", "25", "--policy", "layer-lru") == 0
    values = json.loads(capsys.readouterr().out)
    (one,) = values["scores"]
    assert one["seconds_per_token"] == pytest.approx(one["bytes_per_token"] / 25e9)
    assert one["bytes_per_token"] == pytest.approx(one["copies"] * 10**6 / one["tokens"])
    assert values["link"] == 25 and values["trace"]["experts"] == 5


@pytest.mark.parametrize(
    "args, code",
    [([f"--link={rate}", "--json"], 2) for rate in ("0", "-1", "nan", "inf", "5e-324")]
    + [(["--slots", "x"], 2), ([], 3)],
)
def test_the_command_refuses_in_one_line(file, args, code, capsys):
    assert spmoe("replay", *([file, *args] if args else ["nowhere.jsonl"])) == code
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_help_names_every_policy():
    text = " ".join(cli.cli.commands["replay"].help.split())
    assert all(name in text for name in POLICIES if name != "next-layer")
