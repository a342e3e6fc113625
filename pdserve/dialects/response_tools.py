"""The tools of OpenAI's Responses as the functions of a chat.

Codex offers the functions of each MCP server in a namespace; in a chat they have its name before
their own. It offers a web search with each request, too, of which the model hears nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.dialects.texts import string_in
from pdserve.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pdserve.http.dialect_bodies import ResponsesRequest

WEB_SEARCH: Final = "web_search"
"""Beginning of the names of the tool that is left out."""
_PARAM: Final = "tools"


class LocalName(NamedTuple):
    """Name of a function within a namespace."""

    namespace: str
    name: str


def full_name(namespace: str, name: str) -> str:
    """Return a function's name in a chat, as vLLM has it; the namespace may be empty."""
    return f"{namespace}__{name}" if namespace else name


def local_names(tools: Iterable[dict[str, Any]]) -> dict[str, LocalName]:
    """Return the functions in namespaces by their names in a chat.

    Raises:
        BadRequestError: See `tool_fields`.
    """
    return {
        full_name(namespace, function["name"]): LocalName(namespace, function["name"])
        for namespace, function in _functions(tools, _PARAM)
        if namespace
    }


def tool_fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a chat for tools.

    Raises:
        BadRequestError: One is not the client's own function.
    """
    if not body.tools and body.tool_choice in (None, "auto", "none"):
        return {}
    functions = [
        {**function, "name": full_name(namespace, function["name"])}
        for namespace, function in _functions(body.tools or (), _PARAM)
    ]
    fields: dict[str, Any] = {
        "tools": [{"type": "function", "function": function} for function in functions]
    }
    if body.parallel_tool_calls is not None:
        fields["parallel_tool_calls"] = body.parallel_tool_calls
    choice = body.tool_choice
    if isinstance(choice, dict):
        if choice.get("type") != "function":
            raise BadRequestError(
                f"tool_choice.type is {choice.get('type')!r}: it must be function",
                param="tool_choice",
            )
        name = _chosen(choice.get("name"), functions, local_names(body.tools or ()))
        choice = {"type": "function", "function": {"name": name}}
    return fields if choice is None else fields | {"tool_choice": choice}


def is_web_search(tool: dict[str, Any]) -> bool:
    """Whether a tool is the one that is left out."""
    return str(tool.get("type")).startswith(WEB_SEARCH)


def _functions(
    tools: Iterable[Any], where: str, namespace: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each function and its namespace, which is empty if it has none."""
    for index, tool in enumerate(tools):
        place = f"{where}[{index}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            string_in(tool, "name", place, _PARAM)
            yield namespace, {name: value for name, value in tool.items() if name != "type"}
        elif kind == "namespace" and not namespace:
            inner = tool.get("tools")
            if not isinstance(inner, list):
                raise BadRequestError(f"{place}.tools must be a list of tools", param=_PARAM)
            yield from _functions(inner, f"{place}.tools", string_in(tool, "name", place, _PARAM))
        elif kind is None or not is_web_search(tool):
            raise BadRequestError(
                f"{place}.type is {kind!r}: this server has no built-in tools; only functions can "
                "be called",
                param=_PARAM,
            )


def _chosen(
    name: object, functions: Sequence[dict[str, Any]], local: dict[str, LocalName]
) -> object:
    """Return the name in a chat of a tool that must be called.

    Its namespace may be left out, unless several have a function of that name.
    """
    if any(function["name"] == name for function in functions):
        return name
    meant = [full for full, each in local.items() if each.name == name]
    return meant[0] if len(meant) == 1 else name
