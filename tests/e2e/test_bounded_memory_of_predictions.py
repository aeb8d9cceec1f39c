"""Memory of a prediction does not follow its input: as in ``test_bounded_memory``, in the parent alone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.test_bounded_memory import peaks
from tests.fakes import hash_config
from tests.predictions import hash_prediction, predict
from virnucpro.choices import SequenceKind

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

THIS = "tests.e2e.test_bounded_memory_of_predictions"
PARENT_BYTES_PER_CONTIG = 1500
"""Bytes of the parent's peak that a contig may cost: three indexes (contigs, nucleotides and proteins of frames, more
than one a contig), and what is buffered at a time, which 3,000 contigs do not fill."""


def predict_and_print_peak(num_contigs: int, folder: Path) -> None:
    """Identify *num_contigs* contigs of one chunk, nearly all with an open frame; print this process's peak in KiB."""
    rng = np.random.default_rng(1)
    codons = np.array([x for x in np.ndindex(4, 4, 4) if x not in {(3, 0, 0), (3, 0, 2), (3, 2, 0)}])  # no stop
    letters = np.frombuffer(b"ACGT", np.uint8)[codons[rng.integers(0, len(codons), size=1 << 18)]].tobytes()
    with (folder / "in.fa").open("wb") as file:
        for number in range(num_contigs):
            start = 3 * int(rng.integers(0, 1 << 17))
            file.write(b">contig_%07d\n%s\n" % (number, letters[start : start + 300]))
    blocks = {"token_budget": 4096, "sequences_per_part": 4096, "allow_empty": True}
    dna = hash_config(sequence_kind=SequenceKind.DNA, max_residues=1000, **blocks)
    config = hash_prediction(folder, dna=dna, protein=hash_config(**blocks), contig_model=True)
    result = predict([folder / "in.fa"], folder / "out", config)
    assert result.counts["scored_frames"] >= num_contigs
    status = Path("/proc/self/status").read_text().splitlines()
    print(json.dumps({"parent": next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))}))


def test_ten_times_the_contigs_take_little_more_memory_from_fragments_to_report(tmp_path):
    few = peaks(3_000, tmp_path / "few", module=THIS)
    many = peaks(30_000, tmp_path / "many", module=THIS)
    bytes_per_contig = (many["parent"] - few["parent"]) * 1024 / 27_000
    print(f"{bytes_per_contig:.0f} bytes of the parent's peak a contig")
    assert bytes_per_contig < PARENT_BYTES_PER_CONTIG


if __name__ == "__main__":
    predict_and_print_peak(int(sys.argv[1]), Path(sys.argv[2]))
