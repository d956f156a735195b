"""The memory plan: what goes where, decided and printed before anything is loaded.

    slots = (budget - weights - draft - both KV caches - workspace - reserve) / bytes of an expert

The reserve is what a GPU needs beside: code of kernels, captured steps, rounding. Where experts have no
slot, some more than `slots` are set aside on a GPU: prompts pass through them. Pure arithmetic on pack
headers. A plan that cannot fit is refused with the smallest change that would.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from spmoe_lite.config import ModelConfig
from spmoe_lite.errors import CapacityError, UsageError
from spmoe_lite.precision import DTYPE_BYTES, scheme_of
from spmoe_lite.progress import size, sizes_apart
from spmoe_lite.slots import landing_slots
from spmoe_lite.speed import Costs, predict

if TYPE_CHECKING:
    from spmoe_lite.manifest import Dtypes
    from spmoe_lite.pack import Pack

MIN_SLOTS = 2
DEFAULT_CONTEXT = 8192
RUNTIME_BYTES = 400_000_000  # of a GPU: kernels' code, captured steps (docs/log.md)
ROUNDING = 0.05  # of dense weights: what the allocator rounds up
KV_TYPES = ("auto", "int8")  # of KV caches; auto is the float of the model's activations
UNPRICED = Costs(1e9, {})  # where only bytes matter
DEQUANTISED = 8  # bytes a weight that the CPU dequantises for one product; measured: 6.3
_UNITS = {"": 1, "B": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a pack matters for the plan; all of it stands in the headers."""

    config: ModelConfig
    dtypes: Dtypes
    dense: Mapping[str, int]  # bytes by dtype
    stride: int  # bytes of one expert, 0 for a dense model

    @staticmethod
    def of(pack: Pack) -> ModelSize:
        stride = 0 if pack.expert_layout is None else pack.expert_layout.stride
        return ModelSize(pack.config, pack.dtypes, pack.dense_sizes(), stride)

    @property
    def dense_bytes(self) -> int:
        return sum(self.dense.values())

    @property
    def expert_count(self) -> int:
        return self.config.num_hidden_layers * self.config.num_local_experts


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by purpose, slots, and the time of a token they allow."""

    device: str
    budget: int
    slots: int
    landing_slots: int  # beside them
    expert_count: int
    slot_bytes: int
    target_bytes: int
    draft_bytes: int
    kv_bytes: int
    workspace_bytes: int
    reserve_bytes: int
    ram_places: int  # experts that RAM holds page-locked: all, none, or as many as the RAM tier has room for
    context: int
    read_rate: float  # bytes per second, of a missing expert that RAM holds
    token_seconds: float | None  # estimate without drafting

    @property
    def total_bytes(self) -> int:
        fixed = self.target_bytes + self.draft_bytes + self.kv_bytes
        slots = (self.slots + self.landing_slots) * self.slot_bytes
        return fixed + self.workspace_bytes + self.reserve_bytes + slots

    @property
    def has_tier(self) -> bool:
        """Whether RAM holds some experts and not all, so that others are read from disk."""
        return 0 < self.ram_places < self.expert_count

    @property
    def held(self) -> int | None:
        """Experts that slots and the RAM tier hold between them, each in one of both; None without a tier."""
        return min(self.slots + self.ram_places, self.expert_count) if self.has_tier else None

    def __str__(self) -> str:
        parts = []
        if self.expert_count:
            held = size(self.slots * self.slot_bytes)
            parts.append(f"{self.slots} of {self.expert_count} experts in slots ({held})")
        if self.has_tier:
            parts.append(f"{self.ram_places} in RAM ({size(self.ram_places * self.slot_bytes)})")
        parts.append(f"weights {size(self.target_bytes)}")
        if self.draft_bytes:
            parts.append(f"draft {size(self.draft_bytes)}")
        parts.append(f"KV cache {size(self.kv_bytes)} for {self.context} tokens")
        line = f"{', '.join(parts)}: {size(self.total_bytes)} on {self.device}"
        if self.token_seconds is not None:
            rate = f"experts read at {self.read_rate / 1e9:.1f} GB/s"
            line += f"; about {self.token_seconds * 1e3:.0f} ms per token before drafting ({rate})"
        return line


def parse_size(text: str | int | float, whole: int, flag: str = "--vram") -> int:
    """`20GiB`, `8G`, `512B`, `0.9` (a fraction of `whole` bytes) or a number of bytes, to bytes."""
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]?I?)(B?)\s*", text.upper())
        if match is None or match[2] == "I":
            raise UsageError(f"{flag} {text}: give a size (20GiB), a fraction (0.9) or auto")
        number, bare = float(match[1]), not (match[2] or match[3])
        size = number * _UNITS[match[2]]
        if bare and number <= 1:
            size = number * whole
        elif bare and number < 1000:
            raise _without_unit(flag, number)
    elif isinstance(text, bool) or not isinstance(text, numbers.Real):
        raise UsageError(f"{flag} {text!r:.80}: give a size (20GiB), a fraction (0.9) or auto")
    elif not isinstance(text, numbers.Integral) and 1 < text < 1000:
        raise _without_unit(flag, float(text))
    else:
        fraction = not isinstance(text, numbers.Integral) and text <= 1
        size = float(text) * whole if fraction else text
    if not 0 < size < math.inf:
        raise UsageError(f"{flag} {text}: a size above 0 is needed")
    return round(size)


def _without_unit(flag: str, number: float) -> UsageError:
    return UsageError(f"{flag} {number:g} is {number:g} bytes: add the unit, as in {number:g}GiB")


def plan_pair(
    target: ModelSize,
    draft: ModelSize | None,
    *,
    name: str,
    device: str,
    available: int,
    vram: str | int | float,
    slots: int | None,
    ctx_size: int | None,
    draft_tokens: int,
    chunk: int,
    kv_type: str,
    pinned: Literal["all", "none"] | int,
    costs: Costs,
) -> Plan:
    """The plan for options as `Engine.load` takes them; `name` is the target's, for messages.

    available: bytes the device has free; chunk: rows of the largest prefill pass; pinned: of `ram_places`.
    """
    longest = target.config.max_position_embeddings
    if ctx_size is not None and not 2 <= ctx_size <= longest:
        raise UsageError(f"--ctx-size {ctx_size}: {name} takes 2 to {longest}")
    context = ctx_size or min(longest, DEFAULT_CONTEXT)
    if vram == "auto":
        budget = int(available * (0.9 if device != "cpu" or slots is not None else 0.5))
    else:
        budget = parse_size(vram, available)
    return make_plan(
        target,
        draft,
        device=device,
        budget=budget,
        available=available,
        slots=slots,
        context=context,
        rows=max(min(chunk, context), draft_tokens + 1),
        costs=costs,
        kv_type=kv_type,
        pinned=pinned,
    )


def ram_places(
    pinned: Literal["all", "none"] | int, slots: int, expert_count: int, stride: int
) -> int:
    """How many experts are page-locked beside `slots`, where so many bytes may be; with less than all of
    them RAM is a tier, and what has no place there is read from disk."""
    if pinned == "none" or slots >= expert_count:
        return 0
    return expert_count if pinned == "all" else min(pinned // stride, expert_count)


def make_plan(
    target: ModelSize,
    draft: ModelSize | None,
    *,
    device: str,
    budget: int,
    available: int,
    slots: int | None,
    context: int,
    rows: int,
    costs: Costs,
    kv_type: str = "auto",
    pinned: Literal["all", "none"] | int = "none",
) -> Plan:
    """budget, and what is available at most, in bytes; rows: the largest pass.

    `slots` overrides what the budget would give. CapacityError if less than the minimum fits.
    """
    least = min(MIN_SLOTS, target.expert_count)
    if slots is not None and slots < least:
        raise CapacityError(f"--slots {slots}: at least {least} are needed")
    wanted = least if slots is None else min(slots, target.expert_count)
    asked = _Asked(target, draft, device, rows, context, kv_type, wanted)
    if asked.total > budget:
        free = f"free {size(asked.total - available)} on {device}"
        free += ", or use a smaller model or int4 (repack)"
        cures = " or ".join(_cures(asked, least, budget, available)) or free
        needed, usable = sizes_apart(asked.total, budget)
        raise CapacityError(
            f"{needed} are needed for {wanted} expert slots, weights, draft and caches, "
            f"{usable} may be used: {cures}"
        )
    chosen = wanted
    if slots is None and target.config.is_moe:
        chosen = min(asked.slots_in(budget), target.expert_count)
    plan = Plan(
        device=device,
        budget=budget,
        slots=chosen,
        landing_slots=asked.landing(chosen),
        expert_count=target.expert_count,
        slot_bytes=target.stride,
        target_bytes=target.dense_bytes,
        draft_bytes=asked.draft_bytes,
        kv_bytes=asked.kv_bytes,
        workspace_bytes=asked.workspace_bytes,
        reserve_bytes=asked.reserve_bytes,
        ram_places=ram_places(pinned, chosen, target.expert_count, target.stride),
        context=context,
        read_rate=costs.read_rate,
        token_seconds=None,
    )
    if not target.config.is_moe or not costs.price_a_pass:
        return plan
    speed = predict(target, None, chosen, 0, costs, plan.held)
    return replace(plan, token_seconds=speed.token_ms / 1e3)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be held at once, and its bytes."""

    target: ModelSize
    draft: ModelSize | None
    device: str
    rows: int
    context: int
    kv_type: str
    slots: int

    @property
    def models(self) -> list[ModelSize]:
        return [model for model in (self.target, self.draft) if model is not None]

    @property
    def draft_bytes(self) -> int:
        draft = self.draft
        return 0 if draft is None else draft.dense_bytes + draft.expert_count * draft.stride

    @property
    def kv_bytes(self) -> int:
        """Of both caches; the draft's ends where the draft's context does."""
        kv = _kv(self.target, self.context, self.kv_type)
        if self.draft is not None:
            longest = self.draft.config.max_position_embeddings
            kv += _kv(self.draft, min(self.context, longest), self.kv_type)
        return kv

    @property
    def workspace_bytes(self) -> int:
        work = max(_workspace(model, self.rows, self.device) for model in self.models)
        if self.device == "cpu":
            work += max(_dequantised(model, self.context, self.kv_type) for model in self.models)
        return work

    @property
    def reserve_bytes(self) -> int:
        if self.device == "cpu":
            return 0
        return RUNTIME_BYTES + int(ROUNDING * (self.target.dense_bytes + self.draft_bytes))

    @property
    def fixed(self) -> int:
        """All but the slots."""
        fixed = self.target.dense_bytes + self.draft_bytes + self.kv_bytes
        return fixed + self.workspace_bytes + self.reserve_bytes

    @property
    def total(self) -> int:
        return self.fixed + (self.slots + self.landing(self.slots)) * self.target.stride

    def landing(self, slots: int) -> int:
        """Landing slots of a GPU beside `slots`."""
        if self.device == "cpu" or slots >= self.target.expert_count:
            return 0
        return landing_slots(self.target.config.num_local_experts)

    def slots_in(self, budget: int) -> int:
        most = (budget - self.fixed) // self.target.stride
        return most - self.landing(most)

    def longest_in(self, budget: int) -> int:
        """The longest context, up to what was asked, that fits; below 2 there is none."""
        low, high = 1, self.context
        while low < high:
            middle = (low + high + 1) // 2
            fits = replace(self, context=middle).total <= budget
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def _cures(asked: _Asked, least: int, budget: int, available: int) -> list[str]:
    """Each single change that makes it fit; where there is none, the first few that do together."""
    cures = []
    fewer, coded = replace(asked, slots=least), replace(asked, kv_type="int8")
    if asked.slots > least and fewer.total <= budget:
        cures.append(f"lower --slots to {asked.slots_in(budget)}")
    if asked.total <= available:
        cures.append(f"raise --vram to {math.ceil(asked.total / 1e6) / 1000:.3f}GB")
    if asked.kv_type != "int8" and coded.total <= budget:
        cures.append("use --kv-type int8")
    if asked.draft is not None and replace(asked, draft=None).total <= budget:
        cures.append("leave out --draft")
    if (context := asked.longest_in(budget)) >= 2:
        cures.append(f"lower --ctx-size to {context}")
    if cures:
        return cures
    without = replace(asked, draft=None)
    for less in (coded, without, replace(without, kv_type="int8")):
        for few in (less, replace(less, slots=least)):
            if (context := few.longest_in(budget)) >= 2:
                return [_changes(asked, replace(few, context=context), budget)]
    return []


