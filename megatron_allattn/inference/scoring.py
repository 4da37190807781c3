"""Scoring: the nats of every token of a split, each exactly once and with its full context.

T tokens give T − 1 predictions; the first token is context only. The predictions are cut into contiguous ranges, the
streams, which are read side by side as the rows of a batch and dealt over the data ranks. A prediction depends on the
Σ W tokens before it, W being the window of each layer (a layer's output at t needs its inputs back to t − W), so a
stream is preceded by an unscored overlap of that many tokens, or of as many as the split has before it: what it scores
then has the context it would have in one pass over the whole split. Number of streams, block length and layout move
the value by rounding alone (float32 and float64; in bfloat16 rounding is coarse).

Beside it stands the protocol of the paper's published code, with empty caches at the start of every stream and without
the tails of streams.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from megatron_allattn.config import UsageError
from megatron_allattn.data.indexed import Tokens
from megatron_allattn.data.streams import evaluation_blocks, num_evaluation_blocks
from megatron_allattn.engine.interface import find_spans, local_spans
from megatron_allattn.inference.reader import Reader
from megatron_allattn.kernels.registry import Attend
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.collectives import all_reduce
from megatron_allattn.parallel.groups import Group, Groups

Progress = Callable[[int, int], None]
"""Called after every block with the number of blocks this rank has done, and how many it will do."""


@dataclass(frozen=True)
class Score:
    """What the predictions of a split cost; the same on every rank.

    nats_by_id float64 [V], count_by_id int64 [V]: nats and number of the predictions of each token id · num_streams: as
    used, at most one per prediction · overlap: Σ W, the tokens that an unscored overlap has where the split has them ·
    lost_context: predictions with less than their full context · nats: float64 [T − 1] in order, if asked for.
    """

    nats_by_id: npt.NDArray[np.float64]
    count_by_id: npt.NDArray[np.int64]
    num_streams: int
    overlap: int
    lost_context: int
    nats: npt.NDArray[np.float64] | None

    @property
    def total_nats(self) -> float:
        return float(self.nats_by_id.sum())

    @property
    def predictions(self) -> int:
        return int(self.count_by_id.sum())

    @property
    def mean_nats(self) -> float:
        """Nats per prediction."""
        return self.total_nats / self.predictions


@dataclass(frozen=True)
class CodeProtocol:
    """What the paper's code would report: mean nats, over how many predictions; dropped: predictions left out."""

    mean_nats: float
    predictions: int
    dropped: int
    num_streams: int
    block_length: int


@dataclass(frozen=True)
class Stream:
    """One range of a split: positions [start, first) are read only, the tokens after [first, stop) are predicted."""

    start: int
    first: int
    stop: int

    def lost_context(self, reach: int) -> int:
        """Predictions that see fewer than the `reach` tokens before them, though the split has them."""
        return max(0, min(self.stop, self.start + reach) - self.first) if self.start else 0


