"""The toy's text side: seven tokens, a letter each."""

from __future__ import annotations

import tokenizers
from tokenizers import decoders, models

from pdserve.text.generation import GenerationDefaults
from pdserve.text.load import Text
from pdserve.text.tokenizer import Tokenizer
from tests.sim.toy import EOS, VOCAB


def _make() -> Text:
    vocab = {letter: index for index, letter in enumerate("abcdefg"[:VOCAB])}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="a"))
    backend.decoder = decoders.ByteLevel()
    return Text(
        tokenizer=Tokenizer(backend, {}),
        defaults=GenerationDefaults(eos_token_ids=(EOS,)),
        vocab_size=VOCAB,
    )


TEXT = _make()
