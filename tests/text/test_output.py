from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from pdserve.text.answer.machine import AnswerMachine
from pdserve.text.answer.parsers import REASONING_PARSERS, TOOL_PARSERS
from pdserve.text.answer.pieces import CallBegins, ToolUse
from pdserve.text.output import CallDelta, OutputProcessor
from pdserve.wire.request import FinishReason
from tests.text.answer.told import in_one
from tests.text.tiny import make_tokenizer

TOKENIZER = make_tokenizer()


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


@given(
    token_ids=st.lists(st.integers(4, TOKENIZER.vocab_size - 1), min_size=1, max_size=30),
    cut=st.integers(0, 30),
)
def test_text_does_not_depend_on_which_engine_sent_the_first_tokens(token_ids, cut):
    whole = OutputProcessor(TOKENIZER, stop=["e", "he "])
    split = OutputProcessor(TOKENIZER, stop=["e", "he "])
    expected = whole.push(token_ids, FinishReason.LENGTH)
    first = split.push(token_ids[:cut], None)
    if first.finish_reason is not None:
        assert (first.text, first.finish_reason) == (expected.text, expected.finish_reason)
        return
    second = split.push(token_ids[cut:], FinishReason.LENGTH)
    assert first.text + second.text == expected.text
    assert second.finish_reason == expected.finish_reason
    assert split.num_tokens == whole.num_tokens


def test_a_stop_string_across_tokens_is_never_shown_in_part():
    token_ids = encode("brown fox jumps")
    processor = OutputProcessor(TOKENIZER, stop=["wn fo"])
    shown = ""
    for token_id in token_ids:
        delta = processor.push([token_id], None)
        shown += delta.text
        assert "bro".startswith(shown)
        if delta.finish_reason is not None:
            break
    assert shown == "bro"
    assert delta.finish_reason is FinishReason.STOP
    assert delta.stop_reason == "wn fo"


def test_tokens_after_a_stop_string_do_not_count():
    token_ids = encode("a!b")
    processor = OutputProcessor(TOKENIZER, stop=["!"])
    delta = processor.push(token_ids, FinishReason.LENGTH)
    assert (delta.text, len(delta.offsets), processor.num_tokens) == ("a", 2, 2)


def test_a_stop_string_within_the_minimum_is_text():
    token_ids = encode("a!b!c")
    assert len(token_ids) == 5
    processor = OutputProcessor(TOKENIZER, stop=["!"], min_tokens=3)
    delta = processor.push(token_ids, None)
    assert (delta.text, delta.stop_reason) == ("a!b", "!")


def test_the_token_that_ends_a_text_is_shown_only_when_asked_for():
    stop_id = encode("!")[0]
    token_ids = [*encode("dog"), stop_id]
    hidden = OutputProcessor(TOKENIZER).push(token_ids, FinishReason.STOP)
    shown = OutputProcessor(TOKENIZER, include_stop_str_in_output=True).push(
        token_ids, FinishReason.STOP
    )
    assert (hidden.text, shown.text) == ("dog", "dog!")


def test_held_text_is_given_out_at_the_end_but_not_at_a_handoff():
    token_ids = encode("dog E")
    ended = OutputProcessor(TOKENIZER, stop=["END"]).push(token_ids, FinishReason.LENGTH)
    handed = OutputProcessor(TOKENIZER, stop=["END"]).push(token_ids, FinishReason.HANDOFF)
    assert (ended.text, handed.text) == ("dog E", "dog ")


def test_offsets_are_where_tokens_begin_in_the_text():
    token_ids = encode("a 你b")
    delta = OutputProcessor(TOKENIZER).push(token_ids, FinishReason.LENGTH)
    spelled = [TOKENIZER.token_bytes(token_id) for token_id in token_ids]
    for position, offset in enumerate(delta.offsets):
        before = b"".join(spelled[:position]).decode("utf-8", "ignore")
        assert offset == len(before)


