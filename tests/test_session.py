"""A conversation that is interrupted while it changes never believes a row of another token."""

import pytest

from spmoe_lite.session import Session
from tests.interrupt import Interrupt


class Rows:
    """A cache that remembers which token made each row."""

    def __init__(self):
        self.rows = []

    @property
    def length(self):
        return len(self.rows)

    def truncate(self, length):
        del self.rows[length:]


def in_mid_answer():
    """Four tokens, two rejected draft tokens still in the caches."""
    session = Session(Rows(), Rows())
    session.start([1, 2, 3, 4])
    session.target_kv.rows = [1, 2, 3, 4, 50, 60]
    session.draft_kv.rows = [1, 2, 3, 4, 50]
    return session


@pytest.mark.parametrize(
    "change",
    [lambda s: s.commit([50, 6]), lambda s: s.commit([5]), lambda s: s.start([1, 2, 9, 9])],
)
def test_kind_l_o36_ctrl_c_in_any_change_leaves_a_right_prefix(change):
    session = in_mid_answer()
    with Interrupt() as whole:
        change(session)
    assert whole.seen >= 5
    for moment in range(1, whole.seen + 1):
        for prompt in ([1, 2, 3, 4, 50, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 50, 60, 7]):
            session = in_mid_answer()
            with Interrupt(moment) as interrupt:
                change(session)
            assert interrupt.struck
            session.start(prompt)
            for kv in (session.target_kv, session.draft_kv):
                assert kv.rows == prompt[: kv.length], interrupt.where
