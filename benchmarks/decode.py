"""The decode loop at true shapes: `python benchmarks/decode.py [--layers N] [--slots N,N] [--json FILE]`.

A synthetic Mixtral-8x7B and Mistral-7B on one GPU, without any download: random int4 weights, the draft
with the target's own attention and embedding and feed-forward parts so small that its states point at the
target's experts. Experts in host memory are views of fewer distinct ones, more bytes than the last-level
cache holds. Acceptance is forced: of each step a number of proposals drawn from the rate asked for. What
runs is the engine's captured steps (`spmoe_lite/graphs.py`) over its tables; the Engine itself does not.

Every run takes the same steps: proposals, what the target's routers choose and the bits of its logits must
not depend on where experts lie, and are compared. A last run per number of slots has a predictor that was
told what the run before it found.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.kernel_data import DEVICE, layout
from spmoe_lite import synthetic, timing
from spmoe_lite.cutoff import Drift, Profile, copies_queued
from spmoe_lite.graphs import Found, StepGraphs
from spmoe_lite.kernels.residency import STAGED, Tables, fetch
from spmoe_lite.kvcache import KVCache
from spmoe_lite.model import Transformer
from spmoe_lite.precision import matrix_bytes
from spmoe_lite.predictor import ExpertPredictor
from spmoe_lite.slots import SlotTable

HIDDEN, INNER, VOCAB, EXPERTS, CHOICES = 4096, 14336, 32000, 8, 2
CODES, HEAD = "int4-g64z", "int8-g64"
CONTEXT, CAPACITY = 1024, 4096
WARM = 12  # steps before those that count: the slots fill, LRU settles


def weight(dtype: str, rows: int, columns: int):
    memory = torch.empty(matrix_bytes(dtype, rows, columns), dtype=torch.uint8, device=DEVICE)
    return timing.random_weight(memory, dtype, (rows, columns))


def small(scales: torch.Tensor) -> None:
    """Scales of about 2^-12: what these weights add to the residual stream is a small part of it."""
    scales.bitwise_and_(-0x7C01).bitwise_or_(0x0C00)


def shared_tensors(layers: int) -> dict:
    """Embedding, attention and norms, which target and draft have in common."""
    ones = torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    embed = torch.randn(VOCAB, HIDDEN, device=DEVICE).bfloat16()
    tensors = {"embed_tokens.weight": embed, "norm.weight": ones}
    tensors["lm_head.weight"] = weight(HEAD, VOCAB, HIDDEN)
    for i in range(layers):
        for name, rows in {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024, "o_proj": 4096}.items():
            tensors[f"layers.{i}.{name}.weight"] = weight(CODES, rows, HIDDEN)
        tensors[f"layers.{i}.input_norm.weight"] = tensors[f"layers.{i}.post_norm.weight"] = ones
    return tensors


class Pair:
    """Target and draft, the target's experts in host memory, and as many as fit in a slab."""

    def __init__(self, layers: int, distinct: int):
        self.layers, self.layout = layers, layout(CODES, HIDDEN, INNER)
        shapes, common = synthetic.Pair.of("mixtral-8x7b", layers=layers), shared_tensors(layers)
        target, draft = dict(common), dict(common)
        for i in range(layers):
            router = torch.randn(EXPERTS, HIDDEN, device=DEVICE) * 0.02
            target[f"layers.{i}.router.weight"] = router.bfloat16()
            for name, shape in {
                "gate": (INNER, HIDDEN),
                "up": (INNER, HIDDEN),
                "down": (HIDDEN, INNER),
            }.items():
                one = weight(CODES, *shape)
                small(one.scales)
                draft[f"layers.{i}.{name}_proj.weight"] = one
        self.target = Transformer(shapes.target, target, CAPACITY, NoSource(), self.layout)
        self.draft = Transformer(shapes.draft, draft, CAPACITY)
        self.blobs = []
        for _ in range(distinct):
            blob = timing.random_experts(self.layout, 1, DEVICE)[0]
            for view in scale_views(blob, self.layout):
                small(view)
            self.blobs.append(blob.cpu().pin_memory())
        self.address = torch.tensor(
            [
                [self.blobs[(i * EXPERTS + e) % distinct].data_ptr() for e in range(EXPERTS)]
                for i in range(layers)
            ]
        )
        self.copy_ms = fetch_ms(self)
        self.bytes = {
            "target at T=1": dense_bytes(self.target) + layers * CHOICES * self.layout.stride,
            "draft": dense_bytes(self.draft),
        }

    def caches(self) -> tuple[KVCache, KVCache]:
        return tuple(
            KVCache(m.config, CAPACITY, torch.bfloat16, DEVICE) for m in (self.target, self.draft)
        )


