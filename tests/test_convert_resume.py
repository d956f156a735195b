"""convert as a process: kill, cancel, full disk, second runs, the hub, and repack."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmoe_lite import library
from spmoe_lite.converters import convert, recipe, repack
from spmoe_lite.errors import (
    Cancelled,
    CapacityError,
    DamagedError,
    NetworkError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.manifest import Dtypes
from spmoe_lite.pack import Pack, view_weight
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.progress import Progress
from spmoe_lite.quant import QuantizedMatrix
from tests import stub_hub, tiny

ROOT = Path(__file__).resolve().parent.parent
LAYER_0 = "experts/layer-000.safetensors"


def contents(pack: Path) -> dict[str, Any]:
    """Every byte of a pack by hash, all files of the folder accounted for; `created` left out."""
    with Pack.open(pack) as opened:
        opened.verify()
        listed = set(opened.files) | {"manifest.json"}
    found = {p.relative_to(pack).as_posix() for p in pack.rglob("*") if p.is_file()}
    assert found == listed, "stray files in the pack"
    raw = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    del raw["created"], raw["sha256"]  # of the others too
    return raw


@pytest.fixture
def tmix(tmp_path: Path) -> Path:
    return tiny.tiny_mixtral(tmp_path / "tmix", layers=3)


# Kind J: partial files

KILL = textwrap.dedent("""
    import json, os, signal, sys, torch
    from pathlib import Path
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # a kill, unlike a power cut, loses nothing that was written
    sys.path.insert(0, sys.argv[1])
    from spmoe_lite.converters import convert
    from spmoe_lite.errors import SpmoeError

    source, base, options = Path(sys.argv[2]), Path(sys.argv[3]), json.loads(sys.argv[4])
    base.mkdir()

    def run(out, kill_at):
        '''Convert in a child that kills itself at its kill_at-th event; return how many it saw.'''
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            seen = 0
            def event(*_):
                nonlocal seen
                seen += 1
                if seen == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)
            def audit(name, args):
                if name in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir") and any(
                    str(base) in str(arg) for arg in args[:2]
                ):
                    event()
            sys.addaudithook(audit)
            convert(source, out=out, on_progress=event, **options)
            os.write(write, str(seen).encode())
            os._exit(0)
        os.close(write)
        _, status = os.waitpid(child, 0)
        data = os.read(read, 100)
        os.close(read)
        assert os.WIFSIGNALED(status) or os.waitstatus_to_exitcode(status) == 0, status
        return int(data) if data else None

    events = run(base / "clean.spmoe", 0)  # a few more or less: verification reports from threads
    killed = 0
    for point in range(1, events + 1, max(1, events // 14)):
        out = base / f"{point}.spmoe"
        killed += run(out, point) is None
        assert run(out, 0) is not None
    # one and the same conversion, killed again and again a little later
    out, point, kills = base / "again.spmoe", 5, 0
    while run(out, point) is None:
        kills, point = kills + 1, point + 17
    print(json.dumps({"events": events, "killed": killed, "again": kills}))
""")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills forked children")
@pytest.mark.parametrize("options", [{}, {"experts": "int4", "dense": "int8", "group": 32}])
def test_kind_j_o28_killed_anywhere_a_rerun_ends_as_a_clean_run(
    options: dict[str, Any], tmix: Path, tmp_path: Path
) -> None:
    base = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", KILL, str(ROOT), str(tmix), str(base), json.dumps(options)],
        capture_output=True,
        encoding="utf-8",
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["killed"] >= 12 and counts["again"] >= 3, counts
    clean = contents(base / "clean.spmoe")
    made = sorted(base.iterdir())
    assert len(made) >= counts["killed"] + 2 and all(path.suffix == ".spmoe" for path in made)
    for path in made:
        assert contents(path) == clean, path.name
    assert clean["linear_dtype"] == ("int8-g32" if options else "fp32")


def stop_after(share: float, cancel: threading.Event) -> Any:
    """A progress callback that sets `cancel` when so much of the stage `convert` is done."""

    def report(progress: Progress) -> None:
        if progress.stage == "convert" and progress.done >= share * progress.total:
            cancel.set()

    return report


def test_cancel_keeps_whole_files_and_a_rerun_goes_on(tmix: Path, tmp_path: Path) -> None:
    out, cancel = tmp_path / "o.spmoe", threading.Event()
    with pytest.raises(Cancelled):
        convert(tmix, out=out, cancel=cancel, on_progress=stop_after(0.6, cancel))
    partial = tmp_path / "o.spmoe.partial"
    assert not out.exists() and (partial / LAYER_0).is_file()
    assert not list(partial.rglob("*.tmp"))
    plans: list[Any] = []
    with pytest.raises(Cancelled):
        convert(tmix, out=out, confirm=plans.append)
    assert (
        plans[0].volumes[0].needed_bytes
        < plans[0].pack_bytes - (partial / LAYER_0).stat().st_size + 1
    )
    before = (partial / LAYER_0).stat()
    result = convert(tmix, out=out)
    assert not result.already_there and not partial.exists()
    after = (out / LAYER_0).stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert contents(out) == contents(convert(tmix, out=tmp_path / "tmix.spmoe").path)


def test_cancel_before_the_first_file_leaves_nothing(tmix: Path, tmp_path: Path) -> None:
    cancel = threading.Event()
    with pytest.raises(Cancelled):
        convert(tmix, out=tmp_path / "o.spmoe", cancel=cancel, on_progress=stop_after(0.2, cancel))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmix"]


def test_kind_j_o28_a_full_disk_is_one_line_and_can_go_on(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.fsync, 0

    def fsync(handle: int) -> None:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    out = tmp_path / "o.spmoe"
    with pytest.raises(CapacityError, match="disk full") as caught:
        convert(tmix, out=out)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)
    assert str(caught.value).startswith("disk full: the pack o is not finished, cannot write ")
    assert str(caught.value).endswith("the same command again: it goes on where it stopped")
    assert not out.exists() and not list(tmp_path.rglob("*.tmp"))
    monkeypatch.undo()
    convert(tmix, out=out)
    assert contents(out) == contents(convert(tmix, out=tmp_path / "tmix.spmoe").path)


def test_ram_that_is_refused_is_one_line_of_the_library_too(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_layer(*_: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8)

    old = tiny.tiny_pack(tmp_path)
    before = contents(old)
    with monkeypatch.context() as patch:
        patch.setattr(PackWriter, "write_layer", write_layer)
        for made, call in (
            ("the pack o", lambda: convert(tmix, out=tmp_path / "o.spmoe")),
            (f"the repacked {old.stem}", lambda: repack(old, experts="bf16")),
        ):
            with pytest.raises(CapacityError, match=f"^out of memory: {made} is not finished; end"):
                call()
    assert contents(old) == before
    convert(tmix, out=tmp_path / "o.spmoe")
    assert not repack(old, experts="bf16").already_there


def test_no_permission_is_one_line(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(SpmoeError, match="Permission denied") as caught:
        convert(tmix, out=tmp_path / "o.spmoe")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changed", ["weights", "experts", "embed", "group"])
def test_kind_j_o28_a_partial_of_other_options_is_never_mixed_in(
    changed: str, tmix: Path, tmp_path: Path
) -> None:
    out, cancel = tmp_path / "o.spmoe", threading.Event()
    options: dict[str, Any] = {}
    if changed == "group":
        shutil.rmtree(tmix)
        tiny.tiny_mixtral(tmix, layers=3, intermediate=128)
        options = {"experts": "int4", "group": 64}
    with pytest.raises(Cancelled):
        convert(tmix, out=out, cancel=cancel, on_progress=stop_after(0.6, cancel), **options)
    assert (tmp_path / "o.spmoe.partial" / LAYER_0).is_file()
    if changed == "weights":
        shutil.rmtree(tmix)
        tiny.tiny_mixtral(tmix, layers=3, seed=5)
    else:
        changes = {"experts": "bf16", "embed": "int8", "group": 32}
        options[changed] = changes[changed]
    convert(tmix, out=out, **options)
    assert contents(out) == contents(convert(tmix, out=tmp_path / "p.spmoe", **options).path)


def test_a_source_found_damaged_leaves_nothing(tmix: Path, tmp_path: Path) -> None:
    """The last thing written is bad: the layers before it go as well, a rerun could not use them."""
    shard = tmix / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"][3, 3] = float("nan")
    save_file(tensors, shard)
    with pytest.raises(DamagedError, match="lm_head"):
        convert(tmix, out=tmp_path / "o.spmoe")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tmix"]


# A second run


def test_already_there(tmix: Path, tmp_path: Path) -> None:
    out = tmp_path / "o.spmoe"
    assert not convert(tmix, out=out).already_there
    before = contents(out), (out / LAYER_0).stat().st_mtime_ns
    for options in ({}, {"experts": "fp32"}, {"experts": "fp32", "dense": "fp32"}):
        result = convert(tmix, out=out, **options)
        assert result.already_there and result.path == out
    assert (contents(out), (out / LAYER_0).stat().st_mtime_ns) == before


def test_already_there_counts_every_precision(tmp_path: Path) -> None:
    tmix, out = tiny.tiny_mixtral(tmp_path / "tmix", intermediate=128), tmp_path / "o.spmoe"
    options: dict[str, Any] = {"experts": "int4", "dense": "int8"}
    convert(tmix, out=out, **options)
    before = contents(out)
    for same in ({}, {"group": 64}, {"embed": "fp32"}, {"embed": "fp32", "group": 64}):
        assert convert(tmix, out=out, **options, **same).already_there
    for other in (
        {"group": 32},
        {"embed": "int8"},
        {"embed": "bf16"},
        {"dense": "int4"},
        {"dense": None},
    ):
        with pytest.raises(UsageError, match="experts int4-g64z, matrices int8-g64.*--force"):
            convert(tmix, out=out, **(options | other))
    assert contents(out) == before


@pytest.mark.parametrize("options", [{"experts": "bf16"}, {"dense": "bf16"}, {"embed": "int8"}])
def test_other_options_need_force(options: dict[str, str], tmix: Path, tmp_path: Path) -> None:
    out = convert(tmix, out=tmp_path / "o.spmoe").path
    before = contents(out)
    with pytest.raises(UsageError, match="--force"):
        convert(tmix, out=out, **options)
    assert contents(out) == before
    assert not convert(tmix, out=out, force=True, **options).already_there
    assert contents(out) == contents(convert(tmix, out=tmp_path / "p.spmoe", **options).path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["o.spmoe", "p.spmoe", "tmix"]


@pytest.mark.parametrize("what", ["one weight", "tokenizer", "config"])
def test_another_source_needs_force(what: str, tmix: Path, tmp_path: Path) -> None:
    out = convert(tmix, out=tmp_path / "o.spmoe").path
    if what == "one weight":
        path = next(tmix.glob("*-00001-*"))
        tensors = load_file(path)
        tensors["model.embed_tokens.weight"][7, 7] += 1
        save_file(tensors, path, metadata={"format": "pt"})
    elif what == "tokenizer":
        path = tmix / "tokenizer_config.json"
        path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    else:
        config = json.loads((tmix / "config.json").read_text(encoding="utf-8"))
        tiny.write_json(tmix / "config.json", config | {"rope_theta": 5e5})
    with pytest.raises(UsageError, match="--force"):
        convert(tmix, out=out)


def test_a_damaged_pack_in_the_way_says_how_to_replace_it(tmix: Path, tmp_path: Path) -> None:
    out = convert(tmix, out=tmp_path / "o.spmoe").path
    before = contents(out)
    with open(out / LAYER_0, "r+b") as file:
        file.truncate(1000)
    with pytest.raises(DamagedError, match="convert again with --force"):
        convert(tmix, out=out)
    convert(tmix, out=out, force=True)
    assert contents(out) == before


def test_force_does_not_delete_what_is_not_a_pack(tmix: Path, tmp_path: Path) -> None:
    out = tmp_path / "letters"
    out.mkdir()
    (out / "love.txt").write_text("x", encoding="utf-8")
    with pytest.raises(UsageError):
        convert(tmix, out=out, force=True)
    assert (out / "love.txt").read_text(encoding="utf-8") == "x"


def test_the_old_pack_stays_when_the_new_one_fails(tmix: Path, tmp_path: Path) -> None:
    out = convert(tmix, out=tmp_path / "o.spmoe").path
    before, cancel = contents(out), threading.Event()
    with pytest.raises(Cancelled):
        convert(
            tmix, out=out, experts="bf16", force=True, cancel=cancel,
            on_progress=stop_after(0.6, cancel),
        )  # fmt: skip
    assert contents(out) == before


# The hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with stub_hub.StubHub() as server:
        stub_hub.use(monkeypatch, server, tmp_path / "cache")
        yield server


def equal_weights(one: Path, other: Path) -> bool:
    return {k: v for k, v in contents(one).items() if k != "source"} == {
        k: v for k, v in contents(other).items() if k != "source"
    }


@pytest.mark.parametrize("low_disk", [False, True])
def test_from_the_hub(low_disk: bool, hub: Any, tmp_path: Path) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix", layers=3, shards=5)
    (source / "consolidated.safetensors").write_bytes(b"another set")
    commit = hub.add("acme/tiny", source)
    plans, seen = [], []

    def ok(plan: Any) -> bool:
        assert hub.requests(".safetensors") == hub.requests("index.json"), (
            "shards before the answer"
        )
        plans.append(plan)
        return True

    result = convert(
        "acme/tiny", home=tmp_path / "home", low_disk=low_disk, confirm=ok, on_progress=seen.append
    )
    assert result.path == tmp_path / "home" / "tiny.spmoe"
    assert equal_weights(result.path, convert(source, out=tmp_path / "p.spmoe").path)
    raw = contents(result.path)["source"]
    assert (raw["id"], raw["revision"]) == ("acme/tiny", commit)
    shards = sum(path.stat().st_size for path in source.glob("model-*.safetensors"))
    assert plans[0].download_bytes == shards and plans[0].revision == commit
    assert {"download", "convert", "verify"} <= {p.stage for p in seen}
    assert hub.requests("consolidated") == 0
    left = list((tmp_path / "cache").rglob("model-*.safetensors"))
    assert bool(left) != low_disk
    before = hub.requests(".safetensors")
    assert convert("acme/tiny", home=tmp_path / "home", low_disk=low_disk).already_there
    with pytest.raises(UsageError, match="--force"):
        convert("acme/tiny", home=tmp_path / "home", experts="bf16")
    assert hub.requests(".safetensors") == before, "asked for shards of a finished pack"


@pytest.mark.parametrize("options", [
    {"experts": "int4", "dense": "int8", "group": 32},
    {"experts": "fp16", "dense": "int4", "embed": "bf16", "group": 32},
    {"dense": "fp16", "embed": "int8"},
])  # fmt: skip
def test_low_disk_quantises_the_source_s_own_values_once(
    options: dict[str, Any], hub: Any, tmp_path: Path
) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix", layers=4, shards=4)
    hub.add("acme/tiny", source)
    out, cancel = tmp_path / "o.spmoe", threading.Event()
    with pytest.raises(Cancelled):
        convert("acme/tiny", out=out, low_disk=True, cancel=cancel,
                on_progress=stop_after(0.8, cancel), **options)  # fmt: skip
    assert any((tmp_path / "o.spmoe.partial" / "spool").iterdir())
    first = hub.requests("model-00001-of-")
    convert("acme/tiny", out=out, low_disk=True, **options)
    assert hub.requests("model-00001-of-") == first
    assert equal_weights(out, convert(source, out=tmp_path / "p.spmoe", **options).path)
    assert not (out / "spool").exists()


def test_low_disk_resumes_without_fetching_a_finished_shard_again(hub: Any, tmp_path: Path) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix", layers=6, shards=6)
    hub.add("acme/tiny", source)
    out, cancel = tmp_path / "o.spmoe", threading.Event()
    with pytest.raises(Cancelled):
        convert("acme/tiny", out=out, low_disk=True, cancel=cancel,
                on_progress=stop_after(0.9, cancel))  # fmt: skip
    first = hub.requests("model-00001-of-")
    assert first and (tmp_path / "o.spmoe.partial" / "spool").is_dir()
    assert not list((tmp_path / "cache").rglob("model-00001-of-*"))
    convert("acme/tiny", out=out, low_disk=True)
    assert hub.requests("model-00001-of-") == first
    assert equal_weights(out, convert(source, out=tmp_path / "p.spmoe").path)


def test_low_disk_never_deletes_what_was_there_before(hub: Any, tmp_path: Path) -> None:
    hub.add("acme/tiny", tiny.tiny_mixtral(tmp_path / "tmix"))
    convert("acme/tiny", out=tmp_path / "o.spmoe")
    cached = sorted(p.name for p in (tmp_path / "cache").rglob("model-*.safetensors"))
    assert len(cached) == 2
    convert("acme/tiny", out=tmp_path / "p.spmoe", low_disk=True)
    assert sorted(p.name for p in (tmp_path / "cache").rglob("model-*.safetensors")) == cached


@pytest.mark.parametrize("low_disk", [False, True])
def test_kind_a_o1_on_the_hub_a_missing_tensor_costs_no_download(
    low_disk: bool, hub: Any, tmp_path: Path
) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix")
    index = json.loads((source / "model.safetensors.index.json").read_text(encoding="utf-8"))
    del index["weight_map"]["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    tiny.write_json(source / "model.safetensors.index.json", index)
    hub.add("acme/tiny", source)
    with pytest.raises(DamagedError, match="down of expert 2 of layer 1"):
        convert("acme/tiny", out=tmp_path / "o.spmoe", low_disk=low_disk)
    assert hub.requests("model-0000") == 0 and not (tmp_path / "o.spmoe.partial").exists()


@pytest.mark.parametrize("low_disk", [False, True])
def test_kind_a_o6_on_the_hub_shards_turn_out_to_be_quantised(
    low_disk: bool, hub: Any, tmp_path: Path
) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix")
    shard = source / "model-00002-of-00002.safetensors"
    tensors = load_file(shard)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    save_file(tensors | {name: torch.ones(64, 96, dtype=torch.int8)}, shard)
    hub.add("acme/tiny", source)
    with pytest.raises(UnsupportedError, match=name):
        convert("acme/tiny", out=tmp_path / "o.spmoe", low_disk=low_disk)
    assert not (tmp_path / "o.spmoe").exists() and not (tmp_path / "o.spmoe.partial").exists()


def test_kind_j_o29_a_broken_download_goes_on_later(hub: Any, tmp_path: Path) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix")
    hub.add("acme/tiny", source)
    hub.short("model-00002-of-00002.safetensors", 40_000)
    out = tmp_path / "o.spmoe"
    with pytest.raises(NetworkError):
        convert("acme/tiny", out=out)
    with pytest.raises(NetworkError, match="model-00002-of-00002"):
        convert("acme/tiny", out=out, offline=True)
    assert not out.exists() and not (tmp_path / "o.spmoe.partial").exists()
    hub.faults.clear()
    convert("acme/tiny", out=out)
    assert equal_weights(out, convert(source, out=tmp_path / "p.spmoe").path)


# repack


@pytest.mark.parametrize("kind", ["mixtral", "mistral"])
def test_repack_equals_a_conversion_to_that_precision(kind: str, tmp_path: Path) -> None:
    old = tiny.tiny_pack(tmp_path, kind)
    source = tmp_path / f"{kind}-source"
    wanted = convert(source, out=tmp_path / "p.spmoe", experts="bf16", dense="fp16").path
    seen: list[Progress] = []
    result = repack(old, experts="bf16", dense="fp16", on_progress=seen.append)
    assert result.path == old and not result.already_there
    made, direct = contents(old), contents(wanted)
    tensors = [name for name in made["files"] if name.endswith(".safetensors")]
    assert {n: made["files"][n] for n in tensors} == {n: direct["files"][n] for n in tensors}
    assert made["files"] == direct["files"] and made["source"] == direct["source"]
    assert made["options"]["repacked_from"] == [
        ["fp32", "fp32", "fp32", "fp32" if kind == "mixtral" else None]
    ]
    assert [p.stage for p in seen if p.stage != "convert"][0] == "verify"
    with pytest.raises(UsageError, match="--force"):
        convert(source, out=old, experts="bf16", dense="fp16")


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_a_link_is_not_repacked_and_what_it_leads_to_is_named(tmp_path: Path) -> None:
    pack, seen = tiny.tiny_pack(tmp_path), list[Progress]()
    link = tmp_path / "link.spmoe"
    link.symlink_to(pack)
    with pytest.raises(UsageError, match=f"is a link, .* leads to {pack.resolve()}"):
        repack(link, experts="bf16", on_progress=seen.append)
    assert link.is_symlink() and not seen, "read before it is refused"
    assert repack(os.path.realpath(link), experts="bf16").path == pack.resolve()


def test_repack_reads_the_pack_that_it_verified(tmp_path: Path) -> None:
    """Whoever deletes or replaces it meanwhile changes nothing of what is made."""
    old = tiny.tiny_pack(tmp_path)
    source = tmp_path / "mixtral-source"
    wanted = convert(source, out=tmp_path / "p.spmoe", experts="bf16").path

    def deleted(progress: Progress) -> None:
        if progress.stage == "convert":
            shutil.rmtree(old, ignore_errors=True)

    repack(old, experts="bf16", on_progress=deleted)
    assert contents(old)["files"] == contents(wanted)["files"]


def test_a_full_disk_names_the_repacked_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tiny.tiny_pack(tmp_path)

    def fsync(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = contents(old)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(
            CapacityError, match=f"full: the repacked {old.stem} is not finished, cannot write "
        ):
            repack(old, experts="bf16")
    assert contents(old) == before
    assert not repack(old, experts="bf16").already_there


QUANTISED: dict[str, Any] = {"experts": "int4", "dense": "int8", "embed": "int8", "group": 32}


@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_repack_quantises_as_a_conversion_does(kind: str, tmp_path: Path) -> None:
    old = tiny.tiny_pack(tmp_path, kind)
    options = QUANTISED if kind == "mixtral" else QUANTISED | {"experts": None}
    wanted = convert(tmp_path / f"{kind}-source", out=tmp_path / "p.spmoe", **options).path
    assert repack(old, **options).path == old
    assert contents(old)["files"] == contents(wanted)["files"]


def test_repack_of_what_is_quantised_so_already_copies_the_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.tiny_pack(tmp_path, **QUANTISED)
    before = contents(path)
    monkeypatch.setattr(recipe, "quantize", None)  # nothing is quantised anew
    for options in ({}, QUANTISED, {"experts": "int4"}, {"dense": "int8", "group": 32}):
        assert repack(path, **options).already_there
    assert not repack(path, force=True, **QUANTISED).already_there
    assert contents(path)["files"] == before["files"]
    assert not [r for r in caplog.records if "go from" in r.getMessage()]
    repack(path, embed="bf16")  # changes embeddings and norms alone
    made = contents(path)
    assert made["files"][LAYER_0] == before["files"][LAYER_0]
    assert (made["linear_dtype"], made["embed_dtype"]) == ("int8-g32", "bf16")
    with Pack.open(path) as pack:
        assert isinstance(pack.load_dense()["layers.0.q_proj.weight"], QuantizedMatrix)


def test_repack_to_floats_gives_the_values_that_the_codes_stand_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny.tiny_pack(tmp_path, **QUANTISED)
    with Pack.open(path) as pack:
        dense, layout = pack.load_dense(), pack.expert_layout
        run = torch.from_numpy(pack.expert_bytes(1, 2).copy())
        gate = view_weight(run[: layout.up_offset], layout.dtype, (96, 64)).dequantize()
    repack(path, experts="bf16", dense="fp32", embed="fp32")
    said = [r.getMessage() for r in caplog.records if "gain nothing back" in r.getMessage()]
    assert len(said) == 3 and "experts go from int4-g32z to bf16" in said[0]
    assert "matrices go from int8-g32 to fp32" in said[1]
    with Pack.open(path) as pack:
        assert pack.dtypes == Dtypes("fp32", "fp32", "fp32", "bf16")
        for name, weight in pack.load_dense().items():
            was = dense[name]
            was = was.dequantize() if isinstance(was, QuantizedMatrix) else was
            assert torch.equal(weight, was), name
        run = torch.from_numpy(pack.expert_bytes(1, 2).copy())[: 96 * 64 * 2]
        assert torch.equal(run.view(torch.bfloat16).view(96, 64), gate.bfloat16())
    caplog.clear()
    repack(path, experts="int8", group=32)  # from floats: nothing to say
    assert not [r for r in caplog.records if "go from" in r.getMessage()]
    repack(path, experts="int4", group=32)
    assert "experts go from int8-g32 to int4-g32z and lose a little more" in caplog.text


def test_repack_refuses_a_scheme_that_does_not_fit(tmp_path: Path) -> None:
    path = tiny.tiny_pack(tmp_path, vocab=321)
    before = contents(path)
    for options, word in (({"experts": "int4"}, "--group 32"), ({"embed": "int8"}, "321 rows")):
        with pytest.raises(UnsupportedError, match=word):
            repack(path, **options)
    with pytest.raises(UsageError, match="--group 32 says nothing"):
        repack(path, group=32)
    assert contents(path) == before and not (tmp_path / "mixtral.spmoe.partial").exists()


def test_repack_by_name_and_with_nothing_to_do(tmp_path: Path) -> None:
    tiny.tiny_pack(tmp_path)
    before = contents(tmp_path / "mixtral.spmoe")
    for options in ({}, {"experts": "fp32"}):
        assert repack("mixtral", home=tmp_path, **options).already_there
    assert contents(tmp_path / "mixtral.spmoe") == before
    assert not repack("mixtral", home=tmp_path, force=True).already_there
    assert contents(tmp_path / "mixtral.spmoe")["files"] == before["files"]


def test_repack_upgrades_the_format_before(tmp_path: Path) -> None:
    path = tiny.tiny_pack(tmp_path, vocab=384)
    new = contents(path)
    old = {k: v for k, v in new.items() if k not in ("linear_dtype", "embed_dtype")}
    tiny.write_json(path / "manifest.json", old | {"format": 1, "created": "2026-01-01T00:00:00"})
    assert not repack(path).already_there
    made = contents(path)
    assert made.pop("options").pop("repacked_from") == [["fp32"] * 4]
    assert made["format"] == 2 and made == {k: v for k, v in new.items() if k != "options"}


def test_repack_refuses_a_damaged_pack_and_leaves_it(tmp_path: Path) -> None:
    path = tiny.tiny_pack(tmp_path)
    data = bytearray((path / LAYER_0).read_bytes())
    data[-100_000] ^= 1
    (path / LAYER_0).write_bytes(data)
    with pytest.raises(DamagedError, match="layer-000"):
        repack(path, experts="bf16")
    assert (path / LAYER_0).read_bytes() == data
    assert not (tmp_path / "mixtral.spmoe.partial").exists()


def test_kind_k_o33_repack_beyond_fp16_keeps_the_old_pack(tmp_path: Path) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix")
    shard = source / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"][0, 0] = 1e5
    save_file(tensors, shard)
    path = convert(source, out=tmp_path / "o.spmoe").path
    before = contents(path)
    with pytest.raises(UnsupportedError, match=r"layers.0.experts.1.gate .*fp16"):
        repack(path, experts="fp16")
    assert contents(path) == before and not (tmp_path / "o.spmoe.partial").exists()


def test_a_cancelled_repack_goes_on_and_partials_are_listed(tmp_path: Path) -> None:
    path, cancel = tiny.tiny_pack(tmp_path, layers=3), threading.Event()
    before = contents(path)
    with pytest.raises(Cancelled):
        repack(path, experts="bf16", cancel=cancel, on_progress=stop_after(0.6, cancel))
    assert contents(path) == before
    infos = {(info.name, info.complete) for info in library.packs(tmp_path)}
    assert infos == {("mixtral", True), ("mixtral", False)}
    repack(path, experts="bf16")
    direct = convert(tmp_path / "mixtral-source", out=tmp_path / "p.spmoe", experts="bf16").path
    assert contents(path)["files"] == contents(direct)["files"]
