"""Chat messages to token ids through the model's own template, run as what it is: a stranger's program.

A chat template is a jinja2 program from the checkpoint. It runs in jinja2's immutable sandbox with the
names the reference library gives it (`messages`, `add_generation_prompt`, special tokens,
`raise_exception`, `strftime_now`, `tojson`, loop controls, the `generation` block), so that the ids are
the reference's. It has a budget of time and memory (sandbox.py).

What templates refuse (documented behaviour; the first that the template accepts):
1. messages as given; 2. tool-call ids shortened to the nine letters or digits that Mistral's templates
demand, equal ids staying equal; 3. neighbouring messages of one role joined by an empty line; 4. system
text put in front of the next user message, an empty line between; 5. both. A template that drops the
system text silently is treated as if it refused it. What it still refuses is a UsageError.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmoe_lite.errors import DamagedError, NotFoundError, SpmoeError, UnsupportedError, UsageError
from spmoe_lite.sandbox import MAX_NESTING, MAX_SOURCE_CHARS, OverBudget, Program
from spmoe_lite.tokenizer import Tokenizer

_SYSTEM = ("system", "developer")

Message = Mapping[str, Any]


class ChatTemplate:
    """One model's chat template, compiled once; safe to use from several threads."""

    def __init__(self, source: str, tokenizer: Tokenizer, origin: str = "chat template") -> None:
        """`origin` names the file in messages. DamagedError if it is no template."""
        self.origin = origin
        self.source = source
        self._tokenizer = tokenizer
        try:
            self._program = Program(source)
        except ValueError as error:
            raise DamagedError(
                f"{origin} is not a valid template: {_one_line(error)}; give another with --template FILE"
            ) from None

    @classmethod
    def load(
        cls, folder: Path, tokenizer: Tokenizer, override: str | Path | None = None
    ) -> ChatTemplate | None:
        """`override`, else `chat_template.jinja`, else what tokenizer_config.json says; None if neither.

        Of several named templates the one called "default" counts.
        """
        folder = Path(folder)
        path = Path(override) if override is not None else folder / "chat_template.jinja"
        if override is not None or path.is_file():
            return cls(_read_source(path), tokenizer, path.name)
        path = folder / "tokenizer_config.json"
        if not path.is_file():
            return None
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise DamagedError(
                f"{path} is not valid JSON ({_one_line(error)}); fetch it again"
            ) from None
        source = _named(settings.get("chat_template") if isinstance(settings, dict) else None, path)
        return cls(source, tokenizer, f"{path.name} (chat_template)") if source else None

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where the answer starts, with exactly one BOS if the model has one."""
        return self._tokenizer.encode(self.render(messages))

    def render(self, messages: Sequence[Message]) -> str:
        """The text behind `encode`. UsageError for a history that the template cannot take."""
        history = _checked(messages)
        if _uses_tools(history) and "tool" not in self.source:
            raise UsageError(
                f"this model has no tool support: {self.origin} knows no tool messages; "
                f"send their content as user messages"
            )
        refusal = None
        for candidate in _candidates(history):
            try:
                text = self._run(candidate)
            except _Refusal as error:
                refusal = refusal or error
                continue
            if self._drops_system(candidate):
                refusal = refusal or _Refusal("it drops the system message")
                continue
            return text
        raise self._explain(history, refusal)

    def _drops_system(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the template leaves out system text, tried with words that stand for it."""
        marked, words = [], []
        for i, message in enumerate(messages):
            if message["role"] in _SYSTEM and message["content"]:
                words.append(f"system{i}text")
                message = message | {"content": words[-1]}
            marked.append(message)
        if not words:
            return False
        try:
            text = self._run(marked)
        except _Refusal:
            return False
        return not all(word in text for word in words)

    def _run(self, messages: list[dict[str, Any]]) -> str:
        """Render once; _Refusal for whatever the template raised."""
        variables = {
            **self._tokenizer.special_tokens,
            "messages": messages,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._program.run(variables, _size(messages))
        except OverBudget as error:
            raise DamagedError(
                f"{self.origin} is refused: {error}; give another template with --template FILE"
            ) from None
        except Exception as error:
            raise _Refusal(_one_line(error)) from None

    def _explain(self, history: list[dict[str, Any]], refusal: Exception | None) -> SpmoeError:
        """The error for a history that no candidate made acceptable."""
        spoken = [message for message in history if message["role"] not in _SYSTEM]
        if spoken and spoken[0]["role"] == "assistant":
            return UsageError(
                f"the conversation starts with an assistant message, which this model's template refuses "
                f"({refusal}); start with a user message"
            )
        try:
            self._run([{"role": "user", "content": "a"}])
        except _Refusal as error:
            return DamagedError(
                f"{self.origin} cannot be rendered even for one user message ({error}); "
                f"give another template with --template FILE"
            )
        if _uses_tools(history):
            return UsageError(f"this model's template refuses these tool messages: {refusal}")
        return UsageError(f"this model's template refuses these messages: {refusal}")


class _Refusal(Exception):
    """The template raised; the message says what."""


# Messages


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Plain copies of the messages, so that a template sees data and nothing else."""
    history = []
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise UsageError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f'message {i} must be like {{"role": "user", "content": "Hello"}}')
        copy = _plain(message, f"message {i}")
        content = copy.get("content")
        if not isinstance(content, str) and not (content is None and copy.get("tool_calls")):
            raise UsageError(
                f"message {i} ({copy['role']}) must have text as its content, not {type(content).__name__}"
            )
        history.append(copy)
    if not any(message["role"] not in _SYSTEM for message in history):
        raise UsageError("the conversation has no user message; add one")
    return history


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    if depth > MAX_NESTING:
        raise UsageError(f"{where} is nested more than {MAX_NESTING} deep")
    if isinstance(value, Mapping):
        return {str(k): _plain(v, where, depth + 1) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, where, depth + 1) for v in value]
    if isinstance(value, str):
        return _unicode(str(value), where)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    raise UsageError(
        f"{where} holds a {type(value).__name__}; only text, numbers, lists and objects"
    )


def _unicode(text: str, where: str) -> str:
    """The text; one that has no UTF-8 is refused here, while its characters are the caller's."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"{where} is not valid Unicode: a lone surrogate at character {error.start}; remove it"
        ) from None
    return text


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value) + 8
    if isinstance(value, dict):
        return 8 + sum(8 + _size(v) for v in value.values())
    return 8 + sum(map(_size, value)) if isinstance(value, list) else 8


