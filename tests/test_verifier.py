"""Verification with two drafts anyone can follow: one that is always right, one that never is."""

import pytest
import torch

from spmoe_lite.config import SamplingParams
from spmoe_lite.sampling import Sampler
from spmoe_lite.verifier import Verdict, verify

GREEDY = Sampler(SamplingParams(), 8, 0)


def rows(*best):
    logits = torch.zeros(len(best), 8)
    for row, token in enumerate(best):
        logits[row, token] = 1.0
    return logits


def test_a_draft_that_is_always_right_gives_one_token_more():
    assert verify([3, 1, 4], rows(3, 1, 4, 1), GREEDY, [0]) == Verdict([3, 1, 4, 1], 3)


def test_a_draft_that_is_never_right_still_gives_one():
    assert verify([7, 7, 7], rows(3, 1, 4, 1), GREEDY, [0]) == Verdict([3], 0)


@pytest.mark.parametrize("wrong", range(4))
def test_the_prefix_before_the_first_disagreement_is_kept(wrong):
    target = [3, 1, 4, 1, 5]
    draft = target[:4]
    draft[wrong] = 6
    assert verify(draft, rows(*target), GREEDY, [0]) == Verdict(target[: wrong + 1], wrong)


def test_no_draft_is_a_plain_step():
    assert verify([], rows(5), GREEDY, [0]) == Verdict([5], 0)


def test_kind_g_o20_a_penalty_sees_the_tokens_of_its_own_block():
    """Row i is judged in the context the first i tokens make, as without a draft."""
    sampler = Sampler(SamplingParams(presence_penalty=2.0), 8, 0)
    logits = rows(3, 3, 3)
    logits[:, 4] = 0.5
    assert verify([3, 4], logits, sampler, [0]) == Verdict([3, 4, 1], 2)