def test_special_tokens_are_text_only_when_asked_for():
    token_ids = TOKENIZER.encode("<|im_start|>a")
    skipped = OutputProcessor(TOKENIZER).push(token_ids, FinishReason.LENGTH)
    kept = OutputProcessor(TOKENIZER, skip_special_tokens=False).push(
        token_ids, FinishReason.LENGTH
    )
    assert (skipped.text, kept.text) == ("a", "<|im_start|>a")


def processor_with(parser: str, *, stop: tuple[str, ...] = ()) -> OutputProcessor:
    machine = AnswerMachine(
        calls=TOOL_PARSERS[parser],
        reasoning=REASONING_PARSERS["qwen3"],
        use=ToolUse({}),
        vocabulary={THINK: "<think>"},
        in_reasoning=False,
    )
    return OutputProcessor(TOKENIZER, machine=machine, stop=stop)


THINK = TOKENIZER.encode("<think>", add_special_tokens=False)[0]
ANSWER = [
    THINK,
    *encode(' a quick dog</think>the fox<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
]


@given(cut=st.integers(0, len(ANSWER)))
def test_calls_and_reasoning_do_not_depend_on_which_engine_sent_the_first_tokens(cut):
    processor = processor_with("hermes")
    first = in_one(processor.push(ANSWER[:cut], FinishReason.HANDOFF))
    second = in_one(processor.push(ANSWER[cut:], FinishReason.LENGTH))
    assert first.reasoning + second.reasoning == "a quick dog"
    assert first.text + second.text == "the fox"
    parts = first.calls + second.calls
    assert [part.begins for part in parts if part.begins] == [CallBegins("f")]
    assert "".join(part.arguments for part in parts) == "{}"
    assert {part.index for part in parts} == {0}
    assert parts[-1].is_whole
    assert processor.num_calls == 1
    assert processor.num_reasoning_tokens == len(encode(" a quick dog</think>")) - 1


def test_stop_strings_do_not_look_into_reasoning_and_calls():
    processor = processor_with("hermes", stop=("quick", '"f"', "x"))
    delta = in_one(processor.push(ANSWER, FinishReason.LENGTH))
    assert (delta.text, delta.reasoning) == ("the fo", "a quick dog")
    assert (delta.stop_reason, delta.finish_reason) == ("x", FinishReason.STOP)


def test_what_may_begin_a_stop_string_is_given_out_before_a_call():
    processor = processor_with("hermes", stop=("xyz",))
    deltas = [processor.push([token_id], None) for token_id in ANSWER]
    text = "".join(
        delta.text for delta in deltas[: [bool(d.calls) for d in deltas].index(True) + 1]
    )
    assert text == "the fox"


def test_special_tokens_have_text_inside_of_a_call():
    quoted = TOKENIZER.encode("<|im_end|>", add_special_tokens=False)
    token_ids = [
        *encode('<tool_call>{"name": "f", "arguments": {"s": "'),
        *quoted,
        *encode('"}}</tool_call>'),
        *quoted,
    ]
    delta = processor_with("hermes").push(token_ids, FinishReason.LENGTH)
    assert delta.calls == [CallDelta(0, CallBegins("f"), '{"s": "<|im_end|>"}', is_whole=True)]
    assert delta.text == ""


@given(cuts=st.sets(st.integers(1, 60)))
def test_text_behind_a_call_stands_there_however_the_tokens_come(cuts):
    called = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    token_ids = encode(f"a{called}b{called}{called}c")
    processor, said = processor_with("hermes", stop=("xyz",)), []
    ends = [*sorted(cut for cut in cuts if cut < len(token_ids)), len(token_ids)]
    for start, end in itertools.pairwise([0, *ends]):
        last = FinishReason.LENGTH if end == len(token_ids) else None
        delta = processor.push(token_ids[start:end], last)
        for part in (delta, *delta.rest):
            said += [part.text, *(call.index for call in part.calls if call.begins)]
    assert [each for each in said if each != ""] == ["a", 0, "b", 1, 2, "c"]
