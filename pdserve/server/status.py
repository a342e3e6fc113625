"""Endpoints beside generation: health, models, version, metrics, tokenization, proxies.

The debugging paths (requests, the trace, the clock) need the API key, like every path that reveals
requests.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

import pdserve
from pdserve.dialects import paths
from pdserve.errors import BadRequestError, EngineDeadError
from pdserve.http.answers import json_answer
from pdserve.http.dialect_bodies import CountTokensRequest
from pdserve.http.parsing import parse_body
from pdserve.http.protocol import DetokenizeRequest, TokenizeRequest
from pdserve.http.replies import ServerLoad
from pdserve.observe.metrics import CONTENT_TYPE
from pdserve.observe.trace import reading
from pdserve.observe.trace_query import gathered, trace_query
from pdserve.server.account import running, traced
from pdserve.server.chat import render_chat
from pdserve.server.intake import read_request, refuse_more, say_unknown_fields
from pdserve.server.sampling import check_token_ids
from pdserve.server.service import SERVICE, read_body
from pdserve.wire.hop import (
    EngineReport,
    MigrateRequest,
    ReachReport,
    ReachRequest,
    ReleaseRequest,
)
from pdserve.wire.trace import Alignment, Collected, Collection, Missing, Part

if TYPE_CHECKING:
    from pdserve.observe.trace import Dump
    from pdserve.server.service import Service
    from pdserve.wire.trace import ProcessTrace
    from pdserve.wire.transfer import Endpoint

_CORE_TIMEOUT_S: Final = 5.0
"""For the engine cores' traces."""
_REACH_TIMEOUT_S: Final = 1.0
MAX_TOOL_CHARS = 4 << 20
MAX_TOOL_TOKENS = 1 << 20
"""What `/tokenize` and `/detokenize` take: about a second's work."""


async def health(request: web.Request) -> web.Response:
    """200 while requests can be served."""
    ready = request.app[SERVICE].not_ready_reason is None
    return web.Response(status=200 if ready else 503)


async def load(request: web.Request) -> web.Response:
    """How many requests for text run, in vLLM's shape."""
    return json_answer(ServerLoad(len(request.app[SERVICE].text_requests)))


async def livez(request: web.Request) -> web.Response:
    """200 while this event loop turns; asks nobody else."""
    return web.Response(text="ok\n")


async def readyz(request: web.Request) -> web.Response:
    """200 once the weights are loaded and no proxy refuses the engine, until shutdown begins.

    The body says why not. Proxies look at `info`, which waits for no proxy's answer.
    """
    service = request.app[SERVICE]
    reason = service.unready_reason
    if reason is None and service.is_registering:
        reason = "it is registering with its proxies"
    return web.Response(status=200 if reason is None else 503, text=f"{reason or 'ok'}\n")


async def version(request: web.Request) -> web.Response:
    """The version of pdserve."""
    return json_answer({"version": pdserve.__version__})


async def metrics(request: web.Request) -> web.Response:
    """Prometheus' exposition."""
    body = await request.app[SERVICE].metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def list_models(request: web.Request) -> web.Response:
    """The names this server answers to."""
    service = request.app[SERVICE]
    return json_answer(
        {"object": "list", "data": [_model_object(service, name) for name in service.model_names]}
    )


async def retrieve_model(request: web.Request) -> web.Response:
    """One of them."""
    service = request.app[SERVICE]
    name = request.match_info["model"]
    service.resolve_model(name)
    return json_answer(_model_object(service, name))


def _model_object(service: Service, name: str) -> dict[str, Any]:
    info = service.client.info
    return {
        "id": name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "pdserve",
        "root": service.engine_config.model.model,
        "parent": None,
        "max_model_len": info.max_model_len if info is not None else None,
    }


