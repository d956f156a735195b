"""Downloads from the hub, against the stub: what is fetched, what is believed, and how each failure reads.

Kinds of BUGS.md met here: J (partial files) O29, A (index and files disagree, two sets of weights) O1 O2,
D (identity) O15. Every failure must be one line with a remedy, and no line may hold a token.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmoe_lite import hub as spmoe_hub
from spmoe_lite.errors import (
    Cancelled,
    CapacityError,
    DamagedError,
    NetworkError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
)
from spmoe_lite.hub import SHORT_NAMES, HubRepo, ShortName, resolve
from spmoe_lite.progress import Progress
from tests.stub_hub import StubHub, environment, use

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def shard(seed: int, size: int) -> bytes:
    """A safetensors file with one tensor of `size` bytes."""
    header = {"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    text = json.dumps({"__metadata__": {"format": "pt"}} | header).encode()
    return struct.pack("<Q", len(text)) + text + hashlib.shake_128(bytes([seed])).digest(size)


def model(**changes: bytes | None) -> dict[str, bytes]:
    """A repository as people publish them; a change of None leaves the file out (_ for - and .)."""
    files = {
        "config.json": json.dumps({"model_type": "mixtral", "vocab_size": 320}).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": b'{"model": {}}',
        "tokenizer_config.json": b"{}",
        "README.md": b"# read me",
        "consolidated.00.pt": b"a pickle",
        "consolidated.safetensors": shard(9, 500),
        "pytorch_model.bin": b"another pickle",
        SHARDS[0]: shard(1, 60_000),
        SHARDS[1]: shard(2, 40_000),
        INDEX: json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}).encode(),
    }
    for name, body in changes.items():
        (key,) = (k for k in files if re.sub(r"\W", "_", k) == name)
        if body is None:
            del files[key]
        else:
            files[key] = body
    return files


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    with StubHub() as stub:
        stub.add("acme/tiny", model())
        use(monkeypatch, stub, tmp_path / "cache")
        yield stub


def get(source: str = "acme/tiny", **options: object) -> HubRepo:
    repo = resolve(source, **options)  # type: ignore[arg-type]
    assert repo is not None
    return repo


def one_line(error: pytest.ExceptionInfo[SpmoeError]) -> str:
    text = str(error.value)
    assert "\n" not in text and 20 < len(text) < 400
    return text


# -- names


def test_short_names_are_pinned_and_the_pair_shares_its_vocabulary() -> None:
    """O15: `mistral-7b` must be the release whose tokens are Mixtral's, not the newest."""
    for name, entry in SHORT_NAMES.items():
        assert re.fullmatch(r"[0-9a-f]{40}", entry.revision), name
        assert re.fullmatch(r"[\w-]+/[\w.-]+", entry.repo_id), name
    assert len({entry.revision for entry in SHORT_NAMES.values()}) == len(SHORT_NAMES)
    target, draft = SHORT_NAMES["mixtral-8x7b"], SHORT_NAMES["mistral-7b"]
    assert target.repo_id == "mistralai/Mixtral-8x7B-Instruct-v0.1"
    assert draft.repo_id == "mistralai/Mistral-7B-Instruct-v0.2"
    assert target.vocab_size == draft.vocab_size == 32000
    assert "Instruct" not in SHORT_NAMES["mixtral-8x7b-base"].repo_id
    assert "Instruct" not in SHORT_NAMES["mistral-7b-base"].repo_id


@pytest.mark.parametrize(
    "text, wanted",
    [
        ("acme/tiny", ("acme/tiny", "main", "tiny")),
        ("acme/tiny@v2", ("acme/tiny", "v2", "tiny")),
        ("acme/tiny@refs/pr/3", ("acme/tiny", "refs/pr/3", "tiny")),
        ("mistral-7b@main", ("mistralai/Mistral-7B-Instruct-v0.2", "main", "mistral-7b")),
    ],
)
def test_what_a_source_means(text: str, wanted: tuple[str, str, str]) -> None:
    assert spmoe_hub._parse(text, None) == (*wanted, None)


def test_a_short_name_means_its_pin_in_any_case() -> None:
    entry = SHORT_NAMES["mixtral-8x7b"]
    assert spmoe_hub._parse("Mixtral-8x7B", None) == (
        entry.repo_id,
        entry.revision,
        "mixtral-8x7b",
        entry,
    )
    other = spmoe_hub._parse("mixtral-8x7b", "dev")
    assert other[1] == "dev" and other[3] is None  # what the pin promises is not expected of others


