"""What RAM that does not hold the pack should hold, and how fast experts come from disk.

    python benchmarks/ram_tier.py rules                  synthetic routing, Mixtral's and Qwen3-30B's shape
    python benchmarks/ram_tier.py rules demo.jsonl       a recording (`--trace`)
    python benchmarks/ram_tier.py disk PACK.spmoe        cold reads of a pack, each way, on the CPU

`rules` replays passes through slots under the engine's layer LRU and counts, for each token of text, experts
read from disk, copied to a slot, and copied back from one, for each rule of what lies in RAM:

    layers      the first layers, whole, for good: what `--pin` does where it cannot have all
    spread      as many experts of every layer, for good
    inclusive   LRU over all that is copied to a slot: slots and places hold the same
    stay        the tier's rule, but what leaves a slot is not copied back
    by layer    the tier's rule in a pool for each layer
    tier        `ramtier.Places`, one pool: what the engine does

Time is experts x bytes over --disk and --bus GB/s, one after the other: nothing is hidden.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from spmoe_lite.pack import Pack  # noqa: E402
from spmoe_lite.ramtier import Places, RamTier  # noqa: E402
from spmoe_lite.slab import HostSlab  # noqa: E402
from spmoe_lite.slots import SlotTable  # noqa: E402
from spmoe_lite.stats import Counters  # noqa: E402
from spmoe_lite.trace import read_trace  # noqa: E402

RULES = ("layers", "spread", "inclusive", "stay", "by layer", "tier")
SHAPES = {"mixtral": (32, 8, 2, 94e6), "qwen3": (12, 128, 8, 2.9e6)}  # a quarter of its layers
ROWS, ACCEPTED, PASSES = 5, 4, 120
KINDS = {
    "uniform": (0.0, False),
    "skewed": (1.0, False),  # popularity 1 / rank in each layer
    "sticky": (0.0, True),  # a layer's preferences change slowly: 3 % of them a token
    "both": (0.6, True),
}
SHARES = [(0.25, 0.25), (0.25, 0.5), (0.25, 0.8), (0.5, 0.25), (0.5, 0.55), (0.125, 0.5)]

Row = list[list[int]]  # of a layer: the choices of each row
OnePass = tuple[list[Row], int]  # all layers; rows that were accepted


def synthetic(kind: str, layers: int, experts: int, k: int) -> Iterator[OnePass]:
    skew, sticky = KINDS[kind]
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.permutation(experts) + 1 for _ in range(layers)])
    mood = rng.gumbel(size=(layers, experts))
    for _ in range(PASSES):
        rows: list[Row] = [[] for _ in range(layers)]
        for _ in range(ROWS):
            score = rng.gumbel(size=(layers, experts)) - skew * np.log(ranks)
            if sticky:
                new = rng.random((layers, experts)) < 0.03
                mood = np.where(new, rng.gumbel(size=(layers, experts)), mood)
                score += 1.5 * mood
            for layer, best in enumerate(np.argsort(-score, axis=1)[:, :k].tolist()):
                rows[layer].append(best)
        yield rows, ACCEPTED


def recorded(file: Path) -> tuple[list[OnePass], tuple[int, int, int, float]]:
    trace = read_trace(file)
    h = trace.header
    passes = [
        ([[ids[i : i + h.k] for i in range(0, len(ids), h.k)] for ids in one.experts], one.accepted)
        for one in trace.passes
        if one.kind == "decode"
    ]
    return passes, (h.layers, h.experts, h.k, h.expert_bytes)


class Ram:
    """What lies in RAM under one rule; counts what that costs."""

    def __init__(self, rule: str, count: int, layers: int, experts: int, table: SlotTable):
        self.rule, self.table = rule, table
        self.disk = self.copies = self.returns = 0
        every = [(layer, e) for layer in range(layers) for e in range(experts)]
        by_expert = [(layer, e) for e in range(experts) for layer in range(layers)]
        self.fixed = {"layers": set(every[:count]), "spread": set(by_expert[:count])}.get(rule)
        pools = layers if rule == "by layer" else 1
        sizes = [len(range(i, count, pools)) for i in range(pools)]
        self.pools = [Places(size, table.last_used) for size in sizes]

    def load(self, key: tuple[int, int], victim: tuple[int, int] | None) -> None:
        self.copies += 1
        if self.fixed is not None:
            self.disk += key not in self.fixed
            return
        places = self.pools[key[0] % len(self.pools)]
        if self.rule != "inclusive" and victim is not None:
            if places.place(victim) is not None:
                places.lost_slot(victim)
            elif (
                self.rule != "stay" and places.take(victim, None, only_for_younger=True) is not None
            ):
                self.returns += 1
                self._settled(places, victim).lost_slot(victim)
        if places.place(key) is None:
            self.disk += 1
            if places.take(key, None) is None:
                return
            self._settled(places, key)
        if self.rule == "inclusive":
            places.lost_slot(key)
        else:
            places.got_slot(key)

    def _settled(self, places: Places, key: tuple[int, int]) -> Places:
        places.filled(key)
        places.release(key)
        return places


def replay(rule, passes, shape, slots, places) -> tuple[float, float, float]:
    """(read from disk, copied to a slot, copied back) for each token, over the second half."""
    layers, experts, k, _ = shape
    table = SlotTable(int(slots * layers * experts), layers, experts, k, "layer-lru")
    ram, tokens, position = Ram(rule, int(places * layers * experts), layers, experts, table), 0, 0
    for number, (rows, accepted) in enumerate(passes):
        if number == len(passes) // 2:
            ram.disk = ram.copies = ram.returns = tokens = 0
        for layer, chosen in enumerate(rows):
            wanted = sorted({e for row in chosen for e in row})
            there = [(layer, e) for e in wanted if table.slot((layer, e)) is not None]
            for key in there:
                table.hold(key)
            for key in ((layer, e) for e in wanted if table.slot((layer, e)) is None):
                placed = table.place(key)
                if placed is None:  # served in groups: those before have been used
                    table.settle(())
                    placed = table.place(key)
                ram.load(key, placed[1])
                table.filled(key)
                table.hold(key)
            table.settle(())
        for row in range(accepted):
            position += 1
            for layer, chosen in enumerate(rows):
                for expert in chosen[row]:
                    table.credit((layer, expert), position)
        tokens += accepted
    return tuple(count / max(tokens, 1) for count in (ram.disk, ram.copies, ram.returns))


def rules(trace: Path | None, disk: float, bus: float) -> list[dict]:
    found = []
    cases = [(name, kind) for name in SHAPES for kind in KINDS] if trace is None else [(None, None)]
    for name, kind in cases:
        if trace is None:
            shape = SHAPES[name]
            passes = list(synthetic(kind, *shape[:3]))
        else:
            passes, shape = recorded(trace)
            name = trace.stem
        for (slots, places), rule in itertools.product(SHARES, RULES):
            read, copied, back = replay(rule, passes, shape, slots, places)
            seconds = (read / disk + (copied + back) / bus) * shape[3] / 1e9
            found.append(
                {"model": name, "routing": kind, "slots": slots, "places": places, "rule": rule}
                | {"disk": round(read, 2), "copied": round(copied, 2), "back": round(back, 2)}
                | {"seconds": round(seconds, 4)}
            )
    return found


def show(found: list[dict]) -> None:
    for case, group in itertools.groupby(
        found, lambda row: (row["model"], row["routing"], row["slots"], row["places"])
    ):
        print("{} {}, slots for {:.0%}, RAM for {:.0%}".format(*case))
        for row in group:
            print(
                f"    {row['rule']:10} {row['disk']:7.2f} from disk {row['copied']:7.2f} copied "
                f"{row['back']:7.2f} back {row['seconds']:8.3f} s a token"
            )


def disk(path: Path, gigabytes: float) -> list[dict]:
    """Cold experts of a pack into slots in RAM, GB/s, median of three."""
    found = []
    with Pack.open(path) as pack:
        c, stride = pack.config, pack.expert_layout.stride
        keys = [(i, e) for i in range(c.num_hidden_layers) for e in range(c.num_local_experts)]
        keys = keys[: max(8, int(gigabytes * 1e9 / stride))]
        slab = HostSlab(8, stride, torch.device("cpu"))
        slab.slots.fill_(0)
        threads = ThreadPoolExecutor(8)

        def cold():
            for layer in range(c.num_hidden_layers):
                os.posix_fadvise(pack.expert_file(layer)[0], 0, 0, os.POSIX_FADV_DONTNEED)

        def one_thread():
            for turn, key in enumerate(keys):
                slab.fill(turn % 8, lambda out, at, key=key: pack.read_expert(*key, out, at))

        def ring():  # pieces of 16 MiB, each by eight threads, as the slab's ring has them read
            for turn, key in enumerate(keys):
                row = slab.slots[turn % 8].numpy()
                for start in range(0, stride, 16 << 20):
                    piece = row[start : start + (16 << 20)]
                    part = max(1 << 20, -(-len(piece) // 8))
                    list(
                        threads.map(
                            lambda at, key=key, piece=piece, start=start, part=part: (
                                pack.read_expert(*key, piece[at : at + part], start + at)
                            ),
                            range(0, len(piece), part),
                        )
                    )

        def tier(bypass):
            made = RamTier(
                pack, slab, 64 * stride, {}, Counters(), torch.device("cpu"), bypass=bypass
            )

            def fill():
                for turn, key in enumerate(keys):
                    made.read_ahead(keys[turn : turn + 64])
                    assert made.fill(key, turn % 8, None, lambda: None, urgent=True)

            return fill, made

        def timed(name, work):
            rates = []
            for _ in range(3):
                cold()
                started = time.perf_counter()
                work()
                rates.append(len(keys) * stride / (time.perf_counter() - started) / 1e9)
            found.append({"way": name, "gbps": round(statistics.median(rates), 3)})
            print(found[-1])

        timed("one thread, page cache", one_thread)
        timed("ring, page cache", ring)
        for name, bypass in (("tier, page cache", False), ("tier, direct", True)):
            rates = []
            for _ in range(3):
                cold()
                fill, made = tier(bypass)
                started = time.perf_counter()
                fill()
                rates.append(len(keys) * stride / (time.perf_counter() - started) / 1e9)
                made.close()
            found.append({"way": name, "gbps": round(statistics.median(rates), 3)})
            print(found[-1])
        threads.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("rules", "disk"))
    parser.add_argument("file", type=Path, nargs="?", help="a recording, or a pack")
    parser.add_argument("--disk", type=float, default=3.0, help="GB/s")
    parser.add_argument("--bus", type=float, default=25.0, help="GB/s")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="to read")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.what == "rules":
        found = rules(args.file, args.disk, args.bus)
        show(found)
    else:
        found = disk(args.file, args.gigabytes)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
