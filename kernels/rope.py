"""Rotary position embedding: the two halves of each head turn by an angle per position and lane.

    y[:half] = x[:half] * cos - x[half:] * sin
    y[half:] = x[half:] * cos + x[:half] * sin

Lane i pairs with lane i + D/2, as Hugging Face checkpoints store it (not with lane i + 1, as the
original Llama files do). The caller makes cos and sin, once for all layers. Source: Su et al.
2021, arXiv 2104.09864.
"""

import torch


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T, Hq, D], k [T, Hkv, D], cos and sin [T, D/2] fp32 -> turned q and k, new tensors.

    Computed in fp32 and rounded once to the dtype of q and k. CPU tensors take the torch reference.
    """
    if q.is_cuda:
        from .rope_triton import rope_triton

        return rope_triton(q, k, cos, sin)
    return rope_reference(q, k, cos, sin)


def rope_reference(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch."""
    cos, sin = cos[:, None], sin[:, None]
    return _turn(q, cos, sin), _turn(k, cos, sin)


def _turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
