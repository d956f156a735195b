"""Copying the experts that the draft points at, while it is still drafting.

The decode thread calls `observe` for every layer of every draft pass; above the cutoff nothing happens,
below it the prediction is queued and the call returns. One worker takes predictions in the order of
their deadlines, which is the order of the layers, and has the store copy what is not resident. What
belongs to an earlier step is thrown away. An error in the worker is raised again in the decode thread.

A prefetch that evicts more than it brings is worse than none: when too few of the last copies were used,
prefetching pauses for a while and then tries again. Text never depends on any of this.
"""

from __future__ import annotations

import heapq
import logging
import math
import queue
import threading
from collections.abc import Iterable

import torch

from spmoe_lite.predictor import ExpertPredictor, Prediction
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore

log = logging.getLogger("spmoe_lite")

JUDGED_COPIES = 64  # prefetches looked at together
LEAST_USEFUL = 0.25  # of them must have been used, or prefetching pauses
PAUSE_STEPS = 64

_Item = tuple[float, int, int, Prediction | None]  # step, layer, row; without prediction: the end


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
    store: ExpertStore, predictions: Iterable[tuple[int, int, list[int]]], accepted_rows: int
) -> None:
    """Compare predictions (layer, row, experts best first) with what the pass's accepted rows used.

    Called before the store's `end_pass`.
    """
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
        self._store = store
        self._predictor = predictor
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
        prediction = self._predictor.predict(layer, self._row, state[-1:])
        self._predictions.append(prediction)
        self._queue.put((self._step, layer, self._row, prediction))

    def predictions(self) -> list[tuple[int, int, list[int]]]:
        """(layer, row, experts) of the step at hand, once they are on the host."""
        return [(p.layer, p.row, p.wait()) for p in self._predictions]

    def end_step(self) -> None:
        """The pass has run, or will not: what was predicted for it is copied no more."""
        self._step += 1
        self._predictions.clear()  # a plain step has none of its own

    def stop(self) -> None:
        """Have the worker end after the copy at hand, without waiting for it."""
        self._step = math.inf
        self._queue.put((-math.inf, 0, 0, None))

    def close(self) -> None:
        """Stop the worker and wait for it. Idempotent."""
        self.stop()
        self._thread.join()
        self._error = None  # its traceback leads back here

    def _run(self) -> None:
        waiting: list[_Item] = []
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            while not self._queue.empty():
                heapq.heappush(waiting, self._queue.get())
            step, layer, _, prediction = heapq.heappop(waiting)
            if prediction is None:
                return
            if step != self._step or self._error is not None:
                continue
            try:
                experts = prediction.wait()
                self._store.expect(layer, experts)
                for expert in experts:
                    if step == self._step:
                        self._store.prefetch(layer, expert)
            except Exception as error:  # raised again by start_step, in the caller's thread
                self._error = error

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or it would keep this frame, and the frame the models, in a cycle
