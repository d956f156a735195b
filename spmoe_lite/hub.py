"""Models on the Hugging Face hub: short names, sizes before the first byte, downloads that can be trusted.

`resolve` turns what the user typed into a `HubRepo` pinned to one commit. From then on every file comes from
that commit, its size is known from the hub's own listing, and a download counts only when size and hash agree
with that listing (SHA-256 for large files, the git blob id for small ones). Files stay in the hub's shared
cache. Only what `weights` and `text_files` name is ever fetched: the safetensors shards of the index and the
small text files, never a pickle and never a vendor's `consolidated.*` copy of the same weights.

huggingface-hub does the transfer (`hubcalls.py` runs its calls), with its own reading of `HF_*`, proxies and
the token, which this module never handles. Within one file it resumes a dropped connection; a killed process
keeps the finished files and fetches the unfinished one again, because releases 1.33 to 2.4 write to a temporary
file that they do not reuse.

Offline, nothing is asked of the network. The cached folder is the listing, and it is not believed either:
shards that the index names must be there, and as long as their safetensors header says.

Short names carry a commit and what its `config.json` must say. The commits are those that public code pins or
has cached for these repositories; `config.json` is compared on arrival, so that a wrong pin is an error and
never a wrong model. `mistral-7b` is Instruct v0.2: v0.3 has 32768 tokens and cannot draft for Mixtral's 32000.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import os
import re
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from spmoe_lite import hubcalls
from spmoe_lite.errors import (
    DamagedError,
    NetworkError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
)
from spmoe_lite.progress import OnProgress, Progress, check

log = logging.getLogger("spmoe_lite")


class ShortName(NamedTuple):
    """A known model: hub id, commit, and the two values its `config.json` must hold."""

    repo_id: str
    revision: str
    model_type: str
    vocab_size: int


SHORT_NAMES = {
    "mixtral-8x7b": ShortName(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        "eba92302a2861cdc0098cc54bc9f17cb2c47eb61",
        "mixtral",
        32000,
    ),
    "mixtral-8x7b-base": ShortName(
        "mistralai/Mixtral-8x7B-v0.1",
        "fc7ac94680e38d7348cfa806e51218e6273104b0",
        "mixtral",
        32000,
    ),
    "mistral-7b": ShortName(
        "mistralai/Mistral-7B-Instruct-v0.2",
        "3ad372fc79158a2148299e3318516c786aeded6c",
        "mistral",
        32000,
    ),
    "mistral-7b-base": ShortName(
        "mistralai/Mistral-7B-v0.1",
        "27d67f1b5f57dc0953326b2601d68371d40ea8da",
        "mistral",
        32000,
    ),
    "tinyllama": ShortName(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "fe8a4ea1ffedaf415f4da2f062534de366a451e6",
        "llama",
        32000,
    ),
    "smollm2-135m": ShortName(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        "llama",
        49152,
    ),
    "smollm2-360m": ShortName(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "a10cc1512eabd3dde888204e902eca88bddb4951",
        "llama",
        49152,
    ),
    "smollm2-1.7b": ShortName(
        "HuggingFaceTB/SmolLM2-1.7B-Instruct",
        "31b70e2e869a7173562077fd711b654946d38674",
        "llama",
        49152,
    ),
    "llama-3.2-1b": ShortName(
        "meta-llama/Llama-3.2-1B-Instruct",
        "9213176726f574b556790deb65791e0c5aa438b6",
        "llama",
        128256,
    ),
    "llama-3.2-3b": ShortName(
        "meta-llama/Llama-3.2-3B-Instruct",
        "0cb88a4f764b7a12671c53f0838cd831a0843b95",
        "llama",
        128256,
    ),
    "llama-3.1-8b": ShortName(
        "meta-llama/Llama-3.1-8B-Instruct",
        "0e9e39f249a16976918f6564b8830bc894c89659",
        "llama",
        128256,
    ),
}

INDEX = "model.safetensors.index.json"
TEXT_FILES = (
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)

_OPTIONAL = tuple(n for n in TEXT_FILES if n not in ("config.json", INDEX))
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PART = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_TRANSFERS = 3  # times one file is started again after its transfer broke off or arrived wrong
_TIMEOUT_S = 30.0  # for one answer of the hub's API

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Listed:
    """One file as the hub lists it: bytes, and the hash that its kind of storage has."""

    size: int
    sha256: str | None = None
    git_oid: str | None = None


@dataclass
class HubRepo:
    """One hub repository at one commit; made by `resolve`.

    id: ORG/NAME. revision: the commit, 40 hex digits. asked: the branch, tag or commit it came from.
    name: what to call a pack made of it. listing: file name -> size and hash.
    """

    id: str
    revision: str
    asked: str
    name: str
    offline: bool
    listing: dict[str, _Listed] = field(repr=False)
    expected: ShortName | None = None
    _fetched: set[str] = field(default_factory=set, repr=False)  # downloaded by this object

    def files(self) -> dict[str, int]:
        """Size in bytes of every file of the commit (offline: of every cached one)."""
        return {name: listed.size for name, listed in self.listing.items()}

    def text_files(self) -> list[str]:
        """The small files a pack is made from, as far as the repository has them."""
        return [name for name in TEXT_FILES if name in self.listing]

    def weights(
        self, on_progress: OnProgress | None = None, cancel: threading.Event | None = None
    ) -> list[str]:
        """The shards to fetch: those the index names, or the single file, or a full set of parts.

        Raises UnsupportedError where there are no safetensors weights, DamagedError where the index names
        a file that the repository lacks; offline, NetworkError that lists missing and short shards.
        """
        if INDEX in self.listing:
            shards = _index_shards(self.fetch(INDEX, on_progress, cancel), self.id)
        elif "model.safetensors" in self.listing:
            shards = ["model.safetensors"]
        else:
            shards = self._parts()
        if self.offline:
            self._check_cached(shards)
        missing = [name for name in shards if name not in self.listing]
        if missing:
            raise DamagedError(
                f"{self.id} is incomplete on the hub: its index names {missing[0]}, "
                f"which commit {self.revision[:12]} does not hold; choose another revision with @"
            )
        return shards

    def download_bytes(self, names: Iterable[str]) -> int:
        """Bytes of `names` that are not in the cache yet."""
        return sum(self.listing[n].size for n in names if self.cached(n) is None)

    def cached(self, name: str) -> Path | None:
        """Where the cache has `name` in full, or None. No network."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, name, revision=self.revision)
        if isinstance(found, str) and os.path.getsize(found) == self.listing[name].size:
            return Path(found)
        return None

    def check_access(self, cancel: threading.Event | None = None) -> None:
        """Ask the hub for the header of `config.json`: fails now rather than after the first shard."""
        if "config.json" not in self.listing:
            raise UnsupportedError(
                f"{self.id} has no config.json, so it is no model that can be converted; "
                f"it holds {', '.join(sorted(self.listing)[:4]) or 'nothing'}"
            )
        if self.offline:
            return
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        url = hf_hub_url(self.id, "config.json", revision=self.revision)
        self._ask(lambda: get_hf_file_metadata(url), cancel)

    def fetch(
        self,
        name: str,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """The local path of `name`, downloaded if the cache does not hold it in full.

        Progress counts the bytes of this file. A transfer that breaks off, comes short or fails its hash is
        started again; what still does not agree is removed from the cache and raises NetworkError.
        """
        check(cancel)
        if name not in self.listing:
            raise self._lacks(name)
        path = self.cached(name)
        if self.offline and path is None:
            raise self._lacks(name)
        by_branch = name == "config.json" and self.asked != self.revision and not self.offline
        if path is None or by_branch:
            path = self._download(name, on_progress, cancel)
        elif on_progress is not None:
            on_progress(
                Progress("download", self.listing[name].size, self.listing[name].size, "bytes")
            )
        if name == "config.json":
            self._check_expected(path)
        return path

    def fetch_all(
        self,
        names: Iterable[str],
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """Fetch `names` one after the other; return the folder that now holds them.

        Progress counts the bytes of all of them together.
        """
        names = list(names)
        total = sum(self.listing[n].size for n in names if n in self.listing)
        before = 0
        folder = None
        for name in names:
            start = before

            def report(progress: Progress, start: int = start) -> None:
                assert on_progress is not None
                on_progress(Progress("download", start + progress.done, total, "bytes"))

            folder = self.fetch(name, report if on_progress else None, cancel).parent
            before += self.listing[name].size
        assert folder is not None, "no names"
        return folder

    def fetch_text(
        self, on_progress: OnProgress | None = None, cancel: threading.Event | None = None
    ) -> Path:
        """Fetch the small text files; return their folder, where later shards appear too.

        Those that the repository lacks are noted in the cache, so that --offline knows it as well.
        """
        folder = self.fetch_all(self.text_files(), on_progress, cancel)
        for name in _OPTIONAL:
            if name not in self.listing and not self.offline and self._unknown(name):
                self._note_absent(name, cancel)
        return folder

    def drop(self, name: str) -> int:
        """Delete `name` from the cache if this object downloaded it; return the bytes given back.

        Files that were there before, of this or any other revision, are left alone.
        """
        if name not in self._fetched:
            return 0
        self._fetched.discard(name)
        path = self.cached(name)
        return 0 if path is None else _remove(path)

    def source(self) -> dict[str, str]:
        """What the manifest of a pack says about its origin."""
        return {"id": self.id, "revision": self.revision}

    # -- below: how

    def _parts(self) -> list[str]:
        """Shards of a repository without an index, or the reason why it cannot be converted."""
        parts = sorted(n for n in self.listing if _PART.fullmatch(n))
        if parts and len(parts) == int(_PART.fullmatch(parts[0])[2]):  # type: ignore[index]
            return parts
        if self.offline:
            raise self._lacks(INDEX if parts else "model.safetensors")
        if parts:
            raise DamagedError(
                f"{self.id} is incomplete on the hub: it has {len(parts)} parts like {parts[0]} "
                f"and no {INDEX}; choose another revision with @"
            )
        pickles = "only pickled weights, which are never loaded; look for a safetensors revision"
        reasons = {
            ".gguf": "only GGUF files; download one and give its path to convert",
            ".bin": pickles,
            ".pt": pickles,
            ".pth": pickles,
            ".safetensors": "only files of another layout; look for a repository in transformers layout",
        }
        for suffix, reason in reasons.items():
            for name in sorted(n for n in self.listing if n.endswith(suffix)):
                raise UnsupportedError(f"{self.id} cannot be converted: it holds {name}, {reason}")
        raise UnsupportedError(f"{self.id} cannot be converted: it holds no weights")

    def _check_cached(self, shards: list[str]) -> None:
        """Offline: every shard must be there and as long as its own header says."""
        faults = []
        for name in shards:
            if name not in self.listing:
                faults.append(f"{name} is missing")
                continue
            path, size = self.cached(name), self.listing[name].size
            wanted = None if path is None else _safetensors_bytes(path)
            if wanted is None:
                faults.append(f"{name} is cut off at {size} bytes")
            elif wanted != size:
                faults.append(f"{name} has {size} of {wanted} bytes")
        if faults:
            more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
            raise NetworkError(
                f"offline: the hub cache holds {self.id} only in part: {', '.join(faults[:3])}{more}; "
                f"run the command once without --offline"
            )

    def _check_expected(self, path: Path) -> None:
        if self.expected is None:
            return
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
            found = (config.get("model_type"), config.get("vocab_size"))
        except (ValueError, AttributeError):
            raise DamagedError(f"config.json of {self.id} is not a JSON object: {path}") from None
        wanted = (self.expected.model_type, self.expected.vocab_size)
        if found != wanted:
            raise UnsupportedError(
                f"{self.id}@{self.revision[:12]} is {found[0]} with {found[1]} tokens, but "
                f"'{self.name}' means {wanted[0]} with {wanted[1]}; give the ORG/NAME@REVISION you want"
            )

    def _lacks(self, name: str) -> SpmoeError:
        if self.offline:
            return NetworkError(
                f"offline: {name} of {self.id} is not in the hub cache; "
                f"run the command once without --offline"
            )
        return NotFoundError(f"{self.id} has no file {name} at commit {self.revision[:12]}")

    def _download(
        self, name: str, on_progress: OnProgress | None, cancel: threading.Event | None
    ) -> Path:
        listed = self.listing[name]
        # config.json goes by the name of the branch, so that the cache remembers which commit that was
        # and --offline can find it; all else goes by commit.
        revision = self.asked if name == "config.json" else self.revision
        force = self._stale(name)  # the hub library would hand back a cut-off file as it is
        fault = ""
        for _ in range(_TRANSFERS):
            meter = hubcalls.Meter(listed.size, on_progress)
            try:
                path = self._transfer(name, revision, force, meter, cancel)
            except hubcalls.Broken as broken:
                fault = f"{meter.done} of {listed.size} bytes came{broken}"
                continue
            if meter.done or force:
                self._fetched.add(name)
            if path.parent.name != self.revision:
                revision = self.revision  # the branch has moved since `resolve`
                continue
            fault = _fault(path, listed, cancel)
            if not fault:
                meter.finish()
                return path
            _remove(path)
            force = True
        raise NetworkError(
            f"{name} of {self.id} did not arrive whole in {_TRANSFERS} tries ({fault}); "
            f"check the connection and run the command again, finished files are kept"
        )

    def _transfer(
        self,
        name: str,
        revision: str,
        force: bool,
        meter: hubcalls.Meter,
        cancel: threading.Event | None,
    ) -> Path:
        """One download by the hub library; `Broken` if it began and may succeed when started again."""
        from huggingface_hub import hf_hub_download

        def task() -> str:
            return hf_hub_download(
                self.id,
                name,
                revision=revision,
                force_download=force,
                tqdm_class=meter.bar_class(),
            )

        def explain(error: BaseException) -> Exception:
            if meter.began and hubcalls.is_transport(error):
                short = isinstance(error, OSError) and error.errno is None
                return hubcalls.Broken("" if short else f": {hubcalls.one_line(error)}")
            return hubcalls.explain(error, self.id, self.asked, _did_you_mean(self.id))

        return Path(hubcalls.on_thread(task, explain, cancel, meter))

    def _unknown(self, name: str) -> bool:
        """Whether the cache neither has `name` nor knows that the commit lacks it."""
        from huggingface_hub import try_to_load_from_cache

        return try_to_load_from_cache(self.id, name, revision=self.revision) is None

    def _note_absent(self, name: str, cancel: threading.Event | None) -> None:
        """Let the hub library find out that `name` does not exist: it remembers that in its cache."""
        from huggingface_hub import errors, hf_hub_download

        def ask() -> None:
            try:
                hf_hub_download(self.id, name, revision=self.revision)
            except errors.EntryNotFoundError:
                pass

        self._ask(ask, cancel)

    def _stale(self, name: str) -> bool:
        """Whether the cache has a file of that name which is not the listed one."""
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.id, name, revision=self.revision)
        return isinstance(found, str) and self.cached(name) is None

    def _ask(self, task: Callable[[], T], cancel: threading.Event | None) -> T:
        return hubcalls.on_thread(
            task,
            lambda error: hubcalls.explain(error, self.id, self.asked, _did_you_mean(self.id)),
            cancel,
        )


def resolve(
    source: str | Path,
    *,
    revision: str | None = None,
    offline: bool = False,
    cancel: threading.Event | None = None,
) -> HubRepo | None:
    """The hub repository that `source` names, pinned to a commit; None if `source` is an existing path.

    source: a short name, ORG/NAME, or either with @REVISION (or `revision`). One request tells commit, file
    names and sizes; offline (or with HF_HUB_OFFLINE set) the cache is read instead.
    Raises NotFoundError for a name that is no model, NetworkError where hub or cache cannot answer.
    """
    text = str(source)
    if os.path.exists(os.path.expanduser(text)):
        return None
    repo_id, revision, name, expected = _parse(text, revision)
    from huggingface_hub import is_offline_mode

    if offline or is_offline_mode():
        return _from_cache(repo_id, revision, name, expected)
    from huggingface_hub import HfApi

    def ask() -> Any:
        return HfApi().model_info(
            repo_id, revision=revision, files_metadata=True, timeout=_TIMEOUT_S
        )

    info = hubcalls.on_thread(
        ask,
        lambda error: hubcalls.explain(error, repo_id, revision, _did_you_mean(repo_id)),
        cancel,
    )
    files = info.siblings or ()
    if not re.fullmatch(r"[0-9a-f]{40}", info.sha or "") or any(f.size is None for f in files):
        raise NetworkError(
            f"{hubcalls.endpoint()} tells no commit and file sizes for {repo_id}; check HF_ENDPOINT"
        )
    listing = {f.rfilename: _Listed(f.size, f.lfs and f.lfs.sha256, f.blob_id) for f in files}
    return HubRepo(repo_id, info.sha, revision, name, False, listing, expected)


def cache_folder() -> Path:
    """Where the hub library keeps its downloads (HF_HUB_CACHE, HF_HOME)."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _parse(text: str, revision: str | None) -> tuple[str, str, str, ShortName | None]:
    """What the user typed -> (hub id, revision to ask for, pack name, what config.json must say)."""
    model, at, after = text.partition("@")
    if at and after:
        revision = revision or after
    known = SHORT_NAMES.get(model.lower())
    if known is not None:
        pinned = revision is None
        return known.repo_id, revision or known.revision, model.lower(), known if pinned else None
    if _HUB_ID.fullmatch(model) and not model.endswith((".gguf", ".safetensors")):
        return model, revision or "main", model.partition("/")[2], None
    if re.search(r"[\\/~]|\.gguf$|\.safetensors$", model) and "://" not in model:
        raise NotFoundError(f"no such file or folder: {f'{text!r}'[1:-1]:.200}; check the path")
    hint = _did_you_mean(model) or f"; known are {', '.join(SHORT_NAMES)}"
    raise NotFoundError(
        f"{f'{text!r}':.80} is no file, no folder and no known model{hint}; models of the hub are ORG/NAME"
    )


def _did_you_mean(model: str) -> str:
    known = {name: name for name in SHORT_NAMES}
    known |= {entry.repo_id.lower(): entry.repo_id for entry in SHORT_NAMES.values()}
    close = difflib.get_close_matches(model.lower(), known, n=1, cutoff=0.7)
    return f" (did you mean {known[close[0]]}?)" if close else ""


def _from_cache(repo_id: str, revision: str, name: str, expected: ShortName | None) -> HubRepo:
    from huggingface_hub import try_to_load_from_cache

    config = hubcalls.guarded(
        lambda: try_to_load_from_cache(repo_id, "config.json", revision=revision), repo_id
    )
    if not isinstance(config, str):
        raise NetworkError(
            f"offline: {repo_id}@{revision[:12]} is not in the hub cache {cache_folder()}; "
            f"run the command once without --offline"
        )
    folder = Path(config).parent
    listing = {p.name: _Listed(p.stat().st_size) for p in folder.iterdir() if p.is_file()}
    repo = HubRepo(repo_id, folder.name, revision, name, True, listing, expected)
    unknown = [n for n in _OPTIONAL if repo._unknown(n)]
    if unknown:
        log.warning("offline: going on without %s, which %s may have", ", ".join(unknown), repo_id)
    return repo


# -- checking what arrived


def _index_shards(path: Path, repo_id: str) -> list[str]:
    """The file names of an index, each once; none may lead out of its folder."""
    try:
        names = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
        plain = all(re.fullmatch(r"[\w.-]+\.safetensors", n) and ".." not in n for n in names)
    except (ValueError, KeyError, TypeError, AttributeError):
        names, plain = [], False
    if not names or not plain:
        raise DamagedError(f"{INDEX} of {repo_id} does not name safetensors files: {path}")
    return names


def _safetensors_bytes(path: Path) -> int | None:
    """The length that a safetensors file's own header asks for; None if the header is cut off or not one."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else size
        if length > min(size, 100 << 20) - 8:
            return None
        try:
            tensors = json.loads(file.read(length))
            ends = [t["data_offsets"][1] for k, t in tensors.items() if k != "__metadata__"]
            return 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return None


def _fault(path: Path, listed: _Listed, cancel: threading.Event | None) -> str:
    """What is wrong with a downloaded file, in a few words; empty if nothing is."""
    size = path.stat().st_size
    if size != listed.size:
        return f"{size} of {listed.size} bytes"
    if listed.sha256 is not None:
        digest, wanted = hashlib.sha256(), listed.sha256
    elif listed.git_oid is not None:
        digest, wanted = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), listed.git_oid
    else:
        return ""
    with path.open("rb") as file:
        while chunk := file.read(8 << 20):
            check(cancel)
            digest.update(chunk)
    return "" if digest.hexdigest() == wanted else "its hash is not the hub's"


def _remove(path: Path) -> int:
    """Delete a cached file and the blob behind it; return the bytes."""
    size = path.stat().st_size
    if (
        path.is_symlink()
    ):  # snapshots/COMMIT/NAME -> ../../blobs/HASH; where links are refused, a plain file
        blob = Path(os.path.normpath(path.parent / os.readlink(path)))
        if blob.parent == path.parents[2] / "blobs":
            blob.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    return size
