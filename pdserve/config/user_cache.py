"""The cache directory for what pdserve can recreate: compiled kernels, digests of files."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return ``pdserve`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``; it need not exist.

    None: there is neither, as in a container whose user has no entry in passwd.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(cache) if cache else Path.home() / ".cache") / "pdserve"
    except RuntimeError:
        return None
