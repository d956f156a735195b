"""Compile what the launchers would launch, for GPUs that are not here. Run as a script, it prints JSON.

Each job runs a real launcher on small CPU tensors whose kernels are replaced by recorders, under a stubbed
compute capability; what was recorded is compiled by Triton for that capability and described: instructions
of the weight loads, registers spilled, shared memory. A script of its own because Triton decides between
interpreter and compiler when it is imported.
"""

import re
import time
import types
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parent.parent.parent

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


class Recorder:
    """Stands for a kernel: remembers the launch in place of making it."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        def launch(*args, num_warps, enable_fp_fusion, num_stages=3, **kwargs):
            bound = dict(zip(self.kernel.arg_names, args, strict=False)) | kwargs
            options = {
                "num_warps": num_warps,
                "num_stages": num_stages,
                "enable_fp_fusion": enable_fp_fusion,
            }
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


def compile_launch(kernel, bound: dict, options: dict, capability: tuple[int, int]) -> dict:
    """Compile one recorded launch and describe the result."""
    constexpr = {param.name for param in kernel.params if param.is_constexpr}
    signature, constants, aligned = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = bound[param.name]
        if param.name in constexpr:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            aligned[index,] = [["tt.divisibility", 16]]  # as torch allocates
        else:
            signature[param.name] = "fp32" if isinstance(value, float) else "i32"
    major, minor = capability
    started = time.perf_counter()
    binary = triton.compile(
        ASTSource(kernel, signature, constants, aligned),
        target=GPUTarget("cuda", major * 10 + minor, 32),
        options=options,
    )
    ptx = binary.asm["ptx"]
    return {
        "kernel": kernel.fn.__name__,
        "capability": f"{major}.{minor}",
        "options": options,
        "constants": {name: str(value) for name, value in constants.items()},
        "shared": binary.metadata.shared,
        "local_bytes": sum(int(n) for n in re.findall(r"\.local .*\[(\d+)\]", ptx)),
        "async_copies": sorted(
            set(re.findall(r"cp\.async\.\w+\.shared\.global [^;]*?, (0x\w+|\d+)", ptx))
        ),
        "global_loads": sorted(set(re.findall(r"ld\.global[.\w:]*", ptx))),
        "matrix": sorted(set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)[.\w:]*", ptx))),
        "cubin": binary.asm["cubin"],
        "seconds": round(time.perf_counter() - started, 2),
    }
