"""What the triton backend holds of a layer: predicted = its own allocations, with kernels that do nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_allattn.benchmark.tensor_bytes import profiled_peak
from megatron_allattn.config import ModelConfig
from megatron_allattn.kernels.interface import BlockState, LayerWeights
from megatron_allattn.model.activation_backends import triton_attention
from megatron_allattn.model.activation_shapes import Layer, Shape
from megatron_allattn.model.attention import attention_settings
from megatron_allattn.parallel.random import DropoutKeys

launch = pytest.importorskip("megatron_allattn.kernels.triton_launch", reason="the package triton is not installed")
KERNELS = (
    "position_products",
    "add_positions",
    "position_gradient",
    "forward_rows",
    "backward_rows",
    "edge_gradient",
    "context_gradient",
    "persistent_gradient",
)
SPANS = (40, 130, 700, 1000)


class Nothing:
    """In place of a kernel."""

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda **arguments: None


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("shared", ["none", "shared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vectors", [0, 96, 2048])
def test_allocations(
    selective: bool, shared: str, dtype: torch.dtype, vectors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_allattn.kernels.triton_attention import Triton

    for name in KERNELS:
        monkeypatch.setattr(launch, name, Nothing())
    model = ModelConfig(
        hidden_size=256,
        num_attention_heads=4,
        persistent_memory_size=vectors,
        max_attention_span=1024,
        position_values=shared,  # type: ignore[arg-type]
        attention_dropout=0.1,
    )
    batch, block, size, heads, longest = 2, 128, model.head_size, 4, max(SPANS)
    settings = attention_settings(model)
    if selective:
        settings = type(settings)(**{**settings.__dict__, "keep_projections": False})

    def empty(*sizes: int, grad: bool = True) -> torch.Tensor:
        return torch.zeros(sizes, dtype=dtype, requires_grad=grad)

    inputs = {
        "query": empty(heads * size, 256),
        "key": empty(heads * size, 256),
        "value": empty(heads * size, 256),
        "persistent_key": empty(heads, size, vectors) if vectors else None,
        "persistent_value": empty(heads, vectors, size) if vectors else None,
        "span": empty(heads, 1, 1),
        "position_key": empty(1, size, 1024),
    }
    hidden, cache = empty(batch, block, 256), empty(batch, 1024, 256, grad=False)
    state = BlockState(
        1024,
        1024,
        torch.arange(heads, dtype=torch.int32),
        0,
        DropoutKeys(0, 0, torch.arange(batch, dtype=torch.int32)),
        SPANS,
    )
    backend, outputs = Triton(), []
    gradient = torch.zeros(batch, block, 256, dtype=dtype)

    def forward() -> None:
        outputs.append(backend(hidden, cache, LayerWeights(**inputs), settings, state))

    def backward() -> None:
        torch.autograd.grad(outputs.pop(), [hidden, *(one for one in inputs.values() if one is not None)], gradient)

    element = torch.empty(0, dtype=dtype).itemsize
    held = triton_attention(model, Shape(batch, block, 1, element), Layer(0, 1024, SPANS, 0), selective)
    scaled = 2 * heads * size * vectors  # persistent vectors: here they are given
    kept = profiled_peak(lambda: (forward(), outputs), lambda: torch.zeros(1)) / element
    outputs.clear()
    forwards = profiled_peak(lambda: None, forward) / element
    outputs.clear()
    backwards = profiled_peak(forward, backward) / element
    # the gradient of the output was there before, those of the weights are not the backend's
    del longest
    for name, measured, predicted in (
        ("kept", kept, held.kept - scaled),
        ("forward", forwards, held.forward - scaled),
        ("backward", backwards, held.backward - scaled - batch * block * heads * size),
    ):
        print(f"{name}: predicted {predicted:,.0f}, measured {measured:,.0f}, {predicted / measured - 1:+.1%}")
        assert predicted == pytest.approx(measured, rel=0.1), name
