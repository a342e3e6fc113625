from __future__ import annotations

import argparse
import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

import pdserve as package
from pdserve.cli import WITHOUT_FLAG, make_parser, normalise, settings_of
from pdserve.commands import engine
from pdserve.commands.catalogue import COMMANDS, Command
from pdserve.commands.model_directory import model_directory
from pdserve.commands.running import run_until_signalled
from pdserve.config.load import Source
from pdserve.errors import ConfigError
from tests.cli.process import ROOT, environment, pdserve, pdserve_here
from tests.python import run_python

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.slow

HEAVY = {"torch", "aiohttp", "zmq", "numpy", "transformers", "tokenizers", "nixl", "yaml"}
by_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)


def test_help_costs_next_to_nothing() -> None:
    def cpu_s(run: Callable[[], object]) -> float:
        """Processor time of a child, which other processes on the machine hardly change."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run()
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def help_() -> None:
        assert pdserve("--help").returncode == 0

    pairs = [
        (cpu_s(help_), cpu_s(lambda: run_python("-c", "import asyncio, msgspec"))) for _ in range(3)
    ]
    taken, of_next_to_nothing = map(min, zip(*pairs, strict=True))
    assert taken < 4 * of_next_to_nothing


def test_no_heavy_package_is_imported_before_the_arguments_are_right() -> None:
    probe = (
        "import sys\n"
        "from pdserve.cli import main\n"
        "try:\n"
        "    main(['up', '--help'])\n"
        "except SystemExit:\n"
        "    pass\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    done = run_python("-c", probe, cwd=ROOT)
    assert HEAVY.isdisjoint(done.stdout.splitlines()[-1].split())


def test_version_is_printed() -> None:
    done = pdserve("--version")
    assert (done.returncode, done.stdout) == (0, f"pdserve {package.__version__}\n")


@by_command
def test_every_flag_is_in_its_commands_help(command: Command) -> None:
    text = pdserve_here(*command.name.split(), "--help").stdout
    table = command.table()
    shown = [
        s.flag for s in table.settings if not s.hidden and s.flag not in (*WITHOUT_FLAG, "model")
    ]
    shown += [s.flag for s in table.shorthands if not s.hidden]
    assert [flag for flag in shown if f"--{flag}" not in text] == []
    assert "==SUPPRESS==" not in text


@by_command
def test_every_flag_in_the_help_belongs_to_a_setting(command: Command) -> None:
    parser: argparse.ArgumentParser = make_parser()
    for word in command.name.split():
        parser = parser._subparsers._group_actions[0].choices[word]  # type: ignore[union-attr,index,call-overload]
    parser.parse_args([])  # it has no flag before
    flags = {
        option.removeprefix("--")
        for option in parser._option_string_actions
        if option.startswith("--")
    }
    table = command.table()
    known = {s.flag for s in table.settings} | {s.flag for s in table.shorthands}
    known |= {f"no-{s.flag}" for s in table.settings if s.kind is bool}
    known |= {f"no-{s.flag}" for s in table.shorthands if s.is_switch}
    assert flags - known == {"help", "config"}


def test_a_flag_whose_name_says_no_has_no_second_no() -> None:
    done = pdserve_here("bench", "serve", "--help")
    assert "--no-oversample " in done.stdout
    assert "--no-no-" not in done.stdout
    given = make_parser().parse_args(["bench", "serve"])
    assert "no-oversample" not in vars(given)
    given = make_parser().parse_args(["bench", "serve", "--no-oversample"])
    assert vars(given)["no-oversample"] is True


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bogus"],
        ["prefill"],
        ["prefill", "m", "--port", "abc"],
        ["prefill", "m", "--max-num-seqs", "1.5"],
        ["serve", "m", "--scheduling-policy", "random"],
        ["proxy", "surplus"],
        ["serve", "m", "--prefill-context-parallel-size", "2"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_code_2(arguments: list[str]) -> None:
    done = pdserve_here(*arguments)
    assert done.returncode == 2
    assert "usage: pdserve" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_flag_names_the_nearest() -> None:
    done = pdserve_here("prefill", "m", "--max-modellen", "3")
    assert done.returncode == 2
    assert "did you mean --max-model-len?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--quantization", "awq"), "vLLM's --quantization is not supported: config.json says how"),
        (("-q", "awq"), "vLLM's --quantization is not supported"),
        (("--quantisation", "awq"), "did you mean --quantization? vLLM's --quantization is not"),
        (
            ("--no-enable-lora",),
            "vLLM's --enable-lora is not supported: there are no LoRA adapters",
        ),
        (("--data_parallel_rank", "1"), "start several behind `pdserve proxy`"),
        (("--kv-cache-dtype", "fp8"), "'fp8' is not supported, only auto: KV has the dtype"),
        (("--some-flag-of-next-year",), "nothing here has a name like it"),
        (("--queue-size", "3"), "--queue-size is a flag of `pdserve proxy`"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_flag_that_is_not_here_says_why(arguments: tuple[str, ...], words: str) -> None:
    done = pdserve_here("serve", "m", *arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_command_of_vllm_that_is_not_here_says_what_to_do() -> None:
    done = pdserve_here("run-batch", "-i", "x")
    assert done.returncode == 2
    assert "vLLM's `run-batch` is not supported: requests come over HTTP" in done.stderr


def test_what_changes_nothing_is_said_and_not_passed_over_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "run_serve", lambda *_: 0)
    config = tmp_path / "engine.yaml"
    config.write_text("swap-space: 4\nuvicorn-log-level: info\n")
    done = pdserve_here(
        "serve", "m", "--async-scheduling", "--config", str(config),
        VLLM_USE_V1="1", VLLM_ATTENTION_BACKEND="FLASH_ATTN",
    )  # fmt: skip
    lines = [line for line in done.stderr.splitlines() if "changes nothing" in line]
    assert [line.partition("Z ")[2].partition(" changes")[0] for line in lines] == [
        "WARNING pdserve.start --async-scheduling",
        "WARNING pdserve.start swap-space in engine.yaml",
        "WARNING pdserve.start uvicorn-log-level in engine.yaml",
        "WARNING pdserve.start VLLM_USE_V1",
    ]
    assert "VLLM_ATTENTION_BACKEND is not read: pdserve chooses the kernels" in done.stderr


def test_the_table_of_vllms_names_is_printed_by_words_of_a_row() -> None:
    done = pdserve_here("vllm-flags", "kv_connector", "nixl")
    assert done.returncode == 0
    assert "VLLM_NIXL" not in done.stdout
    done = pdserve_here("vllm-flags", "NIXL")
    assert "  NixlConnector" in done.stdout
    assert "-> --kv-transfer-config.host" in done.stdout
    assert "same: 0.9 by default" in pdserve_here("vllm-flags", "--gpu-memory-utilization").stdout
    assert pdserve_here("vllm-flags", "no such word").returncode == 1
    whole = pdserve_here("vllm-flags").stdout
    assert len(whole.splitlines()) > 450


def _refused(*arguments: str, **variables: str) -> str:
    done = pdserve_here(*arguments, **variables)
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("command", ["up", "prefill", "decode", "serve"])
def test_a_model_path_that_does_not_exist_is_named(command: str, tmp_path: Path) -> None:
    assert f"MODEL is {tmp_path}/none, which is not a directory" in _refused(
        command, f"{tmp_path}/none"
    )


@pytest.mark.parametrize(
    "command", ["serve", "up", "proxy --port 0 --policy prefix_sticky --tokenizer"]
)
def test_a_path_that_the_system_refuses_is_named_in_a_line(command: str) -> None:
    *_, line = _refused(*command.split(), "a" * 300).splitlines()
    assert "a" * 300 in line
    assert "cannot be used: File name too long" in line


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("~nobody-has-this-name/model", "which is not a directory"),
        ("org/a--b", "HFValidationError"),
    ],
)
def test_a_name_that_cannot_be_a_model_is_refused(name: str, said: str) -> None:
    message = _refused("serve", name)
    assert f"MODEL is {name}" in message
    assert said in message


def test_a_model_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    message = _refused("serve", f"{tmp_path}/model.safetensors")
    assert "a file: name the directory" in message


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    assert "has no config.json" in _refused("serve", str(tmp_path))


def test_a_name_the_hub_does_not_give_is_refused(tmp_path: Path) -> None:
    message = _refused("serve", "nobody/nothing", HF_HOME=str(tmp_path))
    assert "nor a model that the hub gives" in message


def test_a_failure_of_the_hub_without_words_is_told_by_its_name(monkeypatch) -> None:
    def download(*_: object, local_files_only: bool = False, **__: object) -> str:
        raise LocalEntryNotFoundError("none") if local_files_only else TimeoutError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="TimeoutError"):
        model_directory("nobody/nothing")


def test_an_impossible_setting_names_its_flag_and_the_remedy() -> None:
    assert "--block-size is 17: use 8, 16, 32, 64 or 128" in _refused(
        "serve", "boxed", "--block-size", "17"
    )


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("-pp", "--pipeline-parallel-size is 6, but the model has only 4 layers"),
        ("-tp", "--tensor-parallel-size is 6, but the model has only 4 attention heads"),
    ],
)
def test_ranks_without_a_part_of_the_model_are_refused_before_any_starts(
    flag: str, said: str
) -> None:
    assert said in _refused("serve", "boxed", "--port", "0", flag, "6")


def test_an_unknown_key_of_the_file_names_the_nearest_flag(tmp_path: Path) -> None:
    (tmp_path / "proxy.yaml").write_text("prefil: http://127.0.0.1:8100")
    message = _refused("proxy", "--config", f"{tmp_path}/proxy.yaml")
    assert "prefil in" in message
    assert "did you mean prefill?" in message


def test_a_port_in_use_names_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert f"--port is {port}, where another program listens on 127.0.0.1:{port}" in _refused(
            "proxy", "--port", str(port)
        )


def test_up_names_the_flag_of_a_port_in_use_before_it_starts_anything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        message = _refused("up", str(tmp_path), "--decode-port", str(port))
    assert f"--decode-port is {port}, where another program listens" in message


def test_up_refuses_two_processes_on_one_port(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    message = _refused("up", str(tmp_path), "--prefill-port", "8199", "--prefill-replicas", "2",
                       "--decode-port", "8200")  # fmt: skip
    assert "--decode-port 8200 is already the port of prefill1" in message


def test_a_misspelt_variable_is_reported() -> None:
    given = {"PDSERVE_PROT": "3", "PDSERVE_MAX_MODL_LEN": "9"}
    done = pdserve_here("proxy", "--port", "70000", **given)
    for name, like in (("PROT", "PORT"), ("MAX_MODL_LEN", "MAX_MODEL_LEN")):
        said = (
            f" WARNING pdserve.start PDSERVE_{name} is not a setting: did you mean PDSERVE_{like}?"
        )
        assert said in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["server", "boxed"], "no command 'server': did you mean serve? There are: "),
        (["prefil"], "did you mean prefill?"),
        (["bench", "swep"], "no command 'bench swep': did you mean bench sweep? There are: bench "),
        (["xyzzy"], "no command 'xyzzy'. There are: bench, decode, "),
    ],
)
def test_a_misspelt_command_names_the_nearest(arguments: list[str], hint: str) -> None:
    done = pdserve_here(*arguments)
    assert done.returncode == 2
    assert hint in done.stderr


def test_interrupting_a_command_is_code_130() -> None:
    probe = (
        "import os, signal, sys, pdserve.cli as cli\n"
        # Where the tests run in the background of a shell, it is ignored from the start.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "cli.resolve = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(cli.main(['doctor']))"
    )
    process = subprocess.Popen([sys.executable, "-c", probe], cwd=ROOT, env=environment())
    assert process.wait(10) == 130


def test_interrupting_a_command_that_is_being_imported_is_one_line() -> None:
    probe = (
        "import sys, pdserve.__main__ as entry\n"
        "class Interrupted:\n"
        "    def find_spec(name, *_):\n"
        "        if name == 'pdserve.cli':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupted)\n"
        "sys.exit(entry.main())"
    )
    command = [sys.executable, "-c", probe]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (130, "pdserve: interrupted\n")


@pytest.mark.parametrize(
    ("word", "written"),
    [
        ("--max_model_len", "--max-model-len"),
        ("--max_model_len=a_b", "--max-model-len=a_b"),
        ("--kv_transfer_config.kv_connector", "--kv-transfer-config.kv-connector"),
        ("a_b", "a_b"),
    ],
)
def test_underscores_in_flags_are_dashes(word: str, written: str) -> None:
    assert normalise([word]) == [written]


def test_what_follows_two_dashes_stays_as_it_is() -> None:
    assert normalise(["--a_b", "--", "--a_b"]) == ["--a-b", "--", "--a_b"]


def _parsed(*argv: str, **environ: str) -> dict[str, object]:
    given = vars(make_parser().parse_args(normalise(argv)))
    name = given.pop("command")
    command = next(each for each in COMMANDS if each.name == name)
    resolved = settings_of(command.table(), given, environ)
    return {
        flag: item.value for flag, item in resolved.items() if item.source is not Source.DEFAULT
    }


def test_flags_become_values_of_their_settings() -> None:
    assert _parsed(
        "serve", "boxed", "--max_model_len", "2k", "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes=1GiB", "--api-key", "a", "b", "--api-key", "c",
        "--kv-transfer-config.kv_connector", "memory", "--max-num-seqs", "4",
    ) == {
        "model": "boxed",
        "max-model-len": 2000,
        "enable-prefix-caching": False,
        "kv-cache-memory-bytes": 1 << 30,
        "api-key": ("a", "b", "c"),
        "kv-transfer-config.kv-connector": "memory",
        "max-num-seqs": 4,
    }  # fmt: skip


def test_a_flag_of_one_role_is_that_roles_alone() -> None:
    prefill = '{"kv-transfer-config": {"lease_s": 9}}'
    assert _parsed("up", "--decode.max_num_seqs", "4", "--prefill", prefill) == {
        "decode.max-num-seqs": 4,
        "prefill.kv-transfer-config.lease-s": 9.0,
    }  # fmt: skip


def test_parallel_sizes_have_short_names_as_in_vllm() -> None:
    assert _parsed("serve", "m", "-tp", "2", "-pp", "3", "-dp", "4") == {
        "model": "m",
        "tensor-parallel-size": 2,
        "pipeline-parallel-size": 3,
        "data-parallel-size": 4,
    }


@pytest.mark.parametrize("words", [("3,4,5",), ("3", "4", "5"), ("[3, 4, 5]",)])
def test_layers_of_stages_are_numbers_in_any_spelling_of_a_list(words: tuple[str, ...]) -> None:
    parsed = _parsed("serve", "m", "-pp", "3", "--pipeline-layers", *words)
    assert parsed["pipeline-layers"] == (3, 4, 5)


def test_a_name_of_the_environment_is_read() -> None:
    assert _parsed("serve", PDSERVE_MODEL="boxed", PDSERVE_KV_TRANSFER_CONFIG='{"lease_s": 9}') == {
        "model": "boxed",
        "kv-transfer-config.lease-s": 9.0,
    }


@pytest.mark.parametrize(("is_service", "code"), [(True, 0), (False, 130)])
def test_what_is_cut_short_does_not_end_as_a_service_that_is_stopped(
    is_service: bool, code: int
) -> None:
    async def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(60.0)
        return 7

    assert run_until_signalled(work(), is_service=is_service) == code
