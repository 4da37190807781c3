"""What a session says before training starts."""

import pytest
import torch

from megatron_allattn.config import RunConfig, TrainingConfig
from megatron_allattn.training.session import _precision_notes


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
