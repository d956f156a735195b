"""What the commands share: the packs that are meant, loading them, a prompt's text, JSON on stdout."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from spmoe_lite import terminal
from spmoe_lite.cli_options import PROGRAM
from spmoe_lite.errors import Cancelled, NotFoundError, UsageError
from spmoe_lite.terminal import note

if TYPE_CHECKING:
    from spmoe_lite.converters import ConvertPlan, ConvertResult
    from spmoe_lite.engine import Engine

FIRST_PAIR = ("mixtral-8x7b", "mistral-7b")  # what `chat` offers to convert where there is no pack
MAX_PROMPT_CHARS = 16 << 20  # a context of millions of tokens; more is a device or a mistake


def source_of(ctx: click.Context, name: str) -> str:
    source = ctx.get_parameter_source(name)
    return source.name if source is not None else ""


def typed(name: str, value: Any) -> Any:
    """`value` if its option was typed, else None: what the environment has is there for every command."""
    return value if source_of(click.get_current_context(), name) == "COMMANDLINE" else None


def show_log() -> None:
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


def find_pack(name: str) -> Path:
    from spmoe_lite.library import find

    return find(name)


def pack_name(path: Path) -> str:
    return path.name.removesuffix(".spmoe")


def pair_name(target: Path, draft: Path | None) -> str:
    by = f"drafted by {pack_name(draft)}" if draft else "no draft"
    return f"{pack_name(target)}, {by}"


def choose(
    pack: str | None, model: str | None, draft: str | None, *, offer: bool
) -> tuple[Path, Path | None]:
    """The packs to run: what was named, else the one used last, else an offer to make one."""
    if pack and model and typed("model", model):
        raise UsageError(f"two models: {pack} and {model}")
    draft_path = find_pack(draft) if draft else None
    named = model if pack is None else pack
    if named is not None:  # perhaps empty, of a variable that is not set: no wish for the last used
        return find_pack(named), draft_path
    from spmoe_lite.library import default_target

    target = default_target(draft_path)
    if target is not None:
        return target, draft_path
    first, second = FIRST_PAIR
    if draft_path is not None:
        raise NotFoundError(
            f"no Mixture-of-Experts pack here has the vocabulary of {pack_name(draft_path)}; "
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
        find_pack(name)
    except NotFoundError:
        return False
    return True


def _offer(name: str) -> Path | None:
    """Convert a known model if the person agrees to its sizes."""
    from spmoe_lite.converters import convert as library_convert

    try:
        return find_pack(name)
    except NotFoundError:
        made = make_pack(library_convert, name, lambda plan: confirm_plan(plan, False, always=True))
        return made.path if made else None


def load_pair(target: Path, draft: Path | None, given: dict[str, Any]) -> Engine:
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
        (not moe, f"{pack_name(target)} has no experts", ["slots", "policy", "pin"]),
        (engine.plan.device == "cpu", "it runs on the CPU", ["pin"]),
        (temperature == 0, "the temperature is 0", ["top_k", "top_p", "min_p"]),
    ]
    ctx, said = click.get_current_context(), set()
    for holds, why, flags in reasons:
        flags = [f for f in flags if source_of(ctx, f) == "COMMANDLINE" and f not in said]
        if holds and flags:
            said.update(flags)
            note(f"no effect, as {why}: " + ", ".join("--" + f.replace("_", "-") for f in flags))


def read_prompt(prompt: str | None, prompt_file: str | None) -> str:
    """The prompt from -p, -f or stdin, without the line end an editor or echo puts last."""
    if prompt is not None and prompt_file is not None:
        raise UsageError("two prompts: give -p or -f, not both")
    if prompt is not None:
        check_text(prompt, "--prompt")
        return prompt
    if prompt_file in (None, "-"):
        if sys.stdin is None or (prompt_file is None and terminal.is_terminal(sys.stdin)):
            raise UsageError("no prompt: give -p TEXT or -f FILE, or pipe it in")
        if hasattr(sys.stdin, "reconfigure"):
            sys.stdin.reconfigure(errors="strict")
        return _read_text(sys.stdin, "stdin")
    if not prompt_file:
        raise UsageError("the name of the prompt's file is empty: give -f FILE")
    try:
        with open(prompt_file, encoding="utf-8-sig") as file:  # some editors begin with a mark
            return _read_text(file, prompt_file)
    except FileNotFoundError:
        raise NotFoundError(f"no prompt file {prompt_file}") from None
    except ValueError:  # a name that no file can have
        raise UsageError(f"{prompt_file!r:.80} is no file; give -f FILE") from None


def check_text(text: str, flag: str) -> None:
    """Refuse bytes that the system's encoding did not know: they come as halves of surrogate pairs."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise UsageError(
            f"{flag} is not text in {sys.getfilesystemencoding()}; convert it"
        ) from None


def _read_text(file: TextIO, name: str) -> str:
    from spmoe_lite.files import naming

    try:
        with naming(Path(name), "read"):
            text = file.read(MAX_PROMPT_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not text in {error.encoding}; convert it to UTF-8") from None
    if len(text) > MAX_PROMPT_CHARS:
        raise UsageError(f"{name} has more than {MAX_PROMPT_CHARS} characters; shorten the prompt")
    return text.removeprefix("\ufeff").removesuffix("\n")  # a mark that some editors begin with


def make_pack(
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


def confirm_plan(plan: ConvertPlan, yes: bool, *, always: bool = False) -> bool:
    """Print the sizes; ask where that is due, which without a terminal means --yes."""
    terminal.remark(terminal.printable(str(plan)))
    if yes or not (always or plan.needs_confirmation):
        return True
    if not terminal.is_terminal(sys.stdin):
        raise UsageError("that is a lot, and nobody is there to be asked: give --yes to go on")
    return terminal.ask("Go on?")


def json_text(value: Any) -> str:
    """ASCII only: the same bytes whatever the encoding."""
    import json

    return json.dumps(value, indent=2, allow_nan=False)


def echo_json(value: Any) -> None:
    click.echo(json_text(value))
