"""The pack folder without its tensors: file names, the manifest, safetensors headers.

No torch here, so that listing packs stays quick. Everything read is untrusted (`files.py`): sizes are
bounded before a byte is read, counts and offsets are checked against the file before anything is
allocated. `docs/pack-format.md` is the specification; what it says a reader must reject is rejected in
this module.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from spmoe_lite.config import ModelConfig
from spmoe_lite.errors import BusyError, DamagedError, NotFoundError, UnsupportedError, UsageError
from spmoe_lite.files import (
    PARTIAL,
    disk_error,
    is_whole,
    load_json,
    locked,
    naming,
    open_confined,
    read_exactly,
)
from spmoe_lite.precision import DTYPE_BYTES, ExpertLayout, matrix_bytes, scheme_of

FORMAT = 2  # written; 1 is still read
PAGE = 4096  # the first tensor of a file starts on a multiple of this
STRIDE_UNIT = 65536  # an expert is a whole number of these
ALIGN = 64  # each matrix inside an expert starts on a multiple of this

MANIFEST = "manifest.json"
DENSE = "dense.safetensors"
EXPERTS = "experts"
EMBED = "embed_tokens.weight"
HEAD = "lm_head.weight"
TEXT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
SUFFIX = ".spmoe"
OLD = ".old"  # NAME.spmoe.old: a pack being replaced, for the moment between two renames
JOURNAL = "partial.json"  # what an unfinished conversion is of, and which files it has finished

MAX_JSON_BYTES = 4 << 20  # of manifest.json and partial.json
MAX_ENTRY_BYTES = 512  # of one tensor's entry in a safetensors header, which bounds the header
SAFETENSORS_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}

_TEXT_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)+")
_SHA256 = re.compile(r"[0-9a-f]{64}")


# What a pack holds


@dataclass(frozen=True, slots=True)
class Tensor:
    """One entry of a safetensors header; `start` is counted from the first byte of the file."""

    dtype: str  # as safetensors spells it: F32, BF16, F16, U8, I16
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The precision of each kind of tensor: float dtypes, or schemes ("int4-g64z").

    `dense` is a float: norms, router and biases have it, and activations and the KV cache too.
    `linear` (the projections of dense.safetensors) and `embed` (embeddings and head) are that same
    float or a scheme; `experts` is any dtype, None for a model without experts.
    """

    dense: str
    linear: str
    embed: str
    experts: str | None

    @classmethod
    def floats(cls, dense: str, experts: str | None) -> Dtypes:
        """One float for everything but the experts."""
        return cls(dense, dense, dense, experts)

    def of(self, name: str) -> str:
        """The dtype of a tensor of dense.safetensors."""
        if name in (EMBED, HEAD):
            return self.embed
        return self.linear if name.endswith("_proj.weight") else self.dense

    def __str__(self) -> str:
        """For a person: `experts int4-g64z, matrices int8-g64, all else bf16`."""
        named = {"experts": self.experts, "matrices": self.linear, "embeddings": self.embed}
        other = [
            f"{kind} {dtype}" for kind, dtype in named.items() if dtype not in (None, self.dense)
        ]
        return ", ".join([*other, f"all else {self.dense}"]) if other else self.dense


def expert_layout(dtype: str, hidden: int, intermediate: int) -> ExpertLayout:
    """gate, up, down one after the other, each on a multiple of 64 bytes, zeros up to the stride.

    At every size in use the matrices adjoin; only odd test sizes leave a few bytes between them.
    """
    up = _round_up(matrix_bytes(dtype, intermediate, hidden), ALIGN)
    down = _round_up(matrix_bytes(dtype, hidden, intermediate), ALIGN)
    return ExpertLayout(
        dtype=dtype,
        hidden_size=hidden,
        intermediate_size=intermediate,
        gate_offset=0,
        up_offset=up,
        down_offset=2 * up,
        stride=_round_up(2 * up + down, STRIDE_UNIT),
    )


def layer_file(layer: int) -> str:
    """Name of the file that holds one layer's experts, relative to the pack."""
    return f"{EXPERTS}/layer-{layer:03d}.safetensors"


