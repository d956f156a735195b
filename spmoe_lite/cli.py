"""The command line: parses, prints, and turns errors into exit codes. All work is library functions.

Every heavy import stands inside the command that needs it, so `--help` costs little more than click.
Options read `SPMOE_` + their first long name from the environment (`SPMOE_DRAFT`, `SPMOE_CTX_SIZE`).
Answers and asked-for output go to stdout; progress, remarks and errors to stderr. An error is one line;
`--debug` adds the traceback.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, TypeVar

import click

from spmoe_lite import terminal
from spmoe_lite.errors import (
    Cancelled,
    CapacityError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.progress import size
from spmoe_lite.terminal import note

if TYPE_CHECKING:
    from spmoe_lite.bench import Row
    from spmoe_lite.config import SamplingParams
    from spmoe_lite.converters import ConvertPlan, ConvertResult
    from spmoe_lite.engine import Engine

NAME = "spmoe-lite"
SPIN_COUNT = "2000"  # turns of waiting threads before they sleep
STARTED_AS = {"spmoe_lite.py": "python3 spmoe_lite.py", "__main__.py": "python3 -m spmoe_lite"}
PROGRAM = STARTED_AS.get(Path(sys.argv[0]).name, NAME)  # what to type, in hints
FIRST_PAIR = ("mixtral-8x7b", "mistral-7b")  # what `chat` offers to convert where there is no pack
DEMO_PROMPT = "Give me three tips for sleeping well."
DEMO_TOKENS = 200  # of the demo's first answer, which should end some time
MAX_PROMPT_CHARS = 16 << 20  # a context of millions of tokens; more is a device or a mistake
DEFAULT_LINK = 50.0  # GB/s: a PCIe 5 bus
PRECISIONS = ["fp32", "bf16", "fp16", "int8", "int4"]

F = TypeVar("F", bound=Callable[..., Any])


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; the one place where an error becomes a line.

    torch's threads wait by spinning. The command cuts that short, unless the user says otherwise: beside
    another busy program long spinning is many times slower (docs/log.md). The library leaves this to its host.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    sys.exit(run_command(list(sys.argv[1:] if args is None else args)))


def run_command(args: list[str]) -> int:
    """The exit code of one command; the one place where an error becomes a line."""
    state = {"debug": False}
    terminal.make_streams_safe()
    try:
        code = cli.main(args, prog_name=PROGRAM, standalone_mode=False, obj=state)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:  # click's answer to a closed pipe, and to shell completion
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        command = ctx.command_path if ctx else PROGRAM
        message = f"{error.format_message():.400}".rstrip(".") + _from_variable(error)
        return _fail(f"{message}; see {command} --help", error.exit_code, state)
    except SpmoeError as error:
        return _fail(str(error), error.exit_code, state)
    except OSError as error:  # of a place where the library does not expect one, or of stdout
        from spmoe_lite.manifest import disk_error

        named = disk_error(
            error, error.filename or "the output", "use" if error.filename else "write"
        )
        return _fail(str(named), named.exit_code, state)
    except MemoryError:
        return _fail("out of memory", CapacityError.exit_code, state)
    except BaseException as error:  # a library's panic is not an Exception
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        return _fail(f"{what} (this is a bug in {NAME}; --debug shows where)", 1, state)


def _fail(message: str, code: int, state: dict[str, bool]) -> int:
    if state["debug"]:
        import traceback

        click.echo(traceback.format_exc(), err=True)
    hint = re.sub(
        rf"\b{NAME} (?={'|'.join(cli.commands)})", f"{PROGRAM} ", " ".join(message.split())
    )
    click.echo(f"{NAME}: {terminal.printable(hint)}", err=True)
    return code


def _from_variable(error: click.ClickException) -> str:
    """Where a refused value came from, if it was not typed."""
    ctx, option = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is None or option is None or _source(ctx, option.name) != "ENVIRONMENT":
        return ""
    return f" (in {option.envvar or f'{ctx.auto_envvar_prefix}_{option.name.upper()}'})"


def _source(ctx: click.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return source.name if source is not None else ""


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.ensure_object(dict)["debug"] = True


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """One line each: ours, torch, triton, device, pack format."""
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from spmoe_lite import __version__
    from spmoe_lite.manifest import FORMAT

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    cuda = torch.cuda.is_available()
    rows = [
        [NAME, __version__],
        ["torch", torch.__version__],
        ["triton", triton],
        ["device", torch.cuda.get_device_name() if cuda else "cpu"],
        ["pack format", str(FORMAT)],
    ]
    click.echo(terminal.table(rows))
    ctx.exit()


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
machine_options = options(
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
    click.option("--threads", "-t", type=click.IntRange(1, 1024), metavar="N", help="CPU threads."),
)
engine_options = options(
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
        "--seed", "-s", type=int, metavar="N", help="-1, the default, is a new one each time."
    ),
)


class Commands(click.Group):
    """The commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def command(self, *args: Any, **kwargs: Any) -> Any:
        kwargs.setdefault("context_settings", {"auto_envvar_prefix": "SPMOE"})
        return super().command(*args, **kwargs)


