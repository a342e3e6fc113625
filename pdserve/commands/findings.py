"""What a check has found, and whether two engines fit together. Imports no engine."""

from __future__ import annotations

import enum

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
    """A running engine, as its `/pdserve/info` describes it."""

    url: str
    role: str
    layout_digest: str
    layout: dict[str, str]
    text_digest: str = ""


def compatible(one: RunningEngine, other: RunningEngine) -> Finding:
    """Is KV of one engine what the other one expects?"""
    names = f"{one.url} and {other.url}"
    if one.layout_digest == other.layout_digest:
        if one.text_digest != other.text_digest:
            return Finding(
                "compatible",
                Grade.WARN,
                f"{names} can exchange KV, and differ in tokenizer, chat template, generation "
                "defaults, parsers or release of llguidance: one of them alone serves requests "
                "with a grammar or with tools",
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
