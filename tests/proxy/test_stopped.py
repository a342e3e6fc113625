"""What is stopped says nothing: engines that do not answer, and a proxy that slept."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pytest

from pdserve.config.http import ProxyConfig
from pdserve.observe.clock import ManualClock
from pdserve.proxy.backend import Health
from pdserve.proxy.backends import Backends
from pdserve.proxy.breakers import Breakers
from pdserve.proxy.checks import HealthChecks
from pdserve.proxy.errors import WorkerError
from pdserve.proxy.metrics import Metrics
from pdserve.proxy.totals import Totals
from pdserve.wire.hop import Registration
from pdserve.wire.request import EngineInfo
from tests.proxy.scripted import ScriptedEngine
from tests.sim import virtual_time

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from pdserve.proxy.backend import Backend

T = TypeVar("T")
URL = "http://10.0.0.1:8000"


class Network:
    """See `EngineHttp`: an engine that answers at once, or never."""

    def __init__(self) -> None:
        self.is_stopped = False

    async def get_json(
        self, url: str, timeout_s: float, headers: Mapping[str, str]
    ) -> tuple[int, bytes]:
        if self.is_stopped:
            await asyncio.sleep(timeout_s)
            raise WorkerError(f"{url}: no answer", reason="timeout")
        return 200, b'{"data": [{"id": "m"}]}'


class Leg:
    """See `Leg`: notes when it was lost."""

    url = "http://10.0.0.1:8000/v1/completions"

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self.lost_s: float | None = None
        self.num_reads = 0

    def lose(self, failure: WorkerError) -> None:
        if self.lost_s is None:
            self.lost_s = self._clock.monotonic_s()


@dataclass
class Scene:
    """A proxy that looks after its engines, in virtual time."""

    clock: ManualClock
    network: Network
    backends: Backends
    checks: HealthChecks

    @property
    def backend(self) -> Backend:
        return self.backends.get(URL)

    def open_leg(self) -> Leg:
        self.backend.legs.add(leg := Leg(self.clock))
        return leg


def played(play: Callable[[Scene], Awaitable[T]], **config: Any) -> T:
    clock, network = ManualClock(), Network()

    async def main() -> T:
        settings = ProxyConfig(**config)
        backends = Backends(settings, clock, Breakers(settings, clock, Metrics()))
        checks = HealthChecks(
            settings, backends, network, clock, totals=Totals(), headers={}, on_load=lambda *_: None
        )
        await checks.start()
        found = await play(Scene(clock, network, backends, checks))
        await checks.stop()
        return found

    return virtual_time.run(clock, main())


@pytest.mark.parametrize("after_check_s", [0.0, 0.01, 0.5, 0.99])
def test_by_default_the_legs_of_an_engine_that_is_stopped_are_lost_within_eight_seconds(
    after_check_s: float,
) -> None:
    async def play(scene: Scene) -> float:
        leg = scene.open_leg()
        await asyncio.sleep(10.0 + after_check_s)
        scene.network.is_stopped, stopped_s = True, scene.clock.monotonic_s()
        await asyncio.sleep(30.0)
        assert scene.backend.health is Health.UNREACHABLE
        return leg.lost_s - stopped_s

    assert 4.0 < played(play, decode=(URL,)) < 8.0


def test_an_engine_that_answers_late_twice_keeps_its_legs() -> None:
    async def play(scene: Scene) -> None:
        leg = scene.open_leg()
        for _ in range(5):
            scene.network.is_stopped = True
            await asyncio.sleep(4.0)
            scene.network.is_stopped = False
            await asyncio.sleep(5.0)
        assert (leg.lost_s, scene.backend.health) == (None, Health.READY)

    played(play, decode=(URL,))


def test_an_engine_whose_streams_go_on_is_alive_however_late_its_health_is() -> None:
    async def play(scene: Scene) -> None:
        leg = scene.open_leg()
        scene.network.is_stopped = True
        for _ in range(60):
            await asyncio.sleep(1.0)
            leg.num_reads += 1
        assert (leg.lost_s, scene.backend.health) == (None, Health.READY)
        await asyncio.sleep(10.0)
        assert scene.backend.health is Health.UNREACHABLE
        assert leg.lost_s is not None

    played(play, decode=(URL,))


def test_a_proxy_that_was_stopped_still_knows_the_engines_that_registered() -> None:
    info = msgspec.convert(ScriptedEngine("decode").info(), EngineInfo)

    async def play(scene: Scene) -> None:
        registration = Registration(url=URL, role="decode", engine=info, lease_s=9.0)
        scene.checks.watch(scene.backends.register(registration))
        await asyncio.sleep(3.0)
        scene.clock.advance(600.0)  # nothing ran here meanwhile
        await asyncio.sleep(4.0)
        assert scene.backend.available
        await asyncio.sleep(4.0)
        assert scene.backend is None, "it has not renewed its lease since"

    played(play)
