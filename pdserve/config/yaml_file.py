"""Reads a YAML file of settings with the line of each, so that errors can point to it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    import yaml

_KEY: Final = re.compile(r"([A-Za-z][\w.-]*)\s*:")
_WORD: Final = re.compile(r"[A-Za-z][\w.-]*")


class YamlFile(NamedTuple):
    """The settings of a file.

    Attributes:
        lines: Where each key begins, from 1.
    """

    path: Path
    values: dict[str, object]
    lines: dict[str, int]

    def place(self, name: str) -> str:
        """Say where a setting stands, or, of one in an object, the object."""
        owner = max((key for key in self.lines if name.startswith(key)), key=len, default=None)
        return f"{name} in {self.path}" + (f", line {self.lines[owner]}" if owner else "")


def read_yaml(path: Path) -> YamlFile:
    """Read a file of settings.

    Raises:
        ConfigError: The file is missing, not YAML (names the line and the setting), not a mapping,
            or has a key twice.
    """
    import yaml  # costs 20 ms, and most commands have no file

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            mapping = super().construct_mapping(node, deep=True)
            if len(mapping) < len(node.value):
                names = [self.construct_object(key, deep=True) for key, _ in node.value]
                index = next(i for i, name in enumerate(names) if name in names[:i])
                raise yaml.MarkedYAMLError(
                    problem=f"the key {names[index]!r} is given twice",
                    problem_mark=node.value[index][0].start_mark,
                )
            return mapping

    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        loader = Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}", param="config") from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_what_is_wrong(path, text, error), param="config") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML: {error}", param="config") from error
    if content is None:
        return YamlFile(path, {}, {})
    if not isinstance(node, yaml.MappingNode):
        raise ConfigError(
            f"--config {path} must map flag names to values, such as `port: 8100`", param="config"
        )
    lines = {str(key.value): key.start_mark.line + 1 for key, _ in node.value}
    return YamlFile(path, {str(key): value for key, value in content.items()}, lines)


def _what_is_wrong(path: Path, text: str, error: yaml.MarkedYAMLError) -> str:
    """Name the line, the setting that begins there or before it, and what the parser says."""
    mark = error.problem_mark
    if error.context_mark is not None and "block" not in (error.context or ""):
        mark = error.context_mark  # where what is not closed was opened
    number = 0 if mark is None else mark.line
    until = text.splitlines()[: number + 1]
    names = [match[1] for line in until[:-1] if (match := _KEY.match(line))]
    if until and (match := _WORD.match(until[-1])):
        names.append(match[0])
    setting = f" ({names[-1]})" if names else ""
    said = ", ".join(part for part in (error.context, error.problem) if part)
    return f"--config {path}, line {number + 1}{setting}: this is not valid YAML: {said}"
