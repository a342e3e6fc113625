"""Two versions of pdserve in one deployment: the release beside this tree.

The release is a commit of this repository's history, unpacked into a directory of its own; its
processes are started by the commands of today, which it has as well.
"""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.e2e.deployment import Deployment

RELEASE = "d0043bb"
"""0.1, which spoke protocol 1."""
VERSIONS = ("old", "new")

_ROOT = Path(__file__).parents[2]


def release_tree(directory: Path) -> Path | None:
    """Unpack the release; None where the checkout has no history."""
    archive = subprocess.run(
        ["git", "-C", str(_ROOT), "archive", "--format=tar", RELEASE],
        capture_output=True,
        check=False,
    )
    if archive.returncode != 0:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="tar")
    return directory


def start(
    deployment: Deployment, release: Path, version: str, kind: str, name: str, *arguments: str
) -> None:
    """Start `pdserve KIND ARGUMENTS` of a version under `name`."""
    tree = release if version == "old" else None
    deployment.start(name, kind, *arguments, tree=tree)
