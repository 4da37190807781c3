"""The model in a checkpoint of the paper's published code: its keys, in its order ↔ logical tensors.

    key_pe                                  position.key                        [1, d_h, L]
    in_emb.weight                           embedding.weight                    [V, d]
    out_emb.{weight,bias}                   output.{weight,bias}                [V, d], [V]
    in_emb.emb_layers.k.weight              embedding.clusterK.weight           [V_k, d_k], adaptive input
    in_emb.emb_projs.k                      embedding.clusterK.projection       [d, d_k]
    out_emb.cluster_proj.{weight,bias}      output.cluster_logits.{weight,bias} [clusters − 1, d], [clusters − 1]
    out_emb.out_layers.k.{weight,bias}      output.clusterK.{weight,bias}       [V_k, d_k], [V_k], adaptive softmax
    out_emb.out_projs.k                     output.clusterK.projection          [d, d_k]
    layers.i.attn.proj_{query,key,val,out}  layers.i.{query,key,value,out}      [d, d]
    layers.i.attn.attn.persistent_memory.*  layers.i.persistent.{key,value}     [H, d_h, N], [H, N, d_h], unscaled
    …adaptive_span._mask.current_val        layers.i.span                       [H, 1, 1], stored twice
    …adaptive_span._mask.mask_template      −L+1 … 0, which follows from L      [L], stored twice
    layers.i.ff.fc1.*, fc2.*                layers.i.ff.in.*, ff.out.*          the transformer baseline
    layers.i.norm1.*, norm2.*               the same                            [d]

A tied adaptive softmax repeats the weights and projections of the adaptive input. The tensors say what the model is,
except the ramp of the span mask, the span loss and the dropout. Nothing is scaled or transposed.
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_allattn.checkpoint.tensors import same_bits
from megatron_allattn.config import ModelConfig, UsageError, usage_error
from megatron_allattn.model.network import logical_tensors

WRAPPER = "module."
_IN_LAYER = re.compile(r"layers\.([0-9]+)\.(attn|norm1|ff|norm2)\.")
TEMPLATE = "mask_template"
_MASK = "adaptive_span._mask"
_GIVE = "give a checkpoint of the paper's published code"


@dataclass(frozen=True)
class Entry:
    """A key of `model`, without the wrapper's prefix, and the logical tensor under it (TEMPLATE for a template)."""

    key: str
    name: str


@dataclass(frozen=True)
class ModelState:
    """What `model` holds. shape: the fields of ModelConfig that its tensors decide; weights: by logical name, in the
    order of the optimizer's numbers; keys: as they stand in the file.
    """

    shape: dict[str, Any]
    vocab_size: int
    weights: dict[str, Tensor]
    keys: list[str]


def entries(config: ModelConfig) -> list[Entry]:
    """The keys of `model` in that code's order."""
    found = [Entry("key_pe", "position.key"), *_vocabulary_entries(config)]
    for layer in range(config.num_layers):
        found += [Entry(f"layers.{layer}.{e.key}", _in_layer(layer, e)) for e in _layer_entries(config)]
    return found


def _in_layer(layer: int, entry: Entry) -> str:
    return entry.name if entry.name == TEMPLATE else f"layers.{layer}.{entry.name}"


def _vocabulary_entries(config: ModelConfig) -> Iterator[Entry]:
    tied = not config.untie_embeddings_and_output_weights
    if not config.cutoffs:
        yield from (Entry("in_emb.weight", "embedding.weight"), Entry("out_emb.weight", "output.weight"))
        yield Entry("out_emb.bias", "output.bias")
        return
    clusters, output = range(len(config.cutoffs) + 1), "embedding" if tied else "output"
    for k in clusters:
        yield Entry(f"in_emb.emb_layers.{k}.weight", f"embedding.cluster{k}.weight")
    for k in clusters:
        yield Entry(f"in_emb.emb_projs.{k}", f"embedding.cluster{k}.projection")
    for part in ("weight", "bias"):
        yield Entry(f"out_emb.cluster_proj.{part}", f"output.cluster_logits.{part}")
    for k in clusters:
        yield Entry(f"out_emb.out_layers.{k}.weight", f"{output}.cluster{k}.weight")
        yield Entry(f"out_emb.out_layers.{k}.bias", f"output.cluster{k}.bias")
    for k in clusters:
        yield Entry(f"out_emb.out_projs.{k}", f"{output}.cluster{k}.projection")


def _layer_entries(config: ModelConfig) -> Iterator[Entry]:
    """Keys and names without `layers.i.`."""

    def mask(owner: str) -> Iterator[Entry]:
        if config.adaptive_span:
            yield Entry(f"{owner}.{_MASK}.current_val", "span")
            yield Entry(f"{owner}.{_MASK}.mask_template", TEMPLATE)

    yield from mask("attn.attn")
    if config.persistent_memory_size:
        memory = "attn.attn.persistent_memory"
        yield from (Entry(f"{memory}.key", "persistent.key"), Entry(f"{memory}.val", "persistent.value"))
        yield from mask(memory)
    for theirs, ours in (("query", "query"), ("out", "out"), ("val", "value"), ("key", "key")):
        yield Entry(f"attn.proj_{theirs}.weight", f"{ours}.weight")
    modules = [("norm1", "norm1")]
    if config.feed_forward_size:
        modules += [("ff.fc1", "ff.in"), ("ff.fc2", "ff.out"), ("norm2", "norm2")]
    for theirs, ours in modules:
        yield from (Entry(f"{theirs}.{part}", f"{ours}.{part}") for part in ("weight", "bias"))


