"""The chat loop over a scripted engine: in a terminal of its own, in a pipe, and command by command.

Kinds E (O11: a legacy code page on stdout) and L (O36: Ctrl-C at every moment, 130, nothing left running).
"""

import json
import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spmoe_lite import repl as repl_module
from spmoe_lite.errors import CapacityError, DamagedError, NotFoundError, SpmoeError, UsageError
from spmoe_lite.repl import Repl
from tests.fake_engine import Engine

FAKE = [sys.executable, str(Path(__file__).with_name("fake_engine.py"))]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|[=>()][0-9A-Z]?|\][^\x07]*\x07)")


def environment(home: Path, **extra: str) -> dict[str, str]:
    """A clean environment: no colours wished, no editor quirks, UTF-8."""
    kept = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}
    plain = {"TERM": "xterm-256color", "PYTHONUTF8": "1", "PROMPT_TOOLKIT_NO_CPR": "1"}
    return kept | plain | {"SPMOE_HOME": str(home)} | extra


class Screen:
    """A child process on a pseudo-terminal of `columns`; `wait_for` reads until a text appears."""

    def __init__(self, arguments: list[str], env: dict[str, str], columns: int = 80) -> None:
        import fcntl
        import pty
        import struct
        import termios

        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execve(FAKE[0], [*FAKE, *arguments], env)
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.raw = ""
        self._seen = 0

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self.fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.fd, 65536)
        except OSError:  # Linux: the child has closed its side
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """What was written since the last call, up to and with `text`, without escape sequences."""
        deadline = time.monotonic() + seconds
        while True:
            shown = ESCAPES.sub("", self.raw)
            found = shown.find(text, self._seen)
            if found >= 0:
                start, self._seen = self._seen, found + len(text)
                return shown[start : self._seen]
            if not self._read(deadline):
                raise AssertionError(f"no {text!r} in {self.raw!r}")

    def answer(self, line: str) -> str:
        """Type `line` and Enter; what is shown until the prompt is back after the statistics."""
        self.type(line + "\r")
        return self.wait_for(" moved") + self.wait_for(">>>")

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def exit_code(self, seconds: float = 60.0) -> int:
        deadline = time.monotonic() + seconds
        while self._read(deadline):
            pass
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.fd)
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        raise AssertionError(f"still running: {self.raw!r}")

    def kill(self) -> None:
        if self.pid:
            os.kill(self.pid, 9)
            os.waitpid(self.pid, 0)
            os.close(self.fd)


@pytest.fixture
def screen(tmp_path):
    """Starts `chat` on a terminal; what a test leaves running is ended."""
    if os.name == "nt":
        pytest.skip("no pseudo-terminals")
    started = []

    def start(*arguments: str, columns: int = 80, **extra: str) -> Screen:
        child = Screen(["chat", "mix", *arguments], environment(tmp_path, **extra), columns)
        started.append(child)
        return child

    yield start
    for child in started:
        child.kill()


def chat(lines: str, home: Path, *arguments: str, **extra: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*FAKE, "chat", "mix", *arguments],
        input=lines.encode(),
        capture_output=True,
        timeout=100,
        env=environment(home, **extra),
    )


# On a terminal


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_a_talk_on_a_terminal_ends_with_ctrl_d(screen, term, tmp_path):
    mark = tmp_path / "closed"
    child = screen("--draft", "mis", TERM=term, FAKE_ENGINE_CLOSED=str(mark))
    first = child.wait_for(">>>")
    assert first.lstrip().startswith("mix, drafted by mis")
    assert "128 of 256 slots" in first
    answer = child.answer("hello")
    assert "You said: hello" in answer
    assert "3 tokens" in answer and "acceptance 50%" in answer and "hit rate 70%" in answer
    child.type("\x04")
    assert child.exit_code() == 0
    assert mark.exists()  # the engine was closed
    if term == "dumb":
        assert "\x1b" not in child.raw
    else:
        assert "\x1b[2m3 tokens" in child.raw  # dim


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(screen, term):
    child = screen(TERM=term)
    child.wait_for(">>>")
    child.type("slow\r")
    child.wait_for("3 4 5")
    child.type("early")
    child.type("\x03")
    stopped = child.wait_for("stopped; the conversation goes on")
    assert term == "dumb" or not re.search(r"\^C|early", stopped)
    child.wait_for(">>>")
    seen = child.answer("seen")
    assert "user: slow; assistant: 0 1 2 3 4 5" in seen and "user: seen" in seen
    child.type("\x03")
    child.wait_for("Ctrl-C again leaves")
    child.wait_for(">>>")
    child.type("\x03")
    assert child.exit_code() == 130
    assert "Traceback" not in child.raw
    assert ESCAPES.sub("", child.raw).endswith("\n")  # the shell's prompt gets a line of its own


