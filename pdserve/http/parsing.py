"""Decodes and validates a request body into its struct.

A wrong value is a 400 that names the field; a known but unsupported field is a 400 with a remedy,
unless its value has no effect. Knows no tokenizer and no model.
"""

from __future__ import annotations

import codecs
import re
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from pdserve.errors import BadRequestError
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.pooling_bodies import (
    MAX_TEXTS,
    EmbeddingRequest,
    PoolingFields,
    RerankRequest,
    ScoreRequest,
)
from pdserve.http.protocol import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TextFields,
    TokenizeRequest,
    prompts_of,
)
from pdserve.wire.hop import MigrateRequest, ReachRequest, ReleaseRequest
from pdserve.wire.sampling import MAX_LOGPROBS

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_STOPS = 64
MAX_STOP_CHARS = 4096
"""Total of all stop strings, each of which is compared with the end of the text at each token."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_WORDS = 1024
MAX_BAD_WORDS_CHARS = 1 << 14
MAX_LOGIT_BIAS = 1024
"""vLLM's limit, as is the number of stop token ids."""
MAX_TEMPERATURE = 1000.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Beyond these, logits are no longer finite in single precision."""
_MAX_INT32 = 2**31 - 1
_ONLY_TEXT = "only text is served"
_ONE_SERVICE = "requests are alike here; leave it out"
_COSINE = "a score is the cosine between two vectors"
_NO_MEMORY = "nothing is kept: send the whole conversation each time"
_NO_INSTRUCTION = "texts are taken as they are: write it into them"
_NO_TEMPLATES = "a client's template is not run: start the engines with --chat-template FILE"
_REMEDIES = {
    "audio": _ONLY_TEXT,
    "background": "stream the answer instead",
    "best_of": "ask for n choices with logprobs, and take the likeliest",
    "chat_template": _NO_TEMPLATES,
    "chat_template_kwargs": _NO_INSTRUCTION,
    "container": "there are no tools of the server's own",
    "context_management": _NO_MEMORY,
    "conversation": _NO_MEMORY,
    "ec_transfer_params": _ONLY_TEXT,
    "embed_dtype": "numbers are float32",
    "endianness": "numbers are little endian",
    "enable_response_messages": "/v1/chat/completions has messages",
    "function_call": "use tool_choice",
    "functions": "call them tools, or use function_call none",
    "instruction": _NO_INSTRUCTION,
    "length_penalty": "it means something to a beam search only",
    "kv_transfer_params": "engines are asked for chat completions",
    "logits_processors": "use logit_bias, allowed_token_ids or bad_words",
    "messages": "render them by /tokenize, and send the tokens as input",
    "max_tokens_per_doc": "truncate_prompt_tokens cuts each text",
    "max_tokens_per_query": "truncate_prompt_tokens cuts each text",
    "mcp_servers": "call them yourself, and offer what they can do as tools",
    "media_io_kwargs": _ONLY_TEXT,
    "mm_payload": _ONLY_TEXT,
    "mm_processor_kwargs": _ONLY_TEXT,
    "modalities": _ONLY_TEXT,
    "moderation": "nothing is moderated",
    "padding": "texts are taken as they are",
    "previous_input_messages": _NO_MEMORY,
    "previous_response": _NO_MEMORY,
    "previous_response_id": _NO_MEMORY,
    "prompt": "send instructions and input",
    "prompt_embeds": "send the prompt as text or as token ids",
    "repetition_detection": "use repetition_penalty, or stop",
    "request_id": "send it as the header X-Request-Id",
    "return_mm_kwargs": _ONLY_TEXT,
    "return_token_offsets": "/tokenize has the tokens of a text",
    "routed_experts_prompt_start": "which experts a token takes is not reported",
    "service_tier": _ONE_SERVICE,
    "spaces_between_special_tokens": "special tokens are written as the tokenizer writes them",
    "store": "nothing is kept; leave it out, or send false",
    "stream": "vectors come in one piece",
    "stream_options": "a stream has its usage, and nothing to obscure its size",
    "suffix": "write the prompt with the model's own tokens for filling in",
    "task": "vectors are made for nothing else",
    "thinking_token_budget": "limit all of the answer, or send reasoning_effort none",
    "use_activation": _COSINE,
    "use_beam_search": "ask for n choices with logprobs instead",
    "verbosity": "say in a message how long the answer is to be",
    "vllm_xargs": "there are no extensions that would read it",
    "watermarking": "answers are not marked",
    "web_search_options": "put what was found into a message",
}
_NOT_VARIABLES = {
    "add_generation_prompt": "set it beside chat_template_kwargs",
    "chat_template": _NO_TEMPLATES,
    "continue_final_message": "set it beside chat_template_kwargs",
    "messages": "send them beside chat_template_kwargs",
    "strftime_now": "the server has the date",
    "tokenize": "/tokenize returns the tokens",
}
_FIELD = re.compile(r" - at (?:`key` in )?`\$\.?([^`.\[]*)[^`]*`$")

_HALF = re.compile(
    rb"(?<!\\)\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])"
    rb"|(?<!\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD])[c-fC-F][0-9a-fA-F]{2})"
)
"""An escape of one surrogate without the other."""

Body = TypeVar("Body", bound=msgspec.Struct)

# Built on import: it takes milliseconds, which the first request should not pay.
_DECODERS: dict[type[msgspec.Struct], msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind)
    for kind in (
        CompletionRequest,
        ChatRequest,
        TokenizeRequest,
        DetokenizeRequest,
        ResponsesRequest,
        MessagesRequest,
        CountTokensRequest,
        EmbeddingRequest,
        ScoreRequest,
        RerankRequest,
        ReleaseRequest,
        ReachRequest,
        MigrateRequest,
    )
}

_TOP_LEVEL: msgspec.json.Decoder[dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    dict[str, msgspec.Raw]
)


def parse_body(data: bytes, kind: type[Body]) -> Body:
    """Decode and validate the request body in `data`.

    Raises:
        BadRequestError: It is not JSON, a field has the wrong type or an impossible value, or asks
            for something unsupported.
    """
    try:
        body: Body = _DECODERS[kind].decode(data)
    except msgspec.ValidationError as error:
        raise _named(error, kind, data) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}{encoding_remedy(data)}", code="invalid_json"
        ) from error
    except RecursionError as error:
        raise BadRequestError("the body is nested too deeply", code="invalid_json") from error
    if isinstance(body, TextFields):
        _refuse_unsupported(body)
    if isinstance(body, ChatRequest | TokenizeRequest):
        _check_prompt_of_chat(body)
    if isinstance(body, SamplingFields):
        _check_ranges(body)
    if isinstance(body, PoolingFields):
        _check_pooling(body)
    return body


def top_level(data: bytes) -> Mapping[str, msgspec.Raw]:
    """Return the fields of a body, undecoded.

    Raises:
        BadRequestError: It is not a JSON object, or a name is not valid text.
    """
    try:
        return _TOP_LEVEL.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(
            f"the body is not valid JSON: {error}{encoding_remedy(data)}", code="invalid_json"
        ) from error


def encoding_remedy(data: bytes) -> str:
    """Return what to do about a body that is not JSON; empty if its encoding is not the reason."""
    marks = (codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    if data.startswith(marks):
        return "; send it in UTF-8, without a byte order mark"
    half = _HALF.search(data)
    if half is None:
        return ""
    return f"; {half[0].decode()} at byte {half.start()} is half of a character: send whole ones"


def _named(
    error: msgspec.ValidationError, kind: type[msgspec.Struct], data: bytes
) -> BadRequestError:
    """Return the error for a decoder's message, which ends with the place.

    If a field is missing from `data` and an unsupported one is there, it is the reason.
    """
    message = str(error)
    place = _FIELD.search(message)
    if place is not None and place[1]:
        choices = _choices(kind, place[1]) if message.startswith("Invalid enum value") else ""
        return BadRequestError(
            f"{place[1]}: {message[: place.start()]}{choices}", param=place[1], code="invalid_type"
        )
    if missing := re.search(r"missing required field `(\w+)`", message):
        if issubclass(kind, TextFields):
            for name, value in top_level(data).items():
                if kind.unsupported.get(name) == () and bytes(value) != b"null":
                    return _unsupported(name)
        return BadRequestError(
            f"{missing[1]} is missing", param=missing[1], code="missing_required_parameter"
        )
    return BadRequestError(message)


def _choices(kind: type[msgspec.Struct], name: str) -> str:
    """Return what a field may be, for its message; empty if its choices are further inside."""
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    types = next(field.type for field in described.fields if field.encode_name == name)
    options = types.types if isinstance(types, msgspec.inspect.UnionType) else (types,)
    literals = [each for each in options if isinstance(each, msgspec.inspect.LiteralType)]
    return "".join(f", use one of {', '.join(map(str, each.values))}" for each in literals)


def _refuse_unsupported(body: TextFields) -> None:
    for name, harmless in body.unsupported.items():
        value = getattr(body, name)
        is_harmless = any(_are_alike(value, each) for each in harmless)
        if value is None or is_harmless or name in body.unused:
            continue
        raise _unsupported(name)


def _unsupported(name: str) -> BadRequestError:
    remedy = f"; {_REMEDIES[name]}" if name in _REMEDIES else ""
    return BadRequestError(
        f"{name} is not supported by this server{remedy}",
        param=name,
        code="unsupported_parameter",
    )


def _are_alike(value: object, other: object) -> bool:
    """Whether two values are equal in JSON, where 0 is not false; 1.0 is 1."""
    is_number = isinstance(value, float) and not isinstance(other, bool)
    return value == other and (
        is_number or msgspec.json.encode(value) == msgspec.json.encode(other)
    )


def _check_ranges(body: SamplingFields) -> None:
    _check("n", body.n, 1, MAX_CHOICES)
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
    _check("seed", body.seed, -(2**63), 2**63 - 1)
    _check("prompt_logprobs", body.prompt_logprobs, 0, MAX_LOGPROBS)
    _check("stream_interval", body.stream_interval, 1, None)
    _check_what_prompts_share(body)
    if body.top_p == 0:
        raise BadRequestError("top_p is 0: it must be above 0 and at most 1", param="top_p")
    if "" in body.stops:
        raise BadRequestError("stop must not contain an empty string", param="stop")
    _check_sizes(body)
    if body.bad_words is not None and not all(word.strip() for word in body.bad_words):
        raise BadRequestError("bad_words must not contain an empty word", param="bad_words")
    if body.allowed_token_ids == []:
        raise BadRequestError(
            "allowed_token_ids is empty, so no token can be sampled: name some, or leave it out",
            param="allowed_token_ids",
        )
    if body.stream_options is not None and not body.stream:
        raise BadRequestError(
            "stream_options is only allowed when stream is true", param="stream_options"
        )
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequestError(
            "prompt_logprobs is not available when stream is true", param="prompt_logprobs"
        )
    if body.logprob_token_ids == []:
        raise BadRequestError(
            "logprob_token_ids is empty: name some, or leave it out", param="logprob_token_ids"
        )
    match body:
        case CompletionRequest():
            _refuse_tokens_without_logprobs(body, body.logprobs is not None)
            _check("logprobs", body.logprobs, 0, MAX_LOGPROBS)
            _check("max_tokens", body.max_tokens, 0, None)
            if body.max_tokens == 0 and not body.echo:
                raise BadRequestError(
                    "max_tokens is 0: it must be at least 1, or echo must be true",
                    param="max_tokens",
                )
        case ChatRequest():
            _refuse_tokens_without_logprobs(body, bool(body.logprobs))
            _check("max_tokens", body.max_tokens, 1, None)
            _check("max_completion_tokens", body.max_completion_tokens, 1, None)
            _check("top_logprobs", body.top_logprobs, 0, MAX_LOGPROBS)
            if body.top_logprobs and not body.logprobs:
                raise BadRequestError(
                    "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
                )
            if body.prediction is not None:
                body.prediction.predicted()
            if not body.messages:
                raise BadRequestError(
                    "messages is empty: send at least one message", param="messages"
                )


def _check_pooling(body: PoolingFields) -> None:
    _check_what_prompts_share(body)
    match body:
        case EmbeddingRequest():
            _check("dimensions", body.dimensions, 1, None)
            _check_number_of_texts("input", len(prompts_of(body.input, "input")))
        case ScoreRequest():
            _check_number_of_texts("text_2", len(body.pairs()))
        case RerankRequest():
            _check("top_n", body.top_n, 0, None)
            _check_number_of_texts("documents", len(body.documents))
            if not body.documents:
                raise BadRequestError(
                    "documents is empty: send at least one text", param="documents"
                )


def _check_number_of_texts(field: str, number: int) -> None:
    if number > MAX_TEXTS:
        raise BadRequestError(
            f"{field} has {number} texts, and at most {MAX_TEXTS} are accepted: send several "
            "requests",
            param=field,
        )


def _check_what_prompts_share(body: SamplingFields | PoolingFields) -> None:
    _check("priority", body.priority, -_MAX_INT32, _MAX_INT32)
    _check("truncate_prompt_tokens", body.truncate_prompt_tokens, -1, None)
    if body.truncate_prompt_tokens == 0:
        raise BadRequestError(
            "truncate_prompt_tokens is 0: it must be at least 1, or -1 for as many as fit",
            param="truncate_prompt_tokens",
        )
    if body.cache_salt == "":
        raise BadRequestError("cache_salt must not be empty", param="cache_salt")


def _check_prompt_of_chat(body: ChatRequest | TokenizeRequest) -> None:
    """Refuse contradictions about the prompt's end, and variables that templates get otherwise.

    Raises:
        BadRequestError: The request has one.
    """
    for name in (body.chat_template_kwargs or {}).keys() & _NOT_VARIABLES.keys():
        raise BadRequestError(
            f"chat_template_kwargs.{name} is not a variable of the template: "
            f"{_NOT_VARIABLES[name]}",
            param="chat_template_kwargs",
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequestError(
            "continue_final_message and add_generation_prompt are both true: the answer can "
            "either continue the last message or follow it; set only one",
            param="continue_final_message",
        )


def _check(name: str, value: float | None, minimum: float, maximum: float | None) -> None:
    if value is None or (value >= minimum and (maximum is None or value <= maximum)):
        return
    limits = f"at least {minimum}" if maximum is None else f"between {minimum} and {maximum}"
    raise BadRequestError(f"{name} is {value}: it must be {limits}", param=name)


def _refuse_tokens_without_logprobs(body: SamplingFields, has_logprobs: bool) -> None:
    if body.logprob_token_ids is not None and not has_logprobs:
        raise BadRequestError(
            "logprob_token_ids is only allowed with logprobs",
            param="logprob_token_ids",
        )


def _check_sizes(body: SamplingFields) -> None:
    """Limit what an engine, or this event loop, searches for each token."""
    stops, words = body.stops, body.bad_words or ()
    token_ids = body.logprob_token_ids or ()
    biases, stop_ids = body.logit_bias or (), body.stop_token_ids or ()
    chars = "characters in all"
    many = "to allow or forbid many tokens, use allowed_token_ids"
    for name, size, maximum, what, remedy in (
        ("stop", len(stops), MAX_STOPS, "strings", "give fewer"),
        ("stop", sum(map(len, stops)), MAX_STOP_CHARS, chars, "shorten the strings"),
        ("stop_token_ids", len(stop_ids), MAX_STOP_TOKEN_IDS, "ids", "give fewer"),
        ("logprob_token_ids", len(token_ids), MAX_LOGPROB_TOKEN_IDS, "ids", "give fewer"),
        ("bad_words", len(words), MAX_BAD_WORDS, "words", "forbid single tokens by logit_bias"),
        ("bad_words", sum(map(len, words)), MAX_BAD_WORDS_CHARS, chars, "give fewer words"),
        ("logit_bias", len(biases), MAX_LOGIT_BIAS, "tokens", many),
    ):
        if size > maximum:
            raise BadRequestError(
                f"{name} has {size} {what}, and at most {maximum} are allowed: {remedy}", param=name
            )
