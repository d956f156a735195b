"""The experts' kernels: what they compute, what they leave alone, what their bits depend on."""

import mmap

import numpy as np
import pytest
import torch

from spmoe_lite.kernels import expert_gemm as door
from spmoe_lite.kernels import expert_gemm_triton as kernels
from spmoe_lite.kernels.expert_gemm_triton import (
    combine_triton,
    expert_down_triton,
    expert_up_triton,
)
from spmoe_lite.precision import ExpertLayout, matrix_bytes, scheme_of
from spmoe_lite.quant import quantize, view_matrix

TOLERANCE = {"fp32": 1e-5, "fp16": 2e-3, "bf16": 2e-2}


def make_layout(dtype: str, hidden: int, inner: int) -> ExpertLayout:
    size = hidden * inner * door.DTYPES[dtype].itemsize
    return ExpertLayout(dtype, hidden, inner, 0, size, 2 * size, -(-3 * size // 65536) * 65536)


class Experts:
    """`count` random experts in one slab, a second slab to write through to, and routed tokens."""

    def __init__(self, dtype, tokens, k, count, hidden, inner, device, routed=None):
        self.layout = make_layout(dtype, hidden, inner)
        self.dtype = door.DTYPES[dtype]
        self.count, self.k = count, k
        generator = torch.Generator().manual_seed(tokens)
        elements = count * self.layout.stride // self.dtype.itemsize
        weights = torch.randn(elements, generator=generator) * 0.2
        self.slab = weights.to(self.dtype).to(device)
        self.copies = torch.full_like(self.slab, 7.0)
        self.x = torch.randn(tokens, hidden, generator=generator).to(self.dtype).to(device)
        scores = torch.rand(tokens, routed or count, generator=generator)
        self.ids = scores.topk(k).indices.int().to(device)

    def use(self, ids, copied=()) -> torch.Tensor:
        stride, slab, copies = self.layout.stride, self.slab.data_ptr(), self.copies.data_ptr()
        lines = [[e, slab + e * stride, copies + e * stride if e in copied else 0] for e in ids]
        return torch.tensor(lines, dtype=torch.int64, device=self.slab.device)

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, layout = len(self.x), self.layout
        shapes = (tokens, self.k, layout.intermediate_size), (tokens, self.k, layout.hidden_size)
        return tuple(self.x.new_full(shape, float("nan")) for shape in shapes)

    def run(self, up, down, use) -> tuple[torch.Tensor, torch.Tensor]:
        h, out = self.outputs()
        up(self.x, self.ids, use, self.layout, h)
        down(h, self.ids, use, self.layout, out)
        return h, out

    def weights(self, slab, expert) -> torch.Tensor:
        per_expert = slab.view(self.count, -1)[expert]
        return per_expert[: 3 * self.layout.hidden_size * self.layout.intermediate_size]


def expected(case: Experts, ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in fp64, from the definition, one row and choice at a time."""
    h, out = (t.double().cpu() for t in case.outputs())
    hidden, inner = case.layout.hidden_size, case.layout.intermediate_size
    for (t, j), e in np.ndenumerate(case.ids.cpu().numpy()):
        if e in ids:
            flat = case.weights(case.slab, int(e)).double().cpu()
            gate, up, down = flat.split(hidden * inner)
            x = case.x[t].double().cpu()
            g, u = gate.view(inner, hidden) @ x, up.view(inner, hidden) @ x
            h[t, j] = g / (1 + torch.exp(-g)) * u
            out[t, j] = down.view(hidden, inner) @ h[t, j]
    return h, out


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: str) -> None:
    """Equal to within the dtype's tolerance of the largest value; NaN in the same places."""
    got = got.double().cpu()
    assert torch.equal(got.isnan(), want.isnan())
    error = (got - want).nan_to_num().abs().max()
    assert error <= TOLERANCE[dtype] * want.nan_to_num().abs().max(), float(error)


SHAPES = [  # tokens, k, experts, hidden, inner
    (1, 2, 4, 64, 96),
    (5, 2, 4, 72, 104),
    (17, 3, 5, 64, 40),
    (40, 2, 4, 64, 96),
    (70, 1, 3, 48, 33),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_kernels_match_fp64_and_touch_no_other_row(dtype, shape, device):
    case = Experts(dtype, *shape, device)
    served = range(1, case.count)  # expert 0 belongs to another group: its rows stay poisoned
    use = torch.cat([case.use(served), torch.tensor([[-1, 0, 0]], device=device)])
    h, out = case.run(expert_up_triton, expert_down_triton, use)
    want_h, want_out = expected(case, served)
    assert_near(h, want_h, dtype)
    assert_near(out, want_out, dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_reference_matches_fp64_and_touches_no_other_row(dtype, shape):
    case = Experts(dtype, *shape, "cpu")
    served = range(1, case.count)
    h, out = case.run(door.expert_up, door.expert_down, case.use(served))
    want_h, want_out = expected(case, served)
    assert_near(h, want_h, dtype)
    assert_near(out, want_out, dtype)


class CodedExperts(Experts):
    """The same of quantised experts; what they stand for is known as `matrices[expert]`."""

    def __init__(self, scheme, dtype, tokens, k, count, hidden, inner, device):
        super().__init__("fp32", tokens, k, count, hidden, inner, device)
        up = -(-matrix_bytes(scheme, inner, hidden) // 64) * 64
        size = 2 * up + matrix_bytes(scheme, hidden, inner)
        stride = -(-size // 65536) * 65536
        self.layout = ExpertLayout(scheme, hidden, inner, 0, up, 2 * up, stride)
        self.dtype, self.size = door.DTYPES[dtype], size
        self.x = self.x.to(self.dtype)
        self.slab = torch.zeros(count * stride, dtype=torch.uint8)
        self.copies = torch.full_like(self.slab, 7, device=device)
        self.matrices = []
        shapes = ((0, (inner, hidden)), (up, (inner, hidden)), (2 * up, (hidden, inner)))
        for one in self.slab.view(count, stride):
            found = []
            for at, shape in shapes:
                matrix = quantize(torch.randn(shape) * 0.2, scheme_of(scheme))
                place = view_matrix(one[at:][: matrix.nbytes], scheme_of(scheme), *shape)
                for part, where in zip(matrix.tensors(), place.tensors(), strict=True):
                    where.copy_(part)
                found.append(matrix.dequantize(self.dtype).double())
            self.matrices.append(found)
        self.slab = self.slab.to(device)


# a block short of a whole step, a group more than K has blocks, rows that are no whole tile
CODES = [("int4-g32", 96, 160), ("int4-g32z", 128, 96), ("int4-g64z", 192, 320)]
CODES += [("int4-g128z", 384, 128), ("int8-g32", 96, 160), ("int8-g64", 192, 128)]
CODES += [("int8-g128", 128, 384)]


# with each dtype, and with each number of tiles; what is left of the product takes the interpreter long
RUNS = [(dtype, tokens, "reference") for dtype in ("fp32", "fp16") for tokens in (1, 5, 40)]
RUNS += [("fp32", 1, "kernel"), ("fp16", 5, "kernel"), ("fp16", 40, "kernel")]
RUNS += [
    pytest.param(dtype, tokens, "kernel", marks=pytest.mark.gpu)
    for dtype, tokens in (("fp32", 5), ("fp32", 40), ("fp16", 1))
]


@pytest.mark.parametrize("dtype, tokens, kind", RUNS)
@pytest.mark.parametrize("scheme, hidden, inner", CODES)
def test_codes_match_fp64_of_what_they_stand_for(
    scheme, hidden, inner, dtype, tokens, kind, device
):
    """Rows of the group served; the rest stays poisoned; the bytes arrive at the second address."""
    case = CodedExperts(scheme, dtype, tokens, 2, 4, hidden, inner, device)
    up, down = expert_up_triton, expert_down_triton
    if kind == "reference":
        up, down = door.expert_up, door.expert_down
        case.slab, case.copies = case.slab.cpu(), case.copies.cpu()
        case.x, case.ids = case.x.cpu(), case.ids.cpu()
    served = range(1, 4)
    h, out = case.run(up, down, case.use(served, copied=[1, 3]))
    stride, hit = case.layout.stride, set(case.ids.flatten().tolist())
    want_h, want_out = (torch.full_like(t.cpu().double(), float("nan")) for t in (h, out))
    for (t, j), e in np.ndenumerate(case.ids.cpu().numpy()):
        if e in served:
            gate, up_matrix, down_matrix = case.matrices[e]
            x = case.x[t].double().cpu()
            g = gate @ x
            want_h[t, j] = g / (1 + torch.exp(-g)) * (up_matrix @ x)
            want_out[t, j] = down_matrix @ h[t, j].double().cpu()
    assert_near(h, want_h, dtype)
    assert_near(out, want_out, dtype)
    for e in range(4):
        want = case.slab[e * stride :][: case.size]
        if e not in (1, 3) or e not in hit:
            want = torch.full_like(want, 7)
        got = case.copies[e * stride : (e + 1) * stride]
        # Between the matrices lies nothing that a kernel reads.
        ends = [case.layout.up_offset, 2 * case.layout.up_offset, case.size]
        sizes = [matrix_bytes(scheme, inner, hidden)] * 2 + [matrix_bytes(scheme, hidden, inner)]
        for size, at in zip(sizes, [0, *ends[:2]], strict=True):
            assert torch.equal(got[at : at + size], want[at : at + size]), (e, at)
        assert (got[case.size :] == 7).all()


@pytest.mark.parametrize("tokens", [3, 40])
@pytest.mark.parametrize("kind", ["kernel", "reference"])
def test_write_through_copies_what_was_read_and_nothing_else(kind, tokens, device):
    case = Experts("fp16", tokens, 2, 5, 64, 40, device if kind == "kernel" else "cpu", routed=4)
    up, down = (
        (expert_up_triton, expert_down_triton)
        if kind == "kernel"
        else (door.expert_up, door.expert_down)
    )
    served = sorted(set(case.ids.flatten().tolist()) | {4})  # nobody chose expert 4
    plain = case.run(up, down, case.use(served))
    copied = case.run(up, down, case.use(served, copied=[served[0], 4]))
    assert torch.equal(plain[0], copied[0]) and torch.equal(plain[1], copied[1])
    for e in range(5):
        want = case.weights(case.slab, e) if e == served[0] else torch.full_like(case.slab[:1], 7.0)
        assert (case.weights(case.copies, e) == want).all()
    assert (case.copies.view(5, -1)[:, len(case.weights(case.slab, 0)) :] == 7.0).all()


@pytest.mark.parametrize("tokens", [1, 6, 50])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_reference_bits_do_not_depend_on_grouping(dtype, tokens):
    case = Experts(dtype, tokens, 2, 4, 64, 96, "cpu")
    together = case.run(door.expert_up, door.expert_down, case.use(range(4)))
    h, out = case.outputs()
    for group in ([3], [1, 0], [2]):
        door.expert_up(case.x, case.ids, case.use(group), case.layout, h)
        door.expert_down(h, case.ids, case.use(group), case.layout, out)
    assert torch.equal(h, together[0]) and torch.equal(out, together[1])


def test_all_tokens_on_one_expert(device):
    case = Experts("fp32", 45, 1, 3, 64, 40, device)
    case.ids.fill_(2)
    h, out = case.run(expert_up_triton, expert_down_triton, case.use([0, 1, 2]))
    want_h, want_out = expected(case, [2])
    assert_near(h, want_h, "fp32")
    assert_near(out, want_out, "fp32")


def test_no_tokens_and_no_experts_are_no_work(device):
    case = Experts("fp32", 3, 2, 4, 64, 40, device)
    h, out = case.run(expert_up_triton, expert_down_triton, case.use([]).view(0, 3))
    assert h.isnan().all() and out.isnan().all()
    case.x, case.ids = case.x[:0], case.ids[:0]
    for up, down in ((expert_up_triton, expert_down_triton), (door.expert_up, door.expert_down)):
        h, out = case.run(up, down, case.use([0, 1]))
        assert h.shape == (0, 2, 40) and out.shape == (0, 2, 64)


@pytest.mark.parametrize("tokens, k, hidden", [(1, 2, 64), (7, 3, 1100)])
def test_combine_adds_in_the_routers_order(tokens, k, hidden, device):
    partial = torch.randn(tokens, k, hidden, device=device)
    weights = torch.rand(tokens, k, device=device)
    want = (partial.double() * weights.double()[..., None]).sum(1).float()
    torch.testing.assert_close(combine_triton(partial, weights), want)
    torch.testing.assert_close(door.combine_reference(partial, weights), want)
    # 1e8 - 1e8 + 1 is 1 in this order only
    partial = (
        torch.tensor([1e8, -1e8, 1.0], device=device).view(1, 3, 1).expand(1, 3, 5).contiguous()
    )
    ones = torch.ones(1, 3, device=device)
    assert (combine_triton(partial, ones) == 1).all()
    assert (door.combine_reference(partial, ones) == 1).all()
    assert (combine_triton(partial[:, [0, 2, 1]].contiguous(), ones) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_combine_adds_a_residual_as_by_an_addition_of_its_own(dtype, device):
    partial = torch.randn(7, 3, 1100).to(device, dtype)
    weights, residual = torch.rand(7, 3, device=device), torch.randn(7, 1100).to(device, dtype)
    for function in (combine_triton, door.combine_reference):
        want = residual + function(partial, weights)
        assert torch.equal(function(partial, weights, residual), want)


@pytest.mark.parametrize(
    "scheme, hidden, inner, dtype",
    [
        ("int4-g64z", 64, 704, torch.float32),
        ("int8-g32", 96, 544, torch.float16),
        pytest.param("int4-g64z", 64, 704, torch.float16, marks=pytest.mark.gpu),
        pytest.param("int8-g32", 96, 544, torch.float32, marks=pytest.mark.gpu),
    ],
)
def test_segments_of_down_apart_or_in_one_walk_give_equal_bits(
    scheme, hidden, inner, dtype, monkeypatch, device
):
    """The last segment is short; written through too; combine rounds the sum as the walk does."""
    monkeypatch.setattr(kernels, "down_segments", lambda layout: (256, -(-inner // 256)))
    name = {torch.float32: "fp32", torch.float16: "fp16"}[dtype]
    case = CodedExperts(scheme, name, 5, 2, 4, hidden, inner, device)
    h, walked = case.run(expert_up_triton, expert_down_triton, case.use(range(4)))
    apart = torch.full((-(-inner // 256), 5, 2, hidden), float("nan"), device=device)
    expert_down_triton(h, case.ids, case.use(range(4), copied=range(4)), case.layout, apart)
    weights = torch.rand(5, 2, device=device)
    got = combine_triton(apart, weights, dtype=dtype)
    assert got.dtype == dtype and torch.equal(got, combine_triton(walked, weights))
    reference = door.combine_reference(apart, weights, dtype=dtype)
    torch.testing.assert_close(reference, got)
    for t, j in np.ndindex(5, 2):
        want = case.matrices[int(case.ids[t, j])][2] @ h[t, j].double().cpu()
        assert_near(walked[t, j], want, name)
    down = slice(case.layout.down_offset, case.size)
    for e in set(case.ids.flatten().tolist()):
        same = (one.view(4, case.layout.stride)[e][down] for one in (case.copies, case.slab))
        assert torch.equal(*same)


def test_kind_k_last_slot_of_a_slab_beyond_2_31_elements(device):
    """O32: the same expert in the first and in the last slot gives equal bits; guards unchanged."""
    case = Experts("fp16", 5, 1, 1, 64, 40, device)
    stride = case.layout.stride
    slots = (1 << 32) // stride + 3  # beyond 2^32 bytes, so beyond 2^31 fp16 elements
    if device == "cpu":  # pages that nobody touches cost nothing
        memory = mmap.mmap(-1, slots * stride)
        slab = torch.frombuffer(memory, dtype=torch.uint8)
    else:
        slab = torch.empty(slots * stride, dtype=torch.uint8, device=device)
    one = case.slab.view(torch.uint8)
    last = slots - 2
    slab[:stride], slab[last * stride :][:stride] = one, one
    guards = [slab[(last - 1) * stride :][:stride], slab[(last + 1) * stride :]]
    for guard in guards:
        guard.fill_(171)
    outs = []
    for slot in (0, last):
        use = torch.tensor([[0, slab.data_ptr() + slot * stride, 0]], device=device)
        outs.append(case.run(expert_up_triton, expert_down_triton, use)[1])
    far = slab.data_ptr() + last * stride
    slab[last * stride :][:stride].zero_()
    use = torch.tensor([[0, slab.data_ptr(), far]], device=device)
    case.run(expert_up_triton, expert_down_triton, use)
    assert torch.equal(*outs) and not outs[0].isnan().any()
    used = 3 * 64 * 40 * 2
    assert torch.equal(slab[last * stride :][:used], one[:used])
    assert all((guard == 171).all() for guard in guards)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_row_bits_do_not_depend_on_the_other_rows(dtype):
    case = Experts(dtype, 300, 2, 8, 512, 1032, "cuda")
    h, out = case.run(door.expert_up, door.expert_down, case.use(range(8)))
    all_x, all_ids = case.x, case.ids
    for tokens in [*range(1, 33), 33, 64, 129]:
        rows = slice(tokens, 2 * tokens)
        case.x, case.ids = all_x[rows], all_ids[rows].clone()
        got_h, got = case.run(door.expert_up, door.expert_down, case.use(range(8)))
        assert torch.equal(got_h, h[rows]) and torch.equal(got, out[rows]), tokens
