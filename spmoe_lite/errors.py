"""Errors a user can meet, each with the exit code the command line returns for it.

Every message is one line: it names the file, tensor, layer or flag, gives the numbers, and says what
to do next. `assert` is kept for our own bugs. Codes 0 (fine) and 130 (interrupted) follow the shell.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager


class SpmoeError(Exception):
    """Something went wrong that the message explains; the base of all errors below."""

    exit_code = 1


class UsageError(SpmoeError):
    """A flag, prompt or sampling parameter cannot be used as given."""

    exit_code = 2


class NotFoundError(SpmoeError):
    """No model, pack or file of that name."""

    exit_code = 3


class CapacityError(SpmoeError):
    """VRAM, RAM, disk or context is too small for what was asked."""

    exit_code = 4


class UnsupportedError(SpmoeError):
    """A family, precision, format version or draft/target pair that is refused, not run wrongly."""

    exit_code = 5


class DamagedError(SpmoeError):
    """A file is short, altered, or not what it claims to be."""

    exit_code = 6


class NetworkError(SpmoeError):
    """The hub cannot be reached, or does not give access."""

    exit_code = 7


class BusyError(SpmoeError):
    """The engine is answering someone else and the caller asked not to wait, or is closed."""

    exit_code = 8


class Cancelled(SpmoeError):
    """The caller's `cancel` event was set."""

    exit_code = 130


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch on any device, or the system with a library found no memory.

    For RAM torch has no class of its own, for a library that finds no room Python has none.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    text = str(error)
    return any(one in text for one in ("DefaultCPUAllocator", "failed to map segment"))


@contextmanager
def memory_for(message: str) -> Iterator[None]:
    """`CapacityError(message)` where what is done inside finds no memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise CapacityError(message) from error
