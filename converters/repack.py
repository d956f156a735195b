"""`repack`: a pack becomes one of other precision or of the newest format, in place, without its source."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import astuple
from pathlib import Path

from spmoe_lite import library
from spmoe_lite.converters.plan import check_room
from spmoe_lite.converters.recipe import Recipe
from spmoe_lite.converters.source import Piece, SourceTensor, TensorFiles
from spmoe_lite.converters.writing import (
    RESUMES,
    Asked,
    ConvertResult,
    Model,
    check_fit,
    count_tokens,
    plan_of,
    say_unused,
    write,
)
from spmoe_lite.device import cpu_by_default
from spmoe_lite.files import making, open_listed
from spmoe_lite.manifest import (
    DENSE,
    FORMAT,
    TEXT_FILES,
    check_target,
    dense_shapes,
    layer_file,
    read_header,
    stored_as,
)
from spmoe_lite.pack import Pack
from spmoe_lite.progress import OnProgress, check_callers


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
    asked = Asked(experts, dense, embed, group, True, on_progress, cancel)
    path = library.find(name, home)
    check_target(path, force=True)  # before all of it is read
    with Pack.open(path) as pack:
        model = _packed_model(pack)
        dtypes = asked.dtypes(pack.dtypes)
        check_fit(pack.config, dtypes)
        say_unused(pack.config, asked, path)
        if pack.format == FORMAT and not force and dtypes == pack.dtypes:
            return ConvertResult(path, True, None)
        plan = plan_of(model, path, asked, {})
        check_room(plan)
    assert isinstance(model.source, TensorFiles)
    with contextlib.closing(model.source), making(f"the repacked {pack.name}", RESUMES):
        model.source.open_all()  # before it is verified: what is read is what was
        pack.verify(on_progress, cancel)
        write(model, path, asked)
    return ConvertResult(path, False, plan)


def _packed_model(pack: Pack) -> Model:
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
    return Model(
        source=source,
        config=config,
        recipe=recipe,
        texts=texts,
        num_tokens=count_tokens(pack.name, texts, config),
        source_dtypes=pack.dtypes,
        identity=pack.manifest["source"],
        options=options,
    )
