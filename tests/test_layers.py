"""The layering rule and the page that states it, docs/map.md, against the sources.

A module imports from rows above its own; what it imports from elsewhere stands beside it on the page;
what is slow to import, or not on every system, is imported where it is used.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import spmoe_lite

ROOT = Path(__file__).resolve().parent.parent
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
ROWS = {
    file: (int(row), set(third_party.replace(",", " ").split()))
    for row, file, third_party in re.findall(r"^\| (\d+) \| `(.+?)` \| .+ \|(.*)\|$", MAP, re.M)
}
SOURCES = {
    str(path.relative_to(ROOT).as_posix()): path
    for folder in ("spmoe_lite", "kernels", "converters")
    for path in (ROOT / folder).rglob("*.py")
}
# Imported inside functions only: slow to import and often not needed, or not there on every system.
WHERE_USED = {"huggingface_hub", "rich", "prompt_toolkit", "transformers"}
ONE_SYSTEM = {
    "fcntl",
    "grp",
    "msvcrt",
    "pty",
    "pwd",
    "readline",
    "resource",
    "termios",
    "tty",
    "winreg",
}


def module_name(file: str) -> str:
    name = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.startswith("spmoe_lite") else f"spmoe_lite.{name}"


FILE_OF = {module_name(file): file for file in SOURCES}


def imports(file: str) -> Iterator[tuple[str, bool, bool]]:
    """(module, whether at the top, whether for types alone) for every import statement of a file.

    A public name taken from `spmoe_lite` counts as an import of the module that has it.
    """
    tree = ast.parse(SOURCES[file].read_text(encoding="utf-8"))
    package = (
        module_name(file) if file.endswith("__init__.py") else module_name(file).rpartition(".")[0]
    )
    inside = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for inner in ast.walk(node)
    }
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join([package] * (node.level > 0) + [node.module] * bool(node.module))
            assert node.level <= 1, f"{file}: {ast.unparse(node)}"
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                if base == "spmoe_lite" and alias.name in spmoe_lite._MODULE_OF:
                    inner = f"spmoe_lite.{spmoe_lite._MODULE_OF[alias.name]}"
                names.append(inner if inner in FILE_OF else base)
        for name in names:
            yield name, id(node) not in inside, id(node) in typing


IMPORTS = [(file, *found) for file in sorted(SOURCES) for found in imports(file)]


def test_every_file_has_its_sentence_and_no_other():
    listed = set(ROWS) | set(re.findall(r"^- `(.+?)`: \S.*\.$", MAP, re.M))
    there = set(SOURCES)
    for pattern in (
        "tests/**/*.py",
        "examples/*.py",
        "benchmarks/**/*.py",
        "docs/*.md",
        "*.py",
        "*.md",
    ):
        there |= {path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern)}
    assert there - listed == set(), "give these files a sentence (and a row) in docs/map.md"
    assert {file for file in listed if not (ROOT / file).exists()} == set(), (
        "docs/map.md lists what is gone"
    )
    assert not set(ROWS) - set(SOURCES)


def test_imports_come_from_rows_above():
    wrong = []
    for file, name, _, for_types in IMPORTS:
        source = FILE_OF.get(name)
        if source is None or source == "spmoe_lite/__init__.py" or for_types:
            continue
        if not {file, source} <= set(ROWS):
            continue  # the test above asks for its row
        siblings = source.split("/")[0] == file.split("/")[0] != "spmoe_lite"
        if not siblings and ROWS[source][0] >= ROWS[file][0]:
            wrong.append(f"{file} (row {ROWS[file][0]}) imports {source} (row {ROWS[source][0]})")
    assert wrong == []


def test_third_party_imports_are_those_of_the_map():
    found: dict[str, set[str]] = {file: set() for file in SOURCES}
    for file, name, _, _ in IMPORTS:
        found[file].add(name.partition(".")[0])
    ours = {*sys.stdlib_module_names, "spmoe_lite"}
    listed = {file: third_party for file, (_, third_party) in ROWS.items()}
    assert {file: names - ours for file, names in found.items() if file in listed} == listed


def test_some_imports_stand_where_they_are_used():
    wrong = []
    for file, name, at_top, for_types in IMPORTS:
        first, in_triton = name.partition(".")[0], file.endswith("_triton.py")
        if at_top and not for_types and first in WHERE_USED | ONE_SYSTEM:
            wrong.append(f"{file} imports {name} at the top")
        if at_top and not for_types and name.endswith("_triton") and not in_triton:
            wrong.append(f"{file} imports {name} at the top: Triton is for those who have a GPU")
        if first == "triton" and not in_triton:
            wrong.append(f"{file} imports triton, which is for files named _triton.py")
    assert wrong == []


def test_a_module_opens_by_saying_what_it_is():
    for file, path in SOURCES.items():
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), file


@pytest.mark.parametrize("file", sorted(SOURCES))
def test_kind_l_o36_no_log_record_keeps_an_error(file):
    """A handler may keep records; an error keeps its frames, and those the models that they load."""
    for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("log."):
            names = [ast.unparse(argument) for argument in node.args]
            assert not {"error", "exc", "e"} & set(names), f"{file}: {ast.unparse(node)}"


def test_no_file_is_imported_in_a_circle():
    """Rows exclude circles between folders; within kernels/ and converters/ this does."""
    graph: dict[str, set[str]] = {file: set() for file in SOURCES}
    for file, name, at_top, for_types in IMPORTS:
        if name in FILE_OF and name != "spmoe_lite" and at_top and not for_types:
            graph[file].add(FILE_OF[name])

    def visit(file: str, path: tuple[str, ...]) -> None:
        assert file not in path, " -> ".join([*path, file])
        for other in graph[file]:
            visit(other, (*path, file))

    for file in graph:
        visit(file, ())


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]])
def test_the_sources_pass_ruff(command):
    pytest.importorskip("ruff")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
