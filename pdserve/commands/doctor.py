"""`pdserve doctor`: can this machine do the job, and do these engines fit together?

Each check is one function that returns a `Finding`; none changes the machine. The exit code
is 1 if one of them failed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import socket
import sys
import urllib.error
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

import pdserve
from pdserve.commands.exit_codes import EXIT_DONE, EXIT_FAILED, EXIT_PEER
from pdserve.commands.findings import Finding, Grade, RunningEngine, compatible, numerics
from pdserve.commands.running import require_free
from pdserve.commands.tier_checks import findings_of, server
from pdserve.config.checks import is_loopback
from pdserve.config.doctor import DoctorConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.config.tiers import parse_tiers
from pdserve.errors import ConfigError
from pdserve.http.plain_client import fetched, reason_and_remedy
from pdserve.wire.hop import INFO_PATH

_DEFAULT_PORTS: Final = (("proxy", 8000), ("prefill", 8100), ("decode", 8200))
_SMALL_SHM_BYTES: Final = 256 << 20
_POOR_TRANSFER_SHARE: Final = 0.3
_PEER_TIMEOUT_S: Final = 5.0
_PACKAGES: Final = ("torch", "nixl", "aiohttp", "pyzmq", "msgspec", "tokenizers", "safetensors")


def run(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve doctor`."""
    config = build("doctor", DoctorConfig, table, resolved)
    findings: list[Finding] = []
    for finding in _findings(config):
        findings.append(finding)
        if not config.json:
            print(_line(finding), flush=True)
    verdicts = [finding.verdict for finding in findings]
    if config.json:
        print(json.dumps(msgspec.to_builtins({"version": pdserve.__version__, "checks": findings})))
    else:
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict.value}" for verdict in Grade)
        is_next = Grade.FAIL not in verdicts and not config.peer
        print(f"{counts}.{' Next: pdserve up' if is_next else ''}")
    if any(f.check == "peer" and f.verdict is Grade.FAIL for f in findings):
        return EXIT_PEER
    return EXIT_FAILED if Grade.FAIL in verdicts else EXIT_DONE


def _line(finding: Finding) -> str:
    line = f"{finding.verdict.value:<4}  {finding.check:<16}  {finding.text}"
    return f"{line}\n{'':24}-> {finding.remedy}" if finding.remedy else line


def _findings(config: DoctorConfig) -> Iterator[Finding]:
    yield versions()
    yield processor(_cpu_flags())
    yield devices()
    yield compiler()
    yield from fast_numerics()
    yield shared_memory(Path("/dev/shm"))
    if not config.peer:  # with peers they are not expected to be free
        yield from (port(config.host, number, name) for name, number in _DEFAULT_PORTS)
    yield ptrace(Path("/proc/sys/kernel/yama/ptrace_scope"))
    if config.kv_tiers:
        yield from findings_of(parse_tiers(config.kv_tiers), os.environ)
    if config.kv_server:
        yield server(config.kv_server, config.block_size)
    yield transfer()
    yield from ucx()
    yield from peers(config.peer, fetch=_fetch, connect=_connect)


def versions() -> Finding:
    """Are the required packages installed?"""
    found, missing = [f"Python {platform.python_version()}", f"pdserve {pdserve.__version__}"], []
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append(package)
    if missing:
        return Finding(
            "versions",
            Grade.FAIL,
            f"missing: {', '.join(missing)}",
            f"{sys.executable} -m pip install {' '.join(missing)}",
        )
    return Finding("versions", Grade.OK, ", ".join(found))


def processor(flags: frozenset[str]) -> Finding:
    """Does the CPU have the instructions that make a difference?"""
    cores = len(os.sched_getaffinity(0))
    good = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    text = f"{cores} cores for this process, {platform.machine()}; {', '.join(good) or 'no AVX2'}"
    if cores < 2:
        return Finding(
            "cpu",
            Grade.WARN,
            text,
            "prefill and decode share one core and slow each other down: give this process two "
            "cores",
        )
    if platform.machine() == "x86_64" and "avx512_bf16" not in flags:
        text += "; bf16 is computed in fp32, because the CPU has no avx512_bf16"
    return Finding("cpu", Grade.OK, text)


def devices() -> Finding:
    """Which accelerators does torch see?"""
    try:
        import torch
    except ImportError as error:
        return Finding("devices", Grade.FAIL, f"torch cannot be imported: {error}")
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        return Finding("devices", Grade.OK, f"CUDA {torch.version.cuda}: {', '.join(names)}")
    if shutil.which("nvidia-smi") is not None:
        return Finding(
            "devices",
            Grade.WARN,
            f"there is an NVIDIA driver, but torch {torch.__version__} sees no GPU",
            "install the CUDA build of torch, or check `nvidia-smi`",
        )
    return Finding("devices", Grade.OK, "no GPU; models run on the CPU")


