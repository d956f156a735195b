"""Quantised matrices: 8 or 4 bits a weight, a scale for each group of columns, perhaps a zero.

    w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n]          g = k // group

The bytes lie as the kernels read them: for each block of 64 columns one run of 32 bytes (4 bits) or
64 (8 bits) per row, all rows of a block next to each other, so that a tile of rows is one contiguous
piece whatever its height. A run is W = 16 or 32 little-endian words of 16 bits; part i of word j (a
nibble or a byte, the lowest first) is column W i + j of the block. So part i of all words is W
adjacent columns in order, whole steps of a matrix instruction: nothing is shuffled.

    codes  uint8 [K / 64, N, 32 or 64]
    scales int16 [K / group / 2, N, 2]     a 32-bit word holds two groups of a row

A scale is the 16 bits of an fp16. Where groups have zeros, the scale has 8 significant bits, which is
what a kernel that computes in bf16 would keep of it, and the zero lies in the 4 bits this leaves free:
its low three bits in the low three bits of the word, its highest in the place of the sign.

K is rounded up to whole blocks, and further to whole pairs of groups; what is there counts for nothing.
Where a kernel computes in bf16 the scale is rounded to bf16 and so is the product; the codes less
their zero are exact in every float dtype.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spmoe_lite.errors import DamagedError, UnsupportedError

if TYPE_CHECKING:
    from spmoe_lite.config import Scheme

_TILE = 1 << 15  # weights in work at once: they stay in cache, and torch starts no threads for them


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """One matrix [rows, columns] in a scheme; the module's docstring has the two tensors."""

    scheme: Scheme
    columns: int
    codes: torch.Tensor
    scales: torch.Tensor

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
        """codes and scales."""
        return [self.codes, self.scales]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """[rows, columns] in a float dtype, scale and product rounded to it as in the kernels."""
        return self.rows_of(slice(None), dtype)

    def rows_of(self, rows: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same of some rows, by slice or by index [R] -> [R, columns]."""
        scheme = self.scheme
        scales, zeros = unpack_scales(self.scales[:, rows], scheme)
        values = unpack_codes(self.codes[:, rows], scheme).float()  # [R, K']
        count, padded = values.shape
        wide = len(scales) * scheme.group
        if wide > padded:
            values = torch.nn.functional.pad(values, (0, wide - padded))
        grouped = values.view(count, -1, scheme.group)
        grouped -= zeros.t()[:, :, None]
        grouped *= scales.to(dtype).float().t()[:, :, None]
        return values[:, : self.columns].to(dtype)


def quantize(
    weights: torch.Tensor, scheme: Scheme, *, name: str = "the matrix", threads: int | None = None
) -> QuantizedMatrix:
    """[rows, columns] in any float dtype -> the matrix in `scheme`; `name` is for the messages.

    The bits of a row depend on that row alone. Raises `DamagedError` for a weight that is not
    finite, `UnsupportedError` for columns that are not whole groups or a scale beyond fp16.
    """
    rows, columns = weights.shape
    if columns % scheme.group:
        fitting = [str(group) for group in (32, 64, 128) if columns % group == 0]
        instead = f"use a group of {' or '.join(fitting)}" if fitting else "keep it in floats"
        raise UnsupportedError(
            f"{name} has {columns} columns, not a multiple of the group of {scheme.group}; {instead}"
        )
    sizes = scheme.parts(rows, columns)
    matrix = view_matrix(torch.empty(sum(sizes), dtype=torch.uint8), scheme, rows, columns)
    wide = min(512, columns + columns % scheme.block)
    high = _TILE // wide
    tiles = [(r, k) for r in range(0, rows, high) for k in range(0, columns, wide)]

    def work(tile: tuple[int, int]) -> None:
        row, column = tile
        part = weights[row : row + high, column : column + wide].float()
        if padding := part.shape[1] % scheme.block:
            part = torch.nn.functional.pad(part, (0, scheme.block - padding))
        _quantize_tile(part, matrix, row, column, name)

    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for _ in pool.map(work, tiles):
            pass
    return matrix


def _quantize_tile(
    part: torch.Tensor, matrix: QuantizedMatrix, row: int, column: int, name: str
) -> None:
    """Quantise `part` [R, C], whole blocks and groups, into the place of its first weight."""
    scheme = matrix.scheme
    grouped = part.t().reshape(-1, scheme.group, len(part))  # [groups, group, R]
    most, least = grouped.amax(1).clamp_(min=0), grouped.amin(1).clamp_(max=0)
    if not (most - least).isfinite().all():
        raise DamagedError(f"{name} has weights that are not finite numbers")
    if not scheme.zeros:
        middle = scheme.middle
        scale = _storable(torch.maximum(most, -least) / (middle - 1), scheme)
        zero = torch.full_like(scale, middle)
    else:
        scale = _storable((most - least) / 15, scheme)
        zero = (-least / scale).round_().clamp_(0, 15)
    if scale.isinf().any():
        raise UnsupportedError(
            f"{name} has weights up to {part.abs().max():.3g}, too large for {scheme}; "
            f"keep it in floats"
        )
    top = 2 * scheme.middle - 1
    codes = (grouped / scale[:, None]).round_().add_(zero[:, None]).clamp_(0, top)
    rows = slice(row, row + len(part))
    block, group = column // scheme.block, column // scheme.group
    packed = pack_codes(codes.view(-1, len(part)).t().to(torch.uint8).contiguous(), scheme)
    matrix.codes[block : block + len(packed), rows] = packed
    pairs = pack_scales(scale, zero, scheme)
    matrix.scales[group // 2 : group // 2 + len(pairs), rows] = pairs


def _storable(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The nearest scales that the scheme holds and bf16 too, in fp32; infinite beyond fp16."""
    least = 2.0**-21 if scheme.zeros else 2.0**-24  # the smallest fp16 with the bits that are left
    near = scale.bfloat16().float()
    subnormal = (near / least).round_().clamp_(min=1) * least
    return torch.where(near < 2.0**-14, subnormal, near).half().float()


def view_matrix(run: torch.Tensor, scheme: Scheme, rows: int, columns: int) -> QuantizedMatrix:
    """uint8 [sum(scheme.parts(rows, columns))] as a matrix; nothing is copied."""
    codes, scales = run.split(scheme.parts(rows, columns))
    words = scales.view(torch.int16).view(-1, rows, 2)
    return QuantizedMatrix(scheme, columns, codes.view(-1, rows, scheme.run), words)


def pack_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """codes [rows, K'] uint8, K' a multiple of 64 -> [K' / 64, rows, run] uint8."""
    rows = len(codes)
    parts = 16 // scheme.bits
    words = codes.view(rows, -1, parts, scheme.block // parts)  # [rows, block, part, word]
    if scheme.bits == 4:
        words = words[:, :, 0::2] | words[:, :, 1::2] << 4  # [rows, block, byte, word]
    return words.permute(1, 0, 3, 2).reshape(-1, rows, scheme.run)


def unpack_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Inverse of `pack_codes`: [blocks, rows, run] uint8 -> [rows, blocks * 64] uint8."""
    blocks, rows, run = codes.shape
    parts = codes.view(blocks, rows, run // 2, 2).permute(1, 0, 3, 2)  # [rows, block, byte, word]
    if scheme.bits == 4:
        parts = torch.stack((parts & 15, parts >> 4), dim=3)  # [rows, block, byte, nibble, word]
    return parts.reshape(rows, -1)


def pack_scales(scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """scales [groups, rows] float, zeros [groups, rows] 0 to 15 -> int16 [groups / 2, rows, 2].

    Where the scheme has no zeros they are not looked at; where it has, the scales must have 8
    significant bits (multiples of 2^-21 below 2^-14).
    """
    words = scales.half().view(torch.int16)
    if scheme.zeros:
        zero = zeros.to(torch.int16)
        words = words | zero & 7 | (zero & 8) << 12
    if len(words) % 2:
        words = torch.cat((words, torch.zeros_like(words[:1])))
    return words.view(-1, 2, words.shape[1]).transpose(1, 2).contiguous()


def unpack_scales(words: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of `pack_scales`: -> scales [groups, rows] fp32, zeros [groups, rows] fp32.

    The number of groups is even; a last one that the matrix has not is 0.
    """
    words = words.transpose(1, 2).reshape(-1, words.shape[1])
    if not scheme.zeros:
        scales = words.view(torch.float16).float()
        return scales, torch.full_like(scales, scheme.middle)
    zeros = words & 7 | words >> 12 & 8
    return (words & 0x7FF8).view(torch.float16).float(), zeros.float()
