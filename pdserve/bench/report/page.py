"""The report: one HTML page with table, words, pictures and commands; it asks nobody for anything.

No script and no reference to another file: what it says and shows stands in it. Knows no
endpoint; takes all figures from a `Comparison`.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from pdserve.bench.compare import verdict
from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import Figure, Ratio, Row, Value, has_steady, rows
from pdserve.bench.report.pictures import Picture, colours, pictures
from pdserve.bench.report.scale import number
from pdserve.bench.report.style import stylesheet


def render(comparison: Comparison) -> str:
    """Return the whole page."""
    rate = chosen_rate(comparison)
    parts = [
        f"<h1>{_text(comparison.title)}</h1>",
        f'<p class="soft">{_text(_subtitle(comparison))}</p>',
        _facts(comparison, rate),
        *_tables(comparison),
        "<h2>What the figures say</h2>",
        _list(_said(comparison, rate)),
        "<h2>What they cannot say</h2>",
        _list(verdict.caveats(comparison)),
        "<h2>Pictures</h2>",
        f'<div class="grid2">{"".join(map(_figure, pictures(comparison, rate)))}</div>',
        "<h2>Deployments</h2>",
        _deployments(comparison),
        "<h2>To repeat it</h2>",
        f"<pre>{_text(comparison.command)}</pre>" if comparison.command else "",
        _environment(comparison),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{_text(comparison.title)}</title><style>{stylesheet()}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def chosen_rate(comparison: Comparison) -> float | None:
    """The rate whose single runs are shown: the highest at which no request of ours failed."""
    rates = comparison.request_rates
    for rate in reversed(rates):
        if all(row.num_failed == 0 for row in rows(comparison, rate)):
            return rate
    return rates[0]


def _subtitle(comparison: Comparison) -> str:
    runs = [each.run for each in comparison.measured]
    arrivals = "; ".join(dict.fromkeys(run.arrivals for run in runs))
    dataset = "; ".join(dict.fromkeys(run.dataset for run in runs))
    num = max(each.repeat for each in comparison.measured) + 1
    when = comparison.environment.get("date", "")
    words = [dataset, arrivals, f"{num} run{'' if num == 1 else 's'} each", when]
    return " · ".join(word for word in words if word)


def _facts(comparison: Comparison, rate: float | None) -> str:
    """The figures that most people came for, in large type."""
    found = verdict.headline(comparison, rate)
    if found is None:
        return ""
    table = {row.label: row for row in rows(comparison, rate)}
    row = table[found.label]
    base = table[comparison.baseline]
    cards = [
        _card(row, figure, base, row.ratios[figure])
        for figure in (Figure.ITL_P99, Figure.TTFT_P50, Figure.TTFT_P99, Figure.THROUGHPUT)
        if figure in row.ratios
    ]
    return f'<div class="lead">{"".join(cards)}</div>'


def _card(row: Row, figure: Figure, base: Row, ratio: Ratio) -> str:
    if verdict.is_within_noise(ratio):
        tone, word = "", "no clear difference"
    elif ratio.median > 1:
        tone, word = " good", "better"
    else:
        tone, word = " bad", "worse"
    times = max(ratio.median, 1 / ratio.median)
    return (
        f'<div class="fact{tone}"><span>{_text(figure.title)}, {_text(row.label)}</span>'
        f"<b>{number(times)} × <i>{word}</i></b>"
        f"<span>{number(row.values[figure].median)} {figure.unit}</span>"
        f"<span>{_text(base.label)}: {number(base.values[figure].median)} {figure.unit}</span>"
        "</div>"
    )


def _said(comparison: Comparison, rate: float | None) -> list[str]:
    found = []
    best = verdict.headline(comparison, rate)
    if best is not None:
        found.append(f"{best.text}{verdict.goal_words(best)}.")
        if best.strictest is not None:
            found.append(verdict.strictest_words(best))
    for each in comparison.request_rates:
        at = f"At {each:g} requests/s: " if len(comparison.request_rates) > 1 else ""
        found += [at + sentence for sentence in verdict.sentences(comparison, each)]
    return found


# --- tables


def _tables(comparison: Comparison) -> list[str]:
    parts = []
    rates = comparison.request_rates
    for rate in rates:
        title = "Table" if len(rates) == 1 else f"Table: {rate:g} requests/s"
        parts += [f"<h2>{_text(title)}</h2>", _table(comparison, rows(comparison, rate))]
    parts.append(f'<p class="soft">{_text(_legend(comparison))}</p>')
    return parts


def _legend(comparison: Comparison) -> str:
    whose = (
        "ITL and TPOT are of the steady decoders, all else is of all requests. "
        if any(has_steady(each.run) for each in comparison.measured)
        else ""
    )
    slos = ", ".join(f"{slo.metric.value} ≤ {slo.limit_ms:g} ms" for slo in comparison.slos)
    good = f"Goodput counts requests that keep {slos}. " if slos else ""
    return (
        f"{whose}{good}× is how many times better than {comparison.baseline}; below 1 is worse. "
        "Small print: least and greatest over the runs."
    )


def _table(comparison: Comparison, table: Sequence[Row]) -> str:
    figures = [figure for figure in Figure if any(figure in row.values for row in table)]
    head = "".join(
        f"<th>{_text(figure.title)}<small>{_text(figure.unit)}</small></th>" for figure in figures
    )
    chosen = colours(comparison)
    body = []
    for row in table:
        notes = [f"{row.num_requests} requests"]
        if row.num_failed:
            notes.append(f"{row.num_failed} failed")
        if not row.is_valid:
            notes.append("client late: not valid")
        if row.label == comparison.baseline:
            notes.append("baseline")
        tone = "bad" if row.num_failed or not row.is_valid else ""
        name = (
            f'<th><i class="swatch c{chosen[row.label]}"></i>{_text(row.label)}'
            f'<small class="{tone}">{_text(", ".join(notes))}</small></th>'
        )
        cells = "".join(_cell(row.values.get(f), row.ratios.get(f)) for f in figures)
        body.append(f"<tr>{name}{cells}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr><th>deployment</th>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def _cell(value: Value | None, ratio: Ratio | None) -> str:
    if value is None:
        return "<td>–</td>"
    spread = ""
    if value.high > value.low:
        spread = f"<small>{number(value.low)} – {number(value.high)}</small>"
    times = ""
    if ratio is not None:
        tone = "" if verdict.is_within_noise(ratio) else "good" if ratio.median > 1 else "bad"
        times = f'<small class="{tone}">{number(ratio.median)} ×</small>'
    return f"<td>{number(value.median)}{times}{spread}</td>"


def _deployments(comparison: Comparison) -> str:
    body = []
    for each in comparison.deployments:
        ready = f"ready after {number(max(each.ready_s))} s at most" if each.ready_s else ""
        commands = f"<pre>{_text(chr(10).join(each.commands))}</pre>" if each.commands else ""
        body.append(
            f"<h3>{_text(each.label)}</h3><p class='soft'>{_text(each.words)}"
            f"{'; ' if ready else ''}{ready}</p>{commands}"
        )
    return "".join(body)


def _environment(comparison: Comparison) -> str:
    lines = "".join(
        f"<tr><th>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in comparison.environment.items()
    )
    return f'<div class="scroll"><table class="plain"><tbody>{lines}</tbody></table></div>'


# --- small parts


def _figure(picture: Picture) -> str:
    names = picture.names or [""] * len(picture.drawings)
    inner = "".join(
        (f'<p class="panel">{_text(name)}</p>' if name else "") + drawing
        for name, drawing in zip(names, picture.drawings, strict=True)
    )
    wide = ' class="wide"' if picture.is_wide else ""
    return (
        f'<figure id="{picture.anchor}"{wide}><h3>{_text(picture.title)}</h3>'
        f"<figcaption>{_text(picture.caption)}</figcaption>{inner}</figure>"
    )


def _list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{_text(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>"


def _text(text: str) -> str:
    return html.escape(text)
