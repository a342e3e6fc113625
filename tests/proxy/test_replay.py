"""A repeated stream gives the client exactly what it lacks, or nothing but an error."""

from __future__ import annotations

import gc
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.proxy.relay import SseParser
from pdserve.proxy.replay import RECENT_BYTES, DivergedError, Replay, Transcript

DONE = b"data: [DONE]\n\n"
TEXT = ("delta", "content")


def event(*choices: dict[str, Any], **more: Any) -> bytes:
    return b"data: " + msgspec.json.encode({"id": "x", "choices": list(choices), **more}) + b"\n\n"


def chat(index: int, text: str, *, role: bool = False, finish: str | None = None) -> dict[str, Any]:
    delta = {"role": "assistant"} if role else {}
    logprobs = {"content": [{"token": letter} for letter in text]}
    choice = {"index": index, "delta": {**delta, "content": text}, "logprobs": logprobs}
    return {**choice, "finish_reason": finish}


def after(*sent: bytes) -> Replay:
    transcript = Transcript()
    for data in sent:
        transcript.add(data)
    return Replay(transcript)


def run(replay: Replay, stream: bytes) -> bytes:
    return b"".join([replay.feed(one) for one in SseParser().feed(stream)])


def cut(draw: st.DrawFn, index: int, text: str) -> list[bytes]:
    """A choice's text in chunks of random sizes; the role comes first, the finish last."""
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=4)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    last = len(parts) - 1
    return [
        event(chat(index, part, role=i == 0, finish="stop" if i == last else None))
        for i, part in enumerate(parts)
    ]


def interleaved(draw: st.DrawFn, lanes: list[list[bytes]]) -> list[bytes]:
    lanes = [list(lane) for lane in lanes]
    merged = []
    while any(lanes):
        lane = draw(st.sampled_from([lane for lane in lanes if lane]))
        merged.append(lane.pop(0))
    return merged


def what_a_client_sees(stream: bytes) -> dict[int, tuple[str, str, int, int]]:
    """(text, tokens with logprobs, number of roles, number of ends) by choice."""
    seen: dict[int, tuple[str, str, int, int]] = {}
    for one in SseParser().feed(stream):
        if one.is_done:
            continue
        for choice in msgspec.json.decode(one.data)["choices"]:
            text, tokens, roles, ends = seen.get(choice["index"], ("", "", 0, 0))
            delta = choice["delta"]
            tokens += "".join(entry["token"] for entry in choice["logprobs"]["content"])
            roles += delta.get("role") is not None
            ends += choice["finish_reason"] is not None
            seen[choice["index"]] = (text + delta["content"], tokens, roles, ends)
    return seen


@given(st.data())
def test_a_stream_broken_anywhere_goes_on_as_if_it_had_not_been(data):
    wholes = data.draw(st.lists(st.text("abé", max_size=8), min_size=1, max_size=3))
    former, repeated = (
        interleaved(data.draw, [cut(data.draw, i, text) for i, text in enumerate(wholes)])
        for _ in range(2)
    )
    former = former[: data.draw(st.integers(0, len(former)))]
    replay = after(*former)
    stream = b"".join(former)
    for one in SseParser().feed(b"".join(repeated) + DONE):
        stream += one.raw if replay.is_over else replay.feed(one)
    assert stream.endswith(DONE)
    expected = {i: (text, text, 1, 1) for i, text in enumerate(wholes)}
    assert what_a_client_sees(stream) == expected


def test_what_one_choice_gets_while_another_is_behind_is_not_swallowed_later():
    transcript = Transcript()
    transcript.add(event(chat(0, "a", role=True)) + event(chat(1, "a", role=True)))
    replay = Replay(transcript)
    stream = b""
    for choice in (
        chat(0, "a", role=True),
        *[chat(0, "a")] * 3,
        chat(0, "a", finish="stop"),
        chat(1, "a", role=True),
        chat(1, "a", finish="stop"),
    ):
        for one in SseParser().feed(event(choice)):
            part = replay.feed(one)
            transcript.add(part)
            transcript.settle()
            stream += part
    assert what_a_client_sees(stream) == {0: ("aaaa", "aaaa", 0, 1), 1: ("a", "a", 0, 1)}


def call_events(draw: st.DrawFn, calls: list[tuple[str, str]], ids: str) -> list[bytes]:
    """Calls of one choice, the arguments cut anywhere; some with more than a call in an event."""
    deltas = []
    for index, (name, arguments) in enumerate(calls):
        at = draw(st.integers(0, len(arguments)))
        kind, field = ("custom", "input") if name == "run" else ("function", "arguments")
        said = {"name": name, field: arguments[:at]}
        deltas.append({"index": index, "id": f"{ids}{index}", "type": kind, kind: said})
        deltas += [{"index": index, kind: {field: letter}} for letter in arguments[at:]]
    groups = []
    while deltas:
        size = draw(st.integers(1, 3))
        group, deltas = deltas[:size], deltas[size:]
        groups.append(group)
    events = [event({"index": 0, "delta": {"role": "assistant", "reasoning": "hm"}})]
    events += [event({"index": 0, "delta": {"tool_calls": group}}) for group in groups]
    return [*events, event({"index": 0, "delta": {}, "finish_reason": "tool_calls"})]


