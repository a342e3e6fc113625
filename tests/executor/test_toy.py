"""Toy ranks read all the KV that their tokens depend on."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

import msgspec
import pytest

from pdserve.connectors.base import KVConnectorWorker, NullConnector
from pdserve.wire.ids import RequestId
from pdserve.wire.request import GenerateRequest
from pdserve.wire.transfer import BlockOrder
from tests.toy import HeldEngine, sampling, toy_config
from tests.toy_executor import WrongKVError, expected_output, toy_shape

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from pdserve.connectors.base import ConnectorContext, KVLayout

PROMPT = [1, 2, 3] * 4


class KVKeeper(KVConnectorWorker):
    """Keeps the memory that is registered."""

    def __init__(self, memory: list[torch.Tensor]) -> None:
        self._memory = memory

    def register_kv_caches(self, kv: torch.Tensor, layout: KVLayout) -> None:
        self._memory.append(kv)


class KeepingConnector(NullConnector, frozen=True, kw_only=True):
    """Keeps what memory is registered.

    Attributes:
        memory: `[num_blocks, ...]` of each rank.
    """

    memory: list[torch.Tensor] = msgspec.field(default_factory=list)

    def make_worker(self, context: ConnectorContext, wake: Callable[[], None]) -> KVConnectorWorker:
        return KVKeeper(self.memory)


def engine_amid_a_request(connector: KeepingConnector, order: BlockOrder) -> HeldEngine:
    """An engine of four ranks, which has computed a prompt of one block and a half."""
    shape = msgspec.structs.replace(toy_shape(16, 8, tp=2, pp=2), order=order)
    engine = HeldEngine(toy_config(), shape, connector=connector)
    engine.scheduler.add(
        GenerateRequest(
            request_id=RequestId("r"),
            prompt_token_ids=PROMPT,
            sampling=sampling(5, ignore_eos=True),
            arrival_s=0.0,
        )
    )
    engine.step()
    return engine


@pytest.mark.parametrize("order", list(BlockOrder))
def test_right_kv_gives_the_one_right_answer(order: BlockOrder) -> None:
    engine = engine_amid_a_request(KeepingConnector(), order)
    tokens = [token_id for output in engine.run() for token_id in output.new_token_ids]
    assert tokens == expected_output(PROMPT, sampling(5, ignore_eos=True))[1:]


@pytest.mark.parametrize(("rank", "order"), list(product(range(4), BlockOrder)))
def test_a_single_wrong_value_ends_the_step_that_reads_it(rank: int, order: BlockOrder) -> None:
    connector = KeepingConnector()
    engine = engine_amid_a_request(connector, order)
    kv = connector.memory[rank]
    kv.view(-1)[(kv != -1).view(-1).nonzero()[-1]] ^= 1
    with pytest.raises(WrongKVError, match=f"request r on rank {rank}"):
        engine.step()


def test_blocks_that_have_changed_places_end_the_step_that_reads_them() -> None:
    connector = KeepingConnector()
    engine = engine_amid_a_request(connector, BlockOrder.HND)
    kv = connector.memory[0]
    first, second, *_ = (kv != -1).flatten(1).any(1).nonzero().flatten().tolist()
    kv[[first, second]] = kv[[second, first]]
    with pytest.raises(WrongKVError, match="position 0"):
        engine.step()
