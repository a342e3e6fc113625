"""One safetensors file of a checkpoint: what its header tells, and regions of its tensors."""

from __future__ import annotations

import json
import struct
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safetensors import SafetensorError, safe_open

from pdserve.errors import ConfigError
from pdserve.models.shard_paths import LFS_MAGIC

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import Tensor

_MAX_HEADER_BYTES = 100 << 20
_TEXT_PREFIXES = (
    ("language_model.", ""),  # transformers 4
    ("model.language_model.", "model."),
    ("lm_head.weight", "lm_head.weight"),
)
"""How names in models that also read images begin, and those of a decoder alone."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as the header of its file describes it.

    Attributes:
        name: In the file.
        dtype: As safetensors names it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightFile:
    """One safetensors file: 8 bytes of header length, a JSON header, the data.

    Attributes:
        tensors: What it has, by the names that are asked for.

    Raises:
        ConfigError: It is a Git LFS pointer, is cut short, or cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            size = path.stat().st_size
            header = self._header(size)
        except OSError as error:
            raise self._broken(str(error.strerror)) from None
        self.tensors: dict[str, StoredTensor] = {}
        end = 0
        try:
            for name, entry in json.loads(header).items():
                if name != "__metadata__":
                    shape = tuple(map(int, entry["shape"]))
                    self.tensors[name] = StoredTensor(name, str(entry["dtype"]), shape)
                    end = max(end, entry["data_offsets"][1])
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self._broken(f"its header is not readable ({error})") from None
        if (whole := 8 + len(header) + end) > size:
            raise self._broken(f"it has {size} of {whole} bytes; the download was cut short")

    def _header(self, size: int) -> bytes:
        """Return the JSON header of a file of `size` bytes."""
        with self.path.open("rb") as file:
            start = file.read(64)
            if start.startswith(LFS_MAGIC):
                raise ConfigError(
                    f"{self.path} is a Git LFS pointer, not the weights: run `git lfs pull` in "
                    f"{str(self.path.parent)!r}, or download the file itself",
                    param="model",
                )
            length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise self._broken("it has no safetensors header")
            file.seek(8)
            return file.read(length)

    def _broken(self, why: str) -> ConfigError:
        return ConfigError(f"{self.path} cannot be used: {why}", param="model")

    @contextmanager
    def opened(self) -> Iterator[Callable[[str, tuple[slice, ...] | None], Tensor]]:
        """Map the file; the function returns a region of a tensor as a view of it, None the whole.

        Slices of more dims than the tensor has are ignored. At the end the file is unmapped.
        """
        try:
            with safe_open(self.path, framework="pt", device="cpu") as file:

                def read(name: str, region: tuple[slice, ...] | None) -> Tensor:
                    stored = self.tensors[name]
                    part = (region or ())[: len(stored.shape)]
                    found: Tensor = (
                        file.get_slice(stored.name)[part] if part else file.get_tensor(stored.name)
                    )
                    return found

                yield read
        except (SafetensorError, OSError) as error:
            raise self._broken(str(error)) from None


def of_decoder(tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Keep the decoder and its head, under their own names, of a model that also reads images."""
    found = {}
    for name, tensor in tensors.items():
        for prefix, own in _TEXT_PREFIXES:
            if name.startswith(prefix):
                found[own + name.removeprefix(prefix)] = tensor
                break
    return found
