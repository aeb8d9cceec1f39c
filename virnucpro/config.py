"""
Settings of a run: frozen, checked in one place, the unit in the first words of each field's text.

Two kinds of setting live here. ``ModelConfig`` is what decides the numbers (model, precision, plan): its
``fingerprint`` is what a resumed run must have in common with the first one. ``RunLimits`` is what decides how long
we wait for a worker, and never changes a result.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.metadata import version
from typing import TypeVar

from virnucpro.errors import ConfigurationError

Choice = TypeVar("Choice", bound=StrEnum)


class Precision(StrEnum):
    """Number format of the forward pass; embeddings are always stored as float32."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class LongPolicy(StrEnum):
    """What happens to a sequence of more than ``max_residues`` residues."""

    TRUNCATE = "truncate"
    """It is cut there."""
    WINDOW = "window"
    """It is embedded as the mean of half-overlapping windows of that length."""
    ERROR = "error"
    """It breaks a rule of the input."""


class SequenceKind(StrEnum):
    """What a model embeds."""

    PROTEIN = "protein"
    DNA = "DNA"


class GapPolicy(StrEnum):
    """What happens to ``-`` and ``.`` in a sequence."""

    ERROR = "error"
    REMOVE = "remove"


class StopPolicy(StrEnum):
    """What happens to ``*`` inside a protein; one at its end is always taken off."""

    ERROR = "error"
    X = "x"


class BadRecordPolicy(StrEnum):
    """What happens to a record that breaks a rule."""

    ERROR = "error"
    SKIP = "skip"


class ResultForm(StrEnum):
    """What the rows of an embedding run are written into."""

    SINGLE = "single"
    """One file, ``embeddings.h5``."""
    SHARDED = "sharded"
    """A folder, ``embeddings/``, of files of neighbouring rows and one index of their ids."""
    PARQUET = "parquet"
    """One Apache Parquet file, ``embeddings.parquet``."""
    AUTO = "auto"
    """Sharded from ``AUTO_SHARDED_ROWS`` rows or ``AUTO_SHARDED_BYTES`` on, else single."""


AUTO_SHARDED_ROWS = 5_000_000
"""Rows from which a result is sharded by itself: whoever opens a single file holds all its ids in memory, of so many
6 s and 0.7 GB (``benchmarks/sharded_output.py``)."""
AUTO_SHARDED_BYTES = 32 << 30
"""Bytes of embeddings from which a result is sharded by itself: a single file is written in the order of the blocks,
which lies scattered over all of it, and no longer fits the memory of most hosts."""

UNLIMITED_LETTERS = 10**9
"""Residues or nucleotides: no limit, since no record is as long."""

DEFAULT_MAX_RESIDUES = 1022
"""Residues: the length ESM-2 was trained with (1024 tokens less BOS and EOS), Lin et al. 2023. Rotary positions go on
beyond it, so that it is a setting and not a limit."""

DEFAULT_TOKEN_BUDGET = 4096
"""Tokens in one block on a CPU: of 1,024 to 8,192 the best or within noise of it (``benchmarks/scaling.py``)."""

AUTO_TOKEN_BUDGET = 0
"""Stands for a budget settled when a run begins: ``DEFAULT_TOKEN_BUDGET`` on a CPU, on GPUs what a trial finds."""

KERNEL_SEPARATOR = " + "
"""Between the names of attention kernels, where a run's devices have several."""

SPECIAL_TOKENS = 2
"""Tokens: BOS and EOS, added to every sequence."""


_NO_EFFECT_ON_ROWS = (
    "sequence_kind",
    "weights_path",
    "hidden_dim",
    "loader",
    "long_policy",
    "allow_empty",
    "log_level",
    "loader_workers",
    "workers_per_device",
    "sequences_per_part",
    "cache_dir",
    "cache_max_bytes",
    "profile",
)

RUNNERS = r"^(threads|ray|ray://[^\s/]+:\d+|dask|dask://slurm|dask://[^\s/]+:\d+)$"
"""What may do the work: this machine, or a cluster of Ray or Dask."""
DEFAULT_CACHE_GIB = 10.0
"""GiB that an embedding cache takes on disk at the most: some 8 million rows of 320 numbers, or 1 million of 2560."""


