"""The command line: what it parses, prints and exits with; the work behind it is tested elsewhere.

`python tests/test_cli.py` writes docs/cli.md anew after a change of `--help`.
"""

import errno
import io
import json
import os
import re
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "cli.md"
HEADER = """\
# The command line

What `--help` prints, gathered by `python tests/test_cli.py`; a test compares.
"""


def help_pages() -> str:
    """docs/cli.md: the help of the program and of each command, 80 columns wide."""
    import click

    from spmoe_lite.cli import PROGRAM, cli

    settings = {"terminal_width": 80, "max_content_width": 80}
    top = click.Context(cli, info_name=PROGRAM, **cli.context_settings, **settings)
    pages = [HEADER, f"## {PROGRAM}\n\n```text\n{cli.get_help(top)}\n```\n"]
    for name, command in cli.commands.items():
        ctx = click.Context(command, info_name=name, parent=top, **settings)
        pages.append(f"## {PROGRAM} {name}\n\n```text\n{command.get_help(ctx)}\n```\n")
    return "\n".join(pages)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    DOCS.write_text(help_pages(), encoding="utf-8")
    raise SystemExit


from spmoe_lite import cli, cli_shared, cli_talk, errors, library, terminal  # noqa: E402
from spmoe_lite.library import PackInfo  # noqa: E402
from spmoe_lite.progress import Progress  # noqa: E402
from tests import fake_engine  # noqa: E402
from tests.test_repl import FAKE, environment  # noqa: E402
from tests.tiny import tiny_mistral, tiny_mixtral  # noqa: E402


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")  # so that `main` leaves it alone
    return tmp_path / "home"


@pytest.fixture
def engine(monkeypatch):
    """The scripted engine in place of the real one, and packs that are found by any name."""
    module = type(sys)("spmoe_lite.engine")
    module.Engine = fake_engine.Engine
    monkeypatch.setitem(sys.modules, "spmoe_lite.engine", module)
    monkeypatch.setattr(library, "find", lambda name, home=None: Path(f"{name}.spmoe"))
    monkeypatch.setattr(cli_talk, "_has_template", lambda target: True)
    monkeypatch.setattr(fake_engine.Engine, "loaded", [])
    monkeypatch.setattr(fake_engine.Engine, "template", object())
    return fake_engine.Engine


@pytest.fixture
def typed(monkeypatch):
    """Replaces stdin: text from a pipe, or from a person if `person`."""
    import io

    def replace(text: str | None, person: bool = False) -> None:
        stream = None if text is None else io.StringIO(text)
        if person:
            stream.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stream)

    replace("")
    return replace


def spmoe(*args: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return stop.value.code


def seen(capsys) -> tuple[str, list[str]]:
    """(stdout, lines of stderr)"""
    captured = capsys.readouterr()
    return captured.out, captured.err.splitlines()


# Help, version, start-up


def test_the_help_pages_are_in_the_docs():
    assert DOCS.read_text(encoding="utf-8") == help_pages()


def test_help_needs_nothing_but_click():
    """No torch, numpy, rich, prompt-toolkit or hub client; time follows from that."""
    code = (
        "import sys\nsys.argv = ['spmoe-lite', 'chat', '--help']\n"
        "from spmoe_lite.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'numpy', 'rich', 'prompt_toolkit', 'huggingface_hub', 'tokenizers', "
        "'jinja2', 'psutil', 'platformdirs', 'asyncio', 'json'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stderr.strip() == "[]"


@pytest.mark.skipif(os.name == "nt", reason="no processor time of children")
def test_help_takes_about_as_long_as_click():
    """Aim: twice `import click`, in processor time, so that a busy machine does not matter."""
    import resource

    def seconds(*command: str) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, cwd=ROOT, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    shown, click = [], []
    for _ in range(8):  # in turn: what else runs here slows both
        shown.append(seconds("-m", "spmoe_lite", "--help"))
        click.append(seconds("-c", "import click"))
    assert min(shown) < 2.5 * min(click)


def test_version_names_all_that_matters(capsys):
    assert spmoe("--version") == 0
    out, _ = seen(capsys)
    for name in ("spmoe-lite", "torch", "triton", "device", "pack format"):
        assert re.search(rf"^{name} +\S", out, re.MULTILINE)


def test_no_arguments_show_the_help(capsys):
    assert spmoe() == 2
    assert "Commands:" in "".join(capsys.readouterr())


def test_waiting_threads_sleep_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)  # of a test before this one
    spmoe("list")
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    spmoe("list")
    assert os.environ.pop("GOMP_SPINCOUNT") == cli.SPIN_COUNT


# Errors


@pytest.mark.parametrize(
    "args, reason",
    [
        (["run", "--frob", "mix"], "--frob"),
        (["frob"], "frob"),
        (["run", "mix", "--temp", "hot"], "hot"),
        (["run", "mix", "--slots", "0"], "--slots"),
        (["convert"], "SOURCE"),
    ],
)
def test_wrong_usage_is_one_line_and_2(capsys, args, reason):
    assert spmoe(*args) == 2
    out, err = seen(capsys)
    assert out == "" and len(err) == 1
    assert err[0].startswith("spmoe-lite: ") and reason in err[0] and err[0].endswith(" --help")


ERRORS = [e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)]


@pytest.mark.parametrize("error", ERRORS)
def test_every_error_class_is_one_line_and_its_code(monkeypatch, capsys, error):
    def fail(*args, **given):
        raise error("x.spmoe: 3 bytes of 4;\n  type: this")

    monkeypatch.setattr(library, "removable", fail)
    assert spmoe("rm", "x") == error.exit_code
    assert seen(capsys) == ("", ["spmoe-lite: x.spmoe: 3 bytes of 4; type: this"])


class Panic(BaseException):
    """What a tokenizer written in Rust raises when it is surprised."""


