"""Adaptive input and softmax against a dense softmax made by hand from the same weights, on one rank and on several."""

import math
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_allattn.parallel import adaptive, cross_entropy
from megatron_allattn.parallel.adaptive import AdaptiveEmbedding, AdaptiveOutput, Clusters
from megatron_allattn.parallel.collectives import all_gather
from megatron_allattn.parallel.cross_entropy import vocabulary_range
from megatron_allattn.parallel.groups import ALONE, Group
from megatron_allattn.parallel.logical import Init, logical_of
from megatron_allattn.parallel.residual import Residual
from tests.support.pool import WorkerPools
from tests.support.trajectories import groups_of

HIDDEN, SHAPE = 16, (3, 30)
# vocabulary, cut-offs, div value: sizes that 2 and 4 divide or not, one tail and three, a last cluster of a single word
VOCABULARIES = [
    (101, (20, 50), 4),
    (96, (16, 32, 64), 2),
    (60, (59,), 2),
    (13, (1, 2, 5), 2),
    (50, (10, 20), 1),
]


def clusters_of(vocabulary: tuple[int, tuple[int, ...], int]) -> Clusters:
    return Clusters(vocabulary[0], vocabulary[1], HIDDEN, vocabulary[2])


def ids_of(clusters: Clusters, seed: int, only: int | None = None) -> torch.Tensor:
    """Token ids in which the first and last id of every cluster occur; or ids of cluster `only`."""
    generator = torch.Generator().manual_seed(seed)
    if only is not None:
        start = clusters.starts[only]
        return torch.randint(start, start + clusters.sizes[only], SHAPE, generator=generator)
    ids = torch.randint(clusters.vocab_size, SHAPE, generator=generator)
    ends = [
        end for start, size in zip(clusters.starts, clusters.sizes, strict=True) for end in (start, start + size - 1)
    ]
    ids[1, : len(ends)] = torch.tensor(ends)
    return ids


def build(clusters: Clusters, group: Group, tied: bool) -> tuple[AdaptiveEmbedding, AdaptiveOutput]:
    """Both modules in float64, with weights that depend on their logical names only."""
    embedding = AdaptiveEmbedding("embedding", clusters, group)
    output = AdaptiveOutput("output", clusters, group, embedding if tied else None)
    module = torch.nn.ModuleList([embedding, output]).double()
    for parameter in module.parameters():
        logical = logical_of(parameter)
        full = Init("normal", 0.5).draw(1, logical.name, logical.shape).double()
        parameter.data.copy_(logical.shard(full, group.rank, group.size))
    return embedding, output


def outer() -> torch.Tensor:
    """Another gradient for every token's loss."""
    return torch.linspace(-1, 2, math.prod(SHAPE), dtype=torch.float64).view(SHAPE)


def _run(rank: int, world_size: int, vocabulary: tuple, tied: bool, only: int | None = None) -> dict:
    """Ids → vectors → losses and log-probabilities over the shards; gradients joined, and the sum over padding."""
    clusters = clusters_of(vocabulary)
    group = groups_of(world_size, 1).tensor if world_size > 1 else ALONE
    embedding, output = build(clusters, group, tied)
    residual = Residual(group)
    hidden = residual.leave(embedding(ids_of(clusters, 1, only)))
    hidden.retain_grad()
    losses = output(residual.enter(hidden), ids_of(clusters, 2, only))
    (losses * outer()).sum().backward()
    log_probs = output(hidden)
    assert not log_probs.requires_grad
    result = {
        "hidden": hidden.detach(),
        "losses": losses.detach(),
        "log-probabilities": log_probs,
        "hidden gradient": hidden.grad,
    }
    padding = 0.0
    for parameter in torch.nn.ModuleList([embedding, output]).parameters():
        logical = logical_of(parameter)
        assert parameter.grad is not None, logical.name
        if logical.shard_dim is None:
            result[logical.name] = parameter.grad
            continue
        start, stop = vocabulary_range(logical.shape[0], group)
        padding += parameter.grad[stop - start :].abs().sum().item()
        result[logical.name] = logical.join(all_gather(parameter.grad, group))
    assert padding == 0.0
    return result


