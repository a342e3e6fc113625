"""The constants of KV digests, the same in every process and release.

Drawn from counters by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). All are odd, so that a
product with one loses no bit.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_STEP = np.uint64(0x9E3779B97F4A7C15)
_WORDS_STREAM = np.uint64(0x70647365_7276776F)
_KEYS_STREAM = np.uint64(0x70647365_72766B79)


@lru_cache(maxsize=16)
def word_constants(num_places: int, words: int) -> Tensor:
    """Return the constant of each word of each place in a block, ``[num_places, words]`` int32.

    A word's index is ``place * words + its index in the vector``: blocks of another size have the
    same constants, as far as they go.
    """
    index = np.arange(num_places * words, dtype=np.uint64)
    drawn = (_mixed(index + _WORDS_STREAM) >> np.uint64(32)).astype(np.uint32) | np.uint32(1)
    return torch.from_numpy(drawn.view(np.int32).reshape(num_places, words))


@lru_cache(maxsize=64)
def place_keys(layers: range, num_planes: int, heads: range) -> Tensor:
    """Return the key of each absolute layer, plane and head, ``[L, P, H]`` int64."""
    layer = np.arange(layers.start, layers.stop, dtype=np.uint64)[:, None, None]
    plane = np.arange(num_planes, dtype=np.uint64)[:, None]
    head = np.arange(heads.start, heads.stop, dtype=np.uint64)
    index = (layer << np.uint64(32)) | (plane << np.uint64(24)) | head
    drawn = _mixed(index + _KEYS_STREAM) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64))


def _mixed(index: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = index * _STEP
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
