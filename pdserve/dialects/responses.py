"""OpenAI's Responses, stateless: `POST /v1/responses`.

Events and objects follow openai-python's types (`openai.types.responses`). Each part of the answer
is an item of its output. Reasoning is sent as plain text, and clients may send it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pdserve.dialects.answer import AnswerPart, Dialect, DialectEvent, PartKind
from pdserve.dialects.conversation import messages_of
from pdserve.dialects.response_tools import (
    WEB_SEARCH,
    custom_names,
    is_web_search,
    local_names,
    tool_fields,
)
from pdserve.dialects.tool_inputs import InputReader, input_in
from pdserve.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pdserve.dialects.answer import ChatError
    from pdserve.http.dialect_bodies import ResponsesRequest

PARAMS: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "verbosity": "text",
    "reasoning_effort": "reasoning",
    "truncate_prompt_tokens": "truncation",
    "continue_final_message": "input",
}
"""Names of a chat's fields in this protocol."""
_SAME: Final = (
    "model", "temperature", "top_p", "user", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "logit_bias", "seed", "stop", "stop_token_ids",
    "ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "priority", "cache_salt",
    "session_id", "slo", "structured_outputs", "include_reasoning", "chat_template_kwargs",
    "stream",
)  # fmt: skip
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (_LOGPROBS, "reasoning.encrypted_content")
"""Reasoning is readable in any case, so the second one changes nothing."""
_PREFIXES: Final = {PartKind.TEXT: "msg", PartKind.REASONING: "rs", PartKind.CALL: "fc"}


