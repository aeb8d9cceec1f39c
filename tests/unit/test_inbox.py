"""An inbox: what has arrived whole, what is left and why, and what is remembered of each content."""

from __future__ import annotations

import hashlib
import json
import os
import time

import pytest

from virnucpro.errors import BadInputError, ResultError
from virnucpro.store import inbox
from virnucpro.store.inbox import FASTA_PATTERNS, FileChangedError, InboxMemory, content_of, scan_inbox

RECORD = b">a\nACGT\n"


def scan(folder, *, idle_s=0.0, subfolders=False, is_allowed=lambda _: False, patterns=FASTA_PATTERNS):
    """Return the names that can be taken, in order, and those that cannot with their reasons."""
    arrived, left = scan_inbox(folder, patterns=patterns, idle_s=idle_s, subfolders=subfolders, is_allowed=is_allowed)
    names = [str(file.path.relative_to(folder)) for file in arrived]
    return names, {str(file.path.relative_to(folder)): file.reason for file in left}


def arrived_file(folder, name="a.fasta", content=RECORD):
    (folder / name).write_bytes(content)
    arrived, _ = scan_inbox(folder, patterns=[name], idle_s=0, subfolders=False, is_allowed=lambda _: False)
    (file,) = arrived
    return file


def test_files_are_found_by_name_in_any_case_the_oldest_first(tmp_path):
    for name in ("c.fasta", "B.FA", "a.fna.gz", "with space.fasta", "line\nbreak.fa", "notes.txt", "reads.fastq"):
        (tmp_path / name).write_bytes(RECORD)
        time.sleep(0.01)  # so that their change times differ
    names, left = scan(tmp_path)
    assert names == ["c.fasta", "B.FA", "a.fna.gz", "with space.fasta", "line\nbreak.fa"]
    assert not left


def test_what_is_no_whole_regular_file_is_left_with_its_reason(tmp_path):
    secret = tmp_path / "secret.fasta"
    secret.write_bytes(RECORD)
    folder = tmp_path / "inbox"
    folder.mkdir()
    (folder / ".hidden.fasta").write_bytes(RECORD)
    (folder / "copy.fasta.part").write_bytes(RECORD)
    (folder / "empty.fasta").touch()
    os.mkfifo(folder / "fifo.fasta")
    (folder / "out.fasta").symlink_to(secret)
    (folder / "dangling.fasta").symlink_to(folder / "nowhere.fasta")
    (folder / "loop.fasta").symlink_to("loop.fasta")
    (folder / "folder.fasta").mkdir()
    (folder / "folder of others.fasta").symlink_to(tmp_path)
    (folder / os.fsdecode(b"bad\xff.fasta")).write_bytes(RECORD)
    names, left = scan(folder, patterns=["*.fasta", "*.part"])
    assert names == []
    assert left == {
        ".hidden.fasta": "hidden, or named like a file that is not yet whole",
        "copy.fasta.part": "hidden, or named like a file that is not yet whole",
        "empty.fasta": "empty",
        "fifo.fasta": "not a regular file",
        "out.fasta": "a link to somewhere that flows may not read",
        "dangling.fasta": "cannot be read: No such file or directory",
        "loop.fasta": left["loop.fasta"],
        "folder of others.fasta": "a link to somewhere that flows may not read",
        "bad\udcff.fasta": "its name is not UTF-8",
    }
    assert left["loop.fasta"].startswith("cannot be read: ")


def test_links_are_taken_where_their_target_may_be_read(tmp_path):
    folder, elsewhere = tmp_path / "inbox", tmp_path / "elsewhere.fasta"
    folder.mkdir()
    elsewhere.write_bytes(RECORD)
    (folder / "link.fasta").symlink_to(elsewhere)
    asked = []
    names, left = scan(folder, is_allowed=lambda path: asked.append(path) or True)
    assert (names, left) == (["link.fasta"], {})
    assert asked == [str(elsewhere)]


def test_a_file_that_changed_lately_is_left_for_later_whatever_time_its_writer_gave_it(tmp_path):
    (tmp_path / "a.fasta").write_bytes(RECORD)
    os.utime(tmp_path / "a.fasta", (0, 0))  # as cp -p and rsync -t do
    assert scan(tmp_path, idle_s=3600) == ([], {"a.fasta": inbox.STILL_CHANGING})
    os.utime(tmp_path / "a.fasta", (2**31, 2**31))  # from a machine whose clock is wrong
    assert scan(tmp_path) == (["a.fasta"], {})


