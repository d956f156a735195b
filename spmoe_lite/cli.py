"""The command line: parses, prints, and turns errors into exit codes. All work is library functions.

Every heavy import stands inside the command that needs it, so `--help` costs little more than click.
Options read `SPMOE_` + their first long name from the environment (`SPMOE_DRAFT`, `SPMOE_CTX_SIZE`).
Answers and asked-for output go to stdout; progress, remarks and errors to stderr. An error is one line;
`--debug` adds the traceback.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from spmoe_lite import cli_measure, cli_packs, cli_talk, terminal
from spmoe_lite.cli_options import NAME, PROGRAM, debug_option
from spmoe_lite.cli_shared import source_of
from spmoe_lite.errors import CapacityError, NotFoundError, SpmoeError, is_out_of_memory

SPIN_COUNT = "2000"  # turns of waiting threads before they sleep


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code; the one place where an error becomes a line.

    torch's threads wait by spinning. The command cuts that short, unless the user says otherwise: beside
    another busy program long spinning is many times slower (docs/log.md). The library leaves this to its host.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
    sys.exit(run_command(list(sys.argv[1:] if args is None else args)))


def run_command(args: list[str]) -> int:
    """The exit code of one command; the one place where an error becomes a line."""
    state = {"debug": False}
    terminal.make_streams_safe()
    try:
        _check_folder()
        code = cli.main(args, prog_name=PROGRAM, standalone_mode=False, obj=state)
        return code if isinstance(code, int) else 0
    except SystemExit as stop:  # click's answer to a closed pipe, and to shell completion
        return stop.code if isinstance(stop.code, int) else 1
    except (KeyboardInterrupt, click.Abort):
        terminal.remark("interrupted")
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        ctx = getattr(error, "ctx", None)
        command = ctx.command_path if ctx else PROGRAM
        message = f"{error.format_message():.400}".rstrip(".") + _from_variable(error)
        return _fail(f"{message}; see {command} --help", error.exit_code, state)
    except SpmoeError as error:
        return _fail(str(error), error.exit_code, state)
    except BaseException as error:  # a library's panic is not an Exception
        if not is_out_of_memory(error):
            return _fail_unforeseen(error, state)
        if state["debug"]:
            _trace()
    # Behind the handler, where what was under way is let go of: a line needs memory, too.
    text = "out of memory; end other programs, or raise this one's limit (ulimit -v)"
    return _fail(text, CapacityError.exit_code, {"debug": False})


def _fail_unforeseen(error: BaseException, state: dict[str, bool]) -> int:
    """An error of the system where the library does not expect one, or of stdout; else a bug."""
    if isinstance(error, OSError):
        from spmoe_lite.files import disk_error

        named = disk_error(
            error, error.filename or "the output", "use" if error.filename else "write"
        )
        return _fail(str(named), named.exit_code, state)
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    return _fail(f"{what} (this is a bug in {NAME}; --debug shows where)", 1, state)


def _check_folder() -> None:
    """Where the working folder is gone, torch ends the process as it loads its own libraries."""
    try:
        os.getcwd()
    except OSError:
        raise NotFoundError("the folder this runs in is gone: cd to one that exists") from None


def _trace() -> None:
    import traceback

    terminal.remark(traceback.format_exc())


def _fail(message: str, code: int, state: dict[str, bool]) -> int:
    if state["debug"]:
        _trace()
    hint = re.sub(
        rf"\b{NAME} (?={'|'.join(cli.commands)})", f"{PROGRAM} ", " ".join(message.split())
    )
    terminal.remark(f"{NAME}: {terminal.printable(hint)}")
    return code


def _from_variable(error: click.ClickException) -> str:
    """Where a refused value came from, if it was not typed."""
    ctx, option = getattr(error, "ctx", None), getattr(error, "param", None)
    if ctx is None or option is None or source_of(ctx, option.name) != "ENVIRONMENT":
        return ""
    return f" (in {option.envvar or f'{ctx.auto_envvar_prefix}_{option.name.upper()}'})"


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """One line each: ours, torch, triton, device, pack format."""
    if not value or ctx.resilient_parsing:
        return
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from spmoe_lite import __version__
    from spmoe_lite.manifest import FORMAT

    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "not installed"
    cuda = torch.cuda.is_available()
    rows = [
        [NAME, __version__],
        ["torch", torch.__version__],
        ["triton", triton],
        ["device", torch.cuda.get_device_name() if cuda else "cpu"],
        ["pack format", str(FORMAT)],
    ]
    click.echo(terminal.table(rows))
    ctx.exit()


class Commands(click.Group):
    """The commands in the order in which a newcomer meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=Commands,
    context_settings={"auto_envvar_prefix": "SPMOE", "help_option_names": ["-h", "--help"]},
)
@click.option(
    "--version",
    allow_from_autoenv=False,
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Versions of this program, torch, triton; device; pack format.",
)
@debug_option
def cli() -> None:
    """Run Mixture-of-Experts models that do not fit into VRAM.

    Experts are paged through a slab of device memory. A draft model writes ahead, and its guesses say
    which experts to fetch; the target verifies, so the text is exactly the target's.

    Packs live in the user data folder; SPMOE_HOME moves it. Every option can be set in the environment
    as SPMOE_ and its first long name: SPMOE_DRAFT, SPMOE_CTX_SIZE. --json and --policy of bench, --policy of
    replay cannot: other commands mean something else by these names.

    Exit codes: 0 fine, 1 error, 2 usage, 3 not found, 4 does not fit, 5 not supported, 6 damaged file,
    7 network, 8 busy, 130 interrupted.
    """


for _command in (
    cli_talk.demo,
    cli_talk.chat,
    cli_talk.run,
    cli_packs.convert,
    cli_packs.list_packs,
    cli_packs.rm,
    cli_packs.inspect,
    cli_packs.verify,
    cli_packs.repack,
    cli_measure.plan,
    cli_measure.profile,
    cli_measure.bench_packs,
    cli_measure.tune,
    cli_measure.replay_trace,
):
    cli.add_command(_command)
