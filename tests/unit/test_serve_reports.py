"""``virnucpro serve-reports``: reports and what they link to, by real requests, and nothing else by hostile ones."""

from __future__ import annotations

import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing, suppress
from urllib.parse import quote

import pytest

from tests.made_prediction import Contig, make_prediction
from virnucpro import bounded_server
from virnucpro.report import served_files, server
from virnucpro.report.prediction.page import write_report
from virnucpro.report.served_files import ServedFiles, address_of
from virnucpro.report.server import POLICY, ReportServer
from virnucpro.run_layout import TrainingLayout
from virnucpro.store.manifest import TrainingManifest

STRANGE = "a #1 100%25 (\u00fc\u4e2d) 'q' \"b\" <i>&?;:+=~!*[x] b.html"


def prediction(folder):
    return write_report(make_prediction(folder, [Contig("c", 12_000, 0, 1), Contig("d", 900)], missing_frames=1).layout)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A root with a run of a strange name, and beside the root what must never leave it."""
    place = tmp_path_factory.mktemp("place")
    root = place / "root"
    prediction(root / "runs" / STRANGE)
    prediction(place / "outside")
    (place / "root-of-others").symlink_to(place / "outside")
    (root / "notes.txt").write_text("secret")
    (root / "other").mkdir()
    (root / "other" / "report.html").write_text("secret of no run")
    (root / "embedding").mkdir()
    (root / "linked").symlink_to(place / "outside")
    prediction(root / "links")
    for name, target in {
        "report.html": "../notes.txt",
        "contigs.tsv": "/etc/passwd",
        "viral.fasta": "/dev/zero",
    }.items():
        (root / "links" / name).unlink(missing_ok=True)
        (root / "links" / name).symlink_to(target)
    (root / "links" / "tracks.bedgraph").unlink()
    os.mkfifo(root / "links" / "tracks.bedgraph")
    return place


class Served:
    """A server that is running, and what it answers."""

    def __init__(self, *roots, host="127.0.0.1"):
        self.server = ReportServer(ServedFiles(roots), host, 0)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()

    def connect(self):
        connection = http.client.HTTPConnection(*self.server.server_address[:2], timeout=20)
        connection.connect()
        return connection

    def ask(self, path, method="GET", **headers):
        """Return status, headers and body; the path goes out as it is."""
        with closing(self.connect()) as connection:
            connection.putrequest(method, path, skip_host="Host" in headers)
            for name, value in headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()

    def raw(self, request: bytes) -> bytes:
        with socket.create_connection(self.server.server_address[:2], timeout=20) as connection:
            connection.sendall(request)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture(scope="module")
def served(place):
    with closing(Served(place / "root")) as found:
        yield found


def test_a_report_in_a_folder_of_a_strange_name_comes_with_every_file_that_it_links_to(served, place):
    folder = place / "root" / "runs" / STRANGE
    address = address_of(folder / "report.html")
    assert re.fullmatch(r"[\w/.~%-]+", address, re.ASCII)
    status, headers, page = served.ask(address)
    assert (status, page) == (200, (folder / "report.html").read_bytes())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    links = re.findall(rb'data-file="([^"]+)"', page)
    assert len(links) >= 5
    for name in map(bytes.decode, links):
        status, headers, content = served.ask(f"{address.removesuffix('report.html')}{name}")
        assert (status, content) == (200, (folder / name).read_bytes()), name
        assert ("Content-Disposition" in headers) == (name != "run.json")
    status, headers, content = served.ask(address, "HEAD")
    assert (status, content, int(headers["Content-Length"])) == (200, b"", len(page))


def test_every_answer_has_a_policy_without_origin_and_network(served, place):
    report = address_of(place / "root" / "runs" / STRANGE / "report.html")
    for path, method in [(report, "GET"), ("/", "GET"), ("/none", "GET"), (report, "POST"), (report, "HEAD")]:
        headers = served.ask(path, method)[1]
        assert headers["Content-Security-Policy"] == POLICY
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert "allow-same-origin" not in POLICY
    assert "default-src 'none'" in POLICY


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "X"])
def test_only_get_and_head_are_allowed(served, place, method):
    before = sorted(place.rglob("*"))
    status, headers, _ = served.ask(address_of(place / "root" / "links" / "run.json"), method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert sorted(place.rglob("*")) == before


HOSTILE = {
    "another file": "{root}/notes.txt",
    "a report of no run": "{root}/other/report.html",
    "a folder": "{root}/runs/",
    "a folder of a run": "{run}",
    "a run's own files": "{run}/work/status.json",
    "a file of a run that no report links to": "{run}/metrics.prom",
    "a folder beside the root": "{place}/outside/report.html",
    "a root's name with more after it": "{place}/root-of-others/report.html",
    "dots": "{root}/../outside/report.html",
    "encoded dots": "{root}/%2e%2e/outside/report.html",
    "dots encoded twice": "{root}/%252e%252e/outside/report.html",
    "an encoded slash": "{root}%2f..%2foutside%2freport.html",
    "a single dot": "{run}/./report.html",
    "two slashes": "{run}//report.html",
    "backslashes": "{root}\\..\\..\\outside\\report.html",
    "overlong dots": "{root}/%c0%ae%c0%ae/outside/report.html",
    "a linked folder": "{root}/linked/report.html",
    "a linked report": "{root}/links/report.html",
    "a linked file": "{root}/links/contigs.tsv",
    "a linked device": "{root}/links/viral.fasta",
    "a pipe": "{root}/links/tracks.bedgraph",
    "NUL": "{run}/report.html%00",
    "NUL in the middle": "{root}%00/../outside/report.html",
    "the password file": "/etc/passwd",
    "dots to the password file": "/../../../../../../etc/passwd",
    "the process": "/proc/self/environ",
    "a relative path": "report.html",
    "another scheme": "http://127.0.0.1{run}/report.html",
    "a fragment": "{run}/report.html%23",
    "names that are too long": "{root}/" + "x" * 5000 + "/report.html",
    "many folders": "{root}" + "/x" * 8000 + "/report.html",
}


@pytest.mark.parametrize("path", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_path_gives_nothing(served, place, path):
    root = str(place / "root")
    run = quote(f"{root}/runs/{STRANGE}")
    assert served.ask(f"{run}/report.html")[0] == 200
    status, headers, content = served.ask(path.format(root=root, run=run, place=place))
    assert (status, content) == (404, b"There is no report here.\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


@pytest.mark.parametrize(
    ("manifest", "why"),
    [("{}", "no checksum"), ("[" * 100_000, "no JSON"), (None, "none"), ("x" * 2_000_000, "too large")],
    ids=lambda value: value if value is None or len(value) < 20 else "",
)
def test_a_folder_whose_manifest_is_not_ours_is_no_run(tmp_path, monkeypatch, manifest, why):
    report = prediction(tmp_path / "run")
    monkeypatch.setattr(served_files, "MOST_MANIFEST_BYTES", 1_000_000)
    with closing(Served(tmp_path)) as served:
        assert served.ask(address_of(report))[0] == 200
        (tmp_path / "run" / "run.json").unlink()
        if manifest is not None:
            (tmp_path / "run" / "run.json").write_text(manifest)
        assert served.ask(address_of(report))[0] == 404, why


def test_a_training_gives_its_card_and_no_page_that_lies_beside_it(tmp_path):
    layout = TrainingLayout(tmp_path / "mine")
    layout.output_dir.mkdir()
    TrainingManifest.begin("0123", inputs=[], settings={}, devices=[]).write(layout.manifest)
    layout.card_text.write_text("# mine <script>")
    (tmp_path / "mine" / "report.html").write_text("not of a training")
    with closing(Served(tmp_path)) as served:
        status, headers, content = served.ask(address_of(tmp_path / "mine" / "MODEL_CARD.md"))
        assert (status, content) == (200, b"# mine <script>")
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        assert served.ask(address_of(tmp_path / "mine" / "report.html"))[0] == 404


def test_the_list_has_the_newest_report_first_and_its_links_lead_there(tmp_path):
    names = ["b:c", "a & <i>", STRANGE]
    for age, name in enumerate(names):
        os.utime(prediction(tmp_path / "deep" / "er" / name), (0, 2_000_000_000 - age))
    prediction(tmp_path / "deep" / "er" / "b:c" / "within a run")
    (tmp_path / "again").symlink_to(tmp_path / "deep")
    with closing(Served(tmp_path)) as served:
        status, _, page = served.ask("/")
        assert status == 200
        links = re.findall(rb'<a href="\.(/[^"]+)"', page)
        assert [link.decode() for link in links] == [quote(f"{tmp_path}/deep/er/{name}/report.html") for name in names]
        assert all(served.ask(link.decode())[0] == 200 for link in links)
    assert b"<i>" not in page
    assert b"2033-05-18" in page


def test_a_list_of_too_many_folders_says_that_it_is_not_whole(tmp_path, monkeypatch):
    for number in range(4):
        prediction(tmp_path / str(number))
    for most, lines, note in ((3, 2, 1), (9, 4, 0)):
        monkeypatch.setattr(served_files, "MOST_FOLDERS", most)
        with closing(Served(tmp_path)) as served:
            page = served.ask("/")[2]
        assert (page.count(b"report.html</a>"), page.count(b"too many folders")) == (lines, note)


def test_on_loopback_only_names_of_this_machine_are_answered(served):
    """A page elsewhere may let its own name lead here; the browser then sends that name."""
    for host, status in {"localhost:4201": 200, "127.0.0.1": 200, "[::1]:1": 200, "evil.example": 421, "": 421}.items():
        assert served.ask("/", Host=host)[0] == status, host
    with closing(Served(host="0.0.0.0")) as reachable:  # behind a proxy in another container
        assert reachable.ask("/", Host="reports:4201")[0] == 200


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET / HTTP/1.1\r\nA: " + b"x" * 70_000 + b"\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + (b"A: " + b"x" * 60_000 + b"\r\n") * 50 + b"\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 200 + b"\r\n", b"431"),
        (b"\x16\x03\x01\x02\x00 tls?\r\n\r\n", b"400"),
        (b"GET / HTTP/2.0\r\n\r\n", b"505"),
        (b"GET /health\r\n\r\n", b"421"),
    ],
    ids=["a long line", "a long header", "large headers", "many headers", "no HTTP", "a later HTTP", "an early HTTP"],
)
def test_a_request_that_is_too_large_or_none_is_refused(served, request_bytes, status):
    try:
        assert status in served.raw(request_bytes).split(b"\n")[0]
    except ConnectionError:  # closed before all of it was sent
        assert len(request_bytes) > bounded_server.MOST_REQUEST_BYTES
    assert served.ask("/health")[2] == b"ok\n"


def test_a_client_that_sends_slowly_is_cut_off_and_keeps_no_place(place, monkeypatch):
    monkeypatch.setattr(bounded_server, "REQUEST_S", 0.5)
    with closing(Served(place / "root")) as served, closing(served.connect()) as slow:
        began_s = time.monotonic()
        with suppress(OSError):  # a byte now and then would go on for ever
            for _ in range(200):
                slow.sock.sendall(b"G")
                time.sleep(0.05)
        assert 0.4 < time.monotonic() - began_s < 5


def test_a_client_that_does_not_take_its_answer_is_cut_off(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "CHUNK_S", 0.3)
    report = prediction(tmp_path / "run")
    with (tmp_path / "run" / "contigs.tsv").open("ab") as table:
        table.truncate(200 << 20)
    with closing(Served(tmp_path)) as served, closing(served.connect()) as slow:
        slow.request("GET", address_of(report.with_name("contigs.tsv")))
        answer = slow.getresponse()
        time.sleep(1.5)
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()


def test_idle_clients_in_all_places_make_room(place, monkeypatch):
    monkeypatch.setattr(server, "MOST_CLIENTS", 3)
    with closing(Served(place / "root")) as served, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(closing(served.connect()))
        assert served.ask("/health")[0] == 200


def command(*arguments, **environ):
    ours = {name: value for name, value in os.environ.items() if not name.startswith("VIRNUCPRO_")}
    return subprocess.Popen(
        [sys.executable, "-m", "virnucpro", "serve-reports", *map(str, arguments)],
        env={**ours, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 143), (signal.SIGINT, 130)])
def test_the_command_serves_the_roots_of_the_environment_until_a_signal(place, number, code):
    roots = os.pathsep.join(map(str, [place / "root", "", place / "outside"]))
    process = command("--port", "0", VIRNUCPRO_DATA_ROOTS=roots)
    line = process.stdout.readline()
    assert line.startswith(f"reports under {place / 'root'}, {place / 'outside'}: ")
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/$", line)[1])
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.request("GET", address_of(place / "outside" / "report.html"))
        assert connection.getresponse().status == 200
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in errors
    assert "password" not in errors


def test_the_command_refuses_no_folders_an_empty_name_a_missing_folder_and_a_port_in_use(place, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        asked = {
            "name at least one, or set VIRNUCPRO_DATA_ROOTS": (2, command(VIRNUCPRO_DATA_ROOTS=":")),
            "the name of the folder is empty": (2, command("")),
            "none is not a folder": (78, command(tmp_path / "none")),
            "Address already in use": (78, command(place / "root", "--port", port)),
        }
        for message, (code, process) in asked.items():
            errors = process.communicate(timeout=60)[1]
            assert process.returncode == code, errors
            assert message in " ".join(errors.replace("\u2502", " ").split()), errors
