"""Row 25: the folder of the logs cannot be written: a warning, and the run goes on."""

from __future__ import annotations

from tests.fakes import hash_config
from tests.faults.forked import run_forked, small_input


def test_a_log_folder_that_is_a_file_is_a_warning(tmp_path):
    fasta, out = small_input(tmp_path), tmp_path / "out"
    out.mkdir()
    (out / "logs").write_text("in the way")
    ended = run_forked(fasta, out, hash_config())
    assert ended.code == 0, ended.errors
    assert "log.unwritable" in ended.errors
    assert (out / "embeddings.h5").exists()
    assert (out / "logs").read_text() == "in the way"
