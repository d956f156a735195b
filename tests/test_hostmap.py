"""Page-locked maps on a machine without a GPU: refusals, cancel, order of closing."""

import ctypes
import gc
import shutil
import threading
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from spmoe_lite import cudart, hostmap
from spmoe_lite.cudart import Refused, copy_bytes
from spmoe_lite.errors import Cancelled, DamagedError, SpmoeError
from spmoe_lite.hostmap import HostMap, default_pin
from spmoe_lite.pack import Pack
from tests.interrupt import Interrupt
from tests.make_pack import DENSE_MODEL, WIDE, Weights

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LAYERS, EXPERTS = 2, 3
SHIFT = 1 << 40  # of the made-up device's addresses


class Driver:
    """A device that counts what is locked, refuses on request, and has addresses of its own."""

    def __init__(self, refuse_at=0):
        self.refuse_at, self.calls, self.locked, self.events = refuse_at, 0, {}, []

    def register(self, address, size):
        self.calls += 1
        assert address % 4096 == size % 4096 == 0
        if self.refuse_at and self.calls >= self.refuse_at:
            raise Refused("CUDA error 2: out of memory")
        assert not any(a < address + size and address < a + s for a, s in self.locked.items())
        self.locked[address] = size
        self.events.append("register")
        return address + SHIFT

    def unregister(self, address):
        self.events.append("unregister")
        size = self.locked.pop(address, 0)
        ctypes.string_at(address, size)  # still mapped

    def synchronize(self):
        self.events.append("synchronize")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return Weights(WIDE).write(tmp_path_factory.mktemp("hostmap") / "some.spmoe")


@pytest.fixture
def pack(path):
    with Pack.open(path) as pack:
        yield pack


@pytest.fixture
def long_pack(tmp_path):
    config = replace(WIDE, num_hidden_layers=3)
    with Pack.open(Weights(config).write(tmp_path / "long.spmoe")) as pack:
        yield pack


def stored(pack, layer, expert):
    out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
    pack.read_expert(layer, expert, out)
    return out


def at(address, size):
    return np.frombuffer(ctypes.string_at(address, size), dtype=np.uint8)


def each(layers=LAYERS):
    return [(layer, expert) for layer in range(layers) for expert in range(EXPERTS)]


def test_every_expert_is_at_its_address(pack):
    stride, driver = pack.expert_layout.stride, Driver()
    for device_map, shift in ((HostMap(pack, CPU), 0), (HostMap(pack, CPU, driver=driver), SHIFT)):
        for key in each():
            wanted = stored(pack, *key)
            assert (at(device_map.address(*key) - shift, stride) == wanted).all()
            assert (device_map.host(*key) == wanted).all()
            assert not device_map.host(*key).flags.writeable
        assert device_map.pinned_bytes == LAYERS * EXPERTS * stride
        device_map.close()
    assert driver.calls == LAYERS  # one span a layer


def test_closing_waits_unregisters_and_only_then_lets_go(pack):
    driver = Driver()
    device_map = HostMap(pack, CPU, driver=driver)
    pack.close()  # the wrong order: the mappings wait for the locks to come off
    device_map.close()
    device_map.close()
    assert driver.events == ["register"] * LAYERS + ["synchronize"] + ["unregister"] * LAYERS
    assert not driver.locked and device_map.address(0, 0) is None and device_map.pinned_bytes == 0


@pytest.mark.parametrize("call, kept", [(1, 0), (2, 0), (3, 3)])
def test_kind_i_o25_what_is_refused_has_no_address_and_is_said_once(long_pack, call, kept, caplog):
    """A layer that was locked before goes too: of a quota, torch and the driver need some."""
    pack, driver, stride = long_pack, Driver(refuse_at=call), long_pack.expert_layout.stride
    device_map = HostMap(pack, CPU, driver=driver)
    assert [k for k in each(3) if device_map.address(*k) is not None] == each()[:kept]
    assert sum(driver.locked.values()) == device_map.pinned_bytes == kept * stride
    assert driver.calls == call  # not asked again
    assert len(caplog.records) == 1 and caplog.records[0].levelname == "WARNING"
    line = caplog.records[0].getMessage()
    assert "CUDA error 2: out of memory" in line and "\n" not in line
    assert hostmap.size(kept * stride) in line and hostmap.size(9 * stride) in line
    for key in each(3):
        assert (device_map.host(*key) == stored(pack, *key)).all()
    device_map.close()
    assert not driver.locked


