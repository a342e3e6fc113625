"""A worker without a model, for real rank processes that start in a blink.

What it does is written where a model's name and a step's gone requests would be:

    "config 1"      at start, rank 1 raises ConfigError
    "refuse 1"      at start, the system refuses rank 1 a thread
    "raise 1"       at start or in a step, rank 1 raises
    "lost 1"        ... rank 1 misses another rank
    "kill 1"        ... rank 1 is killed by SIGKILL
    "exit 1"        ... rank 1 ends with code 7 and says nothing
    "sleep 1 0.2"   ... rank 1 sleeps
    "until 1 path"  ... rank 1 waits until there is a file of that name
    "finish 1 path" in a step, rank 1 waits for that file once the step is answered
    "report 0 x"    in a step, rank 0's connector reports that request x has settled
    "later 0 x"     the same, a moment later
    "digest"        in a step, every rank reports a request named after all it was sent so far
    "meet"          at start, every rank checks where its world meets
    "posted a b_c"  in a step, every rank raises if it was not posted just "a" and "b c" so far
    "stuck 1"       at close, rank 1 never ends
    "ahead"         at start, steps may be launched before those before them are collected
    "busy path"     in a step, the device is not through until there is a file of that name
    "alone"         a step that is launched once the one before it is collected
    "chatter 1"     at close, rank 1 says more than anybody has room for

What is posted is a line too: "report 0 x", "raise 1", "kill 1" and "sleep 1 0.2" do at once
what they say; any other text is reported as a settled request of that name by every rank.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdserve.connectors.base import KVLayout
from pdserve.errors import ConfigError, PeerLostError
from pdserve.wire.ids import RequestId
from pdserve.wire.step import ModelRunnerOutput
from pdserve.wire.transfer import ConnectorReport, LeaseEnd, Settled
from pdserve.worker.info import WorkerInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.config.schema import EngineConfig
    from pdserve.parallel.place import RankPlace
    from pdserve.wire.ids import EngineId, Incarnation
    from pdserve.wire.step import SchedulerOutput
    from pdserve.wire.transfer import ConnectorMetadata

PATH = "tests.executor.scripted_worker:ScriptedWorker"
OUTPUT_BYTES = 3 << 20
_LAYOUT = KVLayout(
    num_blocks=1,
    num_layers=1,
    num_kv_heads=1,
    block_size=1,
    head_dim=1,
    dtype="float32",
    dtype_bytes=4,
)


@dataclass
class ScriptedStep:
    """A step of which the device is through once there are these files."""

    output: ModelRunnerOutput
    paths: list[str]

    @property
    def is_over(self) -> bool:
        return all(map(os.path.exists, self.paths))


class ScriptedWorker:
    """Made as `Worker` is."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        place: RankPlace,
        engine_id: EngineId,
        incarnation: Incarnation,
        wake: Callable[[], None],
        progress: Callable[[str], None],
    ) -> None:
        self._start = config.model.model
        self._rank = place.engine_rank
        self._place = place
        self._wake, self._progress = wake, progress
        self._digest = hashlib.sha256()
        self._last_step: int | None = None
        self._reported: list[str] = []
        self._posted: list[str] = []
        self._to_finish = ""
        self._at_close: set[str] = set()

    def start(self) -> WorkerInfo:
        self._progress("weights 50 %")
        self._do(self._start)
        self._progress("weights 100 %")
        return WorkerInfo(
            rank=self._rank,
            layout=_LAYOUT,
            layout_digest="",
            layout_fields={},
            shape=_LAYOUT.shape_of_one_rank(),
            can_push=False,
            endpoint=None,
            max_model_len=1,
            architecture="Scripted",
            dtype="float32",
            vocab_size=1,
            eos_token_ids=(),
            device="cpu",
            num_threads=1,
        )

    @property
    def runs_ahead(self) -> bool:
        return self._start == "ahead"

    def may_follow(self, step: SchedulerOutput) -> bool:
        return "alone" not in step.gone_request_ids

    def launch(self, step: SchedulerOutput) -> ScriptedStep:
        paths = [line.split()[1] for line in step.gone_request_ids if line.startswith("busy ")]
        return ScriptedStep(self.execute(step), paths)

    def collect(self, launched: ScriptedStep) -> ModelRunnerOutput:
        for path in launched.paths:
            _wait_for(path)
        return launched.output

    def complete(self) -> None:
        pass

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        assert self._last_step is None or step.step_id == self._last_step + 1
        self._last_step = step.step_id
        self._digest.update(msgspec.msgpack.encode(step))
        for line in step.gone_request_ids:
            self._do(line)
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=[[os.getpid()]],
        )

    def finish_step(self) -> None:
        to_finish, self._to_finish = self._to_finish, ""
        if to_finish:
            _wait_for(to_finish)

    def post(self, metadata: ConnectorMetadata) -> None:
        line = metadata.payload.decode()
        if line.partition(" ")[0] in ("report", "raise", "kill", "sleep"):
            self._do(line)
        else:
            self._report(line)
        self._posted.append(line.replace(" ", "_"))

    def poll(self) -> ConnectorReport:
        reported, self._reported = self._reported, []
        return ConnectorReport(
            settled=[
                Settled(request_id=RequestId(name), end=LeaseEnd.READ, nonce=name)
                for name in reported
            ]
        )

    def close(self, timeout_s: float) -> None:
        if f"chatter {self._rank}" in self._at_close:
            self._progress("x" * OUTPUT_BYTES)
        if f"stuck {self._rank}" in self._at_close:
            threading.Event().wait()

    def _do(self, line: str) -> None:
        what, *rest = line.split()
        if what == "meet":
            self._check_rendezvous()
            return
        if what == "digest":
            self._report(self._digest.hexdigest())
            return
        if what == "posted":
            assert self._posted == rest, self._posted
            return
        if what == "busy" or not rest or int(rest[0]) != self._rank:
            return
        match what:
            case "config":
                raise ConfigError("--model is not to be had", param="model")
            case "raise":
                raise RuntimeError("the script says so")
            case "refuse":
                raise RuntimeError("can't start new thread")  # CPython's words
            case "lost":
                raise PeerLostError("rank 5 has ended")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(7)
            case "sleep":
                time.sleep(float(rest[1]))
            case "finish":
                self._to_finish = rest[1]
            case "until":
                _wait_for(rest[1])
            case "report":
                self._report(rest[1])
            case "later":
                threading.Timer(0.02, self._report, [rest[1]]).start()
            case _:
                self._at_close.add(line)

    def _check_rendezvous(self) -> None:
        rendezvous = self._place.rendezvous
        assert rendezvous is not None
        if self._place.mesh.rank:
            assert rendezvous.listen_fd is None
        else:
            assert rendezvous.listen_fd is not None
            with socket.socket(fileno=rendezvous.listen_fd) as inherited:
                assert inherited.getsockname()[1] == rendezvous.port

    def _report(self, name: str) -> None:
        self._reported.append(name)
        self._wake()


def _wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.002)
