"""A Prometheus of its own (Debian's package `prometheus`), on loopback and for this run."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import subprocess
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx

from pdserve.lifeline import end_with_parent
from tests.cli.process import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

START_TIMEOUT_S = 60.0


class Prometheus:
    """Asks one that runs."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=30, verify=False)

    def _ask(self, path: str, **params: Any) -> Any:
        answer = self._http.get(f"/api/v1{path}", params=params)
        assert answer.status_code == 200, f"{params}: {answer.text}"
        return answer.json()["data"]

    def label_values(self, selector: str, label: str) -> list[str]:
        """The values of a label, of all series or of those that a selector takes."""
        params = {"match[]": selector} if selector else {}
        return list(self._ask(f"/label/{label}/values", **params))

    def are_all_up(self) -> bool:
        """Whether it is ready, and every target was scraped well at last."""
        try:
            if self._http.get("/-/ready").status_code != 200:
                return False
        except httpx.TransportError:
            return False
        targets = self._ask("/targets")["activeTargets"]
        return bool(targets) and all(target["health"] == "up" for target in targets)

    def lines(
        self, expression: str, start_s: float, end_s: float, *, step_s: float
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return labels and points of each series of a range query that has a finite point."""
        found = self._ask("/query_range", query=expression, start=start_s, end=end_s, step=step_s)[
            "result"
        ]
        lines = [
            (
                each["metric"],
                [(at, float(text)) for at, text in each["values"] if math.isfinite(float(text))],
            )
            for each in found
        ]
        return [line for line in lines if line[1]]


@contextlib.contextmanager
def scraping(
    jobs: Mapping[str, Sequence[str]], directory: Path, *, program: str = "prometheus"
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes each second.

    Args:
        jobs: By name, host:port of the targets.
        program: Its path, or its name on PATH.
    """
    path = shutil.which(program)
    if path is None:
        raise SystemExit(f"{program} is not installed: apt-get install prometheus, or --prometheus")
    directory.mkdir(parents=True)
    configs = [
        f"  - job_name: {job}\n    static_configs: [{{targets: {list(targets)}}}]\n"
        for job, targets in jobs.items()
    ]
    (directory / "prometheus.yml").write_text(
        f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n{''.join(configs)}"
    )
    [port] = free_ports(1)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                path,
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
            preexec_fn=partial(end_with_parent, os.getpid()),
        )
    try:
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not prometheus.are_all_up():
            assert process.poll() is None, (directory / "log").read_text()
            assert time.monotonic() < deadline_s, (directory / "log").read_text()
            time.sleep(0.2)
        yield prometheus
    finally:
        process.terminate()
        process.wait(30)
