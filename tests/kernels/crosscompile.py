"""Compile what the launchers would launch, for GPUs that are not here: `crosscompile.py 8.6 9.0`.

Each job runs a real launcher on CPU tensors whose kernels are replaced by recorders, under a
stubbed compute capability; what was recorded is compiled by Triton for that capability and
described, one line of JSON per kernel: loads, matrix instructions, shared memory, stack, whether
ptxas made each wgmma wait for the one before, how a flag is read that another stream sets meanwhile.
A script of its own, because Triton decides between interpreter and compiler when it is imported.
"""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import spmoe_lite  # noqa: E402, F401

sys.path.remove(str(ROOT))

os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # faster, and the same code

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from spmoe_lite.kernels import (  # noqa: E402
    attention_triton,
    expert_gemm_triton,
    gate_triton,
    linear_triton,
    residency_triton,
    rope_triton,
)
from spmoe_lite.kernels.configs import SOME  # noqa: E402
from spmoe_lite.kernels.residency import Tables  # noqa: E402
from spmoe_lite.precision import ExpertLayout, matrix_bytes, scheme_of  # noqa: E402
from spmoe_lite.quant import view_matrix  # noqa: E402

HIDDEN, INNER, CHOICES, EXPERTS = 4096, 14336, 2, 8
EXPERT_JOBS = [("up", 1), ("up", 32), ("up", 256), ("up", 512)]
EXPERT_JOBS += [("down", 1), ("down", 256), ("down", 512)]
MIDDLE = [("up", 32), ("down", 256)]  # of groups of another size: between what takes less and more
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
SCHEMES = ("int4-g64z", "int4-g32z", "int4-g128z", "int8-g64")  # the first for every card
POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands for a kernel: remembers the launch in place of making it."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            assert {"num_warps", "enable_fp_fusion"} <= options.keys()
            bound = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            self.launches.append((self.kernel, bound, options))

        return launch


def record(module: types.ModuleType, capability: tuple[int, int], call) -> list:
    """The launches that `call()` makes through the kernels of `module`."""
    launches: list = []
    kept = dict(vars(module))
    for name, value in kept.items():
        if name.endswith("_kernel"):
            setattr(module, name, Recorder(value, launches))
    module.capability_of = lambda tensor: capability
    try:
        call()
    finally:
        vars(module).update(kept)
    return launches


