"""A model on disk: `Pack` reads the folder NAME.spmoe/, which `pack_writer.py` makes.

The folder holds manifest.json, dense.safetensors (what always stays in memory), one file of
experts per MoE layer, and the tokenizer's files; `docs/pack-format.md` specifies it. Opening a
pack checks the manifest, every size and every header, and reads no tensor. Dense weights are read
explicitly. An expert is one page-aligned run of bytes, lent as a view of the mapped file or read
into a buffer of the caller's.

Views and `close`: a view returned by `expert_bytes` or `layer_bytes` keeps its layer's mapping alive. Drop every
view (and every tensor made from one), then `close()` unmaps. A view that outlives `close()` stays
valid, and its mapping goes when the last view of that layer does; nothing is ever unmapped under
a reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from io import FileIO
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from spmoe_lite import manifest as m
from spmoe_lite.errors import BusyError, DamagedError
from spmoe_lite.files import disk_error, open_confined, open_listed
from spmoe_lite.precision import ExpertLayout, scheme_of
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.quant import QuantizedMatrix, view_matrix

Weight: TypeAlias = "torch.Tensor | QuantizedMatrix"

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
CHUNK = 16 << 20  # bytes between two looks at `cancel`

log = logging.getLogger("spmoe_lite")


class Pack:
    """One opened pack; a context manager. Reading from several threads at once is fine."""

    def __init__(self, path: Path, manifest: m.Manifest) -> None:
        self.path = path
        self.name = path.name.removesuffix(m.SUFFIX)
        self.manifest = manifest.raw
        self.format = manifest.format
        self.config = manifest.config
        self.dtypes = manifest.dtypes
        self.dense_dtype = manifest.dtypes.dense
        self.expert_layout = manifest.layout
        self.num_tokens = manifest.num_tokens
        self.files = manifest.files
        self._lock = threading.Lock()  # guards _maps, and file positions where preadv is missing
        self._open: dict[str, FileIO] = {}
        self._starts: list[int] = []  # of each layer's first expert, in bytes
        self._maps: dict[int, mmap.mmap] = {}
        self._warned = False
        self._closed = False

    @classmethod
    def open(cls, path: Path | str) -> Pack:
        """Open the folder `path`; every size and header is checked, no tensor is read.

        Raises `NotFoundError`, `UnsupportedError` (another format) or `DamagedError`, naming the
        file.
        """
        path = Path(path)
        pack = cls(path, m.read_manifest(path))
        try:
            pack._open_files()
        except BaseException:
            pack.close()
            raise
        return pack

    def _open_files(self) -> None:
        for name, (size, _) in self.files.items():
            self._open[name] = open_listed(self.path, name, size)
        for name in m.TEXT_FILES:  # read by name, so confined even where the manifest has none
            if name not in self.files and os.path.lexists(self.path / name):
                with contextlib.suppress(OSError):
                    open_confined(self.path, name).close()
        for name in filter(m.is_text_name, list(self._open)):
            self._open.pop(name).close()
        self._check_dense()
        if self.config.is_moe:
            for layer in range(self.config.num_hidden_layers):
                self._starts.append(self._check_experts(m.layer_file(layer)))

    def _check_dense(self) -> None:
        path, expected = self.path / m.DENSE, m.dense_entries(self.config, self.dtypes)
        self._dense = m.read_header(self._open[m.DENSE], path, len(expected))
        for (name, found), due in zip(self._dense.items(), expected, strict=True):
            if name != due:
                raise DamagedError(f"{path} holds {name!r:.80} where {due} is due; convert again")
            wanted = expected[name]
            if (found.dtype, found.shape, found.size) != (wanted.dtype, wanted.shape, wanted.size):
                raise DamagedError(
                    f"{path}: {name} is {found.dtype!r:.20} {list(found.shape)!r:.60}, "
                    f"not {wanted.dtype} {list(wanted.shape)}; convert again"
                )

    def _check_experts(self, name: str) -> int:
        """Check one layer's header; return where its first expert starts."""
        assert self.expert_layout is not None
        path, stride = self.path / name, self.expert_layout.stride
        count = self.config.num_local_experts
        tensors = m.read_header(self._open[name], path, count)
        if list(tensors) != [f"expert.{e}" for e in range(count)]:
            raise DamagedError(f"{path} does not list its experts in order; convert again")
        for key, tensor in tensors.items():
            if (tensor.dtype, tensor.shape, tensor.size) != ("U8", (stride,), stride):
                raise DamagedError(
                    f"{path}: {key} is {tensor.dtype!r:.20} {list(tensor.shape)!r:.60}, "
                    f"not U8 [{stride}]; convert again"
                )
        return tensors["expert.0"].start

    def dense_bytes(self) -> int:
        """Bytes of all dense tensors."""
        return sum(tensor.size for tensor in self._dense.values())

    def dense_sizes(self) -> dict[str, int]:
        """The same by dtype."""
        return m.dense_sizes(self.config, self.dtypes)

    def expert_count(self) -> int:
        """Layers times experts; 0 for a dense model."""
        return self.config.num_hidden_layers * self.config.num_local_experts

    def load_dense(
        self,
        device: str | torch.device = "cpu",
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> dict[str, Weight]:
        """Read every dense tensor, explicitly and in the file's order, one at a time to `device`.

        Raises `Cancelled` within 16 MiB, `DamagedError` for a file cut short since it was opened.
        """
        total, done, tensors = self.dense_bytes(), 0, {}
        for name, shape in m.dense_shapes(self.config).items():
            dtype = self.dtypes.of(name)
            parts = m.stored_as(name, dtype, shape)  # one after the other in the file
            memory = torch.empty(sum(part.size for _, part in parts), dtype=torch.uint8)
            start, buffer = self._dense[parts[0][0]].start, memory.numpy()
            for begin in range(0, len(buffer), CHUNK):
                check(cancel)
                piece = buffer[begin : begin + CHUNK]
                self._read(m.DENSE, start + begin, piece)
                done += len(piece)
                if on_progress is not None:
                    on_progress(Progress("load", done, total, "bytes"))
            tensors[name] = view_weight(memory.to(device), dtype, shape)
        return tensors

    def expert_bytes(self, layer: int, expert: int) -> np.ndarray:
        """uint8 [stride], read-only: the expert where it lies in the mapped file, nothing copied.

        Where the system refuses to map the file the expert is read into memory of its own
        instead; a warning says so once. Touching a view of a file that was cut short afterwards
        ends the process (SIGBUS), as with every mapping; `read_expert` reports it.
        """
        layout, start = self._locate(layer, expert)
        try:
            mapping = self._map(layer)
        except (OSError, ValueError) as error:
            if not self._warned:
                self._warned = True
                log.warning("cannot map %s (%s); experts are read instead", self.path, str(error))
            memory = np.frombuffer(mmap.mmap(-1, layout.stride), dtype=np.uint8)  # page aligned
            self.read_expert(layer, expert, memory)
            memory.flags.writeable = False
            return memory
        return np.frombuffer(mapping, dtype=np.uint8, count=layout.stride, offset=start)

    def layer_bytes(self, layer: int) -> np.ndarray:
        """uint8 [experts, stride], read-only: all experts of a layer in the mapped file.

        Keeps the mapping alive as a view of one expert does. OSError or ValueError where the system
        refuses to map the file, `DamagedError` for one cut short since it was opened.
        """
        layout, start = self._locate(layer, 0)
        mapping, experts = self._map(layer), self.config.num_local_experts
        if len(mapping) < start + experts * layout.stride:
            path = self.path / m.layer_file(layer)
            raise DamagedError(f"{path} ends at byte {len(mapping)}; convert again")
        run = np.frombuffer(mapping, np.uint8, experts * layout.stride, start)
        return run.reshape(experts, layout.stride)

    def read_expert(self, layer: int, expert: int, out: np.ndarray, offset: int = 0) -> None:
        """Read one expert, from byte `offset` of it, into contiguous uint8 `out`.

        Other threads run meanwhile. ValueError if `out` reaches beyond the expert.
        """
        layout, start = self._locate(layer, expert)
        if out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
            raise ValueError(f"out is {out.dtype} {out.shape}, not contiguous uint8 [bytes]")
        if not 0 <= offset <= layout.stride - len(out):
            raise ValueError(
                f"{len(out)} bytes from {offset} leave the {layout.stride} of an expert"
            )
        self._read(m.layer_file(layer), start + offset, out)

    def expert_file(self, layer: int) -> tuple[int, int]:
        """The descriptor of a layer's file, open until `close`, and the byte where expert 0 begins."""
        _, start = self._locate(layer, 0)
        return self._file(m.layer_file(layer)).fileno(), start

    def _locate(self, layer: int, expert: int) -> tuple[ExpertLayout, int]:
        if self.expert_layout is None:
            raise ValueError(f"{self.name} is a dense model and has no experts")
        if not 0 <= layer < len(self._starts) or not 0 <= expert < self.config.num_local_experts:
            raise IndexError(f"{self.name} has no expert {expert} in layer {layer}")
        return self.expert_layout, self._starts[layer] + expert * self.expert_layout.stride

    def _map(self, layer: int) -> mmap.mmap:
        with self._lock:
            if layer not in self._maps:
                file = self._file(m.layer_file(layer))
                self._maps[layer] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            return self._maps[layer]

    def _file(self, name: str) -> FileIO:
        if self._closed:
            raise BusyError(f"pack {self.name} is closed")
        return self._open[name]

    def _read(self, name: str, start: int, out: np.ndarray) -> None:
        """Fill `out` from byte `start` of a tensor file; a short file is a `DamagedError`."""
        file, view, done = self._file(name), out.data, 0
        path = self.path / name
        try:
            while done < len(view):
                count = _read_at(file, start + done, view[done:], self._lock)
                if count == 0:
                    size = os.fstat(file.fileno()).st_size
                    raise DamagedError(f"{path} ends at byte {size}; convert again")
                done += count
        except OSError as error:
            raise disk_error(error, path, "read") from error

    def verify(
        self, on_progress: OnProgress | None = None, cancel: threading.Event | None = None
    ) -> None:
        """Hash every file; `DamagedError` names one that is not what the manifest says.

        So does the manifest itself, where it has a hash of its own (packs of before have none).
        """
        told = self.manifest.get("sha256")
        if self.format == m.FORMAT and told not in (None, m.own_hash(self.manifest)):
            raise _altered(self.path / m.MANIFEST)
        verify_files(self.path, self.files, on_progress, cancel)

    def close(self) -> None:
        """Close the files and unmap; idempotent. The module's docstring has the rule for views."""
        with self._lock:
            self._closed = True
            maps, self._maps = self._maps, {}
            files, self._open = self._open, {}
        for mapping in maps.values():
            with contextlib.suppress(BufferError):  # a view lives: the mapping goes with it
                mapping.close()
        for file in files.values():
            file.close()

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def view_weight(memory: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Weight:
    """uint8 [n] as the tensor that it holds; nothing is copied."""
    scheme = scheme_of(dtype)
    if scheme is None:
        return memory.view(TORCH_DTYPES[dtype]).view(shape)
    rows, columns = shape
    return view_matrix(memory, scheme, rows, columns)


def verify_files(
    folder: Path,
    files: dict[str, tuple[int, str]],
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> None:
    """Hash files {name: (size, SHA-256)}, several at a time; `DamagedError` names one that
    differs.
    """
    done, total = dict.fromkeys(files, 0), sum(size for size, _ in files.values())
    stop = threading.Event()

    def hash_one(name: str, size: int, digest: str) -> None:
        with open_listed(folder, name, size) as file:
            found = hash_file(file, folder / name, stop, lambda count: done.update({name: count}))
        if found != digest:
            raise _altered(folder / name)

    with ThreadPoolExecutor(min(4, os.cpu_count() or 1), "spmoe-verify") as pool:
        pending = {pool.submit(hash_one, name, *entry) for name, entry in files.items()}
        try:
            while pending:
                check(cancel)
                finished, pending = wait(pending, 0.1, FIRST_COMPLETED)
                for future in finished:
                    future.result()
                if on_progress is not None:
                    on_progress(Progress("verify", sum(done.values()), total, "bytes"))
        except BaseException:
            stop.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _altered(path: Path) -> DamagedError:
    return DamagedError(
        f"{path} is not what was written (its SHA-256 differs from the recorded one); convert again, "
        f"and check the disk if this repeats"
    )


def _read_at(file: FileIO, start: int, view: memoryview, lock: threading.Lock) -> int:
    """Read once into `view` from byte `start`; return the number of bytes, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(file.fileno(), [view], start)
    with lock:
        file.seek(start)
        return file.readinto(view) or 0


def hash_file(
    file: FileIO,
    path: Path,
    cancel: threading.Event | None,
    report: Callable[[int], None] | None = None,
) -> str:
    """SHA-256 in hex of the rest of `file`."""
    digest, buffer, done = hashlib.sha256(), memoryview(bytearray(4 << 20)), 0
    while True:
        check(cancel)
        try:
            count = file.readinto(buffer)
        except OSError as error:
            raise disk_error(error, path, "read") from error
        if not count:
            return digest.hexdigest()
        digest.update(buffer[:count])
        done += count
        if report is not None:
            report(done)
