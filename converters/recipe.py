"""Which tensor of a source becomes which part of the pack, decided in full before a byte is written.

`match` finds every tensor that the config demands under exactly one of its names, checks shape and
dtype, and refuses what is missing, there twice, already quantised, or unknown. `read_weight` then reads
one piece in the pack's dtype, cast or quantised; integers never get there, non-finite weights and values
that a narrower float cannot hold are refused by name. Casting rounds to nearest even.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch

from spmoe_lite.config import ModelConfig
from spmoe_lite.converters import llama, mistral, mixtral
from spmoe_lite.converters.source import BLOCK_BYTES, Piece, Source, SourceTensor, TensorFiles
from spmoe_lite.errors import DamagedError, UnsupportedError
from spmoe_lite.manifest import EMBED, HEAD, Dtypes, dense_shapes
from spmoe_lite.pack import TORCH_DTYPES, Weight
from spmoe_lite.precision import Scheme, scheme_of
from spmoe_lite.progress import check
from spmoe_lite.quant import QuantizedMatrix, quantize, unpack_scales, view_matrix

FAMILIES: dict[str, ModuleType] = {"llama": llama, "mistral": mistral, "mixtral": mixtral}
DECODED_BYTES = (
    256 << 20
)  # the same of a source that must decode, perhaps more than the rows asked for
QUANTISED_BYTES = 32 << 20  # quantised at a time, on all cores, between two looks at `cancel`


@dataclass(frozen=True, slots=True)
class Recipe:
    """dense: pack name -> piece; experts: [layer][expert] -> (gate, up, down)."""

    dense: dict[str, Piece]
    experts: list[list[tuple[Piece, Piece, Piece]]]


def match(config: ModelConfig, source: Source) -> Recipe:
    """Find every tensor of the model; raises `DamagedError` or `UnsupportedError` naming the first fault."""
    family = FAMILIES[config.family]
    for name, tensor in source.tensors.items():
        if not llama.DERIVED.fullmatch(name):
            _refuse_integers(source.label, name, tensor)
    chosen = _Chooser(source)
    wanted = {
        name: [Piece(spelling, shape) for spelling in family.dense_names(name)]
        for name, shape in dense_shapes(config).items()
    }
    chosen.require_any(config.family, wanted.values())
    dense = {name: chosen.one(name, pieces) for name, pieces in wanted.items()}
    experts: list[list[tuple[Piece, Piece, Piece]]] = []
    for layer in range(config.num_hidden_layers if config.is_moe else 0):
        experts.append([])
        for expert in range(config.num_local_experts):
            pieces = family.expert_pieces(config, layer, expert)
            where = f"of expert {expert} of layer {layer}"
            gate, up, down = (chosen.one(f"{kind} {where}", pieces[kind]) for kind in pieces)
            experts[layer].append((gate, up, down))
    _refuse_unknown(config, source, chosen.used)
    return Recipe(dense, experts)


class _Chooser:
    """Picks the one spelling that is there, and remembers the tensors in use."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.used: set[str] = set()

    def require_any(self, family: str, wanted: Iterable[list[Piece]]) -> None:
        """At least one name must be right, else the whole file is of another kind."""
        tensors = self.source.tensors
        if not any(piece.name in tensors for pieces in wanted for piece in pieces):
            first = next(iter(tensors), "nothing")
            raise UnsupportedError(
                f"{self.source.label}: not one tensor has a name of the {family} family (it has "
                f"{first:.80}); fetch the version in transformers' layout"
            )

    def one(self, what: str, pieces: list[Piece]) -> Piece:
        found = [piece for piece in pieces if piece.name in self.source.tensors]
        if not found:
            raise DamagedError(
                f"{self.source.label}: {what} is missing: no {pieces[0].name}, nor another spelling "
                f"of it; the checkpoint is incomplete, fetch it again"
            )
        if len(found) > 1:
            raise DamagedError(
                f"{self.source.label}: {what} is there twice, as {found[0].name} and {found[1].name}"
            )
        self.used.add(found[0].name)
        check_tensor(self.source, found[0])
        return found[0]


