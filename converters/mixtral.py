"""Names of the Mixtral family: Llama's decoder, with a router and experts in each layer.

An expert's matrices have been called w1 (gate), w3 (up), w2 (down), one tensor each; gate_proj, up_proj,
down_proj, one each; and, since transformers 5, two tensors for all experts of a layer:

    gate_up_proj [E, 2 I, H]   rows 0..I of entry e are its gate, rows I..2 I its up
    down_proj    [E, H, I]

GGUF stacks gate, up and down apart. The block around them is `block_sparse_moe` or `mlp`.
"""

from __future__ import annotations

from spmoe_lite.config import ModelConfig
from spmoe_lite.converters import llama
from spmoe_lite.converters.source import Piece

BLOCKS = ("block_sparse_moe", "mlp")


def dense_names(name: str) -> list[str]:
    """Every spelling of the pack's dense tensor `name`, the most usual one first."""
    if not name.endswith(".router.weight"):
        return llama.dense_names(name)
    layer = name.split(".")[1]
    return [f"{root}layers.{layer}.{block}.gate.weight" for block in BLOCKS for root in llama.ROOTS]


def expert_pieces(config: ModelConfig, layer: int, expert: int) -> dict[str, list[Piece]]:
    """Every place where gate [I, H], up [I, H] and down [H, I] of one expert may lie."""
    count, width, hidden = (
        config.num_local_experts,
        config.intermediate_size,
        config.hidden_size,
    )
    up, down = (width, hidden), (hidden, width)
    pieces: dict[str, list[Piece]] = {"gate": [], "up": [], "down": []}
    for block in BLOCKS:
        for root in llama.ROOTS:
            experts = f"{root}layers.{layer}.{block}.experts"
            one = f"{experts}.{expert}"
            joined = f"{experts}.gate_up_proj", (count, 2 * width, hidden)
            pieces["gate"] += [
                Piece(f"{one}.w1.weight", up),
                Piece(f"{one}.gate_proj.weight", up),
                Piece(*joined, index=expert, rows=range(0, width)),
                Piece(f"{experts}.gate_proj", (count, *up), index=expert),
            ]
            pieces["up"] += [
                Piece(f"{one}.w3.weight", up),
                Piece(f"{one}.up_proj.weight", up),
                Piece(*joined, index=expert, rows=range(width, 2 * width)),
                Piece(f"{experts}.up_proj", (count, *up), index=expert),
            ]
            pieces["down"] += [
                Piece(f"{one}.w2.weight", down),
                Piece(f"{one}.down_proj.weight", down),
                Piece(f"{experts}.down_proj", (count, *down), index=expert),
            ]
    return pieces
