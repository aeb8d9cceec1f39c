"""
The stages of a training that need torch: fit the frame classifier and the contig model, measure them, publish.

The models learn from the training part; validation stops the training, calibrates and sets the threshold; test only
measures. Both labels have the same weight in the loss of the frame classifier, however many frames each has. Seeded, on
one thread: the same frames give the same weights on the same kind of CPU. Legend: C fragments, F frames, D columns of
features.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save
from torch import nn

from virnucpro import durable, run_folders
from virnucpro.errors import BadInputError, InputProblem, StoppedError
from virnucpro.models.classifier import MLPClassifier
from virnucpro.models.classifier_files.card import (
    CARD_NAME,
    CONTIG_WEIGHTS_NAME,
    NUM_CLASSES,
    WEIGHTS_NAME,
    ClassifierCard,
    ContigModelCard,
    Encoder,
    read_card,
)
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.models.contigs.nucleotide_codes import masked
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.evaluation.strata import evaluate
from virnucpro.training.evaluation.tables import KnownContigs
from virnucpro.training.fitting.classifier_cards import Trained, card_values, worth_of
from virnucpro.training.fitting.contig_training import (
    EMBEDDINGS,
    SEQUENCE,
    LabelledRecords,
    TrainingContigs,
    count_kmers,
    train_contig_model,
)
from virnucpro.training.fitting.embedded_fragments import read_annotations, read_embedded
from virnucpro.training.fitting.group_left_out import leave_each_group_out
from virnucpro.training.fitting.homology_fitting import choose_proteins
from virnucpro.training.fitting.model_card import card_text
from virnucpro.training.fitting.training_fragments import read_training_fragments
from virnucpro.training.genomes.genome_split import TEST, TRAIN, VALIDATION
from virnucpro.training.training_run import OUTCOME_NAME

if TYPE_CHECKING:
    import threading
    from collections.abc import Sequence
    from pathlib import Path

    from virnucpro.arrays import BoolArray, DoubleArray, FloatArray
    from virnucpro.config import ModelConfig
    from virnucpro.training.fitting.embedded_fragments import EmbeddedFragments
    from virnucpro.training.fitting.training_fragments import TrainingFragment
    from virnucpro.training.genomes.genome_split import SplitGenomes
    from virnucpro.training.genomes.labelled_genomes import LabelledGenome
    from virnucpro.training.training_run import TrainingRun
    from virnucpro.training.training_settings import ClassifierSettings

_log = logging.getLogger(__name__)

CALLED_SHARE = 0.05
"""Share of validation's non-viral fragments that the threshold lets be called viral."""
THRESHOLD_RULE = (
    f"the lowest of two decimals, from 0.5 up, at which at most {CALLED_SHARE:.0%} of the validation fragments that "
    "are not viral are called viral"
)


@dataclass(frozen=True, kw_only=True)
class LabelledFrames:
    features_FD: FloatArray
    is_virus_F: BoolArray


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """How the training went."""

    epochs: int
    best_epoch: int
    """Epoch of the weights, from 1."""
    validation_loss: float
    """Nats a frame on validation, both classes with the same weight; 0.693 is chance."""


def fit_classifier(run: TrainingRun, split: SplitGenomes, stop: threading.Event | None) -> dict[str, int]:
    """Train once both embedding runs are complete, and return the numbers of frames used."""
    config, folder = run.config, run.layout.trained_dir
    annotations = read_annotations(config.annotations) if config.annotations else None
    embedded = read_embedded(run.layout, config.asked.chunk_nt, annotations)
    training, validation = (_examples(embedded, part) for part in (TRAIN, VALIDATION))
    model, outcome = train_classifier(training, validation, config.classifier, stop=stop)
    further = read_training_fragments(run.layout.further_fragments, run.layout.further_fragments_table)
    genomes, contigs = _records(split.of_part(TRAIN)), _contigs(embedded, further, TRAIN)
    names = genomes.group_names()
    counted = count_kmers(genomes, contigs.group_numbers(names), names, config.contig)
    proteins = choose_proteins(genomes, config.contig.seed)
    contig_weights, contig_outcome = train_contig_model(
        names,
        proteins,
        counted,
        contigs,
        _contigs(embedded, further, VALIDATION),
        config.contig,
        kinds=(SEQUENCE,) if further else (SEQUENCE, EMBEDDINGS),
        stop=stop,
    )
    left_out: dict[str, dict[str, Any]] = {}
    if config.asked.leave_groups_out:
        test = _contigs(embedded, [], TEST)
        group_N = genomes.group_numbers(names)[proteins.record_N]
        left_out, homology = leave_each_group_out(
            names, counted, contigs, test, config.contig.trees, (contig_weights.homology, group_N), stop=stop
        )
        contig_weights = replace(contig_weights, homology=homology)
    weights = save({name: x.contiguous() for name, x in model.state_dict().items() if x.is_floating_point()})
    contig_data = contig_weights.to_bytes()
    card = ClassifierCard(
        name=config.asked.name,
        chunk_nt=config.asked.chunk_nt,
        also_chunk_nt=config.also_chunk_nt,
        dna_model=_encoder(config.dna, embedded.dna_CD.shape[1]),
        protein_model=_encoder(config.protein, embedded.protein_CE.shape[1]),
        hidden_dim=config.classifier.hidden_dim,
        weights_sha256=hashlib.sha256(weights).hexdigest(),
        contig_model=ContigModelCard(weights_sha256=hashlib.sha256(contig_data).hexdigest()),
    )
    durable.write_bytes(folder / WEIGHTS_NAME, weights)
    durable.write_bytes(folder / CONTIG_WEIGHTS_NAME, contig_data)
    durable.write_bytes(folder / CARD_NAME, card.to_json().encode())
    in_validation_C = embedded.of_part(VALIDATION)
    scores_C = score_fragments(folder, embedded, in_validation_C)
    threshold = choose_threshold(scores_C, embedded.is_virus_C[in_validation_C])
    outcome_of_all = {
        "frames": asdict(outcome),
        "contigs": contig_outcome,
        "groups_left_out": left_out,
        "threshold": threshold,
    }
    durable.write_bytes(folder / OUTCOME_NAME, (json.dumps(outcome_of_all, indent=1) + "\n").encode())
    return {"frames that train": len(training.is_virus_F), "frames that stop": len(validation.is_virus_F)}


