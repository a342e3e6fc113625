"""The routing policies there are: one line each, from which the command line's help is made.

What a policy is, and what it may look at, is in `proxy/policies`.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = {
    "round_robin": "pdserve.proxy.policies.round_robin:round_robin",
    "least_loaded": "pdserve.proxy.policies.least_loaded:least_loaded",
    "prefix_sticky": "pdserve.proxy.policies.prefix_sticky:prefix_sticky",
    "cache_aware": "pdserve.proxy.policies.cache_aware:cache_aware",
}
"""By name, `module:function`."""
PREFIX_POLICIES: Final = frozenset({"cache_aware", "prefix_sticky"})
"""Those that look at which engine has what of a prompt. For them the proxy tokenizes prompts and
reads the engines' KV events."""


def looks_at_prefixes(*names: str) -> bool:
    """Whether one of these policies is to be told which engine has what of a prompt."""
    return not PREFIX_POLICIES.isdisjoint(names)
