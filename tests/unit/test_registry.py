"""Where weights are found, and that a download leaves a whole file or none; the servers are real, on 127.0.0.1."""

from __future__ import annotations

import hashlib
import http.server
import io
import multiprocessing
import os
import socket
import struct
import subprocess
import sys
import threading
import urllib.request
from contextlib import nullcontext
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from safetensors.torch import load_file, save

from virnucpro.choices import DEFAULT_PROTEIN_MODEL
from virnucpro.errors import UnknownModelError, WeightsError
from virnucpro.models.download import _WebRedirects, download_weights
from virnucpro.models.registry import MODELS, locate_weights, models_table, resolve_model, weights_folders

NAME = "esm2_t6_8M_UR50D"


def _checkpoint_bytes():
    buffer = io.BytesIO()
    torch.save({"weight": torch.arange(200_000)}, buffer)
    return buffer.getvalue()


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one good file and several kinds of bad one."""

    body = _checkpoint_bytes()
    bodies: ClassVar = {"/page.pt": b"<html>log in first</html>"}
    redirects: ClassVar = {"/onwards.pt": "/there.pt", "/by_ftp.pt": "ftp://127.0.0.1/there.pt"}

    def do_GET(self):
        if self.path == "/absent.pt":
            self.send_error(404)
            return
        body = self.bodies.get(self.path, self.body)
        if self.path.startswith("/tagged"):
            self._send_tagged()
            return
        if self.path in self.redirects:
            self.send_response(302)
            self.send_header("Location", self.redirects[self.path])
            self.end_headers()
            return
        self.send_response(200)
        if not self.path.startswith("/unsized"):
            self.send_header("Content-Length", "abc" if self.path == "/wordy.pt" else str(len(body)))
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if self.path == "/short.pt" else body)

    etag = '"first"'
    cut_after: int | None = None
    asked: list = []  # noqa: RUF012  what this test's requests asked for

    def _send_tagged(self):
        """Honours Range and If-Range; closes the connection after *cut_after* bytes of an answer."""
        asked, condition = self.headers["Range"], self.headers["If-Range"]
        Handler.asked.append((asked, condition))
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and condition == self.etag else 0
        if start >= len(self.body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(self.body) - start))
        self.send_header("ETag", self.etag)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        self.end_headers()
        end = len(self.body) if self.cut_after is None else min(len(self.body), start + self.cut_after)
        self.wfile.write(self.body[start:end])

    def log_message(self, *arguments):
        """Stay silent."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    """Nothing of this machine's own weights or proxies."""
    monkeypatch.delenv("VIRNUCPRO_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture(scope="module")
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}"
        http_server.shutdown()
        thread.join()


def _register(monkeypatch, url, sha256=None):
    monkeypatch.setitem(MODELS, NAME, replace(MODELS[NAME], source=url, sha256=sha256))


def test_importing_the_registry_imports_neither_torch_nor_esm():
    code = "import sys, virnucpro.models.registry; print(sorted({'torch', 'esm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("name", [name for name in MODELS if name.startswith("esm2_")])
def test_depth_of_a_published_model_is_the_one_in_its_name(name):
    spec = MODELS[name]
    assert spec.num_layers == int(name.split("_")[1].removeprefix("t"))
    assert spec.hidden_dim % (2 * spec.attention_heads) == 0
    assert spec.source == f"https://dl.fbaipublicfiles.com/fair-esm/models/{name}.pt"
    millions = float(name.split("_")[2].rstrip("MB")) * (1000 if "B_" in name else 1)
    assert spec.num_parameters / 1e6 == pytest.approx(millions, rel=0.1)


def test_there_are_seven_published_models_and_the_default_is_bundled():
    assert sum(not spec.is_bundled for spec in MODELS.values()) == 7
    assert MODELS[DEFAULT_PROTEIN_MODEL].is_bundled


def test_unknown_name_is_an_error_that_puts_the_nearest_name_first():
    with pytest.raises(UnknownModelError, match="choose one of esm2_t33_650M_UR50D") as caught:
        resolve_model("esm2_t33_650M")
    assert set(caught.value.known) == set(MODELS)


