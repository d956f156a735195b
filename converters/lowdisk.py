"""Converting a hub model without room for all its shards: they come when a layer needs them, and go.

A shard is dropped when every layer that has experts in it is in the pack, read back and found as written.
The few dense tensors in it (attention, norms, router) are kept until the end in a spool file of its own, a
safetensors file in the partial folder with the pack's names, in its dtype or, where that is a scheme, in
the source's. A run that was killed finds finished layers and spool files again and fetches no shard that it
is done with. Shards that were in the hub cache before are used and left alone.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

import torch

from spmoe_lite.converters.recipe import Recipe, check_tensor, read_as
from spmoe_lite.converters.source import Checkpoint, Piece, Source, SourceTensor, TensorFiles
from spmoe_lite.errors import DamagedError, UnsupportedError
from spmoe_lite.files import naming
from spmoe_lite.manifest import EMBED, Dtypes, layer_file, read_header, stored_as, write_header
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.precision import scheme_of
from spmoe_lite.progress import OnProgress, check

SPOOL = "spool"


class Repository(Protocol):
    """A checkpoint whose files come when asked for: `hub.HubRepo`, or one that makes them (the demo's)."""

    id: str
    revision: str
    name: str

    def files(self) -> dict[str, int]: ...
    def download_bytes(self, names: Iterable[str]) -> int: ...
    def fetch(
        self,
        name: str,
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path: ...
    def fetch_all(
        self,
        names: Iterable[str],
        on_progress: OnProgress | None = None,
        cancel: threading.Event | None = None,
    ) -> Path: ...
    def drop(self, name: str) -> int: ...


def spool_dtypes(dtypes: Dtypes, natural: Dtypes) -> Dtypes:
    """Floats: of the pack, or of the source for what is to be quantised, once and from its own values."""

    def kept(dtype: str) -> str:
        return dtype if scheme_of(dtype) is None else natural.dense

    return Dtypes(dtypes.dense, kept(dtypes.linear), kept(dtypes.embed), dtypes.experts)


class Shards:
    """The shards of one hub checkpoint while it is converted layer by layer."""

    def __init__(
        self,
        source: Checkpoint,
        repo: Repository,
        recipe: Recipe,
        on_progress: OnProgress | None,
        cancel: threading.Event | None,
    ) -> None:
        self.source, self.repo, self.recipe = source, repo, recipe
        self.on_progress, self.cancel = on_progress, cancel
        self._arrived: set[str] = set()
        self._checked: set[int] = set()  # layers read back
        self._spools: dict[str, TensorFiles] = {}  # dense tensor of the pack: where it is kept
        self._layers: dict[str, set[int]] = {}  # shard: layers with experts in it
        self._dense: dict[str, list[str]] = {}  # shard: dense tensors in it
        for layer, experts in enumerate(recipe.experts):
            for piece in (piece for expert in experts for piece in expert):
                self._layers.setdefault(self._file(piece), set()).add(layer)
        for name, piece in recipe.dense.items():
            self._dense.setdefault(self._file(piece), []).append(name)

    def _file(self, piece: Piece) -> str:
        return self.source.tensors[piece.name].file

    def source_dtypes(self) -> Dtypes:
        """Those of the first dense tensor and the first expert, which are fetched for it."""
        embeddings, expert = self.recipe.dense[EMBED], self.recipe.experts[0][0][0]
        self._need(embeddings)
        self._need(expert)
        tensors = self.source.tensors
        return Dtypes.floats(tensors[embeddings.name].dtype, tensors[expert.name].dtype)

    def adopt(self, partial: Path, dtypes: Dtypes, natural: Dtypes) -> None:
        """Take up the spool files of an earlier run; from here on dtypes may not vary from `natural`."""
        self.folder, self.natural = partial / SPOOL, natural
        self.kept = spool_dtypes(dtypes, natural)
        for shard in self._layers:
            if (self.folder / shard).is_file():
                self._use_spool(shard)

    def need_layer(self, layer: int) -> None:
        """Fetch the shards that hold experts of `layer`."""
        for piece in (piece for expert in self.recipe.experts[layer] for piece in expert):
            self._need(piece)
            self._same_dtype(piece, self.natural.experts)

    def dense(self, name: str) -> tuple[Source | TensorFiles, Piece]:
        """Where to read a dense tensor of the pack: its spool file, or the shard, fetched for it."""
        piece = self.recipe.dense[name]
        if name in self._spools:
            return self._spools[name], Piece(name, piece.shape)
        self._need(piece)
        self._same_dtype(piece, self.natural.dense)
        return self.source, piece

    def layer_done(self, layer: int, writer: PackWriter) -> None:
        """Drop the shards of `layer` that no later layer needs, their dense tensors spooled."""
        for shard, layers in self._layers.items():
            if layer == max(layers) and shard in self._arrived:
                for each in layers - self._checked:
                    writer.verify([layer_file(each)])
                    self._checked.add(each)
                self._write_spool(shard)
                self._use_spool(shard)
                self.source.close_file(shard)
                self.repo.drop(shard)
                self._arrived.discard(shard)

    def all_done(self) -> None:
        """Remove the spool folder and drop what is left; the dense tensors are in the pack."""
        for files in self._spools.values():
            files.close()
        with naming(self.folder, "delete"):
            shutil.rmtree(self.folder, ignore_errors=not self.folder.exists())
        for shard in self._arrived:
            self.source.close_file(shard)
            self.repo.drop(shard)

    def _need(self, piece: Piece) -> None:
        shard = self._file(piece)
        if shard not in self._arrived:
            self.repo.fetch(shard, self.on_progress, self.cancel)
            self.source.load_headers([shard])
            self._arrived.add(shard)
        check_tensor(self.source, piece)

    def _same_dtype(self, piece: Piece, natural: str | None) -> None:
        found = self.source.tensors[piece.name].dtype
        if found != natural != "fp32":
            raise UnsupportedError(
                f"{self.source.label}: {piece.name} is {found}, the first of its kind {natural}; a "
                f"checkpoint of mixed precision cannot be converted with --low-disk"
            )

    def _write_spool(self, shard: str) -> None:
        """Write the shard's dense tensors; flushed and read back before the rename."""
        names = self._dense.get(shard, [])
        pieces = {name: self.recipe.dense[name] for name in names}
        path = self.folder / shard
        entries = [stored_as(n, self.kept.of(n), p.shape) for n, p in pieces.items()]
        header = write_header(dict(sum(entries, [])))
        temporary = path.with_name(shard + ".tmp")
        with naming(path, "write"):
            self.folder.mkdir(exist_ok=True)
            digest = hashlib.sha256(header)
            with open(temporary, "wb") as file:
                file.write(header)
                for name, piece in pieces.items():
                    check(self.cancel)
                    self._same_dtype(piece, self.natural.dense)
                    tensor = read_as(self.source, piece, self.kept.of(name))
                    data = tensor.reshape(-1).view(torch.uint8).numpy().data
                    digest.update(data)
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            with open(temporary, "rb") as file:
                if hashlib.file_digest(file, "sha256").digest() != digest.digest():
                    raise DamagedError(f"{temporary} reads back other bytes than were written")
            os.replace(temporary, path)

    def _use_spool(self, shard: str) -> None:
        path = self.folder / shard
        with naming(path, "read"), open(path, "rb", buffering=0) as file:
            header, size = read_header(file, path), os.fstat(file.fileno()).st_size
        tensors = {
            name: SourceTensor(self.kept.of(name), entry.shape, shard, entry.start)
            for name, entry in header.items()
        }
        files = TensorFiles(SPOOL, tensors, {shard: size}, lambda name: self.folder / name)
        self._spools |= dict.fromkeys(tensors, files)
