"""Faster tiles for the kernels on this card: found when the user asks, kept, read when an engine loads.

`tune` tries tiles near the shipped ones (`kernels/configs.py`) on random weights of a pack's shapes,
several times the L2. A tile counts only if its results are the shipped tile's bit for bit, and replaces
it only if it is `GAIN` times as fast, both timed in one run by replaying a CUDA graph. So tuning
changes no text. What decides the order of a sum is left alone: a dense product takes its segments
of K from the n of its narrowest tile.

One file per card and Triton version, `tuned/` in the folder of packs. It names the kernels it was
made with by a hash of their sources and is ignored beside others. `load` believes only tiles that
`candidates` would try. Limits: tiles are kept by card, dtype and product, not by shape, so the pack
tuned last decides; two cards of one capability in one process share what was loaded last.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spmoe_lite import library
from spmoe_lite.config import matrix_bytes, scheme_of
from spmoe_lite.device import check_experts, choose_device, current, multiplies_bf16
from spmoe_lite.errors import CapacityError, UnsupportedError
from spmoe_lite.kernels import configs
from spmoe_lite.kernels.configs import Key, Kind, Tile
from spmoe_lite.kernels.expert_gemm import DTYPES, expert_down, expert_up
from spmoe_lite.kernels.linear import linear
from spmoe_lite.manifest import disk_error
from spmoe_lite.pack import Pack, view_weight
from spmoe_lite.progress import OnProgress, Progress, check

if TYPE_CHECKING:
    from spmoe_lite.config import ExpertLayout

GAIN = 1.03  # below it is noise
REPLAYS = 25
MOST_ROWS = 260
# Doublings of n, k and warps, and stages more.
MOVES = (
    (0, 0, 0, 1), (0, 0, 0, -1), (0, 0, 0, 2), (0, 0, 1, 0), (0, 0, -1, 0), (1, 0, 0, 0),
    (-1, 0, 0, 0), (1, 0, 1, 0), (-1, 0, -1, 0), (0, 1, 0, 0), (0, -1, 0, 0), (0, 1, 0, -1),
    (0, -1, 0, 2),
)  # fmt: skip

log = logging.getLogger("spmoe_lite")


@dataclass(frozen=True, slots=True)
class Product:
    """One kind of product: `dtype` is multiplied, `weights` (the same float, or a scheme) stored."""

    kind: Kind
    dtype: str
    weights: str

    def key(self, capability: tuple[int, int]) -> Key:
        return capability, DTYPES[self.dtype], self.kind, scheme_of(self.weights)


@dataclass(frozen=True, slots=True)
class Tried:
    """One tile and what became of it."""

    product: Product
    tile: Tile
    ms: float | None  # None: dropped
    verdict: str  # "shipped", "kept", "slower", "other bits", or why it does not run


@dataclass(frozen=True, slots=True)
class Card:
    """What tuned tiles hold for; `sources` is a hash of the kernels."""

    capability: tuple[int, int]
    card: str
    triton: str
    sources: str

    @classmethod
    def of(cls, device: torch.device) -> Card:
        from spmoe_lite.kernels.cache_triton import TRITON_VERSION

        digest = hashlib.sha256()
        for path in sorted(Path(configs.__file__).parent.glob("*.py")):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
        return cls(
            torch.cuda.get_device_capability(device),
            torch.cuda.get_device_name(device),
            TRITON_VERSION,
            digest.hexdigest(),
        )

    def path(self, home: Path | None) -> Path:
        name = f"{self.card}-{self.capability[0]}.{self.capability[1]}-triton-{self.triton}"
        safe = re.sub(r"[^A-Za-z0-9.+_-]+", "_", name)
        return library.home(home) / "tuned" / f"{safe}.json"


class Bench:
    """One product with whatever tiles `configs.tiles` gives.

    For each shape of the product one function of the number of rows per copy of its weights.
    """

    def __init__(
        self, shapes: Sequence[Sequence[Callable[[int], torch.Tensor]]], memory: object = None
    ):
        self.shapes = shapes
        self.memory = memory  # kept alive, if the functions know addresses alone

    def results(self, rows: int) -> list[torch.Tensor]:
        found = [copies[0](rows) for copies in self.shapes]
        if found[0].is_cuda:
            torch.cuda.synchronize()  # a launch that fails says so here
        return found

    def milliseconds(self, rows: int) -> float:
        """Median time of one call of each shape, summed."""
        shapes = [[functools.partial(call, rows) for call in copies] for copies in self.shapes]
        return sum(map(_replay, shapes))


def _replay(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


# --- what to try and what to keep


def candidates(product: Product, shipped: Tile) -> list[Tile]:
    """Tiles around a shipped one that cannot change a sum's order, without the shipped one."""
    found, scheme = [], scheme_of(product.weights)
    least_n, least_k = min(shipped.n, 64), min(shipped.k, 64 if scheme is None else 128)
    for n, k, warps, stages in MOVES:
        tile = Tile(
            int(shipped.n * 2.0**n),
            int(shipped.k * 2.0**k),
            shipped.t,
            int(shipped.warps * 2.0**warps),
            shipped.stages + stages,
        )
        fits = least_n <= tile.n <= 256 and least_k <= tile.k <= 256
        fits &= 4 <= tile.warps <= 8 and 2 <= tile.stages <= 8
        if product.kind == "dense" and shipped.t == configs.FEW:
            fits &= tile.n == shipped.n  # segments of K follow from it
        if scheme is not None and scheme.group == 128:
            fits &= tile.k == shipped.k  # the kernel takes 256 in any case
        if fits:
            found.append(tile)
    return found


