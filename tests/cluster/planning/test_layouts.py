"""Legal layouts: all of them, against a search of everything, and nothing else."""

from dataclasses import replace
from itertools import product

import pytest

from megatron_allattn.cluster.planning.layouts import choices
from megatron_allattn.config import ModelConfig, RunConfig, TrainingConfig, UsageError
from megatron_allattn.config.rules import check_run, check_world

RUN = RunConfig(
    model=ModelConfig(num_layers=3, hidden_size=32, num_attention_heads=4, persistent_memory_size=4),
    training=TrainingConfig(seq_length=16, global_batch_size=8, train_iters=10),
)


def everything(world_size: int) -> set[tuple]:
    """By brute force: every combination of numbers up to the world's size that the arithmetic of a run allows."""
    found = set()
    numbers, flags = range(1, world_size + 1), (False, True)
    for tensor, pipeline, zero in product(numbers, numbers, range(4)):
        for micro, sequence, share in product(range(1, 9), flags, flags):
            replicas, rest = divmod(world_size, tensor * pipeline)
            if rest or 4 % tensor or pipeline > 3 or (pipeline > 1 and zero > 1):
                continue
            if 8 % (replicas * micro) or ((sequence or share) and tensor == 1):
                continue
            if zero and replicas == 1:  # there is nothing to cut
                continue
            found.add((tensor, pipeline, zero, micro, sequence, share))
    return found


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 4), (2, 4), (4, 2)])
def test_all_and_no_others(nodes: int, gpus: int) -> None:
    found = choices(RUN, nodes, gpus)
    seen = {
        (
            one.tensor_model_parallel_size,
            one.pipeline_model_parallel_size,
            one.zero_stage,
            one.micro_batch_size,
            one.sequence_parallel,
            one.shard_caches,
        )
        for one in found
    }
    assert seen == everything(nodes * gpus)
    assert {one.recompute_granularity for one in found} == {"none", "selective", "full"}
    for run in choices(RUN, nodes, gpus).values():
        check_run(run, frozenset())
        check_world(run, nodes * gpus)


def test_tensor_groups_within_a_node_come_first() -> None:
    sizes = [one.tensor_model_parallel_size for one in choices(RUN, 4, 2)]
    first = sizes.index(4)
    assert set(sizes[:first]) == {1, 2} and set(sizes[first:]) == {4}


def test_flags_fix_what_they_say() -> None:
    run = replace(RUN, parallel=replace(RUN.parallel, zero_stage=0, tensor_model_parallel_size=2))
    found = choices(run, 1, 4, frozenset({"--zero-stage", "--tensor-model-parallel-size"}))
    assert {(one.zero_stage, one.tensor_model_parallel_size) for one in found} == {(0, 2)}
    assert {one.pipeline_model_parallel_size for one in found} == {1, 2}


def test_flags_of_a_choice_give_its_run() -> None:
    from megatron_allattn.config.cli import parse

    for choice, run in choices(RUN, 1, 4).items():
        base = ["--num-layers", "3", "--hidden-size", "32", "--num-attention-heads", "4"]
        base += [
            "--persistent-memory-size",
            "4",
            "--seq-length",
            "16",
            "--global-batch-size",
            "8",
            "--train-iters",
            "10",
        ]
        parsed, _ = parse([*base, *choice.flags(RUN)])
        assert (parsed.parallel, parsed.training) == (run.parallel, run.training)


def test_what_cannot_be_is_told_by_the_rules() -> None:
    with pytest.raises(UsageError):
        check_world(replace(RUN, parallel=replace(RUN.parallel, tensor_model_parallel_size=3)), 3)
    assert not choices(RUN, 1, 7)
