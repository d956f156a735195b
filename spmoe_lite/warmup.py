"""Every kernel runs once while an engine is loaded, so that no answer waits for a compiler."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from spmoe_lite.device import current, synchronize
from spmoe_lite.errors import CapacityError, SpmoeError, UnsupportedError
from spmoe_lite.kernels.attention import attention
from spmoe_lite.kernels.expert_gemm import expert_down, expert_up
from spmoe_lite.kvcache import KVCache
from spmoe_lite.model import Transformer
from spmoe_lite.predictor import ExpertPredictor
from spmoe_lite.progress import OnProgress, Progress, check

WARM_UP = ((1, 0), (17, 0), (33, 0), (128, 0), (1, 128))  # rows of a pass, tokens before it
LONG = (4096, 16384)  # tokens before a pass, from where on the context's parts are added otherwise


@torch.inference_mode()
def warm_up(
    device: torch.device,
    models: Sequence[tuple[Transformer, KVCache]],
    predictor: ExpertPredictor | None,
    cancel: threading.Event | None,
    on_progress: OnProgress | None,
) -> None:
    """Compile every kernel that answers need, so that none of them waits for a compiler.

    Which kernels a pass takes depends on how many rows it has, in four classes, and on whether it
    looks back over more than one part of the context. In prefill the tile of the experts
    depends on how many rows an expert has; `_launch_tiles` makes each choice once. So does
    `_launch_merges` for long contexts, over whatever the cache holds.
    """
    passes = [
        (model, kv, rows, start)
        for model, kv in models
        for rows, start in WARM_UP
        if start + rows <= kv.capacity
    ]
    for done, (model, kv, rows, start) in enumerate(passes):
        check(cancel)
        if on_progress is not None:
            on_progress(Progress("warm up", done, len(passes), "passes"))
        kv.truncate(start)
        try:
            with current(device):
                model.forward([0] * rows, kv)
                if start + rows == 1:
                    _launch_tiles(model)
                    _launch_merges(model, kv)
                if predictor is not None and done == 0:
                    predictor.predict(0, 0, model.norm.new_zeros(1, model.config.hidden_size))
            synchronize(device)
        except (SpmoeError, OSError):
            raise
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"{device} has no room left for a pass: lower --vram or --ctx-size"
            ) from error
        except Exception as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise UnsupportedError(
                f"the kernels do not run on {device} ({reason}): use --device cpu"
            ) from error
    for _, kv in models:
        kv.truncate(0)


def _launch_merges(model: Transformer, kv: KVCache) -> None:
    """Each kernel that may add up the parts of a context longer than those of `WARM_UP`."""
    c, caches = model.config, (kv.keys[0], kv.values[0])
    q = model.norm.new_zeros(1, c.num_attention_heads, c.head_dim)
    for start in LONG:
        if start < kv.capacity:
            attention(q, *caches, start, c.sliding_window, kv_scales=kv.scales[0])


def _launch_tiles(model: Transformer) -> None:
    """Each tile that the experts may have in prefill, over experts that no row asks for."""
    layout = model.layout
    if layout is None:
        return
    rows, choices = 128, model.config.num_experts_per_tok
    x = model.norm.new_zeros(rows, layout.hidden_size)
    experts = x.new_zeros(rows, choices, dtype=torch.int32)
    hidden = x.new_empty(rows, choices, layout.intermediate_size)
    out = x.new_empty(rows, choices, layout.hidden_size)
    for columns in (16, 32, 64, 128):
        use = x.new_full((rows * choices // columns, 3), -1, dtype=torch.int64)
        expert_up(x, experts, use, layout, out=hidden)
        expert_down(hidden, experts, use, layout, out=out)
