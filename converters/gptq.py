"""Checkpoints in 4-bit AWQ or GPTQ: a `Checkpoint` whose matrices come as codes, scales and zeros.

Both methods store a matrix [N, K] as three tensors beside each other, in words of 32 bits that hold
eight codes, the lowest four bits first; `group` columns of a row share a scale and a zero:

    w[n, k] = (code[n, k] - zero[g, n]) * scale[g, n]          g = k // group

              GPTQ                                      AWQ (GEMM)
    qweight   int32 [K / 8, N], code 8 i + p of row n   int32 [K, N / 8], rows 8 i + ORDER[p]
    qzeros    int32 [K / group, N / 8], rows 8 i + p    int32 [K / group, N / 8], rows 8 i + ORDER[p]
    scales    fp16 [K / group, N]                       fp16 [K / group, N]
    g_idx     int32 [K], the group of each column       not there

GPTQ stores zeros less one (checkpoint_format "gptq"), which makes 16 possible, or as they are
("gptq_v2"). `accept` puts NAME.weight in the place of these tensors, with our scheme as its dtype.

Codes and zeros are kept as they are. With zeros of its own ("int4-g128z") a group keeps 8 significant
bits of its scale, all that a kernel computing in bf16 would use; a GPTQ checkpoint that is symmetric
(every zero is 8) needs none, and is exact ("int4-g128"). A matrix that does not fit, by a zero of 16 or
a negative scale, is quantised again from its values. A matrix in activation order (a g_idx other than
k // group) is read as floats.

Left out, refused by name: other bits, one group per row, other packings (GEMV, Marlin, ...), settings
that differ between modules. Sources: the AWQ and GPTQ papers, and the files as AutoAWQ, AutoGPTQ and
GPTQModel write them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from spmoe_lite.config import quantisation, quantisation_method
from spmoe_lite.converters.source import Checkpoint, Piece, SourceTensor
from spmoe_lite.errors import DamagedError, UnsupportedError
from spmoe_lite.pack import TORCH_DTYPES
from spmoe_lite.precision import GROUPS, Scheme
from spmoe_lite.quant import QuantizedMatrix, pack_scales, quantize, unpack_codes

log = logging.getLogger("spmoe_lite")

METHODS = ("awq", "gptq")
PARTS = ("qweight", "qzeros", "scales", "g_idx")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AWQ: the row, of eight, whose code lies in nibble p
NATURAL = tuple(range(8))
SCHEME = Scheme(4, 32)  # codes lie alike in every scheme of 4 bits
UNLIKE = "fetch one in 4 bits with groups of 32, 64 or 128, the original checkpoint, or a GGUF file"


@dataclass(frozen=True, slots=True)
class Packing:
    """What quantization_config says. `offset` is what a stored zero lacks; `ordered`: by activation."""

    method: str
    scheme: Scheme
    offset: int = 0
    ordered: bool = False

    @property
    def order(self) -> tuple[int, ...]:
        return ORDER if self.method == "awq" else NATURAL


def packing_of(config: dict[str, Any]) -> Packing | None:
    """The packing of an AWQ or GPTQ checkpoint, None of any other; `UnsupportedError` names a key."""
    key, values = quantisation(config) or ("", {})
    method = quantisation_method(values)
    if key != "quantization_config" or method not in METHODS:
        return None
    assert isinstance(values, dict)  # else it names no method

    def only(name: str, *allowed: Any) -> Any:
        value = values.get(name)
        value = value.lower() if isinstance(value, str) else value
        if not any(type(value) is type(each) and value == each for each in allowed):
            words = " or ".join(str(each) for each in allowed if each is not None)
            raise UnsupportedError(
                f"config: {method} with {name} {values.get(name)!r:.40} is not supported, only "
                f"{words}; {UNLIKE}"
            )
        return value

    only("bits", 4)
    group = only("group_size", *GROUPS)
    only("pack_dtype", None, "int32")
    for name in ("is_marlin_format", "use_marlin"):
        only(name, None, False)
    rules = values.get("dynamic")
    if rules and not (isinstance(rules, dict) and all(rule.startswith("-:") for rule in rules)):
        raise UnsupportedError(
            f"config: {method} with other settings for some modules (dynamic) is not supported; {UNLIKE}"
        )
    if method == "awq":
        only("version", None, "gemm")
        only("checkpoint_format", None, "gemm")
        only("backend", None, "autoawq")
        only("zero_point", None, True)
        return Packing(method, Scheme(4, group, zeros=True))
    stored = only("checkpoint_format", None, "gptq", "gptq_v2")
    ordered = only("desc_act", None, False, True)
    scheme = Scheme(4, group, zeros=not only("sym", None, False, True))
    return Packing(method, scheme, int(stored != "gptq_v2"), bool(ordered))


@dataclass(slots=True)
class _Matrix:
    """The tensors of one matrix by the last word of their names, and what stands in their place."""

    parts: dict[str, SourceTensor] = field(default_factory=dict)
    whole: SourceTensor | None = None


@dataclass(frozen=True, slots=True)
class _Raw:
    """The tensors of one matrix, read."""

    codes: torch.Tensor  # as our kernels want them (quant.py)
    zeros: torch.Tensor  # int16 [G, N]
    scales: torch.Tensor  # fp32 [G, N]
    columns: int
    groups: torch.Tensor | None  # [K]: of each column, where that is not k // group


class PackedCheckpoint(Checkpoint):
    """A `Checkpoint` that, once accepted, may be in AWQ or GPTQ; any other is left as it is."""

    packing: Packing | None = None

    def accept(self, packing: Packing) -> None:
        """From here on `tensors` has matrices in place of their parts."""
        self.packing = packing
        self._matrices: dict[str, _Matrix] = {}
        self._kept: tuple[str, _Raw] | None = None
        self._told: set[str] = set()
        self._regroup()
        if packing.scheme.zeros:
            log.warning(
                "%s: codes and zeros of %s are kept, scales in the 8 bits that bf16 has of them",
                self.label,
                packing.method.upper(),
            )

    def load_headers(self, files: Iterable[str]) -> None:
        super().load_headers(files)
        self._regroup()

    def read(
        self,
        name: str,
        index: int | None = None,
        rows: range | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As of any checkpoint; a packed matrix as the values its method defines, in fp32."""
        if not self._is_packed(name):
            return super().read(name, index, rows, out)
        assert index is None and out is None
        return _values(self._raw(name), rows or range(self.tensors[name].shape[0]))

    def read_quantized(self, piece: Piece, scheme: Scheme) -> QuantizedMatrix | None:
        """A matrix in the checkpoint's own scheme with its codes, None in any other."""
        if not self._is_packed(piece.name):
            return super().read_quantized(piece, scheme)
        if self.tensors[piece.name].scheme != scheme:
            return None
        assert piece.rows is None
        raw, name = self._raw(piece.name), f"{self.label}: {piece.name}"
        if scheme.zeros:
            scales = _eight_bits(raw.scales)
            fits = not bool((raw.zeros > 15).any() or (scales < 0).any())
        else:
            scales = raw.scales
            fits = bool((scales.half().float() == scales).all())
            if bool((raw.zeros != scheme.middle).any()):
                raise DamagedError(
                    f"{name} has zeros other than 8 in a checkpoint that config.json calls symmetric; "
                    f"set sym to false there"
                )
        if fits:
            words = pack_scales(scales, raw.zeros, scheme)
            return QuantizedMatrix(scheme, raw.columns, raw.codes, words)
        self._say_once(
            f"{name}, and others like it, have a zero of 16 or a scale that {scheme} cannot hold; they "
            f"are quantised again and lose a little"
        )
        return quantize(_values(raw, range(piece.shape[0])), scheme, name=name)

    def _is_packed(self, name: str) -> bool:
        return self.packing is not None and name.removesuffix(".weight") in self._matrices

    def _say_once(self, text: str) -> None:
        kind = text.partition(",")[2]
        if kind not in self._told:
            log.warning("%s", text)
        self._told.add(kind)

    # Names

    def _regroup(self) -> None:
        """Take the parts out of `tensors` and put the matrices in."""
        if self.packing is None:
            return
        for name in [name for name in self.tensors if name.endswith(PARTS)]:
            stem, _, part = name.rpartition(".")
            self._matrices.setdefault(stem, _Matrix()).parts[part] = self.tensors.pop(name)
        if not self._matrices and self.tensors:
            raise DamagedError(
                f"{self.label}: config.json says {self.packing.method}, but there is no qweight; "
                f"fetch the weights that belong to it, or remove quantization_config there"
            )
        for stem, matrix in self._matrices.items():
            name = f"{stem}.weight"
            if name in self.tensors and self.tensors[name] is not matrix.whole:
                raise DamagedError(
                    f"{self.label}: {name:.100} is there twice, packed and as it is; remove one"
                )
            if matrix.whole is None or not matrix.whole.known:
                matrix.whole = self._whole(stem, matrix.parts, self.packing)
            self.tensors[name] = matrix.whole
            self._drop_bias(stem)
        ordered = sum(each.whole.quantised for each in self._matrices.values() if each.whole)
        if ordered and "activation order" not in self._told:
            self._told.add("activation order")
            log.warning(
                "%s: %d of %d matrices are in activation order, where a group is no run of columns; "
                "they are read as floats, and int4 for --experts or --dense quantises them again",
                self.label,
                ordered,
                len(self._matrices),
            )

    def _whole(self, stem: str, parts: dict[str, SourceTensor], packing: Packing) -> SourceTensor:
        """The matrix that the parts make, their dtypes and shapes checked where they are known."""
        for part in PARTS[:3] + PARTS[3:] * packing.ordered:
            if part not in parts:
                raise DamagedError(
                    f"{self.label}: {stem:.100} has no {part}, but {', '.join(parts)}; the checkpoint "
                    f"is incomplete, fetch it again"
                )
        file, dtype = parts["qweight"].file, str(packing.scheme)
        if not all(tensor.known for tensor in parts.values()):
            known = SourceTensor(dtype, (), file, known=False)
            return replace(known, dtype="fp32", quantised=True) if packing.ordered else known
        for part, tensor in parts.items():
            dtypes = TORCH_DTYPES if part == "scales" else ("I32",)
            if tensor.dtype not in dtypes or len(tensor.shape) != 2 - (part == "g_idx"):
                self._misshapen(f"{stem}.{part}", tensor, packing, "that method's")
        down, across = parts["qweight"].shape
        columns, rows = (down, 8 * across) if packing.method == "awq" else (8 * down, across)
        groups, rest = divmod(columns, packing.scheme.group)
        if rest:
            raise UnsupportedError(
                f"{self.label}: {stem:.100} has {columns} columns, no whole groups of "
                f"{packing.scheme.group}; {UNLIKE}"
            )
        shapes = {"qzeros": (groups, rows // 8), "scales": (groups, rows), "g_idx": (columns,)}
        for part, shape in shapes.items():
            if rows % 8 or (part in parts and parts[part].shape != shape):
                self._misshapen(f"{stem}.{part}", parts[part], packing, str(list(shape)))
        if self._is_ordered(stem, parts, packing, groups):
            return SourceTensor(dtype, (rows, columns), file, parts["qweight"].start)
        return SourceTensor("fp32", (rows, columns), file, quantised=True)

    def _misshapen(
        self, name: str, tensor: SourceTensor, packing: Packing, wanted: str
    ) -> NoReturn:
        raise DamagedError(
            f"{self.label}: {name:.100} is {tensor.dtype} {list(tensor.shape)!s:.60}, not {wanted}, as "
            f"{packing.method} with groups of {packing.scheme.group} has it; config.json and weights "
            f"do not belong together"
        )

    def _is_ordered(
        self, stem: str, parts: dict[str, SourceTensor], packing: Packing, groups: int
    ) -> bool:
        """Whether column k is in group k // group, for every k."""
        if "g_idx" not in parts:
            return True
        found = self._part(parts["g_idx"], torch.int32)
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < groups:
            raise DamagedError(
                f"{self.label}: {stem:.100}.g_idx names groups {int(found.min())} to "
                f"{int(found.max())} of {groups}; fetch it again"
            )
        return torch.equal(found.long(), torch.arange(len(found)) // packing.scheme.group)

    def _drop_bias(self, stem: str) -> None:
        """Old writers gave each matrix a bias, all zeros where the model has none."""
        name = f"{stem}.bias"
        tensor = self.tensors.get(name)
        if tensor is None or (".self_attn." in name and self.config.get("attention_bias")):
            return
        if not tensor.known or (tensor.dtype in TORCH_DTYPES and not super().read(name).any()):
            del self.tensors[name]  # if not known, it comes again with the headers

    # Reading

    def _raw(self, name: str) -> _Raw:
        """The tensors of a matrix; the last one is kept, since it may be read in several pieces."""
        if self._kept is not None and self._kept[0] == name:
            return self._kept[1]
        assert self.packing is not None
        packing, parts = self.packing, self._matrices[name.removesuffix(".weight")].parts
        zeros = _nibbles(self._part(parts["qzeros"], torch.int32), packing.order)
        tensor, groups = self.tensors[name], None
        if tensor.quantised:  # in activation order
            groups = self._part(parts["g_idx"], torch.int32).long()
        raw = _Raw(
            _repacked(self._part(parts["qweight"], torch.int32), packing),
            zeros + packing.offset,
            self._part(parts["scales"], TORCH_DTYPES[parts["scales"].dtype]).float(),
            tensor.shape[1],
            groups,
        )
        self._kept = name, raw
        return raw

    def _part(self, tensor: SourceTensor, dtype: torch.dtype) -> torch.Tensor:
        found = torch.empty(tensor.shape, dtype=dtype)
        self._read_into(tensor.file, found.reshape(-1).view(torch.uint8).numpy().data, tensor.start)
        return found


def _nibbles(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """int32 [A, B] -> int16 [A, 8 B]; the code in nibble p of a word is its number order[p]."""
    out = torch.empty((*words.shape, 8), dtype=torch.int16)
    for place, number in enumerate(order):
        out[:, :, number] = words >> 4 * place & 15
    return out.flatten(1)


def _values(raw: _Raw, rows: range) -> torch.Tensor:
    """The rows as their method defines them: fp32 [R, K]."""
    place = slice(rows.start, rows.stop)
    values = unpack_codes(raw.codes[:, place], SCHEME)[:, : raw.columns].float()
    zeros, scales = (each[:, place].float().t().contiguous() for each in (raw.zeros, raw.scales))
    if raw.groups is not None:
        return values.sub_(zeros[:, raw.groups]).mul_(scales[:, raw.groups])
    grouped = values.view(*zeros.shape, -1)  # [R, G, group]
    return grouped.sub_(zeros[:, :, None]).mul_(scales[:, :, None]).flatten(1)


def _repacked(qweight: torch.Tensor, packing: Packing) -> torch.Tensor:
    """The codes as quant.py has them: uint8 [blocks of 64 columns, N, 32].

    Word j of a run has columns j, 16 + j, 32 + j and 48 + j of its block, so the four quarters of a
    block are put together: `_turned` does it for the eight nibbles of their words at once.
    """
    awq = packing.method == "awq"
    high = SCHEME.block if awq else SCHEME.block // 8  # rows of qweight in a block
    padding = -len(qweight) % high
    if padding:
        qweight = torch.nn.functional.pad(qweight, (0, 0, 0, padding))
    blocks, across = len(qweight) // high, qweight.shape[1]
    out = torch.empty(blocks, across * 8 if awq else across, 16, dtype=torch.int16)
    for block in range(blocks):  # one at a time, which stays in cache
        quarters = qweight[block * high : (block + 1) * high].view(4, high // 4, across)
        pairs = _turned(*quarters)  # of nibbles 0 and 4, 1 and 5, 2 and 6, 3 and 7
        if awq:  # the pairs are rows 0 and 1, 2 and 3, ... of one column
            out[block] = torch.stack(pairs, 2).view(torch.int16).flatten(1).t()
        else:  # they are columns of one row
            first = _merged(pairs[0], pairs[1], 0xFFFF, 16)
            second = _merged(pairs[2], pairs[3], 0xFFFF, 16)
            in_order = torch.stack((first[0], second[0], first[1], second[1]), 1)  # [2, 4, N]
            out[block].view(torch.int32).copy_(in_order.flatten(0, 1).t())
    return out.view(torch.uint8)


def _turned(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor
) -> list[torch.Tensor]:
    """Four int32 of eight nibbles each -> four of two 16-bit words: nibbles 0 and 4, 1 and 5, ...

    A 16-bit word has that nibble of `a` in its lowest bits, of `d` in its highest.
    """
    low, high = _merged(a, b, 0x0F0F0F0F, 4), _merged(c, d, 0x0F0F0F0F, 4)
    even, odd = (_merged(x, y, 0x00FF00FF, 8) for x, y in zip(low, high, strict=True))
    return [even[0], odd[0], even[1], odd[1]]


def _merged(a: torch.Tensor, b: torch.Tensor, mask: int, shift: int) -> list[torch.Tensor]:
    """The even fields of a and b in turn, then the odd ones; `mask` has the even fields."""
    even = (a & mask) | (b & mask) << shift
    return [even, (a >> shift & mask) | (b >> shift & mask) << shift]


def _eight_bits(scales: torch.Tensor) -> torch.Tensor:
    """The nearest fp16 with 8 significant bits, which is a bf16 too; multiples of 2^-21 at least."""
    near = scales.bfloat16().float()
    tiny = (scales * 2.0**21).round_().mul_(2.0**-21)
    return torch.where(near.abs() < 2.0**-14, tiny, near)
