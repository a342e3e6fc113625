"""Checks a chat's messages, and gives them the form that a model's template reads.

Clients send back what they were given, by this server or another one, and templates differ in
what they read of it and in what they refuse. What a template needs is found in its source.
"""

from __future__ import annotations

import json
import re
from collections import deque
from typing import TYPE_CHECKING, Any

from pdserve.dialects.texts import without_billing
from pdserve.errors import BadRequestError
from pdserve.http.tools import INPUT

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_REASONING = ("reasoning", "reasoning_content")
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Types of parts that are text, and their fields for it: clients send back what any API sent."""
_THOUGHTS = ("thinking", "redacted_thinking")
"""Types of parts that are the assistant's reasoning; the latter is encrypted."""
_SHORT_IDS = re.compile(r"id\s*\|\s*length\s*!=\s*9\b")
"""What templates of Mistral have that refuse calls whose ids have another length."""
_SHORT = 9
_FIRST_CALL = "tool_calls[0]"
"""What templates have that read one call of a message, as Llama's and gpt-oss's."""
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


class MessageReader:
    """See the module.

    Args:
        source: The template, in Jinja.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._shortens_ids = _SHORT_IDS.search(source) is not None

    def read(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return messages as the template reads them.

        Raises:
            BadRequestError: One is malformed.
        """
        plain = [self._plain(message, index) for index, message in enumerate(messages)]
        if not self._names("developer") and any(each["role"] == "developer" for each in plain):
            plain = _with_system_first(plain)
        if _FIRST_CALL in self._source:
            plain = list(_with_one_call_each(plain))
        return plain

    def _plain(self, message: Mapping[str, Any], index: int) -> dict[str, Any]:
        """Check one message and join its text parts."""
        where = f"messages[{index}]"
        role = message.get("role")
        if not isinstance(role, str):
            raise BadRequestError(f"{where}.role must be a string, not {role!r}", param="messages")
        if not self._knows(role):
            raise BadRequestError(
                f"{where}.role is {role!r}: use one of {', '.join(_ROLES)}", param="messages"
            )
        # Templates ask whether a field is there, and clients send back nulls that they were given.
        plain = {name: value for name, value in message.items() if value is not None}
        plain["content"] = content_of(message, where)
        if message.get("tool_calls") is not None:
            plain["tool_calls"] = _with_objects(message["tool_calls"], f"{where}.tool_calls")
            if not plain["tool_calls"]:  # some templates ask only whether the field is there
                del plain["tool_calls"]
        if self._shortens_ids:
            _shorten(plain, "tool_call_id")
            for call in plain.get("tool_calls", ()):
                _shorten(call, "id")
        said = (message[name] for name in _REASONING if isinstance(message.get(name), str))
        thought = next(said, None)
        thought = _thought_in(message, where) if thought is None else thought
        if thought is not None:  # templates know it by one of three names
            plain |= dict.fromkeys(_REASONING, thought)
            if not (plain["content"] and "tool_calls" in plain):  # gpt-oss's refuses such messages
                plain.setdefault("thinking", thought)
        return plain

    def _knows(self, role: str) -> bool:
        """Whether a role is one of OpenAI's, or occurs in the template.

        Most templates would write any other role into the prompt, where the model has never seen
        it.
        """
        return role in _ROLES or (role.isidentifier() and self._names(role))

    def _names(self, role: str) -> bool:
        """Whether a role occurs in the template."""
        return any(f"{q}{role}{q}" in self._source for q in "'\"")


def _with_system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without a developer, whose words become the system's, as in vLLM.

    Most templates leave out roles that they do not know, and accept one system message, the first.
    """
    roles = ("system", "developer")
    said = [each["content"] for each in messages if each["role"] in roles and each["content"]]
    others = [each for each in messages if each["role"] not in roles]
    return [{"role": "system", "content": "\n\n".join(said)}, *others]


def _with_objects(calls: object, where: str) -> list[dict[str, Any]]:
    """Return an assistant's calls with arguments as templates expect them: objects, not strings.

    Arguments that are no object are a mistake of the model. An empty one takes their place, as in
    vLLM: a conversation that has such a call could not go on otherwise.
    """
    if not isinstance(calls, list):
        raise BadRequestError(f"{where} must be a list of tool calls", param="messages")
    parsed = []
    for index, call in enumerate(calls):
        if isinstance(call, dict) and call.get("type") == "custom":
            call = _with_text(call, f"{where}[{index}].custom")
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRequestError(
                f"{where}[{index}].function must be an object with a name and arguments",
                param="messages",
            )
        arguments = _Arguments.read(function.get("arguments"))
        parsed.append({**call, "function": {**function, "arguments": arguments}})
    return parsed


def _with_text(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a call of a custom tool as one of a function, as models know it."""
    match call.get("custom"):
        case {"name": str(name), "input": str(text)}:
            function = {"name": name, "arguments": {INPUT: text}}
            rest = {field: value for field, value in call.items() if field != "custom"}
            return {**rest, "type": "function", "function": function}
    raise BadRequestError(
        f"{where} must be an object with a name and an input, which are strings", param="messages"
    )


