"""Data sets from files: what is taken, what is left out and counted, and what is refused."""

from __future__ import annotations

import json
import tracemalloc

import msgspec
import pytest

from pdserve.bench.datasets import reading
from pdserve.bench.datasets.prompts import PromptMaker
from pdserve.bench.datasets.reading import json_array, json_lines
from pdserve.bench.datasets.registry import make_plan
from pdserve.bench.target import ApiEndpoint
from pdserve.config.boxed import boxed_model_dir
from pdserve.config.datasets import (
    CustomConfig,
    DatasetConfig,
    DatasetName,
    ShareGptConfig,
    TraceDataConfig,
)
from pdserve.errors import ConfigError
from pdserve.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(boxed_model_dir())


@pytest.fixture(scope="module")
def ids(tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=4096)


def sharegpt(tmp_path, *talks: tuple[str, ...], **fields) -> DatasetConfig:
    """A file of conversations, written over several lines as the real one is."""
    path = tmp_path / "talks.json"
    entries = [
        {"id": str(place), "conversations": [{"from": "x", "value": turn} for turn in talk]}
        for place, talk in enumerate(talks)
    ]
    path.write_text(json.dumps(entries, indent=2))
    own = ShareGptConfig(output_len=fields.pop("output_len", None))
    return DatasetConfig(name=DatasetName.SHAREGPT, path=str(path), sharegpt=own, **fields)


def lines(tmp_path, name: DatasetName, *entries: object, **fields) -> DatasetConfig:
    path = tmp_path / "file.jsonl"
    path.write_text(
        "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in entries)
    )
    return DatasetConfig(name=name, path=str(path), **fields)


def custom(tmp_path, *entries: object, **fields) -> DatasetConfig:
    fields.setdefault("disable_shuffle", True)
    fields.setdefault("no_oversample", True)
    return lines(tmp_path, DatasetName.CUSTOM, *entries, **fields)


def request(timestamp, num_input=600, num_output=5, hash_ids=(1, 2)) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": num_input,
        "output_length": num_output,
        "hash_ids": list(hash_ids),
    }


def trace(tmp_path, *entries: object, num_prompts: int = 100, **own) -> DatasetConfig:
    config = TraceDataConfig(**own)
    return lines(tmp_path, DatasetName.TRACE, *entries, num_prompts=num_prompts, trace=config)


def words(num: int) -> str:
    return " ".join(["fire"] * num)


# ---- ShareGPT --------------------------------------------------------------------------


def test_the_first_turn_asks_and_the_second_says_how_much(tmp_path, ids, tokenizer):
    config = sharegpt(tmp_path, (words(20), words(9), words(50)), num_prompts=1)
    [asked] = make_plan(config, ids).requests
    assert asked.prompt == words(20)
    assert asked.num_prompt_tokens == len(tokenizer.encode(words(20)))
    assert asked.max_tokens == len(tokenizer.encode(words(9), add_special_tokens=False))


def test_conversations_are_pruned_as_vllm_prunes_them(tmp_path, ids):
    config = sharegpt(
        tmp_path,
        ("fire", words(9)),
        (words(20), "fire"),
        (words(1025), words(9)),
        (words(1020), words(1030)),
        (words(20),),
        (words(20), words(9)),
        num_prompts=9,
        no_oversample=True,
    )
    plan = make_plan(config, ids)
    assert [each.prompt for each in plan.requests] == [words(20)]
    [note] = plan.notes
    assert note.startswith("4 of 5 examined entries were left out: ")
    for reason in (
        "1 with a prompt under 4 tokens",
        "1 with an output under 4 tokens",
        "1 with a prompt over 1024 tokens",
        "1 over 2048 tokens together",
    ):
        assert reason in note


def test_an_output_length_of_ones_own_lets_short_answers_in(tmp_path, ids):
    config = sharegpt(tmp_path, (words(20), "x"), num_prompts=1, output_len=77)
    [asked] = make_plan(config, ids).requests
    assert asked.max_tokens == 77


def test_what_exceeds_the_models_context_is_left_out_and_counted(tmp_path, tokenizer):
    config = sharegpt(tmp_path, (words(90), words(9)), (words(20), words(9)), no_oversample=True)
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=64)
    plan = make_plan(config, prompts)
    assert [each.prompt for each in plan.requests] == [words(20)]
    assert plan.notes == ["1 of 2 examined entries were left out: 1 over the model's 64 tokens"]


