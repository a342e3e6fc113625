"""Computes the tokens that requests' grammars allow next, beside the steps.

    a request joins the batch -> compile (or find compiled), consume its output tokens, mask
    its token is sampled      ->                             consume it,                mask

All of it runs in threads of the pool, which release the interpreter's lock: most masks take some
microseconds, but the work for a grammar is unbounded. A step that needs a mask which is not ready
goes on without that row; no other row waits for it. Where cores are few, slow masks are made by
threads of lower priority than all others.

No thread is used where none is needed, for it would take the interpreter from the step: the first
mask comes with the compiled grammar, and after its last token a request needs no mask. So a
prefill engine, which samples one token, makes none beside its steps.

A request's state depends only on its grammar and its output tokens: it is rebuilt from them after
a handoff or a preemption. Knows neither logits nor rows.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from pdserve.errors import PdserveError
from pdserve.kernels.reference.masks import HEAD, num_words
from pdserve.text.grammar import DeepThreads, in_short

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llguidance import LLMatcher
    from numpy.typing import NDArray
    from torch import Tensor

    from pdserve.text.grammar import GrammarCompiler
    from pdserve.wire.sampling import Grammar

_NUM_THREADS: Final = 4
_NUM_SLOW_THREADS: Final = 2
SLOW_S: Final = 0.002
"""CPU time of masks that is a part of a step's time."""
_MASK_WEIGHT: Final = 0.25
"""Of the last mask in the mean of a grammar's: a vocabulary's first masks take some ms."""
_MAX_COMPILED_BYTES: Final = 256 << 20
"""Of grammars that are kept compiled, the ones used last."""
_COMPILED_BYTES: Final = 128 << 10
_COMPILED_BYTES_PER_BYTE: Final = 96
"""What a compiled grammar takes, for llguidance does not say: objects of 10, 100 and 800 properties
take 153, 472 and 3,417 kB, which are 537, 4,857 and 39,157 bytes of text; others take less."""


_IS_ZERO: Final = (
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little") == 0
)
_BIASES: Final = np.where(_IS_ZERO, np.float32(-np.inf), np.float32(0.0))
"""By byte of a mask: what is added to the logits of its eight tokens. On a CPU a sum takes an
eighth of the time of a masked fill."""


class Allowed(NamedTuple):
    """Tokens that may come next at a position in a grammar.

    Attributes:
        bits: `[vocab_size / 8]` uint8 or longer, the allowed tokens; meaningless if `error`.
        may_end: Whether the output may end here.
        is_over: Whether it must end here.
        forced: Tokens that must come next, if they are wanted, and are found soon.
        error: Reason why no token may come.
        cpu_s: CPU time of this computation.
    """

    bits: NDArray[np.uint8]
    may_end: bool = False
    is_over: bool = False
    forced: Sequence[int] = ()
    error: str = ""
    cpu_s: float = 0.0


@dataclass(eq=False, slots=True)
class CompiledGrammar:
    """A grammar at its beginning, for requests to copy.

    Attributes:
        matcher: Never consumes a token.
        first: Tokens that may come first.
        mask_s: Moving mean of the CPU time of its masks, in seconds.
        lock: For whoever works with a copy, unless masks take long. Copies share a lexer, and
            llguidance keeps the interpreter to itself while one waits for another's mask. Masks
            take long where text is forced, which is worked out without the lexer.
    """

    matcher: LLMatcher
    first: Allowed
    mask_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)


