"""Keys and values of the tokens a model has seen, preallocated to the context size.

`length` tokens are stored. A forward pass writes its rows after `length` and moves `length` only when it
has finished, so a pass that is cancelled or fails leaves the cache as it was. Truncating is the whole
rollback: rejected rows are simply overwritten. A sliding window is applied by the attention kernel, so
the bytes held are constant whatever the window.

In int8 a row is codes and one scale per token and head (`kernels/attention.py`). They are made once, when
the row is stored, and of that row alone: it makes no difference in which pass it came. (On the CPU it may
make one to the last bits of the row itself, and so to a code: texts may part there at a near-tie.)
"""

from __future__ import annotations

import torch

from spmoe_lite.config import ModelConfig


class KVCache:
    """keys and values [layers, capacity, kv_heads, head_dim]; one conversation of one model.

    In int8, scales of each layer [kv_heads, capacity, 2] fp16, of keys and of values; else None.
    """

    def __init__(
        self, config: ModelConfig, capacity: int, dtype: torch.dtype, device: torch.device
    ):
        """dtype: the model's own, or int8."""
        shape = (config.num_hidden_layers, capacity, config.num_key_value_heads, config.head_dim)
        self.keys = torch.empty(shape, dtype=dtype, device=device)
        self.values = torch.empty(shape, dtype=dtype, device=device)
        pairs = (config.num_key_value_heads, capacity, 2)
        self.scales: list[torch.Tensor | None] = [
            torch.empty(pairs, dtype=torch.float16, device=device) if dtype == torch.int8 else None
            for _ in range(config.num_hidden_layers)
        ]
        self.capacity = capacity
        self.length = 0

    def truncate(self, length: int) -> None:
        """Forget every token after the first `length`."""
        self.length = min(self.length, length)

    @property
    def nbytes(self) -> int:
        scales = sum(each.nbytes for each in self.scales if each is not None)
        return self.keys.nbytes + self.values.nbytes + scales
