"""What happens in a run, drawn from its seed: engines, requests, faults, deaths. Values only."""

from __future__ import annotations

import random

import msgspec

from pdserve.config.schema import Role
from pdserve.connectors.conformance import make_shape
from pdserve.wire.transfer import KVShape
from tests.faulty import FaultKind
from tests.sim.engine import EngineSpec
from tests.toy_drafts import TOY_DRAFTERS


class LifeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One client's request.

    Attributes:
        leaves_after_s: The client hangs up so long after it asked; None if it stays.
        is_bound: Its output has a grammar.
        has_tool: It is a chat that offers a tool.
    """

    number: int
    at_s: float
    prompt: list[int]
    seed: int
    max_tokens: int
    ignore_eos: bool
    stream: bool
    leaves_after_s: float | None
    is_bound: bool = False
    has_tool: bool = False


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """An engine is killed and, a little later, started again."""

    at_s: float
    engine: str
    down_s: float


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """An engine is drained, killed and, a little later, started again."""

    at_s: float
    engine: str
    deadline_s: float
    down_s: float


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """Two engines cannot reach one another for a while."""

    at_s: float
    engines: tuple[str, str]
    for_s: float


class Slowness(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's steps take longer for a while."""

    at_s: float
    engine: str
    for_s: float
    factor: float


class StoreSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A store behind all engines, which outlives them.

    Attributes:
        is_async: It loads beside the steps, and not inside them.
        may_wait: It has to look first what there is of a prompt.
        loses: How often a block that was found is not there when it is loaded.
        is_late: How often something takes some polls longer.
    """

    is_async: bool
    may_wait: bool
    loses: float
    is_late: float


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is decided before a run begins."""

    seed: int
    engines: list[EngineSpec]
    lives: list[LifeSpec]
    deaths: list[Death]
    cuts: list[Cut]
    slownesses: list[Slowness]
    rates: dict[str, float]
    replayed_handoffs: float
    may_push: bool
    is_direct: bool
    is_driven: bool
    piece_bytes: int
    store: StoreSpec | None = None
    split_policy: str = "always"
    restarts: tuple[Restart, ...] = ()


_PREFIXES = ([], [1] * 8, [2] * 8, [1] * 16, [1, 2, 3, 4, 5] * 5)
_NUM_LAYERS = 2
_NUM_HEADS = 2
_SHAPES: tuple[tuple[int, int], ...] = ((1, 1), (1, 1), (1, 1), (2, 1), (1, 2))
MAX_LIVES = 40


