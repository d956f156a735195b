"""Steps in which the device decides, without a device: the same passes over the same tables, on the CPU.

Captured for real they are tested in test_gpu.py.
"""

import contextlib
import gc
import random
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmoe_lite import decoder, draftgraphs, drafting, graphs
from spmoe_lite.config import SamplingParams
from spmoe_lite.converters import convert
from spmoe_lite.cutoff import Drift, Profile
from spmoe_lite.drawing import Drawing
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError, SpmoeError
from spmoe_lite.graphs import (
    CLOCK,
    IDS,
    ROWS,
    START,
    ResidentExperts,
    RoutedExperts,
    _Flight,
    advance,
)
from spmoe_lite.hostmap import HostMap
from spmoe_lite.kernels.residency import FILLED, LATE, Tables, credit, fetch, stage
from spmoe_lite.sampling import Sampler
from spmoe_lite.slab import make_slab
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import in_words
from spmoe_lite.store import ExpertStore
from spmoe_lite.trace import read_trace
from spmoe_lite.verifier import verify
from tests import tiny
from tests.eager_graphs import capture, capture_drafts, without_gpu
from tests.late_drafts import Late
from tests.test_invariance import PROMPT, copy_all, disturb

LAYERS, EXPERTS, CHOICES = 3, 8, 2
TOKENS = [1, *(3 + i * 37 % 300 for i in range(40))]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def pack(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.tiny_mixtral(
        folder / "t", layers=LAYERS, experts=EXPERTS, hidden=128, intermediate=192
    )
    return convert(source, out=folder / "t.spmoe", experts=request.param).path


def tables_of(host, slab, share, ahead=(2, LAYERS, CHOICES)):
    stride = slab.shape[1]
    address = torch.tensor([[host.address(i, e) for e in range(EXPERTS)] for i in range(LAYERS)])
    slots = slab.data_ptr() + stride * torch.arange(LAYERS * share).view(LAYERS, share)
    return Tables.make(address, slots, ahead)


@pytest.mark.parametrize("share", [1, 2, 4, 8])
def test_logits_are_those_of_steps_driven_by_the_host(pack, share):
    draw = random.Random(share)
    with Engine.load(pack, device="cpu", slots=LAYERS * EXPERTS) as engine, torch.inference_mode():
        target, kv = engine.decoder.target, engine.decoder.session.target_kv
        layout = engine.target_pack.expert_layout
        host = HostMap(engine.target_pack, torch.device("cpu"))
        slab = torch.full((LAYERS * share, layout.stride), 255, dtype=torch.uint8)
        tables, done = tables_of(host, slab, share), 0
        hits = 0
        while done < len(TOKENS) - 5:
            rows, kept = draw.randint(1, 5), draw.randint(1, 5)
            kept = min(rows, kept)
            part = TOKENS[done : done + rows]
            kv.length = done
            expected = target.forward(part, kv, logits_rows=rows).clone()
            trace = torch.zeros(LAYERS, rows, CHOICES, dtype=torch.int32)
            guesses = [
                [draw.randrange(EXPERTS // 2) * 2 + j for j in range(2)] for _ in range(LAYERS)
            ]
            tables.over.zero_()
            for number in (0, 1):
                one = torch.tensor([number], dtype=torch.int32)
                cutoff = torch.tensor([2], dtype=torch.int32)
                queued = torch.tensor([3, 2], dtype=torch.int32)
                stage(tables, torch.tensor(guesses, dtype=torch.int32), cutoff, queued, one)
                fetch(tables, layout.stride, number, 2)
            got = target.run(
                torch.tensor(part),
                kv,
                torch.tensor([done], dtype=torch.int32),
                RoutedExperts(tables, trace),
                rows,
            )
            assert torch.equal(got, expected)
            hits += int((tables.missed == 0).sum())
            assert trace.tolist() == [engine.decoder.store.trace[i] for i in range(LAYERS)]
            credit(
                tables,
                trace,
                torch.tensor([kept], dtype=torch.int32),
                torch.tensor([done], dtype=torch.int32),
            )
            done += kept
        assert hits > 0 and int(tables.age.max()) == done - 1
        resident = ResidentExperts(tables.host)
        kv.length = done
        part = TOKENS[done : done + 3]
        expected = target.forward(part, kv, logits_rows=3).clone()
        got = target.run(torch.tensor(part), kv, done, resident, 3)
        assert torch.equal(got, expected)
        assert [c.tolist() for c in resident.chosen] == list(engine.decoder.store.trace.values())
        host.close()


def test_the_table_takes_back_what_the_device_did():
    table = SlotTable(6, 3, 8, 2, "layer-lru")
    places = [table.places(layer) for layer in range(3)]
    assert [[slot for slot, _ in row] for row in places] == [[0, 3], [1, 4], [2, 5]]
    table.put([(0, 0, 7), (3, 0, None), (1, 1, 2), (4, 1, 5), (2, 2, None), (5, 2, None)])
    assert table.slot((0, 7)) == 0 and table.slot((1, 5)) == 4
    assert table.residents() == {(0, 7), (1, 2), (1, 5)}
    assert table.place((0, 1)) == (3, None)  # a free slot of its own layer
    table.filled((0, 1))
    assert table.places(0) == [(0, 7), (3, 1)]
    assert table.place((1, 0)) == (1, (1, 2))


# --- whole answers, each step's graphs run in place ----------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target of 3 layers x 8 experts, its twin and a disturbed copy as drafts."""
    folder = tmp_path_factory.mktemp("pair")
    shape = {"layers": LAYERS, "experts": EXPERTS, "scale_head": 4.0}
    target = tiny.tiny_mixtral(folder / "t", **shape)
    noisy = tiny.tiny_mixtral(folder / "n", **shape)
    disturb(noisy, 0.12)
    packs = {"target": target, "twin": target, "noisy": noisy}
    return {name: convert(at, out=folder / f"{name}.spmoe").path for name, at in packs.items()}


@pytest.fixture(scope="module")
def plain(pair):
    with Engine.load(pair["target"], device="cpu", slots=9) as engine:
        return engine.generate(PROMPT, max_tokens=50).result.token_ids


def load(pair, draft=None, **options):
    draft = None if draft is None else pair[draft]
    options = {"device": "cpu", "slots": 9, "cutoff": 2, "prefetch": False} | options
    engine = Engine.load(pair["target"], draft, **options)
    # What is copied ahead must be the same however fast this machine is just now.
    engine.decoder.drift = Drift(Profile(0.2, 1.0, 1.0), weight=0.0)
    capture(engine)
    return engine


def launches(engine):
    """A list that gets an entry, whether it was ahead, for each step that is enqueued."""
    graphs, seen = engine.decoder.graphs, []
    launch = graphs._launch

    def noted(*arguments):
        seen.append(len(arguments) == 3)
        return launch(*arguments)

    graphs._launch = noted
    return seen


def everything(engine):
    """All that an answer leaves behind but for what is a cache."""
    session, store = engine.decoder.session, engine.decoder.store
    caches = [kv for kv in (session.target_kv, session.draft_kv) if kv is not None]
    rows = [(kv.keys[:, : kv.length], kv.values[:, : kv.length]) for kv in caches]
    counted = replace(engine.counters, stall_seconds=0)
    return rows, [kv.length for kv in caches], session.tokens, store.table.last_used, counted


def same(one, other):
    rows, *rest = one
    expected, *others = other
    pairs = zip(sum(rows, ()), sum(expected, ()), strict=True)
    return all(torch.equal(a, b) for a, b in pairs) and rest == others


def test_advance_is_what_the_host_makes_of_a_verdict():
    draw, sampler = random.Random(5), Sampler(SamplingParams(), 4, 0)
    for rows in (1, 2, 5, 9):
        for _ in range(40):
            context = [draw.randrange(4) for _ in range(draw.randint(2, 5))]
            proposal = [draw.randrange(4) for _ in range(rows - 1)]
            best = [p if draw.random() < 0.8 else draw.randrange(4) for p in [*proposal, 3]]
            verdict = verify(proposal, torch.zeros(rows, 4), sampler, context, best)
            params = torch.full((IDS + 2 + rows,), 77, dtype=torch.int32)
            params[START], params[CLOCK] = len(context) - 1, 100
            params[IDS : IDS + 1 + rows] = torch.tensor([*context[-2:], *proposal])
            advance(params, torch.tensor(best, dtype=torch.int32))
            after = context + verdict.tokens
            assert params[START] == len(after) - 1
            assert params[IDS : IDS + 2].tolist() == after[-2:]
            assert params[ROWS] == verdict.num_accepted + 1
            assert params[CLOCK] - params[ROWS] == 100


class At:
    """An event at so many milliseconds."""

    def __init__(self, ms):
        self.ms = ms

    def elapsed_time(self, other):
        return other.ms - self.ms


def test_what_a_copy_took_is_told_from_drafts_whose_copies_were_all_made(pair, monkeypatch):
    """Passes of 10 ms, whose predictions are there after the last of three layers: at 10, 20, 30, 40."""
    without_gpu(monkeypatch)
    with load(pair, "twin", draft_tokens=4) as engine:
        steps = engine.decoder.graphs
        assert steps.layers_ahead == LAYERS

        def told(ends, *state):
            ends = [At(10 + end) for end in ends]
            flight = _Flight(4, 3, None, None, At(10), At(50), None, ends)
            return steps._copy_ms(flight, np.array(state))

        none, one, two = [[0, 0]] * 3, [[FILLED, 0], [0, 0], [0, 0]], [[FILLED, 0]] * 2 + [[0, 0]]
        late = [[FILLED, LATE], [0, 0], [0, 0]]
        assert told([10, 20, 30, 40], none, none, none, none) is None
        assert told([14, 20, 30, 40], one, none, none, none) == 4
        assert told([14, 20, 38, 40], one, none, two, none) == 4
        assert told([22, 34, 35, 40], one, one, none, none) == 12  # the second waited for the first
        assert told([14, 20, 38, 90], one, none, two, late) == 4
        assert (
            told([9, 20, 30, 40], one, none, none, none) == 0
        )  # reckoned, not measured, when it began


def test_copies_ahead_are_counted_by_what_the_last_ones_took(pair, monkeypatch):
    without_gpu(monkeypatch)
    with load(pair, "twin", slots=9) as engine:
        engine.decoder.drift = Drift(Profile(0.2, 1.0, 1.0), weight=0.5)
        assert engine.generate(PROMPT, max_tokens=30).result.token_ids
        assert engine.counters.prefetches > 0
        assert engine.decoder.drift.profile.expert_copy_ms != 0.2


@pytest.mark.parametrize("slots", [6, 24])
@pytest.mark.parametrize(("draft", "drafts"), [(None, 4), ("noisy", 4), ("twin", 3)])
def test_a_step_enqueued_ahead_changes_nothing(pair, plain, monkeypatch, slots, draft, drafts):
    without_gpu(monkeypatch)
    found = []
    for limit in (decoder.AHEAD_MS, 0.0):
        monkeypatch.setattr(decoder, "AHEAD_MS", limit)
        with load(pair, draft, slots=slots, draft_tokens=drafts) as engine:
            seen = launches(engine)
            got = engine.generate(PROMPT, max_tokens=50).result
            assert got.token_ids == plain
            assert sum(seen) > len(seen) / 2 if limit else not any(seen)
            assert len(seen) == engine.counters.steps - 1  # nothing was enqueued in vain
            found.append(everything(engine))
            again = engine.generate(PROMPT, max_tokens=30).result
            assert again.token_ids == plain[:30]
    assert same(*found)


DRAWS = [
    {"temperature": 0.9},
    {"temperature": 1.2, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.9, "repetition_penalty": 1.2},  # which the host chooses
]


@pytest.mark.parametrize("slots", [6, 24])
@pytest.mark.parametrize(("draft", "drafts"), [(None, 4), ("noisy", 4), ("twin", 2)])
def test_tokens_drawn_by_the_device_are_the_hosts(pair, monkeypatch, slots, draft, drafts):
    """One sampler after another, of new filters and of known ones, seeds and turns; enqueued ahead or not."""
    without_gpu(monkeypatch)
    turns = [
        (SamplingParams(seed=seed, **one), prompt)
        for seed, one in enumerate([*DRAWS, {"temperature": 0.0}, *DRAWS[1::-1], DRAWS[1]])
        for prompt in (PROMPT, PROMPT[:7])
    ]
    with load(pair, None) as engine:
        engine.decoder.graphs = None
        expected = [
            engine.generate(prompt, max_tokens=23, sampling=one).result.token_ids
            for one, prompt in turns
        ]
    assert len(set(expected)) > 12
    drafted = []
    for limit, by_host in ((decoder.AHEAD_MS, False), (0.0, False), (0.0, True)):
        monkeypatch.setattr(decoder, "AHEAD_MS", limit)
        if by_host:
            monkeypatch.setattr(Sampler, "draws_alone", False)
        with load(pair, draft, slots=slots, draft_tokens=drafts) as engine:
            seen = launches(engine)
            for (sampling, prompt), text in zip(turns, expected, strict=True):
                seen.clear()
                got = engine.generate(prompt, max_tokens=23, sampling=sampling).result
                assert got.token_ids == text
                by_device = sampling.repetition_penalty == 1.0
                assert any(seen) == (by_device and limit > 0)
            drafted.append((engine.counters.drafted, engine.counters.accepted))
    assert drafted[1] == drafted[2]  # the same proposals too


def test_noise_that_one_stream_was_sent_is_there_for_the_next(monkeypatch):
    """Whichever stream a step comes on; and no row that a step under way may read is written."""
    now, done = (
        ["first"],
        {"first": 0, "second": 0},
    )  # how much of a stream the other has waited for

    class Event:
        at = None

        def record(self):
            self.at = now[0], len(orders)

    class Stream:
        def wait_event(self, event):
            if event.at is not None:
                done[event.at[0]] = event.at[1]

    orders = []  # (stream, row of the ring, position)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    one = torch.zeros(1, dtype=torch.int32)
    drawing = Drawing(
        most=3, start=one, number=one, ids=one, newest=None, heads=[], found={}, num_tokens=5,
        capture=lambda *_: None,
    )  # fmt: skip
    sampler = Sampler(SamplingParams(temperature=1.0, seed=4), 5, 0)
    make = sampler.made_noise
    monkeypatch.setattr(
        sampler, "made_noise", lambda at: orders.append((now[0], at % 8, at)) or make(at)
    )
    drawing.begin(sampler)
    draw, known = random.Random(2), 40
    for _ in range(30):
        now[0] = draw.choice(["first", "second"])
        drawing.fill(known, known + 3)
        other = {"first": "second", "second": "first"}[now[0]]
        theirs = [i for i, (stream, _, _) in enumerate(orders) if stream == other]
        assert not theirs or done[other] > theirs[-1]
        begun = len(orders)
        drawing.fill(known, known + 7)  # a step that reads up to known + 3 may be under way
        assert all(
            row not in {at % 8 for at in range(known, known + 4)} for _, row, _ in orders[begun:]
        )
        for at in range(known, known + 8):
            assert torch.equal(drawing._ring[at % 8], make(at))
        known += draw.randint(1, 4)
    assert [at for _, _, at in orders] == list(range(40, orders[-1][2] + 1))  # each once


def test_filters_are_captured_once_and_a_capture_that_fails_is_made_again(pair, monkeypatch):
    without_gpu(monkeypatch)
    hot, other = SamplingParams(temperature=0.9, seed=1), SamplingParams(temperature=1.2, seed=1)
    with load(pair, "noisy") as engine:
        drawing = engine.decoder.graphs._drawing
        real, captured, left = drawing._capture, [], [100]

        def noted(run, rows):
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("no room, as ordered")
            captured.append(rows)
            return real(run, rows)

        drawing._capture = noted
        answers = [
            engine.generate(PROMPT, max_tokens=20, sampling=one).result.token_ids
            for one in (hot, replace(hot, seed=2), hot, other)
        ]
        assert captured == [0, 1, 1, 5] * 2  # two draft passes, two sizes of the target's
        assert answers[0] == answers[2] and len(set(answers)) == 3
        left[0] = 2  # the third one fails
        with pytest.raises(CapacityError, match="lower --vram or --ctx-size"):
            engine.generate(PROMPT, max_tokens=20, sampling=hot).result  # noqa: B018
        left[0] = 100
        for sampling, expected in ((hot, answers[0]), (other, answers[3])):
            got = engine.generate(PROMPT, max_tokens=20, sampling=sampling).result
            assert got.token_ids == expected


@pytest.mark.parametrize("draft", [None, "noisy", "twin"])
@pytest.mark.parametrize("ending", ["token", "text", "cancel"])
def test_an_answer_that_ends_forgets_the_step_ahead(pair, plain, monkeypatch, draft, ending):
    """Wherever in a block of accepted tokens; what is known and counted is as without it."""
    without_gpu(monkeypatch)
    for position in (14, 17):
        found = []
        for limit in (20.0, 0.0):
            monkeypatch.setattr(decoder, "AHEAD_MS", limit)
            with load(pair, draft) as engine:
                seen = launches(engine)
                if ending == "token":
                    engine.eos_ids = frozenset([plain[position]])
                text, cancel = engine.tokenizer.decode(plain[: position + 1]), threading.Event()
                stop = [text[-4:]] if ending == "text" else []
                answer = engine.generate(PROMPT, max_tokens=50, stop=stop, cancel=cancel)
                for _ in range(position // 3 if ending == "cancel" else 0):
                    next(answer, "")
                if ending == "cancel":
                    cancel.set()
                got = answer.result
                assert got.finish_reason == ("cancelled" if ending == "cancel" else "stop")
                assert got.token_ids == plain[: len(got.token_ids)]
                vain = len(seen) - (engine.counters.steps - 1)
                assert vain <= 1 if limit else vain == 0
                found.append(everything(engine))
                assert limit == 0 or engine.decoder.graphs.ahead is not None
                engine.eos_ids = frozenset()
                rest = engine.generate([*PROMPT, *got.token_ids], max_tokens=12).result
                assert got.token_ids + rest.token_ids == plain[: len(got.token_ids) + 12]
                found.append(engine.decoder.store.table.last_used.copy())
        assert same(found[0], found[2]) and found[1] == found[3]


@pytest.mark.parametrize("draft", [None, "noisy"])
def test_kind_l_o36_graphs_go_with_their_engine(pair, monkeypatch, draft):
    """At once: the garbage collector would delete them at any moment, in the capture of the next engine's too."""
    without_gpu(monkeypatch)
    for module in (graphs, draftgraphs):
        monkeypatch.setattr(
            module, "capture", lambda run, rows, reset, pool: (object(), (reset(), run(rows))[1])
        )
    sources, make_source = [], graphs.ResidentExperts

    def noted(address):
        source = make_source(address)
        sources.append(weakref.ref(source))
        return source

    monkeypatch.setattr(graphs, "ResidentExperts", noted)
    makers = [capture, capture_drafts] if draft else [capture]
    for make in makers:
        sources.clear()
        how = {"device": "cpu", "slots": 9, "prefetch": make is capture_drafts}
        with Engine.load(pair["target"], draft and pair[draft], **how) as engine:
            kept = weakref.ref(make(engine))
            # Not before: the draft's experts are found through tables that its graphs read.
            assert len(sources) == (draft is not None) * (1 + (make is capture))
            assert all(source() is not None for source in sources)
            gc.disable()
            try:
                engine.close()
                assert kept() is None and all(source() is None for source in sources)
            finally:
                gc.enable()


class Reads(TorchDispatchMode):
    """The memory that operations read and none of them made; numbers alone are part of a launch."""

    def __init__(self):
        super().__init__()
        self.found, self._made = {}, []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        made = function(*arguments, **(options or {}))
        ours = {storage._cdata for storage in self._made}
        for tensor in tree_leaves((arguments, options)):
            if isinstance(tensor, torch.Tensor) and tensor.ndim:
                storage = tensor.untyped_storage()
                if storage._cdata not in ours:
                    self.found[storage._cdata] = storage.data_ptr(), StorageWeakRef(storage)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.found:
                    self._made.append(storage)
        return made


@pytest.mark.parametrize("draft", [None, "noisy"])
def test_what_graphs_read_is_kept(pair, monkeypatch, draft):
    """A graph knows addresses: what lies there must be held by somebody as long as the engine is open."""
    without_gpu(monkeypatch)
    reads = []

    def noted(run, rows, reset, pool):
        reset()
        reads.append(Reads())
        with reads[-1]:
            return object(), run(rows)

    for module in (graphs, draftgraphs):
        monkeypatch.setattr(module, "capture", noted)
    for make in [capture, capture_drafts] if draft else [capture]:
        reads.clear()
        with Engine.load(pair["target"], draft and pair[draft], device="cpu", slots=24) as engine:
            made = make(engine)
            if make is capture:
                params = SamplingParams(temperature=0.9, top_p=0.9)
                with torch.inference_mode():
                    made._drawing.begin(Sampler(params, engine.num_tokens, 0))
            gc.collect()
            models = [engine.decoder.target, engine.decoder.draft][: 1 + bool(draft)]
            # Experts are read through views that are made for each pass.
            slabs = [model.source._slab.slots for model in models]
            spans = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in slabs]
            found = [one for read in reads for one in read.found.values()]
            assert len(found) > 30
            for address, storage in found:
                inside = any(begin <= address < end for begin, end in spans)
                assert inside or not storage.expired(), hex(address)


def one_stream(monkeypatch) -> list[str]:
    """The current stream in place of torch's, in a list of one."""
    now = ["the caller's"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: now[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: now.__setitem__(0, stream))
    return now


@pytest.mark.parametrize("where", ["capture_begin", "capture_end"])
def test_a_capture_that_fails_leaves_the_callers_stream(monkeypatch, where):
    """The engine goes on without graphs then; torch's own context would leave the capture's stream current."""
    now = one_stream(monkeypatch)

    class Capture:
        def capture_begin(self, *_, **__):
            assert now == ["the capture's"]
            if where == "capture_begin":
                raise RuntimeError("no capture")

        def capture_end(self):
            raise RuntimeError("no capture")

    class Inside:
        def __init__(self, stream):
            self.stream = stream

        def __enter__(self):
            self.before = torch.cuda.current_stream()
            torch.cuda.set_stream(self.stream)

        def __exit__(self, *_):
            torch.cuda.set_stream(self.before)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Capture)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", Inside)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(draftgraphs, "capture_stream", lambda _: "the capture's")
    with pytest.raises(RuntimeError, match="no capture"):
        draftgraphs.capture(lambda rows: rows, 3, list, "a pool")
    assert now == ["the caller's"]


def test_nothing_is_collected_while_a_graph_is_captured(monkeypatch):
    seen = []

    class Graph:
        def __init__(self, *_, **__):
            pass

        def __enter__(self):
            seen.append(gc.isenabled())

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Graph)
    one_stream(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(draftgraphs, "capture_stream", str)
    _, kept = draftgraphs.capture(lambda rows: (rows, gc.isenabled()), 3, list, None)
    assert seen == [False] and kept == (3, False) and gc.isenabled()


def test_graphs_are_captured_on_a_stream_of_their_own_gpu(monkeypatch):
    """Two engines on two GPUs: torch captures on a stream of the first one, whichever is current."""
    streams = []
    one_stream(monkeypatch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: ("stream of", device))

    @contextlib.contextmanager
    def graph(made, pool, stream, **how):
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "graph", graph)
    draftgraphs.capture_stream.cache_clear()
    for device in (1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        draftgraphs.capture(lambda rows: rows, 3, list, None)
    draftgraphs.capture_stream.cache_clear()
    assert streams == [("stream of", torch.device("cuda", i)) for i in (1, 0, 1)]
    assert streams[0] is streams[2]  # graphs that share memory are captured on one stream


def test_the_next_pass_waits_for_what_a_cancelled_one_left(pair, plain, monkeypatch):
    """On whichever stream it comes; where every expert has a slot, nothing else waits for that."""
    without_gpu(monkeypatch)
    left, waited, cancel = [], [], threading.Event()

    class Stream(torch.cuda.Stream):
        def wait_event(self, event):
            waited.append(event)

    def end_of_work(device):
        left.append(torch.cuda.Event())
        return left[-1]

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(decoder, "end_of_work", end_of_work)
    with load(pair, "noisy", slots=24) as engine:
        drafts = engine.decoder.graphs._draft
        replay = drafts.replay

        def cancelling(number):
            cancel.set()
            return replay(number)

        drafts.replay = cancelling
        got = engine.generate(PROMPT, max_tokens=9, cancel=cancel).result
        assert got.finish_reason == "cancelled" and len(left) == 1 and left[0] not in waited
        drafts.replay = replay
        assert engine.generate(PROMPT, max_tokens=9).result.token_ids == plain[:9]
        assert waited.count(left[0]) == 1 and len(left) == 1


def test_recency_on_the_device_after_a_step_too_many(pair, plain, monkeypatch):
    """An end token inside an accepted block: the device had credited all of the block."""
    without_gpu(monkeypatch)
    with load(pair, "twin", slots=13) as engine:
        engine.eos_ids = frozenset([plain[13]])
        engine.generate(PROMPT, max_tokens=50).result
        engine.eos_ids = frozenset()
        graphs, store = engine.decoder.graphs, engine.decoder.store
        engine.decoder.prefill()
        graphs.enter(store)
        last, age = store.table.last_used, graphs.tables.age.tolist()
        assert {(i, e): a for i, row in enumerate(age) for e, a in enumerate(row) if a >= 0} == last
        assert graphs._clock == store.position + 1


def test_a_changing_number_of_drafts_is_followed(pair, plain, monkeypatch):
    without_gpu(monkeypatch)
    for name, steps in {"DRAFT": 2, "PLAIN": 1, "HOLD": 3, "PAUSE": 3}.items():
        monkeypatch.setattr(drafting, f"{name}_STEPS", steps)
    with load(pair, "noisy", draft_tokens="auto") as engine:
        seen = launches(engine)
        assert engine.generate(PROMPT, max_tokens=50).result.token_ids == plain
        assert 0 < engine.counters.drafted < 4 * engine.counters.steps
        assert seen.count(True) > 0 and seen.count(False) > 3


def test_numbers_that_are_none_raise_and_the_step_ahead_is_forgotten(pair, plain, monkeypatch):
    without_gpu(monkeypatch)
    with load(pair, "noisy") as engine:
        target, run = engine.decoder.target, engine.decoder.target.run
        calls = []

        def failing(*arguments):
            calls.append(0)
            logits = run(*arguments)
            return logits * float("nan") if len(calls) == 6 else logits

        target.run = failing
        answer = engine.generate(PROMPT, max_tokens=50)
        with pytest.raises(SpmoeError, match="non-finite"):
            answer.result
        assert len(calls) > 6 and engine.decoder.graphs.ahead is None
        begun = len(answer.result.token_ids)
        assert answer.result.token_ids == plain[:begun] and begun >= 4
        assert engine.generate(PROMPT, max_tokens=50).result.token_ids == plain


@pytest.mark.parametrize("eagerness", [0.0, 0.5])
def test_a_pass_waits_for_the_copies_ahead(pair, plain, monkeypatch, eagerness):
    """Copies that run when somebody waits for them, or when `random` says so."""
    without_gpu(monkeypatch)
    draw, waiting = random.Random(2), []

    class Stream(torch.cuda.Stream):
        def wait_event(self, event):
            if event is stepping._fetched:
                while waiting:
                    waiting.pop(0)()

    def dawdle(*arguments):
        waiting.append(lambda: fetch(*arguments))
        if draw.random() < eagerness:
            waiting.pop(0)()

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    with load(pair, "noisy", slots=13) as engine:
        stepping = engine.decoder.graphs
        monkeypatch.setattr(graphs, "fetch", dawdle)
        assert engine.generate(PROMPT, max_tokens=50).result.token_ids == plain
        counters = engine.counters
        assert counters.prefetch_late + counters.prefetch_dropped > 0
        assert (counters.prefetch_useful > 0) == (eagerness > 0) and not waiting


def with_landing(count):
    class Store(ExpertStore):
        def __init__(self, *args):
            super().__init__(*args[:5], None, count)

    class Landing(Engine):
        make_store = Store
        make_slab = staticmethod(lambda slots, *rest: make_slab(slots + count, *rest))

    return Landing


def test_landing_slots_serve_the_first_layers_between_prompts(pair, plain, monkeypatch):
    without_gpu(monkeypatch)
    loads = {}
    for count in (0, 2):
        options = {"device": "cpu", "slots": 6, "prefetch": False}
        with with_landing(count).load(pair["target"], pair["noisy"], **options) as engine:
            stepping, store = capture(engine), engine.decoder.store
            for _ in range(2):
                assert engine.generate(PROMPT, max_tokens=50).result.token_ids == plain
                sizes = (stepping.tables.slots != 0).sum(1).tolist()
                assert sizes == ([3, 3, 2] if count else [2, 2, 2])
                stepping.leave(store)
                residents = store.table.residents()
                assert 0 < len(residents) <= 6 > max(map(store.table.slot, residents))
            loads[count] = engine.counters.loads
    assert loads[2] < loads[0]


def test_captured_steps_say_what_was_predicted(pair, monkeypatch, tmp_path):
    without_gpu(monkeypatch)
    recorded = {}
    for captured in (True, False):
        how = {"device": "cpu", "slots": 13, "cutoff": 2, "draft_tokens": 3}
        how |= {"prefetch": not captured, "trace": tmp_path / f"{captured}.trace"}
        with Engine.load(pair["target"], pair["noisy"], **how) as engine:
            if captured:
                capture(engine)
            engine.generate(PROMPT, max_tokens=41).result
            c = engine.counters
            assert 0 < c.predicted_used <= c.predicted == 2 * c.predictions
            assert 0 < c.would_miss_predicted <= c.would_miss <= c.wanted
            assert c.prefetch_useful + c.prefetch_wasted <= c.prefetches
            words = dict(in_words(engine.stats()))
            assert ("GPU" in words["steps"]) == captured and "13 of 24" in words["experts in slots"]
            assert "of those missing" in words["predicted"] and "in time" in words["copied ahead"]
            assert c.bytes_moved == (c.loads + c.prefetches) * engine.plan.slot_bytes
        recorded[captured] = read_trace(tmp_path / f"{captured}.trace").passes
    for ours, theirs in zip(recorded[True][:-2], recorded[False], strict=False):
        assert ours.experts == theirs.experts
        assert sorted(ours.predictions) == sorted(theirs.predictions)


# --- captured drafts, the target driven by the host ----------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafts", [1, 3])
def test_captured_drafts_are_the_draft_s_own(pair, monkeypatch, tmp_path, drafts, temperature):
    """Proposals, predictions and text, over two turns, as when the host launches every kernel."""
    without_gpu(monkeypatch)
    copy_all(monkeypatch)
    sampling = SamplingParams(temperature=temperature, seed=5)
    texts, recorded = [], []
    for captured in (False, True):
        how = {"device": "cpu", "slots": 9, "cutoff": 2, "draft_tokens": drafts}
        how["trace"] = tmp_path / f"{captured}.trace"
        with Engine.load(pair["target"], pair["noisy"], **how) as engine:
            if captured:
                capture_drafts(engine)
            first = engine.generate(PROMPT, max_tokens=31, sampling=sampling).result.token_ids
            more = [*PROMPT, *first, 5, 6, 7]
            texts.append(
                first + engine.generate(more, max_tokens=20, sampling=sampling).result.token_ids
            )
            c = engine.counters
            assert 0 < c.accepted < c.drafted and c.prefetches > 0
            recorded.append((c.drafted, c.accepted, c.predictions, c.predicted_used))
        recorded.append([sorted(p.predictions) for p in read_trace(how["trace"]).passes])
    assert texts[0] == texts[1]
    assert recorded[:2] == recorded[2:] and any(recorded[1])


@pytest.mark.parametrize("seed", range(4))
def test_captured_drafts_on_a_late_device(pair, monkeypatch, seed):
    """What they propose, and what they name while they are made, is there when it is looked at."""
    draw, seen = random.Random(seed), []
    prompts = [[1, *(draw.randrange(3, 300) for _ in range(draw.randint(1, 9)))] for _ in range(5)]
    drafts, lengths = draw.choice([1, 3, 5]), [draw.randint(2, 12) for _ in prompts]
    goes_on = [draw.random() < 0.5 for _ in prompts]
    for captured in (False, True):
        with Engine.load(
            pair["target"], pair["noisy"], device="cpu", slots=9, cutoff=3, draft_tokens=drafts
        ) as engine:
            if captured:
                Late(seed).install(monkeypatch)
                capture_drafts(engine)
            texts, history = [], []
            for prompt, length, more in zip(prompts, lengths, goes_on, strict=True):
                history = [*history, *prompt] if more else prompt
                history = [*history, *engine.generate(history, max_tokens=length).result.token_ids]
                texts.append(history)
            c = engine.counters
            named = c.predictions, c.predicted, c.predicted_used, c.predicted_best_used, c.wanted
            seen.append((texts, c.drafted, c.accepted, named))
    assert seen[0] == seen[1] and all(seen[0][-1])


def test_the_cutoff_that_is_told_is_the_one_that_is_kept(pair, monkeypatch):
    """Captured drafts say nothing of the layers beyond theirs."""
    without_gpu(monkeypatch)
    with Engine.load(pair["target"], pair["noisy"], device="cpu", slots=9, cutoff=3) as engine:
        engine.generate(PROMPT, max_tokens=8).result
        assert engine.stats()["cutoff_layer"] == 3
        capture_drafts(engine, layers=2)
        engine.generate([*PROMPT, 5], max_tokens=8).result
        assert engine.stats()["cutoff_layer"] == 2


@pytest.mark.parametrize("captured", [False, True])
def test_a_draft_that_reads_what_plain_steps_wrote_is_no_measure(pair, monkeypatch, captured):
    without_gpu(monkeypatch)
    with Engine.load(pair["target"], pair["noisy"], device="cpu", slots=9) as engine:
        if captured:
            capture_drafts(engine)
        decoder, steps, seen = engine.decoder, [], []
        propose, c = decoder._propose, engine.counters

        def noted(*asked):
            unread = len(decoder.session.tokens) - decoder.session.draft_kv.length
            seen.clear()
            if proposal := propose(*asked):
                steps.append((unread > 2, bool(seen)))
            return proposal

        monkeypatch.setattr(decoder, "_propose", noted)
        monkeypatch.setattr(decoder.drift, "observe", lambda **ms: seen.extend(ms))
        monkeypatch.setattr(decoder.length, "next", lambda: 4 * (c.steps % 6 > 2))
        engine.generate(PROMPT, max_tokens=40).result
        assert steps.count((True, False)) > 1 < steps.count((False, True))
        assert len(set(steps)) == 2


@pytest.mark.parametrize("captured", [False, True])
def test_predictions_of_a_step_that_was_never_committed_count_for_no_other(
    pair, monkeypatch, captured
):
    """Ctrl-C between the two; the next answer's first pass drafts nothing and predicts nothing."""
    without_gpu(monkeypatch)
    with Engine.load(pair["target"], pair["noisy"], device="cpu", slots=9, cutoff=2) as engine:
        if captured:
            capture_drafts(engine)
        engine.generate(PROMPT, max_tokens=9).result
        commit = engine.decoder.commit

        def struck(step, count):
            if step.num_drafted:
                raise KeyboardInterrupt
            commit(step, count)

        engine.decoder.commit = struck
        with pytest.raises(KeyboardInterrupt):
            engine.generate(PROMPT[:5], max_tokens=9).result
        engine.decoder.commit = commit
        before = engine.counters.copy()
        engine.generate([1, 8, 9], max_tokens=1).result
        seen = engine.counters.since(before)
        assert seen.tokens == 1 and seen.predictions == seen.wanted == 0
