"""The checkout's door, spmoe_lite.py: set-up at the first start, nothing but the command afterwards.

Most tests start the real script in a small copy of a checkout whose `venv` and `pip` are stand-ins
found through PYTHONPATH: they write down how they were called and can wait or fail. One test makes a
real environment with the real pip, from a project without requirements.
"""

import ast
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(os.name == "nt", reason="the stand-ins make POSIX environments")

STAND_INS = {
    "venv.py": """
import json, os, sys, time
from pathlib import Path
with open(os.environ["STUB_LOG"], "a") as log:
    print(json.dumps(["venv", *sys.argv[1:]]), file=log)
print("venv was here")
folder = Path(sys.argv[sys.argv.index("--prompt") + 2])
if os.environ.get("STUB_VENV") == "fails" or (
    os.environ.get("STUB_VENV") == "without pip" and "--without-pip" not in sys.argv
):
    sys.exit("ensurepip is not available")
(folder / "bin").mkdir(parents=True, exist_ok=True)
(folder / "spmoe-lite.stamp").unlink(missing_ok=True)
home = f"home = {os.path.dirname(sys._base_executable)}\\n"
(folder / "pyvenv.cfg").write_text(home + f"prompt = '{sys.argv[sys.argv.index('--prompt') + 1]}'\\n")
(folder / "bin" / "python").unlink(missing_ok=True)
(folder / "bin" / "python").symlink_to(sys._base_executable)
""",
    "pip.py": """
import json, os, sys, time
settings = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
with open(os.environ["STUB_LOG"], "a") as log:
    print(json.dumps(["pip", *sys.argv[1:], settings]), file=log)
print("pip was here", flush=True)
for _ in range(6000):  # a minute at most
    if os.path.exists(os.environ.get("STUB_PIP_UNTIL", "/")):
        break
    time.sleep(0.01)
with open(os.environ["STUB_LOG"], "a") as log:
    print(json.dumps(["pip ends"]), file=log)
sys.exit("no network" if os.environ.get("STUB_PIP") == "fails" else 0)
""",
    "sitecustomize.py": """
import os, shutil
if "STUB_FREE" in os.environ:
    usage = shutil.disk_usage
    shutil.disk_usage = lambda path: usage(path)._replace(free=int(os.environ["STUB_FREE"]))
""",
    "pytest.py": """
def main(arguments):
    print("pytest", arguments)
    return 5
""",
}

CLI = """
import json, os, sys
def main():
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    print(json.dumps({"arguments": sys.argv[1:], "prefix": sys.prefix, "shadow": here in sys.path}))
    return 3 if "three" in sys.argv else 0
"""


