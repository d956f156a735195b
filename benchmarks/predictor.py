"""Which of the draft's states names the target's experts best, and how to merge several draft tokens.

    python benchmarks/predictor.py --prompts FILE:FIELD [--prompts ...] --limit 10 --max-tokens 48 --json FILE

Target and draft read the same text (the target's own, greedy), so that states and routing are compared at
equal positions. Per token: recall of the two experts used by the two predicted from each state. Per window
of four draft tokens: recall of the union used, when as many experts are named as the union has, ranked by the
maximum or the sum of the router's probabilities over the window, or by how often they are in the top two.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.demo_pair import machine, read  # noqa: E402
from spmoe_lite import Engine, SamplingParams  # noqa: E402
from spmoe_lite.kernels.norm import rms_norm  # noqa: E402

WINDOW = 4


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--prompts", action="append", required=True, metavar="FILE:FIELD")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    per_token, merged = defaultdict(list), defaultdict(list)
    with Engine.load(args.target, args.draft, device=args.device, ctx_size=1024) as engine:
        for spec in args.prompts:
            for prompt in read(spec, args.limit):
                score(engine, prompt, args.max_tokens, per_token, merged)
    report = {
        "command": " ".join(sys.argv),
        "machine": machine(),
        "recall_per_token": {name: sum(v) / len(v) for name, v in per_token.items()},
        "recall_of_window_union": {name: sum(v) / len(v) for name, v in merged.items()},
    }
    print(json.dumps(report, indent=1))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def score(engine, prompt, max_tokens, per_token, merged):
    """Add one answer's recalls."""
    tokens = engine.template.encode([{"role": "user", "content": prompt}])
    written = engine.generate(tokens, max_tokens=max_tokens, sampling=SamplingParams()).result
    whole, start = [*tokens, *written.token_ids], len(tokens)
    decoder = engine.decoder
    target, draft, session = decoder.target, decoder.draft, decoder.session
    session.target_kv.truncate(0)
    session.draft_kv.truncate(0)
    target.forward(whole, session.target_kv)
    used = {
        layer: [set(row) for row in rows[start:]] for layer, rows in decoder.store.trace.items()
    }
    decoder.store.end_pass(len(whole))
    states = draft_states(draft, whole, session.draft_kv)
    session.target_kv.truncate(0)
    session.draft_kv.truncate(0)
    for layer, block in enumerate(target.blocks):
        normed = {
            "residual after attention, target norm": (states["residual"][layer], block.post_norm),
            "residual after attention, draft norm": (
                states["residual"][layer],
                draft.blocks[layer].post_norm,
            ),
            "residual after attention, no norm": (states["residual"][layer], None),
            "attention output, target norm": (states["attention"][layer], block.post_norm),
            "attention output, no norm": (states["attention"][layer], None),
        }
        for name, (state, norm) in normed.items():
            x = state[start:]
            if norm is not None:
                x = rms_norm(x, norm, target.config.rms_norm_eps)
            probs = (x.float() @ block.router.float().T).softmax(-1)
            top = probs.topk(target.config.num_experts_per_tok).indices.tolist()
            for row, experts in enumerate(used[layer]):
                per_token[name].append(len(experts & set(top[row])) / len(experts))
            if name == "residual after attention, target norm":
                merge(probs, top, used[layer], merged)


def merge(probs, top, used, merged):
    """Rank experts over each window of draft tokens in several ways."""
    for begin in range(0, len(used) - WINDOW + 1, WINDOW):
        union = set().union(*used[begin : begin + WINDOW])
        window = probs[begin : begin + WINDOW]
        votes = torch.zeros(probs.shape[1])
        for row in top[begin : begin + WINDOW]:
            votes[row] += 1
        ranks = {
            "maximum": window.max(0).values,
            "sum": window.sum(0),
            "votes of the top two, then sum": votes + window.sum(0) / 100,
        }
        for name, rank in ranks.items():
            named = set(rank.topk(len(union)).indices.tolist())
            merged[name].append(len(named & union) / len(union))


def draft_states(draft, tokens, kv):
    """The draft's residual stream after attention and the attention output alone, [T, H] per layer."""
    states = {"residual": {}, "attention": {}}
    attend = draft._attend

    def noting(layer, block, x, kv):
        out = attend(layer, block, x, kv)
        states["attention"][layer] = out
        return out

    draft._attend = noting
    try:
        draft.forward(
            tokens, kv, on_attention=lambda layer, x: states["residual"].__setitem__(layer, x)
        )
    finally:
        del draft._attend
    return states


if __name__ == "__main__":
    main()
