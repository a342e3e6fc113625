"""Kinds of charts: lines and dots over two axes with spans and rules, bars, timelines.

Each takes values in the units that its axes name and returns one SVG. Knows no request and
no deployment.
"""

from __future__ import annotations

import enum
import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from pdserve.bench.report import svg
from pdserve.bench.report.scale import (
    Scale,
    exactly,
    linear,
    linear_ticks,
    logarithmic,
    number,
    tick_label,
)

Point = tuple[float, float]

WIDTH: Final = 560
HEIGHT: Final = 320
_LEFT: Final = 62
_RIGHT: Final = 18
_BOTTOM: Final = 46
_LEGEND_ROW: Final = 20
_LETTER: Final = 6.4
"""Width of a letter of 12 pixels, on average; for what must not overlap."""


class Marks(enum.Enum):
    """How a series is drawn."""

    LINE = "line"
    LINE_AND_DOTS = "line and dots"
    DOTS = "dots"
    CLOUD = "cloud"
    """Many dots as one element, without tooltips."""


@dataclass(frozen=True, slots=True)
class Series:
    """Values of one thing.

    Attributes:
        name: In the legend.
        colour: Index of its colour.
        tips: What each point's tooltip says; empty says its values.
        bars: For each point the lowest and highest of what it stands for; may be empty.
        hollow: Indexes of points that are drawn hollow: their values are doubtful.
        is_dashed: Its line.
    """

    name: str
    colour: int
    points: Sequence[Point]
    marks: Marks = Marks.LINE
    tips: Sequence[str] = ()
    bars: Sequence[Point] = ()
    hollow: Sequence[int] = ()
    is_dashed: bool = False


@dataclass(frozen=True, slots=True)
class Span:
    """A shaded part of the x axis."""

    start: float
    end: float
    tip: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A line across the picture at a value of the y axis."""

    value: float
    text: str


@dataclass(frozen=True, slots=True)
class Post:
    """A line up the picture at a value of the x axis, in a series' colour."""

    value: float
    text: str
    colour: int


@dataclass(frozen=True, slots=True)
class Axis:
    """What an axis says and which values it shows.

    Attributes:
        label: With the unit.
        is_log: By powers of ten.
        ends: Exactly these; None fits the values.
        format: Of the ticks.
    """

    label: str
    is_log: bool = False
    ends: Point | None = None
    format: Callable[[float], str] = tick_label

    def scale(self, values: Sequence[float], start: float, end: float) -> Scale:
        """The scale that shows `values`."""
        if self.ends is not None and not self.is_log:
            return exactly(*self.ends, start, end)
        if self.is_log:
            return logarithmic(self.ends or values, start, end)
        return linear(values, start, end)


@dataclass(frozen=True, slots=True)
class Frame:
    """Everything about a chart but its values."""

    title: str
    description: str
    x: Axis
    y: Axis
    width: int = WIDTH
    height: int = HEIGHT
    has_legend: bool = True


def xy(
    frame: Frame,
    series: Sequence[Series],
    *,
    spans: Sequence[Span] = (),
    rules: Sequence[Rule] = (),
    posts: Sequence[Post] = (),
) -> str:
    """Series over two axes; spans lie behind them, rules across and posts up the picture."""
    entries = [Entry(one.name, f"c{one.colour}") for one in series] if frame.has_legend else []
    keys, top = legend(entries, frame.width)
    right, bottom = frame.width - _RIGHT, frame.height - _BOTTOM
    points = [point for one in series for point in one.points]
    heights = [y for _, y in points] + [end for one in series for bar in one.bars for end in bar]
    x = frame.x.scale([x for x, _ in points], _LEFT, right)
    y = frame.y.scale([*heights, *(rule.value for rule in rules)], bottom, top)
    parts = [*keys]
    for span in spans:
        start, end = x(span.start), x(span.end)
        if end > start:
            parts.append(
                svg.element(
                    "rect",
                    svg.tooltip(span.tip),
                    class_="span",
                    x=start,
                    y=top,
                    width=max(0.8, end - start),
                    height=bottom - top,
                )
            )
    parts += _grid(frame, x, y, (top, bottom, right))
    parts += [_post(post, x(post.value), (top, bottom)) for post in posts]
    for one in series:
        parts += _series(one, x, y)
    for rule in rules:
        parts.append(
            svg.element(
                "line", class_="rule", x1=_LEFT, x2=right, y1=y(rule.value), y2=y(rule.value)
            )
        )
        above = y(rule.value) - 5 if y(rule.value) - top > 16 else y(rule.value) + 14
        parts.append(svg.label(rule.text, right - 4, above, class_="rule", anchor="end"))
    return svg.picture(frame.title, frame.description, frame.width, frame.height, parts)


