"""Writes prompts of an exact number of tokens, for one model and one endpoint.

A prompt is a row of *segments*. A segment's key determines its tokens, so equal keys give equal
tokens at any position: that is how data sets define what prompts share. Completions accept token
ids. Chat accepts only text, which is made of words that are one token each at any position; the
whole prompt is counted after the model's chat template is applied, and a prompt without the exact
count is refused, never sent.

Special tokens are never drawn, because some of them end an answer.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TypeVar

import msgspec

from pdserve.bench.records import Message, Prompt
from pdserve.bench.target import ApiEndpoint
from pdserve.errors import ConfigError
from pdserve.text.chat import ChatTemplate
from pdserve.text.tokenizer import Tokenizer

T = TypeVar("T")

_WORD = re.compile(r" [A-Za-z]{2,}")
_NUM_WORDS = 4096
"""Enough for prompts to differ; checking all of a large vocabulary takes seconds."""
_MIN_WORDS = 16
_MAX_TRIES = 8


class Segment(msgspec.Struct, frozen=True):
    """Some tokens of a prompt.

    Attributes:
        key: Equal keys begin with equal tokens.
        num_tokens: Number of tokens; may be 0.
    """

    key: str
    num_tokens: int


class Vocabulary:
    """The tokens of a model that prompts are made of. Found once, on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def ordinary_ids(self) -> tuple[int, ...]:
        """Every id but the special ones, ascending."""
        tokenizer = self.tokenizer
        return tuple(
            token_id
            for token_id in range(tokenizer.vocab_size)
            if token_id not in tokenizer.special_ids and tokenizer.token(token_id) is not None
        )

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Words that are a single token with a space before them, at any position.

        Raises:
            ConfigError: The tokenizer has hardly any.
        """
        tokenizer = self.tokenizer
        ids = list(self.ordinary_ids)
        random.Random("words").shuffle(ids)
        words: list[str] = []
        for token_id in ids:
            try:
                word = tokenizer.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                continue
            if not _WORD.fullmatch(word):
                continue
            if tokenizer.encode(f"a{word}{word} a", add_special_tokens=False).count(token_id) == 2:
                words.append(word)
                if len(words) == _NUM_WORDS:
                    break
        if len(words) < _MIN_WORDS:
            raise ConfigError(
                "the model's tokenizer has no words of a single token, so no text can have an "
                "exact number of tokens: use --endpoint completions, which accepts token ids",
                param="endpoint",
            )
        return tuple(words)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The model's chat template, if it has one.

        Raises:
            ConfigError: It is not Jinja.
        """
        source = self.tokenizer.chat_template
        return ChatTemplate(source, self.tokenizer.special_tokens) if source else None


