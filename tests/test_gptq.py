"""Checkpoints in AWQ and GPTQ: packed here from the formats' description, one code at a time.

The packers below are plain loops over (word, nibble) that share nothing with the reader. Every claim is
against values[n, k] = (code - zero) * scale in fp64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from spmoe_lite.converters import convert
from spmoe_lite.converters.gptq import PackedCheckpoint, Packing, packing_of
from spmoe_lite.errors import DamagedError, SpmoeError, UnsupportedError
from spmoe_lite.manifest import Dtypes
from spmoe_lite.pack import TORCH_DTYPES
from spmoe_lite.precision import Scheme
from spmoe_lite.quant import quantize, unpack_codes, unpack_scales
from tests import tiny
from tests.make_pack import bits, files_of
from tests.oracle import Oracle
from tests.stub_hub import StubHub, use
from tests.test_convert import loaded, refused
from tests.test_model import PROMPT, our_logits

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "GEMM", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
V2 = GPTQ | {"checkpoint_format": "gptq_v2"}
SYM = GPTQ | {"sym": True}
METHODS = {"awq": AWQ, "gptq": GPTQ, "gptq_v2": V2, "gptq-sym": SYM}
AWQ_NIBBLES = {0: 0, 1: 2, 2: 4, 3: 6, 4: 1, 5: 3, 6: 5, 7: 7}  # nibble: row of eight


def word(codes: list[int]) -> int:
    """Eight codes, the first in the lowest bits, as a signed word."""
    value = sum(int(code) << 4 * place for place, code in enumerate(codes))
    return value - (1 << 32) if value >= 1 << 31 else value


def words(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def pack(
    method: dict[str, Any],
    codes: np.ndarray,
    zeros: np.ndarray,
    scales: torch.Tensor,
    groups: np.ndarray | None = None,
) -> dict[str, torch.Tensor]:
    """codes [N, K], zeros [G, N], scales [G, N] as the tensors of one matrix."""
    rows, columns = codes.shape
    if method["quant_method"] == "awq":
        mixed = [AWQ_NIBBLES[place] for place in range(8)]
        return {
            "qweight": words(
                [
                    [word([codes[8 * i + row, k] for row in mixed]) for i in range(rows // 8)]
                    for k in range(columns)
                ]
            ),
            "qzeros": words(
                [[word([z[8 * i + row] for row in mixed]) for i in range(rows // 8)] for z in zeros]
            ),
            "scales": scales,
        }
    less = 0 if method.get("checkpoint_format") == "gptq_v2" else 1
    if groups is None:
        groups = np.arange(columns) // method["group_size"]
    return {
        "qweight": words(
            [
                [word([codes[n, 8 * i + p] for p in range(8)]) for n in range(rows)]
                for i in range(columns // 8)
            ]
        ),
        "qzeros": words(
            [
                [word([z[8 * i + p] - less for p in range(8)]) for i in range(rows // 8)]
                for z in zeros
            ]
        ),
        "scales": scales,
        "g_idx": torch.tensor(groups, dtype=torch.int32),
    }


class Matrix:
    """Random codes, zeros and scales around the size of `like`, and the values that they mean."""

    def __init__(
        self,
        like: torch.Tensor,
        method: dict[str, Any],
        rng: np.random.Generator,
        eight_bits: bool = True,
        shuffled: bool = False,
    ) -> None:
        rows, columns = like.shape
        count = columns // method["group_size"]
        self.method = method
        self.codes = rng.integers(0, 16, (rows, columns))
        low = 1 if method["quant_method"] == "gptq" and method is not V2 else 0
        self.zeros = rng.integers(low, 16, (count, rows))
        if method.get("sym"):
            self.zeros[:] = 8
        scales = torch.from_numpy(rng.uniform(0.03, 0.3, (count, rows)) * columns**-0.5)
        if eight_bits:
            scales = scales.bfloat16()
        self.scales = scales.half()
        self.groups = np.arange(columns) // method["group_size"]
        if shuffled:
            rng.shuffle(self.groups)

    def tensors(self) -> dict[str, torch.Tensor]:
        return pack(self.method, self.codes, self.zeros, self.scales, self.groups)

    @property
    def values(self) -> np.ndarray:
        zeros, scales = self.zeros[self.groups].T, self.scales.double().numpy()[self.groups].T
        return (self.codes - zeros) * scales


def is_packed(name: str) -> bool:
    return name.endswith("_proj.weight") or ".experts." in name


def checkpoint(
    folder: Path,
    kind: str = "mixtral",
    method: dict[str, Any] = AWQ,
    *,
    packed: Callable[[str], bool] = is_packed,
    change: Callable[[str, Matrix], None] = lambda name, matrix: None,
    tensors: Callable[[dict[str, torch.Tensor]], None] = lambda tensors: None,
    shards: int = 2,
    eight_bits: bool = True,
    shuffled: Callable[[str], bool] = lambda name: False,
    says: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Matrix]:
    """Write a checkpoint in `method`, and beside it FOLDER-plain with the values it means in fp32."""
    plain = folder.with_name(folder.name + "-plain")
    tiny.write_model(plain, kind, shards=1, index=False, **options)
    floats = load_file(plain / "model.safetensors")
    floats = {name: tensor.half() for name, tensor in floats.items()}
    rng = np.random.default_rng(7)
    found: dict[str, Matrix] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in floats.items():
        if not packed(name):
            stored[name] = tensor
            continue
        matrix = Matrix(tensor, method, rng, eight_bits, shuffled(name))
        change(name, matrix)
        found[name] = matrix
        for part, values in matrix.tensors().items():
            stored[name.removesuffix("weight") + part] = values
        floats[name] = torch.from_numpy(matrix.values)
    save_file({n: t.float().contiguous() for n, t in floats.items()}, plain / "model.safetensors")
    tiny.write_model(folder, kind, shards=1, index=False, **options)
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": says or method, "torch_dtype": "float16"}
    tiny.write_json(folder / "config.json", config)
    (folder / "model.safetensors").unlink()
    tensors(stored)
    tiny.write_shards(folder, stored, shards=shards, index=shards > 1)
    return found


def plain(folder: Path) -> Path:
    """The values that the checkpoint in `folder` means, in floats."""
    return folder.with_name(folder.name + "-plain") / "model.safetensors"


def is_expert(name: str) -> bool:
    return ".experts." in name


def q_proj(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.q_proj.weight"


W2 = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


def matrices(path: Path, names: Any) -> dict[str, Any]:
    """The pack's matrices under the checkpoint's names."""
    _, dense, experts = loaded(path)
    found = {}
    for name in names:
        layer, *_, expert, kind, _ = name.removeprefix("model.layers.").split(".")
        if ".experts." in name:
            found[name] = experts[int(layer)][int(expert)][("w1", "w3", "w2").index(kind)]
        else:
            found[name] = dense[f"layers.{layer}.{kind}.weight"]
    return found


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    with StubHub() as stub:
        use(monkeypatch, stub, tmp_path / "cache")
        yield stub


# What comes out


@pytest.mark.parametrize("kind", ["mixtral", "mistral", "llama"])
@pytest.mark.parametrize("method", METHODS)
def test_codes_zeros_and_scales_are_kept(
    method: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "q"
    given = checkpoint(folder, kind, METHODS[method])
    path = convert(folder, out=tmp_path / "o.spmoe").path
    said = caplog.text.count("scales in the 8 bits that bf16 has")
    assert said == len(caplog.records) == ("sym" not in method)
    dtype = "int4-g32" if "sym" in method else "int4-g32z"
    moe = kind == "mixtral"
    assert loaded(path)[0] == Dtypes("fp16", dtype, "fp16", dtype if moe else None)
    for name, ours in matrices(path, given).items():
        theirs, columns = given[name], ours.shape[1]
        assert (unpack_codes(ours.codes, ours.scheme)[:, :columns].numpy() == theirs.codes).all()
        scales, zeros = unpack_scales(ours.scales, ours.scheme)
        count = columns // 32
        assert (zeros[:count].numpy() == theirs.zeros).all(), name
        assert torch.equal(scales[:count], theirs.scales.float())
        assert np.array_equal(ours.dequantize().double().numpy(), theirs.values)
    assert given.keys() == {n for n in load_file(plain(folder)) if is_packed(n)}


@pytest.mark.parametrize("method", ["awq", "gptq"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_logits_are_those_of_the_weights_it_means(method: str, group: int, tmp_path: Path) -> None:
    """Widths of 384: three groups of 128, an odd number. In fp32, nothing but fp32's own error is left."""
    says = METHODS[method] | {"group_size": group}
    options = {"hidden": 128, "intermediate": 384, "layers": 1}
    checkpoint(tmp_path / "q", "mixtral", says, **options)
    expected = Oracle(tmp_path / "q-plain").logits(PROMPT)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe", embed="fp32").path
    assert loaded(path)[0] == Dtypes("fp32", f"int4-g{group}z", "fp32", f"int4-g{group}z")
    got = our_logits(path, PROMPT).numpy()
    assert np.abs(got - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("method", METHODS)
def test_scales_are_rounded_to_eight_bits_and_only_where_a_zero_needs_the_room(
    method: str, tmp_path: Path
) -> None:
    given = checkpoint(tmp_path / "q", "mistral", METHODS[method], eight_bits=False)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    changed = 0
    for name, ours in matrices(path, given).items():
        theirs = given[name].scales.float()
        scales, _ = unpack_scales(ours.scales, ours.scheme)
        off = ((scales[: len(theirs)] - theirs).abs() / theirs).max().item()
        assert off <= 2**-8  # half of the last of 8 bits, of a scale just above a power of 2
        changed += off > 2**-10
    assert bool(changed) == ("sym" not in method)


@pytest.mark.parametrize("scale", [0.0, 2.0**-24, 0.7 * 2**-20, 1.37 * 2**-15, 1.99609375 * 2**-15])
def test_tiny_scales_leave_the_zeros_alone(scale: float, tmp_path: Path) -> None:
    """Below 2^-14 an fp16 has fewer bits: what is left of a scale are multiples of 2^-21."""

    def change(name: str, matrix: Matrix) -> None:
        matrix.scales[1] = scale

    given = checkpoint(tmp_path / "q", "llama", AWQ, change=change, layers=1)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    for name, ours in matrices(path, given).items():
        scales, zeros = unpack_scales(ours.scales, ours.scheme)
        assert (zeros[1].numpy() == given[name].zeros[1]).all()
        assert ((scales[1] - given[name].scales[1].float()).abs() <= 2.0**-22).all()
        assert torch.equal(scales[0], given[name].scales[0].float())


@pytest.mark.parametrize("method", METHODS)
def test_rows_read_in_pieces_are_those_of_the_whole(method: str, tmp_path: Path) -> None:
    given = checkpoint(tmp_path / "q", "llama", METHODS[method], eight_bits=False, layers=1)
    source = PackedCheckpoint.folder(tmp_path / "q")
    packing = packing_of(source.config)
    assert packing is not None
    source.accept(packing)
    for name in (q_proj(0), "model.layers.0.mlp.down_proj.weight"):
        for rows in (range(0, 64), range(5, 6), range(7, 30), range(16, 64), range(63, 64)):
            found = source.read(name, rows=rows).double().numpy()
            assert np.array_equal(found, given[name].values[rows.start : rows.stop])
    source.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("asked", ["fp32", "bf16", "int8"])
def test_other_precisions_start_from_the_values_and_not_from_rounded_scales(
    method: str, asked: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = checkpoint(tmp_path / "q", "mixtral", METHODS[method], eight_bits=False)
    group = {"group": 32} if asked == "int8" else {}
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe", experts=asked, **group).path
    own = "int4-g32" if "sym" in method else "int4-g32z"
    goes = {"fp32": "gain nothing back", "bf16": "gain nothing", "int8": "lose a little more"}
    assert f"experts go from {own} to {asked}" in caplog.text and goes[asked] in caplog.text
    for name, ours in matrices(path, [n for n in given if is_expert(n)]).items():
        values = torch.from_numpy(given[name].values)
        if asked == "int8":
            assert bits(ours) == bits(quantize(values.float(), Scheme(8, 32)))
        else:
            assert torch.equal(ours, values.float().to(TORCH_DTYPES[asked]))


def test_int4_is_what_the_checkpoint_has_unless_the_group_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint(tmp_path / "q", "mixtral", GPTQ, intermediate=128)
    plain_pack = convert(tmp_path / "q", out=tmp_path / "a.spmoe").path
    same = convert(tmp_path / "q", out=tmp_path / "b.spmoe", experts="int4", dense="int4").path
    assert files_of(same) == files_of(plain_pack)
    caplog.clear()
    other = convert(
        tmp_path / "q", out=tmp_path / "c.spmoe", experts="int4", group=64, embed="fp16"
    )
    assert "experts go from int4-g32z to int4-g64z and lose a little more" in caplog.text
    assert other.plan is not None and other.plan.dtypes.experts == "int4-g64z"


@pytest.mark.parametrize("method", ["gptq", "gptq_v2"])
def test_activation_order_becomes_floats_and_int4_quantises_again(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever desc_act says, the g_idx counts; with every matrix in order, nothing changes."""
    one = q_proj(1)
    says = METHODS[method] | {"desc_act": True}
    given = checkpoint(
        tmp_path / "q", method=METHODS[method], says=says, shuffled=is_expert, intermediate=128
    )
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    assert "24 of 32 matrices are in activation order" in caplog.text
    assert "packed as bf16; --experts fp32 keeps every bit" in caplog.text
    assert loaded(path)[0] == Dtypes("fp16", "int4-g32z", "fp16", "bf16")
    for name, ours in matrices(path, given).items():
        values = torch.from_numpy(given[name].values).float()
        if is_expert(name):
            assert torch.equal(ours, values.bfloat16()), name
        else:
            assert torch.equal(ours.dequantize(), values), name
    caplog.clear()
    path = convert(tmp_path / "q", out=tmp_path / "p.spmoe", experts="int4").path
    assert "24 matrices are quantised in another way than the pack's" in caplog.text
    for name, ours in matrices(path, filter(is_expert, given)).items():
        values = torch.from_numpy(given[name].values).float()
        assert bits(ours) == bits(quantize(values, Scheme(4, 64, zeros=True))), name

    ordered = tmp_path / "ordered"
    given = checkpoint(ordered, method=METHODS[method], says=says)
    assert loaded(convert(ordered, out=tmp_path / "r.spmoe").path)[0].experts == "int4-g32z"
    hidden = tmp_path / "hidden"  # desc_act is false, and wrong
    given = checkpoint(hidden, method=METHODS[method], shuffled=lambda name: name == one)
    caplog.clear()
    path = convert(hidden, out=tmp_path / "s.spmoe", dense="int4", group=32).path
    assert "1 of 32 matrices are in activation order" in caplog.text
    assert "1 matrices are quantised in another way" in caplog.text
    for name, ours in matrices(path, given).items():
        values = torch.from_numpy(given[name].values).float()
        assert torch.equal(ours.dequantize(), values) == (name != one)
    assert bits(matrices(path, [one])[one]) == bits(
        quantize(torch.from_numpy(given[one].values).float(), Scheme(4, 32, zeros=True))
    )


@pytest.mark.parametrize("what", ["zero", "negative"])
def test_what_a_scale_word_cannot_hold_is_quantised_again(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def change(name: str, matrix: Matrix) -> None:
        if name in (W2, q_proj(0)):
            if what == "zero":
                matrix.zeros[1, 5] = 16  # stored as 15
            else:
                matrix.scales[1, 5] *= -1

    given = checkpoint(tmp_path / "q", method=GPTQ, change=change)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    assert caplog.text.count("quantised again and lose a little") == 1
    assert W2 in caplog.text  # experts come first; others like it are not named
    for name, ours in matrices(path, given).items():
        values = torch.from_numpy(given[name].values).float()
        if name in (W2, q_proj(0)):
            assert bits(ours) == bits(quantize(values, Scheme(4, 32, zeros=True)))
            assert (ours.dequantize() - values).abs().max() < 0.02
        else:
            assert torch.equal(ours.dequantize(), values)
    exact = matrices(convert(tmp_path / "q", out=tmp_path / "f.spmoe", experts="fp32").path, [W2])
    assert np.array_equal(exact[W2].double().numpy(), given[W2].values)


def test_a_symmetric_scale_beyond_fp16_is_quantised_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def single(name: str, matrix: Matrix) -> None:
        matrix.scales = matrix.scales.float()
        if name == W2:
            matrix.scales *= 1 + 2**-14  # no fp16

    given = checkpoint(tmp_path / "q", method=SYM, change=single, eight_bits=False)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    assert f"{W2}, and others like it" in caplog.text
    for name, ours in matrices(path, given).items():
        values = torch.from_numpy(given[name].values)
        assert torch.equal(ours.dequantize().double(), values) == (name != W2)


def test_modules_left_in_floats_make_their_kind_floats_unless_int4_is_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left = "model.layers.0.self_attn.o_proj.weight"
    says = AWQ | {"modules_to_not_convert": ["gate", "self_attn.o_proj"]}
    given = checkpoint(
        tmp_path / "q", says=says, packed=lambda name: is_packed(name) and name != left
    )
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    assert "7 quantised matrices become fp16 like others of their kind" in caplog.text
    assert loaded(path)[0] == Dtypes("fp16", "fp16", "fp16", "int4-g32z")
    for name, ours in matrices(path, given).items():
        values = torch.from_numpy(given[name].values)
        assert torch.equal(ours if ".self" in name else ours.dequantize().half(), values.half())
    caplog.clear()
    path = convert(tmp_path / "q", out=tmp_path / "p.spmoe", dense="int4").path
    assert loaded(path)[0].linear == "int4-g32z" and "become" not in caplog.text
    for name, ours in matrices(path, given).items():
        assert np.array_equal(ours.dequantize().double().numpy(), given[name].values)
    floats = load_file(plain(tmp_path / "q"))[left]
    assert bits(matrices(path, [left])[left]) == bits(
        quantize(floats.half(), Scheme(4, 32, zeros=True))
    )


def test_a_quantised_head_and_router_are_read(tmp_path: Path) -> None:
    """GPTQModel can quantise the head; a router becomes floats, as it always does."""
    router = "model.layers.0.block_sparse_moe.gate.weight"
    also = ("lm_head.weight", router)
    given = checkpoint(
        tmp_path / "q",
        method=GPTQ,
        says=GPTQ | {"lm_head": True},
        packed=lambda name: is_packed(name) or name in also,
        experts=8,
    )
    dtypes, dense, _ = loaded(convert(tmp_path / "q", out=tmp_path / "o.spmoe").path)
    assert dtypes == Dtypes("fp16", "int4-g32z", "fp16", "int4-g32z")
    for ours, name in (("lm_head.weight", also[0]), ("layers.0.router.weight", router)):
        assert torch.equal(dense[ours], torch.from_numpy(given[name].values).half())


def test_biases_of_zeros_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    name = q_proj(0).replace("weight", "bias")
    checkpoint(
        tmp_path / "q", method=GPTQ, tensors=lambda t: t.update({name: torch.zeros(64).half()})
    )
    clean = tmp_path / "clean"
    checkpoint(clean, method=GPTQ)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe").path
    assert files_of(path) == files_of(convert(clean, out=tmp_path / "p.spmoe").path)
    checkpoint(
        tmp_path / "r", method=GPTQ, tensors=lambda t: t.update({name: torch.eye(64)[3].half()})
    )
    refused(tmp_path / "r", tmp_path, UnsupportedError, name, "no place")


def test_biases_that_the_model_has_are_kept(tmp_path: Path) -> None:
    checkpoint(tmp_path / "q", "llama", GPTQ, config={"attention_bias": True})
    expected = Oracle(tmp_path / "q-plain").logits(PROMPT)
    path = convert(tmp_path / "q", out=tmp_path / "o.spmoe", embed="fp32").path
    assert np.abs(our_logits(path, PROMPT).numpy() - expected).max() < 1e-4


@pytest.mark.parametrize("shards", [1, 2, 7])
def test_the_parts_of_a_matrix_may_lie_in_several_shards(shards: int, tmp_path: Path) -> None:
    checkpoint(tmp_path / "q", shards=shards)
    checkpoint(tmp_path / "r", shards=1)
    ours, other = (convert(tmp_path / n, out=tmp_path / f"{n}.spmoe").path for n in "qr")
    assert files_of(ours) == files_of(other)
    again = convert(tmp_path / "q", out=ours)
    assert again.already_there and not convert(tmp_path / "q", out=ours, force=True).already_there


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("desc_act", [True, False])
def test_from_the_hub(
    hub: StubHub,
    index: bool,
    desc_act: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, says = tmp_path / "q", GPTQ | {"desc_act": desc_act}
    bias = q_proj(0).replace("weight", "bias")
    checkpoint(
        folder,
        method=GPTQ,
        says=says,
        shards=3 if index else 1,
        shuffled=lambda name: desc_act and is_expert(name),
        tensors=lambda t: t.update({bias: torch.zeros(64).half()}),
    )
    local = convert(folder, out=tmp_path / "local.spmoe").path
    hub.add("acme/q", {p.name: p.read_bytes() for p in folder.iterdir()})
    plans = []
    ours = convert(
        "acme/q", out=tmp_path / "o.spmoe", low_disk=True, confirm=lambda p: not plans.append(p)
    ).path
    assert files_of(ours) == files_of(local)
    assert "--low-disk has no effect: a matrix in GPTQ may lie in several shards" in caplog.text
    if not desc_act:
        assert plans[0].dtypes == loaded(ours)[0]
    assert convert("acme/q", out=ours).already_there


# What is refused


@pytest.mark.parametrize(
    "method, change, words",
    [
        (GPTQ, {"bits": 3}, ("gptq with bits 3",)),
        (GPTQ, {"bits": 8}, ("gptq with bits 8", "fetch one in 4 bits")),
        (AWQ, {"bits": 2}, ("awq with bits 2",)),
        (GPTQ, {"bits": True}, ("bits True",)),
        (GPTQ, {"bits": 4.0}, ("bits 4.0",)),
        (GPTQ, {"bits": "4"}, ("bits '4'",)),
        (GPTQ, {"bits": None}, ("bits None",)),
        (GPTQ, {"group_size": -1}, ("gptq with group_size -1", "32 or 64 or 128")),
        (AWQ, {"group_size": 16}, ("awq with group_size 16",)),
        (GPTQ, {"group_size": 1024}, ("group_size 1024",)),
        (GPTQ, {"group_size": [32]}, ("group_size [32]",)),
        (GPTQ, {"desc_act": "yes"}, ("desc_act 'yes'",)),
        (GPTQ, {"sym": 1}, ("sym 1",)),
        (GPTQ, {"checkpoint_format": "marlin"}, ("gptq with checkpoint_format 'marlin'",)),
        (GPTQ, {"is_marlin_format": True}, ("is_marlin_format True",)),
        (GPTQ, {"pack_dtype": "int16"}, ("pack_dtype 'int16'",)),
        (GPTQ, {"dynamic": {"+:.*down": {"bits": 8}}}, ("gptq", "dynamic")),
        (GPTQ, {"dynamic": ["-:x"]}, ("gptq", "dynamic")),
        (AWQ, {"version": "gemv"}, ("awq with version 'gemv'", "only gemm")),
        (AWQ, {"version": {}}, ("awq with version {}",)),
        (AWQ, {"backend": "llm-awq"}, ("awq with backend 'llm-awq'",)),
        (AWQ, {"zero_point": False}, ("awq with zero_point False",)),
    ],
)
def test_other_settings_are_refused_by_name_before_anything_is_read(
    method: dict[str, Any], change: dict[str, Any], words: tuple[str, ...], tmp_path: Path
) -> None:
    tiny.tiny_llama(tmp_path / "q", config={"quantization_config": method | change})
    refused(tmp_path / "q", tmp_path, UnsupportedError, *words)


def test_settings_that_change_nothing_are_accepted(tmp_path: Path) -> None:
    harmless = {
        "dynamic": {"-:.*gate": {}},
        "checkpoint_format": "GPTQ",
        "damp_percent": 0.01,
        "true_sequential": True,
        "meta": {"quantizer": ["gptqmodel:1.0"]},
        "pack_dtype": "int32",
    }
    assert packing_of({"quantization_config": GPTQ | harmless}) == Packing(
        "gptq", Scheme(4, 32, zeros=True), 1
    )
    assert packing_of({"quantization_config": AWQ | {"version": None}}) == Packing(
        "awq", Scheme(4, 32, zeros=True)
    )
    assert packing_of({"quantization_config": V2 | {"quant_method": "GPTQ"}}) == Packing(
        "gptq", Scheme(4, 32, zeros=True), 0
    )


STEM = W2.removesuffix("weight")


def drop(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda tensors: tensors.__delitem__(STEM + part)


def put(part: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[STEM + part] = make(tensors[STEM + part])

    return change


@pytest.mark.parametrize(
    "method, change, words",
    [
        (AWQ, drop("qzeros"), ("has no qzeros, but qweight, scales", "incomplete")),
        (GPTQ, drop("qweight"), ("has no qweight",)),
        (GPTQ, drop("scales"), ("has no scales",)),
        (GPTQ | {"desc_act": True}, drop("g_idx"), ("has no g_idx",)),
        (AWQ, put("qweight", lambda t: t[:-1].clone()), ("UNSUPPORTED", "95 columns")),
        (AWQ, put("qweight", lambda t: t[:64].clone()), ("qzeros is I32 [3, 8], not [2, 8]",)),
        (GPTQ, put("qweight", lambda t: t[0].clone()), ("qweight is I32 [64]",)),
        (GPTQ, put("qweight", lambda t: t.short()), ("qweight is I16",)),
        (GPTQ, put("qweight", lambda t: t.float()), ("qweight is fp32",)),
        (GPTQ, put("qzeros", lambda t: t[:, :-1].clone()), ("qzeros is I32 [3, 7]",)),
        (GPTQ, put("scales", lambda t: t.t().contiguous()), ("scales is fp16 [64, 3]",)),
        (GPTQ, put("scales", lambda t: t.int()), ("scales is I32",)),
        (GPTQ, put("g_idx", lambda t: t[:-1].clone()), ("g_idx is I32 [95]",)),
        (GPTQ, put("g_idx", lambda t: t + 1), ("names groups 1 to 3 of 3",)),
        (GPTQ, put("g_idx", lambda t: t - 1), ("names groups -1 to 1 of 3",)),
        (GPTQ, put("scales", lambda t: t / 0), ("NaN or infinite",)),
        (SYM, put("scales", lambda t: t * float("nan")), ("not finite",)),
        (SYM, put("qzeros", lambda t: t + 1), ("zeros other than 8", "set sym to false")),
        (AWQ, lambda t: t.update({W2: torch.ones(64, 96)}), ("there twice",)),
        (
            AWQ,
            lambda t: t.update({STEM + "perm": torch.ones(3).int()}),
            ("UNSUPPORTED", "perm is I32"),
        ),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(
    method: dict[str, Any], change: Any, words: tuple[str, ...], tmp_path: Path
) -> None:
    plainly = {k: v for k, v in method.items() if k != "desc_act"} | {"desc_act": False}
    checkpoint(tmp_path / "q", method=plainly, says=method, tensors=change)
    kind = UnsupportedError if words[0] == "UNSUPPORTED" else DamagedError
    name = W2 if words[0] == "there twice" else STEM.removesuffix(".")
    refused(tmp_path / "q", tmp_path, kind, name, *(w for w in words if w != "UNSUPPORTED"))


def test_a_matrix_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "q", "llama")
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    tiny.write_json(tmp_path / "q" / "config.json", config | {"intermediate_size": 128})
    refused(tmp_path / "q", tmp_path, DamagedError, "gate_proj.weight is [96, 64]", "[128, 64]")


def test_config_and_weights_of_different_checkpoints(tmp_path: Path) -> None:
    """A quantization_config over floats, and packed weights without one or under another method."""
    tiny.tiny_llama(tmp_path / "floats", config={"quantization_config": AWQ})
    refused(tmp_path / "floats", tmp_path, DamagedError, "says awq", "no qweight")
    checkpoint(tmp_path / "q", "llama", GPTQ, hidden=256, intermediate=256)
    path = tmp_path / "q" / "config.json"
    config = json.loads(path.read_text())
    tiny.write_json(path, config | {"quantization_config": AWQ})
    refused(tmp_path / "q", tmp_path, DamagedError, "as awq with groups of 32")
    del config["quantization_config"]
    tiny.write_json(path, config)
    refused(tmp_path / "q", tmp_path, UnsupportedError, "already quantised")


def test_a_shard_cut_short_is_damaged(tmp_path: Path) -> None:
    checkpoint(tmp_path / "q", shards=1)
    file = tmp_path / "q" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(tmp_path / "q", tmp_path, DamagedError, "model.safetensors")


@pytest.mark.parametrize(
    "method", "compressed-tensors fp8 bitsandbytes hqq torchao mxfp4 eetq quanto aqlm".split()
)
def test_other_methods_are_refused_with_what_to_fetch_instead(method: str, tmp_path: Path) -> None:
    says = {"quant_method": method, "bits": 4, "group_size": 32}
    checkpoint(tmp_path / "q", "llama", says=says)
    refused(tmp_path / "q", tmp_path, UnsupportedError, f"({method})", "AWQ or GPTQ", "GGUF file")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(10**300), 10**300)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=5,
)
KEYS = sorted(
    {*AWQ, *GPTQ, "checkpoint_format", "backend", "dynamic", "pack_dtype", "is_marlin_format"}
    | {"load_in_4bit", "modules_to_not_convert"}
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "q"
    checkpoint(folder, "llama", GPTQ, shards=1)
    return folder


@settings(max_examples=150, deadline=None)
@given(
    base=st.sampled_from([AWQ, GPTQ, SYM]),
    changes=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3) | JSON,
    key=st.sampled_from(["quantization_config"] * 5 + ["compression_config"]),
)
def test_no_value_of_the_config_gives_a_traceback(
    whole: Path, base: dict[str, Any], changes: Any, key: str
) -> None:
    path = whole / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    config.pop("compression_config", None)
    values = base | changes if isinstance(changes, dict) else changes
    path.write_text(json.dumps(config | {key: values}), encoding="utf-8")
    try:
        convert(whole, out=whole.parent / "o.spmoe", force=True)
    except SpmoeError as error:
        assert "\n" not in str(error) and len(str(error)) < 600
