"""Rank arithmetic: which rank sits where in the data × tensor × pipeline grid. Pure Python, no process groups.

Ranks are numbered as in Megatron-LM and in DeepSpeed's `PipeModelDataParallelTopology`: the tensor axis is the fastest
(neighbouring ranks, the fastest links), then the data axis, then the pipeline axis:

    rank = (pipeline · data_size + data) · tensor_size + tensor
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The grid of a run. Sizes are numbers of ranks along each axis; their product is the world size."""

    tensor_size: int = 1
    data_size: int = 1
    pipeline_size: int = 1

    def __post_init__(self) -> None:
        for name in ("tensor_size", "data_size", "pipeline_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: a grid axis holds at least one rank")

    @classmethod
    def from_world(cls, world_size: int, tensor_size: int, pipeline_size: int) -> "Layout":
        """The layout that uses all `world_size` ranks. Raises ValueError when the sizes do not divide it."""
        model_size = tensor_size * pipeline_size
        if world_size % model_size:
            raise ValueError(
                f"world size {world_size}: it must be a multiple of tensor × pipeline = {tensor_size} × {pipeline_size}"
            )
        return cls(tensor_size=tensor_size, data_size=world_size // model_size, pipeline_size=pipeline_size)

    @property
    def world_size(self) -> int:
        return self.tensor_size * self.data_size * self.pipeline_size

    def rank(self, *, tensor: int = 0, data: int = 0, pipeline: int = 0) -> int:
        """The global rank at these coordinates."""
        return (pipeline * self.data_size + data) * self.tensor_size + tensor

    def tensor_rank(self, rank: int) -> int:
        return rank % self.tensor_size

    def data_rank(self, rank: int) -> int:
        return rank // self.tensor_size % self.data_size

    def pipeline_rank(self, rank: int) -> int:
        return rank // (self.tensor_size * self.data_size)

    def tensor_group(self, rank: int) -> list[int]:
        """The ranks that hold the shards of one replica's layers, in shard order; `rank` is among them."""
        data, pipeline = self.data_rank(rank), self.pipeline_rank(rank)
        return [self.rank(tensor=tensor, data=data, pipeline=pipeline) for tensor in range(self.tensor_size)]

    def data_group(self, rank: int) -> list[int]:
        """The ranks that hold the same shard of different replicas, in data order; `rank` is among them."""
        tensor, pipeline = self.tensor_rank(rank), self.pipeline_rank(rank)
        return [self.rank(tensor=tensor, data=data, pipeline=pipeline) for data in range(self.data_size)]

    def pipeline_group(self, rank: int) -> list[int]:
        """The ranks that hold the same shard of the stages of one replica, in stage order; `rank` is among them."""
        tensor, data = self.tensor_rank(rank), self.data_rank(rank)
        return [self.rank(tensor=tensor, data=data, pipeline=stage) for stage in range(self.pipeline_size)]

    def ends_group(self, rank: int) -> list[int]:
        """The first and the last stage of `rank`'s pipeline, which may share a vocabulary, or `rank` between them."""
        pipeline = self.pipeline_group(rank)
        ends = sorted({pipeline[0], pipeline[-1]})
        return ends if rank in ends else [rank]


def padded_share(total: int, parts: int) -> int:
    """Rows per rank when `total` rows are dealt to `parts` ranks in equal blocks, the last ones padded."""
    return -(-total // parts)


def streams_of(data_rank: int, slot: int, *, data_size: int, micro_batch_size: int, num_slots: int) -> range:
    """The global streams that a data rank works on in one micro-batch slot.

    Streams are dealt in contiguous blocks: first over data ranks, then over a rank's micro-batch slots, so that stream
    s is stream s at every layout.
    """
    per_rank = micro_batch_size * num_slots
    if not (0 <= data_rank < data_size and 0 <= slot < num_slots):
        raise ValueError(f"data rank {data_rank} of {data_size}, slot {slot} of {num_slots}: out of range")
    first = data_rank * per_rank + slot * micro_batch_size
    return range(first, first + micro_batch_size)
