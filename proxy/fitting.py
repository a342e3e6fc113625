"""How two engines fit together, by what they say of themselves. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pdserve.proxy.backend import Backend
    from pdserve.wire.request import EngineInfo

_REVISION = frozenset({"protocol", "schema", "weights"})
"""Fields of a layout in which engines of one deployment may differ while it is rolled."""


class Misfit(NamedTuple):
    """What is wrong with two engines together: a line of the log."""

    event: str
    reason: str


def misfits(one: Backend, other: Backend) -> Iterator[Misfit]:
    """Yield what is to be logged of two engines, if both say what they are."""
    ours, theirs = one.info, other.info
    if ours is None or theirs is None:
        return
    if (ours.engine_id, ours.incarnation) == (theirs.engine_id, theirs.incarnation):
        yield Misfit(
            "two URLs lead to one engine",
            f"{one.url} and {other.url} are {ours.engine_id}, which gets requests as if it were "
            "two engines: leave one of them out",
        )
        return
    if not is_same_model(ours, theirs):  # both named on the command line: only one is taken in
        return
    can_exchange = ours.layout_digest == theirs.layout_digest
    if (one.prefills() and other.decodes()) or (other.prefills() and one.decodes()):
        if not can_exchange:
            yield Misfit(
                "requests will not be split between two engines",
                cannot_exchange(one.url, ours, other.url, theirs),
            )
        elif differ_in_text(one, other):
            yield Misfit(
                "two engines read requests differently",
                f"{one.url} and {other.url} differ in tokenizer, chat template, "
                "generation_config.json or parsers, and an answer may be begun by one and "
                "continued by the other: give both the same files and flags",
            )
    are_as_long = ours.max_model_len == theirs.max_model_len
    if can_exchange and one.decodes() and other.decodes() and not are_as_long:
        yield Misfit(
            "two engines end answers at different lengths",
            f"{one.url} has --max-model-len {ours.max_model_len}, {other.url} has "
            f"{theirs.max_model_len}, and an answer that fills the context and moves from one to "
            "the other ends where the shorter one does: give both the same",
        )


def is_same_model(ours: EngineInfo, theirs: EngineInfo) -> bool:
    """Return whether two engines may belong to one deployment, even during a rolling update.

    Both are served under one name: a request that gives it may reach either. Weights may differ
    during an update, and so may the layout fields that a version knows: only those that both
    know are compared.
    """
    known_to_both = ours.layout.keys() & theirs.layout.keys() - _REVISION
    return ours.model == theirs.model and (
        ours.layout_digest == theirs.layout_digest
        or all(ours.layout[name] == theirs.layout[name] for name in known_to_both)
    )


def why_misfit(url: str, engine: EngineInfo, others: Iterable[Backend]) -> str:
    """Return how the engine at `url` differs from the first other it may not serve beside."""
    for other in others:
        if other.url != url and other.info and not is_same_model(engine, other.info):
            return cannot_exchange(url, engine, other.url, other.info)
    return ""


def cannot_exchange(url: str, engine: EngineInfo, other_url: str, other: EngineInfo) -> str:
    """Return a description of the difference, with both values."""
    ours, theirs = ({**each.layout, "served model name": each.model} for each in (engine, other))
    differing = [
        f"{name} is {ours.get(name)} here and {theirs.get(name)} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]
    digests = f"layout digest {engine.layout_digest} here, {other.layout_digest} there"
    remedy = "" if engine.model == other.model else " (--served-model-name gives both one name)"
    what = "; ".join(differing) or digests
    return f"{url} cannot exchange KV with {other_url}: {what}{remedy}"


def differ_in_text(one: Backend, other: Backend) -> bool:
    """Return whether two engines say that their tokens, or answers, to one request differ."""
    said = {each.info.text_digest for each in (one, other) if each.info is not None}
    return len(said - {""}) > 1
