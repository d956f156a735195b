"""Where weights come from: the reading interface, and checkpoints of Hugging Face kind.

`convert` has one path for every source. A source is an object with

    label              how messages and the manifest call it ("mixtral-8x7b", "model.Q4_0.gguf")
    config             config.json as a dict (a GGUF file builds it from its metadata)
    generation_config  generation_config.json as a dict, or None
    tensors            {Hugging Face name: SourceTensor}: every tensor there is, nothing read yet
    ignored            files that are there and are not read, for the user to see
    identity()         {"id", "revision", "files": {name: bytes}, "fingerprint"}: what the manifest keeps
    read(name, index, rows)   a tensor, or its entry `index` of dimension 0, or rows of that (a range)
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, Protocol

import torch

from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError
from spmoe_lite.manifest import TEXT_FILES, disk_error, is_whole, load_json

log = logging.getLogger("spmoe_lite")

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PART = re.compile(r"model-(\d{5})-of-(\d{5})\.safetensors")
MAX_HEADER_BYTES = 100 << 20  # the safetensors library's own limit
MAX_TEXT_BYTES = 64 << 20

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
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a source, not yet read.

    `dtype` is "fp32", "bf16" or "fp16" when it holds weights we can take (what `read` returns), else the
    source's own word for it ("U8", "F8_E4M3"), which is refused wherever a weight is expected.
    """

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int = 0  # first byte in the file

    @property
    def is_float(self) -> bool:
        return self.dtype in TORCH


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
    def text_files(self) -> dict[str, bytes]: ...
    def close(self) -> None: ...


