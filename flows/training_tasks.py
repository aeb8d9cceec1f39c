"""The stages of a training as tasks; a module of their own, since no other flow needs what they import."""

from typing import Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State

from flows.tasks import afresh, without_traceback
from virnucpro.training.classifier_training import TrainingResult, evaluate, pieces_stage, split_stage, train_stage
from virnucpro.training.training_run import TrainingRun, prepare_training
from virnucpro.training.training_settings import TrainingConfig


@task(name="read_genomes", cache_policy=NO_CACHE, persist_result=False)
def read_genomes(
    labelled: list[str],
    output_dir: str,
    config: TrainingConfig,
    device_type: str,
    run_id: str,
    restart: bool,
) -> TrainingRun | State[Any]:
    """Read the genomes with their labels; see ``prepare_training``."""
    return without_traceback(
        lambda: prepare_training(labelled, output_dir, config, device_type, run_id=run_id, restart=afresh(restart))
    )


@task(name="split_genomes", cache_policy=NO_CACHE, persist_result=False)
def split_genomes(run: TrainingRun) -> State[Any] | None:
    """Split the genomes into three parts that are not related."""
    return without_traceback(lambda: run.do(split_stage(run)))


@task(name="cut_pieces", cache_policy=NO_CACHE, persist_result=False)
def cut_pieces(run: TrainingRun) -> State[Any] | None:
    """Cut contigs out of each part's genomes, and chunks and open frames out of these."""
    return without_traceback(lambda: run.do(pieces_stage(run)))


@task(name="train_classifier", cache_policy=NO_CACHE, persist_result=False)
def train_classifier(run: TrainingRun) -> State[Any] | None:
    """Train on the training part, stop and calibrate by validation."""
    return without_traceback(lambda: run.do(train_stage(run)))


@task(name="evaluate_classifier", cache_policy=NO_CACHE, persist_result=False)
def evaluate_classifier(run: TrainingRun) -> TrainingResult | State[Any]:
    """Measure on the test part, and write the classifier with its cards."""
    return without_traceback(lambda: evaluate(run))