@pytest.mark.parametrize(
    "error, code, line",
    [
        (KeyError("weights"), 1, "KeyError: 'weights' (this is a bug in spmoe-lite; --debug"),
        (AssertionError(), 1, "AssertionError (this is a bug in spmoe-lite; --debug"),
        (Panic("called unwrap on None"), 1, "Panic: called unwrap on None (this is a bug"),
        (
            PermissionError(13, "Permission denied", "/x"),
            1,
            "cannot use /x (Permission denied); check",
        ),
        (OSError(28, "No space left on device"), 4, "disk full: cannot write the output"),
        (MemoryError(), 4, "out of memory; end other programs"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 4, "out of memory; end"),
        (OSError(12, "Cannot allocate memory"), 4, "out of memory; end"),
        (ImportError("libx.so: failed to map segment from shared object"), 4, "out of memory; end"),
        (errors.DamagedError("a\x1b[31m\x07b"), 6, "a[31mb"),  # no control codes from a file name
    ],
)
def test_an_unforeseen_error_is_one_line_too(monkeypatch, capsys, error, code, line):
    def fail(*args, **given):
        raise error

    monkeypatch.setattr(library, "removable", fail)
    assert spmoe("rm", "x") == code
    out, err = seen(capsys)
    assert out == "" and len(err) == 1
    assert err[0].startswith(f"spmoe-lite: {line}")
    assert spmoe("rm", "x", "--debug") == code
    assert any(line.startswith("Traceback") for line in seen(capsys)[1])


def test_what_took_the_memory_is_gone_before_its_line_is_made(monkeypatch, capsys):
    """Where all is taken the line itself would end in a traceback."""
    held = []

    class Large:
        pass

    def fail(*args, **given):
        large = Large()
        held.append(weakref.ref(large))
        raise MemoryError

    real = cli._fail
    monkeypatch.setattr(cli, "_fail", lambda *args: held.append(held[0]()) or real(*args))
    monkeypatch.setattr(library, "removable", fail)
    assert spmoe("rm", "x") == 4 and held[1] is None


@pytest.mark.parametrize("where", [["--debug", "run"], ["run", "--debug"]])
def test_debug_shows_the_traceback_and_the_same_line(engine, typed, capsys, where):
    assert spmoe(*where, "mix", "-p", "crash") == 1
    _, err = seen(capsys)
    assert "Traceback (most recent call last):" in err
    assert err[-1].startswith("spmoe-lite: KeyError: 'weights'")


def test_ctrl_c_is_130_without_a_traceback(monkeypatch, capsys):
    def fail(*args, **given):
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "removable", fail)
    assert spmoe("rm", "x") == 130
    assert seen(capsys)[1][-1] == "interrupted"


@pytest.mark.skipif(os.name == "nt", reason="SIGINT and sh")
def test_ctrl_c_during_an_answer_keeps_what_there_is(tmp_path):
    done = subprocess.run(
        [*FAKE, "run", "mix", "-p", "slow, then SIGINT", "--json"],
        capture_output=True,
        timeout=100,
        env=environment(tmp_path),
    )
    assert done.returncode == 130
    found = json.loads(done.stdout)
    assert found["finish_reason"] == "cancelled" and found["text"].startswith("0 1 2 3 4 5")
    assert b"Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="sh")
@pytest.mark.skipif(os.name == "nt", reason="a folder that is in use stays there")
def test_a_working_folder_that_is_gone_is_said(tmp_path, monkeypatch, capsys):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert spmoe("plan", "mix") == 3
    assert seen(capsys)[1] == ["spmoe-lite: the folder this runs in is gone: cd to one that exists"]


def test_a_closed_pipe_is_quiet(tmp_path):
    command = " ".join(f"'{part}'" for part in [*FAKE, "run", "mix", "-p", "slow"])
    done = subprocess.run(
        ["sh", "-c", f"{command} | head -c 3"],
        capture_output=True,
        timeout=100,
        env=environment(tmp_path),
    )
    assert done.stdout == b"0 1"
    assert b"slots" in done.stderr and b"rror" not in done.stderr and b"Trace" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has such a file")
@pytest.mark.parametrize("kind", ["full", "closed pipe"])
def test_remarks_that_cannot_be_written_cost_no_answer(tmp_path, kind):
    reader, writer = os.pipe()
    os.close(reader)
    if kind == "full":
        os.close(writer)
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        for prompt, expected in ((["-p", "hello"], (0, b"You said: hello\n")), ([], (2, b""))):
            done = subprocess.run(
                [*FAKE, "run", "mix", *prompt],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=writer,
                timeout=100,
                env=environment(tmp_path),
            )
            assert (done.returncode, done.stdout) == expected
    finally:
        os.close(writer)


# run


@pytest.mark.parametrize(
    "args, flag",
    [
        (["run", "mix", "-p", "caf\udce9"], "--prompt"),
        (["run", "mix", "-p", "x", "--stop", "\udce9"], "--stop"),
        (["run", "mix", "-p", "x", "-sys", "\udce9"], "--system-prompt"),
        (["chat", "mix", "--stop", "\udce9"], "--stop"),
        (["demo", "-p", "caf\udce9"], "--prompt"),
    ],
)
def test_bytes_of_another_encoding_are_named_by_flag_before_loading(engine, capsys, args, flag):
    assert spmoe(*args) == 2
    out, err = seen(capsys)
    assert out == "" and err[-1].startswith(f"spmoe-lite: {flag} is not text in ")
    assert engine.loaded == []


def test_run_prints_the_answer_and_nothing_else(engine, typed, capsys):
    assert spmoe("run", "mix", "-p", "hello") == 0
    out, err = seen(capsys)
    assert out == "You said: hello\n"
    assert err[0].startswith("128 of 256 slots") and err[-1].startswith("3 tokens")