def _candidates(history: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The history as given, then what templates that refuse it may accept; no duplicates."""
    short = _short_tool_ids(history)
    tried: list[list[dict[str, Any]]] = []
    for candidate in (history, short, _merged(short), _folded(short), _merged(_folded(short))):
        if candidate and candidate not in tried:
            tried.append(candidate)
            yield candidate


def _merged(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Neighbouring messages of one role become one, their texts joined by an empty line."""
    result: list[dict[str, Any]] = []
    for message in history:
        last = result[-1] if result else None
        if (
            last is not None
            and last["role"] == message["role"]
            and _is_text(last)
            and _is_text(message)
        ):
            result[-1] = last | {"content": _joined(last["content"], message["content"])}
        else:
            result.append(message)
    return result


def _folded(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """System text moves to the front of the next user message, or else to the end of the last one."""
    result: list[dict[str, Any]] = []
    waiting = ""
    for message in history:
        if message["role"] in _SYSTEM:
            waiting = _joined(waiting, message["content"])
        elif message["role"] == "user" and waiting:
            result.append(message | {"content": _joined(waiting, message["content"])})
            waiting = ""
        else:
            result.append(message)
    if waiting:
        for i in range(len(result) - 1, -1, -1):
            if result[i]["role"] == "user":
                result[i] = result[i] | {"content": _joined(result[i]["content"], waiting)}
                break
        else:
            return []
    return result


def _joined(first: str, second: str) -> str:
    return f"{first}\n\n{second}" if first and second else first or second


def _is_text(message: dict[str, Any]) -> bool:
    return message["role"] != "tool" and set(message) <= {"role", "content"}


def _uses_tools(history: list[dict[str, Any]]) -> bool:
    return any(message["role"] == "tool" or message.get("tool_calls") for message in history)


def _short_tool_ids(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Every tool-call id that is not nine letters or digits replaced by nine that depend on it alone."""
    result = []
    for message in history:
        message = dict(message)
        if isinstance(message.get("tool_call_id"), str):
            message["tool_call_id"] = _nine(message["tool_call_id"])
        if isinstance(message.get("tool_calls"), list):
            message["tool_calls"] = [
                call | {"id": _nine(call["id"])}
                if isinstance(call, dict) and isinstance(call.get("id"), str)
                else call
                for call in message["tool_calls"]
            ]
        result.append(message)
    return result


def _nine(call_id: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9]{9}", call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest(), "big")
    letters = string.ascii_letters + string.digits
    return "".join(letters[number // 62**i % 62] for i in range(9))


# Sources


def _read_source(path: Path) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(MAX_SOURCE_CHARS + 1)
    except ValueError:  # not UTF-8, or a name that no file can have
        raise DamagedError(f"{path} is not UTF-8 text; give another with --template FILE") from None
    except OSError as error:
        raise NotFoundError(f"cannot read the chat template {path}: {error.strerror}") from None
    if len(text) > MAX_SOURCE_CHARS:
        raise DamagedError(
            f"{path} has more than {MAX_SOURCE_CHARS} characters, too many for a chat template"
        )
    return text


def _named(value: Any, path: Path) -> str:
    """The template in tokenizer_config.json: text, or a list of {"name", "template"}, or an object."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        value = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise DamagedError(f"{path}: chat_template is neither text nor a list of named texts")
    if not value:
        return ""
    if "default" not in value and len(value) > 1:
        raise UnsupportedError(
            f"{path} has the chat templates {', '.join(sorted(map(str, value)))} but none named default; "
            f"save one to a file and give it with --template FILE"
        )
    text: str = value.get("default") or next(iter(value.values()))
    return text


def _one_line(error: object) -> str:
    text = " ".join(str(error).split())[:200]
    return text or type(error).__name__
