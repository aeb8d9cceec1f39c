"""
What other people and other programs leave in the folder of a run: it is not removed, not waited for and not believed.

Files under names like ours, links, pipes in place of files, and a ``run.json`` in which something was changed.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command_line import run
from tests.fakes import hash_config
from tests.faults.forked import run_forked, run_job, small_input
from tests.manifests import is_noticed, values_unseen
from tests.predictions import hash_prediction, make_contigs, predict_forked
from tests.strategies import edit_manifest, flip_bit
from virnucpro.errors import OutputError, ResultError
from virnucpro.pipeline.run.verification import verify_run
from virnucpro.telemetry.metrics.exposition import TargetFile
from virnucpro.telemetry.show.status_file import read_status
from virnucpro.training.genomes.genome_split import training_data_of

ROOT = Path(__file__).parents[2]
OF_OTHERS = (".x.tmp", ".run.json.tmp", ".notes.4194305.0123abcd.tmp", ".a.norun.4194305.0123abcd.tmp", "notes.txt")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder, input and settings of a finished prediction."""
    folder = tmp_path_factory.mktemp("made")
    make_contigs(folder / "in.fa", count=6)
    config = hash_prediction(folder)
    ended = predict_forked([folder / "in.fa"], folder / "out", config)
    assert ended.code == 0, ended.errors
    return folder / "out", folder / "in.fa", config


@pytest.fixture
def finished(made, tmp_path):
    """The same, a copy to be spoiled."""
    shutil.copytree(made[0], tmp_path / "out", symlinks=True)
    return tmp_path / "out", made[1], made[2]


# --- files under names like ours --------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_fit_input", [True, False])
def test_temporary_files_of_others_stay_whatever_becomes_of_the_input(finished, with_fit_input, tmp_path):
    out, fasta, config = finished
    (tmp_path / "empty.fa").write_text("")
    theirs = [out / folder / name for folder in (".", "work", "dna", "dna/work") for name in OF_OTHERS]
    for path in theirs:
        path.write_text("precious")
    ended = predict_forked([fasta if with_fit_input else tmp_path / "empty.fa"], out, config, restart=True)
    assert ended.code == (0 if with_fit_input else 65), ended.errors
    assert [path.read_text() for path in theirs] == ["precious"] * len(theirs)
    assert verify_run(out).problems == []


@pytest.mark.soak
def test_files_under_names_that_resemble_ours_all_stay(finished, seed, soak_table):
    out, fasta, config = finished
    chooser = random.Random(seed)
    pieces = [
        "",
        "run.json",
        "contigs.tsv",
        "norun",
        "0123456789abcdef",
        "4194305",
        "0123abcd",
        "tmp",
        "h5",
        "lock",
        "x",
    ]
    theirs = set()
    for folder in (".", "work", "work/unpacked", "work/parts", "dna", "dna/work", "dna/work/workers", "protein"):
        (out / folder).mkdir(exist_ok=True)
        for _ in range(50):
            name = f".{'.'.join(chooser.choices(pieces, k=chooser.randint(1, 5)))}.{chooser.choice(['tmp', 'lock'])}"
            theirs |= {out / folder / name} if name != ".run.lock" else set()
    for path in theirs:
        path.write_text("precious")
    ended = predict_forked([fasta], out, config, restart=True)
    gone = [path for path in theirs if not path.is_file() or path.read_text() != "precious"]
    soak_table("foreign files under the program's names, and a restart", tries=len(theirs), differing=len(gone))
    assert ended.code == 0, ended.errors
    assert gone == []


@pytest.mark.parametrize("name", ["l/precious", "precious", "../precious", "/etc/hostname", "dna/run.json"])
def test_a_manifest_cannot_claim_files_of_others(finished, name, tmp_path):
    out, fasta, config = finished
    (tmp_path / "elsewhere").mkdir()
    (out / "l").symlink_to(tmp_path / "elsewhere")
    theirs = [tmp_path / "elsewhere" / "precious", out / "precious", tmp_path / "precious"]
    for path in theirs:
        path.write_text("precious")
    edit_manifest(out / "run.json", lambda values: values["outputs"].append(name))
    ended = predict_forked([fasta], out, config, restart=True)
    assert (ended.code, "an output that no run writes" in ended.errors) == (65, True)
    assert [path.read_text() for path in theirs] == ["precious"] * 3
    assert (out / "contigs.tsv").exists()


