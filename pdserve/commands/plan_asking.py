"""Queries a running deployment for a plan: its layout, and how long its engines take."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.commands.asking import asked
from pdserve.config.http import KVTransfer
from pdserve.errors import PdserveError, PeerError
from pdserve.planner.planning import TimesError
from pdserve.planner.work import FleetCosts, FleetLayout
from pdserve.proxy.brain.record import DecisionsShown
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUM_ASKED: Final = 256
_ON_THE_WAY: Final = ("proxy", "relay")
"""Parts of the TTFT that are the way there and back; a simulation finds the waits itself."""
_MAX_ERROR: Final = 0.9


class _Engine(msgspec.Struct):
    role: str
    health: str
    num_blocks: int
    block_size: int
    can_push: bool


class _Proxy(msgspec.Struct):
    kv_mode: KVTransfer


class _Shown(msgspec.Struct):
    proxy: _Proxy
    engines: list[_Engine]


class _Finished(msgspec.Struct):
    kv_mode: str | None = None
    ttft_terms: dict[str, float] = {}
    second_token_terms: dict[str, float] = {}


class _Requests(msgspec.Struct):
    finished: list[_Finished]


class RunningFleet(msgspec.Struct, frozen=True, kw_only=True):
    """A running deployment.

    Attributes:
        layout: Its ready engines; `kv_tokens` is that of the smallest cache.
        pulls: Whether its KV is pulled.
        notes: What could not be learned from it.
    """

    layout: FleetLayout
    costs: FleetCosts
    error: TimesError
    pulls: bool
    notes: list[str]


def ask_fleet(url: str, api_keys: Sequence[str]) -> RunningFleet:
    """Ask a proxy for its layout and what it has learned.

    Raises:
        PdserveError: It cannot be reached, records no decisions, has learned too little, or has no
            ready engine.
    """
    learned = _ask(url, "/debug/decisions?limit=1", api_keys, DecisionsShown)
    if not learned.is_known:
        samples = ", ".join(f"{name} {fit.samples}" for name, fit in learned.model.items())
        raise PdserveError(
            f"{url} has not yet learned how long its engines take (samples: {samples}; it needs "
            "20 prompts and 20 streams): send it requests, for example with pdserve bench serve"
        )
    shown = _ask(url, "/dashboard/data", api_keys, _Shown)
    ready = [each for each in shown.engines if each.health == "ready"]
    if not ready:
        raise PdserveError(f"{url} has no ready engine, so there is no layout to plan from")
    roles = [each.role for each in ready]
    layout = FleetLayout(
        roles.count("prefill"),
        roles.count("decode"),
        roles.count("both"),
        kv_tokens=min(each.num_blocks * each.block_size for each in ready),
    )
    path = f"/debug/requests?finished={_NUM_ASKED}"
    finished = _ask(url, path, api_keys, _Requests).finished
    fits, notes, usual = learned.model, [], FleetCosts()
    hop_s, handover_s = _hop_s(finished), _later_s(finished, "handover")
    if hop_s is None:
        notes.append(f"{url} has no finished requests, so a hop is assumed to take 3 ms (--hop-ms)")
    modes = Counter(each.kv_mode for each in finished if each.kv_mode)
    pulls = modes["pull"] > modes["push"] or (not modes and not _can_push(shown.proxy, ready))
    pushed_s = _later_s([each for each in finished if each.kv_mode == "push"], "kv")
    r, t = usual.wire, usual.wire_token
    if pushed_s is not None and not pulls:
        r, t = pushed_s, 0.0  # the rest was sent while the prompt was computed
    elif fits["wire"].samples:
        r, t = fits["wire"].weights
    else:
        notes.append(
            f"{url} has seen no KV transfer, so one is assumed to take 1 ms and 8 us per token "
            "(--wire-times)"
        )
    a, b, c = fits["prefill"].weights
    d, e, f = fits["step"].weights
    hop_s = usual.hop if hop_s is None else hop_s
    handover_s = 2 * hop_s if handover_s is None else handover_s
    costs = FleetCosts(a, b, c, d, e, f, hop_s, handover_s, r, t)
    error = TimesError(**{name: min(_MAX_ERROR, fit.error) for name, fit in fits.items()})
    return RunningFleet(layout=layout, costs=costs, error=error, pulls=pulls, notes=notes)


def _can_push(proxy: _Proxy, ready: Sequence[_Engine]) -> bool:
    """Return whether KV is to be pushed where nothing was moved yet."""
    able = {each.role for each in ready if each.can_push}
    has_pair = "both" in able or able == {"prefill", "decode"}
    return proxy.kv_mode is not KVTransfer.PULL and has_pair


def _hop_s(finished: Sequence[_Finished]) -> float | None:
    """Return half of the median time on the way; None if unknown."""
    all_terms = [each.ttft_terms for each in finished if each.ttft_terms]
    ways = [sum(each.get(name, 0.0) for name in _ON_THE_WAY) for each in all_terms]
    return statistics.median(ways) / 2e3 if ways else None


def _later_s(finished: Sequence[_Finished], name: str) -> float | None:
    """Return the median of a part of the time to the second token; None if unknown."""
    parts = [each.second_token_terms.get(name) for each in finished]
    known = [ms for ms in parts if ms is not None]
    return statistics.median(known) / 1e3 if known else None


def _ask(url: str, path: str, api_keys: Sequence[str], kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(asked(url, path, api_keys), type=kind)
    except UNREADABLE as error:
        raise PeerError(
            f"{url}{path} did not answer as this version of pdserve does: {error}"
        ) from error
