"""Data sets that are made up: exact lengths, shared parts, schedules, and the same plan again."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import pytest

from pdserve.bench.datasets.prompts import PromptMaker, Segment
from pdserve.bench.datasets.registry import make_plan
from pdserve.bench.target import ApiEndpoint
from pdserve.config.boxed import boxed_model_dir
from pdserve.config.datasets import (
    DATASET_SETTINGS,
    DatasetConfig,
    DatasetName,
    InterferenceConfig,
    MultiTurnConfig,
    PrefixRepetitionConfig,
    RandomConfig,
    TraceDataConfig,
)
from pdserve.errors import ConfigError, InternalError
from pdserve.text.tokenizer import Tokenizer

MADE_UP = [
    DatasetName.RANDOM,
    DatasetName.PREFIX_REPETITION,
    DatasetName.MULTI_TURN,
    DatasetName.PD_INTERFERENCE,
]


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: InterferenceConfig(duration_s=math.inf), "interference-duration"),
        (lambda: InterferenceConfig(steady_period_s=math.inf), "interference-steady-period"),
        (lambda: InterferenceConfig(steady_period_s=1e-9), "interference-steady-period"),
        (lambda: InterferenceConfig(burst_period_s=5e-324), "interference-burst-period"),
        (lambda: MultiTurnConfig(think_time_s=math.inf), "multi-turn-think-time"),
        (lambda: TraceDataConfig(length_scale=math.inf), "trace-length-scale"),
        (lambda: DatasetConfig(seed=-1), "seed"),
        (lambda: DatasetConfig(num_prompts=10**12), "num-prompts"),
    ],
)
def test_a_number_without_end_or_that_makes_requests_without_end_is_refused_by_its_flag(make, flag):
    with pytest.raises(ConfigError) as refused:
        make()
    assert refused.value.param == flag


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(boxed_model_dir())


@pytest.fixture(scope="module")
def ids(tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=4096)


@pytest.fixture(scope="module")
def chat(tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer, endpoint=ApiEndpoint.CHAT, max_model_len=4096)


def interference(**fields: Any) -> InterferenceConfig:
    """Its pace is known."""
    pace = {"steady_output_len": 64, "steady_period_s": 2.0, "burst_period_s": 0.55}
    return InterferenceConfig(**{**pace, **fields})


def small(name: DatasetName, *, seed: int = 0, num_prompts: int = 12) -> DatasetConfig:
    return DatasetConfig(
        name=name,
        seed=seed,
        num_prompts=num_prompts,
        random=RandomConfig(input_len=40, output_len=20, range_ratio=0.5),
        prefix_repetition=PrefixRepetitionConfig(
            prefix_len=32, suffix_len=30, num_prefixes=3, output_len=4
        ),
        multi_turn=MultiTurnConfig(num_turns=3, input_len=40, turn_input_len=10, output_len=5),
        interference=interference(duration_s=4, burst_input_len=100),
    )


@pytest.mark.parametrize("name", MADE_UP)
@pytest.mark.parametrize("endpoint", list(ApiEndpoint))
def test_the_same_seed_makes_the_same_plan_byte_for_byte(tokenizer, name, endpoint):
    first, second = (
        make_plan(small(name, seed=7), PromptMaker(tokenizer, endpoint=endpoint)) for _ in range(2)
    )
    assert msgspec.json.encode(first) == msgspec.json.encode(second)


@pytest.mark.parametrize("name", MADE_UP)
def test_another_seed_makes_other_prompts(ids, name):
    first, second = (make_plan(small(name, seed=seed), ids).requests for seed in (1, 2))
    assert all(one.prompt != other.prompt for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MADE_UP)
def test_token_prompts_are_as_long_as_they_say_and_hold_no_special_token(ids, tokenizer, name):
    for each in make_plan(small(name), ids).requests:
        assert isinstance(each.prompt, list)
        if each.num_prompt_tokens is not None:
            assert len(each.prompt) == each.num_prompt_tokens
        assert not set(each.prompt) & tokenizer.special_ids
        assert all(0 <= token < tokenizer.vocab_size for token in each.prompt)


@pytest.mark.parametrize("name", MADE_UP)
def test_requests_are_in_order_of_their_index(ids, name):
    requests = make_plan(small(name), ids).requests
    assert [each.index for each in requests] == list(range(len(requests)))


@pytest.mark.parametrize("name", [DatasetName.RANDOM, DatasetName.PREFIX_REPETITION])
def test_chat_prompts_have_exactly_the_tokens_they_say_behind_the_template(chat, name):
    for each in make_plan(small(name), chat).requests:
        assert each.num_prompt_tokens == chat.count(each.prompt)


def test_a_turn_of_a_chat_adds_exactly_its_own_tokens(chat):
    [message] = chat.make_turn([Segment("turn", 37)])
    assert chat.count_words(message["content"]) == 37


def test_a_chat_prompt_shorter_than_its_template_is_refused(chat):
    with pytest.raises(ConfigError, match="--endpoint completions"):
        chat.make([Segment("x", 3)])


def test_a_chat_prompt_never_loses_what_is_its_own(chat):
    with pytest.raises(ConfigError, match="only 2 are the prompt's own"):
        chat.make([Segment("shared", 100), Segment("own", 2)])


def test_a_tokenizer_without_a_chat_template_cannot_make_chat_prompts(tokenizer):
    bare = Tokenizer(tokenizer._backend, {}, chat_template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        PromptMaker(bare, endpoint=ApiEndpoint.CHAT).make([Segment("x", 50)])


@pytest.mark.parametrize("name", MADE_UP)
def test_without_a_tokenizer_the_flag_that_gives_one_is_named(name):
    with pytest.raises(ConfigError, match="--tokenizer DIR"):
        make_plan(small(name), PromptMaker(None, endpoint=ApiEndpoint.COMPLETIONS))


@pytest.mark.parametrize("name", MADE_UP)
def test_lengths_over_the_models_context_are_refused_with_the_flags_to_lower(tokenizer, name):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=50)
    prefix = name.value.replace("_", "-").removeprefix("pd-")
    with pytest.raises(ConfigError, match=rf"exceed the 50 tokens .* lower --{prefix}-"):
        make_plan(small(name), prompts)


def test_random_lengths_fill_their_range_and_never_leave_it(ids):
    requests = make_plan(small(DatasetName.RANDOM, num_prompts=500), ids).requests
    inputs = {each.num_prompt_tokens for each in requests}
    outputs = {each.max_tokens for each in requests}
    assert (min(inputs), max(inputs)) == (20, 60)
    assert (min(outputs), max(outputs)) == (10, 30)


def test_random_prompts_share_their_prefix_and_nothing_behind_it(ids):
    config = DatasetConfig(
        num_prompts=20, random=RandomConfig(input_len=30, output_len=1, prefix_len=10)
    )
    prompts = [each.prompt for each in make_plan(config, ids).requests]
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 1
    assert len({tuple(prompt[10:14]) for prompt in prompts}) == 20


def test_each_prefix_is_repeated_equally_often_in_an_order_that_is_drawn(ids):
    requests = make_plan(small(DatasetName.PREFIX_REPETITION), ids).requests
    prefixes = [tuple(each.prompt[:32]) for each in requests]
    assert sorted(Counter(prefixes).values()) == [4, 4, 4]
    assert len({tuple(each.prompt[32:]) for each in requests}) == 12
    assert prefixes != prefixes[:3] * 4


def test_chat_prompts_share_their_prefix_too(chat):
    requests = make_plan(small(DatasetName.PREFIX_REPETITION), chat).requests
    starts = Counter(each.prompt[0]["content"][:60] for each in requests)
    assert sorted(starts.values()) == [4, 4, 4]


def test_more_prefixes_than_prompts_are_refused(ids):
    config = small(DatasetName.PREFIX_REPETITION, num_prompts=2)
    with pytest.raises(ConfigError, match="no prefix would repeat"):
        make_plan(config, ids)


def test_every_turn_follows_the_one_before_it_after_a_pause(ids):
    requests = make_plan(small(DatasetName.MULTI_TURN, num_prompts=7), ids).requests
    assert [each.after for each in requests] == [None, 0, 1, None, 3, 4, None]
    assert [len(each.prompt) for each in requests] == [40, 10, 10, 40, 10, 10, 40]
    pauses = [each.delay_s for each in requests if each.after is not None]
    assert all(pause > 0 for pause in pauses)
    assert len(set(pauses)) == len(pauses)
    assert all(each.at_s is None for each in requests)


def test_pauses_have_the_mean_that_was_asked_for(ids):
    config = DatasetConfig(
        name=DatasetName.MULTI_TURN,
        num_prompts=4000,
        multi_turn=MultiTurnConfig(
            num_turns=2, input_len=1, turn_input_len=1, output_len=1, think_time_s=3.0
        ),
    )
    pauses = [each.delay_s for each in make_plan(config, ids).requests if each.after is not None]
    assert sum(pauses) / len(pauses) == pytest.approx(3.0, rel=0.1)


def test_each_turn_of_a_conversation_is_a_group(ids):
    requests = make_plan(small(DatasetName.MULTI_TURN, num_prompts=5), ids).requests
    assert [each.group for each in requests] == ["turn 1", "turn 2", "turn 3", "turn 1", "turn 2"]


def test_steady_users_ask_at_their_period_and_evenly_shifted(ids):
    config = DatasetConfig(
        name=DatasetName.PD_INTERFERENCE,
        interference=interference(steady_streams=4, duration_s=6.0, burst_size=0),
    )
    requests = make_plan(config, ids).requests
    assert [each.at_s for each in requests] == [place * 0.5 for place in range(12)]
    assert {each.group for each in requests} == {"steady"}


def test_bursts_come_at_one_moment_from_one_period_on(ids):
    config = DatasetConfig(
        name=DatasetName.PD_INTERFERENCE,
        interference=interference(burst_size=3, burst_period_s=1.5, duration_s=5.0),
    )
    requests = make_plan(config, ids).requests
    bursts = [each for each in requests if each.group == "burst"]
    assert [each.at_s for each in bursts] == [1.5] * 3 + [3.0] * 3 + [4.5] * 3
    assert len({tuple(each.prompt) for each in bursts}) == 9
    assert [each.at_s for each in requests] == sorted(each.at_s for each in requests)


def test_the_default_interference_fits_a_context_of_2048(tokenizer):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=2048)
    config = DatasetConfig(
        name=DatasetName.PD_INTERFERENCE, interference=interference(steady_output_len=512)
    )
    requests = make_plan(config, prompts).requests
    assert Counter(each.group for each in requests) == {"steady": 40, "burst": 36}


def test_few_bursts_are_said_to_be_few(ids):
    def notes(period_s: float) -> list[str]:
        own = interference(burst_period_s=period_s, duration_s=20.0)
        return make_plan(
            DatasetConfig(name=DatasetName.PD_INTERFERENCE, interference=own), ids
        ).notes

    (sentence,) = notes(4.5)
    assert "Only 4 bursts came in 20 s" in sentence
    assert "--interference-duration 32" in sentence
    assert not notes(3.0)


def test_a_pace_that_nobody_measured_makes_no_plan(ids):
    with pytest.raises(InternalError, match="before its pace was measured"):
        make_plan(DatasetConfig(name=DatasetName.PD_INTERFERENCE), ids)


@pytest.mark.parametrize(
    ("make", "flag"),
    [
        (lambda: RandomConfig(input_len=0), "random-input-len"),
        (lambda: RandomConfig(range_ratio=1.0), "random-range-ratio"),
        (lambda: PrefixRepetitionConfig(num_prefixes=-1), "prefix-repetition-num-prefixes"),
        (lambda: MultiTurnConfig(think_time_s=-1), "multi-turn-think-time"),
        (lambda: MultiTurnConfig(think_time_s=math.nan), "multi-turn-think-time"),
        (lambda: InterferenceConfig(burst_period_s=0), "interference-burst-period"),
        (lambda: TraceDataConfig(speedup=0), "trace-speedup"),
        (lambda: DatasetConfig(num_prompts=0), "num-prompts"),
        (lambda: DatasetConfig(name=DatasetName.TRACE), "dataset-path"),
        (lambda: DatasetConfig(path="x.json"), "dataset-path"),
    ],
)
def test_impossible_settings_name_their_flag(make, flag):
    with pytest.raises(ConfigError, match=f"--{flag}") as refusal:
        make()
    assert refusal.value.param == flag


def test_every_field_of_the_config_has_a_flag():
    def fields(struct: type[msgspec.Struct], root: str) -> set[str]:
        found = set()
        for info in msgspec.structs.fields(struct):
            path = f"{root}.{info.name}"
            is_struct = isinstance(info.type, type) and issubclass(info.type, msgspec.Struct)
            found |= fields(info.type, path) if is_struct else {path}
        return found

    assert {setting.path for setting in DATASET_SETTINGS} == fields(DatasetConfig, "dataset")
