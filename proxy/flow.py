"""The life of one request in the proxy: one coroutine, cancel-safe at every await.

    QUEUED -> PREFILL -> TRANSFER -> DECODE -> end
      |          |          |          |
      |          +----------+----------+---> LOCAL -> end
      +-------- no prefill engine ---------^

QUEUED    waits for a place (`Admission`), then for a plan (`Router`).
PREFILL   the prefill engine has the request; in a push the decode engine has it too. Its first
          token goes to the client the moment it comes; a handoff follows it, or the end of the
          stream if the request ends there.
TRANSFER  the decode engine has the handoff and reads the KV, or gets the last of what is written
          to it; nothing of it has been passed on yet.
DECODE    its bytes are passed on as they come.
LOCAL     one engine does everything: because there is no pair, or as the last resort.

The ladder when a leg fails, each rung counted and told:

    retry_decode    the same decode engine reads what could not be written to it, or tries again
    other_decode    another one does, with the same handoff while its lease may hold
    other_prefill   the prompt is prefilled again, on another engine if there is one
    local           the whole request on one engine, within its budget for such prompts
    shed            an error that says when to come back

Before it is shed, a request that nobody can serve stands by for as long as it may queue, if an
engine is missing that may come back; then all begins anew, but for what its client already has.

An engine that broke down comes last from then on. One that is well but could not get the KV
does not: its pair is to blame, and is left. A request whose push failed is pulled from then on.
Retries are counted over all rungs; the last rung is tried once in any case. But a request that two
engines ended with, before either had a token of it that the client had not, is tried on no third,
and one of which the model makes NaN on no second.
Whatever the client has already been sent is swallowed from the repeated stream (`Replay`),
so a failure shows as a pause and never as other text.

Who holds what: a handoff is this coroutine's from the moment it is parsed until the decode
leg has ended well. On every other way out, cancellation included, it is given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import DeadlineError, PdserveError, UnavailableError
from pdserve.http.answers import error_body, error_headers
from pdserve.proxy.backend import Health
from pdserve.proxy.delivery import Delivery
from pdserve.proxy.errors import (
    BudgetSpentError,
    KvFailedError,
    NonFiniteError,
    PoisonousError,
    RefusedError,
    WorkerError,
)
from pdserve.proxy.legs import LegFailure, Legs, Prefilled
from pdserve.proxy.push import Push
from pdserve.proxy.replay import DivergedError
from pdserve.proxy.routing import Disaggregate, RunLocally
from pdserve.proxy.story import Mode, NotPushed, Rung, Stage
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.services import Services
    from pdserve.proxy.story import Story
    from pdserve.wire.ids import Incarnation

BACKOFF_S = 0.01
MAX_BACKOFF_S = 0.5
STANDBY_S = 0.02
MAX_STANDBY_S = 0.25
"""Between two looks at which engines are there, at first and at most: a thousand may look."""
_CURED_BY_A_FRESH_LEASE = frozenset({LoadFailure.LEASE_LOST.value, LoadFailure.DIGEST.value})


class Flow:
    """Serves one request.

    Args:
        until_s: When it is to be over, by the event loop's clock.
        headers: For the engines.
        reply_headers: For the client.
    """

    def __init__(
        self,
        services: Services,
        request: web.Request,
        body: ClientBody,
        story: Story,
        *,
        until_s: float,
        headers: Mapping[str, str],
        reply_headers: Mapping[str, str],
    ) -> None:
        self._config = services.config
        self._backends = services.backends
        self._router = services.router
        self._admission = services.admission
        self._metrics = services.metrics
        self._num_bytes = body.num_bytes
        self._until_s = until_s
        self._story = story
        self._reply_headers = reply_headers
        self._delivery = Delivery(request, reply_headers)
        self._legs = Legs(
            services,
            body,
            story,
            self._delivery,
            path=request.path,
            until_s=until_s,
            headers=headers,
            reply_headers=reply_headers,
        )
        self._push = Push(services, self._legs, story)
        self._may_push = self._is_pushable = body.can_be_pushed()
        self._failed: set[Backend] = set()
        self._ended: set[tuple[str, Incarnation | None]] = set()
        self._num_tokens_before = 0
        self._retries_left = services.config.retry_max_retries
        self._num_standbys = 0
        self._stands_by_until_s = float("inf")
        self.outcome = "error"

    async def run(self) -> web.StreamResponse:
        """Answer the client, with the engines' words or with an OpenAI error.

        Raises:
            ClientGoneError: The client closed its connection.
        """
        try:
            self._story.queued()
            async with asyncio.timeout_at(self._until_s), self._admission.place():
                self._story.admitted()
                response = await self._serve()
                self.outcome = "ok"
                return response
        except RefusedError as refusal:
            self.outcome = "client_error"
            return await self._refuse(refusal)
        except TimeoutError:
            limit_s = self._config.request_timeout_s
            late = DeadlineError(
                f"the request was not finished within {limit_s:g} s (--request-timeout-secs)"
            )
            return await self._fail(late)
        except DivergedError as error:
            self._metrics.replays.labels("diverged").inc()
            return await self._fail(error)
        except PdserveError as error:
            if isinstance(error, BudgetSpentError | UnavailableError):
                self._climb(
                    Rung.SHED, "budget" if isinstance(error, BudgetSpentError) else "no_engine"
                )
            return await self._fail(error)

    # --- waiting for engines

    async def _serve(self) -> web.StreamResponse:
        """Serve the request as soon as somebody can.

        Raises:
            UnavailableError, WorkerError: Nobody could, for as long as it may wait; nothing helped.
            RefusedError: The request is at fault, or no engine has room.
        """
        while True:
            try:
                return await self._climb_down()
            except (UnavailableError, WorkerError) as error:
                await self._stand_by(error)

    async def _stand_by(self, error: UnavailableError | WorkerError) -> None:
        """Wait until an engine comes back, or one may compute again what it would not now.

        Raises:
            UnavailableError, WorkerError: `error`: it does not say that nobody can serve now; or no
                engine is missing, or the wait is over.
        """
        if isinstance(error, WorkerError) and not error.is_away:
            raise error
        now_s = asyncio.get_running_loop().time
        if not self._num_standbys:
            self._stands_by_until_s = now_s() + self._config.queue_timeout_s
        before = self._backends.available
        await self._backends.look_again(self._failed)
        if not self._backends.has_missing and self._backends.available <= before:
            raise error
        before &= self._backends.available
        until_s = self._stands_by_until_s
        if isinstance(error, BudgetSpentError):
            wait_s = max(1.0, error.retry_after_s or 0.0) * 2**self._num_standbys
            until_s = min(until_s, now_s() + wait_s)
        self._num_standbys += 1
        self._story.stands_by(error.message)
        pause_s = STANDBY_S
        while now_s() < until_s and self._backends.available <= before:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_STANDBY_S)
        if now_s() >= self._stands_by_until_s:
            raise error
        self._story.stood_by()

    async def _plan(self) -> Disaggregate | RunLocally:
        """Decide how the request is served, not without a look at engines that are not ready yet.

        Raises:
            UnavailableError: No engine can take it now.
        """
        try:
            plan = self._planned()
        except UnavailableError:
            plan = None
        if plan is not None and not (isinstance(plan, RunLocally) and plan.is_outage):
            return plan
        if not self._num_standbys:
            await self._backends.look_again()
        return self._planned()

    def _planned(self) -> Disaggregate | RunLocally:
        return self._router.plan(
            self._num_bytes,
            failed=self._failed,
            may_push=self._may_push,
            layout=self._legs.layout,
        )

    # --- the ladder

    async def _climb_down(self) -> web.StreamResponse:
        plan = await self._plan()
        if isinstance(plan, RunLocally):
            return await self._run_locally(plan.reason, plan.engine, is_fallback=plan.is_outage)
        self._decide("disaggregated", "default")
        self._story.mode = Mode.DISAGGREGATED
        while True:
            prefilled = await self._prefill(plan)
            if isinstance(prefilled, LegFailure):
                return await self._run_locally("prefill_failed", is_fallback=True)
            if not isinstance(prefilled, Prefilled):
                return prefilled
            outcome = await self._decode(prefilled)
            if not isinstance(outcome, LegFailure | UnavailableError):
                return outcome
            if self._story.stage is Stage.DECODE:
                return await self._run_locally("stream_lost", is_fallback=False)
            following = self._pair_after(prefilled, outcome)
            if following is None:
                is_kv = isinstance(outcome, LegFailure) and _is_kv(outcome)
                return await self._run_locally(
                    "kv_failed" if is_kv else "decode_failed", is_fallback=True
                )
            assert isinstance(outcome, LegFailure)
            self._climb(Rung.OTHER_PREFILL, outcome.reason)
            await self._try_again("prefill")
            plan = following

    async def _prefill(self, plan: Disaggregate) -> Prefilled | web.StreamResponse | LegFailure:
        """Prefill on some engine. Returns the answer itself if nothing is left to do.

        Raises:
            RefusedError: The request is at fault, or no engine has room.
        """
        while True:
            if plan.decode is not None:
                self._story.not_pushed = None
                outcome = await self._push.run(plan.prefill, plan.decode)
            else:
                self._note_pull(plan.prefill)
                outcome = await self._legs.prefill(plan.prefill)
            if not isinstance(outcome, LegFailure):
                return outcome
            if not await self._after(outcome):
                return _unless_refused(outcome)
            following = self._router.another_pair(
                self._num_bytes,
                self._failed,
                may_push=self._may_push,
                layout=self._legs.layout,
            )
            if following is None:
                return _unless_refused(outcome)
            backend = following.prefill if outcome.leg == "prefill" else following.decode
            if outcome.is_busy and backend in self._failed:
                return _unless_refused(outcome)
            if outcome.leg == "prefill":
                rung = Rung.OTHER_PREFILL
            else:
                rung = Rung.RETRY_DECODE if _is_kv(outcome) else Rung.OTHER_DECODE
            self._climb(rung, outcome.reason)
            await self._try_again(outcome.leg)
            plan = following

    async def _decode(
        self, prefilled: Prefilled
    ) -> web.StreamResponse | LegFailure | UnavailableError:
        """Go on from a handoff on some engine that can read it; else give it back.

        Raises:
            RefusedError: The request is at fault, or no engine has room.
        """
        try:
            outcome = await self._read(prefilled)
        except BaseException:
            self._legs.give_back(prefilled.handoff)
            raise
        if isinstance(outcome, LegFailure | UnavailableError):
            self._legs.give_back(prefilled.handoff)
        return _unless_refused(outcome) if isinstance(outcome, LegFailure) else outcome

    async def _read(
        self, prefilled: Prefilled
    ) -> web.StreamResponse | LegFailure | UnavailableError:
        failure = prefilled.lost
        could_not_read: set[Backend] = set()
        while True:
            if failure is not None:
                may_retry = await self._after(failure)
                if self._story.stage is Stage.DECODE or not may_retry:
                    return failure
            backend = self._reader_after(failure, prefilled, could_not_read)
            if backend is None:
                return failure or UnavailableError(
                    "no decode engine can read from the prefill engine",
                    code="no_decode_available",
                )
            if failure is not None:
                if failure.is_busy and backend in self._failed:
                    return failure
                is_same = backend is failure.backend
                self._climb(Rung.RETRY_DECODE if is_same else Rung.OTHER_DECODE, failure.reason)
                await self._try_again("decode")
            outcome = await self._legs.decode(backend, prefilled)
            if not isinstance(outcome, LegFailure):
                return outcome
            failure = outcome
            if _is_kv(failure):
                could_not_read.add(backend)

    def _reader_after(
        self,
        failure: LegFailure | None,
        prefilled: Prefilled,
        could_not_read: Collection[Backend],
    ) -> Backend | None:
        """Return who is to read the KV next; None if nobody can."""
        owner = prefilled.backend
        if failure is not None and _is_kv(failure):
            if not self._may_hold(prefilled, failure):
                return None
            receiver = failure.backend
            if receiver not in could_not_read and self._router.can_decode_for(owner, receiver):
                return receiver  # it could not be written to; it may still read
        return self._router.decode_for(owner, self._num_bytes, self._failed, without=could_not_read)

    def _may_hold(self, prefilled: Prefilled, failure: LegFailure) -> bool:
        """Whether another engine may find the lease still there."""
        owner = prefilled.backend
        life = owner.info.incarnation if owner.info is not None else None
        is_gone = owner.health is Health.UNREACHABLE or life != prefilled.life
        return not is_gone and LoadFailure.LEASE_LOST.value not in _reasons(failure)

    def _pair_after(
        self, prefilled: Prefilled, failure: LegFailure | UnavailableError
    ) -> Disaggregate | None:
        """Return who is to begin again if the KV of a handoff could not be had; else None.

        The same prefill engine again only helps where its lease was the trouble.
        """
        if isinstance(failure, UnavailableError) or not _is_kv(failure):
            return None
        if self._retries_left < 0:
            return None
        owner = prefilled.backend
        following = self._router.another_pair(
            self._num_bytes,
            {*self._failed, owner},
            may_push=self._may_push,
            layout=self._legs.layout,
        )
        is_cured = not _CURED_BY_A_FRESH_LEASE.isdisjoint(_reasons(failure))
        if following is None or (following.prefill is owner and not is_cured):
            return None
        return following

    async def _run_locally(
        self, reason: str, engine: Backend | None = None, *, is_fallback: bool
    ) -> web.StreamResponse:
        """Serve the whole request on one engine, swallowing what the client already has.

        Args:
            is_fallback: In place of another engine that there is: engines take only so much of
                that.

        Raises:
            WorkerError: Nothing helped.
            UnavailableError: No engine is there.
            RefusedError: The request is at fault, or no engine has room.
        """
        self._decide("local", reason)
        if is_fallback or self._story.rungs or self._delivery.has_begun:
            self._climb(Rung.LOCAL, reason)
        if not self._delivery.has_begun:
            self._story.mode = Mode.LOCAL
        while True:
            is_replay = self._delivery.has_begun
            self._delivery.begin_again()
            engine = engine or self._local_engine()
            outcome = await self._legs.local(engine, is_fallback=is_fallback)
            if not isinstance(outcome, LegFailure):
                if is_replay:
                    self._metrics.replays.labels("resumed").inc()
                return outcome
            if not await self._after(outcome):
                raise outcome.error
            engine = self._local_engine()
            has_no_room = outcome.is_busy or isinstance(outcome.error, BudgetSpentError)
            if has_no_room and engine in self._failed:
                raise outcome.error
            await self._try_again("local")

    def _local_engine(self) -> Backend:
        return self._router.local_engine(self._num_bytes, self._failed, layout=self._legs.layout)

    # --- failing

    async def _after(self, failure: LegFailure) -> bool:
        """Take note of a failed leg; tell whether another attempt may be made.

        Where an engine has ended, others may have ended with it: all are looked at, so that none is
        tried, and blamed on the request, that was gone before the request came to it.

        Raises:
            NonFiniteError: The model makes NaN of the request.
            PoisonousError: Two engines have ended with it.
        """
        leg, backend, error = failure.leg, failure.backend, failure.error
        if isinstance(error, RefusedError) and not failure.is_busy:
            return False
        if _is_kv(failure):
            self._may_push = False
        else:
            self._failed.add(backend)
        self._story.tell(f"{leg} at {backend.url} failed: {failure.reason}")
        if isinstance(error, NonFiniteError):
            raise error
        if isinstance(error, WorkerError) and error.is_end:
            self._note_end(backend)
            await self._backends.look_again(frozenset(self._backends))
        if isinstance(error, BudgetSpentError):
            return True  # it did nothing: each engine is asked once, whatever is left of retries
        self._retries_left -= 1
        return self._retries_left >= 0

    def _note_pull(self, prefill: Backend) -> None:
        """A hand-over begins by pull: say why, where a push was allowed."""
        why = self._router.why_pulled(prefill)
        if why is not None and not self._may_push:
            why = NotPushed.FAILED if self._is_pushable else NotPushed.REQUEST
        self._story.not_pushed = why
        if why is not None:
            self._metrics.not_pushed.labels(why.value).inc()

    def _note_end(self, backend: Backend) -> None:
        """An engine ended while it had the request: is it the request that does it?"""
        num_tokens = self._story.num_output_tokens
        if num_tokens > self._num_tokens_before:
            self._num_tokens_before = num_tokens
            return
        life = None if backend.info is None else backend.info.incarnation
        self._ended.add((backend.url, life))
        if len(self._ended) > 1:
            urls = " and ".join(sorted(url for url, _ in self._ended))
            raise PoisonousError(
                "two engines ended while they had this request: it is tried at no third",
                detail=f"{urls} ended while they had this request",
            )

    def _climb(self, rung: Rung, reason: str) -> None:
        self._metrics.ladder.labels(rung.value, reason).inc()
        self._story.climbed(rung, reason)

    async def _try_again(self, leg: str) -> None:
        self._metrics.retries.labels(leg).inc()
        num_retries = self._config.retry_max_retries - self._retries_left
        await asyncio.sleep(min(MAX_BACKOFF_S, BACKOFF_S * 2 ** (num_retries - 1)))

    def _decide(self, decision: str, reason: str) -> None:
        self._metrics.decisions.labels(decision, reason).inc()
        self._story.tell(f"{decision}: {reason}")

    async def _refuse(self, refusal: RefusedError) -> web.StreamResponse:
        if self._delivery.has_begun:
            return await self._delivery.end_with_error(refusal.body)
        headers = {**self._reply_headers, "Content-Type": "application/json"}
        if refusal.retry_after is not None:
            headers["Retry-After"] = refusal.retry_after
        return web.Response(status=refusal.status, body=refusal.body, headers=headers)

    async def _fail(self, error: PdserveError) -> web.StreamResponse:
        self.outcome = "shed" if error.status in {429, 503} else "error"
        self._story.tell(f"{error.error_code}: {error.detail}")
        if self._delivery.has_begun:
            return await self._delivery.end_with_error(error_body(error))
        return web.Response(
            status=error.status,
            body=error_body(error),
            headers={
                **self._reply_headers,
                **error_headers(error),
                "Content-Type": "application/json",
            },
        )


def _is_kv(failure: LegFailure) -> bool:
    """Whether the engine is well and only the KV did not get there."""
    return isinstance(failure.error, KvFailedError)


def _reasons(failure: LegFailure) -> tuple[str, ...]:
    return failure.error.load_failures if isinstance(failure.error, KvFailedError) else ()


def _unless_refused(failure: LegFailure) -> LegFailure:
    """The same failure.

    Raises:
        RefusedError: It is the request's, or all engines are full: the client is to know.
    """
    if isinstance(failure.error, RefusedError):
        raise failure.error
    return failure
