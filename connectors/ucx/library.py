"""A typed interface to ucxx; the only module that imports it, lazily.

Choices made here, with their reasons:
- Blocking progress: UCX's own descriptor shows when there is work, so an idle worker costs
  nothing, and a busy one needs no polling.
- Receives are posted at an endpoint, not at the worker: closing the endpoint cancels them.
- Endpoints by worker address, with error handling: when a peer's process ends, so do the messages
  in flight with it.
- One copy of UCX per process: NIXL brings its own, and two of them share signal handlers, memory
  hooks and variables.

It knows neither blocks nor the contents of messages.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from pdserve.connectors.transfer_thread.host import UCX_DEFAULTS
from pdserve.errors import ConfigError, PeerError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_UCX_DEFAULTS = UCX_DEFAULTS | {
    # Between two processes on one host this moves a third more than 8 KiB does.
    "UCX_TCP_TX_SEG_SIZE": "256k",
    "UCX_TCP_RX_SEG_SIZE": "256k",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
_OTHER_COPY = "nixl._bindings"
# UCX ends the process if it is given an invalid address, hence a prefix to check.
_ADDRESS = b"UCX worker "


class UcxError(PeerError):
    """UCX refused or failed an operation that involves a peer."""


class UcxRequest:
    """A message in flight."""

    def __init__(self, request: Any, error: type[Exception]) -> None:
        self._request = request
        self._error = error

    @property
    def is_over(self) -> bool:
        """Whether UCX has finished with its memory."""
        return bool(self._request.completed)

    def failure(self) -> str | None:
        """Return why a finished message failed; None = it did not."""
        try:
            self._request.check_error()
        except self._error as error:
            return f"{type(error).__name__}: {error}"
        return None


class UcxEndpoint:
    """A connection to one peer; see `UcxWorker.connect`."""

    def __init__(self, endpoint: Any, ucx: _Ucx) -> None:
        self._endpoint = endpoint
        self._ucx = ucx

    @property
    def is_alive(self) -> bool:
        """Whether messages can be posted to it."""
        return bool(self._endpoint.alive)

    def send(self, memory: torch.Tensor, tag: int) -> UcxRequest:
        """Send a message; its memory belongs to UCX until it is over.

        Raises:
            UcxError: It could not be posted; nothing is in flight.
        """
        return self._post(self._endpoint.tag_send, memory, tag)

    def receive(self, memory: torch.Tensor, tag: int) -> UcxRequest:
        """Receive the message with this tag, of at most this size; otherwise like `send`."""
        return self._post(self._endpoint.tag_recv, memory, tag)

    def close(self) -> None:
        """End the messages in flight, without waiting for the peer."""
        try:
            self._endpoint.close_blocking()
        except self._ucx.error:
            return  # the peer has closed it

    def _post(self, post: Any, memory: torch.Tensor, tag: int) -> UcxRequest:
        array = self._ucx.array(memory if memory.is_cuda else memory.numpy())
        try:
            return UcxRequest(post(array, self._ucx.tag(tag)), self._ucx.error)
        except self._ucx.error as error:
            raise UcxError(f"UCX {type(error).__name__}: {error}") from None


class UcxWorker:
    """One UCX worker. Not thread-safe: one thread creates, uses and closes it.

    Args:
        options: UCX's variables, without `UCX_`; variables set by the user take precedence.

    Raises:
        ConfigError: ucxx is not installed, another copy of UCX is loaded, or UCX refuses an option.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        for variable, value in _UCX_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        self._ucx = ucx = _Ucx()
        own = {name: value for name, value in options.items() if f"UCX_{name}" not in os.environ}
        feature = ucx.library.Feature
        try:
            self._context = ucx.library.UCXContext(own, (feature.TAG, feature.WAKEUP))
            self._worker = ucx.library.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
        except ucx.error as error:
            raise ConfigError(
                f"UCX cannot start with {own} ({type(error).__name__}: {error}): check "
                "--kv-transfer-config.ucx.tls and the UCX_* variables",
                param="kv-transfer-config.ucx.tls",
            ) from None

    @property
    def address(self) -> bytes:
        """The address by which peers connect to it."""
        return _ADDRESS + bytes(self._worker.address.tobytes())

    @property
    def descriptor(self) -> int:
        """A file descriptor that is readable when there is work, once `arm` has returned True."""
        return int(self._worker.epoll_file_descriptor)

    def progress(self) -> None:
        """Do the pending work."""
        self._worker.progress()

    def arm(self) -> bool:
        """Make the descriptor signal new work; False = there is work to do first."""
        return bool(self._worker.arm())

    def connect(self, address: bytes) -> UcxEndpoint:
        """Begin to connect to a peer.

        Raises:
            UcxError: No transport reaches it, or the address is not a UCX worker's.
        """
        library = self._ucx.library
        if not address.startswith(_ADDRESS):
            raise UcxError("the peer has no UCX worker, so it uses another kv_connector")
        try:
            there = library.UCXAddress.create_from_buffer(address.removeprefix(_ADDRESS))
            endpoint = library.UCXEndpoint.create_from_worker_address(
                self._worker, there, endpoint_error_handling=True
            )
        except self._ucx.error as error:
            raise UcxError(f"UCX {type(error).__name__}: {error}") from None
        return UcxEndpoint(endpoint, self._ucx)

    def close(self) -> None:
        """End everything.

        A worker that has received a message without a receive is kept until the process ends: its
        destructor would wait for the rest of that message, forever if the sender is gone, while
        holding the interpreter lock.
        """
        ucx, worker = self._ucx, self._worker
        worker.cancel_inflight_requests()
        worker.progress()
        if worker.tag_probe(ucx.tag(0), tag_mask=ucx.any_tag).matched:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(worker))
        del self._worker, self._context, worker


class _Ucx:
    """The parts of ucxx that are used.

    Raises:
        ConfigError: ucxx cannot be loaded.
    """

    def __init__(self) -> None:
        if _OTHER_COPY in sys.modules:
            raise ConfigError(
                "kv_connector 'ucx' cannot run in a process that has loaded NIXL, which brings "
                "its own copy of UCX: use only one of the two",
                param="kv-transfer-config.kv_connector",
            )
        try:
            ucxx = importlib.import_module("ucxx")
            self.array: Any = importlib.import_module("ucxx._lib.arr").Array
        except ImportError as error:
            raise ConfigError(
                f"kv_connector 'ucx' cannot load ucxx ({error}): install pdserve[ucx]",
                param="kv-transfer-config.kv_connector",
            ) from error
        self.library: Any = ucxx.libucxx
        self.tag: Any = ucxx.types.Tag
        self.any_tag: Any = ucxx.types.TagMask(0)
        self.error: type[Exception] = ucxx.libucxx.UCXError
