"""spmoe-lite: Mixture-of-Experts models larger than VRAM, guided by their draft.

    from spmoe_lite import Engine

    with Engine.load("mixtral-8x7b", draft="mistral-7b") as engine:
        for piece in engine.generate("Once upon a time"):
            print(piece, end="", flush=True)

The names in `__all__` are the public interface, under semantic versioning; all else may move. Each is
imported on first use, so that `import spmoe_lite` is quick and does not import torch.
"""

import importlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_here = Path(__file__).parent
if not (_here / "kernels").is_dir():  # a checkout: kernels/ and converters/ are our neighbours
    __path__.append(str(_here.parent))

logging.getLogger("spmoe_lite").addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from spmoe_lite.config import SamplingParams
    from spmoe_lite.converters import convert, repack
    from spmoe_lite.engine import Engine, Generation, Result
    from spmoe_lite.errors import (
        BusyError,
        Cancelled,
        CapacityError,
        DamagedError,
        NetworkError,
        NotFoundError,
        SpmoeError,
        UnsupportedError,
        UsageError,
    )
    from spmoe_lite.library import inspect, packs, remove, verify
    from spmoe_lite.progress import Progress

__all__ = [
    "BusyError",
    "Cancelled",
    "CapacityError",
    "DamagedError",
    "Engine",
    "Generation",
    "NetworkError",
    "NotFoundError",
    "Progress",
    "Result",
    "SamplingParams",
    "SpmoeError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "convert",
    "inspect",
    "packs",
    "remove",
    "repack",
    "verify",
]

_MODULE_OF = {
    "SamplingParams": "config",
    "convert": "converters",
    "repack": "converters",
    "Engine": "engine",
    "Generation": "engine",
    "Result": "engine",
    "Progress": "progress",
    "inspect": "library",
    "packs": "library",
    "remove": "library",
    "verify": "library",
} | {name: "errors" for name in __all__ if name.endswith("Error") or name == "Cancelled"}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'spmoe_lite' has no attribute {name!r}")
    return getattr(importlib.import_module(f"spmoe_lite.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
