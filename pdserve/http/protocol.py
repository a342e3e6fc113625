"""OpenAI's request bodies.

Fields have vLLM's names and meanings, and every field that vLLM's server knows is here. `parsing`
refuses unsupported ones, unless their value has no effect. Knows no tokenizer and no model.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

import msgspec

from pdserve.config.objectives import MIN_SLO_MS
from pdserve.errors import BadRequestError
from pdserve.wire.hop import KVTransferParams

MAX_CHOICES = 1024
MAX_SLO_MS = 3.6e6
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How soon a client wants its tokens. Predicting proxies use it; engines do not.

    Attributes:
        ttft_ms: Time to the first token.
        itl_ms: Time from each token to the next.
    """

    ttft_ms: float | None = None
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        for name, milliseconds in (("ttft_ms", self.ttft_ms), ("itl_ms", self.itl_ms)):
            if milliseconds is not None and not MIN_SLO_MS <= milliseconds <= MAX_SLO_MS:
                raise ValueError(
                    f"{name} is {milliseconds:g}: it must be in milliseconds, {MIN_SLO_MS:g} to "
                    f"{MAX_SLO_MS:g}"
                )


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """The `json_schema` of a response format; `strict` changes nothing, outputs always follow it.

    Attributes:
        json_schema: An object, or true or false.
    """

    name: str | None = None
    json_schema: Any = msgspec.field(name="schema", default=None)
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's `response_format`."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """vLLM's `structured_outputs`: one of the first five, and the spacing of JSON.

    Attributes:
        json: A JSON schema, or its text.
        json_object: Any JSON object.
        grammar: In Lark, or in the EBNF of llama.cpp (GBNF).
        disable_any_whitespace: JSON without white space between its tokens.
        whitespace_pattern: A regular expression for the white space allowed there instead.
    """

    json: Any = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = None
    structural_tag: Any = None


class PredictionPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a prediction."""

    type: str
    text: str


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Text that the answer will probably resemble: it changes no token, only the speed."""

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


class TextFields(msgspec.Struct, frozen=True, kw_only=True):
    """A body about text.

    Attributes:
        unsupported: Fields that are known but unsupported, each with the values that have no
            effect.
    """

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {}

    @property
    def unused(self) -> frozenset[str]:
        """Unsupported fields that have no effect because of the value of another field."""
        return frozenset()


class SamplingFields(TextFields, frozen=True, kw_only=True):
    """The fields that completions and chat share; None means not given.

    Attributes:
        user: Name of the user; ignored, as in vLLM.
        session_id: Name of the conversation; a predicting proxy routes its requests alike.
        logprob_token_ids: Tokens to report log-probabilities for, instead of the likeliest ones.
        truncate_prompt_tokens: Maximum prompt tokens, beyond which prompts are cut; -1 is as many
            as fit.
        truncation_side: The end to cut off; left by default.
        stream_interval: Tokens per event of a stream, except in its first and last one.
    """

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
    session_id: str | None = None
    slo: Objectives | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    logprob_token_ids: list[int] | None = None
    return_tokens_as_token_ids: bool | None = None
    stream_interval: int | None = None
    kv_transfer_params: KVTransferParams | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    # Known, not supported: each must have one of the values in `unsupported`, or be absent.
    use_beam_search: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    repetition_detection: Any = None
    spaces_between_special_tokens: Any = None
    thinking_token_budget: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None
    request_id: Any = None
    ec_transfer_params: Any = None
    routed_experts_prompt_start: Any = None
    return_token_offsets: Any = None
    return_mm_kwargs: Any = None
    mm_payload: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "use_beam_search": (False,),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "repetition_detection": (),
        "spaces_between_special_tokens": (True,),
        "thinking_token_budget": (-1,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
        "request_id": (),
        "ec_transfer_params": (),
        "routed_experts_prompt_start": (0,),
        "return_token_offsets": (False,),
        "return_mm_kwargs": (True,),
        "mm_payload": ("tensors",),
    }

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

        As in vLLM, only if the stream also ends with a usage chunk.
        """
        options = self.stream_options
        return self.include_usage and options is not None and bool(options.continuous_usage_stats)


Prompts = str | list[str | int | list[int]]
"""One text or one list of token ids, or several of one kind."""


def prompts_of(prompts: Prompts, field: str) -> list[str] | list[list[int]]:
    """Return the prompts of a field, either all as texts or all as token ids.

    Raises:
        BadRequestError: There is none, or they are of mixed kinds.
    """
    match prompts:
        case str(text):
            return [text]
        case [] | [[]]:
            raise BadRequestError(f"{field} is empty", param=field)
        case items:
            kinds = set(map(type, items))
            if kinds == {int}:
                return [cast("list[int]", items)]
            if kinds == {list}:
                return cast("list[list[int]]", items)
            if kinds == {str}:
                return cast("list[str]", items)
    raise BadRequestError(
        f"{field} must be a string, a list of strings, a list of token ids or a list of lists of "
        "token ids, and not a mixture",
        param=field,
    )


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of `POST /v1/completions`."""

    prompt: Prompts
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
        found = prompts_of(self.prompt, "prompt")
        num_choices = self.num_choices * len(found)
        if num_choices > MAX_CHOICES:
            raise BadRequestError(
                f"the request has {num_choices} choices (n for each prompt), and at most "
                f"{MAX_CHOICES} are allowed: send several requests",
                param="n" if self.num_choices > 1 else "prompt",
            )
        return found


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`.

    Attributes:
        continue_final_message: The answer continues the last message, which stays open.
        documents: Passed to the chat template, like `chat_template_kwargs`.
        echo: The answer starts with the last message, if that is the assistant's.
    """

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    echo: bool | None = None
    return_prompt_text: bool | None = None

    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = None

    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Prediction | None = None
    web_search_options: Any = None
    chat_template: Any = None
    verbosity: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = SamplingFields.unsupported | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "chat_template": (),
        "verbosity": ("medium",),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    @property
    def unused(self) -> frozenset[str]:
        """Functions that must not be called and are not in the prompt."""
        return frozenset(["functions"] if self.function_call == "none" else [])

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Tools that may be called; others are not in the prompt."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables for the chat template besides messages and tools."""
        said: dict[str, Any] = {}
        if self.documents is not None:
            said["documents"] = self.documents
        if self.reasoning_effort is not None:  # as templates of several families call it
            said["reasoning_effort"] = self.reasoning_effort
            said["enable_thinking"] = self.reasoning_effort != "none"
        if self.reasoning_effort == "none":
            said["thinking"] = False
        return said | (self.chat_template_kwargs or {})


class TokenizeRequest(TextFields, frozen=True, kw_only=True):
    """The body of `POST /tokenize`: a prompt, or chat messages with optional tools."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None

    chat_template: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "chat_template": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
    }

    @property
    def template_variables(self) -> dict[str, Any]:
        """See `ChatRequest`."""
        return self.chat_template_kwargs or {}


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None
