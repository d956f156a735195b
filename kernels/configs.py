"""Tile sizes of the matrix kernels, by compute capability. A table: nothing is tuned while a user waits.

`n` weight rows by `t` token columns are one program's tile, `k` is the step of its K loop, `stages` how many
steps are in flight. Sizes are bounded by shared memory per block (8.6, 8.9, 12.0: 99 KB; 8.0: 163 KB; 9.0:
227 KB; 7.5: 64 KB) and by registers; a test compiles every entry for its capability and checks both.

The bits of a row must not depend on the number of rows, so entries of one capability and dtype may differ in
everything but the kind of matrix instruction. On 9.0 that is wgmma: n is a multiple of 64 and warps of 4 in
all 16-bit entries, or none would be.
"""

from dataclasses import dataclass

import torch

FEW, SOME = 16, 32  # decode and verify: one column tile holds all tokens; beyond is prefill


@dataclass(frozen=True, slots=True)
class Tile:
    """One configuration of `expert_gemm_triton` or `linear_triton`."""

    n: int
    k: int
    t: int
    warps: int
    stages: int


# (gated, bytes per weight) -> column tile -> Tile
_Table = dict[tuple[bool, int], dict[int, Tile]]

_FP32: _Table = {  # fused multiply-add, no matrix unit: for tests and exact modes, not for speed
    (True, 4): {t: Tile(32, 32, t, 4, 2) for t in (16, 32)},
    (False, 4): {t: Tile(32, 32, t, 4, 2) for t in (16, 32)},
}

_AMPERE: _Table = _FP32 | {  # 8.0, 8.6, 8.9, 12.0
    (True, 2): {
        16: Tile(64, 64, 16, 4, 4),
        32: Tile(64, 64, 32, 4, 4),
        64: Tile(64, 64, 64, 4, 3),
        128: Tile(64, 64, 128, 8, 3),
    },
    (False, 2): {
        16: Tile(64, 128, 16, 4, 4),
        32: Tile(64, 128, 32, 4, 4),
        64: Tile(64, 64, 64, 4, 4),
        128: Tile(128, 64, 128, 8, 3),
    },
}

_HOPPER: _Table = _FP32 | {  # 9.0
    (True, 2): {
        16: Tile(64, 64, 16, 4, 4),
        32: Tile(64, 64, 32, 4, 4),
        64: Tile(128, 64, 64, 8, 4),
        128: Tile(128, 64, 128, 8, 3),
    },
    (False, 2): {
        16: Tile(64, 128, 16, 4, 4),
        32: Tile(64, 128, 32, 4, 4),
        64: Tile(128, 64, 64, 8, 4),
        128: Tile(128, 64, 128, 8, 4),
    },
}

_TURING: _Table = _FP32 | {  # 7.5: Triton has no matrix instruction and no asynchronous copy for it
    (gated, 2): {t: Tile(32, 32, t, 4, 2) for t in (16, 32)} for gated in (True, False)
}


@dataclass(frozen=True, slots=True)
class AttentionTile:
    """Rows (tokens x heads of a group) by keys of one step of `attention_triton`; one for all T."""

    rows: int
    keys: int
    warps: int
    stages: int


def attention_tile(capability: tuple[int, int], dtype: torch.dtype) -> AttentionTile:
    """The tile of every attention launch on this card. On 9.0 it is tall enough for wgmma."""
    if dtype.itemsize == 4:
        return AttentionTile(16, 32, 8, 2)
    if capability < (8, 0):
        return AttentionTile(16, 32, 4, 2)
    return AttentionTile(64, 64, 4, 2) if capability[0] == 9 else AttentionTile(32, 64, 4, 2)


def tile(capability: tuple[int, int], dtype: torch.dtype, gated: bool, columns: int) -> Tile:
    """The entry for `columns` token columns: the narrowest that holds them, else the widest there is."""
    if capability < (8, 0):
        table = _TURING
    else:
        table = _HOPPER if capability[0] == 9 else _AMPERE
    by_columns = table[gated, dtype.itemsize]
    return by_columns[min((t for t in by_columns if t >= columns), default=max(by_columns))]


def all_tiles(capability: tuple[int, int], dtype: torch.dtype, gated: bool) -> list[Tile]:
    """Every entry that `tile` can answer with, for the test that compiles them all."""
    wanted = {tile(capability, dtype, gated, columns) for columns in (1, 32, 64, 128)}
    return sorted(wanted, key=lambda entry: entry.t)


def capability_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Compute capability of the tensor's device; 8.6 for a CPU tensor under Triton's interpreter."""
    return torch.cuda.get_device_capability(tensor.device) if tensor.is_cuda else (8, 6)
