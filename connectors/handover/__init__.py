"""What connectors share that hand KV over: D reads P's leased blocks, or P writes into D's.

The scheduler half (`scheduler`), the transfers that it knows (`transfers`) and what it believes
(`checks`), what it and the worker halves say (`instructions`), and P's book of leases (`lease`).
All of it is pure: no tensor, socket, thread or clock of its own, so it runs the same under a real
transfer thread and in a simulation.
"""