class Checkout:
    """A small copy of a checkout and its starts."""

    def __init__(self, folder: Path, stand_ins: Path):
        self.folder, self.log = folder, stand_ins / "log"
        (folder / "spmoe_lite").mkdir(parents=True)
        shutil.copy(ROOT / "spmoe_lite.py", folder)
        (folder / "spmoe_lite" / "__init__.py").write_text("")
        (folder / "spmoe_lite" / "cli.py").write_text(CLI)
        (folder / "pyproject.toml").write_text("[project]\n")
        (folder / "constraints.txt").write_text("")
        keep = {
            n: v for n, v in os.environ.items() if not n.startswith(("PIP_", "PYTHON", "STUB_"))
        }
        self.env = keep | {
            "PYTHONPATH": str(stand_ins),
            "STUB_LOG": str(self.log),
            "PIP_FIND_LINKS": "/wheels",
        }
        self.venv = folder / ".venv"

    def popen(self, *arguments: str, **settings: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys._base_executable, self.folder / "spmoe_lite.py", *arguments],
            env=self.env | settings,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=self.folder.parent,
            start_new_session=True,
        )

    def start(self, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
        process = self.popen(*arguments, **settings)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in err, err
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def calls(self, *names: str) -> list[list]:
        """What the stand-ins were called with since the last look."""
        if not self.log.exists():
            return []
        lines = [json.loads(line) for line in self.log.read_text().splitlines()]
        self.log.unlink()
        return [line for line in lines if line[0] in (names or ("venv", "pip"))]

    def wait_for(self, name: str) -> None:
        for _ in range(3000):
            if self.log.exists() and json.dumps([name])[:-1] in self.log.read_text():
                return
            time.sleep(0.02)
        raise AssertionError(f"{name} was not called")


@pytest.fixture
def checkout(tmp_path):
    stand_ins = tmp_path / "stand-ins"
    stand_ins.mkdir()
    for name, source in STAND_INS.items():
        (stand_ins / name).write_text(source)
    return Checkout(tmp_path / "a checkout, zoë's", stand_ins)


@pytest.fixture
def ready(checkout):
    assert checkout.start().returncode == 0
    checkout.calls()
    return checkout


def test_the_first_start_sets_up_and_says_so_on_stderr_only(checkout):
    result = checkout.start("run", "-p", "two  words", "", "--help")
    answer = json.loads(result.stdout)  # nothing else is on stdout
    assert answer["arguments"] == ["run", "-p", "two  words", "", "--help"]
    assert Path(answer["prefix"]) == checkout.venv
    assert not answer["shadow"], "the checkout's kernels/ would hide another package of that name"
    assert "pip was here" in result.stderr and "10 GB" in result.stderr
    assert "PIP_EXTRA_INDEX_URL" in result.stderr
    venv, pip = checkout.calls()
    assert venv[0] == "venv" and venv[-1] == str(checkout.venv)
    assert pip[:6] == ["pip", "install", "-c", "constraints.txt", "-e", "."]


def test_a_later_start_runs_nothing_but_the_command(ready):
    result = ready.start("three")
    assert (result.returncode, result.stderr, ready.calls()) == (3, "", [])


def test_a_later_start_costs_little(ready):
    """At most three times the processor time of the same command under the environment's Python."""

    import resource

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, env=ready.env, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    python = str(ready.venv / "bin" / "python")
    direct = [
        python,
        "-c",
        f"import sys; sys.path.insert(0, {str(ready.folder)!r}); import spmoe_lite.cli",
    ]
    launcher = [sys._base_executable, str(ready.folder / "spmoe_lite.py")]
    plain, started = [], []
    for _ in range(7):  # in turn: what else runs here slows both
        plain.append(seconds(*direct))
        started.append(seconds(*launcher))
    assert min(started) <= 3 * min(plain)


def test_settings_of_pip_pass_through_untouched(checkout):
    checkout.start(PIP_INDEX_URL="http://localhost:9/simple", PIP_NO_INDEX="1")
    (pip,) = checkout.calls("pip")
    assert pip[-1] == {
        "PIP_FIND_LINKS": "/wheels",
        "PIP_INDEX_URL": "http://localhost:9/simple",
        "PIP_NO_INDEX": "1",
    }


def test_the_tests_have_an_extra_that_no_later_start_takes_away(ready):
    result = ready.start("test", "-q", "tests/test_x.py")
    assert result.stdout.splitlines()[-1] == "pytest ['-q', 'tests/test_x.py']"
    assert result.returncode == 5
    (pip,) = ready.calls()  # the environment is kept
    assert pip[5] == ".[test]"

    ready.start("test")
    ready.start()
    assert ready.calls() == []

    (ready.folder / "constraints.txt").write_text("torch==9\n")
    ready.start()
    (pip,) = ready.calls()
    assert pip[5] == ".[test]"


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_changed_requirements_update_the_environment(ready, name):
    (ready.folder / name).write_text("# changed\n")
    assert ready.start().returncode == 0
    assert [call[0] for call in ready.calls()] == ["pip"]


def test_a_missing_stamp_means_a_new_environment(ready):
    (ready.venv / "spmoe-lite.stamp").unlink()
    assert ready.start().returncode == 0
    assert [call[0] for call in ready.calls()] == ["venv", "pip"]


def test_another_kind_of_python_means_a_new_environment(ready):
    stamp = ready.venv / "spmoe-lite.stamp"
    stamp.write_text(stamp.read_text().replace("cpython-3", "cpython-2"))
    assert ready.start().returncode == 0
    assert [call[0] for call in ready.calls()] == ["venv", "pip"]


def test_a_lost_interpreter_means_a_new_environment(ready):
    (ready.venv / "bin" / "python").unlink()
    (ready.venv / "bin" / "python").symlink_to("/nowhere/python3")
    assert ready.start().returncode == 0
    assert [call[0] for call in ready.calls()] == ["venv", "pip"]


def test_a_copied_checkout_updates_its_own_environment(ready, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(ready.folder, copy, symlinks=True)
    original = ready.folder
    ready.folder = copy
    answer = json.loads(ready.start().stdout)
    assert Path(answer["prefix"]) == copy / ".venv"
    assert [call[0] for call in ready.calls()] == ["pip"]
    ready.folder = original
    ready.start()
    assert ready.calls() == [], "the original is as it was"


def test_two_starts_at_once_set_up_once(checkout, tmp_path):
    first = checkout.popen(STUB_PIP_UNTIL=str(tmp_path / "go"))
    checkout.wait_for("pip")
    second = checkout.popen()
    assert "waiting" in second.stderr.readline()
    (tmp_path / "go").touch()
    for process in (first, second):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert Path(json.loads(out)["prefix"]) == checkout.venv
    assert [call[0] for call in checkout.calls()] == ["venv", "pip"]


def test_a_kill_in_mid_setup_is_noticed(checkout):
    process = checkout.popen(STUB_PIP_UNTIL="never")
    checkout.wait_for("pip")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    checkout.calls()
    assert checkout.start().returncode == 0
    assert [call[0] for call in checkout.calls()] == ["venv", "pip"]


def test_a_pip_that_outlives_its_launcher_is_waited_for(checkout, tmp_path):
    process = checkout.popen(STUB_PIP_UNTIL=str(tmp_path / "go"))
    checkout.wait_for("pip")
    process.kill()  # the launcher alone
    second = checkout.popen()
    assert "waiting" in second.stderr.readline()
    (tmp_path / "go").touch()
    second.communicate(timeout=60)
    process.communicate()
    assert second.returncode == 0
    names = [call[0] for call in checkout.calls("venv", "pip", "pip ends")]
    assert names == ["venv", "pip", "pip ends", "venv", "pip", "pip ends"]


def test_ctrl_c_in_mid_setup_ends_in_one_line(checkout):
    process = checkout.popen(STUB_PIP_UNTIL="never")
    checkout.wait_for("pip")
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1]
    assert process.returncode == 130
    assert (
        err.splitlines()[-1] == "spmoe-lite: set-up was interrupted; the next start begins it again"
    )


def test_no_network_ends_in_one_line_with_the_alternative(checkout):
    result = checkout.start(STUB_PIP="fails")
    assert (result.returncode, result.stdout) == (1, "")
    assert "PIP_NO_INDEX" in result.stderr.splitlines()[-1]
    assert not (checkout.venv / "spmoe-lite.stamp").exists()


def test_without_ensurepip_pip_comes_from_the_system(checkout):
    result = checkout.start(STUB_VENV="without pip")
    assert result.returncode == 0
    assert "is not available" not in result.stderr, "what was got round need not be shown"
    first, second, target, install = checkout.calls()
    assert "--without-pip" not in first and "--without-pip" in second
    assert target[1:3] == ["install", "--target"] and target[4] == "pip"
    assert Path(target[3]).parent.parent.parent == checkout.venv
    assert install[1] == "install"


def test_without_any_environment_the_last_line_names_the_package(checkout):
    result = checkout.start(STUB_VENV="fails")
    assert result.returncode == 1
    assert "python3-venv" in result.stderr.splitlines()[-1]


@pytest.mark.parametrize("free, links, fits", [(2, "x", False), (4, "x", True), (4, "", False)])
def test_the_disk_is_looked_at_first(checkout, free, links, fits):
    if sys.platform != "linux" and not links:
        pytest.skip("torch for CUDA comes by default on Linux only")
    result = checkout.start(STUB_FREE=str(free * 10**9), PIP_FIND_LINKS=links)
    assert result.returncode == (0 if fits else 4)
    assert bool(checkout.calls("pip")) is fits
    if not fits:
        assert f"{free}.0 GB free" in result.stderr.splitlines()[-1]


def test_an_environment_of_someone_else_is_left_alone(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    result = checkout.start()
    assert result.returncode == 1 and "delete it" in result.stderr
    assert (
        checkout.calls() == [] and (checkout.venv / "pyvenv.cfg").read_text() == "home = /usr/bin\n"
    )


def obey_permissions() -> None:
    """Take from root, in the child, the right to write where permissions say no."""
    if os.geteuid() == 0 and ctypes.CDLL(None).prctl(24, 1, 0, 0, 0):
        os._exit(99)


@pytest.mark.skipif(sys.platform != "linux", reason="root obeys permissions nowhere else")
def test_a_read_only_checkout_ends_in_one_line_and_works_once_set_up(checkout):
    def start() -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys._base_executable, checkout.folder / "spmoe_lite.py"],
            env=checkout.env | {"PYTHONDONTWRITEBYTECODE": "1"},
            preexec_fn=obey_permissions,
            capture_output=True,
            text=True,
        )

    checkout.folder.chmod(0o555)
    try:
        result = start()
        if result.returncode == 99:
            pytest.skip("root cannot be made to obey permissions here")
        assert (result.returncode, result.stdout) == (1, "")
        assert len(result.stderr.splitlines()) == 1 and "copy it" in result.stderr
        checkout.folder.chmod(0o755)
        checkout.start()
        checkout.folder.chmod(0o555)
        assert start().returncode == 0
    finally:
        checkout.folder.chmod(0o755)


