"""Tiny random checkpoints and packs, made in a moment: Mixtral, Mistral, Llama.

Weights are seeded, and scaled so that activations stay near one and the router decides clearly. A
checkpoint is written as people publish them: `config.json`, `generation_config.json`, a real byte-level
(or byte-fallback) BPE tokenizer of 320 entries with BOS 1 and EOS 2, a chat template, and safetensors
shards with an index. `spelling` and `prefix` choose among the names that expert tensors have had.

    tiny_mixtral(folder)                        2 layers, hidden 64, width 96, 4 experts, top 2
    tiny_mistral(folder), tiny_llama(folder)    dense, 1 layer, same tokenizer: drafts
    tiny_pack(folder, kind="mixtral")           checkpoint and pack; returns the pack's path
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

BOS, EOS, VOCAB = 1, 2, 320

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
    "{% endfor %}"
)


def tiny_mixtral(folder: Path | str, **options: Any) -> Path:
    """Write TMIX of BUGS.md into `folder`; options as in `write_model`."""
    return write_model(folder, "mixtral", **options)


def tiny_mistral(folder: Path | str, **options: Any) -> Path:
    """Write a dense Mistral, TDRAFT of BUGS.md, into `folder`."""
    return write_model(folder, "mistral", **{"layers": 1, "seed": 1} | options)


def tiny_llama(folder: Path | str, **options: Any) -> Path:
    """Write a dense Llama into `folder`."""
    return write_model(folder, "llama", **{"layers": 1, "seed": 2} | options)


def tiny_pack(
    folder: Path | str,
    kind: str = "mixtral",
    *,
    name: str | None = None,
    experts: str | None = None,
    dense: str | None = None,
    embed: str | None = None,
    group: int | None = None,
    **options: Any,
) -> Path:
    """Write a tiny checkpoint and convert it; the pack is `folder/NAME.spmoe` (NAME: the kind)."""
    from spmoe_lite.converters.convert import convert

    name = name or kind
    write = {"mixtral": tiny_mixtral, "mistral": tiny_mistral, "llama": tiny_llama}[kind]
    source = write(Path(folder) / f"{name}-source", **options)
    out = Path(folder) / f"{name}.spmoe"
    return convert(source, out=out, experts=experts, dense=dense, embed=embed, group=group).path


def write_model(
    folder: Path | str,
    kind: str,
    *,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int | None = None,
    intermediate: int = 96,
    experts: int = 4,
    top_k: int = 2,
    vocab: int = VOCAB,
    theta: float | None = None,
    context: int = 512,
    sliding_window: int | None = None,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    scale_head: float = 1.0,
    spelling: str = "w123",
    prefix: str = "block_sparse_moe",
    model_prefix: bool = True,
    shards: int = 2,
    index: bool = True,
    tokenizer: str | None = "byte-level",
    config: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Write one checkpoint and return `folder`.

    `scale_head` widens the gaps between logits. `config` overrides keys of config.json, `drop` leaves
    keys out. `spelling`, `prefix`, `model_prefix`: see `respell`. `shards=1, index=False` gives one
    model.safetensors. `tokenizer` is "byte-level", "byte-fallback" or None.
    """
    moe = kind == "mixtral"
    values: dict[str, Any] = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": context,
        "rope_theta": theta or (1e6 if moe else 1e4),
        "sliding_window": sliding_window,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if moe:
        values |= {"num_local_experts": experts, "num_experts_per_tok": top_k}
    values |= config or {}
    tensors = random_tensors(values, seed=seed, dtype=dtype, scale_head=scale_head)
    tensors = respell(tensors, spelling=spelling, prefix=prefix, model_prefix=model_prefix)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {k: v for k, v in values.items() if k not in drop})
    write_json(folder / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS})
    if tokenizer:
        write_tokenizer(folder, tokenizer)
    write_shards(folder, tensors, shards=shards, index=index)
    return folder


