"""The rotary embedding and the rows it stores."""

import pytest
import torch

from spmoe_lite.kernels.attention import quantize_rows
from spmoe_lite.kernels.linear_triton import linear_triton, project_and_store_triton
from spmoe_lite.kernels.rope import project_and_store, rope_and_store_reference
from spmoe_lite.kernels.rope_triton import rope_and_store_triton
from spmoe_lite.precision import scheme_of
from spmoe_lite.quant import QuantizedMatrix, quantize

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


@pytest.mark.parametrize("rope", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_int8_cache_takes_the_codes_of_the_rows_a_float_cache_would_hold(rope, dtype, device):
    tokens, heads_kv, head_dim, start = 5, 3, 80, 2
    q, k, v = rows(tokens, 9, heads_kv, head_dim, dtype, device)
    sizes = torch.tensor([1.0, 1e-3, 64.0, 0.0, 3.0], device=device)[:, None, None]
    k, v = (k * sizes).to(dtype), (v * sizes).to(dtype)
    v[4, 0, 0] = float("nan")
    turn = torch.randn(9, head_dim // 2, device=device)
    turn = turn.cos(), turn.sin()
    floats = torch.zeros(2, 9, heads_kv, head_dim, dtype=dtype, device=device)
    plain = rope(q, k, v, *turn, start, floats[0], floats[1])
    caches = torch.full_like(floats, 7, dtype=torch.int8)
    scales = torch.full((heads_kv, 12, 2), 7.0, dtype=torch.float16, device=device)
    got = rope(q, k, v, *turn, start, caches[0], caches[1], scales)
    assert torch.equal(got, plain)
    new = slice(start, start + tokens)
    for which in (0, 1):
        codes, want = quantize_rows(floats[which, new])
        assert torch.equal(caches[which, new], codes)
        torch.testing.assert_close(scales[:, new, which], want.T, rtol=0, atol=0, equal_nan=True)
    assert scales[0, 6, 1].isnan() and not scales[0, 6, 0].isnan()
    outside = torch.ones(12, dtype=torch.bool)
    outside[new] = False
    assert (scales[:, outside.to(device)] == 7).all() and (
        caches[:, outside[:9].to(device)] == 7
    ).all()
    # The same row alone, or from another place of the pass.
    alone, one = torch.zeros_like(caches), torch.zeros_like(scales)
    rope(q[1:2], k[1:2], v[1:2], *turn, start + 1, alone[0], alone[1], one)
    assert torch.equal(alone[:, 3], caches[:, 3]) and torch.equal(one[:, 3], scales[:, 3])


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("rope", BOTH)
def test_codes_at_the_edges(rope, device):
    inf, nan = float("inf"), float("nan")
    v = torch.tensor(
        [
            [0.0, 0.0, -0.0, 0.0],
            [1e-7, -1e-7, 0.0, 0.0],  # the scale would be less than fp16 has
            [127.0, 0.5, 1.5, -2.5],  # scale 1: halves go to even
            [-254.0, 3.0, 5.0, -253.0],
            [8.3e6, -8.3e6, 0.0, 1.0],  # the scale is near fp16's largest
            [1e7, 1.0, 0.0, 0.0],
            [inf, 1.0, 0.0, 0.0],
            [nan, 1.0, 0.0, 0.0],
        ],
        device=device,
    )[:, None]
    caches = torch.full((2, 8, 1, 4), 7, dtype=torch.int8, device=device)
    scales = torch.empty(1, 8, 2, dtype=torch.float16, device=device)
    turn = torch.ones(8, 2, device=device), torch.zeros(8, 2, device=device)
    rope(torch.zeros_like(v), torch.zeros_like(v), v, *turn, 0, caches[0], caches[1], scales)
    want = torch.zeros(8, 4, dtype=torch.int8)
    want[2] = torch.tensor([127, 0, 2, -2])
    want[3] = torch.tensor([-127, 2, 2, -126])
    want[4] = torch.tensor([127, -127, 0, 0])
    assert torch.equal(caches[1, :, 0].cpu(), want) and not caches[0].any()
    stored = scales[0, :, 1]
    assert stored[:2].tolist() == [0, 0] and stored[2:4].tolist() == [1, 2]
    assert stored[4].isfinite() and stored[5:].isnan().all()


# --- the product of q, k and v that does it on the way -------------------------------------------


def projection(heads, heads_kv, head_dim, hidden, stored, dtype, device):
    """weight and bias of q, k and v, and what else `project_and_store` takes but x and the start."""
    lanes = (heads + 2 * heads_kv) * head_dim
    weight = torch.randn(lanes, hidden) * 0.1
    if stored is None:
        weight = weight.to(device, dtype)
    else:
        coded = quantize(weight, scheme_of(stored))
        parts = (part.to(device) for part in coded.tensors())
        weight = QuantizedMatrix(coded.scheme, hidden, *parts)
    angle = torch.randn(64, head_dim // 2, device=device) * 3
    caches = torch.full((2, 64, heads_kv, head_dim), 7.0).to(device, dtype)
    return weight, torch.randn(lanes).to(device, dtype), (angle.cos(), angle.sin()), caches


# a head in one tile, in several, and tiles over two heads; segments of K, codes
PROJECTIONS = [(4, 2, 64, 96, None), (2, 1, 80, 520, None), (2, 2, 6, 40, None)]
PROJECTIONS += [(3, 1, 48, 320, "int4-g64z"), (2, 1, 64, 96, "int8-g32")]


# rows of a pass, where it begins (on the device or not), tiles of tokens
PASSES = [(0, torch.float32, False), (1, torch.float32, True), (5, torch.float16, False)]
PASSES += [(40, torch.float32, False)]


@pytest.mark.parametrize("tokens, dtype, on_device", PASSES)
@pytest.mark.parametrize("heads, heads_kv, head_dim, hidden, stored", PROJECTIONS)
def test_the_product_turns_and_stores_what_three_launches_would(
    heads, heads_kv, head_dim, hidden, stored, tokens, dtype, on_device, device
):
    weight, bias, turn, caches = projection(
        heads, heads_kv, head_dim, hidden, stored, dtype, device
    )
    x, others = torch.randn(tokens, hidden).to(device, dtype), caches.clone()
    start = torch.tensor([3], dtype=torch.int32, device=device) if on_device else 3
    bias = None if tokens == 1 else bias
    q = project_and_store_triton(x, weight, bias, *turn, start, *caches)
    qkv = linear_triton(x, weight, bias).view(tokens, heads + 2 * heads_kv, head_dim)
    parts = qkv.split([heads, heads_kv, heads_kv], 1)
    want = rope_and_store_triton(*parts, *turn, start, *others)
    assert q.shape == (tokens, heads, head_dim) and torch.equal(q, want)
    assert torch.equal(caches, others)
    assert bool((caches[:, :3] == 7).all() and (caches[:, 3 + tokens :] == 7).all())


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_rows_that_are_no_numbers_spoil_only_their_own_lanes(device):
    """What is not turned does not meet its partner: values stay what the product gave."""
    weight, _, turn, caches = projection(1, 1, 8, 16, None, torch.float32, device)
    x = torch.ones(1, 16, device=device)
    weight[16] = float("inf")  # the first lane of v
    project_and_store_triton(x, weight, None, *turn, 0, *caches)
    assert torch.isinf(caches[1, 0, 0, 0]) and bool(caches[1, 0, 0, 1:].isfinite().all())


@pytest.mark.parametrize("kv", ["float", "int8"])
def test_the_reference_is_the_product_and_the_turn(kv):
    weight, bias, turn, caches = projection(4, 2, 16, 32, None, torch.float32, "cpu")
    x, scales = torch.randn(5, 32), None
    if kv == "int8":
        caches, scales = caches.to(torch.int8), torch.zeros(2, 64, 2, dtype=torch.float16)
    others, more = caches.clone(), None if scales is None else scales.clone()
    q = project_and_store(x, weight, bias, *turn, 2, *caches, scales)
    parts = (x @ weight.T + bias).view(5, 8, 16).split([4, 2, 2], 1)
    want = rope_and_store_reference(*parts, *turn, 2, *others, more)
    torch.testing.assert_close(q, want)
    assert int((caches - others).abs().max()) <= (1 if kv == "int8" else 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("stored", [None, "int4-g64z", "int8-g64"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_bits_of_a_row_of_heads_do_not_depend_on_the_other_rows(dtype, stored):
    weight, bias, _, _ = projection(32, 8, 128, 4096, stored, dtype, "cuda")
    angle = torch.randn(600, 64, device="cuda") * 3
    x, turn = torch.randn(300, 4096).to("cuda", dtype), (angle.cos(), angle.sin())
    caches = torch.zeros(2, 600, 8, 128, dtype=dtype, device="cuda")
    whole = project_and_store(x, weight, bias, *turn, 100, *caches)
    parts = linear_triton(x, weight, bias).view(300, -1, 128).split([32, 8, 8], 1)
    apart = torch.zeros_like(caches)
    assert torch.equal(rope_and_store_triton(*parts, *turn, 100, *apart), whole)
    assert torch.equal(apart, caches)
    for tokens in [*range(1, 33), 33, 64, 129]:
        rows, there = slice(tokens, 2 * tokens), torch.zeros_like(caches)
        at = torch.tensor([100 + tokens], dtype=torch.int32, device="cuda")
        q = project_and_store(x[rows], weight, bias, *turn, at, *there)
        assert torch.equal(q, whole[rows]), tokens
        new = slice(100 + tokens, 100 + 2 * tokens)
        assert torch.equal(there[:, new], caches[:, new]), tokens