def train_classifier(
    training: LabelledFrames,
    validation: LabelledFrames,
    settings: ClassifierSettings,
    *,
    stop: threading.Event | None = None,
) -> tuple[MLPClassifier, TrainingOutcome]:
    """
    Train until the loss on *validation* (other genomes) no longer falls; return the weights of the best epoch.

    Raises:
        StoppedError: *stop* was set.
    """
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    model = MLPClassifier(training.features_FD.shape[1], settings.hidden_dim, dropout=settings.dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.weight_decay)
    loss = nn.CrossEntropyLoss(weight=_class_weights(training.is_virus_F))
    x_FD, y_F = torch.from_numpy(training.features_FD), torch.from_numpy(training.is_virus_F.astype(np.int64))
    order = torch.Generator().manual_seed(settings.seed)
    best, best_weights = TrainingOutcome(epochs=0, best_epoch=0, validation_loss=float("inf")), model.state_dict()
    epoch = 0
    while epoch < settings.most_epochs and epoch < best.best_epoch + settings.patience_epochs:
        if stop is not None and stop.is_set():
            raise StoppedError
        epoch += 1
        model.train()
        for batch in torch.split(torch.randperm(len(y_F), generator=order), settings.batch_frames):
            if len(batch) == 1:  # one frame has no variance
                continue
            optimizer.zero_grad()
            loss(model(x_FD[batch]), y_F[batch]).backward()
            optimizer.step()
        held_out_loss = validation_loss(model, validation)
        _log.info("epoch %d: validation loss %.4f", epoch, held_out_loss)
        if held_out_loss < best.validation_loss:
            best = TrainingOutcome(epochs=epoch, best_epoch=epoch, validation_loss=held_out_loss)
            best_weights = copy.deepcopy(model.state_dict())
    model.load_state_dict(best_weights)
    outcome = TrainingOutcome(epochs=epoch, best_epoch=best.best_epoch, validation_loss=best.validation_loss)
    return model.eval(), outcome


def validation_loss(model: MLPClassifier, frames: LabelledFrames) -> float:
    """Return the loss in evaluation mode, nats a frame, both classes with the same weight."""
    loss = nn.CrossEntropyLoss(weight=_class_weights(frames.is_virus_F))
    model.eval()
    with torch.inference_mode():
        logits_F2 = model(torch.from_numpy(frames.features_FD))
        return float(loss(logits_F2, torch.from_numpy(frames.is_virus_F.astype(np.int64))))


def _class_weights(is_virus_F: BoolArray) -> torch.Tensor:
    counts = np.bincount(is_virus_F, minlength=NUM_CLASSES)
    return torch.from_numpy((len(is_virus_F) / (NUM_CLASSES * counts)).astype(np.float32))


def publish_classifier(run: TrainingRun, split: SplitGenomes) -> list[Path]:
    """Measure on the test part, and write the classifier with its cards; the card for programs comes last."""
    config, layout = run.config, run.layout
    embedded = read_embedded(layout, config.asked.chunk_nt, None)
    outcome = json.loads(run_folders.read_bytes(layout.trained_dir / OUTCOME_NAME))
    evaluation = _measure(run, embedded, outcome["threshold"])
    evaluation["other_chunks"] = {
        str(chunk_nt): _measure(run, read_embedded(layout.with_chunks(chunk_nt), chunk_nt, None), outcome["threshold"])
        for chunk_nt in config.also_chunk_nt
    }
    trained = Trained(run=run, split=split, fragments=embedded.fragments, outcome=outcome, evaluation=evaluation)
    card = replace(read_card(layout.trained_dir), threshold=outcome["threshold"], worth=worth_of(trained))
    for_readers = card_values(trained, threshold_rule=THRESHOLD_RULE)
    contents = {name: run_folders.read_bytes(layout.trained_dir / name) for name in (WEIGHTS_NAME, CONTIG_WEIGHTS_NAME)}
    contents[layout.evaluation.name] = (json.dumps(evaluation, indent=1) + "\n").encode()
    text = card.to_json(**for_readers)
    contents[layout.card_text.name] = card_text(json.loads(text)).encode()
    contents[CARD_NAME] = text.encode()
    for name, content in contents.items():
        durable.write_bytes(layout.output_dir / name, content)
    return [layout.output_dir / name for name in contents]


