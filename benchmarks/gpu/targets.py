"""What is to be reached on a device, and whether a report shows it: shares, equal bits, no errors.

Shares are of what the device was measured to do at best in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Report = dict[str, Any]
_COMPARED = ("equal", "eager", "alone", "untouched", "waited", "bits", "reference's", "finite")
"""Words in the names of comparisons."""


@dataclass(frozen=True, slots=True)
class Target:
    """A share to reach.

    Attributes:
        name: Of what, and of which peak.
        least: The share.
        shares: What a report has of it; it is as good as the least.
    """

    name: str
    least: float
    shares: Callable[[Report], list[float]]


def _figures(report: Report, part: str, *beginnings: str) -> list[dict[str, Any]]:
    found = report["parts"].get(part, {}).get("results", {})
    return [
        figures
        for name, figures in found.items()
        if name.startswith(beginnings) and has_run(figures)
    ]


def has_run(figures: Any) -> bool:
    """Whether an experiment came to its end; the ``error`` of some is a figure."""
    return not (
        isinstance(figures, dict)
        and (isinstance(figures.get("error"), str) or "skipped" in figures)
    )


def _of_copy(report: Report, rates: list[float]) -> list[float]:
    return [rate / copy["gb_per_s"] for copy in _figures(report, "peaks", "copy") for rate in rates]


def _decode_step(report: Report) -> list[float]:
    return [figures["share"] for figures in _figures(report, "step", "graph B=")]


def _single_tokens(report: Report) -> list[float]:
    found = _figures(report, "attention", "decode 64 x 2048: as shipped")
    return _of_copy(report, [figures["gb_per_s"] for figures in found])


def _prompts(report: Report) -> list[float]:
    return [
        figures["tflop_per_s"] / product["tflop_per_s"]
        for product in _figures(report, "peaks", "matmul bf16")
        for figures in _figures(report, "attention", "prefill 8192: as shipped")
    ]


def _chunks(report: Report) -> list[float]:
    return [
        figures[way]["gb_per_s"] / engine["gb_per_s"]
        for way, where in (("save", "to"), ("load", "from"))
        for engine in _figures(report, "copies", f"engine, 8192 KiB {where} the host")
        for figures in _figures(report, "copies", "chunks, as shipped")
    ]


TARGETS = (
    Target("a decode step, of reading weights and KV at a copy's rate", 0.80, _decode_step),
    Target("attention of 64 tokens at 2048, of a copy's rate", 0.85, _single_tokens),
    Target("attention of a prompt of 8192, of a large product's rate", 0.60, _prompts),
    Target("chunks saved and loaded, of the copy engine's rate", 0.80, _chunks),
)


def judged(report: Report) -> list[dict[str, Any]]:
    """Return each target with the share that was found, and whether it is held."""
    rows = []
    for target in TARGETS:
        found = min(target.shares(report), default=None)
        state = "not measured" if found is None else "held" if found >= target.least else "missed"
        share = None if found is None else round(found, 3)
        rows.append({"target": target.name, "least": target.least, "found": share, "is": state})
    return rows


def in_words(row: dict[str, Any]) -> str:
    """Return one target of `judged` as a line."""
    found = "" if row["found"] is None else f"{row['found']:.0%}, "
    return f"{row['is']}: {row['target']}: {found}at least {row['least']:.0%}"


def errors(report: Report) -> list[str]:
    """Return the parts and experiments that failed."""
    return [
        f"{part}: {name}"
        for part, ran in report["parts"].items()
        for name, figures in ran["results"].items()
        if name == "error" or (isinstance(figures, dict) and isinstance(figures.get("error"), str))
    ]


def differences(report: Report) -> list[str]:
    """Return the comparisons, of bits and of results with a reference, that found a difference."""
    return [
        name for part, ran in report["parts"].items() for name in _differing(ran["results"], part)
    ]


def _differing(found: Any, name: str) -> Iterator[str]:
    match found:
        case {"rows": _, "of": _, "max": _}:
            yield name
        case dict():
            for key, value in found.items():
                if (
                    (value is False and any(word in key for word in _COMPARED))
                    or (key == "bits" and value == "differ")
                    or (key in {"equal_rows_of_others", "far_from_reference"} and value)
                ):
                    yield f"{name}: {key}"
                else:
                    yield from _differing(value, f"{name}: {key}")
