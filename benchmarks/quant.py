"""What quantising loses and how fast it is: squared errors, speed, and texts under a quantised model.

    python benchmarks/quant.py error --pack demo --weights model.safetensors --json results.json
    python benchmarks/quant.py speed
    python benchmarks/quant.py quality --packs demo,demo-draft --json results.json

`error`: relative squared error of our schemes, of other ways to choose scale and zero in the same bits,
and of GGUF's formats at their sizes. Gaussian and Student-t weights (five degrees of freedom), experts
and attention of a pack, and the matrices of a float checkpoint. Q4_0, Q4_1 and Q8_0 are the gguf
package's; Q4_K, which that package only reads, is fitted here by search over its own format.

`quality`: three texts of three kinds, every token predicted from those before it. Quantised weights are
dequantised again and computed with in fp32, so only their rounding counts. Perplexity, the share of
tokens whose likeliest successor is that of the unquantised pack, and the mean divergence from it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from spmoe_lite import library  # noqa: E402
from spmoe_lite.kvcache import KVCache  # noqa: E402
from spmoe_lite.manifest import EMBED, HEAD  # noqa: E402
from spmoe_lite.model import Transformer  # noqa: E402
from spmoe_lite.pack import Pack  # noqa: E402
from spmoe_lite.precision import Scheme, scheme_of  # noqa: E402
from spmoe_lite.quant import quantize  # noqa: E402
from spmoe_lite.tokenizer import Tokenizer  # noqa: E402

OURS = ("int8-g32", "int8-g64", "int8-g128", "int4-g32", "int4-g32z", "int4-g64z", "int4-g128z")
KINDS = ("prose", "code", "conversation")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("error", "speed", "quality"))
    parser.add_argument("--pack", help="error: take experts and attention from this pack")
    parser.add_argument("--weights", type=Path, help="error: and these from a safetensors file")
    parser.add_argument("--packs", default="demo,demo-draft", help="quality: of these, in fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    command = " ".join(["python benchmarks/quant.py", *sys.argv[1:]])
    report = {"command": command, "machine": machine()}
    report["rows"] = {"error": error, "speed": speed, "quality": quality}[args.what](args)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, str | int]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }


# Errors


def error(args: argparse.Namespace) -> list[dict]:
    rows = []
    for source, weights in sources(args).items():
        base = loss(weights, by_gguf("Q4_0")(weights))
        for name, bits, way in ways():
            lost = loss(weights, way(weights))
            rows.append(
                {"source": source, "way": name, "bits": bits, "error": lost, "of_q4_0": lost / base}
            )
            print(
                f"{source:12} {name:34} {bits:6.3f} bits {lost:.6f} {lost / base:.4f}", flush=True
            )
    return rows


def sources(args: argparse.Namespace) -> dict[str, torch.Tensor]:
    """[256, 3072] of each kind."""
    generator = torch.Generator().manual_seed(0)

    def normal() -> torch.Tensor:
        return torch.randn(256, 3072, generator=generator) * 0.02

    def some(matrices: list[torch.Tensor]) -> torch.Tensor:
        """As many weights of each, runs of 512 from anywhere."""
        count = 256 * 3072 // 512 // len(matrices) + 1
        runs = [m[: m.numel() // 512 * 512].view(-1, 512) for m in (m.flatten() for m in matrices)]
        picked = [r[torch.randperm(len(r), generator=generator)[:count]] for r in runs]
        return torch.cat(picked).flatten()[: 256 * 3072].view(256, 3072).float()

    found = {"gaussian": normal()}
    squares = sum(normal() ** 2 for _ in range(5)) / 5
    found["student-t"] = normal() * 0.02 / squares.sqrt()
    if args.pack:
        with Pack.open(library.find(args.pack)) as pack:
            layers = pack.config.num_hidden_layers
            experts = [read_expert(pack, layer, layer % 8) for layer in range(0, layers, 3)]
            found["experts"] = some([m for matrices in experts for m in matrices])
            dense = pack.load_dense()
            found["attention"] = some([w for n, w in dense.items() if n.endswith("_proj.weight")])
    if args.weights:
        from safetensors.torch import load_file

        file = load_file(args.weights)
        found["checkpoint"] = some([w for n, w in file.items() if w.ndim == 2 and "embed" not in n])
    return found


def ways():
    """(name, bits a weight, weights -> the weights that come back)."""
    for dtype in OURS:
        scheme = scheme_of(dtype)
        yield dtype, scheme.bits + 16 / scheme.group, ours(scheme)
    for group in (32, 64):
        bits = 4 + 16 / group
        yield f"g{group}: largest is 7", bits, grouped(group, largest_is_seven)
        yield f"g{group}: extreme is -8", bits, grouped(group, extreme_is_minus_eight)
        yield f"g{group}z: smallest to largest", bits, grouped(group, whole_range)
        yield f"g{group}z: half-quadratic zero", bits, grouped(group, half_quadratic)
        yield f"g{group}z: 30 ranges, 10 zeros", bits, grouped(group, exhaustive)
        yield f"g{group}z: half-step zeros, 3 x 3", bits, grouped(group, half_steps)
    for name, bits in (("Q4_0", 4.5), ("Q4_1", 5.0), ("Q8_0", 8.5)):
        yield name, bits, by_gguf(name)
    yield "Q4_K", 4.5, q4_k


def loss(weights: torch.Tensor, back: torch.Tensor) -> float:
    return float(((weights - back).double() ** 2).sum() / (weights.double() ** 2).sum())


def ours(scheme: Scheme):
    return lambda weights: quantize(weights, scheme).dequantize()


def by_gguf(name: str):
    kind = gguf.GGMLQuantizationType[name]

    def way(weights: torch.Tensor) -> torch.Tensor:
        packed = gguf.quants.quantize(weights.numpy(), kind)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind))

    return way


def grouped(group: int, choose):
    """`choose` maps [G, group] to scale and zero [G, 1]; codes 0 to 15 are taken afterwards."""

    def way(weights: torch.Tensor) -> torch.Tensor:
        groups = weights.view(-1, group)
        scale, zero = choose(groups)
        scale = scale.bfloat16().float()
        return (nearest(groups, scale, zero) * scale).view(weights.shape)

    return way


def nearest(groups, scale, zero):
    return (groups / scale + zero).round_().clamp_(0, 15) - zero


def fitted(groups, scale, zero):
    """The squared error, and the scale, that least squares gives for the codes of `scale`."""
    codes = nearest(groups, scale, zero)
    dot, square = (codes * groups).sum(1, True), (codes**2).sum(1, True).clamp_(min=0.25)
    return -(dot**2) / square, dot / square


def best_of(groups, candidates):
    chosen = None
    for scale, zero in candidates:
        lost, scale = fitted(groups, scale, zero)
        if chosen is None:
            chosen = [lost, scale, zero]
        else:
            better = lost < chosen[0]
            pairs = zip((lost, scale, zero), chosen, strict=True)
            chosen = [torch.where(better, new, old) for new, old in pairs]
    _, scale, zero = chosen
    return fitted(groups, scale, zero)[1], zero


def ends(groups):
    return groups.amin(1, True).clamp_(max=0), groups.amax(1, True).clamp_(min=0)


def largest_is_seven(groups):
    scale = groups.abs().amax(1, True) / 7
    return scale, torch.full_like(scale, 8)


def extreme_is_minus_eight(groups):
    extreme = groups.gather(1, groups.abs().argmax(1, True))
    return -extreme / 8, torch.full_like(extreme, 8)


def whole_range(groups):
    low, high = ends(groups)
    scale = (high - low) / 15
    return scale, (-low / scale).round()


def half_quadratic(groups, power=0.7, beta=10.0, growth=1.01, steps=20):
    """HQQ (Badri and Shaji 2023) with its usual constants; the zero is rounded to a whole one."""
    low, high = ends(groups)
    rate = 15 / (high - low)
    zero = -low * rate
    for _ in range(steps):
        codes = (groups * rate + zero).round_().clamp_(0, 15)
        off = groups - (codes - zero) / rate
        shrunk = (off.abs() - off.abs().clamp(min=1e-12) ** (power - 1) / beta).clamp_(min=0)
        zero = (codes - (groups - off.sign() * shrunk) * rate).mean(1, True)
        beta *= growth
    zero = zero.round().clamp_(0, 15)
    return fitted(groups, 1 / rate, zero)[1], zero


def exhaustive(groups):
    """What whole zeros allow, nearly."""
    low, high = ends(groups)
    shares, zeros = np.linspace(0.6, 1.05, 30), range(3, 13)
    scales = [(high - low) * float(share) / 15 for share in shares]
    return best_of(groups, ((s, torch.full_like(s, z)) for s in scales for z in zeros))


def half_steps(groups):
    """Zeros 4, 4.5, ..., 11.5: as many bits as 0, 1, ..., 15."""
    low, high = ends(groups)
    candidates = []
    for share in (1.0, 0.91, 0.82):
        scale = (high - low) * share / 15
        middle = ((7.5 - (high + low) / 2 / scale) * 2).round() / 2
        candidates += [(scale, (middle + d).clamp(4, 11.5)) for d in (-0.5, 0, 0.5)]
    return best_of(groups, candidates)


def q4_k(weights: torch.Tensor) -> torch.Tensor:
    """Q4_K's format: 8 groups of 32 share fp16 d and e; w = d s c - e m with s, m of 6 bits."""
    groups = weights.view(-1, 8, 32)
    low, high = groups.amin(2, True).clamp_(max=0), groups.amax(2, True)
    best, scale, offset = None, None, None
    for share in np.linspace(0.7, 1.05, 15):
        step = ((high - low) * float(share) / 15).clamp_(min=1e-12)
        middle = (high + low) / 2
        codes = ((groups - middle) / step + 7.5).round_().clamp_(0, 15)
        # least squares for step and offset, the latter never positive
        mean_c, mean_w = codes.mean(2, True), groups.mean(2, True)
        spread = ((codes - mean_c) ** 2).mean(2, True).clamp_(min=1e-9)
        step = ((codes - mean_c) * (groups - mean_w)).mean(2, True) / spread
        base = (mean_w - step * mean_c).clamp_(max=0)
        lost = ((codes * step + base - groups) ** 2).sum(2, True)
        if best is None:
            best, scale, offset = lost, step, -base
        else:
            better = lost < best
            pairs = ((lost, best), (step, scale), (-base, offset))
            best, scale, offset = (torch.where(better, new, old) for new, old in pairs)

    def six_bits(values: torch.Tensor) -> torch.Tensor:
        unit = (values.amax(1, True) / 63).half().float().clamp_(min=1e-12)
        return (values / unit).round_().clamp_(0, 63) * unit

    scale, offset = six_bits(scale), six_bits(offset)
    codes = ((groups + offset) / scale.clamp(min=1e-12)).round_().clamp_(0, 15)
    return (codes * scale - offset).view(weights.shape)


