"""The loss of a split against cross-entropies that are known without the model, at several layouts."""

import numpy as np
import pytest
import torch

from megatron_allattn.training.evaluation import Evaluation, evaluate
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build, run_config

VOCABULARY = 11
BATCH, LENGTH = 8, 32  # of `run_config`
WHOLE_BLOCKS = 3
# a stream of 110 tokens: three blocks with their targets (3 · 32 + 1), the rest is not read
TOKENS = np.random.default_rng(5).choice(VOCABULARY, size=BATCH * 110 + 5, p=np.arange(1, 12) / 66).astype(np.uint8)
CASES = [Case(), Case(tensor=2), Case(data=2), Case(data=2, accumulation=2), Case(tensor=2, zero=1, engine="deepspeed")]


def evaluated(rank: int, world_size: int, case: Case, bias: np.ndarray | None, blocks: int) -> Evaluation:
    """Evaluate a fresh network; with a bias, one whose weights are zero, so that only its output bias speaks."""
    engine = build(case, VOCABULARY)
    training_block = np.zeros((len(engine.streams), LENGTH), np.int64)
    engine.train_step(training_block, training_block, 1, 0.0, engine.spans())
    before = {name: cache for name, cache in engine.caches() if cache is not None}
    if bias is not None:
        names = {logical.name: tensor.shape for logical, tensor in engine.weights()}
        output = next(name for name, shape in names.items() if shape == (VOCABULARY,))
        zeros = {name: torch.zeros(shape) for name, shape in names.items()}
        zeros[output] = torch.from_numpy(bias).float()
        engine.load(zeros.__getitem__)
    found = evaluate(engine, TOKENS, engine.spans(), blocks)
    after = {name: cache for name, cache in engine.caches() if cache is not None}
    assert before.keys() == after.keys()
    assert all(torch.equal(cache, after[name]) for name, cache in before.items())
    assert engine.slots[0].length == LENGTH
    return found


def targets(blocks: int) -> np.ndarray:
    """The tokens that are predicted: of every stream all of its first blocks but the first token."""
    return TOKENS[: BATCH * 110].reshape(BATCH, 110)[:, 1 : 1 + blocks * LENGTH]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("max_blocks", "blocks"), [(0, WHOLE_BLOCKS), (2, 2), (9, WHOLE_BLOCKS)])
def test_loss_of_a_network_that_knows_frequencies_only(
    pools: WorkerPools, case: Case, max_blocks: int, blocks: int
) -> None:
    log_probabilities = np.log(np.arange(1, 12) / 66)
    expected = -log_probabilities[targets(blocks)].mean()
    bias = log_probabilities + 3.0  # a constant that the softmax takes out again
    for found in pools(case.world_size).run(evaluated, case, bias, max_blocks):
        assert found.tokens == blocks * LENGTH * BATCH
        assert found.loss == pytest.approx(expected, rel=1e-6, abs=0)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_loss_does_not_depend_on_the_layout(pools: WorkerPools, case: Case) -> None:
    alone = pools(1).run(evaluated, Case(), None, 0)[0]
    for found in pools(case.world_size).run(evaluated, case, None, 0):
        assert found.tokens == alone.tokens
        assert found.loss == pytest.approx(alone.loss, rel=1e-6, abs=0)


def test_the_numbers_above_are_those_of_the_runs() -> None:
    training = run_config(Case()).training
    assert (training.global_batch_size, training.seq_length) == (BATCH, LENGTH)
