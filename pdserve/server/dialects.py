"""Endpoints of other protocols, each a chat or a part of one: `/v1/responses`, `/v1/messages`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

from pdserve.dialects import paths
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.parsing import parse_body
from pdserve.http.protocol import ChatRequest, TokenizeRequest
from pdserve.server.chat import answer_chat
from pdserve.server.intake import say_unknown_fields
from pdserve.server.prefill_leg import as_ordered
from pdserve.server.reply import DIALECT
from pdserve.server.service import REQUEST_ID, read_body
from pdserve.server.status import tokens_of

if TYPE_CHECKING:
    from pdserve.http.protocol import TextFields


async def create_response(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    return await _answer(request, ResponsesRequest)


async def create_message(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    return await _answer(request, MessagesRequest)


async def count_tokens(request: web.Request) -> web.Response:
    """`POST /v1/messages/count_tokens`."""
    data = await read_body(request)
    asked = paths.tokens_asked(data)
    say_unknown_fields(request, data, CountTokensRequest)
    answer = await tokens_of(request, parse_body(asked, TokenizeRequest), len(asked))
    return web.Response(body=paths.tokens_counted(answer), content_type="application/json")


async def _answer(request: web.Request, kind: type[TextFields]) -> web.StreamResponse:
    data = await read_body(request)
    dialect = paths.dialect_of(request.path, data, request[REQUEST_ID])
    assert dialect is not None
    request[DIALECT] = dialect
    say_unknown_fields(request, data, kind, also=dialect.ignored)
    chat = dialect.chat_body()
    del data  # the answer may take minutes
    body = await as_ordered(request, parse_body(chat, ChatRequest), chat, paths.CHAT)
    return await answer_chat(request, body, len(chat))
