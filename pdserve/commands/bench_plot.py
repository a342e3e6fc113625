"""`pdserve bench plot FILE...`: the report of runs that were made before.

Takes what `bench serve --save-result --save-detailed` and `bench compare` saved. Several runs
with the same label are repeats; the first file's label is what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.bench import files
from pdserve.bench.compare.result import Comparison, is_comparison, load, of_runs
from pdserve.bench.report.page import render
from pdserve.commands.announce import title
from pdserve.commands.exit_codes import EXIT_DONE
from pdserve.config.compare import PlotConfig
from pdserve.config.load import Resolved, Table, build
from pdserve.errors import ConfigError


def run_plot(table: Table, resolved: Mapping[str, Resolved]) -> int:
    """Run `pdserve bench plot`.

    Raises:
        ConfigError: A file cannot be read or drawn, or the page cannot be written.
    """
    config = build("plot", PlotConfig, table, resolved)
    if not config.files:
        raise ConfigError(
            "FILE is missing: pdserve bench plot FILE..., where each FILE was saved by bench serve "
            "(--save-result --save-detailed) or by bench compare",
            param="files",
        )
    page = render(read([Path(name) for name in config.files]))
    try:
        Path(config.output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {config.output} cannot be written: {error.strerror}", param="output"
        ) from error
    print(f"{title('bench plot')}\nReport: {config.output}")
    return EXIT_DONE


def read(paths: Sequence[Path]) -> Comparison:
    """Make one comparison of saved files.

    Raises:
        ConfigError: A file cannot be read, a comparison stands beside other files, or no
            request of any run was answered.
    """
    comparisons = [path for path in paths if path.is_file() and is_comparison(path.read_bytes())]
    if comparisons:
        if len(paths) > 1:
            raise ConfigError(
                f"{comparisons[0]} is a comparison already: draw it alone", param="files"
            )
        found = load(paths[0])
    else:
        found = of_runs([files.load(path)[0] for path in paths], [])
    if not any(outcome.is_good for each in found.measured for outcome in each.run.outcomes):
        raise ConfigError("no request in these files was answered: there is nothing to draw")
    return found