def tune_product(
    product: Product,
    capability: tuple[int, int],
    bench: Bench,
    step: Callable[[], None] = lambda: None,
) -> tuple[list[Tried], list[Tile]]:
    """Try every candidate of one product: all that was tried, and the tiles to keep."""
    key, tried, kept = product.key(capability), [], []
    entries = configs.shipped(*key)
    before = configs.TUNED.pop(key, None)
    try:
        for index, first in enumerate(entries):
            checked, timed = _rows(entries, index)
            wanted = [bench.results(rows) for rows in checked]
            base = sum(map(bench.milliseconds, timed))
            row: list[Tried] = []
            for tile in candidates(product, first):
                step()
                configs.TUNED[key] = (*entries[:index], tile, *entries[index + 1 :])
                try:
                    same = all(
                        _equal(bench.results(rows), want)
                        for rows, want in zip(checked, wanted, strict=True)
                    )
                    ms = sum(map(bench.milliseconds, timed)) if same else None
                    row.append(Tried(product, tile, ms, "slower" if same else "other bits"))
                except Exception as error:  # too much shared memory, a compiler that gives up
                    reason = str(error).strip().partition("\n")[0] or type(error).__name__
                    row.append(Tried(product, tile, None, f"does not run: {reason:.80}"))
                finally:
                    configs.TUNED.pop(key, None)
            base = min(base, sum(map(bench.milliseconds, timed)))  # clocks may have changed
            best = min((t for t in row if t.ms is not None), key=lambda t: t.ms or 0, default=None)
            if best is not None and best.ms is not None and best.ms * GAIN <= base:
                row[row.index(best)] = replace(best, verdict="kept")
                kept.append(best.tile)
            tried += [Tried(product, first, base, "shipped"), *row]
    finally:
        if before is not None:
            configs.TUNED[key] = before
    return tried, kept


def _rows(entries: Sequence[Tile], index: int) -> tuple[list[int], list[int]]:
    """Numbers of rows that one entry serves: those whose bits are compared, and those timed."""
    t, last = entries[index].t, index == len(entries) - 1
    low = entries[index - 1].t + 1 if index else 1
    return [low, t] + [2 * t + 1, 128] * last, [t] if index else [1, 5]