def test_an_environment_that_holds_the_distribution_is_used_as_it_is(checkout, tmp_path):
    site = tmp_path / "site"
    (site / "spmoe_lite-0.1.0.dist-info").mkdir(parents=True)
    (site / "click.py").write_text("")
    path = os.pathsep.join([str(site), checkout.env["PYTHONPATH"]])
    answer = json.loads(checkout.start("chat", PYTHONPATH=path).stdout)
    assert answer["arguments"] == ["chat"] and not answer["shadow"]
    assert checkout.calls() == [] and not checkout.venv.exists()


def test_the_checkouts_own_metadata_is_no_installation(checkout):
    (checkout.folder / "spmoe_lite.egg-info").mkdir()
    (checkout.folder / "spmoe_lite-0.1.0.dist-info").mkdir()
    (checkout.folder / "click.py").write_text("")
    checkout.start(PYTHONPATH=os.pathsep.join([checkout.env["PYTHONPATH"], str(checkout.folder)]))
    assert [call[0] for call in checkout.calls()] == ["venv", "pip"]


def test_the_environments_own_python_updates_it_too(ready):
    (ready.folder / "constraints.txt").write_text("torch==9\n")
    script = [ready.venv / "bin" / "python", ready.folder / "spmoe_lite.py", "chat"]
    result = subprocess.run(script, env=ready.env, capture_output=True, text=True, check=True)
    assert json.loads(result.stdout)["arguments"] == ["chat"]
    assert [call[0] for call in ready.calls()] == ["pip"]