@pytest.mark.parametrize("name", ["dna", "protein", "work", "dna/work", "dna/logs"])
def test_a_restart_removes_nothing_behind_a_link(finished, name, tmp_path):
    out, fasta, config = finished
    (out / name).rename(tmp_path / "elsewhere")
    (out / name).symlink_to(tmp_path / "elsewhere")
    before = sorted(path for path in (tmp_path / "elsewhere").rglob("*"))
    ended = predict_forked([fasta], out, config, restart=True)
    assert (ended.code, "is a link or not a folder" in ended.errors) == (73, True), ended.errors
    assert sorted(path for path in (tmp_path / "elsewhere").rglob("*")) == before


# --- pipes in place of files ------------------------------------------------------------------------------------------

READ = (
    *("run.json", "contigs.tsv", "prediction_results.txt", "work/contigs.index", "work/status.json", ".run.lock"),
    *("dna/run.json", "dna/work/sequences.index", "dna/embeddings.h5", "dna/logs/worker_0.log"),
)


def put_pipe(path) -> None:
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)


def commands_that_hang(out, fasta, config) -> list[str]:
    """Return those that wait for somebody to write into a pipe, until they are killed for it."""

    def ask(what):
        def job():
            ended = run(what, out)
            assert ended.code in (0, 3, 65, 73), ended
            assert "Traceback" not in ended.err, ended.err

        return run_job(job, out)

    ended = {what: ask(what) for what in ("verify", "status")}
    ended["predict"] = predict_forked([fasta], out, config)
    assert all("Traceback" not in one.errors for one in ended.values()), ended
    assert ended["predict"].code in (0, 65, 73, -9), ended["predict"].errors
    return [what for what, one in ended.items() if one.code == -9]


@pytest.mark.parametrize("name", ["run.json", "work/contigs.index", "dna/work/sequences.index"])
def test_nothing_waits_for_a_pipe_in_place_of_a_file(finished, name):
    put_pipe(finished[0] / name)
    assert commands_that_hang(*finished) == []


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_nothing_waits_for_a_pipe_in_place_of_any_file(made, tmp_path, soak_table):
    hanging = []
    for number, name in enumerate(READ):
        out = tmp_path / str(number)
        shutil.copytree(made[0], out)
        put_pipe(out / name)
        hanging += [f"{what} {name}" for what in commands_that_hang(out, *made[1:])]
    soak_table("a pipe in place of a file of the run", tries=4 * len(READ), differing=len(hanging))
    assert hanging == []


def opened_by_name(path):
    """Yield the calls in a module that open a file by its name, and would wait for the writer of a pipe."""
    for call in ast.walk(ast.parse(path.read_text("utf-8"))):
        match call:
            case ast.Call(func=ast.Name(id="open"), keywords=keywords):
                if not any(one.arg == "opener" for one in keywords):
                    yield ast.unparse(call)
            case ast.Call(func=ast.Attribute(attr="read_text" | "read_bytes", value=value)):
                if not isinstance(value, ast.Name) or value.id != "run_folders":
                    yield ast.unparse(call)
            case ast.Call(func=ast.Attribute(attr="open"), args=[ast.Constant(value=str()), *_]):
                yield ast.unparse(call)
            case ast.Call(func=ast.Attribute(attr="open"), args=[], keywords=[_, *_]):
                yield ast.unparse(call)


OF_THE_SYSTEM = re.compile(
    r"/proc/|os\.devnull|cgroup|meminfo|cpu_info|importlib|files\(|open\('x'"  # 'x' makes a new file
    r"|^path\.read_text\(\)$|^self\._file\.read_text\(\)$"  # of /proc and of cgroups
)


def test_every_file_that_is_opened_by_its_name_is_opened_so_that_a_pipe_does_not_hold_it_up():
    modules = sorted(path for folder in ("virnucpro", "flows") for path in (ROOT / folder).rglob("*.py"))
    found = [(path.name, call) for path in modules for call in opened_by_name(path)]
    assert len(found) > 10  # those of the system
    assert [(name, call) for name, call in found if not OF_THE_SYSTEM.search(call)] == []


@pytest.mark.timeout(20)
def test_a_pipe_under_the_temporary_name_of_a_target_file_is_an_error_that_names_it(tmp_path):
    target = TargetFile(tmp_path, "0123456789ab", "127.0.0.1:9100")
    os.mkfifo(tmp_path / f".{target.path.name}.tmp")
    with pytest.raises(OutputError, match=r"0123456789ab\.json"):
        target.start()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("card", ["[" * 100_000, "[]", '{"weights_sha256": "a"}', None])
