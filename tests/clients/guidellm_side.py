"""guidellm against an endpoint: `URL MODEL TOKENIZER`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

NUM_REQUESTS = 6


def main() -> None:
    """Print how many requests of a short run were answered; raise unless all were."""
    url, model, tokenizer = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        flags = {
            "backend": f"kind=openai_http,target={url.removesuffix('/v1')},model={model}",
            "profile": "kind=synchronous",
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={tokenizer}",
            "data": "kind=synthetic_text,prompt_tokens=24,output_tokens=12",
            "output": f"kind=json,path={name}/run.json",
        }
        program = Path(sys.executable).with_name("guidellm")
        arguments = [part for flag, value in flags.items() for part in (f"--{flag}", value)]
        run = [program, "run", *arguments, "--disable-console"]
        subprocess.run(run, check=True, timeout=240, stdout=sys.stderr)
        [benchmark] = json.loads((Path(name) / "run.json").read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert len(requests["successful"]) == NUM_REQUESTS, requests
    assert not requests["errored"]
    print("answered", len(requests["successful"]))


if __name__ == "__main__":
    main()
