"""What the thread that asks the store does when a question cannot be sent, or answered any more."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from pdserve.connectors.lmcache.messages import ChunkRange, LookupDone, StoreInstructions, read_news
from pdserve.connectors.lmcache.moving import StoreLink
from pdserve.connectors.lmcache.settings import LMCacheSettings
from pdserve.connectors.lmcache.watch import StoreWatch
from pdserve.wire.ids import RequestId
from tests.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.connectors.lmcache.messages import StoreNews


class Unanswered:
    """A lookup or ping that the server took in before it ended."""

    has_answered = False

    def poll(self, _now_s: float) -> bool:
        return False

    def query(self) -> bool:
        return False


class BrokenClient:
    """Sends nothing, and counts what it is to send."""

    def __init__(self) -> None:
        self.num_pings = 0
        self.num_lookups = 0
        self.has_ended = False

    def has_server_ended(self) -> bool:
        return self.has_ended

    def ping(self) -> None:
        self.num_pings += 1
        raise RuntimeError("no ping")

    def lookup(self, chunks: ChunkRange) -> None:
        self.num_lookups += 1
        raise RuntimeError("no lookup")


class EndedClient(BrokenClient):
    """Sends, but to a server whose process ends with the first lookup."""

    def ping(self) -> Unanswered:
        self.num_pings += 1
        return Unanswered()

    def lookup(self, chunks: ChunkRange) -> Unanswered:
        self.num_lookups += 1
        self.has_ended = True
        return Unanswered()


class SilentHttpSide(BrokenClient):
    """Has an HTTP side that answers nothing in time, and counts who asks it."""

    chunk_tokens = 16

    def __init__(self) -> None:
        super().__init__()
        self.http = self
        self.num_asked = 0

    def connect(self) -> None:
        pass

    def version(self) -> str:
        self.num_asked += 1
        return ""

    def other_stages(self) -> list[str]:
        self.num_asked += 1
        return []


class Bench:
    def __init__(self, client: BrokenClient, timeout_s: float = 0.1) -> None:
        self.client = client
        self.link = StoreLink(self.client, lambda _: None, rank=0, wake=lambda: None)
        self.link.is_up = True
        settings = LMCacheSettings(heartbeat_s=timeout_s, timeout_s=timeout_s)
        self.watch = StoreWatch(self.link, settings, block_size=16, tells=True)
        self.news: list[StoreNews] = []

    def hear(self) -> list[StoreNews]:
        self.news += map(read_news, self.link.take_report().payloads)
        return self.news


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench(BrokenClient())
    made.watch.start()
    yield made
    made.watch.close()


def test_a_lookup_that_cannot_be_sent_is_a_miss_for_its_request_too(bench: Bench) -> None:
    chunks = ChunkRange(7, RequestId("r"), bytes(4 * 16), "", 0, 1)
    bench.watch.post(StoreInstructions(lookups=[chunks]))
    wait_until(lambda: any(isinstance(each, LookupDone) for each in bench.hear()))
    found = next(each for each in bench.news if isinstance(each, LookupDone))
    assert (found.session, found.num_chunks, found.is_late) == (7, 0, True)


def test_a_ping_that_cannot_be_sent_is_tried_again_with_the_next_heartbeat(bench: Bench) -> None:
    wait_until(lambda: bench.client.num_pings)
    time.sleep(0.35)
    assert bench.client.num_pings <= 5


def test_an_http_side_that_does_not_answer_is_waited_for_once() -> None:
    client = SilentHttpSide()
    Bench(client).watch.connect()
    assert client.num_asked == 1


def test_nobody_waits_for_a_server_whose_process_has_ended() -> None:
    bench = Bench(EndedClient(), timeout_s=600.0)
    bench.watch.start()
    for session in (7, 8):
        chunks = ChunkRange(session, RequestId("r"), bytes(4 * 16), "", 0, 1)
        bench.watch.post(StoreInstructions(lookups=[chunks]))
        wait_until(lambda: LookupDone in map(type, bench.hear()))
        (found,) = (each for each in bench.news if isinstance(each, LookupDone))
        assert (found.session, found.num_chunks, found.is_late) == (session, 0, True)
        bench.news.clear()
    assert bench.client.num_lookups == 1
    bench.watch.close()
