"""Check, then time, every Triton kernel on this GPU, at the shapes of real models.

    python benchmarks/kernels.py [--out FILE] [--only NAME,...] [--match TEXT] [--jobs N]

`check` compares with fp64, poisons outputs, surrounds them with guard words, and compares the bits
of a row for every number of rows from 1 to 32 and in prefill. `time` replays CUDA graphs over data
several times the L2 and reports the median, next to ceilings measured in the same run: HBM read by
a plain kernel, bf16 matrix rate of torch, copies from pinned memory. `--only` picks from checks,
experts, codes (quantised experts and dense products), host_reads, attention, linear, small and
sweep; sweep, which must be named, times the candidate tiles that the tables in `kernels/configs.py` were chosen from (`--match` picks among
them). Kernels are compiled first, by `--jobs` processes; the weights are random. Exit code 1 if
any check failed.
"""

import argparse
import contextlib
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import spmoe_lite  # noqa: E402, F401

sys.path.remove(str(ROOT))

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from spmoe_lite.config import ExpertLayout, matrix_bytes, scheme_of  # noqa: E402
from spmoe_lite.kernels import attention_triton as attention_module  # noqa: E402
from spmoe_lite.kernels import expert_gemm_triton as expert_module  # noqa: E402
from spmoe_lite.kernels import linear_triton as linear_module  # noqa: E402
from spmoe_lite.kernels.attention import attention, attention_reference  # noqa: E402
from spmoe_lite.kernels.configs import AttentionTile, Tile  # noqa: E402
from spmoe_lite.kernels.expert_gemm import DTYPES, combine, expert_down, expert_up  # noqa: E402
from spmoe_lite.kernels.gate import gate_topk, gate_topk_reference  # noqa: E402
from spmoe_lite.kernels.linear import linear  # noqa: E402
from spmoe_lite.kernels.norm import rms_norm, rms_norm_reference  # noqa: E402
from spmoe_lite.kernels.rope import rope, rope_reference  # noqa: E402
from spmoe_lite.quant import QuantizedMatrix, view_matrix  # noqa: E402

HIDDEN, INNER, EXPERTS, CHOICES = 4096, 14336, 8, 2
SHAPES = {  # hidden, inner, experts, choices, layers that are several times the L2
    "mixtral": (HIDDEN, INNER, EXPERTS, CHOICES, 4),
    "qwen3": (2048, 768, 128, 8, 24),
    "deepseek": (2048, 1408, 64, 6, 16),
}
SCHEMES = ("int4-g32", "int4-g32z", "int4-g64z", "int4-g128z", "int8-g32", "int8-g64", "int8-g128")
HEADS, HEADS_KV, HEAD_DIM = 32, 8, 128
TOLERANCE = {"fp32": 2e-6, "bf16": 6e-3, "fp16": 8e-4}  # relative error of a whole output, in norm
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
DENSE = LAYER | {"head": (32000, 4096)}  # the products of Mistral-7B as the model makes them
PARTS = ["checks", "experts", "codes", "host_reads", "attention", "linear", "small", "sweep"]


