"""``virnucpro train`` as a user types it: interrupted and gone on with, and what mistakes end with."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import typer

from tests.trainings import make_genomes
from virnucpro.commands.train import group_weight, length_weight
from virnucpro.store.contig_table import read_contig_calls

TRAIN = [sys.executable, "-m", "virnucpro", "train"]


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "virnucpro", *map(str, arguments)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_training_that_is_interrupted_ends_with_130_and_goes_on_to_a_classifier_that_predict_takes(tmp_path):
    files, out = make_genomes(tmp_path, codons=600), tmp_path / "mine"
    told = [*files, "-o", out, "--pieces", 60, "--epochs", 2, "--devices", "cpu", "--workers", 1]
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
    assert "60 pieces train, " in done.stdout
    assert f"card: {out / 'MODEL_CARD.md'}" in done.stdout
    assert json.loads((out / "card.json").read_text())["training"]["command"] == (
        "virnucpro train virus_phage.fa nonviral_bacteria.fa -o DIR --name mine --pieces 60 --epochs 2 --seed 1"
    )
    again = command("train", *told, "--json")
    assert (again.returncode, json.loads(again.stdout)["was_complete"]) == (0, True)
    called = command("predict", files[0], "-o", tmp_path / "calls", "--classifier", out, "--devices", "cpu")
    assert called.returncode == 0, called.stderr
    scores = [call.score for call in read_contig_calls(tmp_path / "calls" / "contigs.tsv")]
    assert len(scores) == 8
    assert min(scores) > 0.5


def test_a_mistake_is_told_in_a_sentence_and_leaves_no_folder(tmp_path):
    (tmp_path / "virus.fa").write_text(">a\nACGT\n")
    done = command("train", tmp_path / "virus.fa", "-o", tmp_path / "out", "--devices", "cpu", "--labels", "absent.tsv")
    assert done.returncode == 65, done.stderr
    assert "absent.tsv: No such file" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_weight_is_given_with_what_it_is_of():
    assert group_weight("eukaryotic_virus=2.5") == ("eukaryotic_virus", 2.5)
    for text in ("phage", "phage=", "=2", "phage=-1", "phage=nan", "phage=inf"):
        with pytest.raises(typer.BadParameter, match="GROUP=NUMBER"):
            group_weight(text)
    assert length_weight("300=0.5") == (300, 0.5)
    for text in ("300", "x=1", "-300=1", "300=-1"):
        with pytest.raises(typer.BadParameter, match="NT=NUMBER"):
            length_weight(text)
