"""The chat loop: lines in, streamed answers out, a conversation that survives Ctrl-C.

`Repl` sits on the library as any program would: it keeps the messages, calls `engine.chat` and prints the
pieces. Lines come from prompt-toolkit with a history file where the terminal can edit lines, and are read
plainly from a pipe or a dumb terminal. Answers go to stdout, remarks and statistics to stderr. An error
inside a turn is one line and the conversation stays as it was; in a pipe it ends the program.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import click

from spmoe_lite.config import MAX_SEED
from spmoe_lite.errors import CapacityError, DamagedError, NotFoundError, SpmoeError, UsageError
from spmoe_lite.files import write_whole
from spmoe_lite.progress import many
from spmoe_lite.stats import in_words
from spmoe_lite.terminal import (
    ProgressDisplay,
    WordWrap,
    can_draw,
    columns,
    interruptible,
    is_interactive,
    is_terminal,
    keys_unseen,
    note,
    printable,
    read_line,
    say,
    table,
)

if TYPE_CHECKING:
    from spmoe_lite.config import SamplingParams
    from spmoe_lite.engine import Engine
    from spmoe_lite.generation import Result

PROMPT = ">>> "
CONTINUED = "... "
QUOTES = '"""'
INTERRUPTED = 130
MAX_SAVED_BYTES = 64 * 1024 * 1024

# What /set takes, and the field of SamplingParams it changes.
SETTINGS = {
    "temp": "temperature",
    "top-k": "top_k",
    "top-p": "top_p",
    "min-p": "min_p",
    "repeat-penalty": "repetition_penalty",
    "presence-penalty": "presence_penalty",
    "frequency-penalty": "frequency_penalty",
    "seed": "seed",
}
WHOLE_NUMBERS = ("top-k", "seed", "max-tokens")
ALIASES = {
    "?": "help",
    "reset": "clear",
    "retry": "regen",
    "info": "show",
    "bye": "exit",
    "quit": "exit",
    "temperature": "temp",
    "predict": "max-tokens",
    "repetition-penalty": "repeat-penalty",
}


class Reader(Protocol):
    """Where lines come from: `read` returns one without its end, None at the end of input."""

    def read(self, prompt: str) -> str | None: ...


class PlainReader:
    """Lines as they come; the prompt is shown on stderr if a person is typing."""

    def read(self, prompt: str) -> str | None:
        if is_terminal(sys.stdin):
            click.echo(prompt, nl=False, err=True)
        line = read_line()
        if not line:
            return None
        return line.removeprefix("\ufeff").rstrip("\n")  # a mark that some editors begin with


class LineEditor:
    """prompt-toolkit with a history file; Alt-Enter starts a new line, Tab completes commands.

    Ctrl-C on a typed line clears it; only on an empty one does it reach the loop.
    """

    def __init__(self, history: Path | None) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory
        from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

        keys = KeyBindings()

        @keys.add("escape", "enter")
        def _(event: KeyPressEvent) -> None:
            event.current_buffer.insert_text("\n")

        @keys.add("c-c")
        def _(event: KeyPressEvent) -> None:
            if event.current_buffer.text:
                event.current_buffer.reset()
            else:
                event.app.exit(exception=KeyboardInterrupt)

        store: History = InMemoryHistory()
        if history is not None and _can_write(history):
            store = FileHistory(str(history))
        words = [f"/{name}" for name in COMMANDS]
        self._session: PromptSession[str] = PromptSession(
            history=store,
            key_bindings=keys,
            completer=WordCompleter(words, sentence=True),
            complete_while_typing=False,
            prompt_continuation=lambda width, line, wrapped: "" if wrapped else CONTINUED,
        )

    def read(self, prompt: str) -> str | None:
        try:
            return self._session.prompt(prompt)
        except EOFError:
            return None


def open_reader(history: Path | None) -> Reader:
    """The line editor where the terminal can carry it, else plain lines; says so if it fails."""
    if not (is_interactive() and can_draw(sys.stdout)):
        return PlainReader()
    try:
        return LineEditor(history)
    except Exception as error:  # a missing or failing prompt-toolkit must not cost the chat
        note(f"line editing is off: {error or type(error).__name__}")
        return PlainReader()