def dense_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of dense.safetensors, in the order of the file, with its shape."""
    hidden, head = config.hidden_size, config.head_dim
    q, kv = config.num_attention_heads * head, config.num_key_value_heads * head
    shapes: dict[str, tuple[int, ...]] = {EMBED: (config.vocab_size, hidden)}
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}"
        shapes[f"{layer}.input_norm.weight"] = (hidden,)
        for name, rows, columns in (
            ("q_proj", q, hidden),
            ("k_proj", kv, hidden),
            ("v_proj", kv, hidden),
            ("o_proj", hidden, q),
        ):
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            if config.attention_bias:
                shapes[f"{layer}.{name}.bias"] = (rows,)
        shapes[f"{layer}.post_norm.weight"] = (hidden,)
        if config.is_moe:
            shapes[f"{layer}.router.weight"] = (config.num_local_experts, hidden)
        else:
            shapes[f"{layer}.gate_proj.weight"] = (config.intermediate_size, hidden)
            shapes[f"{layer}.up_proj.weight"] = (config.intermediate_size, hidden)
            shapes[f"{layer}.down_proj.weight"] = (hidden, config.intermediate_size)
    shapes["norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    return shapes


def stored_as(name: str, dtype: str, shape: tuple[int, ...]) -> list[tuple[str, Tensor]]:
    """The entries of a safetensors file that hold one tensor; `start` counts from the first of them.

    A float tensor is one entry of its name, a quantised one is NAME.codes and NAME.scales.
    """
    scheme = scheme_of(dtype)
    if scheme is None:
        size = math.prod(shape) * DTYPE_BYTES[dtype]
        return [(name, Tensor(SAFETENSORS_DTYPES[dtype], shape, 0, size))]
    rows, columns = shape
    codes, scales = scheme.parts(rows, columns)
    return [
        (
            f"{name}.codes",
            Tensor("U8", (codes // (rows * scheme.run), rows, scheme.run), 0, codes),
        ),
        (f"{name}.scales", Tensor("I16", (scales // (rows * 4), rows, 2), codes, scales)),
    ]


def dense_sizes(config: ModelConfig, dtypes: Dtypes) -> dict[str, int]:
    """Bytes of the dense tensors, by dtype."""
    sizes = dict[str, int]()
    for name, shape in dense_shapes(config).items():
        dtype = dtypes.of(name)
        entries = stored_as(name, dtype, shape)
        sizes[dtype] = sizes.get(dtype, 0) + sum(entry.size for _, entry in entries)
    return sizes


def dense_entries(config: ModelConfig, dtypes: Dtypes) -> dict[str, Tensor]:
    """Every entry of dense.safetensors, in the order of the file; `start` has no meaning."""
    return {
        entry: tensor
        for name, shape in dense_shapes(config).items()
        for entry, tensor in stored_as(name, dtypes.of(name), shape)
    }


def quantised_matrices(
    config: ModelConfig, dtypes: Dtypes
) -> Iterator[tuple[str, str, str, tuple[int, int]]]:
    """(flag: "experts", "dense" or "embed"; dtype; name for messages; shape), each shape once."""
    up = (config.intermediate_size, config.hidden_size)
    if dtypes.experts is not None and scheme_of(dtypes.experts) is not None:
        yield "experts", dtypes.experts, "gate of every expert", up
        yield "experts", dtypes.experts, "down of every expert", up[::-1]
    for name, shape in dense_shapes(config).items():
        dtype = dtypes.of(name)
        if scheme_of(dtype) is not None and not re.match(r"layers\.[1-9]", name):
            flag = "embed" if name in (EMBED, HEAD) else "dense"
            yield flag, dtype, name, (shape[0], shape[1])


def misfit(dtype: str, rows: int, columns: int) -> str | None:
    """Why a matrix [rows, columns] cannot be stored in `dtype`; None where it can."""
    scheme = scheme_of(dtype)
    if scheme is None:
        return None
    if columns % scheme.group:
        return f"has {columns} columns, no whole number of groups of {scheme.group}"
    if rows % 2:
        return f"has {rows} rows, an odd number"
    return None


def required_files(config: ModelConfig) -> list[str]:
    """The tensor files a pack of this model has, no more and no fewer."""
    layers = range(config.num_hidden_layers if config.is_moe else 0)
    return [DENSE, *map(layer_file, layers)]


def is_text_name(name: str) -> bool:
    """Whether `name` may stand beside the tensor files: one plain name with a suffix, no folder."""
    reserved = name in (MANIFEST, JOURNAL) or name.endswith((".safetensors", ".tmp"))
    return len(name) <= 128 and _TEXT_NAME.fullmatch(name) is not None and not reserved


# The manifest


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that passed every check that needs no other file."""

    raw: dict[str, Any]  # as read, brought up to the newest format
    format: int  # of the file
    config: ModelConfig
    dtypes: Dtypes
    layout: ExpertLayout | None
    num_tokens: int
    files: dict[str, tuple[int, str]]  # relative name: (size in bytes, SHA-256 in hex)


