"""vLLM's documented commands, with `pdserve` in place of `vllm`, do what docs/vllm.md says."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

import msgspec
import pytest

from pdserve.commands import bench, engine, proxy
from pdserve.config.bench import ResultConfig, TargetConfig, TrafficConfig
from pdserve.config.datasets import DatasetConfig
from pdserve.config.load import Resolved, Table, build
from tests.cli.process import ROOT, pdserve_here

CLIENT: dict[str, type[msgspec.Struct]] = {
    "target": TargetConfig,
    "traffic": TrafficConfig,
    "dataset": DatasetConfig,
    "result": ResultConfig,
}

ROWS = re.findall(
    r"^\| `((?:[A-Z_\d]+=\S+ )*(?:vllm|pdserve) .+?)` \| (.+) \|$",
    (ROOT / "docs" / "vllm.md").read_text(),
    re.MULTILINE,
)


def typed(command: str, **variables: str) -> tuple[int, str]:
    """Run a command up to where it would serve or ask; return its code and its words."""
    words = shlex.split(command)
    while "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    done = pdserve_here(*words[1:], **variables)
    return done.returncode, f"{done.stdout}{done.stderr}"


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands make their settings and no more; a model is taken as it is written."""

    async def serve(*_: object) -> int:
        return 0

    def run_bench(table: Table, resolved: Mapping[str, Resolved]) -> int:
        for root, struct in CLIENT.items():
            build(root, struct, table, resolved)
        return 0

    monkeypatch.setattr(engine, "model_directory", lambda written: written)
    monkeypatch.setattr(engine, "require_free", lambda *_, **__: None)
    monkeypatch.setattr(engine, "_serve", serve)
    monkeypatch.setattr(proxy, "require_free", lambda *_, **__: None)
    monkeypatch.setattr(proxy, "_serve", serve)
    monkeypatch.setattr(bench, "run_serve", run_bench)


def test_the_page_has_examples_of_each_kind() -> None:
    assert len(ROWS) > 50
    assert {answer.partition(":")[0] for _, answer in ROWS} >= {"works", "not supported"}


@pytest.mark.slow
@pytest.mark.parametrize(("command", "answer"), ROWS, ids=[command[:60] for command, _ in ROWS])
def test_an_example_works_or_ends_with_the_words_beside_it(command: str, answer: str) -> None:
    ours = command.replace("vllm ", "pdserve ", 1)
    code, words = typed(ours)
    match answer:
        case "works":
            assert code == 0, words
        case "works with PDSERVE_SECRET":
            assert code == 3
            assert "there is no secret" in words
            code, words = typed(ours, PDSERVE_SECRET="s")
            assert code == 0, words
        case _:
            assert code in (2, 3)
            assert answer in words.replace("\n", " ")
