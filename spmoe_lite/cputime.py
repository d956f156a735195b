"""What passes take on this CPU, timed before anything is loaded: the model runs, its weights are stand-ins.

A `Transformer` of a few layers, at the pack's shapes and in its precisions, runs over memory in which every
byte is the same; its experts come in turn from more memory than the last-level cache holds, as decoding
finds them. So a pass is timed as it will run: the same products, the same dequantising, the same work of
Python in every layer. A pass over all layers is put together from it:

    ms = layers x (a layer without its experts + experts x an expert) + the head

where experts are those that uniform routing gives to so many rows. What is not in it: lending experts
(`store.py`), the choice of a token. Takes a second or two, more where a single layer takes one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from spmoe_lite import manifest
from spmoe_lite.config import ModelConfig
from spmoe_lite.cutoff import Profile, expected_copies
from spmoe_lite.device import available_bytes
from spmoe_lite.kernels.linear import linear
from spmoe_lite.kvcache import KVCache
from spmoe_lite.model import Transformer
from spmoe_lite.pack import TORCH_DTYPES, Weight, view_weight
from spmoe_lite.plan import ModelSize
from spmoe_lite.precision import ExpertLayout, matrix_bytes, scheme_of

CONTEXT = 64  # tokens before a timed pass, as `profile` has it
TOKENS = 97  # entries of the stand-in vocabulary
ROUNDS = 5
LONG = 0.5  # seconds: a pass that takes longer is timed once
READ = (
    256 << 20,
    32 << 20,
)  # bytes of weights a timed pass reads at most: floats, or to be dequantised
POOL = 64 << 20, 1 << 30  # bytes of stand-in experts: at least, at most
BYTE = 0x2C  # a small normal number in every float, and codes with a small scale


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of the parts of a pass."""

    layer: float  # without its experts
    expert: float  # 0 for a dense model
    head: float


def pass_ms(model: ModelSize, rows: int) -> float:
    """Milliseconds of a pass of `rows` tokens over all layers, every expert in place."""
    c, parts = model.config, _time(model, rows)
    layer = parts.layer
    if c.is_moe:
        layer += parts.expert * expected_copies(
            c.num_local_experts, c.num_experts_per_tok, rows, 0.0
        )
    return (c.num_hidden_layers * layer + parts.head) * 1e3


def complete(
    known: Profile | None, target: ModelSize, draft: ModelSize | None, drafts: int
) -> Profile:
    """The profile, and what it lacks of passes by stand-ins: times of a target layer, and of a draft token."""
    layers, rows = target.config.num_hidden_layers, drafts + 1
    found = known or Profile(0.0, 0.0, 0.0)
    plain = found.plain_layer_ms
    checks = draft is not None and rows > 1 and (found.verify_rows or 0) < 2
    if plain is None or checks:
        alone = pass_ms(target, 1) / layers
        verify = pass_ms(target, rows) / layers if checks else alone
        plain = alone if plain is None else plain
        found = replace(
            found,
            plain_layer_ms=plain,
            target_layer_ms=plain * verify / alone,
            verify_rows=rows if checks else 1,
        )
    if draft is not None and rows > 1 and not found.draft_token_ms:
        found = replace(found, draft_token_ms=pass_ms(draft, 1))
    return found


