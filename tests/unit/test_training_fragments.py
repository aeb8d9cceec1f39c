"""Parts that are no echo of each other, the fragments that are cut of them, and the frames that teach."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from tests.strategies import write_fasta
from virnucpro.errors import BadInputError
from virnucpro.training.fitting.embedded_fragments import read_annotations
from virnucpro.training.fitting.training_fragments import (
    FragmentRules,
    cut_training_fragments,
    group_weights,
    read_training_fragments,
    write_training_fragments,
)
from virnucpro.training.genomes.genome_split import SPLITS, TEST, TRAIN, VALIDATION, split_labelled
from virnucpro.training.genomes.labelled_genomes import LabelledGenome
from virnucpro.training.genomes.records import Genome
from virnucpro.training.genomes.related import reverse_complement
from virnucpro.training.training_knobs import LENGTHS_NT
from virnucpro.training.training_settings import SHORTEST_NT


def letters(num_nt, seed):
    return "".join(np.random.default_rng(seed).choice(list("ACGT"), num_nt))


def genome(name, its_letters, *, group="phage", source=None):
    is_virus = group in {"phage", "virus"}
    return LabelledGenome(name, source or name, its_letters, f"{group}.fa", group=group, is_virus=is_virus)


def many(group, count, num_nt, seed):
    return [genome(f"{group}{n}", letters(num_nt, [seed, n]), group=group) for n in range(count)]


RULES = FragmentRules(lengths_nt=LENGTHS_NT, group_weights={}, most_coverage=50.0)


# --- parts -----------------------------------------------------------------------------------------------------------


def test_relatives_stay_together_and_about_a_tenth_of_each_group_is_held_out_twice():
    base = many("phage", 20, 4000, 1)
    strains = [
        genome(f"strain{n}", reverse_complement(one.letters[:3000]) + letters(1000, 1000 + n))
        for n, one in enumerate(base)
    ]
    hosts = many("bacteria", 30, 4000, 2)
    split = split_labelled([*base, *strains, *hosts], seed=3, share=0.1)
    part_of = {one.accession: part for one, part in zip(split.genomes, split.parts, strict=True)}
    assert all(part_of[f"phage{n}"] == part_of[f"strain{n}"] for n in range(20))
    assert len(set(split.clusters)) == 50
    assert Counter(part_of[one.accession] for one in hosts) == {TRAIN: 24, VALIDATION: 3, TEST: 3}
    assert Counter(part_of[one.accession] for one in base) == {TRAIN: 16, VALIDATION: 2, TEST: 2}
    assert split.largest_share < 0.1
    assert split == split_labelled([*base, *strains, *hosts], seed=3, share=0.1)
    assert split.parts != split_labelled([*base, *strains, *hosts], seed=4, share=0.1).parts


def test_a_group_of_three_clusters_is_in_every_part_and_a_smaller_one_trains_and_is_told():
    genomes = [*many("phage", 3, 2000, 1), *many("virus", 2, 2000, 2), *many("bacteria", 12, 2000, 3)]
    split = split_labelled(genomes, seed=1, share=0.1)
    parts = {
        group: Counter(part for one, part in zip(split.genomes, split.parts, strict=True) if one.group == group)
        for group in ("phage", "virus")
    }
    assert parts["phage"] == dict.fromkeys(SPLITS, 1)
    assert parts["virus"] == {TRAIN: 2}
    assert len(split.notes) == 1
    assert split.notes[0].startswith("virus trains only: it has 2 clusters")


def test_a_cluster_of_two_groups_trains():
    shared = letters(6000, 5)
    genomes = [*many("phage", 6, 3000, 1), *many("bacteria", 6, 3000, 2)]
    genomes += [genome("prophage", shared[:3000]), genome("its host", shared, group="bacteria")]
    for seed in range(5):
        split = split_labelled(genomes, seed=seed, share=0.3)
        part_of = {one.accession: part for one, part in zip(split.genomes, split.parts, strict=True)}
        assert part_of["prophage"] == part_of["its host"] == TRAIN


def test_relatives_of_what_is_judged_by_are_left_out():
    genomes = [*many("phage", 6, 3000, 1), *many("bacteria", 6, 3000, 2)]
    judge = Genome("judge", "judge", genomes[2].letters[500:2500], "dev.fa")
    split = split_labelled(genomes, [judge], seed=1, share=0.2)
    assert split.left_out == ["phage2"]
    assert "phage2" not in {one.accession for one in split.genomes}


def test_a_label_that_is_missing_or_cannot_be_in_every_part_is_refused():
    with pytest.raises(BadInputError, match="there are no genomes that are not viral"):
        split_labelled(many("phage", 6, 2000, 1), seed=1, share=0.1)
    with pytest.raises(BadInputError, match="no viral genomes are left for test"):
        split_labelled([*many("phage", 2, 2000, 1), *many("bacteria", 6, 2000, 2)], seed=1, share=0.1)


def test_shuffled_labels_go_with_clusters_and_with_nothing_else():
    genomes = [*many("phage", 20, 1000, 1), *many("bacteria", 40, 1000, 2)]
    genomes += [genome("half", genomes[0].letters[:500] + letters(100, 9))]
    split = split_labelled(genomes, seed=1, share=0.1, shuffle_labels=True)
    kinds = [one.accession.rstrip("0123456789") for one in split.genomes]
    counts = Counter(zip(split.parts, kinds, (one.is_virus for one in split.genomes), strict=True))
    for part in SPLITS:
        for kind in ("phage", "bacteria"):
            assert abs(counts[part, kind, True] - counts[part, kind, False]) <= 2
    label_of = {one.accession: one.is_virus for one in split.genomes}
    assert label_of["half"] == label_of["phage0"]
    few = [*many("phage", 3, 1000, 1), *many("bacteria", 40, 1000, 2)]
    with pytest.raises(BadInputError, match="the group phage has too few clusters"):
        [split_labelled(few, seed=seed, share=0.1, shuffle_labels=True) for seed in range(5)]


# --- fragments --------------------------------------------------------------------------------------------------------


def test_fragments_are_of_either_strand_of_their_genomes_and_as_many_viral_as_not():
    genomes = [*many("phage", 3, 40_000, 1), *many("bacteria", 3, 90_000, 2)]
    fragments = cut_training_fragments(genomes, 120, RULES, part="train", seed=3)
    of = {one.accession: one for one in genomes}
    for fragment in fragments:
        there = of[fragment.accession].letters[fragment.start : fragment.end]
        assert fragment.letters == (reverse_complement(there) if fragment.strand == "-" else there)
        assert (fragment.is_virus, fragment.group) == (of[fragment.accession].is_virus, of[fragment.accession].group)
    assert Counter(fragment.is_virus for fragment in fragments) == {True: 60, False: 60}
    assert 0.3 < np.mean([fragment.strand == "-" for fragment in fragments]) < 0.7
    assert {len(fragment.letters) for fragment in fragments} == set(LENGTHS_NT)
    assert [fragment.name for fragment in fragments[:2]] == ["train_000001", "train_000002"]
    assert len({fragment.is_virus for fragment in fragments[:20]}) == 2
    assert fragments == cut_training_fragments(genomes, 120, RULES, part="train", seed=3)
    assert fragments != cut_training_fragments(genomes, 120, RULES, part="train", seed=4)


def test_groups_weigh_by_the_root_of_their_size_unless_told_otherwise():
    genomes = [*many("phage", 1, 90_000, 1), *many("virus", 1, 10_000, 2)]
    assert group_weights(genomes, RULES) == pytest.approx({"phage": 0.75, "virus": 0.25})
    told = FragmentRules(lengths_nt={300: 1.0}, group_weights={"phage": 0, "virus": 5}, most_coverage=50)
    assert group_weights(genomes, told) == {"phage": 0, "virus": 1}
    fragments = cut_training_fragments([*genomes, *many("bacteria", 1, 9000, 3)], 40, told, part="train", seed=1)
    assert Counter(fragment.group for fragment in fragments) == {"virus": 20, "bacteria": 20}


def test_genomes_weigh_by_the_root_of_their_size_however_many_records_they_have():
    windows = [genome(f"w{n}", letters(8000, n), source="large") for n in range(8)]
    small = genome("small", letters(4000, 99))
    others = many("bacteria", 1, 200_000, 5)
    rules = FragmentRules(lengths_nt={300: 1.0}, group_weights={}, most_coverage=100)
    fragments = cut_training_fragments([*windows, small, *others], 1000, rules, part="train", seed=2)
    share = np.mean([fragment.source == "small" for fragment in fragments if fragment.is_virus])
    assert share == pytest.approx(1 / 5, abs=0.06)


def test_a_genome_is_used_no_more_often_than_it_may_and_both_labels_stay_alike():
    rules = FragmentRules(lengths_nt={500: 1.0}, group_weights={}, most_coverage=2)
    fragments = cut_training_fragments(
        [*many("phage", 1, 3000, 1), *many("bacteria", 1, 90_000, 2)], 200, rules, part="test", seed=1
    )
    assert Counter(fragment.is_virus for fragment in fragments) == {True: 12, False: 12}


def test_short_records_give_themselves_whole_tiny_ones_nothing_and_ambiguous_fragments_are_dropped():
    tiny, short = genome("tiny", "A" * (SHORTEST_NT - 1)), genome("short", letters(400, 1))
    gaps = genome("gaps", letters(2000, 2) + "N" * 5000 + letters(2000, 3))
    fragments = cut_training_fragments(
        [tiny, short, gaps, *many("bacteria", 1, 90_000, 4)], 60, RULES, part="train", seed=1
    )
    viral = [fragment for fragment in fragments if fragment.is_virus]
    assert {fragment.accession for fragment in viral} == {"short", "gaps"}
    assert {len(fragment.letters) for fragment in viral if fragment.accession == "short"} <= {300, 400}
    assert max(fragment.letters.count("N") / len(fragment.letters) for fragment in viral) <= 0.02


def test_fragments_come_back_as_they_were_written(tmp_path):
    genomes = [*many("phage", 2, 4000, 1), *many("bacteria", 2, 4000, 2)]
    fragments = cut_training_fragments(genomes, 10, RULES, part="test", seed=1)
    write_training_fragments(fragments, tmp_path / "p.fa", tmp_path / "p.tsv")
    assert read_training_fragments(tmp_path / "p.fa", tmp_path / "p.tsv") == fragments


# --- annotated proteins ----------------------------------------------------------------------------------------------

FLAT_FILE = """LOCUS       NC_1            100 bp    DNA     linear   PHG 01-JAN-2020
ACCESSION   NC_1
VERSION     NC_1.2
FEATURES             Location/Qualifiers
     source          1..100
                     /organism="x"
     CDS             1..30
                     /note="/translation is below"
                     /translation="MKVL
                     AAGH"
     misc_feature    1..9
                     /translation="WWWW"
     CDS             40..60
                     /translation="MTTT"
