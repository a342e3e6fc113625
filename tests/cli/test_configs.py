from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from pdserve.cli import make_parser, settings_of
from pdserve.commands.catalogue import COMMANDS
from pdserve.commands.up_plan import arguments_of, command_of
from pdserve.config.http import ProxyConfig, ServerConfig
from pdserve.config.load import Source, build
from pdserve.config.schema import EngineConfig
from pdserve.config.up import ROLES_OF_UP, UpConfig
from tests.cli.process import ROOT

FILES = sorted((ROOT / "configs").glob("*.yaml"))
ROOTS = {"engine": EngineConfig, "server": ServerConfig, "proxy": ProxyConfig, "up": UpConfig}


def test_there_are_deployments() -> None:
    assert {"tiny-cpu", "prefill", "decode", "proxy", "serve"} <= {file.stem for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_deployment_is_what_the_command_in_its_header_takes(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    lines = [line.lstrip("# ") for line in file.read_text().splitlines() if line.startswith("#")]
    (line,) = (line for line in lines if line.startswith("pdserve "))
    given = vars(make_parser().parse_args(shlex.split(line)[1:]))
    assert given["config"] == str(file.relative_to(ROOT))

    name = given.pop("command")
    command = next(each for each in COMMANDS if each.name == name)
    table = command.table()
    resolved = settings_of(table, given, {})
    assert any(item.source is Source.FILE for item in resolved.values())
    for root, struct in ROOTS.items():
        if any(s.path.startswith(f"{root}.") and not s.hidden for s in table.settings) and (
            command.name != "up" or root == "up"
        ):
            build(root, struct, table, resolved)
    if command.name == "up":
        for role in ROLES_OF_UP:
            name = command_of(role)
            words = [name, *arguments_of(role, resolved)]
            child = next(each for each in COMMANDS if each.name == name)
            settings_of(child.table(), _flags(words), {})


def _flags(words: list[str]) -> dict[str, object]:
    given = vars(make_parser().parse_args(words))
    del given["command"]
    return given
