"""Long runs and faults: memory stays, a failed copy or a full device ends in a line, threads and cancels.

Each test runs on a CUDA GPU, where steps are captured or driven by the host, and in a shorter form on the
CPU. `ENDURANCE_REPEATS=20` repeats the tests of the highest law, that placement changes no bit;
`ENDURANCE_PAIR=FOLDER` runs them on a pair of four layers at the shapes of Mixtral-8x7B as well, which is
written into the folder (6 GB) if it is not there.
"""

import contextlib
import gc
import os
import random
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

from spmoe_lite import graphs, model
from spmoe_lite.config import SamplingParams
from spmoe_lite.cudart import Cuda, Refused
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError, SpmoeError
from spmoe_lite.slab import DeviceSlab, HostSlab
from tests.test_gpu import PROMPT, make_pair, poison_slots, slow_captured, slow_driven
from tests.test_invariance import copy_all

REPEATS = int(os.environ.get("ENDURANCE_REPEATS", "1"))
PAIR = os.environ.get("ENDURANCE_PAIR")
SLACK = 16 << 20  # bytes that an allocator may keep without anything leaking
GPU = pytest.mark.gpu
DRIVEN = {"pin": "none"}  # steps driven by the host


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"), "fp32", context=2048)


@pytest.fixture(params=[pytest.param("cuda", marks=GPU), "cpu"])
def place(request):
    return request.param


def regimes(*names):
    """On the GPU paged and all-resident, both captured, and driven by the host; on the CPU there is one."""
    known = {"paged": {}, "resident": {"slots": 24}, "driven": DRIVEN}
    cases = [pytest.param("cuda", known[name], id=name, marks=GPU) for name in names or known]
    return pytest.mark.parametrize(("place", "how"), [*cases, pytest.param("cpu", {}, id="cpu")])


def load(packs, place, draft=True, **options):
    options = {"slots": 9, "draft_tokens": 4, "cutoff": 3, "ctx_size": 1024} | options
    engine = Engine.load(
        packs["target"], packs["noisy"] if draft else None, device=place, **options
    )
    engine.eos_ids = frozenset()  # an answer is as long as it is asked to be
    return engine


def write(engine, length=40, prompt=PROMPT, **options):
    return engine.generate(prompt, max_tokens=length, **options).result.token_ids


def memory(place):
    """(bytes of tensors on the device, its free bytes, page-locked bytes, resident bytes)."""
    gc.collect()
    resident = psutil.Process().memory_info().rss
    if place == "cpu":
        return 0, 0, 0, resident
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch._C._host_emptyCache()  # what was given back counts until it is asked for again
    locked = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
    return torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], locked, resident


def assert_no_growth(before, after):
    assert after[0] == before[0], f"{after[0] - before[0]} bytes more on the device"
    assert after[1] >= before[1] - SLACK, f"{before[1] - after[1]} bytes less free there"
    assert after[2] <= before[2] + (1 << 20), f"{after[2] - before[2]} bytes more page-locked"
    assert after[3] <= before[3] + 4 * SLACK, f"{after[3] - before[3]} bytes more resident"


