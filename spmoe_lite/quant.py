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
Where a kernel computes in bf16 the scale is rounded to bf16, and a weight is one multiplication and
addition, code scale - zero scale, of which the latter is rounded before, to 8 significant bits: at
most scale / 16 beside the scale / 2 that a code may be off, and nothing where the zero is a power of 2.

`quantize` looks for the smallest squared error of each group. At 4 bits it tries sixteen pairs of scale
and zero: scales by which the group just fits, wider ones, and narrower ones that clip its ends. What a
try makes of a weight w, y, depends on nothing but where w lies between the codes of the scale that just
fits, and on the zero. So y (2 w - y), by which the try lessens w^2, and y^2 stand in a table, for each
try, zero and 64th of a code; one lookup for each weight, summed over the group, weighs all tries at
once (`embedding_bag`). The largest gain G wins, and w.y / y.y = (G / y.y + 1) / 2 fits its scale to its
codes. The scale is rounded to what is stored and to 8 significant bits, and the codes are taken last.
Without zeros the extreme of a group, whatever its sign, is put near -8: such scales may be negative.
At 8 bits the largest weight is 127 and nothing is tried. Operations are elementwise or within a group
and use torch's threads. Figures: benchmarks/quant.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch

from spmoe_lite.errors import DamagedError, UnsupportedError

if TYPE_CHECKING:
    from spmoe_lite.precision import Scheme

_TILE = 1 << 19  # weights in work at once for each of up to eight threads
_TINY = 2.0**-24
# What is tried, 16 of each: a scale over the one that just fits, and a step beside its zero.
_WITH_ZEROS = [(share / 100, 0) for share in range(104, 84, -2)]
_WITH_ZEROS += [(share / 100, step) for share in (96, 92, 88) for step in (-1, 1)]
_WITHOUT_ZEROS = [(8 / (7 + fifth / 5), 0) for fifth in range(16)]
_FIRST, _LAST, _FINE = -1, 17, 64  # the table is of weights from code -1 to 17, in 64ths


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
        scales = scales.to(dtype).float()
        if dtype == torch.bfloat16:
            grouped *= scales.t()[:, :, None]
            grouped -= (zeros * scales).bfloat16().float().t()[:, :, None]
        else:
            grouped -= zeros.t()[:, :, None]
            grouped *= scales.t()[:, :, None]
        return values[:, : self.columns].to(dtype)


