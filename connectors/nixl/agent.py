"""A typed interface to NIXL.

This is the only module that imports NIXL, and it does so lazily.

Choices made here, with their reasons:
- No NIXL progress thread. Its own loop spins a core or, with a delay, costs 1.5 to 2 % of one while
  idle and slows TCP down; the agent's owner drives it instead, with `poll` and `progress`, only
  while something is in flight.
- STRICT synchronisation, though one thread owns the agent: the default is a data race.
- Prepared descriptor lists, one strided row per region, because NIXL itself merges neighbours that
  are contiguous on both sides.
- No NIXL notifications: with one, DONE waits for a flush that a stopped peer never acknowledges.
  The side channel carries that information.

It knows no blocks, leases or peers' messages.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NewType

import numpy as np

from pdserve.connectors.nixl.descriptors import close_gently
from pdserve.connectors.nixl.ucx_pool import zero_requests
from pdserve.connectors.transfer.protocol import Region
from pdserve.connectors.transfer.seams import Direction
from pdserve.connectors.transfer_thread.host import UCX_DEFAULTS
from pdserve.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt


# UCX reads from GPUs of a machine without NVLink, one GPU alone included, over TCP: 0.4 GB/s on an
# H100, and 1,100 with this. Where it has not loaded its CUDA part, it warns of the variable.
_UCX_GPU_DEFAULTS = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
# After a partition, questions of a peer that TCP still repeats arrive on one connection, and UCX
# aborts the process if the one for the answers has timed out meanwhile. TCP gives up repeating
# after a quarter of an hour; what hangs here is noticed by the protocol above (see `transfer`).
_UCX_KEEPALIVE = {"UCX_TCP_KEEPIDLE": "1200s"}
_NET_DEVICES = "UCX_NET_DEVICES"
_OF_STORAGE = frozenset({"BLK_SEG", "FILE_SEG", "OBJ_SEG"})
_OTHER_COPY = "ucxx"


class AgentError(PeerError):
    """NIXL refused an operation that involves a peer, or failed in it."""


Prepared = NewType("Prepared", int)
"""A region that was prepared for transfers; see `NixlAgent.prepare`."""

Transfer = NewType("Transfer", int)
"""A posted READ or WRITE; see `NixlAgent.post`."""


class NixlAgent:
    """One NIXL agent. Not thread-safe: one thread creates, uses and closes it.

    Args:
        name: Unique forever, because peers refuse a name that was used before.
        backends: NIXL backends, in order.
        net_devices: Network devices for UCX, as in `UCX_NET_DEVICES`; None is all. It applies to
            the whole process: the first agent sets it, unless the user has.
        is_on_gpu: Whether it moves GPU memory; this also applies to the whole process.

    Raises:
        ConfigError: NIXL or one of the backends is not installed, or cannot be loaded.
        AgentError: NIXL cannot create it (now).
    """

    def __init__(
        self,
        name: str,
        backends: Sequence[str],
        *,
        net_devices: str | None = None,
        is_on_gpu: bool = False,
    ) -> None:
        defaults = UCX_DEFAULTS | _UCX_KEEPALIVE | (_UCX_GPU_DEFAULTS if is_on_gpu else {})
        for variable, value in defaults.items():
            os.environ.setdefault(variable, value)
        if net_devices is not None:
            os.environ.setdefault(_NET_DEVICES, net_devices)
        nixl = _import_bindings()
        config = nixl.nixlAgentConfig()
        config.useProgThread = False
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = False
        self._nixl = nixl
        self._errors: tuple[type[Exception], ...] = tuple(
            getattr(nixl, error)
            for error in dir(nixl)
            if error.startswith("nixl") and error.endswith("Error")
        )
        with self._typed("create_agent"):
            self._agent: Any = nixl.nixlAgent(name, config)
        available = self._agent.getAvailPlugins()
        for backend in backends:
            if backend not in available:
                known = ", ".join(sorted(available))
                raise _wrong(backend, f"which this NIXL lacks: use some of {known}")
        self._backends = [self._create_backend(backend) for backend in backends]
        self._registered: list[Any] = []

    def register(self, region: Region) -> None:
        """Register local memory, which must outlive the agent."""
        end = (region.address, region.num_bytes, region.device, "")
        descriptors = self._nixl.nixlRegDList(self._memory(region), [end])
        with self._typed("register_memory"):
            self._agent.registerMem(descriptors, self._backends)
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """The metadata with which a peer can read the registered memory."""
        return bytes(self._agent.getLocalMD())

    def add_peer(self, metadata: bytes) -> str:
        """Load a peer's metadata; return the name of its agent.

        Raises:
            AgentError: No transport reaches it, or this is not valid metadata.
        """
        devices = os.environ.get(_NET_DEVICES, "all")
        with self._typed(f"add_remote_agent (over the devices {devices} here)"):
            name: bytes = self._agent.loadRemoteMD(metadata)
        try:
            return name.decode()
        except UnicodeDecodeError as error:
            with self._typed("remove_remote_agent"):
                self._agent.invalidateRemoteMD(name)
            raise AgentError(f"the peer's agent has no name in UTF-8: {error}") from None

    def prepare(self, region: Region, peer: str | None = None) -> Prepared:
        """Prepare memory for transfers, unit by unit: registered here, or of a peer."""
        stride = region.stride_bytes
        rows = np.array(
            [[region.address, stride, region.device, stride, region.num_units]], dtype=np.uint64
        )
        owner = self._nixl.NIXL_INIT_AGENT if peer is None else peer
        with self._typed("prep_xfer_dlist"):
            return Prepared(
                self._agent.prepXferDlist(owner, self._memory(region), rows, self._backends)
            )

    def unprepare(self, prepared: Prepared) -> None:
        """Forget a prepared region that no transfer uses."""
        with self._typed("release_dlist_handle"):
            self._agent.releasedDlistH(prepared)

    def remove_peer(self, peer: str) -> None:
        """Forget a peer after its transfers and prepared regions."""
        with self._typed("remove_remote_agent"):
            self._agent.invalidateRemoteMD(peer)

    def post(
        self,
        direction: Direction,
        local: Prepared,
        local_units: npt.NDArray[np.int32],
        remote: Prepared,
        remote_units: npt.NDArray[np.int32],
    ) -> tuple[Transfer, bool]:
        """Post a READ of `remote_units` into `local_units`, pair by pair, or a WRITE.

        Returns:
            The transfer, and whether it is done. On one host it often is, because the copy is made
            inside this call, without the interpreter lock.

        Raises:
            AgentError: It could not be posted; nothing is in flight.
        """
        nixl = self._nixl
        operation = nixl.NIXL_READ if direction is Direction.READ else nixl.NIXL_WRITE
        with self._typed("make_prepped_xfer"):
            handle = self._agent.makeXferReq(
                operation, local, local_units, remote, remote_units, "", self._backends
            )
        return self._post(handle)

    def read_once(
        self, local: Region, peer: str, remote: Region, num_bytes: int
    ) -> tuple[Transfer, bool]:
        """Post a READ of the first bytes of one region into another, without preparation.

        Returns:
            As `post`.

        Raises:
            AgentError: It could not be posted; nothing is in flight.
        """
        nixl = self._nixl
        sides = [
            nixl.nixlXferDList(self._memory(region), [(region.address, num_bytes, region.device)])
            for region in (local, remote)
        ]
        with self._typed("create_xfer_req"):
            handle = self._agent.createXferReq(nixl.NIXL_READ, *sides, peer, "", self._backends)
        return self._post(handle)

    def poll(self, transfer: Transfer) -> bool:
        """Make progress; return whether `transfer` is done.

        Raises:
            AgentError: It failed, perhaps after part of the bytes; it writes no more.
        """
        with self._typed("check_xfer_state"):
            return self._is_done(self._agent.getXferStatus(transfer))

    def release(self, transfer: Transfer) -> None:
        """Forget a transfer that is done or failed. It does not wait for one in flight."""
        try:
            self._agent.releaseXferReq(transfer)
        except self._errors:
            # A failed transfer may refuse to be released while its peer's endpoint closes;
            # its handle then goes with the agent.
            return

    def progress(self) -> None:
        """Drive peers' operations on this agent's memory: connections and emulated reads.

        Raises:
            AgentError: An operation of a peer has failed; others are not affected.
        """
        with self._typed("get_new_notifs"):
            self._agent.getNotifs({}, self._backends)

    def close(self, *, is_reading: bool = False) -> None:
        """Destroy the agent; nothing that it posted moves afterwards.

        Args:
            is_reading: Whether a READ is in flight, whose peer must survive this (see
                `close_gently`).
        """
        for descriptors in self._registered:
            try:
                self._agent.deregisterMem(descriptors, self._backends)
            except self._errors:
                continue  # destroying the agent does it
        self._registered.clear()
        if is_reading:
            close_gently(self._destroy)
        else:
            self._destroy()

    def _destroy(self) -> None:
        self._agent = None

    def _create_backend(self, backend: str) -> int:
        with self._typed(f"create_backend({backend})"):
            try:
                _, segments = self._agent.getPluginParams(backend)
                if not _OF_STORAGE.isdisjoint(segments):
                    raise _wrong(backend, "which reaches storage, not other engines: leave it out")
                zero_requests()
                handle: int = self._agent.createBackend(backend, {})
            except self._nixl.nixlNotFoundError:  # its plugin is there, and cannot be loaded
                why = "which NIXL cannot load here: install what its plugin needs, or leave it out"
                raise _wrong(backend, why) from None
        return handle

    def _post(self, handle: int) -> tuple[Transfer, bool]:
        transfer = Transfer(handle)
        try:
            with self._typed("transfer"):
                return transfer, self._is_done(self._agent.postXferReq(handle, ""))
        except AgentError:
            self.release(transfer)
            raise

    @contextmanager
    def _typed(self, call: str) -> Iterator[None]:
        """Turn NIXL's exceptions inside a `with` into `AgentError`."""
        try:
            yield
        except self._errors as error:
            raise AgentError(f"NIXL {call}: {type(error).__name__}: {error}") from None

    def _memory(self, region: Region) -> Any:
        return self._nixl.VRAM_SEG if region.memory == "VRAM" else self._nixl.DRAM_SEG

    def _is_done(self, status: object) -> bool:
        if status not in (self._nixl.NIXL_SUCCESS, self._nixl.NIXL_IN_PROG):
            raise AgentError(f"NIXL reports {status}")
        return bool(status == self._nixl.NIXL_SUCCESS)


def _import_bindings() -> Any:
    if _OTHER_COPY in sys.modules:
        raise ConfigError(
            "kv_connector 'nixl' cannot run in a process that has loaded ucxx, which brings "
            "another copy of UCX: use only one of the two",
            param="kv-transfer-config.kv_connector",
        )
    try:
        importlib.import_module("nixl")
        return importlib.import_module("nixl._bindings")
    except ImportError as error:
        raise ConfigError(
            f"kv_connector 'nixl' cannot load NIXL ({error}): install the package nixl",
            param="kv-transfer-config.kv_connector",
        ) from error


def _wrong(backend: str, why: str) -> ConfigError:
    name = "kv-transfer-config.nixl.backends"
    return ConfigError(f"--{name} contains {backend!r}, {why}", param=name)
