"""The server's memory as a CUDA device reaches it: locked, and known to the driver.

Kernels read and write it by themselves then, at the addresses that the host has. It stays so for as
long as anybody has the mapping, and is let go before that is undone.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import torch

from pdserve.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.connectors.lmcache.slots import Pool

_PORTABLE: Final = 1
_MAPPED: Final = 2


def reach_from(device: torch.device, pool: Pool) -> None:
    """Have a device reach a mapping.

    Raises:
        ConfigError: See `lock`.
    """
    with torch.cuda.device(device):
        lock(pool, torch.cuda.cudart())  # type: ignore[no-untyped-call]


def lock(pool: Pool, runtime: Any) -> None:
    """Register a mapping with the driver, until it is collected.

    Args:
        runtime: CUDA's, as `torch.cuda.cudart` returns it.

    Raises:
        ConfigError: The driver does not lock so much.
    """
    address = pool.ctypes.data
    status = runtime.cudaHostRegister(address, pool.nbytes, _PORTABLE | _MAPPED)
    if int(status):
        raise ConfigError(
            f"CUDA cannot lock the LMCache server's memory, {pool.nbytes / (1 << 30):.1f} GiB "
            f"({runtime.cudaGetErrorString(status)}): raise the limit of locked memory (`ulimit -l "
            "unlimited`, `docker run --ulimit memlock=-1`), or give the server less (--kv-tiers "
            "cpu:SIZE)",
            param="kv-transfer-config.lmcache.url",
        )
    end = weakref.finalize(pool, runtime.cudaHostUnregister, address)
    end.atexit = False  # it ends with the process
