"""The response bodies, as `/openapi.json` describes them.

They are only the outline that clients rely on: an answer may contain more. Handlers write answers
themselves, and tests compare them with these structs.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(msgspec.Struct, frozen=True):
    """Every error."""

    error: ErrorObject


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Cached tokens of the prompts when they were prefilled, each prompt counted once."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    """Reasoning tokens of the output, and the results of a prediction's drafts if reported."""

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct, frozen=True):
    """Counts of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class Completion(msgspec.Struct, frozen=True):
    """The answer of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class CalledFunction(msgspec.Struct, frozen=True):
    """The called function; the arguments are the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call of one of the offered tools."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(msgspec.Struct, frozen=True):
    """The assistant's text, reasoning and tool calls."""

    role: str
    content: str | None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: Message
    finish_reason: str | None
    logprobs: dict[str, Any] | None


class ChatCompletion(msgspec.Struct, frozen=True):
    """The answer of `/v1/chat/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Response(msgspec.Struct, frozen=True):
    """The answer of `/v1/responses`."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any]


class AnthropicMessage(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages`."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str
    stop_sequence: str | None
    usage: dict[str, int]


class InputTokens(msgspec.Struct, frozen=True):
    """The answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class AnthropicErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, for clients of Anthropic's API."""

    type: str
    message: str


class AnthropicErrorAnswer(msgspec.Struct, frozen=True):
    """Every error of `/v1/messages`."""

    type: str
    error: AnthropicErrorObject


class PromptUsage(msgspec.Struct, frozen=True):
    """Token counts of requests that generate nothing."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingRow(msgspec.Struct, frozen=True):
    """One vector: its numbers, or their bytes in base64."""

    object: str
    index: int
    embedding: list[float] | str


class Embeddings(msgspec.Struct, frozen=True):
    """The answer of `/v1/embeddings`."""

    id: str
    object: str
    created: int
    model: str
    data: list[EmbeddingRow]
    usage: PromptUsage


class Score(msgspec.Struct, frozen=True):
    """Similarity of two texts: at most 1."""

    index: int
    object: str
    score: float


class Scores(msgspec.Struct, frozen=True):
    """The answer of `/v1/score`."""

    id: str
    object: str
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage


class Ranked(msgspec.Struct, frozen=True):
    """A document, by its index in the request."""

    index: int
    relevance_score: float


class Ranking(msgspec.Struct, frozen=True):
    """The answer of `/v1/rerank`."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class Model(msgspec.Struct, frozen=True):
    """A model."""

    id: str
    object: str
    max_model_len: int | None


class Models(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    object: str
    data: list[Model]


class Tokens(msgspec.Struct, frozen=True):
    """The answer of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    """The answer of `/detokenize`."""

    prompt: str


class Version(msgspec.Struct, frozen=True):
    """The answer of `/version`."""

    version: str


class ServerLoad(msgspec.Struct, frozen=True):
    """The answer of `/load`.

    Attributes:
        server_load: Running text requests. vLLM counts them only if enabled.
    """

    server_load: int
