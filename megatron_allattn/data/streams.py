"""Training streams: the corpus cut into equal contiguous pieces that are all read in step, M tokens at a time.

Stream s is tokens[s·T : (s+1)·T] with T = len(tokens) // num_streams; the tail that does not divide is dropped. The
block at position p has the inputs stream[p : p+M] and the targets stream[p+1 : p+M+1]. A stream is a global identity: a
rank asks for the streams it owns, and one position, the same for all streams and ranks, is the whole state, so it loads
at any layout.

At the end (position >= T − M) the paper's code starts anew at a random offset below the block length with cleared
caches. The offset of restart r (counted from 0) is the first 8 bytes, big-endian, of
SHA-256("megatron_allattn stream restart SEED r") modulo M.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_allattn.config.errors import usage_error
from megatron_allattn.data.indexed import Tokens


@dataclass(frozen=True)
class Block:
    """One step's tokens of some streams: inputs and targets [streams, M] int64.

    position: where in every stream it starts; restarted: the streams jumped back before this block, so caches of
    earlier blocks must be cleared first.
    """

    inputs: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]
    position: int
    restarted: bool = False


class TokenStreams:
    """Endless blocks of `num_streams` streams over `tokens` [n]; see the module's docstring.

    position: where in every stream the next block starts · restarts: how often the streams have started anew ·
    stream_length: T · dropped_tokens: the tail in no stream.
    """

    def __init__(self, tokens: Tokens, num_streams: int, seq_length: int, seed: int) -> None:
        """`num_streams` is the global batch size, `seq_length` the block length M. UsageError if T < 2·M."""
        self.tokens, self.num_streams, self.seq_length, self.seed = tokens, num_streams, seq_length, seed
        self.stream_length = len(tokens) // num_streams
        self.dropped_tokens = len(tokens) - num_streams * self.stream_length
        self.position = 0
        self.restarts = 0
        self._restarted = False
        if self.stream_length < 2 * seq_length:
            rule = (
                f"cuts {len(tokens)} training tokens into streams of {self.stream_length}, which is less than "
                f"2 x --seq-length {seq_length} = {2 * seq_length}"
            )
            raise usage_error("--global-batch-size", num_streams, rule, "lower either flag or give more text")

    def next_block(self, streams: Sequence[int]) -> Block:
        """The next block of the given global streams, and move on: one call a step, with all streams of the rank."""
        inputs, targets = _gather(self.tokens, self.stream_length, streams, self.position, self.seq_length)
        block = Block(inputs, targets, self.position, self._restarted)
        self.advance()
        return block

    def advance(self) -> None:
        """Move on by a block without reading it."""
        self.position += self.seq_length
        self._restarted = self.position >= self.stream_length - self.seq_length
        if self._restarted:
            self.position = restart_offset(self.seed, self.restarts, self.seq_length)
            self.restarts += 1

    def state(self) -> dict[str, Any]:
        """The state as JSON, together with what it is valid for."""
        return {
            "position": self.position,
            "restarts": self.restarts,
            "restarted": self._restarted,
            **self._identity(),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken; UsageError if it was taken with other streams, and nothing changes."""
        flags = {"num_streams": "--global-batch-size", "seq_length": "--seq-length", "seed": "--seed"}
        for key, value in self._identity().items():
            if state.get(key) != value:
                rule = f"the run being resumed had {state.get(key)}"
                fix = "resume with the same data, --global-batch-size, --seq-length and --seed"
                raise usage_error(flags.get(key, "training tokens in a stream"), value, rule, fix)
        position, restarts, restarted = state.get("position"), state.get("restarts"), state.get("restarted")
        if type(position) is not int or not 0 <= position < self.stream_length - self.seq_length:
            raise usage_error(
                "data position", position, f"is not in a stream of {self.stream_length}", "the state is bad"
            )
        if type(restarts) is not int or restarts < 0 or type(restarted) is not bool:
            raise usage_error("data restarts", restarts, "is not a count with a flag", "the state is bad")
        self.position, self.restarts, self._restarted = position, restarts, restarted

    def _identity(self) -> dict[str, int]:
        return {
            "num_streams": self.num_streams,
            "seq_length": self.seq_length,
            "seed": self.seed,
            "stream_length": self.stream_length,
        }


def restart_offset(seed: int, restarts: int, seq_length: int) -> int:
    """Where the streams go on after restart number `restarts` (from 0): 0 … seq_length − 1."""
    digest = hashlib.sha256(f"megatron_allattn stream restart {seed} {restarts}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % seq_length


def num_evaluation_blocks(num_tokens: int, num_streams: int, seq_length: int) -> int:
    """Whole blocks, each with its targets, in every one of `num_streams` streams; the rest of a stream is not read."""
    return max(0, (num_tokens // num_streams - 1) // seq_length)


def evaluation_blocks(
    tokens: Tokens, num_streams: int, seq_length: int, max_blocks: int = 0, streams: Sequence[int] | None = None
) -> Iterator[Block]:
    """Whole blocks from the start of the streams to their end, once, without a restart.

    `max_blocks`: at most so many (0: all) · `streams`: the global streams wanted (None: all).
    """
    count = num_evaluation_blocks(len(tokens), num_streams, seq_length)
    wanted = range(num_streams) if streams is None else streams
    for index in range(min(count, max_blocks) if max_blocks else count):
        position = index * seq_length
        inputs, targets = _gather(tokens, len(tokens) // num_streams, wanted, position, seq_length)
        yield Block(inputs, targets, position)


def _gather(
    tokens: Tokens, stream_length: int, streams: Sequence[int], position: int, seq_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Inputs and targets [streams, seq_length] at `position` of each stream."""
    count = len(tokens) // stream_length
    for stream in streams:
        assert 0 <= stream < count, f"no stream {stream}"
    assert position + seq_length < stream_length, f"no block at {position}"
    every = np.asarray(tokens)[: count * stream_length].reshape(count, stream_length)
    block = every[:, position : position + seq_length + 1]
    if isinstance(streams, range) and streams.step == 1:
        block = block[streams.start : streams.stop]  # a view: nothing is copied but into what is returned
    else:
        block = block[list(streams)]
    return block[:, :-1].astype(np.int64, order="C"), block[:, 1:].astype(np.int64, order="C")
