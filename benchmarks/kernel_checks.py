"""Every kernel against fp64, its guard words, and the bits of a row for every number of rows.

`CHECKS` is what `kernels.py` runs, each item in a process of its own: a function and its arguments.
"""

import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from kernel_data import DEVICE, layout, random, routing, table, weights

from spmoe_lite import timing
from spmoe_lite.kernels.attention import attention, attention_reference
from spmoe_lite.kernels.expert_gemm import DTYPES, combine, expert_down, expert_up, new_partial
from spmoe_lite.kernels.gate import gate_topk, gate_topk_reference
from spmoe_lite.kernels.linear import linear
from spmoe_lite.kernels.norm import rms_norm, rms_norm_reference
from spmoe_lite.kernels.rope import rope_and_store, rope_and_store_reference
from spmoe_lite.pack import view_weight
from spmoe_lite.precision import ExpertLayout, matrix_bytes, scheme_of

SCHEMES = ("int4-g32", "int4-g32z", "int4-g64z", "int4-g128z", "int8-g32", "int8-g64", "int8-g128")
TOLERANCE = {"fp32": 2e-6, "bf16": 6e-3, "fp16": 8e-4}  # relative error of a whole output, in norm
COUNTS = [*range(1, 33), 33, 100, 257]
SAME_BITS = "row bits for T = 1 .. 32, 33, 100, 257 and all"


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


