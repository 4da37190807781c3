"""The floating point operations of a step, from shapes, spans and backend: what `tools/benchmark.py` divides by time.

Counted are matrix products, two operations per multiplication and addition, of the whole network (all tensor-parallel
ranks). Two numbers each: `model` is what the equations need, `executed` what the backend computes, scores made a second
time for backward, ends of tiles, and activation recomputation included. Per layer, with B streams, M block, T = B·M
tokens, D hidden, H heads of size K, S_h the distances that head h sees, N persistent vectors of its softmax:

    forward, model      block     2·T·D·(D + 2·H·K)                   q, k and v
                        cached    4·B·D·K·Σ S_h                       k and v of the positions before the block
                        scores    2·T·K·Σ (2·S_h + N)                 k, u and k'
                        values    2·T·K·Σ (S_h + N)                   v and v'; v + u: Σ (2·S_h + N)
                        out       2·T·D²
    backward, model     twice that; once for `cached`, whose hidden states get no gradient

`blocked` makes scores and `cached` again in backward and sees S_h + T' − 1 positions with a tile of T' rows, where the
equations see S_h. `triton` makes scores again too, those of persistent vectors and their gradients twice; it is counted
without the ends of tiles. `eager` sees the layer's window with every head, M positions more with k and v, and computes
the gradient of the cached hidden states too.

Other parts: variants' persistent vectors 4·T·width·vectors; feed-forward 4·T·D·units; a vocabulary 2·T·D·V; of an
adaptive one 2·n·(D·d + d·V) for the n tokens that meet a table of V rows of width d, plus the head's clusters; backward
twice that. The caches are taken to be as long as spans.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_allattn.config import ModelConfig, Recompute
from megatron_allattn.kernels.band import columns_of, tiling
from megatron_allattn.model.activations import check_cluster_tokens, vocabulary_tables
from megatron_allattn.model.span import window_of_reach


@dataclass(frozen=True)
class Work:
    """Floating point operations in matrix products. model: what the equations need; executed: what is computed."""

    model: int
    executed: int

    def __add__(self, other: "Work") -> "Work":
        return Work(self.model + other.model, self.executed + other.executed)


def step_flops(
    config: ModelConfig,
    vocab_size: int,
    batch: int,
    block: int,
    look_back: Sequence[Sequence[int]],
    backend: str,
    training: bool = True,
    recompute: Recompute = "none",
    cluster_tokens: Sequence[int] = (),
) -> Work:
    """The work of one step over [batch, block] tokens, the optimizer left out.

    Args:
        look_back: how far every head that attends to the context looks, by layer (`look_back` of model/span.py).
        backend: a name of kernels/registry.py.
        training: forward and backward; otherwise forward with targets, as in an evaluation.
        recompute: `--recompute-granularity`.
        cluster_tokens: with an adaptive vocabulary, how many tokens are in each cluster; inputs are counted as targets.

    Raises ValueError: `look_back` or `cluster_tokens` do not fit the model, or the backend is unknown.
    """
    parts = flops_by_part(
        config, vocab_size, batch, block, look_back, backend, training, recompute, cluster_tokens
    ).values()
    return sum(parts, Work(0, 0))


def flops_by_part(
    config: ModelConfig,
    vocab_size: int,
    batch: int,
    block: int,
    look_back: Sequence[Sequence[int]],
    backend: str,
    training: bool = True,
    recompute: Recompute = "none",
    cluster_tokens: Sequence[int] = (),
) -> dict[str, Work]:
    """`step_flops` by part: `embedding`, `block`, `cached`, `attention` (scores and values), `out`, `memory` (of
    variants), `feed-forward`, `output`; the layers' parts are sums over layers."""
    tokens, heads = batch * block, config.num_context_heads
    if len(look_back) != config.num_layers or any(len(layer) != heads for layer in look_back):
        raise ValueError(f"look_back {[len(layer) for layer in look_back]}: {config.num_layers} layers × {heads} heads")
    if backend not in ("eager", "blocked", "triton"):
        raise ValueError(f"backend {backend}: known are eager, blocked, triton")
    parts = _vocabulary(config, vocab_size, tokens, cluster_tokens, training)
    for layer in look_back:
        repeated = _repeated(config, batch, block, layer, backend, recompute if training else "none")
        for name, work in _layer(config, batch, block, layer, backend, training).items():
            parts[name] = parts.get(name, Work(0, 0)) + work + Work(0, repeated.get(name, 0))
    return parts


def layer_flops(
    config: ModelConfig, batch: int, block: int, reach: Sequence[int], backend: str, recompute: Recompute = "none"
) -> Work:
    """Of one layer whose heads look back so far, forward and backward."""
    repeated = _repeated(config, batch, block, reach, backend, recompute)
    work = sum(_layer(config, batch, block, reach, backend, training=True).values(), Work(0, 0))
    return work + Work(0, sum(repeated.values()))


def _repeated(
    config: ModelConfig, batch: int, block: int, reach: Sequence[int], backend: str, recompute: Recompute
) -> dict[str, int]:
    """What is computed a second time of a layer, by part."""
    if recompute == "full":
        again = _layer(config, batch, block, reach, backend, training=False)
        return {name: work.executed for name, work in again.items()}
    if recompute == "none" or backend == "eager":
        return {}
    narrow, D = config.num_context_heads * config.head_size, config.hidden_size
    of_block = 6 * batch * block * D * narrow  # q, k and v
    return {"block": of_block, "cached": 4 * batch * D * config.head_size * sum(reach) if backend == "triton" else 0}


