"""The command line as a user meets it: mistakes and outcomes, in a process of its own where that matters."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import virnucpro.cli
from tests.command_line import run
from virnucpro.models.classifier_files.card import classifiers_table
from virnucpro.models.dnabert_s import load_dnabert_s
from virnucpro.models.registry import MODELS
from virnucpro.store.reader import read_embeddings


def virnucpro_command(*arguments, cwd=None, **changes):
    environment = {**os.environ, "COLUMNS": "80", **changes}
    return subprocess.run(
        [sys.executable, "-m", "virnucpro", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def proteins(tmp_path, examples_dir):
    records = (examples_dir / "proteins.fasta").read_text().split(">")[1:41]
    path = tmp_path / "proteins.fasta"
    path.write_text("".join(f">{record}" for record in records))
    return path


def test_a_defect_ends_with_70_and_says_what_to_report_and_where():
    script = "from virnucpro import cli; cli.command_line = lambda _: 1 / 0; cli.main()"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 70
    *_, error, advice = done.stderr.splitlines()
    assert error == "ZeroDivisionError: division by zero"
    assert "in the issue tracker of the repository" in advice
    assert virnucpro.__version__ in advice


def test_version():
    done = virnucpro_command("--version")
    assert (done.returncode, done.stdout) == (0, f"virnucpro {virnucpro.__version__}\n")


def test_help_names_every_command_and_every_option_has_its_help():
    done = virnucpro_command("--help")
    assert done.returncode == 0
    for command in ("embed", "index", "verify", "status", "models"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
    done = virnucpro_command("embed", "--help", COLUMNS="200")
    assert done.returncode == 0
    for option in [
        "--output",
        "--model",
        "--devices",
        "--workers",
        "--precision",
        "--token-budget",
        "--threads",
        "--allow-partial",
        "--log-level",
        "--json",
        "--flow",
        "--max-residues",
        "--long",
        "--gaps",
        "--stop",
        "--on-bad-record",
        "--allow-empty",
        "--weights-dir",
        "--result-form",
        "--runner",
    ]:
        assert re.search(rf"{option}\b.*\w{{3,}}", done.stdout), option


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--runner", "rya"), "runner is rya: choose threads, ray"),
        (("--runner", "ray", "--devices", "0"), "devices is auto or cpu"),
        (("--runner", "dask://slurm", "--workers-per-device", "2"), "one worker per device"),
    ],
)
def test_a_cluster_that_cannot_be_is_a_usage_error(tmp_path, proteins, options, words):
    done = run("embed", proteins, "--output", tmp_path / "out", *options)
    assert done.code == 2
    assert words in " ".join(done.err.split())
    assert not (tmp_path / "out").exists()


def test_a_typo_in_an_option_is_a_usage_error_in_plain_text():
    done = run("embed", "x.fasta", "-o", "out", "--tokens-budget", "3")
    assert done.code == 2
    assert "No such option: --tokens-budget" in done.err
    assert not any(char in done.err for char in "╭│╰")


def test_a_missing_file_is_named_with_the_systems_text_on_one_unwrapped_line(tmp_path):
    name = "a_rather_long_file_name_" * 6 + ".fasta"
    done = virnucpro_command("embed", name, "-o", "out", cwd=tmp_path)
    assert done.returncode == 65
    assert f"{name}: No such file or directory" in done.stderr
    assert len([line for line in done.stderr.splitlines() if name in line]) == 1
    assert "Traceback" not in done.stderr


def test_the_plain_command_imports_neither_prefect_nor_torch(tmp_path):
    code = (
        "import sys; sys.argv = ['virnucpro', 'models', 'list']\n"
        "import virnucpro.cli\n"
        "try:\n    virnucpro.cli.main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('prefect', 'torch', 'esm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_command_loads_nothing_that_only_others_need():
    others = ("virnucpro.calls", "virnucpro.training", "virnucpro.report")
    code = (
        "import sys; sys.argv = ['virnucpro', 'embed', '--help']\n"
        "import virnucpro.cli\n"
        "try:\n    virnucpro.cli.main()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in sys.modules if name.startswith({others})])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_templates_are_loaded_only_when_a_page_is_written():
    code = (
        "import sys, virnucpro.api, virnucpro.commands.evaluate, virnucpro.commands.predict\n"
        "from virnucpro.report.html_page import fill\n"
        "print('jinja2' in sys.modules)\n"
        "fill('reports.html', rows=[], is_whole=True)\n"
        "print('jinja2' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["False", "True"]


def loaded_by(*arguments):
    """Return the exit code and the modules of a command line that has run to its end."""
    code = (
        "import sys\n"
        "import virnucpro.cli\n"
        "try:\n    virnucpro.cli.main()\nexcept SystemExit as stop:\n    code = stop.code\n"
        "print('\\n', code or 0, *sys.modules)"
    )
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    code, *modules = done.stdout.splitlines()[-1].split()
    return int(code), modules


@pytest.mark.parametrize("words", [["--help"], [], ["--version"], ["statsu"]])
def test_the_list_of_commands_is_printed_without_loading_one(words):
    _, modules = loaded_by(*words)
    commands = {"status", "checks", "models", "embed", "predict", "train", "evaluate"}
    assert not {f"virnucpro.commands.{name}" for name in commands} & set(modules)
    assert not {"pydantic", "numpy", "rich"} & set(modules) or words == ["statsu"]


def test_a_command_that_only_looks_loads_what_looking_needs(tmp_path, proteins):
    out = tmp_path / "out"
    assert run("embed", proteins, "-o", out, "--devices", "cpu", "--workers", "1").code == 0
    code, modules = loaded_by("status", out)
    assert code == 0
    assert not {"structlog", "numpy", "h5py", "prometheus_client", "virnucpro.settings"} & set(modules)


@pytest.mark.parametrize("columns", [50, 60, 80, 120])
def test_the_list_of_commands_is_the_same_loaded_or_not(columns):
    def text(asked):
        return CliRunner().invoke(virnucpro.cli.command_line(asked), ["--help"], terminal_width=columns).output

    assert text(None) == text("--help") == text("status") == text("models")


def test_a_mistyped_command_gets_the_same_hint_as_ever():
    done = virnucpro_command("statsu", "out")
    assert done.returncode == 2
    assert "No such command 'statsu'. Did you mean 'status'?" in done.stderr


def test_a_command_after_two_hyphens_runs(tmp_path):
    done = run("--", "status", tmp_path / "none")
    assert done.code == 65
    assert "is not a folder" in done.err


@pytest.mark.parametrize(("words", "promised_s"), [(["--help"], 0.1), (["status"], 0.3)])
def test_help_and_status_start_within_three_times_the_processor_time_they_promise(
    tmp_path, proteins, words, promised_s
):
    if words == ["status"]:
        words = ["status", tmp_path / "out"]
        assert run("embed", proteins, "-o", words[1], "--devices", "cpu", "--workers", "1").code == 0
    seconds = []
    for _ in range(4):  # the first one may compile
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert virnucpro_command(*words).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    print(f"virnucpro {words[0]}: {min(seconds):.3f} s of processor time, promised {promised_s} s")
    assert min(seconds) <= 3 * promised_s


def test_embed_verify_and_again(tmp_path, proteins):
    out = tmp_path / "out folder"
    done = run("embed", proteins, "-o", out, "--devices", "cpu", "--workers", "2")
    assert done.code == 0, done.err
    assert "bundled demonstration encoder virnucpro-tiny-protein" in done.err
    assert f"40 of 40 sequences -> {out / 'embeddings.h5'}" in done.out
    with read_embeddings(out) as embeddings:
        assert len(embeddings) == 40
    done = run("verify", out)
    assert (done.code, done.out) == (0, f"{out}: complete and intact: 40 of 40 sequences\n")
    done = run("embed", proteins, "-o", out, "--devices", "cpu")
    assert done.code == 0
    assert "already complete, 40 sequences; nothing was computed" in done.out
    done = run("embed", proteins, "-o", out, "--devices", "cpu", "--max-residues", "99")
    assert done.code == 78
    assert "max_residues was 1022, now 99" in done.err


@pytest.mark.slow
@pytest.mark.long
def test_a_sharded_result_is_read_verified_continued_and_refused_in_another_form(tmp_path, proteins):
    out, options = tmp_path / "out", ("--devices", "cpu", "--workers", "1")
    done = run("embed", proteins, "-o", out, "--result-form", "sharded", *options)
    assert done.code == 0, done.err
    assert f"40 of 40 sequences -> {out / 'embeddings'}\n" in done.out
    done = run("embed", proteins, "-o", tmp_path / "single", *options)
    assert done.code == 0, done.err
    with read_embeddings(out) as sharded, read_embeddings(tmp_path / "single") as single:
        assert tuple(sharded.ids) == single.ids
        assert sharded.to_numpy().tobytes() == single.to_numpy().tobytes()
    done = run("verify", out)
    assert (done.code, done.out) == (0, f"{out}: complete and intact: 40 of 40 sequences\n")
    done = run("embed", proteins, "-o", out, *options)
    assert (done.code, "already complete, 40 sequences" in done.out) == (0, True)
    done = run("embed", proteins, "-o", out, "--result-form", "single", *options)
    assert done.code == 78
    assert "result_form was 'sharded', now 'single'" in done.err
    (out / "embeddings" / "ids.index").unlink()
    done = run("verify", out)
    assert (done.code, "embeddings/ids.index: is missing" in done.err) == (65, True)
    done = run("embed", proteins, "-o", out, "--result-form", "many", *options)
    assert done.code == 2


def test_json_on_standard_output_is_the_outcome_and_nothing_else(tmp_path, proteins):
    done = run("embed", proteins, "-o", tmp_path / "out", "--devices", "cpu", "--json")
    outcome = json.loads(done.out)
    assert (outcome["state"], outcome["records"], outcome["rows"], outcome["missing"]) == ("complete", 40, 40, 0)
    assert outcome["ranks"][0]["state"] == "complete"
    done = run("verify", tmp_path / "out", "--json")
    assert json.loads(done.out) == {
        "state": "complete",
        "records": 40,
        "rows": 40,
        "skipped": 0,
        "problems": [],
        "notes": [],
    }


@pytest.mark.slow
@pytest.mark.long
def test_verify_finds_one_flipped_bit_and_a_missing_folder(tmp_path, proteins):
    out = tmp_path / "out"
    run("embed", proteins, "-o", out, "--devices", "cpu")
    data = bytearray((out / "embeddings.h5").read_bytes())
    data[len(data) // 2] ^= 1
    (out / "embeddings.h5").write_bytes(data)
    done = run("verify", out)
    assert done.code == 65
    assert "embeddings.h5: damaged: its sha256 is not the one that run.json recorded" in done.err
    (tmp_path / "empty").mkdir()
    done = run("verify", tmp_path / "empty")
    assert (done.code, "empty: holds no run" in done.err) == (65, True)
    done = run("verify", tmp_path / "nothing")
    assert done.code == 65
    assert "is not a folder" in done.err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--model", "esm2_t6_8M"], 78, "unknown model 'esm2_t6_8M'"),
        (["--devices", "5"], 78, "there is no GPU 5"),
        (["--devices", "gpu"], 78, "choose auto, auto:N, cpu, or a list such as 0,1"),
        (["--precision", "fp8"], 2, "'fp8' is not one of 'auto', 'fp32', 'bf16', 'fp16'"),
        (["--log-level", "loud"], 2, "'loud' is not one of 'DEBUG'"),
        (["--workers", "-1"], 2, "--workers"),
        (["--long", "cut"], 2, "--long"),
        (["--gaps", "keep"], 2, "--gaps"),
        (["--stop", "y"], 2, "--stop"),
        (["--on-bad-record", "drop"], 2, "--on-bad-record"),
    ],
)
def test_settings_that_cannot_work_are_refused_in_a_sentence(tmp_path, proteins, options, code, message):
    done = run("embed", proteins, "-o", tmp_path / "out", "--devices", "cpu", *options)
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err


def test_a_long_sequence_is_an_error_when_that_is_asked_for(tmp_path):
    fasta = tmp_path / "long.fasta"
    fasta.write_text(">short\nMKV\n>long\n" + "MKVA" * 10 + "\n")
    arguments = ("embed", fasta, "-o", tmp_path / "out", "--devices", "cpu", "--max-residues", "20")
    done = run(*arguments, "--long", "error")
    assert done.code == 65
    assert f"{fasta}:3: 40 residues, more than --max-residues 20 (long): raise --max-residues" in done.err
    done = run(*arguments, "--long", "truncate")
    assert done.code == 0
    assert "1 truncated to the residue limit" in done.out


def test_index_checks_the_input_and_says_what_it_holds(tmp_path, proteins):
    done = run("index", proteins, "-o", tmp_path / "proteins.index")
    assert done.code == 0
    assert "40 sequences of 1 file(s)" in done.out
    (tmp_path / "bad.fasta").write_text(">a\nMK1\n")
    done = run("index", tmp_path / "bad.fasta", "-o", tmp_path / "bad.index")
    assert done.code == 65
    assert f"{tmp_path / 'bad.fasta'}:2: " in done.err
    assert not (tmp_path / "bad.index").exists()


def test_models_list_says_whether_weights_are_here_with_the_path_in_one_piece(tmp_path):
    weights = tmp_path / "-".join(["weights"] * 30) / "esm2_t12_35M_UR50D.pt"
    weights.parent.mkdir()
    weights.touch()
    done = virnucpro_command("models", "list", TORCH_HOME=str(tmp_path), VIRNUCPRO_WEIGHTS=str(weights.parent))
    assert done.returncode == 0
    lines = {line.split()[0]: line for line in done.stdout.splitlines() if line}
    assert "bundled" in lines["virnucpro-tiny-protein"]
    assert classifiers_table()[0].worth in done.stdout
    for name in ("esm2_t6_8M_UR50D", "esm2_t33_650M_UR50D", "esm2_t48_15B_UR50D"):
        assert "absent" in lines[name]
    assert f"\n  {weights}\n" in done.stdout


def test_a_file_that_may_not_be_read_is_bad_input_and_not_a_usage_error(tmp_path, proteins):
    proteins.chmod(0)
    command = ["embed", proteins, "-o", tmp_path / "out", "--devices", "cpu"]
    if os.geteuid() == 0:  # root reads everything, unless it gives that up
        os.chown(proteins, 65534, 65534)
        drop = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", "--inh-caps", "-all"]
        done = subprocess.run(
            [*drop, sys.executable, "-m", "virnucpro", *map(str, command)], capture_output=True, text=True, check=False
        )
    else:
        done = virnucpro_command(*command)
    assert done.returncode == 65, done.stderr
    assert f"{proteins}: Permission denied: " in done.stderr


@pytest.mark.slow
def test_a_closed_standard_error_does_not_disturb_the_run(tmp_path, proteins):
    command = [
        sys.executable,
        "-m",
        "virnucpro",
        "embed",
        str(proteins),
        "-o",
        str(tmp_path / "out"),
        "--devices",
        "cpu",
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stderr=full, stdout=subprocess.DEVNULL, timeout=120, check=False)
    assert done.returncode == 0
    assert virnucpro_command("verify", tmp_path / "out").returncode == 0


@pytest.fixture
def genome_fasta(tmp_path):
    random = np.random.default_rng(0)
    records = [(f"c{number}", "".join(random.choice(list("ACGT"), size=size))) for number, size in enumerate(SIZES_NT)]
    path = tmp_path / "dna.fa"
    path.write_text("".join(f">{name}\n{letters.lower()}\n" for name, letters in records) + f">copy\n{records[3][1]}\n")
    return path, records


SIZES_NT = [300, 500, 500, 1, 7000, 41, 500, 2]


def test_dna_is_embedded_uncut_by_the_bundled_dna_model(tmp_path, genome_fasta):
    path, records = genome_fasta
    out = tmp_path / "out"
    done = run("embed", path, "-o", out, "--model", "virnucpro-tiny-dna", "--json")
    assert done.code == 0, done.err
    model, tokenizer = load_dnabert_s("virnucpro-tiny-dna", "cpu")
    with read_embeddings(out) as rows:
        assert list(rows) == [name for name, _ in records] + ["copy"]
        np.testing.assert_array_equal(rows["copy"], rows["c3"])
        for name, letters in records:
            input_ids, lengths = tokenizer.encode([letters])
            starts = torch.tensor([0, *lengths], dtype=torch.int32)
            alone = model(torch.from_numpy(input_ids), starts, lengths.tolist())[0]
            np.testing.assert_allclose(rows[name], alone.numpy(), atol=1e-5, err_msg=name)
    settings = json.loads((out / "run.json").read_text())["settings"]
    assert settings["letters_per_token"] == 4.6
    assert run("verify", out).code == 0


def test_proteins_for_a_dna_model_are_refused_by_name(tmp_path, proteins):
    done = run("embed", proteins, "-o", tmp_path / "out", "--model", "virnucpro-tiny-dna")
    assert done.code == 65
    assert "stands for no nucleotide of DNA" in done.err
    assert str(proteins) in done.err


def test_dna_for_a_protein_model_is_warned_of(tmp_path, genome_fasta):
    path, _ = genome_fasta
    path.write_text(">long\n" + "ACGT" * 50 + "\n")
    done = run("embed", path, "-o", tmp_path / "out")
    assert done.code == 0
    assert "input.looks_like_dna" in done.err


def test_models_list_says_what_each_takes():
    done = run("models", "list")
    takes = dict(re.findall(r"^(\S+) +(DNA|protein) ", done.out, re.MULTILINE))
    assert takes.keys() == MODELS.keys()
    assert (takes["virnucpro-tiny-dna"], takes["dnabert-s"]) == ("DNA", "DNA")
    assert (takes["virnucpro-tiny-protein"], takes["esm2_t6_8M_UR50D"]) == ("protein", "protein")


@pytest.mark.parametrize(("runner", "module"), [("ray", "ray"), ("dask://slurm", "distributed")])
def test_a_runner_whose_package_is_absent_is_refused_before_a_server_starts(tmp_path, monkeypatch, runner, module):
    import importlib.util

    from virnucpro.commands import running

    find = importlib.util.find_spec
    monkeypatch.setattr(running, "find_spec", lambda name: None if name == module else find(name))
    (tmp_path / "in.fasta").write_text(">a\nACGT\n")
    done = run("predict", tmp_path / "in.fasta", "-o", tmp_path / "out", "--runner", runner)
    assert done.code == 78
    assert f"needs the package {runner.partition(':')[0]}: pip install" in done.err
    assert not (tmp_path / "out").exists()
