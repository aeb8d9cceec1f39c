"""The page as a file: whole in itself, the same every time, and with nothing of the input read as markup."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
from email.message import Message
from html.parser import HTMLParser

import pytest

from tests.made_prediction import BY_SEQUENCE, FINGERPRINT, Contig, make_prediction, record_of, some_contigs
from virnucpro.report import html_page as figures
from virnucpro.report.prediction import plots
from virnucpro.report.prediction.artifacts import ARTIFACT_CONTIGS, report_markdown, report_table
from virnucpro.report.prediction.page import write_report
from virnucpro.report.prediction.summary import TRACK_STEPS
from virnucpro.report.prediction.viral_records import find_genes

NAMES = [
    "<img/src=x/onerror=alert(1)>",
    "</script><script>alert(2)</script>",
    "a\u2028b<!--<script>",
    "<b>bold</b>$$&amp;&lt;i&gt;",
    "\"'onmouseover=alert(3)x='",
    "${script}",
]
PAPER = "https://doi.org/10.1093/bib/bbaf224"
PAGE_KINDS = {"curve", "dotted", "grid", "base", "bar", "gene", "dots", "hole", "round", "square", "ring", "thin"}
"""Classes of marks that are no colour."""


class Page(HTMLParser):
    """The elements, attributes, scripts, plots and text of a page."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.attributes, self.scripts, self.text = set(), [], [], ""
        self.paths, self.tips, self.labels = {}, {}, {}
        """Of each plot: class and path of its marks, its tips, and the labels of its axes."""
        self.data = None
        """Of the table of contigs."""
        self._kind = self._plot = self._label = None
        self.feed(path.read_text(encoding="utf-8"))
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.add(tag)
        self.attributes += [(tag, *one) for one in attrs]
        if tag == "script":
            self.scripts.append((given.get("type"), ""))
            self._plot = None if given.get("id") == "contigs" else self._plot
        if tag == "div" and given.get("class") == "plot":
            self._plot = given["id"]
            self.paths[self._plot], self.labels[self._plot] = [], {"at-x": [], "at-y": []}
        if tag == "path" and self._plot:
            self.paths[self._plot].append((given["class"], given["d"]))
        self._label = given.get("class") if tag == "span" and given.get("class", "").startswith("at-") else None
        self._kind = tag

    def handle_endtag(self, tag):
        if tag == "script" and self.scripts[-1][0] == "application/json":
            value = json.loads(self.scripts[-1][1])
            if self._plot:
                self.tips[self._plot], self._plot = value, None
            else:
                self.data = value
        self._kind = self._label = None

    def handle_data(self, data):
        if self._kind == "script":
            kind, before = self.scripts[-1]
            self.scripts[-1] = (kind, before + data)
        elif self._kind != "style":
            self.text += data
            if self._label:
                self.labels[self._plot][self._label].append(data)

    def says(self, words):
        return words in " ".join(self.text.replace("\u00a0", " ").split())

    def column(self, name):
        """Return a column of the table's data, as the page's script reads it."""
        column = self.data["columns"][name]
        texts = column["texts"].split("\n") if "texts" in column else None
        return texts or [column["of"][at] for at in column.get("at", [0] * self.data["total"])]


def page_of(folder, contigs=None, **settings):
    made = make_prediction(folder, contigs, **settings)
    return Page(write_report(made.layout)), made


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
    sources = [
        (tag, name, value) for tag, name, value in page.attributes if name in {"src", "srcset", "data", "action"}
    ]
    assert sources == []
    assert {value for _, name, value in page.attributes if name == "href"} == {"data:,", PAPER}


def test_the_page_says_how_to_cite_where_the_documentation_is_and_that_absence_is_not_shown(tmp_path, monkeypatch):
    for contigs in ([], [Contig("c", 2000, 0, 1)]):
        page, made = page_of(tmp_path / str(len(contigs)), contigs)
        assert page.says("Documentation: docs/prediction.md of the source. To cite: virnucpro ")
        assert page.says("its method, Li et al. 2025, doi:10.1093/bib/bbaf224.")
        assert page.says("A sample without a viral contig may still hold viruses:")
    released = Message()
    released["Project-URL"] = "Source, https://example.org/v"
    released["Project-URL"] = "Documentation, https://example.org/v/docs"
    monkeypatch.setattr(figures, "metadata", lambda _: released)
    page = Page(write_report(made.layout))
    assert page.says("docs/prediction.md of the source, https://example.org/v/docs. To cite")
    assert ("a", "href", "https://example.org/v/docs") in page.attributes