class NoSource:
    """Captured steps bring their own source of experts."""


class Bits(NamedTuple):
    """What a step must find wherever experts lie."""

    proposal: list[int]
    trace: np.ndarray  # [L, T, k]
    logits: int  # a checksum of all their bits

    @classmethod
    def of(cls, found: Found) -> "Bits":
        logits = found.logits.view(torch.int16).cpu().numpy()
        return cls(found.proposal, found.trace, zlib.crc32(np.ascontiguousarray(logits)))

    def unlike(self, before: "Bits") -> str:
        """What differs, in words; empty if nothing does."""
        what = []
        if self.proposal != before.proposal:
            what.append(f"proposals {self.proposal}, not {before.proposal}")
        if (other := self.trace != before.trace).any():
            layer, rows = int(other.any((1, 2)).argmax()), other.any((0, 2)).nonzero()[0]
            what.append(f"routing from layer {layer} on, in rows {rows.tolist()}")
        if self.logits != before.logits:
            what.append("logits")
        return "; ".join(what)


class Told:
    """A predictor that is right: each draft pass gets what the target will choose for its row."""

    def __init__(self, layers: int, drafts: int):
        self._pass = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        self._chosen = torch.zeros(drafts, layers, CHOICES, dtype=torch.int32, device=DEVICE)

    def tell(self, trace: np.ndarray) -> None:
        """trace [L, K + 1, k]: what the next step will choose."""
        self._pass.fill_(-1)
        drafts = len(self._chosen)
        self._chosen.copy_(torch.from_numpy(trace[:, :drafts].swapaxes(0, 1).copy()))

    def choose(self, layer: int, state: torch.Tensor) -> torch.Tensor:
        """As `ExpertPredictor.choose`; the layers of a pass come in order."""
        if layer == 0:
            self._pass.add_(1).remainder_(len(self._chosen))
        return self._chosen.index_select(0, self._pass)[:, layer]


class Store:
    """What `StepGraphs.enter` asks of the engine's store."""

    def __init__(self, table: SlotTable, base: int):
        self.table, self.base, self.places = table, base, table.places


def scale_views(blob: torch.Tensor, shape) -> list[torch.Tensor]:
    offsets = (
        (shape.gate_offset, INNER, HIDDEN),
        (shape.up_offset, INNER, HIDDEN),
        (shape.down_offset, HIDDEN, INNER),
    )
    return [
        timing.view_weight(blob[at : at + matrix_bytes(CODES, n, k)], CODES, (n, k)).scales
        for at, n, k in offsets
    ]


def dense_bytes(model: Transformer) -> int:
    """Bytes of weights one token reads, experts aside."""
    total = 0
    for block in model.blocks:
        for one in (block.qkv, block.o, block.gate_up, block.down, block.router):
            total += 0 if one is None else sum(t.nbytes for t in parts(one))
    return total + sum(t.nbytes for t in parts(model.head))


def parts(one) -> tuple[torch.Tensor, ...]:
    return (one,) if isinstance(one, torch.Tensor) else one.tensors()


def build(pair: Pair, slots: int, drafts: int, predictor: ExpertPredictor | Told | None):
    """Captured steps with `slots` experts in VRAM; `predictor` says what to copy ahead."""
    every = pair.layers * EXPERTS
    torch.manual_seed(0)  # the same keys and values for every run
    target_kv, draft_kv = pair.caches()
    resident, tables, store = {}, None, None
    slab = torch.empty(slots, pair.layout.stride, dtype=torch.uint8, device=DEVICE)
    if slots == every:
        for i in range(every):
            slab[i].copy_(pair.blobs[i % len(pair.blobs)])
        at = slab.data_ptr() + torch.arange(every, dtype=torch.int64) * pair.layout.stride
        resident[pair.target] = at.view(pair.layers, EXPERTS).to(DEVICE)
    else:
        table = SlotTable(slots, pair.layers, EXPERTS, CHOICES, "layer-lru")
        share = max(len(table.places(i)) for i in range(pair.layers))
        tables = Tables.make(
            pair.address,
            torch.zeros((pair.layers, share), dtype=torch.int64, device=DEVICE),
            (drafts, min(pair.layers, 8), CHOICES),
        )
        store = Store(table, slab.data_ptr())
    graphs = StepGraphs(
        pair.target,
        target_kv,
        pair.draft,
        draft_kv,
        resident=resident,
        tables=tables,
        stride=pair.layout.stride,
        predictor=predictor,
        most=drafts,
        num_tokens=VOCAB,
    )
    for kv in (target_kv, draft_kv):
        for cache in (kv.keys, kv.values):
            cache[:, :CONTEXT].normal_()
    graphs.enter(store)
    graphs.slab = slab
    return graphs


