"""What a run of `benchmarks.gpu` finds is judged, and what a machine with a GPU is to check."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.gpu.checks import Ended, check
from benchmarks.gpu.targets import TARGETS, differences, errors, in_words, judged
from tests.cli.process import ROOT
from tests.python import run_python


def report(**parts):
    return {"parts": {part: {"results": results} for part, results in parts.items()}}


PEAKS = {"copy": {"gb_per_s": 1000.0}, "matmul bf16": {"tflop_per_s": 500.0}}


@pytest.mark.parametrize(
    ("shares", "state"),
    [((0.81, 0.93), "held"), ((0.93, 0.79), "missed"), ((), "not measured")],
)
def test_a_step_is_as_good_as_its_worst_shape(shares, state):
    graphs = {f"graph B={i} context=1": {"share": share} for i, share in enumerate(shares)}
    step = judged(report(step=graphs | {"eager B=1 context=1": {"share": 0.3}}))[0]
    assert step["is"] == state
    assert in_words(step).startswith(f"{state}: a decode step")


def test_rates_are_shares_of_the_peaks_of_the_same_run():
    found = judged(
        report(
            peaks=PEAKS,
            attention={
                "decode 64 x 2048: as shipped": {"gb_per_s": 850.0},
                "prefill 8192: as shipped": {"tflop_per_s": 250.0},
            },
            copies={
                "engine, 8192 KiB to the host": {"gb_per_s": 50.0},
                "engine, 8192 KiB from the host": {"gb_per_s": 60.0},
                "chunks, as shipped: block 64, one": {
                    "save": {"gb_per_s": 49.0},
                    "load": {"gb_per_s": 54.0},
                },
                "chunks, 4 programs: block 64, one": {
                    "save": {"gb_per_s": 9.0},
                    "load": {"gb_per_s": 9.0},
                },
                "chunks, as shipped: block 16, one": {"error": "AssertionError: wrong digests"},
            },
        )
    )
    assert [(row["found"], row["is"]) for row in found[1:]] == [
        (0.85, "held"),
        (0.5, "missed"),
        (0.9, "held"),
    ]


def test_every_target_finds_its_figures_in_what_a_device_left():
    files = sorted((ROOT / "benchmarks" / "results").glob("*-h100-gpu-experiments.json"))
    found = json.loads(files[-1].read_text())
    shipped = {"decode 64 x 2048: as shipped", "prefill 8192: as shipped"}
    best = found["parts"]["attention"]["results"]
    for name in shipped:
        best[name] = next(iter(best[name.replace("as shipped", "best")].values()))
    unmeasured = [row["target"] for row in judged(found) if row["is"] == "not measured"]
    assert unmeasured == [TARGETS[-1].name]  # kernels that have not been on one


def test_what_failed_is_told_but_not_an_error_that_is_a_figure():
    found = report(
        step={"model": {"error": "OutOfMemoryError"}, "plain": {"skipped": "time is over"}},
        attention={"latents: prompt": {"us": 3.0, "error": 0.001}},
        linear={"error": "ended by 1"},
    )
    assert errors(found) == ["step: model", "linear: error"]


@pytest.mark.parametrize(
    "comparison",
    [
        {"logits as eager": False},
        {"8B": {"mixed": {"rows": 1, "of": 2, "max": 0.1}}},
        {"tma 64x64": {"us": 1.0, "bits": "differ"}},
        {"equal_rows_of_others": {"tma 64x64": {"1": 0.5}}},
        {"far_from_reference": 3},
    ],
    ids=["flag", "rows", "tile", "tiles", "reference"],
)
def test_a_comparison_that_finds_a_difference_is_told(comparison):
    assert len(differences(report(step={"it": comparison}))) == 1


def test_what_is_equal_is_no_difference_and_a_fact_is_none_either():
    equal = {"rows are equal": True, "mixed": True, "in_l2": False, "has graphs": False}
    assert differences(report(step={"it": equal})) == []


def _run(*codes):
    """Return what runs commands, which end with the codes in turn, and the list of them."""
    commands = []

    def run(command, environment):
        commands.append((command, environment))
        return Ended(codes[len(commands) - 1], "the last line")

    return run, commands


def test_a_devices_tests_run_and_both_tools_of_the_sanitizer_over_small_cases():
    run, commands = _run(0, 0, 9)
    found = check(run, lambda name: f"/cuda/bin/{name}")
    assert [found[name]["passed"] for name in ("tests", "memcheck", "racecheck")] == [1, 1, 0]
    tests, memcheck, racecheck = (command for command, _ in commands)
    assert tests[1:4] == ("-m", "pytest", "-q")
    assert memcheck[:3] == ("/cuda/bin/compute-sanitizer", "--tool", "memcheck")
    assert racecheck[2] == "racecheck"
    assert "tests/gpu/test_operations.py" in memcheck
    assert commands[1][1] == {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}


def test_a_machine_without_the_sanitizer_says_so():
    run, commands = _run(0)
    found = check(run, lambda _: None)
    assert len(commands) == 1
    assert found["memcheck"]["skipped"].startswith("compute-sanitizer, of CUDA's toolkit, is not")


def test_a_check_whose_time_is_over_says_so():
    run, _ = _run(124)
    tests = check(run, lambda _: None)["tests"]
    assert not tests["passed"]
    assert tests["told"].startswith("ended after 900 s")


@pytest.mark.matrix
@pytest.mark.timeout(1200)
def test_without_a_device_every_part_runs_in_small(tmp_path):
    file = tmp_path / "gpu.json"
    interpreted = os.environ | {"TRITON_INTERPRET": "1"}
    options = "--json", str(file), "--limit-s", "500"  # of a part; busy cores are slow
    run_python("-m", "benchmarks.gpu", *options, env=interpreted, cwd=ROOT, timeout_s=1180)
    found = json.loads(file.read_text())
    assert errors(found) == []
    assert all(part["results"] for part in found["parts"].values())
    assert "targets" not in found
    assert len(TARGETS) == 4
