"""Reads data set files piece by piece; they may be larger than memory.

Knows JSON, tables and lines, and names the wrong one in errors. Does not know the meaning of the
entries.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import msgspec

from pdserve.errors import ConfigError
from pdserve.wire.seal import UNREADABLE

_CHUNK_CHARS: Final = 1 << 20
_MAX_ENTRY_CHARS: Final = 64 << 20
_BLANK: Final = re.compile(r"[ \t\r\n]*")
_LFS_POINTER: Final = "version https://git-lfs"


class Entry(msgspec.Struct, frozen=True):
    """One object of a file.

    Attributes:
        line: Line at which it begins, from 1.
    """

    path: Path
    line: int
    fields: dict[str, Any]

    def refuse(self, what: str, remedy: str) -> NoReturn:
        """Report an error in it, with its place.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(f"{self.path}, line {self.line}: {what}; {remedy}", param="dataset-path")

    def integer(self, name: str, *, least: int = 1) -> int:
        """Return a required whole number.

        Raises:
            ConfigError: It is missing, not a whole number, or below `least`.
        """
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int):
            found = "is missing" if name not in self.fields else f"is {_short(value)}"
            self.refuse(
                f"the field {name!r} {found}", f"it must be a whole number of at least {least}"
            )
        if value < least:
            self.refuse(f"the field {name!r} is {value}", f"it must be at least {least}")
        return int(value)


def json_lines(path: Path) -> Iterator[Entry]:
    """The objects of a JSONL file, one line each; empty lines are skipped.

    Raises:
        ConfigError: The file cannot be read, or a line is not a JSON object.
    """
    decoder = msgspec.json.Decoder()
    with _open(path) as file:
        for number, line in enumerate(_lines(path, file), start=1):
            if not line.strip():
                continue
            try:
                value = decoder.decode(line)
            except UNREADABLE as error:
                raise ConfigError(
                    f"{path}, line {number}: this is not JSON ({error}); each line of a JSONL "
                    "file is one object"
                    + (
                        ", and this one is an array over several lines: is it ShareGPT's format?"
                        if number == 1 and line.lstrip().startswith("[")
                        else ""
                    ),
                    param="dataset-path",
                ) from None
            if not isinstance(value, dict):
                raise ConfigError(
                    f'{path}, line {number}: a line must be a JSON object such as {{"prompt": '
                    f'"..."}}, not {_short(value)}',
                    param="dataset-path",
                )
            yield Entry(path, number, value)


def csv_rows(path: Path, forms: Sequence[Sequence[str]]) -> Iterator[Entry]:
    """The rows of a CSV file below its head, as strings by column.

    Args:
        path: The file.
        forms: Possible columns of the head; others are ignored.

    Raises:
        ConfigError: The file cannot be read, has another head, or a row lacks a column.
    """
    with _open(path) as file:
        rows = csv.reader(_lines(path, file))
        try:
            head = [name.strip() for name in next(rows, [])]
            columns = next((each for each in forms if set(each) <= set(head)), None)
            if columns is None:
                wanted = " or ".join(",".join(each) for each in forms)
                raise ConfigError(
                    f"{path}, line 1: the columns are {','.join(head) or 'missing'}, but must be "
                    f"{wanted}",
                    param="dataset-path",
                )
            places = [head.index(name) for name in columns]
            for row in rows:
                if not row:
                    continue
                if len(row) <= max(places):
                    lacking = Entry(path, rows.line_num, {})
                    lacking.refuse(
                        f"the row has {len(row)} of {len(head)} columns", "add the missing ones"
                    )
                texts = [row[place].strip() for place in places]
                yield Entry(path, rows.line_num, dict(zip(columns, texts, strict=True)))
        except csv.Error as error:
            broken = Entry(path, rows.line_num, {})
            broken.refuse(f"this is not CSV ({error})", "correct the file, or download it again")


def json_array(path: Path) -> Iterator[Entry]:
    """The objects of a file that is one JSON array. Holds one of them at a time.

    Raises:
        ConfigError: The file cannot be read, is not an array, or an entry is not a JSON object.
    """
    decoder = json.JSONDecoder()
    with _open(path) as file:
        text = _Text(path, file)
        if text.peek() != "[":
            text.refuse("the file is not a JSON array", "ShareGPT's format is [{...}, {...}]")
        text.skip(1)
        if text.peek() == "]":
            return
        while True:
            text.peek()
            line = text.line
            value = text.decode(decoder)
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{path}, line {line}: an entry of the array is {_short(value)}, but must be "
                    "a JSON object",
                    param="dataset-path",
                )
            yield Entry(path, line, value)
            match text.peek():
                case ",":
                    text.skip(1)
                case "]":
                    return
                case "":
                    text.refuse(
                        "the file ends inside its array", "it is incomplete: download it again"
                    )
                case other:
                    text.refuse(f"{other!r} stands between two entries", "put a comma there")


class _Text:
    """The part of a file in memory, and the position in it."""

    def __init__(self, path: Path, file: TextIO) -> None:
        self._path = path
        self._file = file
        self._buffer = ""
        self._at = 0
        self.line = 1

    def refuse(self, what: str, remedy: str) -> NoReturn:
        raise ConfigError(f"{self._path}, line {self.line}: {what}; {remedy}", param="dataset-path")

    def skip(self, num: int) -> None:
        self.line += self._buffer.count("\n", self._at, self._at + num)
        self._at += num

    def peek(self) -> str:
        """Skip white space; return the next character, or nothing at the file's end."""
        while True:
            match = _BLANK.match(self._buffer, self._at)
            assert match is not None
            self.skip(match.end() - self._at)
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._read():
                return ""

    def decode(self, decoder: json.JSONDecoder) -> Any:
        while True:
            try:
                value, end = decoder.raw_decode(self._buffer, self._at)
            except RecursionError:
                self.refuse("an entry is nested too deeply", "correct the file")
            except json.JSONDecodeError as error:
                # Cut off by the buffer's end, or wrong: more of the file decides.
                num_held = len(self._buffer) - self._at
                if num_held > _MAX_ENTRY_CHARS or not self._read(max(_CHUNK_CHARS, num_held)):
                    self.skip(error.pos - self._at)
                    self.refuse(
                        f"this is not JSON ({error.msg})", "correct the file, or download it again"
                    )
                continue
            self.skip(end - self._at)
            return value

    def _read(self, num_chars: int = _CHUNK_CHARS) -> bool:
        more = _read(self._path, self._file, num_chars)
        self._buffer = self._buffer[self._at :] + more
        self._at = 0
        return bool(more)


@contextmanager
def _open(path: Path) -> Iterator[TextIO]:
    try:
        file = path.open(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {path} cannot be read: {error.strerror}", param="dataset-path"
        ) from error
    with file:
        if _read(path, file, len(_LFS_POINTER)) == _LFS_POINTER:
            raise ConfigError(
                f"--dataset-path {path} is a Git LFS pointer, not the file: run `git lfs pull`",
                param="dataset-path",
            )
        file.seek(0)
        yield file


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    try:
        yield from file
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {path} cannot be read: {error.strerror}", param="dataset-path"
        ) from error


def _read(path: Path, file: TextIO, num_chars: int) -> str:
    try:
        return file.read(num_chars)
    except UnicodeDecodeError as error:
        raise _not_utf8(path, error) from None
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {path} cannot be read: {error.strerror}", param="dataset-path"
        ) from error


def _not_utf8(path: Path, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"--dataset-path {path} is not UTF-8 ({error.reason}): save it as uncompressed UTF-8",
        param="dataset-path",
    )


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
