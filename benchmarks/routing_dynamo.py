"""Prefill engines that NVIDIA Dynamo's own selector chooses, in virtual time.

The selector is `SelectionService` of the released `ai-dynamo-runtime`, in a process of its own
(`dynamo_side`) and with its own settings. The simulated prefill engines are its workers. It reads
their KV events in vLLM's shape from sockets, as it takes them in no other way; it is asked for an
engine (`select`), which is booked (`create_reservation`), and is told of a request's first token
(`prefill_complete`) and of its end at the engine (`free_reservation`). It has no notion of roles:
decode engines are the proxy's choice, and it counts blocks of running requests, which Dynamo's own
frontend does not have it do for prefill engines. A booking without blocks comes to the same.

It lives in real time, the engines in virtual time. So that no choice depends on how fast anything
is here, each waits until all events before it have been read: engines that have told something
store a marker behind it, a block of no prompt, and when the service finds that, it must find of the
prompt what the caches have. Bookings never expire. What it is told of comes later by a hop, for the
requests themselves come by a hop later than a policy of the proxy would have chosen: it knows what
that would have known. It draws among engines of equal cost, so that runs differ a little.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pdserve.config.kv_events import KVEventsConfig
from pdserve.config.schema import Role, TransferConfig
from pdserve.engine.kv_events import KVEventPublisher
from pdserve.kvcache.manager import HashChain
from pdserve.planner.engine import FleetEngine, FleetTime
from pdserve.wire.events import BlocksCleared, BlocksRemoved, BlocksStored
from pdserve.wire.ids import Incarnation

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    from pdserve.planner.engine import FleetLeg
    from pdserve.planner.fleet import Fleet
    from pdserve.planner.work import FleetOutcome, Work
    from pdserve.wire.events import KVEvent
    from pdserve.wire.ids import BlockHash
    from pdserve.wire.request import EngineOutput

SIDE: Final = Path(__file__).with_name("dynamo_side.py")
_BLOCK_TOKENS: Final = 64
"""Of the engines' caches; were it another, nothing would be found, and `choose` says so."""
_MODEL: Final = "model"
_FIRST_MARKER: Final = 1 << 24
"""No prompt has such tokens."""
_PATIENCE_S: Final = 20.0
_POLL_S: Final = 0.0005
_AGAIN_S: Final = 0.1
"""A marker is stored again after that: it may have come before the service had subscribed."""


class SelectionProcess:
    """The service, asked one question at a time.

    Args:
        command: Starts it; in this environment, its default configuration is Dynamo's own.

    Raises:
        TimeoutError: It does not answer.
        RuntimeError: It has ended; why stands in its stderr.
    """

    def __init__(self, command: Sequence[str | Path], *, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "DYN_LOG": "error",
                "DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS": str(10**9),
            },
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._questions, self._answers = self._process.stdin, self._process.stdout
        self._answer("to start")

    def ask(self, method: str, given: Any) -> Any:
        """Return what a method of the service answers."""
        self._questions.write(json.dumps([method, given]) + "\n")
        self._questions.flush()
        return self._answer(method)

    def _answer(self, asked: str) -> Any:
        if not select.select([self._answers], [], [], self._patience_s)[0]:
            raise TimeoutError(
                f"Dynamo's selector has been asked {asked}, with no answer in {self._patience_s} s"
            )
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"Dynamo's selector has ended, asked {asked}: its stderr says why")
        return json.loads(line)

    def close(self) -> None:
        """End it."""
        self._questions.close()
        try:
            self._process.wait(self._patience_s)
        finally:
            self._process.kill()
            self._answers.close()


