"""A text's tokens are those of the whole, whichever of its pieces are remembered."""

from __future__ import annotations

import functools
import json
import threading

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from pdserve.errors import BadRequestError
from pdserve.text import segments
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny import CORPUS, KINDS, byte_level_json

SPECIAL = "<s>", "</s>", "<|im_start|>", "<|im_end|>"


def awkward() -> str:
    """Tokens that hold or overlap others, begin with spaces, or are looked for in lower case."""
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    backend.add_special_tokens(
        [
            AddedToken("<s></s>"),
            AddedToken("s>a"),
            AddedToken("\n\n"),
            AddedToken(" d e"),
            AddedToken("loud", normalized=True),
        ]
    )
    return backend.to_str()


def spelled_apart(**scheme: object) -> str:
    described = json.loads(KINDS["metaspace"]())
    described["pre_tokenizer"] = json.loads(pre_tokenizers.Metaspace(**scheme).__getstate__())
    return json.dumps(described)


SOURCES = {
    **{kind: KINDS[kind]() for kind in KINDS},
    "awkward": awkward(),
    "first": spelled_apart(prepend_scheme="first"),
    "never": spelled_apart(prepend_scheme="never"),
}
TOKENIZERS = {
    kind: Tokenizer(tokenizers.Tokenizer.from_str(source), {}) for kind, source in SOURCES.items()
}
WHOLE = {kind: tokenizers.Tokenizer.from_str(source) for kind, source in SOURCES.items()}
LONG = " ".join(CORPUS * 2)
PARTS = st.sampled_from(
    [*SPECIAL, "<", ">", "LOUD", " a", "b ", "c\n\n", " ", "d e", "é", "e\u0301", LONG]
)


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The texts that a tokenizer of pieces had to tokenize."""
    texts: list[str] = []
    encode = Tokenizer._encode_whole

    def note(self: Tokenizer, text: str, **options: bool) -> list[int]:
        texts.append(text)
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "_encode_whole", note)
    return texts


def fresh(kind: str = "byte_level") -> Tokenizer:
    return Tokenizer(tokenizers.Tokenizer.from_str(SOURCES[kind]), {})


@pytest.mark.parametrize("kind", sorted(SOURCES))
@given(parts=st.lists(PARTS, max_size=12), adds=st.booleans())
def test_tokens_are_those_of_the_whole(kind, parts, adds):
    text = LONG + "".join(parts)
    expected = WHOLE[kind].encode(text, add_special_tokens=adds).ids
    assert TOKENIZERS[kind].encode(text, add_special_tokens=adds) == expected


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "word_piece", "awkward", "never"])
def test_a_turn_costs_what_it_adds(kind, asked):
    tokenizer = fresh(kind)
    turn = f"<|im_start|>{LONG}<|im_end|>"
    tokenizer.encode(turn, add_special_tokens=False)
    asked.clear()
    tokenizer.encode(f"{turn}<|im_start|>{LONG}<|im_end|>and so", add_special_tokens=False)
    assert asked == ["and so"]


def test_where_a_piece_is_spelled_by_what_is_before_it_no_text_is_cut(asked):
    asked.clear()
    text = f"{LONG}<s>{LONG}"
    fresh("first").encode(text, add_special_tokens=False)
    assert asked[-1] == text


@pytest.mark.parametrize("how", ["single_word", "lstrip", "rstrip"])
def test_where_a_token_depends_on_what_is_beside_it_no_text_is_cut(how):
    backend = tokenizers.Tokenizer.from_str(byte_level_json())
    backend.add_special_tokens([AddedToken("word", **{how: True}), AddedToken("ends")])
    text = f"{LONG} endsword <s> word <s>"
    tokenizer = Tokenizer(backend, {})
    assert tokenizer.encode(text, add_special_tokens=False) == backend.encode(text).ids


def test_pieces_are_remembered_within_bounds_the_latest_used_last(monkeypatch, asked):
    monkeypatch.setattr(segments, "_KEPT_CHARS", 4 * 300)
    tokenizer = fresh()
    first, *others = (f"{number:0300d}" for number in range(5))
    for piece in (first, *others[:3], first, others[3]):
        tokenizer.encode(f"<s>{piece}", add_special_tokens=False)
    asked.clear()
    for piece in (first, others[0]):
        tokenizer.encode(f"<s>{piece}", add_special_tokens=False)
    assert asked == [others[0]]


def test_a_piece_longer_than_all_that_is_remembered_does_not_drive_it_out(monkeypatch, asked):
    monkeypatch.setattr(segments, "_KEPT_CHARS", 600)
    tokenizer = fresh()
    tokenizer.encode("x" * 300, add_special_tokens=False)
    tokenizer.encode("y" * 700, add_special_tokens=False)
    asked.clear()
    tokenizer.encode("x" * 300, add_special_tokens=False)
    assert asked == []


def test_a_lone_surrogate_is_refused_in_a_piece_as_in_a_whole():
    for text in ("\ud800" * 300, f"{LONG}<s>\ud800"):
        with pytest.raises(BadRequestError, match="surrogate"):
            fresh().encode(text, add_special_tokens=False)


def test_threads_that_share_a_tokenizer_find_the_same_tokens(monkeypatch):
    monkeypatch.setattr(segments, "_KEPT_CHARS", 1000)
    tokenizer, found = fresh(), []
    texts = [f"<s>{number:0300d}</s>{number:0400d}" for number in range(8)]
    encode = functools.partial(tokenizer.encode, add_special_tokens=False)
    expected = {text: encode(text) for text in texts}

    def work() -> None:
        for _ in range(50):
            found.extend((text, encode(text)) for text in texts)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 * 50 * len(texts)
    assert all(ids == expected[text] for text, ids in found)
