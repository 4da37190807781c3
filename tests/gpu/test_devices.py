"""A training step on a device that is not the CPU: torch's meta device refuses tensors that were left behind."""

from dataclasses import replace

import pytest
import torch

from megatron_allattn.config import ModelConfig, OptimizerConfig, RunConfig, TrainingConfig
from megatron_allattn.engine.plain import PlainEngine
from megatron_allattn.kernels.fused import FusedOps
from megatron_allattn.model.attention import BlockContext
from megatron_allattn.model.network import Network
from megatron_allattn.parallel.groups import ALONE, single_process_groups

META = torch.device("meta")
MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    persistent_memory_size=8,
    max_attention_span=128,
    attention_dropout=0.1,
    embedding_dropout=0.1,
)
VARIANTS = {
    "all-attention": MODEL,
    "masked, position values": replace(MODEL, empty_cache="mask", position_values="shared"),
    "fixed span": replace(MODEL, adaptive_span=False),
    "transformer": replace(MODEL, variant="transformer", persistent_memory_size=0, feed_forward_size=64),
}


@pytest.fixture(autouse=True)
def no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device has shapes and types only; the gradient norm is read as a number at the end of a step, and so are
    the scales of Adagrad's steps."""
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: 0.0)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: [0.0] * tensor.numel())


def engine(model: ModelConfig, optimizer: str, dtype: torch.dtype) -> PlainEngine:
    run = RunConfig(
        model=model,
        optimizer=OptimizerConfig(optimizer=optimizer, clip_grad=0.1, weight_decay=0.1),
        training=TrainingConfig(seq_length=16, global_batch_size=4, bf16=dtype == torch.bfloat16),
    )
    with META:
        network = Network(model, 50, ALONE, FusedOps("torch"))
    return PlainEngine(network, run, single_process_groups(), META, dtype, FusedOps("torch"))


def micro_batch(found: PlainEngine, step: int, device: torch.device = META) -> torch.Tensor:
    keys = found._dropout_keys(0, step)
    context = BlockContext(windows=(64, 128), cache=found.slots[0], dropout_keys=keys)
    tokens = torch.zeros(4, 16, dtype=torch.int64, device=device)
    return found._run_micro_batch(tokens, tokens, context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", ["adam", "adagrad"])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_every_tensor_of_a_step_is_on_the_device(model: ModelConfig, optimizer: str, dtype: torch.dtype) -> None:
    found = engine(model, optimizer, dtype)
    for step in (1, 2):
        loss = micro_batch(found, step)
        assert (loss.device.type, loss.dtype, loss.shape) == ("meta", torch.float32, ())
        gradients = [parameter.grad for parameter in found.network.parameters()]
        assert all(gradient is not None and gradient.dtype == dtype for gradient in gradients)
        assert found.update(0.1, step) == 0.0
    assert {found.slots[0].read(layer).dtype for layer in range(2)} == {dtype}
    assert [found.slots[0].read(layer).shape[1] for layer in range(2)] == [32, 32]
    states = [found._state(p, name) for p in found.network.parameters() for name in found.state_names]
    assert {(state.device.type, state.dtype) for state in states} == {("meta", torch.float32)}


def test_a_tensor_on_the_wrong_device_would_be_noticed() -> None:
    found = engine(MODEL, "adam", torch.float32)
    with pytest.raises((RuntimeError, NotImplementedError), match=r"device|meta"):
        micro_batch(found, 1, torch.device("cpu"))