def test_weights_are_looked_for_in_the_given_folder_then_the_variable_then_torch_hub(tmp_path, monkeypatch):
    given, variable, hub = tmp_path / "given", tmp_path / "variable", tmp_path / "torch" / "hub" / "checkpoints"
    monkeypatch.setenv("VIRNUCPRO_WEIGHTS", str(variable))
    assert weights_folders(given) == [given, variable, hub]
    for folder in (hub, variable, given):
        folder.mkdir(parents=True)
        (folder / f"{NAME}.pt").write_bytes(folder.name.encode())
        found = resolve_model(NAME, weights_dir=given)
        assert found.weights_path == folder / f"{NAME}.pt"
        assert found.weights_sha256 == hashlib.sha256(folder.name.encode()).hexdigest()
        assert (found.name, found.hidden_dim) == (NAME, 320)


def test_torch_hubs_folder_is_the_one_that_torch_itself_names(monkeypatch):
    for settings in ({"TORCH_HOME": "~/weights"}, {"XDG_CACHE_HOME": "/cache"}, {}):
        for variable in ("TORCH_HOME", "XDG_CACHE_HOME"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in settings.items():
            monkeypatch.setenv(variable, value)
        assert str(weights_folders()[-1]) == f"{torch.hub.get_dir()}/checkpoints"


def test_path_to_a_checkpoint_needs_no_entry_in_the_registry(tmp_path):
    path = tmp_path / "fine_tuned.pt"
    torch.save({"layers.0.self_attn.rot_emb.inv_freq": torch.zeros(1)}, path)
    found = resolve_model(str(path))
    assert (found.name, found.weights_path, found.hidden_dim) == ("fine_tuned", path, 0)
    assert found.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_path_that_does_not_exist_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WeightsError, match=r"there is no file .*nothing\.pt"):
        resolve_model(str(tmp_path / "nothing.pt"))


