"""config.json in every spelling; refusals by name; sampling parameters.

BUGS.md kind A (O6), B (O8), C (O4, O5) and O13, as far as they concern the configuration.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmoe_lite.config import ModelConfig, Rope, SamplingParams
from spmoe_lite.errors import UnsupportedError, UsageError

MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}


def dense(family: str = "llama", **changes: Any) -> dict[str, Any]:
    return without(MIXTRAL, "num_local_experts", "num_experts_per_tok") | {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        **changes,
    }


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_a_mixtral_config_is_read() -> None:
    assert ModelConfig.from_hf(MIXTRAL) == ModelConfig(
        family="mixtral",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        max_position_embeddings=512,
        rope=Rope(1e6),
        num_local_experts=4,
        num_experts_per_tok=2,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1000000},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": None, "rope_scaling": {"rope_theta": 1e6, "type": "default"}},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
        {"rope_parameters": None, "rope_scaling": None},
        {"rope_scaling": {}, "rope_parameters": {}},
        {"head_dim": None},
        {"head_dim": 16},
        {"sliding_window": None},
        {"rope_theta": None},  # and Mixtral's default is the same
        {"num_local_experts": None, "num_experts": 4},
        {"num_experts": 4},
        {"architectures": None},
        {"model_type": None},
        {"quantization_config": None},
        {"tie_word_embeddings": None, "attention_bias": None, "mlp_bias": None},
        {"bos_token_id": 1, "eos_token_id": [2]},
        {"layer_types": ["full_attention", "full_attention"]},
        {"torch_dtype": "bfloat16", "anything": {"new": 1}},
    ],
    ids=str,
)
def test_kind_c_spellings_of_one_model_are_one_config(changes: dict[str, Any]) -> None:
    assert ModelConfig.from_hf(MIXTRAL | changes) == ModelConfig.from_hf(MIXTRAL)
    gone = [key for key, value in changes.items() if value is None]
    assert ModelConfig.from_hf(without(MIXTRAL | changes, *gone)) == ModelConfig.from_hf(MIXTRAL)


@pytest.mark.parametrize(
    "family, theta, window", [("mixtral", 1e6, None), ("mistral", 1e4, 4096), ("llama", 1e4, None)]
)
def test_kind_c_family_defaults_are_said(
    family: str, theta: float, window: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = MIXTRAL if family == "mixtral" else dense(family)
    read = ModelConfig.from_hf(without(config, "rope_theta", "sliding_window"))
    assert (read.rope.theta, read.sliding_window) == (theta, window)
    assert f"no rope_theta; taking {family}'s default, {theta:g}" in caplog.text
    assert ("no sliding_window" in caplog.text) == (window is not None)


def test_kind_c_null_key_value_heads_are_as_many_as_heads() -> None:
    for config in (MIXTRAL, dense("mistral"), dense("llama")):
        read = ModelConfig.from_hf(config | {"num_key_value_heads": None})
        assert read.num_key_value_heads == read.num_attention_heads == 4


def test_no_warning_where_nothing_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    ModelConfig.from_hf(MIXTRAL)
    ModelConfig.from_hf(dense("mistral"))
    assert not caplog.records


SAME_AS_REFERENCE = [
    MIXTRAL,
    without(MIXTRAL, "rope_theta"),
    without(MIXTRAL, "sliding_window", "num_key_value_heads") | {"num_attention_heads": 8},
    MIXTRAL | {"head_dim": 32, "sliding_window": 77},
    without(MIXTRAL, "rope_theta") | {"rope_parameters": {"rope_theta": 5e5}},
    MIXTRAL | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    MIXTRAL | {"rope_scaling": LLAMA3},
    dense("mistral"),
    without(dense("mistral"), "sliding_window", "rms_norm_eps", "rope_theta"),
    dense("mistral", sliding_window=128, head_dim=8),
    dense("llama", rope_scaling=LLAMA3 | {"rope_type": None, "type": "llama3"}),
    without(dense("llama", rope_parameters=LLAMA3 | {"rope_theta": 5e5}), "rope_theta"),
    without(dense("llama"), "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    dense("llama", tie_word_embeddings=True, attention_bias=True),
    dense("llama", rope_scaling=without(LLAMA3, "original_max_position_embeddings")),
]


@pytest.mark.parametrize("number", range(len(SAME_AS_REFERENCE)))
def test_kind_c_the_reference_reads_the_same(number: int) -> None:
    from transformers import AutoConfig

    config = SAME_AS_REFERENCE[number]
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("rope_type", "") is None:  # the reference wants null keys gone
        config = config | {"rope_scaling": without(scaling, "rope_type")}
    config = json.loads(json.dumps(config))  # the reference changes what it is given
    theirs = AutoConfig.for_model(**config)
    ours = ModelConfig.from_hf(SAME_AS_REFERENCE[number])
    rope = theirs.rope_parameters
    assert ours.rope.theta == rope["rope_theta"] and ours.rope.kind == rope["rope_type"]
    for name in ("factor", "low_freq_factor", "high_freq_factor"):
        assert ours.rope.kind == "default" or getattr(ours.rope, name) == rope.get(
            name, getattr(ours.rope, name)
        )
    if ours.rope.kind == "llama3":
        name = "original_max_position_embeddings"
        assert ours.rope.original_max_position_embeddings == rope[name]
    heads = theirs.num_attention_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert ours.sliding_window == getattr(theirs, "sliding_window", None)
    for name in (
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize(
    "config, named",
    [
        ({}, "model_type"),
        ([], "not an object"),
        (MIXTRAL | {"model_type": "qwen2_moe"}, "qwen2_moe"),
        (MIXTRAL | {"model_type": "phimoe"}, "phimoe"),
        (MIXTRAL | {"model_type": "deepseek_v2"}, "deepseek_v2"),
        (MIXTRAL | {"model_type": ["mixtral"]}, "model_type"),
        (MIXTRAL | {"model_type": None, "architectures": ["GPT2LMHeadModel"]}, "gpt2lmhead"),
        (MIXTRAL | {"architectures": ["MixtralForSequenceClassification"]}, "Classification"),
        (MIXTRAL | {"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        (MIXTRAL | {"hidden_act": "gelu"}, "hidden_act"),
        (dense(mlp_bias=True), "mlp_bias"),
        (dense(num_local_experts=8), "experts"),
        (MIXTRAL | {"num_experts": 8}, "num_experts 8"),
        (MIXTRAL | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (MIXTRAL | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (MIXTRAL | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        (MIXTRAL | {"sliding_window": 9, "layer_types": ["full_attention"] * 2}, "layer_types"),
        (MIXTRAL | {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (MIXTRAL | {"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        (MIXTRAL | {"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        (MIXTRAL | {"rope_scaling": {"type": "linear"}}, "factor is missing"),
        (MIXTRAL | {"rope_scaling": {"factor": 2.0}}, "no rope_type"),
        (MIXTRAL | {"rope_scaling": "linear"}, "rope_scaling"),
        (MIXTRAL | {"rope_scaling": {"full_attention": {"rope_theta": 1e6}}}, "rope_scaling"),
        (MIXTRAL | {"rope_scaling": without(LLAMA3, "low_freq_factor")}, "low_freq_factor"),
        (MIXTRAL | {"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        (MIXTRAL | {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta"),
        (
            MIXTRAL | {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear"}},
            "rope_type is 'llama3'",
        ),
        (MIXTRAL | {"num_attention_heads": 5}, "num_attention_heads 5"),
        (MIXTRAL | {"num_key_value_heads": 3}, "num_key_value_heads 3"),
        (MIXTRAL | {"head_dim": 15}, "head_dim 15"),
        (MIXTRAL | {"num_experts_per_tok": 5}, "num_experts_per_tok 5"),
        (MIXTRAL | {"num_experts_per_tok": 0}, "num_experts_per_tok 0"),
        (MIXTRAL | {"bos_token_id": 320}, "bos_token_id 320"),
        (MIXTRAL | {"bos_token_id": [1, 2]}, "bos_token_id"),
        (MIXTRAL | {"eos_token_id": [2, 321]}, "eos_token_id 321"),
        (MIXTRAL | {"eos_token_id": "</s>"}, "eos_token_id"),
        (MIXTRAL | {"tie_word_embeddings": "true"}, "tie_word_embeddings"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kind_b_what_would_run_wrongly_is_refused_by_name(config: Any, named: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        ModelConfig.from_hf(config)
    text = str(caught.value)
    assert named.lower() in text.lower() and "\n" not in text and len(text) < 300


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize(
    "values, method",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "MXFP4"}, "mxfp4"),
        ({"quant_method": "eetq"}, "eetq"),
        ({"quant_method": "quanto"}, "quanto"),
        ({"quant_method": ["awq"]}, "no method named"),
        ("awq", "no method named"),
    ],
)
def test_kind_a_quantised_weights_are_refused_with_the_method(
    key: str, values: Any, method: str
) -> None:
    if key == "compression_config" and method == "no method named":
        method = "compressed-tensors"  # no other method ever wrote that key
    with pytest.raises(UnsupportedError, match=f"\\({method}\\).*fetch the original"):
        ModelConfig.from_hf(MIXTRAL | {key: values}, methods=("awq",))


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_local_experts",
        "num_experts_per_tok",
    ],
)
@pytest.mark.parametrize("value", [None, 0, -1, 1 << 40, 10**400, 2.0, "2", True, [2], {}])
def test_sizes_are_whole_and_bounded(name: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match="num_experts_per_tok|" + name) as caught:
        ModelConfig.from_hf(MIXTRAL | {name: value})
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("place", ["rope_theta", "rms_norm_eps"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, 10**400, "1e6", True, [1e6]])
def test_numbers_are_finite_and_positive(place: str, value: Any) -> None:
    with pytest.raises(UnsupportedError, match=place):
        ModelConfig.from_hf(MIXTRAL | {place: value})


@pytest.mark.parametrize(
    "config, generation, expected",
    [
        (7, [2, 7], (7, 2)),
        ([7], [2, 7], (7, 2)),
        ([7], None, (7,)),
        (None, 2, (2,)),
        (None, None, ()),
        ([2, 2, None], {}, (2,)),
        (-1, -1, ()),
        (0, 0, (0,)),
    ],
)
def test_kind_e_end_tokens_are_the_union(config: Any, generation: Any, expected: tuple) -> None:
    other = generation if generation in ({}, None) else {"eos_token_id": generation}
    assert ModelConfig.from_hf(MIXTRAL | {"eos_token_id": config}, other).eos_token_ids == expected


def test_the_beginning_token_comes_from_either_file() -> None:
    config = without(MIXTRAL, "bos_token_id")
    assert ModelConfig.from_hf(config).bos_token_id is None
    assert ModelConfig.from_hf(config, {"bos_token_id": 5}).bos_token_id == 5
    assert ModelConfig.from_hf(config | {"bos_token_id": 0}, {"bos_token_id": 5}).bos_token_id == 0


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["mixtral", "llama3", "linear", "default", "silu"])
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "factor", "rope_theta", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*MIXTRAL, "rope_scaling", "head_dim"]), JSON, max_size=4))
def test_any_json_is_read_or_refused(changes: dict[str, Any]) -> None:
    try:
        config = ModelConfig.from_hf(MIXTRAL | changes)
    except UnsupportedError as error:
        assert "\n" not in str(error)
    else:
        assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


# Sampling


@pytest.mark.parametrize(
    "name, bad, good",
    [
        ("temperature", [-0.1, 101, math.nan, math.inf, "1", None, True], [0, 0.7, 2]),
        ("top_k", [-1, 1.5, "5", False], [0, 1, 10**6]),
        ("top_p", [0, -0.1, 1.1, math.nan], [0.01, 1]),
        ("min_p", [-0.1, 1.1, math.nan], [0, 0.5, 1]),
        ("repetition_penalty", [0, -1, math.inf], [0.9, 1.3]),
        ("presence_penalty", [-2.1, 2.1, math.nan], [-2, 0.5, 2]),
        ("frequency_penalty", [-2.1, 2.1], [-2, 0, 2]),
        ("seed", [-1, 1 << 63, 0.5, "x"], [0, (1 << 63) - 1]),
    ],
)
def test_sampling_parameters_have_ranges(name: str, bad: list[Any], good: list[Any]) -> None:
    for value in bad:
        with pytest.raises(UsageError, match=name):
            SamplingParams(**{name: value})
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value


def test_numpy_s_numbers_are_sampled_with_as_python_s() -> None:
    numbers = SamplingParams(temperature=np.float32(0.5), top_k=np.int32(5), seed=np.uint64(2**62))
    assert numbers == SamplingParams(temperature=0.5, top_k=5, seed=2**62)
    kinds = [type(number) for number in (numbers.temperature, numbers.top_k, numbers.seed)]
    assert kinds == [float, int, int]  # a seed is reckoned with beyond 64 bits
    with pytest.raises(UsageError, match="temperature"):
        SamplingParams(temperature=np.bool_(True))


@pytest.mark.parametrize(
    "values, expected",
    [
        (None, SamplingParams()),
        ({}, SamplingParams()),
        ({"temperature": 0.7, "top_p": 0.9}, SamplingParams()),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams()),
        ({"do_sample": None, "top_k": 5}, SamplingParams()),
        ({"do_sample": True}, SamplingParams(temperature=1.0, top_k=50)),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 0, "min_p": None},
            SamplingParams(temperature=0.6, top_p=0.9),
        ),
        ({"repetition_penalty": 1.2}, SamplingParams(repetition_penalty=1.2)),
        ({"do_sample": True, "temperature": 0}, SamplingParams(top_k=50)),
    ],
)
def test_a_model_s_own_sampling(values: Any, expected: SamplingParams) -> None:
    assert SamplingParams.from_generation_config(values) == expected


@pytest.mark.parametrize(
    "values, named",
    [
        ([], "not an object"),
        ({"do_sample": "yes"}, "do_sample"),
        ({"do_sample": True, "temperature": "hot"}, "temperature"),
        ({"do_sample": True, "top_p": 7}, "top_p"),
        ({"repetition_penalty": -1}, "repetition_penalty"),
    ],
)
def test_a_model_s_impossible_sampling_is_refused(values: Any, named: str) -> None:
    with pytest.raises(UnsupportedError, match=f"generation_config.json.*{named}"):
        SamplingParams.from_generation_config(values)
