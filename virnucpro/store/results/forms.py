"""The table of the forms of a result, and what holds for all of them: which one a run takes, what a folder has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.choices import AUTO_SHARDED_BYTES, AUTO_SHARDED_ROWS, ResultForm
from virnucpro.store.results.hdf5 import Shards, SingleFile
from virnucpro.store.results.parquet import ParquetFile

if TYPE_CHECKING:
    from pathlib import Path

    from virnucpro.run_layout import RunLayout
    from virnucpro.store.results.result import Result

FORMS: dict[ResultForm, type[Result]] = {
    ResultForm.SINGLE: SingleFile,
    ResultForm.SHARDED: Shards,
    ResultForm.PARQUET: ParquetFile,
}
"""In the order in which a folder is searched for a result."""


def choose_result_form(wanted: ResultForm, *, num_rows: int, hidden_dim: int) -> ResultForm:
    """Return the form that is wanted, or for ``auto`` the one by size; by rows only where the width is unknown, 0."""
    if wanted is not ResultForm.AUTO:
        return wanted
    is_large = num_rows >= AUTO_SHARDED_ROWS or num_rows * hidden_dim * 4 >= AUTO_SHARDED_BYTES
    return ResultForm.SHARDED if is_large else ResultForm.SINGLE


def require_form(form: ResultForm) -> ResultForm:
    """Return *form*; ``ConfigurationError`` where a library that it needs is not installed."""
    if form in FORMS:
        FORMS[form].require()
    return form


def result_of(layout: RunLayout, form: ResultForm, *, is_partial: bool) -> Result:
    """Return the result of a run, whether it exists or not."""
    return FORMS[form](layout.result(FORMS[form].suffix, is_partial=is_partial))


def all_results(layout: RunLayout, *, is_partial: bool) -> list[Result]:
    """Return the complete or the partial result in every form, whether it exists or not."""
    return [result_of(layout, form, is_partial=is_partial) for form in FORMS]


def result_at(path: Path) -> Result:
    """Return the result at *path*, in the form that it has; files of other names are taken for single ones."""
    return next((form for form in FORMS.values() if form.is_at(path)), SingleFile)(path)


def existing_results(layout: RunLayout, *, is_partial: bool) -> list[Path]:
    """Return paths of existing results, complete or partial, in any form; of shards one file is enough."""
    return [result.path for result in all_results(layout, is_partial=is_partial) if result.files()]


def remove_results(layout: RunLayout, *, is_partial: bool) -> None:
    """Remove the complete or the partial result in any form; ``OutputError`` where the system refuses."""
    for result in all_results(layout, is_partial=is_partial):
        result.remove()


def remove_unfinished_results(layout: RunLayout) -> None:
    """Remove what a killed run left of a result; ``OutputError`` where the system refuses."""
    for is_partial in (False, True):
        for result in all_results(layout, is_partial=is_partial):
            result.remove_unfinished()
