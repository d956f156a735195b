"""The demo pair against the reference library, token for token; needs the packs `demo` makes.

What tiny models cannot show: weights that were trained, at their true size, write the reference's text.
That slots, prefetching and drafting change no token is shown in full by test_invariance.py.
"""

import pytest

from spmoe_lite.engine import Engine
from tests.prompts import PROMPTS
from tests.reference import from_pack, greedy

pytestmark = pytest.mark.slow
LENGTH = 16


@pytest.fixture(scope="module")
def expected(demo_packs):
    """A prompt of each kind, and what follows."""
    pytest.importorskip("transformers")
    with Engine.load(demo_packs[0], device="cpu", ctx_size=512) as engine:
        chats = [[{"role": "user", "content": PROMPTS[i]}] for i in (0, 3, 6)]
        prompts = [engine.template.encode(chat) for chat in chats]
        eos = engine.eos_ids
    model = from_pack(demo_packs[0])
    return [(prompt, greedy(model, prompt, LENGTH, eos)) for prompt in prompts]


@pytest.mark.parametrize(
    "options, prompts",
    [
        ({"draft_tokens": 0, "slots": 60}, 1),  # a quarter of the experts: every pass evicts
        ({"draft_tokens": 4, "slots": 120}, 3),  # prefetched into half, checked five rows at once
    ],
)
def test_greedy_text_is_the_reference_s(demo_packs, expected, options, prompts):
    with Engine.load(*demo_packs, device="cpu", ctx_size=512, **options) as engine:
        for prompt, tokens in expected[:prompts]:
            got = engine.generate(prompt, max_tokens=LENGTH).result
            assert list(got.token_ids) == tokens
        if options["draft_tokens"]:
            assert engine.counters.accepted > engine.counters.drafted / 2
        assert engine.counters.loads > 0
