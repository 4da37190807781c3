"""Checkpoints of every variant of the ablation know no layout: saved on two ranks, loaded on four and on one."""

from pathlib import Path

import numpy as np
import pytest

from megatron_allattn.checkpoint import folder, save
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.interface import Engine
from tests.support.layouts import rest
from tests.support.pool import WorkerPools
from tests.support.trajectories import Case, build, run_config
from tests.support.variants import dropout_of, model_of

VOCAB, SAVED = 61, 2
TOKENS = np.random.default_rng(7).integers(0, VOCAB, 8 * 32 * 6).astype(np.uint8)


def _case(tensor: int) -> Case:
    return Case(tensor, 1, 0, 1, "adagrad", "float64", "plain")


def _engine(case: Case, variant: str) -> Engine:
    model = model_of(variant, max_attention_span=80, span_ramp=8, **dropout_of(variant))
    return build(case, VOCAB, run_config(case, model))


def _losses(engine: Engine, first: int) -> list[float]:
    """Two steps from number `first` on."""
    streams = TokenStreams(TOKENS, 8, 32, 1)
    losses = []
    for step in range(1, first + 2):
        block = streams.next_block(engine.streams)
        if step >= first:
            losses.append(engine.train_step(block.inputs, block.targets, step, 0.05, engine.spans()).loss)
    return losses


def _save(rank: int, world_size: int, case: Case, variant: str, run: Path) -> list[float]:
    engine = _engine(case, variant)
    _losses(engine, 1)
    save.save(run, SAVED, engine, {"cached_length": engine.slots[0].length})
    return _losses(engine, SAVED + 1)


def _resume(rank: int, world_size: int, case: Case, variant: str, run: Path) -> tuple[list[float], bool]:
    """Losses from a checkpoint on, and whether what is saved again at once is the same."""
    engine = _engine(case, variant)
    step_folder, _ = folder.find_latest(run)
    save.load(step_folder, engine, save.read_state(step_folder)["cached_length"])
    copy = run / f"copy{world_size}"
    save.save(copy, SAVED, engine, {})
    names = [f"{prefix}-00001.safetensors" for prefix in ("weights", "optimizer", "caches")]
    again, _ = folder.find_latest(copy)
    same = all((again / name).read_bytes() == (step_folder / name).read_bytes() for name in names)
    return _losses(engine, SAVED + 1), same


@pytest.mark.parametrize(
    "variant", ["head-split", "ff-attn", *rest("all-attn", "attn-split", "single-head", "transformer", "no-persistent")]
)
def test_a_checkpoint_loads_at_another_layout(variant: str, pools: WorkerPools, tmp_path: Path) -> None:
    straight = pools(2).run(_save, _case(2), variant, tmp_path)[0]
    for size in (4, 1):
        resumed, same = pools(size).run(_resume, _case(size), variant, tmp_path)[0]
        assert same
        np.testing.assert_allclose(resumed, straight, rtol=1e-10)
