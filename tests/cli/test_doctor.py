from __future__ import annotations

import json
import shutil
import socket
import urllib.error
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdserve.commands import doctor, transfer_probe
from pdserve.commands.findings import Finding, Grade
from pdserve.commands.transfer_probe import ProbeError, Rates, measure
from tests.cli.process import free_ports, pdserve_here

LAYOUT = {"model": "/models/tiny", "dtype": "float32", "num_kv_heads": "2"}


def engine(role: str, **layout: str) -> dict[str, Any]:
    fields = {**LAYOUT, **layout}
    digest = json.dumps(fields, sort_keys=True)
    endpoints = [{"host": "127.0.0.1", "port": 5600}]
    described = {"role": role, "layout_digest": digest, "layout": fields, "endpoints": endpoints}
    return {"engine": described}


def peers(reason: str | None = None, /, **engines: Any) -> list[Finding]:
    def fetch(url: str) -> Mapping[str, Any]:
        answer = engines[url]
        if isinstance(answer, Exception):
            raise answer
        return answer  # type: ignore[no-any-return]

    return list(doctor.peers(list(engines), fetch=fetch, connect=lambda host, port: reason))


def test_engines_of_one_layout_fit_together() -> None:
    findings = peers(p=engine("prefill"), d=engine("decode"))
    assert [finding.verdict for finding in findings] == [Grade.OK] * 5
    assert findings[-1].text == "p and d can exchange KV"


def test_engines_that_round_differently_are_told_with_both_values() -> None:
    def rounding(role: str, tp_size: int, experts: str = "") -> dict[str, Any]:
        numerics = {"device": "cuda sm_90", "tp_size": tp_size, "experts": experts}
        return {"engine": engine(role)["engine"] | {"numerics": numerics}}

    *_, finding = peers(p=rounding("prefill", 1), d=rounding("decode", 2, "ep 2"))
    assert (finding.check, finding.verdict) == ("numerics", Grade.WARN)
    assert finding.text.startswith(
        "p and d round differently: experts none and ep 2, tp_size 1 and 2."
    )
    *_, finding = peers(p=rounding("prefill", 2), d=rounding("decode", 2))
    assert (finding.check, finding.verdict) == ("numerics", Grade.OK)
    assert finding.text == "p and d round alike: device cuda sm_90, tp_size 2"


def test_engines_that_differ_are_named_with_both_values() -> None:
    *_, finding = peers(p=engine("prefill"), d=engine("decode", num_kv_heads="4", dtype="bfloat16"))
    assert finding.verdict is Grade.FAIL
    assert finding.text == "p and d differ: dtype float32 and bfloat16, num_kv_heads 2 and 4"
    assert "--dtype" in finding.remedy


def test_an_engine_without_a_connector_for_kv_is_named() -> None:
    alone = {"engine": engine("prefill")["engine"] | {"endpoints": []}}
    *_, finding = peers(p=alone, d=engine("decode"))
    assert finding.verdict is Grade.FAIL
    assert finding.text == "p and d cannot exchange KV: p has no connector for it"
    assert "--kv-transfer-config.kv-connector" in finding.remedy


def test_kv_on_the_loopback_device_of_one_of_two_hosts_fails_with_the_remedy() -> None:
    engines = {
        f"http://10.0.0.{n}:8100": engine(role) for n, role in ((1, "prefill"), (2, "decode"))
    }
    findings = [finding for finding in peers(**engines) if finding.check == "kv address"]
    assert [finding.verdict for finding in findings] == [Grade.FAIL] * 2
    assert findings[0].text == (
        "http://10.0.0.1:8100 exchanges KV at 127.0.0.1:5600, which only its own host can reach"
    )
    assert "--kv-transfer-config.host" in findings[0].remedy


def test_kv_that_is_not_reached_from_here_is_a_warning() -> None:
    (finding,) = [f for f in peers("Connection refused", x=engine("both")) if f.check != "peer"]
    assert (finding.check, finding.verdict) == ("kv address", Grade.WARN)
    assert "cannot be reached from here: Connection refused" in finding.text


