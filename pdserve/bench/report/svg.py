"""Pictures as SVG text: an element, its attributes, and colours that follow the page's theme.

Colours are CSS classes (`c0` to `c7` for deployments, `s-NAME` for stages), which the page
defines for light and dark. Everything is text that the same input writes the same way.
Knows no axis and no figure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

NUM_COLOURS = 8
"""Deployments that get a colour of their own; further ones begin again."""


def place(value: float) -> str:
    """A coordinate, to a tenth of a unit."""
    return f"{value + 0.0:.1f}".removesuffix(".0")


def element(name: str, *children: str, **attributes: str | float) -> str:
    """An element; `_` in an attribute's name stands for `-`, and `class_` for `class`.

    Args:
        name: Of the element.
        children: Markup, taken as it is.
        attributes: Numbers are coordinates; texts are escaped.
    """
    words = [name]
    for key, value in attributes.items():
        text = value if isinstance(value, str) else place(value)
        words.append(f'{key.rstrip("_").replace("_", "-")}="{html.escape(text)}"')
    head = " ".join(words)
    inner = "".join(children)
    return f"<{head}>{inner}</{name}>" if inner else f"<{head}/>"


def label(text: str, x: float, y: float, *, class_: str = "tick", anchor: str = "start") -> str:
    """A line of text, whose base line is at `y`."""
    return element("text", html.escape(text), x=x, y=y, class_=class_, text_anchor=anchor)


def tooltip(text: str) -> str:
    """What a browser shows when the pointer rests on the element around it."""
    return f"<title>{html.escape(text)}</title>"


def polyline(points: Iterable[tuple[float, float]], class_: str) -> str:
    """A line through points."""
    words = [f"{place(x)} {place(y)}" for x, y in points]
    return element("path", d="M" + "L".join(words), class_=f"line {class_}")


def dots(points: Iterable[tuple[float, float]], class_: str) -> str:
    """Many points as one element; none has a tooltip.

    A dot is 2.6 units wide: places are rounded to whole units sideways and halves upwards, and
    what then falls together is drawn once.
    """
    seen = dict.fromkeys(f"M{round(x)} {place(round(y * 2) / 2)}h0" for x, y in points)
    return element("path", d="".join(seen), class_=f"dots {class_}") if seen else ""


def picture(title: str, description: str, width: int, height: int, children: Sequence[str]) -> str:
    """A whole picture with its accessible title."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{html.escape(title)}" style="max-width:{width}px">'
        f"<desc>{html.escape(description)}</desc>{''.join(children)}</svg>"
    )
