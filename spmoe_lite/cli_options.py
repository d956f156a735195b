"""The options of the commands, declared once: flags, their types, and what `--help` says of them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

NAME = "spmoe-lite"
STARTED_AS = {"spmoe_lite.py": "python3 spmoe_lite.py", "__main__.py": "python3 -m spmoe_lite"}
PROGRAM = STARTED_AS.get(Path(sys.argv[0]).name, NAME)  # what to type, in hints
PRECISIONS = ["fp32", "bf16", "fp16", "int8", "int4"]
F = TypeVar("F", bound=Callable[..., Any])
command = partial(click.command, context_settings={"auto_envvar_prefix": "SPMOE"})


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(dict)["debug"] = True


def options(*declared: Callable[[F], F]) -> Callable[[F], F]:
    """Several option decorators as one; they appear in `--help` in this order."""

    def decorate(command: F) -> F:
        for option in reversed(declared):
            command = option(command)
        return command

    return decorate


class Whole(click.types.StringParamType):
    """A text that may hold spaces in the environment too; click would make several of it."""

    def split_envvar_value(self, rv: str) -> Sequence[str]:
        return [rv] if rv else []


class DraftTokens(click.ParamType):
    """A number of tokens, or `auto`."""

    name = "N|auto"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return value if value == "auto" else click.IntRange(0).convert(value, param, ctx)


class PinSize(click.ParamType):
    """RAM to page-lock. Checked here too: where nothing is page-locked the engine does not look at it."""

    name = "SIZE|all|none"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in ("auto", "all", "none"):
            from spmoe_lite.plan import parse_size

            parse_size(value, 1, "--pin")
        return value


class Several(click.ParamType):
    """Values of one type between commas."""

    def __init__(self, one: click.ParamType):
        self.name = one.name
        self._one = one

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, list):
            return value
        texts = [text.strip() for text in value.split(",")]
        return [self._one.convert(text, param, ctx) for text in texts if text]


debug_option = click.option(
    "--debug",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_debug,
    help="Show tracebacks and the library's log.",
)
json_option = click.option(
    "--json", "as_json", envvar="SPMOE_JSON", is_flag=True, help="One JSON object on stdout."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask before a large download.")
offline_option = click.option("--offline", is_flag=True, help="Use local files only, no network.")
precision_options = options(
    click.option(
        "--experts",
        type=click.Choice(PRECISIONS),
        help="Precision of the experts: int4 takes a quarter of the bytes of bf16, int8 half.",
    ),
    click.option(
        "--dense",
        type=click.Choice(PRECISIONS),
        help="Of attention and MLP matrices; a float also of norms, router, activations.",
    ),
    click.option(
        "--embed",
        type=click.Choice(PRECISIONS),
        help="Of embeddings and head; without it the float of the rest.",
    ),
    click.option(
        "--group",
        type=click.Choice(["32", "64", "128"]),
        callback=lambda ctx, param, value: value and int(value),
        help="Weights that share a scale in int8 and int4; 64 if not given, 32 is more exact.",
    ),
)
model_options = options(
    click.argument("pack", required=False),
    click.option("--model", "-m", metavar="PACK", help="The same as PACK."),
    click.option(
        "--draft", "--draft-model", "-md", metavar="PACK", help="Pack that drafts and prefetches."
    ),
)
memory_options = options(
    click.option(
        "--vram",
        default="auto",
        metavar="SIZE",
        help="Device memory to use: 20GiB, 0.9 of what is free, or auto.",
    ),
    click.option(
        "--ctx-size",
        "--context-length",
        "-c",
        type=click.IntRange(1),
        metavar="N",
        help="Tokens of context; else the smaller of the model's and 8192.",
    ),
    click.option(
        "--kv-type",
        "--kv-cache-dtype",
        "-ctk",
        "-ctv",
        type=click.Choice(["auto", "int8"]),
        default="auto",
        help="Of keys and values in the KV caches; auto: the float of the model.",
    ),
    click.option(
        "--pin",
        type=PinSize(),
        default="auto",
        metavar="SIZE|all|none",
        help="RAM to page-lock for the GPU to read experts in; auto: 75 % of what is free.",
    ),
    click.option(
        "--device", default="auto", metavar="DEVICE", help="Where to run: auto, cpu, cuda, cuda:N."
    ),
)
machine_options = options(
    memory_options,
    click.option("--threads", "-t", type=click.IntRange(1, 1024), metavar="N", help="CPU threads."),
)
amount_options = options(
    click.option(
        "--draft-tokens",
        "--num-draft-tokens",
        type=DraftTokens(),
        metavar="N|auto",
        help="Tokens drafted per step; 4 if not given, 0 for none; auto: none while that is faster.",
    ),
    click.option(
        "--slots",
        type=click.IntRange(1),
        metavar="N",
        help="Experts kept on the device; else as many as --vram holds.",
    ),
)
engine_options = options(
    amount_options,
    machine_options,
    click.option("--no-prefetch", is_flag=True, help="Load experts only when they are needed."),
    click.option(
        "--cutoff",
        type=click.IntRange(0),
        metavar="N",
        help="Prefetch only the first N layers; measured if not given.",
    ),
    click.option(
        "--policy",
        type=click.Choice(["layer-lru", "global-lru"]),
        default="layer-lru",
        help="Which expert leaves its slot.",
    ),
)
trace_option = click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Record which experts were used, for `replay`; FILE is new.",
)
sampling_options = options(
    click.option(
        "--max-tokens",
        "--predict",
        "-n",
        type=click.IntRange(1),
        metavar="N",
        help="Longest answer.",
    ),
    click.option(
        "--stop", multiple=True, type=Whole(), metavar="TEXT", help="End the answer before TEXT."
    ),
    click.option("--system-prompt", "--system", "-sys", metavar="TEXT", help="System prompt."),
    click.option(
        "--template",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Chat template (jinja) in place of the pack's.",
    ),
    click.option(
        "--temp",
        "--temperature",
        type=float,
        metavar="X",
        help="0 always takes the likeliest token.",
    ),
    click.option("--top-k", type=int, metavar="N", help="Sample from the N likeliest; 0 is off."),
    click.option(
        "--top-p", type=float, metavar="X", help="Sample from the likeliest that sum to X."
    ),
    click.option(
        "--min-p", type=float, metavar="X", help="Drop tokens below X times the likeliest."
    ),
    click.option("--repeat-penalty", type=float, metavar="X", help="1 is off."),
    click.option("--presence-penalty", type=float, metavar="X", help="0 is off."),
    click.option("--frequency-penalty", type=float, metavar="X", help="0 is off."),
    click.option(
        "--seed",
        "-s",
        type=click.IntRange(-1),
        metavar="N",
        help="-1, the default, is a new one each time.",
    ),
)