class PromptMaker:
    """Makes and counts prompts.

    Args:
        tokenizer: The model's tokenizer; None if unavailable, which only text data sets allow.
        endpoint: Endpoint of the prompts.
        max_model_len: The endpoint's maximum tokens of prompt and output together; None if unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        endpoint: ApiEndpoint,
        max_model_len: int | None = None,
    ) -> None:
        self._vocabulary = None if tokenizer is None else Vocabulary(tokenizer)
        self._seed = 0
        self._num_template_tokens: int | None = None
        self.endpoint = endpoint
        self.max_model_len = max_model_len

    def with_seed(self, seed: int) -> PromptMaker:
        """Return a maker of other prompts; equal seeds make equal prompts."""
        other = copy.copy(self)
        other._seed = seed
        return other

    # ---- prompts that are made up ----------------------------------------------------

    def make(self, segments: Sequence[Segment], *, may_cut_all: bool = False) -> Prompt:
        """Return a prompt whose token count, by the server's count, is the segments' sum.

        For chat the template's own tokens are part of the sum: the last segment is that much
        shorter.

        Args:
            segments: In order.
            may_cut_all: Whether earlier segments may be cut too, from the end, if the last one is
                too short. If not, a prompt's own part is never lost.

        Raises:
            ConfigError: There is no tokenizer, or for chat no exact text of that length.
        """
        if self.endpoint is ApiEndpoint.COMPLETIONS:
            return [token for each in segments for token in self._tokens(each)]
        if self._num_template_tokens is None:
            self._num_template_tokens = self._count_content("")
        text = self._exact_text(
            segments,
            count=self._count_content,
            num_around=self._num_template_tokens,
            may_cut_all=may_cut_all,
        )
        return [{"role": "user", "content": text}]

    def make_turn(self, segments: Sequence[Segment]) -> Prompt:
        """The same for a later turn of a conversation.

        For chat the sum counts only the text, without the template's tokens.
        """
        if self.endpoint is ApiEndpoint.COMPLETIONS:
            return self.make(segments)
        text = self._exact_text(segments, count=self.count_words, num_around=0, may_cut_all=False)
        return [{"role": "user", "content": text}]

    def require_room(self, num_prompt_tokens: int, num_output_tokens: int, flags: str) -> None:
        """Refuse lengths that the endpoint's model cannot take.

        Args:
            num_prompt_tokens: Tokens of the longest prompt.
            num_output_tokens: Tokens of its output.
            flags: Which settings to lower, for the message.

        Raises:
            ConfigError: Together they exceed the model's context.
        """
        if not self.fits(num_prompt_tokens, num_output_tokens):
            raise ConfigError(
                f"{num_prompt_tokens} prompt tokens and {num_output_tokens} output tokens exceed "
                f"the {self.max_model_len} tokens of the endpoint's model: lower {flags}"
            )

    # ---- prompts that are given -------------------------------------------------------

    def for_text(self, text: str) -> Prompt:
        """Return a prompt with this text."""
        if self.endpoint is ApiEndpoint.CHAT:
            return [{"role": "user", "content": text}]
        return text

    def count(self, prompt: Prompt) -> int | None:
        """Return the token count that the server will see; None if unknown.

        Text is counted with the special tokens that completions add; messages with the model's chat
        template.
        """
        if isinstance(prompt, str):
            if self._vocabulary is None:
                return None
            return len(self._vocabulary.tokenizer.encode(prompt))
        if prompt and isinstance(prompt[0], dict):
            messages = [each for each in prompt if isinstance(each, dict)]
            return self._count_messages(messages)
        return len(prompt)

    def count_words(self, text: str) -> int:
        """Return the token count of a text alone, without special tokens.

        Raises:
            ConfigError: There is no tokenizer.
        """
        tokenizer = self._require_vocabulary().tokenizer
        return len(tokenizer.encode(text, add_special_tokens=False))

    def fits(self, num_prompt_tokens: int, num_output_tokens: int) -> bool:
        """Whether both together fit the endpoint's model, as far as is known."""
        return (
            self.max_model_len is None
            or num_prompt_tokens + num_output_tokens <= self.max_model_len
        )

    # ---- tokens and words -------------------------------------------------------------

    def _require_vocabulary(self) -> Vocabulary:
        if self._vocabulary is None:
            raise ConfigError(
                "this data set needs the model's tokenizer, and the endpoint does not say where "
                "it is: name its directory with --tokenizer DIR",
                param="tokenizer",
            )
        return self._vocabulary

    def _draw(self, segment: Segment, choices: Sequence[T]) -> list[T]:
        rng = random.Random(f"{self._seed}/{segment.key}")
        return rng.choices(choices, k=segment.num_tokens)

    def _tokens(self, segment: Segment) -> list[int]:
        return self._draw(segment, self._require_vocabulary().ordinary_ids)

    def _text(self, segment: Segment) -> str:
        return "".join(self._draw(segment, self._require_vocabulary().words))

    def _exact_text(
        self,
        segments: Sequence[Segment],
        *,
        count: Callable[[str], int],
        num_around: int,
        may_cut_all: bool,
    ) -> str:
        """Return text whose `count` is the segments' length minus the tokens around it."""
        total = sum(each.num_tokens for each in segments)
        num_own = total if may_cut_all else segments[-1].num_tokens
        num_cut = num_around
        for _ in range(_MAX_TRIES):
            if num_cut > num_own:
                raise ConfigError(
                    f"no chat prompt can have {total} tokens: the model's template uses "
                    f"{num_around} of them, and only {num_own} are the prompt's own; ask for "
                    "longer prompts, or use --endpoint completions",
                    param="endpoint",
                )
            # Templates trim messages: a space in front would be in some counts and not in others.
            text = "".join(self._text(each) for each in _cut(segments, num_cut)).lstrip()
            num = count(text)
            if num == total:
                return text
            num_cut += num - total
        raise ConfigError(
            f"no chat prompt can have exactly {total} tokens with this tokenizer: use --endpoint "
            "completions, which accepts token ids",
            param="endpoint",
        )

    def _count_content(self, content: str) -> int:
        num = self._count_messages([{"role": "user", "content": content}])
        if num is None:
            raise ConfigError(
                "the model's tokenizer has no chat template, so the tokens of a chat prompt "
                "cannot be counted: use --endpoint completions, which accepts token ids",
                param="endpoint",
            )
        return num

    def _count_messages(self, messages: Sequence[Message]) -> int | None:
        vocabulary = self._vocabulary
        if vocabulary is None or vocabulary.template is None:
            return None
        # The date that some templates print is a constant here: plans do not depend on the day.
        rendered = vocabulary.template.render(messages, now_s=0.0)
        return len(vocabulary.tokenizer.encode(rendered, add_special_tokens=False))


def _cut(segments: Sequence[Segment], num_tokens: int) -> list[Segment]:
    """The segments without their last `num_tokens` tokens; longer by as many if it is negative."""
    result = list(segments)
    for place in reversed(range(len(result))):
        num = min(num_tokens, result[place].num_tokens)
        result[place] = Segment(result[place].key, result[place].num_tokens - num)
        num_tokens -= num
    return result
