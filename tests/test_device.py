"""Machines that are not here, by their answers: no Triton, an old card, no room, kernels that fail."""

import importlib.util

import pytest
import torch

from spmoe_lite import device
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError, UnsupportedError, UsageError
from tests import tiny

CPU = torch.device("cpu")


def pretend(monkeypatch, *, gpus, triton=True, capability=(9, 0)):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: real(name) if name != "triton" else ("here" if triton else None),
    )


def test_a_gpu_is_used_where_torch_and_triton_can(monkeypatch):
    pretend(monkeypatch, gpus=2)
    assert device.choose_device("auto") == torch.device("cuda", 0)
    assert device.choose_device("cuda:1") == torch.device("cuda", 1)
    assert device.choose_device("cpu") == CPU
    with pytest.raises(UsageError, match="there are 2 GPUs"):
        device.choose_device("cuda:2")


def test_kind_k_o30_without_triton_the_cpu_is_used_and_it_is_said(monkeypatch, caplog):
    pretend(monkeypatch, gpus=1, triton=False)
    assert device.choose_device("auto") == CPU
    assert "triton is not installed" in caplog.text
    with pytest.raises(UsageError, match="triton"):
        device.choose_device("cuda")


def test_without_a_gpu(monkeypatch):
    pretend(monkeypatch, gpus=0)
    assert device.choose_device("auto") == CPU
    with pytest.raises(UsageError, match="sees no CUDA GPU"):
        device.choose_device("cuda")


@pytest.mark.parametrize("name", ["", "gpu", "cuda:x", "cpu:1", "auto:0"])
def test_names_of_no_device(name):
    with pytest.raises(UsageError, match="auto, cpu, cuda or cuda:N"):
        device.choose_device(name)


def test_kind_k_o33_bf16_is_refused_by_capability_not_by_asking_torch(monkeypatch):
    pretend(monkeypatch, gpus=1, capability=(7, 5))
    card = torch.device("cuda", 0)
    with pytest.raises(UnsupportedError, match=r"7\.5.*repack some --experts fp16 --dense fp16"):
        device.check_precision(card, "some", {"fp32", "bf16"})
    device.check_precision(card, "some", {"fp16"})
    device.check_precision(CPU, "some", {"bf16"})
    pretend(monkeypatch, gpus=1, capability=(8, 0))
    device.check_precision(card, "some", {"bf16"})


@pytest.mark.parametrize(
    "failure, error, words",
    [
        (RuntimeError("no C compiler\nfound"), UnsupportedError, "no C compiler.*--device cpu"),
        (torch.OutOfMemoryError("out"), CapacityError, "no room left"),
        (OSError("read"), OSError, "read"),
    ],
)
def test_kind_k_o30_kernels_that_do_not_run_are_one_line_at_load(tmp_path, failure, error, words):
    with Engine.load(tiny.tiny_pack(tmp_path), device="cpu") as engine:
        target, kv = engine.decoder.target, engine.decoder.session.target_kv
        before = engine.generate([1, 5, 6], max_tokens=6).result.token_ids
        seen = []
        engine._warm_up([(target, kv)], 4, None, seen.append)
        assert kv.length == 0
        assert [(p.done, p.total) for p in seen] == [(0, 3), (1, 3), (2, 3)]
        assert engine.generate([1, 5, 6], max_tokens=6).result.token_ids == before

        def failing(tokens, kv):
            raise failure

        target.forward = failing
        with pytest.raises(error, match=words) as info:
            engine._warm_up([(target, kv)], 4, None, None)
        assert "\n" not in str(info.value)


def test_kind_i_o25_page_locked_memory_may_be_refused(monkeypatch, caplog):
    """Ordinary memory takes its place, and one line gives the system's reason."""
    real = torch.empty

    def refusing(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nCompile with ...")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", refusing)
    device._said_unpinned.clear()
    buffers = [device.host_buffer((8, 16), torch.uint8) for _ in range(3)]
    assert all(b.shape == (8, 16) and b.dtype == torch.uint8 for b in buffers)
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1
    assert "128 bytes refused: CUDA error: out of memory)" in lines[0]


def test_kind_i_o27_experts_come_by_large_reads_never_by_page_faults(tmp_path, monkeypatch):
    """No file of a pack is mapped while the engine answers; every read is a whole expert."""
    import mmap

    from spmoe_lite import pack as pack_module

    def refusing(*args, **kwargs):
        raise OSError("mapping refused")

    sizes, read_at = [], pack_module._read_at

    def noting(file, start, view, lock):
        sizes.append(len(view))
        return read_at(file, start, view, lock)

    path = tiny.tiny_pack(tmp_path)
    monkeypatch.setattr(mmap, "mmap", refusing)
    with Engine.load(path, device="cpu", slots=2) as engine:
        monkeypatch.setattr(pack_module, "_read_at", noting)
        assert engine.generate([1, 5, 6], max_tokens=6).result.completion_tokens == 6
        stride = engine.plan.slot_bytes
    assert sizes
    assert set(sizes) == {stride}