def test_a_card_beside_an_encoder_that_cannot_be_read_lists_no_training_data(tmp_path, card):
    put_pipe(tmp_path / "card.json") if card is None else (tmp_path / "card.json").write_text(card)
    config = replace(hash_config(), weights_path=str(tmp_path / "w.bin"), weights_sha256="a")
    assert training_data_of(config) is None


def test_a_live_status_that_is_a_pipe_is_said_to_be_none(tmp_path):
    put_pipe(tmp_path / "status.json")
    with pytest.raises(ResultError, match="not a regular file"):
        read_status(tmp_path / "status.json")


@pytest.mark.parametrize("name", ["logs/worker_0.log", "work/parts/part_000000000_0123456789ab.h5", "shard_0.h5"])
def test_a_run_with_a_pipe_in_place_of_a_log_a_part_or_a_shard_comes_to_its_end(tmp_path, name):
    out = tmp_path / "out"
    (out / name).parent.mkdir(parents=True)
    put_pipe(out / name)
    ended = run_forked(small_input(tmp_path), out, hash_config())
    assert ended.code == 0, ended.errors
    assert verify_run(out).problems == []


# --- a run.json in which something was changed ------------------------------------------------------------------------


@pytest.mark.parametrize(("folder", "verify"), [(".", verify_run), ("dna", verify_run), ("protein", verify_run)])
def test_each_single_value_of_a_manifest_that_was_changed_is_noticed(finished, folder, verify):
    num_values, unseen = values_unseen(finished[0] / folder, verify)
    assert num_values > 40
    assert unseen == []


@pytest.mark.soak
def test_each_single_value_and_random_bits_of_all_manifests_are_noticed(finished, seed, soak_table):
    chooser = random.Random(seed)
    out, tries, unseen = finished[0], 0, []
    for folder in (out, out / "dna", out / "protein"):
        num_values, unseen_here = values_unseen(folder, verify_run)
        before = (folder / "run.json").read_bytes()
        for bit in chooser.sample(range(8 * len(before)), 200):
            flip_bit(folder / "run.json", bit)
            same = is_same_json(before, (folder / "run.json").read_bytes())
            unseen_here += [] if same or is_noticed(verify_run, folder) else [bit]
            (folder / "run.json").write_bytes(before)
        tries, unseen = tries + num_values + 200, unseen + unseen_here
    soak_table("a value or a bit of run.json changed", tries=tries, differing=len(unseen))
    assert unseen == []


def is_same_json(one: bytes, other: bytes) -> bool:
    """Whether a changed bit has changed no value: one blank for another."""
    try:
        return json.loads(one) == json.loads(other)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "name", ["virus", "not_virus", "contigs", "chunks", "open_chunks", "frames", "skipped", "scored_frames"]
)
def test_counts_are_counted_again_from_the_tables(finished, name):
    out = finished[0]
    edit_manifest(out / "run.json", lambda values: values["counts"].update({name: values["counts"][name] + 900}))
    assert any(f"{name.replace('_', ' ')}, the tables have" in problem for problem in verify_run(out).problems)


def test_a_manifest_without_counts_is_an_error_with_a_sentence(finished):
    edit_manifest(finished[0] / "run.json", lambda values: values.update(counts={}))
    for command in ("verify", "status"):
        ended = run(command, finished[0])
        assert ended.code == 65
        assert "'counts' without 'chunks', 'contigs', 'frames'" in ended.err
        assert "Traceback" not in ended.err


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: flip_bit(path, 8 * 200 + 3)])
def test_a_damaged_index_of_the_contigs_is_found_and_made_again(finished, damage):
    out, fasta, config = finished
    damage(out / "work/contigs.index")
    assert "contigs.index: is missing or damaged: start the same command again" in str(verify_run(out).problems)
    assert predict_forked([fasta], out, config).code == 0
    assert verify_run(out).problems == []


def test_a_damaged_index_of_a_part_has_a_remedy_that_works(finished):
    out, _, _ = finished
    (out / "dna/work/sequences.index").unlink()
    (problem,) = verify_run(out).problems
    assert f"missing or damaged (scores were made before; remove {out / 'dna'} if" in problem
    shutil.rmtree(out / "dna")
    assert verify_run(out).problems == []


def test_a_changed_manifest_is_not_continued(finished):
    out, fasta, config = finished
    text = (out / "run.json").read_text()
    (out / "run.json").write_text(text.replace('"threshold": 0.5', '"threshold": 0.7'))
    ended = predict_forked([fasta], out, config, restart=True)
    assert (ended.code, "does not match its own checksum" in ended.errors) == (65, True)
    assert (out / "contigs.tsv").exists()