@dataclass(frozen=True, kw_only=True)
class InputRules:
    """How records are read: part of the identity of an index, since other rules give other sequences."""

    sequence_kind: SequenceKind = SequenceKind.PROTEIN
    """Decides the letters."""
    gaps: GapPolicy = GapPolicy.ERROR
    """What happens to gaps."""
    stops: StopPolicy = StopPolicy.ERROR
    """What happens to stops inside a protein; ``*`` is no letter of DNA."""
    on_bad_record: BadRecordPolicy = BadRecordPolicy.ERROR
    """What happens to a record that breaks a rule."""
    allow_empty: bool = False
    """Whether an input without records is fine."""
    most_residues: int | None = None
    """Residues or nucleotides of a record beyond which it breaks a rule; None is no limit."""
    chunk_nt: int | None = None
    """Nucleotides of the chunks that a record is cut into, whose frames' names must be ids as well; None where it is
    not cut."""

    def __post_init__(self) -> None:
        check_choices(self, sequence_kind=SequenceKind, gaps=GapPolicy, stops=StopPolicy, on_bad_record=BadRecordPolicy)


def check_choices(settings: object, **choices: type[StrEnum]) -> None:
    """
    Turn the fields of frozen *settings* that are choices into their enumeration.

    Raises:
        ConfigurationError: A value is none of them; names all that are.
    """
    for name, allowed in choices.items():
        object.__setattr__(settings, name, one_of(allowed, name, getattr(settings, name)))


def one_of(allowed: type[Choice], name: str, given: str) -> Choice:
    """
    Return what was given for the setting *name* as a member of *allowed*.

    Raises:
        ConfigurationError: It is none; names all that are.
    """
    if given not in set(allowed):
        raise ConfigurationError(f"{name} is {given!r}: choose one of {', '.join(allowed)}")
    return allowed(given)


