"""The generator is Philox4x32-10, and its uniforms are a function of (seed, index) alone."""

from __future__ import annotations

import numpy as np
import pytest

from pdserve.worker.philox import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_words_are_the_known_answers_of_random123(
    counter: list[int], key: list[int], words: list[int]
) -> None:
    columns = np.array(counter, dtype=np.uint64)[:, None].repeat(2, axis=1)
    keys = np.array(key, dtype=np.uint64)[:, None].repeat(2, axis=1)
    answer = philox4x32(keys, columns)
    assert answer[:, 0].tolist() == answer[:, 1].tolist() == words


def test_a_uniform_does_not_depend_on_its_batch() -> None:
    seeds = np.array([0, 7, 2**63 + 5, 2**64 - 1], dtype=np.uint64)
    index = np.array([0, 3, 1000, 2**33], dtype=np.int64)
    together = uniforms(seeds, index)
    for i in range(len(seeds)):
        assert uniforms(seeds[i : i + 1], index[i : i + 1])[0] == together[i]
    assert len(set(together)) == 4


def test_uniforms_fill_the_unit_interval_evenly() -> None:
    drawn = uniforms(np.full(20_000, 42, dtype=np.uint64), np.arange(20_000))
    assert (drawn >= 0).all()
    assert (drawn < 1).all()
    counts, _ = np.histogram(drawn, bins=20, range=(0, 1))
    chi_squared = ((counts - 1000) ** 2 / 1000).sum()
    assert chi_squared < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.03
