"""A result in Parquet is the result in one file: the same ids, rows and order; damaged or foreign files are named."""

from __future__ import annotations

import random
import shutil
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import fakes
from tests.faults.forked import run_forked
from tests.strategies import MadeRun, fasta_records, flip_bit
from tests.unit.test_sharded_result import aggregate, check_mapping, contents
from virnucpro import durable, read_embeddings
from virnucpro.choices import ResultForm
from virnucpro.config import RunLimits
from virnucpro.errors import ConfigurationError, ResultError, SettingsChangedError
from virnucpro.pipeline.devices import CPU
from virnucpro.pipeline.multi_gpu_inference import run_embedding
from virnucpro.pipeline.run import run as run_folder
from virnucpro.pipeline.run.run_preparation import prepare_run
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.pipeline.shard_aggregator import validate_result
from virnucpro.store.reader import Embeddings
from virnucpro.store.results import hdf5, parquet
from virnucpro.store.results.parquet import ParquetFile

arrow = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

PARQUET, SINGLE, AUTO = ResultForm.PARQUET, ResultForm.SINGLE, ResultForm.AUTO
WIDTH = fakes.HASH_WIDTH


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    monkeypatch.setattr(hdf5, "SHARD_ROWS", 7)


@pytest.fixture
def made(tmp_path):
    records = [(f"s{n}", "ACDEFGHIKL"[n % 10 :] * (n % 5 + 1) + "MKV"[: n % 3]) for n in range(40)]
    run = MadeRun(tmp_path, [*records, ("copy", records[5][1])], max_residues=20)
    run.write_part(range(len(run.plan)))
    return run


@pytest.fixture
def proteins(tmp_path):
    chooser = random.Random(11)
    sequences = {f"p{n}|é": "".join(chooser.choices("ACDEFGHIKLMN", k=chooser.randint(1, 40))) for n in range(40)}
    sequences["a_copy"] = sequences["p7|é"]
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">{name}\n{sequence}\n" for name, sequence in sequences.items()))
    return path, sequences


def run(fasta, out, config=None, *, form=PARQUET, **options):
    ended = run_forked(fasta, out, config or fakes.hash_config(), result_form=form, **options)
    assert ended.code == 0, ended.errors


def check_rows(path, sequences):
    with read_embeddings(path) as found:
        assert list(found) == list(sequences)
        for name, sequence in sequences.items():
            assert (found[name] == fakes.hash_vector(sequence)).all(), name


# --- the file ---


