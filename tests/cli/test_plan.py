"""`pdserve plan` as users run it: what it prints, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.commands.plan_asking import ask_fleet
from pdserve.commands.plan_console import rate, start_command
from pdserve.errors import PdserveError
from tests.cli.answering import answering
from tests.cli.process import pdserve_here

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

pytestmark = pytest.mark.slow

TIMES = ("--prompt-times", "4", "0.045", "2.5e-6", "--step-times", "7,0.06,6e-5")
SLO = ("--slo", "ttft:1000", "tpot:30")
RANDOM = (
    "--num-prompts", "12", "--request-rate", "4", "--random-input-len", "300",
    "--random-output-len", "8",
)  # fmt: skip
SETTINGS = {
    "prefill_policy": "prefix_sticky",
    "decode_policy": "prefix_sticky",
    "split_policy": "predicted",
    "ttft_slo_s": 1.0,
    "itl_slo_s": 0.03,
}


def plan(*arguments: str):
    return pdserve_here("plan", *arguments)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Mooncake's format: two requests a second, which share their first block."""
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 500 * i, "input_length": 600, "output_length": 6, "hash_ids": [0, i + 1]}
        for i in range(10)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_table_sentences_and_the_command_that_starts_the_best_layout(trace):
    found = plan(
        "--num-engines", "2", *TIMES, *SLO,
        "--dataset-name", "trace", "--dataset-path", str(trace), "--model", "/models/m",
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert any(line.startswith("trace trace.jsonl speedup=1 shared=") for line in lines)
    assert {line.split()[0] for line in lines if " 2 " in line} >= {"1P1D", "2B"}
    assert "is best: 100.0% of 2.22 requests/s" in found.stdout
    assert "The fewest engines that reach 90%: 1, as 1B (100.0%)." in lines
    assert "KV is pushed, as by default." in lines
    assert "/models/m" in lines[-1]
    assert "simulation 1: 1P1D" in found.stderr


def test_json_is_one_object_with_every_figure():
    found = plan("--layout", "1P1D", "1B", *TIMES, *SLO, *RANDOM, "--json", "--no-progress")
    told = json.loads(found.stdout)
    assert found.stderr == ""
    assert {row["layout"] for row in told["plan"]["rows"]} == {"1P1D", "1B"}
    assert told["plan"]["rows"][0]["figures"]["goodput"] == 1.0
    assert told["costs"]["decode_request"] == pytest.approx(60e-6)
    assert told["slo"] == ["ttft:1000", "tpot:30"]
    assert told["check"] is None
    assert told["start"]


def test_objectives_that_no_layout_holds_are_no_success():
    dense = ("--request-rate", "100")  # a simulated second takes its time
    found = plan("--layout", "1P1D", *TIMES, "--slo", "ttft:1", *RANDOM, *dense, "--no-progress")
    assert found.returncode == 1
    assert "No load was found at which 1P1D reaches 90%." in found.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ((*TIMES, *SLO), "--num-engines is missing: say how many engines there are"),
        (("--num-engines", "2", *TIMES), "--slo is missing: give the limits of a request"),
        (("--num-engines", "2", *SLO), "--prompt-times is missing: give it"),
        (
            ("--num-engines", "2", "--layout", "2B", *TIMES, *SLO),
            "--num-engines is 2: --layout gives the number too",
        ),
        (("--num-engines", "0", *TIMES, *SLO), "--num-engines is 0: use 1 to 1000"),
        (("--layout", "2P", *TIMES, *SLO), "--layout is '2P': write layouts such as 4P4D"),
        (("--num-engines", "2", *TIMES, "--slo", "tft:1"), "--slo is 'tft:1': write objectives in"),
        (("--num-engines", "2", *TIMES, "--slo", "itl:0"), "--slo is 'itl:0': write objectives in"),
        (
            ("--num-engines", "2", *TIMES[:-1], "7,0.06", *SLO),
            "--step-times is '7,0.06': write 3 times in milliseconds of up to an hour each",
        ),
        (
            ("--num-engines", "2", *TIMES[:5], "1e300", "1", "1", *SLO),
            "--step-times is '1e300 1 1': write 3 times in milliseconds of up to an hour each",
        ),
        (("--num-engines", "1000000", *TIMES, *SLO), "--num-engines is 1000000: use 1 to 1000"),
        (("--layout", "9999P1D", *TIMES, *SLO), "--layout is '9999P1D': use up to 1000 engines"),
        (("--layout", f"{'9' * 5000}B", *TIMES, *SLO), "write layouts such as 4P4D"),
        (
            ("--layout", "3B", *TIMES, *SLO, "--request-rate", "4", "--kv-tokens", f"{10**12}"),
            "--kv-tokens is 1000000000000: use up to 1666666666 where up to 3 engines are tried",
        ),
        (
            ("--num-engines", "2", *TIMES, *SLO, "--request-rate", "1e-300"),
            "--request-rate 1e-300 has the last of 4 requests due after 4e+300 s",
        ),
        (
            ("--num-engines", "2", *TIMES, *SLO, "--check", "5"),
            "--check is 5: it needs a running deployment",
        ),
        (("--num-engines", "2", *TIMES, *SLO, "--policy", "x"), "--policy is 'x': use one of"),
        (
            ("--num-engines", "2", *TIMES, *SLO, "--times-error", "2"),
            "--times-error is 2.0: use 0 to",
        ),
        (("--num-engines", "2", *TIMES, *SLO, "--hop-ms", "inf"), "--hop-ms is inf: use"),
        (("--num-engines", "2", *TIMES, *SLO), "all requests arrive at once: give --request-rate"),
        (
            ("--num-engines", "2", *TIMES, *SLO, "--kv-tokens", "100", "--max-model-len", "200"),
            "--max-model-len is 200: an engine's cache has room for only 100 tokens",
        ),
        (
            ("--num-engines", "2", *TIMES, *SLO, "--dataset-name", "pd-interference"),
            "measures its pace at an endpoint",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_with_flag_value_and_remedy(arguments, told):
    found = plan(*arguments, "--num-prompts", "4")
    assert found.returncode == 3
    assert told in found.stderr


def test_more_requests_than_can_be_simulated_are_refused():
    found = plan("--num-engines", "2", *TIMES, *SLO, "--num-prompts", "100000000")
    assert "--num-prompts is 100000000: use 1 to 1000000" in found.stderr


def test_a_trace_that_takes_longer_than_can_be_simulated_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 600, "output_length": 6, "hash_ids": [0, 1]}
    rows = [row | {"timestamp": at_ms} for at_ms in (0, 10**9)]
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    data = ("--dataset-name", "trace", "--dataset-path", str(path))
    found = plan("--num-engines", "2", *TIMES, *SLO, *data)
    assert f"--dataset-path is '{path}': its 2 requests come within 1e+06 s" in found.stderr, found
    assert "give --trace-duration" in found.stderr


def test_a_load_that_is_met_up_to_the_highest_tried_is_not_called_the_limit():
    instant = ("--prompt-times", "0", "0", "0", "--step-times", "0", "0", "0")
    found = plan("--layout", "1B", *instant, *SLO, *RANDOM)
    assert "reaches 90% up to at least 32 times the load" in found.stdout, found


def test_of_one_request_no_rate_is_told():
    found = plan("--layout", "1B", *TIMES, *SLO, *RANDOM, "--num-prompts", "1")
    assert " 1 requests, at once" in found.stdout, found
    assert "100.0% of the requests meet the objectives" in found.stdout
    assert "times the load." in found.stdout
    assert "requests/s" not in found.stdout


def test_a_rate_of_a_data_set_with_times_of_its_own_is_refused(trace):
    data = ("--dataset-name", "trace", "--dataset-path", str(trace))
    found = plan("--num-engines", "2", *TIMES, *SLO, *data, "--request-rate", "3")
    assert "--request-rate is 3, but --dataset-name trace sets the times" in found.stderr


def test_one_command_starts_a_layout_with_the_sizes_that_it_was_planned_with():
    proxy = (
        "--proxy.prefill-policy prefix_sticky --proxy.decode-policy prefix_sticky "
        "--proxy.split-policy predicted --proxy.ttft-slo 1.0 --proxy.itl-slo 0.03"
    )
    assert start_command("2P1D", "m", SETTINGS, {}) == (
        f"pdserve up m --prefill-replicas 2 --decode-replicas 1 {proxy}"
    )
    assert start_command("1P2B", "my m", SETTINGS, {"max-num-seqs": 8}) == (
        "pdserve up 'my m' --max-num-seqs 8 --prefill-replicas 1 --decode-replicas 0 "
        f"--both-replicas 2 {proxy}"
    )
    assert start_command("1B", "", SETTINGS, {}) == "pdserve serve MODEL --port 8000"


def test_an_objective_below_what_proxies_take_becomes_their_least():
    found = plan("--layout", "1P1D", *TIMES, "--slo", "ttft:1e-310", "itl:1e-310", *RANDOM)
    assert "--proxy.ttft-slo 1e-06 --proxy.itl-slo 1e-06" in found.stdout.splitlines()[-1], found


def test_an_engine_whose_size_was_given_is_started_with_it():
    found = plan("--layout", "1B", *TIMES, *SLO, *RANDOM, "--max-num-seqs", "8")
    assert found.stdout.splitlines()[-1] == "pdserve serve MODEL --max-num-seqs 8 --port 8000"


def test_of_requests_that_nothing_answers_no_time_is_shown():
    never = ("--prompt-times", "3600000", "0", "0", *TIMES[4:])
    found = plan("--layout", "1P1D", "1P1D", *never, *SLO, *RANDOM)
    rows = [line.split() for line in found.stdout.splitlines() if line.startswith("1P1D  ")]
    assert rows == [["1P1D", "2", "0.0%", "*", "-", "-", "-", "-", "12"]], found


def learned(**changed: Any) -> dict[str, Any]:
    """What a proxy answers that knows its engines."""
    fit = {"samples": 40, "error": 0.05}
    model = {
        "prefill": fit | {"weights": [4e-3, 45e-6, 0.0]},
        "step": fit | {"weights": [7e-3, 6e-5, 6e-8]},
        "wire": fit | {"weights": [1e-3, 8e-6]},
    }
    engine = {"health": "ready", "num_blocks": 100, "block_size": 16, "can_push": True}
    waits = {"admission": 900.0, "retry": 50.0, "queue": 9.0, "reserve": 80.0, "prefill": 20.0}
    terms = waits | {"proxy": 1.0, "relay": 3.0}
    second = {"kv": 7.0, "handover": 5.0, "first_step": 6.0}
    pages = {
        "/debug/decisions": {
            "is_known": True, "is_obeyed": True, "mean_output_tokens": 9.0, "model": model,
            "decisions": [],
        },
        "/dashboard/data": {
            "proxy": {"kv_mode": "auto"},
            "engines": [
                engine | {"role": "prefill"},
                engine | {"role": "decode", "num_blocks": 50},
                engine | {"role": "decode"},
                engine | {"role": "decode", "health": "unreachable", "num_blocks": 0},
            ]
        },
        "/debug/requests": {
            "running": [],
            "finished": [
                {"ttft_terms": terms, "second_token_terms": second, "kv_mode": "pull"},
                {"ttft_terms": {}},
            ],
        },
    }  # fmt: skip
    return pages | changed


def proxy(pages: dict[str, Any]) -> AbstractContextManager[str]:
    return answering(lambda asked: (200, json.dumps(pages[asked.path.partition("?")[0]]).encode()))


def test_rates_have_no_exponent():
    assert [rate(per_s) for per_s in (0.01234, 4.161, 1234.0, 32_000.0)] == [
        "0.0123", "4.16", "1,230", "32,000",
    ]  # fmt: skip


def test_times_layout_and_room_are_what_a_running_proxy_says():
    with proxy(learned()) as url:
        running = ask_fleet(url, ())
    assert str(running.layout) == "1P2D"
    assert running.layout.kv_tokens == 800
    assert (running.costs.prefill_token, running.costs.decode_request) == (45e-6, 6e-5)
    assert (running.costs.wire, running.costs.wire_token) == (1e-3, 8e-6)
    assert (running.costs.hop, running.costs.handover) == pytest.approx((2e-3, 5e-3))
    assert running.error.step == 0.05
    assert running.notes == []


def test_of_kv_that_was_pushed_only_what_came_behind_the_first_token_counts():
    pages = learned()
    pages["/debug/requests"]["finished"][0]["kv_mode"] = "push"
    with proxy(pages) as url:
        costs = ask_fleet(url, ()).costs
    assert (costs.wire, costs.wire_token) == pytest.approx((7e-3, 0.0))


@pytest.mark.parametrize(
    ("modes", "kv_mode", "can_push", "pulls"),
    [
        (["pull", "pull", "push"], "auto", True, True),
        (["push", "push", "pull"], "auto", True, False),
        ([], "auto", True, False),
        ([], "pull", True, True),
        ([], "auto", False, True),
    ],
)
def test_a_deployment_pulls_if_most_requests_were_or_if_its_settings_and_engines_say_so(
    modes, kv_mode, can_push, pulls
):
    pages = learned(**{"/debug/requests": {"finished": [{"kv_mode": each} for each in modes]}})
    shown = pages["/dashboard/data"]
    shown["proxy"]["kv_mode"], shown["engines"][0]["can_push"] = kv_mode, can_push
    with proxy(pages) as url:
        assert ask_fleet(url, ()).pulls is pulls


def test_what_is_pulled_where_it_runs_is_pulled_in_the_plan_and_by_its_commands():
    served = {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": 800}]}
    with proxy(learned(**{"/v1/models": served})) as url:
        arguments = ("--url", url, "--layout", "1P1D", *SLO, *RANDOM, "--no-progress")
        found, as_json = plan(*arguments), plan(*arguments, "--json")
    assert f"KV is pulled, as at {url}." in found.stdout.splitlines(), found
    assert "--proxy.kv-mode pull" in found.stdout
    assert json.loads(as_json.stdout)["settings"]["kv_mode"] == "pull"


def test_a_proxy_that_knows_too_little_is_to_be_sent_requests():
    fit = {"samples": 3, "error": 1.0, "weights": []}
    unknown = {
        "is_known": False, "is_obeyed": True, "mean_output_tokens": 9.0, "model": {"prefill": fit},
        "decisions": [],
    }  # fmt: skip
    with (
        proxy(learned(**{"/debug/decisions": unknown})) as url,
        pytest.raises(PdserveError, match=r"samples: prefill 3; .* send it requests"),
    ):
        ask_fleet(url, ())


def test_a_deployment_without_a_ready_engine_is_named_as_that():
    pages = learned()
    for each in pages["/dashboard/data"]["engines"]:
        each["health"] = "unreachable"
    with proxy(pages) as url, pytest.raises(PdserveError, match=f"{url} has no ready engine"):
        ask_fleet(url, ())


def test_what_is_not_known_of_a_running_deployment_is_told():
    pages = learned(**{"/debug/requests": {"finished": []}})
    pages["/debug/decisions"]["model"]["wire"] = {"samples": 0, "error": 1.0, "weights": [0.0, 0.0]}
    with proxy(pages) as url:
        running = ask_fleet(url, ())
    assert (running.costs.hop, running.costs.handover) == (3e-3, 6e-3)
    assert running.costs.wire == 1e-3
    assert [note.rpartition("(")[2] for note in running.notes] == ["--hop-ms)", "--wire-times)"]
