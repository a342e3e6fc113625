"""Checks the tools that a chat request offers, and returns them as the answer's parser needs them.

Knows no model's format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdserve.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256


def tools_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON Schema of each tool's parameters, by the tool's name.

    Raises:
        BadRequestError: One is not a function with a name and a schema, or there are too many.
    """
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"has {len(tools)} tools, and at most {MAX_TOOLS} are accepted")
    found: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        where = f"tools[{index}]"
        if tool.get("type", "function") != "function":
            raise _refused(f"{where}.type", f"is {tool['type']!r}: it must be function")
        function = tool.get("function")
        if not isinstance(function, dict):
            raise _refused(f"{where}.function", "must be an object with a name and parameters")
        name = function.get("name")
        if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
            raise _refused(
                f"{where}.function.name",
                f"must be a string of 1 to {MAX_NAME_CHARS} characters",
            )
        if name in found:
            raise _refused(
                f"{where}.function.name", f"is {name!r}, the name of another tool: rename one"
            )
        parameters = function.get("parameters")
        if not isinstance(parameters, dict | None):
            raise _refused(
                f"{where}.function.parameters", "must be a JSON schema, which is an object"
            )
        found[name] = parameters or {}
    return found


def strict_tools(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of tools whose calls must follow their schemas."""
    return {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}


def named_tool(tool_choice: str | Mapping[str, Any] | None) -> str | None:
    """Return the tool that must be called, if a request names one.

    Raises:
        BadRequestError: The choice is not valid.
    """
    match tool_choice:
        case None | "none" | "auto" | "required":
            return None
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise _refused(
        "tool_choice",
        'must be none, auto, required or {"type": "function", "function": {"name": ...}}',
    )


def _refused(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where} {why}", param=where.partition("[")[0].partition(".")[0])