async def reset_prefix_cache(request: web.Request) -> web.Response:
    """Forget every cached prefix; 200 with an empty body, as vLLM answers.

    Requests that come after the answer find nothing that was computed before it. Requests that
    run keep their blocks, and what they computed so far is not found by others; vLLM forgets
    nothing at all while one runs, and answers 200 as well.

    Raises:
        BadRequestError: vLLM's `reset_running_requests` or `reset_external` is asked for.
    """
    for name in ("reset_running_requests", "reset_external"):
        if request.query.get(name, "false").lower() not in ("false", "0"):
            raise BadRequestError(
                f"{name} is not supported, because running requests are never preempted for this "
                "and only the engine's own cache is cleared: leave it out",
                param=name,
            )
    service = request.app[SERVICE]
    service.require_ready()
    await service.client.reset_prefix_cache()
    return web.Response()


async def tokenize(request: web.Request) -> web.Response:
    """The token ids of a prompt or of chat messages."""
    answer = await tokens_of(request, *await read_request(request, TokenizeRequest))
    return web.Response(body=answer, content_type="application/json")


async def tokens_of(request: web.Request, body: TokenizeRequest, num_bytes: int) -> bytes:
    """Return the answer of `/tokenize`.

    Args:
        num_bytes: Size of the body.
    """
    service = request.app[SERVICE]
    service.resolve_model(body.model)
    text, info = service.require_ready()
    if (body.prompt is None) == (body.messages is None):
        raise BadRequestError("give either prompt or messages", param="prompt")
    prompt, special = body.prompt or "", body.add_special_tokens is not False
    if body.messages is not None:
        special = bool(body.add_special_tokens)
        prompt = await render_chat(
            service.tool_work,
            text,
            body,
            num_bytes=num_bytes,
            max_model_len=info.max_model_len,
            now_s=service.clock.wall_s(),
        )
    refuse_more("prompt", len(prompt), MAX_TOOL_CHARS, "characters")

    def answer() -> bytes:
        tokens = text.tokenizer.encode(prompt, add_special_tokens=special)
        spellings = None
        if body.return_token_strs:
            spellings = [text.tokenizer.token(token_id) for token_id in tokens]
        return msgspec.json.encode(
            {
                "count": len(tokens),
                "max_model_len": info.max_model_len,
                "tokens": tokens,
                "token_strs": spellings,
            }
        )

    return await service.tool_work.run(answer, len(prompt))


async def count_tokens(request: web.Request) -> web.Response:
    """`POST /v1/messages/count_tokens`."""
    data = await read_body(request)
    asked = paths.tokens_asked(data)
    say_unknown_fields(request, data, CountTokensRequest)
    answer = await tokens_of(request, parse_body(asked, TokenizeRequest), len(asked))
    return web.Response(body=paths.tokens_counted(answer), content_type="application/json")


async def detokenize(request: web.Request) -> web.Response:
    """The text of token ids, special tokens included."""
    body, _ = await read_request(request, DetokenizeRequest)
    service = request.app[SERVICE]
    service.resolve_model(body.model)
    text, _ = service.require_ready()
    token_ids = body.tokens
    refuse_more("tokens", len(token_ids), MAX_TOOL_TOKENS, "ids")
    check_token_ids("tokens", token_ids, text.vocab_size)

    def answer() -> bytes:
        prompt = text.tokenizer.decode(token_ids, skip_special_tokens=False)
        return msgspec.json.encode({"prompt": prompt})

    return web.Response(
        body=await service.tool_work.run(answer, len(token_ids)), content_type="application/json"
    )


async def release(request: web.Request) -> web.Response:
    """Give up a lease that nobody will read. Unknown nonces are ignored."""
    service = request.app[SERVICE]
    data = await read_body(request)
    service.verifier.check(request, data)
    await service.client.release_lease(parse_body(data, ReleaseRequest).nonce)
    return web.Response()


