"""Profiles: what is measured, kept and used; the model of a step's time by hand-made figures."""

import contextlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from spmoe_lite import cli, cutoff, diskreads, loading, ramtier, terminal
from spmoe_lite import profile as profiles
from spmoe_lite.converters import convert
from spmoe_lite.cutoff import Profile, load_profile, save_profile
from spmoe_lite.engine import Engine
from spmoe_lite.errors import Cancelled, SpmoeError, UsageError
from spmoe_lite.loading import profile_path
from spmoe_lite.model import Transformer
from spmoe_lite.profile import measure, profile
from spmoe_lite.progress import Progress
from tests import tiny
from tests.eager_graphs import capture, capture_drafts, without_gpu


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    hf = tiny.tiny_mixtral(folder / "t", layers=3, experts=8, scale_head=4.0)
    target = convert(hf, out=folder / "target.spmoe").path
    return target, tiny.tiny_pack(folder / "d", kind="mistral", layers=3)


def test_it_is_measured_kept_and_used(packs):
    with Engine.load(*packs, device="cpu", slots=6) as engine:
        measured = profile(engine)
        found = measured.to_dict()
        assert found.pop("read_gbps") is None  # nothing but the host reads the experts
        assert 0 <= found.pop("acceptance") <= 1
        assert 0 <= found.pop("miss_ratio") <= 24 / 18
        assert min(found.values()) > 0 and measured.verify_rows == 5
        assert measured.expert_copy_ms == pytest.approx(
            engine.plan.slot_bytes / measured.copy_gbps / 1e6
        )
        path = engine.profile_path
        assert load_profile(path) == measured
        assert profile_path(["target", packs[1].stem], engine.device, None) == path
        first = engine.generate([0, 5, 6], max_tokens=8).result.token_ids
    with Engine.load(*packs, device="cpu", slots=12) as engine:  # the slots change no time
        assert engine.decoder.drift.profile == measured
        assert engine.generate([0, 5, 6], max_tokens=8).result.token_ids == first


def test_packs_with_names_in_other_letters_keep_times_of_their_own(tmp_path):
    cpu = torch.device("cpu")
    assert profile_path(["日本"], cpu, tmp_path) != profile_path(["中文"], cpu, tmp_path)
    assert profile_path(["Ещё"], cpu, tmp_path).parent == tmp_path / "profiles"


def test_the_first_draft_is_timed_on_the_engine_s_own_gpu(packs, monkeypatch, tmp_path):
    """Another may be current: streams and events, and what waits for them, would be that one's."""
    inside, passes, forward = [], [], Transformer.forward

    @contextlib.contextmanager
    def current(device):
        inside.append(device)
        yield
        inside.pop()

    def noted(*args, **how):
        passes.append(list(inside))
        return forward(*args, **how)

    monkeypatch.setattr(loading, "current", current)
    monkeypatch.setattr(Transformer, "forward", noted)
    with Engine.load(*packs, device="cpu", slots=6, home=tmp_path) as engine:
        assert passes == 2 * [[engine.device]]


@pytest.mark.parametrize("options", [{"slots": 6}, {"slots": 24}, {"slots": 6, "ctx_size": 8}])
def test_captured_passes_are_timed_as_they_run(packs, options, monkeypatch, tmp_path):
    without_gpu(monkeypatch)
    options = {"draft_tokens": 2, "prefetch": False, "home": tmp_path} | options
    with Engine.load(*packs, device="cpu", **options) as engine:
        first = engine.generate([0, 5, 6], max_tokens=4).result.token_ids
        capture(engine)
        measured = profile(engine)
        assert measured.verify_rows == 3
        assert measured.draft_token_ms == 0.5  # a draft of two takes what every event says: 1 ms
        assert 0 <= measured.plain_layer_ms <= 1 / 3 and 0 <= measured.target_layer_ms <= 1 / 3
        assert measured.copy_gbps > 0
        assert engine.generate([0, 5, 6], max_tokens=4).result.token_ids == first


