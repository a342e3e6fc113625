"""The report: one HTML file with a page for each question, which loads nothing.

It refers to no other file. Knows no endpoint; all figures come from a `Comparison`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pdserve.bench.compare import verdict
from pdserve.bench.compare.result import Comparison
from pdserve.bench.compare.summary import Figure, Ratio, Row, Value, has_steady, rows
from pdserve.bench.digits import number
from pdserve.bench.report.distributions import cdfs
from pdserve.bench.report.document import (
    QuestionPage,
    bullets,
    document,
    figures,
    text,
    two_columns,
)
from pdserve.bench.report.over_rate import latency_over_rate, pareto, rate_matched
from pdserve.bench.report.over_time import itl_over_time, timelines
from pdserve.bench.report.picture import Picture, colours
from pdserve.bench.report.stages import stages

_PICTURED: Final = (
    (
        "stalls",
        "Does an answer stall?",
        ("itl-over-time", "itl-cdf", "itl-tail", "rate-itl-p99"),
    ),
    ("begin", "How soon does it begin?", ("ttft-cdf", "rate-ttft-p50", "rate-ttft-p99")),
    ("load", "How much can it take?", ("rate-tpot-p50", "pareto", "rate-matched")),
    ("where", "Where does the time go?", ("stages", "timeline")),
)
"""Questions that plots answer, with the anchors of each one's plots."""


def render(comparison: Comparison) -> str:
    """Return the whole file."""
    rate = chosen_rate(comparison)
    found = {picture.anchor: picture for picture in pictures(comparison, rate)}
    question = "Which is better?" if len(comparison.deployments) > 1 else "How good is it?"
    pages = [QuestionPage("answer", question, _answer(comparison, rate))]
    for page, question, anchors in _PICTURED:
        chosen = [found[anchor] for anchor in anchors if anchor in found]
        pages.append(QuestionPage(page, question, [figures(chosen)]))
    pages.append(QuestionPage("runs", "What was run?", _runs(comparison)))
    return document(comparison.title, _subtitle(comparison), pages)


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


def _answer(comparison: Comparison, rate: float | None) -> list[str]:
    """The key figures, their limits, and all other figures."""
    found = verdict.headline(comparison, rate)
    doubts = "" if found is None else _doubts(found)
    cards = "" if found is None else _cards(comparison, rate, found)
    said = _said(comparison, rate)
    words = f"<h3>What the figures say</h3>{bullets(said)}" if said else ""
    caveats = bullets(verdict.caveats(comparison))
    return [
        '<div class="beside">',
        f'<div class="figures">{cards}{doubts}</div>',
        f"<aside><h3>Limits of these figures</h3>{caveats}</aside>",
        f'<div class="said">{words}</div></div>',
        *_tables(comparison),
    ]


def _runs(comparison: Comparison) -> list[str]:
    """How to repeat the measurement."""
    command = f"<h3>To repeat it</h3><pre>{text(comparison.command)}</pre>"
    return [
        command if comparison.command else "",
        "<h3>Deployments</h3>",
        _deployments(comparison),
        "<h3>Measured on</h3>" if comparison.environment else "",
        two_columns(comparison.environment) if comparison.environment else "",
    ]


def _subtitle(comparison: Comparison) -> str:
    runs = [each.run for each in comparison.measured]
    arrivals = "; ".join(dict.fromkeys(run.arrivals for run in runs))
    dataset = "; ".join(dict.fromkeys(run.dataset for run in runs))
    sampling = "; ".join(dict.fromkeys(run.sampling for run in runs))
    num = max(each.repeat for each in comparison.measured) + 1
    when = comparison.environment.get("date", "")
    words = [dataset, arrivals, sampling, f"{num} run{'' if num == 1 else 's'} each", when]
    return " · ".join(word for word in words if word)


def _cards(comparison: Comparison, rate: float | None, found: verdict.Headline) -> str:
    table = {row.label: row for row in rows(comparison, rate)}
    row, base = table[found.label], table[comparison.baseline]
    cards = [
        _card(row, figure, base, row.ratios[figure])
        for figure in (Figure.ITL_P99, Figure.TTFT_P50, Figure.TTFT_P99, Figure.THROUGHPUT)
        if figure in row.ratios
    ]
    return f'<div class="lead">{"".join(cards)}</div>'


def _doubts(found: verdict.Headline) -> str:
    return "".join(f'<p class="bad">Not valid: {text(why)}</p>' for why in found.why_not)


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
        title = "All figures" if rate is None else f"All figures at {rate:g} requests/s"
        parts += [f"<h3>{text(title)}</h3>", _table(comparison, rows(comparison, rate))]
    parts.append(f'<p class="soft">{text(_legend(comparison))}</p>')
    return parts


def _legend(comparison: Comparison) -> str:
    whose = (
        "ITL and TPOT cover the steady decoders, everything else all requests. "
        if any(has_steady(each.run) for each in comparison.measured)
        else ""
    )
    slos = ", ".join(f"{slo.metric.value} ≤ {slo.limit_ms:g} ms" for slo in comparison.slos)
    good = f"Goodput counts requests that meet {slos}. " if slos else ""
    return (
        f"{whose}{good}× is how many times better than {comparison.baseline}; below 1 is worse. "
        "Small print: lowest and highest over the runs."
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
        ready = f"ready after at most {number(max(each.ready_s))} s" if each.ready_s else ""
        commands = f"<pre>{text(chr(10).join(each.commands))}</pre>" if each.commands else ""
        body.append(
            f"<h4>{text(each.label)}</h4><p class='soft'>{text(each.words)}"
            f"{'; ' if ready else ''}{ready}</p>{commands}"
        )
    return "".join(body)
