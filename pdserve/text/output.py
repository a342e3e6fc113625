"""One choice's tokens to the text a client sees.

A pure state machine: two processors that are fed the same tokens give out the same text,
which is what lets one engine send the first token and another one the rest. Does not know
HTTP, engines or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdserve.text.detokenizer import make_detokenizer
from pdserve.text.stops import Released, StopMatcher
from pdserve.wire.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What some tokens added.

    Attributes:
        text: Text that may be shown now; later tokens cannot change it.
        offsets: For each token that counts (those after a stop string do not), the number
            of characters decoded before it.
        finish_reason: STOP when a stop string ended the text; else the engine's own.
        stop_reason: The stop string that ended it, if one did.
    """

    text: str
    offsets: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | None = None


class OutputProcessor:
    """Detokenizes one choice and ends it at its stop strings.

    Args:
        tokenizer: The model's.
        stop: Stop strings; none may be empty.
        include_stop_str_in_output: Also shows the stop string or stop token that ended it.
        skip_special_tokens: Special tokens have no text.
        min_tokens: A stop string must end after so many tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopMatcher(stop, include_stop=include_stop_str_in_output)
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_chars = 0
        self.num_tokens = 0

    def push(self, token_ids: Sequence[int], finish_reason: FinishReason | None) -> TextDelta:
        """Add tokens, the last ones if `finish_reason` says so.

        A token at which the engine stopped (EOS, a stop id) has no text unless stops are
        included. A handoff ends the tokens here but not the text.
        """
        text = ""
        offsets: list[int] = []
        num_shown = len(token_ids)
        if finish_reason is FinishReason.STOP and not self._include_stop:
            num_shown -= 1
        for position, token_id in enumerate(token_ids):
            offsets.append(self._num_chars)
            self.num_tokens += 1
            piece = self._detokenizer.push(token_id) if position < num_shown else ""
            released = self._release(piece)
            text += released.text
            if released.stop is not None:
                return TextDelta(text, offsets, FinishReason.STOP, released.stop)
        if finish_reason in (None, FinishReason.HANDOFF):
            return TextDelta(text, offsets, finish_reason)
        released = self._release(self._detokenizer.flush())
        text += released.text
        if released.stop is not None:
            return TextDelta(text, offsets, FinishReason.STOP, released.stop)
        return TextDelta(text + self._stops.flush(), offsets, finish_reason)

    def _release(self, text: str) -> Released:
        if not text:
            return Released("")
        self._num_chars += len(text)
        return self._stops.push(text, may_stop=self.num_tokens > self._min_tokens)
