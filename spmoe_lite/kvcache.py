"""Keys and values of the tokens a model has seen, preallocated to the context size.

`length` tokens are stored. A forward pass writes its rows after `length` and moves `length` only when it
has finished, so a pass that is cancelled or fails leaves the cache as it was. Truncating is the whole
rollback: rejected rows are simply overwritten. A sliding window is applied by the attention kernel, so
the bytes held are constant whatever the window.
"""

from __future__ import annotations

import torch

from spmoe_lite.config import ModelConfig


class KVCache:
    """keys and values [layers, capacity, kv_heads, head_dim]; one conversation of one model."""

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        self.capacity = capacity
        self.length = 0

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes
