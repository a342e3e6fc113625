"""The formats one model uses, and which of their markers are single tokens."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from pdserve.errors import BadRequestError, ConfigError
from pdserve.text.answer.harmony import HarmonyMachine, harmony_before, harmony_grammar
from pdserve.text.answer.inputs import InputTelling
from pdserve.text.answer.json_calls import JSON_LIST, MISTRAL, MISTRAL_V3
from pdserve.text.answer.machine import AnswerMachine
from pdserve.text.answer.parsers import (
    REASONING_PARSERS,
    TOKEN_MACHINES,
    TOOL_PARSERS,
    reasoning_parser_of,
    tool_parser_of,
)
from pdserve.text.answer.writing import GrammarWriter, calls_grammar
from pdserve.text.answer.xtml import XtmlMachine, xtml_before, xtml_grammar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from pdserve.config.schema import ModelConfig
    from pdserve.text.answer.formats import AnswerReader, CallFormat, ReasoningFormat
    from pdserve.text.answer.parsers import TokenMachine
    from pdserve.text.answer.pieces import ToolUse
    from pdserve.text.tokenizer import Tokenizer

_AUTO, _NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """See the module.

    Attributes:
        calls: None if calls are not parsed by markers.
        reasoning: None if reasoning is not parsed by markers.
        token_machine: Reads both, if they are not read by markers.
        vocabulary: Markers and parts of markers that are single tokens, by their ids.
        tokens: Ids of all tokens that are never split, by their texts.
        may_choose: Whether the model may choose tools by itself.
    """

    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    token_machine: TokenMachine | None = None
    vocabulary: Mapping[int, str] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    may_choose: bool = True

    @property
    def reads_calls(self) -> bool:
        """Whether the format of calls is known."""
        return self.token_machine is not None or self.calls is not None

    @property
    def forcing(self) -> AnswerStyle:
        """The style of answers that must call a tool: plain JSON if there is no other way."""
        has_grammar = self.calls is not None and self.calls.writing is not None
        if self.token_machine is not None or has_grammar:
            return self
        return replace(self, calls=JSON_LIST)

    def thought_end(self, prompt: str) -> tuple[int, ...] | None:
        """Return the token that ends the reasoning begun in `prompt`, if there is one."""
        if self.reasoning is None or not self.reasoning.is_open_after(prompt):
            return None
        token_id = self.tokens.get(self.reasoning.pairs[0][1])
        return None if token_id is None else (token_id,)

    def thought_before(self, prompt: str) -> str | None:
        """Return the grammar of `@answer` after the reasoning of an answer.

        None if `prompt` has ended it, if the token of `thought_end` does, or if no token begins it.
        """
        if self.token_machine is XtmlMachine:
            return xtml_before(prompt, self.tokens)
        if self.token_machine is HarmonyMachine:
            return harmony_before(prompt, self.tokens)
        reasoning = self.reasoning
        if reasoning is None or reasoning.is_closed_after(prompt) or self.thought_end(prompt):
            return None
        is_open = reasoning.is_open_after(prompt)
        if not is_open and not self.tokens.keys() >= set(reasoning.pairs[0]):
            return None
        writer = GrammarWriter(self.tokens)
        return f"start: {writer.thought(reasoning, is_open=is_open)} @answer\n{writer.text()}"

    def grammar(self, prompt: str, use: ToolUse) -> str:
        """Return the grammar of an answer to `prompt` that calls tools as their schemas say.

        Raises:
            BadRequestError: There is no such grammar.
        """
        try:
            if self.token_machine is HarmonyMachine:
                return harmony_grammar(self.tokens, use)
            if self.token_machine is XtmlMachine:
                return xtml_grammar(prompt, self.tokens, use)
            if self.calls is None:
                raise ValueError("the format of this model's calls does not allow constraints")
            return calls_grammar(self.calls, self.reasoning, self.tokens, use, prompt=prompt)
        except ValueError as error:
            raise BadRequestError(f"tools: {error}", param="tools") from error
        except RecursionError as error:
            raise BadRequestError("tools: a schema is nested too deeply", param="tools") from error

    def machine(self, prompt: str, use: ToolUse) -> AnswerReader | None:
        """Return the machine that splits an answer to `prompt`; None if all of it is content."""
        machine = self._machine(prompt, use)
        return InputTelling(machine, use.told) if machine is not None and use.told else machine

    def _machine(self, prompt: str, use: ToolUse) -> AnswerReader | None:
        if self.token_machine is not None:
            return self.token_machine(prompt, vocabulary=self.vocabulary, use=use)
        calls = self.calls if use.tools else None
        if calls is None and self.reasoning is None:
            return None
        return AnswerMachine(
            calls=calls,
            reasoning=self.reasoning,
            use=use,
            vocabulary=self.vocabulary,
            in_reasoning=self.reasoning is not None and self.reasoning.is_open_after(prompt),
        )


def style_of(model: ModelConfig, tokenizer: Tokenizer, template: str) -> AnswerStyle:
    """Return a model's style: the one named by settings, or else by its chat template.

    Raises:
        ConfigError: A setting names an unknown parser, or one whose markers the tokenizer lacks.
    """
    call_parser = _name(
        "tool-call-parser", model.tool_call_parser, tool_parser_of(template), TOOL_PARSERS
    )
    reasoning_parser = _name(
        "reasoning-parser",
        model.reasoning_parser,
        reasoning_parser_of(template),
        REASONING_PARSERS,
    )
    added = frozenset(tokenizer.added_tokens.values())
    token_machine = TOKEN_MACHINES.get(call_parser) or TOKEN_MACHINES.get(reasoning_parser)
    if token_machine is not None and not added.issuperset(token_machine.markers):
        if {model.tool_call_parser, model.reasoning_parser} - {_AUTO}:
            lacking = ", ".join(sorted(set(token_machine.markers) - added))
            raise ConfigError(
                f"the parser {call_parser} needs tokens that this tokenizer lacks ({lacking}): "
                "name the model's own format with --tool-call-parser, or use none",
                param="tool-call-parser",
            )
        token_machine = None
    calls = TOOL_PARSERS.get(call_parser)
    if calls is MISTRAL and "[ARGS]" not in added:
        calls = MISTRAL_V3
    reasoning = REASONING_PARSERS.get(reasoning_parser)
    markers = {
        *(token_machine.markers if token_machine is not None else ()),
        *(calls.markers if calls is not None else ()),
        *(calls.fragments if calls is not None else ()),
        *(reasoning.markers if reasoning is not None else ()),
    }
    vocabulary = {
        token_id: text for token_id, text in tokenizer.added_tokens.items() if text in markers
    }
    return AnswerStyle(
        calls=calls,
        reasoning=reasoning,
        token_machine=token_machine,
        vocabulary=vocabulary,
        tokens={text: token_id for token_id, text in tokenizer.added_tokens.items()},
        may_choose=model.enable_auto_tool_choice,
    )


def _name(flag: str, name: str, found: str, parsers: Collection[str]) -> str:
    """Return a parser's name; for auto, the name that was found.

    Raises:
        ConfigError: There is no parser of that name.
    """
    if name == _AUTO:
        return found
    if name != _NONE and name not in parsers and name not in TOKEN_MACHINES:
        known = ", ".join(sorted({*parsers, *TOKEN_MACHINES}))
        raise ConfigError(
            f"--{flag} is {name!r}: use {_AUTO}, {_NONE} or one of {known}", param=flag
        )
    return name
