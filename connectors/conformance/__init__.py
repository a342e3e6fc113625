"""The conformance kit: what every connector must do, as tests that any package can run.

    from pdserve.connectors.conformance import ConnectorConformance

    class TestMine(ConnectorConformance):
        def make_connector(self) -> KVConnectorBase:
            return MyConnector()

That is a pytest class (nothing here imports pytest). A connector that keeps KV instead of handing
it over has `StoreConformance`, which needs no peer. Both halves are driven as an engine core
drives them, by engines without a model whose KV says who wrote it. Which parts run is said by
the `Capabilities` of the worker half; the shapes of the two engines by class attributes.
The product does not import it.
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
    """Everything a connector must do. Subclass it and give it `make_connector`."""
