"""Building, loading and calling the native kernels: what is not about numbers."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from pdserve.errors import InternalError
from pdserve.kernels.backend import KernelsUnavailableError
from pdserve.kernels.cases.attention import attention_inputs, kv_cache, rope_table
from pdserve.kernels.cpu import build
from pdserve.kernels.cpu.backend import load
from pdserve.parallel.mesh import MeshShape
from tests.kernels.builds import CPU, INSTEAD, KERNELS, ZEN_3, needs_native
from tests.python import run_python
from tests.ranks import run_ranks

if TYPE_CHECKING:
    from pdserve.parallel.group import World

pytestmark = pytest.mark.slow


def _python(code: str, **environment: str) -> str:
    run = run_python("-c", code, env={**os.environ, **environment})
    return run.stdout + run.stderr


def test_without_a_compiler_the_reference_runs_and_one_line_says_so(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from pdserve.kernels.registry import kernels_on\n"
        "x = torch.ones(2, 4)\n"
        "kernels = kernels_on(x.device)\n"
        "assert kernels is kernels_on(torch.device('cpu'))\n"
        "assert torch.equal(kernels.rms_norm(x, x[0], 0.0), x)\n"
        "layer = kernels.linear_of(torch.eye(4), torch.ones(4), out_dtype=torch.float32)\n"
        "assert torch.equal(layer(x), x + 1)\n"
        "assert torch.equal(layer(x, torch.empty(2, 4)), x + 1)\n"
        "assert torch.equal(layer.unpack(), torch.eye(4))\n"
    )
    said = _python(code, PATH="", CXX="", XDG_CACHE_HOME=str(tmp_path))

    assert said.count("no C++ compiler") == 1


def test_a_failing_compiler_is_a_build_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho in file x\necho error: out of ideas\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    with pytest.raises(build.BuildError, match=r"^error: out of ideas\n.* failed:\nin file x\n"):
        build.library(cache_dir=tmp_path / "cache")


def test_a_compiler_that_fails_in_silence_is_named_in_the_first_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("false")
    assert compiler is not None
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(build.BuildError, match=rf"^{compiler} .* failed:\n"):
        build.library(cache_dir=tmp_path / "cache")


def test_a_library_that_cannot_be_opened_is_named_with_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a folder that is mounted noexec."""
    library = tmp_path / "kernels.so"
    library.write_text("no library")
    monkeypatch.setattr(build, "library", lambda: library)
    monkeypatch.setattr(build, "is_built", lambda: True)
    with pytest.raises(KernelsUnavailableError, match=r"kernels\.so: .*: remove it, or set XDG_"):
        load(torch.device("cpu"), print)


