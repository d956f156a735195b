"""The reference library's model with the weights of one of our packs, read by `safetensors` alone.

Quantised matrices are dequantised as docs/pack-format.md says, with no code of ours.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
ATTENTION = {f"{m}_proj.weight": f"self_attn.{m}_proj.weight" for m in "qkvo"}
NAMES = ATTENTION | {
    "input_norm.weight": "input_layernorm.weight",
    "post_norm.weight": "post_attention_layernorm.weight",
    "router.weight": "mlp.gate.weight",
    **{f"{m}_proj.weight": f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")},
}


def from_pack(pack, device="cpu"):
    """transformers' Mixtral or Llama in the pack's dense dtype."""
    import transformers

    pack = Path(pack)
    manifest = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    model, moe = manifest["model"], bool(manifest["model"]["num_local_experts"])
    shared = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim "
        "num_key_value_heads rms_norm_eps max_position_embeddings tie_word_embeddings"
    ).split()
    kind = transformers.MixtralConfig if moe else transformers.LlamaConfig
    values = {name: model[name] for name in shared}
    if moe:
        values |= {k: model[k] for k in ("num_local_experts", "num_experts_per_tok")}
        values["sliding_window"] = model["sliding_window"]
    assert model["rope"]["kind"] == "default"
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": model["rope"]["theta"]}
    config = kind(**values, attn_implementation="eager")
    dtype = DTYPES[manifest["dense_dtype"]]
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = dict(_dense(pack, manifest))
    if moe:
        for layer in range(model["num_hidden_layers"]):
            state |= _experts(pack, layer, manifest)
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    wanted = empty.state_dict()
    assert set(wanted) == set(state), sorted(set(wanted) ^ set(state))[:4]
    assert all(state[name].shape == wanted[name].shape for name in wanted)
    empty.load_state_dict(state, assign=True)
    # buffers such as rope frequencies were made on "meta": take them from a model made for real
    small = kind(**(values | {"num_hidden_layers": 1, "vocab_size": 8, "intermediate_size": 8}))
    real = transformers.AutoModelForCausalLM.from_config(small)
    for name, buffer in real.named_buffers():
        *path, last = name.split(".")
        owner = empty.get_submodule(".".join(path))
        owner.register_buffer(last, buffer, persistent=False)
    return empty.eval().to(device)


def _dense(pack, manifest):
    model = manifest["model"]
    with safe_open(pack / "dense.safetensors", "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118
            if name.endswith(".scales"):
                continue
            tensor = tensors.get_tensor(name)
            if name.endswith(".codes"):
                name = name.removesuffix(".codes")
                kind = "linear_dtype" if name.endswith("_proj.weight") else "embed_dtype"
                parts = tensor.numpy(), tensors.get_tensor(f"{name}.scales").numpy()
                columns = model["hidden_size"]
                if name.endswith("o_proj.weight"):
                    columns = model["num_attention_heads"] * model["head_dim"]
                elif name.endswith("down_proj.weight"):
                    columns = model["intermediate_size"]
                computed = DTYPES[manifest["dense_dtype"]]
                tensor = _dequantised(*parts, manifest[kind], computed, columns)
            if name == "lm_head.weight":
                yield name, tensor
            elif name.startswith("layers."):
                _, layer, rest = name.split(".", 2)
                yield f"model.layers.{layer}.{NAMES[rest]}", tensor
            else:
                yield f"model.{name}", tensor


def _dequantised(codes, scales, scheme, dtype, columns):
    """codes [C, N, run] uint8, scales [P, N, 2] int16 -> [N, columns]."""
    bits, group, zeros = int(scheme[3]), int(scheme[6:].rstrip("z")), scheme.endswith("z")
    rows, words = codes.shape[1], codes.view("<u2")
    parts = [words >> bits * i & (1 << bits) - 1 for i in range(16 // bits)]
    values = np.stack(parts, 2).transpose(1, 0, 2, 3).reshape(rows, -1).astype(np.float32)
    words = scales.view("<u2").transpose(1, 0, 2).reshape(rows, -1)
    zero = np.full(words.shape, 1 << bits - 1)
    if zeros:
        zero, words = words & 7 | words >> 15 << 3, words & 0x7FF8
    scale = torch.from_numpy(words.view("<f2").astype(np.float32)).to(dtype).float().numpy()
    zero, scale = (np.repeat(part, group, 1)[:, : values.shape[1]] for part in (zero, scale))
    return torch.from_numpy((values - zero) * scale)[:, :columns].to(dtype).contiguous()


def _experts(pack, layer, manifest):
    """gate_up_proj [E, 2I, H] and down_proj [E, H, I] of one layer."""
    layout = manifest["expert_layout"]
    hidden, width = layout["hidden_size"], layout["intermediate_size"]
    both, down = [], []
    with safe_open(pack / "experts" / f"layer-{layer:03}.safetensors", "pt") as tensors:
        for expert in range(manifest["model"]["num_local_experts"]):
            run = tensors.get_tensor(f"expert.{expert}")

            def part(name, rows, columns, run=run):
                start, dtype = layout[f"{name}_offset"], layout["dtype"]
                if dtype in DTYPES:
                    size = rows * columns * DTYPES[dtype].itemsize
                    return run[start : start + size].view(DTYPES[dtype]).reshape(rows, columns)
                blocks, width = -(-columns // 64), 8 * int(dtype[3])
                pairs = -(-blocks * 64 // int(dtype[6:].rstrip("z")) // 2)
                stop = start + blocks * rows * width
                codes = run[start:stop].view(blocks, rows, width)
                scales = run[stop : stop + pairs * rows * 4].view(torch.int16).view(pairs, rows, 2)
                computed = DTYPES[manifest["dense_dtype"]]
                return _dequantised(codes.numpy(), scales.numpy(), dtype, computed, columns)

            both.append(torch.cat([part("gate", width, hidden), part("up", width, hidden)]))
            down.append(part("down", hidden, width).clone())
    at = f"model.layers.{layer}.mlp.experts."
    return {at + "gate_up_proj": torch.stack(both), at + "down_proj": torch.stack(down)}


@torch.inference_mode()
def greedy(model, prompt, count, eos=()):
    """The reference's own greedy tokens."""
    tokens = torch.tensor([prompt], device=model.device)
    out = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def gaps(model, prompt, written):
    """For each written token: how far below the reference's best logit it lies (0: it is the best)."""
    tokens = torch.tensor([[*prompt, *written]], device=model.device)
    rows = model(tokens).logits[0, len(prompt) - 1 : -1].float()
    chosen = rows.gather(1, torch.tensor(written, device=model.device)[:, None])[:, 0]
    return (rows.max(1).values - chosen).tolist()
