"""The bundled classifier: card, text and weights say the same, and its parts are those that its command makes."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from tests.conftest import REPOSITORY
from virnucpro.choices import DEFAULT_CLASSIFIER, DEFAULT_DNA_MODEL, DEFAULT_PROTEIN_MODEL
from virnucpro.durable import sha256_of
from virnucpro.errors import ClassifierMismatchError
from virnucpro.models.classifier import load_classifier
from virnucpro.models.classifier_files.card import classifiers_table
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR, resolve_model
from virnucpro.training.fitting.model_card import card_text
from virnucpro.training.genomes.artificial_genomes import artificial_genomes
from virnucpro.training.genomes.genome_split import SPLITS, split_labelled, training_data_of
from virnucpro.training.genomes.labelled_genomes import read_labelled
from virnucpro.training.genomes.records import read_records
from virnucpro.training.genomes.related import KMER_LIMIT

FOLDER = BUNDLED_WEIGHTS_DIR / DEFAULT_CLASSIFIER


@pytest.fixture(scope="module")
def card():
    return json.loads((FOLDER / "card.json").read_text("utf-8"))


def test_it_loads_by_name_and_fits_the_bundled_models():
    classifier = load_classifier(DEFAULT_CLASSIFIER)
    dna, protein = resolve_model(DEFAULT_DNA_MODEL), resolve_model(DEFAULT_PROTEIN_MODEL)
    classifier.card.check(chunk_nt=500, dna=dna, protein=protein)
    with pytest.raises(ClassifierMismatchError):
        classifier.card.check(chunk_nt=400)
    assert classifiers_table() == [classifier.card]
    assert (classifier.card.dna_model.sha256, classifier.card.protein_model.sha256) == (
        dna.weights_sha256,
        protein.weights_sha256,
    )


def test_the_card_for_readers_is_made_from_the_card_for_programs(card):
    assert (FOLDER / "MODEL_CARD.md").read_text("utf-8") == card_text(card)
    assert card["worth"].startswith(DEFAULT_CLASSIFIER)
    evaluation, left_out = card["evaluation"], card["training"]["groups_left_out"]
    worst = min(left_out, key=lambda group: left_out[group]["auroc"])
    assert f"AUROC {evaluation['overall']['auroc']['value']:.2f} on " in card["worth"]
    assert f"(mean; {worst}: {left_out[worst]['auroc']:.2f})" in card["worth"]
    assert f"(up to 500 nt: {evaluation['by_length']['up to 500 nt']['auroc']['value']:.2f})" in card["worth"]


def test_the_card_says_of_which_groups_nothing_was_measured(card):
    split, text = card["split"], " ".join(card["evaluation"]["limits"])
    unmeasured = sorted(group for group, row in split["groups"].items() if not row["test"]["records"])
    assert f"nothing is measured on {', '.join(unmeasured)}, which only train" in text
    assert len(split["groups"]) - len(unmeasured) > 8
    assert card["training"]["groups_left_out"].keys() == split["groups"].keys()


def test_no_organism_both_trains_and_tests(card):
    organisms = card["split"]["organisms"]
    train, test = ({name for names in organisms[part].values() for name in names} for part in ("train", "test"))
    assert len(test) > 30
    assert not train & test


def test_no_accession_is_in_two_parts_and_every_record_is_in_one_or_was_left_out(card):
    names = [name for part in SPLITS for name in card["split"]["accessions"][part]]
    real = [name for name in names if not name.startswith("artificial_")]
    assert len(names) == len(set(names)) > len(real) == sum(item["records"] for item in card["data"]["files"]) > 1000
    assert not set(names) & set(card["data"]["left_out"])


def test_the_card_names_training_fragments_that_look_viral(card):
    suspects, of_group = card["training"]["contigs"]["suspects"], card["split"]["groups"]
    assert {one["place"].rpartition(":")[0] for one in suspects} <= set(card["split"]["accessions"]["train"])
    assert 100 < len(suspects) < 1000
    assert {of_group[one["group"]]["label"] for one in suspects} == {"nonviral"}


def test_all_that_is_bundled_is_small():
    sizes = [path.stat().st_size for path in BUNDLED_WEIGHTS_DIR.rglob("*.safetensors*")]
    assert sum(sizes) <= 45_000_000


@pytest.mark.slow
def test_its_parts_are_those_that_its_command_makes(card, data_dir):
    every = [path for folder in ("viral", "genomes", "kinds") for path in (data_dir / folder).glob("*.fna.gz")]
    path_of = {(path.name, sha256_of(path)): path for path in every}
    paths = [path_of[item["file"], item["sha256"]] for item in card["data"]["files"]]
    assert not card["data"]["left_out"]
    settings, encoder = card["training"]["settings"], resolve_model(DEFAULT_DNA_MODEL)
    genomes = read_labelled(paths, REPOSITORY / "tools" / "default_classifier" / "genomes.tsv.gz").genomes
    genomes += artificial_genomes(genomes, settings["fragments"], settings["seed"])
    seen = training_data_of(SimpleNamespace(weights_path=encoder.weights_path, weights_sha256=encoder.weights_sha256))
    split = split_labelled(
        genomes,
        seed=settings["seed"],
        share=settings["held-out share"],
        is_seen=[seen.has(genome) for genome in genomes],
    )
    parts = {part: [genome.accession for genome in split.of_part(part)] for part in SPLITS}
    assert parts == card["split"]["accessions"]
    assert split.largest_share == card["split"]["largest_share"] < KMER_LIMIT


@pytest.mark.slow
def test_no_contig_of_the_development_set_is_of_a_genome_that_trained(card, data_dir):
    used = {name for part in SPLITS for name in card["split"]["accessions"][part]}
    rows = (data_dir / "genomes" / "dev_truth.tsv").read_text().splitlines()[1:]
    windows = {row.split("\t")[3] for row in rows}
    assert len(windows) > 100
    assert not windows & used


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