def read_manifest(folder: Path) -> Manifest:
    """Read and check `folder`/manifest.json; no other file is opened.

    Raises `NotFoundError` (no pack there), `UnsupportedError` (another format), `DamagedError`.
    """
    path = folder / MANIFEST
    try:
        with open_confined(folder, MANIFEST) as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError) as error:
        if folder.name.endswith(PARTIAL):
            raise NotFoundError(
                f"{folder} is an unfinished conversion; run the same convert again"
            ) from error
        raise NotFoundError(f"{folder} is not a pack: it has no {MANIFEST}") from error
    except OSError as error:
        raise disk_error(error, path, "read") from error
    if len(data) > MAX_JSON_BYTES:
        raise DamagedError(f"{path} is larger than {MAX_JSON_BYTES} bytes")
    return check_manifest(load_json(data, path), path)


def check_manifest(raw: Any, path: Path) -> Manifest:
    """Check what a manifest says about itself; `path` is for the messages."""
    if not isinstance(raw, dict):
        _damaged(path, "is not a JSON object")
    version = raw.get("format")
    if not is_whole(version) or version not in (FORMAT - 1, FORMAT):
        raise UnsupportedError(
            f"{path}: pack format {version!r:.40} is not supported (this version reads "
            f"{FORMAT - 1} and {FORMAT}); convert again or update spmoe-lite"
        )
    raw = _upgrade(raw)
    try:
        config = ModelConfig.from_dict(raw["model"])
    except UnsupportedError as error:
        raise DamagedError(f"{path}: {error}; convert again") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        _damaged(path, f"does not describe a model ({error!r:.100})")
    dtypes = _check_dtypes(raw, config, path)
    num_tokens: Any = raw.get("num_tokens")
    if not is_whole(num_tokens) or not 1 <= num_tokens <= config.vocab_size:
        _damaged(path, f"has num_tokens {num_tokens!r:.40}, not 1 to {config.vocab_size}")
    _check_told(raw, path)
    _check_audit(raw.get("audit"), config, path)
    return Manifest(
        raw=raw,
        format=version,
        config=config,
        dtypes=dtypes,
        layout=_check_layout(raw.get("expert_layout"), dtypes.experts, config, path),
        num_tokens=num_tokens,
        files=_check_files(raw.get("files"), config, path),
    )