def test_two_engines_of_one_role_lack_the_other() -> None:
    *_, finding = peers(a=engine("decode"), b=engine("decode"))
    assert (finding.check, finding.verdict) == ("roles", Grade.WARN)
    assert finding.remedy == "start pdserve prefill MODEL"


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (urllib.error.URLError("Connection refused"), "x cannot be reached: Connection refused"),
        (ValueError("HTTP 404"), "x is not a pdserve engine"),
        ({"object": "list"}, "x is not a pdserve engine"),
    ],
)
def test_a_peer_that_is_no_engine_fails(answer: object, text: str) -> None:
    (finding,) = peers(x=answer)
    assert (finding.verdict, finding.text) == (Grade.FAIL, text)


def test_a_peer_that_still_loads_is_only_a_warning() -> None:
    (finding,) = peers(x={"engine": None})
    assert finding.verdict is Grade.WARN


def test_a_port_in_use_is_a_warning_that_names_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        number = server.getsockname()[1]
        finding = doctor.port("127.0.0.1", number, "proxy")
    assert finding.verdict is Grade.WARN
    assert str(number) in finding.text


def test_a_small_shared_memory_says_how_a_container_gets_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(64 << 20, 0, 64 << 20)  # type: ignore[attr-defined]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    finding = doctor.shared_memory(tmp_path)
    assert finding.verdict is Grade.WARN
    assert "--shm-size" in finding.remedy


def test_a_missing_shared_memory_is_a_warning_for_what_needs_it(tmp_path: Path) -> None:
    finding = doctor.shared_memory(tmp_path / "none")
    assert finding.verdict is Grade.WARN
    assert "NCCL" in finding.text


@pytest.mark.parametrize(
    ("scope", "verdict"), [("0\n", Grade.OK), ("1\n", Grade.WARN), (None, Grade.OK)]
)
def test_a_restricted_ptrace_is_a_warning(
    tmp_path: Path, scope: str | None, verdict: Grade
) -> None:
    file = tmp_path / "ptrace_scope"
    if scope is not None:
        file.write_text(scope)
    assert doctor.ptrace(file).verdict is verdict


@pytest.mark.parametrize(
    ("flags", "words"), [({"avx2", "avx512_bf16"}, "avx512_bf16"), ({"avx2"}, "fp32"), (set(), "")]
)
def test_the_cpu_says_what_it_lacks(flags: set[str], words: str) -> None:
    finding = doctor.processor(frozenset(flags))
    assert finding.check == "cpu"
    assert words in finding.text


@pytest.mark.parametrize(("failures", "verdict"), [(1, Grade.OK), (2, Grade.FAIL)])
def test_a_transfer_that_breaks_off_is_tried_once_more(
    failures: int, verdict: Grade, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes: list[ProbeError | Rates] = [ProbeError("broken off")] * failures
    outcomes.append(Rates(transfer=2e9, memcpy=4e9))

    def measure_in_turn() -> Rates:
        outcome = outcomes.pop(0)
        if isinstance(outcome, ProbeError):
            raise outcome
        return outcome

    monkeypatch.setattr(transfer_probe, "measure", measure_in_turn)
    assert doctor.transfer().verdict is verdict


@pytest.mark.slow
def test_the_probe_says_why_it_cannot() -> None:
    with pytest.raises(ProbeError, match="no_such_backend"):
        measure(backends=["no_such_backend"], timeout_s=200)


@pytest.mark.slow
def test_json_holds_every_check_and_an_unreachable_peer_is_code_4(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    tiers = f"cpu:64MiB,disk:{tmp_path}:64MiB,redis:redis://127.0.0.1:{port}"
    flags = ("--kv-tiers", tiers, "--kv-server", url, "--peer", url)
    done = pdserve_here("doctor", "--json", *flags)
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert {"versions", "cpu", "devices", "kernels", "shared memory", "transfer"} <= set(checks)
    assert checks["transfer"]["verdict"] in {"ok", "warn"}
    assert "NIXL over UCX reads 64 MiB at " in checks["transfer"]["text"]
    found = {name: checks[name]["verdict"] for name in ("lmcache", "cpu tier", "disk tier")}
    assert found == dict.fromkeys(found, "ok")
    lost = {name: checks[name]["verdict"] for name in ("redis tier", "kv server", "peer")}
    assert lost == dict.fromkeys(lost, "fail")
    assert done.returncode == 4


def test_a_finding_is_one_line_and_its_remedy_the_next() -> None:
    finding = Finding("cpu", Grade.WARN, "slow", "buy another")
    assert [line.split() for line in doctor._line(finding).splitlines()] == [
        ["warn", "cpu", "slow"],
        ["->", "buy", "another"],
    ]
