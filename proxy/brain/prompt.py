"""A prompt as routing sees it, and where its prefixes are known to be. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

BYTES_PER_TOKEN: Final = 4
"""Of a prompt that is not tokenized."""
_NAMING_GRAINS: Final = 2
"""Prompts that have these in common go to one engine while none has them: a system prompt, and the
beginning of what is said."""
UNREAD: Final = ("no tokenizer", "no chat template", "fields", "refused", "long", "busy", "slow")
"""Why prompts are named by their bytes."""


class RoutePrompt(msgspec.Struct, frozen=True):
    """A prompt as routing sees it.

    Attributes:
        num_bytes: Size of the request's body.
        num_tokens: Length of the prompt; estimated from its bytes if it is not tokenized; 0 if no
            policy looks at it.
        grains: Names of its prefixes, `GRAIN_TOKENS` tokens more each.
        unread: Reason why it is not tokenized, one of `UNREAD`; empty if it is, or need not be.
        needs_equal_text: Whether engines that share the request must have the same text side.
        request_id: Key of its decision record.
        tenant: Tenant whose share it counts in; empty: shared by all requests that name none.
        priority: The client's priority: lower is earlier.
        session: Name of its conversation; empty if its client gives none.
        ttft_slo_s, itl_slo_s: Its client's objectives; None: the deployment's.
        model: The client's name for the model.
        max_output: Limit on its output tokens; None: not given.
    """

    num_bytes: int
    num_tokens: int = 0
    grains: tuple[int, ...] = ()
    unread: str = ""
    needs_equal_text: bool = False
    request_id: str = ""
    tenant: str = ""
    priority: int = 0
    session: str = ""
    ttft_slo_s: float | None = None
    itl_slo_s: float | None = None
    model: str = ""
    max_output: int | None = None

    @property
    def beginning(self) -> str:
        """Name of its session, or of its first grains; empty if it has neither."""
        grains = self.grains[:_NAMING_GRAINS]
        return self.session or (f"{grains[-1]:x}" if grains else "")

    def named_as(self, read: RoutePrompt) -> RoutePrompt:
        """Return the same request with the length and the grain names of its prompt, once read."""
        return msgspec.structs.replace(
            self, num_tokens=read.num_tokens, grains=read.grains, unread=read.unread
        )


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """An engine's part of a prompt.

    Attributes:
        num_tokens: Tokens from the first one on; whole grains.
        is_exact: Whether it is from the engine's events; else from prompts sent there.
        num_best: The most that any engine of its role has.
    """

    num_tokens: int
    is_exact: bool
    num_best: int = 0


UNKNOWN: Final = KnownPrefix(0, is_exact=False)


def hits_in_words(prompt: RoutePrompt, known: Mapping[str, KnownPrefix]) -> str:
    """Return engines' parts of a prompt, by leg, as `hit prefill 3072 decode ~512 of 4096`.

    Estimates from prompts sent there have a tilde; a better hit at another engine follows as best.
    """
    hits = []
    for leg in filter(known.__contains__, ("prefill", "decode", "local")):
        each = known[leg]
        best = f" (best {each.num_best})" if each.num_best > each.num_tokens else ""
        hits.append(f"{leg} {'' if each.is_exact else '~'}{each.num_tokens}{best}")
    unread = f" (by bytes: {prompt.unread})" if prompt.unread else ""
    return f"hit {' '.join(hits)} of {prompt.num_tokens}{unread}"