# Speed


def speed(args: argparse.Namespace) -> list[dict]:
    """GB of bf16 source per second, the best of twelve runs; other programs may be running."""
    rows = []
    weights = torch.randn(3584, 4096).bfloat16()  # a quarter of one matrix of Mixtral
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for dtype in OURS:
            seconds = []
            for _ in range(12):
                started = time.perf_counter()
                quantize(weights, scheme_of(dtype))
                seconds.append(time.perf_counter() - started)
            rate = weights.nbytes / min(seconds) / 1e9
            rows.append({"dtype": dtype, "threads": threads, "gb_per_s": rate})
            print(f"{dtype:12} {threads} threads {rate:.3f} GB/s", flush=True)
    return rows


# Quality


class Resident:
    """All experts of a pack in fp32, quantised and dequantised again; lends them to the model."""

    def __init__(self, pack: Pack) -> None:
        c = pack.config
        shape = (c.num_hidden_layers, c.num_local_experts, pack.expert_layout.stride // 4)
        self.memory = torch.empty(shape)
        self.pack = pack

    def fill(self, back) -> None:
        layout = self.pack.expert_layout
        h, i = layout.hidden_size, layout.intermediate_size
        places = ((layout.gate_offset, i, h), (layout.up_offset, i, h), (layout.down_offset, h, i))
        for layer, experts in enumerate(self.memory):
            for number, expert in enumerate(experts):
                self.pack.read_expert(layer, number, expert.numpy().view(np.uint8))
                for offset, rows, columns in places:
                    matrix = expert[offset // 4 : offset // 4 + rows * columns].view(rows, columns)
                    matrix.copy_(back(matrix))

    def begin_pass(self, rows: int) -> None:
        pass

    def serve(self, layer: int, experts: torch.Tensor):
        yield torch.tensor([[n, e.data_ptr(), 0] for n, e in enumerate(self.memory[layer])])


def read_expert(pack: Pack, layer: int, number: int) -> list[torch.Tensor]:
    layout = pack.expert_layout
    assert layout.dtype == "fp32", f"{pack.name} has experts in {layout.dtype}, not fp32"
    memory = np.empty(layout.stride, dtype=np.uint8)
    pack.read_expert(layer, number, memory)
    values, size = torch.from_numpy(memory).view(torch.float32), layout.hidden_size
    size *= layout.intermediate_size
    offsets = (layout.gate_offset, layout.up_offset, layout.down_offset)
    return [values[offset // 4 : offset // 4 + size] for offset in offsets]


def back_by(dtype: str):
    """Weights as they come back; columns that are no whole groups get zeros added, and lose them."""
    if dtype == "fp32":
        return lambda weights: weights
    if dtype.startswith("Q"):
        return by_gguf(dtype)
    name, _, other = dtype.partition(" ")
    scheme = scheme_of(name)
    choose = {"": None, "unsearched": whole_range, "half-step": half_steps}[other]
    way = grouped(scheme.group, choose) if choose else ours(scheme)

    def back(weights: torch.Tensor) -> torch.Tensor:
        columns = weights.shape[1]
        padded = torch.nn.functional.pad(weights, (0, -columns % scheme.group))
        return way(padded)[:, :columns]

    return back


TARGET_ROWS = [  # experts, linear, embed
    ("int8-g64", "fp32", "fp32"),
    ("Q4_0", "fp32", "fp32"),
    ("int4-g32", "fp32", "fp32"),
    ("int4-g32z", "fp32", "fp32"),
    ("int4-g64z", "fp32", "fp32"),
    ("int4-g64z unsearched", "fp32", "fp32"),
    ("int4-g128z", "fp32", "fp32"),
    ("int4-g32z half-step", "fp32", "fp32"),
    ("int4-g64z half-step", "fp32", "fp32"),
    ("fp32", "int8-g64", "fp32"),
    ("fp32", "int4-g32z", "fp32"),
    ("fp32", "int4-g64z", "fp32"),
    ("fp32", "fp32", "int8-g64"),
    ("int4-g32z", "int8-g64", "int8-g64"),
    ("int4-g64z", "int8-g64", "int8-g64"),
    ("int4-g32z", "int4-g32z", "int8-g64"),
    ("int4-g64z", "int4-g64z", "int8-g64"),
]
DRAFT_ROWS = [
    ("int8-g64", "fp32"),
    ("Q4_0", "fp32"),
    ("int4-g32z", "fp32"),
    ("int4-g64z", "fp32"),
    ("int4-g128z", "fp32"),
    ("fp32", "int8-g64"),
    ("int8-g64", "int8-g64"),
    ("int4-g64z", "int8-g64"),
]


@torch.inference_mode()
def quality(args: argparse.Namespace) -> list[dict]:
    rows = []
    for name in args.packs.split(","):
        with Pack.open(library.find(name)) as pack:
            assert pack.dense_dtype == "fp32", f"{name} is {pack.dense_dtype}, not fp32"
            moe = pack.config.is_moe
            resident = Resident(pack) if moe else None
            tokenizer = Tokenizer.load(pack.path, pack.config)
            texts = {
                kind: tokenizer.encode((ROOT / f"benchmarks/texts/{kind}.txt").read_text("utf-8"))
                for kind in KINDS
            }
            base, held = None, None
            cases = TARGET_ROWS if moe else [("", *row) for row in DRAFT_ROWS]
            for experts, linear, embed in sorted({("fp32" * moe, "fp32", "fp32")}) + cases:
                if moe and held != experts:
                    resident.fill(back_by(experts))
                    held = experts
                found = run(pack, resident, texts, linear, embed)
                base = base or found
                row = {"pack": name, "experts": experts, "linear": linear, "embed": embed}
                row["texts"] = {k: compare(texts[k], base[k], found[k]) for k in KINDS}
                rows.append(row)
                print(name, experts, linear, embed, flush=True)
                for kind, values in row["texts"].items():
                    shown = ", ".join(f"{k} {v:.4f}" for k, v in values.items())
                    print(f"    {kind:12} {shown}", flush=True)
    return rows


def run(pack, resident, texts, linear, embed) -> dict[str, torch.Tensor]:
    """Log-probabilities [T - 1, V] of what follows each token but the last."""
    tensors = pack.load_dense()
    for name, tensor in tensors.items():
        dtype = embed if name in (EMBED, HEAD) else linear
        if name in (EMBED, HEAD) or name.endswith("_proj.weight"):
            tensors[name] = back_by(dtype)(tensor)
    model = Transformer(pack.config, tensors, 4096, resident, pack.expert_layout)
    found = {}
    for kind, tokens in texts.items():
        cache = KVCache(pack.config, len(tokens), torch.float32, torch.device("cpu"))
        logits = model.forward(tokens[:-1], cache, logits_rows=len(tokens) - 1)
        found[kind] = logits.float().log_softmax(1)
    return found


def compare(tokens: list[int], base: torch.Tensor, found: torch.Tensor) -> dict[str, float]:
    following = torch.tensor(tokens[1:])[:, None]
    return {
        "tokens": len(following),
        "perplexity": math.exp(-float(found.gather(1, following).mean())),
        "top1": float((base.argmax(1) == found.argmax(1)).float().mean()),
        "divergence": float((base.exp() * (base - found)).sum(1).mean()),
    }


if __name__ == "__main__":
    main()