class Repl:
    """One conversation with `engine`, shown on the standard streams.

    `sampling` None means the model's own; `seed` None draws a new one for every answer.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        *,
        draft: str | None = None,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        history: Path | None = None,
    ) -> None:
        self.engine = engine
        self.name = name
        self.draft = draft
        self.system = system
        self.sampling = sampling or engine.default_sampling
        self.seed = seed
        self.max_tokens = max_tokens
        self.stop = stop
        self.messages: list[dict[str, str]] = []  # without the system prompt
        self._asked: str | None = None  # the last question, kept for /regen even if unanswered
        self._reader: Reader = open_reader(history)
        self._interrupts = 0  # Ctrl-C since the last line
        self._leaving = False

    def run(self) -> int:
        """Talk until Ctrl-D, /exit or the second Ctrl-C; returns the exit code."""
        while not self._leaving:
            try:
                text = self._read_message()
                if text is None:
                    if isinstance(self._reader, PlainReader) and is_terminal(sys.stdin):
                        click.echo(err=True)
                    return 0
                if text.strip():
                    self._interrupts = 0
                    self.handle(text)
            except KeyboardInterrupt:
                self._interrupts += 1
                if isinstance(self._reader, PlainReader):
                    click.echo(err=True)  # the terminal has shown ^C
                if self._interrupts > 1:
                    return INTERRUPTED
                note("Ctrl-C again leaves, /help lists the commands")
            except SpmoeError as error:
                if not is_terminal(sys.stdin):
                    raise
                note(str(error))
        return 0

    def handle(self, text: str) -> None:
        """A command if `text` is `/word ...`, else something said to the model."""
        command = _command(text)
        if command is None:
            self.say(text)
            return
        name, argument = command
        action = COMMANDS.get(ALIASES.get(name, name))
        if action is None:
            raise UsageError(
                f"no command /{name}: /help lists them; a space before / sends it as text"
            )
        action.run(self, argument)

    def say(self, question: str) -> None:
        """Add `question`, print the answer as it comes, and keep both."""
        self._asked = question
        self.messages.append({"role": "user", "content": question})
        try:
            result = self._answer()
        except BaseException as error:
            self.messages.pop()
            if isinstance(error, CapacityError) and self.messages:
                raise CapacityError(f"{error}, or type /clear to start over") from error
            raise
        if result.text:
            self.messages.append({"role": "assistant", "content": result.text})
        else:  # stopped before a word: a question without an answer would break the next turn
            self.messages.pop()
        self._remark(result)

    def _read_message(self) -> str | None:
        try:
            line = self._reader.read(PROMPT)
        except (KeyboardInterrupt, SpmoeError):
            raise
        except Exception as error:
            if not isinstance(self._reader, LineEditor):
                raise
            note(f"line editing is off: {error or type(error).__name__}")
            self._reader = PlainReader()
            line = self._reader.read(PROMPT)
        if line is None or not line.lstrip().startswith(QUOTES):
            return line
        text = line.lstrip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            line = self._reader.read(CONTINUED)
            if line is None:
                return text
            text += "\n" + line
        return text.rstrip()[: -len(QUOTES)].strip("\n")

    def _answer(self) -> Result:
        system = [{"role": "system", "content": self.system}] if self.system else []
        sampling = replace(self.sampling, seed=self.seed if self.seed is not None else new_seed())
        show = answer_filter()
        with keys_unseen(), interruptible() as cancel:
            with ProgressDisplay() as progress:
                answer = self.engine.chat(
                    system + self.messages,
                    sampling=sampling,
                    max_tokens=self.max_tokens,
                    stop=self.stop,
                    cancel=cancel,
                    on_progress=progress,
                )
                shown = ""
                try:
                    for piece in answer:
                        if not shown:
                            progress.close()
                        shown = piece or shown
                        click.echo(show(piece), nl=False)
                    result = answer.result
                finally:
                    answer.close()
            if cancel.is_set():
                self._interrupts = 1
        if shown and not shown.endswith("\n"):
            click.echo()
        return result

    def _remark(self, result: Result) -> None:
        """The dim lines after an answer: why it ended, if not by itself, and the statistics."""
        if result.finish_reason == "cancelled":
            note("stopped; the conversation goes on, Ctrl-C again leaves")
        elif result.finish_reason == "length":
            count = result.completion_tokens
            note(f"cut at {count} {many('token', count)} (--max-tokens, /set max-tokens)")
        elif result.finish_reason == "context":
            note(
                f"the context of {self.engine.ctx_size} tokens is full: /clear starts over, "
                f"--ctx-size makes it larger"
            )
        note(result.stats.line())

    # The commands; the table below names them.

    def help(self, argument: str) -> None:
        rows = [[f"/{name} {c.takes}".rstrip(), c.about] for name, c in COMMANDS.items()]
        click.echo(table(rows))
        say('""" starts and ends text of several lines, Ctrl-C stops an answer, Ctrl-D leaves')

    def clear(self, argument: str) -> None:
        self.messages.clear()
        self._asked = None
        note("forgotten; the system prompt stays" if self.system else "forgotten")

    def regen(self, argument: str) -> None:
        question = self._asked
        if question is None:
            raise UsageError("nothing to answer again yet")
        before = list(self.messages)
        if self.messages and self.messages[-1]["role"] == "assistant":
            del self.messages[-2:]
        if self.sampling.temperature == 0:
            note("temperature 0 gives the same answer again; /set temp 0.7 would vary it")
        elif self.seed is not None:
            self.seed = (self.seed + 1) % (MAX_SEED + 1)
            note(f"seed {self.seed}")
        try:
            self.say(question)
        except BaseException:
            self.messages = before
            raise

    def set_system(self, argument: str) -> None:
        if not argument:
            say(self.system or "no system prompt; /system TEXT sets one")
            return
        self.system = None if argument == "-" else argument.strip('"')
        note("system prompt removed" if self.system is None else "system prompt set")

    def change(self, argument: str) -> None:
        name, _, value = argument.partition(" ")
        name, value = name.lower().replace("_", "-").lstrip("-"), value.strip()
        name = ALIASES.get(name, name)
        if not name:
            click.echo(table(self._settings()))
        elif name == "system":
            self.set_system(value)
        elif name == "stop":
            self.stop = () if value in ("", "-") else (*self.stop, _unescape(value))
            note(f"stop strings: {', '.join(map(repr, self.stop)) or 'none'}")
        elif name in SETTINGS or name == "max-tokens":
            self._set_number(name, value)
            note(" ".join(next(row for row in self._settings() if row[0] == name)))
        else:
            known = ", ".join((*SETTINGS, "max-tokens", "stop", "system"))
            raise UsageError(f"nothing called {name!r} to set: {known}")

    def _set_number(self, name: str, value: str) -> None:
        try:
            number = int(value) if name in WHOLE_NUMBERS else float(value)
        except ValueError:
            kind = "a whole number" if name in WHOLE_NUMBERS else "a number"
            raise UsageError(f"{name} takes {kind}, not {value!r}") from None
        if name == "max-tokens":
            self.max_tokens = int(number) if number > 0 else None
        elif name == "seed":
            if not -1 <= number <= MAX_SEED:
                raise UsageError(f"seed {value}: 0 to {MAX_SEED}, or -1 for a new one each time")
            self.seed = int(number) if number >= 0 else None
        else:
            changed: dict[str, Any] = {SETTINGS[name]: number}
            self.sampling = replace(self.sampling, **changed)

    def _settings(self) -> list[list[str]]:
        rows = [[name, f"{getattr(self.sampling, field):g}"] for name, field in SETTINGS.items()]
        rows[-1][1] = "random" if self.seed is None else str(self.seed)
        rows.append(["max-tokens", str(self.max_tokens or "none")])
        rows.append(["stop", " ".join(map(repr, self.stop)) or "none"])
        return rows

    def show(self, argument: str) -> None:
        rows = [
            ["model", self.name],
            ["draft", self.draft or "none"],
            ["context", f"{self.engine.ctx_size} tokens"],
            ["messages", str(len(self.messages))],
            ["system", self.system or "none"],
            *self._settings(),
        ]
        click.echo(table(rows))
        say(str(self.engine.plan))

    def stats(self, argument: str) -> None:
        stats = self.engine.stats()
        click.echo(table(in_words(stats)))
        for line in stats["warnings"] + stats["notices"]:
            say(line)

    def save(self, argument: str) -> None:
        path = _path(argument, "/save")
        if path.exists():
            try:
                load_conversation(path)
            except SpmoeError:
                raise UsageError(
                    f"{path} exists and is not a saved conversation: choose another name"
                ) from None
        save_conversation(
            path,
            {
                "spmoe-lite conversation": 1,
                "model": self.name,
                "system": self.system,
                "messages": self.messages,
            },
        )
        note(f"saved {len(self.messages)} messages to {path}")

    def load(self, argument: str) -> None:
        path = _path(argument, "/load")
        saved = load_conversation(path)
        self.messages = saved["messages"]
        self.system = saved["system"]
        asked = [m["content"] for m in self.messages if m["role"] == "user"]
        self._asked = asked[-1] if asked else None
        note(f"{len(self.messages)} messages from {path}")

    def leave(self, argument: str) -> None:
        self._leaving = True


