"""Tokens that are named beside `tokenizer.json`; what is expected is what transformers 5 makes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny import byte_level_json

if TYPE_CHECKING:
    from pathlib import Path

NEXT_ID = 1 + max(
    *json.loads(byte_level_json())["model"]["vocab"].values(),
    *(token["id"] for token in json.loads(byte_level_json())["added_tokens"]),
)
EXTRA = {"content": "<extra>", "special": True, "normalized": False, "__type": "AddedToken"}


def read(directory: Path, *, older: Any = None, by_name: Any = None, **config: Any) -> Tokenizer:
    (directory / "tokenizer.json").write_text(byte_level_json())
    if by_name is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(by_name))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if older is not None:
        (directory / "added_tokens.json").write_text(json.dumps(older))
    return Tokenizer.from_directory(directory)


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": {str(NEXT_ID): EXTRA}},
        {"additional_special_tokens": ["<extra>"]},
        {"extra_special_tokens": {"image": EXTRA}},
        {"pad_token": "<extra>"},
        {"image_token": "<extra>"},
        {"older": {"<extra>": NEXT_ID}, "pad_token": "<extra>"},
    ],
    ids=str,
)
def test_a_token_that_tokenizer_json_lacks_is_the_next_and_is_not_split(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    tokenizer = read(tmp_path, **fields)
    ids = tokenizer.encode("a<extra>", add_special_tokens=False)
    assert ids == [*tokenizer.encode("a", add_special_tokens=False), NEXT_ID]
    assert tokenizer.special_ids >= {NEXT_ID}


def test_a_special_token_of_the_vocabulary_keeps_its_id_and_has_no_text(tmp_path: Path) -> None:
    plain = read(tmp_path)
    token_id = plain.encode("dog", add_special_tokens=False)[0]
    said = plain.token(token_id)
    tokenizer = read(tmp_path, eos_token=said)
    assert tokenizer.eos_token_id == token_id
    assert tokenizer.decode([token_id]) == ""


@pytest.mark.parametrize("is_replaced", [False, True])
def test_the_older_files_have_the_last_word_unless_one_field_replaces_them(
    tmp_path: Path, is_replaced: bool
) -> None:
    config = {"eos_token": "<|endoftext|>", **({"added_tokens_decoder": {}} if is_replaced else {})}
    config["additional_special_tokens"] = []
    by_name = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<x>"]}
    tokenizer = read(tmp_path, older={"<late>": NEXT_ID}, by_name=by_name, **config)
    eos = "<|endoftext|>" if is_replaced else "<|im_end|>"
    assert tokenizer.special_tokens == {"eos_token": eos}
    assert ("<late>" in tokenizer.added_tokens.values()) is not is_replaced
    assert "<x>" not in tokenizer.added_tokens.values()


@pytest.mark.parametrize("has_decoder", [False, True])
@pytest.mark.parametrize("by", [{"eos_token": "<tool>"}, {"image_token": "<tool>"}])
def test_a_token_with_a_name_is_special_whatever_its_description_says(
    tmp_path: Path, by: dict[str, str], has_decoder: bool
) -> None:
    token = {**EXTRA, "content": "<tool>", "special": False, "lstrip": True}
    del token["__type"]
    described = json.loads(byte_level_json())
    described["added_tokens"].append(
        {"id": NEXT_ID, "rstrip": False, "single_word": False, **token}
    )
    decoder = {"added_tokens_decoder": {str(NEXT_ID): token}} if has_decoder else {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**by, **decoder}))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.encode("a <tool>", add_special_tokens=False)
    assert ids == [*tokenizer.encode("a", add_special_tokens=False), NEXT_ID]
    assert tokenizer.decode(ids) == "a"
    assert NEXT_ID in tokenizer.special_ids


def test_of_two_lists_of_special_tokens_the_newer_counts(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, extra_special_tokens=["<z>"], additional_special_tokens=["<x>"])
    assert tokenizer.added_tokens[NEXT_ID] == "<z>"
    assert "<x>" not in tokenizer.added_tokens.values()


def test_the_token_that_tokenizer_json_pads_with_is_added(tmp_path: Path) -> None:
    padding = {
        "strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "<pad>",
    }  # fmt: skip
    described = {**json.loads(byte_level_json()), "padding": padding}
    (tmp_path / "tokenizer.json").write_text(json.dumps(described))
    assert Tokenizer.from_directory(tmp_path).added_tokens[NEXT_ID] == "<pad>"


def test_templates_know_every_token_that_has_a_name(tmp_path: Path) -> None:
    tokenizer = read(
        tmp_path,
        sep_token="<s>",
        image_token={"content": "<image>"},
        extra_special_tokens={"video_token": "<video>"},
        add_bos_token=True,
    )
    assert tokenizer.special_tokens == {
        "sep_token": "<s>",
        "image_token": "<image>",
        "video_token": "<video>",
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"added_tokens_decoder": {str(NEXT_ID + 1): EXTRA}}, f"'<extra>' is {NEXT_ID + 1} by"),
        ({"older": {"<extra>": 3}}, "'<extra>' is 3 by"),
        ({"added_tokens_decoder": {"x": EXTRA}}, "not readable"),
        ({"added_tokens_decoder": {"1": "<extra>"}}, "not readable"),
        ({"split_special_tokens": True}, "split_special_tokens is True"),
    ],
    ids=str,
)
def test_tokens_that_cannot_be_added_as_said_are_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, **fields)
