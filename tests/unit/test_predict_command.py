"""``virnucpro predict`` as a user types it: a whole run, mistakes, and what each ends with."""

from __future__ import annotations

import json
import re

import pysam
import pytest

from tests.command_line import run
from tests.strategies import open_frame, write_fasta
from virnucpro import predict_fasta
from virnucpro.data.reading.read_formats import BAM_END
from virnucpro.models.classifier_files.card import classifiers_table
from virnucpro.pipeline.prediction import settings
from virnucpro.store.contig_table import read_contig_calls

GIVEN_DEFAULTS = (
    *("--threshold", "0.5", "--classifier", "virnucpro-tiny", "--cascade", "auto", "--min-length", "0"),
    *("--dna-model", "virnucpro-tiny-dna", "--protein-model", "virnucpro-tiny-protein", "--chunk", "500"),
    *(
        "--gaps",
        "error",
        "--on-bad-record",
        "error",
        "--format",
        "tsv",
        "--keep",
        "auto",
        "--genes",
        "viral",
        "--precision",
        "auto",
    ),
)


@pytest.fixture
def contigs(tmp_path):
    return write_fasta(tmp_path / "my contigs.fa", [("a", open_frame(200)), ("none", "CTAACTAACTAGTTAGTTAG")])


def test_a_run_says_how_many_are_viral_and_names_table_and_report(tmp_path, contigs):
    out = tmp_path / "out put"
    done = run("predict", contigs, "-o", out, "--devices", "cpu", "--cascade", "off", "--keep-chunks")
    assert done.code == 0, done.err
    assert done.out.startswith("2 contigs: ")
    assert f"calls:  {out / 'contigs.tsv'}" in done.out
    assert f"report: {out / 'report.html'}" in done.out
    (card,) = classifiers_table()
    assert card.worth in done.out
    assert "virnucpro-tiny" in card.worth
    assert (out / "my contigs_chunked500.fa").read_text().startswith(">a_chunk_1\nATGGCC")
    calls = {call.contig: call for call in read_contig_calls(out / "contigs.tsv")}
    assert (calls["none"].frames, calls["a"].frames > 0) == (0, True)
    assert 0 < calls["none"].score < 1
    again = run("predict", contigs, "-o", out, "--devices", "cpu", "--cascade", "off", "--keep-chunks", "--json")
    assert again.code == 0
    assert json.loads(again.out)["counts"]["contigs"] == 2
    changed = run("predict", contigs, "-o", out, "--devices", "cpu", "--cascade", "off", "--threshold", "0.9")
    assert "threshold is now 0.9; the earlier run in this folder used 0.5" in changed.err
    stages = r"\n  contigs [\d.]+ s, report [\d.]+ s\n  done before: composition .* fragments .* dna .* s\n"
    assert re.search(stages, changed.out)
    predict_fasta(contigs, out, devices="cpu", cascade="off")
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["output_settings"] == {
        "threshold": 0.9,
        "prior": "auto",
        "fdr": None,
        "formats": ["tsv"],
        "keep": "auto",
        "keep_chunks": True,
        "genes": "viral",
        "only_viral": False,
    }
    of_stages = sum(stage["seconds"] for stage in manifest["stages"].values())
    assert json.loads(run("status", out, "--json").out)["seconds"] == pytest.approx(of_stages)
    verified = run("verify", out)
    assert (verified.code, "2 of 2 contigs" in verified.out) == (0, True)


@pytest.mark.parametrize(("common", "prior"), [((), ("--prior", "auto")), (("--prior", ".9"), ())])
def test_defaults_that_are_given_change_no_byte_of_a_result(tmp_path, examples_dir, common, prior):
    contigs = examples_dir / "contigs.fasta"
    found = []
    for name, given in (("none", ()), ("given", (*GIVEN_DEFAULTS, *prior))):
        out = tmp_path / name / "out"  # its name is in the table for MultiQC
        done = run("predict", contigs, "-o", out, *common, *given)
        assert done.code == 0, done.err
        manifest = json.loads((out / "run.json").read_text())
        of_start = {"run.json", "report.html", "metrics.prom", ".run.lock"}  # with times and ids of the start
        files = {one.name: one.read_bytes() for one in out.iterdir() if one.is_file() and one.name not in of_start}
        found.append(files | {one: manifest[one] for one in ("settings", "output_settings", "sample", "notes")})
    assert found[0] == found[1]
    assert len(found[0]["viral_regions.bed"].splitlines()) > 1


