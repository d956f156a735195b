#!/usr/bin/env python3
"""The door of a checkout: `python3 spmoe_lite.py COMMAND ...` sets up all, then runs `spmoe-lite`.

Where spmoe-lite is installed, its command line is called at once. Elsewhere an environment, `.venv`
beside this file, is made at the first start and updated when the requirements change; then this
script runs again under its Python. The command `test` runs pytest there.
"""

import hashlib
import importlib.util
import os
import sys
import time

HERE = os.path.dirname(os.path.realpath(__file__))
VENV = os.path.join(HERE, ".venv")
PYTHON = os.path.join(VENV, *(("Scripts", "python.exe") if os.name == "nt" else ("bin", "python")))
STAMP = os.path.join(VENV, "spmoe-lite.stamp")
PROMPT = "spmoe-lite checkout"  # in pyvenv.cfg: an environment without it is never replaced
AGAIN = "spmoe-lite-again"  # -X option of the second run, so that there is never a third


def say(text, exit_code=None):
    print("spmoe-lite: " + text, file=sys.stderr or open(os.devnull, "w"), flush=True)
    if exit_code is not None:
        sys.exit(exit_code)


def held(module):
    """Whether the running environment, if it is not `.venv`, has spmoe-lite and `module`."""
    if os.path.exists(STAMP) and os.path.realpath(sys.prefix) == os.path.realpath(VENV):
        return False
    paths = [path for path in sys.path if os.path.isdir(path) and os.path.realpath(path) != HERE]
    names = [name for path in paths if os.access(path, os.R_OK) for name in os.listdir(path)]
    found = any(n.startswith("spmoe_lite-") and n.endswith(".dist-info") for n in names)
    return found and importlib.util.find_spec(module) is not None


def stamps(extras):
    """(made, needed), each [kind of Python, hash of it, path and requirements, extras ...]."""
    python = sys.platform + "-" + sys.implementation.cache_tag + getattr(sys, "abiflags", "")
    digest = hashlib.sha256((python + "\n" + HERE).encode("utf-8", "surrogateescape"))
    for name in ("pyproject.toml", "constraints.txt"):
        with open(os.path.join(HERE, name), "rb") as file:
            digest.update(b"\0" + file.read())
    made = []
    if os.path.exists(STAMP) and os.path.exists(PYTHON):
        with open(STAMP, encoding="utf-8", errors="replace") as file:
            made = file.read().split()
    return made, [python, digest.hexdigest(), *sorted(extras.union(made[2:]))]


def locked(file):
    """Try to take this checkout's lock, which is held while `file` is open, here or in a child."""
    system = importlib.import_module("msvcrt" if os.name == "nt" else "fcntl")
    try:
        if os.name == "nt":
            system.locking(file.fileno(), system.LK_NBLCK, 1)
        else:
            system.flock(file, system.LOCK_EX | system.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def make_environment(call):
    """Make `.venv` anew, with pip in it, and see that the disk has room for what follows."""
    import shutil

    config = os.path.join(VENV, "pyvenv.cfg")
    if os.path.exists(config) and PROMPT not in open(config, errors="replace").read():
        say(f"{VENV} is not of this script's making: delete it, or install spmoe-lite into it", 1)
    say(f"making {VENV}: up to 10 GB with PyTorch for CUDA, 3 GB with a CPU-only one")
    say("for that one, set PIP_EXTRA_INDEX_URL to its index, named on pytorch.org/get-started")
    base = getattr(sys, "_base_executable", sys.executable)
    venv = [base, "-m", "venv", "--clear", "--prompt", PROMPT, VENV]
    if call(*venv, quiet=True):  # some Linux distributions split ensurepip off
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        pip = ["install", "--target", os.path.join(VENV, "lib", version, "site-packages"), "pip"]
        if call(*venv, "--without-pip") or call(base, "-m", "pip", *pip):
            say("cannot make an environment: install the system's package python3-venv", 1)
    chosen = map(os.environ.get, ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL", "PIP_FIND_LINKS"))
    need = 10 if sys.platform == "linux" and not any(chosen) else 3
    free = shutil.disk_usage(VENV).free / 1e9
    if free < need:
        say(f"too little room on the disk of {VENV}: {free:.1f} GB free, {need} GB needed", 4)


def set_up(extras):
    """Make or update `.venv`. The stamp goes first and comes back last: a kill is noticed."""
    import subprocess

    def call(*command, quiet=False):
        out = 2 if sys.stderr and not quiet else subprocess.DEVNULL
        fds = [lock.fileno()] if os.name != "nt" else []  # pip may outlive us, and so does the lock
        return subprocess.call(command, cwd=HERE, stdout=out, stderr=out, pass_fds=fds)

    with open(VENV + ".lock", "a") as lock:
        if not locked(lock):
            say("waiting for another start of this checkout to finish its set-up")
            while not locked(lock):
                time.sleep(0.1)
        made, needed = stamps(extras)
        if made == needed:
            return
        if made:
            os.remove(STAMP)
        if made[:1] != needed[:1]:
            make_environment(call)
        project = "." + (f"[{','.join(needed[2:])}]" if needed[2:] else "")
        if call(PYTHON, "-m", "pip", "install", "-c", "constraints.txt", "-e", project):
            say("pip failed, see above; offline: PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER_OF_WHEELS", 1)
        with open(STAMP + ".new", "w", encoding="utf-8") as file:
            file.write(" ".join(needed))
        os.replace(STAMP + ".new", STAMP)


def main(arguments):
    if sys.version_info < (3, 11):
        say("Python 3.11 or newer is needed, this is " + sys.version.split()[0], 1)
    extras = {"test"} if arguments[:1] == ["test"] else set()
    if AGAIN in sys._xoptions or held("pytest" if extras else "click"):
        sys.path.insert(0, HERE)
        importlib.import_module("spmoe_lite")  # the folder, which goes before the file
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) != HERE]  # has `kernels`
        if not extras:
            return importlib.import_module("spmoe_lite.cli").main()
        os.chdir(HERE)
        return importlib.import_module("pytest").main(arguments[1:])
    command = [PYTHON, "-X", AGAIN, os.path.realpath(__file__), *arguments]
    try:
        made, needed = stamps(extras)
        if made != needed:
            set_up(extras)
        if os.name != "nt":
            os.execv(PYTHON, command)
    except OSError as error:
        say(f"cannot set up {HERE}: {error}; copy it to a folder of yours and start it there", 1)
    except KeyboardInterrupt:
        say("set-up was interrupted; the next start begins it again", 130)
    import signal
    import subprocess

    signal.signal(signal.SIGINT, lambda *_: None)  # the child gets Ctrl-C as well, and decides
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