def check_tensor(source: Source | TensorFiles, piece: Piece) -> None:
    """The tensor is made of floats, and of the shape that config.json implies, once its header is here."""
    tensor = source.tensors[piece.name]
    _refuse_integers(source.label, piece.name, tensor)
    if tensor.known and tensor.shape != piece.shape:
        raise DamagedError(
            f"{source.label}: {piece.name} is {list(tensor.shape)}, config.json makes it "
            f"{list(piece.shape)}; the two are of different models"
        )


def _refuse_integers(label: str, name: str, tensor: SourceTensor) -> None:
    if tensor.is_weight:
        return
    if tensor.dtype == "F64":
        raise UnsupportedError(f"{label}: {name} is F64; save it as fp32, bf16 or fp16")
    raise UnsupportedError(
        f"{label}: {name} is {tensor.dtype}: the checkpoint is already quantised; fetch the "
        f"full-precision version (bf16, fp16 or fp32), or a GGUF file"
    )


def _refuse_unknown(config: ModelConfig, source: Source, used: set[str]) -> None:
    for name, tensor in source.tensors.items():
        if name in used or llama.DERIVED.fullmatch(name):
            continue
        if name == HEAD and config.tie_word_embeddings:
            continue  # check_tied compares it with the embeddings
        raise UnsupportedError(
            f"{source.label}: {name:.100} in {tensor.file} has no place in a {config.family} model "
            f"of {config.num_hidden_layers} layers; leaving it out would change the model"
        )


def check_tied(config: ModelConfig, source: Source, recipe: Recipe) -> None:
    """A tied model may carry its head as well, if it is the same matrix."""
    if not config.tie_word_embeddings or HEAD not in source.tensors:
        return
    embeddings = recipe.dense[EMBED]
    head, embed = source.tensors[HEAD], source.tensors[embeddings.name]
    same = (head.dtype, head.shape) == (embed.dtype, embed.shape)
    if not same or not all(
        torch.equal(source.read(HEAD, rows=rows), source.read(embeddings.name, rows=rows))
        for rows in _blocks(embed.dtype, range(embed.shape[0]), embed.shape)
    ):
        raise UnsupportedError(
            f"{source.label}: config.json ties the output head to the embeddings, but {HEAD} holds "
            f"other values; if they are meant, set tie_word_embeddings to false there"
        )


def natural_dtypes(source: Source, recipe: Recipe, unknown: str = "bf16") -> Dtypes:
    """The narrowest dtypes that hold every source value exactly, a scheme where all are in it.

    bf16 where values were quantised in another way: what they become is fp32, and most of its bits
    say nothing. Tensors whose headers are not here are taken to be `unknown`.
    """
    kinds = _kinds(source, recipe)
    experts = kinds.pop("experts")
    floats = [tensor for tensor in sum(kinds.values(), []) if tensor.scheme is None]
    dense = _joined(floats, unknown)
    return Dtypes(
        dense,
        _scheme_of_all(kinds["linear"]) or dense,
        _scheme_of_all(kinds["embed"]) or dense,
        (_scheme_of_all(experts) or _joined(experts, unknown)) if experts else None,
    )


def held_schemes(source: Source, recipe: Recipe) -> dict[str, list[str]]:
    """The schemes that hold some of the experts, "linear" and "embed" with the codes they have."""
    return {
        kind: sorted({held for t in tensors if (held := t.dtype if t.scheme else t.held)})
        for kind, tensors in _kinds(source, recipe).items()
    }


