"""What copies ahead save, by simulation: `python -m benchmarks.ahead [--slots N,N] [--skew S] [--json FILE]`.

The engine's own tables (`kernels/residency.py`, by torch) and its rule (`copies_queued`) with random routing, a
predictor that is right, and copies that take a given time; nothing is copied. Shape of Mixtral-8x7B, a step of K
drafts, acceptance drawn. Expert i of a layer is chosen in proportion to skew^i, so 1 is uniform.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np
import torch

from spmoe_lite.cutoff import Profile, copies_queued
from spmoe_lite.kernels.residency import FILLED, STAGED, Tables, credit, route, stage

LAYERS, EXPERTS, CHOICES, STRIDE = 32, 8, 2, 1 << 20
WARM = 12  # steps before those that count


def one(value: int) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


class Bus:
    """One copy after the other, each of which takes `copy_ms`."""

    def __init__(self, tables: Tables, copy_ms: float):
        self.tables, self.copy_ms = tables, copy_ms
        self.ends: list[tuple[float, tuple[int, int, int]]] = []

    def add(self, now: float, number: int) -> None:
        """What was staged just now, with draft token `number`."""
        for layer, j in (self.tables.state[number] == STAGED).nonzero().tolist():
            begin = max([now, *(end for end, _ in self.ends[-1:])])
            self.ends.append((begin + self.copy_ms, (number, layer, j)))

    def advance(self, now: float) -> None:
        """Publish what has come, as `fetch` does."""
        t = self.tables
        for _, at in [item for item in self.ends if item[0] <= now]:
            if t.state[at] == STAGED:
                layer, expert, slot = at[1], int(t.wanted[at]), int(t.place[at])
                t.src[layer, expert], t.state[at] = t.slots[layer, slot], FILLED


def simulate(args: argparse.Namespace, slots: int, ahead: int) -> dict[str, float]:
    """Misses, copies and waiting a step, with the predictions of the first `ahead` layers."""
    draw, share, drafts = np.random.default_rng(0), slots // LAYERS, args.draft_tokens
    host = STRIDE * (1 + torch.arange(LAYERS * EXPERTS).view(LAYERS, EXPERTS))
    room = STRIDE * (1 << 20) + STRIDE * torch.arange(LAYERS * share).view(LAYERS, share)
    t = Tables.make(host, room, (drafts, max(ahead, 1), CHOICES))
    use = torch.zeros((EXPERTS, 3), dtype=torch.int64)
    trace = torch.zeros((LAYERS, drafts + 1, CHOICES), dtype=torch.int32)
    start, draft_ms = ahead / LAYERS, args.draft_ms
    queued = copies_queued(Profile(args.copy_ms * args.wrong, draft_ms, 0.0), drafts, start)
    weights = args.skew ** np.arange(EXPERTS)
    orders = [draw.permutation(EXPERTS) for _ in range(LAYERS)]
    position, missed, copied, waited = 0, 0, 0, 0.0
    for step in range(WARM + args.steps):
        keys = np.log(weights) + draw.gumbel(size=(LAYERS, drafts + 1, EXPERTS))
        picked = np.argsort(-keys, axis=2)[:, :, :CHOICES]
        chosen = torch.tensor(np.stack([o[p] for o, p in zip(orders, picked, strict=True)])).int()
        bus, over = Bus(t, args.copy_ms), drafts * draft_ms
        for number in range(drafts if ahead else 0):
            now = (number + start) * draft_ms
            bus.advance(now)
            stage(t, chosen[:ahead, number], one(ahead), torch.tensor(queued).int(), one(number))
            bus.add(now, number)
        end = max([over, *(end for end, _ in bus.ends)])
        bus.advance(end)
        for layer in range(LAYERS):
            route(t, layer, chosen[layer], use, trace[layer])
        kept = 1
        while kept <= drafts and draw.random() < args.acceptance:
            kept += 1
        credit(t, trace, one(kept), one(position))
        position += kept
        if step >= WARM:
            missed += int(t.missed.sum())
            copied += len(bus.ends)
            waited += end - over
    rates = {"missed": missed, "copied": copied, "wait_ms": waited}
    return {name: round(value / args.steps, 2) for name, value in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", default="64,128,192")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--skew", type=float, default=1.0)
    parser.add_argument("--draft-ms", type=float, default=2.06)
    parser.add_argument("--copy-ms", type=float, default=1.84)
    parser.add_argument(
        "--wrong", type=float, default=1.0, help="what the rule takes a copy's time times"
    )
    parser.add_argument("--layers-ahead", default="0,4,8")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict = {"command": " ".join(["python -m benchmarks.ahead", *sys.argv[1:]])}
    for slots in map(int, args.slots.split(",")):
        for ahead in map(int, args.layers_ahead.split(",")):
            name = f"{slots} slots, {ahead} layers"
            results[name] = simulate(args, slots, ahead)
            print(name, results[name], flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
