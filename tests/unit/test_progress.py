"""What a person sees while weights are fetched."""

from __future__ import annotations

from virnucpro.telemetry.show.progress import DownloadProgress


def test_quiet_is_quiet(capsys):
    with DownloadProgress(is_quiet=True) as download:
        download.advance(10, 100)
    assert capsys.readouterr() == ("", "")


def test_a_download_of_unknown_size_is_shown_without_an_error(capsys):
    with DownloadProgress() as download:
        download.advance(0, None)
        download.advance(1 << 20, None)
    assert "weights" in capsys.readouterr().err
