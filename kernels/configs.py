"""Tile sizes of the kernels, by compute capability. A table: nothing is tuned while a user waits.

What `spmoe-lite tune` found on a card stands in `TUNED` in place of the shipped entries.

`n` weight rows by `t` token columns are one program's tile, `k` is the step of its K loop,
`stages` how many steps are in flight. Sizes are bounded by shared memory per block (8.6, 8.9,
12.0: 99 KB; 8.0: 163 KB; 9.0: 227 KB; 7.5: 64 KB) and by registers; a test compiles the entries
for each capability and checks both. The entries for 9.0 were chosen by `benchmarks/kernels.py
--sweep` on an H200, the others by arithmetic.

The bits of a row must not depend on the number of rows, so entries of one capability and dtype may
differ in everything but the kind of matrix instruction. On 9.0 that is wgmma: n is a multiple of
64 and warps of 4 in all 16-bit entries, or none would be.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from spmoe_lite.precision import Scheme

FEW, SOME = 16, 32  # decode and verify: one column tile holds all tokens; beyond is prefill

Kind = Literal["up", "down", "dense"]


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of the matrix kernels; of its n rows, "up" has half gate, half up."""

    n: int
    k: int
    t: int
    warps: int
    stages: int
    registers: int = 0  # a thread may have so many, and a few values are parked; 0: what it takes

    def options(self) -> dict[str, int]:
        """Arguments of a launch."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | {"maxnreg": self.registers} if self.registers else options


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows (tokens x heads of a group) by keys of one step of `attention_triton`; one for all T."""

    rows: int
    keys: int
    warps: int
    stages: int


_Table = dict[Kind, tuple[Tile, ...]]  # in rising order of t

# Fused multiply-add, no matrix unit: fp32 for tests and exact modes, and 7.5, for which Triton has
# neither a matrix instruction nor asynchronous copies.
_SCALAR: _Table = dict.fromkeys(
    ("up", "down", "dense"), (Tile(32, 32, 16, 4, 2), Tile(32, 32, 32, 4, 2))
)
_AMPERE: _Table = {  # 8.0, 8.6, 8.9, 12.0
    "up": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(128, 64, 64, 8, 3),
        Tile(128, 64, 128, 8, 3),
    ),
    "down": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(64, 64, 64, 4, 4),
        Tile(128, 64, 128, 8, 3),
    ),
}
_AMPERE["dense"] = _AMPERE["down"]
_HOPPER: _Table = {  # 9.0
    "up": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(256, 64, 64, 8, 4),
        Tile(256, 64, 128, 8, 3),
    ),
    "down": (
        Tile(64, 128, 16, 4, 6),
        Tile(64, 128, 32, 4, 6),
        Tile(128, 64, 64, 8, 4),
        Tile(128, 64, 128, 8, 4),
    ),
    "dense": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(128, 64, 64, 8, 4),
        Tile(128, 64, 128, 8, 4),
    ),
}


_SCALAR_CODES = (Tile(32, 128, 16, 4, 2), Tile(16, 128, 32, 4, 2))
# Quantised weights; k is a step where it divides K, else 128. At a group of 128 a step is twice as
# long and half as many are in flight.
_HOPPER_CODES: _Table = {
    "up": (
        Tile(128, 128, 16, 4, 4, 128),  # of 133: four programs on a multiprocessor, not three
        Tile(128, 128, 32, 4, 4),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 128, 128, 4, 3),
    ),
    "down": (
        Tile(128, 128, 16, 4, 4),
        Tile(128, 128, 32, 4, 3),
        Tile(128, 128, 64, 8, 3),
        Tile(128, 128, 128, 8, 4),
    ),
    "dense": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(128, 128, 64, 4, 3),
        Tile(128, 128, 128, 8, 3),
    ),
}
_AMPERE_CODES: _Table = {
    "up": (
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(64, 128, 64, 4, 2),
        Tile(128, 128, 128, 8, 2),
    ),
    "down": (  # the walk through segments needs room for two sums
        Tile(64, 128, 16, 4, 4),
        Tile(64, 128, 32, 4, 4),
        Tile(128, 128, 64, 8, 2),
        Tile(64, 128, 128, 8, 2),
    ),
}
_AMPERE_CODES["dense"] = _AMPERE_CODES["down"]


# Filled when an engine is loaded (`spmoe_lite/tune.py`), by what `shipped` is asked for.
Key = tuple[tuple[int, int], torch.dtype, Kind, "Scheme | None"]
TUNED: dict[Key, tuple[Tile, ...]] = {}


def tiles(
    capability: tuple[int, int], dtype: torch.dtype, kind: Kind, scheme: Scheme | None = None
) -> tuple[Tile, ...]:
    """Every entry for this card, dtype (of x), product and weights, the narrowest first."""
    tuned = TUNED.get((capability, dtype, kind, scheme)) if TUNED else None
    return tuned or shipped(capability, dtype, kind, scheme)


def shipped(
    capability: tuple[int, int], dtype: torch.dtype, kind: Kind, scheme: Scheme | None = None
) -> tuple[Tile, ...]:
    """The entries of the tables in this file."""
    if dtype.itemsize == 4 or capability < (8, 0):
        return _SCALAR[kind] if scheme is None else _SCALAR_CODES
    if scheme is not None:
        entries = (_HOPPER_CODES if capability[0] == 9 else _AMPERE_CODES)[kind]
        if scheme.bits == 4 and scheme.group < 128:
            return entries
        return tuple(
            replace(
                e,
                stages=max(2, e.stages // 2) if scheme.group == 128 else e.stages,
                warps=8 if e.t == 128 else e.warps,  # four would spill
                registers=0,
            )
            for e in entries
        )
    return (_HOPPER if capability[0] == 9 else _AMPERE)[kind]


def tile(
    capability: tuple[int, int],
    dtype: torch.dtype,
    kind: Kind,
    columns: int,
    scheme: Scheme | None = None,
) -> Tile:
    """The narrowest entry that holds `columns` token columns, else the widest there is."""
    entries = tiles(capability, dtype, kind, scheme)
    return next((entry for entry in entries if entry.t >= columns), entries[-1])


def attention_tile(
    capability: tuple[int, int], dtype: torch.dtype, coded: bool = False
) -> AttentionTile:
    """The tile of every attention launch on this card; coded: over int8 caches.

    On 9.0 it is tall enough for wgmma. A code that becomes a float takes registers: fewer keys then.
    """
    if dtype.itemsize == 4:
        return AttentionTile(16, 16, 8, 2) if coded else AttentionTile(16, 32, 8, 2)
    if capability < (8, 0):
        return AttentionTile(16, 32, 4, 2)
    if capability[0] == 9:
        return AttentionTile(64, 32, 4, 4) if coded else AttentionTile(64, 64, 4, 3)
    return AttentionTile(32, 64, 4, 2)


def overlap_options(capability: tuple[int, int]) -> dict[str, bool]:
    """Arguments of a launch that may begin while the kernel before it ends (`wait_for_previous` waits).

    Programmatic dependent launch, from 9.0 on: it hides what a launch costs, about 1 us of 4.
    """
    if capability[0] >= 9 and torch.version.hip is None:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's device; 8.6 for a CPU tensor under the interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 6)