def test_locating_never_downloads(tmp_path, server, monkeypatch):
    _register(monkeypatch, f"{server}/{NAME}.pt")
    with pytest.raises(WeightsError, match=rf"absent: fetch {server}/{NAME}\.pt and put it into one of {tmp_path}"):
        locate_weights(NAME, weights_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_absent_weights_are_downloaded_once_to_the_first_folder(tmp_path, server, monkeypatch):
    _register(monkeypatch, f"{server}/{NAME}.pt")
    reports = []
    folder = tmp_path / "made" / "on the way"
    found = resolve_model(NAME, weights_dir=folder, on_download=lambda done, total: reports.append((done, total)))
    assert found.weights_path.read_bytes() == Handler.body
    assert found.weights_sha256 == hashlib.sha256(Handler.body).hexdigest()
    assert reports[0] == (0, len(Handler.body))
    assert reports[-1] == (len(Handler.body), len(Handler.body))
    assert [path.name for path in folder.iterdir()] == [f"{NAME}.pt"]
    assert resolve_model(NAME, weights_dir=folder, on_download=pytest.fail) == found


def test_folder_that_cannot_be_made_is_passed_over(tmp_path, server, monkeypatch):
    _register(monkeypatch, f"{server}/{NAME}.pt")
    (tmp_path / "file").write_text("not a folder")
    found = resolve_model(NAME, weights_dir=tmp_path / "file" / "weights")
    assert found.weights_path.parent == tmp_path / "torch" / "hub" / "checkpoints"


def test_server_that_does_not_say_the_length_is_read_to_its_end(tmp_path, server):
    totals = set()
    download_weights("m", f"{server}/unsized.pt", tmp_path / "m.pt", on_progress=lambda _, total: totals.add(total))
    assert (tmp_path / "m.pt").read_bytes() == Handler.body
    assert totals == {None}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("short.pt", "stopped after"),
        ("absent.pt", "answers 404 Not Found"),
        ("page.pt", "is no PyTorch checkpoint or safetensors"),
        ("wordy.pt", "announces a length of 'abc'"),
        ("by_ftp.pt", r"leads to ftp://127\.0\.0\.1/there\.pt, which is not followed"),
    ],
)
def test_failed_download_names_url_file_and_folder_and_leaves_nothing(tmp_path, server, path, message):
    with pytest.raises(WeightsError, match=message) as caught:
        download_weights("m", f"{server}/{path}", tmp_path / "m.pt")
    assert f"{server}/{path}" in str(caught.value)
    assert f"put it into {tmp_path} as m.pt" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_redirect_is_followed_on_the_web_and_never_from_https_to_http(tmp_path, server):
    download_weights("m", f"{server}/onwards.pt", tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == Handler.body
    redirects = _WebRedirects("m", "fetch it elsewhere")
    request = urllib.request.Request("https://127.0.0.1/m.pt")
    assert redirects.redirect_request(request, None, 302, "", {}, "https://127.0.0.2/m.pt") is not None
    with pytest.raises(WeightsError, match="which is not followed"):
        redirects.redirect_request(request, None, 302, "", {}, f"{server}/m.pt")


def test_download_with_another_digest_than_registered_is_refused(tmp_path, server, monkeypatch):
    _register(monkeypatch, f"{server}/{NAME}.pt", sha256="0" * 64)
    with pytest.raises(WeightsError, match=f"instead of {'0' * 64}: nothing was kept"):
        resolve_model(NAME, weights_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_file_with_another_digest_than_registered_is_refused(tmp_path, monkeypatch):
    _register(monkeypatch, "http://127.0.0.1:9/x.pt", sha256="0" * 64)
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "x.pt").write_bytes(b"other")
    with pytest.raises(WeightsError, match="remove it, so that it is fetched again"):
        resolve_model(NAME, weights_dir=tmp_path)


def test_without_a_network_the_error_says_what_to_put_where(tmp_path, monkeypatch):
    with socket.socket() as bound:  # a port that nobody listens on while we hold it
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/{NAME}.pt"
        _register(monkeypatch, url)
        with pytest.raises(WeightsError, match=r"cannot be reached \(.*refused") as caught:
            resolve_model(NAME, weights_dir=tmp_path)
    assert url in str(caught.value)
    assert f"put it into {tmp_path} as {NAME}.pt" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def safetensors_bytes(header_bytes=None):
    data = save({"weight": torch.arange(20_000)}, metadata={"format": "pt"})
    return data if header_bytes is None else struct.pack("<Q", header_bytes) + data[8:]


@pytest.mark.parametrize("name", ["model.safetensors", "unsized.safetensors"])
def test_safetensors_are_downloaded(tmp_path, server, monkeypatch, name):
    monkeypatch.setitem(Handler.bodies, f"/{name}", safetensors_bytes())
    download_weights("m", f"{server}/{name}", tmp_path / "m.safetensors")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["weight"], torch.arange(20_000))


NO_WEIGHTS = {
    "a page in JSON": b'{"error": "log in first"}',
    "a page in HTML": b"<!DOCTYPE html><html>",
    "a pointer": b"version https://git-lfs.github.com/spec/v1",
    "a header longer than the file": safetensors_bytes(len(safetensors_bytes()) - 7),
    "a header of no text": safetensors_bytes(0),
    "a header that is not JSON": struct.pack("<Q", 100) + b"[" * 1000,
    "three bytes": b"no.",
}


