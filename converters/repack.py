"""`convert`: a checkpoint becomes a pack. `repack`: a pack becomes one of other precision or newer format.

The order of work; nothing is written before step 5.

1. open the source: a folder, a GGUF file, or a hub repository (an existing path wins over a hub id)
2. decide: config, every tensor and its dtype, the tokenizer against the rows of the embeddings
3. a finished pack of the same source and options is "already there"; of others, `force` is needed
4. plan: bytes to fetch and to write, room on each volume; the caller confirms
5. write: experts layer by layer, then all dense tensors, one piece in memory at a time, then text files
6. verify: read every file back and compare it with the hash taken while it was written; then the manifest

From the hub, names are checked against the index before step 4, shapes and dtypes when the shards are here:
before step 5, or with `low_disk` shard by shard (`lowdisk.py`). A run that is cancelled, killed, or out of
disk space leaves NAME.spmoe.partial with whole files in it, and the next one goes on from there. A source
that turns out to be damaged leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmoe_lite import hub, library
from spmoe_lite.chat_template import ChatTemplate
from spmoe_lite.config import ModelConfig, SamplingParams
from spmoe_lite.converters.gguf import GgufCheckpoint, is_gguf
from spmoe_lite.converters.gptq import METHODS, PackedCheckpoint, packing_of
from spmoe_lite.converters.lowdisk import Repository, Shards, spool_dtypes
from spmoe_lite.converters.plan import (
    ConvertPlan,
    check_room,
    dense_bytes,
    folder_bytes,
    layer_bytes,
    pack_bytes,
    volumes,
)
from spmoe_lite.converters.recipe import (
    Recipe,
    check_tied,
    held_schemes,
    match,
    natural_dtypes,
    quantised,
    read_weight,
    requantised,
    widened,
)
from spmoe_lite.converters.source import Checkpoint, Piece, Source, SourceTensor, TensorFiles
from spmoe_lite.device import cpu_by_default
from spmoe_lite.errors import Cancelled, DamagedError, SpmoeError, UnsupportedError, UsageError
from spmoe_lite.files import AGAIN, LOCK, PARTIAL, making, naming, open_listed
from spmoe_lite.manifest import (
    DENSE,
    FORMAT,
    HEAD,
    JOURNAL,
    MANIFEST,
    SUFFIX,
    TEXT_FILES,
    Dtypes,
    check_target,
    dense_shapes,
    layer_file,
    misfit,
    quantised_matrices,
    read_header,
    read_journal,
    read_manifest,
    stored_as,
)
from spmoe_lite.pack import TORCH_DTYPES, Pack, Weight
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.precision import DTYPE_BYTES, GROUPS, Scheme, scheme_of
from spmoe_lite.progress import OnProgress, Progress, check_callers
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


@cpu_by_default()
def convert(
    source: str | Path | Repository,
    *,
    name: str | None = None,
    out: str | Path | None = None,
    experts: str | None = None,
    dense: str | None = None,
    embed: str | None = None,
    group: int | None = None,
    force: bool = False,
    low_disk: bool = False,
    offline: bool = False,
    confirm: Callable[[ConvertPlan], bool] | None = None,
    home: str | Path | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> ConvertResult:
    """Convert a folder, a `.gguf` file, a hub id (ORG/NAME[@REVISION]) or a short name into a pack.

    The pack is `out`, or `name` (default: the source's) in the folder of packs, `home`. `experts`, `dense`
    (attention and MLP matrices) and `embed` (embeddings and head) are "fp32", "bf16", "fp16", "int8" or
    "int4"; without them the source's own precision is kept. `group` is how many weights of a row share a
    scale: 32, 64 (the default) or 128. Norms, routers and biases stay floats: the one that `dense` names,
    else the one that `embed` names. `confirm` is shown the plan before anything large moves. Raises
    `NotFoundError`, `UnsupportedError` (a model or values that the precision cannot hold), `DamagedError`,
    `NetworkError` for the source, `CapacityError` for the disk, `UsageError` where another pack is in the
    way, `Cancelled` by the event or where `confirm` returns False.
    """
    if name is not None and out is not None:
        raise UsageError("name or out, not both: out is the whole path of the pack")
    check_callers(cancel, on_progress=on_progress, confirm=confirm)
    asked = _Asked(experts, dense, embed, group, force, on_progress, cancel)
    opened, short, repo = _open(source, offline, on_progress, cancel)
    with contextlib.closing(opened):
        path = _target(out, short if name is None else name, home)
        check_target(path, force=True)  # what is no pack is refused before anything is fetched
        with making(f"the pack {path.name.removesuffix(SUFFIX)}", RESUMES):
            if repo is None:
                if low_disk:
                    log.warning("--low-disk has no effect: nothing is downloaded")
                return _convert_local(opened, path, asked, confirm)
            assert isinstance(opened, PackedCheckpoint)
            return _convert_hub(opened, repo, path, asked, confirm, low_disk)


def _open(
    given: str | Path | Repository,
    offline: bool,
    on_progress: OnProgress | None,
    cancel: threading.Event | None,
) -> tuple[Source, str, Repository | None]:
    """The source, what to call its pack, and the repository if its files come one by one."""
    if not isinstance(given, str | Path):
        if not hasattr(given, "fetch"):
            raise UsageError(
                f"{given!r:.80} is no source: a folder, a .gguf file or a model's name"
            )
        return _arriving(given, on_progress, cancel), given.name, given
    if not str(given).strip():
        raise UsageError("SOURCE is empty: give a folder, a .gguf file, or the name of a model")
    path = Path(os.path.expanduser(given))
    if os.path.isdir(path):  # False where the name is no path at all
        if os.path.isfile(path / MANIFEST):
            raise UsageError(f"{path} is a pack already; repack changes its precision")
        return PackedCheckpoint.folder(path), path.resolve().name, None
    if os.path.exists(path):
        if not is_gguf(path):
            raise UnsupportedError(
                f"{path} is neither a folder nor a GGUF file; give the folder of a checkpoint"
            )
        return GgufCheckpoint(path), path.stem, None
    repo = hub.resolve(given, offline=offline, cancel=cancel)
    assert repo is not None  # the path does not exist
    repo.check_access(cancel)
    repo.fetch_text(on_progress, cancel)
    repo.weights(on_progress, cancel)
    return _arriving(repo, on_progress, cancel), repo.name, repo


def _arriving(
    repo: Repository, on_progress: OnProgress | None, cancel: threading.Event | None
) -> PackedCheckpoint:
    return PackedCheckpoint(
        repo.id,
        repo.files(),
        lambda file: repo.fetch(file, on_progress, cancel),
        revision=repo.revision,
        arrived=False,
    )


def _target(out: str | Path | None, name: str, home: str | Path | None) -> Path:
    if out is not None:
        try:
            path = Path(os.path.expanduser(out))
        except TypeError:
            path = Path()
        if not path.name or "\0" in str(path):  # "", "." or "/", or no path
            raise UsageError(f"--out {str(out)!r} is not the name of a folder to be made")
        return path
    if not isinstance(name, str) or not library.is_portable(name):
        raise UsageError(f"{name!r:.80} cannot be the name of a pack; give another with --name")
    return library.home(home) / (name.removesuffix(SUFFIX) + SUFFIX)


@dataclass(frozen=True, slots=True)
class _Asked:
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
class _Model:
    """All that a pack is made of; `source_dtypes` are those before any cast."""

    source: TensorFiles | Source
    config: ModelConfig
    recipe: Recipe
    texts: dict[str, bytes]
    num_tokens: int
    source_dtypes: Dtypes
    identity: dict[str, Any]
    options: dict[str, Any]


def _convert_local(
    source: Source, path: Path, asked: _Asked, confirm: Callable[[ConvertPlan], bool] | None
) -> ConvertResult:
    config = _config(source)
    recipe = match(config, source)
    check_tied(config, source, recipe)
    asked = replace(asked, held=held_schemes(source, recipe))
    model = _model(source, config, recipe, natural_dtypes(source, recipe))
    _check_fit(config, asked.dtypes(model.source_dtypes))
    _say_unused(config, asked, path)
    if not asked.force and _is_there(path, model.identity, asked):
        return ConvertResult(path, True, None)
    _say_narrowed(source, recipe, asked, asked.dtypes(model.source_dtypes))
    plan = _plan(model, path, asked, {})
    _confirm(plan, confirm)
    _write(model, path, asked)
    return ConvertResult(path, False, plan)


def _convert_hub(
    source: PackedCheckpoint,
    repo: Repository,
    path: Path,
    asked: _Asked,
    confirm: Callable[[ConvertPlan], bool] | None,
    low_disk: bool,
) -> ConvertResult:
    config = _config(source)
    indexed = bool(source.tensors)  # names are known before the shards are here
    recipe = match(config, source) if indexed else Recipe({}, [])
    asked = replace(asked, held=held_schemes(source, recipe))
    model = _model(source, config, recipe, _stated_dtypes(config, source, recipe))
    _check_fit(config, asked.dtypes(model.source_dtypes))
    _say_unused(config, asked, path)
    if not asked.force and _is_there(path, model.identity, asked):
        return ConvertResult(path, True, None)
    low_disk = low_disk and _can_drop(config, source)
    shards = source.weight_files
    download = repo.download_bytes(shards)
    needs = {hub.cache_folder(): download}
    if low_disk:
        largest = sorted(source.sizes[name] for name in shards)[-2:]
        needs = {hub.cache_folder(): min(download, sum(largest))}
        kept = spool_dtypes(asked.dtypes(model.source_dtypes), model.source_dtypes)
        needs[path.parent] = dense_bytes(config, kept)
    plan = _plan(model, path, asked, needs, download)
    _confirm(plan, confirm)
    if low_disk:
        _write_low_disk(model, source, repo, path, asked)
    else:
        repo.fetch_all(shards, asked.on_progress, asked.cancel)
        source.load_headers(shards)
        model.recipe = match(config, source)
        check_tied(config, source, model.recipe)
        asked = replace(asked, held=held_schemes(source, model.recipe))
        model.source_dtypes = natural_dtypes(source, model.recipe)
        _say_narrowed(source, model.recipe, asked, asked.dtypes(model.source_dtypes))
        _write(model, path, asked)
    return ConvertResult(path, False, plan)


def _write_low_disk(
    model: _Model, source: Checkpoint, repo: Repository, path: Path, asked: _Asked
) -> None:
    shards = Shards(source, repo, model.recipe, asked.on_progress, asked.cancel)
    head = read_journal(path.with_name(path.name + PARTIAL)).get("head", {})
    if head.get("source") == json.loads(json.dumps(model.identity)):  # shards may be gone already
        model.source_dtypes = _recorded_dtypes(head["options"])
    else:
        model.source_dtypes = shards.source_dtypes()
    _write(model, path, asked, shards)


def _can_drop(config: ModelConfig, source: PackedCheckpoint) -> bool:
    """Whether dropping shards early saves anything, and can be done."""
    if source.packing is not None:
        log.warning(
            "--low-disk has no effect: a matrix in %s may lie in several shards",
            source.packing.method.upper(),
        )
        return False
    if not config.is_moe or len(source.weight_files) < 2 or not source.tensors:
        log.warning("--low-disk has no effect: only experts in several shards can be dropped early")
        return False
    if config.tie_word_embeddings and HEAD in source.tensors:
        log.warning("--low-disk has no effect: %s must be compared with the embeddings", HEAD)
        return False
    return True


@cpu_by_default()
def repack(
    name: str | Path,
    *,
    experts: str | None = None,
    dense: str | None = None,
    embed: str | None = None,
    group: int | None = None,
    force: bool = False,
    home: str | Path | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> ConvertResult:
    """Rewrite a pack in place: in the newest format, and in other dtypes where they are given.

    The old pack is verified first, read instead of the original source, and replaced only when the new one
    is complete. Nothing to do is "already there". Raises `NotFoundError`, `DamagedError`, `CapacityError`,
    `UnsupportedError` (a model or values that the precision cannot hold), `Cancelled`.
    """
    check_callers(cancel, on_progress=on_progress)
    asked = _Asked(experts, dense, embed, group, True, on_progress, cancel)
    path = library.find(name, home)
    check_target(path, force=True)  # before all of it is read
    with Pack.open(path) as pack:
        model = _packed_model(pack)
        dtypes = asked.dtypes(pack.dtypes)
        _check_fit(pack.config, dtypes)
        _say_unused(pack.config, asked, path)
        if pack.format == FORMAT and not force and dtypes == pack.dtypes:
            return ConvertResult(path, True, None)
        plan = _plan(model, path, asked, {})
        check_room(plan)
    assert isinstance(model.source, TensorFiles)
    with contextlib.closing(model.source), making(f"the repacked {pack.name}", RESUMES):
        model.source.open_all()  # before it is verified: what is read is what was
        pack.verify(on_progress, cancel)
        _write(model, path, asked)
    return ConvertResult(path, False, plan)


def _packed_model(pack: Pack) -> _Model:
    """A pack as the material of another; `options` keeps what the weights have been through."""
    config, layout = pack.config, pack.expert_layout
    tensors: dict[str, SourceTensor] = {}
    recipe = Recipe({}, [])
    headers, texts = {}, {}
    for name, (size, _) in pack.files.items():
        with open_listed(pack.path, name, size) as file:
            if name in TEXT_FILES:
                texts[name] = file.read()
            else:
                headers[name] = read_header(file, pack.path / name)
    for name, shape in dense_shapes(config).items():
        dtype = pack.dtypes.of(name)
        first, _ = stored_as(name, dtype, shape)[0]
        tensors[name] = SourceTensor(dtype, shape, DENSE, headers[DENSE][first].start)
        recipe.dense[name] = Piece(name, shape)
    up = (config.intermediate_size, config.hidden_size)
    for layer in range(config.num_hidden_layers if layout else 0):
        assert layout is not None
        parts = (
            ("gate", layout.gate_offset, up),
            ("up", layout.up_offset, up),
            ("down", layout.down_offset, up[::-1]),
        )
        recipe.experts.append([])
        for expert in range(config.num_local_experts):
            start = headers[layer_file(layer)][f"expert.{expert}"].start
            pieces = []
            for kind, offset, shape in parts:
                name = f"layers.{layer}.experts.{expert}.{kind}"
                where = layer_file(layer), start + offset
                tensors[name] = SourceTensor(layout.dtype, shape, *where)
                pieces.append(Piece(name, shape))
            recipe.experts[layer].append((pieces[0], pieces[1], pieces[2]))
    sizes = {name: size for name, (size, _) in pack.files.items()}
    source = TensorFiles(pack.name, tensors, sizes, lambda name: pack.path / name)
    options = dict(pack.manifest["options"])
    options["repacked_from"] = [*options.get("repacked_from", ()), list(astuple(pack.dtypes))]
    return _Model(
        source=source,
        config=config,
        recipe=recipe,
        texts=texts,
        num_tokens=_num_tokens(pack.name, texts, config),
        source_dtypes=pack.dtypes,
        identity=pack.manifest["source"],
        options=options,
    )


# Deciding


def _config(source: Source) -> ModelConfig:
    """The model's shape and, checked here because a pack carries it, its advice on sampling."""
    try:
        SamplingParams.from_generation_config(source.generation_config)
        methods = METHODS if isinstance(source, PackedCheckpoint) else ()
        config = ModelConfig.from_hf(source.config, source.generation_config, methods)
        packing = packing_of(source.config) if methods else None
    except UnsupportedError as error:
        raise UnsupportedError(f"{source.label}: {error}") from error
    if packing is not None:
        assert isinstance(source, PackedCheckpoint)
        source.accept(packing)
    return config


def _check_fit(config: ModelConfig, dtypes: Dtypes) -> None:
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


def _say_unused(config: ModelConfig, asked: _Asked, path: Path) -> None:
    if asked.experts is not None and not config.is_moe:
        log.warning("%s has no experts: --experts has no effect", path.name)


def _say_narrowed(source: Source, recipe: Recipe, asked: _Asked, dtypes: Dtypes) -> None:
    """What was quantised otherwise is fp32 when read, and packed as bf16 unless it was named."""
    dense, experts = quantised(source, recipe)
    flags = ["--dense fp32"] * (dense and not asked.dense)
    flags += ["--experts fp32"] * (experts and not asked.experts)
    if flags:
        kept = [
            f"--{flag} int{scheme.bits}"
            for flag, kind, word in (
                ("dense", "linear", dense and not asked.dense),
                ("experts", "experts", experts and not asked.experts),
            )
            for scheme in map(scheme_of, asked.held[kind][:1])
            if word and scheme is not None
        ]
        log.warning(
            "%s is quantised and packed as bf16; %s keeps every bit, in twice the space%s",
            source.label,
            " ".join(flags),
            f", {' '.join(kept)} the codes as they are" if kept else "",
        )
    if count := requantised(source, recipe, dtypes):
        log.warning(
            "%s: %d matrices are quantised in another way than the pack's; where it cannot hold their "
            "codes they are quantised once more, and lose a little that the original has",
            source.label,
            count,
        )
    if count := widened(source, recipe, dtypes):
        log.warning(
            "%s: %d quantised matrices become %s like others of their kind; int4 makes all 4 bits",
            source.label,
            count,
            dtypes.dense,
        )


def _model(source: Source, config: ModelConfig, recipe: Recipe, dtypes: Dtypes) -> _Model:
    texts = source.text_files()
    num_tokens = _num_tokens(source.label, texts, config)
    return _Model(source, config, recipe, texts, num_tokens, dtypes, source.identity(), {})


def _stated_dtypes(config: ModelConfig, source: PackedCheckpoint, recipe: Recipe) -> Dtypes:
    """As config.json and the index have them, while the weights are still on the hub."""
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
    raw = source.config
    dtype = names.get(str(raw.get("dtype") or raw.get("torch_dtype")), "bf16")
    if recipe.dense:
        return natural_dtypes(source, recipe, dtype)
    stated = Dtypes.floats(dtype, dtype if config.is_moe else None)
    if source.packing is None or source.packing.ordered:
        return stated
    scheme = str(source.packing.scheme)
    return replace(stated, linear=scheme, experts=stated.experts and scheme)


def _num_tokens(label: str, texts: dict[str, bytes], config: ModelConfig) -> int:
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


def _is_there(path: Path, identity: dict[str, Any], asked: _Asked) -> bool:
    """Whether `path` is a whole pack of this source and these options.

    Raises `UsageError` if it is another pack, `DamagedError` if it is not whole.
    """
    if not (path / MANIFEST).is_file():
        return False
    try:
        manifest = read_manifest(path)
        Pack.open(path).close()
    except DamagedError as error:
        raise DamagedError(f"{error} with --force") from error
    raw, options = manifest.raw, manifest.raw["options"]
    same = raw["source"] == json.loads(json.dumps(identity)) and "repacked_from" not in options
    try:
        same = same and manifest.dtypes == asked.dtypes(_recorded_dtypes(options))
    except (KeyError, TypeError, UnsupportedError):  # not recorded by us
        same = False
    if not same:
        made = f"{raw['source'].get('id', 'another source')!s:.80}; {manifest.dtypes}"
        raise UsageError(
            f"{path} was made of other weights or options ({made}); pass --force to replace it, or "
            f"--name for a second pack"
        )
    with contextlib.suppress(OSError):  # of a run killed after the last rename
        for stray in (JOURNAL, LOCK):
            (path / stray).unlink(missing_ok=True)
    return True


def _recorded_dtypes(options: dict[str, Any]) -> Dtypes:
    """What the source had, as `_write` noted it; packs of format 1 note two of the four."""
    dense = options["source_dense"]
    linear, embed = options.get("source_linear", dense), options.get("source_embed", dense)
    return Dtypes(dense, linear, embed, options["source_experts"])


def _plan(
    model: _Model, path: Path, asked: _Asked, extra: dict[Path, int], download: int = 0
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


def _confirm(plan: ConvertPlan, confirm: Callable[[ConvertPlan], bool] | None) -> None:
    check_room(plan)
    if confirm is not None and not confirm(plan):
        raise Cancelled("not confirmed; nothing was written")


# Writing


def _write(model: _Model, path: Path, asked: _Asked, shards: Shards | None = None) -> None:
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
        model: _Model,
        writer: PackWriter,
        asked: _Asked,
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
