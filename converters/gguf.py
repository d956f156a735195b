"""Read a GGUF file as if it were a Hugging Face checkpoint.

`GgufCheckpoint` offers what `source.Checkpoint` offers: `config` and `generation_config` in the
spelling of Hugging Face, tensor names with dtype and shape, `read(name)`, and the text files, among
them a
`tokenizer.json` rebuilt from the metadata (`gguf_tokenizer.py`). It holds for the `llama`
architecture, which is how Llama, Mistral and Mixtral models are written: dense, experts stacked
(`ffn_up_exps`) or one by one (`ffn_up.3`), heads tied or not, whole or split into `-00001-of-00003`
parts.

The rows of q and k are stored for rotation of neighbouring pairs, row
order (head, pair, half); Hugging Face rotates halves, (head, half, pair). An expert of a
stack is read alone, so that memory holds one matrix. Quantised matrices are read as fp32, or with
their codes where a scheme of ours holds them.

Left out: other architectures, adapters. `gguf_file.py` reads the format itself.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType

from spmoe_lite.converters.gguf_file import (
    MAGIC,
    PLAIN,
    SCHEMES,
    GgufTensor,
    Metadata,
    read_blocks,
    read_header,
    read_rows,
    repack_blocks,
    split_parts,
)
from spmoe_lite.converters.gguf_tokenizer import tokenizer_files
from spmoe_lite.converters.source import Piece, SourceTensor
from spmoe_lite.errors import DamagedError, NotFoundError, UnsupportedError
from spmoe_lite.files import naming
from spmoe_lite.manifest import printable
from spmoe_lite.precision import Scheme
from spmoe_lite.quant import QuantizedMatrix

MAX_EXPERTS = 4096
DTYPE_NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
_EXPERT = {"ffn_gate": "w1", "ffn_down": "w2", "ffn_up": "w3"}
_IGNORED = re.compile(
    r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|blk\.\d+\.rope_freqs\.weight"
)

# Metadata that changes the mathematics in a way the engine does not have, with the value that means
# "off".
_NEUTRAL = {
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "final_logit_softcapping": 0.0,
    "attn_logit_softcapping": 0.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "use_parallel_residual": False,
    "expert_shared_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Where a Hugging Face tensor comes from: `rows` rows of `tensor` from `row` on, to be laid out
    as
    `shape`; `heads` > 0: its rows are in the order of paired rotation and are put back."""

    tensor: GgufTensor
    row: int
    rows: int
    shape: tuple[int, ...]
    heads: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN.get(self.tensor.kind, torch.float32)

    @property
    def held(self) -> str | None:
        """The scheme of ours that is sure to hold just these values."""
        scheme = SCHEMES.get(self.tensor.kind)
        return None if scheme is None or scheme.zeros else str(scheme)


