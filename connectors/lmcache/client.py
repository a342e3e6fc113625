"""The only module that knows LMCache's protocol: calls to its server, and their answers.

LMCache's server keeps objects in shared memory. A client that has registered a geometry for a
(model, world size) may ask for slots to write, or to read what a lookup has locked. We choose the
geometry: an object is a fixed number of opaque bytes, one *unit* (its `worker_id`) of the
`world_size` units that make up the KV of a chunk. A chunk that lacks a unit is not found.

No call waits longer than its time-out. Knows no blocks, layers or digests. Usable from any thread.
"""

from __future__ import annotations

import array
import functools
import hashlib
import mmap
import os
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import zmq

from pdserve.config.tiers import LMCACHE_SILENT
from pdserve.connectors.lmcache.held_locks import HeldLocks
from pdserve.connectors.lmcache.http_side import StoreHttpSide
from pdserve.connectors.lmcache.settings import require_lmcache
from pdserve.connectors.lmcache.slots import Slots
from pdserve.errors import ConfigError, PdserveError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pdserve.connectors.lmcache.messages import ChunkRange
    from pdserve.connectors.lmcache.settings import LMCacheSettings
    from pdserve.connectors.lmcache.slots import Pool, StoreLayout

_SHM: Final = Path("/dev/shm")
_ASK_AGAIN_S: Final = 0.002


class StoreGoneError(PdserveError):
    """The server gave no answer in time, or not a valid one."""


class StoreMissError(PdserveError):
    """The server no longer has what a lookup found."""


