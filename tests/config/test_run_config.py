"""The configuration as JSON: an exact round trip, and refusal of what is not a configuration."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_allattn.config import (
    RECIPES,
    CheckpointConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
    UsageError,
)
from megatron_allattn.config.run import SECTIONS

FULL = RunConfig(
    recipe="demo",
    model=ModelConfig(adaptive_span=False, span_loss=0.1 + 0.2, position_values="shared"),
    parallel=ParallelConfig(deepspeed_config=Path("a/zero.json"), zero_stage=2),
    optimizer=OptimizerConfig(lr=1 / 3, lr_decay_iters=7, lr_decay_style="linear"),
    data=DataConfig(data_path="p", tokenizer_type="char", tokenizer_model=Path("v.json")),
    training=TrainingConfig(seed=2**63 - 1, bf16=True, micro_batch_size=2),
    checkpoint=CheckpointConfig(save=Path("runs/x"), save_interval=5),
    logging=LoggingConfig(wandb_project="w"),
)


@pytest.mark.parametrize("config", [RunConfig(), FULL, *(make() for make in RECIPES.values())])
def test_round_trip_through_json_text_is_exact(config: RunConfig) -> None:
    again = RunConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False)))
    assert again == config
    assert again.optimizer.lr.hex() == config.optimizer.lr.hex()


def test_dictionary_has_json_types_section_by_section() -> None:
    values = FULL.to_dict()
    assert list(values) == ["recipe", *SECTIONS]
    assert values["parallel"]["deepspeed_config"] == "a/zero.json"
    assert values["checkpoint"] | {"save": "runs/x", "load": None, "save_interval": 5} == values["checkpoint"]


def test_fields_left_out_have_their_defaults() -> None:
    assert RunConfig.from_dict({}) == RunConfig()
    assert RunConfig.from_dict({"model": {"num_layers": 9}}) == RunConfig(model=ModelConfig(num_layers=9))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modle": {}}, "configuration modle: unknown key; did you mean model?"),
        ({"model": {"num_layer": 3}}, "configuration section model num_layer: unknown key; did you mean num_layers?"),
        ({"model": {"zzz": 3}}, "configuration section model zzz: unknown key; known are num_layers, hidden_size"),
        ({"model": 3}, "configuration section model: must be an object with named values, not int"),
        ([], "configuration: must be an object with named values, not list"),
        ({"model": {"num_layers": "3"}}, "--num-layers 3: must be an integer"),
        ({"recipe": 5}, "--recipe 5: must be text"),
    ],
)
def test_what_is_no_configuration_is_refused(values: Any, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        RunConfig.from_dict(values)
    assert str(caught.value).startswith(message)


def test_sections_are_frozen_and_field_names_unique() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RunConfig().model.num_layers = 3  # type: ignore[misc]
    names = [field.name for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert len(names) == len(set(names))


def test_a_run_goes_on_in_its_folder_by_whichever_name(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    (tmp_path / "loop").symlink_to("loop")
    for load in (tmp_path / "run", tmp_path / "link", tmp_path / "link/../run", tmp_path / "other/../run"):
        assert CheckpointConfig(save=tmp_path / "run", load=load).goes_on, load
    for load in (tmp_path, tmp_path / "loop", tmp_path / "run/run", None):
        assert not CheckpointConfig(save=tmp_path / "run", load=load).goes_on, load
