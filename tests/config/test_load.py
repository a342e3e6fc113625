from __future__ import annotations

import enum
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.load import Source, Table, build, resolve, unknown_variables, variable
from pdserve.config.setting import Shorthand, declare, parse, parse_int, parse_object
from pdserve.errors import ConfigError


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct, frozen=True, kw_only=True):
    depth: int = 1
    names: tuple[str, ...] = ()


class Outer(msgspec.Struct, frozen=True, kw_only=True):
    size: int = 7
    limit: int | None = None
    share: float = 0.5
    is_on: bool = True
    title: str = ""
    colour: Colour = Colour.RED
    inner: Inner = Inner()


SETTINGS = declare(
    "outer",
    Outer,
    "group",
    (
        ("size", "size", "N", ""),
        ("limit", "limit", "N", ""),
        ("share", "share", "X", ""),
        ("is-on", "is_on", "", ""),
        ("title", "title", "TEXT", ""),
        ("colour", "colour", "red|blue", ""),
        ("inner.depth", "inner.depth", "N", ""),
        ("inner.names", "inner.names", "NAME", ""),
    ),
)
INNER = Shorthand("inner", lambda raw: {f"inner.{k}": v for k, v in parse_object(raw).items()})
TABLE = Table(SETTINGS, (INNER,))
BY_FLAG = {setting.flag: setting for setting in SETTINGS}


def test_without_any_source_the_struct_has_its_own_defaults() -> None:
    assert build("outer", Outer, TABLE, resolve(TABLE, command_line={}, environ={})) == Outer()


def test_a_table_may_replace_a_default() -> None:
    table = Table(SETTINGS, (INNER,), {"size": 9})
    assert build("outer", Outer, table, resolve(table, command_line={}, environ={})).size == 9


