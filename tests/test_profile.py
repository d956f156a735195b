"""Profiles: what is measured, kept and used; the model of a step's time by hand-made figures."""

import json
import threading

import pytest
import torch

from spmoe_lite import profile as profiles
from spmoe_lite import ramtier
from spmoe_lite.converters import convert
from spmoe_lite.cutoff import Profile, load_profile, save_profile
from spmoe_lite.engine import Engine
from spmoe_lite.errors import Cancelled, UsageError
from spmoe_lite.loading import profile_path
from spmoe_lite.profile import profile
from tests import tiny
from tests.eager_graphs import capture, without_gpu


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


def test_passes_are_as_short_as_the_context(packs):
    with Engine.load(*packs, device="cpu", slots=6, ctx_size=2, draft_tokens=31) as engine:
        measured = profile(engine)
        assert measured.verify_rows == 1 and measured.acceptance is None


def test_without_a_draft_the_link_and_the_layers_are_measured(packs):
    with Engine.load(packs[0], device="cpu", slots=6) as engine:
        measured = profile(engine)
        assert measured.draft_token_ms == 0 and measured.acceptance is None
        assert measured.plain_layer_ms == measured.target_layer_ms > 0


def test_the_disk_is_read_as_the_ram_tier_reads_it(packs, monkeypatch):
    reads, read = [], ramtier._Disk.read

    def watched(self, layer, expert, out, offset):
        reads.append((self._bypass, layer, expert))
        read(self, layer, expert, out, offset)

    monkeypatch.setattr(ramtier._Disk, "read", watched)
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
