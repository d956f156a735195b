"""Running huggingface-hub's calls: to be cancelled, quiet, counted, and with its errors turned into ours.

They run on a thread of their own, so that `cancel` is answered at once even while a transfer stalls.
Xet transfers swallow an exception raised by the progress bar, so a cancelled one is ended through
`abort_xet_session`, as Ctrl-C does inside that library (huggingface_hub issue 4632).
"""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from spmoe_lite.errors import CapacityError, NetworkError, NotFoundError, SpmoeError
from spmoe_lite.files import DISK_FULL
from spmoe_lite.progress import OnProgress, Progress, check

log = logging.getLogger("spmoe_lite")

T = TypeVar("T")


class Broken(Exception):
    """A transfer that had begun and broke off; worth starting again."""


class Meter:
    """Counts the bytes of one transfer of `size` bytes, and ends it from within when asked to stop."""

    def __init__(self, size: int, on_progress: OnProgress | None) -> None:
        self.size = size
        self.on_progress = on_progress
        self.began = False  # the header of the answer is here
        self.stop = False
        self.done = 0
        self._reported = -1

    def report(self) -> None:
        """Tell `on_progress`, on the caller's thread, if there is news."""
        done = min(self.done, self.size)
        if self.on_progress is not None and done != self._reported:
            self.on_progress(Progress("download", done, self.size, "bytes"))
            self._reported = done

    def finish(self) -> None:
        self.done = self.size
        self.report()

    def bar_class(self) -> type:
        """A class that the hub library takes for tqdm's. Only http_get and the Xet reporter use it."""
        meter = self

        class Bar:
            def __init__(self, **options: Any) -> None:
                meter.began = True
                meter.done = 0
                self.total = options.get("total")
                self.n = 0
                self.received = 0

            def __enter__(self) -> Bar:
                return self

            def __exit__(self, *raised: object) -> None:
                pass

            def update(self, count: int) -> None:
                """Bytes written to the file."""
                self.n += count
                self._count()

            def update_transfer(self, count: int) -> None:
                """Bytes received: with Xet many times a second, where `update` comes in jumps."""
                self.received += count
                self._count()

            def _count(self) -> None:
                meter.done = max(self.n, self.received)
                if meter.stop:
                    raise Broken("stopped")

            def ignore(self, *args: object, **options: object) -> None:
                pass

            close = refresh = set_description = set_postfix_str = ignore
            set_transfer_postfix_str = ignore

        return Bar


class _Quiet(logging.Filter):
    """Takes what the hub library logs on one thread off its handlers (stderr) and into our log."""

    def __init__(self, thread: int) -> None:
        super().__init__()
        self.thread = thread

    def filter(self, record: logging.LogRecord) -> bool:
        if record.thread != self.thread:
            return True
        log.debug("%s", _redact(record.getMessage()))
        return False


def on_thread(
    task: Callable[[], T],
    explain: Callable[[BaseException], Exception],
    cancel: threading.Event | None,
    meter: Meter | None = None,
) -> T:
    """Run `task` on a thread; watch `cancel` and report on this one. Raise what `explain` makes of its error.

    Cancelled (or Ctrl-C here) is raised within a second. A transfer ends at its next chunk; one that
    waits for a dead connection ends at the hub library's own time limit, and holds nothing of ours.
    """
    value: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        quiet = _Quiet(threading.get_ident())
        handlers = list(logging.getLogger("huggingface_hub").handlers)
        for handler in handlers:
            handler.addFilter(quiet)
        try:
            value.append(task())
        except BaseException as error:  # handed to the caller's thread
            error.__traceback__ = None  # its frames hold request headers
            errors.append(error)
        finally:
            for handler in handlers:
                handler.removeFilter(quiet)

    check(cancel)
    thread = threading.Thread(target=work, name="spmoe-hub", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.05)
            check(cancel)
            if meter is not None:
                meter.report()
    except BaseException:
        if meter is not None:
            meter.stop = True
            thread.join(0.5)
            if thread.is_alive():
                _abort_xet()
                thread.join(0.5)
        raise
    if errors:
        raise explain(errors[0])
    return value[0]


def _abort_xet() -> None:
    if "hf_xet" not in sys.modules:
        return
    try:
        from huggingface_hub.utils._xet import abort_xet_session
    except ImportError:  # not public: a later release may have moved it
        log.warning("a cancelled Xet transfer goes on in the background until its file is complete")
        return
    abort_xet_session()  # type: ignore[no-untyped-call]


# -- errors


def endpoint() -> str:
    """The address of the hub (HF_ENDPOINT)."""
    from huggingface_hub import constants

    return constants.ENDPOINT


def _redact(text: str) -> str:
    """Without tokens and without the signatures in redirect addresses."""
    text = re.sub(r"hf_\w+|(?i:bearer)\s+[^\s'\"]+", "[token]", text)
    return re.sub(r"\?[^\s'\"]+", "", text)