def test_a_false_discovery_rate_of_too_few_contigs_is_refused_before_anything_is_computed(tmp_path, contigs):
    out = tmp_path / "out"
    refused = run("predict", contigs, "-o", out, "--fdr", "0.05")
    assert (refused.code, refused.out) == (2, "")
    assert "2 are too few to estimate it from (it takes 200), so give it, as in --prior 0.05" in refused.err
    assert not (out / "run.json").exists()
    assert not (out / "work/composition_scores.f32").exists()
    given = run("predict", contigs, "-o", out, "--fdr", "0.05", "--prior", "0.5")
    assert given.code == 0, given.err
    kept = run("predict", contigs, "-o", out, "--prior", "auto", "--min-length", "0")
    assert kept.code == 0, kept.err  # the rate of the folder, not of this start


def test_a_false_discovery_rate_that_turns_out_to_have_no_effect_is_the_first_note(tmp_path):
    fasta = write_fasta(
        tmp_path / "in.fa", [("a", open_frame(200)), *((f"n{number}", "N" * 30) for number in range(200))]
    )
    done = run("predict", fasta, "-o", tmp_path / "out", "--fdr", "0.05", "-q")
    assert (done.code, done.out) == (0, ""), done.err
    assert "too few contigs (1; 200 needed)" in done.err
    first = json.loads((tmp_path / "out/run.json").read_text())["notes"][0]
    assert first.startswith("warning: the false discovery rate of 0.05 has no effect, calls are by score: too few")
    assert run("predict", fasta, "-o", tmp_path / "out").out.splitlines()[2] == f"  {first}"


def as_rna(text):
    """Every T as U, apart from those of every third line, in which case the letters have; headers as they are."""
    lines = text.splitlines(keepends=True)
    as_u = str.maketrans("Tt", "Uu")
    return "".join(
        line if line.startswith(">") or number % 3 == 0 else line.translate(as_u) for number, line in enumerate(lines)
    )


@pytest.mark.parametrize("cascade", ["auto", pytest.param("off", marks=[pytest.mark.slow, pytest.mark.long])])
def test_rna_that_is_asked_for_gives_what_its_dna_gives_and_is_recorded(tmp_path, examples_dir, cascade):
    records = (examples_dir / "contigs.fasta").read_text().split(">")[1:4]
    text = "".join(f">{record}" for record in records)
    header, _, body = text.partition("\n")
    text = f"{header}\n{body[:400].lower()}{body[400:]}"
    found = []
    for folder, letters, options in (("dna", text, ()), ("rna", as_rna(text), ("--rna",))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "in.fa").write_text(letters)
        command = ("predict", tmp_path / folder / "in.fa", "-o", tmp_path / folder / "out", "--cascade", cascade)
        kept = ("--keep-chunks",) if cascade == "off" else ()
        done = run(*command, *kept, *options)
        assert done.code == 0, done.err
        names = ("contigs.tsv", "viral.fasta", "tracks.bedgraph", "genes.faa", *["in_chunked500.fa"] * len(kept))
        found.append({name: (tmp_path / folder / "out" / name).read_bytes() for name in names})
    assert found[0] == found[1]
    settings_of_runs = [json.loads((tmp_path / one / "out/run.json").read_text())["settings"] for one in ("dna", "rna")]
    assert settings_of_runs[1] == settings_of_runs[0] | {"rna": True}
    assert run("verify", tmp_path / "rna/out").code == 0
    changed = run(*command)
    assert (changed.code, "rna was True, now not set" in changed.err) == (78, True), changed.err
    refused = run("predict", tmp_path / "rna/in.fa", "-o", tmp_path / "other")
    assert refused.code == 65
    assert "stands for no nucleotide of DNA" in refused.err
    assert "write T for U, or use --rna" in refused.err


