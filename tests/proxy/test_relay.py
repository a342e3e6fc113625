"""The bytes a client gets are the bytes an engine sent, however the network cuts them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdserve.proxy.relay import Relay, SseParser


def _json(value: object) -> bytes:
    return msgspec.json.encode(value)


texts = st.text(alphabet=st.sampled_from('ab"\\{}:\n\r é☃pdserve_[DONE]'), max_size=20)
datas = st.one_of(
    texts.map(lambda text: b'{"choices":[{"text":' + _json(text) + b"}]}"),
    st.sampled_from(
        [
            b'{"pdserve_stages":{"queue_s":0.1}}',
            b'{"pdserve_handoff":{}}',
            b'{"choices":[],"usage":{}}',
        ]
    ),
)


@st.composite
def streams(draw: st.DrawFn) -> tuple[list[bytes], bytes, list[bytes]]:
    """(events, whole stream, the stream cut at arbitrary places)."""
    newline = draw(st.sampled_from([b"\n", b"\r\n"]))
    events = [
        b"data: " + data + newline * 2 for data in draw(st.lists(datas, min_size=1, max_size=12))
    ]
    events.append(b"data: [DONE]" + newline * 2)
    stream = b"".join(events)
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    return events, stream, pieces


@given(streams())
def test_any_cut_of_a_stream_gives_the_same_events(case):
    events, _, pieces = case
    parser = SseParser()
    assert [event.raw for piece in pieces for event in parser.feed(piece)] == events


@given(streams())
def test_any_cut_of_a_stream_is_relayed_as_the_same_bytes_without_what_is_internal(case):
    events, _, pieces = case
    relay = Relay()
    sent = b"".join(relay.feed(piece) for piece in pieces)
    internal = [event for event in events if event.startswith(b'data: {"pdserve_')]
    is_given_away = any(event.startswith(b'data: {"pdserve_handoff') for event in internal)
    told = events[:-1] if is_given_away else events  # its end mark is another engine's to send
    assert sent == b"".join(event for event in told if event not in internal)
    assert (relay.handoff is not None) is is_given_away
    assert relay.done
    assert len(relay.internal) == len(internal)
    assert relay.num_events == len(events) - len(internal) - 1


@given(streams())
def test_what_the_relay_returns_always_ends_with_a_whole_event(case):
    _, _, pieces = case
    relay = Relay()
    for piece in pieces:
        sent = relay.feed(piece)
        assert sent == b"" or sent.endswith((b"\n\n", b"\r\n\r\n"))


def test_a_stream_without_internals_passes_as_the_very_same_object():
    chunk = b'data: {"choices":[{"text":"hello"}]}\n\n'
    assert Relay().feed(chunk) is chunk


def test_text_that_looks_like_an_internal_event_reaches_the_client():
    event = b"data: " + _json({"choices": [{"text": '{"pdserve_stages": 1}'}]}) + b"\n\n"
    assert Relay().feed(event) == event


def test_nothing_is_relayed_from_an_error_event_on():
    relay = Relay()
    good = b'data: {"choices":[]}\n\n'
    assert relay.feed(good + b'data: {"error":{"message":"m"}}\n\n' + good) == good
    assert relay.error == b'{"error":{"message":"m"}}'
    assert relay.feed(good) == b""


def test_an_event_of_many_megabytes_passes_in_linear_time():
    event = b"data: " + b"x" * (8 << 20) + b"\n\n"
    relay = Relay()
    sent = b"".join(relay.feed(event[i : i + 65536]) for i in range(0, len(event), 65536))
    assert sent == event


def test_comments_and_data_of_several_lines_are_understood():
    parser = SseParser()
    (first, second) = parser.feed(b": ping\n\ndata: a\ndata:b\nid: 3\n\n")
    assert first.data == b""
    assert second.data == b"a\nb"
