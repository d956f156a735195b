"""Commands about packs: `convert`, `list`, `rm`, `inspect`, `verify`, `repack`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from spmoe_lite import terminal
from spmoe_lite.cli_options import (
    PROGRAM,
    command,
    debug_option,
    json_option,
    offline_option,
    precision_options,
    yes_option,
)
from spmoe_lite.cli_shared import (
    confirm_plan,
    echo_json,
    find_pack,
    make_pack,
    pack_name,
    show_log,
)
from spmoe_lite.progress import size
from spmoe_lite.terminal import note


@command()
@click.argument("source")
@click.option("--name", metavar="NAME", help="Name of the pack; else from SOURCE.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Write the pack to this folder.",
)
@precision_options
@click.option("--force", is_flag=True, help="Replace a pack made with other options.")
@click.option("--low-disk", is_flag=True, help="Delete each downloaded file once it is packed.")
@offline_option
@yes_option
@debug_option
def convert(source: str, yes: bool, **given: Any) -> int:
    """Make a pack from SOURCE.

    SOURCE is a folder with a Hugging Face checkpoint, a .gguf file, a hub id (owner/model or
    owner/model@revision), or a short name such as mixtral-8x7b. An existing path wins over a hub id. A
    stopped conversion resumes when the same command is typed again.

    Every precision not named stays the source's own. For a card that does not hold the model, start with
    --experts int4; add --dense int8 where memory is short, as for a draft. Norms, routers and biases are
    never quantised.
    """
    from spmoe_lite.converters import convert as library_convert

    show_log()
    result = make_pack(library_convert, source, lambda plan: confirm_plan(plan, yes), **given)
    return 0 if result else 1


@command(name="list")
@json_option
@debug_option
def list_packs(as_json: bool) -> None:
    """List the packs of this machine."""
    from spmoe_lite.library import home, packs

    found = packs()
    if as_json:
        echo_json(
            [
                {
                    "name": p.name,
                    "path": str(p.path),
                    "size_bytes": p.size_bytes,
                    "modified": _date(p.modified),
                    "complete": p.complete,
                    "moe": p.moe,
                    "family": p.family,
                }
                for p in found
            ]
        )
    elif not found:
        note(f"no packs in {home()}: `{PROGRAM} demo` makes a small pair")
    else:
        rows = [["NAME", "SIZE", "KIND", "DATE"]]
        for p in found:
            kind = (p.family or "") + (" MoE" if p.moe and p.family != "mixtral" else "")
            rows.append(
                [
                    terminal.printable(p.name).replace("\n", " "),
                    size(p.size_bytes),
                    kind or "?",
                    (_date(p.modified) or "?")[:10],
                ]
            )
            if not p.complete:
                rows[-1][3] += " partial"
        click.echo(terminal.table(rows, right=[1]))


@command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@debug_option
def rm(names: tuple[str, ...]) -> None:
    """Delete packs, unfinished ones too."""
    from spmoe_lite.library import packs, removable, remove

    sizes = {p.name: p.size_bytes for p in packs()}
    found = {removable(name)[0].resolve(): name for name in names}  # all, before the first goes
    for name in found.values():
        remove(name)
        freed = f" ({size(sizes[name])})" if name in sizes else ""
        note(f"deleted {name}{freed}")


@command()
@click.argument("pack")
@json_option
@debug_option
def inspect(pack: str, as_json: bool) -> None:
    """Show what is inside PACK."""
    from spmoe_lite.library import inspect as library_inspect

    found = library_inspect(find_pack(pack))
    if as_json:
        echo_json(found)
    else:
        click.echo(terminal.table(_contents(found)))


@command()
@click.argument("pack")
@debug_option
def verify(pack: str) -> None:
    """Check every byte of PACK against its hashes."""
    from spmoe_lite.library import verify as library_verify

    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        library_verify(find_pack(pack), on_progress=progress, cancel=cancel)
    click.echo(f"{pack_name(find_pack(pack))}: every file is as it was written")


@command()
@click.argument("name")
@precision_options
@click.option("--force", is_flag=True, help="Replace the pack though it has these options already.")
@debug_option
def repack(name: str, **given: Any) -> None:
    """Bring a pack to the newest format or another precision.

    Nothing is downloaded: the pack itself is read. What int8 or int4 has lost stays lost; keep a pack of
    floats, or convert the original again, to choose anew.
    """
    from spmoe_lite.converters import repack as library_repack

    show_log()
    make_pack(library_repack, name, **given)


def _date(modified: float) -> str | None:
    """None for a moment that has no date: a file may be of any year, and dates end with 9999."""
    from datetime import datetime

    try:
        return datetime.fromtimestamp(modified).astimezone().isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return None


def _contents(found: dict[str, Any]) -> list[list[str]]:
    """What a person wants to know of a pack; --json has the rest."""
    from spmoe_lite.manifest import Dtypes

    model, audit, source = found["model"], found["audit"], found["source"]
    dense = Dtypes(found["dense_dtype"], found["linear_dtype"], found["embed_dtype"], None)
    revision = f"@{source['revision']}" if source.get("revision") else ""
    rows = [
        ["pack", found["path"]],
        ["made", f"{found['created']}, format {found['format']}"],
        ["from", f"{source.get('id', 'unknown')}{revision}"],
        [
            "model",
            f"{found['family']}, {found['layers']} layers, hidden {model['hidden_size']}, "
            f"{model['num_attention_heads']} heads ({model['num_key_value_heads']} KV)",
        ],
        ["context", f"{model['max_position_embeddings']} tokens"],
        ["vocabulary", f"{found['num_tokens']} tokens"],
        ["size", size(found["total_bytes"])],
        ["dense part", f"{dense}, {size(found['dense_file_bytes'])}"],
    ]
    if found["experts"]:
        rows += [
            [
                "experts",
                f"{found['expert_dtype']}, {size(found['expert_files_bytes'])}: {found['experts']} of "
                f"{size(found['expert_bytes'])}, {found['experts_per_layer']} a layer, "
                f"{found['experts_per_token']} a token",
            ],
            ["found", f"{audit['found']} expert matrices"],
        ]
    names = [name for name in found["files"] if not name.startswith("experts/")]
    if layers := len(found["files"]) - len(names):
        names.append(f"experts/layer-000 to {layers - 1:03d}")
    return rows + [["files" if i == 0 else "", name] for i, name in enumerate(names)]
