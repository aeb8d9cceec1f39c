"""The share of viruses in the sample of a prediction: whether and how it is known, and what the user reads of it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from virnucpro.calls.sample_prior import CallLimits, SamplePrior, call_limits, count_scores, estimate_prior
from virnucpro.choices import LEAST_PRIOR_CONTIGS, PRIOR_AUTO, PRIOR_OFF
from virnucpro.knobs import UsageError
from virnucpro.store.manifest import SampleRecord

if TYPE_CHECKING:
    from virnucpro.calls.frame_order import FrameOrder
    from virnucpro.pipeline.prediction.preparation import PredictionRun
    from virnucpro.pipeline.prediction.settings import PredictionConfig

_OFF = "the prior is off"
MOST_USUAL_SHARE = 0.9


def read_sample(run: PredictionRun, order: FrameOrder) -> tuple[SamplePrior | None, CallLimits, SampleRecord]:
    """Return the share of viruses by the contigs' scores, if it is on, and the limits of calls; as recorded, too."""
    config = run.config
    sample, why_off = _sample_and_why_off(run, order)
    limits = call_limits(sample, config.threshold, fdr=config.fdr)
    record = SampleRecord(
        share=None if sample is None else sample.share,
        interval=None if sample is None else sample.interval,
        why_off=why_off,
        virus_from=limits.virus_from if math.isfinite(limits.virus_from) else None,
        not_virus_below=limits.not_virus_below,
        fdr=None if sample is None else sample.fdr(limits.virus_from),
    )
    return sample, limits, record


def _sample_and_why_off(run: PredictionRun, order: FrameOrder) -> tuple[SamplePrior | None, str]:
    config = run.config
    if config.prior == PRIOR_OFF:
        return None, _OFF
    if config.card.contig_model is None:
        return None, "the classifier has no calibrated contig scores"
    counts = count_scores(run.score_reader(order).of_all_contigs())
    if config.prior != PRIOR_AUTO:
        return SamplePrior(float(config.prior), None, counts), ""
    scored = int(np.sum(counts))
    if scored < LEAST_PRIOR_CONTIGS:
        return None, f"too few {run.manifest.sequences} ({scored:,}; {LEAST_PRIOR_CONTIGS} needed)"
    return estimate_prior(counts), ""


def refuse_unknown_fdr(config: PredictionConfig, num_contigs: int) -> None:
    """Raise UsageError where a false discovery rate is asked for now, and too few contigs can have a score."""
    is_asked = config.fdr is not None and "fdr" not in config.not_given
    if is_asked and config.prior == PRIOR_AUTO and num_contigs < LEAST_PRIOR_CONTIGS:
        raise UsageError(
            f"a false discovery rate needs the share of viruses: {num_contigs:,} are too few to estimate it from (it "
            f"takes {LEAST_PRIOR_CONTIGS}), so give it, as in --prior 0.05, or a --threshold instead"
        )


def sample_notes(sample: SampleRecord, sequences: str, fdr: float | None) -> list[str]:
    """Return what the user should know of the share of viruses, a sentence each; *fdr* is the one asked for."""
    if sample.share is None:
        if fdr:
            return [f"warning: the false discovery rate of {fdr:g} has no effect, calls are by score: {sample.why_off}"]
        why, threshold = f"{sample.why_off[:1].upper()}{sample.why_off[1:]}", sample.virus_from
        note = f"{why} to estimate the share of viruses: calls use the threshold {threshold:g}"
        return [] if sample.why_off == _OFF else [note]
    share = f"Share of viruses among the {sequences}"
    if sample.interval is None:
        notes = [f"{share}, as given: {sample.share:.2%}"]
    else:
        low, high = sample.interval
        notes = [
            f"{share}, estimated: {sample.share:.2%} (95 % interval {low:.2%} to {high:.2%})"
            if low
            else f"{share}: not above {high:.2%}, perhaps none (95 % interval)"
        ]
    if sample.interval is not None and sample.share > MOST_USUAL_SHARE:
        notes.append("So large a share is uncertain: with --prior off calls rest on the score alone")
    if sample.virus_from is None:
        notes.append(f"No score has an expected false discovery rate of at most {fdr:g}: nothing is called viral")
    elif sample.fdr is None:
        notes.append(
            f"No {sequences.removesuffix('s')} is called viral: no score is high enough at this share of viruses"
        )
    else:
        called = f"{sequences.capitalize()} with a score of {sample.virus_from:.3g} or more are called viral"
        notes.append(f"{called}; about {100 * sample.fdr:.2g} % of these calls are expected to be wrong")
    return notes
