"""What the kernels take on this card: graph replays over random weights, several times the L2.

`replay_ms` is the one clock of `spmoe-lite tune` and of `benchmarks/kernels.py`, and `random_weight`
makes their weights. `benches` has each product of a pack, at its shapes, ready to be timed.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from spmoe_lite.device import multiplies_bf16
from spmoe_lite.kernels.configs import Key, Kind
from spmoe_lite.kernels.expert_gemm import DTYPES, expert_down, expert_up, new_partial
from spmoe_lite.kernels.linear import linear
from spmoe_lite.pack import Pack, Weight, view_weight
from spmoe_lite.precision import ExpertLayout, matrix_bytes, scheme_of

MOST_ROWS = 260

Run = Callable[[int], torch.Tensor]  # one launch over the first so many rows


def replay_ms(calls: Sequence[Callable[[], object]], repeats: int = 15) -> float:
    """Median time of one of `calls`, all of them captured in one CUDA graph.

    Each is made once before: what a weight gets at its first use would be made at every replay.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


# --- weights


def copies(size: int, device: torch.device) -> int:
    """How many copies of `size` bytes are eight times the L2; at least three."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(256, max(3, -(-8 * cache // size)))


def random_weight(memory: torch.Tensor, dtype: str, shape: tuple[int, int]) -> Weight:
    """Fill uint8 [n] with random weights of a plausible size, and view it as the matrix it holds."""
    weight = view_weight(memory, dtype, shape)
    if isinstance(weight, torch.Tensor):
        return weight.normal_(0, 0.02)
    memory.random_()
    weight.scales.bitwise_and_(-0x7C01).bitwise_or_(0x1800)  # 0.002 to 0.004, any sign or zero
    return weight


def random_weights(
    dtype: str, shape: tuple[int, int], device: torch.device, count: int | None = None
) -> list[Weight]:
    """`count` random matrices, or as many as `copies` says."""
    size = matrix_bytes(dtype, *shape)
    return [
        random_weight(torch.empty(size, dtype=torch.uint8, device=device), dtype, shape)
        for _ in range(count or copies(size, device))
    ]


def random_experts(layout: ExpertLayout, count: int, device: torch.device) -> torch.Tensor:
    """uint8 [count, stride]: random experts as they lie in slots."""
    slab = torch.empty(count, layout.stride, dtype=torch.uint8, device=device)
    wide = layout.intermediate_size, layout.hidden_size
    offsets = layout.gate_offset, layout.up_offset, layout.down_offset
    for one in slab:
        for offset, shape in zip(offsets, (wide, wide, wide[::-1]), strict=True):
            size = matrix_bytes(layout.dtype, *shape)
            random_weight(one[offset : offset + size], layout.dtype, shape)
    return slab


# --- products


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of product: `dtype` is multiplied, `weights` (the same float, or a scheme) stored."""

    kind: Kind
    dtype: str
    weights: str

    def key(self, capability: tuple[int, int]) -> Key:
        return capability, DTYPES[self.dtype], self.kind, scheme_of(self.weights)


class Bench:
    """One product with whatever tiles `configs.tiles` gives: a `Run` per shape and copy of weights."""

    def __init__(self, shapes: Sequence[Sequence[Run]], memory: object = None):
        self.shapes = shapes
        self.memory = memory  # kept alive, if the runs know addresses alone

    def results(self, rows: int) -> list[torch.Tensor]:
        found = [runs[0](rows) for runs in self.shapes]
        if found[0].is_cuda:
            torch.cuda.synchronize()  # a launch that fails says so here
        return found

    def milliseconds(self, rows: int) -> float:
        """Median time of one call of each shape, summed."""
        shapes = ([functools.partial(run, rows) for run in runs] for runs in self.shapes)
        return sum(replay_ms(calls, 25) for calls in shapes)


def benches(pack: Pack, device: torch.device) -> dict[Product, Callable[[], Bench]]:
    """The products of a pack, each with what makes its data; up to `MOST_ROWS` rows."""
    config, layout = pack.config, pack.expert_layout
    dense, linears = (
        "fp16" if dtype == "bf16" and not multiplies_bf16(device) else dtype
        for dtype in (pack.dtypes.dense, pack.dtypes.linear)
    )
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = [(q + 2 * kv, hidden), (hidden, q)]  # as the model stacks them
    if pack.dtypes.embed == pack.dtypes.linear:
        shapes.append((config.vocab_size, hidden))
    found: dict[Product, Callable[[], Bench]] = {}
    if layout is None:
        shapes += [(2 * inner, hidden), (hidden, inner)]
    else:
        multiplied = dense if scheme_of(layout.dtype) else layout.dtype
        for kind in ("up", "down"):
            found[Product(kind, multiplied, layout.dtype)] = functools.partial(
                expert_bench, kind, layout, config.num_experts_per_tok, DTYPES[dense], device
            )
    found[Product("dense", dense, linears)] = lambda: Bench(
        [_linears(shape, linears, DTYPES[dense], device) for shape in shapes]
    )
    return found


def expert_bench(
    kind: Kind, layout: ExpertLayout, choices: int, dtype: torch.dtype, device: torch.device
) -> Bench:
    """Every row chooses the same experts, so that an expert has as many rows as there are."""
    hidden, inner = layout.hidden_size, layout.intermediate_size
    slab = random_experts(layout, choices * copies(choices * layout.stride, device), device)
    lines = torch.tensor([[i % choices, one.data_ptr(), 0] for i, one in enumerate(slab)])
    uses = [use.clone() for use in lines.to(device).split(choices)]  # aligned as an engine's
    experts = torch.arange(choices, dtype=torch.int32, device=device).repeat(MOST_ROWS, 1)
    x = torch.randn((MOST_ROWS, hidden), device=device).to(dtype)
    h = torch.randn((MOST_ROWS, choices, inner), device=device).to(dtype)

    def up(use: torch.Tensor, rows: int) -> torch.Tensor:
        out = torch.empty_like(h[:rows])
        expert_up(x[:rows], experts[:rows], use, layout, out)
        return out

    def down(use: torch.Tensor, rows: int) -> torch.Tensor:
        out = new_partial(x[:rows], experts[:rows], layout)
        expert_down(h[:rows], experts[:rows], use, layout, out)
        return out

    run = up if kind == "up" else down
    return Bench([[functools.partial(run, use) for use in uses]], slab)


def _linears(
    shape: tuple[int, int], stored: str, dtype: torch.dtype, device: torch.device
) -> list[Run]:
    x = torch.randn((MOST_ROWS, shape[1]), device=device).to(dtype)

    def run(weight: Weight, rows: int) -> torch.Tensor:
        return linear(x[:rows], weight)

    return [functools.partial(run, weight) for weight in random_weights(stored, shape, device)]
