"""Files that nobody vouches for, and files that are there whole or not at all.

What is read is untrusted: it lies inside its folder, has the size that was said, and JSON is bounded and
without surprises. What is written appears under its name when it is complete. What the system refuses
becomes one line that names the path and the remedy. No torch here.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from spmoe_lite.errors import BusyError, CapacityError, DamagedError, SpmoeError, memory_for

PARTIAL = ".partial"  # behind the name of what is not finished: a file, or a conversion's folder
LOCK = ".lock"

log = logging.getLogger("spmoe_lite")
AGAIN = "free some space and run the same command again"
DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


def open_confined(folder: Path, name: str) -> FileIO:
    """Open `folder`/`name` unbuffered for reading; it must be a regular file inside the folder.

    Raises `DamagedError` for a link that leads out, a folder, a pipe or a device, OSError
    otherwise.
    """
    path = folder / name
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder)):
        raise DamagedError(f"{path} is a link that leads out of the pack; convert again")
    if not stat.S_ISREG(path.stat().st_mode):
        raise DamagedError(f"{path} is not a regular file; convert again")
    return open(path, "rb", buffering=0)


def open_listed(folder: Path, name: str, size: int) -> FileIO:
    """`open_confined`, with the size that the manifest gives; every failure is a `SpmoeError`."""
    path = folder / name
    try:
        file = open_confined(folder, name)
        found = os.fstat(file.fileno()).st_size
    except FileNotFoundError as error:
        raise DamagedError(f"{path} is missing; convert again") from error
    except OSError as error:
        raise disk_error(error, path, "read") from error
    if found != size:
        file.close()
        raise DamagedError(f"{path} has {found} bytes, the manifest says {size}; convert again")
    return file


def read_exactly(file: FileIO, count: int, path: Path) -> bytes:
    """`count` bytes from an unbuffered file, or `DamagedError` when it is short."""
    data = bytearray()
    while len(data) < count:
        try:
            piece = file.read(count - len(data))
        except OSError as error:
            raise disk_error(error, path, "read") from error
        if not piece:
            raise DamagedError(f"{path} ends after {len(data)} of {count} bytes; convert again")
        data += piece
    return bytes(data)


def load_json(data: bytes, path: Path) -> Any:
    """JSON from an untrusted file: UTF-8, no duplicate keys, no NaN, no bottomless nesting."""
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
        if b"\\u" in data:  # half a surrogate pair is a string that nobody can print
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
        raise DamagedError(
            f"{path} is not valid JSON ({error!s:.80}); fetch or convert it again"
        ) from error


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("duplicate key")
    return values


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def is_whole(value: Any) -> bool:
    """Whether a JSON value is an integer (Python counts booleans as integers; this does not)."""
    return isinstance(value, int) and not isinstance(value, bool)


class DiskFull(CapacityError):
    """A write for which the disk has no room; `making` says what it was a part of."""

    def __init__(self, fact: str, what: str = "", remedy: str = AGAIN):
        unfinished = f"{what} is not finished, " if what else ""
        super().__init__(f"disk full: {unfinished}{fact}; {remedy}")
        self.fact = fact


@contextlib.contextmanager
def making(what: str, remedy: str) -> Iterator[None]:
    """A full disk's message names what was being made, and its own remedy; the outermost has the word.

    Where RAM is what ran out, that is said in the same way.
    """
    with memory_for(
        f"out of memory: {what} is not finished; end other programs, or raise this one's limit "
        f"(ulimit -v), and run the same command again"
    ):
        try:
            yield
        except DiskFull as error:
            raise DiskFull(error.fact, what, remedy) from error


def disk_error(error: OSError, path: Path | str, verb: str) -> SpmoeError:
    """What the operating system said about `path`, as one line with the remedy."""
    text = error.strerror or type(error).__name__
    if error.errno in DISK_FULL:
        return DiskFull(f"cannot {verb} {path} ({text})")
    if error.errno == errno.EFBIG:
        return CapacityError(
            f"cannot {verb} {path} ({text}): no file of this size is allowed there; "
            f"choose another place"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CapacityError(
            f"cannot {verb} {path} ({text}): raise the limit (ulimit -n); a pack needs a file for "
            f"each layer"
        )
    if isinstance(error, PermissionError) or error.errno == errno.EROFS:
        return SpmoeError(
            f"cannot {verb} {path} ({text}); check permissions or choose another place"
        )
    if isinstance(error, NotADirectoryError) or error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return SpmoeError(f"cannot {verb} {path} ({text}); choose another place or name")
    return SpmoeError(f"cannot {verb} {path} ({text}); check the disk and what is at that place")


@contextlib.contextmanager
def naming(path: Path, verb: str) -> Iterator[None]:
    """Turn the system's errors into one line that names `path`."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, path, verb) from error


def write_whole(path: Path, text: str) -> None:
    """Write a text file under a temporary name and rename it: a full disk leaves what was there before.

    What is no file, such as a pipe, is written to as it is.
    """
    data = text.encode("utf-8", "replace")
    with naming(path, "write"):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = Path(os.path.realpath(path))  # a link stays one
        if path.is_symlink():  # it leads to itself
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        temporary = path.with_name(path.name + PARTIAL)
        try:
            temporary.write_bytes(data)
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the writer's lock of a partial folder; `BusyError` if another process has it.

    The lock is the operating system's and ends with the process, so a killed run leaves none
    behind. One got just as its holder renamed or deleted the folder is the lock of nothing: busy.
    """
    path = folder / LOCK
    busy = f"{folder} is being written by another process; wait until that has ended"
    with naming(path, "write"):
        try:
            file = open(path, "ab", buffering=0)
        except FileNotFoundError as error:
            raise BusyError(busy) from error
    with file:
        try:
            _lock(file)
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                raise BlockingIOError
        except FileNotFoundError as error:
            raise BusyError(busy) from error
        except (BlockingIOError, PermissionError) as error:  # what flock and Windows answer
            raise BusyError(busy) from error
        except (OSError, ImportError) as error:
            log.warning(
                "%s cannot be locked (%s); let no second process write it", folder, str(error)
            )
        yield


def _lock(file: FileIO) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
    else:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
