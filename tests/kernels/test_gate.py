"""The router: the right experts, weights that sum to 1, ties and NaN by rule."""

import pytest
import torch

from spmoe_lite.kernels.gate import gate_topk_reference
from spmoe_lite.kernels.gate_triton import gate_topk_triton

BOTH = [gate_topk_triton, gate_topk_reference]


@pytest.mark.parametrize(
    "tokens, experts, hidden, k", [(1, 8, 64, 2), (5, 64, 100, 6), (3, 7, 33, 1)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gate", BOTH)
def test_softmax_then_topk_then_renormalise(gate, dtype, tokens, experts, hidden, k, device):
    x = torch.randn(tokens, hidden).to(device, dtype)
    router = torch.randn(experts, hidden).to(device, dtype) * 0.1
    weights, chosen = gate(x, router, k)
    p = torch.softmax(x.double() @ router.double().T, dim=-1)
    best, want = p.topk(k)
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert chosen.tolist() == want.tolist()
    torch.testing.assert_close(
        weights.double(), best / best.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("gate", BOTH)
def test_lowest_id_wins_a_tie(gate, device):
    x = torch.ones(2, 16, device=device)
    weights, chosen = gate(x, torch.ones(8, 16, device=device), 3)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3, device=device))


@pytest.mark.parametrize("gate", BOTH)
def test_nan_gives_nan_weights_and_valid_distinct_ids(gate, device):
    x = torch.randn(3, 16, device=device)
    x[1] = float("nan")
    weights, chosen = gate(x, torch.randn(5, 16, device=device), 3)
    assert weights[1].isnan().all() and not weights[[0, 2]].isnan().any()
    assert len(set(chosen[1].tolist())) == 3 and set(chosen[1].tolist()) <= set(range(5))
