"""The candidate tiles that the tables of `kernels/configs.py` were chosen from, each timed.

Run by `kernels.py --only sweep`, with `--match` for some of them.
"""

import contextlib
from collections.abc import Callable, Iterator
from itertools import product
from types import ModuleType

import torch
from kernel_data import DENSE, LAYER, attention_calls, random, shared_experts, weights

from spmoe_lite import timing
from spmoe_lite.kernels import attention_triton, expert_gemm_triton, linear_triton
from spmoe_lite.kernels.configs import AttentionTile, Tile
from spmoe_lite.kernels.linear import linear

CODES = "int4-g64z"
# n, k, warps, stages
UP_FEW = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 64, 4, 5)]
UP_FEW += [(64, 64, 4, 8), (64, 256, 4, 3), (128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 8, 6)]
DOWN_FEW = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 64, 4, 6)]
DOWN_FEW += [(64, 64, 4, 8), (64, 256, 4, 3), (128, 128, 8, 3), (128, 64, 8, 6)]
UP_MANY = [(256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3)]
DOWN_MANY = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 3), (256, 64, 8, 4)]
CODES_FEW = [(64, 128, 4, 4), (64, 256, 4, 3), (64, 256, 4, 4), (128, 128, 4, 4)]
CODES_FEW += [(128, 256, 4, 3), (128, 256, 4, 4), (128, 128, 4, 3)]
CODES_FEW += [(128, 128, 4, 4, 128)]  # and registers
# n, k, t, warps, stages
CODES_MANY = [(128, 128, 64, 4, 3), (128, 128, 128, 4, 3), (128, 128, 128, 8, 4)]
CODES_MANY += [(256, 128, 128, 8, 3), (128, 256, 128, 8, 2)]
# rows, keys, warps, stages
ATTENTION = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3), (64, 32, 4, 4)]
ATTENTION += [(64, 32, 4, 6), (32, 64, 4, 3), (64, 32, 4, 5)]

Candidate = tuple[str, ModuleType, dict[str, object], Callable[[], list[Callable]]]


def candidates() -> Iterator[Candidate]:
    """(name, the kernels' module, what is replaced in it, what makes the calls) of each."""
    for part, few, many in (("up", UP_FEW, UP_MANY), ("down", DOWN_FEW, DOWN_MANY)):
        yield from experts("bf16", "mixtral", part, (1, 5, 8), [with_t(e, 16) for e in few])
        yield from experts("bf16", "mixtral", part, (512, 2048), [with_t(e, 128) for e in many])
    few = [with_t(entry, 16) for entry in CODES_FEW]
    for model, tokens in (("mixtral", (1, 5, 8)), ("qwen3", (1, 5, 8)), ("deepseek", (1, 8))):
        for part in ("up", "down"):
            yield from experts(CODES, model, part, tokens, few)
            if model == "mixtral":
                yield from experts(CODES, model, part, (512, 2048), CODES_MANY)
    for name in LAYER:
        yield from dense("bf16", name, [with_t(e, 16) for e in DOWN_FEW[1:6]], (256, 512))
        yield from dense(CODES, name, few, (256, 512, 1024))
    shapes = ((1, 32768), (5, 32768), (1, 1024), (5, 8192), (2048, 2048))
    for entry, (tokens, context) in product(ATTENTION, shapes):
        chosen = AttentionTile(*entry)
        yield (
            f"attention T={tokens} context {context} {entry}",
            attention_triton,
            {"attention_tile": lambda *_, chosen=chosen: chosen},
            lambda tokens=tokens, context=context: attention_calls(tokens, context, 8),
        )


def with_t(entry: tuple, t: int) -> tuple:
    return (*entry[:2], t, *entry[2:])


def experts(dtype: str, model: str, part: str, rows: tuple, entries: list) -> Iterator[Candidate]:
    for entry, tokens in product(entries, rows):
        chosen = Tile(*entry)
        yield (
            f"{dtype} {model} {part} T={tokens} {entry}",
            expert_gemm_triton,
            {"tile": lambda *_, chosen=chosen: chosen},
            lambda tokens=tokens: shared_experts(dtype, model).calls(tokens, part)[0],
        )


def dense(dtype: str, name: str, entries: list, wanted: tuple) -> Iterator[Candidate]:
    def calls() -> list[Callable]:
        x = random((1, DENSE[name][1]), torch.bfloat16)
        return [lambda w=w: linear(x, w) for w in weights(dtype, DENSE[name])]

    for entry, programs in product(entries, wanted):
        chosen = Tile(*entry)
        yield (
            f"{dtype} dense {name} T=1 {entry} {programs}",
            linear_triton,
            {"tile": lambda *_, chosen=chosen: chosen, "WANTED_PROGRAMS": programs},
            calls,
        )


@contextlib.contextmanager
def patched(module: ModuleType, values: dict[str, object]) -> Iterator[None]:
    kept = {name: getattr(module, name) for name in values}
    vars(module).update(values)
    try:
        yield
    finally:
        vars(module).update(kept)


def sweep(match: str) -> dict:
    """Milliseconds of every candidate whose name has `match` in it."""
    rows: dict[str, float | str] = {}
    for name, module, values, make in candidates():
        if match in name:
            try:
                with patched(module, values):
                    rows[name] = timing.replay_ms(make(), 9)
            except Exception as error:  # a candidate that does not fit is a result too
                rows[name] = f"{type(error).__name__}: {error}"[:200]
    return rows
