"""`prediction` of a chat request: text that the answer will probably resemble, as in an edit.

It changes no token, only the speed.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import BadRequestError


class PredictionPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prediction."""

    type: str
    text: str


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Static predicted output, as defined by OpenAI."""

    type: str
    content: str | list[PredictionPart]

    def predicted(self) -> str:
        """Return its text.

        Raises:
            BadRequestError: It is, or contains, something other than text.
        """
        if self.type != "content":
            raise BadRequestError(
                f"prediction.type is {self.type!r}: it must be 'content'", param="prediction"
            )
        if isinstance(self.content, str):
            return self.content
        for part in self.content:
            if part.type != "text":
                raise BadRequestError(
                    f"prediction.content has a part of type {part.type!r}: only 'text' is allowed",
                    param="prediction",
                )
        return "".join(part.text for part in self.content)
