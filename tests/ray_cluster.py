"""A real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ray.cluster_utils import Cluster

# Ray gives a node half a minute to start, and no way to give it more.
STARTS = 3


@contextmanager
def ray_cluster(*, num_nodes: int, cpus_per_node: int) -> Iterator[str]:
    """Start one, make it known as RAY_ADDRESS, and end all of its processes.

    Yields:
        Its address.
    """
    before = dict(os.environ)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray opens files and sockets that it leaves to the garbage collector.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        node = {"num_cpus": cpus_per_node, "object_store_memory": 80 << 20}
        try:
            for start in range(1, STARTS + 1):
                try:
                    cluster = _start(num_nodes, node)
                    break
                except Exception as error:
                    if "timed out during startup" not in str(error) or start == STARTS:
                        raise
            try:
                os.environ["RAY_ADDRESS"] = str(cluster.address)
                yield str(cluster.address)
            finally:
                cluster.shutdown()
        finally:
            for name in {"RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED"} - set(before):
                os.environ.pop(name, None)
            os.environ.update(before)


def _start(num_nodes: int, node: dict[str, int]) -> Cluster:
    from ray.cluster_utils import Cluster

    processes = set(psutil.Process().children(recursive=True))
    try:
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        for _ in range(num_nodes - 1):
            cluster.add_node(**node)
    except Exception:
        ended = set(psutil.Process().children(recursive=True)) - processes
        for process in ended:
            process.kill()
        psutil.wait_procs(ended)
        raise
    return cluster
