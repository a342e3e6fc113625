"""What a client may ask: the OpenAI request bodies, parsed and checked.

Fields have vLLM's names and meanings. A wrong value is a 400 that names the field; a field
this server knows of but does not support is a 400 unless its value asks for nothing;
unknown fields are ignored. Knows no tokenizer and no model.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, TypeVar, cast

import msgspec

from pdserve.errors import BadRequestError
from pdserve.wire.hop import KVTransferParams, ReachRequest, ReleaseRequest
from pdserve.wire.sampling import MAX_LOGPROBS

MAX_CHOICES = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Over all stop strings: the end of the text is held against each of them for each token."""
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 1 << 14
MAX_LOGIT_BIAS = 1024
"""As vLLM has it, like the number of stop token ids."""
MAX_TEMPERATURE = 1000.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond these, logits are no longer finite in single precision."""
_MAX_INT32 = 2**31 - 1
_REMEDIES = {"functions": "; call them tools, or use function_call none"}
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_FIELD = re.compile(r" - at (?:`key` in )?`\$\.?([^`.\[]*)[^`]*`$")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream carries beside the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that completions and chat have in common; None means not given."""

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: int | None = None
    cache_salt: str | None = None
    user: str | None = None
    kv_transfer_params: KVTransferParams | None = None

    # Known, not supported: each must have one of the values in `unsupported`, or be absent.
    use_beam_search: Any = None
    length_penalty: Any = None
    truncate_prompt_tokens: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    response_format: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    return_tokens_as_token_ids: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None
    thinking_token_budget: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "truncate_prompt_tokens": (),
        "structured_outputs": (),
        "guided_json": (),
        "guided_regex": (),
        "guided_choice": (),
        "guided_grammar": (),
        "response_format": ({"type": "text"},),
        "logits_processors": ([],),
        "logprob_token_ids": (),
        "repetition_detection": (),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "thinking_token_budget": (-1,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }

    @property
    def unused(self) -> frozenset[str]:
        """Fields that are not supported, and whose values another field takes out of use."""
        return frozenset()

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream carries its choice's usage so far.

        As in vLLM only where the stream ends with a usage chunk, too.
        """
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None

    suffix: Any = None
    best_of: Any = None
    prompt_embeds: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = SamplingFields.unsupported | {
        "suffix": ("",),
        "best_of": (1,),
        "prompt_embeds": (),
    }

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, all as texts or all as token ids.

        Raises:
            BadRequestError: There is none, there are too many, or they are of mixed kinds.
        """
        found = self._prompts()
        num_choices = self.num_choices * len(found)
        if num_choices > MAX_CHOICES:
            raise BadRequestError(
                f"the request has {num_choices} choices (n for each prompt); "
                f"at most {MAX_CHOICES} are served",
                param="n" if self.num_choices > 1 else "prompt",
            )
        return found

    def _prompts(self) -> list[str] | list[list[int]]:
        match self.prompt:
            case str(text):
                return [text]
            case [] | [[]]:
                raise BadRequestError("prompt is empty", param="prompt")
            case items:
                kinds = set(map(type, items))
                if kinds == {int}:
                    return [cast("list[int]", items)]
                if kinds == {list}:
                    return cast("list[list[int]]", items)
                if kinds == {str}:
                    return cast("list[str]", items)
        raise BadRequestError(
            "prompt must be a string, a list of strings, a list of token ids or a list of "
            "lists of token ids, not a mixture",
            param="prompt",
        )


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    web_search_options: Any = None
    documents: Any = None
    chat_template: Any = None
    continue_final_message: Any = None
    return_prompt_text: Any = None
    echo: Any = None
    verbosity: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = SamplingFields.unsupported | {
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "documents": ([],),
        "chat_template": (),
        "continue_final_message": (False,),
        "return_prompt_text": (False,),
        "echo": (False,),
        "verbosity": ("medium",),
    }

    @property
    def unused(self) -> frozenset[str]:
        """Functions that are not to be called; they do not stand in the prompt either."""
        return frozenset(["functions"] if self.function_call == "none" else [])

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that may be called; others do not stand in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt or chat messages, with tools if they have some."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)

# Built on import: it takes milliseconds, which the first request should not pay.
_DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        CompletionRequest,
        ChatRequest,
        TokenizeRequest,
        DetokenizeRequest,
        ReleaseRequest,
        ReachRequest,
    )
}

