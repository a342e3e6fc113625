"""The reports in a real browser: charts are drawn, tell what the pointer rests on, and fit."""

from __future__ import annotations

import pytest

from pdserve.bench.report.charts import Band, Chart, Marker, Marks, Rule, Scale, Series, Track
from pdserve.bench.report.document import QuestionPage, document, figure
from pdserve.bench.report.page import render
from pdserve.bench.report.picture import Picture
from tests.bench import synthetic
from tests.browser import needs_browser

pytestmark = [pytest.mark.slow, needs_browser]

# Of the chart numbered so: where its plot lies, and whether a colour is on its canvas.
PLOT = """(() => { const box = document.querySelectorAll('.u-over')[%d].getBoundingClientRect();
  return [box.x, box.y, box.width, box.height]; })()"""
INK = """(() => { const canvas = document.querySelectorAll('.uplot canvas')[%d];
  const css = getComputedStyle(document.documentElement).getPropertyValue('%s').trim();
  const wanted = [1, 3, 5].map((at) => parseInt(css.slice(at, at + 2), 16));
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
  for (let i = 0; i < data.length; i += 4)
    if (data[i + 3] === 255 && wanted.every((part, at) => data[i + at] === part)) return true;
  return false; })()"""
# Pages that are shown; and of each chart there, how wide it is drawn, and the room for it.
SHOWN = (
    """[...document.querySelectorAll('section')].filter((s) => s.offsetHeight).map((s) => s.id)"""
)
WIDTHS = """[...document.querySelectorAll('.chart')].filter((c) => c.clientWidth)
  .map((c) => [c.querySelector('.u-wrap').offsetWidth, c.clientWidth])"""


def page_of(*charts: Chart) -> str:
    parts = [figure(Picture("it", "It", "A caption.", charts))]
    return document("a file", "", [QuestionPage("one", "What?", parts)])


def chart(**fields) -> Chart:
    given = {"title": "t", "description": "d", "x": Scale("s"), "y": Scale("ms")}
    return Chart(**(given | fields))


@pytest.fixture
def opened(browser, tmp_path):
    async def open_page(text: str, **how):
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        page = await browser.open(path.as_uri(), **how)
        await page.wait_for("document.querySelectorAll('.uplot canvas').length > 0")
        return page

    return open_page


async def rest(page, x: float, y: float) -> str:
    """What is told where the pointer rests: shares of the first chart's plot, from top left."""
    left, top, width, height = await page.evaluate(PLOT % 0)
    for kind in ("mouseMoved", "mouseMoved"):
        await page.call(
            "Input.dispatchMouseEvent", type=kind, x=left + x * width, y=top + y * height
        )
    return await page.evaluate(
        "new Promise(requestAnimationFrame).then(() => document.querySelector('.tip:not([hidden])')"
        "?.textContent ?? '')"
    )


@pytest.mark.parametrize(
    ("scheme", "width"),
    [
        ("light", 390),
        pytest.param("light", 1280, marks=pytest.mark.matrix),
        pytest.param("dark", 390, marks=pytest.mark.matrix),
        ("dark", 1280),
    ],
)
async def test_a_report_is_drawn_asks_nobody_and_fits(opened, width, scheme):
    page = await opened(
        render(synthetic.comparison(num_runs=2, rates=(2.0, 4.0))), width=width, scheme=scheme
    )
    assert page.errors == []
    assert page.hosts() == {""}
    num = await page.evaluate("document.querySelectorAll('.chart').length")
    assert num == await page.evaluate("document.querySelectorAll('.uplot canvas').length") > 10
    for anchor in await page.evaluate("[...document.querySelectorAll('nav a')].map((a) => a.hash)"):
        await page.evaluate(f"document.querySelector('nav a[href=\"{anchor}\"]').click()")
        await page.wait_for(f"document.querySelector('nav a[aria-current]').hash === '{anchor}'")
        assert await page.evaluate(SHOWN) == [anchor[1:]]
        assert await page.evaluate("document.documentElement.scrollWidth") == width
        widths = await page.evaluate(WIDTHS)
        assert all(0 < drawn <= room for drawn, room in widths), widths
    assert await page.evaluate(INK % (0, "--c0"))