def _kinds(source: Source, recipe: Recipe) -> dict[str, list[SourceTensor]]:
    """The tensors by the word of `Dtypes` that says what they become."""
    kinds = Dtypes("dense", "linear", "embed", None)  # asked for the kind of a name
    tensors: dict[str, list[SourceTensor]] = {"dense": [], "linear": [], "embed": []}
    for name, piece in recipe.dense.items():
        tensors[kinds.of(name)].append(source.tensors[piece.name])
    tensors["experts"] = [source.tensors[piece.name] for piece in _groups(recipe)[1]]
    return tensors


def _scheme_of_all(tensors: list[SourceTensor]) -> str | None:
    dtypes = {tensor.dtype for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 and tensors[0].scheme is not None else None


def requantised(source: Source, recipe: Recipe, dtypes: Dtypes) -> int:
    """How many matrices the source has quantised and the pack will have in another scheme."""
    count = 0
    for kind, tensors in _kinds(source, recipe).items():
        target = getattr(dtypes, kind)
        if target is not None and scheme_of(target) is not None:
            for tensor in tensors:
                has_codes = tensor.quantised or tensor.scheme is not None
                count += has_codes and target not in (tensor.dtype, tensor.held)
    return count


def widened(source: Source, recipe: Recipe, dtypes: Dtypes) -> int:
    """How many matrices the source has in a scheme and the pack, with others beside them, in floats."""
    return sum(
        sum(tensor.scheme is not None for tensor in tensors)
        for kind, tensors in _kinds(source, recipe).items()
        if getattr(dtypes, kind) in TORCH_DTYPES and _scheme_of_all(tensors) is None
    )


def quantised(source: Source, recipe: Recipe) -> tuple[bool, bool]:
    """Whether any of (dense, experts) is stored in fewer bits than the dtype it is read in."""
    dense, experts = (
        any(source.tensors[piece.name].quantised for piece in group) for group in _groups(recipe)
    )
    return dense, experts


def _groups(recipe: Recipe) -> tuple[list[Piece], list[Piece]]:
    experts = [piece for layer in recipe.experts for expert in layer for piece in expert]
    return list(recipe.dense.values()), experts


def _joined(tensors: list[SourceTensor], unknown: str) -> str:
    if any(tensor.quantised or tensor.scheme is not None for tensor in tensors):
        return "bf16"
    dtypes = {tensor.dtype or unknown for tensor in tensors}
    return dtypes.pop() if len(dtypes) == 1 else "fp32"


def read_weight(
    source: Source | TensorFiles,
    piece: Piece,
    dtype: str,
    out: torch.Tensor | None = None,
    *,
    count: Callable[[int], None],
    cancel: threading.Event | None,
) -> Weight:
    """Read one piece in any dtype of a pack, floats into `out` if given; `count` gets its bytes.

    Raises as `read_as`, and `Cancelled` between blocks.
    """
    scheme = scheme_of(dtype)
    if scheme is not None:
        return _read_quantised(source, piece, scheme, count, cancel)
    check(cancel)
    values = read_as(source, piece, dtype, out)
    count(values.nbytes)
    return values


def _read_quantised(
    source: Source | TensorFiles,
    piece: Piece,
    scheme: Scheme,
    count: Callable[[int], None],
    cancel: threading.Event | None,
) -> QuantizedMatrix:
    """As the source holds it, if in just that scheme; else read and quantised block by block."""
    check_tensor(source, piece)
    shape = piece.shape if piece.index is None else piece.shape[1:]
    rows = piece.rows or range(shape[0])
    total, columns = sum(scheme.parts(len(rows), shape[1])), shape[1]
    held = source.read_quantized(piece, scheme)
    if held is not None:
        if not unpack_scales(held.scales, scheme)[0].isfinite().all():
            raise DamagedError(
                f"{source.label}: {piece.name} has scales that are NaN or infinite; fetch it again"
            )
        count(total)
        return held
    run = torch.empty(total, dtype=torch.uint8)
    matrix = view_matrix(run, scheme, len(rows), columns)
    done = 0
    for block in _blocks(_read_in(source.tensors[piece.name]), rows, shape, QUANTISED_BYTES):
        check(cancel)
        place = slice(block.start - rows.start, block.stop - rows.start)
        values = source.read(piece.name, piece.index, block)
        part = quantize(values, scheme, name=f"{source.label}: {piece.name}")
        for whole, some in zip(matrix.tensors(), part.tensors(), strict=True):
            whole[:, place] = some
        count(total * place.stop // len(rows) - done)
        done = total * place.stop // len(rows)
    return matrix


def read_as(
    source: Source | TensorFiles, piece: Piece, dtype: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Read one piece as the float `dtype`, into `out` if given.

    Memory beyond the result is one block, and the matrix itself where the source has it quantised.
    Raises `DamagedError` for non-finite weights, `UnsupportedError` for values beyond the dtype.
    """
    check_tensor(source, piece)
    shape = piece.shape if piece.index is None else piece.shape[1:]
    rows = piece.rows or range(shape[0])
    if out is None:
        out = torch.empty((len(rows), *shape[1:]), dtype=TORCH_DTYPES[dtype])
    block_bytes = BLOCK_BYTES if isinstance(source, TensorFiles) else DECODED_BYTES
    for block in _blocks(_read_in(source.tensors[piece.name]), rows, shape, block_bytes):
        part = out[block.start - rows.start : block.stop - rows.start]
        if source.tensors[piece.name].dtype == dtype and isinstance(source, TensorFiles):
            source.read(piece.name, piece.index, block, out=part)
            _check_finite(source, piece, part)
        else:
            values = source.read(piece.name, piece.index, block)
            _check_finite(source, piece, values, dtype)
            part.copy_(values)
    return out


def _read_in(tensor: SourceTensor) -> str:
    """The float dtype in which `read` gives a tensor."""
    return tensor.dtype if tensor.scheme is None else "fp32"


def _blocks(
    dtype: str, rows: range, shape: tuple[int, ...], block_bytes: int = BLOCK_BYTES
) -> list[range]:
    """Ranges of about `block_bytes` that cover `rows` of a matrix (or vector) of `shape`."""
    row_bytes = math.prod(shape[1:]) * TORCH_DTYPES[dtype].itemsize
    step = max(1, block_bytes // row_bytes)
    return [range(first, min(first + step, rows.stop)) for first in rows[::step]]


def _check_finite(
    source: Source | TensorFiles, piece: Piece, values: torch.Tensor, dtype: str | None = None
) -> None:
    """Refuse NaN and infinity; with `dtype`, also what becomes infinite when cast to it."""
    largest = _largest_magnitude(values)
    if not largest.isfinite():
        raise DamagedError(
            f"{source.label}: {piece.name} holds NaN or infinite values; fetch it again or report "
            f"it to its publisher"
        )
    if dtype and not largest.to(TORCH_DTYPES[dtype]).isfinite():
        raise UnsupportedError(
            f"{source.label}: {piece.name} holds values up to {largest.item():.4g}, beyond "
            f"{dtype}'s {torch.finfo(TORCH_DTYPES[dtype]).max:.6g}; choose bf16 or fp32"
        )


def _largest_magnitude(values: torch.Tensor) -> torch.Tensor:
    """The largest |value|, as a scalar tensor; NaN counts as larger than infinity.

    Read as integers, floats of one sign are in the order of their magnitude: the largest signed integer is
    the largest positive value, the largest unsigned one the most negative. Two reductions of numpy, five
    times quicker than torch's on a busy machine.
    """
    signed, unsigned, torch_int = {
        2: (np.int16, np.uint16, torch.int16),
        4: (np.int32, np.uint32, torch.int32),
    }[values.itemsize]
    bits = values.reshape(-1).view(torch_int).numpy()
    sign = 1 << (8 * values.itemsize - 1)
    largest = max(int(bits.max()), int(bits.view(unsigned).max()) - sign, 0)
    return torch.from_numpy(np.array(largest, dtype=signed)).view(values.dtype)