def test_kind_i_o25_a_file_that_cannot_be_mapped_is_a_refusal(pack, monkeypatch, caplog):
    def refusing(layer):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(pack, "layer_bytes", refusing)
    device_map = HostMap(pack, CPU, driver=Driver())
    assert device_map.address(0, 0) is None
    assert [r.getMessage() for r in caplog.records if "Cannot allocate" in r.getMessage()]
    assert len(caplog.records) == 1


def test_progress_runs_to_the_end_in_bytes(pack, monkeypatch):
    monkeypatch.setattr(hostmap, "PIECE", 40_000)
    seen, total = [], LAYERS * EXPERTS * pack.expert_layout.stride
    HostMap(pack, CPU, on_progress=seen.append, driver=Driver()).close()
    assert {(p.stage, p.unit, p.total) for p in seen} == {("pin", "bytes", total)}
    done = [p.done for p in seen]
    assert done == sorted(set(done)) and done[-1] == total
    assert max(np.diff(done)) <= 40_000


@pytest.mark.parametrize("after", [0, 1, 3, 4, 7, 11])
def test_cancel_gives_back_what_was_locked(pack, after, monkeypatch):
    monkeypatch.setattr(hostmap, "PIECE", 40_000)  # several to an expert
    cancel, driver, seen = threading.Event(), Driver(), []

    def on_progress(progress):
        seen.append(progress)
        if len(seen) == after:
            cancel.set()

    if after == 0:
        cancel.set()
    with pytest.raises(Cancelled):
        HostMap(pack, CPU, on_progress=on_progress, cancel=cancel, driver=driver)
    assert len(seen) == after
    assert not driver.locked
    assert not [t for t in threading.enumerate() if t.name.startswith("spmoe-pin")]


def test_pages_that_are_not_in_memory_are_read_in_large_pieces(pack, monkeypatch):
    monkeypatch.setattr(hostmap, "PIECE", 65536)
    read, sizes = pack.read_expert, []

    def noting(layer, expert, out, offset=0):
        sizes.append((layer, expert, offset, len(out)))
        read(layer, expert, out, offset)

    monkeypatch.setattr(pack, "read_expert", noting)
    monkeypatch.setattr(hostmap, "_in_memory", lambda address, size: False)
    HostMap(pack, CPU, driver=Driver()).close()
    stride = pack.expert_layout.stride
    assert sorted(sizes) == [
        (*key, offset, 65536) for key in each() for offset in range(0, stride, 65536)
    ]
    sizes.clear()
    monkeypatch.setattr(hostmap, "_in_memory", lambda address, size: True)
    HostMap(pack, CPU, driver=Driver()).close()
    HostMap(pack, CPU).close()  # the CPU takes pages as they come
    assert sizes == []


@pytest.mark.parametrize("mapped", [False, True])
def test_a_file_cut_short_after_opening_is_an_error_and_not_a_crash(path, tmp_path, mapped):
    copy, driver = shutil.copytree(path, tmp_path / "cut.spmoe"), Driver()
    with Pack.open(copy) as pack:
        views = [pack.layer_bytes(layer) for layer in range(LAYERS * mapped)]
        file = copy / "experts" / "layer-001.safetensors"
        with open(file, "r+b") as opened:
            opened.truncate(file.stat().st_size - 5000)
        with pytest.raises(DamagedError, match="layer-001"):
            HostMap(pack, CPU, driver=driver)
        del views
    assert not driver.locked and driver.calls == 1


def test_what_is_in_memory_is_known(pack, tmp_path):
    view = pack.layer_bytes(0)
    stored(pack, 0, 0)
    assert hostmap._in_memory(view[0].ctypes.data + 100, 3000) in (
        True,
        hostmap._libc() is not None,
    )
    assert not hostmap._in_memory(1 << 46, 4096)  # nothing is mapped there


def test_closing_leaves_no_view_behind(path):
    with Pack.open(path) as pack:
        device_map = HostMap(pack, CPU, driver=Driver())
        mapping = pack._maps[0]
        device_map.close()
        gc.collect()
    assert mapping.closed


def test_a_map_that_nobody_kept_closes_itself(pack):
    driver = Driver()
    HostMap(pack, CPU, driver=driver)
    assert driver.events[LAYERS:] == ["synchronize", "unregister", "unregister"]


