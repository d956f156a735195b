"""Where weights come from: the reading interface, and checkpoints of Hugging Face kind.

`convert` has one path for every source. A source is an object with

    label              how messages and the manifest call it ("mixtral-8x7b", "model.Q4_0.gguf")
    config             config.json as a dict (a GGUF file builds it from its metadata)
    generation_config  generation_config.json as a dict, or None
    tensors            {Hugging Face name: SourceTensor}: every tensor there is, nothing read yet
    ignored            files that are there and are not read, for the user to see
    identity()         {"id", "revision", "files": {name: bytes}, "fingerprint"}: what the manifest keeps
    read(name, index, rows)   a tensor, or its entry `index` of dimension 0, or rows of that (a range)
    read_quantized(piece, scheme)   a matrix whose values that scheme holds exactly, else None
    text_files()       {"tokenizer.json": bytes, ...}: what the pack carries as found
    close()            closes files

so experts stacked in one tensor are read one at a time. Names are those of `llama.py` and `mixtral.py`;
stacked experts whose gate and up are apart (GGUF) are `...mlp.experts.gate_proj`, `up_proj` [E, I, H] and
`down_proj` [E, H, I].

`Checkpoint` reads safetensors. The index decides what belongs to the model; without one the headers of
the numbered parts do. Everything is untrusted: names are confined to the folder, header lengths, counts
and offsets are checked against the file before anything is allocated. Tensors are read with explicit
large reads, never mapped: a mapping of the source would count as resident and cannot be bounded. Pickle
files are never opened.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import torch

from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError
from spmoe_lite.files import disk_error, is_whole, load_json
from spmoe_lite.manifest import TEXT_FILES, printable
from spmoe_lite.pack import TORCH_DTYPES
from spmoe_lite.precision import Scheme, scheme_of
from spmoe_lite.quant import QuantizedMatrix, view_matrix

log = logging.getLogger("spmoe_lite")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
MAX_HEADER_BYTES = 32 << 20  # 200,000 tensors; the largest published headers have a tenth
MAX_DIMENSIONS = 8
MAX_TEXT_BYTES = 64 << 20
BLOCK_BYTES = 8 << 20  # read, checked and cast at a time; stays in the processor's cache
SAMPLES, SAMPLE_BYTES = 32, 32 << 10  # of each weight file, for the fingerprint

# safetensors dtype: (our name or None if we do not convert it, bytes per element)
DTYPES: dict[str, tuple[str | None, int]] = {
    "F32": ("fp32", 4),
    "BF16": ("bf16", 2),
    "F16": ("fp16", 2),
    "F64": (None, 8),
    "I64": (None, 8),
    "I32": (None, 4),
    "I16": (None, 2),
    "I8": (None, 1),
    "U64": (None, 8),
    "U32": (None, 4),
    "U16": (None, 2),
    "U8": (None, 1),
    "BOOL": (None, 1),
    "F8_E4M3": (None, 1),
    "F8_E5M2": (None, 1),
    "F8_E8M0": (None, 1),
}
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source, not yet read.

    `dtype` is "fp32", "bf16" or "fp16" when it holds weights we can take (what `read` returns); a scheme
    ("int4-g64z") when `read_quantized` returns it in that scheme, `read` its values in fp32; else the
    source's own word for it ("U8", "F8_E4M3"), which is refused wherever a weight is expected. Before
    the header of a file on the hub is here, only the name and the file are `known`. `quantised`: the
    source has it in fewer bits than `dtype`; `held` is the scheme that holds just those, if one does.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int = 0  # first byte in the file
    known: bool = True
    quantised: bool = False
    held: str | None = None

    @property
    def scheme(self) -> Scheme | None:
        """The scheme of `dtype`; None for a float and for what is no weight."""
        try:
            return scheme_of(self.dtype)
        except UnsupportedError:
            return None

    @property
    def is_weight(self) -> bool:
        return self.dtype in TORCH_DTYPES or self.scheme is not None or not self.known


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one matrix lies: tensor `name` of `shape`, or its entry `index`, or `rows` of that."""

    name: str
    shape: tuple[int, ...]
    index: int | None = None
    rows: range | None = None


