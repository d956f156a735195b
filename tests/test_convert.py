"""convert: every layout and spelling gives the same pack, and what is not a model is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from spmoe_lite.converters import convert
from spmoe_lite.pack import Pack
from tests import tiny


def test_the_pack_holds_the_checkpoints_numbers(tmp_path: Path) -> None:
    source = tiny.tiny_mixtral(tmp_path / "tmix")
    result = convert(source, out=tmp_path / "tmix.spmoe")
    print(result.plan)
    with Pack.open(result.path) as pack:
        pack.verify()
