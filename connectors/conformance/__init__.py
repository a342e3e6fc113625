"""The conformance kit: what every connector must do, as tests that any package can run.

    from pdserve.connectors.conformance import ConnectorConformance

    class TestMine(ConnectorConformance):
        def make_connector(self) -> KVConnectorBase:
            return MyConnector()

That is a pytest class (nothing here imports pytest). For a connector that stores KV instead of
handing it over there is `StoreConformance`, which needs no peer. Engines without a model, whose KV
shows who wrote it, drive both halves as an engine core would. The connector's `Capabilities`
determine which parts run, class attributes the shapes of the two engines. The product does not
import the kit.
"""

from pdserve.connectors.conformance.engines import Engine, KitRequest, prompt_of
from pdserve.connectors.conformance.pull import PullConformance
from pdserve.connectors.conformance.push import PushConformance
from pdserve.connectors.conformance.store import StoreConformance
from pdserve.connectors.conformance.values import make_shape

__all__ = [
    "ConnectorConformance",
    "Engine",
    "KitRequest",
    "StoreConformance",
    "make_shape",
    "prompt_of",
]


class ConnectorConformance(PullConformance, PushConformance):
    """Everything a connector must do. Subclass it and define `make_connector`."""
