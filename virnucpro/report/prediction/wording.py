"""The sentences of a report, for the page and for Prefect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virnucpro.report.formats import counted, nucleotides, percent, whole
from virnucpro.report.prediction.summary import EVEN_FROM, NO_SCORE, SURE_FROM, TRACKS_READ
from virnucpro.store.contig_table import Call

if TYPE_CHECKING:
    from virnucpro.report.prediction.summary import Summary
    from virnucpro.store.contig_table import ContigCall


def lead(summary: Summary) -> str:
    """Return the answer in one sentence."""
    total, viral = summary.contigs, summary.groups[Call.VIRUS].contigs
    one, many = summary.sequence, summary.sequences
    if not total:
        return f"The input holds no {many}."
    if not summary.scored and not summary.has_only_viral:
        counts = summary.manifest.counts
        is_closed = counts.get("chunks") and not counts.get("frames") and not summary.has_contig_model
        subject = f"The only {one} could not" if total == 1 else f"None of the {whole(total)} {many} could"
        return f"{subject} be scored{': no reading frame was open' if is_closed else ''}."
    if total == 1:
        return f"The only {one} is {'' if viral else 'not '}called viral."
    if not viral:
        return f"None of the {whole(total)} {many} is called viral."
    if viral == total:
        return f"All {whole(total)} {many} are called viral."
    return f"{whole(viral)} of {whole(total)} {many} ({percent(viral, total)}) {_are(viral)} called viral."


def details(summary: Summary) -> list[str]:
    """Return the next sentences: confidence, amount of sequence, and the other calls."""
    sentences = []
    viral = summary.groups[Call.VIRUS]
    if viral.contigs:
        surest, sure = (summary.sure[least] for least in SURE_FROM)
        sentences.append(
            f"{_of_them(sure, viral.contigs)} a score of {SURE_FROM[1]} or more, "
            f"{_of_them(surest, viral.contigs).lower()} {SURE_FROM[0]} or more."
            if sure
            else f"None of them reaches a score of {SURE_FROM[1]}: look at the scores before you rely on the calls."
        )
        nt = sum(group.nt for group in summary.groups.values())
        share = f"{nucleotides(viral.nt)} of the {nucleotides(nt)} of sequence ({percent(viral.nt, nt)})"
        if summary.has_only_viral:  # the others' lengths are in no table
            share = nucleotides(viral.nt)
        sentences.append(f"The viral {summary.sequences} hold {share}." if viral.contigs > 1 else f"It holds {share}.")
    if summary.scored or summary.has_only_viral:
        others = [
            (Call.NOT_VIRUS, "called not viral"),
            (Call.UNDECIDED, "undecided"),
            (Call.TOO_SHORT, "too short to be looked at"),
            (NO_SCORE, "without a score"),
        ]
        named = [(summary.groups[call].contigs, name) for call, name in others if summary.groups[call].contigs]
        if named:
            *before, last = [f"{whole(number)} {_are(number)} {name}" for number, name in named]
            text = f"{', '.join(before)} and {last}" if before else last
            sentences.append(f"Of the {'others' if viral.contigs else summary.sequences}, {text}.")
    return sentences


def evidence(found: ContigCall) -> str:
    """Return what the score of a contig rests on, in one sentence; empty where frames decide, or nothing does."""
    if found.evidence == "none":
        return "By composition alone, which is ambiguous"
    if found.evidence == "composition":
        return "By composition alone"
    if found.evidence not in {"homology", "both"}:
        return ""
    sides = [
        (bits, f"a {side} protein of {name} ({identity:.0%} identical, {bits:.0f} bits)")
        for side, name, identity, bits in (
            ("viral", found.viral_hit, found.viral_identity, found.viral_bits),
            ("cellular", found.cellular_hit, found.cellular_identity, found.cellular_bits),
        )
        if name and identity is not None and bits is not None
    ]
    best, *other = [text for _, text in sorted(sides, key=lambda side: -side[0])]
    also = f", then {other[0]}" if other else ""
    agrees = "; composition agrees" if found.evidence == "both" else ""
    return f"Most like {best}{also}{agrees}"


def scores(summary: Summary) -> str:
    if summary.has_contig_model:
        return (
            f"The score is the probability that a {summary.sequence} is viral, calibrated on genomes of the "
            "kinds that the classifier\u2019s card names, half of them viral: there, of contigs with 0.8 about 8 in 10 "
            f"are viral. Of other kinds it may be far off. {_of_sample(summary)}{_of_composition(summary)}"
        )
    return (
        "The score is a number from 0 to 1. Rank by it; it is not a "
        "measured rate of error. Scores far from the threshold and sequences of several chunks are the surest."
        f"{_of_composition(summary)}"
    )


def _of_composition(summary: Summary) -> str:
    """Return which classifier gave the composition scores, where it is another one; usually nothing."""
    composition = summary.manifest.models.get("composition")
    if composition is None:
        return ""
    return (
        f" Of {summary.sequences} that were not embedded it is the composition score by {composition['name']}; "
        "the column embedded of contigs.tsv says which these are."
    )


def _of_sample(summary: Summary) -> str:
    sample, many = summary.sample_record, summary.sequences
    if sample.share is None:
        return f"Among your {many} viruses may be more or less common: their share is not known ({sample.why_off})."
    known = f"given as {sample.share:.2%}"
    if sample.interval is not None:
        low, high = sample.interval
        known = (
            f"estimated from their scores as {sample.share:.2%} (95 % interval {low:.2%} to {high:.2%})"
            if low
            else f"not above {high:.2%}, perhaps none (95 % interval)"
        )
    return (
        f"The share of viruses among your {many} is {known}. The posterior is the score, given this share; FDR, the "
        "expected share of others among all with this score or a higher one. Both are as good as the calibration."
    )


def tracks(summary: Summary) -> str:
    line = (
        "the score of each chunk together with its two neighbours, by the rule of contigs, without known proteins"
        if summary.has_contig_model
        else "each chunk\u2019s score, by the rule of contigs; there is none where no frame is open"
    )
    return (
        f"The line is {line}. Shaded: viral regions, where the score is above the dotted line for enough chunks. A few "
        "chunks below it do not end a region, nor do chunks without a score. Arrows: likely genes, as the "
        f"composition features define them, of {summary.sequences} called viral. Every region is in viral_regions.bed, "
        "every track in tracks.bedgraph; both open in genome browsers."
    )


def even_tracks(summary: Summary) -> str:
    """Say which long viral contigs have no line, as it would be flat."""
    even, read = summary.even_tracks, summary.tracks_read
    first = "" if read < TRACKS_READ else f" with the highest scores, of which {whole(read)} were looked at"
    which = f"the {counted(read, f'long {summary.sequence}')} called viral{first}"
    return f"Of {which}, {whole(even)} {_are(even)} not shown as a line: the score is {EVEN_FROM} or more all along."


def regions(summary: Summary) -> str:
    one = f"viral {summary.sequence}" if summary.has_only_viral else summary.sequence
    long_contigs = f"{counted(summary.long_contigs, one)} {_are(summary.long_contigs)} 10 kb or longer"
    if not summary.regions:
        return f"{long_contigs}; none holds a viral region."
    found = f"{counted(summary.regions, 'viral region')} ({nucleotides(summary.region_nt)})"
    return f"{long_contigs}; {found} {_are(summary.regions)} in {whole(summary.contigs_with_regions)} of them."


def missing(summary: Summary) -> str | None:
    """Return the warning about frames without a score; None if all have one."""
    counts = summary.manifest.counts
    number, frames = counts.get("missing_frames", 0), counts.get("frames", 0)
    if not number:
        return None
    return (
        f"This result is partial: {whole(number)} of {counted(frames, 'reading frame')} could not be scored and "
        f"{_are(number)} listed in failed_sequences.tsv. The calls rest on the others."
    )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"


def _of_them(number: int, total: int) -> str:
    if number == total:
        return "All of them have" if total > 1 else "It has"
    return f"{whole(number) if number else 'None'} of them {'has' if number in {0, 1} else 'have'}"
