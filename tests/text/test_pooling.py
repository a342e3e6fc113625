from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from pdserve.errors import ConfigError
from pdserve.text.pooling import PoolingStyle, load_pooling
from pdserve.wire.sampling import Pooling

if TYPE_CHECKING:
    from pathlib import Path

TRANSFORMER = {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"idx": 2, "path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def write(directory: Path, modules: list[Any], **modes: Any) -> Path:
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return directory


def test_a_model_without_such_files_has_its_last_token(tmp_path: Path):
    assert load_pooling(tmp_path) == PoolingStyle(Pooling.LAST, is_normalized=True)


@pytest.mark.parametrize(
    ("modes", "pooling"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST),
        ({"pooling_mode_lasttoken": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
    ],
)
def test_the_files_say_how_and_whether_vectors_are_scaled(tmp_path: Path, modes, pooling):
    directory = write(tmp_path, [TRANSFORMER, POOLING], **modes)
    assert load_pooling(directory) == PoolingStyle(pooling, is_normalized=False)
    (directory / "modules.json").write_text(json.dumps([TRANSFORMER, POOLING, NORMALIZE]))
    assert load_pooling(directory) == PoolingStyle(pooling, is_normalized=True)


@pytest.mark.parametrize(
    ("modules", "modes", "word"),
    [
        ([TRANSFORMER, POOLING], {"pooling_mode_cls_token": True}, "cls_token"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True},
            "lasttoken and mean_tokens",
        ),
        ([TRANSFORMER, POOLING], {}, "pooling"),
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_lasttoken": True}, "Dense"),
    ],
)
def test_another_way_is_refused_by_its_name(tmp_path: Path, modules, modes, word):
    style = load_pooling(write(tmp_path, modules, **modes))
    assert style.pooling is None
    assert word in style.refusal


@pytest.mark.parametrize("text", ["{}", "[3]", "["])
def test_a_malformed_file_is_said_at_the_start(tmp_path: Path, text: str):
    (tmp_path / "modules.json").write_text(text)
    with pytest.raises(ConfigError, match=r"modules\.json"):
        load_pooling(tmp_path)
