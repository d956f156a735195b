"""Synthetic pairs: what is written, that it is a pack as any other, and forced acceptance."""

import errno
import os
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from spmoe_lite import Engine, synthetic
from spmoe_lite.config import SamplingParams
from spmoe_lite.errors import Cancelled, CapacityError, SpmoeError, UsageError
from spmoe_lite.hostmap import HostMap
from spmoe_lite.pack import Pack
from spmoe_lite.plan import ModelSize
from spmoe_lite.precision import matrix_bytes, scheme_of
from spmoe_lite.sampling import Sampler
from spmoe_lite.synthetic import ForcedAcceptance, Pair
from tests.eager_graphs import capture, without_gpu


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    pair = Pair.of("tiny", experts="fp32")
    return synthetic.write_pair(pair, tmp_path_factory.mktemp("synthetic"))


def test_a_pair_is_two_packs_that_pass_every_check(packs):
    for path in packs:
        with Pack.open(path) as pack:
            pack.verify()
    target, draft = map(Pack.open, packs)
    shared, other = target.load_dense(), draft.load_dense()
    both = {name for name in shared if name in other}
    assert len(both) == 3 + 6 * 4  # embedding, norm, head; norms and attention of four layers
    assert all(torch.equal(shared[name], other[name]) for name in both)
    target.close()
    draft.close()


def test_a_pair_is_the_same_bytes_every_time(packs, tmp_path):
    again = synthetic.write_pair(Pair.of("tiny", experts="fp32"), tmp_path)
    for before, after in zip(packs, again, strict=True):
        assert Pack.open(before).files == Pack.open(after).files


@pytest.mark.parametrize("dtype", ["int4-g64z", "int8-g64", "int4-g32", "bf16", "fp16", "fp32"])
def test_weights_have_the_size_that_is_asked_for(dtype):
    weight = synthetic.random_weight(dtype, (512, 1024), 0.5, "one")
    values = weight if scheme_of(dtype) is None else weight.dequantize()
    found = float(values.float().square().mean().sqrt()) * 1024**0.5
    assert 0.3 < found < 0.8 and torch.isfinite(values).all()
    again = synthetic.random_weight(dtype, (512, 1024), 0.5, "two")
    assert synthetic._bytes(again) == matrix_bytes(dtype, 512, 1024)
    other = again if scheme_of(dtype) is None else again.dequantize()
    assert not torch.equal(values, other)


@pytest.mark.parametrize("experts", ["fp32", "int4"])
def test_sizes_are_known_before_a_pair_is_written(packs, tmp_path, experts):
    pair = Pair.of("tiny", experts=experts)
    path = packs[0] if experts == "fp32" else synthetic.write_pair(pair, tmp_path)[0]
    with Pack.open(path) as pack:
        assert pair.target_size == ModelSize.of(pack)


def test_layers_beyond_the_distinct_ones_are_the_same_files(tmp_path, monkeypatch):
    monkeypatch.setattr(synthetic, "DISTINCT_BYTES", 1 << 20)
    pair = Pair.of("tiny")
    assert pair.distinct == 2 and str(pair).startswith(
        "tiny and tiny-draft, random weights, 4 layers"
    )
    target, draft = synthetic.write_pair(pair, tmp_path)
    inodes = [os.stat(path).st_ino for path in sorted((target / "experts").iterdir())]
    assert inodes[:2] == inodes[2:] and len(set(inodes)) == 2
    on_disk = {os.stat(p).st_ino: p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()}
    assert pair.disk_bytes <= sum(on_disk.values()) < pair.disk_bytes + 200_000
    with Pack.open(target) as pack:
        pack.verify()
        host = HostMap(pack, torch.device("cpu"))
        addresses = {host.address(layer, e) for layer in range(4) for e in range(8)}
        assert len(addresses) == 32  # each layer is mapped by itself
        assert pack.expert_bytes(0, 5).tobytes() == pack.expert_bytes(2, 5).tobytes()
        host.close()
    with Engine.load(target, draft, device="cpu", slots=12, draft_tokens=2) as engine:
        assert len(engine.generate("x", max_tokens=4).result.token_ids) == 4


def test_the_draft_s_states_point_at_the_target_s_experts(packs):
    with Engine.load(*packs, device="cpu", slots=16, draft_tokens=3, cutoff=4) as engine:
        result = engine.generate("The quick brown fox", max_tokens=48).result
    counters = result.stats.counters
    assert counters.predicted_used > 0.9 * counters.predicted > 0
    assert result.stats.acceptance > 0.6 and result.finish_reason == "length"
    assert len(set(result.token_ids)) > 20  # as varied as 512 tokens allow, not one again and again
    assert len(Counter(result.token_ids)) > 3


@pytest.mark.parametrize(
    "given, said",
    [
        ({"name": "gpt-5"}, "--synthetic gpt-5: one of mixtral-8x7b, tiny"),
        ({"experts": "int3"}, "--experts int3: one of fp32, bf16, int8, int4"),
        ({"layers": 5}, "--layers 5: tiny has 1 to 4"),
        ({"layers": 0}, "--layers 0: tiny has 1 to 4"),
    ],
)
def test_what_there_is_not_is_one_line(given, said):
    with pytest.raises(UsageError, match=f"^{said}$"):
        Pair.of(**({"name": "tiny"} | given))


