"""Default sampling parameters from a model's `generation_config.json`.

Reads `generation_config.json` (and the end-of-sequence ids of `config.json`). Does not
know requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from pdserve.errors import ConfigError
from pdserve.text.tokenizer import read_json

if TYPE_CHECKING:
    from pathlib import Path


class GenerationDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of sampling fields, as vLLM reads them from a model.

    Attributes:
        max_new_tokens: Output tokens of a chat that sets no limit; None is the rest of the context.
        eos_token_ids: The model's own end-of-sequence ids, ascending.
    """

    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0)] = 1.0
    max_new_tokens: Annotated[int, Meta(ge=1)] | None = None
    eos_token_ids: tuple[int, ...] = ()


_IDLE: dict[str, object] = {
    "bad_words_ids": [],
    "begin_suppress_tokens": [],
    "constraints": None,
    "do_sample": True,
    "dola_layers": None,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "exponential_decay_length_penalty": None,
    "force_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "guidance_scale": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "penalty_alpha": 0.0,
    "sequence_bias": {},
    "stop_strings": [],
    "suppress_tokens": [],
    "token_healing": False,
    "top_h": None,
    "typical_p": 1.0,
    "watermarking_config": None,
}
"""What else generation_config.json of transformers 4 and 5 may say of sampling, and the value that
asks for nothing."""


def load_generation_defaults(
    directory: Path, source: str, eos_token_id: int | None
) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Read a model's defaults, and the names of fields that ask for what is not done here.

    Args:
        directory: The model's directory.
        source: auto (its generation_config.json), or none or vllm (only the end ids).
        eos_token_id: The tokenizer's end-of-sequence id.

    Raises:
        ConfigError: The file is malformed, or a value has the wrong type or is out of range.
    """
    path = directory / "generation_config.json"
    config = read_json(path)
    eos = {eos_token_id} if eos_token_id is not None else set[int]()
    eos |= _ids(config or read_json(directory / "config.json"), path)
    fields: dict[str, Any] = {"eos_token_ids": tuple(sorted(eos))}
    not_applied: list[str] = []
    if source == "auto":
        not_applied = [name for name, idle in _IDLE.items() if config.get(name) not in (idle, None)]
        for name in GenerationDefaults.__struct_fields__:
            if name != "eos_token_ids" and config.get(name) is not None:
                fields[name] = config[name]
    try:
        return msgspec.convert(fields, GenerationDefaults), tuple(not_applied)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}; correct it, or use --generation-config none"
        ) from error


def _ids(config: dict[str, Any], path: Path) -> set[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise ConfigError(f"{path}: eos_token_id is {value!r}; it must be an id or a list of ids")
    return set(ids)
