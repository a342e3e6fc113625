"""The command line: parse, resolve the settings, run one command.

A thin layer over argparse: `_` and `-` are the same in flags, `--x/--no-x` for switches,
`2k` and `1GiB` for numbers, `--config FILE.yaml` with the flags as keys, and JSON flags
also by dots (`--kv-transfer-config.kv-connector nixl`). Nothing heavy is imported before
the arguments are known to be right: help and usage errors come at once.

Exit codes: 0 done; 1 a bug of pdserve, or a failed check of the doctor; 2 usage; 3 a
setting or a model that cannot be used; 4 a peer that was unreachable at start; 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import importlib
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import pdserve
from pdserve.commands.announce import tell_failure, tell_note
from pdserve.commands.catalogue import COMMANDS, FAMILIES, Command
from pdserve.commands.exit_codes import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_PEER,
    EXIT_USAGE,
)
from pdserve.config.load import Resolved, Table, did_you_mean, resolve, unknown_variables
from pdserve.config.setting import Required, Setting, Shorthand, canonical, parse
from pdserve.config.settings import SHORT
from pdserve.config.vllm.answers import unread
from pdserve.config.vllm.commands import ABSENT_COMMANDS
from pdserve.errors import ConfigError, PdserveError, PeerError, refused_process
from pdserve.lifeline import end_with_supervisor

MODEL_HELP: Final = (
    "a directory in Hugging Face format, a model on the hub, or the word boxed for the model that "
    "comes with pdserve"
)

_WANTED_DESCRIPTORS: Final = 65536
_LEAST_DESCRIPTORS: Final = 128
"""An engine of a pair does not start with 32, and 64 leave little room for streams."""
_OUTPUT_LOST: Final = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a standard stream that leads into a closed pipe or a file without room."""
_PATH_REFUSED: Final = (
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENAMETOOLONG,
)
"""Errors of a path that this process may not look at, or where it may or can write nothing."""
WITHOUT_FLAG: Final = ("engines", "files", "filters", "requests")
"""Settings whose words stand behind the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    end_with_supervisor()
    max_descriptors = _raise_descriptor_limit()
    arguments = normalise(sys.argv[1:] if argv is None else argv)
    parser = make_parser()
    if (refusal := _of_vllm_alone(arguments)) is not None:
        parser.error(refusal)
    _require_command(parser, arguments)
    given = vars(parser.parse_args(arguments))
    name = given.pop("command", None)
    if name is None:
        parser.print_help()
        return EXIT_USAGE
    if name in FAMILIES:
        word = given.pop("subcommand", None)
        if word is None:
            with contextlib.suppress(SystemExit):
                parser.parse_args([name, "--help"])
            return EXIT_USAGE
        name = f"{name} {word}"
    command = next(command for command in COMMANDS if command.name == name)
    try:
        if max_descriptors < _LEAST_DESCRIPTORS:
            raise ConfigError(
                f"the limit of open files is {max_descriptors}, and at least {_LEAST_DESCRIPTORS} "
                "are needed: raise it with ulimit -n, LimitNOFILE= or docker run --ulimit nofile="
            )
        _require_directory()
        table = command.table()
        resolved = settings_of(table, given, os.environ)
        if command.takes_model and not resolved["model"].value:
            parser.error(
                f"MODEL is missing: pdserve {name} MODEL, where MODEL is a directory in Hugging "
                "Face format, or the word boxed for the model that comes with pdserve"
            )
        if command.logs:
            from pdserve.commands.running import start_logging

            start_logging(name, table, resolved)
        for note in _notes(table, resolved):
            tell_note(note)
        module, function = command.target.split(":")
        run: Callable[[Table, Mapping[str, Resolved]], int] = getattr(
            importlib.import_module(module), function
        )
        return run(table, resolved)
    except PdserveError as error:
        tell_failure(name, error)
        if isinstance(error, ConfigError):
            return EXIT_CONFIG
        return EXIT_PEER if isinstance(error, PeerError) else EXIT_FAILED
    except (RuntimeError, BlockingIOError) as error:
        if not (refusal := refused_process(error)):
            raise
        tell_failure(name, PdserveError(refusal))
        return EXIT_FAILED
    except OSError as error:
        if error.filename is not None and error.errno in _PATH_REFUSED:
            tell_failure(name, ConfigError(f"{error.filename} cannot be used: {error.strerror}"))
            return EXIT_CONFIG
        if error.filename is not None or error.errno not in _OUTPUT_LOST:
            raise
        with open(os.devnull, "w") as nowhere, contextlib.suppress(OSError):
            os.dup2(nowhere.fileno(), sys.stdout.fileno())  # what is left is not tried at the end
            tell_failure(name, PdserveError(f"the output cannot be written: {error.strerror}"))
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _require_directory() -> None:
    """Refuse a working directory that is gone: MKL, which torch loads, would end the process."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the working directory was deleted, and torch does not load there: start from another"
        ) from None


