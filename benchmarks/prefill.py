"""Prompts on a GPU at true shapes: `python -m benchmarks.prefill FOLDER [--slots N,N] [--rows N,N] [--json FILE]`.

A synthetic Mixtral-8x7B in int4 is written into FOLDER (a memory file system is quickest) unless it is
there. Each prompt is random token ids and read from an empty KV cache; its time is the one to the first
token, the median of `--repeats`, next to two floors from ceilings measured in the same run: experts that
had to be copied over the rate of a copy from page-locked memory, and products over torch's bf16 rate.
"""

import argparse
import json
import random
import statistics
import sys
import time
from pathlib import Path

import torch

from spmoe_lite import synthetic
from spmoe_lite.config import SamplingParams
from spmoe_lite.engine import Engine
from spmoe_lite.timing import replay_ms


def ceilings() -> dict[str, float]:
    """A copy of 1 GB from page-locked memory; a product of 8192^3 in bf16."""
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device="cuda")
    copy = replay_ms([lambda: there.copy_(host, non_blocking=True)], 5)
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    product = replay_ms([lambda: x @ x] * 2, 5)
    return {"copy_GB_s": host.nbytes / copy / 1e6, "matrix_TFLOP_s": 2 * 8192**3 / product / 1e9}


def operations(config, rows: int) -> float:
    """Of one pass over `rows` tokens: experts, projections and attention, without the head."""
    heads = config.num_attention_heads * config.head_dim
    wide = heads + 2 * config.num_key_value_heads * config.head_dim
    one = config.num_experts_per_tok * 3 * config.intermediate_size * config.hidden_size
    one += config.hidden_size * (wide + heads)
    return 2.0 * config.num_hidden_layers * rows * (one + rows * heads)


def measure(engine: Engine, rows: int, repeats: int, known: dict[str, float]) -> dict[str, float]:
    draw, times, copied = random.Random(rows), [], []
    config = engine.target_pack.config
    for i in range(repeats + 1):
        ids = [draw.randrange(3, config.vocab_size) for _ in range(rows)]
        engine.decoder.session.target_kv.truncate(0)
        before = engine.counters.loads
        begun = time.perf_counter()
        engine.generate(ids, max_tokens=1, sampling=SamplingParams()).result  # noqa: B018
        if i:
            times.append((time.perf_counter() - begun) * 1e3)
            copied.append(engine.counters.loads - before)
    ms, experts = statistics.median(times), statistics.median(copied)
    stride = engine.target_pack.expert_layout.stride
    bus = experts * stride / known["copy_GB_s"] / 1e6
    matrix = operations(config, rows) / known["matrix_TFLOP_s"] / 1e9
    row = {"ms": ms, "tokens_per_s": rows / ms * 1e3, "copied": experts}
    return row | {"bus_ms": bus, "matrix_ms": matrix, "over_floor": ms / max(bus, matrix)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", default="128,256")
    parser.add_argument("--rows", default="512,2048")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pair = synthetic.Pair.of("mixtral-8x7b", layers=args.layers)
    target = args.folder / f"{pair.names[0]}.spmoe"
    if not target.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        target, _ = synthetic.write_pair(pair, args.folder)
    results: dict = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name()}
    results |= {"torch": torch.__version__, "ceilings": ceilings()}
    for slots in map(int, args.slots.split(",")):
        with Engine.load(
            target, device="cuda", slots=slots, ctx_size=4096, home=args.folder
        ) as engine:
            for rows in map(int, args.rows.split(",")):
                row = measure(engine, rows, args.repeats, results["ceilings"])
                results[f"{slots} slots, {rows} tokens"] = row
                print(slots, rows, {key: round(value, 3) for key, value in row.items()}, flush=True)
            results[f"{slots} slots, GB"] = {
                "plan": engine.plan.total_bytes / 1e9,
                "most": torch.cuda.max_memory_allocated() / 1e9,
            }
            print(results[f"{slots} slots, GB"], flush=True)
        torch.cuda.reset_peak_memory_stats()
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