def test_old_pythons_are_refused_in_one_line(checkout):
    source = (ROOT / "spmoe_lite.py").read_text(encoding="utf-8")
    ast.parse(source, feature_version=(3, 8))
    pretend = "import sys, runpy; sys.version_info = (3, 10, 4); runpy.run_path({!r}, run_name='__main__')"
    script = str(checkout.folder / "spmoe_lite.py")
    commands = [[sys.executable, "-c", pretend.format(script)]]
    for name in ("python3.8", "python3.9", "python3.10"):
        if (
            shutil.which(name)
            and not subprocess.run([name, "-c", ""], capture_output=True).returncode
        ):
            commands.append([name, script])
    for command in commands:
        result = subprocess.run(command, env=checkout.env, capture_output=True, text=True)
        assert result.returncode == 1
        assert len(result.stderr.splitlines()) == 1 and "Python 3.11 or newer" in result.stderr
    assert not checkout.venv.exists()


def test_it_is_short_and_needs_the_standard_library_only():
    source = (ROOT / "spmoe_lite.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) < 150
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            assert all(
                alias.name.partition(".")[0] in sys.stdlib_module_names for alias in node.names
            )
        elif isinstance(node, ast.ImportFrom):
            assert node.module.partition(".")[0] in sys.stdlib_module_names


WINDOWS = """
import importlib.util, os, sys, types
spec = importlib.util.spec_from_file_location("launcher", sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)
launcher.os = types.SimpleNamespace(name="nt", path=os.path)
launcher.PYTHON = sys.executable
launcher.held = lambda module: False
launcher.stamps = lambda extras: ([], [])
sys.exit(launcher.main(["wait"]))
"""


def test_where_exec_is_missing_a_child_keeps_exit_code_and_ctrl_c(checkout):
    """As on Windows, where both processes of a console get Ctrl-C."""
    (checkout.folder / "spmoe_lite" / "cli.py").write_text(
        "import time\n"
        "def main():\n"
        "    try:\n"
        "        print('waiting', flush=True)\n"
        "        time.sleep(30)\n"
        "    except KeyboardInterrupt:\n"
        "        return 7\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", WINDOWS, str(checkout.folder / "spmoe_lite.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "waiting\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (7, "")


BACKEND = """
import os, zipfile
INFO = "spmoe_lite-0.1.0.dist-info"
def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(os.path.join(folder, "spmoe_lite-0.1.0-py3-none-any.whl"), "w") as wheel:
        metadata = "Metadata-Version: 2.1\\nName: spmoe-lite\\nVersion: 0.1.0\\nProvides-Extra: test\\n"
        wheel.writestr(INFO + "/METADATA", metadata)
        wheel.writestr(INFO + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr(INFO + "/RECORD", "")
        wheel.writestr("pytest.py", "def main(arguments):\\n    print('pytest', arguments)\\n    return 0\\n")
    return "spmoe_lite-0.1.0-py3-none-any.whl"
"""


def test_with_the_real_venv_and_pip(tmp_path):
    """From nothing to the command and to the tests, without a network."""
    checkout = Checkout(tmp_path / "spaces in the path", tmp_path)
    checkout.env.pop("PYTHONPATH")
    (checkout.folder / "backend.py").write_text(BACKEND)
    (checkout.folder / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "spmoe-lite"\nversion = "0.1.0"\noptional-dependencies.test = []\n'
    )
    checkout.env["PIP_NO_INDEX"] = "1"
    result = checkout.start("run")
    assert result.returncode == 0, result.stderr
    answer = json.loads(result.stdout)
    assert answer["arguments"] == ["run"] and Path(answer["prefix"]) == checkout.venv
    result = checkout.start("test", "-x")
    assert (result.returncode, result.stdout) == (0, "pytest ['-x']\n"), result.stderr
    assert checkout.start("run").stderr == ""
