"""
What the build does beyond pyproject.toml: the name of ``flows/`` in a wheel, and addresses on PyPI.

``flows`` is another project on PyPI, so a wheel has the folder as the package ``virnucpro_flows``. In a checkout it
keeps its short name, as ``flows/predict.py:predict`` and ``python -m flows.worker`` have it: a wheel gets copies of its
files that import each other by the longer one. Nothing else in them changes.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

INSTALLED_FLOWS = "virnucpro_flows"
PLACEHOLDER = "https://github.com/OWNER/virnucpro"
"""Stands in the README and in packaging/ for the page of the repository, until its owner fills it in."""
_SHORT_NAME = re.compile(r"(?<![\w./])flows(?=\.\w)")
"""Before a dot only: in ``from flows.run.api import`` and in the names of commands, not in prose or paths."""


class InstalledFlows(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        self.copies = tempfile.TemporaryDirectory()
        root = Path(self.root)
        for path in root.glob("flows/**/*.py"):
            name = Path(INSTALLED_FLOWS, path.relative_to(root / "flows"))
            copy = Path(self.copies.name, name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(_SHORT_NAME.sub(INSTALLED_FLOWS, path.read_text("utf-8")), "utf-8")
            build_data["force_include"][str(copy)] = str(name)

    def finalize(self, *_: object) -> None:
        if hasattr(self, "copies"):
            self.copies.cleanup()


class Addresses(MetadataHookInterface):
    """The release workflow sets PROJECT_PAGE to the page of its repository; other builds have no addresses."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = Path(self.root, "README.md").read_text("utf-8")
        if page := os.environ.get("PROJECT_PAGE"):
            metadata["urls"] = {
                "Source": page,
                "Documentation": f"{page}/tree/HEAD/docs",
                "Changelog": f"{page}/blob/HEAD/CHANGELOG.md",
                "Issues": f"{page}/issues",
            }
            text = text.replace(PLACEHOLDER, page)
            text = re.sub(r"(!\[[^]]*\]\()(?!\w+:|#)", rf"\1{page}/raw/HEAD/", text)
            text = re.sub(r"((?<!!)\[[^]]*\]\()(?!\w+:|#)", rf"\1{page}/blob/HEAD/", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