@torch.inference_mode()
def _time(model: ModelSize, rows: int) -> Parts:
    """Medians over a few passes after a first one, which alone counts if it is long."""
    c, dtypes = model.config, model.dtypes
    pool = _Pool(model) if c.is_moe else None
    small = _few_layers(model)
    activations = TORCH_DTYPES[dtypes.dense]
    tensors = {
        name: _stand_in(name, dtypes.of(name), shape)
        for name, shape in manifest.dense_shapes(small).items()
    }
    tensors[manifest.HEAD] = torch.ones(1, c.hidden_size, dtype=activations)  # timed by itself
    layout = None if pool is None else pool.layout
    transformer = Transformer(small, tensors, CONTEXT + rows, pool, layout)
    head = _stand_in("", dtypes.embed, (c.vocab_size, c.hidden_size))
    kv = KVCache(small, CONTEXT + rows, activations, torch.device("cpu"))
    kv.keys.zero_()
    kv.values.zero_()
    x, found = torch.ones(rows, c.hidden_size, dtype=activations), []
    for _ in range(1 + ROUNDS):
        kv.length = CONTEXT
        before = (0.0, 0) if pool is None else (pool.seconds, pool.served)
        started = time.perf_counter()
        transformer.forward(list(range(rows)), kv)
        layers = time.perf_counter() - started
        expert = 0.0
        if pool is not None:
            served = pool.seconds - before[0]
            expert = served / (pool.served - before[1])
            layers -= served
        started = time.perf_counter()
        linear(x, head)  # not read since the last pass
        seconds = time.perf_counter() - started
        found.append((layers / small.num_hidden_layers, expert, seconds))
        if layers + seconds + expert > LONG:
            break
    counted = found[1:] or found
    return Parts(*(statistics.median(part) for part in zip(*counted, strict=True)))


class _Pool:
    """Lends stand-in experts as an `ExpertStore` does, each time others, and times those who use them.

    Of a layer not more are lent than one token chooses: what the others would take is known then.
    """

    def __init__(self, model: ModelSize):
        assert model.dtypes.experts is not None
        c = model.config
        self.layout: ExpertLayout = manifest.expert_layout(
            model.dtypes.experts, c.hidden_size, c.intermediate_size
        )
        self.seconds, self.served = 0.0, 0
        stride, self._choices = self.layout.stride, c.num_experts_per_tok
        count = max(self._choices, min(model.expert_count, _pool_bytes() // stride))
        self._memory = torch.empty(count, stride, dtype=torch.uint8).fill_(BYTE)
        self._next = 0

    def begin_pass(self, rows: int) -> None: ...

    def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
        wanted = experts.unique()[: self._choices].tolist()
        lines = []
        for expert in wanted:
            lines.append([expert, self._memory[self._next].data_ptr(), 0])
            self._next = (self._next + 1) % len(self._memory)
        use = torch.tensor(lines, dtype=torch.int64)
        started = time.perf_counter()
        yield use
        self.seconds += time.perf_counter() - started
        self.served += len(lines)


def _pool_bytes() -> int:
    """Twice the last-level cache, within bounds and an eighth of what is free."""
    least, most = POOL
    free = available_bytes(torch.device("cpu"))
    return min(max(2 * _cache_bytes(), least), most, free // 8)


def _cache_bytes(folder: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Of the largest cache of a core, as Linux says it (`32768K`); 0 where nobody does."""
    sizes = [0]
    with suppress(OSError, ValueError):
        for file in folder.glob("index*/size"):
            sizes.append(int(file.read_text().strip().removesuffix("K")) << 10)
    return max(sizes)


def _few_layers(model: ModelSize) -> ModelConfig:
    """The model with as many layers as a timed pass may read."""
    c, dtypes = model.config, model.dtypes
    one = replace(c, num_hidden_layers=1, vocab_size=TOKENS, tie_word_embeddings=True)
    read = c.num_experts_per_tok * model.stride + sum(
        matrix_bytes(dtypes.of(name), *shape)
        for name, shape in manifest.dense_shapes(one).items()
        if len(shape) == 2
    )
    coded = any(scheme_of(dtype) for dtype in (dtypes.linear, dtypes.experts) if dtype is not None)
    return replace(one, num_hidden_layers=min(c.num_hidden_layers, max(1, READ[coded] // read)))


def _stand_in(name: str, dtype: str, shape: tuple[int, ...]) -> Weight:
    """A tensor of one byte; norms are 1, embeddings and routers random, so that rows choose apart."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=TORCH_DTYPES[dtype])
    memory = torch.empty(matrix_bytes(dtype, *shape), dtype=torch.uint8).fill_(BYTE)
    weight = view_weight(memory, dtype, shape)
    if name == manifest.EMBED or name.endswith("router.weight"):
        if isinstance(weight, torch.Tensor):
            weight.normal_()
        else:
            weight.codes.random_()
    return weight