def _notes(table: Table, resolved: Mapping[str, Resolved]) -> list[str]:
    """Return a sentence for whatever somebody set without effect."""
    others = [each.table() for each in COMMANDS]
    ours = unknown_variables(table, others, os.environ)
    return [*ours, *table.notes(resolved), *(unread(os.environ) if table.absent else ())]


def _require_command(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """End with the usage if the first words are no command, and name the nearest that is one."""
    first, second = (*arguments, "", "")[:2]
    known = [command.name for command in COMMANDS if command.family == first]
    words = [first, second] if known else [first]
    known = known or sorted({command.family or command.name for command in COMMANDS})
    typed = " ".join(words)
    if words[-1] and not words[-1].startswith("-") and typed not in known:
        hint = did_you_mean(typed, known) or "."
        parser.error(f"there is no command {typed!r}{hint} There are: {', '.join(known)}")


def _of_vllm_alone(arguments: Sequence[str]) -> str | None:
    """Say what to do in place of a command that only vLLM has; None if it is none."""
    for name in (" ".join(arguments[:2]), *arguments[:1]):
        if name in ABSENT_COMMANDS:
            return f"vLLM's `{name}` is not supported: {ABSENT_COMMANDS[name]}"
    return None


def _raise_descriptor_limit() -> int:
    """Let this process and those it starts open as many descriptors as the system permits.

    Each stream and each peer takes some, and shells give out 1024.

    Returns:
        How many it may open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < min(hard, _WANTED_DESCRIPTORS):
        soft = min(hard, _WANTED_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft


def settings_of(
    table: Table, given: Mapping[str, object], environ: Mapping[str, str]
) -> dict[str, Resolved]:
    """Resolve a command's settings from its parsed flags, the file they name, and `environ`."""
    flags = {flag: value for flag, value in given.items() if flag != "config"}
    config = given.get("config")
    file = Path(str(config)) if config is not None else None
    return resolve(table, command_line=flags, file=file, environ=environ)


def normalise(argv: Sequence[str]) -> list[str]:
    """Write every flag's name with dashes; its value and what follows `--` stay as they are.

    vLLM writes a further item of a list with a + behind the flag: here every item is a further one.
    What `vllm-flags` looks for may have its dashes.
    """
    if argv and argv[0] == "vllm-flags":
        return [each if each in ("-h", "--help") else each.lstrip("-") for each in argv]
    result: list[str] = []
    for index, word in enumerate(argv):
        if word == "--":
            return [*result, *argv[index:]]
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            if name == "--help":  # vLLM's names a group or a flag: all of them are shown
                equals = value = ""
            word = canonical(name).removesuffix("+") + equals + value
        result.append(word)
    return result


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="pdserve",
        description="Serve language models with prefill and decode on separate engines.",
        epilog="Begin with: pdserve up",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"pdserve {pdserve.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    families = {"": commands}
    for command in COMMANDS:
        if command.family not in families:
            families[command.family] = _add_family(commands, command.family)
        child = families[command.family].add_parser(
            command.last_word,
            usage=f"pdserve {command.name} {command.positional}[flags]",
            help=command.summary,
            description=command.summary[0].upper() + command.summary[1:] + ".",
            epilog=f"Example: {command.example}",
            allow_abbrev=False,
            argument_default=argparse.SUPPRESS,
        )
        child.asked = command
    return parser


def _add_family(commands: _Commands, name: str) -> _Commands:
    """Add the first word of commands of two words."""
    summary = FAMILIES[name]
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"Each has its flags: pdserve {name} COMMAND --help",
        allow_abbrev=False,
    )
    return parser.add_subparsers(dest="subcommand", metavar="COMMAND", parser_class=_Parser)


