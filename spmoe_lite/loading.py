"""Loading: packs become models in memory, ready to answer. What it makes is an engine's `Parts`.

In this order: the packs are opened; their texts read, and a draft of another vocabulary refused; the
memory plan made, and refused if it cannot fit; dense weights loaded, slots and caches allocated. On a GPU
every kernel then runs once, and the steps are captured. Experts come on demand, when answers ask for them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Literal, TypeVar

import numpy as np
import torch

from spmoe_lite import library, tune
from spmoe_lite.chat_template import ChatTemplate
from spmoe_lite.config import SamplingParams, is_integer
from spmoe_lite.cutoff import Drift, Profile, load_profile
from spmoe_lite.decoder import PREFILL_CHUNK, Decoder
from spmoe_lite.device import (
    available_bytes,
    bus_rate,
    check_experts,
    choose_device,
    current,
    fit_dense,
    memory_rate,
    synchronize,
    trim_heap,
)
from spmoe_lite.draftgraphs import DraftSteps
from spmoe_lite.drafting import DraftLength
from spmoe_lite.errors import (
    CapacityError,
    DamagedError,
    SpmoeError,
    UsageError,
    memory_for,
)
from spmoe_lite.graphs import ResidentExperts, StepGraphs
from spmoe_lite.hostmap import HostMap, default_pin
from spmoe_lite.kernels.residency import Tables
from spmoe_lite.kvcache import KVCache
from spmoe_lite.manifest import Dtypes
from spmoe_lite.model import Transformer
from spmoe_lite.pack import Pack
from spmoe_lite.plan import KV_TYPES, ModelSize, Plan, parse_size, plan_pair, ram_places
from spmoe_lite.precision import scheme_of
from spmoe_lite.predictor import ExpertPredictor
from spmoe_lite.prefetch import Prefetcher
from spmoe_lite.progress import OnProgress, check, check_callers
from spmoe_lite.ramtier import RamTier
from spmoe_lite.session import Session
from spmoe_lite.slab import DeviceSlab, HostSlab
from spmoe_lite.slots import POLICIES, SlotTable, landing_slots
from spmoe_lite.speed import Costs
from spmoe_lite.stats import Counters
from spmoe_lite.store import ExpertStore
from spmoe_lite.tokenizer import Tokenizer
from spmoe_lite.trace import Header, TraceWriter
from spmoe_lite.warmup import warm_up

DEFAULT_DRAFT_TOKENS = 4
MAX_DRAFT_TOKENS = 31  # a verify pass of at most 32 rows
CODES_RATE = 0.4  # of a GPU's memory rate, in products with quantised matrices (docs/log.md)
T = TypeVar("T")
LAYERS_AHEAD = 8  # at most, that captured drafts predict for: more never arrives in time


class Parts:
    """What an engine consists of: it fills while a pair is loaded; `close` gives back what there is."""

    plan: Plan
    tokenizer: Tokenizer
    template: ChatTemplate | None
    default_sampling: SamplingParams
    num_tokens: int  # in the vocabulary
    eos_ids: frozenset[int]
    profile_path: Path

    def __init__(self, device: torch.device, target: Pack):
        self.device = device
        self.packs = [target]  # and the draft, where there is one
        self.counters = Counters()
        self.notices: list[str] = []  # what the user should know about this pair, one line each
        self.decoder: Decoder | None = None
        self.prefetcher: Prefetcher | None = None
        self.trace: TraceWriter | None = None
        self.host_memory: HostMap | RamTier | None = None

    def close(self) -> None:
        """Stop the worker, end the trace, free every byte. Idempotent, from one thread at a time."""
        if self.prefetcher is not None:
            self.prefetcher.close()
            self.prefetcher = None
        if self.trace is not None:
            self.trace.close()
        try:
            synchronize(self.device)  # no copy may land in memory that others get
        finally:  # a device that has failed says so here; the host's part is freed all the same
            self.decoder = None
            if self.host_memory is not None:
                self.host_memory.close()
            for pack in self.packs:
                pack.close()
            trim_heap()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def __del__(self) -> None:
        if self.prefetcher is not None:  # dropped unclosed: the worker alone would keep the models
            self.prefetcher.stop()


@dataclass(kw_only=True)
class Loader:
    """One load: the options of `Engine.load` under their names, and what of an engine others replace."""

    device: str
    vram: str | int | float
    slots: int | None
    ctx_size: int | None
    kv_type: str
    draft_tokens: int | str
    prefetch: bool
    critical_experts: int | None
    cutoff: int | None
    policy: str
    pin: str | int
    template: str | Path | None
    trace: str | Path | None
    home: str | Path | None
    cancel: threading.Event | None
    on_plan: Callable[[Plan], object] | None
    on_progress: OnProgress | None
    make_slab: Callable[[int, int, torch.device], HostSlab | DeviceSlab]
    make_store: type[ExpertStore]
    captures: bool
    length: DraftLength = field(init=False)
    parts: Parts = field(init=False)

    def load(self, target: str | Path, draft: str | Path | None) -> Parts:
        """Everything, or an error and nothing."""
        check_callers(self.cancel, on_plan=self.on_plan, on_progress=self.on_progress)
        check(self.cancel)
        self._check_options()
        place = choose_device(self.device)
        if place.type == "cuda":
            from spmoe_lite.kernels.cache_triton import settle_kernel_cache

            settle_kernel_cache()
            tune.load(place, self.home)
        self.parts = parts = Parts(place, Pack.open(library.find(target, self.home)))
        try:
            if draft is not None:
                parts.packs.append(Pack.open(library.find(draft, self.home)))
            for pack in parts.packs:
                if pack.expert_layout is not None:
                    check_experts(place, pack.name, pack.expert_layout.dtype)
            self._read_texts()
            self._make_plan()
            if self.on_plan is not None:
                self.on_plan(parts.plan)
            if self.trace is not None:
                self._start_trace(self.trace)
            self.load_models()
            check(self.cancel)
            if place.type == "cuda":
                torch.cuda.empty_cache()  # of warming up: the plan counts what answers need
            for pack in parts.packs:
                library.touch_used(pack.path, self.home)
        except BaseException:
            parts.close()
            raise
        return parts

    def _check_options(self) -> None:
        """Refuse what no pack can have, before one is opened."""
        if not isinstance(self.policy, str) or self.policy not in POLICIES:
            raise UsageError(f"--policy {self.policy}: one of {', '.join(POLICIES)}")
        if not isinstance(self.kv_type, str) or self.kv_type not in KV_TYPES:
            raise UsageError(f"--kv-type {self.kv_type}: one of {', '.join(KV_TYPES)}")
        self.length = draft_length(self.draft_tokens)
        for name in ("slots", "ctx_size", "cutoff", "critical_experts"):
            if (number := getattr(self, name)) is not None:
                if not is_integer(number):
                    flag = name if name == "critical_experts" else f"--{name.replace('_', '-')}"
                    raise UsageError(f"{flag} {number!r:.80}: a whole number is needed")
                setattr(self, name, int(number))  # numpy's, which JSON does not take
        if not isinstance(self.template, (str, os.PathLike, NoneType)):
            raise UsageError(f"template {self.template!r:.80}: the path of a file, or None")
        if not isinstance(self.prefetch, (bool, np.bool_)):
            raise UsageError(f"prefetch {self.prefetch!r:.80}: True or False")
        if not isinstance(self.pin, str) or self.pin not in ("auto", "all", "none"):
            parse_size(self.pin, 1 << 40, "--pin")
        if self.cutoff is not None and self.cutoff < 0:
            raise UsageError(
                f"--cutoff {self.cutoff}: 0 for no prefetching, or the number of layers"
            )

    def _read_texts(self) -> None:
        """Tokenizer, template and sampling defaults; refuses a draft of another vocabulary."""
        parts = self.parts
        target, *drafts = parts.packs
        parts.tokenizer = Tokenizer.load(target.path, target.config)
        for draft in drafts:
            other = Tokenizer.load(draft.path, draft.config)
            parts.tokenizer.check_draft(other, target.config.vocab_size, draft.config.vocab_size)
        parts.num_tokens = min(parts.tokenizer.num_tokens, target.config.vocab_size)
        parts.eos_ids = frozenset(parts.tokenizer.eos_ids)
        parts.template = ChatTemplate.load(target.path, parts.tokenizer, override=self.template)
        parts.default_sampling = _default_sampling(target.path)

    def _make_plan(self) -> None:
        device, target = self.parts.device, self.parts.packs[0]
        sizes = [ModelSize.of(pack) for pack in self.parts.packs]
        pinned = self._pinned(self.pin, target)
        self.parts.plan = plan_pair(
            sizes[0],
            sizes[1] if len(sizes) > 1 else None,
            name=target.name,
            device=str(device),
            available=available_bytes(device),
            vram=self.vram,
            slots=self.slots,
            ctx_size=self.ctx_size,
            draft_tokens=self.length.most,
            chunk=PREFILL_CHUNK,
            kv_type=self.kv_type,
            pinned=pinned,
            costs=self._costs(pinned, sizes[0]),
        )

    def _costs(self, pinned: Literal["all", "none"] | int, size: ModelSize) -> Costs:
        """Of a token without a draft, which is what the plan says; on the CPU only if it was profiled."""
        device, target = self.parts.device, self.parts.packs[0]
        if target.expert_layout is None:
            return Costs(1e9, {})
        known = load_profile(self._profile_path())
        if device.type == "cpu":
            return Costs(_pack_rate(target), {}, known)
        rates = product_rates(device, target.dtypes)
        places = ram_places(pinned, 0, size.expert_count, size.stride)
        if not places:
            return Costs(_pack_rate(target), rates, known)
        disk = math.inf
        if places < size.expert_count:
            measured = None if known is None else known.disk_gbps
            disk = measured * 1e9 if measured else _pack_rate(target)
        return Costs(bus_rate(device), rates, known, disk_rate=disk)

    def _start_trace(self, path: str | Path) -> None:
        target, *drafts = self.parts.packs
        c, layout = target.config, target.expert_layout
        if layout is None:
            raise UsageError(f"--trace {path}: {target.name} has no experts to record")
        known = load_profile(self._profile_path())
        seconds = known.expert_copy_ms / 1e3 if known is not None else 0
        self.parts.trace = TraceWriter(
            path,
            Header(
                model=target.name,
                draft=drafts[0].name if drafts else None,
                layers=c.num_hidden_layers,
                experts=c.num_local_experts,
                k=c.num_experts_per_tok,
                slots=self.parts.plan.slots,
                draft_tokens=self.length.most if drafts else 0,
                expert_dtype=layout.dtype,
                expert_bytes=layout.stride,
                link=layout.stride / 1e9 / seconds if seconds else None,
            ),
        )

    def _profile_path(self, captured: bool = True) -> Path:
        names = [pack.name for pack in self.parts.packs]
        return profile_path(names, self.parts.device, self.home, captured)

    def load_models(self) -> None:
        """Weights, slots and caches; captured steps, or a worker that prefetches; the decoder of them."""
        parts, context = self.parts, self.parts.plan.context
        target_pack, *draft_packs = parts.packs
        c = target_pack.config
        critical = c.num_experts_per_tok if self.critical_experts is None else self.critical_experts
        if c.is_moe and not 1 <= critical <= c.num_local_experts:
            raise UsageError(f"critical_experts {critical}: 1 to {c.num_local_experts}")
        if parts.device.type == "cpu" and draft_packs:
            dtype = target_pack.dtypes.dense
            what = "--kv-type int8" if self.kv_type == "int8" else f"{target_pack.name} in {dtype}"
            if dtype != "fp32" or self.kv_type == "int8":
                parts.notices.append(
                    f"{what} on the CPU: the last bit of a product depends on how many tokens are "
                    f"checked at once, and rounding makes more of it: the text may depend on the draft"
                )
        target, store = self._load_model(
            target_pack, parts.plan.slots, context, parts.counters, parts.plan.ram_places
        )
        target_kv = self._kv_cache(target, context)
        models, stores = [(target, target_kv)], [store]
        draft = draft_kv = None
        if draft_packs:
            config = draft_packs[0].config
            window = min(context, config.max_position_embeddings)
            every = config.num_hidden_layers * config.num_local_experts
            draft, draft_store = self._load_model(draft_packs[0], every, window, Counters(), 0)
            draft_kv = self._kv_cache(draft, window)
            models.append((draft, draft_kv))
            stores.append(draft_store)
        predictor = None
        if draft is not None and store is not None and self.prefetch and not store.table.all_fit:
            if ExpertPredictor.fits(c, draft.config):
                predictor = ExpertPredictor(target, critical)
            else:
                parts.notices.append(
                    f"no prefetching: {draft_packs[0].name} has other layers or another width than "
                    f"{target_pack.name}, so its states say nothing to the target's routers"
                )
        graphs = drafts = None
        if parts.device.type == "cuda":
            torch.cuda.empty_cache()  # of what making the weights has left
            warm_up(parts.device, models, predictor, self.cancel, self.on_progress)
            graphs = self._capture(models, stores, predictor, critical)
            if graphs is None and draft_kv is not None and self.length.most:
                drafts = self._capture_drafts(*models[1], stores[1], predictor)
        if predictor is not None and graphs is None:
            assert store is not None
            parts.prefetcher = Prefetcher(store, predictor)
        parts.profile_path = self._profile_path(captured=graphs is not None)
        known = load_profile(parts.profile_path) or self._first_profile(target, draft, drafts)
        parts.decoder = Decoder(
            target,
            draft,
            Session(target_kv, draft_kv),
            store=store,
            prefetcher=parts.prefetcher,
            counters=parts.counters,
            drift=Drift(known),
            length=self.length,
            cutoff=self.cutoff,
            critical_experts=critical,
            trace=parts.trace,
            graphs=graphs,
            drafts=drafts,
        )

    def _load_model(
        self, pack: Pack, slots: int, context: int, counters: Counters, places: int
    ) -> tuple[Transformer, ExpertStore | None]:
        parts, device = self.parts, self.parts.device
        with memory_for(
            f"the weights of {pack.name} do not fit on {device}; free some of its memory, or repack "
            f"with --dense int8"
        ):
            tensors = pack.load_dense(device, on_progress=self.on_progress, cancel=self.cancel)
            fit_dense(device, pack.name, tensors)
        if not pack.config.is_moe:
            return Transformer(pack.config, tensors, context), None
        c, layout = pack.config, pack.expert_layout
        assert layout is not None, "a pack of a Mixture-of-Experts model has a layout"
        layers, experts, k = c.num_hidden_layers, c.num_local_experts, c.num_experts_per_tok
        table = SlotTable(slots, layers, experts, k, self.policy)
        landing = 0 if device.type == "cpu" or table.all_fit else landing_slots(experts)
        slab = self.make_slab(slots + landing, layout.stride, device)
        host, whole = None, layers * experts * layout.stride
        if places == layers * experts:
            host = parts.host_memory = HostMap(pack, device, self.on_progress, self.cancel)
        store = self.make_store(pack, slab, table, counters, device, host, landing)
        if 0 < places < layers * experts:
            parts.host_memory = tier = RamTier(
                pack,
                slab,
                places * layout.stride,
                table.last_used,
                counters,
                device,
                bypass=whole > available_bytes(torch.device("cpu")),
                on_progress=self.on_progress,
                cancel=self.cancel,
            )
            if tier.num_places:
                store.tier = tier
                parts.notices.append(
                    f"RAM has places for {tier.num_places} of {layers * experts} experts: what is "
                    f"neither there nor in a slot is read from the pack's files"
                )
        return Transformer(c, tensors, context, store, layout), store

    def _pinned(self, pin: str | int, pack: Pack) -> Literal["all", "none"] | int:
        """What may be page-locked of host memory; on the CPU the slots are in RAM already."""
        return pin_bytes(pin, pack) if self.parts.device.type == "cuda" else "none"

    def _kv_cache(self, model: Transformer, capacity: int) -> KVCache:
        device = self.parts.device
        dtype = torch.int8 if self.kv_type == "int8" else model.dtype
        try:
            return KVCache(model.config, capacity, dtype, device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"the KV cache of {capacity} tokens does not fit on {device}; lower --ctx-size"
            ) from error

    @torch.inference_mode()
    def _capture(
        self,
        models: Sequence[tuple[Transformer, KVCache]],
        stores: Sequence[ExpertStore | None],
        predictor: ExpertPredictor | None,
        critical: int,
    ) -> StepGraphs | None:
        """Captured steps, where the GPU can read every expert by itself; else None, and it is said."""
        parts = self.parts
        resident, tables, stride = {}, None, 0
        for (model, _), store in zip(models, stores, strict=True):
            if store is not None and store.table.all_fit:
                store.load_all(self.on_progress, self.cancel)
                resident[model] = store.addresses()
        if not self.captures:
            return None
        (target, target_kv), store = models[0], stores[0]
        if store is not None and not store.table.all_fit:
            host, table = store.host_addresses(), store.table
            if host is None or table.shared:
                reason = "not all experts are page-locked"
                if table.shared:
                    few = table.policy == "layer-lru"
                    reason = "fewer slots than a token needs" if few else f"--policy {table.policy}"
                parts.notices.append(f"steps are driven by the host: {reason}")
                return None
            share = max(len(store.places(layer)) for layer in range(len(host)))
            tables = Tables.make(
                host,
                torch.zeros((len(host), share), dtype=torch.int64, device=parts.device),
                ahead=(self.length.most, min(len(host), LAYERS_AHEAD), critical),
            )
            stride = parts.plan.slot_bytes
        draft, draft_kv = models[1] if len(models) > 1 else (None, None)
        return self._captured(
            "steps are",
            lambda: StepGraphs(
                target,
                target_kv,
                draft,
                draft_kv,
                resident=resident,
                tables=tables,
                stride=stride,
                predictor=predictor,
                most=self.length.most,
                num_tokens=parts.num_tokens,
            ),
        )

    @torch.inference_mode()
    def _capture_drafts(
        self,
        draft: Transformer,
        kv: KVCache,
        store: ExpertStore | None,
        predictor: ExpertPredictor | None,
    ) -> DraftSteps | None:
        """Captured drafts, which need nothing of how the target runs; None where they cannot be had."""
        if kv.capacity < self.length.most + 2:
            return None
        layers = self.parts.packs[0].config.num_hidden_layers
        return self._captured(
            "drafts are",
            lambda: DraftSteps(
                draft,
                kv,
                None if store is None else ResidentExperts(store.addresses()),
                predictor=predictor,
                layers_ahead=min(layers, LAYERS_AHEAD),
                most=self.length.most,
                num_tokens=self.parts.num_tokens,
            ),
        )

    def _captured(self, what: str, make: Callable[[], T]) -> T | None:
        """What `make` captures, or None and a notice; CapacityError where there is no room."""
        try:
            with current(self.parts.device):
                return make()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.parts.device} has no room left for captured steps: lower --vram or --ctx-size"
            ) from error
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self.parts.notices.append(
                f"{what} driven by the host: they cannot be captured ({reason})"
            )
            return None

    @torch.inference_mode()
    def _first_profile(
        self, target: Transformer, draft: Transformer | None, drafts: DraftSteps | None
    ) -> Profile:
        """A start for the cutoff until real steps correct it: one timed draft pass, and the read rate."""
        plan = self.parts.plan
        copy_ms = plan.slot_bytes / plan.read_rate * 1e3
        if draft is None:
            return Profile(copy_ms, 0.0, 0.0)
        kv, times = self._kv_cache(draft, 4), []
        with current(self.parts.device):
            for _ in range(2):
                started = time.perf_counter()
                if drafts is not None:
                    drafts.propose([0, 0], 1, None, None, None)
                else:
                    draft.forward([0], kv).sum().item()
                times.append((time.perf_counter() - started) * 1e3)
        return Profile(copy_ms, min(times), min(times) / len(target.blocks))


def profile_path(
    packs: Sequence[str], device: torch.device, home: str | Path | None, captured: bool = True
) -> Path:
    """Where the times of these packs on this machine are kept; on a GPU by who drives the steps."""
    machine = platform.node() or "machine"
    if device.type == "cuda":
        machine += "-" + torch.cuda.get_device_name(device) + ("" if captured else "-host")
    safe = re.sub(r"[^\w.+-]+", "_", f"{'+'.join(packs)}@{machine}")
    return library.home(home) / "profiles" / f"{safe}.json"


def pin_bytes(pin: str | int, pack: Pack) -> Literal["all", "none"] | int:
    """What `HostMap` may page-lock."""
    available = available_bytes(torch.device("cpu"))
    if pin == "auto":
        return default_pin(pack, available)
    if pin == "all":
        return "all"
    return "none" if pin == "none" else parse_size(pin, available, "--pin")


def draft_length(draft_tokens: int | str) -> DraftLength:
    if isinstance(draft_tokens, str) and draft_tokens == "auto":
        return DraftLength(DEFAULT_DRAFT_TOKENS, adapt=True)
    if not is_integer(draft_tokens) or not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise UsageError(f"--draft-tokens {draft_tokens}: 0 to {MAX_DRAFT_TOKENS}, or auto")
    return DraftLength(int(draft_tokens), adapt=False)


def _default_sampling(folder: Path) -> SamplingParams:
    """What generation_config.json recommends; greedy without one."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingParams()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return SamplingParams.from_generation_config(values)
    except (OSError, ValueError, AttributeError, SpmoeError) as error:
        raise DamagedError(f"{path}: {error}; convert again, or delete the file") from error


def product_rates(device: torch.device, dtypes: Dtypes) -> dict[str, float]:
    """Bytes of weights per second in a single-row product on a GPU, by dtype."""
    plain = memory_rate(device)
    return {
        dtype: plain if scheme_of(dtype) is None else CODES_RATE * plain
        for dtype in {dtypes.dense, dtypes.linear, dtypes.embed, dtypes.experts or dtypes.dense}
    }


def _pack_rate(pack: Pack) -> float:
    """Bytes per second of experts read from the pack's files, one after the other."""
    assert pack.expert_layout is not None
    out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
    out.fill(0)  # touch the pages: they are not what is measured
    count = min(4, pack.config.num_local_experts)
    started = time.perf_counter()
    for expert in range(count):
        pack.read_expert(pack.config.num_hidden_layers - 1, expert, out)
    return count * len(out) / max(time.perf_counter() - started, 1e-9)