@given(records=fasta_records(max_size=40), rows=st.integers(1, 12), data=st.data())
@settings(max_examples=30)
def test_parquet_holds_what_one_file_holds_whatever_the_input_and_what_is_missing(
    tmp_path_factory, records, rows, data
):
    hdf5.SHARD_ROWS = rows
    run = MadeRun(tmp_path_factory.mktemp("run"), records, token_budget=40, max_residues=12)
    done = data.draw(st.sets(st.sampled_from(range(len(run.plan)))))
    for block in done:
        run.write_part([block])
    single, found = aggregate(run, SINGLE), aggregate(run, PARQUET)
    assert (single.num_rows, single.num_truncated) == (found.num_rows, found.num_truncated)
    if not done:
        assert found.output_path is None
        return
    path = found.output_path
    assert path.name == single.output_path.name.removesuffix(".h5") + ".parquet"
    assert found.files == {path.name: durable.sha256_of(path)}
    ids, numbers = contents(single.output_path)[:2]
    table = pq.read_table(path)
    assert [name.encode() for name in table["id"].to_pylist()] == ids
    assert table["embedding"].combine_chunks().flatten().to_numpy().tobytes() == numbers
    assert pq.read_metadata(path).num_row_groups == -(-found.num_rows // rows)
    id_bytes = sum(map(len, ids))
    assert path.stat().st_size <= ParquetFile.bytes_at_most(found.num_rows, WIDTH, id_bytes=id_bytes)
    validate_result(path, run.index, expected_rows=found.num_rows, expected_files=found.files)
    names = run.names_of(done)
    check_mapping(path, {name: run.vector(name) for name, _ in records if name in names})


def test_the_file_has_two_columns_and_its_bytes_depend_on_the_rows_only(made):
    path = aggregate(made, PARQUET).output_path
    before = path.read_bytes()
    assert str(pq.read_schema(path)) == (
        f"id: string not null\nembedding: fixed_size_list<element: float not null>[{WIDTH}] not null\n"
        "  child 0, element: float not null"
    )
    assert [pq.read_metadata(path).row_group(number).num_rows for number in range(6)] == [7] * 5 + [6]
    path.unlink()
    shutil.rmtree(made.layout.parts_dir)
    for block in reversed(range(len(made.plan))):
        made.write_part([block])
    aggregate(made, PARQUET)
    assert path.read_bytes() == before
    check_mapping(made.layout.output_dir, {name: made.vector(name) for name, _ in made.records})


@pytest.mark.parametrize("width", [1, 2, 3, 640, 5120])
def test_a_file_takes_no_more_than_it_was_given_room_for(tmp_path, width):
    numbers = np.random.default_rng(3).normal(size=(3000, width)).astype(np.float32)

    class Rows:
        hidden_dim = width

        def __init__(self, rows):
            self.rows = rows

        def __len__(self):
            return len(self.rows)

        id_bytes = 3000 * 4

        def subset(self, rows):
            return Rows(rows)

        def iter_ids(self):
            yield [f"{row:04}" for row in self.rows]

        def iter_rows(self):
            yield np.arange(len(self.rows)), numbers[self.rows.start : self.rows.stop]

    given_bytes = []
    result = ParquetFile(tmp_path / "embeddings.parquet")
    result.write(Rows(range(3000)), give_way=given_bytes.append)
    assert result.path.stat().st_size <= given_bytes[0] < 1.2 * numbers.nbytes + 3000 * 700
    with Embeddings(result.path) as found:
        assert found.to_numpy().tobytes() == numbers.tobytes()


# --- runs ---


def test_a_run_is_complete_verifiable_and_not_computed_again(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    result = run_embedding([fasta], out, fakes.hash_config(), [CPU] * 2, result_form=PARQUET)
    assert (result.state, result.output_path, result.num_rows) == ("complete", out / "embeddings.parquet", 41)
    check_rows(out, sequences)
    assert sorted(path.name for path in out.iterdir()) == [
        ".run.lock", "embeddings.parquet", "logs", "metrics.prom", "run.json", "work",
    ]  # fmt: skip
    assert verify_run(out).problems == []
    before = result.output_path.read_bytes()
    assert run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=AUTO).ranks == ()
    assert result.output_path.read_bytes() == before
    with pytest.raises(SettingsChangedError, match="result_form was 'parquet', now 'single'"):
        run_embedding([fasta], out, fakes.hash_config(), [CPU], result_form=SINGLE)
    run(fasta, out, form=SINGLE, restart=True)
    assert not result.output_path.exists()


@pytest.mark.parametrize("step", ["file.open", "file.reserve", "file.write", "file.fsync", "file.rename"])
def test_a_run_killed_while_it_writes_the_file_is_finished_in_the_same_form(tmp_path, proteins, step):
    fasta, _ = proteins
    whole, out, trace = tmp_path / "whole", tmp_path / "out", tmp_path / "trace"
    run(fasta, whole, failpoint=f"*:0:trace:{trace}")
    steps = [line for line in trace.read_text().splitlines() if line.startswith("MainProcess/")]
    reserved = [number for number, line in enumerate(steps) if line.endswith("file.reserve")][-1]
    of_result = steps.index(f"MainProcess/{step}", reserved) if step != "file.open" else reserved - 1
    number = steps[: of_result + 1].count(f"MainProcess/{step}")
    ended = run_forked(
        fasta, out, fakes.hash_config(), failpoint=f"MainProcess/{step}:{number}:kill", result_form=PARQUET
    )
    assert ended.code == -9, ended.errors
    assert not (out / "embeddings.parquet").exists()
    run(fasta, out, form=AUTO, workers=2)
    assert (out / "embeddings.parquet").read_bytes() == (whole / "embeddings.parquet").read_bytes()
    assert [path.name for path in out.rglob("*.tmp")] == []
    assert verify_run(out).problems == []


def test_a_full_disk_ends_the_run_with_73_and_no_file(tmp_path, proteins):
    fasta, sequences = proteins
    trace, out = tmp_path / "trace", tmp_path / "out"
    run(fasta, tmp_path / "whole", failpoint=f"*:0:trace:{trace}")
    steps = [line for line in trace.read_text().splitlines() if line.startswith("MainProcess/")]
    reserved = [number for number, line in enumerate(steps) if line.endswith("file.reserve")][-1]
    for more in (1, 3):
        number = steps[:reserved].count("MainProcess/file.write") + more
        spec = f"MainProcess/file.write:{number}:ENOSPC"
        ended = run_forked(fasta, out, fakes.hash_config(), failpoint=spec, result_form=PARQUET)
        assert (ended.code, "Exception ignored" in ended.errors) == (73, False), ended.errors
        assert "embeddings.parquet: No space left on device" in ended.errors
        assert [path.name for path in out.iterdir() if "parquet" in path.name] == []
    run(fasta, out, form=AUTO)
    check_rows(out, sequences)


def test_rows_that_exist_are_a_partial_result_and_a_second_run_completes_them(tmp_path, proteins):
    fasta, sequences = proteins
    out = tmp_path / "out"
    config = fakes.faulty_config(tmp_path / "faults.json", {"rank": 0, "how": "sigkill", "before_batch": 15})
    limits = RunLimits(attempts=1, stop_grace_s=1.0)
    result = run_embedding([fasta], out, config, [CPU], limits=limits, result_form=PARQUET)
    assert (result.state, result.output_path) == ("partial", out / "embeddings.partial.parquet")
    missing = {line.split("\t")[0] for line in (out / "failed_sequences.tsv").read_text().splitlines()[1:]}
    assert 0 < len(missing) < len(sequences)
    check_rows(result.output_path, {name: s for name, s in sequences.items() if name not in missing})
    assert verify_run(out).problems == []
    with pytest.raises(ResultError, match=r"partial result only: open .*embeddings\.partial\.parquet"):
        read_embeddings(out)
    assert run_embedding([fasta], out, config, [CPU], limits=limits, result_form=AUTO).state == "complete"
    assert not result.output_path.exists()
    check_rows(out, sequences)


def test_a_damaged_file_is_named_and_computed_again(tmp_path, proteins):
    fasta, _ = proteins
    out = tmp_path / "out"
    run(fasta, out)
    path = out / "embeddings.parquet"
    whole = path.read_bytes()
    for spoil in (lambda: flip_bit(path, 4000), path.unlink):
        spoil()
        assert len(problems := verify_run(out).problems) == 1
        assert str(path) in problems[0]
        run(fasta, out)
        assert path.read_bytes() == whole


def test_without_pyarrow_a_run_is_refused_before_any_work(tmp_path, proteins, monkeypatch):
    fasta, _ = proteins
    done, out = tmp_path / "done", tmp_path / "out"
    run(fasta, done)
    monkeypatch.setattr(parquet, "find_spec", lambda _: None)
    with pytest.raises(
        ConfigurationError, match=r"parquet needs pyarrow: pip install 'virnucpro\[parquet\]'"
    ) as caught:
        prepare_run([fasta], out, fakes.hash_config(), [CPU], run_id="one", result_form=PARQUET)
    assert (int(caught.value.exit_code), out.exists()) == (78, False)
    with pytest.raises(ConfigurationError, match="pyarrow"):
        run_embedding([fasta], done, fakes.hash_config(), [CPU], result_form=AUTO)
    with pytest.raises(ConfigurationError, match="pyarrow"):
        read_embeddings(done)


def test_the_command_without_pyarrow_ends_with_78_and_leaves_no_folder(tmp_path, proteins):
    script = "from virnucpro.store.results import parquet as p; p.find_spec = lambda _: None; import virnucpro.cli as c"
    command = [sys.executable, "-c", f"{script}; c.main()", "embed", str(proteins[0]), "-o", str(tmp_path / "out")]
    done = subprocess.run(
        [*command, "--result-form", "parquet"], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, (tmp_path / "out").exists()) == (78, "", False)
    assert "pip install 'virnucpro[parquet]'" in done.stderr


def test_the_reservation_has_room_for_the_file(tmp_path, proteins):
    fasta, _ = proteins
    prepared = prepare_run([fasta], tmp_path / "out", fakes.hash_config(), [CPU], run_id="one", result_form=PARQUET)
    reserved_bytes = prepared.layout.reservation.stat().st_size - run_folder.MANIFEST_BYTES
    run(fasta, tmp_path / "out")
    assert reserved_bytes >= (tmp_path / "out" / "embeddings.parquet").stat().st_size


# --- files from anywhere ---

COLUMNS = {"id": ["a", "b"], "embedding": [[1.0, 2.0], [3.0, 4.0]]}
NUMBERS = arrow.list_(arrow.field("element", arrow.float32(), nullable=False), 2)


STRING = arrow.string()


def table(ids=STRING, numbers=NUMBERS, *, has_nulls=False, columns=COLUMNS):
    fields = [arrow.field("id", ids, nullable=has_nulls), arrow.field("embedding", numbers, nullable=has_nulls)]
    return arrow.table(columns, schema=arrow.schema(fields))


PLAIN = {"compression": "none", "use_dictionary": False, "write_statistics": False}


@pytest.mark.parametrize(
    ("content", "options", "what"),
    [
        (table(), PLAIN, None),
        (arrow.table(COLUMNS), PLAIN, "has the columns"),
        (table(has_nulls=True), PLAIN, "neither with nulls"),
        (
            table(has_nulls=True, columns={"id": ["a", None], "embedding": [[1.0, 2.0], None]}),
            PLAIN,
            "neither with nulls",
        ),
        (table(numbers=arrow.list_(arrow.field("element", arrow.float32(), nullable=False))), PLAIN, "columns"),
        (table(numbers=arrow.list_(arrow.field("element", arrow.float64(), nullable=False), 2)), PLAIN, "columns"),
        (table(ids=arrow.binary()), PLAIN, "columns"),
        (table().append_column("id", [["a", "b"]]), PLAIN, "columns"),
        (table().select(["embedding", "id"]), PLAIN, "columns"),
        (table().select([]), PLAIN, "columns"),
        (table(), {**PLAIN, "compression": "snappy"}, "compressed or encoded"),
        (table(), {**PLAIN, "use_dictionary": True}, "compressed or encoded"),
        (table(columns={**COLUMNS, "id": ["a", "a"]}), PLAIN, "an id has more than one row"),
    ],
)
def test_a_file_of_another_kind_is_refused(tmp_path, content, options, what):
    path = tmp_path / "x.parquet"
    pq.write_table(content, path, **options)
    if what is None:
        with Embeddings(path) as found:
            assert found["b"].tolist() == [3.0, 4.0]
        return
    with pytest.raises(ResultError, match=what):
        Embeddings(path)


def test_ids_that_are_not_utf_8_are_refused(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(table(columns={**COLUMNS, "id": ["a", "zz"]}), path, **PLAIN, write_page_checksum=False)
    path.write_bytes(path.read_bytes().replace(b"zz", b"\xff\xfe"))
    with pytest.raises(ResultError, match="Parquet cannot read it"):
        Embeddings(path)


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda data: b"", "Parquet cannot read it"),
        (lambda data: data[:-1], "Parquet cannot read it"),
        (lambda data: data[:-8] + struct.pack("<I", 1 << 31) + b"PAR1", "Parquet cannot read it"),
        (lambda data: data[:-8] + struct.pack("<I", len(data) + 1) + b"PAR1", "Parquet cannot read it"),
        (lambda data: data[:-8] + struct.pack("<I", 3) + b"PAR1", "Parquet cannot read it"),
        (lambda data: data[-300:], "damaged|refused"),
        (lambda data: data[:4] + bytes(500) + data[504:], "Parquet cannot read it"),
    ],
)
def test_a_file_that_is_damaged_is_named(made, spoil, what):
    path = aggregate(made, PARQUET).output_path
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ResultError, match=what) as caught:
        read_embeddings(made.layout.output_dir)
    assert caught.value.path == str(path)
    with pytest.raises(ResultError, match=what):
        validate_result(path, made.index, expected_rows=41, expected_files=None)