def cut_streams(num_predictions: int, num_streams: int, overlap: int) -> list[Stream]:
    """Contiguous ranges, equal but for one prediction, that cover 0 … num_predictions − 1, with their overlaps."""
    num_streams = min(num_streams, num_predictions)
    bounds = [num_predictions * index // num_streams for index in range(num_streams + 1)]
    return [Stream(max(0, first - overlap), first, stop) for first, stop in itertools.pairwise(bounds)]


def score(
    network: Network,
    groups: Groups,
    tokens: Tokens,
    *,
    num_streams: int,
    block_length: int,
    device: torch.device,
    overlap: bool = True,
    keep_nats: bool = False,
    attend: Attend | None = None,
    progress: Progress | None = None,
) -> Score:
    """Score every token of `tokens` [T] (an array or a memory map, ids below the vocabulary size) but the first.

    network: at its weights, on `device`, in any precision · num_streams: rows over all data ranks together ·
    overlap: without it streams start with empty caches, which is faster and loses context · keep_nats: return every
    prediction's nats too, in memory for all of the split · attend: see `Reader`. Sums are float64. Memory follows
    num_streams, block length and the spans, not the split. Collective over all ranks, with one reduction, at the end.
    UsageError if T < 2.
    """
    assert num_streams > 0 and block_length > 0, f"{num_streams} streams, blocks of {block_length}"
    if len(tokens) < 2:
        raise UsageError(f"split of {len(tokens)} token(s): nothing to predict; scoring needs at least 2 tokens")
    spans = find_spans(network, local_spans(network))
    reach = sum(spans.windows)
    streams = cut_streams(len(tokens) - 1, num_streams, reach if overlap else 0)
    own = streams[_share(len(streams), groups.data)]
    reader = Reader(network, spans, len(own), attend)
    nats_by_id, count_by_id = np.zeros(network.vocab_size), np.zeros(network.vocab_size)
    by_position = np.zeros(len(tokens) - 1 if keep_nats else 0)
    num_blocks = _num_blocks(own, block_length)
    for index in range(num_blocks):
        inputs, targets, positions = _read(tokens, own, index * block_length, block_length)
        nats, scored = _nats(reader, inputs, targets), positions >= 0
        np.add.at(nats_by_id, targets[scored], nats[scored])
        np.add.at(count_by_id, targets[scored], 1.0)
        if keep_nats:
            by_position[positions[scored]] = nats[scored]
        if progress is not None:
            progress(index + 1, num_blocks)
    nats_by_id, count_by_id, by_position = _summed([nats_by_id, count_by_id, by_position], groups.data, device)
    return Score(
        nats_by_id=nats_by_id,
        count_by_id=count_by_id.astype(np.int64),
        num_streams=len(streams),
        overlap=reach,
        lost_context=sum(stream.lost_context(reach) for stream in streams),
        nats=by_position if keep_nats else None,
    )


def code_protocol(
    network: Network,
    groups: Groups,
    tokens: Tokens,
    *,
    num_streams: int = 8,
    block_length: int,
    device: torch.device,
    attend: Attend | None = None,
    progress: Progress | None = None,
) -> CodeProtocol:
    """The mean over blocks of the mean nats of a block, as the full evaluation of the paper's code computes it.

    The tokens [T] are cut into `num_streams` equal streams, caches are empty at the start of each, and what does not
    make a whole block of every stream (with the token after it) is left out. Collective over all ranks. UsageError
    where there is no whole block.
    """
    num_blocks = num_evaluation_blocks(len(tokens), num_streams, block_length)
    if not num_blocks:
        needed = num_streams * (block_length + 1)
        rule = f"the paper's code needs {needed:,} for a block of {block_length} in each of {num_streams} streams"
        raise UsageError(f"split of {len(tokens):,} tokens: {rule}; score a longer split or leave its protocol out")
    own = range(num_streams)[_share(num_streams, groups.data)]
    reader = Reader(network, find_spans(network, local_spans(network)), len(own), attend)
    total = np.zeros(1)
    for index, block in enumerate(evaluation_blocks(tokens, num_streams, block_length, streams=own) if own else ()):
        total += _nats(reader, block.inputs, block.targets).sum()
        if progress is not None:
            progress(index + 1, num_blocks)
    (total,) = _summed([total], groups.data, device)
    predictions = num_blocks * block_length * num_streams
    return CodeProtocol(
        mean_nats=float(total[0]) / predictions,
        predictions=predictions,
        dropped=len(tokens) - 1 - predictions,
        num_streams=num_streams,
        block_length=block_length,
    )


def _nats(reader: Reader, inputs: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Nats [B, M] of the next block of every stream."""
    return reader(torch.from_numpy(inputs), torch.from_numpy(targets)).double().cpu().numpy()


def _share(count: int, group: Group) -> slice:
    """This rank's part of `count` streams, dealt in contiguous parts that differ by at most one."""
    return slice(count * group.rank // group.size, count * (group.rank + 1) // group.size)


def _num_blocks(streams: Sequence[Stream], block_length: int) -> int:
    return -(-max((stream.stop - stream.start for stream in streams), default=0) // block_length)


def _read(
    tokens: Tokens, streams: Sequence[Stream], offset: int, block_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The block at `offset` of every stream: inputs, targets, and each prediction's position, −1 where it is not scored
    (in the overlap, and after a stream's end, where padding has id 0); [B, M], the last block shorter.
    """
    longest = max(stream.stop - stream.start for stream in streams)
    shape = (len(streams), min(block_length, longest - offset))
    inputs, targets, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.full(shape, -1)
    for row, stream in enumerate(streams):
        begin = stream.start + offset
        both = tokens[begin : min(begin + shape[1], stream.stop) + 1] if begin < stream.stop else tokens[:1]
        size = len(both) - 1
        inputs[row, :size], targets[row, :size] = both[:-1], both[1:]
        unscored = min(max(0, stream.first - begin), size)
        positions[row, unscored:size] = np.arange(begin + unscored, begin + size)
    return inputs, targets, positions


def _summed(parts: list[npt.NDArray[np.float64]], group: Group, device: torch.device) -> list[npt.NDArray[np.float64]]:
    """Every array summed over the group, in one reduction."""
    joined = all_reduce(torch.from_numpy(np.concatenate(parts)).to(device), group).cpu().numpy()
    return np.split(joined, np.cumsum([len(part) for part in parts])[:-1])
