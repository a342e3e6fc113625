"""A Hugging Face `config.json`: the file, and typed access to its fields.

Every error names the field, its value and the remedy. Knows no architecture.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def read_config(directory: Path, param: str = "model") -> dict[str, Any]:
    """Return the JSON object in `directory/config.json`.

    Args:
        param: The setting that names the directory.

    Raises:
        ConfigError: It is missing, cannot be read, or is not a JSON object.
    """
    if not directory.is_dir():
        raise ConfigError(
            f"model {str(directory)!r} is not a directory: name a model in Hugging Face format "
            "(config.json, *.safetensors, tokenizer.json)",
            param=param,
        )
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ConfigError(
            f"model {str(directory)!r} has no config.json, so it is not in Hugging Face format",
            param=param,
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", param=param) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}", param=param) from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is not a JSON object", param=param)
    return config


class Fields:
    """Typed access to a configuration; an invalid value is a `ConfigError` that names the field.

    Args:
        path: Path of the object in the file, with a dot at its end.
        param: The setting that names the directory.
    """

    def __init__(
        self, architecture: str, config: dict[str, Any], path: str = "", *, param: str = "model"
    ) -> None:
        self.architecture = architecture
        self._config = config
        self._path = path
        self._param = param

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required without a default."""
        value = self._config.get(name)
        if value is None:
            value = default
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        raise self.error(name, value, "a number is needed")

    def above(self, limit: float, name: str, default: float | None = None) -> float:
        """A number above a limit."""
        value = self.number(name, default)
        if value > limit:
            return value
        raise self.error(name, value, f"a number above {limit:g} is needed")

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer of at most 31 bits."""
        value = self.number(name, default)
        if value != int(value) or not 0 < value < 1 << 31:
            raise self.error(name, value, "an integer from 1 to 2147483647 is needed")
        return int(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false; null is false, as in transformers."""
        value = self._config.get(name, default)
        value = False if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, value, "true or false is needed")
        return value

    def get(self, name: str) -> Any:
        """The raw value; None if it is absent."""
        return self._config.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def names(self) -> set[str]:
        """All fields that are present."""
        return set(self._config)

    def section(self, name: str) -> Fields | None:
        """The fields of an object; None if it is absent."""
        value = self._config.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, value, "an object is needed")
        return Fields(self.architecture, value, f"{self._path}{name}.", param=self._param)

    def only(self, name: str, *allowed: object) -> None:
        """Refuse a feature that is not supported. Absent is always allowed."""
        value = self._config.get(name)
        if value is not None and value not in allowed:
            remedy = f"only {' or '.join(repr(a) for a in allowed)} is supported"
            raise self.error(name, value, remedy if allowed else "this is not supported")

    def with_defaults(self, **defaults: object) -> Fields:
        """The same fields, and others with the values that they have where they are absent."""
        return Fields(
            self.architecture, {**defaults, **self._config}, self._path, param=self._param
        )

    def replaced(self, **values: object) -> Fields:
        """The same fields, some with other values."""
        return Fields(self.architecture, {**self._config, **values}, self._path, param=self._param)

    def error(self, name: str, value: object, remedy: str) -> ConfigError:
        """Return the error for an invalid value."""
        return ConfigError(
            f"config.json ({self.architecture}): {self._path}{name} is {value!r}: {remedy}",
            param=self._param,
        )