def test_run_json_is_one_object_in_ascii(engine, typed, capsys):
    assert spmoe("run", "mix", "--draft", "mis", "-p", "unicode", "--json", "--raw") == 0
    out, _ = seen(capsys)
    assert out.isascii()
    found = json.loads(out)
    assert (found["model"], found["draft"], found["text"]) == (
        "mix",
        "mis",
        "You said: raw unicode",
    )
    assert (found["prompt_tokens"], found["completion_tokens"]) == (3, 3)
    assert found["finish_reason"] == "stop"
    assert found["stats"]["acceptance"] == 0.5 and found["stats"]["bytes_moved"] == 1_500_000_000


@pytest.mark.parametrize("how", ["-p", "-f", "-f -", "pipe"])
def test_the_prompt_comes_from_the_flag_a_file_or_stdin(engine, typed, capsys, tmp_path, how):
    file = tmp_path / "prompt.txt"
    file.write_text("tell é\n", encoding="utf-8")
    typed("tell é\n" if how in ("-f -", "pipe") else "not this")
    given = {"-p": ["-p", "tell é"], "-f": ["-f", str(file)], "-f -": ["-f", "-"], "pipe": []}[how]
    assert spmoe("run", "mix", *given) == 0
    assert seen(capsys)[0] == "You said: tell é\n"


@pytest.mark.parametrize("missing", [None, "", "\n"])
def test_no_prompt_is_wrong_usage(engine, typed, capsys, missing):
    typed(missing)
    assert spmoe("run", "mix") == 2
    assert engine.loaded == []  # said before anything is loaded
    typed("", person=True)
    assert spmoe("run", "mix") == 2
    assert "-p TEXT" in seen(capsys)[1][-1]


class Unreadable(io.StringIO):
    def read(self, size=-1):
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_two_prompts_or_a_bad_file_are_refused(engine, typed, capsys, tmp_path, monkeypatch):
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"\xff\xfe")
    assert spmoe("run", "mix", "-p", "a", "-f", str(bad)) == 2
    assert spmoe("run", "mix", "-f", str(bad)) == 2
    assert spmoe("run", "mix", "-f", str(tmp_path / "none")) == 3
    assert spmoe("run", "mix", "-f", str(tmp_path)) == 1
    assert str(tmp_path) in seen(capsys)[1][-1]
    assert spmoe("run", "mix", "-f", "a\0b") == 2
    assert spmoe("run", "mix", "-f", "") == 2
    monkeypatch.setattr(cli_shared, "MAX_PROMPT_CHARS", 3)
    long = tmp_path / "long.txt"
    long.write_text("four", encoding="utf-8")
    assert spmoe("run", "mix", "-f", str(long)) == 2
    monkeypatch.setattr(sys, "stdin", open(bad, encoding="utf-8", errors="replace"))
    assert spmoe("run", "mix") == 2
    assert "stdin is not text in utf-8" in seen(capsys)[1][-1]
    monkeypatch.setattr(sys, "stdin", Unreadable())
    assert spmoe("run", "mix") == 1
    assert "cannot read stdin (Input/output error)" in seen(capsys)[1][-1]
    assert engine.loaded == []


def test_kind_e_o11_the_mark_that_some_editors_write_is_no_text(engine, typed, capsys, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_bytes(b"\xef\xbb\xbfhello\r\n")
    assert spmoe("run", "mix", "-f", str(file)) == 0
    assert seen(capsys)[0] == "You said: hello\n"
    typed("\ufeffhello\n")
    assert spmoe("run", "mix") == 0
    assert seen(capsys)[0] == "You said: hello\n"


@pytest.mark.parametrize(
    "args",
    [["--temp", "nan"], ["--top-p", "2"], ["--top-k", "-1"], ["--raw", "--template", "t"]]
    + [["--raw", "--system", "x"], ["--threads", "99999999999"], ["--stop", ""], ["--seed", "-5"]]
    + [["--pin", size] for size in ("-1", "0", "abc", "5XB", "1.5", "nan", "")],
)
def test_bad_values_are_refused_before_anything_is_loaded(engine, typed, capsys, args):
    assert spmoe("run", "mix", "-p", "hi", *args) == 2
    assert engine.loaded == [] and len(seen(capsys)[1]) == 1


def test_flags_that_change_nothing_are_said(engine, typed, monkeypatch, capsys):
    flags = (
        "--draft-tokens 3 --cutoff 2 --no-prefetch --slots 4 --policy layer-lru --pin 1GB".split()
    )
    assert spmoe("run", "mix", "-p", "hi", *flags, "--draft", "mis") == 0
    assert [line for line in seen(capsys)[1] if "no effect" in line] == [
        "no effect, as --no-prefetch is given: --cutoff"
    ]
    with monkeypatch.context() as cpu:
        cpu.setattr(fake_engine.Plan, "device", "cpu")
        assert spmoe("run", "mix", "-p", "hi", "--pin", "all") == 0
        assert "no effect, as it runs on the CPU: --pin" in seen(capsys)[1]
    monkeypatch.setattr(fake_engine.Plan, "expert_count", 0)
    assert spmoe("run", "mix", "-p", "hi", *flags) == 0
    assert [line for line in seen(capsys)[1] if "no effect" in line] == [
        "no effect, as there is no --draft: --draft-tokens",
        "no effect, as nothing is prefetched: --cutoff, --no-prefetch",
        "no effect, as mix has no experts: --slots, --policy, --pin",
    ]
    assert spmoe("run", "mix", "-p", "hi", "--temp", "0", "--top-k", "5") == 0
    assert "no effect, as the temperature is 0: --top-k" in seen(capsys)[1]
    monkeypatch.setenv("SPMOE_SLOTS", "4")  # set once for every model
    assert spmoe("run", "mix", "-p", "hi") == 0
    assert not any("no effect" in line for line in seen(capsys)[1])


def test_a_refused_variable_is_named(engine, typed, monkeypatch, capsys):
    monkeypatch.setenv("SPMOE_SLOTS", "many")
    assert spmoe("run", "mix", "-p", "hi") == 2
    assert "(in SPMOE_SLOTS)" in seen(capsys)[1][0]
    assert spmoe("run", "mix", "-p", "hi", "--slots", "few") == 2
    assert "SPMOE" not in seen(capsys)[1][0]


def test_a_stop_text_may_hold_spaces_in_the_environment(engine, typed, monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine, "chat", lambda self, messages, **given: asked.append(given["stop"]) or NOTHING
    )
    monkeypatch.setenv("SPMOE_STOP", "The end.")
    monkeypatch.setenv("SPMOE_VERSION", "9.9")  # not ours
    assert spmoe("run", "mix", "-p", "hi") == 0
    assert asked == [("The end.",)]


def test_a_pack_without_a_template_continues_the_text(engine, typed, capsys):
    engine.template = None
    assert spmoe("run", "mix", "-p", "hello") == 0
    assert seen(capsys)[0] == "You said: raw hello\n"
    assert spmoe("run", "mix", "-p", "hello", "-sys", "Be brief.") == 2


def test_options_reach_the_engine(engine, typed, monkeypatch):
    asked = []
    monkeypatch.setattr(
        engine, "chat", lambda self, messages, **given: asked.append((messages, given)) or NOTHING
    )
    assert (
        spmoe(
            *"run mix -p hi -md mis --draft-tokens 2 --slots 9 --vram 20GiB -c 99 --device cpu".split(),
            *"--no-prefetch --cutoff 3 --policy global-lru --temperature 0.5 --top-k 4".split(),
            *"--top-p 0.8 --min-p 0.1 --repeat-penalty 1.1 --presence-penalty 0.2".split(),
            *"--frequency-penalty 0.3 -s 5 -n 6 -sys Brief. --stop A --stop B".split(),
            *"--template t.jinja -ctk int8".split(),
        )
        == 0
    )
    loaded = engine.loaded[0]
    assert (loaded["target"], loaded["draft"]) == (Path("mix.spmoe"), Path("mis.spmoe"))
    for name, value in {
        "draft_tokens": 2,
        "slots": 9,
        "vram": "20GiB",
        "ctx_size": 99,
        "kv_type": "int8",
        "device": "cpu",
        "prefetch": False,
        "cutoff": 3,
        "policy": "global-lru",
        "template": Path("t.jinja"),
    }.items():
        assert loaded[name] == value
    (messages, given) = asked[0]
    assert [m["role"] for m in messages] == ["system", "user"]
    assert (given["max_tokens"], given["stop"]) == (6, ("A", "B"))
    sampling = given["sampling"]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        0.5,
        4,
        0.8,
        0.1,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.1, 0.2)
    assert (sampling.frequency_penalty, sampling.seed) == (0.3, 5)


