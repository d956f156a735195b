"""GGUF files: every kind of weights, every refusal, the tokenizer, and files that lie."""

from __future__ import annotations

import itertools
import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer

from spmoe_lite.config import ModelConfig
from spmoe_lite.converters import gguf_file as reader
from spmoe_lite.converters.convert import convert
from spmoe_lite.converters.gguf import GgufCheckpoint, is_gguf
from spmoe_lite.converters.gguf_tokenizer import PRE_TOKENIZERS
from spmoe_lite.errors import (
    DamagedError,
    NotFoundError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.manifest import Dtypes
from spmoe_lite.quant import QuantizedMatrix, quantize, unpack_scales
from tests import tiny
from tests.make_pack import bits
from tests.oracle import Oracle
from tests.test_convert import loaded
from tests.test_model import PROMPT, our_logits
from tests.tiny_gguf import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    model,
    pair_rows,
    random_blocks,
    spm_metadata,
    write_gguf,
)

K_QUANTS = ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]


def written(tmp_path: Path, config: dict[str, Any] | None = None, **options: Any) -> Path:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, config or model(), **options)
    return path


def opened(tmp_path: Path, config: dict[str, Any] | None = None, **options: Any) -> GgufCheckpoint:
    return GgufCheckpoint(written(tmp_path, config, **options))


# --- weights
# ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_fp32_weights_come_back_bit_for_bit_under_their_names(tmp_path, kind, stacked):
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, model(kind), stacked=stacked)
    source = GgufCheckpoint(path)
    assert source.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert source.tensors[name].shape == tuple(tensor.shape), name
        assert source.tensors[name].dtype == "fp32"
        assert torch.equal(source.read(name), tensor), name


@pytest.mark.parametrize(
    "kind, dtype, bound",
    [("F16", "fp16", 0), ("BF16", "bf16", 0)]
    + [("Q8_0", "fp32", 1e-2), ("Q4_0", "fp32", 0.2), ("Q4_1", "fp32", 0.2)]
    + [("Q5_0", "fp32", 0.1), ("Q5_1", "fp32", 0.1)],
)
def test_stored_kinds_are_dequantised_by_the_reference(tmp_path, kind, dtype, bound):
    config = model("mixtral")
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, config, kind=kind)
    source = GgufCheckpoint(path)
    number = GGMLQuantizationType[kind]
    for name, tensor in tensors.items():
        found = source.read(name)
        if tensor.ndim == 1:
            assert torch.equal(found, tensor)
            continue
        assert source.tensors[name].dtype == dtype
        packed = gguf.quants.quantize(tensor.numpy(), number)  # rows are quantised one by one
        expected = torch.from_numpy(gguf.quants.dequantize(packed, number))
        assert torch.equal(found.float(), expected), name
        if bound:
            assert (expected - tensor).abs().max() < bound * tensor.abs().max(), name
        else:
            assert torch.equal(found, tensor.to(found.dtype)), name


def test_quantised_weights_are_packed_as_bf16_unless_a_precision_is_named(tmp_path, caplog):
    source = written(tmp_path, model("mixtral"), kind="Q8_0")  # the norms are F32
    for asked, dtypes, said in [
        (
            {},
            ("bf16", "bf16"),
            "--dense fp32 --experts fp32 keeps every bit, in twice the space, --dense int8 "
            "--experts int8 the codes as they are",
        ),
        ({"experts": "fp32"}, ("bf16", "fp32"), "; --dense fp32 keeps every bit"),
        ({"experts": "fp32", "dense": "fp16"}, ("fp16", "fp32"), ""),
    ]:
        caplog.clear()
        result = convert(source, out=tmp_path / "o.spmoe", force=True, **asked)
        assert (result.plan.dtypes.dense, result.plan.dtypes.experts) == dtypes
        assert said in caplog.text and bool(caplog.text) == bool(said)
    plain = written(tmp_path, model("mixtral"), kind="F16")
    assert convert(plain, out=tmp_path / "p.spmoe").plan.dtypes.experts == "fp16"
    assert not caplog.text


@pytest.mark.parametrize("data", [b"", b"GGUF", b"GGUF\3\0\0\0" + b"\xff" * 16, b"<html>"])
def test_kind_j_a_damaged_header_says_what_to_do(tmp_path, data):
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(DamagedError, match="; download it again$"):
        GgufCheckpoint(tmp_path / "m.gguf")


