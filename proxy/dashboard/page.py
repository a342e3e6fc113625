"""The page as one document: markup, style and script in one answer that loads nothing else.

Its policy lets exactly this style and this script in, by their digests, and lets the page ask
nobody but the proxy that it came from.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_HERE = Path(__file__).parent


def _source(text: str) -> str:
    """Return what a policy calls an inline element of this text (CSP 3, section 2.3.1)."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


_STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
_SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")

PAGE = (
    (_HERE / "page.html")
    .read_text(encoding="utf-8")
    .replace("/*style*/", _STYLE)
    .replace("/*script*/", _SCRIPT)
    .encode()
)

POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source(_SCRIPT)}",
        f"style-src {_source(_STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
