"""Runs that were never sent, for what is made of runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.bench.records import Outcome, Run, RunHealth


def outcome(
    index: int, sent_s: float = 0.0, chunk_s: Sequence[float] = (0.1, 0.2, 0.4), **fields: Any
) -> Outcome:
    """An answer whose chunks of one token came at these times."""
    return Outcome(
        **{
            "index": index,
            "request_id": f"r{index}",
            "scheduled_s": sent_s,
            "sent_s": sent_s,
            "chunk_s": list(chunk_s),
            "chunk_tokens": [1] * len(chunk_s),
            "end_s": chunk_s[-1] if chunk_s else sent_s,
            "num_prompt_tokens": 10,
            "num_output_tokens": len(chunk_s),
            "status": 200,
            "finish_reason": "length",
            **fields,
        }
    )


def make_run(*outcomes: Outcome, **fields: Any) -> Run:
    return Run(
        **{
            "label": "ours",
            "base_url": "http://x",
            "model": "m",
            "dataset": "random",
            "arrivals": "burst",
            "seed": 0,
            "started_wall_s": 1_800_000_000.0,
            "duration_s": max((each.end_s for each in outcomes), default=0.0),
            "outcomes": list(outcomes),
            "health": RunHealth(),
            **fields,
        }
    )