def test_if_all_is_left_out_the_reasons_are_told(tmp_path, tokenizer):
    config = sharegpt(tmp_path, (words(90), words(9)))
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=64)
    with pytest.raises(ConfigError, match=r"gives no requests.*over the model's 64 tokens"):
        make_plan(config, prompts)


def test_too_few_entries_are_asked_again_with_a_note(tmp_path, ids):
    config = sharegpt(tmp_path, (words(20), words(9)), (words(21), words(9)), num_prompts=7)
    plan = make_plan(config, ids)
    assert len(plan.requests) == 7
    assert [each.index for each in plan.requests] == list(range(7))
    [note] = plan.notes
    assert "2 usable entries: 5 requests repeat others" in note


def test_the_sample_is_drawn_by_the_seed_from_the_whole_file(tmp_path, ids):
    talks = [(words(10 + place), words(9)) for place in range(200)]

    def drawn(seed: int) -> list[str]:
        config = sharegpt(tmp_path, *talks, num_prompts=20, seed=seed)
        return [each.prompt for each in make_plan(config, ids).requests]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) == 20
    # From the whole file: more than half of some draw lies behind its first half.
    assert any(sum(len(each.split()) > 110 for each in drawn(seed)) > 10 for seed in range(5))


def test_a_file_of_few_good_entries_is_read_until_enough_are_found(tmp_path, ids):
    talks = [("fire", "x")] * 500 + [(words(20 + place), words(9)) for place in range(3)]
    plan = make_plan(sharegpt(tmp_path, *talks, num_prompts=3), ids)
    assert len({each.prompt for each in plan.requests}) == 3


def test_without_shuffling_the_files_order_is_kept(tmp_path, ids):
    talks = [(words(10 + place), words(9)) for place in range(30)]
    config = sharegpt(tmp_path, *talks, num_prompts=5, disable_shuffle=True)
    asked = [each.prompt for each in make_plan(config, ids).requests]
    assert asked == [talk[0] for talk in talks[:5]]


def test_sharegpt_for_chat_is_one_message_of_the_user(tmp_path, tokenizer):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.CHAT)
    [asked] = make_plan(sharegpt(tmp_path, (words(20), words(9)), num_prompts=1), prompts).requests
    assert asked.prompt == [{"role": "user", "content": words(20)}]
    assert asked.num_prompt_tokens == prompts.count(asked.prompt)


# ---- custom ----------------------------------------------------------------------------


def test_custom_lines_say_what_is_asked_and_how_much(tmp_path, ids):
    config = custom(
        tmp_path,
        {"prompt": "one two", "output_tokens": 5},
        "\n",
        {"prompt": [5, 6, 7], "max_tokens": 6},
        {"prompt": "three", "category": "ignored"},
    )
    requests = make_plan(config, ids).requests
    assert [(each.prompt, each.max_tokens) for each in requests] == [
        ("one two", 5),
        ([5, 6, 7], 6),
        ("three", 256),
    ]
    assert requests[1].num_prompt_tokens == 3


def test_an_output_length_of_ones_own_stands_above_the_files(tmp_path, ids):
    config = custom(
        tmp_path, {"prompt": "one", "output_tokens": 5}, custom=CustomConfig(output_len=9)
    )
    assert [each.max_tokens for each in make_plan(config, ids).requests] == [9]


def test_custom_messages_go_to_chat_as_they_are(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.CHAT)
    config = custom(tmp_path, {"messages": messages}, {"prompt": "hi"})
    asked = [each.prompt for each in make_plan(config, prompts).requests]
    assert asked == [messages, [{"role": "user", "content": "hi"}]]


def test_without_a_tokenizer_it_is_said_that_prompts_were_not_counted(tmp_path):
    prompts = PromptMaker(None, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=100)
    plan = make_plan(custom(tmp_path, {"prompt": "one"}), prompts)
    assert plan.requests[0].num_prompt_tokens is None
    assert plan.notes[0].startswith("1 prompts were not counted")


