"""`convert`: a checkpoint becomes a pack.

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
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from spmoe_lite import hub, library
from spmoe_lite.config import ModelConfig, SamplingParams
from spmoe_lite.converters.gguf import GgufCheckpoint, is_gguf
from spmoe_lite.converters.gptq import METHODS, PackedCheckpoint, packing_of
from spmoe_lite.converters.lowdisk import Repository, Shards, spool_dtypes
from spmoe_lite.converters.plan import ConvertPlan, check_room, dense_bytes
from spmoe_lite.converters.recipe import (
    Recipe,
    check_tied,
    held_schemes,
    match,
    natural_dtypes,
    quantised,
    requantised,
    widened,
)
from spmoe_lite.converters.source import Checkpoint, Source
from spmoe_lite.converters.writing import (
    RESUMES,
    Asked,
    ConvertResult,
    Model,
    check_fit,
    count_tokens,
    plan_of,
    recorded_dtypes,
    say_unused,
    write,
)
from spmoe_lite.device import cpu_by_default
from spmoe_lite.errors import Cancelled, DamagedError, UnsupportedError, UsageError
from spmoe_lite.files import LOCK, PARTIAL, making
from spmoe_lite.manifest import (
    HEAD,
    JOURNAL,
    MANIFEST,
    SUFFIX,
    Dtypes,
    check_target,
    read_journal,
    read_manifest,
)
from spmoe_lite.pack import Pack
from spmoe_lite.precision import scheme_of
from spmoe_lite.progress import OnProgress, check_callers

log = logging.getLogger("spmoe_lite")


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
    asked = Asked(experts, dense, embed, group, force, on_progress, cancel)
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


def _convert_local(
    source: Source, path: Path, asked: Asked, confirm: Callable[[ConvertPlan], bool] | None
) -> ConvertResult:
    config = _config(source)
    recipe = match(config, source)
    check_tied(config, source, recipe)
    asked = replace(asked, held=held_schemes(source, recipe))
    model = _model(source, config, recipe, natural_dtypes(source, recipe))
    check_fit(config, asked.dtypes(model.source_dtypes))
    say_unused(config, asked, path)
    if not asked.force and _is_there(path, model.identity, asked):
        return ConvertResult(path, True, None)
    _say_narrowed(source, recipe, asked, asked.dtypes(model.source_dtypes))
    plan = plan_of(model, path, asked, {})
    _confirm(plan, confirm)
    write(model, path, asked)
    return ConvertResult(path, False, plan)


def _convert_hub(
    source: PackedCheckpoint,
    repo: Repository,
    path: Path,
    asked: Asked,
    confirm: Callable[[ConvertPlan], bool] | None,
    low_disk: bool,
) -> ConvertResult:
    config = _config(source)
    indexed = bool(source.tensors)  # names are known before the shards are here
    recipe = match(config, source) if indexed else Recipe({}, [])
    asked = replace(asked, held=held_schemes(source, recipe))
    model = _model(source, config, recipe, _stated_dtypes(config, source, recipe))
    check_fit(config, asked.dtypes(model.source_dtypes))
    say_unused(config, asked, path)
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
    plan = plan_of(model, path, asked, needs, download)
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
        write(model, path, asked)
    return ConvertResult(path, False, plan)


def _write_low_disk(
    model: Model, source: Checkpoint, repo: Repository, path: Path, asked: Asked
) -> None:
    shards = Shards(source, repo, model.recipe, asked.on_progress, asked.cancel)
    head = read_journal(path.with_name(path.name + PARTIAL)).get("head", {})
    if head.get("source") == json.loads(json.dumps(model.identity)):  # shards may be gone already
        model.source_dtypes = recorded_dtypes(head["options"])
    else:
        model.source_dtypes = shards.source_dtypes()
    write(model, path, asked, shards)


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


def _model(source: Source, config: ModelConfig, recipe: Recipe, dtypes: Dtypes) -> Model:
    texts = source.text_files()
    num_tokens = count_tokens(source.label, texts, config)
    return Model(source, config, recipe, texts, num_tokens, dtypes, source.identity(), {})


def _say_narrowed(source: Source, recipe: Recipe, asked: Asked, dtypes: Dtypes) -> None:
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


def _is_there(path: Path, identity: dict[str, Any], asked: Asked) -> bool:
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
        same = same and manifest.dtypes == asked.dtypes(recorded_dtypes(options))
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


def _confirm(plan: ConvertPlan, confirm: Callable[[ConvertPlan], bool] | None) -> None:
    check_room(plan)
    if confirm is not None and not confirm(plan):
        raise Cancelled("not confirmed; nothing was written")