async def test_an_address_of_a_picture_shows_the_page_that_it_is_on(opened):
    page = await opened(render(synthetic.comparison(num_runs=1)))
    assert await page.evaluate(SHOWN) == ["answer"]
    await page.evaluate("location.hash = '#rate-matched'")
    await page.wait_for(f"{SHOWN}[0] === 'load'")
    # Resized while it was not shown.
    await page.resize(700, 900)
    await page.evaluate("location.hash = '#stalls'")
    await page.wait_for(f"{SHOWN}[0] === 'stalls'")
    await page.wait_for(f"{WIDTHS}.every(([drawn, room]) => drawn === room)")
    assert page.errors == []


async def test_on_paper_stand_all_pages(opened):
    page = await opened(render(synthetic.comparison(num_runs=1)))
    num = await page.evaluate("document.querySelectorAll('section').length")
    await page.call("Emulation.setEmulatedMedia", media="print")
    assert len(await page.evaluate(SHOWN)) == num > 3


async def test_a_change_of_the_scheme_changes_the_colours_that_are_drawn(opened):
    page = await opened(
        page_of(chart(series=[Series(name="a", colour=0, points=[(0, 1), (1, 2)])]))
    )
    light = await page.evaluate("document.querySelector('canvas').toDataURL()")
    await page.emulate(prefers_color_scheme="dark")
    await page.wait_for(INK % (0, "--c0"))
    assert light != await page.evaluate("document.querySelector('canvas').toDataURL()")


async def test_the_pointer_is_told_of_points_marks_and_bands(opened):
    page = await opened(
        page_of(
            chart(
                x=Scale("s", ends=(0.0, 10.0)),
                y=Scale("ms", ends=(0.0, 10.0)),
                series=[
                    Series(name="own", colour=0, points=[(5.0, 5.0)], marks=Marks.DOTS),
                    Series(name="b", colour=1, points=[(2.0, 8.0)], marks=Marks.DOTS, tips=["two"]),
                ],
                bands=[Band(7.0, 9.0, "a band")],
                markers=[Marker(1.0, "a marker", 1)],
                rules=[Rule(4.0, "a rule")],
            )
        )
    )
    told = [await rest(page, *at) for at in ((0.5, 0.5), (0.2, 0.2), (0.8, 0.1), (0.1, 0.9))]
    assert told == ["own: 5, 5", "two", "a band", "a marker"]
    assert await rest(page, 0.6, 0.9) == ""


async def test_the_pointer_is_told_the_request_and_the_stage_of_a_piece(opened):
    pieces = [("decode_queue", 0.0, 5.0), ("unheard of", 5.0, 10.0)]
    tracks = [Track(pieces=pieces, tip="first"), Track(pieces=pieces[1:], tip="second")]
    page = await opened(page_of(chart(x=Scale("s", ends=(0.0, 10.0)), tracks=tracks)))
    assert await rest(page, 0.2, 0.25) == "first\ndecode queue: 5 s"
    assert await rest(page, 0.7, 0.75) == "second\nunheard of: 5 s"
    assert await rest(page, 0.2, 0.75) == ""
    assert await page.evaluate(INK % (0, "--s-decode-queue"))
    assert await page.evaluate(INK % (0, "--s-other"))


async def test_a_click_on_the_legend_hides_a_series(opened):
    lines = [Series(name=f"{i}", colour=i, points=[(0, i + 1), (1, i + 1)]) for i in range(2)]
    page = await opened(page_of(chart(series=lines)))
    assert await page.evaluate(INK % (0, "--c0"))
    await page.evaluate("document.querySelector('.u-series:not(.u-off) th').click()")
    await page.wait_for(f"!{INK % (0, '--c0')}")
    assert await page.evaluate(INK % (0, "--c1"))


async def test_values_that_fit_no_axis_are_drawn_at_its_edge(opened):
    """One point, none above zero by powers of ten, and tokens that came together."""
    dot = {"name": "a", "colour": 0, "marks": Marks.DOTS}
    by_ten = Scale("ms", is_log=True)
    page = await opened(
        page_of(
            chart(series=[Series(points=[(1.0, 1.0)], **dot)], y=by_ten),
            chart(series=[Series(points=[(0.0, 0.0)], **dot)], x=by_ten, y=by_ten),
            chart(
                series=[Series(points=[(1.0, 0.0)], **dot)], y=Scale("ms", True, ends=(5.0, 90.0))
            ),
        )
    )
    assert page.errors == []
    for number in range(3):
        assert await page.evaluate(INK % (number, "--c0"))
