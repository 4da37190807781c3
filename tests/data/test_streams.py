"""Streams: every token once and in order until the end, restarts from the seed, and a state that is one position."""

import hashlib
import json
import random

import numpy as np
import pytest

from megatron_allattn.config.errors import UsageError
from megatron_allattn.data.streams import (
    TokenStreams,
    evaluation_blocks,
    num_evaluation_blocks,
    restart_offset,
)


def test_blocks_by_hand() -> None:
    # 23 tokens, 2 streams of 11, one token dropped; M = 4: blocks at 0 and 4; 8 >= 11 − 4, so a restart follows
    streams = TokenStreams(np.arange(23, dtype=np.uint8), num_streams=2, seq_length=4, seed=1)
    assert (streams.stream_length, streams.dropped_tokens) == (11, 1)
    first, second = streams.next_block([0, 1]), streams.next_block([1, 0])
    assert first.inputs.tolist() == [[0, 1, 2, 3], [11, 12, 13, 14]]
    assert first.targets.tolist() == [[1, 2, 3, 4], [12, 13, 14, 15]]
    assert second.inputs.tolist() == [[15, 16, 17, 18], [4, 5, 6, 7]]
    assert (first.restarted, second.restarted, streams.restarts) == (False, False, 1)
    assert first.inputs.dtype == first.targets.dtype == np.int64
    offset = streams.position
    third = streams.next_block([0])
    assert third.restarted
    assert third.inputs.tolist() == [[offset, offset + 1, offset + 2, offset + 3]]


def test_the_last_block_that_fits_is_read() -> None:
    # T = 9, M = 4: the block at 4 has its last target at 8, the stream's last token; 4 < 9 − 4, so it is read
    streams = TokenStreams(np.arange(9), num_streams=1, seq_length=4, seed=0)
    assert [streams.next_block([0]).targets[0, -1] for _ in range(2)] == [4, 8]
    assert streams.restarts == 1
    # T = 8: 4 >= 8 − 4, so after the first block the streams start anew
    streams = TokenStreams(np.arange(8), num_streams=1, seq_length=4, seed=0)
    streams.next_block([0])
    assert streams.restarts == 1


def test_nothing_is_lost_or_repeated_until_the_restart() -> None:
    chance = random.Random(5)
    for _ in range(200):
        num_streams, seq_length = chance.randint(1, 6), chance.randint(1, 9)
        size = num_streams * chance.randint(2 * seq_length, 8 * seq_length) + chance.randrange(num_streams)
        tokens = np.array([chance.randrange(60_000) for _ in range(size)], np.uint16)
        streams = TokenStreams(tokens, num_streams, seq_length, seed=chance.randrange(10**6))
        length = size // num_streams
        assert streams.dropped_tokens == size - num_streams * length
        for restart in range(3):
            start, blocks = streams.position, []
            while streams.restarts == restart:
                blocks.append(streams.next_block(range(num_streams)))
            assert [block.restarted for block in blocks] == [restart > 0] + [False] * (len(blocks) - 1)
            read = np.concatenate([block.inputs for block in blocks], axis=1)
            wanted = np.concatenate([block.targets for block in blocks], axis=1)
            for stream in range(num_streams):
                own = tokens[stream * length : (stream + 1) * length]
                end = start + read.shape[1]
                assert read[stream].tolist() == own[start:end].tolist()
                assert wanted[stream].tolist() == own[start + 1 : end + 1].tolist()
                assert (
                    end >= length - seq_length
                )  # no further whole block with its targets, or exactly at the rule's edge
                assert end + 1 <= length
            assert 0 <= streams.position < seq_length


def test_restart_offsets_follow_the_documented_rule() -> None:
    for seed, restarts, seq_length in [(1234, 0, 128), (1234, 1, 128), (7, 12, 5)]:
        digest = hashlib.sha256(f"megatron_allattn stream restart {seed} {restarts}".encode()).hexdigest()
        assert restart_offset(seed, restarts, seq_length) == int(digest[:16], 16) % seq_length
    drawn = [restart_offset(1, restarts, 8) for restarts in range(400)]
    assert set(drawn) == set(range(8))
    assert max(drawn.count(offset) for offset in range(8)) < 80  # 50 each would be even
    assert drawn != [restart_offset(2, restarts, 8) for restarts in range(400)]
    assert restart_offset(3, 3, 1) == 0


def test_every_layout_reads_the_same() -> None:
    tokens = np.arange(1000)
    whole = TokenStreams(tokens, 8, 16, seed=3)
    ranks = [TokenStreams(tokens, 8, 16, seed=3) for _ in range(4)]
    for _ in range(40):
        block = whole.next_block(range(8))
        parts = [rank.next_block([2 * index, 2 * index + 1]) for index, rank in enumerate(ranks)]
        assert np.concatenate([part.inputs for part in parts]).tolist() == block.inputs.tolist()
        assert {part.restarted for part in parts} == {block.restarted}
    assert whole.restarts > 3


