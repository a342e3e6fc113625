"""A board drawn without Grafana: the layout of its JSON, and what Prometheus says to its panels."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

from tests.board.grafana import filled
from tests.browser import start_chromium

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tests.board.grafana import Board, Panel

    Line = tuple[str, list[tuple[float, float]]]

COLUMN_PX, ROW_PX, GAP_PX = 58, 34, 6
COLOURS = ("#3f7cac", "#d1495b", "#2e8b57", "#e09f3e", "#7b5ea7", "#5c6670", "#00a7a0", "#b56576")
STYLE = """
body { margin: 0; font: 12px system-ui, sans-serif; background: #f4f5f7; color: #24292f; }
header { padding: 10px 12px 0; }
h1 { font-size: 15px; margin: 0; } header p { margin: 2px 0 0; color: #57606a; }
main { position: relative; margin: 8px 6px; }
section { position: absolute; box-sizing: border-box; background: #fff; border: 1px solid #d0d7de;
  border-radius: 3px; padding: 5px 8px; overflow: hidden; display: flex; flex-direction: column; }
h2 { font-size: 12px; margin: 0; font-weight: 600; white-space: nowrap; }
svg { flex: 1; min-height: 0; width: 100%; } .big { font-size: 24px; margin: auto; }
ul { margin: 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0 10px; max-height: 30px;
  overflow: hidden; list-style: none; font-size: 10px; color: #57606a; }
i { display: inline-block; width: 8px; height: 2px; vertical-align: middle; margin-right: 4px; }
.empty { margin: auto; color: #d1495b; }
"""


def shown(value: float, unit: str) -> str:
    """Return a figure as a person reads it."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and abs(value) < 1:
        return f"{value * 1e3:.3g} ms"
    scale, suffix = next(
        (
            (scale, suffix)
            for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k"))
            if value >= scale
        ),
        (1.0, ""),
    )
    return f"{value / scale:.3g}{suffix} {unit if unit in ('s', 'bytes', 'Bps') else ''}".rstrip()


def legend_of(template: str, labels: Mapping[str, str]) -> str:
    """Return a line's name, as Grafana makes it."""
    if template in ("", "__auto"):
        own = {k: v for k, v in labels.items() if k not in ("__name__", "instance", "job")}
        return ", ".join(f"{name}={value}" for name, value in own.items()) or "value"
    for name, value in labels.items():
        template = template.replace("{{" + name + "}}", value)
    return template


def page(board: Board, lines: Sequence[Sequence[Line]], note: str) -> str:
    """Return the document.

    Args:
        lines: For each panel, names and points.
        note: What is under the title.
    """
    bottom = max(panel.at[1] + panel.at[3] for panel in board.panels)
    sections = "".join(map(_section, board.panels, lines))
    return (
        f"<!doctype html><meta charset=utf-8><title>{html.escape(board.title)}</title>"
        f"<style>{STYLE}</style><header><h1>{html.escape(board.title)}</h1>"
        f"<p>{html.escape(note)}</p></header>"
        f'<main style="height:{bottom * ROW_PX}px">{sections}</main>'
    )


def _section(panel: Panel, lines: Sequence[Line]) -> str:
    x, y, width, height = panel.at
    style = (
        f"left:{x * COLUMN_PX}px;top:{y * ROW_PX}px;width:{width * COLUMN_PX - GAP_PX}px;"
        f"height:{height * ROW_PX - GAP_PX}px"
    )
    if not lines:
        body = '<p class="empty">no data</p>'
    elif panel.kind in ("stat", "gauge", "bargauge"):
        body = f'<p class="big">{html.escape(shown(lines[0][1][-1][1], panel.unit))}</p>'
    else:
        body = _chart(panel, lines)
    title = html.escape(filled(panel.title, {}))
    return f'<section style="{style}"><h2>{title}</h2>{body}</section>'


def _chart(panel: Panel, lines: Sequence[Line]) -> str:
    points = [point for _, line in lines for point in line]
    start_s, end_s = min(at for at, _ in points), max(at for at, _ in points)
    top = max(max(value for _, value in points), 1e-12)
    paths, keys = [], []
    for index, (name, line) in enumerate(lines):
        colour = COLOURS[index % len(COLOURS)]
        at = [
            f"{40 + 360 * (when - start_s) / max(end_s - start_s, 1e-9):.1f},"
            f"{112 - 100 * max(value, 0) / top:.1f}"
            for when, value in line
        ]
        d = f"M{'L'.join(at if len(at) > 1 else at * 2)}"
        paths.append(
            f'<path d="{d}" fill="none" stroke="{colour}" stroke-width="1.5" '
            f'stroke-linecap="round" vector-effect="non-scaling-stroke"/>'
        )
        keys.append(f'<li><i style="background:{colour}"></i>{html.escape(name)}</li>')
    ticks = "".join(
        f'<path d="M40,{112 - 100 * part}H400" stroke="#e4e7eb"/>'
        f'<text x="36" y="{115 - 100 * part}" text-anchor="end" font-size="8" fill="#57606a">'
        f"{html.escape(shown(top * part, panel.unit))}</text>"
        for part in (0, 0.5, 1)
    )
    svg = f'<svg viewBox="0 0 404 120" preserveAspectRatio="none">{ticks}{"".join(paths)}</svg>'
    return f"{svg}<ul>{''.join(keys)}</ul>"


async def draw(document: str, path: Path, directory: Path) -> None:
    """Write a PNG of a document, with a browser in `directory`."""
    source = directory / "board.html"
    directory.mkdir()
    source.write_text(document)
    with start_chromium(directory) as chromium:
        async with chromium.connect() as browser:
            tab = await browser.open(source.as_uri(), width=24 * COLUMN_PX + 12, height=900)
            await tab.screenshot(path, full=True)
