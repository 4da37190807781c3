"""Plans: order, refusals, what they are made of, and how they grow with the spans."""

from dataclasses import replace

import pytest

from megatron_allattn.cluster.planning.devices import Rate, device_named
from megatron_allattn.cluster.planning.growth import grow
from megatron_allattn.cluster.planning.links import by_link
from megatron_allattn.cluster.planning.memory import rank_memory
from megatron_allattn.cluster.planning.plan import Planner, Task, distinct
from megatron_allattn.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_allattn.model.accounting import step_traffic

MODEL = ModelConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, persistent_memory_size=16, max_attention_span=512
)
RUN = RunConfig(
    model=MODEL,
    optimizer=OptimizerConfig(optimizer="adam", clip_grad=1.0),
    training=TrainingConfig(seq_length=128, global_batch_size=8, train_iters=100, bf16=True),
)
H100 = device_named("h100-80")
REACH = ((33, 40, 100, 300),) * 2
VOCABULARY = 101


def task(memory: float = 80e9) -> Task:
    device = replace(H100, memory=Rate(memory, "made up"))
    return Task(RUN, VOCABULARY, 2, 2, device, REACH)


@pytest.fixture(scope="module")
def planner() -> Planner:
    return Planner(task())


def test_the_fastest_is_first_and_every_layout_once(planner: Planner) -> None:
    found = planner.candidates()
    times = [one.time.total for one in found if one.time is not None]
    assert times == sorted(times) and len(times) == len(found) > 20
    assert len({one.choice for one in found}) == len(found)
    assert {one.choice.recompute_granularity for one in found} == {"none"}  # all fit without
    shown = list(distinct(found))
    assert shown[0] is found[0] and len(shown) < len(found)


def test_numbers_are_those_of_their_parts(planner: Planner) -> None:
    for one in planner.candidates()[::7]:
        pipeline = one.choice.pipeline_model_parallel_size
        ranks = range(4)
        peaks = [rank_memory(one.run, VOCABULARY, 4, rank, REACH, H100) for rank in ranks]
        assert one.memory is not None and one.time is not None
        assert one.memory.total <= max(peak.total for peak in peaks)
        assert (
            one.memory.total >= max(peaks[rank].total for rank in ranks if rank // (4 // pipeline) == one.stage) * 0.99
        )
        lengths = planner.cache_lengths(one.run)
        sent = [
            by_link(ledger, layout, rank, 2)
            for rank in ranks
            for ledger in [step_traffic(one.run, VOCABULARY, 4, rank, cache_lengths=lengths)]
            for layout in [planner.places(one.run)[0].layout]
        ]
        assert one.sent in sent
        assert one.tokens_per_second == pytest.approx(8 * 128 / one.time.total)
        assert one.seconds_to_end == pytest.approx(100 * one.time.total)


def test_what_does_not_fit_says_what_and_by_how_much(planner: Planner) -> None:
    free = {one.choice: one.memory.total for one in planner.candidates() if one.memory is not None}
    limit = sorted(free.values())[len(free) // 3]
    found = Planner(task(limit)).candidates()
    refused = [one for one in found if one.refused is not None]
    fitting = [one for one in found if one.refused is None]
    assert refused and fitting and found == fitting + refused
    for one in fitting:
        assert one.memory is not None and one.memory.total <= limit
        if one.choice.recompute_granularity != "none":
            assert free[replace(one.choice, recompute_granularity="none")] > limit
    for one in refused:
        assert one.choice.recompute_granularity == "full" and one.memory is not None
        over = one.memory.total - limit
        largest = max(one.memory.parts.items(), key=lambda part: part[1])[0]
        assert over > 0 and f"needs {over / 1e9:.1f} GB more than" in str(one.refused) and largest in str(one.refused)


def test_memory_and_time_grow_with_the_spans(planner: Planner) -> None:
    best = planner.candidates()[0]
    points = grow(planner, best, 6)
    assert points[0].mean < points[-1].mean == 512
    memory, seconds = [point.memory.total for point in points], [point.time.total for point in points]
    assert memory == sorted(memory) and seconds == sorted(seconds) and memory[-1] > memory[0]
    assert points[3].memory == best.memory and points[3].time == best.time
