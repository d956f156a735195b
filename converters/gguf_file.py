"""The GGUF format: headers that are not believed, and rows of numbers.

A file (ggml project, "GGUF", versions 2 and 3, little endian) is: magic, version, counts of tensors
and metadata, the metadata (typed key/value pairs), one record per tensor (name, dimensions
innermost first, kind, offset), padding to the alignment, the tensors. It is untrusted: each length,
count and offset is held against the file's size before anything is allocated for it, the header is
bounded by `MAX_HEADER_BYTES`, tensors must not overlap, and what does not fit is a `DamagedError`.

Tensors are read explicitly. Blocks of quantised weights become fp32 by `gguf.quants`,
`CHUNK_BYTES` of the file at a time, or are repacked with their codes (`repack_blocks`). Left out: big-endian files, kinds not in `KINDS`.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from spmoe_lite.converters.source import read_at
from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError
from spmoe_lite.files import naming
from spmoe_lite.precision import Scheme
from spmoe_lite.quant import QuantizedMatrix, pack_scales, view_matrix

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_HEADER_BYTES = 256 << 20  # the largest published vocabularies need 20 MB
MAX_COUNT = 1 << 22  # entries of one array, tensors, metadata keys
MAX_NAME = 256  # characters of a tensor's name or a metadata key
CHUNK_BYTES = 4 << 20  # of the file, turned into fp32 at a time

KINDS = frozenset(
    GGMLQuantizationType[name]
    for name in "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
)
PLAIN = {  # kinds that are read as they are
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
SCHEMES = {  # kinds whose codes a scheme of ours holds, for Q4_1 if its numbers happen to fit
    GGMLQuantizationType.Q4_0: Scheme(4, 32),
    GGMLQuantizationType.Q4_1: Scheme(4, 32, zeros=True),
    GGMLQuantizationType.Q8_0: Scheme(8, 32),
}

_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file: `shape` outermost first; `offset` and `size` are bytes of `path`."""

    name: str
    path: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    size: int

    @property
    def row_bytes(self) -> int:
        block, width = GGML_QUANT_SIZES[self.kind]
        return self.shape[-1] // block * width


@dataclass(frozen=True, slots=True)
class Header:
    """What precedes the tensors in one file; `size` of the file, `sha256` of the header."""

    path: Path
    size: int
    sha256: bytes
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]


class Metadata:
    """Typed access to the metadata; a value of another type is a `DamagedError` that names the
    key."""

    def __init__(self, values: dict[str, Any], file: str) -> None:
        self.values, self.file = values, file

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        value = self.values.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise DamagedError(
                f"{self.file}: metadata {key} is {type(value).__name__}, not {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type) -> Any:
        value = self.get(key, kind)
        if value is None:
            raise DamagedError(f"{self.file}: metadata {key} is missing")
        return value

    def per_layer(self, key: str, default: int | None = None) -> int:
        """A number that some writers give once and some for each layer; layers must agree."""
        value = self.values.get(key)
        if isinstance(value, np.ndarray) and value.size and value.dtype.kind in "iu":
            if (value != value[0]).any():
                raise UnsupportedError(
                    f"{self.file}: {key} differs between layers ({value.min()} to {value.max()}); "
                    f"such models are not supported"
                )
            return int(value[0])
        return self.need(key, int) if default is None else self.get(key, int, default)


class _Cursor:
    """Forward reads of the header that never go past the file or the header's bound."""

    def __init__(self, handle: BinaryIO, size: int, file: str) -> None:
        self.handle, self.size, self.file, self.at = handle, size, file, 0
        self.digest = hashlib.sha256()

    def claim(self, count: int, what: str) -> None:
        """Refuse `count` bytes that the file cannot hold, before anyone allocates them."""
        if count > self.size - self.at:
            raise DamagedError(
                f"{self.file}: {what} at byte {self.at} claims {count} bytes, "
                f"{self.size - self.at} are left; the file is truncated or altered"
            )
        if self.at + count > MAX_HEADER_BYTES:
            raise DamagedError(f"{self.file}: a header of more than {MAX_HEADER_BYTES} bytes")

    def take(self, count: int, what: str) -> bytes:
        self.claim(count, what)
        data = self.handle.read(count)
        if len(data) != count:
            raise DamagedError(f"{self.file}: ends inside {what} at byte {self.at + len(data)}")
        self.at += count
        self.digest.update(data)
        return data

    def number(self, code: str, what: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code), what))[0]

    def count(self, bytes_each: int, what: str) -> int:
        """A count of things of at least `bytes_each` bytes that follow."""
        count = self.number("Q", what)
        if count > MAX_COUNT:
            raise DamagedError(f"{self.file}: {what} at byte {self.at - 8} is {count}")
        self.claim(count * bytes_each, what)
        return int(count)

    def text(self, what: str, errors: str = "strict") -> str:
        start = self.at
        data = self.take(self.number("Q", what), what)
        try:
            return data.decode("utf-8", errors)
        except UnicodeDecodeError:
            raise DamagedError(f"{self.file}: {what} at byte {start} is not UTF-8") from None

    def name(self, what: str) -> str:
        """The name of a key or tensor, short and printable, since messages quote it."""
        name = self.text(what)
        if len(name) > MAX_NAME or not name.isprintable():
            raise DamagedError(f"{self.file}: {what} at byte {self.at} is {name!r:.60}")
        return name

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind == _STRING:
            return self.text(key, "replace")
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise DamagedError(f"{self.file}: metadata {key} has the unknown type {kind}")
        return self.number(_SCALARS[kind], key)

    def array(self, key: str) -> list[str] | np.ndarray:
        kind = self.number("I", key)
        if kind == _STRING:
            return [self.text(key) for _ in range(self.count(8, key))]
        if kind not in _SCALARS:
            raise DamagedError(
                f"{self.file}: metadata {key} is an array of the unknown type {kind}"
            )
        dtype = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
        count = self.count(dtype.itemsize, key)
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype)


