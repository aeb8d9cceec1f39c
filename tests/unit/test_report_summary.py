"""What a report gathers from the final files: every contig counted once, and nothing kept that grows with the input."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.made_prediction import Contig, make_prediction, some_contigs
from virnucpro.errors import ResultError
from virnucpro.report.prediction import summary as summary_module
from virnucpro.report.prediction.summary import NO_SCORE, SCORE_BINS, TRACK_STEPS, summarise
from virnucpro.store.contig_table import Call
from virnucpro.store.manifest import with_checksum


@pytest.fixture(scope="module")
def metagenome(tmp_path_factory):
    left_out = [Contig(f"bad{n}", 0, left_out=f"in.fasta:{n}: letter '*' in a DNA sequence") for n in range(3)]
    return make_prediction(tmp_path_factory.mktemp("metagenome"), [*some_contigs(), *left_out], threshold=0.7)


def test_every_contig_is_counted_once_under_its_call(metagenome):
    found = summarise(metagenome.layout)
    expected = Counter(row["call"] if row["score"] else NO_SCORE for row in metagenome.rows)
    assert {call: group.contigs for call, group in found.groups.items()} == {
        call: expected[call] for call in (Call.VIRUS, Call.UNDECIDED, Call.NOT_VIRUS, Call.TOO_SHORT, NO_SCORE)
    }
    assert expected[Call.UNDECIDED] > 0
    assert found.contigs == len(metagenome.rows)
    assert sum(group.nt for group in found.groups.values()) == sum(int(row["length"] or 0) for row in metagenome.rows)
    viral = [float(row["score"]) for row in metagenome.rows if row["call"] == Call.VIRUS]
    assert found.sure == {least: sum(score >= least for score in viral) for least in (0.99, 0.9)}


def test_the_histogram_has_every_score_in_its_step(metagenome):
    found = summarise(metagenome.layout)
    for call in (Call.VIRUS, Call.UNDECIDED, Call.NOT_VIRUS):
        scores = [float(row["score"]) for row in metagenome.rows if row["call"] == call and row["score"]]
        expected = [
            sum(step / SCORE_BINS <= score < (step + 1) / SCORE_BINS + (step == SCORE_BINS - 1) for score in scores)
            for step in range(SCORE_BINS)
        ]
        assert found.groups[call].bins == expected


def test_reasons_are_counted_without_the_place_where_they_were_found(metagenome):
    found = summarise(metagenome.layout)
    assert found.reasons["skipped: letter '*' in a DNA sequence"] == 3
    assert sum(found.reasons.values()) == found.groups[NO_SCORE].contigs
    assert found.num_failed == 3
    assert found.failed[0] == ["bad0", "in.fasta:0: letter '*' in a DNA sequence", "0"]


def test_the_table_has_the_highest_scores_first(metagenome):
    found = summarise(metagenome.layout)
    assert [contig.found.contig for contig in found.table] == [
        row["contig"]
        for _, row in sorted(
            enumerate(metagenome.rows),
            key=lambda item: (-float(item[1]["score"] or -1), -int(item[1]["length"] or 0), item[0]),
        )
    ]


def test_regions_stand_with_their_contigs(metagenome):
    found = summarise(metagenome.layout)
    lines = [line.split("\t") for line in metagenome.layout.viral_regions.read_text().splitlines()[1:]]
    expected = Counter(contig for contig, *_ in lines)
    assert {contig.found.contig: len(contig.regions) for contig in found.table if contig.regions} == expected
    assert (found.regions, found.contigs_with_regions) == (len(lines), len(expected))
    assert found.region_nt == sum(int(end) - int(start) for _, start, end, *_ in lines)


def test_tracks_are_those_of_the_surest_viral_contigs_and_of_others_with_the_longest_regions(metagenome):
    found = summarise(metagenome.layout)
    long_contigs = [contig for contig in found.table if contig.length_nt >= 10_000]
    viral = [contig for contig in long_contigs if contig.found.call == Call.VIRUS]
    shown = [track.contig for track in found.viral_tracks]
    others = [contig for contig in long_contigs if contig.found.call != Call.VIRUS and contig.regions]
    others.sort(key=lambda contig: contig.region_nt, reverse=True)
    assert found.tracks_read == min(len(viral), 40)
    assert len(found.viral_tracks) == 6  # of them vary, and are the first to
    assert [track.contig for track in found.viral_tracks] == [one for one in viral if one in shown][:6]
    assert not any(track.is_even for track in found.viral_tracks)
    assert [track.contig for track in found.other_tracks] == others[:4]
    assert "NODE_12_length_248310_cov_31.7" in {track.contig.found.contig for track in found.other_tracks}
    assert found.records.keys() >= {contig.number for contig in shown if contig.length_nt < 100_000}
    bedgraph = [line.split("\t") for line in metagenome.layout.tracks.read_text().splitlines()[1:]]
    for track in [*found.viral_tracks, *found.other_tracks]:
        if track.window_nt:
            continue
        expected = [(int(a), int(b), float(p)) for name, a, b, p in bedgraph if name == track.contig.found.contig]
        assert [tuple(step) for step in track.steps] == expected


def test_tracks_and_regions_of_escaped_ids_are_those_of_their_contigs(tmp_path):
    names = ["#1", "track", "browser"]
    made = make_prediction(tmp_path, [Contig(name, 60_000, 0.2, 0.8) for name in names])
    found = summarise(made.layout)
    assert sorted(contig.found.contig for contig in found.table if contig.regions) == sorted(names)
    shown = [*found.viral_tracks, *found.other_tracks]
    assert shown
    assert {track.contig.found.contig for track in shown} <= set(names)


def test_a_long_track_is_averaged_and_keeps_its_mean(tmp_path):
    made = make_prediction(tmp_path, [Contig("chromosome", 1_200_345, 0.5, 0.52, open_share=1)])
    (track,) = summarise(made.layout).other_tracks
    assert len(track.steps) <= TRACK_STEPS
    assert track.window_nt == 5000
    assert track.steps[-1].end == 1_200_345
    lines = [line.split("\t") for line in made.layout.tracks.read_text().splitlines()[1:]]
    total = sum((int(end) - int(start)) * float(p) for _, start, end, p in lines)
    assert sum((step.end - step.start) * step.p_virus for step in track.steps) == pytest.approx(total)


@pytest.fixture
def small_limits(monkeypatch):
    monkeypatch.setattr(summary_module, "TABLE_CONTIGS", 200)
    monkeypatch.setattr(summary_module, "SCATTER_POINTS", 500)


def test_what_is_kept_is_bounded_and_the_sample_holds_every_viral_contig(tmp_path, small_limits):
    contigs = [Contig(f"k{n}", 300, 0, float(n % 50 == 0), open_share=1) for n in range(1000)]
    made = make_prediction(tmp_path, contigs)
    found = summarise(made.layout)
    assert len(found.table) == 200
    assert len(found.sample) == 500
    sampled = {contig.found.contig for contig in found.sample}
    assert sampled > {row["contig"] for row in made.rows if row["call"] == Call.VIRUS}
    numbers = [contig.number for contig in found.sample]
    assert numbers == sorted(set(numbers))
    assert 430 < sum(numbers) / len(numbers) < 570  # drawn from everywhere
    assert summarise(made.layout) == found


def test_of_very_many_viral_contigs_half_the_sample_is_left_to_the_others(tmp_path, small_limits):
    contigs = [Contig(f"k{n}", 300, 0, float(n % 3 != 0), open_share=1) for n in range(1000)]
    found = summarise(make_prediction(tmp_path, contigs).layout)
    calls = Counter(contig.found.call for contig in found.sample)
    assert calls.total() == 500
    assert calls[Call.VIRUS] == 250


def test_reasons_without_end_are_counted_together(tmp_path):
    contigs = [Contig(f"c{n}", 0, left_out=f"fault number {n}") for n in range(80)]
    found = summarise(make_prediction(tmp_path, contigs).layout)
    assert len(found.reasons) == summary_module.MAX_REASONS + 1
    assert found.reasons[summary_module.OTHER_REASONS] == 80 - summary_module.MAX_REASONS


def spoil_manifest(layout):
    layout.manifest.write_bytes(with_checksum({"kind": "prediction", "format": 1}))


def cut_a_line(layout):
    layout.contigs.write_text(layout.contigs.read_text() + "k141_9\t500\n")


def spoil_a_number(layout):
    layout.contigs.write_text(layout.contigs.read_text().replace("\t2000\t", "\t2,000\t", 1))


def forget_the_header(layout):
    layout.contigs.write_text("".join(layout.contigs.read_text().splitlines(keepends=True)[1:]))


def name_an_unknown_contig(layout):
    layout.viral_regions.write_text(layout.viral_regions.read_text() + "nobody\t0\t1500\tnobody_region_1\t900\t.\n")


def spoil_a_region(layout):
    layout.viral_regions.write_text(layout.viral_regions.read_text() + "nobody\t0\tx\tnobody_region_1\t900\t.\n")


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (spoil_manifest, "manifest"),
        (lambda layout: layout.manifest.write_text("{"), "manifest"),
        (lambda layout: layout.manifest.unlink(), "manifest"),
        (lambda layout: layout.contigs.unlink(), "contigs"),
        (lambda layout: layout.contigs.write_bytes(b"contig\xff\n"), "contigs"),
        (cut_a_line, "contigs"),
        (spoil_a_number, "contigs"),
        (forget_the_header, "contigs"),
        (name_an_unknown_contig, "viral_regions"),
        (spoil_a_region, "viral_regions"),
        (lambda layout: layout.viral_regions.unlink(), "viral_regions"),
        (lambda layout: layout.tracks.unlink(), "tracks"),
        (lambda layout: layout.tracks.write_text("track type=bedGraph\n"), "tracks"),
    ],
)
def test_a_file_that_is_missing_or_damaged_is_named(tmp_path, spoil, name):
    layout = make_prediction(tmp_path).layout
    spoil(layout)
    with pytest.raises(ResultError) as caught:
        summarise(layout)
    assert caught.value.path == str(getattr(layout, name))