@pytest.mark.parametrize("steps", [0, 1, 5, 6, 7, 8, 20])
def test_state_goes_on_where_it_was_taken(steps: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, 500)
    straight, first = TokenStreams(tokens, 4, 16, seed=9), TokenStreams(tokens, 4, 16, seed=9)
    for _ in range(steps):
        straight.next_block([0, 1, 2, 3])
        first.next_block([1])  # another share of the streams: the state is the same
    state = json.loads(json.dumps(first.state()))
    resumed = TokenStreams(tokens, 4, 16, seed=9)
    resumed.load_state(state)
    assert resumed.state() == straight.state()
    for _ in range(25):
        expected, got = straight.next_block([0, 1, 2, 3]), resumed.next_block([0, 1, 2, 3])
        assert got.inputs.tolist() == expected.inputs.tolist()
        assert got.targets.tolist() == expected.targets.tolist()
        assert got.restarted == expected.restarted


def test_the_pending_restart_is_in_the_state() -> None:
    streams = TokenStreams(np.arange(8), 1, 4, seed=0)
    assert streams.state()["restarted"] is False
    streams.next_block([0])
    state = streams.state()
    assert state == {
        "position": restart_offset(0, 0, 4),
        "restarts": 1,
        "restarted": True,
        "num_streams": 1,
        "seq_length": 4,
        "seed": 0,
        "stream_length": 8,
    }


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_streams": 5}, "--global-batch-size 4: the run being resumed had 5"),
        ({"seq_length": 8}, "--seq-length 16: the run being resumed had 8"),
        ({"seed": 1}, "--seed 9: the run being resumed had 1"),
        ({"stream_length": 126}, "stream 125: the run being resumed had 126"),
        ({"position": 109}, "data position 109: is not in a stream of 125"),
        ({"position": -1}, "data position -1"),
        ({"position": 1.0}, "data position 1.0"),
        ({"restarts": -1}, "data restarts -1"),
        ({"restarted": 1}, "data restarts 0"),
    ],
)
def test_state_of_other_streams_is_refused(change: dict[str, object], words: str) -> None:
    streams = TokenStreams(np.arange(500), 4, 16, seed=9)
    streams.next_block([0])
    before = streams.state()
    with pytest.raises(UsageError, match=words):
        streams.load_state({**before, **change})
    assert streams.state() == before


def test_too_short_text_is_refused_with_the_numbers() -> None:
    TokenStreams(np.arange(4 * 32), 4, 16, seed=0)
    with pytest.raises(UsageError) as refusal:
        TokenStreams(np.arange(4 * 32 - 1), 4, 16, seed=0)
    for word in ("--global-batch-size 4", "127 training tokens", "streams of 31", "--seq-length 16 = 32"):
        assert word in str(refusal.value)


def test_streams_that_do_not_exist() -> None:
    for stream in (-1, 2):
        with pytest.raises(AssertionError, match=f"no stream {stream}"):
            TokenStreams(np.arange(100), 2, 16, seed=0).next_block([stream])
    assert TokenStreams(np.arange(100), 2, 16, seed=0).next_block([]).inputs.shape == (0, 16)


def test_evaluation_blocks_by_hand() -> None:
    # 27 tokens, 2 streams of 13, M = 4: 12 inputs have targets, so 3 whole blocks
    tokens = np.arange(27, dtype=np.uint16)
    assert num_evaluation_blocks(27, 2, 4) == 3
    blocks = list(evaluation_blocks(tokens, 2, 4))
    assert [block.inputs[:, 0].tolist() for block in blocks] == [[0, 13], [4, 17], [8, 21]]
    assert blocks[-1].targets.tolist() == [[9, 10, 11, 12], [22, 23, 24, 25]]
    assert not any(block.restarted for block in blocks)
    assert len(list(evaluation_blocks(tokens, 2, 4, max_blocks=2))) == 2
    assert len(list(evaluation_blocks(tokens, 2, 4, max_blocks=9))) == 3
    assert [block.inputs.tolist() for block in evaluation_blocks(tokens, 2, 4, 1, streams=[1])] == [[[13, 14, 15, 16]]]


@pytest.mark.parametrize(
    ("num_tokens", "num_streams", "seq_length", "expected"),
    [(0, 2, 4, 0), (1, 2, 4, 0), (9, 2, 4, 0), (10, 2, 4, 1), (4, 1, 4, 0), (5, 1, 4, 1), (8, 1, 4, 1), (9, 1, 4, 2)],
)
def test_number_of_evaluation_blocks(num_tokens: int, num_streams: int, seq_length: int, expected: int) -> None:
    assert num_evaluation_blocks(num_tokens, num_streams, seq_length) == expected
    assert len(list(evaluation_blocks(np.arange(num_tokens), num_streams, seq_length))) == expected