class Source(Protocol):
    """What `convert` needs of a checkpoint, whatever its format; the module's header explains."""

    label: str
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    ignored: list[str]

    @property
    def tensors(self) -> Mapping[str, SourceTensor]: ...
    def identity(self) -> dict[str, Any]: ...
    def read(
        self, name: str, index: int | None = None, rows: range | None = None
    ) -> torch.Tensor: ...
    def read_quantized(self, piece: Piece, scheme: Scheme) -> QuantizedMatrix | None: ...
    def text_files(self) -> dict[str, bytes]: ...
    def close(self) -> None: ...


class TensorFiles:
    """Tensors at known places in files, read with explicit reads into memory of the caller's.

    `locate` gives the path of a file; it is opened at the first read, when its size is compared.
    """

    def __init__(
        self,
        label: str,
        tensors: dict[str, SourceTensor],
        sizes: Mapping[str, int],
        locate: Callable[[str], Path],
    ) -> None:
        self.label, self.tensors = label, tensors
        self.sizes, self._locate = sizes, locate
        self._open: dict[str, FileIO] = {}
        self._last: tuple[str, QuantizedMatrix] | None = None  # the one `read` took rows of

    def read(
        self,
        name: str,
        index: int | None = None,
        rows: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`tensor`, `tensor[index]`, or rows of either, in its own dtype; into `out` if given.

        In fp32 where that is a scheme; the matrix is kept, since its rows are asked for in pieces.
        """
        tensor = self.tensors[name]
        if tensor.scheme is not None:
            assert index is None and out is None
            if self._last is None or self._last[0] != name:
                self._last = name, self._stored(Piece(name, tensor.shape), tensor.scheme)
            rows = rows or range(tensor.shape[0])
            return self._last[1].rows_of(slice(rows.start, rows.stop), torch.float32)
        dtype = TORCH_DTYPES[tensor.dtype]
        shape, start = tensor.shape, tensor.start
        if index is not None:
            shape = shape[1:]
            start += index * math.prod(shape) * dtype.itemsize
        if rows is not None:
            start += rows.start * math.prod(shape[1:]) * dtype.itemsize
            shape = (len(rows), *shape[1:])
        if out is None:
            out = torch.empty(shape, dtype=dtype)
        assert out.shape == shape and out.dtype == dtype and out.is_contiguous()
        self._read_into(tensor.file, out.reshape(-1).view(torch.uint8).numpy().data, start)
        return out

    def read_quantized(self, piece: Piece, scheme: Scheme) -> QuantizedMatrix | None:
        """A tensor that lies in `scheme` in its file, else None."""
        return self._stored(piece, scheme) if self.tensors[piece.name].scheme == scheme else None

    def _stored(self, piece: Piece, scheme: Scheme) -> QuantizedMatrix:
        """Codes and scales, which lie in one run."""
        tensor = self.tensors[piece.name]
        assert piece.index is None and piece.rows is None  # only packs hold such tensors
        rows, columns = piece.shape
        run = torch.empty(sum(scheme.parts(rows, columns)), dtype=torch.uint8)
        self._read_into(tensor.file, run.numpy().data, tensor.start)
        return view_matrix(run, scheme, rows, columns)

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def open_all(self) -> None:
        """Open every file now: one that is replaced or deleted meanwhile is still read as it was."""
        for name in {tensor.file: None for tensor in self.tensors.values()}:
            self._file(name)

    def close_file(self, name: str) -> None:
        """Close one file, so that it can be deleted."""
        if file := self._open.pop(name, None):
            file.close()

    def _file(self, name: str) -> FileIO:
        if name not in self._open:
            path = self._locate(name)
            try:
                file = open(path, "rb", buffering=0)  # closed by close()
            except OSError as error:
                raise disk_error(error, path, "read") from error
            self._open[name] = file
            found = os.fstat(file.fileno()).st_size
            if found != self.sizes[name]:
                self._damaged(name, f"has {found} bytes, expected {self.sizes[name]}")
        return self._open[name]

    def _read_into(self, name: str, buffer: memoryview, start: int) -> None:
        file = self._file(name)
        try:
            done = read_at(file, buffer, start)
        except OSError as error:
            raise disk_error(error, Path(self.label) / name, "read") from error
        if done != len(buffer):
            self._damaged(name, f"ends after {start + done} bytes, {start + len(buffer)} expected")

    def _damaged(self, file: str, what: str) -> NoReturn:
        raise DamagedError(f"{self.label}: {file} {what}; download it again")


class Checkpoint(TensorFiles):
    """Safetensors files with config.json: a local folder, or a hub repository whose shards arrive later.

    Raises, before any tensor is read, `NotFoundError` (not a model), `UnsupportedError` (pickle or vendor
    files only, two sets of weights), `DamagedError` (index, file list and headers disagree, short files).
    With `arrived=False` only names and files of the index are known until `load_headers`.
    """

    def __init__(
        self,
        label: str,
        sizes: Mapping[str, int],
        locate: Callable[[str], Path],
        *,
        revision: str | None = None,
        arrived: bool = True,
    ) -> None:
        super().__init__(label, {}, sizes, locate)
        self.revision = revision
        if "config.json" not in sizes:
            raise NotFoundError(_no_config(label, sizes))
        self.config = self._json("config.json")
        generation = "generation_config.json"
        self.generation_config = self._json(generation) if generation in sizes else None
        self._weight_map: dict[str, str] = {}  # tensor: file, if there is an index
        self.weight_files = self._choose_files()
        self.ignored = sorted(
            name for name in sizes if name not in self.weight_files and name.endswith(_WEIGHTS)
        )
        self._header_hashes: dict[str, str] = {}
        for name, file in self._weight_map.items():
            self.tensors[name] = SourceTensor("", (), file, known=False)
        if arrived:
            self.load_headers(self.weight_files)

    @classmethod
    def folder(cls, path: Path) -> Checkpoint:
        """A checkpoint in a local folder."""
        try:
            with os.scandir(path) as entries:
                sizes = {e.name: e.stat().st_size for e in entries if e.is_file()}
        except OSError as error:
            raise disk_error(error, path, "read") from error
        sizes = dict(sorted(sizes.items()))
        return cls(printable(path.resolve().name), sizes, lambda name: confined(path, name))

    def load_headers(self, files: Iterable[str]) -> None:
        """Read the headers of `files`, which are here now; each must hold what the index says."""
        for file in files:
            if file in self._header_hashes:
                continue
            header, self._header_hashes[file] = self._read_header(file)
            for name, tensor in header.items():
                self._add(file, name, tensor)
            strays = [n for n in header if self._weight_map and self._weight_map.get(n) != file]
            if strays:
                log.warning(
                    "%s: %s in %s (%d of its tensors) is not read: the index has it elsewhere or not at "
                    "all",
                    self.label,
                    f"{strays[0]:.80}",
                    file,
                    len(strays),
                )
            for name, where in self._weight_map.items():
                if where == file and name not in header:
                    raise DamagedError(
                        f"{self.label}: {INDEX} places {name} in {file}, which does not hold it; "
                        f"download both again"
                    )

    def _add(self, file: str, name: str, tensor: SourceTensor) -> None:
        """With an index only what it lists counts; without one a name may come once."""
        if self._weight_map:
            if self._weight_map.get(name) != file:
                return
        elif name in self.tensors:
            raise DamagedError(
                f"{self.label}: {name} is both in {self.tensors[name].file} and in {file}"
            )
        self.tensors[name] = tensor

    def identity(self) -> dict[str, Any]:
        """id, revision and weight files; without a revision also a hash that stands for the content."""
        identity: dict[str, Any] = {
            "id": self.label,
            "revision": self.revision,
            "files": {name: self.sizes[name] for name in self.weight_files},
        }
        if self.revision is None:
            identity["fingerprint"] = self._fingerprint()
        return identity

    def _fingerprint(self) -> str:
        """SHA-256 of config, text files, headers, and dates and samples of the weight files.

        Hashing all of them would double the reading; a file that was touched counts as another.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for data in self.text_files().values():
            digest.update(data)
        sample = memoryview(bytearray(SAMPLE_BYTES))
        for name in self.weight_files:
            file, size = self._file(name), self.sizes[name]
            changed = os.fstat(file.fileno()).st_mtime_ns
            digest.update(f"{name} {size} {changed} {self._header_hashes[name]}".encode())
            for i in range(SAMPLES):
                count = read_at(file, sample, size * i // SAMPLES)
                digest.update(sample[:count])
        return digest.hexdigest()

    def text_files(self) -> dict[str, bytes]:
        """The tokenizer's files, the chat template and the generation settings, those that are there."""
        return {name: self._text(name) for name in TEXT_FILES if name in self.sizes}

    # Which files hold the weights

    def _choose_files(self) -> list[str]:
        if INDEX in self.sizes:
            return self._files_of_index()
        parts = sorted(name for name in self.sizes if PART.fullmatch(name))
        if SINGLE in self.sizes and parts:
            raise UnsupportedError(
                f"{self.label}: two sets of weights, {SINGLE} and {parts[0]}, and no {INDEX} to "
                f"choose between them; move one away"
            )
        if SINGLE in self.sizes:
            return [SINGLE]
        if parts:
            return self._complete(parts)
        raise UnsupportedError(_no_weights(self.label, self.sizes))

    def _files_of_index(self) -> list[str]:
        index = self._json(INDEX)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise DamagedError(f"{self.label}: {INDEX} has no weight_map; download it again")
        for tensor, file in weight_map.items():
            if not isinstance(file, str) or not _is_plain(file) or not tensor.isprintable():
                raise DamagedError(
                    f"{self.label}: {INDEX} places {tensor!r:.80} in {file!r:.80}, which is not a "
                    f"file of this folder"
                )
            if file not in self.sizes:
                raise DamagedError(
                    f"{self.label}: {INDEX} needs {file:.80} (for {tensor:.80}), which is not there; "
                    f"download it, or the index that fits the files"
                )
        self._weight_map = weight_map
        return sorted(set(weight_map.values()))

    def _complete(self, parts: list[str]) -> list[str]:
        """Numbered parts without an index: all of the same count, none missing."""
        numbers = [PART.fullmatch(name) for name in parts]
        counts = {int(match[2]) for match in numbers if match}
        if len(counts) > 1:
            raise DamagedError(
                f"{self.label}: parts of different sets, {parts[0]} and {parts[-1]}, and no {INDEX}"
                f"; keep one set"
            )
        count = counts.pop()
        there = {int(match[1]) for match in numbers if match}
        for number in range(1, count + 1):
            if number not in there:
                name = f"model-{number:05}-of-{count:05}.safetensors"
                raise DamagedError(f"{self.label}: {name} is missing; download it")
        return parts

    # Reading

    def _read_header(self, file: str) -> tuple[dict[str, SourceTensor], str]:
        """The tensors of one safetensors file and the hash of its header."""
        size = self.sizes[file]
        start = bytearray(8)
        read_at(self._file(file), memoryview(start), 0)
        length = int.from_bytes(start, "little")
        if size < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            self._damaged(file, f"claims a header of {length} bytes in a file of {size}")
        data = bytearray(length)
        self._read_into(file, memoryview(data), 8)
        entries = load_json(bytes(data), Path(self.label) / file)
        if not isinstance(entries, dict):
            self._damaged(file, "has a header that is not a JSON object")
        entries.pop("__metadata__", None)
        tensors = {name: self._tensor(file, name, e, 8 + length) for name, e in entries.items()}
        end = 8 + length
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start != end:
                self._damaged(file, f"has a hole or an overlap before {name:.80}")
            end += math.prod(tensor.shape) * DTYPES[entries[name]["dtype"]][1]
        if end != size:
            self._damaged(file, f"has {size} bytes, its header describes {end}")
        return tensors, hashlib.sha256(data).hexdigest()

    def _tensor(self, file: str, name: str, entry: Any, data_start: int) -> SourceTensor:
        try:
            dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            self._damaged(file, f"has a malformed header entry for {name!r:.80}")
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not name.isprintable():
            self._damaged(file, f"has a malformed header entry for {name!r:.80}")
        if not all(is_whole(n) for n in (*shape, begin, stop)):
            self._damaged(file, f"has a malformed header entry for {name:.80}")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UnsupportedError(
                f"{self.label}: {name:.80} in {file} is of type {dtype!r:.20}; save it as fp32, bf16 or "
                f"fp16"
            )
        ours, itemsize = DTYPES[dtype]
        if min((*shape, begin), default=0) < 0 or stop - begin != math.prod(shape) * itemsize:
            self._damaged(
                file, f"gives {name:.80} a size that its shape {shape!r:.60} does not have"
            )
        return SourceTensor(ours or dtype, tuple(shape), file, data_start + begin)

    def _json(self, name: str) -> dict[str, Any]:
        value = load_json(self._text(name), Path(self.label) / name)
        if not isinstance(value, dict):
            self._damaged(name, "is not a JSON object")
        return value

    def _text(self, name: str) -> bytes:
        if self.sizes[name] > MAX_TEXT_BYTES:
            self._damaged(name, f"is larger than {MAX_TEXT_BYTES} bytes")
        path = self._locate(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise disk_error(error, path, "read") from error


def read_at(file: BinaryIO, buffer: memoryview, start: int) -> int:
    """Fill `buffer` from byte `start` on; returns how many bytes there were."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [buffer[done:]], start + done)
        else:
            file.seek(start + done)
            data = file.read(min(len(buffer) - done, BLOCK_BYTES))
            count = len(data)
            buffer[done : done + count] = data
        if not count:
            break
        done += count
    return done


def confined(folder: Path, name: str) -> Path:
    """`folder`/`name`, a regular file that is not a link leading out of `folder`.

    The hub's cache is the one exception: there `snapshots/REVISION/name` is a link into `blobs`.
    """
    path = folder / name
    root = folder.resolve()
    roots = [root]
    if root.parent.name == "snapshots":
        roots.append(root.parent.parent / "blobs")
    target = path.resolve()
    if not any(target.is_relative_to(allowed) for allowed in roots):
        raise DamagedError(f"{path} is a link that leads out of the folder; copy the file there")
    if not stat.S_ISREG(target.stat().st_mode):
        raise DamagedError(f"{path} is not a regular file; copy the file there")
    return path


def _is_plain(name: str) -> bool:
    return (
        name not in ("", ".", "..")
        and name.isprintable()
        and not set(name) & set('/\\:"')
        and Path(name).name == name
    )


def _no_config(label: str, sizes: Mapping[str, int]) -> str:
    if gguf := [name for name in sizes if name.endswith(".gguf")]:
        return f"{label} has no config.json; to convert {gguf[0]}, give the path of that file"
    return f"{label} is not a model: it has no config.json; give the folder that holds one, or a .gguf file"


def _no_weights(label: str, sizes: Mapping[str, int]) -> str:
    for name in sorted(sizes):
        if name.startswith("consolidated"):
            return (
                f"{label} holds only the vendor's own files ({name}); fetch the Hugging Face "
                f"version with {SINGLE} or {INDEX}"
            )
        if name.endswith((".bin", ".pt", ".pth", ".ckpt")):
            return (
                f"{label} holds only pickle files ({name}), which are never opened; fetch the "
                f"version with {SINGLE} or {INDEX}"
            )
    return f"{label} has no weights: neither {SINGLE} nor {INDEX} nor model-00001-of-N.safetensors; fetch them"
