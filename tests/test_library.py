"""The folder of packs: finding, listing, inspecting, verifying, deleting, and the pack used last."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spmoe_lite import library
from spmoe_lite import manifest as m
from spmoe_lite.errors import BusyError, DamagedError, NotFoundError, SpmoeError, UsageError
from spmoe_lite.manifest import layer_file
from spmoe_lite.pack import Pack
from tests.make_pack import DENSE_MODEL, MOE, WIDE, Weights

BIG, SMALL = Weights(MOE), Weights(DENSE_MODEL)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with two packs, a partial, and things that are not packs."""
    folder = tmp_path / "home"
    BIG.write(folder / "big.spmoe")
    SMALL.write(folder / "small.spmoe")
    with BIG.writer(folder / "begun.spmoe") as writer:
        writer.write_layer(0, BIG.experts[0])
    (folder / "history").write_text("x")
    (folder / "photos").mkdir()
    (folder / "photos" / "a.jpg").write_text("x")
    return folder


def test_home_is_asked_for_then_set_then_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    assert library.home() == tmp_path
    assert library.home(tmp_path / "x") == tmp_path / "x"
    assert library.home("~/x") == Path.home() / "x"
    monkeypatch.setenv("SPMOE_HOME", "~/packs")
    assert library.home() == Path.home() / "packs"
    monkeypatch.delenv("SPMOE_HOME")
    assert library.home().name == "spmoe-lite"
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "absent"))
    assert library.packs() == [] and not library.home().exists()


def test_a_home_that_nobody_has_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPMOE_HOME", "~no-such-user/packs")
    with pytest.raises(UsageError, match="no home folder for ~no-such-user/packs; set SPMOE_HOME"):
        library.packs()


@pytest.mark.parametrize("chosen", [5, False, b"packs", ["packs"]])
def test_what_is_no_home_is_one_line(chosen: object) -> None:
    with pytest.raises(UsageError, match=r"^home .*: the path of a folder"):
        library.packs(chosen)  # type: ignore[arg-type]


def test_a_pack_that_lost_its_manifest_is_not_called_absent(home: Path) -> None:
    (home / "big.spmoe" / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="no whole pack.*spmoe-lite rm big"):
        library.find("big", home)


def test_a_pack_by_path_that_lost_its_manifest_is_not_to_be_converted(home: Path) -> None:
    (home / "big.spmoe" / "manifest.json").unlink()
    with pytest.raises(
        NotFoundError, match=r"manifest.json .*no whole pack.*delete it and convert"
    ):
        library.find(home / "big.spmoe")


