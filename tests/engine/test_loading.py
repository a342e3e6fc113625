"""What an engine says of itself once its parts are there."""

from __future__ import annotations

import logging

import pytest

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, Role, TransferConfig
from pdserve.connectors.base import KVConnectorBase, NullConnector
from pdserve.connectors.memory import MemoryConnector
from pdserve.engine.loading import start_engine
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import EngineId, Incarnation
from tests.toy_executor import ToyExecutor, toy_shape


@pytest.mark.parametrize(
    ("role", "connector", "is_told"),
    [
        (Role.PREFILL, NullConnector(), True),
        (Role.DECODE, NullConnector(), True),
        (Role.BOTH, NullConnector(), False),
        (Role.PREFILL, MemoryConnector(), False),
    ],
)
def test_an_engine_of_a_pair_says_that_it_cannot_hand_over(
    role: Role, connector: KVConnectorBase, *, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = EngineConfig(
        model=ModelConfig(model="toy"),
        role=role,
        cache=CacheConfig(block_size=16),
        transfer=TransferConfig(kv_connector=connector.name),
    )
    names = {"engine_id": EngineId("e"), "incarnation": Incarnation("i")}
    executor = ToyExecutor(config, connector, shape=toy_shape(64, 16), **names)
    with caplog.at_level(logging.WARNING, "pdserve.engine.loading"):
        start_engine(executor, connector, ManualClock(), config=config, **names)
    executor.close(1.0)
    assert ("it serves whole requests" in caplog.text) == is_told