def test_ctrl_c_is_heard_where_it_does_not_end_the_read(screen):
    child = screen(TERM="dumb")
    child.wait_for(">>>")
    child.answer("unheard")
    child.wait_for("Ctrl-C again leaves", 20)
    child.wait_for(">>>")
    child.type("hel")
    time.sleep(0.2)
    child.type("lo\r")
    child.wait_for("You said: hello")


def test_ctrl_d_during_an_answer_leaves_after_it(screen):
    child = screen("-n", "200")
    child.wait_for(">>>")
    child.type("slow\r")
    child.wait_for("3 4 5")
    child.type("\x04")
    child.wait_for("198 199")
    assert child.exit_code(10) == 0


def test_what_is_typed_during_an_answer_is_the_next_question(screen):
    child = screen("-n", "200")
    child.wait_for(">>>")
    child.type("slow\r")
    child.wait_for("3 4 5")
    child.type("hello\r")
    child.wait_for("198 199")
    child.wait_for("You said: hello")


def test_the_second_ctrl_c_after_a_stopped_answer_leaves(screen):
    child = screen()
    child.wait_for(">>>")
    child.type("slow\r")
    child.wait_for("3 4 5")
    child.type("\x03")
    child.wait_for(" moved")
    child.wait_for(">>>")
    child.type("\x03")
    assert child.exit_code() == 130


@pytest.mark.parametrize("columns", [40, 80])
def test_loading_shows_one_live_line_that_goes_away(screen, columns):
    child = screen(columns=columns, FAKE_LOAD_SECONDS="1.5")
    loading = child.wait_for(">>>")
    lines = [line for line in re.split(r"[\r\n]+", loading) if " of 50.0 GB" in line]
    assert len(lines) > 3
    assert max(map(len, lines)) <= columns
    assert "\x1b[2K" in child.raw  # and the line was erased


def test_ctrl_c_while_loading_leaves_at_once(screen):
    child = screen(FAKE_LOAD_SECONDS="30")
    child.wait_for("of 50.0 GB")
    child.type("\x03")
    assert child.exit_code() == 130
    assert "cancelled" in child.raw and "Traceback" not in child.raw


def test_ctrl_c_on_a_typed_line_clears_it(screen):
    child = screen()
    child.wait_for(">>>")
    child.type("half a tho")
    child.wait_for("half a tho")
    child.type("\x03")
    assert "user: seen\r\n" in child.answer("seen")


def test_a_question_stopped_before_the_first_word_can_be_asked_again(screen):
    child = screen()
    child.wait_for(">>>")
    for line in ("stuck", "/regen"):
        child.type(f"{line}\r")
        child.wait_for("stuck at work")
        child.type("\x03")
        child.wait_for("stopped; the conversation goes on")
        assert "0 tokens" in (line := child.wait_for(" moved")) and "first token" not in line
        child.wait_for(">>>")
    assert "user: seen\r\n" in child.answer("seen")  # the unanswered question is not there


def test_lines_are_remembered_in_a_file_of_the_owner_only(screen, tmp_path):
    child = screen()
    child.wait_for(">>>")
    child.answer("first of all")
    child.type("\x04")
    assert child.exit_code() == 0
    assert (tmp_path / "history").stat().st_mode & 0o777 == 0o600
    child = screen()
    child.wait_for(">>>")
    child.type("\x1b[A")  # arrow up
    child.wait_for("first of all")
    assert "You said: first of all" in child.answer("")


def test_text_of_several_lines(screen):
    child = screen()
    child.wait_for(">>>")
    child.type('"""one\r')
    child.wait_for("...")
    child.type("two\r")
    child.wait_for("...")
    assert "You said: one\r\ntwo\r\nthree" in child.answer('three"""')
    assert "You said: a\r\nb" in child.answer("a\x1b\rb")  # Alt-Enter


