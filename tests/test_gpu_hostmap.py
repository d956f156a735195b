"""Page-locked memory on a CUDA GPU: maps and the RAM tier, their bytes, refusals, closing, and their speed.

The kernel's test runs interpreted without a GPU; the others are skipped. `-s` shows what was timed.
"""

import ctypes
import gc
import os
import random
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from spmoe_lite import cudart
from spmoe_lite.converters import convert
from spmoe_lite.cudart import copy_bytes
from spmoe_lite.engine import Engine
from spmoe_lite.hostmap import HostMap
from spmoe_lite.pack import Pack
from spmoe_lite.ramtier import RamTier
from spmoe_lite.slab import DeviceSlab
from spmoe_lite.slots import SlotTable
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore
from tests import tiny
from tests.make_pack import WIDE, Weights

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

GPU = torch.device("cuda", 0)
SPEED_BYTES = 2 << 30
KEYS = [(layer, expert) for layer in range(2) for expert in range(3)]


@triton.jit
def _read_kernel(addresses_ptr, out_ptr, words, BLOCK: tl.constexpr):
    """out [n, words] int32: what lies at each of n addresses, `words` a multiple of BLOCK."""
    row, share = tl.program_id(0), tl.num_programs(1) * BLOCK
    source = tl.multiple_of(tl.load(addresses_ptr + row).to(tl.pointer_type(tl.int32)), 16)
    for start in range(tl.program_id(1) * BLOCK, words, share):
        at = start + tl.arange(0, BLOCK)
        tl.store(out_ptr + row.to(tl.int64) * words + at, tl.load(source + at))