def test_files_beside_the_page_are_named_but_are_no_links_as_a_mailed_page_has_none(written):
    page, made = written
    named = [value for _, name, value in page.attributes if name == "data-file"]
    assert {"contigs.tsv", "viral.fasta", "viral_regions.bed", "run.json"} <= set(named)
    assert all((made.layout.output_dir / name).exists() for name in named)


def test_only_the_script_that_stands_in_the_page_may_run_and_nothing_may_be_loaded(written):
    page, _ = written
    (policy,) = [value for tag, name, value in page.attributes if name == "content" and "default-src" in value]
    scripts = [text.encode() for kind, text in page.scripts if kind is None]
    assert len(scripts) == 1
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
    assert size < 500_000


def test_no_name_of_the_input_becomes_markup(hostile):
    page, made = hostile
    plain, _ = page_of(made.layout.output_dir.parent / f"{made.layout.output_dir.name}_plain", some_contigs(120))
    assert page.tags == plain.tags
    assert [kind for kind, _ in page.scripts if kind != "application/json"] == [None]
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    for name in NAMES:
        assert name in page.text
    assert "<svg/onload=alert(4)>" in page.text
    assert "</title><script>alert(5)</script>" in page.text
    assert page.says("classifier <script>alert(6)</script>")


def test_names_are_whole_in_the_data_of_the_page(hostile):
    page, _ = hostile
    assert set(NAMES) < set(page.column("contig"))
    tips = [text for _, _, text in page.tips["length-against-score"]]
    for name in NAMES:
        assert any(tip.startswith(f"{name}: 12.0") for tip in tips)


def test_the_same_files_give_the_same_bytes(tmp_path, written):
    _, made = written
    again = make_prediction(tmp_path, missing_frames=3)
    assert write_report(again.layout).read_bytes() == made.layout.report.read_bytes()


def test_the_page_says_what_the_files_say(written):
    page, made = written
    viral = made.count("virus")
    assert page.says(f"{viral} of 400 contigs (32%) are called viral")
    not_viral, no_score = made.count("not virus"), made.count("no open frame")
    assert page.says(f"{not_viral} are called not viral and {no_score} are without a score")
    assert page.says("This result is partial: 3 of")
    assert page.says("virnucpro-tiny-protein")
    assert page.says(FINGERPRINT)
    assert page.says("embedding of proteins 6 min 28 s 64%")
    assert page.says("soil_assembly.fasta.gz")
    bars = " ".join(text for _, _, text in page.tips["score-histogram"])
    points = [text.rpartition(", ")[2] for _, _, text in page.tips["length-against-score"]]
    for call in ("virus", "not virus"):
        assert sum(int(n.replace(",", "")) for n in re.findall(rf"([\d,]+) {call}\b", bars)) == made.count(call)
        assert points.count(call) == made.count(call)


def test_the_data_of_the_table_are_the_lines_of_contigs_tsv(written):
    page, made = written
    columns = [page.column(name) for name in page.data["exported"]]
    lines = {"\t".join(values) for values in zip(*columns, strict=True)}
    header, *expected = made.layout.contigs.read_text().splitlines()
    assert "\t".join(page.data["exported"]) == header
    assert lines == set(expected)
    assert page.says("Find and the filters reach all 400 contigs.")
    scores = [float(score or -1) for score in page.column("score")]
    assert scores == sorted(scores, reverse=True)


def test_the_first_rows_stand_in_the_page_without_its_script(written):
    page, _ = written
    assert page.says("The first 50 of 400 contigs")
    table = page.text.partition("The first 50 of 400 contigs")[2]
    shown = [name for name in page.column("contig") if name in table]
    assert shown[:50] == page.column("contig")[:50]


