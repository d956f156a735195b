"""Attention against the KV cache: reference and kernel against the definition, and bits of rows."""

import mmap

import pytest
import torch

from spmoe_lite.kernels import attention_triton as module
from spmoe_lite.kernels.attention import attention, attention_reference
from spmoe_lite.kernels.attention_triton import attention_triton, splits_up_to

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


def definition(q, k_cache, v_cache, start, window):
    """softmax(q K^T / sqrt(D)) V over the keys each row may see, in fp64."""
    q, k, v = q.double().cpu(), k_cache.double().cpu(), v_cache.double().cpu()
    group = q.shape[1] // k.shape[1]
    out = torch.empty_like(q)
    for i in range(len(q)):
        position = start + i
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(q.shape[1]):
            keys = k[first : position + 1, head // group]
            p = torch.softmax(keys @ q[i, head] / q.shape[2] ** 0.5, dim=0)
            out[i, head] = p @ v[first : position + 1, head // group]
    return out


def make(tokens, start, heads, heads_kv, head_dim, dtype, device):
    """Random q and caches; rows that hold no key yet are NaN."""
    generator = torch.Generator().manual_seed(start + tokens)
    stored = start + tokens
    q = torch.randn(tokens, heads, head_dim, generator=generator)
    k = torch.randn(stored + 7, heads_kv, head_dim, generator=generator)
    v = torch.randn(stored + 7, heads_kv, head_dim, generator=generator)
    k[stored:], v[stored:] = float("nan"), float("nan")
    return (t.to(device, dtype) for t in (q, k, v))


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


def test_splits_cover_the_context_without_gap():
    """What `_split_begin` computes in the kernel agrees with what the launcher counts."""
    begins = [*range(0, 1024, 128), *range(1024, 4096, 256), *range(4096, 8192, 512)]
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