def layout(dtype: str, hidden: int, inner: int) -> ExpertLayout:
    up = -(-matrix_bytes(dtype, inner, hidden) // 64) * 64
    stride = 2 * up + matrix_bytes(dtype, hidden, inner)
    return ExpertLayout(dtype, hidden, inner, 0, up, 2 * up, -(-stride // 65536) * 65536)


def random(shape, dtype, scale=1.0, seed=0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda") * scale).to(dtype)


def routing(tokens: int, seed: int, experts: int = EXPERTS, choices: int = CHOICES) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator, device="cuda")
    return scores.topk(choices).indices.int().contiguous()


def table(base: int, stride: int, ids: list[int], copy_base: int = 0) -> torch.Tensor:
    lines = [[e, base + e * stride, copy_base + e * stride if copy_base else 0] for e in ids]
    return torch.tensor(lines, dtype=torch.int64).cuda()


# ---------------------------------------------------------------- checks


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


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled tensor between two runs of 4096 guard elements, and the whole."""
    count = torch.Size(shape).numel()
    whole = torch.full((count + 8192,), float("nan"), dtype=dtype, device="cuda")
    whole[:4096] = 77.0
    whole[-4096:] = 77.0
    return whole[4096:-4096].view(shape), whole


def guards_hold(whole: torch.Tensor) -> bool:
    return bool((whole[:4096] == 77.0).all() and (whole[-4096:] == 77.0).all())


def run_experts(x, experts, use, shape: ExpertLayout) -> tuple[torch.Tensor, torch.Tensor, bool]:
    tokens, choices = experts.shape
    h, h_whole = guarded((tokens, choices, shape.intermediate_size), x.dtype)
    out, out_whole = guarded((tokens, choices, shape.hidden_size), x.dtype)
    expert_up(x, experts, use, shape, h)
    expert_down(h, experts, use, shape, out)
    return h, out, guards_hold(h_whole) and guards_hold(out_whole)


def expert_weights(slab: torch.Tensor, shape: ExpertLayout, slot: int) -> list[torch.Tensor]:
    dtype = DTYPES[shape.dtype]
    run = slab[slot * shape.stride : (slot + 1) * shape.stride].view(dtype)
    count = shape.hidden_size * shape.intermediate_size
    gate, up, down = run[: 3 * count].split(count)
    wide = (shape.intermediate_size, shape.hidden_size)
    return [gate.view(wide), up.view(wide), down.view(wide[::-1])]


def check_experts(dtype: str) -> Checks:
    checks = Checks(f"experts {dtype}")
    hidden, inner, count, choices = 1024, 1416, 7, 2
    shape, torch_dtype = layout(dtype, hidden, inner), DTYPES[dtype]
    slab = random(count * shape.stride // torch_dtype.itemsize, torch_dtype, 0.03).view(torch.uint8)
    copies = torch.full_like(slab, 171)
    x = random((700, hidden), torch_dtype, seed=1)
    experts = routing(700, 2, count - 1, choices)  # the last expert has no rows
    ids = list(range(count))
    use = table(slab.data_ptr(), shape.stride, ids, copies.data_ptr())

    h, out, guards = run_experts(x, experts, use, shape)
    checks.true("guard words, prefill", guards)
    want_h, want_out = torch.empty_like(h).double(), torch.empty_like(out).double()
    for e in range(count - 1):
        gate, up, down = (w.double() for w in expert_weights(slab, shape, e))
        row, choice = torch.nonzero(experts == e, as_tuple=True)
        rows = x[row].double()
        want_h[row, choice] = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        want_out[row, choice] = h[row, choice].double() @ down.T
    checks.error("up against fp64", h, want_h, TOLERANCE[dtype])
    checks.error("down against fp64", out, want_out, TOLERANCE[dtype])

    used = 3 * hidden * inner * torch_dtype.itemsize
    for e in ids:
        at = e * shape.stride
        same = torch.equal(copies[at : at + used], slab[at : at + used])
        checks.true(f"write-through of expert {e}", same == (e < count - 1))
        checks.true(f"padding of {e}", bool((copies[at + used : at + shape.stride] == 171).all()))

    plain = table(slab.data_ptr(), shape.stride, ids)
    same_rows = True
    for tokens in [*range(1, 33), 33, 100, 257]:
        first = (tokens * 17) % 300
        part = slice(first, first + tokens)
        got_h, got, guards = run_experts(x[part], experts[part].clone(), plain, shape)
        same_rows &= guards and torch.equal(got_h, h[part]) and torch.equal(got, out[part])
    checks.true("row bits for T = 1 .. 32, 33, 100, 257, 700", same_rows)
    grouped_h, grouped = torch.empty_like(h[:5]), torch.empty_like(out[:5])
    for e in reversed(ids):
        one = table(slab.data_ptr(), shape.stride, [e])
        expert_up(x[:5], experts[:5], one, shape, grouped_h)
        expert_down(grouped_h, experts[:5], one, shape, grouped)
    checks.true("row bits for any grouping", torch.equal(grouped, out[:5]))
    everyone = torch.tensor([[3, 0]], dtype=torch.int32, device="cuda").repeat(700, 1)
    got_h, got, guards = run_experts(x, everyone, plain, shape)
    one_h, one, _ = run_experts(x[650:651], everyone[:1], plain, shape)
    checks.true("all tokens on one expert", guards and torch.equal(got[650:651], one))

    weights = torch.rand(700, choices, device="cuda")
    want = (out.double() * weights.double()[..., None]).sum(1)
    checks.error("combine against fp64", combine(out, weights), want, TOLERANCE[dtype])
    return checks


def check_codes(name: str, dtype: str) -> Checks:
    """Quantised experts and dense products against fp64 products of the weights they stand for."""
    checks = Checks(f"{name} in {dtype}")
    scheme, torch_dtype = scheme_of(name), DTYPES[dtype]
    hidden, inner, count, choices = 1024, 1408, 5, 2
    shape = layout(name, hidden, inner)
    slab = random_experts(shape, count)
    sizes = ((inner, hidden), (inner, hidden), (hidden, inner))
    weights = []
    for one in slab.view(count, -1):
        runs = zip((0, shape.up_offset, shape.down_offset), sizes, strict=True)
        found = [
            view_matrix(one[at : at + matrix_bytes(name, *size)], scheme, *size)
            for at, size in runs
        ]
        weights.append([matrix.dequantize(torch_dtype).double() for matrix in found])
    copies = torch.full_like(slab, 171)
    x = random((700, hidden), torch_dtype, seed=1)
    experts = routing(700, 2, count - 1, choices)
    ids = list(range(count))
    use = table(slab.data_ptr(), shape.stride, ids, copies.data_ptr())
    h, out, guards = run_experts(x, experts, use, shape)
    checks.true("guard words, prefill", guards)
    want_h, want_out = torch.empty_like(h).double(), torch.empty_like(out).double()
    for e in range(count - 1):
        gate, up, down = weights[e]
        row, choice = torch.nonzero(experts == e, as_tuple=True)
        rows = x[row].double()
        want_h[row, choice] = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        want_out[row, choice] = h[row, choice].double() @ down.T
    checks.error("up against fp64", h, want_h, TOLERANCE[dtype])
    checks.error("down against fp64", out, want_out, TOLERANCE[dtype])
    for e in ids:
        span = slice(e * shape.stride, (e + 1) * shape.stride)
        want = slab[span].clone() if e < count - 1 else torch.full_like(slab[span], 171)
        end = shape.down_offset + matrix_bytes(name, hidden, inner)
        want[end:] = 171
        checks.true(f"write-through of expert {e}", torch.equal(copies[span], want))
    plain = table(slab.data_ptr(), shape.stride, ids)
    same_rows = True
    for tokens in [*range(1, 33), 33, 100, 257]:
        part = slice((tokens * 17) % 300, (tokens * 17) % 300 + tokens)
        got_h, got, guards = run_experts(x[part], experts[part].clone(), plain, shape)
        same_rows &= guards and torch.equal(got_h, h[part]) and torch.equal(got, out[part])
    checks.true("row bits for T = 1 .. 32, 33, 100, 257, 700", same_rows)

    for n, k in ((1000, 2176), (4096, 1024), (320, 128)):
        w = coded_matrices(name, n, k, 1)[0]
        x, b = random((700, k), torch_dtype, seed=4), random(n, torch_dtype, seed=3)
        y = linear(x, w, b)
        want = x.double() @ w.dequantize(torch_dtype).double().T + b.double()
        checks.error(f"linear {n} x {k} against fp64", y, want, TOLERANCE[dtype])
        same = all(
            torch.equal(linear(x[t : 2 * t], w, b), y[t : 2 * t])
            for t in [*range(1, 33), 33, 100, 257]
        )
        checks.true(f"linear {n} x {k}: row bits for T = 1 .. 32, 33, 100, 257, 700", same)
    return checks


def check_far_slot() -> Checks:
    """First and last slot of a slab of more than 2^31 elements, reading and writing through."""
    checks = Checks("64-bit offsets")
    shape = layout("bf16", 256, 512)
    slots = (1 << 32) // shape.stride + 3  # bytes beyond 2^32, bf16 elements beyond 2^31
    slab = torch.full((slots * shape.stride,), 171, dtype=torch.uint8, device="cuda")
    one = random(shape.stride // 2, torch.bfloat16, 0.1).view(torch.uint8)
    last = slots - 2  # the slot after it is the guard
    slab[: shape.stride] = one
    slab[last * shape.stride : (last + 1) * shape.stride] = one
    x = random((5, 256), torch.bfloat16)
    experts = torch.zeros(5, 1, dtype=torch.int32, device="cuda")
    base = slab.data_ptr()
    outs = []
    for slot in (0, last):
        use = torch.tensor([[0, base + slot * shape.stride, 0]], device="cuda")
        outs.append(run_experts(x, experts, use, shape)[1])
    checks.true("first and last slot give equal bits", torch.equal(*outs))
    copied = torch.tensor([[0, base, base + (last - 1) * shape.stride]], device="cuda")
    run_experts(x, experts, copied, shape)
    used = 3 * 256 * 512 * 2
    there = slab[(last - 1) * shape.stride :][:used]
    checks.true("write-through to a far slot", torch.equal(there, one[:used]))
    checks.true(
        "the slot before is untouched",
        bool((slab[(last - 2) * shape.stride :][: shape.stride] == 171).all()),
    )
    checks.true(
        "the slot after is untouched", bool((slab[(last + 1) * shape.stride :] == 171).all())
    )
    return checks


def check_linear(dtype: str) -> Checks:
    checks = Checks(f"linear {dtype}")
    torch_dtype = DTYPES[dtype]
    for n, k in ((1000, 2056), (4096, 1024), (320, 64)):
        w, b = random((n, k), torch_dtype, 0.05), random(n, torch_dtype, seed=3)
        x = random((700, k), torch_dtype, seed=4)
        for bias in (None, b):
            name = f"{n} x {k}" + (" + bias" if bias is not None else "")
            y = linear(x, w, bias)
            want = x.double() @ w.double().T + (0 if bias is None else bias.double())
            checks.error(f"{name} against fp64", y, want, TOLERANCE[dtype])
            same = all(
                torch.equal(linear(x[t : 2 * t], w, bias), y[t : 2 * t])
                for t in [*range(1, 33), 33, 100, 257]
            )
            checks.true(f"{name}: row bits for T = 1 .. 32, 33, 100, 257, 700", same)
    return checks


def check_attention(dtype: str, head_dim: int) -> Checks:
    checks = Checks(f"attention {dtype} D={head_dim}")
    torch_dtype = DTYPES[dtype]
    for heads, heads_kv, window in ((8, 2, None), (8, 2, 300), (3, 1, None), (4, 4, 37)):
        total = 900
        q = random((total, heads, head_dim), torch_dtype, seed=5)
        k = random((total + 50, heads_kv, head_dim), torch_dtype, seed=6)
        v = random((total + 50, heads_kv, head_dim), torch_dtype, seed=7)
        k[total:], v[total:] = float("nan"), float("nan")
        name = f"{heads}/{heads_kv} heads, window {window}"
        whole = attention(q, k, v, 0, window)
        want = attention_reference(q.double(), k.double(), v.double(), 0, window)
        checks.error(f"{name} against fp64", whole, want, TOLERANCE[dtype])
        same = True
        for tokens in [*range(1, 33), 33, 128, 257]:
            start = (tokens * 53) % (total - tokens)
            got = attention(q[start : start + tokens], k, v, start, window)
            same &= torch.equal(got, whole[start : start + tokens])
        checks.true(f"{name}: row bits for T = 1 .. 32, 33, 128, 257, 900", same)
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
        weights, chosen = gate_topk(x, router, k)
        want_weights, want = gate_topk_reference(x.double().float(), router, k)
        checks.true(f"gate {experts} of {hidden}: ids", torch.equal(chosen, want))
        checks.error(f"gate {experts} of {hidden}: weights", weights, want_weights, 1e-5)
        alone = gate_topk(x[41:42], router, k)
        same = torch.equal(alone[0], weights[41:42]) and torch.equal(alone[1], chosen[41:42])
        checks.true(f"gate {experts} of {hidden}: row bits", same)
    tied = random((8, 4096), torch_dtype)
    tied[5] = tied[1]
    ids = gate_topk(tied[1:2] * 1, tied, 2)[1]
    checks.true("gate: the lowest id wins a tie", ids.tolist() == [[1, 5]])
    bad = torch.full((1, 4096), float("nan"), dtype=torch_dtype, device="cuda")
    weights, ids = gate_topk(bad, tied, 2)
    checks.true("gate: NaN", bool(weights.isnan().all()) and ids.tolist() == [[0, 1]])

    for hidden in (4096, 576, 72):
        x, weight = random((33, hidden), torch_dtype), random(hidden, torch_dtype, seed=8)
        y = rms_norm(x, weight, 1e-5)
        want = rms_norm_reference(x.double(), weight.double(), 1e-5)
        checks.error(f"norm {hidden}", y, want, TOLERANCE[dtype])
        checks.true(f"norm {hidden}: row bits", torch.equal(rms_norm(x[7:8], weight, 1e-5), y[7:8]))
    q, k = random((33, 9, 80), torch_dtype), random((33, 3, 80), torch_dtype, seed=9)
    angle = random((33, 40), torch.float32, 3.0)
    for got, want in zip(
        rope(q, k, angle.cos(), angle.sin()),
        rope_reference(q, k, angle.cos(), angle.sin()),
        strict=True,
    ):
        checks.error("rope", got, want, TOLERANCE[dtype])
    return checks


CHECKS = [
    (check_far_slot, ()),
    (check_long_attention, ("bf16",)),
    (check_long_attention, ("fp16",)),
]
for _dtype in ("bf16", "fp16", "fp32"):
    CHECKS += [(check_experts, (_dtype,)), (check_linear, (_dtype,)), (check_small, (_dtype,))]
    CHECKS += [(check_attention, (_dtype, head_dim)) for head_dim in (64, 80, 96, 128)]


CHECKS += [(check_codes, (name, "bf16")) for name in SCHEMES]
CHECKS += [(check_codes, (name, "fp16")) for name in ("int4-g32", "int4-g64z", "int8-g64")]
CHECKS += [(check_codes, ("int4-g64z", "fp32"))]


# ---------------------------------------------------------------- times


def replay_ms(calls, repeats: int = 15) -> float:
    """Median time of one call of the list, all captured in one CUDA graph."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


@triton.jit
def read_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    """Read everything once and keep a sum: what this card's memory gives a plain kernel."""
    at = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        total += tl.load(x_ptr + at + step * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def ceilings() -> dict:
    words = torch.randint(0, 9, (1 << 30,), dtype=torch.int32, device="cuda")
    sums = torch.empty(1 << 20, dtype=torch.int32, device="cuda")
    best = 0.0
    for steps, block in ((8, 4096), (16, 4096), (32, 2048)):
        grid = (len(words) // (steps * block),)
        ms = replay_ms([lambda s=steps, b=block, g=grid: read_kernel[g](words, sums, s, b)] * 2)
        best = max(best, words.nbytes / ms / 1e9)
    a, b = random((8192, 8192), torch.bfloat16), random((8192, 8192), torch.bfloat16, seed=1)
    matrix = 2 * 8192**3 / replay_ms([lambda: a @ b] * 4) / 1e9
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = words.view(torch.uint8)[: 1 << 30]
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    device.copy_(host, non_blocking=True)
    begin.record()
    for _ in range(3):
        device.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    copy = 3 * host.nbytes / begin.elapsed_time(end) / 1e6
    return {"hbm_read_TB_s": best, "bf16_matrix_TFLOP_s": matrix, "pinned_copy_GB_s": copy}


class Experts:
    """A few layers of experts at a model's shape, and a table that leads to each."""

    def __init__(self, dtype: str, model: str = "mixtral", layers: int | None = None):
        self.hidden, self.inner, self.experts, self.choices, some = SHAPES[model]
        self.layers = layers or some
        self.shape = layout(dtype, self.hidden, self.inner)
        self.slab = random_experts(self.shape, self.layers * self.experts)
        self.bytes = 2 * matrix_bytes(dtype, self.inner, self.hidden)  # gate and up of one
        self.down_bytes = matrix_bytes(dtype, self.hidden, self.inner)

    def calls(self, tokens: int, what: str, base: int | None = None, copy_base: int = 0):
        """One call per layer, and the bytes of weights it reads."""
        experts = routing(tokens, tokens, self.experts, self.choices)
        ids = sorted(set(experts.flatten().tolist()))
        x = random((tokens, self.hidden), torch.bfloat16)
        h = random((tokens, self.choices, self.inner), torch.bfloat16)
        out = torch.empty(tokens, self.choices, self.hidden, dtype=torch.bfloat16, device="cuda")
        weights = torch.rand(tokens, self.choices, device="cuda")
        span = self.experts * self.shape.stride
        bases = [self.slab.data_ptr() + layer * span for layer in range(self.layers)]
        uses = [
            table(address, self.shape.stride, ids, copy_base)
            for address in ([base] if base else bases)
        ]
        runs = {
            "up": lambda use: expert_up(x, experts, use, self.shape, h),
            "down": lambda use: expert_down(h, experts, use, self.shape, out),
            "combine": lambda use: combine(out, weights),
        }
        runs["all"] = lambda use: [runs[part](use) for part in ("up", "down", "combine")]
        read = {"up": self.bytes, "down": self.down_bytes, "combine": 0}
        read["all"] = self.bytes + self.down_bytes
        return [lambda use=use: runs[what](use) for use in uses], read[what] * len(ids), len(ids)


def random_experts(shape: ExpertLayout, count: int) -> torch.Tensor:
    """uint8 on the GPU: floats of a plausible size, or random codes and plausible scales."""
    slab = torch.empty(count * shape.stride, dtype=torch.uint8, device="cuda")
    scheme = scheme_of(shape.dtype)
    if scheme is None:
        slab.view(DTYPES[shape.dtype]).normal_(0, 0.02)
        return slab
    slab.view(torch.int64).random_()
    one = slab.view(count, shape.stride)
    sizes = ((shape.intermediate_size, shape.hidden_size),) * 2
    sizes += ((shape.hidden_size, shape.intermediate_size),)
    offsets = (shape.gate_offset, shape.up_offset, shape.down_offset)
    for offset, (rows, columns) in zip(offsets, sizes, strict=True):
        codes, scales = scheme.parts(rows, columns)
        words = one[:, offset + codes : offset + codes + scales].view(torch.int16)
        words.bitwise_and_(-0x7C01).bitwise_or_(0x1800)  # 0.002 to 0.004, any sign or zero
    return slab


def time_experts(model: Experts, ceiling: dict, prefill: bool = True) -> dict:
    rows = {}
    for tokens in (1, 2, 3, 5, 8, 16, 17, 32):
        calls, read, union = model.calls(tokens, "all")
        ms = replay_ms(calls)
        row = {"union": union, "ms": ms, "TB_s": read / ms / 1e9}
        row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
        for part in ("up", "down"):
            calls, read, _ = model.calls(tokens, part)
            row[f"{part}_TB_s"] = read / replay_ms(calls) / 1e9
        row["combine_us"] = replay_ms(model.calls(tokens, "combine")[0] * 8) * 1e3
        rows[f"decode T={tokens}"] = row
    for tokens in (64, 128, 256, 512, 2048, 4096) if prefill else ():
        calls, read, _union = model.calls(tokens, "all")
        ms = replay_ms(calls, 7)
        flops = 6 * tokens * model.choices * model.hidden * model.inner
        row = {"ms": ms, "TFLOP_s": flops / ms / 1e9}
        row["of_matrix_rate"] = row["TFLOP_s"] / ceiling["bf16_matrix_TFLOP_s"]
        row["TB_s"] = read / ms / 1e9
        rows[f"prefill T={tokens}"] = row
    return rows


def time_cliffs(model: Experts) -> dict:
    """Every row with the same experts, T = 1 .. 32: the time at T + 1 over the time at T."""
    times = []
    span = model.experts * model.shape.stride
    ids = list(range(model.choices))
    uses = [
        table(model.slab.data_ptr() + layer * span, model.shape.stride, ids)
        for layer in range(model.layers)
    ]
    for tokens in range(1, 33):
        experts = torch.arange(model.choices, dtype=torch.int32, device="cuda").repeat(tokens, 1)
        x = random((tokens, model.hidden), torch.bfloat16)
        h = torch.empty(tokens, model.choices, model.inner, dtype=torch.bfloat16, device="cuda")
        out = torch.empty(tokens, model.choices, model.hidden, dtype=torch.bfloat16, device="cuda")

        def both(use, x=x, h=h, out=out, experts=experts):
            expert_up(x, experts, use, model.shape, h)
            expert_down(h, experts, use, model.shape, out)

        times.append(replay_ms([lambda u=u: both(u) for u in uses]))
    worst = max(later / before for before, later in zip(times, times[1:], strict=False))
    return {"us": " ".join(f"{ms * 1e3:.1f}" for ms in times), "worst_step": worst}


def time_codes(ceiling: dict) -> dict:
    """Quantised weights: experts of three models, one dense layer, reads of host memory."""
    rows = {}
    for name in SHAPES:
        model = Experts("int4-g64z", name)
        for row, values in time_experts(model, ceiling, name == "mixtral").items():
            rows[f"{name} int4-g64z {row}"] = values
        if name == "mixtral":
            rows["mixtral int4-g64z cliffs"] = time_cliffs(model)
        if name != "deepseek":
            for row, values in time_host_reads(model).items():
                rows[f"{name} int4-g64z host {row}"] = values
        del model
    for dtype in ("int4-g32z", "int4-g128z", "int8-g64"):
        model = Experts(dtype)
        for tokens in (1, 5, 8, 32, 512):
            calls, read, union = model.calls(tokens, "all")
            ms = replay_ms(calls, 7)
            rate = read / ms / 1e9
            rows[f"mixtral {dtype} T={tokens}"] = {
                "union": union, "ms": ms, "TB_s": rate, "of_hbm": rate / ceiling["hbm_read_TB_s"],
            }  # fmt: skip
        del model
    for dtype in ("int4-g64z", "int8-g64"):
        for tokens in (1, 5, 32):
            rows[f"dense {dtype} T={tokens}"] = time_dense_codes(dtype, tokens, ceiling)
        w = coded_matrices(dtype, 14336, 4096, 1)[0]
        for tokens in (512, 2048):
            x = random((tokens, 4096), torch.bfloat16)
            ms = replay_ms([lambda x=x, w=w: linear(x, w)] * 4, 7)
            rate = 2 * tokens * 14336 * 4096 / ms / 1e9
            rows[f"dense {dtype} gate T={tokens}"] = {
                "us": ms * 1e3, "TFLOP_s": rate, "of_matrix_rate": rate / ceiling["bf16_matrix_TFLOP_s"],
            }  # fmt: skip
    return rows


def coded_matrices(dtype: str, n: int, k: int, copies: int) -> list[QuantizedMatrix]:
    scheme = scheme_of(dtype)
    found = []
    for _ in range(copies):
        run = torch.empty(sum(scheme.parts(n, k)), dtype=torch.uint8, device="cuda").random_()
        matrix = view_matrix(run, scheme, n, k)
        matrix.scales.bitwise_and_(-0x7C01).bitwise_or_(0x1800)
        found.append(matrix)
    return found


def time_dense_codes(dtype: str, tokens: int, ceiling: dict) -> dict:
    """The products of one Mistral-7B layer as the model makes them: qkv, o, gate_up, down."""
    row, total_ms, total_bytes = {}, 0.0, 0
    for name, (n, k) in LAYER.items():
        size = matrix_bytes(dtype, n, k)
        weights = coded_matrices(dtype, n, k, max(3, (400 << 20) // size))
        x = random((tokens, k), torch.bfloat16)
        ms = replay_ms([lambda x=x, w=w: linear(x, w) for w in weights])
        row[f"{name}_us"] = ms * 1e3
        total_ms, total_bytes = total_ms + ms, total_bytes + size
    row["us"] = total_ms * 1e3
    row["of_hbm"] = total_bytes / total_ms / 1e9 / ceiling["hbm_read_TB_s"]
    return row


def time_host_reads(model: Experts) -> dict:
    size = model.experts * model.shape.stride
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.copy_(model.slab[:size])
    copies = torch.empty(size, dtype=torch.uint8, device="cuda")
    rows = {}
    for tokens in (1, 5, 8, 32):
        calls, read, union = model.calls(tokens, "all", host.data_ptr())
        row = {"union": union, "read_GB_s": read / replay_ms(calls, 3) / 1e6}
        calls, read, _ = model.calls(tokens, "all", host.data_ptr(), copies.data_ptr())
        row["write_through_GB_s"] = read / replay_ms(calls, 3) / 1e6
        row["write_through_over_read"] = row["write_through_GB_s"] / row["read_GB_s"]
        rows[f"T={tokens}"] = row
    return rows


def attention_calls(tokens: int, context: int, layers: int):
    shape = (context, HEADS_KV, HEAD_DIM)
    caches = [
        (random(shape, torch.bfloat16, seed=i), random(shape, torch.bfloat16, seed=i + 50))
        for i in range(layers)
    ]
    q = random((tokens, HEADS, HEAD_DIM), torch.bfloat16)
    return [lambda c=c: attention(q, *c, context - tokens, None) for c in caches]


def time_attention(ceiling: dict) -> dict:
    rows = {}
    for context in (1024, 8192, 32768):
        for tokens in (1, 5, 8, 32):
            ms = replay_ms(attention_calls(tokens, context, 8 if context > 1024 else 64))
            read = 2 * context * HEADS_KV * HEAD_DIM * 2
            row = {"us": ms * 1e3, "TB_s": read / ms / 1e9}
            row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
            rows[f"T={tokens} context {context}"] = row
    for tokens in (512, 2048):
        ms = replay_ms(attention_calls(tokens, tokens, 4), 7)
        rows[f"prefill {tokens}"] = {
            "us": ms * 1e3,
            "TFLOP_s": 2 * tokens * tokens * HEADS * HEAD_DIM / ms / 1e9,
        }
    return rows


def time_linear(ceiling: dict) -> dict:
    rows = {}
    for tokens in (1, 5, 32):
        total_ms = total_bytes = 0.0
        for name, (n, k) in DENSE.items():
            copies = max(3, (400 << 20) // (n * k * 2))
            weights = [random((n, k), torch.bfloat16, 0.02, seed=i) for i in range(copies)]
            x = random((tokens, k), torch.bfloat16)
            ms = replay_ms([lambda x=x, w=w: linear(x, w) for w in weights])
            torch_ms = replay_ms(
                [lambda x=x, w=w: torch.nn.functional.linear(x, w) for w in weights]
            )
            read = n * k * 2
            row = {"us": ms * 1e3, "TB_s": read / ms / 1e9, "torch_us": torch_ms * 1e3}
            row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
            rows[f"{name} T={tokens}"] = row
            if name in LAYER:
                total_ms, total_bytes = total_ms + ms, total_bytes + read
        share = total_bytes / total_ms / 1e9 / ceiling["hbm_read_TB_s"]
        rows[f"layer T={tokens}"] = {"us": total_ms * 1e3, "of_hbm": share}
    w = random((14336, 4096), torch.bfloat16, 0.02)
    for tokens in (512, 2048):
        x = random((tokens, 4096), torch.bfloat16)
        for name, function in (("ours", linear), ("torch", torch.nn.functional.linear)):
            ms = replay_ms([lambda f=function, x=x: f(x, w)] * 4, 7)
            rate = 2 * tokens * w.numel() / ms / 1e9
            rows[f"gate T={tokens} {name}"] = {"us": ms * 1e3, "TFLOP_s": rate}
    return rows


def time_small() -> dict:
    rows = {}
    for experts, hidden, k in ((8, 4096, 2), (64, 2048, 6), (128, 2048, 8)):
        routers = [random((experts, hidden), torch.bfloat16, seed=i) for i in range(8)]
        for tokens in (1, 5, 32):
            x = random((tokens, hidden), torch.bfloat16)
            ms = replay_ms([lambda r=r, x=x, k=k: gate_topk(x, r, k) for r in routers])
            rows[f"gate {experts} experts T={tokens}"] = {"us": ms * 1e3}
    for tokens in (1, 5, 512):
        x, weight = random((tokens, HIDDEN), torch.bfloat16), random(HIDDEN, torch.bfloat16)
        q = random((tokens, HEADS, HEAD_DIM), torch.bfloat16)
        k = random((tokens, HEADS_KV, HEAD_DIM), torch.bfloat16)
        angle = random((tokens, HEAD_DIM // 2), torch.float32)
        ms = replay_ms([lambda x=x, w=weight: rms_norm(x, w, 1e-5)] * 8)
        rows[f"norm T={tokens}"] = {"us": ms * 1e3}
        ms = replay_ms([lambda q=q, k=k, a=angle: rope(q, k, a, a)] * 8)
        rows[f"rope T={tokens}"] = {"us": ms * 1e3}
    return rows


# ---------------------------------------------------------------- sweeps

UP_FEW = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 64, 4, 5)]
UP_FEW += [(64, 64, 4, 8), (64, 256, 4, 3), (128, 128, 8, 3), (128, 64, 8, 4), (128, 64, 8, 6)]
DOWN_FEW = [(64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 5), (64, 128, 4, 6), (64, 64, 4, 6)]
DOWN_FEW += [(64, 64, 4, 8), (64, 256, 4, 3), (128, 128, 8, 3), (128, 64, 8, 6)]
UP_MANY = [(256, 64, 8, 3), (256, 64, 8, 4), (128, 64, 8, 4), (128, 64, 4, 4), (128, 128, 8, 3)]
DOWN_MANY = [(128, 64, 8, 3), (128, 64, 8, 4), (128, 64, 4, 4), (256, 64, 8, 3), (256, 64, 8, 4)]
ATTENTION = [(64, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 4), (64, 32, 4, 3), (64, 32, 4, 4)]
ATTENTION += [(64, 32, 4, 6), (32, 64, 4, 3), (64, 32, 4, 5)]
CODES_FEW = [(64, 128, 16, 4, 4), (64, 256, 16, 4, 3), (64, 256, 16, 4, 4), (128, 128, 16, 4, 4)]
CODES_FEW += [(128, 256, 16, 4, 3), (128, 256, 16, 4, 4), (128, 128, 16, 4, 3)]
CODES_MANY = [(128, 128, 64, 4, 3), (128, 128, 128, 4, 3), (128, 128, 128, 8, 4)]
CODES_MANY += [(256, 128, 128, 8, 3), (128, 256, 128, 8, 2)]
LINEAR = [(tile, wanted) for tile in DOWN_FEW[1:6] for wanted in (256, 512)]


@contextlib.contextmanager
def patched(module, **values):
    kept = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(module, name, value)


def sweep_experts(part: str, tokens: int, entry: tuple) -> float:
    n, k, warps, stages = entry
    columns = 16 if tokens <= 16 else 128
    chosen = Tile(n, k, columns, warps, stages)
    with patched(expert_module, tile=lambda *ignored: chosen):
        return replay_ms(shared_experts("bf16", "mixtral").calls(tokens, part)[0], 9)


def sweep_codes(name: str, dtype: str, part: str, tokens: int, entry: tuple) -> float:
    n, k, t, warps, stages = entry
    with patched(expert_module, tile=lambda *ignored: Tile(n, k, t, warps, stages)):
        return replay_ms(shared_experts(dtype, name).calls(tokens, part)[0], 9)


def sweep_dense_codes(dtype: str, name: str, tokens: int, entry: tuple, wanted: int) -> float:
    n, k, t, warps, stages = entry
    x = random((tokens, DENSE[name][1]), torch.bfloat16)
    weights = coded_matrices(
        dtype, *DENSE[name], max(3, (400 << 20) // matrix_bytes(dtype, *DENSE[name]))
    )
    chosen = Tile(n, k, t, warps, stages)
    with patched(linear_module, tile=lambda *ignored: chosen, WANTED_PROGRAMS=wanted):
        return replay_ms([lambda w=w: linear(x, w) for w in weights], 9)


@functools.lru_cache(maxsize=1)
def shared_experts(dtype: str, name: str) -> Experts:
    return Experts(dtype, name)


def sweep_attention(tokens: int, context: int, entry: tuple, layers: int = 8) -> float:
    chosen = AttentionTile(*entry)
    with patched(attention_module, attention_tile=lambda *ignored: chosen):
        return replay_ms(attention_calls(tokens, context, layers), 9)


def sweep_linear(entry: tuple, n: int, k: int) -> float:
    (tile_n, tile_k, warps, stages), wanted = entry
    chosen = Tile(tile_n, tile_k, 16, warps, stages)
    weights = [
        random((n, k), torch.bfloat16, 0.02, seed=i)
        for i in range(max(3, (400 << 20) // (n * k * 2)))
    ]
    x = random((1, k), torch.bfloat16)
    with patched(linear_module, tile=lambda *ignored: chosen, WANTED_PROGRAMS=wanted):
        return replay_ms([lambda w=w: linear(x, w) for w in weights], 9)


def sweeps(match: str) -> list[tuple]:
    """(name, function, arguments) of every candidate."""
    jobs = [("up", e, tokens) for e in UP_FEW for tokens in (1, 5, 8)]
    jobs += [("down", e, tokens) for e in DOWN_FEW for tokens in (1, 5, 8)]
    jobs += [("up", e, tokens) for e in UP_MANY for tokens in (512, 2048)]
    jobs += [("down", e, tokens) for e in DOWN_MANY for tokens in (512, 2048)]
    found = [(f"{part} T={t} {e}", sweep_experts, (part, t, e)) for part, e, t in jobs]
    for name, tokens in (("mixtral", (1, 5, 8)), ("qwen3", (1, 5, 8)), ("deepseek", (1, 8))):
        for part in ("up", "down"):
            for entry in CODES_FEW:
                found += [
                    (
                        f"codes {name} {part} T={t} {entry}",
                        sweep_codes,
                        (name, "int4-g64z", part, t, entry),
                    )
                    for t in tokens
                ]
    for part in ("up", "down"):
        for entry in CODES_MANY:
            found += [
                (
                    f"codes mixtral {part} T={t} {entry}",
                    sweep_codes,
                    ("mixtral", "int4-g64z", part, t, entry),
                )
                for t in (512, 2048)
            ]
    for entry in CODES_FEW:
        for wanted in (256, 512, 1024):
            for name in LAYER:
                arguments = ("int4-g64z", name, 1, entry, wanted)
                found.append(
                    (f"codes dense {name} T=1 {entry} {wanted}", sweep_dense_codes, arguments)
                )
    for entry in ATTENTION:
        for tokens, context in ((1, 32768), (5, 32768), (1, 1024), (5, 8192), (2048, 2048)):
            name = f"attention T={tokens} context {context} {entry}"
            found.append((name, sweep_attention, (tokens, context, entry)))
    for entry in LINEAR:
        for name in LAYER:
            found.append(
                (f"linear {name} {DENSE[name]} {entry}", sweep_linear, (entry, *DENSE[name]))
            )
    return [job for job in found if match in job[0]]


def sweep(match: str) -> dict:
    rows = {}
    for name, function, arguments in sweeps(match):
        try:
            rows[name] = function(*arguments)
        except Exception as error:  # a candidate that does not fit is a result too
            rows[name] = f"{type(error).__name__}: {error}"[:200]
    return rows


# ---------------------------------------------------------------- compile ahead, in parallel


def one_launch(calls, repeats: int = 0) -> float:
    calls[0]()
    torch.cuda.synchronize()
    return 0.0


def warm(index: int, count: int, only: list[str], match: str) -> None:
    """Compile a share of what will be timed, by launching it once on one layer."""
    globals()["replay_ms"] = one_launch
    for name, (*sizes, _layers) in SHAPES.items():
        SHAPES[name] = (*sizes, 1)
    jobs = []
    models = [("mixtral", "bf16")] if {"experts", "host_reads"} & set(only) else []
    if "codes" in only:
        models += [(name, "int4-g64z") for name in SHAPES]
        models += [("mixtral", dtype) for dtype in ("int4-g32z", "int4-g128z", "int8-g64")]
        for dtype in ("int4-g64z", "int8-g64"):
            for n, k in LAYER.values():
                for t in (1, 17, 512):
                    jobs.append(
                        lambda d=dtype, n=n, k=k, t=t: linear(
                            random((t, k), torch.bfloat16), coded_matrices(d, n, k, 1)[0]
                        )
                    )
    for name, dtype in models:
        for tokens in (1, 17, 64, 128, 256, 512):
            for part in ("up", "down", "combine"):
                jobs.append(
                    lambda n=name, d=dtype, t=tokens, p=part: one_launch(
                        shared_experts(d, n).calls(t, p)[0]
                    )
                )
    if "attention" in only:
        jobs += [lambda t=t: one_launch(attention_calls(t, 2048, 1)) for t in (1, 2048)]
    for name, (n, k) in DENSE.items() if "linear" in only else ():
        for tokens in (1, 17, 512):
            if tokens < 512 or name == "gate_up":
                jobs.append(
                    lambda n=n, k=k, t=tokens: linear(
                        random((t, k), torch.bfloat16), random((n, k), torch.bfloat16)
                    )
                )
    if "sweep" in only:
        for _name, function, arguments in sweeps(match):
            if function is sweep_attention:
                arguments = (*arguments, 1)
            jobs.append(lambda f=function, a=arguments: f(*a))
    for job in jobs[index::count]:
        with contextlib.suppress(Exception):  # shown when it is timed
            job()


def run_check(job) -> tuple[str, dict, list[str], float]:
    function, arguments = job
    started = time.perf_counter()
    try:
        checks = function(*arguments)
    except Exception as error:
        name = f"{function.__name__}{arguments}"
        return name, {}, [f"{name}: {type(error).__name__}: {error}"[:600]], 0.0
    return checks.group, checks.results, checks.failures, time.perf_counter() - started


def run_warm(job) -> None:
    warm(*job)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write the results here as JSON")
    parser.add_argument("--only", default=",".join(PARTS[:-1]), help="parts, by name")
    parser.add_argument("--match", default="", help="only candidates of the sweep with this text")
    parser.add_argument("--jobs", type=int, default=min(14, os.cpu_count() or 1))
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := set(only) - set(PARTS):
        parser.error(f"unknown part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "command": f"python benchmarks/kernels.py --only {options.only}",
        "date": time.strftime("%Y-%m-%d"),
        "failures": [],
    }

    def save() -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")

    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        shares = [(i, options.jobs, only, options.match) for i in range(options.jobs)]
        pending = [pool.apply_async(run_warm, (share,)) for share in shares]
        jobs = CHECKS if "checks" in only else []
        result["checks"] = {}
        for check in [pool.apply_async(run_check, (job,)) for job in jobs]:
            group, values, failures, seconds = check.get()
            result["checks"][group] = values | {"seconds": seconds}
            result["failures"] += failures
        for share in pending:
            share.get()
    print(f"compiled and checked in {time.perf_counter() - started:.0f} s", flush=True)
    if "checks" in only:
        print("\n".join(result["failures"]) or "all checks hold", flush=True)
    save()
    if only != ["checks"]:
        ceiling = result["ceilings"] = ceilings()
        parts = {
            "codes": lambda: time_codes(ceiling),
            "linear": lambda: time_linear(ceiling),
            "attention": lambda: time_attention(ceiling),
            "experts": lambda: time_experts(shared_experts("bf16", "mixtral"), ceiling),
            "host_reads": lambda: time_host_reads(shared_experts("bf16", "mixtral")),
            "small": time_small,
            "sweep": lambda: sweep(options.match),
        }
        for name, part in parts.items():
            if name in only:
                result[name] = part()
                save()
        for name in ("ceilings", *PARTS[1:]):
            for row, values in result.get(name, {}).items():
                shown = values.items() if isinstance(values, dict) else [("", values)]
                texts = (f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in shown)
                print(f"{name:10} {row:26}", *texts)
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
