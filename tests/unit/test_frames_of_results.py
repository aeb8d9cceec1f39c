"""Results in Python: a prediction as a sequence of its contigs, and frames of pandas and polars where these are."""

from __future__ import annotations

import pytest

import virnucpro
from tests.command_line import run
from virnucpro.errors import ConfigurationError, ResultError
from virnucpro.store import reader
from virnucpro.store.contig_table import COLUMNS, read_contig_calls
from virnucpro.store.manifest import PredictionManifest


@pytest.fixture(scope="module")
def prediction(tmp_path_factory):
    """Of contigs with and without a score, and of a record that was skipped."""
    folder = tmp_path_factory.mktemp("frames")
    fasta = folder / "contigs.fa"
    fasta.write_text(
        ">long\n" + "ATGGCCAAA" * 100 + "\n>short\nACGTACGTAC\n>bad\nAC1T\n>second\n" + "GATTACA" * 90 + "\n"
    )
    settings = {"devices": "cpu", "min_length": 100, "on_bad_record": "skip"}
    return virnucpro.predict_fasta(fasta, folder / "out", **settings)


def test_a_prediction_is_a_sequence_of_the_calls_in_its_table(prediction):
    assert list(prediction) == list(read_contig_calls(prediction.contigs_path))
    assert [one.contig for one in prediction] == ["long", "short", "second", "bad"]
    assert (len(prediction), prediction[1].contig, prediction[-1].contig) == (4, "short", "bad")
    assert prediction[1:3] == tuple(prediction)[1:3]
    assert (prediction.state, prediction.counts["contigs"], prediction.counts["skipped"]) == ("complete", 3, 1)
    assert all(path.is_file() for path in (prediction.report_path, prediction.viral_path))
    assert {one.contig for one in prediction.viral} == {one.contig for one in prediction if one.call == "virus"}
    again = virnucpro.read_prediction(str(prediction.output_dir))
    assert (list(again), again.counts, again.notes) == (list(prediction), prediction.counts, prediction.notes)


def test_viral_contigs_come_with_the_highest_score_first(prediction):
    first, *others = prediction
    calls = [first._replace(contig=str(score), score=score, call=first.call.VIRUS) for score in (0.6, 0.9, 0.8)]
    made = reader.Prediction(**{**vars(prediction), "contigs": (*calls, *others[:1])})
    assert [one.score for one in made.viral] == [0.9, 0.8, 0.6]


def test_a_folder_that_is_not_finished_or_holds_something_else_is_refused(prediction, tmp_path):
    manifest = PredictionManifest.read(prediction.output_dir / "run.json")
    manifest.state = "stopped"
    manifest.write(tmp_path / "run.json")
    with pytest.raises(ResultError, match=r"not finished \(stopped\)"):
        virnucpro.read_prediction(tmp_path)
    with pytest.raises(ResultError):
        virnucpro.read_prediction(tmp_path / "none")


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_has_every_column_and_value_with_its_type(prediction, library):
    pytest.importorskip(library)
    frame = getattr(prediction, f"to_{library}")()
    assert list(frame.columns) == list(COLUMNS)
    dtypes = dict(zip(frame.columns, map(str, frame.dtypes), strict=True))
    assert {dtypes[name].lower() for name in ("length", "chunks", "frames", "viral_frames")} == {"int64"}
    assert {dtypes[name].lower() for name in ("score", "posterior", "fdr", "max_score")} == {"float64"}
    assert dtypes["embedded"].lower() in {"bool", "boolean"}
    rows = frame.to_dict("records") if library == "pandas" else frame.to_dicts()
    for row, contig in zip(rows, prediction, strict=True):
        for name, value in contig._asdict().items():
            is_unknown = row[name] is None or row[name] is getattr(pytest.importorskip(library), "NA", None)
            assert is_unknown if value is None else row[name] == value, (name, value, row[name])


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_a_frame_of_embeddings_has_ids_and_rows(tmp_path, examples_dir, library):
    pytest.importorskip(library)
    fasta = tmp_path / "few.fasta"
    fasta.write_text("".join(f">{one}" for one in (examples_dir / "proteins.fasta").read_text().split(">")[1:4]))
    assert run("embed", fasta, "-o", tmp_path / "out", "--devices", "cpu", "--workers", "1", "-q").code == 0
    with virnucpro.read_embeddings(tmp_path / "out") as embeddings:
        frame = getattr(embeddings, f"to_{library}")()
        for number, (name, vector) in enumerate(embeddings.items()):
            of_frame = frame.loc[name].to_numpy() if library == "pandas" else frame["embedding"][number].to_numpy()
            assert of_frame.dtype == vector.dtype
            assert of_frame.tolist() == vector.tolist()
            assert library == "pandas" or frame["id"][number] == name


def test_without_the_library_the_error_says_what_to_install(prediction, monkeypatch):
    monkeypatch.setattr(reader, "find_spec", lambda _: None)
    for name in ("pandas", "polars"):
        with pytest.raises(ConfigurationError, match=f"a frame of {name} needs {name}: pip install {name}"):
            getattr(prediction, f"to_{name}")()
