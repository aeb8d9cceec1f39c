"""``genes.gff3`` and ``genes.faa``: what they hold follows from the contig's letters, by the rules of GFF3."""

from __future__ import annotations

import gzip
import re
from urllib.parse import unquote

import numpy as np
import pytest

from virnucpro.calls import gene_files
from virnucpro.calls.gene_files import GFF_HEADER, find_genes, gene_lines
from virnucpro.models.contigs.nucleotide_codes import encode

STOPS = {4: {"TAA", "TAG"}, 11: {"TAA", "TAG", "TGA"}, 15: {"TAA", "TGA"}}
CODONS = [a + b + c for a in "TCAG" for b in "TCAG" for c in "TCAG"]
RESIDUES = dict(zip(CODONS, "FFLLSSSSYY**CC*WLLLLPPPPHHQQRRRRIIIMTTTTNNKKSSRRVVVVAAAADDEEGGGG", strict=True))
RECODED = {4: {"TGA": "W"}, 15: {"TAG": "Q"}, 11: {}}
GENE = "ATG" + "TTAGCTAACCTGACCGCCTAC" * 8 + "TAA"
"""Every other frame, of either strand, has a stop among each seven codons."""


def mirrored(letters):
    return letters[::-1].translate(str.maketrans("ACGT", "TGCA"))


def write(folder, contigs):
    found = gene_lines(contigs.items())
    (folder / "genes.gff3").write_bytes(GFF_HEADER + found.gff)
    (folder / "genes.faa").write_bytes(found.proteins)
    lines = [line.split("\t") for line in found.gff.decode().splitlines() if line[0] != "#"]
    proteins = {}
    for entry in filter(None, found.proteins.decode().removeprefix(">").split("\n>")):
        header, *residues = entry.splitlines()
        proteins[header] = "".join(residues)
    assert len(lines) == len(proteins) == found.genes
    return lines, proteins


def attributes_of(line):
    return dict(pair.split("=") for pair in line[8].split(";"))


def random_contigs(count=30, seed=3):
    chooser = np.random.default_rng(seed)
    shares = [0.25, 0.25, 0.25, 0.249, 0.001]
    lengths = chooser.integers(1, 9000, count)
    contigs = ["".join(chooser.choice(list("ACGTN"), length, p=shares)) for length in lengths]
    # a single unknown letter breaks no gene, two do
    return {f"k{n}": contig.replace("N", "N" * (1 + n % 2)) for n, contig in enumerate(contigs)}


def check(lines, proteins, contigs):
    """Check every gene against its contig's letters, and every line against the rules of GFF3."""
    assert len({attributes_of(line)["ID"] for line in lines}) == len(lines)
    for line, (header, protein) in zip(lines, proteins.items(), strict=True):
        name, source, kind, first, last, score, strand, phase, _ = line
        assert re.fullmatch(r"[a-zA-Z0-9.:^*$@!+_?|%-]+", name)
        assert (source, kind, score, phase) == ("virnucpro", "CDS", ".", "0")
        letters, about = contigs[unquote(name)], attributes_of(line)
        assert 1 <= int(first) <= int(last) <= len(letters)
        gene = letters[int(first) - 1 : int(last)]
        gene = gene if strand == "+" else mirrored(gene)
        assert len(gene) % 3 == 0
        codons = [gene[at : at + 3] for at in range(0, len(gene), 3)]
        code = int(about["transl_table"])
        is_edge, left, right = about["start_type"] == "Edge", *map(int, about["partial"])
        begins, ends = (left, right) if strand == "+" else (right, left)
        assert bool(begins) == is_edge
        assert is_edge or (codons[0] == about["start_type"] and codons[0] in {"ATG", "GTG", "TTG"})
        assert (codons[-1] in STOPS[code]) == (not ends)
        if begins:  # what is before cannot be read
            before = letters[: int(first) - 1][-3:] if strand == "+" else letters[int(last) :][:3]
            assert len(before) < 3 or "N" in before
        of_codon = {**RESIDUES, **RECODED[code]}
        residues = "".join("X" if "N" in one else of_codon[one] for one in codons[: len(codons) - (not ends)])
        assert "*" not in residues
        assert protein == (residues if is_edge else "M" + residues[1:])
        assert int(about["length_aa"]) == len(protein)
        sign = {"+": "1", "-": "-1"}[strand]
        kept = line[8].partition(";length_aa")[0]
        assert header == f"{unquote(about['ID'])} # {first} # {last} # {sign} # {kept}"


