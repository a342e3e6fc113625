"""`POST /v1/embeddings`, `/v1/score` and `/v1/rerank`: vectors of texts and similarities.

A vector comes from the prompt alone: its last step also samples a token, which is discarded. So
any engine that computes prompts can do it, and nothing is handed over.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from aiohttp import web

from pdserve.errors import BadRequestError, InternalError
from pdserve.http.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from pdserve.http.protocol import CompletionRequest, prompts_of
from pdserve.server.account import serving
from pdserve.server.intake import cut_prompts, encode_prompts, read_request
from pdserve.server.plan import make_text_request
from pdserve.server.reply import send_json
from pdserve.server.sampling import Asked
from pdserve.server.service import SERVICE
from pdserve.text.pooling import PoolingStyle

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from pdserve.http.pooling_bodies import PoolingFields
    from pdserve.server.text_request import TextRequest

    Vectors = NDArray[np.float32]


async def create_embedding(request: web.Request) -> web.StreamResponse:
    """Answer with a vector for each text."""
    body, _ = await read_request(request, EmbeddingRequest)
    special = body.add_special_tokens is not False

    def answer(text_request: TextRequest, style: PoolingStyle, vectors: Vectors) -> dict[str, Any]:
        if body.dimensions is not None:
            if body.dimensions > vectors.shape[1]:
                raise BadRequestError(
                    f"dimensions is {body.dimensions}: this model's vectors have "
                    f"{vectors.shape[1]} numbers",
                    param="dimensions",
                )
            vectors = vectors[:, : body.dimensions]
        is_scaled = style.is_normalized if body.use_activation is None else body.use_activation
        if is_scaled:
            vectors = _scaled(vectors)
        rows = [
            base64.b64encode(row.astype("<f4").tobytes()).decode()
            if body.encoding_format == "base64"
            else row.tolist()
            for row in vectors
        ]
        data = [
            {"object": "embedding", "index": index, "embedding": row}
            for index, row in enumerate(rows)
        ]
        return _around(text_request, "embd") | {"object": "list", "data": data}

    texts = prompts_of(body.input, "input")
    return await _answer(request, body, texts, answer, field="input", special=special)


async def create_score(request: web.Request) -> web.StreamResponse:
    """Answer with the similarity of each pair of texts: the cosine of their vectors."""
    body, _ = await read_request(request, ScoreRequest)
    pairs = body.pairs()

    def answer(text_request: TextRequest, style: PoolingStyle, vectors: Vectors) -> dict[str, Any]:
        at = {text: index for index, text in enumerate(texts)}
        scaled = _scaled(vectors)
        data = [
            {"index": index, "object": "score", "score": _cosine(scaled, at[one], at[other])}
            for index, (one, other) in enumerate(pairs)
        ]
        return _around(text_request, "score") | {"object": "list", "data": data}

    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    return await _answer(request, body, texts, answer, field="text_2")


async def create_rerank(request: web.Request) -> web.StreamResponse:
    """Answer with the documents, the most similar to the query first."""
    body, _ = await read_request(request, RerankRequest)

    def answer(text_request: TextRequest, style: PoolingStyle, vectors: Vectors) -> dict[str, Any]:
        scaled = _scaled(vectors)
        at = {text: index for index, text in enumerate(texts)}
        scores = [_cosine(scaled, 0, at[document]) for document in body.documents]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            {"index": index, "relevance_score": scores[index]}
            | (
                {"document": {"text": body.documents[index]}}
                if body.return_documents is not False
                else {}
            )
            for index in best[: body.top_n or None]
        ]
        return _around(text_request, "rerank") | {"results": results}

    texts = list(dict.fromkeys([body.query, *body.documents]))
    return await _answer(request, body, texts, answer, field="documents")


async def _answer(
    request: web.Request,
    body: PoolingFields,
    texts: Sequence[str] | list[list[int]],
    answer: Callable[[TextRequest, PoolingStyle, Vectors], dict[str, Any]],
    *,
    field: str,
    special: bool = True,
) -> web.StreamResponse:
    """Make the vectors of texts, and build the answer from them.

    Args:
        field: Name of the body's field that has the texts.
        special: Whether to add the tokenizer's special tokens.
    """
    service = request.app[SERVICE]
    service.resolve_model(body.model)
    text, info = service.require_ready()
    if text.pooling.pooling is None:
        raise BadRequestError(text.pooling.refusal, param="model", code="unsupported_parameter")
    fields = _fields(body)
    token_ids = await encode_prompts(
        request, fields, texts, add_special_tokens=special, field=field
    )
    token_ids = cut_prompts(token_ids, fields, max_tokens=1, max_model_len=info.max_model_len)
    text_request = await make_text_request(
        request,
        fields,
        token_ids,
        Asked(
            prompt_field=field,
            max_tokens=1,
            default_max_tokens=1,
            logprobs=None,
            prompt_logprobs=None,
            pooling=text.pooling.pooling,
        ),
    )
    async with serving(request, text_request):
        await text_request.start()
        async for _ in text_request.deltas():
            pass  # its token is discarded
        vectors = _vectors([choice.pooled for choice in text_request.choices])
        return await send_json(request, text_request, answer(text_request, text.pooling, vectors))


def _fields(body: PoolingFields) -> CompletionRequest:
    """Return a body's fields as those of a completion of one token.

    Raises:
        BadRequestError: The request involves another engine.
    """
    params = body.kv_transfer_params
    if params is not None and (params.do_remote_prefill or params.do_remote_decode):
        raise BadRequestError(
            "kv_transfer_params is not supported here, because a single engine makes a vector: "
            "leave it out",
            param="kv_transfer_params",
        )
    return CompletionRequest(
        prompt=[],
        model=body.model,
        max_tokens=1,
        temperature=0.0,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        priority=body.priority,
        cache_salt=body.cache_salt,
        kv_transfer_params=params,
    )


def _vectors(pooled: Sequence[bytes | None]) -> Vectors:
    import numpy as np  # a tenth of a server's start, and no other request needs it

    rows = []
    for row in pooled:
        if row is None:
            raise InternalError("an engine has given no vector for a prompt")
        rows.append(np.frombuffer(row, dtype="<f4"))
    return np.stack(rows)


def _scaled(vectors: Vectors) -> Vectors:
    """Return vectors of length 1; those of zeros stay as they are."""
    import numpy as np

    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    lengths[lengths == 0] = 1
    scaled: Vectors = vectors / lengths
    return scaled


def _cosine(scaled: Vectors, one: int, other: int) -> float:
    return min(1.0, max(-1.0, float(scaled[one] @ scaled[other])))


def _around(text_request: TextRequest, kind: str) -> dict[str, Any]:
    """Return the fields that every answer has."""
    num_tokens = text_request.num_prompt_tokens
    return {
        "id": f"{kind}-{text_request.request_id}",
        "created": text_request.created,
        "model": text_request.model,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
