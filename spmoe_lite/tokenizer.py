"""Text to token ids and back: a model's `tokenizer.json`, and a detokenizer that works token by token.

Encoding is the `tokenizers` library's, with three things settled here: exactly one BOS where the
model wants one and never two; no truncation, padding or dropout that a checkpoint may have left in
its file; and the end ids, which are the union of all places a checkpoint names them.

Decoding one id at a time breaks text: an emoji is spread over several byte tokens, and the first
space of a SentencePiece text is dropped only at its start. `Detokenizer` therefore keeps the state
that the library's one-shot decoders have implicitly. Two shapes cover the Llama, Mistral and Mixtral
families:

    ByteLevel             pieces spell bytes (GPT-2's table); the bytes of all tokens are one UTF-8 stream
    Replace, ByteFallback, Fuse, Strip  (or Metaspace)
                          pieces are text, <0xNN> are bytes; a run of byte pieces is text if the whole
                          run is valid UTF-8 and one replacement mark per byte if not, so nothing
                          of a run can be shown before it ends

Its output is held back by no more than that, costs constant time per token, and when joined equals
`decode` of all ids. Other decoders are refused by name. `clean_up_tokenization_spaces` is ignored on
purpose: it deletes spaces that the model wrote ("a ." becomes "a."), and cannot be streamed.

Files are untrusted: the library panics on some broken ones with an exception outside `Exception`,
which becomes a `DamagedError` that names the file. Special tokens spelled out in a user's text are
read as special tokens, as the reference library does.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tokenizers

from spmoe_lite.config import ModelConfig
from spmoe_lite.errors import DamagedError, NotFoundError, SpmoeError, UnsupportedError, UsageError

MAX_FILE_BYTES = 64 << 20  # the largest published tokenizer.json is about 35 MB
MAX_TOKENS = 1 << 22  # the largest published vocabulary is about 2^18

# Classes of the reference library that add a BOS unless their configuration says no.
_ADD_BOS_CLASSES = {"LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "GemmaTokenizer"}

_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)

T = TypeVar("T")


class Tokenizer:
    """One model's tokenizer.

    num_tokens: entries including added tokens; an id of this or above has no text and must never be
        sampled. missing_ids: ids below it that no entry uses (usually none).
    bos_id, adds_bos: the BOS if the model names one, and whether text starts with it.
    eos_ids: every id that ends an answer, sorted.
    special_tokens: "bos_token", "eos_token", ... to their text, as chat templates want them.
    """

    def __init__(self, inner: tokenizers.Tokenizer, path: Path, pieces: list[str | None]) -> None:
        """Use `load`. `pieces[id]` is the text of an entry as spelled in the file, None for a hole."""
        self.path = path
        self._inner = inner
        self._pieces = pieces
        self._rules = _Rules.parse(inner, path)
        self._added = _guard(inner.get_added_tokens_decoder, path)
        # What the decoder is given: for an added token the library may have normalised the text.
        self._spelled = list(pieces)
        for i in self._added:
            self._spelled[i] = inner.id_to_token(i)
        self.num_tokens = len(pieces)
        self.missing_ids = tuple(i for i, piece in enumerate(pieces) if piece is None)
        self.special_tokens: dict[str, Any] = {}
        self.bos_id: int | None = None
        self.adds_bos = False
        self.eos_ids: tuple[int, ...] = ()
        self._hidden: frozenset[int] = frozenset()

    @classmethod
    def load(cls, folder: Path, config: ModelConfig | None = None) -> Tokenizer:
        """Read `tokenizer.json` and what stands beside it in a pack or checkpoint folder.

        `config` adds its BOS and end ids and the number of embedding rows, which is checked.
        Raises NotFoundError, UnsupportedError (slow-only folders, tokens beyond the rows, unknown
        decoders), DamagedError.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise _no_tokenizer(folder)
        inner, pieces = _read_tokenizer(path)
        settings = _read_json(folder / "tokenizer_config.json")
        special_map = _read_json(folder / "special_tokens_map.json")
        generation = _read_json(folder / "generation_config.json")
        _add_listed_tokens(inner, pieces, settings, folder / "tokenizer_config.json")

        self = cls(inner, path, pieces)
        self._set_specials(settings, special_map, generation, config)
        if config is not None:
            self.check_rows(config.vocab_size)
        return self

    def _set_specials(
        self,
        settings: dict[str, Any],
        special_map: dict[str, Any],
        generation: dict[str, Any],
        config: ModelConfig | None,
    ) -> None:
        for name in _SPECIAL_NAMES:
            text = _token_text(settings.get(name)) or _token_text(special_map.get(name))
            if text:
                self.special_tokens[name] = text
        extra = settings.get("additional_special_tokens")
        if isinstance(extra, list):
            texts = [text for text in map(_token_text, extra) if text]
            self.special_tokens["additional_special_tokens"] = texts

        prefix = self._post_processor_prefix()
        self.bos_id = self._id_of("bos_token")
        if self.bos_id is None and prefix:
            self.bos_id = prefix[0]
        add_bos = settings.get("add_bos_token")
        if not isinstance(add_bos, bool):
            add_bos = bool(prefix) or settings.get("tokenizer_class") in _ADD_BOS_CLASSES
        if self.bos_id is None and add_bos and config is not None:
            self.bos_id = config.bos_token_id
        if self.bos_id is not None and not 0 <= self.bos_id < self.num_tokens:
            self.bos_id = None
        self.adds_bos = add_bos and self.bos_id is not None
        if self.bos_id is not None:
            self.special_tokens.setdefault("bos_token", self._pieces[self.bos_id] or "")

        eos = set(_ids(generation.get("eos_token_id")))
        eos.update(config.eos_token_ids if config is not None else ())
        own_eos = self._id_of("eos_token")
        if own_eos is not None:
            eos.add(own_eos)
        self.eos_ids = tuple(sorted(i for i in eos if 0 <= i < self.num_tokens))
        if self.eos_ids:
            first = own_eos if own_eos is not None else self.eos_ids[0]
            self.special_tokens.setdefault("eos_token", self._pieces[first] or "")

        hidden = {i for i, token in self._added.items() if token.special}
        hidden.update(self.eos_ids)
        for name in _SPECIAL_NAMES:
            if name in self.special_tokens and (i := self._id_of(name)) is not None:
                hidden.add(i)
        self._hidden = frozenset(hidden)

    def _post_processor_prefix(self) -> list[int]:
        """The ids that the file's own post-processor puts before any text."""
        with_special = _guard(lambda: self._inner.encode("a").ids, self.path)
        plain = _guard(lambda: self._inner.encode("a", add_special_tokens=False).ids, self.path)
        for start in range(len(with_special) - len(plain) + 1):
            if with_special[start : start + len(plain)] == plain:
                return list(with_special[:start])
        return []

    def _id_of(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        if text is None:
            return None
        found: int | None = self._inner.token_to_id(text)
        return found

    def encode(self, text: str, *, bos: bool = True) -> list[int]:
        """Ids of `text`. With `bos`, exactly one BOS in front if the model wants one.

        A text that already starts with the BOS spelled out keeps one; several become one.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise UsageError(
                f"text is not valid Unicode: a lone surrogate at character {error.start}; remove it"
            ) from None
        encoding = _guard(lambda: self._inner.encode(text, add_special_tokens=False), self.path)
        ids: list[int] = encoding.ids
        if self.bos_id is None:
            return ids
        text_start = 0
        while text_start < len(ids) and ids[text_start] == self.bos_id:
            text_start += 1
        wanted = bos and (self.adds_bos or text_start > 0)
        return [self.bos_id] * wanted + ids[text_start:] if bos else ids

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; ids without text are left out, special tokens and end ids unless `special`."""
        shown = [i for i in ids if self._shows(i, special)]
        text: str = _guard(lambda: self._inner.decode(shown, skip_special_tokens=False), self.path)
        return text

    def _shows(self, token_id: int, special: bool) -> bool:
        if not 0 <= token_id < self.num_tokens or self._pieces[token_id] is None:
            return False
        return special or token_id not in self._hidden

    def stream(self, *, special: bool = False, after: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for ids that come one at a time.

        `after`: ids that the text continues (a prompt that is completed); they are not emitted, but
        a space at the seam is kept.
        """
        return Detokenizer(self, special=special, after=after)

    def pieces(self) -> list[str]:
        """Every entry as the file spells it, by id; "" for an id that no entry uses."""
        return [piece or "" for piece in self._pieces]

    def check_rows(self, rows: int) -> None:
        """Refuse a tokenizer that can produce an id for which the model has no embedding row."""
        if self.num_tokens > rows:
            raise UnsupportedError(
                f"{self.path.name} has a token {self._pieces[rows]!r} with id {rows}, but the model has "
                f"{rows} embedding rows; remove the tokens from id {rows} to {self.num_tokens - 1}"
            )

    def check_draft(self, draft: Tokenizer, target_rows: int, draft_rows: int) -> None:
        """Refuse a draft whose ids do not mean what this target's ids mean.

        Every entry of the target must be the same piece in the draft; entries and rows that only
        the draft has, at its end, are allowed: ids of `num_tokens` of the target and above are never
        proposed. BOS and end ids must agree too. Raises UnsupportedError with the first id.
        """
        self.check_rows(target_rows)
        draft.check_rows(draft_rows)
        wanted, found = self._pieces, draft._pieces
        if found[: len(wanted)] != wanted:
            self._refuse_draft(found)
        if self.num_tokens > draft_rows:
            raise UnsupportedError(
                f"the draft has {draft_rows} embedding rows but the target {self.num_tokens} tokens; "
                f"choose a draft of the same family and version"
            )
        if self.bos_id is not None and draft.bos_id is not None and self.bos_id != draft.bos_id:
            raise UnsupportedError(
                f"the draft's BOS is id {draft.bos_id} and the target's id {self.bos_id}; "
                f"choose a draft of the same family and version"
            )
        if self.eos_ids and draft.eos_ids and not set(self.eos_ids) & set(draft.eos_ids):
            raise UnsupportedError(
                f"the draft ends at id {_list(draft.eos_ids)} and the target at id {_list(self.eos_ids)}; "
                f"choose a draft of the same family and version"
            )

    def _refuse_draft(self, found: list[str | None]) -> None:
        for i, piece in enumerate(self._pieces):
            other = found[i] if i < len(found) else None
            if piece != other:
                theirs = "nothing" if other is None else repr(other)
                ours = "nothing" if piece is None else repr(piece)
                raise UnsupportedError(
                    f"draft and target have different vocabularies: id {i} is {ours} in the target and "
                    f"{theirs} in the draft ({self.num_tokens} and {len(found)} tokens); "
                    f"choose a draft of the same family and version"
                )


class Detokenizer:
    """Text from ids that come one at a time; made by `Tokenizer.stream`.

    What `push` and `finish` return, joined, equals `Tokenizer.decode` of all ids, and holds whole
    characters only. Constant time per token, whatever came before.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool, after: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._rules = tokenizer._rules
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._run = bytearray()  # byte pieces since the last text piece
        self._first = True  # no token seen yet
        self._strip = list(self._rules.strip_start)  # characters still to drop at the start
        # The seam needs to know only that text came before, not which.
        for token_id in [i for i in after if tokenizer._shows(i, special)][-16:]:
            self.push(token_id)
        if not self._first:
            self._flush()
            self._strip = []

    def push(self, token_id: int) -> str:
        """Text that `token_id` completes; often "" while a character is incomplete."""
        if not self._tokenizer._shows(token_id, self._special):
            return ""
        piece = self._tokenizer._spelled[token_id] or ""
        first, self._first = self._first, False
        for change in self._rules.before:
            piece = change(piece, first)
        if self._rules.byte_level:
            return self._stripped(self._utf8.decode(_byte_level(piece)))
        if self._rules.byte_fallback and (byte := _fallback_byte(piece)) is not None:
            self._run.append(byte)
            return ""
        return self._flush() + self._stripped(self._changed(piece))

    def finish(self) -> str:
        """What is still held back; an incomplete character becomes replacement marks."""
        return self._flush()

    def _flush(self) -> str:
        if self._rules.byte_level:
            text = self._utf8.decode(b"", True)
            self._utf8.reset()
            return self._stripped(text)
        if not self._run:
            return ""
        run, self._run = bytes(self._run), bytearray()
        try:
            return self._stripped(self._changed(run.decode("utf-8")))
        except UnicodeDecodeError:
            return self._stripped("".join(self._changed("\ufffd") for _ in run))

    def _changed(self, piece: str) -> str:
        for change in self._rules.after:
            piece = change(piece, False)
        return piece

    def _stripped(self, text: str) -> str:
        """Drop what the decoder drops at the start of the whole text."""
        while self._strip and text:
            character, count = self._strip[0]
            dropped = 0
            while dropped < min(count, len(text)) and text[dropped] == character:
                dropped += 1
            rest = text[dropped:]
            if rest or dropped == count:
                self._strip.pop(0)
            else:
                self._strip[0] = (character, count - dropped)
            text = rest
        return text


Change = Callable[[str, bool], str]  # (piece, is it the first token) -> piece


class _Rules:
    """A decoder of the library as steps for one piece at a time.

    before: changes of a piece before its bytes are looked at; after: changes of what comes out of
    the byte fallback; strip_start: (character, how many at most) dropped from the start of the text.
    """

    def __init__(self) -> None:
        self.before: list[Change] = []
        self.after: list[Change] = []
        self.byte_level = False
        self.byte_fallback = False
        self.strip_start: list[tuple[str, int]] = []

    @classmethod
    def parse(cls, inner: tokenizers.Tokenizer, path: Path) -> _Rules:
        """Translate the `decoder` section of a file; UnsupportedError names one that cannot be streamed."""
        rules = cls()
        if inner.decoder is None:  # the library joins the pieces with spaces
            rules.before.append(lambda piece, first: piece if first else " " + piece)
            return rules
        state = json.loads(inner.decoder.__getstate__())
        fused = False
        for step in state["decoders"] if state["type"] == "Sequence" else [state]:
            if rules._add(step, fused):
                fused = fused or step["type"] in ("Fuse", "ByteLevel")
                continue
            raise UnsupportedError(
                f"{path.name} decodes with {step['type']!r}, which cannot be streamed here; "
                f"supported: ByteLevel, Metaspace, or Replace, ByteFallback, Fuse, Strip in this order"
            )
        return rules

    def _add(self, step: dict[str, Any], fused: bool) -> bool:
        """Take one step over; False if it cannot be done piece by piece at this place."""
        kind = step["type"]
        changes = self.after if self.byte_fallback else self.before
        if kind == "Fuse":
            return True
        if kind == "Strip" and step["stop"]:
            return False
        if kind == "Strip" and fused:
            self.strip_start.append((step["content"], step["start"]))
            return True
        if fused:
            return False
        if kind == "ByteLevel" and not self.byte_fallback:
            self.byte_level = True
        elif kind == "ByteFallback" and not self.byte_fallback:
            self.byte_fallback = True
        elif kind == "Replace" and step["pattern"].get("String"):
            changes.append(_replacing(step["pattern"]["String"], step["content"]))
        elif kind == "Strip":
            changes.append(_stripping(step["content"], step["start"]))
        elif kind == "Metaspace" and not self.byte_fallback:
            changes.append(_metaspace(step["replacement"], step.get("prepend_scheme", "always")))
        else:
            return False
        return True


def _replacing(old: str, new: str) -> Change:
    return lambda piece, first: piece.replace(old, new)


def _stripping(character: str, start: int) -> Change:
    def strip(piece: str, first: bool) -> str:
        left = 0
        while left < min(start, len(piece)) and piece[left] == character:
            left += 1
        return piece[left:]

    return strip


def _metaspace(replacement: str, prepend_scheme: str) -> Change:
    drops_first = prepend_scheme != "never"
    return lambda piece, first: piece.replace(replacement, "" if first and drops_first else " ")


def _byte_level_table() -> dict[int, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + i: byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_level_table()


def _byte_level(piece: str) -> bytes:
    """The bytes that a piece spells; a piece with any other character (an added token) is itself."""
    try:
        return bytes([_BYTE_OF[ord(character)] for character in piece])
    except KeyError:
        return piece.encode("utf-8")


_BYTE_PIECE = re.compile(r"<0x(\+?[0-9A-Fa-f]|[0-9A-Fa-f]{2})>")


def _fallback_byte(piece: str) -> int | None:
    """The byte of a piece like <0xE4>, else None."""
    match = _BYTE_PIECE.fullmatch(piece) if len(piece) == 6 else None
    return int(match[1], 16) if match else None


# Reading files


def _read_tokenizer(path: Path) -> tuple[tokenizers.Tokenizer, list[str | None]]:
    """The library's object and its pieces by id. DamagedError for anything that is not a tokenizer."""
    data = _read_bytes(path)
    content = _parse_json(data, path)
    _check_sections(content, path)
    inner = _guard(lambda: tokenizers.Tokenizer.from_str(data.decode("utf-8")), path)
    pieces = _pieces(content, inner, path)
    inner.no_truncation()  # both are left in files by accident and would cut or pad every prompt
    inner.no_padding()
    if getattr(inner.model, "dropout", None):
        inner.model.dropout = None
    return inner, pieces


def _check_sections(content: dict[str, Any], path: Path) -> None:
    """Refuse what the library reads but panics on later; a panic also writes to stderr."""
    processors = [content.get("post_processor")]
    for processor in processors:
        if not isinstance(processor, dict):
            continue
        if isinstance(processor.get("processors"), list):
            processors.extend(processor["processors"])
        known = processor.get("special_tokens")
        for part in (*_list_of(processor, "single"), *_list_of(processor, "pair")):
            special = part.get("SpecialToken") if isinstance(part, dict) else None
            name = special.get("id") if isinstance(special, dict) else None
            if isinstance(name, str) and not (isinstance(known, dict) and name in known):
                raise DamagedError(
                    f"{path}: its post-processor uses the token {name!r} and does not define it; "
                    f"fetch the file again"
                )
    model = content.get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix"):
        raise UnsupportedError(
            f"{path.name} marks pieces inside a word by a prefix, as BERT does; not supported"
        )


def _list_of(holder: dict[str, Any], key: str) -> list[Any]:
    value = holder.get(key)
    return value if isinstance(value, list) else []


def _pieces(content: dict[str, Any], inner: tokenizers.Tokenizer, path: Path) -> list[str | None]:
    """Entries by id from the parsed file, compared with what the library made of it."""
    vocab = content["model"].get("vocab", {})
    if isinstance(vocab, list):  # Unigram: [[piece, score], ...]
        ids = {entry[0]: i for i, entry in enumerate(vocab)}
    else:
        ids = dict(vocab)
    num_model = len(ids)
    if len(set(ids.values())) != num_model:
        raise DamagedError(f"{path} gives one id to several pieces; fetch the file again")
    for token in content.get("added_tokens") or []:
        ids[token["content"]] = token["id"]
    if not ids:
        raise DamagedError(f"{path} has no tokens; fetch the file again")
    highest = max(ids.values())
    if highest >= MAX_TOKENS:
        raise DamagedError(f"{path} has a token with id {highest}; at most {MAX_TOKENS} are read")
    pieces: list[str | None] = [None] * (highest + 1)
    for piece, i in ids.items():
        pieces[i] = piece
    for token in content.get("added_tokens") or []:
        if inner.token_to_id(token["content"]) != token["id"]:
            raise DamagedError(
                f"{path} lists the added token {token['content']!r} with id {token['id']}, which the entries "
                f"before it make impossible; fetch the file again"
            )
    return pieces


def _add_listed_tokens(
    inner: tokenizers.Tokenizer, pieces: list[str | None], settings: dict[str, Any], path: Path
) -> None:
    """Tokens that only tokenizer_config.json lists are part of the vocabulary too, in id order."""
    listed = settings.get("added_tokens_decoder")
    if not isinstance(listed, dict):
        return
    try:
        entries = sorted((int(i), token) for i, token in listed.items() if isinstance(token, dict))
    except (ValueError, TypeError):
        raise DamagedError(f"{path}: added_tokens_decoder has an id that is not a number") from None
    for i, token in entries:
        text = _token_text(token)
        if not text or inner.token_to_id(text) is not None:
            continue
        flags = {
            k: token[k]
            for k in ("lstrip", "rstrip", "normalized", "single_word", "special")
            if k in token
        }
        added = tokenizers.AddedToken(text, **{k: bool(v) for k, v in flags.items()})
        add = inner.add_special_tokens if flags.get("special") else inner.add_tokens
        _guard(lambda add=add, added=added: add([added]), path)  # type: ignore[misc]
        if inner.token_to_id(text) != i or i != len(pieces):
            raise DamagedError(
                f"{path} lists the token {text!r} with id {i}, but tokenizer.json has {len(pieces)} "
                f"entries; fetch both files again"
            )
        pieces.append(text)


def _no_tokenizer(folder: Path) -> SpmoeError:
    if not folder.is_dir():
        return NotFoundError(f"no folder {folder}")
    for name in ("tokenizer.model", "tekken.json", "vocab.json"):
        if (folder / name).is_file():
            return UnsupportedError(
                f"{folder} has {name} but no tokenizer.json; make one with the transformers library: "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            )
    return NotFoundError(f"no tokenizer.json in {folder}; copy it there from the model's page")


def _read_bytes(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise DamagedError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        return path.read_bytes()
    except OSError as error:
        raise NotFoundError(f"cannot read {path}: {error.strerror}") from None


def _parse_json(data: bytes, path: Path) -> dict[str, Any]:
    try:
        content = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedError(
            f"{path} is not valid JSON ({_one_line(error)}); fetch the file again"
        ) from None
    if not isinstance(content, dict):
        raise DamagedError(f"{path} is not a JSON object; fetch the file again")
    return content


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object beside the tokenizer; {} if there is no such file."""
    return _parse_json(_read_bytes(path), path) if path.is_file() else {}


def _guard(work: Callable[[], T], path: Path) -> T:
    """Run a call of the library. Its panics are not `Exception`s; interrupts pass through."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise DamagedError(
                f"{path} is not a tokenizer that can be read ({_one_line(error)}); fetch the file again"
            ) from None
        raise


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [i for i in values if isinstance(i, int) and not isinstance(i, bool)]


def _list(ids: Iterable[int]) -> str:
    return ", ".join(map(str, ids))
