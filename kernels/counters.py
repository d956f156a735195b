"""Counters with which the programs of one launch find out who is the last to arrive.

A program stores its part of a result, then adds 1 to the counter of its tile, with acquire and
release; whoever finds all others counted goes on with the whole. It sets the counter back to zero, so
that a captured graph can be replayed. Counters belong to a tensor (a weight): two launches over one
tensor at the same time would count each other's parts.
"""

import torch
from torch.utils.weak import WeakTensorKeyDictionary

KEPT = 256  # at least; a router has one for each tile of tokens

_counters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # owner -> int32


def counters_of(owner: torch.Tensor, count: int) -> torch.Tensor:
    """int32 [at least count], zero whenever no launch over `owner` runs.

    What a captured graph has seen stays: where more are needed than the first time, they are made for
    once and not kept.
    """
    counters: torch.Tensor | None = _counters.get(owner)
    if counters is None:
        kept = max(count, KEPT)
        counters = _counters[owner] = owner.new_zeros(kept, dtype=torch.int32)
    return counters if len(counters) >= count else owner.new_zeros(count, dtype=torch.int32)
