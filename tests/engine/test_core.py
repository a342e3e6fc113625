"""An engine core while steps run: what it hears, posts and plans, over ranks that a test plays."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import pytest

from pdserve.config.schema import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from pdserve.connectors.base import Hold, KVConnectorScheduler, KVLayout, Match
from pdserve.engine.core import EngineCore
from pdserve.executor.base import RankDiedError
from pdserve.observe.clock import ManualClock
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.transfer import ConnectorMetadata, ConnectorReport, Received
from pdserve.worker.info import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.connectors.views import RequestView
    from pdserve.wire.ids import BlockId
    from pdserve.wire.step import SchedulerOutput

BLOCK_SIZE = 8
NUM_BLOCKS = 16


class LoadingScheduler(KVConnectorScheduler):
    """Has the KV of all but the last prompt block of requests that are named so."""

    def __init__(self) -> None:
        self.staged: list[str] = []
        self._loaded: set[RequestId] = set()

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> Match | None:
        if not request.request_id.startswith("load") or request.request_id in self._loaded:
            return Match(0, is_async=False)
        return Match(len(request.prompt_token_ids) - BLOCK_SIZE, is_async=True)

    def update_state_after_alloc(
        self,
        request: RequestView,
        block_ids: Sequence[BlockId],
        num_external_tokens: int,
        *,
        generations: Sequence[int] = (),
    ) -> None:
        if num_external_tokens:
            self._loaded.add(request.request_id)
            self.staged.append(request.request_id)

    def request_finished(
        self, request: RequestView, block_ids: Sequence[BlockId], generations: Sequence[int]
    ) -> Hold | None:
        if request.finish_reason is FinishReason.ABORT:
            self.staged.append(f"abort {request.request_id}")
        return None

    def take_instructions(self) -> ConnectorMetadata | None:
        staged, self.staged = self.staged, []
        return ConnectorMetadata(",".join(staged).encode()) if staged else None


LAYOUT = KVLayout(
    num_blocks=NUM_BLOCKS,
    num_layers=1,
    num_kv_heads=1,
    block_size=BLOCK_SIZE,
    head_dim=1,
    dtype="float32",
    dtype_bytes=4,
)
WORKER = WorkerInfo(
    rank=0,
    layout=LAYOUT,
    layout_digest="",
    layout_fields={},
    shape=LAYOUT.shape_of_one_rank(),
    can_push=False,
    endpoint=None,
    max_model_len=96,
    architecture="played",
    dtype="float32",
    vocab_size=100,
    eos_token_ids=(),
    device="cpu",
    num_threads=1,
)


class PlayedExecutor:
    """See `Executor`: steps end, and reports come, when the test says so.

    Attributes:
        said: "step" with its requests, and "post" with its words, in order.
        in_flight: How many steps ran whenever it was asked for a result.
    """

    def __init__(self, max_in_flight: int) -> None:
        self.max_in_flight = max_in_flight
        self.wake_fds: list[int] = []
        self.said: list[str] = []
        self.in_flight: list[int] = []
        self.reports: deque[ConnectorReport] = deque()
        self._steps: deque[SchedulerOutput] = deque()
        self._done: deque[ModelRunnerOutput] = deque()

    def submit(self, step: SchedulerOutput) -> None:
        assert len(self._steps) < self.max_in_flight
        self._steps.append(step)
        self.said.append(" ".join(["step", *step.num_scheduled_tokens]))

    def post(self, metadata: ConnectorMetadata) -> None:
        self.said.append(f"post {metadata.payload.decode()}")

    def finish(self) -> None:
        """The oldest step comes back, with a token for each of its requests."""
        step = self._steps.popleft()
        request_ids = list(step.num_scheduled_tokens)
        self._done.append(
            ModelRunnerOutput(
                step_id=step.step_id,
                request_ids=request_ids,
                sampled_token_ids=[[1]] * len(request_ids),
            )
        )

    def poll_result(self) -> ModelRunnerOutput | None:
        self.in_flight.append(len(self._steps))
        return self._done.popleft() if self._done else None

    def poll_report(self) -> ConnectorReport | None:
        return self.reports.popleft() if self.reports else None

    def close(self, timeout_s: float) -> None:
        return


class Played:
    """A core, and its ranks."""

    def __init__(self, max_in_flight: int) -> None:
        self.ranks = PlayedExecutor(max_in_flight)
        self.clock = ManualClock()
        self.core = EngineCore(
            self.ranks,
            LoadingScheduler(),
            self.clock,
            config=EngineConfig(
                model=ModelConfig(model="played"),
                cache=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False),
                scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=128),
            ),
            workers=[WORKER],
        )
        self.out: list[str] = []

    def add(self, name: str, *, max_tokens: int = 20, num_blocks: int = 2) -> None:
        self.core.scheduler.add(
            GenerateRequest(
                request_id=RequestId(name),
                prompt_token_ids=list(range(num_blocks * BLOCK_SIZE)),
                sampling=SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True),
                arrival_s=0.0,
            )
        )

    def turn(self) -> list[str]:
        """Once around; what the ranks were told in it."""
        outputs: list[EngineOutput] = []
        self.core.step(outputs.extend)
        self.out += [output.request_id for output in outputs if output.new_token_ids]
        said, self.ranks.said = self.ranks.said, []
        return said

    def received(self, name: str) -> None:
        self.ranks.reports.append(
            ConnectorReport(
                received=[
                    Received(
                        request_id=RequestId(name),
                        num_bytes=1,
                        num_descriptors=1,
                        wait_s=0.0,
                        transfer_s=0.0,
                        load_id=1,
                    )
                ]
            )
        )


@pytest.fixture
def played() -> Played:
    """A core whose ranks run one step at a time."""
    return Played(1)


def test_a_turn_waits_for_nothing(played: Played) -> None:
    assert played.turn() == []
    played.add("a")
    assert played.turn() == ["step a"]
    assert played.turn() == []
    outputs: list[EngineOutput] = []
    assert (played.core.step(outputs.extend), outputs) == (False, [])


def test_the_ranks_have_the_next_step_before_tokens_are_out_but_ends_do_not_wait(
    played: Played,
) -> None:
    played.add("a")
    played.add("b", max_tokens=2)
    played.turn()
    for said in (["step a b", "2 out"], ["2 out", "step a"], ["step a", "1 out"]):
        played.ranks.finish()
        played.core.step(lambda outputs: played.ranks.said.append(f"{len(outputs)} out"))
        assert played.ranks.said == said
        played.ranks.said.clear()


def test_the_next_step_is_submitted_in_the_turn_that_takes_a_result(played: Played) -> None:
    played.add("a")
    played.turn()
    played.ranks.finish()
    assert played.turn() == ["step a"]
    assert played.out == ["a"]


def test_a_request_that_comes_while_a_step_runs_is_in_the_next(played: Played) -> None:
    played.add("a")
    played.turn()
    played.add("b")
    assert played.turn() == []
    played.ranks.finish()
    assert played.turn() == ["step a b"]


def test_a_request_is_in_a_step_at_once_where_there_is_room_beside_the_one_that_runs() -> None:
    played = Played(2)
    played.add("a", max_tokens=1)
    assert played.turn() == ["step a"]
    played.add("b")
    assert played.turn() == ["step b"]


def test_a_step_that_does_not_come_back_ends_the_engine(played: Played) -> None:
    played.add("a")
    played.turn()
    for _ in range(600):
        played.clock.advance(1.0)
        assert played.turn() == []
    played.clock.advance(1.0)
    with pytest.raises(RankDiedError, match=r"600 s: raise --step-timeout"):
        played.turn()


def test_steps_that_come_back_may_go_on_for_ever(played: Played) -> None:
    played.add("a", max_tokens=50)
    played.turn()
    for _ in range(40):
        for _ in range(20):
            played.clock.advance(1.0)
            played.turn()
        played.ranks.finish()
        assert played.turn() == ["step a"]


def test_a_core_that_was_stopped_itself_does_not_blame_the_step_in_flight(played: Played) -> None:
    played.add("a")
    played.turn()
    played.clock.advance(3600.0)
    assert played.turn() == []
    played.ranks.finish()
    assert played.turn() == ["step a"]


def test_a_load_begins_while_a_step_runs_and_joins_the_very_next(played: Played) -> None:
    played.add("a")
    played.turn()
    played.add("load")
    assert played.turn() == ["post load"]
    played.received("load")
    assert played.turn() == []
    played.ranks.finish()
    assert played.turn() == ["step a load"]


def test_a_load_alone_is_posted_without_a_step(played: Played) -> None:
    played.add("load")
    assert played.turn() == ["post load"]
    played.received("load")
    assert played.turn() == ["step load"]


def test_an_abort_is_posted_while_a_step_runs(played: Played) -> None:
    played.add("a")
    played.add("load")
    assert played.turn() == ["step a", "post load"]
    played.core.scheduler.abort([RequestId("load")])
    assert played.turn() == ["post abort load"]


def test_a_load_waits_its_turn_behind_a_request_that_needs_a_step(played: Played) -> None:
    played.add("a")
    played.turn()
    played.add("b")
    played.add("load")
    assert played.turn() == []
    played.ranks.finish()
    assert played.turn() == ["step a b", "post load"]


def test_a_load_takes_no_blocks_that_were_made_free_for_the_running_requests(
    played: Played,
) -> None:
    played.add("a", num_blocks=7)
    played.add("b", num_blocks=7)
    said = played.turn()
    while said == ["step a b"]:
        played.ranks.finish()
        said = played.turn()
    assert said == ["step a"], "b was preempted, so that a could grow"
    played.core.scheduler.abort([RequestId("b")])
    played.add("load")
    assert played.turn() == ["post abort b"]
    played.ranks.finish()
    assert played.turn() == ["step a", "post load"]


def test_every_result_of_a_turn_makes_room_for_a_step_before_the_next_is_taken() -> None:
    played = Played(2)
    for name in ("a", "b"):
        played.add(name)
    assert played.turn() == ["step a b", "step a b"]
    played.ranks.finish()
    played.ranks.finish()
    played.ranks.in_flight.clear()
    assert played.turn() == ["step a b", "step a b"]
    assert played.ranks.in_flight == [0, 1, 2]
    assert played.out == ["a", "b", "a", "b"]
