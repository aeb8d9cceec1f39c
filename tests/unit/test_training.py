"""A whole training with real workers: the same seed gives the same bytes, and what was begun is gone on with."""

from __future__ import annotations

import json
import re
import shutil
import threading
from itertools import combinations

import numpy as np
import pytest

from tests.manifests import values_unseen
from tests.settings import training_config
from tests.strategies import write_fasta
from tests.trainings import hash_training, make_genomes, train_forked
from virnucpro.data.frames import chunk_bounds, open_frames
from virnucpro.durable import sha256_of
from virnucpro.errors import ConfigurationError, ExitCode
from virnucpro.models.classifier import load_classifier
from virnucpro.models.classifier_files.card import read_card
from virnucpro.models.contigs.contig_model import load_contig_model
from virnucpro.pipeline.run.run_status import status_of
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.run_layout import TrainingLayout
from virnucpro.training.fitting.embedded_fragments import read_annotations, read_embedded
from virnucpro.training.fitting.training_fragments import read_training_fragments
from virnucpro.training.genomes.genome_split import SPLITS
from virnucpro.training.genomes.records import read_records
from virnucpro.training.training_knobs import LENGTHS_NT
from virnucpro.training.training_settings import ContigSettings, TreeSettings


def trained(inputs, out, config=None, **arguments):
    """Train to a good end; return the sha256 of each file of weights."""
    ended = train_forked(inputs, out, config or hash_training(), **arguments)
    assert ended.code == 0, ended.errors
    return {path.name: sha256_of(path) for path in out.glob("*.safetensors*")}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished training: its input, its folder and its weights."""
    folder = tmp_path_factory.mktemp("finished")
    files = make_genomes(folder)
    weights = trained(files, folder / "out", hash_training(seed=3, also_chunk_nt=(300,)))
    return files, folder / "out", weights


def test_a_training_that_is_stopped_is_gone_on_with_to_the_same_weights_by_other_workers(finished, tmp_path):
    files, _, weights = finished
    out = tmp_path / "out"
    stop = threading.Event()
    stop.set()
    stopped = train_forked(files, out, hash_training(seed=3), stop=stop)
    assert (stopped.code, status_of(out).state) == (ExitCode.INTERRUPTED, "stopped")
    assert not (out / "card.json").exists()
    assert len(weights) == 2
    assert "the run is stopped" in verify_run(out).problems[0]
    assert trained(files, out, hash_training(seed=3), workers=2) == weights


def test_each_value_of_its_manifest_that_was_changed_is_noticed(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "out")
    num_values, unseen = values_unseen(tmp_path / "out", verify_run)
    assert (num_values > 40, unseen) == (True, [])


@pytest.mark.slow
@pytest.mark.long
def test_another_seed_gives_other_weights_and_a_restart_takes_them_away_and_nothing_else(finished, tmp_path):
    files, _, weights = finished
    out = tmp_path / "other"
    other = trained(files, out, hash_training(seed=4, keep_work=True))
    assert not set(other.values()) & set(weights.values())
    assert (out / "dna" / "embeddings.h5").exists()
    (out / "mine.txt").write_text("x")
    assert trained(files, out, hash_training(seed=3), restart=True) == weights
    assert [(out / name).exists() for name in ("mine.txt", "dna")] == [True, False]


def test_a_classifier_is_whole_and_its_card_says_what_was_done(finished):
    files, out, _ = finished
    classifier = load_classifier(out)
    card, text = json.loads((out / "card.json").read_text()), (out / "MODEL_CARD.md").read_text()
    assert classifier.card == read_card(out)
    assert card["name"] in text
    assert f"`{files[0].name}` | phage" in text
    assert card["data"]["files"][0]["sha256"] == sha256_of(files[0])
    parts = card["split"]["accessions"]
    assert set(parts) == set(SPLITS)
    assert sum(map(len, parts.values())) == 16
    assert all(not set(one) & set(other) for one, other in combinations(parts.values(), 2))
    evaluation = json.loads((out / "evaluation.json").read_text())
    assert classifier.card.also_chunk_nt == (300,)
    assert evaluation["other_chunks"]["300"]["overall"]["contigs"] == evaluation["overall"]["contigs"]
    assert evaluation["overall"]["auroc"]["value"] > 0.9
    assert "in chunks of 300 nt:" in text
    assert evaluation["overall"]["contigs"] == card["training"]["fragments"]["test"] >= 8
    assert card["evaluation"]["overall"] == evaluation["overall"]
    assert 0.5 <= card["threshold"] < 1
    assert not any(
        (out / name).exists() for name in ("dna", "protein", "chunks_300", "work/fragments.fasta", "work/trained")
    )
    rows = [line.split("\t") for line in (out / "work" / "fragments.tsv").read_text().splitlines()[1:]]
    for part, names in parts.items():
        cut = {accession for _, its_part, _, _, _, accession, *_ in rows if its_part == part}
        assert cut
        assert cut <= set(names)
    status = status_of(out)
    assert (status.state, status.kind) == ("complete", "training")
    verified = verify_run(out)
    assert (verified.problems, verified.num_rows, verified.num_records) == ([], 5, 5)


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(finished):
    files, out, weights = finished
    before = (out / "card.json").stat().st_mtime_ns
    assert trained(files, out, hash_training(seed=3, also_chunk_nt=(300,))) == weights
    assert (out / "card.json").stat().st_mtime_ns == before
    refused = train_forked(files, out, hash_training(seed=5, also_chunk_nt=(300,)))
    assert refused.code == ExitCode.CONFIGURATION
    assert "seed was 3, now 5" in refused.errors
    fewer = train_forked(files[:1], out, hash_training(seed=3, also_chunk_nt=(300,)))
    assert (fewer.code, "input was" in fewer.errors) == (ExitCode.CONFIGURATION, True)


def test_a_folder_of_somebody_else_is_not_written_into(finished, tmp_path):
    files, _, _ = finished
    out = tmp_path / "out"
    out.mkdir()
    (out / "model.safetensors").write_text("x")
    refused = train_forked(files, out, hash_training())
    assert (refused.code, "use another folder" in refused.errors) == (ExitCode.CANNOT_WRITE, True)
    assert (out / "model.safetensors").read_text() == "x"


def test_bad_labels_end_with_65_and_leave_no_folder(finished, tmp_path):
    files, _, _ = finished
    table = tmp_path / "labels.tsv"
    table.write_text("file\tlabel\nvirus_phage.fa\tvirus\nnone.fa\tvirus\n")
    refused = train_forked(files, tmp_path / "out", hash_training(genomes=table))
    assert refused.code == ExitCode.BAD_INPUT
    assert f"{table}:3: it matches no record of the input" in refused.errors
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.long
def test_frames_that_teach_are_of_clear_chunks_and_of_annotated_proteins_where_a_record_has_any(tmp_path):
    files = make_genomes(tmp_path)
    letters = {record.accession: record.letters for record in read_records(files[0])}
    spoilt = letters["virus_phage_1"]
    letters["virus_phage_1"] = "".join("N" if place % 900 == 0 else base for place, base in enumerate(spoilt))
    write_fasta(files[0], list(letters.items()))
    whole = letters["virus_phage_0"]
    protein = open_frames(whole.encode(), np.array([0]), np.array([len(whole)])).proteins[0].decode()[:800]
    annotated = write_fasta(tmp_path / "proteins.faa", [("virus_phage_0_1", protein)])
    out = tmp_path / "out"
    trained(files, out, hash_training(annotations=(annotated,), keep_work=True))

    embedded = read_embedded(TrainingLayout(out), 500, read_annotations([annotated]))
    frames = read_records(TrainingLayout(out).protein_frames)
    assert len(frames) == len(embedded.fragment_of_F)
    seen = set()
    for record, fragment, teaches in zip(frames, embedded.fragment_of_F.tolist(), embedded.is_example_F, strict=True):
        cut = embedded.fragments[fragment]
        number = int(re.fullmatch(r".*_chunk_(\d+)[FR][123]", record.accession)[1])
        starts, ends = chunk_bounds(len(cut.letters), 500)
        is_clear = "N" not in cut.letters[starts[number - 1] : ends[number - 1]]
        is_coding = cut.accession != "virus_phage_0" or record.letters in protein
        assert teaches == (is_clear and is_coding)
        seen.add((is_clear, is_coding))
    assert seen >= {(True, True), (True, False), (False, True)}
    first = embedded.fragment_of_F == 0
    np.testing.assert_allclose(
        np.hstack([embedded.dna_CD[0], embedded.protein_CE[0]]), embedded.features_FD[first].mean(axis=0), rtol=1e-5
    )


def test_fragments_that_are_not_embedded_train_the_contig_model_by_their_letters(finished, tmp_path):
    (phages, bacteria), _, weights = finished
    records = read_records(phages)
    halves = [(tmp_path / f"virus_{name}.fa", records[at::2]) for at, name in enumerate(("phage", "herpes"))]
    files = [bacteria, *(write_fasta(path, [(one.accession, one.letters) for one in half]) for path, half in halves)]
    out = tmp_path / "out"
    asked = {"num_fragments": 90, "embedded_fragments": 30, "leave_groups_out": True, "keep_work": True}
    found = trained(files, out, hash_training(seed=3, **asked))
    assert found["contig_model.safetensors.gz"] != weights["contig_model.safetensors.gz"]
    assert not load_contig_model(out, read_card(out)).uses_embeddings
    layout, card = TrainingLayout(out), json.loads((out / "card.json").read_bytes())
    fragments = [read_training_fragments(layout.fragments, layout.fragments_table)]
    fragments.append(read_training_fragments(layout.further_fragments, layout.further_fragments_table))
    assert [sum(fragment.part == "train" for fragment in some) for some in fragments] == [30, 60]
    assert len({fragment.name for some in fragments for fragment in some}) == sum(map(len, fragments))
    of_groups = card["training"]["groups_left_out"]
    assert of_groups.keys() == {"phage", "herpes"}
    assert of_groups["phage"]["others"] > 0
    assert "| group left out |" in (out / "MODEL_CARD.md").read_text()


def test_fragments_that_look_viral_among_the_others_are_named_in_the_card(finished, tmp_path):
    (phages, bacteria), _, _ = finished
    *viral, prophage = read_records(phages)
    others = [*read_records(bacteria), prophage]
    named = [(f"nonviral_bacteria_{at}", one.letters) for at, one in enumerate(others)]
    files = [
        write_fasta(tmp_path / "virus_phage.fa", [(one.accession, one.letters) for one in viral]),
        write_fasta(tmp_path / "nonviral_bacteria.fa", named),
    ]
    trees = TreeSettings(trees=60, learning_rate=0.3, least_contigs=5)
    contig = ContigSettings(folds=4, members=1, most_epochs=3, trees=trees)
    trained(files, tmp_path / "out", hash_training(contig=contig, num_fragments=300, held_out_share=0.1))
    card = json.loads((tmp_path / "out" / "card.json").read_bytes())
    suspects = card["training"]["contigs"]["suspects"]
    assert {(one["place"].partition(":")[0], one["group"]) for one in suspects} == {(named[-1][0], "bacteria")}
    assert min(one["score"] for one in suspects) >= 0.95
    text = (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert f"{len(suspects)} fragments of genomes that are not viral look viral" in text
    assert suspects[0]["place"] in text


@pytest.mark.slow
def test_shuffled_labels_are_said_loudly(finished, tmp_path):
    files, _, _ = finished
    trained(files, tmp_path / "out", hash_training(shuffle_labels=True))
    assert "THE LABELS WERE SHUFFLED" in (tmp_path / "out" / "MODEL_CARD.md").read_text()
    assert "its labels were shuffled" in read_card(tmp_path / "out").worth


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk_nt": 400}, "chunk_nt is 400: it should be 300 or 500"),
        ({"num_fragments": 10}, "num_fragments is 10: it should be greater than or equal to 60"),
        ({"dna_model": "virnucpro-tiny-protein"}, "it is no DNA model"),
        ({"protein_model": "nonsense"}, "unknown model"),
        ({"name": ""}, "--name"),
        ({"group_weights": {"phage": -1.0}}, "group_weights is -1.0: it should be greater than or equal to 0"),
        ({"length_weights": {200: 1.0}}, "lengths of 300 nt and more"),
        ({"length_weights": dict.fromkeys(LENGTHS_NT, 0.0)}, "fragments of no length"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(changes, says):
    with pytest.raises(ConfigurationError, match=says):
        training_config(**{"name": "x", **changes})
