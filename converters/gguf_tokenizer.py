"""Rebuild a tokenizer from the metadata of a GGUF file, as the files Hugging Face writes.

Two kinds exist for the families we read:

- `gpt2`: byte-level BPE. Tokens and merges are in the file as they were; how text is cut before the
  merges
  (the pre-tokenizer) is only a name, `tokenizer.ggml.pre`. `PRE_TOKENIZERS` has the rules behind
  the names; a name that is not there is refused, since a wrong cut gives other tokens without any
  sign of it.
- `llama`: SentencePiece BPE. The file has pieces and scores and no merges. SentencePiece joins the
  pair
  whose joined piece has the highest score, leftmost first; so every split of a piece into two
  pieces is a merge, ranked by the piece's score. What is not in the vocabulary falls back to byte
  pieces `<0x41>`. One difference stays: if a piece can be split in two ways, SentencePiece takes
  the leftmost place in the text and merges take the lower rank; it needs runs like "aaa" to be
  seen, and the published tokenizer.json files of these families share it.

The result is loaded once with `tokenizers`, so that a broken vocabulary is refused here.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from spmoe_lite.converters.gguf_file import Metadata
from spmoe_lite.errors import DamagedError, UnsupportedError

MAX_MERGES = 1 << 22  # a vocabulary of 256000 pieces needs a million
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

# The splitting expressions of the models' own tokenizer.json files, and GPT-2's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


_DIGITS = {"type": "Digits", "individual_digits": True}
_LLAMA3_RULES = ([_split(_LLAMA3)], {"ignore_merges": True, "bos": True})
_DIGITS_RULES: tuple[list[dict[str, Any]], dict[str, Any]] = ([_DIGITS, _split(_GPT2)], {})

# name -> (steps before the bytes, differences from the plain case)
PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "gpt-2": ([_split(_GPT2)], {}),
    "smollm": _DIGITS_RULES,
    "starcoder": _DIGITS_RULES,
    "refact": _DIGITS_RULES,
    "llama-bpe": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "qwen2": ([_split(_QWEN2)], {"normalizer": {"type": "NFC"}}),
    "tekken": ([_split(_TEKKEN)], {"ignore_merges": True, "bos": True}),
    "default": (  # files from before the name was stored; the rules their readers use
        [
            _split(r"[\p{P}\$\+<=>\^~\|]+"),
            _split(_GPT2),
            _split(r"\p{N}+"),
            _split(r"[0-9][0-9][0-9]"),
        ],
        {},
    ),
}


def tokenizer_files(meta: Metadata, context: int) -> dict[str, bytes]:
    """File name -> contents: tokenizer.json, tokenizer_config.json, special_tokens_map.json and, if
    the metadata has one, chat_template.jinja. `context` is the model's limit in tokens."""
    kind = meta.get("tokenizer.ggml.model", str)
    if kind is None:
        raise UnsupportedError(f"{meta.file}: holds no tokenizer; fetch a complete file")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(
            f"{meta.file}: tokenizer kind {kind!r:.40} is not supported; 'gpt2' and 'llama' are"
        )
    vocabulary = _Vocabulary(meta)
    build = _byte_level if kind == "gpt2" else _sentencepiece
    tokenizer, add_bos = build(meta, vocabulary)
    text = json.dumps(tokenizer, ensure_ascii=False, indent=1)
    _check(text, vocabulary, meta.file)

    named = {f"{name}_token": vocabulary.named(name) for name in ("bos", "eos", "unk", "pad")}
    specials = {name: token for name, token in named.items() if token is not None}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": add_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": context,
    }
    files = {
        "tokenizer.json": text.encode("utf-8"),
        "tokenizer_config.json": _json(settings | specials),
        "special_tokens_map.json": _json(specials),
    }
    template = meta.get("tokenizer.chat_template", str)
    if template is not None:
        files["chat_template.jinja"] = template.encode("utf-8")
    return files


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode("utf-8")


