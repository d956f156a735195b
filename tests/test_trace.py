"""Recordings of routing: what a run writes, what a killed run leaves, and files that are something else."""

import io
import json
import logging
import os

import pytest

from spmoe_lite.config import SamplingParams
from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from spmoe_lite.errors import (
    DamagedError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.loading import Loader
from spmoe_lite.replay import compare
from spmoe_lite.trace import Header, Pass, Trace, TraceWriter, read_trace
from tests import tiny
from tests.test_invariance import disturb

HEADER = Header("mixtral", "mistral", 2, 4, 2, 6, 4, "int4", 1 << 16, None)
LAYERS = {0: [[0, 1], [2, 0]], 1: [[3, 1], [1, 3]]}  # two rows


def record(path, passes=2):
    writer = TraceWriter(path, HEADER)
    for _ in range(passes):
        writer.add("decode", LAYERS, 1, 1, [(1, 0, [3, 2])])
    writer.close()
    return path


def test_what_was_written_is_read(tmp_path):
    one = Pass("decode", 2, 1, 1, [(1, 0, [3, 2])], [[0, 1, 2, 0], [3, 1, 1, 3]])
    assert read_trace(record(tmp_path / "t")) == Trace(HEADER, [one, one])


def test_each_pass_is_in_the_file_when_it_has_run(tmp_path):
    writer = TraceWriter(tmp_path / "t", HEADER)
    for done in range(3):
        assert len(read_trace(tmp_path / "t").passes) == done
        writer.add("decode", LAYERS, 2, 2)
    writer.close()
    writer.add("decode", LAYERS, 2, 2)  # after the end: nothing
    assert len(read_trace(tmp_path / "t").passes) == 3


def test_no_file_is_overwritten(tmp_path):
    path = record(tmp_path / "t")
    before = path.read_bytes()
    with pytest.raises(UsageError, match="--trace .* exists: delete it, or name another"):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == before


def test_a_text_is_a_path(tmp_path):
    TraceWriter(str(tmp_path / "t"), HEADER).close()
    assert not (tmp_path / "t").exists()
    with pytest.raises(UsageError, match="exists"):
        TraceWriter(str(record(tmp_path / "t")), HEADER)


def test_a_recording_of_nothing_goes_though_the_program_went_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    writer = TraceWriter("t", HEADER)
    monkeypatch.chdir("/")
    writer.close()
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("path", [1, True, None, b"t", ["t"]])
def test_what_is_no_path_is_refused(path, capfd):
    with pytest.raises(UsageError, match="--trace .* is no path"):
        TraceWriter(path, HEADER)
    os.write(1, b"stdout is open")
    assert capfd.readouterr().out == "stdout is open"


def test_a_folder_is_not_told_to_be_deleted(tmp_path):
    with pytest.raises(UsageError, match="is a folder: name a new file"):
        TraceWriter(tmp_path, HEADER)


@pytest.mark.parametrize("place", ["nowhere/t", ".", "nul\0"])
def test_places_where_no_file_can_be_are_one_line(tmp_path, place):
    with pytest.raises(SpmoeError) as error:
        TraceWriter(tmp_path / place, HEADER)
    assert "\n" not in str(error.value)


def test_a_recording_of_nothing_leaves_no_file(tmp_path):
    TraceWriter(tmp_path / "t", HEADER).close()
    assert not (tmp_path / "t").exists()


def test_what_took_the_place_of_an_empty_recording_stays(tmp_path):
    writer = TraceWriter(tmp_path / "t", HEADER)
    (tmp_path / "t").unlink()
    other = record(tmp_path / "t").read_bytes()
    writer.close()
    assert (tmp_path / "t").read_bytes() == other


def test_a_full_disk_ends_the_recording_and_not_the_answer(tmp_path, caplog):
    class Full:
        def write(self, data):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.add("decode", LAYERS, 2, 2)
    writer._file.close()
    writer._file = Full()
    with caplog.at_level(logging.WARNING, "spmoe_lite"):
        for _ in range(3):
            writer.add("decode", LAYERS, 2, 2)
    assert len(caplog.messages) == 1 and "no further pass is recorded" in caplog.messages[0]
    assert len(read_trace(tmp_path / "t").passes) == 1


def test_what_a_filling_disk_takes_of_a_line_is_cut_off_again(tmp_path, caplog):
    path = record(tmp_path / "whole", passes=3)
    room = len(path.read_bytes()) - 10

    class Filling(io.FileIO):
        def write(self, data):
            return super().write(data[: room - self.tell()])

    writer = TraceWriter(tmp_path / "t", HEADER)
    writer._file.close()
    writer._file = Filling(tmp_path / "t", "r+")
    writer._file.seek(0, io.SEEK_END)
    for _ in range(4):
        writer.add("decode", LAYERS, 1, 1, [(1, 0, [3, 2])])
    writer.close()
    assert len(caplog.messages) == 1 and "no further pass is recorded" in caplog.messages[0]
    lines = path.read_bytes().splitlines(keepends=True)
    assert (tmp_path / "t").read_bytes() == b"".join(lines[:3])


def test_every_cut_of_a_file_gives_the_passes_before_it(tmp_path, caplog):
    whole = record(tmp_path / "t").read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(ends[0], len(whole)):
        (tmp_path / "cut").write_bytes(whole[:length])
        caplog.clear()
        with caplog.at_level(logging.WARNING, "spmoe_lite"):
            read = read_trace(tmp_path / "cut").passes
        full = sum(length >= end - 1 for end in ends[1:])  # without its line end a line is whole
        assert len(read) == full
        assert len(caplog.messages) == (length not in ends and length + 1 not in ends)


HEAD = '{"trace":1,"model":"m","layers":1,"experts":4,"k":2,"slots":4,"draft_tokens":0,' + (
    '"expert_dtype":"bf16","expert_bytes":8}'
)
LINE = '{"kind":"decode","rows":1,"accepted":1,"tokens":1,"experts":[[0,3]]}'


def test_the_shortest_trace_is_read_and_unknown_keys_are_skipped(tmp_path):
    line = LINE[:-1] + ',"seconds":0.5}'
    (tmp_path / "t").write_text(f"{HEAD[:-1]},'x':1}}\n".replace("'", '"') + line + "\n")
    (one,) = read_trace(tmp_path / "t").passes
    assert one == Pass("decode", 1, 1, 1, [], [[0, 3]])


@pytest.mark.parametrize(
    "old, new",
    [
        ('"decode"', '"other"'),
        ('"rows":1', '"rows":0'),
        ('"rows":1', '"rows":2'),
        ('"rows":1', '"rows":true'),
        ('"rows":1', '"rows":1e0'),
        ('"accepted":1', '"accepted":2'),
        ('"accepted":1', '"accepted":-1'),
        ('"tokens":1', '"tokens":2'),
        ("[[0,3]]", "[[0,4]]"),
        ("[[0,3]]", "[[-1,3]]"),
        ("[[0,3]]", "[[0,true]]"),
        ("[[0,3]]", '[[0,"3"]]'),
        ("[[0,3]]", "[[0]]"),
        ("[[0,3]]", "[[0,3],[0,3]]"),
        ("[[0,3]]", "[]"),
        ("[[0,3]]", "3"),
        ("[[0,3]]", "[" * 100_000),
        ("[[0,3]]", '[[0,3]],"predictions":3'),
        ("[[0,3]]", '[[0,3]],"predictions":[[0,0]]'),
        ("[[0,3]]", '[[0,3]],"predictions":[[1,0,[2]]]'),
        ("[[0,3]]", '[[0,3]],"predictions":[[0,1,[2]]]'),
        ("[[0,3]]", '[[0,3]],"predictions":[[0,0,[4]]]'),
        (LINE, ""),
        (LINE, "[]"),
        (LINE, "\x00"),
    ],
)
def test_a_line_that_is_no_pass_is_refused_with_file_and_number(tmp_path, old, new):
    path = tmp_path / "t"
    path.write_text("\n".join([HEAD, LINE, LINE.replace(old, new), LINE]) + "\n")
    with pytest.raises(DamagedError, match=r"t line 3 is no pass of a trace") as error:
        read_trace(path)
    assert "\n" not in str(error.value)


def test_a_line_without_end_is_not_read_to_it(tmp_path, monkeypatch):
    monkeypatch.setattr("spmoe_lite.trace.MAX_LINE_BYTES", 1 << 16, raising=False)
    path = record(tmp_path / "t")
    os.truncate(path, 1 << 20)  # zeros, as a lost power supply may leave them
    with pytest.raises(DamagedError, match="line 4 is no pass of a trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "old, new",
    [
        ('"trace":1', '"trace":0'),
        ('"trace":1', '"trace":"1"'),
        ('"trace":1,', ""),
        ('"layers":1', '"layers":0'),
        ('"layers":1', '"layers":1048577'),
        ('"k":2', '"k":5'),
        ('"slots":4', '"slots":5'),
        ('"slots":4', '"slots":1000000000'),
        ('"expert_bytes":8', f'"expert_bytes":1{"0" * 400}'),
        ('"model":"m"', '"model":1'),
        ('"model":"m"', '"model":"m","draft":1'),
        ('"model":"m"', '"model":"m","link":0'),
        ('"model":"m"', '"model":"m","link":1e-320'),
        ('"model":"m"', '"model":"m","link":NaN'),
        ('"model":"m"', '"model":"m","link":"5"'),
        (HEAD, "hello"),
        (HEAD, ""),
        (HEAD, "\xff" * (1 << 17)),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path, old, new):
    (tmp_path / "t").write_text(HEAD.replace(old, new) + "\n", encoding="latin-1")
    with pytest.raises(DamagedError, match=r"t line 1 is no header of a trace \(.*; give a file"):
        read_trace(tmp_path / "t")


def test_newer_versions_and_missing_files_are_named(tmp_path):
    (tmp_path / "t").write_text(HEAD.replace('"trace":1', '"trace":2') + "\n")
    with pytest.raises(UnsupportedError, match="version 2, this program reads up to 1"):
        read_trace(tmp_path / "t")
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(NotFoundError, match="--trace FILE"):
            read_trace(path)


# The engine


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """A target of 3 layers x 8 experts, and a poor draft of its shape."""
    folder = tmp_path_factory.mktemp("packs")
    shape = {"layers": 3, "scale_head": 4.0, "experts": 8, "hidden": 128, "intermediate": 192}
    sources = {name: tiny.tiny_mixtral(folder / name, **shape) for name in ("target", "noisy")}
    disturb(sources["noisy"], 0.12)
    return {
        name: convert(source, out=folder / f"{name}.spmoe").path for name, source in sources.items()
    }


def answer(pack, draft, trace, prompt=(1, 17, 300), **options):
    """Text of a recorded run, and its counters."""
    with Engine.load(pack, draft, trace=trace, **({"device": "cpu"} | options)) as engine:
        result = engine.generate(list(prompt), max_tokens=40, sampling=SamplingParams()).result
        return result.token_ids, engine.counters.copy()


def test_an_answer_is_recorded_pass_by_pass(packs, tmp_path):
    prompt = [1, *(3 + i * 37 % 300 for i in range(40))]
    options = {"prompt": prompt, "slots": 12, "cutoff": 3}
    text, counters = answer(packs["target"], packs["noisy"], tmp_path / "t", **options)
    trace = read_trace(tmp_path / "t")
    header, (first, *rest) = trace.header, trace.passes
    assert (header.model, header.draft) == ("target", "noisy")
    assert (header.layers, header.experts, header.k, header.slots) == (3, 8, 2, 12)
    assert (first.kind, first.rows, first.accepted, first.tokens) == ("prefill", 41, 41, 1)
    assert first.predictions == []
    assert {one.kind for one in rest} == {"decode"}
    assert sum(one.tokens for one in trace.passes) == len(text) == counters.tokens
    assert len(trace.passes) == counters.steps
    drafted = [one for one in rest if one.rows > 1]
    assert any(one.accepted < one.rows for one in drafted)  # a poor draft
    for one in drafted:
        assert [p[:2] for p in one.predictions] == [
            (layer, row) for row in range(one.rows - 1) for layer in range(3)
        ]
    assert answer(packs["target"], packs["noisy"], None, **options)[0] == text


def test_a_pass_that_was_not_kept_is_not_recorded(packs, tmp_path):
    with Engine.load(packs["target"], device="cpu", slots=12, trace=tmp_path / "t") as engine:
        pieces = engine.generate([1, 17, 300], max_tokens=20)
        for _ in range(3):
            next(pieces)
        pieces.close()
        assert len(read_trace(tmp_path / "t").passes) == engine.counters.steps


@pytest.mark.parametrize("draft", [None, "noisy"])
@pytest.mark.parametrize(
    "policy, slots", [("layer-lru", 15), ("layer-lru", 20), ("global-lru", 11)]
)
def test_replay_counts_what_the_engine_counted(packs, tmp_path, draft, policy, slots):
    """The whole run, from empty slots; no layer of a pass needs more slots than it has."""
    draft = draft and packs[draft]
    options = {"slots": slots, "prefetch": False, "draft_tokens": 1, "policy": policy}
    _, counters = answer(packs["target"], draft, tmp_path / "t", prompt=(1, 17), **options)
    trace = read_trace(tmp_path / "t")
    assert all(len(set(layer)) <= 5 for one in trace.passes for layer in one.experts)
    (score,) = compare(trace, policies=[policy], warm_up=0).scores
    assert counters.loads == score.misses == score.copies > 24
    assert counters.bytes_moved == score.copies * score.expert_bytes
    assert (counters.accesses, counters.access_hits) == (score.accesses, score.access_hits)
    assert (counters.unique, counters.unique_hits) == (score.unique, score.unique_hits)
    assert counters.tokens == score.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("pin", ["all", "none"])
def test_a_gpu_records_the_same_passes_captured_or_not(packs, tmp_path, pin):
    options = {"device": "cuda", "slots": 12, "pin": pin, "cutoff": 3}
    text, counters = answer(packs["target"], packs["noisy"], tmp_path / "t", **options)
    passes = read_trace(tmp_path / "t").passes
    assert sum(one.tokens for one in passes) == len(text) and len(passes) == counters.steps
    assert any(one.predictions for one in passes)
    accesses = sum(one.accepted * 2 * 3 for one in passes if one.kind == "decode")
    assert counters.accesses == accesses


def test_what_cannot_be_recorded_is_refused_before_the_weights(packs, tmp_path, monkeypatch):
    def loaded(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Loader, "load_models", loaded)
    record(tmp_path / "t")
    with pytest.raises(UsageError, match="exists"):
        Engine.load(packs["target"], device="cpu", trace=tmp_path / "t")
    dense = tiny.tiny_pack(tmp_path, kind="mistral")
    with pytest.raises(UsageError, match="no experts to record"):
        Engine.load(dense, device="cpu", trace=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_measured_rate_of_copies_is_recorded(packs, tmp_path):
    from spmoe_lite.cutoff import Profile, save_profile

    with Engine.load(packs["target"], device="cpu", slots=12, home=tmp_path) as engine:
        save_profile(engine.profile_path, Profile(0.5, 1.0, 1.0))
        stride = engine.plan.slot_bytes
    answer(packs["target"], None, tmp_path / "t", slots=12, home=tmp_path)
    header = json.loads((tmp_path / "t").read_text().splitlines()[0])
    assert header["link"] == pytest.approx(stride / 0.5e-3 / 1e9)
