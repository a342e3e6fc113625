"""The text that a custom tool takes, as its calls' arguments arrive.

Models call a custom tool like a function with one argument. What becomes certain does not depend on
how the arguments are cut into pieces.
"""

from __future__ import annotations

import json
import re
from typing import Final

from pdserve.http.tools import INPUT

_HEAD: Final = f'{{"{INPUT}":"'
_SPACED: Final = (0, 1, len(_HEAD) - 2, len(_HEAD) - 1)
"""Places in it that may have spaces before them."""
_HIGH: Final = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_LOW: Final = r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_UNIT: Final = re.compile(
    rf'[^"\\]+|{_HIGH}(?:{_LOW}|(?=[^\\]|\\[^u]|\\u[0-9a-fA-F]{{4}}))'
    r"|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\[^u]"
)
"""What can be read by itself: the first half of a character cannot."""
_LONE: Final = re.compile("[\ud800-\udfff]")


class InputReader:
    """Reads the arguments of one call.

    Arguments that are not as they should be are the text, as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._place = 0
        self._is_raw = self._is_over = False

    def push(self, arguments: str) -> str:
        """Add a part of the arguments, which are JSON; return what became certain of the text."""
        if self._is_raw or self._is_over:
            return arguments if self._is_raw else ""
        self._held += arguments
        if self._place < len(_HEAD) and not self._has_begun():
            raw = self._held if self._is_raw else ""
            self._held = "" if self._is_raw else self._held
            return raw
        end = 0
        while (unit := _UNIT.match(self._held, end)) is not None:
            end = unit.end()
        text, self._held = self._held[:end], self._held[end:]
        self._is_over = self._held.startswith('"')
        return _LONE.sub("\ufffd", json.loads(f'"{text}"', strict=False))

    def _has_begun(self) -> bool:
        """Read the head; what is behind it is held."""
        place = 0
        for at, character in enumerate(self._held):
            if character == _HEAD[place]:
                place += 1
            elif not (character.isspace() and place in _SPACED):
                self._is_raw = True
                return False
            if place == len(_HEAD):
                self._place, self._held = place, self._held[at + 1 :]
                return True
        return False


def input_in(arguments: str) -> str:
    """Return the text in the arguments of a call."""
    return InputReader().push(arguments)


def arguments_of(text: str) -> str:
    """Return the arguments of a call with a text."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
