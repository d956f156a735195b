"""Rotary position embedding, and the new rows' place in the KV cache.

    y[:half] = x[:half] * cos - x[half:] * sin
    y[half:] = x[half:] * cos + x[:half] * sin

An int8 cache takes codes and a scale per token and KV head, once, as they are written
(`attention.quantize_rows`): what a row's codes are depends on that row alone.

Lane i pairs with lane i + D/2, as Hugging Face checkpoints store it (not with lane i + 1, as the
original Llama files do). The caller makes cos and sin, once for all layers. Source: Su et al.
2021, arXiv 2104.09864.
"""

import torch

from .attention import quantize_rows
from .linear import Weight, linear


def project_and_store(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: "int | torch.Tensor",
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [T, H] and weight [(Hq + 2 Hkv) D, H], rows of q, k and v: `rope_and_store` of their product.

    bias [(Hq + 2 Hkv) D] or None; the rest, and what is returned, as there, with the same bits. One launch
    on a GPU, but for int8 caches, whose scales need whole rows.
    """
    if x.is_cuda and kv_scales is None:
        from .linear_triton import project_and_store_triton

        return project_and_store_triton(x, weight, bias, cos, sin, start, k_cache, v_cache)
    heads_k, head_dim = k_cache.shape[1:]
    heads = weight.shape[0] // head_dim
    qkv = linear(x, weight, bias).view(len(x), heads, head_dim)
    q, k, v = qkv.split([heads - 2 * heads_k, heads_k, heads_k], 1)
    return rope_and_store(q, k, v, cos, sin, start, k_cache, v_cache, kv_scales)


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: "int | torch.Tensor",
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn q and k of the positions from `start`; store k and v there; return the turned q.

    q [T, Hq, D], k and v [T, Hkv, D], cos and sin [C, D/2] fp32, caches [C, Hkv, D] of q's dtype;
    start is a number, or int32 [1] on the device. Computed in fp32 and rounded once to q's dtype.
    With kv_scales [Hkv, C or more, 2] fp16 the caches are int8. CPU tensors take the torch reference.
    """
    if q.is_cuda:
        from .rope_triton import rope_and_store_triton

        return rope_and_store_triton(q, k, v, cos, sin, start, k_cache, v_cache, kv_scales)
    return rope_and_store_reference(q, k, v, cos, sin, start, k_cache, v_cache, kv_scales)


def rope_and_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: "int | torch.Tensor",
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch."""
    rows = slice(int(start), int(start) + len(q))
    cos, sin = cos[rows, None], sin[rows, None]
    k = _turn(k, cos, sin)
    if kv_scales is not None:
        (k, k_scales), (v, v_scales) = quantize_rows(k), quantize_rows(v)
        kv_scales[:, rows] = torch.stack((k_scales, v_scales), -1).transpose(0, 1)
    k_cache[rows], v_cache[rows] = k, v
    return _turn(q, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
