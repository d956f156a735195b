"""The router: each family's rule against its plain definition in fp64; ties, NaN, bits of rows."""

import math

import pytest
import torch

from spmoe_lite.config import Routing
from spmoe_lite.errors import UnsupportedError
from spmoe_lite.kernels import counters, gate_triton
from spmoe_lite.kernels.gate import gate_topk, gate_topk_reference, norm_gate_topk
from spmoe_lite.kernels.gate_triton import gate_topk_triton, norm_gate_topk_triton
from spmoe_lite.kernels.norm import rms_norm, rms_norm_reference
from spmoe_lite.kernels.norm_triton import rms_norm_triton

BOTH = [gate_topk_triton, gate_topk_reference]
V2 = Routing(norm_topk_prob=False, routed_scaling_factor=16.0, n_group=4, topk_group=2)
V3 = Routing("sigmoid", True, 2.5, 4, 2, "top2")
RULES = {  # rule, experts, choices, whether the router has a correction bias
    "Mixtral": (Routing(), 8, 2, False),
    "Qwen3": (Routing(), 40, 8, False),
    "OLMoE": (Routing(norm_topk_prob=False), 64, 6, False),
    "Qwen2-MoE": (Routing(norm_topk_prob=False, shared_expert_gate=True), 7, 3, False),
    "few of many": (Routing("sigmoid", norm_topk_prob=False), 16, 2, False),
    "DeepSeek-V2": (V2, 20, 6, False),
    "DeepSeek-V2, normalised and scaled": (Routing("softmax", True, 3.0, 3, 1), 21, 5, False),
    "DeepSeek-V3": (V3, 24, 8, True),
    "bias over softmax": (Routing(), 9, 4, True),
    "top2 over softmax": (Routing(n_group=3, topk_group=2, group_score="top2"), 15, 4, False),
    "shared gate in groups": (Routing("sigmoid", n_group=2, shared_expert_gate=True), 10, 3, True),
}


def definition(logits: list[float], rule: Routing, k: int, bias: list[float] | None):
    """experts and weights of one row, in Python's own numbers."""
    shared = [1 / (1 + math.exp(-logits.pop()))] if rule.shared_expert_gate else []
    if rule.scoring_func == "softmax":
        total = sum(math.exp(v) for v in logits)
        scores = [math.exp(v) / total for v in logits]
    else:
        scores = [1 / (1 + math.exp(-v)) for v in logits]
    choice = [s + (bias[e] if bias else 0.0) for e, s in enumerate(scores)]
    size = len(logits) // rule.n_group
    groups = [choice[g * size : (g + 1) * size] for g in range(rule.n_group)]
    best = 1 if rule.group_score == "max" else 2
    worth = [sum(sorted(group)[-best:]) for group in groups]
    open_groups = sorted(range(rule.n_group), key=lambda g: -worth[g])[: rule.topk_group]
    allowed = [e for e in range(len(logits)) if e // size in open_groups]
    experts = sorted(allowed, key=lambda e: -choice[e])[:k]
    weights = [scores[e] for e in experts]
    if rule.norm_topk_prob:
        weights = [w / sum(weights) for w in weights]
    return experts, [w * rule.routed_scaling_factor for w in weights] + shared


def case(name: str, dtype: torch.dtype, tokens: int, hidden: int, device: str):
    """x, router and bias of a rule."""
    rule, experts, k, biased = RULES[name]
    generator = torch.Generator().manual_seed(len(name))
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype)
    router = torch.randn(experts + rule.shared_expert_gate, hidden, generator=generator) * 0.2
    bias = torch.randn(experts, generator=generator).to(device) * 0.3 if biased else None
    return x, router.to(device, dtype), k, rule, bias