def q4_k_block(block: bytes) -> list[float]:
    """256 weights of one Q4_K block: d, dmin fp16; 8 scales and 8 minima of 6 bits; 4-bit
    values."""
    d, dmin = np.frombuffer(block[:4], np.float16).astype(np.float32)
    packed, quants = block[4:16], block[16:]
    out = []
    for group in range(8):
        if group < 4:
            scale, low = packed[group] & 63, packed[group + 4] & 63
        else:
            scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            low = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        for i in range(32):
            byte = quants[group // 2 * 32 + i]
            value = byte >> 4 if group % 2 else byte & 15
            out.append(np.float32(d * np.float32(scale)) * value - np.float32(dmin * low))
    return out


def q6_k_block(block: bytes) -> list[float]:
    """256 weights of one Q6_K block: 4 low bits, 2 high bits, 16 scales of 8 bits, d fp16."""
    low, high = block[:128], block[128:192]
    scales = np.frombuffer(block[192:208], np.int8)
    d = np.frombuffer(block[208:], np.float16).astype(np.float32)[0]
    out = []
    for i in range(256):
        half, rest = divmod(i, 128)
        quarter, lane = divmod(rest, 32)
        nibble = low[half * 64 + quarter % 2 * 32 + lane] >> (4 * (quarter // 2)) & 15
        bits = high[half * 32 + lane] >> (2 * quarter) & 3
        out.append(np.float32(d * scales[i // 16]) * ((nibble | bits << 4) - 32))
    return out


@pytest.mark.parametrize("kind, unpack", [("Q4_K", q4_k_block), ("Q6_K", q6_k_block)])
def test_k_quants_follow_the_block_layout(tmp_path, kind, unpack):
    config = model(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    source = opened(tmp_path, config, kind=kind)
    blocks = random_blocks(GGMLQuantizationType[kind], tiny.VOCAB)[:8]
    expected = torch.tensor([unpack(block.tobytes()) for block in blocks])
    found = source.read("model.embed_tokens.weight", rows=range(8))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", K_QUANTS)
def test_reading_in_pieces_gives_the_same_numbers(tmp_path, kind, monkeypatch):
    config = model(hidden_size=256, intermediate_size=256, head_dim=64, num_hidden_layers=1)
    source = opened(tmp_path, config, kind=kind)
    number = GGMLQuantizationType[kind]
    block, _ = gguf.GGML_QUANT_SIZES[number]
    raw = random_blocks(number, tiny.VOCAB * 256 // block).reshape(tiny.VOCAB, -1)
    monkeypatch.setattr(reader, "CHUNK_BYTES", 3 * raw.shape[1])
    expected = torch.from_numpy(gguf.quants.dequantize(raw, number))
    assert torch.equal(source.read("model.embed_tokens.weight"), expected)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_parts_of_a_tensor_are_slices_of_the_whole(tmp_path, kind):
    source = opened(tmp_path, model("mixtral"), kind=kind)
    for name in source.tensors:
        whole = source.read(name)
        for first, last in [(0, len(whole)), (0, 1), (3, 4), (len(whole) // 3, len(whole) - 1)]:
            if first < last <= len(whole):
                out = torch.full_like(whole[first:last], float("nan"))
                assert source.read(name, rows=range(first, last), out=out) is out
                assert torch.equal(out, whole[first:last]), (name, first, last)


def test_one_expert_of_a_stack_is_read_alone(tmp_path, monkeypatch):
    source = opened(tmp_path, model("mixtral"), kind="Q8_0")
    read = []

    def counting(handle, buffer, start):
        read.append(len(buffer))
        handle.seek(start)
        return handle.readinto(buffer)

    monkeypatch.setattr(reader, "read_at", counting)
    source.read("model.layers.1.block_sparse_moe.experts.2.w3.weight")
    assert sum(read) == 96 * 64 // 32 * 34


def test_bias_rows_of_q_and_k_are_reordered_too(tmp_path):
    biases = {
        f"blk.{i}.attn_{p}.bias": n
        for i in (0, 1)
        for p, n in zip("qkv", (64, 32, 32), strict=True)
    }
    values = {name: np.arange(n, dtype=np.float32) for name, n in biases.items()}
    stored = {
        name: pair_rows(v[:, None], 4 if "_q" in name else 2)[:, 0] if "_v" not in name else v
        for name, v in values.items()
    }
    source = opened(tmp_path, extra=stored)
    assert source.config["attention_bias"] is True
    for proj in "qkv":
        found = source.read(f"model.layers.1.self_attn.{proj}_proj.bias")
        assert torch.equal(found, torch.from_numpy(values[f"blk.1.attn_{proj}.bias"])), proj


def test_conversion_from_gguf_gives_the_pack_of_the_checkpoint(tmp_path):
    folder = tiny.tiny_mixtral(tmp_path / "hf", hidden=64, intermediate=96, theta=10000.0)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = tiny.random_tensors(config, seed=0, dtype=torch.float32)
    write_gguf(tmp_path / "m.gguf", config, tensors=tensors)
    one = convert(folder, out=tmp_path / "one.spmoe").path
    two = convert(tmp_path / "m.gguf", out=tmp_path / "two.spmoe").path
    files = [json.loads((p / "manifest.json").read_text(encoding="utf-8")) for p in (one, two)]
    weights = [{n: f for n, f in m["files"].items() if "safetensors" in n} for m in files]
    assert weights[0] == weights[1] and len(weights[0]) == 3
    assert files[0]["model"] == files[1]["model"]
    texts = "the quick brown fox", "[INST] 12 [/INST]\n", "naïve ☃"
    tokenizers = [Tokenizer.from_file(str(p / "tokenizer.json")) for p in (one, two)]
    assert all(tokenizers[0].encode(t).ids == tokenizers[1].encode(t).ids for t in texts)


# --- codes that are kept
# --------------------------------------------------------------------------------


def stored(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    """What a tensor becomes in `kind`, by the format's own package, row by row."""
    number = GGMLQuantizationType[kind]
    return torch.from_numpy(
        gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), number), number)
    )


def packed_under_hf_names(path: Path) -> dict[str, Any]:
    _, dense, experts = loaded(path)
    found = {}
    for name, weight in dense.items():
        if name.startswith("layers."):
            layer, kind, end = name.removeprefix("layers.").rsplit(".", 2)
            names = {"router": "block_sparse_moe.gate"} | {
                f"{k}_norm": v
                for k, v in (("input", "input_layernorm"), ("post", "post_attention_layernorm"))
            }
            block = "mlp" if kind in ("gate_proj", "up_proj", "down_proj") else "self_attn"
            name = f"layers.{layer}.{names.get(kind, f'{block}.{kind}')}.{end}"
        found[name if name.startswith("lm_head") else f"model.{name}"] = weight
    for layer, row in enumerate(experts):
        for expert, matrices in enumerate(row):
            for w, weight in zip(("w1", "w3", "w2"), matrices, strict=True):
                at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}"
                found[f"{at}.{w}.weight"] = weight
    return found


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("group", [None, 32])
@pytest.mark.parametrize(
    "kind, asked, dtype", [("Q4_0", "int4", "int4-g32"), ("Q8_0", "int8", "int8-g32")]
)
def test_codes_are_kept_where_the_scheme_holds_them(
    tmp_path, kind, asked, dtype, group, stacked, caplog
):
    """Rows of q and k change their places on the way, and every value stays what the file says."""
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, model("mixtral"), kind=kind, stacked=stacked)
    options = {"experts": asked, "dense": asked, "embed": asked, "group": group}
    pack = convert(path, out=tmp_path / "o.spmoe", **options).path
    assert loaded(pack)[0] == Dtypes("bf16", dtype, dtype, dtype) and not caplog.text
    ours = packed_under_hf_names(pack)
    assert ours.keys() == tensors.keys()
    for name, weight in ours.items():
        if isinstance(weight, QuantizedMatrix):
            assert torch.equal(weight.dequantize(), stored(tensors[name], kind)), name
    assert sum(isinstance(weight, QuantizedMatrix) for weight in ours.values()) == 34
    assert convert(path, out=pack, **options).already_there
    with pytest.raises(UsageError, match="other weights or options"):
        convert(path, out=pack)


@pytest.mark.parametrize(
    "kind, options, dtype, count",
    [
        ("Q4_0", {"experts": "int4", "group": 64}, "int4-g64z", 24),
        ("Q4_0", {"experts": "int8"}, "int8-g64", 24),
        ("Q8_0", {"experts": "int4"}, "int4-g64z", 24),
        ("Q5_1", {"experts": "int4", "dense": "int4"}, "int4-g64z", 32),
        ("Q4_1", {"experts": "int4", "dense": "int4", "group": 32}, "int4-g32z", 32),
        ("Q4_0", {"experts": "int4", "dense": "int8"}, "int4-g32", 8),
    ],
)
def test_other_schemes_are_quantised_from_the_values_and_counted(
    tmp_path, kind, options, dtype, count, caplog
):
    path = tmp_path / "m.gguf"
    tensors = write_gguf(path, model("mixtral", intermediate_size=128), kind=kind)
    pack = convert(path, out=tmp_path / "o.spmoe", **options).path
    assert caplog.text.count(f"{count} matrices are quantised in another way") == 1
    dtypes = loaded(pack)[0]
    assert dtypes.experts == dtype
    for name, weight in packed_under_hf_names(pack).items():
        values, found = stored(tensors[name], kind) if tensors[name].ndim > 1 else None, weight
        if isinstance(found, QuantizedMatrix) and str(found.scheme) != "int4-g32":
            assert bits(found) == bits(quantize(values, found.scheme)), name


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
@pytest.mark.parametrize("columns", [32, 96, 256])
def test_every_block_is_repacked_to_the_bit(kind, columns):
    """Random bits: negative scales, subnormal ones, code -128; an odd number of blocks is filled up."""
    number = GGMLQuantizationType[kind]
    rng = np.random.default_rng(columns)
    raw = rng.integers(0, 256, (6, columns // 32, gguf.GGML_QUANT_SIZES[number][1]), np.uint8)
    scales = rng.normal(0, 1e-4, raw.shape[:2]).astype(np.float16)
    scales[0, 0], scales[1, 0] = 3e-7, -0.0
    raw[:, :, :2] = scales[:, :, None].view(np.uint8)
    raw[2, 0, 2:] = 128
    raw = raw.reshape(6, -1)
    matrix = reader.repack_blocks(torch.from_numpy(raw), number)
    assert matrix is not None and matrix.shape == (6, columns)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, number))
    assert torch.equal(matrix.dequantize(), expected)
    found, _ = unpack_scales(matrix.scales, matrix.scheme)
    assert torch.equal(found[: columns // 32].t(), torch.from_numpy(scales).float())


def q4_1(scales: np.ndarray, minima: np.ndarray, seed: int = 0) -> np.ndarray:
    """Rows of Q4_1 [rows, bytes] with these scales and minima [rows, groups] and random codes."""
    raw = np.random.default_rng(seed).integers(0, 256, (*scales.shape, 20), np.uint8)
    raw[:, :, :2] = scales.astype(np.float16)[:, :, None].view(np.uint8)
    raw[:, :, 2:4] = minima.astype(np.float16)[:, :, None].view(np.uint8)
    return raw.reshape(len(scales), -1)


def test_q4_1_is_exact_where_its_minimum_is_a_zero():
    rng = np.random.default_rng(1)
    scales = torch.from_numpy(rng.uniform(0.01, 0.1, (6, 3))).bfloat16().float().numpy()
    zeros = rng.integers(0, 16, (6, 3))
    zeros[0, 0], zeros[0, 1] = 0, 15
    minima = -zeros * scales
    number = GGMLQuantizationType.Q4_1

    def repacked(scales: np.ndarray, minima: np.ndarray) -> QuantizedMatrix | None:
        raw = q4_1(scales, minima)
        matrix = reader.repack_blocks(torch.from_numpy(raw), number)
        if matrix is not None:
            expected = torch.from_numpy(gguf.quants.dequantize(raw, number))
            assert torch.equal(matrix.dequantize(), expected)
        return matrix

    minima = minima.astype(np.float16).astype(np.float32)
    whole = minima == -zeros * scales  # 15 times 8 bits may need 12
    minima[~whole], zeros[~whole] = -8 * scales[~whole], 8
    matrix = repacked(scales, minima)
    assert matrix is not None and whole.sum() > 6
    assert (unpack_scales(matrix.scales, matrix.scheme)[1][:3].t().numpy() == zeros).all()
    for row, group, scale, minimum in [
        (5, 2, 0.0625, 0.0625),  # a zero of -1
        (5, 2, 0.0625, -1.0),  # of 16
        (5, 2, 0.0625, -0.09375),  # of 1.5
        (0, 0, 1 + 2**-9, 0.0),  # a scale of 10 bits
        (0, 0, -0.0625, 0.5),  # a negative one
        (0, 0, 0.0, 0.5),  # a constant
        (3, 1, float("nan"), 0.0),
        (3, 1, float("inf"), 0.0),
    ]:
        other, lower = scales.copy(), minima.copy()
        other[row, group], lower[row, group] = scale, minimum
        assert repacked(other, lower) is None or scale == float("inf"), (scale, minimum)
    zero = scales.copy()
    zero[4, 1] = 0  # nothing but zeros
    assert repacked(zero, np.where(zero == 0, 0, minima)) is not None


def test_q4_1_keeps_the_matrices_that_fit_and_quantises_the_rest(tmp_path):
    path, config = tmp_path / "m.gguf", model("llama")
    shape = {"blk.0.ffn_up.weight": (96, 2), "blk.1.attn_q.weight": (64, 2)}
    extra = {}
    for name, (rows, groups) in shape.items():
        scales = np.full((rows, groups), 2.0**-5)
        scales[7] = 2.0**-4
        extra[name] = q4_1(scales, -5 * scales)
    write_gguf(path, config, kind="Q4_1", drop=tuple(extra), extra=extra, extra_kind="Q4_1")
    pack = convert(path, out=tmp_path / "o.spmoe", dense="int4", group=32).path
    ours, source = packed_under_hf_names(pack), GgufCheckpoint(path)
    kept = {
        name
        for name, weight in ours.items()
        if isinstance(weight, QuantizedMatrix)
        and torch.equal(weight.dequantize(), source.read(name))
    }
    assert kept == {"model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.weight"}


@pytest.mark.parametrize("kind, asked", [("Q4_0", "int4"), ("Q8_0", "int8")])
def test_logits_are_those_of_the_values_in_the_file(tmp_path, kind, asked):
    folder = tiny.tiny_mixtral(
        tmp_path / "hf", hidden=64, intermediate=96, theta=1e4, shards=1, index=False
    )
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors = tiny.random_tensors(config, seed=0, dtype=torch.float32)
    write_gguf(tmp_path / "m.gguf", config, kind=kind, tensors=tensors)
    values = {n: stored(t, kind) if t.ndim > 1 else t for n, t in tensors.items()}
    save_file(values, folder / "model.safetensors")
    expected = Oracle(folder).logits(PROMPT)
    options = {"experts": asked, "dense": asked, "embed": "fp32"}
    pack = convert(tmp_path / "m.gguf", out=tmp_path / "o.spmoe", **options).path
    assert np.abs(our_logits(pack, PROMPT).numpy() - expected).max() < 1e-4


# --- what the model is
# --------------------------------------------------------------------------------


def test_config_in_hugging_face_spelling(tmp_path):
    config = opened(tmp_path).config
    assert config["model_type"] == "llama" and config["tie_word_embeddings"] is False
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 10000.0
    ours = ModelConfig.from_hf(config)
    assert (ours.family, ours.hidden_size, ours.head_dim) == ("llama", 64, 16)
    assert (ours.bos_token_id, ours.eos_token_ids) == (1, (2,))


def test_heads_are_tied_when_the_file_has_none(tmp_path):
    source = opened(tmp_path, drop=("output.weight",))
    assert source.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in source.tensors


def test_mixtral_and_sliding_window(tmp_path):
    config = opened(tmp_path, model("mixtral")).config
    assert config["model_type"] == "mixtral"
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (4, 2)
    window = {"llama.attention.sliding_window": 128}
    config = opened(tmp_path, metadata=window).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 128)


def test_every_token_that_ends_a_turn_ends_an_answer(tmp_path):
    source = opened(tmp_path, metadata={"tokenizer.ggml.eot_token_id": 7})
    assert source.generation_config == {"bos_token_id": 1, "eos_token_id": [2, 7]}
    files = source.text_files()
    assert json.loads(files["generation_config.json"])["eos_token_id"] == [2, 7]
    assert Tokenizer.from_str(files["tokenizer.json"].decode()).decode([7]) == ""  # special


@pytest.mark.parametrize(
    "keys, expected",
    [
        ({"llama.rope.freq_base": None}, (10000.0, None)),
        ({"llama.rope.freq_base": 1e6}, (1e6, None)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, (1e4, None)),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, (1e4, 4.0)),
        ({"llama.rope.scale_linear": 2.5}, (1e4, 2.5)),
    ],
)
def test_rope_base_and_linear_scaling(tmp_path, keys, expected):
    rope = ModelConfig.from_hf(opened(tmp_path, metadata=keys).config).rope
    assert rope.theta == expected[0]
    assert rope.kind == ("default" if expected[1] is None else "linear")
    assert rope.factor == (expected[1] or 1.0)


def llama3_divisors(theta: float, dim: int, factor: float, high: float = 4.0) -> list[float]:
    """Llama 3's rope in its own words: which frequency is divided by what."""
    divisors = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < 8192 / high:
            divisors.append(1.0)
        elif wavelength > 8192:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (high - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_found_again(tmp_path, factor):
    freqs = np.array(llama3_divisors(5e5, 16, factor), np.float32)
    source = opened(
        tmp_path,
        extra={"rope_freqs.weight": freqs},
        metadata={"llama.rope.freq_base": 5e5},
    )
    rope = ModelConfig.from_hf(source.config).rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == (
        ("llama3", factor, 1.0, 4.0)
    )
    assert rope.original_max_position_embeddings == 8192
    assert "rope_freqs.weight" not in source.tensors


def test_other_frequency_tables_are_refused(tmp_path):
    freqs = np.array(llama3_divisors(5e5, 16, 8.0, high=8.0), np.float32)
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        opened(
            tmp_path,
            extra={"rope_freqs.weight": freqs},
            metadata={"llama.rope.freq_base": 5e5},
        )


@pytest.mark.parametrize(
    "keys, word",
    [
        ({"general.architecture": "qwen2moe"}, "qwen2moe"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 8}, "dimension_count"),
        ({"llama.attention.value_length": 8}, "value_length"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.logit_scale": 0.5}, "logit_scale"),
        ({"llama.expert_shared_count": 1}, "expert_shared_count"),
        ({"tokenizer.ggml.pre": "cuneiform"}, "cuneiform"),
        ({"tokenizer.ggml.model": "bert"}, "bert"),
        ({"tokenizer.ggml.model": None}, "tokenizer"),
    ],
)
def test_what_would_run_wrongly_is_refused_by_name(tmp_path, keys, word):
    path = tmp_path / "tiny.gguf"
    arch = keys.pop("general.architecture", None)
    write_gguf(path, model(), metadata=keys)
    if arch:
        data = path.read_bytes()
        at = data.index(b"general.architecture") + len("general.architecture") + 4
        path.write_bytes(data[:at] + struct.pack("<Q", 5) + b"gemma" + data[at + 13 :])
        word = "gemma"
    with pytest.raises(UnsupportedError, match=word):
        GgufCheckpoint(path).text_files()


def test_tensors_of_other_models_are_refused(tmp_path):
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    with pytest.raises(UnsupportedError, match=r"blk\.0\.attn_q_norm"):
        opened(tmp_path, extra=extra)


def test_numbers_of_the_wrong_shape_are_refused(tmp_path):
    for key in ("split.count", "llama.logit_scale", "llama.expert_count"):
        with pytest.raises(DamagedError, match=key):
            opened(tmp_path, metadata={key: [1, 2]})
    with pytest.raises(DamagedError, match="expert_count"):
        opened(tmp_path, metadata={"llama.expert_count": 2**31})


def test_layers_that_agree_may_be_listed_one_by_one(tmp_path):
    config = opened(tmp_path, metadata={"llama.attention.head_count_kv": [2, 2]}).config
    assert config["num_key_value_heads"] == 2


def test_gguf_files_are_known_by_their_magic(tmp_path):
    path = written(tmp_path)
    other = path.rename(tmp_path / "model.bin")
    assert is_gguf(other)
    (tmp_path / "x").write_bytes(b"PK\x03\x04")
    assert not is_gguf(tmp_path / "x") and not is_gguf(tmp_path)


# --- split files
# --------------------------------------------------------------------------------------


def split(tmp_path: Path) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """A model in two parts: the first has the metadata, the second only its own tensors."""
    names = [tmp_path / f"m-{i:05}-of-00002.gguf" for i in (1, 2)]
    config = model()
    top = ("token_embd.weight", "output.weight", "output_norm.weight")
    tensors = write_gguf(
        names[0],
        config,
        drop=top,
        metadata={"split.count": 2, "split.no": 0},
        extra={"token_embd.weight": np.zeros((tiny.VOCAB, 64), np.float32)},
    )
    writer = GGUFWriter(str(names[1]), "llama")
    writer.add_uint32("split.count", 2)
    writer.add_uint32("split.no", 1)
    writer.add_tensor("output.weight", tensors["lm_head.weight"].numpy())
    writer.add_tensor("output_norm.weight", tensors["model.norm.weight"].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return names, tensors


@pytest.mark.parametrize("named", [0, 1])
def test_split_files_are_read_together_whichever_part_is_named(tmp_path, named):
    parts, tensors = split(tmp_path)
    source = GgufCheckpoint(parts[named])
    assert torch.equal(source.read("lm_head.weight"), tensors["lm_head.weight"])
    assert source.identity()["files"].keys() == {part.name for part in parts}
    assert source.config["model_type"] == "llama"


def test_missing_and_renamed_parts_are_refused_by_name(tmp_path):
    parts, _ = split(tmp_path)
    alone = parts[1].rename(tmp_path / "alone.gguf")
    with pytest.raises(NotFoundError, match="m-00002-of-00002.gguf"):
        GgufCheckpoint(parts[0])
    with pytest.raises(SpmoeError, match="parts"):
        GgufCheckpoint(parts[0].rename(tmp_path / "first.gguf"))
    with pytest.raises(SpmoeError):
        GgufCheckpoint(alone)


# --- files that lie
# -----------------------------------------------------------------------------------


def kv(key: str, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    head = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def raw(tensors: int, keys: int, body: bytes, version: int = 3, tail: int = 4096) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + body + bytes(tail)


HUGE = 2**62
LIES = {
    "empty": b"",
    "magic": b"GGML" + bytes(100),
    "magic only": b"GGUF",
    "tensor count": raw(HUGE, 0, b""),
    "key count": raw(0, HUGE, b""),
    "key of two lines": raw(0, 1, kv("a\nb", 99, b"")),
    "key without end": raw(0, 1, kv("a" * 3000, 0, b"1")),
    "name of two lines": raw(1, 0, info("t\nu", [0])),
    "alignment of a gigabyte": raw(0, 1, kv("general.alignment", 4, struct.pack("<I", 1 << 30))),
    "key length": raw(0, 1, struct.pack("<Q", HUGE) + b"abc"),
    "key not utf-8": raw(0, 1, struct.pack("<Q", 3) + b"\xff\xfe\xfd" + struct.pack("<IB", 0, 1)),
    "value type": raw(0, 1, kv("a", 99, b"")),
    "string length": raw(0, 1, kv("a", 8, struct.pack("<Q", HUGE))),
    "array of strings": raw(0, 1, kv("a", 9, struct.pack("<IQ", 8, HUGE))),
    "array of numbers": raw(0, 1, kv("a", 9, struct.pack("<IQ", 4, HUGE))),
    "array of arrays": raw(0, 1, kv("a", 9, struct.pack("<IQ", 9, 4)) + bytes(99)),
    "array count": raw(0, 1, kv("a", 9, struct.pack("<IQ", 0, 4200)) + b""),
    "key twice": raw(0, 2, kv("a", 0, b"1") * 2),
    "alignment zero": raw(0, 1, kv("general.alignment", 4, struct.pack("<I", 0))),
    "alignment three": raw(0, 1, kv("general.alignment", 4, struct.pack("<I", 3))),
    "alignment text": raw(0, 1, kv("general.alignment", 8, struct.pack("<Q", 1) + b"x")),
    "no dimensions": raw(1, 0, info("t", [])),
    "many dimensions": raw(1, 0, info("t", [1] * 5)),
    "a million dimensions": raw(1, 0, info("t", [])[:-16] + struct.pack("<I", 10**6)),
    "zero rows": raw(1, 0, info("t", [32, 0])),
    "huge rows": raw(1, 0, info("t", [HUGE, HUGE])),
    "wraps around": raw(1, 0, info("t", [2**32, 2**30])),
    "offset": raw(1, 0, info("t", [32], offset=HUGE)),
    "offset wraps": raw(1, 0, info("t", [32], offset=2**64 - 64)),
    "half a block": raw(1, 0, info("t", [33], kind=8)),
    "overlap": raw(2, 0, info("t", [64]) + info("u", [64], offset=32)),
    "tensor twice": raw(2, 0, info("t", [64]) + info("t", [64], offset=256)),
    "no metadata": raw(1, 0, info("token_embd.weight", [32, 4])),
}


@pytest.mark.parametrize("name", LIES)
def test_lies_are_refused_before_anything_is_allocated(tmp_path, name):
    path = tmp_path / "lie.gguf"
    path.write_bytes(LIES[name])
    tracemalloc.start()
    try:
        with pytest.raises(DamagedError) as caught:
            GgufCheckpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and "lie.gguf" in str(caught.value)
    assert peak < 8 << 20


@pytest.mark.parametrize(
    "data, word",
    [
        (raw(0, 0, b"", version=1), "version 1"),
        (raw(0, 0, b"", version=99), "version 99"),
        (raw(0, 0, b"", version=3 << 24), "big-endian"),
        (raw(1, 0, info("t", [256], kind=16)), "IQ2_XXS"),
        (raw(1, 0, info("t", [256], kind=9999)), "9999"),
    ],
)
def test_other_versions_and_kinds_are_named(tmp_path, data, word):
    path = tmp_path / "other.gguf"
    path.write_bytes(data)
    with pytest.raises(UnsupportedError, match=word):
        GgufCheckpoint(path)


def test_metadata_of_the_wrong_type_names_the_key(tmp_path):
    for key, value in {"llama.block_count": "two", "tokenizer.ggml.tokens": 5}.items():
        with pytest.raises(DamagedError, match=key):
            opened(tmp_path, metadata={key: value}).text_files()
    with pytest.raises(DamagedError, match=r"llama\.block_count is missing"):
        opened(tmp_path, metadata={"llama.block_count": None})


def test_every_cut_of_the_file_is_refused(tmp_path):
    whole = written(tmp_path).read_bytes()
    path = tmp_path / "cut.gguf"
    ends = itertools.chain(range(0, 2000, 37), range(2000, len(whole), 4001), [len(whole) - 1])
    for end in ends:
        path.write_bytes(whole[:end])
        with pytest.raises(DamagedError):
            GgufCheckpoint(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz") / "whole.gguf"
    write_gguf(path, model("mixtral", num_hidden_layers=1))
    return path


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2**31), st.binary(min_size=1, max_size=8)), max_size=3))
def test_altered_files_are_refused_or_read(whole, changes):
    data = bytearray(whole.read_bytes())
    header = len(data) - sum(t.size for t in GgufCheckpoint(whole).gguf_tensors.values())
    for at, value in changes:
        at %= header
        data[at : at + len(value)] = value
    path = whole.with_name("altered.gguf")
    path.write_bytes(data)
    try:
        source = GgufCheckpoint(path)
        source.text_files()
        ModelConfig.from_hf(source.config, source.generation_config)
        for name in list(source.tensors)[:3]:
            source.read(name)
    except SpmoeError as error:
        assert "\n" not in str(error) and len(str(error)) < 500


def test_a_file_cut_after_opening_is_noticed(tmp_path):
    path = written(tmp_path)
    source = GgufCheckpoint(path)
    name = max(source.tensors, key=lambda n: source.tensors[n].start)
    path.write_bytes(path.read_bytes()[: source.tensors[name].start + 8])
    with pytest.raises(DamagedError, match="ends inside"):
        source.read(name)


# --- tokenizer
# ----------------------------------------------------------------------------------------

TEXTS = [
    "",
    " ",
    "the quick brown fox jumps over the lazy dog",
    "  two  spaces and a tab\t end ",
    "Hello, World! It's 2026 and they're not DON'T",
    "line\nline\r\n\n\n  indented",
    "naïve café ☃ 日本語 🙂‍↔️ e\u0301",
    "12345678 3.14159 1,000",
    "<s>[INST] hi [/INST]</s> and <unk>",
    "\u00a0\u2003\u200b",
]


def rebuilt(source: GgufCheckpoint) -> Tokenizer:
    return Tokenizer.from_str(source.text_files()["tokenizer.json"].decode("utf-8"))


def test_byte_level_tokenizer_is_the_one_it_was_made_from(tmp_path):
    original, ours = tiny.byte_level_tokenizer(), rebuilt(opened(tmp_path))
    for text in TEXTS:
        assert ours.encode(text).ids == original.encode(text).ids, text
        ids = original.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == original.decode(ids), text
    assert ours.get_vocab() == original.get_vocab()


def test_begin_token_follows_the_metadata(tmp_path):
    for keys, expected in [
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": None}, False),
        ({"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}, True),
    ]:
        source = opened(tmp_path, metadata=keys)
        assert (rebuilt(source).encode("a").ids[0] == tiny.BOS) is expected, keys
        settings_ = json.loads(source.text_files()["tokenizer_config.json"])
        assert settings_["add_bos_token"] is expected
        assert (settings_["bos_token"], settings_["eos_token"]) == ("<s>", "</s>")


def test_chat_template_is_kept_to_the_byte(tmp_path):
    files = opened(tmp_path).text_files()
    assert files["chat_template.jinja"].decode("utf-8") == tiny.CHAT_TEMPLATE
    files = opened(tmp_path, metadata={"tokenizer.chat_template": None}).text_files()
    assert "chat_template.jinja" not in files


CUTS = {  # how "Hi they'RE 12345 x\n\n y" is cut before the merges
    "gpt-2": ["Hi", " they", "'", "RE", " 12345", " x", "\n\n", " y"],
    "smollm": ["Hi", " they", "'", "RE", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"],
    "llama-bpe": ["Hi", " they", "'RE", " ", "123", "45", " x", "\n\n", " y"],
    "qwen2": ["Hi", " they", "'RE", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"],
    "tekken": ["Hi", " they", "'RE", " ", "1", "2", "3", "4", "5", " x", "\n\n", " y"],
    "default": ["Hi", " they", "'", "RE", " ", "123", "45", " x", "\n\n", " y"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_pre_tokenizers_cut_as_their_models_do(tmp_path, pre):
    ours = rebuilt(opened(tmp_path, metadata={"tokenizer.ggml.pre": pre}))
    to_char = {c: b for b, c in byte_chars().items()}
    pieces = [p for p, _ in ours.pre_tokenizer.pre_tokenize_str("Hi they'RE 12345 x\n\n y")]
    decoded = [bytes(to_char[c] for c in piece).decode("utf-8") for piece in pieces]
    assert decoded == CUTS[pre]


def byte_chars() -> dict[int, str]:
    """GPT-2's printable stand-ins of the 256 bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + i) for i, b in enumerate(others)}


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_no_pre_tokenizer_loses_text(tmp_path, pre):
    ours = rebuilt(opened(tmp_path, metadata={"tokenizer.ggml.pre": pre}))
    for text in TEXTS:
        ids = ours.encode(text, add_special_tokens=False).ids
        normal = ours.normalizer.normalize_str(text) if ours.normalizer else text
        assert ours.decode(ids, skip_special_tokens=False) == normal, (pre, text)


def test_control_and_user_tokens_are_found_in_the_text(tmp_path):
    types = [CONTROL] * 3 + [NORMAL] * (tiny.VOCAB - 4) + [USER_DEFINED]
    source = opened(tmp_path, metadata={"tokenizer.ggml.token_type": types})
    ours = rebuilt(source)
    user = ours.id_to_token(tiny.VOCAB - 1)
    assert ours.encode(f"a</s>{user}b", add_special_tokens=False).ids[1:3] == [2, tiny.VOCAB - 1]
    assert ours.decode([2]) == "" and ours.decode([tiny.VOCAB - 1]) != ""


def naive_sentencepiece(text: str, keys: dict[str, Any]) -> list[int]:
    """SentencePiece's rule as it is stated: join the best-scored pair, leftmost first, until none
    is left."""
    tokens, scores = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.scores"]
    joinable = {NORMAL, UNUSED, USER_DEFINED}
    pieces = {
        t: i for i, t in enumerate(tokens) if keys["tokenizer.ggml.token_type"][i] in joinable
    }
    symbols = list(("▁" + text).replace(" ", "▁")) if text else []
    while True:
        pairs = [
            (-scores[pieces[a + b]], i)
            for i, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in pieces
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = []
    for symbol in symbols:
        if symbol in pieces:
            ids.append(pieces[symbol])
        else:
            ids.extend(tokens.index(f"<0x{byte:02X}>") for byte in symbol.encode("utf-8"))
    return ids


@settings(max_examples=200, deadline=None)
@given(st.text("the andwrsoil.,é☃\n🙂", max_size=24))
def test_sentencepiece_scores_become_the_same_joins(text):
    ours, keys = spm_rebuilt()
    assert ours.encode(text, add_special_tokens=False).ids == naive_sentencepiece(text, keys)


_SPM: list[Any] = []


def spm_rebuilt() -> tuple[Tokenizer, dict[str, Any]]:
    if not _SPM:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            source = opened(Path(folder), tokenizer="spm")
            _SPM.extend([rebuilt(source), spm_metadata()])
    return _SPM[0], _SPM[1]


def test_sentencepiece_begin_token_prefix_and_round_trip(tmp_path):
    ours = rebuilt(opened(tmp_path, tokenizer="spm"))
    assert ours.encode("the").tokens == ["<s>", "▁the"]
    for text in ["the and was", " the", "é☃🙂\n", "in  on"]:
        assert ours.decode(ours.encode(text).ids) == text
    keys = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    bare = rebuilt(opened(tmp_path, tokenizer="spm", metadata=keys))
    assert bare.encode("the and").tokens == ["t", "he", "▁and"] or bare.encode(
        "the and"
    ).tokens == ["t", "h", "e", "▁and"]
    assert bare.decode(bare.encode("the and").ids) == "the and"


def test_sentencepiece_model_gives_the_same_ids(tmp_path):
    spm = pytest.importorskip("sentencepiece")
    text = tmp_path / "text"
    text.write_text("\n".join([tiny.TEXT, *TEXTS[2:8], "aaaa aaa aa baab"] * 6), encoding="utf-8")
    spm.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(tmp_path / "sp"), vocab_size=420, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=0.99, minloglevel=2, num_threads=1,
    )  # fmt: skip
    model_ = spm.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    size = model_.vocab_size()

    def kind(i: int) -> int:
        if model_.is_unknown(i):
            return UNKNOWN
        return CONTROL if model_.is_control(i) else BYTE if model_.is_byte(i) else NORMAL

    keys = {
        "tokenizer.ggml.tokens": [model_.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [float(model_.get_score(i)) for i in range(size)],
        "tokenizer.ggml.token_type": [kind(i) for i in range(size)],
    }
    source = opened(tmp_path, model(vocab_size=size), tokenizer="spm", metadata=keys)
    ours = rebuilt(source)
    for line in [*TEXTS[:8], TEXTS[9], tiny.TEXT, "unseen wörds ∑ and aaaaaaa"]:
        expected = model_.encode(line)
        assert ours.encode(line, add_special_tokens=False).ids == expected, line
        assert ours.decode(expected) == model_.decode(expected), line


@pytest.mark.parametrize(
    "keys, word",
    [
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "token_type has 2 entries"),
        ({"tokenizer.ggml.eos_token_id": 10**6}, "eos_token_id"),
        ({"tokenizer.ggml.merges": ["nospace"]}, "nospace"),
        ({"tokenizer.ggml.merges": ["t zzzz"]}, "zzzz"),
        ({"tokenizer.ggml.merges": ["! !"]}, "cannot be rebuilt"),
        ({"tokenizer.ggml.merges": ["a\nb" * 99]}, "does not join"),
    ],
)
def test_broken_vocabularies_are_refused(tmp_path, keys, word):
    with pytest.raises(DamagedError, match=word):
        opened(tmp_path, metadata=keys).text_files()


# --- the real file
# ------------------------------------------------------------------------------------

SMOLLM2 = {  # text -> ids of the model's published tokenizer
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "\n": [198],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
    "<|im_start|>system\nYou are a helpful": [1, 9690, 198, 2683, 359, 253, 5356],
    " named SmolLM, trained by Hugging Face<|im_end|>\n":
        [3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198],
}  # fmt: skip


@pytest.mark.slow
def test_smollm2_tokenizer_is_the_published_one(demo_packs):
    ours = Tokenizer.from_file(str(demo_packs[1] / "tokenizer.json"))
    for text, ids in SMOLLM2.items():
        assert ours.encode(text).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text
