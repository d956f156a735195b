"""How a pack is written: file by file, hashed on the way, resumable, and never half there.

The writer works in NAME.spmoe.partial under the operating system's lock. A file is written under
a temporary name while it is hashed, flushed to the disk, renamed, and only then recorded in
partial.json; the manifest comes last and one rename of the folder makes the pack. So a killed run
leaves whole files and at most one temporary one, and the next run with the same options goes on
from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from spmoe_lite import manifest as m
from spmoe_lite.config import ModelConfig
from spmoe_lite.errors import DamagedError, UsageError
from spmoe_lite.files import LOCK, PARTIAL, locked, naming, open_listed
from spmoe_lite.manifest import Dtypes, expert_layout
from spmoe_lite.pack import CHUNK, TORCH_DTYPES, Pack, Weight, hash_file, verify_files
from spmoe_lite.precision import ExpertLayout, scheme_of
from spmoe_lite.progress import OnProgress, check
from spmoe_lite.quant import QuantizedMatrix

WRITE = 1 << 20  # bytes of one system call: 16 MiB at once took ext4 four times as long


class PackWriter:
    """Writes one pack, file by file; a context manager that gives up the lock at its end.

    `path` is the pack to be. Work is done in `path`.partial: files finished there by an earlier
    run with the same model, dtypes, source and options are kept (`has`), any other partial is
    wiped. Leaving the context with no file finished removes the partial folder; otherwise it
    stays for the next run.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        dtypes: Dtypes,
        source: dict[str, Any],
        options: dict[str, Any],
        *,
        force: bool = False,
        cancel: threading.Event | None = None,
    ) -> None:
        """Raises `UsageError` if `path` is taken (unless `force` and it is a pack), `BusyError`
        if another process writes the same pack, `CapacityError` or `SpmoeError` for the disk's
        errors."""
        self.path = Path(path)
        self.partial = self.path.with_name(self.path.name + PARTIAL)
        self.config, self.dtypes = config, dtypes
        self.layout: ExpertLayout | None = None
        assert config.is_moe == (dtypes.experts is not None)
        if dtypes.experts is not None:
            sizes = config.hidden_size, config.intermediate_size
            self.layout = expert_layout(dtypes.experts, *sizes)
        self.force, self.cancel = force, cancel
        self._head: dict[str, Any] = {
            "format": m.FORMAT,
            "model": config.to_dict(),
            "dense_dtype": dtypes.dense,
            "linear_dtype": dtypes.linear,
            "embed_dtype": dtypes.embed,
            "expert_dtype": dtypes.experts,
            "expert_layout": self.layout and asdict(self.layout),
            "source": source,
            "options": options,
        }
        self._head = json.loads(json.dumps(self._head))  # as it will be read back
        self._files: dict[str, dict[str, Any]] = {}  # finished: {name: {size, sha256}}
        self._trusted: set[str] = set()  # of these, the ones whose hash this run knows
        self._stack = contextlib.ExitStack()
        m.restore_old(self.path)
        m.check_target(self.path, force)
        with naming(self.partial, "write"):
            if self.partial.is_symlink() or (self.partial.exists() and not self.partial.is_dir()):
                raise UsageError(f"{self.partial} is in the way; move it away")
            self.partial.mkdir(parents=True, exist_ok=True)
        self._stack.enter_context(locked(self.partial))
        try:
            self._adopt()
        except BaseException:
            self._stack.close()
            raise

    # Taking up an earlier run

    def _adopt(self) -> None:
        """Keep what an earlier run with the same options finished, else start from nothing."""
        journal = m.read_journal(self.partial)
        if journal.get("head") == self._head:
            files = journal.get("files")
            self._files = files if isinstance(files, dict) else {}
        else:
            self._wipe(journal)
        self._write_journal()
        if self.config.is_moe:
            with naming(self.partial, "write"):
                (self.partial / m.EXPERTS).mkdir(exist_ok=True)

    def _wipe(self, journal: dict[str, Any]) -> None:
        """Delete what another conversion left; the journal goes last, by being replaced."""
        keep = {LOCK, m.JOURNAL, m.JOURNAL + ".tmp"}
        with naming(self.partial, "write"):
            found = [entry for entry in self.partial.iterdir() if entry.name not in keep]
        if found and not journal:
            raise UsageError(
                f"{self.partial} exists and is not an unfinished conversion; move it away"
            )
        with naming(self.partial, "write"):
            for entry in found:
                _delete(entry)

    def has(self, name: str) -> bool:
        """Whether `name` is finished. A file of an earlier run is hashed once before it is
        believed.
        """
        entry = self._files.get(name)
        if entry is None:
            return False
        if name not in self._trusted:
            if not self._intact(name, entry):
                del self._files[name]
                return False
            self._trusted.add(name)
        return True

    def _intact(self, name: str, entry: Any) -> bool:
        path = self.partial / name
        try:
            with open_listed(self.partial, name, entry["size"]) as file:
                return hash_file(file, path, self.cancel) == entry["sha256"]
        except (DamagedError, TypeError, KeyError):
            return False

    # Writing

    def write_dense(self, tensors: Mapping[str, Callable[[], Weight]]) -> None:
        """Write dense.safetensors from {name: read} in any order, one tensor at a time.

        `read()` returns the tensor on the CPU. The names and shapes are those of
        `manifest.dense_shapes(config)`, the dtypes those of the writer; the file has their order.
        """
        shapes = m.dense_shapes(self.config)
        if tensors.keys() != shapes.keys():
            odd = sorted(tensors.keys() ^ shapes.keys())
            raise ValueError(f"dense tensors missing or not expected: {odd[:5]}")
        with self._writing(m.DENSE) as out:
            out.write(m.write_header(m.dense_entries(self.config, self.dtypes)))
            for name, shape in shapes.items():
                for part in _parts(name, tensors[name](), self.dtypes.of(name), shape):
                    out.write(part)

    def write_layer(
        self,
        layer: int,
        experts: Iterable[tuple[Weight, Weight, Weight]],
    ) -> None:
        """Write one layer's experts from (gate [I, H], up [I, H], down [H, I]), in the order of
        ids.

        The matrices are on the CPU in the expert dtype; the memory of each may be reused as soon
        as the next is asked for.
        """
        layout, count = self.layout, self.config.num_local_experts
        assert layout is not None
        up_shape = (layout.intermediate_size, layout.hidden_size)
        matrices = (
            ("gate", layout.gate_offset, up_shape),
            ("up", layout.up_offset, up_shape),
            ("down", layout.down_offset, up_shape[::-1]),
        )
        header = m.write_header(
            {
                f"expert.{e}": m.Tensor("U8", (layout.stride,), 0, layout.stride)
                for e in range(count)
            }
        )
        written = 0
        with self._writing(m.layer_file(layer)) as out:
            out.write(header)
            for expert in experts:
                start = out.size
                for (name, offset, shape), matrix in zip(matrices, expert, strict=True):
                    label = f"{name} of expert {written} of layer {layer}"
                    parts = _parts(label, matrix, layout.dtype, shape)
                    out.pad(start + offset)
                    for part in parts:
                        out.write(part)
                out.pad(start + layout.stride)
                out.wait()  # the buffers are the caller's again
                written += 1
            if written != count:
                raise ValueError(f"layer {layer} got {written} experts, not {count}")

    def link_layer(self, layer: int, other: int) -> None:
        """Give one layer the experts of another that is written: the same file under two names.

        For packs of random weights, whose size should cost neither disk nor RAM.
        """
        name, source = m.layer_file(layer), m.layer_file(other)
        path = self.partial / name
        with naming(path, "write"):
            path.unlink(missing_ok=True)
            os.link(self.partial / source, path)
        self._files[name] = dict(self._files[source])
        self._trusted.add(name)
        self._write_journal()

    def copy_text(self, name: str, source: Path | bytes) -> None:
        """Copy a small file (tokenizer, chat template, generation settings) beside the tensors."""
        if not m.is_text_name(name):
            raise ValueError(f"{name!r} cannot be the name of a text file in a pack")
        with naming(Path(name) if isinstance(source, bytes) else source, "read"):
            data = source if isinstance(source, bytes) else source.read_bytes()
        with self._writing(name) as out:
            out.write(data)

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[_HashingFile]:
        """A temporary file that gets its name, and a line in the journal, only when all went
        well.
        """
        path = self.partial / name
        temporary = path.with_name(path.name + ".tmp")
        self._files.pop(name, None)
        try:
            with _HashingFile(temporary, self.cancel) as out:
                yield out
                digest = out.finish()
            with naming(path, "write"):
                os.replace(temporary, path)
                _sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        self._files[name] = {"size": out.size, "sha256": digest}
        self._trusted.add(name)
        self._write_journal()

    def _write_journal(self) -> None:
        _write_json(self.partial / m.JOURNAL, {"head": self._head, "files": self._files})

    # Finishing

    def verify(
        self, names: Iterable[str] | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """Read finished files back (None: all) and compare hashes; `DamagedError` names one that
        differs.

        That file no longer counts as finished, so the next run writes it again.
        """
        entries = {name: self._files[name] for name in (self._files if names is None else names)}
        files = {name: (entry["size"], entry["sha256"]) for name, entry in entries.items()}
        try:
            verify_files(self.partial, files, on_progress, self.cancel)
        except DamagedError:
            self._trusted -= files.keys()
            kept = [name for name in list(self._files) if self.has(name)]
            self._files = {name: self._files[name] for name in kept}
            self._write_journal()
            raise
        self._trusted |= files.keys()

    def finish(self, audit: dict[str, Any], num_tokens: int) -> Path:
        """Write the manifest, check the whole as a reader would, and rename it into place.

        With `force` an existing pack moves aside only now and is deleted last. Returns `path`.
        """
        missing = [name for name in m.required_files(self.config) if not self.has(name)]
        if missing:
            raise ValueError(f"cannot finish {self.path}: {missing[0]} is not written")
        files = {name: entry for name, entry in sorted(self._files.items()) if self.has(name)}
        raw = self._head | {
            "num_tokens": num_tokens,
            "audit": audit,
            "files": files,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        raw = json.loads(json.dumps(raw))  # as it will be read
        raw["sha256"] = m.own_hash(raw)
        m.check_manifest(raw, self.partial / m.MANIFEST)
        self._delete_strays()
        _write_json(self.partial / m.MANIFEST, raw)
        Pack.open(self.partial).close()
        m.check_target(self.path, self.force)
        if os.name == "nt":  # where a folder with an open file cannot be renamed
            self._stack.close()
        self._rename()
        self._stack.close()
        return self.path

    def _delete_strays(self) -> None:
        """Temporary files of a killed run, and whatever else is no part of the pack."""
        keep = {LOCK, m.JOURNAL, *self._files}
        with naming(self.partial, "write"):
            for entry in [*self.partial.iterdir(), *self.partial.glob(m.EXPERTS + "/*")]:
                name = entry.relative_to(self.partial).as_posix()
                if name not in keep and not (name == m.EXPERTS and self.config.is_moe):
                    _delete(entry)

    def _rename(self) -> None:
        """The partial folder becomes the pack, its lock with it; one that was there is deleted last."""
        old = self.path.with_name(self.path.name + m.OLD)
        with naming(self.path, "write"):
            if (self.path / m.MANIFEST).is_file():
                if old.exists():
                    shutil.rmtree(old)
                self.path.rename(old)
            elif self.path.is_dir():
                self.path.rmdir()
            try:
                self.partial.rename(self.path)
            except OSError:
                m.put_back(self.path)
                raise
            _sync_folder(self.path.parent)
            for name in (m.JOURNAL, LOCK):
                (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Give up the lock; a partial folder in which nothing was finished goes. Idempotent."""
        held = self._stack.pop_all()
        empty = not self._files and self.partial.is_dir()
        if empty:
            shutil.rmtree(self.partial, ignore_errors=True)
        held.close()
        if empty and os.name == "nt":  # where an open lock file cannot be deleted
            shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> PackWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _HashingFile:
    """A file that is hashed by a thread of its own while it is written; `size` counts its bytes.

    `write` hands a buffer to the hash thread and writes it meanwhile; both release the GIL. It
    may return before the hash is done: `wait` says when the buffers are free to be changed.
    """

    def __init__(self, path: Path, cancel: threading.Event | None) -> None:
        self._path, self._cancel = path, cancel
        with naming(path, "write"):
            self._file = open(path, "wb", buffering=0)
        self._hash = hashlib.sha256()
        self._queue: queue.Queue[memoryview | None] = queue.Queue(maxsize=8)
        self._thread = threading.Thread(target=self._run, name="spmoe-hash", daemon=True)
        self._thread.start()
        self.size = 0

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            self._hash.update(piece)
            self._queue.task_done()

    def write(self, data: bytes | torch.Tensor) -> None:
        view = _bytes_of(data).data if isinstance(data, torch.Tensor) else memoryview(data)
        for begin in range(0, len(view), CHUNK):
            check(self._cancel)
            piece = view[begin : begin + CHUNK]
            self._queue.put(piece)
            done = 0
            with naming(self._path, "write"):
                while done < len(piece):
                    done += self._file.write(piece[done : done + WRITE])
            self.size += len(piece)

    def pad(self, size: int) -> None:
        """Zeros up to `size` bytes from the start of the file."""
        if size > self.size:
            self.write(bytes(size - self.size))

    def wait(self) -> None:
        """Return when everything written so far is hashed."""
        self._queue.join()

    def finish(self) -> str:
        """Flush to the disk; return the SHA-256 in hex."""
        with naming(self._path, "write"):
            os.fsync(self._file.fileno())
        self.wait()
        return self._hash.hexdigest()

    def __enter__(self) -> _HashingFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        self._file.close()


def _delete(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """uint8 [n] over the memory of a CPU tensor; a copy only if it is not contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


def _parts(name: str, weight: Weight, dtype: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """The tensors that hold `weight`, in the order in which they are written; ValueError if it is
    not of that dtype and shape."""
    scheme = scheme_of(dtype)
    if isinstance(weight, QuantizedMatrix):
        found, parts = str(weight.scheme), weight.tensors()
        good = weight.scheme == scheme and len(shape) == 2
        good = good and tuple(part.nbytes for part in parts) == weight.scheme.parts(*shape)
    else:
        found, parts = str(weight.dtype), [weight]
        good = scheme is None and weight.dtype == TORCH_DTYPES[dtype]
    if not good or tuple(weight.shape) != shape:
        raise ValueError(f"{name} is {found} {tuple(weight.shape)}, not {dtype} {shape}")
    return parts


def _write_json(path: Path, value: Any) -> None:
    """Write JSON under a temporary name, flush it, rename it into place."""
    temporary = path.with_name(path.name + ".tmp")
    with naming(path, "write"):
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Flush a rename to the disk; systems that cannot (Windows, some network disks) go without."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        with contextlib.suppress(OSError):
            os.fsync(handle)
        os.close(handle)
