"""Dense product and RMS norm: kernel and reference against fp64."""

import pytest
import torch

from spmoe_lite.kernels.linear import linear, linear_reference, swiglu, swiglu_reference
from spmoe_lite.kernels.linear_triton import linear_triton, segment_of
from spmoe_lite.kernels.norm import rms_norm_reference
from spmoe_lite.kernels.norm_triton import rms_norm_triton
from spmoe_lite.precision import scheme_of
from spmoe_lite.quant import QuantizedMatrix, quantize

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double() - want).abs().max()
    assert error <= TOLERANCE[got.dtype] * want.abs().max(), float(error)


# 300 is no multiple of any tile; 264 and 600 in more than one K segment
SHAPES = [(1, 72, 64), (5, 100, 264), (9, 300, 600), (40, 64, 264), (130, 33, 300), (0, 8, 8)]


@pytest.mark.parametrize("tokens, n, k", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_kernel(dtype, tokens, n, k, device):
    x, w = torch.randn(tokens, k).to(device, dtype), torch.randn(n, k).to(device, dtype) * 0.1
    b = torch.randn(n).to(device, dtype)
    y = linear_triton(x, w, b)
    assert y.shape == (tokens, n) and y.dtype == dtype
    if tokens:
        assert_near(linear_triton(x, w), x.double() @ w.double().T)
        assert_near(y, x.double() @ w.double().T + b.double())


@pytest.mark.parametrize("tokens, n, k", [(3, 100, 600), (40, 33, 264)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_residual_is_added_as_by_an_addition_of_its_own(dtype, tokens, n, k, device):
    x, w = torch.randn(tokens, k).to(device, dtype), torch.randn(n, k).to(device, dtype)
    b, residual = torch.randn(n).to(device, dtype), torch.randn(tokens, n).to(device, dtype)
    for product in (linear_triton, linear_reference):
        assert torch.equal(product(x, w, b, residual), residual + product(x, w, b))


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_linear_reference(dtype, tokens):
    x, w = torch.randn(tokens, 256).to(dtype), torch.randn(300, 256).to(dtype) * 0.1
    b = torch.randn(300).to(dtype)
    for bias in (None, b):
        y = linear_reference(x, w, bias)
        assert y.is_contiguous() and y.dtype == dtype
        assert_near(y, x.double() @ w.double().T + (0 if bias is None else bias.double()))


# a block short of a whole step, more than one segment, rows that are no whole tile
CODES = [("int4-g32", 70, 96), ("int4-g32z", 130, 288), ("int4-g64z", 100, 704)]
CODES += [("int4-g128z", 66, 640), ("int8-g32", 70, 160), ("int8-g64", 200, 576)]
CODES += [("int8-g128", 66, 256)]


# with each dtype, and with each number of tiles; what is left of the product takes the interpreter long
RUNS = [(torch.float32, 1), (torch.float16, 9), (torch.float16, 40)]
RUNS += [
    pytest.param(dtype, tokens, marks=pytest.mark.gpu)
    for dtype, tokens in ((torch.float32, 9), (torch.float32, 40), (torch.float16, 1))
]


@pytest.mark.parametrize("dtype, tokens", RUNS)
@pytest.mark.parametrize("scheme, n, k", CODES)
def test_linear_of_codes_matches_fp64_of_what_they_stand_for(scheme, n, k, dtype, tokens, device):
    coded = quantize(torch.randn(n, k) * 0.1, scheme_of(scheme))
    there = QuantizedMatrix(coded.scheme, k, *(part.to(device) for part in coded.tensors()))
    x, b = torch.randn(tokens, k).to(device, dtype), torch.randn(n).to(device, dtype)
    want = x.cpu().double() @ coded.dequantize(dtype).double().T
    assert_near(linear_triton(x, there).cpu(), want)
    assert_near(linear_triton(x, there, b).cpu(), want + b.cpu().double())
    assert_near(linear_reference(x.cpu(), coded), want)


# a tile of half gate, half up that is not full; codes in one segment and in more
GATED = [(None, 70, 72), (None, 200, 600), ("int4-g64z", 100, 704), ("int8-g32", 70, 160)]


@pytest.mark.parametrize("dtype, tokens", [(torch.float32, 0), *RUNS])
@pytest.mark.parametrize("scheme, inner, k", GATED)
def test_swiglu_is_silu_of_the_first_half_times_the_second(scheme, inner, k, dtype, tokens, device):
    whole = torch.randn(2 * inner, k) * 0.1
    x, w = torch.randn(tokens, k).to(device, dtype), whole.to(device, dtype)
    weight, there = w.cpu(), w
    if scheme is not None:
        weight = quantize(whole, scheme_of(scheme))
        there = QuantizedMatrix(weight.scheme, k, *(part.to(device) for part in weight.tensors()))
        w = weight.dequantize(dtype)
    gate, up = (x.cpu().double() @ w.cpu().double().T).chunk(2, dim=1)
    for y in (linear_triton(x, there, gated=True).cpu(), swiglu_reference(x.cpu(), weight)):
        assert y.shape == (tokens, inner) and y.dtype == dtype and y.is_contiguous()
        if tokens:
            assert_near(y, gate / (1 + torch.exp(-gate)) * up)


def test_linear_segments_cover_k_exactly_once():
    for n, k in ((8, 8), (576, 576), (4096, 4096), (14336, 4096), (1024, 4096), (32000, 4100)):
        for coded in (False, True):
            length, count = segment_of(n, k, 64, coded)
            assert length % 256 == 0 and (count - 1) * length < k <= count * length


def test_codes_are_cut_for_the_busiest_multiprocessor():
    """The four products of a layer of Mistral 7B, as measured fastest (H200)."""
    shapes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert [segment_of(n, k, 64, coded=True)[1] for n, k in shapes] == [4, 8, 2, 8]


@pytest.mark.gpu
@pytest.mark.parametrize("n, k", [(4096, 1024), (1000, 2056), (320, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_linear_row_bits_do_not_depend_on_the_other_rows(dtype, n, k):
    x, w = torch.randn(300, k).to("cuda", dtype), torch.randn(n, k).to("cuda", dtype)
    whole = linear(x, w)
    gated = swiglu(x, w)
    for tokens in [*range(1, 33), 33, 64, 129]:
        rows = slice(tokens, 2 * tokens)
        assert torch.equal(linear(x[rows], w), whole[rows]), tokens
        assert torch.equal(swiglu(x[rows], w), gated[rows]), tokens


@pytest.mark.parametrize("norm", [rms_norm_triton, rms_norm_reference])
@pytest.mark.parametrize("tokens, hidden", [(1, 64), (5, 576), (3, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rms_norm(norm, dtype, tokens, hidden, device):
    x, weight = torch.randn(tokens, hidden).to(device, dtype), torch.randn(hidden).to(device, dtype)
    wide = x.double()
    want = wide / torch.sqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    got = norm(x, weight, 1e-5)
    assert got.dtype == dtype
    assert_near(got, want)


@pytest.mark.parametrize("norm", [rms_norm_triton, rms_norm_reference])
def test_norm_of_a_row_does_not_depend_on_the_others(norm, device):
    x, weight = torch.randn(7, 100).to(device, torch.float16), torch.randn(100).to(device)
    whole = norm(x, weight, 1e-5)
    for tokens in range(1, 7):
        assert torch.equal(norm(x[tokens:], weight, 1e-5), whole[tokens:])
    assert norm(x[:0], weight, 1e-5).shape == (0, 100)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [576, 2048, 4096, 7168])
def test_norm_bits_on_the_gpu_do_not_depend_on_the_others(hidden):
    x = torch.randn(600, hidden, device="cuda").bfloat16()
    weight = torch.randn(hidden, device="cuda").bfloat16()
    whole = rms_norm_triton(x, weight, 1e-5)
    for tokens in [*range(1, 33), 300]:
        rows = slice(tokens, 2 * tokens)
        assert torch.equal(rms_norm_triton(x[rows], weight, 1e-5), whole[rows])
