"""An independent forward pass in fp64, straight from a Hugging Face folder; shares no code with the product.

Every token attends to all before it by explicit loops over heads, every expert is applied to the rows that
chose it, one row at a time. Slow and plain on purpose: what it says is what the model means.
"""

import json
import math
from pathlib import Path

import numpy as np
from safetensors import safe_open


class Oracle:
    """logits(tokens) -> [T, V] fp64, routes[layer][row] -> set of expert ids after a call."""

    def __init__(self, folder):
        folder = Path(folder)
        self.c = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.w = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    plain = name if name.startswith(("model.", "lm_head")) else "model." + name
                    self.w[plain] = tensors.get_tensor(name).double().numpy()
        self.routes = {}

    def logits(self, tokens):
        c, w = self.c, self.w
        heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        dim = c.get("head_dim") or c["hidden_size"] // heads
        x = w["model.embed_tokens.weight"][tokens]
        rows = len(tokens)
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            n = self.norm(x, w[p + "input_layernorm.weight"])
            q, k, v = (
                (
                    n @ w[p + f"self_attn.{m}_proj.weight"].T
                    + w.get(p + f"self_attn.{m}_proj.bias", 0)
                )
                for m in "qkv"
            )
            q, k, v = (t.reshape(rows, -1, dim) for t in (q, k, v))
            q, k = self.turn(q), self.turn(k)
            out = np.zeros((rows, heads, dim))
            for t in range(rows):
                first = 0
                if c.get("sliding_window"):
                    first = max(0, t - c["sliding_window"] + 1)
                for h in range(heads):
                    g = h // (heads // kv_heads)
                    scores = k[first : t + 1, g] @ q[t, h] / math.sqrt(dim)
                    e = np.exp(scores - scores.max())
                    out[t, h] = (e / e.sum()) @ v[first : t + 1, g]
            o = out.reshape(rows, -1) @ w[p + "self_attn.o_proj.weight"].T
            x = x + o + w.get(p + "self_attn.o_proj.bias", 0)
            m = self.norm(x, w[p + "post_attention_layernorm.weight"])
            x = x + (self.moe(layer, m) if c.get("num_local_experts") else self.mlp(layer, m))
        x = self.norm(x, w["model.norm.weight"])
        return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T

    def norm(self, x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.c["rms_norm_eps"]) * weight

    def turn(self, x):
        rows, _, dim = x.shape
        y = x.copy()
        for i, frequency in enumerate(self.frequencies(dim)):
            angle = np.arange(rows)[:, None] * frequency
            a, b = x[:, :, i], x[:, :, i + dim // 2]
            y[:, :, i] = a * np.cos(angle) - b * np.sin(angle)
            y[:, :, i + dim // 2] = b * np.cos(angle) + a * np.sin(angle)
        return y

    def frequencies(self, dim):
        rope = self.c.get("rope_parameters") or self.c.get("rope_scaling") or {}
        theta = self.c.get("rope_theta") or rope["rope_theta"]
        kind = rope.get("rope_type") or rope.get("type") or "default"
        for i in range(dim // 2):
            f = theta ** (-2 * i / dim)
            if kind == "linear":
                f /= rope["factor"]
            if kind == "llama3":
                wave = 2 * math.pi / f
                old = rope["original_max_position_embeddings"]
                low, high = rope["low_freq_factor"], rope["high_freq_factor"]
                if wave > old / low:
                    f /= rope["factor"]
                elif wave >= old / high:
                    blend = (old / wave - low) / (high - low)
                    f = (1 - blend) * f / rope["factor"] + blend * f
            yield f

    def expert(self, layer, e):
        """gate, up [I, H] and down [H, I], under whichever name the file uses."""
        for block in ("block_sparse_moe", "mlp"):
            p = f"model.layers.{layer}.{block}.experts."
            if p + "gate_up_proj" in self.w:
                both = self.w[p + "gate_up_proj"][e]
                half = self.c["intermediate_size"]
                return both[:half], both[half:], self.w[p + "down_proj"][e]
            for gate, up, down in (("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")):
                if f"{p}{e}.{gate}.weight" in self.w:
                    return (self.w[f"{p}{e}.{n}.weight"] for n in (gate, up, down))
        raise KeyError(f"expert {e} of layer {layer}")

    def moe(self, layer, m):
        w, k = self.w, self.c["num_experts_per_tok"]
        prefix = f"model.layers.{layer}."
        name = next(
            prefix + block + ".gate.weight"
            for block in ("block_sparse_moe", "mlp")
            if prefix + block + ".gate.weight" in w
        )
        out = np.zeros_like(m)
        self.routes[layer] = []
        for t, row in enumerate(m):
            scores = w[name] @ row
            best = np.argsort(-scores, kind="stable")[:k]
            share = np.exp(scores[best] - scores[best].max())
            share /= share.sum()
            self.routes[layer].append(set(best.tolist()))
            for weight, e in zip(share, best, strict=True):
                gate, up, down = self.expert(layer, int(e))
                out[t] += weight * (down @ (silu(gate @ row) * (up @ row)))
        return out

    def mlp(self, layer, m):
        p = f"model.layers.{layer}.mlp."
        gate, up, down = (self.w[p + f"{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (silu(m @ gate.T) * (m @ up.T)) @ down.T

    def greedy(self, prompt, count):
        """`count` tokens, and the smallest gap between the best two logits that was met."""
        tokens, gap = list(prompt), math.inf
        for _ in range(count):
            row = np.sort(self.logits(tokens)[-1])
            gap = min(gap, row[-1] - row[-2])
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :], gap


def silu(x):
    return x / (1 + np.exp(-x))