class Command:
    """One line of /help: what runs, what it takes, what it is for."""

    def __init__(self, run: Callable[[Repl, str], None], takes: str, about: str) -> None:
        self.run, self.takes, self.about = run, takes, about


COMMANDS = {
    "help": Command(Repl.help, "", "this list"),
    "clear": Command(Repl.clear, "", "forget the conversation"),
    "regen": Command(Repl.regen, "", "answer the last question again"),
    "system": Command(Repl.set_system, "[TEXT]", "show or set the system prompt, - removes it"),
    "set": Command(Repl.change, "[NAME VALUE]", "show or change temp, top-k, seed, ..."),
    "show": Command(Repl.show, "", "the model, its plan, the settings"),
    "stats": Command(Repl.stats, "", "what was computed and moved so far"),
    "save": Command(Repl.save, "FILE", "write the conversation to a file"),
    "load": Command(Repl.load, "FILE", "go on from a saved conversation"),
    "exit": Command(Repl.leave, "", "leave (also /bye, /quit, Ctrl-D)"),
}


def answer_filter() -> Callable[[str], str]:
    """What stdout gets of an answer: all of it in a pipe, on a terminal harmless and wrapped."""
    if not is_terminal(sys.stdout):
        return str
    if not can_draw(sys.stdout):
        return printable
    wrap = WordWrap(columns())
    return lambda piece: wrap.push(printable(piece))


