"""What worker halves tell the scheduler half beside what means the same for all connectors.

At P alone, of pushes: that D is ready for one, or that there will be none. It travels as the opaque
payload of reports, so each rank's news comes by itself, and is put together here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

import msgspec

from pdserve.connectors.quorum import MAX_REMEMBERED, Votes


class Registered(msgspec.Struct, frozen=True, kw_only=True):
    """D has reserved blocks for the push `nonce`. Counts once every rank has it."""

    nonce: str


class Withdrawn(msgspec.Struct, frozen=True, kw_only=True):
    """There will be no push under `nonce`, or no more of it. One rank is enough.

    D gave it up or is gone. What is computed can still be leased and pulled.
    """

    nonce: str
    reason: str = ""


class PushNews(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one rank has seen of pushes since its last report; each fact once."""

    rank: int
    registered: list[Registered] = []
    withdrawn: list[Withdrawn] = []

    @staticmethod
    def from_payload(payload: bytes) -> PushNews:
        """Decode what `to_payloads` has encoded."""
        return _DECODER.decode(payload)

    def to_payloads(self) -> list[bytes]:
        """Encode it for a report; nothing if there is none."""
        return [_ENCODER.encode(self)] if self.registered or self.withdrawn else []


_DECODER = msgspec.msgpack.Decoder(PushNews)
_ENCODER = msgspec.msgpack.Encoder()


class PushQuorum:
    """Makes one word out of those of all ranks of P.

    A push begins when every rank has its registration, and is withdrawn with the first that lost
    it. What a rank says twice counts as the fault `report_repeated`.

    Args:
        faults: Where that is counted.
    """

    def __init__(self, num_ranks: int, faults: Counter[str]) -> None:
        self._num_ranks = num_ranks
        self._faults = faults
        self._registered: Votes[Registered] = Votes(num_ranks)
        # By nonce, which ranks have said so; no vote, because the first of them decides.
        self._withdrawn: OrderedDict[str, set[int]] = OrderedDict()

    @property
    def num_open(self) -> int:
        """Registrations that some ranks have, and others not yet."""
        return len(self._registered)

    def add(self, news: PushNews) -> PushNews:
        """Take what a rank has seen; return what is complete with it."""
        rank = news.rank
        if not 0 <= rank < self._num_ranks:
            self._faults["report_of_unknown_rank"] += 1
            return PushNews(rank=rank)
        registered = [
            push
            for push in news.registered
            if push.nonce not in self._withdrawn
            and self._registered.add(push.nonce, True, rank, push) is not None
        ]
        withdrawn = [push for push in news.withdrawn if self._is_first(rank, push.nonce)]
        self._faults.update(self._registered.take_faults())
        return PushNews(rank=rank, registered=registered, withdrawn=withdrawn)

    def settle(self, nonce: str) -> None:
        """A push is over; it may have been stopped before D had registered on all ranks."""
        self._registered.give_up(nonce, is_over=True)

    def _is_first(self, rank: int, nonce: str) -> bool:
        """Take one rank's withdrawal; whether it is the first of this push."""
        ranks = self._withdrawn.setdefault(nonce, set())
        if rank in ranks:
            self._faults["report_repeated"] += 1
            return False
        ranks.add(rank)
        self._registered.give_up(nonce)
        if len(self._withdrawn) > MAX_REMEMBERED:
            self._withdrawn.popitem(last=False)
        return len(ranks) == 1
