"""Rotary position embedding, and the new rows' place in the KV cache.

    y[:half] = x[:half] * cos - x[half:] * sin
    y[half:] = x[half:] * cos + x[:half] * sin

Lane i pairs with lane i + D/2, as Hugging Face checkpoints store it (not with lane i + 1, as the
original Llama files do). The caller makes cos and sin, once for all layers. Source: Su et al.
2021, arXiv 2104.09864.
"""

import torch


def rope_and_store(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: "int | torch.Tensor",
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Turn q and k of the positions from `start`; store k and v there; return the turned q.

    q [T, Hq, D], k and v [T, Hkv, D], cos and sin [C, D/2] fp32, caches [C, Hkv, D] of q's dtype;
    start is a number, or int32 [1] on the device. Computed in fp32 and rounded once. CPU tensors
    take the torch reference.
    """
    if q.is_cuda:
        from .rope_triton import rope_and_store_triton

        return rope_and_store_triton(q, k, v, cos, sin, start, k_cache, v_cache)
    return rope_and_store_reference(q, k, v, cos, sin, start, k_cache, v_cache)


def rope_and_store_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    start: "int | torch.Tensor",
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """The same by torch."""
    rows = slice(int(start), int(start) + len(q))
    cos, sin = cos[rows, None], sin[rows, None]
    k_cache[rows] = _turn(k, cos, sin)
    v_cache[rows] = v
    return _turn(q, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
