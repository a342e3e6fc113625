"""The request bodies of other protocols: OpenAI's Responses and Anthropic's Messages.

They have each field that vLLM's servers know. `pdserve.dialects` reads the contents of lists and
objects.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pdserve.http.protocol import Objectives, TextFields

JsonObject = dict[str, Any]


class ResponsesRequest(TextFields, frozen=True, kw_only=True):
    """The body of `POST /v1/responses`. No response is stored.

    Attributes:
        user, safety_identifier, prompt_cache_key, max_tool_calls: Ignored; the last one limits
            calls of built-in tools, which this server does not have.
    """

    input: str | list[JsonObject]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = None
    reasoning: JsonObject | None = None
    text: JsonObject | None = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    metadata: JsonObject | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    # vLLM's further ones, which are those of a chat.
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    slo: Objectives | None = None
    structured_outputs: Any = None
    include_reasoning: bool | None = None
    chat_template_kwargs: JsonObject | None = None

    background: Any = None
    store: Any = None
    previous_response_id: Any = None
    previous_response: Any = None
    previous_input_messages: Any = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None
    service_tier: Any = None
    stream_options: Any = None
    enable_response_messages: Any = None
    request_id: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    media_io_kwargs: Any = None
    mm_payload: Any = None
    mm_processor_kwargs: Any = None
    return_mm_kwargs: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "background": (False,),
        "store": (False,),
        "previous_response_id": (),
        "previous_response": (),
        "previous_input_messages": ([],),
        "conversation": (),
        "prompt": (),
        "context_management": ([],),
        "moderation": (),
        "service_tier": ("auto", "default"),
        "stream_options": ({}, {"include_obfuscation": False}),
        "enable_response_messages": (False,),
        "request_id": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "media_io_kwargs": ({},),
        "mm_payload": ("tensors",),
        "mm_processor_kwargs": ({},),
        "return_mm_kwargs": (True,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }


class CountTokensRequest(TextFields, frozen=True, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: the parts that are in the prompt."""

    messages: list[JsonObject]
    model: str | None = None
    system: str | list[JsonObject] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: JsonObject | None = None
    thinking: JsonObject | None = None
    output_config: JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None

    mcp_servers: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {"mcp_servers": ([],)}


class MessagesRequest(CountTokensRequest, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: JsonObject | None = None
    cache_salt: str | None = None

    container: Any = None
    service_tier: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        **CountTokensRequest.unsupported,
        "container": (),
        "service_tier": ("auto", "standard_only"),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "mm_payload": ("tensors",),
        "return_mm_kwargs": (True,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }
