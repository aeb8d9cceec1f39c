"""
``run.json``: what a run is (input, settings, versions) and how it went (ranks or stages, counts, files).

Embeddings, predictions and trainings share one reader and one writer. The file is replaced as a whole and carries a
checksum of itself: changed by hand or by a bad disk, it is refused, since a later start relies on every value. What
must not be in a result stands here: host, dates, devices, run id.
"""

from __future__ import annotations

import hashlib
import json
import platform
import socket
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import ConfigDict, Strict, TypeAdapter, ValidationError

from virnucpro import durable
from virnucpro.choices import ResultForm
from virnucpro.cost import Cost
from virnucpro.errors import ResultError
from virnucpro.run_folders import read_bytes
from virnucpro.run_layout import FolderLayout, PredictionLayout
from virnucpro.this_host import merged_processors, processors_differ

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from typing import Self

FORMAT = 1
"""Version of the layout of all three."""
PREDICTION: Final = "prediction"
TRAINING: Final = "training"
CHECKSUM = "manifest_sha256"
REMEDY = "restore it, or use another output folder"
COMPUTING_PACKAGES = ("virnucpro", "torch", "fair-esm", "numpy", "h5py", "pydustmasker")
FINISHED = ("complete", "partial")
"""States of a run that has a result."""
COUNTED = ("contigs", "chunks", "frames", "skipped", "scored_frames", "missing_frames")
"""Counts of every prediction that has a result."""
_KEYS = (
    *("run_id", "state", "started", "host", "inputs", "settings", "output_settings", "plan", "models", "fingerprint"),
    *("versions", "devices", "sequences", "finished", "outputs", "stages_s", "ranks", "stages", "counts", "sample"),
    *("promise", "processors", "notes", "cost", "files", "kind", "format"),
)
"""Of all kinds, in their order in the file."""

Count = Annotated[int, Strict()]


@dataclass(kw_only=True)
class Manifest:
    """What the manifests of all runs hold."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    noun: ClassVar[str]
    """What the run is called in messages."""

    run_id: str
    """Of the last run in this folder."""
    state: str
    """running, complete, partial, failed or stopped."""
    started: str
    """UTC, ISO 8601."""
    host: str
    inputs: list[dict[str, Any]]
    """path, size_bytes and sha256 of each input file, in the order given."""
    settings: dict[str, Any]
    """What decides the bytes of the result; a resumed run must have the same."""
    versions: dict[str, str]
    """Of Python and the packages that compute."""
    devices: list[str]
    """One name a rank."""
    finished: str | None = None
    """UTC, ISO 8601."""
    counts: dict[str, Count] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    """Path of each file of the result, relative to the folder -> hex sha256."""
    cost: Cost = field(default_factory=Cost)
    """Of all starts in this folder; nothing while one runs, and of a run within another."""
    format: int = FORMAT

    @classmethod
    def begin(cls, run_id: str, *, packages: Iterable[str] = COMPUTING_PACKAGES, **values: Any) -> Self:
        """Return the manifest of a run that starts now on this host, with the versions of *packages*."""
        return cls(
            run_id=run_id,
            state="running",
            started=_now(),
            host=socket.gethostname(),
            versions={"python": platform.python_version(), **{name: _installed_version(name) for name in packages}},
            **values,
        )

    def check_file(self, file: Path, folder: Path | None = None) -> bool:
        """
        Whether *file* of the run's *folder*, by default its own, is recorded; reads it whole, about 1 s a GB.

        Raises:
            ResultError: It has another sha256 than recorded.
        """
        name = file.relative_to(folder or file.parent).as_posix()
        if name in self.files:
            durable.check_sha256(file, self.files[name])
        return name in self.files

    def end(self, state: str) -> None:
        """Note that the run ended just now, in this state."""
        self.state = state
        self.finished = _now()

    def write(self, path: Path) -> None:
        """Replace the manifest on disk. Raises OutputError: the system refused."""
        values = asdict(self)
        durable.write_bytes(path, with_checksum({name: values[name] for name in _KEYS if name in values}))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest of this kind. Raises ResultError: it is absent, unreadable, or of another kind or layout."""
        found = read_manifest(path)
        if not isinstance(found, cls):
            raise ResultError(path, f"is of {found.noun}, not of {cls.noun}: use another output folder")
        return found

    def problem(self) -> str | None:
        """Return what makes the content unfit for a later start, beside the types of its fields."""
        if not all({"path", "sha256"} <= item.keys() for item in self.inputs):
            return "an input without path or sha256"
        return None