def compiler() -> Finding:
    """Can the C++ kernels be built?"""
    try:
        import torch

        from pdserve.kernels.backend import KernelsUnavailableError
        from pdserve.kernels.registry import load
    except ImportError as error:
        return Finding("kernels", Grade.FAIL, f"the kernels cannot be imported: {error}")
    try:
        kernels = load(torch.device("cpu"))
    except KernelsUnavailableError as error:
        return Finding(
            "kernels",
            Grade.WARN,
            str(error).splitlines()[0],
            "models on the CPU run many times slower without them",
        )
    return Finding("kernels", Grade.OK, kernels.description)


def fast_numerics() -> Iterator[Finding]:
    """Which kernels does `--numerics fast` use? Only with a CUDA device."""
    try:
        import torch

        from pdserve.kernels.backend import KernelsUnavailableError
        from pdserve.kernels.registry import FAST_BACKENDS, load
    except ImportError:  # other checks report it
        return
    if not torch.cuda.is_available():
        return
    try:
        kernels = load(torch.device("cuda"), FAST_BACKENDS)
    except KernelsUnavailableError as error:
        yield Finding("fast numerics", Grade.WARN, str(error))
        return
    yield Finding("fast numerics", Grade.OK, kernels.description)


def shared_memory(folder: Path) -> Finding:
    """Is there room for NCCL and Ray? pdserve's own ranks share memfds instead."""
    if not os.access(folder, os.W_OK):
        return Finding(
            "shared memory",
            Grade.WARN,
            f"{folder} is not writable, which NCCL (ranks on GPUs) and Ray need; pdserve does not "
            "need it",
            "mount a tmpfs there",
        )
    free = shutil.disk_usage(folder).free
    text = f"{folder} has {free / 2**20:,.0f} MiB free"
    if free < _SMALL_SHM_BYTES:
        remedy = "in a container: docker run --shm-size=1g, or an emptyDir of medium Memory"
        return Finding("shared memory", Grade.WARN, text, remedy)
    return Finding("shared memory", Grade.OK, text)


def port(host: str, number: int, name: str) -> Finding:
    """Is a default port free?"""
    try:
        require_free(host, number, flag="port")
    except ConfigError:
        return Finding(
            f"port {number}",
            Grade.WARN,
            f"{host}:{number}, the default port of the {name}, is in use",
            f"this is fine if pdserve is already running; `ss -ltnp 'sport = :{number}'` shows "
            "which program uses it",
        )
    return Finding(f"port {number}", Grade.OK, f"free for the {name}")


def ptrace(scope_file: Path) -> Finding:
    """May one process read another's memory, which makes KV transfer on one host cheap?"""
    try:
        scope = int(scope_file.read_text())
    except (OSError, ValueError):
        return Finding("ptrace", Grade.OK, "Yama does not restrict it")
    if scope == 0:
        return Finding("ptrace", Grade.OK, "Yama's ptrace_scope is 0")
    return Finding(
        "ptrace",
        Grade.WARN,
        f"Yama's ptrace_scope is {scope}, so engines may not be allowed to read one another's "
        "memory",
        "if the transfer below is slow, run sysctl kernel.yama.ptrace_scope=0, or docker run "
        "--cap-add=SYS_PTRACE",
    )


def transfer() -> Finding:
    """How fast does NIXL move memory between two processes here?"""
    from pdserve.commands.transfer_probe import NUM_BYTES, ProbeError, measure

    try:
        try:
            rates = measure()
        except ProbeError:
            # On a busy machine UCX may break off the first connection; engines try again, too.
            rates = measure()
    except ProbeError as error:
        return Finding(
            "transfer",
            Grade.FAIL,
            f"NIXL failed twice: {error}",
            "repeat this when the machine is idle; if it still fails, reinstall nixl or use "
            "`pdserve serve`",
        )
    share = rates.transfer / rates.memcpy
    text = (
        f"NIXL over UCX reads {NUM_BYTES >> 20} MiB at {rates.transfer / 1e9:.1f} GB/s; "
        f"memcpy here {rates.memcpy / 1e9:.1f} GB/s ({share:.0%})"
    )
    if share < _POOR_TRANSFER_SHARE:
        return Finding(
            "transfer",
            Grade.WARN,
            text,
            "UCX uses TCP instead of shared memory: run the engines in the same IPC and PID "
            "namespaces, allow them to read one another's memory (see ptrace), and unset UCX_TLS",
        )
    return Finding("transfer", Grade.OK, text)


