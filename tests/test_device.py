"""Machines that are not here, by their answers: no Triton, an old card, no room, kernels that fail."""

import importlib.util
import itertools

import pytest
import torch

from spmoe_lite import device
from spmoe_lite.engine import Engine
from spmoe_lite.errors import CapacityError, SpmoeError, UnsupportedError, UsageError
from spmoe_lite.loading import warm_up
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


CARD = torch.device("cuda", 0)


def test_kind_k_o33_bf16_is_judged_by_capability_not_by_asking_torch(monkeypatch):
    pretend(monkeypatch, gpus=1, capability=(7, 5))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *args: True)
    with pytest.raises(UnsupportedError, match=r"Some Card .*7\.5.*repack some --experts fp16"):
        device.check_experts(CARD, "some", "bf16")
    for dtype in ("fp16", "fp32", "int4-g64z"):
        device.check_experts(CARD, "some", dtype)
    device.check_experts(CPU, "some", "bf16")
    pretend(monkeypatch, gpus=1, capability=(8, 0))
    device.check_experts(CARD, "some", "bf16")


def dense_tensors():
    packed = object()  # stands for a quantised matrix
    norm, bias = torch.full((3,), 0.37, dtype=torch.bfloat16), torch.ones(2)
    return {"norm": norm, "bias": bias, "packed": packed}


def test_kind_k_o33_without_bf16_the_dense_part_is_fp16(monkeypatch, caplog):
    for place, capability, dtype in (
        (CARD, (7, 5), torch.float16),
        (CARD, (8, 0), torch.bfloat16),
        (CPU, (7, 5), torch.bfloat16),
    ):
        pretend(monkeypatch, gpus=1, capability=capability)
        before, tensors = dense_tensors(), dense_tensors()
        device.fit_dense(place, "some", tensors)
        assert tensors["norm"].dtype == dtype and tensors["bias"].dtype == torch.float32
        assert torch.equal(tensors["norm"].float(), before["norm"].float())
        assert type(tensors["packed"]) is object
    assert [r.getMessage() for r in caplog.records] == [
        "Some Card (compute capability 7.5) has no bf16: some is computed in fp16"
    ]


@pytest.mark.parametrize("value", [65536.0, -1e30, float("inf")])
def test_kind_k_o33_what_is_beyond_fp16_is_refused_by_name(monkeypatch, value):
    pretend(monkeypatch, gpus=1, capability=(7, 5))
    tensors = dense_tensors()
    tensors["layers.3.o_proj.weight"] = torch.tensor([[1.0, value]], dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=r"layers\.3\.o_proj\.weight of some is beyond fp16"):
        device.fit_dense(CARD, "some", tensors)


def test_kind_k_o33_a_bf16_model_answers_in_fp16_on_an_old_card(tmp_path, monkeypatch, caplog):
    """Everything of it but the capability of the card runs here."""
    path = tiny.tiny_pack(tmp_path, dense="bf16", experts="fp16")
    monkeypatch.setattr("spmoe_lite.device.multiplies_bf16", lambda place: False)
    monkeypatch.setattr("spmoe_lite.device._card", lambda place: "Some Card")
    with Engine.load(path, device="cpu") as engine:
        assert engine.decoder.target.dtype == torch.float16
        assert engine.decoder.session.target_kv.keys.dtype == torch.float16
        assert engine.generate([1, 5, 6], max_tokens=6).result.completion_tokens == 6
    assert "mixtral is computed in fp16" in caplog.text


def test_kind_k_o33_an_expert_beyond_fp16_ends_the_answer_with_an_error(tmp_path):
    path = tiny.tiny_pack(tmp_path, dense="fp16", experts="fp16")
    with Engine.load(path, device="cpu") as engine:
        for block in engine.decoder.target.blocks:
            block.post_norm.fill_(60000.0)  # outputs of the experts pass 65504
        with pytest.raises(SpmoeError, match="non-finite logits"):
            engine.generate([1, 5, 6], max_tokens=6).result  # noqa: B018


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
        warm_up(engine.device, [(target, kv)], None, None, seen.append)
        assert kv.length == 0
        assert [(p.done, p.total) for p in seen] == [(i, 5) for i in range(5)]
        assert engine.generate([1, 5, 6], max_tokens=6).result.token_ids == before

        def failing(tokens, kv):
            raise failure

        target.forward = failing
        with pytest.raises(error, match=words) as info:
            warm_up(engine.device, [(target, kv)], None, None, None)
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


def test_no_copies_on_the_stream_that_graphs_are_captured_on(monkeypatch):
    """torch lends 32 streams in turn: what is given to one that a thread captures on is not done."""
    gpu, turn = torch.device("cuda", 0), itertools.count()
    lend = lambda device, priority=0: (device, priority, next(turn) % 3)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "Stream", lend)
    device.capture_stream.cache_clear()
    try:
        lent = [device.side_stream(gpu) for _ in range(9)]
        assert device.capture_stream(gpu) not in lent and len(set(lent)) == 2
        assert device.side_stream(gpu, priority=-1)[1] == -1
    finally:
        device.capture_stream.cache_clear()


def test_what_is_sent_may_change_afterwards(monkeypatch):
    """CUDA leaves open when a copy from ordinary memory is read: only page-locked copies are left to run."""
    sent = []

    class Staged(torch.Tensor):
        def is_pinned(self):
            return pinned

        def to(self, place, non_blocking):
            sent.append((self.data_ptr(), non_blocking))
            return self

    make = lambda shape, dtype: torch.empty(shape, dtype=dtype).as_subclass(Staged)  # noqa: E731
    monkeypatch.setattr(device, "host_buffer", make)
    values = torch.arange(3)
    for pinned in (True, False):
        there = device.send(values, torch.device("cuda", 0))
        assert there.tolist() == [0, 1, 2] and sent[-1] == (there.data_ptr(), pinned)
        assert there.data_ptr() != values.data_ptr()
    assert device.send(values, CPU) is values


def test_what_is_read_back_is_waited_for_on_its_own_gpu(monkeypatch):
    """A thread's current device may be another: an event of that one's stream says nothing of the copy."""
    waited = []

    class Values(torch.Tensor):
        is_cuda, device = True, torch.device("cuda", 1)

    class Event:
        def record(self, stream="of the current device"):
            self.stream = stream

        def synchronize(self):
            waited.append(self.stream)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    values = torch.tensor([[3, 1], [0, 2]]).as_subclass(Values)
    there = device.read_back(values)
    assert there.tolist() == [[3, 1], [0, 2]] and waited == ["of cuda:1"]
