"""`pdserve bench compare` with whole processes: it measures, fails and is interrupted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import psutil
import pytest

from pdserve.bench.compare.result import load
from pdserve.bench.compare.summary import Figure, rows
from pdserve.bench.compare.topology import Kind, plan
from pdserve.bench.report.scale import number
from pdserve.commands.bench_deployments import commands_of, members_of
from pdserve.config.compare import CompareConfig
from pdserve.errors import ConfigError

SMALL = ["--engine-args=--kv-cache-memory-bytes 64MiB", "--no-progress", "--num-runs", "1"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "pdserve", "bench", "compare", "boxed", *SMALL, *words]


def is_served(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/livez", timeout=2)
    except (urllib.error.URLError, OSError):
        return False
    return True


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_small_comparison_gives_table_report_and_file_and_leaves_nothing(tmp_path):
    report = tmp_path / "c.html"
    done = subprocess.run(
        command(
            *("--topologies", "colocated", "pd", "--cores", "0", "1", "--report", str(report)),
            *("--interference-duration", "2.5", "--interference-burst-input-len", "256"),
            *("--goodput", "ttft:5000", "--allow-invalid"),
        ),
        capture_output=True,
        text=True,
        timeout=110,
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
    assert found.rates is not None
    table = rows(found, None)
    page = report.read_text()
    for row in table:
        for figure, value in row.values.items():
            assert number(value.median) in done.stdout, (row.label, figure)
            assert f"<td>{number(value.median)}" in page, (row.label, figure)
    assert f"x{number(table[1].ratios[Figure.ITL_P99].median)}" in done.stdout
    assert not any(is_served(run.base_url) for run in (colocated, pd))


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(90)
def test_ctrl_c_ends_every_process_and_says_130(tmp_path):
    with subprocess.Popen(
        command("--topologies", "pd", "--report", str(tmp_path / "c.html")),
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
        assert process.wait(60) == 130
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not list(tmp_path.iterdir())


@pytest.mark.e2e
@pytest.mark.timeout(60)
def test_a_deployment_that_cannot_start_shows_and_keeps_its_logs(tmp_path):
    done = subprocess.run(
        command("--topologies", "colocated", "--colocated-args=--max-model-len 1"),
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=tmp_path,
        timeout=50,
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

    def test_the_secret_is_on_no_command_line(self):
        assert not any("s" in m.spec.arguments for m in self.members(Kind.DISAGGREGATED))

    def test_commands_to_repeat_it_name_the_cores(self):
        (topology,) = plan([Kind.DISAGGREGATED], [(1, 1)], [0, 1])
        prefill, decode, proxy = commands_of(topology, self.CONFIG)
        assert prefill.startswith("taskset -c 0 pdserve prefill boxed ")
        assert decode.startswith("taskset -c 1 pdserve decode boxed ")
        assert proxy.startswith("pdserve proxy ")


@pytest.mark.parametrize(
    ("field", "value", "flag"),
    [
        ("num_runs", 0, "--num-runs"),
        ("request_rates", ("1", "x"), "--request-rates"),
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
