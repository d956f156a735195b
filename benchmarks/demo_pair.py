"""What the demo pair does at 25, 50 and 75 % of its experts in slots, with prefetching on and off.

    python benchmarks/demo_pair.py --prompts HumanEval.jsonl.gz:prompt --prompts gsm8k.jsonl:question
        --prompts mt_bench.jsonl:turns --limit 20 --max-tokens 64 --json results.json

Each `--prompts FILE:FIELD` is a kind of prompt; FILE is JSON lines, plain or gzipped, and of a list the
first entry is taken. Every prompt is answered by every configuration through the chat template, greedily,
and the texts must be the same everywhere before a figure is kept. Recall is counted over accepted tokens
with a prediction: top-1, whether the predictor's best guess was used; all, the share of the router's choices
it named; would-be misses, the share of those that were absent when the step began. `--coupling` measures
what choosing tokens by shared noise costs in acceptance: the agreement of argmax(log p + G) and
argmax(log q + G) beside the sum of min(p, q), the best any draft could do.
"""

from __future__ import annotations

import argparse
import gzip
import json
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmoe_lite import Engine, SamplingParams  # noqa: E402
from spmoe_lite.sampling import Sampler, probabilities  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="demo")
    parser.add_argument("--draft", default="demo-draft")
    parser.add_argument("--prompts", action="append", required=True, metavar="FILE:FIELD")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--draft-tokens", type=lambda n: n if n == "auto" else int(n), default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--shares", default="0.25,0.5,0.75")
    parser.add_argument("--coupling", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    kinds = {Path(spec.rpartition(":")[0]).name: read(spec, args.limit) for spec in args.prompts}
    report = {"command": " ".join(sys.argv), "machine": machine(), "rows": []}
    texts: dict[str, list[tuple[int, ...]]] = {}
    how = {"device": args.device, "ctx_size": 1024, "draft_tokens": args.draft_tokens}
    with Engine.load(args.target, args.draft, **how) as engine:
        experts = engine.plan.expert_count
        for kind, prompts in kinds.items():
            report["rows"].append(measure(engine, args, kind, prompts, texts, "all", "off"))
        if args.coupling:
            report["coupling"] = [
                coupling(engine, kind, prompts, args.max_tokens, t)
                for kind, prompts in kinds.items()
                for t in (0.5, 0.8, 1.0)
            ]
    for share in [float(s) for s in args.shares.split(",") if s]:
        for prefetch in ("off", "auto", "every layer"):
            how = {"prefetch": prefetch != "off", "slots": int(share * experts)}
            how["cutoff"] = 10**6 if prefetch == "every layer" else None
            with Engine.load(
                args.target,
                args.draft,
                device=args.device,
                ctx_size=1024,
                draft_tokens=args.draft_tokens,
                **how,
            ) as engine:
                for kind, prompts in kinds.items():
                    row = measure(engine, args, kind, prompts, texts, f"{share:.0%}", prefetch)
                    report["rows"].append(row)
                print(engine.decoder.drift.profile, "cutoff", engine.decoder.last_cutoff)
    print_table(report)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def measure(engine, args, kind, prompts, texts, share, prefetch):
    """One configuration on one kind of prompt, warm from the kinds before it."""
    before, started, written, decode = engine.counters.copy(), time.perf_counter(), [], 0.0
    tokens = 0
    for prompt in prompts:
        result = engine.chat(
            [{"role": "user", "content": prompt}],
            max_tokens=args.max_tokens,
            sampling=SamplingParams(),
        ).result
        written.append(result.token_ids)
        decode += result.stats.seconds
        tokens += result.completion_tokens - 1
    seconds = time.perf_counter() - started
    if texts.setdefault(kind, written) != written:
        raise SystemExit(f"the text of {kind} changed with {share} of the experts, {prefetch}")
    c = engine.counters.since(before)
    row = {
        "kind": kind,
        "share": share,
        "prefetch": prefetch,
        "acceptance": ratio(c.accepted, c.drafted),
        "tokens_per_pass": ratio(c.tokens, c.steps),
        "recall_top1": ratio(c.predicted_best_used, c.predictions),
        "recall_all": ratio(c.predicted_used, c.wanted),
        "recall_would_miss": ratio(c.would_miss_predicted, c.would_miss),
        "hit_access": ratio(c.access_hits, c.accesses),
        "hit_unique": ratio(c.unique_hits, c.unique),
        "mb_per_token": ratio(c.bytes_moved / 1e6, c.tokens),
        "tpot_ms": ratio(decode * 1e3, tokens),
        "seconds": seconds,
        "counters": asdict(c),
    }
    print({k: v for k, v in row.items() if k != "counters"}, flush=True)
    return row


@torch.inference_mode()
def coupling(engine, kind, prompts, max_tokens, temperature):
    """Agreement by shared noise, and the sum of min(p, q), teacher-forced on the target's text."""
    params = SamplingParams(temperature=temperature, seed=11)
    decoder = engine.decoder
    agreed = overlap = count = 0.0
    for prompt in prompts[:8]:
        tokens = engine.template.encode([{"role": "user", "content": prompt}])
        result = engine.generate(tokens, max_tokens=max_tokens, sampling=params).result
        whole = [*tokens, *result.token_ids]
        sampler = Sampler(params, engine.num_tokens, len(tokens))
        session = decoder.session
        session.target_kv.truncate(0)
        session.draft_kv.truncate(0)
        rows = len(result.token_ids)
        p = decoder.target.forward(whole[:-1], session.target_kv, logits_rows=rows).float().cpu()
        q = decoder.draft.forward(whole[:-1], session.draft_kv, logits_rows=rows).float().cpu()
        for i in range(rows):
            context = whole[: len(tokens) + i]
            agreed += sampler.pick_row(p[i], context) == sampler.pick_row(q[i], context)
            both = torch.minimum(probabilities(p[i], params), probabilities(q[i], params))
            overlap += float(both.sum())
            count += 1
    row = {
        "kind": kind,
        "temperature": temperature,
        "shared_noise": agreed / count,
        "sum_min": overlap / count,
        "rows": count,
    }
    print(row, flush=True)
    return row


def read(spec: str, limit: int) -> list[str]:
    path, _, field = spec.rpartition(":")
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        values = [json.loads(line)[field] for line in lines][:limit]
    return [value[0] if isinstance(value, list) else value for value in values]


def ratio(part, whole):
    return part / whole if whole else None


def machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": commit or None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
        "gpu": gpu,
    }


def print_table(report) -> None:
    names = (
        "kind share prefetch acceptance tokens_per_pass recall_top1 recall_all recall_would_miss "
        "hit_access hit_unique mb_per_token tpot_ms"
    ).split()
    print("| " + " | ".join(names) + " |")
    print("|" + "---|" * len(names))
    for row in report["rows"]:
        cells = [row[name] for name in names]
        cells = [
            f"{c:.3g}" if isinstance(c, float) else "-" if c is None else str(c) for c in cells
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
