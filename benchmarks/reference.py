"""Greedy text of a pack beside the reference library's, token by token; near-ties told from errors.

    python benchmarks/reference.py TARGET [--draft DRAFT] [--device cuda] [--slots N] [--json FILE]

Our text is fed to transformers' model with the same weights. Where its best token is another one, the gap
between that token's logit and ours says whether the two were as good as equal (rounding in 16 bits) or
whether one of us computes something else. Prompts: tests/prompts.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmoe_lite import Engine, SamplingParams, library  # noqa: E402
from tests.prompts import PROMPTS  # noqa: E402
from tests.reference import from_pack, gaps, greedy  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("--draft")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    how = {"device": args.device, "slots": args.slots, "ctx_size": 1024}
    with Engine.load(args.target, args.draft, **how) as engine:
        prompts = [engine.template.encode([{"role": "user", "content": p}]) for p in PROMPTS]
        ours = [
            engine.generate(
                p, max_tokens=args.max_tokens, sampling=SamplingParams()
            ).result.token_ids
            for p in prompts
        ]
        eos, acceptance = engine.eos_ids, engine.counters.accepted / max(1, engine.counters.drafted)
    model = from_pack(library.find(args.target), args.device)
    same, ties, tokens = 0, [], 0
    for prompt, text in zip(prompts, ours, strict=True):
        same += greedy(model, prompt, args.max_tokens, eos) == list(text)
        ties += [gap for gap in gaps(model, prompt, list(text)) if gap > 0]
        tokens += len(text)
    report = {
        "command": " ".join(sys.argv),
        "tokens": tokens,
        "texts_equal": same,
        "texts": len(prompts),
        "tokens_not_the_reference_s_best": len(ties),
        "largest_gap": max(ties, default=0.0),
        "acceptance": acceptance,
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
