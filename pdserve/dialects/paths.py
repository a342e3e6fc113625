"""Maps paths to dialects and to the format of their errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.dialects.messages import MessagesDialect, anthropic_error, prompt_fields
from pdserve.dialects.responses import PARAMS, ResponsesDialect
from pdserve.errors import BadRequestError
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.parsing import parse_body
from pdserve.http.protocol import ChatRequest

if TYPE_CHECKING:
    from pdserve.dialects.answer import Dialect

CHAT: Final = "/v1/chat/completions"
TOKENIZE: Final = "/tokenize"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
COUNT_TOKENS: Final = "/v1/messages/count_tokens"


def dialect_of(path: str, data: bytes, request_id: str) -> Dialect | None:
    """Return the translator of a request; None if its path belongs to no dialect.

    Args:
        data: Body of the request.

    Raises:
        BadRequestError: It cannot be read, or asks for something that is not supported.
    """
    if path == RESPONSES:
        return ResponsesDialect(parse_body(data, ResponsesRequest), request_id)
    if path == MESSAGES:
        return MessagesDialect(parse_body(data, MessagesRequest), request_id)
    return None


def tokens_asked(data: bytes) -> bytes:
    """Return the body of `/tokenize` for one of `/v1/messages/count_tokens`.

    Raises:
        BadRequestError: It cannot be read, or asks for something that is not supported.
    """
    fields = prompt_fields(parse_body(data, CountTokensRequest))
    try:
        chat = parse_body(msgspec.json.encode(fields), ChatRequest)
        return msgspec.json.encode(
            {
                "model": chat.model,
                "messages": chat.messages,
                "continue_final_message": chat.continue_final_message,
                "tools": chat.offered_tools,
                "chat_template_kwargs": chat.template_variables,
            }
        )
    except RecursionError:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from None


def tokens_counted(answer: bytes) -> bytes:
    """Return the answer of `/v1/messages/count_tokens` for one of `/tokenize`."""
    return msgspec.json.encode({"input_tokens": msgspec.json.decode(answer)["count"]})


def error_of(path: str, status: int, body: bytes) -> bytes:
    """Return an error as the clients of a path expect it.

    Args:
        body: In the shape of OpenAI's chat completions.
    """
    if path not in (RESPONSES, MESSAGES, COUNT_TOKENS):
        return body
    error: dict[str, Any] = msgspec.json.decode(body)["error"]
    if path == RESPONSES:
        param = error.get("param")
        return msgspec.json.encode({"error": {**error, "param": PARAMS.get(str(param), param)}})
    return msgspec.json.encode(anthropic_error(status, error))
