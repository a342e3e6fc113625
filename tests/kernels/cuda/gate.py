"""The compile gate: what launches become on a GPU, found on a machine that has none.

A test names a function that makes calls on ``meta`` tensors. A process of its own, where kernels
are not interpreted, compiles each kernel that they launch for sm_90, or for the target that a call
assumes, with the types, alignments, constants and tuning of the launch itself, and reads the
machine code back with the tools that come with Triton. What has more shared memory, or tensor
memory, than a program may have there ends the gate: no launch would tell before there is a device.
`benchmarks/gpu` has the times; what is here cannot depend on a device.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tests.python import run_python

if TYPE_CHECKING:
    from pdserve.kernels.cuda.target import LaunchTarget

_SHARED_BYTES = 227 << 10
_TENSOR_MEMORY_COLUMNS = 512
_REGISTERS = 65536
_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}
Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Compiled:
    """One kernel as a device runs it.

    Attributes:
        kernel: Its name.
        registers: Of a thread.
        spilled: Bytes of stack and local memory of a thread.
        shared: Bytes of shared memory of a program.
        warps: Of a program.
        opcodes: Count of each instruction, with its modifiers, as in ``HMMA.16816.F32.BF16``.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    warps: int
    opcodes: dict[str, int]

    def count(self, opcode: str) -> int:
        """Return how many instructions start with ``opcode``."""
        return sum(n for name, n in self.opcodes.items() if name.startswith(opcode))

    def copies_of_16_bytes(self) -> int:
        """Return how many copies from global to shared memory are 128 bits wide."""
        return sum(
            n for name, n in self.opcodes.items() if name.startswith("LDGSTS") and ".128" in name
        )

    def programs_per_sm(self) -> int:
        """Return how many programs registers and shared memory let run on one SM at once."""
        per_warp = -(-self.registers * 32 // 256) * 256
        by_registers = _REGISTERS // (per_warp * self.warps)
        return min(by_registers, _SHARED_BYTES // (self.shared + 1024), 64 // self.warps, 32)


def compiled(calls: str, *names: str) -> dict[str, list[Compiled]]:
    """Compile what some calls launch.

    Args:
        calls: ``module:function``; the function returns named calls on meta tensors.
        names: Of the calls; all if there are none.

    Returns:
        For each call the kernels that it launched, in order.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    run = run_python(
        *("-m", "tests.kernels.cuda.gate", calls, *names),
        env=environment | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        cwd=root,
        timeout_s=300,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert found
    assert not names or found.keys() == set(names)
    assert all(found.values()), "a call that launches nothing proves nothing"
    return {name: [Compiled(**one) for one in launches] for name, launches in found.items()}


def assuming_each(targets: Iterable[LaunchTarget], calls: Calls) -> Calls:
    """Return calls for each of some targets; a name begins with the architecture's."""
    from pdserve.kernels.cuda.target import assuming

    def on(target: LaunchTarget, call: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with assuming(target):
                call()

        return run

    return {
        f"{target.architecture.name} {name}": on(target, call)
        for target in targets
        for name, call in calls.items()
    }


def _compile_all(calls: Calls) -> dict[str, list[Compiled]]:
    """Run each call with launches that compile instead."""
    from triton.runtime import JITFunction

    launched: list[Compiled] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append(_compile(kernel, args, options))

    JITFunction.run = record
    found = {}
    for name, call in calls.items():
        call()
        found[name] = list(launched)
        launched.clear()
    return found


def _compile(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from pdserve.kernels.cuda.target import target

    signature, constants, attributes = {}, {}, {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | options
    for parameter in kernel.params:
        value = values.get(parameter.name, parameter.default)
        specialized = not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else _type(value, specialized)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor) or (
            isinstance(value, int) and specialized and value % 16 == 0
        ):
            attributes[parameter.num,] = [["tt.divisibility", 16]]
    chosen = {k: v for k, v in options.items() if k not in signature}
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constants, attributes)
    there = target().architecture
    built = triton.compile(source, target=GPUTarget("cuda", there.value, 32), options=chosen)
    told = f"{kernel.__name__} {options} on {there}"
    assert built.metadata.shared <= there.shared_bytes, told
    assert (built.metadata.tmem_size or 0) <= _TENSOR_MEMORY_COLUMNS, told
    return _read(kernel.__name__, built, built.metadata.num_warps)


def _type(value: Any, specialized: bool) -> str:
    """Return the type that Triton's launcher gives to an argument."""
    from triton.experimental.gluon.nvidia import hopper
    from triton.tools.tensor_descriptor import TensorDescriptor

    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
    if isinstance(value, hopper.TensorDescriptor):
        tile = f"{_TYPES[value.base.dtype][1:]}{list(value.block_shape)}"
        return f"tensordesc<{tile},{value.layout!r}>"
    if value is None or (specialized and type(value) is int and value == 1):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    assert isinstance(value, float), f"{value!r} is no argument of a kernel"
    return "fp32"


def _read(name: str, built: Any, warps: int) -> Compiled:
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        code = _output(tools / "nvdisasm", "-c", file.name)
    size = {key: int(n) for key, n in re.findall(r"\b(REG|STACK|LOCAL|SHARED):(\d+)", usage)}
    opcodes = Counter(
        re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.a-z]+)", code)
    )
    assert size["REG"] > 0, usage
    assert opcodes["EXIT"] > 0, "the machine code was not read"
    return Compiled(
        name,
        registers=size["REG"],
        spilled=size["STACK"] + size["LOCAL"],
        shared=built.metadata.shared,
        warps=warps,
        opcodes=dict(opcodes),
    )


def _output(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    module, function = sys.argv[1].split(":")
    calls = getattr(importlib.import_module(module), function)()
    results = _compile_all({name: calls[name] for name in sys.argv[2:] or calls})
    print(json.dumps({name: [asdict(one) for one in them] for name, them in results.items()}))
