"""Stop strings: nothing of them is shown, nothing else is held back, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmoe_lite.errors import UsageError
from spmoe_lite.stops import StopMatcher

# Two letters, so that stop strings overlap, contain each other and repeat all the time.
texts = st.text("ab", max_size=40)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def feed(stops, pieces):
    """(shown text, the matcher) after all pieces and the end."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.finish()
    return shown, matcher


def cut(text, stops):
    """The law, slowly: the first stop string to be complete ends the text, the longest of several."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end - len(stop)], stop
    return text, None


def pieces_of(text, cuts):
    """`text` in pieces, cut at the given places."""
    places = [0, *sorted(place % (len(text) + 1) for place in cuts), len(text)]
    return [text[a:b] for a, b in zip(places, places[1:], strict=False)]


def test_kind_e_o12_a_stop_string_over_several_tokens_is_never_shown():
    matcher = StopMatcher(["STOP"])
    assert [matcher.push(piece) for piece in ("ab", "cSTO", "P!", "more")] == ["ab", "c", "", ""]
    assert matcher.hit and matcher.stop == "STOP"
    assert matcher.finish() == ""


@given(texts, stop_lists, st.lists(st.integers(0, 40), max_size=6))
def test_kind_e_o12_the_result_follows_the_law_for_every_cutting(text, stops, cuts):
    shown, matcher = feed(stops, pieces_of(text, cuts))
    assert (shown, matcher.stop) == cut(text, stops)
    assert matcher.hit == (matcher.stop is not None)


@given(texts, stop_lists)
def test_only_what_may_become_a_stop_string_is_held_back(text, stops):
    matcher = StopMatcher(stops)
    shown = ""
    for end, character in enumerate(text, 1):
        shown += matcher.push(character)
        if matcher.hit:
            break
        held = text[len(shown) : end]
        beginnings = {stop[:n] for stop in stops for n in range(len(stop))} | {""}
        assert text[:end] == shown + held
        assert held == max((b for b in beginnings if text[:end].endswith(b)), key=len)


@pytest.mark.parametrize(
    "stops, text, shown, stop",
    [
        (["bc", "abcd"], "xabcd", "xa", "bc"),  # complete first
        (["c", "abc"], "xabc", "x", "abc"),  # complete together: the longest
        (["aab"], "aaab", "a", "aab"),  # a false start inside
        (["b", "b"], "ab", "a", "b"),
        ([], "ab", "ab", None),
        (["\U0001f600!"], "a\U0001f600", "a\U0001f600", None),  # held back, then the end
        ("END", "aEND", "a", "END"),  # one string is one stop string, not three letters
    ],
)
def test_overlapping_stop_strings(stops, text, shown, stop):
    got, matcher = feed(stops, list(text))
    assert (got, matcher.stop) == (shown, stop)


@pytest.mark.parametrize("stops", [[""], ["a", ""], "", [3]])
def test_an_empty_stop_string_is_refused(stops):
    if stops == "":
        stops = [stops]
    with pytest.raises(UsageError, match="at least one character"):
        StopMatcher(stops)
