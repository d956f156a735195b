"""A target and its draft with random weights at the shapes of real models: how fast here, before a download.

What a step costs depends on shapes, on which experts are in slots, and on how well the draft foretells
target and experts; hardly on values. So the pair is two real packs, written by the pack's own writer, that
everything else takes as any other:

    embedding, attention, norms, head    the same numbers in both
    feed-forward parts, experts          so small (GAIN) that they turn the residual stream little: the
                                         draft's states point at the target's experts, its tokens at the
                                         target's tokens
    attention's output                   smaller still: it is nearly the same for every position, and would
                                         have the text repeat a token and every token take the same experts
    routers                              random: routing is near uniform, the hard case for any cache

Codes and scales are random words whose exponents are set; nothing is quantised, so that writing is bound by
the disk or by memory. The expert files of the first layers, DISTINCT_BYTES of them and so more than any
cache between memory and bus holds, are hard links for all layers after them: a pack of 24 GB takes 3 on the
disk and in RAM, and an engine maps and copies it as if it were 24.

Random streams are numpy's, one for each tensor, keyed by its name: a pair is the same bytes everywhere. The
tokenizer spells bytes, and words of digits for the rest of the vocabulary; nothing ends an answer but its
length.

With random weights the rate at which drafts are accepted means little. `ForcedAcceptance` sets it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import tempfile
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

from spmoe_lite import manifest as m
from spmoe_lite.config import ModelConfig, Rope
from spmoe_lite.errors import BusyError, CapacityError, UsageError
from spmoe_lite.files import LOCK, PARTIAL, locked, making, naming
from spmoe_lite.manifest import Dtypes, dense_shapes, expert_layout
from spmoe_lite.pack import TORCH_DTYPES, Weight, view_weight
from spmoe_lite.pack_writer import PackWriter
from spmoe_lite.plan import DEFAULT_CONTEXT, ModelSize
from spmoe_lite.precision import Scheme, scheme_of
from spmoe_lite.progress import OnProgress, Progress, check, size, sizes_apart
from spmoe_lite.quant import QuantizedMatrix
from spmoe_lite.sampling import Sampler
from spmoe_lite.verifier import Verdict

SEED = 0
PREFIX = "spmoe-synthetic-"  # of a pair's folder
GAIN = 0.3  # of feed-forward matrices: output over input of a product, root mean square; else 1
ATTENTION_GAIN = 0.1  # of the matrix behind attention
ROUTER_GAIN = 1.5
DISTINCT_BYTES = 2 << 30  # of experts, at least
AHEAD = 4  # tensors made while one is written
MAKERS = min(8, os.cpu_count() or 1)
SCHEMES = {
    "fp32": Dtypes.floats("fp32", "fp32"),
    "bf16": Dtypes("bf16", "bf16", "bf16", "bf16"),
    "int8": Dtypes("bf16", "int8-g64", "int8-g64", "int8-g64"),
    "int4": Dtypes("bf16", "int4-g64z", "int8-g64", "int4-g64z"),
}

T = TypeVar("T")


def _mixtral(**sizes: Any) -> ModelConfig:
    known: dict[str, Any] = {
        "rms_norm_eps": 1e-5,
        "rope": Rope(1e6),
        "max_position_embeddings": 32768,
    }
    return ModelConfig(family="mixtral", **(known | sizes))


MODELS = {  # name: (the target, what its draft is called)
    "mixtral-8x7b": (
        _mixtral(
            vocab_size=32000,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
        "mistral-7b",
    ),
    "tiny": (  # for tests
        _mixtral(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_local_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=2048,
        ),
        "tiny-draft",
    ),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """What is going to be written, and how large it is."""

    target: ModelConfig
    draft: ModelConfig
    dtypes: Dtypes
    names: tuple[str, str]
    distinct: int  # layers with experts of their own; the others are links

    @classmethod
    def of(cls, name: str, *, layers: int | None = None, experts: str = "int4") -> Pair:
        """The pair of a model in MODELS, both with `layers` layers. UsageError for what there is not."""
        if name not in MODELS:
            raise UsageError(f"--synthetic {name}: one of {', '.join(MODELS)}")
        if experts not in SCHEMES:
            raise UsageError(f"--experts {experts}: one of {', '.join(SCHEMES)}")
        target, draft_name = MODELS[name]
        most = target.num_hidden_layers
        if layers is not None and not 1 <= layers <= most:
            raise UsageError(f"--layers {layers}: {name} has 1 to {most}")
        target = replace(target, num_hidden_layers=layers or most)
        draft = replace(target, family="mistral", num_local_experts=0, num_experts_per_tok=0)
        dtypes = SCHEMES[experts]
        layer = _stride(target, dtypes) * target.num_local_experts
        distinct = min(target.num_hidden_layers, -(-DISTINCT_BYTES // layer))
        return cls(target, draft, dtypes, (name, draft_name), distinct)

    def check_prompts(self, prompts: Sequence[str], ctx_size: int | None) -> None:
        """CapacityError for one that leaves no room in the context: every byte will be a token.

        UsageError for a context that the pair will not take.
        """
        longest = self.target.max_position_embeddings
        if ctx_size is not None and not 2 <= ctx_size <= longest:
            raise UsageError(f"--ctx-size {ctx_size}: {self.names[0]} takes 2 to {longest}")
        context = ctx_size or min(DEFAULT_CONTEXT, longest)
        for number, text in enumerate(prompts, 1):
            if (count := len(text.encode())) >= context:
                raise CapacityError(
                    f"prompt {number} has {count} tokens for a synthetic pair, a token each byte, the "
                    f"context {context}: shorten it or raise --ctx-size"
                )

    @property
    def expert_bytes(self) -> int:
        """Of all experts, as the engine sees them."""
        c = self.target
        return c.num_hidden_layers * c.num_local_experts * _stride(c, self.dtypes)

    @property
    def disk_bytes(self) -> int:
        """Of both packs, links counted once; but for headers and tokenizers."""
        experts = self.expert_bytes // self.target.num_hidden_layers * self.distinct
        models = self.target, self.draft
        return experts + sum(sum(m.dense_sizes(c, self.dtypes).values()) for c in models)

    @property
    def target_size(self) -> ModelSize:
        """What the memory plan will read in the target's headers."""
        dense = m.dense_sizes(self.target, self.dtypes)
        return ModelSize(self.target, self.dtypes, dense, _stride(self.target, self.dtypes))

    def __str__(self) -> str:
        c = self.target
        return (
            f"{' and '.join(self.names)}, random weights, {c.num_hidden_layers} layers: experts of "
            f"{size(self.expert_bytes)}; {size(self.disk_bytes)} are written"
        )


