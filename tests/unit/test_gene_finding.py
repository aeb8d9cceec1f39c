"""Genes that are there are found, on either strand, and what they say is counted as it is told."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from virnucpro.models.contigs.fragments import Fragments
from virnucpro.models.contigs.gene_finding import MAX_SHARED_NT, NUMBERS, SHORTEST_GENE, Genes
from virnucpro.models.contigs.nucleotide_codes import RESIDUES, encode, reverse_complement, word

GENE = "ATG" + "TTAGCTAACCTGACCGCCTAC" * 8 + "TAA"
"""57 residues and a stop; every other frame, of either strand, has a stop among each seven codons."""
LAMBDA_GENES = {
    "A": (711, 2636, False),
    "C": (4418, 5737, False),
    "E": (6135, 7160, False),
    "J": (15505, 18903, False),
    "int": (27812, 28882, True),
    "cI": (37227, 37940, True),
    "O": (38686, 39585, False),
    "P": (39582, 40283, False),
}
"""First and last nucleotide, from 1, and whether on the reverse strand, as GenBank's J02459 tells; B is not found."""


def fragments_of(letters):
    return Fragments([encode(letters.encode())])


def genes_of(letters):
    return Genes.of(fragments_of(letters))


def numbers_of(letters):
    return genes_of(letters).numbers(fragments_of(letters))[0]


def test_a_gene_is_found_from_its_start_codon_to_its_stop():
    genes = genes_of("TAACC" + GENE + "CTAG")
    assert list(genes.starts_N) == [5]
    assert list(genes.ends_N) == [5 + len(GENE)]
    assert list(genes.lengths_N) == [len(GENE) // 3 - 1]
    assert genes.has_stop_N.all()
    assert not genes.is_reverse_N.any()
    assert len(genes.codons_R) == genes.lengths_N.sum()


def test_the_other_strand_has_the_same_genes_mirrored():
    letters = np.random.default_rng(2).choice(list("ACGT"), 6000)
    codes = encode("".join(letters).encode())
    fragments, reverse = Fragments([codes]), Fragments([reverse_complement(codes)])
    genes, mirrored = Genes.of(fragments), Genes.of(reverse)
    assert len(genes.lengths_N) > 10
    assert set(zip(genes.starts_N, genes.ends_N, ~genes.is_reverse_N, strict=True)) == set(
        zip(len(codes) - mirrored.ends_N, len(codes) - mirrored.starts_N, mirrored.is_reverse_N, strict=True)
    )
    np.testing.assert_allclose(genes.numbers(fragments), mirrored.numbers(reverse))


def test_a_gene_that_comes_in_from_beyond_the_contig_counts_as_far_as_it_is_seen():
    whole = genes_of(GENE)
    cut = genes_of(GENE[60:])
    assert whole.start_codons_N[0] >= 0
    assert list(cut.start_codons_N) == [-1]
    assert cut.lengths_N[0] == whole.lengths_N[0] - 20
    assert not genes_of(GENE[:-3]).has_stop_N.any()
    assert not genes_of(GENE[:-3] + "NNN" + GENE[:9]).has_stop_N.any()


def test_neighbours_share_little_and_none_is_short():
    codes = encode("".join(np.random.default_rng(1).choice(list("ACGT"), 20_000)).encode())
    genes = Genes.of(Fragments([codes]))
    assert (genes.starts_N[1:] - genes.ends_N[:-1] >= -MAX_SHARED_NT).all()
    assert (genes.lengths_N >= SHORTEST_GENE).all()
    assert (genes.ends_N - genes.starts_N == 3 * (genes.lengths_N + genes.has_stop_N)).all()
    assert (genes.starts_N >= 0).all()
    assert (genes.ends_N <= len(codes)).all()


def test_what_genes_say():
    space = "CTAACTAACTAA"
    strands = GENE + space + GENE + space + reverse_complement_of(GENE)
    numbers = numbers_of(strands)
    assert numbers[-2] == 3
    assert numbers[0] == pytest.approx(3000 / len(strands))
    assert numbers[1] == pytest.approx(3 * len(GENE) / len(strands))
    assert numbers[2] == 0.5  # one of two pairs changes the strand
    assert numbers[3] == pytest.approx(1 / 3)
    assert numbers[9] == len(space)
    assert (numbers[15:17] == 0).all()
    with_site = numbers_of("CTAGCTAG" + "AGGAGG" + "CTACTAC" + GENE)
    assert (with_site[15:17] == 1).all()
    assert with_site[17] == 1  # ATG


def reverse_complement_of(letters):
    return letters[::-1].translate(str.maketrans("ACGT", "TGCA"))


@pytest.mark.parametrize("letters", ["", "A", "NNNNNN", "ATG", "TTAATTAA" * 50])
def test_where_there_is_no_gene_all_is_zero(letters):
    numbers = numbers_of(letters)
    assert len(numbers) == NUMBERS
    assert numbers.sum() == 2  # no neighbours, and no whole gene
    assert not genes_of(letters).usage().any()


def test_genes_of_lambda_are_where_they_are_known_to_be(data_dir):
    with gzip.open(data_dir / "viral" / "lambda_virus.fa.gz", "rt") as lines:
        letters = "".join(line.strip() for line in lines if not line.startswith(">"))
    genes = genes_of(letters.upper())
    stops = np.where(genes.is_reverse_N, genes.starts_N + 1, genes.ends_N)
    found = set(zip(stops.tolist(), genes.is_reverse_N.tolist(), strict=True))
    for name, (first, last, is_reverse) in LAMBDA_GENES.items():
        assert (first if is_reverse else last, is_reverse) in found, name


def recoded_gene(stop, seed, codons=450):
    """A gene in which every tenth codon or so is a stop of code 11."""
    chooser = np.random.default_rng(seed)
    others = [a + b + c for a in "ACGT" for b in "ACGT" for c in "ACGT" if a + b + c not in {"TAA", "TAG", "TGA"}]
    chosen = [stop if chooser.random() < 0.1 else str(chooser.choice(others)) for _ in range(codons)]
    return "ATG" + "".join(chosen) + "TAA"


@pytest.mark.parametrize(("number", "stop", "residue"), [(4, "TGA", b"W"), (15, "TAG", b"Q")])
def test_a_dense_contig_whose_stop_codons_are_read_through_has_its_genes_by_another_code(number, stop, residue):
    letters = "CCTAACC" + recoded_gene(stop, 11) + "CC" + recoded_gene(stop, 111)
    genes = genes_of(letters)
    assert genes.genetic_codes[0].number == number
    assert list(genes.lengths_N) == [451, 451]
    where = np.flatnonzero(genes.codons_R == word(stop.encode()))
    assert len(where) > 20
    assert {RESIDUES[at] for at in genes.residues()[where]} == {residue[0]}
    assert numbers_of(letters)[-1] == 1


def test_code_11_reads_what_it_covers_as_well_and_what_is_short_or_made_by_chance():
    assert genes_of(GENE * 20).genetic_codes[0].number == 11
    assert genes_of(recoded_gene("TGA", 1)).genetic_codes[0].number == 11
    letters = "".join(np.random.default_rng(2).choice(list("ACGT"), 6000))
    assert genes_of(letters).genetic_codes[0].number == 11


def test_a_phage_of_the_gut_is_read_by_code_15(data_dir):
    with gzip.open(data_dir / "genomes" / "virus_phage_crass_recoded.fna.gz", "rt") as file:
        letters = "".join(file.read().split("\n")[1:])
    assert genes_of(letters).genetic_codes[0].number == 15
