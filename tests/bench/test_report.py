"""The page: well-formed, self-contained, and with no figure that is not of the runs."""

from __future__ import annotations

import html
import html.parser
import json
import re

import msgspec
import numpy as np
import pytest

from pdserve.bench import files
from pdserve.bench.compare import verdict
from pdserve.bench.compare.result import save
from pdserve.bench.compare.summary import Figure, figures_of, prefill_of, rows
from pdserve.bench.digits import number
from pdserve.bench.figures import figures
from pdserve.bench.records import RunHealth
from pdserve.bench.report import distributions, over_rate, over_time, stages
from pdserve.bench.report.charts import Marks, Rule
from pdserve.bench.report.document import QuestionPage, document
from pdserve.bench.report.page import chosen_rate, pictures, render
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


def values(text):
    """What the charts of a page are drawn from."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', text)
    return [json.loads(each) for each in found]


class TestPage:
    def test_every_element_ends(self, text):
        Page(text)

    def test_it_asks_nobody_for_anything(self, text):
        page = Page(text)
        assert not [tag for tag, _ in page.elements if tag in ("link", "img", "iframe")]
        for _, attributes in page.elements:
            assert not {"src", "srcset", "xlink:href"} & set(attributes)
            assert attributes.get("href", "#").startswith("#")
        assert "default-src 'none'" in page.elements[3][1]["content"]

    def test_every_chart_has_values_and_a_name(self, text):
        names = [
            attributes["aria-label"]
            for _, attributes in Page(text).elements
            if attributes.get("class") == "chart"
        ]
        assert len(names) == len(values(text)) > 10
        assert all(names)
        assert all(each["series"] or each["tracks"] for each in values(text))

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

    def test_every_picture_is_on_one_page(self, made, text):
        sections = re.findall(r'<section class="page" id="(\w+)">(.*?)</section>', text, re.DOTALL)
        assert [name for name, _ in sections] == [
            *("answer", "stalls", "begin", "load", "where", "runs")
        ]
        shown = [
            anchor for _, inner in sections for anchor in re.findall(r'<figure id="(.*?)"', inner)
        ]
        assert sorted(shown) == sorted(each.anchor for each in pictures(made, 4.0))
        assert text.count("<figure") == len(shown)

    def test_what_must_be_known_of_the_figures_stands_beside_them(self, made, text):
        answer = text[text.index('id="answer"') : text.index('id="stalls"')]
        assert '<div class="lead">' in answer
        aside = answer[answer.index("<aside>") : answer.index("</aside>")]
        for sentence in verdict.caveats(made):
            assert html.escape(sentence) in aside

    def test_a_page_without_anything_is_left_out(self):
        page = document("t", "", [QuestionPage("a", "A?", ["x"]), QuestionPage("b", "B?", [""])])
        assert page.count("<section") == 1
        assert "<nav>" not in page

    def test_the_same_comparison_makes_the_same_page(self, made, text):
        assert render(made) == text

    def test_a_label_cannot_break_the_page(self):
        made = synthetic.comparison(num_runs=1)
        evil = '</script><script>"&'
        scripts = render(made).count("<script")
        made.measured[0].run.health.why_not = [evil]
        made.measured[0].run.health.valid = False
        made.title = evil
        for each in made.measured:
            each.run.outcomes[0].request_id = evil
        page = Page(render(made))
        assert [tag for tag, _ in page.elements].count("script") == scripts

    def test_cards_of_figures_that_do_not_count_say_why(self, made):
        health = RunHealth(valid=False, why_not=["Other programs used 1.15 of the 2 cores."])
        stolen = [
            msgspec.structs.replace(m, run=msgspec.structs.replace(m.run, health=health))
            if m.deployment == made.baseline
            else m
            for m in made.measured
        ]
        page = render(msgspec.structs.replace(made, measured=stolen))
        lead = page[page.index('<div class="lead">') : page.index("<aside>")]
        assert "Other programs used 1.15 of the 2 cores." in lead
        assert "better, not valid" in lead
        assert "fact good" not in lead

    def test_the_rate_shown_is_the_highest_without_failures(self):
        made = synthetic.comparison(num_runs=1, rates=(1.0, 2.0, 4.0))
        assert chosen_rate(made) == 4.0
        made.runs("P/D 1:1", 4.0)[0].outcomes[0].error = "HTTP 503"
        assert chosen_rate(made) == 2.0

    def test_what_every_stage_and_deployment_is_coloured_with_is_defined(self, text):
        charts = values(text)
        used = {f"c{series['colour']}" for each in charts for series in each["series"]}
        used |= {
            "s-" + re.sub("[^a-z]", "-", name.lower())
            for each in charts
            for track in each["tracks"]
            for name, _, _ in track["pieces"]
        }
        assert len(used) > 5
        for name in used:
            assert f"--{name}: #" in text, name

    def test_light_and_dark_define_the_same_colours(self, text):
        light, dark = re.findall(r":root \{([^}]*)\}", text)
        names = [set(re.findall(r"(--(?!s-)[\w-]+):", part)) for part in (light, dark)]
        assert names[0] == names[1]


class TestPictures:
    def test_each_gap_is_a_dot_and_each_burst_is_shaded(self, made):
        run = made.runs("colocated", 4.0)[0]
        chart = over_time.itl_over_time(made, 4.0).charts[0]
        gaps = sum(len(o.chunk_s) - 1 for o in run.outcomes if o.group == "steady")
        assert chart.series[0].marks is Marks.CLOUD
        assert len(chart.series[0].points) == gaps
        assert len(chart.bands) > 0

    def test_tokens_that_came_together_do_not_spoil_the_axis(self):
        made = synthetic.comparison(num_runs=1)
        for each in made.measured:
            for one in each.run.outcomes:
                one.chunk_s[2:4] = [one.chunk_s[1]] * 2
        low, high = over_time.itl_over_time(made, None).charts[0].y.ends
        assert low > 1
        assert high > 50

    def test_a_prefill_begins_where_the_servers_account_says(self, made):
        one = next(o for o in made.runs("colocated", 4.0)[0].outcomes if o.group == "burst")
        start, end = prefill_of(one)
        before = (one.stages["proxy"] + one.stages["queue"]) / 1e3
        assert start == pytest.approx(one.sent_s + before)
        assert end - start == pytest.approx(one.stages["prefill"] / 1e3)

    def test_stages_add_up_to_the_ttft_that_the_client_saw(self, made):
        good = [o for run in made.runs("P/D 1:1", 4.0) for o in run.outcomes if o.group == "burst"]
        tracks = {each.name: each for each in stages.stages(made, 4.0).charts[0].tracks}
        pieces = tracks["P/D 1:1, burst"].pieces
        assert [before[2] for before in pieces[:-1]] == [after[1] for after in pieces[1:]]
        assert pieces[-1][2] == pytest.approx(np.mean([o.ttft_s * 1e3 for o in good]))
        assert [name for name, _, _ in pieces][:4] == ["proxy", "queue", "prefill", "relay"]

    def test_latency_over_rate_has_the_slo_where_there_is_one(self, made):
        rules = {p.anchor: p.charts[0].rules for p in over_rate.latency_over_rate(made)}
        assert rules["rate-ttft-p99"] == [Rule(200.0, "SLO 200 ms")]
        assert rules["rate-tpot-p50"] == [Rule(20.0, "SLO 20 ms")]
        assert rules["rate-itl-p99"] == []

    def test_one_rate_has_no_picture_over_rates(self):
        assert over_rate.latency_over_rate(synthetic.comparison(num_runs=1)) == []

    def test_without_stages_the_picture_says_only_what_the_client_saw(self):
        made = synthetic.comparison(num_runs=1)
        for each in made.measured:
            for one in each.run.outcomes:
                one.stages, one.second_stages = {}, {}
        [chart] = stages.stages(made, None).charts
        assert {name for each in chart.tracks for name, _, _ in each.pieces} == {stages.WAIT}

    def test_a_cdf_ends_at_one_with_the_greatest_value(self):
        points = distributions._cdf([1.0, 2.0, 3.0, 10.0])
        assert points[-1] == (10.0, 1.0)
        assert points[0] == (1.0, 0.25)

    def test_a_tail_says_which_share_is_longer(self):
        values = sorted(float(i) for i in range(1, 1001))
        tail = {round(share, 4): value for value, share in distributions._tail(values)}
        assert tail[0.001] == 1000.0
        assert all(sum(v >= value for v in values) / 1000 == s for s, value in tail.items())


class TestDigits:
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
