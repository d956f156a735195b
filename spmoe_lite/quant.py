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

`quantize` looks for the smallest squared error of each group. At 4 bits it tries six or seven ranges, all
of the group's and narrower ones that clip its ends. For given codes c (less the zero) the best scale is
c.w / c.c and leaves |w|^2 (1 - cos^2(c, w)), so the range with the largest cosine wins; its scale is
fitted a second time, rounded to what is stored and to 8 significant bits, and the codes are taken
last. Without zeros the extreme of a group, whatever its sign, is put near -8: such scales may be
negative. At 8 bits the largest weight is 127 and nothing is tried. Operations are elementwise or
within a group and use torch's threads. Figures: benchmarks/quant.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from spmoe_lite.errors import DamagedError, UnsupportedError

if TYPE_CHECKING:
    from spmoe_lite.precision import Scheme

_TILE = 1 << 19  # weights in work at once: few enough to stay in cache, enough for many threads
_TINY = 2.0**-24
# What is tried: shares of a group's range that 15 steps span, and steps from 0 to its extreme.
_SHARES = (1.0, 0.96, 0.925, 0.89, 0.855, 0.82, 0.78)
_STEPS = (8.0, 7.0, 7.5, 8.5, 9.0, 9.5)


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
    step = max(1, _TILE // columns)
    for row in range(0, rows, step):
        some = slice(row, min(row + step, rows))
        tile = weights[some].float()
        if padding := -columns % scheme.block:
            tile = torch.nn.functional.pad(tile, (0, padding))
        matrix.codes[:, some], matrix.scales[:, some] = _quantize_tile(
            tile.contiguous(), scheme, name
        )
    return matrix


def _quantize_tile(
    tile: torch.Tensor, scheme: Scheme, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, whole blocks and groups] fp32 -> its codes and scales, packed."""
    groups = tile.view(-1, scheme.group)
    most, least = groups.amax(1, True), groups.amin(1, True)
    reach = float(torch.maximum(most, -least).max())
    if not math.isfinite(reach):
        raise DamagedError(f"{name} has weights that are not finite numbers; fetch it again")
    fit = _fit(groups, most.clamp_(min=0), least.clamp_(max=0), scheme) if reach < 2**24 else None
    if fit is None or not fit[0].isfinite().all():
        raise UnsupportedError(
            f"{name} has weights up to {reach:.3g}, too large for {scheme}; keep it in floats"
        )
    scale, zero = fit
    codes = _codes(groups, scale, zero, scheme, torch.empty_like(groups)).add_(zero)
    scales, zeros = (each.view(len(tile), -1).t() for each in (scale, zero))
    return pack_codes(codes.view(tile.shape), scheme), pack_scales(scales, zeros, scheme)


def _fit(
    groups: torch.Tensor, most: torch.Tensor, least: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale, as it is stored, and the zero [G, 1] of each group [G, group]; see the module."""
    if scheme.bits == 8:
        scale = torch.maximum(most, -least) / 127
        return _storable(scale, scheme), torch.full_like(scale, scheme.middle)
    codes = torch.empty_like(groups)

    def project(scale: torch.Tensor, zero: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosine between weights and codes, times |weights|, and the scale that fits best."""
        _codes(groups, scale, zero, scheme, codes)
        norm = torch.linalg.vector_norm(codes, dim=1, keepdim=True).clamp_(min=1)
        cosine = codes.mul_(groups).sum(1, True) / norm  # in place: less memory is in work
        return cosine.abs(), cosine / norm

    if scheme.zeros:
        span, centre = (most - least).clamp_(min=_TINY) / 15, (most + least) / 2
        scales = [span * share for share in _SHARES]
        zeros = [(7.5 - centre / scale).round_().clamp_(0, 15) for scale in scales]
    else:
        extreme = torch.where(most > -least, most.clamp(min=_TINY), least.clamp(max=-_TINY))
        scales = [extreme / -steps for steps in _STEPS]
        zeros = [torch.full_like(extreme, scheme.middle)] * len(scales)
    zero = zeros[0]
    best, scale = project(scales[0], zero)
    for other_scale, other_zero in zip(scales[1:], zeros[1:], strict=True):
        cosine, fitted = project(other_scale, other_zero)
        better = cosine > best
        best = torch.where(better, cosine, best)
        scale = torch.where(better, fitted, scale)
        zero = torch.where(better, other_zero, zero)
    scale = torch.where(scale == 0, _TINY, scale)
    return _storable(project(scale, zero)[1], scheme), zero


def _codes(
    groups: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor,
    scheme: Scheme,
    out: torch.Tensor,
) -> torch.Tensor:
    """The nearest codes, less their zero, in floats: [G, group], written to `out`."""
    torch.mul(groups, 1 / scale, out=out).round_()
    if not scheme.zeros:
        return out.clamp_(-scheme.middle, scheme.middle - 1)
    torch.maximum(out, -zero, out=out)
    return torch.minimum(out, 2 * scheme.middle - 1 - zero, out=out)


def _storable(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """The nearest scales that the scheme holds and bf16 too, in fp32; infinite beyond fp16."""
    least = 2.0**-21 if scheme.zeros else 2.0**-24  # the smallest fp16 with the bits that are left
    near = scale.bfloat16().float().abs()
    subnormal = (near / least).round_().clamp_(min=1).mul_(least)
    return torch.where(near < 2.0**-14, subnormal, near).copysign_(scale).half().float()


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