def test_the_folder_at_hand_may_be_the_pack(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, name in ((home / "big.spmoe", "."), (home / "big.spmoe" / "experts", "..")):
        monkeypatch.chdir(folder)
        assert library.find(name, home) == home / "big.spmoe"
        assert library.removable(name, home) == [home / "big.spmoe"]
        for look in (library.find, library.remove):
            with pytest.raises(NotFoundError, match="name of the pack is empty"):
                look("", home)
    monkeypatch.chdir(home / "big.spmoe")
    library.remove(".", home)
    assert not (home / "big.spmoe").exists()


@pytest.mark.parametrize("name", [None, 5, b"big"])
def test_what_is_no_name_is_one_line(home: Path, name: object) -> None:
    for look in (library.find, library.remove):
        with pytest.raises(UsageError, match="no name of a pack"):
            look(name, home)  # type: ignore[arg-type]


def test_a_pack_is_found_by_path_then_by_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = shutil.copytree(home / "big.spmoe", tmp_path / "work" / "small")
    monkeypatch.chdir(tmp_path / "work")
    assert library.find("big", home) == library.find("big.spmoe", home) == home / "big.spmoe"
    assert library.find(home / "big.spmoe", home) == home / "big.spmoe"
    assert library.find("small", home).resolve() == elsewhere  # the path wins
    (tmp_path / "work" / "big").mkdir()  # a folder that is no pack does not hide one
    assert library.find("big", home) == home / "big.spmoe"


@pytest.mark.parametrize(
    "name, hint",
    [
        ("mixtral-8x7b", "type: spmoe-lite convert mixtral-8x7b"),
        ("Mistral-7B", "type: spmoe-lite convert mistral-7b"),
        ("begun", "not finished; run the same convert again"),
        ("nothing", "no pack named nothing in .*there are big, small"),
        ("a/b", "no pack at a/b"),
        ("a/b.spmoe", "no pack at a/b.spmoe$"),  # a/b may be one
        ("..", "not a pack"),
        ("", "name of the pack is empty"),
        ("../home/big", "no pack at"),
    ],
)
def test_what_is_not_there_says_how_to_get_it(home: Path, name: str, hint: str) -> None:
    with pytest.raises(NotFoundError, match=hint) as caught:
        library.find(name, home)
    assert "\n" not in str(caught.value)


def test_a_partial_is_never_taken_for_a_pack(home: Path) -> None:
    partial = home / "begun.spmoe.partial"
    shutil.copy(home / "big.spmoe" / "manifest.json", partial)  # killed just before the rename
    for name in (partial, "begun", "begun.spmoe"):
        with pytest.raises(NotFoundError):
            library.find(name, home)


def test_a_pack_left_aside_by_a_killed_replacement_is_found(home: Path) -> None:
    for look in (lambda: library.find("big", home), lambda: library.packs(home)):
        (home / "big.spmoe").rename(home / "big.spmoe.old")
        look()
        Pack.open(home / "big.spmoe").close()


@pytest.mark.parametrize(
    "name", ["x" * 300, "x" * 5000, "a\0b", "a\nb", "~", "*", "C:big", "\udcff"]
)
def test_odd_names_are_not_found_and_nothing_else(home: Path, name: str) -> None:
    for look in (library.find, library.remove, library.inspect):
        with pytest.raises(SpmoeError) as caught:
            look(name, home)
        assert isinstance(caught.value, NotFoundError) and "\n" not in str(caught.value)


def test_the_list_has_packs_and_partials_with_their_sizes(home: Path) -> None:
    infos = {info.name: info for info in library.packs(home)}
    assert list(infos) == ["begun", "big", "small"]
    for info in infos.values():
        files = [path for path in info.path.rglob("*") if path.is_file()]
        assert info.size_bytes == sum(path.stat().st_size for path in files)
        assert info.modified == max(path.stat().st_mtime for path in files)
    states = {name: (i.complete, i.moe, i.family) for name, i in infos.items()}
    assert states == {
        "begun": (False, True, "mixtral"),
        "big": (True, True, "mixtral"),
        "small": (True, False, "llama"),
    }


@pytest.mark.parametrize(
    "damage", [b"", b"[]", b'{"head": 5}', b'{"head": {"model": []}}', b"\xff"]
)
def test_damaged_packs_are_listed_as_such(home: Path, damage: bytes) -> None:
    (home / "big.spmoe" / "manifest.json").write_bytes(damage)
    (home / "begun.spmoe.partial" / "partial.json").write_bytes(damage)
    (home / "empty.spmoe").mkdir()
    states = {info.name: info.complete for info in library.packs(home)}
    assert states == {"begun": False, "big": False, "empty": False, "small": True}


def test_inspect_is_plain_json(home: Path) -> None:
    found = library.inspect("big", home)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["layers"], found["experts"], found["experts_per_layer"]) == (2, 6, 3)
    kinds = ("dense", "linear", "embed", "expert")
    assert [found[f"{kind}_dtype"] for kind in kinds] == ["fp32", "fp32", "fp32", "bf16"]
    assert found["expert_bytes"] == 65536
    assert found["source"] == {"id": "random", "revision": "0"}
    sizes = [path.stat().st_size for path in (home / "big.spmoe").rglob("*") if path.is_file()]
    manifest = (home / "big.spmoe" / "manifest.json").stat().st_size
    assert found["total_bytes"] == sum(sizes) - manifest
    small = library.inspect(home / "small.spmoe")
    assert (small["experts"], small["expert_dtype"], small["expert_files_bytes"]) == (0, None, 0)


