"""Pages: every link leads somewhere, and every path exists. What their commands do: ``test_command_blocks.py``."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY
from virnucpro.store.contig_table import COLUMNS

PAGES = [
    *sorted(REPOSITORY.glob("*.md")),
    *(
        path
        for folder in ("docs", "deployments", "examples", "packaging")
        for path in sorted((REPOSITORY / folder).glob("**/*.md"))
    ),
]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))


def anchors(page):
    titles = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_every_link_and_path_of_a_page_exists(page):
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not target.startswith(("https://", "http://")):
            name, _, anchor = target.partition("#")
            assert (page.parent / name).exists(), target
            assert not anchor or anchor in anchors(page.parent / name if name else page), target
    for path in re.findall(r"(?<![\w/])(?:benchmarks|deployments|docs|flows|tests)/[\w./-]*\w", text):
        assert (REPOSITORY / path).exists() or (page.parent / path).exists(), path


def test_the_page_of_files_has_every_column_of_the_table_of_contigs():
    section = (REPOSITORY / "docs" / "files.md").read_text().partition("## contigs.tsv\n")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, flags=re.MULTILINE) == list(COLUMNS)


def test_what_works_around_prefect_is_where_the_table_says_and_was_looked_at_with_both_pinned_versions():
    text = (REPOSITORY / "CONTRIBUTING.md").read_text()
    section = text.partition("## What works around Prefect\n")[2].partition("\n## ")[0]
    pins = [(REPOSITORY / name).read_text() for name in ("constraints.txt", "packaging/newest-requirements.txt")]
    floor, newest = re.findall(r"^prefect==(\S+)$", "\n".join(pins), flags=re.MULTILINE)
    assert f"in the code of Prefect {floor} and {newest}," in section, "look again at each line of the table"
    rows = re.findall(r"^\| (`.+?) \| .+ \| .+ \| .+ \|$", section, flags=re.MULTILINE)
    assert len(rows) > 10
    for place in "; ".join(rows).split("; "):
        path, _, names = place.partition(": ")
        code = (REPOSITORY / path.strip("`")).read_text()
        assert all(name.strip("`") in code for name in names.split(", ")), place


def test_the_example_to_read_first_is_short_needs_nothing_of_ours_and_is_linked_at_the_top():
    text = (REPOSITORY / "examples" / "prefect_flow.py").read_text()
    assert len(text.splitlines()) <= 60
    assert not re.findall(r"^ *(?:from|import) (?:virnucpro|flows|tests|tools)\b", text, flags=re.MULTILINE)
    for page in ("docs/prefect.md", "examples/README.md"):
        assert "prefect_flow.py" in "\n".join((REPOSITORY / page).read_text().splitlines()[:8]), page
