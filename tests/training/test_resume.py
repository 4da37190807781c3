"""Runs in this process, with the plain engine: what a resumed run repeats, keeps and refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_allattn.checkpoint import folder, manifest, save, shards
from megatron_allattn.checkpoint.conversion import read_run
from megatron_allattn.checkpoint.save import read_config
from megatron_allattn.config import ParallelConfig, RunConfig, UsageError
from megatron_allattn.config.run import CheckpointConfig, DataConfig, ModelConfig, OptimizerConfig, TrainingConfig
from megatron_allattn.data.dataset import open_dataset
from megatron_allattn.data.streams import TokenStreams
from megatron_allattn.data.tokenizers import NullTokenizer
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.kernels.registry import choose_backend
from megatron_allattn.model.initialization import initialize
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.failures import Watch
from megatron_allattn.parallel.groups import ALONE, single_process_groups
from megatron_allattn.training.loop import train
from megatron_allattn.training.metrics import Metrics
from megatron_allattn.training.observations import Observations
from megatron_allattn.training.plateau import Plateau
from megatron_allattn.training.resume import UNKNOWN_TOKENS, check_resume, find_checkpoint, trim_metrics
from megatron_allattn.training.session import Session
from tests.support.commands import corpus, records


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Streams of about 900 tokens, which start anew after a dozen steps."""
    return corpus(tmp_path_factory.mktemp("data"), num_words=1100, split="6,2,2")


def run_of(data: Path, save: Path, **optimizer: Any) -> RunConfig:
    """Evaluated every 4 steps, saved every 6; the second evaluation that counts is not better by 9 nats: a plateau."""
    model = ModelConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        persistent_memory_size=16,
        max_attention_span=64,
        attention_dropout=0.1,
    )
    rule = {"plateau_patience": 2, "plateau_threshold": 9.0, "plateau_iters": 10} | optimizer
    return RunConfig(
        model=model,
        optimizer=OptimizerConfig(lr_decay_style="plateau", lr_warmup_iters=4, **rule),
        data=DataConfig(data_path=str(data)),
        training=TrainingConfig(seq_length=64, global_batch_size=4, train_iters=40, eval_interval=4),
        checkpoint=CheckpointConfig(save=save, load=save, save_interval=6),
    )


def start(run: RunConfig) -> Session:
    """What `open_session` does, for the plain engine in float64 and one process."""
    dataset = open_dataset(run.data)
    training, own = run.training, run.checkpoint.save
    streams = TokenStreams(dataset.train, training.global_batch_size, training.seq_length, training.seed)
    attend = choose_backend(training.attention_backend, torch.device("cpu"), torch.float64, 8).attend
    network = Network(run.model, dataset.tokenizer.vocab_size, ALONE, FusedOps("torch"), attend).double()
    initialize(network, training.seed)
    engine = PlainEngine(network, run, single_process_groups(), torch.device("cpu"), torch.float64, FusedOps("torch"))
    watch = Watch(engine.groups, 60.0)
    session = Session(run, dataset, streams, engine, Metrics(own), Observations(own), [], watch)
    step_folder, _ = find_checkpoint(run, manifest.check_hashes)
    if step_folder is not None:
        check_resume(run, dataset, step_folder)
        session.resume(step_folder)
    finished = session.step >= session.last_step
    session.notes += trim_metrics(own, session.step, judged=session.judged == session.step, finished=finished)
    return session


def trained(run: RunConfig) -> Session:
    assert run.checkpoint.save is not None
    run.checkpoint.save.mkdir(exist_ok=True)
    session = start(run)
    train(session)
    return session


def left_by(run: RunConfig) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Records without the speed, and the SHA-256 of every tensor file of the last checkpoint."""
    assert run.checkpoint.save is not None
    last, _ = folder.find_latest(run.checkpoint.save)
    files = json.loads((last / "manifest.json").read_text())["files"]
    tensors = {name: entry["sha256"] for name, entry in files.items() if name.endswith(".safetensors")}
    return [{k: v for k, v in r.items() if k != "tokens_per_second"} for r in records(run.checkpoint.save)], tensors


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A run that nothing has interrupted."""
    run = run_of(data, tmp_path_factory.mktemp("alone") / "run")
    trained(run)
    return run


