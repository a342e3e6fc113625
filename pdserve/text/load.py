"""Everything about text that belongs to one model, read once."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import llguidance
import msgspec

from pdserve.errors import ConfigError
from pdserve.text.answer.style import AnswerStyle, style_of
from pdserve.text.chat import ChatTemplate
from pdserve.text.generation import GenerationDefaults, load_generation_defaults
from pdserve.text.pooling import PoolingStyle, load_pooling
from pdserve.text.tokenizer import Tokenizer, read_json, read_template

if TYPE_CHECKING:
    from pdserve.config.schema import ModelConfig


@dataclass(frozen=True, slots=True)
class Text:
    """A model's text side.

    Attributes:
        vocab_size: Number of ids that the model accepts: every prompt token id is below it.
        pooling: How a text becomes a vector.
        chat_template: None if the model has none.
        tool_template: Another template for chats that offer tools, if there is one.
        answers: How it writes reasoning and tool calls.
        digest: Equal if the same request becomes the same tokens, under the same rules, and its
            tokens become the same answer.
        not_applied: Fields of its `generation_config.json` that ask for what is not done here.
    """

    tokenizer: Tokenizer
    defaults: GenerationDefaults
    vocab_size: int
    chat_template: ChatTemplate | None = None
    pooling: PoolingStyle = field(default_factory=PoolingStyle)
    tool_template: ChatTemplate | None = None
    answers: AnswerStyle = field(default_factory=AnswerStyle)
    digest: str = ""
    not_applied: tuple[str, ...] = ()


def load_text(model: ModelConfig) -> Text:
    """Read a model's tokenizer, chat template and generation defaults.

    Raises:
        ConfigError: A directory or file is missing or malformed.
    """
    directory = Path(model.model)
    if not directory.is_dir():
        raise ConfigError(f"the model {model.model!r} is not a directory", param="model")
    tokenizer = Tokenizer.from_directory(Path(model.tokenizer) if model.tokenizer else directory)
    source, tool_source = tokenizer.chat_template, tokenizer.tool_template
    if model.chat_template:
        source, tool_source = read_template(Path(model.chat_template)), None
    vocab_size = read_json(directory / "config.json").get("vocab_size")
    defaults, not_applied = load_generation_defaults(
        directory, model.generation_config, tokenizer.eos_token_id
    )
    return Text(
        tokenizer=tokenizer,
        defaults=defaults,
        vocab_size=vocab_size if isinstance(vocab_size, int) else tokenizer.vocab_size,
        chat_template=ChatTemplate(source, tokenizer.special_tokens) if source else None,
        pooling=load_pooling(directory),
        tool_template=ChatTemplate(tool_source, tokenizer.special_tokens) if tool_source else None,
        answers=style_of(model, tokenizer, tool_source or source or ""),
        digest=_digest(tokenizer, defaults, (source, tool_source), model),
        not_applied=not_applied,
    )


def _digest(
    tokenizer: Tokenizer,
    defaults: GenerationDefaults,
    templates: tuple[str | None, ...],
    model: ModelConfig,
) -> str:
    """See `Text.digest`; one release of llguidance compiles grammars alike."""
    parsers = (model.tool_call_parser, model.reasoning_parser)
    said = (tokenizer.as_json(), defaults, templates, parsers, llguidance.__version__)
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()[:32]
