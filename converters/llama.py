"""Names of the Llama family: what a pack calls a tensor, and what checkpoints call it.

The decoder without its feed-forward experts is the same in all three families, so `mistral.py` and
`mixtral.py` build on this. `model.` in front has come and gone over the years; the output head never had it.
"""

from __future__ import annotations

import re

ROOTS = ("model.", "")

LAYER = {
    "input_norm": "input_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "post_norm": "post_attention_layernorm",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}

# Tables that follow from config.json; old checkpoints carry them, per layer or once.
DERIVED = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def dense_names(name: str) -> list[str]:
    """Every spelling of the pack's dense tensor `name`, the most usual one first."""
    if name == "lm_head.weight":
        return [name]
    parts = name.split(".")
    if parts[0] == "layers":
        layer, block, kind = parts[1:]
        name = f"layers.{layer}.{LAYER[block]}.{kind}"
    return [root + name for root in ROOTS]
