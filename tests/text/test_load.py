from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from pdserve.config.schema import ModelConfig
from pdserve.errors import BadRequestError, ConfigError
from pdserve.text.chat import ChatTemplate
from pdserve.text.grammar import GrammarCompiler
from pdserve.text.load import load_text
from pdserve.text.tokenizer import Tokenizer
from tests.text.tiny import CHAT_TEMPLATE, make_tokenizer, write_model_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    return write_model_files(tmp_path / "model")


def load(model_dir: Path, **settings: str):
    return load_text(ModelConfig(model=str(model_dir), **settings))


def test_a_model_directory_gives_tokenizer_template_and_end_ids(model_dir: Path):
    text = load(model_dir)
    assert text.tokenizer.eos_token_id == 1
    assert text.tokenizer.bos_token_id == 0
    assert text.defaults.eos_token_ids == (1,)
    assert text.chat_template is not None
    assert text.vocab_size == text.tokenizer.vocab_size


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_encoding_and_decoding_give_the_text_back(kind: str):
    tokenizer = make_tokenizer(kind)
    assert tokenizer.decode(tokenizer.encode("The dog 🙂.")) == "The dog 🙂."


def test_special_tokens_are_added_only_when_asked_for():
    tokenizer = make_tokenizer("byte_fallback")
    plain = tokenizer.encode("dog", add_special_tokens=False)
    assert tokenizer.encode("dog") == [tokenizer.bos_token_id, *plain]


def test_token_bytes_joined_are_the_text():
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = make_tokenizer(kind)
        token_ids = tokenizer.encode("a dog 🙂", add_special_tokens=False)
        spelled = b"".join(tokenizer.token_bytes(token_id) for token_id in token_ids)
        assert spelled.decode().lstrip() == "a dog 🙂"


def test_the_generation_config_sets_defaults_and_end_ids(model_dir: Path):
    config = {"temperature": 0.6, "top_k": 20, "eos_token_id": [3, 1], "max_new_tokens": 7}
    (model_dir / "generation_config.json").write_text(json.dumps(config))
    defaults = load(model_dir).defaults
    assert (defaults.temperature, defaults.top_k, defaults.max_new_tokens) == (0.6, 20, 7)
    assert defaults.eos_token_ids == (1, 3)


def test_generation_config_none_keeps_only_the_end_ids(model_dir: Path):
    config = {"temperature": 0.6, "eos_token_id": 3}
    (model_dir / "generation_config.json").write_text(json.dumps(config))
    defaults = load(model_dir, generation_config="none").defaults
    assert (defaults.temperature, defaults.eos_token_ids) == (1.0, (1, 3))


def test_a_generation_config_of_the_wrong_type_is_refused(model_dir: Path):
    (model_dir / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ConfigError, match="temperature"):
        load(model_dir)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.5),
        ("top_p", 0),
        ("top_k", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
    ],
)
def test_a_default_that_no_request_could_ask_for_is_refused(
    model_dir: Path, name: str, value: float
):
    (model_dir / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ConfigError, match=rf"{name}.*--generation-config none"):
        load(model_dir)


def test_what_a_generation_config_asks_for_and_is_not_done_is_named(model_dir: Path):
    asked = {"suppress_tokens": [3], "num_beams": 4, "typical_p": 1.0, "bad_words_ids": None}
    (model_dir / "generation_config.json").write_text(json.dumps({"top_p": 0.9, **asked}))
    assert load(model_dir, generation_config="none").not_applied == ()
    assert load(model_dir).not_applied == ("num_beams", "suppress_tokens")


def test_a_greedy_or_watermarked_model_is_not_sampled_in_silence(model_dir: Path):
    asked = {"do_sample": False, "top_h": 0.4, "watermarking_config": {"bias": 2.0}}
    (model_dir / "generation_config.json").write_text(json.dumps(asked))
    assert load(model_dir).not_applied == ("do_sample", "top_h", "watermarking_config")


def test_end_ids_that_the_tokenizer_lacks_do_not_stand_in_the_way_of_grammars(model_dir: Path):
    (model_dir / "generation_config.json").write_text('{"eos_token_id": [-1, 1, 99999]}')
    compiler = GrammarCompiler(load(model_dir))
    assert compiler.compile('start: "a"').compute_bitmask()


def test_a_tokenizer_at_which_llguidance_panics_follows_no_grammar(tmp_path: Path):
    directory = write_model_files(tmp_path / "model", kind="byte_fallback")
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace('"<0x41>"', '"<0xg>"'))
    with pytest.raises(ConfigError, match="llguidance cannot use"):
        GrammarCompiler(load(directory))


def test_a_directory_without_tokenizer_names_the_flag(tmp_path: Path):
    with pytest.raises(ConfigError, match="--tokenizer"):
        load(tmp_path)


def test_an_lfs_pointer_is_named_as_one(model_dir: Path):
    (model_dir / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ConfigError, match="git lfs pull"):
        load(model_dir)


