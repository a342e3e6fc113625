"""Vectors of prompts: those of transformers' hidden states, however a prompt is cut into steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from pdserve.wire.ids import RequestId
from pdserve.wire.sampling import Pooling
from tests.tiny_models import one_thread, write_tiny_model
from tests.worker.driver import Driver, params

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

PROMPT = [(17 * i + 5) % 300 for i in range(50)]


def pool(driver: Driver, pooling: Pooling, chunk: int) -> NDArray[np.float32]:
    """The vector of the prompt, which comes with its last step and only then."""
    driver.add("r", PROMPT, params(pooling=pooling))
    vectors = []
    while not driver.outputs["r"]:
        output = driver.step({"r": min(chunk, driver.remaining("r"))})
        vectors.append(output.pooled.get(RequestId("r")))
    assert driver.step({"r": 1}).pooled == {}
    driver.drop("r")
    *others, last = vectors
    assert not any(others)
    assert last is not None
    return np.frombuffer(last, "<f4")


@one_thread()
def states_by_transformers(directory: Path) -> NDArray[np.float32]:
    import torch
    from transformers import AutoModel

    model = AutoModel.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([PROMPT])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("chunk", [50, 13])
def test_a_prompts_vector_is_made_of_its_tokens_final_states(
    tmp_path: Path, make_driver: Callable[..., Driver], chunk: int
) -> None:
    directory = write_tiny_model(tmp_path / "model", "qwen3")
    states = states_by_transformers(directory)
    driver = make_driver(directory=directory)
    last, mean = (pool(driver, pooling, chunk) for pooling in (Pooling.LAST, Pooling.MEAN))
    np.testing.assert_allclose(last, states[-1], rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(mean, states.mean(0), rtol=2e-3, atol=2e-4)
    assert not np.allclose(last, mean, rtol=0.1)


def test_a_request_that_begins_again_is_pooled_anew(make_driver: Callable[..., Driver]) -> None:
    driver = make_driver()
    prompt = [token % 200 for token in PROMPT]
    driver.add("r", prompt, params(pooling=Pooling.MEAN))
    driver.step({"r": 20})
    driver.drop("r")
    driver.add("r", prompt, params(pooling=Pooling.MEAN))
    driver.step({"r": 20})
    again = driver.step({"r": 30}).pooled[RequestId("r")]
    driver.add("s", prompt, params(pooling=Pooling.MEAN))
    driver.step({"s": 20})
    assert driver.step({"s": 30}).pooled[RequestId("s")] == again
