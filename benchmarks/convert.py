"""convert against `cp` and `sha256sum` of the same bytes: rate and peak memory.

    python benchmarks/convert.py [--gb 2.5] [--folder DIR] [--runs 3] [--out benchmarks/convert.json]

Writes a synthetic Mixtral checkpoint (bf16, random values, sharded as published) of about `--gb` GB to a
temporary folder below `--folder`, which must be on a real disk to mean anything, reads it once so that the
page cache is warm, and then runs in turn, each in a process of its own, after a `sync`:

    cp -r CHECKPOINT COPY && sha256sum COPY/*      what the bytes cost at the least: read, write, read, hash
    convert(CHECKPOINT)                            read, check, write and hash, flush, read back and hash

The baseline is timed without and with a `sync` of the copy, since convert flushes every file. Rates are
bytes of the checkpoint over wall seconds, start of the interpreter and imports included. Peak memory is
`ru_maxrss` of the converting process, held against its limit: one layer plus 1 GiB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

CONVERT = """
import json, resource, sys, time
sys.path.insert(0, sys.argv[1])
start = time.perf_counter()
from spmoe_lite.converters import convert
imported = time.perf_counter()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stages = {}
def report(progress):
    now = time.perf_counter()
    first, _ = stages.get(progress.stage, (now, now))
    stages[progress.stage] = (first, now)
convert(sys.argv[2], out=sys.argv[3], experts=sys.argv[4] or None, on_progress=report)
done = time.perf_counter()
print(json.dumps({
    "import_s": imported - start,
    "convert_s": done - imported,
    "verify_s": stages["verify"][1] - stages["convert"][1],
    "import_bytes": before * 1024,
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
}))
"""


def write_checkpoint(folder: Path, gb: float) -> dict[str, int]:
    """A Mixtral with layers of 8 experts of 3 x 3584 x 2048, as many as make `gb` GB; bf16."""
    import torch

    sys.path.insert(0, str(ROOT))
    from tests import tiny  # type: ignore[import-not-found]

    hidden, width, experts, vocab = 2048, 3584, 8, 32000
    layer = experts * 3 * hidden * width * 2
    layers = max(1, round((gb * 1e9 - 2 * vocab * hidden * 2) / layer))
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    tiny.write_json(folder / "config.json", config)
    tiny.write_tokenizer(folder)
    tensors = tiny.random_tensors(config, seed=0, dtype=torch.bfloat16)
    tiny.write_shards(folder, tensors, shards=layers + 1)
    return {"layers": layers, "layer_bytes": layer}


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def timed(command: list[str] | str) -> float:
    os.sync()
    start = time.perf_counter()
    subprocess.run(command, shell=isinstance(command, str), check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def convert_once(checkpoint: Path, out: Path, experts: str) -> dict[str, float]:
    os.sync()
    start = time.perf_counter()
    command = [sys.executable, "-c", CONVERT, str(ROOT), str(checkpoint), str(out), experts]
    done = subprocess.run(command, check=True, capture_output=True, encoding="utf-8")
    wall = time.perf_counter() - start
    shutil.rmtree(out)
    return {"wall_s": wall, **json.loads(done.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=2.5)
    parser.add_argument("--folder", type=Path, default=Path.cwd())
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="spmoe-bench-", dir=given.folder) as name:
        base = Path(name)
        checkpoint, copy = base / "checkpoint", base / "copy"
        # written by a child: what building it takes must not count as anyone's memory
        child = os.fork()
        if child == 0:
            shape = write_checkpoint(checkpoint, given.gb)
            (base / "shape.json").write_text(json.dumps(shape), encoding="utf-8")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        shape = json.loads((base / "shape.json").read_text(encoding="utf-8"))
        size = folder_bytes(checkpoint)
        subprocess.run(f"cat {checkpoint}/* > /dev/null", shell=True, check=True)
        plain, synced, ours = [], [], []
        for _ in range(given.runs):
            plain.append(timed(f"cp -r {checkpoint} {copy} && sha256sum {copy}/*"))
            shutil.rmtree(copy)
            synced.append(
                timed(f"cp -r {checkpoint} {copy} && sync {copy}/* && sha256sum {copy}/*")
            )
            shutil.rmtree(copy)
            ours.append(convert_once(checkpoint, base / "o.spmoe", ""))
        cast = convert_once(checkpoint, base / "o.spmoe", "fp32")
    wall = statistics.median(run["wall_s"] for run in ours)
    baseline, baseline_sync = statistics.median(plain), statistics.median(synced)
    limit = shape["layer_bytes"] + (1 << 30)
    peak = max(run["peak_bytes"] for run in ours)
    result = {
        "command": " ".join(["python", "benchmarks/convert.py", *sys.argv[1:]]),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "checkpoint_bytes": size,
        **shape,
        "cp_sha256sum_s": plain,
        "cp_sync_sha256sum_s": synced,
        "convert": ours,
        "convert_gb_per_s": round(size / wall / 1e9, 3),
        "cp_sha256sum_gb_per_s": round(size / baseline / 1e9, 3),
        "rate_to_cp_sha256sum": round(baseline / wall, 3),
        "rate_to_cp_sync_sha256sum": round(baseline_sync / wall, 3),
        "peak_bytes": peak,
        "limit_bytes": limit,
        "peak_within_limit": peak < limit,
        "convert_experts_to_fp32": cast,
        "fp32_limit_bytes": 2 * shape["layer_bytes"] + (1 << 30),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
