"""Accept the part of a draft that the target would have written itself.

Row i of the target's logits follows the context plus the first i draft tokens. The target draws its own
token from each row in turn (`sampling.py`: the draw depends on seed and position, never on the draft);
as long as it equals the proposal the next row is valid too, and the first row that differs still gives
one token. So n agreed proposals emit n + 1 tokens, each of them the target's own.

Leviathan et al. 2023 (arXiv 2211.17192) accept with probability min(1, p/q) and resample; that accepts a
little more at high temperature, but makes the text depend on the draft. See docs/log.md for the price.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmoe_lite.sampling import Sampler, check_finite


@dataclass(frozen=True, slots=True)
class Verdict:
    """`tokens` the target wrote; the first `num_accepted` of them were proposed by the draft."""

    tokens: list[int]
    num_accepted: int


def verify(
    draft_tokens: Sequence[int],
    logits: torch.Tensor,
    sampler: Sampler,
    context: Sequence[int],
    chosen: list[int] | None = None,
) -> Verdict:
    """logits [N + 1, V] of the target for N proposals after `context`; `chosen` of each row, if known."""
    assert len(logits) == len(draft_tokens) + 1
    finite = [True] * len(logits)
    if chosen is not None:
        found = chosen
    elif sampler.greedy:
        found = sampler.pick_greedy(logits)
    else:  # a row counts only where all proposals before it were agreed to
        before = [[*context, *draft_tokens[:row]] for row in range(len(logits))]
        found, finite = sampler.pick_rows(logits, before)
    tokens: list[int] = []
    for row, token in enumerate(found):
        check_finite(finite[row])
        tokens.append(token)
        if row < len(draft_tokens) and token != draft_tokens[row]:
            break
    return Verdict(tokens, len(tokens) - 1)
