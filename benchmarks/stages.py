"""
Where a prediction with ESM-2 8M spends its time: the share of all stages other than embedding.

Run it as ``python benchmarks/stages.py --checkpoint FILE [--input FASTA] [--megabases 4] [--write]``, with a checkpoint
of ESM-2 8M and any FASTA file of contigs. The classifier has random weights, since speed does not depend on values, and
takes the bundled DNA encoder beside the checkpoint. Seconds are those that ``run.json`` records, of one run of the
command with one worker a core.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from bench_common import machine, write_result
from safetensors.torch import save

from virnucpro.choices import DEFAULT_DNA_MODEL
from virnucpro.models.classifier import MLPClassifier
from virnucpro.models.classifier_files.card import CARD_NAME, WEIGHTS_NAME, ClassifierCard, Encoder
from virnucpro.models.registry import MODELS
from virnucpro.pipeline.prediction.result import EMBEDDING_STAGES

ESM2_8M_WIDTH = 320
CHUNK_NT = 500
HIDDEN_DIM = 512


def write_classifier(folder: Path, checkpoint: Path) -> None:
    torch.manual_seed(0)
    dna = MODELS[DEFAULT_DNA_MODEL]
    module = MLPClassifier(dna.hidden_dim + ESM2_8M_WIDTH, HIDDEN_DIM)
    weights = save({name: tensor for name, tensor in module.state_dict().items() if tensor.is_floating_point()})
    card = ClassifierCard(
        name="random",
        chunk_nt=CHUNK_NT,
        dna_model=Encoder(name=dna.name, sha256=dna.sha256, hidden_dim=dna.hidden_dim),
        protein_model=Encoder(name=checkpoint.stem, sha256=None, hidden_dim=ESM2_8M_WIDTH),
        hidden_dim=HIDDEN_DIM,
        weights_sha256=hashlib.sha256(weights).hexdigest(),
    )
    folder.mkdir()
    (folder / WEIGHTS_NAME).write_bytes(weights)
    (folder / CARD_NAME).write_text(card.to_json())


def first_megabases(source: Path, target: Path, megabases: float) -> None:
    """Copy whole records until there is enough sequence."""
    left = megabases * 1e6
    with source.open() as lines, target.open("w") as file:
        for line in lines:
            if line.startswith(">") and left <= 0:
                return
            file.write(line)
            left -= 0 if line.startswith(">") else len(line) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="ESM-2 8M, a fair-esm .pt file")
    parser.add_argument("--input", type=Path, default=Path(__file__).parents[1] / "examples" / "contigs.fasta")
    parser.add_argument("--megabases", type=float, default=4.0)
    parser.add_argument("--write", action="store_true", help="keep the result in benchmarks/results")
    options = parser.parse_args()
    workers = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_classifier(folder / "classifier", options.checkpoint)
        first_megabases(options.input, folder / "contigs.fa", options.megabases)
        command = [sys.executable, "-m", "virnucpro", "predict", folder / "contigs.fa", "-o", folder / "out", "--json"]
        command += ["--classifier", folder / "classifier", "--protein-model", options.checkpoint]
        command += ["--devices", "cpu", "--workers", str(workers)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        result = json.loads(done.stdout)
    whole_s = sum(result["stages_s"].values())
    others_s = sum(seconds for stage, seconds in result["stages_s"].items() if stage not in EMBEDDING_STAGES)
    report = {
        "machine": machine("virnucpro", "torch", "numpy", "h5py"),
        "workers": workers,
        "counts": {key: result["counts"][key] for key in ("contigs", "chunks", "frames")},
        "stages_s": result["stages_s"],
        "share_of_other_stages": round(others_s / whole_s, 4),
    }
    print(json.dumps(report, indent=2))
    if options.write:
        write_result("stages", report)


if __name__ == "__main__":
    main()
