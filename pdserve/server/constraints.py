"""Turns a request's output constraint into a grammar, validated before it runs.

`sampling` finds constraints in the fields. Each becomes a grammar in llguidance's syntax, made and
compiled in separate threads in bounded time, so that one that cannot be compiled is a 400 that
names the field, and delays no other request. Knows no engine.
"""

from __future__ import annotations

import asyncio
import functools
import json
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Final

import llguidance
import msgspec
from llguidance.gbnf_to_lark import is_lark_syntax

from pdserve.errors import BadRequestError, ConfigError, OverloadedError, PdserveError
from pdserve.text.grammar import DeepThreads, GrammarCompiler, in_short
from pdserve.text.schemas import with_bounded_spaces
from pdserve.wire.sampling import Grammar

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.server.sampling import AnswerReading, Wanted
    from pdserve.text.load import Text

MAX_GBNF_CHARS: Final = 1 << 15
"""It is translated to Lark in Python."""
TIMEOUT_S: Final = 0.9
"""Of one check, so that its answer is there within a second."""
_NUM_THREADS: Final = 2
_MAX_WAITING: Final = 64
_NUM_REMEMBERED: Final = 256
_MAX_REMEMBERED_BYTES: Final = 1 << 14
"""Of a constraint: what is longer is made anew for each request."""


class _Made(msgspec.Struct, frozen=True):
    """Result of making a constraint's grammar.

    Attributes:
        text: The grammar in llguidance's syntax.
        objection: Reason why it does not compile; empty if it does, None if not tried here.
    """

    text: str
    objection: str | None


class GrammarChecks:
    """Makes grammars from clients' constraints, and refuses those that do not compile.

    Args:
        text: The model's text side.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._compiler: Future[GrammarCompiler] = Future()
        self._known: OrderedDict[bytes, _Made] = OrderedDict()
        self._num_waiting = 0
        self._threads = DeepThreads("grammar-checks", num_threads=_NUM_THREADS)
        self._threads.submit(self._make_compiler)

    async def grammar_of(
        self, wanted: Wanted, reading: AnswerReading | None = None, *, is_checked: bool
    ) -> Grammar:
        """Return the grammar for a request's output.

        Args:
            wanted: Its constraint, from `constraint_in`.
            reading: For a chat, the requirements of tools and reasoning.
            is_checked: Whether another engine has compiled it.

        Raises:
            BadRequestError: It cannot be compiled.
            OverloadedError: Other requests' grammars take too long.
        """
        tools_grammar = reading.tools_grammar if reading is not None else None
        if reading is not None and tools_grammar is None:
            wanted = msgspec.structs.replace(wanted, before=reading.thought_before)
        made = await self._made(wanted, is_checked=is_checked)
        if made.objection:
            raise BadRequestError(f"{wanted.param}: {made.objection}", param=wanted.param)
        thought_end = reading.thought_end if reading is not None else None
        return Grammar(text=made.text, starts_after=None if tools_grammar else thought_end)

    async def _made(self, wanted: Wanted, *, is_checked: bool) -> _Made:
        """Return the result for a constraint; immediately, if it came before."""
        key = _key_of(wanted)
        made = None if key is None else self._known.get(key)
        if made is None or (made.objection is None and not is_checked):
            if not is_checked and not self._compiler.done():  # the engine has just begun
                await asyncio.wait([asyncio.wrap_future(self._compiler)])
            make = functools.partial(self._make, wanted, is_checked=is_checked)
            made = await self._in_thread(make, wanted.param)
            if key is not None:
                self._known[key] = made
                if len(self._known) > _NUM_REMEMBERED:
                    self._known.popitem(last=False)
        return made

    async def _in_thread(self, make: Callable[[], _Made], param: str) -> _Made:
        if self._num_waiting >= _MAX_WAITING:
            raise OverloadedError(
                f"{self._num_waiting} requests are waiting for their grammars to be compiled: try "
                "again later"
            )
        made: Future[_Made] = Future()
        self._num_waiting += 1
        self._threads.submit(functools.partial(_fulfil, made, make))
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await asyncio.wrap_future(made)
        except TimeoutError:
            if made.cancel():
                raise OverloadedError(
                    "the grammars of other requests take too long to compile: try again later"
                ) from None
            if made.done():  # in time perhaps, but this loop was held up
                return made.result()
            raise BadRequestError(
                f"{param} takes more than {TIMEOUT_S:g} s to compile: simplify it",
                param=param,
            ) from None
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Accept no more work; running work finishes on its own."""
        self._threads.close()

    def _make(self, wanted: Wanted, *, is_checked: bool) -> _Made:
        """Make a grammar, and compile it if no other engine has. In one of the threads."""
        text, objection = text_of(wanted), None
        if not is_checked:
            try:
                self._compiler.result().compile(text)
                objection = ""
            except (BadRequestError, ConfigError) as error:
                objection = error.message
        return _Made(text, objection)

    def _make_compiler(self) -> None:
        try:
            self._compiler.set_result(GrammarCompiler(self._text))
        except ConfigError as error:
            self._compiler.set_exception(error)


