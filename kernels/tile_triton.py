"""The one inner loop of all matrix kernels: a tile of weight rows times the tokens it meets.

    acc[n, t] = sum over k of W[n, k] * x[t, k]

The weights are the tall operand: with few tokens the matrix unit's long side is filled by weight
rows, and a program that owns a tile of weights serves every token, so each byte of weights is read
once. The K loop runs from low to high in steps of the matrix instruction whatever the tile sizes
are, which is why the bits of a column do not depend on how many columns there are.
"""

import triton
import triton.language as tl


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
