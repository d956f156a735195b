"""The machine: which device to use, what it has free, how fast it reads, and what it must not be asked for.

A CUDA GPU needs Triton beside it, and one below compute capability 8.0 has no bf16 arithmetic (asking torch
would be told otherwise: it emulates). Both are said in one line before anything is loaded.
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from contextlib import AbstractContextManager, nullcontext

import psutil
import torch

from spmoe_lite.errors import UnsupportedError, UsageError

log = logging.getLogger("spmoe_lite")

_said_unpinned = threading.Event()  # once in a process


def choose_device(name: str) -> torch.device:
    """auto, cpu, cuda or cuda:N to a device that works here; UsageError says why not."""
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


def check_precision(device: torch.device, pack: str, dtypes: set[str]) -> None:
    """Refuse a pack whose numbers this GPU cannot multiply; `dtypes` are those of its tensors."""
    if device.type != "cuda" or "bf16" not in dtypes:
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        raise UnsupportedError(
            f"{torch.cuda.get_device_name(device)} (compute capability {capability[0]}."
            f"{capability[1]}) has no bf16: spmoe-lite repack {pack} --experts fp16 --dense fp16"
        )


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make the device the current one: that is a thread's own, and the caller's may be another."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked."""
    if device.type == "cuda":
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


def memory_rate(device: torch.device) -> float:
    """Bytes per second the device reads in a single-row product, over 32 MiB."""
    matrix = torch.ones((2048, 4096), device=device)
    row = torch.ones((1, 4096), device=device)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        (row @ matrix.T)[0, 0].item()
        best = min(best, time.perf_counter() - started)
    return matrix.nbytes / max(best, 1e-9)
