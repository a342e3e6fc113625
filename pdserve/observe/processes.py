"""`process_*` and `python_*`, as every Prometheus client has them, of a process and its children.

This process has no label, as with vLLM; one that it has started is told apart by `process`, and
sums are over both. Read from /proc, in a thread, where no event loop waits for it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from pdserve.observe.metrics import exposition

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric

_PROC = Path("/proc")


class ProcessSeries:
    """The series of this process and of those below it.

    Args:
        children: Names of the processes to report, by the module that each runs (`-m`). Several
            of one name are numbered in the order of their process ids.
    """

    def __init__(self, children: Mapping[str, str]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Tree(dict(children)))
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    async def exposition(self) -> bytes:
        """Return them in Prometheus' text format."""
        return await asyncio.to_thread(exposition, self._registry)


class _Tree(Collector):
    def __init__(self, children: dict[str, str]) -> None:
        self._children = children

    def collect(self) -> Iterable[Metric]:
        """See the base class."""
        families = _families("self")
        names: dict[str, int] = dict.fromkeys(self._children.values(), 0)
        for pid in sorted(_below("self")):
            name = self._children.get(_module(pid))
            if name is None:
                continue
            labels = {"process": f"{name} {names[name]}"}
            names[name] += 1
            of_child = _families(pid)  # fewer, of one that ends
            for key in families.keys() & of_child.keys():
                for sample in of_child[key].samples:
                    families[key].add_sample(sample.name, labels, sample.value)
        return families.values()


def _families(pid: int | str) -> dict[str, Metric]:
    # Nothing is shared between calls: several threads may collect at once.
    one = ProcessCollector(pid=lambda: pid, registry=None)
    return {family.name: family for family in one.collect()}


def _below(pid: int | str) -> Iterator[int]:
    """Yield the processes that one has started, and those that they have."""
    for path in (_PROC / str(pid) / "task").glob("*/children"):
        try:
            children = [int(text) for text in path.read_text().split()]
        except OSError:  # the thread, or the process, has ended
            continue
        for child in children:
            yield child
            yield from _below(child)


def _module(pid: int) -> str:
    """Return what a Python process was told to run by `-m`; empty if nothing."""
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return ""
    at = arguments.index("-m") if "-m" in arguments else len(arguments)
    return "".join(arguments[at + 1 : at + 2])