async def migrate(request: web.Request) -> web.Response:
    """Have a stream end with a handoff, for another engine to go on with it; unknown ids do not."""
    service = request.app[SERVICE]
    data = await read_body(request)
    service.verifier.check(request, data)
    wanted = parse_body(data, MigrateRequest).request_id
    open_ones = service.text_requests.values()
    moving = [each for each in open_ones if each.may_move and each.request_id == wanted]
    requests = [choice.request for each in moving for choice in each.choices]
    await service.client.hand_over([each.request_id for each in requests if each is not None])
    return web.Response()


async def info(request: web.Request) -> web.Response:
    """What the engine is and how busy it is, for proxies."""
    service = request.app[SERVICE]
    return json_answer(
        EngineReport(
            ready=service.unready_reason is None,
            reason=service.unready_reason,
            models=service.model_names,
            engine=service.info,
            stats=service.client.stats,
            wall_s=service.clock.wall_s(),
        )
    )


async def reach(request: web.Request) -> web.Response:
    """Try to connect to other engines' side channels, all at once; say why one cannot be reached.

    A proxy asks this of engines before they exchange KV. A replayed question is harmless: it makes
    the engine connect to the same addresses, and send nothing there.
    """
    service = request.app[SERVICE]
    data = await read_body(request)
    service.verifier.check(request, data)
    service.require_ready()
    asked = parse_body(data, ReachRequest)
    reasons = await asyncio.gather(*map(_why_not, asked.endpoints))
    return json_answer(ReachReport(reasons=list(reasons)))


async def _why_not(endpoint: Endpoint) -> str | None:
    try:
        ipaddress.ip_address(endpoint.host)
    except ValueError:
        return None  # KV stays within one process: there is nothing to connect to
    try:
        async with asyncio.timeout(_REACH_TIMEOUT_S):
            _, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    except TimeoutError:
        return f"no answer within {_REACH_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error) if error.errno is None else os.strerror(error.errno)
    writer.close()
    return None


async def clock(request: web.Request) -> web.Response:
    """The time by this process's monotonic clock, and which clock that is."""
    return json_answer(reading(request.app[SERVICE].clock))


async def requests(request: web.Request) -> web.Response:
    """What runs; and with `?finished=N` the newest N that ended, those after `&after=SEQ`."""
    service = request.app[SERVICE]
    finished = service.recent.asked_for(request.query)
    requests = [running(each) for each in service.text_requests.values()]
    return json_answer({"running": requests, "finished": msgspec.Raw(finished)})


async def trace(request: web.Request) -> web.Response:
    """The last `?seconds=N` of this server and its engine cores, as `Collection`.

    With `?format=chrome` as a trace that viewers read.
    """
    query = trace_query(request.query)
    collection = await _collect(request.app[SERVICE], query.seconds)
    body = await asyncio.to_thread(query.encode, collection)
    return web.Response(body=body, content_type="application/json")


async def _collect(service: Service, seconds: float) -> Collection:
    own = await gathered(_own(service, seconds))
    missing: list[Missing] = []
    cores: list[ProcessTrace] = []
    try:
        async with asyncio.timeout(_CORE_TIMEOUT_S):
            cores = await service.client.trace(seconds)
    except EngineDeadError as error:
        missing.append(Missing(who="engine core", reason=error.message))
    except TimeoutError:
        reason = f"no answer within {_CORE_TIMEOUT_S:g} s"
        missing.append(Missing(who="engine core", reason=reason))
    return Collection(
        seconds=seconds,
        until_s=own.process.monotonic_s,
        wall_s=own.process.wall_s,
        # Cores are processes of this machine, started by this one: their clock is the same.
        processes=[Collected(trace=each, alignment=Alignment()) for each in (own, *cores)],
        missing=missing,
    )


def _own(service: Service, seconds: float) -> Dump:
    info = service.client.info
    return service.recorder.dump(
        seconds,
        clock=service.clock,
        part=Part.SERVER,
        role=service.engine_config.role.value,
        engine_id=info.engine_id if info is not None else service.engine_config.engine_id,
        running=[traced(service, each, "") for each in service.text_requests.values()],
    )