def _post(post: Post, at: float, ends: tuple[float, float]) -> str:
    top, bottom = ends
    return svg.element(
        "line",
        svg.tooltip(post.text),
        class_=f"post c{post.colour}",
        x1=at,
        x2=at,
        y1=top,
        y2=bottom,
    )


def _series(one: Series, x: Scale, y: Scale) -> list[str]:
    colour = f"c{one.colour}"
    places = [(x(px), y(py)) for px, py in one.points]
    if one.marks is Marks.CLOUD:
        return [svg.dots(places, colour)]
    parts = []
    if one.marks in (Marks.LINE, Marks.LINE_AND_DOTS) and len(places) > 1:
        parts.append(svg.polyline(places, f"{colour} dashed" if one.is_dashed else colour))
    if one.marks is Marks.LINE:
        return parts
    for (px, _), (low, high) in zip(places, one.bars, strict=False):
        if high > low:
            parts.append(
                svg.element("line", class_=f"bar {colour}", x1=px, x2=px, y1=y(low), y2=y(high))
            )
    for index, (px, py) in enumerate(places):
        vx, vy = one.points[index]
        tip = one.tips[index] if one.tips else f"{one.name}: {number(vx)}, {number(vy)}"
        parts.append(
            svg.element(
                "circle",
                svg.tooltip(tip),
                class_=f"hollow {colour}" if index in one.hollow else f"dot {colour}",
                cx=px,
                cy=py,
                r=4.0,
            )
        )
    return parts


def _grid(frame: Frame, x: Scale, y: Scale, box: tuple[float, float, float]) -> list[str]:
    """Lines at the ticks, their labels, and what the axes say."""
    top, bottom, right = box
    parts = []
    for value in y.ticks:
        parts.append(
            svg.element("line", class_="grid", x1=_LEFT, x2=right, y1=y(value), y2=y(value))
        )
        parts.append(svg.label(frame.y.format(value), _LEFT - 7, y(value) + 4, anchor="end"))
    last = -math.inf
    for value in x.ticks:
        text = frame.x.format(value)
        if x(value) - last < len(text) * _LETTER + 8:
            continue
        last = x(value)
        parts.append(svg.element("line", class_="grid", x1=last, x2=last, y1=bottom, y2=bottom + 4))
        parts.append(svg.label(text, last, bottom + 17, anchor="middle"))
    parts.append(svg.element("line", class_="axis", x1=_LEFT, x2=right, y1=bottom, y2=bottom))
    middle = (_LEFT + right) / 2
    parts.append(svg.label(frame.x.label, middle, frame.height - 8, class_="name", anchor="middle"))
    at = (top + bottom) / 2
    parts.append(
        svg.element(
            "text",
            html.escape(frame.y.label),
            class_="name",
            text_anchor="middle",
            transform=f"translate(13 {svg.place(at)}) rotate(-90)",
        )
    )
    return parts


