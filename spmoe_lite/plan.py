"""The memory plan: what goes where, decided and printed before anything is loaded.

    slots = (budget - target weights - draft - both KV caches - workspace) / bytes of an expert

Pure arithmetic on pack headers. A plan that cannot fit is refused with the smallest change that would.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from spmoe_lite.config import DTYPE_BYTES, ModelConfig, scheme_of
from spmoe_lite.errors import CapacityError, UsageError
from spmoe_lite.progress import size

if TYPE_CHECKING:
    from spmoe_lite.manifest import Dtypes

MIN_SLOTS = 2
KV_TYPES = ("auto", "int8")  # of KV caches; auto is the float of the model's activations
DEQUANTISED = 8  # bytes a weight that the CPU dequantises for one product; measured: 6.3
_UNITS = {"": 1, "B": 1, "K": 1e3, "M": 1e6, "G": 1e9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What of a pack matters for the plan; all of it stands in the headers."""

    config: ModelConfig
    dtypes: Dtypes
    dense: Mapping[str, int]  # bytes by dtype
    stride: int  # bytes of one expert, 0 for a dense model

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
    expert_count: int
    slot_bytes: int
    target_bytes: int
    draft_bytes: int
    kv_bytes: int
    workspace_bytes: int
    context: int
    read_rate: float  # bytes per second, pack to host
    token_seconds: float | None  # estimate without drafting

    @property
    def total_bytes(self) -> int:
        fixed = self.target_bytes + self.draft_bytes + self.kv_bytes + self.workspace_bytes
        return fixed + self.slots * self.slot_bytes

    def __str__(self) -> str:
        parts = []
        if self.expert_count:
            held = size(self.slots * self.slot_bytes)
            parts.append(f"{self.slots} of {self.expert_count} experts in slots ({held})")
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
    """`20GiB`, `8G`, `0.9` (a fraction of `whole` bytes) or a number of bytes, to bytes."""
    if isinstance(text, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([KMG]?I?)B?\s*", text.upper())
        if match is None or match[2] == "I":
            raise UsageError(f"{flag} {text}: give a size (20GiB), a fraction (0.9) or auto")
        number, unit = float(match[1]), match[2]
        size = number * _UNITS[unit]
        if not unit and number <= 1:
            size = number * whole
        elif not unit and number < 1000:
            raise _without_unit(flag, number)
    elif isinstance(text, bool) or not isinstance(text, numbers.Real):
        raise UsageError(f"{flag} {text!r:.80}: give a size (20GiB), a fraction (0.9) or auto")
    elif isinstance(text, float) and 1 < text < 1000:
        raise _without_unit(flag, text)
    else:
        size = text * whole if isinstance(text, float) and text <= 1 else text
    if not 0 < size < math.inf:
        raise UsageError(f"{flag} {text}: a size above 0 is needed")
    return round(size)


def _without_unit(flag: str, number: float) -> UsageError:
    return UsageError(f"{flag} {number:g} is {number:g} bytes: add the unit, as in {number:g}GiB")


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
    read_rate: float,
    product_rates: Mapping[str, float],
    kv_type: str = "auto",
) -> Plan:
    """budget, and what is available at most, in bytes; rows: the largest pass.

    Rates are bytes per second: from the pack, and by dtype of the weights of a single-row product.

    `slots` overrides what the budget would give. CapacityError if less than the minimum fits.
    """
    kv, kv_row = _kv(target, context, kv_type), _kv(target, 1, kv_type)
    draft_bytes = draft_kv = 0
    if draft is not None:
        longest = draft.config.max_position_embeddings
        draft_kv = _kv(draft, min(context, longest), kv_type)
        draft_bytes = draft.dense_bytes + draft.expert_count * draft.stride
        kv += draft_kv
        kv_row += _kv(draft, 1, kv_type) if context <= longest else 0
    models = [model for model in (target, draft) if model is not None]
    work = max(_workspace(model, rows) for model in models)
    if device == "cpu":
        work += max(_dequantised(model, context, kv_type) for model in models)
    fixed = target.dense_bytes + draft_bytes + kv + work
    least = min(MIN_SLOTS, target.expert_count)
    if slots is not None and slots < least:
        raise CapacityError(f"--slots {slots}: at least {least} are needed")
    wanted = least if slots is None else min(slots, target.expert_count)
    needed = fixed + wanted * target.stride
    if needed > budget:
        cures, missing = [], needed - budget
        if wanted > least and fixed + least * target.stride <= budget:
            cures.append(f"lower --slots to {(budget - fixed) // target.stride}")
        if needed <= available:
            cures.append(f"raise --vram to {math.ceil(needed / 1e7) / 100:.2f}GB")
        if missing <= draft_bytes + draft_kv:
            cures.append("leave out --draft")
        if (shorter := context - math.ceil(missing / kv_row)) >= 2:
            cures.append(f"lower --ctx-size to {shorter}")
        free = (
            f"free {size(needed - available)} on {device}, or use a smaller model or int4 (repack)"
        )
        raise CapacityError(
            f"{size(needed)} are needed for {wanted} expert slots, weights, draft and caches, "
            f"{size(budget)} may be used: {' or '.join(cures) or free}"
        )
    chosen = wanted
    if slots is None and target.config.is_moe:
        chosen = min((budget - fixed) // target.stride, target.expert_count)
    seconds = None
    if target.config.is_moe:
        active = target.config.num_experts_per_tok * target.config.num_hidden_layers * target.stride
        misses = 1 - chosen / target.expert_count
        read = [*target.dense.items(), (target.dtypes.experts or "", active)]
        seconds = sum(count / product_rates[dtype] for dtype, count in read)
        seconds += misses * active / read_rate
    return Plan(
        device=device,
        budget=budget,
        slots=chosen,
        expert_count=target.expert_count,
        slot_bytes=target.stride,
        target_bytes=target.dense_bytes,
        draft_bytes=draft_bytes,
        kv_bytes=kv,
        workspace_bytes=work,
        context=context,
        read_rate=read_rate,
        token_seconds=seconds,
    )


def _kv(size: ModelSize, context: int, kv_type: str) -> int:
    """Bytes a `KVCache` of that capacity takes; a row in int8 has a scale of two bytes."""
    c = size.config
    float_row = c.head_dim * DTYPE_BYTES[size.dtypes.dense]
    row = c.head_dim + 2 if kv_type == "int8" else float_row
    return 2 * c.num_hidden_layers * c.num_key_value_heads * row * context


def _workspace(size: ModelSize, rows: int) -> int:
    """Activations of a pass of `rows` tokens and its logits, roughly and from above."""
    c = size.config
    widest = max(1, c.num_experts_per_tok) * (c.intermediate_size * 3 + c.hidden_size * 2)
    return 4 * rows * (widest + 8 * c.hidden_size) + 4 * 16 * c.vocab_size


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