def ucx() -> Iterator[Finding]:
    """How fast does UCX move messages between two processes here? Only with pdserve[ucx]."""
    if importlib.util.find_spec("ucxx") is None:
        return
    from pdserve.commands.transfer_probe import ProbeError
    from pdserve.commands.ucx_probe import MESSAGE_BYTES, measure

    try:
        rate = measure()
    except ProbeError as error:
        remedy = "pip install 'pdserve[ucx]', or use the connector nixl; check the UCX_* variables"
        yield Finding("ucx", Grade.WARN, f"UCX without NIXL: {error}", remedy)
        return
    found = f"ucxx {importlib.metadata.version('ucxx-cu13')}: messages of {MESSAGE_BYTES >> 20} MiB"
    yield Finding("ucx", Grade.OK, f"{found} at {rate / 1e9:.1f} GB/s between two processes")


def peers(
    urls: Sequence[str],
    *,
    fetch: Callable[[str], Mapping[str, Any]],
    connect: Callable[[str, int], str | None],
) -> Iterator[Finding]:
    """Can the engines at `urls` exchange KV with one another?

    Args:
        fetch: Returns the report of the engine at a URL.
        connect: Tries an address; returns why it cannot be reached, or None.
    """
    hosts = {urlsplit(url).hostname for url in urls}
    reached: list[RunningEngine] = []
    for url in urls:
        try:
            engine = fetch(url)["engine"]
            if engine is None:
                yield Finding(
                    "peer", Grade.WARN, f"{url} is still loading", "repeat this when it is ready"
                )
                continue
            peer = RunningEngine.told(url, engine)
            addresses = [(each["host"], each["port"]) for each in engine["endpoints"]]
        except OSError as error:
            reason, remedy = reason_and_remedy(error, "give the base URL of a running engine")
            yield Finding("peer", Grade.FAIL, f"{url} cannot be reached: {reason}", remedy)
            continue
        except (ValueError, KeyError, TypeError):
            yield Finding(
                "peer",
                Grade.FAIL,
                f"{url} is not a pdserve engine",
                "give the engines' URLs, not the proxy's",
            )
            continue
        yield Finding("peer", Grade.OK, f"{url} is a {peer.role} engine of {_model(peer)}")
        for host, port in addresses[:1]:  # those of further ranks are next to it
            yield kv_address(url, host, port, is_one_host=len(hosts) == 1, connect=connect)
        reached.append(peer)
    for one, other in itertools.pairwise(reached):
        yield compatible(one, other)
        if one.layout_digest == other.layout_digest and (found := numerics(one, other)):
            yield found
    roles = {peer.role for peer in reached}
    if len(reached) > 1 and len(roles) == 1 and roles != {"both"}:
        (role,) = roles
        missing = "decode" if role == "prefill" else "prefill"
        yield Finding(
            "roles",
            Grade.WARN,
            f"all of these are {role} engines",
            f"start pdserve {missing} MODEL",
        )


def kv_address(
    url: str, host: str, port: int, *, is_one_host: bool, connect: Callable[[str, int], str | None]
) -> Finding:
    """Can others reach the address at which an engine exchanges KV?

    Args:
        is_one_host: Whether all of its peers are on its own host.
    """
    text = f"{url} exchanges KV at {host}:{port}"
    remedy = (
        "start it with --kv-transfer-config.host and an address that the other engines can "
        "reach; without it the address follows --host"
    )
    if is_loopback(host) and not is_one_host:
        return Finding(
            "kv address", Grade.FAIL, f"{text}, which only its own host can reach", remedy
        )
    reason = connect(host, port)
    if reason is not None:
        text = f"{text}, which cannot be reached from here: {reason}"
        return Finding(
            "kv address", Grade.WARN, text, f"if the other engines cannot reach it, {remedy}"
        )
    return Finding("kv address", Grade.OK, text)


def _connect(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=_PEER_TIMEOUT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _model(peer: RunningEngine) -> str:
    return f"{Path(peer.layout.get('model', 'an unknown model')).name}, {peer.layout.get('dtype')}"


def _fetch(url: str) -> Mapping[str, Any]:
    try:
        answer = fetched(f"{url.rstrip('/')}{INFO_PATH}", _PEER_TIMEOUT_S)
        content: Mapping[str, Any] = json.loads(answer)
    except urllib.error.HTTPError as error:  # an OSError, but the server was there
        raise ValueError(f"HTTP {error.code}") from None
    return content


def _cpu_flags() -> frozenset[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    found = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return frozenset(found.partition(":")[2].split())
