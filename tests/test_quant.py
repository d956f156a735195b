"""Quantised matrices: the bytes as written on the page, and what quantising may lose.

Errors are relative squared errors, beside those of GGUF's Q4_0 on the same numbers: 4.5 bits a weight
with a scale per 32, made by the gguf package.
"""

import gguf
import pytest
import torch

from spmoe_lite import quant
from spmoe_lite.errors import DamagedError, UnsupportedError
from spmoe_lite.precision import GROUPS, Scheme, matrix_bytes, scheme_of
from spmoe_lite.quant import (
    pack_codes,
    pack_scales,
    quantize,
    unpack_codes,
    unpack_scales,
    view_matrix,
)

SCHEMES = [Scheme(8, g) for g in GROUPS]
SCHEMES += [Scheme(4, g, zeros) for g in GROUPS for zeros in (False, True)]
Q4_0 = gguf.GGMLQuantizationType.Q4_0


def gaussian(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.02


def heavy_tailed(rows, columns):
    """Student's t with five degrees of freedom: a normal over the root of a mean of five squares."""
    squares = sum(gaussian(rows, columns, seed) ** 2 for seed in range(1, 6)) / 5
    return gaussian(rows, columns) * 0.02 / squares.sqrt()


def q4_0(weights):
    packed = gguf.quants.quantize(weights.numpy(), Q4_0)
    return torch.from_numpy(gguf.quants.dequantize(packed, Q4_0))


def loss(weights, back):
    return float(((weights - back).double() ** 2).sum() / (weights.double() ** 2).sum())


def per_weight(matrix):
    """Scale, zero and code of every weight, [N, K] each."""
    scales, zeros = unpack_scales(matrix.scales, matrix.scheme)
    wide = [each.t().repeat_interleave(matrix.scheme.group, 1) for each in (scales, zeros)]
    codes = unpack_codes(matrix.codes, matrix.scheme).float()
    return [each[:, : matrix.columns] for each in (*wide, codes)]


# The bytes


def test_four_bits_lie_as_the_page_says():
    """A row holds 0, 1, ..., 15 four times over; word j is column j, 16 + j, 32 + j, 48 + j."""
    row = [j % 16 for j in range(64)]
    other = [15 - j // 16 for j in range(64)]  # 15, 14, 13, 12 in the four parts of every word
    packed = pack_codes(torch.tensor([row, other], dtype=torch.uint8), Scheme(4, 32))
    assert packed.shape == (1, 2, 32)
    assert packed[0, 0].tolist() == [byte for j in range(16) for byte in (17 * j, 17 * j)]
    assert packed[0, 1].tolist() == [0xEF, 0xCD] * 16


def test_eight_bits_lie_as_the_page_says():
    """Byte 2 j is column j, byte 2 j + 1 column 32 + j; the second block follows all rows."""
    codes = torch.arange(256, dtype=torch.int16).view(2, 128).to(torch.uint8)
    packed = pack_codes(codes, Scheme(8, 64))
    assert packed.shape == (2, 2, 64)
    for block in range(2):
        for row in range(2):
            first = 128 * row + 64 * block
            wanted = [first + part + j for j in range(32) for part in (0, 32)]
            assert packed[block, row].tolist() == wanted


def test_a_scale_and_its_zero_share_a_word():
    """fp16 1.0 is 0x3C00; the zero's low three bits are the word's, its highest is the sign."""
    scales, zeros = torch.tensor([[1.0], [0.5], [2.0]]), torch.tensor([[5.0], [13.0], [8.0]])
    words = pack_scales(scales, zeros, Scheme(4, 64, True))
    assert words.shape == (2, 1, 2)
    assert [word & 0xFFFF for word in words.flatten().tolist()] == [0x3C05, 0xB805, 0xC000, 0]
    plain = pack_scales(scales, zeros, Scheme(4, 64))
    assert plain.flatten().tolist() == [0x3C00, 0x3800, 0x4000, 0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_unpacking_is_the_inverse(scheme):
    generator = torch.Generator().manual_seed(3)
    for rows, columns in ((1, 64), (7, 192), (34, 128)):
        codes = torch.randint(0, 2 * scheme.middle, (rows, columns), generator=generator)
        codes = codes.to(torch.uint8)
        assert torch.equal(unpack_codes(pack_codes(codes, scheme), scheme), codes)
        scales = torch.rand(3, rows, generator=generator).bfloat16().float() + 2**-7
        scales = scales.bfloat16().float()
        zeros = torch.randint(0, 16, (3, rows), generator=generator).float()
        back, back_zeros = unpack_scales(pack_scales(scales, zeros, scheme), scheme)
        assert torch.equal(back[:3], scales)
        assert torch.equal(back_zeros[:3], zeros if scheme.zeros else zeros * 0 + scheme.middle)


def test_a_matrix_is_its_run_of_bytes():
    scheme = Scheme(4, 32, True)
    matrix = quantize(gaussian(6, 96), scheme)
    run = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in matrix.tensors()])
    assert len(run) == matrix.nbytes == matrix_bytes("int4-g32z", 6, 96)
    seen = view_matrix(run, scheme, 6, 96)
    assert seen.shape == (6, 96)
    assert torch.equal(seen.dequantize(), matrix.dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_weight_is_code_less_zero_times_scale(scheme, dtype):
    matrix = quantize(gaussian(10, 384), scheme)
    scale, zero, code = per_weight(matrix)
    found = matrix.dequantize(dtype)
    if dtype == torch.bfloat16:  # two roundings: see the module
        assert torch.equal(found, (code * scale - (zero * scale).bfloat16().float()).bfloat16())
        exact = (code - zero) * scale
        assert ((found.float() - exact).abs() <= scale.abs() / 16 + exact.abs() / 256).all()
    else:
        assert torch.equal(found, ((code - zero) * scale).to(dtype))


# What is lost


@pytest.mark.parametrize(
    "name, of_gaussian, of_heavy_tails",
    [
        ("int4-g32", 0.89, 0.915),
        ("int4-g32z", 0.805, 0.69),
        ("int4-g64z", 1.025, 1.007),
        ("int4-g128z", 1.22, 1.38),
        ("int8-g32", 0.0045, 0.0045),
        ("int8-g128", 0.0065, 0.01),
    ],
)
def test_the_loss_beside_q4_0(name, of_gaussian, of_heavy_tails):
    for weights, bound in (
        (gaussian(256, 3072), of_gaussian),
        (heavy_tailed(256, 3072), of_heavy_tails),
    ):
        back = quantize(weights, scheme_of(name)).dequantize()
        assert loss(weights, back) <= bound * loss(weights, q4_0(weights))


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.bits == 4], ids=str)
@pytest.mark.parametrize("offset", [0, 0.04, -0.2])
def test_the_table_finds_the_best_try(scheme, offset):
    """Against every try made in fp64, its scale fitted; also where all weights have one sign."""
    weights = heavy_tailed(64, 1280) + offset
    tries = quant._WITH_ZEROS if scheme.zeros else quant._WITHOUT_ZEROS
    groups = weights.double().view(-1, scheme.group)
    most, least = groups.amax(1, True).clamp(min=0), groups.amin(1, True).clamp(max=0)
    start, middle = (most - least) / 15, 7.5
    if not scheme.zeros:
        start, middle = torch.where(most > -least, most, least) / -8, 8
    centre = (most + least) / 2 if scheme.zeros else 0
    lost = []
    for ratio, step in tries:
        zero = ((middle - centre / start).round() + step).clamp(0, 15)
        codes = (groups / (start * ratio) + zero).round().clamp(0, 15) - zero
        fitted = (codes * groups).sum(1, True) / (codes**2).sum(1, True)
        lost.append(((codes * fitted - groups) ** 2).sum(1))
    best = float(torch.stack(lost).amin(0).sum() / (groups**2).sum())
    assert loss(weights, quantize(weights, scheme).dequantize()) < 1.006 * best


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.bits == 4], ids=str)
def test_a_weight_counts_as_the_64th_nearest_to_it(scheme):
    """The scale is that of a search in fp64, and shifts by almost half a 64th do not change it.

    All weights are negative: a bias does not cancel. The extreme makes the first scale 2^-6. A
    few groups may differ, where tries are as good as each other or a scale lies between two.
    """
    top = 15 if scheme.zeros else 8
    generator = torch.Generator().manual_seed(7)
    normal = torch.randn(640, scheme.group, generator=generator).double()
    places = (normal.abs() * -20 * top).round().clamp(1 - 64 * top, -1)
    exact = places / 64  # in codes of the first scale
    exact[:, 0] = -top
    tries = torch.tensor(quant._WITH_ZEROS if scheme.zeros else quant._WITHOUT_ZEROS).double()
    gains, fitted = [], []
    for ratio, step in tries:
        zero = (top + step).clamp(0, 15)
        codes = (exact / ratio + zero).round().clamp(0, 15) - zero
        product, square = (codes * exact).sum(1), (codes**2).sum(1)
        gains.append((2 * product - ratio * square) * ratio)
        fitted.append(product / square)
    best = torch.stack(gains).argmax(0, keepdim=True)
    wanted = (torch.stack(fitted).gather(0, best)[0] / 64).bfloat16().float()
    for shift in (0, -0.49, 0.49):
        weights = (places + shift) / 64
        weights[:, 0] = -top
        scales = unpack_scales(quantize(weights.float() / 64, scheme).scales, scheme)[0][0]
        assert (scales == wanted).double().mean() > 0.98


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_codes_are_the_nearest_to_the_stored_scale(scheme):
    weights = heavy_tailed(31, 640)
    scale, zero, code = per_weight(quantize(weights, scheme))
    off = weights / scale - (code - zero)
    end = (code == 0) | (code == 2 * scheme.middle - 1)
    assert (off.abs()[~end] <= 0.501).all()
    assert (off[code == 0] <= 0.501).all() and (off[code == 2 * scheme.middle - 1] >= -0.501).all()
    if scheme.bits == 8:
        assert (off.abs() <= 0.75).all()  # the scale is rounded to 8 bits after the largest is 127


