"""The picture of a benchmark: one SVG file, nothing but text, that a browser shows in light or dark.

    TPOT by policy       a bar a row, its whiskers the least and the most of all answers
    TPOT over slots      a line a policy, each point its best row, where there are several numbers of slots
    one step             for each policy recorded, what the bus and the device did, on one axis of time

A page has one width; `Page` counts its height. Colours are those of Okabe and Ito, which most colour-blind
readers tell apart.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmoe_lite.bench import Bench, Row
    from spmoe_lite.timeline import Timeline

WIDTH, MARGIN, LABELS = 960, 24, 210
LEAST = 0.05  # of a span that is drawn: a wait for nothing has a length, too
COLOURS = {
    "ours": "#0072b2",
    "on-demand": "#e69f00",
    "global-lru": "#cc79a7",
    "next-layer": "#009e73",
    "trace-match": "#56b4e9",
    "static": "#b8a000",
    "sp-moe": "#d55e00",
    "all-resident": "#8c8c8c",
}
SPANS = {  # kind: (colour, what it is)
    "draft": ("#56b4e9", "draft"),
    "target": ("#009e73", "target"),
    "wait": ("#d55e00", "waiting for experts"),
    "demand": ("#e69f00", "copy that a layer asked for"),
    "ahead": ("#0072b2", "copy ahead"),
}
LANES = {"bus": ("demand", "ahead"), "device": ("draft", "target", "wait")}
STYLE = """
svg { font: 13px system-ui, sans-serif; } .back { fill: #fff; }
text { fill: #1a1a1a; } .dim { fill: #666; } .title { font-weight: 600; font-size: 16px; }
.axis { stroke: #999; } .grid { stroke: #e4e4e4; } .whisker { stroke: #1a1a1a; } .lane { fill: #f3f3f3; }
@media (prefers-color-scheme: dark) {
  .back { fill: #16181c; } text { fill: #e8e8e8; } .dim { fill: #a0a0a0; }
  .axis { stroke: #777; } .grid { stroke: #2e3238; } .whisker { stroke: #e8e8e8; } .lane { fill: #22262c; }
}
"""


def draw(result: Bench, title: str, remarks: Sequence[str] = ()) -> str:
    """The whole picture, an SVG document. Rows with an error, and those without a time, are left out."""
    page = Page()
    page.line(title, "title")
    for line in (line for remark in remarks for line in textwrap.wrap(remark, 130)):
        page.line(line, "dim")
    rows = [row for row in result.rows if row.error is None and row.tpot_ms]
    if rows:
        _bars(page, rows)
    if len({row.setting.slots for row in rows if row.setting.policy != "all-resident"}) > 1:
        _lines(page, rows, result.experts)
    if result.timelines:
        _timelines(page, result.timelines, result.device)
    return page.document()


@dataclass
class Page:
    """Elements from the top down; `y` is where the next one goes."""

    y: float = MARGIN
    parts: list[str] = field(default_factory=list)

    def add(self, tag: str, text: str = "", **attributes: object) -> None:
        names = (f'{name.replace("_", "-")}="{value}"' for name, value in attributes.items())
        self.parts.append(f"<{tag} {' '.join(names)}>{text}</{tag}>")

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        shown = html.escape(text)
        self.add("text", shown, x=_n(x), y=_n(y), text_anchor=anchor, **{"class": kind})

    def line(self, text: str, kind: str = "") -> None:
        """A line of text of its own."""
        self.y += 20
        self.text(MARGIN, self.y, text, kind)

    def rule(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add("line", x1=_n(x1), y1=_n(y1), x2=_n(x2), y2=_n(y2), **{"class": kind})

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, title: str = ""
    ) -> None:
        tip = f"<title>{html.escape(title)}</title>" if title else ""
        size = {"width": _n(max(width, 0.4)), "height": _n(height)}
        self.add("rect", tip, x=_n(x), y=_n(y), **size, fill=fill)

    def document(self) -> str:
        height = math.ceil(self.y + MARGIN)
        size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><style>{STYLE}</style>'
        back = '<rect width="100%" height="100%" class="back"></rect>'
        return "\n".join([head, back, *self.parts, "</svg>"]) + "\n"


class Scale:
    """Numbers from 0 on to places from `start` to `end`."""

    def __init__(self, most: float, start: float, end: float):
        self.step = _nice(most / 6)
        self.most = max(most, 1e-9)
        self._start, self._per = start, (end - start) / self.most

    def __call__(self, value: float) -> float:
        return self._start + value * self._per

    def ticks(self) -> list[float]:
        return [i * self.step for i in range(int(self.most / self.step + 1e-6) + 1)]


def _bars(page: Page, rows: Sequence[Row]) -> None:
    """Where several numbers of slots were asked for, those of one in the middle."""
    slots = {r.asked: r.setting.slots or 0 for r in rows if r.setting.policy != "all-resident"}
    asked = sorted(slots, key=lambda one: slots[one])
    shown = asked[len(asked) // 2] if asked else None
    rows = [r for r in rows if r.setting.policy == "all-resident" or r.asked == shown]
    page.y += 30
    page.line("Time of a token (TPOT), by policy", "title")
    mixed = len({row.steps for row in rows}) > 1
    how = " Steps are captured, but where it says host." if mixed else ""
    page.line(f"median of all answers; whiskers: least and most. Shorter is better.{how}", "dim")
    page.y += 14
    longest = max(row.tpot_ms[0] for row in rows if row.tpot_ms)
    whisker = max(row.tpot_ms[2] for row in rows if row.tpot_ms)
    scale = Scale(min(whisker, 1.6 * longest), MARGIN + LABELS, WIDTH - MARGIN - 90)
    bottom = page.y + 24 * len(rows)
    _axis_below(page, scale, page.y, bottom, "ms a token")
    for row in rows:
        assert row.tpot_ms is not None
        median, least, most = row.tpot_ms
        y, one = page.y, row.setting
        drafts = "no draft" if not one.draft_tokens else f"{one.draft_tokens} drafts"
        page.text(
            MARGIN + LABELS - 8,
            y + 15,
            f"{one.policy}, {one.slots} slots, {drafts}",
            anchor="end",
        )
        colour = COLOURS.get(one.policy, "#8c8c8c")
        page.box(scale(0), y + 3, scale(median) - scale(0), 16, colour, str(one))
        end = scale(min(most, scale.most))
        page.rule(scale(least), y + 11, end, y + 11, "whisker")
        by_host = " host" if mixed and row.steps != "captured" else ""
        page.text(max(end, scale(median)) + 6, y + 15, f"{median:.1f}{by_host}")
        page.y += 24
    page.y = bottom + 40


def _lines(page: Page, rows: Sequence[Row], experts: int) -> None:
    page.y += 20
    page.line("Time of a token (TPOT), over slots", "title")
    page.line("the best draft length of each policy; lower is better", "dim")
    page.y += 34
    points: dict[str, dict[int, float]] = {}
    for row in rows:
        if row.setting.slots is not None and row.tpot_ms is not None:
            best = points.setdefault(row.setting.policy, {})
            slots = row.setting.slots
            best[slots] = min(row.tpot_ms[0], best.get(slots, math.inf))
    height, left, right = 260, MARGIN + 60, WIDTH - MARGIN - 130
    top, bottom = page.y, page.y + height
    across = Scale(experts, left, right)
    up = Scale(1.05 * max(max(best.values()) for best in points.values()), bottom, top)
    for tick in up.ticks():
        page.rule(left, up(tick), right, up(tick), "grid")
        page.text(left - 8, up(tick) + 4, f"{tick:g}", "dim", "end")
    page.text(MARGIN, top - 10, "ms a token", "dim")
    _axis_below(page, across, bottom, bottom, f"experts in slots, of {experts}")
    ends: list[float] = []
    for policy, best in sorted(points.items(), key=lambda item: item[1][max(item[1])]):
        colour = COLOURS.get(policy, "#8c8c8c")
        places = [(across(slots), up(ms)) for slots, ms in sorted(best.items())]
        path = " ".join(f"{_n(x)},{_n(y)}" for x, y in places)
        page.add("polyline", points=path, fill="none", stroke=colour, stroke_width=2)
        for x, y in places:
            page.add("circle", cx=_n(x), cy=_n(y), r=3.5, fill=colour)
        x, y = places[-1]
        while any(abs(y - other) < 14 for other in ends):
            y -= 2  # labels do not cover each other
        ends.append(y)
        page.add("text", policy, x=_n(x + 8), y=_n(y + 4), style=f"fill: {colour}")
    page.y = bottom + 40


def _timelines(page: Page, timelines: Sequence[Timeline], device: str) -> None:
    page.y += 20
    page.line("One step of each policy", "title")
    page.line(
        "recorded after the measured rounds; of captured steps the passes are measured and the copies "
        "reckoned; the axis is the same for all",
        "dim",
    )
    page.y += 12
    x = float(MARGIN)
    for colour, what in SPANS.values():
        page.box(x, page.y, 12, 12, colour)
        page.text(x + 17, page.y + 11, what)
        x += 40 + 7.5 * len(what)
    page.y += 32
    names = {"bus": "bus", "device": "CPU" if device == "cpu" else "GPU"}
    scale = Scale(max(one.milliseconds for one in timelines), MARGIN + 60, WIDTH - MARGIN - 20)
    height = 66 * len(timelines)
    _axis_below(page, scale, page.y, page.y + height, "ms from the beginning of the step")
    for one in timelines:
        page.text(MARGIN + 60, page.y + 12, f"{one.label}: {one.milliseconds:.1f} ms")
        for lane, kinds in LANES.items():
            y = page.y + 18 + 21 * (lane == "device")
            page.text(MARGIN + 52, y + 13, names[lane], "dim", "end")
            page.add(
                "rect",
                x=_n(scale(0)),
                y=_n(y),
                width=_n(scale(one.milliseconds) - scale(0)),
                height=18,
                **{"class": "lane"},
            )
            for kind in kinds:  # a wait is drawn over the pass that waits
                for span in (span for span in one.spans if span.kind == kind):
                    tip = f"{SPANS[kind][1]}, {span.end - span.begin:.2f} ms"
                    width = scale(span.end) - scale(span.begin)
                    if width >= LEAST:
                        page.box(scale(span.begin), y, width, 18, SPANS[kind][0], tip)
        page.y += 66
    page.y += 40


def _axis_below(page: Page, scale: Scale, top: float, bottom: float, title: str) -> None:
    """Ticks of a scale that goes across, under `bottom`, with lines up to `top`."""
    for tick in scale.ticks():
        page.rule(scale(tick), top, scale(tick), bottom + 4, "grid" if top < bottom else "axis")
        page.text(scale(tick), bottom + 18, f"{tick:g}", "dim", "middle")
    page.rule(scale(0), bottom, scale(scale.most), bottom, "axis")
    page.text(scale(scale.most), bottom + 34, title, "dim", "end")


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(step, 1e-9)))
    choices: Iterable[float] = (power, 2 * power, 5 * power, 10 * power)
    return next(one for one in choices if one >= step * (1 - 1e-9))


def _n(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")