def _put_back(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k of so many heads, from the order (head, pair, half) to (head, half, pair)."""
    pairs = rows.view(heads, len(rows) // heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(len(rows), -1)


def is_gguf(path: Path) -> bool:
    """True if `path` is a file that begins with the magic of GGUF, or is named `*.gguf`."""
    if not path.is_file() or path.suffix.lower() == ".gguf":
        return path.is_file()
    with naming(path, "read"), path.open("rb") as handle:
        return handle.read(4) == MAGIC


class GgufCheckpoint:
    """A `.gguf` file as a `Source` (source.py). Opening reads and checks the headers, no tensor.

    Raises `NotFoundError` (no file, or a part of a split file is missing), `DamagedError` (not a
    GGUF file, short, or inconsistent), `UnsupportedError` (what would run wrongly, named).
    """

    ignored: list[str] = []

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.label = printable(self.path.name)
        if not self.path.is_file():
            raise NotFoundError(f"{self.path}: no such file")
        headers = [read_header(part) for part in split_parts(self.path)]
        self._meta = Metadata(headers[0].metadata, self.label)
        count = self._meta.get("split.count", int, 1)
        if len(headers) == 1 and count > 1:
            raise UnsupportedError(
                f"{self.label}: one of {count} parts of a split model; give the "
                f"parts their names MODEL-00001-of-00003.gguf back, or merge them with "
                f"llama-gguf-split"
            )
        self._headers = headers
        self.gguf_tensors: dict[str, GgufTensor] = {}
        for header in headers:
            for name, tensor in header.tensors.items():
                if name in self.gguf_tensors:
                    raise DamagedError(f"{self.label}: tensor {name} is in two parts")
                self.gguf_tensors[name] = tensor
        self.config: dict[str, Any] = _config(self._meta, self.gguf_tensors)
        self.generation_config: dict[str, Any] | None = _generation_config(self._meta)
        self._parts = _name_parts(self.gguf_tensors, self.config, self.label)
        self.tensors = {
            name: SourceTensor(
                DTYPE_NAMES[part.dtype],
                part.shape,
                part.tensor.path.name,
                part.tensor.offset,
                quantised=part.tensor.kind not in PLAIN,
                held=part.held,
            )
            for name, part in self._parts.items()
        }

    def identity(self) -> dict[str, Any]:
        """id, revision, files with sizes, and a hash of the headers and of the start of each
        tensor."""
        digest = hashlib.sha256()
        for header in self._headers:
            digest.update(header.sha256)
            with naming(header.path, "read"), header.path.open("rb") as handle:
                for tensor in header.tensors.values():
                    handle.seek(tensor.offset)
                    digest.update(handle.read(min(tensor.size, 4096)))
        return {
            "id": self.label,
            "revision": None,
            "files": {printable(header.path.name): header.size for header in self._headers},
            "fingerprint": digest.hexdigest(),
        }

    def read(
        self,
        name: str,
        index: int | None = None,
        rows: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`tensor`, `tensor[index]`, or rows of either, into `out` if given; blocks become fp32."""
        part = self._parts[name]
        start, count, shape = part.row, part.rows, part.shape
        if index is not None:
            count, shape = count // shape[0], shape[1:]
            start += index * count
        rows = range(shape[0]) if rows is None else rows
        if out is None:
            out = torch.empty((len(rows), *shape[1:]), dtype=part.dtype)
        assert out.shape == (len(rows), *shape[1:]) and out.dtype == part.dtype
        if part.heads:
            self._read_rotated(part, rows, out)
        elif len(shape) == 1:  # a vector lies in one row of the file
            whole = torch.empty((1, shape[0]), dtype=part.dtype)
            read_rows(part.tensor, start, whole)
            out.copy_(whole[0, rows.start : rows.stop])
        else:
            each = count // shape[0]
            read_rows(part.tensor, start + rows.start * each, out.view(len(rows) * each, -1))
        return out

    def _read_rotated(self, part: _Part, rows: range, out: torch.Tensor) -> None:
        """Rows of q or k: the heads they lie in are read whole, then put in Hugging Face's
        order."""
        head = part.rows // part.heads
        first, last = rows.start // head, -(-rows.stop // head)
        pairs = torch.empty((last - first) * head, part.tensor.shape[-1], dtype=part.dtype)
        read_rows(part.tensor, first * head, pairs)
        halves = _put_back(pairs, last - first)
        out.copy_(halves[rows.start - first * head :][: len(rows)].view(out.shape))

    def read_quantized(self, piece: Piece, scheme: Scheme) -> QuantizedMatrix | None:
        """Q4_0, Q8_0 and fitting Q4_1 with their codes, if asked for in just that scheme."""
        part = self._parts[piece.name]
        if SCHEMES.get(part.tensor.kind) != scheme:
            return None
        assert piece.index is None and piece.rows is None  # an expert of a stack has its own name
        blocks = read_blocks(part.tensor, part.row, part.rows)
        if part.heads:
            blocks = _put_back(blocks, part.heads)
        return repack_blocks(blocks, part.tensor.kind)

    def text_files(self) -> dict[str, bytes]:
        """tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json
        and, if there is one, chat_template.jinja; made once."""
        return dict(self._text_files)

    @cached_property
    def _text_files(self) -> dict[str, bytes]:
        generation = json.dumps(self.generation_config, indent=1).encode("utf-8")
        files = tokenizer_files(self._meta, self.config["max_position_embeddings"])
        return files | {"generation_config.json": generation}

    def close(self) -> None:
        """Nothing is held open between reads."""


# --- what the model is
# --------------------------------------------------------------------------------


def _config(meta: Metadata, tensors: dict[str, GgufTensor]) -> dict[str, Any]:
    """config.json of the model; ranges are `ModelConfig.from_hf`'s business."""
    arch = meta.need("general.architecture", str)
    if arch != "llama":
        raise UnsupportedError(
            f"{meta.file}: architecture {arch!r:.40} is not supported; Llama, Mistral and Mixtral "
            f"models (architecture 'llama') are"
        )
    for key, neutral in _NEUTRAL.items():
        value = meta.get(f"llama.{key}", type(neutral), neutral)
        if value != neutral:
            raise UnsupportedError(f"{meta.file}: llama.{key} = {value} is not supported")
    embedding = tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise DamagedError(f"{meta.file}: no matrix token_embd.weight; not a whole language model")

    hidden = meta.need("llama.embedding_length", int)
    heads = meta.per_layer("llama.attention.head_count")
    kv_heads = meta.per_layer("llama.attention.head_count_kv", heads)
    experts = meta.get("llama.expert_count", int, 0)
    if not 0 <= experts <= MAX_EXPERTS:
        raise DamagedError(f"{meta.file}: llama.expert_count is {experts}")
    window = meta.get("llama.attention.sliding_window", int, 0)
    width = meta.per_layer("llama.feed_forward_length")
    if experts:
        width = meta.get("llama.expert_feed_forward_length", int, width)
    if heads < 1 or kv_heads < 1 or heads > hidden:
        raise DamagedError(
            f"{meta.file}: {heads} heads, {kv_heads} KV heads for hidden size {hidden}"
        )
    head_dim = meta.get("llama.attention.key_length", int, hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (value := meta.get(key, int, head_dim)) != head_dim:
            raise UnsupportedError(
                f"{meta.file}: {key} is {value}, the heads are {head_dim} wide; such models "
                f"are not supported"
            )
    family = "mixtral" if experts else "mistral" if window else "llama"
    config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": meta.need("llama.block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _short(meta.need("llama.attention.layer_norm_rms_epsilon", float)),
        "max_position_embeddings": meta.need("llama.context_length", int),
        "rope_theta": _short(meta.get("llama.rope.freq_base", float, 10000.0)),
        "rope_scaling": None,
        "sliding_window": window or None,
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": any(name.endswith("attn_q.bias") for name in tensors),
        "torch_dtype": "float32",
    }
    if experts:
        config["num_local_experts"] = experts
        config["num_experts_per_tok"] = meta.need("llama.expert_used_count", int)
    config["rope_scaling"] = _rope_scaling(meta, tensors, config["rope_theta"], head_dim)
    return config | _generation_config(meta)


def _short(value: float) -> float:
    """The shortest decimal that is the same fp32 number: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    meta: Metadata, tensors: dict[str, GgufTensor], theta: float, head_dim: int
) -> dict[str, Any] | None:
    freqs = tensors.get("rope_freqs.weight")
    if freqs is not None:
        return _llama3_scaling(freqs, theta, head_dim)
    kind = meta.get("llama.rope.scaling.type", str, "")
    factor = meta.get("llama.rope.scaling.factor", float, 0.0) or meta.get(
        "llama.rope.scale_linear", float, 0.0
    )
    if kind in ("", "none", "linear"):
        linear = kind != "none" and factor not in (0.0, 1.0)
        return {"rope_type": "linear", "factor": _short(factor)} if linear else None
    raise UnsupportedError(
        f"{meta.file}: rope scaling {kind!r:.40} is not supported; linear and llama3 are"
    )


def _llama3_scaling(freqs: GgufTensor, theta: float, head_dim: int) -> dict[str, Any]:
    """The parameters behind `rope_freqs.weight`: the file keeps only the divisor of each frequency.

    Wavelengths below original/high stay (divisor 1), those above original/low are divided by
    `factor`, between them the inverse is interpolated. All published models have low 1, high 4,
    original 8192; the factor is the largest divisor. The guess is checked against every stored
    divisor.
    """
    if freqs.shape != (head_dim // 2,) or freqs.kind is not GGMLQuantizationType.F32:
        raise DamagedError(
            f"{freqs.path.name}: rope_freqs.weight is {freqs.kind.name} {list(freqs.shape)}, "
            f"not F32 [{head_dim // 2}]"
        )
    stored = torch.empty(1, head_dim // 2)
    read_rows(freqs, 0, stored)
    factor, low, high, original = _short(float(stored.max())), 1.0, 4.0, 8192
    wavelength = 2 * math.pi * theta ** (torch.arange(0, head_dim, 2).double() / head_dim)
    smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if not torch.allclose(stored[0].double(), expected, rtol=1e-4):
        raise UnsupportedError(
            f"{freqs.path.name}: rope_freqs.weight is not Llama 3's scaling (low 1, high 4, "
            f"original 8192)"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _generation_config(meta: Metadata) -> dict[str, Any]:
    """Begin and end tokens; every token that ends a turn ends an answer."""
    ends = [meta.get(f"tokenizer.ggml.{end}_token_id", int) for end in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    return {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
    }


def _name_parts(
    tensors: dict[str, GgufTensor], config: dict[str, Any], file: str
) -> dict[str, _Part]:
    """Hugging Face name -> where it lies. A tensor nobody would use means another model:
    refused."""
    layers, experts = config["num_hidden_layers"], config.get("num_local_experts", 0)
    rotated = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    parts: dict[str, _Part] = {}

    def add(
        name: str, tensor: GgufTensor, index: int = 0, shape: Any = None, heads: int = 0
    ) -> None:
        shape = tensor.shape if shape is None else shape
        row = tensor.shape[-1]
        rows = math.prod(shape) // row
        if heads and (shape[0] % (2 * heads)):
            raise DamagedError(f"{file}: {tensor.name} has {shape[0]} rows for {heads} heads")
        if name in parts:
            raise DamagedError(f"{file}: two tensors for {name}, one of them {tensor.name}")
        parts[name] = _Part(tensor, index * rows, rows, shape, heads)

    for name, tensor in tensors.items():
        if name in _TOP:
            add(_TOP[name], tensor)
            continue
        match = re.fullmatch(r"blk\.(\d{1,5})\.(\w+)(?:\.(\d{1,5}))?\.(weight|bias)", name)
        if match is None or int(match[1]) >= layers:
            if _IGNORED.fullmatch(name):
                continue
            raise UnsupportedError(f"{file}: tensor {name} belongs to no model this program runs")
        layer, inner, expert, end = f"model.layers.{int(match[1])}", match[2], match[3], match[4]
        stack = _EXPERT.get(inner.removesuffix("_exps")) if inner.endswith("_exps") else None
        at = f"{layer}.block_sparse_moe.experts"
        if stack and end == "weight" and expert is None:
            if len(tensor.shape) != 3 or tensor.shape[0] != experts:
                raise DamagedError(f"{file}: {name} is {list(tensor.shape)}, not {experts} experts")
            for index in range(experts):
                add(f"{at}.{index}.{stack}.weight", tensor, index, tensor.shape[1:])
        elif inner in _EXPERT and end == "weight" and expert is not None and int(expert) < experts:
            add(f"{at}.{int(expert)}.{_EXPERT[inner]}.weight", tensor)
        elif inner in _LAYER and expert is None and (end == "weight" or inner.startswith("attn_")):
            heads, shape = rotated.get(inner, 0), tensor.shape
            if end == "bias" and heads:  # a vector of rows, one number each
                add(f"{layer}.{_LAYER[inner]}.bias", _as_column(tensor), 0, shape, heads)
            else:
                add(f"{layer}.{_LAYER[inner]}.{end}", tensor, heads=heads)
        elif not _IGNORED.fullmatch(name):
            raise UnsupportedError(f"{file}: tensor {name} belongs to no model this program runs")
    return parts


def _as_column(tensor: GgufTensor) -> GgufTensor:
    """A vector [N] as [N, 1], so that its entries can change order as rows do."""
    if tensor.kind not in PLAIN or len(tensor.shape) != 1:
        raise UnsupportedError(f"{tensor.path.name}: {tensor.name} is not a plain vector")
    return GgufTensor(
        tensor.name, tensor.path, tensor.kind, (*tensor.shape, 1), tensor.offset, tensor.size
    )