class ResponsesDialect(Dialect):
    """One response.

    Args:
        request_id: Basis of its id and of those of its items.

    Raises:
        BadRequestError: It asks for something that is not supported.
    """

    def __init__(self, body: ResponsesRequest, request_id: str) -> None:
        super().__init__(_chat(body), tuple(_ignored(body)))
        self._body = body
        self._request_id = request_id
        self._local_names = local_names(body.tools or ())
        self._custom_names = custom_names(body.tools or ())
        self._input = InputReader()
        self._num_events = 0
        self._error: dict[str, Any] | None = None

    def begun(self) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response("in_progress"))

    def part_begun(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        item = self._item(part, "in_progress")
        self._input = InputReader()
        yield self._event("response.output_item.added", output_index=part.position, item=item)
        if part.kind is not PartKind.CALL:
            content = _content(part)
            yield self._about(part, "response.content_part.added", content_index=0, part=content)

    def part_grown(
        self, part: AnswerPart, text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        match part.kind:
            case PartKind.TEXT:
                rows = [_without_bytes(row) for row in logprobs]
                yield self._about(
                    part, "response.output_text.delta", content_index=0, delta=text, logprobs=rows
                )
            case PartKind.REASONING:
                name = "response.reasoning_text.delta"
                yield self._about(part, name, content_index=0, delta=text)
            case PartKind.CALL if self._is_custom(part):
                if given := self._input.push(text):
                    yield self._about(part, "response.custom_tool_call_input.delta", delta=given)
            case PartKind.CALL:
                yield self._about(part, "response.function_call_arguments.delta", delta=text)

    def part_ended(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        match part.kind:
            case PartKind.TEXT:
                rows = [_without_bytes(row) for row in part.logprobs]
                name = "response.output_text.done"
                yield self._about(part, name, content_index=0, text=part.text, logprobs=rows)
            case PartKind.REASONING:
                name = "response.reasoning_text.done"
                yield self._about(part, name, content_index=0, text=part.text)
            case PartKind.CALL if self._is_custom(part):
                name = "response.custom_tool_call_input.done"
                yield self._about(part, name, input=input_in(part.text))
            case PartKind.CALL:
                name = "response.function_call_arguments.done"
                named = self._named(part)
                yield self._about(part, name, name=named["name"], arguments=part.text)
        if part.kind is not PartKind.CALL:
            content = _content(part)
            yield self._about(part, "response.content_part.done", content_index=0, part=content)
        item = self._item(part, _status(part))
        yield self._event("response.output_item.done", output_index=part.position, item=item)

    def ended(self) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        answer = self.answer()
        yield self._event(f"response.{answer['status']}", response=answer)

    def failed(self, error: ChatError) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        code = "rate_limit_exceeded" if error.type == "rate_limit_error" else "server_error"
        self._error = {"code": code, "message": error.message}
        yield self._event("response.failed", response=self._response("failed"))

    def answer(self) -> dict[str, Any]:
        """See `Dialect`."""
        is_cut = self.finish_reason == "length"
        return self._response("incomplete" if is_cut else "completed")

    def _event(self, kind: str, /, **data: Any) -> DialectEvent:
        data["sequence_number"] = self._num_events
        self._num_events += 1
        return DialectEvent(kind, data)

    def _about(self, part: AnswerPart, kind: str, /, **data: Any) -> DialectEvent:
        return self._event(kind, item_id=self._id_of(part), output_index=part.position, **data)

    def _id_of(self, part: AnswerPart) -> str:
        prefix = "ctc" if self._is_custom(part) else _PREFIXES[part.kind]
        return f"{prefix}_{self._request_id}_{part.position}"

    def _is_custom(self, part: AnswerPart) -> bool:
        """Whether a part is a call of a custom tool."""
        return part.kind is PartKind.CALL and part.name in self._custom_names

    def _item(self, part: AnswerPart, status: str) -> dict[str, Any]:
        has_begun = status != "in_progress"
        item: dict[str, Any] = {"id": self._id_of(part), "status": status}
        content = [_content(part)] if has_begun else []
        match part.kind:
            case PartKind.TEXT:
                return {**item, "type": "message", "role": "assistant", "content": content}
            case PartKind.REASONING:
                return {**item, "type": "reasoning", "summary": [], "content": content}
            case PartKind.CALL:
                call = {**item, "call_id": part.call_id, **self._named(part)}
                if self._is_custom(part):
                    return {**call, "type": "custom_tool_call", "input": input_in(part.text)}
                return {**call, "type": "function_call", "arguments": part.text}

    def _named(self, part: AnswerPart) -> dict[str, str]:
        """Return the fields of a call that name its function."""
        known = self._local_names.get(part.name)
        return {"name": part.name} if known is None else known._asdict()

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        is_over = status in ("completed", "incomplete")
        items = [self._item(part, _status(part)) for part in self.parts]
        return {
            "id": f"resp_{self._request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"}
            if status == "incomplete"
            else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "model": self.model,
            "output": items if status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "temperature": body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": body.top_p,
            "truncation": body.truncation or "disabled",
            "usage": self._usage() if is_over else None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _status(part: AnswerPart) -> str:
    return "incomplete" if part.is_cut else "completed"


def _content(part: AnswerPart) -> dict[str, Any]:
    if part.kind is PartKind.REASONING:
        return {"type": "reasoning_text", "text": part.text}
    content = {"type": "output_text", "text": part.text, "annotations": []}
    return {**content, "logprobs": part.logprobs}


def _without_bytes(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of log-probabilities in the form that events have."""
    top = [{**each, "bytes": None} for each in row.get("top_logprobs", ())]
    for each in top:
        del each["bytes"]
    return {"token": row.get("token"), "logprob": row.get("logprob"), "top_logprobs": top}


def _ignored(body: ResponsesRequest) -> Iterator[str]:
    """Yield what has no effect.

    Reasoning is sent as it is, and nobody writes a summary of it. The model hears of no web search.
    """
    if body.top_logprobs is not None and _LOGPROBS not in (body.include or ()):
        yield "top_logprobs"
    for name in ("summary", "generate_summary"):
        if (body.reasoning or {}).get(name) is not None:
            yield f"reasoning.{name}"
    if any(is_web_search(tool) for tool in body.tools or ()):
        yield f"tools.{WEB_SEARCH}"


def _chat(body: ResponsesRequest) -> dict[str, Any]:
    """Return the body of the chat completion that answers a request.

    Raises:
        BadRequestError: It asks for something that is not supported.
    """
    messages, is_open = messages_of(body.input, body.instructions)
    chat: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    chat["messages"] = messages
    chat["max_completion_tokens"] = body.max_output_tokens
    if is_open:
        chat["continue_final_message"] = True
    if body.truncation == "auto":
        chat["truncate_prompt_tokens"] = -1
    if body.stream:
        chat["stream_options"] = {"include_usage": True}
    for index, name in enumerate(body.include or ()):
        if name not in _INCLUDABLE:
            raise BadRequestError(
                f"include[{index}] is {name!r}: only {' and '.join(_INCLUDABLE)} can be included",
                param="include",
            )
    if _LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.reasoning is not None:
        chat["reasoning_effort"] = body.reasoning.get("effort")
    chat |= _format(body.text or {}) | tool_fields(body)
    return {name: value for name, value in chat.items() if value is not None}


def _format(text: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for `text`.

    Raises:
        BadRequestError: Its format is not an object.
    """
    wanted = text.get("format")
    if not isinstance(wanted, dict | None):
        raise BadRequestError(f"text.format must be an object, got {wanted!r}", param="text")
    if wanted is not None and wanted.get("type") == "json_schema":
        schema = {name: value for name, value in wanted.items() if name != "type"}
        wanted = {"type": "json_schema", "json_schema": schema}
    return {
        "response_format": None if wanted == {"type": "text"} else wanted,
        "verbosity": text.get("verbosity"),
    }
