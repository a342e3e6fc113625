"""Restarts a stream on another engine without the client noticing.

Sampling is a function of (seed, position), so an engine given the same request repeats
the output that another one began. `Transcript` records everything sent to the client as its
length and a hash, whose size does not depend on the length. `Replay` swallows the same
length of the repeated stream, hashing it, and passes on the rest. Nothing passes
before the hashes are equal: a stream that does not repeat itself raises `DivergedError`, and
wrong text is never sent.

Engines may cut the same text into different chunks, so text is compared by choice, not by event:
strings and lists (log-probabilities, token ids) are runs, wherever they are in a choice, and
each is consumed as a prefix; a tool call is at its index. The tokens must be the same; their
likelihoods are measured, and no two engines agree on them to the last digit.
Knows the shape of a chunk; knows no engine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from pdserve.errors import UpstreamError
from pdserve.proxy.relay import SseParser

if TYPE_CHECKING:
    from pdserve.proxy.relay import Event

RECENT_BYTES = 16 << 10
"""What is kept of a stream as it was sent, about 60 tokens, before it is hashed at one go: most
streams end before, and are never read."""

_TEXTS = frozenset(
    {"text", "content", "reasoning", "reasoning_content", "name", "arguments", "input"}
)
_TEXT = re.compile(
    rb'"(?:text|content|reasoning|reasoning_content|arguments|input)":"((?:[^"\\]|\\.)*+)"'
)
"""The text of a chunk, as JSON."""
_CALLS = "tool_calls"
_ONCE = frozenset({"role", "id", "type"})
"""Sent once for each choice or call. A call's id may be drawn at random: it is not compared."""
_NUM_LEADING = 3
"""Events at the beginning of a stream that are unlike the others: the role, the first token."""
_ALTERNATIVES = "top_logprobs"
"""The likeliest tokens, in the order of their measured likelihood."""
_DIGEST_BYTES = 16

Path = tuple[str, ...]


class DivergedError(UpstreamError):
    """A repeated stream differs from the original.

    Args:
        what: The evidence.
    """

    code = "replay_diverged"

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what}; send the request again (engines of a deployment need the same version, "
            "weights and settings)"
        )


class _Run:
    """Text, or a list, in any number of parts: its length and its hash.

    Attributes:
        length: In characters or items.
    """

    __slots__ = ("_hash", "length")

    def __init__(self) -> None:
        self.length = 0
        self._hash = blake2b(digest_size=_DIGEST_BYTES)

    def add(self, part: str | list[Any], path: Path) -> None:
        """Append a part; `path` gives the run's place in a choice."""
        self.length += len(part)
        if isinstance(part, str):
            self._hash.update(part.encode())
        elif path[-1] != _ALTERNATIVES:
            for item in part:
                self._hash.update(_encode(_named_by(item)))

    @property
    def digest(self) -> bytes:
        """A digest that is equal for the same text, and for lists that name the same tokens."""
        return self._hash.digest()


@dataclass(slots=True)
class _Choice:
    """The client's part of one choice.

    Attributes:
        runs: Text and lists, by their place in a chunk's choice.
        roles: Paths already sent that are sent only once.
        has_ended: Whether the client has its finish reason.
    """

    runs: dict[Path, _Run] = field(default_factory=dict)
    roles: set[Path] = field(default_factory=set)
    has_ended: bool = False


class _Chunk(msgspec.Struct):
    """The part of an event that is read while a stream is undisturbed."""

    choices: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None


class _Mould(NamedTuple):
    """The bytes around an event's only text, if nothing else in it is compared.

    Attributes:
        before, after: The bytes around the text, up to its quotation marks.
        choice: Index of its choice.
        path: The text's place in that choice.
    """

    before: bytes
    after: bytes
    choice: int
    path: Path

    def text_in(self, data: bytes) -> str | None:
        """Return the texts of whole events, joined; None if one has another mould.

        The bytes between two texts are removed. If anything but text is left, so are its
        quotation marks, which text contains only after a backslash.
        """
        before, after = self.before, self.after
        ends_well = data.startswith(before) and data.endswith(after)
        if not ends_well or len(data) < len(before) + len(after):
            return None
        texts = data[len(before) : -len(after)].replace(after + before, b"")
        try:
            return _decode_text(b'"' + texts + b'"')
        except _NOT_A_CHUNK:
            return None


