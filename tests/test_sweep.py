"""Sweeps: passes of a prompt in which no layer waits for the host, and experts pass through landing slots."""

import random

import pytest

from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from spmoe_lite.hostmap import HostMap
from spmoe_lite.pack import Pack
from spmoe_lite.slab import DeviceSlab, make_slab
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore
from tests import tiny
from tests.test_ramtier import CPU, EXPERTS, LAYERS, LazyGpu, Run, path, random_ids  # noqa: F401

LANDING = 2


@pytest.mark.parametrize("eagerness", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("slots", [2, 3, 6, 12, 24])
def test_kind_h_o22_kernels_of_a_sweep_read_what_they_asked_for(
    path,  # noqa: F811
    monkeypatch,
    slots,
    eagerness,
):
    """On streams as late as they may be, with passes of decoding between; landing slots take turns."""
    with Pack.open(path) as pack:
        gpu = LazyGpu(monkeypatch, eagerness, seed=slots)
        table = SlotTable(slots, LAYERS, EXPERTS, 2, "layer-lru")
        landing = 0 if table.all_fit else LANDING
        slab = DeviceSlab(slots + landing, pack.expert_layout.stride, CPU)
        host = HostMap(pack, CPU)
        store = ExpertStore(pack, slab, table, Counters(), CPU, host, landing)
        store._can_sweep = True  # as on a GPU
        run, rng = Run(pack, store, gpu), random.Random(slots)
        for turn in range(6):
            run.one(random_ids(rng, rows=64 if turn % 2 == 0 else 3))
        gpu.finish()
        assert run.wrong == [] and store.counters.loads >= LAYERS * EXPERTS
        host.close()


def test_t0_a_sweep_writes_the_same_text(tmp_path):
    hf = tiny.tiny_mixtral(tmp_path / "t", layers=3, experts=8, scale_head=4.0)
    target = convert(hf, out=tmp_path / "target.spmoe").path
    draft = tiny.tiny_pack(tmp_path / "d", kind="mistral", layers=3)
    prompt = [random.Random(3).randrange(3, 90) for _ in range(150)]

    class Sweeping(ExpertStore):
        swept = 0

        def __init__(self, pack, slab, table, counters, device, host, landing):
            super().__init__(pack, slab, table, counters, device, HostMap(pack, CPU), LANDING)
            self._can_sweep = True

        def _land(self, layer, experts):
            Sweeping.swept += len(experts)
            return super()._land(layer, experts)

    class Swept(Engine):
        make_store = Sweeping
        make_slab = staticmethod(lambda slots, *rest: make_slab(slots + LANDING, *rest))

    texts = []
    for kind in (Engine, Swept):
        for slots in (2, 5):
            with kind.load(target, draft, device="cpu", slots=slots) as engine:
                texts.append(engine.generate(prompt, max_tokens=12).result.token_ids)
    assert texts == [texts[0]] * 4 and Sweeping.swept > 20
