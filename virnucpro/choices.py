"""
The words and the numbers that settings are made of: what the forward passes need of them, and no more.

Imports nothing, so that a worker or a check on a GPU needs neither the forms nor what makes them.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

DEFAULT_PROTEIN_MODEL = "virnucpro-tiny-protein"
DEFAULT_DNA_MODEL = "virnucpro-tiny-dna"
DEFAULT_CLASSIFIER = "virnucpro-tiny"
PROTEIN_MODELS = (
    DEFAULT_PROTEIN_MODEL,
    "esm2_t6_8M_UR50D",
    "esm2_t12_35M_UR50D",
    "esm2_t30_150M_UR50D",
    "esm2_t33_650M_UR50D",
    "esm2_t36_3B_UR50D",
    "esm2_t48_15B_UR50D",
)
DNA_MODELS = (DEFAULT_DNA_MODEL, "dnabert-s")
CLASSIFIERS = (DEFAULT_CLASSIFIER,)
"""Names that forms list; the registry of models and the bundled classifiers have the same."""
AUTO_SHARDED_ROWS = 5_000_000
"""Rows from which a result is sharded by default: a reader of a single file holds all ids in memory, 6 s and 0.7 GB
for this many (``benchmarks/sharded_output.py``)."""
AUTO_SHARDED_BYTES = 32 << 30
"""Bytes of embeddings from which a result is sharded by default: a single file is written in the order of the blocks,
scattered over all of it, and no longer fits the memory of most hosts."""
UNLIMITED_LETTERS = 10**9
"""Residues or nucleotides: no limit, since no record is as long."""
DEFAULT_MAX_RESIDUES = 1022
"""Residues: the length ESM-2 was trained with (1024 tokens less BOS and EOS), Lin et al. 2023. Rotary positions work
beyond it, so it is a setting and not a limit."""
AUTO_TOKEN_BUDGET = 0
"""Stands for a budget resolved when a run begins: a committed number on a CPU, on GPUs what a trial finds."""
DEFAULT_TOKEN_BUDGET = 4096
"""Tokens in one block on a CPU: of 1,024 to 8,192 the best or within noise of it (``benchmarks/scaling.py``)."""
PRIOR_AUTO, PRIOR_OFF = "auto", "off"
LARGE_INPUT_NT = 10**9
"""Nucleotides from which on ``Keep.AUTO`` leaves out frames and embeddings: about 4 bytes for each."""
CASCADE_AUTO, CASCADE_OFF = "auto", "off"
LEAST_PRIOR_CONTIGS = 200
"""Contigs with a score from which the share of viruses is estimated: from there on its estimates spread by some 0.02,
which is less than faults of calibration add (``benchmarks/sample_prior.py`` at commit 96cc9ad)."""
KERNEL_SEPARATOR = " + "
"""Between the names of attention kernels, where a run's devices have several."""
SPECIAL_TOKENS = 2
"""Tokens: BOS and EOS, added to every sequence."""


class Choice(StrEnum):
    """Base of the settings that are one of a few words."""

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: object) -> Any:
        """Check as a literal, so that a form lists the words where the field stands."""
        from pydantic_core import core_schema  # noqa: PLC0415  workers need the words, not the forms

        words = core_schema.literal_schema([str(one) for one in cls])
        return core_schema.no_info_after_validator_function(cls, words)


class SequenceKind(StrEnum):
    """What a model embeds."""

    PROTEIN = "protein"
    DNA = "DNA"


class Precision(Choice):
    """Number format of the forward pass; embeddings are always stored as float32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class PrecisionChoice(Choice):
    """A ``Precision``, or what suits device and model."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class LongPolicy(Choice):
    """What happens to a sequence of more than ``max_residues`` residues."""

    TRUNCATE = "truncate"
    WINDOW = "window"
    """It is embedded as the mean of half-overlapping windows of that length."""
    ERROR = "error"


class GapPolicy(Choice):
    """What happens to ``-`` and ``.`` in a sequence."""

    ERROR = "error"
    REMOVE = "remove"


class StopPolicy(Choice):
    """What happens to ``*`` inside a protein; one at its end is always removed."""

    ERROR = "error"
    X = "x"


class BadRecordPolicy(Choice):
    """What happens to a record that breaks a rule."""

    ERROR = "error"
    SKIP = "skip"


class Keep(Choice):
    """What a complete prediction leaves in its folder."""

    AUTO = "auto"
    """Everything, from ``LARGE_INPUT_NT`` on without frames and embeddings."""
    ALL = "all"
    """Tables, report, frames and embeddings, where there are any."""
    TABLES = "tables"
    """Tables and viral contigs."""


class WrittenGenes(Choice):
    """Contigs whose genes a prediction writes."""

    AUTO = "auto"
    """Those of the folder, at first ``VIRAL``."""
    VIRAL = "viral"
    ALL = "all"
    NONE = "none"


class ResultForm(Choice):
    """What the rows of an embedding run are written into."""

    AUTO = "auto"
    """Sharded from ``AUTO_SHARDED_ROWS`` rows or ``AUTO_SHARDED_BYTES``, else single."""
    SINGLE = "single"
    """One file, ``embeddings.h5``."""
    SHARDED = "sharded"
    """A folder, ``embeddings/``, of files of neighbouring rows and one index of their ids."""
    PARQUET = "parquet"
    """One Apache Parquet file, ``embeddings.parquet``."""


class TableFormat(Choice):
    TSV = "tsv"
    JSON = "json"
    PARQUET = "parquet"


class LogLevel(Choice):
    """Least severe level that is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
