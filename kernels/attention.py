"""Attention of T new tokens against the KV cache, which already holds their own rows.

    S = scale * q K^T;  P = softmax(S over the visible keys);  out = P V

Row i is position p = start + i and sees the keys j with j <= p and, with a window w, j > p - w
(Mistral's sliding window). Query head h reads KV head h // (Hq / Hkv). Decode, verify and prefill
are one function: they differ only in T and start.

Keys and values may differ in size (DeepSeek: 192 and 128), and both caches may be int8 with one fp16
scale per token and KV head, as `quantize_rows` makes them: code = round(x / scale), scale = max |x| /
127. On Gaussian rows of 128 that is an error of 0.9 % in the result, by norm.

The reference is torch's fused attention. The kernel, its fixed split of the context and why a row
has the same bits for any T are described in `attention_triton.py`.
"""

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: "int | torch.Tensor",
    window: int | None = None,
    scale: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, Hq, D]; k_cache [C, Hkv, D], v_cache [C, Hkv, DV], rows up to start + T valid; all of
    one float dtype -> [T, Hq, DV] in it.

    start is a number, or int32 [1] on the device, of any place in the cache. scale > 0 is D ** -0.5
    if not given. With kv_scales [Hkv, C or more, 2] fp16, of keys and of values, both caches are
    int8. Rows of caches and scales from start + T on are not read. CPU tensors take the torch
    reference.
    """
    if q.is_cuda:
        from .attention_triton import attention_triton

        return attention_triton(q, k_cache, v_cache, start, window, scale, kv_scales)
    return attention_reference(q, k_cache, v_cache, start, window, scale, kv_scales)


def attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    start: "int | torch.Tensor",
    window: int | None = None,
    scale: float | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same by torch; int8 caches in fp32."""
    tokens, num_heads, head_dim = q.shape
    start = int(start)
    end = start + tokens
    first = 0 if window is None else max(0, start - window + 1)  # no row sees a key before this one
    k, v, dtype = k_cache[first:end], v_cache[first:end], q.dtype
    if kv_scales is not None:
        q = q.to(torch.promote_types(dtype, torch.float32))
        scales = kv_scales[:, first:end].permute(2, 1, 0)[..., None]  # [2, keys, Hkv, 1]
        k, v = k * scales[0].to(q.dtype), v * scales[1].to(q.dtype)
    k = k.transpose(0, 1)[None]  # [1, Hkv, keys, D]
    v = v.transpose(0, 1)[None]

    if (
        tokens == 1
    ):  # the heads of a group become rows: no mask, and the keys are read once per group
        q = q.view(1, k.shape[1], -1, head_dim)
        out = F.scaled_dot_product_attention(q, k, v, scale=scale)
        return out.reshape(1, num_heads, v.shape[-1]).to(dtype)

    q = q.transpose(0, 1)[None]
    if start == 0 and (window is None or end <= window):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=scale)
    else:
        visible = _visible(first, start, end, window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, enable_gqa=True, scale=scale
        )
    return out[0].transpose(0, 1).contiguous().to(dtype)


def quantize_rows(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values [T, Hkv, D] float -> codes int8 [T, Hkv, D], scales fp16 [T, Hkv].

    code = round(x / scale), half to even, within 127 either way, by the scale as stored. A row too
    small for a scale gives zeros. One that is not finite, or too large for a scale, gives the scale
    NaN: attention shows it.
    """
    x = rows.float()
    scales = (x.abs().amax(-1) / 127).half()
    finite = scales.isfinite()
    usable = (finite & (scales > 0))[..., None]
    codes = (x / torch.where(usable, scales[..., None].float(), 1.0)).round().clamp(-127, 127)
    codes = torch.where(usable, codes, 0.0).to(torch.int8)
    return codes, torch.where(finite, scales, float("nan"))


def _visible(
    first: int, start: int, end: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[T, keys] bool: may row start + i see key first + j?"""
    row = torch.arange(start, end, device=device)[:, None]
    key = torch.arange(first, end, device=device)
    visible = key <= row
    return visible if window is None else visible & (key > row - window)
