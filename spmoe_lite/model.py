"""The transformer: draft and target are two instances of one class.

The path of a token: `forward` embeds it; each block normalises, attends over the KV cache, normalises
again and goes through its feed-forward part, dense or Mixture-of-Experts; the last rows become logits.

    x = x + Wo attention(rope(Wq n), rope(Wk n), Wv n)          n = rms_norm(x)
    x = x + Wdown (silu(Wgate m) * Wup m)                       m = rms_norm(x)      dense block
    x = x + sum_j w_j expert_j(m)                               j in top-k of softmax(Wrouter m)

Where the experts come from is the business of an `ExpertSource`; the block only launches up and down for
each group it is served, every (row, choice) writing its own partial result, and one combine that adds
them in the router's order. So the sum does not depend on which expert arrived first.

`on_attention(layer, x)` sees the residual stream x [T, H] after attention: the only seam between
decoding and prefetching. Mixtral: arXiv 2401.04088. Rope scaling "llama3": Llama 3.1 release.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from spmoe_lite.config import ModelConfig, Rope
from spmoe_lite.device import send
from spmoe_lite.kernels.attention import attention
from spmoe_lite.kernels.expert_gemm import combine, expert_down, expert_up, new_partial
from spmoe_lite.kernels.gate import norm_gate_topk
from spmoe_lite.kernels.linear import Weight, linear, swiglu
from spmoe_lite.kernels.norm import rms_norm
from spmoe_lite.kernels.rope import project_and_store
from spmoe_lite.kvcache import KVCache
from spmoe_lite.precision import ExpertLayout
from spmoe_lite.quant import QuantizedMatrix

OnAttention = Callable[[int, torch.Tensor], None]


class ExpertSource(Protocol):
    """Whoever lends experts to the MoE blocks (`ExpertStore`)."""

    def begin_pass(self, rows: int) -> None: ...

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]: ...


@dataclass(slots=True)
class Block:
    """Weights of one layer; matrices are [out, in]. MoE blocks have `router`, dense ones the rest.

    Norms, biases and the router are floats, the other matrices floats or quantised.
    """

    input_norm: torch.Tensor  # [H]
    qkv: Weight  # [(Hq + 2 Hkv) D, H]
    qkv_bias: torch.Tensor | None
    o: Weight  # [H, Hq D]
    o_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [H]
    router: torch.Tensor | None  # [E, H]
    gate_up: Weight | None  # [2 I, H]
    down: Weight | None  # [H, I]


class Transformer:
    """Weights, and the forward pass over them."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: dict[str, Any],
        context: int,
        source: ExpertSource | None = None,
        layout: ExpertLayout | None = None,
    ):
        """`tensors` are the pack's dense tensors on their device; they are taken over and emptied."""
        assert config.is_moe == (source is not None)
        self.config = config
        self.source = source
        self.layout = layout
        self.embed: Weight = tensors.pop("embed_tokens.weight")
        self.head = tensors.pop("lm_head.weight", self.embed)
        self.norm: torch.Tensor = tensors.pop("norm.weight")
        self.blocks = [_block(tensors, i) for i in range(config.num_hidden_layers)]
        assert not tensors, f"unused tensors: {sorted(tensors)[:3]}"
        self.device = self.norm.device
        self.dtype = self.norm.dtype  # of activations, and of a KV cache that is not int8
        self.cos, self.sin = rope_tables(config.rope, config.head_dim, context, self.device)

    def forward(
        self,
        tokens: list[int],
        kv: KVCache,
        *,
        logits_rows: int = 1,
        on_attention: OnAttention | None = None,
    ) -> torch.Tensor:
        """Feed `tokens` after the cache; return logits [logits_rows, V] of the last rows.

        The cache grows by len(tokens) when the pass has finished, and not at all if it is aborted.
        """
        assert kv.length + len(tokens) <= kv.capacity, "the engine fits every pass to the context"
        ids = send(torch.tensor(tokens, dtype=torch.long), self.device)
        if self.source is not None:
            self.source.begin_pass(len(tokens))
        logits = self.run(ids, kv, kv.length, self.source, logits_rows, on_attention)
        kv.length += len(tokens)
        return logits

    def run(
        self,
        ids: torch.Tensor,
        kv: KVCache,
        start: int | torch.Tensor,
        source: ExpertSource | None,
        logits_rows: int,
        on_attention: OnAttention | None = None,
    ) -> torch.Tensor:
        """The pass itself: ids [T] at the positions from `start` on; logits [logits_rows, V].

        `start` is a number, or int32 [1] on the device: then nothing here depends on what the host
        knows of the conversation, and the launches can be captured in a graph.
        """
        x, eps = self._embed(ids), self.config.rms_norm_eps
        for layer, block in enumerate(self.blocks):
            x = self._attend(layer, block, x, kv, start)
            if on_attention is not None:
                on_attention(layer, x)
            if block.router is not None:
                x = self._experts(layer, block, x, source)
            else:
                x = _mlp(block, rms_norm(x, block.post_norm, eps), x)
        return linear(rms_norm(x[len(ids) - logits_rows :], self.norm, eps), self.head)

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.embed, QuantizedMatrix):
            return self.embed.rows_of(ids, self.dtype)
        return F.embedding(ids, self.embed)

    def _attend(
        self, layer: int, block: Block, x: torch.Tensor, kv: KVCache, start: int | torch.Tensor
    ) -> torch.Tensor:
        c = self.config
        n = rms_norm(x, block.input_norm, c.rms_norm_eps)
        keys, values, scales = kv.keys[layer], kv.values[layer], kv.scales[layer]
        q = project_and_store(
            n, block.qkv, block.qkv_bias, self.cos, self.sin, start, keys, values, scales
        )
        out = attention(q, keys, values, start, c.sliding_window, kv_scales=scales)
        return linear(out.reshape(len(x), -1), block.o, block.o_bias, residual=x)

    def _experts(
        self, layer: int, block: Block, x: torch.Tensor, source: ExpertSource
    ) -> torch.Tensor:
        c, layout = self.config, self.layout
        m, weights, experts = norm_gate_topk(
            x, block.post_norm, c.rms_norm_eps, block.router, c.num_experts_per_tok
        )
        hidden = m.new_empty((*experts.shape, layout.intermediate_size))
        partial = new_partial(m, experts, layout)
        for use in source.serve(layer, experts):
            expert_up(m, experts, use, layout, out=hidden)
            expert_down(hidden, experts, use, layout, out=partial)
        return combine(partial, weights, residual=x, dtype=m.dtype)