class _Parser(argparse.ArgumentParser):
    """Takes a command's flags in when it is asked; says what to do about one that is unknown.

    Attributes:
        asked: Its command, of which it has no flag yet; None of a parser without flags.
        table: The settings of its command, once it has their flags.
    """

    asked: Command | None = None
    table: Table | None = None

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        command, self.asked = self.asked, None
        if command is not None:
            _add_settings(self, command)
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            hint = ""
            if flag.startswith("-") and self.table is not None:
                hint = f": {self.table.hint(flag.lstrip('-'), '--')}"
            self.error(f"unknown argument {unknown[0]}{hint}")
        return known, unknown


_Commands: TypeAlias = "argparse._SubParsersAction[_Parser]"


def _add_settings(parser: _Parser, command: Command) -> None:
    table = parser.table = command.table()
    model = next((setting for setting in table.settings if setting.flag == "model"), None)
    files = next((setting for setting in table.settings if setting.flag in WITHOUT_FLAG), None)
    if files is not None:
        parser.add_argument(files.flag, nargs="*", metavar=files.metavar, help=_text(files.help))
    if model is not None and command.positional:
        parser.add_argument(
            "model",
            nargs="?",
            metavar="MODEL",
            help=_text(f"{MODEL_HELP}{_shown(model, table.default(model))}"),
        )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML with the long flag names as keys; flags win over it, and it wins over the "
        "environment, where a flag is called as PDSERVE_LOG_LEVEL",
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    items: list[Setting | Shorthand] = [*table.shorthands, *table.settings]
    order = [setting.group for setting in table.settings]
    for item in sorted(items, key=lambda item: order.index(item.group)):
        if item.group not in groups:
            groups[item.group] = parser.add_argument_group(item.group)
        group = groups[item.group]
        if isinstance(item, Shorthand):
            text = argparse.SUPPRESS if item.hidden else _text(item.help)
            if item.is_switch:
                switch = argparse.BooleanOptionalAction
                group.add_argument(f"--{item.flag}", dest=item.flag, action=switch, help=text)
            else:
                metavar = item.metavar
                group.add_argument(f"--{item.flag}", dest=item.flag, metavar=metavar, help=text)
        else:
            hidden = item.hidden or (item.flag == "model" and bool(command.positional))
            if item is files:
                continue
            _add_setting(group, item, table.default(item), hidden=hidden)


def _add_setting(
    group: argparse._ArgumentGroup, setting: Setting, default: object, *, hidden: bool
) -> None:
    name, kind = f"--{setting.flag}", setting.kind
    if hidden:
        text = argparse.SUPPRESS
    else:
        text = _text(f"{setting.help}{_shown(setting, default)}")
    short = SHORT.get(setting.flag)
    names = [name] if short is None else [short, name]
    if kind is bool and setting.flag.startswith("no-"):  # vLLM's name; nobody denies it twice
        group.add_argument(name, dest=setting.flag, action="store_true", help=text)
    elif kind is bool:
        group.add_argument(
            *names, dest=setting.flag, action=argparse.BooleanOptionalAction, help=text
        )
    elif kind is tuple:
        group.add_argument(
            name, dest=setting.flag, nargs="+", action="extend", metavar=setting.metavar, help=text
        )
    else:
        group.add_argument(
            *names,
            dest=setting.flag,
            type=functools.partial(_argument, setting),
            metavar=setting.metavar,
            help=text,
        )


def _argument(setting: Setting, text: str) -> object:
    """Check a flag's value while argparse can still answer with the usage."""
    try:
        return parse(setting, text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _shown(setting: Setting, default: object) -> str:
    """A default, for the help."""
    if default in ("", (), Required.REQUIRED):
        return ""
    if default is None:
        default = "auto"
    elif isinstance(default, bool):
        default = "on" if default else "off"
    elif isinstance(default, tuple):
        default = " ".join(default)
    return f" (default: {getattr(default, 'value', default)})"


def _text(text: str) -> str:
    return text.replace("%", "%%")
