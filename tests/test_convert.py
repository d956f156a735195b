"""convert: every layout and spelling gives the same pack; what is not a model is refused before a byte."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spmoe_lite.converters import ConvertPlan, convert, recipe, repack
from spmoe_lite.converters.source import Checkpoint, Piece
from spmoe_lite.errors import (
    Cancelled,
    CapacityError,
    DamagedError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.manifest import Dtypes
from spmoe_lite.pack import TORCH_DTYPES, Pack, Weight, view_weight
from spmoe_lite.precision import Scheme, matrix_bytes, scheme_of
from spmoe_lite.progress import Progress
from spmoe_lite.quant import QuantizedMatrix, quantize
from tests import tiny
from tests.make_pack import bits

ROOT = Path(__file__).resolve().parent.parent
PART_1, PART_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def fingerprint(pack: Path) -> dict[str, Any]:
    """All of a pack but its source and date: tensor bytes by hash, resolved config, token count."""
    raw = json.loads((pack / "manifest.json").read_text(encoding="utf-8"))
    keys = ("model", "dense_dtype", "linear_dtype", "embed_dtype", "expert_layout", "num_tokens")
    kept = {key: raw[key] for key in (*keys, "audit")}
    return kept | {"files": raw["files"]}


def refused(
    source: Path, tmp_path: Path, kind: type[SpmoeError], *words: str, **options: Any
) -> None:
    """Conversion ends with one line that holds `words`, and leaves nothing."""
    out = tmp_path / "refused" / "o.spmoe"
    with pytest.raises(kind) as caught:
        convert(source, out=out, **options)
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    assert not out.parent.exists() or not any(out.parent.iterdir())


def edit(folder: Path, file: str, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of one shard, and the index with them."""
    tensors = load_file(folder / file)
    before = set(tensors)
    change(tensors)
    save_file(tensors, folder / file, metadata={"format": "pt"})
    if (folder / INDEX).exists():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        for name in before - set(tensors):
            del index["weight_map"][name]
        index["weight_map"] |= dict.fromkeys(set(tensors) - before, file)
        tiny.write_json(folder / INDEX, index)


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"][name]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pack of the plain checkpoint."""
    return tiny.tiny_pack(tmp_path_factory.mktemp("clean"))


@pytest.fixture
def tmix(tmp_path: Path) -> Path:
    return tiny.tiny_mixtral(tmp_path / "tmix")


# What comes out


@pytest.mark.parametrize("kind", ["mixtral", "mistral", "llama"])
def test_the_pack_holds_the_numbers_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    pack_path = tiny.tiny_pack(tmp_path, kind)
    given = {}
    for shard in (tmp_path / f"{kind}-source").glob("*.safetensors"):
        given |= load_file(shard)
    matrices = 0
    with Pack.open(pack_path) as pack:
        pack.verify()
        dense = pack.load_dense()
        config, layout = pack.config, pack.expert_layout
        assert torch.equal(dense["embed_tokens.weight"], given["model.embed_tokens.weight"])
        assert torch.equal(dense["lm_head.weight"], given["lm_head.weight"])
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}"
            for ours, theirs in (
                ("input_norm", "input_layernorm"),
                ("post_norm", "post_attention_layernorm"),
                ("q_proj", "self_attn.q_proj"),
                ("k_proj", "self_attn.k_proj"),
                ("v_proj", "self_attn.v_proj"),
                ("o_proj", "self_attn.o_proj"),
            ):
                found = dense[f"layers.{layer}.{ours}.weight"]
                assert torch.equal(found, given[f"{at}.{theirs}.weight"]), ours
            for expert in range(config.num_local_experts):
                assert layout is not None
                data = torch.from_numpy(pack.expert_bytes(layer, expert).copy())
                for offset, w in (
                    (layout.gate_offset, "w1"),
                    (layout.up_offset, "w3"),
                    (layout.down_offset, "w2"),
                ):
                    matrix = given[f"{at}.block_sparse_moe.experts.{expert}.{w}.weight"]
                    run = data[offset : offset + matrix.nbytes].view(torch.float32)
                    assert torch.equal(run, matrix.reshape(-1)), (layer, expert, w)
                    matrices += 1
        audit = pack.manifest["audit"]
        assert audit["found"] == matrices == config.num_hidden_layers * config.num_local_experts * 3


