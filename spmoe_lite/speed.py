"""How long a token takes: with a draft, without one, for a number of slots. Arithmetic, no clock.

A step drafts K tokens, verifies T = K + 1 positions in one pass and writes E[T] tokens on average:

    E[T]        = (1 - a^T) / (1 - a)         at acceptance a (Leviathan et al. 2023, arXiv 2211.17192, eq. 1)
    ms / token  = (K t_draft + t_pass(T) + copies t_copy - hidden) / E[T]
    copies      = layers x `expected_copies` of T tokens: an LRU in each layer, uniform routing; times the
                  miss ratio that `profile` has seen; at least those that one token needs beyond the slots
    from disk   = the same with as many slots as slots and RAM hold experts between them. Such a copy goes
                  at the slower of both rates: its parts are sent on as they come
    hidden      = the copies ahead that `cutoff_layer` allows and drafting has time for, times the chance that
                  who left for them is not wanted by the positions whose drafts came later

Times are those of a `Profile` where it has them, else the bytes a pass reads over the rate at which the
device reads them; where only passes of one row were timed, one of more is longer by the bytes it reads more.
Uniform routing is the hard case: where texts prefer some experts, less is missed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from spmoe_lite.cutoff import Profile, cutoff_layer, expected_copies

if TYPE_CHECKING:
    from spmoe_lite.plan import ModelSize


@dataclass(frozen=True, slots=True)
class Costs:
    """What the parts of a step cost; seconds and rates in bytes per second."""

    read_rate: float  # of a missing expert
    product_rates: Mapping[str, float]  # of weights in a single-row product, by dtype
    profile: Profile | None = None  # measured on this machine for these packs
    acceptance: float = 0.0
    layers_ahead: int = 0  # that copies ahead of need may reach
    disk_rate: float = math.inf  # of a missing expert that has no place in RAM, where RAM is a tier

    @property
    def price_a_pass(self) -> bool:
        """Whether anything says what a pass takes."""
        profiled = self.profile is not None and self.profile.plain_layer_ms is not None
        return profiled or bool(self.product_rates)


@dataclass(frozen=True, slots=True)
class Speed:
    """One step, in milliseconds, and what it gives."""

    draft_tokens: int
    slots: int
    drafting_ms: float
    pass_ms: float
    copies: float  # experts that the pass misses
    disk_copies: float  # of them, those that are read from disk
    copy_ms: float  # of all of them
    hidden_ms: float  # of it, done while drafting
    tokens: float  # written by a step

    @property
    def step_ms(self) -> float:
        return self.drafting_ms + self.pass_ms + self.copy_ms - self.hidden_ms

    @property
    def token_ms(self) -> float:
        return self.step_ms / self.tokens

    @property
    def disk_share(self) -> float:
        """Of the experts that a pass misses."""
        return self.disk_copies / self.copies if self.copies else 0.0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"disk_share": self.disk_share, "token_ms": self.token_ms}


def predict(
    target: ModelSize,
    draft: ModelSize | None,
    slots: int,
    draft_tokens: int,
    costs: Costs,
    held: int | None = None,
) -> Speed:
    """A step of `target` with `slots` of its experts in slots, and `draft_tokens` drafts.

    held: experts that slots and RAM hold between them, the others are read from disk; None: all.
    """
    c, profile = target.config, costs.profile
    drafts = draft_tokens if draft is not None else 0
    rows, layers, experts = drafts + 1, c.num_hidden_layers, c.num_local_experts
    resident = slots / target.expert_count if target.expert_count else 1.0
    copy_ms = target.stride / costs.read_rate * 1e3
    if profile is not None and profile.plain_layer_ms is not None:
        pass_ms = layers * _layer_ms(profile, rows)
        if rows > 1 and not times_drafts(profile):
            alone = read_seconds(target, 1, costs.product_rates)
            pass_ms *= read_seconds(target, rows, costs.product_rates) / alone
    else:
        pass_ms = read_seconds(target, rows, costs.product_rates) * 1e3
    token_ms = 0.0
    if drafts and draft is not None:
        if profile is not None and profile.draft_token_ms:
            token_ms = profile.draft_token_ms
        else:
            token_ms = read_seconds(draft, 1, costs.product_rates) * 1e3
    copies = disk_copies = hidden = 0.0
    if experts and resident < 1:
        k, ratio = c.num_experts_per_tok, 1.0
        if profile is not None and profile.miss_ratio is not None:
            ratio = profile.miss_ratio

        def missed(have: int) -> float:
            share = min(1.0, have / target.expert_count)
            found = layers * expected_copies(experts, k, rows, share) * ratio
            return max(found, layers * k - have, 0.0)

        copies = missed(slots)
        if held is not None:
            disk_copies = missed(held)
            slower = target.stride / min(costs.read_rate, costs.disk_rate) * 1e3 - copy_ms
            copy_ms += slower * disk_copies / copies if copies else 0.0
        ahead = expected_copies(experts, k, drafts, resident) * ratio
        times = Profile(copy_ms, token_ms, pass_ms / layers)
        reach = cutoff_layer(
            times,
            num_layers=min(layers, costs.layers_ahead),
            num_draft_tokens=drafts,
            copies_per_layer=ahead,
            free_slots=slots,
        )
        if reach:
            spared = sum((1 - k / experts) ** (rows - i) for i in range(1, drafts + 1)) / drafts
            hidden = min(reach * ahead * copy_ms, drafts * token_ms) * spared
    return Speed(
        draft_tokens=drafts,
        slots=slots,
        drafting_ms=drafts * token_ms,
        pass_ms=pass_ms,
        copies=copies,
        disk_copies=disk_copies,
        copy_ms=copies * copy_ms,
        hidden_ms=hidden,
        tokens=1 + mean_accepted(costs.acceptance, drafts),
    )


def read_seconds(model: ModelSize, rows: int, product_rates: Mapping[str, float]) -> float:
    """Seconds to read the weights that a pass of `rows` tokens multiplies, all of them on the device."""
    c = model.config
    read: list[tuple[str, float]] = list(model.dense.items())
    if c.is_moe:
        union = expected_copies(c.num_local_experts, c.num_experts_per_tok, rows, 0.0)
        read.append((model.dtypes.experts or "", union * c.num_hidden_layers * model.stride))
    return sum(count / product_rates[dtype] for dtype, count in read)


def mean_accepted(acceptance: float, most: int) -> float:
    """Draft tokens kept of `most`, on average: a + a^2 + ... ."""
    return sum(acceptance**i for i in range(1, most + 1))


def acceptance(mean: float, most: int) -> float:
    """The per-token acceptance at which `mean` of `most` draft tokens are kept; by bisection."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if mean_accepted(middle, most) < mean else (low, middle)
    return (low + high) / 2


def times_drafts(profile: Profile) -> bool:
    """Whether a pass that checks drafts was timed; `profile` without a draft times single rows."""
    return (profile.verify_rows or 0) > 1


def _layer_ms(profile: Profile, rows: int) -> float:
    """Of a pass of `rows`, on the line through the two that were measured; of one row where only it was."""
    plain, verify = profile.plain_layer_ms, profile.target_layer_ms
    assert plain is not None
    if rows == 1 or not times_drafts(profile):
        return plain
    assert profile.verify_rows is not None
    return plain + max(0.0, verify - plain) * (rows - 1) / (profile.verify_rows - 1)
