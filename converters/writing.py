"""What `convert` and `repack` share: what was asked for, what a pack is made of, the plan, the writing."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmoe_lite.chat_template import ChatTemplate
from spmoe_lite.config import ModelConfig
from spmoe_lite.converters.lowdisk import Shards
from spmoe_lite.converters.plan import (
    ConvertPlan,
    dense_bytes,
    folder_bytes,
    layer_bytes,
    pack_bytes,
    volumes,
)
from spmoe_lite.converters.recipe import Recipe, read_weight
from spmoe_lite.converters.source import Piece, Source, TensorFiles
from spmoe_lite.errors import DamagedError, SpmoeError, UnsupportedError, UsageError
from spmoe_lite.files import AGAIN, PARTIAL, naming
from spmoe_lite.manifest import (
    DENSE,
    Dtypes,
    layer_file,
    misfit,
    quantised_matrices,
)
from spmoe_lite.pack import TORCH_DTYPES, Weight
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.precision import DTYPE_BYTES, GROUPS, Scheme, scheme_of
from spmoe_lite.progress import OnProgress, Progress
from spmoe_lite.tokenizer import Tokenizer

log = logging.getLogger("spmoe_lite")

RESUMES = f"{AGAIN}: it goes on where it stopped"
QUANTISED = {"int8": Scheme(8, 64), "int4": Scheme(4, 64, zeros=True)}  # without --group


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """The pack, whether it was there already, and the plan (None if there was nothing to do)."""

    path: Path
    already_there: bool
    plan: ConvertPlan | None


@dataclass(frozen=True, slots=True)
class Asked:
    """What the caller asked for, in the words of the flags; None for the source's own precision.

    `held`: for experts, "linear" and "embed" the schemes that the source has them in, if any.
    """

    experts: str | None
    dense: str | None
    embed: str | None
    group: int | None
    force: bool
    on_progress: OnProgress | None
    cancel: threading.Event | None
    held: dict[str, list[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"experts": self.experts, "dense": self.dense, "embed": self.embed}
        known = [*DTYPE_BYTES, *QUANTISED]
        for flag, word in given.items():
            if word is not None and word not in known:
                raise UsageError(f"--{flag} {word!r:.40} is not one of {', '.join(known)}")
        if self.group is None:
            pass
        elif self.group not in GROUPS:
            groups = ", ".join(map(str, GROUPS))
            raise UsageError(f"--group {self.group!r:.40} is not one of {groups}")
        elif not QUANTISED.keys() & given.values():
            raise UsageError(
                f"--group {self.group} says nothing without int8 or int4; add --experts int4, or "
                f"--dense or --embed"
            )
        if len(self._floats()) > 1:
            raise UsageError(
                f"--dense {self.dense} and --embed {self.embed}: what is not quantised has one "
                f"float dtype; give the same twice, or int8 for one of them"
            )

    def _floats(self) -> set[str]:
        return {word for word in (self.dense, self.embed) if word and word in DTYPE_BYTES}

    def dtypes(self, source: Dtypes) -> Dtypes:
        """The pack's. All that is not quantised has one float dtype, but for the experts."""
        dense = next(iter(self._floats()), source.dense)
        linear, embed = (
            self._dtype(self.dense, source.linear, "linear"),
            self._dtype(self.embed, source.embed, "embed"),
        )
        return Dtypes(
            dense,
            dense if scheme_of(linear) is None else linear,
            dense if scheme_of(embed) is None else embed,
            source.experts and self._dtype(self.experts, source.experts, "experts"),
        )

    def _dtype(self, word: str | None, own: str, kind: str) -> str:
        """What a flag makes of `own`; as many bits as it has, in groups as large, need no new codes."""
        if word not in QUANTISED:
            return word or own
        scheme = QUANTISED[word]
        for dtype in (own, *self.held.get(kind, ())):
            found = scheme_of(dtype)
            if found and found.bits == scheme.bits and self.group in (None, found.group):
                return dtype
        return str(scheme if self.group is None else replace(scheme, group=self.group))


@dataclass(slots=True)
class Model:
    """All that a pack is made of; `source_dtypes` are those before any cast."""

    source: TensorFiles | Source
    config: ModelConfig
    recipe: Recipe
    texts: dict[str, bytes]
    num_tokens: int
    source_dtypes: Dtypes
    identity: dict[str, Any]
    options: dict[str, Any]