def test_regions_do_not_depend_on_the_threshold_of_calls(tmp_path, examples_dir):
    regions = []
    for options in ((), ("--threshold", "0.5"), ("--threshold", "0.8")):
        assert run("predict", examples_dir / "contigs.fasta", "-o", tmp_path / "out", *options).code == 0
        regions.append((tmp_path / "out" / "viral_regions.bed").read_bytes())
    assert regions[0] == regions[1] == regions[2]
    assert len(regions[0].splitlines()) > 1


def test_without_evidence_a_contig_is_called_only_where_the_share_of_viruses_is_known(tmp_path, examples_dir):
    reason, found = "ambiguous composition, and no known protein is similar", {}
    for name, prior in (("unknown", "auto"), ("known", "0.5")):
        assert run("predict", examples_dir / "contigs.fasta", "-o", tmp_path / name, "--prior", prior).code == 0
        calls = read_contig_calls(tmp_path / name / "contigs.tsv")
        found[name] = {(call.call, call.reason) for call in calls if call.evidence == "none"}
    assert found["unknown"] == {("undecided", reason)}
    assert {call for call, _ in found["known"]} == {"virus", "not virus"}


def test_by_default_nothing_is_embedded_and_the_scores_are_the_same(tmp_path, contigs):
    done = run("predict", contigs, "-o", tmp_path / "out", "--devices", "cpu")
    assert done.code == 0, done.err
    written = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"contigs.tsv", "report.html", "viral.fasta"} <= written
    assert not written & {"dna", "protein", "prediction_results.txt", "prediction_results_highestscore.csv"}
    assert run("predict", contigs, "-o", tmp_path / "off", "--devices", "cpu", "--cascade", "off").code == 0
    sure = run("predict", contigs, "-o", tmp_path / "between", "--devices", "cpu", "--cascade", "0.0,0.001")
    assert "0 of 2 contigs were embedded (composition score 0 to 0.001); tables of frames hold only these" in sure.out
    default, off, between = (
        list(read_contig_calls(tmp_path / name / "contigs.tsv")) for name in ("out", "off", "between")
    )
    assert [(one.contig, one.score, one.call) for one in default] == [(one.contig, one.score, one.call) for one in off]
    assert [one.embedded for one in default + off + between] == [False, False, True, True, False, False]
    assert {(one.frames, one.open_chunks, one.max_score) for one in default + between} == {(None, None, None)}
    assert (tmp_path / "between" / "prediction_results.txt").read_text().count("\n") == 1
    for name in ("out", "off", "between"):
        verified = run("verify", tmp_path / name)
        assert (verified.code, "open frames" in verified.out) == (0, name != "out")
    other = run("predict", contigs, "-o", tmp_path / "out", "--devices", "cpu", "--cascade", "off")
    assert (other.code, "cascade was 'no contig is embedded', now 'off'. Use" in other.err) == (78, True), other.err