def test_a_plateau_ends_a_run(alone: RunConfig) -> None:
    """The evaluation of step 4 is the best and falls into the warm-up; 8 and 12 are not better: dropped after 12."""
    found, _ = left_by(alone)
    assert [(r["kind"], r["step"]) for r in found if r["kind"] != "train"] == [
        *(("valid", step) for step in (4, 8, 12)),
        ("plateau", 12),
        *(("valid", step) for step in (16, 20, 22)),
        ("test", 22),
    ]
    rates = {r["step"]: float(r["lr"]) for r in found if r["kind"] == "train"}
    assert rates == {
        step: 0.001 * step / 4 if step < 4 else 0.001 if step <= 12 else 0.001 / 10 for step in range(1, 23)
    }
    event = next(r for r in found if r["kind"] == "plateau")
    best = next(r for r in found if r["kind"] == "valid")["loss"]
    assert (event["best"], event["last_step"], float(event["lr"])) == (best, 22, 0.0001)
    assert event["reason"] == f"no evaluation better than {float(best):.4f} nats in 2"


@pytest.mark.parametrize(("at", "saved", "dropped_at"), [(12, 6, None), (18, 12, 12), (22, 18, 12)])
def test_killed_between_an_evaluation_and_the_save(
    alone: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, saved: int, dropped_at: int | None
) -> None:
    """The save of this step never happens; at 12 the evaluation that saw the plateau has been recorded already."""
    run = replace(alone, checkpoint=replace(alone.checkpoint, save=tmp_path / "run", load=tmp_path / "run"))
    save = Session.save

    def killed(session: Session) -> None:
        if session.step == at:
            raise KeyboardInterrupt
        save(session)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            trained(run)
    session = start(run)
    assert (session.step, session.plateau.dropped_at) == (saved, dropped_at)
    train(session)
    assert left_by(run) == left_by(alone)


