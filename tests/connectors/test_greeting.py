"""What ranks say of one another when they meet, and what is said of how they round."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.connectors.conformance.engines import prompt_of
from pdserve.connectors.memory import MemoryConnector
from pdserve.connectors.transfer.greeting import NumericsWatch, hello_to
from pdserve.connectors.transfer.protocol import Hello, Region, ToServer
from pdserve.connectors.transfer.seams import ExposedMemory
from pdserve.wire.ids import EngineId, Incarnation
from pdserve.wire.transfer import EngineRef, Numerics
from tests.connectors.engines import Engine, context

if TYPE_CHECKING:
    import pytest

    from pdserve.connectors.base import ConnectorContext, KVConnectorBase

HERE = Numerics(device="cuda sm_90", kernels="cuda 1a2b", compiler="Triton 3.7.1", tp_size=1)
SPREAD = msgspec.structs.replace(HERE, tp_size=2)


def engine(engine_id: str, numerics: Numerics | None, rank: int = 0) -> ConnectorContext:
    return msgspec.structs.replace(context(engine_id, rank=rank), numerics=numerics)


def hello(numerics: Numerics | None) -> Hello:
    p, d = engine("P", None), engine("D", numerics)
    owner = EngineRef(
        engine_id=EngineId("P"), incarnation=p.incarnation, endpoints=(), shape=p.shape
    )
    memory = Region(0, 1, 1, "DRAM", 0)
    return hello_to(owner, 0, d, ExposedMemory(metadata=b"", pool=memory, scratch=memory))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [each.getMessage() for each in caplog.records]
    return [line for line in lines if "rounds differently" in line]


def test_other_numerics_are_told_once_with_both(caplog: pytest.LogCaptureFixture) -> None:
    watch = NumericsWatch(engine("P", HERE))
    for numerics in (SPREAD, SPREAD, HERE):
        watch.look_at(hello(numerics))
    (line,) = said(caplog)
    assert str(HERE) in line
    assert str(SPREAD) in line
    assert "D" in line


def test_an_engine_of_several_ranks_tells_it_once(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(3):
        NumericsWatch(engine("P", HERE, rank)).look_at(hello(SPREAD))
    assert len(said(caplog)) == 1


def test_nothing_is_told_of_versions_that_do_not_say_how_they_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    NumericsWatch(engine("P", HERE)).look_at(hello(None))
    NumericsWatch(engine("P", None)).look_at(hello(SPREAD))
    assert not said(caplog)


def test_a_hello_of_a_version_that_does_not_say_how_it_rounds_is_understood() -> None:
    spoken = msgspec.structs.replace(hello(HERE), incarnation=Incarnation("life"))
    fields = msgspec.msgpack.decode(msgspec.msgpack.encode(spoken))
    del fields["numerics"]
    understood = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=ToServer)
    assert understood == msgspec.structs.replace(spoken, numerics=None)


class RoundingEngine(Engine):
    """An engine that says how it rounds."""

    def __init__(self, connector: KVConnectorBase, engine_id: str, numerics: Numerics) -> None:
        self._numerics = numerics
        super().__init__(connector, engine_id)

    def make_rank(self, connector: KVConnectorBase, rank: int, dtype: str) -> Any:
        self.context = msgspec.structs.replace(self.context, numerics=self._numerics)
        return super().make_rank(connector, rank, dtype)


def test_engines_that_round_differently_exchange_kv_and_say_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    connector = MemoryConnector()
    p, d = RoundingEngine(connector, "P", HERE), RoundingEngine(connector, "D", SPREAD)
    prompt = prompt_of(40)
    d.load(d.queue(prompt, p.prefill(prompt, [1, 2, 3]), "r"), [4, 5, 6])
    for _ in range(100):
        p.step()
        d.step()
    assert d.received
    assert d.holds([4, 5, 6], [1, 2, 3])
    assert len(said(caplog)) == 1
    p.close()
    d.close()