class StoreClient:
    """A connection of one rank to a server.

    Args:
        layout: How chunks are cut into units, and their names.
        engine: Prefix of session names; unique among engines.
        instance_id: Unique among the ranks of all engines.
        reach: Makes the server's memory accessible to the device of the KV, if that is necessary.

    Attributes:
        chunk_tokens: Tokens per chunk; 0 until the first connection.
        stages: Stages of the layout.
        http: The server's HTTP side.

    Raises:
        ConfigError: See `require_lmcache`.
    """

    def __init__(
        self,
        settings: LMCacheSettings,
        layout: StoreLayout,
        *,
        engine: str,
        instance_id: int,
        reach: Callable[[Pool], None] | None = None,
    ) -> None:
        require_lmcache()
        for name, value in (*LMCACHE_SILENT.items(), ("LMCACHE_LOG_LEVEL", "ERROR")):
            os.environ.setdefault(name, value)
        with warnings.catch_warnings(action="ignore"):  # from its own imports
            from lmcache.v1.multiprocess.custom_types import (
                IPCCacheServerKey,
                RegisterEngineDrivenContextPayload,
            )
            from lmcache.v1.multiprocess.transport.zmq_impl import create_request_client

        self._url = settings.server_url
        self.http = StoreHttpSide(settings.http_url, settings.timeout_s)
        self._timeout_s = settings.timeout_s
        self._layout = layout
        self._engine = engine
        self._instance_id = instance_id
        self.stages = layout.stages
        self._slot_bytes = 0
        self._make_key = IPCCacheServerKey
        self._key_fields = {
            "model_name": layout.model,
            "world_size": layout.num_units,
            "num_kv_readers": layout.num_readers,
        }
        self._make_geometry = functools.partial(
            RegisterEngineDrivenContextPayload,
            instance_id=instance_id,
            model_name=layout.model,
            world_size=layout.num_units,
            block_size=1,
            num_layers=1,
            dtype_str="uint8",
            use_mla=True,  # one plane
            num_physical_slots=1,
        )
        self._context = zmq.Context()
        # A server that is gone takes in no messages. Without these options, LMCache's thread would
        # block once a thousand are queued, and `close` would wait until the last one is sent.
        self._context.setsockopt(zmq.SNDHWM, 0)
        self._context.setsockopt(zmq.LINGER, 0)
        self._client = create_request_client(settings.server_url, context=self._context)
        self._reach = reach
        self._pool: Pool = np.empty(0, np.uint8)
        self._held_locks = HeldLocks(instance_id)
        self.chunk_tokens = 0

    # --- the server

    def connect(self) -> None:
        """Register this rank, again if it was known, and map the server's memory.

        Raises:
            StoreGoneError: The server does not answer.
            ConfigError: The server's chunk size has changed, it offers no memory, or its memory
                cannot be accessed from this machine or device.
        """
        chunk_tokens = int(self._answer(self._client.get_chunk_size(), "get_chunk_size"))
        if self.chunk_tokens not in (0, chunk_tokens):
            raise ConfigError(
                f"the LMCache server at {self._url} restarted with chunks of {chunk_tokens} "
                f"tokens (--chunk-size) instead of {self.chunk_tokens}: restart the engine",
                param="kv-transfer-config.lmcache.url",
            )
        if self.chunk_tokens:  # ends whatever this rank had begun before an interruption
            leave = self._client.unregister_kv_cache_engine_driven_context
            self._answer(leave(self._instance_id), "unregister")
        self._slot_bytes = self._layout.slot_bytes(chunk_tokens)
        geometry = self._make_geometry(hidden_dim_size=self._slot_bytes)
        register = self._client.register_kv_cache_engine_driven_context
        registered = self._answer(register(geometry), "register")
        self._pool = np.empty(0, np.uint8)  # drop the old mapping before making another
        segment = _SHM / str(registered.shm_name).lstrip("/")
        self._pool = self._map(segment, int(registered.pool_size))
        self._held_locks.connect(segment)
        self.chunk_tokens = chunk_tokens

    def ping(self) -> Any:
        """Ping the server, which also shows it that we are alive; return the answer's future."""
        return self._client.ping(self._instance_id)

    def has_server_ended(self) -> bool:
        """Whether its process has ended since this was asked; False if it tells nobody of that."""
        return self._held_locks.is_cut()

    def other_stages(self) -> list[str]:
        """Return stages as in `StoreLayout.stages`, for which alone KV there is not taken."""
        found = {self._layout.stages_of(model) for model in self.http.models()}
        return sorted(found - {""})

    def close(self, *, is_up: bool) -> None:
        """Unregister; if the server is up, wait until it has processed all earlier messages."""
        leaving = self._client.unregister_kv_cache_engine_driven_context(self._instance_id)
        leaving.wait(self._timeout_s if is_up else 0.0)
        self._held_locks.close()
        self._pool = np.empty(0, np.uint8)
        self._client.close()
        self._context.term()

    def _map(self, segment: Path, num_bytes: int) -> Pool:
        flag = "kv-transfer-config.lmcache.url"
        if segment == _SHM or not num_bytes:
            raise ConfigError(
                f"the LMCache server at {self._url} (--{flag}) has no shared memory: start it with "
                "--supported-transfer-mode engine_driven --shm-name NAME",
                param=flag,
            )
        try:
            descriptor = os.open(segment, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"the LMCache server at {self._url} (--{flag}) keeps its memory in {segment}, "
                f"which cannot be opened here ({error}): run engines and server on one machine, "
                "as one user and with the same /dev/shm; if the file is gone, restart the server",
                param=flag,
            ) from error
        try:
            pool = np.frombuffer(mmap.mmap(descriptor, num_bytes), np.uint8)
        finally:
            os.close(descriptor)
        if self._reach is not None:
            self._reach(pool)
        return pool

    # --- prompts

    def lookup(self, chunks: ChunkRange) -> PendingLookup:
        """Start to look for the leading chunks of a prompt, and to bring them into memory."""
        session = self._session(chunks)
        self._held_locks.opened(session)
        return PendingLookup(self._client, PromptKeys(self, chunks, session))

    def release(self, chunks: ChunkRange, *, is_last: bool) -> list[Any]:
        """Release a lookup's read locks on some chunks, and its session if `is_last`.

        Returns:
            Futures that must complete before this rank unregisters.
        """
        session, futures = self._session(chunks), []
        if is_last:
            self._held_locks.over(session)
        else:
            self._held_locks.over_before(chunks.end, session)
        if chunks.first < chunks.end:
            locked = PromptKeys(self, chunks, session).of(None)
            futures.append(self._client.free_lookup_locks(locked, 1))
        if is_last:
            futures.append(self._client.end_session(session))
        return futures

    def locked(self, chunks: ChunkRange, units: Sequence[int], *, waits: bool) -> Slots:
        """Return the slots of chunks that a lookup has locked.

        They stay valid until `unlock`, and for some minutes at most. If no answer comes, or nobody
        `waits` for it, the server unlocks them when this rank registers again.

        Raises:
            StoreGoneError: The server does not answer.
            StoreMissError: The server does not have all of them.
        """
        keys = PromptKeys(self, chunks, self._session(chunks))
        self._held_locks.over(keys.session)
        asked = [self._client.prepare_retrieve(keys.of(u), self._instance_id) for u in units]
        deadline_s = time.monotonic() + (self._timeout_s if waits else 0.0)
        answers = [self._answer(future, "prepare_retrieve", deadline_s) for future in asked]
        lost = [unit for unit, each in zip(units, answers, strict=True) if not each.success]
        if lost:
            for unlocking in self.unlock(chunks, [unit for unit in units if unit not in lost]):
                unlocking.wait(max(0.0, deadline_s - time.monotonic()))
            raise StoreMissError(
                f"units {lost} of chunks {chunks.first} to {chunks.end} are missing"
            )
        starts = [[self._start(slot) for slot in each.context["slots"]] for each in answers]
        return Slots(self._pool, np.array(starts, np.int64).T.copy())

    def unlock(self, chunks: ChunkRange, units: Sequence[int]) -> list[Any]:
        """Unlock chunks that have been read.

        Returns:
            Futures that must complete before the session ends, or the server begins it anew.
        """
        keys = PromptKeys(self, chunks, self._session(chunks))
        return [self._client.commit_retrieve(keys.of(u), self._instance_id) for u in units]

    def reserve(self, chunks: ChunkRange, units: Sequence[int]) -> Slots:
        """Reserve slots for those chunks that the server lacks.

        Raises:
            StoreGoneError: The server does not answer, or offers no memory.
        """
        keys = PromptKeys(self, chunks, self._save_session(chunks))
        asked = [self._client.prepare_store(keys.of(u), self._instance_id) for u in units]
        deadline_s = time.monotonic() + self._timeout_s
        starts = np.full((chunks.end - chunks.first, len(units)), -1, np.int64)
        for unit, future in enumerate(asked):
            answer = self._answer(future, "prepare_store", deadline_s).context
            if "slots" not in answer:
                raise StoreGoneError(f"the LMCache server at {self._url} did not allocate memory")
            starts[answer["chunk_indices"], unit] = [self._start(slot) for slot in answer["slots"]]
        return Slots(self._pool, starts)

    def commit(self, chunks: ChunkRange, units: Sequence[int]) -> None:
        """Commit all reserved slots of these units, which have been written.

        Raises:
            StoreGoneError: The server does not answer, or does not know the reservation.
        """
        keys = PromptKeys(self, chunks, self._save_session(chunks))
        asked = [self._client.commit_store(keys.of(u), self._instance_id, b"") for u in units]
        deadline_s = time.monotonic() + self._timeout_s
        for future in asked:
            if not self._answer(future, "commit_store", deadline_s):
                raise StoreGoneError(f"the LMCache server at {self._url} no longer knows a save")

    def forget(self, chunks: ChunkRange, units: Sequence[int]) -> None:
        """Have chunks dropped, so that they can be saved again, if the server has an HTTP side."""
        if not self.http.url:
            return
        keys = PromptKeys(self, chunks, self._save_session(chunks))
        self.http.drop([each for unit in units for each in keys.encoded(unit)])

    def end_save(self, chunks: ChunkRange) -> None:
        """End the session of a save."""
        self._client.end_session(self._save_session(chunks))

    # --- its terms

    def make_key(self, **fields: Any) -> Any:
        """Make a key of the server's own type."""
        return self._make_key(**self._key_fields, **fields)

    def _session(self, chunks: ChunkRange) -> str:
        return f"{self._engine}-{chunks.session}"

    def _save_session(self, chunks: ChunkRange) -> str:
        return f"{self._engine}-{chunks.session}-{self._instance_id}"

    def _start(self, slot: dict[str, Any]) -> int:
        start, end = int(slot["offset"]), int(slot["offset"]) + self._slot_bytes
        if int(slot["length"]) < self._slot_bytes or start < 0 or end > len(self._pool):
            raise StoreGoneError(
                f"the LMCache server at {self._url} named a slot that does not exist"
            )
        return start

    def _answer(self, future: Any, what: str, deadline_s: float | None = None) -> Any:
        now_s = time.monotonic()
        left_s = self._timeout_s if deadline_s is None else max(0.0, deadline_s - now_s)
        if not future.wait(left_s):
            raise StoreGoneError(
                f"the LMCache server at {self._url} did not answer {what} within "
                f"{self._timeout_s:g} s"
            )
        return _result(future)


