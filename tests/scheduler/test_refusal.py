"""What an engine must not take, whoever sends it: it would end everybody's requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.connectors.memory.exchange import Exchange
from pdserve.observe.clock import ManualClock
from pdserve.scheduler.plan import refusal_of
from pdserve.wire.ids import EngineId, Incarnation, RequestId
from pdserve.wire.request import FinishReason, GenerateRequest
from pdserve.wire.sampling import TokenLogprobs
from pdserve.wire.transfer import Endpoint, KVHandoff, KVShape
from tests.scheduler.invariants import assert_nothing_held
from tests.toy import ToyEngine, sampling
from tests.toy_executor import TOY_EOS, TOY_VOCAB_SIZE, expected_output

MAX_MODEL_LEN = 48
HANDOFF = KVHandoff(
    engine_id=EngineId("p"),
    incarnation=Incarnation("1"),
    nonce="n",
    request_id=RequestId("p"),
    endpoints=[Endpoint(host="memory", port=1)],
    block_ids=[],
    num_tokens=2,
    shape=KVShape(
        num_blocks=8,
        num_layers=1,
        num_planes=2,
        num_kv_heads=1,
        head_dim=1,
        dtype_bytes=8,
        block_size=8,
        stages=((0, 1),),
    ),
    layout_digest="toy",
    lease_s=30.0,
    prompt_digest="",
    first_token_ids=[1],
)


def make_request(prompt: list[int], **fields: Any) -> GenerateRequest:
    """A request with some sampling fields, and perhaps a handoff."""
    handoff = fields.pop("handoff", None)
    return GenerateRequest(
        request_id=RequestId("bad"),
        prompt_token_ids=prompt,
        sampling=msgspec.structs.replace(sampling(4), **fields),
        arrival_s=0.0,
        handoff=handoff,
    )


def handoff(**fields: Any) -> KVHandoff:
    """`HANDOFF` with other fields."""
    return msgspec.structs.replace(HANDOFF, **fields)


REFUSED = {
    "an empty prompt": (make_request([]), "empty"),
    "a full context": (make_request([1] * MAX_MODEL_LEN), "maximum context length"),
    "an id beyond the vocabulary": (make_request([1, TOY_VOCAB_SIZE]), "vocabulary"),
    "a negative id": (make_request([1, -1]), "vocabulary"),
    "an id no array can hold": (make_request([1, 1 << 40]), "vocabulary"),
    "no output": (make_request([1], max_tokens=0), "max_tokens"),
    "a NaN temperature": (make_request([1], temperature=float("nan")), "temperature"),
    "an infinite temperature": (make_request([1], temperature=float("inf")), "temperature"),
    "a min_p that nothing reaches": (make_request([1], min_p=1.5), "min_p"),
    "a penalty of zero": (make_request([1], repetition_penalty=0.0), "repetition_penalty"),
    "an infinite penalty": (make_request([1], presence_penalty=float("inf")), "presence_penalty"),
    "an infinite bias": (make_request([1], logit_bias={1: float("inf")}), "logit_bias"),
    "negative logprobs": (make_request([1], logprobs=-1), "logprobs"),
    "negative prompt logprobs": (make_request([1], prompt_logprobs=-1), "prompt_logprobs"),
    "more logprobs than memory": (make_request([1], logprobs=1 << 40), "logprobs"),
    "more prompt logprobs than memory": (
        make_request([1], prompt_logprobs=1 << 40),
        "prompt_logprobs",
    ),
    "nothing allowed": (make_request([1], allowed_token_ids=()), "allowed_token_ids"),
    "only unknown ids allowed": (make_request([1], allowed_token_ids=(TOY_VOCAB_SIZE,)), "allowed"),
    "no first token": (make_request([1, 1], handoff=handoff(first_token_ids=[])), "first token"),
    "a strange first token": (
        make_request([1, 1], handoff=handoff(first_token_ids=[TOY_VOCAB_SIZE])),
        "first token",
    ),
    "logprobs of more tokens than there are": (
        make_request([1, 1], handoff=handoff(first_logprobs=[TokenLogprobs(1, 0.0, 1, [])] * 2)),
        "logprobs",
    ),
    "a handoff and prompt logprobs": (
        make_request([1, 1], handoff=HANDOFF, prompt_logprobs=0),
        "prompt_logprobs",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_run_ends_alone(name: str) -> None:
    bad, reason = REFUSED[name]
    engine = ToyEngine("e", Exchange(), ManualClock(), max_model_len=MAX_MODEL_LEN)
    good = GenerateRequest(
        request_id=RequestId("good"),
        prompt_token_ids=[1] * 9,
        sampling=sampling(5),
        arrival_s=0.0,
    )
    engine.scheduler.add(bad)
    engine.scheduler.add(good)
    outputs = engine.settle()
    (refused,) = [output for output in outputs if output.request_id == "bad"]
    assert refused.finish_reason is FinishReason.ERROR
    assert reason in str(refused.error)
    tokens = [t for output in outputs for t in output.new_token_ids]
    assert tokens == expected_output(good.prompt_token_ids, good.sampling)
    assert_nothing_held(engine.scheduler)


def test_ids_outside_of_the_vocabulary_in_what_is_only_compared_are_harmless() -> None:
    request = make_request(
        [1, TOY_EOS],
        stop_token_ids=(TOY_VOCAB_SIZE, 1 << 40),
        logit_bias={TOY_VOCAB_SIZE: 1.0},
        allowed_token_ids=(1, TOY_VOCAB_SIZE),
        bad_words=((TOY_VOCAB_SIZE,),),
    )
    assert refusal_of(request, vocab_size=TOY_VOCAB_SIZE, max_model_len=MAX_MODEL_LEN) is None