def refused(kind, call):
    """The message of an error of this kind, without its traceback, which would hold on to everything."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


# --- memory over time ----------------------------------------------------------------------------


@pytest.mark.timeout(900)
@pytest.mark.alone
@regimes()
def test_ten_thousand_tokens_take_no_memory(packs, place, how):
    """Answers of all kinds: greedy, sampled, cut off by the reader; after the first ones nothing grows."""
    length, rounds = (500, 20) if place == "cuda" else (30, 5)
    written, draw = 0, random.Random(3)
    with load(packs, place, **how) as engine:
        for i in range(rounds + 3):
            if i == 3:
                before, written = memory(place), 0
            sampling = SamplingParams(temperature=0.8, seed=i) if i % 3 == 1 else None
            prompt = [1, *(draw.randrange(3, 300) for _ in range(20 + 30 * (i % 4)))]
            answer = engine.generate(prompt, max_tokens=length, sampling=sampling)
            if i % 5 == 4:
                for _, _ in zip(range(length // 10), answer, strict=False):
                    pass
                answer.close()
            written += len(answer.result.token_ids)
            while i == rounds + 2 and written < length * rounds:  # the rest of them
                written += len(write(engine, length, prompt))
        assert_no_growth(before, memory(place))
        assert written >= length * rounds


@pytest.mark.alone
@regimes("paged", "resident")
def test_filters_that_alternate_take_no_memory(packs, place, how):
    """On a GPU each set of them is captured anew."""
    rounds = 40 if place == "cuda" else 8
    with load(packs, place, **how) as engine:
        for i in range(rounds):
            if i == rounds // 4:
                before = memory(place)
            filters = [{"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {}][i % 4]
            write(
                engine, 20, sampling=SamplingParams(temperature=1 + i % 3 / 10, seed=i, **filters)
            )
        assert_no_growth(before, memory(place))


@pytest.mark.alone
@regimes()
def test_engines_come_and_go(packs, place, how):
    seen = []
    for _ in range(5 if place == "cuda" else 3):
        with load(packs, place, **how) as engine:
            write(engine, 20)
        del engine
        seen.append(memory(place))
    for after in seen[2:]:
        assert_no_growth(seen[1], after)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.alone
@pytest.mark.parametrize("what", ["slots", "capture", "pass"])
def test_a_full_device_is_said_and_nothing_stays(packs, place, what, monkeypatch):
    if what == "capture" and place == "cpu":
        pytest.skip("nothing is captured there")
    with load(packs, place) as engine:
        expected = write(engine)
    del engine
    before = memory(place)

    def full(*_, **__):
        raise torch.OutOfMemoryError("out of memory, as ordered")

    def full_while_captured(self, rows):
        if torch.cuda.is_current_stream_capturing():
            full()
        return verify(self, rows)

    verify = graphs.StepGraphs._run_verify
    with monkeypatch.context() as patch:
        if what == "slots":
            patch.setattr(DeviceSlab if place == "cuda" else HostSlab, "__init__", full)
        elif what == "capture":
            patch.setattr(graphs.StepGraphs, "_run_verify", full_while_captured)
        if what != "pass":
            assert "lower" in refused(CapacityError, lambda: load(packs, place))
            assert_no_growth(before, memory(place))
    with load(packs, place) as engine:
        target = engine.decoder.target
        if what == "pass":
            run, calls = target.run, []

            def failing(*arguments):
                calls.append(0)
                return full() if len(calls) == 2 else run(*arguments)

            target.run = failing
            prompts = PROMPT, [1, *range(40, 60)]
            write(engine, 1, prompts[1])
            assert "no room left for a pass" in refused(CapacityError, lambda: write(engine))
            target.run = run
        assert write(engine) == expected


@GPU
def test_a_capture_that_fails_leaves_steps_to_the_host(packs, monkeypatch):
    with load(packs, "cuda") as engine:
        expected, verify = write(engine), graphs.StepGraphs._run_verify

    def failing(self, rows):
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("cannot be captured, as ordered")
        return verify(self, rows)

    monkeypatch.setattr(graphs.StepGraphs, "_run_verify", failing)
    with load(packs, "cuda") as engine:
        assert engine.stats()["regime"] == "host-driven"
        assert any("as ordered" in notice for notice in engine.notices)
        assert write(engine) == expected


@GPU
@pytest.mark.alone
@pytest.mark.parametrize("after", [0, 1])
def test_page_locking_that_is_refused_costs_speed_alone(packs, after, monkeypatch):
    with load(packs, "cuda") as engine:
        expected = write(engine)
    del engine
    before, calls, register = memory("cuda"), [], Cuda.register

    def refusing(self, *arguments):
        calls.append(0)
        if len(calls) > after:
            raise Refused("out of quota, as ordered")
        return register(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Cuda, "register", refusing)
        with load(packs, "cuda") as engine:
            assert engine.stats()["regime"] == "host-driven" and len(calls) > after
            assert write(engine) == expected
    del engine
    assert_no_growth(before, memory("cuda"))


@regimes("paged", "driven")
@pytest.mark.parametrize("nth", [1, 4, 9])
def test_a_copy_that_fails_is_said_and_the_next_answer_is_right(packs, place, how, nth):
    with load(packs, place, slots=6, **how) as engine:
        expected, slab, calls = write(engine, 30), engine.decoder.store._slab, []

        def failing(copy):
            def fail(*arguments, **options):
                calls.append(0)
                if len(calls) == nth:
                    raise SpmoeError("copying failed, as ordered")
                return copy(*arguments, **options)

            return fail

        fills = [name for name in ("fill", "fill_from", "fill_pieces") if hasattr(slab, name)]
        for name in fills:
            setattr(slab, name, failing(getattr(slab, name)))
        prompt = [1, *range(100, 140)]  # all of it is read by passes that the host drives
        assert "as ordered" in refused(SpmoeError, lambda: write(engine, 30, prompt))
        for name in fills:
            delattr(slab, name)
        assert write(engine, 30) == expected
        again = write(engine, 30, prompt)
    with load(packs, place, slots=6, **how) as engine:
        assert write(engine, 30, prompt) == again


# --- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [pytest.param("loaded before", marks=GPU), "loaded meanwhile"])
@pytest.mark.parametrize("slots", [pytest.param(24, marks=GPU), 9])
def test_two_engines_write_at_the_same_time_what_each_writes_alone(packs, place, second, slots):
    length, other = (300, 200) if place == "cuda" else (15, 10), [1, *range(50, 80)]
    expected = []
    for prompt, amount in zip((PROMPT, other), length, strict=True):
        with load(packs, place, slots=slots) as engine:
            expected.append([write(engine, amount, prompt) for _ in range(3)])
    got, errors, begun = {}, [], threading.Event()

    def run(name, prompt, amount, engine=None):
        try:
            with engine or load(packs, place, slots=slots) as mine:
                begun.set()
                got[name] = [write(mine, amount, prompt) for _ in range(3)]
        except BaseException as error:
            errors.append(error)

    engines = [load(packs, place, slots=slots), None]
    if second == "loaded before":
        engines[1] = load(packs, place, slots=slots)
    prompts = PROMPT, other
    threads = [
        threading.Thread(target=run, args=(i, prompts[i], length[i], engines[i])) for i in (0, 1)
    ]
    threads[0].start()
    begun.wait(60)
    threads[1].start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert [got[0], got[1]] == expected


@regimes()
def test_cancel_and_reuse_under_load(packs, place, how):
    """From another thread, at any moment, with the device and Python busy: one pass, and no trace."""
    times, length = (20, 80) if place == "cuda" else (3, 20)
    draw, stop = random.Random(1), threading.Event()

    def burden(engine):
        while not stop.is_set():
            write(engine, 25, [1, *range(60, 90)])
            time.sleep(0.001)

    with load(packs, place, **how) as engine, load(packs, place, draft=False) as other:
        started = time.perf_counter()
        expected = write(engine, length)
        seconds = time.perf_counter() - started
        busy = threading.Thread(target=burden, args=(other,))
        busy.start()
        session, most = engine.decoder.session, engine.decoder.length.most
        try:
            for _ in range(times):
                known = []

                def cancel(answer, known=known):
                    time.sleep(draw.random() * seconds)
                    answer.cancel()
                    known.append(len(session.tokens))

                answer = engine.generate(PROMPT, max_tokens=1000)
                canceller = threading.Thread(target=cancel, args=(answer,))
                canceller.start()
                result = answer.result
                canceller.join()
                assert result.finish_reason == "cancelled"
                assert result.token_ids[:length] == expected[: len(result.token_ids)]
                assert len(session.tokens) - known[0] <= most + 1
                assert write(engine, length) == expected
        finally:
            stop.set()
            busy.join()


# --- the highest law -----------------------------------------------------------------------------


class Recorder:
    """The logits [V] of every token that an engine keeps, whoever drives its steps."""

    def __init__(self, engine):
        decoder, self.rows, self._last = engine.decoder, [], None
        forward, commit, steps = decoder.target.forward, decoder.commit, decoder.graphs

        def forward_noted(*arguments, **options):
            self._last = forward(*arguments, **options)
            return self._last

        def commit_noted(step, count):
            self.rows += self._last[:count].float().cpu()
            commit(step, count)

        decoder.target.forward, decoder.commit = forward_noted, commit_noted
        if steps is None:
            return
        launch, read, flights = steps._launch, steps._read, []

        def launch_noted(*arguments):
            flight = launch(*arguments)
            flights.append(flight.logits.clone())  # before the step after it writes there
            return flight

        def read_noted(flight):
            self._last = flights.pop(0)
            return read(flight)

        steps._launch, steps._read = launch_noted, read_noted


def recorded(packs, place, length, slow=(), repeats=1, **how):
    """What `repeats` answers of one engine wrote: tokens, logits, counters, regime."""
    with load(packs, place, **how) as engine:
        captured = engine.decoder.graphs is not None
        for what in [] if captured or place == "cpu" else slow:
            slow_driven(engine, what)
        recorder = Recorder(engine)
        for _ in range(repeats):
            forget(engine)
            recorder.rows = []
            tokens = write(engine, length)
            yield tokens, torch.stack(recorder.rows), engine.counters, engine.stats()["regime"]


def forget(engine):
    """No token is known any more, and no expert has a slot, whose bytes are numbers that are none."""
    decoder, store = engine.decoder, engine.decoder.store
    if decoder.graphs is not None:
        decoder.graphs.leave(store)
    for kv in (decoder.session.target_kv, decoder.session.draft_kv):
        kv.truncate(0)
    if not store.table.all_fit:
        for key in store.table.residents():
            store.table.drop(key)
        store._slab.drain()
        store._slab.slots.fill_(255)


def slow_kernels(patch, cycles=150_000):
    """Between `route` and the read of what it chose, in every layer, captured or not."""
    up = model.expert_up

    def slow_up(*arguments, **options):
        torch.cuda._sleep(cycles)
        return up(*arguments, **options)

    patch.setattr(model, "expert_up", slow_up)


def slow_fills(patch):
    """The same for copies in RAM, which is all there is on the CPU."""
    fill = HostSlab.fill

    def slow_fill(*arguments, **options):
        time.sleep(0.0003)
        return fill(*arguments, **options)

    patch.setattr(HostSlab, "fill", slow_fill)


def held_law(packs, place, length, variants):
    """Text and logits of each variant (name, slots, options, what is slow) are the all-resident ones."""
    [(expected, bits, _, regime)] = recorded(packs, place, length, slots=variants.pop("all"))
    assert regime == ("all-resident" if place == "cuda" else "host-driven")
    for name, (how, slow, regime) in variants.items():
        with pytest.MonkeyPatch.context() as patch:
            poison_slots(patch)
            copy_all(patch)
            if place == "cuda":
                for what in slow:
                    slow_captured(patch, what)
                if "kernels" in slow:
                    slow_kernels(patch)
            else:
                slow_fills(patch)
            answers = recorded(packs, place, length, slow, REPEATS, **how)
            for repeat, (tokens, got, counters, found) in enumerate(answers):
                assert found == (regime if place == "cuda" else "host-driven")
                assert tokens == expected, f"{name}, repeat {repeat}"
                assert torch.equal(got, bits), f"{name}, repeat {repeat}"
                begun = counters.prefetches + counters.prefetch_dropped
                assert begun > 0 or not how["cutoff"], name
        print(f"{name}: {REPEATS} times {length} tokens, bit for bit")


@pytest.mark.timeout(1800)
def test_placement_changes_no_bit(packs, place):
    """The least slots with which steps are captured (2 a layer) and the least of all (2)."""
    length = 500 if place == "cuda" else 30
    least, two = {"slots": 6, "cutoff": 3}, {"slots": 2, "cutoff": 3}
    held_law(
        packs,
        place,
        length,
        {
            "all": 24,
            "late copies": (least, ["copies"], "dynamic"),
            "late passes": (least, ["passes"], "dynamic"),
            "late reads": (least, ["kernels"], "dynamic"),
            "driven": (least | DRIVEN, ["kernels", "copies"], "host-driven"),
            "two slots": (two, ["copies"], "host-driven"),
        },
    )


@GPU
@pytest.mark.timeout(1800)
@pytest.mark.skipif(PAIR is None, reason="ENDURANCE_PAIR names no folder")
def test_placement_changes_no_bit_at_true_shapes():
    from spmoe_lite import synthetic

    folder = Path(PAIR)
    pair = synthetic.Pair.of("mixtral-8x7b", layers=4)
    paths = [folder / f"{name}.spmoe" for name in pair.names]
    if not all((path / "manifest.json").is_file() for path in paths):
        folder.mkdir(parents=True, exist_ok=True)
        paths = synthetic.write_pair(pair, folder)
    packs = {"target": paths[0], "noisy": paths[1]}
    least = {"slots": 8, "cutoff": 2}
    held_law(
        packs,
        "cuda",
        500,
        {
            "all": 32,
            "late copies": (least, ["copies"], "dynamic"),
            "late reads": (least, ["kernels"], "dynamic"),
            "half": (least | {"slots": 16}, ["passes"], "dynamic"),
        },
    )


def test_the_recorder_sees_the_bits(packs, place):
    """One number that is not the same is found: the tests above can fail."""
    [(_, bits, _, _)] = recorded(packs, place, 12, slots=24)
    changed, run = [], None
    with load(packs, place, slots=9, draft=False) as engine, contextlib.ExitStack():
        recorder, run = Recorder(engine), engine.decoder.target.forward

        def other(*arguments, **options):
            changed.append(0)
            return run(*arguments, **options) + 1e-3

        engine.decoder.target.forward = other
        write(engine, 12)
    assert changed and len(recorder.rows) == len(bits) == 12
    if place == "cuda":  # where bits do not depend on the rows of a pass
        assert torch.equal(torch.stack(recorder.rows[1:]), bits[1:])
