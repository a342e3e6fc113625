"""Anthropic's Messages: `POST /v1/messages`, and which parts of it form the prompt.

Events and objects follow the types of anthropic-sdk-python. Each part of the answer is a block of
its content. If the last message is the assistant's, the answer continues it, as in Anthropic's API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from pdserve.dialects.answer import AnswerPart, Dialect, DialectEvent, PartKind
from pdserve.dialects.conversation import with_one_system
from pdserve.dialects.texts import string_in, text_of, without_billing
from pdserve.errors import BadRequestError, ContextLengthError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pdserve.dialects.answer import ChatError
    from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest

_PARAM: Final = "messages"
_TEXTS: Final = frozenset({"text"})
_ROLES: Final = {"ctx": "user", "msg": "user"}
"""Claude Code's own roles, and what they stand for."""
_TOO_LONG: Final = "prompt is too long"
"""What Claude Code finds in an error before it shortens its conversation."""
_STOPS: Final = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_Message = dict[str, Any]


class MessagesDialect(Dialect):
    """One request for a message.

    Args:
        request_id: Basis of its id.

    Raises:
        BadRequestError: It asks for something that is not supported.
    """

    def __init__(self, body: MessagesRequest, request_id: str) -> None:
        super().__init__(_chat(body), tuple(_ignored(body)))
        self._id = f"msg_{request_id}"

    def begun(self) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        yield DialectEvent("message_start", {"message": {**self.answer(), "stop_reason": None}})

    def part_begun(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        empty = AnswerPart(part.kind, part.position, call_id=part.call_id, name=part.name)
        yield DialectEvent(
            "content_block_start", {"index": part.position, "content_block": _block(empty, "")}
        )

    def part_grown(
        self, part: AnswerPart, text: str, logprobs: list[dict[str, Any]]
    ) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        match part.kind:
            case PartKind.TEXT:
                delta = {"type": "text_delta", "text": text}
            case PartKind.REASONING:
                delta = {"type": "thinking_delta", "thinking": text}
            case PartKind.CALL:
                delta = {"type": "input_json_delta", "partial_json": text}
        yield DialectEvent("content_block_delta", {"index": part.position, "delta": delta})

    def part_ended(self, part: AnswerPart) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        if part.kind is PartKind.REASONING:
            delta = {"type": "signature_delta", "signature": self._signature(part)}
            yield DialectEvent("content_block_delta", {"index": part.position, "delta": delta})
        yield DialectEvent("content_block_stop", {"index": part.position})

    def ended(self) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield DialectEvent("message_delta", {"delta": delta, "usage": self._usage()})
        yield DialectEvent("message_stop", {})

    def failed(self, error: ChatError) -> Iterator[DialectEvent]:
        """See `Dialect`."""
        kind = "rate_limit_error" if error.type == "rate_limit_error" else "api_error"
        yield DialectEvent("error", {"error": {"type": kind, "message": error.message}})

    def answer(self) -> dict[str, Any]:
        """See `Dialect`."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [_block(part, self._signature(part)) for part in self.parts],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _signature(self, part: AnswerPart) -> str:
        """Return what stands for a signature: clients send no thoughts back that have none."""
        return f"{self._id}_{part.position}"

    @property
    def _stop_sequence(self) -> str | None:
        return self.stop_reason if isinstance(self.stop_reason, str) else None

    @property
    def _stop_reason(self) -> str:
        if self.finish_reason == "stop" and self._stop_sequence is not None:
            return "stop_sequence"  # behind a call, it is the call that the client waits for
        return _STOPS.get(self.finish_reason or "", "end_turn")

    def _usage(self) -> dict[str, int]:
        """Return the usage; Anthropic's `input_tokens` excludes cached tokens."""
        usage = self.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _ignored(body: MessagesRequest) -> Iterator[str]:
    """Yield what has no effect: no chat template tells a failed result from others."""
    for name in ("budget_tokens", "display"):
        if name in (body.thinking or {}):
            yield f"thinking.{name}"
    contents = [message.get("content") for message in body.messages]
    blocks = [block for content in contents if isinstance(content, list) for block in content]
    if any(block.get("type") == "tool_result" and block.get("is_error") for block in blocks):
        yield "messages.content.is_error"


def anthropic_error(status: int, error: Mapping[str, Any]) -> dict[str, Any]:
    """Return OpenAI's error object in Anthropic's shape."""
    kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = str(error.get("message", ""))
    if error.get("code") == ContextLengthError.code:
        message = f"{_TOO_LONG}: {message}"
    return {"type": "error", "error": {"type": kind, "message": message}}


def _chat(body: MessagesRequest) -> dict[str, Any]:
    """Return the body of the chat completion that answers a request.

    Raises:
        BadRequestError: It asks for something that is not supported.
    """
    chat = prompt_fields(body)
    chat["max_tokens"] = body.max_tokens
    for name in ("temperature", "top_p", "top_k", "cache_salt"):
        if (value := getattr(body, name)) is not None:
            chat[name] = value
    if body.stop_sequences:
        chat["stop"] = body.stop_sequences
    if body.stream:
        # The first event has the number of prompt tokens.
        options = {"include_usage": True, "continuous_usage_stats": True}
        chat |= {"stream": True, "stream_options": options}
    if isinstance(user := (body.metadata or {}).get("user_id"), str):
        chat["user"] = user
    if wanted := (body.output_config or {}).get("format"):
        schema = wanted.get("schema") if isinstance(wanted, dict) else None
        chat["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "output", "schema": schema, "strict": True},
        }
    return chat


def prompt_fields(body: CountTokensRequest) -> dict[str, Any]:
    """Return the fields of a chat that determine the prompt.

    Raises:
        BadRequestError: It asks for something that is not supported.
    """
    system = text_of(body.system, _TEXTS, "system", "system")
    said = [text for text in map(without_billing, system) if text]
    messages: list[_Message] = []
    if said:
        messages.append({"role": "system", "content": "\n\n".join(said)})
    for index, message in enumerate(body.messages):
        messages += _chat_messages(message, f"messages[{index}]")
    fields: dict[str, Any] = {"messages": with_one_system(messages)}
    if body.model is not None:
        fields["model"] = body.model
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" and last["content"] and "tool_calls" not in last:
        fields["continue_final_message"] = True
    variables = dict(body.chat_template_kwargs or {})
    if body.thinking is not None:
        variables.setdefault("enable_thinking", body.thinking.get("type") != "disabled")
    if variables:
        fields["chat_template_kwargs"] = variables
    if body.tools:
        fields["tools"] = [_tool(tool, index) for index, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        fields |= _choice(body.tool_choice)
    if (effort := (body.output_config or {}).get("effort")) is not None:
        fields["reasoning_effort"] = effort
    return fields


def _chat_messages(message: dict[str, Any], where: str) -> list[_Message]:
    """Return a message as messages of a chat; each tool result becomes one."""
    role = string_in(message, "role", where, _PARAM)
    role = _ROLES.get(role, role)
    content = message.get("content")
    if not isinstance(content, list):
        texts = text_of(content, _TEXTS, f"{where}.content", _PARAM)
        return [{"role": role, "content": "\n".join(texts)}]
    results: list[_Message] = []
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "text":
                texts.append(string_in(block, "text", place, _PARAM))
            case "thinking":
                thoughts.append(string_in(block, "thinking", place, _PARAM))
            case "redacted_thinking":
                pass  # it is encrypted
            case "tool_use":
                calls.append(_call(block, place))
            case "tool_result":
                said = text_of(block.get("content"), _TEXTS, f"{place}.content", _PARAM)
                call_id = string_in(block, "tool_use_id", place, _PARAM)
                result = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(said)}
                results.append(result)
            case kind:
                raise BadRequestError(
                    f"{place}.type is {kind!r}: only text, thinking and tools are supported",
                    param=_PARAM,
                )
    own: _Message = {"role": role, "content": "\n".join(texts)}
    if thoughts:
        own["reasoning"] = "\n".join(thoughts)
    if calls:
        own["tool_calls"] = calls
    return results if results and len(own) == 2 and not texts else [*results, own]


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    try:
        arguments = msgspec.json.encode(block.get("input") or {}).decode()
    except RecursionError:
        raise BadRequestError(f"{where}.input is nested too deeply", param=_PARAM) from None
    name = string_in(block, "name", where, _PARAM)
    call_id = string_in(block, "id", where, _PARAM)
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise BadRequestError(
            f"tools[{index}].type is {tool['type']!r}: this server has no built-in tools; only "
            "tools of the client can be called",
            param="tools",
        )
    function: dict[str, Any] = {
        name: tool[name] for name in ("name", "description", "strict") if name in tool
    }
    function["parameters"] = tool.get("input_schema") or {"type": "object"}
    return {"type": "function", "function": function}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat for the choice of a tool."""
    fields: dict[str, Any] = {}
    if choice.get("disable_parallel_tool_use"):
        fields["parallel_tool_calls"] = False
    match choice.get("type"):
        case "auto" | "none" as kind:
            return fields | {"tool_choice": kind}
        case "any":
            return fields | {"tool_choice": "required"}
        case "tool":
            named = {"type": "function", "function": {"name": choice.get("name")}}
            return fields | {"tool_choice": named}
        case kind:
            raise BadRequestError(
                f"tool_choice.type is {kind!r}: use auto, any, tool or none", param="tool_choice"
            )


def _block(part: AnswerPart, signature: str) -> dict[str, Any]:
    match part.kind:
        case PartKind.TEXT:
            return {"type": "text", "text": part.text}
        case PartKind.REASONING:
            return {"type": "thinking", "thinking": part.text, "signature": signature}
        case PartKind.CALL:
            call = {"type": "tool_use", "id": part.call_id, "name": part.name}
            return {**call, "input": msgspec.Raw(part.text.encode() or b"{}")}