DEFAULT_RULES = InputRules()
"""Proteins, and every broken rule an error."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What a worker needs to know to compute rows; small and picklable, the same for every rank."""

    model_name: str
    """Name in the registry, or the stem of a checkpoint given as a path."""
    weights_path: str
    """Path of the weights on this machine; never part of the fingerprint."""
    weights_sha256: str
    """Hex sha256 of the weights file: identity of the model."""
    config_sha256: str = ""
    """Hex sha256 of a configuration in a file beside the weights; empty where there is none."""
    hidden_dim: int
    """Width of an embedding; 0 where it is known only once the checkpoint is open."""
    loader: str = "virnucpro.models.esm2_flash:load_esm2_model"
    """``module:function`` that makes (model, tokenizer) from (weights_path, device, precision=...). Set by the
    registry, never from user input."""
    sequence_kind: SequenceKind = SequenceKind.PROTEIN
    """What the model embeds."""
    letters_per_token: float = 1.0
    """Residues or nucleotides that the plan counts as one token. 1 is exact for ESM-2; for BPE it is an estimate, and
    a block's true tokens are at the most its letters and special tokens."""
    precision: Precision = Precision.FP32
    """Number format of the forward pass."""
    token_budget: int = AUTO_TOKEN_BUDGET
    """Tokens, special ones included, that one block holds at the most; raised to the longest sequence."""
    attention_kernel: str = ""
    """Attention kernels of the run's GPUs, as found before the plan was made; empty on a CPU, which has one."""
    threads_per_worker: int = 1
    """Threads of a CPU worker. Part of the fingerprint: another number gives other last bits."""
    max_residues: int = DEFAULT_MAX_RESIDUES
    """Residues (of DNA: nucleotides) of a sequence that are embedded; see ``long_policy``."""
    long_policy: LongPolicy = LongPolicy.TRUNCATE
    """What happens to longer sequences."""
    gaps: GapPolicy = GapPolicy.ERROR
    """What happens to ``-`` and ``.`` in a sequence."""
    stops: StopPolicy = StopPolicy.ERROR
    """What happens to ``*`` inside a protein."""
    on_bad_record: BadRecordPolicy = BadRecordPolicy.ERROR
    """What happens to a record that breaks a rule: the run is refused, or it goes on without that record."""
    allow_empty: bool = False
    """Whether an input without records is fine. Never changes a row."""
    log_level: str = "INFO"
    """Least severe level that a worker's log file records."""
    loader_workers: int = 0
    """Processes beside each worker that read and tokenise; 0 reads in the worker itself. Never changes a row."""
    workers_per_device: int = 1
    """Workers that share a GPU, and its memory. Never changes a row."""
    sequences_per_part: int = 4096
    """Sequences after which a worker makes its finished blocks durable. Never changes a row."""

    cache_dir: str | None = None
    """Folder of the embedding cache, on a local disk; None uses none. A run served from it promises tolerance."""
    cache_max_bytes: int = int(DEFAULT_CACHE_GIB * 2**30)
    """Bytes of the embedding cache's file at the most."""
    profile: bool = False
    """Whether workers record when they did what, for a timeline. Never changes a row."""

    def __post_init__(self) -> None:
        check_choices(
            self,
            precision=Precision,
            long_policy=LongPolicy,
            gaps=GapPolicy,
            stops=StopPolicy,
            on_bad_record=BadRecordPolicy,
        )
        if self.letters_per_token < 1:
            raise ConfigurationError(f"letters_per_token is {self.letters_per_token}: it must be at least 1")
        for name, least in (
            ("token_budget", AUTO_TOKEN_BUDGET),
            ("threads_per_worker", 1),
            ("max_residues", 1),
            ("loader_workers", 0),
            ("workers_per_device", 1),
            ("sequences_per_part", 1),
            ("cache_max_bytes", 1 << 20),
        ):
            value = getattr(self, name)
            if value < least:
                raise ConfigurationError(f"{name} is {value}: it must be at least {least}")

    def result_settings(self) -> dict[str, object]:
        """Return what decides the bytes of a row, ready for JSON; device type and versions are added by the run."""
        everything = {name: str(x) if isinstance(x, StrEnum) else x for name, x in asdict(self).items()}
        for name in _NO_EFFECT_ON_ROWS:
            del everything[name]
        if not self.attention_kernel:
            del everything["attention_kernel"]
        decides = self.in_windows or (
            self.long_policy is LongPolicy.ERROR and self.on_bad_record is BadRecordPolicy.SKIP
        )
        if decides:  # else a row is the same whether it was allowed to be cut or not
            everything["long_policy"] = str(self.long_policy)
        return everything

    @property
    def in_windows(self) -> bool:
        """Whether a long sequence is embedded as the mean of its windows."""
        return self.long_policy is LongPolicy.WINDOW

    @property
    def most_kept_residues(self) -> int:
        """Residues after which a sequence is cut."""
        return UNLIMITED_LETTERS if self.in_windows else self.max_residues

    @property
    def input_rules(self) -> InputRules:
        """How the input of a run with these settings is read."""
        return InputRules(
            sequence_kind=self.sequence_kind,
            gaps=self.gaps,
            stops=self.stops,
            on_bad_record=self.on_bad_record,
            allow_empty=self.allow_empty,
            most_residues=self.max_residues if self.long_policy is LongPolicy.ERROR else None,
        )

    def cache_space(self) -> str:
        """
        Return what decides a row beside its sequence, up to the tolerance of the precision, as text.

        The plan, the device and the kernel decide last bits only, and are left out. Our own version is in it, so that
        rows of a version with a defect are never served by the one that mends it.
        """
        space = {
            "loader": self.loader,
            "weights_sha256": self.weights_sha256,
            "config_sha256": self.config_sha256,
            "precision": self.precision,
            "max_residues": self.max_residues,
            "virnucpro": version("virnucpro"),
        }
        if self.in_windows:
            space["long_policy"] = str(self.long_policy)
        return fingerprint(space)


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """How long the parent waits, and how often it tries; results never depend on it."""

    attempts: int = 3
    """Processes of one rank, one after the other, that fail without getting anything done, before the rank is lost."""
    heartbeat_timeout_s: float = 120.0
    """Seconds without any sign of life, from the start of the process on, after which a worker is killed."""
    startup_timeout_s: float = 1800.0
    """Seconds from its start until a worker must have loaded its model."""
    progress_timeout_s: float = 900.0
    """Seconds without a finished batch, once the model is loaded, after which a worker is killed."""
    stop_grace_s: float = 6.0
    """Seconds between SIGTERM and SIGKILL when a worker is stopped; the whole run is to be gone within ten."""


def computing_versions() -> dict[str, str]:
    """Return the versions that decide the last bits of a row; rows of other versions are not continued."""
    return {"torch version": version("torch"), "virnucpro version": version("virnucpro")}


def fingerprint(values: object) -> str:
    """Return the hex sha256 of *values* as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
