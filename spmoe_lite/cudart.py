"""The calls of the CUDA runtime that torch does not offer: page-locking memory, copying by address.

A read-only mapping must be registered with the read-only flag. Without it the call fails; and any failure
stays in the calling thread until it is asked for, so that torch would find it at the next kernel launch:
here every error is taken off before it is reported. The calls let other threads run. Sources: CUDA Runtime
API, Error Handling and Memory Management; torch/csrc/cuda/shared/cudart.cpp for what torch binds.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from contextlib import suppress
from typing import Any

import torch

from spmoe_lite.device import current, synchronize
from spmoe_lite.errors import SpmoeError

MAPPED = 2  # cudaHostRegisterMapped
MAPPED_READ_ONLY = MAPPED | 8  # cudaHostRegisterReadOnly
BY_ADDRESS = 4  # cudaMemcpyDefault: the runtime knows which memory an address is of

log = logging.getLogger("spmoe_lite")


class Refused(Exception):
    """The system does not page-lock this memory; the message is its reason."""


def copy_bytes(address: int, source: int, size: int, stream: torch.cuda.Stream | None) -> None:
    """Order a copy of `size` bytes on the stream; without a stream, copy now within RAM.

    One of the two is the GPU's, the other page-locked (`HostMap.address`, a place of `RamTier`). Returns
    at once, other threads run meanwhile.
    """
    if stream is None:
        ctypes.memmove(address, source, size)
    elif code := _cudart().cudaMemcpyAsync(address, source, size, BY_ADDRESS, stream.cuda_stream):
        raise SpmoeError(f"copying {size} bytes to or from the GPU failed: {_reason(code)}")


class Cuda:
    """What the CUDA runtime does for page-locked memory, on one device; tests put another in its place."""

    def __init__(self, device: torch.device):
        self._device = device

    def register(self, address: int, size: int, writable: bool = False) -> int:
        """Page-lock `size` bytes from `address` on, both multiples of the page; return the device's address.

        `writable`: the device may copy there, too. Raises `Refused`, and leaves no error behind in the runtime.
        """
        try:
            runtime = _cudart()
        except OSError as error:
            raise Refused(str(error)) from error
        with current(self._device):
            flags = MAPPED if writable else MAPPED_READ_ONLY
            if code := runtime.cudaHostRegister(address, size, flags):
                raise Refused(_reason(code))
            seen = ctypes.c_void_p()
            if code := runtime.cudaHostGetDevicePointer(ctypes.byref(seen), address, 0):
                runtime.cudaHostUnregister(address)
                raise Refused(_reason(code))
        assert seen.value is not None
        return seen.value

    def unregister(self, address: int) -> None:
        """Undo `register`; of an address that is not registered, nothing."""
        with current(self._device):
            if code := _cudart().cudaHostUnregister(address):
                log.debug("unregistering host memory: %s", _reason(code))

    def synchronize(self) -> None:
        with suppress(RuntimeError):  # whoever used the device has been told
            synchronize(self._device)


def release(driver: Cuda | None, registered: list[int]) -> None:
    """Unregister these addresses, once the device is done, each taken off the list as it goes."""
    if driver is not None and registered:
        driver.synchronize()
        while registered:
            driver.unregister(registered[-1])
            registered.pop()


@functools.cache
def _cudart() -> Any:
    """The CUDA runtime that torch has loaded, found again by its name; OSError if there is none."""
    major = str(torch.version.cuda).partition(".")[0]
    runtime = ctypes.CDLL(f"cudart64_{major}.dll" if os.name == "nt" else f"libcudart.so.{major}")
    pointer, count, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint
    runtime.cudaHostRegister.argtypes = pointer, count, flags
    runtime.cudaHostUnregister.argtypes = (pointer,)
    runtime.cudaHostGetDevicePointer.argtypes = ctypes.POINTER(pointer), pointer, flags
    runtime.cudaMemcpyAsync.argtypes = pointer, pointer, count, ctypes.c_int, pointer
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def _reason(code: int) -> str:
    """The runtime's words for an error, which is also taken off the calling thread."""
    runtime = _cudart()
    runtime.cudaGetLastError()
    return f"CUDA error {code}: {runtime.cudaGetErrorString(code).decode()}"
