"""The side channel: a `PeerLink` over TCP, authenticated by the deployment's secret.

`channel` is all that others see of it: `frames` over sockets, in the event loop of `reactor`.
"""