NOTHING = fake_engine.Generation(iter(()), None, None)


def test_options_come_from_the_environment_and_flags_win(engine, typed, monkeypatch):
    for name, value in {
        "SPMOE_DRAFT": "mis",
        "SPMOE_SLOTS": "9",
        "SPMOE_CTX_SIZE": "77",
        "SPMOE_NO_PREFETCH": "1",
        "SPMOE_MODEL": "other",
    }.items():
        monkeypatch.setenv(name, value)
    assert spmoe("run", "mix", "-p", "hi", "--slots", "5") == 0
    loaded = engine.loaded[0]
    assert (loaded["target"], loaded["draft"]) == (Path("mix.spmoe"), Path("mis.spmoe"))
    assert (loaded["slots"], loaded["ctx_size"], loaded["prefetch"]) == (5, 77, False)
    assert spmoe("run", "-p", "hi") == 0
    assert engine.loaded[1]["target"] == Path("other.spmoe")


def test_what_is_set_for_all_commands_contradicts_nothing_that_is_typed(
    engine, typed, monkeypatch, capsys, tmp_path
):
    (tmp_path / "asked").write_text("from a file")
    monkeypatch.setenv("SPMOE_PROMPT", "set")
    monkeypatch.setenv("SPMOE_SYSTEM_PROMPT", "Be brief.")
    monkeypatch.setenv("SPMOE_TEMPLATE", "t.jinja")
    assert spmoe("run", "mix") == 0
    assert seen(capsys)[0] == "You said: set\n"
    assert spmoe("run", "mix", "--raw", "-f", str(tmp_path / "asked")) == 0
    assert seen(capsys)[0] == "You said: raw from a file\n"
    assert [loaded["template"] for loaded in engine.loaded] == [Path("t.jinja"), None]
    engine.template = None
    assert spmoe("run", "mix", "-p", "hi") == 0
    out, err = seen(capsys)
    assert out == "You said: raw hi\n" and "SPMOE_SYSTEM_PROMPT is not used" in "".join(err)
    monkeypatch.setenv("SPMOE_FILE", str(tmp_path / "asked"))
    assert spmoe("run", "mix", "-p", "hi") == 0
    assert spmoe("run", "mix") == 2  # neither goes before the other
    assert "two prompts" in seen(capsys)[1][-1]


def test_every_option_has_the_variable_of_its_first_long_name():
    import click

    for command in cli.cli.commands.values():
        for option in command.params:
            if isinstance(option, click.Option) and option.name not in ("help", "debug"):
                first = next(name for name in option.opts if name.startswith("--"))
                variable = option.envvar or f"SPMOE_{option.name.upper()}"
                assert variable == f"SPMOE_{first[2:].upper().replace('-', '_')}"
                assert command.context_settings["auto_envvar_prefix"] == "SPMOE"


def test_what_is_not_given_is_left_to_the_model(engine, typed):
    assert spmoe("run", "mix", "-p", "hi") == 0
    loaded = engine.loaded[0]
    assert "draft_tokens" not in loaded and loaded["slots"] is None and loaded["vram"] == "auto"


@pytest.mark.parametrize(
    "args", [["run", "", "-p", "hi"], ["chat", ""], ["run", "-m", "", "-p", "hi"]]
)
def test_an_empty_name_is_not_the_pack_used_last(args, typed, capsys):
    assert spmoe(*args) == 3
    assert "name of the pack is empty" in capsys.readouterr().err


def test_two_models_are_refused(engine, typed):
    assert spmoe("run", "mix", "-m", "other", "-p", "hi") == 2