def draw(seed: int) -> Scenario:
    """Return the scenario of a seed."""
    rng = random.Random(seed)
    block_size = rng.choice((8, 16))
    same = rng.random() < 0.6
    shape = _shape(rng, block_size)
    engines = []
    lease_s = rng.choice((0.6, 1.5, 4.0))
    for role, letter in ((Role.PREFILL, "p"), (Role.DECODE, "d")):
        if role is Role.DECODE and not same:
            shape = _shape(rng, rng.choice((8, 16)))
        for number in range(rng.choice((1, 1, 2))):
            tokens = rng.choice((64, 64, 80, 112, 192))
            engines.append(
                EngineSpec(
                    name=f"{letter}{number}",
                    role=role,
                    shape=msgspec.structs.replace(shape, num_blocks=tokens // shape.block_size),
                    max_num_seqs=rng.choice((3, 6, 8)),
                    max_num_batched_tokens=rng.choice((8, 16, 48)),
                    lease_s=lease_s,
                    transfer_timeout_s=rng.choice((0.4, 1.5)),
                    recompute_tokens_per_s=rng.choice((40.0, 400.0)),
                )
            )
    names = [engine.name for engine in engines]
    num_lives = rng.randint(15, MAX_LIVES)
    gap_s = rng.choice((0.001, 0.005, 0.02, 0.06))
    lives = []
    at_s = 0.0
    for number in range(num_lives):
        at_s += rng.expovariate(1 / gap_s)
        prompt = list(rng.choice(_PREFIXES))
        prompt += [rng.randrange(3) for _ in range(rng.randint(0 if prompt else 1, 9))]
        if lives and rng.random() < 0.2:  # asked before, by this or another client
            prompt = rng.choice(lives).prompt
        lives.append(
            LifeSpec(
                number=number,
                at_s=at_s,
                prompt=prompt,
                seed=rng.randrange(3),
                max_tokens=rng.choice((1, 2, 4, 7, 12, 20, 26)),
                ignore_eos=rng.random() < 0.5,
                stream=rng.random() < 0.8,
                leaves_after_s=rng.uniform(0.0, 0.15) if rng.random() < 0.12 else None,
            )
        )
    end_s = at_s + 0.1
    has_trouble = rng.random() < 0.8
    num_deaths = rng.choice((0, 0, 1, 2, 3)) if has_trouble else 0
    deaths = [
        Death(
            at_s=rng.uniform(0.0, end_s),
            engine=rng.choice(names),
            down_s=rng.choice((0.02, 0.3, 1.5)),
        )
        for _ in range(num_deaths)
    ]
    cuts = [
        Cut(
            at_s=rng.uniform(0.0, end_s),
            engines=(
                rng.choice([name for name in names if name[0] == "p"]),
                rng.choice([name for name in names if name[0] == "d"]),
            ),
            for_s=rng.choice((0.05, 0.5, 3.0)),
        )
        for _ in range(rng.choice((0, 0, 1, 2)) if has_trouble else 0)
    ]
    slownesses = [
        Slowness(
            at_s=rng.uniform(0.0, end_s),
            engine=rng.choice(names),
            for_s=rng.choice((0.1, 0.6)),
            factor=rng.choice((5.0, 40.0)),
        )
        for _ in range(rng.choice((0, 1, 2)) if has_trouble else 0)
    ]
    level = rng.choice((0.0, 0.01, 0.05)) if has_trouble else 0.0
    return Scenario(
        seed=seed,
        engines=engines,
        lives=lives,
        deaths=sorted(deaths, key=lambda death: death.at_s),
        cuts=cuts,
        slownesses=slownesses,
        rates={kind.value: level for kind in FaultKind}
        # A link carries a hundred frames, and waits a second and longer to be made again.
        | {FaultKind.LOST_LINK.value: level / 20},
        replayed_handoffs=level,
        may_push=rng.random() < 0.6,
        is_direct=rng.random() < 0.3,
        is_driven=rng.random() < 0.3,
        piece_bytes=rng.choice((64, 256, 4096)),
    )


def _shape(rng: random.Random, block_size: int) -> KVShape:
    tp, pp = rng.choice(_SHAPES)
    return make_shape(
        tp=tp,
        pp=pp,
        block_size=block_size,
        num_blocks=1,
        num_layers=_NUM_LAYERS,
        num_kv_heads=_NUM_HEADS,
        head_dim=1,
        dtype="int64",
    )


def with_store(scenario: Scenario) -> Scenario:
    """The same with a store behind the engines."""
    rng = random.Random(scenario.seed)
    store = StoreSpec(
        is_async=rng.random() < 0.5,
        may_wait=rng.random() < 0.5,
        loses=rng.choice((0.0, 0.02, 0.2)),
        is_late=rng.choice((0.0, 0.1, 0.5)),
    )
    return msgspec.structs.replace(scenario, store=store)


def with_drafts(scenario: Scenario) -> Scenario:
    """The same with engines that draft, each in its own way, or not at all."""
    rng = random.Random(scenario.seed)
    engines = [
        msgspec.structs.replace(engine, drafter=rng.choice(("", *TOY_DRAFTERS)))
        for engine in scenario.engines
    ]
    return msgspec.structs.replace(scenario, engines=engines)


def with_grammars(scenario: Scenario) -> Scenario:
    """The same with clients of whom half ask for outputs of one kind, which have ends."""
    rng = random.Random(scenario.seed)
    lives = [
        msgspec.structs.replace(life, is_bound=True, ignore_eos=False)
        if rng.random() < 0.5
        else life
        for life in scenario.lives
    ]
    return msgspec.structs.replace(scenario, lives=lives)


def with_tools(scenario: Scenario) -> Scenario:
    """The same with clients of whom some chat, and offer a tool."""
    rng = random.Random(scenario.seed)
    lives = [
        msgspec.structs.replace(life, has_tool=not life.is_bound and rng.random() < 0.6)
        for life in scenario.lives
    ]
    return msgspec.structs.replace(scenario, lives=lives)


def with_brain(scenario: Scenario) -> Scenario:
    """The same with a proxy that chooses pairs of engines by what it predicts."""
    return msgspec.structs.replace(scenario, split_policy="predicted")


def with_restarts(scenario: Scenario) -> Scenario:
    """The same with engines that are restarted in turn, each after it was drained."""
    rng = random.Random(scenario.seed)
    names = [engine.name for engine in scenario.engines]
    rng.shuffle(names)
    restarts, at_s = [], rng.uniform(0.0, 0.1)
    for name in names:
        deadline_s, down_s = rng.choice((0.0, 0.02, 0.1, 0.5)), rng.choice((0.02, 0.3))
        restarts.append(Restart(at_s=at_s, engine=name, deadline_s=deadline_s, down_s=down_s))
        at_s += deadline_s + down_s + 0.3
    return msgspec.structs.replace(scenario, restarts=tuple(restarts))


def with_moves(scenario: Scenario) -> Scenario:
    """The same with decode engines that are drained in turn, some killed while streams move."""
    rng = random.Random(scenario.seed)
    decodes = [engine for engine in scenario.engines if engine.role is Role.DECODE]
    if len(decodes) == 1:
        decodes.append(msgspec.structs.replace(decodes[0], name="d1"))
    engines = [e for e in scenario.engines if e.role is not Role.DECODE] + decodes
    lives = [
        msgspec.structs.replace(life, max_tokens=rng.choice((20, 26)), ignore_eos=True)
        for life in scenario.lives
    ]
    restarts, deaths, at_s = [], [], rng.uniform(0.0, 0.05)
    for turn in range(4):
        name = decodes[turn % 2].name
        deadline_s = rng.choice((0.04, 0.1, 0.3))
        restarts.append(Restart(at_s=at_s, engine=name, deadline_s=deadline_s, down_s=0.02))
        if rng.random() < 0.5:
            moves_s = at_s + deadline_s / 2
            killed = rng.choice(decodes).name
            death = Death(at_s=moves_s + rng.uniform(0.0, 0.015), engine=killed, down_s=0.1)
            deaths.append(death)
        at_s += deadline_s + 0.15
    return msgspec.structs.replace(
        scenario,
        engines=engines,
        lives=lives,
        restarts=tuple(restarts),
        deaths=sorted([*scenario.deaths, *deaths], key=lambda death: death.at_s),
    )


def without_trouble(scenario: Scenario) -> Scenario:
    """The same, but nothing fails."""
    return msgspec.structs.replace(
        scenario,
        deaths=[],
        cuts=[],
        rates=dict.fromkeys(scenario.rates, 0.0),
        replayed_handoffs=0.0,
    )


def impatient(scenario: Scenario) -> Scenario:
    """The same with crowded engines whose clients leave in the midst of transfers."""
    rng = random.Random(scenario.seed)
    lives = [
        msgspec.structs.replace(
            life,
            at_s=life.at_s / 4,
            leaves_after_s=rng.uniform(0.0, 0.04) if rng.random() < 0.6 else None,
        )
        for life in scenario.lives
    ]
    engines = [
        msgspec.structs.replace(engine, max_num_batched_tokens=8, max_num_seqs=8)
        for engine in scenario.engines
    ]
    return msgspec.structs.replace(scenario, lives=lives, engines=engines)
