"""Real text on a CUDA GPU: the demo pair by captured steps, three kinds of prompts; needs the packs `demo` makes.

A target repacked to another precision is taken as well if it lies beside them (`repack demo --experts int4`).
"""

import pytest

from spmoe_lite.engine import Engine
from tests.prompts import PROMPTS

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
LENGTH = 120
CHOSEN = PROMPTS[0], PROMPTS[3], PROMPTS[6]  # code, arithmetic, conversation
OPTIONS = {
    "captured, fewest slots": {"slots": 60},
    "captured, half the slots, two layers ahead": {"slots": 120, "cutoff": 2},
    "driven by the host": {"slots": 120, "pin": "none"},
    "length as measured": {"slots": 180, "draft_tokens": "auto"},
}


def answers(engine):
    found = []
    for prompt in CHOSEN:
        result = engine.chat([{"role": "user", "content": prompt}], max_tokens=LENGTH).result
        found.append((result.token_ids, result.text))
    return found


def targets(packs):
    home = packs[0].parent
    return [packs[0], *(p for p in sorted(home.glob("demo-*.spmoe")) if p != packs[1])]


def test_text_is_the_same_wherever_experts_lie_and_whoever_drafts(demo_packs):
    for target in targets(demo_packs):
        with Engine.load(target, device="cuda", ctx_size=512) as engine:
            expected = answers(engine)
        for name, given in OPTIONS.items():
            options = {"draft_tokens": 4, "ctx_size": 512} | given
            with Engine.load(target, demo_packs[1], device="cuda", **options) as engine:
                captured = engine.stats()["steps"] == "captured"
                assert captured == ("pin" not in options), name
                assert answers(engine) == expected, (target.name, name)
                c = engine.counters
                print(f"{target.name}, {name}: acceptance {c.accepted / c.drafted:.2f}")
                assert c.accepted > c.drafted / 4 and c.loads > 0
        for _, text in expected:
            print(repr(text))
            assert text.count(" ") >= 5  # words