# demo


@pytest.fixture
def made(engine, typed, monkeypatch):
    """A demo pair that is there already, as `prepare` and `inspect` would tell; `prepare`'s arguments."""
    prepared = []

    def prepare(**given):
        prepared.append(given)
        return Path("demo.spmoe"), Path("demo-draft.spmoe")

    monkeypatch.setattr("spmoe_lite.demo.prepare", prepare)
    monkeypatch.setattr(library, "inspect", lambda pack: {"experts": 240})
    return prepared


def test_demo_runs_with_half_of_the_experts_and_says_so(made, engine, capsys):
    assert spmoe("demo", "--gguf", "small.gguf") == 0
    assert made[0]["gguf"] == Path("small.gguf")
    loaded = engine.loaded[0]
    assert (loaded["target"], loaded["draft"]) == (Path("demo.spmoe"), Path("demo-draft.spmoe"))
    assert loaded["slots"] == 120
    out, err = seen(capsys)
    assert out == f"You said: {cli_talk.DEMO_PROMPT}\n"
    assert any("half of the experts" in line for line in err)
    assert f">>> {cli_talk.DEMO_PROMPT}" in err
    assert err[-1].startswith("3 tokens")


def test_demo_takes_another_prompt_and_other_slots(made, engine, capsys):
    assert spmoe("demo", "-p", "Name a river.", "--slots", "60") == 0
    assert engine.loaded[0]["slots"] == 60
    out, err = seen(capsys)
    assert out == "You said: Name a river.\n" and not any("half of" in line for line in err)


def test_demo_goes_on_as_a_chat_on_a_terminal(made, engine, typed, monkeypatch, capsys):
    monkeypatch.setattr(terminal, "is_interactive", lambda: True)
    monkeypatch.setattr("spmoe_lite.repl.is_interactive", lambda: False)  # plain lines
    typed("seen\n", person=True)
    assert spmoe("demo", "-p", "slow") == 0
    out, err = seen(capsys)
    assert "user: slow; assistant: 0 1 2" in out
    assert any(line.startswith("cut at 200 tokens") for line in err)  # only of the first answer


# chat without PACK


def no_packs(draft=None, home=None):
    return None


def test_chat_names_the_pack_it_took(engine, typed, monkeypatch, capsys):
    typed("hello\n")
    asked = []
    monkeypatch.setattr(
        library, "default_target", lambda draft: asked.append(draft) or Path("recent.spmoe")
    )
    assert spmoe("chat", "--draft", "mis") == 0
    assert asked == [Path("mis.spmoe")]
    assert seen(capsys)[1][0] == "recent, drafted by mis"


def test_the_pack_of_the_demo_is_only_taken_by_name_and_this_is_said(
    engine, typed, monkeypatch, capsys
):
    monkeypatch.setattr(library, "default_target", no_packs)
    assert spmoe("run", "-p", "hi") == 3
    (line,) = seen(capsys)[1]
    assert "but demo, which is only taken by name" in line
    assert "spmoe-lite chat demo --draft demo-draft" in line


def test_without_any_pack_a_pipe_gets_the_commands_to_type(engine, typed, monkeypatch, capsys):
    monkeypatch.setattr(library, "default_target", no_packs)
    monkeypatch.setattr(cli_shared, "_is_here", lambda name: False)
    assert spmoe("chat") == 3
    _, err = seen(capsys)
    assert len(err) == 1
    for command in ("convert mixtral-8x7b", "convert mistral-7b", "demo"):
        assert f"spmoe-lite {command}" in err[0]
    assert spmoe("run", "-p", "hi") == 3
    assert spmoe("chat", "--draft", "mis") == 3
    assert "vocabulary of mis" in seen(capsys)[1][-1]


def test_without_any_pack_a_person_is_asked_before_a_download(
    engine, typed, monkeypatch, capsys, tmp_path
):
    monkeypatch.setattr(library, "default_target", no_packs)
    monkeypatch.setattr(terminal, "is_interactive", lambda: True)
    converted = []

    def convert(source, *, confirm, **given):
        if not confirm(Plan(small=True)):
            raise errors.Cancelled("nothing was written")
        converted.append(source)
        return Made(tmp_path / f"{source}.spmoe", False)

    def find(name, home=None):
        raise errors.NotFoundError(name)

    monkeypatch.setattr("spmoe_lite.converters.convert", convert)
    monkeypatch.setattr(library, "find", find)
    typed("n\n", person=True)
    assert spmoe("chat") == 3
    assert converted == [] and engine.loaded == []
    _, err = seen(capsys)
    assert "download: 93.4 GB" in err and any("[y/N]" in line for line in err)
    typed("y\ny\n", person=True)
    assert spmoe("chat") == 0
    assert converted == ["mixtral-8x7b", "mistral-7b"]
    assert engine.loaded[0]["target"] == tmp_path / "mixtral-8x7b.spmoe"
    assert engine.loaded[0]["draft"] == tmp_path / "mistral-7b.spmoe"
    typed("y\nn\n", person=True)
    assert spmoe("chat") == 0
    assert engine.loaded[1]["draft"] is None


# convert, repack, list, rm, inspect, verify


class Plan:
    """Sizes as `convert` shows them."""

    def __init__(self, small: bool) -> None:
        self.needs_confirmation = not small

    def __str__(self) -> str:
        return "mixtral-8x7b\ndownload: 93.4 GB"


class Made:
    def __init__(self, path: Path, already_there: bool) -> None:
        self.path, self.already_there = path, already_there


@pytest.fixture
def conversion(monkeypatch):
    """`convert` that asks for a large model and remembers what it was given."""
    calls = []

    def convert(source, *, confirm=None, cancel, on_progress, **given):
        calls.append((source, given))
        on_progress(Progress("convert", 5, 10, "bytes"))
        if not confirm(Plan(small=source == "small")):
            raise errors.Cancelled("nothing was written")
        return Made(Path("/packs/x.spmoe"), source == "there")

    monkeypatch.setattr("spmoe_lite.converters.convert", convert)
    return calls


