"""A connector around another one, in which transport trouble happens on purpose.

    FaultyConnector.around(MemoryConnector(), Plan(seed=7, rates={FaultKind.CORRUPT: 0.1}))

For tests and simulation. It models what networks, threads and memory do, and no more: between
an engine core and its own connector halves nothing is lost, so an instruction or a report that
only travels inside the engine comes late, twice or in another order, and never not at all.
Whatever is dropped ends by somebody's deadline:

| fault         | strikes                                   | ends by                           |
|---------------|-------------------------------------------|-----------------------------------|
| DROP          | heartbeats that never begin (`Watch`)     | the lease's end at P              |
|               | an abort; an end of a lease from P's side | the load's report; the lease's end |
|               | a load or reservation: nothing moves      | `Failed(TIMEOUT)`, some polls on  |
| DELAY         | an instruction, by some polls             | itself; what follows stays behind |
| DUPLICATE     | what may come twice                       | the receiver ignores the second   |
| REORDER       | instructions about different requests     |                                   |
| REPLAY        | a release, an end of a lease long over    | a nonce that nobody knows any more |
| CORRUPT       | a byte of a block on its way to D         | D's digests                       |
| TRUNCATE      | the rest of a block does not arrive       | D's digests                       |
| LATE_REPORT   | a fact, by some polls                     | itself                            |
| REPEAT_REPORT | a fact comes twice                        | quorum, scheduler: it counts once |
| REPLAY_REPORT | a fact of long ago comes again            | the same                          |
| LATE_FRAME    | a frame between ranks, and what is behind it, by some polls | itself          |
| LOST_LINK     | a link breaks with what is under way      | it is made again                  |
| LATE_COPY     | bytes begin to arrive some polls late     | itself; the transfer's deadline   |

A handoff that is replayed is none of these: it is carried by others than connectors.
Instructions about one request keep their order: that is a property of the thread they go to and
not of a network. What strikes bytes and frames (CORRUPT, TRUNCATE and the last three) needs the
memory connector, whose wire it is: links keep the order of frames, as TCP does, so a frame
that is dropped is a link that breaks.
"""

from pdserve.connectors.faulty.connector import FaultyConnector
from pdserve.connectors.faulty.plan import FaultKind, Plan

__all__ = ["FaultKind", "FaultyConnector", "Plan"]
