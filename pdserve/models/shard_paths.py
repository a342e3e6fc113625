"""Which files of a model directory hold its weights. Does not open them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

LFS_MAGIC = b"version https://git-lfs"
"""How a Git LFS pointer begins."""


def shard_paths(directory: Path) -> list[Path]:
    """The files an index names, or else every safetensors file. Sorted by name.

    Raises:
        ConfigError: There are none, a shard that the index names is missing, the index cannot be
            read, or there is a whole model beside its shards.
    """
    single = directory / "model.safetensors"
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            content = index.read_bytes()
        except OSError as error:
            raise ConfigError(f"{index} cannot be read: {error.strerror}", param="model") from None
        if content.startswith(LFS_MAGIC):
            raise ConfigError(f"{index} is a Git LFS pointer: run `git lfs pull`", param="model")
        try:
            names = sorted(set(json.loads(content)["weight_map"].values()))
            paths = [directory / name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise ConfigError(f"{index} has no weight_map", param="model") from None
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ConfigError(
                f"model {str(directory)!r} lacks {len(missing)} of the {len(paths)} shards that "
                f"its index names: {', '.join(missing)}",
                param="model",
            )
        if single.is_file() and single not in paths:
            raise ConfigError(
                f"{single} is not one of the shards that {index.name} names: remove one of the "
                "two, for they may differ",
                param="model",
            )
        return paths
    paths = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not paths:
        raise ConfigError(
            f"model {str(directory)!r} has no *.safetensors: convert its weights to safetensors, "
            "or use --load-format dummy for random weights",
            param="model",
        )
    return paths
