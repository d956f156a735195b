"""Faster tiles for the kernels on this card: found when the user asks, kept, read when an engine loads.

`tune` tries tiles near the shipped ones (`kernels/configs.py`) on random weights of a pack's shapes
(`timing.py`). A tile counts only if its results are the shipped tile's bit for bit, and replaces it
only if it is `GAIN` times as fast, both timed in one run. So tuning changes no text. What decides the
order of a sum is left alone: a dense product takes its segments of K from the n of its narrowest tile.

One file per card and Triton version, `tuned/` in the folder of packs. It names the kernels it was
made with by a hash of their sources and is ignored beside others. `load` believes only tiles that
`candidates` would try. Limits: tiles are kept by card, dtype and product, not by shape, so the pack
tuned last decides; two cards of one capability in one process share what was loaded last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from spmoe_lite import library
from spmoe_lite.device import check_experts, choose_device, current
from spmoe_lite.errors import CapacityError, UnsupportedError
from spmoe_lite.files import disk_error
from spmoe_lite.kernels import configs
from spmoe_lite.kernels.configs import Key, Tile
from spmoe_lite.pack import Pack
from spmoe_lite.precision import scheme_of
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.timing import Bench, Product, benches

GAIN = 1.03  # below it is noise
# Doublings of n, k and warps, and stages more.
MOVES = (
    (0, 0, 0, 1), (0, 0, 0, -1), (0, 0, 0, 2), (0, 0, 1, 0), (0, 0, -1, 0), (1, 0, 0, 0),
    (-1, 0, 0, 0), (1, 0, 1, 0), (-1, 0, -1, 0), (0, 1, 0, 0), (0, -1, 0, 0), (0, 1, 0, -1),
    (0, -1, 0, 2),
)  # fmt: skip

log = logging.getLogger("spmoe_lite")


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

    def path(self, home: str | Path | None) -> Path:
        name = f"{self.card}-{self.capability[0]}.{self.capability[1]}-triton-{self.triton}"
        safe = re.sub(r"[^A-Za-z0-9.+_-]+", "_", name)
        return library.home(home) / "tuned" / f"{safe}.json"


# --- what to try and what to keep


def candidates(product: Product, shipped: Tile) -> list[Tile]:
    """Tiles around a shipped one that cannot change a sum's order, without the shipped one."""
    found, scheme = [], scheme_of(product.weights)
    least_n, least_k = min(shipped.n, 64), min(shipped.k, 64 if scheme is None else 128)
    for n, k, warps, stages in MOVES:
        tile = replace(
            shipped,
            n=int(shipped.n * 2.0**n),
            k=int(shipped.k * 2.0**k),
            warps=int(shipped.warps * 2.0**warps),
            stages=shipped.stages + stages,
            registers=0 if n or k or warps else shipped.registers,
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
) -> list[Tried]:
    """Try every candidate of one product; those to keep have the verdict "kept"."""
    key, found = product.key(capability), []
    entries = configs.shipped(*key)
    for index, shipped in enumerate(entries):
        checked, timed = _rows(entries, index)
        with _in_use(key, entries):
            wanted = [bench.results(rows) for rows in checked]
            base = _total_ms(bench, timed)
        tried = []
        for tile in candidates(product, shipped):
            step()
            with _in_use(key, (*entries[:index], tile, *entries[index + 1 :])):
                ms, verdict = _judge(bench, checked, wanted, timed)
            tried.append(Tried(product, tile, ms, verdict))
        with _in_use(key, entries):
            base = min(base, _total_ms(bench, timed))  # clocks may have changed
        fastest = min((one.ms for one in tried if one.ms is not None), default=base)
        if fastest * GAIN <= base:
            best = next(i for i, one in enumerate(tried) if one.ms == fastest)
            tried[best] = replace(tried[best], verdict="kept")
        found += [Tried(product, shipped, base, "shipped"), *tried]
    return found


@contextlib.contextmanager
def _in_use(key: Key, entries: tuple[Tile, ...]) -> Iterator[None]:
    """Let the kernels take these tiles."""
    before = configs.TUNED.get(key)
    configs.TUNED[key] = entries
    try:
        yield
    finally:
        if before is None:
            del configs.TUNED[key]
        else:
            configs.TUNED[key] = before


def _rows(entries: Sequence[Tile], index: int) -> tuple[list[int], list[int]]:
    """Numbers of rows that one entry serves: those whose bits are compared, and those timed."""
    t, last = entries[index].t, index == len(entries) - 1
    low = entries[index - 1].t + 1 if index else 1
    return [low, t] + [2 * t + 1, 128] * last, [t] if index else [1, 5]


def _judge(
    bench: Bench, checked: list[int], wanted: list[list[torch.Tensor]], timed: list[int]
) -> tuple[float | None, str]:
    """Milliseconds and verdict of the tiles in use."""
    try:
        for rows, want in zip(checked, wanted, strict=True):
            if not _equal(bench.results(rows), want):
                return None, "other bits"
        return _total_ms(bench, timed), "slower"
    except Exception as error:  # too much shared memory, a compiler that gives up
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return None, f"does not run: {reason:.80}"


def _equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    pairs = zip(got, wanted, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _total_ms(bench: Bench, timed: list[int]) -> float:
    return sum(map(bench.milliseconds, timed))


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


def load(device: torch.device, home: str | Path | None = None, card: Card | None = None) -> None:
    """Use what was kept for this card, if anything; a file that does not fit is said and ignored."""
    card = card or Card.of(device)
    path = card.path(home)
    try:
        tuned = read(path, card)
    except ValueError as error:
        log.warning("tuned tiles are not used, %s: %s; type: spmoe-lite tune", path, str(error))
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
    path, found, done = card.path(home), [], 0
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
            tried = tune_product(product, card.capability, make(), step)
        except torch.OutOfMemoryError as error:
            raise CapacityError("the GPU has no room for the weights to tune with") from error
        tuned[product] = [one.tile for one in tried if one.verdict == "kept"]
        write(path, card, tuned)
        found += tried
    return found, path
