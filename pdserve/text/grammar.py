"""Compiles grammars for a model's tokenizer with llguidance.

Servers compile to refuse invalid grammars, workers to know which tokens may follow. Both have the
same tokenizer, limits and version, so they accept the same grammars. Knows neither requests nor
logits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pdserve.errors import BadRequestError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from pdserve.text.load import Text

_log = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES: Final = 1 << 18
MAX_RULES: Final = 1000
"""Limit for the rules of a Lark grammar, one per line, because long chains of them are costly."""
_MAX_MESSAGE_CHARS: Final = 400
_OPTION: Final = "Enable 'coerce_one_of' option to approximate oneOf with anyOf"
_STACK_BYTES: Final = 256 << 20
_JOIN_S: Final = 1.0
_LINGER_S: Final = 1.0
# Defaults are 2,000 items, 250,000 states and 1,000,000 of fuel: the first refuses objects of some
# hundred optional properties, the second allows a grammar half a gigabyte, the third a second.
_LIMITS: Final = LLParserLimits(
    max_items_in_row=50_000,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    initial_lexer_fuel=300_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """A model's tokenizer as llguidance needs it. Thread-safe.

    Creating it takes up to a second (for a vocabulary of 131,072).

    Raises:
        ConfigError: The tokenizer has no token that ends an output, or llguidance cannot use it.
    """

    def __init__(self, text: Text) -> None:
        tokenizer = text.tokenizer
        eos_token_ids = [
            token_id
            for token_id in text.defaults.eos_token_ids
            if 0 <= token_id < tokenizer.vocab_size
        ]
        if not eos_token_ids:
            raise ConfigError(
                "the model names no end-of-sequence token that its tokenizer has, so its output "
                "cannot follow a grammar"
            )
        try:
            self._tokenizer = LLTokenizer(
                tokenizer.as_json(),
                n_vocab=max(text.vocab_size, tokenizer.vocab_size),
                eos_token=eos_token_ids,
            )
        except BaseException as error:  # a panic of Rust, which is no Exception, among them
            raise ConfigError(f"llguidance cannot use the model's tokenizer: {error}") from error

    def compile(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of `grammar`, which allows at least one token.

        Takes milliseconds, or tenths of a second for a grammar at the limits. Call it in
        `DeepThreads`.

        Raises:
            BadRequestError: It is not a valid grammar, or exceeds the limits.
        """
        num_bytes = len(grammar.encode())
        if num_bytes > MAX_GRAMMAR_BYTES:
            raise BadRequestError(
                f"it has {num_bytes} bytes, and at most {MAX_GRAMMAR_BYTES} are accepted"
            )
        if not grammar.lstrip().startswith("{") and grammar.count("\n") > MAX_RULES:
            raise BadRequestError(f"it has more than {MAX_RULES} lines: shorten it")
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        matcher.compute_bitmask()  # what can begin no output is found out by that
        for said in (matcher.get_error(), *matcher.get_grammar_warnings()):
            if said:
                raise BadRequestError(in_short(said))
        return matcher

    def spelled(self, matcher: LLMatcher, token_id: int) -> int:
        """Return the only token that may come next: `token_id`, which llguidance takes for it.

        Where the text that must come spells a special token, it takes that one, which is no text.
        """
        if not self._tokenizer.is_special_token(token_id) or matcher.validate_tokens([token_id]):
            return token_id
        text = matcher.compute_ff_bytes().decode(errors="ignore")
        return self._tokenizer.greedy_tokenize(text)[0]


def in_short(said: str) -> str:
    """Return llguidance's error message without the grammar that it repeats.

    The option that it recommends against overlaps in oneOf is one that pdserve refuses.
    """
    if said.startswith("NoExtension"):
        return "no output of any length satisfies it"
    said = said.replace(_OPTION, "Its schemas must exclude each other; otherwise use anyOf")
    line = " ".join(part for part in said.splitlines() if part and " | " not in part)
    return line.strip(" ^")[:_MAX_MESSAGE_CHARS]


class DeepThreads:
    """Threads with enough stack for llguidance to recurse through the largest grammar.

    It follows rules and references on the stack, so some accepted grammars would overflow the usual
    8 MiB of a thread and end the process. Unused stack takes no memory.

    Args:
        is_last: Whether they run only while no other thread wants the core, if the system allows
            it. They start with a task and end a second after the last one: a process that is
            killed is not gone before each of its threads has had a core once more.
    """

    _starting = threading.Lock()
    """The stack's size is the process's."""

    def __init__(self, name: str, *, num_threads: int, is_last: bool = False) -> None:
        self._name = name
        self._num_threads = num_threads
        self._is_last = is_last
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        if not is_last:
            for _ in range(num_threads):
                self._start()

    def submit(self, work: Callable[[], None]) -> None:
        """Submit a task; with one thread, tasks run in order."""
        self._work.put(work)
        with self._lock:
            if len(self._threads) < self._num_threads:
                self._start()

    def close(self) -> None:
        """End the threads after all submitted tasks. May be called twice."""
        for _ in range(self._num_threads):
            self._work.put(None)

    def join(self) -> None:
        """Wait a second for the threads to end, once closed.

        An interpreter that exits while llguidance computes in one of them crashes.
        """
        deadline_s = time.monotonic() + _JOIN_S
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _start(self) -> None:
        thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._threads.append(thread)
        with self._starting:
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next task; None if the thread is to end."""
        while True:
            with contextlib.suppress(Empty):
                return self._work.get(timeout=_LINGER_S if self._is_last else None)
            with self._lock:
                if self._work.empty():
                    self._threads.remove(threading.current_thread())
                    return None

    def _run(self) -> None:
        if self._is_last and sys.platform == "linux":
            # A thread that is only nice keeps its core for some ms when another one wakes.
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
        while (work := self._next()) is not None:
            try:
                work()
            except BaseException:  # noqa: BLE001 (the top of a thread: other grammars go on)
                _log.exception("a grammar's thread failed")
