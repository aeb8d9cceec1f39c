"""
Measures of a table of scores on contigs of known label: overall, by length, by group and by both, ready for JSON.

A stratum is measured by itself: its recall at 1 % false positives counts its own contigs. The results at the one
threshold of all contigs stand beside. A group of one label is measured against all contigs of the other label. NaN, for
a contig without a score, ranks below all others and is never called. Legend: C contigs.

Calibration of a group of one label: the distance of its own scores from its label would call every score but 0 and 1
wrong. So the group stands in for all contigs of its label: group and contigs of the other label are weighted to the
share of viral contigs among all (King and Zeng, see ``metrics.ScoreCounts``). The error of that mixture tells how far
scores are probabilities where all viruses, or all others, are of this group.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from virnucpro.training.evaluation.curves import curves, histogram
from virnucpro.training.evaluation.metrics import (
    BOOTSTRAP_SAMPLES,
    CALIBRATION_BINS,
    GROUP_CALIBRATION_BINS,
    Interval,
    RankedContigs,
    bootstrap,
    counts_of,
)
from virnucpro.training.evaluation.tables import UNKNOWN_NT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from virnucpro.arrays import BoolArray, DoubleArray, IntArray
    from virnucpro.training.evaluation.metrics import CalibrationBin
    from virnucpro.training.evaluation.tables import KnownContigs

LENGTH_EDGES_NT = (500, 1000, 1999)
"""Upper ends of all length classes but the last."""
MOST_GROUPS = 100
"""At most so many groups are measured: the largest."""
FEW_CONTIGS = 20
"""Groups of fewer contigs stand after the others, whatever their AUROC."""
LEAST_CONTIGS = 5
"""A group's AUROC in a length class is measured from so many viral and so many other contigs on."""
FEW_GENOMES = 5
"""Groups of fewer genomes are named: their intervals know little of other genomes."""
_DIGITS = 6