@given(sources=st.sets(st.sampled_from(list(Source)[:3])), data=st.data())
def test_the_first_source_that_has_a_value_wins(
    sources: set[Source], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    values = {source: data.draw(st.integers(0, 99), label=str(source)) for source in Source}
    file = tmp_path_factory.mktemp("config") / "x.yaml"
    file.write_text(f"size: {values[Source.FILE]}" if Source.FILE in sources else "")
    resolved = resolve(
        TABLE,
        command_line={"size": values[Source.COMMAND_LINE]}
        if Source.COMMAND_LINE in sources
        else {},
        file=file,
        environ={"PDSERVE_SIZE": str(values[Source.ENVIRONMENT])}
        if Source.ENVIRONMENT in sources
        else {},
    )
    winner = next((source for source in Source if source in sources), Source.DEFAULT)
    expected = 7 if winner is Source.DEFAULT else values[winner]
    assert (resolved["size"].value, resolved["size"].source) == (expected, winner)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written anew for each example: a folder for each takes longer than all else."""
    return tmp_path_factory.mktemp("config") / "x.yaml"


@given(
    raw=st.fixed_dictionaries(
        {},
        optional={
            "size": st.integers(-10, 10),
            "limit": st.none() | st.integers(0, 10),
            "share": st.floats(allow_nan=False),
            "is-on": st.booleans(),
            "title": st.text(st.characters(min_codepoint=48, max_codepoint=122)),
            "colour": st.sampled_from(["red", "blue"]),
            "inner.names": st.lists(st.from_regex("[a-z]{1,5}", fullmatch=True), min_size=1),
        },
    )
)
def test_the_environment_and_the_file_mean_the_same(raw: dict[str, object], file: Path) -> None:
    import yaml

    file.write_text(yaml.safe_dump(raw))

    def text(value: object) -> str:
        if isinstance(value, list):
            return ",".join(value)
        return "auto" if value is None else str(value)

    environ = {variable(flag): text(value) for flag, value in raw.items()}
    by_file = build("outer", Outer, TABLE, resolve(TABLE, command_line={}, file=file, environ={}))
    by_environ = build("outer", Outer, TABLE, resolve(TABLE, command_line={}, environ=environ))
    assert by_file == by_environ


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-1", -1),
        ("512", 512),
        ("1k", 1000),
        ("25.6k", 25_600),
        ("2M", 2 << 20),
        ("2m", 2_000_000),
        ("1GiB", 1 << 30),
        ("64 KiB", 65_536),
        ("1.5GiB", 3 << 29),
    ],
)
def test_numbers_may_have_a_multiplier(text: str, value: int) -> None:
    assert parse_int(text) == value


@pytest.mark.parametrize(
    "text", ["", "k", "1.5", "1kib", "1 KB", "0x10", "1e3", "１", "1_000", "--1"]
)
def test_what_is_no_whole_number_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse_int(text)


@given(st.integers(0, 10**6), st.sampled_from("kmgtKMGT"))
def test_a_multiplied_number_is_its_product(number: int, suffix: str) -> None:
    base = 1000 if suffix.islower() else 1024
    assert parse_int(f"{number}{suffix}") == number * base ** ("kmgt".index(suffix.lower()) + 1)


@pytest.mark.parametrize(
    ("flag", "raw"),
    [
        ("size", True),
        ("size", 1 << 64),
        ("size", "99999999T"),
        ("size", 1.5),
        ("size", None),
        ("share", "many"),
        ("share", False),
        ("share", 10**400),
        ("is-on", "perhaps"),
        ("is-on", 2),
        ("title", 5),
        ("title", None),
        ("colour", "green"),
        ("inner.names", [1]),
        ("inner.names", "[1"),
        ("inner.names", 100_000 * "["),
        ("inner.names", {"a": 1}),
    ],
)
def test_a_value_of_another_type_is_refused(flag: str, raw: object) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse(BY_FLAG[flag], raw)


def test_a_variable_may_name_a_file_that_holds_the_value(tmp_path: Path) -> None:
    file = tmp_path / "title"
    file.write_text("from a file\n")
    environ = {"PDSERVE_TITLE_FILE": str(file)}
    found = resolve(TABLE, command_line={}, environ=environ)["title"]
    assert (found.value, found.source) == ("from a file", Source.ENVIRONMENT)
    assert unknown_variables(TABLE, [], environ) == []
    environ["PDSERVE_TITLE"] = "itself"
    assert resolve(TABLE, command_line={}, environ=environ)["title"].value == "itself"
    with pytest.raises(ConfigError, match="PDSERVE_TITLE_FILE is /nowhere, which cannot be read"):
        resolve(TABLE, command_line={}, environ={"PDSERVE_TITLE_FILE": "/nowhere"})


def test_a_list_on_the_command_line_may_be_json_as_vllm_takes_it() -> None:
    for raw, names in ((['["a,b", "c"]'], ("a,b", "c")), (["a", "b"], ("a", "b"))):
        assert parse(BY_FLAG["inner.names"], raw) == names


def test_a_list_in_the_environment_may_be_json_where_items_hold_commas() -> None:
    assert parse(BY_FLAG["inner.names"], '["a,b", "c"]') == ("a,b", "c")


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "engine.yaml"
    path.write_text(text)
    return path


def test_an_unknown_key_is_refused_and_the_nearest_flag_named(tmp_path: Path) -> None:
    file = _file(tmp_path, "colur: red")
    with pytest.raises(ConfigError, match=r"colur in .*engine.yaml.*did you mean colour"):
        resolve(TABLE, command_line={}, file=file, environ={})


def test_an_unknown_key_of_an_object_is_refused(tmp_path: Path) -> None:
    file = _file(tmp_path, "inner: {dept: 3}")
    with pytest.raises(ConfigError, match=r"inner.dept .*did you mean inner.depth"):
        resolve(TABLE, command_line={}, file=file, environ={})


def test_a_wrong_value_is_refused_with_the_place_it_came_from(tmp_path: Path) -> None:
    said = r"size in .*engine.yaml, line 2: 'x' is not a whole number"
    with pytest.raises(ConfigError, match=said):
        resolve(TABLE, command_line={}, file=_file(tmp_path, "# so\nsize: x"), environ={})
    with pytest.raises(ConfigError, match=r"PDSERVE_SIZE: 'x' is not a whole number"):
        resolve(TABLE, command_line={}, environ={"PDSERVE_SIZE": "x"})


def test_keys_may_be_written_with_dashes_or_underscores(tmp_path: Path) -> None:
    resolved = resolve(TABLE, command_line={}, file=_file(tmp_path, "is_on: false"), environ={})
    assert resolved["is-on"].value is False


@pytest.mark.parametrize("text", ["size: 1\nsize: 2", "is_on: true\nis-on: false"])
def test_a_key_given_twice_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"twice|same setting"):
        resolve(TABLE, command_line={}, file=_file(tmp_path, text), environ={})


@pytest.mark.parametrize(
    "raw", ['{"depth": 1, "depth": 2}', '{"a_b": 1, "a-b": 2}', {"a_b": 1, "a-b": 2}]
)
def test_a_key_given_twice_in_an_object_is_refused(raw: object) -> None:
    with pytest.raises(ConfigError, match=r"--inner: the key .* is given twice"):
        resolve(TABLE, command_line={"inner": raw}, environ={})


@pytest.mark.parametrize("raw", ['{"depth": NaN}', '{"depth": ' + 100_000 * "["])
def test_an_object_that_only_python_reads_is_refused(raw: str) -> None:
    with pytest.raises(ConfigError, match=r"--inner: .*is not JSON"):
        resolve(TABLE, command_line={"inner": raw}, environ={})


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("colour: red\nsize: [1\nis-on: true", "line 2 (size)"),
        ("colour: red\nsize 3\n", "line 2 (size)"),
        ("colour: 'red\nsize: 3\n", "line 1 (colour)"),
        ("colour: red\nsize: 3: 4\n", "line 2 (size)"),
        ("colour: red\ninner:\n  depth: 3\n names: a\n", "line 4 (inner)"),
        ("size: 1\ncolour: red\nsize: 2", "line 3 (size)"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_line_and_its_setting(
    tmp_path: Path, text: str, place: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"engine.yaml, {place}: ")):
        resolve(TABLE, command_line={}, file=_file(tmp_path, text), environ={})


@pytest.mark.parametrize("text", ["- a\n- b", "just words", "size: [", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.yaml"):
        resolve(TABLE, command_line={}, file=_file(tmp_path, text), environ={})


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    resolved = resolve(TABLE, command_line={}, file=_file(tmp_path, "# nothing\n"), environ={})
    assert all(item.source is Source.DEFAULT for item in resolved.values())


def test_an_object_and_its_dotted_keys_fill_the_same_struct() -> None:
    resolved = resolve(
        TABLE, command_line={"inner": '{"depth": 2, "names": ["a"]}', "inner.depth": 5}, environ={}
    )
    assert build("outer", Outer, TABLE, resolved).inner == Inner(depth=5, names=("a",))


def test_an_object_of_a_weaker_source_fills_only_what_is_left(tmp_path: Path) -> None:
    file = _file(tmp_path, "inner: {depth: 2, names: [a]}")
    resolved = resolve(TABLE, command_line={"inner.depth": 5}, file=file, environ={})
    assert build("outer", Outer, TABLE, resolved).inner == Inner(depth=5, names=("a",))
