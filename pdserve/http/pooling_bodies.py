"""The request bodies of embeddings, scores and reranking."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pdserve.errors import BadRequestError
from pdserve.http.protocol import Prompts, TextFields
from pdserve.wire.hop import KVTransferParams

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_TEXTS = 2048
"""OpenAI's."""


class PoolingFields(TextFields, frozen=True, kw_only=True):
    """The common fields of such bodies, as in vLLM.

    Attributes:
        user: Ignored.
        truncate_prompt_tokens, truncation_side: As for completions.
        kv_transfer_params: Set by a proxy; no other engine is involved.
    """

    model: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: KVTransferParams | None = None

    request_id: Any = None
    padding: Any = None
    mm_processor_kwargs: Any = None
    task: Any = None
    stream: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = {
        "request_id": (),
        "padding": ("do_not_pad",),
        "mm_processor_kwargs": ({},),
        "task": ("embed",),
        "stream": (False,),
    }


class EmbeddingRequest(PoolingFields, frozen=True, kw_only=True):
    """The body of `POST /v1/embeddings`.

    Attributes:
        dimensions: Number of leading values of a vector to return; it is scaled to length 1 again.
        use_activation: Whether vectors are scaled to length 1; by default the model decides.
    """

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    use_activation: bool | None = None
    add_special_tokens: bool | None = None

    messages: Any = None
    embed_dtype: Any = None
    endianness: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = PoolingFields.unsupported | {
        "messages": (),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
    }


class ScoringFields(PoolingFields, frozen=True, kw_only=True):
    """The common fields of scores and reranking."""

    use_activation: Any = None
    instruction: Any = None
    chat_template_kwargs: Any = None
    max_tokens_per_doc: Any = None
    max_tokens_per_query: Any = None

    unsupported: ClassVar[dict[str, tuple[object, ...]]] = PoolingFields.unsupported | {
        "use_activation": (True,),
        "instruction": (),
        "chat_template_kwargs": ({},),
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
    }


class ScoreRequest(ScoringFields, frozen=True, kw_only=True):
    """The body of `POST /v1/score`: one text and several others, or the same number of both.

    Both fields have several names, as in vLLM.
    """

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None

    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of texts to score.

        Raises:
            BadRequestError: There are none, too many, or different numbers of both.
        """
        for first, second in (
            ("text_1", "text_2"), ("queries", "documents"), ("queries", "items"),
            ("data_1", "data_2"),
        ):  # fmt: skip
            ours, theirs = getattr(self, first), getattr(self, second)
            if ours is not None and theirs is not None:
                return _paired(_listed(ours, first), _listed(theirs, second), second)
        raise BadRequestError("text_1 or text_2 is missing: give both", param="text_1")


class RerankRequest(ScoringFields, frozen=True, kw_only=True):
    """The body of `POST /v1/rerank`.

    Attributes:
        top_n: Number of best documents to return; 0 or None returns all.
    """

    query: str
    documents: list[str]
    top_n: int | None = None
    return_documents: bool | None = None


POOLING: Final[Mapping[str, type[PoolingFields]]] = {
    "/v1/embeddings": EmbeddingRequest,
    "/v1/score": ScoreRequest,
    "/score": ScoreRequest,
    "/v1/rerank": RerankRequest,
    "/rerank": RerankRequest,
}
"""The bodies of paths that turn prompts into vectors, by path; as in vLLM, some have two."""


def _listed(texts: str | list[str], field: str) -> list[str]:
    listed = [texts] if isinstance(texts, str) else texts
    if not listed:
        raise BadRequestError(f"{field} is empty", param=field)
    return listed


def _paired(ours: list[str], theirs: list[str], field: str) -> list[tuple[str, str]]:
    if len(ours) == 1:
        ours = ours * len(theirs)
    if len(ours) != len(theirs):
        raise BadRequestError(
            f"{field} has {len(theirs)} texts for {len(ours)}: give the same number, or one text "
            "and several others",
            param=field,
        )
    return list(zip(ours, theirs, strict=True))