def test_a_json_file_that_is_no_tokenizer_is_refused(model_dir: Path):
    (model_dir / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load(model_dir)


def test_a_template_file_beside_the_model_wins_over_its_config(model_dir: Path):
    (model_dir / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_directory(model_dir).chat_template == "from the file"


def test_json_that_is_nested_without_end_is_named(model_dir: Path):
    (model_dir / "tokenizer_config.json").write_text("[" * 10**5)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not valid JSON"):
        load(model_dir)


def test_named_templates_give_the_default_one(model_dir: Path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_directory(model_dir).chat_template == "d"
    assert Tokenizer.from_directory(model_dir).tool_template == "t"


def render(source: str, *messages: dict, **variables) -> str:
    template = ChatTemplate(source, {"eos_token": "</s>"})
    return template.render(messages, now_s=86400.0, variables=variables)


def test_a_conversation_renders_as_the_template_says():
    prompt = render(CHAT_TEMPLATE, {"role": "user", "content": "hi"})
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", {"role": "user", "content": parts}) == "a\nb"


def test_what_templates_of_hugging_face_use_is_there():
    source = """\
{% for message in messages %}
    {% if loop.index > 1 %}{% break %}{% endif %}
    {% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{{ {"a": "<é>"} | tojson }}{{ eos_token }}{{ strftime_now("%Y") }}{{ extra }}"""
    message = {"role": "user", "content": "x"}
    assert render(source, message, message, extra=1) == 'x{"a": "<é>"}</s>19701'


def test_what_is_set_where_a_template_marks_generation_is_not_seen_behind_it():
    source = "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}"
    assert render(source) == "21"  # as transformers renders it


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "robot", "content": "x"}, "use one of system, developer, user"),
        ({"role": "function", "content": "x"}, "the role function is not known"),
        ({"content": "x"}, "role must be a string"),
        ({"role": "user", "content": 3}, "content must be"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "image_url"),
    ],
)
def test_messages_that_cannot_be_rendered_name_the_field(message: dict, words: str):
    with pytest.raises(BadRequestError, match=words) as raised:
        render(CHAT_TEMPLATE, message)
    assert raised.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].nothing.more }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_is_a_bad_request_and_not_a_crash(source: str):
    with pytest.raises(BadRequestError):
        render(source, {"role": "user", "content": "x"})


@pytest.fixture
def time_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Puts this host into another time zone."""

    def move_to(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield move_to
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize("form", ["%d %b %Y", "%H:%M", "%Z %z", "%s", "%%s"])
def test_a_date_is_the_same_on_hosts_in_different_time_zones(
    form: str, time_zone: Callable[[str], None]
):
    template = ChatTemplate("{{ strftime_now(form) }}", {})
    shown = set()
    for name in ("UTC", "Pacific/Kiritimati", "America/Los_Angeles"):
        time_zone(name)
        shown.add(template.render([], now_s=1700000000.0, variables={"form": form}))
    assert len(shown) == 1


@pytest.mark.parametrize("source", ["{{ [1, 2, 3] | random }}", "{{ lipsum() }}"])
def test_a_template_that_draws_at_random_is_refused(source: str):
    with pytest.raises((ConfigError, BadRequestError)):
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}], now_s=0.0)


def test_a_date_that_no_calendar_has_is_a_bad_request_and_not_a_crash():
    template = ChatTemplate("{{ strftime_now('%Y') }}", {})
    with pytest.raises(BadRequestError):
        template.render([{"role": "user", "content": "x"}], now_s=1e18)


def test_a_template_that_is_not_jinja_is_a_config_error(model_dir: Path):
    (model_dir / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="line 1"):
        load(model_dir)


def test_a_template_that_is_not_utf8_is_named(model_dir: Path, tmp_path: Path):
    given, own = tmp_path / "mine.jinja", model_dir / "chat_template.jinja"
    given.write_bytes("grüße".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"mine\.jinja cannot be read: it is not UTF-8"):
        load(model_dir, chat_template=str(given))
    own.write_bytes(given.read_bytes())
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read: it is not UTF-8"):
        load(model_dir)


def test_a_template_file_may_be_given(model_dir: Path, tmp_path: Path):
    path = tmp_path / "mine.jinja"
    path.write_text("mine")
    text = load(model_dir, chat_template=str(path))
    assert text.chat_template is not None
    assert text.chat_template.render([{"role": "user", "content": ""}], now_s=0) == "mine"


def test_a_role_that_a_template_speaks_of_is_known_and_no_other_is():
    source = "{% set m = messages[0] %}{{ 'o' if m.role == 'observation' }}{{ m.role }}"
    assert render(source, {"role": "observation", "content": ""}) == "oobservation"
    for role in ("robot", "", "' == '"):
        with pytest.raises(BadRequestError, match=r"messages\[0\]\.role is"):
            render(source, {"role": role, "content": ""})
