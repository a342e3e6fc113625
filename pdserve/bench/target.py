"""The endpoint of a benchmark and how to address it. Knows no plan and no answer."""

from __future__ import annotations

import enum

import msgspec


class ApiEndpoint(enum.Enum):
    """The endpoint of OpenAI's API that requests use."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Its path below the base URL."""
        return "/v1/chat/completions" if self is ApiEndpoint.CHAT else "/v1/completions"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One running endpoint.

    Attributes:
        base_url: Without the API's path: `http://127.0.0.1:8000`.
        model: Model that requests name; empty uses the first in `/v1/models`.
        api_key: Sent as a bearer token; empty sends none.
        label: Its name in tables; empty uses the base URL.
        path: Replaces the endpoint's own path; empty keeps it.
        further_headers: Additional headers for every request.
    """

    base_url: str
    model: str = ""
    endpoint: ApiEndpoint = ApiEndpoint.COMPLETIONS
    api_key: str = ""
    label: str = ""
    path: str = ""
    further_headers: dict[str, str] = {}

    @property
    def url(self) -> str:
        """The URL for requests."""
        return self.base_url.rstrip("/") + (self.path or self.endpoint.path)

    @property
    def headers(self) -> dict[str, str]:
        """The headers for authentication and the additional ones."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | self.further_headers
