"""What importing costs and needs: no torch before it is used, nothing that only Linux has.

Everything runs in subprocesses, so that what pytest has imported does not count.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import spmoe_lite
from tests.tiny import tiny_mixtral

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ["torch", "numpy", "triton", "huggingface_hub", "rich", "prompt_toolkit", "gguf", "jinja2"]
HEAVY += ["tokenizers", "safetensors", "transformers", "psutil", "platformdirs"]

CHECKOUT = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import spmoe_lite; del sys.path[0]\n"

BLOCKED = ["triton", "fcntl", "resource", "termios"]
BLOCK = f"""
import sys
import psutil  # has code of its own for each system, and takes `resource` where there is one
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}: blocked", name=name)
sys.meta_path.insert(0, Blocked())
for name in {BLOCKED!r}:
    sys.modules.pop(name, None)
"""


def python(script: str, **settings: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"} | settings,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def imported_by(statement: str) -> list[str]:
    """The heavy modules that `statement` brings in."""
    report = f"\nimport json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    return json.loads(python(CHECKOUT + statement + report).stdout.splitlines()[-1])


@pytest.mark.parametrize(
    "statement",
    [
        "import spmoe_lite",
        "from spmoe_lite import SamplingParams, SpmoeError, Progress, Plan, RunStats",
        "from spmoe_lite.cli import run_command; run_command(['--help'])",
        "from spmoe_lite.cli import run_command; run_command(['chat', '--help'])",
    ],
)
def test_what_needs_no_heavy_library_imports_none(statement):
    assert imported_by(statement) == []


def test_loading_an_engine_needs_neither_the_hub_nor_a_terminal_library():
    found = imported_by("from spmoe_lite import Engine")
    assert "torch" in found
    assert not {"huggingface_hub", "rich", "prompt_toolkit", "gguf", "transformers"} & set(found)


def test_importing_changes_no_setting_of_the_process():
    python(
        "import logging, os, signal, threading\n"
        "before = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT)\n"
        "import torch\n"
        "torch_before = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()\n"
        f"{CHECKOUT}"
        "for name in spmoe_lite.__all__: getattr(spmoe_lite, name)\n"
        "now = dict(os.environ), threading.active_count(), signal.getsignal(signal.SIGINT)\n"
        "assert now == before, (now, before)\n"
        "now = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()\n"
        "assert now == torch_before\n"
        "assert not logging.getLogger().handlers\n"
    )


def test_public_names_stay_what_they_are_when_every_module_is_imported():
    """No module hides a public function of its name, as a submodule `packs` would."""
    python(
        f"{CHECKOUT}"
        "import importlib, types\n"
        "from pathlib import Path\n"
        "for path in Path(spmoe_lite.__file__).parent.glob('[a-z]*.py'):\n"
        "    importlib.import_module(f'spmoe_lite.{path.stem}')\n"
        "for name in spmoe_lite.__all__:\n"
        "    assert not isinstance(getattr(spmoe_lite, name), types.ModuleType), name\n"
    )


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = spmoe_lite.nonsense
    assert set(spmoe_lite.__all__) <= set(dir(spmoe_lite))


def test_convert_and_run_need_nothing_that_only_linux_has(tmp_path):
    """Import, --help, convert and run on a CPU: no GPU, Triton, compiler or writable home."""
    tiny_mixtral(tmp_path / "tiny")
    pack = tmp_path / "tiny.spmoe"
    nowhere = str(tmp_path / "file")
    Path(nowhere).write_text("a home that is no folder")
    commands = [
        ["--help"],
        ["convert", str(tmp_path / "tiny"), "--out", str(pack)],
        ["run", str(pack), "--raw", "-p", "hello", "-n", "4", "--temp", "0", "--device", "cpu"],
    ]
    done = python(
        f"{BLOCK}{CHECKOUT}"
        "from spmoe_lite.cli import run_command\n"
        f"for command in {commands!r}:\n"
        "    code = run_command(command)\n"
        "    assert code == 0, (command, code)\n"
        f"assert not set({BLOCKED!r}) & set(sys.modules)\n",
        HOME=nowhere,
        USERPROFILE=nowhere,
        SPMOE_HOME=os.path.join(nowhere, "home"),
        HF_HOME=os.path.join(nowhere, "hf"),
        XDG_CACHE_HOME=os.path.join(nowhere, "cache"),
        XDG_DATA_HOME=os.path.join(nowhere, "data"),
        PATH="",
        CC="no-compiler",
        CUDA_VISIBLE_DEVICES="",
    )
    assert "4 tokens" in done.stderr
