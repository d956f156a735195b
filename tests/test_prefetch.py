"""The prefetch worker: whose copy comes first, what it has heard by then, and when it ends."""

import threading
import time

import pytest
import torch

from spmoe_lite.predictor import Prediction
from spmoe_lite.prefetch import Prefetcher
from spmoe_lite.stats import Counters


class Store:
    """Notes what is asked of it; a copy waits for `go`."""

    def __init__(self):
        self.counters = Counters()
        self.calls = []
        self.begun, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def expect(self, layer, experts):
        self.calls.append((layer, *experts))

    def prefetch(self, layer, expert):
        self.calls.append((layer, expert))
        self.begun.release()
        assert self.go.acquire(timeout=10)


class Arrival:
    """An event that has come, or one to wait for."""

    def __init__(self, there=True):
        self._there = threading.Event()
        if there:
            self._there.set()

    def query(self):
        return self._there.is_set()

    def synchronize(self):
        assert self._there.wait(10)

    def come(self):
        self._there.set()


@pytest.fixture
def made():
    store = Store()
    prefetcher = Prefetcher(store, None)
    yield store, prefetcher
    store.go.release(99)
    prefetcher.close()


def rows(*layers):
    return torch.tensor(layers, dtype=torch.int32)


def begun(store):
    assert store.begun.acquire(timeout=10)


def test_the_earliest_layer_of_all_that_is_known_comes_first(made):
    store, prefetcher = made
    prefetcher.start_step(cutoff=2)
    coming = Arrival(there=False)
    prefetcher.foresee(0, rows([4, 5], [6, 7], [0, 1]), Arrival())
    begun(store)
    prefetcher.foresee(1, rows([2, 5], [3, 7]), Arrival())
    prefetcher.foresee(
        2, rows([1, 0], [1, 0]), coming
    )  # nobody waits for it while there is a copy to make
    for _ in range(7):
        store.go.release()
        begun(store)
    copies = [call for call in store.calls if len(call) == 2]
    assert copies == [(0, 4), (0, 5), (0, 2), (0, 5), (1, 6), (1, 7), (1, 3), (1, 7)]
    assert store.calls.index((1, 3, 7)) < store.calls.index((0, 5))  # heard before the next copy
    assert (2, 0, 1) not in store.calls  # past the cutoff
    coming.come()
    store.go.release()
    begun(store)
    assert store.calls[-3:] == [(0, 1, 0), (1, 1, 0), (0, 1)]


def test_no_copy_begins_once_the_target_s_pass_has(made):
    store, prefetcher = made
    prefetcher.start_step(cutoff=2)
    prefetcher.foresee(0, rows([4, 5], [6, 7]), Arrival())
    begun(store)
    prefetcher.end_drafting()
    store.go.release(9)  # the one under way ends
    prefetcher.foresee(
        1, rows([2, 3], [2, 3]), Arrival()
    )  # of a step that goes on: those are copied
    for _ in range(4):
        begun(store)
    copies = [call for call in store.calls if len(call) == 2]
    assert copies == [(0, 4), (0, 2), (0, 3), (1, 2), (1, 3)]
    assert [row for _, row, _ in prefetcher.predictions()] == [0, 0, 1, 1]  # counted after the pass


def test_an_error_is_raised_in_the_next_step_and_the_worker_lives_on(made):
    store, prefetcher = made
    calls = []

    class Failing(Arrival):
        def query(self):
            calls.append(0)
            raise RuntimeError("device lost")

    prefetcher.start_step(cutoff=1)
    prefetcher.foresee(0, rows([4, 5]), Arrival())
    begun(store)
    prefetcher.foresee(1, rows([6, 7]), Failing())
    store.go.release(9)
    deadline = time.monotonic() + 10
    while prefetcher._error is None and time.monotonic() < deadline:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="device lost"):
        prefetcher.start_step(cutoff=1)
    assert calls == [0]
    prefetcher.start_step(cutoff=1)
    prefetcher.foresee(0, rows([1, 2]), Arrival())
    begun(store)
    begun(store)
    assert store.calls[-2:] == [(0, 1), (0, 2)]


def test_a_prediction_waits_for_its_event():
    arrived = Arrival(there=False)
    threading.Timer(0.05, arrived.come).start()
    started = time.monotonic()
    assert Prediction(0, 0, rows([3, 1]), arrived).wait() == [3, 1]
    assert time.monotonic() - started > 0.04