@dataclass(kw_only=True)
class RunManifest(Manifest):
    """
    ``run.json`` of an embedding run.

    Its counts: records = rows + missing + skipped; copies, truncated; what was noticed at reading; resplit_blocks,
    cached_blocks and widened_blocks of the plan's blocks.
    """

    noun: ClassVar[str] = "an embedding run"

    plan: dict[str, Any]
    """fingerprint, token budget, blocks, unique sequences, tokens; what probes of the GPUs found."""
    stages_s: dict[str, float] = field(default_factory=dict)
    """Seconds a stage took."""
    ranks: list[dict[str, Any]] = field(default_factory=list)
    """How each rank went."""
    promise: str | None = None
    """``bytes``: the same run gives the same bytes again. ``tolerance``: it gives the same numbers within the tolerance
    of the precision, because blocks were split or cached, or processors differ. None until there is a result."""
    processors: dict[str, list[str]] = field(default_factory=dict)
    """What computed the rows -> its hosts."""

    @property
    def result_form(self) -> ResultForm:
        """Any but ``auto``; folders older than the choice are single."""
        return ResultForm(self.settings.get("result_form", ResultForm.SINGLE))

    def end(self, state: str) -> None:
        """Note that the run ended just now, and with it the ranks that were running."""
        super().end(state)
        self.ranks = [{**rank, "state": state} if rank.get("state") == "running" else rank for rank in self.ranks]

    def problem(self) -> str | None:
        resolved = [form for form in ResultForm if form is not ResultForm.AUTO]
        if self.settings.get("result_form", ResultForm.SINGLE) not in resolved:
            return "'settings' with a 'result_form' that does not exist"
        counted = ["records", *(["rows", "copies", "truncated"] if self.state == "complete" else [])]
        numbers: list[tuple[Mapping[str, Any], str, list[str]]] = [
            (self.settings, "settings", ["token_budget"]),
            (self.plan, "plan", ["token_budget", "blocks", "longest_sequence_tokens"]),
            (self.counts, "counts", counted),
        ]
        for values, where, names in numbers:
            for name in names:
                if type(values.get(name)) is not int:
                    return f"{where!r} without {name!r}"
        return super().problem()


