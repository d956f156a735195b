"""Packs of random tensors written with `PackWriter` alone, and the tensors to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from spmoe_lite.config import ModelConfig, Rope
from spmoe_lite.manifest import Dtypes, dense_shapes
from spmoe_lite.pack import TORCH_DTYPES, Weight
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.precision import scheme_of
from spmoe_lite.quant import quantize

MOE = ModelConfig(
    family="mixtral",
    vocab_size=50,
    hidden_size=24,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope=Rope(1e6),
    num_local_experts=3,
    num_experts_per_tok=2,
    bos_token_id=1,
    eos_token_ids=(2, 7),
)
WIDE = replace(MOE, hidden_size=64, intermediate_size=192, head_dim=16)  # in groups of 32 and 64
DENSE_MODEL = replace(MOE, family="llama", num_local_experts=0, num_experts_per_tok=0)
TEXTS = {"tokenizer.json": b'{"model": {}}', "chat_template.jinja": "{{ '\u00e9' }}".encode()}


@dataclass
class Weights:
    """The tensors of one random model: dense by name, experts [layer][expert] -> (gate, up, down)."""

    config: ModelConfig
    dense_dtype: str = "fp32"
    expert_dtype: str = "bf16"
    seed: int = 0
    linear_dtype: str | None = None  # None: dense_dtype
    embed_dtype: str | None = None
    dense: dict[str, Weight] = field(init=False)
    experts: list[list[tuple[Weight, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(shape: tuple[int, ...], dtype: str) -> Weight:
            values, scheme = torch.randn(shape, generator=generator), scheme_of(dtype)
            return quantize(values, scheme) if scheme else values.to(TORCH_DTYPES[dtype])

        c = self.config
        self.dense = {n: random(s, self.dtypes.of(n)) for n, s in dense_shapes(c).items()}
        up = (c.intermediate_size, c.hidden_size)
        layers = c.num_hidden_layers if c.is_moe else 0
        self.experts = [
            [
                tuple(random(shape, self.expert_dtype) for shape in (up, up, up[::-1]))
                for _ in range(c.num_local_experts)
            ]
            for _ in range(layers)
        ]

    @property
    def dtypes(self) -> Dtypes:
        return Dtypes(
            self.dense_dtype,
            self.linear_dtype or self.dense_dtype,
            self.embed_dtype or self.dense_dtype,
            self.expert_dtype if self.config.is_moe else None,
        )

    def writer(self, path: Path, options: dict[str, Any] | None = None, **kw: Any) -> PackWriter:
        return PackWriter(
            path,
            self.config,
            self.dtypes,
            {"id": "random", "revision": str(self.seed)},
            options or {},
            **kw,
        )

    def fill(self, writer: PackWriter) -> None:
        """Write what the writer does not have yet."""
        for layer, experts in enumerate(self.experts):
            name = f"experts/layer-{layer:03d}.safetensors"
            if not writer.has(name):
                writer.write_layer(layer, experts)
        if not writer.has("dense.safetensors"):
            writer.write_dense(
                {n: lambda tensor=tensor: tensor for n, tensor in self.dense.items()}
            )
        for name, data in TEXTS.items():
            if not writer.has(name):
                writer.copy_text(name, data)

    def finish(self, writer: PackWriter) -> Path:
        c = self.config
        layers = c.num_hidden_layers if c.is_moe else 0
        count = layers * c.num_local_experts * 3
        audit = {
            "layers": layers,
            "experts": c.num_local_experts,
            "matrices": 3,
            "found": count,
        }
        return writer.finish(audit, c.vocab_size - 1)

    def write(self, path: Path, options: dict[str, Any] | None = None, **kw: Any) -> Path:
        with self.writer(path, options, **kw) as writer:
            self.fill(writer)
            return self.finish(writer)


def bits(weight: Weight) -> bytes:
    """The bytes of a tensor as a pack holds them, so that NaNs and signed zeros count."""
    parts = [weight] if isinstance(weight, torch.Tensor) else weight.tensors()
    return b"".join(part.contiguous().view(torch.uint8).numpy().tobytes() for part in parts)


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`, but for the manifest, which holds the date."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