class Checks:
    """Named results; a False or an error above its bound is a failure."""

    def __init__(self, group: str):
        self.group, self.results, self.failures = group, {}, []

    def error(self, name: str, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        value = relative_error(got, want)
        self.results[name] = value
        if not value <= bound:  # NaN fails too
            self.failures.append(f"{self.group}: {name}: relative error {value:.2e} > {bound:.0e}")

    def true(self, name: str, value: bool) -> None:
        self.results[name] = bool(value)
        if not value:
            self.failures.append(f"{self.group}: {name} does not hold")


def parts_of(rows: int, counts: Iterable[int] = COUNTS) -> Iterator[slice]:
    """So many rows of them, from somewhere."""
    for count in counts:
        start = count * 53 % (rows - count)
        yield slice(start, start + count)


def same_bits(whole: torch.Tensor, run: Callable[[slice], torch.Tensor]) -> bool:
    return all(torch.equal(run(part), whole[part]) for part in parts_of(len(whole)))


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled tensor between two runs of 4096 guard elements, and the whole."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 8192,), float("nan"), dtype=dtype, device=DEVICE)
    whole[:4096] = 77.0
    whole[-4096:] = 77.0
    return whole[4096:-4096].view(shape), whole


def guards_hold(whole: torch.Tensor) -> bool:
    return bool((whole[:4096] == 77.0).all() and (whole[-4096:] == 77.0).all())


def run_experts(x, experts, use, shape: ExpertLayout) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Results of up and of down, its segments added, and whether the guards hold."""
    partial = new_partial(x, experts, shape)
    h, h_whole = guarded((*experts.shape, shape.intermediate_size), x.dtype)
    out, out_whole = guarded(partial.shape, partial.dtype)
    expert_up(x, experts, use, shape, h)
    expert_down(h, experts, use, shape, out)
    guards = guards_hold(h_whole) and guards_hold(out_whole)
    return h, functools.reduce(torch.add, out).to(x.dtype) if out.dim() == 4 else out, guards


def matrices(one: torch.Tensor, shape: ExpertLayout, dtype: torch.dtype) -> list[torch.Tensor]:
    """gate, up and down of one expert [stride], in fp64."""
    wide, found = (shape.intermediate_size, shape.hidden_size), []
    offsets = shape.gate_offset, shape.up_offset, shape.down_offset
    for at, size in zip(offsets, (wide, wide, wide[::-1]), strict=True):
        run = one[at : at + matrix_bytes(shape.dtype, *size)]
        weight = view_weight(run, shape.dtype, size)
        found.append((weight if torch.is_tensor(weight) else weight.dequantize(dtype)).double())
    return found


def check_experts(stored: str, dtype: str) -> Checks:
    """Experts stored in floats or codes; the last one has no rows."""
    checks = Checks(f"experts {stored} in {dtype}")
    hidden, inner, count, choices = 1024, 1408 if scheme_of(stored) else 1416, 6, 2
    shape, torch_dtype = layout(stored, hidden, inner), DTYPES[dtype]
    slab = timing.random_experts(shape, count, DEVICE)
    copies = torch.full_like(slab, 171)
    x = random((700, hidden), torch_dtype, seed=1)
    experts = routing(700, 2, count - 1, choices)
    ids = list(range(count))
    h, out, guards = run_experts(x, experts, table(ids, slab, copies), shape)
    checks.true("guard words, prefill", guards)
    want_h, want_out = torch.empty_like(h).double(), torch.empty_like(out).double()
    for e in ids[:-1]:
        gate, up, down = matrices(slab[e], shape, torch_dtype)
        row, choice = torch.nonzero(experts == e, as_tuple=True)
        rows = x[row].double()
        want_h[row, choice] = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        want_out[row, choice] = h[row, choice].double() @ down.T
    checks.error("up against fp64", h, want_h, TOLERANCE[dtype])
    checks.error("down against fp64", out, want_out, TOLERANCE[dtype])
    end = shape.down_offset + matrix_bytes(stored, hidden, inner)
    for e in ids:
        want = slab[e].clone() if e < count - 1 else torch.full_like(slab[e], 171)
        want[end:] = 171
        checks.true(f"write-through of expert {e}", torch.equal(copies[e], want))

    plain = table(ids, slab)
    same = True
    for part in parts_of(700):
        got_h, got, guards = run_experts(x[part], experts[part].clone(), plain, shape)
        same &= guards and torch.equal(got_h, h[part]) and torch.equal(got, out[part])
    checks.true(SAME_BITS, same)
    grouped_h, grouped = torch.empty_like(h[:5]), new_partial(x[:5], experts[:5], shape)
    for line in reversed(plain.split(1)):
        expert_up(x[:5], experts[:5], line.clone(), shape, grouped_h)
        expert_down(grouped_h, experts[:5], line.clone(), shape, grouped)
    shares = torch.rand(700, choices, device=DEVICE)
    y = combine(out, shares)
    same = torch.equal(combine(grouped, shares[:5], dtype=torch_dtype), y[:5])
    checks.true("row bits for any grouping, combined", same)
    everyone = torch.tensor([[3, 0]], dtype=torch.int32, device=DEVICE).repeat(700, 1)
    _, got, guards = run_experts(x, everyone, plain, shape)
    _, one, _ = run_experts(x[650:651], everyone[:1], plain, shape)
    checks.true("all tokens on two experts", guards and torch.equal(got[650:651], one))

    want = (out.double() * shares.double()[..., None]).sum(1)
    checks.error("combine against fp64", y, want, TOLERANCE[dtype])
    return checks


def check_far_slot() -> Checks:
    """First and last slot of a slab of more than 2^31 elements, reading and writing through."""
    checks = Checks("64-bit offsets")
    shape = layout("bf16", 256, 512)
    slots = (1 << 32) // shape.stride + 3  # bytes beyond 2^32, bf16 elements beyond 2^31
    slab = torch.full((slots, shape.stride), 171, dtype=torch.uint8, device=DEVICE)
    last = slots - 2  # the slot after it is the guard
    slab[0] = slab[last] = random(shape.stride // 2, torch.bfloat16, 0.1).view(torch.uint8)
    x = random((5, 256), torch.bfloat16)
    experts = torch.zeros(5, 1, dtype=torch.int32, device=DEVICE)
    outs = [run_experts(x, experts, table([0], slab[slot:]), shape)[1] for slot in (0, last)]
    checks.true("first and last slot give equal bits", torch.equal(*outs))
    run_experts(x, experts, table([0], slab, slab[last - 1 :]), shape)
    used = 3 * 256 * 512 * 2
    checks.true("write-through to a far slot", torch.equal(slab[last - 1, :used], slab[0, :used]))
    for name, slot in (("before", last - 2), ("after", last + 1)):
        checks.true(f"the slot {name} is untouched", bool((slab[slot] == 171).all()))
    return checks


def check_linear(stored: str, dtype: str) -> Checks:
    checks = Checks(f"linear {stored} in {dtype}")
    coded, torch_dtype = scheme_of(stored) is not None, DTYPES[dtype]
    for n, k in ((1000, 2176 if coded else 2056), (4096, 1024), (320, 128 if coded else 64)):
        w = weights(stored, (n, k), 1)[0]
        wide = (w.dequantize(torch_dtype) if coded else w).double()
        x, b = random((700, k), torch_dtype, seed=4), random(n, torch_dtype, seed=3)
        for bias in (b,) if coded else (None, b):
            name = f"{n} x {k}" + (" + bias" if bias is not None else "")
            y = linear(x, w, bias)
            want = x.double() @ wide.T + (0 if bias is None else bias.double())
            checks.error(f"{name} against fp64", y, want, TOLERANCE[dtype])
            same = same_bits(y, lambda part, x=x, w=w, bias=bias: linear(x[part], w, bias))
            checks.true(f"{name}: {SAME_BITS}", same)
    return checks


def check_attention(dtype: str, head_dim: int) -> Checks:
    checks = Checks(f"attention {dtype} D={head_dim}")
    torch_dtype, total = DTYPES[dtype], 900
    for heads, heads_kv, window in ((8, 2, None), (8, 2, 300), (3, 1, None), (4, 4, 37)):
        q = random((total, heads, head_dim), torch_dtype, seed=5)
        k = random((total + 50, heads_kv, head_dim), torch_dtype, seed=6)
        v = random((total + 50, heads_kv, head_dim), torch_dtype, seed=7)
        k[total:], v[total:] = float("nan"), float("nan")
        name = f"{heads}/{heads_kv} heads, window {window}"
        whole = attention(q, k, v, 0, window)
        want = attention_reference(q.double(), k.double(), v.double(), 0, window)
        checks.error(f"{name} against fp64", whole, want, TOLERANCE[dtype])

        def run(part, q=q, k=k, v=v, window=window):
            return attention(q[part], k, v, part.start, window)

        checks.true(f"{name}: {SAME_BITS}", same_bits(whole, run))
    return checks


def check_long_attention(dtype: str) -> Checks:
    """Splits of every length: the last rows of a long prefill against decode and verify."""
    checks = Checks(f"attention {dtype} long context")
    torch_dtype, total = DTYPES[dtype], 18000
    q = random((total, 8, 128), torch_dtype, seed=5)
    k = random((total, 2, 128), torch_dtype, seed=6)
    v = random((total, 2, 128), torch_dtype, seed=7)
    for window in (None, 4096):
        whole = attention(q, k, v, 0, window)
        start = total - 40
        wide = (t.double() for t in (q[start:], k, v))
        want = attention_reference(*wide, start, window)
        checks.error(f"window {window} against fp64", whole[start:], want, TOLERANCE[dtype])
        same = True
        for tokens in [*range(1, 33), 33, 128, 700]:
            for start in (total - tokens, 1000, 4000, 9000, 16300):
                got = attention(q[start : start + tokens], k, v, start, window)
                same &= torch.equal(got, whole[start : start + tokens])
        checks.true(f"window {window}: row bits for T = 1 .. 32, 33, 128, 700, {total}", same)
    return checks


def check_small(dtype: str) -> Checks:
    checks = Checks(f"gate, norm, rope {dtype}")
    torch_dtype = DTYPES[dtype]
    for experts, hidden, k in ((8, 4096, 2), (128, 2048, 8), (64, 1000, 6), (7, 72, 1)):
        x, router = random((100, hidden), torch_dtype), random((experts, hidden), torch_dtype, 0.02)
        shares, chosen = gate_topk(x, router, k)
        want_shares, want = gate_topk_reference(x.double().float(), router, k)
        checks.true(f"gate {experts} of {hidden}: ids", torch.equal(chosen, want))
        checks.error(f"gate {experts} of {hidden}: weights", shares, want_shares, 1e-5)
        alone = gate_topk(x[41:42], router, k)
        same = torch.equal(alone[0], shares[41:42]) and torch.equal(alone[1], chosen[41:42])
        checks.true(f"gate {experts} of {hidden}: row bits", same)
    tied = random((8, 4096), torch_dtype)
    tied[5] = tied[1]
    ids = gate_topk(tied[1:2] * 1, tied, 2)[1]
    checks.true("gate: the lowest id wins a tie", ids.tolist() == [[1, 5]])
    bad = torch.full((1, 4096), float("nan"), dtype=torch_dtype, device=DEVICE)
    shares, ids = gate_topk(bad, tied, 2)
    checks.true("gate: NaN", bool(shares.isnan().all()) and ids.tolist() == [[0, 1]])

    for hidden in (4096, 576, 72):
        x, weight = random((33, hidden), torch_dtype), random(hidden, torch_dtype, seed=8)
        y = rms_norm(x, weight, 1e-5)
        want = rms_norm_reference(x.double(), weight.double(), 1e-5)
        checks.error(f"norm {hidden}", y, want, TOLERANCE[dtype])
        checks.true(f"norm {hidden}: row bits", torch.equal(rms_norm(x[7:8], weight, 1e-5), y[7:8]))
    q, angle = random((33, 9, 80), torch_dtype), random((64, 40), torch.float32, 3.0)
    k, v = (random((33, 3, 80), torch_dtype, seed=seed) for seed in (9, 10))
    found = []
    for run in (rope_and_store, rope_and_store_reference):
        caches = [torch.zeros(64, 3, 80, dtype=torch_dtype, device=DEVICE) for _ in "kv"]
        found.append([run(q, k, v, angle.cos(), angle.sin(), 20, *caches), *caches])
    for name, got, want in zip(("q", "k", "v"), *found, strict=True):
        checks.error(f"rope: {name}", got, want, TOLERANCE[dtype])
    return checks


FLOATS = ("bf16", "fp16", "fp32")
STORED = [(dtype, dtype) for dtype in FLOATS] + [(scheme, "bf16") for scheme in SCHEMES]
STORED += [(scheme, "fp16") for scheme in ("int4-g32", "int4-g64z", "int8-g64")]
STORED += [("int4-g64z", "fp32")]
CHECKS = [(check_far_slot, ()), *((check_long_attention, (d,)) for d in ("bf16", "fp16"))]
for _dtype in FLOATS:
    CHECKS += [(check_small, (_dtype,))]
    CHECKS += [(check_attention, (_dtype, head_dim)) for head_dim in (64, 80, 96, 128)]
CHECKS += [(check, stored) for stored in STORED for check in (check_experts, check_linear)]
