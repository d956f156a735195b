"""Triton kernel of the router: one program per token makes the logits and picks the best K.

A row of E <= 512 logits stays in registers, and K sweeps of argmax beat a sort. Each program reads
the whole router (64 KB for Mixtral) out of the L2. Rule, ties and NaN: `gate.py`.
"""

import torch
import triton
import triton.language as tl

TILE, WARPS = 32768, 16  # router elements per step: few steps, since each waits for the memory


@triton.jit
def _gate_topk_kernel(
    x_ptr,  # [T, H]
    router_ptr,  # [E, H]
    weights_ptr,  # [T, CHOICES] fp32
    experts_ptr,  # [T, CHOICES] int32
    E: tl.constexpr,
    H: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    e, h, c = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_C)
    products = tl.zeros((BLOCK_E, BLOCK_H), tl.float32)
    for low in range(0, H, BLOCK_H):
        inside = low + h < H
        x = tl.load(x_ptr + token * H + low + h, mask=inside, other=0.0).to(tl.float32)
        there = (e < E)[:, None] & inside[None, :]
        row = tl.load(router_ptr + e[:, None] * H + low + h[None, :], mask=there, other=0.0)
        products += row.to(tl.float32) * x[None, :]
    logits = tl.sum(products, axis=1)

    lowest = -3.0e38  # above the -inf of lanes that must not be picked, so that NaN picks valid ids
    order = tl.where(logits > lowest, logits, lowest)
    order = tl.where(e < E, order, float("-inf"))
    best = tl.full((BLOCK_C,), float("-inf"), tl.float32)
    experts = tl.zeros((BLOCK_C,), tl.int32)
    for i in tl.static_range(CHOICES):
        winner = tl.argmax(order, axis=0)
        best = tl.where(c == i, tl.sum(tl.where(e == winner, logits, 0.0), axis=0), best)
        experts = tl.where(c == i, winner.to(tl.int32), experts)
        order = tl.where(e == winner, float("-inf"), order)
    scores = tl.where(c < CHOICES, tl.exp(best - tl.max(best, axis=0)), 0.0)
    at = token * CHOICES + c
    tl.store(weights_ptr + at, scores / tl.sum(scores, axis=0), mask=c < CHOICES)
    tl.store(experts_ptr + at, experts, mask=c < CHOICES)


def gate_topk_triton(
    x: torch.Tensor, router: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the router; arguments as `gate_topk`."""
    x = x.contiguous()
    tokens, (num_experts, hidden) = len(x), router.shape
    weights = x.new_empty(tokens, k, dtype=torch.float32)
    experts = x.new_empty(tokens, k, dtype=torch.int32)
    block_e = triton.next_power_of_2(num_experts)
    if tokens:
        _gate_topk_kernel[(tokens,)](
            x, router, weights, experts,
            E=num_experts, H=hidden, CHOICES=k, BLOCK_E=block_e, BLOCK_C=triton.next_power_of_2(k),
            BLOCK_H=min(triton.next_power_of_2(hidden), max(16, TILE // block_e)),
            num_warps=WARPS, enable_fp_fusion=True,
        )  # fmt: skip
    return weights, experts
