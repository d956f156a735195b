"""The folder of packs: where they live, finding one, listing, looking inside, checking, deleting.

Packs are `NAME.spmoe` in `home()`; one that is not finished is `NAME.spmoe.partial`. A pack
elsewhere is named by its path. Listing reads manifests only and needs no torch. The file
`used.json` in `home()` remembers when a pack was last talked to, for `chat` without a name;
nothing depends on it being there.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

from spmoe_lite import manifest as m
from spmoe_lite.errors import NotFoundError, SpmoeError, UnsupportedError, UsageError
from spmoe_lite.files import PARTIAL, disk_error, locked, naming, open_confined
from spmoe_lite.progress import OnProgress, check_callers

USED = "used.json"
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)  # of Windows
NEVER_BY_DEFAULT = ("demo",)  # packs that `chat` takes only when asked

log = logging.getLogger("spmoe_lite")


@dataclass(frozen=True, slots=True)
class PackInfo:
    """One line of `spmoe-lite list`."""

    name: str
    path: Path
    size_bytes: int
    modified: float  # seconds since 1970
    complete: bool  # False: an unfinished conversion, or a manifest that does not hold
    moe: bool
    family: str  # "" where the manifest does not say


def home(chosen: str | Path | None = None) -> Path:
    """The folder of packs: `chosen`, else `SPMOE_HOME`, else the user's data folder.

    It may not exist yet. Raises `UsageError` where the system does not say whose home is meant.
    """
    if not isinstance(chosen, (str, os.PathLike, NoneType)):
        raise UsageError(f"home {chosen!r:.80}: the path of a folder, or None for the usual one")
    chosen = chosen or os.environ.get("SPMOE_HOME")
    try:
        if chosen:
            return Path(chosen).expanduser()
        import platformdirs

        return platformdirs.user_data_path("spmoe-lite", appauthor=False)
    except RuntimeError as error:  # ~nobody, or no HOME for a user without an entry
        raise UsageError(
            f"no home folder for {chosen or 'packs'}; set SPMOE_HOME to the full path of a folder"
        ) from error


_home = home  # where a parameter has the name


def find(name_or_path: str | Path, home: str | Path | None = None) -> Path:
    """The folder of a finished pack, by path first and then by name; its manifest is there, unread.

    Raises `NotFoundError` with the command that would make it: a known model that was not
    converted, a conversion that was not finished.
    """
    given = _path(name_or_path)
    if os.path.isfile(given / m.MANIFEST) and not given.name.endswith(PARTIAL):
        return given
    folder, name = _home(home), str(name_or_path).removesuffix(m.SUFFIX)
    if _is_name(name):
        path = folder / (name + m.SUFFIX)
        m.restore_old(path)
        if os.path.isfile(path / m.MANIFEST):
            return path
        if os.path.isdir(_beside(path, PARTIAL)):
            raise NotFoundError(f"{name} is not finished; run the same convert again to go on")
        if os.path.lexists(path):
            raise NotFoundError(_no_manifest(path, f"type: spmoe-lite rm {name},"))
    if given.name.endswith(m.SUFFIX) and os.path.isdir(given):
        raise NotFoundError(_no_manifest(given, "delete it"))
    if os.path.exists(given):
        raise NotFoundError(f"{given} is not a pack; type: spmoe-lite convert {given}")
    if not _is_name(name):
        raise NotFoundError(f"no pack at {_shown(str(given))}")
    raise NotFoundError(_how_to_get(name, folder))


def _path(name: str | Path) -> Path:
    """The path as it was given, but one that ends in a name: `.` inside a pack is that pack."""
    if isinstance(name, str) and not name:
        raise NotFoundError(
            "the name of the pack is empty; `spmoe-lite list` shows which there are"
        )
    try:
        path = Path(name)
    except TypeError:
        raise UsageError(f"{name!r:.80} is no name of a pack") from None
    if len(path.parts) > 1:  # a name may begin with any letter
        path = Path(os.path.expanduser(path))
    return path if path.name not in ("", "..") else Path(os.path.abspath(path))


def _no_manifest(path: Path, remedy: str) -> str:
    return (
        f"{path} has no {m.MANIFEST} that can be read, so it is no whole pack; check "
        f"permissions, or {remedy} and convert again"
    )


def _how_to_get(name: str, folder: Path) -> str:
    from spmoe_lite.hub import SHORT_NAMES

    if name.lower() in SHORT_NAMES:
        return f"{name} is known but not converted; type: spmoe-lite convert {name.lower()}"
    there = [info.name for info in packs(folder) if info.complete]
    listed = f"; there are {', '.join(there[:8])}" if there else ""
    return f"no pack named {name:.200} in {folder}{listed}"


def packs(home: str | Path | None = None) -> list[PackInfo]:
    """Every pack and unfinished conversion in `home`, by name; damaged ones count as unfinished."""
    folder = _home(home)
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise disk_error(error, folder, "read") from error
    for path in entries:
        if path.name.endswith(m.SUFFIX + m.OLD):
            with contextlib.suppress(SpmoeError):  # a folder that cannot be written is still listed
                m.restore_old(path.with_name(path.name.removesuffix(m.OLD)))
    found = {path for path in folder.glob("*") if _ending(path) is not None and path.is_dir()}
    infos = []
    for path in sorted(found):
        with contextlib.suppress(FileNotFoundError):  # it has just been deleted, or renamed
            infos.append(_info(path))
    return infos


def _info(path: Path) -> PackInfo:
    ending = _ending(path)
    assert ending is not None
    complete, moe, family = False, False, ""
    try:
        if ending == m.SUFFIX:
            config = m.read_manifest(path).config
            complete, moe, family = True, config.is_moe, config.family
        else:
            model = m.read_journal(path).get("head", {}).get("model", {})
            moe, family = bool(model.get("num_local_experts")), str(model.get("family", ""))
    except (SpmoeError, AttributeError):
        log.debug("%s has no readable manifest", path)
    size, modified = _size_and_date(path)
    return PackInfo(path.name.removesuffix(ending), path, size, modified, complete, moe, family)


def _size_and_date(path: Path) -> tuple[int, float]:
    """Bytes of all files below `path` (links count as links), and the newest of their dates."""
    size, newest = 0, 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):  # a file that has just gone
                status = os.lstat(os.path.join(folder, name))
                size, newest = size + status.st_size, max(newest, status.st_mtime)
    return size, newest or path.stat().st_mtime


def remove(name: str | Path, home: str | Path | None = None) -> None:
    """Delete a pack by name or path, its unfinished conversion too.

    Raises what `removable` does, and `BusyError` while a conversion is writing it.
    """
    found = removable(name, home)
    for path in found:  # before anything goes
        if path.name.endswith(PARTIAL):
            with locked(path):
                pass
    for path in found:
        with naming(path, "delete"):
            if not os.path.isdir(path / m.MANIFEST):  # not a file, in a damaged pack
                (path / m.MANIFEST).unlink(missing_ok=True)  # half deleted is not a pack
            shutil.rmtree(path)


def removable(name: str | Path, home: str | Path | None = None) -> list[Path]:
    """The folders that `remove` would delete: a pack, its unfinished conversion.

    Raises `NotFoundError` if there is neither, `UsageError` for a folder that is not a pack.
    """
    folder, plain = _home(home), str(name).removesuffix(m.SUFFIX)
    if _is_name(plain):
        path = folder / (plain + m.SUFFIX)
        found = [path, _beside(path, PARTIAL), _beside(path, m.OLD)]
        found = [path for path in found if os.path.lexists(path)]
        if found:
            return [_checked(path) for path in found]
    path = _path(name)
    if not os.path.lexists(path):
        raise NotFoundError(f"no pack {_shown(str(name))} in {folder}, and no such folder")
    if os.path.isfile(path / m.MANIFEST):
        m.read_manifest(path)  # somebody else's manifest.json is refused here
    elif not os.path.isfile(path / m.JOURNAL):
        raise UsageError(f"{path} is not a pack; nothing was deleted")
    partial = _beside(path, PARTIAL)
    return [_checked(path), *([_checked(partial)] if os.path.isdir(partial) else [])]


def _checked(path: Path) -> Path:
    if path.is_symlink() or not path.is_dir():
        raise UsageError(f"{path} is not a folder of its own; delete it by hand")
    return path


def inspect(pack: str | Path, home: str | Path | None = None) -> dict[str, Any]:
    """What is inside a pack, as plain JSON values; reads the manifest, not the tensors."""
    path = find(pack, home)
    manifest = m.read_manifest(path)
    config, layout = manifest.config, manifest.layout
    dense = sum(size for name, (size, _) in manifest.files.items() if name == m.DENSE)
    expert_files = sum(
        size for name, (size, _) in manifest.files.items() if name.startswith(m.EXPERTS)
    )
    per_layer = config.num_local_experts
    return {
        "name": path.name.removesuffix(m.SUFFIX),
        "path": str(path),
        "format": manifest.format,
        "created": manifest.raw.get("created"),
        "source": manifest.raw["source"],
        "options": manifest.raw["options"],
        "family": config.family,
        "layers": config.num_hidden_layers,
        "experts": config.num_hidden_layers * per_layer,
        "experts_per_layer": per_layer,
        "experts_per_token": config.num_experts_per_tok,
        "dense_dtype": manifest.dtypes.dense,
        "linear_dtype": manifest.dtypes.linear,
        "embed_dtype": manifest.dtypes.embed,
        "expert_dtype": manifest.dtypes.experts,
        "expert_bytes": layout.stride if layout else 0,
        "dense_file_bytes": dense,
        "expert_files_bytes": expert_files,
        "total_bytes": sum(size for size, _ in manifest.files.values()),
        "num_tokens": manifest.num_tokens,
        "audit": manifest.raw["audit"],
        "model": config.to_dict(),
        "files": {name: size for name, (size, _) in manifest.files.items()},
    }


def verify(
    pack: str | Path,
    on_progress: OnProgress | None = None,
    cancel: threading.Event | None = None,
    home: str | Path | None = None,
) -> None:
    """Check sizes, headers and every hash of a pack; `DamagedError` names the first bad file."""
    from spmoe_lite.pack import Pack

    check_callers(cancel, on_progress=on_progress)
    with Pack.open(find(pack, home)) as opened:
        opened.verify(on_progress, cancel)


# The pack used last


def touch_used(path: Path, home: str | Path | None = None) -> None:
    """Remember that `path` is in use now. Where the home cannot be written, nothing is
    remembered.
    """
    folder = _home(home)
    used = _used(folder) | {str(Path(path).resolve()): time.time()}
    temporary = folder / f"{USED}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(used, indent=1), encoding="utf-8")
        os.replace(temporary, folder / USED)
    except OSError as error:
        log.debug("cannot remember the pack used last: %s", str(error))
        with contextlib.suppress(OSError):
            temporary.unlink()


def _used(folder: Path) -> dict[str, float]:
    """Resolved path, which may hold bytes that are no text: when it was used. Anything unreadable counts as
    nothing.
    """
    try:
        with open_confined(folder, USED) as file:
            values = json.loads(file.read(m.MAX_JSON_BYTES))
    except (OSError, SpmoeError, ValueError, RecursionError):
        return {}
    pairs = values.items() if isinstance(values, dict) else ()
    return {path: float(when) for path, when in pairs if isinstance(when, float)}


def last_used(home: str | Path | None = None) -> list[Path]:
    """Complete packs, the one used last first; those never used follow by date of making."""
    folder = _home(home)
    used = _used(folder)
    found = {info.path.resolve(): info.modified for info in packs(folder) if info.complete}
    made = sorted(found, key=lambda path: found[path], reverse=True)
    recent = sorted(used, key=lambda path: used[path], reverse=True)
    there = [Path(path) for path in recent if os.path.isfile(Path(path) / m.MANIFEST)]
    return [*there, *(path for path in made if str(path) not in used)]


def default_target(draft: Path | None = None, home: str | Path | None = None) -> Path | None:
    """The MoE pack that `chat` without a name talks to: the last used whose vocabulary is the
    draft's.

    `demo` is never chosen. None if there is no such pack.
    """
    for path in last_used(home):
        if path.name.removesuffix(m.SUFFIX) in NEVER_BY_DEFAULT:
            continue
        try:
            manifest = m.read_manifest(path)
            if manifest.config.is_moe and (draft is None or _same_vocabulary(path, draft)):
                return path
        except SpmoeError as error:
            log.debug("%s is passed over: %s", path, str(error))
    return None


def _same_vocabulary(target: Path, draft: Path) -> bool:
    """Equal tokenizer files by hash, else compared token by token."""
    ours, theirs = m.read_manifest(target), m.read_manifest(draft)
    if (
        ours.files.get("tokenizer.json", (0, ""))[1]
        == theirs.files.get("tokenizer.json", (0, "-"))[1]
    ):
        return True
    from spmoe_lite.tokenizer import Tokenizer

    try:
        Tokenizer.load(target, ours.config).check_draft(
            Tokenizer.load(draft, theirs.config), ours.config.vocab_size, theirs.config.vocab_size
        )
    except UnsupportedError:
        return False
    return True


# Names


def _is_name(name: str) -> bool:
    """Whether `name` is one plain folder name, not a path."""
    plain = name.isprintable() and not any(c in name for c in "/\\:")
    return plain and name not in ("", ".", "..")


def is_portable(name: str) -> bool:
    """Whether a new pack may have this name: a folder on every system, and no flag of a command."""
    odd = set(name) & set('*?"<>|') or name.startswith((".", "-")) or name != name.strip()
    return _is_name(name) and not odd and len(name.encode()) <= 200 and not _DEVICES.fullmatch(name)


def _shown(name: str) -> str:
    """A name that was typed, for a message of one line."""
    return f"{name if name.isprintable() else repr(name):.200}"


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _ending(path: Path) -> str | None:
    for ending in (m.SUFFIX, m.SUFFIX + PARTIAL):
        if path.name.endswith(ending) and path.name != ending:
            return ending
    return None
