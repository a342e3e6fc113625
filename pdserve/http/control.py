"""Authenticates requests between the parts of a deployment by the shared secret.

A proof is a MAC over method, path, stamp and body, under a key that is used for nothing else, so it
is not valid for another path, method or body. A *stamp* makes it valid only once: it contains the
nonce that the receiver drew when it started, the sender, and a number that the sender counts up. No
clock is involved, so hosts need not agree on the time. A sender that does not know the nonce is
refused and receives it.

No stamp is needed if repeating the body has no effect (a lease can be given back only once).

Parts of release 0.1 sign the body alone. Such a signature is sent too, but accepted only with
`accept_former`, while a deployment is updated from one release to the next.
"""

from __future__ import annotations

import hmac
import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs

from pdserve.config.checks import is_loopback
from pdserve.errors import BadRequestError, UnauthorizedError
from pdserve.http.answers import StaleProofError
from pdserve.wire.hop import FORMER_HEADER, PROOF_HEADER
from pdserve.wire.seal import Purpose, key_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiohttp import web

_MAX_SENDERS: Final = 10_000
"""Senders whose last number is remembered; with more of them, all start again."""


def proof_headers(
    secret: str, method: str, path: str, body: bytes, *, stamp: str = ""
) -> dict[str, str]:
    """Return the headers that prove knowledge of the secret; none without a secret."""
    if not secret:
        return {}
    proof = _proof(secret, method, path, stamp, body)
    return {PROOF_HEADER: proof, FORMER_HEADER: _former(secret, body)}


class Stamps:
    """The sending side of stamps: one sender, for all receivers.

    Args:
        sender: A name that no other sender has, in any life.
    """

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._number = 0
        self._nonces: dict[str, str] = {}

    def for_(self, receiver: str) -> str:
        """Return a stamp that was never used."""
        self._number += 1
        return f"{self._nonces.get(receiver, '')}/{self._sender}/{self._number}"

    def learn(self, receiver: str, nonce: str) -> bool:
        """Remember a receiver's nonce; return whether it has changed."""
        is_other = self._nonces.get(receiver) != nonce
        self._nonces[receiver] = nonce
        return is_other


class Verifier:
    """The receiving side of proofs.

    Args:
        secret: The deployment's secret; without one, everyone on this host is trusted.
        accept_former: Whether a signature of release 0.1 is enough, although it can be replayed.
        new_nonce: Returns an unguessable string never returned before; None if requests here need
            no stamp.
    """

    def __init__(
        self, secret: str, *, accept_former: bool, new_nonce: Callable[[], str] | None = None
    ) -> None:
        self._secret = secret
        self._accept_former = accept_former
        self._new_nonce = new_nonce
        self._nonce = "" if new_nonce is None else new_nonce()
        self._numbers: dict[str, int] = {}

    def check(self, request: web.Request, body: bytes) -> None:
        """Check that a request comes from a part of this deployment, for the first time.

        Raises:
            BadRequestError: A web page could have sent it.
            UnauthorizedError: Its proof was not made with the deployment's secret, or not for this
                request; or there is no secret, and it comes from another host.
            StaleProofError: It was sent before, or was made for another life of this receiver.
        """
        _refuse_pages(request)
        if not self._secret:
            _refuse_other_hosts(request.remote)
            return
        given = request.headers.get(PROOF_HEADER)
        if given is None and self._accept_former:
            if not _are_equal(request.headers.get(FORMER_HEADER, ""), _former(self._secret, body)):
                raise _unproven(FORMER_HEADER)
            return
        stamp = (given or "").rpartition(":")[0]
        expected = _proof(self._secret, request.method, request.path, stamp, body)
        if given is None or not _are_equal(given, expected):
            raise _unproven(PROOF_HEADER)
        if self._new_nonce is not None and not self._is_fresh(stamp):
            raise StaleProofError(nonce=self._nonce)

    def _is_fresh(self, stamp: str) -> bool:
        """Return whether a stamp is for this life and unused; mark it as used."""
        nonce, _, rest = stamp.partition("/")
        sender, _, digits = rest.partition("/")
        if nonce != self._nonce or re.fullmatch(r"[0-9]{1,18}", digits) is None:
            return False
        number = int(digits)
        if number <= self._numbers.get(sender, 0):
            return False
        if sender not in self._numbers and len(self._numbers) >= _MAX_SENDERS:
            assert self._new_nonce is not None
            self._nonce = self._new_nonce()
            self._numbers.clear()
            return False
        self._numbers[sender] = number
        return True


def _proof(secret: str, method: str, path: str, stamp: str, body: bytes) -> str:
    words = f"{method}\n{path}\n{stamp}\n".encode("utf-8", "surrogateescape")
    mac = hmac.digest(key_for(secret, Purpose.CONTROL), words + body, "sha256")
    return f"{stamp}:{mac.hex()}"


def _former(secret: str, body: bytes) -> str:
    """Return the signature of release 0.1."""
    return hmac.digest(secret.encode(), body, "sha256").hex()


def _are_equal(given: str, expected: str) -> bool:
    # A header's bytes need not be UTF-8: aiohttp escapes those that are not.
    return hmac.compare_digest(*(x.encode("utf-8", "surrogateescape") for x in (given, expected)))


def _unproven(header: str) -> UnauthorizedError:
    return UnauthorizedError(
        f"{header} is missing or does not match: give every engine and proxy the same secret as "
        "PDSERVE_SECRET",
        code="invalid_signature",
    )


def _refuse_pages(request: web.Request) -> None:
    """Refuse requests that a web page could send: not JSON, or with an Origin header."""
    if request.content_type != "application/json":
        raise BadRequestError(
            f"Content-Type is {request.content_type!r}: it must be application/json",
            param="Content-Type",
        )
    if hdrs.ORIGIN in request.headers:
        raise BadRequestError("web pages may not use this path: leave Origin out", param="Origin")


def _refuse_other_hosts(remote: str | None) -> None:
    if not is_loopback(remote or ""):
        raise UnauthorizedError(
            f"{remote} may not do this, because without a secret only this host may: give every "
            "engine and proxy the same one as PDSERVE_SECRET",
            code="secret_required",
        )