def test_without_prompt_toolkit_lines_are_read_plainly_and_this_is_said(screen):
    child = screen(FAKE_NO_EDITOR="1")
    assert "line editing is off: " in child.wait_for(">>>")
    assert "You said: hello" in child.answer("hello")
    child.type("\x04")
    assert child.exit_code() == 0


def test_an_error_in_a_turn_is_one_line_and_the_talk_goes_on(screen):
    child = screen()
    child.wait_for(">>>")
    child.type("bad\r")
    child.wait_for("raise --ctx-size\r\n")
    child.wait_for(">>>")
    assert "user: seen\r\n" in child.answer("seen")
    assert "Traceback" not in child.raw


def test_no_color_shows_no_dim_text(screen):
    child = screen(NO_COLOR="1")
    child.wait_for(">>>")
    child.answer("hello")
    assert "\x1b[2m" not in child.raw


def test_forty_columns_hold_every_remark(screen):
    child = screen(columns=40)
    shown = child.wait_for(">>>") + child.answer("hello")
    assert max(len(line) for line in re.split(r"[\r\n]+", shown)) <= 40


def test_a_model_cannot_drive_the_terminal(screen):
    child = screen()
    child.wait_for(">>>")
    child.answer("control")
    assert "a[2Jbc1m\td" in child.raw


# In a pipe


def test_a_pipe_gets_the_answers_and_nothing_else(tmp_path):
    done = chat("hello\n\nseen\n/bye\nnever\n", tmp_path)
    assert done.returncode == 0
    assert done.stdout.decode() == (
        "You said: hello\nuser: hello; assistant: You said: hello; user: seen\n"
    )
    remarks = done.stderr.decode()
    assert remarks.startswith("mix, no draft\n128 of 256 slots")
    assert ">>>" not in remarks and "\x1b" not in remarks


def test_kind_e_o11_the_mark_that_some_editors_write_is_no_text(tmp_path):
    done = chat("\ufeffhello\n", tmp_path)
    assert done.returncode == 0 and done.stdout.decode() == "You said: hello\n"


def test_an_error_in_a_pipe_ends_with_its_exit_code(tmp_path):
    done = chat("bad\nhello\n", tmp_path)
    assert done.returncode == CapacityError.exit_code
    assert done.stdout == b""
    assert done.stderr.decode().splitlines()[-1].startswith("spmoe-lite: prompt of 600 tokens")


def test_an_encoding_that_lacks_the_characters_gets_replacements(tmp_path):
    done = chat("unicode\n", tmp_path, PYTHONIOENCODING="cp1252", PYTHONUTF8="0")
    assert done.returncode == 0
    assert done.stdout.decode("cp1252") == "snow ? und ?? é" + os.linesep


def test_bytes_that_are_no_text_are_not_fatal(tmp_path):
    done = subprocess.run(
        [*FAKE, "chat", "mix"],
        input=b"caf\xe9\n",
        capture_output=True,
        timeout=100,
        env=environment(tmp_path),
    )
    assert (done.returncode, done.stdout.decode()) == (0, "You said: caf\ufffd\n")


