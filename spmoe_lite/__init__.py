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
    from spmoe_lite.converters.convert import convert
    from spmoe_lite.converters.plan import ConvertPlan
    from spmoe_lite.converters.repack import repack
    from spmoe_lite.converters.writing import ConvertResult
    from spmoe_lite.engine import Engine
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
    from spmoe_lite.generation import Generation, Result
    from spmoe_lite.library import PackInfo, inspect, packs, remove, verify
    from spmoe_lite.plan import Plan
    from spmoe_lite.progress import Progress
    from spmoe_lite.stats import RunStats

__all__ = [
    "BusyError",
    "Cancelled",
    "CapacityError",
    "ConvertPlan",
    "ConvertResult",
    "DamagedError",
    "Engine",
    "Generation",
    "NetworkError",
    "NotFoundError",
    "PackInfo",
    "Plan",
    "Progress",
    "Result",
    "RunStats",
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

_PUBLIC = {
    "config": ("SamplingParams",),
    "converters.convert": ("convert",),
    "converters.plan": ("ConvertPlan",),
    "converters.repack": ("repack",),
    "converters.writing": ("ConvertResult",),
    "engine": ("Engine",),
    "generation": ("Generation", "Result"),
    "library": ("PackInfo", "inspect", "packs", "remove", "verify"),
    "plan": ("Plan",),
    "progress": ("Progress",),
    "stats": ("RunStats",),
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used; what is not listed above is an error class."""
    if name not in __all__:
        raise AttributeError(f"module 'spmoe_lite' has no attribute {name!r}")
    module = importlib.import_module(f"spmoe_lite.{_MODULE_OF.get(name, 'errors')}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return __all__
