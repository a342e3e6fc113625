"""Protocols other than chat completions: pure translators of bodies, events and errors.

A client's body becomes that of a chat completion, and the chat's events become the protocol's. That
happens at the edge, so there is one protocol between engines, and one by which streams resume.
Knows no sockets, no model and no time.
"""