def run(
    pair: Pair,
    graphs: StepGraphs,
    count: int,
    cutoff: int,
    accept: float,
    steps: int,
    before: list[Bits],
    told: Told | None = None,
) -> dict:
    """WARM and `steps` steps of `count` drafts; medians in ms, and what crossed the bus.

    before: what an earlier run's steps found, or an empty list that gets it. RuntimeError: not the same bits.
    """
    known = bool(before)
    draw = random.Random(1)
    tokens = [draw.randrange(VOCAB) for _ in range(CONTEXT)]
    rows, position, drift = [], CONTEXT, Drift(Profile(pair.copy_ms, 2.0, 0.0))
    for i in range(WARM + steps):
        if told is not None:
            told.tell(before[i].trace)
        begun = time.perf_counter()
        start = graphs.layers_ahead / pair.layers
        queued = copies_queued(drift.profile, graphs.most, start)
        found = graphs.step(tokens, count, cutoff, queued, None, None)
        if count:
            drift.observe(draft_token_ms=found.draft_ms / count)
        if found.copy_ms is not None:
            drift.observe(expert_copy_ms=found.copy_ms)
        taken = 0
        while taken < count and draw.random() < accept:
            taken += 1
        graphs.keep(taken + 1, position)
        position += taken + 1
        tokens = tokens[taken + 1 :] + found.proposal[:taken] + [found.tokens[taken]]  # one length
        wall = (time.perf_counter() - begun) * 1e3
        bits = Bits.of(found)
        if not known:
            before.append(bits)
        elif unlike := bits.unlike(before[i]):
            raise RuntimeError(f"step {i} differs from the run before: {unlike}")
        if i >= WARM:
            missed = 0 if found.missed is None else int(found.missed.sum())
            fetched = [] if found.fetched is None else found.fetched.tolist()
            used = [{e for row in layer for e in row} for layer in found.trace.tolist()]
            rows.append(
                {
                    "wall": wall,
                    "draft": found.draft_ms,
                    "verify": found.verify_ms,
                    "copy": found.copy_ms or 0.0,
                    "missed": missed,
                    "fetched": len(fetched),
                    "useful": sum(e in used[layer] for layer, e in fetched),
                    "union": sum(map(len, used)),
                    "tokens": taken + 1,
                }
            )
    mean = {key: statistics.mean(row[key] for row in rows) for key in rows[0]}
    median = {
        key: statistics.median(row[key] for row in rows) for key in ("wall", "draft", "verify")
    }
    return {
        "median_ms": median,
        "mean": mean,
        "tpot_ms": sum(r["wall"] for r in rows) / sum(r["tokens"] for r in rows),
        "step_bytes": (mean["missed"] + mean["fetched"]) * pair.layout.stride,
        "copy_ms": drift.profile.expert_copy_ms,
        "steps": rows,
    }


def run_ahead(graphs: StepGraphs, count: int, steps: int) -> dict:
    """Steps enqueued before the one before was read: ms from report to report, and of it on the GPU."""
    draw = random.Random(1)
    tokens = [draw.randrange(VOCAB) for _ in range(CONTEXT)]
    wall, busy, begun = [], [], time.perf_counter()
    for i in range(WARM + steps):
        found = graphs.step(tokens, count, 0, [0] * graphs.most, None, None, i < WARM + steps - 1)
        begun, before = time.perf_counter(), begun
        wall.append((begun - before) * 1e3)
        busy.append(found.draft_ms + found.verify_ms)
    return {"wall": statistics.median(wall[WARM:]), "gpu": statistics.median(busy[WARM:])}


