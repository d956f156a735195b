"""The rotary embedding and the rows it stores."""

import pytest
import torch

from spmoe_lite.kernels.rope import rope_and_store_reference
from spmoe_lite.kernels.rope_triton import rope_and_store_triton

BOTH = [rope_and_store_triton, rope_and_store_reference]


def rows(tokens, heads, heads_kv, head_dim, dtype, device):
    shapes = (tokens, heads, head_dim), (tokens, heads_kv, head_dim), (tokens, heads_kv, head_dim)
    return tuple(torch.randn(shape).to(device, dtype) for shape in shapes)


@pytest.mark.parametrize("rope", BOTH)
@pytest.mark.parametrize(
    "tokens, heads, heads_kv, head_dim", [(1, 4, 2, 64), (5, 9, 3, 80), (3, 1, 1, 6)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("on_device", [False, True])
def test_lane_pairs_turn_and_rows_are_stored_at_their_positions(
    rope, dtype, tokens, heads, heads_kv, head_dim, on_device, device
):
    q, k, v = rows(tokens, heads, heads_kv, head_dim, dtype, device)
    angle = torch.randn(9, head_dim // 2, device=device) * 3
    caches = torch.full((2, 9, heads_kv, head_dim), 7.0).to(device, dtype)
    start = torch.tensor([2], dtype=torch.int32, device=device) if on_device else 2
    got = rope(q, k, v, angle.cos(), angle.sin(), start, caches[0], caches[1])
    assert got.dtype == dtype and got.is_contiguous()
    new = slice(2, 2 + tokens)
    for turned, x in zip((got, caches[0, new]), (q, k), strict=True):
        low, high = x.double().chunk(2, dim=-1)
        want = torch.complex(low, high) * torch.exp(1j * angle[new].double())[:, None]
        want = torch.cat((want.real, want.imag), dim=-1)
        bound = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
        assert float((turned.double() - want).abs().max()) <= bound * float(want.abs().max())
    assert torch.equal(caches[1, new], v)
    assert bool((caches[:, :2] == 7).all()) and bool((caches[:, 2 + tokens :] == 7).all())


@pytest.mark.parametrize("rope", BOTH)
def test_columns_of_one_matrix_turn_as_their_copies_do(rope, device):
    """q, k and v as the model has them: a product's columns, tokens further apart than their heads."""
    q, k, v = torch.randn(5, 8, 16).to(device).split([4, 2, 2], 1)
    angle = torch.randn(5, 8, device=device)

    def turned(q, k, v):
        caches = q.new_zeros(2, 5, 2, 16)
        return rope(q, k, v, angle.cos(), angle.sin(), 0, *caches), caches

    views, cached = turned(q, k, v)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    for other, others in (turned(*map(torch.clone, (q, k, v))), turned(*apart)):
        assert torch.equal(views, other) and torch.equal(cached, others)
