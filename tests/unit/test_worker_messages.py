"""What workers say on other hosts arrives once and in order, whatever is torn on the way."""

from __future__ import annotations

import time

from virnucpro.pipeline.work.worker_messages import MessageReader, MessageWriter
from virnucpro.telemetry.ranks import Rank
from virnucpro.telemetry.snapshot import ProcessEnd

END = ProcessEnd(
    state="failed", failure="died", reason="signal 9", exit_code=-9, starts_again=True, quarantined={7: "died"}
)


class Listener:
    def __init__(self):
        self.heard = []
        self.ranks = [Rank(rank=rank, device="cpu") for rank in range(4)]

    def assigned(self, rank, blocks):
        self.heard.append((rank, "assigned", blocks))

    def on_message(self, rank, message):
        self.heard.append((rank, "said", message))

    def ended(self, rank, end):
        self.heard.append((rank, "ended", end))


def test_everything_arrives_as_it_was_said_except_what_means_nothing_elsewhere(tmp_path):
    listener = Listener()
    with MessageWriter(tmp_path / "host-a.1.jsonl") as writer:
        writer.assigned(3, None)
        writer.on_message(3, {"kind": "heartbeat", "pid": 17})
        writer.on_message(3, {"kind": "model_loaded", "seconds": 1.5, "gpu_uuid": "GPU-1"})
        writer.on_message(3, {"kind": "durable", "runs": [[0, 4, 1]]})
        writer.ended(3, END)
    MessageReader(tmp_path, listener).read_on()
    assert listener.heard == [
        (3, "assigned", None),
        (3, "said", {"kind": "model_loaded", "seconds": 1.5}),
        (3, "said", {"kind": "durable", "runs": [[0, 4, 1]]}),
        (3, "ended", END),
    ]


def test_words_come_while_the_worker_lives_and_each_comes_once(tmp_path):
    listener = Listener()
    reader = MessageReader(tmp_path, listener)
    with MessageWriter(tmp_path / "a.jsonl") as one, MessageWriter(tmp_path / "b.jsonl") as other:
        for number in range(3):
            one.on_message(0, {"kind": "progress", "number": number})
            other.on_message(1, {"kind": "progress", "number": number})
            deadline_s = time.monotonic() + 20
            while len(listener.heard) < 2 * (number + 1):
                assert time.monotonic() < deadline_s
                reader.read_on()
    assert [message["number"] for rank, _, message in listener.heard if rank == 1] == [0, 1, 2]
    reader.read_on()
    assert len(listener.heard) == 6


def test_a_line_that_is_half_written_is_read_when_it_is_whole_and_a_torn_one_is_passed_over(tmp_path):
    listener = Listener()
    reader = MessageReader(tmp_path, listener)
    path = tmp_path / "a.jsonl"
    path.write_text('{"rank": 0, "message": {"kind"')
    reader.read_on()
    assert listener.heard == []
    with path.open("a") as file:
        file.write(': "found"}}\n{"rank": 0, "mes\n{"rank": 1, "message": {"kind": "found"}}\n')
    reader.read_on()
    assert [rank for rank, _, _ in listener.heard] == [0, 1]


def test_what_could_not_be_written_while_the_folder_was_away_comes_later(tmp_path):
    listener = Listener()
    reader = MessageReader(tmp_path / "said", listener)
    reader.read_on()
    with MessageWriter(tmp_path / "said" / "a.jsonl") as writer:
        writer.on_message(0, {"kind": "found"})
        time.sleep(1.5)
        (tmp_path / "said").mkdir()
    reader.read_on()
    assert listener.heard == [(0, "said", {"kind": "found"})]
