"""Tokenizes a text piece by piece and caches long pieces, so that a turn costs only its new text.

A tokenizer cuts its added tokens (`<|im_start|>` ...) out of the text before it looks at anything
else, and tokenizes the text between two of them independently of its neighbours. So the tokens of a
conversation are those of its messages, and all but the last message are known from the turn before.
A tokenizer with the same added tokens and nothing else finds the cuts; if pieces are not
independent, the text is not cut. A piece is cached as a whole, so that no client can find out word
by word what others have sent.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import AddedToken
from tokenizers.models import WordLevel

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MIN_CHARS: Final = 256
"""Minimum length of a cached piece; a shorter one is tokenized in less than 0.1 ms."""
_KEPT_CHARS: Final = 16 << 20
"""Total length of the cached pieces, which take 32 to 80 MB with their tokens."""
_PIECE: Final = "\0"
_NEIGHBOURS: Final = (("a b", "c d"), (" a \n", "\n\n c"), ("b ", " d"), ("", "e"))
_NUM_TRIED: Final = 4


class SegmentedEncoder:
    """The pieces of one tokenizer. Thread-safe.

    Args:
        added: The added tokens that are cut out of a text, by their ids.
        encode: Returns the ids of a text, without those that a post-processor adds around it.
    """

    def __init__(self, added: Mapping[int, AddedToken], encode: Callable[[str], list[int]]) -> None:
        self._encode = encode
        self._cutter = tokenizers.Tokenizer(WordLevel({_PIECE: 0}, unk_token=_PIECE))
        self._cutter.add_tokens(list(added.values()))
        self._added = {
            self._cutter.token_to_id(token.content): (token.content, token_id)
            for token_id, token in added.items()
        }
        self._lock = threading.Lock()
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._num_chars = 0

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text.

        Raises:
            TypeError, UnicodeEncodeError: It holds a lone surrogate.
        """
        [found] = self._cutter.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = []
        at = 0
        for kind in filter(None, found.ids):
            # Where it stands first is where it was found: else another one was found there.
            content, token_id = self._added[kind]
            begin = text.index(content, at)
            ids += self._piece(text[at:begin])
            ids.append(token_id)
            at = begin + len(content)
        return ids + self._piece(text[at:])

    def _piece(self, piece: str) -> list[int]:
        if len(piece) < MIN_CHARS:
            return self._encode(piece) if piece else []
        return self._remembered(piece)

    def _remembered(self, piece: str) -> list[int]:
        """Return the ids of a piece, from the cache if possible."""
        with self._lock:
            if (known := self._known.get(piece)) is not None:
                self._known.move_to_end(piece)
                return known.tolist()
        ids = self._encode(piece)
        with self._lock:
            if piece not in self._known and len(piece) <= _KEPT_CHARS:
                self._known[piece] = array("I", ids)
                self._num_chars += len(piece)
                while self._num_chars > _KEPT_CHARS:
                    self._num_chars -= len(self._known.popitem(last=False)[0])
        return ids


def segmented(
    backend: tokenizers.Tokenizer, described: Mapping[str, Any], encode: Callable[[str], list[int]]
) -> SegmentedEncoder | None:
    """Return the encoder for a tokenizer; None if its pieces are not independent.

    Args:
        described: The parsed `tokenizer.json`.
        encode: As for `SegmentedEncoder`.
    """
    added = backend.get_added_tokens_decoder()
    cut = {each: token for each, token in added.items() if not token.normalized}
    if not cut or any(token.single_word or token.lstrip or token.rstrip for token in cut.values()):
        return None  # what such a one is, or takes with it, depends on what stands beside it
    if '"first"' in json.dumps(described["pre_tokenizer"]):
        return None  # the beginning of a text is spelled in another way than that of a piece
    found = SegmentedEncoder(cut, encode)
    for token in list(cut.values())[:_NUM_TRIED]:
        for before, after in _NEIGHBOURS:
            text = f"{before}{token.content}{after}"
            if found.encode(text) != encode(text):
                return None
    return found
