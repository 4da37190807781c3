"""What is wrong with a job, and which rank of it."""

from megatron_allattn.config.errors import UsageError
from megatron_allattn.parallel.layout import Layout


class Mismatch(UsageError):
    """A step would fail or hang, or a weight is not where it must be; the message names ranks and places."""


def describe(layout: Layout, rank: int) -> str:
    """A rank and where it stands: rank 5 (tensor 1, data 1, stage 0), without axes of one."""
    axes = [
        (layout.tensor_size, f"tensor {layout.tensor_rank(rank)}"),
        (layout.data_size, f"data {layout.data_rank(rank)}"),
        (layout.pipeline_size, f"stage {layout.pipeline_rank(rank)}"),
    ]
    where = [text for size, text in axes if size > 1]
    return f"rank {rank}" + (f" ({', '.join(where)})" if where else "")
