"""Maps device types to kernel backends, with fallback to the reference per operation."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, cast

import torch

from pdserve.config.numerics import NumericsMode
from pdserve.errors import ConfigError
from pdserve.kernels.backend import (
    REFERENCE,
    KernelBackend,
    KernelsUnavailableError,
    NotTakenError,
)

_log = logging.getLogger(__name__)

BACKENDS: Mapping[str, str] = {
    "cpu": "pdserve.kernels.cpu.backend",
    "cuda": "pdserve.kernels.cuda.backend",
}
"""Device type -> the module whose ``load`` makes its backend. Others use the reference."""

FAST_BACKENDS: Mapping[str, str] = {"cuda": "pdserve.kernels.fast.backend"}
"""The same for numerics `FAST`. Others have none."""

_NOT_IMPLEMENTATIONS = frozenset(
    {"name", "description", "arch", "sources", "compiler", "keeps_fp8", "sampling"}
)
"""Fields that are not operations, and `sampling`, which has operations of its own."""

_NEED_NO_TWIN = frozenset({"mlp", "attention", "sum_ranks"})
"""Entries that a backend may lack without a report: the reference's halves of a layer run a
backend's own operations in turn, and CPU ranks add in shared memory."""

_chosen: dict[tuple[torch.device, NumericsMode], KernelBackend] = {}


def _no_progress(_: str) -> None:
    pass


def kernels_on(
    device: torch.device,
    progress: Callable[[str], None] = _no_progress,
    numerics: NumericsMode = NumericsMode.EXACT,
) -> KernelBackend:
    """Return this process's backend for ``device``, which is chosen at the first call.

    Args:
        progress: Receives a message about each step that takes seconds.
        numerics: The numerics, which decide what results may depend on.

    Raises:
        ConfigError: Devices of this type have no backend for ``numerics``.
    """
    is_fast = numerics is NumericsMode.FAST
    if is_fast and device.type not in FAST_BACKENDS:
        raise ConfigError(
            f"--numerics is 'fast', which needs a CUDA device, and this one is '{device.type}': "
            "use --numerics exact",
            param="numerics",
        )
    of = device, numerics
    if of not in _chosen:
        _chosen[of] = choose(device, FAST_BACKENDS if is_fast else BACKENDS, progress)
    return _chosen[of]


def choose(
    device: torch.device,
    backends: Mapping[str, str],
    progress: Callable[[str], None] = _no_progress,
) -> KernelBackend:
    """Return the backend of ``backends`` for ``device``, complete.

    The log reports once what the reference runs: everything if the backend cannot be used on this
    machine; operations that it lacks; and operations that do not support a shape or dtype, at their
    first call.
    """
    try:
        return completed(load(device, backends, progress))
    except KernelsUnavailableError as error:
        _log.warning(
            "%s kernels unavailable, using the slower torch reference: %s",
            device.type.upper(),
            error,
        )
        return REFERENCE


def load(
    device: torch.device,
    backends: Mapping[str, str] = BACKENDS,
    progress: Callable[[str], None] = _no_progress,
) -> KernelBackend:
    """Return the backend for ``device`` from its module.

    Raises:
        KernelsUnavailableError: It cannot be used on this machine.
    """
    module = backends.get(device.type)
    if module is None:
        return REFERENCE
    return cast(KernelBackend, importlib.import_module(module).load(device, progress))


def completed(backend: KernelBackend) -> KernelBackend:
    """Return ``backend`` with the reference for calls that it does not take; log what it lacks."""
    if backend is REFERENCE:
        return backend
    twins: dict[str, Any] = {}
    missing = []
    for field in fields(backend):
        if field.name in _NOT_IMPLEMENTATIONS:
            continue
        twin, reference = getattr(backend, field.name), getattr(REFERENCE, field.name)
        if twin is not reference:
            twins[field.name] = _or_reference(field.name, twin, reference)
        elif field.name not in _NEED_NO_TWIN:
            missing.append(field.name)
    if missing:
        _log.warning(
            "%s kernels have no %s: the slower torch reference runs instead",
            backend.name.upper(),
            ", ".join(missing),
        )
    return replace(backend, **twins)


def _or_reference(
    name: str, twin: Callable[..., Any], reference: Callable[..., Any]
) -> Callable[..., Any]:
    logged: set[str] = set()

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return twin(*args, **kwargs)
        except NotTakenError as error:
            reason = str(error)
        if reason not in logged:
            logged.add(reason)
            _log.warning("%s runs as the slower torch reference: %s", name, reason)
        return reference(*args, **kwargs)

    return run