def test_kind_l_o36_ctrl_c_at_any_moment_leaves_nothing_locked(pack):
    moment = 0
    while True:
        driver, device_map, moment = Driver(), None, moment + 1
        with Interrupt(moment, ("/spmoe_lite/hostmap.py",)) as strike:
            device_map = HostMap(pack, CPU, driver=driver)
            device_map.close()
        if device_map is not None:
            device_map.close()  # the user's second try
        if driver.locked:
            gc.collect()
        assert not driver.locked, strike.where
        if not strike.struck:
            break
    assert moment > 50


def test_the_default_is_the_pack_or_whole_experts_of_it(pack):
    stride = pack.expert_layout.stride
    whole = LAYERS * EXPERTS * stride
    assert default_pin(pack, 10 * whole) == whole
    assert default_pin(pack, int(whole / hostmap.SHARE) + 1) == whole
    assert default_pin(pack, int(4.9 * stride / hostmap.SHARE)) == 4 * stride
    assert default_pin(pack, stride) == 0


def test_without_the_runtime_s_library_nothing_is_locked(pack, monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "0.1")
    cudart._cudart.cache_clear()
    device_map = HostMap(pack, CPU, driver=cudart.Cuda(GPU))
    assert device_map.address(0, 0) is None and len(caplog.records) == 1
    device_map.close()


class Runtime:
    """libcudart as it looks from Python, failing where it is told to; an error stays until it is taken."""

    def __init__(self, **codes):
        self.codes, self.last, self.registered = codes, 0, {}

    def _done(self, name):
        self.last = self.codes.get(name, 0) or self.last
        return self.codes.get(name, 0)

    def cudaHostRegister(self, address, size, flags):
        assert flags == 10  # mapped, read-only
        code = self._done("register")
        if not code:
            self.registered[address] = size
        return code

    def cudaHostUnregister(self, address):
        known = self.registered.pop(address, None) is not None
        self.last = self.last if known else 713
        return 0 if known else 713

    def cudaHostGetDevicePointer(self, seen, address, flags):
        seen._obj.value = address + SHIFT
        return self._done("pointer")

    def cudaMemcpyAsync(self, to, source, size, kind, stream):
        return self._done("copy")

    def cudaGetErrorString(self, code):
        return b"out of memory"

    def cudaGetLastError(self):
        last, self.last = self.last, 0
        return last


@pytest.mark.parametrize("codes", [{}, {"register": 2}, {"pointer": 801}])
def test_kind_i_o25_no_error_stays_in_the_runtime(pack, monkeypatch, caplog, codes):
    runtime = Runtime(**codes)
    monkeypatch.setattr(cudart, "_cudart", lambda: runtime)
    monkeypatch.setattr(cudart, "current", lambda device: nullcontext())
    monkeypatch.setattr(cudart, "synchronize", lambda device: None)
    driver = cudart.Cuda(GPU)
    device_map = HostMap(pack, CPU, driver=driver)
    assert (device_map.address(1, 2) is None) == bool(codes) == bool(caplog.records)
    begins = list(device_map._registered)
    assert len(runtime.registered) == len(begins) == (0 if codes else LAYERS)
    device_map.close()
    for begin in begins:
        driver.unregister(begin)
    assert not runtime.registered and runtime.last == 0


def test_a_failed_copy_is_an_error_with_the_reason(monkeypatch):
    runtime = Runtime(copy=700)
    monkeypatch.setattr(cudart, "_cudart", lambda: runtime)
    with pytest.raises(
        SpmoeError, match="8 bytes to or from the GPU failed: CUDA error 700: out of mem"
    ):
        copy_bytes(0, 0, 8, SimpleNamespace(cuda_stream=0))
    assert runtime.last == 0


def test_a_dense_model_has_nothing_to_lock(tmp_path):
    with Pack.open(Weights(DENSE_MODEL).write(tmp_path / "dense.spmoe")) as pack:
        device_map = HostMap(pack, CPU, driver=Driver())
        assert device_map.pinned_bytes == 0 and device_map.address(0, 0) is None
        assert default_pin(pack, 1 << 40) == 0
        device_map.close()


def test_a_copy_within_ram(pack):
    device_map, stride = HostMap(pack, CPU), pack.expert_layout.stride
    out = np.zeros(stride, dtype=np.uint8)
    copy_bytes(out.ctypes.data, device_map.address(1, 1), stride, None)
    assert (out == stored(pack, 1, 1)).all()
