"""`pdserve bench compare` with whole processes: it measures, fails and is interrupted."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import psutil
import pytest

from pdserve.bench.compare.result import load
from pdserve.bench.compare.summary import Figure, rows
from pdserve.bench.compare.topology import Kind, peers, plan
from pdserve.bench.digits import number
from pdserve.commands.bench_alone import one_engine, sample_of
from pdserve.commands.bench_chosen import topologies_of
from pdserve.commands.bench_deployments import commands_of, members_of
from pdserve.commands.exit_codes import EXIT_CONFIG
from pdserve.config.compare import CompareConfig
from pdserve.errors import ConfigError
from tests.bench.scripted import request, scripted_server
from tests.cli.process import pdserve_here

CORES = tuple(sorted(os.sched_getaffinity(0)))[:2]
SMALL = ["--engine-args=--kv-cache-memory-bytes 64MiB", "--no-progress", "--num-runs", "1"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pdserve", "bench", "compare", "boxed", *SMALL, *words]


def is_served(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/livez", timeout=2)
    except (urllib.error.URLError, OSError):
        return False
    return True


RANDOM = ("--dataset-name", "random", "--random-input-len", "24", "--random-output-len", "6")
INTERFERENCE = ("--interference-duration", "2", "--interference-burst-input-len", "256")
AT_A_RATE = ("--no-bound", *RANDOM, "--num-prompts", "16", "--request-rate", "8")


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "requests", [pytest.param(INTERFERENCE, marks=pytest.mark.matrix), AT_A_RATE]
)
def test_a_small_comparison_gives_table_report_and_file_and_leaves_nothing(tmp_path, requests):
    report = tmp_path / "c.html"
    done = subprocess.run(
        command(
            *("--topologies", "colocated", "pd", "--cores", "0", "1", "--report", str(report)),
            *(*requests, "--goodput", "ttft:5000", "--allow-invalid"),
        ),
        capture_output=True,
        text=True,
        timeout=360,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(report.with_suffix(".json"))
    assert [each.deployment for each in found.measured] == ["colocated", "P/D 1:1"]
    colocated, pd = (each.run for each in found.measured)
    assert [o.index for o in colocated.outcomes] == [o.index for o in pd.outcomes]
    assert [o.scheduled_s for o in colocated.outcomes] == [o.scheduled_s for o in pd.outcomes]
    assert all(o.kv_mode for o in pd.outcomes)
    assert not any(o.kv_mode for o in colocated.outcomes)
    used = found.measured[1].run.cores
    assert used is not None
    assert used.num_cores == 2
    servers = {"engines", "API servers", "proxy"}
    assert set(used.parts) == servers | {"client"}
    # The client of so small a run may take less than a core's thousandth.
    assert {part for part, share in used.parts.items() if share} >= servers
    assert "Cores in use on average: colocated " in done.stdout
    if requests is INTERFERENCE:
        assert found.rates is not None
        assert "for the pace of the requests and the rate-matched bound" in done.stdout
        assert re.search(r" --interference-burst-period [\d.]+$", found.command)
    table = rows(found, found.measured[0].rate)
    page = report.read_text()
    for row in table:
        for figure, value in row.values.items():
            assert number(value.median) in done.stdout, (row.label, figure)
            assert f"<td>{number(value.median)}" in page, (row.label, figure)
    assert f"x{number(table[1].ratios[Figure.ITL_P99].median)}" in done.stdout
    assert not any(is_served(run.base_url) for run in (colocated, pd))


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    with contextlib.chdir(cwd):
        return pdserve_here("bench", "compare", "boxed", *SMALL, *words)


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_more_engines_than_cores_share_them_and_the_report_says_so(tmp_path):
    done = run(
        *("--topologies", "pd", "--pd", "2:1", "--cores", "0", "1", *RANDOM, "--no-bound"),
        *("--num-prompts", "6", "--allow-invalid"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(tmp_path / "pdserve-compare.json")
    (pd,) = found.deployments
    assert (pd.num_prefill, pd.num_decode, pd.num_cores) == (2, 1, 2)
    assert all(o.is_good and o.kv_mode for o in found.measured[0].run.outcomes)
    words = "P/D 2:1 has 3 engines on 2 cores: prefill0, prefill1 share core 0"
    assert words in done.stdout
    assert words in (tmp_path / "pdserve-compare.html").read_text()


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_peers_are_compared_at_each_rate(tmp_path, monkeypatch):
    key = "known-to-me-alone"
    monkeypatch.setattr(sys, "argv", ["pdserve", "--api-key", key, f"--api-key={key}"])
    with (
        scripted_server("--first-ms", "2", "--gap-ms", "1") as quick,
        scripted_server("--first-ms", "120", "--gap-ms", "1") as slow,
    ):
        done = run(
            *("--topologies", "", "--peer", f"quick={quick.url}", f"slow={slow.url}/v1"),
            *("--api-key", key),
            *(*RANDOM, "--num-prompts", "8", "--request-rates", "40", "20", "--allow-invalid"),
            cwd=tmp_path,
        )
        assert len(quick.times()) == len(slow.times())
    assert done.returncode == 0, done.stdout + done.stderr
    found = load(tmp_path / "pdserve-compare.json")
    assert found.request_rates == [20.0, 40.0]
    assert [(m.deployment, m.rate) for m in found.measured] == [
        *(("quick", 40.0), ("quick", 20.0), ("slow", 40.0), ("slow", 20.0))
    ]
    assert found.baseline == "quick"
    for rate in found.request_rates:
        assert f"{rate:g} requests/s" in done.stdout
        quick_row, slow_row = rows(found, rate)
        assert slow_row.values[Figure.TTFT_P50].median >= 118
        assert quick_row.values[Figure.TTFT_P50].median < slow_row.values[Figure.TTFT_P50].median
    assert "quick kept its cached prefixes between runs" in done.stdout
    assert found.command == "pdserve --api-key KEY --api-key=KEY"
    assert not [path for path in tmp_path.iterdir() if key in path.read_text()]


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_what_was_measured_before_a_deployment_failed_is_reported_all_the_same(tmp_path):
    with scripted_server("--first-ms", "2", "--gap-ms", "1") as there:
        done = run(
            *("--topologies", "", "--peer", f"there={there.url}", "gone=http://127.0.0.1:1"),
            *(*RANDOM, "--num-prompts", "4", "--request-rates", "40", "--allow-invalid"),
            cwd=tmp_path,
        )
    assert done.returncode == 4, done.stdout + done.stderr
    assert "http://127.0.0.1:1/v1/models does not answer" in done.stderr
    found = load(tmp_path / "pdserve-compare.json")
    assert [each.label for each in found.deployments] == ["there"]
    assert len(found.measured[0].run.answered) == 4
    words = "The comparison ended early: 1 of 2 runs were measured."
    assert words in found.notes
    assert words in (tmp_path / "pdserve-compare.html").read_text()


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_the_first_peer_sets_the_pace_where_everything_runs_already(tmp_path):
    with scripted_server("--first-ms", "20", "--gap-ms", "4") as server:
        done = run(
            *("--topologies", "", "--peer", server.url, "--interference-duration", "0.8"),
            *("--interference-steady-output-len", "8", "--allow-invalid"),
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"pace measured on {server.url}" in done.stdout
    found = load(tmp_path / "pdserve-compare.json")
    assert found.environment["pace of the requests"].startswith(f"measured on {server.url}")
    assert found.rates is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        pytest.param(
            ("--gpus", "97", "98"),
            "--gpus is 97,98: .* finds 0 of these 2 GPUs",
            id="GPUs that are not there",
        ),
        pytest.param(
            ("--request-rates", "1", "2"),
            "pd-interference sets the times of its requests itself: leave out --request-rates",
            id="rates for a data set with times of its own",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(tmp_path, words, told):
    done = run(*words, cwd=tmp_path)
    assert done.returncode == EXIT_CONFIG
    assert re.search(told, done.stderr)
    assert "starting" not in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.timeout(400)
def test_ctrl_c_ends_every_process_and_says_130(tmp_path):
    with subprocess.Popen(
        command(
            *("--topologies", "pd", "--report", str(tmp_path / "c.html"), "--no-bound"),
            *("--dataset-name", "random", "--request-rate", "1"),
        ),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "ready after" in line:
                break
        time.sleep(1.0)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) >= 5  # two API servers, two engine cores, the proxy
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(120) == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(400)
def test_a_deployment_that_cannot_start_shows_and_keeps_its_logs(tmp_path):
    done = subprocess.run(
        command("--topologies", "colocated", "--colocated-args=--max-model-len 1", *RANDOM),
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=360,
        check=False,
    )
    assert done.returncode == 1
    assert "colocated: engine ended with exit code 3 before it was ready" in done.stderr
    assert "--max-model-len" in done.stderr
    (log,) = tmp_path.glob("pdserve-compare-*/engine.log")
    assert str(log) in done.stderr
    assert re.search(r"max-model-len", log.read_text())


class TestProcesses:
    CONFIG = CompareConfig(
        model="boxed",
        engine_args="--max-model-len 512",
        prefill_args="--max-num-batched-tokens 1024",
        decode_args="--max-num-seqs 8",
        proxy_args="--kv-mode pull",
    )

    def members(self, kind, config=CONFIG, **more):
        (topology,) = plan([kind], [(1, 1)], [0, 1], **more)
        return members_of(topology, config, model="/m", ports=[1, 2, 3], secret="s")

    def test_engines_are_pinned_to_disjoint_cores_with_a_thread_for_each(self):
        prefill, decode, proxy = self.members(Kind.DISAGGREGATED)
        assert (prefill.spec.cores, decode.spec.cores, proxy.spec.cores) == ((0,), (1,), ())
        assert "--num-threads 1" in " ".join(prefill.spec.arguments)

    def test_one_engine_has_all_cores_and_no_proxy(self):
        (engine,) = self.members(Kind.COLOCATED)
        assert engine.spec.cores == (0, 1)
        assert "--num-threads 2" in " ".join(engine.spec.arguments)

    def test_each_role_gets_its_own_words(self):
        prefill, decode, proxy = (
            " ".join(m.spec.arguments) for m in self.members(Kind.DISAGGREGATED)
        )
        assert "--max-model-len 512" in prefill
        assert "--max-model-len 512" in decode
        assert "--max-num-batched-tokens 1024" in prefill
        assert "--max-num-batched-tokens" not in decode
        assert "--max-num-seqs 8" in decode
        assert "--kv-mode pull" in proxy

    def test_replicas_stand_in_both_lists_of_their_proxy(self):
        words = " ".join(self.members(Kind.REPLICAS)[-1].spec.arguments)
        assert "--prefill http://127.0.0.1:1 http://127.0.0.1:2" in words
        assert "--decode http://127.0.0.1:1 http://127.0.0.1:2" in words

    def test_without_chunks_the_engine_is_told_so(self):
        (engine,) = self.members(Kind.UNCHUNKED)
        assert "--no-enable-chunked-prefill" in engine.spec.arguments

    def test_a_chunk_size_is_the_step_budget(self):
        (engine,) = self.members(Kind.COLOCATED, chunk_tokens=[128])
        assert "--max-num-batched-tokens 128" in " ".join(engine.spec.arguments)

    def test_gpus_are_shared_out_instead_of_cores(self):
        config = CompareConfig(model="boxed", gpus=(4, 5))
        (topology,) = plan([Kind.DISAGGREGATED], [(1, 1)], config.gpus, what="GPUs")
        members = members_of(topology, config, model="/m", ports=[1, 2, 3], secret="s")
        assert [m.spec.environ.get("CUDA_VISIBLE_DEVICES") for m in members[:2]] == ["4", "5"]
        assert all(m.spec.cores == () for m in members)

    def test_a_store_is_started_first_and_every_engine_is_told_of_it(self):
        (topology,) = topologies_of(CompareConfig(topologies=("pd+store",), cores=CORES))
        assert (topology.label, topology.words[-15:]) == ("P/D 1:1 + store", "with a KV store")
        members = members_of(topology, self.CONFIG, model="/m", ports=[1, 2, 3, 4, 5], secret="s")
        store, *engines, proxy = members
        assert store.spec.arguments[:3] == ["kv-server", "--kv-tiers", "cpu:1GiB"]
        assert store.url == "tcp://127.0.0.1:4"
        for engine in engines:
            words = " ".join(engine.spec.arguments)
            assert "--kv-transfer-config.kv-connector nixl,lmcache" in words
            assert "--kv-transfer-config.lmcache.url tcp://127.0.0.1:4" in words
            assert "--kv-transfer-config.lmcache.http-url http://127.0.0.1:5" in words
        assert "--prefill http://127.0.0.1:1 --decode http://127.0.0.1:2" in " ".join(
            proxy.spec.arguments
        )
        assert commands_of(topology, self.CONFIG)[0].startswith("pdserve kv-server ")

    def test_engines_that_hand_nothing_over_have_the_store_alone(self):
        (topology,) = topologies_of(CompareConfig(topologies=("colocated+store",), cores=CORES))
        _, engine = members_of(topology, self.CONFIG, model="/m", ports=[1, 2, 3], secret="s")
        assert "--kv-transfer-config.kv-connector lmcache" in " ".join(engine.spec.arguments)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (
                ("pd+tiers",),
                "--topologies contains .pd\\+tiers.: use some of .*, alone or followed by \\+store",
            ),
            (("pd", "pd"), "--topologies names the deployment P/D 1:1 twice"),
            (("pd+store", "pd+store"), "--topologies names the deployment P/D 1:1 \\+ store twice"),
        ],
    )
    def test_a_deployment_that_is_unknown_or_stands_there_twice_is_refused(self, words, says):
        with pytest.raises(ConfigError, match=says):
            topologies_of(CompareConfig(topologies=words, cores=CORES))

    def test_a_peer_with_the_label_of_a_deployment_is_refused(self):
        config = CompareConfig(
            topologies=("colocated",), cores=CORES, peer=("colocated=http://127.0.0.1:1",)
        )
        with pytest.raises(ConfigError, match=r"label colocated, .* of a deployment"):
            topologies_of(config)

    def test_a_store_that_outlives_a_run_is_refused(self):
        with pytest.raises(ConfigError, match="compare with a cpu tier alone"):
            CompareConfig(kv_tiers="cpu:1GiB,disk:/data:1GiB")

    def test_the_secret_is_on_no_command_line(self):
        assert not any("s" in m.spec.arguments for m in self.members(Kind.DISAGGREGATED))

    def test_commands_to_repeat_it_name_the_cores(self):
        (topology,) = plan([Kind.DISAGGREGATED], [(1, 1)], [0, 1])
        prefill, decode, proxy = commands_of(topology, self.CONFIG)
        assert prefill.startswith("taskset -c 0 pdserve prefill boxed ")
        assert decode.startswith("taskset -c 1 pdserve decode boxed ")
        assert proxy.startswith("pdserve proxy ")


class TestOneEngineAlone:
    def test_it_has_the_cores_of_the_smallest_engine_of_a_pd_deployment(self):
        kinds = [Kind.COLOCATED, Kind.DISAGGREGATED]
        alone = one_engine(plan(kinds, [(1, 1)], [3, 4, 5]))
        assert alone is not None
        assert alone.engines[0].cores == (5,)

    def test_there_is_none_where_everything_runs_already(self):
        assert one_engine(peers(["http://a:1"])) is None

    @pytest.mark.parametrize("num", [12, 144, 288])
    def test_the_sample_has_the_plans_proportions(self, num):
        kinds = ("steady", "burst", "burst")  # every third alone would be of one kind
        requests = [request(i, [1] * 10, group=kinds[i % 3], at_s=0.1 * i) for i in range(num)]
        sample = sample_of(requests)
        steady = sum(each.group == "steady" for each in sample)
        assert len(sample) <= 48
        assert steady / len(sample) == pytest.approx(1 / 3, abs=0.05)
        assert {each.at_s for each in sample} == {0.0}

    def test_long_prompts_make_a_smaller_sample(self):
        whole = request(0, [1] * 10, num_prompt_tokens=4000)
        requests = [msgspec.structs.replace(whole, index=i) for i in range(100)]
        assert 5 <= len(sample_of(requests)) <= 6

    def test_prompts_longer_than_a_sample_should_be_leave_one(self):
        requests = [request(i, [1] * 10, num_prompt_tokens=100_000) for i in range(2)]
        assert len(sample_of(requests)) == 1


class TestChunks:
    def test_the_baseline_has_chunks_that_cut_prompts(self):
        assert CompareConfig().budgets == (512,)

    @pytest.mark.parametrize(
        "config",
        [
            CompareConfig(engine_args="--max-num-batched-tokens 128"),
            CompareConfig(colocated_args="--max_num_batched_tokens=128"),
            CompareConfig(gpus=(0, 1)),
        ],
    )
    def test_the_engines_own_budget_stays_where_one_was_given_or_gpus_are_used(self, config):
        assert config.budgets == ()
        assert msgspec.structs.replace(config, chunk_tokens=(64,)).budgets == (64,)


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("num_runs", 0, "--num-runs"),
        ("request_rates", ("1", "x"), "--request-rates"),
        ("request_rates", ("1", "2", "1.0"), "--request-rates"),
        ("chunk_tokens", (0,), "--chunk-tokens"),
        ("endpoint", "embeddings", "--endpoint"),
        ("cores", (1, 1), "--cores"),
        ("engine_args", "--a 'b", "--engine-args"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name(field, value, flag):
    with pytest.raises(ConfigError, match=re.escape(flag)):
        CompareConfig(**{field: value})


def test_cores_or_gpus_but_not_both():
    with pytest.raises(ConfigError, match="--gpus"):
        CompareConfig(cores=(0,), gpus=(0,))
