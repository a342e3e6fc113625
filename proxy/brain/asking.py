"""What a client says of its request that routing goes by, beside its prompt."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import hdrs

from pdserve.errors import BadRequestError
from pdserve.http.protocol import Objectives
from pdserve.proxy.bodies import UNREADABLE
from pdserve.proxy.boundary import engine_headers
from pdserve.proxy.brain.sessions import MAX_NAME_CHARS, SESSION_HEADER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pdserve.config.http import ProxyConfig
    from pdserve.proxy.bodies import ClientBody
    from pdserve.proxy.brain.prompt import RoutePrompt

_MS: Final = 1e-3


def tenant_of(config: ProxyConfig, headers: Mapping[str, str]) -> str:
    """Return whose share a request is of: what the deployment's own gateway says, or its key's.

    Keys that nobody checks could be made up, and count for nothing.
    """
    if config.tenant_header and (name := headers.get(config.tenant_header)):
        return name[:MAX_NAME_CHARS]
    if not config.api_keys:
        return ""
    key = engine_headers((), headers).get(hdrs.AUTHORIZATION, "")
    return f"key-{hashlib.blake2b(key.encode(), digest_size=4).hexdigest()}"


def as_asked(
    prompt: RoutePrompt, body: ClientBody, headers: Mapping[str, str], request_id: str
) -> RoutePrompt:
    """Return a prompt with what its client says: session, priority, objectives, limits.

    Raises:
        BadRequestError: What it says is no objective.
    """
    slo = _decoded(body, "slo", Objectives | None) or Objectives()
    session = headers.get(SESSION_HEADER) or _decoded(body, "session_id", str | None) or ""
    return replace(
        prompt,
        request_id=request_id,
        priority=_decoded(body, "priority", int | None) or 0,
        session=session[:MAX_NAME_CHARS],
        ttft_slo_s=None if slo.ttft_ms is None else slo.ttft_ms * _MS,
        itl_slo_s=None if slo.itl_ms is None else slo.itl_ms * _MS,
        model=body.model,
        max_output=body.max_output,
    )


def _decoded(body: ClientBody, name: str, kind: object) -> Any:
    raw = body.raw(name)
    try:
        return None if raw is None else msgspec.json.decode(raw, type=kind)
    except UNREADABLE as error:
        message = str(error).partition(" - at ")[0]
        raise BadRequestError(f"{name}: {message}", param=name, code="invalid_type") from None
