"""spmoe-lite: Mixture-of-Experts models larger than VRAM, guided by their draft."""

from pathlib import Path

_here = Path(__file__).parent
if not (_here / "kernels").is_dir():  # a checkout: kernels/ and converters/ are our neighbours
    __path__.append(str(_here.parent))