@pytest.mark.parametrize("experts", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_precision_is_the_sources_unless_another_is_asked(
    dtype: torch.dtype, experts: str, tmp_path: Path
) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix", dtype=dtype, layers=1, experts=2)
    name = "model.layers.0.block_sparse_moe.experts.1.w2.weight"
    matrix = load_file(source / shard_of(source, name))[name]
    wanted = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for asked in (None, experts):
        path = convert(source, out=tmp_path / f"{asked}.spmoe", experts=asked).path
        with Pack.open(path) as pack:
            assert wanted[pack.dense_dtype] == dtype
            assert pack.expert_layout is not None
            assert wanted[pack.expert_layout.dtype] == (wanted[asked] if asked else dtype)
            data = torch.from_numpy(pack.expert_bytes(0, 1).copy())[
                pack.expert_layout.down_offset :
            ]
            cast = matrix.to(wanted[pack.expert_layout.dtype])
            assert torch.equal(data[: cast.nbytes].view(cast.dtype), cast.reshape(-1))


# Quantised precisions


def loaded(pack_path: Path) -> tuple[Dtypes, dict[str, Weight], list[list[list[Weight]]]]:
    """The dtypes of a pack, its dense tensors, and gate, up, down of its experts [layer][expert]."""
    with Pack.open(pack_path) as pack:
        pack.verify()
        config, layout, experts = pack.config, pack.expert_layout, []
        for layer in range(config.num_hidden_layers if layout else 0):
            experts.append([])
            for expert in range(config.num_local_experts):
                run = torch.from_numpy(pack.expert_bytes(layer, expert).copy())
                up, matrices = (config.intermediate_size, config.hidden_size), []
                for kind, shape in (("gate", up), ("up", up), ("down", up[::-1])):
                    start = getattr(layout, f"{kind}_offset")
                    size = matrix_bytes(layout.dtype, *shape)
                    matrices.append(view_weight(run[start : start + size], layout.dtype, shape))
                experts[layer].append(matrices)
        return pack.dtypes, pack.load_dense(), experts


def as_quantised(weight: torch.Tensor, dtype: str) -> bytes:
    scheme = scheme_of(dtype)
    return bits(weight if scheme is None else quantize(weight, scheme))


@pytest.mark.parametrize("source_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options, dtypes",
    [
        ({"experts": "int4", "group": 32}, (None, None, None, "int4-g32z")),
        ({"experts": "int4"}, (None, None, None, "int4-g64z")),
        ({"experts": "int8", "group": 32}, (None, None, None, "int8-g32")),
        ({"dense": "int8", "experts": "int8"}, (None, "int8-g64", None, "int8-g64")),
        ({"embed": "int4"}, (None, None, "int4-g64z", None)),
        (
            {"experts": "int4", "dense": "int8", "embed": "fp16"},
            ("fp16", "int8-g64", "fp16", "int4-g64z"),
        ),
        (
            {"experts": "fp16", "dense": "bf16", "embed": "int8"},
            ("bf16", "bf16", "int8-g64", "fp16"),
        ),
    ],
)
def test_each_kind_of_tensor_gets_its_precision_from_the_source_s_own_values(
    options: dict[str, Any],
    dtypes: tuple[str | None, ...],
    source_dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    own = {torch.float32: "fp32", torch.bfloat16: "bf16"}[source_dtype]
    wanted = Dtypes(*(dtype or own for dtype in dtypes))
    source = tiny.tiny_mixtral(
        tmp_path / "s", intermediate=192, dtype=source_dtype, config={"attention_bias": False}
    )
    path = convert(source, out=tmp_path / "o.spmoe", **options).path
    exact, dense, experts = loaded(convert(source, out=tmp_path / "exact.spmoe").path)
    found, packed_dense, packed_experts = loaded(path)
    assert exact == Dtypes(own, own, own, own) and found == wanted
    for name, weight in dense.items():
        dtype = wanted.of(name)
        if dtype in TORCH_DTYPES:
            weight = weight.to(TORCH_DTYPES[dtype])
        assert bits(packed_dense[name]) == as_quantised(weight, dtype), name
    assert isinstance(packed_dense["layers.1.router.weight"], torch.Tensor)
    for layer in range(2):
        for expert in range(4):
            for ours, weight in zip(
                packed_experts[layer][expert], experts[layer][expert], strict=True
            ):
                if wanted.experts in TORCH_DTYPES:
                    weight = weight.to(TORCH_DTYPES[wanted.experts])
                assert bits(ours) == as_quantised(weight, wanted.experts)


@pytest.mark.parametrize("kind", ["mistral", "llama"])
def test_a_dense_model_has_quantised_projections_and_float_norms_and_biases(
    kind: str, tmp_path: Path
) -> None:
    config = {"attention_bias": True} if kind == "llama" else {}
    path = tiny.tiny_pack(tmp_path, kind, dense="int4", group=32, config=config)
    _, dense, _ = loaded(path)
    for name, weight in dense.items():
        assert isinstance(weight, QuantizedMatrix) == name.endswith("_proj.weight"), name
    assert any(name.endswith("bias") for name in dense) == (kind == "llama")


@pytest.mark.parametrize("spelling", ["named", "stacked", "mixed"])
def test_every_spelling_gives_the_same_quantised_pack(spelling: str, tmp_path: Path) -> None:
    options = {"experts": "int4", "dense": "int8", "group": 32}
    wanted = fingerprint(tiny.tiny_pack(tmp_path / "a", **options))
    assert fingerprint(tiny.tiny_pack(tmp_path / "b", **options, spelling=spelling)) == wanted


def test_how_many_rows_are_quantised_at_once_changes_no_byte(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"experts": "int4", "dense": "int8", "embed": "int8", "group": 32}
    wanted = fingerprint(convert(tmix, out=tmp_path / "a.spmoe", **options).path)
    seen: list[Progress] = []
    monkeypatch.setattr(recipe, "QUANTISED_BYTES", 64 * 4 * 5)  # five rows of 64 fp32 weights
    made = convert(tmix, out=tmp_path / "b.spmoe", on_progress=seen.append, **options).path
    assert fingerprint(made) == wanted
    counts = [p.done for p in seen if p.stage == "convert"]
    assert counts == sorted(counts) and len(counts) > 8 * 3 * 60 / 5
    assert {p.total for p in seen if p.stage == "convert"} == {counts[-1]}


def test_cancelling_takes_effect_inside_a_matrix(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe, "QUANTISED_BYTES", 1)
    cancel, seen = threading.Event(), []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if len(seen) == 5:
            cancel.set()

    with pytest.raises(Cancelled):
        convert(
            tmix,
            out=tmp_path / "o.spmoe",
            experts="int4",
            group=32,
            cancel=cancel,
            on_progress=stop,
        )
    assert len(seen) == 5 and not (tmp_path / "o.spmoe.partial").exists()


@pytest.mark.parametrize(
    "model, asked, words, advice, cured",
    [
        (
            {"intermediate": 96},
            {"experts": "int4"},
            ["--experts int4 with groups of 64: down of every expert has 96 columns"],
            "give --group 32 or --experts fp32",
            [{"experts": "int4", "group": 32}, {"experts": "fp32"}],
        ),
        (
            {"intermediate": 192},
            {"experts": "int8", "group": 128},
            ["gate", "64 columns", "groups of 128"],
            "give --group 64 or --group 32 or --experts fp32",
            [{"experts": "int8", "group": 64}],
        ),
        (
            {"hidden": 40, "head_dim": 10},
            {"dense": "int8"},
            ["q_proj.weight has 40 columns"],
            "give --dense fp32",
            [{"dense": "fp32"}],
        ),
        (
            {"vocab": 321},
            {"embed": "int8", "experts": "bf16"},
            ["embed_tokens.weight has 321 rows, an odd number"],
            "give --embed fp32",
            [{"embed": "fp32", "experts": "bf16"}],
        ),
        (
            {"hidden": 128, "intermediate": 95},
            {"experts": "int8", "dense": "bf16"},
            ["gate of every expert has 95 rows, an odd number"],
            "give --experts bf16",
            [{"experts": "bf16", "dense": "bf16"}],
        ),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused_with_what_would_do(
    model: dict[str, int],
    asked: dict[str, Any],
    words: list[str],
    advice: str,
    cured: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    source = tiny.tiny_mixtral(tmp_path / "s", **model)
    with pytest.raises(UnsupportedError) as caught:
        convert(source, out=tmp_path / "o.spmoe", **asked)
    assert str(caught.value).endswith(advice)
    refused(source, tmp_path, UnsupportedError, *words, **asked)
    for options in cured:
        convert(source, out=tmp_path / "o.spmoe", force=True, **options)


@pytest.mark.parametrize(
    "options, word",
    [
        ({"dense": "int5"}, "--dense 'int5' is not one of fp32, bf16, fp16, int8, int4"),
        ({"embed": "q4_0"}, "--embed 'q4_0'"),
        ({"experts": "int4-g64z"}, "--experts 'int4-g64z'"),
        ({"experts": "int4", "group": 48}, "--group 48 is not one of 32, 64, 128"),
        ({"experts": "int4", "group": "64"}, "--group '64' is not"),
        ({"group": 64}, "--group 64 says nothing without int8 or int4"),
        ({"experts": "bf16", "dense": "fp16", "group": 64}, "--group 64 says nothing"),
        ({"dense": "fp16", "embed": "bf16"}, "one float dtype"),
    ],
)
def test_flags_that_say_nothing_or_contradict_are_refused(
    options: dict[str, Any], word: str, tmix: Path, tmp_path: Path
) -> None:
    refused(tmix, tmp_path, UsageError, word, **options)


def test_a_source_that_holds_the_scheme_exactly_is_not_quantised_anew(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seam for quantised sources: what `read_quantized` gives is what the pack holds."""
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    scheme = Scheme(4, 32, zeros=True)
    exact = quantize(torch.randn(64, 96, generator=torch.Generator().manual_seed(5)), scheme)
    asked = []

    def held(self: Checkpoint, piece: Piece, wanted: Scheme) -> QuantizedMatrix | None:
        asked.append((piece.name, wanted))
        return exact if piece.name == name and wanted == scheme else None

    monkeypatch.setattr(Checkpoint, "read_quantized", held)
    plain = convert(tmix, out=tmp_path / "p.spmoe", experts="int8", group=32).path
    path = convert(tmix, out=tmp_path / "o.spmoe", experts="int4", group=32).path
    assert (name, Scheme(8, 32)) in asked and asked.count((name, scheme)) == 1
    experts, other = loaded(path)[2], loaded(plain)[2]
    assert bits(experts[1][2][2]) == bits(exact) and bits(other[1][2][2]) != bits(exact)
    assert bits(experts[1][2][1]) != bits(experts[1][1][1])
    broken = torch.full_like(exact.scales, 0x7C00)  # infinity in fp16
    exact = QuantizedMatrix(scheme, 96, exact.codes, broken)
    with pytest.raises(DamagedError, match=r"layers\.1\.block.*scales that are NaN or infinite"):
        convert(tmix, out=tmp_path / "q.spmoe", experts="int4", group=32)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e7])
def test_kind_k_o33_weights_that_no_scale_can_hold(
    value: float, tmix: Path, tmp_path: Path
) -> None:
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    edit(tmix, shard_of(tmix, name), lambda t: t[name][7].__setitem__(9, value))
    kind = UnsupportedError if value == 1e7 else DamagedError
    refused(tmix, tmp_path, kind, name, experts="int4", group=32)


def test_mixed_precision_keeps_every_value(tmix: Path, tmp_path: Path) -> None:
    """bf16 weights with an fp32 router: nothing is rounded unless it is asked for."""
    router = "model.layers.0.block_sparse_moe.gate.weight"
    shutil.rmtree(tmix)
    tiny.tiny_mixtral(tmix, dtype=torch.bfloat16)
    edit(tmix, shard_of(tmix, router), lambda t: t.update({router: t[router].float() + 1e-4}))
    exact = load_file(tmix / shard_of(tmix, router))[router]
    with Pack.open(convert(tmix, out=tmp_path / "o.spmoe").path) as pack:
        assert pack.dense_dtype == "fp32" and pack.expert_layout.dtype == "bf16"
        assert torch.equal(pack.load_dense()["layers.0.router.weight"], exact)


def test_a_checkpoint_saved_by_transformers_gives_the_same_pack(
    tmix: Path, clean: Path, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmix)
    for original in (True, False):
        saved = tmp_path / f"saved-{original}"
        model.save_pretrained(saved, save_original_format=original)
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            shutil.copy(tmix / name, saved)
        made = convert(saved, out=tmp_path / f"{original}.spmoe").path
        assert fingerprint(made) == fingerprint(clean)


def test_progress_counts_every_byte_and_the_text_files_come_along(
    tmix: Path, tmp_path: Path
) -> None:
    seen: list[Progress] = []
    result = convert(tmix, out=tmp_path / "o.spmoe", on_progress=seen.append)
    for stage in ("convert", "verify"):
        counts = [p.done for p in seen if p.stage == stage]
        totals = {p.total for p in seen if p.stage == stage}
        assert counts == sorted(counts) and totals == {counts[-1]}
        assert len(counts) > 8 or stage == "verify"
    assert result.plan is not None and result.plan.pack_bytes == next(
        p.total for p in seen if p.stage == "convert"
    )
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (result.path / name).read_bytes() == (tmix / name).read_bytes()


# Kind A: weights skipped or mixed without an error


def test_kind_a_o1a_index_names_an_absent_part(tmix: Path, tmp_path: Path) -> None:
    index = json.loads((tmix / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["lm_head.weight"] = "model-00003-of-00003.safetensors"
    tiny.write_json(tmix / INDEX, index)
    refused(tmix, tmp_path, DamagedError, "model-00003-of-00003.safetensors", "lm_head.weight")


def test_kind_a_o1b_a_part_of_another_count(tmix: Path, tmp_path: Path) -> None:
    (tmix / PART_2).rename(tmix / "model-00002-of-00003.safetensors")
    refused(tmix, tmp_path, DamagedError, PART_2)
    (tmix / INDEX).unlink()
    refused(tmix, tmp_path, DamagedError, PART_1, "model-00002-of-00003.safetensors")


@pytest.mark.parametrize("spelling", ["w123", "named", "stacked"])
def test_kind_a_o1c_an_experts_matrix_is_missing(spelling: str, tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(tmp_path / "tmix", spelling=spelling)
    name = "model.layers.1.block_sparse_moe.experts" + {
        "w123": ".2.w2.weight",
        "named": ".2.down_proj.weight",
        "stacked": ".down_proj",
    }.get(spelling, "")
    edit(tmix, shard_of(tmix, name), lambda t: t.pop(name))
    expert = 0 if spelling == "stacked" else 2
    refused(tmix, tmp_path, DamagedError, "down", "layer 1", f"expert {expert}", "missing")


def test_kind_a_o1d_without_an_index_the_headers_are_read(
    tmix: Path, clean: Path, tmp_path: Path
) -> None:
    (tmix / INDEX).unlink()
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)
    (tmix / PART_1).unlink()
    refused(tmix, tmp_path, DamagedError, PART_1)


def test_kind_a_o1_single_file(clean: Path, tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(tmp_path / "tmix", shards=1, index=False)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


def test_kind_a_o1_index_places_a_tensor_in_the_wrong_part(tmix: Path, tmp_path: Path) -> None:
    index = json.loads((tmix / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["lm_head.weight"] = PART_1
    tiny.write_json(tmix / INDEX, index)
    refused(tmix, tmp_path, DamagedError, "lm_head.weight", PART_1)


def test_kind_a_o2_extra_files_are_named_and_not_read(
    tmix: Path, clean: Path, tmp_path: Path
) -> None:
    other = {"model.norm.weight": torch.ones(64), "stray": torch.zeros(3, dtype=torch.uint8)}
    save_file(other, tmix / "consolidated.safetensors")
    save_file(other, tmix / "model.safetensors")
    (tmix / "pytorch_model.bin").write_bytes(b"not read")
    result = convert(tmix, out=tmp_path / "o.spmoe")
    assert fingerprint(result.path) == fingerprint(clean)
    assert result.plan is not None
    assert result.plan.ignored == (
        "consolidated.safetensors",
        "model.safetensors",
        "pytorch_model.bin",
    )
    assert "consolidated.safetensors" in str(result.plan)


def test_kind_a_o2_tensors_that_the_index_does_not_list_are_not_read(
    tmix: Path, clean: Path, tmp_path: Path
) -> None:
    """A shard still holds an old copy of the norm; the index has the one of the other shard."""
    tensors = load_file(tmix / PART_1)
    save_file(tensors | {"model.norm.weight": torch.full((64,), 7.0)}, tmix / PART_1)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


def test_kind_a_o2_many_unlisted_tensors_are_one_remark(
    tmix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    extra = {f"model.old.{i}": torch.zeros(1) for i in range(50)}
    save_file(load_file(tmix / PART_1) | extra, tmix / PART_1)
    convert(tmix, out=tmp_path / "o.spmoe")
    assert len(caplog.records) == 1 and "50 of its tensors" in caplog.text


def test_kind_a_o2_two_sets_and_no_index(tmix: Path, tmp_path: Path) -> None:
    (tmix / INDEX).unlink()
    save_file({"model.norm.weight": torch.ones(64)}, tmix / "model.safetensors")
    refused(tmix, tmp_path, UnsupportedError, "two sets", PART_1)


@pytest.mark.parametrize(
    "name", ["consolidated.00.pth", "consolidated.safetensors", "pytorch_model.bin", "model.ckpt"]
)
def test_kind_a_o2_vendor_or_pickle_files_only(name: str, tmix: Path, tmp_path: Path) -> None:
    for path in tmix.glob("model*"):
        path.unlink()
    (tmix / name).write_bytes(b"\x80\x04cos\nsystem\n.")
    refused(tmix, tmp_path, UnsupportedError, name)


def test_kind_a_o2_not_one_name_matches(tmix: Path, tmp_path: Path) -> None:
    for path in tmix.glob("model*"):
        path.unlink()
    save_file({"layers.0.attention.wq.weight": torch.ones(64, 64)}, tmix / "model.safetensors")
    refused(tmix, tmp_path, UnsupportedError, "not one tensor", "layers.0.attention.wq.weight")


@pytest.mark.parametrize("model_prefix", [True, False])
@pytest.mark.parametrize("prefix", ["block_sparse_moe", "mlp"])
@pytest.mark.parametrize("spelling", ["w123", "named", "stacked", "mixed"])
def test_kind_a_o3_every_spelling_gives_the_same_pack(
    spelling: str, prefix: str, model_prefix: bool, clean: Path, tmp_path: Path
) -> None:
    tmix = tiny.tiny_mixtral(
        tmp_path / "tmix", spelling=spelling, prefix=prefix, model_prefix=model_prefix, shards=3
    )
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


def test_kind_a_o3_gate_and_up_stacked_apart(tmix: Path, clean: Path, tmp_path: Path) -> None:
    """As GGUF has them: one tensor per kind of matrix."""
    shutil.rmtree(tmix)
    tiny.tiny_mixtral(tmix, spelling="stacked", prefix="mlp", shards=1, index=False)

    def split(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            both = tensors.pop(f"model.layers.{layer}.mlp.experts.gate_up_proj")
            gate, up = both.chunk(2, dim=1)
            tensors[f"model.layers.{layer}.mlp.experts.gate_proj"] = gate.contiguous()
            tensors[f"model.layers.{layer}.mlp.experts.up_proj"] = up.contiguous()

    edit(tmix, "model.safetensors", split)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.block_sparse_moe.experts.4.w1.weight",
        "model.layers.2.block_sparse_moe.experts.0.w1.weight",
        "model.layers.0.block_sparse_moe.experts.0.w4.weight",
        "model.layers.0.block_sparse_moe.shared_expert.w1.weight",
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.0.self_attn.q_norm.weight",
    ],
)
def test_kind_a_o3_an_unknown_tensor_is_an_error(name: str, tmix: Path, tmp_path: Path) -> None:
    edit(tmix, PART_2, lambda t: t.update({name: torch.zeros(96, 64)}))
    refused(tmix, tmp_path, UnsupportedError, name)


def test_kind_a_o3_one_matrix_under_two_names(tmix: Path, tmp_path: Path) -> None:
    name = "model.layers.0.block_sparse_moe.experts.1.gate_proj.weight"
    edit(tmix, PART_2, lambda t: t.update({name: torch.zeros(96, 64)}))
    refused(tmix, tmp_path, DamagedError, name, "experts.1.w1.weight", "twice")


def test_kind_a_o3_stacked_the_other_way_round(tmp_path: Path) -> None:
    """[E, H, 2I] in place of [E, 2I, H]: the shape is held against the config, never turned."""
    tmix = tiny.tiny_mixtral(tmp_path / "tmix", spelling="stacked", prefix="mlp")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    edit(
        tmix,
        shard_of(tmix, name),
        lambda t: t.update({name: t[name].transpose(1, 2).contiguous()}),
    )
    refused(tmix, tmp_path, DamagedError, name, "[4, 64, 192]", "[4, 192, 64]")


def test_kind_a_o6_config_says_quantised(tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(
        tmp_path / "tmix", config={"quantization_config": {"quant_method": "gptq", "bits": 4}}
    )
    refused(tmix, tmp_path, UnsupportedError, "gptq")


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_kind_a_o6_an_expert_is_quantised(dtype: torch.dtype, tmix: Path, tmp_path: Path) -> None:
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(96, 64).to(dtype)
        tensors[name.replace("weight", "weight_scale_inv")] = torch.ones(1, 1)

    edit(tmix, shard_of(tmix, name), pack)
    refused(tmix, tmp_path, UnsupportedError, name, "quantised")


# Kind B: wrong convention


def test_kind_b_o8_another_family_is_refused_by_name(tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(
        tmp_path / "tmix",
        config={"model_type": "qwen2_moe", "architectures": ["Qwen2MoeForCausalLM"]},
    )
    refused(tmix, tmp_path, UnsupportedError, "qwen2_moe")


def test_kind_b_shapes_of_another_model(tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(tmp_path / "tmix")
    config = json.loads((tmix / "config.json").read_text(encoding="utf-8"))
    tiny.write_json(tmix / "config.json", config | {"num_key_value_heads": 4})
    refused(tmix, tmp_path, DamagedError, "k_proj", "[32, 64]", "[64, 64]")


# Kind C: keys that moved, are null, or contradict the weights


def test_kind_c_o4_tied_without_a_head(tmp_path: Path) -> None:
    path = tiny.tiny_pack(tmp_path, "mistral", tied=True)
    with Pack.open(path) as pack:
        assert pack.config.tie_word_embeddings and "lm_head.weight" not in pack.load_dense()


def test_kind_c_o4_tied_with_the_same_head(tmp_path: Path) -> None:
    without = tiny.tiny_pack(tmp_path, "mistral", tied=True)
    source = tmp_path / "mistral-source"
    embeddings = load_file(source / PART_1)["model.embed_tokens.weight"]
    edit(source, PART_2, lambda t: t.update({"lm_head.weight": embeddings.clone()}))
    made = convert(source, out=tmp_path / "o.spmoe").path
    assert fingerprint(made) == fingerprint(without)


def test_kind_c_o4_tied_with_another_head(tmp_path: Path) -> None:
    source = tiny.tiny_mistral(tmp_path / "tdraft", tied=True)
    edit(source, PART_2, lambda t: t.update({"lm_head.weight": torch.ones(320, 64)}))
    refused(source, tmp_path, UnsupportedError, "lm_head.weight", "tie_word_embeddings")


def test_kind_c_o4_untied_without_a_head(tmp_path: Path) -> None:
    source = tiny.tiny_mistral(tmp_path / "tdraft", tied=True)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tiny.write_json(source / "config.json", config | {"tie_word_embeddings": False})
    refused(source, tmp_path, DamagedError, "lm_head.weight", "missing")


@pytest.mark.parametrize(
    "config, drop",
    [
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, ("rope_theta",)),
        ({"rope_scaling": None}, ()),
        ({"head_dim": None}, ()),
        ({}, ("head_dim",)),
        ({"head_dim": 16}, ()),
        ({"num_local_experts": 4}, ("torch_dtype",)),
    ],
)
def test_kind_c_o5_moved_and_null_keys_give_the_same_pack(
    config: dict[str, Any], drop: tuple[str, ...], clean: Path, tmp_path: Path
) -> None:
    tmix = tiny.tiny_mixtral(tmp_path / "tmix", config=config, drop=drop)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


# Kind D: tokens and rows


def test_kind_d_o7_derived_tables_are_left_out(tmix: Path, clean: Path, tmp_path: Path) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(2):
            tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.rand(8)
        tensors["model.rotary_emb.inv_freq"] = torch.rand(8)

    edit(tmix, PART_2, add)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


def test_kind_d_o7_more_rows_than_tokens(tmp_path: Path) -> None:
    path = tiny.tiny_pack(tmp_path, vocab=384)
    with Pack.open(path) as pack:
        assert pack.config.vocab_size == 384 and pack.num_tokens == tiny.VOCAB


def test_kind_d_o7_more_tokens_than_rows(tmix: Path, tmp_path: Path) -> None:
    tokenizer = json.loads((tmix / "tokenizer.json").read_text(encoding="utf-8"))
    extra = dict(tokenizer["added_tokens"][0])
    tokenizer["added_tokens"] += [
        extra | {"id": 320, "content": "<a>"},
        extra | {"id": 321, "content": "<b>"},
    ]
    tiny.write_json(tmix / "tokenizer.json", tokenizer)
    refused(tmix, tmp_path, SpmoeError, "320")


def test_kind_d_o13_end_tokens_of_all_places(tmix: Path, tmp_path: Path) -> None:
    tiny.write_json(tmix / "generation_config.json", {"eos_token_id": [2, 7], "do_sample": True})
    path = convert(tmix, out=tmp_path / "o.spmoe").path
    with Pack.open(path) as pack:
        assert set(pack.config.eos_token_ids) == {2, 7}
    assert json.loads((path / "generation_config.json").read_text(encoding="utf-8"))["do_sample"]


@pytest.mark.parametrize("data", [b"", b"{}", b"[1", b'{"version": "1.0"}'])
def test_a_broken_tokenizer_is_named(data: bytes, tmix: Path, tmp_path: Path) -> None:
    (tmix / "tokenizer.json").write_bytes(data)
    refused(tmix, tmp_path, DamagedError, "tmix", "tokenizer.json")


def test_no_tokenizer(tmix: Path, tmp_path: Path) -> None:
    (tmix / "tokenizer.json").unlink()
    refused(tmix, tmp_path, SpmoeError, "tokenizer.json")


# Kind K: numbers that the new precision does not hold


@pytest.mark.parametrize("value", [1e5, -1e5, 65520.0])
def test_kind_k_o33_beyond_fp16(value: float, tmp_path: Path) -> None:
    tmix = tiny.tiny_mixtral(tmp_path / "tmix", dtype=torch.bfloat16)
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    edit(tmix, shard_of(tmix, name), lambda t: t[name].__setitem__((5, 7), value))
    refused(tmix, tmp_path, UnsupportedError, name, "fp16", experts="fp16")
    convert(tmix, out=tmp_path / "kept.spmoe", experts="fp32", dense="fp16")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("experts", [None, "bf16"])
@pytest.mark.parametrize(
    "name", ["model.layers.1.block_sparse_moe.experts.2.w3.weight", "model.embed_tokens.weight"]
)
def test_kind_k_o33_weights_that_are_not_numbers(
    name: str, experts: str | None, value: float, tmix: Path, tmp_path: Path
) -> None:
    edit(tmix, shard_of(tmix, name), lambda t: t[name].__setitem__((5, 7), value))
    refused(tmix, tmp_path, DamagedError, name, "NaN", experts=experts)


# Untrusted files


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "", "x\\y", "a\nb", 7, None],
)
def test_an_index_cannot_lead_out_of_its_folder(name: Any, tmix: Path, tmp_path: Path) -> None:
    shutil.copy(tmix / PART_2, tmp_path / "secret.safetensors")
    index = json.loads((tmix / INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["lm_head.weight"] = name
    tiny.write_json(tmix / INDEX, index)
    refused(tmix, tmp_path, DamagedError, INDEX)


@pytest.mark.parametrize("name", [PART_2, "tokenizer.json", "config.json"])
def test_a_link_out_of_the_folder_is_refused(name: str, tmix: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (tmix / name).rename(outside)
    (tmix / name).symlink_to(outside)
    refused(tmix, tmp_path, DamagedError, name, "link")


def test_the_hubs_cache_is_a_folder_of_links_and_fine(
    tmix: Path, clean: Path, tmp_path: Path
) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b"
    snapshot.mkdir(parents=True)
    (blobs / "blobs").mkdir()
    for i, path in enumerate(sorted(tmix.iterdir())):
        path.rename(blobs / "blobs" / str(i))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(i))
    assert fingerprint(convert(snapshot, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


@pytest.mark.parametrize("cut", [1, 4096, 20_000])
def test_a_short_shard_is_found_before_anything_is_written(
    cut: int, tmix: Path, tmp_path: Path
) -> None:
    data = (tmix / PART_2).read_bytes()
    (tmix / PART_2).write_bytes(data[:-cut])
    refused(tmix, tmp_path, DamagedError, PART_2, str(len(data) - cut))


@pytest.mark.parametrize("cut", [0, 4, 8, 100])
def test_a_shard_cut_in_its_header(cut: int, tmix: Path, tmp_path: Path) -> None:
    (tmix / PART_2).write_bytes((tmix / PART_2).read_bytes()[:cut])
    refused(tmix, tmp_path, DamagedError, PART_2)


def header(entries: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = json.dumps(entries).encode() if not isinstance(entries, bytes) else entries
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    "data",
    [
        header({"a": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 1 << 62]}}),
        header({"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"12345678"),
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}, b"12345678"),
        header({"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, b"1234"),
        header({"a": {"dtype": "F32", "shape": [9] * 100_000, "data_offsets": [0, 4]}}, b"1234"),
        header({"a\nb": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"1234"),
        header({"a": 3}),
        header([1, 2]),
        header(b'{"a": 1, "a": 2}'),
        header(b"\xff\xfe{}"),
        header(b"[" * 100_000),
        header({}, length=1 << 62),
        header({}, length=(1 << 64) - 1),
    ],
)
def test_a_hostile_header_is_refused(data: bytes, tmix: Path, tmp_path: Path) -> None:
    (tmix / PART_2).write_bytes(data)
    refused(tmix, tmp_path, DamagedError, PART_2)


def test_an_unknown_element_type(tmix: Path, tmp_path: Path) -> None:
    (tmix / PART_2).write_bytes(
        header({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, b"1")
    )
    refused(tmix, tmp_path, UnsupportedError, "F4")


@pytest.mark.parametrize("name", ["config.json", INDEX])
@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'"x"', b"\xff"])
def test_broken_json(name: str, data: bytes, tmix: Path, tmp_path: Path) -> None:
    (tmix / name).write_bytes(data)
    refused(tmix, tmp_path, DamagedError, name)


# Where it comes from and where it goes


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, tmp_path, NotFoundError, "config.json")
    (empty / "model.Q4_0.gguf").write_bytes(b"GGUF")
    refused(empty, tmp_path, NotFoundError, "model.Q4_0.gguf")
    text = tmp_path / "notes.txt"
    text.write_text("no model", encoding="utf-8")
    refused(text, tmp_path, UnsupportedError, "notes.txt")
    refused(tmp_path / "absent", tmp_path, NotFoundError, "absent")


def test_a_pack_is_not_a_source(clean: Path, tmp_path: Path) -> None:
    refused(clean, tmp_path, UsageError, "repack")


def test_an_existing_folder_wins_over_a_short_name(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmix.rename("mixtral-8x7b")
    result = convert("mixtral-8x7b", home=tmp_path / "home")
    assert result.path == tmp_path / "home" / "mixtral-8x7b.spmoe"
    with Pack.open(result.path) as pack:
        assert pack.config.hidden_size == 64


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".", "..", ".hidden", "a\\b", "c:d"])
def test_names_that_are_no_names(name: str, tmix: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        convert(tmix / ".", name=name or "..", home=tmp_path / "home")


def test_unknown_precision(tmix: Path, tmp_path: Path) -> None:
    refused(tmix, tmp_path, UsageError, "int3", experts="int3")


def test_a_dense_model_has_no_experts_to_cast(tmp_path: Path) -> None:
    source = tiny.tiny_mistral(tmp_path / "tdraft")
    path = convert(source, out=tmp_path / "o.spmoe", experts="bf16").path
    with Pack.open(path) as pack:
        assert pack.expert_layout is None and pack.dense_dtype == "fp32"


def test_the_caller_confirms_the_plan(tmix: Path, tmp_path: Path) -> None:
    plans = []

    def no(plan: Any) -> bool:
        plans.append(plan)
        return False

    refused(tmix, tmp_path, Cancelled, "nothing was written", confirm=no)
    plan = plans[0]
    assert not plan.needs_confirmation and plan.download_bytes == 0
    assert plan.dtypes == Dtypes("fp32", "fp32", "fp32", "fp32")
    assert plan.volumes[0].needed_bytes == plan.pack_bytes > 1_000_000
    assert plan.volumes[0].free_bytes > plan.pack_bytes
    assert convert(tmix, out=tmp_path / "o.spmoe", confirm=lambda plan: True).path.is_dir()


def test_more_than_10_gb_asks_for_confirmation() -> None:
    plan = ConvertPlan(
        label="m", revision="c0ffee" * 6, path=Path("m.spmoe"), family="mixtral",
        dtypes=Dtypes.floats("bf16", "bf16"), download_bytes=6 * 10**9, pack_bytes=6 * 10**9, volumes=(), ignored=(),
    )  # fmt: skip
    assert plan.needs_confirmation
    assert "download: 6.0 GB" in str(plan) and "c0ffeec0ffee" in str(plan)


def test_too_little_room_is_found_before_anything_is_written(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    refused(tmix, tmp_path, CapacityError, "1.0 MB free", "needed")


def test_systems_without_preadv_read_the_same(
    tmix: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "preadv", raising=False)
    assert fingerprint(convert(tmix, out=tmp_path / "o.spmoe").path) == fingerprint(clean)


PEAK = textwrap.dedent("""
    import json, resource, sys
    sys.path.insert(0, sys.argv[1])
    from spmoe_lite.converters import convert

    def peak():
        try:  # of this program alone: ru_maxrss begins at what the process was that started it
            with open("/proc/self/status") as status:
                return next(1024 * int(line.split()[1]) for line in status if "VmHWM" in line)
        except FileNotFoundError:
            kilo = 1 if sys.platform == "darwin" else 1024
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilo

    convert(sys.argv[2], out=sys.argv[4] + "/small.spmoe", experts=sys.argv[5])  # imports what it needs
    before = peak()
    convert(sys.argv[3], out=sys.argv[4] + "/big.spmoe", experts=sys.argv[5])
    print(peak() - before)
""")


@pytest.mark.parametrize("spelling, experts", [("w123", "int8"), ("stacked", "fp16")])
def test_memory_holds_one_expert_not_the_checkpoint(
    spelling: str, experts: str, tmp_path: Path
) -> None:
    pytest.importorskip("resource")
    small = tiny.tiny_mixtral(
        tmp_path / "small", hidden=128, intermediate=128, spelling=spelling, dtype=torch.bfloat16
    )
    source = tiny.tiny_mixtral(
        tmp_path / "big", hidden=512, intermediate=1024, experts=8, spelling=spelling,
        dtype=torch.bfloat16,
    )  # fmt: skip
    layer = 8 * 3 * 512 * 1024 * 2
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 2 * layer
    command = [
        sys.executable,
        "-c",
        PEAK,
        str(ROOT),
        str(small),
        str(source),
        str(tmp_path),
        experts,
    ]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=100, check=True)
    assert int(done.stdout) < layer, f"{int(done.stdout)} bytes, a layer has {layer}"


# Where it goes, and what has no effect


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        ".hidden",
        "-dash",
        "a/b",
        "a\\b",
        "a:b",
        "a\nb",
        "a\0b",
        " a",
        "a ",
        "con",
        "NUL.x",
    ]
    + ["*", "x" * 300],
)
def test_names_that_would_trip_a_shell_or_another_system_are_refused(
    name: str, tmix: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="cannot be the name of a pack; give another with --name"):
        convert(tmix, name=name, home=tmp_path / "home")
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("out", ["", ".", "/", "a\0b", 5, b"pack"])
def test_an_out_without_a_name_is_refused(out: Any, tmix: Path) -> None:
    with pytest.raises(UsageError, match="is not the name of a folder to be made"):
        convert(tmix, out=out)


def test_name_and_out_are_one_too_many(tmix: Path, tmp_path: Path) -> None:
    refused(tmix, tmp_path, UsageError, "not both", name="x")
    with pytest.raises(UsageError, match="SOURCE is empty"):
        convert(" ", home=tmp_path)


@pytest.mark.parametrize("source", [None, 5, b"model"])
def test_what_is_no_source_is_one_line(source: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is no source: a folder, a .gguf file"):
        convert(source, home=tmp_path)


def test_calls_that_cannot_be_made_are_refused_before_anything_is_read(
    tmix: Path, tmp_path: Path
) -> None:
    refused(tmix, tmp_path, UsageError, "cancel True", cancel=True)
    refused(tmix, tmp_path, UsageError, "on_progress 5", on_progress=5)
    refused(tmix, tmp_path, UsageError, "confirm 'yes'", confirm="yes")
    with pytest.raises(UsageError, match="5 cannot be the name"):
        convert(tmix, name=5, home=tmp_path)  # type: ignore[arg-type]


def test_a_tilde_is_the_user_s_home(
    tmix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    done = convert(tmix, home="~/packs", name="x")
    assert done.path == tmp_path / "packs" / "x.spmoe" and not (tmp_path / "~").exists()
    assert repack("x", home="~/packs").already_there
    assert convert(tmix, out="~/y.spmoe").path == tmp_path / "y.spmoe"  # as --out=~/y.spmoe comes
    assert repack("~/y.spmoe").already_there and not (tmp_path / "~").exists()


def test_a_place_that_is_taken_is_refused_before_anything_is_asked(
    tmix: Path, tmp_path: Path
) -> None:
    def never(plan: ConvertPlan) -> bool:
        raise AssertionError("asked")

    with pytest.raises(UsageError, match="exists and is not a pack"):
        convert(tmix, out=tmix, force=True, confirm=never)


def test_options_without_effect_are_said(
    clean: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dense = tiny.tiny_mistral(tmp_path / "dense")
    for _ in range(2):  # the second time the pack is already there
        caplog.clear()
        pack = convert(dense, home=tmp_path, experts="bf16", low_disk=True).path
        assert "--low-disk has no effect" in caplog.text
        assert "--experts has no effect" in caplog.text
    caplog.clear()
    repack(pack, experts="fp16")
    assert "--experts has no effect" in caplog.text


# Text files that would fail only when the pack is run


def test_bad_advice_on_sampling_is_refused(tmix: Path, tmp_path: Path) -> None:
    tiny.write_json(tmix / "generation_config.json", {"do_sample": True, "temperature": "hot"})
    refused(tmix, tmp_path, UnsupportedError, "tmix: generation_config.json: temperature is 'hot'")


def test_a_broken_chat_template_is_said(
    tmix: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmix / "chat_template.jinja").write_text("{% for", encoding="utf-8")
    convert(tmix, out=tmp_path / "o.spmoe")
    assert "tmix: chat_template.jinja is not a valid template" in caplog.text
    assert "--template FILE" in caplog.text


def test_kind_c_a_refused_config_names_its_model(tmix: Path, tmp_path: Path) -> None:
    config = json.loads((tmix / "config.json").read_text(encoding="utf-8"))
    tiny.write_json(tmix / "config.json", config | {"hidden_size": -64})
    refused(tmix, tmp_path, UnsupportedError, "tmix: config: hidden_size -64")


@pytest.mark.skipif(sys.platform != "linux", reason="names that others do not take")
@pytest.mark.parametrize("odd", ["a\nb\x1b[31m", os.fsdecode(b"latin\xe9")])
def test_a_source_of_an_odd_name_is_told_in_one_line(odd: str, tmp_path: Path) -> None:
    source = tiny.tiny_mistral(tmp_path / "plain").rename(tmp_path / odd)
    out = tmp_path / "o.spmoe"
    assert not convert(source, out=out).already_there
    assert convert(source, out=out).already_there
    with Pack.open(out) as pack:
        assert pack.manifest["source"]["id"] == ascii(odd)[1:-1]