def assert_defined(weights, chosen, x, router, k, rule, bias):
    logits = (x.double() @ router.double().T).cpu().tolist()
    added = None if bias is None else bias.tolist()
    want = [definition(row, rule, k, added) for row in logits]
    assert weights.dtype == torch.float32 and chosen.dtype == torch.int32
    assert chosen.tolist() == [experts for experts, _ in want]
    wanted = torch.tensor([row for _, row in want], dtype=torch.float64)
    torch.testing.assert_close(weights.double().cpu(), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("gate", BOTH)
def test_kind_b_o8_every_rule_is_its_definition(gate, dtype, name, device):
    x, router, k, rule, bias = case(name, dtype, 5, 100, device)
    weights, chosen = gate(x, router, k, rule, bias)
    assert_defined(weights, chosen, x, router, k, rule, bias)


@pytest.mark.parametrize("tokens, hidden", [(1, 64), (3, 33), (2, 260), (0, 8)])
@pytest.mark.parametrize("gate", BOTH)
def test_odd_sizes(gate, tokens, hidden, device):
    x, router, k, rule, bias = case("Mixtral", torch.float32, tokens, hidden, device)
    weights, chosen = gate(x, router, k, rule, bias)
    assert weights.shape == chosen.shape == (tokens, k)
    assert_defined(weights, chosen, x, router, k, rule, bias) if tokens else None


@pytest.mark.parametrize("gate", BOTH)
def test_a_softmax_over_the_chosen_is_mixtral_s_rule(gate, device):
    x, router, k, _, _ = case("Mixtral", torch.float32, 4, 40, device)
    best = (x.double() @ router.double().T).sort(descending=True).values[:, :k]
    weights = gate(x, router, k)[0]
    torch.testing.assert_close(weights.double(), best.softmax(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gate", BOTH)
def test_scores_that_all_underflow_give_zeros_not_nan(gate, device):
    """The correction bias may choose what the scores think nothing of."""
    router = torch.full((4, 8), -40.0, device=device)
    bias = torch.tensor([0.0, 3.0, 1.0, 2.0], device=device)
    weights, chosen = gate(torch.ones(1, 8, device=device), router, 2, Routing("sigmoid"), bias)
    assert chosen.tolist() == [[1, 3]]
    assert weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("gate", BOTH)
def test_lowest_id_wins_a_tie_and_the_lowest_group(gate, name, device):
    rule, experts, k, biased = RULES[name]
    router = torch.ones(experts + rule.shared_expert_gate, 16, device=device)
    router[: experts // rule.n_group : 2] = 0.5  # a lower half of the first group
    bias = torch.zeros(experts, device=device) if biased else None
    x = torch.ones(2, 16, device=device)
    for sign in (1.0, -1.0, 0.0):  # 0: -0 and 0 are equal too
        x[1] = sign
        weights, chosen = gate(x, router, k, rule, bias)
        assert_defined(weights, chosen, x, router, k, rule, bias)


@pytest.mark.parametrize("gate", BOTH)
def test_minus_zero_is_zero(gate, device):
    router = torch.tensor([[-1.0], [0.0], [1.0]], device=device)
    x = torch.zeros(1, 1, device=device)  # logits -0, 0, 0
    assert gate(x, router, 3)[1].tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("gate", BOTH)
def test_nan_gives_nan_weights_and_valid_distinct_ids(gate, name, device):
    x, router, k, rule, bias = case(name, torch.float32, 4, 16, device)
    router[:, 3] = 0.0
    router[1, 3] = 1.0
    x[1] = float("nan")
    x[2, 3] = float("inf")  # one logit is infinite, or all are NaN where 0 meets it
    weights, chosen = gate(x, router, k, rule, bias)
    assert weights[1:3].isnan().all() and not weights[[0, 3]].isnan().any()
    for row in chosen.tolist():
        assert len(set(row)) == k and set(row) <= set(range(RULES[name][1]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), -float("nan")])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("gate", BOTH)
def test_one_broken_row_of_the_router_never_gives_a_wrong_id(gate, name, value, device):
    x, router, k, rule, bias = case(name, torch.float32, 3, 16, device)
    router[2] = value
    weights, chosen = gate(x, router, k, rule, bias)
    for row in chosen.tolist():
        assert len(set(row)) == k and set(row) <= set(range(RULES[name][1]))
    if value != value:
        assert weights.isnan().all()


@pytest.mark.parametrize("gate", BOTH)
def test_the_worst_expert_of_an_open_group_comes_before_a_closed_group(gate, device):
    router = torch.ones(20, 8, device=device)
    router[5:15] = 2.0  # groups 1 and 2 are open
    router[7] = float("-inf")
    chosen = gate(torch.ones(1, 8, device=device), router, 10, V2)[1]
    assert chosen.tolist() == [[5, 6, *range(8, 15), 7]]


@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "Qwen2-MoE"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "gate, norm",
    [
        (norm_gate_topk_triton, rms_norm_triton),
        (lambda *args: norm_gate_topk(*(a.cpu() if torch.is_tensor(a) else a for a in args)), None),
    ],
)
def test_the_norm_in_the_same_launch_is_rms_norm_and_the_router_sees_it_rounded(
    gate, norm, dtype, name, device
):
    x, router, k, rule, bias = case(name, dtype, 5, 100, device)
    weight = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    normed, weights, chosen = gate(x, weight, 1e-5, router, k, rule, bias)
    if norm is None:
        norm, x, weight = rms_norm_reference, x.cpu(), weight.cpu()
    assert torch.equal(normed, norm(x, weight, 1e-5))
    assert_defined(weights, chosen, normed, router.to(normed.device), k, rule, bias)


def test_the_counters_stay_where_they_are_and_are_zero_after_every_launch(device, monkeypatch):
    monkeypatch.setattr(counters, "KEPT", 4)
    x, router, k, rule, _ = case("Qwen3", torch.float32, 21, 24, device)
    few = gate_topk_triton(x[:3], router, k, rule)
    kept = counters._counters[router]
    assert len(kept) * gate_triton.TILE_T < 21
    for _ in range(2):
        every = gate_topk_triton(x, router, k, rule)
        assert counters._counters[router] is kept and not kept.any()
        for part, whole in zip(few, every, strict=True):
            assert torch.equal(part, whole[:3])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "experts, hidden, k, rule",
    [(8, 4096, 2, Routing()), (128, 2048, 8, Routing()), (256, 7168, 8, V3), (64, 576, 6, V2)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_bits_do_not_depend_on_the_other_rows(dtype, experts, hidden, k, rule):
    """Nor on whether the norm was in the launch; and the rows it returns are those of `rms_norm`."""
    generator = torch.Generator("cuda").manual_seed(experts)

    def random(*shape):
        return torch.randn(shape, generator=generator, device="cuda")

    x, weight = random(700, hidden).to(dtype), random(hidden).to(dtype)
    router = (random(experts, hidden) * 0.03).to(dtype)
    bias = random(experts) * 0.1 if rule is V3 else None
    whole = norm_gate_topk(x, weight, 1e-5, router, k, rule, bias)
    assert torch.equal(whole[0], rms_norm(x, weight, 1e-5))
    for tokens in [*range(1, 33), 33, 64, 129]:
        rows = slice(tokens, 2 * tokens)
        part = norm_gate_topk(x[rows], weight, 1e-5, router, k, rule, bias)
        assert all(torch.equal(a, b[rows]) for a, b in zip(part, whole, strict=True)), tokens
        alone = gate_topk(part[0], router, k, rule, bias)
        assert all(torch.equal(a, b) for a, b in zip(alone, part[1:], strict=True)), tokens


@pytest.mark.gpu
def test_a_captured_graph_can_be_replayed():
    x, router, k, rule, _ = case("Qwen3", torch.float16, 7, 256, "cuda")
    want = gate_topk(x, router, k, rule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gate_topk(x, router, k, rule)
    for _ in range(3):
        got[0].zero_(), got[1].zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(
    "values, experts, k",
    [
        ({"scoring_func": "tanh"}, 8, 2),
        ({"group_score": "sum"}, 8, 2),
        ({"routed_scaling_factor": float("nan")}, 8, 2),
        ({"norm_topk_prob": 1}, 8, 2),
        ({"topk_group": 2}, 8, 2),
        ({"n_group": 3}, 8, 2),
        ({"n_group": 4, "topk_group": 2}, 8, 5),
        ({"n_group": 8, "topk_group": 8, "group_score": "top2"}, 8, 2),
        ({}, 8, 9),
    ],
)
def test_a_rule_that_cannot_be_is_refused(values, experts, k):
    with pytest.raises(UnsupportedError, match=r"routing|scoring_func|group_score"):
        Routing(**values).check(experts, k)