class _Arguments(dict[str, Any]):
    """Arguments of a call. Added to a text, as in DeepSeek's templates, they are their JSON."""

    _spelling: str | None = None

    @classmethod
    def read(cls, given: object) -> _Arguments:
        """Return what a client has sent; none if it is no object."""
        found = given
        if isinstance(given, str):
            try:
                found = json.loads(given)
            except (ValueError, RecursionError):
                found = {}
        arguments = cls(found if isinstance(found, dict) else {})
        if isinstance(found, dict) and isinstance(given, str) and found:
            arguments._spelling = given  # so that the prompt has what the model has written
        return arguments

    def __radd__(self, text: str) -> str:
        return text + (self._spelling or to_json(self))

    def __add__(self, text: str) -> str:
        return (self._spelling or to_json(self)) + text


def _with_one_call_each(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield messages with at most one call each, and its result behind it."""
    rest = deque(messages)
    while rest:
        message = rest.popleft()
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results: dict[str, list[dict[str, Any]]] = {str(call.get("id")): [] for call in calls}
        others: list[dict[str, Any]] = []
        while rest and rest[0]["role"] == "tool":
            result = rest.popleft()
            results.get(str(result.get("tool_call_id")), others).append(result)
        for index, call in enumerate(calls):
            own = message if index == 0 else {"role": message["role"], "content": ""}
            yield {**own, "tool_calls": [call]}
            yield from results.pop(str(call.get("id")), ())
        yield from others


def _shorten(named: dict[str, Any], field: str) -> None:
    """Replace the id of a call by its end, as vLLM does for Mistral's models."""
    if isinstance(call_id := named.get(field), str):
        named[field] = call_id[-_SHORT:].rjust(_SHORT, "0")


def _thought_in(message: Mapping[str, Any], where: str) -> str | None:
    """Return the reasoning in a message's content, as some APIs send it; None if none is."""
    content = message.get("content")
    thoughts = [
        content_of({"content": part.get("thinking")}, f"{where}.content[{position}].thinking")
        for position, part in enumerate(content if isinstance(content, list) else ())
        if _is_thought(part, message) and "thinking" in part
    ]
    return "\n".join(thoughts) if thoughts else None


def _is_thought(part: object, message: Mapping[str, Any]) -> bool:
    """Whether a part of a message's content is reasoning, which only the assistant has."""
    is_own = message.get("role") == "assistant"
    return is_own and isinstance(part, dict) and part.get("type") in _THOUGHTS


def content_of(message: Mapping[str, Any], where: str) -> str:
    """Return a message's text, with its parts joined as text templates expect.

    Args:
        where: Name of the message in an error.

    Raises:
        BadRequestError: It has something other than text.
    """
    content = message.get("content")
    if isinstance(content, str):
        texts = [content]
    elif isinstance(content, list):
        texts = [
            _part_text(part, f"{where}.content[{position}]")
            for position, part in enumerate(content)
            if not _is_thought(part, message)
        ]
    elif content is None:
        texts = []
    else:
        raise BadRequestError(
            f"{where}.content must be a string or a list of text parts", param="messages"
        )
    if message.get("role") == "system":
        texts = [without_billing(text) for text in texts]
    return "\n".join(filter(None, texts))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if isinstance(part, dict) and isinstance(kind, str) and kind in _TEXTS:
        text = part.get(_TEXTS[kind])
        if isinstance(text, str | None):
            return text or ""
    raise BadRequestError(
        f"{where} has type {kind!r}: only text parts are supported", param="messages"
    )


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Hugging Face's filter writes it, without the HTML escapes of Jinja's filter."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