class Selector:
    """Keeps the service informed of some engines, and has it choose among them.

    Args:
        command: See `SelectionProcess`.
        engines: Their URLs.
        step_tokens: Budget of one of their steps.
        counts_blocks: Whether bookings have the prompt's blocks, too, beside tokens to compute.
        patience_s: How long the service may take to answer, and to read events.

    Raises:
        TimeoutError: It does not read the events.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        engines: Sequence[str],
        *,
        step_tokens: int,
        counts_blocks: bool,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        self._counts_blocks = counts_blocks
        self._patience_s = patience_s
        self._engines = dict(enumerate(engines))
        self._cached: dict[str, set[BlockHash]] = {url: set() for url in engines}
        self._unread = set(engines)
        self._num_markers = 0
        self._publishers: dict[str, KVEventPublisher] = {}
        self._exits = ExitStack()
        folder = self._exits.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-selector-"))
        self._process = SelectionProcess(command, patience_s=patience_s)
        self._exits.callback(self._process.close)
        for number, url in self._engines.items():
            events, replays = (f"ipc://{folder}/{name}{number}" for name in "er")
            self._publishers[url] = KVEventPublisher(
                KVEventsConfig(
                    enable_kv_cache_events=True,
                    endpoint=events,
                    replay_endpoint=replays,
                    replay_topic=False,
                ),
                TransferConfig(),
                incarnation=Incarnation("1"),
                rank=0,
            )
            self._exits.callback(self._publishers[url].close, patience_s)
            self._process.ask(
                "upsert_worker",
                {
                    "worker_id": number,
                    "model_name": _MODEL,
                    "endpoint": url,
                    "block_size": _BLOCK_TOKENS,
                    "max_num_batched_tokens": step_tokens,
                    "kv_events_endpoint": events,
                    "replay_endpoint": replays,
                },
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def tell(self, url: str, events: Sequence[KVEvent]) -> None:
        """Tell what an engine's cache has gained and lost."""
        cached = self._cached[url]
        for event in events:
            match event:
                case BlocksStored(blocks=blocks):
                    cached.update(blocks)
                case BlocksRemoved(blocks):
                    cached.difference_update(blocks)
                case BlocksCleared():
                    cached.clear()
        self._publishers[url].publish(events)
        self._unread.add(url)

    def choose(self, request_id: str, prompt: Sequence[int]) -> str:
        """Return the URL of the engine that is to have a prompt; it is booked there.

        Raises:
            TimeoutError: The service does not read what engines have told.
            RuntimeError: It has, and does not find what they have.
        """
        self._wait()
        names = HashChain(_BLOCK_TOKENS, prompt, "").of_prompt()
        cached = {
            url: next((i for i, name in enumerate(names) if name not in blocks), len(names))
            for url, blocks in self._cached.items()
        }
        found = self._found(prompt)
        if found != cached:
            raise RuntimeError(
                f"Dynamo's selector finds {found} blocks of {request_id}, the caches have {cached}"
            )
        tokens = {"model_name": _MODEL, "token_ids": list(prompt)}
        no_blocks = {"model_name": _MODEL, "sequence_hashes": [], "isl_tokens": len(prompt)}
        chosen = self._process.ask("select", tokens)
        booking = {
            "selection_id": request_id,
            "worker_id": chosen["worker_id"],
            "effective_prefill_tokens": chosen["effective_prefill_tokens"],
        }
        self._process.ask(
            "create_reservation", booking | (tokens if self._counts_blocks else no_blocks)
        )
        return self._engines[chosen["worker_id"]]

    def prefilled(self, request_id: str) -> None:
        """Tell of a request's first token."""
        self._process.ask("prefill_complete", request_id)

    def ended(self, request_id: str) -> None:
        """Tell that an engine is done with a request."""
        self._process.ask("free_reservation", request_id)

    def _wait(self) -> None:
        """Wait until the service has read everything that engines have told."""
        self._num_markers += 1
        tokens = [_FIRST_MARKER + self._num_markers] * _BLOCK_TOKENS
        chain = HashChain(_BLOCK_TOKENS, tokens, "")
        chain.extend_to(1)
        marker = chain.stored(0, 1)
        begun_s, stored_s = time.monotonic(), float("-inf")
        while self._unread:
            now_s = time.monotonic()
            if now_s - begun_s > self._patience_s:
                raise TimeoutError(
                    f"Dynamo's selector has not read the KV events of {sorted(self._unread)} in "
                    f"{self._patience_s} s"
                )
            if now_s - stored_s > _AGAIN_S:
                stored_s = now_s
                for url in self._unread:
                    self._publishers[url].publish([marker])
            time.sleep(_POLL_S)
            self._unread -= {url for url, num_blocks in self._found(tokens).items() if num_blocks}

    def _found(self, prompt: Sequence[int]) -> dict[str, int]:
        """How many blocks of a prompt the service believes each engine to have."""
        question = {"model_name": _MODEL, "token_ids": list(prompt)}
        workers = self._process.ask("overlap_scores", question)["workers"]
        return {self._engines[each["worker_id"]]: each["device_blocks"] for each in workers}


class SelectedEngine(FleetEngine):
    """A prefill engine of a pool: whichever of them a request is sent to, the selector chooses."""

    def __init__(self, fleet: Fleet, url: str, selector: Selector) -> None:
        self._fleet = fleet
        self._selector = selector
        late_s = fleet.faults.event_s + fleet.costs.hop

        def tell(events: list[KVEvent]) -> None:
            fleet.after(late_s, partial(selector.tell, url, events))

        super().__init__(fleet.layout, FleetTime(fleet.clock, fleet.costs, fleet.after), tell)

    def add(self, leg: FleetLeg, *, num_received: int = 0) -> None:
        """See `FleetEngine`."""
        fleet, selector, request_id = self._fleet, self._selector, leg.request.request_id
        url = selector.choose(request_id, leg.request.prompt_token_ids)
        on_first, on_end = leg.on_first, leg.on_end

        def first(output: EngineOutput) -> None:
            fleet.after(fleet.costs.hop, partial(selector.prefilled, request_id))
            on_first(output)

        def end() -> None:
            fleet.after(fleet.costs.hop, partial(selector.ended, request_id))
            on_end()

        leg.on_first, leg.on_end = first, end
        FleetEngine.add(fleet.engines[url], leg, num_received=num_received)


def serve(
    fleet: Fleet,
    workload: Sequence[Work],
    command: Sequence[str | Path],
    *,
    counts_blocks: bool,
    patience_s: float = _PATIENCE_S,
) -> list[FleetOutcome]:
    """Serve a workload as `Fleet.run` does, with prefill engines that the selector chooses.

    Args:
        fleet: One proxy before engines of one role each, that splits every request.
        command: See `SelectionProcess`.
        counts_blocks: See `Selector`.
    """
    pool = [each.url for each in fleet.first.backends if each.role is Role.PREFILL]
    with Selector(
        command,
        pool,
        step_tokens=fleet.layout.step_tokens,
        counts_blocks=counts_blocks,
        patience_s=patience_s,
    ) as selector:
        for url in pool:
            fleet.engines[url] = SelectedEngine(fleet, url, selector)
        return fleet.run(workload)
