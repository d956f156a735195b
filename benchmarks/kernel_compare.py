"""Kernels beside what else there is: codes in rows, and torch's and vLLM's products.

`time_layout`: codes in blocks of 64 columns, as packs have them, against codes in plain rows. One loop
reads both, `up_kernel`, which is the product's with the two strides of the codes as constants; each with
the product's step and with twice that, which is where a row fills a line of 128 bytes.

`time_ratios`: bf16 against torch. A torch MoE is a loop over the experts that have rows, as a graph, with
each expert's rows known beforehand: nothing is waited for, and no launch counts.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from kernel_data import DENSE, DEVICE, Experts, random, shared_experts, table, weights

from spmoe_lite import timing
from spmoe_lite.kernels.configs import Tile, capability_of, overlap_options, tile
from spmoe_lite.kernels.expert_gemm import expert_up
from spmoe_lite.kernels.linear import linear
from spmoe_lite.kernels.tile_triton import (
    LIFT,
    TRITON_DTYPES,
    _scale,
    _weights,
    scheme_constants,
    start_next,
    wait_for_previous,
)
from spmoe_lite.precision import scheme_of

CODES = "int4-g64z"


@triton.jit(do_not_specialize=["num_tokens"])
def up_kernel(
    x_ptr,  # [T, K]
    use_ptr,  # [n, 3] int64, as the product's
    out_ptr,  # [n, T, N]: every token by every expert
    num_tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    ROW: tl.constexpr,  # words of codes from a row to the next
    BLOCK: tl.constexpr,  # and from 64 columns to the next 64 of the row
    UP: tl.constexpr,  # bytes from gate to up
    SCALES: tl.constexpr,  # bytes from a matrix's start to its scales
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    FAST: tl.constexpr,
    DTYPE: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    wait_for_previous(PDL)
    weight_tile, line = tl.program_id(0), tl.program_id(1)
    address = tl.load(use_ptr + line * 3 + 1)
    token = tl.arange(0, BLOCK_T).to(tl.int64)
    mine = token < num_tokens
    OUT_N: tl.constexpr = BLOCK_N // 2
    local = tl.arange(0, BLOCK_N)
    n, half = weight_tile * OUT_N + local % OUT_N, local // OUT_N
    word, k = tl.arange(0, 4 * BITS), tl.arange(0, 64)
    codes_at = tl.multiple_of(address.to(tl.pointer_type(tl.int16)), 16)
    codes_at += (n * ROW + half * (UP // 2))[:, None] + word[None, :]
    scales_at = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16) + SCALES // 4
    scales_at += n + half * (UP // 4)
    x_at = x_ptr + token[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for low in range(0, K, BLOCK_K):
        for u in tl.static_range(BLOCK_K // 64):
            column = low + u * 64
            words = tl.load(codes_at + (column // 64) * BLOCK)
            if u * 64 % (2 * GROUP) == 0:
                pair = tl.load(scales_at + (column // (2 * GROUP)) * N)
            x = tl.load(x_at + column, mask=mine[None, :], other=0.0)
            scale, scale_16, minus = _scale(pair, u * 64 // GROUP % 2, BITS, ZEROS, DTYPE, FAST)
            w = _weights(words, scale, scale_16, minus, 0, 16 // BITS, BITS, DTYPE, FAST, BLOCK_N)
            acc = tl.dot(w, x, acc, input_precision="ieee")
    start_next(PDL)
    gate, up = tl.split(tl.permute(tl.reshape(acc * LIFT, (2, OUT_N, BLOCK_T)), (1, 2, 0)))
    y = gate / (1.0 + tl.exp(-gate)) * up
    out_at = out_ptr + (line * num_tokens + token)[None, :] * N
    out_at += (weight_tile * OUT_N + tl.arange(0, OUT_N))[:, None]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=mine[None, :])


def up_in(rows: bool, model: Experts, entry: Tile, x: torch.Tensor, use: torch.Tensor, out) -> None:
    """Launch `up_kernel` over experts whose codes lie in rows, or in blocks."""
    n, k, shape = model.inner, model.hidden, model.shape
    scheme = scheme_of(shape.dtype)
    words = scheme.run // 2
    assert len(x) <= entry.t and 2 * n % entry.n == 0 and k % entry.k == 0 and scheme.group >= 64
    up_kernel[(2 * n // entry.n, len(use))](
        x, use, out, len(x), N=n, K=k, ROW=k // 64 * words if rows else words,
        BLOCK=words if rows else n * words, UP=shape.up_offset, SCALES=scheme.parts(n, k)[0],
        DTYPE=TRITON_DTYPES[x.dtype], **scheme_constants(x.dtype, scheme),
        BLOCK_N=entry.n, BLOCK_K=entry.k, BLOCK_T=entry.t, **entry.options(),
        enable_fp_fusion=True, **overlap_options(capability_of(x)),
    )  # fmt: skip


def in_rows(model: Experts) -> torch.Tensor:
    """The slab with the codes of gate and up in rows, [N, K / 64, run] in place of [K / 64, N, run]."""
    slab, scheme = model.slab.clone(), scheme_of(model.shape.dtype)
    size = scheme.parts(model.inner, model.hidden)[0]
    for one in slab:
        for at in (model.shape.gate_offset, model.shape.up_offset):
            codes = one[at : at + size]
            blocks = codes.view(-1, model.inner, scheme.run)
            codes.copy_(blocks.transpose(0, 1).reshape(-1))
    return slab


def time_layout() -> dict:
    """Rates at which gate and up of Mixtral's experts are read in codes, from HBM and from host memory."""
    model = shared_experts(CODES)
    slabs = {"blocks": model.slab, "rows": in_rows(model)}
    shipped = tile(capability_of(model.slab), torch.bfloat16, "up", 1, scheme_of(CODES))
    entries = shipped, replace(shipped, k=2 * shipped.k, stages=shipped.stages - 1)
    rows = {}
    for where, tokens in (("HBM", 1), ("HBM", 5), ("host", 1)):
        experts, ids = model.route(tokens)
        x = random((tokens, model.hidden), torch.bfloat16)
        h = torch.empty(tokens, model.choices, model.inner, dtype=torch.bfloat16, device=DEVICE)
        unit, read = ("TB_s", 1e-9) if where == "HBM" else ("GB_s", 1e-6)
        read *= model.up_bytes * len(ids)
        row, outs, hosts = {}, [], []  # hosts: kept while their addresses are read
        for name, slab in slabs.items():
            uses = model.uses(ids, slab)
            if where == "host":
                hosts.append(
                    torch.empty(len(ids), slab.shape[1], dtype=torch.uint8, pin_memory=True)
                )
                hosts[-1].copy_(slab[ids])
                uses = [table(ids, dict(zip(ids, hosts[-1], strict=True)))]
            if name == "blocks":
                calls = [
                    functools.partial(expert_up, x, experts, use, model.shape, h) for use in uses
                ]
                row[f"product_{unit}"] = read / timing.replay_ms(calls, 9)
            for entry in entries:
                out = x.new_empty(len(ids), tokens, model.inner)
                calls = [
                    functools.partial(up_in, name == "rows", model, entry, x, use, out)
                    for use in uses
                ]
                row[f"{name}_{entry.k}_{unit}"] = read / timing.replay_ms(calls, 9)
                outs.append(out)
        lines = torch.searchsorted(torch.tensor(ids, dtype=torch.int32, device=DEVICE), experts)
        token = torch.arange(tokens, device=DEVICE)[:, None]
        row["same_bits"] = all(torch.equal(out[lines, token], h) for out in outs)
        rows[f"{where} T={tokens}"] = row
    return rows