def test_inputs_of_one_name_are_read_where_no_file_is_named_after_them_and_their_oddities_are_noted(tmp_path):
    first, second = (tmp_path / folder / "final.contigs.fa" for folder in ("one", "two"))
    for path in (first, second):
        path.parent.mkdir()
    write_fasta(first, [("#1", open_frame(4000))])
    with pysam.BGZFile(str(second), "wb") as file:
        file.write(b">b\n" + open_frame(200, 1).encode() + b"\n")
    second.write_bytes(second.read_bytes().removesuffix(BAM_END))
    done = run("predict", first, second, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    assert [call.contig for call in read_contig_calls(tmp_path / "out" / "contigs.tsv")] == ["#1", "b"]
    notes = json.loads((tmp_path / "out" / "run.json").read_text())["notes"]
    for noted in ("1 bgzip file has no end-of-file block", "whose id begins like a control line of tracks"):
        assert any(noted in note for note in notes)
        assert noted in done.out
    assert "\n%231\t0\t" in (tmp_path / "out" / "tracks.bedgraph").read_text()
    assert run("verify", tmp_path / "out").code == 0
    refused = run("predict", first, second, "-o", tmp_path / "off", "--cascade", "off", "--devices", "cpu")
    assert (refused.code, "rename one" in refused.err) == (78, True)


@pytest.mark.slow
@pytest.mark.long
def test_what_was_not_wanted_is_not_kept_and_nothing_is_computed_for_it_again(tmp_path, contigs):
    out = tmp_path / "out"
    command = ("predict", contigs, "-o", out, "--devices", "cpu", "--cascade", "off")
    assert run(*command).code == 0
    everything = {path.name for path in out.iterdir()}
    tables = {name: (out / name).read_bytes() for name in everything if name.endswith((".tsv", ".txt", ".csv", ".bed"))}
    less = run(*command, "--keep", "tables")
    assert (less.code, "report:" in less.out, "keep is now tables" in less.err) == (0, False, True), less.err
    left = {path.name for path in out.iterdir()}
    frames = {"my contigs_identified_nucleotide.fa", "my contigs_identified_protein.faa"}
    assert everything - left == {"report.html", "dna", "protein", *frames}
    assert {name: (out / name).read_bytes() for name in tables} == tables
    assert run("verify", out).code == 0
    assert run("status", out).code == 0
    again = run(*command)
    assert (again.code, "already complete" in again.out) == (0, True), again.err
    changed = run(*command, "--threshold", "0.9", "--keep", "all", "--json")
    assert (changed.code, json.loads(changed.out)["computed"]) == (0, ["contigs", "report"]), changed.err
    assert (out / "report.html").exists()
    assert not (out / "dna").exists()
    assert run("verify", out).code == 0


def test_of_a_large_input_frames_and_embeddings_are_not_kept(tmp_path, contigs, monkeypatch):
    monkeypatch.setattr(settings, "LARGE_INPUT_NT", 500)
    predict_fasta(contigs, tmp_path / "out", devices="cpu", cascade="off")
    assert not {"dna", "protein"} & {path.name for path in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "report.html").exists()
    assert not list((tmp_path / "out").glob("*identified*"))


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--chunk", "400"], 78, "400 nt"),
        (["--classifier", "nonsense"], 78, "nonsense"),
        (["--dna-model", "virnucpro-tiny-protein"], 78, "virnucpro-tiny-protein"),
        (["--threshold", "1.5"], 2, "--threshold"),
        (["--threshold", "0"], 2, "above 0 and below 1"),
        (["--threshold", "0.9", "--fdr", "0.05"], 2, "exclude each other: give one of them"),
        (["--prior", "off", "--fdr", "0.05"], 2, "needs the prior"),
        (["--prior", "0.0"], 2, "such as 0.05"),
        (["--prior", "1.5"], 2, "such as 0.05"),
        (["--format", "xlsx"], 2, "xlsx"),
        (["--cascade", "0.98,0.02"], 2, "the lower score comes first"),
        (["--cascade", "0.02"], 2, "such as 0.02,0.98"),
        (["--cascade", "0.5,1.2"], 2, "such as 0.02,0.98"),
        (["--keep-chunks"], 78, "give --cascade off"),
        (["--dna-model", "./other.pt"], 78, "give --cascade off"),
        (["--min-length", "-3"], 2, "--min-length"),
        (["--clasifier", "x"], 2, "--clasifier"),
        (["--output", ""], 2, "the name of the folder is empty"),
        (["--protein-model", "esm2_t6_8M_UR50D"], 78, "was trained with"),
    ],
)
def test_a_mistake_is_told_in_a_sentence_and_leaves_no_folder(tmp_path, contigs, options, code, said):
    done = run("predict", contigs, "-o", tmp_path / "out", "--devices", "cpu", *options)
    assert done.code == code, done.err
    assert said in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()


def test_input_that_cannot_be_used_ends_with_65(tmp_path, contigs):
    absent = run("predict", tmp_path / "absent.fa", "-o", tmp_path / "out", "--devices", "cpu")
    assert (absent.code, "No such file" in absent.err) == (65, True)
    (tmp_path / "empty.fa").write_text("")
    empty = run("predict", tmp_path / "empty.fa", "-o", tmp_path / "out", "--devices", "cpu")
    assert empty.code == 65
    (tmp_path / "cut.fastq").write_text("@a\nACGT\n+\nII")
    cut = run("predict", tmp_path / "cut.fastq", "-o", tmp_path / "out", "--devices", "cpu")
    assert cut.code == 65
    assert not (tmp_path / "out").exists()
