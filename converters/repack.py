"""`convert`: a checkpoint becomes a pack. `repack`: a pack becomes one of other precision or newer format.

The order of work; nothing is written before step 5.

1. open the source: a folder, a GGUF file, or a hub repository (an existing path wins over a hub id)
2. decide: config, every tensor and its dtype, the tokenizer against the rows of the embeddings
3. a finished pack of the same source and options is "already there"; of others, `force` is needed
4. plan: bytes to fetch and to write, room on each volume; the caller confirms
5. write: experts layer by layer, then all dense tensors, one piece in memory at a time, then text files
6. verify: read every file back and compare it with the hash taken while it was written; then the manifest

A run that is cancelled, killed, or out of disk space leaves NAME.spmoe.partial with whole files in it, and
the next one goes on from there. A source that turns out to be damaged leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spmoe_lite import hub, library
from spmoe_lite.config import DTYPE_BYTES, ModelConfig
from spmoe_lite.converters.gguf import GgufCheckpoint, is_gguf
from spmoe_lite.converters.plan import (
    ConvertPlan,
    check_room,
    dense_bytes,
    layer_bytes,
    pack_bytes,
    volumes,
)
from spmoe_lite.converters.recipe import Recipe, check_tied, match, natural_dtypes, read_as
from spmoe_lite.converters.source import Checkpoint, Source
from spmoe_lite.errors import (
    Cancelled,
    DamagedError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.manifest import DENSE, MANIFEST, SUFFIX, layer_file, read_manifest
from spmoe_lite.pack import TORCH_DTYPES, Pack, PackWriter
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.tokenizer import Tokenizer

log = logging.getLogger("spmoe_lite")


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """The pack, whether it was there already, and the plan (None if there was nothing to do)."""

    path: Path
    already_there: bool
    plan: ConvertPlan | None


def convert(
    source: str | Path,
    *,
    name: str | None = None,
    out: str | Path | None = None,
    experts: str | None = None,
    dense: str | None = None,
    force: bool = False,
    low_disk: bool = False,
    offline: bool = False,
    confirm: Callable[[ConvertPlan], bool] | None = None,
    home: str | Path | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> ConvertResult:
    """Convert a folder, a `.gguf` file, a hub id (ORG/NAME[@REVISION]) or a short name into a pack.

    The pack is `out`, or `name` (default: the source's) in the folder of packs, `home`. `experts` and
    `dense` are "fp32", "bf16" or "fp16"; without them the source's own precision is kept. `confirm` is
    shown the plan before anything large moves. Raises `NotFoundError`, `UnsupportedError`, `DamagedError`,
    `NetworkError` for the source, `CapacityError` for the disk, `UsageError` where another pack is in the
    way, `Cancelled` by the event or where `confirm` returns False.
    """
    for flag, dtype in (("experts", experts), ("dense", dense)):
        if dtype is not None and dtype not in DTYPE_BYTES:
            raise UsageError(f"{flag} {dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
    opened, short, repo = _open(source, offline, on_progress, cancel)
    with contextlib.closing(opened):
        path = _target(out, name or short, home)
        job = _Job(opened, repo, path, experts, dense, force, low_disk, on_progress, cancel)
        return job.run(confirm)


def _open(
    given: str | Path, offline: bool, on_progress: OnProgress | None, cancel: threading.Event | None
) -> tuple[Source, str, hub.HubRepo | None]:
    """The source, what to call its pack, and the hub repository if it comes from there."""
    path = Path(given).expanduser()
    if path.is_dir():
        if (path / MANIFEST).is_file():
            raise UsageError(f"{path} is a pack already; repack changes its precision")
        return Checkpoint.folder(path), path.resolve().name, None
    if path.exists():
        if not is_gguf(path):
            raise UnsupportedError(f"{path} is neither a folder nor a GGUF file")
        return GgufCheckpoint(path), path.stem, None
    repo = hub.resolve(given, offline=offline, cancel=cancel)
    assert repo is not None  # the path does not exist
    repo.check_access(cancel)
    repo.weights(on_progress, cancel)
    checkpoint = Checkpoint(
        repo.id,
        repo.files(),
        lambda file: repo.fetch(file, on_progress, cancel),
        revision=repo.revision,
        arrived=False,
    )
    return checkpoint, repo.name, repo


def _target(out: str | Path | None, name: str, home: str | Path | None) -> Path:
    if out is not None:
        return Path(out)
    if not name or name != Path(name).name or name.startswith(".") or "\\" in name or ":" in name:
        raise UsageError(f"{name!r} cannot be the name of a pack; give another with --name")
    return (Path(home) if home else library.home()) / (name.removesuffix(SUFFIX) + SUFFIX)


class _Job:
    """One conversion, from the opened source to the pack; `run` is the order of work above."""

    def __init__(
        self,
        source: Source,
        repo: hub.HubRepo | None,
        path: Path,
        experts: str | None,
        dense: str | None,
        force: bool,
        low_disk: bool,
        on_progress: OnProgress | None,
        cancel: threading.Event | None,
    ) -> None:
        self.source, self.repo, self.path = source, repo, path
        self.asked = {"dense": dense, "experts": experts}
        self.force, self.low_disk = force, low_disk
        self.on_progress, self.cancel = on_progress, cancel

    def run(self, confirm: Callable[[ConvertPlan], bool] | None) -> ConvertResult:
        source = self.source
        self.config = ModelConfig.from_hf(source.config, source.generation_config)
        self.texts = source.text_files()
        self.num_tokens = _num_tokens(source.label, self.texts, self.config)
        if self.repo is None:
            self.recipe = match(self.config, source)
            check_tied(self.config, source, self.recipe)
            natural = natural_dtypes(source, self.recipe)
        else:
            natural = self._stated_dtypes()
        if not self.force and self._is_there():
            return ConvertResult(self.path, True, None)
        plan = self._plan(*self._dtypes(*natural))
        check_room(plan)
        if confirm is not None and not confirm(plan):
            raise Cancelled("not confirmed; nothing was written")
        if self.repo is not None:
            self._fetch()
            natural = natural_dtypes(source, self.recipe)
        self._write(natural)
        return ConvertResult(self.path, False, plan)

    # Deciding

    def _stated_dtypes(self) -> tuple[str, str | None]:
        """(dense, experts) as config.json states them, while the weights are still on the hub."""
        names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
        stated = self.source.config.get("dtype") or self.source.config.get("torch_dtype")
        dtype = names.get(str(stated), "bf16")
        return dtype, dtype if self.config.is_moe else None

    def _dtypes(self, dense: str, experts: str | None) -> tuple[str, str | None]:
        """(dense, experts) of the pack: what was asked, else the source's."""
        if experts is None and self.asked["experts"] is not None:
            log.info("%s has no experts: --experts has no effect", self.source.label)
        return self.asked["dense"] or dense, experts and (self.asked["experts"] or experts)

    def _is_there(self) -> bool:
        """Whether `path` is a whole pack of this source and these options already.

        Raises `UsageError` if it is another pack, `DamagedError` if it is not whole.
        """
        if not (self.path / MANIFEST).is_file():
            return False
        raw = read_manifest(self.path).raw
        made = raw["options"]
        for kind, asked in self.asked.items():
            if raw[f"{kind[:6].rstrip('s')}_dtype"] != (asked or made.get(f"source_{kind}")):
                raise UsageError(_in_the_way(self.path, raw))
        if raw["source"] != json.loads(json.dumps(self.source.identity())):
            raise UsageError(_in_the_way(self.path, raw))
        Pack.open(self.path).close()
        return True

    def _plan(self, dense: str, experts: str | None) -> ConvertPlan:
        size, download = pack_bytes(self.config, dense, experts), 0
        needs = {self.path.parent: size}
        if isinstance(self.source, Checkpoint) and self.repo is not None:
            download = self.repo.download_bytes(self.source.weight_files)
            needs[hub.cache_folder()] = download
        return ConvertPlan(
            label=self.source.label,
            revision=self.source.identity()["revision"],
            path=self.path,
            family=self.config.family,
            dense_dtype=dense,
            expert_dtype=experts,
            download_bytes=download,
            pack_bytes=size,
            volumes=volumes(needs),
            ignored=tuple(self.source.ignored),
        )

    # Writing

    def _write(self, natural: tuple[str, str | None]) -> None:
        dense, experts = self._dtypes(*natural)
        writer = PackWriter(
            self.path,
            self.config,
            dense,
            experts,
            self.source.identity(),
            {"source_dense": natural[0], "source_experts": natural[1]},
            force=self.force,
            cancel=self.cancel,
        )
        try:
            with writer:
                audit = self._fill(writer, dense, experts)
                writer.finish(audit, self.num_tokens)
        except (DamagedError, UnsupportedError):  # the same source would fail again
            shutil.rmtree(writer.partial, ignore_errors=True)
            raise

    def _fill(self, writer: PackWriter, dense: str, experts: str | None) -> dict[str, int]:
        """Write every file that is not there yet; return the audit of the manifest."""
        meter = _Meter("convert", pack_bytes(self.config, dense, experts), self.on_progress)
        found = 0
        for layer, pieces in enumerate(self.recipe.experts):
            assert experts is not None
            if not writer.has(layer_file(layer)):
                writer.write_layer(layer, self._experts(layer, experts, meter))
            else:
                meter.add(layer_bytes(self.config, experts))
            found += sum(len(expert) for expert in pieces)
        if not writer.has(DENSE):
            writer.write_dense(
                (name, dense, piece.shape, self._reader(name, dense, meter))
                for name, piece in self.recipe.dense.items()
            )
        else:
            meter.add(dense_bytes(self.config, dense))
        for name, data in self.texts.items():
            writer.copy_text(name, data)
        writer.verify(self.on_progress)
        return {
            "layers": len(self.recipe.experts),
            "experts": self.config.num_local_experts,
            "matrices": 3 if experts else 0,
            "found": found,
        }

    def _experts(
        self, layer: int, dtype: str, meter: _Meter
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(gate, up, down) of one expert after the other, in the same memory."""
        width, hidden = self.config.intermediate_size, self.config.hidden_size
        gate, up = (torch.empty((width, hidden), dtype=TORCH_DTYPES[dtype]) for _ in range(2))
        down = torch.empty((hidden, width), dtype=TORCH_DTYPES[dtype])
        for pieces in self.recipe.experts[layer]:
            for piece, matrix in zip(pieces, (gate, up, down), strict=True):
                check(self.cancel)
                read_as(self.source, piece, dtype, matrix)
            yield gate, up, down
            meter.add(layer_bytes(self.config, dtype) // self.config.num_local_experts)

    def _reader(self, name: str, dtype: str, meter: _Meter) -> Callable[[], torch.Tensor]:
        def read() -> torch.Tensor:
            tensor = read_as(self.source, self.recipe.dense[name], dtype)
            meter.add(tensor.nbytes)
            return tensor

        return read


class _Meter:
    """Bytes done of one stage, reported as they come."""

    def __init__(self, stage: str, total: int, on_progress: OnProgress | None) -> None:
        self.stage, self.total, self.on_progress, self.done = stage, total, on_progress, 0

    def add(self, count: int) -> None:
        self.done += count
        if self.on_progress is not None:
            self.on_progress(Progress(self.stage, self.done, self.total, "bytes"))


def _in_the_way(path: Path, raw: dict[str, Any]) -> str:
    made = f"{raw['source'].get('id', 'another source')}, dense {raw['dense_dtype']}"
    if raw["expert_dtype"]:
        made += f", experts {raw['expert_dtype']}"
    return (
        f"{path} exists and was made of other weights or options ({made}); pass --force to replace "
        f"it, or --name for a second pack"
    )


def _num_tokens(label: str, texts: dict[str, bytes], config: ModelConfig) -> int:
    """Entries of the tokenizer, which must load and fit the rows of the embeddings."""
    with tempfile.TemporaryDirectory(prefix="spmoe-") as folder:
        for name, data in texts.items():
            (Path(folder) / name).write_bytes(data)
        try:
            return Tokenizer.load(Path(folder), config).num_tokens
        except SpmoeError as error:
            raise type(error)(str(error).replace(folder, label)) from error


def repack(
    name: str | Path,
    *,
    experts: str | None = None,
    dense: str | None = None,
    force: bool = False,
    home: str | Path | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> ConvertResult:
    raise NotImplementedError
