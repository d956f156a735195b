"""Mutated packs: refused in one line, or read correctly; never a crash, a hang or an absurd allocation.

Three layers of mutation: raw bytes of any file, JSON values of the manifest, and JSON values of a
safetensors header. The manifest's sizes and hashes are mended after the change, or not, so that
mutations reach past the first check. A pack that opens must agree with itself: every tensor has the
shape the config gives it and every expert is inside its file; one that `verify` passes with the
original manifest has the original bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmoe_lite import library
from spmoe_lite.errors import DamagedError, SpmoeError
from spmoe_lite.manifest import check_manifest, dense_shapes, layer_file
from spmoe_lite.pack import Pack
from spmoe_lite.precision import matrix_bytes, scheme_of
from tests.make_pack import MOE, WIDE, Weights, files_of

WEIGHTS = {
    "floats": Weights(MOE),
    "quantised": Weights(
        WIDE, "bf16", "int4-g64z", linear_dtype="int8-g32", embed_dtype="int4-g32"
    ),
}
TENSOR_FILES = ["dense.safetensors", layer_file(0), layer_file(1)]
FUZZ = settings(
    max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.fixture(scope="module", params=WEIGHTS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WEIGHTS[request.param].write(tmp_path_factory.mktemp("fuzz") / "a.spmoe")


@pytest.fixture(scope="module")
def original(made: Path) -> dict[str, bytes]:
    return files_of(made)


def mend(folder: Path) -> None:
    """Give the manifest the sizes and hashes that the files have now."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    path.write_text(json.dumps(manifest), encoding="utf-8")


def read_everything(folder: Path) -> bool:
    """Open and read all of a pack; False if it was refused. Anything but a `SpmoeError` escapes."""
    try:
        with Pack.open(folder) as pack:
            dense = pack.load_dense()
            assert {n: tuple(t.shape) for n, t in dense.items()} == dense_shapes(pack.config)
            if pack.expert_layout is not None:
                out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
                for layer in range(pack.config.num_hidden_layers):
                    for expert in range(pack.config.num_local_experts):
                        pack.read_expert(layer, expert, out)
                        assert bytes(out) == bytes(pack.expert_bytes(layer, expert))
            pack.verify()
        json.dumps(library.inspect(folder))
        return True
    except SpmoeError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return False


@given(data=st.data())
@FUZZ
def test_mutated_bytes(made: Path, original: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(made, Path(temporary) / "a.spmoe")
        name = data.draw(st.sampled_from([*original, "manifest.json"]))
        content = bytearray((folder / name).read_bytes())
        where = st.one_of(
            st.integers(0, min(len(content), 700)), st.integers(0, len(content))
        )  # headers first
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(where)
            match data.draw(st.sampled_from(["set", "cut", "insert", "remove", "repeat"])):
                case "set":
                    content[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
                case "cut":
                    del content[at:]
                case "insert":
                    content[at:at] = data.draw(st.binary(max_size=20))
                case "remove":
                    del content[at : at + data.draw(st.integers(1, 5000))]
                case "repeat":
                    content[at:at] = content[at : at + data.draw(st.integers(1, 5000))]
        (folder / name).write_bytes(content)
        mended = name != "manifest.json" and data.draw(st.booleans())
        if mended:
            mend(folder)
        accepted = read_everything(folder)
        if accepted and not mended:  # the hashes stand, so the bytes must
            assert {n: b for n, b in files_of(folder).items() if n in original} == original


HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2, 63, 64, 4096, 65535, 65536, 2**31, 2**63, 2**64, 10**30]),
    st.integers(),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from(["", "fp32", "bf16", "U8", "F32", "..", "../x", "/dev/zero", "a\nb", "\ud800"]),
    st.sampled_from(["int8-g32", "int8-g64", "int4-g32z", "int4-g64", "int4-g128z", "int2-g32"]),
    st.text(max_size=10),
    st.lists(st.integers(-2, 10), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of every value inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else ()
    items = enumerate(value) if isinstance(value, list) else items
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def mutated(value: Any, data: st.DataObject) -> Any:
    """One to three values replaced, removed, renamed or swapped with another."""
    value = copy.deepcopy(value)
    for _ in range(data.draw(st.integers(1, 3))):
        all_places = places(value)
        if not all_places:
            return value
        *way, key = data.draw(st.sampled_from(all_places))
        inner = value
        for step in way:
            inner = inner[step]
        match data.draw(st.sampled_from(["replace", "remove", "rename", "swap", "nudge"])):
            case "remove":
                del inner[key]
            case "rename" if isinstance(inner, dict):
                inner[data.draw(st.text(max_size=8))] = inner.pop(key)
            case "swap" if isinstance(inner, dict):
                other = data.draw(st.sampled_from(sorted(inner)))
                inner[key], inner[other] = inner[other], inner[key]
            case "nudge" if isinstance(inner[key], int):
                inner[key] += data.draw(st.sampled_from([-65536, -64, -1, 1, 64, 65536]))
            case _:
                inner[key] = data.draw(HOSTILE)
    return value


@given(data=st.data())
@FUZZ
def test_mutated_manifest(made: Path, original: dict[str, bytes], data: st.DataObject) -> None:
    path = made / "manifest.json"
    before = path.read_text(encoding="utf-8")
    try:
        path.write_text(json.dumps(mutated(json.loads(before), data)), encoding="utf-8")
        read_everything(made)
    finally:
        path.write_text(before, encoding="utf-8")
    assert files_of(made) == original  # reading writes nothing


@given(data=st.data())
@FUZZ
def test_mutated_header(made: Path, data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = shutil.copytree(made, Path(temporary) / "a.spmoe")
        file = folder / data.draw(st.sampled_from(TENSOR_FILES))
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        text = json.dumps(mutated(json.loads(content[8:end]), data)).encode()
        if data.draw(st.booleans()):
            text = text.ljust(end - 8)
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:])
        mend(folder)
        read_everything(folder)


