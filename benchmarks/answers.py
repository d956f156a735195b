"""Whole answers on a GPU at true shapes: `python -m benchmarks.answers FOLDER [--slots N,N] [--json FILE]`.

A synthetic Mixtral-8x7B and Mistral-7B in int4 are written into FOLDER (a memory file system is quickest)
unless they are there. The engine answers as it would a user, without the draft and with it, greedy and
sampled; the share of a step that is not the GPU's is what the host, reading and choosing tokens, adds to it.
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

WARM = 10  # steps of an answer before those that count
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=1),
    "sampled, top-k, top-p": SamplingParams(temperature=0.8, top_k=40, top_p=0.9, seed=1),
}


def measure(engine: Engine, prompt: list[int], sampling: SamplingParams, tokens: int) -> dict:
    """Medians over the steps of one answer, in ms; RuntimeError where the host drives them."""
    graphs = engine.decoder.graphs
    if graphs is None:
        raise RuntimeError(f"steps are driven by the host: {'; '.join(engine.notices)}")
    step, ends, gpu = graphs.step, [], []

    def noted(*arguments):
        found = step(*arguments)
        ends.append(time.perf_counter() * 1e3)
        gpu.append(found.draft_ms + found.verify_ms)
        return found

    graphs.step = noted
    try:
        result = engine.generate(prompt, max_tokens=tokens, sampling=sampling).result
    finally:
        del graphs.step
    if len(ends) < WARM + 2:
        raise RuntimeError(f"{len(ends)} steps are too few: raise --tokens")
    wall = [after - before for before, after in zip(ends[WARM:], ends[WARM + 1 :], strict=False)]
    ms, busy = statistics.median(wall), statistics.median(gpu[WARM + 1 :])
    return {
        "step_ms": ms,
        "gpu_ms": busy,
        "not_gpu": (ms - busy) / ms,
        "steps": len(wall),
        "tokens_a_step": len(result.token_ids) / len(ends),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", default="256")
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pair = synthetic.Pair.of("mixtral-8x7b", layers=args.layers)
    target, draft = (args.folder / f"{name}.spmoe" for name in pair.names)
    if not (target.exists() and draft.exists()):
        args.folder.mkdir(parents=True, exist_ok=True)
        target, draft = synthetic.write_pair(pair, args.folder)
    draw = random.Random(0)
    prompt = [1, *(draw.randrange(3, 32000) for _ in range(args.prompt - 1))]
    results: dict = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name()}
    results["torch"] = torch.__version__
    for slots in map(int, args.slots.split(",")):
        for drafts in (0, 4):
            options = {"slots": slots, "ctx_size": args.prompt + args.tokens + 16}
            with Engine.load(
                target, draft if drafts else None, device="cuda", draft_tokens=drafts, **options
            ) as engine:
                engine.eos_ids = frozenset()  # an answer is as long as it is asked to be
                engine.generate(prompt, max_tokens=30).result  # noqa: B018
                for name, sampling in SAMPLINGS.items():
                    row = measure(engine, prompt, sampling, args.tokens)
                    results[f"{slots} slots, {drafts} drafts, {name}"] = row
                    shown = {key: round(value, 4) for key, value in row.items()}
                    print(slots, drafts, name, shown, flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
