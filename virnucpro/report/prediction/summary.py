"""
The content of a report, collected from the final files of a prediction in one pass over each.

``contigs.tsv`` and ``viral_regions.bed`` are in the order of the input, so they are read side by side, one line at a
time. Memory is bounded for any number of contigs: counts, a histogram of all scores, the contigs with the highest
scores, a sample for the scatter plot, the tracks of a few long contigs, and the records of some viral ones. Hashes of
the contigs' names choose the sample, so the same files give the same sample.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

from virnucpro.calls.viral_regions import LONG_CONTIG_NT, track_id
from virnucpro.errors import ResultError, printable
from virnucpro.report.figure import round_up
from virnucpro.report.prediction.viral_records import read_records
from virnucpro.run_folders import only_regular
from virnucpro.store.contig_table import Call, ContigCall, read_contig_calls
from virnucpro.store.manifest import FINISHED, PredictionManifest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from virnucpro.run_layout import PredictionLayout
    from virnucpro.store.manifest import SampleRecord

NO_SCORE = "no score"
"""Shown instead of a call for a contig that could not be scored; its reason says why."""
GROUPS = (Call.VIRUS, Call.UNDECIDED, Call.NOT_VIRUS, Call.TOO_SHORT, NO_SCORE)

TRACK_STEPS = 300
_TRACK_LINE = "track "
"""A contig's name ends at its first space, so no contig's line begins so."""
_END: tuple[None, tuple[()]] = (None, ())
_REMEDY = "start the same `virnucpro predict` command again to write it anew"
TABLE_CONTIGS = 50_000
"""Contigs that the page's table can reach."""
SCATTER_POINTS = 2000
SCORE_BINS = 40
SURE_FROM = (0.99, 0.9)
"""Score from which on a viral contig counts as one of the surest, and as a sure one."""
TRACKS_READ = 40
"""Tracks of long contigs called viral that are looked at: those with the highest scores."""
VIRAL_TRACKS = 6
"""Of these, those that are shown: the first that vary."""
EVEN_FROM = 0.8
"""A track whose score is nowhere lower does not vary: it would be a flat line."""
OTHER_TRACKS = 4
"""Tracks of long contigs with viral regions, but not called viral: those with the longest regions."""
HELD_NT = 200_000
"""Nucleotides of the viral contigs whose records the page holds: of tracks, then by score, as far as they fit."""
GENE_MAPS = 30
"""Further contigs among them whose genes are shown."""
FAILED_LINES = 200
MAX_REASONS = 50
"""At most so many reasons are counted separately: the first ones."""
OTHER_REASONS = "other reasons"
_SAMPLE_SEED = b"virnucpro scatter"


class Region(NamedTuple):
    start: int
    """0-based nt; *end* is exclusive."""
    end: int
    score: int
    """0 to 1000."""


class ContigLine(NamedTuple):
    number: int
    found: ContigCall
    regions: tuple[Region, ...]

    @property
    def group(self) -> str:
        """One of ``GROUPS``."""
        has_no_call = self.found.score is None and self.found.call is not Call.TOO_SHORT
        return NO_SCORE if has_no_call else self.found.call

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sorts by score, then length, then order of the input; the greatest comes first."""
        score = -1.0 if self.found.score is None else self.found.score
        return score, self.length_nt, -self.number

    @property
    def length_nt(self) -> int:
        """Nucleotides; 0 for a skipped record."""
        return self.found.length or 0

    @property
    def region_nt(self) -> int:
        return sum(region.end - region.start for region in self.regions)


class Step(NamedTuple):
    start: int
    """0-based nt; *end* is exclusive."""
    end: int
    p_virus: float


@dataclass(frozen=True)
class Track:
    contig: ContigLine
    steps: Sequence[Step]
    """In the order of the sequence, with gaps where there is no score."""
    window_nt: int | None
    """Nucleotides of each step's mean; None: one step a chunk."""

    @property
    def is_even(self) -> bool:
        """Whether the score is at least ``EVEN_FROM`` all along."""
        return min((step.p_virus for step in self.steps), default=1.0) >= EVEN_FROM


