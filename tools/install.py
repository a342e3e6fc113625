"""`pip install` by uv, which takes a quarter of pip's time.

    python tools/install.py --editable .

uv reads none of pip's settings, so they are passed to it here. pip installs if one of them means
nothing to uv, if uv cannot be had, or if uv fails.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")

# For each of pip's settings, uv's variable, and what separates several values in it.
_VARIABLES = {
    "cert": ("SSL_CERT_FILE", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}

# Settings of pip's that do not change what is installed.
_OF_PIP_ALONE = {
    *("config-file", "disable-pip-version-check", "no-input", "retries", "root-user-action"),
}


def settings_for_uv(listed: str) -> dict[str, str] | None:
    """What `pip config list` printed, as environment variables of uv.

    Returns:
        None if a setting means nothing to uv.
    """
    # By pip's precedence: a later section overrides.
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listed.splitlines():
            name, _, value = line.partition("=")
            if name.rpartition(".")[0] == section:
                settings[name.rpartition(".")[2]] = ast.literal_eval(value)
    settings = {name: value for name, value in settings.items() if name not in _OF_PIP_ALONE}
    if not settings.keys() <= _VARIABLES.keys():
        return None
    of_uv = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, value in settings.items():
        variable, between = _VARIABLES[name]
        of_uv[variable] = between.join(value.split())
    return of_uv


def _uv_installs(arguments: list[str]) -> bool:
    """Whether uv could be had and has installed."""
    listed = subprocess.run([*_PIP, "config", "list"], check=True, capture_output=True, text=True)
    settings = settings_for_uv(listed.stdout)
    uv = Path(sys.executable).with_name("uv")
    if settings is None:
        return False
    if not uv.exists() and subprocess.call([*_PIP, "install", "--quiet", "uv"]):
        return False
    # Its progress is for people alone.
    quiet = [] if sys.stderr.isatty() else ["--quiet"]
    command = [str(uv), "pip", "install", "--python", sys.executable, *quiet, *arguments]
    return subprocess.call(command, env={**os.environ, **settings}) == 0


def main(arguments: list[str]) -> int:
    """Install; return the exit status."""
    if _uv_installs(arguments):
        return 0
    # Of 16,000 files a tenth is ever imported: each is compiled when it is.
    return subprocess.call([*_PIP, "install", "--quiet", "--no-compile", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
