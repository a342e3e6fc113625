"""Reads how a model pools a text into one vector, from sentence-transformers' files.

A directory without them is an ordinary text model, whose last token represents the text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from pdserve.errors import ConfigError
from pdserve.text.tokenizer import read_json
from pdserve.wire.sampling import Pooling

if TYPE_CHECKING:
    from pathlib import Path

_MODULES = "modules.json"
_PREFIX = "pooling_mode_"
_KINDS = {"lasttoken": Pooling.LAST, "mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN}


class PoolingStyle(msgspec.Struct, frozen=True):
    """How a text's hidden states become a vector.

    Attributes:
        pooling: None if the method is not supported.
        is_normalized: Whether vectors have length 1.
        refusal: Why the method is not supported.
    """

    pooling: Pooling | None = Pooling.LAST
    is_normalized: bool = True
    refusal: str = ""


def load_pooling(directory: Path) -> PoolingStyle:
    """Read how texts become vectors.

    Raises:
        ConfigError: A file is malformed.
    """
    path = directory / _MODULES
    if not path.exists():
        return PoolingStyle()
    pooling, is_normalized = Pooling.LAST, False
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                modes = _modes(read_json(directory / str(module.get("path")) / "config.json"))
                if len(modes) != 1 or modes[0] not in _KINDS:
                    return _refused(f"its pooling is {' and '.join(modes)}")
                pooling = _KINDS[modes[0]]
            case "Normalize":
                is_normalized = True
            case _:
                return _refused(f"its {_MODULES} has the module {kind}")
    return PoolingStyle(pooling, is_normalized)


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} does not hold a list of modules: {error}") from error


def _modes(config: dict[str, Any]) -> list[str]:
    """Return the modes that a pooling module enables, in either form of its file."""
    if isinstance(mode := config.get("pooling_mode"), str):
        return [mode]
    return [
        name.removeprefix(_PREFIX)
        for name, is_on in config.items()
        if name.startswith(_PREFIX) and is_on is True
    ]


def _refused(why: str) -> PoolingStyle:
    return PoolingStyle(
        None, refusal=f"this model's vectors cannot be made: {why}, served are lasttoken and mean"
    )
