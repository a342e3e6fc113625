"""The life of one request in the proxy: one coroutine, cancel-safe at every await.

    QUEUED -> PREFILL -> TRANSFER -> DECODE -> end
      |          |          |          |
      |          +----------+----------+---> LOCAL -> end
      +-------- no prefill engine ---------^

QUEUED    waits for a place (`AdmissionQueue`), then for a plan (`Router`); if a policy looks at
          prefixes, its prompt is read first (`Prefixes`), and `Gate` may turn it away.
PREFILL   the prefill engine has the request; in a push the decode engine has it too. Its first
          token goes to the client the moment it arrives; a handoff follows it, or the end of the
          stream if the request ends there.
TRANSFER  the decode engine has the handoff and reads the KV, or gets the last of what is written
          to it; none of its output has been passed on yet.
DECODE    its bytes are passed on as they arrive.
LOCAL     one engine does everything: because there is no pair, because nothing is generated
          (prompts that become vectors), or as the last resort.

The ladder when a leg fails, each rung counted and reported:

    retry_decode    the same decode engine reads what could not be written to it, or tries again
    other_decode    another one does, with the same handoff while its lease may hold
    other_prefill   the prompt is prefilled again, on another engine if there is one
    local           the whole request on one engine, within its budget for such prompts
    shed            an error that says when to come back

Before it is shed, a request that no engine can serve waits for as long as it may queue, if a
missing engine may come back; then it starts anew, except for what its client already has.

`setbacks` decides which engines are tried again, and how often; the last rung is always tried
once. What the client has already been sent is swallowed from the repeated stream (`Replay`), so a
failure shows as a pause and never as different text.

A handoff belongs to its attempt from the moment it is read until the decode leg has ended well. On
every other way out, cancellation included, its leases are given back (`Handoff`).
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.errors import PdserveError, UnavailableError
from pdserve.observe.request_log import outcome_of
from pdserve.proxy.backend import Health
from pdserve.proxy.errors import BudgetSpentError, RefusedError, WorkerError
from pdserve.proxy.handoff import Handoff
from pdserve.proxy.replay import DivergedError
from pdserve.proxy.routing import Disaggregate, RunLocally
from pdserve.proxy.setbacks import LegFailure, Setbacks
from pdserve.proxy.story import LadderRung, Mode, Stage
from pdserve.proxy.strategies import follow, pull, push, read
from pdserve.wire.transfer import LoadFailure

if TYPE_CHECKING:
    from collections.abc import Collection

    from pdserve.proxy.admission import Claim
    from pdserve.proxy.backend import Backend
    from pdserve.proxy.brain.question import PairDecision
    from pdserve.proxy.legs import Legs
    from pdserve.proxy.services import Services
    from pdserve.proxy.strategies import Strategy

_CURED_BY_A_FRESH_LEASE = frozenset({LoadFailure.LEASE_LOST.value, LoadFailure.DIGEST.value})


class Flow:
    """Serves one request.

    Attributes:
        outcome: Its end, one of `metrics.OUTCOMES`.
    """

    def __init__(self, services: Services, legs: Legs) -> None:
        self._services = services
        self._config = services.config
        self._router = services.router
        self._metrics = services.metrics
        self._legs = legs
        self._story = legs.story
        self._delivery = legs.delivery
        self._chosen: Disaggregate | RunLocally | None = None
        self._setbacks = Setbacks(services, legs.story, is_pushable=legs.body.is_pushable)
        self.outcome = "error"

    async def run(self) -> web.StreamResponse:
        """Answer the client, with the engines' output or with an OpenAI error.

        Raises:
            ClientGoneError: The client closed its connection.
        """
        try:
            async with self._services.live.limit(self._legs.until_s):
                return await self._admitted()
        except RefusedError as refusal:
            self.outcome, self._story.reason = outcome_of(refusal.status), refusal.code
            return await self._delivery.refuse(refusal)
        except TimeoutError:
            return await self._fail(self._services.live.late(self._config.request_timeout_s))
        except DivergedError as error:
            self._metrics.replays.labels("diverged").inc()
            return await self._fail(error)
        except PdserveError as error:
            if isinstance(error, BudgetSpentError | UnavailableError):
                why = "budget" if isinstance(error, BudgetSpentError) else "no_engine"
                self._climb(LadderRung.SHED, why)
            return await self._fail(error)

    async def _admitted(self) -> web.StreamResponse:
        """Serve the request when it gets a place.

        Raises:
            OverloadedError: No place is available, or it would miss its objectives.
        """
        gate = self._services.gate
        if self._services.prefixes is not None and not self._legs.ends_with_prompt:
            read = await self._services.prefixes.read(self._legs.body)
            self._legs.prompt = self._legs.prompt.named_as(read)
        self._story.queued()
        prompt = self._legs.prompt
        claim = gate.claim(prompt)
        if gate.decides:
            claim.grant = partial(self._choose, claim)
        try:
            async with self._services.admission.place(claim):
                self._story.admitted()
                try:
                    response = await self._serve()
                finally:
                    claim.spent = gate.ended(prompt, self._story)
        finally:
            self._legs.expect_nothing()
        gate.served(prompt, self._story)
        self.outcome, self._story.reason = "ok", ""
        return response

    def _choose(self, claim: Claim) -> None:
        """Choose the engines and count the first leg: the next claim is judged by it."""
        with suppress(UnavailableError):  # `_plan` looks at the engines again
            self._chosen = plan = self._planned(claim.decision)
            if isinstance(plan, RunLocally):
                self._legs.expect("local", plan.engine)
            else:
                self._legs.expect("prefill", plan.prefill)

    async def _serve(self) -> web.StreamResponse:
        """Serve the request as soon as an engine can.

        Raises:
            UnavailableError, WorkerError: No engine could in the time it may wait.
            RefusedError: The request is at fault, or no engine has room.
        """
        while True:
            try:
                return await self._climb_down()
            except (UnavailableError, WorkerError) as error:
                await self._setbacks.stand_by(error)

    async def _plan(self) -> Disaggregate | RunLocally:
        """Plan how to serve the request, after checking engines that are not ready once more.

        Raises:
            UnavailableError: No engine can take it now.
        """
        plan, self._chosen = self._chosen, None
        with suppress(UnavailableError):
            plan = plan or self._planned()
        if plan is not None and not (isinstance(plan, RunLocally) and plan.is_outage):
            return plan
        self._legs.expect_nothing()
        if not self._setbacks.num_waits:
            await self._services.checks.look_again()
        return self._planned()

    def _planned(
        self, decision: PairDecision | None = None, failed: Collection[Backend] = ()
    ) -> Disaggregate | RunLocally:
        if self._legs.ends_with_prompt:
            return RunLocally(self._local_engine(), "prompt_only", is_outage=False)
        return self._router.plan(
            self._legs.prompt,
            failed=failed or self._setbacks.failed,
            may_push=self._setbacks.may_push,
            layout=self._layout,
            decision=decision,
        )

    # --- the ladder

    async def _climb_down(self) -> web.StreamResponse:
        plan = await self._plan()
        self._story.decision = plan.decision
        if isinstance(plan, RunLocally):
            return await self._run_locally(plan.reason, plan.engine, is_fallback=plan.is_outage)
        self._decide("disaggregated", plan.reason)
        self._story.mode = Mode.DISAGGREGATED
        while isinstance(following := await self._attempt(plan), Disaggregate):
            plan = following
        return following

    async def _attempt(self, plan: Disaggregate) -> web.StreamResponse | Disaggregate:
        """Serve the request by a pair, or return the pair to try next.

        Raises:
            RefusedError: The request is at fault, or no engine has room.
        """
        with Handoff(plan.prefill, self._services.http, self._metrics, self._story) as handoff:
            outcome: web.StreamResponse | LegFailure | UnavailableError | None
            outcome = await self._strategy(plan)(self._legs, plan, handoff)
            outcome = await follow(self._legs, self._setbacks, outcome)
            if handoff.is_complete and not isinstance(outcome, web.StreamResponse):
                outcome = await self._read(handoff, plan.preferred, lost=outcome)
            if isinstance(outcome, web.StreamResponse):
                handoff.spend()
                return outcome
        if handoff.is_complete:
            assert outcome is not None
            return await self._after_reading(handoff, outcome)
        assert isinstance(outcome, LegFailure)
        return await self._after_prefilling(outcome)

    def _strategy(self, plan: Disaggregate) -> Strategy:
        if plan.decode is not None:
            self._story.not_pushed = None
            return push
        why = self._router.why_pulled(plan.prefill)
        if why is not None:
            why = self._setbacks.why_pulled or why
            self._metrics.not_pushed.labels(why.value).inc()
        self._story.not_pushed = why
        return pull

    async def _after_prefilling(self, failure: LegFailure) -> web.StreamResponse | Disaggregate:
        """When there is no handoff, prefill on another engine, or into another one's blocks.

        Raises:
            RefusedError: The request is at fault, or no engine has room.
        """
        may_retry = await self._setbacks.add(failure)
        following = self._another_pair(self._setbacks.failed) if may_retry else None
        if following is not None and failure.is_busy:
            backend = following.prefill if failure.leg == "prefill" else following.decode
            following = None if backend in self._setbacks.failed else following
        if following is None:
            _raise_if_refused(failure)
            return await self._run_locally("prefill_failed", is_fallback=True)
        if failure.leg == "prefill":
            rung = LadderRung.OTHER_PREFILL
        else:
            rung = LadderRung.RETRY_DECODE if failure.is_kv else LadderRung.OTHER_DECODE
        self._climb(rung, failure.reason)
        await self._setbacks.pause(failure.leg)
        return following

    async def _after_reading(
        self, handoff: Handoff, failure: LegFailure | UnavailableError
    ) -> web.StreamResponse | Disaggregate:
        """When no decode engine could continue from the handoff, start again where that may help.

        Raises:
            RefusedError: The request is at fault, or no engine has room.
        """
        if isinstance(failure, UnavailableError):
            return await self._run_locally("decode_failed", is_fallback=True)
        _raise_if_refused(failure)
        if failure.is_drained:  # whether it has read the KV is not known
            return await self._run_locally("drained", is_fallback=False)
        if self._story.stage is Stage.DECODE:
            return await self._run_locally("stream_lost", is_fallback=False)
        following = self._pair_after(handoff, failure)
        if following is None:
            reason = "kv_failed" if failure.is_kv else "decode_failed"
            return await self._run_locally(reason, is_fallback=True)
        self._climb(LadderRung.OTHER_PREFILL, failure.reason)
        await self._setbacks.pause("prefill")
        return following

    async def _read(
        self, handoff: Handoff, preferred: Backend | None, *, lost: LegFailure | None
    ) -> web.StreamResponse | LegFailure | UnavailableError:
        """Continue from a complete handoff on an engine that can read it.

        Args:
            preferred: The engine to try first, unless the KV could not be pushed.
            lost: Failure of the leg that was to receive the KV of a push.
        """
        failure = lost
        could_not_read: set[Backend] = set()
        while True:
            if failure is not None:
                may_retry = await self._setbacks.add(failure)
                is_begun = self._story.stage is Stage.DECODE or failure.is_drained
                if is_begun or not may_retry:
                    return failure
            backend = self._reader_after(failure, handoff, preferred, could_not_read)
            preferred = None
            if backend is None:
                return failure or UnavailableError(
                    "no decode engine can read the prefill engine's KV",
                    code="no_decode_available",
                )
            if failure is not None:
                if failure.is_busy and backend in self._setbacks.failed:
                    return failure
                is_same = backend is failure.backend
                self._climb(
                    LadderRung.RETRY_DECODE if is_same else LadderRung.OTHER_DECODE, failure.reason
                )
                await self._setbacks.pause("decode")
            outcome = await read(self._legs, backend, handoff)
            outcome = await follow(self._legs, self._setbacks, outcome)
            if not isinstance(outcome, LegFailure):
                return outcome
            failure = outcome
            if failure.is_kv:
                could_not_read.add(backend)

    def _reader_after(
        self,
        failure: LegFailure | None,
        handoff: Handoff,
        wanted: Backend | None,
        could_not_read: Collection[Backend],
    ) -> Backend | None:
        """Return the next engine to read the KV; None if none can."""
        owner = handoff.prefill
        if failure is not None and failure.is_kv:
            if not self._may_hold(handoff, failure):
                return None
            wanted = failure.backend  # it could not be written to; it may still read
        elif wanted in self._setbacks.failed:
            wanted = None
        if (
            wanted is not None
            and wanted not in could_not_read
            and self._router.can_decode_for(owner, wanted, self._legs.prompt)
        ):
            return wanted
        return self._router.decode_for(
            owner, self._legs.prompt, self._setbacks.failed, without=could_not_read
        )

    def _may_hold(self, handoff: Handoff, failure: LegFailure) -> bool:
        """Return whether another engine may still find the lease alive."""
        owner = handoff.prefill
        life = owner.info.incarnation if owner.info is not None else None
        is_gone = owner.health is Health.UNREACHABLE or life != handoff.life
        return not is_gone and LoadFailure.LEASE_LOST.value not in failure.load_failures

    def _pair_after(self, handoff: Handoff, failure: LegFailure) -> Disaggregate | None:
        """Return the pair for a new start after the KV of a handoff could not be read.

        Reusing the prefill engine helps only if its lease was the problem.
        """
        if not failure.is_kv or self._setbacks.retries_left < 0:
            return None
        owner = handoff.prefill
        following = self._another_pair({*self._setbacks.failed, owner})
        is_cured = not _CURED_BY_A_FRESH_LEASE.isdisjoint(failure.load_failures)
        if following is None or (following.prefill is owner and not is_cured):
            return None
        return following

    def _another_pair(self, failed: Collection[Backend]) -> Disaggregate | None:
        """Return engines for another attempt from the start; None if there are none."""
        with suppress(UnavailableError):
            if isinstance(plan := self._planned(failed=failed), Disaggregate):
                return plan
        return None

    async def _run_locally(
        self, reason: str, engine: Backend | None = None, *, is_fallback: bool
    ) -> web.StreamResponse:
        """Serve the whole request on one engine, swallowing what the client already has.

        Args:
            is_fallback: Whether it stands in for another engine that exists; engines limit such
                work.

        Raises:
            WorkerError: Nothing helped.
            UnavailableError: No engine is there.
            RefusedError: The request is at fault, or no engine has room.
        """
        self._decide("local", reason)
        if is_fallback or self._story.rungs or self._delivery.has_begun:
            self._climb(LadderRung.LOCAL, reason)
        if not self._delivery.has_begun:
            self._story.mode = Mode.LOCAL
        while True:
            is_replay = self._delivery.has_begun
            self._delivery.begin_again()
            engine = engine or self._local_engine()
            outcome = await self._legs.local(engine, is_fallback=is_fallback)
            outcome = await follow(self._legs, self._setbacks, outcome)
            if not isinstance(outcome, LegFailure):
                if is_replay:
                    self._metrics.replays.labels("resumed").inc()
                return outcome
            if not await self._setbacks.add(outcome):
                raise outcome.error
            engine = self._local_engine()
            has_no_room = outcome.is_busy or isinstance(outcome.error, BudgetSpentError)
            if has_no_room and engine in self._setbacks.failed:
                raise outcome.error
            await self._setbacks.pause("local")

    def _local_engine(self) -> Backend:
        legs, failed = self._legs, self._setbacks.failed
        return self._router.local_engine(
            legs.prompt, failed, layout=self._layout, ends_with_prompt=legs.ends_with_prompt
        )

    @property
    def _layout(self) -> str | None:
        """The layout that engines must have now: any until the client has been sent something."""
        return self._delivery.layout if self._delivery.has_begun else None

    # --- reporting

    def _climb(self, rung: LadderRung, reason: str) -> None:
        self._metrics.ladder.labels(rung.value, reason).inc()
        self._story.climbed(rung, reason)

    def _decide(self, decision: str, reason: str) -> None:
        self._metrics.decisions.labels(decision, reason).inc()
        self._story.tell(f"{decision}: {reason}")

    async def _fail(self, error: PdserveError) -> web.StreamResponse:
        self.outcome = "error" if self._delivery.has_begun else outcome_of(error.status)
        self._story.reason = error.error_code
        self._story.tell(f"{error.error_code}: {error.detail}")
        return await self._delivery.fail(error)


def _raise_if_refused(failure: LegFailure) -> None:
    """Pass a refusal on: the request is at fault, or all engines are full.

    Raises:
        RefusedError: It is.
    """
    if isinstance(failure.error, RefusedError):
        raise failure.error
