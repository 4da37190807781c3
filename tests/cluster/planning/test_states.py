"""What is held of parameters and caches: predicted = the real tensors of DeepSpeed and of our engine, to the byte."""

from itertools import product

import numpy as np
import pytest

from megatron_allattn.cluster.planning.memory import cache_bytes_of
from megatron_allattn.cluster.planning.states import states_of
from megatron_allattn.model.traffic import Place
from megatron_allattn.parallel.layout import Layout
from tests.support.held import held_by
from tests.support.pool import WorkerPools
from tests.support.trained import ADAPTIVE_TIED, BLOCK, STREAMS, TIED, VOCABULARY, Trained, deepspeed
from tests.support.trajectories import build

STEPS = 8  # caches are full


def measure(rank: int, world_size: int, case: Trained) -> tuple[dict[str, int], tuple[int, ...]]:
    """Bytes after the last backward of a step, and every layer's window in it."""
    engine = build(case.layout, VOCABULARY, case.run)
    rng = np.random.default_rng(5)
    for step in range(1, STEPS + 1):
        text = rng.integers(VOCABULARY, size=(STREAMS, BLOCK + 1))
        own = text[engine.streams.start : engine.streams.stop]
        spans = engine.spans()
        engine.forward_backward(own[:, :-1], own[:, 1:], step, spans)
        if step == STEPS:
            return held_by(engine), spans.windows
        engine.update(1e-3, step)
    raise AssertionError


def check(pools: WorkerPools, case: Trained) -> None:
    layout = Layout(tensor_size=case.layout.tensor, data_size=case.layout.data, pipeline_size=case.layout.pipeline)
    for rank, (held, windows) in enumerate(pools(layout.world_size).run(measure, case, timeout=120)):
        place = Place(case.run, VOCABULARY, layout, rank, case.parts[layout.pipeline_rank(rank)])
        states = states_of(place)
        expected = {
            "weights": states.weights,
            "optimizer": states.optimizer,
            "gradients": states.gradients,
            "caches": cache_bytes_of(place, windows),
        }
        assert held == expected, f"rank {rank}"


FAST = [
    *(Trained(deepspeed(data=2, zero=zero, optimizer="adam", accumulation=2)) for zero in range(4)),
    Trained(deepspeed(data=2, zero=2)),
    Trained(deepspeed(tensor=2, sequence=True, shard_caches=True, zero=1), ADAPTIVE_TIED),
    Trained(deepspeed(pipeline=2, accumulation=2, zero=1, dtype="bfloat16", layers=(1, 4)), TIED),
]


@pytest.mark.parametrize("case", FAST, ids=str)
def test_some_layouts(case: Trained, pools: WorkerPools) -> None:
    check(pools, case)


EIGHT = [
    *(
        Trained(deepspeed(tensor, data, zero, dtype=dtype, optimizer=optimizer, accumulation=accumulation), model)
        for (tensor, data), zero, (dtype, optimizer, accumulation, model) in product(
            ((1, 8), (2, 4), (4, 2)),
            range(4),
            (("float32", "adam", 1, TIED), ("bfloat16", "adagrad", 1, ADAPTIVE_TIED)),
        )
    ),
    *(
        Trained(
            deepspeed(
                tensor, data, zero, pipeline, accumulation=2, sequence=shared, shard_caches=shared, optimizer="adam"
            )
        )
        for (tensor, data, pipeline), zero, shared in product(
            ((2, 2, 2), (2, 1, 4), (1, 2, 4), (4, 1, 2)), (0, 1), (False, True)
        )
        if tensor > 1 or not shared
    ),
]


@pytest.mark.layouts
@pytest.mark.parametrize("case", EIGHT, ids=str)
def test_eight_processes(case: Trained, pools: WorkerPools) -> None:
    check(pools, case)
