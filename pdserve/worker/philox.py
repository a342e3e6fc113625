"""Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

A counter-based generator: the number is a pure function of a key and a counter, so there
is no state to lose, to copy to another engine, or to advance in the wrong order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ROUNDS = 10
_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox4x32(key: NDArray[np.uint64], counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Run the bijection on R counters at once.

    Args:
        key: `[2, R]`, each below 2**32.
        counter: `[4, R]`, each below 2**32.

    Returns:
        `[4, R]`, each below 2**32.
    """
    # Words 0 and 2 are multiplied, words 1 and 3 are mixed in: kept as two pairs.
    even, odd = counter[0::2], counter[1::2]
    for _ in range(_ROUNDS):
        product = _MULTIPLIERS * even
        high, low = product >> _32, product & _LOW
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key = (key + _WEYL) & _LOW
    return np.stack([even[0], odd[0], even[1], odd[1]])


def uniforms(seed: NDArray[np.uint64], index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the uniform number of each request's output token.

    Args:
        seed: `[R]`.
        index: `[R]`, the output token's index in its request, from 0.

    Returns:
        `[R]` in [0, 1), multiples of 2**-53.
    """
    wide = index.astype(np.uint64)
    zero = np.zeros_like(wide)
    key = np.stack([seed & _LOW, seed >> _32])
    words = philox4x32(key, np.stack([wide & _LOW, wide >> _32, zero, zero]))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    return cast("NDArray[np.float64]", bits.astype(np.float64) * 2.0**-53)