@dataclass(frozen=True, kw_only=True)
class Stratum:
    """Measures on some of the contigs; None where a measure has no meaning."""

    contigs: int
    viral: int
    """Viral contigs that were measured."""
    others: int
    """Other contigs that were measured."""
    compared_with: str | None
    """The contigs added because the stratum has one label only."""
    without_score: int
    """Contigs of the stratum itself that have no score."""
    genomes: int | None
    """Genomes of the stratum itself; None if they are not known."""
    auroc: Interval | None
    auprc: Interval | None
    """Average precision, at the evaluation's prevalence."""
    f1: Interval | None
    """At the threshold and the evaluation's prevalence."""
    precision: Interval | None
    """Share of viral ones among contigs that reach the threshold, at the evaluation's prevalence."""
    recall_at_1_percent_false_positives: Interval | None
    """At the lowest threshold that at most 1 % of the others measured here reach."""
    calibration_error: Interval | None
    """Expected calibration error over ten bins of equal numbers of contigs; of groups five, see above."""
    recall: float | None
    """Share of the viral contigs that reach the threshold."""
    false_positive_share: float | None
    """Share of the others that reach the threshold."""
    recall_at_strict_threshold: float | None
    """Share of the viral contigs that reach the evaluation's strict threshold."""
    false_positive_share_at_strict_threshold: float | None
    """Share of the others that reach it."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A group in one length class."""

    contigs: int
    """Of the group itself."""
    genomes: int | None
    auroc: Interval | None
    """A group of one label against contigs of the same length class; None for fewer than ``LEAST_CONTIGS``."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Measures of one table of scores."""

    threshold: float | None
    """Contigs are called viral from this score up; None: no threshold is known."""
    strict_threshold: float | None
    """Lowest threshold that at most 1 % of all contigs that are not viral reach."""
    overall: Stratum
    by_length: dict[str, Stratum]
    """By length class; empty ones are missing."""
    by_group: dict[str, Stratum]
    """By group, lowest AUROC first; those of fewer than ``FEW_CONTIGS`` contigs after the others."""
    by_group_and_length: dict[str, dict[str, Cell]]
    """By group, in the same order, and by length class; empty ones are missing."""
    calibration: list[CalibrationBin] | None
    """Reliability curve; None if scores are no probabilities."""
    roc: list[tuple[float, float]]
    """Share of others and of viral contigs called, from the strictest threshold to the loosest."""
    precision_recall: list[tuple[float, float]]
    """Recall and precision at falling thresholds, at the prevalence."""
    histogram: dict[str, list[float]]
    """``edges`` of equal steps, and how many ``viral`` and ``others`` score in each."""
    notes: list[str] = field(default_factory=list)
    """What the user should know, a sentence each."""
    prevalence: float | None
    """Share of viral contigs that precision is measured for; None: as among the contigs measured."""
    resampled: str
    """What bootstrap samples draw: ``genomes`` or ``contigs``."""
    bootstrap_samples: int
    seed: int

    def to_json(self) -> dict[str, Any]:
        """Return plain data, numbers with six digits, None for measures without meaning."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def evaluate(
    scores_C: DoubleArray,
    known: KnownContigs,
    *,
    threshold: float | None = 0.5,
    prevalence: float | None = None,
    length_edges_nt: Sequence[int] = LENGTH_EDGES_NT,
    bootstrap_samples: int = BOOTSTRAP_SAMPLES,
    seed: int = 1,
) -> Evaluation:
    """
    Return the measures of scores, with 95 % bootstrap intervals.

    Args:
        scores_C: float64 (C,): finite, the higher the more viral; NaN for no score.
        known: The contigs' labels, in the same order.
        threshold: Score from which a contig is called viral; None skips what needs one.
        prevalence: Share of viral contigs, above 0 and below 1, for precision and what is made of it; None: as found.
        length_edges_nt: Upper ends of all length classes but the last, ascending.
    """
    assert len(scores_C) == len(known) > 0
    is_virus_C = known.is_virus_C
    scored_C = scores_C[~np.isnan(scores_C)]
    are_probabilities = bool(len(scored_C)) and scored_C.min() >= 0 and scored_C.max() <= 1
    counts = counts_of(scores_C, is_virus_C)
    meter = _Meter(
        scores_C=scores_C,
        is_virus_C=is_virus_C,
        genomes_C=known.genome_numbers(),
        threshold=math.nan if threshold is None else threshold,
        strict_threshold=counts.strict_threshold(),
        prevalence=prevalence,
        are_probabilities=are_probabilities,
        bootstrap_samples=bootstrap_samples,
        seed=seed,
    )
    overall = meter.measure(np.ones(len(known), dtype=bool))
    of_lengths = length_classes(known.lengths_nt_C, length_edges_nt)
    groups_C = np.array(known.groups, dtype=object)
    largest = [group for group, _ in Counter(filter(None, known.groups)).most_common(MOST_GROUPS)]
    by_group = worst_first({group: meter.measure(groups_C == group, is_group=True) for group in sorted(largest)})
    roc, precision_recall = curves(counts, prevalence)
    notes = _notes(known, scores_C, are_probabilities=are_probabilities, threshold=threshold)
    return Evaluation(
        threshold=threshold,
        strict_threshold=_or_none(meter.strict_threshold),
        overall=overall,
        by_length={name: meter.measure(mine_C) for name, mine_C in of_lengths.items()},
        by_group=by_group,
        by_group_and_length={group: meter.cells(groups_C == group, of_lengths) for group in by_group},
        calibration=counts.calibration_bins() if are_probabilities else None,
        roc=roc,
        precision_recall=precision_recall,
        histogram=histogram(scored_C, is_virus_C[~np.isnan(scores_C)], are_probabilities=are_probabilities),
        notes=[*notes, *_notes_on_strata(overall, by_group)],
        prevalence=prevalence,
        resampled="contigs" if overall.genomes is None else "genomes",
        bootstrap_samples=bootstrap_samples,
        seed=seed,
    )


def worst_first(by_group: dict[str, Stratum]) -> dict[str, Stratum]:
    """Return groups by rising AUROC, without one last; those of few contigs after all others."""

    def place(group: str) -> tuple[bool, float]:
        stratum = by_group[group]
        return stratum.contigs < FEW_CONTIGS, math.inf if stratum.auroc is None else stratum.auroc.value

    return {group: by_group[group] for group in sorted(by_group, key=place)}


def length_classes(lengths_nt_C: Any, edges_nt: Sequence[int] = LENGTH_EDGES_NT) -> dict[str, BoolArray]:
    """Return the contigs of each non-empty length class; those of unknown length are in none."""
    bounds = [*pairwise([0, *edges_nt]), (edges_nt[-1], None)] if edges_nt else [(0, None)]
    classes = {}
    for below, most in bounds:
        mine_C = (lengths_nt_C > max(below, UNKNOWN_NT)) & (True if most is None else lengths_nt_C <= most)
        if mine_C.any():
            classes[_length_class(below, most)] = mine_C
    return classes


def _length_class(below: int, most: int | None) -> str:
    if most is None:
        return f"{below + 1:,} nt and more" if below else "all lengths"
    return f"{below + 1:,} to {most:,} nt" if below else f"up to {most:,} nt"


@dataclass(frozen=True, kw_only=True)
class _Meter:
    """What the measures of all strata share."""

    scores_C: DoubleArray
    is_virus_C: BoolArray
    genomes_C: IntArray | None
    """Number of each contig's genome; None: not known."""
    threshold: float
    """NaN: not known."""
    strict_threshold: float
    prevalence: float | None
    are_probabilities: bool
    bootstrap_samples: int
    seed: int

    def measure(self, mine_C: BoolArray, *, is_group: bool = False) -> Stratum:
        """Measure some contigs; a group of one label against all contigs of the other."""
        measured_C, compared_with = self._measured(mine_C) if is_group else (mine_C, None)
        ranked = RankedContigs(self.scores_C[measured_C], self.is_virus_C[measured_C])
        viral_share = None if compared_with is None else self.is_virus_C[~np.isnan(self.scores_C)].mean()
        bins = GROUP_CALIBRATION_BINS if is_group else CALIBRATION_BINS

        def measures(drawn: Any) -> dict[str, float]:
            counts = ranked.counts(drawn)
            return {
                "auroc": counts.auroc(),
                "auprc": counts.auprc(self.prevalence),
                "f1": counts.f1(self.threshold, self.prevalence),
                "precision": counts.precision(self.threshold, self.prevalence),
                "recall_at_1_percent_false_positives": counts.strict_recall(),
                "calibration_error": counts.calibration_error(viral_share, bins)
                if self.are_probabilities
                else math.nan,
            }

        found = self._intervals(measures, measured_C)
        counts = ranked.counts()
        at, strict = self.threshold, self.strict_threshold
        return Stratum(
            contigs=int(mine_C.sum()),
            viral=counts.viral,
            others=counts.others,
            compared_with=compared_with,
            without_score=int(np.isnan(self.scores_C[mine_C]).sum()),
            genomes=self._genomes(mine_C),
            **found,
            recall=_or_none(counts.recall(at)),
            false_positive_share=_or_none(counts.false_positive_share(at)),
            recall_at_strict_threshold=_or_none(counts.recall(strict)),
            false_positive_share_at_strict_threshold=_or_none(counts.false_positive_share(strict)),
        )

    def cells(self, mine_C: BoolArray, of_lengths: dict[str, BoolArray]) -> dict[str, Cell]:
        """Measure a group in each length class, against contigs of that class if the group has one label."""
        return {name: self._cell(mine_C & in_C, in_C) for name, in_C in of_lengths.items() if (mine_C & in_C).any()}

    def _cell(self, mine_C: BoolArray, among_C: BoolArray) -> Cell:
        measured_C = self._measured(mine_C)[0] & among_C
        ranked = RankedContigs(self.scores_C[measured_C], self.is_virus_C[measured_C])
        counts, auroc = ranked.counts(), None
        if min(counts.viral, counts.others) >= LEAST_CONTIGS:
            auroc = self._intervals(lambda drawn: {"auroc": ranked.counts(drawn).auroc()}, measured_C)["auroc"]
        return Cell(contigs=int(mine_C.sum()), genomes=self._genomes(mine_C), auroc=auroc)

    def _genomes(self, mine_C: BoolArray) -> int | None:
        return None if self.genomes_C is None else len(np.unique(self.genomes_C[mine_C]))

    def _measured(self, mine_C: BoolArray) -> tuple[BoolArray, str | None]:
        """Return a group's contigs, with all of the other label if it has one label only, and a name for these."""
        labels = set(self.is_virus_C[mine_C].tolist())
        if len(labels) > 1:
            return mine_C, None
        is_viral = labels.pop()
        named = "all contigs that are not viral" if is_viral else "all viral contigs"
        return mine_C | (self.is_virus_C != is_viral), named

    def _intervals(
        self, measures: Callable[[IntArray], dict[str, float]], measured_C: BoolArray
    ) -> dict[str, Interval | None]:
        """Return the measures of the contigs that were measured, with intervals; None without meaning."""
        found = bootstrap(
            measures,
            self.is_virus_C[measured_C],
            genomes_C=None if self.genomes_C is None else self.genomes_C[measured_C],
            seed=self.seed,
            samples=self.bootstrap_samples,
        )
        return {name: None if math.isnan(one.value) else one for name, one in found.items()}


