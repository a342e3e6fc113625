"""Settings of `pdserve route explain` and `pdserve route compare`."""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.config.checks import require_positive, require_url
from pdserve.config.load import Table
from pdserve.config.policies import SPLIT_POLICIES, require_policy
from pdserve.config.setting import declare


class RouteConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which decisions to show.

    Attributes:
        url: Base URL of a proxy.
        requests: Ids of the requests to explain.
        policy: To compare with: a routing policy and, after a slash, a split policy if it is not
            `always`.
        limit: Maximum number of decisions to compare.
        api_keys: The first is sent.
    """

    url: str = "http://127.0.0.1:8000"
    requests: tuple[str, ...] = ()
    policy: str = "prefix_sticky"
    limit: int = 1024
    api_keys: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_url(self.url, "url")
        require_policy(self.policy, SPLIT_POLICIES)
        require_positive("limit", self.limit)


# fmt: off
_SETTINGS: Final = declare(
    "route",
    RouteConfig,
    "route",
    (
        ("requests", "requests", "ID", "id from the request's log line or from X-Request-Id"),
        ("url", "url", "URL", "base URL of the proxy"),
        ("policy", "policy", "NAME[/SPLIT]", "a routing policy and a split policy to compare with"),
        ("limit", "limit", "N", "maximum number of decisions, newest first"),
        ("api-key", "api_keys", "KEY", "sent as a bearer token (prefer PDSERVE_API_KEY)"),
    ),
)
# fmt: on


def route_explain_table() -> Table:
    """The settings of `pdserve route explain`; its ids follow the command without a flag."""
    return _table("requests", "url", "api-key")


def route_compare_table() -> Table:
    """The settings of `pdserve route compare`."""
    return _table("url", "policy", "limit", "api-key")


def _table(*flags: str) -> Table:
    return Table(tuple(each for each in _SETTINGS if each.flag in flags))
