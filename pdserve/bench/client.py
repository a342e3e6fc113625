"""Sends requests when they are due, and records their answers with times.

Due times are absolute: a late client sends at once and shifts nothing. A request waits for its due
time, for the end of the one it follows, and for a place if places are limited;
`Outcome.scheduled_s` is the end of the last of these waits, so the time from it to `sent_s` is the
client's own delay. Connections are made before their requests are due. Knows no other client, no
data set and no figure.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from pdserve.bench.answer import Answer, error_of
from pdserve.bench.bodies import Asking, adapt, follow, needs_ids
from pdserve.bench.http import Address, Connections, HttpError, Reply
from pdserve.bench.records import Outcome, Planned, Prompt

_CANCEL_BEFORE_FIRST_S: Final = 0.002
"""Time after which a request is cancelled if it is to be cancelled before its first token."""
_AHEAD_S: Final = 0.25
"""Time before a request is due at which its connection is made."""
_CONNECT_TIMEOUT_S: Final = 10.0


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """How a client sends.

    Attributes:
        max_concurrency: Maximum requests in flight; None sets no limit.
        request_timeout_s: Limit for one request, from the time it is sent.
        keep_text: Whether to keep generated text in the outcomes.
        id_prefix: Prefix of the requests' ids, before their index.
    """

    max_concurrency: int | None = None
    request_timeout_s: float = 1800.0
    keep_text: bool = False
    id_prefix: str = "bench-"


class Client:
    """One process's share of a run.

    Args:
        asking: The settings that all requests share.
        sending: How to send them.
        on_outcome: Receives each request's outcome when it is over.
    """

    def __init__(
        self, asking: Asking, sending: Sending, *, on_outcome: Callable[[Outcome], None]
    ) -> None:
        self._asking = asking
        self._sending = sending
        self._on_outcome = on_outcome
        self._connections = Connections(Address(asking.target.url), asking.target.headers)
        self._start_s = 0.0
        self._followers: dict[int, list[Planned]] = {}
        self._due: deque[tuple[Planned, Prompt, float]] = deque()
        self._free = sending.max_concurrency
        self._left = 0
        self._soon = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._is_stopped = False
        self.num_in_flight = 0

    async def connect(self, plan: Sequence[Planned]) -> None:
        """Make the connections that `plan` needs at its beginning."""
        openings = (each for each in plan if each.after is None)
        self._connections.want(
            self._places(sum((each.at_s or 0.0) < _AHEAD_S for each in openings))
        )
        await self._connections.settle(_CONNECT_TIMEOUT_S)

    async def run(self, plan: Sequence[Planned], start_s: float) -> None:
        """Send all of `plan`; returns when the last answer has ended, or after `stop`.

        Args:
            plan: The requests; those that follow others come with them.
            start_s: The start of due times (`time.monotonic`).

        Raises:
            ConfigError: A prompt does not fit the endpoint.
        """
        self._start_s = start_s
        self._left = len(plan)
        self._soon = 0
        self._followers.clear()
        self._over.clear()
        if not plan or self._is_stopped:
            return
        for planned in plan:
            if planned.after is not None:
                self._followers.setdefault(planned.after, []).append(planned)
                continue
            prompt = adapt(planned.prompt, self._asking.target.endpoint)
            self._schedule(planned, prompt, planned.at_s or 0.0)
        try:
            await self._over.wait()
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """End the run now: requests under way have no outcome."""
        self._is_stopped = True
        self._over.set()

    def close(self) -> None:
        """Close the connections."""
        self._connections.close()

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _schedule(self, planned: Planned, prompt: Prompt, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        # The loop's clock is `time.monotonic` by its contract with the selectors; by how much
        # the two are apart is measured all the same.
        at_s = self._start_s + due_s + loop.time() - time.monotonic()
        loop.call_at(at_s - _AHEAD_S, self._come_near)
        loop.call_at(at_s, self._become_due, planned, prompt, due_s)

    def _come_near(self) -> None:
        """Prepare for one more request that is due soon."""
        self._soon += 1
        self._connections.want(self._places(self._soon))

    def _places(self, number: int) -> int:
        return number if self._free is None else min(number, self._free)

    def _become_due(self, planned: Planned, prompt: Prompt, due_s: float) -> None:
        self._soon -= 1
        if self._free is None:
            self._begin(planned, prompt, due_s)
            return
        self._due.append((planned, prompt, due_s))
        self._fill(0.0)

    def _fill(self, freed_s: float) -> None:
        """Send waiting requests while there are places; the last place became free at `freed_s`."""
        while self._due and self._free:
            self._free -= 1
            planned, prompt, due_s = self._due.popleft()
            self._begin(planned, prompt, max(due_s, freed_s))

    def _begin(self, planned: Planned, prompt: Prompt, scheduled_s: float) -> None:
        task = asyncio.get_running_loop().create_task(self._live(planned, prompt, scheduled_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.num_in_flight += 1

    async def _live(self, planned: Planned, prompt: Prompt, scheduled_s: float) -> None:
        outcome = Outcome(
            index=planned.index,
            request_id=f"{self._sending.id_prefix}{planned.index}",
            group=planned.group,
            scheduled_s=scheduled_s,
        )
        followers = self._followers.get(planned.index, ())
        answer = await self._ask(planned, prompt, outcome, tell_ids=bool(followers))
        self.num_in_flight -= 1
        if self._free is not None:
            self._free += 1
            self._fill(outcome.end_s)
        for follower in followers:
            self._continue(follower, prompt, outcome, answer)
        self._end(outcome)

    def _continue(self, planned: Planned, before: Prompt, outcome: Outcome, answer: Answer) -> None:
        """Schedule the next turn of a conversation after the user's pause."""
        due_s = max(outcome.end_s + planned.delay_s, planned.at_s or 0.0)
        why = ""
        if outcome.is_good:
            endpoint = self._asking.target.endpoint
            try:
                prompt = follow(
                    before, answer.text, answer.token_ids, adapt(planned.prompt, endpoint)
                )
            except ValueError as error:
                why = f"this turn cannot follow request {planned.after}: {error}"
        else:
            why = f"request {planned.after}, which this turn follows, was not answered"
        if why:
            self._give_up(planned, due_s, why)
            return
        self._schedule(planned, prompt, due_s)

    def _give_up(self, planned: Planned, due_s: float, why: str) -> None:
        """Note that a turn, and those that follow it, cannot be sent."""
        now_s = self._now_s()
        left = [planned]
        while left:
            turn = left.pop()
            self._end(
                Outcome(
                    index=turn.index,
                    request_id=f"{self._sending.id_prefix}{turn.index}",
                    group=turn.group,
                    scheduled_s=due_s,
                    sent_s=due_s,
                    end_s=now_s,
                    error=why
                    if turn is planned
                    else f"request {turn.after}, which this turn follows, was not answered",
                )
            )
            left += self._followers.get(turn.index, ())

    def _end(self, outcome: Outcome) -> None:
        self._left -= 1
        self._on_outcome(outcome)
        if self._left == 0:
            self._over.set()

    async def _ask(
        self, planned: Planned, prompt: Prompt, outcome: Outcome, *, tell_ids: bool
    ) -> Answer:
        """Send one request, and fill in its outcome."""
        body = self._asking.body(
            prompt, planned.max_tokens, tell_ids=tell_ids and needs_ids(planned)
        )
        request = self._connections.encode(body, outcome.request_id)
        life = _Life(planned.cancel_after_tokens)
        hang_up_s = planned.cancel_after_s
        if planned.cancel_after_tokens == 0:
            hang_up_s = _CANCEL_BEFORE_FIRST_S
        timer = None
        if hang_up_s is not None:
            timer = asyncio.get_running_loop().call_later(hang_up_s, life.hang_up)
        limit_s = self._sending.request_timeout_s
        outcome.sent_s = self._now_s()
        try:
            async with asyncio.timeout(limit_s):
                await self._connections.exchange(request, life.make_reply)
        except _HungUpError:
            outcome.is_cancelled = True
        except TimeoutError:
            outcome.error = f"the answer did not end within {limit_s:g} s"
        except HttpError as error:
            outcome.error = str(error)
        finally:
            if timer is not None:
                timer.cancel()
        self._fill_in(outcome, planned, life.reply or life.make_reply())
        return life.reply.answer if life.reply is not None else Answer()

    def _fill_in(self, outcome: Outcome, planned: Planned, reply: _Streamed) -> None:
        answer = reply.answer
        outcome.end_s = self._now_s()
        outcome.status = reply.status
        if reply.status not in (0, 200):
            outcome.error = outcome.error or error_of(reply.status, bytes(reply.body))
        elif reply.status == 200 and not reply.is_stream:
            outcome.error = outcome.error or (
                f"the answer is not an event stream but {reply.headers.get('content-type')!r}"
            )
        elif not outcome.is_cancelled and not outcome.error:
            answer.finish()
            outcome.error = answer.error
            outcome.end_s = reply.last_s - self._start_s
        outcome.chunk_s = [at_s - self._start_s for at_s in answer.chunk_s]
        outcome.chunk_tokens = answer.chunk_tokens
        outcome.finish_reason = answer.finish_reason
        num_in, num_out = answer.usage or (0, 0)
        outcome.num_prompt_tokens = num_in or planned.num_prompt_tokens or 0
        outcome.num_output_tokens = num_out or sum(answer.chunk_tokens)
        outcome.num_cached_tokens = answer.num_cached_tokens
        if self._sending.keep_text:
            outcome.text = answer.text