def called(stream: bytes) -> tuple[str, dict[int, tuple[str, str, str]]]:
    """The reasoning, and (id, name, arguments) of each call, as clients add them up."""
    reasoning, calls = "", {}
    for one in SseParser().feed(stream):
        for choice in [] if one.is_done else msgspec.json.decode(one.data)["choices"]:
            reasoning += choice["delta"].get("reasoning", "")
            for call in choice["delta"].get("tool_calls", ()):
                known = calls.get(call["index"], ("", "", ""))
                said = call.get("function") or call["custom"]
                text = said.get("arguments", "") + said.get("input", "")
                gained = call.get("id", ""), said.get("name", ""), text
                calls[call["index"]] = tuple(map("".join, zip(known, gained, strict=True)))
    return reasoning, calls


@given(st.data())
def test_calls_broken_anywhere_go_on_however_they_are_cut_and_whatever_ids_are_drawn(data):
    one = st.tuples(st.sampled_from(["see", "run"]), st.text('{"a1', min_size=1, max_size=6))
    calls = data.draw(st.lists(one, min_size=1, max_size=3))
    former, repeated = (call_events(data.draw, calls, ids) for ids in ("a", "b"))
    former = former[: data.draw(st.integers(0, len(former)))]
    replay = after(*former)
    stream = b"".join(former)
    for event_ in SseParser().feed(b"".join(repeated) + DONE):
        stream += event_.raw if replay.is_over else replay.feed(event_)
    reasoning, found = called(stream)
    assert reasoning == "hm"
    assert [part[1:] for _, part in sorted(found.items())] == calls
    assert all(part[0] in (f"a{index}", f"b{index}") for index, part in found.items())


@pytest.mark.parametrize(
    "calls",
    [
        [{"index": 0, "function": {"name": "hear", "arguments": "{}"}}],
        [{"index": 0, "function": {"name": "see", "arguments": "{x"}}],
        [{"function": {"name": "see", "arguments": "{}"}}],
        ["see"],
    ],
)
def test_other_calls_are_never_passed_on(calls):
    sent = {"index": 0, "id": "a", "function": {"name": "see", "arguments": "{}"}}
    replay = after(event({"index": 0, "delta": {"tool_calls": [sent]}}))
    with pytest.raises(DivergedError):
        run(replay, event({"index": 0, "delta": {"tool_calls": calls}}))


def compared(*sent: bytes) -> dict[tuple[int, tuple[str, ...]], tuple[int, bytes]]:
    """(length, hash) of each run of a client's stream, by choice and path."""
    transcript = Transcript()
    for data in sent:
        transcript.add(data)
    transcript.settle()
    assert transcript.is_readable
    return {
        (index, path): (run.length, run.digest)
        for index, choice in transcript.choices.items()
        for path, run in choice.runs.items()
    }


LIKE_A_CHUNK = event({"index": 0, "delta": {"content": "a"}}).decode()


@given(st.data())
def test_what_was_sent_is_the_same_in_one_piece_and_in_many(data):
    """Events that differ in their text alone are read at once, whatever that text is."""
    letters = st.sampled_from([*'ab"\\\n:é☃', '"}', LIKE_A_CHUNK])
    texts = data.draw(st.lists(st.lists(letters, max_size=4).map("".join), max_size=8))
    index = st.sampled_from([0, 0, 0, 1])
    events = [event({"index": data.draw(index), "delta": {"content": text}}) for text in texts]
    if data.draw(st.booleans()):
        events.insert(0, event({"index": 0, "delta": {"role": "assistant", "content": ""}}))
    if data.draw(st.booleans()):
        events.append(event(chat(0, "b", finish="stop")))
    parts: dict[int, str] = {}
    for one in events:
        (choice,) = msgspec.json.decode(one[6:])["choices"]
        text = parts.get(choice["index"], "") + choice["delta"]["content"]
        parts[choice["index"]] = text
    found = compared(b"".join(events))
    for number, text in parts.items():
        apart = [event({"index": number, "delta": {"content": letter}}) for letter in text]
        (expected,) = compared(*apart).values() if apart else [(0, found[number, TEXT][1])]
        assert found[number, TEXT] == expected


def size_of(num_tokens: int, make: Any) -> int:
    """Bytes that a transcript takes after so many tokens, whatever other threads take meanwhile."""
    return min(_traced_size(num_tokens, make) for _ in range(3))