def _equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    pairs = zip(got, wanted, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


# --- the file


def read(path: Path, card: Card) -> dict[Product, list[Tile]]:
    """What `write` left there for this card and these kernels; ValueError says why nothing counts."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        made = Card(tuple(found["capability"]), found["card"], found["triton"], found["sources"])
        if made != card:
            raise ValueError("it is of another card or version")
        result: dict[Product, list[Tile]] = {}
        for entry in found["tiles"]:
            product, tile = Product(**entry["product"]), Tile(**entry["tile"])
            entries = configs.shipped(*product.key(card.capability))
            near = [c for s in entries if s.t == tile.t for c in candidates(product, s)]
            if tile not in near:
                raise ValueError(f"{tile} is not one that tune tries")
            result.setdefault(product, []).append(near[near.index(tile)])  # 64.0 becomes 64
        return result
    except FileNotFoundError:
        return {}
    except ValueError:
        raise
    except Exception as error:  # of whatever shape the file is
        raise ValueError(f"it is not what tune writes: {type(error).__name__}") from error


def write(path: Path, card: Card, tuned: dict[Product, list[Tile]]) -> None:
    """Write it under a temporary name and rename."""
    tiles = [
        {"product": asdict(p), "tile": asdict(tile)} for p, found in tuned.items() for tile in found
    ]
    temporary = path.with_suffix(".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**asdict(card), "tiles": tiles}) + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise disk_error(error, path, "write") from error


def load(device: torch.device, home: Path | None = None, card: Card | None = None) -> None:
    """Use what was kept for this card, if anything; a file that does not fit is said and ignored."""
    card = card or Card.of(device)
    path = card.path(home)
    try:
        tuned = read(path, card)
    except ValueError as error:
        log.warning("tuned tiles are not used, %s: %s; type: spmoe-lite tune", path, error)
        tuned = {}
    for key in [key for key in configs.TUNED if key[0] == card.capability]:
        del configs.TUNED[key]
    for product, tiles in tuned.items():
        key, by_t = product.key(card.capability), {tile.t: tile for tile in tiles}
        configs.TUNED[key] = tuple(by_t.get(tile.t, tile) for tile in configs.shipped(*key))


# --- on the card


def tune(
    target: str | Path,
    *,
    device: str = "auto",
    home: Path | None = None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[list[Tried], Path]:
    """Try tiles at the shapes of a pack and keep the faster ones: all that was tried, and the file.

    What is found is written product by product. UnsupportedError without a CUDA GPU, CapacityError,
    Cancelled.
    """
    place = choose_device(device)
    if place.type != "cuda":
        raise UnsupportedError("tune needs a CUDA GPU: it times the GPU's kernels")
    from spmoe_lite.kernels.cache_triton import settle_kernel_cache

    settle_kernel_cache()
    with Pack.open(library.find(target, home)) as pack, current(place), torch.inference_mode():
        if pack.expert_layout is not None:
            check_experts(place, pack.name, pack.expert_layout.dtype)
        return tune_all(benches(pack, place), Card.of(place), home, cancel, on_progress)


def tune_all(
    made: dict[Product, Callable[[], Bench]],
    card: Card,
    home: Path | None,
    cancel: threading.Event | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[list[Tried], Path]:
    """`tune`, given what runs each product."""
    path, tried, done = card.path(home), [], 0
    try:
        tuned = read(path, card)
    except ValueError:
        tuned = {}
    total = sum(
        len(candidates(p, s)) for p in made for s in configs.shipped(*p.key(card.capability))
    )

    def step() -> None:
        nonlocal done
        check(cancel)
        if on_progress is not None:
            on_progress(Progress("tune", done, total, "tiles"))
        done += 1

    for product, make in made.items():
        try:
            more, tuned[product] = tune_product(product, card.capability, make(), step)
        except torch.OutOfMemoryError as error:
            raise CapacityError("the GPU has no room for the weights to tune with") from error
        tried += more
        write(path, card, tuned)
    return tried, path


def benches(pack: Pack, device: torch.device) -> dict[Product, Callable[[], Bench]]:
    """The products of a pack, each with what makes its data."""
    config, layout = pack.config, pack.expert_layout
    dense, linears = (
        "fp16"
        if dtype == "bf16" and device.type == "cuda" and not multiplies_bf16(device)
        else dtype
        for dtype in (pack.dtypes.dense, pack.dtypes.linear)
    )
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
    shapes = [(q + 2 * kv, hidden), (hidden, q)]  # as the model stacks them
    if pack.dtypes.embed == pack.dtypes.linear:
        shapes.append((config.vocab_size, hidden))
    found: dict[Product, Callable[[], Bench]] = {}
    if layout is None:
        shapes += [(2 * inner, hidden), (hidden, inner)]
    else:
        multiplied = dense if scheme_of(layout.dtype) else layout.dtype
        choices = config.num_experts_per_tok
        for kind in ("up", "down"):
            found[Product(kind, multiplied, layout.dtype)] = functools.partial(
                _experts, kind, layout, choices, DTYPES[dense], device
            )
    found[Product("dense", dense, linears)] = lambda: Bench(
        [_linears(shape, linears, DTYPES[dense], device) for shape in shapes]
    )
    return found


def _experts(
    kind: Kind, layout: ExpertLayout, choices: int, dtype: torch.dtype, device: torch.device
) -> Bench:
    """Every row chooses the same experts, so that an expert has as many rows as there are."""
    hidden, inner = layout.hidden_size, layout.intermediate_size
    count = choices * _copies(choices * layout.stride, device)
    slab = torch.empty(count, layout.stride, dtype=torch.uint8, device=device)
    for one in slab:
        for offset, shape in (
            (layout.gate_offset, (inner, hidden)),
            (layout.up_offset, (inner, hidden)),
            (layout.down_offset, (hidden, inner)),
        ):
            _fill(one[offset : offset + matrix_bytes(layout.dtype, *shape)], layout.dtype, shape)
    lines = [[i % choices, slab[i].data_ptr(), 0] for i in range(count)]
    uses = [torch.tensor(lines[i : i + choices], device=device) for i in range(0, count, choices)]
    experts = torch.arange(choices, dtype=torch.int32, device=device).repeat(MOST_ROWS, 1)
    between = () if kind == "up" else (choices,)
    wide = hidden if kind == "up" else inner
    x = torch.randn((MOST_ROWS, *between, wide), device=device).to(dtype)
    function, width = (expert_up, inner) if kind == "up" else (expert_down, hidden)

    def call(rows: int, use: torch.Tensor) -> torch.Tensor:
        out = x.new_empty(rows, choices, width)
        function(x[:rows], experts[:rows], use, layout, out)
        return out

    return Bench([[functools.partial(call, use=use) for use in uses]], slab)


def _linears(
    shape: tuple[int, int], stored: str, dtype: torch.dtype, device: torch.device
) -> list[Callable[[int], torch.Tensor]]:
    x = torch.randn((MOST_ROWS, shape[1]), device=device).to(dtype)
    size = matrix_bytes(stored, *shape)
    runs = [
        torch.empty(size, dtype=torch.uint8, device=device) for _ in range(_copies(size, device))
    ]

    def call(rows: int, weight: Any) -> torch.Tensor:
        return linear(x[:rows], weight)

    return [functools.partial(call, weight=_fill(run, stored, shape)) for run in runs]


def _copies(size: int, device: torch.device) -> int:
    """Copies of `size` bytes that are four times the L2, and at least two."""
    if device.type != "cuda":
        return 2
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return min(512, max(2, -(-4 * cache // size)))


def _fill(run: torch.Tensor, dtype: str, shape: tuple[int, int]) -> Any:
    """Random weights of a plausible size in bytes that are there, as a view of them."""
    weight = view_weight(run, dtype, shape)
    if isinstance(weight, torch.Tensor):
        return weight.normal_(0, 0.02)
    run.random_()
    weight.scales.bitwise_and_(-0x7C01).bitwise_or_(0x1800)  # 0.002 to 0.004
    return weight
