"""A self-contained HTML page and the parts that all reports are made of: nothing is loaded.

Knows no figure.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from pdserve.bench.report.picture import Picture
from pdserve.bench.report.style import stylesheet


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: Text.
        parts: Markup of its body, taken as it is.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{stylesheet()}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def figure(picture: Picture) -> str:
    """A picture under its title and caption."""
    names = picture.names or [""] * len(picture.drawings)
    inner = "".join(
        (f'<p class="panel">{text(name)}</p>' if name else "") + drawing
        for name, drawing in zip(names, picture.drawings, strict=True)
    )
    wide = ' class="wide"' if picture.is_wide else ""
    return (
        f'<figure id="{picture.anchor}"{wide}><h3>{text(picture.title)}</h3>'
        f"<figcaption>{text(picture.caption)}</figcaption>{inner}</figure>"
    )


def bullets(sentences: Iterable[str]) -> str:
    """A list."""
    return f"<ul>{''.join(f'<li>{text(sentence)}</li>' for sentence in sentences)}</ul>"


def two_columns(named: Mapping[str, object]) -> str:
    """A table of two columns."""
    lines = "".join(
        f"<tr><th>{text(name)}</th><td>{text(str(value))}</td></tr>"
        for name, value in named.items()
    )
    return f'<div class="scroll"><table class="plain"><tbody>{lines}</tbody></table></div>'


def text(words: str) -> str:
    """Text as markup."""
    return html.escape(words)
