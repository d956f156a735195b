"""The pack format, its reader and its writer: bytes, refusals, resume, and what a broken disk leaves.

BUGS.md kind J (O28) and the parts of kinds A and I (O27) that concern a pack.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import json
import mmap
import os
import random
import shutil
import sys
import threading
from dataclasses import replace
from io import FileIO
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from spmoe_lite import files, pack_writer
from spmoe_lite import manifest as m
from spmoe_lite import pack as pack_module
from spmoe_lite.errors import (
    BusyError,
    Cancelled,
    CapacityError,
    DamagedError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.files import locked
from spmoe_lite.manifest import expert_layout, layer_file
from spmoe_lite.pack import Pack
from spmoe_lite.precision import Scheme, matrix_bytes
from spmoe_lite.quant import QuantizedMatrix, pack_codes, pack_scales, quantize
from tests.make_pack import DENSE_MODEL, MOE, TEXTS, WIDE, Weights, bits, files_of

LINUX = sys.platform == "linux"
KINDS = {
    "moe": Weights(MOE),
    "moe fp16, odd sizes": Weights(
        replace(MOE, hidden_size=7, intermediate_size=5, num_local_experts=5, vocab_size=11),
        dense_dtype="bf16",
        expert_dtype="fp16",
    ),
    "dense": Weights(DENSE_MODEL),
    "dense, tied, biases": Weights(
        replace(DENSE_MODEL, tie_word_embeddings=True, attention_bias=True), dense_dtype="fp16"
    ),
    "moe, quantised": Weights(
        WIDE, "bf16", "int4-g64z", linear_dtype="int8-g32", embed_dtype="int4-g32"
    ),
    "moe, quantised experts of odd sizes": Weights(
        replace(MOE, hidden_size=32, intermediate_size=96), expert_dtype="int4-g32z"
    ),
    "dense, tied, biases, quantised": Weights(
        replace(
            WIDE,
            family="llama",
            num_local_experts=0,
            num_experts_per_tok=0,
            tie_word_embeddings=True,
            attention_bias=True,
        ),
        "fp16",
        linear_dtype="int4-g64z",
        embed_dtype="int8-g64",
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One finished MoE pack; tests that change it work on a copy."""
    return KINDS["moe"].write(tmp_path_factory.mktemp("made") / "moe.spmoe")


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "copy.spmoe")


# The bytes


@given(
    st.sampled_from(["fp32", "bf16", "fp16", "int8-g64", "int4-g32", "int4-g128z"]),
    st.integers(1, 20000),
    st.integers(1, 60000),
)
def test_layout_is_aligned_and_holds_three_matrices(dtype: str, hidden: int, width: int) -> None:
    layout = expert_layout(dtype, hidden, width)
    up, down = matrix_bytes(dtype, width, hidden), matrix_bytes(dtype, hidden, width)
    starts = [layout.gate_offset, layout.up_offset, layout.down_offset]
    assert all(start % 64 == 0 for start in starts)
    for start, size, end in zip(starts, (up, up, down), [*starts[1:], layout.stride], strict=True):
        assert start + size <= end
    assert layout.stride % 65536 == 0 and layout.stride - (2 * up + down) < 65536 + 3 * 64


def test_layout_of_mixtral_has_no_hole() -> None:
    layout = expert_layout("bf16", 4096, 14336)
    assert (layout.up_offset, layout.down_offset) == (117440512, 234881024)
    assert layout.stride == 352321536 == 3 * 4096 * 14336 * 2
    layout = expert_layout("int4-g64z", 4096, 14336)  # 4.25 bits a weight
    assert (layout.up_offset, layout.down_offset) == (31195136, 62390272)
    assert layout.stride - 3 * 31195136 < 65536


