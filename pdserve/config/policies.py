"""The list of routing policies, one line each; the command line's help is made from it.

What a policy is, and what it may look at, is in `proxy/policies`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pdserve.config.checks import require

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


def read_policy(policy: str) -> tuple[str, str]:
    """Return the routing policy and the split policy that `NAME/SPLIT` or `NAME` names."""
    name, _, split = policy.partition("/")
    return name, split or "always"


def require_policy(policy: str, splits: Collection[str]) -> None:
    """Refuse what is not a routing policy, alone or with one of these split policies."""
    name, split = read_policy(policy)
    require(
        name in POLICIES and split in splits,
        "policy",
        policy,
        f"use one of {', '.join(POLICIES)}, alone or as NAME/SPLIT with one of {', '.join(splits)}",
    )


def looks_at_prefixes(*names: str) -> bool:
    """Whether one of these policies needs to know which engine has what of a prompt."""
    return not PREFIX_POLICIES.isdisjoint(names)
