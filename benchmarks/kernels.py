"""Check, then time, every Triton kernel on this GPU, at the shapes of real models.

    python benchmarks/kernels.py [--out FILE] [--only NAME,...] [--match TEXT] [--jobs N]

`checks` compares with fp64, poisons outputs, surrounds them with guard words, and compares the bits
of a row for every number of rows from 1 to 32 and in prefill (`kernel_checks.py`). All else is timed:
graph replays over data several times the L2, the median, next to ceilings measured in the same run:
HBM read by a plain kernel, bf16 matrix rate of torch, copies from pinned memory. `--only` picks from
checks, codes (quantised experts and dense products), linear, attention, experts, host_reads, small,
layout and ratios (`kernel_compare.py`) and sweep, which must be named (`sweep.py`; `--match` picks among
its candidates). Kernels are compiled first, by `--jobs` processes; the weights are random. Exit code 1
if any check failed.
"""

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import spmoe_lite  # noqa: E402, F401

sys.path.remove(str(ROOT))

import kernel_compare  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from kernel_checks import CHECKS  # noqa: E402
from kernel_data import (  # noqa: E402
    DENSE,
    DEVICE,
    HEAD_DIM,
    HEADS,
    HEADS_KV,
    LAYER,
    SHAPES,
    Experts,
    attention_calls,
    random,
    shared_experts,
    table,
    weights,
)
from sweep import sweep  # noqa: E402

from spmoe_lite import timing  # noqa: E402
from spmoe_lite.kernels.expert_gemm import expert_down, expert_up, new_partial  # noqa: E402
from spmoe_lite.kernels.gate import gate_topk  # noqa: E402
from spmoe_lite.kernels.linear import linear  # noqa: E402
from spmoe_lite.kernels.norm import rms_norm  # noqa: E402
from spmoe_lite.kernels.rope import project_and_store, rope_and_store  # noqa: E402
from spmoe_lite.precision import matrix_bytes  # noqa: E402

CEILINGS = "hbm_read_TB_s", "bf16_matrix_TFLOP_s", "pinned_copy_GB_s"


@triton.jit
def read_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    """Read everything once and keep a sum: what this card's memory gives a plain kernel."""
    at = tl.program_id(0).to(tl.int64) * steps * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in range(steps):
        total += tl.load(x_ptr + at + step * BLOCK)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, axis=0))


