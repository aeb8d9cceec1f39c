"""bf16 and fp16 against fp32 with the real 8M checkpoint: every length that is usual, real proteins."""

from __future__ import annotations

import gzip
import random

import numpy as np
import pytest
import torch

from virnucpro.models.esm2_flash import load_esm2_model

pytestmark = pytest.mark.data

SHORT_IN_FP16 = "bf16 as on a GPU"
LENGTHS = [*[n for n in range(1, 41) for _ in range(3)], *range(41, 130, 2), *range(130, 1022, 120), 1022]


@pytest.fixture(scope="module")
def proteins(data_dir):
    """Windows of real proteins, 1 to 1,022 residues, longest first."""
    with gzip.open(data_dir / "proteins" / "uniprot_20000.fasta.gz", "rt") as lines:
        records = [line.strip() for line in lines if not line.startswith(">")]
    chooser = random.Random(3)
    windows = []
    for length in sorted(LENGTHS, reverse=True):
        protein = chooser.choice([record for record in records[:4000] if len(record) >= length])
        start = chooser.randrange(len(protein) - length + 1)
        windows.append(protein[start : start + length])
    return windows


@pytest.fixture(scope="module")
def weights(data_dir):
    return data_dir / "weights" / "esm2_t6_8M_hemopi2ft.pt"


def rows(weights, precision, proteins):
    model, tokenizer = load_esm2_model(weights, "cpu", precision=precision.split()[0])
    if precision == SHORT_IN_FP16:
        model._wide, model._wider = torch.float16, {}
    found = []
    for first in range(0, len(proteins), 8):
        input_ids, lengths = tokenizer.encode(proteins[first : first + 8])
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        found.append(model(torch.from_numpy(input_ids), torch.from_numpy(cu_seqlens), tuple(lengths.tolist())))
    return torch.cat(found)


@pytest.fixture(scope="module")
def in_fp32(weights, proteins):
    return rows(weights, "fp32", proteins)


@pytest.mark.parametrize(
    "precision",
    ["bf16", *(pytest.param(one, marks=[pytest.mark.slow, pytest.mark.long]) for one in ("fp16", SHORT_IN_FP16))],
)
def test_every_sequence_points_where_it_does_in_fp32(weights, proteins, in_fp32, precision):
    found = rows(weights, precision, proteins)
    assert found.dtype is torch.float32
    cosines = torch.cosine_similarity(found.double(), in_fp32.double())
    worst = int(cosines.argmin())
    assert cosines[worst] >= 0.999, f"{len(proteins[worst])} residues: {cosines[worst]:.6f}"
    assert cosines.median() >= 0.9999
    assert not torch.equal(found, in_fp32)


def test_a_short_sequence_gets_the_same_row_whatever_its_neighbours_are(weights):
    model, tokenizer = load_esm2_model(weights, "cpu", precision="bf16")
    texts = ["MKT", "MKTAYIAKQR" * 20, "WYV", "ACDEFGHIKL" * 9, "MK"]  # short and long in turn
    input_ids, lengths = tokenizer.encode(texts)
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    together = model(torch.from_numpy(input_ids), torch.from_numpy(cu_seqlens), tuple(lengths.tolist()))
    for row, text in zip(together, texts, strict=True):
        ids, (length,) = tokenizer.encode([text])
        alone = model(torch.from_numpy(ids), torch.tensor([0, length]).int(), (int(length),))
        assert torch.cosine_similarity(row, alone[0], dim=0) > 0.9999