def _result(future: Any) -> Any:
    """Return the server's answer.

    Raises:
        StoreGoneError: It could not be asked, or its answer could not be read.
    """
    try:
        return future.result(0)
    except (OSError, ValueError, RuntimeError, zmq.ZMQError) as error:
        raise StoreGoneError(f"the request to the LMCache server failed: {error}") from error


class PromptKeys:
    """Chunks of a prompt in the server's terms."""

    def __init__(self, client: StoreClient, chunks: ChunkRange, session: str) -> None:
        self.session = session
        self._client = client
        salt = hashlib.sha256(chunks.salt.encode()).hexdigest() if chunks.salt else ""
        self._fields = {
            "token_ids": tuple(array.array("I", chunks.token_ids)),
            "start": chunks.first * client.chunk_tokens,
            "end": chunks.end * client.chunk_tokens,
            "request_id": session,
            "cache_salt": salt,
        }

    def of(self, unit: int | None) -> Any:
        """Return the key of one unit of the chunks; None = all units."""
        return self._client.make_key(worker_id=unit, **self._fields)

    def encoded(self, unit: int) -> list[dict[str, Any]]:
        """Return the names of a unit's objects on the HTTP side."""
        from lmcache.v1.distributed.api import ipc_key_to_object_keys
        from lmcache.v1.multiprocess.token_hasher import TokenHasher

        key = self.of(unit)
        hashes = TokenHasher(self._client.chunk_tokens).compute_chunk_hashes(
            list(key.token_ids), end=key.end
        )[key.start // self._client.chunk_tokens :]
        return [
            {
                "chunk_hash_hex": each.chunk_hash.hex(),
                "model_name": each.model_name,
                "kv_rank": each.kv_rank,
                "cache_salt": each.cache_salt,
                "object_group_id": 0,
            }
            for each in ipc_key_to_object_keys(key, hashes, [0])[0]
        ]


class PendingLookup:
    """A lookup of the leading chunks of a prompt that is in progress. For one thread.

    Args:
        calls: The server's calls, each of which returns a future.

    Attributes:
        num_chunks: Number of chunks that were found and locked; None = not known yet.
        has_answered: Whether the server has answered anything at all.
    """

    def __init__(self, calls: Any, keys: PromptKeys) -> None:
        self.num_chunks: int | None = None
        self.has_answered = False
        self._calls = calls
        self._session = keys.session
        self._asked = self._calls.lookup(keys.of(None), 1)
        self._is_asking_how_far = False
        self._ask_at_s = 0.0

    def wait(self, now_s: float, timeout_s: float) -> None:
        """Wait until the server answers, or it is time to ask again."""
        if self._asked is not None:
            self._asked.wait(timeout_s)
        else:
            time.sleep(max(0.0, min(timeout_s, self._ask_at_s - now_s)))

    def poll(self, now_s: float) -> bool:
        """Process the server's answers so far. Return whether the lookup is over.

        Raises:
            StoreGoneError: The server could not be asked.
        """
        if self.num_chunks is not None:
            return True
        if self._asked is not None:
            if not self._asked.query():
                return False
            self.has_answered = True
            found = _result(self._asked) if self._is_asking_how_far else None
            self._asked = None
            if found is not None:
                self.num_chunks = int(found)
                return True
            # Chunks on a disk are brought into memory first: ask again after a while.
            self._ask_at_s = now_s + (_ASK_AGAIN_S if self._is_asking_how_far else 0.0)
        if now_s >= self._ask_at_s:
            self._is_asking_how_far = True
            self._asked = self._calls.query_prefetch_status(self._session)
        return False
