"""Blocks read ahead by a thread are those read in turn, and the streams' state is that of what was handed out."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from megatron_allattn.data.prefetch import DEPTH, Prefetcher
from megatron_allattn.data.streams import Block, TokenStreams

TOKENS = np.arange(4 * 30, dtype=np.uint8)  # 4 streams of 30 tokens, which start anew after 4 blocks of 6
OWN = [1, 3]


def streams_of(tokens=TOKENS) -> TokenStreams:
    return TokenStreams(tokens, 4, 6, seed=5)


def same(one: Block, other: Block) -> bool:
    return bool(
        (one.inputs == other.inputs).all() and (one.targets == other.targets).all() and one.restarted == other.restarted
    )


def test_blocks_and_states_are_those_without_a_thread() -> None:
    plain, streams = streams_of(), streams_of()
    with Prefetcher(streams, OWN) as batches:
        for _ in range(20):
            assert same(batches.next_block(), plain.next_block(OWN))
            assert streams.state() == plain.state()
    assert plain.restarts > 2


@pytest.mark.parametrize("done", [1, 4, 9])
def test_a_run_goes_on_from_the_state_of_the_last_block(done: int) -> None:
    first, plain = streams_of(), streams_of()
    with Prefetcher(first, OWN) as batches:
        for _ in range(done):
            batches.next_block()
            plain.next_block(OWN)
    resumed = streams_of()
    resumed.load_state(first.state())
    with Prefetcher(resumed, OWN) as batches:
        for _ in range(6):
            assert same(batches.next_block(), plain.next_block(OWN))


class Counting:
    """Tokens that count how often they are read, once for a block, and cannot be read after a while."""

    def __init__(self, good: int) -> None:
        self.reads, self.good = 0, good

    def __len__(self) -> int:
        return len(TOKENS)

    def __array__(self, dtype: None = None, copy: None = None) -> np.ndarray:
        self.reads += 1
        if self.reads > self.good:
            raise OSError("the disk is gone")
        return TOKENS


def test_it_reads_no_more_than_a_few_blocks_ahead() -> None:
    tokens = Counting(1000)
    with Prefetcher(streams_of(tokens), OWN) as batches:
        batches.next_block()
        deadline = time.monotonic() + 20
        while tokens.reads < (full := DEPTH + 2) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.02)
        assert tokens.reads == full  # the block that was taken, those that wait, and one that waits for room


def test_an_error_surfaces_at_its_block_every_time() -> None:
    plain = streams_of()
    with Prefetcher(streams := streams_of(Counting(3)), OWN) as batches:
        for _ in range(3):
            assert same(batches.next_block(), plain.next_block(OWN))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                batches.next_block()
        assert streams.state() == plain.state()


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_the_thread_ends_with_the_block_of_code(taken: int) -> None:
    with Prefetcher(streams_of(), OWN) as batches:
        assert "prefetch" in [thread.name for thread in threading.enumerate()]
        for _ in range(taken):
            batches.next_block()
    assert "prefetch" not in [thread.name for thread in threading.enumerate()]


def test_the_thread_prepares_blocks() -> None:
    names = []

    def prepare(block: Block) -> Block:
        names.append(threading.current_thread().name)
        return replace(block, inputs=-block.inputs)

    with Prefetcher(streams_of(), OWN, prepare) as batches:
        assert (batches.next_block().inputs == -streams_of().next_block(OWN).inputs).all()
    assert set(names) == {"prefetch"}
