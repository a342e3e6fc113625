"""Zeroed memory for the requests of UCX: in other memory a fault of UCX can end the process.

UCX emulates a READ over TCP: one side asks, the other answers. The answer's request is made without
its `send.datatype` (`ucp_get_req_handler`, UCX 1.23). If the connection is lost while answers wait,
because the reader died or was cut off, UCX cleans them up by that field, and in memory from malloc
it may say that a list of registrations is to be followed: SIGSEGV, of a prefill engine because a
decode engine died. Zero says "contiguous", and nothing is followed. UCX has a function that takes
the pool's memory from mmap instead, which zeroes it; other requests leave no other kind there.
"""

from __future__ import annotations

import ctypes
from typing import Final

_MAPS: Final = "/proc/self/maps"
_LIBRARY: Final = "/libucp"
# The first two members of ucs_mpool_ops_t.
_FROM_MALLOC: Final = ("ucs_mpool_hugetlb_malloc", "ucs_mpool_hugetlb_free")
_FROM_MMAP: Final = ("ucs_mpool_chunk_mmap", "ucs_mpool_chunk_munmap")


def zero_requests() -> None:
    """Let every UCX that is loaded take zeroed memory for requests; call it before it has any.

    A UCX that does not take this memory from malloc, or does not show how, stays as it is.
    """
    with open(_MAPS, encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if _LIBRARY in line}
    for path in paths:
        _zero_requests(ctypes.CDLL(path))


def _zero_requests(ucp: ctypes.CDLL) -> None:
    try:
        operations = (ctypes.c_void_p * 2).in_dll(ucp, "ucp_request_mpool_ops")
        from_malloc, from_mmap = (
            [ctypes.cast(getattr(ucp, name), ctypes.c_void_p).value for name in names]
            for names in (_FROM_MALLOC, _FROM_MMAP)
        )
    except (AttributeError, ValueError):  # it has no such functions, or no such operations
        return
    if list(operations) == from_malloc:
        new = (ctypes.c_void_p * 2)(*from_mmap)
        ctypes.memmove(operations, new, ctypes.sizeof(new))  # both at once, as threads may come
