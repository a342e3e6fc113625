"""Protocols other than chat completions: pure translators of bodies, events and errors.

A client's body becomes that of a chat completion, and the chat's events become the protocol's. That
happens where the client is, so what engines say to one another, and what a stream resumes by, is
one protocol. Knows no sockets, no model and no time.
"""