def count_tokens(label: str, texts: dict[str, bytes], config: ModelConfig) -> int:
    """Entries of the tokenizer, which must load and fit the rows of the embeddings."""
    with contextlib.ExitStack() as stack:
        with naming(Path("a temporary folder"), "write"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="spmoe-"))
        with naming(Path(folder), "write"):
            for name, data in texts.items():
                (Path(folder) / name).write_bytes(data)
        try:
            tokenizer = Tokenizer.load(Path(folder), config)
        except SpmoeError as error:
            raise type(error)(str(error).replace(folder, label)) from error
        try:
            ChatTemplate.load(Path(folder), tokenizer)
        except SpmoeError as error:  # the weights are good, and `run --raw` needs no template
            log.warning("%s: %s", label, str(error).replace(folder, label))
        return tokenizer.num_tokens


def check_fit(config: ModelConfig, dtypes: Dtypes) -> None:
    """Every quantised matrix has whole groups and an even number of rows; else what would do."""
    for flag, dtype, name, shape in quantised_matrices(config, dtypes):
        if fault := misfit(dtype, *shape):
            scheme = scheme_of(dtype)
            assert scheme is not None
            cures = [f"--{flag} {dtypes.dense}"]
            for group in GROUPS:
                regrouped = _with_group(dtypes, group)
                others = quantised_matrices(config, regrouped)
                if not any(misfit(other, *shape) for _, other, _, shape in others):
                    cures.insert(0, f"--group {group}")
            raise UnsupportedError(
                f"--{flag} int{scheme.bits} with groups of {scheme.group}: {name} {fault}; give "
                f"{' or '.join(cures)}"
            )


def _with_group(dtypes: Dtypes, group: int) -> Dtypes:
    """The same schemes with another group."""

    def regrouped(dtype: str) -> str:
        scheme = scheme_of(dtype)
        return dtype if scheme is None else str(replace(scheme, group=group))

    linear, embed = regrouped(dtypes.linear), regrouped(dtypes.embed)
    return Dtypes(dtypes.dense, linear, embed, dtypes.experts and regrouped(dtypes.experts))


def say_unused(config: ModelConfig, asked: Asked, path: Path) -> None:
    if asked.experts is not None and not config.is_moe:
        log.warning("%s has no experts: --experts has no effect", path.name)


def _say_lost(name: str, old: Dtypes, new: Dtypes) -> None:
    """What was quantised once cannot get better, and a second time gets a little worse."""
    for what in ("experts", "linear", "embed"):
        before, after = getattr(old, what), getattr(new, what)
        if before == after or before is None or scheme_of(before) is None:
            continue
        loss = "lose a little more" if scheme_of(after) else "gain nothing back"
        named = {"linear": "matrices", "embed": "embeddings"}.get(what, what)
        log.warning(
            "%s: %s go from %s to %s and %s; for better ones convert the original again",
            name,
            named,
            before,
            after,
            loss,
        )


def recorded_dtypes(options: dict[str, Any]) -> Dtypes:
    """What the source had, as `write` noted it; packs of format 1 note two of the four."""
    dense = options["source_dense"]
    linear, embed = options.get("source_linear", dense), options.get("source_embed", dense)
    return Dtypes(dense, linear, embed, options["source_experts"])


def plan_of(
    model: Model, path: Path, asked: Asked, extra: dict[Path, int], download: int = 0
) -> ConvertPlan:
    """`extra`: bytes needed in folders beside the pack's own."""
    dtypes = asked.dtypes(model.source_dtypes)
    size = pack_bytes(model.config, dtypes)
    needs, there = dict(extra), folder_bytes(path.with_name(path.name + PARTIAL))
    needs[path.parent] = max(0, needs.get(path.parent, 0) + size - there)  # kept, or deleted first
    return ConvertPlan(
        label=model.source.label,
        revision=model.identity.get("revision"),
        path=path,
        family=model.config.family,
        dtypes=dtypes,
        download_bytes=download,
        pack_bytes=size,
        volumes=volumes(needs),
        ignored=tuple(getattr(model.source, "ignored", ())),
    )