def random_tensors(
    config: dict[str, Any], *, seed: int, dtype: torch.dtype, scale_head: float = 1.0
) -> dict[str, torch.Tensor]:
    """Every tensor under its first published name (`model.layers.0.block_sparse_moe.experts.0.w1.weight`)."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)
        return values.to(dtype)

    def norm() -> torch.Tensor:
        return (1 + 0.1 * torch.randn(hidden, generator=generator)).to(dtype)

    hidden, width, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config["head_dim"] or hidden // config["num_attention_heads"]
    q_rows = config["num_attention_heads"] * head_dim
    kv_rows = config["num_key_value_heads"] * head_dim
    experts = config.get("num_local_experts", 0)

    tensors = {"model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = norm()
        tensors[f"{at}.self_attn.q_proj.weight"] = matrix(q_rows, hidden)
        tensors[f"{at}.self_attn.k_proj.weight"] = matrix(kv_rows, hidden)
        tensors[f"{at}.self_attn.v_proj.weight"] = matrix(kv_rows, hidden)
        tensors[f"{at}.self_attn.o_proj.weight"] = matrix(hidden, q_rows)
        if config.get("attention_bias"):
            for name, rows in {"q": q_rows, "k": kv_rows, "v": kv_rows, "o": hidden}.items():
                tensors[f"{at}.self_attn.{name}_proj.bias"] = matrix(1, rows)[0]
        tensors[f"{at}.post_attention_layernorm.weight"] = norm()
        if experts:
            tensors[f"{at}.block_sparse_moe.gate.weight"] = matrix(experts, hidden, 2.0)
        for expert in range(experts):
            inner = f"{at}.block_sparse_moe.experts.{expert}"
            tensors[f"{inner}.w1.weight"] = matrix(width, hidden)
            tensors[f"{inner}.w2.weight"] = matrix(hidden, width)
            tensors[f"{inner}.w3.weight"] = matrix(width, hidden)
        if not experts:
            tensors[f"{at}.mlp.gate_proj.weight"] = matrix(width, hidden)
            tensors[f"{at}.mlp.up_proj.weight"] = matrix(width, hidden)
            tensors[f"{at}.mlp.down_proj.weight"] = matrix(hidden, width)
    tensors["model.norm.weight"] = norm()
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden, scale_head)
    return tensors


def respell(
    tensors: dict[str, torch.Tensor],
    *,
    spelling: str = "w123",
    prefix: str = "block_sparse_moe",
    model_prefix: bool = True,
) -> dict[str, torch.Tensor]:
    """The same tensors under other names.

    `spelling` of the experts: "w123" (w1 gate, w3 up, w2 down), "named" (gate_proj, up_proj, down_proj),
    "stacked" (gate_up_proj [E, 2I, H] and down_proj [E, H, I], transformers 5), or "mixed" (even layers
    stacked, odd layers w123). `prefix` is "block_sparse_moe" or "mlp". `model_prefix=False` drops
    `model.` from every name.
    """
    named = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    result: dict[str, torch.Tensor] = {}
    stacks: dict[str, dict[int, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        name = name.replace("block_sparse_moe", prefix)
        if not model_prefix:
            name = name.removeprefix("model.")
        head, found, tail = name.partition(".experts.")
        if not found:
            result[name] = tensor
            continue
        expert, matrix, _ = tail.split(".")
        layer = int(head.partition("layers.")[2].split(".")[0])
        if spelling == "stacked" or (spelling == "mixed" and layer % 2 == 0):
            stacks.setdefault(f"{head}.experts.{matrix}", {})[int(expert)] = tensor
        else:
            matrix = named[matrix] if spelling == "named" else matrix
            result[f"{head}.experts.{expert}.{matrix}.weight"] = tensor
    for name in [name for name in stacks if name.endswith(".w1")]:
        experts = name.removesuffix(".w1")
        gate, down, up = (
            torch.stack([tensor for _, tensor in sorted(stacks[f"{experts}.{w}"].items())])
            for w in ("w1", "w2", "w3")
        )
        result[f"{experts}.gate_up_proj"] = torch.cat([gate, up], dim=1)
        result[f"{experts}.down_proj"] = down
    return result


def write_shards(
    folder: Path, tensors: dict[str, torch.Tensor], *, shards: int = 2, index: bool = True
) -> None:
    """Safetensors in `shards` files of equal tensor counts; `shards=1, index=False`: model.safetensors."""
    names = list(tensors)
    if shards == 1 and not index:
        save_file(contiguous(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        weight_map |= dict.fromkeys(part, file)
        save_file(
            contiguous({n: tensors[n] for n in part}), folder / file, metadata={"format": "pt"}
        )
    if index:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        write_json(
            folder / "model.safetensors.index.json",
            {"metadata": {"total_size": size}, "weight_map": weight_map},
        )


def contiguous(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_tokenizer(folder: Path, kind: str = "byte-level") -> None:
    """tokenizer.json, tokenizer_config.json and the strict alternating-roles chat template."""
    build = {"byte-level": byte_level_tokenizer, "byte-fallback": byte_fallback_tokenizer}[kind]
    folder.mkdir(parents=True, exist_ok=True)
    build().save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": True,
            "add_eos_token": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


TEXT = (
    "the quick brown fox jumps over the lazy dog and then it was said that there is a time when "
    "all of them were here with her for one other thing or another in an hour of rain on the hill "
    "where we have been since the winter ended and that was the end of it for you and for me"
)


def byte_level_tokenizer() -> Any:
    """Byte-level BPE as Llama 3 and GPT-2 have it: specials, 256 bytes, 61 merges; 320 entries."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)
    return _with_bos(tokenizer)


def byte_fallback_tokenizer() -> Any:
    """SentencePiece-like BPE as Mistral and Llama 2 have it: specials, <0x00>..<0xFF>, pieces; 320 entries."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,?!"]
    pairs = "▁ t|h e|▁t he|▁ a|▁ w|i n|e r|o n|r e|▁ o|▁ s|n d|▁a nd|▁ i|▁i t|i s|▁ f|o r|▁f or"
    pairs += "|▁w a|▁wa s|▁ b|▁ h|e n|o u|▁ y|▁y ou|e d|a t|▁o f"
    merges = [tuple(pair.split(" ")) for pair in pairs.split("|")]
    pieces += [a + b for a, b in merges]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    assert len(vocab) == len(pieces) == VOCAB, len(pieces)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(s, special=True) for s in ("<unk>", "<s>", "</s>")])
    return _with_bos(tokenizer)


def _with_bos(tokenizer: Any) -> Any:
    from tokenizers import processors

    assert tokenizer.get_vocab_size() == VOCAB, tokenizer.get_vocab_size()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer
