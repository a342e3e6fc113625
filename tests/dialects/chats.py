"""What engines say in chat completions, for translators to translate."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.dialects.paths import dialect_of

DONE = b"data: [DONE]\n\n"
USAGE = {
    "prompt_tokens": 9,
    "completion_tokens": 5,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
}


def sse(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
    return sse({"id": "x", "model": "tiny", "created": 17, "choices": [choice]})


def call(index: int, text: str, **begins: str) -> dict[str, Any]:
    """A delta of a call's arguments; its first one has a name and an id."""
    function: dict[str, Any] = {"arguments": text}
    if begins:
        function["name"] = begins["name"]
    named = {"id": begins["id"], "type": "function"} if begins else {}
    return {"tool_calls": [{"index": index, **named, "function": function}]}


ALL = [
    chunk({"role": "assistant", "content": ""}),
    chunk({"reasoning": "I "}),
    chunk({"reasoning": "think."}),
    chunk({"content": "So"}),
    chunk({"content": ": "}),
    chunk(call(0, "", name="look", id="call_a")),
    chunk(call(0, '{"x": ')),
    chunk(call(0, "1}")),
    chunk(call(1, '{"y": 2}', name="see", id="call_b")),
    chunk({}, "tool_calls"),
    sse({"choices": [], "usage": USAGE}),
    DONE,
]
"""A stream with everything that one may have."""
WHOLE = msgspec.json.encode(
    {
        "model": "tiny",
        "created": 17,
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "reasoning": "I think.",
                    "content": "So: ",
                    "tool_calls": [
                        {"id": "call_a", "function": {"name": "look", "arguments": '{"x": 1}'}},
                        {"id": "call_b", "function": {"name": "see", "arguments": '{"y": 2}'}},
                    ],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": USAGE,
    }
)
"""The same in one piece."""


def translator(path: str, body: dict[str, Any]):
    dialect = dialect_of(path, msgspec.json.encode(body), "r")
    assert dialect is not None
    return dialect


def events_in(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream by name; each is named twice, alike."""
    events = []
    for block in data.decode().split("\n\n")[:-1]:
        name, payload = block.split("\n")
        parsed = msgspec.json.decode(payload.removeprefix("data: "))
        assert name == f"event: {parsed['type']}"
        events.append((parsed.pop("type"), parsed))
    return events


def translated(dialect, chunks: list[bytes]) -> list[tuple[str, dict[str, Any]]]:
    return events_in(b"".join(dialect.events(each) for each in chunks))
