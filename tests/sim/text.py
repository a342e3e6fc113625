"""The toy's text side: seven tokens, a letter each, of which two are around calls of a tool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers

from pdserve.text.answer.formats import CallFormat
from pdserve.text.answer.pieces import (
    CallArguments,
    CallBegins,
    CallEnds,
    CallPiece,
    Content,
    MalformedCallError,
    ToolCall,
    ToolUse,
)
from pdserve.text.answer.style import AnswerStyle
from pdserve.text.chat import ChatTemplate
from pdserve.text.generation import GenerationDefaults
from pdserve.text.load import Text
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.sampling import Grammar
from tests.toy_executor import TOY_EOS, TOY_VOCAB_SIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.server.sampling import Wanted
    from pdserve.text.answer.pieces import Tools

BOUND = Grammar(text="[aceg]*")
"""What the toy allows under any grammar."""

_LETTERS = "abcdefg"


def text_of(output: Sequence[int], *, ignore_eos: bool) -> str:
    """What a client sees of it: the end mark has no text unless it is a token like others."""
    return "".join(_LETTERS[each] for each in output if each != TOY_EOS or ignore_eos)


TOOL = "look"
_BEGIN = '{"at":"'


def _calls_in(opening: str, body: str, tools: Tools, *, is_last: bool) -> list[ToolCall]:
    if not body:
        raise MalformedCallError
    return [ToolCall(TOOL, _BEGIN + body + '"}')]


class _Follower:
    def __init__(self, opening: str, tools: Tools) -> None:
        self._has_begun = False

    def push(self, text: str) -> Sequence[CallPiece]:
        told: list[CallPiece] = [CallArguments(text)] if text else []
        if text and not self._has_begun:
            self._has_begun = True
            told = [CallBegins(TOOL), CallArguments(_BEGIN), *told]
        return told


CALLS = CallFormat(openings=("d",), closings=("f",), parse=_calls_in, follow=_Follower)


def answer_of(text: str, *, is_cut: bool) -> tuple[str, list[str], int]:
    """What a client of a chat with a tool sees of an output.

    Args:
        is_cut: Its limit has ended it.

    Returns:
        Content; the arguments of each call that was begun, as far as they come in a stream; and
        how many of the calls, from the first on, are whole.
    """
    machine = TEXT.answers.machine("", ToolUse({TOOL: {}}))
    assert machine is not None
    content, calls, num_whole = "", [], 0
    for piece in [*machine.push(text), *machine.finish(is_cut=is_cut)]:
        match piece:
            case Content(more):
                content += more
            case CallBegins():
                calls.append("")
            case CallArguments(more):
                calls[-1] += more
            case CallEnds(num_lost):
                num_whole = len(calls) - num_lost
    return content, calls, num_whole


def _make() -> Text:
    vocab = {letter: index for index, letter in enumerate(_LETTERS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.ByteLevel()
    return Text(
        tokenizer=Tokenizer(backend, {}),
        defaults=GenerationDefaults(eos_token_ids=(TOY_EOS,)),
        vocab_size=TOY_VOCAB_SIZE,
        chat_template=ChatTemplate("{{ messages[0].content }}", {}),
        answers=AnswerStyle(calls=CALLS),
    )


TEXT = _make()


class ToyChecks:
    """In place of `GrammarChecks`, whose threads know no virtual time."""

    async def grammar_of(
        self, wanted: Wanted, reading: object = None, *, is_checked: bool
    ) -> Grammar:
        return Grammar(text=wanted.value)

    def close(self) -> None:
        """Nothing is open."""
