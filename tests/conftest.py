"""What every test shares: this checkout under test, a home of its own, kernels that run anywhere.

Without a CUDA GPU, Triton's interpreter is switched on before any kernel is imported, so the same
kernel tests run interpreted on a CPU and compiled on a GPU. `SPMOE_HOME` points to a folder that is
empty at the start and deleted at the end: no test sees or touches the packs of the person who runs it.
Tests marked `gpu` are skipped without a GPU. Tests marked `slow` run too, unless left out with
`-m "not slow"`; those that need the demo packs take them from where `spmoe-lite demo` left them.
"""

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# This checkout is tested, whatever is installed; and it does not stay on sys.path, where its folder
# kernels/ would hide another project's package of that name.
sys.path.insert(0, str(ROOT))
import spmoe_lite  # noqa: E402, F401

sys.path.remove(str(ROOT))

sys.argv[0] = (
    "pytest"  # not spmoe_lite.py, when that runs it: hints name how the program was started
)

if "tests" not in sys.modules:  # helpers are imported as tests.tiny, tests.oracle, ...
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]

# A shell starts what it puts in the background deaf to Ctrl-C, and so would be all that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads would only wait for each other

if importlib.util.find_spec("hypothesis"):  # the same examples each time, however long one takes
    from hypothesis import HealthCheck, settings  # --hypothesis-profile=default draws new ones

    slow = [HealthCheck.too_slow]
    settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=slow)
    settings.load_profile("steady")

import torch  # noqa: E402

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

USER_HOME = os.environ.get("SPMOE_HOME")
_home = tempfile.TemporaryDirectory(prefix="spmoe-tests-", ignore_cleanup_errors=True)
for name in [name for name in os.environ if name.startswith("SPMOE_")]:
    del os.environ[name]
os.environ["SPMOE_HOME"] = _home.name


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))
    items.sort(key=is_cross_compiled)  # last: what they look at is made meanwhile


def is_cross_compiled(item: pytest.Item) -> bool:
    return item.path.name == "test_crosscompile.py"


@pytest.fixture(scope="session", autouse=True)
def cross_compiling(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[tuple[subprocess.Popen, Path]]]:
    """Compilers for cards that are not here, started before the first test, each with its output.

    They take minutes of a processor that the tests, one thread of them, leave idle.
    """
    started = []
    if importlib.util.find_spec("triton") and any(map(is_cross_compiled, request.session.items)):
        folder, script = tmp_path_factory.mktemp("triton"), ROOT / "tests/kernels/crosscompile.py"
        environment = os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")}
        environment.pop("TRITON_INTERPRET", None)
        for cards in (["9.0", "7.5", "8.0"], ["8.6", "8.9", "12.0"]):
            path, command = folder / cards[0], ["nice", "-n", "19", sys.executable, script, *cards]
            with path.open("wb") as output:
                process = subprocess.Popen(command, env=environment, stdout=output)
            started.append((process, path))
    yield started
    for process, _ in started:
        process.kill()


def pytest_unconfigure() -> None:
    _home.cleanup()


@pytest.fixture
def device() -> str:
    """The device on which kernels are tested: the GPU if there is one, else the interpreter's CPU."""
    return "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="session")
def demo_packs() -> tuple[Path, Path]:
    """The packs (`demo`, `demo-draft`) that `spmoe-lite demo` made on this machine; skips without them."""
    import platformdirs

    home = Path(USER_HOME or platformdirs.user_data_dir("spmoe-lite", appauthor=False))
    packs = home / "demo.spmoe", home / "demo-draft.spmoe"
    if not all((pack / "manifest.json").is_file() for pack in packs):
        pytest.skip("no demo packs: run `spmoe-lite demo` first")
    return packs