def test_the_page_holds_the_records_of_viral_contigs_as_far_as_they_fit_and_says_so(written, tmp_path):
    page, made = written
    records = made.layout.viral_fasta.read_text()
    assert page.data["records"]
    assert all(record in records and record.startswith(">") for record in page.data["records"].values())
    viral = made.count("virus")
    assert len(page.data["records"]) < viral
    assert page.says(f"Copy takes the sequence of {len(page.data['records'])} of the {viral} contigs called viral")
    assert sum(record.count("A") for record in page.data["records"].values()) < 200_000
    numbers = {made.rows[int(number)]["contig"] for number in page.data["records"]}
    assert numbers == {record[1:].split()[0] for record in page.data["records"].values()}
    page, _ = page_of(tmp_path, [Contig("c", 2000, 0, 1)])
    assert page.says("Copy takes the sequence of a contig called viral.")


def test_genes_of_viral_contigs_are_drawn_as_arrows_and_said(written):
    page, made = written
    number = next(n for n, row in enumerate(made.rows) if row["contig"] == "k141_phage_complete")
    genes = find_genes(record_of(made.rows[number]))
    (arrows,) = [path for kind, path in page.paths[f"track-{number}"] if kind == "bar gene"]
    assert arrows.count("M") == len(genes) > 10
    said = [text for _, _, text in page.tips[f"track-{number}"] if text.startswith("gene ")]
    assert sorted(said) == sorted(gene.said() for gene in genes)
    assert page.says(f"{len(genes)} likely genes")


def test_a_long_viral_contig_with_the_same_score_all_along_has_no_flat_line(tmp_path):
    made = make_prediction(tmp_path, [Contig(f"long{n}", 20_000, 0, 1) for n in range(3)])
    lines = made.layout.tracks.read_text().splitlines()
    even = [re.sub(r"\t[^\t]+$", "\t0.9876", line) if line.startswith("long1\t") else line for line in lines]
    made.layout.tracks.write_text("".join(f"{line}\n" for line in even))
    page = Page(write_report(made.layout))
    drawn = {name for name, paths in page.paths.items() if any(kind == "curve ink" for kind, _ in paths)}
    assert drawn == {"track-0", "track-2"}
    assert [kind for kind, _ in page.paths["track-1"] if kind.startswith("bar")] == ["bar gene"]
    assert page.says("Of the 3 long contigs called viral, 1 is not shown as a line: the score is 0.8 or more all along")
    assert page.says("along it 0.988")


def test_with_a_contig_model_a_score_is_a_probability_and_every_contig_has_one(tmp_path, written):
    page, made = page_of(tmp_path, contig_model=True, threshold=0.7)
    closed = sum(row["frames"] == "0" for row in made.rows)
    assert closed > 1
    assert page.says("The score is the probability that a contig is viral, calibrated on genomes")
    assert not page.says("What has no score")
    assert page.says(f"{closed} contigs without an open frame are scored by their sequence alone.")
    assert page.column("why").count(BY_SEQUENCE) == closed
    assert page.says("each chunk together with its two neighbours")
    assert page.says("where the score is above the dotted line for enough chunks")
    assert page.says("its contig model virnucpro-tiny c0dec0dec0dec0de")
    tracks = [paths for name, paths in page.paths.items() if name.startswith("track-")]
    dotted = [path for paths in tracks for kind, path in paths if kind == "curve dotted"]
    assert dotted
    for path in dotted:  # at 0.5 of an axis to 1.02, which is lower where genes are below
        (y,) = re.findall(r"^M0 (\d+)H2000$", path)
        assert int(y) in {round(2000 * (0.52 / 1.02)), round(2000 * (0.52 / 1.54))}
    page, _ = written
    assert page.says("it is not a measured rate of error")
    assert not page.says("calibrated")


def test_a_track_has_gaps_where_no_frame_is_open_and_its_regions_shaded(written):
    page, made = written
    number = next(n for n, row in enumerate(made.rows) if row["contig"] == "NODE_12_length_248310_cov_31.7")
    paths = dict(page.paths[f"track-{number}"])
    lines = [line.split("\t") for line in made.layout.tracks.read_text().splitlines()[1:]]
    mine = [(int(start), int(end)) for name, start, end, _ in lines if name == made.rows[number]["contig"]]
    assert len(mine) > TRACK_STEPS  # so means over windows are shown
    (region,) = [line.split() for line in made.layout.viral_regions.read_text().splitlines() if "NODE_12" in line]
    start, end = (round(2000 * int(at) / 248_310) for at in region[1:3])
    assert re.findall(r"M(\d+) \d+H(\d+)", paths["bar region"]) == [(str(start), str(end))]
    number = next(n for n, row in enumerate(made.rows) if row["contig"] == "k141_two_prophages")
    mine = [(int(a), int(b)) for name, a, b, _ in lines if name == "k141_two_prophages"]
    gaps = sum(before[1] < after[0] for before, after in itertools.pairwise(mine))
    assert dict(page.paths[f"track-{number}"])["curve ink"].count("M") == gaps + 1 > 1


