"""Where faults are played: a deployment, the streams that run through it, and what is counted.

A fault has a row in the failure table (docs/failures.md), a phase of the transfer it falls into,
and three answers: how many wrong tokens came out, how many blocks are not free afterwards, and how
long it took until every request had ended and every block was free. `Stage.settle` asserts them
and writes them down.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from tests.chaos import skew
from tests.chaos.network import Network
from tests.chaos.streams import NUM_TOKENS, Stream
from tests.e2e.deployment import Deployment

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from tests.chaos.streams import Outcome

ENGINES = {"prefill", "decode", "decode1"}
PROMPT_TOKENS = 640
LEASE_S = 3.0
HANDSHAKE_S = 2.0
TRANSFER_S = 5.0
QUARANTINE_S = 2.0
RECOVERY_S = 10.0
"""A request goes on somewhere else after this, whatever it waited for."""
FENCED_S = TRANSFER_S + QUARANTINE_S + LEASE_S
"""Blocks that a lost peer might still write are free after this."""

_OPERATOR_KEY = "of the stage"
"""To the proxy, a client in another network namespace is a program of another host."""
SLACK_S = 0.0 if os.environ.get("HYPOTHESIS_PROFILE") == "nightly" else 60.0
"""`make chaos` holds every bound. `make test` runs on machines of any speed, beside anything: it
fails what hangs, and says what took longer."""

REPORT = os.environ.get("PDSERVE_FAILURES_REPORT")
"""A file that every measured row is appended to, as a line of JSON."""


class Stage:
    """A proxy, one prefill engine and two decode engines; faults one after the other.

    Args:
        network: None has all of them on loopback, where KV goes through shared memory.
        mode: Who moves the KV, at first.
        num_ranks: TP ranks of each engine.
        kv_connector: That of all engines.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        network: Network | None,
        mode: str,
        *,
        num_ranks: int = 1,
        kv_connector: str = "nixl",
    ) -> None:
        self.network = network
        self.mode = mode
        self.deployment = Deployment(directory)
        self._model = model
        self._num_ranks = num_ranks
        self._kv_connector = kv_connector
        self._seeds = itertools.count(1)
        self._stopped: set[str] = set()
        self._split_policy = "always"
        self._skews_s: dict[str, int] = {}

    @property
    def transport(self) -> str:
        """How KV travels."""
        if self._kv_connector == "ucx":
            return "UCX"
        return "shared memory" if self.network is None else "TCP"

    @property
    def url(self) -> str:
        """Of the proxy."""
        return self.deployment.url("proxy")

    def start(self) -> None:
        """Start everything and wait until it serves."""
        self.start_proxy()
        self._start_engine("prefill")
        self._start_engine("decode")
        self._start_engine("decode1")
        self.deployment.wait()
        self.deployment.wait_routable(1, 2)

    def start_proxy(self, port: int = 0) -> None:
        """Start the proxy, where it was if `port` says so."""
        host = "127.0.0.1" if self.network is None else self.network.proxy
        self.deployment.start(
            "proxy",
            *("proxy", "--host", host, "--port", str(port), "--kv-mode", self.mode),
            *("--cb-timeout-duration-secs", "1", "--no-early-rejection"),
            *("--split-policy", self._split_policy),
            env={"PDSERVE_OPERATOR_KEY": _OPERATOR_KEY},
        )
        self.deployment.wait("proxy")

    def environment(self, name: str) -> dict[str, str]:
        """What an engine's environment has beside this process's."""
        return ({} if self.network is None else {"UCX_TLS": "tcp"}) | skew.environment(
            self._skews_s.get(name, 0)
        )

    def connector(self, name: str) -> str:
        """Which connector an engine has."""
        return self._kv_connector

    def start_out_of_reach(self, name: str) -> None:
        """Start a further engine, which has others look for its KV at their own loopback."""
        self._start_engine(name, kv_host="127.0.0.1")

    def _start_engine(self, name: str, port: int = 0, *, kv_host: str = "") -> None:
        where = None
        host = "127.0.0.1"
        if self.network is not None:
            is_prefill = name.startswith("prefill")
            side = self.network.prefill if is_prefill else self.network.decode
            where, host = side.namespace, side.address
        transfer = {
            "kv-connector": self.connector(name),
            "host": kv_host or host,
            "lease-s": LEASE_S,
            "handshake-timeout-s": HANDSHAKE_S,
            "transfer-timeout-s": TRANSFER_S,
            "quarantine-s": QUARANTINE_S,
        }
        self.deployment.start(
            name,
            name.rstrip("1"),
            *(str(self._model), "--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "16"),
            *("--host", host, "--port", str(port), "--proxy", self.url),
            *("--tensor-parallel-size", str(self._num_ranks)),
            "--kv-events-config.enable-kv-cache-events",
            *("--num-gpu-blocks-override", "640", "--max-num-batched-tokens", "256"),
            *(
                word
                for key, value in transfer.items()
                for word in (f"--kv-transfer-config.{key}", str(value))
            ),
            env=self.environment(name),
            namespace=where,
            under=skew.command(self._skews_s.get(name, 0)),
        )

    # ---- requests

    def prompt(self, num_tokens: int = PROMPT_TOKENS) -> list[int]:
        """Token ids that no request had before."""
        seed = next(self._seeds)
        return [3 + (7919 * seed + 31 * i * i + seed * i) % 311 for i in range(num_tokens)]

    def prompts(self, num: int) -> tuple[list[list[int]], list[list[int]]]:
        """As many prompts, and the right answers."""
        prompts = [self.prompt() for _ in range(num)]
        return prompts, self.right_answers(prompts)

    def stream(self, prompt: list[int], num_tokens: int = NUM_TOKENS) -> Stream:
        """Begin a request through the proxy."""
        return Stream(self.url, prompt, num_tokens)

    def right_answer(
        self, prompt: list[int], num_tokens: int = NUM_TOKENS, *, engine: str = "decode1"
    ) -> list[int]:
        """What one engine says alone, under a salt of its own: it shares no KV with others."""
        body = {
            "prompt": prompt,
            "max_tokens": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "cache_salt": "the right answer",
        }
        url = self.deployment.url(engine)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, verify=False)
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["choices"][0]["token_ids"]
        return tokens

    def right_answers(
        self, prompts: list[list[int]], num_tokens: int = NUM_TOKENS
    ) -> list[list[int]]:
        """To each, asked all at once: the kernels' answers do not depend on the batch."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self.right_answer(prompt, num_tokens), prompts))

    def kv_bytes(self) -> float:
        """KV that has come to the decode engines."""
        return sum(
            self.deployment.metric(name, "pdserve_kv_transfer_bytes_total")
            for name in ("decode", "decode1")
        )

    def num_loads(self) -> float:
        """Loads that arrived, in the mode of now."""
        return sum(self._num_loads(name) for name in ("decode", "decode1"))

    def num_failed_loads(self, name: str) -> float:
        """Loads that did not arrive at a decode engine, for whatever reason."""
        return sum(
            value
            for series, value in self.deployment.metrics(name).items()
            if series.startswith("pdserve_kv_transfer_failures_total")
        )

    def is_receiving(self, name: str) -> bool:
        """Whether a decode engine has blocks that are being filled."""
        return bool(self.deployment.held_blocks(name).get("receiving"))

    def wait_receiving(self, timeout_s: float = 60.0) -> str:
        """Wait until a decode engine has blocks that are being filled; return which."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for name in ("decode", "decode1"):
                if self.is_receiving(name):
                    return name
            time.sleep(0.01)
        raise AssertionError("no decode engine ever received")

    # ---- faults

    def kill(self, name: str) -> None:
        """kill -9."""
        self._stopped.discard(name)
        self.deployment.processes[name].kill()

    def stop(self, name: str) -> None:
        """SIGSTOP to all of it."""
        self._stopped.add(name)
        for process in self.deployment.processes[name].family():
            process.send_signal(signal.SIGSTOP)

    def stop_one(self, name: str, part: str) -> None:
        """SIGSTOP to one process of it: its "server" (or proxy), "core", or last "rank"."""
        self._stopped.add(name)
        server, *others = self.deployment.processes[name].family()
        module = {"core": "pdserve.engine.process", "rank": "pdserve.executor.rank"}.get(part)
        found = [server] if module is None else [p for p in others if module in p.cmdline()]
        found[-1].send_signal(signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT to all of it."""
        self._stopped.discard(name)
        for process in self.deployment.processes[name].family():
            process.send_signal(signal.SIGCONT)

    def num_backends(self, state: str) -> float:
        """Engines that the proxy has in a state, such as "draining"."""
        found = self.deployment.metrics("proxy").items()
        label = f'state="{state}"'
        return sum(n for key, n in found if key.startswith("pdserve_backends{") and label in key)

    def drain(self, name: str, deadline_s: float) -> dict[str, Any]:
        """Leave an engine; return what became of what ran there."""
        return self._order("POST", {"url": self.deployment.url(name), "deadline_s": deadline_s})

    def send_again(self, name: str) -> None:
        """Have requests sent to an engine that was drained."""
        self._order("DELETE", {"url": self.deployment.url(name)})

    def _order(self, method: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = httpx.request(
            method,
            f"{self.url}/drain",
            json=body,
            headers={"Authorization": f"Bearer {_OPERATOR_KEY}"},
            timeout=60,
            verify=False,
        )
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def start_again(self, name: str) -> None:
        """Start an engine that has ended, where it was."""
        self._start_engine(name, int(self.deployment.url(name).rsplit(":", 1)[1]))

    def skew(self, name: str, seconds: int) -> None:
        """Start an engine again whose clocks are ahead by so much, all of them."""
        self._skews_s = {name: seconds} if seconds else {}
        self.kill(name)
        self.start_again(name)

    def silence_events(self, name: str) -> None:
        """From now on nobody hears what an engine tells of its KV, and it does not know."""
        assert self.network is not None
        (told,) = self.deployment.info(name)["engine"]["kv_events"]
        is_prefill = name.startswith("prefill")
        self.network.silence((told["port"], told["snapshot_port"]), is_prefill=is_prefill)

    def restore(self, mode: str = "", *, split_policy: str = "always") -> None:
        """Undo every fault, start what has died, and wait until all is well and empty.

        Args:
            mode: Who moves the KV from now on, if not who did: only the proxy starts again.
            split_policy: Of the proxy, from now on.
        """
        was_cut = self.network is not None and self.network.heal()
        for name in self._skews_s:
            self.kill(name)
        self._skews_s = {}
        if mode not in ("", self.mode) or split_policy != self._split_policy:
            self.mode, self._split_policy = mode or self.mode, split_policy
            self.kill("proxy")
        for name in sorted(self._stopped):
            self.resume(name)
        for name, process in list(self.deployment.processes.items()):
            if process.popen.poll() is not None:  # it has died
                if name == "proxy":
                    self.start_proxy(int(process.url.rsplit(":", 1)[1]))
                else:
                    self.start_again(name)
        self.deployment.wait()
        self.deployment.wait_routable(1, 2)
        if was_cut:
            self.wait_kv_moves()
        self.deployment.wait_nothing_held(*ENGINES, timeout_s=30.0)

    def wait_kv_moves(self) -> None:
        """Wait until KV moves to both: a breaker may be open, or a peer left alone for a while."""
        names = {"decode", "decode1"}
        before = {name: self._num_loads(name) for name in names}
        deadline = time.monotonic() + 60.0
        while names:
            assert time.monotonic() < deadline, f"no KV moves to {names} any more"
            for stream in [self.stream(self.prompt(64), 2) for _ in range(2)]:
                stream.join(60.0)
            names = {name for name in names if self._num_loads(name) == before[name]}

    def _num_loads(self, name: str) -> float:
        return self.deployment.metric(name, f'pdserve_kv_loads_total{{mode="{self.mode}"}}')

    # ---- the three answers

    def settle(
        self,
        row: str,
        phase: str,
        streams: Sequence[Outcome],
        right: list[list[int]],
        *,
        since_s: float,
        bound_s: float,
        expect: Collection[str] = frozenset({"finished"}),
        alive: Iterable[str] = ENGINES,
        silence_s: float | None = None,
    ) -> None:
        """Wait for the end of everything; assert and print the three answers.

        Args:
            since_s: When the fault came.
            bound_s: Seconds after which every request has ended and every block is free; held
                to within `SLACK_S`.
            expect: How streams may end.
            alive: The engines that can be asked.
            silence_s: Seconds without a token or the end of a stream at most; None: not measured.
        """
        until_s = since_s + bound_s + SLACK_S
        for stream in streams:
            stream.join(max(0.1, until_s - time.monotonic()))
        num_wrong = sum(
            token != answer[index] if index < len(answer) else True
            for stream, answer in zip(streams, right, strict=True)
            for index, token in enumerate(stream.tokens)
        )
        assert num_wrong == 0, "wrong tokens"
        for stream, answer in zip(streams, right, strict=True):
            assert stream.end in expect, f"a stream ended as {stream.end!r}, not as {expect}"
            assert stream.end != "finished" or stream.tokens == answer
        silent_s = None
        if silence_s is not None:
            silent_s = round(max(stream.silence_s(since_s) for stream in streams), 2)
            assert silent_s < silence_s + SLACK_S
        requests_s = max((s.ended_s for s in streams), default=since_s) - since_s
        left_s = until_s - time.monotonic()
        self.deployment.wait_nothing_held(*alive, timeout_s=max(0.1, left_s))
        free_s = time.monotonic() - since_s
        result = {
            "row": row,
            "phase": phase,
            "transport": self.transport,
            "mode": self.mode,
            "wrong_tokens": num_wrong,
            "blocks_not_free": 0,
            "requests_ended_s": round(requests_s, 2),
            "blocks_free_s": round(free_s, 2),
            "silent_s": silent_s,
            "bound_s": bound_s,
            "ends": sorted({str(s.end) for s in streams}),
            "test": os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0],
        }
        print(f"\n{json.dumps(result)}")
        if REPORT:
            with Path(REPORT).open("a") as file:
                file.write(json.dumps(result) + "\n")


@contextmanager
def started(directory: Path, model: Path, transport: str, *, num_ranks: int = 1) -> Iterator[Stage]:
    """One deployment for all faults of a transport."""
    with ExitStack() as stack:
        network = None if transport == "shared memory" else stack.enter_context(Network())
        kv_connector = "ucx" if transport == "UCX" else "nixl"
        stage = Stage(
            directory, model, network, "pull", num_ranks=num_ranks, kv_connector=kv_connector
        )
        stack.callback(stage.deployment.end)
        stage.start()
        yield stage
        stage.restore()
