"""The message that names durable blocks: small, and nothing is lost on the way."""

import json

from hypothesis import given
from hypothesis import strategies as st

from virnucpro.pipeline.work.worker_process import MAX_MESSAGE_BYTES
from virnucpro.telemetry.ranks import durable_messages, whole_blocks

BLOCKS = st.sets(st.integers(0, 10**9), max_size=400)


@given(blocks=BLOCKS, short=st.dictionaries(st.integers(0, 10**9), st.integers(1, 10**9), max_size=200))
def test_every_block_arrives_once_and_every_message_fits_the_pipe(blocks, short):
    messages = list(durable_messages(blocks, short=short, written_bytes=10**15))
    arrived = [block for message in messages for block in whole_blocks(message).tolist()]
    assert sorted(arrived) == sorted(blocks)
    assert dict(pair for message in messages for pair in message.get("short", [])) == short
    assert all(len(json.dumps(message).encode()) <= MAX_MESSAGE_BYTES for message in messages)
    assert sum(message.get("bytes", 0) for message in messages) == 10**15


def test_the_share_of_a_rank_is_one_run():
    (message,) = durable_messages(range(3, 100_003, 8), short={})
    assert message["runs"] == [[3, 99_995, 8]]
    assert whole_blocks(message).tolist() == list(range(3, 100_003, 8))


def test_nothing_durable_is_a_message_of_no_block():
    (message,) = durable_messages([], short={})
    assert not len(whole_blocks(message))
