"""Split policies: one pure function each, which decides whether to disaggregate a request.

Each sees the prefill engine that would compute the prompt and the decode engine that would serve
the whole request. It returns the reason to serve it whole, or an empty string to split it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pdserve.proxy.policies import BackendView, RouteRequest

SPLIT: Final = ""
MOSTLY_CACHED: Final = "mostly_cached"
_LLMD_TOKENS: Final = 16
_PPD_TOKENS: Final = 512
_ISL_TOKENS: Final = 2048
_ISL_RATIO: Final = 0.7


def always(request: RouteRequest, prefill: BackendView, local: BackendView) -> str:
    """Split every request."""
    return SPLIT


def never(request: RouteRequest, prefill: BackendView, local: BackendView) -> str:
    """Split no request."""
    return "never_split"


def llmd(request: RouteRequest, prefill: BackendView, local: BackendView) -> str:
    """Split requests that lack 16 tokens of KV at the decode engine, as llm-d does."""
    return SPLIT if _missing(request, local) >= _LLMD_TOKENS else MOSTLY_CACHED


def ppd(request: RouteRequest, prefill: BackendView, local: BackendView) -> str:
    """Split requests that lack 512 tokens; fewer hardly disturb it (PPD, arXiv:2603.13358)."""
    return SPLIT if _missing(request, local) >= _PPD_TOKENS else MOSTLY_CACHED


def isl_bounding(request: RouteRequest, prefill: BackendView, local: BackendView) -> str:
    """Split requests that lack 2048 tokens there or 70 % of the prompt, as Dynamo does."""
    missing = _missing(request, local)
    is_small = missing < min(_ISL_TOKENS, _ISL_RATIO * request.prompt_tokens)
    return MOSTLY_CACHED if is_small else SPLIT


def _missing(request: RouteRequest, local: BackendView) -> int:
    return max(0, request.prompt_tokens - local.hit_tokens)
