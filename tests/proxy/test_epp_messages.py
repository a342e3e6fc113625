"""The endpoint picker's messages: their bytes, and what becomes of bytes that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.proxy.epp.messages import (
    BodyMode,
    MessagePart,
    body_chunks,
    event_of,
    go_to,
    refuse,
)
from pdserve.proxy.epp.picking import endpoint_of
from pdserve.proxy.epp.protobuf import WireFormatError, bytes_field, fields_of, varint_field
from tests.proxy.gateway import DUPLEX, headers_event

# As Google's protobuf writes the messages of envoy.service.ext_proc.v3 from their field numbers.
_REQUEST = (
    "12140a100a0e0a053a706174681a052f76312f78180142540a520a14656e766f792e6c622e7375627365745f6869"
    "6e74123a0a380a25782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d73756273657412"
    "0f320d0a0b1a09312e322e332e343a3550015a020804"
)
_GO = (
    "0a500a4e124a0a390a350a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a13312e"
    "322e332e343a352c312e322e332e343a3618020a0a0a060a01611a01621802120163280142490a470a08656e766f"
    "792e6c62123b2a390a370a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e7412151a13"
    "312e322e332e343a352c312e322e332e343a36"
)
_BODY = "1a0e0a0c1a0a1a080a04646174611001"
_REFUSAL = "3a270a0308ad0312160a140a100a0b72657472792d61667465721a013118021a027b7d2a0462757379"


def test_a_request_is_read_with_its_subset_and_modes():
    event = event_of(bytes.fromhex(_REQUEST))
    assert event.part is MessagePart.REQUEST_HEADERS
    assert event.headers == {":path": "/v1/x"}
    assert event.is_end
    assert event.subset == {"1.2.3.4:5"}
    assert (event.request_body_mode, event.response_body_mode) == (DUPLEX, BodyMode.NONE)


def test_answers_are_written_byte_by_byte():
    assert go_to(["1.2.3.4:5", "1.2.3.4:6"], {"a": "b"}, ["c"]).hex() == _GO
    assert [each.hex() for each in body_chunks(MessagePart.REQUEST_BODY, b"data", is_end=True)] == [
        _BODY
    ]
    assert refuse(429, {"retry-after": "1"}, b"{}", "busy").hex() == _REFUSAL


@pytest.mark.parametrize(
    ("subset", "read"),
    [(None, None), ([], frozenset()), (["a:1", "b:2,c:3"], frozenset({"a:1", "b:2", "c:3"}))],
)
def test_a_subset_is_read_as_a_list_or_with_commas(subset, read):
    assert event_of(headers_event({}, subset=subset)).subset == read


def test_a_first_event_that_says_nothing_of_modes_has_none():
    assert event_of(headers_event({}, mode=None)).request_body_mode is None
    assert event_of(headers_event({}, mode=BodyMode.NONE)).request_body_mode is BodyMode.NONE


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("http://10.0.0.1:8200", "10.0.0.1:8200"),
        ("http://[fd00::1]:8200", "[fd00::1]:8200"),
        ("https://10.0.0.1", "10.0.0.1:443"),
    ],
)
def test_an_endpoint_is_the_address_of_a_url(url, endpoint):
    assert endpoint_of(url) == endpoint


@given(st.binary(max_size=64) | st.binary(max_size=32).map(lambda inner: bytes_field(2, inner)))
def test_any_bytes_are_an_event_or_refused(data):
    try:
        event_of(data)
    except WireFormatError:
        pass


@given(st.integers(1, 2**29 - 1), st.integers(1, 2**64 - 1), st.binary(max_size=300))
def test_what_is_written_is_read_again(number, value, data):
    written = varint_field(number, value) + bytes_field(number, data)
    assert list(fields_of(written)) == [(number, value), (number, data)]
