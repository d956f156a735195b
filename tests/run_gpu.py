"""Every GPU test: `python -m tests.run_gpu [--out DIR] [--limit SECONDS] [--repeats N] [--pair DIR]`.

Those that compare what the device has free run first, alone and one after the other; all others at once,
a process for each of the groups below. Shows how each group ended; the logs are in --out. `demo`'s packs
are tested if they are there (and a target repacked as demo-int4 beside them). --pair is a folder for the
pair of true shapes (6 GB), --repeats how often the highest law is tried.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

PLACEMENT = "tests/test_gpu_endurance.py -k placement_changes_no_bit"
GROUPS = {
    **{f"gpu-{one}": f"tests/test_gpu.py -k {one}" for one in "bf16 fp16 fp32 int4 int8".split()},
    "placement": f"{PLACEMENT}[",
    "true-shapes": f"{PLACEMENT}_at_true_shapes",
    "faults": "tests/test_gpu_endurance.py -k not(placement)",
    "demo": "tests/test_gpu_demo.py",
    "kernels": "tests/kernels",
    "others": "tests/test_gpu_bench.py tests/test_gpu_hostmap.py tests/test_profile.py tests/test_trace.py "
    "tests/test_sampling.py tests/test_tune.py",
}


class Group:
    """One process of pytest, its log, and how it ended."""

    def __init__(self, name: str, mark: str, arguments: str, out: Path):
        self.name, self._log = name, out / f"{name}.log"
        command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", mark, *arguments.split()]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def wait(self, until: float) -> bool:
        """Whether it passed before the time `until`; says what it printed last."""
        try:
            code = self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:] or [""]
        ended = {None: "cut off", 0: "passed", 5: "no test"}.get(code, f"FAILED ({code})")
        print(f"{self.name:12} {ended:12} {last[0][:90]}", flush=True)
        return code in (0, 5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("build/gpu"))
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all")
    parser.add_argument("--repeats", default="1")
    parser.add_argument("--pair", help="where the pair of true shapes lies, or will")
    parser.add_argument("--skip", default="", help="groups to leave out: alone, demo, ...")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no CUDA GPU here: every test would be skipped")
    options.out.mkdir(parents=True, exist_ok=True)
    os.environ["ENDURANCE_REPEATS"] = options.repeats
    if options.pair:
        os.environ["ENDURANCE_PAIR"] = options.pair
    skip, until = options.skip.split(","), time.monotonic() + options.limit
    passed = True
    if "alone" not in skip:
        passed = Group("alone", "gpu and alone", "tests", options.out).wait(until)
    chosen = {name: arguments for name, arguments in GROUPS.items() if name not in skip}
    running = [Group(n, "gpu and not alone", one, options.out) for n, one in chosen.items()]
    return 0 if all([passed, *(group.wait(until) for group in running)]) else 1


if __name__ == "__main__":
    sys.exit(main())
