"""aiperf against a chat endpoint: `URL MODEL TOKENIZER`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS = 8


def main() -> None:
    """Print how many requests of a short run were answered; raise unless all were."""
    url, model, tokenizer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        arguments = {
            "model-names": model,
            "url": url.removesuffix("/v1"),
            "endpoint-type": "chat",
            "tokenizer": tokenizer,
            "request-count": NUM_REQUESTS,
            "concurrency": 2,
            "isl": 24,
            "osl": 12,
            "artifact-dir": name,
            "ui": "none",
        }
        flags = [part for flag, value in arguments.items() for part in (f"--{flag}", str(value))]
        program = Path(sys.executable).with_name("aiperf")
        run = [program, "profile", "--streaming", *flags]
        subprocess.run(run, check=True, timeout=240, stdout=sys.stderr)
        found = json.loads((Path(name) / "profile_export_aiperf.json").read_text())
    num_answered = found["request_count"]["avg"]
    assert num_answered == NUM_REQUESTS, found
    assert found["time_to_first_token"]["avg"] > 0
    print("answered", num_answered)


if __name__ == "__main__":
    main()