def kind_of(weight: torch.Tensor | QuantizedMatrix) -> tuple:
    if isinstance(weight, QuantizedMatrix):
        return weight.scheme, weight.shape, *(kind_of(part) for part in weight.tensors())
    return weight.dtype, tuple(weight.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read(kind: str, tmp_path: Path) -> None:
    weights = KINDS[kind]
    c = weights.config
    path = weights.write(tmp_path / "a.spmoe")
    with Pack.open(path) as pack:
        assert (pack.name, pack.config, pack.num_tokens) == ("a", c, c.vocab_size - 1)
        dense = pack.load_dense()
        assert list(dense) == list(weights.dense)
        for name, tensor in weights.dense.items():
            assert kind_of(dense[name]) == kind_of(tensor) and bits(dense[name]) == bits(tensor), (
                name
            )
        assert pack.dense_bytes() == sum(t.nbytes for t in dense.values())
        assert pack.dense_bytes() == sum(pack.dense_sizes().values())
        assert pack.dense_sizes().keys() == {weights.dtypes.of(name) for name in dense}
        assert pack.expert_count() == sum(map(len, weights.experts))
        for layer, experts in enumerate(weights.experts):
            for expert, matrices in enumerate(experts):
                layout = pack.expert_layout
                view = pack.expert_bytes(layer, expert)
                read = np.full(layout.stride, 255, dtype=np.uint8)
                pack.read_expert(layer, expert, read)
                assert view.ctypes.data % 4096 == 0 and not view.flags.writeable
                assert bytes(view) == bytes(read)
                used = 0
                offsets = (layout.gate_offset, layout.up_offset, layout.down_offset)
                for offset, matrix in zip(offsets, matrices, strict=True):
                    assert bytes(view[offset : offset + matrix.nbytes]) == bits(matrix)
                    used += np.count_nonzero(view[offset : offset + matrix.nbytes])
                assert np.count_nonzero(view) == used  # zeros everywhere else
        pack.verify()


@pytest.mark.parametrize("kind", KINDS)
def test_any_safetensors_reader_lists_and_reads_every_file(kind: str, tmp_path: Path) -> None:
    weights = KINDS[kind]
    path = weights.write(tmp_path / "a.spmoe")
    with safe_open(path / "dense.safetensors", "pt") as file:
        stored = {}
        for name, weight in weights.dense.items():
            if isinstance(weight, QuantizedMatrix):
                stored |= {f"{name}.codes": weight.codes, f"{name}.scales": weight.scales}
            else:
                stored[name] = weight
        assert set(file.keys()) == set(stored)
        for name, tensor in stored.items():
            found = file.get_tensor(name)
            assert kind_of(found) == kind_of(tensor) and bits(found) == bits(tensor)
    with Pack.open(path) as pack:
        for layer in range(len(weights.experts)):
            with safe_open(path / layer_file(layer), "np") as file:
                assert sorted(file.keys()) == [f"expert.{e}" for e in range(len(file.keys()))]
                assert len(file.keys()) == weights.config.num_local_experts
                for expert in range(len(file.keys())):
                    stored = file.get_tensor(f"expert.{expert}")
                    assert bytes(stored) == bytes(pack.expert_bytes(layer, expert))


def test_the_bytes_of_an_expert_file_are_these(made: Path) -> None:
    data = (made / layer_file(0)).read_bytes()
    text = (
        b'{"expert.0":{"dtype":"U8","shape":[65536],"data_offsets":[0,65536]},'
        b'"expert.1":{"dtype":"U8","shape":[65536],"data_offsets":[65536,131072]},'
        b'"expert.2":{"dtype":"U8","shape":[65536],"data_offsets":[131072,196608]}}'
    )
    assert data[:4096] == (4088).to_bytes(8, "little") + text.ljust(4088)
    assert len(data) == 4096 + 3 * 65536
    assert data[4096 : 4096 + 960] == bits(KINDS["moe"].experts[0][0][0])


def hand_made(scheme: Scheme, rows: int, columns: int, shift: int) -> QuantizedMatrix:
    """Codes, scales and zeros by rule, so that every byte can be told from its place."""
    n, k = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    padded = -(-columns // 64) * 64
    codes = torch.zeros(rows, padded, dtype=torch.uint8)
    codes[:, :columns] = (k * 7 + n * 3 + shift) % (2 * scheme.middle)
    g, n = torch.meshgrid(torch.arange(padded // scheme.group), torch.arange(rows), indexing="ij")
    scales = 2.0 ** (g - n - 3) * (1 + shift / 8)
    packed = pack_scales(scales, (g * 5 + n * 6 + shift) % 16, scheme)
    return QuantizedMatrix(scheme, columns, pack_codes(codes, scheme), packed)


def test_the_bytes_of_a_quantised_expert_are_these(tmp_path: Path) -> None:
    """Two rows of 32 columns in int4-g32z: two runs of codes, then one word of scales a row."""
    tiny = replace(
        MOE, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_local_experts=2
    )
    weights, scheme = Weights(tiny, expert_dtype="int4-g32z"), Scheme(4, 32, zeros=True)
    weights.experts = [
        [tuple(hand_made(scheme, 32, 32, 3 * e + i) for i in range(3)) for e in (0, 1)]
    ]
    data = (weights.write(tmp_path / "a.spmoe") / layer_file(0)).read_bytes()[4096:]
    assert len(data) == 2 * 65536
    # 7 k mod 16 in row 0, 7 k + 3 in row 1; columns k and 16 + k share a byte here, and are equal
    assert data[:32].hex() == "00007700ee005500cc003300aa0011008800ff006600dd004400bb0022009900"
    assert data[32:64].hex() == "3300aa0011008800ff006600dd004400bb002200990000007700ee005500cc00"
    # row 0: 2^-3, zero 0; 2^-2, zero 5. Row 1: 2^-4, zero 6; 2^-3, zero 11, whose top bit is the sign's
    assert data[32 * 32 : 32 * 32 + 8].hex() == "00300534062c03b0"
    matrix = 32 * 32 + 32 * 4  # codes, then a word of two scales for each row
    assert matrix % 64 == 0 and data[matrix : matrix + 2].hex() == "1100"  # `up` adjoins
    assert data[3 * matrix : 65536] == bytes(65536 - 3 * matrix)
    assert data[65536:65538].hex() == "3300"


def by_the_page(run: bytes, dtype: str, rows: int, columns: int) -> np.ndarray:
    """A matrix as docs/pack-format.md says to read it, weight by weight; shares no code with ours."""
    bits, group, zeros = int(dtype[3]), int(dtype[6:].rstrip("z")), dtype.endswith("z")
    words = np.frombuffer(run, dtype="<u2")
    blocks, wide = -(-columns // 64), 4 * bits  # words of 16 bits in one row of a block
    values = np.empty((rows, columns))
    for n in range(rows):
        for k in range(columns):
            part, j = divmod(k % 64, wide)
            code = int(words[(k // 64 * rows + n) * wide + j]) >> bits * part & (1 << bits) - 1
            pair, second = divmod(k // group, 2)
            word = int(words[blocks * rows * wide + (pair * rows + n) * 2 + second])
            zero = 1 << bits - 1
            if zeros:
                zero, word = word & 7 | word >> 15 << 3, word & 0x7FF8
            values[n, k] = (code - zero) * float(np.array(word, dtype="<u2").view("<f2"))
    return values


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "quantised" in kind])
def test_a_stranger_reads_quantised_matrices_by_the_page_alone(kind: str, tmp_path: Path) -> None:
    weights = KINDS[kind]
    path = weights.write(tmp_path / "a.spmoe")
    seen = 0
    with safe_open(path / "dense.safetensors", "np") as file:
        for name, weight in weights.dense.items():
            if isinstance(weight, QuantizedMatrix):
                run = b"".join(
                    file.get_tensor(f"{name}.{p}").tobytes() for p in ("codes", "scales")
                )
                values = by_the_page(run, weights.dtypes.of(name), *weight.shape)
                assert np.array_equal(values, weight.dequantize().numpy()), name
                seen += 1
    layout = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["expert_layout"]
    for layer, experts in enumerate(weights.experts):
        with safe_open(path / layer_file(layer), "np") as file:
            run = file.get_tensor("expert.1").tobytes()
        for name, weight in zip(("gate", "up", "down"), experts[1], strict=True):
            start = layout[f"{name}_offset"]
            values = by_the_page(run[start:], layout["dtype"], *weight.shape)
            assert np.array_equal(values, weight.dequantize().numpy()), name
            seen += 1
    assert seen >= 6


def test_manifest_lists_size_and_hash_of_every_file(made: Path) -> None:
    manifest = json.loads((made / "manifest.json").read_text(encoding="utf-8"))
    files = files_of(made)
    assert (
        set(files)
        == set(manifest["files"])
        == {
            "dense.safetensors",
            "experts/layer-000.safetensors",
            "experts/layer-001.safetensors",
            *TEXTS,
        }
    )
    for name, data in files.items():
        entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        assert manifest["files"][name] == entry
    assert manifest["format"] == 2


# The reader


def test_reading_works_where_preadv_is_missing(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    with Pack.open(made) as pack:
        wrong = []

        def read_all(expert: int) -> None:
            out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
            for _ in range(20):
                for layer in (0, 1):
                    pack.read_expert(layer, expert, out)
                    if bytes(out) != bytes(pack.expert_bytes(layer, expert)):
                        wrong.append((layer, expert))

        threads = [threading.Thread(target=read_all, args=(e,)) for e in (0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert bits(pack.load_dense()["norm.weight"]) == bits(KINDS["moe"].dense["norm.weight"])


def test_part_of_an_expert_is_read(made: Path) -> None:
    with Pack.open(made) as pack:
        whole = pack.expert_bytes(1, 2)
        out = np.empty(1000, dtype=np.uint8)
        pack.read_expert(1, 2, out, offset=777)
        assert bytes(out) == bytes(whole[777:1777])
        with pytest.raises(ValueError):
            pack.read_expert(1, 2, out, offset=pack.expert_layout.stride - 999)
        with pytest.raises(IndexError):
            pack.read_expert(2, 0, out)


def test_kind_i_a_map_that_is_refused_becomes_a_read(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = mmap.mmap

    def refuse(fileno: int, length: int, **kw: object) -> mmap.mmap:
        if fileno != -1:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(fileno, length, **kw)

    with Pack.open(made) as pack:
        expected = [bytes(pack.expert_bytes(1, e)) for e in range(3)]
    monkeypatch.setattr(pack_module.mmap, "mmap", refuse)
    with Pack.open(made) as pack:
        views = [pack.expert_bytes(1, e) for e in range(3)]
        assert [bytes(view) for view in views] == expected
        assert all(v.ctypes.data % 4096 == 0 and not v.flags.writeable for v in views)
    assert len([r for r in caplog.records if "cannot map" in r.getMessage()]) == 1


def mapped(path: Path) -> int:
    return Path("/proc/self/maps").read_text().count(str(path))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")
@pytest.mark.skipif(not LINUX, reason="counts mappings in /proc")
def test_close_unmaps_and_closes_everything(made: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    pack = Pack.open(made)
    view = pack.expert_bytes(0, 0)
    tensor = torch.frombuffer(pack.expert_bytes(1, 0), dtype=torch.uint8)
    assert mapped(made) == 2
    expected, first = bytes(view), int(tensor[0])
    pack.close()
    pack.close()
    assert bytes(view) == expected and int(tensor[0]) == first  # a view in use is never unmapped
    assert mapped(made) == 2
    del view, tensor
    gc.collect()
    assert mapped(made) == 0
    with Pack.open(made) as pack:
        pack.expert_bytes(0, 0)
    assert mapped(made) == 0
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_closed_pack_says_so(made: Path) -> None:
    pack = Pack.open(made)
    out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
    pack.close()
    for use in (
        lambda: pack.expert_bytes(0, 0),
        lambda: pack.read_expert(0, 0, out),
        lambda: pack.load_dense(),
    ):
        with pytest.raises(BusyError, match="closed"):
            use()


def test_loading_and_verifying_report_and_stop(made: Path) -> None:
    with Pack.open(made) as pack:
        seen = []
        pack.load_dense(on_progress=seen.append)
        assert [p.done for p in seen] == sorted(p.done for p in seen)
        assert {p.total for p in seen} == {pack.dense_bytes()} and seen[-1].done == seen[-1].total
        seen.clear()
        pack.verify(on_progress=seen.append)
        assert seen[-1].done == seen[-1].total == sum(len(d) for d in files_of(made).values())
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(Cancelled):
            pack.load_dense(cancel=cancel)
        with pytest.raises(Cancelled):
            pack.verify(cancel=cancel)
        cancel.clear()
        with pytest.raises(Cancelled):
            pack.load_dense(on_progress=lambda _: cancel.set(), cancel=cancel)


# What a reader refuses


@pytest.mark.parametrize("name", [m.DENSE, layer_file(1), "tokenizer.json"])
@pytest.mark.parametrize("change", ["shorter", "longer", "empty", "missing"])
def test_kind_j_a_file_of_another_size_is_refused_at_once(
    copy: Path, name: str, change: str
) -> None:
    file = copy / name
    data = file.read_bytes()
    if change == "missing":
        file.unlink()
    else:
        file.write_bytes({"shorter": data[:-1], "longer": data + b"\0", "empty": b""}[change])
    with pytest.raises(DamagedError) as caught:
        Pack.open(copy)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [m.DENSE, layer_file(0), "tokenizer.json"])
@pytest.mark.parametrize("change", ["one bit", "last page zeroed"])
def test_kind_j_altered_bytes_are_found_by_verify(copy: Path, name: str, change: str) -> None:
    file = copy / name
    data = bytearray(file.read_bytes())
    if change == "one bit":
        data[-3] ^= 16
    else:
        data[-4096:] = bytes(min(len(data), 4096))
        data[-1] = 1
    file.write_bytes(data)
    with Pack.open(copy) as pack, pytest.raises(DamagedError) as caught:
        pack.verify()
    assert str(file) in str(caught.value)


def test_kind_j_a_bit_of_the_manifest_is_found_where_it_is_read_or_verified(copy: Path) -> None:
    """Also one that leaves a possible model: another eps, another base of the rotary embedding."""
    file = copy / "manifest.json"
    whole = file.read_bytes()
    name = whole.index(b'"sha256": "', whole.index(b'"created"'))
    meant, draw = json.loads(whole), random.Random(1)
    for at in draw.sample([i for i in range(len(whole)) if not name < i < name + 8], 400):
        data = bytearray(whole)
        data[at] ^= 1 << draw.randrange(8)
        with contextlib.suppress(ValueError):
            if json.loads(data) == meant:  # one blank for another
                continue
        file.write_bytes(data)
        with pytest.raises(SpmoeError), Pack.open(copy) as pack:
            pack.verify()
    file.write_bytes(whole)
    with Pack.open(copy) as pack:
        pack.verify()


def test_a_manifest_without_a_hash_of_its_own_is_verified_as_before(copy: Path) -> None:
    file = copy / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert manifest["sha256"] == hashlib.sha256(text.encode()).hexdigest()  # as the page says
    file.write_text(json.dumps(rest), encoding="utf-8")
    with Pack.open(copy) as pack:
        pack.verify()
    edit(copy, sha256="0" * 64)
    with Pack.open(copy) as pack, pytest.raises(DamagedError, match=r"manifest\.json is not what"):
        pack.verify()


def test_a_file_cut_short_after_opening_is_noticed_by_reads(copy: Path) -> None:
    with Pack.open(copy) as pack:
        for name in (layer_file(0), m.DENSE):
            os.truncate(copy / name, 5000)  # before expert 2 begins
        with pytest.raises(DamagedError, match="layer-000.* ends at byte 5000;"):
            pack.read_expert(0, 2, np.empty(pack.expert_layout.stride, dtype=np.uint8))
        with pytest.raises(DamagedError, match="dense.* ends at byte 5000;"):
            pack.load_dense()


def edit(folder: Path, **changes: object) -> None:
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(manifest), encoding="utf-8")


@pytest.mark.parametrize("version", [3, 0, -1, "2", None, True, 2.0])
def test_another_format_is_refused_in_one_line(copy: Path, version: object) -> None:
    edit(copy, format=version)
    with pytest.raises(UnsupportedError, match="format") as caught:
        Pack.open(copy)
    assert "\n" not in str(caught.value)


def test_the_format_before_is_read(copy: Path) -> None:
    file = copy / "manifest.json"
    manifest = json.loads(file.read_text(encoding="utf-8"))
    del manifest["linear_dtype"], manifest["embed_dtype"], manifest["sha256"]
    file.write_text(json.dumps(manifest | {"format": 1}), encoding="utf-8")
    with Pack.open(copy) as pack:
        assert pack.format == 1 and pack.dtypes == m.Dtypes.floats("fp32", "bf16")
        pack.verify()


@pytest.mark.parametrize(
    "name",
    [
        "../secret.txt",
        "/etc/hostname",
        "experts/../../secret.txt",
        "..\\secret.txt",
        "C:secret.txt",
        "experts/layer-002.safetensors",
        "experts/notes.txt",
        "./dense.safetensors",
        "manifest.json",
        "a\nb.txt",
        ".lock",
        "x" * 500 + ".txt",
    ],
)
def test_a_name_outside_the_folder_is_refused_unopened(copy: Path, name: str) -> None:
    secret = copy.parent / "secret.txt"
    secret.write_bytes(b"x")
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    entry = {"size": 1, "sha256": hashlib.sha256(b"x").hexdigest()}
    edit(copy, files=manifest["files"] | {name: entry})
    with pytest.raises(DamagedError, match="no place in a pack") as caught:
        Pack.open(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [m.DENSE, "tokenizer.json", "manifest.json", "experts"])
def test_a_link_that_leads_out_is_refused(copy: Path, name: str) -> None:
    outside = copy.parent / "outside"
    (copy / name).rename(outside)
    (copy / name).symlink_to(outside)
    with pytest.raises(DamagedError, match="leads out"):
        Pack.open(copy)


def test_a_text_file_beside_the_manifest_may_not_lead_out_either(copy: Path) -> None:
    (copy / "tokenizer_config.json").symlink_to("/etc/hostname")
    with pytest.raises(DamagedError, match="leads out"):
        Pack.open(copy)


def test_a_link_to_the_whole_pack_is_fine(made: Path, tmp_path: Path) -> None:
    (tmp_path / "link.spmoe").symlink_to(made)
    with Pack.open(tmp_path / "link.spmoe") as pack:
        pack.verify()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.parametrize("name", [m.DENSE, "manifest.json", "tokenizer.json"])
def test_a_pipe_is_refused_and_not_waited_for(copy: Path, name: str) -> None:
    (copy / name).unlink()
    os.mkfifo(copy / name)
    with pytest.raises(SpmoeError):
        Pack.open(copy)


def test_no_pack_at_all(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(NotFoundError, match="not a pack"):
            Pack.open(folder)


def rewrite_header(folder: Path, name: str, change: object) -> None:
    """Apply `change` to the header of a file, pad it to the old length, keep the size."""
    file = folder / name
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = change(json.loads(data[8:end]))  # type: ignore[operator]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(data[:8] + text.ljust(end - 8) + data[end:])


def swapped(header: dict) -> dict:
    header["expert.0"], header["expert.1"] = header["expert.1"], header["expert.0"]
    return header


def spread(header: dict) -> dict:
    header["expert.1"]["data_offsets"] = [0, 131072]
    return header


HEADERS = {
    "not JSON": lambda h: b"{",
    "a list": lambda h: [],
    "empty": lambda h: {},
    "one fewer": lambda h: dict(list(h.items())[:-1]),
    "another name": lambda h: {k.replace("2", "3"): v for k, v in h.items()},
    "order": lambda h: dict(reversed(h.items())),
    "swapped": swapped,
    "overlap": spread,
    "floats": lambda h: h | {"expert.0": h["expert.0"] | {"data_offsets": [0.0, 65536]}},
    "booleans": lambda h: h | {"expert.0": h["expert.0"] | {"data_offsets": [False, 65536]}},
    "negative": lambda h: h | {"expert.0": h["expert.0"] | {"data_offsets": [-1, 65536]}},
    "dtype": lambda h: h | {"expert.0": h["expert.0"] | {"dtype": "F32"}},
    "shape": lambda h: h | {"expert.0": h["expert.0"] | {"shape": [1 << 60]}},
    "no shape": lambda h: h | {"expert.0": {"dtype": "U8", "data_offsets": [0, 65536]}},
    "entry": lambda h: h | {"expert.0": [1, 2]},
    "duplicate": lambda h: json.dumps(h).encode()[:-1] + b',"expert.0":{}}',
    "nested": lambda h: b"[" * 4000,
    "huge number": lambda h: b'{"a":' + b"9" * 3900 + b"}",
}


@pytest.mark.parametrize("what", HEADERS)
def test_a_header_that_does_not_fit_is_refused(copy: Path, what: str) -> None:
    rewrite_header(copy, layer_file(1), HEADERS[what])
    with pytest.raises(DamagedError, match="layer-001") as caught:
        Pack.open(copy)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


@pytest.mark.parametrize("length", [0, 1, 4089, 4096, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_length_is_bounded_before_it_is_read(copy: Path, length: int) -> None:
    file = copy / layer_file(0)
    data = file.read_bytes()
    file.write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(DamagedError, match="layer-000"):
        Pack.open(copy)


@pytest.mark.parametrize(
    "key, value",
    [
        ("model", {}),
        ("model", None),
        ("model", {"family": "mixtral"}),
        ("dense_dtype", "int8"),
        ("dense_dtype", ["fp32"]),
        ("dense_dtype", "int8-g64"),
        ("dense_dtype", "bf16"),
        ("linear_dtype", None),
        ("linear_dtype", "int4"),
        ("linear_dtype", "int3-g64"),
        ("linear_dtype", "int8-g64"),
        ("linear_dtype", "bf16"),
        ("embed_dtype", "fp16"),
        ("embed_dtype", ["int8-g64"]),
        ("embed_dtype", "int4-g32"),
        ("expert_dtype", "int4-g32"),
        ("expert_dtype", None),
        ("expert_dtype", "fp32"),
        ("expert_layout", None),
        ("expert_layout", {}),
        ("num_tokens", 0),
        ("num_tokens", 51),
        ("num_tokens", True),
        ("audit", None),
        ("audit", {"layers": 2, "experts": 3, "matrices": 3, "found": 17}),
        ("source", None),
        ("source", {"id": "a\x1b[31m\nb"}),
        ("source", {"id": ["x"]}),
        ("options", {"repacked_from": None}),
        ("created", 5),
        ("options", []),
        ("files", {}),
        ("files", []),
        ("files", {"dense.safetensors": 5}),
    ],
)
def test_a_manifest_that_misstates_a_field_is_refused(copy: Path, key: str, value: object) -> None:
    edit(copy, **{key: value})
    with pytest.raises(DamagedError, match="manifest.json"):
        Pack.open(copy)


def test_a_scheme_that_the_shapes_do_not_allow_is_refused(tmp_path: Path) -> None:
    raw = json.loads(
        (KINDS["moe, quantised"].write(tmp_path / "a.spmoe") / "manifest.json").read_text("utf-8")
    )
    m.check_manifest(raw, Path("manifest.json"))
    for key, value, what in (
        ("linear_dtype", "int8-g128", "q_proj.*64 columns"),
        ("embed_dtype", "int4-g128z", "embed_tokens.*64 columns"),
        ("model", raw["model"] | {"vocab_size": 51}, "embed_tokens.*51 rows, an odd number"),
    ):
        with pytest.raises(DamagedError, match=what):
            m.check_manifest(raw | {key: value}, Path("manifest.json"))
    for key, value, what in (("linear_dtype", "int4-g32", "q_"), ("embed_dtype", "bf16", "27")):
        edit(tmp_path / "a.spmoe", **{key: value})  # they would fit, but the file has another size
        with pytest.raises(DamagedError, match=f"dense.safetensors.*{what}"):
            Pack.open(tmp_path / "a.spmoe")
        edit(tmp_path / "a.spmoe", **{key: raw[key]})


QUANTISED_HEADERS = {
    "codes as I8": lambda h: resized(h, ".codes", dtype="I8"),
    "scales as F16": lambda h: resized(h, ".scales", dtype="F16"),
    "codes of another block": lambda h: resized(h, ".codes", shape=[2, 64, 32]),
    "scales before codes": lambda h: dict(sorted(h.items(), key=scales_first)),
    "the float's name": lambda h: {n.removesuffix(".codes"): t for n, t in h.items()},
}


def resized(header: dict, ending: str, **changes: object) -> dict:
    name = next(name for name in header if name.endswith("q_proj.weight" + ending))
    return header | {name: header[name] | changes}


def scales_first(item: tuple) -> int:
    return item[1]["data_offsets"][0] - (10**6 if "0.q_proj.weight.scales" in item[0] else 0)


@pytest.mark.parametrize("what", QUANTISED_HEADERS)
def test_a_header_that_does_not_fit_a_quantised_matrix_is_refused(
    what: str, tmp_path: Path
) -> None:
    path = KINDS["moe, quantised"].write(tmp_path / "a.spmoe")
    rewrite_header(path, m.DENSE, QUANTISED_HEADERS[what])
    with pytest.raises(DamagedError, match="dense.safetensors") as caught:
        Pack.open(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"gate_offset": 1},
        {"up_offset": 0},
        {"up_offset": -64},
        {"down_offset": 64000 - 64000 % 64 + 1024},
        {"stride": 131072 + 1},
        {"stride": 0},
        {"stride": 65536.0},
        {"hidden_size": 24.0},
        {"hidden_size": 25},
        {"dtype": "fp16"},
        {"extra": 1},
    ],
)
def test_an_expert_layout_that_does_not_fit_is_refused(copy: Path, change: dict) -> None:
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    edit(copy, expert_layout=manifest["expert_layout"] | change)
    with pytest.raises(DamagedError):
        Pack.open(copy)


@pytest.mark.parametrize(
    "field, value",
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**15),
        ("num_local_experts", 1 << 40),
        ("hidden_size", "24"),
        ("head_dim", None),
        ("num_hidden_layers", 3),
        ("eos_token_ids", 7),
        ("eos_token_ids", [50]),
        ("rope", {"theta": -1.0}),
        ("rope", {"theta": 1e6, "kind": "yarn"}),
        ("unknown", 1),
    ],
)
def test_a_model_beyond_belief_is_refused(copy: Path, field: str, value: object) -> None:
    manifest = json.loads((copy / "manifest.json").read_text(encoding="utf-8"))
    edit(copy, model=manifest["model"] | {field: value})
    with pytest.raises(DamagedError):
        Pack.open(copy)


# The writer


def test_a_run_killed_anywhere_leads_to_the_same_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kind J, O28: the process dies before each write, flush, rename and deletion in turn."""
    if not hasattr(os, "fork"):
        pytest.skip("kills forked children")
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # the page cache outlives a process
    weights = Weights(replace(MOE, num_hidden_layers=1, num_local_experts=2))
    clean = files_of(weights.write(tmp_path / "clean.spmoe"))
    path = tmp_path / "killed.spmoe"
    for moment in range(1000):
        if path.exists():
            shutil.rmtree(path)
        child = os.fork()
        if child == 0:
            die_at(moment)
            try:
                weights.write(path)
                os._exit(0)
            finally:
                os._exit(2)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 9), f"moment {moment}"
        if status == 0:
            break
        if path.exists():  # only a complete one may have the name
            with Pack.open(path) as pack:
                pack.verify()
            for stray in ("partial.json", ".lock"):  # the last ones, which no reader minds
                (path / stray).unlink(missing_ok=True)
        else:
            weights.write(path)
        assert files_of(path) == clean, f"moment {moment}"
        assert not path.with_name("killed.spmoe.partial").exists()
    assert moment > 40


def die_at(moment: int) -> None:
    """Exit without any clean-up at the `moment`-th call that changes the disk."""
    calls = [0]

    def dying(call: object) -> object:
        def counted(*args: object, **kw: object) -> object:
            if calls[0] == moment:
                os._exit(9)
            calls[0] += 1
            return call(*args, **kw)  # type: ignore[operator]

        return counted

    for owner, name in (
        (os, "fsync"),
        (os, "replace"),
        (os, "mkdir"),
        (os, "unlink"),
        (os, "rename"),
        (os, "rmdir"),
        (pack_writer._HashingFile, "write"),
    ):
        setattr(owner, name, dying(getattr(owner, name)))


def test_a_second_run_writes_only_what_is_missing(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    path = tmp_path / "a.spmoe"
    with weights.writer(path) as writer:
        writer.write_layer(1, weights.experts[1])
    date = (path.with_name("a.spmoe.partial") / layer_file(1)).stat().st_mtime_ns
    with weights.writer(path) as writer:
        assert writer.has(layer_file(1)) and not writer.has(layer_file(0))
        weights.fill(writer)
        weights.finish(writer)
    assert (path / layer_file(1)).stat().st_mtime_ns == date
    with Pack.open(path) as pack:
        pack.verify()


def test_a_finished_file_that_was_altered_since_is_written_again(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    path = tmp_path / "a.spmoe"
    with weights.writer(path) as writer:
        weights.fill(writer)
    for name in (layer_file(0), layer_file(1), "tokenizer.json"):
        file = path.with_name("a.spmoe.partial") / name
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data if name != layer_file(1) else data[:-1])
    assert files_of(weights.write(path)) == files_of(weights.write(tmp_path / "clean.spmoe"))


def test_verify_before_finishing_finds_what_the_disk_changed(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    path = tmp_path / "a.spmoe"
    with weights.writer(path) as writer:
        weights.fill(writer)
        writer.verify()
        file = path.with_name("a.spmoe.partial") / layer_file(1)
        file.write_bytes(bytes(file.stat().st_size))
        with pytest.raises(DamagedError, match="layer-001"):
            writer.verify([layer_file(1)])
        assert writer.has(layer_file(0)) and not writer.has(layer_file(1))
    weights.write(path)
    with Pack.open(path) as pack:
        pack.verify()


@pytest.mark.parametrize("other", ["options", "dtype", "source"])
def test_a_partial_of_other_options_is_restarted_never_mixed(tmp_path: Path, other: str) -> None:
    first = Weights(MOE, seed=1 if other == "source" else 0)
    second = Weights(MOE, dense_dtype="bf16" if other == "dtype" else "fp32")
    path = tmp_path / "a.spmoe"
    with first.writer(path, {"low_disk": other == "options"}) as writer:
        first.fill(writer)
    with second.writer(path) as writer:
        assert not any(writer.has(name) for name in m.required_files(MOE))
        second.fill(writer)
        second.finish(writer)
    assert files_of(path) == files_of(second.write(tmp_path / "clean.spmoe"))


def test_two_writers_of_one_pack_are_not_let_in(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    with weights.writer(tmp_path / "a.spmoe") as writer:
        weights.fill(writer)
        with pytest.raises(BusyError, match="another process"):
            weights.writer(tmp_path / "a.spmoe")
        weights.finish(writer)
    assert Pack.open(tmp_path / "a.spmoe").close() is None


@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT", "EFBIG", "EMFILE", "EACCES", "EROFS", "EIO"])
@pytest.mark.parametrize("at", ["open", "write", "fsync"])
def test_kind_j_a_disk_error_is_one_line_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, at: str
) -> None:
    weights, path = KINDS["moe"], tmp_path / "a.spmoe"
    failing = break_disk(monkeypatch, at, getattr(errno, error))
    with pytest.raises(SpmoeError) as caught, weights.writer(path) as writer:
        failing.set()
        weights.fill(writer)
    failing.clear()
    text = str(caught.value)
    assert "a.spmoe.partial" in text and "layer-000" in text and "\n" not in text
    full = error in ("ENOSPC", "EDQUOT", "EFBIG", "EMFILE")
    assert ("ulimit -n" in text) == (error == "EMFILE")
    assert isinstance(caught.value, CapacityError) == full
    assert os.listdir(tmp_path) == []

    with pytest.raises(SpmoeError), weights.writer(path) as writer:
        writer.write_layer(0, weights.experts[0])
        failing.set()
        weights.fill(writer)
    failing.clear()
    left = files_of(tmp_path / "a.spmoe.partial")
    assert set(left) == {"partial.json", ".lock", layer_file(0)}
    weights.write(path)
    assert files_of(path) == files_of(weights.write(tmp_path / "clean.spmoe"))


def break_disk(monkeypatch: pytest.MonkeyPatch, at: str, code: int) -> threading.Event:
    """While the event is set, opening, writing or flushing a tensor file fails with `code`."""
    failing = threading.Event()

    class Failing:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            if failing.is_set() and at == "write":
                self.file.write(data[: len(data) // 2])
                raise OSError(code, os.strerror(code))
            return self.file.write(data)

    def failing_open(path: object, mode: str = "r", **kw: object) -> object:
        if failing.is_set() and at == "open" and mode == "wb":
            raise OSError(code, os.strerror(code), str(path))
        file = open(path, mode, **kw)  # type: ignore[call-overload]
        return Failing(file) if mode == "wb" else file

    real = os.fsync

    def failing_fsync(handle: int) -> None:
        if failing.is_set() and at == "fsync":
            raise OSError(code, os.strerror(code))
        real(handle)

    monkeypatch.setattr(pack_writer, "open", failing_open, raising=False)
    monkeypatch.setattr(os, "fsync", failing_fsync)
    return failing


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Short:
        def __init__(self, file: object) -> None:
            self.file = file

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

        def write(self, data: memoryview) -> int:
            return self.file.write(data[: max(1, len(data) // 3)])

    def short_open(path: object, mode: str = "r", **kw: object) -> object:
        file = open(path, mode, **kw)  # type: ignore[call-overload]
        return Short(file) if mode == "wb" else file

    weights = KINDS["moe"]
    clean = files_of(weights.write(tmp_path / "clean.spmoe"))
    monkeypatch.setattr(pack_writer, "open", short_open, raising=False)
    assert files_of(weights.write(tmp_path / "a.spmoe")) == clean


def test_an_interrupted_or_cancelled_write_keeps_only_whole_files(tmp_path: Path) -> None:
    weights, cancel = KINDS["moe"], threading.Event()

    def stop(error: BaseException | None) -> object:
        yield weights.experts[1][0]
        if error:
            raise error
        cancel.set()
        yield weights.experts[1][1]

    for error, expected in ((KeyboardInterrupt(), KeyboardInterrupt), (None, Cancelled)):
        with pytest.raises(expected), weights.writer(tmp_path / "a.spmoe", cancel=cancel) as w:
            w.write_layer(0, weights.experts[0])
            w.write_layer(1, stop(error))
        left = set(files_of(tmp_path / "a.spmoe.partial"))
        assert left == {"partial.json", ".lock", layer_file(0)}


def test_matrices_may_be_reused_as_soon_as_the_next_are_asked_for(tmp_path: Path) -> None:
    weights = KINDS["moe"]

    def one_buffer(experts: list) -> object:
        buffers = tuple(torch.empty_like(matrix) for matrix in experts[0])
        for matrices in experts:
            for buffer, matrix in zip(buffers, matrices, strict=True):
                buffer.copy_(matrix)
            yield buffers

    with weights.writer(tmp_path / "a.spmoe") as writer:
        for layer, experts in enumerate(weights.experts):
            writer.write_layer(layer, one_buffer(experts))
        weights.fill(writer)
        weights.finish(writer)
    with Pack.open(tmp_path / "a.spmoe") as pack:
        pack.verify()
    assert files_of(tmp_path / "a.spmoe") == files_of(weights.write(tmp_path / "b.spmoe"))


def test_a_matrix_that_is_not_contiguous_is_written_as_it_reads(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    with weights.writer(tmp_path / "a.spmoe") as writer:
        for layer, experts in enumerate(weights.experts):
            writer.write_layer(layer, [tuple(t.T.contiguous().T for t in e) for e in experts])
        weights.fill(writer)
        weights.finish(writer)
    assert files_of(tmp_path / "a.spmoe") == files_of(weights.write(tmp_path / "b.spmoe"))


def test_wrong_tensors_are_our_bug_and_leave_no_file(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    good = weights.experts[0]
    gate, up, down = good[0]
    with weights.writer(tmp_path / "a.spmoe") as writer:
        for experts in (
            good[:-1],
            [*good, good[0]],
            [(down, up, down), *good[1:]],
            [(gate.float(), up, down), *good[1:]],
            [(gate, up), *good[1:]],
        ):
            with pytest.raises(ValueError):
                writer.write_layer(0, experts)
        dense = {n: lambda t=t: t for n, t in weights.dense.items()}
        for tensors in (
            {n: read for n, read in dense.items() if n != m.EMBED},
            dense | {"extra": lambda: torch.zeros(1)},
            dense | {m.EMBED: lambda: torch.zeros(50, 23)},
            dense | {m.EMBED: lambda: torch.zeros(50, 24).double()},
            dense | {m.EMBED: lambda: quantize(torch.zeros(50, 32), Scheme(8, 32))},
        ):
            with pytest.raises(ValueError):
                writer.write_dense(tensors)
        for name in ("../a.json", "manifest.json", "dense.safetensors", "a/b.json", "x.tmp"):
            with pytest.raises(ValueError):
                writer.copy_text(name, b"")
        with pytest.raises(ValueError, match="not written"):
            weights.finish(writer)
    assert os.listdir(tmp_path) == []


def test_finish_refuses_a_wrong_audit(tmp_path: Path) -> None:
    weights = KINDS["moe"]
    with weights.writer(tmp_path / "a.spmoe") as writer:
        weights.fill(writer)
        with pytest.raises(DamagedError, match="17 expert matrices"):
            writer.finish({"layers": 2, "experts": 3, "matrices": 3, "found": 17}, 50)
    assert not (tmp_path / "a.spmoe").exists()


# In the way


def test_what_is_in_the_way_is_kept(made: Path, tmp_path: Path) -> None:
    weights = KINDS["moe"]
    photos = tmp_path / "photos"
    photos.mkdir()
    (photos / "a.jpg").write_bytes(b"x")
    for force in (False, True):
        with pytest.raises(UsageError, match="not a pack"):
            weights.writer(photos, force=force)
    pack = shutil.copytree(made, tmp_path / "a.spmoe")
    with pytest.raises(UsageError, match="--force"):
        weights.writer(pack)
    stray = tmp_path / "b.spmoe.partial"
    shutil.copytree(photos, stray)
    with pytest.raises(UsageError, match="move it away"):
        weights.writer(tmp_path / "b.spmoe")
    (tmp_path / "c.spmoe.partial").write_bytes(b"")
    with pytest.raises(UsageError, match="in the way"):
        weights.writer(tmp_path / "c.spmoe")
    assert (stray / "a.jpg").read_bytes() == (photos / "a.jpg").read_bytes() == b"x"


def test_an_empty_folder_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with Pack.open(KINDS["moe"].write(tmp_path / "out")) as pack:
        assert pack.name == "out"


def test_force_replaces_only_when_the_new_pack_is_whole(tmp_path: Path) -> None:
    old, new = KINDS["moe"], Weights(MOE, seed=5)
    path = old.write(tmp_path / "a.spmoe")
    before = files_of(path)
    with new.writer(path, force=True) as writer:
        writer.write_layer(0, new.experts[0])
    assert files_of(path) == before
    with Pack.open(path) as reading:  # someone is still using the old one
        new.write(path, force=True)
        if os.name != "nt":
            assert bits(reading.load_dense()["norm.weight"]) == bits(old.dense["norm.weight"])
    assert files_of(path) == files_of(new.write(tmp_path / "b.spmoe"))
    assert sorted(os.listdir(tmp_path)) == ["a.spmoe", "b.spmoe"]


def test_a_replacement_that_cannot_be_renamed_keeps_the_old_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = KINDS["moe"], Weights(MOE, seed=5)
    path = old.write(tmp_path / "a.spmoe")
    before = files_of(path)
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if self.name.endswith(".partial"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(SpmoeError, match="Permission denied"):
        new.write(path, force=True)
    assert files_of(path) == before
    monkeypatch.undo()
    new.write(path, force=True)
    assert sorted(os.listdir(tmp_path)) == ["a.spmoe"]


def test_a_pack_moved_aside_by_a_killed_replacement_comes_back(tmp_path: Path) -> None:
    old, new = KINDS["moe"], Weights(MOE, seed=5)
    path = old.write(tmp_path / "a.spmoe")
    before = files_of(path)
    path.rename(tmp_path / "a.spmoe.old")
    with pytest.raises(UsageError, match="--force"):
        new.writer(path)
    assert files_of(path) == before


def test_the_lock_ends_with_its_holder(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(BusyError):
        locked(tmp_path).__enter__()
    with locked(tmp_path):
        pass


def test_the_lock_is_held_until_the_pack_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run between the last check and the rename would wipe what is about to be the pack."""
    path, tried = tmp_path / "a.spmoe", []
    rename = Path.rename

    def second_run(self: Path, target: Path) -> Path:
        with pytest.raises(BusyError, match="another process"):
            KINDS["dense"].writer(path)
        tried.append(self.name)
        return rename(self, target)

    if os.name != "nt":
        monkeypatch.setattr(Path, "rename", second_run)
    KINDS["moe"].write(path)
    assert tried == ["a.spmoe.partial"] or os.name == "nt"
    assert sorted(os.listdir(tmp_path)) == ["a.spmoe"]
    assert not {".lock", m.JOURNAL} & set(os.listdir(path))
    with Pack.open(path) as pack:
        pack.verify()


@pytest.mark.skipif(not LINUX, reason="a folder with an open file is renamed")
def test_the_lock_of_a_folder_that_has_just_gone_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, elsewhere, lock = tmp_path / "a.partial", tmp_path / "a", files._lock
    for again in (False, True):  # and a third run has made the folder again
        folder.mkdir()

        def late(file: FileIO) -> None:
            folder.rename(elsewhere)
            if again:  # noqa: B023
                folder.mkdir()
                (folder / ".lock").touch()
            lock(file)

        monkeypatch.setattr(files, "_lock", late)
        with pytest.raises(BusyError, match="being written by another process"):
            locked(folder).__enter__()
        shutil.rmtree(elsewhere)
    shutil.rmtree(folder)
    with pytest.raises(BusyError, match="being written by another process"):
        locked(folder).__enter__()


def test_a_reader_does_not_put_back_what_a_living_run_moves_aside(tmp_path: Path) -> None:
    path = KINDS["moe"].write(tmp_path / "a.spmoe")
    partial = tmp_path / "a.spmoe.partial"
    shutil.copytree(path, partial)
    path.rename(tmp_path / "a.spmoe.old")
    with locked(partial):
        reader = threading.Thread(target=m.restore_old, args=(path,))
        reader.start()
        reader.join(0.2)
        assert reader.is_alive() and not path.exists()
        partial.rename(path)
    reader.join(5)
    assert not reader.is_alive() and (tmp_path / "a.spmoe.old").exists()
    shutil.rmtree(path)
    partial.mkdir()  # and of a killed one
    m.restore_old(path)
    assert (path / m.MANIFEST).is_file()
