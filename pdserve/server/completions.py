"""`POST /v1/completions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.http.protocol import CompletionRequest
from pdserve.server.account import serving
from pdserve.server.form import (
    AnswerForm,
    completion_logprobs,
    echoed_logprobs,
    joined,
    likeliest,
    prompt_logprobs,
    stream_answer,
    whole_choices,
)
from pdserve.server.intake import cut_prompts, encode_prompts, read_request
from pdserve.server.plan import make_text_request
from pdserve.server.reply import finish_name, send_json
from pdserve.server.sampling import Asked
from pdserve.server.service import SERVICE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.server.text_request import Delta, TextRequest
    from pdserve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16


async def create_completion(request: web.Request) -> web.StreamResponse:
    """Answer a completions request, as one JSON object or as a stream."""
    body, _ = await read_request(request, CompletionRequest)
    service = request.app[SERVICE]
    service.resolve_model(body.model)
    text, info = service.require_ready()
    given = body.prompts()
    special = body.add_special_tokens is not False
    whole = prompts = await encode_prompts(
        request, body, given, add_special_tokens=special, field="prompt"
    )
    if body.truncate_prompt_tokens is not None:
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        prompts = cut_prompts(whole, body, max_tokens=max_tokens, max_model_len=info.max_model_len)
    wanted = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        wanted = max(wanted or 0, body.logprobs)
    text_request = await make_text_request(
        request,
        body,
        prompts,
        Asked(
            prompt_field="prompt",
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            logprobs=body.logprobs,
            prompt_logprobs=wanted,
        ),
    )
    sent: Sequence[str | list[int]] = given if body.echo else []
    echo = [_echo_of(text.tokenizer, *each) for each in zip(sent, whole, prompts, strict=False)]
    form = _Form(body, text_request, text.tokenizer, echo)
    async with serving(request, text_request):
        await text_request.start()
        if body.stream:
            return await stream_answer(request, body, text_request, form)
        choices = [
            form.choice(each, streaming=False) for [each] in await whole_choices(text_request)
        ]
        answer = form.envelope(choices) | {"usage": form.usage()}
        return await send_json(request, text_request, answer)


def _echo_of(
    tokenizer: Tokenizer, given: str | list[int], whole: list[int], left: list[int]
) -> str:
    """Return the text of a prompt, or what is left of it if it was cut.

    Args:
        given: As it was sent.
        whole, left: Its tokens before and after it was cut.
    """
    begin = 0
    if isinstance(given, str):
        if len(left) == len(whole):
            return given
        bos = tokenizer.special_tokens.get("bos_token", "")
        begin = int(left[0] == tokenizer.bos_token_id and not given.startswith(bos))
    return tokenizer.decode(left[begin:], skip_special_tokens=False)


class _Form(AnswerForm):
    """See `AnswerForm`.

    Args:
        echo: The text that each prompt's choices begin with, if any.
    """

    prefix = "cmpl"
    kind = "text_completion"

    def __init__(
        self,
        body: CompletionRequest,
        text_request: TextRequest,
        tokenizer: Tokenizer,
        echo: list[str],
    ) -> None:
        super().__init__(body, text_request, tokenizer, may_be_plain=True)
        self._body = body
        self._echo = echo
        self._echo_only = bool(body.echo) and body.max_tokens == 0

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `AnswerForm`."""
        return self.envelope([self.choice(delta, streaming=True)])

    def usage(self, choice_index: int | None = None) -> dict[str, Any]:
        """Return the usage; a request for the echo alone has no output."""
        usage = super().usage(choice_index)
        if self._echo_only:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def choice(self, delta: Delta, *, streaming: bool) -> dict[str, Any]:
        """Return the choice object for `delta`."""
        body, tokens = self._body, self._tokens
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        prompt_index = self._text_request.choices[delta.index].prompt_index
        echo = self._echo[prompt_index] if self._echo else ""
        text, token_ids, entries = delta.text, delta.token_ids, delta.logprobs
        if self._echo_only:
            text, token_ids, entries = "", [], [] if entries is not None else None
        logprobs = None
        if entries is not None:
            offsets = [len(echo) + offset for offset in delta.offsets[: len(entries)]]
            logprobs = completion_logprobs(tokens, entries, offsets)
            if first and echo and delta.prompt_logprobs is not None:
                prompt = self._text_request.prompts[prompt_index]
                scores = likeliest(delta.prompt_logprobs, body.logprobs or 0)
                echoed = echoed_logprobs(tokens, prompt, scores, echo)
                logprobs = joined(echoed, logprobs)
        choice: dict[str, Any] = {
            "index": delta.index,
            "text": echo + text if first else text,
            "logprobs": logprobs,
            "finish_reason": finish_name(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }
        if not streaming and body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            scores = likeliest(delta.prompt_logprobs, body.prompt_logprobs)
            choice["prompt_logprobs"] = prompt_logprobs(tokens, scores)
        if body.return_token_ids:
            if first:
                choice["prompt_token_ids"] = self._text_request.prompts[prompt_index]
            choice["token_ids"] = list(token_ids)
        return choice
