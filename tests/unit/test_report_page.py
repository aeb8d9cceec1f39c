"""The page as a file: whole in itself, the same every time, and with nothing of the input read as markup."""

from __future__ import annotations

import base64
import gzip
import hashlib
import importlib.resources
import itertools
import json
import re
from html.parser import HTMLParser

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs_version

from tests.made_prediction import BY_SEQUENCE, FINGERPRINT, Contig, make_prediction, some_contigs
from virnucpro.report import html_page as figures
from virnucpro.report.prediction import plots
from virnucpro.report.prediction.artifacts import ARTIFACT_CONTIGS, report_markdown, report_table
from virnucpro.report.prediction.page import write_report

NAMES = [
    "<img/src=x/onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a\u2028b<!--<script>",
    "%{x}<b>bold</b>$$&amp;&lt;i&gt;",
    "\"'onmouseover=alert(3)x='",
    "${script}",
]
PLOTLY_SHA256 = "99784e3abfb07b142a15e521a439e6d9addceadb3f79553fd24c72774f0649ba"
"""Of ``plotly-basic.min.js`` in plotly.js-basic-dist-min 4.1.1."""


class Page(HTMLParser):
    """The elements, attributes, scripts and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.comments, self.text = set(), [], [], [], ""
        self._kind = None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, *one) for one in attrs]
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        self._kind = tag

    def handle_comment(self, data):
        self.comments.append(data)

    def handle_endtag(self, tag):
        self._kind = None

    def handle_data(self, data):
        if self._kind == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._kind != "style":
            self.text += data

    @property
    def figures(self):
        (text,) = [text for kind, text in self.scripts if kind == "application/json"]
        return json.loads(text)["figures"]

    def says(self, words):
        return words in " ".join(self.text.replace("\u00a0", " ").split())


def page_of(folder, contigs=None, **settings):
    made = make_prediction(folder, contigs, **settings)
    return Page(write_report(made.layout)), made


def plotly_in(page):
    """Return plotly.js as the page's script unpacks it."""
    (text,) = [text for kind, text in page.scripts if kind == "application/gzip"]
    return gzip.decompress(base64.b64decode(text, validate=True))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("page"), missing_frames=3)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    contigs = some_contigs(120)
    for number, name in enumerate(NAMES):
        contigs[number] = Contig(name, 12_000, 0, 1)
    contigs.append(Contig("<svg/onload=alert(4)>", 0, left_out="<i>in.fasta</i>:3: </title><script>alert(5)</script>"))
    return page_of(tmp_path_factory.mktemp("hostile"), contigs, classifier="<script>alert(6)</script>")


def test_the_page_needs_no_other_file_and_no_network(written):
    page, _ = written
    assert b"Plotly" in plotly_in(page)
    sources = [
        (tag, name, value) for tag, name, value in page.attributes if name in {"src", "srcset", "data", "action"}
    ]
    assert sources == []
    links = {value for _, name, value in page.attributes if name == "href"}
    assert {"data:,", "contigs.tsv", "viral_regions.bed", "run.json"} <= links
    assert not [link for link in links if "//" in link]


def test_only_the_scripts_that_stand_in_the_page_may_run_and_nothing_may_be_loaded(written):
    page, _ = written
    (policy,) = [value for tag, name, value in page.attributes if name == "content" and "default-src" in value]
    scripts = [plotly_in(page), *(text.encode() for kind, text in page.scripts if kind is None)]
    assert len(scripts) == 2
    digests = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in scripts]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in rules["script-src"]
    assert "http" not in policy


def test_the_page_is_no_larger_than_what_it_shows_needs(written):
    _, made = written
    size = made.layout.report.stat().st_size
    print(f"report.html of {len(made.rows)} contigs: {size:,} bytes")
    assert size < 1_500_000


def test_plotly_is_the_published_bundle_of_the_version_whose_figures_the_page_has(written):
    page, _ = written
    bundle = plotly_in(page)
    update = "npm pack plotly.js-basic-dist-min@VERSION, its script through gzip -9n into virnucpro/report/plotly_js"
    assert hashlib.sha256(bundle).hexdigest() == PLOTLY_SHA256, update
    assert bundle[:100].startswith(f"/**\n* plotly.js (basic - minified) v{get_plotlyjs_version()}\n".encode()), update
    licence = (importlib.resources.files("virnucpro.report") / "plotly_js" / "LICENSE").read_text()
    assert licence.startswith("MIT License")
    assert page.comments == [f" plotly.js:\n{licence}"]


