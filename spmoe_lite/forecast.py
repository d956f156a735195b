"""What a pair would take and how fast it would be, before anything is loaded: what `spmoe-lite plan` shows.

The memory plan is the one that `Engine.load` makes for the same options, by the same function, from pack
headers; it is made twice, with the draft and without it, because the draft's bytes are slots lost. Both are
priced by `speed.predict`. Each figure that goes into the price says where it comes from: given, measured by
`profile` on this machine, measured just now (on the CPU by `cputime.py`), or assumed.

No weight is read. A card that is not in this machine is planned for too, if its size is given.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from spmoe_lite import cputime, library
from spmoe_lite.cutoff import Profile, expected_copies, load_profile
from spmoe_lite.decoder import PREFILL_CHUNK
from spmoe_lite.device import available_bytes, bus_rate, check_experts, choose_device
from spmoe_lite.drafting import MARGIN
from spmoe_lite.errors import UsageError
from spmoe_lite.loading import (
    CODES_RATE,
    DEFAULT_DRAFT_TOKENS,
    LAYERS_AHEAD,
    draft_length,
    pin_bytes,
    product_rates,
    profile_path,
)
from spmoe_lite.pack import Pack
from spmoe_lite.plan import UNPRICED, ModelSize, Plan, parse_size, plan_pair, ram_places
from spmoe_lite.precision import scheme_of
from spmoe_lite.predictor import ExpertPredictor
from spmoe_lite.progress import digits, size
from spmoe_lite.speed import Costs, Speed, predict, times_drafts
from spmoe_lite.tokenizer import Tokenizer
from spmoe_lite.trace import check_link

# Assumed where nothing is measured; docs/performance.md has what machines reach.
LINK = 25.0  # GB/s: page-locked memory to a GPU, PCIe 4 with 16 lanes
RING_LINK = 10.0  # GB/s: memory that is not page-locked to a GPU, through a small buffer
DISK = 3.0  # GB/s: an NVMe disk at PCIe 3, several large reads at once
HOST_LINK = 5.0  # GB/s: the page cache to a slot in RAM, one thread
MEMORY = 900.0  # GB/s: the GPU's own memory, of cards with 24 GB
ACCEPTANCE = 0.7  # of a draft token; pairs of one family reach 0.6 to 0.9
MOST_TRIED = 8  # draft tokens a step that are compared
NOT_HERE = 1 << 62  # bytes a card that is not here may have


@dataclass(frozen=True, slots=True)
class Figure:
    """One number the prediction rests on, and its source."""

    name: str
    value: float
    unit: str
    source: str

    def __str__(self) -> str:
        value = f"{self.value:.0%}" if not self.unit else f"{digits(self.value, 4)} {self.unit}"
        return f"{self.name}: {value}, {self.source}"


@dataclass(frozen=True, slots=True)
class Forecast:
    """The plan that `Engine.load` would make, its price, and those without the draft."""

    plan: Plan
    speed: Speed | None  # None for a dense target
    plain_plan: Plan | None  # None without a draft: `plan` is it
    plain_speed: Speed | None
    best_speed: Speed | None  # with the draft, at the number of draft tokens that is fastest
    figures: list[Figure]
    notes: list[str]

    @property
    def draft_is_faster(self) -> bool | None:
        """None where there is no draft, or the two are within `MARGIN` of each other."""
        if self.speed is None or self.plain_speed is None:
            return None
        with_draft, without = self.speed.token_ms, self.plain_speed.token_ms
        if max(with_draft, without) <= MARGIN * min(with_draft, without):
            return None
        return with_draft < without

    def verdict(self) -> str:
        """Which is faster, and why; empty without a draft."""
        with_draft, plain, plan = self.speed, self.plain_speed, self.plan
        if with_draft is None or plain is None or self.plain_plan is None:
            return ""
        took = f"{digits(with_draft.token_ms)} ms a token with the draft, {digits(plain.token_ms)} without"
        first = {
            None: "with the draft and without it are about as fast",
            True: "the draft makes it faster",
            False: "without the draft is faster",
        }[self.draft_is_faster]
        if with_draft.draft_tokens == 0:
            return f"{first}: {took}. With --draft-tokens 0 a draft takes room and drafts nothing."
        why = f"a step with the draft writes {digits(with_draft.tokens)} tokens"
        if plain.step_ms > 0:
            why += f" and takes {digits(with_draft.step_ms / plain.step_ms)} times as long"
        if lost := self.plain_plan.slots - plan.slots:
            why += f"; the draft and its cache take the room of {lost} experts"
        if with_draft.copies > plain.copies:
            why += f"; checking {with_draft.draft_tokens + 1} positions misses "
            why += f"{digits(with_draft.copies)} experts, one position {digits(plain.copies)}"
        text = f"{first}: {took}. {why[0].upper()}{why[1:]}."
        best = self.best_speed
        if best is not None and best.token_ms * MARGIN < min(with_draft.token_ms, plain.token_ms):
            text += f" --draft-tokens {best.draft_tokens} would take {digits(best.token_ms)} ms."
        return text

    def to_dict(self) -> dict[str, Any]:
        faster = self.draft_is_faster
        return {
            "plan": _plan_dict(self.plan),
            "speed": None if self.speed is None else self.speed.to_dict(),
            "without_draft": None
            if self.plain_plan is None
            else {
                "plan": _plan_dict(self.plain_plan),
                "speed": None if self.plain_speed is None else self.plain_speed.to_dict(),
            },
            "best_draft_tokens": None if self.best_speed is None else self.best_speed.draft_tokens,
            "faster": None if faster is None else "draft" if faster else "no draft",
            "verdict": self.verdict() or None,
            "figures": [asdict(figure) for figure in self.figures],
            "notes": self.notes,
        }


def forecast(
    target: str | Path,
    draft: str | Path | None = None,
    *,
    device: str = "auto",
    vram: str | int | float = "auto",
    slots: int | None = None,
    ctx_size: int | None = None,
    kv_type: str = "auto",
    draft_tokens: int | str = DEFAULT_DRAFT_TOKENS,
    pin: str | int = "auto",
    link: float | None = None,
    memory: float | None = None,
    disk: float | None = None,
    acceptance: float | None = None,
    home: Path | None = None,
) -> Forecast:
    """Options as of `Engine.load`, which raises the same errors for them, and those that price it:

    link, memory and disk in GB/s, of a missing expert, of the GPU's own memory, and of a missing expert that
    RAM has no room for; acceptance of a draft token.
    With device "cuda", or "auto" and a size in `vram`, a machine without a GPU plans for a card of that size.
    """
    drafts = draft_length(draft_tokens).most
    for flag, rate in {"--link": link, "--memory": memory, "--disk": disk}.items():
        check_link(flag, rate)
    if acceptance is not None and not 0 <= acceptance <= 1:
        raise UsageError(f"--acceptance {acceptance:.12g}: 0 to 1")
    imagined = _is_imagined(device, vram)
    place = torch.device("cpu") if imagined else choose_device(device)
    packs: list[Pack] = []
    try:
        packs.append(Pack.open(library.find(target, home)))
        if draft is not None:
            packs.append(Pack.open(library.find(draft, home)))
        for pack in packs:
            if pack.expert_layout is not None:
                check_experts(place, pack.name, pack.expert_layout.dtype)
        _check_vocabulary(packs)
        machine = _Machine(place, imagined, packs, pin, home, disk)
        sizes = machine.sizes
        available = NOT_HERE if imagined else available_bytes(place)

        def plan(with_draft: bool, costs: Costs) -> Plan:
            return plan_pair(
                sizes[0],
                sizes[1] if with_draft else None,
                name=packs[0].name,
                device=machine.name,
                available=available,
                vram=vram,
                slots=slots,
                ctx_size=ctx_size,
                draft_tokens=drafts,
                chunk=PREFILL_CHUNK,
                kv_type=kv_type,
                pinned=machine.pinned,
                costs=costs,
            )

        plan(len(packs) > 1, UNPRICED)  # what cannot fit is refused before anything is timed
        costs = machine.costs(link, memory, acceptance, drafts)
        whole, plain = plan(len(packs) > 1, costs), plan(False, costs)
        return _priced(sizes, whole, plain, drafts, costs, machine)
    finally:
        for pack in packs:
            pack.close()


def _priced(
    sizes: list[ModelSize], plan: Plan, plain: Plan, drafts: int, costs: Costs, machine: _Machine
) -> Forecast:
    target, *others = sizes
    draft, layers = others[0] if others else None, target.config.num_hidden_layers
    if not target.config.is_moe:
        return Forecast(plan, None, plain if others else None, None, None, [], machine.notes)
    held, plain_held = machine.held(plan), machine.held(plain)
    if held is not None or plain_held is not None:
        costs = replace(costs, disk_rate=machine.disk_rate(plan))
    speed = predict(target, draft, plan.slots, drafts, costs, held)
    without = predict(target, None, plain.slots, 0, costs, plain_held)
    figures, notes = machine.figures, [*machine.remarks(plan), *machine.notes]
    if plan.slots == plan.expert_count:  # nothing is ever missing
        paging = ("link", "misses, of those of uniform routing")
        figures, notes = [figure for figure in figures if figure.name not in paging], machine.notes
    elif plan.device != "cpu" and plan.slots < target.config.num_experts_per_tok * layers:
        notes.append("fewer slots than a token needs: steps are driven by the host, and slower")
    if not speed.disk_copies and not without.disk_copies:
        figures = [figure for figure in figures if figure.name != "disk"]
        if machine.given_disk is not None:
            notes.append("--disk has no effect: no expert is read from disk")
    if draft is None:
        return Forecast(plan, speed, None, None, None, figures, notes)
    tried = [predict(target, draft, plan.slots, n, costs, held) for n in range(1, MOST_TRIED + 1)]
    best = min([speed, *tried], key=lambda one: one.token_ms)
    return Forecast(plan, speed, plain, without, best, figures, notes)


class _Machine:
    """Where the pair is to run, and what is known of it; gathers figures and remarks."""

    def __init__(
        self,
        place: torch.device,
        imagined: bool,
        packs: list[Pack],
        pin: str | int,
        home: Path | None,
        given_disk: float | None = None,
    ):
        self.given_disk = given_disk
        self.name = "cuda" if imagined else str(place)
        self.figures: list[Figure] = []
        self.notes: list[str] = []
        self.sizes = [ModelSize.of(pack) for pack in packs]
        self._place, self._imagined, self._packs = place, imagined, packs
        self._profile: Profile | None = None
        self.pinned = self._pin(pin)
        target = self.sizes[0]
        self._places = ram_places(self.pinned, 0, target.expert_count, target.stride)
        self._pins_all = 0 < self._places == target.expert_count
        if not imagined:
            names = [pack.name for pack in packs]
            for known in (names, names[:1]):
                path = profile_path(known, place, home, captured=self._pins_all)
                self._profile = self._profile or load_profile(path)

    def costs(
        self,
        link: float | None,
        memory: float | None,
        acceptance: float | None,
        draft_tokens: int,
    ) -> Costs:
        target, *drafts = self.sizes
        if not target.config.is_moe:
            return UNPRICED
        known, rates = self._profile, {}
        if self.name == "cpu" and memory is None:
            draft = drafts[0] if drafts else None
            most = (
                draft_tokens or DEFAULT_DRAFT_TOKENS
            )  # with none, others are compared all the same
            self._profile = cputime.complete(known, target, draft, most)
        else:
            rates = self._product_rates(memory)
        self._add_times(known)
        read_rate = self._link(link) * 1e9
        if self._profile is not None and self._profile.miss_ratio is not None:
            ratio = self._profile.miss_ratio
            self._add("misses, of those of uniform routing", ratio, "", "by profile")
        chance = self._acceptance(acceptance) if drafts else 0.0
        if acceptance is not None and not drafts:
            self.notes.append("--acceptance has no effect without a draft")
        return Costs(read_rate, rates, self._profile, chance, self._layers_ahead())

    def held(self, plan: Plan) -> int | None:
        """Experts that slots and RAM hold between them; None if those are all.

        Without a tier RAM holds them as the page cache does, those in slots among them.
        """
        if self._places:
            return plan.held
        room = available_bytes(torch.device("cpu"))
        if self.name == "cpu":
            room -= plan.total_bytes
        held = max(plan.slots, room // plan.slot_bytes)
        return None if held >= plan.expert_count else held

    def disk_rate(self, plan: Plan) -> float:
        """Bytes per second of an expert that RAM does not hold, said among the figures."""
        known, whole = self._profile, plan.expert_count * plan.slot_bytes
        if self.given_disk is not None:
            rate = self._add("disk", self.given_disk, "GB/s", "given by --disk")
        elif not self._imagined and plan.has_tier and whole < available_bytes(torch.device("cpu")):
            what = "assumed: RAM has room for the pack in the page cache; --disk"
            rate = self._add("disk", HOST_LINK, "GB/s", what)
        elif known is not None and known.disk_gbps:
            rate = self._add("disk", known.disk_gbps, "GB/s", "by profile")
        else:
            what = "assumed: NVMe, PCIe 3 with 4 lanes; --disk"
            rate = self._add("disk", DISK, "GB/s", what)
        return rate * 1e9

    def remarks(self, plan: Plan) -> list[str]:
        """What is special about where experts lie."""
        held, count = self.held(plan), plan.expert_count
        if plan.has_tier:
            what = f"RAM has places for {plan.ram_places} of {count} experts (--pin)"
            if held is not None and held < count:
                what += ": what is neither there nor in a slot is read from disk"
            return [f"{what}; steps are driven by the host"]
        if held is not None:
            what = "what is missing beyond them is read from disk"
            return [f"free RAM holds {held} of {count} experts in the page cache: {what}"]
        return []

    def _add_times(self, known: Profile | None) -> None:
        """Times of passes, where they are not reckoned from bytes; `known` is what was kept of them."""
        found, drafts = self._profile, len(self.sizes) > 1
        now = "measured just now, on stand-in weights"
        if found is None or found.plain_layer_ms is None:
            return
        source = "by profile"
        if known is None or known.plain_layer_ms is None:
            source = now
        elif drafts and not times_drafts(known):
            source += " without drafts; checking several, "
            source += now if times_drafts(found) else "by the bytes it reads more"
        self._add("a target layer", found.plain_layer_ms, "ms", source)
        if drafts and found.draft_token_ms:
            by_profile = known is not None and known.draft_token_ms
            source = "by profile" if by_profile else now
            self._add("a draft token", found.draft_token_ms, "ms", source)
        if drafts and found.verify_rows and (known is None or not times_drafts(known)):
            c = self.sizes[0].config
            needed = expected_copies(
                c.num_local_experts, c.num_experts_per_tok, found.verify_rows, 0.0
            )
            name = f"experts of a layer that {found.verify_rows} tokens need"
            source = "assumed: uniform routing; profile times a real one"
            self._add(name, needed, f"of {c.num_local_experts}", source)

    def _pin(self, pin: str | int) -> Literal["all", "none"] | int:
        """What may be page-locked of host memory, as loading decides it; said where it matters."""
        pack, target = self._packs[0], self.sizes[0]
        if not target.config.is_moe or self.name == "cpu":
            if pin != "auto" and target.config.is_moe:
                self.notes.append("--pin has no effect on the CPU")
            return "none"
        needed = target.expert_count * target.stride
        if self._imagined and pin == "auto":
            self.notes.append(f"no such card is here: {size(needed)} of RAM for experts is assumed")
            return "all"
        pinned = pin_bytes(pin, pack)
        places = ram_places(pinned, 0, target.expert_count, target.stride)
        if not places:
            self.notes.append(
                f"none of the {size(needed)} of experts may be page-locked (--pin): "
                f"misses take longer, and steps are driven by the host"
            )
        return pinned

    def _link(self, given: float | None) -> float:
        stride, known = self.sizes[0].stride, self._profile
        if given is not None:
            return self._add("link", given, "GB/s", "given by --link")
        if known is not None and known.expert_copy_ms:
            return self._add("link", stride / known.expert_copy_ms / 1e6, "GB/s", "by profile")
        if self.name == "cpu":
            return self._add("link", HOST_LINK, "GB/s", "assumed: from the page cache; --link")
        if not self._places:
            what = "assumed: memory that is not page-locked; --link"
            return self._add("link", RING_LINK, "GB/s", what)
        if self._imagined:
            return self._add("link", LINK, "GB/s", "assumed: PCIe 4 with 16 lanes; --link")
        return self._add("link", bus_rate(self._place) / 1e9, "GB/s", "measured just now")

    def _product_rates(self, given: float | None) -> dict[str, float]:
        """Bytes per second by dtype, of all packs."""
        dtypes = {
            dtype
            for pack in self._packs
            for dtype in (pack.dtypes.dense, pack.dtypes.linear, pack.dtypes.embed)
        }
        dtypes |= {pack.dtypes.experts for pack in self._packs if pack.dtypes.experts is not None}
        if given is None and not self._imagined:
            rates: dict[str, float] = {}
            for pack in self._packs:
                rates |= product_rates(self._place, pack.dtypes)
            if self._needs_rates():
                slowest = min(rates.values()) / 1e9
                self._add("weights multiplied at", slowest, "GB/s", "measured just now")
            return rates
        memory = MEMORY if given is None else given
        if self._needs_rates():
            source = (
                "assumed: a card with 24 GB; --memory" if given is None else "given by --memory"
            )
            self._add("the device reads its memory at", memory, "GB/s", source)
        return {
            dtype: memory * 1e9 * (1.0 if scheme_of(dtype) is None else CODES_RATE)
            for dtype in dtypes
        }

    def _needs_rates(self) -> bool:
        """Whether any pass is priced by the bytes it reads, for want of a measured time."""
        known = self._profile
        if known is None or known.plain_layer_ms is None:
            return True
        return len(self._packs) > 1 and not known.draft_token_ms

    def _acceptance(self, given: float | None) -> float:
        known = self._profile
        if given is not None:
            return self._add("draft tokens accepted", given, "", "given by --acceptance")
        if known is not None and known.acceptance is not None:
            return self._add("draft tokens accepted", known.acceptance, "", "by profile")
        return self._add("draft tokens accepted", ACCEPTANCE, "", "assumed; --acceptance")

    def _layers_ahead(self) -> int:
        """How many layers copies ahead of need may reach."""
        target, *drafts = self._packs
        if not drafts or not ExpertPredictor.fits(target.config, drafts[0].config):
            return 0
        layers = target.config.num_hidden_layers
        return min(layers, LAYERS_AHEAD) if self._pins_all else layers

    def _add(self, name: str, value: float, unit: str, source: str) -> float:
        self.figures.append(Figure(name, value, unit, source))
        return value


def _is_imagined(device: str, vram: str | int | float) -> bool:
    """Whether a card is meant that is not in this machine; UsageError where its size is not said."""
    kind = device.partition(":")[0]
    if torch.cuda.is_available() or kind not in ("auto", "cuda"):
        return False
    is_size = vram != "auto" and parse_size(vram, 10**12) == parse_size(vram, 10**13)
    if kind == "cuda":
        if not is_size or not re.fullmatch(r"cuda(:\d+)?", device):
            raise UsageError(f"--device {device}: no GPU is here; give its size, as in --vram 24GB")
        return True
    return is_size


def _check_vocabulary(packs: list[Pack]) -> None:
    """Refuse a draft of another vocabulary, as loading the pair would."""
    target, *drafts = packs
    for draft in drafts:
        ours = Tokenizer.load(target.path, target.config)
        theirs = Tokenizer.load(draft.path, draft.config)
        ours.check_draft(theirs, target.config.vocab_size, draft.config.vocab_size)


def _plan_dict(plan: Plan) -> dict[str, Any]:
    return asdict(plan) | {"total_bytes": plan.total_bytes}