@pytest.mark.skipif(os.name == "nt", reason="closes descriptors the POSIX way")
@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_missing_stream_is_no_crash(tmp_path, closed):
    """A program started without stdin, stdout or stderr has None there."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}>&-', *FAKE, "chat", "mix"],
        input=b"" if closed == 0 else b"hello\n",
        capture_output=True,
        timeout=100,
        env=environment(tmp_path),
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr


# Command by command


@pytest.fixture
def repl():
    return Repl(Engine(), "mix", seed=7)


def test_a_talk_that_no_longer_fits_names_clear(repl):
    """Nobody can shorten a prompt that is mostly what was said before."""
    with pytest.raises(CapacityError, match="raise --ctx-size$"):
        repl.say("bad")
    repl.say("hello")
    with pytest.raises(CapacityError, match="raise --ctx-size, or type /clear to start over$"):
        repl.say("bad")
    assert [m["role"] for m in repl.messages] == ["user", "assistant"]


def test_every_answer_of_an_unseeded_talk_has_its_own_seed():
    repl = Repl(Engine(), "mix")
    repl.say("a")
    repl.say("b")
    seeds = [given["sampling"].seed for _, given in repl.engine.asked]
    assert seeds[0] != seeds[1]


def test_regen_asks_the_last_question_with_another_seed(repl, capsys):
    repl.say("hello")
    repl.handle("/regen")
    assert [asked for asked, _ in repl.engine.asked] == [[{"role": "user", "content": "hello"}]] * 2
    assert [given["sampling"].seed for _, given in repl.engine.asked] == [7, 8]
    assert len(repl.messages) == 2
    repl.handle("/set Temp 0")
    repl.handle("/retry")
    assert "temperature 0 gives the same answer" in capsys.readouterr().err


def test_regen_before_a_question_is_refused(repl):
    with pytest.raises(UsageError, match="nothing to answer"):
        repl.handle("/regen")


def test_a_failed_turn_leaves_the_conversation_as_it_was(repl):
    repl.say("hello")
    before = list(repl.messages)
    for text in ("bad", "crash"):
        with pytest.raises((CapacityError, KeyError)):
            repl.say(text)
        assert repl.messages == before


def test_clear_forgets_and_keeps_the_system_prompt(repl):
    repl.handle("/system You are brief.")
    repl.say("hello")
    repl.handle("/clear")
    repl.say("seen")
    assert repl.engine.asked[-1][0] == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "seen"},
    ]
    repl.handle("/system -")
    repl.say("seen")
    assert repl.engine.asked[-1][0][0]["role"] == "user"


def test_regen_after_the_last_seed_takes_the_first(repl):
    repl.handle("/set seed 9223372036854775807")
    repl.say("hello")
    repl.handle("/regen")
    assert [given["sampling"].seed for _, given in repl.engine.asked] == [2**63 - 1, 0]


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="no such device here")
def test_a_conversation_without_end_is_not_read_to_it(repl, monkeypatch):
    monkeypatch.setattr(repl_module, "MAX_SAVED_BYTES", 1000)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: pytest.fail("all of it is asked for"))
    with pytest.raises(DamagedError, match="/dev/zero is not a saved conversation: larger than"):
        repl.handle("/load /dev/zero")


@pytest.mark.parametrize(
    "typed, field, value",
    [
        ("temp 0.5", "temperature", 0.5),
        ("temperature 0", "temperature", 0.0),
        ("top-k 40", "top_k", 40),
        ("top_p 0.9", "top_p", 0.9),
        ("repeat-penalty 1.1", "repetition_penalty", 1.1),
        ("seed 3", "seed", 3),
    ],
)
def test_set_changes_what_the_next_answer_is_sampled_with(repl, typed, field, value):
    repl.handle(f"/set {typed}")
    repl.say("hello")
    assert getattr(repl.engine.asked[-1][1]["sampling"], field) == value


def test_set_limits_and_stop_strings(repl, capsys):
    repl.handle("/set max-tokens 2")
    repl.handle(r'/set stop "a\nb"')
    repl.say("hello")
    given = repl.engine.asked[-1][1]
    assert (given["max_tokens"], given["stop"]) == (2, ("a\nb",))
    shown = capsys.readouterr()
    assert shown.out == "You said: \n"
    assert "cut at 2 tokens" in shown.err
    repl.handle("/set max-tokens 1")
    repl.say("hello")
    assert "cut at 1 token (" in capsys.readouterr().err
    repl.handle("/set stop -")
    repl.handle("/set max-tokens 0")
    assert (repl.stop, repl.max_tokens) == ((), None)


def test_set_says_what_is_now_in_force(repl, capsys):
    for typed in ("seed 7", "seed -1", "max-tokens 0", "temperature .50"):
        repl.handle(f"/set {typed}")
    assert capsys.readouterr().err.split("\n")[:4] == [
        "seed 7",
        "seed random",
        "max-tokens none",
        "temp 0.5",
    ]


@pytest.mark.parametrize(
    "typed, reason",
    [
        ("/set temp hot", "takes a number"),
        ("/set top-k 1.5", "takes a whole number"),
        ("/set colour red", "nothing called 'colour'"),
        ("/set temp -1", "temperature"),
        ("/set seed -2", "seed -2: 0 to 9223372036854775807, or -1"),
        ("/set seed 9223372036854775808", "seed 9223372036854775808: 0 to"),
        ("/frobnicate", "/help lists them"),
        ("/save", "takes a file name"),
        ("/load", "takes a file name"),
    ],
)
def test_a_wrong_command_says_what_is_right(repl, typed, reason):
    with pytest.raises(SpmoeError, match=reason):
        repl.handle(typed)
    assert repl.engine.asked == []


@pytest.mark.parametrize(
    "text", ["/etc/hosts is a file", " /exit", "/ is a slash", "// c", "/a\nb"]
)
def test_text_that_starts_with_a_slash_is_still_text(repl, text):
    repl.handle(text)
    assert repl.engine.asked[-1][0][-1]["content"] == text


def test_help_names_every_command(repl, capsys):
    repl.handle("/help")
    shown = capsys.readouterr().out
    for name in "help clear regen system set show stats save load exit".split():
        assert f"/{name}" in shown


def test_show_and_stats_say_what_runs(repl, capsys):
    repl.handle("/show")
    repl.handle("/stats")
    shown = capsys.readouterr().out
    assert "128 of 256 slots" in shown and "512 tokens" in shown and "12,345" in shown


def test_save_and_load_bring_a_conversation_back(repl, tmp_path):
    path = tmp_path / "talk é.json"
    repl.handle("/system Be brief.")
    repl.say("snow ☃")
    repl.handle(f"/save {path}")
    repl.handle(f"/save {path}")  # our own file may be written again
    other = Repl(Engine(), "mix")
    other.handle(f'/load "{path}"')
    assert (other.messages, other.system) == (repl.messages, "Be brief.")
    other.handle("/regen")
    assert other.engine.asked[-1][0][-1]["content"] == "snow ☃"
    assert os.listdir(tmp_path) == [path.name]


def test_save_never_overwrites_another_file(repl, tmp_path):
    path = tmp_path / "thesis.txt"
    path.write_text("years of work", encoding="utf-8")
    with pytest.raises(UsageError, match="is not a saved conversation"):
        repl.handle(f"/save {path}")
    assert path.read_text(encoding="utf-8") == "years of work"


@pytest.mark.skipif(os.name == "nt", reason="links need a right there")
def test_save_through_a_link_keeps_it_and_to_a_circle_of_links_is_one_line(repl, tmp_path):
    link, circle = tmp_path / "link.json", tmp_path / "circle.json"
    link.symlink_to(tmp_path / "talk.json")
    circle.symlink_to(circle)
    repl.handle(f"/save {link}")
    with pytest.raises(SpmoeError, match=r"cannot write .*circle.json \(Too many levels"):
        repl.handle(f"/save {circle}")
    assert link.is_symlink() and circle.is_symlink()
    assert sorted(os.listdir(tmp_path)) == ["circle.json", "link.json", "talk.json"]


def test_a_missing_file_to_load_is_not_found(repl, tmp_path):
    with pytest.raises(NotFoundError):
        repl.handle(f"/load {tmp_path / 'no.json'}")
    with pytest.raises(SpmoeError, match="cannot read"):
        repl.handle(f"/load {tmp_path}")
    with pytest.raises(NotFoundError):
        repl.handle("/load ~no-such-user/talk.json")
    with pytest.raises(UsageError, match="takes a file name"):
        repl.handle("/save a\0b")


@pytest.mark.parametrize(
    "saved",
    [
        "no json",
        "[" * 100_000,
        "[]",
        {"messages": []},
        {"spmoe-lite conversation": 1},
        {"spmoe-lite conversation": 1, "messages": [{"role": "user", "content": "a"}]},
        {"spmoe-lite conversation": 1, "messages": [{"role": "tool", "content": "a"}] * 2},
        {"spmoe-lite conversation": 1, "messages": [{"role": "user", "content": 1}] * 2},
        {"spmoe-lite conversation": 1, "messages": [], "system": 3},
    ],
)
def test_what_is_not_a_conversation_is_not_loaded(repl, tmp_path, saved):
    path = tmp_path / "talk.json"
    path.write_text(saved if isinstance(saved, str) else json.dumps(saved), encoding="utf-8")
    repl.say("hello")
    before = list(repl.messages)
    with pytest.raises(DamagedError):
        repl.handle(f"/load {path}")
    assert repl.messages == before
