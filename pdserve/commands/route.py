"""`pdserve route`: show why requests went where they did, and what another policy would do.

Asks a proxy for its records. What is computed from them is computed here, with the proxy's own
functions.
"""

from __future__ import annotations

import statistics
import time
import urllib.parse
from typing import TYPE_CHECKING, Final

import msgspec

from pdserve.commands.asking import asked
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED
from pdserve.config.load import build
from pdserve.config.policies import read_policy
from pdserve.config.route import RouteConfig
from pdserve.errors import ConfigError, PdserveError, PeerError
from pdserve.observe.tables import aligned
from pdserve.proxy.brain.decision import repeated
from pdserve.proxy.brain.record import DecisionsShown, chosen_by
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from pdserve.config.load import Resolved, Table
    from pdserve.proxy.brain.question import PairCost
    from pdserve.proxy.brain.record import DecisionRecord
    from pdserve.proxy.brain.work import ServiceTimes

_PATH: Final = "/debug/decisions"
_TERMS: Final = ("ttft", "itl", "wire", "harm", "bias")
_NUM_SHOWN: Final = 10


def run_explain(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve route explain`; it fails if a decision does not follow from its record.

    Raises:
        PdserveError: There is no such record, or the proxy cannot be reached.
    """
    config = build("route", RouteConfig, table, resolved)
    if not config.requests:
        raise ConfigError(
            "ID is missing: run pdserve route explain ID... with the X-Request-Id of an answer, "
            "which also begins the request's log line",
            param="requests",
        )
    are_equal = True
    for name in config.requests:
        shown = fetch(config, f"?request={urllib.parse.quote(name, safe='')}")
        if not shown.decisions:
            raise PdserveError(
                f"no decision about {name!r} is kept: the proxy keeps the last 1024, of requests "
                "whose prompt it has read and whose costs it could predict"
            )
        record = shown.decisions[0]
        is_equal = repeated(record.decision) == record.decision
        are_equal = are_equal and is_equal
        print("\n".join(explained(record, is_equal=is_equal, now_s=time.time())))
    return EXIT_DONE if are_equal else EXIT_FAILED


def run_compare(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve route compare`.

    Raises:
        PdserveError: There is nothing to compare, or the proxy cannot be reached.
    """
    config = build("route", RouteConfig, table, resolved)
    records = fetch(config, f"?limit={config.limit}").decisions
    if not records:
        raise PdserveError("no decisions are kept yet: send requests, from which the proxy learns")
    print("\n".join(compared(records, config.policy)))
    return EXIT_DONE


def fetch(config: RouteConfig, query: str) -> DecisionsShown:
    """Ask the proxy for decisions.

    Raises:
        PeerError: It cannot be reached, records no decisions, or has another version.
        ConfigError: It requires another API key.
    """
    body = asked(config.url, _PATH + query, config.api_keys)
    try:
        return msgspec.json.decode(body, type=DecisionsShown)
    except UNREADABLE as error:
        raise PeerError(
            f"{config.url}{_PATH} did not answer as this version of pdserve does: {error}"
        ) from error


def explained(record: DecisionRecord, *, is_equal: bool, now_s: float) -> list[str]:
    """Return a decision as a table, with its outcome."""
    decision, question = record.decision, record.decision.question
    chosen, other = decision.chosen, decision.other
    costs = [chosen] if other is None else [chosen, other]
    kind = "one engine" if chosen.is_local else "split"
    terms: list[Sequence[str]] = [
        ("", *["chosen", "else"][: len(costs)]),
        ("", *[each.way for each in costs]),
        ("first token, ms", *[_ms(each.ttft_s) for each in costs]),
        *((f"  {name}", *[_ms(each.ttft[name]) for each in costs]) for name in chosen.ttft),
        ("  nine in ten within", *[_around(each, question.times) for each in costs]),
        ("between tokens, ms", *[_ms(each.itl_s) for each in costs]),
        ("wire, ms", *[_ms(each.wire_s) for each in costs]),
        ("cost, objectives", *[f"{each.total:.4f}" for each in costs]),
        *((f"  {name}", *[f"{each.terms[name]:.4f}" for each in costs]) for name in _TERMS),
    ]
    lines = [
        (
            f"request {record.request_id}, {question.num_tokens} prompt tokens, "
            f"{max(0.0, now_s - record.at_s):.0f} s ago: {kind}, because {decision.reason}"
        ),
        "",
        *aligned(terms),
    ]
    slo = f"{question.ttft_slo_s * 1e3:.0f} ms, then {question.itl_slo_s * 1e3:.0f} ms"
    lines += ["", f"objectives {slo}; a split must be better by {decision.margin:.4f}"]
    if question.was_split is not None:
        lines.append(f"its session's last request was {'' if question.was_split else 'not '}split")
    engines: list[Sequence[str]] = [
        ("engine", "role", "has", "prompts", "to compute", "streams", "their KV", "of others")
    ]
    for each in question.candidates:
        role = {(True, False): "prefill", (False, True): "decode"}.get(
            (each.is_prefill, each.is_decode), "both"
        )
        work = each.work
        numbers = (work.num_prompts, work.prompt_tokens, work.num_streams, work.kv_tokens)
        cells = map(str, (role, each.hit_tokens, *numbers, each.num_others))
        engines.append((each.url, *cells))
    lines += ["", *aligned(engines), "", *_outcome(record)]
    same = (
        "identical, bit for bit"
        if is_equal
        else "DIFFERENT: check that this is the proxy's release"
    )
    return [*lines, f"decided again from its record: {same}"]


def compared(records: Sequence[DecisionRecord], policy: str) -> list[str]:
    """Return how another policy's choices differ, as predicted when each request arrived."""
    name, split = read_policy(policy)
    pairs = [(each, chosen_by(name, split, each.decision.question, each.seq)) for each in records]
    ours = [each.decision.chosen for each, _ in pairs]
    theirs = [cost for _, cost in pairs]
    differing = [pair for pair in pairs if pair[0].decision.chosen.way != pair[1].way]
    lines = [
        (
            f"{policy} would have sent {len(differing)} of {len(pairs)} requests elsewhere "
            "(predicted from what was known when each came)"
        ),
        "",
        *aligned(
            [
                ("", "as decided", policy),
                *((title, of(ours), of(theirs)) for title, of in _FIGURES.items()),
            ]
        ),
    ]
    worst = sorted(differing, key=lambda pair: pair[1].total - pair[0].decision.chosen.total)
    largest: list[Sequence[str]] = [("largest differences", "as decided", policy, "cost")]
    for record, cost in reversed(worst[-_NUM_SHOWN:]):
        chosen = record.decision.chosen
        change = f"{cost.total - chosen.total:+.4f}"
        largest.append((record.request_id, chosen.way, cost.way, change))
    return [*lines, "", *aligned(largest)] if worst else lines


def _outcome(record: DecisionRecord) -> list[str]:
    measured, chosen = record.measured, record.taken or record.decision.chosen
    if measured is None:
        return ["its outcome is unknown: it is running, it failed, or its client left"]
    if record.decision.question.is_shadow and record.taken is None:
        return ["it went to none of these engines"]
    lines = (
        []
        if record.taken is None
        else [f"in shadow mode: it went {chosen.way} at a cost of {chosen.total:.4f}"]
    )
    for title, was_s, predicted_s in (
        ("first token", measured.ttft_s, chosen.ttft_s),
        ("between tokens", measured.itl_s, chosen.itl_s),
        ("wire", measured.wire_s, chosen.wire_s),
    ):
        if was_s is not None:
            off = was_s / max(1e-9, predicted_s) - 1
            lines.append(f"{title} was {_ms(was_s)} ms, predicted {_ms(predicted_s)} ({off:+.0%})")
    return lines


_FIGURES: Final[Mapping[str, Callable[[Sequence[PairCost]], str]]] = {
    "split": lambda costs: f"{statistics.mean(not each.is_local for each in costs):.0%}",
    "first token, ms: mean": lambda costs: _ms(statistics.mean(each.ttft_s for each in costs)),
    "first token, ms: max": lambda costs: _ms(max(each.ttft_s for each in costs)),
    "between tokens, ms": lambda costs: _ms(statistics.mean(each.itl_s for each in costs)),
    "cost, objectives": lambda costs: f"{statistics.mean(each.total for each in costs):.4f}",
}


def _around(cost: PairCost, times: ServiceTimes) -> str:
    """Return the times between which nine in ten first tokens came, predicted like this one."""
    apart_s = cost.ttft_s * times.first_band
    return f"{_ms(max(0.0, cost.ttft_s - apart_s))} to {_ms(cost.ttft_s + apart_s)}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"