def test_the_compilers_temporary_files_lie_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may have no other folder that can be written."""
    compiler = tmp_path / "telling"
    compiler.write_text("#!/bin/sh\necho files in $TMPDIR\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))

    with pytest.raises(build.BuildError, match=f"files in {tmp_path}/cache/"):
        build.library(cache_dir=tmp_path / "cache")


def test_a_cache_that_cannot_be_written_is_a_build_error_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(build.BuildError, match="set XDG_CACHE_HOME to a folder"):
        build.library(cache_dir=tmp_path / "file" / "cache")


def test_processes_that_start_together_compile_once(tmp_path: Path) -> None:
    compiler = tmp_path / "counting"
    compiler.write_text(
        f"#!/bin/sh\nsleep 0.1\necho run >> {tmp_path}/runs\n"
        'while [ "$1" != -o ]; do shift; done\necho > "$2"\n'
    )
    compiler.chmod(0o755)
    code = "from pdserve.kernels.cpu import build; print(build.library())"
    # For another CPU nothing is measured.
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "XDG_CACHE_HOME": str(tmp_path),
        "PD_CPU_TARGET": "x86-64-v3",
    }
    started = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]

    assert [process.wait(60) for process in started] == [0, 0, 0]
    num_sources = len(list(build.SOURCE_DIR.glob("*.cpp")))
    assert len((tmp_path / "runs").read_text().split()) == num_sources + 1


@needs_native
def test_the_night_can_stand_in_for_every_wide_instruction_that_kernels_use() -> None:
    """It compiles them for a minute; the quick loop at least looks at their names."""
    sources = [
        path.read_text() for path in build.SOURCE_DIR.iterdir() if path.suffix in (".h", ".cpp")
    ]
    used = {name for text in sources for name in re.findall(r"\b_mm512_\w+", text)}
    there = set(re.findall(r"^#define (_mm512_\w+)", INSTEAD.read_text(), re.MULTILINE))
    assert used
    assert used <= there, "tests/kernels/emulated.h lacks some"


def test_the_unit_that_multiplies_bf16_is_the_fastest_of_this_cpus() -> None:
    library = ctypes.CDLL(str(build.library()))
    library.pd_peak_gflops.restype = ctypes.c_double
    by_fma, pairs, tiles = (library.pd_peak_gflops(unit) for unit in range(3))

    assert by_fma > 0
    assert (by_fma, pairs, tiles)[library.pd_bf16_unit()] >= max(by_fma, pairs, tiles) / 1.5


@needs_native
@pytest.mark.parametrize("much_faster", [0, 1])
def test_pairs_of_bf16_are_left_out_where_fp32_is_much_faster(
    much_faster: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "recording"
    compiler.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/runs\nwhile [ "$1" != -o ]; do shift; done\n'
        f'case $2 in */peaks.so) echo "int pd_fma_is_much_faster() {{ return {much_faster}; }}" |\n'
        'gcc -shared -x c - -o "$2" ;; *) echo > "$2" ;; esac\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("PD_CPU_TARGET", raising=False)
    monkeypatch.setattr(build, "_cpu_features", lambda: "flags : avx512f avx512_bf16")

    build.library(cache_dir=tmp_path / "cache")

    compiled = [line for line in (tmp_path / "runs").read_text().splitlines() if " -c " in line]
    assert compiled
    assert all(("-mno-avx512bf16" in line) == bool(much_faster) for line in compiled)


@needs_native
@pytest.mark.skipif("avx2" not in build._cpu_features(), reason="this CPU has no AVX2")
def test_a_product_is_right_if_a_half_of_the_sum_is_a_factor_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers then have both in one register, unless they are told what is read last."""
    header = json.dumps(str(build.SOURCE_DIR / "simd.h"))
    (tmp_path / "turned.cpp").write_text(
        f"#include {header}\n"
        'extern "C" void turned(float* x, const float* by) {\n'
        "    const pd::F16 sum = pd::load(x);\n"
        "    pd::store(x, pd::add_product(sum, by, pd::F16{{sum.v[1], sum.v[0]}}));\n"
        "}\n"
    )
    monkeypatch.setattr(build, "SOURCE_DIR", tmp_path)
    library = ctypes.CDLL(str(build.library(ZEN_3, cache_dir=tmp_path / "cache")))
    x = (ctypes.c_float * 16)(*range(16))
    library.turned(x, ctypes.byref(ctypes.c_float(2.0)))
    assert [*x] == [at + 2 * ((at + 8) % 16) for at in range(16)]


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_unpacking_gives_back_the_weight(dtype: torch.dtype) -> None:
    weight = torch.randn(70, 33).to(dtype)

    assert torch.equal(KERNELS.linear_of(weight).unpack(), weight)


@needs_native
def test_packed_linear_writes_fp32_to_a_given_tensor() -> None:
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    out = torch.empty(3, 40)
    result = KERNELS.linear_of(weight, out_dtype=torch.float32)(x, out)

    assert result is out
    torch.testing.assert_close(out, x.float() @ weight.float().T)


@needs_native
def test_packed_linear_does_not_keep_the_original() -> None:
    weight = torch.randn(64, 64)
    layer = KERNELS.linear_of(weight)
    expected = weight.sum(1)
    weight.zero_()

    torch.testing.assert_close(layer(torch.ones(1, 64))[0], expected)


