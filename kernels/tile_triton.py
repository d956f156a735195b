"""The inner loops of all matrix kernels: a tile of weight rows times the tokens it meets.

    acc[n, t] = sum over k of W[n, k] * x[t, k]

The weights are the tall operand: with few tokens the matrix unit's long side is filled by weight
rows, and a program that owns a tile of weights serves every token, so each byte of weights is read
once. The K loop runs from low to high in steps of the matrix instruction whatever the tile sizes
are, which is why the bits of a column do not depend on how many columns there are.

`dot_tile` is for float weights, `dot_tile_quantized` for codes (`spmoe_lite/quant.py` has the order of
the bytes). A word of codes is taken apart where it arrives, in the registers that feed the matrix
instruction: a code is put into the mantissa of a float by one logical operation, which makes it
2^m + code; subtracting 2^m + zero and multiplying by the scale, both in the dtype of x, gives the
weight. Two words share a register, so each of these is one instruction for two weights. That is PTX;
where `FAST` is off (the interpreter, fp32, other makers' cards) the same values come from plain
arithmetic. Idea of the magic number: Kim et al. 2022, arXiv 2211.10017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from spmoe_lite.config import Scheme

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


def scheme_constants(dtype: torch.dtype, scheme: Scheme | None) -> dict[str, Any]:
    """The constants of a kernel whose weights are in `scheme` (None: floats) and x in `dtype`."""
    if scheme is None:
        return {"BITS": 0, "GROUP": 0, "ZEROS": False, "FAST": False}
    compiled = isinstance(dot_tile, triton.JITFunction)
    fast = compiled and dtype.itemsize == 2 and torch.version.hip is None
    return {"BITS": scheme.bits, "GROUP": scheme.group, "ZEROS": scheme.zeros, "FAST": fast}


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """First thing in a kernel that may start early: wait for the end of the one before.

    Nothing that another kernel writes is read before this, and nothing is written.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start: when the loop is over, since programs that wait take up room.

    Started at the beginning they crowd where room is left, and stay there: twice the time.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(addresses):
    """Fetch the 128 bytes at each of int64 `addresses` into the L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [addresses], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def dot_tile(
    w_ptr,  # [*, K], 16-byte aligned
    x_ptr,  # [*, K]
    copy_ptr,  # where to store the weights read, if COPY
    rows,  # [BLOCK_N] int64, rows of W, all valid
    tokens,  # [BLOCK_T] int64, rows of x
    token_mask,  # [BLOCK_T]
    k_begin,
    k_end,
    K: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """[BLOCK_N, BLOCK_T] fp32."""
    k = tl.arange(0, BLOCK_K)
    w_at = rows[:, None] * K + k[None, :]
    x_at = x_ptr + tokens[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for low in range(k_begin, k_end, BLOCK_K):
        if K % BLOCK_K == 0:
            x = tl.load(x_at + low, mask=token_mask[None, :], other=0.0)
            w = tl.load(w_ptr + w_at + low)
            if COPY:
                tl.store(copy_ptr + w_at + low, w)
        else:
            inside = low + k < K
            x = tl.load(x_at + low, mask=token_mask[None, :] & inside[:, None], other=0.0)
            w = tl.load(w_ptr + w_at + low, mask=inside[None, :], other=0.0)
            if COPY:
                tl.store(copy_ptr + w_at + low, w, mask=inside[None, :])
        acc = tl.dot(w, x.to(w.dtype), acc, input_precision="ieee")
    return acc


def _asm(shift: int, code: int, magic: int, one: int) -> tl.constexpr:
    """Part `shift` bits up in two words $1: (magic | code bits) + $2, times $3; one: 1.0 twice."""
    kind, nil = ("bf16x2", 0x80008000) if one == 0x3F803F80 else ("f16x2", 0x80008000)
    return tl.constexpr(f"""{{
        .reg .b32 t, one, nil;
        mov.b32 one, {one:#x};
        mov.b32 nil, {nil:#x};
        shr.u32 t, $1, {shift};
        lop3.b32 t, t, {code:#x}, {magic:#x}, 0xEA;
        fma.rn.{kind} t, t, one, $2;
        fma.rn.{kind} $0, t, $3, nil;
    }}""")


def _asm_byte(shift: int) -> tl.constexpr:
    """A byte has one bit more than a bf16 has room for: its highest chooses what to subtract,
    256 or 128, from 128 + the other seven."""
    return tl.constexpr(f"""{{
        .reg .b32 t, high, minus, nil;
        mov.b32 minus, 0xBF80BF80;
        mov.b32 nil, 0x80008000;
        shr.u32 t, $1, {shift};
        lop3.b32 high, t, 0x00800080, 0x43804380, 0x6A;
        lop3.b32 t, t, 0x007F007F, 0x43004300, 0xEA;
        fma.rn.bf16x2 t, high, minus, t;
        fma.rn.bf16x2 $0, t, $3, nil;
    }}""")


_BF16_4 = tl.constexpr(tuple(_asm(4 * i, 0x000F000F, 0x43004300, 0x3F803F80) for i in range(4)))
_FP16_4 = tl.constexpr(tuple(_asm(4 * i, 0x000F000F, 0x64006400, 0x3C003C00) for i in range(4)))
_BF16_8 = tl.constexpr(tuple(_asm_byte(8 * i) for i in range(2)))
_FP16_8 = tl.constexpr(tuple(_asm(8 * i, 0x00FF00FF, 0x64006400, 0x3C003C00) for i in range(2)))


@triton.jit
def _part(
    words,
    minus,
    scale,
    i: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Part i of words [N, W] int16, with `_scale`'s minus and scale [N] -> weights [N, W] DTYPE."""
    wide = tl.broadcast_to(scale[:, None], words.shape)
    if not FAST:
        code = (words.to(tl.int32) >> (BITS * i)) & ((1 << BITS) - 1)
        return ((code - minus[:, None]).to(tl.float32) * wide.to(tl.float32)).to(DTYPE)
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    if BITS == 4:
        asm: tl.constexpr = _BF16_4[i] if BF16 else _FP16_4[i]
    else:
        asm: tl.constexpr = _BF16_8[i] if BF16 else _FP16_8[i]  # type: ignore[no-redef]
    minus = tl.broadcast_to(minus[:, None], words.shape)
    return tl.inline_asm_elementwise(
        asm, "=r,r,r,r", [words, minus, wide], dtype=scale.dtype, is_pure=True, pack=2
    )


@triton.jit
def dot_tile_quantized(
    codes_ptr,  # int16 [K / 64, N, 4 * BITS], 16-byte aligned
    scales_ptr,  # int32 [K / GROUP / 2, N]
    x_ptr,  # [*, K] in DTYPE
    copy_codes_ptr,  # where to store the codes read, if COPY
    copy_scales_ptr,
    code_rows,  # [BLOCK_N], where each row's run of block 0 begins
    scale_rows,  # [BLOCK_N], where its first pair of scales lies
    tokens,  # [BLOCK_T] int64, rows of x
    token_mask,  # [BLOCK_T]
    k_begin,  # a multiple of the step
    k_end,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    DTYPE: tl.constexpr,
    FAST: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # the step, if K is a multiple of it
    BLOCK_T: tl.constexpr,
):
    """[BLOCK_N, BLOCK_T] fp32."""
    WORDS: tl.constexpr = 4 * BITS
    LEAST: tl.constexpr = 256 if GROUP == 128 else 128  # whole pairs of groups: constant shifts
    STEP: tl.constexpr = BLOCK_K if BLOCK_K > LEAST and K % BLOCK_K == 0 else LEAST
    SPAN: tl.constexpr = 32 if GROUP == 32 else 64  # columns of one product: one group's
    WHOLE: tl.constexpr = K % STEP == 0
    j, k = tl.arange(0, WORDS), tl.arange(0, SPAN)
    codes_at = code_rows[:, None] + j[None, :]
    x_at = x_ptr + tokens[None, :] * K + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for low in range(k_begin, k_end, STEP):
        for u in tl.static_range(STEP // 64):
            block = low + u * 64
            words_at = codes_at + (block // 64) * (N * WORDS)
            pair_at = scale_rows + (block // (2 * GROUP)) * N
            if WHOLE:
                words = tl.load(codes_ptr + words_at)
                if COPY:
                    tl.store(copy_codes_ptr + words_at, words)
                if (u * 64) % (2 * GROUP) == 0:
                    pair = tl.load(scales_ptr + pair_at)
                    if COPY:
                        tl.store(copy_scales_ptr + pair_at, pair)
            else:  # the last step may have blocks beyond the end
                there = code_rows * 0 + block < K
                words = tl.load(codes_ptr + words_at, mask=there[:, None], other=0)
                if COPY:
                    tl.store(copy_codes_ptr + words_at, words, mask=there[:, None])
                if (u * 64) % (2 * GROUP) == 0:
                    pair = tl.load(scales_ptr + pair_at, mask=there, other=0)
                    if COPY:
                        tl.store(copy_scales_ptr + pair_at, pair, mask=there)
            for i in tl.static_range(64 // SPAN):
                column = block + i * SPAN
                if WHOLE:
                    x = tl.load(x_at + column, mask=token_mask[None, :], other=0.0)
                else:
                    inside = token_mask[None, :] & (column + k < K)[:, None]
                    x = tl.load(x_at + column, mask=inside, other=0.0)
                half = (u * 64 + i * SPAN) // GROUP % 2
                scale, minus = _scale(pair, half, BITS, ZEROS, DTYPE, FAST)
                w = _weights(
                    words,
                    scale,
                    minus,
                    i * SPAN // WORDS,
                    SPAN // WORDS,
                    BITS,
                    DTYPE,
                    FAST,
                    BLOCK_N,
                )
                acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _weights(
    words, scale, minus, first: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts first, ..., first + COUNT - 1 of words [BLOCK_N, W] -> [BLOCK_N, COUNT * W] DTYPE."""
    w = _part(words, minus, scale, first, BITS, DTYPE, FAST)
    if COUNT == 2:
        w = tl.join(w, _part(words, minus, scale, first + 1, BITS, DTYPE, FAST))  # [N, W, 2]
        w = tl.permute(w, (0, 2, 1))
    elif COUNT == 4:
        low = tl.join(w, _part(words, minus, scale, first + 2, BITS, DTYPE, FAST))
        second = _part(words, minus, scale, first + 1, BITS, DTYPE, FAST)
        high = tl.join(second, _part(words, minus, scale, first + 3, BITS, DTYPE, FAST))
        w = tl.permute(tl.join(low, high), (0, 2, 3, 1))  # [N, 2, 2, W] from [N, W, 2, 2]
    return tl.reshape(w, (BLOCK_N, COUNT * 4 * BITS))


@triton.jit
def _scale(
    pair, half: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(scale [N] DTYPE, what to take from a code) of one of the two groups in each word of `pair`.

    The latter is the zero as int32 [N], or, if FAST, - (2^m + zero) in DTYPE.
    """
    if ZEROS and FAST:  # both groups at once
        magic: tl.constexpr = -0x3CFF3D00 if DTYPE == tl.bfloat16 else -0x1BFF1C00
        minus = (pair & 0x00070007) | magic | ((pair >> 12) & 0x00080008)
        minus = (minus >> (16 * half)).to(tl.int16).to(DTYPE, bitcast=True)
        bits = (pair & 0x7FF87FF8) >> (16 * half)
    elif ZEROS:
        bits = pair >> (16 * half)
        minus = (bits & 7) | ((bits >> 12) & 8)
        bits = bits & 0x7FF8
    elif FAST:
        bits = pair >> (16 * half)
        size: tl.constexpr = 128 if DTYPE == tl.bfloat16 else 1024
        minus = tl.full(pair.shape, -size - (1 << (BITS - 1)), DTYPE)
    else:
        bits = pair >> (16 * half)
        minus = tl.full(pair.shape, 1 << (BITS - 1), tl.int32)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE), minus
