"""What the kernel benchmarks run on: shapes of real models, random weights on the GPU, routing."""

import functools
from collections.abc import Callable

import torch

from spmoe_lite import timing
from spmoe_lite.kernels.attention import attention
from spmoe_lite.kernels.expert_gemm import combine, expert_down, expert_up, new_partial
from spmoe_lite.precision import ExpertLayout, matrix_bytes

DEVICE = torch.device("cuda")
SHAPES = {  # hidden, inner, experts, choices, layers that are several times the L2
    "mixtral": (4096, 14336, 8, 2, 4),
    "qwen3": (2048, 768, 128, 8, 24),
    "deepseek": (2048, 1408, 64, 6, 16),
}
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
DENSE = LAYER | {"head": (32000, 4096)}  # the products of Mistral-7B as the model makes them


def layout(dtype: str, hidden: int, inner: int) -> ExpertLayout:
    up = -(-matrix_bytes(dtype, inner, hidden) // 64) * 64
    stride = 2 * up + matrix_bytes(dtype, hidden, inner)
    return ExpertLayout(dtype, hidden, inner, 0, up, 2 * up, -(-stride // 65536) * 65536)


def random(shape, dtype, scale=1.0, seed=0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(dtype)


def routing(tokens: int, seed: int, experts: int, choices: int) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device=DEVICE)
    return scores.topk(choices).indices.int().contiguous()


def table(ids: list[int], memory, copies=None) -> torch.Tensor:
    """`use` of the experts' kernels; expert e is `memory[e]` and is written to `copies[e]`, if any."""
    lines = [[e, memory[e].data_ptr(), 0 if copies is None else copies[e].data_ptr()] for e in ids]
    return torch.tensor(lines, dtype=torch.int64).to(DEVICE)


def weights(dtype: str, shape: tuple[int, int], count: int | None = None) -> list[timing.Weight]:
    return timing.random_weights(dtype, shape, DEVICE, count)


class Experts:
    """A few layers of experts at a model's shape, and calls of the kernels over each layer."""

    def __init__(self, dtype: str, model: str = "mixtral"):
        self.hidden, self.inner, self.experts, self.choices, self.layers = SHAPES[model]
        self.shape = layout(dtype, self.hidden, self.inner)
        self.slab = timing.random_experts(self.shape, self.layers * self.experts, DEVICE)
        up, down = (self.inner, self.hidden), (self.hidden, self.inner)
        self.up_bytes = 2 * matrix_bytes(dtype, *up)  # gate and up of one expert
        self.down_bytes = matrix_bytes(dtype, *down)

    def route(self, tokens: int) -> tuple[torch.Tensor, list[int]]:
        """The experts of each token, and which there are."""
        experts = routing(tokens, tokens, self.experts, self.choices)
        return experts, sorted(set(experts.flatten().tolist()))

    def uses(self, ids: list[int], slab: torch.Tensor | None = None) -> list[torch.Tensor]:
        """A table for each layer."""
        return [
            table(ids, one) for one in (self.slab if slab is None else slab).split(self.experts)
        ]

    def calls(self, tokens: int, what: str, uses: list[torch.Tensor] | None = None):
        """One call per layer (or table), the bytes of weights it reads, the number of experts."""
        experts, ids = self.route(tokens)
        x = random((tokens, self.hidden), torch.bfloat16)
        h = random((tokens, self.choices, self.inner), torch.bfloat16)
        out = new_partial(x, experts, self.shape)
        shares = torch.rand(tokens, self.choices, device=DEVICE)
        runs: dict[str, Callable] = {
            "up": lambda use: expert_up(x, experts, use, self.shape, h),
            "down": lambda use: expert_down(h, experts, use, self.shape, out),
            "combine": lambda use: combine(out, shares, dtype=torch.bfloat16),
        }
        runs["all"] = lambda use: [runs[part](use) for part in ("up", "down", "combine")]
        read = {"up": self.up_bytes, "down": self.down_bytes, "combine": 0}
        read["all"] = self.up_bytes + self.down_bytes
        run, uses = runs[what], self.uses(ids) if uses is None else uses
        return [functools.partial(run, use) for use in uses], read[what] * len(ids), len(ids)


@functools.lru_cache(maxsize=1)
def shared_experts(dtype: str, model: str = "mixtral") -> Experts:
    """The last one made stays, for whoever asks next."""
    return Experts(dtype, model)


def attention_calls(tokens: int, context: int, layers: int, coded: bool = False) -> list[Callable]:
    """Over keys and values in bf16, or if `coded` in int8."""
    shape = (context, HEADS_KV, HEAD_DIM)
    q = random((tokens, HEADS, HEAD_DIM), torch.bfloat16)
    if coded:
        codes = torch.randint(-127, 128, (layers, 2, *shape), dtype=torch.int8, device=DEVICE)
        scales = torch.rand((HEADS_KV, context, 2), device=DEVICE).half() / 127
        start = context - tokens
        return [lambda c=c: attention(q, *c, start, None, kv_scales=scales) for c in codes]
    caches = [
        (random(shape, torch.bfloat16, seed=i), random(shape, torch.bfloat16, seed=i + 50))
        for i in range(layers)
    ]
    return [lambda c=c: attention(q, *c, context - tokens, None) for c in caches]
