"""Narrows a large fleet to the engines worth considering, so that choices stay cheap.

Those that have most of the prompt, some that every proxy draws alike for the same session or
beginning, and some in turn. Of few engines all are looked at.
"""

from __future__ import annotations

import itertools
import zlib
from typing import TYPE_CHECKING, Final

from pdserve.config.schema import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from pdserve.proxy.backend import Backend
    from pdserve.proxy.backends import Backends
    from pdserve.proxy.brain.prompt import RoutePrompt

FEW: Final = 32
"""Engines of which all are looked at."""
_WARM: Final = 4
_DRAWN_BY_NAME: Final = 2
_DRAWN_IN_TURN: Final = 3
"""Of each role."""


class Candidates:
    """Draws engines for successive choices.

    Args:
        known: Returns how many tokens of a prompt engines have, by URL, those with most first.
    """

    def __init__(
        self, backends: Backends, known: Callable[[RoutePrompt], Mapping[str, int]]
    ) -> None:
        self._backends = backends
        self._known = known
        self._turns = itertools.count()

    def of(
        self, prompt: RoutePrompt, layout: str | None, failed: Collection[Backend]
    ) -> Sequence[Backend] | None:
        """Return some ready engines of both roles; None: consider all engines.

        O(grains), however many engines there are.

        Args:
            layout: Engines with other layouts are left out; None leaves none out.
            failed: Engines to leave out.
        """
        if len(self._backends) <= FEW:
            return None
        drawn = self._backends.some(zlib.crc32(prompt.beginning.encode()), _DRAWN_BY_NAME)
        drawn += self._backends.some(next(self._turns), _DRAWN_IN_TURN)
        warm = map(self._backends.get, itertools.islice(self._known(prompt), _WARM))
        found = [
            each
            for each in dict.fromkeys((*warm, *drawn))
            if each is not None
            and each.available
            and each not in failed
            and (layout is None or each.layout in (None, layout))
        ]
        homes = {each.home for each in found}
        has_prefill, has_decode = homes - {Role.DECODE}, homes - {Role.PREFILL}
        return found if has_prefill and has_decode else None
