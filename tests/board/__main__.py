"""Plays boards against Prometheus: `python -m tests.board [--board FILE] [--draw FILE.png]`.

Starts P, D and the proxy with the model that is in the tree, a Prometheus that scrapes them, and
clients for a while; then asks what each panel of each board asks. A panel without a finite point
is empty: that is told, and the exit code is 1. Without `--board` it is ours, configs/grafana.

Another's board comes from where it is published. One that selects no job, like vLLM's, is played
against a Prometheus that scrapes the proxy alone, or with `--scrape engine` one engine that does
both (`pdserve serve`).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from pdserve.config.boxed import boxed_model_dir
from tests.board.drawing import draw, legend_of, page
from tests.board.grafana import filled, read, values_of
from tests.board.prometheus import scraping
from tests.cli.process import ROOT
from tests.e2e.conftest import pd_deployment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.board.drawing import Line
    from tests.board.grafana import Board
    from tests.board.prometheus import Prometheus
    from tests.e2e.deployment import Deployment

PROXY_FLAGS = ("--split-policy", "shadow", "--tokenizer", str(boxed_model_dir()))
"""Decisions are made and measured, and requests go where they go by default."""
OURS = ROOT / "configs" / "grafana" / "pdserve.json"
NUM_CLIENTS = 3
STEP_S = 2.0


async def load(urls: Sequence[str], seconds: float) -> int:
    """Have clients ask in turn, for answers in a stream and in one piece; return how many."""
    end_s = time.monotonic() + seconds
    done = 0

    async def client(index: int, url: str) -> None:
        nonlocal done
        async with httpx.AsyncClient(timeout=60, verify=False) as http:
            while time.monotonic() < end_s:
                number = done = done + 1
                body = {
                    "prompt": f"{number % 7} was a king " * (4 + number % 12),
                    "max_tokens": 8 + number % 24,
                    "stream": (number + index) % 3 > 0,
                }
                answer = await http.post(f"{url}/v1/completions", json=body)
                assert answer.status_code == 200, answer.text

    async with asyncio.TaskGroup() as group:
        for url in urls:
            for index in range(NUM_CLIENTS):
                group.create_task(client(index, url))
    return done


def panel_lines(
    board: Board, prometheus: Prometheus, values: Mapping[str, str], start_s: float, end_s: float
) -> list[list[Line]]:
    """Return, for each panel, the lines of its expressions that have a finite point."""
    return [
        [
            (legend_of(legend, labels), points)
            for expression, legend in panel.expressions
            for labels, points in prometheus.lines(
                filled(expression, values), start_s, end_s, step_s=STEP_S
            )
        ]
        for panel in board.panels
    ]


def play(board: Board, prometheus: Prometheus, start_s: float, end_s: float) -> list[list[Line]]:
    """Ask what a board asks, and print it; return the lines of each panel."""
    values = values_of(board, prometheus.label_values, seconds=end_s - start_s)
    lines = panel_lines(board, prometheus, values, start_s, end_s)
    print(f"{board.title}: {len(board.panels)} panels")
    for panel, found in zip(board.panels, lines, strict=True):
        num_points = sum(len(points) for _, points in found)
        told = f"{len(found):3} series {num_points:5} points" if found else "EMPTY" + " " * 17
        print(f"  {told}  {panel.title}")
    return lines


def targets(deployment: Deployment, scraped: str) -> dict[str, list[str]]:
    """Return what to scrape, by job."""

    def addresses(*names: str) -> list[str]:
        return [deployment.url(name).removeprefix("http://") for name in names]

    if scraped == "all":
        return {
            "pdserve-proxy": addresses("proxy"),
            "pdserve-engine": addresses("prefill", "decode"),
        }
    return {"vllm": addresses("serve" if scraped == "engine" else "proxy")}


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.board")
    parser.add_argument("--board", type=Path, action="append", metavar="FILE.json")
    parser.add_argument("--scrape", choices=("proxy", "engine"), default="proxy")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long clients ask")
    parser.add_argument("--prometheus", default="prometheus", metavar="PROGRAM")
    parser.add_argument("--draw", type=Path, metavar="FILE.png", help="of the last board")
    return parser.parse_args()


def main() -> int:
    """Play the boards."""
    args = arguments()
    boards = [read(path) for path in args.board or [OURS]]
    views = ["all" if board.names_jobs else args.scrape for board in boards]
    num_empty = 0
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        with_serve = "engine" in views
        deployment = stack.enter_context(
            pd_deployment(directory, "boxed", with_serve=with_serve, proxy_flags=PROXY_FLAGS)
        )
        watching = {
            view: stack.enter_context(
                scraping(targets(deployment, view), directory / view, program=args.prometheus)
            )
            for view in set(views)
        }
        urls = [deployment.url(name) for name in ("proxy", "serve")[: 1 + with_serve]]
        start_s = time.time()
        num_requests = asyncio.run(load(urls, args.seconds))
        end_s = time.time()
        print(f"{num_requests} requests in {end_s - start_s:.0f} s")
        for board, view in zip(boards, views, strict=True):
            lines = play(board, watching[view], start_s, end_s)
            num_empty += sum(not found for found in lines)
        if args.draw is not None:
            note = (
                f"The board's own panels and expressions, asked of Prometheus and drawn without "
                f"Grafana; it scrapes {'all processes' if view == 'all' else f'the {view} alone'}"
            )
            asyncio.run(draw(page(board, lines, note), args.draw, directory / "browser"))
    print(f"{num_empty} empty panels")
    return int(num_empty > 0)


if __name__ == "__main__":
    sys.exit(main())
