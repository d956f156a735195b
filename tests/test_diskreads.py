"""Reads from disk: past the page cache and every way back."""

import os

import numpy as np
import pytest

from spmoe_lite import diskreads
from spmoe_lite.diskreads import DiskReads, Read
from tests.test_ramtier import KEYS, pack, parts, path, stored  # noqa: F401


def read_all(reads, keys, out):
    """Each expert into a row of its own, as a demand."""
    for key, row in zip(keys, out, strict=True):
        reads.start(read := Read(key, True, reads.parts, row, None, None))
        for part in range(len(read.parts)):
            reads.wait(read, part, lambda: None)


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="no direct reads here")
@pytest.mark.parametrize("bypass", [False, True])
@pytest.mark.parametrize("refuses", ["nothing", "open", "read", "short"])
def test_reads_past_the_page_cache_and_every_way_back(pack, parts, monkeypatch, bypass, refuses):  # noqa: F811
    opened, advised, direct, wanted = [], [], set(), stored(pack)
    os_open, preadv, open_direct = os.open, os.preadv, diskreads._open_direct

    def opening(file, flags, *rest):
        opened.append(flags)
        if refuses == "open":
            raise OSError(22, "Invalid argument")
        return os_open(file, flags & ~os.O_DIRECT, *rest)  # any file system will do

    def reading(file, buffers, offset):
        if file in direct and refuses == "read":
            raise OSError(22, "Invalid argument")
        if file in direct and refuses == "short":
            return preadv(file, [buffers[0][:4096]], offset)
        return preadv(file, buffers, offset)

    def noting(file):
        found = open_direct(file)
        if found is not None:
            direct.add(found)
        return found

    monkeypatch.setattr(diskreads, "_open_direct", noting)
    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    monkeypatch.setattr(os, "posix_fadvise", lambda *a: advised.append(a))
    memory = np.zeros((len(KEYS) + 1) * pack.expert_layout.stride, dtype=np.uint8)
    start = -memory.ctypes.data % diskreads.BLOCK
    out = memory[start:][: len(KEYS) * pack.expert_layout.stride].reshape(len(KEYS), -1)
    reads = DiskReads(pack, bypass)
    read_all(reads, KEYS, out)
    assert (out == np.stack(list(wanted.values()))).all()
    assert bool(opened) == bypass
    assert bool(advised) == (bypass and refuses != "nothing")
    reads.close()
    for file in direct:
        with pytest.raises(OSError):
            os.fstat(file)
