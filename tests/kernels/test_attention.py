"""Attention against the KV cache: reference and kernel against the definition, and bits of rows."""

import mmap

import pytest
import torch

from spmoe_lite.kernels import attention_triton as module
from spmoe_lite.kernels.attention import attention, attention_reference, quantize_rows
from spmoe_lite.kernels.attention_triton import attention_triton, key_blocks, splits_up_to

SHAPES = [  # tokens, start, query heads, KV heads, head size, window
    (1, 0, 4, 2, 64, None),
    (1, 296, 2, 1, 64, None),
    (3, 126, 3, 1, 80, None),
    (4, 1300, 3, 1, 96, 100),
    (3, 1279, 2, 2, 128, 257),
    (2, 1700, 2, 1, 16, None),
    (40, 0, 4, 2, 64, None),
    (40, 0, 4, 2, 64, 7),
    (12, 300, 1, 1, 64, 37),
    (9, 250, 2, 2, 16, 200),
]
UNEQUAL = [  # tokens, start, query heads, KV heads, key size, value size, window
    (1, 296, 2, 1, 192, 128, None),
    (3, 126, 1, 1, 192, 128, 100),
    (12, 130, 1, 1, 72, 24, 29),
    (2, 130, 2, 2, 40, 80, None),
]
CODED = [
    (1, 296, 4, 2, 64, 64, None),
    (12, 120, 1, 1, 96, 32, 37),
    (1, 140, 2, 1, 192, 128, None),
    (40, 0, 2, 2, 32, 32, 7),
]


def definition(q, k_cache, v_cache, start, window, scale=None):
    """softmax(scale * q K^T) V over the keys each row may see, in fp64."""
    q, k, v = q.double().cpu(), k_cache.double().cpu(), v_cache.double().cpu()
    group = q.shape[1] // k.shape[1]
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out = q.new_empty(*q.shape[:2], v.shape[2])
    for i in range(len(q)):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // group]
            p = torch.softmax(keys @ q[i, head] * scale, dim=0)
            out[i, head] = p @ v[first : position + 1, head // group]
    return out


def make(tokens, start, heads, heads_kv, head_dim, dtype, device, value_dim=None):
    """Random q and caches; rows that hold no key yet are NaN."""
    generator = torch.Generator().manual_seed(start + tokens)
    stored = start + tokens
    q = torch.randn(tokens, heads, head_dim, generator=generator)
    k = torch.randn(stored + 7, heads_kv, head_dim, generator=generator)
    v = torch.randn(stored + 7, heads_kv, value_dim or head_dim, generator=generator)
    k[stored:], v[stored:] = float("nan"), float("nan")
    return (t.to(device, dtype) for t in (q, k, v))


def make_coded(tokens, start, heads, heads_kv, head_dim, value_dim, dtype, device):
    """The same with caches in int8: (q, k, v, scales, and k and v in fp64 as the codes mean them).

    Tokens differ in size by up to 2^6, and scales of rows that hold no key yet are NaN.
    """
    q, *caches = make(tokens, start, heads, heads_kv, head_dim, torch.float32, device, value_dim)
    stored = start + tokens
    scales = torch.full((heads_kv, stored + 12, 2), float("nan"), dtype=torch.float16).to(device)
    codes, meant = [], []
    for which, cache in enumerate(caches):
        cache *= 2.0 ** -(torch.arange(stored + 7, device=device) % 7)[:, None, None]
        code, scale = quantize_rows(cache)
        assert scale[stored:].isnan().all() and not scale[:stored].isnan().any()
        code[stored:] = 127
        scales[:, : stored + 7, which] = scale.T
        codes.append(code)
        meant.append(code.double() * scale.double()[..., None])
    return q.to(dtype), *codes, scales, *meant


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernel_matches_the_definition(dtype, shape, device):
    *sizes, window = shape
    q, k, v = make(*sizes, dtype, device)
    got = attention_triton(q, k, v, sizes[1], window).double().cpu()
    tolerance = 2e-6 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(
        got, definition(q, k, v, sizes[1], window), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] + shape[1] > 128])
