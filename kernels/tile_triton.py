"""The inner loops of all matrix kernels: a tile of weight rows times the tokens it meets.

    acc[n, t] = sum over k of W[n, k] * x[t, k]

The weights are the tall operand: with few tokens the matrix unit's long side is filled by weight
rows, and a program that owns a tile of weights serves every token, so each byte of weights is read
once. The K loop runs from low to high in steps of the matrix instruction whatever the tile sizes
are, which is why the bits of a column do not depend on how many columns there are.

`dot_tile` is for float weights, `dot_tile_quantized` for codes (`spmoe_lite/quant.py` has the order of
the bytes). A word of codes is taken apart where it arrives, in the registers that feed the matrix
instruction, two words to a register, so that one instruction serves two weights:

  * bf16 has the exponents of fp32, so the lowest byte of its 16 bits, taken as a number, is that byte
    times 2^-133, exactly: bf16's subnormals and first normals are equally spaced. A mask makes a code
    a float, at the place where it stands or, for those in the high byte, after one shift for all; one
    fused multiply-add with S = scale 2^(133 - LIFT) and C = - zero scale 2^-LIFT makes that the weight
    times 2^-LIFT, and the sum over all columns is lifted at the end. Powers of two change no bit.
  * fp16 has no such room: a code is put into the mantissa of a float, which makes it 1024 + code;
    1024 + zero is subtracted and the scale multiplied. Idea: Kim et al. 2022, arXiv 2211.10017.

That is PTX; where `FAST` is off (the interpreter, fp32, other makers' cards) the same values come from
plain arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from spmoe_lite.precision import Scheme

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


LIFT = tl.constexpr(2.0**32)  # so that S is below 2^127 for every scale that an fp16 holds


def _asm_bf16(shift: int, mask: int) -> tl.constexpr:
    """The codes under `mask`, `shift` bits up in two words $1, times $2, plus $3."""
    return tl.constexpr(f"""{{
        .reg .b32 t;
        shr.u32 t, $1, {shift};
        and.b32 t, t, {mask:#x};
        fma.rn.bf16x2 $0, t, $2, $3;
    }}""")


def _asm_fp16(shift: int, mask: int) -> tl.constexpr:
    """(1024 + the codes under `mask`, `shift` bits up in two words $1, plus $3) times $2."""
    return tl.constexpr(f"""{{
        .reg .b32 t, one, nil;
        mov.b32 one, 0x3C003C00;
        mov.b32 nil, 0x80008000;
        shr.u32 t, $1, {shift};
        lop3.b32 t, t, {mask:#x}, 0x64006400, 0xEA;
        fma.rn.f16x2 t, t, one, $3;
        fma.rn.f16x2 $0, t, $2, nil;
    }}""")


_BF16_4 = tl.constexpr(tuple(_asm_bf16(i // 2 * 8, 0x000F000F << i % 2 * 4) for i in range(4)))
_FP16_4 = tl.constexpr(tuple(_asm_fp16(i * 4, 0x000F000F) for i in range(4)))
_BF16_8 = tl.constexpr(tuple(_asm_bf16(i * 8, 0x00FF00FF) for i in range(2)))
_FP16_8 = tl.constexpr(tuple(_asm_fp16(i * 8, 0x00FF00FF) for i in range(2)))

# A pair of groups $3, scales of 8 bits with zeros -> both groups' S, S / 16 and C. The scale's bits,
# moved to where bf16 has exponent and mantissa, are scale 2^-112; the zero's, scale 2^-133.
_PAIR = tl.constexpr("""{
    .reg .b32 z, t, s, by, nil;
    mov.b32 nil, 0x80008000;
    and.b32 z, $3, 0x00070007;
    shr.u32 t, $3, 12;
    and.b32 t, t, 0x00080008;
    or.b32 z, z, t;
    or.b32 z, z, nil;
    shr.u32 s, $3, 3;
    and.b32 s, s, 0x0FFF0FFF;
    mov.b32 by, 0x78007800;
    fma.rn.bf16x2 s, s, by, nil;
    mov.b32 by, 0x71807180;
    fma.rn.bf16x2 $0, s, by, nil;
    mov.b32 by, 0x6F806F80;
    fma.rn.bf16x2 $1, s, by, nil;
    fma.rn.bf16x2 $2, z, $0, nil;
}""")


@triton.jit
def _part(
    words,
    scale,
    scale_16,
    minus,
    i: tl.constexpr,
    BITS: tl.constexpr,
    DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):
    """Part i of words [N, W] int16, with what `_scale` found [N] -> weights [N, W] DTYPE."""
    BF16: tl.constexpr = DTYPE == tl.bfloat16
    if not FAST:
        code = ((words.to(tl.int32) >> (BITS * i)) & ((1 << BITS) - 1)).to(tl.float32)
        wide = scale.to(tl.float32)[:, None]
        zero = minus.to(tl.float32)[:, None]
        if BF16:
            return (code * wide - (zero * wide).to(DTYPE).to(tl.float32)).to(DTYPE)
        return ((code - zero) * wide).to(DTYPE)
    if BITS == 4:
        asm: tl.constexpr = _BF16_4[i] if BF16 else _FP16_4[i]
        scale = scale_16 if BF16 and i % 2 == 1 else scale
    else:
        asm: tl.constexpr = _BF16_8[i] if BF16 else _FP16_8[i]  # type: ignore[no-redef]
    scale = tl.broadcast_to(scale[:, None], words.shape)
    minus = tl.broadcast_to(minus[:, None], words.shape)
    return tl.inline_asm_elementwise(
        asm, "=r,r,r,r", [words, scale, minus], dtype=scale.dtype, is_pure=True, pack=2
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
                scale, scale_16, minus = _scale(pair, half, BITS, ZEROS, DTYPE, FAST)
                w = _weights(
                    words,
                    scale,
                    scale_16,
                    minus,
                    i * SPAN // WORDS,
                    SPAN // WORDS,
                    BITS,
                    DTYPE,
                    FAST,
                    BLOCK_N,
                )
                acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc * LIFT if FAST and DTYPE == tl.bfloat16 else acc


@triton.jit
def _weights(
    words, scale, scale_16, minus, first: tl.constexpr, COUNT: tl.constexpr, BITS: tl.constexpr,
    DTYPE: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Parts first, ..., first + COUNT - 1 of words [BLOCK_N, W] -> [BLOCK_N, COUNT * W] DTYPE."""
    w = _part(words, scale, scale_16, minus, first, BITS, DTYPE, FAST)
    if COUNT == 2:
        w = tl.join(
            w, _part(words, scale, scale_16, minus, first + 1, BITS, DTYPE, FAST)
        )  # [N, W, 2]
        w = tl.permute(w, (0, 2, 1))
    elif COUNT == 4:
        low = tl.join(w, _part(words, scale, scale_16, minus, first + 2, BITS, DTYPE, FAST))
        second = _part(words, scale, scale_16, minus, first + 1, BITS, DTYPE, FAST)
        high = tl.join(second, _part(words, scale, scale_16, minus, first + 3, BITS, DTYPE, FAST))
        w = tl.permute(tl.join(low, high), (0, 2, 3, 1))  # [N, 2, 2, W] from [N, W, 2, 2]
    return tl.reshape(w, (BLOCK_N, COUNT * 4 * BITS))


@triton.jit
def _scale(
    pair, half: tl.constexpr, BITS: tl.constexpr, ZEROS: tl.constexpr, DTYPE: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """(scale [N] DTYPE, the same / 16, minus) of one of the two groups in each word of `pair` [N].

    If FAST in bf16 they are S, S / 16 and C, in fp16 minus is - (1024 + zero); else it is the zero.
    """
    MIDDLE: tl.constexpr = 1 << (BITS - 1)
    if FAST and DTYPE == tl.bfloat16:
        if ZEROS:  # both groups at once
            s, s_16, c = tl.inline_asm_elementwise(
                _PAIR, "=r,=r,=r,r", [pair], dtype=(tl.int32, tl.int32, tl.int32), is_pure=True, pack=1
            )  # fmt: skip
            scale = (s >> (16 * half)).to(tl.int16).to(DTYPE, bitcast=True)
            scale_16 = (s_16 >> (16 * half)).to(tl.int16).to(DTYPE, bitcast=True)
            return scale, scale_16, (c >> (16 * half)).to(tl.int16).to(DTYPE, bitcast=True)
        wide = (pair >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = (wide * 2.0**101).to(DTYPE)
        return scale, (wide * 2.0**97).to(DTYPE), (wide * (-MIDDLE * 2.0**-32)).to(DTYPE)
    bits = pair >> (16 * half)
    if ZEROS:
        zero = (bits & 7) | ((bits >> 12) & 8)
        bits = bits & 0x7FF8
    else:
        zero = tl.full(pair.shape, MIDDLE, tl.int32)
    scale = bits.to(tl.int16).to(tl.float16, bitcast=True).to(DTYPE)
    if FAST:
        zero = -(zero + 1024).to(DTYPE)
    return scale, scale, zero
