from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.detokenizer import make_detokenizer
from tests.text.tiny import KINDS, make_tokenizer

TOKENIZERS = {kind: make_tokenizer(kind) for kind in KINDS}


def pieces(kind: str, token_ids: list[int], *, skip: bool = True) -> list[str]:
    detokenizer = make_detokenizer(TOKENIZERS[kind], skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(data=st.data())
def test_the_pieces_joined_are_the_decoded_whole(kind: str, skip: bool, data: st.DataObject):
    tokenizer = TOKENIZERS[kind]
    # Ids past the vocabulary occur with models whose embedding is padded.
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip)
    assert "".join(pieces(kind, token_ids, skip=skip)) == whole


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.text(alphabet="ab 你好é🙂\n#▁", max_size=30))
def test_encoded_text_streams_to_what_it_decodes_to(kind: str, text: str):
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text)
    assert "".join(pieces(kind, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
@given(prompt=st.text(alphabet="ab dog", max_size=9), data=st.data())
def test_text_after_a_prompt_is_what_it_adds_to_the_decoded_prompt(
    kind: str, skip: bool, prompt: str, data: st.DataObject
):
    tokenizer = TOKENIZERS[kind]
    before = tokenizer.encode(prompt)
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=9))
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip, prompt=before)
    after = "".join([*map(detokenizer.push, token_ids), detokenizer.flush()])
    whole = tokenizer.decode(before + token_ids, skip_special_tokens=skip)
    assert whole == tokenizer.decode(before, skip_special_tokens=skip) + after


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@given(data=st.data())
def test_bytes_that_are_not_utf8_stream_to_what_they_decode_to(kind: str, data: st.DataObject):
    tokenizer = TOKENIZERS[kind]
    single = [i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1]
    token_ids = data.draw(st.lists(st.sampled_from(single), max_size=20))
    assert "".join(pieces(kind, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_an_incomplete_character_is_never_shown(kind: str):
    token_ids = TOKENIZERS[kind].encode("🙂🙃 ok", add_special_tokens=False)
    shown = pieces(kind, token_ids)
    assert len(token_ids) > 8
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)
    assert "".join(shown) == "🙂🙃 ok"


def test_a_byte_level_character_is_shown_with_its_last_byte():
    token_ids = TOKENIZERS["byte_level"].encode("🙂🙃", add_special_tokens=False)
    assert pieces("byte_level", token_ids) == ["", "", "", "🙂", "", "", "", "🙃", ""]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_the_cost_of_a_token_does_not_grow_with_the_text(kind: str):
    # A continuation byte without a beginning is what keeps windowed detokenizers waiting.
    tokenizer = TOKENIZERS[kind]
    stray = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x80")
    detokenizer = make_detokenizer(tokenizer, skip_special_tokens=True)

    def seconds(count: int) -> float:
        start_s = time.perf_counter()
        for _ in range(count):
            detokenizer.push(stray)
        return time.perf_counter() - start_s

    seconds(1000)
    early_s = min(seconds(1000) for _ in range(3))
    seconds(30000)
    assert min(seconds(1000) for _ in range(3)) < 10 * early_s + 0.01
