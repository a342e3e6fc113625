"""How many modules a pushed request passes, and how many classes hold its state, by tracing one.

    python -m tools.pushed_request . ../other

Starts a proxy, a prefill and a decode engine of each tree, with the boxed model, and follows some
requests after others have made them acquainted. One passes a module if a function of it runs that
does not run while nothing is asked. A class holds its state if an instance that is alive meanwhile
has its id, or that of its transfer, in an attribute, unless it is a value that cannot change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Final

import httpx

from tests.e2e.deployment import Deployment

_CONTROL: Final = ("proxy", "server", "engine", "scheduler", "connectors")
_HOOK: Final = Path(__file__).parent / "traced"
_FOLLOWED: Final = "followed"
_NUM_FOLLOWED: Final = 5
_SILENCE_S: Final = 8.0
_AFTERWARDS_S: Final = 1.0


def trace(tree: Path, folder: Path) -> tuple[set[str], set[str]]:
    """Return the modules that the request passes, and the classes that hold its state."""
    phase = folder / "phase"
    deployment = Deployment(folder)
    env = {"PYTHONPATH": f"{_HOOK}:{tree}", "TRACED": str(folder)}
    engine = ["boxed", "--port", "0", "--max-num-batched-tokens", "64"]
    engine += ["--kv-cache-memory-bytes", "256MiB", "--num-threads", "1"]

    def enter(name: str, request_id: str = "") -> None:
        (folder / "next").write_text(f"{name} {request_id}")
        (folder / "next").replace(phase)

    def ask(request_id: str) -> None:
        body = {"prompt": [7 + index % 90 for index in range(500)], "max_tokens": 24}
        body |= {"cache_salt": request_id, "ignore_eos": True}
        url = f"{deployment.url('proxy')}/v1/completions"
        headers = {"X-Request-Id": request_id}
        httpx.post(url, json=body, headers=headers, timeout=60).raise_for_status()

    enter("start")
    try:
        deployment.start("proxy", "proxy", "--port", "0", "--kv-mode", "push", tree=tree, env=env)
        deployment.wait()
        for role in ("prefill", "decode"):
            deployment.start(
                role, role, *engine, "--proxy", deployment.url("proxy"), tree=tree, env=env
            )
        deployment.wait()
        deployment.wait_routable()
        for number in range(3):
            ask(f"first-{number}")
        enter("silence")
        time.sleep(_SILENCE_S)
        enter("request", _FOLLOWED)
        time.sleep(_AFTERWARDS_S)
        for number in range(_NUM_FOLLOWED):
            ask(f"{_FOLLOWED}-{number}")
        time.sleep(_AFTERWARDS_S)
        enter("end")
        time.sleep(_AFTERWARDS_S)
    finally:
        deployment.end()
    functions, silent = (_found(folder, name, "functions") for name in ("request", "silence"))
    files = {each.rpartition(":")[0] for each in functions - silent}
    product = f"{tree}/pdserve/"
    modules = {file.removeprefix(product) for file in files if file.startswith(product)}
    return modules, _found(folder, "request", "holders")


def _found(folder: Path, phase: str, kind: str) -> set[str]:
    return {
        each
        for file in folder.glob(f"*.{phase}.json")
        for each in json.loads(file.read_text())[kind]
    }


def main() -> None:
    """Trace a request of each tree."""
    parser = argparse.ArgumentParser(description="what a pushed request passes")
    parser.add_argument("trees", type=Path, nargs="+")
    parser.add_argument("--list", action="store_true", help="their names as well")
    arguments = parser.parse_args()
    for tree in arguments.trees:
        with tempfile.TemporaryDirectory() as name:
            modules, holders = trace(tree.resolve(), Path(name))
        parts = Counter(each.partition("/")[0] for each in modules)
        control = ", ".join(f"{parts[part]} in {part}" for part in _CONTROL)
        print(f"{tree}: {len(modules)} modules ({control}); {len(holders)} classes hold its state")
        for each in (*sorted(modules), *sorted(holders)) if arguments.list else ():
            print(f"    {each}")


if __name__ == "__main__":
    main()
