"""Sampled tokens without the host: the sampler's choice as small captured graphs behind those of the passes.

A captured pass ends with the best token of each row. `Drawing` puts the drawn one in its place, by the same
operations that the host would launch (`sampling.draw`), so the bits are the same. What a draw takes beside
logits is noise by position, which the host makes while the device computes: it lies in a ring, far enough
ahead for the step that is enqueued before this one has been read.

What needs the tokens before a row, penalties, is left to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from spmoe_lite.device import host_buffer
from spmoe_lite.sampling import draw

if TYPE_CHECKING:
    from spmoe_lite.config import SamplingParams
    from spmoe_lite.sampling import Sampler

Graphs = list[tuple[torch.cuda.CUDAGraph, Any]]


class Drawing:
    """Graphs that draw after a draft's pass and after the target's, captured for one set of filters."""

    def __init__(
        self,
        *,
        most: int,
        start: torch.Tensor,
        number: torch.Tensor,
        ids: torch.Tensor,
        newest: torch.Tensor | None,
        heads: Sequence[torch.Tensor],
        found: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        num_tokens: int,
        capture: Callable[[Callable[[int], Any], int], tuple[torch.cuda.CUDAGraph, Any]],
    ):
        """start, number [1], ids [2 + K] int32, newest [1]: as `DraftPasses` has them, after a pass.

        heads: logits [1, V] of the first draft pass and of the later ones. found: by rows T, the target's
        logits [T, V] and the report, whose entries T - 1 to 2T - 2 are the tokens.
        """
        self._passes = start, number, ids, newest, heads
        self._found, self._num_tokens, self._capture = found, num_tokens, capture
        self._ring = torch.zeros(
            (2 * (most + 1), num_tokens), dtype=torch.float64, device=start.device
        )
        self._filled = torch.cuda.Event()
        self._sampler: Sampler | None = None
        self._params: SamplingParams | None = None  # of the graphs, but for the seed
        self._until = 0  # noise of the positions before it has been sent
        self._drafts: Graphs = []
        self._rows: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}

    def begin(self, sampler: Sampler) -> None:
        """Draw by this sampler from now on. No step may be under way that draws by another."""
        if sampler is not self._sampler:
            self._make(replace(sampler.params, seed=0))
            self._sampler, self._until = sampler, 0

    def fill(self, first: int, last: int) -> None:
        """Send the noise of positions first to last, at most as many as the ring has, unless it is there.

        What runs on the current stream from now on finds it.
        """
        assert self._sampler is not None and last - first < len(self._ring)
        torch.cuda.current_stream().wait_event(self._filled)
        for position in range(max(first, self._until), last + 1):
            made = self._sampler.made_noise(position)
            staged = host_buffer(tuple(made.shape), made.dtype).copy_(made)
            self._ring[position % len(self._ring)].copy_(staged, non_blocking=True)
        self._until = max(self._until, last + 1)
        self._filled.record()

    def draft(self, i: int) -> None:
        """Enqueue the choice of proposal i, right after its pass."""
        self._drafts[i > 0][0].replay()

    def target(self, rows: int) -> None:
        """Enqueue the choice of every row of the target's pass, right after it."""
        self._rows[rows][0].replay()

    def _make(self, params: SamplingParams) -> None:
        if params == self._params:
            return
        self._params, self._sampler, self._drafts, self._rows = None, None, [], {}
        start, number, ids, newest, heads = self._passes
        found, ring, vocabulary = self._found, self._ring, self._num_tokens

        def noise(position: torch.Tensor) -> torch.Tensor:
            return ring.index_select(0, position.remainder(len(ring)))

        def after_draft(i: int) -> None:  # `number` counts the pass already
            assert newest is not None
            [of_position] = noise(start + number)
            newest.copy_(draw(heads[i][0, :vocabulary].float(), of_position, params))
            ids[1:].index_copy_(0, number.long(), newest)

        def after_target(rows: int) -> None:
            logits, report = found[rows]
            counted = torch.arange(1, rows + 1, dtype=torch.int32, device=ring.device)
            lines = zip(logits[:, :vocabulary].float(), noise(start + counted), strict=True)
            tokens = [draw(line, of_position, params) for line, of_position in lines]
            report[rows - 1 : 2 * rows - 1].copy_(torch.stack(tokens))

        self._drafts = [self._capture(after_draft, i) for i in range(len(heads))]
        self._rows = {rows: self._capture(after_target, rows) for rows in found}
        self._params = params
