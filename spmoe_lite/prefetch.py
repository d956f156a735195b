"""Copying the experts that the draft points at, while it is still drafting.

The decode thread calls `observe` for every layer of a draft pass, or `foresee` for a captured one; above
the cutoff nothing happens, below it the prediction is queued and the call returns. One worker takes what
was predicted in the order of deadlines, which is the order of the layers, and has the store copy what is
not resident. That ends with the drafting: a copy begun later holds up the pass, which waits for the bus.
An error in the worker is raised again in the decode thread.

A prefetch that evicts more than it brings is worse than none: when too few of the last copies were used,
prefetching pauses for a while and then tries again. Text never depends on any of this.
"""

from __future__ import annotations

import heapq
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Sequence

import torch

from spmoe_lite.predictor import ExpertPredictor, Prediction
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore

log = logging.getLogger("spmoe_lite")

JUDGED_COPIES = 64  # prefetches looked at together
LEAST_USEFUL = 0.25  # of them must have been used, or prefetching pauses
PAUSE_STEPS = 64

_Item = tuple[float, Prediction | None]  # step; without prediction: to be woken for the end


class Usefulness:
    """Whether copying ahead pays, by how many of the last copies were used; looked at once a step.

    late_helps: a late copy goes on, and the pass waits for the rest of it. Where the device decides it
    is given up.
    """

    def __init__(self, counters: Counters, late_helps: bool = True):
        self._counters = counters
        self._late_helps = late_helps
        self._judged = counters.copy()
        self._left = 0  # steps of the pause

    @property
    def paused(self) -> bool:
        """Whether measured usefulness has switched prefetching off for now."""
        return self._left > 0

    def judge(self) -> bool:
        """Pause when too few of the last copies were used, look again after the pause; True to go on."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._judged = self._counters.copy()
            return not self._left
        seen = self._counters.since(self._judged)
        if seen.prefetches < JUDGED_COPIES:
            return True
        used = seen.prefetch_useful + self._late_helps * seen.prefetch_late
        if used < LEAST_USEFUL * seen.prefetches:
            self._left = PAUSE_STEPS
            log.info(
                "prefetching pauses for %d steps: %d of the last %d prefetched experts were used",
                PAUSE_STEPS,
                used,
                seen.prefetches,
            )
        self._judged = self._counters.copy()
        return not self._left


def count_recall(
    store: ExpertStore, predictions: Sequence[tuple[int, int, list[int]]], accepted_rows: int
) -> None:
    """Compare predictions (layer, row, experts best first) with what the pass's accepted rows used.

    Called before the store's `end_pass`.
    """
    if not predictions:
        return
    counters, trace = store.counters, store.trace
    for layer, row, experts in predictions:
        if row >= accepted_rows or layer not in trace:
            continue
        named, used = set(experts), trace[layer][row]
        absent = [e for e in used if store.would_miss((layer, e))]
        counters.predictions += 1
        counters.predicted_best_used += experts[0] in used
        counters.predicted += len(named)
        counters.predicted_used += len(named & set(used))
        counters.wanted += len(used)
        counters.would_miss += len(absent)
        counters.would_miss_predicted += len(named & set(absent))


class Prefetcher:
    """One worker thread between the draft's states and the target's slots."""

    def __init__(self, store: ExpertStore, predictor: ExpertPredictor):
        self.predictor = predictor
        self._store = store
        self._queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()  # Ctrl-C leaves it unlocked
        self._step: float = 0  # infinite once closed
        self._row = -1
        self._cutoff = 0
        self._predictions: list[Prediction] = []
        self.usefulness = Usefulness(store.counters)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="spmoe-prefetch", daemon=True)
        self._thread.start()

    def start_step(self, cutoff: int) -> None:
        """Drafting begins; target layers below `cutoff` may be prefetched."""
        self._raise_error()
        self._step += 1
        self._row = -1
        self._cutoff = cutoff if self.usefulness.judge() else 0
        self._predictions.clear()

    def observe(self, layer: int, state: torch.Tensor) -> None:
        """state [T, H]: the draft's residual stream after attention; its last row is the newest token."""
        if layer == 0:
            self._row += 1
        if layer >= self._cutoff:
            return
        self._add(self.predictor.predict(layer, self._row, state[-1:]))

    def foresee(self, row: int, experts: torch.Tensor, arrived: torch.cuda.Event) -> None:
        """experts [P, k]: what draft pass `row` names for the first layers, on the host after `arrived`."""
        for layer in range(min(len(experts), self._cutoff)):
            self._add(Prediction(layer, row, experts[layer : layer + 1], arrived))

    def _add(self, prediction: Prediction) -> None:
        self._predictions.append(prediction)
        self._queue.put((self._step, prediction))

    def predictions(self) -> list[tuple[int, int, list[int]]]:
        """(layer, row, experts) of the step at hand, once they are on the host."""
        return [(p.layer, p.row, p.wait()) for p in self._predictions]

    def end_drafting(self) -> None:
        """The target's pass begins: a copy under way goes on, no other one begins."""
        self._step += 1

    def end_step(self) -> None:
        """The pass has run, or will not: what was predicted for it is copied no more."""
        self.end_drafting()
        self._predictions.clear()  # a plain step has none of its own

    def stop(self) -> None:
        """Have the worker end after the copy at hand, without waiting for it."""
        self._step = math.inf
        self._queue.put((math.inf, None))

    def close(self) -> None:
        """Stop the worker and wait for it. Idempotent."""
        self.stop()
        self._thread.join()
        self._error = None  # its traceback leads back here

    def _run(self) -> None:
        coming: deque[_Item] = deque()  # in the order of the passes; perhaps not on the host yet
        waiting: list[tuple[int, int, int, float]] = []  # layer, rank, expert, step
        while True:
            if not (coming or waiting):
                coming.append(self._queue.get())
            while not self._queue.empty():
                coming.append(self._queue.get())
            if self._step == math.inf:
                return
            try:
                # All that is known is heard before a victim is chosen.
                while coming and (not waiting or _is_there(coming[0])):
                    self._hear(*coming.popleft(), waiting)
                if waiting:
                    layer, _, expert, step = heapq.heappop(waiting)
                    if step == self._step:
                        self._store.prefetch(layer, expert)
            except Exception as error:  # raised again by start_step, in the caller's thread
                self._error = error
                coming.clear()
                waiting.clear()

    def _hear(
        self,
        step: float,
        prediction: Prediction | None,
        waiting: list[tuple[int, int, int, float]],
    ) -> None:
        """Queue the experts of a prediction of the step at hand."""
        if prediction is None or step != self._step or self._error is not None:
            return
        experts = prediction.wait()
        self._store.expect(prediction.layer, experts)
        for i, expert in enumerate(experts):
            rank = prediction.row * len(experts) + i
            heapq.heappush(waiting, (prediction.layer, rank, expert, step))

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would keep this frame, and the frame the models, in a cycle


def _is_there(item: _Item) -> bool:
    """Whether it can be taken without waiting."""
    prediction = item[1]
    return prediction is None or prediction.arrived is None or prediction.arrived.query()