def test_a_finished_run_only_evaluates_again(alone: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(alone.checkpoint.save, tmp_path / "run")
    run = replace(alone, checkpoint=replace(alone.checkpoint, save=tmp_path / "run", load=tmp_path / "run"))
    session = trained(run)
    assert (session.step, session.last_step) == (22, 22)
    assert session.notes[1:] == [
        "already at step 22 of 22: there is nothing left to train",
        "metrics.jsonl: records after step 22 are made again (dropped 2)",
    ]
    assert left_by(run) == left_by(alone)


def test_a_part_of_a_run_is_no_new_run(alone: RunConfig) -> None:
    assert alone.checkpoint.save is not None
    part = alone.checkpoint.save / "checkpoints"
    with pytest.raises(UsageError, match=f"{part}: no checkpoint to load: .*; name the run folder {part.parent}$"):
        find_checkpoint(replace(alone, checkpoint=CheckpointConfig(save=part, load=part)), manifest.check_hashes)


def test_a_step_folder_may_be_named(alone: RunConfig, tmp_path: Path) -> None:
    """An older step than the newest, gone on from in a folder of its own."""
    assert alone.checkpoint.save is not None
    older = alone.checkpoint.save / "checkpoints/step_00000012"
    run = replace(alone, checkpoint=replace(alone.checkpoint, save=tmp_path / "new", load=older))
    session = trained(run)
    assert session.step == 22
    whole, tensors = left_by(alone)
    assert left_by(run) == ([record for record in whole if record["step"] > 12], tensors)


def test_a_step_that_its_run_deletes_meanwhile_is_told_so(alone: RunConfig, tmp_path: Path) -> None:
    gone = tmp_path / "checkpoints/step_00000012"
    gone.mkdir(parents=True)
    engine = start(replace(alone, checkpoint=CheckpointConfig(save=tmp_path))).engine
    gone.rmdir()
    for read in (lambda: save.read_state(gone), lambda: save.load(gone, engine, 0)):
        with pytest.raises(folder.Gone, match=f"^{gone}: is gone, its run has deleted it meanwhile"):
            read()


def test_a_run_beyond_its_last_step_says_that_nothing_is_left(alone: RunConfig, tmp_path: Path) -> None:
    checkpoint = replace(alone.checkpoint, save=tmp_path / "new")
    run = replace(alone, checkpoint=checkpoint, training=replace(alone.training, train_iters=3))
    session = trained(run)
    assert session.notes[1:] == ["already at step 22 of 3: there is nothing left to train"]
    assert left_by(run)[1] == left_by(alone)[1]  # it has a checkpoint all the same


def test_a_loss_that_is_not_finite_is_compared_with_nothing(
    alone: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = start(replace(alone, checkpoint=CheckpointConfig(), training=replace(alone.training, train_iters=4)))
    weights = {logical.name: parameter for logical, parameter in session.engine.network.logical_parameters()}
    weights["output.bias"].data.fill_(float("nan"))
    train(session)
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(("valid:", "test:"))] == [
        "valid: the loss is not finite",
        "test: the loss is not finite",
    ]


def test_a_run_that_reached_its_cap_may_be_prolonged(
    alone: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its last evaluation, at step 8, counts: the plateau comes where it came without the cap."""
    checkpoint = replace(alone.checkpoint, save=tmp_path / "run", load=tmp_path / "run")
    short = replace(alone, checkpoint=checkpoint, training=replace(alone.training, train_iters=8))
    assert (
        trained(short).why_ended == "reached --train-iters without a plateau: the learning rate was never divided by 10"
    )
    assert "the learning rate was never divided by 10" in capsys.readouterr().out
    session = trained(replace(alone, checkpoint=checkpoint))
    assert session.plateau == Plateau(best=session.plateau.best, count=2, dropped_at=12)
    assert "plateau at step 12: no evaluation better than " in capsys.readouterr().out
    steps = [record for record in left_by(replace(alone, checkpoint=checkpoint))[0] if record["kind"] == "train"]
    assert steps == [record for record in left_by(alone)[0] if record["kind"] == "train"]


@pytest.mark.parametrize(("name", "value"), [("eval_interval", 5), ("eval_iters", 1)])
def test_evaluations_that_decide_the_plateau_stay_as_they_were(
    alone: RunConfig, tmp_path: Path, name: str, value: int
) -> None:
    checkpoint = CheckpointConfig(load=alone.checkpoint.load, save=tmp_path / "new")
    with pytest.raises(UsageError, match=f"^--{name.replace('_', '-')} {value}: .* resume with the same value"):
        start(replace(alone, checkpoint=checkpoint, training=replace(alone.training, **{name: value})))


def test_a_run_may_go_on_with_another_backend(alone: RunConfig, tmp_path: Path) -> None:
    """Backends compute the same function and the same dropout masks."""
    save = tmp_path / "run"
    shutil.copytree(alone.checkpoint.save, save)
    for step in (18, 22):  # it goes on from step 12
        shutil.rmtree(save / folder.FOLDER / f"step_{step:08d}")
    training = replace(alone.training, attention_backend="eager")
    checkpoint = replace(alone.checkpoint, save=save, load=save, load_fallback=True)
    trained(replace(alone, training=training, checkpoint=checkpoint))
    found, expected = (
        [float(record["loss"]) for record in records(path) if record["kind"] == "train"]
        for path in (save, alone.checkpoint.save)
    )
    assert found[:12] == expected[:12] and len(found) == len(expected) == 22
    assert found[12:] == pytest.approx(expected[12:], rel=1e-9)


def test_the_normalization_belongs_to_the_model(alone: RunConfig, tmp_path: Path) -> None:
    checkpoint = CheckpointConfig(load=alone.checkpoint.load, save=tmp_path / "new")
    model = replace(alone.model, span_normalization="window")
    with pytest.raises(UsageError, match=r"^--span-normalization window: .* was trained with span; resume with the"):
        start(replace(alone, checkpoint=checkpoint, model=model))


def test_a_configuration_from_before_there_was_a_choice_means_the_window(alone: RunConfig, tmp_path: Path) -> None:
    last, _ = folder.find_latest(alone.checkpoint.save)
    state = json.loads((last / "state.json").read_text())
    del state["config"]["model"]["span_normalization"], state["config"]["training"]["attention_backend"]
    converted(alone, tmp_path / "old", without=(), **state)
    with pytest.raises(UsageError, match=r"^--span-normalization span: .* was trained with window; resume with the"):
        start(going_on(alone, tmp_path / "old", tmp_path / "new"))
    model = replace(alone.model, span_normalization="window")
    assert start(going_on(alone, tmp_path / "old", tmp_path / "new", model=model)).step == 22
    state["config"]["model"]["adaptive_span"] = False  # where no span is learned there is nothing to normalize twice
    assert read_config(tmp_path / "old", state).model.span_normalization == "span"


def converted(run: RunConfig, target: Path, *, without: tuple[str, ...] = ("caches",), **state: Any) -> Path:
    """The last checkpoint of a run as a conversion would write it."""
    assert run.checkpoint.save is not None
    last, _ = folder.find_latest(run.checkpoint.save)
    original = json.loads((last / "state.json").read_text())
    step = state.get("step", original["step"])
    temporary = folder.begin(target, step)
    for path in last.glob("*.safetensors"):
        if not path.name.startswith(without):
            shutil.copy(path, temporary)
    foreign = {"data": None, "data_sha256": None, "cached_length": 0, "plateau": None, "judged": step}
    (temporary / "state.json").write_text(json.dumps(original | foreign | state))
    return folder.commit(temporary, step)


def going_on(source: RunConfig, load: Path, save: Path, **settings: Any) -> RunConfig:
    return replace(source, checkpoint=CheckpointConfig(load=load, save=save), **settings)


def test_a_converted_checkpoint_starts_the_data_anew(alone: RunConfig, tmp_path: Path) -> None:
    null = NullTokenizer(256)
    tokenizer = {"tokenizer": null.to_json(), "tokenizer_sha256": null.fingerprint}
    step_folder = converted(alone, tmp_path / "foreign", **tokenizer)
    training = replace(alone.training, seq_length=32, global_batch_size=2, train_iters=24)
    (tmp_path / "new").mkdir()
    run = going_on(alone, tmp_path / "foreign", tmp_path / "new", training=training)
    session = start(run)
    assert session.notes == [
        f"resumed from {step_folder}",
        "it was converted: the streams start at the beginning of the data with empty caches",
        UNKNOWN_TOKENS,
    ]
    assert (session.step, session.streams.position, session.plateau) == (22, 0, Plateau())
    assert all(tensor is not None and tensor.shape[1] == 0 for _, tensor in session.engine.caches())
    kept = start(replace(alone, checkpoint=replace(alone.checkpoint, save=tmp_path / "x", load=alone.checkpoint.save)))
    for found, expected in zip(session.engine.optimizer_state(), kept.engine.optimizer_state(), strict=True):
        assert found[0] == expected[0] and torch.equal(found[1], expected[1])
    train(session)
    state = json.loads((tmp_path / "new/checkpoints/step_00000024/state.json").read_text())
    assert state["data"]["position"] == 64
    assert start(replace(run, checkpoint=replace(run.checkpoint, load=tmp_path / "new"))).step == 24


def test_a_converted_checkpoint_with_its_optimizers_state_has_the_settings_too(
    alone: RunConfig, tmp_path: Path
) -> None:
    """As of training here: another rate or precision is refused without --override, another batch is not."""
    step_folder = converted(alone, tmp_path / "foreign", source={"format": "shards", "settings_known": True})
    then, beta = alone.optimizer.lr, alone.optimizer.adam_beta1
    other = replace(alone.optimizer, lr=0.5, adam_beta1=0.5)
    training = replace(alone.training, bf16=True, global_batch_size=2)
    run = going_on(alone, tmp_path / "foreign", tmp_path / "new", optimizer=other, training=training)
    differences = f"--lr {then} (now 0.5), --adam-beta1 {beta} (now 0.5), --bf16 False (now True)"
    with pytest.raises(UsageError) as error:
        start(run)
    assert str(error.value).startswith(
        f"--load {step_folder}: was trained with {differences}; resume with the same values"
    )
    assert start(replace(run, checkpoint=replace(run.checkpoint, override=True))).step == 22
    converted(alone, tmp_path / "paper", source={"format": "adaptive-span"})  # which says little of them
    assert start(going_on(alone, tmp_path / "paper", tmp_path / "new", optimizer=other, training=training)).step == 22
    converted(alone, tmp_path / "begun", without=("caches", "optimizer"), step=0)
    assert start(going_on(alone, tmp_path / "begun", tmp_path / "other", optimizer=other, training=training)).step == 0


@pytest.mark.parametrize(
    ("state", "without", "change", "message"),
    [
        ({}, ("caches",), {"model": {"attention_dropout": 0.3}}, "--attention-dropout 0.3: .* was trained with 0.1"),
        ({}, ("caches",), {"optimizer": {"optimizer": "adagrad"}}, "--optimizer adagrad: .* was trained with adam"),
        ({"vocab_size": 255}, ("caches",), {}, "its vocabulary size is 256, .* was trained with 255"),
        ({"tokenizer_sha256": "0"}, ("caches",), {}, "its tokenizer is "),
        ({}, ("caches", "optimizer"), {}, "converted at step 22 without its optimizer's state, .*; convert it with"),
    ],
)
def test_a_converted_checkpoint_that_does_not_fit(
    alone: RunConfig, tmp_path: Path, state: dict, without: tuple[str, ...], change: dict, message: str
) -> None:
    converted(alone, tmp_path / "foreign", without=without, **state)
    changed = {section: replace(getattr(alone, section), **values) for section, values in change.items()}
    with pytest.raises(UsageError, match=message):
        start(going_on(alone, tmp_path / "foreign", tmp_path / "new", **changed))


def test_converted_weights_alone_begin_at_step_0(alone: RunConfig, tmp_path: Path) -> None:
    converted(alone, tmp_path / "foreign", without=("caches", "optimizer"), step=0)
    session = start(going_on(alone, tmp_path / "foreign", tmp_path / "new"))
    assert session.step == 0
    assert not any(tensor.any() for _, tensor in session.engine.optimizer_state())


def test_a_run_goes_on_from_shards_where_it_was(alone: RunConfig, tmp_path: Path) -> None:
    """After its plateau: at a tenth of the rate, to the same last step, with as many updates and the same tokens."""
    step_folder = alone.checkpoint.save / "checkpoints/step_00000018"
    saved = read_run(step_folder)
    left_out = replace(saved, state=saved.state | {"skipped": 3})
    shards.write(left_out, tmp_path / "out", ParallelConfig(tensor_model_parallel_size=2))
    shards.read(tmp_path / "out", tmp_path / "back")
    session = start(going_on(alone, tmp_path / "back", tmp_path / "new"))
    assert (session.step, session.tokens, session.engine.skipped) == (18, 18 * 4 * 64, 3)
    assert (session.plateau.dropped_at, session.last_step) == (12, 22)
    assert list(session.guard.losses) == saved.state["recent_losses"] and session.guard.losses
    constant = replace(alone.optimizer, lr_decay_style="constant")  # a plateau is none of its affair
    run = going_on(alone, tmp_path / "back", tmp_path / "new", optimizer=constant)
    assert start(replace(run, checkpoint=replace(run.checkpoint, override=True))).last_step == 40
