"""The engine: two models, the slots between them, one conversation; the library's front door.

    with Engine.load("mixtral-8x7b", draft="mistral-7b") as engine:
        for piece in engine.chat([{"role": "user", "content": "Hello"}]):
            print(piece, end="", flush=True)

`load` opens the packs, makes the memory plan (refused before anything is loaded if it cannot fit), loads
the dense weights and allocates the slab; experts come on demand. One caller at a time: a second one waits
or gets `BusyError`, as asked. `close` ends what is running, stops the worker and gives every byte back.

Nothing here prints, installs a signal handler, changes an environment variable or a torch global, or
downloads anything.
"""

from __future__ import annotations

import json
import logging
import operator
import platform
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from spmoe_lite import library, tune
from spmoe_lite.chat_template import ChatTemplate
from spmoe_lite.config import SamplingParams, matrix_bytes, scheme_of
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
)
from spmoe_lite.drafting import DraftLength
from spmoe_lite.errors import (
    BusyError,
    CapacityError,
    DamagedError,
    SpmoeError,
    UnsupportedError,
    UsageError,
)
from spmoe_lite.generation import Generation, Run
from spmoe_lite.graphs import StepGraphs
from spmoe_lite.hostmap import HostMap, default_pin
from spmoe_lite.kernels.attention import attention
from spmoe_lite.kernels.expert_gemm import expert_down, expert_up
from spmoe_lite.kernels.linear import linear
from spmoe_lite.kernels.residency import Tables
from spmoe_lite.kvcache import KVCache
from spmoe_lite.manifest import Dtypes
from spmoe_lite.model import Transformer
from spmoe_lite.pack import Pack, view_weight
from spmoe_lite.plan import KV_TYPES, ModelSize, Plan, parse_size, plan_pair
from spmoe_lite.predictor import ExpertPredictor
from spmoe_lite.prefetch import Prefetcher
from spmoe_lite.progress import OnProgress, Progress, check
from spmoe_lite.ramtier import RamTier
from spmoe_lite.session import Session
from spmoe_lite.slab import make_slab
from spmoe_lite.slots import POLICIES, SlotTable
from spmoe_lite.speed import Costs
from spmoe_lite.stats import Counters, warnings
from spmoe_lite.store import ExpertStore
from spmoe_lite.tokenizer import Tokenizer
from spmoe_lite.trace import Header, TraceWriter

log = logging.getLogger("spmoe_lite")

DEFAULT_DRAFT_TOKENS = 4
CODES_RATE = 0.4  # of a GPU's memory rate, in products with quantised matrices (docs/log.md)
MAX_DRAFT_TOKENS = 31  # a verify pass of at most 32 rows
LAYERS_AHEAD = 8  # at most, that captured drafts predict for: more never arrives in time
WARM_UP = ((1, 0), (17, 0), (33, 0), (128, 0), (1, 128))  # rows of a pass, tokens before it
LONG = (4096, 16384)  # tokens before a pass, from where on the context's parts are added otherwise