@pytest.mark.parametrize(
    ("line", "endpoint", "words"),
    [
        ({"promt": "x"}, "completions", "one of the fields 'prompt' and 'messages' is needed"),
        ({"prompt": 3}, "completions", "'prompt' is neither a string nor an array of token ids"),
        ({"prompt": []}, "completions", "'prompt' is neither a string nor an array of token ids"),
        ({"prompt": [1, True]}, "completions", "'prompt' is neither a string nor"),
        ({"prompt": ""}, "completions", "'prompt' is empty"),
        ({"prompt": [1]}, "chat", "use --endpoint completions"),
        ({"prompt": "x", "output_tokens": 0}, "completions", "'output_tokens' is 0; it must be"),
        ({"prompt": "x", "output_tokens": "9"}, "completions", "'output_tokens' is \"9\"; it must"),
        ({"prompt": "x", "output_tokens": 1, "max_tokens": 2}, "completions", "mean the same"),
        ({"messages": [{"role": "user", "content": "x"}]}, "completions", "use --endpoint chat"),
        ({"messages": []}, "chat", "'messages' is not an array"),
        ({"messages": [{"role": "user"}]}, "chat", r"'messages\[0\]' lacks 'role', or"),
        ("[1, 2]\n", "completions", "must be a JSON object"),
        ("nonsense\n", "completions", "this is not JSON"),
        pytest.param("[" * 100_000 + "\n", "completions", "this is not JSON", id="deep"),
    ],
)
def test_a_bad_line_is_refused_with_file_line_and_field(tmp_path, tokenizer, line, endpoint, words):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint(endpoint))
    config = custom(tmp_path, {"prompt": "good"}, line)
    with pytest.raises(ConfigError, match=f"file.jsonl, line 2: .*{words}"):
        make_plan(config, prompts)


# ---- traces ----------------------------------------------------------------------------


def test_equal_hash_ids_are_equal_tokens(tmp_path, ids):
    config = trace(
        tmp_path,
        request(100, 1100, hash_ids=(1, 2, 3)),
        request(300, 1200, hash_ids=(1, 2, 4)),
        request(400, 700, hash_ids=(9, 2)),
    )
    first, second, third = (each.prompt for each in make_plan(config, ids).requests)
    assert [len(first), len(second), len(third)] == [1100, 1200, 700]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1100]
    assert first[:512] != third[:512]
    assert first[512 : 512 + 188] == third[512:]


def test_a_part_without_a_hash_id_is_the_requests_own(tmp_path, ids):
    config = trace(
        tmp_path, request(0, 600, hash_ids=(1,)), request(1, 600, hash_ids=(1,)), block_size=512
    )
    first, second = (each.prompt for each in make_plan(config, ids).requests)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]


def test_times_count_from_the_first_line_and_are_scaled(tmp_path, ids):
    config = trace(tmp_path, request(5000), request(6000), request(9000), speedup=2.0)
    assert [each.at_s for each in make_plan(config, ids).requests] == [0.0, 0.5, 2.0]


def test_a_window_of_the_trace_begins_at_zero(tmp_path, ids):
    config = trace(
        tmp_path,
        *(request(1000 * second, num_output=second + 1) for second in range(10)),
        start_s=3,
        duration_s=4,
        speedup=2.0,
    )
    requests = make_plan(config, ids).requests
    assert [(each.at_s, each.max_tokens) for each in requests] == [
        (0.0, 4),
        (0.5, 5),
        (1.0, 6),
        (1.5, 7),
    ]


def test_a_trace_says_what_of_its_prompts_an_earlier_one_had(tmp_path, ids):
    config = trace(
        tmp_path,
        request(0, 1024, hash_ids=(1, 2)),
        request(1, 1536, hash_ids=(1, 2, 3)),
        request(2, 1024, hash_ids=(4, 2)),  # the second half of it is behind another first
        request(3, 512, hash_ids=(5,)),
    )
    assert " shared=25%" in make_plan(config, ids).description


def test_scaled_lengths_share_what_they_shared(tmp_path, ids):
    config = trace(
        tmp_path,
        request(0, 1100, 40, hash_ids=(1, 2, 3)),
        request(1, 1200, 4, hash_ids=(1, 2, 4)),
        length_scale=0.25,
    )
    first, second = make_plan(config, ids).requests
    assert (len(first.prompt), len(second.prompt)) == (275, 300)
    assert (first.max_tokens, second.max_tokens) == (10, 1)
    assert first.prompt[:256] == second.prompt[:256]
    assert first.prompt[256:] != second.prompt[256:275]