class GrammarPool:
    """Compiled grammars, and the threads that work on them.

    Args:
        load: Makes the compiler: called once, immediately, in one of the threads.
        finds_forced: Whether forced tokens are computed, too.
        max_bytes: Estimated size of the compiled grammars kept; the last one is always kept.
        slow_s: Mean CPU seconds of a grammar's masks above which threads of lower priority
            make them.

    Attributes:
        finds_forced, slow_s: As above.
    """

    def __init__(
        self,
        load: Callable[[], GrammarCompiler],
        *,
        finds_forced: bool = False,
        max_bytes: int = _MAX_COMPILED_BYTES,
        slow_s: float = SLOW_S,
    ) -> None:
        self._load = load
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self.finds_forced = finds_forced
        self._compiler: Future[GrammarCompiler] = Future()
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = DeepThreads("grammars", num_threads=_NUM_THREADS)
        self._slow_threads = DeepThreads(
            "slow grammars", num_threads=_NUM_SLOW_THREADS, is_last=True
        )
        self.slow_s = slow_s
        self._threads.submit(self._make_compiler)

    def submit(self, work: Callable[[], None], *, is_slow: bool = False) -> None:
        """Run `work` in one of the threads."""
        (self._slow_threads if is_slow else self._threads).submit(work)

    def known(self, text: str) -> CompiledGrammar | None:
        """Return a grammar if it is already compiled."""
        with self._lock:
            found = self._compiled.get(text)
            if found is None or not found.done() or found.exception() is not None:
                return None
            self._compiled.move_to_end(text)
        return found.result()

    def compiled(self, text: str) -> CompiledGrammar:
        """Return a compiled grammar. Call it in one of the threads.

        Raises:
            PdserveError: The grammar cannot be used, or no grammar can.
        """
        mine: Future[CompiledGrammar] | None = None
        with self._lock:
            found = self._compiled.get(text)
            if found is None:
                found = self._compiled[text] = mine = Future()
                self._num_bytes += _bytes_of(text)
                while self._num_bytes > self._max_bytes and len(self._compiled) > 1:
                    dropped, _ = self._compiled.popitem(last=False)
                    self._num_bytes -= _bytes_of(dropped)
            else:
                self._compiled.move_to_end(text)
        if mine is not None:
            try:
                matcher = self._compiler.result().compile(text)
                first = self.allowed_by(matcher)
                mine.set_result(CompiledGrammar(matcher, first, first.cpu_s))
            except BaseException as error:  # noqa: BLE001 - who waits for it must hear of it
                mine.set_exception(error)
        return found.result()  # one of the threads is compiling it

    def allowed_by(self, matcher: LLMatcher) -> Allowed:
        """Return the tokens that may come next. Call it in one of the threads."""
        begin_s = time.thread_time()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        cpu_s = time.thread_time() - begin_s
        if matcher.is_error():
            return Allowed(bits[:0], error=in_short(matcher.get_error()), cpu_s=cpu_s)
        is_over = matcher.is_stopped()
        may_end = matcher.is_accepting()
        if not may_end and np.count_nonzero(bits) == 1 and int(bits.max()).bit_count() == 1:
            token_id = 8 * int(bits.argmax()) + int(bits.max()).bit_length() - 1
            spelled = self._compiler.result().spelled(matcher, token_id)
            bits = np.zeros_like(bits)
            bits[spelled // 8] = 1 << spelled % 8
        # Where they take long to find, nobody else has the interpreter as long.
        finds_forced = self.finds_forced and not is_over and cpu_s <= self.slow_s
        forced = matcher.compute_ff_tokens() if finds_forced else []
        forced = forced[: matcher.validate_tokens(forced)]  # see `GrammarCompiler.spelled`
        return Allowed(bits, may_end, is_over, forced, cpu_s=cpu_s)

    def close(self) -> None:
        """End the threads, and wait a second for each kind. May be called twice."""
        self._threads.close()
        self._slow_threads.close()
        self._threads.join()
        self._slow_threads.join()

    def _make_compiler(self) -> None:
        try:
            self._compiler.set_result(self._load())
        except BaseException as error:  # noqa: BLE001 - who waits for it must hear of it
            self._compiler.set_exception(error)


class Constraint:
    """One request's place in its grammar.

    `note` and `is_known` are for the thread that samples. While `is_known` is False, the rest is
    meaningless: a thread of the pool is changing it.

    Args:
        outputs: The request's output tokens so far.
        ends: Tokens that end an output: none of them is text, whatever the tokenizer says.
        device: Where the rows are that it is applied to.

    Attributes:
        words: The allowed tokens, as `reference.masks.mask` takes them; on the host.
        is_over: Whether only the end of the output may follow; all else is forbidden.
        is_rejected: Whether the grammar does not allow the tokens so far.
        error: Reason why no token may follow, if none may.
    """

    def __init__(
        self,
        pool: GrammarPool,
        grammar: Grammar,
        outputs: Sequence[int],
        *,
        vocab_size: int,
        ends: Sequence[int],
        device: torch.device,
    ) -> None:
        self._pool = pool
        self._text = grammar.text
        self._starts_after = grammar.starts_after or ()
        self._ends = [token_id for token_id in ends if 0 <= token_id < vocab_size]
        begin = _end_of_first(outputs, self._starts_after)
        self._has_begun = begin is not None
        self._recent = list(outputs[-len(self._starts_after) :]) if not self._has_begun else []
        self._unseen = [] if begin is None else list(outputs[begin:])
        self._compiled = pool.known(grammar.text)
        self._matcher: LLMatcher | None = None
        self._is_put_off = False
        self._was_waited_for = False
        # Made in a step's inference mode, and written by other threads: as arrays.
        self.words = np.zeros(num_words(vocab_size) - HEAD, dtype=np.int32)
        self._bytes = self.words.view(np.uint8)[: -(-vocab_size // 8)]
        self._vocab_size = vocab_size
        self._biases: NDArray[np.float32] | None = None
        if device.type == "cpu":
            self._biases = np.full((len(self._bytes), 8), _BIASES[0, 0])
        self.is_over = False
        self.is_rejected = False
        self.error = ""
        self._forced: Sequence[int] = ()
        # Held while a thread of the pool is at it; it is not the one that takes it.
        self._busy = threading.Lock()
        if self._compiled is None or self._unseen:
            self._advance()
        else:
            self.error = self._take(self._compiled.first)

    def apply(self, row: Tensor) -> None:
        """Mask the forbidden tokens in `row`, `[vocab_size]` fp32."""
        if self._biases is not None:
            row += torch.from_numpy(self._biases.reshape(-1)[: self._vocab_size])
            return
        allowed = np.unpackbits(self._bytes, count=self._vocab_size, bitorder="little")
        row.masked_fill_(torch.from_numpy(allowed == 0).to(row.device), -torch.inf)

    @property
    def has_begun(self) -> bool:
        """Whether the grammar governs the next token; if not, it is free."""
        return self._has_begun

    def is_known(self, until_s: float) -> bool:
        """Return whether the allowed tokens are known; waits at most once per token.

        Args:
            until_s: End of the wait, in monotonic seconds.
        """
        if self._is_put_off:
            self._advance()
        wait_s = 0.0 if self._was_waited_for else max(0.0, until_s - time.monotonic())
        if self._busy.acquire(timeout=wait_s):
            self._busy.release()
            return True
        self._was_waited_for = True
        return False

    def forced(self) -> list[int]:
        """Return the tokens that must come next, as far as that is known now."""
        is_none = self._is_put_off or not self._has_begun
        if is_none or not self._busy.acquire(blocking=False):
            return []
        self._busy.release()
        return list(self._forced)

    def note(self, token_id: int, *, is_last: bool = False) -> None:
        """Take the sampled token; `is_known` must have been True.

        Args:
            is_last: Whether to compute the next mask only on demand.
        """
        if self._has_begun:
            self._unseen.append(token_id)
            self._is_put_off = is_last
            if not is_last:
                self._advance()
            return
        self._recent = [*self._recent, token_id][-len(self._starts_after) :]
        self._has_begun = tuple(self._recent) == self._starts_after

    def _advance(self) -> None:
        self._busy.acquire()
        self._is_put_off = self._was_waited_for = False
        self._pool.submit(self._work, is_slow=self._is_slow())

    def _is_slow(self) -> bool:
        return self._compiled is not None and self._compiled.mask_s > self._pool.slow_s

    def _work(self) -> None:
        self.error = "the grammar could not be worked out"
        try:
            self.error = self._consume_unseen()
        except PdserveError as error:
            self.error = str(error)
        finally:
            self._busy.release()

    def _consume_unseen(self) -> str:
        """Consume the new tokens and find which may follow; return why none may, or empty."""
        unseen, self._unseen = self._unseen, []
        if self._compiled is None:
            self._compiled = self._pool.compiled(self._text)
        with contextlib.nullcontext() if self._is_slow() else self._compiled.lock:
            if self._matcher is None:
                self._matcher = self._compiled.matcher.deep_copy()
                # What this engine samples is allowed. To consume tokens fails at limits, too.
                self.is_rejected = self._matcher.validate_tokens(unseen) < len(unseen)
            if unseen and not self._matcher.consume_tokens(unseen):
                return in_short(self._matcher.get_error())
            allowed = self._pool.allowed_by(self._matcher)
        self._compiled.mask_s += (allowed.cpu_s - self._compiled.mask_s) * _MASK_WEIGHT
        return self._take(allowed)

    def _take(self, allowed: Allowed) -> str:
        """Store which tokens may come next; return why none may, or empty."""
        if allowed.error:
            return allowed.error
        bits = allowed.bits[: len(self._bytes)]
        self._bytes[: len(bits)] = bits
        self._bytes[-1] &= 255 >> -self._vocab_size % 8
        for token_id in () if allowed.may_end else self._ends:
            self._bytes[token_id // 8] &= ~(1 << token_id % 8) & 255
        if not self._bytes.any():
            return "the tokenizer has no way to write what must come next"
        if self._biases is not None:
            np.take(_BIASES, self._bytes, axis=0, out=self._biases, mode="clip")
        self.is_over, self._forced = allowed.is_over, allowed.forced
        return ""


def _bytes_of(text: str) -> int:
    """Estimate the size of a compiled grammar, in bytes."""
    return _COMPILED_BYTES + _COMPILED_BYTES_PER_BYTE * len(text.encode())


def _end_of_first(tokens: Sequence[int], wanted: Sequence[int]) -> int | None:
    """Return the end of the first `wanted` in `tokens`; None if there is none."""
    num = len(wanted)
    for end in range(num, len(tokens) + 1):
        if tuple(tokens[end - num : end]) == tuple(wanted):
            return end
    return None