class _HungUpError(Exception):
    """Cancel this request, as planned."""


class _Life:
    """A request from its sending to its end; sending it again restarts its answer.

    Args:
        hang_up_after: Chunks with tokens after which it is given up.
    """

    def __init__(self, hang_up_after: int | None) -> None:
        self.reply: _Streamed | None = None
        self._hang_up_after = hang_up_after
        self._is_given_up = False

    def make_reply(self) -> _Streamed:
        """Return the receiver of the answer."""
        self.reply = _Streamed(self._hang_up_after)
        if self._is_given_up:
            self.reply.hang_up()
        return self.reply

    def hang_up(self) -> None:
        """Cancel it, whatever has arrived."""
        self._is_given_up = True
        if self.reply is not None:
            self.reply.hang_up()


class _Streamed(Reply):
    """One answer while it comes.

    Args:
        hang_up_after: Chunks with tokens after which it is given up.
    """

    def __init__(self, hang_up_after: int | None) -> None:
        super().__init__(asyncio.get_running_loop().create_future())
        self.answer = Answer()
        self.body = bytearray()
        self.is_stream = False
        self.last_s = 0.0
        self._hang_up_after = hang_up_after

    def on_head(self) -> None:
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.is_stream = self.status == 200 and kind == "text/event-stream"

    def on_body(self, data: bytes, at_s: float) -> None:
        if self.done.done():
            return
        self.last_s = at_s
        if not self.is_stream:
            self.body += data
            return
        self.answer.feed(data, at_s)
        if self._hang_up_after and len(self.answer.chunk_s) >= self._hang_up_after:
            self.hang_up()

    def hang_up(self) -> None:
        """Ignore the rest of it."""
        if not self.done.done():
            self.done.set_exception(_HungUpError())
