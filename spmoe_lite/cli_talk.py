"""Commands that talk: `demo`, `chat`, `run`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spmoe_lite import terminal
from spmoe_lite.cli_options import (
    PROGRAM,
    command,
    debug_option,
    engine_options,
    json_option,
    model_options,
    sampling_options,
    trace_option,
)
from spmoe_lite.cli_shared import (
    check_text,
    choose,
    echo_json,
    load_pair,
    pack_name,
    pair_name,
    read_prompt,
    show_log,
    typed,
)
from spmoe_lite.errors import UnsupportedError, UsageError
from spmoe_lite.terminal import note

if TYPE_CHECKING:
    from spmoe_lite.config import SamplingParams
    from spmoe_lite.engine import Engine

DEMO_PROMPT = "Give me three tips for sleeping well."
DEMO_TOKENS = 200  # of the demo's first answer, which should end some time


@command()
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
    """Make a small real model pair, answer one prompt, then chat if a terminal is there.

    The first start makes it on this machine, in a minute or two: SmolLM2-135M with eight experts a
    layer, and the original as its draft. It writes English and is no better a model than the original.
    Half of its experts are in slots, so that paging is seen. Needs 4 GB of disk while it is made.
    """
    from spmoe_lite.demo import prepare
    from spmoe_lite.library import inspect

    _check_sampling(given)
    check_text(prompt or "", "--prompt")
    show_log()
    note("demo: SmolLM2-135M with eight experts a layer, drafted by the original")
    with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
        target, draft = prepare(gguf=gguf, cancel=cancel, on_progress=progress)
    if given["slots"] is None and given["vram"] == "auto":
        given["slots"] = inspect(target)["experts"] // 2
        note(
            "half of the experts are in slots, the others are paged in when they are predicted or needed"
        )
    with load_pair(target, draft, given) as engine:
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


@command()
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
    show_log()
    target, draft_path = choose(pack, model, draft, offer=terminal.is_interactive())
    note(pair_name(target, draft_path))
    if given["template"] is None and not _has_template(target):
        raise UnsupportedError(
            f"{pack_name(target)} has no chat template: `{PROGRAM} run {pack_name(target)}` continues text, "
            f"or give one with --template FILE"
        )
    with load_pair(target, draft_path, given) as engine:
        repl = _repl(engine, target, draft_path, given)
        if terminal.is_interactive():
            note("/help lists the commands, Ctrl-D leaves")
        return repl.run()


@command()
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

    prompts = [typed("prompt", prompt), typed("prompt_file", prompt_file)]
    text = read_prompt(*prompts if prompts != [None, None] else (prompt, prompt_file))
    if not text and not raw:
        raise UsageError("the prompt is empty")
    for flag in ("system_prompt", "template") if raw else ():
        given[flag] = typed(flag, given[flag])
        if given[flag]:
            raise UsageError(f"--{flag.replace('_', '-')} needs a chat template; --raw uses none")
    _check_sampling(given)
    show_log()
    target, draft_path = choose(pack, model, draft, offer=False)
    if not (pack or model):
        note(pair_name(target, draft_path))
    with load_pair(target, draft_path, given) as engine:
        sampling = _sampling(engine.default_sampling, given)
        limits = {"max_tokens": given["max_tokens"], "stop": given["stop"]}
        show = answer_filter()
        with terminal.interruptible() as cancel, terminal.ProgressDisplay() as progress:
            limits |= {"sampling": sampling, "cancel": cancel, "on_progress": progress}
            if raw or engine.template is None:
                if typed("system_prompt", given["system_prompt"]):
                    raise UsageError(
                        f"--system-prompt needs a chat template; {pack_name(target)} has none, "
                        f"--template FILE gives one"
                    )
                if given["system_prompt"]:
                    note(
                        f"SPMOE_SYSTEM_PROMPT is not used: {pack_name(target)} has no chat template"
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
            echo_json(
                {
                    "model": pack_name(target),
                    "draft": pack_name(draft_path) if draft_path else None,
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


def _has_template(target: Path) -> bool:
    """Asked before gigabytes are loaded for a chat that cannot be."""
    from spmoe_lite.chat_template import ChatTemplate
    from spmoe_lite.tokenizer import Tokenizer

    return ChatTemplate.load(target, Tokenizer.load(target)) is not None


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
    for stop in given["stop"]:
        check_text(stop, "--stop")
    check_text(given["system_prompt"] or "", "--system-prompt")
    if "" in given["stop"]:
        raise UsageError("--stop is empty: give a text of at least one character")


def _repl(engine: Engine, target: Path, draft: Path | None, given: dict[str, Any]) -> Any:
    from spmoe_lite.library import home
    from spmoe_lite.repl import Repl

    seed = given["seed"]
    return Repl(
        engine,
        pack_name(target),
        draft=pack_name(draft) if draft else None,
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