def one_line(error: BaseException) -> str:
    """What an error says, on one line of at most 160 characters and without tokens; else its type."""
    from huggingface_hub import get_token

    text = " ".join(str(error).split())
    text = _redact(text.replace(get_token() or "\0", "[token]"))[:160]
    return text or type(error).__name__


def guarded(task: Callable[[], T], repo_id: str) -> T:
    """Run `task`, which only reads the cache; an id that the hub library refuses is NotFoundError."""
    try:
        return task()
    except ValueError as error:
        reason = one_line(error)
    raise NotFoundError(f"'{repo_id}' is not a hub id ({reason})")


def is_transport(error: BaseException) -> bool:
    """Whether a transfer failed for a reason that may pass: connection, time limit, short answer."""
    from huggingface_hub.errors import HfHubHTTPError

    if isinstance(error, HfHubHTTPError):
        return error.response.status_code >= 500
    if isinstance(error, OSError):
        return error.errno is None  # the hub library's consistency check; a disk error has a number
    return type(error).__module__.partition(".")[0] in ("httpx", "httpx2", "httpcore", "httpcore2")


def explain(error: BaseException, repo_id: str, revision: str, hint: str) -> SpmoeError:
    """One line for whatever the hub library raised; never its text where that could hold a token.

    hint: what follows the name of a repository that does not exist, such as " (did you mean ...?)", or "".
    """
    from huggingface_hub import constants, errors, get_token

    if isinstance(error, SpmoeError):
        return error
    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        return explain(error.__cause__, repo_id, revision, hint)
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else None
    text = str(error)
    if isinstance(error, UnicodeError) or "header value" in text:
        return NetworkError("the hub token holds characters that no token has; run `hf auth login`")
    if isinstance(error, errors.OfflineModeIsEnabled):
        return NetworkError(
            f"{repo_id} is not in the hub cache and HF_HUB_OFFLINE is set; unset it"
        )
    if isinstance(error, errors.DisabledRepoError):
        return NetworkError(f"{repo_id} was disabled by its owner or the hub; choose another model")
    if status == 401 and "credentials" in text.lower():
        return NetworkError(
            "the hub does not know your token; run `hf auth login`, or unset HF_TOKEN for public models"
        )
    if isinstance(error, errors.GatedRepoError) or status == 403:
        page = f"{endpoint()}/{repo_id}"
        then = (
            "then run the command again; a fine-grained token also needs leave to read gated models"
        )
        if get_token() is None:
            then = "then run `hf auth login` (or set HF_TOKEN) and the command again"
        return NetworkError(f"{repo_id} is gated: accept its terms at {page}, {then}")
    if isinstance(error, errors.RevisionNotFoundError):
        return NotFoundError(
            f"{repo_id} has no revision '{revision}'; type {repo_id}@main for its newest"
        )
    if isinstance(error, errors.EntryNotFoundError):
        return NotFoundError(f"a file of {repo_id}@{revision[:12]} is gone from the hub; try again")
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        return NotFoundError(
            f"no folder and no model {repo_id} on the hub{hint}; "
            f"if it is private, run `hf auth login` first"
        )
    if status == 429:
        wait = error.response.headers.get("retry-after", "")  # type: ignore[attr-defined]
        when = f"in {wait} seconds" if wait.isdigit() else "in some minutes"
        return NetworkError(
            f"the hub limits your requests; try again {when}, `hf auth login` allows more"
        )
    if status is not None:
        return NetworkError(f"{endpoint()} answers {status} for {repo_id}; try again later")
    if isinstance(error, errors.HFValidationError):
        return NotFoundError(f"'{repo_id}@{revision}' is not a hub id; write ORG/NAME")
    cache = Path(constants.HF_HUB_CACHE)
    if isinstance(error, OSError) and error.errno in DISK_FULL:
        return CapacityError(
            f"no space left for {repo_id} in {cache}; free some or set HF_HUB_CACHE"
        )
    if isinstance(error, OSError) and error.errno is not None:
        reason = os.strerror(error.errno)
        return SpmoeError(f"cannot write to the hub cache {cache} ({reason}); set HF_HUB_CACHE")
    if is_transport(error):
        return NetworkError(
            f"cannot reach {endpoint()} ({one_line(error)}); check the connection, "
            f"HTTPS_PROXY and HF_ENDPOINT, or use --offline with what is cached"
        )
    if isinstance(error, (ValueError, KeyError, TypeError)):
        return NetworkError(
            f"{endpoint()} does not answer like the hub for {repo_id}; check HF_ENDPOINT"
        )
    return NetworkError(
        f"the download of {repo_id} failed ({one_line(error)}); run the command again"
    )