def test_convert_passes_its_options_on(conversion, typed, capsys):
    assert (
        spmoe(
            *"convert small --name x --experts int4 --dense fp32 --embed int8 --group 32 --force".split(),
            *"--low-disk --offline".split(),
        )
        == 0
    )
    source, given = conversion[0]
    assert source == "small"
    assert given == {
        "name": "x",
        "out": None,
        "experts": "int4",
        "dense": "fp32",
        "embed": "int8",
        "group": 32,
        "force": True,
        "low_disk": True,
        "offline": True,
    }
    assert "packed: /packs/x.spmoe" in seen(capsys)[1]


def test_a_large_conversion_asks_a_person_and_needs_yes_elsewhere(conversion, typed, capsys):
    assert spmoe("convert", "large") == 2
    assert "--yes" in seen(capsys)[1][-1]
    assert spmoe("convert", "large", "--yes") == 0
    typed("y\n", person=True)
    assert spmoe("convert", "large") == 0
    capsys.readouterr()
    typed("\n", person=True)
    assert spmoe("convert", "large") == 1
    out, err = seen(capsys)
    assert out == "" and "download: 93.4 GB" in err and "nothing was written" in err[-1]


@pytest.mark.skipif(os.name == "nt", reason="SIGINT")
def test_ctrl_c_during_a_conversion_stops_it_and_says_how_to_go_on(monkeypatch, typed, capsys):
    import signal

    def convert(source, *, confirm, cancel, on_progress, **given):
        signal.raise_signal(signal.SIGINT)
        assert cancel.is_set()
        raise errors.Cancelled("cancelled")

    monkeypatch.setattr("spmoe_lite.converters.convert", convert)
    assert spmoe("convert", "small") == 130
    assert seen(capsys)[1] == ["spmoe-lite: stopped; the same command resumes"]


def test_a_finished_pack_is_already_there(conversion, typed, capsys):
    assert spmoe("convert", "there", "--yes") == 0
    assert "already there: /packs/x.spmoe" in seen(capsys)[1]


def test_list_shows_sizes_dates_and_partials(monkeypatch, capsys):
    found = [
        PackInfo("demo", Path("/h/demo.spmoe"), 1_234_000_000, 1.6e9, True, True, "mixtral"),
        PackInfo("m", Path("/h/m.spmoe.partial"), 14_500_000_000, 1.7e9, False, False, "mistral"),
        PackInfo("far", Path("/h/far.spmoe"), 10_000_000, 1e14, True, True, "mixtral"),
    ]
    monkeypatch.setattr(library, "packs", lambda: found)
    assert spmoe("list") == 0
    lines = seen(capsys)[0].splitlines()
    assert re.fullmatch(r"demo +1\.2 GB  mixtral +2020-09-1\d", lines[1])
    assert re.fullmatch(r"m +14\.5 GB  mistral +2023-11-1\d partial", lines[2])
    assert re.fullmatch(r"far +10\.0 MB  mixtral +\?", lines[3])  # no calendar has that year
    assert max(map(len, lines)) <= 48
    assert spmoe("list", "--json") == 0
    as_json = json.loads(seen(capsys)[0])
    assert [p["name"] for p in as_json] == ["demo", "m", "far"]
    assert [p["complete"] for p in as_json] == [True, False, True]
    assert [p["modified"] is None for p in as_json] == [False, False, True]


def test_an_empty_list_says_where_it_looked(capsys, home):
    assert spmoe("list") == 0
    out, err = seen(capsys)
    assert out == "" and str(home) in err[0] and "spmoe-lite demo" in err[0]
    assert spmoe("list", "--json") == 0
    assert json.loads(seen(capsys)[0]) == []


def test_unknown_packs_are_not_found(typed, capsys):
    for command in ("inspect", "verify", "rm", "repack"):
        assert spmoe(command, "nothing") == 3
        assert "nothing" in seen(capsys)[1][-1]
    assert spmoe("run", "mixtral-8x7b", "-p", "hi") == 3
    assert "spmoe-lite convert mixtral-8x7b" in seen(capsys)[1][-1]


# For real, on a tiny pair