def test_mixtral_at_full_size_says_what_it_takes():
    pair = Pair.of("mixtral-8x7b")
    assert 23.9e9 < pair.expert_bytes < 24.1e9 and pair.distinct == 3
    assert 6e9 < pair.disk_bytes < 8e9
    assert Pair.of("mixtral-8x7b", layers=2, experts="bf16").distinct == 1


def test_a_full_disk_and_a_cancel_leave_nothing(tmp_path, monkeypatch):
    class Usage:
        free = 1000

    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    cancel = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(synthetic.shutil, "disk_usage", lambda path: Usage)
        with (
            pytest.raises(CapacityError, match="takes [0-9.]+ MB, 1.0 kB are free"),
            synthetic.temporary_pair(Pair.of("tiny"), tmp_path),
        ):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with (
            pytest.raises(CapacityError, match="full: the synthetic pair is not .*; give another"),
            synthetic.temporary_pair(Pair.of("tiny"), tmp_path),
        ):
            pass
    with (
        pytest.raises(Cancelled),
        synthetic.temporary_pair(
            Pair.of("tiny"), tmp_path, cancel=cancel, on_progress=lambda p: cancel.set()
        ),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / f"new/{synthetic.PREFIX}killed/tiny.spmoe.partial").mkdir(parents=True)
    with synthetic.temporary_pair(Pair.of("tiny"), tmp_path / "new") as (target, draft):
        assert target.parent == draft.parent and Pack.open(target).name == "tiny"
        assert list((tmp_path / "new").iterdir()) == [
            target.parent
        ]  # what a killed run left is gone
        with synthetic.temporary_pair(Pair.of("tiny"), tmp_path / "new"):
            assert Pack.open(target).name == "tiny"  # what another run uses stays
    assert list((tmp_path / "new").iterdir()) == []


def test_folders_that_were_made_for_a_pair_go_with_it(tmp_path):
    folder, cancel = tmp_path / "a" / "b" / "c", threading.Event()
    with synthetic.temporary_pair(Pair.of("tiny"), folder) as (target, _):
        assert target.is_relative_to(folder)
    assert list(tmp_path.iterdir()) == []
    cancel.set()
    with pytest.raises(Cancelled), synthetic.temporary_pair(Pair.of("tiny"), folder, cancel=cancel):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("no folder")
    with pytest.raises(SpmoeError), synthetic.temporary_pair(Pair.of("tiny"), folder):
        pass
    (tmp_path / "a").unlink()
    with synthetic.temporary_pair(Pair.of("tiny"), folder):
        (tmp_path / "a" / "notes").write_text("mine")
    assert [path.name for path in tmp_path.rglob("*")] == ["a", "notes"]


@pytest.mark.parametrize("name", ["synthetic-images", synthetic.PREFIX + "images"])
def test_what_a_user_keeps_where_pairs_are_written_stays(tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "1.png").write_text("mine")
    (tmp_path / (name + ".txt")).write_text("mine")
    (tmp_path / (name + "-link")).symlink_to(folder)
    before = sorted(tmp_path.rglob("*"))
    with synthetic.temporary_pair(Pair.of("tiny"), tmp_path):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def forced(rate, count, start, best=None):
    sampler = Sampler(SamplingParams(), 32, 0)
    logits = torch.eye(32)[: count + 1]  # row i: token i
    return ForcedAcceptance(rate)(list(range(20, 20 + count)), logits, sampler, [0] * start, best)


def test_forced_acceptance_depends_on_the_place_alone():
    assert forced(1, 4, 7).tokens == [20, 21, 22, 23, 4]
    assert forced(0, 4, 7).tokens == [0] and forced(0, 0, 7).num_accepted == 0
    assert forced(1, 2, 7, [9, 8, 7]).tokens == [20, 21, 7]
    kept = [bool(forced(0.7, 1, place).num_accepted) for place in range(2000)]
    assert 0.66 < sum(kept) / len(kept) < 0.74
    for place in range(50):
        run = next(i for i in range(9) if i == 8 or not kept[place + i])
        assert forced(0.7, 8, place).num_accepted == run
    with pytest.raises(UsageError, match=r"^--acceptance 1.5: 0 to 1$"):
        ForcedAcceptance(1.5)


@pytest.mark.parametrize("slots", [16, 32])
def test_captured_steps_keep_what_is_forced_as_those_of_the_host_do(packs, monkeypatch, slots):
    answers = []
    for captured in (False, True):
        with monkeypatch.context() as patch:
            how = {"device": "cpu", "slots": slots, "draft_tokens": 3, "prefetch": False}
            with Engine.load(*packs, **how) as engine:
                if captured:
                    without_gpu(patch)
                    capture(engine)
                engine.decoder.verify = ForcedAcceptance(0.6)
                result = engine.generate("The quick brown fox", max_tokens=40).result
        counted = result.stats.counters
        answers.append((result.token_ids, counted.steps, counted.drafted, counted.accepted))
    assert answers[0] == answers[1] and 0 < answers[0][3] < answers[0][2]


def test_packs_are_written_where_they_are_asked_for(tmp_path):
    target, draft = synthetic.write_pair(Pair.of("tiny", layers=1), Path(tmp_path))
    assert (target.name, draft.name) == ("tiny.spmoe", "tiny-draft.spmoe")
