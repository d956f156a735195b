"""The router: logits of E experts per token, the K best of them, and their weights.

    logits = x router^T (fp32);  experts = top K of logits;  weights = softmax over those K

This is Mixtral's rule: a softmax over all E, cut to K and divided by its sum, is a softmax over
the K. Equal logits: the lowest expert id wins. A row with NaN gives NaN weights and K different,
valid ids, so that the damage reaches the logits, where it is an error, and never an address.
Sources: Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088.
"""

import torch
import torch.nn.functional as F


def gate_topk(x: torch.Tensor, router: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], router [E, H] -> weights [T, k] fp32 (their sum is 1), experts [T, k] int32.

    Best expert first. CPU tensors take the torch reference.
    """
    if x.is_cuda:
        from .gate_triton import gate_topk_triton

        return gate_topk_triton(x, router, k)
    return gate_topk_reference(x, router, k)


def gate_topk_reference(
    x: torch.Tensor, router: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch."""
    logits = F.linear(x.float(), router.float())
    best, experts = torch.sort(
        logits, dim=-1, descending=True, stable=True
    )  # topk breaks ties anyhow
    return torch.softmax(best[:, :k], dim=-1), experts[:, :k].int()
