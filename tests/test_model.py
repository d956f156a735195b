"""Logits against the independent forward pass and against transformers, in every layout and spelling."""

import json

import numpy as np
import pytest
import torch

from spmoe_lite.converters import convert, repack
from spmoe_lite.engine import Engine
from spmoe_lite.quant import QuantizedMatrix
from tests import tiny
from tests.oracle import Oracle
from tests.reference import from_pack

PROMPT = [1, 17, 300, 42, 42, 5, 99, 250, 3, 8, 120]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "mixtral": ("mixtral", {}),
    "mixtral-stacked": ("mixtral", {"spelling": "stacked", "prefix": "mlp"}),
    "mixtral-named": ("mixtral", {"spelling": "named", "model_prefix": False}),
    "mixtral-mixed": ("mixtral", {"spelling": "mixed", "layers": 3}),
    "mixtral-window": ("mixtral", {"sliding_window": 4}),
    "mixtral-one-file": ("mixtral", {"shards": 1, "index": False, "experts": 5, "top_k": 3}),
    "mixtral-odd": (  # every expert chosen, one kv head, a tied head of more rows than tokens
        "mixtral",
        {
            "experts": 3,
            "top_k": 3,
            "tied": True,
            "vocab": 333,
            "kv_heads": 1,
            "hidden": 68,
            "head_dim": 20,
            "intermediate": 37,
        },
    ),
    "mistral": ("mistral", {"layers": 2}),
    "mistral-window": ("mistral", {"sliding_window": 5, "layers": 2}),
    "mistral-head-dim": ("mistral", {"head_dim": 24}),
    "llama": ("llama", {"layers": 2}),
    "llama-tied": ("llama", {"tied": True}),
    "llama-linear": ("llama", {"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}}),
    "llama-llama3": ("llama", {"theta": 5e5, "config": {"rope_scaling": LLAMA3}}),
    "llama-bias": ("llama", {"config": {"attention_bias": True}}),
}


def our_logits(pack, tokens, chunks=None, **options):
    """Teacher-forced logits [T, V] fp32, one row per token; `chunks` are the sizes of the passes."""
    with Engine.load(pack, device="cpu", **options) as engine, torch.inference_mode():
        decoder = engine.decoder
        kv, rows = decoder.session.target_kv, []
        for size in chunks or [len(tokens)]:
            part = tokens[kv.length : kv.length + size]
            rows.append(decoder.target.forward(part, kv, logits_rows=len(part)))
            if decoder.store is not None:
                decoder.store.end_pass(len(part))
        return torch.cat(rows).float().clone()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_oracle(case, tmp_path):
    kind, options = CASES[case]
    folder = tiny.write_model(tmp_path / "hf", kind, **options)
    oracle = Oracle(folder)
    expected = oracle.logits(PROMPT)
    pack = convert(folder, out=tmp_path / "p.spmoe").path
    got = our_logits(pack, PROMPT).numpy()
    assert np.abs(got - expected).max() < 1e-4
    assert np.abs(expected).max() > 0.1  # the comparison would see a model that says nothing


NOT_THEIRS = ("mixtral-named", "mixtral-mixed", "mixtral-odd")  # names and widths it does not take


@pytest.mark.parametrize("case", [c for c in CASES if c not in NOT_THEIRS])
def test_logits_are_those_of_the_reference_library(case, tmp_path):
    transformers = pytest.importorskip("transformers")
    kind, options = CASES[case]
    folder = tiny.write_model(tmp_path / "hf", kind, **options)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    got = our_logits(convert(folder, out=tmp_path / "p.spmoe").path, PROMPT)
    assert (got - expected).abs().max() < 1e-4


def test_kind_b_o8_router_chooses_the_oracle_s_experts(tmp_path):
    folder = tiny.tiny_mixtral(tmp_path / "hf", experts=8, layers=3)
    oracle = Oracle(folder)
    oracle.logits(PROMPT)
    pack = convert(folder, out=tmp_path / "p.spmoe").path
    with Engine.load(pack, device="cpu") as engine, torch.inference_mode():
        engine.decoder.target.forward(PROMPT, engine.decoder.session.target_kv)
        trace = engine.decoder.store.trace
        got = {layer: [set(row) for row in rows] for layer, rows in trace.items()}
    assert got == oracle.routes


def test_kind_c_o5_theta_matters_and_is_read_from_either_place(tmp_path):
    prompt = [1, *(3 + i * 7 % 300 for i in range(99))]
    logits = []
    for name, config in {
        "old": {"rope_theta": 1e6},
        "new": {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "rope_theta": None},
        "other": {"rope_theta": 1e4},
    }.items():
        folder = tiny.tiny_mixtral(tmp_path / name, config=config)
        logits.append(our_logits(convert(folder, out=tmp_path / f"{name}.spmoe").path, prompt))
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2], atol=1e-2)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_packs_run_on_the_cpu_near_the_wide_one(dtype, tmp_path):
    folder = tiny.tiny_mixtral(tmp_path / "hf")
    wide = our_logits(convert(folder, out=tmp_path / "w.spmoe").path, PROMPT)
    pack = convert(folder, out=tmp_path / "n.spmoe", experts=dtype, dense=dtype).path
    mixed = convert(folder, out=tmp_path / "m.spmoe", experts=dtype).path
    bound = {"bf16": 0.08, "fp16": 0.02}[dtype] * float(wide.abs().max())
    assert (our_logits(pack, PROMPT) - wide).abs().max() < bound
    assert (our_logits(mixed, PROMPT) - wide).abs().max() < bound


