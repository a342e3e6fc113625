from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.failures import document as failures
from tests.cli.process import ROOT
from tools import measured_kernels, metric_table, module_list, vllm_names
from tools.goals import PRODUCT

GLOSSARY = ROOT / "docs" / "glossary.md"


@pytest.mark.slow
def test_the_list_of_modules_is_what_their_docstrings_say(this_tree):
    text = module_list.document(this_tree)
    assert "\n| `block_pool.py` | Reference-counted pool of fixed-size KV blocks" in text
    assert module_list.DOCUMENT.read_text() == text, "run: python -m tools.module_list"


def test_the_page_of_vllms_names_is_what_the_command_says():
    assert vllm_names.DOCUMENT.read_text() == vllm_names.document(), (
        "run: python -m tools.vllm_names"
    )


def test_the_table_of_metrics_is_what_its_source_says():
    assert metric_table.DOCUMENT.read_text() == metric_table.document(), (
        "run: python -m tools.metric_table"
    )


def test_the_table_of_measured_kernels_is_what_figures_and_kernels_say():
    assert measured_kernels.DOCUMENT.read_text() == measured_kernels.document(), (
        "run: python -m tools.measured_kernels"
    )


@pytest.mark.slow
def test_every_class_of_the_glossary_exists_and_its_words_are_in_order(this_tree):
    rows = re.findall(r"^\| ([\w -]+) \| (.+) \| (.+) \|$", GLOSSARY.read_text(), re.MULTILINE)
    words = [word for word, _, _ in rows][1:]
    assert len(words) > 40
    assert words == sorted(set(words), key=str.lower)
    named = {name for _, _, cell in rows for name in re.findall(r"`(\w+)`", cell)}
    assert len(named) > 40
    assert named - this_tree.class_names().keys() == set()


def _module(short: str) -> Path:
    """A module or folder, as documents name it: by its path below the tree or below pdserve/."""
    places = [ROOT / f"{top}{short}{end}" for top in ("pdserve/", "") for end in ("", ".py")]
    return next((place for place in places if place.exists()), places[0])


def test_every_file_and_link_that_documents_name_exists():
    named = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        text = page.read_text()
        files = re.findall(rf"`((?:{'|'.join(PRODUCT)}|tests|configs)/[a-z\d_/]+\.\w+)`", text)
        links = re.findall(r"\]\(([\w./-]+)\)", text)
        named += [ROOT / file for file in files]
        named += [_module(short) for short in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text)]
        named += [page.parent / link for link in links]
    assert len(named) > 50
    assert [path for path in named if not path.exists()] == []


def test_the_failure_table_is_what_its_source_says_but_for_what_was_measured():
    text = (ROOT / "docs" / "failures.md").read_text()
    told, _, _ = failures([], "").partition("## Measured")
    assert text.startswith(told), "change tests/chaos/failures.py, which writes docs/failures.md"


def test_the_connector_that_documents_show_is_the_one_that_is_tested():
    text = (ROOT / "docs" / "extending.md").read_text()
    example = (ROOT / "tests" / "connectors" / "example_store.py").read_text()
    assert f"```python\n{example}```" in text, "paste tests/connectors/example_store.py"
