"""No organism is on two sides of a split, and what the DNA encoder has seen is not measured on."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.fakes import hash_config
from tests.strategies import write_fasta
from tests.trainings import hash_training
from tools.encoders.dna_split import split_genomes
from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.models.registry import resolve_model
from virnucpro.training.classifier_training import read_split, split_stage
from virnucpro.training.fitting.classifier_cards import limits_of, organisms_of
from virnucpro.training.genomes.genome_split import SPLITS, TEST, TRAIN, VALIDATION, split_labelled, training_data_of
from virnucpro.training.genomes.labelled_genomes import read_labelled
from virnucpro.training.genomes.records import organism_of, read_genomes
from virnucpro.training.training_run import prepare_training

FLU = "Influenza {} virus ({}) segment {}, complete sequence"
STRAINS = [("A", "A/Puerto Rico/8/1934(H1N1)"), ("A", "A/Korea/426/1968(H2N2)"), ("B", "B/Brisbane/60/2008")]


@pytest.mark.parametrize(
    ("description", "organism"),
    [
        (
            "NW_012133163.1 Fibroporia radiculosa TFFH 294 genomic supercontigs, scaffold8, whole",
            "Fibroporia radiculosa",
        ),
        ("GCF_000007445 Escherichia coli CFT073, complete sequence", "Escherichia coli"),
        ("GCF_000012345 Candidatus Pelagibacter ubique HTCC1062, complete", "Candidatus Pelagibacter ubique"),
        ("GCF_000152605 Sulfitobacter sp. EE-36 scf_1099451318008, whole genome shotgun", "Sulfitobacter sp. EE-36"),
        ("NC_014887.1 Acrida cinerea mitochondrion, complete genome", "Acrida cinerea"),
        ("NC_002019.1 " + FLU.format("A", "A/Puerto Rico/8/1934(H1N1)", 5) + " [flu/h1n1/np]", "Influenza A virus"),
        ("NC_026433.1 |Influenza A virus (A/California/07/2009(H1N1)) segment 4", "Influenza A virus"),
        ("CY115156.1 Influenza B virus (B/Brisbane/60/2008) polymerase PA (PA) gene", "Influenza B virus"),
        ("gi|695316025|gb|KM822128.1| Lassa virus strain Pinneo-NIG-1969 segment S glycoprotein", "Lassa virus"),
        ("Lassa virus glycoprotein precursor (GPC) gene, complete cds", "Lassa virus"),
        ("NC_063383 NC_063383.1 Monkeypox virus, complete genome", "Monkeypox virus"),
        ("Human herpesvirus 3, complete genome", "Human herpesvirus 3"),
        ("Human papillomavirus type 38 isolate X", "Human papillomavirus type 38"),
        ("Coxsackievirus A8 isolate CVA8/SZ141/CHN/2012, complete genome", "Coxsackievirus A8"),
        ("TPA_asm: Bat hepacivirus isolate P, complete genome | Viruses; Riboviria", "Bat hepacivirus"),
        ("Mycobacterium phage Adawi, complete genome", "Mycobacterium phage Adawi"),
        ("Cellulophaga phage phi18:1, complete genome", "Cellulophaga phage phi18:1"),
        ("Cotton leaf curl Multan betasatellite clone 2", "Cotton leaf curl Multan betasatellite"),
        ("Family1_MH649026", ""),
        ("HQ416907 [nextstrain/mumps/genome]", ""),
        ("<unknown description> [hbv]", ""),
        ("prokaryotic host (DeepVirFinder example)", ""),
        ("NC_020818.1", ""),
        ("", ""),
    ],
)
def test_a_header_names_an_organism_without_strain_and_piece_or_none(description, organism):
    assert organism_of(description) == organism


def _dna(*seed):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), 1500))


def _files(folder):
    """Scaffolds of one fungus, windows of bacteria, segments of influenza strains, phages; no k-mers are shared."""
    records = {
        "nonviral_fungi.fna": [(f"NW_{n:09}.1 Fibroporia radiculosa TFFH 294, scaffold{n}", 1) for n in range(12)],
        "nonviral_bacteria.fna": [
            (f"NZ_{n:08}.{n % 3 + 1} Genus{'abcdefgh'[n // 3]} species strain S{n} contig{n}", 2) for n in range(24)
        ],
        "virus_animal.fna": [
            *((f"NC_{n:06}.1 {FLU.format(*STRAINS[n // 8], n % 8 + 1)}", 3) for n in range(24)),
            *((f"NC_{n:06}.1 Virus{n} virus, complete genome", 3) for n in range(24, 30)),
        ],
        "virus_phage.fna": [(f"KC{n:06}.1 Somebacter phage P{n}, complete genome", 4) for n in range(12)],
    }
    return [
        write_fasta(folder / name, [(header, _dna(seed, n)) for n, (header, seed) in enumerate(rows)])
        for name, rows in records.items()
    ]


def _parts_of_organisms(found):
    parts = {}
    for genome, part in zip(found.genomes, found.parts, strict=True):
        parts.setdefault(genome.organism.casefold(), set()).add(part)
    return parts


@pytest.mark.parametrize("seed", range(4))
def test_records_of_an_organism_go_one_way_and_a_group_of_one_organism_only_trains(tmp_path, seed):
    genomes = read_labelled(_files(tmp_path)).genomes
    found = split_labelled(genomes, seed=seed, share=0.2)
    parts = _parts_of_organisms(found)
    assert "influenza a virus" in parts
    assert [name for name, its in parts.items() if len(its) > 1] == []
    assert parts["fibroporia radiculosa"] == {TRAIN}
    assert found.notes == ["fungi trains only: it has 1 clusters of genomes of its own, and three parts need 3"]
    parts_of_groups = {(one.group, part) for one, part in zip(found.genomes, found.parts, strict=True)}
    assert parts_of_groups == {(group, part) for group in ("animal", "bacteria", "phage") for part in SPLITS} | {
        ("fungi", TRAIN)
    }


def test_an_encoders_own_split_keeps_organisms_together_too(tmp_path):
    found = split_genomes(read_genomes(_files(tmp_path)), seed=1, held_out_share=0.3)
    held_out, training = ({genome.organism for genome in part} for part in (found.held_out, found.training))
    assert held_out
    assert not held_out & training


def test_a_table_that_names_the_genome_overrules_the_header(tmp_path):
    fasta = write_fasta(tmp_path / "x.fna", [("a Genusa species", "ACGT"), ("b Genusa species", "CCCC")])
    (tmp_path / "labels.tsv").write_text("accession\tlabel\tgenome\na\thost\tG1\nb\thost\t\n")
    genomes = read_labelled([fasta], tmp_path / "labels.tsv").genomes
    assert [(one.source, one.organism) for one in genomes] == [("G1", ""), ("b", "Genusa species")]


def _training(folder, seen):
    """Split for a classifier whose DNA encoder was trained on *seen*, accessions and organisms; no card if None."""
    weights = folder / "encoder" / "model.safetensors"
    weights.parent.mkdir()
    if seen is not None:
        accessions, organisms = seen
        card = {"training_accessions": accessions, "training_organisms": organisms}
        text = json.dumps({"weights_sha256": "e" * 64, "split": card})
        (weights.parent / "card.json").write_text(text)
    dna = replace(hash_training().dna, weights_path=str(weights), weights_sha256="e" * 64)
    config = hash_training(dna=dna, held_out_share=0.3)
    run = prepare_training(_files(folder), folder / "out", config, "cpu", run_id="r")
    run.do(split_stage(run))
    return run, read_split(run)


def test_what_the_dna_encoder_was_trained_on_is_neither_in_test_nor_in_validation(tmp_path):
    seen = [f"KC{n:06}" for n in range(9)], ["Influenza B virus", "Genusa species"]
    run, found = _training(tmp_path, seen)
    part_of = {one.accession: part for one, part in zip(found.genomes, found.parts, strict=True)}
    phages = [part_of[f"KC{n:06}.1"] for n in range(12)]
    assert phages[:9] == [TRAIN] * 9
    assert set(phages[9:]) >= {TEST, VALIDATION}
    parts = _parts_of_organisms(found)
    assert parts["influenza b virus"] == parts["genusa species"] == {TRAIN}
    num_test = found.parts.count(TEST)
    limits = limits_of(SimpleNamespace(run=run, split=found))
    assert f"was trained on 0 of the {num_test} test records or their organisms" in limits[1]
    assert "nothing is measured on fungi" in limits[0]
    assert "Fibroporia radiculosa" in organisms_of(found, TRAIN)["fungi"]


def test_what_an_encoder_has_seen_is_measured_on_only_where_nothing_else_is_left_and_that_is_said(tmp_path):
    run, found = _training(tmp_path, ([f"KC{n:06}" for n in range(12)] + [f"NC_{n:06}" for n in range(30)], []))
    assert {TEST, VALIDATION} <= {p for one, p in zip(found.genomes, found.parts, strict=True) if one.is_virus}
    assert (
        "viral genomes are held out whether or not the DNA encoder has seen them: too few are new to it" in found.notes
    )
    num_viral = sum(one.is_virus for one in found.of_part(TEST))
    assert (
        f"was trained on {num_viral} of the {found.parts.count(TEST)} test"
        in limits_of(SimpleNamespace(run=run, split=found))[1]
    )


def test_an_encoder_without_a_card_of_its_training_is_said_to_be_unknown(tmp_path):
    run, found = _training(tmp_path, None)
    limits = limits_of(SimpleNamespace(run=run, split=found))
    assert "the training data of hash are not known here" in limits[1].replace(run.config.dna.model_name, "hash")


@pytest.mark.data
def test_no_organism_of_the_real_files_is_on_two_sides_and_none_that_tests_taught_the_bundled_encoder(data_dir):
    files = sorted((data_dir / "viral").glob("train_*.fna.gz"))
    genomes = [replace(one, letters=one.letters[:1000]) for one in read_labelled(files).genomes]
    spec = resolve_model(DEFAULT_DNA_MODEL)
    weights = str(spec.weights_path)
    seen = training_data_of(replace(hash_config(), weights_path=weights, weights_sha256=spec.weights_sha256))
    found = split_labelled(genomes, seed=1, share=0.1, is_seen=[seen.has(one) for one in genomes])
    parts = _parts_of_organisms(found)
    parts.pop("")
    assert len(parts) > 300
    assert [name for name, its in parts.items() if len(its) > 1] == []
    assert parts["fibroporia radiculosa"] == parts["influenza a virus"] == {TRAIN}
    assert not any(seen.has(one) for part in SPLITS[1:] for one in found.of_part(part))
    assert {one.is_virus for one in found.of_part(TEST)} == {True, False}