def _measure(run: TrainingRun, embedded: EmbeddedFragments, threshold: float) -> dict[str, Any]:
    """Return the evaluation on the fragments of the test part, ready for JSON."""
    in_test_C = embedded.of_part(TEST)
    fragments = [embedded.fragments[number] for number in np.flatnonzero(in_test_C).tolist()]
    known = KnownContigs(
        contigs=[fragment.name for fragment in fragments],
        is_virus_C=embedded.is_virus_C[in_test_C],
        groups=[fragment.group for fragment in fragments],
        lengths_nt_C=np.array([len(fragment.letters) for fragment in fragments], dtype=np.int64),
        genomes=[fragment.source for fragment in fragments],
    )
    scores_C = score_fragments(run.layout.trained_dir, embedded, in_test_C)
    return evaluate(scores_C, known, threshold=threshold, seed=run.config.asked.seed).to_json()


def score_fragments(folder: Path, embedded: EmbeddedFragments, chosen_C: BoolArray) -> DoubleArray:
    """Return P(virus) of the chosen fragments as a prediction would score them, by the classifier in *folder*."""
    model = load_contig_model(folder, read_card(folder))
    chosen = np.flatnonzero(chosen_C).tolist()
    codes = [masked(embedded.fragments[number].letters.encode()) for number in chosen]
    sequence_CS = model.features.of_many(codes)
    p_virus_C = model.probabilities(
        sequence_CS,
        embedded.dna_CD[chosen_C],
        embedded.protein_CE[chosen_C],
        embedded.frames_C[chosen_C],
        embedded.chunks_C[chosen_C],
    )
    if model.homology is not None:
        p_virus_C = model.homology.judge(p_virus_C, codes).scores
    return p_virus_C.astype(np.float64)


def choose_threshold(scores_C: DoubleArray, is_virus_C: BoolArray) -> float:
    """Return the lowest threshold of two decimals, from 0.5 to 0.99, that lets at most ``CALLED_SHARE`` pass."""
    lowest = counts_of(scores_C, is_virus_C).strict_threshold(CALLED_SHARE)
    return min(0.99, max(0.5, float(np.ceil(lowest * 100) / 100)))


def _examples(embedded: EmbeddedFragments, part: str) -> LabelledFrames:
    """Return the frames of one part that the frame classifier may learn from."""
    chosen_F = embedded.is_example_F & embedded.of_part(part)[embedded.fragment_of_F]
    is_virus_F = embedded.is_virus_C[embedded.fragment_of_F[chosen_F]]
    if len(set(is_virus_F.tolist())) < len((True, False)):
        which = "one" if len(is_virus_F) else "any"
        what = f"the fragments of {part} have no open frame of {which} label to learn from"
        raise BadInputError([InputProblem("the input", None, what, "give more genomes, or more --fragments")])
    return LabelledFrames(features_FD=embedded.features_FD[chosen_F], is_virus_F=is_virus_F)


def _records(genomes: Sequence[LabelledGenome]) -> LabelledRecords:
    return LabelledRecords(
        codes=[masked(genome.letters.encode()) for genome in genomes],
        is_virus_C=np.array([genome.is_virus for genome in genomes]),
        groups=[genome.group for genome in genomes],
        sources=[genome.source for genome in genomes],
        names=[f"{one.accession} {one.title.removeprefix(one.accession).strip()}".strip() for one in genomes],
    )


def _contigs(embedded: EmbeddedFragments, further: Sequence[TrainingFragment], part: str) -> TrainingContigs:
    """Return the contigs of one part; *further* ones, without embeddings, come last."""
    mine_C = embedded.of_part(part)
    others = [fragment for fragment in further if fragment.part == part]
    fragments = [*(embedded.fragments[number] for number in np.flatnonzero(mine_C).tolist()), *others]

    def with_zeros(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([values[mine_C], np.zeros((len(others), *values.shape[1:]), dtype=values.dtype)])

    return TrainingContigs(
        codes=[masked(fragment.letters.encode()) for fragment in fragments],
        is_virus_C=np.array([fragment.is_virus for fragment in fragments]),
        groups=[fragment.group for fragment in fragments],
        sources=[fragment.source for fragment in fragments],
        dna_CD=with_zeros(embedded.dna_CD),
        protein_CE=with_zeros(embedded.protein_CE),
        frames_C=with_zeros(embedded.frames_C),
        chunks_C=with_zeros(embedded.chunks_C),
        places=[f"{fragment.accession}:{fragment.start}-{fragment.end}" for fragment in fragments],
    )


def _encoder(config: ModelConfig, hidden_dim: int) -> Encoder:
    return Encoder(name=config.model_name, sha256=config.weights_sha256, hidden_dim=hidden_dim)
