"""What is escaped, where it stands, and how numbers are written."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import UndefinedError

from virnucpro.report.formats import counted, cut, nucleotides, percent, probability
from virnucpro.report.html_page import fill, templates


class Seen(HTMLParser):
    """What a parser makes of markup."""

    def __init__(self, markup: str):
        super().__init__()
        self.tags, self.attributes, self.text = [], {}, ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes |= dict(attrs)

    def handle_data(self, data):
        self.text += data


texts = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\0"), max_size=40)
markup = st.sampled_from(
    ["<script>alert(1)</script>", "</td><img src=x onerror=alert(1)>", '" onclick="x', "&lt;", "'", "{{ 7 * 7 }}"]
)


def listed(content, value):
    """Return what a parser makes of the list of reports: one, whose text and address are these."""
    return Seen(fill("reports.html", rows=[("now", (content, value))], is_whole=True).decode())


@given(texts | markup, texts | markup)
def test_text_stays_text_in_content_and_in_attributes(content, value):
    seen = listed(content, value)
    assert seen.tags == listed("", "").tags
    assert "".join(f"now{content}".split()) in "".join(seen.text.split())
    assert seen.attributes["href"] == value


@given(markup)
def test_markup_of_others_is_text_and_markup_of_ours_is_not_escaped_twice(text):
    seen = Seen(str(templates().get_template("macros.html").module.table([text], [[text]], label=text)))
    assert seen.tags == ["div", "table", "thead", "tr", "th", "tbody", "tr", "td"]
    assert "".join(seen.text.split()) == "".join(text.split()) * 2
    assert seen.attributes["aria-label"] == text


def test_a_value_that_a_template_names_and_a_page_lacks_is_an_error():
    with pytest.raises(UndefinedError, match="'is_whole' is undefined"):
        fill("reports.html", rows=[])


def test_only_files_of_ours_and_constants_are_let_through_unescaped():
    sources = {
        name: templates().loader.get_source(templates(), name)[0] for name in templates().list_templates(["html"])
    }
    assert {"macros.html", "prediction/report.html"} < set(sources)
    let_through = {line for text in sources.values() for line in re.findall(r"\{\{[^}]*\bsafe\b[^}]*\}\}", text)}
    assert let_through == {
        "{{ style | safe }}",
        "{{ script | safe }}",
        """{{ ' hidden=""' | safe if hidden }}""",
        """{{ range("Score from", "score", "Score", 'max="1"' | safe) }}""",
    }
    assert not any("autoescape" in text for text in sources.values())


@given(st.dictionaries(st.text(), st.text() | st.floats(allow_nan=False, allow_infinity=False)))
def test_json_in_a_script_comes_back_and_cannot_end_the_script(value):
    value |= {"x": "</script><!--<script>\u2028&"}
    text = templates().from_string("{{ value | tojson }}").render(value=value)
    assert json.loads(text) == value
    assert text.isascii()
    assert not set("<>&") & set(text)


def test_what_is_long_is_cut():
    assert cut("x" * 81, 80) == "x" * 79 + "\u2026"
    assert cut("x" * 80, 80) == "x" * 80


@pytest.mark.parametrize(
    ("part", "total", "text"),
    [
        (0, 0, "0%"),
        (0, 9, "0%"),
        (9, 9, "100%"),
        (1, 3, "33%"),
        (42, 1000, "4.2%"),
        (1, 1_000_000, "<0.01%"),
        (999_999, 1_000_000, "99.99%"),
        (996, 1000, "99.6%"),
    ],
)
def test_a_share_is_never_rounded_to_nothing_or_to_all(part, total, text):
    assert percent(part, total) == text


@pytest.mark.parametrize(
    ("p", "text"),
    [(0, "0.000"), (0.0004, "<0.001"), (0.5, "0.500"), (0.9985, "0.999"), (0.9999, ">0.999"), (1, "1.000")],
)
def test_a_probability_is_never_rounded_to_0_or_1(p, text):
    assert probability(p) == text


def test_numbers_have_units_that_fit():
    lengths = [0, 999, 1000, 48_502, 248_310, 4_641_652, 3_100_000_000]
    written = [nucleotides(number).replace("\u00a0", " ") for number in lengths]
    assert written == ["0 nt", "999 nt", "1.00 kb", "48.5 kb", "248 kb", "4.64 Mb", "3.10 Gb"]
    assert [counted(number, "contig") for number in (0, 1, 1234)] == ["0 contigs", "1 contig", "1,234 contigs"]
