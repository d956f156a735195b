"""convert from the hub, end to end against the stub: the pack is the local one's, and every break is survived.

BUGS.md kinds A (O1 O2 O6: decided before a shard moves) and J (O29: no half of a model passes for whole).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmoe_lite import hub as spmoe_hub
from spmoe_lite import library
from spmoe_lite.converters import convert
from spmoe_lite.errors import (
    Cancelled,
    DamagedError,
    NetworkError,
    NotFoundError,
    UnsupportedError,
)
from spmoe_lite.hub import ShortName
from spmoe_lite.pack import Pack
from spmoe_lite.progress import Progress
from tests import tiny
from tests.stub_hub import StubHub, environment, use

SHARDS = [f"model-{i:05}-of-00004.safetensors" for i in range(1, 5)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """TMIX in four shards, with what else people publish beside the shards."""
    folder = tiny.tiny_mixtral(tmp_path_factory.mktemp("checkpoint") / "tmix", layers=4, shards=4)
    (folder / "consolidated.00.pt").write_bytes(b"a pickle")
    (folder / "consolidated.safetensors").write_bytes((folder / SHARDS[0]).read_bytes())
    (folder / "README.md").write_text("# TMIX", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """File name -> SHA-256 of the pack made of the local folder."""
    return contents(convert(checkpoint, out=tmp_path_factory.mktemp("wanted") / "tmix.spmoe").path)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, checkpoint: Path) -> Iterator[StubHub]:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    with StubHub() as stub:
        stub.add("acme/tmix", checkpoint)
        use(monkeypatch, stub, tmp_path / "cache")
        yield stub


def contents(path: Path) -> dict[str, str]:
    with Pack.open(path) as pack:
        pack.verify()
        return {name: entry["sha256"] for name, entry in pack.manifest["files"].items()}


def shard_requests(hub: StubHub) -> list[str]:
    """Shards whose bytes were sent, in order."""
    return [Path(p).name for verb, p, _, _ in hub.log if verb == "GET" and p.startswith("/cdn/")]


def cached_shards() -> list[str]:
    return sorted(
        p.name for p in spmoe_hub.cache_folder().glob("*/snapshots/*/model-*") if p.exists()
    )


def leftovers() -> list[str]:
    home = library.home()
    return sorted(p.name for p in home.iterdir() if "lock" not in p.name) if home.exists() else []


def test_the_pack_is_that_of_the_local_folder(hub: StubHub, wanted: dict[str, str]) -> None:
    seen: list[Progress] = []
    result = convert("acme/tmix", on_progress=seen.append)
    assert result.path == library.home() / "tmix.spmoe" and not result.already_there
    assert contents(result.path) == wanted
    with Pack.open(result.path) as pack:
        source = pack.manifest["source"]
    assert (source["id"], source["revision"]) == ("acme/tmix", hub.refs["acme/tmix", "main"])
    assert sorted(shard_requests(hub)) == SHARDS  # O2: nothing else is large, nothing twice
    assert not hub.requests("consolidated") and not hub.requests("README")
    stages = [p.stage for p in seen]
    assert stages.index("download") < stages.index("convert")

    hub.log.clear()
    assert convert("acme/tmix").already_there
    assert hub.requests("/resolve/", "GET") == 0  # the listing, and a look at config.json
    hub.log.clear()
    assert convert("acme/tmix", offline=True).already_there
    assert hub.log == []


def test_sizes_are_told_before_the_first_byte(hub: StubHub, checkpoint: Path) -> None:
    plans = []

    def refuse(plan: object) -> bool:
        plans.append(plan)
        return False

    with pytest.raises(Cancelled):
        convert("acme/tmix", confirm=refuse)
    assert plans[0].download_bytes == sum((checkpoint / name).stat().st_size for name in SHARDS)
    assert plans[0].pack_bytes > 0 and "consolidated.safetensors" in plans[0].ignored
    assert shard_requests(hub) == [] and leftovers() == []


def test_a_short_name_makes_a_pack_of_that_name(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str]
) -> None:
    commit = hub.refs["acme/tmix", "main"]
    known = {"mixtral-8x7b": ShortName("acme/tmix", commit, "mixtral", 320)}
    monkeypatch.setattr(spmoe_hub, "SHORT_NAMES", known)
    result = convert("mixtral-8x7b")
    assert result.path.name == "mixtral-8x7b.spmoe" and contents(result.path) == wanted


@pytest.mark.parametrize("source", ["x" * 300, "nul\0byte", "mixtrl-8x7b", "./nothing"])
def test_what_is_neither_path_nor_model(hub: StubHub, source: str) -> None:
    with pytest.raises(NotFoundError):
        convert(source)
    assert hub.log == [] and leftovers() == []


def test_a_dense_draft_in_one_file(hub: StubHub, tmp_path: Path) -> None:
    folder = tiny.tiny_llama(tmp_path / "draft", shards=1, index=False)
    hub.add("acme/draft", folder)
    local = convert(folder, out=tmp_path / "local.spmoe")
    assert contents(convert("acme/draft").path) == contents(local.path)


# -- breaks


def test_dropped_connections_are_survived(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    hub.drop(SHARDS[1] + " GET", after=100_000)
    hub.drop(SHARDS[2] + " GET", after=50_000, reset=True, times=2)
    hub.corrupt(SHARDS[3] + " GET", times=1)
    assert contents(convert("acme/tmix").path) == wanted
    assert any(asked for _, path, asked, _ in hub.log if path.endswith(SHARDS[1]))  # resumed


def test_an_interrupted_download_goes_on_where_it_was(hub: StubHub, wanted: dict[str, str]) -> None:
    """O29: half a download, then offline, then online again."""
    hub.drop(SHARDS[2] + " GET", after=100_000, reset=True, times=99)
    with pytest.raises(NetworkError, match=SHARDS[2]):
        convert("acme/tmix")
    assert cached_shards() == SHARDS[:2] and leftovers() == []
    before = len(hub.log)
    with pytest.raises(NetworkError) as error:
        convert("acme/tmix", offline=True)
    assert all(name in str(error.value) for name in SHARDS[2:])
    assert "\n" not in str(error.value) and len(hub.log) == before and leftovers() == []
    hub.faults.clear()
    hub.log.clear()
    assert contents(convert("acme/tmix").path) == wanted
    assert shard_requests(hub) == SHARDS[2:]


@pytest.mark.parametrize("left", [0, 20_000])
def test_a_cut_shard_in_the_cache_never_becomes_a_pack(
    hub: StubHub, wanted: dict[str, str], left: int
) -> None:
    """O29: cached folder with a short shard, offline and online."""
    repo = spmoe_hub.resolve("acme/tmix")
    assert repo is not None
    repo.fetch_text()
    os.truncate(repo.fetch_all(repo.weights()) / SHARDS[1], left)
    with pytest.raises(NetworkError, match=SHARDS[1]):
        convert("acme/tmix", offline=True)
    assert leftovers() == []
    hub.log.clear()
    assert contents(convert("acme/tmix").path) == wanted
    assert shard_requests(hub) == [SHARDS[1]]


@pytest.mark.parametrize("low_disk", [False, True])
def test_a_hub_that_serves_a_short_file(
    hub: StubHub, wanted: dict[str, str], low_disk: bool
) -> None:
    hub.short(SHARDS[1] + " GET", 5000)
    with pytest.raises(NetworkError) as error:
        convert("acme/tmix", low_disk=low_disk)
    assert f"{SHARDS[1]} of acme/tmix" in str(error.value) and "5000 of" in str(error.value)
    assert "tmix.spmoe" not in leftovers()
    hub.faults.clear()
    assert contents(convert("acme/tmix", low_disk=low_disk).path) == wanted


def test_gated_is_known_before_anything_moves(hub: StubHub) -> None:
    hub.gated.add("acme/tmix")
    with pytest.raises(NetworkError, match="hf auth login"):
        convert("acme/tmix")
    assert hub.requests("/resolve/", "GET") == 0 and leftovers() == []


def test_what_cannot_be_converted_is_refused_before_a_shard_moves(
    hub: StubHub, checkpoint: Path
) -> None:
    """O1: stale index, missing expert. O6: quantised source."""
    files = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    config = json.loads(files["config.json"])
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    hub.add("acme/gptq", files | {"config.json": json.dumps(quantised).encode()})
    with pytest.raises(UnsupportedError, match="gptq"):
        convert("acme/gptq")
    hub.add("acme/stale", {k: v for k, v in files.items() if k != SHARDS[3]})
    with pytest.raises(DamagedError, match=SHARDS[3]):
        convert("acme/stale")
    index = json.loads(files[spmoe_hub.INDEX])
    gone = "model.layers.2.block_sparse_moe.experts.1.w2.weight"
    del index["weight_map"][gone]
    hub.add("acme/gap", files | {spmoe_hub.INDEX: json.dumps(index).encode()})
    with pytest.raises(DamagedError, match="layer 2"):
        convert("acme/gap")
    assert shard_requests(hub) == [] and leftovers() == []


def test_cancel_in_mid_download(hub: StubHub, wanted: dict[str, str]) -> None:
    cancel = threading.Event()
    stall = hub.drop(SHARDS[1] + " GET", after=10_000, stall=True)

    def stop() -> None:
        stall.begun.wait(60)
        cancel.set()

    threading.Thread(target=stop).start()
    with pytest.raises(Cancelled):
        convert("acme/tmix", cancel=cancel)
    assert leftovers() == []
    stall.wait.set()  # type: ignore[union-attr]
    assert contents(convert("acme/tmix").path) == wanted


# -- low disk


def test_low_disk_keeps_few_shards_and_leaves_none(hub: StubHub, wanted: dict[str, str]) -> None:
    most = 0

    def watch(progress: Progress) -> None:
        nonlocal most
        most = max(most, len(cached_shards()))

    plans = []
    result = convert(
        "acme/tmix", low_disk=True, on_progress=watch, confirm=lambda plan: not plans.append(plan)
    )
    assert contents(result.path) == wanted
    assert cached_shards() == [] and 0 < most < len(SHARDS)
    sizes = {p.stat().st_size for p in spmoe_hub.cache_folder().glob("*/blobs/*")}
    assert not sizes & set(spmoe_hub.resolve("acme/tmix").files()[name] for name in SHARDS)  # type: ignore[union-attr]
    hub.log.clear()
    assert convert("acme/tmix", low_disk=True).already_there and shard_requests(hub) == []


def test_low_disk_leaves_what_was_in_the_cache_before(hub: StubHub, wanted: dict[str, str]) -> None:
    repo = spmoe_hub.resolve("acme/tmix")
    assert repo is not None
    repo.fetch(SHARDS[0])
    assert contents(convert("acme/tmix", low_disk=True).path) == wanted
    assert cached_shards() == [SHARDS[0]]


def test_low_disk_goes_on_after_a_break_without_fetching_again(
    hub: StubHub, wanted: dict[str, str]
) -> None:
    hub.drop(SHARDS[3] + " GET", after=1000, reset=True, times=3)
    with pytest.raises(NetworkError, match=SHARDS[3]):
        convert("acme/tmix", low_disk=True)
    assert leftovers() == ["tmix.spmoe.partial"]
    kept = cached_shards()
    hub.log.clear()
    assert contents(convert("acme/tmix", low_disk=True).path) == wanted
    fetched = shard_requests(hub)
    assert SHARDS[3] in fetched and len(fetched) < len(SHARDS)
    assert not set(fetched) & set(kept) and leftovers() == ["tmix.spmoe"]


# -- the command line


def test_the_command_says_one_line_and_no_token(hub: StubHub, tmp_path: Path) -> None:
    hub.gated.add("acme/tmix")
    hub.token = "hf_secretSECRET"
    variables = environment(hub, tmp_path / "cache") | {"HF_TOKEN": "hf_secretSECRET"}
    done = subprocess.run(
        [sys.executable, "-m", "spmoe_lite", "convert", "acme/tmix", "--yes"],
        env=os.environ | variables,
        cwd=Path(spmoe_hub.__file__).parent.parent,
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    assert done.returncode == NetworkError.exit_code
    assert len(done.stderr.strip().splitlines()) == 1 and done.stdout == ""
    assert f"{hub.url}/acme/tmix" in done.stderr and "SECRET" not in done.stderr
