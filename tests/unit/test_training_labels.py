"""What genomes are: by the names of their files, or by a table; what is ambiguous is refused by file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.strategies import write_fasta
from virnucpro.errors import BadInputError
from virnucpro.training.genomes.labelled_genomes import files_of, label_of_name, read_labelled


@pytest.mark.parametrize(
    ("name", "is_virus", "group"),
    [
        ("train_virus_eukaryotic_virus.fna.gz", True, "eukaryotic_virus"),
        ("train_nonviral_bacteria.fna.gz", False, "bacteria"),
        ("gut-phages.fa", True, "gut_phages"),
        ("Non-Viral.archaea.FASTA", False, "archaea"),
        ("non_virus_plasmids.fas", False, "plasmids"),
        ("host.fa.gz", False, "host"),
    ],
)
def test_a_name_tells_label_and_group(name, is_virus, group):
    label = label_of_name(Path(name))
    assert (label.is_virus, label.group) == (is_virus, group)


@pytest.mark.parametrize("name", ["genomes.fna", "phage_host.fna", "antiviral.fna", "virus_nonviral.fa"])
def test_a_name_that_tells_nothing_or_both_is_refused_with_the_rule(name):
    with pytest.raises(BadInputError, match=r"virus, viral or phage.*--genomes TABLE"):
        label_of_name(Path(name))


def test_a_table_labels_records_and_files_and_its_line_for_a_record_comes_first(tmp_path):
    fasta = write_fasta(tmp_path / "genomes.fa", [("a", "ACGT"), ("b:1-4", "TTTT"), ("c", "GGGG")])
    table = tmp_path / "labels.tsv"
    table.write_text(
        "file\taccession\tlabel\tgroup\tgenome\textra\n\tb:1-4\tvirus\tphage\tG1\tx\ngenomes.fa\t\tNonViral\t\t\t\n"
    )
    genomes = read_labelled([fasta], table).genomes
    assert [(one.accession, one.is_virus, one.group, one.source) for one in genomes] == [
        ("a", False, "nonviral", "a"),
        ("b:1-4", True, "phage", "G1"),
        ("c", False, "nonviral", "c"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("accession\tgroup\na\tx\n", r"labels\.tsv:1: no column 'label'"),
        ("name\tlabel\na\tvirus\n", r"labels\.tsv:1: neither a column id"),
        ("accession\tlabel\na\n", r"labels\.tsv:2: 1 columns where"),
        ("accession\tlabel\na\tvirus\nb\tvirus\n", r"genomes\.fa:5: no line of .* is for this record .*\(c\)"),
        ("accession\tlabel\na\tvirus\nb\tvirus\nc\tvirus\nd\tvirus\n", r"labels\.tsv:5: it matches no record .*\(d\)"),
        ("accession\tlabel\na\tvirus\na\tother\n", r"labels\.tsv:3: a has another label in line 2"),
        ("accession\tlabel\na\tmaybe\n", r"labels\.tsv:2: the label 'maybe'"),
        ("accession\tlabel\n\tvirus\n", r"labels\.tsv:2: neither accession nor file"),
        ("accession\tlabel\tgroup\na\tvirus\tx\nb\tother\tx\nc\tother\ty\n", "the group x holds viral genomes and"),
    ],
)
def test_a_table_that_cannot_be_used_is_told_by_file_and_line(tmp_path, text, says):
    fasta = write_fasta(tmp_path / "genomes.fa", [("a", "ACGT"), ("b", "TTTT"), ("c", "GGGG")])
    (tmp_path / "labels.tsv").write_text(text)
    with pytest.raises(BadInputError, match=says):
        read_labelled([fasta], tmp_path / "labels.tsv")


def test_records_of_one_id_are_kept_once_or_numbered_and_stay_one_genome(tmp_path):
    first = write_fasta(tmp_path / "virus_a.fa", [("x", "ACGT"), ("x", "ACGT"), ("x", "TTTT")])
    again = write_fasta(tmp_path / "virus_b.fa", [("x", "TTTT"), ("y", "CCCC")])
    found = read_labelled([first, again])
    assert [(one.accession, one.letters, one.source) for one in found.genomes] == [
        ("x", "ACGT", "x"),
        ("x#2", "TTTT", "x"),
        ("y", "CCCC", "y"),
    ]
    assert found.notes[0] == "identical records, used once: 2"
    assert "x#2" in found.notes[1]
    other = write_fasta(tmp_path / "nonviral.fa", [("x", "ACGT")])
    with pytest.raises(BadInputError, match="have both labels"):
        read_labelled([first, other])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b">a\nACGU\n", r"virus\.fa:1: the letter 'U'"),
        (b">a\nACGT\n>b\nAC\nMKQ\n", r"virus\.fa:3: the letter 'Q'.*\(b\)"),
        (b"ACGT\n", r"virus\.fa:1: no header"),
        (b">a\n>b\nACGT\n", "without a sequence"),
        (b"", "no header"),
        (gzip.compress(b">a\nACGT\n", mtime=0)[:-6], "truncated gzip"),
        (b">a\n\xff\n", "not a FASTA file"),
    ],
)
def test_a_file_that_is_no_fasta_of_dna_is_refused(tmp_path, content, says):
    (tmp_path / "virus.fa").write_bytes(content)
    with pytest.raises(BadInputError, match=says):
        read_labelled([tmp_path / "virus.fa"])


def test_a_folder_stands_for_its_fasta_files_and_no_file_is_read_twice(tmp_path):
    paths = [write_fasta(tmp_path / name, [("a", "ACGT")]) for name in ("virus.fa", "host.FNA", "notes.txt")]
    (tmp_path / "sub").mkdir()
    assert files_of([tmp_path]) == [paths[1], paths[0]]
    assert files_of([paths[2]]) == [paths[2]]
    with pytest.raises(BadInputError, match="given twice"):
        files_of([tmp_path, paths[0]])
    with pytest.raises(BadInputError, match="without FASTA files"):
        files_of([tmp_path / "sub"])
    with pytest.raises(BadInputError, match="No such file"):
        read_labelled(files_of([tmp_path / "virus_absent.fa"]))


def test_the_labels_of_the_real_training_files_come_from_their_names(data_dir):
    paths = sorted((data_dir / "viral").glob("train_*.fna.gz"))
    labels = {path.name: label_of_name(path) for path in paths}
    assert {(label.group, label.is_virus) for label in labels.values()} == {
        ("bacteria", False),
        ("eukaryote", False),
        ("organelle", False),
        ("eukaryotic_virus", True),
        ("microvirus", True),
        ("prokaryotic_virus", True),
    }
