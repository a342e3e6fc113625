"""The page: well-formed, self-contained, and with no figure that is not of the runs."""

from __future__ import annotations

import html.parser
import re
import xml.etree.ElementTree as ET

import msgspec
import numpy as np
import pytest

from pdserve.bench import files
from pdserve.bench.compare.result import OTHERS, save
from pdserve.bench.compare.summary import Figure, figures_of, prefill_of, rows
from pdserve.bench.figures import figures
from pdserve.bench.report import charts, distributions, over_rate, over_time, stages
from pdserve.bench.report.charts import Axis, Frame, Marks, Series
from pdserve.bench.report.page import chosen_rate, render
from pdserve.bench.report.scale import linear, linear_ticks, logarithmic, number, tick_label
from pdserve.cli import main
from pdserve.commands.bench_plot import read
from pdserve.errors import ConfigError
from tests.bench import synthetic

VOID = {"meta", "br", "link", "img"}


class Page(html.parser.HTMLParser):
    """Checks that every element ends, and keeps what there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.cells: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "td":
            self.cells.append([])

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.cells[-1].append(data)


@pytest.fixture(scope="module")
def made():
    return synthetic.comparison(num_runs=2, rates=(2.0, 4.0))


@pytest.fixture(scope="module")
def text(made):
    return render(made)


def svgs(text):
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", text)]


class TestPage:
    def test_every_element_ends(self, text):
        Page(text)

    def test_it_asks_nobody_for_anything(self, text):
        page = Page(text)
        assert not [tag for tag, _ in page.elements if tag in ("script", "link", "img", "iframe")]
        for _, attributes in page.elements:
            assert not {"src", "href", "srcset", "xlink:href"} & set(attributes)
        assert not re.search(r"url\(|@import|@font-face", text)

    def test_every_picture_is_xml_with_a_name(self, text):
        found = svgs(text)
        assert len(found) > 10
        assert all(picture.get("aria-label") for picture in found)

    def test_every_figure_of_the_table_is_recomputed_from_the_runs(self, made, text):
        shown = [cell[0] for cell in Page(text).cells]
        expected = []
        for rate in (2.0, 4.0):
            for each in made.deployments:
                per_run = [figures_of(run, made.slos) for run in made.runs(each.label, rate)]
                expected += [
                    number(float(np.median([run[figure] for run in per_run]))) for figure in Figure
                ]
        assert shown[: len(expected)] == expected

    def test_the_same_comparison_makes_the_same_page(self, made, text):
        assert render(made) == text

    def test_a_label_cannot_break_the_page(self):
        made = synthetic.comparison(num_runs=1)
        evil = '<script>"&'
        made.measured[0].run.health.why_not = [evil]
        made.measured[0].run.health.valid = False
        made.title = evil
        page = Page(render(made))
        assert "script" not in [tag for tag, _ in page.elements]

    def test_cards_of_figures_that_do_not_count_say_why(self, made):
        used = {"engines": 0.8, OTHERS: 1.15}
        stolen = [
            msgspec.structs.replace(m, cores_used=used) if m.deployment == made.baseline else m
            for m in made.measured
        ]
        page = render(msgspec.structs.replace(made, measured=stolen))
        lead = page[page.index('<div class="lead">') : page.index("<h2>")]
        assert "Other programs used 1.15 of its 2 cores." in lead
        assert "better, not valid" in lead
        assert "fact good" not in lead

    def test_the_rate_shown_is_the_highest_without_failures(self):
        made = synthetic.comparison(num_runs=1, rates=(1.0, 2.0, 4.0))
        assert chosen_rate(made) == 4.0
        made.runs("P/D 1:1", 4.0)[0].outcomes[0].error = "HTTP 503"
        assert chosen_rate(made) == 2.0

    def test_what_every_stage_and_deployment_is_coloured_with_is_defined(self, text):
        style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
        used = set(re.findall(r'class="[^"]*?\b(c\d|s-[\w-]+)', text))
        assert len(used) > 5
        for name in used:
            assert f".{name}{{" in style, name

    def test_light_and_dark_define_the_same_colours(self, text):
        light, dark = re.findall(r":root\{([^}]*)\}", text)
        names = [set(re.findall(r"(--(?!s-)[\w-]+):", part)) for part in (light, dark)]
        assert names[0] == names[1]


class TestPictures:
    def test_each_gap_is_a_dot_and_each_burst_is_shaded(self, made):
        run = made.runs("colocated", 4.0)[0]
        picture = over_time.itl_over_time(made, 4.0)
        drawing = ET.fromstring(picture.drawings[0])
        places = [e.get("d") for e in drawing.iter() if (e.get("class") or "").startswith("dots")]
        gaps = sum(len(o.chunk_s) - 1 for o in run.outcomes if o.group == "steady")
        # Equal places are drawn once.
        assert gaps * 0.25 < places[0].count("M") <= gaps
        assert [e for e in drawing.iter() if e.get("class") == "span"]

    def test_tokens_that_came_together_do_not_spoil_the_axis(self):
        made = synthetic.comparison(num_runs=1)
        for each in made.measured:
            for one in each.run.outcomes:
                one.chunk_s[2:4] = [one.chunk_s[1]] * 2
        drawing = ET.fromstring(over_time.itl_over_time(made, None).drawings[0])
        ticks = [e.text for e in drawing.iter() if e.get("text-anchor") == "end"]
        assert {"5", "50"} <= set(ticks)

    def test_a_prefill_begins_where_the_servers_account_says(self, made):
        one = next(o for o in made.runs("colocated", 4.0)[0].outcomes if o.group == "burst")
        start, end = prefill_of(one)
        before = (one.stages["proxy"] + one.stages["queue"]) / 1e3
        assert start == pytest.approx(one.sent_s + before)
        assert end - start == pytest.approx(one.stages["prefill"] / 1e3)

    def test_stages_add_up_to_the_ttft_that_the_client_saw(self, made):
        good = [o for run in made.runs("P/D 1:1", 4.0) for o in run.outcomes if o.group == "burst"]
        drawing = ET.fromstring(stages.stages(made, 4.0).drawings[0])
        tips = [e.text for e in drawing.iter() if e.tag.endswith("title")]
        told = [float(t.split()[-2]) for t in tips if t.startswith("P/D 1:1, burst:")]
        assert sum(told) == pytest.approx(np.mean([o.ttft_s * 1e3 for o in good]), rel=0.01)
        shown = [t.split()[3] for t in tips if t.startswith("P/D 1:1, burst:")]
        assert shown[:4] == ["proxy", "queue", "prefill", "relay"]

    def test_latency_over_rate_has_the_slo_where_there_is_one(self, made):
        drawn = {p.anchor: p.drawings[0] for p in over_rate.latency_over_rate(made)}
        assert "SLO 200 ms" in drawn["rate-ttft-p99"]
        assert "SLO 20 ms" in drawn["rate-tpot-p50"]
        assert "SLO" not in drawn["rate-itl-p99"]

    def test_one_rate_has_no_picture_over_rates(self):
        assert over_rate.latency_over_rate(synthetic.comparison(num_runs=1)) == []

    def test_without_stages_the_picture_says_only_what_the_client_saw(self):
        made = synthetic.comparison(num_runs=1)
        for each in made.measured:
            for one in each.run.outcomes:
                one.stages, one.second_stages = {}, {}
        assert len(stages.stages(made, None).drawings) == 1
        assert stages.WAIT in stages.stages(made, None).drawings[0]

    def test_a_cdf_ends_at_one_with_the_greatest_value(self):
        points = distributions._cdf([1.0, 2.0, 3.0, 10.0])
        assert points[-1] == (10.0, 1.0)
        assert points[0] == (1.0, 0.25)

    def test_a_tail_says_which_share_is_longer(self):
        values = sorted(float(i) for i in range(1, 1001))
        tail = {round(share, 4): value for value, share in distributions._tail(values)}
        assert tail[0.001] == 1000.0
        assert all(sum(v >= value for v in values) / 1000 == s for s, value in tail.items())

    def test_nothing_is_drawn_outside_of_a_picture(self, text):
        for picture in svgs(text):
            width, height = map(float, picture.get("viewBox").split()[2:])
            for element in picture.iter():
                for name, limit in (("x", width), ("cx", width), ("y", height), ("cy", height)):
                    if element.get(name) is not None:
                        assert -1 <= float(element.get(name)) <= limit, ET.tostring(element)


class TestScale:
    def test_ticks_are_round_and_within(self):
        assert linear_ticks(0, 97, 5) == [0, 20, 40, 60, 80]
        assert linear_ticks(0, 1, 4) == [0, 0.25, 0.5, 0.75, 1.0]

    def test_a_linear_scale_holds_all_values(self):
        scale = linear([3.0, 99.0], 100, 0)
        assert scale.low == 0
        assert scale.high >= 99
        assert 0 < scale(99.0) < scale(3.0) < 100

    def test_a_logarithmic_scale_gives_equal_room_to_equal_factors(self):
        scale = logarithmic([1.0, 1000.0], 0, 300)
        assert scale(10.0) - scale(1.0) == pytest.approx(scale(1000.0) - scale(100.0))

    def test_values_of_zero_do_not_break_a_logarithmic_scale(self):
        scale = logarithmic([0.0, 5.0], 0, 100)
        assert scale(0.0) == 0

    @pytest.mark.parametrize(
        ("value", "shown"),
        [
            (0.01234, "0.0123"),
            (1.234, "1.23"),
            (99.96, "100"),
            (1234.5, "1,234"),
            (0, "0"),
            (None, "–"),
        ],
    )
    def test_figures_have_three_digits(self, value, shown):
        assert number(value).removesuffix(".0") == shown

    def test_a_tick_has_no_zeros_behind_the_point(self):
        assert [tick_label(v) for v in (0.5, 2.0, 1000.0, 0.0)] == ["0.5", "2", "1,000", "0"]

    def test_a_chart_of_one_point_is_drawn(self):
        frame = Frame("t", "d", Axis("x"), Axis("y", is_log=True))
        assert "circle" in charts.xy(frame, [Series("a", 0, [(1.0, 1.0)], Marks.DOTS)])


class TestPlot:
    def test_saved_runs_become_a_page(self, tmp_path, capsys):
        paths = []
        for label in ("colocated", "P/D 1:1"):
            run = synthetic.run(label, is_disaggregated=label != "colocated")
            paths.append(tmp_path / f"{label[0]}.json")
            files.save(run, figures(run), paths[-1])
        out = tmp_path / "out.html"
        assert main(["bench", "plot", *map(str, paths), "--output", str(out)]) == 0
        page = out.read_text()
        Page(page)
        found = read(paths)
        assert number(rows(found, None)[1].ratios[Figure.ITL_P99].median) in page

    def test_a_saved_comparison_becomes_the_same_page(self, made, text, tmp_path):
        save(made, tmp_path / "c.json")
        assert render(read([tmp_path / "c.json"])) == text

    def test_no_file_is_refused(self, capsys):
        assert main(["bench", "plot"]) == 3
        assert "FILE is missing" in capsys.readouterr().err

    def test_a_run_that_was_saved_without_details_is_refused(self, tmp_path):
        run = synthetic.run("a")
        files.save(None, figures(run), tmp_path / "a.json")
        with pytest.raises(ConfigError, match="--save-detailed"):
            read([tmp_path / "a.json"])