def read_contig_lines(contigs: Path, viral_regions: Path) -> Iterator[ContigLine]:
    """Yield every line of *contigs*; raise if a region belongs to no contig or is out of order."""
    regions = _read_regions(viral_regions)
    next_contig, next_regions = next(regions, _END)
    for number, found in enumerate(read_contig_calls(contigs)):
        mine: tuple[Region, ...] = ()
        if next_contig == track_id(found.contig):
            mine = next_regions
            next_contig, next_regions = next(regions, _END)
        yield ContigLine(number, found, mine)
    if next_contig is not None:
        what = f"its region of {next_contig!r} is of no contig, or not in the order of {contigs.name}: {_REMEDY}"
        raise ResultError(viral_regions, what)


def read_columns(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the 1-based number and the tab-separated columns of every line but ``track`` lines."""
    try:
        with open(path, encoding="utf-8", newline="\n", opener=only_regular) as file:
            for number, line in enumerate(file, start=1):
                if not line.startswith(_TRACK_LINE):
                    yield number, line.removesuffix("\n").split("\t")
    except OSError as error:
        raise ResultError(path, f"cannot be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise ResultError(path, f"is not UTF-8 text ({error}): {_REMEDY}") from error


def _read_regions(path: Path) -> Iterator[tuple[str, tuple[Region, ...]]]:
    try:
        for contig, lines in groupby(read_columns(path), key=lambda line: line[1][0]):
            yield contig, tuple(Region(int(start), int(end), int(score)) for _, (_, start, end, _, score, *_) in lines)
    except ValueError as error:
        raise ResultError(path, f"a line cannot be read ({error}): {_REMEDY}") from error


def read_tracks(path: Path, contigs: Sequence[ContigLine]) -> list[Track]:
    """Return the tracks of *contigs*, in that order; raise if one with a score has none."""
    wanted = {track_id(contig.found.contig): contig for contig in contigs}
    found: dict[str, Track] = {}
    if wanted:
        for name, lines in groupby(read_columns(path), key=lambda line: line[1][0]):
            if name in wanted:
                found[name] = _make_track(path, wanted[name], [columns for _, columns in lines])
                if len(found) == len(wanted):
                    break
    missing = next((name for name in wanted if name not in found), None)
    if missing is not None:
        raise ResultError(path, f"has no track of {missing!r}, which has a score")
    return [found[name] for name in wanted]


def _make_track(path: Path, contig: ContigLine, lines: Iterable[Sequence[str]]) -> Track:
    try:
        steps = [Step(int(start), int(end), float(p)) for _, start, end, p in lines]
    except ValueError as error:
        raise ResultError(path, f"a line of {contig.found.contig!r} cannot be read ({error})") from error
    if len(steps) <= TRACK_STEPS:
        return Track(contig, steps, None)
    window_nt = round(round_up(math.ceil(steps[-1].end / TRACK_STEPS)))
    return Track(contig, list(_averaged(steps, window_nt)), window_nt)


def _averaged(steps: Iterable[Step], window_nt: int) -> Iterator[Step]:
    """Yield the mean of each window over its nucleotides with a score."""
    sums: dict[int, tuple[int, float]] = {}
    last_nt = 0
    for step in steps:
        for window in range(step.start // window_nt, (step.end - 1) // window_nt + 1):
            covered = min(step.end, (window + 1) * window_nt) - max(step.start, window * window_nt)
            nt, total = sums.get(window, (0, 0.0))
            sums[window] = (nt + covered, total + covered * step.p_virus)
        last_nt = step.end
    for window, (nt, total) in sums.items():
        yield Step(window * window_nt, min((window + 1) * window_nt, last_nt), total / nt)


@dataclass
class Group:
    contigs: int = 0
    nt: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * SCORE_BINS)
    """Contigs by score, in ``SCORE_BINS`` equal steps from 0 to 1."""


@dataclass
class Summary:
    manifest: PredictionManifest
    groups: dict[str, Group] = field(default_factory=lambda: {call: Group() for call in GROUPS})
    sure: dict[float, int] = field(default_factory=lambda: dict.fromkeys(SURE_FROM, 0))
    """Contigs called viral with at least this score."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Why contigs have no score -> contigs."""
    long_contigs: int = 0
    contigs_with_regions: int = 0
    regions: int = 0
    region_nt: int = 0
    table: list[ContigLine] = field(default_factory=list)
    sample: list[ContigLine] = field(default_factory=list)
    """In the order of the input; all viral contigs, if they are at most half of it."""
    viral_tracks: list[Track] = field(default_factory=list)
    tracks_read: int = 0
    """Long contigs called viral whose tracks were looked at."""
    even_tracks: int = 0
    """Of these, those whose tracks do not vary."""
    other_tracks: list[Track] = field(default_factory=list)
    records: dict[int, str] = field(default_factory=dict)
    """Number of a viral contig -> its record of ``viral.fasta``."""
    gene_maps: list[Track] = field(default_factory=list)
    """Contigs of ``records`` that are not among ``viral_tracks``; those that are not long have no steps."""
    failed: list[list[str]] = field(default_factory=list)
    """First lines of ``failed_sequences.tsv``: id, reason, attempts."""
    num_failed: int = 0

    @property
    def contigs(self) -> int:
        return sum(group.contigs for group in self.groups.values())

    @property
    def has_only_viral(self) -> bool:
        """Whether the tables, and so everything here but ``groups``' numbers, are of the viral contigs alone."""
        return bool(self.manifest.output_settings.get("only_viral"))

    @property
    def sequences(self) -> str:
        """Plural noun for the input: ``contigs`` or ``reads``."""
        return printable(self.manifest.sequences)

    @property
    def sequence(self) -> str:
        return self.sequences.removesuffix("s")

    @property
    def sample_record(self) -> SampleRecord:
        """The share of viruses, and the limits of calls."""
        assert self.manifest.sample is not None, "contigs were called"
        return self.manifest.sample

    @property
    def has_contig_model(self) -> bool:
        """Whether scores are calibrated probabilities of a contig model."""
        return "contig_model_sha256" in self.manifest.models["classifier"]

    @property
    def scored(self) -> int:
        return sum(sum(group.bins) for group in self.groups.values())


def summarise(layout: PredictionLayout) -> Summary:
    summary = Summary(PredictionManifest.read(layout.manifest))
    if summary.manifest.state in FINISHED:  # else the run that wrote the tables has not ended
        for path in (layout.contigs, layout.viral_regions):
            summary.manifest.check_file(path)
    table, viral_sample, other_sample = _Best(TABLE_CONTIGS), _Best(SCATTER_POINTS), _Best(SCATTER_POINTS)
    viral_tracks, other_tracks = _Best(TRACKS_READ), _Best(OTHER_TRACKS)
    for contig in read_contig_lines(layout.contigs, layout.viral_regions):
        _count(summary, contig)
        rank, is_virus = contig.rank, contig.group == Call.VIRUS
        table.offer(rank, contig)
        if contig.found.score is not None and contig.length_nt:
            (viral_sample if is_virus else other_sample).offer(_lot(contig), contig)
        if contig.length_nt >= LONG_CONTIG_NT:
            if is_virus:
                viral_tracks.offer(rank, contig)
            elif contig.regions:
                other_tracks.offer((contig.region_nt, *rank), contig)
    if summary.has_only_viral:
        _count_unlisted(summary)
    summary.table = table.best()
    others = max(SCATTER_POINTS // 2, SCATTER_POINTS - len(viral_sample))
    chosen = other_sample.best()[:others]
    chosen += viral_sample.best()[: SCATTER_POINTS - len(chosen)]
    summary.sample = sorted(chosen, key=lambda contig: contig.number)
    tracks = read_tracks(layout.tracks, [*viral_tracks.best(), *other_tracks.best()])
    of_viral, summary.other_tracks = tracks[: len(viral_tracks)], tracks[len(viral_tracks) :]
    varied = [track for track in of_viral if not track.is_even]
    summary.viral_tracks = varied[:VIRAL_TRACKS]
    summary.tracks_read, summary.even_tracks = len(of_viral), len(of_viral) - len(varied)
    _hold_records(summary, layout.viral_fasta, {track.contig.number: track for track in tracks})
    if layout.failed_sequences.exists():
        lines = (columns for _, columns in read_columns(layout.failed_sequences))
        next(lines, None)
        summary.failed = list(islice(lines, FAILED_LINES))
        summary.num_failed = len(summary.failed) + sum(1 for _ in lines)
    return summary


def _hold_records(summary: Summary, path: Path, tracks: Mapping[int, Track]) -> None:
    """Read the records of viral contigs, those with a track first, and choose further ones whose genes are shown."""
    left_nt, held = HELD_NT, []
    of_tracks = [track.contig for track in summary.viral_tracks]
    shown = {contig.number for contig in of_tracks}
    for contig in (*of_tracks, *(contig for contig in summary.table if contig.number not in shown)):
        if contig.group == Call.VIRUS and contig.length_nt <= left_nt:
            left_nt -= contig.length_nt
            held.append(contig)
    records = read_records(path, {contig.found.contig for contig in held})
    held = [contig for contig in held if contig.found.contig in records]
    summary.records = {contig.number: records[contig.found.contig] for contig in held}
    mapped = [contig for contig in held if contig.number not in shown][:GENE_MAPS]
    summary.gene_maps = [tracks.get(contig.number) or Track(contig, [], None) for contig in mapped]


def _count(summary: Summary, contig: ContigLine) -> None:
    score, nt, name = contig.found.score, contig.length_nt, contig.group
    group = summary.groups[name]
    group.contigs += 1
    group.nt += nt
    if score is None:
        kind = _kind_of_reason(contig)
        is_known = kind in summary.reasons or len(summary.reasons) < MAX_REASONS
        summary.reasons[kind if is_known else OTHER_REASONS] += 1
    else:
        group.bins[min(int(score * SCORE_BINS), SCORE_BINS - 1)] += 1
        if name == Call.VIRUS:
            for least in SURE_FROM:
                summary.sure[least] += score >= least
    summary.long_contigs += nt >= LONG_CONTIG_NT
    if contig.regions:
        summary.contigs_with_regions += 1
        summary.regions += len(contig.regions)
        summary.region_nt += contig.region_nt


def _count_unlisted(summary: Summary) -> None:
    """Set the numbers of all contigs, those that are in no table included."""
    counts = summary.manifest.counts
    for call in (Call.NOT_VIRUS, Call.UNDECIDED, Call.TOO_SHORT):
        summary.groups[call].contigs = counts[call.replace(" ", "_")]
    summary.groups[NO_SCORE].contigs = counts["no_open_frame"] + counts["skipped"]


def _kind_of_reason(contig: ContigLine) -> str:
    """Return the reason without its FILE:LINE."""
    return re.sub(r"^(skipped: )?.*:\d+: ", r"\1", contig.found.reason)


def _lot(contig: ContigLine) -> tuple[bytes, int]:
    """Return the contig's key in the sample: evenly distributed and repeatable."""
    return hashlib.blake2b(contig.found.contig.encode(), digest_size=8, key=_SAMPLE_SEED).digest(), contig.number


class _Best:
    """The contigs with the greatest keys."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._heap: list[tuple[Any, ContigLine]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, key: Any, contig: ContigLine) -> None:
        """Keep *contig* if its *key*, which is unique, is one of the greatest so far."""
        if len(self._heap) < self._most:
            heapq.heappush(self._heap, (key, contig))
        elif key > self._heap[0][0]:
            heapq.heapreplace(self._heap, (key, contig))

    def best(self) -> list[ContigLine]:
        return [contig for _, contig in sorted(self._heap, key=lambda item: item[0], reverse=True)]
