"""Where Triton keeps compiled kernels: its own folder, or another where that cannot be used.

Its own is under the home folder, or where the user's TRITON_CACHE_DIR points. A home may be read-only,
and a folder that two users share holds files that one of them cannot replace. What takes its place is
the user's cache folder, else one in the temporary folder; private to the user, since programs are run
from it. Triton is told through its settings in this process: no environment variable changes.
"""

from __future__ import annotations

import getpass
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton import knobs

from spmoe_lite.errors import UsageError

TRITON_VERSION: str = triton.__version__

log = logging.getLogger("spmoe_lite")


def settle_kernel_cache() -> None:
    """Give Triton another folder where its own cannot be used; one log line says which."""
    usual = Path(knobs.cache.dir)
    reason = _unusable(usual, private=False)
    if reason is None:
        return
    folder = next((f for f in _other_caches() if _unusable(f, private=True) is None), None)
    if folder is None:
        try:
            folder = Path(tempfile.mkdtemp(prefix="spmoe-lite-triton-"))
        except OSError as error:
            raise UsageError(
                f"no folder for compiled kernels can be written ({reason}): set TRITON_CACHE_DIR"
            ) from error
    log.warning("compiled kernels are kept in %s (%s)", folder, reason)
    told, knobs.propagate_env = knobs.propagate_env, False
    try:
        knobs.cache.dir = str(folder)
    finally:
        knobs.propagate_env = told


def _other_caches() -> Iterator[Path]:
    import platformdirs

    try:
        yield platformdirs.user_cache_path("spmoe-lite", appauthor=False) / "triton"
    except RuntimeError:  # no HOME for a user without an entry
        pass
    user = os.getuid() if hasattr(os, "getuid") else getpass.getuser()
    try:
        yield Path(tempfile.gettempdir()) / f"spmoe-lite-triton-{user}"
    except OSError:  # no temporary folder can be written
        pass


def _unusable(folder: Path, private: bool) -> str | None:
    """Why compiled kernels cannot be kept there, in a few words; None if they can.

    A folder of another user will not do: some of what is in it could not be replaced, and all of it
    could be changed under us.
    """
    if not folder.is_absolute():
        return f"{folder} is not a full path"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if hasattr(os, "getuid"):
            user, found = os.getuid(), folder.lstat() if private else folder.stat()
            if found.st_uid != user and (private or user != 0):
                return f"{folder} belongs to another user"
            if private and (not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o022):
                return f"{folder} is open to other users"
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return f"{folder}: {error.strerror or type(error).__name__}"
    return None