class Checkpoint:
    """Safetensors files with config.json: a local folder, or files that arrive when asked for.

    `sizes` are the files there are, `locate` gives one's path (and may fetch it first), `head` its first
    bytes without fetching the rest. Raises, before any tensor is read, `NotFoundError` (no weights),
    `UnsupportedError` (pickle or vendor files only, two sets of weights), `DamagedError` (index, file
    list and headers disagree; short files).
    """

    def __init__(
        self,
        label: str,
        sizes: Mapping[str, int],
        locate: Callable[[str], Path],
        head: Callable[[str, int, int], bytes],
        revision: str | None = None,
    ) -> None:
        self.label, self.revision = label, revision
        self.sizes, self._locate, self._head = sizes, locate, head
        self._open: dict[str, BinaryIO] = {}
        if "config.json" not in sizes:
            raise NotFoundError(_no_config(label, sizes))
        self.config = self._json("config.json")
        generation = "generation_config.json"
        self.generation_config = self._json(generation) if generation in sizes else None
        self.weight_files = self._choose_files()
        self.ignored = sorted(
            name
            for name in sizes
            if name not in self.weight_files
            and name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt", ".h5"))
        )
        self._headers = {name: self._read_header(name) for name in self.weight_files}
        self.tensors = self._merge()

    @classmethod
    def folder(cls, path: Path) -> Checkpoint:
        """A checkpoint in a local folder."""
        try:
            sizes = {
                name: entry.stat().st_size
                for entry in sorted(os.scandir(path), key=lambda e: e.name)
                for name in [entry.name]
                if entry.is_file()
            }
        except OSError as error:
            raise disk_error(error, path, "read") from error

        def locate(name: str) -> Path:
            return confined(path, name)

        def head(name: str, start: int, count: int) -> bytes:
            with open(locate(name), "rb") as file:
                file.seek(start)
                return file.read(count)

        return cls(path.resolve().name, sizes, locate, head)

    def identity(self) -> dict[str, Any]:
        """id, revision, weight files with sizes, and a hash of config, headers and samples of data."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self.weight_files:
            digest.update(f"{name}:{self.sizes[name]}:{self._headers[name][1]}".encode())
        return {
            "id": self.label,
            "revision": self.revision,
            "files": {name: self.sizes[name] for name in self.weight_files},
            "fingerprint": digest.hexdigest(),
        }

    def read(self, name: str, index: int | None = None, rows: range | None = None) -> torch.Tensor:
        """Read one tensor, or `tensor[index]`, or `tensor[index][rows]`; a new tensor of its dtype."""
        tensor = self.tensors[name]
        shape, start = tensor.shape, tensor.start
        itemsize = TORCH[tensor.dtype].itemsize
        if index is not None:
            shape = shape[1:]
            start += index * math.prod(shape) * itemsize
        if rows is not None:
            start += rows.start * math.prod(shape[1:]) * itemsize
            shape = (len(rows), *shape[1:])
        values = torch.empty(math.prod(shape) * itemsize, dtype=torch.uint8)
        self._read_into(tensor.file, memoryview(values.numpy()), start)
        return values.view(TORCH[tensor.dtype]).reshape(shape)

    def text_files(self) -> dict[str, bytes]:
        """The tokenizer's files, the chat template and the generation settings, those that are there."""
        return {name: self._text(name) for name in TEXT_FILES if name in self.sizes}

    def close(self) -> None:
        """Close every file; idempotent."""
        while self._open:
            self._open.popitem()[1].close()

    def close_file(self, name: str) -> None:
        """Close one file, so that it can be deleted or another of its name be read."""
        if file := self._open.pop(name, None):
            file.close()

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
            if not isinstance(file, str) or not _is_plain(file):
                raise DamagedError(
                    f"{self.label}: {INDEX} places {tensor:.80} in {file!r:.80}, which is not a "
                    f"file of this folder"
                )
            if file not in self.sizes:
                raise DamagedError(
                    f"{self.label}: {INDEX} needs {file} (for {tensor:.80}), which is not there; "
                    f"download it, or the index that fits the files"
                )
        self._weight_map = weight_map
        return sorted(set(weight_map.values()))

    def _complete(self, parts: list[str]) -> list[str]:
        """Numbered parts without an index: all of the same count, none missing."""
        self._weight_map = None
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

    def _merge(self) -> dict[str, SourceTensor]:
        """One table of all tensors; with an index, only what it lists, and all of it."""
        tensors: dict[str, SourceTensor] = {}
        weight_map = self._weight_map
        for file, (header, _) in self._headers.items():
            for name, tensor in header.items():
                if weight_map is not None and weight_map.get(name) != file:
                    log.warning("%s: %s holds %s, not read: the index places it elsewhere or nowhere",
                                self.label, file, name)  # fmt: skip
                    continue
                if name in tensors:
                    raise DamagedError(
                        f"{self.label}: {name} is both in {tensors[name].file} and in {file}"
                    )
                tensors[name] = tensor
        for name, file in (weight_map or {}).items():
            if name not in tensors:
                raise DamagedError(
                    f"{self.label}: {INDEX} places {name} in {file}, which does not hold it; "
                    f"download both again"
                )
        return tensors

    # Reading

    def _read_header(self, file: str) -> tuple[dict[str, SourceTensor], str]:
        """The tensors of one safetensors file and the hash of its header."""
        size = self.sizes[file]
        length = int.from_bytes(self._head(file, 0, 8), "little")
        if size < 10 or not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            self._damaged(file, f"claims a header of {length} bytes in a file of {size}")
        data = self._head(file, 8, length)
        if len(data) != length:
            self._damaged(file, f"ends inside its header of {length} bytes")
        entries = load_json(data, Path(file))
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
            self._damaged(file, f"has a malformed header entry for {name:.80}")
        if not isinstance(shape, list) or not all(is_whole(n) for n in (*shape, begin, stop)):
            self._damaged(file, f"has a malformed header entry for {name:.80}")
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise UnsupportedError(f"{self.label}: {name:.80} in {file} is of type {dtype!r:.20}")
        ours, itemsize = DTYPES[dtype]
        if min((*shape, begin), default=0) < 0 or stop - begin != math.prod(shape) * itemsize:
            self._damaged(
                file, f"gives {name:.80} a size that its shape {shape!r:.60} does not have"
            )
        return SourceTensor(ours or dtype, tuple(shape), file, data_start + begin)

    def _read_into(self, name: str, buffer: memoryview, start: int) -> None:
        if name not in self._open:
            path = self._locate(name)
            try:
                file = open(path, "rb", buffering=0)  # noqa: SIM115 (closed by close())
            except OSError as error:
                raise disk_error(error, path, "read") from error
            self._open[name] = file
            found = os.fstat(file.fileno()).st_size
            if found != self.sizes[name]:
                self._damaged(name, f"has {found} bytes, expected {self.sizes[name]}")
        try:
            done = read_at(self._open[name], buffer, start)
        except OSError as error:
            raise disk_error(error, self._locate(name), "read") from error
        if done != len(buffer):
            self._damaged(name, f"ends after {start + done} bytes, {start + len(buffer)} expected")

    def _json(self, name: str) -> dict[str, Any]:
        value = load_json(self._text(name), Path(self.label) / name)
        if not isinstance(value, dict):
            raise DamagedError(f"{self.label}: {name} is not a JSON object")
        return value

    def _text(self, name: str) -> bytes:
        if self.sizes[name] > MAX_TEXT_BYTES:
            raise DamagedError(f"{self.label}: {name} is larger than {MAX_TEXT_BYTES} bytes")
        path = self._locate(name)
        try:
            return path.read_bytes()
        except OSError as error:
            raise disk_error(error, path, "read") from error

    def _damaged(self, file: str, what: str) -> NoReturn:
        raise DamagedError(f"{self.label}: {file} {what}; download it again")


def read_at(file: BinaryIO, buffer: memoryview, start: int) -> int:
    """Fill `buffer` from byte `start` on; returns how many bytes there were."""
    done = 0
    while done < len(buffer):
        if hasattr(os, "preadv"):
            count = os.preadv(file.fileno(), [buffer[done:]], start + done)
        else:
            file.seek(start + done)
            count = file.readinto(buffer[done:])  # type: ignore[attr-defined]
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
        raise DamagedError(f"{path} is not a regular file")
    return path


def _is_plain(name: str) -> bool:
    return (
        name not in ("", ".", "..") and not set(name) & set('/\\:\0"') and Path(name).name == name
    )


def _no_config(label: str, sizes: Mapping[str, int]) -> str:
    if gguf := [name for name in sizes if name.endswith(".gguf")]:
        return f"{label} has no config.json; to convert {gguf[0]}, give the path of that file"
    return f"{label} is not a model: it has no config.json"


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
    return f"{label} has no weights: neither {SINGLE} nor {INDEX} nor model-00001-of-N.safetensors"
