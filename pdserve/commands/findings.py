"""The findings of checks, and whether two engines fit together. Imports no engine."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import msgspec


class Grade(enum.Enum):
    """What a finding means for the user."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """The outcome of one check.

    Attributes:
        remedy: What to do about it; empty if nothing has to be done.
    """

    check: str
    verdict: Grade
    text: str
    remedy: str = ""


class RunningEngine(msgspec.Struct, frozen=True):
    """A running engine, as its `/pdserve/info` describes it.

    Attributes:
        hands_over: Whether it has a connector that exchanges KV with other engines.
    """

    url: str
    role: str
    layout_digest: str
    layout: dict[str, str]
    text_digest: str = ""
    numerics: dict[str, Any] | None = None
    hands_over: bool = True

    @classmethod
    def told(cls, url: str, engine: Mapping[str, Any]) -> RunningEngine:
        """Return the engine at `url` from its report."""
        return cls(
            url,
            engine["role"],
            engine["layout_digest"],
            engine["layout"],
            engine.get("text_digest", ""),
            engine.get("numerics"),
            bool(engine["endpoints"]),
        )


def compatible(one: RunningEngine, other: RunningEngine) -> Finding:
    """Can one engine use the other's KV?"""
    names = f"{one.url} and {other.url}"
    if alone := [each.url for each in (one, other) if not each.hands_over]:
        return Finding(
            "compatible",
            Grade.FAIL,
            f"{names} cannot exchange KV: {' and '.join(alone)} has no connector for it",
            "add nixl to --kv-transfer-config.kv-connector",
        )
    if one.layout_digest == other.layout_digest:
        if one.text_digest != other.text_digest:
            return Finding(
                "compatible",
                Grade.WARN,
                f"{names} can exchange KV, but differ in tokenizer, chat template, generation "
                "defaults, parsers or llguidance release: a request with a grammar or with tools "
                "is served by one of them alone",
                "start both with the same files, flags and packages",
            )
        return Finding("compatible", Grade.OK, f"{names} can exchange KV")
    differences = ", ".join(
        f"{key} {one.layout.get(key, 'unknown')} and {other.layout.get(key, 'unknown')}"
        for key in sorted({*one.layout, *other.layout})
        if one.layout.get(key) != other.layout.get(key)
    )
    return Finding(
        "compatible",
        Grade.FAIL,
        f"{names} differ: {differences or 'only in their digests'}",
        "start both with the same model and --dtype",
    )


def numerics(one: RunningEngine, other: RunningEngine) -> Finding | None:
    """Do both engines round alike? None if one of them does not report its numerics."""
    ours, theirs = one.numerics, other.numerics
    if ours is None or theirs is None:
        return None
    names = f"{one.url} and {other.url}"
    if ours == theirs:
        fields = ", ".join(f"{key} {value}" for key, value in ours.items() if value)
        return Finding("numerics", Grade.OK, f"{names} round alike: {fields}")
    differences = ", ".join(
        f"{key} {ours.get(key) or 'none'} and {theirs.get(key) or 'none'}"
        for key in sorted({*ours, *theirs})
        if ours.get(key) != theirs.get(key)
    )
    return Finding(
        "numerics",
        Grade.WARN,
        f"{names} round differently: {differences}. A request that they share may get different "
        "text than one of them alone would write",
        "if that matters, use the same kind of device, release, TP size and expert places for "
        "both, and --enable-eplb for neither",
    )