class _Vocabulary:
    """Tokens with their types, and the tokens that have a role."""

    def __init__(self, meta: Metadata) -> None:
        self.meta = meta
        self.tokens: list[str] = meta.need("tokenizer.ggml.tokens", list)
        self.ids = {token: i for i, token in enumerate(self.tokens)}
        if twice := len(self.tokens) - len(self.ids):
            raise DamagedError(f"{meta.file}: {twice} tokens of the vocabulary are given twice")
        types = self.column("token_type")
        self.types = [NORMAL] * len(self.tokens) if types is None else types
        for role in ("bos", "eos", "eot", "eom"):
            if (token := self.role_id(role)) is not None and self.types[token] == NORMAL:
                self.types[token] = CONTROL  # files without types, or with wrong ones

    def column(self, name: str) -> list[Any] | None:
        """One of the per-token arrays, as long as the vocabulary."""
        key = f"tokenizer.ggml.{name}"
        values = self.meta.get(key, np.ndarray)
        if values is None:
            return None
        if len(values) != len(self.tokens):
            raise DamagedError(
                f"{self.meta.file}: {key} has {len(values)} entries for {len(self.tokens)} tokens"
            )
        result: list[Any] = values.tolist()
        return result

    def role_id(self, role: str) -> int | None:
        key = f"tokenizer.ggml.{ {'unk': 'unknown', 'pad': 'padding'}.get(role, role) }_token_id"
        token: int | None = self.meta.get(key, int)
        if token is not None and not 0 <= token < len(self.tokens):
            raise DamagedError(
                f"{self.meta.file}: {key} is {token}, the vocabulary has {len(self.tokens)} tokens"
            )
        return token

    def named(self, role: str) -> str | None:
        token = self.role_id(role)
        return None if token is None else self.tokens[token]

    def added(self) -> list[dict[str, Any]]:
        """Tokens found in the text before anything else, in the order of their ids."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        return [
            {"id": i, "content": token, **flags, "special": kind != USER_DEFINED}
            for i, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (UNKNOWN, CONTROL, USER_DEFINED) and token
        ]


def _byte_level(meta: Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    pre = meta.get("tokenizer.ggml.pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{meta.file}: pre-tokenizer {pre!r:.40} is not known; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}"
        )
    steps, differences = PRE_TOKENIZERS[pre]
    merges = []
    for merge in meta.need("tokenizer.ggml.merges", list):
        left, space, right = merge.partition(" ")
        if not (space and left in vocabulary.ids and right in vocabulary.ids):
            raise DamagedError(f"{meta.file}: merge {merge!r:.80} does not join two tokens")
        merges.append([left, right])
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": differences.get("ignore_merges", False),
        "vocab": vocabulary.ids,
        "merges": merges,
    }
    to_bytes = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    add_bos = meta.get("tokenizer.ggml.add_bos_token", bool, differences.get("bos", False))
    tokenizer = _shell(vocabulary, model, add_bos)
    tokenizer["normalizer"] = differences.get("normalizer")
    tokenizer["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*steps, to_bytes]}
    tokenizer["decoder"] = to_bytes
    return tokenizer, add_bos


def _sentencepiece(meta: Metadata, vocabulary: _Vocabulary) -> tuple[dict[str, Any], bool]:
    scores = vocabulary.column("scores")
    if scores is None:
        raise DamagedError(f"{meta.file}: metadata tokenizer.ggml.scores is missing")
    unknown = vocabulary.named("unk")
    if unknown is None and UNKNOWN in vocabulary.types:
        unknown = vocabulary.tokens[vocabulary.types.index(UNKNOWN)]
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": unknown,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": BYTE in vocabulary.types,
        "ignore_merges": False,
        "vocab": vocabulary.ids,
        "merges": _merges_of_scores(vocabulary, scores),
    }
    add_bos = meta.get("tokenizer.ggml.add_bos_token", bool, True)
    space_first = meta.get("tokenizer.ggml.add_space_prefix", bool, True)
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    prefix = [{"type": "Prepend", "prepend": "▁"}] if space_first else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if space_first else []
    tokenizer = _shell(vocabulary, model, add_bos)
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [*prefix, spaces]}
    tokenizer["decoder"] = {
        "type": "Sequence",
        "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
    }
    return tokenizer, add_bos


def _merges_of_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[list[str]]:
    """Merges, best first. Only ordinary pieces are joined or made by joining."""
    joined = {NORMAL, UNUSED, USER_DEFINED}
    pieces = {
        token: i for token, i in vocabulary.ids.items() if vocabulary.types[i] in joined and token
    }
    ranked = []
    for piece, i in pieces.items():
        if len(piece) > 256:
            raise DamagedError(f"{vocabulary.meta.file}: piece {i} has {len(piece)} characters")
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[i], i, left, right))
        if len(ranked) > MAX_MERGES:
            raise DamagedError(
                f"{vocabulary.meta.file}: its {len(pieces)} pieces join in over {MAX_MERGES} ways"
            )
    ranked.sort()
    return [[vocabulary.tokens[left], vocabulary.tokens[right]] for _, _, left, right in ranked]


def _shell(vocabulary: _Vocabulary, model: dict[str, Any], add_bos: bool) -> dict[str, Any]:
    """tokenizer.json around `model`, with the begin token in front if the model wants one."""
    bos = vocabulary.named("bos")
    post = None
    if add_bos and bos is not None:
        begin = {"SpecialToken": {"id": bos, "type_id": 0}}
        first = {"Sequence": {"id": "A", "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 1}}
        ids = [vocabulary.role_id("bos")]
        post = {
            "type": "TemplateProcessing",
            "single": [begin, first],
            "pair": [begin, first, {"SpecialToken": {"id": bos, "type_id": 1}}, second],
            "special_tokens": {bos: {"id": bos, "ids": ids, "tokens": [bos]}},
        }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": post,
        "decoder": None,
        "model": model,
    }


def _check(text: str, vocabulary: _Vocabulary, file: str) -> None:
    """Load the result as the engine will; ids must be those of the file."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(text)
        count = tokenizer.get_vocab_size(with_added_tokens=True)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # panics on the Rust side are no Exception
        reason = " ".join(str(error).split())[:200]
        raise DamagedError(f"{file}: its tokenizer cannot be rebuilt: {reason}") from None
    if count != len(vocabulary.tokens):
        raise DamagedError(
            f"{file}: its tokenizer has {count} tokens when rebuilt, not {len(vocabulary.tokens)}"
        )
