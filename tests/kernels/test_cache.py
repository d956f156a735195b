"""The folder of compiled kernels, on machines that are not here: read-only, shared, of another user."""

import os
import tempfile
from pathlib import Path

import pytest

from spmoe_lite.errors import UsageError

knobs = pytest.importorskip("triton.knobs", reason="Triton is declared for Linux only")

from triton.runtime.cache import get_cache_manager  # noqa: E402

from spmoe_lite.kernels.cache_triton import settle_kernel_cache  # noqa: E402


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """Triton's settings, and a user whose cache folder and temporary folder are empty."""
    monkeypatch.setitem(vars(knobs.cache), "dir", str(tmp_path / "home" / ".triton" / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))


def unwritable(monkeypatch, *folders):
    """As on a read-only file system, or for a user without the right."""
    real = tempfile.TemporaryFile

    def refusing(dir):
        if any(dir.is_relative_to(folder) for folder in folders):
            raise PermissionError(13, "Permission denied")
        return real(dir=dir)

    monkeypatch.setattr(tempfile, "TemporaryFile", refusing)


def owned_by_others(monkeypatch, *folders):
    """We are user 1000, to whom all but these folders belong."""
    real = Path.stat

    def stat(path, **options):
        found = real(path, **options)
        uid = 1001 if path in folders else 1000
        return os.stat_result((*found[:4], uid, *found[5:]))

    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "lstat", lambda path: stat(path, follow_symlinks=False))


def test_kind_k_o30_triton_s_own_folder_is_kept_where_it_can_be_written(folders, tmp_path, caplog):
    usual = knobs.cache.dir
    settle_kernel_cache()
    assert knobs.cache.dir == usual and not caplog.records
    assert [p.name for p in tmp_path.iterdir() if p.name != "temp"] == ["home"]


@pytest.mark.parametrize("case", ["not writable", "read-only home", "another user's", "relative"])
def test_kind_k_o30_kernels_are_kept_elsewhere_and_it_is_said_once(
    folders, tmp_path, monkeypatch, caplog, case
):
    if case == "not writable":
        unwritable(monkeypatch, tmp_path / "home")
    elif case == "read-only home":
        (tmp_path / "home").write_text("no folder can be made below a file")
    elif case == "another user's":
        owned_by_others(monkeypatch, tmp_path / "home" / ".triton" / "cache")
    else:
        vars(knobs.cache)["dir"] = "~/.triton/cache"  # as when nobody knows the home
    environment = dict(os.environ)
    settle_kernel_cache()
    settle_kernel_cache()
    expected = tmp_path / "cache" / "spmoe-lite" / "triton"
    assert knobs.cache.dir == str(expected)
    assert expected.stat().st_mode & 0o077 == 0
    assert dict(os.environ) == environment
    kept = get_cache_manager("0a").put(b"code", "kernel.cubin")
    assert Path(kept).is_relative_to(expected) and Path(kept).read_bytes() == b"code"
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 1 and lines[0].startswith(f"compiled kernels are kept in {expected} (")


@pytest.mark.parametrize("case", ["foreign", "open", "link", "free"])
def test_kind_k_o30_a_shared_temporary_folder_is_not_trusted(folders, tmp_path, monkeypatch, case):
    """Whoever could write there could put a program in the place of a kernel."""
    unwritable(monkeypatch, tmp_path / "home", tmp_path / "cache")
    mine = tmp_path / "temp" / "spmoe-lite-triton-1000"
    if case == "link":
        (tmp_path / "elsewhere").mkdir()
        mine.symlink_to(tmp_path / "elsewhere")
    elif case != "free":
        mine.mkdir(mode=0o700)
        mine.chmod(0o777 if case == "open" else 0o700)
    owned_by_others(monkeypatch, *[mine][: case == "foreign"])
    settle_kernel_cache()
    chosen = Path(knobs.cache.dir)
    assert (chosen == mine) == (case == "free")
    assert chosen.parent == tmp_path / "temp" and chosen.stat().st_mode & 0o077 == 0


def test_kind_k_o30_no_folder_at_all_is_one_line(folders, tmp_path, monkeypatch):
    unwritable(monkeypatch, tmp_path)

    def refusing(prefix):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refusing)
    with pytest.raises(UsageError, match=r"home.*Permission denied\): set TRITON_CACHE_DIR"):
        settle_kernel_cache()
