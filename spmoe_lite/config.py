"""What a model is (`ModelConfig`), how its experts lie in memory (`ExpertLayout`), how to sample.

Frozen values, checked once, when they are made: a `ModelConfig` that exists has numbers that fit
together and are small enough to compute with. `ModelConfig.from_hf` reads a `config.json` of the
Mixtral, Mistral or Llama family and refuses by name what would otherwise run wrongly. Dtypes are
strings ("fp32", "bf16", "fp16") so that importing the package needs no torch. Field names are those of
Hugging Face's `config.json`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from spmoe_lite.errors import UnsupportedError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
FAMILIES = ("mixtral", "mistral", "llama")
ROPE_KINDS = ("default", "linear", "llama3")

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
        _whole(
            "rope",
            "original_max_position_embeddings",
            self.original_max_position_embeddings,
            0,
            1 << 30,
        )
        if self.kind == "llama3":
            if self.original_max_position_embeddings == 0:
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
        least = 1 if self.num_local_experts else 0
        _whole(
            "config",
            "num_experts_per_tok",
            self.num_experts_per_tok,
            least,
            self.num_local_experts,
        )
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
class ExpertLayout:
    """Where the three matrices of one expert lie inside its run of `stride` bytes.

    gate and up are [intermediate_size, hidden_size], down is [hidden_size, intermediate_size], all
    row-major and contiguous, `y = x @ W.T`. Offsets are bytes from the start of the expert.
    """

    dtype: str
    hidden_size: int
    intermediate_size: int
    gate_offset: int
    up_offset: int
    down_offset: int
    stride: int


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


def _whole(where: str, name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UnsupportedError(f"{where}: {name} is {value!r:.60}, not a whole number")
    if not least <= value <= most:
        raise UnsupportedError(f"{where}: {name} {value!r:.60} is outside {least} to {most}")


def _positive_float(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedError(f"{where}: {name} is {value!r:.60}, not a number")
    if not 0 < value < math.inf:  # False for NaN too; exact for whole numbers of any length
        raise UnsupportedError(f"{where}: {name} {value!r:.60} is not a positive number")
