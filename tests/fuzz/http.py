"""Requests of clients, to a proxy and to an engine's server, through the real handlers.

Each is an HTTP request with a body of the endpoint's fields, of the right type and of any size,
of a wrong type, or of bytes that are no JSON. Whatever it is, the answer is a 200 or a 4xx in
OpenAI's shape, nothing is held when it is over, and a good request is served as ever.
"""

from __future__ import annotations

import io
import json
from typing import Any, Final

import aiohttp
import msgspec
from hypothesis import strategies as st

from pdserve.dialects import paths
from pdserve.http.dialect_bodies import CountTokensRequest, MessagesRequest, ResponsesRequest
from pdserve.http.pooling_bodies import EmbeddingRequest, RerankRequest, ScoreRequest
from pdserve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pdserve.wire.drain import DrainRequest
from pdserve.wire.hop import Deregistration, MigrateRequest, Registration, ReleaseRequest
from tests.fuzz.values import bent, fields_of, of
from tests.http.served import Served

PATHS: Final[dict[str, tuple[type[msgspec.Struct], dict[str, Any]]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "The", "max_tokens": 2}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    paths.RESPONSES: (ResponsesRequest, {"input": "hi", "max_output_tokens": 2}),
    paths.MESSAGES: (
        MessagesRequest,
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    ),
    paths.COUNT_TOKENS: (
        CountTokensRequest,
        {"messages": [{"role": "user", "content": "hi"}]},
    ),
    "/v1/embeddings": (EmbeddingRequest, {"input": "The"}),
    "/v1/score": (ScoreRequest, {"text_1": "The", "text_2": "dog"}),
    "/v1/rerank": (RerankRequest, {"query": "The", "documents": ["dog"]}),
    "/tokenize": (TokenizeRequest, {"prompt": "The"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [60]}),
}
HOP: Final[dict[tuple[str, str, str], type[msgspec.Struct]]] = {
    ("proxy", "POST", "/pdserve/register"): Registration,
    ("proxy", "DELETE", "/pdserve/register"): Deregistration,
    ("proxy", "POST", "/drain"): DrainRequest,
    ("proxy", "DELETE", "/drain"): DrainRequest,
    ("engine", "POST", "/pdserve/migrate"): MigrateRequest,
    ("engine", "POST", "/pdserve/release"): ReleaseRequest,
}
HEADERS: Final = (
    "X-Request-Id",
    "X-Session-Id",
    "X-Pdserve-Stages",
    "X-Pdserve-Time-Left",
    "X-Pdserve-Yields",
    "X-Pdserve-Deadline",
    "X-Pdserve-KV-Mode",
    "X-Pdserve-Prefill",
    "X-Pdserve-Proof",
    "Authorization",
    "Content-Type",
    "Content-Encoding",
    "Accept",
)
_HOP_CODES: Final = frozenset({"kv_transfer_failed", "handoff_refused", "deadline_exceeded"})
"""What an engine says to a proxy that hands over what is none, or asks too late."""
_PATIENCE_S: Final = 5.0
"""Such a client leaves then; an answer of 1024 choices takes longer."""
_NAMES: Final = ("type", "role", "content", "text", "name", "call_id", "id", "input", "tool_use_id")
_WORDS: Final = (
    "user", "assistant", "system", "message", "text", "input_text", "reasoning", "thinking",
    "function", "function_call", "function_call_output", "tool_use", "tool_result", "incomplete",
)  # fmt: skip

anything = st.recursive(
    st.none()
    | st.booleans()
    | of(int)
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | of(str),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(of(str), inner, max_size=3)
        | st.fixed_dictionaries({}, optional=dict.fromkeys(_NAMES, inner | st.sampled_from(_WORDS)))
    ),
    max_leaves=8,
)
"""Values of any kind, with the names and the words that messages and their parts have."""
schemas = st.recursive(
    st.sampled_from(({}, {"type": "string"}, {"type": "integer"}, {"$ref": "#"}, True, False))
    | st.fixed_dictionaries({"enum": st.lists(anything, max_size=3)}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(("object", "array", "null", "x")),
            "properties": st.dictionaries(of(str), inner, max_size=3),
            "required": st.lists(of(str), max_size=2),
            "items": inner,
            "anyOf": st.lists(inner, max_size=3),
            "allOf": st.lists(inner, max_size=2),
            "maxItems": of(int),
            "pattern": of(str),
        },
    ),
    max_leaves=6,
)
_function = st.fixed_dictionaries(
    {}, optional={"name": of(str) | anything, "parameters": anything, "strict": anything}
)
_calls = st.lists(anything | st.fixed_dictionaries({"function": _function | anything}), max_size=2)
SHAPES: Final[dict[str, st.SearchStrategy[Any]]] = {
    "response_format": st.fixed_dictionaries(
        {"type": st.sampled_from(("text", "json_object", "json_schema", "x"))},
        optional={"json_schema": st.fixed_dictionaries({"schema": schemas | anything})},
    ),
    "guided_json": schemas,
    "guided_regex": st.text("ab[](){}^$|*+?.-\\0123dw", max_size=12),
    "guided_choice": st.lists(of(str), max_size=3),
    "guided_grammar": st.lists(
        st.sampled_from(("root ::= ", "start: ", '"a"', "[a-z]", "x", "/b+/", "|", "*", "(", "\n"))
    ).map("".join),
    "tools": st.lists(
        st.fixed_dictionaries({"function": _function}, optional={"type": anything}), max_size=3
    ),
    "tool_choice": st.sampled_from(("none", "auto", "required", ""))
    | st.fixed_dictionaries({"type": st.just("function"), "function": _function}),
    "messages": st.lists(
        st.fixed_dictionaries(
            {"role": st.sampled_from(("assistant", "user"))},
            optional={"content": anything, "tool_calls": _calls | anything, "reasoning": anything},
        ),
        max_size=3,
    ),
}
"""Values of fields that say more than their types."""
headers = st.dictionaries(
    st.sampled_from(HEADERS),
    st.sampled_from(("", "1", "-1", "nan", "1e400", "gzip", "application/json", "Bearer x", "x/y"))
    | st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=9),
    max_size=2,
)