def test_inspect_tells_the_schemes_and_the_bytes_of_a_quantised_pack(tmp_path: Path) -> None:
    weights = Weights(WIDE, "fp16", "int4-g64z", linear_dtype="int8-g32", embed_dtype="int4-g32")
    found = library.inspect(weights.write(tmp_path / "q.spmoe"))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    kinds = ("dense", "linear", "embed", "expert")
    schemes = ["fp16", "int8-g32", "int4-g32", "int4-g64z"]
    assert [found[f"{kind}_dtype"] for kind in kinds] == schemes
    assert found["format"] == 2 and found["expert_bytes"] == 65536
    header = 8 + int.from_bytes((tmp_path / "q.spmoe" / m.DENSE).read_bytes()[:8], "little")
    assert found["dense_file_bytes"] == header + sum(w.nbytes for w in weights.dense.values())


def test_a_check_that_could_not_be_stopped_is_not_begun(home: Path) -> None:
    for name, value in {"cancel": True, "on_progress": 5}.items():
        with pytest.raises(UsageError, match=f"^{name} {value}"):
            library.verify("big", home=home, **{name: value})  # type: ignore[arg-type]


def test_verify_reads_every_byte(home: Path) -> None:
    seen = []
    library.verify("big", seen.append, home=home)
    assert seen[-1].done == seen[-1].total == library.inspect("big", home)["total_bytes"]
    file = home / "big.spmoe" / layer_file(1)
    data = bytearray(file.read_bytes())
    data[5000] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedError, match="layer-001"):
        library.verify("big", home=home)


def test_remove_takes_the_pack_and_its_partial(home: Path) -> None:
    with BIG.writer(home / "big.spmoe", force=True) as writer:
        writer.write_layer(0, BIG.experts[0])
    library.remove("big", home)
    library.remove("begun", home)
    library.remove(home / "small.spmoe", home)
    assert sorted(os.listdir(home)) == ["history", "photos"]
    for name in ("big", "begun", home / "small.spmoe"):
        with pytest.raises(NotFoundError):
            library.remove(name, home)


def test_remove_takes_a_damaged_pack(home: Path) -> None:
    (home / "big.spmoe" / "manifest.json").write_bytes(b"{")
    library.remove("big", home)
    assert not (home / "big.spmoe").exists()


def test_remove_takes_what_the_list_shows_even_if_its_manifest_is_a_folder(home: Path) -> None:
    (home / "odd.spmoe" / "manifest.json" / "inside").mkdir(parents=True)
    assert ("odd", False) in [(info.name, info.complete) for info in library.packs(home)]
    library.remove("odd", home)
    assert not (home / "odd.spmoe").exists()


