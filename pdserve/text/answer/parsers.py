"""The list of formats, under the names of vLLM's parsers, and the choice for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pdserve.text.answer.formats import ReasoningFormat
from pdserve.text.answer.gemma_calls import GEMMA
from pdserve.text.answer.harmony import HarmonyMachine
from pdserve.text.answer.json_calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    HERMES,
    KIMI,
    LLAMA_JSON,
    MISTRAL,
)
from pdserve.text.answer.pythonic_calls import PYTHONIC
from pdserve.text.answer.tagged_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    GLM,
    QWEN_XML,
)
from pdserve.text.answer.xtml import XtmlMachine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.text.answer.formats import CallFormat

TokenMachine = type[HarmonyMachine] | type[XtmlMachine]
TOKEN_MACHINES: Final[Mapping[str, TokenMachine]] = {
    "kimi_k3": XtmlMachine,
    "openai": HarmonyMachine,
    "openai_gptoss": HarmonyMachine,
}
"""Formats whose calls and reasoning are read together, only by tokens."""
_THINK = ReasoningFormat(pairs=(("<think>", "</think>"),))
_GEMMA = ReasoningFormat(pairs=(("<|channel>", "<channel|>"),), label="thought")
_MISTRAL = ReasoningFormat(pairs=(("[THINK]", "[/THINK]"), ("<think>", "</think>")))

TOOL_PARSERS: Final[Mapping[str, CallFormat]] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V41,
    "gemma4": GEMMA,
    "glm45": GLM,
    "glm47": GLM,
    "hermes": HERMES,
    "kimi_k2": KIMI,
    "llama3_json": LLAMA_JSON,
    "llama4_json": LLAMA_JSON,
    "llama4_pythonic": PYTHONIC,
    "mistral": MISTRAL,
    "pythonic": PYTHONIC,
    "qwen3_coder": QWEN_XML,
    "qwen3_xml": QWEN_XML,
}
REASONING_PARSERS: Final[Mapping[str, ReasoningFormat]] = {
    "deepseek_r1": _THINK,
    "deepseek_v3": _THINK,
    "deepseek_v4": _THINK,
    "deepseek_v41": _THINK,
    "gemma4": _GEMMA,
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": _THINK,
    "mistral": _MISTRAL,
    "qwen3": _THINK,
}

_TOOL_SIGNS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_begin|>",), "kimi_k2"),
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|tool_call>",), "gemma4"),
    (("<|channel|>", "<|message|>"), "openai"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "arguments"), "hermes"),
    (("<|start_header_id|>", '{"name": function name, "parameters"'), "llama3_json"),
)
"""Text in the chat template of a model that writes calls in a format."""
_REASONING_SIGNS: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("<|open|>", "<|sep|>"), "kimi_k3"),
    (("[THINK]",), "mistral"),
    (("<|channel>",), "gemma4"),
    (("<|channel|>", "<|message|>"), "openai_gptoss"),
    (("</think>",), "deepseek_r1"),
)


def tool_parser_of(template: str) -> str:
    """Return the name of the format that a chat template uses; empty if that is uncertain."""
    return _named_by(template, _TOOL_SIGNS)


def reasoning_parser_of(template: str) -> str:
    """Return the same for reasoning."""
    return _named_by(template, _REASONING_SIGNS)


def _named_by(template: str, signs: tuple[tuple[tuple[str, ...], str], ...]) -> str:
    found = (name for parts, name in signs if all(part in template for part in parts))
    return next(found, "")