def text_of(wanted: Wanted) -> str:
    """Return a constraint as llguidance's text. The same for the same request, on any engine.

    Raises:
        BadRequestError: Its kind is unknown.
    """
    text = _answer_text(wanted)
    if wanted.before is None:
        return text
    answer: list[dict[str, Any]] = [{"lark_grammar": text}]
    if text.lstrip().startswith("{"):
        answer = msgspec.json.decode(text)["grammars"]
    first, *others = answer
    whole = [{"lark_grammar": wanted.before}, {**first, "name": "answer"}, *others]
    return msgspec.json.encode({"grammars": whole}).decode()


def _answer_text(wanted: Wanted) -> str:
    value = wanted.value
    match wanted.kind:
        case "json":
            grammar = {"grammars": [{"json_schema": _schema(wanted)}]}
            return msgspec.json.encode(grammar).decode()
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(value)
        case "choice":
            if not value:
                raise BadRequestError(
                    f"{wanted.param} has no choices: give at least one", param=wanted.param
                )
            return "start: " + " | ".join(map(json.dumps, value))
        case _:
            return _lark(wanted)


def _schema(wanted: Wanted) -> dict[str, Any] | bool:
    schema = wanted.value
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema)
        except (msgspec.DecodeError, RecursionError) as error:
            raise BadRequestError(
                f"{wanted.param}: the schema is not valid JSON: {error}", param=wanted.param
            ) from error
    if schema is True:
        schema = {}
    if schema is False:
        return schema
    if not isinstance(schema, dict):
        raise BadRequestError(
            f"{wanted.param}: a JSON schema must be an object, not {type(schema).__name__}",
            param=wanted.param,
        )
    return with_bounded_spaces(schema, **wanted.options)


def _lark(wanted: Wanted) -> str:
    text: str = wanted.value
    if is_lark_syntax(text):
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise BadRequestError(
            f"{wanted.param}: a grammar in EBNF may have at most {MAX_GBNF_CHARS} characters, not "
            f"{len(text)}: write it in Lark's syntax",
            param=wanted.param,
        )
    try:
        return llguidance.grammar_from("grammar", text)
    except ValueError as error:
        raise BadRequestError(
            f"{wanted.param}: {in_short(str(error))}", param=wanted.param
        ) from error


def _key_of(wanted: Wanted) -> bytes | None:
    """Return the cache key of a constraint; None if it is not cached."""
    try:
        key = msgspec.json.encode(wanted)
    except RecursionError:
        return None
    return key if len(key) <= _MAX_REMEMBERED_BYTES else None


def _fulfil(made: Future[_Made], make: Callable[[], _Made]) -> None:
    if not made.set_running_or_notify_cancel():
        return
    try:
        made.set_result(make())
    except PdserveError as error:
        made.set_exception(error)
