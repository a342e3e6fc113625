"""Vectors of prompts. A toy's vector has how many of its prompt's tokens have each rest by 8."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from pdserve.text.pooling import PoolingStyle
from pdserve.wire.sampling import Pooling
from tests.server.conftest import make_engine, serving

EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"


def counted(token_ids) -> np.ndarray:
    return np.bincount(np.asarray(token_ids) % 8, minlength=8).astype("<f4")


def scaled(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def vectors(answer) -> list[np.ndarray]:
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return [np.array(each["embedding"]) for each in answer["data"]]


async def test_each_text_has_a_vector_of_length_1_in_its_order(text):
    engine = make_engine(text)
    async with serving(text, engine) as server:
        texts = ["a dog", "the quick brown fox", "a dog"]
        answer = await server.ok(EMBEDDINGS, {"input": texts}, X_Request_Id="abc")
    prompts = [text.tokenizer.encode(each, add_special_tokens=True) for each in texts]
    for vector, prompt in zip(vectors(answer), prompts, strict=True):
        np.testing.assert_allclose(vector, scaled(counted(prompt)), rtol=1e-6)
    num_tokens = sum(map(len, prompts))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["id"], answer["object"], answer["model"]) == ("embd-abc", "list", "tiny")
    assert [request.sampling.pooling for request in engine.requests] == [Pooling.LAST] * 3
    assert [request.sampling.max_tokens for request in engine.requests] == [1] * 3
    assert not engine.running


@pytest.mark.parametrize("prompt", [[60, 61, 62], [[60, 61, 62]]])
async def test_token_ids_are_taken_as_they_are(server, prompt):
    [vector] = vectors(await server.ok(EMBEDDINGS, {"input": prompt, "use_activation": False}))
    np.testing.assert_array_equal(vector, counted([60, 61, 62]))


async def test_fewer_numbers_are_scaled_again(server):
    body = {"input": [60, 61, 62, 68], "dimensions": 5}
    [vector] = vectors(await server.ok(EMBEDDINGS, body))
    np.testing.assert_allclose(vector, scaled(counted([60, 61, 62, 68])[:5]), rtol=1e-6)
    status, error = await server.refused(EMBEDDINGS, body | {"dimensions": 9})
    assert (status, error["param"]) == (400, "dimensions")


async def test_base64_has_the_bytes_of_little_endian_numbers(server):
    plain = await server.ok(EMBEDDINGS, {"input": "a dog"})
    coded = await server.ok(EMBEDDINGS, {"input": "a dog", "encoding_format": "base64"})
    data = base64.b64decode(coded["data"][0]["embedding"])
    np.testing.assert_array_equal(np.frombuffer(data, "<f4"), vectors(plain)[0].astype("<f4"))


async def test_openais_client_gets_vectors(server, openai):
    url = f"{server.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
        answer = await client.embeddings.create(model="tiny", input=["a dog", "a fox"])
    assert len(answer.data) == 2
    assert len(answer.data[0].embedding) == 8
    assert answer.usage.prompt_tokens > 0


async def test_long_texts_are_cut_where_that_is_asked_for(text):
    async with serving(text, make_engine(text, max_model_len=32)) as server:
        long = {"input": "dog " * 100}
        status, _ = await server.refused(EMBEDDINGS, long)
        answer = await server.ok(EMBEDDINGS, long | {"truncate_prompt_tokens": -1})
    assert status == 400
    assert answer["usage"]["prompt_tokens"] == 31


async def test_the_models_own_way_is_taken(text):
    engine = make_engine(text)
    style = PoolingStyle(Pooling.MEAN, is_normalized=False)
    async with serving(replace(text, pooling=style), engine) as server:
        [vector] = vectors(await server.ok(EMBEDDINGS, {"input": [60, 60, 61]}))
    assert engine.requests[0].sampling.pooling is Pooling.MEAN
    assert np.linalg.norm(vector) > 1


async def test_a_way_that_is_not_served_is_said(text):
    style = PoolingStyle(None, refusal="its pooling is cls")
    async with serving(replace(text, pooling=style), make_engine(text)) as server:
        for path, body in (
            (EMBEDDINGS, {"input": "a"}),
            (SCORE, {"text_1": "a", "text_2": "b"}),
            (RERANK, {"query": "a", "documents": ["b"]}),
        ):
            status, error = await server.refused(path, body)
            assert (status, error["message"]) == (400, "its pooling is cls")


async def test_a_score_is_the_cosine_between_two_texts(text):
    async with serving(text, make_engine(text)) as server:
        one = {"text_1": "a dog", "text_2": ["a dog", "the quick brown fox"]}
        answer = await server.ok(SCORE, one)
        many = {"queries": ["a dog", "a fox"], "documents": ["the fox", "a dog"]}
        pairs = await server.ok(SCORE, many)

    def cosine(first: str, second: str) -> float:
        ours, theirs = (
            scaled(counted(text.tokenizer.encode(each, add_special_tokens=True)))
            for each in (first, second)
        )
        return pytest.approx(float(ours @ theirs), rel=1e-5)

    scores = [each["score"] for each in answer["data"]]
    assert scores == [cosine("a dog", "a dog"), cosine("a dog", "the quick brown fox")]
    assert scores[0] == pytest.approx(1)
    assert [each["score"] for each in pairs["data"]] == [
        cosine("a dog", "the fox"),
        cosine("a fox", "a dog"),
    ]


async def test_documents_come_with_the_likest_first(server):
    documents = ["the quick brown fox", "a dog", "a lazy dog"]
    body = {"query": "a dog", "documents": documents}
    answer = await server.ok(RERANK, body)
    results = answer["results"]
    scores = [each["relevance_score"] for each in results]
    assert scores == sorted(scores, reverse=True)
    assert (results[0]["index"], results[0]["document"]) == (1, {"text": "a dog"})
    assert sorted(each["index"] for each in results) == [0, 1, 2]
    best = await server.ok(RERANK, body | {"top_n": 1, "return_documents": False})
    assert best["results"] == [{"index": 1, "relevance_score": pytest.approx(1)}]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (EMBEDDINGS, {}, "input"),
        (EMBEDDINGS, {"input": []}, "input"),
        (EMBEDDINGS, {"input": ""}, "input"),
        (EMBEDDINGS, {"input": ["a", 1]}, "input"),
        (EMBEDDINGS, {"input": ["a"] * 2049}, "input"),
        (EMBEDDINGS, {"input": [100000]}, "input"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        (EMBEDDINGS, {"input": "a", "messages": [{}]}, "messages"),
        (EMBEDDINGS, {"messages": [{}]}, "messages"),
        (EMBEDDINGS, {"messages": None}, "input"),
        (EMBEDDINGS, {"input": "a", "embed_dtype": "float16"}, "embed_dtype"),
        (EMBEDDINGS, {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (EMBEDDINGS, {"input": "a", "stream": True}, "stream"),
        (
            EMBEDDINGS,
            {"input": "a", "kv_transfer_params": {"do_remote_decode": True}},
            "kv_transfer_params",
        ),
        (SCORE, {"text_1": "a"}, "text_1"),
        (SCORE, {"text_1": ["a", "b"], "text_2": ["a"]}, "text_2"),
        (SCORE, {"text_1": [], "text_2": ["a"]}, "text_1"),
        (RERANK, {"query": "a"}, "documents"),
        (RERANK, {"query": "a", "documents": []}, "documents"),
        (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
    ],
)
async def test_what_is_wrong_is_named(server, path, body, field):
    status, error = await server.refused(path, body)
    assert (status, error["param"]) == (400, field), error
    assert not server.engine.requests