def test_the_trace_is_played_for_chat_with_exact_counts(tmp_path, tokenizer):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.CHAT)
    config = trace(tmp_path, request(0, 515), request(1, 512, hash_ids=(1,)))
    for each in make_plan(config, prompts).requests:
        assert prompts.count(each.prompt) == each.num_prompt_tokens


def test_requests_of_a_trace_over_the_models_context_are_left_out_and_counted(tmp_path, tokenizer):
    prompts = PromptMaker(tokenizer, endpoint=ApiEndpoint.COMPLETIONS, max_model_len=1000)
    config = trace(tmp_path, request(0), request(10, 1024), request(20))
    plan = make_plan(config, prompts)
    assert [each.at_s for each in plan.requests] == [0.0, 0.02]
    assert [each.index for each in plan.requests] == [0, 1]
    [note] = plan.notes
    assert note.startswith(
        "1 of 3 requests of the trace were left out because they exceed the model's 1000"
    )


def test_a_trace_that_is_longer_than_asked_for_says_so(tmp_path, ids):
    config = trace(tmp_path, *(request(ms) for ms in range(5)), num_prompts=3)
    plan = make_plan(config, ids)
    assert len(plan.requests) == 3
    assert plan.notes == ["the trace is longer: its first 3 requests were sent (--num-prompts)"]


def csv_trace(tmp_path, *rows: str, **fields) -> DatasetConfig:
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows) + "\n")
    return DatasetConfig(name=DatasetName.TRACE, path=str(path), **fields)


@pytest.mark.parametrize(
    "rows",
    [
        (
            "TIMESTAMP,ContextTokens,GeneratedTokens",
            "2023-11-16 18:17:03.9799600,374,44",
            "2023-11-16 18:17:04.4799600,396,1",
        ),
        ("arrived_at,num_prefill_tokens,num_decode_tokens", "7.25,374,44", "7.75,396,1"),
        ("num_decode_tokens, num_prefill_tokens, x, arrived_at", "44,374,a,0", "", "1,396,b,0.5"),
    ],
)
def test_a_table_of_times_and_lengths_is_a_trace_too(tmp_path, ids, rows):
    first, second = make_plan(csv_trace(tmp_path, *rows), ids).requests
    assert (first.at_s, second.at_s) == (0.0, pytest.approx(0.5))
    assert (len(first.prompt), len(second.prompt)) == (374, 396)
    assert (first.max_tokens, second.max_tokens) == (44, 1)
    assert first.prompt[0:374] != second.prompt[0:374]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (("at,in,out", "0,1,1"), "line 1: the columns are at,in,out, but must be TIMESTAMP,"),
        ((), "line 1: the columns are missing"),
        (("noon,1,1",), "line 2: 'noon' is not a time; write seconds"),
        (("nan,1,1",), "line 2: 'nan' is not a time"),
        (
            ("1,1,1", "0,1,1"),
            "line 3: the field 'timestamp' is 0, earlier than 1000 in the line above",
        ),
        (("0,1",), "line 2: the row has 2 of 3 columns"),
        (("0,-3,1",), "line 2: the field 'input_length' is \"-3\"; it must be a whole number"),
        (("0,3,0",), "line 2: the field 'output_length' is 0; it must be at least 1"),
        ((f"0,3,1,{'x' * 200_000}",), "line 2: this is not CSV (field larger than field limit"),
    ],
)
def test_a_bad_row_of_a_table_is_refused(tmp_path, ids, rows, words):
    if rows and rows[0] != "at,in,out":
        rows = ("arrived_at,num_prefill_tokens,num_decode_tokens", *rows)
    with pytest.raises(ConfigError) as refused:
        make_plan(csv_trace(tmp_path, *rows), ids)
    assert f"trace.csv, {words}" in str(refused.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({**request(1), "timestamp": "1"}, "'timestamp' is not a number"),
        (
            {**request(1), "timestamp": -5},
            "'timestamp' is -5, earlier than 0 in the line above; sort",
        ),
        ({**request(1), "input_length": 0}, "'input_length' is 0; it must be at least 1"),
        ({**request(1), "output_length": None}, "'output_length' is null; it must be a whole"),
        ({**request(1), "hash_ids": None}, "'hash_ids' is missing"),
        ({**request(1), "hash_ids": [1.5]}, "'hash_ids' is not an array of whole numbers"),
        (request(1, 5000), "2 ids for 5000 tokens; 512 tokens per id make 10 ids: set --trace-bl"),
    ],
)
def test_a_bad_line_of_a_trace_is_refused(tmp_path, ids, line, words):
    with pytest.raises(ConfigError, match=f"file.jsonl, line 2: .*{words}"):
        make_plan(trace(tmp_path, request(0), line), ids)


