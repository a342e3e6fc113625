"""`/openapi.json`: describes a server's API for tools (OpenAPI 3.1.0).

The structs that bodies are decoded into describe them, so the document always matches the decoder.
A server's tests compare its paths with its routes, and its answers with their descriptions here.
Knows no handler.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

import pdserve
from pdserve.http import replies
from pdserve.http.access import API_KEY_HEADER
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from pdserve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TextFields,
    TokenizeRequest,
)
from pdserve.wire import drain
from pdserve.wire.hop import (
    INFO_PATH,
    MIGRATE_PATH,
    REACH_PATH,
    RELEASE_PATH,
    MigrateRequest,
    ReachRequest,
    ReleaseRequest,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PATH: Final = "/openapi.json"
_SCHEMAS: Final = "#/components/schemas/{name}"
_EMPTY: Final = "an empty answer"
_STREAM: Final = "text/event-stream"
_EVENTS: Final = "server-sent events; the data of each is a chunk of the answer, of the last [DONE]"
_HTML: Final = "text/html"
_TEXT: Final = "text/plain"


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    Attributes:
        body: Struct of the request body, if there is one.
        answer: Body of a 200: a struct as JSON, or any content of a media type.
        also: Other statuses whose answer is not an error object.
        streams: Whether it sends server-sent events if the body asks for them.
        is_operators: Whether it is for operators, not for clients.
        query: Parameters of its query.
        error: The shape of its errors.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | str = _EMPTY
    also: tuple[int, ...] = ()
    streams: bool = False
    is_operators: bool = False
    query: tuple[str, ...] = ()
    error: type[msgspec.Struct] = replies.ErrorAnswer


COMMON: Final = (
    Operation(
        "post", "/v1/completions", "Continue a text", CompletionRequest, replies.Completion,
        streams=True,
    ),
    Operation(
        "post", "/v1/chat/completions", "Answer a conversation", ChatRequest,
        replies.ChatCompletion, streams=True,
    ),
    Operation(
        "post", "/v1/responses", "Answer a conversation, as OpenAI's Responses", ResponsesRequest,
        replies.Response, streams=True,
    ),
    Operation(
        "post", "/v1/messages", "Answer a conversation, as Anthropic's Messages", MessagesRequest,
        replies.AnthropicMessage, streams=True, error=replies.AnthropicErrorAnswer,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "How many tokens a message has", CountTokensRequest,
        replies.InputTokens, error=replies.AnthropicErrorAnswer,
    ),
    Operation(
        "post", "/v1/embeddings", "Vectors of texts", EmbeddingRequest, replies.Embeddings
    ),
    *(
        Operation("post", path, "How alike texts are", ScoreRequest, replies.Scores)
        for path in ("/v1/score", "/score")
    ),
    *(
        Operation(
            "post", path, "Documents, the likest to a query first", RerankRequest, replies.Ranking
        )
        for path in ("/v1/rerank", "/rerank")
    ),
    Operation("get", "/v1/models", "The models", answer=replies.Models),
    Operation("get", "/v1/models/{model}", "One model", answer=replies.Model),
    Operation("post", "/tokenize", "A text or a chat as tokens", TokenizeRequest, replies.Tokens),
    Operation("post", "/detokenize", "Tokens as text", DetokenizeRequest, replies.Detokenized),
    Operation("get", "/metrics", "Prometheus' series", answer=_TEXT),
    Operation("get", "/version", "The version of pdserve", answer=replies.Version),
    Operation("get", "/load", "How many requests run", answer=replies.ServerLoad),
    Operation("get", PATH, "This document", answer="application/json"),
    Operation(
        "post", "/reset_prefix_cache", "Forget cached prefixes", is_operators=True,
        query=("reset_running_requests", "reset_external"),
    ),
    Operation(
        "get", "/debug/requests", "What runs, and what has ended", answer="application/json",
        is_operators=True, query=("finished", "after"),
    ),
    Operation(
        "get", "/debug/trace", "The last seconds of all processes", answer="application/json",
        is_operators=True, query=("seconds", "format"),
    ),
)  # fmt: skip
"""The methods that proxies and engines share."""

PROXY: Final = (
    *COMMON,
    Operation("get", "/health", "Whether it is there"),
    Operation("get", "/ping", "Whether it is there"),
    Operation("post", "/ping", "Whether it is there"),
    Operation("get", "/livez", "Whether its event loop turns"),
    Operation("get", "/readyz", "Whether requests can be served", answer="application/json"),
    Operation("get", "/dashboard", "A page for people", answer=_HTML, is_operators=True),
    Operation(
        "get", "/dashboard/data", "Its figures", answer="application/json", is_operators=True
    ),
    Operation(
        "post",
        drain.PATH,
        "Leave an engine in bounded time",
        drain.DrainRequest,
        drain.DrainReport,
        is_operators=True,
    ),
    Operation(
        "delete",
        drain.PATH,
        "Send requests to an engine again",
        drain.DrainRequest,
        "application/json",
        is_operators=True,
    ),
    Operation(
        "get",
        "/debug/decisions",
        "Which pairs were chosen, and why",
        answer="application/json",
        is_operators=True,
        query=("request", "after", "limit"),
    ),
)
ENGINE: Final = (
    *COMMON,
    Operation("get", "/health", "Whether requests can be served", also=(503,)),
    Operation("get", "/ping", "Whether requests can be served", also=(503,)),
    Operation("post", "/ping", "Whether requests can be served", also=(503,)),
    Operation("get", "/livez", "Whether its event loop turns", answer=_TEXT),
    Operation("get", "/readyz", "Whether traffic is wanted", answer=_TEXT, also=(503,)),
    Operation("get", "/debug/clock", "Its clock", answer="application/json", is_operators=True),
    Operation("get", INFO_PATH, "What it is, and its load", answer="application/json"),
    Operation("post", RELEASE_PATH, "Give a lease back", ReleaseRequest),
    Operation("post", MIGRATE_PATH, "End a stream with a handoff", MigrateRequest),
    Operation("post", REACH_PATH, "Whether it reaches others' side channels", ReachRequest),
)


@functools.cache
def document(
    title: str,
    operations: tuple[Operation, ...],
    *,
    without: tuple[str, ...] = (),
    root_path: str = "",
) -> Mapping[str, Any]:
    """Return the document, cached, because building it takes longer than the rest of an app.

    Args:
        without: Fields of bodies that clients must not send.
        root_path: Prefix of the paths.
    """
    named = [each for one in operations for each in (one.error, one.body, one.answer)]
    types = [each for each in dict.fromkeys(named) if isinstance(each, type)]
    _, components = msgspec.json.schema_components(types, ref_template=_SCHEMAS)
    for schema in components.values():
        for name in without:
            schema.get("properties", {}).pop(name, None)
    for kind in types:
        if not issubclass(kind, TextFields):
            continue
        for name, harmless in kind.unsupported.items():
            components[kind.__name__]["properties"][name] = {"enum": [None, *harmless]}
    paths: dict[str, dict[str, Any]] = {}
    for each in operations:
        paths.setdefault(each.path, {})[each.method] = _described(each)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": pdserve.__version__},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": API_KEY_HEADER},
            },
        },
    }


def route(described: Mapping[str, Any]) -> web.RouteDef:
    """Return the path that serves a document."""
    encoded = msgspec.json.encode(described)

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=encoded, content_type="application/json")

    return web.get(PATH, answer)


def _described(operation: Operation) -> dict[str, Any]:
    responses: dict[str, Any] = {"200": {"description": operation.summary}}
    content = _content(operation)
    if content:
        responses["200"]["content"] = content
    for status in operation.also:
        responses[str(status)] = {"description": "not now"}
    error = {"schema": {"$ref": _SCHEMAS.format(name=operation.error.__name__)}}
    responses["default"] = {
        "description": "an error",
        "content": {"application/json": error},
    }
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": f"{operation.method}{operation.path.replace('/', '_').translate(_BRACES)}",
        "tags": ["operators" if operation.is_operators else "clients"],
        "responses": responses,
        "security": [{}, {"key": []}, {"header": []}],
    }
    named = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
    parameters = [_parameter(name, "path") for name in named]
    parameters += [_parameter(name, "query") for name in operation.query]
    if parameters:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": _SCHEMAS.format(name=operation.body.__name__)}
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema}},
        }
    return described


_BRACES: Final = str.maketrans("", "", "{}.")


def _content(operation: Operation) -> dict[str, Any]:
    """Body of a 200, by media type."""
    answer = operation.answer
    if answer == _EMPTY:
        return {}
    if isinstance(answer, str):
        return {answer: {"schema": {} if answer == "application/json" else {"type": "string"}}}
    content: dict[str, Any] = {
        "application/json": {"schema": {"$ref": _SCHEMAS.format(name=answer.__name__)}}
    }
    if operation.streams:
        content[_STREAM] = {"schema": {"description": _EVENTS}}
    return content


def _parameter(name: str, where: str) -> dict[str, Any]:
    return {"name": name, "in": where, "required": where == "path", "schema": {"type": "string"}}
