"""The UCX mover: copies that both sides' movers agree on (`frames`).

    READ    this side posts a receive, asks the peer to send, and writes the bytes to its blocks
    WRITE   this side offers a copy; the peer posts a receive, and writes the bytes to its blocks

Everything happens in the transfer thread, and only `_read_over` and `_offer_over` write to KV
blocks: a copy that was abandoned, withdrawn or lost before that does not affect any block, whatever
UCX still does with its message.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from pdserve.connectors.pieces import count_runs
from pdserve.connectors.transfer.seams import (
    Direction,
    ExposedMemory,
    Fault,
    FrameError,
    Remote,
)
from pdserve.connectors.transfer_thread.host import HostProcesses, region_of
from pdserve.connectors.ucx.frames import (
    MAX_COPY_BYTES,
    MAX_TRIAL_BYTES,
    CopyLanded,
    DropCopy,
    FetchCopy,
    OfferCopy,
    SendBroken,
    TakeCopy,
    WithdrawCopy,
    decode,
    encode,
)
from pdserve.connectors.ucx.library import UcxWorker
from pdserve.connectors.ucx.messages import Messages, TaggedMessage, nothing
from pdserve.connectors.ucx.staging import Staging
from pdserve.wire.seal import UNREADABLE

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    import numpy.typing as npt

    from pdserve.connectors.base import KVLayout
    from pdserve.connectors.transfer.protocol import Region
    from pdserve.connectors.transfer.seams import Job, JobEnd, MoverLink, WarmUp
    from pdserve.observe.clock import Clock

_NEVER = float("inf")
_TRY_AGAIN_S = 0.05


@dataclass(slots=True, eq=False)
class _Trial:
    """A test message to fetch for a warm-up, retried for a while if it fails.

    UCX may reuse the previous, broken connection to a peer that has just been met again. Each try
    goes over the latest link to the peer, as the one that it began with may be lost meanwhile.
    """

    warm_up: WarmUp
    num_left: int = 30
    due_s: float = -_NEVER


class UcxMover:
    """See `ThreadMover`.

    Args:
        kv: This rank's KV memory, contiguous.
        watch: Makes the thread's event loop wake up when a descriptor is readable.
        options: See `UcxWorker`.
        max_messages: Limit of messages in flight, each way.
        timeout_s: Time after which one of them ends its peer's connection. A busy peer that has
            not got to it when its transfer is given up needs as much again.
    """

    num_lanes: ClassVar[int] = 1
    outlives_links: ClassVar[bool] = False
    why_fence: str = ""

    def __init__(
        self,
        *,
        kv: torch.Tensor,
        layout: KVLayout,
        watch: Callable[[int], None],
        clock: Clock,
        options: Mapping[str, str],
        max_messages: int,
        timeout_s: float,
    ) -> None:
        self._kv = kv
        self._staging = Staging(kv)
        self._pool = region_of(kv, layout.block_bytes)
        self._watch = watch
        self._clock = clock
        self._options = options
        self._max_messages = max_messages
        self._timeout_s = timeout_s
        self._worker: UcxWorker
        self._messages: Messages
        self.processes = HostProcesses(is_direct=False)
        self._faults: Counter[str] = Counter()
        self._num_copies = 0
        self._reads: dict[TaggedMessage, Job | _Trial] = {}
        self._writes: dict[int, Job] = {}
        self._incoming: dict[tuple[MoverLink, int], TaggedMessage] = {}
        self._serving: dict[tuple[MoverLink, int], TaggedMessage] = {}
        self._ended: deque[tuple[Job, JobEnd]] = deque()
        self._trials: list[_Trial] = []  # waiting for a first or another try
        self._warmed_up: deque[tuple[WarmUp, str | None]] = deque()

    @property
    def due_s(self) -> float:
        """See `ThreadMover`."""
        return min([self._messages.due_s, *(trial.due_s for trial in self._trials)])

    # ---- the thread ------------------------------------------------------------------------

    def start(self) -> None:
        """See `ThreadMover`."""
        if self._kv.is_cuda:
            torch.cuda.set_device(self._kv.device)  # UCX uses the calling thread's context
        self._worker = UcxWorker(self._options)
        self._messages = Messages(
            self._worker,
            self._staging,
            clock=self._clock,
            max_posted=self._max_messages,
            timeout_s=self._timeout_s,
        )
        self._watch(self._worker.descriptor)

    def tick(self) -> None:
        """See `ThreadMover`."""
        self._messages.advance()
        now_s = self._clock.monotonic_s()
        for trial in [each for each in self._trials if each.due_s <= now_s]:
            self._trials.remove(trial)
            self._fetch(trial, MAX_TRIAL_BYTES, b"", MAX_TRIAL_BYTES)

    def drive(self) -> None:
        """See `ThreadMover`: `tick` does it."""

    def may_wait(self) -> bool:
        """See `ThreadMover`."""
        self._messages.advance()
        return not (self._ended or self._warmed_up) and self._worker.arm()

    def deliver(self) -> bool:
        """See `ThreadMover`."""
        moved = bool(self._ended or self._warmed_up)
        while self._ended:
            job, end = self._ended.popleft()
            job.on_settled(end)
        while self._warmed_up:
            warm_up, failure = self._warmed_up.popleft()
            warm_up.on_settled(failure)
        return moved

    def take_faults(self) -> Counter[str]:
        """See `ThreadMover`."""
        faults, self._faults = self._faults, Counter()
        return faults

    def close(self, timeout_s: float) -> bool:
        """See `ThreadMover`."""
        self._messages.close()
        return True

    # ---- the protocol (`Mover`) ------------------------------------------------------------

    @property
    def target(self) -> ExposedMemory:
        """See `Mover`."""
        return ExposedMemory(self._worker.address, self._pool, self._pool)

    def meet(self, metadata: bytes, pool: Region) -> Remote:
        """See `Mover`."""
        return Remote(metadata, pool)

    def forget(self, remote: Remote) -> None:
        """See `Mover`: a connection ends with its link."""

    def warm_up(self, warm_up: WarmUp) -> None:
        """See `Mover`."""
        self._trials.append(_Trial(warm_up))

    def submit(self, job: Job) -> None:
        """See `Mover`."""
        for units, pool in ((job.local_units, self._pool), (job.remote_units, job.remote.pool)):
            why = pool.why_outside(units, job.unit_bytes)
            if why is not None:
                self._settle(job, why)
                return
        theirs = job.remote_units.astype("<i4").tobytes()
        if job.direction is Direction.READ:
            self._fetch(job, job.unit_bytes, theirs, job.num_bytes)
            return
        self._num_copies += 1
        self._writes[self._num_copies] = job
        job.posted_s = self._clock.monotonic_s()
        _link_of(job).say(encode(OfferCopy(self._num_copies, job.unit_bytes, theirs)))

    def abandon(self, tag: Hashable) -> int:
        """See `Mover`: after this call none of its bytes can land."""
        for message, what in list(self._reads.items()):
            if _end_of(what).tag == tag:
                del self._reads[message]
                self._messages.drop(message)
                if message.is_posted:
                    _link_of(what).say(encode(DropCopy(message.tag)))
                if isinstance(what, _Trial):
                    self._warmed_up.append((what.warm_up, "it was given up"))
        for trial in [each for each in self._trials if each.warm_up.tag == tag]:
            self._trials.remove(trial)
            self._warmed_up.append((trial.warm_up, "it was given up"))
        for copy_id, job in list(self._writes.items()):
            if job.tag == tag:
                del self._writes[copy_id]
                _link_of(job).say(encode(WithdrawCopy(copy_id)))
        self._ended = deque(each for each in self._ended if each[0].tag != tag)
        return 0

    def fence(self) -> None:
        """See `Mover`."""
        for link in {link for link, _ in self._incoming}:
            self.hang_up(link)

    def hang_up(self, link: MoverLink) -> None:
        """See `Mover`: copies offered over the link are not written."""
        for table in (self._incoming, self._serving):
            for key in [key for key in table if key[0] is link]:
                self._messages.drop(table.pop(key))
        self._messages.hang_up(link.metadata)

    def hear(self, link: MoverLink, body: bytes) -> None:
        """See `Mover`."""
        try:
            frame = decode(body)
        except UNREADABLE as error:
            raise FrameError(
                Fault.MALFORMED, f"the mover's message is unreadable: {error}"
            ) from None
        match frame:
            case FetchCopy():
                self._serve(link, frame)
            case DropCopy():
                message = self._serving.get((link, frame.tag))
                if message is not None:
                    message.send_nothing()
            case OfferCopy():
                self._take(link, frame)
            case TakeCopy():
                self._send_offered(link, frame)
            case CopyLanded():
                job = self._offered(link, frame.copy_id)
                if job is not None:
                    del self._writes[frame.copy_id]
                    self._settle(job, frame.why_not or None)
            case WithdrawCopy():
                incoming = self._incoming.pop((link, frame.copy_id), None)
                if incoming is not None:
                    self._messages.drop(incoming)
            case SendBroken():
                self._messages.hang_up(link.metadata)

    # ---- READ ------------------------------------------------------------------------------

    def _fetch(self, what: Job | _Trial, unit_bytes: int, units: bytes, num_bytes: int) -> None:
        """Make a peer send units of its memory or, without units, `unit_bytes` arbitrary bytes."""
        tag = self._messages.new_tag()

        def on_posted() -> None:
            if not isinstance(what, _Trial):
                what.posted_s = self._clock.monotonic_s()
            _link_of(what).say(encode(FetchCopy(tag, unit_bytes, units)))

        def on_over(payload: torch.Tensor, failure: str | None) -> None:
            del self._reads[message]
            self._read_over(what, payload, failure)

        address = _end_of(what).remote.metadata
        message = TaggedMessage(address, tag, num_bytes, on_over, on_posted=on_posted)
        self._reads[message] = what
        self._messages.post(message)

    def _read_over(self, what: Job | _Trial, payload: torch.Tensor, failure: str | None) -> None:
        """Take the result of a fetch; write the bytes of a copy to our blocks."""
        if isinstance(what, _Trial):
            what.num_left -= 1
            if failure is None or not what.num_left:
                self._warmed_up.append((what.warm_up, failure))
            else:
                what.due_s = self._clock.monotonic_s() + _TRY_AGAIN_S
                self._trials.append(what)
            return
        if failure is None:
            self._staging.scatter(payload, what.local_units, what.unit_bytes)
        self._settle(what, failure)

    def _serve(self, link: MoverLink, fetch: FetchCopy) -> None:
        """Send the units that a peer wants to read."""
        if fetch.units:
            units = self._named(fetch.unit_bytes, fetch.units)
            fill = functools.partial(self._staging.gather, units, fetch.unit_bytes)
            self._send(link, fetch.tag, len(units) * fetch.unit_bytes, fill)
        elif fetch.unit_bytes <= MAX_TRIAL_BYTES:
            self._send(link, fetch.tag, fetch.unit_bytes, nothing)
        else:
            raise FrameError(Fault.UNEXPECTED, f"no units have {fetch.unit_bytes} bytes here")

    # ---- WRITE -----------------------------------------------------------------------------

    def _send_offered(self, link: MoverLink, take: TakeCopy) -> None:
        """Send an offered copy, for which the peer has posted a receive."""
        job = self._offered(link, take.copy_id)
        if job is None:  # withdrawn, but the peer's receive must end
            self._send(link, take.tag, 0, nothing)
            return
        fill = functools.partial(self._staging.gather, job.local_units, job.unit_bytes)
        self._send(link, take.tag, job.num_bytes, fill, copy_id=take.copy_id)

    def _offered(self, link: MoverLink, copy_id: int) -> Job | None:
        """Return the copy that is offered under this number, if it is offered over this link."""
        job = self._writes.get(copy_id)
        return job if job is not None and job.link is link else None

    def _take(self, link: MoverLink, offer: OfferCopy) -> None:
        """Receive a copy that a peer wants to write."""
        units = self._named(offer.unit_bytes, offer.units)
        tag, key = self._messages.new_tag(), (link, offer.copy_id)

        def on_over(payload: torch.Tensor, failure: str | None) -> None:
            del self._incoming[key]
            self._offer_over(link, offer, units, payload, failure)

        message = TaggedMessage(
            link.metadata,
            tag,
            len(units) * offer.unit_bytes,
            on_over,
            on_posted=lambda: link.say(encode(TakeCopy(offer.copy_id, tag))),
        )
        if key in self._incoming:
            raise FrameError(Fault.UNEXPECTED, f"copy {offer.copy_id} was already offered")
        self._incoming[key] = message
        self._messages.post(message)

    def _offer_over(
        self,
        link: MoverLink,
        offer: OfferCopy,
        units: npt.NDArray[np.int32],
        payload: torch.Tensor,
        failure: str | None,
    ) -> None:
        """Write an offered copy that has arrived, if the peer may still write to the blocks."""
        if failure is None:
            first = units.astype(np.int64) * offer.unit_bytes
            last = first + (offer.unit_bytes - 1)
            blocks = np.unique(np.concatenate([first, last]) // self._pool.stride_bytes)
            if not set(blocks.tolist()) <= set(link.exposed()):
                self._faults["write_not_exposed"] += 1
                failure = "the blocks are not its to write"
        if failure is None:
            self._staging.scatter(payload, units, offer.unit_bytes)
        link.say(encode(CopyLanded(offer.copy_id, failure or "")))

    # ---- both ------------------------------------------------------------------------------

    def _send(
        self,
        link: MoverLink,
        tag: int,
        num_bytes: int,
        fill: Callable[[torch.Tensor], None],
        *,
        copy_id: int | None = None,
    ) -> None:
        """Send a message; if it fails, a copy that this side offered fails with it."""

        def on_over(payload: torch.Tensor, failure: str | None) -> None:
            del self._serving[link, tag]
            if failure is None:
                return
            link.say(encode(SendBroken()))
            if copy_id in self._writes:
                self._settle(self._writes.pop(copy_id), failure)

        if (link, tag) in self._serving:
            raise FrameError(Fault.UNEXPECTED, f"tag {tag} was sent twice")
        message = TaggedMessage(link.metadata, tag, num_bytes, on_over, fill=fill)
        self._serving[link, tag] = message
        self._messages.post(message)

    def _settle(self, job: Job, failure: str | None) -> None:
        """End a job; `deliver` notifies its owner."""
        num_descriptors = count_runs(job.remote_units, job.local_units)
        end = job.ended(failure, self._clock.monotonic_s, num_descriptors)
        self._ended.append((job, end))

    def _named(self, unit_bytes: int, raw: bytes) -> npt.NDArray[np.int32]:
        """Return the units of this side's memory that a peer names.

        Raises:
            FrameError: The bytes name no units, units outside the memory, or more than one copy
                has: a buffer of their size would be allocated for them.
        """
        if not raw or len(raw) % 4:
            raise FrameError(Fault.UNEXPECTED, f"{len(raw)} bytes do not list units")
        units: npt.NDArray[np.int32] = np.frombuffer(raw, dtype="<i4")
        why = self._pool.why_outside(units, unit_bytes)
        if len(units) * unit_bytes > max(MAX_COPY_BYTES, self._pool.stride_bytes):
            why = f"{len(units)} units of {unit_bytes} bytes are more than one copy has"
        if why is not None:
            raise FrameError(Fault.UNEXPECTED, why)
        return units


def _end_of(what: Job | _Trial) -> Job | WarmUp:
    return what.warm_up if isinstance(what, _Trial) else what


def _link_of(what: Job | _Trial) -> MoverLink:
    link = what.warm_up.remote.link if isinstance(what, _Trial) else what.link
    assert link is not None, "the protocol copies only to and from peers that it is linked to"
    return link
