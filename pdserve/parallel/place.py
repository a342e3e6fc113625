"""The place of an engine core, and of each of its ranks, in the world. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pdserve.parallel.mesh import Axis, Mesh, MeshShape
from pdserve.parallel.rendezvous import Rendezvous

if TYPE_CHECKING:
    from pdserve.config.schema import ParallelConfig


class CorePlace(msgspec.Struct, frozen=True, kw_only=True):
    """An engine core among those whose ranks share one world.

    Data-parallel cores share a world only where their ranks share experts; else each core is
    alone in its own.

    Attributes:
        index: This core's place along the DP axis.
        num_cores: Cores in the world.
        rendezvous: Where all ranks of the world meet; None: the executor arranges it.
        local_index, num_local: Index of this core among those on this machine, of any world, and
            their number; None: as in the world.
    """

    index: int = 0
    num_cores: int = 1
    rendezvous: Rendezvous | None = None
    local_index: int | None = None
    num_local: int | None = None


class RankPlace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's place.

    Attributes:
        rendezvous: None only for a world of one.
        local_index, num_local: Index of this rank among those of all engine cores that share this
            machine's cores and devices, and their number.
    """

    mesh: Mesh = Mesh(MeshShape())
    rendezvous: Rendezvous | None = None
    local_index: int = 0
    num_local: int = 1

    @property
    def engine_rank(self) -> int:
        """The rank within its engine core: stage by stage, TP fastest."""
        return self.mesh.rank % (self.mesh.shape.pp * self.mesh.shape.tp)

    @property
    def is_output(self) -> bool:
        """Whether this rank answers steps: the first TP rank of the last stage."""
        last_stage = self.mesh.shape.pp - 1
        return self.mesh.index(Axis.TP) == 0 and self.mesh.index(Axis.PP) == last_stage


def mesh_shape(parallel: ParallelConfig, core: CorePlace) -> MeshShape:
    """Return the world's grid."""
    return MeshShape(
        dp=core.num_cores,
        pp=parallel.pipeline_parallel_size,
        tp=parallel.tensor_parallel_size,
    )


def rank_places(
    parallel: ParallelConfig, core: CorePlace, rendezvous: Rendezvous | None
) -> list[RankPlace]:
    """Return the places of one engine core's ranks, in rank order, all on one machine.

    Args:
        rendezvous: Where the world meets; its listening socket goes to the world's rank 0.
    """
    shape = mesh_shape(parallel, core)
    num_ranks = parallel.num_ranks
    local_core = core.index if core.local_index is None else core.local_index
    num_local_cores = core.num_cores if core.num_local is None else core.num_local
    found: list[RankPlace] = []
    for rank in range(core.index * num_ranks, (core.index + 1) * num_ranks):
        place = rendezvous
        if place is not None and rank:
            place = msgspec.structs.replace(place, listen_fd=None)
        found.append(
            RankPlace(
                mesh=Mesh(shape, rank),
                rendezvous=place,
                local_index=local_core * num_ranks + rank % num_ranks,
                num_local=num_local_cores * num_ranks,
            )
        )
    return found
