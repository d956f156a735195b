"""The demo pair against the reference library, token for token; needs the packs `demo` makes."""

import pytest

from spmoe_lite.engine import Engine
from tests.prompts import PROMPTS
from tests.reference import from_pack, greedy

pytestmark = pytest.mark.slow
LENGTH = 24


@pytest.fixture(scope="module")
def expected(demo_packs):
    pytest.importorskip("transformers")
    with Engine.load(demo_packs[0], device="cpu", ctx_size=512) as engine:
        prompts = [engine.template.encode([{"role": "user", "content": p}]) for p in PROMPTS]
        eos = engine.eos_ids
    model = from_pack(demo_packs[0])
    return [(prompt, greedy(model, prompt, LENGTH, eos)) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {"draft_tokens": 0, "slots": 120},
        {"draft_tokens": 4, "slots": 120},
        {"draft_tokens": 4, "slots": 60, "prefetch": False},
    ],
)
def test_greedy_text_is_the_reference_s(demo_packs, expected, options):
    with Engine.load(*demo_packs, device="cpu", ctx_size=512, **options) as engine:
        for prompt, tokens in expected:
            got = engine.generate(prompt, max_tokens=LENGTH).result
            assert list(got.token_ids) == tokens
        if options["draft_tokens"]:
            assert engine.counters.accepted > engine.counters.drafted / 2
            assert engine.counters.loads > 0