class Transcript:
    """The part of one stream that a client has been sent.

    Attributes:
        choices: Choices by index.
        has_usage: Whether the client has the stream's usage.
        is_readable: Whether every event could be compared.
    """

    def __init__(self) -> None:
        self.choices: dict[int, _Choice] = {}
        self.has_usage = False
        self.is_readable = True
        self._mould: _Mould | None = None
        self._recent: list[bytes] = []
        self._recent_bytes = 0

    def add(self, data: bytes) -> None:
        """Note whole events that were sent."""
        self._recent.append(data)
        self._recent_bytes += len(data)
        if self._recent_bytes > RECENT_BYTES:
            self.settle()

    def settle(self) -> None:
        """Bring `choices` up to date with the added events."""
        data = self._taken()
        for _ in range(_NUM_LEADING):
            if self._took_alike(data):
                return
            first, end, data = data.partition(b"\n\n")
            self.read(first + end)
        self.read(data)

    def read(self, data: bytes) -> None:
        """Note whole events one by one, at once."""
        for event in SseParser().feed(data):
            if event.data and not event.is_done:  # a comment has none
                self._note(event)

    def _taken(self) -> bytes:
        data = b"".join(self._recent)
        self._recent.clear()
        self._recent_bytes = 0
        return data

    def _took_alike(self, data: bytes) -> bool:
        """Note events that differ only in their text, all at once; return whether they did."""
        if self._mould is None or not data.startswith(self._mould.before):
            self._mould = _mould_of(data[data.rfind(b"\n\n", 0, -2) + 2 :])
        if self._mould is None or (text := self._mould.text_in(data)) is None:
            return not data
        choice = self.choices.setdefault(self._mould.choice, _Choice())
        choice.runs.setdefault(self._mould.path, _Run()).add(text, self._mould.path)
        return True

    def _note(self, event: Event) -> None:
        try:
            chunk = _decode_chunk(event.data)
            for choice in chunk.choices or ():
                state = self.choices.setdefault(choice["index"], _Choice())
                state.has_ended = state.has_ended or choice.get("finish_reason") is not None
                _collect(choice, (), state)
        except _NOT_A_CHUNK:
            self.is_readable = False
        else:
            self.has_usage = self.has_usage or (not chunk.choices and bool(chunk.usage))


def _mould_of(raw: bytes) -> _Mould | None:
    """Return the mould of an event; None unless a single text is compared in it."""
    text = _TEXT.search(raw)
    if text is None:
        return None
    before, after = raw[: text.start(1)], raw[text.end(1) :]
    found = {_only_run(before + letters + after, len(letters)) for letters in (b"", b"xx")}
    only = found.pop()
    return None if found or only is None else _Mould(before, after, *only)


def _only_run(event: bytes, length: int) -> tuple[int, Path] | None:
    """Return the place of an event's only run, if it has that length; else None."""
    sample = Transcript()
    sample.read(event)
    for index, choice in sample.choices.items():
        runs = [(path, run.length) for path, run in choice.runs.items()]
        has_more = len(sample.choices) > 1 or choice.roles or choice.has_ended
        if sample.is_readable and not has_more and [n for _, n in runs] == [length]:
            return index, runs[0][0]
    return None


class _Left:
    """The part of one choice still to be swallowed.

    Attributes:
        runs: Length and digest of the client's part, and how much of it the repeated stream has
            reached.
        is_seen: Whether the repeated stream has reached this choice.
    """

    def __init__(self, sent: _Choice) -> None:
        self.runs = {path: (run.length, run.digest, _Run()) for path, run in sent.runs.items()}
        self.roles = frozenset(sent.roles)
        self.has_ended = sent.has_ended
        self.is_seen = False

    @property
    def is_any(self) -> bool:
        """Whether the repeated stream has yet to reach the end of a run."""
        return any(repeated.length < length for length, _, repeated in self.runs.values())


