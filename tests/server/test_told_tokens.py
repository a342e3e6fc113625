"""What a prefill engine has tokenized a decode engine does not tokenize again."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest

from pdserve.server.hop import tokens_to_send
from pdserve.text.load import Text
from tests.server.conftest import Server, make_engine, serving
from tests.server.engine import MemoryNetwork

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = "the quick brown fox jumps over the lazy dog. " * 60
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": LONG},
    CHAT: {"messages": [{"role": "user", "content": LONG}]},
}
REST = {"max_tokens": 6, "seed": 5}


class Counting:
    """A tokenizer that notes how many texts it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_encoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += 1
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return ids


@contextlib.asynccontextmanager
async def pair(text: Text, digests: tuple[str, str] = ("same", "same")):
    """A prefill and a decode server, and the latter's tokenizer."""
    network, counting = MemoryNetwork(), Counting(text.tokenizer)
    p = make_engine(text, network=network, role="prefill", engine_id="p")
    d = make_engine(text, network=network, role="decode", engine_id="d")
    at_p = replace(text, digest=digests[0])
    at_d = replace(text, tokenizer=counting, digest=digests[1])
    async with serving(at_p, p) as prefill, serving(at_d, d) as decode:
        yield prefill, decode, counting


async def prefilled(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    leg = {"do_remote_decode": True}
    answer = await server.ok(path, body | REST | {"max_tokens": 1, "kv_transfer_params": leg})
    params: dict[str, Any] = answer["kv_transfer_params"]
    return params


@pytest.mark.parametrize(
    "extra", [{}, {"truncate_prompt_tokens": 700}, {"n": 2}], ids=["whole", "cut", "two choices"]
)
@pytest.mark.parametrize("path", BODIES)
async def test_a_long_text_is_tokenized_once_for_both_engines(text, path, extra):
    body = BODIES[path] | extra
    async with pair(text) as (prefill, decode, counting):
        params = await prefilled(prefill, path, body)
        whole = await decode.ok(path, body | REST | {"kv_transfer_params": params})
        assert counting.num_encoded == 0
        assert decode.engine.stats.external_kv_tokens > 0
        expected = await decode.ok(path, body | REST)
        assert counting.num_encoded > 0
    assert whole["choices"] == expected["choices"]
    assert whole["usage"] == expected["usage"]


async def test_a_short_text_is_not_told(text):
    async with pair(text) as (prefill, decode, counting):
        params = await prefilled(prefill, COMPLETIONS, {"prompt": "The quick"})
        assert "prompt_tokens" not in params["pdserve"]
        await decode.ok(
            COMPLETIONS, {"prompt": "The quick"} | REST | {"kv_transfer_params": params}
        )
        assert counting.num_encoded == 1


@pytest.mark.parametrize("digests", [("one", "other"), ("", "")])
async def test_who_may_tokenize_otherwise_tokenizes_itself(text, digests):
    body = BODIES[CHAT] | REST
    async with pair(text, digests) as (prefill, decode, counting):
        params = await prefilled(prefill, CHAT, BODIES[CHAT])
        await decode.ok(CHAT, body | {"kv_transfer_params": params})
        assert counting.num_encoded == 1


async def test_tokens_of_another_prompt_are_refused_with_the_handoff(text):
    body = BODIES[COMPLETIONS] | REST
    async with pair(text) as (prefill, decode, _):
        params = await prefilled(prefill, COMPLETIONS, BODIES[COMPLETIONS])
        ids = text.tokenizer.encode(LONG)
        ids[7], ids[8] = ids[8], ids[7]
        told = tokens_to_send([ids], "same")
        params["pdserve"]["prompt_tokens"] = {
            "text_digest": told.text_digest,
            "token_ids": told.token_ids,
        }
        status, error = await decode.refused(COMPLETIONS, body | {"kv_transfer_params": params})
        assert (status, error["code"]) == (409, "handoff_refused")
        assert "prompt digest" in error["message"]
        assert not decode.engine.running


@pytest.mark.parametrize(
    "token_ids", [["!"], ["AAA="], [], ["AAAAAA==", "AAAAAA=="]], ids=["text", "size", "0", "2"]
)
async def test_malformed_tokens_are_named(text, token_ids):
    body = BODIES[COMPLETIONS] | REST
    async with pair(text) as (prefill, decode, _):
        params = await prefilled(prefill, COMPLETIONS, BODIES[COMPLETIONS])
        params["pdserve"]["prompt_tokens"]["token_ids"] = token_ids
        status, error = await decode.refused(COMPLETIONS, body | {"kv_transfer_params": params})
        assert (status, error["param"]) == (400, "kv_transfer_params")
        assert "prompt_tokens" in error["message"] or "pdserve" in error["message"]


async def test_tokens_without_a_handoff_are_not_taken(text):
    told = tokens_to_send([[5, 6, 7]], "same")
    ours = {"prompt_tokens": {"text_digest": "same", "token_ids": told.token_ids}}
    body = BODIES[COMPLETIONS] | REST | {"kv_transfer_params": {"pdserve": ours}}
    async with pair(text) as (_, decode, counting):
        answer = await decode.ok(COMPLETIONS, body)
        assert counting.num_encoded == 1
    assert answer["usage"]["prompt_tokens"] == len(text.tokenizer.encode(LONG))