ORIGIN
        1 acgt
//
LOCUS       NC_3
FEATURES             Location/Qualifiers
     CDS             1..9
                     /translation="MEE"
//
"""


def test_translations_of_a_flat_file_are_those_of_its_records(tmp_path):
    (tmp_path / "a.gb").write_text(FLAT_FILE)
    known = read_annotations([tmp_path / "a.gb"])
    assert known.is_part("NC_1.2", "VLAAG")
    assert known.is_part("NC_1.2:5-90", "MTTT")
    assert not known.is_part("NC_1.2", "GHMT")
    assert not known.is_part("NC_1.2", "WWWW")
    assert not known.is_part("NC_3", "MKVL")
    assert known.is_part("unknown", "WWWW")
    assert known.is_part("NC_1", "WWWW")


def test_proteins_in_fasta_are_those_of_the_record_that_their_id_names(tmp_path):
    path = write_fasta(tmp_path / "a.faa", [("lcl|NC_1.2_prot_YP_1.1_7", "MKVLAAGH*"), ("k141_5_12", "MTT")])
    known = read_annotations([path])
    assert known.is_part("NC_1.2", "AAGH")
    assert not known.is_part("NC_1.2", "MTT")
    assert known.is_part("k141_5", "MTT")
    assert not known.is_part("k141_5", "MKV")


@pytest.mark.parametrize("content", [b"LOCUS X\n//\n", b"", b">nameless\nMK\n", b"\xff\xfe"])
def test_annotations_without_any_protein_are_refused(tmp_path, content):
    (tmp_path / "a.gb").write_bytes(content)
    with pytest.raises(BadInputError, match=r"a\.gb: .*translation"):
        read_annotations([tmp_path / "a.gb"])
