"""Dynamo's `SelectionService`, asked over standard input; runs where `ai-dynamo-runtime` is.

A line is a JSON array of one of its methods and what that is given; the answer is a line of JSON,
too. Knows nothing of pdserve. What the service does not take ends it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from dynamo.llm import SelectionService


async def main() -> None:
    service = SelectionService(indexer_threads=1)
    loop = asyncio.get_running_loop()
    print(json.dumps("ready"), flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        method, given = json.loads(line)
        print(json.dumps(await getattr(service, method)(given)), flush=True)
    service.shutdown()


asyncio.run(main())
