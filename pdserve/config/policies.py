"""The list of routing policies, one line each; the command line's help is made from it.

What a policy is, and what it may look at, is in `proxy/policies`.
"""

from __future__ import annotations

from typing import Final

POLICIES: Final = {
    name: f"pdserve.proxy.policies.choosing:{name}"
    for name in (
        "round_robin",
        "least_loaded",
        "prefix_sticky",
        "cache_aware",
        "power_of_two",
        "dynamo_cost",
        "llmd_blend",
    )
}
"""By name, `module:function`."""
SPLIT_POLICIES: Final = {
    name: f"pdserve.proxy.policies.splitting:{name}"
    for name in ("always", "never", "llmd", "ppd", "isl_bounding")
}
"""Whether a request is split between two engines; by name, `module:function`."""
PREDICTED: Final = "predicted"
"""The split policy that chooses both engines at once, by what it has learned (`proxy/brain`)."""
SHADOW: Final = "shadow"
"""The one that has the same chosen, measures how right that was, and splits every request."""
PREFIX_POLICIES: Final = frozenset(
    {
        "cache_aware",
        "dynamo_cost",
        "isl_bounding",
        "llmd",
        "llmd_blend",
        "ppd",
        PREDICTED,
        "prefix_sticky",
        SHADOW,
    }
)
"""Those of both kinds that look at which engine has what of a prompt. For them the proxy tokenizes
prompts and reads the engines' KV events."""


def looks_at_prefixes(*names: str) -> bool:
    """Whether one of these policies is to be told which engine has what of a prompt."""
    return not PREFIX_POLICIES.isdisjoint(names)