def _notes(
    known: KnownContigs, scores_C: DoubleArray, *, are_probabilities: bool, threshold: float | None
) -> list[str]:
    notes = []
    without = int(np.isnan(scores_C).sum())
    if without:
        text = f"without a score: {without:,} of {len(known):,} contigs, which rank below all others and are not called"
        notes.append(f"{text}{', and calibration is measured without them' if are_probabilities else ''}")
    viral = int(known.is_virus_C.sum())
    if viral in {0, len(known)}:
        which = "viral" if viral else "not viral"
        notes.append(f"all contigs are {which}: what compares the two kinds cannot be measured")
    if not are_probabilities and without < len(known):
        notes.append("scores are not all between 0 and 1, so they are no probabilities: calibration is left out")
    if threshold is None:
        notes.append("no threshold is known: F1, recall and false positives at it are left out (--threshold)")
    unknown = int((known.lengths_nt_C == UNKNOWN_NT).sum())
    if unknown:
        notes.append(f"of unknown length, and in no length class: {unknown:,} of {len(known):,} contigs")
    num_groups = len(set(filter(None, known.groups)))
    if num_groups > MOST_GROUPS:
        notes.append(f"the {MOST_GROUPS} largest of {num_groups:,} groups are measured")
    elif not num_groups:
        notes.append("the truth has no groups")
    return notes


def _notes_on_strata(overall: Stratum, by_group: dict[str, Stratum]) -> Iterator[str]:
    """Yield what intervals and the order of groups mean."""
    if overall.genomes is None:
        yield "the truth names no genomes: contigs are resampled, so intervals are too narrow where several are of one"
    else:
        yield f"intervals resample {overall.genomes:,} genomes, each with all its contigs"
        few = [name for name, one in by_group.items() if one.genomes is not None and one.genomes < FEW_GENOMES]
        if few:
            yield f"groups of fewer than {FEW_GENOMES} genomes, whose intervals are too narrow: {', '.join(few)}"
    if len(by_group) > 1:
        yield f"groups: lowest AUROC first, those of fewer than {FEW_CONTIGS} contigs after the others"
    if by_group:
        yield f"by group and length AUROC takes {LEAST_CONTIGS} viral and {LEAST_CONTIGS} other contigs of that length"


def _or_none(number: float) -> float | None:
    return float(number) if math.isfinite(number) else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return round(value, _DIGITS) if math.isfinite(value) else None
    return value