@pytest.mark.parametrize("options", [{}, {"ctx_size": 8}])
def test_captured_drafts_are_timed_as_they_run(packs, options, monkeypatch, tmp_path):
    without_gpu(monkeypatch)
    options = {"slots": 6, "draft_tokens": 4, "home": tmp_path} | options
    with Engine.load(*packs, device="cpu", **options) as engine:
        first = engine.generate([0, 5, 6], max_tokens=4).result.token_ids
        passes, counts = capture_drafts(engine).passes, []
        replay = passes.replay
        passes.replay = lambda i: counts.append(i) or replay(i)
        monkeypatch.setattr(profiles, "_median_ms", lambda once: once() + 8.0)
        measured = profile(engine)
        assert counts[-4:] == [0, 1, 2, 3] and measured.draft_token_ms == 2.0
        assert engine.generate([0, 5, 6], max_tokens=4).result.token_ids == first


def test_passes_are_as_short_as_the_context(packs, tmp_path):
    with Engine.load(
        *packs, device="cpu", slots=6, ctx_size=2, draft_tokens=31, home=tmp_path
    ) as engine:
        measured = profile(engine)
        assert measured.verify_rows == 1 and measured.acceptance is None


def test_without_a_draft_the_link_and_the_layers_are_measured(packs):
    with Engine.load(packs[0], device="cpu", slots=6) as engine:
        measured = profile(engine)
        assert measured.draft_token_ms == 0 and measured.acceptance is None
        assert measured.plain_layer_ms == measured.target_layer_ms > 0


