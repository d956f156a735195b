"""Which experts the target will want, guessed from the draft.

While the draft runs token t, its residual stream after attention in layer l is close to the target's at
the same place. So the target's own norm and router of layer l, applied to the draft's state, name the
experts the target is about to use (SP-MoE, arXiv 2510.10302, section 3.2). Nothing is trained. It needs
equal hidden size and depth; `ExpertPredictor.fits` says so, and a pair that does not fit runs without.

The guess stays on the device until it is asked for: `predict` only enqueues work, and on a GPU a small
copy to pinned memory with an event behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from spmoe_lite.config import ModelConfig
from spmoe_lite.device import host_buffer
from spmoe_lite.kernels.gate import norm_gate_topk
from spmoe_lite.model import Transformer


@dataclass(frozen=True, slots=True)
class Prediction:
    """Expert ids [1, k] of one layer on their way to the host."""

    layer: int
    row: int  # the position in the step: 0 for the newest token, i for the i-th draft token
    experts: torch.Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> list[int]:
        """The ids, best first, once they are on the host."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.experts[0].tolist()


class ExpertPredictor:
    """The target's norms and routers, applied to the draft's states."""

    def __init__(self, target: Transformer, num_critical_experts: int):
        self._target = target
        self._k = num_critical_experts

    @staticmethod
    def fits(target: ModelConfig, draft: ModelConfig) -> bool:
        """Whether the draft's layer l can stand in for the target's layer l."""
        same_depth = target.num_hidden_layers == draft.num_hidden_layers
        return target.is_moe and same_depth and target.hidden_size == draft.hidden_size

    def choose(self, layer: int, state: torch.Tensor) -> torch.Tensor:
        """state [1, H] -> expert ids [1, n] int32 on its device, best first."""
        block = self._target.blocks[layer]
        eps = self._target.config.rms_norm_eps
        return norm_gate_topk(state, block.post_norm, eps, block.router, self._k)[2]

    def predict(self, layer: int, row: int, state: torch.Tensor) -> Prediction:
        """state [1, H]: the draft's residual stream after attention. Never waits."""
        experts = self.choose(layer, state)
        if not experts.is_cuda:
            return Prediction(layer, row, experts, None)
        host = host_buffer(tuple(experts.shape), experts.dtype)
        host.copy_(experts, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return Prediction(layer, row, host, arrived)
