"""What is compiled: all of it while the engine warms up, nothing in the middle of an answer.

The real model and the real warm-up run on CPU tensors that say they are on a GPU, with kernels that
note how Triton would specialise them instead of running. Triton decides between interpreter and
compiler when it is imported, so this runs in a process of its own: this file, as a script.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CARDS = {"7.5": "fp16", "8.6": "bf16", "9.0": "bf16"}
MODULES = ("attention", "expert_gemm", "gate", "linear", "norm", "rope")
EXPERTS, CHOICES, CAPACITY, DRAFT_TOKENS = 8, 2, 17100, 8


@pytest.fixture(scope="module", params=[*CARDS.items(), ("9.0", "bf16", "int8")], ids=str)
def counted(request) -> dict[str, list[str]]:
    """The keys first seen in each phase on one card."""
    pytest.importorskip("triton", reason="Triton is declared for Linux only")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, *request.param]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_warm_up_compiles_every_kernel_of_a_step(counted, request):
    kernels = {key.partition(" ")[0] for key in counted["warm-up"]}
    assert kernels >= {
        "_attention_kernel",
        "_combine_kernel",
        "_expert_gemm_kernel",
        "_gate_kernel",
        "_linear_kernel",
        "_merge_kernel",
        "_rms_norm_kernel",
    }
    int8 = "int8" in request.node.callspec.params["counted"]
    assert ("_rope_kernel" in kernels) == int8  # else the product of q, k and v turns them


@pytest.mark.parametrize("phase", ["prompts", "decoding", "long prompts"])
def test_kind_k_o31_nothing_is_compiled_after_the_warm_up(counted, phase):
    assert counted[phase] == []


def main(card: str, dtype: str, kv_type: str = "") -> None:
    sys.path.insert(0, str(ROOT))
    import spmoe_lite  # noqa: F401

    sys.path.remove(str(ROOT))
    import importlib

    import torch
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from spmoe_lite import manifest
    from spmoe_lite.config import ModelConfig, Rope
    from spmoe_lite.decoder import PREFILL_CHUNK
    from spmoe_lite.kvcache import KVCache
    from spmoe_lite.loading import warm_up
    from spmoe_lite.model import Transformer
    from spmoe_lite.precision import ExpertLayout
    from spmoe_lite.predictor import ExpertPredictor

    class Elsewhere(torch.Tensor):
        """A CPU tensor that says it is on a GPU, and whose results do."""

        is_cuda = True

    major, minor = map(int, card.split("."))
    backend = make_backend(GPUTarget("cuda", major * 10 + minor, 32))
    seen: dict[str, None] = {}

    class Noted:
        """Stands for a kernel: notes what Triton would compile for a launch."""

        def __init__(self, kernel):
            self.name = kernel.fn.__name__
            self.bind = create_function_from_signature(kernel.signature, kernel.params, backend)

        def __getitem__(self, grid) -> Callable[..., None]:
            assert all(size > 0 for size in grid), self.name
            return self.note

        def note(self, *args, **kwargs) -> None:
            _, specialization, options = self.bind(*args, **kwargs)
            seen[f"{self.name} {specialization} {sorted(options.items())}"] = None

    for name in MODULES:
        module = importlib.import_module(f"spmoe_lite.kernels.{name}_triton")
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel"):
                setattr(module, name, Noted(kernel))
        if hasattr(module, "capability_of"):
            module.capability_of = lambda tensor: (major, minor)

    class Source:
        """Lends experts in groups of as many as `sizes` gives; what is chosen is not looked at."""

        def __init__(self):
            self.sizes: list[int] = []

        def begin_pass(self, rows: int) -> None:
            pass

        def serve(self, layer: int, experts: torch.Tensor) -> Iterator[torch.Tensor]:
            for size in self.sizes:
                yield torch.zeros(size, 3, dtype=torch.int64).as_subclass(Elsewhere)

    hidden, inner, source = 256, 320, Source()
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    size = hidden * inner * torch_dtype.itemsize
    layout = ExpertLayout(dtype, hidden, inner, 0, size, 2 * size, 3 * size)

    def model(family: str, experts: int, window: int | None) -> tuple[Transformer, KVCache]:
        config = ModelConfig(
            family, 512, hidden, inner, 2, 4, 2, 64, 1e-5, CAPACITY, Rope(1e4), window, experts,
            min(CHOICES, experts), attention_bias=family == "llama",
        )  # fmt: skip
        tensors = {
            name: torch.zeros(shape, dtype=torch_dtype).as_subclass(Elsewhere)
            for name, shape in manifest.dense_shapes(config).items()
        }
        moe = (source, layout) if experts else (None, None)
        made = Transformer(config, tensors, CAPACITY, *moe)
        kv_dtype = torch.int8 if kv_type else torch_dtype
        return made, KVCache(config, CAPACITY, kv_dtype, torch.device("cpu"))

    torch.cuda.Event = lambda: type("Event", (), {"record": lambda self: None})()
    target, draft = model("mixtral", EXPERTS, None), model("llama", 0, 700)
    predictor = ExpertPredictor(target[0], CHOICES + 1)
    result: dict[str, list[str]] = {}

    def phase(name: str, steps: Callable[[], None]) -> None:
        before = len(seen)
        steps()
        result[name] = list(seen)[before:]

    def run(rows: int, start: int, sizes: list[int], logits_rows: int = 1) -> None:
        source.sizes = sizes
        for made, kv in (target, draft):
            kv.length = start
            made.forward([0] * rows, kv, logits_rows=min(rows, logits_rows))

    def warm() -> None:
        source.sizes = [CHOICES]  # rows of one token choose alike
        warm_up(torch.device("cpu"), [target, draft], predictor, None, None)
        assert target[1].length == draft[1].length == 0

    def groups() -> list[int]:
        return [chance.randint(1, EXPERTS) for _ in range(chance.randint(1, 3))]

    def prompts() -> None:
        for rows in range(1, 41):
            run(rows, 0, groups())

    def decoding() -> None:
        for start in (
            1,
            39,
            127,
            128,
            129,
            300,
            699,
            700,
            1023,
            1024,
            1279,
            1280,
            1700,
            4096,
            9000,
            16400,
        ):
            for drafted in range(DRAFT_TOKENS + 1):
                run(drafted + 1, start, groups(), drafted + 1)
            state = torch.empty(1, hidden, dtype=torch_dtype).as_subclass(Elsewhere)
            predictor.predict(1, 0, state)

    def long_prompts() -> None:
        for rows in (41, 63, 64, 65, 127, 128, 129, 255, 256, 257, 500, PREFILL_CHUNK):
            for start in (0, 100, 512, 1500, 15000):
                run(rows, start, groups())

    chance = random.Random(0)
    with torch.inference_mode():
        phase("warm-up", warm)
        phase("prompts", prompts)
        phase("decoding", decoding)
        phase("long prompts", long_prompts)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
