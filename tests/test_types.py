"""Types as users get them: mypy on the built tree, and strictly on what an app writes against it.

Type checkers do not follow the mapping of kernels/ and converters/ into the package, so the checkout
itself cannot be checked; the tree that `pip install` lays down can.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import spmoe_lite

ROOT = Path(__file__).resolve().parent.parent

pytest.importorskip("mypy")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The tree that `pip install .` lays down, from a copy: the checkout is left as it is."""
    import shutil

    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("built")
    names = ["pyproject.toml", "README.md", "LICENSE", "spmoe_lite.py"]
    for name in [*names, "spmoe_lite", "kernels", "converters"]:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    pip += ["--no-index", "--disable-pip-version-check", "--target", str(target), str(source)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def mypy(built: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(built.parent / "mypy-cache"), *arguments]
    done = subprocess.run(
        command,
        cwd=built,
        env=os.environ | {"MYPYPATH": str(built)},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


def test_an_install_holds_what_the_package_needs_and_no_more(built):
    assert {path.name for path in built.iterdir() if not path.name.endswith(".dist-info")} <= {
        "spmoe_lite",
        "bin",
    }
    installed = {str(p.relative_to(built / "spmoe_lite")) for p in built.rglob("*.py")}
    for folder in ("kernels", "converters"):
        expected = {f"{folder}/{path.name}" for path in (ROOT / folder).glob("*.py")}
        assert expected <= installed, "a new folder is named in pyproject.toml"
    assert (built / "spmoe_lite" / "py.typed").exists()
    assert (built / f"spmoe_lite-{spmoe_lite.__version__}.dist-info").is_dir()


def test_the_package_passes_mypy(built):
    out = mypy(built, "-p", "spmoe_lite")
    assert out.startswith("Success"), out


def test_an_app_passes_mypy_strict(built):
    out = mypy(built, "--strict", "--follow-imports=silent", str(ROOT / "examples" / "embed.py"))
    assert out.startswith("Success"), out


def test_an_apps_mistakes_are_seen(built, tmp_path):
    """The types say something: wrong uses are errors, and the public names are not `Any`."""
    source = (ROOT / "examples" / "embed.py").read_text(encoding="utf-8")
    wrong = {
        "Engine.load(target, draft=draft": "Engine.load(target, drafty=draft",
        "temperature=0.0": 'temperature="cold"',
        "result.stats.line()": "result.stats.lines()",
        "progress.done": "progress.donee",
        "error.exit_code": "error.exit_number",
    }
    for right in wrong:
        assert right in source
        source = source.replace(right, wrong[right])
    (tmp_path / "app.py").write_text(source, encoding="utf-8")
    out = mypy(built, "--strict", "--follow-imports=silent", str(tmp_path / "app.py"))
    assert f"Found {len(wrong)} errors" in out, out
