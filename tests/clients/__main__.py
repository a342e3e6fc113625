"""Clients that need packages of their own, as their users use them, against P and D.

`make clients` makes a virtual environment for each of them beside ours, and runs this. Each is a
process that is given the proxy's address, then that of one engine; what it prints must be the same.

    python -m tests.clients --environments DIRECTORY [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pdserve.config.boxed import boxed_model_dir
from tests.e2e.conftest import pd_deployment

HERE = Path(__file__).parent
CLIENTS = {
    "agents": ("instructor==1.17.0", "litellm==1.106.2", "mcp==2.3.0"),
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
    "langchain": ("langchain-openai==1.7.3",),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers"),
}
MODEL = "boxed"
TIMEOUT_S = 300.0


def main() -> int:
    """Run the named clients, or all; 1 if one of them failed or was answered otherwise by one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CLIENTS))
    args = parser.parse_args()
    if unknown := set(args.names) - CLIENTS.keys():
        parser.error(f"no client is called {', '.join(unknown)}")
    names = args.names or list(CLIENTS)
    pythons = {name: python_of(args.environments / name, CLIENTS[name]) for name in names}
    flags = ["--served-model-name", MODEL, "--dtype", "float32"]
    failed = []
    with (
        tempfile.TemporaryDirectory() as directory,
        pd_deployment(Path(directory), boxed_model_dir(), *flags, with_serve=True) as running,
    ):
        for name in names:
            start_s = time.monotonic()
            found = [run(name, pythons[name], running.url(each)) for each in ("proxy", "serve")]
            is_right = found[0] is not None and found[0] == found[1]
            failed += [] if is_right else [name]
            print(
                f"{name} ({', '.join(CLIENTS[name])}): {'as one engine' if is_right else 'FAILED'}"
                f", {time.monotonic() - start_s:.1f} s",
                flush=True,
            )
            for line in [] if is_right else found:
                print(line, file=sys.stderr)
        running.wait_nothing_held("prefill", "decode", timeout_s=30.0)
    return 1 if failed else 0


def python_of(environment: Path, packages: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment, which is made if it is not there."""
    python = environment / "bin" / "python"
    done = environment / "packages.json"
    if not done.exists() or json.loads(done.read_text()) != list(packages):
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", *packages]
        subprocess.run(pip, check=True)
        done.write_text(json.dumps(packages))
    return python


def run(name: str, python: Path, url: str) -> str | None:
    """Return what a client prints; None if it fails."""
    # Nothing of ours is on its path: it is another's process.
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    side = HERE / f"{name}_side.py"
    done = subprocess.run(
        [python, side, f"{url}/v1", MODEL, boxed_model_dir()],
        env={**env, "NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
        return None
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