def new_seed() -> int:
    return int.from_bytes(os.urandom(4), "little")


def save_conversation(path: Path, saved: dict[str, Any]) -> None:
    """Write JSON; a crash or a full disk leaves the old file."""
    write_whole(path, json.dumps(saved, ensure_ascii=False, indent=1) + "\n")


def load_conversation(path: Path) -> dict[str, Any]:
    """A saved conversation with checked roles and texts; `DamagedError` for anything else."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_SAVED_BYTES + 1)  # of a device the size says nothing
        if len(data) > MAX_SAVED_BYTES:
            raise DamagedError(f"{path} is not a saved conversation: larger than 64 MiB")
        saved = json.loads(data.decode("utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no file {path}") from None
    except OSError as error:
        raise SpmoeError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        raise DamagedError(f"{path} is not a saved conversation: not JSON") from None
    if not isinstance(saved, dict) or saved.get("spmoe-lite conversation") != 1:
        raise DamagedError(f"{path} is not a saved conversation")
    messages, system = saved.get("messages"), saved.get("system")
    turns = ["user", "assistant"]
    good = isinstance(messages, list) and all(
        isinstance(m, dict)
        and set(m) == {"role", "content"}
        and m["role"] == turns[i % 2]
        and isinstance(m["content"], str)
        for i, m in enumerate(messages)
    )
    if not good or len(messages or ()) % 2 or not isinstance(system, str | None):
        raise DamagedError(f"{path} is not a saved conversation: its messages do not alternate")
    return {"messages": messages, "system": system}


def _command(text: str) -> tuple[str, str] | None:
    """`/word rest` as (word, rest); None for text, a path such as `/etc/hosts` included."""
    if not text.startswith("/") or "\n" in text:
        return None
    word, _, rest = text[1:].partition(" ")
    if not word or not (word == "?" or word.replace("-", "").isalpha()):
        return None
    return word.lower(), rest.strip()


def _path(argument: str, command: str) -> Path:
    if not argument or "\0" in argument:
        raise UsageError(f"{command} takes a file name: {command} talk.json")
    return Path(os.path.expanduser(argument.strip("\"'")))


def _unescape(value: str) -> str:
    """`"\\n"` in a typed stop string means the line end."""
    return value.strip('"').replace("\\n", "\n").replace("\\t", "\t")


def _can_write(history: Path) -> bool:
    """Make the history file readable by its owner only; False where it cannot be kept."""
    try:
        history.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError:
        return False
    return True