def _changes(asked: _Asked, less: _Asked, budget: int) -> str:
    """The difference of two, as a person would type it."""
    words = []
    if less.draft is not asked.draft:
        words.append("leave out --draft")
    if less.kv_type != asked.kv_type:
        words.append("use --kv-type int8")
    if less.slots < asked.slots:
        words.append(f"lower --slots to {min(less.slots_in(budget), asked.slots)}")
    if less.context < asked.context:
        words.append(f"lower --ctx-size to {less.context}")
    return " and ".join(words)


def _kv(size: ModelSize, context: int, kv_type: str) -> int:
    """Bytes a `KVCache` of that capacity takes; a row in int8 has a scale of two bytes."""
    c = size.config
    float_row = c.head_dim * DTYPE_BYTES[size.dtypes.dense]
    row = c.head_dim + 2 if kv_type == "int8" else float_row
    return 2 * c.num_hidden_layers * c.num_key_value_heads * row * context


def _workspace(size: ModelSize, rows: int, device: str) -> int:
    """Activations of a pass of `rows` tokens and its logits, roughly and from above."""
    c, choices = size.config, max(1, size.config.num_experts_per_tok)
    if device == "cpu":
        row = 4 * (choices * (c.intermediate_size * 3 + c.hidden_size * 2) + 8 * c.hidden_size)
    else:  # gate and up are joined where they are computed; all in the model's own floats
        row = choices * (c.intermediate_size + c.hidden_size) + 12 * c.hidden_size
        row *= DTYPE_BYTES[size.dtypes.dense]
    return rows * row + 4 * 16 * c.vocab_size


def _dequantised(size: ModelSize, context: int, kv_type: str) -> int:
    """What the largest product with codes takes on the CPU, which has no kernel for it.

    The codes are a matrix, or a layer's int8 keys and values, both of which become fp32.
    """
    c, dtypes = size.config, size.dtypes
    heads = c.num_attention_heads + 2 * c.num_key_value_heads
    rows = [(dtypes.embed, c.vocab_size), (dtypes.linear, heads * c.head_dim)]
    width = c.intermediate_size
    rows.append((dtypes.experts, width) if dtypes.experts else (dtypes.linear, 2 * width))
    most = max((n for dtype, n in rows if scheme_of(dtype) is not None), default=0)
    keys = min(context, c.max_position_embeddings) if kv_type == "int8" else 0
    layer = 2 * 4 * keys * c.num_key_value_heads * c.head_dim
    return max(most * c.hidden_size * DEQUANTISED, layer)
