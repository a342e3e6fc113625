"""`pdserve bench plot FILE...`: make the report of saved runs.

Takes what `bench serve --save-result --save-detailed`, `bench sweep` and `bench compare` saved:
runs together, sweeps together, or one comparison. Several runs with the same label are repeats;
the first file's label is what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pdserve.bench import files
from pdserve.bench.compare.result import Comparison, is_comparison, load, of_runs
from pdserve.bench.report.page import render
from pdserve.bench.report.sweep_page import render_sweeps
from pdserve.bench.sweep import is_sweep
from pdserve.bench.sweep import load as load_sweep
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
            "FILE is missing: run pdserve bench plot FILE... with files saved by bench serve "
            "(--save-result --save-detailed), bench sweep or bench compare",
            param="files",
        )
    page = drawn([Path(name) for name in config.files])
    try:
        Path(config.output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {config.output} cannot be written: {error.strerror}", param="output"
        ) from error
    print(f"{title('bench plot')}\nReport: {config.output}")
    return EXIT_DONE


def drawn(paths: Sequence[Path]) -> str:
    """Return the page of saved files.

    Raises:
        ConfigError: A file cannot be read, files of different kinds stand side by side, or no
            request in them was answered.
    """
    sweeps = [path for path in paths if path.is_file() and is_sweep(path.read_bytes())]
    if not sweeps:
        return render(read(paths))
    others = [path for path in paths if path not in sweeps]
    if others:
        raise ConfigError(
            f"{sweeps[0]} is a sweep and {others[0]} is not: plot sweeps separately",
            param="files",
        )
    return render_sweeps([load_sweep(path) for path in sweeps])


def read(paths: Sequence[Path]) -> Comparison:
    """Make one comparison of saved runs, or read one.

    Raises:
        ConfigError: A file cannot be read, a comparison stands beside other files, or no
            request of any run was answered.
    """
    comparisons = [path for path in paths if path.is_file() and is_comparison(path.read_bytes())]
    if comparisons:
        if len(paths) > 1:
            raise ConfigError(
                f"{comparisons[0]} is already a comparison: plot it alone", param="files"
            )
        found = load(paths[0])
    else:
        found = of_runs([files.load(path)[0] for path in paths], [])
    if not any(outcome.is_good for each in found.measured for outcome in each.run.outcomes):
        raise ConfigError(
            "these files contain no answered request, so there is nothing to plot: name other files"
        )
    return found
