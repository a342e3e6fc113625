"""The toy's text side: seven tokens, a letter each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import tokenizers
from tokenizers import decoders, models

from pdserve.executor.toy import TOY_EOS, TOY_VOCAB_SIZE
from pdserve.text.generation import GenerationDefaults
from pdserve.text.load import Text
from pdserve.text.tokenizer import Tokenizer
from pdserve.wire.sampling import Grammar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.protocol import SamplingFields

BOUND = Grammar(text="[aceg]*")
"""What the toy allows under any grammar."""

_LETTERS = "abcdefg"


def text_of(output: Sequence[int], *, ignore_eos: bool) -> str:
    """What a client sees of it: the end mark has no text unless it is a token like others."""
    return "".join(_LETTERS[each] for each in output if each != TOY_EOS or ignore_eos)


def _make() -> Text:
    vocab = {letter: index for index, letter in enumerate(_LETTERS)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return Text(
        tokenizer=Tokenizer(backend, {}),
        defaults=GenerationDefaults(eos_token_ids=(TOY_EOS,)),
        vocab_size=TOY_VOCAB_SIZE,
    )


TEXT = _make()


class ToyChecks:
    """In place of `GrammarChecks`, whose threads know no virtual time."""

    async def grammar_of(
        self, fields: SamplingFields, reading: object = None, *, is_checked: bool
    ) -> Grammar | None:
        return None if fields.guided_regex is None else Grammar(text=fields.guided_regex)

    def close(self) -> None:
        """Nothing is open."""