def read(table, stride, programs=1):
    """uint8 [n, stride]: what lies at the n addresses of an int64 tensor; `programs` to each of them."""
    out = torch.empty((len(table), stride // 4), dtype=torch.int32, device=table.device)
    _read_kernel[(len(table), programs)](table, out, stride // 4, BLOCK=4096)
    return out.view(torch.uint8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Weights(WIDE).write(tmp_path_factory.mktemp("gpu-hostmap") / "some.spmoe")


class FilePack:
    """One layer of experts in one file of random bytes, with what `HostMap` asks of a pack."""

    def __init__(self, file, experts, stride):
        self.expert_layout = SimpleNamespace(stride=stride)
        self.config = SimpleNamespace(num_hidden_layers=1, num_local_experts=experts)
        random = np.random.default_rng(0).integers(0, 256, stride, dtype=np.uint8)
        with open(file, "wb") as out:
            for _ in range(experts):
                random = np.roll(random, 1)
                out.write(random.data)
        self._file = os.open(file, os.O_RDONLY)

    def expert_count(self):
        return self.config.num_local_experts

    def layer_bytes(self, layer):
        import mmap

        view = np.frombuffer(mmap.mmap(self._file, 0, access=mmap.ACCESS_READ), np.uint8)
        return view.reshape(self.expert_count(), -1)

    def read_expert(self, layer, expert, out, offset=0):
        os.preadv(self._file, [out], expert * self.expert_layout.stride + offset)

    def expert_file(self, layer):
        return self._file, 0

    def close(self):
        os.close(self._file)


@pytest.fixture(params=[(16, 64 << 20), (372, 44 << 16)], ids=["64MiB", "2.9MB"])
def file_pack(request, tmp_path):
    """A GiB, in RAM where there is a place for files in RAM."""
    file = "/dev/shm/spmoe-test-hostmap" if os.path.isdir("/dev/shm") else tmp_path / "experts"
    try:
        pack = FilePack(file, *request.param)
        yield pack
        pack.close()
    finally:
        os.unlink(file)


def test_a_kernel_reads_what_the_file_holds(path, device):
    place = torch.device(device, 0) if device == "cuda" else torch.device(device)
    with Pack.open(path) as pack:
        host_map = HostMap(pack, place)
        table = torch.tensor([host_map.address(*key) for key in KEYS], device=place)
        got = read(table, pack.expert_layout.stride).cpu().numpy()
        for row, key in enumerate(KEYS):
            assert (got[row] == host_map.host(*key)).all()
        host_map.close()


@pytest.mark.gpu
def test_slots_are_filled_from_the_map_by_any_thread(path):
    with Pack.open(path) as pack:
        host_map = HostMap(pack, GPU)
        slab = DeviceSlab(len(KEYS), pack.expert_layout.stride, GPU)

        def fill():
            for slot, key in enumerate(KEYS):
                slab.fill_from(slot, host_map.address(*key))

        thread = threading.Thread(target=fill)
        thread.start()
        thread.join()
        slab.wait_filled(range(len(KEYS)))
        got = slab.slots.cpu().numpy()
        for slot, key in enumerate(KEYS):
            assert (got[slot] == host_map.host(*key)).all()
        host_map.close()


@pytest.mark.gpu
def test_kind_i_o25_a_refusal_leaves_no_error_behind(path, monkeypatch, caplog):
    """The default flags ask for writable pages, which a read-only mapping has not."""
    monkeypatch.setattr(cudart, "MAPPED_READ_ONLY", 0)
    with Pack.open(path) as pack:
        host_map = HostMap(pack, GPU)
        assert cudart._cudart().cudaGetLastError() == 0
        assert float((torch.zeros(8, device=GPU) + 1).sum()) == 8
        if host_map.address(0, 0) is None:
            assert len(caplog.records) == 1
            print("\n" + caplog.records[0].getMessage())
        else:
            print("\nthe default flags are accepted here")
        host_map.close()


@pytest.mark.gpu
def test_unregistering_twice_leaves_no_error_behind(path):
    with Pack.open(path) as pack:
        host_map = HostMap(pack, GPU)
        driver, begins = cudart.Cuda(GPU), list(host_map._registered)
        host_map.close()
        for begin in begins:
            driver.unregister(begin)
        assert cudart._cudart().cudaGetLastError() == 0
        assert float((torch.zeros(8, device=GPU) + 1).sum()) == 8


@pytest.mark.gpu
@pytest.mark.alone
def test_kind_l_o36_closing_waits_for_copies_and_gives_everything_back(file_pack):
    stride, sizes = file_pack.expert_layout.stride, []
    slots = torch.empty((file_pack.expert_count(), stride), dtype=torch.uint8, device=GPU)
    stream = torch.cuda.Stream(GPU)
    for _ in range(3):
        host_map = HostMap(file_pack, GPU)
        slots.zero_()
        torch.cuda.synchronize()
        for expert in range(len(slots)):
            source = host_map.address(0, expert)
            copy_bytes(slots[expert].data_ptr(), source, stride, stream)
        host_map.close()  # with nearly all of it still to come
        assert stream.query()
        got, wanted = slots.cpu().numpy(), np.empty(stride, dtype=np.uint8)
        for expert in range(len(slots)):
            file_pack.read_expert(0, expert, wanted)
            assert (got[expert] == wanted).all()
        del got
        gc.collect()
        sizes.append((torch.cuda.mem_get_info(GPU)[0], psutil.Process().memory_info().rss))
    print("\nfree VRAM, resident:", sizes)
    assert len({free for free, _ in sizes[1:]}) == 1
    assert abs(sizes[2][1] - sizes[1][1]) < 64 << 20


def seconds(work, times=3):
    best = float("inf")
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - started)
    return best


@pytest.mark.gpu
def test_the_speed_of_each_way_to_the_device(file_pack):
    """Copies of whole experts, kernels that read them in place, and the ring; nothing is asserted of it."""
    stride, experts = file_pack.expert_layout.stride, file_pack.expert_count()
    total, slots = stride * experts, min(8, experts)
    slab = DeviceSlab(slots, stride, GPU)
    read(torch.tensor([slab.address(0)], device=GPU), stride, 32)  # compiled now
    free, started = torch.cuda.mem_get_info(GPU)[0], time.perf_counter()
    host_map = HostMap(file_pack, GPU)
    registering = time.perf_counter() - started
    tables = free - torch.cuda.mem_get_info(GPU)[0]
    addresses = [host_map.address(0, expert) for expert in range(experts)]
    table = torch.tensor(addresses, device=GPU)

    def copies():
        for expert, source in enumerate(addresses):
            slab.fill_from(expert % slots, source)

    def ring():
        for expert in range(experts):
            slab.fill(
                expert % slots,
                lambda out, offset, e=expert: file_pack.read_expert(0, e, out, offset),
            )

    def in_place(at_once):
        for first in range(0, experts, at_once):
            read(table[first : first + at_once], stride, 32 // at_once)

    print(f"\nregistering {total / 1e9:.2f} GB: {total / registering / 1e9:.1f} GB/s,", end=" ")
    print(f"{tables / 1e6:.1f} MB of VRAM")
    for name, work in (
        ("copies", copies),
        ("kernel, one expert at once", lambda: in_place(1)),
        ("kernel, 4 experts at once", lambda: in_place(4)),
        ("ring", ring),
    ):
        print(f"{name}: {total / seconds(work) / 1e9:.1f} GB/s")
    started = time.perf_counter()
    host_map.close()
    print(f"unregistering: {total / (time.perf_counter() - started) / 1e9:.1f} GB/s")


# --- the RAM tier --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("slots, places", [(2, 2), (6, 3), (9, 17), (12, 6)])
def test_kind_h_o22_kernels_read_what_the_disk_holds_beside_a_prefetch_worker(
    tmp_path, slots, places
):
    """Passes as fast as they go, spinning in front of every read, while a worker copies ahead."""
    config = replace(WIDE, num_hidden_layers=3, num_local_experts=8)
    with Pack.open(Weights(config).write(tmp_path / "some.spmoe")) as pack:
        stride, counters = pack.expert_layout.stride, Counters()
        wanted = torch.empty((3, 8, stride), dtype=torch.uint8)
        for layer in range(3):
            for expert in range(8):
                pack.read_expert(layer, expert, wanted[layer, expert].numpy())
        wanted = wanted.to(GPU)
        slab, table = DeviceSlab(slots, stride, GPU), SlotTable(slots, 3, 8, 2, "layer-lru")
        store = ExpertStore(pack, slab, table, counters, GPU)
        store.tier = RamTier(
            pack, slab, places * stride, table.last_used, counters, GPU, bypass=True
        )
        wrong = torch.zeros((), dtype=torch.int64, device=GPU)
        rng, stop, errors = random.Random(slots), threading.Event(), []

        def worker():
            guess = random.Random(1)
            while not stop.is_set():
                try:
                    layer, expert = guess.randrange(3), guess.randrange(8)
                    store.expect(layer, [expert])
                    store.prefetch(layer, expert)
                    time.sleep(1e-4)  # else it holds the lock nearly always
                except Exception as error:
                    errors.append(error)
                    return

        thread = threading.Thread(target=worker)
        thread.start()
        try:
            for _ in range(100):
                store.begin_pass(3)
                for layer in range(3):
                    rows = torch.tensor([rng.sample(range(8), 2) for _ in range(3)], device=GPU)
                    for use in store.serve(layer, rows):
                        torch.cuda._sleep(20_000)
                        got = read(use[:, 1].contiguous(), stride)
                        wrong += (got != wanted[layer, use[:, 0]]).sum()
                store.end_pass(2)
        finally:
            stop.set()
            thread.join()
        assert not errors and int(wrong) == 0
        assert counters.ram_returns > 0 and counters.ram_hits > 0 and counters.prefetches > 0
        print(f"\n{slots} slots, {places} places: {counters}")
        store.tier.close()


@pytest.mark.gpu
def test_t0_text_and_logits_do_not_depend_on_the_tier(tmp_path):
    source = tiny.tiny_mixtral(tmp_path / "t", experts=8, layers=3, scale_head=4.0)
    target = convert(source, out=tmp_path / "target.spmoe").path
    draft = tiny.tiny_pack(tmp_path / "o", kind="mistral", layers=3)
    prompt, found = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120], []
    with Pack.open(target) as pack:
        stride = pack.expert_layout.stride
    for pin in ("all", "none", 2 * stride, 5 * stride, 20 * stride):
        with Engine.load(target, draft, device="cuda", slots=6, pin=pin, cutoff=3) as engine:
            with torch.inference_mode():
                kv = engine.decoder.session.target_kv
                logits = engine.decoder.target.forward(prompt, kv, logits_rows=len(prompt)).clone()
                engine.decoder.store.end_pass(len(prompt))
                kv.truncate(0)
            found.append((engine.generate(prompt, max_tokens=40).result.token_ids, logits))
            places = None if isinstance(pin, str) else pin // stride
            assert engine.stats()["ram_places"] == places
    for tokens, logits in found[1:]:
        assert tokens == found[0][0] and torch.equal(logits, found[0][1])


@pytest.mark.gpu
@pytest.mark.alone
def test_kind_l_o36_a_tier_gives_everything_back(file_pack):
    stride, sizes = file_pack.expert_layout.stride, []
    slab = DeviceSlab(2, stride, GPU)
    budget = (file_pack.expert_count() // 2) * stride
    for _ in range(3):
        tier = RamTier(file_pack, slab, budget, {}, Counters(), GPU, bypass=False)
        for expert in range(tier.num_places):
            tier.fill((0, expert), expert % 2, None, lambda: None, urgent=True)
        tier.close()
        gc.collect()
        sizes.append((torch.cuda.mem_get_info(GPU)[0], psutil.Process().memory_info().rss))
    print("\nfree VRAM, resident:", sizes)
    assert len({free for free, _ in sizes[1:]}) == 1
    assert abs(sizes[2][1] - sizes[1][1]) < 64 << 20
    assert cudart._cudart().cudaGetLastError() == 0


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [90 << 20, 44 << 16], ids=["94MB", "2.9MB"])
def test_the_speed_of_the_tier(tmp_path, stride):
    """A file on the disk of the test's folder; nothing is asserted of it but the bytes."""
    experts = SPEED_BYTES // stride
    pack = FilePack(tmp_path / "experts", experts, stride)
    os.fsync(pack._file)
    slab, counters, used = DeviceSlab(8, stride, GPU), Counters(), {}
    started = time.perf_counter()
    tier = RamTier(pack, slab, experts // 2 * stride, used, counters, GPU, bypass=True)
    locking = time.perf_counter() - started
    total = tier.num_places * stride
    print(f"\nplaces of {total / 1e9:.2f} GB: locked at {total / locking / 1e9:.1f} GB/s")

    def cold():
        os.posix_fadvise(pack._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def fill(keys, swap=False, first=False):
        for turn, key in enumerate(keys):
            tier.read_ahead(keys[turn : turn + 64])
            victim = keys[turn - 8] if swap and not (first and turn < 8) else None
            tier.fill(key, turn % 8, victim, lambda: None, urgent=True)

    def timed(name, work, count):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        rate = count * stride / (time.perf_counter() - started) / 1e9
        print(f"{name}: {rate:.2f} GB/s")

    half = [(0, expert) for expert in range(tier.num_places)]
    rest = [(0, expert) for expert in range(tier.num_places, experts)]
    cold()
    timed("disk to slot by places, direct, read ahead", lambda: fill(half), len(half))
    timed("place to slot", lambda: fill(half), len(half))
    every = (tier.num_places + 8 - tier._places._spare - 1) // 8 * 8  # in places and slots together
    more = [(0, expert) for expert in range(every)]
    fill(more, swap=True, first=True)
    fill(more, swap=True)
    seen = counters.copy()
    timed("place to slot, and what was there back", lambda: fill(more, swap=True), every)
    grown = counters.since(seen)
    print(f"({grown.ram_returns} of {every} back, {grown.ram_misses} from disk)")
    cold()

    def ring():
        for turn, key in enumerate(rest):
            slab.fill(turn % 8, lambda out, offset, e=key[1]: pack.read_expert(0, e, out, offset))

    timed("disk to slot by the ring and the page cache, cold", ring, len(rest))
    timed("page cache to slot by the ring", ring, len(rest))
    wanted = np.empty(stride, dtype=np.uint8)
    for turn, key in enumerate(more):  # went both ways a few times
        pack.read_expert(0, key[1], wanted)
        tier.fill(key, turn % 8, None, lambda: None, urgent=True)
        slab.wait_filled([turn % 8])
        assert (slab.slots[turn % 8].cpu().numpy() == wanted).all()
        row = tier._rows[tier._places.place(key)]
        assert ctypes.string_at(row.ctypes.data, stride) == wanted.tobytes()
    print(counters.ram_hits, "hits", counters.ram_misses, "misses", counters.ram_returns, "returns")
    tier.close()
    pack.close()