def _traced_size(num_tokens: int, make: Any) -> int:
    stream = [make(number) for number in range(num_tokens)]
    gc.freeze()  # nothing that other tests have left is looked through below
    tracemalloc.start()
    transcript = Transcript()
    for data in stream:
        transcript.add(bytes(bytearray(data)))
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert next(iter(transcript.choices.values())).runs  # it is not merely forgotten
    return size


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda number: event({"index": 0, "delta": {"content": f" word{number}"}}), id="text"
        ),
        pytest.param(
            lambda number: event(chat(0, f" word{number}")),
            id="log-probabilities",
            marks=pytest.mark.matrix,
        ),
        pytest.param(
            lambda number: event({"index": number % 4, "text": f" word{number}"}),
            id="choices",
            marks=pytest.mark.matrix,
        ),
    ],
)
def test_a_transcript_is_small_however_long_its_stream(make):
    short, long = size_of(1000, make), size_of(8000, make)
    assert max(short, long) < 4 * RECENT_BYTES
    assert long - short < 2 * RECENT_BYTES


def test_an_event_longer_than_what_is_kept_unread_is_compared_like_any_other():
    long = "a" * (RECENT_BYTES + 1)
    replay = after(event(chat(0, long, role=True)))
    assert what_a_client_sees(run(replay, event(chat(0, long + "b", role=True)))) == {
        0: ("b", "b", 0, 0)
    }


def test_comments_and_lines_that_end_otherwise_are_read():
    sent = (
        event(chat(0, "a", role=True)),
        b": wait\n\n",
        event(chat(0, "b")).replace(b"\n", b"\r\n"),
    )
    rest = run(after(*sent), b"".join(sent) + event(chat(0, "c"))).replace(b": wait\n\n", b"")
    assert what_a_client_sees(rest) == {0: ("c", "c", 0, 0)}


def test_a_stream_that_cannot_be_read_is_not_begun_again():
    with pytest.raises(DivergedError, match="cannot be read"):
        after(b"data: nonsense\n\n")


@given(st.data())
def test_other_text_is_never_passed_on(data):
    text = data.draw(st.text("ab", min_size=1, max_size=8))
    other = data.draw(st.text("ab", min_size=1, max_size=8).filter(lambda t: t[0] != text[0]))
    replay = after(event(chat(0, text, role=True)))
    with pytest.raises(DivergedError):
        for one in SseParser().feed(event(chat(0, other, role=True)) + DONE):
            assert replay.feed(one) == b""


def test_a_repeat_that_ends_early_is_not_the_same_stream():
    replay = after(event(chat(0, "abc", role=True)))
    with pytest.raises(DivergedError, match="ends earlier than"):
        run(replay, event(chat(0, "ab", role=True, finish="stop")))


def test_a_repeat_that_goes_on_after_the_former_end_is_not_the_same_stream():
    replay = after(event(chat(0, "abc", role=True, finish="stop")))
    with pytest.raises(DivergedError, match="is longer than"):
        run(replay, event(chat(0, "abcd", role=True)))


def test_an_end_mark_before_the_point_reached_is_not_the_same_stream():
    replay = after(event(chat(0, "abc", role=True)))
    with pytest.raises(DivergedError):
        run(replay, DONE)


def test_other_log_probabilities_are_another_stream_even_with_the_same_text():
    first = chat(0, "a", role=True)
    other = {**first, "logprobs": {"content": [{"token": "b"}]}}
    with pytest.raises(DivergedError):
        run(after(event(first)), event(other))


@pytest.mark.parametrize("chat_form", [True, False])
def test_the_same_tokens_measured_a_little_otherwise_are_the_same_stream(chat_form):
    """No two engines sum in one order, so that the last digits of a likelihood may differ."""

    def measured(tokens: str, noise: float) -> bytes:
        def row(token: str) -> dict[str, Any]:
            top = {token: -0.5 + noise, ("y" if noise else "z"): -0.5}
            return {"token": token, "logprob": -0.5 + noise, "top_logprobs": [top]}

        rows = [row(token) for token in tokens]
        columns = {
            "tokens": list(tokens),
            "token_logprobs": [None, *(one["logprob"] for one in rows[1:])],
            "top_logprobs": [one["top_logprobs"][0] for one in rows],
        }
        choice = {"index": 0, "text": tokens, "finish_reason": None}
        return event({**choice, "logprobs": {"content": rows} if chat_form else columns})

    replay = after(measured("ab", 0.0))
    rest = run(replay, measured("abc", 1e-6))
    (choice,) = msgspec.json.decode(rest.removeprefix(b"data: "))["choices"]
    assert choice["text"] == "c"
    assert {len(column) for column in choice["logprobs"].values()} == {1}
    with pytest.raises(DivergedError):
        run(after(measured("ab", 0.0)), measured("ac", 0.0))


def test_a_usage_chunk_is_sent_once():
    usage = event(usage={"prompt_tokens": 1})
    former = [event(chat(0, "a", role=True, finish="stop")), usage]
    assert run(after(*former), b"".join(former) + DONE) == DONE


def test_chunks_beyond_what_was_sent_keep_their_bytes():
    replay = after(event(chat(0, "a", role=True)))
    rest = b'data: {"choices" : [ {"index":0,"delta":{"content":"b"}} ]}\n\n'
    assert run(replay, event(chat(0, "a", role=True)) + rest) == rest
    assert replay.is_over
