"""A recording of routing: which experts every row of every target pass chose. JSON lines.

The first line is the header: what ran. Each further line is one pass of the target:

    {"kind": "decode", "rows": 5, "accepted": 3, "tokens": 3,
     "predictions": [[0, 1, [3, 5]], ...], "experts": [[0, 3, 1, 2, ...], ...]}

`experts` has one list for each layer: the router's k choices of the first row, then those of the second,
best first. `accepted` rows were kept, `tokens` of text came of the pass. `predictions` are those made
while drafting for it: layer, row of the pass, experts, best first; without any the key is left out. A
pass of kind `prefill` had more rows than any step of decoding (`store.PREFILL_ROWS`). Readers skip keys
they do not know; a change of meaning raises the version.

Lines are appended with one write each, so a killed run loses at most its last one. Nothing of the text is
in the file, only numbers of experts.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError, UsageError
from spmoe_lite.files import disk_error, naming

log = logging.getLogger("spmoe_lite")

VERSION = 1
MAX_HEADER_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 26  # a pass of 2048 rows through 64 layers takes a tenth
MAX_EXPERTS = 1 << 20  # of all layers; more is a damaged header
MAX_EXPERT_BYTES = 1 << 40  # the same
MIN_LINK, MAX_LINK = 1e-6, 1e6  # GB/s
KINDS = ("prefill", "decode")

Prediction = tuple[int, int, list[int]]  # layer, row of the pass, experts best first


@dataclass(frozen=True, slots=True)
class Header:
    """What was recorded, and on what."""

    model: str
    draft: str | None
    layers: int
    experts: int  # of a layer
    k: int  # of them a row chooses
    slots: int  # while recording
    draft_tokens: int  # at most, a step
    expert_dtype: str
    expert_bytes: int
    link: float | None  # GB/s at which `profile` saw experts copied on that machine, if it was run


@dataclass(frozen=True, slots=True)
class Pass:
    """One target pass; see the module."""

    kind: str
    rows: int
    accepted: int
    tokens: int
    predictions: list[Prediction]
    experts: list[list[int]]  # [layers][rows * k]


@dataclass(frozen=True, slots=True)
class Trace:
    header: Header
    passes: list[Pass]


def check_link(flag: str, rate: float | None) -> None:
    """UsageError for GB/s that no bus and no memory has."""
    if rate is not None and not MIN_LINK <= rate <= MAX_LINK:
        raise UsageError(f"{flag} {rate:.12g}: a rate in GB/s, 0.000001 to 1000000")


class TraceWriter:
    """Appends passes to a new file; gives up, saying so once, when the disk does."""

    def __init__(self, path: str | Path, header: Header):
        """UsageError if there is something at `path`: no recording is overwritten."""
        try:
            self._path = path = Path(path)
        except TypeError:  # `open` takes a number, too, and closes that descriptor in the end
            raise UsageError(f"--trace {path!r:.80} is no path") from None
        self._file: BinaryIO | None = None
        self._passes = 0
        try:
            self._file = open(path, "xb", buffering=0)
            self._path = path.absolute()  # the program may go to another folder
            self._write({"trace": VERSION, **asdict(header)})
        except FileExistsError:
            if path.is_dir():
                raise UsageError(f"--trace {path} is a folder: name a new file") from None
            raise UsageError(f"--trace {path} exists: delete it, or name another file") from None
        except (OSError, ValueError) as error:
            self.close()
            if isinstance(error, ValueError):  # a name that no file can have
                raise UsageError(f"--trace {str(path)!r:.80} cannot be a file") from None
            raise disk_error(error, path, "write") from error

    def add(
        self,
        kind: str,
        layers: Mapping[int, Sequence[Sequence[int]]],
        accepted: int,
        tokens: int,
        predictions: Iterable[Prediction] = (),
    ) -> None:
        """One pass: for each layer the choices [rows][k]. Never fails: a full disk ends the recording."""
        if self._file is None:
            return
        experts = [[e for row in layers[layer] for e in row] for layer in sorted(layers)]
        line: dict[str, Any] = {"kind": kind, "rows": len(next(iter(layers.values())))}
        line |= {"accepted": accepted, "tokens": tokens}
        if guesses := list(predictions):
            line["predictions"] = guesses
        try:
            self._write(line | {"experts": experts})
            self._passes += 1
        except OSError as error:
            log.warning("no further pass is recorded: %s", disk_error(error, self._path, "write"))
            self.close()

    def close(self) -> None:
        """Close the file; one without a pass is deleted. Idempotent."""
        file, self._file = self._file, None
        if file is None:
            return
        empty = os.fstat(file.fileno()) if self._passes == 0 else None
        file.close()
        if empty is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(empty, self._path.stat()):  # else another one took the name
                    self._path.unlink()

    def _write(self, value: dict[str, Any]) -> None:
        """One line. A filling disk takes a part of it, without an error: that part is cut off again."""
        assert self._file is not None
        line = json.dumps(value, separators=(",", ":")).encode() + b"\n"
        written = self._file.write(line)
        if written != len(line):
            self._file.truncate(self._file.tell() - written)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_trace(path: Path) -> Trace:
    """The recording at `path`. A last line that was cut off is dropped, with a warning.

    NotFoundError, UnsupportedError for a newer version, DamagedError naming the line for anything else
    that is not a trace.
    """
    if not path.is_file():
        raise NotFoundError(f"no trace {path}; `run` and `chat` record one with --trace FILE")
    passes: list[Pass] = []
    with naming(path, "read"), open(path, "rb") as file:
        header = _header(path, file.readline(MAX_HEADER_BYTES))
        lines = iter(lambda: file.readline(MAX_LINE_BYTES), b"")
        for number, line in enumerate(lines, 2):
            try:
                passes.append(_pass(_object(line), header))
            except (ValueError, RecursionError) as error:
                if line.endswith(b"\n") or len(line) == MAX_LINE_BYTES:
                    raise DamagedError(
                        f"{path} line {number} is no pass of a trace ({error}); delete the line, "
                        f"or record again"
                    ) from None
                log.warning("%s ends within line %d, which is left out", path, number)
    return Trace(header, passes)


def _header(path: Path, line: bytes) -> Header:
    try:
        value = _object(line)
        version = _number(value, "trace", 1)
        if version > VERSION:
            raise UnsupportedError(
                f"{path} is a trace of version {version}, this program reads up to {VERSION}: update it"
            )
        for name in ("layers", "experts", "k", "slots", "draft_tokens", "expert_bytes"):
            _number(value, name, 0 if name == "draft_tokens" else 1)
        for name in ("model", "expert_dtype"):
            if not isinstance(value.get(name), str):
                raise ValueError(f"{name} is no text")
        if value["k"] > value["experts"] or value["layers"] * value["experts"] > MAX_EXPERTS:
            raise ValueError(f"{value['layers']} x {value['experts']} experts, k {value['k']}")
        if value["slots"] > value["layers"] * value["experts"]:
            raise ValueError(
                f"{value['slots']} slots for {value['layers']} x {value['experts']} experts"
            )
        if value["expert_bytes"] > MAX_EXPERT_BYTES:
            raise ValueError("expert_bytes is no size of an expert")
        link, draft = value.get("link"), value.get("draft")
        if link is not None and not (type(link) in (int, float) and MIN_LINK <= link <= MAX_LINK):
            raise ValueError("link is no rate")
        if draft is not None and not isinstance(draft, str):
            raise ValueError("draft is no text")
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} line 1 is no header of a trace ({error}); give a file that `run` or `chat` "
            f"wrote with --trace"
        ) from None
    known = {name: value.get(name) for name in Header.__dataclass_fields__}
    return Header(**known)  # type: ignore[arg-type]  # each checked above


def _pass(value: dict[str, Any], header: Header) -> Pass:
    kind, experts = value.get("kind"), value.get("experts")
    if kind not in KINDS:
        raise ValueError(f"kind is neither {' nor '.join(KINDS)}")
    rows, accepted, tokens = (_number(value, name, 0) for name in ("rows", "accepted", "tokens"))
    if not tokens <= accepted <= rows or rows == 0:
        raise ValueError(f"{rows} rows, {accepted} accepted, {tokens} tokens")
    if not isinstance(experts, list) or len(experts) != header.layers:
        raise ValueError(f"experts are not those of {header.layers} layers")
    for layer, chosen in enumerate(experts):
        if not isinstance(chosen, list) or len(chosen) != rows * header.k:
            raise ValueError(f"layer {layer} has not {header.k} experts for each of {rows} rows")
        _check_ids(chosen, header.experts, f"layer {layer}")
    predictions = value.get("predictions", [])
    if not isinstance(predictions, list):
        raise ValueError("predictions are no list")
    return Pass(
        kind, rows, accepted, tokens, [_prediction(p, rows, header) for p in predictions], experts
    )


def _prediction(value: Any, rows: int, header: Header) -> Prediction:
    if not isinstance(value, list) or len(value) != 3 or not isinstance(value[2], list):
        raise ValueError("a prediction is not [layer, row, experts]")
    layer, row, experts = value
    if not (type(layer) is type(row) is int and 0 <= layer < header.layers and 0 <= row < rows):
        raise ValueError(f"a prediction for layer {layer}, row {row}")
    _check_ids(experts, header.experts, "a prediction")
    return layer, row, experts


def _check_ids(ids: list[Any], experts: int, what: str) -> None:
    if ids and not (set(map(type, ids)) == {int} and 0 <= min(ids) and max(ids) < experts):
        raise ValueError(f"{what} names an expert that is none of {experts}")


def _object(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    except json.JSONDecodeError:
        raise ValueError("not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _number(value: dict[str, Any], name: str, least: int) -> int:
    number = value.get(name)
    if type(number) is not int or number < least:
        raise ValueError(f"{name} is no number of at least {least}")
    return number
