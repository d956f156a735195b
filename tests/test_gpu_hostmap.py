"""Page-locked maps on a CUDA GPU: the bytes at a device's address, refusals, closing, and the speed of each way.

The kernel's test runs interpreted without a GPU; the others are skipped. `-s` shows what was timed.
"""

import gc
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
import torch

from spmoe_lite import cudart
from spmoe_lite.cudart import copy_bytes
from spmoe_lite.hostmap import HostMap
from spmoe_lite.pack import Pack
from spmoe_lite.slab import DeviceSlab
from tests.make_pack import WIDE, Weights

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

GPU = torch.device("cuda", 0)
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