@pytest.mark.parametrize(
    "x", [torch.ones(2, 3), torch.ones(2, 4).half(), torch.ones(4, 2).T], ids=str
)
def test_packed_linear_refuses_what_it_cannot_multiply(x: torch.Tensor) -> None:
    with pytest.raises(TypeError):
        KERNELS.linear_of(torch.ones(5, 4))(x)


@needs_native
def test_mixed_dtypes_are_refused() -> None:
    with pytest.raises(TypeError):
        KERNELS.rms_norm(torch.ones(2, 4), torch.ones(4).half(), 1e-5)


@needs_native
@pytest.mark.parametrize(("position", "slot"), [(20, 0), (-1, 0), (0, 64)])
def test_positions_and_slots_out_of_range_are_refused(position: int, slot: int) -> None:
    cache = kv_cache(4, 1, 16, 32, dtype=torch.float32, device=CPU)
    before = cache.clone()
    with pytest.raises(InternalError):
        KERNELS.rope_and_cache(
            torch.ones(1, 96),
            torch.tensor([position]),
            rope_table(20, 32, CPU),
            cache,
            torch.tensor([slot]),
            None,
            None,
            1e-5,
        )
    assert torch.equal(cache, before)


@needs_native
@pytest.mark.parametrize("bad_id", [-7, 1000])
def test_a_block_outside_the_cache_is_refused(bad_id: int) -> None:
    inputs = attention_inputs([1], [40], (2, 1), 32, dtype=torch.float32, device=CPU)
    inputs[2][0, 1] = bad_id
    with pytest.raises(InternalError):
        KERNELS.paged_attention(*inputs)


@needs_native
def test_block_tables_that_are_a_view_are_refused() -> None:
    inputs = list(attention_inputs([1, 1], [40, 9], (2, 1), 32, dtype=torch.float32, device=CPU))
    inputs[2] = inputs[2][:, :-1]
    with pytest.raises(TypeError, match="block_tables"):
        KERNELS.paged_attention(*inputs)


@needs_native
def test_a_context_longer_than_the_table_is_refused() -> None:
    inputs = attention_inputs([1], [40], (2, 1), 32, dtype=torch.float32, device=CPU)
    inputs[4][0] = 1000
    with pytest.raises(InternalError):
        KERNELS.paged_attention(*inputs)


@needs_native
def test_garbage_past_the_context_changes_nothing() -> None:
    inputs = attention_inputs([1], [37], (2, 1), 32, dtype=torch.bfloat16, device=CPU)
    expected = KERNELS.paged_attention(*inputs)
    last_block = inputs[2][0, 2]
    inputs[1][last_block, :, :, 37 % 16 :] = float("nan")

    assert torch.equal(KERNELS.paged_attention(*inputs), expected)


@needs_native
def test_python_threads_may_call_at_once() -> None:
    layer = KERNELS.linear_of(torch.randn(512, 256))
    inputs = [torch.randn(40, 256) for _ in range(4)]
    expected = [layer(x) for x in inputs]
    wrong: list[int] = []

    def call(i: int) -> None:
        torch.set_num_threads(2)
        wrong.extend(i for _ in range(50) if not torch.equal(layer(inputs[i]), expected[i]))

    callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@needs_native
def test_idle_threads_use_no_cpu_and_a_forked_child_has_its_own() -> None:
    run_ranks(MeshShape(), _fork_beside_idle_threads)


def _fork_beside_idle_threads(_: World) -> None:
    torch.set_num_threads(2)
    layer, x = KERNELS.linear_of(torch.randn(512, 256)), torch.randn(40, 256)
    expected = layer(x)
    time.sleep(0.05)  # longer than the pool's threads spin
    before = time.process_time()
    time.sleep(0.3)  # in which they use no CPU
    assert time.process_time() - before < 0.01
    child = os.fork()
    if not child:
        same = all(torch.equal(layer(x), expected) for _ in range(20))
        names = [task.read_text() for task in Path("/proc/self/task").glob("*/comm")]
        os._exit(0 if same and "pdserve-kernel\n" in names else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
