"""The report of one or several sweeps: highest load of each, charts, all loads, explanations.

Knows no endpoint; all figures come from the sweeps.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from operator import itemgetter
from typing import Final

from pdserve.bench.digits import number
from pdserve.bench.report.document import (
    QuestionPage,
    bullets,
    document,
    figures,
    text,
    two_columns,
)
from pdserve.bench.report.sweep_pictures import (
    Drawn,
    axis_words,
    best_words,
    drawn_of,
    percent_words,
    pictures,
    values_of,
)
from pdserve.bench.sweep import COLUMNS, Point, Sweep
from pdserve.errors import ConfigError

_COLUMN_NAMES: Final = {"p99": "TTFT p99"}


_HOLDING: Final = ("kept", "answered", "tokens")
"""Anchors of the pictures of what a load yields; the others are of what users feel."""


def render_sweeps(sweeps: Sequence[Sweep]) -> str:
    """Return the whole file.

    Raises:
        ConfigError: The sweeps cannot share a plot, or no request in them was answered.
    """
    _check(sweeps)
    drawn = drawn_of(sweeps)
    found = pictures(drawn)
    tables = [part for each in drawn for part in _table(each)]
    return document(
        "pdserve bench sweep: " + ", ".join(dict.fromkeys(each.model for each in sweeps)),
        _subtitle(sweeps),
        [
            QuestionPage(
                "answer",
                "How much can it take?",
                [
                    _cards(drawn),
                    bullets(_said(drawn)),
                    figures([each for each in found if each.anchor in _HOLDING]),
                ],
            ),
            QuestionPage(
                "felt",
                "What do users feel at each load?",
                [figures([each for each in found if each.anchor not in _HOLDING])],
            ),
            QuestionPage("loads", "What was measured at each load?", tables),
            QuestionPage("runs", "Where was it measured?", [_measured_on(sweeps)]),
        ],
    )


def _check(sweeps: Sequence[Sweep]) -> None:
    first = sweeps[0]
    for each in sweeps[1:]:
        if each.axis != first.axis:
            raise ConfigError(
                f"the sweep of {each.label} varies {each.axis} and that of {first.label} varies "
                f"{first.axis}: plot them separately",
                param="files",
            )
        if (each.slo, each.share) != (first.slo, first.share):
            raise ConfigError(
                f"the sweep of {each.label} has the objectives {_slo_words(each)}, but that of "
                f"{first.label} has {_slo_words(first)}: plot them separately",
                param="files",
            )
    if not any(run["completed"] for each in sweeps for p in each.points for run in p.runs):
        raise ConfigError(
            "these sweeps contain no answered request, so there is nothing to plot: name other "
            "files",
            param="files",
        )


def _slo_words(sweep: Sweep) -> str:
    if not sweep.slo:
        return "none"
    limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in sweep.slo.items())
    return f"{limits} for {percent_words(sweep)} of the requests"


def _subtitle(sweeps: Sequence[Sweep]) -> str:
    words = ["; ".join(dict.fromkeys(each.dataset for each in sweeps))]
    if sweeps[0].slo:
        words.append(f"objectives: {_slo_words(sweeps[0])}")
    runs = dict.fromkeys(each.num_runs for each in sweeps)
    words.append(f"{' or '.join(map(str, runs))} run{'' if set(runs) == {1} else 's'} of each load")
    words.append(str(sweeps[0].environment.get("date", "")))
    return " · ".join(word for word in words if word)


def _cards(drawn: Sequence[Drawn]) -> str:
    """The highest load of each sweep, in large type."""
    cards = []
    for each in drawn:
        if not each.sweep.slo:
            continue
        best = each.sweep.best
        under = ""
        if best is not None:
            tokens = statistics.median(run["output_throughput"] for run in best.runs)
            under = f"{number(tokens)} output tokens/s there"
        shown, tone = best_words(each.sweep), " good" if best is not None else " bad"
        value = f"{number(best.load)} <i>{text(axis_words(each.sweep))}</i>" if best else "none"
        least = (
            "" if best is None or each.sweep.is_bracketed else "at least, the limit was not reached"
        )
        cards.append(
            f'<div class="fact{tone}" title="{text(shown)}"><span>highest load that holds, '
            f"{text(each.name)}</span><b>{value}</b><span>{text(least)}</span>"
            f"<span>{text(under)}</span></div>"
        )
    return f'<div class="lead">{"".join(cards)}</div>' if cards else ""


def _said(drawn: Sequence[Drawn]) -> list[str]:
    found = []
    for each in drawn:
        whose = f"{each.name}: " if len(drawn) > 1 else ""
        found += [whose + sentence for sentence in each.sweep.statements]
    return found or ["Without objectives (--slo) a sweep shows what each load does, and no more."]


def _table(each: Drawn) -> list[str]:
    names = ["runs", "done", "failed", *(_COLUMN_NAMES.get(name, name) for name, _, _ in COLUMNS)]
    names += ["kept"] if each.sweep.slo else []
    head = "".join(f"<th>{text(name)}</th>" for name in names)
    body = "".join(_row(each.sweep, point) for point in each.sweep.points)
    load = text(axis_words(each.sweep))
    table = f"<thead><tr><th>{load}</th>{head}</tr></thead><tbody>{body}</tbody>"
    legend = "Latencies in milliseconds. Medians over the runs; small print: least and greatest."
    return [
        f'<h3><i class="swatch c{each.colour}"></i>{text(each.name)}</h3>',
        f'<div class="scroll"><table>{table}</table></div>',
        f'<p class="soft">{legend}</p>',
    ]


def _row(sweep: Sweep, point: Point) -> str:
    failed = sum(run["failed"] for run in point.runs)
    notes = ['<small class="bad">not valid</small>'] if point.why_not else []
    if point == sweep.best:
        notes.append('<small class="good">highest that holds</small>')
    cells = [str(len(point.runs)), str(sum(run["completed"] for run in point.runs))]
    cells.append(f'{failed}<small class="bad">failed</small>' if failed else "0")
    for _, key, _ in COLUMNS:
        values = values_of(point, itemgetter(key))
        if not values:
            cells.append("–")
            continue
        low, high = min(values), max(values)
        spread = f"<small>{number(low)} – {number(high)}</small>" if high > low else ""
        cells.append(f"{number(statistics.median(values))}{spread}")
    if point.attainment is not None:
        tone, word = ("good", "holds") if point.holds else ("bad", "fails")
        cells.append(f'{point.attainment:.1%}<small class="{tone}">{word}</small>')
    inner = "".join(f"<td>{cell}</td>" for cell in cells)
    return f"<tr><th>{point.load:g}{''.join(notes)}</th>{inner}</tr>"


def _measured_on(sweeps: Sequence[Sweep]) -> str:
    """Facts about machine and endpoints; several values if the sweeps differ."""
    known = [{"endpoint": s.base_url, "seed": s.seed, **s.environment} for s in sweeps]
    names = dict.fromkeys(name for each in known for name in each)
    return two_columns(
        {
            name: "; ".join(dict.fromkeys(str(each[name]) for each in known if name in each))
            for name in names
        }
    )
