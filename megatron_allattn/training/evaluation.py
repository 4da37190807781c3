"""Evaluation during training: the mean loss of a split, read once from the start of every stream.

The split is cut into as many streams as training has, whatever the layout, and caches start empty; so the result
depends on the weights, not on where training stands. Training's own caches are not touched.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_allattn.data.indexed import Tokens
from megatron_allattn.data.streams import evaluation_blocks, num_evaluation_blocks
from megatron_allattn.engine.interface import Engine, Spans
from megatron_allattn.model.attention import Observe
from megatron_allattn.parallel.collectives import all_reduce

OBSERVED = 16


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token; tokens: how many were predicted."""

    loss: float
    tokens: int


def evaluate(
    engine: Engine,
    tokens: Tokens,
    spans: Spans,
    max_blocks: int,
    given_up: Callable[[], bool] = lambda: False,
    observe: Observe | None = None,
) -> Evaluation | None:
    """Mean loss over at most `max_blocks` blocks of every stream (0: all whole ones). Collective.

    spans: those of now. given_up: asked before every block, on all ranks; None once it says so. observe: is shown the
    attention of the last OBSERVED blocks of the batch with the first global stream, at every layout the same tokens.
    """
    training = engine.run.training
    num_streams, seq_length, batch = training.global_batch_size, training.seq_length, engine.micro_batch_size
    whole = num_evaluation_blocks(len(tokens), num_streams, seq_length)
    count = min(max_blocks, whole) if max_blocks else whole
    slots = [engine.new_evaluation_slot(batch) for _ in range(engine.num_slots)]
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    blocks = evaluation_blocks(tokens, num_streams, seq_length, count, streams=engine.streams)
    for number, block in enumerate(blocks):
        if given_up():
            return None
        for index, slot in enumerate(slots):
            rows = slice(index * batch, (index + 1) * batch)
            seen = number >= count - OBSERVED and index == engine.groups.data.rank == 0
            total += engine.evaluate_block(
                block.inputs[rows], block.targets[rows], spans, slot, observe if seen else None
            )
    predicted = count * seq_length * num_streams
    return Evaluation(all_reduce(total, engine.groups.data).item() / predicted, predicted)
