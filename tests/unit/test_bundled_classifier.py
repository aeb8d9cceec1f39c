"""The bundled classifier fits the bundled encoders, and the examples are what their table says."""

from __future__ import annotations

import pytest

from virnucpro.errors import ClassifierMismatchError
from virnucpro.models.classifier import load_classifier
from virnucpro.models.classifier_card import DEFAULT_CLASSIFIER, classifiers_table
from virnucpro.models.registry import DEFAULT_PROTEIN_MODEL, DNA_MODEL, resolve_model
from virnucpro.training.records import read_records


def test_it_loads_by_name_and_fits_the_bundled_models():
    classifier = load_classifier(DEFAULT_CLASSIFIER)
    dna, protein = resolve_model(DNA_MODEL), resolve_model(DEFAULT_PROTEIN_MODEL)
    classifier.card.check(chunk_nt=500, dna=dna, protein=protein)
    with pytest.raises(ClassifierMismatchError):
        classifier.card.check(chunk_nt=400)
    assert classifiers_table() == [classifier.card]
    assert (classifier.card.dna_model.sha256, classifier.card.protein_model.sha256) == (
        dna.weights_sha256,
        protein.weights_sha256,
    )


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
