"""What goes through a deployment while faults are played: streams, each read by its own thread."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from tests.waiting import wait_until

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

NUM_TOKENS = 24
SLOW_KBIT_PER_S = 1500
"""Half a megabyte, the KV of a prompt, takes about 2.6 s."""
LATE = "the fault came too late for the transfer"


class Outcome(Protocol):
    """A request whose end `Stage.settle` waits for.

    Attributes:
        tokens: Token ids so far.
        end: "finished", "left" or an error's code, once it is over.
    """

    tokens: list[int]
    end: str | None
    ended_s: float

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""

    def silence_s(self, since_s: float) -> float:
        """The longest time in which its client saw nothing; asked for where it is measured."""


@dataclass
class Stream:
    """One streamed completion, read by a thread of its own. An `Outcome`.

    Attributes:
        tokens: Token ids so far.
        heard_s: When some of them came.
        end: "finished", "left" or an error's code, once it is over.
    """

    url: str
    prompt: list[int]
    num_tokens: int = NUM_TOKENS
    tokens: list[int] = field(default_factory=list)
    heard_s: list[float] = field(default_factory=list)
    end: str | None = None
    started_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    _has_left: bool = False

    def __post_init__(self) -> None:
        where = urlsplit(self.url)
        self._connection = http.client.HTTPConnection(where.netloc, timeout=60)
        self._connection.connect()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait_tokens(self, num_tokens: int, timeout_s: float = 30.0) -> None:
        """Wait until so many have come."""
        wait_until(lambda: len(self.tokens) >= num_tokens or self.end is not None, timeout_s)
        assert len(self.tokens) >= num_tokens, f"it ended with {self.end} after {self.tokens}"

    def leave(self) -> None:
        """Hang up at once."""
        self._has_left = True
        connected: socket.socket | None = self._connection.sock
        if connected is not None:  # else it has ended meanwhile
            with contextlib.suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert self.end is not None, f"a request hangs: {len(self.tokens)} tokens, no end"

    def silence_s(self, since_s: float) -> float:
        """The longest time without a token or the end, after a moment and once it is over."""
        moments = [since_s, *(at for at in self.heard_s if at > since_s), self.ended_s]
        return max(later - at for at, later in itertools.pairwise(moments))

    def _run(self) -> None:
        body = {
            "prompt": self.prompt,
            "max_tokens": self.num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        end = "cut off"
        try:
            headers = {"Content-Type": "application/json"}
            self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
            answer = self._connection.getresponse()
            if answer.status != 200:
                end = str(json.loads(answer.read())["error"]["code"])
                return
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    return
                if not line.startswith(b"data: "):
                    continue
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    end = str(event["error"]["code"])
                    continue
                self.heard_s.append(time.monotonic())
                for choice in event["choices"]:
                    self.tokens += choice["token_ids"] or []
                    if choice["finish_reason"] is not None:
                        end = "finished"
        except (OSError, http.client.HTTPException):
            end = "connection lost"
        finally:
            self.ended_s = time.monotonic()
            self.end = "left" if self._has_left and end != "finished" else end
            self._connection.close()


def midway(stage: Stage) -> tuple[Stream, list[int], str]:
    """A request in the middle of its transfer: stream, right answer, D's name."""
    prompt = stage.prompt()
    right = stage.right_answer(prompt)
    assert stage.network is not None
    stage.network.slow(SLOW_KBIT_PER_S)
    stream = stage.stream(prompt)
    stream.wait_tokens(1)
    return stream, right, stage.wait_receiving()


def many(
    stage: Stage, num_streams: int, num_tokens: int = NUM_TOKENS, *, num_begun: int = 3
) -> tuple[list[Stream], list[list[int]]]:
    """Streams at once, some of which have begun; and their right answers."""
    prompts = [stage.prompt(100 + 40 * n) for n in range(num_streams)]
    right = stage.right_answers(prompts, num_tokens)
    streams = [stage.stream(prompt, num_tokens) for prompt in prompts]
    wait_until(lambda: sum(bool(s.tokens) for s in streams) >= num_begun, 60.0)
    return streams, right


def amid(stage: Stage, num_streams: int, *receivers: str) -> tuple[list[Stream], list[list[int]]]:
    """Streams at once, wherever they are when P is stopped; and their right answers.

    One of the receivers has blocks that are being filled then: while P is stopped it stays so, and
    no fault comes too late for it.
    """
    streams, right = many(stage, num_streams, num_begun=4)
    stage.stop("prefill")
    while not any(map(stage.is_receiving, receivers)):
        stage.resume("prefill")
        further, answers = many(stage, 4, num_begun=1)
        stage.stop("prefill")
        streams, right = streams + further, right + answers
    return streams, right
