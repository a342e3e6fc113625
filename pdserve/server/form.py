"""What the forms of both endpoints' answers have in common, and how they are streamed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

from pdserve.server.logprobs import TokenNames
from pdserve.server.reply import EventStream, hop_events
from pdserve.server.spacing import spaced

if TYPE_CHECKING:
    from aiohttp import web

    from pdserve.http.protocol import SamplingFields
    from pdserve.server.text_request import Delta, TextRequest
    from pdserve.text.tokenizer import Tokenizer


class AnswerForm(ABC):
    """Puts deltas into an endpoint's JSON. Keeps which choices were begun.

    Args:
        may_be_plain: Some chunks of a choice may differ in their text alone.

    Attributes:
        prefix: Of an answer's id.
        kind: What a stream's events are called.
    """

    prefix: ClassVar[str]
    kind: ClassVar[str]

    def __init__(
        self, body: SamplingFields, job: TextRequest, tokenizer: Tokenizer, *, may_be_plain: bool
    ) -> None:
        self._job = job
        self._tokens = TokenNames(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._begun = {choice.index for choice in job.choices if choice.num_to_swallow}
        self._may_be_plain = may_be_plain and not (body.return_token_ids or body.continuous_usage)

    @abstractmethod
    def chunk(self, delta: Delta) -> dict[str, Any]:
        """Return the stream's event for `delta`."""

    def usage(self, choice_index: int | None = None) -> dict[str, Any]:
        """Return the usage, of one choice if it is given."""
        return self._job.usage(choice_index)

    def envelope(self, choices: list[dict[str, Any]], kind: str | None = None) -> dict[str, Any]:
        """Return the object around `choices`; an event of a stream if its kind is not given."""
        return {
            "id": f"{self.prefix}-{self._job.request_id}",
            "object": kind or self.kind,
            "created": self._job.created,
            "model": self._job.model,
            "choices": choices,
        }

    def is_plain(self, delta: Delta) -> bool:
        """Whether its chunk differs from others of its choice only in the text."""
        return self._may_be_plain and delta.is_text_only and delta.index in self._begun


async def stream_answer(
    request: web.Request, body: SamplingFields, job: TextRequest, form: AnswerForm
) -> web.StreamResponse:
    """Run the job to its end, and send what it gains as it comes."""
    stream = EventStream(request, job)
    async with stream:
        async for delta in spaced(job.deltas(), body.stream_interval or 1):
            if form.is_plain(delta):
                await stream.send_text(delta, form.chunk)
                continue
            chunk = form.chunk(delta)
            if body.continuous_usage:
                chunk["usage"] = form.usage(delta.index)
            await stream.send(chunk)
        last = hop_events(request, job)
        if body.include_usage and not any(job.handoffs):
            last.insert(0, form.envelope([]) | {"usage": form.usage()})
        await stream.end(last)
        job.delivered = True
    return stream.response
