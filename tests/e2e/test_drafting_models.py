"""Decode engines that draft by a model, or by a head: the answers of an engine that does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.e2e.conftest import pd_deployment
from tests.e2e.streams import PROMPTS
from tests.e2e.test_equality import complete_all
from tests.tiny_models import VOCAB_SIZE, write_tokenizer
from tests.worker.draft_models import write_eagle, write_pair

if TYPE_CHECKING:
    from pathlib import Path

    from tests.e2e.deployment import Deployment

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(400)]


def drafting(deployment: Deployment, name: str, speculative: dict[str, object]) -> None:
    """Start a decode engine like the one that is there, but for its drafts."""
    deployment.start(
        name,
        *deployment.processes["decode"].arguments,
        env={"PDSERVE_SPECULATIVE_CONFIG": json.dumps(speculative)},
    )
    deployment.wait(name)


def test_what_is_prefilled_elsewhere_is_drafted_for_and_comes_out_the_same(tmp_path: Path) -> None:
    shape = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 1024}
    target, draft = write_pair(tmp_path, num_layers=8, **shape)
    write_eagle(tmp_path / "head", "eagle3", **shape)
    write_tokenizer(target, VOCAB_SIZE)
    ways: dict[str, dict[str, object]] = {
        "by a model": {"method": "draft_model", "model": str(draft)},
        "by a head": {"method": "eagle3", "model": str(tmp_path / "head")},
    }
    flags = ["--dtype", "float32"]
    (tmp_path / "logs").mkdir()
    with pd_deployment(tmp_path / "logs", target, *flags, with_serve=True) as deployment:
        for name, speculative in ways.items():
            drafting(deployment, name, {**speculative, "num_speculative_tokens": 5})
        deployment.wait_routable(1, 1 + len(ways))
        for fields in (
            {"ignore_eos": True},
            {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.4},
            {"temperature": 0.6, "seed": 6, "top_p": 0.9, "min_tokens": 5},
        ):
            expected = complete_all(deployment.url("serve"), PROMPTS, **fields)
            assert complete_all(deployment.url("proxy"), PROMPTS, **fields) == expected
        for name in ways:
            stats = deployment.info(name)["stats"]
            print(name, stats["num_draft_tokens"], stats["accepted_by_position"])
            assert stats["num_draft_tokens"] > 0
        deployment.wait_nothing_held("prefill", "decode", *ways, timeout_s=30.0)
