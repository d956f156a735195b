"""What a model is (`ModelConfig`), and how to sample from it (`SamplingParams`).

Frozen values, checked once, when they are made: a `ModelConfig` that exists has numbers that fit
together and are small enough to compute with. `ModelConfig.from_hf` reads a `config.json` of the
Mixtral, Mistral or Llama family and refuses by name what would otherwise run wrongly. A key that is
absent takes the default of that family in the reference library (transformers), and where that
decides the result a warning says so. Field names are those of Hugging Face's `config.json`. No torch
here, so that importing the package needs none.
"""

from __future__ import annotations

import logging
import numbers
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from spmoe_lite.errors import UnsupportedError, UsageError

FAMILIES = ("mixtral", "mistral", "llama")
ROPE_KINDS = ("default", "linear", "llama3")
MAX_SEED = (1 << 63) - 1

# What transformers assumes for a key that config.json lacks, where the families differ.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mixtral": {
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "num_key_value_heads": 8,
    },
    "mistral": {
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
        "num_key_value_heads": 8,
    },
    "llama": {
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "sliding_window": None,
        "num_key_value_heads": None,  # as many as there are heads
    },
}

# Largest value of each size that is believed. Real models stay far below; a hostile file may not.
_LIMITS = {
    "vocab_size": 1 << 22,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 10,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "head_dim": 1 << 12,
    "max_position_embeddings": 1 << 30,
}
_MAX_EXPERTS = 1 << 12
_MAX_FLOAT = 1e15

