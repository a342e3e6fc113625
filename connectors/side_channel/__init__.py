"""The `PeerLink` that ships: frames over TCP, authenticated by the deployment's secret.

`network` is all that others see of it: `frames` over `channel`, in the event loop of `reactor`.
"""