def _mlp(block: Block, m: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return linear(swiglu(m, block.gate_up), block.down, residual=x)


def _block(tensors: dict[str, Any], layer: int) -> Block:
    """Take one layer's tensors; q, k, v and gate, up become one matrix each: fewer, larger products."""

    def take(name: str) -> Any:
        return tensors.pop(f"layers.{layer}.{name}", None)

    def stacked(*names: str) -> Any:
        parts = [take(name) for name in names]
        return None if parts[0] is None else _stack(parts)

    return Block(
        input_norm=take("input_norm.weight"),
        qkv=stacked("q_proj.weight", "k_proj.weight", "v_proj.weight"),
        qkv_bias=stacked("q_proj.bias", "k_proj.bias", "v_proj.bias"),
        o=take("o_proj.weight"),
        o_bias=take("o_proj.bias"),
        post_norm=take("post_norm.weight"),
        router=take("router.weight"),
        gate_up=stacked("gate_proj.weight", "up_proj.weight"),
        down=take("down_proj.weight"),
    )


def _stack(parts: list[Any]) -> Weight:
    """One matrix of the rows of several, all floats or all of one scheme."""
    first = parts[0]
    if not isinstance(first, QuantizedMatrix):
        return torch.cat(parts)
    codes, scales = (
        torch.cat(pieces, 1) for pieces in zip(*(p.tensors() for p in parts), strict=True)
    )
    return QuantizedMatrix(first.scheme, first.columns, codes, scales)


def rope_tables(
    rope: Rope, head_dim: int, context: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [context, head_dim / 2] fp32 of every position and frequency."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequency = 1.0 / (rope.theta**exponent)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        frequency = _llama3_frequency(frequency, rope)
    angle = torch.outer(torch.arange(context).float(), frequency)
    return angle.cos().to(device), angle.sin().to(device)


def _llama3_frequency(frequency: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended linearly."""
    turns = rope.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / rope.factor
