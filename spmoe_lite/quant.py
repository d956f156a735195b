"""Quantised matrices: 8 or 4 bits a weight, a scale for each group of columns, perhaps a zero.

    w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n]          g = k // group

The bytes lie as the kernels read them: for each block of columns (64 at 4 bits, 32 at 8) one run of
32 bytes per row, all rows of a block next to each other, so that a tile of rows is one contiguous
piece whatever its height. A run is 16 little-endian words of 16 bits; part i of word j (a nibble or
a byte, the lowest first) is column 16 i + j of the block. Taking part i of every word thus gives 16
adjacent columns in order, which is one step of a matrix instruction: nothing is shuffled.

    codes  uint8 [K / block, N, 32]
    scales fp16  [K / group, N]
    zeros  uint8 [K / group / 2, N]     the zero of groups 2 i (low nibble) and 2 i + 1

K is rounded up to whole blocks, and further to whole groups; the codes there are zeros of their group.
Where a kernel computes in bf16 the scale is rounded to bf16 and so is the product; the codes less
their zero are exact in every float dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from spmoe_lite.config import Scheme


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix [rows, columns] in a scheme; the module's docstring has the three tensors."""

    scheme: Scheme
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[1], self.columns

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        """codes, scales, and zeros where there are any."""
        return [part for part in (self.codes, self.scales, self.zeros) if part is not None]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns] in a float dtype, scale and product rounded to it as in the kernels."""
        return self.rows_of(slice(None), dtype)

    def rows_of(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same of some rows, by slice or by index [R] -> [R, columns]."""
        scheme, scales = self.scheme, self.scales[:, rows].to(dtype).float()
        values = unpack_codes(self.codes[:, rows], scheme).float()  # [R, K']
        count, padded = values.shape
        wide = len(scales) * scheme.group
        if wide > padded:
            values = torch.nn.functional.pad(values, (0, wide - padded))
        grouped = values.view(count, -1, scheme.group)
        if self.zeros is None:
            grouped -= scheme.middle
        else:
            grouped -= unpack_zeros(self.zeros[:, rows], len(scales)).t()[:, :, None]
        grouped *= scales.t()[:, :, None]
        return values[:, : self.columns].to(dtype)


def view_matrix(run: torch.Tensor, scheme: Scheme, rows: int, columns: int) -> QuantizedMatrix:
    """uint8 [sum(scheme.parts(rows, columns))] as a matrix; nothing is copied."""
    sizes = scheme.parts(rows, columns)
    codes, scales, zeros = run.split(sizes)
    return QuantizedMatrix(
        scheme,
        columns,
        codes.view(-1, rows, 32),
        scales.view(torch.float16).view(-1, rows),
        zeros.view(-1, rows) if scheme.zeros else None,
    )


def pack_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """codes [rows, K'] uint8, K' a multiple of the block -> [K' / block, rows, 32] uint8."""
    rows = len(codes)
    words = codes.view(rows, -1, 16 // scheme.bits, 16)  # [rows, block, part, word]
    if scheme.bits == 8:
        packed = words.transpose(2, 3)  # [rows, block, word, byte]
    else:
        low, high = words[:, :, 0::2], words[:, :, 1::2]
        packed = (low | high << 4).transpose(2, 3)
    return packed.reshape(rows, -1, 32).transpose(0, 1).contiguous()


def unpack_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Inverse of `pack_codes`: [blocks, rows, 32] uint8 -> [rows, blocks * block] uint8."""
    blocks, rows, _ = codes.shape
    parts = codes.view(blocks, rows, 16, 2).permute(1, 0, 3, 2)  # [rows, block, byte, word]
    if scheme.bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=3)  # [rows, block, byte, nibble, word]
    return parts.reshape(rows, -1)


def pack_zeros(zeros: torch.Tensor) -> torch.Tensor:
    """zeros [groups, rows] uint8, 0 to 15 -> [ceil(groups / 2), rows] uint8."""
    if len(zeros) % 2:
        zeros = torch.cat((zeros, torch.zeros_like(zeros[:1])))
    return zeros[0::2] | zeros[1::2] << 4


def unpack_zeros(zeros: torch.Tensor, groups: int) -> torch.Tensor:
    """Inverse of `pack_zeros`: -> [groups, rows] uint8."""
    return torch.stack((zeros & 15, zeros >> 4), dim=1).view(-1, zeros.shape[1])[:groups]
