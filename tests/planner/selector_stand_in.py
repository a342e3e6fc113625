"""Speaks the lines of `benchmarks/dynamo_side.py` and reads the same events, in a way of its own.

    python selector_stand_in.py WAY FILE

prompt      reads whatever has come
slow        reads one batch of each engine with each question
deaf        reads none
forgetful   reads them, and does not keep what follows another block
last        as prompt, and chooses the last engine

Others choose the engine with the fewest tokens to compute, the first of several. What it was told
of bookings stands in the file, a line of JSON each: the method, the request, the engine's number.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import zmq

BLOCK_TOKENS = 64


@dataclass
class Worker:
    events: zmq.Socket[bytes]
    blocks: dict[tuple[int | None, tuple[int, ...]], int] = field(default_factory=dict)
    bookings: dict[str, int] = field(default_factory=dict)

    def read(self, way: str) -> None:
        while way != "deaf" and self.events.poll(0):
            _, _, payload = self.events.recv_multipart()
            for event in msgspec.msgpack.decode(payload)[1]:
                self._apply(event, keeps_all=way != "forgetful")
            if way == "slow":
                return

    def _apply(self, event: dict[str, Any], *, keeps_all: bool) -> None:
        match event["type"]:
            case "BlockStored":
                parent = event["parent_block_hash"]
                for i, name in enumerate(event["block_hashes"]):
                    tokens = event["token_ids"][i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
                    if keeps_all or parent is None:
                        self.blocks[parent, tuple(tokens)] = name
                    parent = name
            case "BlockRemoved":
                gone = set(event["block_hashes"])
                self.blocks = {k: name for k, name in self.blocks.items() if name not in gone}

    def num_found(self, prompt: list[int]) -> int:
        parent, num = None, 0
        for start in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            parent = self.blocks.get((parent, tuple(prompt[start : start + BLOCK_TOKENS])))
            if parent is None:
                break
            num += 1
        return num


class StandIn:
    def __init__(self, way: str, path: str) -> None:
        self.way = way
        self.told = Path(path)
        self.context = zmq.Context()
        self.workers: dict[int, Worker] = {}

    def upsert_worker(self, given: dict[str, Any]) -> None:
        assert given["block_size"] == BLOCK_TOKENS
        events = self.context.socket(zmq.SUB)
        events.subscribe(b"")
        events.connect(given["kv_events_endpoint"])
        self.workers[given["worker_id"]] = Worker(events)

    def overlap_scores(self, given: dict[str, Any]) -> dict[str, Any]:
        found = []
        for number, worker in self.workers.items():
            worker.read(self.way)
            num = worker.num_found(given["token_ids"])
            found.append({"worker_id": number, "device_blocks": num})
        return {"workers": found}

    def select(self, given: dict[str, Any]) -> dict[str, Any]:
        prompt = given["token_ids"]
        new = {n: len(prompt) - BLOCK_TOKENS * w.num_found(prompt) for n, w in self.workers.items()}
        number = min(new, key=lambda n: (new[n] + sum(self.workers[n].bookings.values()), n))
        if self.way == "last":
            number = max(new)
        return {"worker_id": number, "effective_prefill_tokens": new[number]}

    def create_reservation(self, given: dict[str, Any]) -> None:
        name, number = given["selection_id"], given["worker_id"]
        self.workers[number].bookings[name] = given["effective_prefill_tokens"]
        self._tell("create_reservation", name, number)

    def prefill_complete(self, name: str) -> None:
        number = self._number(name)
        self.workers[number].bookings[name] = 0
        self._tell("prefill_complete", name, number)

    def free_reservation(self, name: str) -> None:
        number = self._number(name)
        del self.workers[number].bookings[name]
        self._tell("free_reservation", name, number)

    def _number(self, name: str) -> int:
        return next(n for n, worker in self.workers.items() if name in worker.bookings)

    def _tell(self, *line: object) -> None:
        with self.told.open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    stand_in = StandIn(*sys.argv[1:])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        method, given = json.loads(line)
        print(json.dumps(getattr(stand_in, method)(given)), flush=True)


main()