def quantize(weights: torch.Tensor, scheme: Scheme, *, name: str = "the matrix") -> QuantizedMatrix:
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
    padded = columns + -columns % scheme.block
    step = max(1, min(rows, _TILE * min(torch.get_num_threads(), 8) // padded))
    tile = torch.zeros(step, padded, dtype=torch.float32)  # the padding stays 0
    work = torch.empty_like(tile)
    for row in range(0, rows, step):
        count = min(step, rows - row)
        some = slice(row, row + count)
        tile[:count, :columns] = weights[some]
        matrix.codes[:, some], matrix.scales[:, some] = _quantize_tile(
            tile[:count], work[:count], scheme, name
        )
    return matrix


def _quantize_tile(
    tile: torch.Tensor, work: torch.Tensor, scheme: Scheme, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, whole blocks and groups] fp32 -> its codes and scales, packed; `work` is overwritten."""
    groups, work = tile.view(-1, scheme.group), work.view(-1, scheme.group)
    most, least = groups.amax(1, True), groups.amin(1, True)
    reach = float(torch.maximum(most, -least).max())
    if not math.isfinite(reach):
        raise DamagedError(f"{name} has weights that are not finite numbers; fetch it again")
    fits = reach < 2**24
    if fits:
        scale, zero = _fit(groups, most.clamp_(min=0), least.clamp_(max=0), work, scheme)
        fits = math.isfinite(float(scale.sum()))
    if not fits:
        raise UnsupportedError(
            f"{name} has weights up to {reach:.3g}, too large for {scheme}; keep it in floats"
        )
    codes = torch.mul(groups, 1 / scale, out=work).round_().add_(zero)
    codes.clamp_(0, 2 * scheme.middle - 1)
    scales, zeros = (each.view(len(tile), -1).t() for each in (scale, zero))
    return pack_codes(codes.view(tile.shape), scheme), pack_scales(scales, zeros, scheme)


def _fit(
    groups: torch.Tensor,
    most: torch.Tensor,
    least: torch.Tensor,
    work: torch.Tensor,
    scheme: Scheme,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale, as it is stored, and the zero [G, 1] of each group [G, group]; see the module."""
    if scheme.zeros:
        scale = (most - least).clamp_(min=_TINY) / 15
        zero = (7.5 - (most + least) / (2 * scale)).round_().clamp_(0, 15)
    else:
        # Signs of zeros depend on vector widths in `maximum`, so on the company: none is let through.
        scale = torch.maximum(most, -least).abs_() / (127 if scheme.bits == 8 else 8)
        zero = torch.full_like(scale, scheme.middle)
        if scheme.bits == 8:
            return _storable(scale, scheme), zero
        scale = scale.clamp_(min=_TINY / 8).copysign_(0 - most - least)  # the extreme is at -8
    table, tries = _table(scheme.zeros)
    origin = zero * ((_LAST - _FIRST + 1) * _FINE) + (0.5 - _FIRST * _FINE)  # the place of a 0
    torch.mul(groups, _FINE / scale, out=work).add_(origin)
    places = work.view(torch.int32).copy_(work)  # in place
    sums = torch.nn.functional.embedding_bag(places, table, mode="sum")
    gains, squares = sums.chunk(2, 1)  # [G, 16] each
    # Each gain's last bits give way to its number, and the largest tells both: `max` over so few takes
    # three times as long. As integers, in the order of floats that are not negative.
    numbers = torch.arange(16, dtype=torch.int32)
    numbered = gains.view(torch.int32).bitwise_and_(-16).bitwise_or_(numbers)
    best = (numbered.amax(1, True) & 15).long()
    ratio, step = tries.index_select(0, best.flatten()).split(1, 1)
    fit = (gains.gather(1, best) / squares.gather(1, best)).add_(1).div_(2)
    return _storable(scale.mul_(ratio).mul_(fit), scheme), zero.add_(step).clamp_(0, 15)


@cache
def _table(zeros: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[16 zeros * places, 16 gains and 16 squares], and the tries it is of, [16, 2]."""
    tries = torch.tensor(_WITH_ZEROS if zeros else _WITHOUT_ZEROS, dtype=torch.float32)
    ratio, step = tries.unbind(1)
    zero = torch.arange(16, dtype=torch.float32)[:, None, None]
    place = torch.arange(_FIRST * _FINE, _LAST * _FINE, dtype=torch.float32)[:, None]
    weight = place / _FINE - zero  # [16, places, 1]
    zero = (zero + step).clamp_(0, 15)
    made = ((weight / ratio + zero).round_().clamp_(0, 15) - zero) * ratio
    table = torch.cat((made * (2 * weight - made), made**2 + _TINY), 2)  # no sum of squares is 0
    return table.flatten(0, 1), tries


def _storable(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The nearest scales that the scheme holds and bf16 too, in fp32; infinite beyond fp16."""
    least = 2.0**-21 if scheme.zeros else 2.0**-24  # the smallest fp16 with the bits that are left
    steps = scale.bfloat16().float().abs_().div_(least).round_()  # whole already from 2^-14 on
    return steps.clamp_(min=1).mul_(least).copysign_(scale).half().float()


def view_matrix(run: torch.Tensor, scheme: Scheme, rows: int, columns: int) -> QuantizedMatrix:
    """uint8 [sum(scheme.parts(rows, columns))] as a matrix; nothing is copied."""
    codes, scales = run.split(scheme.parts(rows, columns))
    words = scales.view(torch.int16).view(-1, rows, 2)
    return QuantizedMatrix(scheme, columns, codes.view(-1, rows, scheme.run), words)


def pack_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """codes [rows, K'] of any dtype, K' a multiple of 64 -> [K' / 64, rows, run] uint8."""
    parts = 16 // scheme.bits
    pieces = codes.to(torch.int16).view(len(codes), -1, parts, scheme.block // parts)
    words = pieces[:, :, 0]  # [rows, block, word]
    for part in range(1, parts):
        words = torch.add(words, pieces[:, :, part], alpha=1 << part * scheme.bits)
    return words.transpose(0, 1).contiguous().view(torch.uint8)


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
