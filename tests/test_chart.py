"""The picture: well-formed, self-contained, and what is measured is in it."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest

from spmoe_lite import bench as b
from spmoe_lite import chart
from spmoe_lite.timeline import Span, Timeline
from tests.test_bench import row

SVG = "{http://www.w3.org/2000/svg}"


def picture(rows, timelines=(), device="cpu"):
    result = b.Bench(rows, {}, 16, device, timelines=list(timelines))
    text = chart.draw(result, "mix <8x7b> & co", ["a remark"])
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "") and "prefers-color" in text
    return ET.fromstring(text)


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def test_bars_name_their_rows_and_are_as_long_as_their_times():
    root = picture([row("ours", 20, drafts=4), row("on-demand", 40)])
    found = texts(root)
    assert found[:2] == ["mix <8x7b> & co", "a remark"]
    assert {"ours, 8 slots, 4 drafts", "on-demand, 8 slots, no draft", "20.0", "40.0"} <= {*found}
    assert "ms a token" in found and "Time of a token (TPOT), over slots" not in found
    widths = [
        float(e.get("width")) for e in root.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None
    ]
    assert widths[1] == pytest.approx(2 * widths[0], abs=0.2)


def test_where_some_steps_are_captured_the_others_say_so():
    fast = dataclasses.replace(row("ours", 20), steps="captured")
    found = texts(
        picture([fast, dataclasses.replace(row("sp-moe", 40), steps="driven by the host")])
    )
    assert "20.0" in found and "40.0 host" in found and "where it says host" in found[3]


def test_several_numbers_of_slots_make_lines():
    rows = [
        row(p, ms, slots=n, asked=n) for p, ms in (("ours", 9), ("static", 20)) for n in (4, 8, 12)
    ]
    root = picture([*rows, row("all-resident", 5, slots=16, asked=16)])
    lines = [e.get("points").split() for e in root.iter(f"{SVG}polyline")]
    assert sorted(map(len, lines)) == [1, 3, 3]
    assert "experts in slots, of 16" in texts(root)
    bars = [t for t in texts(root) if t.endswith("no draft")]
    assert sorted(bars) == [
        "all-resident, 16 slots, no draft",
        "ours, 8 slots, no draft",
        "static, 8 slots, no draft",
    ]


def test_a_step_has_two_lanes_on_one_axis():
    spans = (Span("draft", 0, 2), Span("target", 2, 10), Span("wait", 3, 5), Span("demand", 3, 5))
    spans += (Span("wait", 7, 7.0001),)  # for nothing
    lines = [Timeline("ours", spans), Timeline("other", (*spans, Span("ahead", 9, 20)))]
    root = picture([row("ours", 20)], lines, device="cuda:0")
    found = texts(root)
    assert "ours: 10.0 ms" in found and "other: 20.0 ms" in found
    assert found.count("bus") == found.count("GPU") == 2
    tips = [e.text for e in root.iter(f"{SVG}title")]
    assert not any(tip.startswith("waiting for experts, 0.00") for tip in tips)
    assert "draft, 2.00 ms" in tips and "copy ahead, 11.00 ms" in tips
    assert all(float(e.get("x", 0)) >= 0 for e in root.iter(f"{SVG}rect"))


def test_nothing_measured_is_still_a_picture():
    silent = row("ours", 1, runs=None)
    assert picture([]) is not None and picture([silent]) is not None


@pytest.mark.parametrize("most", [0.003, 0.9, 7, 61, 12345])
def test_ticks_are_few_and_round(most):
    ticks = chart.Scale(most, 0, 100).ticks()
    assert 3 <= len(ticks) <= 7 and ticks[0] == 0 and ticks[-1] <= most * 1.0001
