"""``virnucpro train`` as a user types it: interrupted and gone on with, and what mistakes end with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import typer

from tests.command_line import run
from tests.trainings import make_genomes
from virnucpro.commands.options import named_number
from virnucpro.errors import ConfigurationError
from virnucpro.knobs import from_flat
from virnucpro.run_layout import TrainingLayout
from virnucpro.store.contig_table import read_contig_calls
from virnucpro.training.evaluation.metrics import counts_of
from virnucpro.training.fitting.classifier_fitting import score_fragments
from virnucpro.training.fitting.embedded_fragments import read_embedded
from virnucpro.training.training_knobs import TrainingSettings

TRAIN = [sys.executable, "-m", "virnucpro", "train"]


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "virnucpro", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_training_that_is_interrupted_ends_with_130_and_goes_on_and_predict_scores_as_it_did(tmp_path):
    files, out = make_genomes(tmp_path, codons=600), tmp_path / "mine"
    told = [*files, "-o", out, "--fragments", 60, "--epochs", 2, "--devices", "cpu", "--workers", 1, "--keep-work"]
    begun = subprocess.Popen([*TRAIN, *map(str, told)], stderr=subprocess.PIPE, text=True)
    parts = out / "dna" / "work" / "parts"
    while begun.poll() is None and not list(parts.glob("part_*")) and not (out / "protein").exists():
        time.sleep(0.02)
    begun.send_signal(signal.SIGINT)
    _, said = begun.communicate(timeout=60)
    assert begun.returncode == 130, said
    assert "start the same command again to continue" in said
    assert not (out / "card.json").exists()

    done = command("train", *told)
    assert done.returncode == 0, done.stderr
    assert "16 records in 16 clusters that are not related" in done.stdout
    assert "60 fragments train, " in done.stdout
    assert f"card: {out / 'MODEL_CARD.md'}" in done.stdout
    assert json.loads((out / "card.json").read_text())["training"]["command"] == (
        "virnucpro train virus_phage.fa nonviral_bacteria.fa -o DIR --name mine --fragments 60 --epochs 2 --seed 1"
    )
    again = command("train", *told, "--json")
    assert (again.returncode, json.loads(again.stdout)["was_complete"]) == (0, True)

    fragments = TrainingLayout(out).fragments
    called = command("predict", fragments, "-o", tmp_path / "calls", "--classifier", out, "--devices", "cpu")
    assert called.returncode == 0, called.stderr
    scores = [call.score for call in read_contig_calls(tmp_path / "calls" / "contigs.tsv")]
    embedded = read_embedded(TrainingLayout(out), 500, None)
    as_trained = score_fragments(out, embedded, np.ones(len(embedded.fragments), dtype=bool))
    np.testing.assert_allclose(scores, as_trained, rtol=0, atol=1e-5)
    assert counts_of(as_trained, embedded.is_virus_C).auroc() > 0.9


def test_a_mistake_is_told_in_a_sentence_and_leaves_no_folder(tmp_path):
    (tmp_path / "virus.fa").write_text(">a\nACGT\n")
    done = run("train", tmp_path / "virus.fa", "-o", tmp_path / "out", "--devices", "cpu", "--genomes", "absent.tsv")
    assert done.code == 65, done.err
    assert "absent.tsv: No such file" in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_a_weight_is_given_with_what_it_is_of():
    assert named_number("eukaryotic_virus=2.5") == ("eukaryotic_virus", "2.5")
    for text in ("phage", "phage=", "=2", "phage=-1", "phage=nan", "phage=inf"):
        with pytest.raises(typer.BadParameter, match="NAME=NUMBER"):
            named_number(text)
    assert from_flat(TrainingSettings, {"length_weights": {"300": "0.5"}}).training.length_weights == {300: 0.5}
    for length in ("x", "300.5"):
        with pytest.raises(ConfigurationError, match="length_weights"):
            from_flat(TrainingSettings, {"length_weights": {length: "1"}})
