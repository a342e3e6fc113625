"""Resolves a comparison's settings: its deployments, and where its files go.

Everything that can be refused is refused here, before anything slow begins.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pdserve.bench.compare.topology import STARTED, Topology, pairs, peers, plan, with_store
from pdserve.config.compare import CompareConfig
from pdserve.config.load import did_you_mean
from pdserve.errors import ConfigError

_STORE: Final = "+store"
_LOOK_FOR_GPUS: Final = "import torch; print(torch.cuda.device_count(), torch.__version__)"


def topologies_of(config: CompareConfig) -> list[Topology]:
    """Return the deployments in the order of the table.

    Raises:
        ConfigError: There is none, or the machine cannot run them.
    """
    known = {kind.value: kind for kind in STARTED}
    for word in config.kinds:
        if word.removesuffix(_STORE) not in known:
            raise ConfigError(
                f"--topologies contains {word!r}: use some of {', '.join(known)}, alone or "
                f"followed by {_STORE}{did_you_mean(word, known, least=0.0)}",
                param="topologies",
            )
    own = os.sched_getaffinity(0)
    for core in config.cores:
        if core not in own:
            raise ConfigError(
                f"--cores contains {core}, which this process may not use: use some of "
                f"{', '.join(map(str, sorted(own)))}",
                param="cores",
            )
    units = config.gpus or config.cores or tuple(sorted(own))
    what = "GPUs" if config.gpus else "cores"
    ratios = pairs(tuple(w for word in config.pd for w in word.split(",") if w))
    if config.gpus and config.kinds:
        _require_gpus(config.gpus)
    found: list[Topology] = []
    for word in config.kinds:
        planned = plan(
            [known[word.removesuffix(_STORE)]],
            ratios,
            units,
            chunk_tokens=config.budgets,
            what=what,
            may_share=not config.gpus,
        )
        found += map(with_store, planned) if word.endswith(_STORE) else planned
    labels = [topology.label for topology in found]
    if len(set(labels)) < len(labels):
        twice = next(label for label in labels if labels.count(label) > 1)
        raise ConfigError(
            f"--topologies names the deployment {twice} twice: name it once", param="topologies"
        )
    for peer in peers(config.peer):
        if peer.label in labels:
            raise ConfigError(
                f"--peer has the label {peer.label}, which is that of a deployment: choose another "
                "one",
                param="peer",
            )
        found.append(peer)
    if not found:
        raise ConfigError(
            "there is nothing to compare: give --topologies or --peer", param="topologies"
        )
    return found


def _require_gpus(gpus: Sequence[int]) -> None:
    """Refuse GPUs that engines would not see.

    A separate process looks, as an engine would: CUDA cannot be initialised again for other
    devices.

    Raises:
        ConfigError: Some of them do not exist.
    """
    words = ",".join(map(str, gpus))
    done = subprocess.run(
        [sys.executable, "-c", _LOOK_FOR_GPUS],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": words},
        check=False,
    )
    num, _, version = done.stdout.strip().partition(" ")
    if done.returncode != 0 or not num.isdigit():
        version, num = "which cannot be imported", "0"
    if int(num) < len(gpus):
        raise ConfigError(
            f"--gpus is {words}: torch {version} finds {num} of these {len(gpus)} GPUs on this "
            "machine; use GPUs that pdserve doctor shows, or compare on CPU cores with --cores",
            param="gpus",
        )


def paths_of(config: CompareConfig) -> tuple[Path | None, Path | None]:
    """Return the paths of the report and the JSON; None for a file that is not written.

    Raises:
        ConfigError: A directory is missing.
    """
    report = Path(config.report) if config.report else None
    data = Path(config.result) if config.result else None
    if data is None and report is not None:
        data = report.with_suffix(".json")
    for flag, path in (("report", report), ("result", data)):
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(
                f"--{flag} is {path}: the directory {path.resolve().parent} does not exist; "
                "create it, or choose another path",
                param=flag,
            )
    return report, data
