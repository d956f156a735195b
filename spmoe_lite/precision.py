"""How weights are stored: float dtypes, quantisation schemes, and where an expert's matrices lie.

Dtypes are strings ("fp32", "bf16", "fp16", "int4-g64z"), so that a pack's header is understood without
torch. What the codes of a scheme mean is in `quant.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from spmoe_lite.errors import UnsupportedError

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
GROUPS = (32, 64, 128)  # columns of a quantised matrix that may share a scale


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a quantised matrix [N, K] is stored: value = (code - zero) * scale.

    `bits` (4 or 8) per code; `group` columns of a row share a scale of 16 bits. With `zeros` each
    group has a 4-bit zero of its own inside them; without, the zero is the middle of the range, 8
    or 128. As text: "int8-g64", "int4-g32", "int4-g64z". `quant.py` has the order of the bytes.
    """

    bits: int
    group: int
    zeros: bool = False

    block: ClassVar[int] = 64  # columns whose codes lie together; K is rounded up to it

    def __post_init__(self) -> None:
        if self.bits not in (4, 8) or self.group not in GROUPS or (self.zeros and self.bits != 4):
            raise UnsupportedError(f"no quantisation scheme {self}")

    def __str__(self) -> str:
        return f"int{self.bits}-g{self.group}{'z' * self.zeros}"

    @property
    def run(self) -> int:
        """Bytes of codes of one row in one block of 64 columns."""
        return 8 * self.bits

    @property
    def middle(self) -> int:
        """The zero of a group that has none of its own."""
        return 1 << (self.bits - 1)

    def parts(self, rows: int, columns: int) -> tuple[int, int]:
        """Bytes of the codes and of the scales (with the zeros) of a matrix [rows, columns]."""
        blocks = -(-columns // self.block)
        groups = -(-blocks * self.block // self.group)
        return blocks * rows * self.run, -(-groups // 2) * rows * 4


def scheme_of(dtype: str) -> Scheme | None:
    """The scheme a dtype string names; None for a float dtype, `UnsupportedError` for neither."""
    if dtype in DTYPE_BYTES:
        return None
    found = re.fullmatch(r"int([48])-g(32|64|128)(z?)", dtype)
    if found is None:
        raise UnsupportedError(f"dtype {dtype!r:.40} is not supported")
    return Scheme(int(found[1]), int(found[2]), bool(found[3]))


def matrix_bytes(dtype: str, rows: int, columns: int) -> int:
    """Bytes of one matrix [rows, columns] in any dtype, floats or quantised, without padding."""
    scheme = scheme_of(dtype)
    if scheme is None:
        return rows * columns * DTYPE_BYTES[dtype]
    return sum(scheme.parts(rows, columns))


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """Where the three matrices of one expert lie inside its run of `stride` bytes.

    gate and up are [intermediate_size, hidden_size], down is [hidden_size, intermediate_size],
    `y = x @ W.T`; floats are row-major, a quantised matrix is its codes and its scales one after
    the other (`Scheme.parts`). Offsets are bytes from the start of the expert to a matrix.
    """

    dtype: str
    hidden_size: int
    intermediate_size: int
    gate_offset: int
    up_offset: int
    down_offset: int
    stride: int
