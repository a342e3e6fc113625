"""Recorded outputs of models (canitoolcall), as the tokens that a machine here would read.

The models' tokenizers are not at hand. What matters of them is which markers were tokens of their
own in an output: its token ids say that, and all other text may be cut anywhere.
"""

from __future__ import annotations

import random
import re
from functools import cache
from typing import TYPE_CHECKING

from canitoolcall.fixtures import load_fixtures
from canitoolcall.pytest_plugin import family_for
from canitoolcall.results import ParsedToolCall, ParseResult

from pdserve.text.answer.machine import AnswerMachine
from pdserve.text.answer.parsers import REASONING_PARSERS, TOKEN_MACHINES, TOOL_PARSERS
from pdserve.text.answer.pieces import Content, Reasoning, ToolUse
from tests.text.answer.told import whole_calls

if TYPE_CHECKING:
    from canitoolcall.fixtures import Fixture

    from pdserve.text.answer.formats import AnswerReader
    from pdserve.text.answer.pieces import Piece

PARSERS = {
    "qwen3-hybrid": ("hermes", "qwen3"),
    "qwen3-thinking-2507": ("hermes", "qwen3"),
    "qwen3-instruct-2507": ("hermes", "qwen3"),
    "llama3-json": ("llama3_json", None),
    "llama4-pythonic": ("llama4_pythonic", None),
    "deepseek-v3": ("deepseek_v3", "deepseek_v3"),
    "deepseek-v31": ("deepseek_v31", "deepseek_v3"),
    "deepseek-v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek-v4": ("deepseek_v4", "deepseek_v4"),
    "deepseek-v41": ("deepseek_v41", "deepseek_v41"),
    "glm45-newline": ("glm45", "glm45"),
    "glm47-compact": ("glm47", "glm47"),
    "glm53-compact": ("glm47", "glm47"),
    "kimi-k2-thinking": ("kimi_k2", "kimi_k2"),
    "kimi-k2-instruct": ("kimi_k2", "kimi_k2"),
    "kimi-k3-xtml": ("kimi_k3", None),
    "gemma4": ("gemma4", "gemma4"),
}
"""vLLM's names of the parsers for each variant; all of Mistral's and of Qwen3-Coder's have one."""
FAMILIES = (
    *("qwen3-hermes", "llama", "mistral", "deepseek", "qwen3-xml"),
    *("glm", "kimi", "gemma4", "gpt-oss"),
)
NOT_TOKENS = ("<｜DSML｜", "</｜DSML｜", '"/>', "<function=")
"""Beginnings of markers that are no token of any tokenizer."""
TEXT_MARKERS = {
    "mistral/v13think-marker-in-arguments": (0, 2, 3),
    "mistral/vllm-v11-think-text": (),
    "gpt-oss/harmony-marker-in-arguments": range(7),
    "kimi/k3-control-marker-text-in-value": (*range(16), *range(18, 26)),
    "gpt-oss/harmony-marker-in-reasoning": (0, 1, 4, 5, 6, 7, 8),
}
"""Of outputs where some markers are ordinary text, which are tokens, counted from 0."""


@cache
def fixtures() -> tuple[Fixture, ...]:
    """The outputs of the families that are served."""
    return tuple(load_fixtures(None, families=list(FAMILIES), tags=None))


def parsers_of(fixture: Fixture) -> tuple[str, str | None]:
    """Return the names of a fixture's parsers for calls and reasoning."""
    if fixture.family == "gpt-oss":
        return "openai", None
    if fixture.family == "mistral":
        return "mistral", "mistral"
    if fixture.family == "qwen3-xml":
        return "qwen3_coder", "qwen3"
    return PARSERS[_reference(fixture).variant]


def _reference(fixture: Fixture):
    models = family_for(fixture).reference_models
    return next(model for model in models if model.repo == fixture.models[0])


def make_machine(fixture: Fixture) -> AnswerReader:
    """Return a machine at the beginning of a fixture's output."""
    offered = [tool["function"] for tool in fixture.tools]
    use = ToolUse({tool["name"]: tool.get("parameters", {}) for tool in offered})
    vocabulary = dict(enumerate(markers_of(fixture)))
    tool_parser, reasoning_parser = parsers_of(fixture)
    prompt = fixture.generation_prompt
    if prompt is None:
        prompt = _reference(fixture).default_generation_prompt or ""
    if tool_parser in TOKEN_MACHINES:
        use = ToolUse(use.tools or {"any": {}})
        return TOKEN_MACHINES[tool_parser](prompt, vocabulary=vocabulary, use=use)
    calls = TOOL_PARSERS[tool_parser]
    reasoning = REASONING_PARSERS[reasoning_parser] if reasoning_parser else None
    return AnswerMachine(
        calls=calls,
        reasoning=reasoning,
        use=use,
        vocabulary=vocabulary,
        in_reasoning=reasoning is not None and reasoning.is_open_after(prompt),
    )


def markers_of(fixture: Fixture) -> list[str]:
    """Return the markers that are tokens of a fixture's tokenizer."""
    tool_parser, reasoning_parser = parsers_of(fixture)
    if tool_parser in TOKEN_MACHINES:
        return list(TOKEN_MACHINES[tool_parser].markers)
    markers = list(TOOL_PARSERS[tool_parser].markers)
    if reasoning_parser:
        markers += REASONING_PARSERS[reasoning_parser].markers
    if fixture.id == "mistral/vllm-v11-think-text":
        markers = [marker for marker in markers if "think" not in marker]
    return [marker for marker in markers if not marker.startswith(NOT_TOKENS)]


def units_of(fixture: Fixture) -> list[tuple[str, bool]]:
    """Return an output as texts, and whether each is a marker's token."""
    markers = markers_of(fixture)
    parts = re.split("(" + "|".join(map(re.escape, markers)) + ")", fixture.raw_output)
    tokens = TEXT_MARKERS.get(fixture.id)
    units = []
    for position, part in enumerate(parts):
        is_token = position % 2 == 1 and (tokens is None or position // 2 in tokens)
        units.append((part, is_token))
    return [unit for unit in units if unit[0]]


def cut(units: list[tuple[str, bool]], seed: int, longest: int) -> list[tuple[str, bool]]:
    """Cut the texts, but no marker's token, into pieces of up to `longest` characters."""
    drawn = random.Random(seed)
    pieces = []
    for text, is_token in units:
        rest = text
        while rest and not is_token:
            length = drawn.randint(1, longest)
            pieces.append((rest[:length], False))
            rest = rest[length:]
        if is_token:
            pieces.append((text, True))
    return pieces


def parsed(fixture: Fixture, units: list[tuple[str, bool]]) -> ParseResult:
    """Return what a machine makes of an output."""
    machine = make_machine(fixture)
    pieces = [piece for text, is_token in units for piece in machine.push(text, is_marker=is_token)]
    return result_of(pieces + machine.finish(is_cut=fixture.truncated))


def result_of(pieces: list[Piece]) -> ParseResult:
    """Return pieces as the suite compares them."""
    return ParseResult(
        content="".join(piece.text for piece in pieces if isinstance(piece, Content)) or None,
        reasoning_content="".join(p.text for p in pieces if isinstance(p, Reasoning)) or None,
        tool_calls=[
            ParsedToolCall(name=piece.name, arguments_raw=piece.arguments)
            for piece in whole_calls(pieces)
        ],
    )
