"""What the soak says of what it has seen: growth, too short a run, and what speaks against it."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.chaos.memory import CENSUS, MIN_SAMPLES, Sample, census, grown, look, slope
from tests.chaos.soak import objections

if TYPE_CHECKING:
    from pathlib import Path

MIB = 1 << 20
pytestmark = pytest.mark.short_form("")


def samples(bytes_per_request: float, *, num: int = 120) -> list[Sample]:
    """Ten minutes: memory that has a warm-up, some noise, and a slope."""
    noise = random.Random(0)

    def sample(at: int) -> Sample:
        mib = 100 + min(at, 20) + 60 * at * bytes_per_request / MIB
        return Sample(
            at_s=5.0 * at,
            requests=60 * at,
            used_mib=mib,
            own_mib=20 + mib + noise.uniform(-0.05, 0.05),
        )

    return [sample(at) for at in range(num)]


def idle(*, num_bytes: int = 0, blocks: int = 0, lives: int = 0) -> dict[str, Any]:
    """What two counts say with a thousand requests between them."""
    before = {"bytes": 1 << 20, "blocks": 10_000, "types": Counter(str=7)}
    after = {
        "bytes": before["bytes"] + num_bytes,
        "blocks": before["blocks"] + blocks,
        "types": Counter(str=7, deque=2),
    }
    return grown(before, after, requests=1000, lives=lives)


def result(**changes: object) -> dict[str, object]:
    return {
        "wrong_tokens": 0,
        "without_final_state": 0,
        "blocks_not_free": 0,
        "engines_lost": 0,
        "ends": {"finished": 100},
        "kv_bytes_to_survivor": 1,
        "memory": {"proxy": {**slope(samples(0.0)), "idle": idle()}},
        "descriptors": {"proxy": {"third_quarter": 50, "last_quarter": 52}},
        "itl": {"p99_ratio": 1.5},
        **changes,
    }


def test_what_grows_while_it_warms_up_is_flat_if_it_does_not_go_on() -> None:
    assert slope(samples(0.0))["is_flat"] is True


def test_own_memory_may_grow_by_holes_but_not_without_bound() -> None:
    found = slope(samples(400.0))
    assert found["is_flat"] is True  # not by two percent
    assert found["own_bytes_per_request"] is not None
    assert abs(found["own_bytes_per_request"] - 400.0) < 40.0
    assert slope(samples(4000.0))["is_flat"] is False


def test_a_request_leaves_no_object_and_few_bytes_beside_what_lives_of_peers_leave() -> None:
    assert idle(num_bytes=90_000, blocks=990)["is_flat"]
    assert not idle(blocks=1000)["is_flat"]
    assert not idle(num_bytes=110_000)["is_flat"]
    assert idle(num_bytes=110_000, lives=1)["is_flat"]
    assert idle()["types"] == {"deque": 2, "str": 0}


def test_a_process_says_what_it_has_in_use_and_what_it_has_more_of(tmp_path: Path) -> None:
    """A real one, that keeps 100 objects and 8 MiB for each line it reads."""
    program = (
        "import sys\nclass Kept: pass\nall = []\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    all += [(Kept(), bytearray(80 << 10)) for _ in range(100)]; print('kept', flush=True)"
    )
    environment = {**os.environ, "PYTHONPATH": str(CENSUS), "CENSUS_FOLDER": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as popen:
        assert popen.stdin is not None
        assert popen.stdout is not None
        assert popen.stdout.readline() == "ready\n"
        family = [psutil.Process(popen.pid)]
        before, sample = census(family, tmp_path), look(family, tmp_path, 0.0, 0)
        popen.stdin.write("more\n")
        popen.stdin.flush()
        assert popen.stdout.readline() == "kept\n"
        more = grown(before, census(family, tmp_path), requests=100, lives=0)
        later = look(family, tmp_path, 1.0, 100)
        popen.stdin.close()
    assert 100 * (80 << 10) <= more["bytes"] < 100 * (90 << 10)
    assert 3.0 <= more["blocks_per_request"] < 6.0
    assert more["types"]["Kept"] == 100
    assert 7.8 <= later.used_mib - sample.used_mib < 9.0


def test_a_run_without_enough_samples_in_its_second_half_has_no_slope() -> None:
    assert slope(samples(4000.0, num=2 * MIN_SAMPLES - 2))["is_flat"] is None
    assert slope(samples(4000.0, num=2 * MIN_SAMPLES))["is_flat"] is False


def test_nothing_speaks_against_a_good_soak() -> None:
    assert objections(result()) == []


def test_each_fault_speaks_against_a_soak_by_its_name() -> None:
    for what in ("wrong_tokens", "without_final_state", "blocks_not_free", "engines_lost"):
        assert objections(result(**{what: 2})) == [f"2 {what.replace('_', ' ')}"]
    assert objections(result(kv_bytes_to_survivor=0)) == ["no KV has moved"]
    assert objections(result(ends={"left": 3})) == ["no request has finished"]


def test_memory_that_grows_speaks_against_a_soak_and_so_does_too_short_a_run() -> None:
    def said(samples: list[Sample], counts: dict[str, Any]) -> list[str]:
        return objections(result(memory={"prefill1": {**slope(samples), "idle": counts}}))

    (growth,) = said(samples(4000.0), idle())
    assert growth.startswith("prefill1's own memory grows by ")
    (leak,) = said(samples(0.0), idle(blocks=2000))
    assert leak.endswith("2.0 objects more for each")
    (unknown,) = said(samples(0.0, num=3), idle())
    assert "too short" in unknown


def test_others_gaps_between_tokens_and_descriptors_speak_against_a_soak() -> None:
    (slow,) = objections(result(itl={"p99_ratio": 2.1}))
    assert "2.1 times" in slow
    (unknown,) = objections(result(itl={}))
    assert "too short" in unknown
    (leak,) = objections(
        result(descriptors={"decode1": {"third_quarter": 50, "last_quarter": 120}})
    )
    assert leak == "decode1 has 70 descriptors more"
