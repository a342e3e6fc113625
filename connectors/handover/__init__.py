"""Shared by connectors that hand KV over: D reads P's leased blocks, or P writes into D's.

`scheduler` is the scheduler half, `transfers` the state of its transfers, `checks` its verification
of handoffs and tickets, `instructions` its messages to and from the worker halves, and `lease` P's
table of leases. All of it is pure: without tensors, sockets, threads or a clock of its own, it runs
the same under a real transfer thread and in a simulation.
"""