@pytest.mark.parametrize(
    ("what", "prefix"),
    # a header is compared with the file's length where the server states it
    [*((what, "") for what in NO_WEIGHTS), *((what, "unsized_") for what in NO_WEIGHTS if "longer" not in what)],
)
def test_what_is_no_file_of_weights_is_refused_by_its_first_bytes(tmp_path, server, monkeypatch, what, prefix):
    url = f"/{prefix}model.safetensors"
    monkeypatch.setitem(Handler.bodies, url, NO_WEIGHTS[what])
    with pytest.raises(WeightsError, match="is no PyTorch checkpoint or safetensors: fetch it elsewhere"):
        download_weights("m", f"{server}{url}", tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_header_longer_than_safetensors_itself_allows_is_refused_whatever_the_length(tmp_path, server, monkeypatch):
    for length, is_taken in ((100_000_000, True), (100_000_001, False)):
        monkeypatch.setitem(Handler.bodies, "/unsized.safetensors", safetensors_bytes(length))
        with nullcontext() if is_taken else pytest.raises(WeightsError, match="is no PyTorch checkpoint"):
            download_weights("m", f"{server}/unsized.safetensors", tmp_path / "m.safetensors")
        assert [path.name for path in tmp_path.iterdir()] == ["m.safetensors"] * is_taken
        (tmp_path / "m.safetensors").unlink(missing_ok=True)


def test_processes_that_download_at_once_leave_one_whole_file(tmp_path, server):
    context = multiprocessing.get_context("spawn")
    arguments = ("m", f"{server}/m.pt", tmp_path / "m.pt")
    processes = [context.Process(target=download_weights, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]
    assert (tmp_path / "m.pt").read_bytes() == Handler.body


@pytest.fixture
def tagged(server, monkeypatch):
    """The URL of a file that a server sends with an ETag."""
    monkeypatch.setattr(Handler, "asked", [])
    monkeypatch.setattr(Handler, "cut_after", None)
    return f"{server}/tagged.pt"


def cut_off(url, folder, monkeypatch, after_bytes):
    """Fetch *url* from a server that closes the connection after so many bytes."""
    monkeypatch.setattr(Handler, "cut_after", after_bytes)
    with pytest.raises(WeightsError, match="stopped after"):
        download_weights("m", url, folder / "m.pt")
    assert not (folder / "m.pt").exists()
    monkeypatch.setattr(Handler, "cut_after", None)


def test_a_download_that_broke_off_is_continued_where_it_was(tmp_path, tagged, monkeypatch):
    for _ in range(3):
        cut_off(tagged, tmp_path, monkeypatch, 300_000)
    reports = []
    sha256 = download_weights("m", tagged, tmp_path / "m.pt", on_progress=lambda done, _: reports.append(done))
    assert (tmp_path / "m.pt").read_bytes() == Handler.body
    assert sha256 == hashlib.sha256(Handler.body).hexdigest()
    assert [asked for asked, _ in Handler.asked] == [None, "bytes=300000-", "bytes=600000-", "bytes=900000-"]
    assert {condition for _, condition in Handler.asked[1:]} == {Handler.etag}
    assert reports[0] == 900_000
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_first_bytes_that_are_too_few_to_be_recognised_are_not_kept(tmp_path, tagged, monkeypatch):
    monkeypatch.setattr(Handler, "body", safetensors_bytes())
    cut_off(tagged, tmp_path, monkeypatch, 8)
    assert list(tmp_path.iterdir()) == []
    cut_off(tagged, tmp_path, monkeypatch, 9)
    download_weights("m", tagged, tmp_path / "m.pt")
    assert Handler.asked[-1] == ("bytes=9-", Handler.etag)
    assert (tmp_path / "m.pt").read_bytes() == Handler.body


def test_a_file_that_changed_on_the_server_is_fetched_from_its_beginning(tmp_path, tagged, monkeypatch):
    cut_off(tagged, tmp_path, monkeypatch, 300_000)
    monkeypatch.setattr(Handler, "etag", '"second"')
    monkeypatch.setattr(Handler, "body", Handler.body[:-1] + b"!")
    download_weights("m", tagged, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == Handler.body
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_a_partial_file_of_another_address_is_not_continued(tmp_path, tagged, monkeypatch):
    cut_off(tagged, tmp_path, monkeypatch, 300_000)
    download_weights("m", f"{tagged}?other", tmp_path / "m.pt")
    assert Handler.asked[-1] == (None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_a_partial_file_longer_than_the_servers_is_thrown_away(tmp_path, tagged, monkeypatch):
    cut_off(tagged, tmp_path, monkeypatch, 300_000)
    (partial,) = tmp_path.iterdir()
    partial.write_bytes(bytes(len(Handler.body) + 5))
    download_weights("m", tagged, tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == Handler.body


def test_a_damaged_partial_file_is_found_by_the_digest_and_thrown_away(tmp_path, tagged, monkeypatch):
    sha256 = hashlib.sha256(Handler.body).hexdigest()
    cut_off(tagged, tmp_path, monkeypatch, 300_000)
    (partial,) = tmp_path.iterdir()
    partial.write_bytes(bytes([partial.read_bytes()[0] ^ 1]) + partial.read_bytes()[1:])
    with pytest.raises(WeightsError, match=r"instead of .*: nothing was kept"):
        download_weights("m", tagged, tmp_path / "m.pt", sha256=sha256)
    assert list(tmp_path.iterdir()) == []
    assert download_weights("m", tagged, tmp_path / "m.pt", sha256=sha256) == sha256


@pytest.mark.parametrize("name", ["tagged.pt", "unsized.pt"])
def test_a_server_that_sends_too_much_is_refused(tmp_path, server, tagged, name):
    with pytest.raises(WeightsError, match="more than the 1,000,000 bytes"):
        download_weights("m", f"{server}/{name}", tmp_path / "m.pt", max_bytes=1_000_000)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_download_is_continued_by_the_next_process(tmp_path, tagged):
    code = """if True:
        import pathlib, sys
        from virnucpro.models.download import download_weights
        download_weights("m", sys.argv[1], pathlib.Path(sys.argv[2]))"""
    environment = {**os.environ, "VIRNUCPRO_FAILPOINT": "*/file.write:2:kill"}
    arguments = [sys.executable, "-c", code, tagged, str(tmp_path / "m.pt")]
    done = subprocess.run(arguments, env=environment, timeout=60, check=False)
    assert done.returncode == -9
    assert subprocess.run(arguments, timeout=60, check=False).returncode == 0
    assert Handler.asked[-1] == (f"bytes={1 << 20}-", Handler.etag)
    assert (tmp_path / "m.pt").read_bytes() == Handler.body
    assert [path.name for path in tmp_path.iterdir()] == ["m.pt"]


def test_table_of_models_says_where_the_weights_are(tmp_path):
    (tmp_path / f"{NAME}.pt").write_bytes(b"x")
    rows = {spec.name: path for spec, path in models_table(weights_dir=tmp_path)}
    assert list(rows) == list(MODELS)
    assert rows[NAME] == tmp_path / f"{NAME}.pt"
    assert rows["esm2_t48_15B_UR50D"] is None


def test_weights_that_hugging_face_calls_like_all_others_are_fetched_into_a_folder_of_their_own(
    tmp_path, server, monkeypatch
):
    monkeypatch.setitem(
        MODELS, "dnabert-s", replace(MODELS["dnabert-s"], source=f"{server}/resolve/main/pytorch_model.bin")
    )
    found = resolve_model("dnabert-s", weights_dir=tmp_path)
    assert found.weights_path == tmp_path / "dnabert-s" / "pytorch_model.bin"
    assert found.weights_path.read_bytes() == Handler.body
    with pytest.raises(WeightsError, match=r"as dnabert-s/pytorch_model\.bin"):
        locate_weights("dnabert-s", weights_dir=tmp_path / "elsewhere")


def test_no_two_models_have_one_file(tmp_path):
    hub = "https://huggingface.co/somebody"
    names = ("model.safetensors", "pytorch_model.bin", "model-00001-of-00002.safetensors", "esm2_t6_8M_UR50D.pt")
    made_up = [
        replace(MODELS["dnabert-s"], name=model, source=f"{hub}/{model}/resolve/main/{name}?download=true")
        for model in ("one", "other")
        for name in names
    ]
    specs = [spec for spec in MODELS.values() if not spec.is_bundled]
    assert len({spec.file_name for spec in [*specs, *made_up]}) == len(specs) + len(made_up)
    assert {spec.file_name for spec in specs} == {
        "dnabert-s/pytorch_model.bin",
        *(f"{name}.pt" for name in MODELS if name.startswith("esm2_")),
    }
    assert [spec.file_name for spec in made_up[:2]] == ["one/model.safetensors", "one/pytorch_model.bin"]


def test_a_configuration_beside_dna_weights_is_part_of_their_identity(tmp_path):
    weights = tmp_path / "pytorch_model.bin"
    torch.save({"bert.encoder.layer.0.mlp.gated_layers.weight": torch.zeros(1)}, weights)
    assert resolve_model(weights).config_sha256 == ""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    first = resolve_model(weights).config_sha256
    (tmp_path / "config.json").write_text('{"model_type": "bert", "num_attention_heads": 2}')
    assert len(first) == 64
    assert resolve_model(weights).config_sha256 not in {"", first}
