"""DeepSpeed's JSON may decide ZeRO, offload and communication; what contradicts the flags is refused."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.config import RunConfig, UsageError, load_deepspeed_json, parse


def configured(path: Path, *flags: str) -> RunConfig:
    """A run with the JSON at `path`."""
    return parse(["--deepspeed_config", str(path), *flags])[0]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    """Writes an object or text to a JSON file and gives its path."""

    def write_file(content: Any) -> Path:
        path = tmp_path / "ds.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    return write_file


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_stage_selects_the_shipped_file(stage: int) -> None:
    config, _ = parse(["--zero-stage", str(stage)])
    settings = load_deepspeed_json(config, 1)
    assert settings["zero_optimization"]["stage"] == stage
    assert settings["zero_allow_untested_optimizer"] is True
    assert set(settings) == {"zero_optimization", "zero_allow_untested_optimizer"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_offload_files_are_found_by_name_and_set_the_stage(stage: int) -> None:
    config = configured(Path(f"zero{stage}-offload.json"))
    assert config.parallel.zero_stage == stage
    settings = load_deepspeed_json(config, 2)
    assert settings["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert settings["zero_force_ds_cpu_optimizer"] is False


def test_a_pipeline_has_a_file_of_its_own() -> None:
    """ZeRO 1, without the overlap that DeepSpeed cannot have in a pipeline and warns of; no batch and no precision."""
    config = configured(Path("pipeline.json"), "--pipeline-model-parallel-size", "2")
    assert config.parallel.zero_stage == 1
    settings = load_deepspeed_json(config, 2)
    assert settings.keys() == {"zero_allow_untested_optimizer", "zero_optimization"}
    assert settings["zero_optimization"]["overlap_comm"] is False
    assert parse(["--pipeline-model-parallel-size", "2"])[0].parallel.zero_stage == 1  # without any file, too


@pytest.mark.parametrize("name", ["zero2.json", "zero3.json", "zero2-offload.json", "zero3-offload.json"])
def test_a_pipeline_with_a_file_that_cuts_gradients_is_refused(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        configured(Path(name), "--pipeline-model-parallel-size", "2")
    assert str(caught.value) == (
        f"--pipeline-model-parallel-size 2: ZeRO {name[4]} cuts gradients, which a pipeline keeps whole while "
        "micro-batches pass; give a file with stage 1 (or 0), such as pipeline.json, or leave the pipeline and keep "
        "the stage"
    )


def test_a_file_without_zero_is_stage_zero(write: Any) -> None:
    config = configured(write({"steps_per_print": 5}))
    assert config.parallel.zero_stage == 0
    assert load_deepspeed_json(config, 1) == {"steps_per_print": 5}


def test_stage_of_file_and_flag_must_agree(write: Any) -> None:
    path = write({"zero_optimization": {"stage": 3}})
    assert configured(path, "--zero-stage", "3").parallel.zero_stage == 3
    with pytest.raises(UsageError) as caught:
        configured(path, "--zero-stage", "2")
    assert str(caught.value) == f"--zero-stage 2: {path} says stage 3; give one of the two, or make them equal"


def test_a_recorded_stage_that_the_file_no_longer_has_is_refused(write: Any) -> None:
    config = configured(write({"zero_optimization": {"stage": 3}}))
    path = write({"zero_optimization": {"stage": 1}})
    with pytest.raises(UsageError) as caught:
        load_deepspeed_json(config, 1)
    assert str(caught.value) == (
        f"{path} zero_optimization.stage = 1: contradicts 3 from --zero-stage; make them equal"
    )


def test_values_equal_to_the_flags_are_accepted_and_dropped(write: Any) -> None:
    zero = {"stage": 1, "overlap_comm": True}
    path = write(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 0.5,
            "bf16": {"enabled": True},
            "fp16": {"enabled": False},
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0}},
            "zero_optimization": zero,
        }
    )
    flags = ["--bf16", "--clip-grad", "0.5", "--micro-batch-size", "4", "--adam-beta2", "0.95"]
    assert load_deepspeed_json(configured(path, *flags), 2) == {"zero_optimization": zero}


def test_auto_leaves_the_value_to_the_flags(write: Any) -> None:
    path = write(
        {
            "train_batch_size": "auto",
            "gradient_clipping": "auto",
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "adam", "params": {"lr": "auto"}},
            "zero_optimization": {"stage": 2},
        }
    )
    assert load_deepspeed_json(configured(path), 1) == {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"train_batch_size": 32}, "train_batch_size = 32: contradicts 16 from --global-batch-size"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu = 4: contradicts 8 from --micro-batch"),
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps = 2: contradicts 1 from --global-batch-size"),
        ({"gradient_clipping": 0.5}, "gradient_clipping = 0.5: contradicts 1.0 from --clip-grad"),
        ({"gradient_clipping": True}, "gradient_clipping = true: contradicts 1.0 from --clip-grad"),
        ({"bf16": {"enabled": True}}, "bf16.enabled = true: contradicts false from --bf16"),
        ({"fp16": {"enabled": True}}, "fp16.enabled = true: contradicts false from --fp16"),
        ({"fp16": {"loss_scale": 0}}, "fp16.loss_scale: fp16 is decided by --fp16 alone; remove the key"),
        ({"bf16": True}, 'bf16 = true: contradicts {"enabled": false} from --bf16'),
        ({"optimizer": {"type": "AdamW"}}, 'optimizer.type = "AdamW": contradicts "adam" from --optimizer'),
        ({"optimizer": {"params": {"lr": 0.1}}}, "optimizer.params.lr = 0.1: contradicts 0.001 from --optimizer"),
        ({"optimizer": {"params": {"momentum": 0}}}, "optimizer.params.momentum: optimizer.params is decided by"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler: the learning rate follows --lr-decay-style"),
        ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel: tensor parallelism comes from --tensor-model-"),
        ({"zero_optimisation": {"stage": 3}}, "zero_optimisation: unknown key; did you mean zero_optimization?"),
        ({"zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}}, "zero_optimization.reduce_bucket_size: "),
        ({"steps_per_print": "auto"}, 'steps_per_print: "auto" is filled in by no flag'),
    ],
)
def test_contradictions_and_foreign_keys_name_file_key_and_both_values(
    write: Any, content: dict[str, Any], message: str
) -> None:
    path = write(content)
    with pytest.raises(UsageError) as caught:
        load_deepspeed_json(configured(path), 2)
    assert str(caught.value).startswith(f"{path} {message}")


OPTIMIZER = "zero_optimization.offload_optimizer"
WHERE = {"device": "cpu", "pin_memory": True}


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        (
            {"stage": 0, "offload_optimizer": WHERE},
            f"{OPTIMIZER}: ZeRO 0 keeps the optimizer's state whole and where it is: it would have no effect; set "
            "zero_optimization.stage to 1 or 2 or 3, or remove the key",
        ),
        (
            {"stage": 2, "offload_param": WHERE},
            "zero_optimization.offload_param: ZeRO 2 keeps weights whole and where they are: it would have no effect; "
            "set zero_optimization.stage to 3, or remove the key",
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/local"}},
            f"{OPTIMIZER}.device nvme: checkpoints read the optimizer's state and weights from memory",
        ),
        ({"stage": 3, "offload_optimizer": WHERE | {"ratio": 0.5}}, f"{OPTIMIZER}.ratio = 0.5: what it leaves on"),
        ({"stage": 3, "offload_optimizer": WHERE | {"super_offload": True}}, f"{OPTIMIZER}.super_offload = true: what"),
        ({"stage": 2, "cpu_offload": True}, "zero_optimization.cpu_offload: DeepSpeed has given the key up; give"),
        ({"stage": 2, "zenflow": {"topk_ratio": 0.1}}, "zero_optimization.zenflow: it updates by an optimizer of"),
    ],
)
def test_offload_that_would_do_nothing_or_change_the_optimizer_is_refused(
    write: Any, zero: dict[str, Any], message: str
) -> None:
    path = write({"zero_optimization": zero})
    with pytest.raises(UsageError) as caught:
        load_deepspeed_json(configured(path), 2)
    assert str(caught.value).startswith(f"{path} {message}")


@pytest.mark.parametrize(
    "zero",
    [
        {"stage": 0, "offload_optimizer": {"device": "none"}},
        {"stage": 1, "offload_optimizer": WHERE | {"ratio": 1.0, "super_offload": False}},
        {"stage": 3, "offload_optimizer": WHERE, "offload_param": WHERE},
    ],
)
def test_offload_that_has_an_effect_is_accepted(write: Any, zero: dict[str, Any]) -> None:
    assert load_deepspeed_json(configured(write({"zero_optimization": zero})), 2) == {"zero_optimization": zero}


@pytest.mark.parametrize(
    ("key", "value"), [("zero_allow_untested_optimizer", "false"), ("zero_force_ds_cpu_optimizer", "true")]
)
def test_deepspeed_may_not_insist_on_an_optimizer_of_its_own(write: Any, key: str, value: str) -> None:
    path = write(f'{{"{key}": {value}}}')
    with pytest.raises(UsageError) as caught:
        load_deepspeed_json(configured(path), 1)
    rule = "the optimizer is this program's own, which DeepSpeed would refuse; remove the key"
    assert str(caught.value) == f"{path} {key} = {value}: {rule}"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON (Expecting value: line 1 column 1 (char 0)); correct the file"),
        ("{'stage': 1}", "is not valid JSON (Expecting property name enclosed in double quotes: line 1 column 2"),
        ('{"bf16": {}, "bf16": {}}', "is not valid JSON (key bf16 appears twice)"),
        ("[" * 100_000, "is not valid JSON (maximum recursion depth exceeded"),
        ("[1]", "must hold a JSON object"),
    ],
)
def test_unreadable_files_are_refused_while_parsing(write: Any, content: str, message: str) -> None:
    path = write(content)
    with pytest.raises(UsageError) as caught:
        configured(path)
    assert str(caught.value).startswith(f"--deepspeed-config {path}: {message}")


@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"stage": 4}, "zero_optimization.stage 4: must be 0, 1, 2 or 3"),
        ({"stage": True}, "zero_optimization.stage True: must be 0, 1, 2 or 3"),
        ({"stage": "auto"}, "zero_optimization.stage auto: must be 0, 1, 2 or 3"),
        (2, "zero_optimization: must be an object"),
    ],
)
def test_a_stage_that_does_not_exist_is_refused(write: Any, zero: Any, message: str) -> None:
    path = write({"zero_optimization": zero})
    with pytest.raises(UsageError) as caught:
        configured(path)
    assert str(caught.value).startswith(f"{path} {message}")


def test_missing_files_folders_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--deepspeed-config \S*/none.json: no such file"):
        configured(tmp_path / "none.json")
    with pytest.raises(UsageError, match="is not a regular file"):
        configured(tmp_path)
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(UsageError, match="is not a regular file"):
        configured(tmp_path / "pipe.json")
    binary = tmp_path / "weights.json"
    binary.write_bytes(b"\x80\x04\xff")
    with pytest.raises(UsageError, match=r"is not valid JSON \('utf-8' codec can't decode byte 0x80 in position 0"):
        configured(binary)