# --- the legend


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a legend: its name and the class of its colour."""

    name: str
    colour: str


def legend(entries: Sequence[Entry], width: int, left: float = _LEFT) -> tuple[list[str], float]:
    """Coloured marks with names, in as many rows as they need; and the height they take."""
    parts: list[str] = []
    x, y = float(left), 14.0
    for entry in entries:
        wide = 18 + len(entry.name) * _LETTER + 16
        if x > left and x + wide > width - _RIGHT:
            x, y = left, y + _LEGEND_ROW
        parts.append(
            svg.element(
                "rect", class_=f"key {entry.colour}", x=x, y=y - 9, width=11, height=11, rx=3.0
            )
        )
        parts.append(svg.label(shown_name(entry.name), x + 17, y, class_="legend"))
        x += wide
    return parts, (y + 14 if entries else 10.0)


# --- bars


@dataclass(frozen=True, slots=True)
class Bar:
    """One row of stacked pieces, from 0 on.

    Attributes:
        pieces: Name, value; drawn in order.
        note: Behind the bar.
    """

    name: str
    pieces: Sequence[tuple[str, float]]
    note: str = ""


def stacked_bars(
    title: str, description: str, bars: Sequence[Bar], *, unit: str, width: int = WIDTH * 2
) -> str:
    """Rows of stacked pieces, coloured by the pieces' names."""
    names = list(dict.fromkeys(name for bar in bars for name, value in bar.pieces if value > 0))
    longest = max((len(bar.name) for bar in bars), default=0)
    left = longest * _LETTER + 16
    notes = max((len(bar.note) for bar in bars), default=0) * _LETTER + 10
    keys, top = legend([Entry(name, stage_class(name)) for name in names], width, left)
    row = 34
    bottom = top + row * len(bars)
    total = max((sum(value for _, value in bar.pieces) for bar in bars), default=0.0)
    x = exactly(0.0, total or 1.0, left, width - notes - 8)
    parts = [*keys]
    for value in linear_ticks(0.0, total or 1.0, 8):
        parts.append(
            svg.element("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom)
        )
        parts.append(svg.label(tick_label(value), x(value), bottom + 17, anchor="middle"))
    for index, bar in enumerate(bars):
        y = top + index * row
        parts.append(svg.label(bar.name, left - 10, y + 21, class_="legend", anchor="end"))
        at = 0.0
        for name, value in bar.pieces:
            if value <= 0:
                continue
            parts.append(
                svg.element(
                    "rect",
                    svg.tooltip(f"{bar.name}: {shown_name(name)} {number(value)} {unit}"),
                    class_=f"piece {stage_class(name)}",
                    x=x(at),
                    y=y + 6,
                    width=max(0.5, x(at + value) - x(at)),
                    height=row - 12,
                )
            )
            at += value
        parts.append(svg.label(bar.note, x(at) + 8, y + 21, class_="legend"))
    parts.append(svg.element("line", class_="axis", x1=left, x2=left, y1=top, y2=bottom))
    middle = (left + width - notes) / 2
    parts.append(svg.label(unit, middle, bottom + 36, class_="name", anchor="middle"))
    return svg.picture(title, description, width, round(bottom + 44), parts)


def shown_name(name: str) -> str:
    """A stage's name, which servers write with underscores."""
    return name.replace("_", " ")


def stage_class(name: str) -> str:
    """The class that colours a stage, made of its name."""
    return "s-" + "".join(letter if letter.isalnum() else "-" for letter in name.lower())


# --- timelines


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of a timeline: pieces from-to in the axis' unit, with their stages' names."""

    tip: str
    pieces: Sequence[tuple[str, float, float]] = field(default=())


def timeline(
    title: str, description: str, lanes: Sequence[Lane], *, end: float, width: int = WIDTH * 2
) -> str:
    """Rows of pieces over time, the first row on top."""
    names = list(dict.fromkeys(name for lane in lanes for name, _, _ in lane.pieces))
    keys, top = legend([Entry(name, stage_class(name)) for name in names], width, 12.0)
    row = max(3.0, min(14.0, 420 / max(1, len(lanes))))
    bottom = top + row * len(lanes)
    x = exactly(0.0, end, 12.0, width - _RIGHT)
    parts = [*keys]
    for value in linear_ticks(0.0, x.high, 12):
        parts.append(
            svg.element("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom)
        )
        parts.append(svg.label(tick_label(value), x(value), bottom + 16, anchor="middle"))
    for index, lane in enumerate(lanes):
        y = top + index * row
        pieces = "".join(
            svg.element(
                "rect",
                class_=f"piece {stage_class(name)}",
                x=x(start),
                y=y + row * 0.1,
                width=max(0.6, x(stop) - x(start)),
                height=row * 0.8,
            )
            for name, start, stop in lane.pieces
        )
        parts.append(svg.element("g", svg.tooltip(lane.tip), pieces))
    parts.append(svg.label("s", width / 2, bottom + 34, class_="name", anchor="middle"))
    return svg.picture(title, description, width, round(bottom + 42), parts)
