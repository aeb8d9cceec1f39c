"""
What mkdocs.yml takes from outside ``docs/``: the README as first page, guides of deployments/, help of the commands.

Links are written as GitHub follows them, from file to file of the repository. Here they become links from page to page;
a file that is linked and is no page is copied into the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.structure.files import File

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
FURTHER_PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CODE_OF_CONDUCT.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "benchmarks/README.md",
    "benchmarks/results/table.md",
    "examples/README.md",
    "packaging/README.md",
    "tests/faults/README.md",
    "virnucpro/pipeline/README.md",
    *sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("deployments/**/*.md")),
    *sorted(str(path.relative_to(REPOSITORY)) for path in REPOSITORY.glob("virnucpro/models/weights/*/*.md")),
)
HELP = REPOSITORY / "tests" / "faces" / "help.txt"
_LINK = re.compile(r"(?<=\]\()(?!https?://|#)([^)#\s]+)")


def address(path: str) -> str:
    """Return where a file of the repository is in the site."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def commands_page() -> str:
    """Return the help of every command, as the terminal shows it."""
    blocks = re.split(r"^\$ (virnucpro.*) --help\n", HELP.read_text(), flags=re.MULTILINE)[1:]
    sections = [
        f"## {command.strip()}\n\n```text\n{text.strip()}\n```\n"
        for command, text in zip(blocks[::2], blocks[1::2], strict=True)
    ]
    return "# Command line\n\nWhat `virnucpro COMMAND --help` shows.\n\n" + "\n".join(sections)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in ``docs/``."""
    for path in FURTHER_PAGES:
        files.append(File.generated(config, address(path), abs_src_path=str(REPOSITORY / path)))
    files.append(File.generated(config, "commands.md", content=commands_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page with its links turned from files of the repository to pages of the site."""
    source = Path(page.file.abs_src_path or REPOSITORY / "docs" / page.file.src_uri)
    here = posixpath.dirname(page.file.src_uri)

    def turned(match: re.Match[str]) -> str:
        target = (source.parent / match[1]).resolve()
        uri = address(str(target.relative_to(REPOSITORY)))
        if target.is_file() and files.get_file_from_path(uri) is None:
            files.append(File.generated(config, uri, abs_src_path=str(target)))
        return posixpath.relpath(uri, here or ".")

    return _LINK.sub(turned, markdown)