def own_hash(raw: dict[str, Any]) -> str:
    """SHA-256 of a manifest's other keys, what its key `sha256` holds: in hex, of one spelling of the JSON."""
    rest = {key: value for key, value in raw.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _upgrade(raw: dict[str, Any]) -> dict[str, Any]:
    """Bring format 1 up to 2: all of dense.safetensors had one dtype."""
    if raw["format"] == FORMAT:
        return raw
    dense = raw.get("dense_dtype")
    return raw | {"format": FORMAT, "linear_dtype": dense, "embed_dtype": dense}


def _check_dtypes(raw: dict[str, Any], config: ModelConfig, path: Path) -> Dtypes:
    """The four dtypes: known, floats where they have to be, and schemes that fit the matrices."""
    names = ("dense_dtype", "linear_dtype", "embed_dtype", "expert_dtype")
    values = [raw.get(name) for name in names]
    for name, value in zip(names, values, strict=True):
        if name == "expert_dtype" and not config.is_moe:
            if value is not None:
                _damaged(path, "describes experts of a model that has none")
            continue
        try:
            known = isinstance(value, str) and (scheme_of(value) is None or name != "dense_dtype")
        except UnsupportedError:
            known = False
        if not known:
            _damaged(path, f"has {name} {value!r:.40}")
        if name in names[1:3] and value != values[0] and value in DTYPE_BYTES:
            _damaged(path, f"has {name} {value!r:.40}, neither dense_dtype nor a scheme")
    dtypes = Dtypes(*values)  # type: ignore[arg-type]
    for _, dtype, what, shape in quantised_matrices(config, dtypes):
        if fault := misfit(dtype, *shape):
            _damaged(path, f"stores {what} as {dtype}, but it {fault}")
    return dtypes


def _check_told(raw: dict[str, Any], path: Path) -> None:
    """What is shown to a person is one printable line, and what `repack` adds to is a list."""
    for key in ("source", "options"):
        if not isinstance(raw.get(key), dict):
            _damaged(path, f"has no object {key!r}")
    source = raw["source"]
    for name, value in (
        ("source id", source.get("id", "")),
        ("source revision", source.get("revision") or ""),
        ("date", raw.get("created") or ""),
    ):
        if not isinstance(value, str) or not value.isprintable() or len(value) > 1000:
            _damaged(path, f"has a {name} that is no line of text: {value!r:.40}")
    if not isinstance(raw["options"].get("repacked_from", []), list):
        _damaged(path, "has an option repacked_from that is no list")


def printable(name: str) -> str:
    """A file name as a manifest may hold it and a terminal show it: escapes in place of the odd."""
    return name if name.isprintable() else ascii(name)[1:-1]


def _check_audit(audit: Any, config: ModelConfig, path: Path) -> None:
    """Every expert matrix that was expected was found."""
    names = ("layers", "experts", "matrices", "found")
    if not isinstance(audit, dict) or not all(is_whole(audit.get(name)) for name in names):
        _damaged(path, "has no audit of its tensors")
    if not config.is_moe:
        return
    expected = config.num_hidden_layers * config.num_local_experts * 3
    if audit["found"] != expected:
        _damaged(path, f"counts {audit['found']!r:.40} expert matrices, the model has {expected}")


def _check_layout(
    values: Any, expert_dtype: str | None, config: ModelConfig, path: Path
) -> ExpertLayout | None:
    """The layout named by the manifest: three aligned runs inside the stride that do not
    overlap.
    """
    if expert_dtype is None:
        if values is not None:
            _damaged(path, "describes experts of a model that has none")
        return None
    try:
        layout = ExpertLayout(**values)
    except TypeError as error:
        _damaged(path, f"does not describe the experts ({error!r:.100})")
    numbers = [getattr(layout, field.name) for field in fields(ExpertLayout)][1:]
    if not all(is_whole(n) and n >= 0 for n in numbers):
        _damaged(path, f"has an expert layout of other things than whole numbers: {numbers!r:.80}")
    model = (expert_dtype, config.hidden_size, config.intermediate_size)
    if (layout.dtype, layout.hidden_size, layout.intermediate_size) != model:
        _damaged(path, "describes experts of another shape or dtype than the model's")
    up = matrix_bytes(expert_dtype, config.intermediate_size, config.hidden_size)
    down = matrix_bytes(expert_dtype, config.hidden_size, config.intermediate_size)
    offsets = (layout.gate_offset, layout.up_offset, layout.down_offset)
    if any(n % ALIGN for n in offsets):
        _damaged(path, f"has expert offsets {offsets!r:.80}, not multiples of {ALIGN}")
    runs = sorted(zip(offsets, (up, up, down), strict=True))
    ends = [*(start for start, _ in runs[1:]), layout.stride]
    if layout.stride % STRIDE_UNIT:
        _damaged(path, f"has stride {layout.stride!r:.40}, not a multiple of {STRIDE_UNIT}")
    if any(start + size > end for (start, size), end in zip(runs, ends, strict=True)):
        _damaged(path, f"has expert matrices that overlap or pass the stride {layout.stride}")
    return layout


def _check_files(values: Any, config: ModelConfig, path: Path) -> dict[str, tuple[int, str]]:
    """The table of files: exactly the model's tensor files, and text files with plain names."""
    if not isinstance(values, dict):
        _damaged(path, "has no table of files")
    needed = required_files(config)
    files = {}
    for name, entry in values.items():
        if name not in needed and not is_text_name(name):
            _damaged(path, f"lists the file {name!r:.80}, which has no place in a pack")
        size: Any = entry.get("size") if isinstance(entry, dict) else None
        digest = entry.get("sha256") if isinstance(entry, dict) else None
        if not is_whole(size) or not 0 <= size < 1 << 62:
            _damaged(path, f"gives {name} the size {size!r:.40}")
        if not isinstance(digest, str) or not _SHA256.fullmatch(digest):
            _damaged(path, f"gives {name} no SHA-256")
        files[name] = (size, digest)
    for name in needed:
        if name not in files:
            _damaged(path, f"does not list {name}")
    return files


# Headers, and what lies beside a pack


def write_header(tensors: dict[str, Tensor]) -> bytes:
    """The head of a safetensors file that holds `tensors` in this order, whatever their `start`.

    Padded with spaces inside the JSON length so that the first tensor starts on a multiple of 4096.
    """
    entries, offset = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text = text.ljust(_round_up(8 + len(text), PAGE) - 8)
    return len(text).to_bytes(8, "little") + text


def read_header(file: FileIO, path: Path, expected: int | None = None) -> dict[str, Tensor]:
    """Read the safetensors header of a file that should hold `expected` tensors (None: any number).

    They must follow one another without hole or overlap to the end of the file. Raises
    `DamagedError`. What is read and parsed is bounded by `expected`, and by what the file has.
    """
    most = MAX_JSON_BYTES if expected is None else MAX_ENTRY_BYTES * expected + 2 * PAGE
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(read_exactly(file, 8, path), "little")
    if not 2 <= length <= min(size - 8, most):
        _damaged(path, f"claims a header of {length} bytes, more than it has or needs")
    entries = load_json(read_exactly(file, length, path), path)
    if not isinstance(entries, dict):
        _damaged(path, "has a header that is not a JSON object")
    entries.pop("__metadata__", None)
    if expected is not None and len(entries) != expected:
        _damaged(path, f"holds {len(entries)} tensors, not {expected}")
    tensors, end = {}, 8 + length
    if end % PAGE:
        _damaged(path, f"has its first tensor at byte {end}, not on a multiple of {PAGE}")
    for name, entry in entries.items():
        try:
            dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            _damaged(path, f"has a malformed header entry for {name!r:.80}")
        if not isinstance(dtype, str) or not isinstance(shape, list):
            _damaged(path, f"has a malformed header entry for {name!r:.80}")
        if not all(is_whole(n) for n in (begin, stop, *shape)):
            _damaged(path, f"has numbers that are not whole in the header entry for {name!r:.80}")
        if begin != end - 8 - length or stop < begin:
            _damaged(path, f"has a hole, an overlap or another order at {name!r:.80}")
        tensors[name] = Tensor(dtype, tuple(shape), end, stop - begin)
        end = 8 + length + stop
    if end != size:
        _damaged(path, f"has {size} bytes, its header describes {end}")
    return tensors


def read_journal(partial: Path) -> dict[str, Any]:
    """What an unfinished conversion recorded; an empty dict where that is missing or unreadable."""
    try:
        with open_confined(partial, JOURNAL) as file:
            value = load_json(file.read(MAX_JSON_BYTES), partial / JOURNAL)
    except (OSError, DamagedError):
        return {}
    return value if isinstance(value, dict) else {}


def check_target(path: Path, force: bool) -> None:
    """Raise `UsageError` if a pack cannot be made at `path`: something else is there, or, without
    `force`, another pack.
    """
    if not os.path.lexists(path):
        return
    with naming(path, "read"):
        if path.is_dir() and not any(path.iterdir()):
            return  # an empty folder that the user made for us
    if path.is_symlink():
        raise UsageError(
            f"{path} is a link, which no pack replaces; it leads to {os.path.realpath(path)}"
        )
    if not os.path.isfile(path / MANIFEST):
        raise UsageError(f"{path} exists and is not a pack; choose another place")
    if not force:
        raise UsageError(f"{path} exists already; pass --force to replace it")


def restore_old(path: Path) -> None:
    """Put back a pack that a run killed between the two renames of a replacement left aside.

    One that is between them at this moment holds its lock, and is waited for.
    """
    partial = path.with_name(path.name + PARTIAL)
    for _ in range(100):
        if not _left_aside(path):
            return
        with contextlib.suppress(BusyError), contextlib.ExitStack() as stack:
            if partial.is_dir():
                stack.enter_context(locked(partial))
            put_back(path)
            return
        time.sleep(0.01)


def put_back(path: Path) -> None:
    """`restore_old` for the one that holds the lock."""
    if _left_aside(path):
        old = path.with_name(path.name + OLD)
        with naming(old, "rename"):
            old.rename(path)


def _left_aside(path: Path) -> bool:
    old = path.with_name(path.name + OLD)
    return os.path.isfile(old / MANIFEST) and not os.path.lexists(path)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _damaged(path: Path, what: str) -> NoReturn:
    raise DamagedError(f"{path} {what}; convert again")