@pytest.mark.parametrize(
    "contigs", [None, [Contig(f"c{n}", 900, 0, float(n % 100 == 0), 1) for n in range(600)]], ids=["some", "few viral"]
)
def test_figures_have_only_properties_and_values_that_plotly_knows(tmp_path, contigs):
    page, _ = page_of(tmp_path, contigs, threshold=0.7)
    assert page.figures
    for figure in page.figures.values():
        go.Figure(figure)
        assert "template" not in figure["layout"]


def test_figures_have_only_kinds_of_traces_that_the_bundle_draws(written):
    page, _ = written
    kinds = {trace["type"] for figure in page.figures.values() for trace in figure["data"]}
    assert kinds == {"bar", "scatter"}


def test_no_name_of_the_input_becomes_markup(hostile):
    page, made = hostile
    plain, _ = page_of(made.layout.output_dir.parent / f"{made.layout.output_dir.name}_plain", some_contigs(120))
    assert page.tags == plain.tags
    assert len(page.scripts) == 3  # figures, plotly.js, ours
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for name in NAMES:
        assert name in page.text
    assert "<svg/onload=alert(4)>" in page.text
    assert "</title><script>alert(5)</script>" in page.text
    assert page.says("classifier <script>alert(6)</script>")


def test_hover_text_holds_no_markup_of_the_input(hostile):
    page, _ = hostile
    texts = [text for trace in page.figures["length-against-score"]["data"] for text in trace["text"]]
    assert len(texts) > 100
    for text in texts:
        assert re.findall("<[^>]*>", text) == ["<br>"]
    assert any("&lt;b&gt;bold&lt;/b&gt;" in text for text in texts)


def test_the_same_files_give_the_same_bytes(tmp_path, written):
    _, made = written
    again = make_prediction(tmp_path, missing_frames=3)
    assert write_report(again.layout).read_bytes() == made.layout.report.read_bytes()


def test_the_page_says_what_the_files_say(written):
    page, made = written
    viral = made.count("virus")
    assert page.says(f"{viral} of 400 contigs (32%) are called viral")
    assert page.says(f"{made.count('not virus')} are not viral and {made.count('no open frame')} are without a score")
    assert page.says("This result is partial: 3 of")
    assert page.says("virnucpro-tiny-protein")
    assert page.says(FINGERPRINT)
    assert page.says("embedding of proteins6 min 28 s64%")
    assert page.says("soil_assembly.fasta.gz")
    for row in made.rows:
        assert row["contig"] in page.text
    bars = page.figures["score-histogram"]["data"]
    assert sum(sum(bar["y"]) for bar in bars) == sum(row["score"] != "" for row in made.rows)
    points = page.figures["length-against-score"]["data"]
    assert {trace["name"]: len(trace["x"]) for trace in points} == {
        call: made.count(call) for call in ("virus", "not virus")
    }


def test_with_a_contig_model_a_score_is_a_probability_and_every_contig_has_one(tmp_path, written):
    page, made = page_of(tmp_path, contig_model=True, threshold=0.7)
    closed = sum(row["frames"] == "0" for row in made.rows)
    assert closed > 1
    assert page.says("P(virus) is the probability that a contig is viral, calibrated on genomes")
    assert page.says("Every contig has a score.")
    assert page.says(f"{closed} contigs without an open frame are scored by their sequence alone.")
    assert page.text.count(BY_SEQUENCE) == closed
    assert page.says("each chunk together with its two neighbours")
    assert page.says("where P(virus) is above the dotted line for enough chunks")
    assert page.says("its contig modelvirnucpro-tinyc0dec0dec0dec0de")
    tracks = [figure["layout"]["shapes"] for name, figure in page.figures.items() if name.startswith("track-")]
    for shapes in tracks:
        assert [shape["y0"] for shape in shapes if shape["type"] == "line"] == [0.7]
    assert tracks
    page, _ = written
    assert page.says("it is not a measured rate of error")
    assert not page.says("calibrated")


def test_a_track_has_gaps_where_no_frame_is_open_and_its_regions_shaded(written):
    page, made = written
    number = next(n for n, row in enumerate(made.rows) if row["contig"] == "NODE_12_length_248310_cov_31.7")
    figure = page.figures[f"track-{number}"]
    lines = [line.split("\t") for line in made.layout.tracks.read_text().splitlines()[1:]]
    mine = [(int(start), int(end)) for name, start, end, _ in lines if name == made.rows[number]["contig"]]
    gaps = sum(before[1] < after[0] for before, after in itertools.pairwise(mine)) + (mine[0][0] > 0)
    assert figure["data"][0]["y"].count(None) == gaps > 0
    (region,) = [line.split() for line in made.layout.viral_regions.read_text().splitlines() if "NODE_12" in line]
    shaded = [(shape["x0"], shape["x1"]) for shape in figure["layout"]["shapes"] if shape["type"] == "rect"]
    assert shaded == [(int(region[1]) / 1000, int(region[2]) / 1000)]


