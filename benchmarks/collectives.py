"""What ranks of one machine pay for meeting: through shared memory, and through gloo's sockets.

Prints one JSON object. Ranks are processes with one thread each; every way of an operation is
called in turns of some hundred calls (gloo: some ten), one after the other, so that all see the
machine in the same mood. Microseconds are a call's, as the first rank sees them over a turn,
medians of the turns; ratios are medians of the turns' own.

`shared` is what ranks of one machine use. `gloo_in_order` is what ranks of several machines use:
a sum in rank order, made of gloo's gathers. `gloo` is gloo's own operation, whose sums depend on
timing and sizes.

`hop` is a tensor from one pipeline stage to the next: it goes round all ranks, and the time is
divided by their number. Gloo's way is the one between machines.

    python -m benchmarks.collectives [--quick] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.engine import environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    from torch import Tensor

    from pdserve.parallel.group import Group, World
    from pdserve.parallel.rendezvous import Rendezvous

    Call = Callable[[], object]
    # By operation and tensor, then by way: microseconds of each turn.
    Turns = dict[str, dict[str, dict[str, list[float]]]]

NUM_RANKS = (2, 4)
HIDDEN_SIZE = 576
# Rows of a decoding request, of 16 of them, and of a prompt.
ROWS = (1, 16, 512)
SHARED = "shared"


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        num_rounds: Turns of each way.
        num_calls: Of a turn, through shared memory, with few rows.
        num_gloo_calls: The same through gloo.
    """

    num_rounds: int
    num_calls: int
    num_gloo_calls: int

    def calls(self, way: str, rows: int) -> int:
        """Calls of a turn."""
        num = self.num_calls if way == SHARED else self.num_gloo_calls
        return max(4, num // 8) if rows == max(ROWS) else num


FULL = Sizes(num_rounds=9, num_calls=400, num_gloo_calls=60)
QUICK = Sizes(num_rounds=3, num_calls=100, num_gloo_calls=20)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="less of everything: a smoke test")
    parser.add_argument("--rounds", type=int, default=None)
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    sizes = Sizes(args.rounds or sizes.num_rounds, sizes.num_calls, sizes.num_gloo_calls)
    # Ranks are forked before this process has torch.
    found = {str(num_ranks): _summary(_run(num_ranks, sizes)) for num_ranks in NUM_RANKS}
    result = {
        "benchmark": "collectives",
        "tensors": f"bf16 [rows, {HIDDEN_SIZE}]",
        "rounds": sizes.num_rounds,
        "ranks": found,
        "environment": environment(1),
    }
    print(json.dumps(result, indent=1))


def _summary(found: Turns) -> dict[str, Any]:
    return {
        operation: {tensor: _row(turns) for tensor, turns in tensors.items()}
        for operation, tensors in found.items()
    }


def _row(turns: dict[str, list[float]]) -> dict[str, float]:
    shared = turns[SHARED]
    row = {f"{way}_us": round(statistics.median(taken), 1) for way, taken in turns.items()}
    for way, taken in turns.items():
        if way != SHARED:
            ratios = [a / b for a, b in zip(taken, shared, strict=True)]
            row[f"{way}_over_shared"] = round(statistics.median(ratios), 2)
    return row


def _run(num_ranks: int, sizes: Sizes) -> Turns:
    """Start ranks, and return what the first one found."""
    from pdserve.parallel.rendezvous import listen

    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    listener, rendezvous = listen("127.0.0.1")
    ranks = [
        context.Process(
            target=_be_rank, args=(rank, num_ranks, rendezvous, sizes, theirs), daemon=True
        )
        for rank in range(num_ranks)
    ]
    with listener, ours:
        for process in ranks:
            process.start()
        theirs.close()  # so that the ranks' end is noticed
        try:
            found: Turns = ours.recv()
        finally:
            for process in ranks:
                process.kill()
                process.join()
    return found


def _be_rank(
    rank: int, num_ranks: int, rendezvous: Rendezvous, sizes: Sizes, result: Connection
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    from pdserve.parallel.group import join
    from pdserve.parallel.mesh import Mesh, MeshShape

    torch.set_num_threads(1)
    # The group of a pipeline: it is the one whose members have hops.
    mesh = Mesh(MeshShape(pp=num_ranks), rank)
    world = join(mesh, rendezvous, torch.device("cpu"))
    with torch.inference_mode():
        found = _measure(world, sizes)
    world.pp.barrier()
    if rank == 0:
        result.send(found)
        result.close()


def _measure(world: World, sizes: Sizes) -> Turns:
    """Every rank runs it, and finds times of its own."""
    group = world.pp
    if group.shared is None:
        raise SystemExit("the ranks cannot share memory here: the log says why")
    by_sockets = _without_shared_memory(group)
    found: Turns = {}
    for rows in ROWS:
        for operation, calls in _calls(group, by_sockets, rows).items():
            turns: dict[str, list[float]] = {way: [] for way in calls}
            for turn in range(sizes.num_rounds + 1):
                for way, call in calls.items():
                    taken = _time(group, call, sizes.calls(way, rows))
                    if turn:  # the first warms up
                        turns[way].append(taken / (group.size if operation == "hop" else 1))
            name = f"{rows} row{'s' if rows > 1 else ''}"
            found.setdefault(operation, {})[name] = turns
    return found


def _calls(group: Group, by_sockets: Group, rows: int) -> dict[str, dict[str, Call]]:
    """By operation and way, what to time."""
    import torch
    import torch.distributed as dist

    from pdserve.parallel.pipeline import StageLink

    x = torch.randn(rows, HIDDEN_SIZE).to(torch.bfloat16)
    gathered = x.new_empty(rows * group.size, HIDDEN_SIZE)
    device = torch.device("cpu")

    def hop(link: StageLink) -> Call:
        def go_round() -> Tensor:
            if group.is_first:
                link.send(x)
                return link.recv(*x.shape)
            link.send(link.recv(*x.shape))
            return x

        return go_round

    return {
        "all_reduce": {
            SHARED: lambda: group.all_reduce(x),
            "gloo_in_order": lambda: by_sockets.all_reduce(x),
            "gloo": lambda: dist.all_reduce(x.clone(), group=group.host),
        },
        "all_gather": {
            SHARED: lambda: group.all_gather(x),
            "gloo": lambda: dist.all_gather_single(gathered, x, group=group.host),
        },
        "hop": {
            SHARED: hop(StageLink(group, device, x.dtype)),
            "gloo": hop(StageLink(by_sockets, device, x.dtype)),
        },
    }


def _without_shared_memory(group: Group) -> Group:
    """The same ranks as if they were on several machines."""
    from pdserve.parallel import collectives
    from pdserve.parallel.group import Group

    name = f"{group.name}, by sockets"
    assert group.device is not None
    assert group.host is not None
    collectives.remember(name, group.ranks, device=group.device, host=group.host, shared=None)
    rank = group.ranks[group.index]
    return Group(group.ranks, rank, device=group.device, host=group.host, name=name)


def _time(group: Group, call: Call, num_calls: int) -> float:
    """Microseconds of a call."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(num_calls):
        call()
    taken = time.perf_counter() - start
    group.barrier()  # what was sent last may still be on its way, and dies with its sender
    return taken / num_calls * 1e6


if __name__ == "__main__":
    main()