def write(model: Model, path: Path, asked: Asked, shards: Shards | None = None) -> None:
    """Write the pack, going on from a partial one of the same source and options."""
    dtypes = asked.dtypes(model.source_dtypes)
    _say_lost(model.source.label, model.source_dtypes, dtypes)
    natural = {f"source_{kind}": dtype for kind, dtype in asdict(model.source_dtypes).items()}
    writer = PackWriter(
        path,
        model.config,
        dtypes,
        model.identity,
        natural | model.options,
        force=asked.force,
        cancel=asked.cancel,
    )
    faulty = False
    try:
        with writer:
            if shards is not None:
                shards.adopt(writer.partial, dtypes, model.source_dtypes)
            fill = _Fill(model, writer, asked, shards)
            try:
                fill.run()
            except (DamagedError, UnsupportedError):
                faulty = True
                raise
            writer.verify(on_progress=asked.on_progress)
            if shards is not None:
                shards.all_done()
            model.source.close()
            writer.finish(fill.audit(), model.num_tokens)
    finally:
        if faulty:  # the same source would fail again
            shutil.rmtree(writer.partial, ignore_errors=True)


class _Fill:
    """Writes what is not there yet, file by file, and counts the bytes for the caller."""

    def __init__(
        self,
        model: Model,
        writer: PackWriter,
        asked: Asked,
        shards: Shards | None,
    ) -> None:
        self.model, self.writer, self.asked, self.shards = model, writer, asked, shards
        self.dtypes = writer.dtypes
        self.layer_bytes = layer_bytes(model.config, self.dtypes.experts)
        self.total, self.done = pack_bytes(model.config, self.dtypes), 0

    def run(self) -> None:
        """Write all files that an earlier run did not finish."""
        model, writer = self.model, self.writer
        for layer in range(len(model.recipe.experts)):
            if writer.has(layer_file(layer)):
                self._count(self.layer_bytes)
            else:
                if self.shards is not None:
                    self.shards.need_layer(layer)
                writer.write_layer(layer, self._layer(layer))
            if self.shards is not None:
                self.shards.layer_done(layer, writer)
        if writer.has(DENSE):
            self._count(dense_bytes(model.config, self.dtypes))
        else:
            writer.write_dense({name: self._reader(name) for name in model.recipe.dense})
        for name, data in model.texts.items():
            writer.copy_text(name, data)

    def audit(self) -> dict[str, int]:
        """What was to be written and has been: `run` ends without error only if all was found."""
        experts = self.model.recipe.experts
        return {
            "layers": len(experts),
            "experts": self.model.config.num_local_experts,
            "matrices": 3 if self.dtypes.experts else 0,
            "found": sum(len(pieces) for layer in experts for pieces in layer),
        }

    def _layer(self, layer: int) -> Iterator[tuple[Weight, Weight, Weight]]:
        """(gate, up, down) of one expert after the other, floats in the same memory."""
        config, dtype = self.model.config, self.dtypes.experts
        assert dtype is not None
        up_shape = (config.intermediate_size, config.hidden_size)
        memory: list[torch.Tensor | None] = [None, None, None]
        if scheme_of(dtype) is None:
            shapes = (up_shape, up_shape, up_shape[::-1])
            memory = [torch.empty(shape, dtype=TORCH_DTYPES[dtype]) for shape in shapes]
        for pieces in self.model.recipe.experts[layer]:
            end = self.done + self.layer_bytes // config.num_local_experts
            gate, up, down = (
                self._read(self.model.source, piece, dtype, out)
                for piece, out in zip(pieces, memory, strict=True)
            )
            yield gate, up, down
            self._count(end - self.done)  # what lies between the matrices and after them

    def _reader(self, name: str) -> Callable[[], Weight]:
        def read() -> Weight:
            source, piece = self.model.source, self.model.recipe.dense[name]
            if self.shards is not None:
                source, piece = self.shards.dense(name)
            return self._read(source, piece, self.dtypes.of(name))

        return read

    def _read(
        self,
        source: TensorFiles | Source,
        piece: Piece,
        dtype: str,
        out: torch.Tensor | None = None,
    ) -> Weight:
        return read_weight(source, piece, dtype, out, count=self._count, cancel=self.asked.cancel)

    def _count(self, count: int) -> None:
        self.done += count
        if self.asked.on_progress is not None:
            self.asked.on_progress(Progress("convert", self.done, self.total, "bytes"))
