"""What a grammar allows: as brute force says, and the same however a request got to its tokens."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import sys
import threading
import time
from hashlib import sha256
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pdserve.config.boxed import boxed_model_dir
from pdserve.config.schema import ModelConfig
from pdserve.errors import ConfigError
from pdserve.text.grammar import DeepThreads, GrammarCompiler
from pdserve.text.load import load_text
from pdserve.wire.sampling import Grammar
from pdserve.worker.grammar import Constraint, GrammarPool
from pdserve.worker.logit_rules import Hindrance, LogitRules
from pdserve.worker.sampler import Sampler
from tests.schemas.drawn import draw_schemas
from tests.waiting import wait_until
from tests.worker.driver import params
from tests.worker.held_pool import HeldPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pdserve.text.load import Text

CPU = torch.device("cpu")
EOS = 1
VOCAB_SIZE = 2048
"""Of the boxed model."""
GRAMMARS = {
    "object": json.dumps({"grammars": [{"json_schema": {"type": "object"}}]}),
    "schema": json.dumps(
        {
            "grammars": [
                {
                    "json_schema": {
                        "type": "object",
                        "properties": {
                            "name": {"type": "string", "maxLength": 12},
                            "age": {"type": "integer", "minimum": 0, "maximum": 120},
                            "tags": {"type": "array", "items": {"enum": ["a", "bc", "d\n"]}},
                        },
                        "required": ["name", "age"],
                        "additionalProperties": False,
                    }
                }
            ]
        }
    ),
    "regex": "start: /[a-f]{2,5}(-[0-9]+)?/",
    "choice": 'start: "yes" | "no" | "maybe so" | "\\u00e9"',
    "lark": 'start: expr\nexpr: NUM | "(" expr ("+" | "*") expr ")"\nNUM: /[0-9]{1,3}/',
}
"""Short outputs, so that walks come to their ends."""


@pytest.fixture(scope="module")
def text() -> Text:
    return load_text(ModelConfig(model=str(boxed_model_dir())))


@pytest.fixture(scope="module")
def compiler(text: Text) -> GrammarCompiler:
    return GrammarCompiler(text)


@pytest.fixture(scope="module")
def letters(text: Text) -> dict[str, int]:
    """The tokens of `a` and `b`."""
    return {each: text.tokenizer.encode(each, add_special_tokens=False)[0] for each in "ab"}


@pytest.fixture
def pool(compiler: GrammarCompiler) -> Iterator[GrammarPool]:
    made = GrammarPool(lambda: compiler)
    yield made
    made.close()


def soon() -> float:
    """More time than any mask here takes, in monotonic seconds."""
    return time.monotonic() + 30.0


def constrained(
    pool: GrammarPool,
    grammar: Grammar,
    outputs: Sequence[int],
    *,
    ends: Sequence[int] = (EOS,),
    device: torch.device = CPU,
) -> Constraint:
    """A request's place in a grammar."""
    return Constraint(pool, grammar, outputs, vocab_size=VOCAB_SIZE, ends=ends, device=device)


def allowed(constraint: Constraint) -> list[int]:
    """Token ids that may come next, once they are known."""
    assert constraint.is_known(soon())
    assert constraint.error == ""
    row = torch.zeros(VOCAB_SIZE)
    constraint.apply(row)
    return left(row)


def walk(constraint: Constraint, seed: int, limit: int) -> list[int]:
    """Draw allowed tokens until the end of the output, or so many."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < limit and EOS not in tokens:
        tokens.append(rng.choice(allowed(constraint)))
        constraint.note(tokens[-1])
    return tokens


DRAWN = [f"drawn-{index}" for index in range(45)]


@functools.cache
def drawn() -> dict[str, str]:
    sources = [json.dumps({"grammars": [{"json_schema": each}]}) for each in draw_schemas(45)]
    return dict(zip(DRAWN, sources, strict=True))


@pytest.mark.parametrize(
    "name",
    [
        # The rest are compared at night.
        pytest.param(name, marks=[pytest.mark.matrix] if index >= 10 else [])
        for index, name in enumerate([*GRAMMARS, *DRAWN])
    ],
)
def test_a_mask_is_what_brute_force_finds(
    name: str, pool: GrammarPool, compiler: GrammarCompiler
) -> None:
    """But where text is forced: of all its spellings only the tokenizer's own is allowed."""
    source = GRAMMARS.get(name) or drawn()[name]
    constraint = constrained(pool, Grammar(text=source), [])
    tokens = walk(constraint, 1, 12)
    again = constrained(pool, Grammar(text=source), [])
    matcher = compiler.compile(source)
    num_compared = 0
    for token in tokens:
        found = [each for each in range(VOCAB_SIZE) if matcher.validate_tokens([each])]
        found = [EOS] if matcher.is_stopped() else found
        forced = matcher.compute_ff_tokens()
        assert allowed(again) == (forced[:1] or found)
        assert set(allowed(again)) <= set(found)
        num_compared += not forced
        assert matcher.consume_token(token)
        again.note(token)
    assert num_compared