def test_folders_in_the_inbox_are_looked_into_when_asked_but_links_to_folders_never(tmp_path):
    (tmp_path / "run 7").mkdir()
    (tmp_path / "run 7" / "a.fasta").write_bytes(RECORD)
    (tmp_path / ".trash").mkdir()
    (tmp_path / ".trash" / "b.fasta").write_bytes(RECORD)
    (tmp_path / "again").symlink_to(tmp_path)
    assert scan(tmp_path) == ([], {})
    assert scan(tmp_path, subfolders=True) == (["run 7/a.fasta"], {})


def test_an_inbox_that_is_not_there_is_an_error_that_says_so(tmp_path):
    with pytest.raises(BadInputError, match=r"nowhere.*No such file or directory"):
        scan(tmp_path / "nowhere")


def test_the_content_is_that_of_the_scan_or_none(tmp_path):
    file = arrived_file(tmp_path)
    assert content_of(file) == hashlib.sha256(RECORD).hexdigest()
    replacement = tmp_path / "new"
    for change in (
        lambda: file.path.write_bytes(b">a\nACGG\n"),
        lambda: replacement.write_bytes(RECORD) and replacement.replace(file.path),
        file.path.unlink,
        lambda: os.mkfifo(file.path),
        lambda: file.path.unlink() or file.path.symlink_to("/etc/passwd"),
    ):
        change()
        with pytest.raises(FileChangedError):
            content_of(file)


def test_a_file_that_is_replaced_while_it_is_read_is_not_taken(tmp_path, monkeypatch):
    file = arrived_file(tmp_path)

    def digest_while_somebody_replaces(content, name):
        (tmp_path / "new").write_bytes(b">b\nTTTT\n")
        (tmp_path / "new").replace(file.path)
        return hashlib.new(name, content.read())

    monkeypatch.setattr(inbox.hashlib, "file_digest", digest_while_somebody_replaces)
    with pytest.raises(FileChangedError):
        content_of(file)


def test_a_claim_lasts_and_is_made_before_the_run_is_known(tmp_path):
    memory = InboxMemory(tmp_path)
    assert memory.claim_of("ab" * 32) is None
    claim = memory.take(tmp_path / "in" / "a sample/../x: 1.fasta", "ab" * 32)
    assert claim.flow_run_id is None
    assert claim.run_folder == "x_1.fasta-" + "ab" * 8
    assert InboxMemory(tmp_path).claim_of("ab" * 32) == claim  # a scan that was killed here asks with the same key
    noted = memory.note_run(claim, "some run")
    assert InboxMemory(tmp_path).claim_of("ab" * 32) == noted
    assert noted.key == claim.key
    (tmp_path / ".inbox" / f"{'ab' * 32}.json").unlink()
    assert memory.take(tmp_path / "a.fasta", "ab" * 32).key != claim.key  # new again, and a new run


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"sha256": 1}'])
def test_a_claim_that_cannot_be_read_is_never_taken_for_none(tmp_path, content):
    memory = InboxMemory(tmp_path)
    memory.take(tmp_path / "a.fasta", "ab" * 32)
    (tmp_path / ".inbox" / f"{'ab' * 32}.json").write_bytes(content)
    with pytest.raises(ResultError, match="not a readable claim"):
        memory.claim_of("ab" * 32)


def test_a_file_is_read_again_only_when_something_about_it_changed(tmp_path, monkeypatch):
    file = arrived_file(tmp_path)
    monkeypatch.setattr(inbox, "_RACY_NS", -1)
    memory = InboxMemory(tmp_path)
    assert memory.content_seen(file.target, file.identity) is None
    memory.note_content(file.target, file.identity, "digest")
    memory.save_contents()
    later = InboxMemory(tmp_path)
    assert later.content_seen(file.target, file.identity) == "digest"
    file.path.write_bytes(RECORD)
    (changed,) = scan_inbox(tmp_path, patterns=["a.fasta"], idle_s=0, subfolders=False, is_allowed=lambda _: False)[0]
    assert later.content_seen(changed.target, changed.identity) is None
    InboxMemory(tmp_path).save_contents()  # the file is gone from the inbox: so is its note
    assert json.loads((tmp_path / ".inbox" / "seen.json").read_bytes()) == {}


def test_a_file_that_changed_just_now_is_read_again(tmp_path):
    file = arrived_file(tmp_path)
    memory = InboxMemory(tmp_path)
    memory.note_content(file.target, file.identity, "digest")
    memory.save_contents()
    assert InboxMemory(tmp_path).content_seen(file.target, file.identity) is None


def test_a_note_of_contents_that_is_damaged_costs_reading_only(tmp_path):
    file = arrived_file(tmp_path)
    (tmp_path / ".inbox").mkdir()
    for damage in (b"", b"[1]", b"7", b'{"%s": 3}' % os.fsencode(file.target)):
        (tmp_path / ".inbox" / "seen.json").write_bytes(damage)
        assert InboxMemory(tmp_path).content_seen(file.target, file.identity) is None