def cache_folder() -> Path:
    """Where synthetic pairs lie if nobody says: the user's cache."""
    import platformdirs

    return platformdirs.user_cache_path("spmoe-lite", appauthor=False)


@contextlib.contextmanager
def temporary_pair(
    pair: Pair,
    folder: Path,
    *,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> Iterator[tuple[Path, Path]]:
    """Packs of target and draft in a folder of their own within `folder`, deleted at the end.

    One that a killed run left there goes first: nobody holds its lock.
    """
    with _made(folder):
        with naming(folder, "write"):
            for left in filter(_is_left, folder.glob(PREFIX + "*")):
                with contextlib.suppress(BusyError), locked(left):
                    shutil.rmtree(left, ignore_errors=True)
            there = tempfile.TemporaryDirectory(
                prefix=PREFIX, dir=folder, ignore_cleanup_errors=True
            )
        with there as work, locked(Path(work)):
            with making("the synthetic pair", "give another --folder, or fewer --layers"):
                paths = write_pair(pair, Path(work), cancel=cancel, on_progress=on_progress)
            yield paths


@contextlib.contextmanager
def _made(folder: Path) -> Iterator[None]:
    """A folder, made with all it lies in; what was not there before goes at the end, unless it is in use."""
    with naming(folder, "write"):
        new = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        with naming(folder, "write"):
            folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        for one in new:
            with contextlib.suppress(OSError):  # somebody has put something there
                one.rmdir()


def _is_left(path: Path) -> bool:
    """Whether a folder holds pairs and nothing else: `--folder` may be where a user keeps other things."""
    if path.is_symlink() or not path.is_dir():
        return False
    packs = {name + m.SUFFIX for key, (_, draft) in MODELS.items() for name in (key, draft)}
    found = {entry.name.removesuffix(PARTIAL) for entry in path.iterdir()} - {LOCK}
    return bool(found) and found <= packs


def write_pair(
    pair: Pair,
    folder: Path,
    *,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[Path, Path]:
    """Write both packs into `folder` and return their paths. CapacityError where the disk is too small."""
    free = shutil.disk_usage(folder).free
    if pair.disk_bytes > free:
        needed, there = sizes_apart(pair.disk_bytes, free)
        raise CapacityError(
            f"the synthetic pair takes {needed}, {there} are free at {folder}: give another "
            f"--folder, or fewer --layers"
        )
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        check(cancel)
        done += count
        if on_progress is not None:
            on_progress(Progress("synthetic", done, pair.disk_bytes, "bytes"))

    paths = []
    with ThreadPoolExecutor(MAKERS, "spmoe-random") as pool:
        for name, config in zip(pair.names, (pair.target, pair.draft), strict=True):
            dtypes = replace(pair.dtypes, experts=pair.dtypes.experts if config.is_moe else None)
            source = {"id": f"synthetic {name}", "revision": str(SEED)}
            path = folder / (name + m.SUFFIX)
            with PackWriter(path, config, dtypes, source, {}, cancel=cancel) as writer:
                _write_experts(writer, pair.distinct, pool, advance)
                _write_dense(writer, pool, advance)
                for file, data in _texts(config.vocab_size).items():
                    writer.copy_text(file, data)
                layers = config.num_hidden_layers if config.is_moe else 0
                found = layers * config.num_local_experts * 3
                audit = {"layers": layers, "experts": config.num_local_experts, "matrices": 3}
                paths.append(writer.finish(audit | {"found": found}, config.vocab_size))
    return paths[0], paths[1]


def _write_experts(
    writer: PackWriter, distinct: int, pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    c, layout = writer.config, writer.layout
    if layout is None:
        return
    up = (layout.intermediate_size, layout.hidden_size)

    def expert(layer: int, number: int) -> tuple[Weight, Weight, Weight]:
        gate, above, down = (
            random_weight(layout.dtype, shape, GAIN, f"expert.{layer}.{number}.{part}")
            for part, shape in enumerate((up, up, up[::-1]))
        )
        return gate, above, down

    def reported(experts: Iterator[T]) -> Iterator[T]:
        for one in experts:
            yield one
            advance(layout.stride)

    for layer in range(c.num_hidden_layers):
        if layer < distinct:
            jobs = [(layer, number) for number in range(c.num_local_experts)]
            writer.write_layer(layer, reported(_ahead(pool, expert, jobs)))
        else:
            writer.link_layer(layer, layer % distinct)


def _write_dense(
    writer: PackWriter, pool: ThreadPoolExecutor, advance: Callable[[int], None]
) -> None:
    shapes = dense_shapes(writer.config)

    def tensor(name: str) -> Weight:
        dtype, shape = writer.dtypes.of(name), shapes[name]
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=TORCH_DTYPES[dtype])
        return random_weight(dtype, (shape[0], shape[1]), _gain(name, shape[1]), name)

    made = _ahead(pool, tensor, [(name,) for name in shapes])

    def take() -> Weight:
        weight = next(made)
        advance(_bytes(weight))
        return weight

    writer.write_dense(dict.fromkeys(shapes, take))  # which asks in the order of the shapes


def _gain(name: str, columns: int) -> float:
    if name == m.EMBED:
        return math.sqrt(columns)  # rows are what is added up: each of about one
    if name.endswith("router.weight"):
        return ROUTER_GAIN
    if name.endswith("o_proj.weight"):
        return ATTENTION_GAIN
    return GAIN if name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj") else 1.0


def _ahead(
    pool: ThreadPoolExecutor, make: Callable[..., T], jobs: Sequence[tuple[Any, ...]]
) -> Iterator[T]:
    """make(*job) of each job in turn, AHEAD of them on their way."""
    waiting: deque[Future[T]] = deque()
    try:
        for job in jobs:
            waiting.append(pool.submit(make, *job))
            if len(waiting) > AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()


def random_weight(dtype: str, shape: tuple[int, int], gain: float, name: str) -> Weight:
    """A matrix [N, K] of random words with set exponents, root mean square about gain / sqrt(K)."""
    scheme = scheme_of(dtype)
    size = m.matrix_bytes(dtype, *shape)
    generator = np.random.Generator(np.random.PCG64((SEED, zlib.crc32(name.encode()))))
    words = generator.integers(0, 2**64 - 1, -(-size // 8), np.uint64, endpoint=True)
    memory = torch.from_numpy(words.view(np.uint8)[:size])
    weight = view_weight(memory, dtype, shape)
    exponent = round(math.log2(gain / math.sqrt(shape[1]) / (1.53 * _code_rms(scheme))))
    if isinstance(weight, QuantizedMatrix):
        _set_exponent(weight.scales, 10, 5, exponent)
    elif dtype == "fp32":
        _set_exponent(weight.view(torch.int32), 23, 8, exponent)
    else:
        _set_exponent(weight.view(torch.int16), *((7, 8) if dtype == "bf16" else (10, 5)), exponent)
    return weight


def _code_rms(scheme: Scheme | None) -> float:
    """Root mean square of code less zero, both uniform; 1.53 is that of a random mantissa, 1 to 2."""
    if scheme is None:
        return 1.0
    codes = 1 << scheme.bits
    return math.sqrt((codes**2 - 1) / 12 * (2 if scheme.zeros else 1))


def _set_exponent(words: torch.Tensor, mantissa: int, bits: int, exponent: int) -> None:
    """Make floats of random words: sign and mantissa stay, the exponent is this power of two."""
    field = max(1, min((1 << bits) - 2, exponent + (1 << (bits - 1)) - 1))
    words.bitwise_and_(~(((1 << bits) - 1) << mantissa)).bitwise_or_(field << mantissa)


def _texts(vocab: int) -> dict[str, bytes]:
    """A tokenizer of `vocab` entries: every byte, and words of digits that no text is read as."""
    pieces = [*sorted(ByteLevel.alphabet()), *(f"\u0120{i}" for i in range(256, vocab))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    file = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": byte_level | {"use_regex": True},
        "decoder": byte_level | {"use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces)},
            "merges": [],
        },
    }
    return {"tokenizer.json": json.dumps(file).encode()}


def _stride(config: ModelConfig, dtypes: Dtypes) -> int:
    assert dtypes.experts is not None
    return expert_layout(dtypes.experts, config.hidden_size, config.intermediate_size).stride


def _bytes(weight: Weight) -> int:
    parts = (weight,) if isinstance(weight, torch.Tensor) else weight.tensors()
    return sum(part.nbytes for part in parts)


# --- acceptance


class ForcedAcceptance:
    """In place of `verifier.verify`: of a draft as much is kept as a draw says, whatever the target says.

    Whether a token would be kept depends on its place in the text alone, so it is the same for every
    policy and draft length. After the kept ones comes the target's token. The text is nobody's.
    """

    def __init__(self, rate: float, seed: int = SEED):
        if not 0 <= rate <= 1:
            raise UsageError(f"--acceptance {rate}: 0 to 1")
        self._rate, self._seed = rate, seed

    def __call__(
        self,
        draft_tokens: Sequence[int],
        logits: torch.Tensor,
        sampler: Sampler,
        context: Sequence[int],
        best: list[int] | None = None,
    ) -> Verdict:
        """As `verify`: logits [N + 1, V] for N proposals after `context`, `best` of each row if known."""
        kept = 0
        while kept < len(draft_tokens) and self._keeps(len(context) + kept):
            kept += 1
        tokens = list(draft_tokens[:kept])
        chosen = best[kept] if best else sampler.pick_row(logits[kept], [*context, *tokens])
        return Verdict([*tokens, chosen], kept)

    def _keeps(self, position: int) -> bool:
        return random.Random(f"{self._seed} {position}").random() < self._rate
