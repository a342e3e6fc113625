"""A self-contained HTML page and the parts that all reports are made of: nothing is loaded.

Its policy lets exactly its own style and scripts in, by their digests, and lets it ask nobody.
Knows no figure.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pdserve.bench.report.charts import markup
from pdserve.bench.report.picture import Picture

_NO_SCRIPT: Final = "The pictures are drawn by a script, which this viewer does not run."


def document(title: str, parts: Iterable[str]) -> str:
    """Return a page.

    Args:
        title: Text.
        parts: Markup of its body, taken as it is.
    """
    style = _read("uplot/uPlot.min.css") + _read("page.css")
    licence = _read("uplot/LICENSE").strip()
    scripts = [f"/*!\n{licence}\n*/\n{_read('uplot/uPlot.iife.min.js')}", _read("charts.js")]
    policy = (
        f"default-src 'none'; style-src {_source(style)}; "
        f"script-src {' '.join(map(_source, scripts))}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body><main><noscript><p>{_NO_SCRIPT}</p></noscript>{''.join(parts)}</main>"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _source(content: str) -> str:
    """What a policy calls an inline element of this content (CSP 3, section 2.3.1)."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def figure(picture: Picture) -> str:
    """A picture under its title and caption."""
    names = picture.names or [""] * len(picture.charts)
    inner = "".join(
        (f'<p class="panel">{text(name)}</p>' if name else "") + markup(chart)
        for name, chart in zip(names, picture.charts, strict=True)
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
