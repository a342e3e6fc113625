"""The contract between the proxy and the engines over HTTP: paths, headers, fields, bodies.

    engine -> proxy   REGISTER_PATH   POST `Registration`, at least once per lease
                                      DELETE `Deregistration`
    proxy -> engine   INFO_PATH       GET `EngineReport`
                      RELEASE_PATH    POST `ReleaseRequest`: a lease that nobody will read
                      REACH_PATH      POST `ReachRequest`, answered by `ReachReport`
                      MIGRATE_PATH    POST `MigrateRequest`: a stream ends with a handoff
                      OpenAI's paths  the client's body, with `KVTransferParams` under PARAMS

A whole answer has what is the proxy's under PARAMS (`HandedOver`) and STAGES (`EngineStages`), and
under PARTS its stream's choices, where only they tell in which order its text and calls were
written. A stream has it in events of their own, each an object of one key: HANDOFF or STAGES. Every
such name but PARAMS begins with INTERNAL; clients see none of them. Requests between parts of a
deployment carry proofs (`http.control`); handoffs and tickets are sealed (`wire.seal`). Keys
outside of `PdserveParams` are vLLM's, so that a proxy written for vLLM can drive these engines.

Values only: sends nothing, checks nothing beyond types.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import msgspec

from pdserve.wire.request import EngineInfo, EngineStats, OnLoadFailure, RequestStages
from pdserve.wire.seal import Purpose, Seal
from pdserve.wire.transfer import Endpoint

REGISTER_PATH: Final = "/pdserve/register"
RELEASE_PATH: Final = "/pdserve/release"
INFO_PATH: Final = "/pdserve/info"
REACH_PATH: Final = "/pdserve/reach"
MIGRATE_PATH: Final = "/pdserve/migrate"

REQUEST_ID_HEADER: Final = "X-Request-Id"
STAGES_HEADER: Final = "X-Pdserve-Stages"
"""In a request, "1": the answer is to have the engine's own account of it (`EngineStages`)."""
TIME_LEFT_HEADER: Final = "X-Pdserve-Time-Left"
"""In a request: seconds from its arrival at the engine after which the answer is of no use."""
YIELDS_HEADER: Final = "X-Pdserve-Yields"
"""In a request: `GenerateRequest.yields_s`; left out if it is 0."""
KV_MODE_HEADER: Final = "X-Pdserve-KV-Mode"
"""In a request that two engines share: who moves its KV, a `KVMode` value. In its answer, a stream
with stages: who has moved it; left out if none has come."""
LAYOUT_HEADER: Final = "X-Pdserve-Layout"
"""In an answer with stages: the engine's `EngineInfo.layout_digest`."""
LOAD_FAILURES_HEADER: Final = "X-Pdserve-Load-Failures"
"""In an error, and in the answer of a stream with stages: `LoadFailure` values of the KV loads that
failed before, separated by commas."""
PROOF_HEADER: Final = "X-Pdserve-Proof"
"""In a request between parts of a deployment: see `http.control`."""
FORMER_HEADER: Final = "X-Pdserve-Auth"
"""The same as release 0.1 signs."""
NONCE_HEADER: Final = "X-Pdserve-Nonce"
"""In a refusal: what the next proof is to be made for."""
PREFILL_HEADER: Final = "X-Pdserve-Prefill"
"""In a request that no proxy relays: the engine that is to prefill for the one that gets it, a
sealed `PrefillOrder`."""

PARAMS: Final = "kv_transfer_params"
OURS: Final = "pdserve"
"""Where `PdserveParams` stand in it."""
INTERNAL: Final = "pdserve_"
HANDOFF: Final = INTERNAL + "handoff"
STAGES: Final = INTERNAL + "stages"
PARTS: Final = INTERNAL + "parts"

RoleName = Literal["prefill", "decode", "both"]


class PromptTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The tokens that an engine has made of a request's texts, so that the next one need not.

    Attributes:
        text_digest: `EngineInfo.text_digest` of who made them.
        token_ids: Of each prompt, before it is cut; uint32 (host order) in base64.
    """

    text_digest: str
    token_ids: list[str]


class PdserveParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What only this proxy and these engines understand of `kv_transfer_params`.

    Attributes:
        handoffs: Per choice, sealed; None for a choice that ended at P.
        created: The answer's timestamp, so that both legs write the same.
        seed: Stands in for a seed the user did not give.
        cached_tokens: Per choice, what the client was told, or will be, of its prompt: how much of
            it a prefix cache had. An engine that goes on tells him the same.
        stages: Per choice, in P's answer: its `RequestStages` by name, zeros included.
        prompt_logprobs: Per choice, what P computed of them, if they were asked for.
        prompt_tokens: In P's answer, of long texts.
        final_length: At P: reaching max_tokens there ends the request.
        ticket: The push that both engines take part in, sealed; stands in for the handoffs at D.
            It is of one choice.
        first_delivered: At D: the client already has the first tokens' chunks, or will have them
            before anything of this engine.
        on_load_failure: At D; a proxy that has other ways asks to be told.
        is_fallback: This engine serves in place of another one, within its budget for that.
        may_move: Who asks goes on elsewhere if the stream ends with a handoff: see MIGRATE_PATH.
    """

    handoffs: list[str | None] | None = None
    created: int | None = None
    seed: int | None = None
    cached_tokens: list[int] | None = None
    stages: list[dict[str, float] | None] | None = None
    prompt_logprobs: list[str | None] | None = None
    prompt_tokens: PromptTokens | None = None
    final_length: bool = False
    ticket: str | None = None
    first_delivered: bool | None = None
    on_load_failure: OnLoadFailure = OnLoadFailure.RECOMPUTE
    is_fallback: bool = False
    may_move: bool = False


class PrefillOrder(msgspec.Struct, frozen=True):
    """Says to a decode engine where it is to have a request's prompt computed.

    Attributes:
        url: Base URL of the prefill engine.
    """

    url: str


PREFILL_ORDERS: Final = Seal(PrefillOrder, Purpose.PREFILL_ORDER, what=PREFILL_HEADER)


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`kv_transfer_params` as it is read; vLLM's other keys need no reading here."""

    do_remote_decode: bool | None = None
    do_remote_prefill: bool | None = None
    pdserve: PdserveParams | None = None


class HandedOver(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params` as a prefill engine answers them: what a decode engine goes on from.

    The proxy sends all of it on as it came, also what another version has put there.

    Attributes:
        remote_host, remote_port: The side channel of its first rank; None if it has none.
        tp_size: Its ranks that share a layer.
    """

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: str
    remote_block_ids: list[Any]
    remote_host: str | None
    remote_port: int | None
    remote_request_id: str
    tp_size: int
    pdserve: PdserveParams


class EngineStages(RequestStages, frozen=True, kw_only=True, omit_defaults=False):
    """An engine's own account of a request.

    Attributes:
        server_s: What its core does not account for: HTTP, tokens, the way to the core and back.
        ttft_s: From its arrival to the first token computed there.
        load_failures: Labels of KV loads that failed.
        prompt_tokens: Over all prompts; 0 if the engine does not say.
        cached_tokens: Those of them that a prefix cache had when they were prefilled.
        kv_mode: How KV came from another engine, if it did: push or pull.
        computed_tokens: Prompt tokens whose KV was computed there, over all choices.
        finish_reasons: `FinishReason` values of the choices that were served there.
        num_choices: For each prompt, as the client asked.
        max_tokens: Of a choice, as it applies; 0 if the engine does not say.
        output_tokens: Over all choices, wherever they were sampled; 0 if the engine does not say.
        num_preemptions: Over all choices.
    """

    server_s: float = 0.0
    ttft_s: float = 0.0
    load_failures: tuple[str, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    kv_mode: str = ""
    computed_tokens: int = 0
    finish_reasons: tuple[str, ...] = ()
    num_choices: int = 1
    max_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /pdserve/release`."""

    nonce: str


class MigrateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /pdserve/migrate`: whose stream is to end with a handoff, if it can.

    The answer says nothing of it: the stream does.

    Attributes:
        request_id: As in REQUEST_ID_HEADER.
    """

    request_id: str


class ReachRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /pdserve/reach`: side channels of other engines."""

    endpoints: list[Endpoint]


class ReachReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: for each endpoint, why the engine cannot connect to it, or None."""

    reasons: list[str | None]


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /pdserve/info`: what an engine is, and how busy.

    Attributes:
        reason: Why it is not ready.
        models: The names it serves its model under.
        stats: What an engine of another version does not count is 0.
        wall_s: Unix time when it was said.
    """

    ready: bool = False
    reason: str | None = None
    models: tuple[str, ...] = ()
    engine: EngineInfo | None = None
    stats: EngineStats | None = None
    wall_s: float | None = None


class Registration(msgspec.Struct, frozen=True):
    """What an engine sends to `POST /pdserve/register`.

    Attributes:
        url: Where proxies reach it.
        lease_s: How long it is to be believed.
    """

    url: str
    role: RoleName
    engine: EngineInfo
    lease_s: float


class Deregistration(msgspec.Struct, frozen=True):
    """What an engine sends to `DELETE /pdserve/register`.

    Attributes:
        deadline_s: How long it goes on with what it has; None if it does not say.
    """

    url: str
    role: str | None = None
    engine: EngineInfo | None = None
    deadline_s: float | None = None
