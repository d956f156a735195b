"""Steps in which the device decides, without a device: the same passes over the same tables, on the CPU.

Captured for real they are tested in test_gpu.py.
"""

import random

import pytest
import torch

from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from spmoe_lite.graphs import ResidentExperts, RoutedExperts
from spmoe_lite.hostmap import HostMap
from spmoe_lite.kernels.residency import Tables, credit, fetch, stage
from spmoe_lite.slots import SlotTable
from tests import tiny

LAYERS, EXPERTS, CHOICES = 3, 8, 2
TOKENS = [1, *(3 + i * 37 % 300 for i in range(40))]


@pytest.fixture(scope="module", params=["fp32", "int4"])
def pack(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.tiny_mixtral(
        folder / "t", layers=LAYERS, experts=EXPERTS, hidden=128, intermediate=192
    )
    return convert(source, out=folder / "t.spmoe", experts=request.param).path


def tables_of(host, slab, share, ahead=(2, LAYERS, CHOICES)):
    stride = slab.shape[1]
    address = torch.tensor([[host.address(i, e) for e in range(EXPERTS)] for i in range(LAYERS)])
    slots = slab.data_ptr() + stride * torch.arange(LAYERS * share).view(LAYERS, share)
    return Tables.make(address, slots, ahead)


@pytest.mark.parametrize("share", [1, 2, 4, 8])
def test_logits_are_those_of_steps_driven_by_the_host(pack, share):
    draw = random.Random(share)
    with Engine.load(pack, device="cpu", slots=LAYERS * EXPERTS) as engine, torch.inference_mode():
        target, kv = engine.decoder.target, engine.decoder.session.target_kv
        layout = engine.target_pack.expert_layout
        host = HostMap(engine.target_pack, torch.device("cpu"))
        slab = torch.full((LAYERS * share, layout.stride), 255, dtype=torch.uint8)
        tables, done = tables_of(host, slab, share), 0
        hits = 0
        while done < len(TOKENS) - 5:
            rows, kept = draw.randint(1, 5), draw.randint(1, 5)
            kept = min(rows, kept)
            part = TOKENS[done : done + rows]
            kv.length = done
            expected = target.forward(part, kv, logits_rows=rows).clone()
            trace = torch.zeros(LAYERS, rows, CHOICES, dtype=torch.int32)
            guesses = [
                [draw.randrange(EXPERTS // 2) * 2 + j for j in range(2)] for _ in range(LAYERS)
            ]
            tables.progress.fill_(-1)
            for number in (0, 1):
                one = torch.tensor([number], dtype=torch.int32)
                cutoff = torch.tensor([2], dtype=torch.int32)
                stage(tables, torch.tensor(guesses, dtype=torch.int32), cutoff, one)
                fetch(tables, layout.stride, number, 2)
            got = target.run(
                torch.tensor(part),
                kv,
                torch.tensor([done], dtype=torch.int32),
                RoutedExperts(tables, trace),
                rows,
            )
            assert torch.equal(got, expected)
            hits += int((tables.missed == 0).sum())
            assert trace.tolist() == [engine.decoder.store.trace[i] for i in range(LAYERS)]
            credit(
                tables,
                trace,
                torch.tensor([kept], dtype=torch.int32),
                torch.tensor([done], dtype=torch.int32),
            )
            done += kept
        assert hits > 0 and int(tables.age.max()) == done - 1
        resident = ResidentExperts(tables.host)
        kv.length = done
        part = TOKENS[done : done + 3]
        expected = target.forward(part, kv, logits_rows=3).clone()
        got = target.run(torch.tensor(part), kv, done, resident, 3)
        assert torch.equal(got, expected)
        assert [c.tolist() for c in resident.chosen] == list(engine.decoder.store.trace.values())
        host.close()


def test_the_table_takes_back_what_the_device_did():
    table = SlotTable(6, 3, 8, 2, "layer-lru")
    places = [table.places(layer) for layer in range(3)]
    assert [[slot for slot, _ in row] for row in places] == [[0, 3], [1, 4], [2, 5]]
    table.put([(0, 0, 7), (3, 0, None), (1, 1, 2), (4, 1, 5), (2, 2, None), (5, 2, None)])
    assert table.slot((0, 7)) == 0 and table.slot((1, 5)) == 4
    assert table.residents() == {(0, 7), (1, 2), (1, 5)}
    assert table.place((0, 1)) == (3, None)  # a free slot of its own layer
    table.filled((0, 1))
    assert table.places(0) == [(0, 7), (3, 1)]
    assert table.place((1, 0)) == (1, (1, 2))
