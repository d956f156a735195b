"""The router: logits of E experts per token, the k best experts, and their weights.

    logits  = x router^T (fp32)
    scores  = softmax(logits) over all E, or sigmoid(logits)
    experts = the k best of scores + bias, perhaps among the best groups only
    weights = scores of those k, perhaps divided by their sum, times a factor

`Routing` says which; without one it is Mixtral's rule. Equal values: the lowest expert id wins, and
among groups the lowest group. Where only the order of the scores counts, logits are compared in
their place: the order is the same, and two that a score would round to one number stay two. A row
with a NaN among its values gives NaN weights and k different, valid ids, so that the damage reaches
the logits, where it is an error, and never an address.

`norm_gate_topk` is `rms_norm` and the router in one launch; the rows it returns have the bits of
`rms_norm`, and the router sees them as they are returned, rounded.

Sources: Shazeer et al. 2017, arXiv 1701.06538; Mixtral, arXiv 2401.04088; groups: DeepSeek-V2,
arXiv 2405.04434, section 2.2.2; correction bias: DeepSeek-V3, arXiv 2412.19437, equation 16, and
Wang et al., arXiv 2408.15664; gate of a shared expert: Qwen2-MoE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spmoe_lite.config import Routing

from .norm import rms_norm_reference

MIXTRAL = Routing()
TINY = 1e-20  # keeps a sum of scores that all underflowed from dividing by zero


def gate_topk(
    x: torch.Tensor,
    router: torch.Tensor,
    k: int,
    routing: Routing = MIXTRAL,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, H], router [E, H], bias [E] fp32 -> weights [T, k] fp32, experts [T, k] int32.

    Best expert first. With a shared expert's gate: router [E + 1, H], weights [T, k + 1], its own
    last. CPU tensors take the torch reference. On the GPU no two launches over one router tensor
    may run at the same time: they count their finished parts in one place.
    """
    if x.is_cuda:
        from .gate_triton import gate_topk_triton

        return gate_topk_triton(x, router, k, routing, bias)
    return gate_topk_reference(x, router, k, routing, bias)


def norm_gate_topk(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    k: int,
    routing: Routing = MIXTRAL,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, H], norm_weight [H] -> rms_norm(x) [T, H], and `gate_topk` of it."""
    if x.is_cuda:
        from .gate_triton import norm_gate_topk_triton

        return norm_gate_topk_triton(x, norm_weight, eps, router, k, routing, bias)
    normed = rms_norm_reference(x, norm_weight, eps)
    return normed, *gate_topk_reference(normed, router, k, routing, bias)


def gate_topk_reference(
    x: torch.Tensor,
    router: torch.Tensor,
    k: int,
    routing: Routing = MIXTRAL,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by torch."""
    logits = F.linear(x.float(), router.float())
    shared = logits[:, len(router) - routing.shared_expert_gate :].sigmoid()
    logits = logits[:, : logits.shape[1] - shared.shape[1]]
    softmax = routing.scoring_func == "softmax"
    scores = logits.softmax(-1) if softmax else logits.sigmoid()
    choice = logits if by_logits(routing, bias) else scores if bias is None else scores + bias
    broken = choice.isnan().any(-1, keepdim=True)
    if routing.n_group > 1:
        choice = _within_groups(choice, routing)
    experts = choice.sort(dim=-1, descending=True, stable=True).indices[:, :k]  # topk ties anyhow
    if softmax and routing.norm_topk_prob:
        weights = logits.gather(1, experts).softmax(-1)
    else:
        weights = scores.gather(1, experts)
        if routing.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    weights = torch.cat((weights * routing.routed_scaling_factor, shared), dim=1)
    return weights.masked_fill(broken, float("nan")), experts.int()


def by_logits(routing: Routing, bias: torch.Tensor | None) -> bool:
    """Whether the order of the logits decides: no bias, and no sum of scores in a group."""
    return bias is None and (routing.n_group == 1 or routing.group_score == "max")


def _within_groups(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """choice [T, E] with minus infinity outside the best groups; inside it stays above that."""
    grouped = choice.clamp(min=torch.finfo(torch.float32).min).unflatten(1, (routing.n_group, -1))
    best = grouped.topk(1 if routing.group_score == "max" else 2, dim=2).values.sum(2)
    order = best.sort(dim=1, descending=True, stable=True).indices[:, : routing.topk_group]
    closed = torch.ones_like(best, dtype=torch.bool).scatter(1, order, False)
    return grouped.masked_fill(closed[:, :, None], float("-inf")).flatten(1)
