"""Logits against the independent forward pass and against transformers, in every layout and spelling."""

import json

import numpy as np
import pytest
import torch

from spmoe_lite.converters import convert
from spmoe_lite.engine import Engine
from tests import tiny
from tests.oracle import Oracle

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


def test_manifest_carries_the_same_settings_in_every_spelling(tmp_path):
    models = []
    for name, options in {"a": {}, "b": {"drop": ("head_dim", "sliding_window")}}.items():
        folder = tiny.tiny_mixtral(tmp_path / name, **options)
        pack = convert(folder, out=tmp_path / f"{name}.spmoe").path
        models.append(json.loads((pack / "manifest.json").read_text(encoding="utf-8"))["model"])
    assert models[0] == models[1]