def stack_bytes(cubin: bytes) -> int:
    """Bytes of local memory per thread: what did not fit in registers."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [str(tool), "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text).group(1))


def asks(ptx: str, kernel) -> list[str]:
    """Instructions that go to `over_ptr` itself, each with the predicate that says which threads make them."""
    if "over_ptr" not in kernel.arg_names:
        return []
    place = [p.name for p in kernel.params if not p.is_constexpr].index("over_ptr")
    kept = re.search(
        rf"ld\.param\.\w+\s+(%rd\d+), \[{kernel.fn.__name__}_param_{place}\]", ptx
    ).group(1)
    return re.findall(rf"^\s*((?:@!?%p\d+\s+)?[a-z][\w.]*) [^\n]*\[ ?{kept}\b", ptx, re.MULTILINE)


def describe(kernel, bound: dict, options: dict, capability: tuple[int, int]) -> dict:
    """Compile one recorded launch and describe the result."""
    signature, constants, aligned = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = bound[param.name]
        if param.is_constexpr or value is None:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            aligned[index,] = [["tt.divisibility", 16]]  # as torch allocates
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    with contextlib.redirect_stdout(io.StringIO()) as log:
        binary = triton.compile(
            ASTSource(kernel, signature, constants, aligned),
            target=GPUTarget("cuda", capability[0] * 10 + capability[1], 32),
            options=options,
        )
    ptx = binary.asm["ptx"]
    loads = re.findall(r"ld\.global[.\w:]*?\.((?:v\d\.)?[bf]\d+)\b", ptx)
    async_bytes = re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?\], *(0x\w+|\d+)", ptx)
    matrix = re.findall(r"(wgmma\.mma_async|mma\.sync)", ptx)
    return {
        "kernel": kernel.fn.__name__,
        "capability": "{}.{}".format(*capability),
        "options": options,
        "constants": {name: str(value) for name, value in constants.items()},
        "loads": sorted(set(loads)),
        "async_bytes": sorted({int(count, 0) for count in async_bytes}),
        "matrix": sorted(set(matrix)),
        "shared": binary.metadata.shared,
        "stack": stack_bytes(binary.asm["cubin"]),
        "serialized": "serialized" in log.getvalue(),
        "asks": asks(ptx, kernel),
    }


def expert_call(kind: str, tokens: int, dtype: torch.dtype, name: str):
    size = matrix_bytes(name, INNER, HIDDEN)
    layout = ExpertLayout(name, HIDDEN, INNER, 0, size, 2 * size, 3 * size)
    experts = torch.zeros(tokens, CHOICES, dtype=torch.int32)
    use = torch.zeros(EXPERTS, 3, dtype=torch.int64)
    h = torch.empty(tokens, CHOICES, INNER, dtype=dtype)
    if kind == "up":
        x = torch.empty(tokens, HIDDEN, dtype=dtype)
        return lambda: expert_gemm_triton.expert_up_triton(x, experts, use, layout, h)
    segments = expert_gemm_triton.down_segments(layout)[1]
    out = torch.empty(tokens, CHOICES, HIDDEN, dtype=dtype)
    if segments > 1 and tokens <= SOME:
        out = out.new_empty(segments, *out.shape, dtype=torch.float32)
    return lambda: expert_gemm_triton.expert_down_triton(h, experts, use, layout, out)


def weight_of(name: str, rows: int, columns: int, dtype: torch.dtype):
    run, scheme = torch.empty(matrix_bytes(name, rows, columns), dtype=torch.uint8), scheme_of(name)
    if scheme is None:
        return run.view(dtype).view(rows, columns)
    return view_matrix(run, scheme, rows, columns)


def linear_call(tokens: int, dtype: torch.dtype, name: str, gated: bool):
    x, weight = torch.empty(tokens, 4096, dtype=dtype), weight_of(name, 4096, 4096, dtype)
    return lambda: linear_triton.linear_triton(x, weight, gated=gated)


def heads_call(tokens: int, dtype: torch.dtype, name: str):
    x, weight = torch.empty(tokens, 4096, dtype=dtype), weight_of(name, 6144, 4096, dtype)
    turn, caches = torch.empty(64, 64), torch.empty(2, 64, 8, 128, dtype=dtype)
    start = torch.zeros(1, dtype=torch.int32) if tokens == 1 else 0
    arguments = (x, weight, None, turn, turn, start, *caches)
    return lambda: linear_triton.project_and_store_triton(*arguments)


def gate_call(experts: int, hidden: int, choices: int, dtype: torch.dtype):
    x, router = torch.empty(5, hidden, dtype=dtype), torch.empty(experts, hidden, dtype=dtype)
    return lambda: gate_triton.norm_gate_topk_triton(x, x[0], 1e-5, router, choices)


def attention_call(tokens: int, head_dim: int, coded: bool, dtype: torch.dtype):
    q = torch.empty(tokens, 32, head_dim, dtype=dtype)
    k, v = (torch.empty(4096, 8, d, dtype=torch.int8 if coded else dtype) for d in (head_dim, 128))
    scales = torch.empty(8, 4096, 2, dtype=torch.float16) if coded else None
    return lambda: attention_triton.attention_triton(q, k, v, 1024, kv_scales=scales)


def rope_call(dtype: torch.dtype):
    q, k, v = torch.empty(5, 48, 128, dtype=dtype).split([32, 8, 8], 1)
    turn, caches = torch.empty(4096, 64), torch.empty(2, 4096, 8, 128, dtype=torch.int8)
    scales = torch.empty(8, 4096, 2, dtype=torch.float16)
    return lambda: rope_triton.rope_and_store_triton(q, k, v, turn, turn, 7, *caches, scales)


def residency_calls():
    zeros = partial(torch.zeros, dtype=torch.int32)
    addresses = torch.ones(4, 128, dtype=torch.int64)
    tables, one = Tables.make(addresses, addresses[:, :64].contiguous(), (8, 4, 8)), zeros(1)
    yield lambda: residency_triton.route_triton(tables, 0, zeros(5, 8), addresses[:3], zeros(5, 8))
    yield lambda: residency_triton.stage_triton(tables, zeros(4, 8), one, zeros(8), one)
    yield lambda: residency_triton.fetch_triton(tables, 1 << 20, 0, 2)
    few = Tables.make(addresses, addresses[:, :64].contiguous(), (2, 2, 8))
    yield lambda: residency_triton.stage_triton(few, zeros(2, 8), one, zeros(2), one)


def jobs(capability: tuple[int, int]):
    """(module, call) of most tiles on 8.6 and 9.0, of those that need most elsewhere."""
    name, dtype = ("fp16", torch.float16) if capability < (8, 0) else ("bf16", torch.bfloat16)
    brief = capability not in ((8, 6), (9, 0))
    for weights in (name, SCHEMES[0]) if brief else (name, *SCHEMES):
        for job in [("up", 1), ("up", 512)] if brief else EXPERT_JOBS:
            if job not in MIDDLE or weights not in SCHEMES[1:3]:
                yield expert_gemm_triton, expert_call(*job, dtype, weights)
    for sizes in [(128, 2048, 8)] if brief else [(8, 4096, 2), (128, 2048, 8)]:
        yield gate_triton, gate_call(*sizes, dtype)
    for weight in () if brief else (name, SCHEMES[0]):
        for tokens, gated in ((1, False), (1, True), (512, True)):
            yield linear_triton, linear_call(tokens, dtype, weight, gated)
        for tokens in (1, 512):
            yield linear_triton, heads_call(tokens, dtype, weight)
    rows = [(2048, 128, False), (2048, 192, True)]
    if not brief:
        rows += [(1, 128, False), (1, 128, True), (2048, 192, False)]
    for tokens, head_dim, coded in rows:
        yield attention_triton, attention_call(tokens, head_dim, coded, dtype)
    yield rope_triton, rope_call(dtype)
    for call in () if brief else residency_calls():
        yield residency_triton, call


def main() -> None:
    seen = set()
    for text in sys.argv[1:]:
        major, minor = map(int, text.split("."))
        for module, call in jobs((major, minor)):
            for launch in record(module, (major, minor), call):
                constants = {k: v for k, v in launch[1].items() if not torch.is_tensor(v)}
                key = repr((text, launch[0].fn.__name__, constants, launch[2]))
                if launch[0].fn.__name__ != "_order_kernel" and key not in seen:
                    print(json.dumps(describe(*launch, (major, minor))), flush=True)
                seen.add(key)


if __name__ == "__main__":
    main()