def dense_logits(weights: dict[str, torch.Tensor], clusters: Clusters, hidden: torch.Tensor, tied: bool):
    """Logits [n, V] of a plain softmax that gives the same probabilities: a tail word's is its cluster's logit plus its
    own minus the log of the sum over the cluster."""

    def words(k: int) -> torch.Tensor:
        name = f"{'embedding' if tied else 'output'}.cluster{k}"
        table = weights[f"{name}.weight"] @ weights[f"{name}.projection"].T  # [V_k, d]
        return hidden @ table.T + weights[f"output.cluster{k}.bias"]

    last_first = hidden @ weights[f"{'embedding' if tied else 'output'}.cluster0.projection"]
    last_first = last_first @ weights["output.cluster_logits.weight"].T + weights["output.cluster_logits.bias"]
    columns = [words(0)]
    for k in range(1, len(clusters)):
        own = words(k)
        columns.append(last_first[:, -k, None] + own - own.exp().sum(dim=-1, keepdim=True).log())
    return torch.cat(columns, dim=-1)


def dense(vocabulary: tuple, tied: bool, only: int | None = None) -> dict[str, torch.Tensor]:
    """The same as `_run` from tables of width d and a softmax over the whole vocabulary."""
    clusters = clusters_of(vocabulary)
    modules = build(clusters, ALONE, tied)
    weights = {
        logical_of(parameter).name: parameter.detach().clone().requires_grad_()
        for parameter in torch.nn.ModuleList(modules).parameters()
    }
    table = torch.cat(
        [
            weights[f"embedding.cluster{k}.weight"] @ weights[f"embedding.cluster{k}.projection"].T
            for k in range(len(clusters))
        ]
    )
    hidden = table[ids_of(clusters, 1, only)] * 4.0  # √16
    hidden.retain_grad()
    logits = dense_logits(weights, clusters, hidden.flatten(0, 1), tied)
    losses = F.cross_entropy(logits, ids_of(clusters, 2, only).flatten(), reduction="none").view(SHAPE)
    (losses * outer()).sum().backward()
    return {
        "hidden": hidden.detach(),
        "losses": losses.detach(),
        "log-probabilities": logits.detach().log_softmax(dim=-1).view(*SHAPE, -1),
        "hidden gradient": hidden.grad,
        **{name: weight.grad for name, weight in weights.items()},
    }


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
def test_everything_equals_the_dense_softmax(pools: WorkerPools, vocabulary: tuple, tied: bool) -> None:
    expected = dense(vocabulary, tied)
    assert_same(_run(0, 1, vocabulary, tied), expected)
    for size in (2, 4):
        for found in pools(size).run(_run, vocabulary, tied):
            assert_same(found, expected)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("only", [0, 1, 2])
