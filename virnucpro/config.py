"""
Settings of a run: frozen, checked in one place, the unit in the first words of each field's text.

Two kinds of setting live here. ``ModelConfig`` is what decides the numbers (model, precision, plan): its
``fingerprint`` is what a resumed run must have in common with the first one. ``RunLimits`` is what decides how long
we wait for a worker, and never changes a result.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Self

from virnucpro.allowed_roots import DATA_ROOTS
from virnucpro.choices import (
    AUTO_TOKEN_BUDGET,
    DEFAULT_MAX_RESIDUES,
    UNLIMITED_LETTERS,
    BadRecordPolicy,
    GapPolicy,
    LongPolicy,
    Precision,
    SequenceKind,
    StopPolicy,
)
from virnucpro.errors import ConfigurationError

if TYPE_CHECKING:
    from virnucpro.settings import EmbeddingSettings, Limits


@dataclass(frozen=True, kw_only=True)
class InputRules:
    """How records are read: part of the identity of an index, since other rules give other sequences."""

    sequence_kind: SequenceKind = SequenceKind.PROTEIN
    """Decides the letters."""
    gaps: GapPolicy = GapPolicy.ERROR
    stops: StopPolicy = StopPolicy.ERROR
    """What happens to stops inside a protein; ``*`` is no letter of DNA."""
    on_bad_record: BadRecordPolicy = BadRecordPolicy.ERROR
    """What happens to a record that breaks a rule."""
    allow_empty: bool = False
    """Whether an input without records is fine."""
    most_residues: int | None = None
    """Residues or nucleotides of a record beyond which it breaks a rule; None is no limit."""
    rna: bool = False
    """Whether U in nucleotides is read as T."""
    chunk_nt: int | None = None
    """Nucleotides of the chunks that a record is cut into, whose frames' names must be ids as well; None where it is
    not cut."""

    def __post_init__(self) -> None:
        choices = {
            "sequence_kind": SequenceKind,
            "gaps": GapPolicy,
            "stops": StopPolicy,
            "on_bad_record": BadRecordPolicy,
        }
        for name, choice in choices.items():  # as an index or a manifest has them: plain text
            object.__setattr__(self, name, choice(getattr(self, name)))
        if self.rna and self.sequence_kind is SequenceKind.PROTEIN:
            raise ConfigurationError("reading U as T is for nucleotides: the U of a protein is selenocysteine")


DEFAULT_RULES = InputRules()
"""Proteins, and every broken rule an error."""


def _default_settings() -> EmbeddingSettings:
    from virnucpro.settings import EmbeddingSettings  # noqa: PLC0415  checks of the models do without pydantic

    return EmbeddingSettings()


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
    provider: str = ""
    """Package and version that the encoder is from, where it is not ours; other versions may compute other rows."""
    sequence_kind: SequenceKind = SequenceKind.PROTEIN
    letters_per_token: float = 1.0
    """Residues or nucleotides that the plan counts as one token. 1 is exact for ESM-2; for BPE it is an estimate, and
    a block's true tokens are at most its letters and special tokens."""
    precision: Precision = Precision.FP32
    """As resolved for the device."""
    token_budget: int = AUTO_TOKEN_BUDGET
    """As resolved when the run begins: tokens, special ones included, of one block at most; raised to the longest
    sequence."""
    attention_kernel: str = ""
    """Attention kernels of the run's GPUs, as found before the plan was made; empty on a CPU, which has one."""
    max_residues: int = DEFAULT_MAX_RESIDUES
    """As resolved for the model: residues (of DNA: nucleotides) of a sequence that are embedded."""
    settings: EmbeddingSettings = field(default_factory=_default_settings)
    """As the user gave them."""
    data_roots: str | None = field(default_factory=partial(os.environ.get, DATA_ROOTS))
    """Folders that input may be in, as the driver's environment has them; hosts without a setting have the same."""
    sequences_per_part: int = 4096
    """Sequences after which a worker makes its finished blocks durable. Never changes a row."""

    def __post_init__(self) -> None:
        if self.letters_per_token < 1:
            raise ConfigurationError(f"letters_per_token is {self.letters_per_token}: it must be at least 1")
        for name, least in (
            ("token_budget", AUTO_TOKEN_BUDGET),
            ("max_residues", 1),
            ("sequences_per_part", 1),
        ):
            if getattr(self, name) < least:
                raise ConfigurationError(f"{name} is {getattr(self, name)}: it must be at least {least}")

    def result_settings(self) -> dict[str, object]:
        """Return what decides the bytes of a row, ready for JSON; device type and versions are added by the run."""
        from virnucpro.knobs import recorded_settings  # noqa: PLC0415  as in ``_default_settings``

        hardware, rules = self.settings.hardware, self.settings.sequences
        of_model = ("model_name", "weights_sha256", "config_sha256", "letters_per_token", "precision", "token_budget")
        deciding = {name: getattr(self, name) for name in of_model}
        deciding |= {name: value for name in ("attention_kernel", "provider") if (value := getattr(self, name))}
        asked = recorded_settings(hardware) | recorded_settings(rules)
        resolved = {"precision": str(self.precision), "token_budget": self.token_budget}
        deciding |= asked | resolved | {"max_residues": self.max_residues}
        decides = self.in_windows or (rules.long == LongPolicy.ERROR and rules.on_bad_record == BadRecordPolicy.SKIP)
        if not decides:  # a row is the same whether it was allowed to be truncated or not
            del deciding["long_policy"]
        if not rules.rna:  # earlier runs have no such setting
            del deciding["rna"]
        return deciding

    @property
    def in_windows(self) -> bool:
        """Whether a long sequence is embedded as the mean of its windows."""
        return self.settings.sequences.long is LongPolicy.WINDOW

    @property
    def most_kept_residues(self) -> int:
        """Residues after which a sequence is cut."""
        return UNLIMITED_LETTERS if self.in_windows else self.max_residues

    @property
    def input_rules(self) -> InputRules:
        """How the input of a run with these settings is read."""
        rules = self.settings.sequences
        return InputRules(
            sequence_kind=self.sequence_kind,
            gaps=rules.gaps,
            stops=rules.stop,
            on_bad_record=rules.on_bad_record,
            allow_empty=rules.allow_empty,
            rna=rules.rna,
            most_residues=self.max_residues if rules.long is LongPolicy.ERROR else None,
        )

    def cache_space(self) -> str:
        """
        Return what decides a row beside its sequence, up to the tolerance of the precision, as text.

        The plan, the device and the kernel decide last bits only, and are not in it. Our own version is in it, so that
        rows of a version with a defect are never served by the one that fixes it.
        """
        space = {
            "loader": f"{self.loader} {self.provider}".rstrip(),
            "weights_sha256": self.weights_sha256,
            "config_sha256": self.config_sha256,
            "precision": self.precision,
            "max_residues": self.max_residues,
            "virnucpro": version("virnucpro"),
        }
        if self.in_windows:
            space["long_policy"] = str(self.settings.sequences.long)
        return fingerprint(space)


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """How long the parent waits, and how often it tries; results never depend on it."""

    attempts: int = 3
    """Processes of one rank, one after the other, that fail without getting anything done, before the rank is lost."""
    heartbeat_timeout_s: float = 120.0
    """Seconds without a heartbeat, from the start of the process, after which a worker is killed."""
    startup_timeout_s: float = 1800.0
    """Seconds from its start until a worker must have loaded its model."""
    progress_timeout_s: float = 900.0
    """Seconds without a finished batch, once the model is loaded, after which a worker is killed."""
    stop_grace_s: float = 6.0
    """Seconds between SIGTERM and SIGKILL when a worker is stopped; the whole run is to be gone within ten."""

    @classmethod
    def of(cls, limits: Limits) -> Self:
        """Return the limits that the user gave, the others as they are."""
        return cls(attempts=limits.worker_retries + 1)


def computing_versions() -> dict[str, str]:
    """Return the versions that decide the last bits of a row; rows of other versions are not continued."""
    return {"torch version": torch_version(), "virnucpro version": version("virnucpro")}


def torch_version() -> str:
    """Return the version of torch; "none" where it is not installed, as contigs are scored without it."""
    try:
        return version("torch")
    except PackageNotFoundError:
        return "none"


def fingerprint(values: object) -> str:
    """Return the hex sha256 of *values* as canonical JSON."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
