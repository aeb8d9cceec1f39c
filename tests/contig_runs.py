"""Work on contigs, computed as a prediction has it."""

from __future__ import annotations

import random
import threading

from tests.strategies import write_fasta
from virnucpro.choices import DEFAULT_CLASSIFIER
from virnucpro.config import InputRules, RunLimits
from virnucpro.data.sequence_index import SequenceIndex
from virnucpro.models.classifier_files.card import locate_classifier, read_card
from virnucpro.models.contigs.contig_model import CompositionModel
from virnucpro.pipeline.executor import LocalRanks
from virnucpro.pipeline.prediction.composition import Composition, Homology
from virnucpro.pipeline.prediction.contig_run import CONTIG_WORKER, compute_contigs
from virnucpro.pipeline.run.stages import Stages, call_stage
from virnucpro.run_layout import PredictionLayout
from virnucpro.telemetry.run_telemetry import RunTelemetry

CHUNK_NT = 500
RUN_ID = "r1"


def works_in(folder):
    """Return composition and homology of 60 random contigs, by the bundled classifier."""
    chooser = random.Random(8)
    contigs = [(f"k{n}", "".join(chooser.choices("ACGT", k=chooser.randint(200, 3_000)))) for n in range(60)]
    classifier = locate_classifier(DEFAULT_CLASSIFIER)
    model = CompositionModel(classifier, read_card(classifier), searches_proteins=True)
    job = job_in(folder / "out", [write_fasta(folder / "in.fa", contigs)], model)
    return job, homology(job)


def job_in(folder, files, model):
    """Return the composition of contigs, in units that are small, and yet worth a process."""
    layout = PredictionLayout(folder)
    layout.work_dir.mkdir(parents=True)
    rules = InputRules(sequence_kind="DNA", allow_empty=True)
    SequenceIndex.ensure(files, layout.contig_index, unpack_dir=layout.unpacked_dir, rules=rules)
    settings = {"model": model, "chunk_nt": CHUNK_NT, "min_nt": 100, "fingerprint": "f1" * 32}
    return Composition(layout=layout, **settings, unit_nt=4_000, worker_nt=10_000)


def homology(job, **changes):
    """Return the search that follows it."""
    return Homology(**{**vars(job), "unit_nt": 40_000, "worker_nt": 5_000, **changes})


def compute(works, *, workers=None, limits=None, stop=None, worker_fn=CONTIG_WORKER, telemetry=None, executor=None):
    """Compute *works*, one after the other, and return how that went."""
    return compute_contigs(
        works,
        task="score_contigs",
        join="aggregate_scores",
        run_id=RUN_ID,
        executor=executor or LocalRanks(worker_fn),
        workers=workers,
        log_level="INFO",
        limits=limits or RunLimits(),
        stages=Stages(telemetry or RunTelemetry(), call_stage),
        stop=stop or threading.Event(),
    )
