"""What a session says before training starts."""

import pytest
import torch

from megatron_allattn.config import RunConfig, TrainingConfig
from megatron_allattn.training.session import _pipeline_notes, _precision_notes


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_bfloat16_without_instructions_for_it_is_told(
    monkeypatch: pytest.MonkeyPatch, bf16: bool, supported: bool, device: str
) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: supported)
    run = RunConfig(training=TrainingConfig(bf16=bf16))
    notes = _precision_notes(run, torch.device(device))
    assert [note.partition(":")[0] for note in notes] == (
        ["--bf16"] if bf16 and not supported and device == "cpu" else []
    )


def test_how_long_stages_stand_idle_is_told() -> None:
    """By hand: of 4 + 1 turns of 2 stages one is idle, of 1 + 3 of 4 stages three."""
    assert _pipeline_notes(1, 1, 8) == []
    (few,), (many,) = _pipeline_notes(4, 1, 8), _pipeline_notes(2, 4, 1)
    assert few.startswith("with 1 micro-batch a step the 4 stages stand idle for 75% of it; a smaller --micro-batch-si")
    assert many.startswith("with 4 micro-batches a step the 2 stages stand idle for 20% of it; a larger --global-batch")