@given(data=st.data())
@FUZZ
def test_mutated_manifest_alone(made: Path, data: st.DataObject) -> None:
    """Without files: whatever `check_manifest` lets through is a config and a layout to rely on."""
    raw = mutated(json.loads((made / "manifest.json").read_text(encoding="utf-8")), data)
    try:
        manifest = check_manifest(raw, Path("manifest.json"))
    except SpmoeError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return
    config, layout, dtypes = manifest.config, manifest.layout, manifest.dtypes
    for name, (rows, columns) in ((n, s) for n, s in dense_shapes(config).items() if len(s) == 2):
        scheme = scheme_of(dtypes.of(name))
        assert scheme is None or not (rows % 2 or columns % scheme.group)
    assert config.from_dict(config.to_dict()) == config
    assert all(isinstance(n, int) for shape in dense_shapes(config).values() for n in shape)
    if layout is not None:
        hidden, width = layout.hidden_size, layout.intermediate_size
        up, down = (
            matrix_bytes(layout.dtype, width, hidden),
            matrix_bytes(layout.dtype, hidden, width),
        )
        runs = sorted(
            [(layout.gate_offset, up), (layout.up_offset, up), (layout.down_offset, down)]
        )
        ends = [*(start for start, _ in runs[1:]), layout.stride]
        for (start, size), end in zip(runs, ends, strict=True):
            assert 0 <= start and start + size <= end


@pytest.mark.parametrize(
    "name, change",
    [
        ("manifest.json", lambda data: b" " * (64 << 20) + data),
        ("manifest.json", lambda data: b"[" * (4 << 20)),
        ("manifest.json", lambda data: data.replace(b'"vocab_size": 50', b'"vocab_size": 4000000')),
        ("manifest.json", lambda data: data.replace(b"65536", b"4611686018427322368")),
        ("dense.safetensors", lambda data: (1 << 62).to_bytes(8, "little") + data[8:]),
        ("dense.safetensors", lambda data: (64 << 20).to_bytes(8, "little") + b"[" * (64 << 20)),
        (layer_file(0), lambda data: (64 << 20).to_bytes(8, "little") + b" " * (65 << 20)),
        (layer_file(0), lambda data: data.replace(b"[65536]", b"[9e999]")),
    ],
)
def test_refusing_takes_little_memory(made: Path, tmp_path: Path, name: str, change: Any) -> None:
    folder = shutil.copytree(made, tmp_path / "a.spmoe")
    (folder / name).write_bytes(change((folder / name).read_bytes()))
    if name != "manifest.json":
        mend(folder)
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError):
            Pack.open(folder)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
