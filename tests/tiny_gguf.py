"""Tiny GGUF files for the tests, written with the format's own package.

The weights are those of `tests.tiny` under GGUF's names; the row order of q and k is changed here
by the format's definition, one row at a time, so that it does not share a line with the code that
undoes it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from tests import tiny

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
EXPERT = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}


def model(kind: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of a tiny model that GGUF can hold (widths in multiples of 32)."""
    config: dict[str, Any] = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "tie_word_embeddings": False,
    }
    if kind == "mixtral":
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    return config | changes


def pair_rows(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF stores them: row (pair p, half s) of a head is Hugging Face's row (half s, pair
    p)."""
    width = tensor.shape[0] // heads
    out = np.empty_like(tensor)
    for head in range(heads):
        for pair in range(width // 2):
            for half in range(2):
                out[head * width + 2 * pair + half] = tensor[
                    head * width + half * (width // 2) + pair
                ]
    return out


def write_gguf(
    path: Path,
    config: dict[str, Any],
    *,
    kind: str = "F32",
    seed: int = 0,
    stacked: bool = True,
    tensors: dict[str, torch.Tensor] | None = None,
    tokenizer: str | None = "bpe",
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    extra_kind: str = "F32",
) -> dict[str, torch.Tensor]:
    """Write one file and return its tensors under Hugging Face names, before any quantisation.

    Matrices are stored as `kind`, vectors as F32. `metadata` overrides keys (None drops one),
    `drop` leaves tensors out, `extra` adds tensors by their GGUF names, their bytes where they are
    of another `extra_kind`.
    """
    tensors = tensors or tiny.random_tensors(config, seed=seed, dtype=torch.float32)
    writer = GGUFWriter(str(path), "llama")
    keys = {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": 512,
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": 10000.0,
    }
    if "num_local_experts" in config:
        keys["llama.expert_count"] = config["num_local_experts"]
        keys["llama.expert_used_count"] = config["num_experts_per_tok"]
    keys |= {"bpe": bpe_metadata, "spm": spm_metadata, None: dict}[tokenizer]()
    for key, value in (keys | (metadata or {})).items():
        if value is not None:
            _add(writer, key, value)
    for name, data in gguf_tensors(tensors, config, stacked).items():
        if name not in drop:
            _add_tensor(writer, name, data, kind)
    for name, data in (extra or {}).items():
        raw_dtype = None if extra_kind == "F32" else GGMLQuantizationType[extra_kind]
        writer.add_tensor(name, data, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def gguf_tensors(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], stacked: bool = True
) -> dict[str, np.ndarray]:
    """The same weights under GGUF's names, q and k in GGUF's row order."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    result: dict[str, np.ndarray] = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, tensor in tensors.items():
        data = tensor.float().numpy()
        stem, _, end = name.rpartition(".")
        if stem in TOP:
            result[f"{TOP[stem]}.{end}"] = data
            continue
        _, _, layer, inner = stem.split(".", 3)
        if ".experts." in inner:
            *_, expert, matrix = inner.split(".")
            if stacked:
                stacks.setdefault(f"blk.{layer}.{EXPERT[matrix]}_exps.weight", []).append(data)
            else:
                result[f"blk.{layer}.{EXPERT[matrix]}.{expert}.weight"] = data
            continue
        short = INNER[inner]
        data = pair_rows(data, heads[short]) if short in heads else data
        result[f"blk.{layer}.{short}.{end}"] = data
    return result | {name: np.stack(parts) for name, parts in stacks.items()}


def _add_tensor(writer: GGUFWriter, name: str, data: np.ndarray, kind: str) -> None:
    """Matrices as `kind`, vectors as F32; kinds the package cannot write hold random blocks."""
    number = GGMLQuantizationType[kind if data.ndim > 1 else "F32"]
    if number.name.endswith("_K"):
        block, width = gguf.GGML_QUANT_SIZES[number]
        raw = random_blocks(number, int(np.prod(data.shape)) // block)
        shape = (*data.shape[:-1], data.shape[-1] // block * width)
        writer.add_tensor(name, raw.reshape(shape), raw_dtype=number)
        return
    packed = gguf.quants.quantize(np.ascontiguousarray(data), number)
    writer.add_tensor(name, packed, raw_dtype=number)


def random_blocks(kind: GGMLQuantizationType, count: int, seed: int = 0) -> np.ndarray:
    """`count` blocks of random bits, uint8 [count, bytes]; the fp16 scales among them are made
    finite."""
    width = gguf.GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, width), dtype=np.uint8)
    scale_at = {"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}
    for at in scale_at[kind.name]:
        scales = rng.uniform(-0.01, 0.01, count).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks


def bpe_metadata() -> dict[str, Any]:
    """The byte-level tokenizer of `tests.tiny`, as GGUF keeps it."""
    import json

    saved = json.loads(tiny.byte_level_tokenizer().to_str())["model"]
    tokens = sorted(saved["vocab"], key=saved["vocab"].get)
    merges = [m if isinstance(m, str) else " ".join(m) for m in saved["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tiny.BOS,
        "tokenizer.ggml.eos_token_id": tiny.EOS,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": tiny.CHAT_TEMPLATE,
    }


PIECES = "▁ t h e a o n r s i d w l u m f . ,".split()
PIECES += "▁t he ▁the ▁a in er on re nd an ▁an and ▁and ▁w ▁s as ▁was or ll".split()


def spm_metadata() -> dict[str, Any]:
    """A small SentencePiece vocabulary: specials, byte pieces, then pieces with falling scores."""
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    first = len(tokens)
    tokens += PIECES
    tokens += [f"[unused{i}]" for i in range(tiny.VOCAB - len(tokens))]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(PIECES)
    types += [UNUSED] * (len(tokens) - len(types))
    scores = [0.0] * first + [-float(i) for i in range(len(tokens) - first)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_string(key, value)
