"""A model's tokenizer, read from its Hugging Face directory.

Knows `tokenizer.json`, `tokenizer_config.json` and `special_tokens_map.json`, and how tokens map to
bytes. Does not know the meaning of chat templates, nor requests or streams.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import tokenizers

from pdserve.errors import BadRequestError, ConfigError
from pdserve.text.added_tokens import add_tokens, named_tokens, token_content
from pdserve.text.segments import MIN_CHARS, segmented

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_LFS_POINTER = b"version https://git-lfs"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\N{LOWER ONE EIGHTH BLOCK}"
_LONG_IDS = 1 << 12
_MAX_COMPOSED = 4
"""Maximum number of characters that NFC joins into one (Unicode 15; for example U+1F82)."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or an empty one if there is no such file.

    Raises:
        ConfigError: The file is a Git LFS pointer, or not a JSON object.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    if data.startswith(_LFS_POINTER):
        raise ConfigError(f"{path} is a Git LFS pointer, not the file: run `git lfs pull`")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_template(path: Path) -> str:
    """Return the Jinja source of a chat template.

    Raises:
        ConfigError: The file cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"the chat template {path} cannot be read: {why}; name one that can with "
            "--chat-template",
            param="chat-template",
        ) from error


class Tokenizer:
    """Text to token ids and back, as the model's authors defined it.

    Args:
        backend: The parsed `tokenizer.json`.
        config: The parsed `tokenizer_config.json`, with `special_tokens_map.json` merged over it.
        chat_template: The model's own Jinja source, if it has one.
        tool_template: Another template for chats that offer tools.

    Attributes:
        added_tokens: The texts of tokens that are never split, special or not, by their ids.
        max_chars_per_token: A text with more characters than this has at least two tokens; None if
            tokens can have any length.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        config: dict[str, Any],
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.chat_template = chat_template
        self.tool_template = tool_template
        self.special_tokens = {
            name: content
            for name, value in named_tokens(config).items()
            if (content := token_content(value)) is not None
        }
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocabulary.values(), default=-1)
        described = json.loads(backend.to_str())
        decoder = _part_types(described["decoder"], "decoders")
        self.is_byte_level = decoder == ["ByteLevel"]
        self.max_chars_per_token = _max_chars_per_token(described, vocabulary)
        self._has_byte_tokens = "ByteFallback" in decoder
        self._has_word_starts = "Metaspace" in decoder or "Replace" in decoder
        self._bytes: dict[int, bytes] = {}
        self._adds_tokens = backend.num_special_tokens_to_add(is_pair=False) > 0
        self._segmented = segmented(backend, described, self._encode_whole)

    @classmethod
    def from_directory(cls, directory: Path) -> Tokenizer:
        """Read the tokenizer in `directory`.

        Raises:
            ConfigError: A file is missing, a Git LFS pointer, or not a tokenizer.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{directory} has no tokenizer.json: name a directory that has one with --tokenizer"
            )
        read_json(path)
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ConfigError(f"{path} is not a tokenizer: {error}") from error
        config, older = read_json(directory / "tokenizer_config.json"), {}
        if "additional_special_tokens" in config and not config.get("extra_special_tokens"):
            # Under its newer name, the older file below does not replace it.
            config["extra_special_tokens"] = config.pop("additional_special_tokens")
        if "added_tokens_decoder" not in config:
            # The two files that it replaces; as in transformers, theirs are the values.
            config |= read_json(directory / "special_tokens_map.json")
            older = read_json(directory / "added_tokens.json")
        if backend.padding is not None:
            config.setdefault("pad_token", backend.padding["pad_token"])
        add_tokens(backend, config, older)
        return cls(backend, config, *_find_chat_templates(directory, config))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; releases the GIL meanwhile.

        O(len(text)), but fast for cached pieces (`segments`).
        """
        adds = add_special_tokens and self._adds_tokens
        try:
            if adds or self._segmented is None or len(text) < MIN_CHARS:
                return self._encode_whole(text, add_special_tokens=adds)
            return self._segmented.encode(text)
        except (TypeError, UnicodeEncodeError) as error:  # which of them depends on the release
            raise BadRequestError(
                "the text contains a lone surrogate, which is not valid Unicode", param="prompt"
            ) from error

    def _encode_whole(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        # Not `encode`, which also says where tokens stand, and keeps the GIL.
        [found] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = found.ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`; ids outside the vocabulary have none.

        Releases the GIL while it decodes many.
        """
        text: str
        if len(token_ids) < _LONG_IDS:
            text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:
            [text] = self._backend.decode_batch(
                [token_ids], skip_special_tokens=skip_special_tokens
            )
        return text

    def as_json(self) -> str:
        """Return it as a `tokenizer.json`."""
        described: str = self._backend.to_str()
        return described

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of `token_id`; None outside the vocabulary."""
        spelling: str | None = self._backend.id_to_token(token_id)
        return spelling

    def is_byte_token(self, token_id: int) -> bool:
        """Whether the token is one byte of a character that the vocabulary lacks."""
        if not self._has_byte_tokens:
            return False
        token = self.token(token_id)
        return token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token in the middle of a text; they may not be whole UTF-8."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def token_text(self, token_id: int) -> str:
        """Return `token_bytes` as text, with U+FFFD for what is not UTF-8."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def _spell(self, token_id: int) -> bytes:
        token = self.token(token_id)
        if token is None:
            return b""
        if self.is_byte_level:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in token)
            except KeyError:  # an added token is spelled in plain text
                return token.encode()
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self._has_word_starts:
            return token.replace(_WORD_START, " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def _special_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        if content is None:
            return None
        token_id: int | None = self._backend.token_to_id(content)
        return token_id


def _part_types(part: dict[str, Any] | None, parts_name: str) -> list[str]:
    """Return the names of the parts of a decoder, normalizer or pre-tokenizer, in order.

    Args:
        parts_name: Name of a sequence's list of parts.
    """
    if part is None:
        return []
    if part["type"] == "Sequence":
        return [name for inner in part[parts_name] for name in _part_types(inner, parts_name)]
    return [part["type"]]


def _max_chars_per_token(described: dict[str, Any], vocabulary: Mapping[str, int]) -> int | None:
    """See `Tokenizer.max_chars_per_token`.

    Known if no character is lost on the way to the tokens: each byte is in a token, nothing is
    removed between tokens, and no token strips the spaces beside it.

    Args:
        described: The parsed `tokenizer.json`.
    """
    pre_tokenizer, normalizer = described["pre_tokenizer"], described["normalizer"]
    between = _part_types(pre_tokenizer, "pretokenizers")
    if (
        described["model"].get("type") != "BPE"
        or "ByteLevel" not in between
        or not set(between) <= {"ByteLevel", "Digits", "Split"}
        or "Removed" in json.dumps(pre_tokenizer)
        or not set(_part_types(normalizer, "normalizers")) <= {"NFC"}
        or not vocabulary.keys() >= _BYTE_OF_CHAR.keys()
        or any(token["lstrip"] or token["rstrip"] for token in described["added_tokens"])
    ):
        return None
    longest = max(map(len, vocabulary))
    return longest if normalizer is None else longest * _MAX_COMPOSED


def _find_chat_templates(directory: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """Return a model's templates for chats: for all, or those without tools, and with tools."""
    path = directory / "chat_template.jinja"
    for_tools = directory / "additional_chat_templates" / "tool_use.jinja"
    tool_template = read_template(for_tools) if for_tools.is_file() else None
    if path.is_file():
        return read_template(path), tool_template
    template = config.get("chat_template") or read_json(directory / "chat_template.json").get(
        "chat_template"
    )
    if isinstance(template, list):  # several named ones; the one for plain chat is `default`
        named = {entry.get("name"): entry.get("template") for entry in template}
        template, tool_template = named.get("default"), named.get("tool_use")
    return (
        template if isinstance(template, str) else None,
        tool_template if isinstance(tool_template, str) else None,
    )


def _byte_of_char() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_of_char()
