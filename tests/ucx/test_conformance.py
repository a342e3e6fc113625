"""The conformance kit over UCX, on equal and on unequal shapes of P and D."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.connectors.conformance import ConnectorConformance, make_shape
from pdserve.connectors.ucx import UcxConnector

if TYPE_CHECKING:
    from pdserve.connectors.base import KVConnectorBase


class TestUcx(ConnectorConformance):
    def make_connector(self) -> KVConnectorBase:
        return UcxConnector()


class TestUcxOfTwoRanks(TestUcx):
    prefill_shape = decode_shape = make_shape(tp=2)


class TestUcxFromTwoRanksToOne(TestUcx):
    prefill_shape = make_shape(tp=2, num_kv_heads=2, block_size=16)
    decode_shape = make_shape(num_kv_heads=2, block_size=64, num_blocks=8)


class TestUcxFromTwoStagesToTwoRanksOfLargerBlocks(TestUcx):
    prefill_shape = make_shape(pp=2, block_size=16)
    decode_shape = make_shape(tp=2, block_size=64, num_blocks=8)


class TestUcxOfLatents(TestUcx):
    """MLA: one latent, on every rank."""

    prefill_shape = make_shape(tp=2, num_kv_heads=1, num_planes=1)
    decode_shape = make_shape(pp=2, num_kv_heads=1, num_planes=1)
