"""The bundled classifier: card, weights and text say the same, and it knows viruses as well as the card says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from virnucpro.errors import ClassifierMismatchError
from virnucpro.models.classifier import load_classifier
from virnucpro.models.classifier_card import DEFAULT_CLASSIFIER, classifiers_table
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, DEFAULT_PROTEIN_MODEL, DNA_MODEL, resolve_model
from virnucpro.pipeline.contig_rule import RULE, score_contigs
from virnucpro.training.classifier_model_card import card_text
from virnucpro.training.contig_rules import RULES
from virnucpro.training.frame_data import embed_frames
from virnucpro.training.genomes import KMER_LIMIT, read_genomes, sketch
from virnucpro.training.known_contigs import read_truth
from virnucpro.training.metrics import auroc
from virnucpro.training.records import file_sha256, read_records
from virnucpro.training.split import largest_shares

FOLDER = BUNDLED_WEIGHTS_DIR / DEFAULT_CLASSIFIER


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text("utf-8"))


def test_it_loads_by_name_and_fits_the_bundled_models():
    classifier = load_classifier(DEFAULT_CLASSIFIER)
    dna, protein = resolve_model(DNA_MODEL), resolve_model(DEFAULT_PROTEIN_MODEL)
    classifier.card.check(chunk_nt=500, dna=dna, protein=protein)
    with pytest.raises(ClassifierMismatchError):
        classifier.card.check(chunk_nt=300)
    assert classifiers_table() == [classifier.card]
    assert (classifier.card.dna_model.sha256, classifier.card.protein_model.sha256) == (
        dna.weights_sha256,
        protein.weights_sha256,
    )


def test_the_card_for_readers_is_made_from_the_card_for_programs(card):
    assert (FOLDER / "MODEL_CARD.md").read_text("utf-8") == card_text(card)
    assert list(card["evaluation"]["rules"]) == list(RULES)
    assert card["evaluation"]["rule"] == RULE
    assert card["threshold"] == card["evaluation"]["threshold"]
    best = max(rule["auroc"][0] for rule in card["evaluation"]["rules"].values())
    assert card["evaluation"]["rules"][RULE]["auroc"][0] == best


@pytest.mark.slow
def test_it_was_trained_on_nothing_that_is_related_to_what_it_is_judged_by(card, data_dir, examples_dir):
    paths = [data_dir / "viral" / item["file"] for item in card["data"]["files"]]
    assert [file_sha256(path) for path in paths] == [item["sha256"] for item in card["data"]["files"]]
    left_out = set(card["data"]["left_out"])
    used = [sketch(genome.letters) for genome in read_genomes(paths) if genome.accession not in left_out]
    assert len(used) == sum(item["num_records"] for item in card["data"]["files"]) - len(left_out)
    judges = [*read_genomes([data_dir / "viral" / "dev_contigs.fa.gz", examples_dir / "contigs.fasta"])]
    assert largest_shares([sketch(genome.letters) for genome in judges], used).max() < KMER_LIMIT


@pytest.mark.slow
@pytest.mark.long
def test_it_is_worth_what_the_card_says(card, data_dir, tmp_path):
    contigs = data_dir / "viral" / "dev_contigs.fa.gz"
    frames = embed_frames(
        contigs, tmp_path, chunk_nt=500, dna_model=DNA_MODEL, protein_model=DEFAULT_PROTEIN_MODEL, workers=2
    )
    p_virus = load_classifier(DEFAULT_CLASSIFIER).probabilities(frames.features_FD)[:, 1]
    scores = score_contigs(p_virus, frames.frames_per_chunk, frames.chunks_per_contig)
    is_virus = read_truth(data_dir / "viral" / "dev_truth.tsv").of(frames.contigs).is_virus_C
    assert int(np.isnan(scores).sum()) == card["evaluation"]["without_an_open_frame"]
    measured = auroc(scores, is_virus)
    print(f"AUROC {measured:.4f} of {len(scores)} development contigs")
    assert measured == pytest.approx(card["evaluation"]["rules"][RULE]["auroc"][0], abs=2e-3)


def test_the_examples_are_the_contigs_that_their_table_says(examples_dir, data_dir):
    records = read_records(examples_dir / "contigs.fasta")
    lines = (examples_dir / "contigs_truth.tsv").read_text().splitlines()
    rows = [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]
    assert (examples_dir / "contigs.fasta").stat().st_size <= 1_000_000
    assert [(record.accession, str(len(record.letters))) for record in records] == [
        (row["contig"], row["length"]) for row in rows
    ]
    known = {
        record.letters
        for name in ("dev_contigs.fa.gz", "lambda_virus.fa.gz", "crAssphage.fa")
        for record in read_records(data_dir / "viral" / name)
    }
    assert {record.letters for record in records} <= known
    places = [f"{row['accession']}:{int(row['start']) + 1}-{row['end']}, {row['length']} nt" for row in rows]
    assert [record.description for record in records] == places
    assert {row["label"] for row in rows} == {"virus", "nonviral"}
