"""Tokens that a directory names beside its `tokenizer.json`, added to it as transformers does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tokenizers

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

_FIRST = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
_BY_NAME = ("model_specific_special_tokens", "extra_special_tokens")
_NAMELESS = ("extra_special_tokens", "additional_special_tokens")
"""Lists of further special tokens; the first that is there counts."""


def token_content(value: object) -> str | None:
    """`tokenizer_config.json` writes a special token as a string or as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def add_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], older: Mapping[str, int]
) -> None:
    """Add the tokens that `tokenizer.json` lacks, or describes otherwise.

    A token that is in the vocabulary keeps its id; the others take the ids after the last. One that
    has a name is special, whatever its description says.

    Args:
        config: The parsed `tokenizer_config.json`.
        older: The parsed `added_tokens.json`, ids by text.

    Raises:
        ConfigError: A token is not described as one, or gets another id than is said; or special
            tokens are to be split.
    """
    if config.get("split_special_tokens"):
        raise ConfigError("tokenizer_config.json: split_special_tokens is True: not supported")
    known = backend.get_added_tokens_decoder()
    described = {repr(token) for token in known.values()}
    names, special = {token.content for token in known.values()}, _special_tokens(config)
    try:
        if "added_tokens_decoder" in config:
            decoder = config["added_tokens_decoder"] or {}
            said = {int(token_id): _token(fields) for token_id, fields in decoder.items()}
        else:
            said = known | {
                token_id: special.get(content) or tokenizers.AddedToken(content)
                for content, token_id in older.items()
                if content not in names
            }
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the added tokens of the tokenizer are not readable: {error}") from None
    by_name = set(map(token_content, named_tokens(config).values()))
    for token in said.values():
        token.special = token.special or token.content in by_name
    adding = [token for _, token in sorted(said.items()) if repr(token) not in described]
    names |= {token.content for token in adding}
    backend.add_tokens(adding + [each for name, each in special.items() if name not in names])
    for token_id, token in said.items():
        if backend.token_to_id(token.content) != token_id:
            raise ConfigError(
                f"the added token {token.content!r} is {token_id} by tokenizer_config.json or "
                f"added_tokens.json, and {backend.token_to_id(token.content)} by tokenizer.json"
            )


def named_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """The special tokens that templates know by name, as `config` describes them."""
    found = {name: config.get(name) for name in _FIRST}
    found |= {name: value for name, value in config.items() if name.endswith("_token")}
    for name in _BY_NAME:
        if isinstance(more := config.get(name), dict):
            found |= more
    return {name: value for name, value in found.items() if token_content(value) is not None}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """All special tokens of `config`, by their texts."""
    values = [*named_tokens(config).values()]
    lists = (more for name in _NAMELESS if isinstance(more := config.get(name), list))
    values += next(lists, [])
    return {
        content: _token(
            {"normalized": False, **(value if isinstance(value, dict) else {})}, content
        )
        for value in values
        if (content := token_content(value)) is not None
    }


def _token(fields: dict[str, Any], special: str | None = None) -> tokenizers.AddedToken:
    """A token as it is described, or a special one of this text."""
    options = {name: value for name, value in fields.items() if name != "__type"}
    if special is not None:
        options |= {"content": special, "special": True}
    return tokenizers.AddedToken(**options)
