"""The engine without a model keeps an engine's promises."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.fake import FakeEngineClient, FakeFabric
from pdserve.errors import EngineDeadError, UnavailableError
from pdserve.wire.ids import RequestId
from pdserve.wire.request import EngineOutput, FinishReason, GenerateRequest
from pdserve.wire.sampling import SamplingParams
from pdserve.wire.transfer import KVHandoff


def request(prompt: list[int], *, remote: bool = False, handoff: KVHandoff | None = None, **params):
    return GenerateRequest(
        request_id=RequestId("one"),
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"max_tokens": 6, "seed": 1} | params),
        arrival_s=0.0,
        remote_decode=remote,
        handoff=handoff,
    )


async def run(engine: FakeEngineClient, asked: GenerateRequest) -> list[EngineOutput]:
    return [output async for output in engine.generate(asked)]


def tokens(outputs: list[EngineOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.new_token_ids]


def engines() -> tuple[FakeEngineClient, FakeEngineClient]:
    fabric = FakeFabric()
    return FakeEngineClient(fabric=fabric), FakeEngineClient(fabric=fabric)


@given(
    prompt=st.lists(st.integers(0, 255), min_size=1, max_size=20),
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.integers(0, 3),
)
def test_two_engines_give_the_tokens_of_one(prompt: list[int], temperature: float, seed: int):
    async def scenario() -> None:
        prefill, decode = engines()
        params = {"temperature": temperature, "seed": seed}
        [first] = await run(prefill, request(prompt, remote=True, **params))
        assert first.finish_reason is FinishReason.HANDOFF
        both = await run(decode, request(prompt, handoff=first.handoff, **params))
        assert both[0].kv_mode == "pull"
        alone = await run(decode, request(prompt, **params))
        assert tokens(both) == tokens(alone)
        assert not prefill.leases

    asyncio.run(scenario())


@pytest.mark.parametrize("other", ["released", "prompt", "layout", "number of ranks"])
async def test_a_handoff_that_does_not_hold_is_computed_again(other: str):
    prefill, decode = engines()
    [first] = await run(prefill, request([1, 2], remote=True))
    assert first.handoff is not None
    prompt = [1, 2]
    if other == "released":
        await prefill.release_lease(first.handoff.nonce)
    elif other == "prompt":
        prompt = [1, 3]
    elif other == "layout":
        decode = FakeEngineClient(layout_digest="another")
    else:
        decode = FakeEngineClient(num_ranks=2)
    outputs = await run(decode, request(prompt, handoff=first.handoff))
    assert not outputs[0].kv_mode
    assert tokens(outputs) == tokens(await run(decode, request(prompt)))
    assert len(outputs[0].load_failures) == 1


async def test_a_request_that_is_closed_early_is_aborted():
    engine = FakeEngineClient()
    outputs = engine.generate(request([1]))
    await anext(outputs)
    await outputs.aclose()
    assert (engine.aborted, engine.running) == ([RequestId("one")], set())


async def test_death_fails_what_runs_and_what_comes_after():
    engine = FakeEngineClient(step_s=60.0)
    outputs = engine.generate(request([1]))
    await anext(outputs)
    waiting = asyncio.ensure_future(anext(outputs))
    await asyncio.sleep(0)
    engine.die("on purpose")
    with pytest.raises(EngineDeadError, match="on purpose"):
        await waiting
    with pytest.raises(EngineDeadError):
        await run(engine, request([1]))


async def test_a_closing_engine_finishes_what_runs_and_takes_nothing_more():
    engine = FakeEngineClient(step_s=0.05)
    running = asyncio.create_task(run(engine, request([1])))
    await asyncio.sleep(0.005)
    closing = asyncio.create_task(engine.close(timeout_s=5.0))
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError):
        await run(engine, request([1]))
    assert len(tokens(await running)) == 6
    await closing