def test_clusters_that_nothing_hits_get_zero_gradients(pools: WorkerPools, only: int, tied: bool) -> None:
    vocabulary = VOCABULARIES[0]
    expected = dense(vocabulary, tied, only)
    for found in (_run(0, 1, vocabulary, tied, only), *pools(4).run(_run, vocabulary, tied, only)):
        assert_same(found, expected)
        for k in {1, 2} - {only}:
            assert found[f"embedding.cluster{k}.weight"].count_nonzero() == 0
            assert found[f"output.cluster{k}.bias"].count_nonzero() == 0
        assert found["output.cluster_logits.bias"].count_nonzero() == 2  # they are in every token's head


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=str)
def test_probabilities_sum_to_one_in_single_precision(vocabulary: tuple) -> None:
    embedding, output = build(clusters_of(vocabulary), ALONE, tied=False)
    hidden = embedding(ids_of(embedding.clusters, 1)).float()
    log_probs = output.float()(hidden)
    assert log_probs.shape == (*SHAPE, vocabulary[0])
    assert (log_probs.double().exp().sum(dim=-1) - 1).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_softmaxes_of_half_precision_are_taken_in_float32(dtype: torch.dtype) -> None:
    embedding, output = build(clusters_of(VOCABULARIES[0]), ALONE, tied=True)
    targets = ids_of(embedding.clusters, 2)
    exact = output(embedding(ids_of(embedding.clusters, 1)) / 8, targets)
    torch.nn.ModuleList([embedding, output]).to(dtype)
    hidden = embedding(ids_of(embedding.clusters, 1)) / 8
    losses, log_probs = output(hidden, targets), output(hidden)
    assert (hidden.dtype, losses.dtype, log_probs.dtype) == (dtype, torch.float32, torch.float32)
    chosen = -log_probs.gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(losses.detach(), chosen, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(losses.double(), exact, rtol=0.05, atol=0.05)
    assert (log_probs.exp().sum(dim=-1) - 1).abs().max() < 1e-5


def test_only_tokens_that_hit_a_cluster_go_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    embedding, output = build(clusters_of(VOCABULARIES[0]), ALONE, tied=True)
    inputs, targets = (ids_of(embedding.clusters, seed) for seed in (1, 2))
    rows: list[tuple[int, int]] = []

    def count(original, rows_at, columns_at):
        def call(*args):
            rows.append((len(args[rows_at]), args[columns_at].shape[-1]))
            return original(*args)

        return call

    monkeypatch.setattr(cross_entropy, "sharded_logits", count(cross_entropy.sharded_logits, 0, 1))
    monkeypatch.setattr(adaptive.F, "embedding", count(F.embedding, 0, 1))
    output(embedding(inputs), targets)
    hits = [Counter(embedding.cluster_of(ids).flatten().tolist()) for ids in (inputs, targets)]
    assert rows == [
        *[(hits[0][k], width) for k, width in enumerate((16, 4, 1))],
        (90, 16),  # the head's clusters and words, for every token
        (90, 16),
        *[(hits[1][k], width) for k, width in enumerate((16, 4, 1)) if k],
    ]
    assert 0 < hits[1][1] < 90


def _count_collectives(rank: int, world_size: int) -> dict[str, Counter]:
    """Collectives by their kind, and elements, in each part of a step."""
    group = groups_of(world_size, 1).tensor
    (embedding, output), residual = build(clusters_of(VOCABULARIES[1]), group, tied=False), Residual(group)
    counts = {name: Counter() for name in ("embedding", "loss", "backward")}
    original, part = dist.all_reduce, ["embedding"]

    def counting(tensor, op=dist.ReduceOp.SUM, group=None):
        counts[part[0]][f"{'max' if op == dist.ReduceOp.MAX else 'sum'} of {tensor.numel()}"] += 1
        return original(tensor, op=op, group=group)

    dist.all_reduce = counting
    try:
        hidden = residual.leave(embedding(ids_of(embedding.clusters, 1)))
        part[0] = "loss"
        loss = output(residual.enter(hidden), ids_of(embedding.clusters, 2)).sum()
        part[0] = "backward"
        loss.backward()
    finally:
        dist.all_reduce = original
    return counts


def test_the_number_of_collectives(pools: WorkerPools) -> None:
    """One for the embedding, two for the losses whatever the number of clusters; in backward one for the hidden states
    and one for all projections of each module."""
    clusters = clusters_of(VOCABULARIES[1])
    tokens = math.prod(SHAPE)
    tails = sum(
        int(k > 0) for k in torch.bucketize(ids_of(clusters, 2), torch.tensor(clusters.cutoffs), right=True).flatten()
    )
    for counts in pools(2).run(_count_collectives):
        assert counts["embedding"] == {f"sum of {tokens * HIDDEN}": 1}
        assert counts["loss"] == {f"max of {tokens + tails}": 1, f"sum of {2 * (tokens + tails)}": 1}
        assert counts["backward"] == {f"sum of {tokens * HIDDEN}": 1, f"sum of {HIDDEN * (16 + 8 + 4 + 2)}": 2}


def test_tied_modules_share_tables_and_projections_and_nothing_else() -> None:
    embedding, output = build(clusters_of(VOCABULARIES[0]), ALONE, tied=True)
    names = [logical_of(parameter).name for parameter in torch.nn.ModuleList([embedding, output]).parameters()]
    shared = [f"embedding.cluster{k}.{part}" for k in range(3) for part in ("weight", "projection")]
    own = [*(f"output.cluster{k}.bias" for k in range(3)), "output.cluster_logits.weight", "output.cluster_logits.bias"]
    assert sorted(names) == sorted([*shared, *own])
    direct = {logical_of(parameter).name for parameter in output.parameters(recurse=False)}
    assert direct == {*shared, *own}  # ZeRO 3 gathers what a module has itself


def test_shapes_of_a_shard() -> None:
    pair = Group(ranks=(0, 1), rank=1, handle=None)
    clusters = Clusters(101, (20, 50), 16, 4)
    assert (clusters.starts, clusters.sizes, clusters.widths) == ((0, 20, 50), (20, 30, 51), (16, 4, 1))
    assert clusters.own_ids(pair) == [(10, 20), (35, 50), (76, 101)]
    shapes = {
        logical_of(parameter).name: tuple(parameter.shape)
        for parameter in AdaptiveOutput("output", clusters, pair).parameters()
    }
    assert shapes == {
        "output.cluster0.weight": (10, 16),
        "output.cluster0.projection": (16, 16),
        "output.cluster0.bias": (10,),
        "output.cluster1.weight": (15, 4),
        "output.cluster1.projection": (16, 4),
        "output.cluster1.bias": (15,),
        "output.cluster2.weight": (26, 1),
        "output.cluster2.projection": (16, 1),
        "output.cluster2.bias": (26,),
        "output.cluster_logits.weight": (1, 16),
        "output.cluster_logits.bias": (1,),
    }
