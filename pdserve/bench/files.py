"""A saved run: figures as in vLLM's JSON, and under `run` everything that was observed.

A file is one JSON object. The figures are at its top level, so that scripts for `vllm bench serve
--save-result` can read it; a file saved without details has no `run`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from pdserve.bench.records import Run
from pdserve.errors import ConfigError
from pdserve.wire.seal import UNREADABLE

_RUN_KEY = "run"


def save(run: Run | None, figures: Mapping[str, Any], path: Path) -> None:
    """Write a run and its figures.

    Args:
        run: None leaves out the details; `load` then refuses the file.
        figures: The result of `figures.figures`.
        path: Its directory is created if missing; an existing file is replaced.

    Raises:
        ConfigError: The file cannot be written.
    """
    content = dict(figures) if run is None else {**figures, _RUN_KEY: msgspec.to_builtins(run)}
    write_file(path, msgspec.json.format(msgspec.json.encode(content), indent=1))


def require_directory(path: Path) -> None:
    """Create the directory of `--result-dir` if it is missing.

    Raises:
        ConfigError: It cannot be created, or nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"--result-dir is {str(path)!r}, where nothing can be written: {error.strerror}",
            param="result-dir",
        ) from error


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that is removed again unless the block writes all of it.

    Raises:
        OSError: It cannot be opened, and stays as it is; or there is no room for it.
    """
    with path.open("wb") as file:
        try:
            yield file
            file.flush()
        except BaseException:
            if path.is_file():  # and not a pipe or a terminal
                path.unlink()
            raise


def write_file(path: Path, content: bytes) -> None:
    """Write a file of text that ends in a line feed; its directory is created if missing.

    Raises:
        ConfigError: The file cannot be written; no part of it is left.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.write(content + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def load(path: Path) -> tuple[Run, dict[str, Any]]:
    """Read a file of `save`: the run and its figures.

    Raises:
        ConfigError: The file is missing, is not a saved run, or was saved without details.
    """
    try:
        content = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except UNREADABLE as error:
        raise ConfigError(f"{path} is not a saved run: {error}") from error
    if _RUN_KEY not in content:
        raise ConfigError(f"{path} holds no single requests: save the run with --save-detailed too")
    try:
        run = msgspec.convert(content.pop(_RUN_KEY), type=Run)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} is not a saved run: {error}") from error
    return run, content