def test_an_existing_path_wins(
    hub: StubHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    (tmp_path / "mixtral-8x7b").mkdir()
    assert resolve("acme/tiny") is resolve(Path("acme/tiny")) is resolve("mixtral-8x7b") is None
    assert not hub.log


@pytest.mark.parametrize(
    "text, says",
    [
        ("mixtrl-8x7b", "did you mean mixtral-8x7b"),
        ("gpt2", "ORG/NAME"),
        ("./acme/tiny", "no such file or folder: ./acme/tiny"),
        ("models/tiny.gguf", "no such file or folder"),
        ("C:\\models\\tiny", "no such file or folder"),
        ("https://example.org/acme/tiny", "ORG/NAME"),
        ("", "ORG/NAME"),
    ],
)
def test_what_is_no_name_is_refused_without_asking_the_hub(
    hub: StubHub, text: str, says: str
) -> None:
    with pytest.raises(NotFoundError) as error:
        resolve(text)
    assert says in one_line(error)
    assert not hub.log


@given(st.text(max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_text_is_a_hub_id_or_refused(text: str) -> None:
    try:
        repo_id, revision, name, _ = spmoe_hub._parse(text, None)
    except NotFoundError:
        return
    assert repo_id.count("/") == 1 and revision and name and ".." not in repo_id.split("/")


# -- what is fetched


def test_sizes_come_first_and_only_what_is_named_is_fetched(hub: StubHub) -> None:
    """O2: pickles, consolidated files and everything unnamed stay on the hub."""
    repo = get()
    files = model()
    assert repo.files() == {name: len(body) for name, body in files.items()}
    assert repo.revision == hub.refs["acme/tiny", "main"] and repo.name == "tiny"
    assert hub.requests("/resolve/", "GET") == 0
    repo.check_access()
    assert hub.requests("/resolve/", "GET") == 0 and hub.requests("/cdn/") == 0

    folder = repo.fetch_text()
    shards = repo.weights()
    assert shards == SHARDS
    assert repo.download_bytes(shards) == sum(len(files[name]) for name in SHARDS)
    assert repo.fetch_all(shards) == folder
    assert repo.download_bytes(shards) == 0
    got = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert got == {name: files[name] for name in (*repo.text_files(), *SHARDS)}
    assert not any(
        hub.requests(part)
        for part in ("consolidated", ".bin", "README", "special", "index", "a.b")
        if part not in ("special", "index")
    )
    for name in (*repo.text_files(), *SHARDS):
        assert hub.requests(f"/{name}", "GET") == 1


def test_a_second_run_fetches_nothing(hub: StubHub) -> None:
    first = get()
    first.fetch_text()
    first.fetch_all(first.weights())
    before = hub.requests(method="GET")
    again = get()
    again.fetch_text()
    again.fetch_all(again.weights())
    assert hub.requests(method="GET") == before + 1  # the listing


def test_progress_counts_all_bytes_and_comes_on_the_calling_thread(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 5000)
    repo, seen, threads = get(), [], set()

    def on_progress(progress: Progress) -> None:
        seen.append(progress)
        threads.add(threading.get_ident())

    repo.fetch_all(SHARDS, on_progress)
    total = sum(repo.files()[name] for name in SHARDS)
    assert {(p.stage, p.total, p.unit) for p in seen} == {("download", total, "bytes")}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == total and threads == {threading.get_ident()}


def test_a_single_file_and_parts_without_an_index(hub: StubHub) -> None:
    """O1 (d): no index; a full set of parts is taken, half a set is not."""
    hub.add("acme/single", {"config.json": b"{}", "model.safetensors": shard(1, 10)})
    assert get("acme/single").weights() == ["model.safetensors"]
    hub.add("acme/parts", model(model_safetensors_index_json=None))
    assert get("acme/parts").weights() == SHARDS
    files = model(model_safetensors_index_json=None, model_00002_of_00002_safetensors=None)
    hub.add("acme/half", files)
    with pytest.raises(DamagedError) as error:
        get("acme/half").weights()
    assert "1 parts" in one_line(error)


def test_an_index_that_names_what_the_hub_lacks(hub: StubHub) -> None:
    """O1 (a): decided before any shard is fetched."""
    hub.add("acme/stale", model(model_00002_of_00002_safetensors=None))
    with pytest.raises(DamagedError) as error:
        get("acme/stale").weights()
    assert SHARDS[1] in one_line(error)
    assert hub.requests("/cdn/") == 0


@pytest.mark.parametrize(
    "names",
    [
        ["../evil.safetensors"],
        ["/etc/evil.safetensors"],
        ["a/../../evil.safetensors"],
        ["..\\evil.safetensors"],
        ["pytorch_model.bin"],
        [5],
        [],
    ],
)
def test_an_index_cannot_lead_out_of_its_folder(hub: StubHub, names: list[object]) -> None:
    index = json.dumps({"weight_map": {str(i): name for i, name in enumerate(names)}}).encode()
    hub.add("acme/evil", model(model_safetensors_index_json=index))
    with pytest.raises(DamagedError) as error:
        get("acme/evil").weights()
    assert INDEX in one_line(error)


@pytest.mark.parametrize(
    "files, says",
    [
        ({"pytorch_model.bin": b"x"}, "never loaded"),
        ({"consolidated.00.pth": b"x"}, "never loaded"),
        ({"consolidated.safetensors": b"x"}, "transformers layout"),
        ({"model-Q4_K_M.gguf": b"x"}, "give its path to convert"),
        ({"README.md": b"x"}, "no weights"),
    ],
)
def test_a_repository_without_safetensors_is_refused_by_name(
    hub: StubHub, files: dict[str, bytes], says: str
) -> None:
    hub.add("acme/other", {"config.json": b"{}"} | files)
    repo = get("acme/other")
    with pytest.raises(UnsupportedError) as error:
        repo.weights()
    assert says in one_line(error) and hub.requests("/resolve/", "GET") == 0
    hub.add("acme/data", {"train.csv": b"x"})
    with pytest.raises(UnsupportedError, match="config.json"):
        get("acme/data").check_access()


def test_a_pin_that_holds_another_model_is_refused(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O15: 32768 tokens where 32000 were promised is an error on arrival of config.json."""
    commit = hub.refs["acme/tiny", "main"]
    known = {
        "right": ShortName("acme/tiny", commit, "mixtral", 320),
        "rows": ShortName("acme/tiny", commit, "mixtral", 32000),
        "family": ShortName("acme/tiny", commit, "llama", 320),
    }
    monkeypatch.setattr(spmoe_hub, "SHORT_NAMES", known)
    assert get("right").fetch("config.json").is_file()
    for name in ("rows", "family"):
        with pytest.raises(UnsupportedError) as error:
            get(name).fetch_text()
        assert "320" in one_line(error) and name in str(error.value)


def test_revisions_and_moved_repositories(hub: StubHub) -> None:
    old = hub.refs["acme/tiny", "main"]
    new = hub.add("acme/tiny", model(README_md=b"other"), branch="dev")
    assert get("acme/tiny@dev").revision == new != old
    assert get(f"acme/tiny@{old}").revision == old
    hub.moved["acme/before"] = "acme/tiny"
    repo = get("acme/before")
    repo.check_access()
    assert repo.fetch(SHARDS[0]).read_bytes() == model()[SHARDS[0]]


def test_a_branch_that_moves_under_us_gives_the_listed_commit(hub: StubHub) -> None:
    repo = get()
    other = json.dumps({"model_type": "mixtral", "vocab_size": 999}).encode()
    hub.add("acme/tiny", model(config_json=other))
    path = repo.fetch("config.json")
    assert path.parent.name == repo.revision and path.read_bytes() == model()["config.json"]


# -- partial files (kind J, O29)


def test_a_dropped_connection_resumes(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    repo = get()
    size = repo.files()[SHARDS[0]]
    hub.drop(f"cdn/acme/tiny/{repo.revision}/{SHARDS[0]} GET", after=size * 2 // 5)
    assert repo.fetch(SHARDS[0]).read_bytes() == model()[SHARDS[0]]
    ranges = [asked for _, path, asked, _ in hub.log if path.endswith(SHARDS[0]) and asked]
    assert len(ranges) == 1 and int(ranges[0][6:-1]) >= size // 3  # what came was kept


def test_a_reset_connection_is_started_again(hub: StubHub) -> None:
    repo = get()
    hub.drop("/cdn/", after=20_000, reset=True)
    assert repo.fetch(SHARDS[0]).read_bytes() == model()[SHARDS[0]]
    assert hub.requests("/cdn/", "GET") == 2


def test_the_hub_library_prints_nothing_of_our_transfers(
    hub: StubHub, caplog: pytest.LogCaptureFixture
) -> None:
    """Its handler writes to stderr; what it says goes to our log, without signatures."""

    class Stderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            printed.append(record.getMessage())

    printed: list[str] = []
    handler = Stderr()
    theirs = logging.getLogger("huggingface_hub")
    theirs.addHandler(handler)
    try:
        hub.drop("/cdn/", after=20_000)
        with caplog.at_level(logging.DEBUG, "spmoe_lite"):
            get().fetch(SHARDS[0])
        assert printed == [] and not handler.filters
        ours = [r.getMessage() for r in caplog.records if r.name == "spmoe_lite"]
        assert any("resume" in text for text in ours) and not any("Signature" in t for t in ours)
        theirs.warning("of someone else")
        assert printed == ["of someone else"]
    finally:
        theirs.removeHandler(handler)


def test_an_interrupted_download_does_not_pass_for_complete_offline(hub: StubHub) -> None:
    """O29: dropped after 40 percent, tried again offline."""
    repo = get()
    repo.fetch_text()
    repo.fetch(SHARDS[1])
    hub.drop(SHARDS[0], after=24_000, reset=True, times=99)
    with pytest.raises(NetworkError) as error:
        repo.fetch_all(repo.weights())
    assert SHARDS[0] in one_line(error) and "3 tries" in str(error.value)
    assert repo.download_bytes(SHARDS) == repo.files()[SHARDS[0]]  # the finished one is kept

    before = len(hub.log)
    offline = get(offline=True)
    with pytest.raises(NetworkError) as error:
        offline.weights()
    assert f"{SHARDS[0]} is missing" in one_line(error) and SHARDS[1] not in str(error.value)
    assert "--offline" in str(error.value)
    assert len(hub.log) == before


@pytest.mark.parametrize(
    "left, says", [(0, "cut off at 0"), (50, "cut off at 50"), (9000, "9000 of")]
)
def test_a_cut_shard_in_the_cache_is_found_out(hub: StubHub, left: int, says: str) -> None:
    """O29: a cached shard of 0 bytes (or any wrong number): refused offline, fetched again online."""
    repo = get()
    repo.fetch_text()
    path = repo.fetch_all(repo.weights()) / SHARDS[1]
    os.truncate(path, left)
    with pytest.raises(NetworkError) as error:
        get(offline=True).weights()
    assert f"{SHARDS[1]}" in one_line(error) and says in str(error.value)
    again = get()
    assert again.download_bytes(SHARDS) == again.files()[SHARDS[1]]
    assert again.fetch(SHARDS[1]).read_bytes() == model()[SHARDS[1]]
    assert get(offline=True).weights() == SHARDS


@given(st.binary(max_size=60), st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_a_hostile_header_is_no_length(tail: bytes, length: int) -> None:
    path = Path(os.environ["SPMOE_HOME"]) / "header.safetensors"
    path.write_bytes(struct.pack("<Q", length) + tail)
    assert spmoe_hub._safetensors_bytes(path) is None
    path.write_bytes(struct.pack("<Q", len(tail)) + tail)
    found = spmoe_hub._safetensors_bytes(path)
    assert found is None or found >= 8


@pytest.mark.parametrize("name", [SHARDS[0], "tokenizer.json"])
@pytest.mark.parametrize("fault", ["short", "corrupt"])
def test_a_wrong_file_is_fetched_again_and_never_kept(hub: StubHub, name: str, fault: str) -> None:
    spoil = (
        (lambda n: hub.short(f"{name} GET", 7, times=n))
        if fault == "short"
        else (lambda n: hub.corrupt(f"{name} GET", times=n))
    )
    repo = get()
    spoil(1)
    assert repo.fetch(name).read_bytes() == model()[name]
    repo.drop(name)
    spoil(99)
    with pytest.raises(NetworkError) as error:
        repo.fetch(name)
    assert name in one_line(error)
    assert ("7 of" if fault == "short" else "hash") in str(error.value)
    assert repo.cached(name) is None and repo.download_bytes([name]) == len(model()[name])
    blobs = next(iter(spmoe_hub.cache_folder().glob("models--acme--tiny/blobs")))
    assert not [b for b in blobs.iterdir() if b.stat().st_size in (7, len(model()[name]))]


# -- offline


def test_offline_asks_nothing_of_the_network(hub: StubHub, tmp_path: Path) -> None:
    """In a fresh process where opening a socket is an error."""
    repo = get()
    repo.fetch_text()
    repo.fetch_all(repo.weights())
    code = (
        "import socket\n"
        "def refuse(*a, **k): raise AssertionError('network')\n"
        "socket.socket.connect = socket.getaddrinfo = socket.create_connection = refuse\n"
        "from spmoe_lite.hub import resolve\n"
        "repo = resolve('acme/tiny', offline={})\n"
        "repo.check_access(); print(repo.fetch_text().name, *repo.weights())\n"
        "assert repo.download_bytes(repo.weights()) == 0 and repo.offline\n"
        "print(repo.fetch(repo.weights()[0]).stat().st_size)\n"
    )
    variables = os.environ | environment(hub, tmp_path / "cache")
    before = len(hub.log)
    for flag, extra in (("True", {}), ("False", {"HF_HUB_OFFLINE": "1"})):
        child = subprocess.run(
            [sys.executable, "-c", code.format(flag)],
            env=variables | extra,
            cwd=Path(spmoe_hub.__file__).parent.parent,
            capture_output=True,
            text=True,
        )
        assert child.returncode == 0, child.stderr
        assert child.stdout.split() == [repo.revision, *SHARDS, str(repo.files()[SHARDS[0]])]
        assert child.stderr == ""
    assert len(hub.log) == before


def test_offline_without_a_cache_says_what_to_run(hub: StubHub) -> None:
    for source in ("acme/tiny", "mixtral-8x7b", "acme/tiny@" + "0" * 40):
        with pytest.raises(NetworkError) as error:
            resolve(source, offline=True)
        assert "without --offline" in one_line(error)
    assert not hub.log


def test_offline_knows_what_the_repository_lacks_and_says_what_it_cannot_know(
    hub: StubHub, caplog: pytest.LogCaptureFixture
) -> None:
    repo = get()
    repo.fetch("config.json")
    with caplog.at_level(logging.WARNING, "spmoe_lite"):
        offline = get(offline=True)
        assert "generation_config.json" in caplog.text and "chat_template.jinja" in caplog.text
        with pytest.raises(NetworkError, match=r"tokenizer\.json"):
            offline.fetch("tokenizer.json")
        caplog.clear()
        repo.fetch_text()  # has no chat template, and the cache now knows
        get(offline=True)
        assert caplog.text == ""


def test_offline_finds_a_branch_that_was_cached_by_commit(hub: StubHub) -> None:
    commit = hub.refs["acme/tiny", "main"]
    pinned = get(f"acme/tiny@{commit}")
    pinned.fetch_text()
    pinned.fetch_all(pinned.weights())
    get("acme/tiny").fetch_text()
    assert get("acme/tiny", offline=True).revision == commit
    assert get(f"acme/tiny@{commit}", offline=True).weights() == SHARDS


# -- access


def test_gated_names_the_terms_page_and_the_login(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add("acme/tiny")
    repo = get()  # the listing of a gated repository is public
    assert repo.files()
    with pytest.raises(NetworkError) as error:
        repo.check_access()
    text = one_line(error)
    assert f"{hub.url}/acme/tiny" in text and "hf auth login" in text
    assert hub.requests("/resolve/", "GET") == hub.requests("/cdn/") == 0

    monkeypatch.setenv("HF_TOKEN", "hf_secretSECRET")
    hub.token = "hf_secretSECRET"
    with pytest.raises(NetworkError) as error:
        get().check_access()
    assert f"{hub.url}/acme/tiny" in one_line(error) and "hf auth login" not in str(error.value)
    hub.gated.clear()
    hub.private.add("acme/tiny")
    repo = get()
    repo.check_access()
    repo.fetch(SHARDS[0])
    sent = {path.startswith("/cdn"): auth for _, path, _, auth in hub.log[-6:]}
    assert sent[False] == "Bearer hf_secretSECRET" and sent[True] is None


@pytest.mark.parametrize(
    "token", ["hf_secretSECRET", "hf_secretSECRET\x01and more", "sécretSECRET"]
)
def test_a_token_is_never_shown(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, token: str
) -> None:
    caplog.set_level(logging.DEBUG)
    repo = get()
    monkeypatch.setenv("HF_TOKEN", token)
    for call in (get, repo.check_access, lambda: repo.fetch(SHARDS[0]), repo.fetch_text):
        with pytest.raises(SpmoeError) as error:
            call()
        everything = "".join(traceback.format_exception(error.value)) + one_line(error)
        chain = [error.value, error.value.__cause__, error.value.__context__]
        assert "SECRET" not in everything + repr(chain)
    assert "SECRET" not in caplog.text


def test_an_unexpected_error_shows_no_secret(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "plainSECRET")

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(
            "plainSECRET\nhf_otherSECRET Bearer oneSECRET https://cdn/x?Signature=SECRET end"
        )

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    hub.token = "plainSECRET"
    with pytest.raises(NetworkError) as error:
        get().fetch(SHARDS[0])
    assert "SECRET" not in one_line(error) and "https://cdn/x end" in str(error.value)


def test_a_token_with_strange_characters(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_é")
    with pytest.raises(NetworkError) as error:
        get()
    assert "characters" in one_line(error) and "hf_" not in str(error.value)


def test_a_token_the_hub_does_not_know(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(NetworkError) as error:
        get()
    assert "token" in one_line(error) and "hf auth login" in str(error.value)


def test_missing_repositories_and_revisions(hub: StubHub) -> None:
    with pytest.raises(NotFoundError) as error:
        get("mistralai/Mixtral-8x7B-Instruct-v1")
    assert "did you mean mistralai/Mixtral-8x7B-Instruct-v0.1" in one_line(error)
    with pytest.raises(NotFoundError) as error:
        get("acme/none")
    assert "acme/none" in one_line(error) and "private" in str(error.value)
    with pytest.raises(NotFoundError) as error:
        get("acme/tiny@nope")
    assert "no revision 'nope'" in one_line(error)
    with pytest.raises(NotFoundError) as error:
        get("acme/" + "x" * 120)
    assert "hub id" in one_line(error)
    with pytest.raises(NotFoundError, match="no file gone"):
        get().fetch("gone.safetensors")


@pytest.mark.parametrize(
    "status, headers, says",
    [
        (429, {"Retry_After": "37"}, "37 seconds"),
        (429, {}, "limits your requests"),
        (500, {}, "answers 500"),
        (503, {}, "try again later"),
        (200, {"Content_Type": "text/html"}, "HF_ENDPOINT"),
        (403, {"X_Error_Message": "Access to this resource is disabled."}, "disabled"),
    ],
)
def test_a_hub_that_refuses(hub: StubHub, status: int, headers: dict, says: str) -> None:
    hub.fail("/api/models/", status, body=b"<html>log in to the hotel</html>", **headers)
    with pytest.raises(NetworkError) as error:
        get()
    assert says in one_line(error)


def test_a_hub_that_lists_no_sizes(hub: StubHub) -> None:
    body = json.dumps({"id": "acme/tiny", "sha": "0" * 40, "siblings": [{"rfilename": "a"}]})
    hub.fail("/api/models/", 200, body=body.encode())
    with pytest.raises(NetworkError, match="HF_ENDPOINT"):
        get()


def test_an_error_in_mid_download_is_tried_again(hub: StubHub) -> None:
    repo = get()
    hub.fail("/cdn/", 500, times=1)
    with pytest.raises(NetworkError) as error:
        repo.fetch(SHARDS[0])
    assert "answers 500" in one_line(error)
    assert repo.fetch(SHARDS[0]).read_bytes() == model()[SHARDS[0]]


def test_no_network_says_so(hub: StubHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    use(monkeypatch, f"http://127.0.0.1:{port}", tmp_path / "cache")
    with pytest.raises(NetworkError) as error:
        get()
    assert f"127.0.0.1:{port}" in one_line(error) and "--offline" in str(error.value)


def test_the_cache_cannot_be_written(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    use(monkeypatch, hub, tmp_path / "file" / "cache")
    with pytest.raises(SpmoeError) as error:
        get().fetch_text()
    assert "HF_HUB_CACHE" in one_line(error) and error.value.exit_code == 1


@pytest.mark.parametrize("reason", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_and_a_spent_quota_read_alike(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch, reason: int
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(reason, os.strerror(reason))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(CapacityError) as error:
        get().fetch_text()
    folder = spmoe_hub.cache_folder()
    assert one_line(error) == (
        f"no space left for acme/tiny in {folder}; free some or set HF_HUB_CACHE"
    )


# -- cancel


def hub_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "spmoe-hub"]


def end_of_hub_threads() -> None:
    """Wait for what a cancelled call left behind; it is given a second, and not waited for longer."""
    for thread in hub_threads():
        thread.join(60)
        assert not thread.is_alive()


def test_cancel_is_answered_while_the_transfer_stalls(hub: StubHub) -> None:
    repo, cancel = get(), threading.Event()
    stall = hub.drop("/cdn/", after=10_000, stall=True)

    def stop() -> None:
        stall.begun.wait(60)
        cancel.set()

    threading.Thread(target=stop).start()
    with pytest.raises(Cancelled):
        repo.fetch(SHARDS[0], None, cancel)
    assert hub_threads(), "the transfer was waited for"
    assert repo.cached(SHARDS[0]) is None
    stall.wait.set()  # type: ignore[union-attr]
    end_of_hub_threads()
    assert repo.fetch(SHARDS[0]).read_bytes() == model()[SHARDS[0]]


def test_cancel_within_one_chunk_leaves_nothing_behind(
    hub: StubHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)
    hub.add("acme/big", {"config.json": b"{}", "model.safetensors": shard(1, 30_000_000)})
    repo, cancel, seen = get("acme/big"), threading.Event(), []

    def on_progress(progress: Progress) -> None:
        seen.append(progress.done)
        cancel.set()

    with pytest.raises(Cancelled):
        repo.fetch("model.safetensors", on_progress, cancel)
    assert seen and seen[-1] < 30_000_000
    end_of_hub_threads()
    assert not list(spmoe_hub.cache_folder().glob("*/blobs/*"))
    for call in (
        lambda: resolve("acme/big", cancel=cancel),
        lambda: repo.check_access(cancel),
        lambda: repo.fetch("config.json", None, cancel),
    ):
        before = len(hub.log)
        with pytest.raises(Cancelled):
            call()
        assert len(hub.log) == before


def test_cancel_ends_a_xet_transfer(hub: StubHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Xet swallows what a progress bar raises; only aborting its session ends the transfer."""
    ended, cancel = threading.Event(), threading.Event()

    def xet_like(*_: object, tqdm_class: type, **__: object) -> None:
        bar = tqdm_class(total=100, desc="x", unit="B", position=0, bar_format="", leave=True)
        bar.update_transfer(10)
        bar.set_transfer_postfix_str("1 MB/s", refresh=False)
        cancel.set()
        assert ended.wait(60)
        raise RuntimeError("aborted")

    monkeypatch.setitem(sys.modules, "hf_xet", sys)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", xet_like)
    monkeypatch.setattr("huggingface_hub.utils._xet.abort_xet_session", ended.set)
    with pytest.raises(Cancelled):
        get().fetch(SHARDS[0], None, cancel)
    assert ended.is_set()
    end_of_hub_threads()


# -- low disk


def test_drop_deletes_only_what_this_run_downloaded(hub: StubHub) -> None:
    first = get()
    first.fetch_text()
    first.fetch(SHARDS[0])
    second = get()
    second.fetch_all(SHARDS)
    size = second.files()[SHARDS[1]]
    assert second.drop(SHARDS[0]) == 0 and second.drop("tokenizer.json") == 0
    assert second.drop(SHARDS[1]) == size and second.drop(SHARDS[1]) == 0
    assert second.cached(SHARDS[0]) and second.cached(SHARDS[1]) is None
    blobs = list(spmoe_hub.cache_folder().glob("models--acme--tiny/blobs/*"))
    assert size not in [b.stat().st_size for b in blobs]
    assert second.fetch(SHARDS[1]).read_bytes() == model()[SHARDS[1]]


def test_drop_leaves_a_blob_that_another_revision_brought(hub: StubHub) -> None:
    get().fetch(SHARDS[0])
    hub.add("acme/tiny", model(README_md=b"newer"))
    newer = get()
    assert newer.cached(SHARDS[0]) is None
    newer.fetch(SHARDS[0])  # linked, not downloaded
    assert hub.requests("/cdn/", "GET") == 1
    assert newer.drop(SHARDS[0]) == 0 and newer.cached(SHARDS[0])


# -- the house


def test_the_hub_library_is_imported_only_when_used() -> None:
    code = (
        "import sys, spmoe_lite.hub as h\n"
        "try: h.resolve('no-such-model')\n"
        "except h.NotFoundError: pass\n"
        "assert h.resolve('.') is None\n"
        "bad = {'huggingface_hub', 'torch', 'httpx', 'httpx2'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    child = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(spmoe_hub.__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
