"""A transfer thread over UCX costs nothing while it is idle, and leaves nothing behind."""

from __future__ import annotations

import os
import time

from pdserve.connectors.conformance import Engine, prompt_of
from pdserve.connectors.ucx import UcxConnector

PROMPT = prompt_of(40)


def loaded_pair() -> tuple[Engine, Engine]:
    connector = UcxConnector()
    p, d = Engine(connector, "P"), Engine(connector, "D")
    d.load(d.queue(PROMPT, p.prefill(PROMPT, [1, 2, 3])), [4, 5, 6])
    d.until(lambda: d.received, others=[p])
    p.until(lambda: p.settled, others=[d])
    return p, d


def test_connected_engines_that_have_nothing_to_do_take_no_time() -> None:
    engines = loaded_pair()
    time.sleep(0.2)
    before_s = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - before_s < 0.05
    for engine in engines:
        engine.close()


def test_closing_leaves_no_descriptor_open() -> None:
    counts = []
    for _ in range(3):  # libraries keep a few after their first use
        for engine in reversed(loaded_pair()):
            engine.close()
        counts.append(len(os.listdir("/proc/self/fd")))
    assert counts[2] <= counts[1]