def vocabulary_flops(config: ModelConfig, vocab_size: int, tokens: int) -> dict[str, Work]:
    """`embedding`, if it is adaptive, and `output`, forward and backward, where words are as frequent as they usually
    are: the n-th with a probability of about 1 / n."""
    shares = usual_cluster_tokens(config, vocab_size, tokens)
    return _vocabulary(config, vocab_size, tokens, shares, training=True)


def usual_cluster_tokens(config: ModelConfig, vocab_size: int, tokens: int) -> list[int]:
    """How many of `tokens` are in each cluster of an adaptive vocabulary, where words are as frequent as they usually
    are; of a plain one all of them."""
    edges = [math.log(edge + 1) for edge in (0, *config.cutoffs, vocab_size)]
    upper = [round(tokens * edge / edges[-1]) for edge in edges]
    return [stop - start for start, stop in itertools.pairwise(upper)]


def _product(forward: int, training: bool, executed: int | None = None) -> Work:
    """A product that autograd sees: both factors need a gradient, so there are two more in backward.

    executed: its size in fact, where that differs.
    """
    times = 1 + 2 * training
    return Work(forward * times, (forward if executed is None else executed) * times)


def _layer(
    config: ModelConfig, batch: int, block: int, reach: Sequence[int], backend: str, training: bool
) -> dict[str, Work]:
    """One layer's parts."""
    tokens, D, N = batch * block, config.hidden_size, config.persistent_memory_size
    size = config.head_size
    narrow, split = len(reach) * size, config.num_context_heads != config.num_attention_heads
    queries = D if split or not N or config.variant == "all-attn" else 2 * D  # others project the queries once more
    block_work = _product(2 * tokens * D * (D + 2 * narrow), training, executed=2 * tokens * D * (queries + 2 * narrow))
    joint = N if config.variant == "all-attn" else 0
    parts = {"block": block_work, "out": _product(2 * tokens * D * D, training)}
    parts["cached"], parts["attention"] = _context(config, batch, block, reach, backend, training, joint)
    units = config.feed_forward_size
    if N and not joint:
        heads, width = (1, D) if config.variant == "single-head" else (config.num_attention_heads, size)
        heads = heads - len(reach) if split else heads
        parts["memory"] = _product(4 * tokens * heads * width * N, training)
    if units:
        parts["feed-forward"] = _product(4 * tokens * D * units, training)
    return parts


def _context(
    config: ModelConfig, batch: int, block: int, reach: Sequence[int], backend: str, training: bool, joint: int
) -> tuple[Work, Work]:
    """`cached` and `attention` of the heads that attend to the context, and to `joint` persistent vectors each."""
    tokens, D, shared = batch * block, config.hidden_size, config.position_values == "shared"
    size = config.head_size
    scores, values = sum(2 * s + joint for s in reach), sum((1 + shared) * s + joint for s in reach)
    cached = 4 * batch * D * size * sum(reach)
    needed_cached = cached * (1 + training)
    needed = 2 * tokens * size * (scores + values) * (1 + 2 * training)

    window = window_of_reach(max(reach), config.max_attention_span)
    whole = backend == "eager" or (config.span_normalization == "window" and config.adaptive_span)
    seen = [window if whole else s for s in reach]
    ends, rows = block if backend == "eager" else 0, tokens
    if backend == "blocked":
        count, tile = tiling(block)
        ends, rows, seen = tile - 1, batch * count * tile, [columns_of(s) for s in seen]
    scores = sum(2 * s + ends + joint for s in seen)
    values = sum((1 + shared) * s + ends + joint for s in seen)
    again = {"eager": 0, "blocked": scores, "triton": scores + 2 * joint * len(seen)}[backend] * training
    attention = 2 * rows * size * ((scores + values) * (1 + 2 * training) + again)
    positions = sum(min(s, window) for s in seen)
    made = 4 * batch * D * size * positions * (1 + (1 if backend == "triton" else 2) * training)
    return Work(needed_cached, made), Work(needed, attention)


def _vocabulary(
    config: ModelConfig, vocab_size: int, tokens: int, cluster_tokens: Sequence[int], training: bool
) -> dict[str, Work]:
    """`embedding` and `output`; looking up rows is no product."""
    tables, D = vocabulary_tables(config, vocab_size, 1), config.hidden_size
    if not config.cutoffs:
        return {"output": _product(2 * tokens * D * vocab_size, training)}
    check_cluster_tokens(cluster_tokens, len(tables), tokens)
    clusters = list(zip(cluster_tokens, tables, strict=True))
    embedding = sum(2 * count * D * width for count, (_, width) in clusters)
    met = [(tokens, tables[0]), *clusters[1:]]  # every token takes part in the first softmax
    output = sum(2 * count * width * (D + rows) for count, (rows, width) in met)
    output += 2 * tokens * tables[0][1] * len(config.cutoffs)
    return {"embedding": _product(embedding, training), "output": _product(output, training)}