def test_a_whole_gene_of_each_strand_is_written_from_its_start_to_its_stop(tmp_path):
    lines, proteins = write(tmp_path, {"a": "TAACC" + GENE + "CTAG", "b": "CTAG" + mirrored(GENE) + "GGTTA"})
    assert ["\t".join(line) for line in lines] == [
        "a\tvirnucpro\tCDS\t6\t179\t.\t+\t0\tID=a_1;partial=00;start_type=ATG;transl_table=11;length_aa=57",
        "b\tvirnucpro\tCDS\t5\t178\t.\t-\t0\tID=b_1;partial=00;start_type=ATG;transl_table=11;length_aa=57",
    ]
    assert list(proteins.values()) == ["M" + "LANLTAY" * 8] * 2
    assert (tmp_path / "genes.gff3").read_text().startswith("##gff-version 3\n##sequence-region a 1 183\na\t")


def test_a_gene_that_runs_out_of_the_contig_is_marked_at_that_end(tmp_path):
    inside = GENE[6:-9]
    contigs = {"c": "C" + inside, "d": mirrored("C" + inside), "n": "C" + inside + "N" * 50 + GENE + "C"}
    lines, proteins = write(tmp_path, contigs)
    partial = {attributes_of(line)["ID"]: attributes_of(line)["partial"] for line in lines}
    assert partial == {"c_1": "11", "d_1": "11", "n_1": "11", "n_2": "00"}
    check(lines, proteins, contigs)


def test_every_gene_of_random_contigs_follows_from_their_letters(tmp_path):
    contigs = random_contigs()
    lines, proteins = write(tmp_path, contigs)
    assert len(lines) > 100
    assert {line[6] for line in lines} == {"+", "-"}
    assert {attributes_of(line)["partial"] for line in lines} == {"00", "01", "10", "11"}
    check(lines, proteins, contigs)


def test_genes_of_real_genomes_follow_from_their_letters_in_their_own_genetic_code(tmp_path, data_dir):
    contigs = {}
    for name in ("viral/lambda_virus.fa.gz", "genomes/virus_phage_crass_recoded.fna.gz"):
        with gzip.open(data_dir / name, "rt") as file:
            header, *rest = file.read().split(">")[1].splitlines()
        contigs[header.split()[0]] = "".join(rest).upper()
    lines, proteins = write(tmp_path, contigs)
    check(lines, proteins, contigs)
    codes = {line[0]: attributes_of(line)["transl_table"] for line in lines}
    assert sorted(codes.values()) == ["11", "15"]
    assert [int(line[3]) for line in lines] == [
        start for name in contigs for start in sorted(int(line[3]) for line in lines if line[0] == name)
    ]


def test_names_that_gff3_does_not_take_are_escaped_there_and_whole_in_the_proteins(tmp_path):
    name = "NODE_1;cov=2,5&x%é~>|y"
    lines, proteins = write(tmp_path, {name: "C" + GENE + "C"})
    assert lines[0][0] == "NODE_1%3Bcov%3D2%2C5%26x%25%C3%A9%7E%3E|y"
    assert attributes_of(lines[0])["ID"] == f"{lines[0][0]}_1"
    assert next(iter(proteins)).startswith(f"{name}_1 # 2 # 175 # 1 # ID={lines[0][0]}_1;")


def test_what_is_read_together_changes_no_byte(tmp_path, monkeypatch):
    contigs = random_contigs()
    written = []
    for number, pass_nt in enumerate((1, 20_000, 10**9)):
        monkeypatch.setattr(gene_files, "PASS_NT", pass_nt)
        (tmp_path / str(number)).mkdir()
        write(tmp_path / str(number), contigs)
        written.append([(tmp_path / str(number) / name).read_bytes() for name in ("genes.gff3", "genes.faa")])
    assert written[0] == written[1] == written[2]


def test_a_long_contig_that_is_read_in_windows_has_the_genes_of_the_whole_one(monkeypatch):
    letters = "".join(np.random.default_rng(8).choice(list("ACGT"), 100_000)) + GENE
    (whole,) = find_genes([encode(letters.encode())])
    monkeypatch.setattr(gene_files, "WINDOW_NT", 20_000)
    monkeypatch.setattr(gene_files, "OVERLAP_NT", 6_000)
    (in_windows,) = find_genes([encode(letters.encode())])
    assert len(whole) > 300
    assert in_windows == whole


@pytest.mark.parametrize("contigs", [{}, {"a": "ACGT"}, {"a": "N" * 500}])
def test_without_genes_both_files_are_there(tmp_path, contigs):
    lines, proteins = write(tmp_path, contigs)
    assert (lines, proteins) == ([], {})
    regions = [f"##sequence-region {name} 1 {len(letters)}" for name, letters in contigs.items()]
    assert (tmp_path / "genes.gff3").read_text().splitlines() == ["##gff-version 3", *regions]