class Engine:
    """A target model, perhaps a draft, and the conversation they are in."""

    # `bench` measures other people's policies and copies in their place
    make_slab = staticmethod(make_slab)
    make_store: type[ExpertStore] = ExpertStore
    captures = True  # where steps can be

    def __init__(self, target: Pack, draft: Pack | None, device: torch.device):
        """Use `Engine.load`."""
        self._prefetcher: Prefetcher | None = None
        self._trace: TraceWriter | None = None
        self._host_memory: HostMap | RamTier | None = None
        self.device = device
        self.counters = Counters()
        self.plan: Plan
        self.tokenizer: Tokenizer
        self.template: ChatTemplate | None
        self.default_sampling: SamplingParams
        self.decoder: Decoder
        self.ctx_size: int
        self.kv_type = "auto"
        self.num_tokens: int
        self.eos_ids: frozenset[int]
        self.notices: list[str] = []  # what the user should know about this pair, one line each
        self.profile_path: Path | None = None
        self.target_pack = target
        self._packs = [pack for pack in (target, draft) if pack is not None]
        self._lock = threading.RLock()  # a dropped Generation may let go inside any of its blocks
        self._free = threading.Condition(self._lock)
        self._holder: Run | None = None
        self._caller: tuple[int, object] | None = None  # the thread and asyncio task it reads in
        self._closed = False
        self._closing = threading.RLock()

    @classmethod
    def load(
        cls,
        target: str | Path,
        draft: str | Path | None = None,
        *,
        device: str = "auto",
        vram: str | int | float = "auto",
        slots: int | None = None,
        ctx_size: int | None = None,
        kv_type: str = "auto",
        draft_tokens: int | str = DEFAULT_DRAFT_TOKENS,
        prefetch: bool = True,
        critical_experts: int | None = None,
        cutoff: int | None = None,
        policy: str = "layer-lru",
        pin: str | int = "auto",
        template: Path | None = None,
        trace: Path | None = None,
        home: Path | None = None,
        cancel: threading.Event | None = None,
        on_plan: Callable[[Plan], object] | None = None,
        on_progress: OnProgress | None = None,
    ) -> Engine:
        """Load packs by path or name.

        device: "auto", "cpu", "cuda", "cuda:N". vram: bytes, "20GiB", a fraction, or "auto" (free VRAM
        less 10 %; without a GPU half of the available RAM). slots: experts held at once, overrides what
        vram allows. ctx_size: tokens of prompt and answer together. kv_type: "auto" keeps keys and
        values as the model computes them, "int8" in about half of that. draft_tokens: proposals per step;
        "auto" drafts as many as by default, and none while plain steps are measured to be faster.
        critical_experts: experts prefetched per draft token and layer (default: the router's k).
        cutoff: layers to prefetch for (default: from measured times). pin: how much of the pack may be
        page-locked in RAM for the GPU: "all", "none", bytes or "20GiB", or "auto" (what fits in 75 % of
        the available RAM); the GPU reads missing experts there by itself if it is all, else RAM holds the
        experts last used and the others come from disk. trace: a new file that records
        routing (`trace.py`). on_plan(plan) is called before anything is loaded.

        Raises NotFoundError, DamagedError, UnsupportedError (pair), CapacityError, Cancelled.
        """
        check(cancel)
        if policy not in POLICIES:
            raise UsageError(f"--policy {policy}: one of {', '.join(POLICIES)}")
        if kv_type not in KV_TYPES:
            raise UsageError(f"--kv-type {kv_type}: one of {', '.join(KV_TYPES)}")
        length = draft_length(draft_tokens)
        for flag, number in {"--slots": slots, "--ctx-size": ctx_size, "--cutoff": cutoff}.items():
            if number is not None and (
                isinstance(number, bool) or not isinstance(number, Integral)
            ):
                raise UsageError(f"{flag} {number!r}: a whole number is needed")
        if pin not in ("auto", "all", "none"):
            parse_size(pin, 1 << 40, "--pin")  # refused before anything is opened
        if cutoff is not None and cutoff < 0:
            raise UsageError(f"--cutoff {cutoff}: 0 for no prefetching, or the number of layers")
        place = choose_device(device)
        if place.type == "cuda":
            from spmoe_lite.kernels.cache_triton import settle_kernel_cache

            settle_kernel_cache()
            tune.load(place, home)
        target_pack = Pack.open(library.find(target, home))
        engine = None
        try:
            draft_pack = None if draft is None else Pack.open(library.find(draft, home))
            engine = cls(target_pack, draft_pack, place)
            for pack in engine._packs:
                if pack.expert_layout is not None:
                    check_experts(place, pack.name, pack.expert_layout.dtype)
            engine._read_texts(template)
            engine.kv_type = kv_type
            engine._make_plan(vram, slots, ctx_size, length.most, pin, home)
            if on_plan is not None:
                on_plan(engine.plan)
            if trace is not None:
                engine._trace = engine._start_trace(trace, length.most, home)
            engine._load_models(
                length=length,
                prefetch=prefetch,
                critical_experts=critical_experts,
                cutoff=cutoff,
                policy=policy,
                pin=pin,
                home=home,
                cancel=cancel,
                on_progress=on_progress,
            )
            check(cancel)
            if place.type == "cuda":
                torch.cuda.empty_cache()  # of warming up: the plan counts what answers need
            for pack in engine._packs:
                library.touch_used(pack.path)
        except BaseException:
            if engine is None:
                target_pack.close()
            else:
                engine.close()
            raise
        return engine

    # --- answering -----------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        wait: bool = True,
        cancel: threading.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Continue a text, or a sequence of token ids. Nothing runs before the first piece is asked for."""
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        return self._generation(
            tokens, sampling, max_tokens, stop, wait, cancel, on_progress, continues=True
        )

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        wait: bool = True,
        cancel: threading.Event | None = None,
        on_progress: OnProgress | None = None,
    ) -> Generation:
        """Answer a conversation of {"role", "content"} messages through the model's chat template.

        What the conversation shares with the one before is not computed again.
        """
        if self.template is None:
            raise UnsupportedError(
                f"{self._packs[0].name} has no chat template: use `run` or `generate`, "
                f"or give one with --template FILE"
            )
        tokens = self.template.encode([dict(message) for message in messages])
        return self._generation(tokens, sampling, max_tokens, stop, wait, cancel, on_progress)

    def _generation(
        self,
        tokens: list[int],
        sampling: SamplingParams | None,
        max_tokens: int | None,
        stop: Sequence[str],
        wait: bool,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
        continues: bool = False,
    ) -> Generation:
        if self._closed:
            raise BusyError("the engine is closed")
        if not tokens:
            raise UsageError("the prompt is empty")
        if len(tokens) >= self.ctx_size:
            raise CapacityError(
                f"the prompt has {len(tokens)} tokens, the context {self.ctx_size}, one of them for "
                f"the answer: shorten the prompt or raise --ctx-size"
            )
        if bad := next((t for t in tokens if not 0 <= t < self.num_tokens), None):
            raise UsageError(f"token id {bad} is outside the vocabulary of {self.num_tokens}")
        if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
            raise UsageError(f"--max-tokens {max_tokens}: a whole number of at least 1")
        run = Run(
            self,
            tokens,
            sampling=sampling or self.default_sampling,
            max_tokens=max_tokens,
            stop=stop,
            wait=wait,
            cancel=cancel,
            on_progress=on_progress,
            continues=continues,
        )
        return Generation(run)

    # --- one caller at a time ------------------------------------------------------------------

    def try_hold(self, run: Run, task: object | None) -> bool:
        """Lend the engine to one answer, read in this thread and task; False if another one has it."""
        with self._lock:
            if self._closed:
                raise BusyError("the engine is closed")
            if self._holder in (None, run):
                self._caller = threading.get_ident(), task  # who read last: pools change threads
                self._holder = run
            return self._holder is run

    def is_held_by(self, run: Run) -> bool:
        return self._holder is run

    def let_go(self, run: Run) -> None:
        """Take the engine back, if it is this answer that has it."""
        with self._lock:
            if self._holder is run:
                self._holder = self._caller = None
                self._free.notify_all()

    def wait_free(self, seconds: float) -> None:
        with self._lock:
            if self._holder is not None:
                self._free.wait(seconds)

    def held_by_caller(self, task: object | None) -> bool:
        """Whether the answer that has the engine goes on only when the caller does, by all we see:

        the caller is inside one of its steps, or read it last and nobody reads it now.
        """
        with self._lock:
            if self._holder is None or self._caller is None:
                return False
            if self._holder.in_step():
                return True
            if self._holder.is_read():
                return False
            thread, other = self._caller
            return thread == threading.get_ident() and (task is None or other is task)

    def close(self) -> None:
        """End what is running, stop the worker, free every byte. Idempotent, from any thread.

        BusyError from inside a step of an answer (`on_progress`, a signal handler): the step is
        cancelled, and `close` can be called again when it has ended.
        """
        with self._lock:
            self._closed = True
            holder = self._holder
        if holder is not None:
            holder.close()
            if holder.in_step():
                raise BusyError(
                    "the engine is in use by this very thread: close it after the answer"
                )
        with self._closing:
            if self._prefetcher is not None:
                self._prefetcher.close()
                self._prefetcher = None
            if self._trace is not None:
                self._trace.close()
            try:
                synchronize(self.device)  # no copy may land in memory that others get
            finally:  # a device that has failed says so here; the host's part is freed all the same
                self.__dict__.pop("decoder", None)
                if self._host_memory is not None:
                    self._host_memory.close()
                for pack in self._packs:
                    pack.close()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def __del__(self) -> None:
        if self._prefetcher is not None:  # dropped unclosed: the worker alone would keep the models
            self._prefetcher.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> dict[str, Any]:
        """Totals since loading: counters, profile, slots, notices, what does not pay.

        "regime" is "all-resident", "dynamic" (both captured) or "host-driven"; `stats.in_words` tells it all.
        """
        decoder: Decoder | None = self.__dict__.get("decoder")
        if decoder is None:
            raise BusyError("the engine is closed")
        tier = None if decoder.store is None else decoder.store.tier
        graphs, regime = decoder.graphs, "host-driven"
        if graphs is not None:
            regime = "all-resident" if graphs.tables is None else "dynamic"
        drafting_paused = decoder.draft is not None and decoder.length.paused
        return {
            "counters": self.counters.copy(),
            "profile": decoder.drift.profile.to_dict(),
            "slots": self.plan.slots,
            "experts": self.plan.expert_count,
            "policy": None if decoder.store is None else decoder.store.table.policy,
            "cutoff_layer": decoder.last_cutoff,
            "drafting_paused": drafting_paused,
            "prefetch_paused": decoder.usefulness.paused,
            "ram_places": None if tier is None else tier.num_places,
            "steps": "driven by the host" if graphs is None else "captured",
            "regime": regime,
            "warnings": warnings(self.counters, drafting_paused, decoder.usefulness.paused),
            "notices": list(self.notices),
        }

    # --- loading -------------------------------------------------------------------------------

    def _read_texts(self, template: Path | None) -> None:
        """Tokenizer, template and sampling defaults; refuses a draft of another vocabulary."""
        target, *drafts = self._packs
        self.tokenizer = Tokenizer.load(target.path, target.config)
        for draft in drafts:
            other = Tokenizer.load(draft.path, draft.config)
            self.tokenizer.check_draft(other, target.config.vocab_size, draft.config.vocab_size)
        self.num_tokens = min(self.tokenizer.num_tokens, target.config.vocab_size)
        self.eos_ids = frozenset(self.tokenizer.eos_ids)
        self.template = ChatTemplate.load(target.path, self.tokenizer, override=template)
        self.default_sampling = _default_sampling(target.path)

    def _make_plan(
        self,
        vram: str | int | float,
        slots: int | None,
        ctx_size: int | None,
        draft_tokens: int,
        pin: str | int,
        home: Path | None,
    ) -> None:
        target = self._packs[0]
        sizes = [ModelSize.of(pack) for pack in self._packs]
        self.plan = plan_pair(
            sizes[0],
            sizes[1] if len(sizes) > 1 else None,
            name=target.name,
            device=str(self.device),
            available=available_bytes(self.device),
            vram=vram,
            slots=slots,
            ctx_size=ctx_size,
            draft_tokens=draft_tokens,
            chunk=PREFILL_CHUNK,
            kv_type=self.kv_type,
            costs=Costs(
                read_rate=_read_rate(target, self.device, pin),
                product_rates=product_rates(self.device, target.dtypes),
                profile=load_profile(self._profile_path(home)),
            ),
        )
        self.ctx_size = self.plan.context

    def _load_models(
        self,
        *,
        length: DraftLength,
        prefetch: bool,
        critical_experts: int | None,
        cutoff: int | None,
        policy: str,
        pin: str | int,
        home: Path | None,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
    ) -> None:
        target_pack, *draft_packs = self._packs
        c = target_pack.config
        critical = c.num_experts_per_tok if critical_experts is None else critical_experts
        if c.is_moe and not 1 <= critical <= c.num_local_experts:
            raise UsageError(f"critical_experts {critical}: 1 to {c.num_local_experts}")
        if self.kv_type == "int8" and self.device.type == "cpu" and draft_packs:
            self.notices.append(
                "--kv-type int8 on the CPU: the last bit of a product depends on how many tokens are "
                "checked at once, and int8 makes more of it: the text may depend on the draft"
            )
        target, store = self._load_model(
            target_pack,
            self.plan.slots,
            policy,
            self.ctx_size,
            self.counters,
            cancel,
            on_progress,
            pin=pin,
        )
        stores = [store]
        target_kv = self._kv_cache(target, self.ctx_size)
        draft = draft_kv = None
        if draft_packs:
            config = draft_packs[0].config
            window = min(self.ctx_size, config.max_position_embeddings)
            every = config.num_hidden_layers * config.num_local_experts
            draft, draft_store = self._load_model(
                draft_packs[0], every, policy, window, Counters(), cancel, on_progress
            )
            stores.append(draft_store)
            draft_kv = self._kv_cache(draft, window)
        predictor = None
        if draft is not None and store is not None and prefetch and not store.table.all_fit:
            if ExpertPredictor.fits(c, draft.config):
                predictor = ExpertPredictor(target, critical)
            else:
                self.notices.append(
                    f"no prefetching: {draft_packs[0].name} has other layers or another width than "
                    f"{target_pack.name}, so its states say nothing to the target's routers"
                )
        graphs = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # of what making the weights has left
            models = [(target, target_kv)]
            if draft is not None and draft_kv is not None:
                models.append((draft, draft_kv))
            self._warm_up(models, predictor, cancel, on_progress)
            graphs = self._capture(
                models, stores, predictor, critical, length.most, cancel, on_progress
            )
        if predictor is not None and graphs is None:
            assert store is not None
            self._prefetcher = Prefetcher(store, predictor)
        self.profile_path = self._profile_path(home, captured=graphs is not None)
        self.decoder = Decoder(
            target,
            draft,
            Session(target_kv, draft_kv),
            store=store,
            prefetcher=self._prefetcher,
            counters=self.counters,
            drift=Drift(load_profile(self.profile_path) or self._first_profile(target, draft)),
            length=length,
            cutoff=cutoff,
            critical_experts=critical,
            trace=self._trace,
            graphs=graphs,
        )

    @torch.inference_mode()
    def _capture(
        self,
        models: Sequence[tuple[Transformer, KVCache]],
        stores: Sequence[ExpertStore | None],
        predictor: ExpertPredictor | None,
        critical: int,
        most: int,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
    ) -> StepGraphs | None:
        """Captured steps, where the GPU can read every expert by itself; else None, and it is said."""
        resident, tables, stride = {}, None, 0
        for (model, _), store in zip(models, stores, strict=True):
            if store is not None and store.table.all_fit:
                store.load_all(on_progress, cancel)
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
                self.notices.append(f"steps are driven by the host: {reason}")
                return None
            share = max(len(table.places(layer)) for layer in range(len(host)))
            tables = Tables.make(
                host,
                torch.zeros((len(host), share), dtype=torch.int64, device=self.device),
                ahead=(most, min(len(host), LAYERS_AHEAD), critical),
            )
            stride = self.plan.slot_bytes
        draft, draft_kv = models[1] if len(models) > 1 else (None, None)
        try:
            with current(self.device):
                return StepGraphs(
                    target,
                    target_kv,
                    draft,
                    draft_kv,
                    resident=resident,
                    tables=tables,
                    stride=stride,
                    predictor=predictor,
                    most=most,
                    num_tokens=self.num_tokens,
                )
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{self.device} has no room left for captured steps: lower --vram or --ctx-size"
            ) from error
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            self.notices.append(f"steps are driven by the host: they cannot be captured ({reason})")
            return None

    def _load_model(
        self,
        pack: Pack,
        slots: int,
        policy: str,
        context: int,
        counters: Counters,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
        pin: str | int = "auto",
    ) -> tuple[Transformer, ExpertStore | None]:
        tensors = pack.load_dense(self.device, on_progress=on_progress, cancel=cancel)
        fit_dense(self.device, pack.name, tensors)
        if not pack.config.is_moe:
            return Transformer(pack.config, tensors, context), None
        c, layout = pack.config, pack.expert_layout
        assert layout is not None, "a pack of a Mixture-of-Experts model has a layout"
        slab = self.make_slab(slots, layout.stride, self.device)
        layers, experts, k = c.num_hidden_layers, c.num_local_experts, c.num_experts_per_tok
        table = SlotTable(slots, layers, experts, k, policy)
        host, whole = None, layers * experts * layout.stride
        pinned = "none" if table.all_fit else self._pinned(pin, pack)
        in_part = isinstance(pinned, int) and pinned < whole
        if pinned != "none" and not in_part:
            host = self._host_memory = HostMap(pack, self.device, on_progress, cancel)
        store = self.make_store(pack, slab, table, counters, self.device, host)
        if isinstance(pinned, int) and in_part:
            self._host_memory = tier = RamTier(
                pack,
                slab,
                pinned,
                table.last_used,
                counters,
                self.device,
                bypass=whole > available_bytes(torch.device("cpu")),
                on_progress=on_progress,
                cancel=cancel,
            )
            if tier.num_places:
                store.tier = tier
                self.notices.append(
                    f"RAM has places for {tier.num_places} of {layers * experts} experts: what is "
                    f"neither there nor in a slot is read from the pack's files"
                )
        return Transformer(c, tensors, context, store, layout), store

    def _pinned(self, pin: str | int, pack: Pack) -> Literal["all", "none"] | int:
        """What may be page-locked of host memory; on the CPU the slots are in RAM already."""
        return pin_bytes(pin, pack) if self.device.type == "cuda" else "none"

    def _kv_cache(self, model: Transformer, capacity: int) -> KVCache:
        dtype = torch.int8 if self.kv_type == "int8" else model.dtype
        try:
            return KVCache(model.config, capacity, dtype, self.device)
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"the KV cache of {capacity} tokens does not fit on {self.device}; lower --ctx-size"
            ) from error

    def _start_trace(self, path: Path, draft_tokens: int, home: Path | None) -> TraceWriter:
        target, *drafts = self._packs
        c, layout = target.config, target.expert_layout
        if layout is None:
            raise UsageError(f"--trace {path}: {target.name} has no experts to record")
        known = load_profile(self._profile_path(home))
        seconds = known.expert_copy_ms / 1e3 if known is not None else 0
        return TraceWriter(
            path,
            Header(
                model=target.name,
                draft=drafts[0].name if drafts else None,
                layers=c.num_hidden_layers,
                experts=c.num_local_experts,
                k=c.num_experts_per_tok,
                slots=self.plan.slots,
                draft_tokens=draft_tokens if drafts else 0,
                expert_dtype=layout.dtype,
                expert_bytes=layout.stride,
                link=layout.stride / 1e9 / seconds if seconds else None,
            ),
        )

    def _profile_path(self, home: Path | None, captured: bool = True) -> Path:
        return profile_path([pack.name for pack in self._packs], self.device, home, captured)

    @torch.inference_mode()
    def _warm_up(
        self,
        models: Sequence[tuple[Transformer, KVCache]],
        predictor: ExpertPredictor | None,
        cancel: threading.Event | None,
        on_progress: OnProgress | None,
    ) -> None:
        """Compile every kernel that answers need, so that none of them waits for a compiler.

        Which kernels a pass takes depends on how many rows it has, in four classes, and on whether it
        looks back over more than one part of the context. In prefill the tile of the experts
        depends on how many rows an expert has; `_launch_tiles` makes each choice once. So does
        `_launch_merges` for long contexts, over whatever the cache holds.
        """
        passes = [
            (model, kv, rows, start)
            for model, kv in models
            for rows, start in WARM_UP
            if start + rows <= kv.capacity
        ]
        for done, (model, kv, rows, start) in enumerate(passes):
            check(cancel)
            if on_progress is not None:
                on_progress(Progress("warm up", done, len(passes), "passes"))
            kv.truncate(start)
            try:
                with current(self.device):
                    model.forward([0] * rows, kv)
                    if start + rows == 1:
                        _launch_tiles(model)
                        _launch_merges(model, kv)
                    if predictor is not None and done == 0:
                        predictor.predict(0, 0, model.norm.new_zeros(1, model.config.hidden_size))
                synchronize(self.device)
            except (SpmoeError, OSError):
                raise
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"{self.device} has no room left for a pass: lower --vram or --ctx-size"
                ) from error
            except Exception as error:
                reason = str(error).strip().partition("\n")[0] or type(error).__name__
                raise UnsupportedError(
                    f"the kernels do not run on {self.device} ({reason}): use --device cpu"
                ) from error
        for _, kv in models:
            kv.truncate(0)

    @torch.inference_mode()
    def _first_profile(self, target: Transformer, draft: Transformer | None) -> Profile:
        """A start for the cutoff until real steps correct it: one timed draft pass, and the read rate."""
        copy_ms = self.plan.slot_bytes / self.plan.read_rate * 1e3
        if draft is None:
            return Profile(copy_ms, 0.0, 0.0)
        kv = self._kv_cache(draft, 4)
        times = []
        for _ in range(2):
            started = time.perf_counter()
            draft.forward([0], kv).sum().item()
            times.append((time.perf_counter() - started) * 1e3)
        return Profile(copy_ms, min(times), min(times) / len(target.blocks))


def profile_path(
    packs: Sequence[str], device: torch.device, home: Path | None, captured: bool = True
) -> Path:
    """Where the times of these packs on this machine are kept; on a GPU by who drives the steps."""
    machine = platform.node() or "machine"
    if device.type == "cuda":
        machine += "-" + torch.cuda.get_device_name(device) + ("" if captured else "-host")
    safe = re.sub(r"[^A-Za-z0-9.+_-]+", "_", f"{'+'.join(packs)}@{machine}")
    return (library.home() if home is None else home) / "profiles" / f"{safe}.json"


def _launch_merges(model: Transformer, kv: KVCache) -> None:
    """Each kernel that may add up the parts of a context longer than those of `WARM_UP`."""
    c, caches = model.config, (kv.keys[0], kv.values[0])
    q = model.norm.new_zeros(1, c.num_attention_heads, c.head_dim)
    for start in LONG:
        if start < kv.capacity:
            attention(q, *caches, start, c.sliding_window, kv_scales=kv.scales[0])


def _launch_tiles(model: Transformer) -> None:
    """Each tile that the experts may have in prefill, over experts that no row asks for."""
    layout = model.layout
    if layout is None:
        return
    rows, choices = 128, model.config.num_experts_per_tok
    x = model.norm.new_zeros(rows, layout.hidden_size)
    experts = x.new_zeros(rows, choices, dtype=torch.int32)
    hidden = x.new_empty(rows, choices, layout.intermediate_size)
    out = x.new_empty(rows, choices, layout.hidden_size)
    for columns in (16, 32, 64, 128):
        use = x.new_full((rows * choices // columns, 3), -1, dtype=torch.int64)
        expert_up(x, experts, use, layout, out=hidden)
        expert_down(hidden, experts, use, layout, out=out)


def pin_bytes(pin: str | int, pack: Pack) -> Literal["all", "none"] | int:
    """What `HostMap` may page-lock."""
    available = available_bytes(torch.device("cpu"))
    if pin == "auto":
        return default_pin(pack, available)
    if pin == "all":
        return "all"
    return "none" if pin == "none" else parse_size(pin, available, "--pin")


def _token_ids(prompt: Sequence[int]) -> list[int]:
    """Whole numbers of any kind, numpy's included, as Python's own."""
    try:
        return [operator.index(token) for token in prompt]
    except TypeError as error:
        raise UsageError(f"a prompt is a text or a sequence of token ids: {error}") from None


def draft_length(draft_tokens: int | str) -> DraftLength:
    if draft_tokens == "auto":
        return DraftLength(DEFAULT_DRAFT_TOKENS, adapt=True)
    if not isinstance(draft_tokens, int) or not 0 <= draft_tokens <= MAX_DRAFT_TOKENS:
        raise UsageError(f"--draft-tokens {draft_tokens}: 0 to {MAX_DRAFT_TOKENS}, or auto")
    return DraftLength(draft_tokens, adapt=False)


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
    """Bytes of weights per second in a single-row product, by dtype."""
    plain, rates = memory_rate(device), {}
    for dtype in {dtypes.dense, dtypes.linear, dtypes.embed, dtypes.experts or dtypes.dense}:
        if scheme_of(dtype) is None:
            rates[dtype] = plain
        elif device.type == "cuda":
            rates[dtype] = CODES_RATE * plain
        else:  # as fast as the CPU dequantises, which has little to do with its memory
            rows, columns = 512, 2048
            memory = torch.zeros(matrix_bytes(dtype, rows, columns), dtype=torch.uint8)
            matrix, row = view_weight(memory, dtype, (rows, columns)), torch.ones(1, columns)
            seconds = []
            for _ in range(2):
                started = time.perf_counter()
                linear(row, matrix)
                seconds.append(time.perf_counter() - started)
            rates[dtype] = memory.nbytes / max(min(seconds), 1e-9)
    return rates


def _read_rate(pack: Pack, device: torch.device, pin: str | int) -> float:
    """Bytes per second of a missing expert: over the bus if all are page-locked, else to host memory."""
    if pack.expert_layout is None:
        return 1e9
    if device.type == "cuda":
        pinned = pin_bytes(pin, pack)
        if pinned == "all" or (
            pinned != "none" and pinned >= pack.expert_count() * pack.expert_layout.stride
        ):
            return bus_rate(device)
    out = np.empty(pack.expert_layout.stride, dtype=np.uint8)
    out.fill(0)  # touch the pages: they are not what is measured
    count = min(4, pack.config.num_local_experts)
    started = time.perf_counter()
    for expert in range(count):
        pack.read_expert(pack.config.num_hidden_layers - 1, expert, out)
    return count * len(out) / max(time.perf_counter() - started, 1e-9)