def test_every_mark_has_a_colour_of_the_page(written):
    page, _ = written
    kinds = {kind for paths in page.paths.values() for names, _ in paths for kind in names.split()}
    assert kinds - PAGE_KINDS <= set(figures.COLOURS)
    assert {"virus", "not-virus", "region", "ink"} <= kinds
    text = written[1].layout.report.read_text()
    for role, colour in figures.COLOURS.items():
        assert text.count(f"--{role}:{colour.light};") == text.count(f"--{role}:{colour.dark};") == 1


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
        ([], ["The input holds no contigs", "A sample without a viral contig may still hold viruses"]),
        (
            [Contig(f"c{n}", 900, open_share=0) for n in range(9)],
            ["None of the 9 contigs could be scored: no reading frame was open", "9 contigs of 9:"],
        ),
        ([Contig("c", 900, open_share=0)], ["The only contig could not be scored: no reading frame was open"]),
        ([Contig("c", 12_000, open_share=0)], ["1 contig is 10 kb or longer; none holds a viral region"]),
        ([Contig("c", 0, left_out="in.fasta:3: no letters")], ["The only contig could not be scored"]),
        (
            [Contig(f"c{n}", 2000) for n in range(9)],
            ["None of the 9 contigs is called viral", "Of the contigs, 9 are called not viral"],
        ),
        ([Contig("c", 2000, 0, 1)], ["The only contig is called viral"]),
        ([Contig(f"c{n}", 2000, 0, 1, 1) for n in range(9)], ["All 9 contigs are called viral"]),
    ],
)
def test_a_page_about_little_says_so(tmp_path, contigs, words):
    page, _ = page_of(tmp_path, contigs)
    for sentence in words:
        assert page.says(sentence)


def test_few_contigs_are_counted_in_whole_numbers_and_short_ranges_of_length_have_labels(tmp_path):
    page, _ = page_of(tmp_path, [Contig(f"c{n}", 900 + n, 0, 1, 1) for n in range(4)])
    assert all(label.isdigit() for label in page.labels["score-histogram"]["at-y"])
    assert page.labels["length-against-score"]["at-x"] == ["900", "903"]
    page, _ = page_of(tmp_path / "more", [Contig(f"c{n}", 900 * n, 0, 1, 1) for n in range(1, 9)])
    assert page.labels["length-against-score"]["at-x"] == ["1k", "2k", "5k"]


def test_a_few_viral_contigs_among_very_many_others_can_be_seen(tmp_path):
    for share, shown in ((2, "score-histogram"), (100, "score-histogram-log")):
        contigs = [Contig(f"c{n}", 900, 0, float(n % share == 0), 1) for n in range(600)]
        text = write_report(make_prediction(tmp_path / str(share), contigs).layout).read_text()
        hidden = {"score-histogram", "score-histogram-log"} - {shown}
        assert re.findall(r'<div id="(score-histogram[^"]*)"[^>]* hidden=""', text) == list(hidden)
        assert f'data-plot="score-histogram" aria-pressed="{str(share == 100).lower()}"' in text


def test_the_page_stays_small_however_long_the_names_are(tmp_path):
    contigs = [Contig(f"{n:04}" + "<" * 1000, 400, 0, float(n % 2)) for n in range(300)]
    few = make_prediction(tmp_path / "few", [Contig(f"{n:04}", 400, 0, float(n % 2)) for n in range(300)])
    many = make_prediction(tmp_path / "many", contigs)
    growth = write_report(many.layout).stat().st_size - write_report(few.layout).stat().st_size
    in_data, in_tips, in_records, in_rows = 300 * 6 * 1000, 300 * 6 * 80, 150 * 6 * 1000, 50 * 4 * 1000
    assert growth < in_data + in_tips + in_records + in_rows + 100_000


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
