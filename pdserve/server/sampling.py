"""Resolves sampling fields, the model's defaults and the engine's limits.

After this no field depends on a default. `response_format`, `structured_outputs` and `guided_*`
(vLLM's before 0.12) ask for a constraint, which `constraints` turns into a grammar.
Pure; knows no HTTP and no engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from pdserve.errors import BadRequestError, ContextLengthError
from pdserve.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pdserve.http.protocol import ResponseFormat, SamplingFields, StructuredOutputs
    from pdserve.text.answer.formats import AnswerReader
    from pdserve.text.load import Text
    from pdserve.wire.sampling import Grammar, Pooling

T = TypeVar("T")

_GREEDY_BELOW = 1e-5
_MAX_LOGIT_BIAS = 100.0
_SEED_MASK = 2**63 - 1
_ANY_OBJECT: Final = {"type": "object"}
_GUIDED: Final = ("json", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Values of fields whose names or defaults depend on the endpoint.

    Attributes:
        prompt_field: The endpoint's name for the prompt.
        max_tokens: The user's limit; None if not given.
        max_tokens_field: The endpoint's name for that limit.
        default_max_tokens: The endpoint's own limit; None is the model's, or all of the context.
        logprobs, prompt_logprobs: Alternatives per token of the output and of the prompt; None
            asks for no log-probabilities.
        pooling: How the prompt becomes a vector, if the request asks for one.
        reading: How to parse answers; None if they are text only.
        tells_reasoning: Whether the client gets reasoning and the log-probabilities of its tokens.
        prediction: Text that the answer is expected to resemble.
    """

    prompt_field: str
    max_tokens: int | None
    max_tokens_field: str = "max_tokens"
    default_max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    pooling: Pooling | None = None
    reading: AnswerReading | None = None
    tells_reasoning: bool = True
    prediction: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerReading:
    """How to parse the answers of a chat, and the grammar that they must follow for that.

    Attributes:
        new_machine: Makes the parser of one choice's answer; None if all of it is content.
        tools_grammar: Grammar for answers that call tools as requested.
        thought_end: The tokens that end a reasoning which the prompt has begun.
        thought_before: Otherwise, the grammar of `@answer` after a reasoning.
    """

    new_machine: Callable[[], AnswerReader | None]
    tools_grammar: str | None = None
    thought_end: tuple[int, ...] | None = None
    thought_before: str | None = None


class Wanted(msgspec.Struct, frozen=True):
    """One constraint as a client gave it.

    Attributes:
        param: Name of its field.
        kind: json, regex, choice or grammar.
        value: A schema, a text or a list of texts.
        options: Options of llguidance for JSON.
        before: The grammar of `@answer` and the text that may precede it, in Lark.
    """

    param: str
    kind: str
    value: Any
    options: dict[str, Any] = {}
    before: str | None = None


def choice_seed(seed: int, index: int) -> int:
    """Return the seed of choice `index`: a function of both, and `seed` itself for 0."""
    if index == 0:
        return seed & _SEED_MASK
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & _SEED_MASK


def output_limit(
    fields: SamplingFields,
    asked: Asked,
    *,
    num_prompt_tokens: int,
    max_model_len: int,
    model_default: int | None,
) -> int:
    """Return the maximum number of output tokens of a request: as many as asked for, if they fit.

    Agents ask for the same large number whatever the prompt's length.

    Args:
        model_default: `max_new_tokens` of the model's generation config.

    Raises:
        ContextLengthError: The prompt leaves no room.
    """
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt_tokens} prompt tokens; shorten the prompt to at most "
            f"{max_model_len - 1}: one is left for output.",
            param=asked.prompt_field,
        )
    default = asked.default_max_tokens or model_default or room
    limit = min(room, default if asked.max_tokens is None else asked.max_tokens)
    if fields.min_tokens is not None and fields.min_tokens > max(limit, 1):
        raise BadRequestError(
            f"min_tokens is {fields.min_tokens}: it must be at most "
            f"{asked.max_tokens_field} ({limit})",
            param="min_tokens",
        )
    return limit


