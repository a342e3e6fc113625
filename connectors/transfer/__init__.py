"""The transfer protocol between two ranks, shared by all transports: D reads or P writes.

A state machine without I/O (`machine`): what a scheduler half asks for, what a step has made
complete, frames that came and copies that ended go in; frames and copies come out. It stands on
the seams in `seams`: a `PeerLink` carries frames, a `Mover` copies bytes, and digests, peers'
processes, the clock and the size of a piece are passed in. It knows no socket, no thread, no
selector and no tensor; NIXL and memory are movers of it.

P's side is `serving` (what is read) and `pushing` (what is written: each push in `pushes`, to the
ranks of D in `writing`); D's is `peers` (whom it is connected to), `loads` (what it reads) and
`receiving` (what is written to it). What the two say is `protocol`. The scheduler half is
`pdserve.connectors.handover.scheduler`.
"""
