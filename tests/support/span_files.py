"""Files of the form that the paper's published code saves, made by torch modules with the same names and no forward."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEP = 7


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What to build; widths: of the clusters of an adaptive vocabulary, whose sizes are `clusters`."""

    layers: int = 2
    heads: int = 4
    size: int = 32
    span: int = 48
    memory: int = 6
    inner: int = 0
    adaptive: bool = True
    vocabulary: int = 13
    clusters: tuple[int, ...] = ()
    widths: tuple[int, ...] = ()
    tied: bool = False
    optimizer: str = "adagrad"
    order: tuple[str, ...] = ("attn", "norm1", "ff", "norm2")

    @property
    def head(self) -> int:
        return self.size // self.heads


SHAPES = {
    "plain": Shape(),
    "tied": Shape(clusters=(5, 7, 20), widths=(32, 8, 2), tied=True, optimizer="adam"),
    "untied": Shape(clusters=(5, 7), widths=(32, 16), optimizer="adam"),
    "transformer": Shape(memory=0, inner=40),
    "fixed span": Shape(adaptive=False),
    "no memory": Shape(memory=0, layers=1, optimizer="adam"),
}


def module(**children: Any) -> nn.Module:
    """A module with these children, parameters and buffers, in this order."""
    parent = nn.Module()
    for name, child in children.items():
        if isinstance(child, nn.Module):
            parent.add_module(name, child)
        elif isinstance(child, nn.Parameter):
            parent.register_parameter(name, child)
        elif child is not None:
            parent.register_buffer(name, child)
    return parent


def random(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


def linear(inputs: int, outputs: int, *, bias: bool = True) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=bias)


def build(shape: Shape) -> nn.Module:
    """The module, with random weights; both copies of a span, and tied tables, are one parameter."""
    layers = nn.ModuleList(_layer(shape) for _ in range(shape.layers))
    if not shape.clusters:
        embedding, output = nn.Embedding(shape.vocabulary, shape.size), linear(shape.size, shape.vocabulary)
    else:
        embedding, output = _adaptive(shape)
    for parameter in layers.parameters():
        if parameter.shape == (shape.heads, 1, 1):
            parameter.data.uniform_(0, 1)
    return module(key_pe=random(1, shape.head, shape.span), in_emb=embedding, out_emb=output, layers=layers)


def _adaptive(shape: Shape) -> tuple[nn.Module, nn.Module]:
    pairs = list(zip(shape.clusters, shape.widths, strict=True))
    tables = nn.ModuleList(nn.Embedding(rows, width) for rows, width in pairs)
    projections = nn.ParameterList(random(shape.size, width) for _, width in pairs)
    head = linear(shape.size, len(pairs) - 1)
    outputs = nn.ModuleList(linear(width, rows) for rows, width in pairs)
    if shape.tied:
        for output, table in zip(outputs, tables, strict=True):
            output.weight = table.weight
    own = projections if shape.tied else nn.ParameterList(random(shape.size, width) for _, width in pairs)
    embedding = module(emb_layers=tables, emb_projs=projections)
    return embedding, module(cluster_proj=head, out_layers=outputs, out_projs=own)


def _layer(shape: Shape) -> nn.Module:
    template = torch.linspace(1 - shape.span, 0, steps=shape.span)
    span = module(_mask=module(current_val=random(shape.heads, 1, 1), mask_template=template))
    inner = module(adaptive_span=span) if shape.adaptive else module()
    if shape.memory:
        memory = module(
            key=random(shape.heads, shape.head, shape.memory), val=random(shape.heads, shape.memory, shape.head)
        )
        if shape.adaptive:
            memory.add_module("adaptive_span", span)
        inner.add_module("persistent_memory", memory)
    attention = module(attn=inner)
    for name in ("proj_query", "proj_out", "proj_val", "proj_key"):
        attention.add_module(name, linear(shape.size, shape.size, bias=False))
    children = {"attn": attention, "norm1": nn.LayerNorm(shape.size)}
    if shape.inner:
        children["ff"] = module(fc1=linear(shape.size, shape.inner), fc2=linear(shape.inner, shape.size))
        children["norm2"] = nn.LayerNorm(shape.size)
    return module(**{name: children[name] for name in shape.order if name in children})


def content(shape: Shape, seed: int = 0) -> dict[str, Any]:
    """What is saved after STEP updates with random gradients, behind a data-parallel wrapper."""
    torch.manual_seed(seed)
    network = build(shape)
    for parameter in network.parameters():
        if parameter.ndim == 1:
            parameter.data.normal_()
    if shape.optimizer == "adam":
        optimizer: torch.optim.Optimizer = torch.optim.Adam(network.parameters(), lr=2e-4)
    else:
        optimizer = torch.optim.Adagrad(network.parameters(), lr=0.05)
        optimizer.param_groups[0]["grad_clip"] = 0.04
    optimizer.param_groups[0]["initial_lr"] = optimizer.param_groups[0]["lr"]
    for _ in range(STEP):
        for parameter in network.parameters():
            parameter.grad = 0.1 * torch.randn_like(parameter)
        optimizer.step()
        for parameter in network.parameters():
            if parameter.shape == (shape.heads, 1, 1):
                parameter.data.clamp_(0, 1)  # spans, as that code does
    return {
        "iter_no": 3,
        "model": nn.DataParallel(network).state_dict(),
        "logger": {"step": [3, 7], "train_bpc": [2.5, 1 / 3], "val_bpc": [float("inf"), 2.0]},
        "optimizer": optimizer.state_dict(),
        "scheduler_iter": STEP,
    }


def save(path: Path, saved: Any) -> Path:
    torch.save(saved, path)
    return path


def assert_equal(found: Any, expected: Any, where: str = "") -> None:
    """Equal in types of tensors, values, bits, and the order of keys."""
    if isinstance(expected, dict):
        assert isinstance(found, dict) and list(found) == list(expected), where
        for key, value in expected.items():
            assert_equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, Tensor):
        assert isinstance(found, Tensor), where
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert found.numpy().tobytes() == expected.detach().numpy().tobytes(), where
    else:
        assert type(found) is type(expected) and found == expected, where
