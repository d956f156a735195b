"""Passes that end anywhere, on one stream after another: what the others' kernels read, on late streams.

Half of the passes are cancelled at a copy or stopped between two groups of experts, their kernels still to
run. The next pass comes on any stream and waits as `Decoder` has it wait; a worker copies ahead all the
time, reads from disk take a while. Each way from disk to slot has its turn.
"""

import ctypes
import random
import time
from functools import partial

import numpy as np
import pytest
import torch

from spmoe_lite import diskreads, slab
from spmoe_lite.errors import Cancelled
from spmoe_lite.hostmap import HostMap
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore
from tests.test_ramtier import (  # noqa: F401
    CPU,
    EXPERTS,
    KEYS,
    LAYERS,
    LazyGpu,
    make_store,
    pack,
    parts,
    path,
    prefetching,
    random_ids,
    stored,
)


class Stop:
    """Says yes when it has been asked so many times."""

    def __init__(self, left):
        self.left = left

    def is_set(self):
        self.left -= 1
        return self.left < 0


class Passes:
    """Some run to their end; `wrong` is what kernels of those have read."""

    def __init__(self, store, gpu, rng, wanted):
        self.store, self.gpu, self.rng, self.wanted = store, gpu, rng, wanted
        self.wrong, self.left = [], None

    def one(self, ids, ends_early):
        store, gpu, rng, found = self.store, self.gpu, self.rng, []
        gpu.compute = rng.choice(gpu.computes)
        if self.left is not None:
            gpu.compute.wait_event(self.left)
            self.left = None
        store.cancel = Stop(rng.randrange(1, 60)) if ends_early else None
        groups = rng.randrange(12) if ends_early and rng.random() < 0.5 else 1000
        try:
            store.begin_pass(len(ids[0]))
            for layer, rows in enumerate(ids):
                for use in store.serve(layer, torch.tensor(rows, dtype=torch.int32)):
                    for expert, address, _ in use.tolist():
                        gpu.compute.add(partial(self.read, (layer, expert), address, found))
                    groups -= 1
                    if groups < 0:
                        raise KeyboardInterrupt
            store.end_pass(min(2, len(ids[0])))
        except (Cancelled, KeyboardInterrupt):
            self.left = torch.cuda.Event()
            self.left.record()
        else:
            gpu.compute.synchronize()  # the logits are read
            self.wrong += found

    def read(self, key, address, found):
        """What a kernel does."""
        seen = np.frombuffer(ctypes.string_at(address, len(self.wanted[key])), dtype=np.uint8)
        if not (seen == self.wanted[key]).all():
            found.append(key)


def make(pack, way, rng):  # noqa: F811
    """A store whose experts come through the RAM tier, from a map (sweeps, too) or through the ring."""
    slots, policy = rng.choice([2, 3, 6, 9, 12]), rng.choice(["layer-lru", "global-lru"])
    if way == "tier":
        return make_store(pack, slots, rng.choice([1, 2, 3, 9, 13]), lazy=True, policy=policy)
    landing, host = (2, HostMap(pack, CPU)) if way == "map" else (0, None)
    table = SlotTable(slots, LAYERS, EXPERTS, 2, policy)
    made = slab.DeviceSlab(slots + landing, pack.expert_layout.stride, CPU)
    store = ExpertStore(pack, made, table, Counters(), CPU, host, landing)
    store._can_sweep = way == "map"  # as on a GPU
    return store


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("way", ["tier", "map", "ring"])
def test_kind_h_o22_a_pass_that_ends_anywhere_spoils_no_other(pack, parts, monkeypatch, way, seed):  # noqa: F811
    rng = random.Random(seed)
    monkeypatch.setattr(slab, "RING_BYTES", 16384)
    monkeypatch.setattr(slab, "TURN", 20_000)
    gpu = LazyGpu(monkeypatch, rng.choice([0.0, 0.5, 0.9]), seed)
    longest, read_now = rng.choice([0, 0.001, 0.004]), diskreads._Disk.read

    def read(*what):
        time.sleep(longest * random.random())
        read_now(*what)
        time.sleep(longest * random.random() / 4)

    monkeypatch.setattr(diskreads._Disk, "read", read)
    store, wanted = make(pack, way, rng), stored(pack)
    passes = Passes(store, gpu, rng, wanted)
    with prefetching(store, seed + 1) as errors:
        for _ in range(14):
            rows = rng.choice([1, 3, 40, 64])
            passes.one(random_ids(rng, rows=rows), ends_early=rng.random() < 0.5)
    gpu.finish()
    assert errors == [] and passes.wrong == []
    for key in store.table.residents():
        assert (store._slab.slots[store.table.slot(key)].numpy() == wanted[key]).all(), key
    if store.tier is not None:
        for key, place in store.tier._places._place_of.items():
            filled = store.tier._places.is_filled(key)
            assert not filled or (store.tier._rows[place] == wanted[key]).all(), key
        store.tier.close()
    if store._host is not None:
        store._host.close()
