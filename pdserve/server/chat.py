"""Chat completions, and the endpoints of other protocols that map to them."""

from __future__ import annotations

import functools
import hashlib
from base64 import b32encode
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from pdserve.dialects import paths
from pdserve.errors import BadRequestError
from pdserve.http.dialect_bodies import MessagesRequest, ResponsesRequest
from pdserve.http.parsing import parse_body
from pdserve.http.protocol import ChatRequest
from pdserve.http.tools import (
    as_functions,
    chosen_tools,
    inputs_by_name,
    strict_tools,
    tools_by_name,
)
from pdserve.server.account import serving
from pdserve.server.form import (
    AnswerForm,
    as_one,
    chat_logprobs,
    prompt_logprobs,
    stream_answer,
    whole_choices,
)
from pdserve.server.intake import (
    created_s,
    cut_prompts,
    encode_prompts,
    read_request,
    refuse_large_chat,
    say_unknown_fields,
)
from pdserve.server.plan import make_text_request
from pdserve.server.prefill_leg import as_ordered
from pdserve.server.reply import DIALECT, finish_name, send_json, wants_stages
from pdserve.server.sampling import AnswerReading, Asked
from pdserve.server.service import REQUEST_ID, SERVICE, read_body
from pdserve.text.answer.pieces import ToolUse
from pdserve.text.messages import content_of
from pdserve.wire.hop import PARTS, PREFILL_HEADER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pdserve.http.protocol import TextFields, TokenizeRequest
    from pdserve.server.service import TextWork
    from pdserve.server.text_request import Delta, TextRequest
    from pdserve.text.answer.pieces import CallBegins
    from pdserve.text.answer.style import AnswerStyle
    from pdserve.text.load import Text
    from pdserve.text.output import CallDelta
    from pdserve.text.tokenizer import Tokenizer


async def render_chat(
    work: TextWork,
    text: Text,
    body: ChatRequest | TokenizeRequest,
    *,
    num_bytes: int,
    max_model_len: int,
    now_s: float,
) -> str:
    """Return the prompt for a body's messages, without blocking the event loop.

    Args:
        num_bytes: Size of the body.

    Raises:
        BadRequestError: The model has no chat template, it refuses the messages, they are too
            many, or tools are malformed.
        OverloadedError: Too many long ones are already waiting.
    """
    tools = (body.offered_tools if isinstance(body, ChatRequest) else body.tools) or []
    template = (text.tool_template if tools else None) or text.chat_template
    if template is None:
        raise BadRequestError(
            "this model has no chat template: use /v1/completions, or start the server with "
            "--chat-template FILE",
            param="messages",
        )
    messages = body.messages or []
    tools_by_name(tools)  # before a template meets them
    seen = {
        "messages": messages,
        "tools": tools,
        "documents": body.documents if isinstance(body, ChatRequest) else None,
        "chat_template_kwargs": body.chat_template_kwargs,
    }
    refuse_large_chat(seen, num_bytes, max_model_len)
    render = functools.partial(
        template.render,
        messages,
        now_s=now_s,
        tools=as_functions(tools),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.template_variables,
    )
    return await work.run(render, num_bytes, len(messages))


def _reading(body: ChatRequest, text: Text, prompt: str) -> AnswerReading:
    """Return how to parse answers, and the grammar that they must follow for that.

    Raises:
        BadRequestError: The request asks for tool calls that are impossible.
    """
    offered, choice = tools_by_name(body.offered_tools), chosen_tools(body.tool_choice)
    inputs = inputs_by_name(body.offered_tools)
    is_forced, name = choice.is_required, choice.name
    wanted = choice.allowed if name is None else {name}
    style = text.answers.forcing if is_forced else text.answers
    if offered and not is_forced:
        _check_choice(style)
    lacking = sorted(wanted - offered.keys()) if wanted is not None else []
    if lacking or (is_forced and not offered):
        raise BadRequestError(
            f"tool_choice asks for {', '.join(map(repr, lacking)) or 'a tool'}, which tools does "
            "not contain: add it, or change tool_choice",
            param="tool_choice",
        )
    allowed = {each: offered[each] for each in offered if wanted is None or each in wanted}
    strict = allowed.keys() & (offered.keys() if is_forced else strict_tools(body.offered_tools))
    is_bound = bool(strict) or len(allowed) < len(offered)
    use = ToolUse(
        allowed,
        is_forced=is_forced,
        is_parallel=body.parallel_tool_calls is not False and name is None,
        loose=frozenset(allowed.keys() - strict - inputs.keys()),
        inputs={each: taken.lark for each, taken in inputs.items() if taken.lark},
        told=frozenset(each for each, taken in inputs.items() if taken.is_told),
    )
    return AnswerReading(
        new_machine=functools.partial(style.machine, prompt, use),
        tools_grammar=style.grammar(prompt, use) if is_bound else None,
        thought_end=style.thought_end(prompt),
        thought_before=style.thought_before(prompt),
    )