def test_the_disk_is_read_as_the_ram_tier_reads_it(packs, monkeypatch):
    reads, read = [], diskreads._Disk.read

    def watched(self, layer, expert, out, offset):
        reads.append((self._bypass, layer, expert))
        read(self, layer, expert, out, offset)

    monkeypatch.setattr(diskreads._Disk, "read", watched)
    monkeypatch.setattr(profiles, "DISK_BYTES", 1 << 16)
    with Engine.load(packs[0], device="cpu", slots=6) as engine:
        count = max(2, min(24, (1 << 16) // engine.plan.slot_bytes))
        assert profiles._disk_gbps(engine) > 0
        assert set(reads) == {(True, i % 3, i // 3) for i in range(count)}
        monkeypatch.setattr(ramtier, "available_bytes", lambda device: 0)
        assert profiles._disk_gbps(engine) is None


def test_a_dense_model_has_nothing_to_measure(packs):
    with Engine.load(packs[1], device="cpu") as engine, pytest.raises(UsageError, match="experts"):
        profile(engine)


def test_it_can_be_stopped_and_leaves_nothing(packs, tmp_path):
    with Engine.load(*packs, device="cpu", slots=6, home=tmp_path) as engine:
        cancel = threading.Event()
        with pytest.raises(Cancelled):
            profile(engine, cancel, lambda progress: cancel.set())
        assert not engine.profile_path.exists()
        assert engine.generate([0, 5], max_tokens=2).result.completion_tokens == 2


def test_what_older_versions_kept_is_read_and_what_is_no_figure_is_not(tmp_path):
    path, old = tmp_path / "p.json", {
        "expert_copy_ms": 1.0, "draft_token_ms": 2.0, "target_layer_ms": 3.0
    }  # fmt: skip
    path.write_text(json.dumps(old))
    assert load_profile(path) == Profile(1.0, 2.0, 3.0)
    for bad in ({"acceptance": "x"}, {"copy_gbps": -1}, {"expert_copy_ms": None}, {"other": 1}):
        path.write_text(json.dumps(old | bad))
        assert load_profile(path) is None
    whole = Profile(1.0, 2.0, 3.0, 0.5, 5, 50.0, 49.0, 0.8, 0.6, 1.5)
    save_profile(path, whole)
    assert load_profile(path) == whole


# --- a poorer profile, and one that cannot be kept


WHOLE = Profile(1.0, 2.0, 3.0, 0.5, 5, 50.0, None, 0.8, 0.6, 1.5)


@pytest.mark.parametrize("options", [{"draft_tokens": 0}, {"ctx_size": 2}, {"captured": True}])
def test_what_a_run_does_not_measure_is_kept(packs, options, tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "_disk_gbps", lambda engine: None)
    captured = {"draft_tokens": 0} if options.pop("captured", False) else {}
    with Engine.load(
        *packs, device="cpu", slots=24, home=tmp_path, prefetch=False, **options | captured
    ) as engine:
        save_profile(engine.profile_path, WHOLE)
        if captured:
            without_gpu(monkeypatch)
            capture(engine)
        kept = profile(engine)
        assert load_profile(engine.profile_path) == engine.decoder.drift.profile == kept
        for name in ("target_layer_ms", "verify_rows", "acceptance", "miss_ratio", "disk_gbps"):
            assert getattr(kept, name) == getattr(WHOLE, name)
        for name in ("expert_copy_ms", "plain_layer_ms", "copy_gbps"):
            assert getattr(kept, name) != getattr(WHOLE, name)
        assert (kept.draft_token_ms == WHOLE.draft_token_ms) == bool(captured)


def test_what_is_measured_replaces_what_was_kept(packs, tmp_path):
    with Engine.load(*packs, device="cpu", slots=6, draft_tokens=2, home=tmp_path) as engine:
        save_profile(engine.profile_path, WHOLE)
        kept, old = profile(engine).to_dict(), WHOLE.to_dict()
        assert {name for name in kept if kept[name] == old[name]} == {"read_gbps"}
        assert kept["verify_rows"] == 3


@pytest.mark.parametrize("made_since", [0, 1])
def test_nothing_is_kept_of_packs_made_since(packs, made_since, tmp_path):
    with Engine.load(*packs, device="cpu", slots=24, draft_tokens=0, home=tmp_path) as engine:
        save_profile(engine.profile_path, WHOLE)
        before = (packs[made_since] / "manifest.json").stat().st_mtime - 1
        os.utime(engine.profile_path, (before, before))
        kept = profile(engine)
        assert kept.verify_rows == 1 and kept.acceptance is None and kept.miss_ratio is None


def test_a_place_that_cannot_be_written_is_refused_before_measuring(packs, tmp_path, monkeypatch):
    with Engine.load(*packs, device="cpu", slots=6, home=tmp_path) as engine:
        engine.profile_path.mkdir(parents=True)
        monkeypatch.setattr(profiles, "_answers", lambda *_: pytest.fail("measured"))
        with pytest.raises(SpmoeError, match="cannot write"):
            profile(engine)
        engine.profile_path.rmdir()

        def refused(self, *_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", refused)
        with pytest.raises(SpmoeError, match="check permissions") as said:
            measure(engine)
        assert str(engine.profile_path) in str(said.value)


# --- the command


def spmoe(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main([str(arg) for arg in args])
    return stop.value.code


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    return tmp_path


def quick(monkeypatch, measured=WHOLE):
    """Nothing is measured: the command alone is tested."""
    monkeypatch.setattr(profiles, "measure", lambda engine, cancel, on_progress: measured)


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_figures_are_shown_even_if_they_cannot_be_kept(packs, flags, home, monkeypatch, capsys):
    def full(self, data):
        raise OSError(28, "No space left on device")

    quick(monkeypatch)
    monkeypatch.setattr(Path, "write_bytes", full)
    target, draft = packs
    assert spmoe("profile", target, "--draft", draft, "--slots", 6, *flags) == 4
    out, err = capsys.readouterr()
    if flags:
        assert json.loads(out) == WHOLE.to_dict()
    else:
        assert "draft tokens accepted" in out and "a layer, 5 tokens at once" in out
    path = profile_path(["target", draft.stem], torch.device("cpu"), home)
    last = err.splitlines()[-1]
    assert "disk full" in last and str(path) in last and "kept in" not in err
    assert os.listdir(path.parent) == []


def test_what_is_kept_from_before_is_named_not_shown(packs, home, monkeypatch, capsys):
    target, draft = packs
    save_profile(profile_path(["target", draft.stem], torch.device("cpu"), home), WHOLE)
    alone = replace(WHOLE, verify_rows=1, target_layer_ms=0.5, acceptance=None)
    quick(monkeypatch, alone)
    assert spmoe("profile", target, "--draft", draft, "--slots", 6, "--draft-tokens", 0) == 0
    out, err = capsys.readouterr()
    assert "a layer, one token " in out and "at once" not in out and "accepted" not in out
    assert "as kept before: target_layer_ms, verify_rows, acceptance\n" in err
    assert err.splitlines()[-1].startswith("kept in ")


EXTREMES = [
    Profile(0.0, 0.0, 0.0, 0.0, 0, 1e-6, None, 0.0, 0.0, 1e-6),
    Profile(0.0, 0.0, 0.0, 0.0, 5, 1e6, None, 1.0, 1e-9, 1e6),
    Profile(1e-9, 1e-9, 1e-9, 1e-9, 2, 1e6, None, 1.0, 1e-9, 1e6),
    Profile(1e9, 1e9, 1e9, 1e9, 1000, 1e-6, None, 5e-324, 1e5, 1e-6),
    Profile(1e-9, 1e9, 1e-9, 1e9, 2, 1e-6, None, 1.0, 1e5, 1e6),
    Profile(1e9, 1e-9, 1e9, 1e-9, 1000, 1e6, None, 0.0, 1e-9, 1e-6),
]


@pytest.mark.parametrize("kept", EXTREMES)
def test_whatever_is_accepted_can_be_planned_and_run_with(packs, kept, home, capsys):
    target, draft = packs
    save_profile(profile_path(["target", draft.stem], torch.device("cpu"), home), kept)
    pair = [target, "--draft", draft, "--slots", 6]
    assert spmoe("plan", *pair) == 0
    assert spmoe("plan", *pair, "--json") == 0
    assert spmoe("run", *pair, "-p", "hello", "-n", 8) == 0
    assert "bug" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[" * 100_000, '{"expert_copy_ms": 1' + "0" * 400 + "}"])
def test_a_damaged_file_is_a_line_of_every_command(packs, text, home, monkeypatch, capsys):
    target, draft = packs
    pair = [target, "--draft", draft, "--slots", 6]
    path = profile_path(["target", draft.stem], torch.device("cpu"), home)
    path.parent.mkdir()
    quick(monkeypatch)
    for command in (["plan", *pair], ["run", *pair, "-p", "hello", "-n", 2], ["profile", *pair]):
        path.write_text(text)
        cutoff._warn_once.cache_clear()  # each a process of its own
        assert spmoe(*command) == 0
        (line,) = [line for line in capsys.readouterr().err.splitlines() if str(path) in line][:1]
        assert "is not used" in line and line.endswith("; run profile again")
    assert load_profile(path) == WHOLE


def test_a_rate_below_one_is_not_shown():
    progress = Progress("profile", 1, 4, "measurements")
    assert terminal.describe(progress, 0.1) == "profile 1 of 4 measurements, 30 s left"
    assert terminal.describe(progress, 0.5) == "profile 1 of 4 measurements, 6 s left"
    assert (
        terminal.describe(progress, 2.0)
        == "profile 1 of 4 measurements, 2 measurements/s, 2 s left"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("pin", ["all", "none"])
def test_on_a_gpu_the_link_is_measured_by_copies_and_by_the_kernel(packs, pin, tmp_path):
    with Engine.load(*packs, device="cuda", slots=6, pin=pin, home=tmp_path) as engine:
        measured = profile(engine)
        assert (measured.read_gbps is None) == (pin == "none")
        assert measured.copy_gbps > 0 and measured.expert_copy_ms > 0
        assert measured.plain_layer_ms > 0 and measured.verify_rows == 5
        assert load_profile(engine.profile_path) == measured
        assert engine.profile_path.stem.endswith("-host") == (pin == "none")
        assert engine.generate([0, 5, 6], max_tokens=8).result.completion_tokens == 8


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("options", [{"slots": 6}, {"slots": 6, "pin": "none"}, {"slots": 24}])
def test_on_a_gpu_the_plan_is_a_cap(packs, options):
    def used():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        return total - free

    before = used()
    with Engine.load(*packs, device="cuda", **options) as engine:
        engine.generate([i % 90 for i in range(400)], max_tokens=40).result  # noqa: B018
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        assert total - free - before <= engine.plan.total_bytes
