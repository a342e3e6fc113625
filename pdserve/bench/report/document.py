"""A self-contained HTML file that loads nothing, and the parts that all reports share.

It has a page for each of a reader's questions. Its policy allows exactly its own style and scripts,
by their digests, and no requests. Knows no figure.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pdserve.bench.report.charts import markup
from pdserve.bench.report.picture import Picture

_NO_SCRIPT: Final = "A script draws the plots, and this viewer does not run scripts."


@dataclass(frozen=True, slots=True)
class QuestionPage:
    """The answer to one question.

    Attributes:
        anchor: Unique anchor in the file.
        question: Text.
        parts: Raw markup; without any the page is left out.
    """

    anchor: str
    question: str
    parts: Sequence[str]


def document(title: str, subtitle: str, pages: Sequence[QuestionPage]) -> str:
    """Return a file of pages, of which a reader sees one at a time, the first one first.

    Args:
        title, subtitle: Text.
        pages: In the order of the questions.
    """
    style = _read("uplot/uPlot.min.css") + _read("page.css")
    licence = _read("uplot/LICENSE").strip()
    scripts = [f"/*!\n{licence}\n*/\n{_read('uplot/uPlot.iife.min.js')}"]
    scripts += [_read("charts.js"), _read("pages.js")]
    shown = [page for page in pages if any(page.parts)]
    policy = (
        f"default-src 'none'; style-src {_source(style)}; "
        f"script-src {' '.join(map(_source, scripts))}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)}</title><style>{style}</style></head>"
        f"<body><main><h1>{text(title)}</h1><p class='soft'>{text(subtitle)}</p>"
        f"<noscript><p>{_NO_SCRIPT}</p></noscript>{_navigation(shown)}"
        f"{''.join(_section(page, shown[at + 1 :]) for at, page in enumerate(shown))}</main>"
        f"{''.join(f'<script>{script}</script>' for script in scripts)}</body></html>\n"
    )


def _navigation(pages: Sequence[QuestionPage]) -> str:
    links = "".join(f'<a href="#{page.anchor}">{text(page.question)}</a>' for page in pages)
    return f"<nav>{links}</nav>" if len(pages) > 1 else ""


def _section(page: QuestionPage, following: Sequence[QuestionPage]) -> str:
    on = ""
    if following:
        after = following[0]
        on = f'<p class="on"><a href="#{after.anchor}">{text(after.question)} →</a></p>'
    return (
        f'<section class="page" id="{page.anchor}"><h2>{text(page.question)}</h2>'
        f"{''.join(page.parts)}{on}</section>"
    )


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _source(content: str) -> str:
    """What a policy calls an inline element of this content (CSP 3, section 2.3.1)."""
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def figures(pictures: Sequence[Picture]) -> str:
    """Pictures side by side, if there is room."""
    inner = "".join(figure(picture) for picture in pictures)
    return f'<div class="grid2">{inner}</div>' if inner else ""


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
