"""The machine: which device to use, what it has free, how fast it reads, and what it must not be asked for.

A CUDA GPU needs Triton beside it. Below compute capability 8.0 it has no bf16 arithmetic (asking torch would be told otherwise: it emulates): there everything but the experts
is computed in fp16, and bf16 experts are refused. All of it is said in one line before anything runs.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import psutil
import torch

from spmoe_lite.errors import UnsupportedError, UsageError

log = logging.getLogger("spmoe_lite")

# Held while a thread captures a graph, and by whoever waits for the whole device: CUDA forbids both at once.
capturing = threading.RLock()
_said_unpinned = threading.Event()  # once in a process


def choose_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N to a device that works here; UsageError says why not."""
    name = str(name)  # a torch.device says its own
    kind, _, index = name.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UsageError(f"--device {name}: auto, cpu, cuda or cuda:N")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if importlib.util.find_spec("triton") is None:
        if kind == "auto":
            log.warning("the GPU is not used: the package triton is not installed")
            return torch.device("cpu")
        raise UsageError(
            f"--device {name} needs the package triton: install it, or use --device cpu"
        )
    if not torch.cuda.is_available():
        raise UsageError(f"--device {name}: torch {torch.__version__} sees no CUDA GPU")
    place = torch.device("cuda", int(index) if index else torch.cuda.current_device())
    if place.index >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: there are {torch.cuda.device_count()} GPUs")
    return place


def multiplies_bf16(device: torch.device) -> bool:
    """Whether bf16 is a number of this device, by compute capability."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def check_experts(device: torch.device, pack: str, dtype: str) -> None:
    """Refuse experts whose numbers this GPU cannot multiply."""
    if dtype == "bf16" and not multiplies_bf16(device):
        raise UnsupportedError(
            f"{_card(device)} has no bf16: spmoe-lite repack {pack} --experts fp16 or int4"
        )


def fit_dense(device: torch.device, pack: str, tensors: dict[str, Any]) -> None:
    """Turn bf16 tensors into fp16 where the GPU has no bf16; UnsupportedError where one is too large.

    Whatever is narrowed here decides what the model computes in: norms, embeddings, activations, KV.
    """
    if multiplies_bf16(device):
        return
    wide = [
        name
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.bfloat16
    ]
    for name in wide:
        tensors[name] = tensors[name].to(torch.float16)
        if not tensors[name].isfinite().all():
            raise UnsupportedError(
                f"{_card(device)} has no bf16, and {name} of {pack} is beyond fp16: use --device cpu"
            )
    if wide:
        log.warning("%s has no bf16: %s is computed in fp16", _card(device), pack)


def _card(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one: that is a thread's own, and the caller's may be another."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@contextmanager
def cpu_by_default() -> Iterator[None]:
    """Tensors that name no device lie in RAM, whatever default device the calling thread has set."""
    elsewhere = torch.get_default_device().type != "cpu"
    with torch.device("cpu") if elsewhere else nullcontext():
        yield


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where a GPU's graphs are captured: torch's own is of the GPU that was captured on first."""
    return torch.cuda.Stream(device)


def side_stream(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    """A stream for copies, never the one that graphs are captured on.

    torch has 32 of a priority and lends them in turn, the 33rd time the first one again. What a thread gives
    to a stream while another one captures on it goes into that graph, and is not done.
    """
    stream = torch.cuda.Stream(device, priority=priority)
    if device.type == "cuda" and stream == capture_stream(device):
        stream = torch.cuda.Stream(device, priority=priority)
    return stream


def end_of_work(device: torch.device) -> torch.cuda.Event | None:
    """The end of what the current stream has been given so far; None where there are no streams."""
    if device.type != "cuda":
        return None
    end = torch.cuda.Event()
    end.record()
    return end


def trim_heap() -> None:
    """Give the system what was freed: glibc keeps half of a closed CPU engine's bytes for later use."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library has no such call
            ctypes.CDLL(None).malloc_trim(0)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked."""
    if device.type == "cuda":
        with capturing:
            torch.cuda.synchronize(device)


def available_bytes(device: torch.device) -> int:
    """Free VRAM, or the RAM that can be had without swapping."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def host_buffer(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Page-locked host memory for copies; ordinary memory where the system refuses, said once.

    WSL, Windows and containers cap page-locked memory far below RAM. Copies from ordinary memory are
    slower and hold up the thread that orders them; what they carry is the same.
    """
    try:
        return torch.empty(shape, dtype=dtype, pin_memory=True)
    except RuntimeError as error:
        buffer = torch.empty(shape, dtype=dtype)
        if not _said_unpinned.is_set():
            _said_unpinned.set()
            log.warning(
                "no page-locked memory (%d bytes refused: %s): copies are slower, nothing else changes",
                buffer.nbytes,
                str(error).strip().partition("\n")[0],
            )
        return buffer


def send(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are in host memory, on `device`; holds up nobody, and `values` may change afterwards.

    Straight from ordinary memory a copy waits for the bus behind whole experts, and CUDA leaves open whether
    it has been read when the call returns.
    """
    if device.type == "cpu":
        return values
    staged = host_buffer(tuple(values.shape), values.dtype).copy_(values)
    return staged.to(device, non_blocking=staged.is_pinned())


def read_back(values: torch.Tensor) -> torch.Tensor:
    """`values` in host memory; while this waits for them other threads may still order copies.

    A copy to ordinary memory does not let them: they wait until the device has come to it.
    """
    if not values.is_cuda:
        return values
    there, arrived = host_buffer(tuple(values.shape), values.dtype), torch.cuda.Event()
    there.copy_(values, non_blocking=True)
    arrived.record(torch.cuda.current_stream(values.device))  # the caller's device may be another
    arrived.synchronize()
    return there


def bus_rate(device: torch.device) -> float:
    """Bytes per second from page-locked host memory to a GPU, in copies of 16 MiB."""
    host = host_buffer((16 << 20,), torch.uint8)
    there = torch.empty_like(host, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        there.copy_(host, non_blocking=True)
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return host.nbytes / best


def memory_rate(device: torch.device) -> float:
    """Bytes per second the device reads in single-row products, over 32 MiB; on a GPU 128, more than its L2.

    There several are in flight, since ordering one takes about as long as the GPU takes for it.
    """
    roomy = device.type == "cuda" and available_bytes(device) > 1 << 30
    rows, products = (8192, 16) if roomy else (2048, 1)
    matrix = torch.ones((rows, 4096), device=device)
    row = torch.ones((1, 4096), device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(products):
            product = row @ matrix.T
        product[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return products * matrix.nbytes / max(best, 1e-9)