@click.group(
    cls=Commands,
    context_settings={"auto_envvar_prefix": "SPMOE", "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    allow_from_autoenv=False,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Versions of this program, torch, triton; device; pack format.",
)
@debug_option
def cli() -> None:
    """Run Mixture-of-Experts models that do not fit into VRAM.

    Experts are paged through a slab of device memory. A draft model writes ahead, and its guesses say
    which experts to fetch; the target verifies, so the text is exactly the target's.

    Packs live in the user data folder; SPMOE_HOME moves it. Every option can be set in the environment
    as SPMOE_ and its first long name: SPMOE_DRAFT, SPMOE_CTX_SIZE.

    Exit codes: 0 fine, 1 error, 2 usage, 3 not found, 4 does not fit, 5 not supported, 6 damaged file,
    7 network, 8 busy, 130 interrupted.
    """


@cli.command()
@click.option("--prompt", "-p", metavar="TEXT", help="Ask this in place of the built-in question.")
@click.option(
    "--gguf",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The small model's GGUF file, where there is no network.",
)
@engine_options
@sampling_options
@debug_option
def demo(prompt: str | None, gguf: Path | None, **given: Any) -> int:
    """Make a small real model pair, answer one prompt, then chat.

    The first start makes it on this machine, in a minute or two: SmolLM2-135M with eight experts a
    layer, and the original as its draft. It writes English and is no better a model than the original.
    Half of its experts are in slots, so that paging is seen. Needs 4 GB of disk while it is made.
    """
    from spmoe_lite.demo import prepare
    from spmoe_lite.library import inspect

    _check_sampling(given)
    _show_log()
    note("demo: SmolLM2-135M with eight experts a layer, drafted by the original")
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        target, draft = prepare(gguf=gguf, cancel=cancel, on_progress=progress)
    if given["slots"] is None and given["vram"] == "auto":
        given["slots"] = inspect(target)["experts"] // 2
        note(
            "half of the experts are in slots, the others are paged in when they are predicted or needed"
        )
    with _load(target, draft, given) as engine:
        repl = _repl(engine, target, draft, given)
        question = prompt or DEMO_PROMPT
        note(f">>> {question}")
        asked, repl.max_tokens = repl.max_tokens, repl.max_tokens or DEMO_TOKENS
        repl.say(question)
        repl.max_tokens = asked
        if not terminal.is_interactive():
            return 0
        note("now you: /help lists the commands, Ctrl-D leaves")
        return repl.run()


@cli.command()
@model_options
@engine_options
@trace_option
@sampling_options
@debug_option
def chat(pack: str | None, model: str | None, draft: str | None, **given: Any) -> int:
    """Talk to PACK; without one, to the pack used last.

    Inside, /help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.
    """
    _check_sampling(given)
    _show_log()
    target, draft_path = _choose(pack, model, draft, offer=terminal.is_interactive())
    note(_pair(target, draft_path))
    if given["template"] is None and not _has_template(target):
        raise UnsupportedError(
            f"{_name(target)} has no chat template: `{PROGRAM} run {_name(target)}` continues text, "
            f"or give one with --template FILE"
        )
    with _load(target, draft_path, given) as engine:
        repl = _repl(engine, target, draft_path, given)
        if terminal.is_interactive():
            note("/help lists the commands, Ctrl-D leaves")
        return repl.run()


@cli.command()
@model_options
@click.option("--prompt", "-p", metavar="TEXT", help="The prompt.")
@click.option(
    "--file",
    "-f",
    "prompt_file",
    envvar="SPMOE_FILE",
    metavar="FILE",
    help="File that holds the prompt; - is stdin.",
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat template.")
@json_option
@engine_options
@trace_option
@sampling_options
@debug_option
def run(
    pack: str | None,
    model: str | None,
    draft: str | None,
    prompt: str | None,
    prompt_file: str | None,
    raw: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """Answer one prompt: from -p, from a file, or from stdin.

    Only the answer goes to stdout. A model with a chat template is asked through it; one without
    continues the text.
    """
    from spmoe_lite.repl import answer_filter

    text = _read_prompt(prompt, prompt_file)
    if not text and not raw:
        raise UsageError("the prompt is empty")
    for flag in ("system_prompt", "template"):
        if raw and given[flag]:
            raise UsageError(f"--{flag.replace('_', '-')} needs a chat template; --raw uses none")
    _check_sampling(given)
    _show_log()
    target, draft_path = _choose(pack, model, draft, offer=False)
    if not (pack or model):
        note(_pair(target, draft_path))
    with _load(target, draft_path, given) as engine:
        sampling = _sampling(engine.default_sampling, given)
        limits = {"max_tokens": given["max_tokens"], "stop": given["stop"]}
        show = answer_filter()
        with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
            limits |= {"sampling": sampling, "cancel": cancel, "on_progress": progress}
            if raw or engine.template is None:
                if given["system_prompt"]:
                    raise UsageError(
                        f"--system-prompt needs a chat template; {_name(target)} has none, "
                        f"--template FILE gives one"
                    )
                answer = engine.generate(text, **limits)
            else:
                answer = engine.chat(_messages(given["system_prompt"], text), **limits)
            last = ""
            for piece in answer:
                if not as_json:
                    progress.close()
                    click.echo(show(piece), nl=False)
                    last = piece or last
            result = answer.result
        if as_json:
            _echo_json(
                {
                    "model": _name(target),
                    "draft": _name(draft_path) if draft_path else None,
                    "text": result.text,
                    "prompt_tokens": result.prompt_tokens,
                    "completion_tokens": result.completion_tokens,
                    "finish_reason": result.finish_reason,
                    "stats": result.stats.to_dict(),
                }
            )
        else:
            if not last.endswith("\n"):
                click.echo()
            note(result.stats.line())
        return 130 if result.finish_reason == "cancelled" else 0


@cli.command()
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

    _show_log()
    result = _convert(library_convert, source, lambda plan: _confirm(plan, yes), **given)
    return 0 if result else 1


@cli.command(name="list")
@json_option
@debug_option
def list_packs(as_json: bool) -> None:
    """List the packs of this machine."""
    from spmoe_lite.library import home, packs

    found = packs()
    if as_json:
        _echo_json(
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
                    _date(p.modified)[:10],
                ]
            )
            if not p.complete:
                rows[-1][3] += " partial"
        click.echo(terminal.table(rows, right=[1]))


@cli.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@debug_option
def rm(names: tuple[str, ...]) -> None:
    """Delete packs, unfinished ones too."""
    from spmoe_lite.library import packs, remove

    sizes = {p.name: p.size_bytes for p in packs()}
    for name in names:
        remove(name)
        freed = f" ({size(sizes[name])})" if name in sizes else ""
        note(f"deleted {name}{freed}")


@cli.command()
@click.argument("pack")
@json_option
@debug_option
def inspect(pack: str, as_json: bool) -> None:
    """Show what is inside PACK."""
    from spmoe_lite.library import inspect as library_inspect

    found = library_inspect(_find(pack))
    if as_json:
        _echo_json(found)
    else:
        click.echo(terminal.table(_contents(found)))


@cli.command()
@click.argument("pack")
@debug_option
def verify(pack: str) -> None:
    """Check every byte of PACK against its hashes."""
    from spmoe_lite.library import verify as library_verify

    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        library_verify(_find(pack), on_progress=progress, cancel=cancel)
    click.echo(f"{_name(_find(pack))}: every file is as it was written")


@cli.command()
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

    _show_log()
    _convert(library_repack, name, **given)


@cli.command()
@model_options
@json_option
@engine_options
@debug_option
def profile(
    pack: str | None, model: str | None, draft: str | None, as_json: bool, **given: Any
) -> None:
    """Time copies, drafting and layers on this machine.

    The result is kept and sets how deep drafting prefetches.
    """
    from spmoe_lite.profile import profile as library_profile

    _show_log()
    target, draft_path = _choose(pack, model, draft, offer=False)
    if draft_path is None:
        raise UsageError("profile measures a pair: name its draft with --draft PACK")
    with _load(target, draft_path, given) as engine:
        measured = library_profile(engine)
    if as_json:
        _echo_json(measured.to_dict())
    else:
        rows = [[key.replace("_", " "), f"{v:.3f}"] for key, v in measured.to_dict().items()]
        click.echo(terminal.table(rows, right=[1]))
    note(f"kept in {engine.profile_path}")


@cli.command(name="bench")
@model_options
@click.option(
    "--policy",
    type=Several(click.STRING),
    multiple=True,
    metavar="NAME,...",
    help="Policies to measure; all if not given.",
)
@click.option(
    "--slots",
    type=Several(click.IntRange(1)),
    metavar="N,N,...",
    default="",
    help="Numbers of experts kept on the device; as many as --vram holds if not given.",
)
@click.option(
    "--draft-tokens",
    type=Several(DraftTokens()),
    metavar="N,N,...",
    default="",
    help="Tokens drafted per step; 0,4 if not given.",
)
@click.option(
    "--prompts",
    metavar="FILE",
    help='One prompt a line, or JSON lines with "prompt"; - is stdin. Else six built-in ones.',
)
@click.option(
    "--max-tokens",
    type=click.IntRange(2),
    default=64,
    show_default=True,
    metavar="N",
    help="Longest answer.",
)
@click.option(
    "--repeats",
    type=click.IntRange(2),
    default=3,
    show_default=True,
    metavar="N",
    help="Rounds over all prompts; the first is not counted.",
)
@click.option(
    "--json",
    type=click.Path(path_type=Path),
    allow_from_autoenv=False,  # elsewhere SPMOE_JSON is a switch
    metavar="FILE",
    help="Write every run, the machine and the command to FILE.",
)
@machine_options
@debug_option
def bench_packs(
    pack: str | None,
    model: str | None,
    draft: str | None,
    policy: tuple[list[str], ...],
    prompts: str | None,
    json: Path | None,
    threads: int | None,
    **given: Any,
) -> int:
    """Measure PACK, perhaps with a draft, on this machine.

    Policies: on-demand, an LRU in each layer and nothing fetched ahead; global-lru, one LRU; ours, with
    what the draft's states point at fetched ahead; all-resident, every expert in a slot, where they fit.
    Each row is a fresh engine, its first round not counted; every answer is greedy. All rows must write
    the text of the first one, on-demand without drafting: one that does not is an error.

    TPOT is the time of a token after the first text, drafting included: median, least and most of all
    answers. Hits are by unique expert and by access, as in `replay`. STALL is the share of that time in
    which the target waited for experts.
    """
    from spmoe_lite.bench import POLICIES, bench, machine, summary
    from spmoe_lite.prompts import PROMPTS, parse_prompts

    texts = parse_prompts(_read_prompt(None, prompts), prompts) if prompts else PROMPTS
    if json is not None and not json.parent.is_dir():
        raise NotFoundError(f"--json {json}: there is no folder {json.parent}")
    _show_log()
    target, draft_path = _choose(pack, model, draft, offer=False)
    note(_pair(target, draft_path))
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:

        def tell(row: Row) -> None:
            progress.close()
            note(f"{row.setting}: " + (f"{row.tpot_ms[0]:.1f} ms a token" if row.tpot_ms else "-"))

        result = bench(
            target,
            draft_path,
            policies=[name for names in policy for name in names] or POLICIES,
            prompts=texts,
            cancel=cancel,
            on_progress=progress,
            on_row=tell,
            **given,
        )
    if json is not None:
        import shlex

        command = f"{PROGRAM} {shlex.join(sys.argv[1:])}"
        how: dict[str, Any] = {"command": command, "machine": machine()}
        how |= {"target": _name(target), "draft": _name(draft_path) if draft_path else None}
        how |= {"prompts": list(texts), "max_tokens": given["max_tokens"]}
        json.write_text(_json({**how, **result.to_dict()}) + "\n", encoding="ascii")
    if result.rows:
        click.echo(_bench_table(result.rows))
        click.echo(summary(result.rows))
    for name, reason in result.left_out.items():
        note(f"without {name}: {reason}")
    notices = [(row.setting.policy, notice) for row in result.rows for notice in row.notices]
    for name, notice in dict.fromkeys(notices):
        note(f"{name}: {notice}")
    for row in result.rows:
        if row.error:
            click.echo(f"{NAME}: {row.setting}: {row.error}", err=True)
    if result.interrupted:
        note(f"interrupted; rows measured: {len(result.rows)}")
        return 130
    return 1 if any(row.error for row in result.rows) else 0


@cli.command()
@click.argument("pack", required=False)
@click.option(
    "--device", default="auto", metavar="DEVICE", help="Which GPU to tune for: cuda, cuda:N."
)
@json_option
@debug_option
def tune(pack: str | None, device: str, as_json: bool) -> None:
    """Find faster kernel tiles for this GPU.

    Tiles near the shipped ones are timed at the shapes of PACK, or of the pack used last; it takes
    minutes. Those that are at least 3 % faster and change no bit of a result are kept, and every later
    start uses them. Nothing is tuned at any other time.
    """
    from dataclasses import asdict

    from spmoe_lite.tune import tune as library_tune

    _show_log()
    target, _ = _choose(pack, None, None, offer=False)
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        tried, path = library_tune(target, device=device, cancel=cancel, on_progress=progress)
    if as_json:
        _echo_json({"file": str(path), "tried": [asdict(one) for one in tried]})
    else:
        rows = [["PRODUCT", "ROWS", "N", "K", "WARPS", "STAGES", "US", "RESULT"]]
        for one in tried:
            t, product = one.tile, f"{one.product.kind} {one.product.weights}"
            sizes = [str(v) for v in (t.t, t.n, t.k, t.warps, t.stages)]
            rows.append([product, *sizes, "-" if one.ms is None else f"{one.ms * 1e3:.1f}"])
            rows[-1].append(terminal.printable(one.verdict))
        click.echo(terminal.table(rows, right=[1, 2, 3, 4, 5, 6]))
    kept = sum(one.verdict == "kept" for one in tried)
    note(f"{kept} of {sum(one.verdict != 'shipped' for one in tried)} tiles kept in {path}")


@cli.command(name="replay")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--slots",
    type=Several(click.IntRange(1)),
    metavar="N,N,...",
    default="",
    help="Numbers of slots to try; the recorded one if not given.",
)
@click.option(
    "--policy",
    type=Several(click.STRING),
    metavar="NAME,...",
    default="",
    help="Policies to try; all if not given.",
)
@click.option(
    "--warm-up",
    type=float,
    default=0.5,
    show_default=True,
    metavar="X",
    help="Share of the passes that fills the slots and teaches `static`, and is not counted.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Another trace to teach `static`.",
)
@click.option(
    "--link",
    type=float,
    metavar="GB/s",
    help="Rate of copies; as measured by `profile` before the recording, else 50.",
)
@json_option
@debug_option
def replay_trace(
    file: Path,
    slots: list[int],
    policy: list[str],
    warm_up: float,
    calibration: Path | None,
    link: float | None,
    as_json: bool,
) -> None:
    """Try cache policies on a recording.

    FILE was written by `run` or `chat` with --trace. Nothing is loaded or computed but who is in a slot
    when. Hits are by unique expert and by access, of accepted tokens, as after an answer. Misses count
    rejected tokens too, copies also what was fetched ahead. Seconds are the bus alone: every copy at
    the rate of --link, none hidden behind computing.

    Policies: layer-lru and global-lru, as --policy of `run`; prefetch, layer-lru with the draft's
    predictions; textbook-lru, layer-lfru, global-lfru, static, stream; and layer-belady, global-belady,
    belady-bypass, which know the future and bound the others. docs/cache.md says what each does.
    """
    from dataclasses import asdict

    from spmoe_lite.replay import compare
    from spmoe_lite.trace import MAX_LINK, MIN_LINK, read_trace

    _show_log()
    trace = read_trace(file)
    rate = (trace.header.link or DEFAULT_LINK) if link is None else link
    if not MIN_LINK <= rate <= MAX_LINK:
        raise UsageError(f"--link {rate:g}: a rate in GB/s, from {MIN_LINK:g} to {MAX_LINK:g}")
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        result = compare(
            trace,
            slots=slots,
            policies=policy,
            warm_up=warm_up,
            calibration=read_trace(calibration) if calibration else None,
            cancel=cancel,
            on_progress=progress,
        )
    if as_json:
        values = asdict(result) | {"trace": asdict(trace.header), "link": rate}
        _echo_json(values | {"scores": [score.to_dict(rate) for score in result.scores]})
        return
    rows = [["POLICY", "SLOTS", "HITS", "BY ACCESS", "MISSES/TOKEN", "COPIED/TOKEN", "S/TOKEN"]]
    for one in result.scores:
        hits = ["-" if r is None else f"{r:.1%}" for r in (one.hit_rate_unique, one.hit_rate)]
        rows.append([one.policy, str(one.slots), *hits, f"{one.misses_per_token:.2f}"])
        rows[-1] += [size(one.bytes_per_token), f"{one.seconds_per_token(rate):.3g}"]
    click.echo(terminal.table(rows, right=[1, 2, 3, 4, 5, 6]))
    note(
        f"{terminal.printable(trace.header.model)}: {result.passes} passes, {result.tokens} tokens, "
        f"in a pass {result.union:.1f} of {trace.header.experts} experts a layer; {rate:.1f} GB/s"
    )
    for name, reason in result.left_out.items():
        note(f"without {name}: {reason}")


# What the commands share


def _show_log() -> None:
    """The library's warnings as dim remarks on stderr; with --debug its whole log."""
    import logging

    class Remarks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(terminal.printable(record.getMessage()))

    debug = click.get_current_context().ensure_object(dict)["debug"]
    logger = logging.getLogger("spmoe_lite")
    logger.handlers = [h for h in logger.handlers if not isinstance(h, logging.StreamHandler)]
    logger.addHandler(Remarks(logging.DEBUG if debug else logging.WARNING))
    logger.setLevel(logging.DEBUG if debug else logging.WARNING)


def _find(name: str) -> Path:
    from spmoe_lite.library import find

    return find(name)


def _name(path: Path) -> str:
    return path.name.removesuffix(".spmoe")


def _pair(target: Path, draft: Path | None) -> str:
    return f"{_name(target)}, drafted by {_name(draft)}" if draft else f"{_name(target)}, no draft"


def _choose(
    pack: str | None, model: str | None, draft: str | None, *, offer: bool
) -> tuple[Path, Path | None]:
    """The packs to run: what was named, else the one used last, else an offer to make one."""
    if (
        pack
        and model
        and click.get_current_context().get_parameter_source("model")
        == (click.core.ParameterSource.COMMANDLINE)
    ):
        raise UsageError(f"two models: {pack} and {model}")
    draft_path = _find(draft) if draft else None
    named = pack or model
    if named:
        return _find(named), draft_path
    from spmoe_lite.library import default_target

    target = default_target(draft_path)
    if target is not None:
        return target, draft_path
    first, second = FIRST_PAIR
    if draft_path is not None:
        raise NotFoundError(
            f"no Mixture-of-Experts pack here has the vocabulary of {_name(draft_path)}; "
            f"type: {PROGRAM} convert {first}"
        )
    none, small = "no Mixture-of-Experts pack yet", f"{PROGRAM} demo"
    if _is_here("demo"):
        none = "no Mixture-of-Experts pack but demo, which is only taken by name"
        small = f"{PROGRAM} chat demo --draft demo-draft"
    if not offer:
        raise NotFoundError(
            f"{none}; type: {PROGRAM} convert {first}; "
            f"{PROGRAM} convert {second}; {PROGRAM} chat {first} --draft {second} "
            f"(or {small} for a small one)"
        )
    note(f"{none}; `{small}` for a small one. The reference pair:")
    target = _offer(first)
    if target is None:
        raise NotFoundError(f"no model to talk to; type: {small}")
    return target, _offer(second)


def _is_here(name: str) -> bool:
    try:
        _find(name)
    except NotFoundError:
        return False
    return True


def _offer(name: str) -> Path | None:
    """Convert a known model if the person agrees to its sizes."""
    from spmoe_lite.converters import convert as library_convert

    try:
        return _find(name)
    except NotFoundError:
        made = _convert(library_convert, name, lambda plan: _confirm(plan, False, always=True))
        return made.path if made else None


def _has_template(target: Path) -> bool:
    """Asked before gigabytes are loaded for a chat that cannot be."""
    from spmoe_lite.chat_template import ChatTemplate
    from spmoe_lite.tokenizer import Tokenizer

    return ChatTemplate.load(target, Tokenizer.load(target)) is not None


def _load(target: Path, draft: Path | None, given: dict[str, Any]) -> Engine:
    """Load the pair with the options given, progress on stderr; Ctrl-C stops it cleanly."""
    from spmoe_lite.engine import Engine

    asked = {
        "device": given["device"],
        "vram": given["vram"],
        "slots": given["slots"],
        "ctx_size": given["ctx_size"],
        "kv_type": given["kv_type"],
        "pin": given["pin"],
        "prefetch": not given["no_prefetch"],
        "cutoff": given["cutoff"],
        "policy": given["policy"],
        "template": given.get("template"),
        "trace": given.get("trace"),
        "on_plan": lambda plan: note(str(plan)),
    }
    if given["draft_tokens"] is not None:
        asked["draft_tokens"] = given["draft_tokens"]
    if given["threads"] is not None:
        import torch

        torch.set_num_threads(given["threads"])
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        engine = Engine.load(target, draft, **asked, cancel=cancel, on_progress=progress)
    for notice in engine.notices:
        note(notice)
    _say_unused(engine, target, draft, given)
    return engine


def _say_unused(engine: Engine, target: Path, draft: Path | None, given: dict[str, Any]) -> None:
    """One remark for each reason why flags that were typed change nothing."""
    moe, temperature = engine.plan.expert_count > 0, given.get("temp")
    if temperature is None:
        temperature = engine.default_sampling.temperature
    reasons = [
        (draft is None, "there is no --draft", ["draft_tokens"]),
        (draft is None or not moe, "nothing is prefetched", ["cutoff", "no_prefetch"]),
        (given["no_prefetch"], "--no-prefetch is given", ["cutoff"]),
        (not moe, f"{_name(target)} has no experts", ["slots", "policy", "pin"]),
        (engine.plan.device == "cpu", "it runs on the CPU", ["pin"]),
        (temperature == 0, "the temperature is 0", ["top_k", "top_p", "min_p"]),
    ]
    ctx, said = click.get_current_context(), set()
    for holds, why, flags in reasons:
        flags = [f for f in flags if _source(ctx, f) == "COMMANDLINE" and f not in said]
        if holds and flags:
            said.update(flags)
            note(f"no effect, as {why}: " + ", ".join("--" + f.replace("_", "-") for f in flags))


def _sampling(default: SamplingParams, given: dict[str, Any]) -> SamplingParams:
    """The model's own sampling with what was given on top."""
    from dataclasses import replace

    from spmoe_lite.repl import new_seed

    names = {"temp": "temperature", "repeat_penalty": "repetition_penalty"}
    flags = ["temp", "top_k", "top_p", "min_p", "repeat_penalty"]
    flags += ["presence_penalty", "frequency_penalty"]
    changed = {names.get(f, f): given[f] for f in flags if given[f] is not None}
    seed = given["seed"]
    changed["seed"] = new_seed() if seed is None or seed < 0 else seed
    return replace(default, **changed)


def _check_sampling(given: dict[str, Any]) -> None:
    """Refuse bad values before gigabytes are loaded for them."""
    from spmoe_lite.config import SamplingParams

    _sampling(SamplingParams(), given)


def _repl(engine: Engine, target: Path, draft: Path | None, given: dict[str, Any]) -> Any:
    from spmoe_lite.library import home
    from spmoe_lite.repl import Repl

    seed = given["seed"]
    return Repl(
        engine,
        _name(target),
        draft=_name(draft) if draft else None,
        system=given["system_prompt"],
        sampling=_sampling(engine.default_sampling, given),
        seed=None if seed is None or seed < 0 else seed,
        max_tokens=given["max_tokens"],
        stop=given["stop"],
        history=home() / "history",
    )


def _messages(system: str | None, text: str) -> list[dict[str, str]]:
    first = [{"role": "system", "content": system}] if system else []
    return [*first, {"role": "user", "content": text}]


def _read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from -p, -f or stdin, without the line end an editor or echo puts last."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("two prompts: give -p or -f, not both")
    if prompt is not None:
        return prompt
    if prompt_file in (None, "-"):
        if sys.stdin is None or (prompt_file is None and terminal.is_terminal(sys.stdin)):
            raise UsageError("no prompt: give -p TEXT or -f FILE, or pipe it in")
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="strict")
        return _read_text(sys.stdin, "stdin")
    try:
        with open(prompt_file, encoding="utf-8-sig") as file:  # some editors begin with a mark
            return _read_text(file, prompt_file)
    except FileNotFoundError:
        raise NotFoundError(f"no prompt file {prompt_file}") from None
    except ValueError:  # a name that no file can have
        raise UsageError(f"{prompt_file!r:.80} is no file; give -f FILE") from None