def beside_torch(shape: tuple[int, int], tokens: int) -> tuple[float, float]:
    """Milliseconds of one bf16 product, ours and torch's."""
    x, found = random((tokens, shape[1]), torch.bfloat16), weights("bf16", shape)
    ours, theirs = (
        timing.replay_ms([functools.partial(run, x, w) for w in found])
        for run in (linear, F.linear)
    )
    return ours, theirs


def torch_moe(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, places: list[tuple]
) -> torch.Tensor:
    """gate_up [E, 2 I, H], down [E, H, I], places (expert, its rows [R], their shares [R, 1])."""
    y = torch.zeros_like(x)
    for expert, rows, shares in places:
        gate, up = F.linear(x[rows], gate_up[expert]).chunk(2, dim=-1)
        y.index_add_(0, rows, F.linear(F.silu(gate) * up, down[expert]) * shares)
    return y


def stacked(model: Experts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """gate_up [E, 2 I, H] and down [E, H, I] of each layer, as views of the slab."""
    wide = model.inner * model.hidden
    assert model.shape.up_offset == 2 * wide and model.shape.down_offset == 4 * wide
    return [
        (
            layer[:, : 2 * wide].unflatten(1, (2 * model.inner, model.hidden)),
            layer[:, 2 * wide : 3 * wide].unflatten(1, (model.hidden, model.inner)),
        )
        for layer in model.slab.view(torch.bfloat16).split(model.experts)
    ]


def torch_calls(model: Experts, tokens: int) -> list[Callable]:
    x, (experts, ids) = random((tokens, model.hidden), torch.bfloat16), model.route(tokens)
    shares, places = torch.rand(tokens, model.choices, device=DEVICE).bfloat16(), []
    for expert in ids:
        row, choice = torch.nonzero(experts == expert, as_tuple=True)
        places.append((expert, row, shares[row, choice][:, None]))
    return [functools.partial(torch_moe, x, *layer, places) for layer in stacked(model)]


def vllm_calls(model: Experts, tokens: int) -> list[Callable]:
    here = str(Path(__file__).resolve().parent)
    sys.path[:] = [path for path in sys.path if path != here]  # `kernels` is also a package's name
    from vllm.model_executor.layers.fused_moe import fused_experts

    x, (experts, _) = random((tokens, model.hidden), torch.bfloat16), model.route(tokens)
    shares = torch.rand(tokens, model.choices, device=DEVICE)
    layers = [[part.contiguous() for part in layer] for layer in stacked(model)]
    return [functools.partial(fused_experts, x, *layer, shares, experts) for layer in layers]


def time_ratios() -> dict:
    """bf16 beside torch, and beside vLLM where it is installed; a ratio above 1 says ours is faster."""
    rows = {}
    for tokens in (1, 5):
        for name, shape in DENSE.items():
            ours, theirs = beside_torch(shape, tokens)
            rows[f"{name} T={tokens}"] = {
                "us": ours * 1e3, "torch_us": theirs * 1e3, "torch_over_ours": theirs / ours,
            }  # fmt: skip
    model = shared_experts("bf16")
    for tokens in (1, 5, 512):
        ours = timing.replay_ms(model.calls(tokens, "all")[0], 9)
        row: dict[str, float | str] = {"us": ours * 1e3}
        theirs = timing.replay_ms(torch_calls(model, tokens), 9)
        row |= {"torch_us": theirs * 1e3, "torch_over_ours": theirs / ours}
        try:
            theirs = timing.replay_ms(vllm_calls(model, tokens), 9)
            row |= {"vllm_us": theirs * 1e3, "vllm_over_ours": theirs / ours}
        except Exception as error:  # also made for another torch, or with other arguments
            missing = isinstance(error, ModuleNotFoundError) and error.name == "vllm"
            row["vllm"] = "not installed" if missing else f"{type(error).__name__}: {error}"[:200]
        rows[f"experts T={tokens}"] = row
    return rows
