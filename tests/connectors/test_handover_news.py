"""What ranks of P say of a push: it begins with the last of them, and ends with the first."""

from __future__ import annotations

from collections import Counter

import pytest

from pdserve.connectors.handover.news import PushNews, PushQuorum, Registered, Withdrawn

N = Registered(nonce="n")


class Ranks:
    """The ranks of one P.

    Attributes:
        faults: What was counted so far.
    """

    def __init__(self, num_ranks: int) -> None:
        self.faults: Counter[str] = Counter()
        self.quorum = PushQuorum(num_ranks, self.faults)

    def have(self, rank: int) -> bool:
        """D has registered on `rank`; whether that was the last of them."""
        return self.quorum.add(PushNews(rank=rank, registered=[N])).registered == [N]

    def lose(self, rank: int, reason: str) -> list[str]:
        """There is no push on `rank`; the reasons that this has for all."""
        withdrawn = Withdrawn(nonce="n", reason=reason)
        news = self.quorum.add(PushNews(rank=rank, withdrawn=[withdrawn]))
        return [each.reason for each in news.withdrawn]


def test_news_is_read_as_it_was_written_and_none_is_no_payload() -> None:
    news = PushNews(rank=3, registered=[N], withdrawn=[Withdrawn(nonce="m", reason="why")])
    assert [PushNews.from_payload(each) for each in news.to_payloads()] == [news]
    assert PushNews(rank=3).to_payloads() == []


def test_a_push_begins_when_every_rank_has_its_registration() -> None:
    ranks = Ranks(3)
    assert not ranks.have(1)
    assert not ranks.have(1)
    assert ranks.faults == {"report_repeated": 1}
    assert not ranks.have(0)
    assert ranks.have(2)
    assert not ranks.quorum.num_open


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_the_engine_does_not_have_begins_no_push(rank: int) -> None:
    ranks = Ranks(2)
    assert not ranks.have(0)
    assert not ranks.have(rank)
    assert ranks.lose(rank, "why") == []
    assert ranks.faults == {"report_of_unknown_rank": 2}
    assert ranks.have(1)


def test_a_registration_that_one_rank_never_had_is_forgotten_with_the_push() -> None:
    ranks = Ranks(2)
    ranks.have(0)
    ranks.quorum.settle("n")
    assert not ranks.quorum.num_open
    assert not ranks.have(0)  # and opens none again
    assert ranks.faults == {"report_repeated": 1}
    assert not ranks.quorum.num_open


def test_a_push_is_withdrawn_once_and_with_the_first_rank() -> None:
    ranks = Ranks(3)
    ranks.have(0)
    assert ranks.lose(1, "a") == ["a"]
    assert ranks.lose(2, "b") == []
    assert not ranks.faults
    assert ranks.lose(2, "b") == []
    assert ranks.faults == {"report_repeated": 1}
    for rank in (1, 2):  # too late to matter
        assert not ranks.have(rank)
    assert not ranks.quorum.num_open
