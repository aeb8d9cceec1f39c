"""VirNucPro tells which contigs or reads of a metagenome are viral."""

from __future__ import annotations

__version__ = "0.1.0"
