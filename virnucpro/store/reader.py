"""
Reading results: a mapping from id to vector that reads only the rows that are accessed, and the calls of contigs.

Both give a frame of pandas or polars where that is installed; neither is needed for anything else.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, overload

import numpy as np

from virnucpro.errors import ConfigurationError, ResultError
from virnucpro.run_layout import PredictionLayout, RunLayout
from virnucpro.store.contig_table import COLUMNS, INTEGERS, NUMBERS, Call, ContigCall, read_contig_calls
from virnucpro.store.manifest import FINISHED, PredictionManifest
from virnucpro.store.results.forms import all_results, result_at

if TYPE_CHECKING:
    from collections.abc import Iterable

    import pandas as pd
    import polars as pl

    from virnucpro.arrays import FloatArray
    from virnucpro.store.results.result import Result


class Embeddings(Mapping[str, "FloatArray"]):
    """
    The rows of a result by sequence id, in the order of the input.

    Rows are read on access. The ids of a single file are in memory, those of a sharded result are not. Use it as a
    context manager, or ``close`` it.

    Args:
        path: A file, or the folder of shards.

    Raises:
        ResultError: Not a result.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rows = result_at(path).open()

    @property
    def ids(self) -> Sequence[str]:
        """Sequence ids in the order of the rows: a tuple, or of a sharded result a sequence that reads its files."""
        return self._rows.ids

    @property
    def hidden_dim(self) -> int:
        """Width of a vector."""
        return self._rows.hidden_dim

    def __getitem__(self, sequence_id: str) -> FloatArray:
        """Return the vector of one sequence, float32 (hidden_dim,)."""
        row = int(self._rows.rows_of([sequence_id])[0])
        vector: FloatArray = self._rows.read(slice(row, row + 1))[0]
        return vector

    def __iter__(self) -> Iterator[str]:
        return iter(self.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __contains__(self, sequence_id: object) -> bool:
        return sequence_id in self._rows

    def to_numpy(self, sequence_ids: Iterable[str] | None = None) -> FloatArray:
        """
        Return many vectors at once, float32 (num_sequences, hidden_dim); KeyError where an id has no row.

        Args:
            sequence_ids: Which, and in which order; by default all, in the order of ``ids``.
        """
        if sequence_ids is None:
            return self._rows.read(slice(0, len(self)))
        wanted, back = np.unique(self._rows.rows_of(list(sequence_ids)), return_inverse=True)
        chosen = self._rows.read(wanted)
        return chosen[back]

    def to_pandas(self) -> pd.DataFrame:
        """
        Return all rows as a ``pandas.DataFrame``: ids as index, float32 columns 0 to hidden_dim - 1.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        library = _library("pandas")
        frame: pd.DataFrame = library.DataFrame(self.to_numpy(), index=library.Index(list(self.ids), name="id"))
        return frame

    def to_polars(self) -> pl.DataFrame:
        """
        Return all rows as a ``polars.DataFrame``: ``id``, and ``embedding``, an array of float32 of that width.

        Raises:
            ConfigurationError: polars is not installed.
        """
        library = _library("polars")
        kinds = {"id": library.String, "embedding": library.Array(library.Float32, self.hidden_dim)}
        frame: pl.DataFrame = library.DataFrame({"id": list(self.ids), "embedding": self.to_numpy()}, schema=kinds)
        return frame

    def close(self) -> None:
        """Close its files; rows can no longer be read."""
        self._rows.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Embeddings({str(self.path)!r}: {len(self)} sequences x {self.hidden_dim})"


def read_embeddings(path: str | Path) -> Embeddings:
    """
    Open a result: a mapping from sequence id to vector, with ``.ids`` and ``.to_numpy()``.

    Args:
        path: The output folder of a complete run, or its result: a file, or a folder of shards.

    Raises:
        ResultError: There is no result, or it is not one of ours.
    """
    where = Path(path)
    if where.is_dir() and not result_at(where).files():
        where = _result_in(RunLayout(where)).path
    return Embeddings(where)


def _result_in(layout: RunLayout) -> Result:
    """Return the result in a run's folder; if incomplete, the one with an error that names what is missing."""
    whole = all_results(layout, is_partial=False)
    for result in whole:
        if result.proof.exists():
            return result
    for result in all_results(layout, is_partial=True):
        if result.proof.exists():
            raise ResultError(layout.output_dir, f"holds a partial result only: open {result.path} if that is enough")
    return next((result for result in whole if result.files()), whole[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Prediction(Sequence[ContigCall]):
    """A finished prediction: a sequence of the calls of its contigs, in the input's order, skipped records last."""

    output_dir: Path
    state: str
    """complete or partial."""
    counts: Mapping[str, int]
    """Contigs, chunks, frames and calls, as in ``run.json``."""
    notes: tuple[str, ...]
    """What the user should know, a sentence each."""
    fingerprint: str
    """Of classifier, models and chunk length; scores compare only within one."""
    contigs: tuple[ContigCall, ...] = field(repr=False)

    @property
    def viral(self) -> list[ContigCall]:
        """The contigs called viral, highest score first."""
        return sorted((one for one in self if one.call is Call.VIRUS), key=lambda one: -(one.score or 0))

    @property
    def contigs_path(self) -> Path:
        return PredictionLayout(self.output_dir).contigs

    @property
    def viral_path(self) -> Path:
        return PredictionLayout(self.output_dir).viral_fasta

    @property
    def report_path(self) -> Path | None:
        """``report.html``; None where only tables were wanted."""
        path = PredictionLayout(self.output_dir).report
        return path if path.exists() else None

    @overload
    def __getitem__(self, index: int) -> ContigCall: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[ContigCall, ...]: ...

    def __getitem__(self, index: int | slice) -> ContigCall | tuple[ContigCall, ...]:
        return self.contigs[index]

    def __len__(self) -> int:
        return len(self.contigs)

    def to_pandas(self) -> pd.DataFrame:
        """
        Return the table of contigs as a ``pandas.DataFrame``, with the columns of ``contigs.tsv``.

        Raises:
            ConfigurationError: pandas is not installed.
        """
        library = _library("pandas")
        kinds = dict.fromkeys(INTEGERS, "Int64") | dict.fromkeys(NUMBERS, "Float64") | {"embedded": "bool"}
        columns = {name: library.Series(values, dtype=kinds.get(name, "string")) for name, values in self._columns()}
        frame: pd.DataFrame = library.DataFrame(columns)
        return frame

    def to_polars(self) -> pl.DataFrame:
        """
        Return the table of contigs as a ``polars.DataFrame``, with the columns of ``contigs.tsv``.

        Raises:
            ConfigurationError: polars is not installed.
        """
        library = _library("polars")
        kinds = dict.fromkeys(COLUMNS, library.String) | dict.fromkeys(INTEGERS, library.Int64)
        kinds |= dict.fromkeys(NUMBERS, library.Float64) | {"embedded": library.Boolean}
        frame: pl.DataFrame = library.DataFrame(dict(self._columns()), schema=kinds)
        return frame

    def _columns(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield each column with its values, a call as plain text."""
        for number, name in enumerate(COLUMNS):
            yield name, [str(one[number]) if name == "call" else one[number] for one in self.contigs]


def read_prediction(output_dir: str | Path) -> Prediction:
    """
    Read the calls of a finished prediction.

    Raises:
        ResultError: There is no prediction, or it is damaged or not finished.
    """
    layout = PredictionLayout(Path(output_dir))
    manifest = finished_manifest(layout)
    manifest.check_file(layout.contigs)
    return Prediction(
        output_dir=layout.output_dir,
        state=manifest.state,
        counts=manifest.counts,
        notes=tuple(manifest.notes),
        fingerprint=manifest.fingerprint,
        contigs=tuple(read_contig_calls(layout.contigs)),
    )


def finished_manifest(layout: PredictionLayout) -> PredictionManifest:
    """Return the manifest of a finished prediction. Raises ResultError: it is absent, damaged or not finished."""
    manifest = PredictionManifest.read(layout.manifest)
    if manifest.state not in FINISHED:
        what = f"holds a prediction that is not finished ({manifest.state}): start its command again first"
        raise ResultError(layout.output_dir, what)
    return manifest


def _library(name: str) -> Any:
    """Return pandas or polars, which only a frame needs."""
    if find_spec(name) is None:
        raise ConfigurationError(f"a frame of {name} needs {name}: pip install {name}")
    return importlib.import_module(name)