def _check_choice(style: AnswerStyle) -> None:
    """Refuse a free choice of tools by a model that cannot make it.

    Raises:
        BadRequestError: The model cannot.
    """
    if not style.reads_calls:
        raise BadRequestError(
            "the format of this model's tool calls is unknown: start the server with "
            "--tool-call-parser NAME, set tool_choice to required, or leave tools out",
            param="tools",
            code="unsupported_parameter",
        )
    if not style.may_choose:
        raise BadRequestError(
            "this server runs with --no-enable-auto-tool-choice: set tool_choice to none or "
            "required",
            param="tool_choice",
            code="unsupported_parameter",
        )


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer a chat request, as one JSON object or as a stream."""
    return await _answer_chat(request, *await read_request(request, ChatRequest))


async def create_response(request: web.Request) -> web.StreamResponse:
    """`POST /v1/responses`."""
    return await _answer_in_dialect(request, ResponsesRequest)


async def create_message(request: web.Request) -> web.StreamResponse:
    """`POST /v1/messages`."""
    return await _answer_in_dialect(request, MessagesRequest)


async def _answer_in_dialect(request: web.Request, kind: type[TextFields]) -> web.StreamResponse:
    data = await read_body(request)
    dialect = paths.dialect_of(request.path, data, request[REQUEST_ID])
    assert dialect is not None
    request[DIALECT] = dialect
    say_unknown_fields(request, data, kind, also=dialect.ignored)
    chat = dialect.chat_body()
    del data  # the answer may take minutes
    body = parse_body(chat, ChatRequest)
    if PREFILL_HEADER in request.headers:
        body = await as_ordered(request, body, chat, paths.CHAT)
    return await _answer_chat(request, body, len(chat))


async def _answer_chat(
    request: web.Request, body: ChatRequest, num_bytes: int
) -> web.StreamResponse:
    """Answer a chat request in its client's dialect.

    Args:
        num_bytes: Size of its body.
    """
    service = request.app[SERVICE]
    service.resolve_model(body.model)
    text, info = service.require_ready()
    prompt = await render_chat(
        service.prompt_work,
        text,
        body,
        num_bytes=num_bytes,
        max_model_len=info.max_model_len,
        now_s=created_s(request, body),
    )
    reading = await service.prompt_work.run(
        functools.partial(_reading, body, text, prompt), num_bytes
    )
    # The template writes the special tokens itself.
    token_ids = await encode_prompts(
        request, body, [prompt], add_special_tokens=bool(body.add_special_tokens), field="messages"
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    text_request = await make_text_request(
        request,
        body,
        cut_prompts(token_ids, body, max_tokens=max_tokens, max_model_len=info.max_model_len),
        Asked(
            prompt_field="messages",
            max_tokens=max_tokens,
            max_tokens_field="max_completion_tokens"
            if body.max_completion_tokens
            else "max_tokens",
            default_max_tokens=None,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            reading=reading,
            tells_reasoning=body.include_reasoning is not False,
            prediction=None if body.prediction is None else body.prediction.predicted(),
        ),
    )
    form = _Form(body, text_request, text.tokenizer, prompt, service.server_config.reasoning_field)
    async with serving(request, text_request):
        await text_request.start()
        if body.stream:
            return await stream_answer(request, body, text_request, form)
        choices = await whole_choices(text_request)
        answer = form.answer([as_one(parts) for parts in choices])
        if len(choices) == 1 < len(choices[0]) and (DIALECT in request or wants_stages(request)):
            answer[PARTS] = form.parts(choices[0])
        return await send_json(request, text_request, answer)


class _Form(AnswerForm):
    """See `AnswerForm`."""

    prefix = "chatcmpl"
    kind = "chat.completion.chunk"

    def __init__(
        self,
        body: ChatRequest,
        text_request: TextRequest,
        tokenizer: Tokenizer,
        prompt: str,
        reasoning_field: str,
    ) -> None:
        # With logprobs asked for, a choice's chunk has a list of them even where it has no token.
        super().__init__(body, text_request, tokenizer, may_be_plain=not body.logprobs)
        self._body = body
        self._reasoning_field = reasoning_field
        self._prompt = prompt
        last = body.messages[-1]
        is_echoed = body.echo and last.get("role") == "assistant"
        self._echo = content_of(last, "messages[-1]") if is_echoed else ""
        self._num_top = len(body.logprob_token_ids or ()) or body.top_logprobs or 0

    def chunk(self, delta: Delta) -> dict[str, Any]:
        """See `AnswerForm`: a choice's first event names the role."""
        first = delta.index not in self._begun
        self._begun.add(delta.index)
        gained = self._thought(delta)
        if calls := [self._fragment(call, delta.index) for call in delta.calls if _is_told(call)]:
            gained["tool_calls"] = calls
        text = self._echo + delta.text if first else delta.text
        if text or not gained:
            gained["content"] = text
        choice = {
            "index": delta.index,
            "delta": {"role": "assistant"} | gained if first else gained,
            **self._facts(delta),
        }
        chunk = self.envelope([choice])
        return chunk | self._of_prompt() if first else chunk

    def answer(self, choices: Sequence[Delta]) -> dict[str, Any]:
        """Return the whole answer from all that each choice has."""
        answer = self.envelope(
            [
                {"index": each.index, "message": self._message(each), **self._facts(each)}
                for each in choices
            ],
            "chat.completion",
        )
        answer["usage"] = self._text_request.usage()
        entries = choices[0].prompt_logprobs
        if entries is not None:
            answer["prompt_logprobs"] = prompt_logprobs(self._tokens, entries)
        return answer | self._of_prompt()

    def parts(self, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
        """Return the choices of a stream with these deltas, without calls that are none.

        Only those of text have log-probabilities: who reads them asks for no others.
        """
        whole = {call.index for delta in deltas for call in delta.calls if call.is_whole}
        kept = [
            msgspec.structs.replace(
                delta,
                calls=[call for call in delta.calls if call.index in whole],
                logprobs=delta.logprobs if delta.text else None,
            )
            for delta in deltas
        ]
        return [self.chunk(delta)["choices"][0] for delta in kept]

    def _of_prompt(self) -> dict[str, Any]:
        """Return the fields about the prompt, which appear once."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = self._text_request.prompts[0]
        if self._body.return_prompt_text:
            fields["prompt_text"] = self._prompt
        return fields

    def _message(self, delta: Delta) -> dict[str, Any]:
        """Return the whole message of a choice."""
        gained = self._thought(delta)
        if calls := self._calls(delta):
            gained["tool_calls"] = calls
        content = self._echo + delta.text
        is_call = "tool_calls" in gained and not content
        return {"role": "assistant", "content": None if is_call else content, **gained}

    def _thought(self, delta: Delta) -> dict[str, Any]:
        """Return the reasoning in a delta, if it has any."""
        return {self._reasoning_field: delta.reasoning} if delta.reasoning else {}

    def _fragment(self, call: CallDelta, choice: int) -> dict[str, Any]:
        """Return the new part of a call, as an entry of a stream's chunk."""
        if call.begins is None:
            gained = {"input" if call.is_input else "arguments": call.arguments}
            return {"index": call.index, "custom" if call.is_input else "function": gained}
        return {"index": call.index} | self._call(call.begins, call.arguments, choice, call.index)

    def _calls(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the whole calls of a choice."""
        found: dict[int, list[CallDelta]] = {}
        for part in delta.calls:
            found.setdefault(part.index, []).append(part)
        return [
            self._call(begins, "".join(part.arguments for part in parts), delta.index, index)
            for index, parts in found.items()
            if parts[-1].is_whole and (begins := parts[0].begins) is not None
        ]

    def _call(self, begins: CallBegins, arguments: str, choice: int, index: int) -> dict[str, Any]:
        """Return a call; its id is the same on every engine and in every repetition."""
        digest = hashlib.sha256(
            f"{self._text_request.request_id}:{choice}:{index}".encode()
        ).digest()
        kind, field = ("custom", "input") if begins.is_input else ("function", "arguments")
        return {
            "id": begins.call_id or f"call_{b32encode(digest).decode()[:24]}",
            "type": kind,
            kind: {"name": begins.name, field: arguments},
        }

    def _facts(self, delta: Delta) -> dict[str, Any]:
        """Return a choice's fields other than its text."""
        facts: dict[str, Any] = {
            "logprobs": chat_logprobs(self._tokens, delta.logprobs or (), self._num_top)
            if self._body.logprobs
            else None,
            "finish_reason": finish_name(delta.finish_reason, has_calls=delta.num_calls > 0),
            "stop_reason": delta.stop_reason,
        }
        if self._body.return_token_ids:
            facts["token_ids"] = list(delta.token_ids)
        return facts


def _is_told(call: CallDelta) -> bool:
    """Whether a stream reports this part of a call."""
    return call.begins is not None or bool(call.arguments)
