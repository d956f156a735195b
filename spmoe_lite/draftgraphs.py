"""Drafting without the host in it: a draft's passes as captured CUDA graphs.

The first pass of a step takes the two newest known tokens, each later one the proposal before it; the
best token passes from one to the next on the device. The first one takes two because after full
acceptance the draft's cache is one token behind; where it is not, a row is computed again, with the same
bits. Where the sampler is not greedy the host reads logits and writes each proposal.

`DraftPasses` are the graphs, which captured steps (`graphs.py`) run as well. `DraftSteps` is for a target
that the host drives: a pass takes a tenth of the time that launching its kernels one by one does.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from spmoe_lite.device import capture_stream, capturing, host_buffer, read_back, side_stream
from spmoe_lite.model import ExpertSource, Transformer
from spmoe_lite.progress import check

if TYPE_CHECKING:
    from spmoe_lite.kvcache import KVCache
    from spmoe_lite.predictor import ExpertPredictor

Pick = Callable[[torch.Tensor, list[int]], int]
# layer, state [1, H] of the newest token after attention, number of the pass [1], whether it is the first
Seen = Callable[[int, torch.Tensor, torch.Tensor, bool], None]
Capture = Callable[[Callable[[int], Any], int], tuple[torch.cuda.CUDAGraph, Any]]
START, NUMBER, IDS = range(3)  # `DraftSteps`: position of the newest token; the pass; tokens


def capture(
    run: Callable[[int], Any], rows: int, reset: Callable[[], object], pool: Any
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of run(rows) and what it returned; `reset` gives it something to run on."""
    reset()
    run(rows)  # compiles and loads what the capture must not wait for
    graph, how = torch.cuda.CUDAGraph(), {"capture_error_mode": "thread_local"}
    with capturing, _no_collection(), _stream_kept():
        stream = capture_stream(torch.device("cuda", torch.cuda.current_device()))
        with torch.cuda.graph(graph, pool=pool, stream=stream, **how):  # waits for the device first
            kept = run(rows)
    return graph, kept


@contextmanager
def _stream_kept() -> Iterator[None]:
    """Whatever happens, the current stream is the one before: a capture that fails leaves torch's as it was in it."""
    before = torch.cuda.current_stream()
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: a graph that is deleted while this thread captures another spoils it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class DraftPasses:
    """The graphs of a draft's passes, over tokens, position and number that lie at fixed addresses."""

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        source: Callable[[int], ExpertSource | None],
        *,
        start: torch.Tensor,
        number: torch.Tensor,
        ids: torch.Tensor,
        num_tokens: int,
        seen: Seen | None,
        capture: Capture,
    ):
        """start, number [1] and ids [2 + K], int32: position of the newest token, the pass at hand, and the
        two newest tokens before the proposals, which the passes write.

        source: the experts of a pass of so many rows. num_tokens: ids from there on are never chosen.
        """
        newest = torch.zeros(1, dtype=torch.int32, device=ids.device)

        def run(rows: int) -> torch.Tensor:
            if rows == 2:
                number.zero_()
            first, index = rows == 2, number.long()
            tokens, at = (ids[:2], start - 1) if first else (newest, start + number)
            on_attention = None
            if seen is not None:
                on_attention = lambda layer, x: seen(layer, x[-1:], index, first)  # noqa: E731
            logits = model.run(tokens, kv, at, source(rows), 1, on_attention)
            newest.copy_(logits[0, :num_tokens].argmax())
            ids[2:].index_copy_(0, index, newest)
            number.add_(1)
            return logits

        # Nothing else is kept: a circle would leave the graphs to the garbage collector.
        self._ids, self.newest = ids, newest
        self._graphs = [capture(run, rows) for rows in (2, 1)]
        # Logits [1, V] of the first pass and of the later ones.
        self.heads = [logits for _, logits in self._graphs]

    def replay(self, i: int) -> torch.Tensor:
        """Enqueue pass i of a step; its logits [1, V], until the next one."""
        graph, logits = self._graphs[i > 0]
        graph.replay()
        return logits

    def put(self, i: int, token: int) -> None:
        """The host's choice in place of the best token of pass i."""
        self.newest.fill_(token)
        self._ids[2 + i].fill_(token)


