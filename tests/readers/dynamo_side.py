"""Dynamo's index of KV events, asked over standard input; runs where `ai-dynamo-runtime` is.

A line is a JSON object with a `do`; the answer is a line of JSON, too. Knows nothing of pdserve.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from dynamo.llm import SelectionService

WORKER = 7
MODEL = "model"


async def main() -> None:
    service = SelectionService(indexer_threads=1)
    loop = asyncio.get_running_loop()
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        order = json.loads(line)
        print(json.dumps(await answer(service, order)), flush=True)
    service.shutdown()


async def answer(service: SelectionService, order: dict[str, Any]) -> object:
    match order["do"]:
        case "register":
            return await service.upsert_worker(
                {
                    "worker_id": WORKER,
                    "model_name": MODEL,
                    "endpoint": "http://127.0.0.1:9",
                    "block_size": order["block_size"],
                    "max_num_batched_tokens": 8192,
                    "data_parallel_start_rank": 0,
                    "data_parallel_size": 1,
                    "kv_events_endpoints": {0: order["endpoint"]},
                    "replay_endpoint": order["replay_endpoint"],
                }
            )
        case "forget":
            return await service.delete_worker(WORKER)
        case "scores":
            return [
                await service.overlap_scores({"model_name": MODEL, "token_ids": tokens})
                for tokens in order["prompts"]
            ]
    raise ValueError(order)


asyncio.run(main())
