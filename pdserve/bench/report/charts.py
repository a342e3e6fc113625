"""Charts as values: series over two axes with bands and lines, or tracks of coloured segments.

Each is in the units that its axes name. `charts.js` draws them in the page, with uPlot (in
`uplot/`). Knows no request and no deployment.
"""

from __future__ import annotations

import enum
import html
from collections.abc import Sequence
from typing import Final

import msgspec

Place = tuple[float, float]

NUM_COLOURS: Final = 8
"""Deployments that get a colour of their own; further ones begin again."""


class Marks(enum.Enum):
    """How a series is drawn; a cloud is many small dots."""

    LINE = "line"
    LINE_AND_DOTS = "line and dots"
    DOTS = "dots"
    CLOUD = "cloud"


class Series(msgspec.Struct, frozen=True, kw_only=True):
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
    points: Sequence[Place]
    marks: Marks = Marks.LINE
    tips: Sequence[str] = ()
    bars: Sequence[Place] = ()
    hollow: Sequence[int] = ()
    is_dashed: bool = False


class Band(msgspec.Struct, frozen=True):
    """A shaded part of the x axis."""

    start: float
    end: float
    tip: str


class Rule(msgspec.Struct, frozen=True):
    """A line across the chart at a value of the y axis."""

    value: float
    text: str


class Marker(msgspec.Struct, frozen=True):
    """A line up the chart at a value of the x axis, in a series' colour."""

    value: float
    tip: str
    colour: int


class Track(msgspec.Struct, frozen=True, kw_only=True):
    """One row of pieces.

    Attributes:
        pieces: Name of a stage, and from where to where on the x axis.
        name: Beside it; of all tracks of a chart, or of none.
        tip: What the tooltip of a piece says first; empty says the name.
        note: Behind its last piece.
    """

    pieces: Sequence[tuple[str, float, float]]
    name: str = ""
    tip: str = ""
    note: str = ""


class Scale(msgspec.Struct, frozen=True):
    """What an axis says and which values it shows.

    Attributes:
        label: With the unit.
        is_log: By powers of ten.
        ends: It shows these, rounded outwards if by powers of ten; None fits the values, from 0
            on if not by powers of ten.
    """

    label: str
    is_log: bool = False
    ends: Place | None = None


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """One chart; it has either series or tracks.

    Attributes:
        title: For those who cannot see it, as `description`.
        y: Not shown beside tracks.
        rules, markers, bands: Across, up, and behind the series.
        tracks: From top to bottom.
        height: Of a chart of series, in CSS pixels; tracks take what they need.
    """

    title: str
    description: str
    x: Scale
    y: Scale = Scale("")
    series: Sequence[Series] = ()
    bands: Sequence[Band] = ()
    rules: Sequence[Rule] = ()
    markers: Sequence[Marker] = ()
    tracks: Sequence[Track] = ()
    height: int = 300
    has_legend: bool = True


def markup(chart: Chart) -> str:
    """The element that `charts.js` draws the chart in."""
    values = msgspec.json.encode(_short(msgspec.to_builtins(chart))).decode()
    inert = values.replace("<", "\\u003c")  # nothing in it ends the element
    label = html.escape(f"{chart.title}: {chart.description}")
    return (
        f'<div class="chart" role="img" aria-label="{label}">'
        f'<script type="application/json">{inert}</script></div>'
    )


def _short(value: object) -> object:
    """Round to six significant digits, which no eye can tell from more."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case list() | tuple():
            return [_short(each) for each in value]
        case dict():
            return {name: _short(each) for name, each in value.items()}
        case _:
            return value


def stacked(name: str, pieces: Sequence[tuple[str, float]], *, note: str = "") -> Track:
    """Pieces of these lengths, one after the other from 0 on."""
    found, at = [], 0.0
    for stage, length in pieces:
        if length > 0:
            found.append((stage, at, at + length))
            at += length
    return Track(pieces=found, name=name, note=note)
