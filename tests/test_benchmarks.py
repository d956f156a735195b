"""Scripts of benchmarks/ that need a GPU: what of them can be wrong without one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
STRIDE, EXPERTS = 64, 8


class Event:
    """Eight ms from any of them to any other."""

    def __init__(self, enable_timing):
        pass

    def record(self):
        pass

    synchronize = record

    def elapsed_time(self, end):
        return 8.0


@pytest.mark.parametrize("layers", [1, 3, 4, 32])
def test_decode_times_copies_of_experts_that_the_pair_has(layers, monkeypatch):
    """`--layers 1`: the other layers' addresses were read beyond the end of the table."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import decode

    monkeypatch.setattr(decode, "DEVICE", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    memory = torch.zeros(layers * EXPERTS, STRIDE, dtype=torch.uint8)
    address = memory.data_ptr() + torch.arange(layers * EXPERTS).view(layers, EXPERTS) * STRIDE
    pair = SimpleNamespace(
        layers=layers, address=address, layout=SimpleNamespace(stride=memory.stride(0))
    )
    assert decode.fetch_ms(pair) == 8 / (decode.CHOICES * min(layers, 4))


def test_decode_says_what_differs_from_the_run_before(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.decode import Bits

    def found(proposal=(1, 2), expert=3, logit=0.5):
        trace = torch.tensor([[[0, 1]], [[2, expert]]]).numpy()
        logits = torch.tensor([[0.25, logit]], dtype=torch.bfloat16)
        return Bits.of(SimpleNamespace(proposal=[*proposal], trace=trace, logits=logits))

    assert found().unlike(found()) == ""
    assert found(proposal=(1, 4)).unlike(found()) == "proposals [1, 4], not [1, 2]"
    assert found(expert=5).unlike(found()) == "routing from layer 1 on, in rows [0]"
    assert found(logit=-0.5, expert=5).unlike(found()).endswith("; logits")
    assert found(logit=0.50390625).unlike(found()) == "logits"  # the last bit


class Steps:
    """Captured steps of 4 ms by the clock, 3 of them on the GPU."""

    def __init__(self, clock):
        self._clock = clock

    def step(self, *_):
        self._clock[0] += 0.004
        return SimpleNamespace(draft_ms=1.0, verify_ms=2.0)


def test_answers_tell_what_of_a_step_is_not_the_gpus(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import answers

    clock = [0.0]
    monkeypatch.setattr(answers.time, "perf_counter", lambda: clock[0])
    graphs = Steps(clock)

    def generate(prompt, max_tokens, sampling):
        for _ in range(max_tokens // 2):
            graphs.step("what steps take")
        return SimpleNamespace(result=SimpleNamespace(token_ids=range(max_tokens)))

    engine = SimpleNamespace(decoder=SimpleNamespace(graphs=graphs), generate=generate)
    row = answers.measure(engine, [1], None, 60)
    assert row == pytest.approx(
        {"step_ms": 4.0, "gpu_ms": 3.0, "not_gpu": 0.25, "steps": 19, "tokens_a_step": 2.0}
    )
    with pytest.raises(RuntimeError, match="10 steps are too few"):
        answers.measure(engine, [1], None, 20)
    assert "step" not in vars(graphs)  # nothing stays behind
    engine.decoder.graphs, engine.notices = None, ["--pin none"]
    with pytest.raises(RuntimeError, match="driven by the host: --pin none"):
        answers.measure(engine, [1], None, 60)
