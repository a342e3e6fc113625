"""Compiles the C++ kernels of this folder into a shared library, once per machine and version.

The library is in a cache folder, named by a hash of everything that determines it: the sources, the
flags, and the CPU's features (it is built for the CPU that runs it). If several processes start
together, one compiles and the others wait. To build ahead, for an image without a compiler at run
time: ``python -m pdserve.kernels.cpu.build``.

If vectors can multiply bf16 both in pairs (VDPBF16PS) and widened to fp32 (VFMADD231PS), a
measurement chooses the faster on this CPU: pairs on AMD's, fp32 on Sapphire Rapids, where it is
twice as fast. ``PD_CPU_TARGET`` builds for another CPU, by GCC's name of its architecture, so that
a fleet of different CPUs computes the same bits: ``cooperlake`` multiplies pairs, ``x86-64-v4``
(AVX-512) and ``x86-64-v3`` (AVX2) fp32.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pdserve.config.user_cache import user_cache

SOURCE_DIR = Path(__file__).resolve().parent
NATIVE = "-march=native"
_WITHOUT_PAIRS = "-mno-avx512bf16"
_FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=fast", "-fvisibility=default")


class BuildError(Exception):
    """There is no compiler, or it failed; the message says which, with its output."""


class NoCompilerError(BuildError):
    """There is no compiler."""


def library(target: str | None = None, cache_dir: Path | None = None) -> Path:
    """Return the shared library, compiling it if the cache has none.

    Args:
        target: The ``-march=`` flag, or several flags as in a shell; None uses
            ``PD_CPU_TARGET``, or else this CPU.
        cache_dir: Folder for the result; None uses ``pdserve`` in ``$XDG_CACHE_HOME`` or
            ``~/.cache``.

    Raises:
        BuildError: No compiler was found, or compiling failed.
    """
    folder = user_cache() if cache_dir is None else cache_dir
    if folder is None:
        raise BuildError("there is no home folder for the compiled kernels: set XDG_CACHE_HOME")
    target = target or _own_target()
    path = folder / f"kernels-{_fingerprint(target)}.so"
    if path.exists():
        return path
    compiler = _compiler()
    if compiler is None:
        raise NoCompilerError("there is no C++ compiler: install g++, or set CXX")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():
                _compile(compiler, target, path)
    except OSError as error:
        raise BuildError(
            f"cannot make {path}: {error}; set XDG_CACHE_HOME to a folder that can be written and "
            "is not mounted noexec"
        ) from error
    return path


def is_built() -> bool:
    """Whether `library` will find its result in the cache instead of compiling for seconds."""
    folder = user_cache()
    return folder is not None and (folder / f"kernels-{_fingerprint(_own_target())}.so").exists()


def _own_target() -> str:
    name = os.environ.get("PD_CPU_TARGET")
    return f"-march={name}" if name else NATIVE


def _compiler() -> str | None:
    names = [os.environ.get("CXX", ""), "g++", "c++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _fingerprint(target: str) -> str:
    digest = hashlib.sha256()
    for part in (target, *_FLAGS, platform.machine(), _cpu_features()):
        digest.update(part.encode() + b"\0")
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _cpu_features() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as info:
        return next((line for line in info if line.startswith(("flags", "Features"))), "")
    return ""


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    # The lock file stays: removing it would let two waiters lock two different files.
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, target: str, path: Path) -> None:
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        scratch, flags = Path(folder), [*_FLAGS, *shlex.split(target)]
        if target == NATIVE and _is_faster_without_pairs(compiler, scratch):
            flags.append(_WITHOUT_PAIRS)
        objects = [scratch / f"{source.stem}.o" for source in sources]
        commands = [
            [compiler, *flags, "-c", str(source), "-o", str(compiled)]
            for source, compiled in zip(sources, objects, strict=True)
        ]
        _run_all(commands, scratch)
        linked = scratch / path.name
        link = [compiler, "-shared", "-pthread", *map(str, objects), "-o", str(linked)]
        _run_all([link], scratch)
        linked.replace(path)


def _is_faster_without_pairs(compiler: str, scratch: Path) -> bool:
    """Whether this CPU has vector products of bf16 pairs, but is faster without them."""
    features = _cpu_features().split()
    if "avx512_bf16" not in features or "amx_bf16" in features:
        return False
    peaks = scratch / "peaks.so"
    source = str(SOURCE_DIR / "peaks.cpp")
    _run_all([[compiler, *_FLAGS, NATIVE, "-shared", source, "-o", str(peaks)]], scratch)
    return bool(ctypes.CDLL(str(peaks)).pd_fma_is_much_faster())


def _run_all(commands: list[list[str]], scratch: Path) -> None:
    """Run the commands in parallel; their temporary files need no other folder than `scratch`."""
    environ = {**os.environ, "TMPDIR": str(scratch)}
    processes = [
        subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    outputs = [process.communicate()[0] for process in processes]
    for command, process, output in zip(commands, processes, outputs, strict=True):
        if process.returncode != 0:
            errors = [line for line in output.splitlines() if "error" in line] or [output.strip()]
            told = f"{errors[0]}\n{' '.join(command)} failed:\n{output[-4000:]}"
            raise BuildError(told.lstrip())  # a compiler that was killed has said nothing


if __name__ == "__main__":
    print(library())