_TOP_LEVEL: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Return the request body in `data`.

    Raises:
        BadRequestError: It is not JSON, a field has the wrong type or an impossible value,
            or asks for something that is not supported.
    """
    try:
        body: Body = _DECODERS[kind].decode(data)
    except msgspec.ValidationError as error:
        raise _named(error) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from error
    if isinstance(body, SamplingFields):
        _refuse_unsupported(body)
        _check_ranges(body)
    return body


def unknown_fields(data: bytes, kind: type[msgspec.Struct]) -> list[str]:
    """The names in the top level of a body that `parse_body` has taken, and ignored.

    Raises:
        BadRequestError: One of them is no text.
    """
    try:
        names = _TOP_LEVEL.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}", code="invalid_json"
        ) from error
    return [name for name in names if name not in kind.__struct_encode_fields__]


def _named(error: msgspec.ValidationError) -> BadRequestError:
    """The decoder names the place at the end of its message."""
    message = str(error)
    place = _FIELD.search(message)
    if place is not None and place[1]:
        return BadRequestError(
            f"{place[1]}: {message[: place.start()]}", param=place[1], code="invalid_type"
        )
    if missing := re.search(r"missing required field `(\w+)`", message):
        return BadRequestError(
            f"{missing[1]} is missing", param=missing[1], code="missing_required_parameter"
        )
    return BadRequestError(message)


def _refuse_unsupported(body: SamplingFields) -> None:
    for name, harmless in body.unsupported.items():
        value = getattr(body, name)
        if value is None or value in harmless or name in body.unused:
            continue
        raise BadRequestError(
            f"{name} is not supported by this server{_REMEDIES.get(name, '')}",
            param=name,
            code="unsupported_parameter",
        )


def _check_ranges(body: SamplingFields) -> None:
    _check("n", body.n, 1, MAX_CHOICES)
    _check("max_tokens", body.max_tokens, 0, None)
    _check("min_tokens", body.min_tokens, 0, None)
    _check("temperature", body.temperature, 0, MAX_TEMPERATURE)
    _check("top_p", body.top_p, 0, 1)
    _check("top_k", body.top_k, -1, _MAX_INT32)
    _check("min_p", body.min_p, 0, 1)
    _check("presence_penalty", body.presence_penalty, -2, 2)
    _check("frequency_penalty", body.frequency_penalty, -2, 2)
    _check(
        "repetition_penalty",
        body.repetition_penalty,
        MIN_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
    )
    _check("priority", body.priority, -_MAX_INT32, _MAX_INT32)
    _check("seed", body.seed, -(2**63), 2**63 - 1)
    _check("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    if body.top_p == 0:
        raise BadRequestError("top_p is 0: it must be above 0 and at most 1", param="top_p")
    if "" in body.stops:
        raise BadRequestError("stop must not contain an empty string", param="stop")
    _check_sizes(body)
    if body.bad_words is not None and not all(word.strip() for word in body.bad_words):
        raise BadRequestError("bad_words must not contain an empty word", param="bad_words")
    if body.allowed_token_ids == []:
        raise BadRequestError(
            "allowed_token_ids is empty: nothing is left to sample", param="allowed_token_ids"
        )
    if body.cache_salt == "":
        raise BadRequestError("cache_salt must not be empty", param="cache_salt")
    if body.stream_options is not None and not body.stream:
        raise BadRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequestError(
            "prompt_logprobs is not available when stream is true", param="prompt_logprobs"
        )
    match body:
        case CompletionRequest():
            _check("logprobs", body.logprobs, 0, MAX_LOGPROBS)
            if body.max_tokens == 0 and not body.echo:
                raise BadRequestError(
                    "max_tokens is 0: it must be at least 1, or echo must be true",
                    param="max_tokens",
                )
        case ChatRequest():
            _check("max_tokens", body.max_tokens, 1, None)
            _check("max_completion_tokens", body.max_completion_tokens, 1, None)
            _check("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
            if body.top_logprobs and not body.logprobs:
                raise BadRequestError(
                    "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
                )
            if not body.messages:
                raise BadRequestError("messages is empty", param="messages")


def _check(name: str, value: float | None, minimum: float, maximum: float | None) -> None:
    if value is None or (value >= minimum and (maximum is None or value <= maximum)):
        return
    limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    raise BadRequestError(f"{name} is {value}: it must be {limits}", param=name)


def _check_sizes(body: SamplingFields) -> None:
    """Bound what an engine, or this event loop, looks through for each token."""
    stops, words = body.stops, body.bad_words or ()
    biases, stop_ids = body.logit_bias or (), body.stop_token_ids or ()
    chars = "characters in all"
    many = "to allow or forbid many tokens, use allowed_token_ids"
    for name, size, maximum, what, remedy in (
        ("stop", len(stops), MAX_STOPS, "strings", "give fewer"),
        ("stop", sum(map(len, stops)), MAX_STOP_CHARS, chars, "shorten the strings"),
        ("stop_token_ids", len(stop_ids), MAX_STOP_TOKEN_IDS, "ids", "give fewer"),
        ("bad_words", len(words), MAX_BAD_WORDS, "words", "forbid single tokens by logit_bias"),
        ("bad_words", sum(map(len, words)), MAX_BAD_WORDS_CHARS, chars, "give fewer words"),
        ("logit_bias", len(biases), MAX_LOGIT_BIAS, "tokens", many),
    ):
        if size > maximum:
            raise BadRequestError(
                f"{name} has {size} {what}: it may have {maximum} at most; {remedy}", param=name
            )