log = logging.getLogger("spmoe_lite")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `kind` is "default", "linear" or "llama3"; the rest are its constants."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise UnsupportedError(f"rope type {self.kind!r} is not supported; only {ROPE_KINDS}")
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor"):
            _positive_float("rope", name, getattr(self, name))
        original = self.original_max_position_embeddings
        _whole("rope", "original_max_position_embeddings", original, 0, 1 << 30)
        if self.kind == "llama3":
            if original == 0:
                raise UnsupportedError("rope llama3 needs original_max_position_embeddings")
            if self.low_freq_factor >= self.high_freq_factor:
                raise UnsupportedError(
                    f"rope llama3: low_freq_factor {self.low_freq_factor} is not below "
                    f"high_freq_factor {self.high_freq_factor}"
                )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer of the Mixtral, Mistral or Llama family."""

    family: str  # "mixtral", "mistral", "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Rope
    sliding_window: int | None = None
    num_local_experts: int = 0  # 0: a dense model
    num_experts_per_tok: int = 0
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise `UnsupportedError` for numbers that do not fit together or are beyond belief."""
        if self.family not in FAMILIES:
            raise UnsupportedError(f"family {self.family!r} is not supported; only {FAMILIES}")
        for name, limit in _LIMITS.items():
            _whole("config", name, getattr(self, name), 1, limit)
        _positive_float("config", "rms_norm_eps", self.rms_norm_eps)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UnsupportedError(
                f"config: num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UnsupportedError(f"config: head_dim {self.head_dim} is odd; rope needs pairs")
        if self.sliding_window is not None:
            _whole("config", "sliding_window", self.sliding_window, 1, 1 << 30)
        _whole("config", "num_local_experts", self.num_local_experts, 0, _MAX_EXPERTS)
        least, most = min(self.num_local_experts, 1), self.num_local_experts
        _whole("config", "num_experts_per_tok", self.num_experts_per_tok, least, most)
        for name in ("tie_word_embeddings", "attention_bias"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"config: {name} is {getattr(self, name)!r}, not a boolean")
        if self.bos_token_id is not None:
            _whole("config", "bos_token_id", self.bos_token_id, 0, self.vocab_size - 1)
        for token in self.eos_token_ids:
            _whole("config", "eos_token_id", token, 0, self.vocab_size - 1)

    @property
    def is_moe(self) -> bool:
        return self.num_local_experts > 0

    @classmethod
    def from_hf(
        cls,
        config: dict[str, Any],
        generation_config: dict[str, Any] | None = None,
        methods: tuple[str, ...] = (),
    ) -> ModelConfig:
        """Read the contents of `config.json`, and of `generation_config.json` for its end tokens.

        `methods` are the ways of quantising that the caller will read by itself.

        Raises `UnsupportedError` naming the key for anything this program would run wrongly:
        another family or activation, a rope it does not know, quantised weights, sizes that do
        not fit together. A null key counts as absent, but for `sliding_window` and
        `num_key_value_heads`, where null means no window, and as many as there are heads.
        """
        if not isinstance(config, dict):
            raise UnsupportedError(f"config.json is {type(config).__name__}, not an object")
        family = _family(config)
        _refuse_quantised(config, methods)
        _refuse_unlike(config, family)
        heads = _need(config, "num_attention_heads")
        hidden = _need(config, "hidden_size")
        kv_heads = config.get("num_key_value_heads", _DEFAULTS[family]["num_key_value_heads"])
        window = config.get("sliding_window", _DEFAULTS[family]["sliding_window"])
        if "sliding_window" not in config and window is not None:
            _say_default("sliding_window", window, family)
        eos = _token_ids("eos_token_id", config, generation_config)
        bos = _token_ids("bos_token_id", config) or _token_ids("bos_token_id", generation_config)
        if len(bos) > 1:
            raise UnsupportedError(f"config: bos_token_id is a list of {len(bos)} tokens, not one")
        return cls(
            family=family,
            vocab_size=_need(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_need(config, "intermediate_size"),
            num_hidden_layers=_need(config, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=heads if kv_heads is None else kv_heads,
            head_dim=_head_dim(config, hidden, heads),
            rms_norm_eps=_number(
                "config", "rms_norm_eps", _default(config, "rms_norm_eps", family)
            ),
            max_position_embeddings=_default(config, "max_position_embeddings", family),
            rope=_rope(config, family),
            sliding_window=window,
            **_experts(config, family),
            tie_word_embeddings=_flag(config, "tie_word_embeddings"),
            attention_bias=_flag(config, "attention_bias"),
            bos_token_id=bos[0] if bos else None,
            eos_token_ids=eos,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`, for manifests this program wrote.

        A missing, unknown or mistyped field raises KeyError, TypeError or `UnsupportedError`.
        """
        values = dict(values)
        rope = Rope(**values.pop("rope"))
        eos = tuple(values.pop("eos_token_ids"))
        return cls(**values, rope=rope, eos_token_ids=eos)


@dataclass(frozen=True, slots=True)
class Routing:
    """How the logits of a router become k experts and their weights; Mixtral's rule by default.

    `scoring_func`, "softmax" over all experts or "sigmoid", makes the scores. The k best scores are
    chosen, each plus its expert's correction bias where the router has one (DeepSeek-V3; the bias
    never enters a weight). With `n_group` > 1 only experts of the `topk_group` best groups may be
    chosen; a group counts as much as its best expert ("max", DeepSeek-V2) or its best two together
    ("top2", V3). Weights are the scores of the chosen: with `norm_topk_prob` divided by their sum,
    which for softmax is the same as a softmax over the chosen alone; always multiplied by
    `routed_scaling_factor`. With `shared_expert_gate` the router has one row more, the last, whose
    sigmoid is the weight of the shared expert (Qwen2-MoE).
    """

    scoring_func: str = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_score: str = "max"
    shared_expert_gate: bool = False

    def __post_init__(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise UnsupportedError(f"scoring_func {self.scoring_func!r:.40} is not supported")
        if self.group_score not in ("max", "top2"):
            raise UnsupportedError(f"group_score {self.group_score!r:.40} is not supported")
        for name in ("norm_topk_prob", "shared_expert_gate"):
            if not isinstance(getattr(self, name), bool):
                raise UnsupportedError(f"routing: {name} is {getattr(self, name)!r}, not a boolean")
        _positive_float("routing", "routed_scaling_factor", self.routed_scaling_factor)
        _whole("routing", "n_group", self.n_group, 1, _MAX_EXPERTS)
        _whole("routing", "topk_group", self.topk_group, 1, self.n_group)

    def check(self, num_experts: int, k: int) -> None:
        """Raise `UnsupportedError` where the groups do not divide so many experts or hold no k."""
        size, rest = divmod(num_experts, self.n_group)
        if rest or (self.n_group > 1 and self.group_score == "top2" and size < 2):
            raise UnsupportedError(f"routing: {num_experts} experts in {self.n_group} groups")
        if not 1 <= k <= size * self.topk_group:
            raise UnsupportedError(
                f"routing: {k} experts of {self.topk_group} groups that hold {size} each"
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is chosen; temperature 0 is greedy. Penalties of 1.0 / 0.0 are off."""

    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise `UsageError` naming the parameter and its range."""
        self._check("temperature", 0, 100)
        self._check("top_k", 0, 1 << 31, whole=True)
        self._check("top_p", 0, 1)
        if self.top_p == 0:
            raise UsageError("top_p is 0, which leaves no token; use a value above 0, or top_k 1")
        self._check("min_p", 0, 1)
        self._check("repetition_penalty", 0, 100)
        if self.repetition_penalty == 0:
            raise UsageError("repetition_penalty is 0; 1.0 is off, above 1.0 repeats less")
        self._check("presence_penalty", -2, 2)
        self._check("frequency_penalty", -2, 2)
        self._check("seed", 0, MAX_SEED, whole=True)

    def _check(self, name: str, least: int, most: int, *, whole: bool = False) -> None:
        """Refuse what is outside; numpy's numbers become Python's."""
        value = getattr(self, name)
        if not is_integer(value):
            if whole or not isinstance(value, numbers.Real) or isinstance(value, bool):
                kind = "whole number" if whole else "number"
                raise UsageError(f"{name} is {value!r:.60}, not a {kind}")
        if not least <= value <= most:  # False for NaN
            raise UsageError(f"{name} {value!r:.60} is outside {least} to {most}")
        object.__setattr__(self, name, int(value) if is_integer(value) else float(value))

    @classmethod
    def from_generation_config(cls, values: dict[str, Any] | None) -> SamplingParams:
        """What a model's `generation_config.json` asks for; nothing there is greedy.

        Without `do_sample` temperature, top_k, top_p and min_p have no say, as in transformers;
        with it a temperature that is absent is 1.0 and a top_k that is absent is 50, its
        defaults. Raises `UnsupportedError` naming the key.
        """
        values = {} if values is None else values
        if not isinstance(values, dict):
            raise UnsupportedError("generation_config.json is not an object")
        sample = values.get("do_sample")
        if sample is not None and not isinstance(sample, bool):
            raise UnsupportedError(f"generation_config.json: do_sample is {sample!r:.60}")
        wanted = {"repetition_penalty": values.get("repetition_penalty")}
        if sample:
            wanted |= {"temperature": 1.0, "top_k": 50}
            for name in ("temperature", "top_k", "top_p", "min_p"):
                if values.get(name) is not None:
                    wanted[name] = values[name]
        try:
            return cls(**{name: value for name, value in wanted.items() if value is not None})
        except UsageError as error:
            raise UnsupportedError(f"generation_config.json: {error}") from error


# config.json, key by key


def _family(config: dict[str, Any]) -> str:
    """The family by `model_type`, or by `architectures` where that is absent; both must agree."""
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedError(f"config: architectures is {names!r:.80}, not a list of names")
    family = config.get("model_type")
    if family is None and names:
        family = names[0].lower().removesuffix("forcausallm").removesuffix("model")
    if family not in FAMILIES:
        raise UnsupportedError(
            f"model_type {family!r:.60} is not supported; only {', '.join(FAMILIES)} are"
        )
    for name in names:
        if name.lower() not in (f"{family}forcausallm", f"{family}model"):
            raise UnsupportedError(
                f"architecture {name!r:.60} is not supported; a {family} language model is "
                f"{family.capitalize()}ForCausalLM"
            )
    return str(family)


def quantisation(config: dict[str, Any]) -> tuple[str, Any] | None:
    """The key of config.json that says how the weights are quantised, and its value."""
    for key in ("compression_config", "quantization_config"):
        if config.get(key) is not None:
            return key, config[key]
    return None


def quantisation_method(values: Any) -> str | None:
    """The method that such a value names; old files of bitsandbytes have only its switches."""
    if not isinstance(values, dict):
        return None
    method = values.get("quant_method")
    if isinstance(method, str) and method.isprintable():
        return method.lower()
    switches = ("load_in_4bit", "load_in_8bit")
    return "bitsandbytes" if any(name in values for name in switches) else None


def _refuse_quantised(config: dict[str, Any], methods: tuple[str, ...]) -> None:
    found = quantisation(config)
    if found is None:
        return
    key, values = found
    method = quantisation_method(values)
    if key == "compression_config":
        method = method or "compressed-tensors"
    elif method in methods:
        return
    raise UnsupportedError(
        f"config: {key} says the weights are quantised ({method or 'no method named'!s:.40}); "
        f"fetch the original fp32, fp16 or bf16 checkpoint, one in 4-bit AWQ or GPTQ, or a GGUF file"
    )


def _refuse_unlike(config: dict[str, Any], family: str) -> None:
    """Refuse the switches of newer models that would change the result and are not implemented."""
    act = config.get("hidden_act")
    if act not in (None, "silu", "swish"):
        raise UnsupportedError(f"config: hidden_act {act!r:.40} is not supported; only silu is")
    if _flag(config, "mlp_bias"):
        raise UnsupportedError("config: mlp_bias is not supported")
    factor = config.get("partial_rotary_factor")
    if factor not in (None, 1.0):
        raise UnsupportedError(f"config: partial_rotary_factor {factor!r:.40} is not supported")
    types = config.get("layer_types")
    if types is not None:
        window = config.get("sliding_window", _DEFAULTS[family]["sliding_window"])
        wanted = "full_attention" if window is None else "sliding_attention"
        if not isinstance(types, list) or any(kind != wanted for kind in types):
            raise UnsupportedError(
                f"config: layer_types other than {wanted} are not supported "
                f"with sliding_window {window!r:.40}"
            )


def _experts(config: dict[str, Any], family: str) -> dict[str, Any]:
    """num_local_experts (or num_experts, its newer name) and num_experts_per_tok."""
    names = ("num_local_experts", "num_experts")
    counts = {name: config[name] for name in names if config.get(name) is not None}
    if len(set(map(repr, counts.values()))) > 1:
        raise UnsupportedError(
            f"config: {' and '.join(f'{k} {v!r:.40}' for k, v in counts.items())}"
        )
    count = next(iter(counts.values()), None)
    if family != "mixtral":
        if count not in (None, 0, 1):
            raise UnsupportedError(
                f"config: a {family} model with {count!r:.40} experts is not known"
            )
        return {}
    if count is None or count == 0:
        raise UnsupportedError("config: num_local_experts is missing")
    return {
        "num_local_experts": count,
        "num_experts_per_tok": _need(config, "num_experts_per_tok"),
    }


def _head_dim(config: dict[str, Any], hidden: Any, heads: Any) -> Any:
    if config.get("head_dim") is not None:
        return config["head_dim"]
    _whole("config", "hidden_size", hidden, 1, _LIMITS["hidden_size"])
    _whole("config", "num_attention_heads", heads, 1, _LIMITS["num_attention_heads"])
    if hidden % heads:
        raise UnsupportedError(
            f"config: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            f"and head_dim is absent"
        )
    return hidden // heads


def _rope(config: dict[str, Any], family: str) -> Rope:
    """The rotary embedding from `rope_theta`, `rope_scaling` and `rope_parameters`.

    Old files have theta beside the scaling, new ones inside `rope_parameters`, some in both. The
    same key with two values is refused: which one counts differs between versions of the
    reference.
    """
    values: dict[str, Any] = {}
    for place in ("rope_parameters", "rope_scaling"):
        given = config.get(place)
        if given is None:
            continue
        if not isinstance(given, dict) or any(isinstance(v, dict) for v in given.values()):
            raise UnsupportedError(f"config: {place} {given!r:.60} is not one set of parameters")
        _merge_rope(values, given, place)
    _merge_rope(values, {"rope_theta": config.get("rope_theta")}, "config")
    kind = values.get("rope_type", "default")
    if kind not in ROPE_KINDS:
        raise UnsupportedError(
            f"config: rope type {kind!r:.40} is not supported; only {', '.join(ROPE_KINDS)} are"
        )
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise UnsupportedError("config: rope with a partial_rotary_factor is not supported")
    if "rope_theta" not in values:
        values["rope_theta"] = _DEFAULTS[family]["rope_theta"]
        _say_default("rope_theta", values["rope_theta"], family)
    theta = _number("rope", "rope_theta", values["rope_theta"])
    if kind == "default":
        if values.get("factor") not in (None, 1.0):
            raise UnsupportedError("config: rope_scaling has a factor but no rope_type")
        return Rope(theta)
    factor = _number("rope", "factor", values.get("factor"))
    if kind == "linear":
        return Rope(theta, "linear", factor)
    original = config.get("original_max_position_embeddings")
    if original is None:
        original = values.get("original_max_position_embeddings")
    if original is None:
        original = _default(config, "max_position_embeddings", family)
    return Rope(
        theta,
        "llama3",
        factor,
        _number("rope", "low_freq_factor", values.get("low_freq_factor")),
        _number("rope", "high_freq_factor", values.get("high_freq_factor")),
        original,
    )


def _merge_rope(values: dict[str, Any], given: dict[str, Any], place: str) -> None:
    for key, value in given.items():
        key = "rope_type" if key == "type" else key
        if value is None:
            continue
        if key in values and values[key] != value:
            raise UnsupportedError(
                f"config: {key} is {values[key]!r:.40} in one place and {value!r:.40} in {place}; "
                f"remove the wrong one"
            )
        values[key] = value


def _token_ids(name: str, *sources: dict[str, Any] | None) -> tuple[int, ...]:
    """The union of a token id or list of ids over the files, in order; -1 stands for none."""
    found: dict[int, None] = {}
    for source in sources:
        value = source.get(name) if isinstance(source, dict) else None
        for token in value if isinstance(value, list) else [value]:
            if token is None or token == -1:
                continue
            _whole("config", name, token, 0, _LIMITS["vocab_size"])
            found[token] = None
    return tuple(found)


def _need(config: dict[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise UnsupportedError(f"config: {name} is missing")
    return config[name]


def _default(config: dict[str, Any], name: str, family: str) -> Any:
    if config.get(name) is not None:
        return config[name]
    _say_default(name, _DEFAULTS[family][name], family)
    return _DEFAULTS[family][name]


def _say_default(name: str, value: Any, family: str) -> None:
    log.warning("config.json has no %s; taking %s's default, %g", name, family, value)


def _flag(config: dict[str, Any], name: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise UnsupportedError(f"config: {name} is {value!r:.60}, not true or false")
    return bool(value)


# Checks of single values


def _whole(where: str, name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedError(f"{where}: {name} is {value!r:.60}, not a whole number")
    if not least <= value <= most:
        raise UnsupportedError(f"{where}: {name} {value!r:.60} is outside {least} to {most}")


def _positive_float(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedError(f"{where}: {name} is {value!r:.60}, not a number")
    if not 0 < value <= _MAX_FLOAT:  # False for NaN; exact for whole numbers of any length
        raise UnsupportedError(f"{where}: {name} {value!r:.60} is not a positive number")


def _number(where: str, name: str, value: Any) -> float:
    if value is None:
        raise UnsupportedError(f"{where}: {name} is missing")
    _positive_float(where, name, value)
    return float(value)


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a caller's value is a whole number, numpy's included; Python counts booleans, this does not."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)