@st.composite
def bodies(draw: st.DrawFn, kind: type[msgspec.Struct], good: dict[str, Any]) -> bytes:
    """A body of an endpoint."""
    kinds = fields_of(kind)
    names = draw(st.lists(st.sampled_from(sorted(kinds)), max_size=4, unique=True))
    changed = {
        name: draw(SHAPES.get(name, anything) | anything | of(kinds[name])) for name in names
    }
    body = json.dumps({**good, **msgspec.to_builtins(changed, str_keys=True)}).encode()
    return draw(st.just(body) | bent(body) if draw(st.integers(0, 9)) == 0 else st.just(body))


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, str, str, bytes, dict[str, str]]:
    """Whom to ask, the method, the path, the body and further headers."""
    given = {"Content-Type": "application/json", **draw(headers)}
    if draw(st.integers(0, 9)) == 0:
        (who, method, path), kind = draw(st.sampled_from(sorted(HOP.items(), key=str)))
        good = {"url": "http://127.0.0.1:9", "nonce": "x", "request_id": "x"}
        return who, method, path, draw(bodies(kind, good)), given
    who = draw(st.sampled_from(("proxy", "engine")))
    path = draw(st.sampled_from(sorted(PATHS)))
    return who, "POST", path, draw(bodies(*PATHS[path])), given


class HttpTarget:
    """A deployment that lives for all inputs. See `Target`."""

    def __init__(self) -> None:
        self.num_refused = 0
        self._served = Served()
        self._served.__enter__()
        self._session = self._served.do(self._open())

    @property
    def num_held(self) -> int:
        """Requests, leases and bytes of bodies."""
        return self._served.settle()

    def try_one(self, data: st.DataObject) -> None:
        """See `Target`."""
        who, method, path, body, given = data.draw(requests())
        url = self._served.urls[who] + path
        status, answer, is_json = self._served.do(self._ask(method, url, body, given))
        if status < 400:
            return
        self.num_refused += 1
        assert is_json, (status, answer)
        error = msgspec.json.decode(answer)["error"]
        if path in (paths.MESSAGES, paths.COUNT_TOKENS):
            is_late = who == "engine" and error["type"] == "timeout_error"
            assert status < 500 or is_late, (status, error)
            assert set(error) == {"message", "type"}, error
            return
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["code"], str), error
        is_of_the_hop = who == "engine" and error["code"] in _HOP_CODES
        assert status < 500 or is_of_the_hop, (status, error)

    def check_service(self) -> None:
        """See `Target`."""
        for who, url in self._served.urls.items():
            for path, (_, body) in PATHS.items():
                data = msgspec.json.encode(body)
                headers = {"Content-Type": "application/json"}
                status, answer, _ = self._served.do(self._ask("POST", url + path, data, headers))
                assert status == 200, (who, path, answer)
        assert self._served.settle() == 0

    def close(self) -> None:
        """See `Target`."""
        self._served.do(self._session.close())
        self._served.__exit__()

    @staticmethod
    async def _open() -> aiohttp.ClientSession:
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_PATIENCE_S))

    async def _ask(
        self, method: str, url: str, body: bytes, given: dict[str, str]
    ) -> tuple[int, bytes, bool]:
        """Return the status, 0 if its client left, the answer, and whether that is JSON."""
        try:
            sent = io.BytesIO(body)  # bytes of a MiB and more would be warned of
            async with self._session.request(method, url, data=sent, headers=given) as response:
                answer = await response.read()
                return response.status, answer, response.content_type == "application/json"
        except TimeoutError:
            return 0, b"", False