# ---- reading ---------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1 << 20])
def test_an_array_is_read_the_same_in_pieces_of_any_size(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(reading, "_CHUNK_CHARS", chunk)
    entries = [{"a": [1, {"b": "x]},{\n"}]}, {}, {"c": "ü"}]
    path = tmp_path / "array.json"
    path.write_text(" \n" + json.dumps(entries, indent=1, ensure_ascii=False) + "\n")
    read = list(json_array(path))
    assert [each.fields for each in read] == entries
    assert [each.line for each in read] == [3, 11, 12]


def test_an_empty_array_has_no_entries(tmp_path):
    path = tmp_path / "array.json"
    path.write_text("[ ]")
    assert list(json_array(path)) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1}', "line 1: the file is not a JSON array"),
        ("", "line 1: the file is not a JSON array"),
        ('[{"a": 1},\n 5]', "line 2: an entry of the array is 5"),
        ('[{"a": 1}\n {"b": 2}]', "line 2: '{' stands between two entries"),
        ('[{"a": 1}\n', "line 2: the file ends inside its array"),
        ('[{"a":\n nonsense}]', "line 2: this is not JSON"),
        ('[{"a": 1}, {"b"', "line 1: this is not JSON"),
        pytest.param('[{"a": ' + "[" * 100_000, "line 1: an entry is nested too deeply", id="deep"),
    ],
)
def test_a_broken_array_is_refused_with_its_line(tmp_path, text, words):
    path = tmp_path / "array.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"array.json, {words}"):
        list(json_array(path))


def test_a_turn_without_text_is_refused_by_name(tmp_path, ids):
    path = tmp_path / "talks.json"
    path.write_text('[{"conversations": [{"from": "x"}, {"value": "y"}]}]')
    config = DatasetConfig(name=DatasetName.SHAREGPT, path=str(path))
    with pytest.raises(ConfigError, match=r"line 1: the field 'conversations\[0\].value'"):
        make_plan(config, ids)


def test_a_file_without_conversations_is_refused_by_name(tmp_path, ids):
    path = tmp_path / "talks.json"
    path.write_text('[{"messages": []}]')
    config = DatasetConfig(name=DatasetName.SHAREGPT, path=str(path))
    with pytest.raises(ConfigError, match="the field 'conversations' is missing; ShareGPT's"):
        make_plan(config, ids)


@pytest.mark.parametrize("read", [json_lines, json_array])
def test_files_that_are_none_are_refused_with_their_remedy(tmp_path, read):
    with pytest.raises(ConfigError, match="No such file"):
        list(read(tmp_path / "none"))
    with pytest.raises(ConfigError, match="Is a directory"):
        list(read(tmp_path))
    pointer = tmp_path / "pointer"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        list(read(pointer))
    packed = tmp_path / "packed.gz"
    packed.write_bytes(b"\x1f\x8b\x08\xff\xfe" * 9)
    with pytest.raises(ConfigError, match="not UTF-8"):
        list(read(packed))


def test_a_large_file_is_never_held_in_memory(tmp_path):
    path = tmp_path / "large.json"
    entry = json.dumps({"conversations": [{"value": "x" * 5000}, {"value": "y" * 5000}]})
    path.write_text("[" + ",\n".join([entry] * 3000) + "]")
    assert path.stat().st_size > 30_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in json_array(path)) == 3000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 12_000_000


def test_a_plan_from_a_file_is_the_same_again_byte_for_byte(tmp_path, ids):
    config = custom(
        tmp_path,
        *({"prompt": f"number {place}"} for place in range(50)),
        num_prompts=70,
        disable_shuffle=False,
        no_oversample=False,
        seed=3,
    )
    first, second = (msgspec.json.encode(make_plan(config, ids)) for _ in range(2))
    assert first == second