def test_both_ways_over_the_splits_agree(shape, device, monkeypatch):
    """One program per split and a merge, or one program for all: the launcher may choose freely."""
    *sizes, window = shape
    q, k, v = make(*sizes, torch.float16, device)
    spread = attention_triton(q, k, v, sizes[1], window)
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 0)
    assert torch.equal(attention_triton(q, k, v, sizes[1], window), spread)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reference_matches_the_definition(dtype, shape):
    *sizes, window = shape
    q, k, v = make(*sizes, dtype, "cpu")
    got = attention(q, k, v, sizes[1], window)
    assert got.is_contiguous() and got.dtype == dtype
    tolerance = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(
        got.double(), definition(q, k, v, sizes[1], window), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("shape", UNEQUAL)
def test_keys_and_values_of_different_size(shape, device):
    *sizes, value_dim, window = shape
    for dtype, scale in ((torch.float32, 0.05), (torch.float16, None)):
        q, k, v = make(*sizes, dtype, device, value_dim)
        tolerance = 2e-6 if dtype == torch.float32 else 3e-3
        want = definition(q, k, v, sizes[1], window, scale)
        for function in (attention_triton, attention_reference):
            got = function(q, k, v, sizes[1], window, scale)
            assert got.is_contiguous() and got.dtype == dtype
            torch.testing.assert_close(
                got.double().cpu(), want, rtol=tolerance, atol=tolerance, msg=function.__name__
            )


def test_key_blocks_hold_every_column_and_waste_little():
    """Keys as wide as values take the one load whose bits were published."""
    assert key_blocks(192, 128) == (128, 64)
    for head_dim in range(1, 300):
        for value_dim in (16, 128, head_dim):
            first, second = key_blocks(head_dim, value_dim)
            assert head_dim <= first + second < 2 * head_dim
            if head_dim == value_dim:
                assert second == 0
            for block in (first, second):
                assert block & (block - 1) == 0


@pytest.mark.parametrize("shape", CODED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_int8_caches_match_the_definition(dtype, shape, device):
    """Of what the codes mean: this is the kernel's own error, not that of the codes."""
    *sizes, window = shape
    q, k, v, scales, *meant = make_coded(*sizes, dtype, device)
    want = definition(q, *meant, sizes[1], window)
    tolerance = 2e-6 if dtype == torch.float32 else 3e-3
    for function in (attention_triton, attention_reference):
        got = function(q, k, v, sizes[1], window, kv_scales=scales)
        assert got.is_contiguous() and got.dtype == dtype
        torch.testing.assert_close(
            got.double().cpu(), want, rtol=tolerance, atol=tolerance, msg=function.__name__
        )


@pytest.mark.parametrize("size", [2.0**-11, 2.0**15])
def test_values_of_any_size_keep_their_precision_in_fp16(size, device):
    """A probability times a scale could leave fp16's range on either side."""
    q = torch.full((3, 2, 64), 0.1, dtype=torch.float16, device=device)  # every p is 0.556
    k = torch.ones(203, 1, 64, device=device)
    v = size * (1 - 0.5 * torch.rand(1, 1, 64, device=device)).expand(203, 1, 64)
    (k, k_scale), (v, v_scale) = quantize_rows(k), quantize_rows(v)
    meant = [c.double() * s.double()[..., None] for c, s in ((k, k_scale), (v, v_scale))]
    scales = torch.stack((k_scale.T, v_scale.T), -1).contiguous()
    got = attention_triton(q, k, v, 200, kv_scales=scales).double().cpu()
    torch.testing.assert_close(got, definition(q, *meant, 200, None), rtol=1e-3, atol=0)


def test_the_error_of_int8_caches_is_what_is_stated():
    """0.9 % on Gaussian rows of 128, as `attention.py` says; not much less, or it says too much."""
    q, k, v = make(2, 400, 4, 2, 128, torch.float32, "cpu")
    k, v = k[:402], v[:402]
    want = definition(q, k, v, 400, None)
    meant = [code * scale[..., None] for code, scale in map(quantize_rows, (k, v))]
    error = (definition(q, *meant, 400, None) - want).norm() / want.norm()
    assert 0.007 < error < 0.011


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_code_is_half_a_step_away_at_most(dtype):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 3, 80, generator=generator).to(dtype)
    rows *= 2.0 ** torch.randint(-9, 9, (7, 3), generator=generator)[..., None]
    codes, scales = quantize_rows(rows)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    x, step = rows.double(), scales.double()[..., None]
    torch.testing.assert_close(step[..., 0], x.abs().amax(-1) / 127, rtol=2**-11, atol=2**-25)
    assert (codes.abs().amax(-1) == 127).all()
    # Half a step, and what the rounded scale cuts off the largest.
    assert ((codes * step - x).abs() <= step * (0.5 + 127 * 2**-11)).all()


@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("window", [None, 90])
def test_both_ways_and_any_chunk_give_the_bits_of_the_whole(window, coded, device, monkeypatch):
    """For unequal sizes and int8; what a chunk leaves out of its launch changes no row."""
    sizes = 12, 122, 1, 1, 192 if window else 48, 32
    if coded:
        q, k, v, scales, *_ = make_coded(*sizes, torch.float16, device)
    else:
        (q, k, v), scales = make(*sizes[:5], torch.float16, device, sizes[5]), None
    whole = attention_triton(q, k, v, 122, window, kv_scales=scales)
    for first, last in ((0, 1), (5, 6), (11, 12), (4, 7), (0, 5), (5, 12)):
        got = attention_triton(q[first:last], k, v, 122 + first, window, kv_scales=scales)
        assert torch.equal(got, whole[first:last]), (first, last)
    at = torch.tensor([122], dtype=torch.int32, device=device)
    assert torch.equal(attention_triton(q, k, v, at, window, kv_scales=scales), whole)
    monkeypatch.setattr(module, "ENOUGH_PROGRAMS", 0)
    assert torch.equal(attention_triton(q, k, v, 122, window, kv_scales=scales), whole)


def test_splits_cover_the_context_without_gap():
    """What `_split_begin` computes in the kernel agrees with what the launcher counts."""
    begins = [*range(0, 1024, 128), *range(1024, 2048, 256), *range(2048, 8192, 512)]
    begins += range(8192, 40000, 1024)
    for position in (0, 1, 127, 128, 1023, 1024, 1025, 4095, 4096, 8191, 8192, 8193, 33000):
        assert splits_up_to(position) == sum(begin <= position for begin in begins)


def test_kind_k_a_cache_beyond_2_31_elements(device):
    """O32: the window leads to the last rows of a cache whose other pages nobody touches."""
    row, window = 8 * 128, 50
    start = (1 << 31) // row + 100
    size = (start + 8) * row * 2
    if device == "cpu":
        caches = [torch.frombuffer(mmap.mmap(-1, size), dtype=torch.float16) for _ in "kv"]
    else:
        caches = [torch.empty(size // 2, dtype=torch.float16, device=device) for _ in "kv"]
    k, v = (cache.view(-1, 8, 128) for cache in caches)
    for cache in (k, v):
        cache[start - window :] = torch.randn(window + 8, 8, 128).to(device, torch.float16)
    q = torch.randn(3, 8, 128).to(device, torch.float16)
    want = (
        attention_reference(q.cpu(), k.cpu(), v.cpu(), start, window) if device == "cpu" else None
    )
    got = attention_triton(q, k, v, start, window)
    near = slice(start - window, start + 8)
    moved = attention_triton(q, k[near].contiguous(), v[near].contiguous(), window, window)
    torch.testing.assert_close(got, moved, rtol=3e-3, atol=3e-3)
    if want is not None:
        torch.testing.assert_close(got, want, rtol=3e-3, atol=3e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_bits_do_not_depend_on_chunk_or_draft_length(dtype, head_dim, window):
    total = 5000
    q, k, v = make(total, 0, 8, 2, head_dim, dtype, "cuda")
    whole = attention(q, k, v, 0, window)
    for tokens in [*range(1, 33), 33, 64, 200]:
        start = (tokens * 353) % (total - tokens)
        got = attention(q[start : start + tokens], k, v, start, window)
        assert torch.equal(got, whole[start : start + tokens]), (tokens, start)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim, coded", [(192, False), (128, True), (192, True)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_bits_of_unequal_sizes_and_of_int8(dtype, head_dim, coded, window):
    total = 5000
    if coded:
        q, k, v, scales, *_ = make_coded(total, 0, 8, 2, head_dim, 128, dtype, "cuda")
    else:
        (q, k, v), scales = make(total, 0, 8, 2, head_dim, dtype, "cuda", 128), None
    whole = attention(q, k, v, 0, window, kv_scales=scales)
    for tokens in [*range(1, 33), 33, 64, 200]:
        start = (tokens * 353) % (total - tokens)
        got = attention(q[start : start + tokens], k, v, start, window, kv_scales=scales)
        assert torch.equal(got, whole[start : start + tokens]), (tokens, start)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("tokens, start", [(1, 0), (3, 120), (2, 300), (5, 1019)])
def test_a_position_on_the_device_gives_the_same_bits(tokens, start, window, device):
    """As captured graphs have it: the launch is sized for the whole cache."""
    q, k, v = make(tokens, start, 2, 1, 32, torch.float32, device)
    room = k.new_full((1100, *k.shape[1:]), float("nan"))
    keys, values = room.clone(), room.clone()
    keys[: len(k)], values[: len(v)] = k, v
    at = torch.tensor([start], dtype=torch.int32, device=device)
    want = attention_triton(q, keys, values, start, window)
    assert torch.equal(attention_triton(q, keys, values, at, window), want)
    assert torch.equal(
        attention_reference(q, keys, values, at, window),
        attention_reference(q, keys, values, start, window),
    )
