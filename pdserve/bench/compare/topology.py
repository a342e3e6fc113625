"""The deployments of a comparison, on the same cores or devices, and how they share them.

Pure: turns words like `2:1` and a list of cores into engines with their places. Knows no process,
no port, and only the engine flags that define a deployment.

Every deployment gets all of the same cores. Proxy and client run on any of them beside the engines,
in every deployment alike. If a P/D deployment has more engines than cores, those of one role share
a core (`Topology.crowded`); prefill and decode share one only if there is no other.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.config.schema import Role
from pdserve.errors import ConfigError


class Kind(enum.Enum):
    """How a deployment divides the work.

    COLOCATED: one engine with everything, prompts in chunks. REPLICAS: several such engines
    behind the proxy, as many as the largest P/D deployment has engines. UNCHUNKED: one engine,
    each prompt in one step. REPLICAS_UNCHUNKED: several of these.
    """

    COLOCATED = "colocated"
    REPLICAS = "replicas"
    UNCHUNKED = "colocated-unchunked"
    REPLICAS_UNCHUNKED = "replicas-unchunked"
    DISAGGREGATED = "pd"
    PEER = "peer"


STARTED: Final = (
    Kind.COLOCATED,
    Kind.REPLICAS,
    Kind.UNCHUNKED,
    Kind.REPLICAS_UNCHUNKED,
    Kind.DISAGGREGATED,
)
"""Kinds that a user may name."""

_PAIR: Final = re.compile(r"([1-9][0-9]*):([1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """One engine of a deployment.

    Attributes:
        name: Unique name in the deployment.
        cores: The cores that it may use, one thread for each; for a deployment on devices, its
            visible devices.
    """

    name: str
    role: Role
    cores: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """One deployment of a comparison.

    Attributes:
        label: Its name in tables.
        engines: Its engines; none for a peer, which is already running.
        chunk_tokens: Token budget of a step of its colocated engines; None leaves the default.
        url: URL of a peer.
        has_store: Whether its engines share a KV store, which starts empty.
    """

    label: str
    kind: Kind
    engines: tuple[EnginePlace, ...] = ()
    chunk_tokens: int | None = None
    url: str = ""
    has_store: bool = False

    @property
    def has_proxy(self) -> bool:
        """Whether requests go through a proxy; a single engine gets them directly."""
        return len(self.engines) > 1

    @property
    def crowded(self) -> dict[int, list[str]]:
        """Cores that several engines share, and those engines."""
        tenants: dict[int, list[str]] = {}
        for engine in self.engines:
            for core in engine.cores:
                tenants.setdefault(core, []).append(engine.name)
        return {core: names for core, names in tenants.items() if len(names) > 1}

    @property
    def is_chunked(self) -> bool:
        """Whether its engines spread a prompt over steps."""
        return self.kind not in (Kind.UNCHUNKED, Kind.REPLICAS_UNCHUNKED)

    @property
    def words(self) -> str:
        """Its description for people."""
        return f"{self._words}, with a KV store" if self.has_store else self._words

    @property
    def _words(self) -> str:
        num = len(self.engines)
        match self.kind:
            case Kind.PEER:
                return f"already running at {self.url}"
            case Kind.DISAGGREGATED:
                prefills = sum(engine.role is Role.PREFILL for engine in self.engines)
                return (
                    f"{prefills} prefill and {num - prefills} decode "
                    f"{'engine' if num - prefills == 1 else 'engines'} behind the proxy"
                )
            case _:
                chunks = (
                    f"prompts in chunks of at most {self.chunk_tokens} tokens"
                    if self.chunk_tokens is not None and self.is_chunked
                    else "prompts in chunks"
                    if self.is_chunked
                    else "each prompt whole, in one step"
                )
                many = "one engine" if num == 1 else f"{num} engines behind the proxy"
                return f"{many} for prefill and decode; {chunks}"


def pairs(words: Sequence[str]) -> list[tuple[int, int]]:
    """Read `--pd`: prefill and decode engines of each P/D deployment.

    Raises:
        ConfigError: A word is not two numbers from 1 up with a colon between them.
    """
    found = []
    for word in words:
        match = _PAIR.fullmatch(word)
        if match is None:
            raise ConfigError(
                f"--pd is {word!r}: write the numbers of prefill and decode engines with a colon "
                "between them, such as 1:1 or 2:1",
                param="pd",
            )
        found.append((int(match[1]), int(match[2])))
    return found


def share(units: Sequence[int], num: int, *, what: str = "cores") -> list[tuple[int, ...]]:
    """Divide units among `num` engines, in order and as evenly as possible; the first get more.

    Raises:
        ConfigError: There are fewer units than engines.
    """
    if num > len(units):
        raise ConfigError(
            f"{num} engines need {num} {what}, but only {len(units)} can be used: allow more with "
            f"--{what.lower()}, use a smaller --pd, or leave replicas out of --topologies",
            param="pd",
        )
    each, more = divmod(len(units), num)
    shares, at = [], 0
    for index in range(num):
        size = each + (index < more)
        shares.append(tuple(units[at : at + size]))
        at += size
    return shares


def plan(
    kinds: Sequence[Kind],
    ratios: Sequence[tuple[int, int]],
    units: Sequence[int],
    *,
    chunk_tokens: Sequence[int] = (),
    what: str = "cores",
    may_share: bool = False,
) -> list[Topology]:
    """Decide which deployments to compare; the first colocated one is the baseline.

    Args:
        kinds: Kinds of deployments, without peers.
        ratios: Prefill and decode engines of each P/D deployment.
        units: Cores (or devices), all of which every deployment uses.
        chunk_tokens: Token budgets of the chunked colocated kinds, one deployment each; empty
            leaves the engine's default.
        what: Cores or devices, for messages.
        may_share: Whether engines of a P/D deployment may share units if there are too few; there
            are never more replicas than units.

    Raises:
        ConfigError: Engines outnumber units and may not share them.
    """
    num_replicas = max((p + d for p, d in ratios), default=2)
    if may_share:
        num_replicas = min(num_replicas, max(len(units), 2))
    found: list[Topology] = []
    for kind in kinds:
        if kind is Kind.DISAGGREGATED:
            found += [_disaggregated(p, d, units, what, may_share) for p, d in ratios]
            continue
        is_chunked = kind in (Kind.COLOCATED, Kind.REPLICAS)
        budgets: Sequence[int | None] = (chunk_tokens or (None,)) if is_chunked else (None,)
        num = num_replicas if kind in (Kind.REPLICAS, Kind.REPLICAS_UNCHUNKED) else 1
        for budget in budgets:
            found.append(_colocated(kind, num, budget, units, what, len(budgets) > 1))
    return found


def with_store(topology: Topology) -> Topology:
    """Return the same deployment with a KV store that its engines share."""
    return dataclasses.replace(topology, label=f"{topology.label} + store", has_store=True)


def _colocated(
    kind: Kind, num: int, budget: int | None, units: Sequence[int], what: str, is_named: bool
) -> Topology:
    shares = share(units, num, what=what)
    words = {
        Kind.REPLICAS: f"{num} replicas",
        Kind.REPLICAS_UNCHUNKED: f"{num} replicas, unchunked",
    }
    label = words.get(kind, "colocated" if kind is Kind.COLOCATED else "colocated, unchunked")
    if is_named:
        label += f", chunks of {budget}"
    engines = tuple(
        EnginePlace("engine" if num == 1 else f"engine{index}", Role.BOTH, cores)
        for index, cores in enumerate(shares)
    )
    return Topology(label, kind, engines, budget)


def _disaggregated(
    prefills: int, decodes: int, units: Sequence[int], what: str, may_share: bool
) -> Topology:
    if may_share and prefills + decodes > len(units):
        shares = iter(_crowd(units, prefills, decodes))
    else:
        shares = iter(share(units, prefills + decodes, what=what))
    return Topology(
        f"P/D {prefills}:{decodes}",
        Kind.DISAGGREGATED,
        (
            *_engines(Role.PREFILL, prefills, shares),
            *_engines(Role.DECODE, decodes, shares),
        ),
    )


def _crowd(units: Sequence[int], prefills: int, decodes: int) -> list[tuple[int, ...]]:
    """Return a unit for each engine if there are fewer units; roles are kept apart if possible."""
    if len(units) == 1:
        return [(units[0],)] * (prefills + decodes)
    num = round(len(units) * prefills / (prefills + decodes))
    num = min(max(num, 1), len(units) - 1)
    sides = ((units[:num], prefills), (units[num:], decodes))
    return [(side[index % len(side)],) for side, count in sides for index in range(count)]


def _engines(role: Role, num: int, shares: Iterator[tuple[int, ...]]) -> Iterator[EnginePlace]:
    for index in range(num):
        name = role.value if num == 1 else f"{role.value}{index}"
        yield EnginePlace(name, role, next(shares))


def peers(words: Sequence[str]) -> list[Topology]:
    """Read `--peer`: running endpoints, each a URL with or without `label=` before it.

    Raises:
        ConfigError: A word has no URL, or a label occurs twice.
    """
    found: list[Topology] = []
    for word in words:
        name, _, url = word.rpartition("=") if "=" in word.split("://")[0] else ("", "", word)
        url = url.rstrip("/").removesuffix("/v1")
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f"--peer is {word!r}: write a URL, or a label and a URL, such as "
                "vllm=http://127.0.0.1:8000",
                param="peer",
            )
        label = name or url.partition("://")[2]
        if any(label == other.label for other in found):
            raise ConfigError(
                f"--peer {word}: the label {label} is used twice; choose another one", param="peer"
            )
        found.append(Topology(label, Kind.PEER, url=url))
    return found


def baseline(topologies: Sequence[Topology]) -> str:
    """The label of the baseline: the first colocated deployment with chunks."""
    for kind in (Kind.COLOCATED, Kind.REPLICAS):
        for topology in topologies:
            if topology.kind is kind:
                return topology.label
    return topologies[0].label