def test_weights_on_a_grid_come_back():
    """Q4_0's own grid, and one with zeros whose scales need no rounding."""
    weights = q4_0(gaussian(64, 1024))
    assert loss(weights, quantize(weights, Scheme(4, 32)).dequantize()) < 1e-5
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (32, 15, 64), generator=generator)
    codes[:, :, :2] = torch.tensor([0, 15])
    zeros = torch.randint(0, 16, (32, 15, 1), generator=generator)
    scales = torch.randint(128, 256, (32, 15, 1), generator=generator) / 2**14
    weights = ((codes - zeros) * scales).view(32, 960)
    assert torch.equal(quantize(weights, Scheme(4, 64, True)).dequantize(), weights)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_scales_lose_nothing_in_bf16(scheme):
    """At any size of weights, down to subnormal scales."""
    for size in (1e3, 1.0, 1e-4, 1e-6, 1e-9):
        matrix = quantize(heavy_tailed(9, 384) * size, scheme)
        scales, zeros = unpack_scales(matrix.scales, scheme)
        scales = scales[: 384 // scheme.group]
        assert torch.equal(scales.bfloat16().float(), scales)
        assert (scales != 0).all()
        assert ((zeros >= 0) & (zeros <= 15)).all() or scheme.bits == 8


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_columns_beyond_a_block_are_cut_off_again(scheme):
    for rows, columns in ((2, 96), (9, 320), (1, 128), (70, 1408)):
        if columns % scheme.group == 0:
            weights = gaussian(rows, columns)
            back = quantize(weights.bfloat16(), scheme).dequantize()
            assert back.shape == weights.shape
            assert loss(weights, back) < (1e-4 if scheme.bits == 8 else 0.02)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_has_the_same_bits_in_any_company(scheme, monkeypatch):
    """Whatever the rows beside it, the rows in work at once, the threads, the strides."""
    weights = heavy_tailed(37, 1408)
    if weights.shape[1] % scheme.group:
        weights = weights[:, :1280]
    weights[::3, :128] = 0
    weights[3::6, :128] = -0.0
    whole = quantize(weights, scheme)

    def same(matrix, rows):
        for some, of_whole in zip(matrix.tensors(), whole.tensors(), strict=True):
            assert torch.equal(some, of_whole[:, rows])

    for rows in (slice(0, 1), slice(36, 37), slice(3, 20)):
        same(quantize(weights[rows], scheme), rows)
    same(quantize(weights.t().contiguous().t(), scheme), slice(None))
    same(quantize(weights + 0.0, scheme), slice(None))  # the sign of a zero weight is nothing
    threads = torch.get_num_threads()
    try:
        for count, tile in ((1, 1 << 19), (3, 1 << 19), (2, 5000), (2, 1)):
            torch.set_num_threads(count)
            monkeypatch.setattr(quant, "_TILE", tile)
            same(quantize(weights, scheme), slice(None))
    finally:
        torch.set_num_threads(threads)


# The ends of the range


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_zeros_stay_zeros(scheme):
    weights = gaussian(5, 384)
    weights[1] = 0
    weights[3, 128:256] = 0
    back = quantize(weights, scheme).dequantize()
    assert not back[1].any() and not back[3, 128:256].any()
    assert back[0].any() and back[3, 256:].any()
    assert not quantize(weights * 0, scheme).dequantize().any()


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_weights_too_small_for_a_scale_are_rounded_to_the_least(scheme):
    """Half the smallest scale is lost at most: 2^-24, and 2^-21 where zeros lie in its bits."""
    least = 2.0**-21 if scheme.zeros else 2.0**-24
    for size in (1e-6, 1e-7, 1e-20, 1e-38, 1e-45):
        weights = gaussian(6, 384) * size
        back = quantize(weights, scheme).dequantize()
        assert ((weights - back).abs() <= least / 2).all()
    weights = gaussian(6, 384) * 5e-4  # scales of a few times the least
    assert loss(weights, quantize(weights, scheme).dequantize()) < 0.02


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_large_weights_fit_until_their_scale_does_not(scheme):
    top = scheme.middle - 1  # the widest scale is a group's extreme over this
    weights = heavy_tailed(6, 384)
    weights /= weights.abs().max()
    high = weights * 0.85 * 65504 * top
    assert loss(high, quantize(high, scheme).dequantize()) < 0.03
    for size in (1.9 * 65504 * scheme.middle, 1e8, 1e20, 3e38):
        with pytest.raises(UnsupportedError, match=f"^layer 3: w1 has weights up to .* {scheme};"):
            quantize(weights * size, scheme, name="layer 3: w1")


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_is_refused_by_name(scheme, value):
    weights = gaussian(9, 384)
    weights[8, 383] = value
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        with pytest.raises(DamagedError, match="^layer 3: w1 has weights that are not finite"):
            quantize(weights.to(dtype), scheme, name="layer 3: w1")


@pytest.mark.parametrize(
    "columns, group, advice",
    [
        (96, 64, "use a group of 32"),
        (320, 128, "use a group of 32 or 64"),
        (32, 128, "use a group of 32"),
        (80, 32, "keep it in floats"),
    ],
)
def test_columns_that_are_not_whole_groups_are_refused(columns, group, advice):
    wanted = f"^w2 has {columns} columns, not a multiple of the group of {group}; {advice}$"
    with pytest.raises(UnsupportedError, match=wanted):
        quantize(gaussian(4, columns), Scheme(4, group), name="w2")
    for fitting in GROUPS:
        assert (columns % fitting == 0) == (str(fitting) in advice.split())


def test_codes_are_weights_in_bf16_by_one_multiplication_and_addition():
    """What the kernel computes, for every code and zero and scales from the least to the largest:
    (code 2^-133) S + C in bf16, lifted by 2^32, against the definition (`kernels/tile_triton.py`)."""
    code = torch.arange(256, dtype=torch.float64)[:, None, None]
    zero = torch.arange(256, dtype=torch.float64)[None, :, None]
    bits = torch.arange(1, 0x7C00, 97, dtype=torch.int16) & 0x7FF8  # 8 significant, fp16
    scale = bits.view(torch.float16).double()[None, None, :]
    assert scale.min() == 0 and scale.max() > 6e4 and (scale > 0).sum() > 250

    def rounded(x):
        return x.float().bfloat16().double()

    s = rounded(scale * 2.0**101)
    c = rounded(-zero * 2.0**-133 * s)
    lifted = rounded(code * 2.0**-133 * s + c) * 2.0**32
    assert s.isfinite().all() and torch.equal(s, scale * 2.0**101)
    assert torch.equal(lifted, rounded(code * scale - rounded(zero * scale)))