def test_compiled_grammars_are_kept_within_bytes(compiler: GrammarCompiler) -> None:
    class Counting:
        spelled = staticmethod(compiler.spelled)

        def __init__(self) -> None:
            self.texts: list[str] = []

        def compile(self, text: str) -> object:
            self.texts.append(text)
            return compiler.compile(text)

    counting = Counting()
    pool = GrammarPool(lambda: counting, max_bytes=600 << 10)  # type: ignore[arg-type, return-value]
    small, large = 'start: "a"', 'start: "' + "b" * 4000 + '"'
    for text in (small, large, large, small, 'start: "c"', small, large):
        pool.compiled(text)
    pool.close()
    # The large one takes most of the room, by itself or with one small one beside it.
    assert counting.texts == [small, large, small, 'start: "c"', large]


def test_a_devices_rows_are_masked_as_a_cpus_are(pool: GrammarPool) -> None:
    grammar = Grammar(text=GRAMMARS["choice"])
    on_device = constrained(pool, grammar, [], device=torch.device("cuda"))
    assert allowed(on_device) == allowed(constrained(pool, grammar, []))


@pytest.mark.parametrize("source", GRAMMARS.values(), ids=GRAMMARS)
def test_where_a_request_stands_is_a_function_of_its_tokens(source: str, pool: GrammarPool) -> None:
    grammar = Grammar(text=source)
    for seed in range(3):
        whole = walk(constrained(pool, grammar, []), seed, 30)
        whole = [token for token in whole if token != EOS]
        for cut in {0, 1, len(whole) // 2, len(whole)}:
            grown = constrained(pool, grammar, [])
            for token in whole[:cut]:
                assert token in allowed(grown)
                grown.note(token)
            built = constrained(pool, grammar, whole[:cut])
            assert allowed(built) == allowed(grown)
            assert built.is_over == grown.is_over


def test_a_grammar_begins_behind_the_tokens_that_it_starts_after(pool: GrammarPool) -> None:
    grammar = Grammar(text=GRAMMARS["choice"], starts_after=(7, 7, 9))
    first = allowed(constrained(pool, Grammar(text=GRAMMARS["choice"]), []))
    constraint = constrained(pool, grammar, [7])
    for token in (8, 7, 7, 7):
        assert not constraint.has_begun
        constraint.note(token)
    constraint.note(9)
    assert constraint.has_begun
    assert allowed(constraint) == first
    outputs = [7, 8, 7, 7, 7, 9, first[0]]
    constraint.note(first[0])
    built = constrained(pool, grammar, outputs)
    assert allowed(built) == allowed(constraint)


def test_a_token_that_ends_outputs_is_no_text(pool: GrammarPool, letters: dict[str, int]) -> None:
    """In some tokenizers it is a word like others."""
    grammar = Grammar(text="start: /[ab]{2}/")
    ends = (letters["a"],)
    with torch.inference_mode():  # as in a step
        constraint = constrained(pool, grammar, [], ends=ends)
    assert letters["a"] not in allowed(constraint)
    assert letters["b"] in allowed(constraint)


@pytest.mark.parametrize("written", ["<|assistant|>b", "a<|eos|>", "a<|eos|>b<|user|>\u00e9"])
def test_text_that_spells_a_special_token_is_written_without_it(
    written: str, compiler: GrammarCompiler, text: Text
) -> None:
    """llguidance would force that token, and then take it for no text."""
    source = f"start: {json.dumps(written)}"
    pool = GrammarPool(lambda: compiler, finds_forced=True)
    constraint = constrained(pool, Grammar(text=source), [])
    tokens: list[int] = []
    while not tokens or tokens[-1] != EOS:
        (token_id,) = allowed(constraint)
        assert constraint.forced()[:1] in ([], [token_id])
        constraint.note(token_id)
        tokens.append(token_id)
    pool.close()
    assert not text.tokenizer.special_ids.intersection(tokens[:-1])
    assert text.tokenizer.decode(tokens[:-1], skip_special_tokens=False) == written


def rules_of(pool: GrammarPool, outputs: list[int], **fields: Any) -> LogitRules:
    asked = params(eos_token_ids=(EOS,), **fields)
    return LogitRules(asked, [5], outputs, vocab_size=VOCAB_SIZE, device=CPU, grammars=pool)


def left(row: torch.Tensor) -> list[int]:
    return torch.nonzero(row > -torch.inf).flatten().tolist()


def test_other_rules_hold_within_a_grammar_and_give_way_to_it_where_vllms_do(
    pool: GrammarPool, letters: dict[str, int]
) -> None:
    grammar = Grammar(text='start: "a" | "b"')
    a, b = letters["a"], letters["b"]
    row = torch.zeros(VOCAB_SIZE)
    assert rules_of(pool, [], grammar=grammar).apply(row, soon()) is None
    assert left(row) == sorted([a, b])
    for fields in ({"allowed_token_ids": (b, 9)}, {"bad_words": ((a,),)}):
        row = torch.zeros(VOCAB_SIZE)
        rules = rules_of(pool, [], grammar=grammar, **fields)
        assert rules.apply(row, soon()) is None
        assert left(row) == [b]
    # Neither a bad word nor a minimum keeps an output from being whole.
    for fields in ({"bad_words": ((a,), (b,))}, {"min_tokens": 5}):
        row = torch.zeros(VOCAB_SIZE)
        rules = rules_of(pool, [], grammar=grammar, **fields)
        assert rules.apply(row, soon()) is None
        assert left(row) == sorted([a, b])


@pytest.mark.parametrize("fields", [{}, {"allowed_token_ids": (9,)}, {"min_tokens": 5}])
def test_behind_a_whole_output_nothing_comes_but_its_end(
    fields: dict[str, Any], pool: GrammarPool, letters: dict[str, int]
) -> None:
    grammar = Grammar(text='start: "a"')
    row = torch.zeros(VOCAB_SIZE)
    rules = rules_of(pool, [letters["a"]], grammar=grammar, **fields)
    assert rules.apply(row, soon()) is None
    assert left(row) == [EOS]


def test_where_nothing_may_follow_a_row_says_so_and_has_no_token(pool: GrammarPool) -> None:
    rules = rules_of(pool, [], grammar=Grammar(text='start: "a"'), allowed_token_ids=(EOS,))
    hindered = rules.apply(torch.zeros(VOCAB_SIZE), soon())
    assert hindered is not None
    assert hindered.by is Hindrance.DEAD_END
    assert "other fields" in hindered.why


def test_tokens_that_a_grammar_does_not_allow_are_rejected(
    pool: GrammarPool, letters: dict[str, int]
) -> None:
    outputs = [letters["b"]]
    rules = rules_of(pool, outputs, grammar=Grammar(text='start: "a"'))
    hindered = rules.apply(torch.zeros(VOCAB_SIZE), soon())
    assert hindered is not None
    assert hindered.by is Hindrance.REJECTED


def test_a_grammar_that_is_none_hinders_its_own_row_alone(pool: GrammarPool) -> None:
    rules = rules_of(pool, [], grammar=Grammar(text="start: nowhere"))
    hindered = rules.apply(torch.zeros(VOCAB_SIZE), soon())
    assert hindered is not None
    assert hindered.by is Hindrance.DEAD_END
    assert "nowhere" in hindered.why


def test_a_model_without_a_tokenizer_follows_no_grammar() -> None:
    def load() -> GrammarCompiler:
        raise ConfigError("no tokenizer here")

    pool = GrammarPool(load)
    rules = rules_of(pool, [], grammar=Grammar(text='start: "a"'))
    hindered = rules.apply(torch.zeros(VOCAB_SIZE), soon())
    pool.close()
    assert hindered is not None
    assert (hindered.by, hindered.why) == (Hindrance.DEAD_END, "no tokenizer here")


class _Broken:
    def compile(self, grammar: str) -> Any:
        raise RuntimeError(grammar)


@pytest.mark.parametrize("load", [_Broken, functools.partial(_Broken().compile, "")])
def test_what_nobody_expects_of_a_grammar_keeps_no_request_waiting(load: Any) -> None:
    pool = GrammarPool(load)
    for _ in range(2):
        rules = rules_of(pool, [], grammar=Grammar(text='start: "a"'))
        hindered = rules.apply(torch.zeros(VOCAB_SIZE), time.monotonic() + 5.0)
        assert hindered is not None
        assert hindered.by is Hindrance.DEAD_END
    pool.close()


def test_a_row_without_its_mask_sits_out_and_the_others_do_not(
    compiler: GrammarCompiler, letters: dict[str, int]
) -> None:
    pool = HeldPool(lambda: compiler)
    sampler = Sampler(2, VOCAB_SIZE, CPU, pool)
    sampler.add(0, params(grammar=Grammar(text='start: "a"')), [5], [])
    sampler.add(1, params(logit_bias={7: 50.0}), [5], [])
    rows, num_outputs = np.arange(2), np.zeros(2, dtype=np.int64)
    sampled = sampler.sample(torch.zeros(2, VOCAB_SIZE), rows, num_outputs)
    assert [hindered.by for hindered in sampled.hindered.values()] == [Hindrance.UNREADY]
    assert list(sampled.hindered) == [0]
    assert sampled.token_ids[1] == 7
    pool.release()
    while (sampled := sampler.sample(torch.zeros(2, VOCAB_SIZE), rows, num_outputs)).hindered:
        time.sleep(0.001)
    assert sampled.token_ids.tolist() == [letters["a"], 7]
    pool.close()


def test_a_step_waits_once_for_a_mask_and_not_again(compiler: GrammarCompiler) -> None:
    pool = HeldPool(lambda: compiler)
    constraint = constrained(pool, Grammar(text='start: "a"'), [])
    assert not constraint.is_known(time.monotonic() + 0.01)
    start_s = time.monotonic()
    assert not constraint.is_known(soon())
    assert time.monotonic() - start_s < 10.0
    pool.close()


@pytest.mark.parametrize("chain", [3000, 8000])
def test_a_grammar_as_deep_as_it_may_be_ends_no_process(chain: int, pool: GrammarPool) -> None:
    """8 MiB of stack do not hold it."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(chain)}
    schema = {"$defs": links | {f"d{chain}": {"type": "null"}}, "$ref": "#/$defs/d0"}
    text = json.dumps({"grammars": [{"json_schema": schema}]}, separators=(",", ":"))
    constraint = constrained(pool, Grammar(text=text), [])
    assert constraint.is_known(soon())
    assert (constraint.error == "") == (len(text) <= 1 << 18)


def test_tokens_at_which_a_grammar_becomes_too_large_are_no_others_fault(
    pool: GrammarPool, letters: dict[str, int]
) -> None:
    grammar = Grammar(text="start: /(((((a{1000}){1000}){1000}){1000}){1000})/")
    rules = rules_of(pool, [letters["a"]], grammar=grammar)
    hindered = rules.apply(torch.zeros(VOCAB_SIZE), soon())
    assert hindered is not None
    assert hindered.by is Hindrance.DEAD_END
    assert "too many" in hindered.why


@pytest.mark.parametrize(("slow_s", "is_in_turns"), [(60.0, True), (0.0, False)])
def test_requests_of_one_grammar_have_their_masks_made_in_turns_unless_they_take_long(
    slow_s: float, is_in_turns: bool, compiler: GrammarCompiler, letters: dict[str, int]
) -> None:
    pool = GrammarPool(lambda: compiler, slow_s=slow_s)
    grammar = Grammar(text="start: /[ab]{3}/")
    constraint = constrained(pool, grammar, [])
    assert letters["a"] in allowed(constraint)
    compiled = pool.known(grammar.text)
    assert compiled is not None
    with compiled.lock:
        constraint.note(letters["a"])
        other = Grammar(text="start: /[ab]{4}/")
        assert allowed(constrained(pool, other, []))
        assert constraint.is_known(0.0 if is_in_turns else soon()) != is_in_turns
    wait_until(lambda: constraint.is_known(0.0))
    pool.close()


class NotingPool(GrammarPool):
    """Notes of what is submitted whether it may come behind all other threads."""

    def __init__(self, load: Callable[[], GrammarCompiler], *, slow_s: float) -> None:
        self.are_slow: list[bool] = []
        super().__init__(load, slow_s=slow_s)

    def submit(self, work: Callable[[], None], *, is_slow: bool = False) -> None:
        self.are_slow.append(is_slow)
        super().submit(work, is_slow=is_slow)


@pytest.mark.parametrize(("slow_s", "expected"), [(0.0, True), (60.0, False)])
def test_masks_that_take_long_come_behind_all_other_threads(
    slow_s: float, expected: bool, compiler: GrammarCompiler
) -> None:
    pool = NotingPool(lambda: compiler, slow_s=slow_s)
    grammar = Grammar(text=GRAMMARS["schema"])
    constraint = constrained(pool, grammar, [])
    walk(constraint, 1, 3)
    assert pool.are_slow == [False, *[expected] * 3]
    pool.close()


def test_a_grammar_that_was_slow_is_slow_for_those_who_come_later(
    compiler: GrammarCompiler,
) -> None:
    pool = NotingPool(lambda: compiler, slow_s=0.0)
    grammar = Grammar(text=GRAMMARS["schema"])
    walk(constrained(pool, grammar, []), 1, 1)
    pool.are_slow.clear()
    walk(constrained(pool, grammar, []), 1, 1)
    assert pool.are_slow == [True]
    pool.close()


@pytest.mark.parametrize(("slow_s", "is_found"), [(0.0, False), (60.0, True)])
def test_forced_tokens_that_take_long_to_find_are_not_looked_for(
    slow_s: float, is_found: bool, compiler: GrammarCompiler
) -> None:
    """llguidance keeps the interpreter to itself for that."""
    pool = GrammarPool(lambda: compiler, finds_forced=True, slow_s=slow_s)
    grammar = Grammar(text='start: "aaaaaaaa"')
    constraint = constrained(pool, grammar, [])
    assert allowed(constraint)
    assert bool(constraint.forced()) == is_found
    pool.close()


def test_what_a_compiled_grammar_allows_first_needs_no_thread(compiler: GrammarCompiler) -> None:
    pool = HeldPool(lambda: compiler)
    grammar = Grammar(text=GRAMMARS["schema"])
    compiling = constrained(pool, grammar, [])
    pool.release()
    expected = allowed(compiling)
    constraint = constrained(pool, grammar, [])
    assert constraint.is_known(0.0)
    assert allowed(constraint) == expected
    pool.close()


def test_behind_its_last_token_a_request_has_no_mask_made_unless_one_is_asked_for(
    compiler: GrammarCompiler, letters: dict[str, int]
) -> None:
    pool = NotingPool(lambda: compiler, slow_s=60.0)
    grammar = Grammar(text="start: /[ab]{3}/")
    rules = rules_of(pool, [], grammar=grammar, max_tokens=2)
    for token_id in letters.values():
        row = torch.zeros(VOCAB_SIZE)
        assert rules.apply(row, soon()) is None
        assert token_id in left(row)
        rules.note(token_id)
    assert len(pool.are_slow) == 2, "a mask was made that nobody had asked for"
    row = torch.zeros(VOCAB_SIZE)
    assert rules.apply(row, soon()) is None
    assert left(row) == sorted(letters.values())
    pool.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such threads")
@pytest.mark.parametrize("is_last", [False, True])
def test_threads_come_last_where_they_are_to(is_last: bool) -> None:
    found: SimpleQueue[int] = SimpleQueue()
    threads = DeepThreads("deep", num_threads=1, is_last=is_last)
    threads.submit(lambda: found.put(os.sched_getscheduler(threading.get_native_id())))
    expected = os.SCHED_IDLE if is_last else os.sched_getscheduler(0)
    assert found.get(timeout=30.0) == expected
    threads.close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has such threads")
def test_threads_that_come_last_are_there_for_their_work_alone() -> None:
    """On a busy machine one that waits would hold up the end of a killed engine."""

    def number_of_last() -> int:
        number = 0
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):
                number += os.sched_getscheduler(int(task)) == os.SCHED_IDLE
        return number

    found: SimpleQueue[int] = SimpleQueue()
    threads = DeepThreads("deep", num_threads=2, is_last=True)
    for _ in range(2):  # they end, and are made anew
        wait_until(lambda: number_of_last() == 0)
        threads.submit(lambda: found.put(number_of_last()))
        assert found.get(timeout=30.0) == 1
    threads.close()


def test_threads_that_have_ended_have_done_their_work() -> None:
    done: list[bytes] = []
    threads = DeepThreads("deep", num_threads=2)
    for _ in range(40):
        threads.submit(lambda: done.append(sha256(bytes(1 << 20)).digest()))
    threads.close()
    threads.join()
    assert len(done) == 40


def test_threads_that_may_not_come_last_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    found: SimpleQueue[bool] = SimpleQueue()
    threads = DeepThreads("deep", num_threads=1, is_last=True)
    threads.submit(lambda: found.put(True))
    assert found.get(timeout=30.0)
    threads.close()
