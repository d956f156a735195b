"""Stop strings in text that arrives in pieces.

An Aho-Corasick automaton (Aho and Corasick 1975, "Efficient string matching") over the stop strings:
after each character its state is the longest end of the text that begins some stop string. That
length is exactly what must be held back, everything before it can be shown, and the work per
character does not depend on the number of stop strings.

The law: the stop string that is complete first ends the text; of several that end at the same
character the longest counts. So the result does not depend on how the text was cut into pieces, and
no character is generated only to decide between two stop strings.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from spmoe_lite.errors import UsageError


class StopMatcher:
    """Passes text through until a stop string is complete.

    hit: a stop string was found; nothing is shown any more. stop: which one, else None.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        """`stops`: one string or several; UsageError for an empty one."""
        self._next: list[dict[str, int]] = [{}]  # state 0: nothing matched
        self._depth = [0]
        self._stop: list[str | None] = [None]  # longest stop string that ends in this state
        self._fail = [0]
        for stop in [stops] if isinstance(stops, str) else stops:
            self._add(stop)
        self._link()
        self._state = 0
        self._held = ""
        self.stop: str | None = None

    @property
    def hit(self) -> bool:
        return self.stop is not None

    def push(self, text: str) -> str:
        """Take the next piece of text; return what is safe to show."""
        if self.hit:
            return ""
        held = len(self._held)
        text = self._held + text
        for i in range(held, len(text)):
            self._step(text[i])
            stop = self._stop[self._state]
            if stop is not None:
                self.stop = stop
                self._held = ""
                return text[: i + 1 - len(stop)]
        shown = len(text) - self._depth[self._state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """The text ends here: what was held back was no stop string."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, character: str) -> None:
        while self._state and character not in self._next[self._state]:
            self._state = self._fail[self._state]
        self._state = self._next[self._state].get(character, 0)

    def _add(self, stop: str) -> None:
        if not isinstance(stop, str) or not stop:
            raise UsageError(f"a stop string must be text of at least one character, not {stop!r}")
        state = 0
        for character in stop:
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._stop.append(None)
                self._fail.append(0)
            state = self._next[state][character]
        self._stop[state] = stop

    def _link(self) -> None:
        """Failure links, breadth first: the longest proper end of a state that is itself a state."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for character, child in self._next[state].items():
                back = self._fail[state]
                while back and character not in self._next[back]:
                    back = self._fail[back]
                self._fail[child] = self._next[back].get(character, 0)
                if self._stop[child] is None:
                    self._stop[child] = self._stop[self._fail[child]]
                queue.append(child)
