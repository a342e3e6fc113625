"""The input of OpenAI's Responses as the messages of a chat.

The items of one assistant turn (reasoning, text, calls) become one message, and each call's output
a message of its own. System messages at the beginning become one message.
"""

from __future__ import annotations

from typing import Any, Final

from pdserve.dialects.response_tools import full_name
from pdserve.dialects.texts import string_in, text_of
from pdserve.errors import BadRequestError

_PARAM: Final = "input"
_TEXTS: Final = frozenset(
    {"input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"}
)

_Message = dict[str, Any]


def messages_of(
    items: str | list[dict[str, Any]], instructions: str | None
) -> tuple[list[_Message], bool]:
    """Return the messages, and whether the answer continues the last one.

    Raises:
        BadRequestError: An item has no counterpart in a chat, or there is none.
    """
    messages: list[_Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}], False
    for index, item in enumerate(items):
        _add(messages, item, f"input[{index}]")
    if not messages:
        raise BadRequestError("input is empty: send at least one item", param=_PARAM)
    last = items[-1] if items else {}
    is_cut = last.get("status") in ("in_progress", "incomplete")
    return with_one_system(messages), last.get("role") == "assistant" and is_cut


def with_one_system(messages: list[_Message]) -> list[_Message]:
    """Join the system messages at the beginning: most templates accept only one."""
    leading = 0
    while leading < len(messages) and messages[leading]["role"] == "system":
        leading += 1
    if leading < 2:
        return messages
    content = "\n\n".join(message["content"] for message in messages[:leading])
    return [{"role": "system", "content": content}, *messages[leading:]]


def _add(messages: list[_Message], item: dict[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(messages, item, where)
        case "reasoning":
            content = item.get("content") or item.get("summary")
            texts = text_of(content, _TEXTS, f"{where}.content", _PARAM)
            if texts:  # there are none where it is encrypted
                turn = {"role": "assistant", "content": "", "reasoning": "\n".join(texts)}
                messages.append(turn)
        case "function_call" | "custom_tool_call" as kind:
            name = string_in(item, "name", where, _PARAM)
            if item.get("namespace") is not None:
                name = full_name(string_in(item, "namespace", where, _PARAM), name)
            is_custom = kind == "custom_tool_call"
            field = "input" if is_custom else "arguments"
            kind = "custom" if is_custom else "function"
            call = {
                "id": string_in(item, "call_id", where, _PARAM),
                "type": kind,
                kind: {"name": name, field: string_in(item, field, where, _PARAM)},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output" | "custom_tool_call_output":
            texts = text_of(item.get("output"), _TEXTS, f"{where}.output", _PARAM)
            call_id = string_in(item, "call_id", where, _PARAM)
            content = "\n".join(texts)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        case "item_reference":
            raise BadRequestError(
                f"{where} refers to another response, and responses are not kept: send the item "
                "itself",
                param=_PARAM,
            )
        case kind:
            raise BadRequestError(
                f"{where}.type is {kind!r}: the only supported tools are functions and custom ones",
                param=_PARAM,
            )


def _add_message(messages: list[_Message], item: dict[str, Any], where: str) -> None:
    role = string_in(item, "role", where, _PARAM)
    content = "\n".join(text_of(item.get("content"), _TEXTS, f"{where}.content", _PARAM))
    last = messages[-1] if messages else {}
    has_only_reasoning = "reasoning" in last and not last["content"] and "tool_calls" not in last
    if role == "assistant" and has_only_reasoning:
        last["content"] = content
        return
    # Few templates have a developer role, and OpenAI's models treat both alike.
    messages.append({"role": "system" if role == "developer" else role, "content": content})