def test_every_colour_of_a_figure_has_its_counterpart_in_the_dark(written):
    page, _ = written
    used = set(re.findall(r"#[0-9a-f]{6}", json.dumps(page.figures)))
    assert used
    assert used <= {colour.light for colour in figures.COLOURS.values()}
    assert len({colour.light for colour in figures.COLOURS.values()}) == len(figures.COLOURS)


def luminance(colour):
    """Relative luminance as WCAG 2.2 defines it."""
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(colour, background):
    darker, lighter = sorted([luminance(colour), luminance(background)])
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_and_marks_stand_out_in_light_and_dark(theme):
    """At least 4.5 to 1 for text and 3 to 1 for what is drawn: levels AA of WCAG 2.2, 1.4.3 and 1.4.11."""
    shown = {role: getattr(colour, theme) for role, colour in figures.COLOURS.items()}
    for background in ("surface", "page"):
        for role in ("ink", "muted", "not-virus"):  # links have the colour of what is not viral
            assert contrast(shown[role], shown[background]) >= 4.5, (role, background)
    for role in plots.CALL_COLOURS.values():
        assert contrast(shown[role], shown["surface"]) >= 3, role
    assert contrast(shown["undecided"], shown["no-score"]) >= 1.8
    assert contrast(shown["ink"], shown["region"]) >= 4.5


@pytest.mark.parametrize(
    ("contigs", "words"),
    [
        ([], ["The input holds no contigs", "There was no contig to score"]),
        (
            [Contig(f"c{n}", 900, open_share=0) for n in range(9)],
            ["None of the 9 contigs could be scored: no reading frame was open", "No contig is 10 kb or longer"],
        ),
        ([Contig("c", 900, open_share=0)], ["The only contig could not be scored: no reading frame was open"]),
        ([Contig("c", 12_000, open_share=0)], ["1 contig is 10 kb or longer; none holds a viral region"]),
        ([Contig("c", 0, left_out="in.fasta:3: no letters")], ["The only contig could not be scored"]),
        (
            [Contig(f"c{n}", 2000) for n in range(9)],
            ["None of the 9 contigs is called viral", "Every contig has a score"],
        ),
        ([Contig("c", 2000, 0, 1)], ["The only contig is called viral"]),
        ([Contig(f"c{n}", 2000, 0, 1, 1) for n in range(9)], ["All 9 contigs are called viral"]),
    ],
)
def test_a_page_about_little_says_so(tmp_path, contigs, words):
    page, _ = page_of(tmp_path, contigs)
    for sentence in words:
        assert page.says(sentence)


def test_few_contigs_are_counted_in_whole_numbers_and_short_ranges_of_length_have_ticks(tmp_path):
    page, _ = page_of(tmp_path, [Contig(f"c{n}", 900 + n, 0, 1, 1) for n in range(4)])
    axes = [page.figures[name]["layout"] for name in ("score-histogram", "length-against-score")]
    assert axes[0]["yaxis"]["dtick"] == 1
    assert axes[1]["xaxis"]["dtick"] == "D2"


def test_a_few_viral_contigs_among_very_many_others_can_be_seen(tmp_path):
    counts = {}
    for share in (2, 100):
        contigs = [Contig(f"c{n}", 900, 0, float(n % share == 0), 1) for n in range(600)]
        page, _ = page_of(tmp_path / str(share), contigs)
        counts[share] = page.figures["score-histogram"]["layout"]["yaxis"]["type"]
    assert counts == {2: "linear", 100: "log"}


def test_the_page_stays_small_however_long_the_names_are(tmp_path):
    contigs = [Contig(f"{n:04}" + "<" * 1000, 400, 0, float(n % 2)) for n in range(300)]
    few = make_prediction(tmp_path / "few", [Contig(f"{n:04}", 400, 0, float(n % 2)) for n in range(300)])
    many = make_prediction(tmp_path / "many", contigs)
    growth = write_report(many.layout).stat().st_size - write_report(few.layout).stat().st_size
    assert growth < 300 * (4 * 1000 + 4 * 80) * 1.1 + 40_000


def test_prefect_gets_the_answer_and_the_first_contigs(written, hostile):
    _, made = written
    text = report_markdown(made.layout)
    assert text.startswith(f"# {made.count('virus')} of 400 contigs (32%) are called viral.\n")
    assert "report\\.html" in text
    table = report_table(made.layout)
    assert len(table) == ARTIFACT_CONTIGS
    assert [row["score"] for row in table] == sorted((row["score"] for row in table), reverse=True)
    assert json.loads(json.dumps(table, allow_nan=False)) == table
    _, made = hostile
    assert "\\<script\\>alert\\(5\\)" in report_markdown(made.layout)
