"""Attention of T new tokens against the KV cache, which already holds their own rows.

    S = q K^T / sqrt(D);  P = softmax(S over the visible keys);  out = P V

Row i is position p = start + i and sees the keys j with j <= p and, with a window w, j > p - w
(Mistral's sliding window). Query head h reads KV head h // (Hq / Hkv). Decode, verify and prefill
are one function: they differ only in T and start.

The reference is torch's fused attention. The kernel, its fixed split of the context and why a row
has the same bits for any T are described in `attention_triton.py`.
"""

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: int,
    window: int | None = None,
) -> torch.Tensor:
    """q [T, Hq, D]; k_cache, v_cache [C, Hkv, D], rows up to start + T valid -> [T, Hq, D].

    Rows of the caches from start + T on are not read. CPU tensors take the torch reference.
    """
    if q.is_cuda:
        from .attention_triton import attention_triton

        return attention_triton(q, k_cache, v_cache, start, window)
    return attention_reference(q, k_cache, v_cache, start, window)


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: int,
    window: int | None = None,
) -> torch.Tensor:
    """The same by torch."""
    tokens, num_heads, head_dim = q.shape
    end = start + tokens
    first = 0 if window is None else max(0, start - window + 1)  # no row sees a key before this one
    k = k_cache[first:end].transpose(0, 1)[None]  # [1, Hkv, keys, D]
    v = v_cache[first:end].transpose(0, 1)[None]

    if (
        tokens == 1
    ):  # the heads of a group become rows: no mask, and the keys are read once per group
        out = F.scaled_dot_product_attention(q.view(1, k.shape[1], -1, head_dim), k, v)
        return out.reshape(1, num_heads, head_dim)

    q = q.transpose(0, 1)[None]
    if start == 0 and (window is None or end <= window):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        visible = _visible(first, start, end, window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
    return out[0].transpose(0, 1).contiguous()


def _visible(
    first: int, start: int, end: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[T, keys] bool: may row start + i see key first + j?"""
    row = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    visible = key <= row
    return visible if window is None else visible & (key > row - window)
