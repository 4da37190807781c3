"""A checkpoint holds all that decides the next steps: going on from it is bitwise the uninterrupted run.

At the layout it was saved at everything is compared bit for bit; at other layouts the gathered weights and
optimizer state are, and the next losses to rounding.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from megatron_allattn.checkpoint import folder, manifest, save
from megatron_allattn.config import UsageError
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.engine.interface import Engine
from megatron_allattn.training.schedules import learning_rate
from tests.support.layouts import rest
from tests.support.pool import WorkerError, WorkerPools
from tests.support.trajectories import Case, build, characters, run_config

SAVED, AFTER = 3, 4
CASES = [
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed"),
    Case(1, 2, 3, 1, "adagrad", "bfloat16", "deepspeed"),
    Case(2, 1, 1, 2, "adagrad", "float32", "deepspeed", pipeline=2),
    *rest(
        Case(1, 1, 0, 1, "adagrad", "float32", "deepspeed"),
        Case(2, 2, 3, 2, "adam", "float32", "deepspeed"),
        Case(2, 2, 2, 1, "adam", "float32", "deepspeed"),
        Case(2, 1, 0, 1, "adam", "bfloat16", "deepspeed"),
        Case(2, 2, 0, 2, "adagrad", "float64", "plain"),
        Case(1, 2, 0, 1, "adam", "bfloat16", "deepspeed", pipeline=2, layers=(1, 2)),
    ),
]


def _train(engine: Engine, streams: TokenStreams, first: int, count: int) -> list[str]:
    """Losses and norms as hexadecimal floats."""
    found = []
    for step in range(first, first + count):
        block = streams.next_block(engine.streams)
        if block.restarted:
            engine.clear_caches()
        lr = learning_rate(engine.run.optimizer, 1000, step)
        result = engine.train_step(block.inputs, block.targets, step, lr, engine.spans())
        found += [result.loss.hex(), result.grad_norm.hex()]
    return found


def _streams(engine: Engine, tokens: np.ndarray) -> TokenStreams:
    training = engine.run.training
    return TokenStreams(tokens, training.global_batch_size, training.seq_length, training.seed)


def _weights(engine: Engine) -> dict[str, bytes]:
    return {logical.name: tensor.numpy().tobytes() for logical, tensor in engine.weights()}


def _save_and_go_on(rank: int, world_size: int, case: Case, tokens: np.ndarray, vocab: int, run: Path) -> tuple:
    """Train, save, train on: losses after the save, and the weights at the end."""
    engine = build(case, vocab)
    streams = _streams(engine, tokens)
    _train(engine, streams, 1, SAVED)
    save.save(run, SAVED, engine, {"data": streams.state(), "cached_length": engine.slots[0].length})
    return _train(engine, streams, SAVED + 1, AFTER), _weights(engine)


def _resume(rank: int, world_size: int, case: Case, tokens: np.ndarray, vocab: int, run: Path) -> tuple:
    """A fresh engine that goes on from the checkpoint."""
    engine = build(case, vocab)
    streams = _streams(engine, tokens)
    step_folder, _ = folder.find_latest(run)
    manifest.verify(step_folder)
    state = save.read_state(step_folder)
    streams.load_state(state["data"])
    save.load(step_folder, engine, state["cached_length"])
    return _train(engine, streams, state["step"] + 1, AFTER), _weights(engine)


def _copy(rank: int, world_size: int, case: Case, vocab: int, source: Path, target: Path) -> None:
    """Load at one layout and save at once at another: what comes out is what went in."""
    engine = build(case, vocab)
    state = save.read_state(source)
    save.load(source, engine, state["cached_length"])
    save.save(target, state["step"], engine, {name: value for name, value in state.items() if name != "step"})


@pytest.fixture(scope="module")
def text(shared: Path) -> tuple[np.ndarray, int]:
    """A text so short that the streams restart on the way: 8 streams of 4 blocks."""
    tokens, vocab = characters(shared / "data/tinyshakespeare.txt")
    return tokens[: 8 * 32 * 5], vocab


@pytest.mark.parametrize("case", CASES, ids=str)
def test_resume_is_bitwise(case: Case, pools: WorkerPools, text: tuple[np.ndarray, int], tmp_path: Path) -> None:
    straight = pools(case.world_size).run(_save_and_go_on, case, *text, tmp_path)
    resumed = pools(case.world_size).run(_resume, case, *text, tmp_path)
    assert resumed == straight
    assert len(set(straight[0][0])) > AFTER  # the run moves: no loss equals another by standing still


@pytest.mark.parametrize(
    "other",
    [
        Case(2, 2, 3, 1, "adagrad", "float32", "deepspeed"),
        Case(1, 1, 1, 2, "adagrad", "float32", "deepspeed", pipeline=3),
        *rest(Case(1, 1, 0, 1, "adagrad", "float32", "deepspeed"), Case(4, 1, 2, 2, "adagrad", "float32", "deepspeed")),
    ],
    ids=str,
)
def test_another_layout_loads_the_same_state(
    other: Case, pools: WorkerPools, text: tuple[np.ndarray, int], tmp_path: Path
) -> None:
    case = Case(2, 2, 1, 1, "adagrad", "float32", "deepspeed")
    straight = pools(case.world_size).run(_save_and_go_on, case, *text, tmp_path / "a")
    source = tmp_path / "a/checkpoints" / folder.step_name(SAVED)
    pools(other.world_size).run(_copy, other, text[1], source, tmp_path / "b")
    target = tmp_path / "b/checkpoints" / folder.step_name(SAVED)
    for prefix in ("weights", "optimizer", "caches"):
        before, after = (load_file(path / f"{prefix}-00001.safetensors") for path in (source, target))
        assert before.keys() == after.keys() and len(before) >= 3
        assert all(before[name].equal(after[name]) for name in before)
    losses = [
        float.fromhex(value) for value in pools(other.world_size).run(_resume, other, *text, tmp_path / "a")[0][0]
    ]
    expected = [float.fromhex(value) for value in straight[0][0]]
    np.testing.assert_allclose(losses[0], expected[0], rtol=1e-6)
    np.testing.assert_allclose(losses[::2], expected[::2], rtol=1e-4)


def test_names_and_shapes_know_no_layout(pools: WorkerPools, text: tuple[np.ndarray, int], tmp_path: Path) -> None:
    case = Case(4, 1, 1, 1, "adam", "float32", "deepspeed")
    pools(4).run(_save_and_go_on, case, *text, tmp_path)
    step_folder = tmp_path / "checkpoints" / folder.step_name(SAVED)
    weights = load_file(step_folder / "weights-00001.safetensors")
    model, vocab = run_config(case).model, text[1]
    assert vocab % 4  # the padding of the last rank must not be there
    assert weights["embedding.weight"].shape == (vocab, model.hidden_size)
    assert weights["output.bias"].shape == (vocab,)
    assert weights["layers.2.persistent.key"].shape == (4, 8, 24)
    assert weights["layers.0.span"].shape == (4, 1, 1)
    assert weights["position.key"].shape == (1, 8, 192)
    optimizer = load_file(step_folder / "optimizer-00001.safetensors")
    assert {name.rsplit("/")[1] for name in optimizer} == {"exp_avg", "exp_avg_sq"}
    assert optimizer["layers.1.out.weight/exp_avg"].shape == (32, 32)
    caches = load_file(step_folder / "caches-00001.safetensors")
    assert caches["layers.0.cache"].shape == (
        8,
        96,
        32,
    )  # 3 blocks of 32 tokens: the window of 64 and one step of 64 hold all
    assert json.loads((step_folder / "state.json").read_text())["step"] == SAVED


def test_another_model_is_refused(pools: WorkerPools, text: tuple[np.ndarray, int], tmp_path: Path) -> None:
    case = Case(1, 1, 0, 1, "adagrad", "float32", "plain")
    pools(1).run(_save_and_go_on, case, *text, tmp_path)
    with pytest.raises(WorkerError) as caught:
        pools(1).run(_resume, case, text[0], text[1] + 1, tmp_path)
    assert isinstance(caught.value.original, UsageError)
    assert f"embedding.weight has shape ({text[1]}, 32), the model wants ({text[1] + 1}, 32)" in str(
        caught.value.original
    )
