"""One conversation: its tokens, and what each model has seen of them.

The newest token is in no cache. Each model is fed `pending`, the tokens after its cache, so that prefill,
a plain step and the draft's catch-up after full acceptance are one code path. `commit` and `start` are
the only places where a conversation changes; a pass that fails or is cancelled changes nothing. Both
shorten the caches first: wherever they are interrupted, a cache never holds a row of another token than
the one in `tokens`, and `start` cuts off what is beyond them.
"""

from __future__ import annotations

from collections.abc import Sequence

from spmoe_lite.kvcache import KVCache


class Session:
    """tokens, the target's cache, and the draft's (None without a draft)."""

    def __init__(self, target_kv: KVCache, draft_kv: KVCache | None):
        self.tokens: list[int] = []
        self.target_kv = target_kv
        self.draft_kv = draft_kv

    def start(self, prompt: Sequence[int]) -> int:
        """Make `prompt` the conversation; return how many of its tokens the target has already seen."""
        same = 0
        for ours, theirs in zip(self.tokens, prompt, strict=False):
            if ours != theirs:
                break
            same += 1
        self._roll_back(min(same, len(prompt) - 1))
        self.tokens = list(prompt)
        return self.target_kv.length

    def pending(self, kv: KVCache) -> list[int]:
        """The tokens this cache has not seen; at least the newest one."""
        return self.tokens[kv.length :]

    def commit(self, tokens: Sequence[int]) -> None:
        """Append the target's tokens; both caches forget the rejected rows."""
        self._roll_back(len(self.tokens) + len(tokens) - 1)
        self.tokens += tokens

    def _roll_back(self, length: int) -> None:
        self.target_kv.truncate(length)
        if self.draft_kv is not None:
            self.draft_kv.truncate(length)
