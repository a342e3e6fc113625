"""The kit as one class."""

from __future__ import annotations

from pdserve.connectors.conformance.pull import PullConformance
from pdserve.connectors.conformance.push import PushConformance


class ConnectorConformance(PullConformance, PushConformance):
    """Everything a connector must do. Subclass it and give it `make_connector`."""
