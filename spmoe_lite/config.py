"""What a model is (`ModelConfig`), how its experts lie in memory (`ExpertLayout`), how to sample.

Frozen values, checked once. Dtypes are strings ("fp32", "bf16", "fp16") so that importing the package
needs no torch. Field names are those of Hugging Face's `config.json`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `kind` is "default", "linear" or "llama3"; the rest are its constants."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


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

    @property
    def is_moe(self) -> bool:
        return self.num_local_experts > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` is the inverse."""
        return asdict(self) | {"eos_token_ids": list(self.eos_token_ids)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_dict`, for manifests this program wrote."""
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
