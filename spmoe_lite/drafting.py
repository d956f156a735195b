"""Whether drafting pays here and now: seconds per token with it and without, both measured.

A draft costs time, and checking several positions touches more experts. Where the draft is slow or often
wrong, plain steps are faster (Cascade, arXiv 2506.20675, reports losses of a quarter to a half for fixed
lengths). No model of the costs is needed: with `auto` a few plain steps are tried among the drafted ones,
and whichever way gives a token sooner is kept until the next trial. Trials of what has lost become rarer.
The text does not depend on it (`sampling.py`), so the choice may follow the clock.
"""

from __future__ import annotations

import logging

log = logging.getLogger("spmoe_lite")

DRAFT_STEPS, PLAIN_STEPS = 12, 6  # a trial: enough tokens to compare, few enough to cost little
HOLD_STEPS = 128  # how long drafting is kept after it has won
PAUSE_STEPS, LONGEST_PAUSE = 64, 1024  # how long it is off after it has lost; doubles
MARGIN = 1.05  # drafting must lose by this much


class DraftLength:
    """Proposals for each step: `most`, or with `adapt` none while plain steps are faster."""

    def __init__(self, most: int, adapt: bool):
        self.most = most
        self._adapt = adapt and most > 0
        self._drafting = True
        self._trial = True  # this phase is short and ends in a comparison
        self._left = DRAFT_STEPS
        self._pause = PAUSE_STEPS
        self._tokens = 0  # of the phase
        self._seconds = 0.0
        self._cost: dict[bool, float] = {}  # drafting or not -> seconds per token, last phase

    @property
    def paused(self) -> bool:
        """Whether plain steps were faster, so that the draft is off for now."""
        return not self._drafting and not self._trial

    def next(self) -> int:
        """How many tokens the coming step may draft."""
        return self.most if self._drafting else 0

    def observe(self, tokens: int, seconds: float) -> None:
        """One step took `seconds` and wrote `tokens`."""
        if not self._adapt:
            return
        self._tokens += tokens
        self._seconds += seconds
        self._left -= 1
        if self._left > 0:
            return
        self._cost[self._drafting] = self._seconds / max(1, self._tokens)
        if self._trial and len(self._cost) == 2:
            self._decide()
        else:  # time to try the other way
            self._begin(not self._drafting, trial=True)

    def _decide(self) -> None:
        """Both ways have been tried: keep the faster one for a while."""
        drafted, plain = self._cost[True], self._cost[False]
        if drafted <= MARGIN * plain:
            self._pause = PAUSE_STEPS
            self._begin(True, trial=False)
            return
        log.info(
            "drafting pauses for %d steps: %.0f ms per token with it, %.0f without",
            self._pause,
            drafted * 1e3,
            plain * 1e3,
        )
        self._begin(False, trial=False)
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def _begin(self, drafting: bool, trial: bool) -> None:
        self._drafting, self._trial = drafting, trial
        if trial:
            self._left = DRAFT_STEPS if drafting else PLAIN_STEPS
        else:
            self._left = HOLD_STEPS if drafting else self._pause
        self._tokens, self._seconds = 0, 0.0