def logical_shapes(config: ModelConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shape of every logical tensor of the model."""
    return {logical.name: logical.shape for logical in logical_tensors(config, vocab_size)}


def mask_template(max_span: int) -> Tensor:
    """The buffer beside every span: −L+1 … 0."""
    return torch.arange(1 - max_span, 1, dtype=torch.float32)


def read_model(state: Any, source: Path) -> ModelState:
    """Take `model` apart. Raises UsageError naming the first key that is missing, unknown or not what it should be."""
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise usage_error("file", source, "its `model` is not a dictionary of named tensors", _GIVE)
    wrapped = any(key.startswith(WRAPPER) for key in state)
    if wrapped and (foreign := [key for key in state if not key.startswith(WRAPPER)]):
        raise usage_error("file", source, f"its `model` has key {foreign[0]} beside others behind {WRAPPER}", _GIVE)
    tensors = {key.removeprefix(WRAPPER) if wrapped else key: value for key, value in state.items()}
    for key, value in tensors.items():
        check_tensor(source, f"model key {key}", value)
    try:
        shape, vocab_size = _infer(tensors)
        config = ModelConfig(**shape)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    expected = entries(config)
    _check_keys(source, tensors, [entry.key for entry in expected])
    shapes = logical_shapes(config, vocab_size)
    template = mask_template(config.max_attention_span)
    weights: dict[str, Tensor] = {}
    by_key = {entry.key: entry for entry in expected}
    for key, tensor in tensors.items():
        name = by_key[key].name
        wanted = shapes.get(name, tuple(template.shape))
        if tuple(tensor.shape) != wanted:
            rule = f"model key {key} has shape {tuple(tensor.shape)}, the others make it {wanted}"
            raise usage_error("file", source, rule, _GIVE)
        if name.endswith(".span"):
            check_range(source, f"model key {key}", tensor, 1)
        of_template = name == TEMPLATE
        same = torch.equal(tensor, template) if of_template else same_bits(tensor, weights.setdefault(name, tensor))
        if not same:
            rule = f"model key {key} is not {'−L+1 … 0' if of_template else 'equal to its other copy'}"
            raise usage_error("file", source, rule, _GIVE)
    return ModelState(shape, vocab_size, weights, list(state))


def check_tensor(source: Path, what: str, value: Any) -> None:
    """UsageError unless it is an ordinary float32 tensor of finite numbers, with every element in memory."""
    ordinary = isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"
    if not ordinary or value.untyped_storage().nbytes() < value.nbytes:
        raise usage_error("file", source, f"{what} is no ordinary tensor", _GIVE)
    if value.dtype != torch.float32:
        raise usage_error("file", source, f"{what} is {value.dtype}, expected torch.float32", "convert it first")
    if not torch.isfinite(value).all():
        raise usage_error("file", source, f"{what} holds NaN or infinity", "take an earlier checkpoint")


def check_range(source: Path, what: str, value: Tensor, highest: float) -> None:
    """UsageError naming the first number that is not in 0 … highest."""
    wrong = value[(value < 0) | (value > highest)]
    if len(wrong):
        wanted = "none below 0" if highest == math.inf else f"numbers from 0 to {highest:g}"
        raise usage_error("file", source, f"{what} holds {wrong[0].item():g}, expected {wanted}", _GIVE)


def _check_keys(source: Path, found: dict[str, Tensor], expected: list[str]) -> None:
    """The keys are those of the model, in its order: the optimizer's numbers follow it.

    In which order a layer has its norms and its feed-forward sublayer does not matter, it is read off the file.
    """
    for what, keys in (("lacks", expected), ("has the unknown", list(found))):
        other = found if what == "lacks" else set(expected)
        if missing := [key for key in keys if key not in other]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise usage_error("file", source, f"its `model` {what} key {missing[0]}{more}", _GIVE)
    layers: dict[str, int] = {}

    def module(key: str) -> tuple[int, int]:
        """The place of a key's module: layers as they come, within one in that code's order."""
        layer, part = (match[1], match[2]) if (match := _IN_LAYER.match(key)) else ("", "attn")
        return layers.setdefault(layer, len(layers)), ("attn", "norm1", "ff", "norm2").index(part)

    for key, place in zip(sorted(found, key=module), expected, strict=True):
        if key != place:
            rule = f"model key {key} stands in the place of {place}, and the optimizer counts parameters in that order"
            raise usage_error("file", source, rule, _GIVE)


def _infer(tensors: dict[str, Tensor]) -> tuple[dict[str, Any], int]:
    """Fields of ModelConfig, and the vocabulary size. Raises UsageError: a tensor that is needed for it is missing."""

    def dims(key: str, ndim: int) -> tuple[int, ...]:
        if key not in tensors:
            raise usage_error("model key", key, "is missing", _GIVE)
        if tensors[key].ndim != ndim or not tensors[key].numel():
            raise usage_error("model key", key, f"has shape {tuple(tensors[key].shape)}, expected {ndim} sizes", _GIVE)
        return tuple(tensors[key].shape)

    def first(suffix: str) -> str | None:
        return next((key for key in tensors if re.fullmatch(r"layers\.[0-9]+\." + re.escape(suffix), key)), None)

    _, head_size, max_span = dims("key_pe", 3)
    hidden_size = dims("layers.0.attn.proj_query.weight", 2)[0]
    if hidden_size % head_size:
        raise usage_error("model key", "key_pe", f"heads of {head_size} do not make {hidden_size}", _GIVE)
    memory, inner = first("attn.attn.persistent_memory.key"), first("ff.fc1.weight")
    shape = {
        "num_layers": _count(tensors, r"layers\.([0-9]+)\."),
        "hidden_size": hidden_size,
        "num_attention_heads": hidden_size // head_size,
        "persistent_memory_size": dims(memory, 3)[2] if memory else 0,
        "max_attention_span": max_span,
        "adaptive_span": any(_MASK in key for key in tensors),
        "variant": "transformer" if inner else "all-attn",
        "feed_forward_size": dims(inner, 2)[0] if inner else 0,
    }
    clusters = _count(tensors, r"in_emb\.emb_layers\.([0-9]+)\.weight")
    if not clusters:
        return shape, dims("in_emb.weight", 2)[0]
    sizes = [dims(f"in_emb.emb_layers.{k}.weight", 2) for k in range(clusters)]
    return shape | _adaptive(tensors, hidden_size, sizes), sum(rows for rows, _ in sizes)


def _count(tensors: dict[str, Tensor], pattern: str) -> int:
    """How many different numbers the keys that begin with the pattern have."""
    return len({match[1] for key in tensors if (match := re.match(pattern, key))})


def _adaptive(tensors: dict[str, Tensor], hidden_size: int, sizes: list[tuple[int, ...]]) -> dict[str, Any]:
    """The fields of an adaptive input and softmax whose clusters have these (rows, widths)."""
    if len(sizes) < 2:
        raise usage_error("model key", "in_emb.emb_layers", "there is one cluster only", "use a plain vocabulary")
    widths = [width for _, width in sizes]
    divisors = (div for div in range(1, hidden_size + 1) if hidden_size // div == widths[1])
    div_value = next((div for div in divisors if [hidden_size // div**k for k in range(len(sizes))] == widths), None)
    if div_value is None:
        rule = f"the clusters' widths {widths} are not {hidden_size} divided by powers of one number"
        raise usage_error("model key", "in_emb.emb_layers", rule, _GIVE)
    starts = [sum(rows for rows, _ in sizes[:k]) for k in range(1, len(sizes))]
    pairs = [(f"in_emb.emb_layers.{k}.weight", f"out_emb.out_layers.{k}.weight") for k in range(len(sizes))]
    pairs += [(f"in_emb.emb_projs.{k}", f"out_emb.out_projs.{k}") for k in range(len(sizes))]
    equal = {b: same_bits(tensors[a], tensors[b]) for a, b in pairs if a in tensors and b in tensors}
    tied = any(equal.values())
    if tied and not all(equal.values()):
        other = next(key for key, value in equal.items() if not value)
        raise usage_error("model key", other, "is not equal to the input's, though other clusters' are", _GIVE)
    return {
        "adaptive_cutoffs": ",".join(map(str, starts)),
        "adaptive_div_value": div_value,
        "untie_embeddings_and_output_weights": not tied,
    }


def write_model(
    config: ModelConfig, read: Callable[[str], Tensor], keys: list[str] | None
) -> tuple[dict[str, Tensor], list[str]]:
    """`model` of that code, and the logical names in the order of the optimizer's numbers.

    read: a logical tensor by name; keys: as a file had them that this model was read from. Raises UsageError: that code
    has no such model.
    """
    _check_expressible(config)
    by_key = {WRAPPER + entry.key: entry for entry in entries(config)}
    state, tensors = {}, {TEMPLATE: mask_template(config.max_attention_span)}
    for key in keys or by_key:
        name = by_key[WRAPPER + key.removeprefix(WRAPPER)].name
        if name not in tensors:
            tensors[name] = read(name)
        state[key] = tensors[name]
    return state, [name for name in tensors if name != TEMPLATE]


def _check_expressible(config: ModelConfig) -> None:
    tied_plain = not config.cutoffs and not config.untie_embeddings_and_output_weights
    for what, value, wrong in (
        ("--variant", config.variant, config.variant not in ("all-attn", "transformer")),
        ("--position-values", config.position_values, config.position_values != "none"),
        ("--empty-cache", config.empty_cache, config.empty_cache != "attend"),
        ("--no-untie-embeddings-and-output-weights", "without --adaptive-cutoffs", tied_plain),
    ):
        if wrong:
            raise usage_error(what, value, "the paper's published code has no such model", "it cannot be converted")