def _read_text(file: TextIO, name: str) -> str:
    try:
        text = file.read(MAX_PROMPT_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not text in {error.encoding}; convert it to UTF-8") from None
    if len(text) > MAX_PROMPT_CHARS:
        raise UsageError(f"{name} has more than {MAX_PROMPT_CHARS} characters; shorten the prompt")
    return text.removesuffix("\n")


def _convert(
    function: Callable[..., ConvertResult],
    source: str,
    ask: Callable[[ConvertPlan], bool] | None = None,
    **given: Any,
) -> ConvertResult | None:
    """Run `convert` or `repack` with progress; None if `ask`, shown the plan, says no."""
    refused = False

    def confirm(plan: ConvertPlan) -> bool:
        nonlocal refused
        progress.close()
        refused = ask is not None and not ask(plan)
        return not refused

    if ask is not None:
        given["confirm"] = confirm
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        try:
            result = function(source, **given, cancel=cancel, on_progress=progress)
        except Cancelled:
            if refused:
                note("nothing was written")
                return None
            raise Cancelled("stopped; the same command resumes") from None
    note(f"{'already there' if result.already_there else 'packed'}: {result.path}")
    return result


def _confirm(plan: ConvertPlan, yes: bool, *, always: bool = False) -> bool:
    """Print the sizes; ask where that is due, which without a terminal means --yes."""
    click.echo(terminal.printable(str(plan)), err=True)
    if yes or not (always or plan.needs_confirmation):
        return True
    if not terminal.is_terminal(sys.stdin):
        raise UsageError("that is a lot, and nobody is there to be asked: give --yes to go on")
    return terminal.ask("Go on?")


def _date(modified: float) -> str:
    from datetime import datetime

    return datetime.fromtimestamp(modified).astimezone().isoformat(timespec="seconds")


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


def _bench_table(rows: Sequence[Row]) -> str:
    lines = [
        ["POLICY", "SLOTS", "DRAFTS", "TPOT MS", "LEAST", "MOST", "TOK/S", "FIRST S", "ACCEPTED"]
        + ["HITS", "BY ACCESS", "MB/TOKEN", "STALL", "USEFUL", "LATE", "WASTED"]
    ]
    for row in rows:
        stats, c, found = row.stats, row.stats.counters, row.to_dict()
        shares = [stats.acceptance, stats.hit_rate_unique, stats.hit_rate]
        accepted, *hits = ["-" if share is None else f"{share:.1%}" for share in shares]
        times = ["-" if time is None else f"{time:.1f}" for time in row.tpot_ms or [None] * 3]
        rate, moved, stall = stats.tokens_per_second, found["mb_per_token"], found["stall_share"]
        lines.append([row.setting.policy, str(row.setting.slots), str(row.setting.draft_tokens)])
        lines[-1] += [*times, "-" if rate is None else f"{rate:.1f}"]
        lines[-1] += [f"{stats.time_to_first_token:.2f}", accepted, *hits]
        lines[-1] += [
            "-" if moved is None else f"{moved:.1f}",
            "-" if stall is None else f"{stall:.0%}",
        ]
        lines[-1] += [str(n) for n in (c.prefetch_useful, c.prefetch_late, c.prefetch_wasted)]
    return terminal.table(lines, right=range(1, len(lines[0])))


def _json(value: Any) -> str:
    """ASCII only: the same bytes whatever the encoding."""
    import json

    return json.dumps(value, indent=2, allow_nan=False)


def _echo_json(value: Any) -> None:
    click.echo(_json(value))