def split_parts(path: Path) -> list[Path]:
    """`path`, or all parts if it is named as one part of a split model."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    parts = []
    for part in range(1, count + 1):  # ends at the first missing file, so `count` needs no bound
        parts.append(path.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf"))
        if not parts[-1].is_file():
            raise NotFoundError(
                f"{parts[-1].name}: part {part} of {count} is missing beside {path.name}; download "
                f"all parts"
            )
    return parts or [path]


def read_header(path: Path) -> Header:
    """Metadata and tensor records of one file, everything held against its size."""
    try:
        return _read_header(path)
    except DamagedError as error:
        raise DamagedError(f"{error}; download it again") from None


def _read_header(path: Path) -> Header:
    with naming(path, "read"), path.open("rb", buffering=1 << 20) as handle:
        size = path.stat().st_size
        cursor = _Cursor(handle, size, path.name)
        if size < 4 or cursor.take(4, "magic") != MAGIC:
            raise DamagedError(f"{path.name}: not a GGUF file (it does not begin with GGUF)")
        version = cursor.number("I", "version")
        if version not in VERSIONS:
            if version & 0xFFFF == 0:
                raise UnsupportedError(
                    f"{path.name}: a big-endian GGUF file; fetch the little-endian one"
                )
            raise UnsupportedError(
                f"{path.name}: GGUF version {version}; versions 2 and 3 are read"
            )
        tensor_count = cursor.count(24, "tensor count")
        metadata: dict[str, Any] = {}
        for _ in range(cursor.count(13, "metadata count")):
            key = cursor.name("metadata key")
            if key in metadata:
                raise DamagedError(f"{path.name}: metadata {key} is given twice")
            metadata[key] = cursor.value(key)
        records = [_tensor_record(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if (
        type(alignment) is not int
        or alignment > 1 << 20
        or alignment < 1
        or alignment & (alignment - 1)
    ):
        raise DamagedError(f"{path.name}: alignment {alignment!r:.40} is not a small power of two")
    start = -(-cursor.at // alignment) * alignment
    tensors = _place_tensors(path, records, start, size)
    return Header(path, size, cursor.digest.digest(), metadata, tensors)


def _tensor_record(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.name("tensor name")
    dims = cursor.number("I", name)
    if not 1 <= dims <= 4:
        raise DamagedError(f"{cursor.file}: tensor {name} has {dims} dimensions")
    shape = tuple(cursor.number("Q", name) for _ in range(dims))[::-1]
    return name, shape, cursor.number("I", name), cursor.number("Q", name)


def _place_tensors(
    path: Path, records: list[tuple[str, tuple[int, ...], int, int]], start: int, size: int
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    for name, shape, number, offset in records:
        if name in tensors:
            raise DamagedError(f"{path.name}: tensor {name} is given twice")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedError(
                f"{path.name}: tensor {name} is of the unknown kind {number}"
            ) from None
        if kind not in KINDS:
            raise UnsupportedError(
                f"{path.name}: tensor {name} is {kind.name}; fetch a file in one of "
                f"{', '.join(sorted(k.name for k in KINDS))}"
            )
        block, width = GGML_QUANT_SIZES[kind]
        if min(shape) < 1 or shape[-1] % block:
            raise DamagedError(
                f"{path.name}: tensor {name} {list(shape)} does not divide into {kind.name} blocks "
                f"of {block}"
            )
        bytes_ = math.prod(shape) // block * width
        end = start + offset + bytes_
        if end > size:
            raise DamagedError(
                f"{path.name}: tensor {name} ends at byte {end}, the file has {size}; it "
                f"is truncated or altered"
            )
        tensors[name] = GgufTensor(name, path, kind, shape, start + offset, bytes_)
    end, last = 0, ""
    for tensor in sorted(tensors.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise DamagedError(f"{path.name}: tensors {last} and {tensor.name} overlap")
        end, last = tensor.offset + tensor.size, tensor.name
    return tensors


def read_rows(tensor: GgufTensor, row: int, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns], contiguous, from row `row` of `tensor` on (leading dimensions
    flattened)."""
    with naming(tensor.path, "read"), tensor.path.open("rb", buffering=0) as handle:
        if tensor.kind in PLAIN:
            _fill(handle, tensor, row, out.view(-1).view(torch.uint8).numpy())
            return
        step = max(1, CHUNK_BYTES // tensor.row_bytes)
        packed = np.empty((min(step, len(out)), tensor.row_bytes), np.uint8)
        for at in range(0, len(out), step):
            chunk = packed[: min(step, len(out) - at)]
            _fill(handle, tensor, row + at, chunk.reshape(-1))
            out[at : at + len(chunk)] = torch.from_numpy(dequantize(chunk, tensor.kind))


def read_blocks(tensor: GgufTensor, row: int, count: int) -> torch.Tensor:
    """Rows of a quantised tensor as they lie in the file: uint8 [count, row_bytes]."""
    out = torch.empty(count, tensor.row_bytes, dtype=torch.uint8)
    with naming(tensor.path, "read"), tensor.path.open("rb", buffering=0) as handle:
        _fill(handle, tensor, row, out.view(-1).numpy())
    return out


def repack_blocks(blocks: torch.Tensor, kind: GGMLQuantizationType) -> QuantizedMatrix | None:
    """Q4_0, Q8_0 or Q4_1 [rows, row_bytes] in the scheme of `SCHEMES`, without a change of value.

    A block is 32 columns: the scale (fp16), for Q4_1 the minimum (fp16), then 32 bytes or 16, whose
    low halves are columns 0 to 15 and whose high halves are the rest. Our run of 64 columns has the
    bytes of two blocks in turn. None where Q4_1 has a minimum that is no whole zero (0 to 15) times
    the scale, or a scale of more than 8 bits.
    """
    scheme, (width, size) = SCHEMES[kind], GGML_QUANT_SIZES[kind]
    parts = blocks.view(len(blocks), -1, size)  # [rows, groups, bytes]
    columns = parts.shape[1] * width
    scales, zeros = _halves(parts, 0), torch.zeros(())
    if scheme.zeros:
        zeros = (-_halves(parts, 1) / scales).round_().nan_to_num_(0)
        exact = (zeros >= 0) & (zeros <= 15) & (zeros * scales == -_halves(parts, 1))
        short = scales.half().view(torch.int16) & 7 == 0
        if not bool((exact & short & (scales >= 0)).all()):
            return None
    codes = parts[:, :, 4 if scheme.zeros else 2 :]
    if scheme.bits == 8:
        codes = codes ^ 128  # signed, to codes whose zero is 128
    if parts.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 0, 0, 1))
    run = torch.empty(sum(scheme.parts(len(blocks), columns)), dtype=torch.uint8)
    matrix = view_matrix(run, scheme, len(blocks), columns)
    pairs = codes.unflatten(1, (-1, 2)).permute(1, 0, 3, 2)  # [blocks of 64, rows, byte, which]
    matrix.codes.view(pairs.shape).copy_(pairs)
    matrix.scales.copy_(pack_scales(scales.t(), zeros.expand_as(scales).t(), scheme))
    return matrix


def _halves(parts: torch.Tensor, number: int) -> torch.Tensor:
    """The fp16 number of each block, in fp32: [rows, groups]."""
    halves = parts[:, :, 2 * number : 2 * number + 2].contiguous().view(torch.float16)
    return halves[:, :, 0].float()


def _fill(handle: BinaryIO, tensor: GgufTensor, row: int, out: np.ndarray) -> None:
    view = memoryview(out)  # type: ignore[arg-type]
    if read_at(handle, view, tensor.offset + row * tensor.row_bytes) != len(out):
        raise DamagedError(f"{tensor.path.name}: ends inside tensor {tensor.name}")
