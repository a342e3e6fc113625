"""Starting a stream again on another engine without the client noticing.

Sampling is a function of (seed, position), so an engine that is given the same request
repeats what another one had begun. `Replay` is told what the client has been sent, swallows
exactly that from the repeated stream, and passes on the rest. It compares as it swallows: a
stream that does not repeat itself raises `DivergedError`, and wrong text is never sent.

Engines may cut the same text into other chunks, so text is compared by choice, not by event:
strings and lists (log-probabilities, token ids) are consumed as prefixes, wherever they stand
in a choice. Which tokens stand there must be the same; how likely they were is measured, and
no two engines measure the same to the last digit. Knows the shape of a chunk; knows no engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import UpstreamError
from pdserve.proxy.relay import SseParser

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pdserve.proxy.relay import Event

_TEXTS = frozenset({"text", "content", "reasoning_content"})
_ALTERNATIVES = "top_logprobs"
"""The likeliest tokens, in the order of their measured likelihood."""

Path = tuple[str, ...]


class DivergedError(UpstreamError):
    """A repeated stream is not the one that was begun."""

    code = "replay_diverged"


@dataclass(slots=True)
class _Choice:
    """What is still to be swallowed of one choice.

    Attributes:
        runs: Text and lists, by where they stand in a chunk's choice.
        roles: Paths of the roles that were sent; sent once per choice.
        has_ended: The client has its finish reason.
        is_seen: The repeated stream has come to this choice.
    """

    runs: dict[Path, Any] = field(default_factory=dict)
    roles: set[Path] = field(default_factory=set)
    has_ended: bool = False
    is_seen: bool = False


class Replay:
    """Filters one repeated stream.

    Args:
        delivered: Whole events the client has, in order, as bytes.
    """

    def __init__(self, delivered: Iterable[bytes]) -> None:
        self._choices: dict[int, _Choice] = {}
        self._has_usage = False
        parser = SseParser()
        for data in delivered:
            for event in parser.feed(data):
                self._note(event)

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to swallow: the rest can be passed on unread."""
        return not self._has_usage and all(
            choice.is_seen and not choice.has_ended and not any(choice.runs.values())
            for choice in self._choices.values()
        )

    def feed(self, event: Event) -> bytes:
        """Return what of a repeated event the client does not have yet.

        Raises:
            DivergedError: It contradicts what the client has.
        """
        if event.is_done:
            self._expect_nothing_left()
            return event.raw
        chunk, choices = _chunk_of(event)
        if not choices:
            return b"" if self._has_usage and chunk.get("usage") else event.raw
        kept = []
        changed = False
        for choice in choices:
            rest = self._strip_choice(choice)
            changed = changed or rest != choice
            if rest is not None:
                kept.append(rest)
        if not changed:
            return event.raw
        if not kept:
            return b""
        return b"data: " + msgspec.json.encode({**chunk, "choices": kept}) + b"\n\n"

    def _note(self, event: Event) -> None:
        if event.is_done:
            return
        chunk, choices = _chunk_of(event)
        if not choices:
            self._has_usage = self._has_usage or bool(chunk.get("usage"))
            return
        for choice in choices:
            state = self._choices.setdefault(choice["index"], _Choice())
            state.has_ended = state.has_ended or choice.get("finish_reason") is not None
            _collect(choice, (), state)

    def _strip_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return the part of a choice that the client lacks; None if it has all of it."""
        state = self._choices.get(choice["index"])
        if state is None:
            return choice
        state.is_seen = True
        ends = choice.get("finish_reason") is not None
        rest, has_more = _strip(choice, (), state)
        if ends and any(state.runs.values()):
            raise DivergedError("the repeated stream ends before the point it had reached")
        if state.has_ended:
            if has_more:
                raise DivergedError("the repeated stream goes on beyond its former end")
            return None
        if not has_more and not ends and (state.runs or state.roles):
            return None
        return rest

    def _expect_nothing_left(self) -> None:
        if any(any(choice.runs.values()) for choice in self._choices.values()):
            raise DivergedError("the repeated stream ends before the point it had reached")


def _chunk_of(event: Event) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an event's object, and the choices in it."""
    try:
        chunk = msgspec.json.decode(event.data)
        choices = chunk.get("choices") or []
        if all(isinstance(choice["index"], int) for choice in choices):
            return chunk, choices
    except (msgspec.DecodeError, ValueError, RecursionError, AttributeError, KeyError, TypeError):
        pass  # said below
    raise DivergedError("a repeated stream cannot be read")


def _collect(value: dict[str, Any], path: Path, state: _Choice) -> None:
    """Append a delivered choice's texts and lists to the runs of its state."""
    for key, part in value.items():
        here = (*path, key)
        if isinstance(part, dict):
            _collect(part, here, state)
        elif key in _TEXTS and isinstance(part, str):
            state.runs[here] = state.runs.get(here, "") + part
        elif isinstance(part, list):
            state.runs[here] = state.runs.get(here, []) + part
        elif key == "role" and part is not None:
            state.roles.add(here)


def _strip(value: dict[str, Any], path: Path, state: _Choice) -> tuple[dict[str, Any], bool]:
    """Take what was delivered off a choice; also tell whether any content is left in it."""
    rest: dict[str, Any] = {}
    has_more = False
    for key, part in value.items():
        here = (*path, key)
        if isinstance(part, dict):
            rest[key], more = _strip(part, here, state)
            has_more = has_more or more
        elif isinstance(part, list) or (key in _TEXTS and isinstance(part, str)):
            rest[key] = _strip_run(part, here, state)
            has_more = has_more or bool(rest[key])
        elif here in state.roles:
            continue
        else:
            rest[key] = part
    return rest, has_more


def _strip_run(part: Any, path: Path, state: _Choice) -> Any:
    """Consume a text or a list against what was delivered at the same place."""
    delivered = state.runs.get(path)
    if not delivered:
        return part
    length = min(len(part), len(delivered))
    if path[-1] != _ALTERNATIVES and not _is_same(part[:length], delivered[:length]):
        raise DivergedError("the repeated stream differs from what was begun")
    state.runs[path] = delivered[length:]
    return part[length:]


def _is_same(ours: Any, theirs: Any) -> bool:
    """Whether two values name the same tokens; a likelihood is like any other."""
    match ours, theirs:
        case float(), float():
            return True
        case dict(), dict():
            return ours.keys() == theirs.keys() and all(
                key == _ALTERNATIVES or _is_same(ours[key], theirs[key]) for key in ours
            )
        case list(), list():
            return len(ours) == len(theirs) and all(map(_is_same, ours, theirs))
        case _:
            return bool(ours == theirs)
