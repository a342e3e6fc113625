"""Checks the tools that a chat request offers, and returns them as the answer's parser needs them.

A tool of the type `custom` takes a text in place of arguments. To models it is a function with one
argument, which is that text. Knows no model's format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.errors import BadRequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
INPUT: Final = "input"
"""The argument of a custom tool, for models."""
CALLED_AS: Final = "called_as"
"""Field of a custom tool whose calls the answer is to have as those of a function: its value then.
For who reads the arguments itself, such as a dialect: it sees whether they are whole."""
_FUNCTION: Final = "function"


class ToolInput(NamedTuple):
    """What a custom tool takes.

    Attributes:
        pattern: A regular expression for the whole text; empty if there is none.
        lark: A grammar for it; empty if there is none.
        is_told: Whether calls of it are told as a text.
    """

    pattern: str
    lark: str
    is_told: bool

    @property
    def is_bound(self) -> bool:
        """Whether it must have a form."""
        return bool(self.pattern or self.lark)

    @property
    def description(self) -> str:
        """What a model is told of it."""
        if self.lark:
            return f"Text that follows this grammar (Lark):\n{self.lark}"
        return f"Text that matches the regular expression {self.pattern}" if self.pattern else ""


class ToolChoice(NamedTuple):
    """Which tools an answer may call.

    Attributes:
        is_required: Whether it must call one.
        name: The one that it must call, if there is one; once.
        allowed: Names of those that it may call; None for all.
    """

    is_required: bool = False
    name: str | None = None
    allowed: frozenset[str] | None = None


def tools_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Return the JSON Schema of each tool's parameters, by the tool's name.

    Raises:
        BadRequestError: One is not a tool with a name and a schema or format, or there are too
            many.
    """
    if len(tools) > MAX_TOOLS:
        raise _refused("tools", f"has {len(tools)} tools, and at most {MAX_TOOLS} are accepted")
    found: dict[str, Mapping[str, Any]] = {}
    for index, tool in enumerate(tools):
        kind = tool.get("type", _FUNCTION)
        if kind not in (_FUNCTION, "custom"):
            raise _refused(f"tools[{index}].type", f"is {kind!r}: it must be function or custom")
        where, said = f"tools[{index}].{kind}", tool.get(kind)
        if not isinstance(said, dict):
            raise _refused(where, "must be an object with a name")
        name = said.get("name")
        if not isinstance(name, str) or not 0 < len(name.strip()) <= MAX_NAME_CHARS:
            raise _refused(f"{where}.name", f"must be a string of 1 to {MAX_NAME_CHARS} characters")
        if name in found:
            raise _refused(f"{where}.name", f"is {name!r}, the name of another tool: rename one")
        if kind == "custom":
            found[name] = _schema_of(_input_of(tool, f"{where}.format"))
            continue
        parameters = said.get("parameters")
        if not isinstance(parameters, dict | None):
            raise _refused(f"{where}.parameters", "must be a JSON schema, which is an object")
        found[name] = parameters or {}
    return found


def inputs_by_name(tools: Sequence[Mapping[str, Any]]) -> dict[str, ToolInput]:
    """Return what the custom tools among some take, which `tools_by_name` has accepted."""
    return {
        tool["custom"]["name"]: _input_of(tool, "tools")
        for tool in tools
        if tool.get("type") == "custom"
    }


def as_functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return tools as models know them, which `tools_by_name` has accepted."""
    return [_as_function(tool) if tool.get("type") == "custom" else tool for tool in tools]


def _as_function(tool: Mapping[str, Any]) -> dict[str, Any]:
    taken, custom = _input_of(tool, "tools"), tool["custom"]
    argument = {"type": "string", "description": taken.description}
    function = {name: custom[name] for name in ("name", "description") if custom.get(name)}
    function["parameters"] = {
        "type": "object",
        "properties": {INPUT: {name: value for name, value in argument.items() if value}},
        "required": [INPUT],
    }
    return {"type": _FUNCTION, _FUNCTION: function}


def _schema_of(taken: ToolInput) -> dict[str, Any]:
    text = {"type": "string", "pattern": f"^(?:{taken.pattern})$"}
    if not taken.pattern:
        del text["pattern"]
    return {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }


def _input_of(tool: Mapping[str, Any], where: str) -> ToolInput:
    """Return what a custom tool takes.

    Raises:
        BadRequestError: Its format is none.
    """
    is_told = tool.get(CALLED_AS) != _FUNCTION
    match tool["custom"].get("format"):
        case None | {"type": "text"}:
            return ToolInput("", "", is_told)
        case {"type": "grammar", "grammar": {"syntax": "regex", "definition": str(pattern)}}:
            return ToolInput(pattern, "", is_told)
        case {"type": "grammar", "grammar": {"syntax": "lark", "definition": str(lark)}}:
            return ToolInput("", lark, is_told)
    raise _refused(
        where,
        'must be {"type": "text"} or {"type": "grammar", "grammar": {"syntax": "lark" or "regex", '
        '"definition": ...}}',
    )


def strict_tools(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the names of tools whose calls must follow their schemas or formats."""
    bound = {name for name, taken in inputs_by_name(tools).items() if taken.is_bound}
    functions = (tool[_FUNCTION] for tool in tools if tool.get("type") != "custom")
    return bound | {each["name"] for each in functions if each.get("strict") is True}


def chosen_tools(tool_choice: str | Mapping[str, Any] | None) -> ToolChoice:
    """Return what a request's `tool_choice` says.

    Raises:
        BadRequestError: The choice is not valid.
    """
    match tool_choice:
        case None | "none" | "auto":
            return ToolChoice()
        case "required":
            return ToolChoice(is_required=True)
        case {"type": "allowed_tools", "allowed_tools": {"mode": str(mode), "tools": list(tools)}}:
            names = frozenset(filter(None, map(_named, tools)))
            if mode in ("auto", "required") and len(names) > 0 and all(map(_named, tools)):
                return ToolChoice(mode == "required", allowed=names)
        case {"type": "function" | "custom"} if (name := _named(tool_choice)) is not None:
            return ToolChoice(is_required=True, name=name)
    raise _refused(
        "tool_choice",
        'must be none, auto, required, {"type": "function", "function": {"name": ...}} (or custom, '
        'twice), or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", '
        '"tools": [...]}} with at least one of those',
    )


def _named(tool: object) -> str | None:
    """Return the name in a reference to a tool; None if it is none."""
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": "custom", "custom": {"name": str(name)}}:
            return name
    return None


def _refused(where: str, why: str) -> BadRequestError:
    return BadRequestError(f"{where} {why}", param=where.partition("[")[0].partition(".")[0])
