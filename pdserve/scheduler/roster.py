"""Where each request stands: in exactly one place, from its arrival until nothing is held for it.

The waiting queue, `running` (the batch), `receiving` (a load or a peer fills its blocks), `leased`
(a peer may read its blocks), or closing (over, but a transfer or a step may still touch its
blocks). Knows how a request leaves; not why, and nothing of connectors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.errors import InternalError
from pdserve.kvcache.lease import BlockUser
from pdserve.scheduler.queue import WaitingQueue
from pdserve.scheduler.request import State, Wait

if TYPE_CHECKING:
    from pdserve.config.schema import SchedulingPolicy
    from pdserve.kvcache.lease import Holding
    from pdserve.observe.trace import Recorder
    from pdserve.scheduler.inflight import InFlight
    from pdserve.scheduler.ladder import Ladder
    from pdserve.scheduler.request import Request
    from pdserve.scheduler.steps import StepBuilder
    from pdserve.wire.ids import RequestId


class Roster:
    """Every request of one scheduler.

    Args:
        steps: Is told who leaves the batch.
        inflight: Says whether a step may still write a request's blocks.
        ladder: Is told who leaves for good.
        recorder: Is given the time of each that left.

    Attributes:
        requests: All of them, by id.
        waiting: Those that wait, in line or aside.
        running: The batch, in the order in which it is served.
        receiving: Those whose blocks are being filled.
        leased: Those that have finished here, and may be read.
        parked: By the hold's id, blocks that a preempted request lost and a save still reads.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        *,
        steps: StepBuilder,
        inflight: InFlight,
        ladder: Ladder,
        recorder: Recorder,
    ) -> None:
        self._recorder = recorder
        self._steps = steps
        self._inflight = inflight
        self._ladder = ladder
        self.requests: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue(policy)
        self.running: dict[RequestId, Request] = {}
        self.receiving: dict[RequestId, Request] = {}
        self.leased: dict[RequestId, Request] = {}
        self.parked: dict[str, Holding] = {}

    @property
    def num_seats(self) -> int:
        """Requests that hold a seat of the batch, or will as soon as their KV is here."""
        return len(self.running) + len(self.receiving)

    @property
    def num_unfinished(self) -> int:
        """Requests whose client still waits for tokens."""
        return len(self.waiting) + self.num_seats

    @property
    def num_runnable(self) -> int:
        """Requests that need steps: those that wait for one, and those that run."""
        return self.waiting.num_in_line + len(self.running)

    def add(self, request: Request) -> None:
        """Take a request that waits, under an id that no other has."""
        self.requests[request.request_id] = request
        self.waiting.push(request)

    def move(self, request: Request, state: State, now_s: float, why: str) -> None:
        """From one place to another.

        Raises:
            InternalError: The move is not legal; the message is the request's story.
        """
        self._leave_place(request)
        request.move(state, now_s, why)
        match state:
            case State.WAITING:
                self.waiting.push(request)
            case State.RECEIVING:
                self.receiving[request.request_id] = request
            case State.RUNNING:
                self.running[request.request_id] = request
            case State.LEASED:
                self.leased[request.request_id] = request
            case State.CLOSING | State.DONE:
                pass

    def _leave_place(self, request: Request) -> None:
        match request.state:
            case State.WAITING:
                self.waiting.remove(request)
            case State.RECEIVING:
                del self.receiving[request.request_id]
            case State.RUNNING:
                del self.running[request.request_id]
                self._steps.forget(request.request_id)
            case State.LEASED:
                del self.leased[request.request_id]
            case State.CLOSING | State.DONE:
                pass

    # ---- endings -------------------------------------------------------------------

    def end(self, request: Request, now_s: float, why: str, *, is_held: bool = False) -> None:
        """The request is over for its client; free its blocks as soon as that is safe.

        Args:
            is_held: Its connector still has something read from its blocks.

        Raises:
            InternalError: It is over already.
        """
        match request.state:
            case State.WAITING:
                is_held = False
            case State.RECEIVING:
                request.waits_for.add(Wait.LOAD)
            case State.RUNNING:
                if self._inflight.close_after(request):
                    request.waits_for.add(Wait.STEP)
            case State.LEASED | State.CLOSING | State.DONE:
                raise InternalError(f"ended twice ({why})\n{request.story()}")
        if is_held:
            request.waits_for.add(Wait.HOLD)
        if not request.waits_for:
            self.close(request, now_s, why)
            return
        assert request.holding is not None
        if request.waits_for != {Wait.STEP}:
            request.holding.become(BlockUser.QUARANTINED)
        waits_for = ", ".join(sorted(each.value for each in request.waits_for))
        self.move(request, State.CLOSING, now_s, f"{why}; waits for: {waits_for}")

    def stop_waiting(self, request: Request, wait: Wait, now_s: float) -> None:
        """One of the things that a closing request waits for is over; it may be the last."""
        if wait not in request.waits_for:
            return
        request.waits_for.discard(wait)
        if not request.waits_for:
            self.close(request, now_s, f"its {wait.value} settled")
            return
        request.note(now_s, f"its {wait.value} settled")
        if request.waits_for == {Wait.STEP} and request.holding is not None:
            request.holding.become(BlockUser.REQUEST)

    def close(self, request: Request, now_s: float, why: str) -> None:
        """Nothing touches its blocks: give them back, and forget the request."""
        self.give_back(request)
        self._ladder.leave(request)
        self.move(request, State.DONE, now_s, why)
        self._recorder.add(request.traced(now_s))
        del self.requests[request.request_id]

    def give_back(self, request: Request) -> None:
        """Free its blocks, if it has any."""
        if request.holding is not None:
            request.holding.end()
            request.holding = None

    def park(self, request: Request, hold_id: str) -> None:
        """Take a preempted request's blocks from it, and keep them until `release_parked`."""
        assert request.holding is not None
        request.holding.become(BlockUser.QUARANTINED)
        self.parked[hold_id], request.holding = request.holding, None

    def release_parked(self, hold_id: str) -> bool:
        """Free what is parked under that id; False if nothing is."""
        holding = self.parked.pop(hold_id, None)
        if holding is not None:
            holding.end()
        return holding is not None

    def begin_again(self, request: Request, num_computed_tokens: int) -> None:
        """What steps have computed for it, and those in flight will, behind that is void."""
        self._inflight.void(request.request_id)
        self._steps.forget(request.request_id)
        request.begin_again(num_computed_tokens)

    # ---- invariants ----------------------------------------------------------------

    def assert_empty(self) -> None:
        """Raise AssertionError, with the stories, if a request is left anywhere."""
        stories = "\n".join(request.story() for request in self.requests.values())
        assert not self.requests, f"requests are left:\n{stories}"
        assert not self.running
        assert not self.receiving
        assert not self.leased
        assert not self.parked, f"blocks are parked: {list(self.parked)}"
        assert not len(self.waiting)

    def check(self) -> None:
        """Raise AssertionError if a request is in a wrong place. O(requests)."""
        num_waiting = 0
        places = {
            State.RECEIVING: self.receiving,
            State.RUNNING: self.running,
            State.LEASED: self.leased,
        }
        for request in self.requests.values():
            is_waiting = request.state is State.WAITING
            num_waiting += is_waiting
            assert (request.holding is None) == is_waiting, request.story()
            assert bool(request.waits_for) == (request.state is State.CLOSING), request.story()
            for state, place in places.items():
                is_there = place.get(request.request_id) is request
                assert is_there == (request.state is state), request.story()
            if request.holding is None:
                continue
            is_quarantined = request.holding.user is BlockUser.QUARANTINED
            assert is_quarantined == bool(request.waits_for - {Wait.STEP}), request.story()
        assert num_waiting == len(self.waiting)
        for place in places.values():
            assert place.keys() <= self.requests.keys(), "a request that is gone has a place"