def test_a_missing_file_and_a_folder_of_that_name_are_named(tmp_path):
    with pytest.raises(ResultError, match="is missing"):
        Embeddings(tmp_path / "x.parquet")
    (tmp_path / "embeddings.parquet").mkdir()
    with pytest.raises(ResultError):
        read_embeddings(tmp_path)


def test_a_flipped_bit_in_the_rows_is_found_when_the_file_is_opened(made):
    path = aggregate(made, PARQUET).output_path
    group = pq.read_metadata(path).row_group(2).column(1)
    flip_bit(path, 8 * (group.data_page_offset + group.total_compressed_size - 6))
    with pytest.raises(ResultError, match="CRC"):
        read_embeddings(path)
    with pytest.raises(ResultError, match="CRC"):
        validate_result(path, made.index, expected_rows=41, expected_files=None)


def test_no_changed_byte_crashes_the_reader_or_makes_it_ask_for_much(made):
    path = aggregate(made, PARQUET).output_path
    whole, chooser = path.read_bytes(), random.Random(5)
    footer = len(whole) - 8 - struct.unpack("<I", whole[-8:-4])[0]
    places = [*range(footer, len(whole), 37), *(chooser.randrange(footer) for _ in range(30))]
    refused = 0
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << chooser.randrange(8)
        path.write_bytes(data)
        try:
            with Embeddings(path) as found:
                found.to_numpy()
        except ResultError:
            refused += 1
    assert refused > len(places) // 4


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"ids": ["s1", "s0"]}, "'s1' is not in the input, or in the wrong place"),
        ({"number": np.nan}, r"a number in rows 0 to 40 is not finite"),
    ],
)
def test_validation_says_what_does_not_hold(made, columns, what):
    path = aggregate(made, PARQUET).output_path
    found = pq.read_table(path)
    ids, numbers = found["id"].to_pylist(), found["embedding"].to_pylist()
    ids[:2] = columns.get("ids", ids[:2])
    numbers[0][0] = columns.get("number", numbers[0][0])
    changed = arrow.table({"id": ids, "embedding": numbers}, schema=found.schema)
    pq.write_table(changed, path, **PLAIN)
    with pytest.raises(ResultError, match=what):
        validate_result(path, made.index, expected_rows=41, expected_files=None)


def test_a_closed_file_says_so(made):
    path = aggregate(made, PARQUET).output_path
    with read_embeddings(path) as found:
        assert found["s1"].tobytes() == made.vector("s1").tobytes()
    with pytest.raises(ValueError, match="closed"):
        found["s2"]
