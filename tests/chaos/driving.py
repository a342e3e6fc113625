"""Engines driven without a proxy: what it says to them can then be late, twice, or forged."""

from __future__ import annotations

import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from pdserve.wire.transfer import TICKETS, EngineRef, PushTicket

if TYPE_CHECKING:
    from tests.chaos.stage import Stage

NUM_TOKENS = 24


class Call:
    """One whole completion asked of an engine, by a thread of its own. An `Outcome`.

    Attributes:
        answer: What the engine said, if it said anything.
    """

    def __init__(
        self, stage: Stage, name: str, prompt: list[int], params: dict[str, Any], salt: str = ""
    ) -> None:
        self.tokens: list[int] = []
        self.end: str | None = None
        self.ended_s = 0.0
        self.answer: dict[str, Any] = {}
        self._url = stage.deployment.url(name)
        self._body: dict[str, Any] = {
            "prompt": prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
            **({"cache_salt": salt} if salt else {}),
        }
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Wait for the end."""
        self._thread.join(timeout_s)
        assert self.end is not None, "a request to an engine hangs"

    def silence_s(self, since_s: float) -> float:
        """All of it: the answer comes as a whole."""
        return self.ended_s - since_s

    def _run(self) -> None:
        end = "connection lost"
        try:
            answer = httpx.post(
                f"{self._url}/v1/completions", json=self._body, timeout=60, verify=False
            )
            self.answer = answer.json()
            if answer.status_code == 200:
                self.tokens = self.answer["choices"][0]["token_ids"]
                end = "finished"
            else:
                end = str(self.answer["error"]["code"])
        except httpx.HTTPError:
            pass
        finally:
            self.ended_s = time.monotonic()
            self.end = end


def leased(stage: Stage, prompt: list[int]) -> dict[str, Any]:
    """Prefill on P and let its KV be leased; return what a decode engine is told."""
    call = Call(stage, "prefill", prompt, remote_decode())
    call.join(30.0)
    assert call.end == "finished", call.end
    params: dict[str, Any] = call.answer["kv_transfer_params"]
    return params


def read_late(
    stage: Stage, prompt: list[int], handoff: dict[str, Any], *, salt: str = ""
) -> tuple[list[int] | None, float]:
    """Give a handoff to D; return its tokens (None if it refused) and how much was noticed."""
    before = stage.num_failed_loads("decode")
    call = Call(stage, "decode", prompt, handoff, salt)
    call.join(30.0)
    failures = stage.num_failed_loads("decode") - before
    if call.end == "finished":
        return call.tokens, failures
    assert "error" in call.answer, call.end
    return None, failures + 1


def remote_decode(ticket: str | None = None) -> dict[str, Any]:
    """What P is told: prefill, and lease the KV out or write it to whom the ticket names."""
    ours: dict[str, Any] = {"final_length": True}
    if ticket is not None:
        ours["ticket"] = ticket
    return {"do_remote_decode": True, "pdserve": ours}


def remote_prefill(ticket: str) -> dict[str, Any]:
    """What D is told of a push. A load that fails ends the request."""
    ours = {"ticket": ticket, "on_load_failure": "report"}
    return {"do_remote_prefill": True, "pdserve": ours}


def ticket_for(stage: Stage, *, secret: str | None = None) -> str:
    """Draw a ticket from P to D, as the proxy does.

    Args:
        secret: Another one than the deployment's.
    """
    ticket = PushTicket(
        nonce=secrets.token_hex(16),
        prefill=_engine(stage, "prefill"),
        decode=_engine(stage, "decode"),
    )
    return TICKETS.seal(ticket, secret or stage.deployment.secret)


def ends_of_leases(stage: Stage, end: str) -> float:
    """How many leases of P ended so."""
    return float(stage.deployment.info("prefill")["stats"]["lease_ends"][end])


def _engine(stage: Stage, name: str) -> EngineRef:
    info = stage.deployment.info(name)["engine"]
    fields = {key: info[key] for key in ("engine_id", "incarnation", "endpoints")}
    return msgspec.convert(fields | {"shape": info["kv_shape"]}, EngineRef)
