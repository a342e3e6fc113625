"""The endpoint of a benchmark and how to address it. Knows no plan and no answer."""

from __future__ import annotations

import enum

import msgspec


class ApiEndpoint(enum.Enum):
    """Which endpoint of OpenAI's API requests go to."""

    COMPLETIONS = "completions"
    CHAT = "chat"

    @property
    def path(self) -> str:
        """Below the base URL."""
        return "/v1/chat/completions" if self is ApiEndpoint.CHAT else "/v1/completions"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One running endpoint.

    Attributes:
        base_url: Without the API's path: `http://127.0.0.1:8000`.
        model: What requests say as `model`; empty asks `/v1/models` and takes its first.
        api_key: Sent as a bearer token; empty sends none.
        label: What tables call it; empty takes the base URL.
        path: Instead of the endpoint's own path; empty keeps that.
        further_headers: Of every request, beside the key.
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
        """Where requests are posted."""
        return self.base_url.rstrip("/") + (self.path or self.endpoint.path)

    @property
    def headers(self) -> dict[str, str]:
        """What every request says about its sender."""
        key = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return key | self.further_headers
