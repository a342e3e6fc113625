"""Proofs of the secret: good for one request, once."""

from __future__ import annotations

import itertools

import pytest
from aiohttp.test_utils import make_mocked_request

from pdserve.errors import UnauthorizedError
from pdserve.http import control
from pdserve.http.answers import StaleProofError
from pdserve.http.control import Stamps, Verifier, proof_headers
from pdserve.wire.hop import PROOF_HEADER

PATH = "/pdserve/register"


def request(proof: str, method: str = "POST", path: str = PATH):
    headers = {"Content-Type": "application/json", PROOF_HEADER: proof}
    return make_mocked_request(method, path, headers=headers)


def proof(stamp: str, body: bytes = b"{}", method: str = "POST", path: str = PATH) -> str:
    return proof_headers("s3cret", method, path, body, stamp=stamp)[PROOF_HEADER]


@pytest.fixture
def verifier() -> Verifier:
    nonces = (f"nonce-{number}" for number in itertools.count())
    return Verifier("s3cret", accept_former=False, new_nonce=lambda: next(nonces))


def test_numbers_only_go_up_for_each_sender_on_its_own(verifier):
    for stamp in ("nonce-0/a/1", "nonce-0/a/3", "nonce-0/b/1"):
        verifier.check(request(proof(stamp)), b"{}")
    for stamp in ("nonce-0/a/3", "nonce-0/a/2", "nonce-0/b/0"):
        with pytest.raises(StaleProofError):
            verifier.check(request(proof(stamp)), b"{}")


@pytest.mark.parametrize(
    "stamp",
    [
        "",
        "/",
        "nonce-0/a",
        "nonce-0/a/",
        "nonce-0/a/-1",
        "x/a/1",
        "nonce-0/a/١",
        "nonce-0/a/" + "9" * 5000,
        "nonce-0/a/1e3",
    ],
)
def test_a_stamp_that_is_none_is_stale_and_the_nonce_is_told(verifier, stamp):
    with pytest.raises(StaleProofError) as raised:
        verifier.check(request(proof(stamp)), b"{}")
    assert raised.value.nonce == "nonce-0"


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [("DELETE", PATH, b"{}"), ("POST", "/pdserve/release", b"{}"), ("POST", PATH, b"{} ")],
)
def test_a_proof_is_of_one_method_one_path_and_one_body(verifier, method, path, body):
    given = proof("nonce-0/a/1")
    with pytest.raises(UnauthorizedError) as raised:
        verifier.check(request(given, method, path), body)
    assert raised.value.error_code == "invalid_signature"


def test_what_is_not_proven_counts_no_number(verifier):
    forged = "nonce-0/a/5:" + proof("nonce-0/a/4").rpartition(":")[2]
    with pytest.raises(UnauthorizedError):
        verifier.check(request(forged), b"{}")
    verifier.check(request(proof("nonce-0/a/5")), b"{}")


def test_more_senders_than_are_remembered_all_begin_again(verifier, monkeypatch):
    monkeypatch.setattr(control, "_MAX_SENDERS", 2)
    for sender in "ab":
        verifier.check(request(proof(f"nonce-0/{sender}/1")), b"{}")
    with pytest.raises(StaleProofError):
        verifier.check(request(proof("nonce-0/c/1")), b"{}")
    with pytest.raises(StaleProofError):
        verifier.check(request(proof("nonce-0/a/1")), b"{}")
    verifier.check(request(proof("nonce-1/c/2")), b"{}")


def test_a_sender_learns_each_receivers_nonce():
    stamps = Stamps("me")
    assert stamps.for_("p") == "/me/1"
    assert stamps.learn("p", "n")
    assert not stamps.learn("p", "n")
    assert [stamps.for_("p"), stamps.for_("q")] == ["n/me/2", "/me/3"]
