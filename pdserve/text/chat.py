"""Renders chat messages to one prompt with the model's Jinja template.

The template comes with the model and is not trusted: it runs in Jinja's sandbox. The environment is
the one that Hugging Face's templates expect. Does not know tokens.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import BadRequestError, ConfigError
from pdserve.text.messages import MessageReader, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from jinja2.parser import Parser

_END_MARK = "PDSERVE_END_OF_FINAL_MESSAGE "
"""Appended to a message that stays open. Its space shows whether a template strips spaces."""


class _TemplateRefusalError(Exception):
    """The template refused the messages."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusalError(message)


def _in_utc(form: str, now_s: float) -> str:
    """`strftime`, whatever the host's time zone is: `%s` is the C library's, which asks for it."""
    form = re.sub("%[%s]", lambda part: str(int(now_s)) if part[0] == "%s" else part[0], form)
    return datetime.fromtimestamp(now_s, UTC).strftime(form)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja source.
        special_tokens: `bos_token`, `eos_token` and so on, as the template names them.

    Raises:
        ConfigError: The source is not a Jinja template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        # The prefill and the decode engine must render the same, so nothing is drawn at random.
        del environment.filters["random"], environment.globals["lipsum"]
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid Jinja: line {error.lineno}: {error.message}"
            ) from error
        self._special_tokens = dict(special_tokens)
        self._reader = MessageReader(source)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        now_s: float,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt.

        Args:
            messages: OpenAI's messages: `role`, `content` as a string or a list of text parts, and
                the assistant's calls and reasoning.
            now_s: Unix time for templates that print the date. The same on every engine that
                renders a request, and shown in UTC: hosts may be in different time zones.
            tools: OpenAI's tools, unchanged.
            add_generation_prompt: Whether the prompt ends at the start of the assistant's message.
            continue_final_message: Whether it ends with the content of the last message, as in
                transformers; then there must be one.
            variables: Additional variables for the template (`chat_template_kwargs`).

        Raises:
            BadRequestError: A message is malformed, or the template refuses them.
        """
        plain = self._reader.read(messages)
        if continue_final_message and plain:
            plain[-1]["content"] += _END_MARK
        names = {
            **self._special_tokens,
            "tools": list(tools) or None,
            "documents": None,
            **(variables or {}),
            "messages": plain,
            "add_generation_prompt": add_generation_prompt and not continue_final_message,
            "strftime_now": lambda form: _in_utc(form, now_s),
        }
        try:
            prompt = self._template.render(names)
        except _TemplateRefusalError as error:
            raise BadRequestError(str(error), param="messages") from error
        except (
            jinja2.TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            OSError,  # a date that the C library cannot have
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            raise BadRequestError(
                f"the model's chat template cannot render these messages: {error}",
                param="messages",
            ) from error
        return _left_open(prompt) if continue_final_message else prompt


def _left_open(prompt: str) -> str:
    """Cut a prompt off at the end of its last message's content.

    Raises:
        BadRequestError: The template leaves it out.
    """
    end = prompt.rfind(_END_MARK.rstrip())
    if end < 0:
        raise BadRequestError(
            "continue_final_message cannot be used, because the model's chat template leaves the "
            "last message out",
            param="continue_final_message",
        )
    # Where it cuts spaces off it would have cut off those of the message, too.
    is_kept = prompt.startswith(_END_MARK, end)
    return prompt[:end] if is_kept else prompt[:end].rstrip()