def fetch_ms(pair: Pair) -> float:
    """An expert, copied by the engine's own kernel while nothing else runs: median of five runs over up to eight."""
    layers = min(pair.layers, 4)
    count = layers * CHOICES
    slab = torch.empty(count, pair.layout.stride, dtype=torch.uint8, device=DEVICE)
    slots = slab.data_ptr() + torch.arange(count).view(layers, CHOICES) * pair.layout.stride
    tables = Tables.make(pair.address[:layers], slots.to(DEVICE), (1, layers, CHOICES))
    tables.wanted[:, :, 1] = tables.place[:, :, 1] = 1
    times = []
    for _ in range(6):
        tables.state.fill_(STAGED)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        fetch(tables, pair.layout.stride, 0, layers)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / count)
    return statistics.median(times[1:])


def ceilings(pair: Pair) -> dict:
    """HBM reads by torch's sum of 8 GB; the bus by a copy of 1 GB and by the engine's own `fetch`."""
    data = torch.empty(2 << 30, dtype=torch.float32, device=DEVICE).normal_()
    read = timing.replay_ms([data.sum], 5)
    host = torch.empty(1 << 30, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(host, device=DEVICE)
    copy = timing.replay_ms([lambda: there.copy_(host, non_blocking=True)], 5)
    return {
        "hbm_TB_s": data.nbytes / read / 1e9,
        "copy_GB_s": host.nbytes / copy / 1e6,
        "fetch_GB_s": pair.layout.stride / pair.copy_ms / 1e6,
    }


def rounded(value):
    if isinstance(value, dict):
        return {key: rounded(one) for key, one in value.items()}
    return round(value, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--slots", default="128,64")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.9)
    parser.add_argument("--cutoffs", default="8")
    parser.add_argument("--distinct", type=int, default=24)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--skip", default="", help="parts to leave out: resident, slots")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    drafts = args.draft_tokens
    results: dict = {
        "command": " ".join(sys.argv),
        "machine": f"{torch.cuda.get_device_name()}, {platform.processor()}",
    }
    results["commit"] = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    results["torch"] = torch.__version__
    with torch.inference_mode():
        pair = Pair(args.layers, args.distinct)
        results["bytes"], results["ceilings"] = pair.bytes, ceilings(pair)
        print(json.dumps(results))
        hbm = results["ceilings"]["hbm_TB_s"] * 1e9  # bytes per ms

        def show(name: str, row: dict) -> None:
            results[name] = row
            shown = {key: value for key, value in row.items() if key != "steps"}
            print(name, json.dumps(rounded(shown)), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1) + "\n")

        bits: dict[int, list[Bits]] = {0: [], drafts: []}
        if "resident" not in args.skip:
            graphs = build(pair, args.layers * EXPERTS, drafts, None)
            for count in (0, drafts):
                row = run(pair, graphs, count, 0, args.acceptance, args.steps, bits[count])
                union = row["mean"]["union"] * pair.layout.stride
                floor = (dense_bytes(pair.target) + union) / hbm
                row["verify_over_roofline"] = row["median_ms"]["verify"] / floor
                if count:
                    row["draft_over_roofline"] = (
                        row["median_ms"]["draft"] / count / (pair.bytes["draft"] / hbm)
                    )
                show(f"resident T={count + 1}", row)
                show(
                    f"resident T={count + 1}, enqueued ahead", run_ahead(graphs, count, args.steps)
                )
            del graphs
            torch.cuda.empty_cache()
        told = Told(args.layers, drafts)
        predictors = {"": None, "draft's": ExpertPredictor(pair.target, CHOICES), "perfect": told}
        for slots in map(int, args.slots.split(",")) if "slots" not in args.skip else ():
            for name, predictor in predictors.items():
                graphs = build(pair, slots, drafts, predictor)
                for cutoff in map(int, args.cutoffs.split(",")) if predictor else [0]:
                    row = run(
                        pair, graphs, drafts, cutoff, args.acceptance, args.steps, bits[drafts],
                        told if predictor is told else None,
                    )  # fmt: skip
                    bus = row["step_bytes"] / pair.layout.stride * pair.copy_ms
                    row["bus_floor_ms"] = bus
                    row["over_bus_floor"] = row["mean"]["wall"] / bus
                    fit = row["mean"]["draft"] / pair.copy_ms
                    row["hidden_share"] = row["mean"]["useful"] / fit  # of what fits in drafting
                    how = f"{name} predictor, cutoff {cutoff}" if name else "no copies ahead"
                    show(f"slots {slots} T={drafts + 1}, {how}", row)
                del graphs
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
