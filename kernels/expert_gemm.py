"""The experts of one layer: SwiGLU up, down, and the sum in the router's order.

    h[t, j] = silu(x[t] G_e^T) * (x[t] U_e^T)        e = experts[t, j]
    p[t, j] = h[t, j] D_e^T
    y[t]    = sum over j = 0 .. k-1, in this order, of weights[t, j] * p[t, j]     (fp32)

The three matrices of an expert are found by address, not by tensor: `use` is a table [n, 3] int64
of (expert id, address of its bytes, address to write them to as well, or 0), and `ExpertLayout`
says where in those bytes each matrix lies. The address may be a slot of the slab or page-locked
host memory; whoever made the table answers for both staying valid until the launch is over.
Addresses are multiples of 16.

A layer may be served in several groups: each call of `expert_up` and `expert_down` fills the rows
of the experts in its table and touches no other, and every (row, choice) has a place of its own,
so that the sum does not know in which order the groups came. An expert of the table that no row
asks for is neither read nor written; an id of -1 marks an unused line of the table.

Activations are rounded to the dtype of float weights where the two differ; quantised weights count
as rounded to the activations' dtype. Sums are fp32. The bits of a
row do not depend on which other experts are in the table; on the GPU not on the other rows either.
Sources: SwiGLU, Shazeer 2020, arXiv 2002.05202; Mixtral, arXiv 2401.04088.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from spmoe_lite.precision import matrix_bytes, scheme_of
from spmoe_lite.quant import view_matrix

from .linear import Weight, linear_reference

if TYPE_CHECKING:
    from spmoe_lite.precision import ExpertLayout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def expert_up(
    x: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """x [T, H], experts [T, k] int32 (distinct in a row), use [n, 3] int64 -> fills out [T, k, I].

    Writes gate and up of an expert through to its second address. CPU tensors take the reference.
    """
    if x.is_cuda:
        from .expert_gemm_triton import expert_up_triton

        expert_up_triton(x, experts, use, layout, out)
    else:
        expert_up_reference(x, experts, use, layout, out)


def expert_down(
    h: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """h [T, k, I], experts [T, k] int32, use [n, 3] int64 -> fills out, from `new_partial`.

    Writes down of an expert through to its second address. CPU tensors take the reference.
    """
    if h.is_cuda:
        from .expert_gemm_triton import expert_down_triton

        expert_down_triton(h, experts, use, layout, out)
    else:
        expert_down_reference(h, experts, use, layout, out)


def new_partial(x: torch.Tensor, experts: torch.Tensor, layout: ExpertLayout) -> torch.Tensor:
    """What `expert_down` fills and `combine` adds, for x [T, H] and experts [T, k].

    [T, k, H] in x's dtype; on the GPU, for few tokens and quantised weights, [segments, T, k, H]
    fp32: the product over each segment of K apart, so that there are enough programs.
    """
    shape = (*experts.shape, layout.hidden_size)
    if x.is_cuda:
        from .expert_gemm_triton import SOME, down_segments

        segments = down_segments(layout)[1]
        if segments > 1 and len(x) <= SOME:
            return x.new_empty(segments, *shape, dtype=torch.float32)
    return x.new_empty(shape)


def combine(
    partial: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """partial from `new_partial`, weights [T, k] fp32 -> [T, H], in the router's order.

    The result is in `dtype`, partial's unless given. Segments are added and rounded to it first. A
    residual [T, H] is added to the rounded sum and the result rounded again.
    """
    if partial.is_cuda:
        from .expert_gemm_triton import combine_triton

        return combine_triton(partial, weights, residual, dtype)
    return combine_reference(partial, weights, residual, dtype)


def expert_up_reference(
    x: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """The same by torch, over views of the addresses."""
    k, places = experts.shape[1], out.view(-1, out.shape[-1])
    x = x.to(DTYPES.get(layout.dtype, x.dtype))
    for pairs, address, copy_to in _rows_by_expert(experts, use):
        gate, up, _ = _matrices(address, layout)
        rows = x[pairs // k]
        h = F.silu(linear_reference(rows, gate)).mul_(linear_reference(rows, up))
        places[pairs] = h.to(out.dtype)
        if copy_to:
            new_gate, new_up, _ = _matrices(copy_to, layout)
            _copy(gate, new_gate)
            _copy(up, new_up)


def expert_down_reference(
    h: torch.Tensor,
    experts: torch.Tensor,
    use: torch.Tensor,
    layout: ExpertLayout,
    out: torch.Tensor,
) -> None:
    """The same by torch, over views of the addresses."""
    rows, places = h.view(-1, h.shape[-1]), out.view(-1, out.shape[-1])
    for pairs, address, copy_to in _rows_by_expert(experts, use):
        down = _matrices(address, layout)[2]
        dtype = DTYPES.get(layout.dtype, h.dtype)
        places[pairs] = linear_reference(rows[pairs].to(dtype), down).to(out.dtype)
        if copy_to:
            _copy(down, _matrices(copy_to, layout)[2])


def combine_reference(
    partial: torch.Tensor,
    weights: torch.Tensor,
    residual: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The same by torch."""
    dtype = dtype or partial.dtype
    if partial.dim() == 4:
        whole = partial[0].clone()
        for segment in partial[1:]:
            whole += segment
        partial = whole.to(dtype)
    total = partial[:, 0].float() * weights[:, :1]
    for j in range(1, partial.shape[1]):
        total.addcmul_(partial[:, j].float(), weights[:, j : j + 1])
    y = total.to(dtype)
    return y if residual is None else residual + y


def _rows_by_expert(
    experts: torch.Tensor, use: torch.Tensor
) -> list[tuple[torch.Tensor, int, int]]:
    """For each line of `use` whose expert has rows: its t * k + j, rising, and both addresses."""
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    ends = [
        0,
        *flat.bincount().cumsum(0).tolist(),
    ]  # rows of expert e are order[ends[e] : ends[e + 1]]
    return [
        (order[ends[expert] : ends[expert + 1]], address, copy_to)
        for expert, address, copy_to in use.tolist()
        if 0 <= expert < len(ends) - 1 and ends[expert] < ends[expert + 1]
    ]


@lru_cache(maxsize=8192)  # a view of an address owns nothing and stays true whatever lies there
def _matrices(address: int, layout: ExpertLayout) -> tuple[Weight, Weight, Weight]:
    """gate [I, H], up [I, H], down [H, I] of the expert that begins at `address`, not copied."""
    hidden, inner = layout.hidden_size, layout.intermediate_size
    gate = _matrix(address + layout.gate_offset, layout.dtype, inner, hidden)
    up = _matrix(address + layout.up_offset, layout.dtype, inner, hidden)
    return gate, up, _matrix(address + layout.down_offset, layout.dtype, hidden, inner)


def _matrix(address: int, dtype: str, rows: int, columns: int) -> Weight:
    memory = (ctypes.c_uint8 * matrix_bytes(dtype, rows, columns)).from_address(address)
    run = torch.frombuffer(memory, dtype=torch.uint8)
    scheme = scheme_of(dtype)
    if scheme is not None:
        return view_matrix(run, scheme, rows, columns)
    return run.view(DTYPES[dtype]).view(rows, columns)


def _copy(source: Weight, target: Weight) -> None:
    if isinstance(source, torch.Tensor):
        assert isinstance(target, torch.Tensor)
        target.copy_(source)
    else:
        assert not isinstance(target, torch.Tensor)
        for part, place in zip(source.tensors(), target.tensors(), strict=True):
            place.copy_(part)
