"""A prediction with real worker processes: what it writes, what it refuses, and that it goes on where it was."""

from __future__ import annotations

import gzip
import json
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes import HASH_WIDTH, faulty_config, random_mlp, write_classifier
from tests.predictions import TABLES, hash_prediction, make_contigs, predict, predict_forked, tables
from tests.settings import prediction_config
from tests.strategies import write_fasta
from virnucpro.choices import DEFAULT_CLASSIFIER, BadRecordPolicy, SequenceKind, TableFormat, WrittenGenes
from virnucpro.commands.predict import print_summary
from virnucpro.commands.status import status
from virnucpro.config import InputRules
from virnucpro.errors import (
    BadInputError,
    ConfigurationError,
    ExitCode,
    OutputError,
    ResultError,
    SettingsChangedError,
    StoppedError,
    WeightsError,
)
from virnucpro.models.registry import BUNDLED_WEIGHTS_DIR
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.report.prediction.artifacts import report_markdown
from virnucpro.run_layout import PredictionLayout
from virnucpro.store.contig_table import Call, read_contig_calls
from virnucpro.store.manifest import PredictionManifest


def run(inputs, out, config, **arguments):
    """Run to a good end in a forked process; return the counts."""
    ended = predict_forked(inputs, out, config, **arguments)
    assert ended.code == 0, ended.errors
    manifest = json.loads((out / "run.json").read_text())
    assert manifest["state"] == "complete"
    return manifest["counts"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its folder, its input, its settings, its contigs and what it came to."""
    folder = tmp_path_factory.mktemp("finished")
    contigs = make_contigs(folder / "in.fa")
    config = hash_prediction(folder)
    result = predict([folder / "in.fa"], folder / "out", config, workers=2)
    return folder, contigs, config, result


def test_every_contig_has_its_line_and_every_kept_frame_its_score(finished):
    folder, contigs, _, result = finished
    out = folder / "out"
    calls = list(read_contig_calls(out / "contigs.tsv"))
    assert [call.contig for call in calls] == list(contigs)
    assert [call.length for call in calls] == [len(sequence) for sequence in contigs.values()]
    frames = [line[1:] for line in (out / "in_identified_protein.faa").read_text().splitlines()[::2]]
    rows = [line.split("\t") for line in (out / "prediction_results.txt").read_text().splitlines()]
    assert rows[0] == ["Sequence_ID", "Prediction", "score1", "score2"]
    assert [row[0] for row in rows[1:]] == frames
    assert len(frames) == sum(call.frames for call in calls) == result.counts["scored_frames"] > 20
    assert result.state == "complete"
    assert verify_run(out).problems == []


def test_the_scores_are_those_of_an_independent_module_on_rows_joined_by_id(finished):
    torch = pytest.importorskip("torch")
    folder, _, config, _ = finished
    out = folder / "out"
    features = {}
    for name in ("dna", "protein"):
        with h5py.File(out / name / "embeddings.h5") as file:
            ids = [one.decode() for one in file["sequence_ids"][()]]
            features[name] = dict(zip(ids, file["embeddings"][()], strict=True))
    rows = [line.split("\t") for line in (out / "prediction_results.txt").read_text().splitlines()[1:]]
    joined = np.stack([np.concatenate([features["dna"][row[0]], features["protein"][row[0]]]) for row in rows])
    tensors = load_file(config.classifier_dir / "model.safetensors")
    hidden = joined @ tensors["hidden_layer.weight"].numpy().T + tensors["hidden_layer.bias"].numpy()
    spread = np.sqrt(tensors["bn1.running_var"].numpy() + 1e-5)
    hidden = (hidden - tensors["bn1.running_mean"].numpy()) / spread
    hidden = np.maximum(hidden * tensors["bn1.weight"].numpy() + tensors["bn1.bias"].numpy(), 0)
    logits = hidden @ tensors["output_layer.weight"].numpy().T + tensors["output_layer.bias"].numpy()
    expected = torch.softmax(torch.from_numpy(logits), dim=1).numpy()
    found = np.array([[float(row[2]), float(row[3])] for row in rows])
    assert np.abs(found - expected).max() < 1e-5
    assert [row[1] for row in rows] == ["virus" if virus > other else "others" for other, virus in found]


def test_the_table_of_chunks_is_what_pandas_made_of_the_other_one(finished):
    folder, _, _, _ = finished
    rows = [line.split("\t") for line in (folder / "out/prediction_results.txt").read_text().splitlines()[1:]]
    chunks = {}
    for name, _, other, virus in rows:
        highest = chunks.setdefault(name[:-2], [0.0, 0.0])
        chunks[name[:-2]] = [max(highest[0], float(other)), max(highest[1], float(virus))]
    expected = [f"{name}\t{highest[1] >= highest[0]}" for name, highest in sorted(chunks.items())]
    found = (folder / "out/prediction_results_highestscore.csv").read_text().splitlines()
    assert found == ["Modified_ID\tIs_Virus", *expected]
    assert {line.rpartition("\t")[2] for line in expected} == {"True", "False"}


def test_the_viral_contigs_are_in_the_fasta_and_nothing_else(finished):
    folder, contigs, _, result = finished
    text = (folder / "out/viral.fasta").read_text()
    records = {entry.split("\n")[0]: "".join(entry.split("\n")[1:]) for entry in text.split(">")[1:]}
    called = [call for call in read_contig_calls(folder / "out/contigs.tsv") if call.call is Call.VIRUS]
    assert records == {call.contig: contigs[call.contig] for call in called}
    assert 0 < len(called) == result.counts["virus"] < len(contigs)


def test_headers_are_kept_byte_for_byte(tmp_path):
    contigs = make_contigs(tmp_path / "plain.fa")
    comments = (b" flag=1 multi=2.0000 len=300", b"\tcaf\xe9  >x ", b"", b" ")
    headers = {name: b">%s%s" % (name.encode(), comments[n // 2 % 4]) for n, name in enumerate(contigs)}
    ends = {name: b"\r\n" if n % 3 else b"\n" for n, name in enumerate(contigs)}
    records = [headers[name] + ends[name] + letters.encode() + ends[name] for name, letters in contigs.items()]
    (tmp_path / "in.fa").write_bytes(b"".join(records))
    run([tmp_path / "in.fa"], tmp_path / "out", hash_prediction(tmp_path))
    viral = [one.contig for one in read_contig_calls(tmp_path / "out/contigs.tsv") if one.call is Call.VIRUS]
    lines = (tmp_path / "out/viral.fasta").read_bytes().split(b"\n")
    assert [line for line in lines if line.startswith(b">")] == [headers[name] for name in viral]
    assert len({headers[name].removeprefix(b">" + name.encode()) for name in viral}) > 2


def genes_of(out):
    """Return the contigs that have a region in the GFF3, and the number of genes in either file."""
    text, proteins = ((out / name).read_text() for name in ("genes.gff3", "genes.faa"))
    lines = text.splitlines()
    regions = [line.split()[1] for line in lines if line.startswith("##sequence-region")]
    return regions, sum("\tCDS\t" in line for line in lines), proteins.count(">")


def test_genes_are_of_the_viral_contigs_of_all_or_of_none_and_the_folder_keeps_which(finished, tmp_path):
    folder, contigs, config, result = finished
    viral = [call.contig for call in read_contig_calls(folder / "out/contigs.tsv") if call.call is Call.VIRUS]
    regions, *counts = genes_of(folder / "out")
    assert (regions, counts) == (viral, [result.counts["genes"]] * 2)
    out, inputs = tmp_path / "out", [folder / "in.fa"]
    of_all = replace(config, genes=WrittenGenes.ALL)
    assert run(inputs, out, of_all)["genes"] > result.counts["genes"] > 0
    assert genes_of(out)[0] == list(contigs)
    assert verify_run(out).problems == []
    kept = predict(inputs, out, replace(config, not_given=frozenset({"genes"})))
    assert kept.was_complete
    parts = PredictionLayout(out).contig_parts
    parts.mkdir()
    (parts / "0123456789abcdef.genes.0-3").touch()  # of a start that was killed
    without = predict(inputs, out, replace(config, genes=WrittenGenes.NONE))
    assert not parts.exists()
    assert without.computed == ("contigs", "report")
    assert not (out / "genes.gff3").exists()
    assert not (out / "genes.faa").exists()
    assert "genes" not in without.counts
    assert verify_run(out).problems == []
    run(inputs, out, config)
    assert tables(out) == tables(folder / "out")


@pytest.mark.parametrize("name", ["genes.gff3", "genes.faa"])
def test_verify_finds_genes_that_were_changed_or_lost(finished, tmp_path, name):
    folder, _, _, _ = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    with (tmp_path / "out" / name).open("ab") as file:
        file.write(b">a\nM\n")
    assert [name in problem for problem in verify_run(tmp_path / "out").problems] == [True]
    (tmp_path / "out" / name).unlink()
    assert ["is missing" in problem for problem in verify_run(tmp_path / "out").problems] == [True]


def test_tables_of_viral_contigs_alone_hold_their_lines_and_the_next_start_writes_them_whole(finished, tmp_path):
    folder, contigs, config, result = finished
    out, inputs = tmp_path / "out", [folder / "in.fa"]
    only = replace(config, only_viral=True, formats=(TableFormat.TSV, TableFormat.JSON))
    counts = run(inputs, out, only)
    assert counts == result.counts
    whole = (folder / "out/contigs.tsv").read_text().splitlines()
    viral = [line for line in whole if "\tvirus\t" in line]
    assert (out / "contigs.tsv").read_text().splitlines() == [whole[0], *viral]
    assert {one["call"] for one in json.loads((out / "contigs.json").read_text())} == {"virus"}
    tracks = (folder / "out/tracks.bedgraph").read_text()
    long_is_viral = any(line.startswith("long\t") for line in viral)
    assert (out / "tracks.bedgraph").read_text() == (tracks if long_is_viral else tracks.splitlines(keepends=True)[0])
    assert (out / "viral.fasta").read_bytes() == (folder / "out/viral.fasta").read_bytes()
    assert verify_run(out).problems == []
    text = report_markdown(PredictionLayout(out))
    assert f"{counts['virus']} of {len(contigs)} contigs" in text
    again = predict(inputs, out, config)
    assert again.computed == ("contigs", "report")
    assert tables(out) == tables(folder / "out")


def test_one_or_two_workers_and_a_second_start_give_the_same_tables(finished, tmp_path):
    folder, _, config, _ = finished
    expected = tables(folder / "out")
    run([folder / "in.fa"], tmp_path / "one", config, workers=1)
    assert tables(tmp_path / "one") == expected
    assert predict([folder / "in.fa"], tmp_path / "one", config, workers=2).was_complete
    assert tables(tmp_path / "one") == expected


def test_another_threshold_or_format_makes_only_the_table_again_and_stays(finished, tmp_path, capfd):
    folder, _, config, _ = finished
    out = tmp_path / "out"
    run([folder / "in.fa"], out, config)
    (out / "dna/embeddings.h5").rename(tmp_path / "moved away")
    changed = hash_prediction(folder, threshold=0.9, formats=(TableFormat.JSON, TableFormat.PARQUET, TableFormat.TSV))
    counts = run([folder / "in.fa"], out, changed)
    assert not (out / "dna/embeddings.h5").exists()
    calls = list(read_contig_calls(out / "contigs.tsv"))
    assert counts["undecided"] == sum(call.call is Call.UNDECIDED for call in calls) > 0
    as_json = json.loads((out / "contigs.json").read_text())
    assert [(row["contig"], row["score"], row["call"]) for row in as_json] == [
        (call.contig, call.score, call.call) for call in calls
    ]
    kept = hash_prediction(folder, not_given=frozenset({"threshold", "formats", "keep_chunks"}))
    assert predict([folder / "in.fa"], out, kept).was_complete
    assert "threshold 0.9: kept from the earlier run in this folder" in capfd.readouterr().err
    parquet = pytest.importorskip("pyarrow.parquet")
    assert parquet.read_table(out / "contigs.parquet").to_pylist() == as_json
    run([folder / "in.fa"], out, config)
    assert not (out / "contigs.json").exists()  # it would be of the other threshold
    assert tables(out) == tables(folder / "out")


def test_what_decides_scores_may_not_change(finished, tmp_path):
    folder, _, config, _ = finished
    with pytest.raises(SettingsChangedError, match="minimal length was 0, now 300"):
        predict([folder / "in.fa"], folder / "out", hash_prediction(folder, min_nt=300))
    other = tmp_path / "in.fa"
    make_contigs(other, seed=6)
    with pytest.raises(SettingsChangedError, match="input"):
        predict([other], folder / "out", config)
    with pytest.raises(SettingsChangedError, match="classifier sha256"):
        predict([folder / "in.fa"], folder / "out", hash_prediction(tmp_path, seed=8))


def test_damaged_tables_are_made_again(finished, tmp_path):
    folder, _, config, _ = finished
    out = tmp_path / "out"
    run([folder / "in.fa"], out, config)
    expected = tables(out)
    for name in [*TABLES, "in_identified_nucleotide.fa", "report.html"]:
        data = bytearray((out / name).read_bytes())
        data[len(data) // 2] ^= 1
        (out / name).write_bytes(data)
        assert any(name in problem for problem in verify_run(out).problems)
        run([folder / "in.fa"], out, config)
        assert tables(out) == expected
        assert verify_run(out).problems == []


def test_a_frame_that_cannot_be_embedded_is_listed_and_its_contig_still_called(tmp_path):
    contigs = make_contigs(tmp_path / "in.fa", count=3)
    healthy = faulty_config(tmp_path / "control.json", {"times": 0, "before_batch": -1}, allow_empty=True)
    run([tmp_path / "in.fa"], tmp_path / "good", hash_prediction(tmp_path, protein=healthy))
    records = (tmp_path / "good/in_identified_protein.faa").read_text().split(">")[1:]
    name, protein = records[5].split()
    poisoned = faulty_config(tmp_path / "control.json", {"poison": {protein: "error"}, "times": 0}, allow_empty=True)
    config = hash_prediction(tmp_path, protein=poisoned)
    out = tmp_path / "out"
    ended = predict_forked([tmp_path / "in.fa"], out, config)
    assert ended.code == ExitCode.PARTIAL, ended.errors
    manifest = json.loads((out / "run.json").read_text())
    assert (manifest["state"], manifest["counts"]["missing_frames"]) == ("partial", 1)
    listed = (out / "failed_sequences.tsv").read_text().splitlines()
    assert len(listed) == 2
    assert listed[1].startswith(f"{name}\tprotein: ")
    scored = [line.split("\t")[0] for line in (out / "prediction_results.txt").read_text().splitlines()[1:]]
    assert scored == [record.split()[0] for record in records if record.split()[0] != name]
    assert [call.contig for call in read_contig_calls(out / "contigs.tsv")] == list(contigs)
    assert verify_run(out).problems == []
    (tmp_path / "control.json").write_text(json.dumps({"times": 0, "before_batch": -1}))  # mended
    run([tmp_path / "in.fa"], out, config)
    assert tables(out) == tables(tmp_path / "good")
    assert not (out / "failed_sequences.tsv").exists()


def test_a_score_that_is_not_finite_ends_the_run_and_names_the_frame(tmp_path):
    config, contigs = hash_prediction(tmp_path), make_contigs(tmp_path / "in.fa", count=2)
    module = random_mlp(2 * HASH_WIDTH)
    torch.nn.init.constant_(module.hidden_layer.weight, 3e38)
    card = write_classifier(
        tmp_path / "overflowing", module, dna_model=config.card.dna_model, protein_model=config.card.protein_model
    )
    config = replace(config, card=card, classifier_dir=tmp_path / "overflowing")
    ended = predict_forked([tmp_path / "in.fa"], tmp_path / "out", config)
    assert ended.code == ExitCode.CONFIGURATION
    assert re.search(rf"weights of .*: they give ({'|'.join(contigs)})_chunk_1[FR]\d P\(virus\) nan", ended.errors)
    assert json.loads((tmp_path / "out/run.json").read_text())["state"] == "failed"
    assert not (tmp_path / "out/contigs.tsv").exists()


def test_an_input_without_any_open_frame_gives_empty_tables_with_headers(tmp_path):
    write_fasta(tmp_path / "in.fa", [("n", "N" * 40), ("one", "A"), ("stops", "CTAACTAACTAGTTAGTTAG" * 4)])
    run([tmp_path / "in.fa"], tmp_path / "out", hash_prediction(tmp_path))
    assert (tmp_path / "out/prediction_results.txt").read_text() == "Sequence_ID\tPrediction\tscore1\tscore2\n"
    assert (tmp_path / "out/prediction_results_highestscore.csv").read_text() == "Modified_ID\tIs_Virus\n"
    calls = list(read_contig_calls(tmp_path / "out/contigs.tsv"))
    assert {call.contig: call.call for call in calls} == dict.fromkeys(["n", "one", "stops"], Call.NO_OPEN_FRAME)
    assert all(call.reason and call.score is None for call in calls)


@pytest.mark.data
def test_the_golden_empty_case_and_the_golden_frames(tmp_path, data_dir):
    config = hash_prediction(tmp_path)
    counts = run([data_dir / "golden/test_sequences_small.fa"], tmp_path / "small", config)
    calls = list(read_contig_calls(tmp_path / "small/contigs.tsv"))
    assert [call.call for call in calls] == [Call.NO_OPEN_FRAME] * counts["contigs"]
    assert len(calls) == (data_dir / "golden/test_sequences_small.fa").read_text().count(">") == 11
    assert (tmp_path / "small/prediction_results.txt").read_text().count("\n") == 1
    counts = run([data_dir / "golden/test_with_orfs.fa"], tmp_path / "orfs", config)
    recorded = (data_dir / "golden/reference_vanilla_output_prediction_results.txt").read_text().splitlines()
    found = (tmp_path / "orfs/prediction_results.txt").read_text().splitlines()
    assert [line.split("\t")[0] for line in found] == [line.split("\t")[0] for line in recorded]
    for name in ("identified_nucleotide.fa", "identified_protein.faa"):
        golden = (data_dir / f"golden/test_with_orfs_{name}").read_bytes()
        assert (tmp_path / f"orfs/test_with_orfs_{name}").read_bytes() == golden


def test_short_contigs_and_bad_records_are_listed_with_their_reason(tmp_path):
    text = ">short\nACGT\n>bad\nAC!T\n>good\n" + "ATGGCC" * 100 + "\n"
    (tmp_path / "in.fa").write_text(text)
    rules = InputRules(sequence_kind=SequenceKind.DNA, on_bad_record=BadRecordPolicy.SKIP)
    counts = run([tmp_path / "in.fa"], tmp_path / "out", hash_prediction(tmp_path, rules=rules, min_nt=100))
    short, good, bad = read_contig_calls(tmp_path / "out/contigs.tsv")
    assert (short.contig, short.call, short.reason) == (
        "short",
        Call.TOO_SHORT,
        "shorter than the minimal length of 100 nt",
    )
    assert (good.contig, good.reason) == ("good", "")
    assert (bad.contig, bad.call, bad.length) == ("bad", Call.UNDECIDED, None)
    assert "in.fa:4" in bad.reason
    assert counts["skipped"] == counts["too_short"] == counts["short_contigs"] == 1
    assert counts["undecided"] == 0
    assert "in.fa:4" in (tmp_path / "out/failed_sequences.tsv").read_text()


def test_reads_that_are_too_short_are_counted_apart_and_called_reads(tmp_path, capsys):
    reads = [("short", "ACGT"), ("brief", "ACGTA"), ("good", "ATGGCC" * 100)]
    text = "".join(f"@{name}\n{bases}\n+\n{'I' * len(bases)}\n" for name, bases in reads)
    (tmp_path / "reads.fq.gz").write_bytes(gzip.compress(text.encode()))
    out = tmp_path / "out"
    result = predict(
        [tmp_path / "reads.fq.gz"], out, hash_prediction(tmp_path, min_nt=100, formats=(TableFormat.JSON,))
    )
    assert result.counts["too_short"] == 2
    assert result.counts["undecided"] + result.counts["virus"] + result.counts["not_virus"] == 1
    assert [row["call"] for row in json.loads((out / "contigs.json").read_text())][:2] == ["too short"] * 2
    print_summary(result)
    status(out)
    verified = verify_run(out)
    assert (verified.problems, verified.what.partition(",")[0]) == ([], "reads")
    summary, status_line = re.findall(r"^ *3 reads.*", capsys.readouterr().out, re.MULTILINE)
    assert summary.endswith(", 2 too short")
    assert ", 2 too short, " in status_line
    layout = PredictionLayout(out)
    markdown = report_markdown(layout)
    assert "| Call | Reads | Share |" in markdown
    assert "| too short | 2 |" in markdown
    assert "2 are too short to be looked at" in layout.report.read_text()
    (tmp_path / "in.fa").write_text(">a\n" + "ATGGCC" * 100)
    run([tmp_path / "in.fa", tmp_path / "reads.fq.gz"], tmp_path / "both", hash_prediction(tmp_path))
    assert PredictionManifest.read(tmp_path / "both/run.json").sequences == "sequences"


def test_an_id_that_leaves_no_room_for_the_names_of_its_chunks_is_a_bad_record(tmp_path):
    fits, of_ten_chunks, too_long = "a" * 1014, "b" * 1014, "c" * 1024
    write_fasta(tmp_path / "in.fa", [(fits, "ATG" * 60), (of_ten_chunks, "ATG" * 1600), (too_long, "ATG" * 9)])
    config = hash_prediction(tmp_path)
    with pytest.raises(BadInputError, match=r"in.fa:3: id of more than 1013 bytes(.|\n)*in.fa:5: id of more than 1014"):
        predict([tmp_path / "in.fa"], tmp_path / "out", config)
    assert not (tmp_path / "out/run.json").exists()
    skipping = replace(config, rules=replace(config.rules, on_bad_record="skip"))
    counts = run([tmp_path / "in.fa"], tmp_path / "out", skipping)
    assert (counts["contigs"], counts["skipped"]) == (1, 2)


def test_two_inputs_keep_their_order_and_their_own_files(tmp_path):
    first, second = make_contigs(tmp_path / "b.fa", count=3), {"z": "ATGGCC" * 90}
    write_fasta(tmp_path / "a.fna", list(second.items()))
    run([tmp_path / "b.fa", tmp_path / "a.fna"], tmp_path / "out", hash_prediction(tmp_path, keep_chunks=True))
    calls = read_contig_calls(tmp_path / "out/contigs.tsv")
    assert [call.contig for call in calls] == [*first, *second]
    frames = (tmp_path / "out/a_identified_nucleotide.fa").read_text()
    assert frames.startswith(">z_chunk_1F1\n")
    assert (tmp_path / "out/a_chunked500.fa").read_text().startswith(">z_chunk_1\n")


def test_what_cannot_be_used_is_refused_before_anything_is_written(tmp_path):
    config = hash_prediction(tmp_path)
    (tmp_path / "x").mkdir()
    for name in ("x/in.fa", "in.fasta"):
        write_fasta(tmp_path / name, [("a", "ACGT")])
    with pytest.raises(ConfigurationError, match="rename one"):
        predict([tmp_path / "x/in.fa", tmp_path / "in.fasta"], tmp_path / "out", config)
    with pytest.raises(BadInputError, match="No such file"):
        predict([tmp_path / "absent.fa"], tmp_path / "out", config)
    assert not (tmp_path / "out").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "in_identified_protein.faa").write_text("of the original program")
    with pytest.raises(OutputError, match="that tells whose"):
        predict([tmp_path / "in.fasta"], mine, config)
    assert (mine / "in_identified_protein.faa").read_text() == "of the original program"


def test_a_classifiers_card_cannot_name_a_file_to_be_opened(tmp_path):
    secret = tmp_path / "secret.pt"
    secret.write_bytes(b"not for us")
    bundled = BUNDLED_WEIGHTS_DIR / DEFAULT_CLASSIFIER
    folder = Path(shutil.copytree(bundled, tmp_path / "classifier"))
    card = json.loads((bundled / "card.json").read_text())
    card["protein_model"] |= {"name": str(secret), "sha256": None}
    (folder / "card.json").write_text(json.dumps(card))
    with pytest.raises(WeightsError, match="names a model by a path"):
        prediction_config(classifier=folder)


def test_no_input_and_no_file_of_somebody_else_is_written_over(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    for name in ("in.fa", "in_chunked500.fa"):
        make_contigs(out / name, count=1, seed=len(name))
    before = (out / "in_chunked500.fa").read_bytes()
    config, chunky = hash_prediction(tmp_path), hash_prediction(tmp_path, keep_chunks=True)
    with pytest.raises(OutputError, match="it is an input"):
        predict([out / "in.fa", out / "in_chunked500.fa"], out, chunky)
    with pytest.raises(OutputError, match="that tells whose"):
        predict([out / "in.fa"], out, chunky)
    run([out / "in.fa"], out, config)
    with pytest.raises(OutputError, match="that tells whose"):
        predict([out / "in.fa"], out, chunky)  # kept beside a finished run
    assert (out / "in_chunked500.fa").read_bytes() == before
    run([out / "in.fa"], out, config, restart=True)
    assert (out / "in_chunked500.fa").read_bytes() == before


def test_a_run_that_was_killed_while_it_cut_can_be_restarted_or_given_another_input(finished, tmp_path):
    folder, _, config, _ = finished
    out, inputs = tmp_path / "out", [folder / "in.fa", tmp_path / "b.fa"]
    make_contigs(tmp_path / "b.fa", count=2, seed=2)
    (tmp_path / "b.fa").write_text((tmp_path / "b.fa").read_text().replace(">", ">b_"))
    killed = predict_forked(inputs, out, config, failpoint="MainProcess/file.rename:5:kill")
    assert killed.code == -signal.SIGKILL
    assert (out / "in_identified_nucleotide.fa").exists()
    assert "fragments" not in json.loads((out / "run.json").read_text())["stages"]
    run(inputs[1:], out, config)
    assert not (out / "in_identified_nucleotide.fa").exists()
    again = predict_forked(inputs, tmp_path / "again", config, failpoint="MainProcess/file.rename:5:kill")
    assert again.code == -signal.SIGKILL
    run(inputs[:1], tmp_path / "again", config, restart=True)
    assert tables(tmp_path / "again") == tables(folder / "out")


def test_a_table_of_another_threshold_does_not_survive_a_kill(finished, tmp_path):
    folder, _, config, _ = finished
    out = tmp_path / "out"
    run([folder / "in.fa"], out, config)
    other = hash_prediction(folder, threshold=0.9, formats=(TableFormat.TSV, TableFormat.JSON))
    steps = tmp_path / "steps"
    for number in range(1, 9):  # until the JSON has its name
        killed = predict_forked([folder / "in.fa"], out, other, failpoint=f"MainProcess/file.rename:{number}:kill")
        assert killed.code == -signal.SIGKILL
        if (out / "contigs.json").exists():
            steps.write_text(str(number))
            break
    assert steps.exists()
    run([folder / "in.fa"], out, config)
    assert not (out / "contigs.json").exists()
    assert tables(out) == tables(folder / "out")


def test_a_restart_with_an_input_that_cannot_be_used_removes_nothing(finished, tmp_path):
    folder, _, config, _ = finished
    out = tmp_path / "out"
    run([folder / "in.fa"], out, config)
    expected = tables(out)
    (tmp_path / "bad.fa").write_text(">a\nACGT\n>a\nACGT\n")
    for bad in (tmp_path / "absent.fa", tmp_path / "bad.fa"):
        with pytest.raises(BadInputError):
            predict([bad], out, config, restart=True)
    with pytest.raises(OutputError, match="it is an input"):
        predict([out / "viral.fasta"], out, config, restart=True)
    assert tables(out) == expected
    assert predict([folder / "in.fa"], out, config).was_complete


def test_a_finished_folder_that_was_moved_is_mended_without_embedding_again(finished, tmp_path):
    folder, _, config, _ = finished
    run([folder / "in.fa"], tmp_path / "out", config)
    moved = tmp_path / "moved"
    (tmp_path / "out").rename(moved)
    assert predict([folder / "in.fa"], moved, config).was_complete
    before = (moved / "dna/embeddings.h5").stat().st_mtime_ns
    (moved / "prediction_results.txt").unlink()
    (moved / "work/frame_scores.f32").write_bytes(b"")
    run([folder / "in.fa"], moved, config)
    assert tables(moved) == tables(folder / "out")
    assert (moved / "dna/embeddings.h5").stat().st_mtime_ns == before


def test_a_folder_of_the_other_kind_is_refused(finished, tmp_path):
    folder, _, config, _ = finished
    with pytest.raises(ResultError, match="embedding run"):
        predict([folder / "in.fa"], folder / "out/dna", config)
    before = (folder / "out/run.json").read_bytes()
    with pytest.raises(ResultError, match="not of an embedding run"):
        run_embedding([folder / "in.fa"], folder / "out", config.dna, [CPU])
    assert (folder / "out/run.json").read_bytes() == before


def test_a_stop_before_the_classifier_ends_the_run_and_the_next_start_goes_on(finished, tmp_path):
    folder, _, config, _ = finished
    stop = threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        predict([folder / "in.fa"], tmp_path / "out", config, stop=stop)
    assert json.loads((tmp_path / "out/run.json").read_text())["state"] == "stopped"
    run([folder / "in.fa"], tmp_path / "out", config)
    assert tables(tmp_path / "out") == tables(folder / "out")


def test_restart_removes_what_the_run_wrote_and_nothing_else(finished, tmp_path):
    folder, _, config, _ = finished
    out = tmp_path / "out"
    run([folder / "in.fa"], out, config)
    (out / "notes.txt").write_text("mine")
    run([folder / "in.fa"], out, hash_prediction(folder, min_nt=10**6), restart=True)
    assert (out / "notes.txt").read_text() == "mine"
    calls = list(read_contig_calls(out / "contigs.tsv"))
    assert {call.reason for call in calls} == {"shorter than the minimal length of 1000000 nt"}
