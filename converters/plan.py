"""What a conversion is about to do: bytes to fetch and to write, and the room there is for them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spmoe_lite.config import ModelConfig
from spmoe_lite.errors import CapacityError
from spmoe_lite.manifest import Dtypes, dense_entries, expert_layout
from spmoe_lite.progress import sizes_apart

CONFIRM_BYTES = 10 * 10**9  # above this a person is asked
SPARE_BYTES = (
    16 << 20
)  # beyond the tensors: text files, headers, the journal, the file system's own


@dataclass(frozen=True, slots=True)
class Volume:
    """One file system: bytes that will be written there, and bytes free now."""

    path: Path
    needed_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True)
class ConvertPlan:
    """Shown to the caller before the first large byte moves; `str` is the text for a person."""

    label: str  # the source
    revision: str | None
    path: Path  # the pack to be
    family: str
    dtypes: Dtypes
    download_bytes: int
    pack_bytes: int
    volumes: tuple[Volume, ...]
    ignored: tuple[str, ...]  # weight files that are there and are not read

    @property
    def needs_confirmation(self) -> bool:
        """Whether a person should be asked: more than 10 GB in all."""
        return self.download_bytes + self.pack_bytes > CONFIRM_BYTES

    def __str__(self) -> str:
        revision = f" at {self.revision[:12]}" if self.revision else ""
        lines = [f"{self.label}{revision}: {self.family}, {self.dtypes}"]
        if self.download_bytes:
            lines.append(f"download: {_size(self.download_bytes)}")
        lines.append(f"pack: {_size(self.pack_bytes)} in {self.path}")
        for volume in self.volumes:
            lines.append(
                f"disk: {_size(volume.needed_bytes)} needed, {_size(volume.free_bytes)} free "
                f"({volume.path})"
            )
        if self.ignored:
            lines.append(f"not read: {', '.join(self.ignored)}")
        return "\n".join(lines)


def dense_bytes(config: ModelConfig, dtypes: Dtypes) -> int:
    """Bytes of all dense tensors."""
    return sum(entry.size for entry in dense_entries(config, dtypes).values())


def layer_bytes(config: ModelConfig, dtype: str | None) -> int:
    """Bytes of one layer's experts; 0 for a dense model."""
    if dtype is None:
        return 0
    layout = expert_layout(dtype, config.hidden_size, config.intermediate_size)
    return layout.stride * config.num_local_experts


def pack_bytes(config: ModelConfig, dtypes: Dtypes) -> int:
    """Bytes of all tensors of the pack."""
    layers = config.num_hidden_layers * layer_bytes(config, dtypes.experts)
    return dense_bytes(config, dtypes) + layers


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below `folder`; 0 if there is none."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def volumes(needs: Mapping[Path, int]) -> tuple[Volume, ...]:
    """What `needs` {folder, perhaps not made yet: bytes} means for each file system."""
    found: dict[int, Volume] = {}
    for folder, needed in needs.items():
        there = folder
        while not there.exists() and there != there.parent:
            there = there.parent
        device = os.stat(there).st_dev
        needed += found[device].needed_bytes if device in found else 0
        found[device] = Volume(there, needed, shutil.disk_usage(there).free)
    return tuple(found.values())


def check_room(plan: ConvertPlan) -> None:
    """Raise `CapacityError` if a volume has too little room."""
    for volume in plan.volumes:
        needed = volume.needed_bytes + SPARE_BYTES
        if needed > volume.free_bytes:
            wanted, free = sizes_apart(needed, volume.free_bytes)
            raise CapacityError(
                f"not enough disk space at {volume.path}: {wanted} needed, {free} free; free some, "
                f"or choose another place with --out or SPMOE_HOME"
            )


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1000:.0f} kB"