class Replay:
    """Filters one repeated stream.

    Args:
        transcript: What the client has now; what is added later, of choices that are ahead of
            others, is not swallowed.

    Raises:
        DivergedError: It cannot be compared with anything.
    """

    def __init__(self, transcript: Transcript) -> None:
        transcript.settle()
        if not transcript.is_readable:
            raise DivergedError("the part of the stream that was sent cannot be read")
        self._choices = {index: _Left(sent) for index, sent in transcript.choices.items()}
        self._has_usage = transcript.has_usage

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to swallow: the rest can be passed on unread."""
        return not self._has_usage and all(
            choice.is_seen and not choice.has_ended and not choice.is_any
            for choice in self._choices.values()
        )

    def feed(self, event: Event) -> bytes:
        """Return the part of a repeated event that the client does not have yet.

        Raises:
            DivergedError: It contradicts what the client has.
        """
        if event.is_done:
            self._expect_nothing_left()
        if event.is_done or not event.data:
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

    def _strip_choice(self, choice: dict[str, Any]) -> dict[str, Any] | None:
        """Return the part of a choice that the client lacks; None if it has all of it."""
        state = self._choices.get(choice["index"])
        if state is None:
            return choice
        state.is_seen = True
        ends = choice.get("finish_reason") is not None
        rest, has_more = _strip(choice, (), state)
        if ends and state.is_any:
            raise DivergedError("the repeated stream ends earlier than the first one")
        if state.has_ended:
            if has_more:
                raise DivergedError("the repeated stream is longer than the first one")
            return None
        if not has_more and not ends and (state.runs or state.roles):
            return None
        return rest

    def _expect_nothing_left(self) -> None:
        if any(choice.is_any for choice in self._choices.values()):
            raise DivergedError("the repeated stream ends earlier than the first one")


_NOT_A_CHUNK = (
    msgspec.MsgspecError,
    ValueError,
    RecursionError,
    AttributeError,
    KeyError,
    TypeError,
)
_decode_text = msgspec.json.Decoder(str).decode
_decode_chunk = msgspec.json.Decoder(_Chunk).decode
_encode = msgspec.msgpack.Encoder(order="sorted").encode


def _chunk_of(event: Event) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return an event's object, and the choices in it."""
    try:
        chunk = msgspec.json.decode(event.data)
        choices = chunk.get("choices") or []
        if all(isinstance(choice["index"], int) for choice in choices):
            return chunk, choices
    except _NOT_A_CHUNK:
        pass  # said below
    raise DivergedError("the repeated stream cannot be read")


def _collect(value: dict[str, Any], path: Path, state: _Choice) -> None:
    """Append a delivered choice's texts and lists to the runs of its state."""
    for key, part in value.items():
        here = (*path, key)
        if isinstance(part, dict):
            _collect(part, here, state)
        elif key == _CALLS and part:
            for call in part:
                _collect(call, (*here, str(call["index"])), state)
        elif isinstance(part, list) or (key in _TEXTS and isinstance(part, str)):
            state.runs.setdefault(here, _Run()).add(part, here)
        elif key in _ONCE and part is not None:
            state.roles.add(here)


def _strip(value: dict[str, Any], path: Path, state: _Left) -> tuple[dict[str, Any], bool]:
    """Remove the delivered part of a choice; also return whether any content is left."""
    rest: dict[str, Any] = {}
    has_more = False
    for key, part in value.items():
        here = (*path, key)
        if isinstance(part, dict):
            rest[key], more = _strip(part, here, state)
            has_more = has_more or more
        elif key == _CALLS and part:
            rest[key] = _strip_calls(part, here, state)
            has_more = has_more or bool(rest[key])
        elif isinstance(part, list) or (key in _TEXTS and isinstance(part, str)):
            rest[key] = _strip_run(part, here, state)
            has_more = has_more or bool(rest[key])
        elif here in state.roles:
            continue
        else:
            rest[key] = part
    return rest, has_more


def _strip_calls(calls: list[dict[str, Any]], path: Path, state: _Left) -> list[dict[str, Any]]:
    """Remove the delivered part of calls; omit calls already begun that are then empty.

    Raises:
        DivergedError: A call has no index.
    """
    kept = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("index"), int):
            raise DivergedError("the repeated stream cannot be read")
        where = (*path, str(call["index"]))
        is_begun = any(run[: len(where)] == where for run in state.runs)
        rest, has_more = _strip(call, where, state)
        for kind in ("function", "custom"):
            if is_begun and isinstance(rest.get(kind), dict):
                rest[kind] = {key: part for key, part in rest[kind].items() if part}
        if has_more or not is_begun:
            kept.append(rest)
    return kept


def _strip_run(part: Any, path: Path, state: _Left) -> Any:
    """Consume a text or a list against the delivered one at the same place."""
    if path not in state.runs:
        return part
    num_sent, digest, repeated = state.runs[path]
    length = min(len(part), num_sent - repeated.length)
    if length:
        repeated.add(part[:length], path)
        if repeated.length == num_sent and repeated.digest != digest:
            raise DivergedError("the repeated stream differs from the part that was sent")
    return part[length:]


def _named_by(value: Any) -> Any:
    """Return the part of a value that names tokens: any two likelihoods count as equal."""
    match value:
        case float():
            return 0.0
        case dict():
            return {
                key: None if key == _ALTERNATIVES else _named_by(each)
                for key, each in value.items()
            }
        case list():
            return [_named_by(each) for each in value]
        case _:
            return value