def test_remove_refuses_what_is_not_a_pack(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "web"
    other.mkdir()
    (other / "manifest.json").write_text('{"name": "an app"}')
    (home / "link.spmoe").symlink_to(home / "photos")
    for name in (home / "photos", home / "history", other, home, "link", "..", ".", ""):
        with pytest.raises(SpmoeError):
            library.remove(name, home)
    assert (home / "photos" / "a.jpg").exists() and (other / "manifest.json").exists()
    with pytest.raises(UsageError):
        library.remove(home / "photos", home)


def test_remove_waits_for_no_writer(home: Path) -> None:
    with BIG.writer(home / "begun.spmoe") as writer:
        with pytest.raises(BusyError):
            library.remove("begun", home)
        assert writer.has(layer_file(0))
        BIG.fill(writer)
        BIG.finish(writer)
    assert library.find("begun", home)


def test_remove_leaves_a_pack_whose_replacement_is_being_written(home: Path) -> None:
    with BIG.writer(home / "small.spmoe", force=True):
        with pytest.raises(BusyError):
            library.remove("small", home)
        assert library.find("small", home)
    library.remove("small", home)


def test_removal_that_fails_is_one_line(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.raises(SpmoeError, match="cannot delete .*big.spmoe") as caught:
        library.remove("big", home)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert not [info for info in library.packs(home) if info.name == "big" and info.complete]
    library.remove("big", home)


# The pack used last


def test_the_pack_used_last_comes_first(home: Path, tmp_path: Path) -> None:
    elsewhere = shutil.copytree(home / "big.spmoe", tmp_path / "away.spmoe")
    for at, name in enumerate(("big", "small")):
        os.utime(home / f"{name}.spmoe" / "manifest.json", (2e9 + at, 2e9 + at))
    assert [path.name for path in library.last_used(home)] == ["small.spmoe", "big.spmoe"]
    library.touch_used(home / "big.spmoe", home)
    assert [path.name for path in library.last_used(home)] == ["big.spmoe", "small.spmoe"]
    library.touch_used(elsewhere, home)
    assert library.last_used(home)[0] == elsewhere
    shutil.rmtree(elsewhere)
    assert library.last_used(home)[0].name == "big.spmoe"
    assert sorted(os.listdir(home)) == [
        "begun.spmoe.partial",
        "big.spmoe",
        "history",
        "photos",
        "small.spmoe",
        "used.json",
    ]


def test_a_pack_in_a_folder_of_another_encoding_is_remembered_too(home: Path) -> None:
    library.touch_used(home / "big.spmoe", home)
    odd = Path(os.fsdecode(os.fsencode(home / "small.spmoe") + b"\xff"))
    try:
        shutil.copytree(home / "small.spmoe", odd)
    except OSError:
        pytest.skip("this file system takes names of its own encoding alone")
    library.touch_used(odd, home)
    assert [path.name for path in library.last_used(home)[:2]] == [odd.name, "big.spmoe"]


@pytest.mark.parametrize(
    "text",
    ["", "[]", '{"a": "b"}', '{"x": NaN}', "{" * 9000, '{"/": 1e308}', f'{{"/": 1{"0" * 400}}}'],
)
def test_a_broken_record_of_use_is_no_record(home: Path, text: str) -> None:
    (home / "used.json").write_text(text)
    assert {path.name for path in library.last_used(home)} == {"big.spmoe", "small.spmoe"}
    library.touch_used(home / "small.spmoe", home)
    assert library.last_used(home)[0].name == "small.spmoe"


def test_a_home_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    library.touch_used(tmp_path, tmp_path / "file")
    assert library.last_used(tmp_path / "absent") == []


def test_the_default_is_a_moe_pack_of_the_draft_s_vocabulary(home: Path) -> None:
    assert library.default_target(home=home) == home / "big.spmoe"
    assert library.default_target(home / "small.spmoe", home) == home / "big.spmoe"
    library.touch_used(home / "small.spmoe", home)  # dense: never a target
    assert library.default_target(home=home) == home / "big.spmoe"
    other = Weights(replace(MOE, vocab_size=60)).write(home / "demo.spmoe")
    library.touch_used(other, home)
    assert library.default_target(home=home) == home / "big.spmoe"  # demo only when asked
    (home / "demo.spmoe").rename(home / "newer.spmoe")
    library.touch_used(home / "newer.spmoe", home)
    assert library.default_target(home=home) == home / "newer.spmoe"
    library.remove("newer", home)
    library.remove("big", home)
    assert library.default_target(home=home) is None


def test_listing_needs_no_torch(home: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from spmoe_lite import library; "
        f"assert len(library.packs({str(home)!r})) == 3; library.inspect('big', {str(home)!r}); "
        f"library.default_target(home={str(home)!r}); library.remove('begun', {str(home)!r}); "
        "assert 'torch' not in sys.modules"
    )
    root = Path(__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=60)


def test_a_pack_that_goes_while_it_is_listed_is_not_listed(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = m.read_manifest

    def gone(path: Path) -> m.Manifest:
        if path.name == "big.spmoe":
            shutil.rmtree(path)
        return read(path)

    monkeypatch.setattr(m, "read_manifest", gone)
    assert [info.name for info in library.packs(home)] == ["begun", "small"]