class DraftSteps:
    """Proposals for a target that the host drives, and predictions while they are made."""

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        source: ExpertSource | None,
        *,
        predictor: ExpertPredictor | None,
        layers_ahead: int,
        most: int,
        num_tokens: int,
    ):
        """layers_ahead: the target's first layers, for which `predictor` names experts."""
        device = model.device
        self._predictor = predictor
        self.layers_ahead = layers_ahead if predictor is not None else 0
        self._params = torch.zeros(IDS + 2 + most, dtype=torch.int32, device=device)
        self._predicted: list[torch.Tensor] = []  # of the layers seen so far
        self._chosen: torch.Tensor | None = None  # [K, P, k]
        self._most, self._source = most, source  # which the graphs read
        self._aside = side_stream(device)
        # Recorded inside the first pass, and inside each later one.
        self._foreseen = [torch.cuda.Event(external=True) for _ in range(2)]
        pool = torch.cuda.graph_pool_handle()

        def reset() -> None:
            self._params.zero_()
            self._params[START].fill_(1)  # where the first pass begins at 0

        def source_of(rows: int) -> ExpertSource | None:
            if source is not None:
                source.begin_pass(rows)
            return source

        self.passes = DraftPasses(
            model,
            kv,
            source_of,
            start=self._params[START : START + 1],
            number=self._params[NUMBER : NUMBER + 1],
            ids=self._params[IDS:],
            num_tokens=num_tokens,
            seen=self._predict if self.layers_ahead else None,
            capture=lambda run, rows: capture(run, rows, reset, pool),
        )

    def propose(
        self,
        tokens: Sequence[int],
        count: int,
        pick: Pick | None,
        cancel: threading.Event | None,
        predicted: Callable[[int, torch.Tensor, torch.cuda.Event], None] | None,
    ) -> list[int]:
        """`count` tokens after `tokens`, at least two. The cache holds all but the last two or one of them;
        afterwards all of them and all proposals but the last, though its length does not say so.

        pick chooses one from logits [V] and the tokens before it; None: the best. predicted: called in
        each pass with its number, expert ids [P, k] in host memory, and the event after which they are
        there.
        """
        known, proposal = len(tokens), list[int]()
        params = host_buffer((IDS + 2,), torch.int32)
        params.copy_(torch.tensor([known - 1, 0, *tokens[-2:]]))
        torch.cuda.current_stream().wait_stream(self._aside)  # a step that was cut short
        self._params[: IDS + 2].copy_(params, non_blocking=True)
        for i in range(count):
            check(cancel)
            logits = self.passes.replay(i)
            if predicted is not None and self._chosen is not None:
                predicted(i, *self._fetch(i))
            if pick is not None:
                proposal.append(pick(logits[0], [*tokens, *proposal]))
                self.passes.put(i, proposal[i])
        if pick is None:
            proposal = read_back(self._params[IDS + 2 : IDS + 2 + count]).tolist()
        return proposal

    def _fetch(self, i: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """What pass i names, on its way to the host while the pass goes on."""
        assert self._chosen is not None
        there, arrived = host_buffer(self._chosen.shape[1:], torch.int32), torch.cuda.Event()
        self._aside.wait_event(self._foreseen[i > 0])
        with torch.cuda.stream(self._aside):
            there.copy_(self._chosen[i], non_blocking=True)
            arrived.record()
        return there, arrived

    def _predict(self, layer: int, state: torch.Tensor, index: torch.Tensor, first: bool) -> None:
        assert self._predictor is not None
        if layer < self.layers_ahead:
            self._predicted.append(self._predictor.choose(layer, state))
        if layer + 1 == self.layers_ahead:
            chosen, self._predicted = torch.cat(self._predicted), []
            if self._chosen is None:
                self._chosen = chosen.new_zeros((self._most, *chosen.shape))
            self._chosen.index_copy_(0, index, chosen[None])
            self._foreseen[not first].record()
