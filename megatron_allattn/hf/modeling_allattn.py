"""All-attention language models (Sukhbaatar et al. 2019) for Hugging Face transformers, in PyTorch alone.

A file of megatron_allattn that lies beside exported weights and needs nothing of it. The weights have the names that
they have there, so that model.safetensors is read by both. In every layer a head attends jointly to the positions
before a token, at most L, and to N learned key/value pairs; there is no feed-forward sublayer, but in baselines.

Shapes: B sequences, M new tokens, S positions that are kept and new ones, H heads, K channels of a head, d = H·K,
W positions that a layer looks back.
"""

import math
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_allattn import AllAttentionConfig

CHUNK = 64  # a window grows in steps of this many positions
QUERIES = 256  # positions whose scores are in memory at a time


class Persistent(nn.Module):
    """Learned keys k' and values v' [heads, width, N] and [heads, N, width], scaled when used."""

    def __init__(self, heads: int, width: int, size: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(heads, width, size))
        self.value = nn.Parameter(torch.empty(heads, size, width))

    def scaled(self) -> tuple[Tensor, Tensor]:
        return self.key * math.sqrt(self.key.shape[1]), self.value * math.sqrt(self.value.shape[1])

    def attend(self, query: Tensor, dropout: float) -> Tensor:
        """query [B, M, heads·width] → attention to these alone, of the same shape."""
        key, value = self.scaled()
        q = query.unflatten(-1, (key.shape[0], -1)).transpose(1, 2)
        scores = q @ key / math.sqrt(key.shape[1])
        a = F.dropout(scores.softmax(-1, dtype=_wide(scores)).to(query.dtype), dropout)
        return (a @ value).transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """The baseline's sublayer U·ReLU(V x + b) + c; its weights are `in.weight`, …, as elsewhere."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__()
        self.dropout = config.feed_forward_dropout
        self.add_module("in", nn.Linear(config.hidden_size, config.feed_forward_size))
        self.out = nn.Linear(config.feed_forward_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.dropout(self.get_submodule("in")(x).relu(), self.dropout if self.training else 0.0))


class SoftmaxFeedForward(nn.Module):
    """U·softmax(V x): the persistent vectors of one head as wide as the model."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__()
        self.dropout = config.feed_forward_dropout
        self.persistent = Persistent(1, config.hidden_size, config.feed_forward_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.persistent.attend(x, self.dropout if self.training else 0.0)


class Layer(nn.Module):
    """Attention and its add-norm; in the baselines a feed-forward sublayer and its own."""

    def __init__(self, config: AllAttentionConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        size, heads = config.hidden_size, config.num_attention_heads
        self.head_size, self.variant = size // heads, config.variant
        looking = heads // 2 if config.variant == "head-split" else heads
        self.query = nn.Linear(size, size, bias=False)
        self.key = nn.Linear(size, looking * self.head_size, bias=False)
        self.value = nn.Linear(size, looking * self.head_size, bias=False)
        self.out = nn.Linear(size, size, bias=False)
        if config.adaptive_span:
            self.span = nn.Parameter(torch.zeros(looking, 1, 1))
        if config.persistent_memory_size:
            single = config.variant == "single-head"
            own = (
                (1, size) if single else (heads - looking if config.variant == "head-split" else heads, self.head_size)
            )
            self.persistent = Persistent(*own, config.persistent_memory_size)
        self.norm1 = nn.LayerNorm(size)
        if config.variant in ("transformer", "ff-attn"):
            self.ff = FeedForward(config) if config.variant == "transformer" else SoftmaxFeedForward(config)
            self.norm2 = nn.LayerNorm(size)

    def forward(self, x: Tensor, position: Tensor, valid: Tensor | None, cache: Any) -> Tensor:
        """x [B, M, d]; position u [K, L]; valid [B, S'] of the last tokens, False for padding, None without any."""
        x = self.norm1(x + self.out(self.heads(x, position, valid, cache)))
        return self.norm2(x + self.ff(x)) if hasattr(self, "ff") else x

    def heads(self, x: Tensor, position: Tensor, valid: Tensor | None, cache: Any) -> Tensor:
        """Outputs of all heads, side by side [B, M, d]."""
        query, dropout = self.query(x), self.config.attention_dropout if self.training else 0.0
        if self.variant == "head-split":
            pairs = query.unflatten(-1, (-1, 2, self.head_size))
            context = self.over_context(x, pairs[..., 0, :].flatten(2), position, valid, cache, None)
            learned = self.persistent.attend(pairs[..., 1, :].flatten(2), dropout)
            both = [one.unflatten(-1, (-1, self.head_size)) for one in (context, learned)]
            return torch.stack(both, dim=3).flatten(2)
        joint = self.variant == "all-attn" and hasattr(self, "persistent")
        y = self.over_context(x, query, position, valid, cache, self.persistent if joint else None)
        if self.variant in ("attn-split", "single-head"):
            y = y + self.persistent.attend(query, dropout)
        return y

    def over_context(
        self, x: Tensor, query: Tensor, position: Tensor, valid: Tensor | None, cache: Any, persistent: Any
    ) -> Tensor:
        """Attention to what came before, and in the same softmax to the persistent vectors, if they are given."""
        new = x.shape[1]
        k, v = self.key(x), self.value(x)
        if valid is not None:  # padding is what a position before the text is: zeros
            k, v = k * valid[:, -new:, None].to(k.dtype), v * valid[:, -new:, None].to(v.dtype)
        q, k, v = (one.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for one in (query, k, v))
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        window, seen = self.window(), k.shape[2] - new
        k, v = (one[:, :, max(0, seen - window) :] for one in (k, v))
        missing = max(0, window - seen)
        k, v = (F.pad(one, (0, 0, missing, 0)) for one in (k, v))
        there = None
        if self.config.empty_cache == "mask":
            there = F.pad(x.new_ones(len(x), min(seen, window) + new, dtype=torch.bool), (missing, 0))
            if valid is not None:
                kept = F.pad(valid, (max(0, there.shape[1] - valid.shape[1]), 0))[:, -there.shape[1] :]
                there = there & kept
        parts = [
            self.attend(
                q[:, :, start : start + QUERIES],
                k[:, :, start : start + QUERIES + window],
                v[:, :, start : start + QUERIES + window],
                position[:, -window:],
                None if there is None else there[:, start : start + QUERIES + window],
                persistent,
            )
            for start in range(0, new, QUERIES)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2).flatten(2)

    def window(self) -> int:
        """W."""
        longest, ramp = self.config.max_attention_span, self.config.span_ramp
        if not self.config.adaptive_span:
            return longest
        reach = min(longest, math.ceil(self.span.max().item() * longest) + ramp)
        return longest - CHUNK * ((longest - reach) // CHUNK)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, there: Tensor | None, persistent: Persistent | None
    ) -> Tensor:
        """q [B, H, M, K]; k, v [B, H, W + M, K]: query m sees positions m … m + W − 1 → outputs [B, H, M, K]."""
        window, wide = position.shape[1], _wide(q)
        scores = _to_distance(q @ k.transpose(-1, -2), window) + q @ position
        if persistent is not None:
            keys, values = persistent.scaled()
            scores = torch.cat([scores, q @ keys], dim=-1)
        scores = (scores / math.sqrt(q.shape[-1])).to(wide)
        empty = None
        if there is not None:
            seen = there.unfold(1, window, 1)[:, : q.shape[2]]
            empty = F.pad(~seen, (0, scores.shape[-1] - window), value=False)[:, None]
        a = self.weights(scores, window, empty)
        a = F.dropout(a, self.config.attention_dropout if self.training else 0.0).to(q.dtype)
        y = _from_distance(a[..., :window]) @ v
        if self.config.position_values == "shared":
            y = y + a[..., :window] @ position.t()
        return y if persistent is None else y + a[..., window:] @ values

    def weights(self, scores: Tensor, window: int, empty: Tensor | None) -> Tensor:
        """Attention weights [B, H, M, W + N] that sum to 1; empty: where there is nothing to attend to."""
        if not self.config.adaptive_span:
            return _softmax(scores, empty)
        distances = torch.arange(window, 0, -1, device=scores.device, dtype=scores.dtype)
        ramp, longest = self.config.span_ramp, self.config.max_attention_span
        mask = ((ramp + 1 - distances + self.span.to(scores.dtype) * longest) / ramp).clamp(0, 1)
        if self.config.span_normalization == "window":
            a = _softmax(scores, empty)
            a = torch.cat([a[..., :window] * mask, a[..., window:]], dim=-1)
            return a / (a.sum(-1, keepdim=True) + 1e-8)
        hidden = mask == 0
        log_mask = mask.masked_fill(hidden, 1.0).log().masked_fill(hidden, -torch.inf)
        return _softmax(torch.cat([scores[..., :window] + log_mask, scores[..., window:]], dim=-1), empty)


class AdaptiveTables(nn.Module):
    """Of every cluster k a table [V_k, d_k] and a projection [d, d_k]."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__()
        self.bounds = [0, *(config.adaptive_cutoffs or []), config.vocab_size]
        for k, (start, stop) in enumerate(pairwise(self.bounds)):
            width = config.hidden_size // config.adaptive_div_value**k
            cluster = nn.Module()
            cluster.weight = nn.Parameter(torch.empty(stop - start, width))
            cluster.projection = nn.Parameter(torch.empty(config.hidden_size, width))
            self.add_module(f"cluster{k}", cluster)

    def cluster(self, k: int) -> Any:
        return self.get_submodule(f"cluster{k}")


class AdaptiveEmbedding(AdaptiveTables):
    def forward(self, ids: Tensor) -> Tensor:
        """Ids [B, M] → vectors [B, M, d]."""
        cluster = torch.bucketize(ids, torch.tensor(self.bounds[1:-1], device=ids.device), right=True)
        first = self.cluster(0)
        vectors = first.weight.new_zeros(*ids.shape, first.projection.shape[0])
        for k, start in enumerate(self.bounds[:-1]):
            own = cluster == k
            one = self.cluster(k)
            vectors[own] = F.linear(F.embedding(ids[own] - start, one.weight), one.projection)
        return vectors * math.sqrt(vectors.shape[-1])


class AdaptiveOutput(nn.Module):
    """Hidden states → log-probabilities: words of the first cluster and the other clusters in one softmax, their words
    in one each. tables: None where they are shared with the embedding."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__()
        tables = AdaptiveTables(config)
        self.bounds = tables.bounds
        for k, (start, stop) in enumerate(pairwise(self.bounds)):
            cluster = tables.cluster(k) if config.untie_embeddings_and_output_weights else nn.Module()
            cluster.bias = nn.Parameter(torch.empty(stop - start))
            self.add_module(f"cluster{k}", cluster)
        self.cluster_logits = nn.Linear(config.hidden_size, len(self.bounds) - 2)

    def forward(self, hidden: Tensor, tables: Any) -> Tensor:
        tails = len(self.bounds) - 2

        def words(k: int) -> Tensor:
            table: Any = tables.get_submodule(f"cluster{k}")
            own: Any = self.get_submodule(f"cluster{k}")
            return F.linear(F.linear(hidden, table.projection.t()), table.weight, own.bias)

        projected = F.linear(hidden, tables.get_submodule("cluster0").projection.t())
        head = torch.cat([words(0), self.cluster_logits(projected)], dim=-1)
        head = head.log_softmax(-1, dtype=_wide(head))
        parts = [head[..., : self.bounds[1]]]
        for k in range(1, tails + 1):
            inside = words(k)
            parts.append(inside.log_softmax(-1, dtype=_wide(inside)) + head[..., -k, None])
        return torch.cat(parts, dim=-1)


class PlainOutput(nn.Module):
    """A bias, and a table of its own unless the embedding's is used."""

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__()
        if config.untie_embeddings_and_output_weights:
            self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.bias = nn.Parameter(torch.empty(config.vocab_size))

    def forward(self, hidden: Tensor, tables: Any) -> Tensor:
        return F.linear(hidden, tables.weight, self.bias)


class Position(nn.Module):
    """u [1, K, L], one table for all layers; column j belongs to the distance L − j."""

    def __init__(self, head_size: int, max_span: int) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.empty(1, head_size, max_span))


class AllAttentionForCausalLM(PreTrainedModel, GenerationMixin):
    """The language model. Batches of unequal prompts are padded on the left, with an attention mask."""

    config_class = AllAttentionConfig
    base_model_prefix = ""
    _no_split_modules = ["Layer"]  # noqa: RUF012 (as the base class has it)

    def __init__(self, config: AllAttentionConfig) -> None:
        super().__init__(config)
        size, adaptive = config.hidden_size, bool(config.adaptive_cutoffs)
        self.embedding = AdaptiveEmbedding(config) if adaptive else nn.Embedding(config.vocab_size, size)
        self.position = Position(size // config.num_attention_heads, config.max_attention_span)
        self.layers = nn.ModuleList(Layer(config, index) for index in range(config.num_layers))
        self.output = AdaptiveOutput(config) if adaptive else PlainOutput(config)
        tied = not config.untie_embeddings_and_output_weights
        self.embedding_scale = math.sqrt(size) if tied and not adaptive else 1.0
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights come from a checkpoint; a model without one starts as pretrain.py's do, from another generator."""
        size = self.config.hidden_size
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, nn.LayerNorm):
                parameter.data.fill_(1.0 if name == "weight" else 0.0)
            elif isinstance(module, Persistent):
                parameter.data.normal_(0.0, 1.0 / math.sqrt(parameter.shape[1]))
            elif isinstance(module, Layer):
                parameter.data.zero_()
            elif isinstance(module, (nn.Embedding, Position)):
                parameter.data.normal_(0.0, 1.0 / self.embedding_scale if isinstance(module, nn.Embedding) else 1.0)
            else:
                width = parameter.shape[-1] if parameter.dim() > 1 else size
                parameter.data.uniform_(-1.0 / math.sqrt(width), 1.0 / math.sqrt(width))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> None:
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **others: Any,
    ) -> CausalLMOutputWithPast:
        """Ids [B, M] → logits [B, M, V] (log-probabilities with an adaptive softmax), of the last ones if asked.

        attention_mask [B, S]: 0 for padding, on the left; cache, or past_key_values as older transformers call it: what
        a call before has returned; labels [B, M]: ids, shifted in here, −100 for none; their loss is a mean over them,
        or, where num_items_in_batch is among the others (as of a Trainer that accumulates), their sum over that number.
        """
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        valid = None if attention_mask is None or bool(attention_mask.all()) else attention_mask.bool()
        hidden = self._dropout(self.embedding(input_ids) * self.embedding_scale)
        position = self.position.key[0]
        for layer in self.layers:
            hidden = layer(hidden, position, valid, cache)
        hidden = self._dropout(hidden)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) and logits_to_keep else slice(None)
        own = self.config.untie_embeddings_and_output_weights
        logits = self.output(hidden[:, kept], self.output if own else self.embedding)
        loss = None
        if labels is not None:
            assert not logits_to_keep, "labels need all logits"
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **others)
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})

    def _dropout(self, hidden: Tensor) -> Tensor:
        return F.dropout(hidden, self.config.embedding_dropout if self.training else 0.0)


_CACHE = "cache" if "cache" in CausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


def _wide(x: Tensor) -> torch.dtype:
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _softmax(scores: Tensor, empty: Tensor | None) -> Tensor:
    """Softmax over the last dimension; zero where `empty`, also in a row that is all empty."""
    if empty is None:
        return scores.softmax(-1)
    return scores.masked_fill(empty, torch.finfo(scores.dtype).min).softmax(-1).masked_fill(empty, 0.0)


def _to_distance(scores: Tensor, window: int) -> Tensor:
    """[…, M, W + M] by position → […, M, W] by distance W … 1: row m keeps columns m … m + W − 1."""
    rows = scores.shape[-2]
    return F.pad(scores.flatten(-2), (0, rows)).unflatten(-1, (rows, window + rows + 1))[..., :window]


def _from_distance(a: Tensor) -> Tensor:
    """The inverse of `_to_distance`, zero elsewhere: […, M, W + M]."""
    rows, window = a.shape[-2:]
    return F.pad(a, (0, rows + 1)).flatten(-2)[..., :-rows].unflatten(-1, (rows, window + rows))
