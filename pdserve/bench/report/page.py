"""The report: one HTML page with table, words, pictures and commands; it asks nobody for anything.

No reference to another file: what it says and shows stands in it. Knows no endpoint; takes all
figures from a `Comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.bench.compare import verdict
from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import Figure, Ratio, Row, Value, has_steady, rows
from pdserve.bench.digits import number
from pdserve.bench.report.distributions import cdfs
from pdserve.bench.report.document import bullets, document, figure, text, two_columns
from pdserve.bench.report.over_rate import latency_over_rate, pareto, rate_matched
from pdserve.bench.report.over_time import itl_over_time, timelines
from pdserve.bench.report.picture import Picture, colours
from pdserve.bench.report.stages import stages


def render(comparison: Comparison) -> str:
    """Return the whole page."""
    rate = chosen_rate(comparison)
    parts = [
        f"<h1>{text(comparison.title)}</h1>",
        f'<p class="soft">{text(_subtitle(comparison))}</p>',
        _facts(comparison, rate),
        *_tables(comparison),
        "<h2>What the figures say</h2>",
        bullets(_said(comparison, rate)),
        "<h2>What they cannot say</h2>",
        bullets(verdict.caveats(comparison)),
        "<h2>Pictures</h2>",
        f'<div class="grid2">{"".join(map(figure, pictures(comparison, rate)))}</div>',
        "<h2>Deployments</h2>",
        _deployments(comparison),
        "<h2>To repeat it</h2>",
        f"<pre>{text(comparison.command)}</pre>" if comparison.command else "",
        two_columns(comparison.environment),
    ]
    return document(comparison.title, parts)


def chosen_rate(comparison: Comparison) -> float | None:
    """The rate whose single runs are shown: the highest at which no request of ours failed."""
    rates = comparison.request_rates
    for rate in reversed(rates):
        if all(row.num_failed == 0 for row in rows(comparison, rate)):
            return rate
    return rates[0]


def pictures(comparison: Comparison, rate: float | None) -> list[Picture]:
    """All pictures there is data for; those of single runs show `rate`."""
    found = [
        itl_over_time(comparison, rate),
        *cdfs(comparison, rate),
        *latency_over_rate(comparison),
        pareto(comparison),
        stages(comparison, rate),
        *timelines(comparison, rate),
        rate_matched(comparison, rate),
    ]
    return [picture for picture in found if picture is not None]


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
    doubts = "".join(f'<p class="bad">Not valid: {text(why)}</p>' for why in found.why_not)
    return f'<div class="lead">{"".join(cards)}</div>{doubts}'


def _card(row: Row, figure: Figure, base: Row, ratio: Ratio) -> str:
    if not (row.is_valid and base.is_valid):
        tone, word = "", "better, not valid" if ratio.median > 1 else "worse, not valid"
    elif verdict.is_within_noise(ratio):
        tone, word = "", "no clear difference"
    elif ratio.median > 1:
        tone, word = " good", "better"
    else:
        tone, word = " bad", "worse"
    times = max(ratio.median, 1 / ratio.median)
    return (
        f'<div class="fact{tone}"><span>{text(figure.title)}, {text(row.label)}</span>'
        f"<b>{number(times)} × <i>{word}</i></b>"
        f"<span>{number(row.values[figure].median)} {figure.unit}</span>"
        f"<span>{text(base.label)}: {number(base.values[figure].median)} {figure.unit}</span>"
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
        parts += [f"<h2>{text(title)}</h2>", _table(comparison, rows(comparison, rate))]
    parts.append(f'<p class="soft">{text(_legend(comparison))}</p>')
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
        f"<th>{text(figure.title)}<small>{text(figure.unit)}</small></th>" for figure in figures
    )
    chosen = colours(comparison)
    body = []
    for row in table:
        notes = [f"{row.num_requests} requests"]
        if row.num_failed:
            notes.append(f"{row.num_failed} failed")
        if row.is_behind:
            notes.append("fell behind the schedule")
        if not row.is_valid:
            notes.append("not valid")
        if row.label == comparison.baseline:
            notes.append("baseline")
        tone = "bad" if row.num_failed or row.is_behind or not row.is_valid else ""
        name = (
            f'<th><i class="swatch c{chosen[row.label]}"></i>{text(row.label)}'
            f'<small class="{tone}">{text(", ".join(notes))}</small></th>'
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
        commands = f"<pre>{text(chr(10).join(each.commands))}</pre>" if each.commands else ""
        body.append(
            f"<h3>{text(each.label)}</h3><p class='soft'>{text(each.words)}"
            f"{'; ' if ready else ''}{ready}</p>{commands}"
        )
    return "".join(body)
