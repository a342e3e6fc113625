"""Resolves the name of a model to a directory on this machine.

Knows nothing of what is in the directory. A path never touches a network; a name of the
Hugging Face hub is looked up in the local cache first.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Final

from pdserve.config.boxed import BOXED, boxed_model_dir
from pdserve.errors import ConfigError

_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILES: Final = ("*.json", "*.safetensors", "*.jinja", "medusa_lm_head.pt")


def model_directory(model: str) -> Path:
    """Return the directory that MODEL means.

    Args:
        model: A directory, `boxed`, or a name of the hub as `Qwen/Qwen3-0.6B`.

    Raises:
        ConfigError: There is no such directory, it has no config.json, or the hub cannot provide
            it.
    """
    if model == BOXED:
        return _checked(boxed_model_dir(), "the model that comes with pdserve")
    path = Path(os.path.expanduser(model))  # a user that does not exist stays a name
    if path.is_dir():
        return _checked(path.resolve(), f"MODEL {model}")
    if path.exists():
        raise ConfigError(
            f"MODEL is {model}, a file: name the directory that holds its config.json",
            param="model",
        )
    if _HUB_NAME.fullmatch(model):
        return _checked(_from_hub(model), f"MODEL {model}")
    raise ConfigError(
        f"MODEL is {model}, which is not a directory: name a model directory in Hugging Face "
        f"format, a model on the hub such as Qwen/Qwen3-0.6B, or {BOXED} for the model that comes "
        "with pdserve",
        param="model",
    )


def tokenizer_directory(given: str) -> str:
    """Return the directory that --tokenizer means: as given, or that of `boxed` or a hub's model.

    Raises:
        ConfigError: The hub cannot provide the model.
    """
    is_name = _HUB_NAME.fullmatch(given) and not Path(given).exists()
    return str(model_directory(given)) if is_name or given == BOXED else given


def _checked(path: Path, what: str) -> Path:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"{what}: {path} has no config.json, so it is not a model in Hugging Face format",
            param="model",
        )
    return path


def _from_hub(name: str) -> Path:
    import logging

    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        with contextlib.suppress(LocalEntryNotFoundError):
            return Path(snapshot_download(name, allow_patterns=list(_FILES), local_files_only=True))
        logging.getLogger(__name__).info("downloading %s from the hub", name)
        return Path(snapshot_download(name, allow_patterns=list(_FILES)))
    except Exception as error:  # the hub's client raises many kinds: the model is not available
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"MODEL is {name}, which is neither a directory here nor a model that the hub gives "
            f"({type(error).__name__}: {reason}): name a model directory in Hugging Face format, "
            f"or {BOXED} for the model that comes with pdserve",
            param="model",
        ) from error
