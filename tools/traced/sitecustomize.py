"""Imported by every Python process that has this folder on its path: notes what runs, by phases.

`TRACED` names a folder. Its file `phase` has the phase that runs and the id of the request that is
followed; at the end of each phase the process writes what it has seen, in a file of its own.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType

_FOLDER = Path(os.environ["TRACED"])
_POLL_S = 0.01


class _Seen:
    """What ran, and who held the request, in this phase."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.holders: set[str] = set()


def _note(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        _now.codes.add(frame.f_code)


def _look(request_id: str) -> None:
    """Note the classes whose instances name the request, or a transfer of it, as their own."""
    ours = [each for each in gc.get_objects() if type(each).__module__.startswith("pdserve.")]
    names = {request_id}
    names |= {each.nonce for each in ours if isinstance(getattr(each, "nonce", None), str)}
    names.discard("")
    for each in ours:
        if not _is_on_its_way(each) and any(
            _names(value, names) for value in gc.get_referents(each)
        ):
            _now.holders.add(f"{type(each).__module__}:{type(each).__qualname__}")


def _is_on_its_way(each: object) -> bool:
    """A value that cannot change is a message, or a part of one."""
    struct = getattr(each, "__struct_config__", None)
    data = getattr(each, "__dataclass_params__", None)
    return isinstance(each, tuple) or any(kind and kind.frozen for kind in (struct, data))


def _names(value: object, names: set[str], depth: int = 0) -> bool:
    if isinstance(value, str):
        return any(name in value for name in names)
    if depth < 2 and isinstance(value, (dict, set, list, tuple)):
        return any(_names(each, names, depth + 1) for each in list(value))
    if depth < 1 and isinstance(value, dict):
        return any(_names(each, names, depth + 1) for each in list(value.values()))
    return False


def _follow() -> None:
    global _now
    phase = ""
    while True:
        time.sleep(_POLL_S)
        now, _, request_id = (_FOLDER / "phase").read_text().partition(" ")
        if now != phase:
            seen, _now = _now, _Seen()
            found = {
                "functions": sorted({f"{c.co_filename}:{c.co_qualname}" for c in seen.codes}),
                "holders": sorted(seen.holders),
            }
            (_FOLDER / f"{os.getpid()}.{phase or 'start'}.json").write_text(json.dumps(found))
            phase = now
        if request_id:
            _look(request_id)


_now = _Seen()
threading.setprofile(_note)
sys.setprofile(_note)
threading.Thread(target=_follow, daemon=True).start()
