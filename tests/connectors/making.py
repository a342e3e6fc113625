"""Engines that a test makes, as many as it wants, and that end with it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Closable(Protocol):
    """What is to be ended."""

    def close(self) -> None:
        """End it."""


Made = TypeVar("Made", bound=Closable)
Arguments = ParamSpec("Arguments")


@contextlib.contextmanager
def making(make: Callable[Arguments, Made]) -> Iterator[Callable[Arguments, Made]]:
    """Return a function that makes what `make` does; all of that is closed behind the block."""
    with contextlib.ExitStack() as ends:

        def made(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
            each = make(*args, **kwargs)
            ends.callback(each.close)
            return each

        yield made