def resolve_sampling(
    fields: SamplingFields,
    asked: Asked,
    text: Text,
    *,
    max_tokens: int,
    seed: int,
    bad_words: Iterable[Sequence[int]],
    grammar: Grammar | None,
) -> SamplingParams:
    """Return the sampling parameters of one choice.

    Args:
        bad_words: Token ids of `spellings_of` that field.

    Raises:
        BadRequestError: A token id is outside the vocabulary.
    """
    defaults = text.defaults
    temperature = _given(fields.temperature, defaults.temperature)
    allowed = fields.allowed_token_ids
    if len(allowed or ()) > text.vocab_size:
        raise BadRequestError(
            f"allowed_token_ids has {len(allowed or ())} ids, but the vocabulary has only "
            f"{text.vocab_size}: name each id once",
            param="allowed_token_ids",
        )
    check_token_ids("stop_token_ids", fields.stop_token_ids or (), text.vocab_size)
    check_token_ids("logprob_token_ids", fields.logprob_token_ids or (), text.vocab_size)
    check_token_ids("allowed_token_ids", allowed or (), text.vocab_size)
    check_token_ids("logit_bias", fields.logit_bias or (), text.vocab_size)
    words = dict.fromkeys(tuple(word) for word in bad_words if word)
    return SamplingParams(
        max_tokens=max_tokens,
        seed=seed,
        min_tokens=min(fields.min_tokens or 0, max_tokens),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=_given(fields.top_p, defaults.top_p),
        top_k=max(0, _given(fields.top_k, defaults.top_k)),
        min_p=_given(fields.min_p, defaults.min_p),
        presence_penalty=_given(fields.presence_penalty, 0.0),
        frequency_penalty=_given(fields.frequency_penalty, 0.0),
        repetition_penalty=_given(fields.repetition_penalty, defaults.repetition_penalty),
        eos_token_ids=defaults.eos_token_ids,
        stop_token_ids=tuple(dict.fromkeys(fields.stop_token_ids or ())),
        ignore_eos=bool(fields.ignore_eos),
        logit_bias={
            token_id: max(-_MAX_LOGIT_BIAS, min(_MAX_LOGIT_BIAS, bias))
            for token_id, bias in (fields.logit_bias or {}).items()
        },
        allowed_token_ids=None if allowed is None else tuple(dict.fromkeys(allowed)),
        bad_words=tuple(words),
        grammar=grammar,
        logprobs=asked.logprobs,
        logprob_token_ids=tuple(dict.fromkeys(fields.logprob_token_ids or ())),
        prompt_logprobs=asked.prompt_logprobs,
        pooling=asked.pooling,
    )


def spellings_of(words: Iterable[str]) -> list[str]:
    """Return the spellings of `words` in a text: each at its start, and after a space."""
    return [spelling for word in words for spelling in (word.lstrip(), " " + word.lstrip())]


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuse ids that are not in the vocabulary.

    Raises:
        BadRequestError: One of them is not.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise BadRequestError(
            f"{name} contains token id {wrong}, but the vocabulary has ids 0 to {vocab_size - 1}",
            param=name,
        )


def constraint_in(fields: SamplingFields, tools_grammar: str | None) -> Wanted | None:
    """Return the constraint that a request asks for; None if its output is free.

    Args:
        tools_grammar: Grammar required by tool calls, in Lark; None: none is.

    Raises:
        BadRequestError: The request asks for two constraints, or an unsupported one.
    """
    found = [
        *_in_response_format(fields.response_format),
        *_in_structured_outputs(fields.structured_outputs),
        *_in_guided(fields),
        *([Wanted("tools", "grammar", tools_grammar)] if tools_grammar is not None else []),
    ]
    given = fields.structured_outputs
    if given is not None and not found:
        raise BadRequestError(
            "structured_outputs is empty: give json, regex, choice, grammar or json_object",
            param="structured_outputs",
        )
    if not found:
        return None
    spacing = _spacing(given)
    if spacing and not any(wanted.kind == "json" for wanted in found):
        raise BadRequestError(
            "structured_outputs sets how JSON is spaced, but nothing asks for JSON: give json, "
            "json_object or a response_format",
            param="structured_outputs",
        )
    if len(found) > 1:
        names = " and ".join(wanted.param for wanted in found)
        raise BadRequestError(
            f"{names} ask for two kinds of output: give only one of them", param=found[1].param
        )
    if fields.ignore_eos:
        raise BadRequestError(
            f"ignore_eos cannot be combined with {found[0].param}, whose output must be complete: "
            "leave one out",
            param="ignore_eos",
        )
    return msgspec.structs.replace(found[0], options=spacing)


def _in_response_format(given: ResponseFormat | None) -> Iterator[Wanted]:
    param = "response_format"
    match given.type if given is not None else "text":
        case "text":
            pass
        case "json_object":
            yield Wanted(param, "json", _ANY_OBJECT)
        case "json_schema":
            described = given.json_schema if given is not None else None
            if described is None or described.json_schema is None:
                raise BadRequestError(
                    "response_format has type json_schema, but no json_schema with a schema",
                    param=param,
                )
            yield Wanted(param, "json", described.json_schema)
        case other:
            raise BadRequestError(
                f"response_format has type {other!r}: it must be text, json_object or json_schema",
                param=param,
            )


def _in_structured_outputs(given: StructuredOutputs | None) -> Iterator[Wanted]:
    if given is None:
        return
    param = "structured_outputs"
    for name in ("structural_tag", "disable_additional_properties"):
        if getattr(given, name):
            raise BadRequestError(
                f"structured_outputs.{name} is not supported by this server",
                param=param,
                code="unsupported_parameter",
            )
    for name in _GUIDED:
        if (value := getattr(given, name)) is not None:
            yield Wanted(f"{param}.{name}", name, value)
    if given.json_object:
        yield Wanted(f"{param}.json_object", "json", _ANY_OBJECT)


def _spacing(given: StructuredOutputs | None) -> dict[str, Any]:
    """Return the options of JSON's white space, whatever asks for the JSON; as in vLLM."""
    options: dict[str, Any] = {}
    if given is not None and given.disable_any_whitespace:
        options["whitespace_flexible"] = False
    if given is not None and given.whitespace_pattern is not None:
        options["whitespace_pattern"] = given.whitespace_pattern
    return options


def _in_guided(fields: SamplingFields) -> Iterator[Wanted]:
    for kind in _GUIDED:
        value = getattr(fields, f"guided_{kind}")
        if value is not None:
            yield Wanted(f"guided_{kind}", kind, value)
