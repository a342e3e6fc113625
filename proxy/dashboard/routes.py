"""Why requests went where they did, as the dashboard draws it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.pairing import Pairing
    from pdserve.proxy.brain.prefixes import Prefixes
    from pdserve.proxy.brain.record import DecisionRecord

_NUM_SHOWN: Final = 100
_MAX_ENGINES: Final = 32


class RouteShown(msgspec.Struct, frozen=True, kw_only=True):
    """One decision; `measured_ms` is the time to first token, if the request ended well."""

    seq: int
    request_id: str
    is_split: bool
    reason: str
    predicted_ms: float
    measured_ms: float | None
    words: str


class WorkShown(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's work for this proxy, as predicted times.

    Attributes:
        home: Preferred role, under this load, of an engine that does both; empty if none.
        backlog_ms: Time until its prompts are computed.
        itl_ms: Time between two tokens of each stream; 0 without streams.
        lag_ms: Time since its last KV event batch; None if it publishes no KV events.
    """

    url: str
    home: str
    backlog_ms: float
    itl_ms: float
    num_prompts: int
    num_streams: int
    lag_ms: float | None


class RoutesShown(msgspec.Struct, frozen=True, kw_only=True):
    """The last decisions, newest first, and the engines as the next one will see them."""

    is_known: bool
    decisions: list[RouteShown]
    engines: list[WorkShown]


def routes_shown(
    pairing: Pairing | None, prefixes: Prefixes | None, engines: Iterable[Backend]
) -> RoutesShown | None:
    """Return the current decisions and work; None if the proxy does not choose pairs."""
    if pairing is None or prefixes is None:
        return None
    lags_s = prefixes.lags_s()
    shown = list(engines)[:_MAX_ENGINES]
    return RoutesShown(
        is_known=pairing.model.is_known,
        decisions=[_route(each) for each in pairing.log.newest()[:_NUM_SHOWN]],
        engines=[_work(pairing, each, lags_s.get(each.url)) for each in shown],
    )


def _route(record: DecisionRecord) -> RouteShown:
    chosen, measured = record.decision.chosen, record.measured
    ttft_s = None if measured is None else measured.ttft_s
    return RouteShown(
        seq=record.seq,
        request_id=record.request_id,
        is_split=not chosen.is_local,
        reason=record.decision.reason,
        predicted_ms=round((record.taken or chosen).ttft_s * 1e3, 2),
        measured_ms=None if ttft_s is None else round(ttft_s * 1e3, 2),
        words=record.decision.in_words(ttft_s, record.taken),
    )


def _work(pairing: Pairing, engine: Backend, lag_s: float | None) -> WorkShown:
    work, times = pairing.ledger.at(engine.url), pairing.model.times()
    itl_s = times.step_s(work.num_streams, work.kv_tokens) if work.num_streams else 0.0
    return WorkShown(
        url=engine.url,
        home=engine.home_role.value if engine.home_role is not None else "",
        backlog_ms=round(pairing.backlog_s(engine) * 1e3, 1),
        itl_ms=round(itl_s * 1e3, 2),
        num_prompts=work.num_prompts,
        num_streams=work.num_streams,
        lag_ms=None if lag_s is None else round(lag_s * 1e3, 1),
    )