@dataclass(kw_only=True)
class StageRecord:
    fingerprint: str
    """Hex sha256 of the settings that it was done with."""
    seconds: float
    """How long it took."""
    files: dict[str, str]
    """Path of each file that it wrote, relative to the folder -> hex sha256."""
    counts: dict[str, Count] = field(default_factory=dict)
    processors: dict[str, list[str]] = field(default_factory=dict)
    """What computed embeddings -> its hosts."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""
    quarantined: dict[int, tuple[str, int]] = field(default_factory=dict)
    """Number in the input of each contig that ended the processes which computed it -> failure class, attempts."""


@dataclass(kw_only=True)
class StagedManifest(Manifest):
    """
    ``run.json`` of a run of several stages, with a record of each that is done.

    A stage counts as done when it was recorded for the same settings and every file that it wrote is still as it was
    recorded. A resumed run relies on nothing else.
    """

    stages: dict[str, StageRecord] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""

    def processors_differ(self) -> list[str]:
        """Return a sentence about the processors of all stages; none unless there are several."""
        return processors_differ(merged_processors(stage.processors for stage in self.stages.values()))


@dataclass(frozen=True, kw_only=True)
class SampleRecord:
    """The share of viruses in a sample, and the limits of its calls."""

    share: float | None
    """Of the contigs with a score; None: the prior is off."""
    interval: tuple[float, float] | None
    """95 % interval of an estimated share."""
    why_off: str
    """Why there is no share; empty where there is one."""
    virus_from: float | None
    """Least score of a viral contig; None: no score has the false discovery rate that was asked for."""
    not_virus_below: float
    """Score below which a contig is called not viral."""
    fdr: float | None
    """Expected false discovery rate of the contigs called viral; None without any, or with the prior off."""


@dataclass(kw_only=True)
class PredictionManifest(StagedManifest):
    """``run.json`` of a prediction; its counts are of contigs, chunks, frames and calls."""

    noun: ClassVar[str] = "a prediction"

    output_settings: dict[str, Any]
    """Rules of calls, formats and what is kept: may change from run to run."""
    models: dict[str, dict[str, Any]]
    """``classifier``, and ``dna`` and ``protein`` where contigs are embedded: name and sha256, with widths and chunk
    length. ``composition``: another classifier that scores composition."""
    fingerprint: str
    """Of classifier, models and chunk length: scores of different ones are not comparable."""
    sequences: str = "contigs"
    """What its sequences are called: contigs; reads, where all inputs are FASTQ or BAM; sequences, where some are."""
    outputs: list[str] = field(default_factory=list)
    """Every file beside the embedding runs that this run or an earlier one was to write, relative to the folder. None
    of them was there before."""
    sample: SampleRecord | None = None
    """None until contigs are called."""
    kind: Literal["prediction"] = PREDICTION

    def check_whole(self, table: Path) -> None:
        """Raise ResultError where the *table* of contigs holds those called viral alone."""
        if self.output_settings.get("only_viral"):
            what = "holds the viral contigs alone: start its prediction again without --only-viral, for tables of all"
            raise ResultError(table, what)

    @property
    def has_frames(self) -> bool:
        """Whether frames are embedded, so that there are tables of them."""
        return "dna" in self.models

    def problem(self) -> str | None:
        if not all(PredictionLayout(Path()).has_output(name) for name in self.outputs):
            return "an output that no run writes"
        if self.state in FINISHED and (missing := {*COUNTED} - self.counts.keys()):
            return f"'counts' without {', '.join(map(repr, sorted(missing)))}"
        return super().problem()


@dataclass(kw_only=True)
class TrainingManifest(StagedManifest):
    """``run.json`` of a training; its inputs are the genomes, then tables and other genomes."""

    noun: ClassVar[str] = "a training"

    kind: Literal["training"] = TRAINING


AnyManifest = RunManifest | PredictionManifest | TrainingManifest


def read_manifest(path: Path) -> AnyManifest:
    """Read a manifest of any kind. Raises ResultError: it is absent, unreadable, changed, or of another layout."""
    data = read_object(path)
    if CHECKSUM not in data:
        raise not_a_manifest(path, "it has no checksum of itself")
    if data.pop(CHECKSUM) != _checksum(data):
        raise ResultError(path, f"was changed or damaged: its content does not match its own checksum: {REMEDY}")
    if data.get("format") != FORMAT:
        raise not_a_manifest(path, f"its format is not {FORMAT}")
    kinds = {None: RunManifest, PREDICTION: PredictionManifest, TRAINING: TrainingManifest}
    kind = data.get("kind")
    if not isinstance(kind, str | None) or kind not in kinds:
        raise not_a_manifest(path, "of an unknown 'kind'")
    try:
        found: AnyManifest = _schema(kinds[kind]).validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise not_a_manifest(path, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if (problem := found.problem()) is not None:
        raise not_a_manifest(path, problem)
    return found


def is_recorded(file: Path, folder: Path | None = None) -> bool:
    """
    Whether the ``run.json`` in *folder*, by default beside the file, records it; as ``Manifest.check_file``.

    Raises:
        ResultError: The manifest is damaged, or the file has another sha256 than it recorded.
    """
    manifest = FolderLayout(folder or file.parent).manifest
    return manifest.exists() and read_manifest(manifest).check_file(file, folder)


def with_checksum(values: Mapping[str, Any]) -> bytes:
    """Return the text of a manifest that holds *values* and, last, the sha256 of them."""
    return (json.dumps({**values, CHECKSUM: _checksum(values)}, indent=2, ensure_ascii=True) + "\n").encode()


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ResultError: it is absent, unreadable, or holds none."""
    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise ResultError(path, error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise not_a_manifest(path, str(error)) from error
    if not isinstance(data, dict):
        raise not_a_manifest(path, "it is no object")
    return data


def not_a_manifest(path: Path, what: str) -> ResultError:
    return ResultError(path, f"not a run manifest ({what}): {REMEDY}")


@cache
def _schema(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _installed_version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