def ceilings() -> dict:
    words = torch.randint(0, 9, (1 << 30,), dtype=torch.int32, device=DEVICE)
    sums = torch.empty(1 << 20, dtype=torch.int32, device=DEVICE)
    best = 0.0
    for steps, block in ((8, 4096), (16, 4096), (32, 2048)):
        grid = (len(words) // (steps * block),)
        ms = timing.replay_ms(
            [lambda s=steps, b=block, g=grid: read_kernel[g](words, sums, s, b)] * 2
        )
        best = max(best, words.nbytes / ms / 1e9)
    a, b = random((8192, 8192), torch.bfloat16), random((8192, 8192), torch.bfloat16, seed=1)
    matrix = 2 * 8192**3 / timing.replay_ms([lambda: a @ b] * 4) / 1e9
    host = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    device = words.view(torch.uint8)[: 1 << 30]
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    device.copy_(host, non_blocking=True)
    begin.record()
    for _ in range(3):
        device.copy_(host, non_blocking=True)
    end.record()
    end.synchronize()
    copy = 3 * host.nbytes / begin.elapsed_time(end) / 1e6
    return dict(zip(CEILINGS, (best, matrix, copy), strict=True))


# ---------------------------------------------------------------- times


def time_experts(model: Experts, ceiling: dict, prefill: bool = True) -> dict:
    rows = {}
    for tokens in (1, 2, 3, 5, 8, 16, 17, 32):
        calls, read, union = model.calls(tokens, "all")
        ms = timing.replay_ms(calls)
        row = {"union": union, "ms": ms, "TB_s": read / ms / 1e9}
        row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
        for part in ("up", "down"):
            calls, read, _ = model.calls(tokens, part)
            row[f"{part}_TB_s"] = read / timing.replay_ms(calls) / 1e9
        row["combine_us"] = timing.replay_ms(model.calls(tokens, "combine")[0] * 8) * 1e3
        rows[f"decode T={tokens}"] = row
    for tokens in (64, 128, 256, 512, 2048, 4096) if prefill else ():
        calls, read, _union = model.calls(tokens, "all")
        ms = timing.replay_ms(calls, 7)
        flops = 6 * tokens * model.choices * model.hidden * model.inner
        row = {"ms": ms, "TFLOP_s": flops / ms / 1e9}
        row["of_matrix_rate"] = row["TFLOP_s"] / ceiling["bf16_matrix_TFLOP_s"]
        row["TB_s"] = read / ms / 1e9
        rows[f"prefill T={tokens}"] = row
    return rows


def time_cliffs(model: Experts) -> dict:
    """Every row with the same experts, T = 1 .. 32: the time at T + 1 over the time at T."""
    times = []
    uses = model.uses(list(range(model.choices)))
    for tokens in range(1, 33):
        experts = torch.arange(model.choices, dtype=torch.int32, device=DEVICE).repeat(tokens, 1)
        x = random((tokens, model.hidden), torch.bfloat16)
        h = torch.empty(tokens, model.choices, model.inner, dtype=torch.bfloat16, device=DEVICE)
        out = new_partial(x, experts, model.shape)

        def both(use, x=x, h=h, out=out, experts=experts):
            expert_up(x, experts, use, model.shape, h)
            expert_down(h, experts, use, model.shape, out)

        times.append(timing.replay_ms([lambda u=u: both(u) for u in uses]))
    worst = max(later / before for before, later in itertools.pairwise(times))
    return {"us": " ".join(f"{ms * 1e3:.1f}" for ms in times), "worst_step": worst}


def time_codes(ceiling: dict) -> dict:
    """Quantised weights: experts of three models, one dense layer, reads of host memory."""
    rows = {}
    for name in SHAPES:
        model = shared_experts("int4-g64z", name)
        for row, values in time_experts(model, ceiling, name == "mixtral").items():
            rows[f"{name} int4-g64z {row}"] = values
        if name == "mixtral":
            rows["mixtral int4-g64z cliffs"] = time_cliffs(model)
        if name != "deepseek":
            for row, values in time_host_reads(model).items():
                rows[f"{name} int4-g64z host {row}"] = values
    for dtype in ("int4-g32z", "int4-g128z", "int8-g64"):
        for tokens in (1, 5, 8, 32, 512):
            calls, read, union = shared_experts(dtype).calls(tokens, "all")
            ms = timing.replay_ms(calls, 7)
            rate = read / ms / 1e9
            rows[f"mixtral {dtype} T={tokens}"] = {
                "union": union, "ms": ms, "TB_s": rate, "of_hbm": rate / ceiling["hbm_read_TB_s"],
            }  # fmt: skip
    for dtype in ("int4-g64z", "int8-g64"):
        for tokens in (1, 5, 32):
            rows[f"dense {dtype} T={tokens}"] = time_dense_codes(dtype, tokens, ceiling)
        w = weights(dtype, (14336, 4096), 1)[0]
        for tokens in (512, 2048):
            x = random((tokens, 4096), torch.bfloat16)
            ms = timing.replay_ms([lambda x=x, w=w: linear(x, w)] * 4, 7)
            rate = 2 * tokens * 14336 * 4096 / ms / 1e9
            rows[f"dense {dtype} gate T={tokens}"] = {
                "us": ms * 1e3, "TFLOP_s": rate, "of_matrix_rate": rate / ceiling["bf16_matrix_TFLOP_s"],
            }  # fmt: skip
    return rows


def time_dense_codes(dtype: str, tokens: int, ceiling: dict) -> dict:
    """The products of one Mistral-7B layer as the model makes them: qkv, o, gate_up, down."""
    row, total_ms, total_bytes = {}, 0.0, 0
    for name, shape in LAYER.items():
        x = random((tokens, shape[1]), torch.bfloat16)
        ms = timing.replay_ms([lambda x=x, w=w: linear(x, w) for w in weights(dtype, shape)])
        row[f"{name}_us"] = ms * 1e3
        total_ms, total_bytes = total_ms + ms, total_bytes + matrix_bytes(dtype, *shape)
    row["us"] = total_ms * 1e3
    row["of_hbm"] = total_bytes / total_ms / 1e9 / ceiling["hbm_read_TB_s"]
    return row


def time_host_reads(model: Experts) -> dict:
    experts = model.slab[: model.experts]
    host = torch.empty(experts.shape, dtype=torch.uint8, pin_memory=True).copy_(experts)
    copies = torch.empty_like(experts)
    rows = {}
    for tokens in (1, 5, 8, 32):
        _, ids = model.route(tokens)
        calls, read, union = model.calls(tokens, "all", [table(ids, host)])
        row = {"union": union, "read_GB_s": read / timing.replay_ms(calls, 3) / 1e6}
        calls, read, _ = model.calls(tokens, "all", [table(ids, host, copies)])
        row["write_through_GB_s"] = read / timing.replay_ms(calls, 3) / 1e6
        row["write_through_over_read"] = row["write_through_GB_s"] / row["read_GB_s"]
        rows[f"T={tokens}"] = row
    return rows


def time_attention(ceiling: dict) -> dict:
    rows = {}
    for name, coded in (("", False), (" int8", True)):
        for context in (1024, 8192, 32768):
            for tokens in (1, 5, 8, 32):
                layers = 8 if context > 1024 else 64
                ms = timing.replay_ms(attention_calls(tokens, context, layers, coded))
                one = HEAD_DIM + 2 if coded else 2 * HEAD_DIM  # with its scale
                read = 2 * context * HEADS_KV * one
                row = {"us": ms * 1e3, "TB_s": read / ms / 1e9}
                row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
                rows[f"T={tokens} context {context}{name}"] = row
    for tokens in (512, 2048):
        ms = timing.replay_ms(attention_calls(tokens, tokens, 4), 7)
        rows[f"prefill {tokens}"] = {
            "us": ms * 1e3,
            "TFLOP_s": 2 * tokens * tokens * HEADS * HEAD_DIM / ms / 1e9,
        }
    return rows


def time_linear(ceiling: dict) -> dict:
    rows = {}
    for tokens in (1, 5, 32):
        total_ms = total_bytes = 0.0
        for name, shape in DENSE.items():
            ms, torch_ms = kernel_compare.beside_torch(shape, tokens)
            read = matrix_bytes("bf16", *shape)
            row = {"us": ms * 1e3, "TB_s": read / ms / 1e9, "torch_us": torch_ms * 1e3}
            row["of_hbm"] = row["TB_s"] / ceiling["hbm_read_TB_s"]
            rows[f"{name} T={tokens}"] = row
            if name in LAYER:
                total_ms, total_bytes = total_ms + ms, total_bytes + read
        share = total_bytes / total_ms / 1e9 / ceiling["hbm_read_TB_s"]
        rows[f"layer T={tokens}"] = {"us": total_ms * 1e3, "of_hbm": share}
    w = weights("bf16", (14336, 4096), 1)[0]
    for tokens in (512, 2048):
        x = random((tokens, 4096), torch.bfloat16)
        for name, function in (("ours", linear), ("torch", torch.nn.functional.linear)):
            ms = timing.replay_ms([lambda f=function, x=x: f(x, w)] * 4, 7)
            rate = 2 * tokens * 14336 * 4096 / ms / 1e9
            rows[f"gate T={tokens} {name}"] = {"us": ms * 1e3, "TFLOP_s": rate}
    return rows


def time_small() -> dict:
    rows = {}
    for experts, hidden, k in ((8, 4096, 2), (64, 2048, 6), (128, 2048, 8)):
        routers = [random((experts, hidden), torch.bfloat16, seed=i) for i in range(8)]
        for tokens in (1, 5, 32):
            x = random((tokens, hidden), torch.bfloat16)
            ms = timing.replay_ms([lambda r=r, x=x, k=k: gate_topk(x, r, k) for r in routers])
            rows[f"gate {experts} experts T={tokens}"] = {"us": ms * 1e3}
    for tokens in (1, 5, 512):
        x, weight = random((tokens, 4096), torch.bfloat16), random(4096, torch.bfloat16)
        q = random((tokens, HEADS, HEAD_DIM), torch.bfloat16)
        k, v, *caches = (random((tokens, HEADS_KV, HEAD_DIM), torch.bfloat16) for _ in range(4))
        angle = random((tokens, HEAD_DIM // 2), torch.float32)
        ms = timing.replay_ms([lambda x=x, w=weight: rms_norm(x, w, 1e-5)] * 8)
        rows[f"norm T={tokens}"] = {"us": ms * 1e3}
        arguments = (q, k, v, angle, angle, 0, *caches)
        ms = timing.replay_ms([lambda a=arguments: rope_and_store(*a)] * 8)
        rows[f"rope T={tokens}"] = {"us": ms * 1e3}
        rows[f"q, k, v T={tokens}"] = time_heads(tokens)
    return rows


def time_heads(tokens: int) -> dict:
    """A layer's q, k and v in int4-g64z, turned and stored: by the product itself, and by two launches."""
    x = random((tokens, LAYER["qkv"][1]), torch.bfloat16)
    angle = random((tokens, HEAD_DIM // 2), torch.float32)
    caches = [random((tokens, HEADS_KV, HEAD_DIM), torch.bfloat16) for _ in "kv"]
    several = weights("int4-g64z", LAYER["qkv"])

    def apart(w) -> torch.Tensor:
        parts = linear(x, w).view(tokens, -1, HEAD_DIM).split([HEADS, HEADS_KV, HEADS_KV], 1)
        return rope_and_store(*parts, angle, angle, 0, *caches)

    ways = {
        "one_us": lambda w: project_and_store(x, w, None, angle, angle, 0, *caches),
        "two_us": apart,
    }
    return {
        name: timing.replay_ms([lambda w=w, run=run: run(w) for w in several]) * 1e3
        for name, run in ways.items()
    }


# ---------------------------------------------------------------- run


def parts(ceiling: dict, match: str) -> dict[str, Callable[[], dict]]:
    """What is timed, by name: each makes rows of results."""
    return {
        "codes": lambda: time_codes(ceiling),
        "linear": lambda: time_linear(ceiling),
        "attention": lambda: time_attention(ceiling),
        "experts": lambda: time_experts(shared_experts("bf16"), ceiling),
        "host_reads": lambda: time_host_reads(shared_experts("bf16")),
        "small": time_small,
        "layout": kernel_compare.time_layout,
        "ratios": kernel_compare.time_ratios,
        "sweep": lambda: sweep(match),
    }


PARTS = ["checks", *parts({}, "")]


def warm(index: int, count: int, only: list[str], match: str) -> None:
    """Compile a share of what will be timed: one launch of every `count`th replay, on one layer."""
    turn = itertools.count()

    def launch(calls, repeats: int = 0) -> float:
        if next(turn) % count == index:
            with contextlib.suppress(Exception):  # shown when it is timed
                calls[0]()
                torch.cuda.synchronize()
        return 1.0

    timing.replay_ms = launch
    for name, (*sizes, _layers) in SHAPES.items():
        SHAPES[name] = (*sizes, 1)
    globals()["time_host_reads"] = lambda model: {}  # the same kernels, and memory to lock
    kernel_compare.vllm_calls = lambda model, tokens: []
    for name, part in parts(dict.fromkeys(CEILINGS, 1.0), match).items():
        if name in only:
            with contextlib.suppress(Exception):
                part()
    shared_experts.cache_clear()
    torch.cuda.empty_cache()


def run_check(function: Callable, arguments: tuple) -> tuple[str, dict, list[str]]:
    """Group, results and failures of one check; an exception is a failure."""
    started = time.perf_counter()
    try:
        checks = function(*arguments)
    except Exception as error:
        name = f"{function.__name__}{arguments}"
        return name, {}, [f"{name}: {type(error).__name__}: {error}"[:600]]
    seconds = time.perf_counter() - started
    return checks.group, checks.results | {"seconds": seconds}, checks.failures


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
        "command": " ".join(["python benchmarks/kernels.py", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
        "failures": [],
    }

    def save() -> None:
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1), encoding="utf-8")

    started = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        shares = ((i, options.jobs, only, options.match) for i in range(options.jobs))
        pending = [pool.apply_async(warm, share) for share in shares]
        jobs = CHECKS if "checks" in only else []
        result["checks"] = {}
        for check in [pool.apply_async(run_check, job) for job in jobs]:
            group, result["checks"][group], failures = check.get()
            result["failures"] += failures
        for share in pending:
            share.get()
    print(f"compiled and checked in {time.perf_counter() - started:.0f} s", flush=True)
    if "checks" in only:
        print("\n".join(result["failures"]) or "all checks hold", flush=True)
    save()
    if only != ["checks"]:
        result["ceilings"] = ceilings()
        show("ceilings", result["ceilings"])
        for name, part in parts(result["ceilings"], options.match).items():
            if name in only:
                result[name] = part()
                save()
                show(name, result[name])
    return 1 if result["failures"] else 0


def show(name: str, rows: dict) -> None:
    for row, values in rows.items():
        shown = values.items() if isinstance(values, dict) else [("", values)]
        texts = (f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in shown)
        print(f"{name:10} {row:26}", *texts, flush=True)


if __name__ == "__main__":
    sys.exit(main())
