from __future__ import annotations

import threading
import time

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny import CORPUS, byte_level_json, make_tokenizer


def byte_level(normalizer: object = None, pre_tokenizer: object = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    return backend


def composing() -> tokenizers.Tokenizer:
    """Its widest token is of characters that NFC makes of four each."""
    backend = byte_level(normalizers.NFC())
    backend.add_tokens([AddedToken(COMPOSED * 20, normalized=True)])
    return backend


DECOMPOSED, COMPOSED = "\u03b1\u0313\u0300\u0345", "\u1f82"
PLAIN = Tokenizer(byte_level(), {})
COMPOSING = Tokenizer(composing(), {})
WIDE = st.sampled_from(
    ["a", " ", "dog", " spaced out ", "<think>", "<s>", DECOMPOSED * 20, "\u00e9", "\U0001f642"]
)


@pytest.mark.parametrize("tokenizer", [PLAIN, COMPOSING], ids=["plain", "NFC"])
@given(pieces=st.lists(WIDE, max_size=40))
def test_no_token_stands_for_more_text_than_the_widest(tokenizer, pieces):
    text = "".join(pieces)
    assert tokenizer.max_chars_per_token is not None
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    assert num_tokens * tokenizer.max_chars_per_token >= len(text)


def test_a_vocabulary_of_byte_strings_has_a_widest_token():
    assert PLAIN.max_chars_per_token == len(" spaced out ")


@pytest.mark.parametrize("kind", ["byte_fallback", "metaspace", "word_piece"])
def test_where_tokens_may_be_unknown_no_width_is_promised(kind):
    assert make_tokenizer(kind).max_chars_per_token is None


def stripping() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<greedy>", rstrip=True)])
    return backend


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizer=normalizers.Strip()),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]
            )
        ),
        byte_level(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]
            )
        ),
        stripping(),
    ],
    ids=["normalizer", "split", "whitespace", "added token"],
)
def test_where_text_may_vanish_no_width_is_promised(backend):
    assert Tokenizer(backend, {}).max_chars_per_token is None


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "metaspace", "word_piece"])
def test_a_long_text_has_the_tokens_and_the_text_of_any_other(kind):
    tokenizer = make_tokenizer(kind)
    text = " ".join(CORPUS * 100)
    backend = tokenizer._backend
    assert tokenizer.encode(text) == (ids := backend.encode(text).ids)
    assert tokenizer.decode(ids) == backend.decode(ids)


def test_a_long_text_leaves_the_interpreter_to_others():
    text, begun, turns = "the dog " * 30_000, threading.Event(), 0

    def work() -> None:
        begun.set()
        PLAIN.decode(PLAIN.encode(text))

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        turns += 1
        time.sleep(0.001)
    assert turns > 8