SCHEMES = {
    "experts int4 g32": {"experts": "int4", "group": 32},
    "experts int8 g64": {"experts": "int8"},
    "experts int4 g64, dense int8, embed int8": {
        "experts": "int4",
        "dense": "int8",
        "embed": "int8",
    },
    "all int4 g128": {"experts": "int4", "dense": "int4", "embed": "int4", "group": 128},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["mixtral", "llama"])
def test_a_quantised_pack_computes_with_the_weights_that_its_codes_stand_for(
    kind, scheme, tied, tmp_path
):
    """Against the same pack with every matrix dequantised, and not the logits of the original."""
    options = {"experts": 5, "top_k": 3} if kind == "mixtral" else {}
    if kind == "llama":  # its qkv bias joins after the quantised product
        options |= {"layers": 2, "config": {"attention_bias": True}}
    folder = tiny.write_model(
        tmp_path / "hf", kind, hidden=128, intermediate=384, tied=tied, **options
    )
    original = our_logits(convert(folder, out=tmp_path / "o.spmoe").path, PROMPT)
    pack = convert(folder, out=tmp_path / "q.spmoe", **SCHEMES[scheme]).path
    got = our_logits(pack, PROMPT)
    repack(pack, experts="fp32", dense="fp32", embed="fp32")
    expected = our_logits(pack, PROMPT)
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()
    changed = kind == "mixtral" or "dense" in SCHEMES[scheme]
    assert ((expected - original).abs().max() > 1e-3 * original.abs().max()) == changed


@pytest.mark.parametrize(
    "kind, asked",
    [
        ("mixtral", {"experts": "int4"}),
        ("mixtral", {"experts": "int8", "dense": "int4", "embed": "int8"}),
        ("llama", {"dense": "int8", "embed": "int4"}),
        ("llama", {"dense": "int4"}),
    ],
)
def test_a_quantised_pack_read_by_the_page_alone_gives_the_reference_library_s_logits(
    kind, asked, tmp_path
):
    pytest.importorskip("transformers")
    pack = tiny.tiny_pack(tmp_path, kind, group=32, tied=kind == "llama", **asked)
    got = our_logits(pack, PROMPT)
    with torch.inference_mode():
        expected = from_pack(pack)(torch.tensor([PROMPT])).logits[0]
    assert (got - expected).abs().max() < 1e-4


def test_experts_matrices_and_embeddings_each_have_their_own_precision(tmp_path):
    """Experts int4, projections int8, embeddings bf16: activations and KV cache are bf16."""
    folder = tiny.tiny_mixtral(tmp_path / "hf", intermediate=192)
    wide = our_logits(convert(folder, out=tmp_path / "w.spmoe").path, PROMPT)
    asked = {"experts": "int4", "dense": "int8", "embed": "bf16"}
    pack = convert(folder, out=tmp_path / "m.spmoe", **asked).path
    with Engine.load(pack, device="cpu") as engine:
        model, kv = engine.decoder.target, engine.decoder.session.target_kv
        assert model.dtype == kv.keys[0].dtype == model.blocks[1].router.dtype == torch.bfloat16
        assert model.embed.dtype == torch.bfloat16
        block = model.blocks[1]
        assert str(block.qkv.scheme) == str(block.o.scheme) == "int8-g64"
        assert block.qkv.shape == (64 + 2 * 32, 64) and block.gate_up is None
        assert model.layout.dtype == "int4-g64z"
    assert (our_logits(pack, PROMPT) - wide).abs().max() < 0.3 * wide.abs().max()


def test_a_tied_head_shares_the_quantised_embeddings(tmp_path):
    folder = tiny.tiny_llama(tmp_path / "hf", tied=True)
    pack = convert(folder, out=tmp_path / "p.spmoe", embed="int8").path
    with Engine.load(pack, device="cpu") as engine:
        model = engine.decoder.target
        assert model.head is model.embed and isinstance(model.head, QuantizedMatrix)


def test_manifest_carries_the_same_settings_in_every_spelling(tmp_path):
    models = []
    for name, options in {"a": {}, "b": {"drop": ("head_dim", "sliding_window")}}.items():
        folder = tiny.tiny_mixtral(tmp_path / name, **options)
        pack = convert(folder, out=tmp_path / f"{name}.spmoe").path
        models.append(json.loads((pack / "manifest.json").read_text(encoding="utf-8"))["model"])
    assert models[0] == models[1]
