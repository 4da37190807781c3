"""A standard transformer of ours → an all-attention network with its feed-forward sublayers as persistent vectors.

    FF(x)  = U ReLU(V x + b) + c                         f units in a sublayer of its own, after the attention
    PV(x)  = Σ_h W_o^h Σ_i a^h_i √N v'^h_i ,  a^h_i ∝ exp(q^h · k'^h_i) ,  q = W_q x         beside the context

(equations 5 and 9 to 13 of the paper.) A unit becomes one vector of every head, N = f: its row of V the keys, its
column of U the values, each in the coordinates of the heads and cut over them,

    W_qᵀ [k'^1 … k'^H]_i = V_i        so that Σ_h q^h · k'^h_i is the unit's V_i · x
    W_o  [v'^1 … v'^H]_i = U_i / √N   so that equal weights in all heads add up to U_i

by least squares. There are as many numbers then as before. What has no place is left out: b and c, and one of the two
norms; the layer keeps the one behind it, norm2. A softmax over all units and the context, in each head apart, is not a
ReLU of each unit; so the loss is higher at first, and training goes on from there (docs/warm_start.md).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from megatron_allattn.checkpoint.conversion import SavedRun, Tensors, converted_state, read_run, write_run
from megatron_allattn.checkpoint.progress import Progress
from megatron_allattn.checkpoint.tensors import TensorReader, info_of
from megatron_allattn.config import ModelConfig, RunConfig, usage_error

FORMAT = "ff-transformer"
SMALLEST = 1e-4  # of the largest singular value: directions below it, in which heads see next to nothing, stay empty


def read(source: Path, output: Path) -> RunConfig:
    """Make the run folder `output`, at step 0, of a transformer's run or step folder; the new run's configuration.

    Raises UsageError: it is no such model; StorageError.
    """
    saved = read_run(source)
    model = all_attention(saved)
    run = replace(saved.run, model=model, recipe=None)
    weights = Tensors([info_of(name, tensor) for name, tensor in _meta(saved, model)], _Reader(saved.weights, model))
    state = saved.state
    own = (state["vocab_size"], state["tokenizer"], state["tokenizer_sha256"])
    told = converted_state(run, Progress(), *own, {"format": FORMAT, "step": state["step"]})
    write_run(source, output, run, 0, told, weights, Tensors.of({}))
    return run


def all_attention(saved: SavedRun) -> ModelConfig:
    """The model that a transformer becomes. Raises UsageError."""
    model = saved.run.model
    if model.variant != "transformer":
        rule = f"is of variant {model.variant}, which has no feed-forward sublayers with a ReLU"
        raise usage_error("file", saved.step_folder, rule, "give a run of --variant transformer")
    return replace(
        model,
        variant="all-attn",
        persistent_memory_size=model.feed_forward_size,
        feed_forward_size=0,
        feed_forward_dropout=0.0,
    )


def vectors(query: Tensor, out: Tensor, inner: Tensor, outer: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """Keys [H, K, N] and values [H, N, K] for W_q, W_o [D, D], V [F, D] and U [D, F], with N = F."""
    size = inner.shape[0]
    keys = _solve(query.T, inner.T)  # [D, F]
    values = _solve(out, outer) / math.sqrt(size)
    return keys.unflatten(0, (num_heads, -1)), values.T.unflatten(1, (num_heads, -1)).transpose(0, 1)


def _solve(matrix: Tensor, right: Tensor) -> Tensor:
    """The smallest x with matrix · x nearest to `right`, in float64."""
    return torch.linalg.pinv(matrix.double(), rtol=SMALLEST) @ right.double()


def _meta(saved: SavedRun, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """The new weights by name, in the order of the old ones, without their values."""
    heads, count = model.num_attention_heads, model.persistent_memory_size
    for name, info in saved.weights.infos.items():
        layer, _, rest = name.partition(".ff.")
        if rest == "in.weight":
            yield f"{layer}.persistent.key", torch.empty((heads, model.head_size, count), device="meta")
            yield f"{layer}.persistent.value", torch.empty((heads, count, model.head_size), device="meta")
        elif not rest and ".norm2." not in name:
            yield name, torch.empty(info.shape, device="meta")


class _Reader:
    """The new weights' values, of a layer's old ones at a time."""

    def __init__(self, weights: TensorReader, model: ModelConfig) -> None:
        self._weights, self._model = weights, model

    def __call__(self, name: str) -> Tensor:
        layer, _, kind = name.partition(".persistent.")
        if not kind:
            return self._weights.read(name.replace(".norm1.", ".norm2."))
        parts = (f"{layer}.{part}.weight" for part in ("query", "out", "ff.in", "ff.out"))
        query, out, inner, outer = map(self._weights.read, parts)
        key, value = vectors(query, out, inner, outer, self._model.num_attention_heads)
        return (key if kind == "key" else value).float().contiguous()