@pytest.fixture(scope="module")
def tiny_home(tmp_path_factory):
    """A home with the packs `tiny` (4 layers of 4 experts) and `draft`, made by the commands."""
    folder = tmp_path_factory.mktemp("tiny")
    tiny_mixtral(folder / "source", layers=4)
    tiny_mistral(folder / "draft", layers=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPMOE_HOME", str(folder / "home"))
        assert spmoe("convert", str(folder / "source"), "--name", "tiny") == 0
        assert spmoe("convert", str(folder / "draft")) == 0
    return folder / "home"


@pytest.fixture
def tiny(tiny_home, monkeypatch):
    monkeypatch.setenv("SPMOE_HOME", str(tiny_home))
    return tiny_home


def test_the_packs_can_be_seen_and_checked(tiny, capsys):
    assert spmoe("list") == 0
    names = [line.split()[0] for line in seen(capsys)[0].splitlines()]
    assert names == ["NAME", "draft", "tiny"]
    assert spmoe("inspect", "tiny") == 0
    out, _ = seen(capsys)
    assert "16 of 131 kB, 4 a layer, 2 a token" in out
    assert spmoe("inspect", "tiny", "--json") == 0
    assert json.loads(seen(capsys)[0])["experts"] == 16
    assert spmoe("verify", "tiny") == 0
    assert seen(capsys)[0].startswith("tiny: ")


def test_run_writes_what_the_library_writes(tiny, typed, capsys):
    from spmoe_lite import Engine

    with Engine.load("tiny", slots=5) as engine:
        expected = engine.chat([{"role": "user", "content": "hello"}], max_tokens=12).result
        raw = engine.generate("hello", max_tokens=12).result
    args = ["run", "tiny", "-p", "hello", "-n", "12", "--json"]
    for more in (
        [],
        ["--draft", "draft", "--slots", "3"],
        ["--draft", "draft", "--draft-tokens", "1"],
    ):
        assert spmoe(*args, *more) == 0
        found = json.loads(seen(capsys)[0])
        assert (found["text"], found["finish_reason"]) == (expected.text, expected.finish_reason)
        assert found["prompt_tokens"] == expected.prompt_tokens
    assert spmoe(*args, "--raw") == 0
    assert json.loads(seen(capsys)[0])["text"] == raw.text != expected.text


def test_chat_takes_the_pack_used_last_and_keeps_the_talk(tiny, typed, capsys):
    typed("hello\nagain\n/show\n/stats\n")
    assert spmoe("chat", "--draft", "draft", "-n", "8", "--slots", "6") == 0
    out, err = seen(capsys)
    assert err[0] == "tiny, drafted by draft"
    assert err[1].startswith("6 of 16 experts in slots")
    assert sum("acceptance" in line for line in err) == 2
    assert re.search(r"^messages +4$", out, re.MULTILINE)
    assert re.search(r"^drafted +\d+ tokens, \d+% accepted$", out, re.MULTILINE)


def test_what_does_not_fit_is_4_before_anything_is_loaded(tiny, typed, capsys):
    assert spmoe("run", "tiny", "-p", "hello", "--vram", "1MB") == 4
    assert "raise --vram" in seen(capsys)[1][-1]
    assert spmoe("run", "tiny", "-p", "hello" * 999) == 4
    assert "shorten the prompt" in seen(capsys)[1][-1]


@pytest.mark.parametrize(
    "flags, code",
    [
        (["--temp", "-1"], 2),
        (["--draft", "tiny", "--draft-tokens", "99"], 2),
        (["--device", "tpu"], 2),
        (["--vram", "lots"], 2),
        (["--ctx-size", "100000"], 2),
        (["--kv-type", "q8_0"], 2),
        (["--template", "nowhere.jinja"], 3),
        (["--draft", "nowhere"], 3),
    ],
)
def test_bad_values_are_one_line_for_the_real_engine_too(tiny, typed, capsys, flags, code):
    assert spmoe("run", "tiny", "-p", "hi", "-n", "2", *flags) == code
    out, err = seen(capsys)
    assert out == "" and err[-1].startswith("spmoe-lite: ") and "bug" not in err[-1]


def test_chat_refuses_a_pack_without_a_template(tiny, typed, capsys, tmp_path, monkeypatch):
    import shutil

    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))  # it will be the one used last there

    plain = tmp_path / "plain.spmoe"
    shutil.copytree(tiny / "tiny.spmoe", plain)
    settings = json.loads((plain / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    data = json.dumps(settings).encode()
    (plain / "tokenizer_config.json").write_bytes(data)
    manifest = json.loads((plain / "manifest.json").read_text(encoding="utf-8"))
    manifest["files"]["tokenizer_config.json"]["size"] = len(data)
    (plain / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert spmoe("chat", str(plain)) == 5
    out, err = seen(capsys)
    assert out == "" and len(err) == 2  # the pair's name and the error: nothing was loaded
    assert "spmoe-lite run plain" in err[1] and "--template FILE" in err[1]
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", encoding="utf-8")
    typed("hello\n")
    assert spmoe("chat", str(plain), "--template", str(template), "-n", "3") == 0
    assert spmoe("run", str(plain), "-p", "hello", "-n", "3") == 0


def test_profile_measures_and_keeps_what_it_measured(tiny, typed, capsys):
    assert spmoe("profile", "tiny", "--draft", "draft", "--slots", "8", "--json") == 0
    out, err = seen(capsys)
    found = json.loads(out)
    assert {"expert_copy_ms", "draft_token_ms", "target_layer_ms", "copy_gbps"} <= set(found)
    assert found.pop("read_gbps") is None and all(value >= 0 for value in found.values())
    kept = Path(err[-1].removeprefix("kept in "))
    assert kept.is_file() and kept.is_relative_to(tiny)
    assert spmoe("profile", "tiny", "--draft", "draft", "--slots", "8") == 0
    out, _ = seen(capsys)
    for name in ("experts copied to slots", "a layer, 5 tokens at once", "a draft token"):
        assert re.search(rf"^{name} +\d", out, re.MULTILINE)
    assert spmoe("profile", "tiny", "--slots", "8") == 0
    out, err = seen(capsys)
    assert "a layer, one token" in out and "draft" not in out
    assert Path(err[-1].removeprefix("kept in ")) != kept  # times of the target alone


def test_repack_and_rm(tiny, capsys, tmp_path, monkeypatch):
    import shutil

    shutil.copytree(tiny / "tiny.spmoe", tmp_path / "home" / "copy.spmoe")
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path / "home"))
    assert spmoe("repack", "copy", "--experts", "bf16") == 0
    assert spmoe("inspect", "copy", "--json") == 0
    assert json.loads(seen(capsys)[0])["expert_dtype"] == "bf16"
    assert spmoe(*"repack copy --experts int4 --dense int8 --group 32".split()) == 0
    assert spmoe("inspect", "copy") == 0
    out = seen(capsys)[0]
    assert "int4-g32z, 1.1 MB: 16 of 65.5 kB" in out
    assert "matrices int8-g32, all else fp32, " in out
    assert spmoe(*"repack copy --experts int4 --group 64".split()) == 5
    assert "down of every expert has 96 columns" in seen(capsys)[1][-1]
    assert spmoe("repack", "copy", "--group", "32") == 2
    assert spmoe("repack", "copy", "--group", "48") == 2
    assert spmoe("repack", "copy", "--experts", "int3") == 2
    assert spmoe("rm", "copy") == 0
    assert seen(capsys)[1][-1].startswith("deleted copy (")
    assert not (tmp_path / "home" / "copy.spmoe").exists()
    assert spmoe("rm", "copy") == 3


def test_rm_knows_every_name_before_it_deletes_one(tiny, typed, capsys, tmp_path, monkeypatch):
    import shutil

    for name in ("a", "b"):
        shutil.copytree(tiny / "tiny.spmoe", tmp_path / f"{name}.spmoe")
    (tmp_path / "photos").mkdir()
    monkeypatch.setenv("SPMOE_HOME", str(tmp_path))
    there = sorted(tmp_path.rglob("*"))
    for wrong, code in (("c", 3), (str(tmp_path / "photos"), 2)):
        assert spmoe("rm", "a", "b", wrong) == code
        out, err = seen(capsys)
        assert out == "" and len(err) == 1 and wrong in err[0]
        assert sorted(tmp_path.rglob("*")) == there
    assert spmoe("rm", "a", "a", str(tmp_path / "a.spmoe"), "b") == 0  # named twice, gone once
    assert len(seen(capsys)[1]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["photos"]


def test_a_damaged_pack_is_6(tiny, typed, capsys, tmp_path):
    import shutil

    broken = tmp_path / "broken.spmoe"
    shutil.copytree(tiny / "tiny.spmoe", broken)
    layer = broken / "experts" / "layer-001.safetensors"
    data = bytearray(layer.read_bytes())
    data[-70000] ^= 1
    layer.write_bytes(data)
    assert spmoe("verify", str(broken)) == 6
    assert "layer-001" in seen(capsys)[1][-1]
    layer.write_bytes(data[:-1])
    for command in (["run", str(broken), "-p", "hi"], ["verify", str(broken)]):
        assert spmoe(*command) == 6
        assert "layer-001" in seen(capsys)[1][-1]


# The terminal


def shown(capsys, *events: tuple[float, Progress], monkeypatch) -> list[str]:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.ProgressDisplay() as display:
        for at, progress in events:
            now[0] = at
            display(progress)
    return seen(capsys)[1]


def test_progress_in_a_pipe_is_a_line_now_and_then(capsys, monkeypatch):
    total = 90_000_000_000
    events = [(t, Progress("convert", int(1e9) * t, total, "bytes")) for t in range(0, 91)]
    lines = shown(capsys, *events, monkeypatch=monkeypatch)
    assert lines[0] == "convert 5.0 of 90.0 GB, 1.0 GB/s, 85 s left"
    assert lines[-1] == "convert 90.0 of 90.0 GB, 1.0 GB/s"
    assert len(lines) == 7
    assert shown(capsys, *events[:3], monkeypatch=monkeypatch) == []  # short work is silent


def test_progress_follows_the_rate_of_the_last_seconds(capsys, monkeypatch):
    slow = [(t, Progress("download", t, 1000, "files")) for t in range(0, 21)]
    fast = [(20 + t, Progress("download", 20 + 20 * t, 1000, "files")) for t in range(1, 20)]
    lines = shown(capsys, *slow, *fast, monkeypatch=monkeypatch)
    assert lines[-1] == "download 320 of 1000 files, 20 files/s, 34 s left"


@pytest.mark.parametrize(
    "count, text",
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (93_400_000_000, "93.4 GB"),
        (352_000_000, "352 MB"),
        (999_960_000, "1.0 GB"),
        (5e15, "5000 TB"),
    ],
)
def test_sizes_are_for_people(count, text):
    assert terminal.size(count) == text


def test_lines_break_between_their_parts_or_words():
    text = "120 tokens · 12.5 tok/s · first token 0.52 s · acceptance 71%"
    assert terminal.fold(text, len(text)) == text
    assert terminal.fold(text, 30).split("\n") == [
        "120 tokens · 12.5 tok/s",
        "first token 0.52 s",
        "acceptance 71%",
    ]
    assert terminal.fold("Ctrl-C again leaves", 14) == "Ctrl-C again\nleaves"


def on_screen(text: str, width: int) -> list[str]:
    """Lines of a terminal that shows `text`: wraps, moves left, erases to the end of the line."""
    lines, column = [""], 0
    for part in re.findall(r"\x1b\[\d*[DK]|\n|.", text):
        if part == "\n":
            lines.append("")
            column = 0
        elif part.endswith("D") and part[0] == "\x1b":
            column -= int(part[2:-1])
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            assert column < width
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.mark.parametrize("width", [11, 20, 40, 80])
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_streamed_text_wraps_between_words(width, step):
    text = (
        "The quick brown fox jumps over\nthe lazy dog; a veryveryverylongwordindeed ends it.  Yes."
    )
    wrap = terminal.WordWrap(width)
    shown = "".join(wrap.push(text[i : i + step]) for i in range(0, len(text), step))
    lines = on_screen(shown, width)
    assert max(map(len, lines)) < width
    words = text.split()
    if width > max(map(len, words)):
        assert " ".join(lines).split() == words
    assert "".join("".join(lines).split()) == "".join(words)
    if step == 1:
        assert all(wrap.push("x") for _ in range(9))  # nothing is held back


def test_code_is_not_wrapped():
    code = "```python\nprint('a long line of code', 1, 2)\n```\n    indented code that is long\n"
    assert terminal.WordWrap(20).push(code) == code
    assert terminal.WordWrap(9).push("漢字漢字漢字") == "漢字漢字\n漢字"


def test_a_narrow_progress_line_leaves_out_the_rate():
    progress = Progress("load", 27 * 10**9, 50 * 10**9, "bytes")
    assert terminal.describe(progress, 23.4e9) == "load 27.0 of 50.0 GB, 23.4 GB/s, 1 s left"
    assert terminal.describe(progress, 23.4e9, 40) == "load 27.0 of 50.0 GB, 1 s left"


def test_the_second_ctrl_c_is_a_keyboard_interrupt():
    import signal

    with terminal.interruptible() as cancel:
        signal.raise_signal(signal.SIGINT)
        assert cancel.is_set()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_thread_other_than_the_main_one_may_wait_too():
    seen_events = []

    def work():
        with terminal.interruptible() as cancel:
            seen_events.append(cancel.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen_events == [False]
