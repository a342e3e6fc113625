"""The tools of OpenAI's Responses as those of a chat.

Codex offers the tools of each MCP server in a namespace; in a chat they have its name before
their own. It offers a web search with each request, too, of which the model hears nothing. The chat
calls custom tools as functions: their arguments show whether a call is whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.dialects.texts import string_in
from pdserve.errors import BadRequestError
from pdserve.http.tools import CALLED_AS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.http.dialect_bodies import ResponsesRequest

WEB_SEARCH: Final = "web_search"
"""Beginning of the names of the tool that is left out."""
_PARAM: Final = "tools"


class LocalName(NamedTuple):
    """Name of a tool within a namespace."""

    namespace: str
    name: str


def full_name(namespace: str, name: str) -> str:
    """Return a function's name in a chat, as vLLM has it; the namespace may be empty."""
    return f"{namespace}__{name}" if namespace else name


def local_names(tools: Iterable[dict[str, Any]]) -> dict[str, LocalName]:
    """Return the tools in namespaces by their names in a chat.

    Raises:
        BadRequestError: See `tool_fields`.
    """
    return {
        full_name(namespace, tool["name"]): LocalName(namespace, tool["name"])
        for namespace, _, tool in _callable(tools, _PARAM)
        if namespace
    }


def custom_names(tools: Iterable[dict[str, Any]]) -> set[str]:
    """Return the names in a chat of custom tools.

    Raises:
        BadRequestError: See `tool_fields`.
    """
    return {
        full_name(namespace, tool["name"])
        for namespace, kind, tool in _callable(tools, _PARAM)
        if kind == "custom"
    }


def tool_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a chat for tools.

    Raises:
        BadRequestError: One is not the client's own.
    """
    if not body.tools and body.tool_choice in (None, "auto", "none"):
        return {}
    tools = [_as_of_chat(*each) for each in _callable(body.tools or (), _PARAM)]
    fields: dict[str, Any] = {"tools": tools}
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    choice = body.tool_choice
    if isinstance(choice, dict):
        names = [tool[tool["type"]]["name"] for tool in tools]
        choice = _choice(choice, names, local_names(body.tools or ()))
    return fields if choice is None else fields | {"tool_choice": choice}


def _as_of_chat(namespace: str, kind: str, tool: dict[str, Any]) -> dict[str, Any]:
    said = {**tool, "name": full_name(namespace, tool["name"])}
    if kind == "function":
        return {"type": kind, kind: said}
    form = tool.get("format")
    if isinstance(form, dict) and form.get("type") == "grammar":
        grammar = {name: value for name, value in form.items() if name != "type"}
        said["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: said, CALLED_AS: "function"}


def _choice(
    choice: dict[str, Any], names: Sequence[str], local: dict[str, LocalName]
) -> dict[str, Any]:
    """Return a chat's choice of tools.

    Raises:
        BadRequestError: It is of another kind.
    """
    match choice:
        case {"type": "function" | "custom" as kind}:
            return {"type": kind, kind: {"name": _chosen(choice.get("name"), names, local)}}
        case {"type": "allowed_tools", "tools": list(tools)}:
            allowed = [
                _choice(tool, names, local)
                for tool in tools
                if not (isinstance(tool, dict) and is_web_search(tool))
            ]
            said = {"mode": choice.get("mode"), "tools": allowed}
            return {"type": "allowed_tools", "allowed_tools": said}
    kind = choice.get("type") if isinstance(choice, dict) else choice
    raise BadRequestError(
        f"tool_choice.type is {kind!r}: it must be function, custom or allowed_tools",
        param="tool_choice",
    )


def is_web_search(tool: dict[str, Any]) -> bool:
    """Whether a tool is the one that is left out."""
    return str(tool.get("type")).startswith(WEB_SEARCH)


def _callable(
    tools: Iterable[Any], where: str, namespace: str = ""
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each tool that the client has: its namespace (may be empty), type and fields."""
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind in ("function", "custom"):
            string_in(tool, "name", place, _PARAM)
            yield namespace, kind, {name: each for name, each in tool.items() if name != "type"}
        elif kind == "namespace" and not namespace:
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise BadRequestError(f"{place}.tools must be a list of tools", param=_PARAM)
            yield from _callable(inner, f"{place}.tools", string_in(tool, "name", place, _PARAM))
        elif kind is None or not is_web_search(tool):
            raise BadRequestError(
                f"{place}.type is {kind!r}: this server has no built-in tools; only functions and "
                "custom tools can be called",
                param=_PARAM,
            )


def _chosen(name: object, names: Sequence[str], local: dict[str, LocalName]) -> object:
    """Return the name in a chat of a tool that must be called.

    Its namespace may be left out, unless several have a tool of that name.
    """
    if name in names:
        return name
    meant = [full for full, each in local.items() if each.name == name]
    return meant[0] if len(meant) == 1 else name
