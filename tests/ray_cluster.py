"""A real Ray cluster of several nodes on this machine."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


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
        from ray.cluster_utils import Cluster

        node = {"num_cpus": cpus_per_node, "object_store_memory": 80 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        try:
            for _ in range(num_nodes - 1):
                cluster.add_node(**node)
            os.environ["RAY_ADDRESS"] = str(cluster.address)
            yield str(cluster.address)
        finally:
            cluster.shutdown()
            for name in {"RAY_ADDRESS", "RAY_USAGE_STATS_ENABLED"} - set(before):
                del os.environ[name]
            os.environ.update(before)
