"""What `deploy/` starts can be started so: flags, variables, ports and times agree with pdserve.

Whether images can be built and units are good, `docs/deploy.md` says how to try.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdserve.cli import COMMANDS, make_parser, normalise, settings_of
from pdserve.config.http import ProxyConfig
from pdserve.config.load import unknown_variables
from tests.cli.process import ROOT

DEPLOY = ROOT / "deploy"
DEFAULT_OF = re.compile(r"\$\{\w+:-([^}]*)\}")
PROBE = re.compile(r"urlopen\('http://127\.0\.0\.1:(\d+)/readyz', timeout=2\)")
MARGIN_S = 5.0
NEEDED_S = ProxyConfig().drain_delay_s + ProxyConfig().shutdown_timeout_s + MARGIN_S


def compose(name: str) -> dict[str, Any]:
    """A compose file, with the default of each variable."""
    return yaml.safe_load(DEFAULT_OF.sub(r"\1", (DEPLOY / name).read_text()))


def unit(path: Path) -> dict[str, list[str]]:
    """The values of each key of a unit, of all sections together."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        key, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(key, []).append(value)
    return found


SERVICES = compose("compose.yaml")["services"]
UNITS = {path.name: unit(path) for path in sorted(DEPLOY.glob("systemd/*.service"))}
QUADLETS = {path.name: unit(path) for path in sorted(DEPLOY.glob("quadlet/*.container"))}
PORTS = {"proxy": "8000", "prefill": "8100", "decode": "8200", "kv-server": "8300"}
STARTED = [
    *(service["command"] for service in SERVICES.values()),
    *(shlex.split(each["ExecStart"][0])[1:] for each in UNITS.values()),
    *(shlex.split(each["Exec"][0]) for each in QUADLETS.values()),
]


@pytest.fixture(scope="module")
def parser() -> Any:
    return make_parser()


@pytest.mark.parametrize("words", STARTED, ids=lambda words: words[0])
def test_each_command_line_can_be_parsed_and_its_ports_agree(parser, words):
    role = words[0]
    instance = [word.replace("%i", PORTS[role]) for word in words]
    given = vars(parser.parse_args(normalise(instance)))
    given.pop("command")
    if config := given.pop("config", None):
        given["config"] = str(ROOT / "configs" / Path(config).name)
    [command] = [each for each in COMMANDS if each.name == role]
    values = settings_of(command.table(), given, {})
    assert str(values["port"].value) == PORTS[role]
    if role in ("prefill", "decode"):
        assert values["proxy"].value == (f"http://127.0.0.1:{PORTS['proxy']}",)


def test_every_variable_that_is_set_is_a_setting():
    told = [line for each in UNITS.values() for line in each["Environment"]]
    told += [line for each in QUADLETS.values() for line in each["Environment"]]
    variables = dict(word.split("=", 1) for line in told for word in line.split())
    for service in SERVICES.values():
        variables |= service["environment"]
    containerfile = (DEPLOY / "Containerfile").read_text()
    variables |= dict(re.findall(r"(PDSERVE_\w+)=(\S+)", containerfile))
    assert {"PDSERVE_SECRET_FILE", "PDSERVE_HOST"} <= set(variables)
    tables = [each.table() for each in COMMANDS]
    assert unknown_variables(tables[0], tables, variables) == []


def test_units_keep_all_caches_where_the_image_does():
    kept = set(re.findall(r"(\w+=/var/cache\S*)", (DEPLOY / "Containerfile").read_text()))
    assert len(kept) == 3
    for each in UNITS.values():
        assert kept <= {word for line in each["Environment"] for word in line.split()}


def test_health_is_asked_where_each_listens():
    for name, service in SERVICES.items():
        if name != "store":
            [port] = PROBE.findall(service["healthcheck"]["test"][-1])
            assert port == PORTS[name]
    for each in QUADLETS.values():
        [port] = PROBE.findall(each["HealthCmd"][0])
        assert port == PORTS[each["Exec"][0].split()[0]]


def test_nobody_is_killed_while_it_drains():
    for service in SERVICES.values():
        assert float(service["stop_grace_period"].removesuffix("s")) >= NEEDED_S
    for each in [*UNITS.values(), *QUADLETS.values()]:
        assert float(each["TimeoutStopSec"][0]) >= NEEDED_S
    for each in QUADLETS.values():
        [waits] = re.findall(r"--stop-timeout=(\d+)", each["PodmanArgs"][0])
        assert NEEDED_S <= float(waits) < float(each["TimeoutStopSec"][0])


def test_the_gpus_are_for_services_that_there_are():
    assert set(compose("compose.cuda.yaml")["services"]) < set(SERVICES)


def test_the_image_is_made_of_what_is_here_and_does_not_run_as_root():
    text = (DEPLOY / "Containerfile").read_text()
    instructions = [line.split() for line in text.splitlines() if re.match(r"[A-Z]+ ", line)]
    copied = [words[1:-1] for words in instructions if words[0] == "COPY"]
    here = [name for names in copied if not names[0].startswith("--") for name in names]
    assert {"pdserve", "connectors", "proxy", "kernels"} < set(here)
    assert [name for name in here if not (ROOT / name).exists()] == []
    assert [words[1] for words in instructions if words[0] == "USER"] == ["pdserve"]
    assert ["ENTRYPOINT", '["pdserve"]'] in instructions
    assert f'"torch=={torch_pin()}"' in text
    [ports] = [words[1:] for words in instructions if words[0] == "EXPOSE"]
    assert ports == [PORTS[role] for role in ("proxy", "prefill", "decode")]


def torch_pin() -> str:
    """The version that the Makefile installs."""
    [pin] = re.findall(r'"torch==([\d.]+)"', (ROOT / "Makefile").read_text())
    return pin
